"""One pool for all graphs: a new one after a failed capture and where the last graph is gone; a capture is always ended."""

import gc
import threading
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch

from trimtab.engine.cuda import capture_stream as capturing
from trimtab.engine.memory.graph_cache import GraphCache

CUDA = torch.device("cuda", 0)


@pytest.fixture
def cuda(monkeypatch):
    """Return what was done, in order, with CUDA's part played by a stand-in."""
    done = []

    class Graph:
        def capture_begin(self, *, pool, capture_error_mode):
            done.append(("begin", pool, capture_error_mode))

        def capture_end(self):
            done.append("end")

    pools = iter("abcdefgh")
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: next(pools))
    monkeypatch.setattr(torch.cuda, "stream", lambda side: nullcontext())
    return done


def begun(done):
    return [one[1] for one in done if one != "end"]


def test_graphs_share_a_pool_for_as_long_as_one_of_them_lives(cuda):
    graphs = GraphCache()
    graph, output = graphs.record(None, lambda: 5)
    assert output == 5 and cuda == [("begin", "a", "thread_local"), "end"]
    graphs["one",] = graph
    graphs.record(None, lambda: None)
    assert begun(cuda) == ["a", "a"]
    graphs.popitem(last=False)
    graphs.record(None, lambda: None)
    assert begun(cuda) == ["a", "a", "b"]


def test_a_capture_that_fails_is_ended_and_its_pool_is_forgotten(cuda):
    graphs = GraphCache()
    graphs["one",] = graphs.record(None, lambda: None)[0]

    def fail():
        raise RuntimeError("operation not permitted when stream is capturing")

    with pytest.raises(RuntimeError, match="not permitted"):
        graphs.record(None, fail)
    assert cuda[-1] == "end"
    graphs.forget_pool()
    graphs.record(None, lambda: None)
    assert begun(cuda) == ["a", "a", "b"]


@pytest.mark.parametrize("where", ["capture_begin", "run", "capture_end"])
def test_the_allocator_is_told_that_a_capture_which_fails_is_over(cuda, monkeypatch, where):
    """torch 2.6 to 2.12 do not tell it (pytorch/pytorch#180395), and `torch.cuda.empty_cache` then never works again."""

    def fail(*args, **kwargs):
        raise RuntimeError("operation not permitted when stream is capturing")

    def told(device, pool):
        cuda.append(("over", device, pool))
        raise RuntimeError("not currently recording to this pool")  # torch says so where it knows already

    monkeypatch.setattr(torch._C, "_cuda_endAllocateToPool", told, raising=False)
    if where != "run":
        monkeypatch.setattr(torch.cuda.CUDAGraph, where, fail)
    graphs, side = GraphCache(), SimpleNamespace(device=torch.device("cuda", 1))
    with pytest.raises(RuntimeError, match="not permitted"):
        graphs.record(side, fail if where == "run" else lambda: None)
    assert cuda[-1] == ("over", 1, "a")
    monkeypatch.undo()


def test_a_thread_that_waits_for_the_device_waits_for_a_capture_first(monkeypatch):
    done, begun, may_end = [], threading.Event(), threading.Event()
    stream = SimpleNamespace(wait_stream=lambda other: None)
    streams = capturing.CaptureStreams()
    monkeypatch.setattr(capturing, "of_this_process", lambda: streams)
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: stream)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: stream)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: done.append("waited"))

    def capture():
        with capturing.side_stream(CUDA):
            begun.set()
            may_end.wait(10)
            done.append("captured")

    threads = [threading.Thread(target=capture), threading.Thread(target=capturing.wait_for_all, args=(CUDA,))]
    threads[0].start()
    assert begun.wait(10)
    threads[1].start()
    threads[1].join(0.2)
    may_end.set()
    for thread in threads:
        thread.join(10)
    assert done == ["captured", "waited"]
    capturing.wait_for_all(torch.device("cpu"))
    assert len(done) == 2


def test_the_graph_used_longest_ago_goes_first():
    graphs = GraphCache()
    graphs.update({("one",): 1, ("two",): 2})
    graphs.move_to_end(("one",))
    assert graphs.popitem(last=False) == (("two",), 2)


def test_nothing_is_collected_while_a_graph_is_captured(monkeypatch):
    class Stream:
        def __init__(self, device):
            pass

        def wait_stream(self, other):
            pass

    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: None)
    streams = capturing.CaptureStreams()
    monkeypatch.setattr(capturing, "of_this_process", lambda: streams)
    ended = []

    class Node:
        def __del__(self):
            ended.append(self)

    def garbage():
        for _ in range(20_000):  # many times the threshold of the youngest generation
            node = Node()
            node.itself = node
        return len(ended)

    assert garbage(), "the collector runs by itself"
    ended.clear()
    with capturing.side_stream("cuda:0"), capturing.side_stream("cuda:0"):
        assert garbage() == 0
    assert gc.isenabled()
    gc.collect()
    with pytest.raises(RuntimeError, match="refused"), capturing.side_stream("cuda:0"):
        raise RuntimeError("refused")
    assert gc.isenabled()
