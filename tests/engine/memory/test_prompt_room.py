"""Which model has a room for its prompts, how large it is, and what happens to graphs when a pass leaves something in it.

The allocator is a stand-in here; tests/gpu/test_prompt_room.py runs torch's.
"""

from contextlib import contextmanager, nullcontext
from dataclasses import replace

import pytest
import torch

import trimtab
from tests.engine.prefill.test_prefill import (
    DEMO,
    ON_GPU,
    TOLERANCE,
    answered,
    captured,
    differ,
    eager,
    ids,
    named,
    replayed,  # noqa: F401
)
from tests.planning.values.test_execution import E4B, GIB, MIB, plan
from trimtab.engine.memory import shared_pool
from trimtab.engine.memory.reserve import torch_bytes
from trimtab.engine.memory.shared_pool import LEAST_SHARE, LEFT_BYTES, PrefillMemoryPool, room_of
from trimtab.planning.memory.prompts import room_bytes

CUDA = torch.device("cuda:0")


class Pool:
    id = (0, 7)


def described(state):
    """Return torch's description of all pools: this one's segments beside another's."""
    used = [{"address": at, "size": size, "state": "active_allocated"} for at, size in state["blocks"]]
    other = [{"address": 1, "size": MIB, "state": "active_allocated"}]
    return {"segments": [
        {"total_size": 9 * MIB, "blocks": other, "segment_pool_id": (0, 0)},
        {
            "total_size": 64 * MIB,
            "blocks": [*used, {"address": 5, "size": 60 * MIB, "state": "inactive"}],
            "segment_pool_id": Pool.id,
        },
        {"total_size": 2 * MIB, "blocks": [], "segment_pool_id": Pool.id},
    ]}  # fmt: skip


class Owner:
    dropped = 0

    def drop_graphs(self):
        self.dropped += 1


@pytest.fixture(params=[True, False], ids=["what lives is known", "described"])
def knows_what_lives(request):
    return request.param


@pytest.fixture
def device(monkeypatch, knows_what_lives):
    """A device without one. taken: the segments; blocks: (address, bytes) in use; reserved, free: of torch and the device."""
    state = {"reserved": 0, "free": 8 * GIB, "taken": [], "blocks": [], "fails": None}
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda _: state["reserved"])
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (state["free"], 8 * GIB))
    monkeypatch.setattr(torch.cuda, "MemPool", Pool)
    monkeypatch.setattr(torch.cuda.memory, "_snapshot", lambda: described(state))

    def lives(index, pool, expected):
        assert (index, pool) == (0, Pool.id)
        return expected == {at for at, _ in state["blocks"]}

    if knows_what_lives:
        monkeypatch.setattr(torch._C, "_cuda_checkPoolLiveAllocations", lives, raising=False)
    monkeypatch.setattr(shared_pool, "wait_for_all", lambda _: None)

    def empty(count, *, dtype, device):
        if state["fails"]:
            raise state["fails"]
        state["taken"].append(count)

    @contextmanager
    def here(*args):
        yield

    monkeypatch.setattr(torch.cuda, "device", here)
    monkeypatch.setattr(torch.cuda, "stream", here)
    monkeypatch.setattr(PrefillMemoryPool, "_call_libraries", lambda _: None)
    monkeypatch.setattr(shared_pool.torch, "empty", empty)
    monkeypatch.setattr(shared_pool, "side_stream", here)
    monkeypatch.setattr(PrefillMemoryPool, "using", here)

    class Graphs:
        def __init__(self, pool):
            assert pool() == Pool.id

        def record(self, side, run):
            return object(), None

    monkeypatch.setattr(shared_pool, "GraphCache", Graphs)
    monkeypatch.setattr(shared_pool.torch, "zeros", lambda *shape, dtype, device: type("Mark", (), {"zero_": None})())
    return state


@pytest.mark.parametrize(("gib", "asked", "has_one"), [
    (4, {}, True), (8, {}, True), (24, {}, False), (4.5, {"batch": 2}, False), (8, {"decode": "eager"}, False),
])  # fmt: skip
def test_a_model_that_answers_one_request_at_a_time_in_a_small_budget_has_a_room(gib, asked, has_one):
    made = plan(gib, **asked)
    room = room_of(made, E4B, CUDA)
    assert (room is not None) is has_one and room_of(made, E4B, torch.device("cpu")) is None
    if room is not None:
        assert room.nbytes == room_bytes(made, E4B)
        # With captured towers, which have memory of their own, the room is no more than planned.
        towers = made.execution.towers.mode == "graph"
        assert room.torch_bytes == (0 if towers else torch_bytes(made))


@pytest.mark.parametrize("is_lean", [False, True])
def test_the_segment_is_the_rest_of_the_plan(device, is_lean):
    made = plan(4)
    room = room_of(made, E4B, CUDA)
    device["reserved"] = torch_bytes(made) - room.nbytes - 100 * MIB
    assert room.make(is_lean=is_lean) and room.is_made and device["taken"] == [room.nbytes + 100 * MIB - LEFT_BYTES]
    assert room.make() and len(device["taken"]) == 1 and room.segment_bytes == device["taken"][0]
    assert room.held_bytes == 66 * MIB and room.handle == Pool.id


@pytest.mark.parametrize(("is_lean", "share"), [(False, 1), (True, LEAST_SHARE)])
def test_the_segment_is_what_passes_take_where_torch_holds_more_elsewhere(device, is_lean, share):
    room = room_of(plan(4), E4B, CUDA)
    device["reserved"] = room.torch_bytes
    assert room.make(is_lean=is_lean) and device["taken"] == [int(share * room.nbytes)]


@pytest.mark.parametrize(
    "state",
    [
        {"free": 60 * MIB},
        {"fails": torch.OutOfMemoryError("no")},
        {"fails": RuntimeError("CUDA error: out of memory")},  # of the driver, where a graph is instantiated
        {"fails": RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`")},
    ],
)
def test_without_the_memory_there_is_no_room(device, state):
    device.update(state)
    room = PrefillMemoryPool(CUDA, 64 * MIB)
    assert not room.make() and not room.is_made and room.held_bytes == 0 and room.check()


def test_another_error_leaves_no_half_of_a_room(device):
    device["fails"] = RuntimeError("operation not permitted when stream is capturing")
    room = PrefillMemoryPool(CUDA, 64 * MIB)
    with pytest.raises(RuntimeError, match="not permitted"):
        room.make()
    assert not room.is_made
    device["fails"] = None
    assert room.make() and room.is_made


def test_graphs_go_when_a_pass_leaves_something_and_only_then(device):
    room, owner = PrefillMemoryPool(CUDA, 64 * MIB), Owner()
    room.owners.add(owner)
    assert room.make() and room.check() and owner.dropped == 0
    device["blocks"] = [(1, 3 * MIB)]
    assert not room.check() and owner.dropped == 1 and room.left_bytes == 3 * MIB
    assert room.check() and owner.dropped == 1  # nothing more is left
    device["blocks"] = []
    assert room.check() and room.left_bytes == 0
    device["blocks"] = [(1, 3 * MIB)]
    assert not room.check() and owner.dropped == 2
    device["blocks"] = [(9, 3 * MIB)]  # of the same size, somewhere else: a graph may write there
    assert not room.check() and owner.dropped == 3 and room.left_bytes == 3 * MIB


def test_a_room_is_lent_where_the_budget_has_no_other_memory(device):
    room, owner = PrefillMemoryPool(CUDA, 64 * MIB), Owner()
    room.owners.add(owner)
    assert room.make()
    room.lend(64 * MIB)
    assert room.is_made and owner.dropped == 0
    room.lend(64 * MIB - 1)
    assert not room.is_made and owner.dropped == 1
    room.lend(0)
    assert owner.dropped == 1 and room.make()


def test_an_owner_that_is_gone_is_forgotten(device):
    room = PrefillMemoryPool(CUDA, 64 * MIB)
    room.owners.add(Owner())
    assert room.make() and not list(room.owners)
    room.release()


def test_a_saved_plan_gives_the_room_that_it_was_made_with():
    made = plan(4)
    assert room_of(replace(made, gpu_budget_bytes=16 * GIB), E4B, CUDA) is None
    assert room_of(made, E4B, CUDA).nbytes == room_of(replace(made), E4B, CUDA).nbytes


class Untidy:
    """A room in which every pass leaves something: each check drops all graphs."""

    is_made, checks = True, 0

    def __init__(self, prompts):
        self.prompts = prompts

    def make(self, *, is_lean):
        return True

    def using(self):
        return nullcontext()

    def release(self):
        self.prompts.drop_graphs()

    def check(self):
        self.checks += 1
        self.prompts.drop_graphs()
        return False


@pytest.mark.skipif(ON_GPU, reason="stands for what a GPU does")
def test_prompts_run_uncaptured_where_their_memory_cannot_be_made(replayed, monkeypatch):  # noqa: F811
    plan = trimtab.plan(DEMO / "base", quant="none", dtype="float32", context=96, device="cpu")
    with trimtab.load(plan, decode="auto") as model:
        expected = answered(eager(model), model.prepare(ids(40)))
        for error, is_ended in ((None, False), (RuntimeError("cudaErrorStreamCaptureInvalidated"), True)):
            batch = captured(model, (64,))
            room = batch.prompts.room = Untidy(batch.prompts)

            def make(*, is_lean, error=error):
                if error is not None:
                    raise error
                return False

            monkeypatch.setattr(room, "make", make, raising=False)
            for _ in range(3):
                assert differ(answered(batch, model.prepare(ids(40))), expected) < TOLERANCE
            (why,) = named(batch)
            assert ("Invalidated" in why) is is_ended and batch.prompts.captures is not is_ended and not replayed


@pytest.mark.skipif(ON_GPU, reason="stands for what a GPU does")
def test_prompts_are_right_and_captured_again_where_passes_leave_something(replayed):  # noqa: F811
    """Chunks of a prompt that is longer than a window: one that ran twice would write over keys that it still reads."""
    plan = trimtab.plan(DEMO / "base", quant="none", dtype="float32", context=384, device="cpu")
    with trimtab.load(plan, decode="auto") as model:
        expected = answered(eager(model), model.prepare(ids(150)))
        batch = captured(model, (16,))
        batch.prompts.room = room = Untidy(batch.prompts)
        for again in range(5):
            assert differ(answered(batch, model.prepare(ids(150))), expected) < TOLERANCE, again
        assert room.checks >= 5 and len(replayed) > 1 and not batch.prompts._graphs and batch.prompts.captures
