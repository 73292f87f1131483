"""Experts in slots and host memory that a device reads in place: the same bits, and what happens where a driver will not."""

import gc
import math
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.engine.kernels.test_experts import case, file_stack, kernels, mixture_of
from trimtab.engine.kernels import experts
from trimtab.engine.kernels.experts import Mixture
from trimtab.engine.tiers import near_experts, reader
from trimtab.engine.tiers.near_experts import NearWriter
from trimtab.engine.tiers.reader import Arena
from trimtab.errors import DeviceError

GPU = torch.device("cuda", 0)


@pytest.fixture
def driver(monkeypatch):
    """Plays the driver; `locked` holds the addresses that it has page-locked. The device's memory is the host's here."""
    played = SimpleNamespace(locked=set(), refuses=False, flushed=0, makes=lambda memory: memory.tensor.view(torch.uint8))

    def register(address, nbytes, flags):
        assert nbytes > 0 and flags == 0
        if played.refuses or address in played.locked:
            return 1
        played.locked.add(address)
        return 0

    def zeros(*args, device=None):
        played.flushed += 1
        raise RuntimeError("CUDA error: the refusal before")

    cudart = SimpleNamespace(cudaHostRegister=register, cudaHostUnregister=played.locked.remove)
    monkeypatch.setattr(reader.torch.cuda, "cudart", lambda: cudart)
    monkeypatch.setattr(reader.torch.cuda, "device", lambda device: nullcontext())
    monkeypatch.setattr(reader.torch, "zeros", zeros)
    monkeypatch.setattr(reader.torch, "as_tensor", lambda memory, device: played.makes(memory))
    monkeypatch.setattr(reader.nvrtc, "reads_registered_memory", lambda device: True)
    return played


def table():
    return torch.arange(24, dtype=torch.float32).view(6, 4).bfloat16()


def test_memory_is_locked_as_long_as_it_is_seen(driver):
    source, kept = table(), []

    def makes(memory):  # as torch does: the tensor keeps what described it
        kept.append(memory)
        return memory.tensor.view(-1).view(torch.uint8)

    driver.makes = makes
    seen = reader.seen_by(source, GPU)
    assert seen.dtype == source.dtype and torch.equal(seen, source) and driver.locked == {source.data_ptr()}
    described = kept[0].__cuda_array_interface__
    assert (described["shape"], described["typestr"]) == ((source.nbytes,), "|u1")
    assert described["data"] == (source.data_ptr(), False)
    kept.clear()
    gc.collect()
    assert driver.locked == set()


def test_a_refusal_is_not_left_for_the_next_kernel_to_report(driver):
    driver.refuses = True
    assert reader.seen_by(table(), GPU) is None and driver.flushed == 1 and driver.locked == set()


@pytest.mark.parametrize("error", [RuntimeError, TypeError, ValueError])
def test_a_torch_that_makes_no_tensor_of_it_leaves_nothing_locked(driver, error):
    def makes(memory):
        raise error("host memory")

    driver.makes = makes
    assert reader.seen_by(table(), GPU) is None
    gc.collect()
    assert driver.locked == set()


def test_a_copy_is_not_taken_for_it(driver):
    driver.makes = lambda memory: memory.tensor.clone().view(-1).view(torch.uint8)
    assert reader.seen_by(table(), GPU) is None
    gc.collect()
    assert driver.locked == set()


def test_nothing_is_locked_for_what_cannot_be_seen(driver, monkeypatch):
    assert reader.seen_by(table(), torch.device("cpu")) is None and reader.seen_by(table().T, GPU) is None
    monkeypatch.setattr(reader.nvrtc, "reads_registered_memory", lambda device: False)
    assert reader.seen_by(table(), GPU) is None
    assert driver.locked == set()


def test_a_device_without_a_driver_of_nvidias_reads_no_host_memory(monkeypatch):
    def no_driver():
        raise OSError("libcuda.so.1: cannot open shared object file")

    monkeypatch.setattr(reader.nvrtc, "_driver", no_driver)
    assert reader.nvrtc.reads_registered_memory(GPU) is False
    monkeypatch.setattr(torch.version, "hip", "6.0")
    assert reader.nvrtc.reads_registered_memory(GPU) is False


CPU = torch.device("cpu")


def test_host_memory_that_the_driver_does_not_lock_is_named(monkeypatch):
    monkeypatch.setattr(near_experts, "seen_by", lambda *_: None)
    with pytest.raises(DeviceError, match="does not let the GPU read .* of host memory") as caught:
        apart(mixture_of(4, 64, 64, torch.bfloat16, "nf4"), 2, torch.device("meta"))
    assert caught.value.device == "meta" and "stream" in caught.value.hint


@pytest.fixture(scope="module")
def module():
    return kernels()


def apart(mixture, slots, device=CPU):
    """The same mixture with its stacks in host memory and this many slots, which hold rubbish."""
    arena = Arena(sum(one.nbytes for one in (mixture.gate_up, mixture.down)) + 2**16, device)
    writer = NearWriter(device, slots, arena)
    stacks = {}
    for name in ("gate_up", "down"):
        stack = getattr(mixture, name)
        for part, room in writer.room({part: (tuple(one.shape), one.dtype) for part, one in stack.parts.items()}).items():
            room.copy_(stack.parts[part])
        stacks[name] = writer.taken({"gate_up": "gate_up_proj", "down": "down_proj"}[name], stack)
    near = writer.finish(mixture.gate_up.shape[0])
    for stack in near.stacks.values():
        for part in stack.parts.values():
            part.view(torch.uint8).fill_(0xAB)
    return replace(mixture, **stacks, near=near)


def check_slots(far, mixture):
    """Tables that agree, and in each slot the bytes of its expert."""
    owners = far.near.owner.tolist()
    assert far.near.where.tolist() == [owners.index(expert) if expert in owners else -1 for expert in range(len(far.near.where))]
    for slot, expert in enumerate(owners):
        for name, stack in (("gate_up_proj", mixture.gate_up), ("down_proj", mixture.down)):
            for part, value in far.near.stacks[name].parts.items() if expert >= 0 else ():
                assert torch.equal(value[slot].view(torch.uint8), stack.parts[part][expert].view(torch.uint8))


def place(module, near, numbers, count):
    """Run `experts_assign` for the chosen experts; returns what is to be copied."""
    index = torch.tensor(numbers, dtype=torch.int64)
    fetched = torch.full((1 + 2 * min(len(numbers), count),), -7, dtype=torch.int32)
    launch = partial(experts._launch, module, torch.bfloat16, None)
    stack = mixture_of(1, 64, 64, torch.bfloat16, "nf4").gate_up
    given = [index, len(numbers), count, near.where, near.owner, near.used, near.clock, near.counts, near.slots, fetched]
    launch(stack, "experts_assign", (1,), 32, given, 4 * 2 * (count + near.slots))
    return dict(fetched[1 : 1 + 2 * int(fetched[0])].view(-1, 2).tolist())


class Reference:
    """Least recently used slots, as a reader would write them down."""

    def __init__(self, slots):
        self.slots, self.step = [(-1, -1)] * slots, 0

    def __call__(self, numbers, count):
        self.step += 1
        chosen = sorted({number for number in numbers if 0 <= number < count})
        held = [expert for _, expert in self.slots]
        for expert in chosen:
            if expert in held:
                self.slots[held.index(expert)] = (self.step, expert)
        free = [place for place, (_, expert) in enumerate(self.slots) if expert not in chosen]
        free.sort(key=lambda place: (self.slots[place][0], place))
        made = dict(zip([expert for expert in chosen if expert not in held], free, strict=False))
        for expert, place in made.items():
            self.slots[place] = (self.step, expert)
        return made


@settings(max_examples=40, deadline=None)
@given(st.data(), st.integers(1, 9), st.integers(1, 40))
def test_slots_are_those_of_the_least_recent_use(module, data, slots, count):
    near, reference = NearWriter(CPU, slots, Arena(0, CPU)).finish(count), Reference(slots)
    seen = [0, 0]
    for _ in range(data.draw(st.integers(1, 12))):
        numbers = data.draw(st.lists(st.integers(-1, count), min_size=1, max_size=24))
        chosen, held = {one for one in numbers if 0 <= one < count}, {one for _, one in reference.slots}
        seen = [seen[0] + len(chosen), seen[1] + len(chosen - held)]
        assert place(module, near, numbers, count) == reference(numbers, count) and near.counts.tolist() == seen
        owners = [expert for _, expert in reference.slots]
        assert near.owner.tolist() == owners
        assert near.where.tolist() == [owners.index(expert) if expert in owners else -1 for expert in range(count)]


FORMS = [("nf4", None), ("nf4-dq", None), (None, "int4-g32"), (None, "q4_k"), (None, "fp8-128x128"), (None, "nvfp4-g16")]


@pytest.mark.parametrize("kind, form", FORMS)
@pytest.mark.parametrize("slots", [1, 3, 8])
def test_a_step_has_the_bits_of_resident_experts(module, kind, form, slots):
    """More chosen experts than slots too: those are read where they are."""
    torch.manual_seed(slots)
    if form is None:
        mixture = mixture_of(8, 128, 128, torch.bfloat16, kind)
    else:
        mixture = Mixture(file_stack(form, 8, 512, 256), file_stack(form, 8, 256, 256), "silu")
    far = apart(mixture, slots)
    fetched = 0
    for n in (1, 3, 1, 2):
        x, index, weights, tables = case(mixture, n, 2, torch.bfloat16, slots=(0, -1, 2))
        wanted = experts.experts(x, index, weights, mixture, torch.empty_like(x), lora=tables, module=module)
        before = len(module.launches)
        found = experts.experts(x, index, weights, far, torch.full_like(x, math.nan), lora=tables, module=module)
        assert torch.equal(found, wanted)
        fetched += module.launches[before:].count("experts_fetch")
        check_slots(far, mixture)
    assert fetched == 8


def test_products_wait_for_the_copies_that_they_read(module, monkeypatch):
    mixture = mixture_of(4, 64, 64, torch.bfloat16, "nf4")
    x, index, weights, _ = case(mixture, 2, 2, torch.bfloat16)
    said, fetch = module.launches, experts.fetch

    def told(*given):
        fetch(*given)
        return experts.Fetch(lambda: said.append("first stack"), lambda: said.append("all"))

    monkeypatch.setattr(experts, "fetch", told)
    before = len(said)
    experts.experts(x, index, weights, apart(mixture, 2), torch.empty_like(x), module=module)
    copies = ["experts_assign", "experts_fetch", "experts_fetch"]
    assert said[before:] == [*copies, "first stack", "experts_gate_up", "all", "experts_down"]


@pytest.mark.parametrize("kind", ["nf4", "nf4-dq"])
@pytest.mark.parametrize("slots", [1, 2, 4, 9])
def test_a_prompts_experts_take_turns_in_the_half_that_was_used_longest_ago(module, kind, slots):
    torch.manual_seed(4)
    mixture = mixture_of(9, 64, 128, torch.bfloat16, kind)
    far = apart(mixture, slots)
    near = far.near
    for number in range(5):  # into empty slots, too few turns, first
        x, index, weights, tables = case(mixture, 70, 3, torch.bfloat16, slots=(0, -1))
        if number % 2:
            index[:] = index % 4
            index[:, 1], index[:, 2] = (index[:, 0] + 1) % 4, (index[:, 0] + 2) % 4
        tables = replace(tables, row_slots=tables.row_slots[:2].contiguous())
        wanted = experts.experts(x, index, weights, mixture, torch.empty_like(x), lora=tables, module=module)
        before, held = len(module.launches), set(near.owner[near.used.argsort(stable=True)[near.turning :]].tolist()) - {-1}
        assert torch.equal(
            experts.experts(x, index, weights, far, torch.full_like(x, math.nan), lora=tables, module=module), wanted
        )
        assert module.launches[before:].count("experts_many_down") == near.turns and held <= set(near.owner.tolist())
        check_slots(far, mixture)
        x, index, weights, _ = case(mixture, 1, 2, torch.bfloat16)
        wanted = experts.experts(x, index, weights, mixture, torch.empty_like(x), module=module)
        assert torch.equal(experts.experts(x, index, weights, far, torch.full_like(x, math.nan), module=module), wanted)
        check_slots(far, mixture)


def test_prompts_leave_alone_what_steps_used(module):
    """One prompt after the other takes the same slots, and empty ones before any other."""
    torch.manual_seed(1)
    mixture = mixture_of(16, 64, 64, torch.bfloat16, "nf4")
    far = apart(mixture, 8)
    used = [3, 9, 4]
    for number in range(6):
        x, index, weights, _ = case(mixture, 70, 8, torch.bfloat16)
        experts.experts(x, index, weights, far, torch.empty_like(x), module=module)
        if number == 1:
            assert (far.near.owner >= 0).all()
            experts.experts(x[:1], torch.tensor([used]), weights[:1, :3].contiguous(), far, torch.empty_like(x[:1]), module=module)
        assert number < 1 or set(used) <= set(far.near.owner.tolist())


def test_the_check_at_load_finds_slots_that_hold_something_else(module):
    mixture = mixture_of(8, 192, 64, torch.bfloat16, "nf4-dq")
    assert experts.check(module, apart(mixture, 3), 2, torch.bfloat16) is None
    for right, wrong in (("to += (size_t)bytes * slot", "to += (size_t)bytes * 0"), ("where[before] = -1", "where[before] = s")):
        assert right in experts.source()
        broken = kernels(experts.source().replace(right, wrong))
        assert "relative error" in str(experts.check(broken, apart(mixture, 3), 2, torch.bfloat16)), right


@pytest.mark.parametrize("tokens, used", [(2, 2), (70, 3)])
def test_a_fetch_that_fails_leaves_no_slot_with_the_bytes_of_another_expert(module, tokens, used, monkeypatch):
    """Memory ends at every launch and every tensor of a step or prompt in turn; then others answer, with the bits of before."""
    torch.manual_seed(2)
    mixture = mixture_of(9, 128, 64, torch.bfloat16, "nf4-dq")
    x, index, weights, tables = case(mixture, tokens, used, torch.bfloat16, slots=(0, -1))
    tables = replace(tables, row_slots=tables.row_slots[:2].contiguous())
    others = case(mixture, 1, 9, torch.bfloat16)[:3]
    wanted = experts.experts(*others, mixture, torch.empty_like(others[0]), module=module).clone()
    launch, empty, left, failed = experts._launch, torch.empty, [0], 0

    def counted(real):
        def call(*given, **named):
            left[0] -= 1
            if left[0] == 0:
                raise torch.OutOfMemoryError("planted")
            return real(*given, **named)

        return call

    monkeypatch.setattr(experts, "_launch", counted(launch))
    monkeypatch.setattr(torch, "empty", counted(empty))
    out = torch.zeros_like(x)
    for number in range(1, 60):
        far = apart(mixture, 4)
        left[0] = -1
        experts.experts(x[:2], (index[:2] + 4) % 9, weights[:2].contiguous(), far, out[:2], module=module)
        left[0] = number
        try:
            experts.experts(x, index, weights, far, out, lora=tables, module=module)
        except torch.OutOfMemoryError:
            failed += 1
        is_last, left[0] = left[0] > 0, -1
        check_slots(far, mixture)
        found = experts.experts(*others, far, torch.full_like(others[0], math.nan), module=module)
        assert torch.equal(found, wanted), number
        if is_last:
            break
    assert is_last and failed == number - 1 > 5
