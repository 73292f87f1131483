"""One pool for all graphs, a capture that is always ended, and a cache that captures, checks, replays and drops for all owners."""

import gc
import threading
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace

import pytest
import torch

from trimtab.engine.cuda import nvrtc
from trimtab.engine.memory import graph_cache
from trimtab.engine.memory.graph_cache import Body, GraphCache, Inputs, Policy
from trimtab.errors import DeviceError, RequestError

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
    del graph, graphs["one",]
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
    for _ in range(2):  # neither is kept: a pool ends with its own last graph, whatever is left in others
        graphs.record(None, lambda: None)
    assert begun(cuda) == ["a", "a", "b", "c"]


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
    streams = nvrtc.CaptureStreams()
    monkeypatch.setattr(nvrtc, "of_this_process", lambda: streams)
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: stream)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: stream)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: done.append("waited"))

    def capture():
        with nvrtc.side_stream(CUDA):
            begun.set()
            may_end.wait(10)
            done.append("captured")

    threads = [threading.Thread(target=capture), threading.Thread(target=nvrtc.wait_for_all, args=(CUDA,))]
    threads[0].start()
    assert begun.wait(10)
    threads[1].start()
    threads[1].join(0.2)
    may_end.set()
    for thread in threads:
        thread.join(10)
    assert done == ["captured", "waited"]
    nvrtc.wait_for_all(torch.device("cpu"))
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
    streams = nvrtc.CaptureStreams()
    monkeypatch.setattr(nvrtc, "of_this_process", lambda: streams)
    ended = []

    class Node:
        def __del__(self):
            ended.append(self)

    def garbage():
        for _ in range(2 * gc.get_threshold()[0]):
            node = Node()
            node.itself = node
        return len(ended)

    assert garbage(), "the collector runs by itself"
    ended.clear()
    with nvrtc.side_stream("cuda:0"), nvrtc.side_stream("cuda:0"):
        assert garbage() == 0
    assert gc.isenabled()
    gc.collect()
    with pytest.raises(RuntimeError, match="refused"), nvrtc.side_stream("cuda:0"):
        raise RuntimeError("refused")
    assert gc.isenabled()


# A pass that adds 1 to a state and gives twice what it read ---------------------------------------------------------------


class Pass:
    """state: what it overwrites. done: what was called, in order. wrong: replays give other results."""

    def __init__(self, monkeypatch, *, wrong=False):
        self.state, self.done, self.failures, self.wrong = torch.zeros(1), [], [], wrong
        self.model = SimpleNamespace(device=torch.device("cpu"), plan=None)
        self.body = Body(self.run, lambda: [*self.run()], kept=lambda: "kept", serial=7)
        self.inputs = Inputs(lambda: self.done.append("load"), lambda: [(self.state, self.state.clone())])
        monkeypatch.setattr(GraphCache, "_recorded", self.recorded)

    def run(self):
        self.done.append("run")
        self.state += 1
        return [self.state * 2]

    def recorded(self, body, before, order, policy):
        expected = body.first()
        graph_cache.restore(before)
        outputs = [torch.zeros(1)]
        order += ["a piece"] if policy.is_trial else []

        def replay():
            (made,) = self.run()
            outputs[0].copy_(made + 1 if self.wrong else made)

        return SimpleNamespace(replay=replay), outputs, expected

    def policy(self, **options):
        return Policy(self.model, "a pass", self.failures.append, **options)


def test_the_first_replay_is_the_pass_or_a_trial(monkeypatch):
    for is_trial, runs in ((False, 2), (True, 4)):  # before, replayed; or twice for copied layers, and the pass
        graphs, one = GraphCache(), Pass(monkeypatch)
        (output,) = graphs.run(("key",), one.body, one.inputs, one.policy(is_trial=is_trial))
        assert (output.item(), one.state.item()) == (2, 1) and one.done == ["load", *["run"] * runs]
        captured = graphs["key",]
        assert (captured.kept, captured.serial, graphs.captures) == ("kept", 7, 1)
        (output,) = graphs.run(("key",), one.body, one.inputs, one.policy(is_trial=is_trial))
        assert (output.item(), one.state.item()) == (4, 2) and one.done[1 + runs :] == ["load", "run"]


def test_a_capture_that_fails_changes_nothing_and_says_why(monkeypatch):
    """A step whose replay wrote other tokens would otherwise be computed from these."""
    graphs, one, forgotten = GraphCache(), Pass(monkeypatch, wrong=True), []
    policy = one.policy(is_trial=True, forget=lambda: forgotten.append(True))
    assert graphs.run(("key",), one.body, one.inputs, policy) is None
    assert one.state.item() == 0 and not graphs and graphs.captures == 0 and forgotten == [True]
    assert one.failures == [
        "capturing failed: RuntimeError: a replay's results differ by up to 1 from the pass it was captured from"
    ]
    refusal = RequestError("no such adapter", field="adapter")
    monkeypatch.setattr(graph_cache, "memory_error", lambda exc, *_: DeviceError(str(exc), device="cpu"))
    for error in (refusal, torch.OutOfMemoryError("CUDA out of memory")):

        def refused(error=error):
            one.state += 1
            raise error

        with pytest.raises(RequestError if error is refusal else DeviceError) as caught:
            graphs.run(("key",), Body(refused, refused), one.inputs, policy)
        assert (caught.value is refusal) == (error is refusal) and len(one.failures) == 1 and one.state.item() == 0


def test_a_capture_whose_end_fails_is_not_kept_and_an_owner_without_room_captures_nothing(monkeypatch):
    graphs, one = GraphCache(), Pass(monkeypatch)

    @contextmanager
    def failing():
        yield
        raise RuntimeError("the device is busy")

    assert graphs.run(("key",), one.body, one.inputs, one.policy(capturing=failing)) is None
    assert not graphs and graphs.captures == 0 and one.failures == ["capturing failed: RuntimeError: the device is busy"]
    assert graphs.run(("key",), one.body, one.inputs, one.policy(has_room=lambda: False)) is None and not graphs

    def broken(key):
        raise KeyError(key)

    with pytest.raises(KeyError):
        graphs.run(("key",), one.body, one.inputs, one.policy(may_capture=broken))
    assert len(one.failures) == 1


def test_a_key_is_captured_where_the_owner_lets_it_and_the_least_used_goes(monkeypatch):
    graphs, one = GraphCache(), Pass(monkeypatch)
    assert graphs.run(("no",), one.body, one.inputs, one.policy(may_capture=lambda key: key != ("no",))) is None
    assert one.done == [] and not graphs
    for key in ("a", "b", "a", "c"):
        assert graphs.run((key,), one.body, one.inputs, one.policy(most=lambda: 2)) is not None
    assert list(graphs) == [("a",), ("c",)]
    graphs.drop(lambda key, captured: key == ("a",) and captured.serial == 7)
    assert list(graphs) == [("c",)]


def test_without_captures_a_replay_runs_the_body_into_the_same_outputs(monkeypatch):
    graphs, one, outputs = GraphCache(), Pass(monkeypatch), [torch.zeros(1)]
    body = Body(one.run, lambda: outputs, lambda results: outputs)
    for wanted in (0, 2, 4):
        found = graphs.run(("key",), body, one.inputs, one.policy(is_static=True))
        assert list(map(id, found)) == list(map(id, outputs)) and outputs[0].item() == wanted


@pytest.mark.parametrize("frees", [False, True])
def test_the_calls_of_a_capture_come_in_their_order(cuda, monkeypatch, frees):
    @contextmanager
    def on_side(device):
        cuda.append("side")
        yield SimpleNamespace()
        cuda.append("side ends")

    monkeypatch.setattr(graph_cache, "side_stream", on_side)
    current = SimpleNamespace(wait_stream=lambda side: cuda.append("wait"))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: current)
    for name in ("synchronize", "empty_cache"):
        monkeypatch.setattr(torch.cuda, name, lambda *args, name=name: cuda.append(name))
    state, result = torch.zeros(1), torch.ones(1)

    def told(what):
        cuda.append(f"{what} at {state.item():.0f}")
        state.fill_(5)
        return [result]

    def outputs(results):
        assert torch.equal(results[0], result)
        cuda.append("outputs")
        return [torch.zeros(1)]

    body = Body(lambda: told("run"), lambda: told("first"), outputs)
    policy = Policy(SimpleNamespace(device=CUDA), "a pass", pytest.fail, frees=frees)
    _, made, expected = GraphCache()._recorded(body, [(state, torch.zeros(1))], [], policy)
    assert torch.equal(made[0], result) and torch.equal(expected[0], result)
    begun = ["synchronize", *["empty_cache"] * frees, ("begin", "a", "thread_local")]
    assert cuda == ["side", "first at 0", "wait", "outputs", *begun, "run at 0", "end", "side ends"]
