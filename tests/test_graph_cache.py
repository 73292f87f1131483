"""One pool for all graphs: a new one after a failed capture and where the last graph is gone; a capture is always ended."""

import gc
from contextlib import nullcontext

import pytest
import torch

from trimtab.runtime import capturing
from trimtab.runtime.graph_cache import GraphCache


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
    monkeypatch.setattr(capturing, "_streams", {})
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
