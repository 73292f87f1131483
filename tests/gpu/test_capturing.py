"""A capture lasts although garbage that holds CUDA's own objects lies around: nothing is collected in the middle of it."""

import gc

import pytest
import torch

from trimtab.engine.cuda.nvrtc import side_stream
from trimtab.engine.memory.graph_cache import GraphCache
from trimtab.engine.tiers.reader import HostMemory

DEVICE = torch.device("cuda")


class Knot:
    """Garbage that only the collector ends, with a captured graph and page-locked memory in it."""

    def __init__(self, graphs, values):
        self.itself, self.memory = self, HostMemory(2**21, pinned=True)
        with side_stream(DEVICE) as side:
            torch.cuda.synchronize()
            self.graph, self.output = graphs.record(side, lambda: values + 1)


def test_a_capture_lasts_with_garbage_around():
    graphs, values = GraphCache(), torch.ones(16, device=DEVICE)
    Knot(GraphCache(), values)

    def run():
        total = values
        for _ in range(2000):  # makes enough objects for the collector to begin, were it on
            total = total + 1
            [{} for _ in range(20)]
        return total

    before = gc.get_threshold()
    gc.set_threshold(50, 1, 1)
    try:
        with side_stream(DEVICE) as side:
            torch.cuda.synchronize()
            graph, output = graphs.record(side, run)
    finally:
        gc.set_threshold(*before)
    graph.replay()
    torch.cuda.synchronize()
    assert output.tolist() == [2001.0] * 16


@pytest.mark.parametrize("broken", ["asks the device", "raises"])
def test_after_a_capture_that_fails_memory_is_given_back_and_captures_succeed(broken):
    values = torch.ones(16, device=DEVICE)

    def fail():
        total = values + 1
        if broken == "raises":
            raise ValueError("in the middle")
        return total.sum().item()  # waits for the device, which ends the capture

    graphs = GraphCache()
    for _ in range(2):
        with side_stream(DEVICE) as side:
            torch.cuda.synchronize()
            with pytest.raises((RuntimeError, ValueError)):
                graphs.record(side, fail)
        graphs.forget_pool()
        torch.cuda.empty_cache()
        torch.zeros(1, device=DEVICE).item()
    with side_stream(DEVICE) as side:
        torch.cuda.synchronize()
        graph, output = graphs.record(side, lambda: values + 2)
    graph.replay()
    assert output.tolist() == [3.0] * 16
    torch.cuda.empty_cache()
