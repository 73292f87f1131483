"""What the GPU alone can show: streams, limits, memory given back."""

from __future__ import annotations

import ctypes
import gc
from contextlib import contextmanager

import pytest
import torch

import trimtab
from tests import pico, stock
from tests.engine.loader.test_load import inputs_of
from trimtab.engine.cuda.nvrtc import side_stream
from trimtab.engine.formats.packed import Packed
from trimtab.engine.kernels import attention_and_norms, autotune, device_kernels, gemv4, selfcheck
from trimtab.engine.layers import leaves
from trimtab.engine.lora.store import AdapterStore
from trimtab.engine.memory import rates, reserve
from trimtab.engine.memory.graph_cache import GraphCache
from trimtab.engine.tiers import streaming
from trimtab.engine.tiers.reader import HostMemory, seen_by
from trimtab.errors import DeviceError
from trimtab.planning.request.card_machine import THREAD_STACK_BYTES

GPU = torch.device("cuda:0")


def big_groups(count: int, nbytes: int, pieces: int = 1):
    """Return blocks in so many pieces, neighbours cut at other places: (group, places of pieces) of each, and the pieces' sums."""
    groups, expected = [], []
    for number in range(count):
        writer, places = streaming.GroupWriter(f"layers.{number}", nbytes + 256 * pieces, pinned=True), []
        shares = [1 + (number + piece) % 3 for piece in range(pieces)]
        for share in shares:
            writer.begin_piece()
            data = torch.randint(0, 256, (nbytes * share // sum(shares),), dtype=torch.uint8, device=GPU)
            places.append(writer.add({"weight": data})["weight"])
            expected.append(int(data.sum()))
        groups.append((writer.finish(), places))
    return groups, expected


def views_of(streamer, group, places):
    """Enter every piece of a block in turn and yield its bytes."""
    for piece, place in zip(group.pieces, places, strict=True):
        yield place.view(streamer.enter(piece).buffer)


def test_a_slot_is_not_overwritten_while_queued_work_reads_it():
    """Slow kernels are queued on each block before the next is entered; a missing wait would change their sums."""
    groups, expected = big_groups(6, 32 * 2**20)
    streamer = streaming.Streamer(GPU, [group for group, _ in groups], slot_count=2)
    streamer.poison = True
    sums = []
    for _ in range(5):
        for group, places in groups:
            for view in views_of(streamer, group, places):
                torch.cuda._sleep(20_000_000)
                sums.append(view.sum())
    assert [int(value) for value in sums] == expected * 5
    streamer.close()


@pytest.mark.parametrize("pieces", [1, 3])
@pytest.mark.parametrize(("count", "slots"), [(2, 2), (3, 2), (5, 2), (4, 1), (1, 1)])
def test_captured_passes_follow_each_other_with_the_first_blocks_in_the_buffers(count, slots, pieces):
    """Replays are queued without a wait, others' blocks enter between them; a copy too early or too late would change the sums."""
    groups, expected = big_groups(count + 1, 16 * 2**20, pieces)
    streamer = streaming.Streamer(GPU, [group for group, _ in groups], slot_count=slots)
    streamer.poison = True
    order = [piece for group, _ in groups[:count] for piece in group.pieces]
    sums = torch.zeros(count * pieces, dtype=torch.long, device=GPU)

    def run(says_so):
        for number, (group, places) in enumerate(groups[:count]):
            for piece, view in enumerate(views_of(streamer, group, places)):
                torch.cuda._sleep(1_000_000)
                sums[number * pieces + piece] = view.sum()
            if says_so:
                streamer.leave(group)

    cache = GraphCache()
    for says_so in (True, False):
        with side_stream(GPU) as side:
            with torch.cuda.stream(side):
                streamer.begin_pass()
                run(says_so)
                assert streamer.end_pass() == order
            torch.cuda.synchronize()

            def whole(says_so=says_so):
                streamer.begin_pass(order)
                run(says_so)
                assert streamer.end_pass() == order

            graph, _ = cache.record(side, whole)
        cache[says_so,] = graph
        replayed, others = [], []
        for number in range(8):
            sums.zero_()
            streaming.replay(streamer, order, graph)
            replayed.append(sums.clone())
            if number % 3 == 2:  # another block takes a buffer between two replays
                others += [view.sum() for view in views_of(streamer, *groups[count])]
        assert [one.tolist() for one in replayed] == [expected[: count * pieces]] * 8
        assert [int(one) for one in others] == expected[count * pieces :] * 2
    cache.clear()
    streamer.close()


def test_memory_is_given_back(tmp_path):
    """The first round also fills what libraries keep for good (workspaces, tables): it sets the mark."""
    folder = pico.build("gemma4", tmp_path / "gemma4")
    mark = None
    for place in ({"*": "resident"}, {"*": "resident"}, {"*": "stream"}):
        with trimtab.load(trimtab.plan(folder, context=64, quant="nf4", place=place)) as model:
            assert mark is None or torch.cuda.memory_allocated() > mark
            stock.logits(model.hf_model, inputs_of("gemma4", model.hf_model.config, "cuda:0"))
        del model
        gc.collect()
        mark = mark or torch.cuda.memory_allocated()
        assert torch.cuda.memory_allocated() == mark


def test_an_adapter_gives_its_memory_back(tmp_path):
    folder = pico.build("llama", tmp_path / "llama")
    adapter = pico.adapter(folder, tmp_path / "adapter", targets="text")
    with trimtab.load(trimtab.plan(folder, context=64, quant="nf4")) as model:
        before = torch.cuda.memory_allocated()
        model.load_adapter("a", str(adapter))
        assert torch.cuda.memory_allocated() > before
        model.unload_adapter("a")
        assert torch.cuda.memory_allocated() == before


def test_out_of_memory_is_a_device_error_with_the_plans_numbers(tmp_path, monkeypatch):
    folder = pico.build("llama", tmp_path / "llama")
    with trimtab.load(trimtab.plan(folder, context=64, quant="nf4")) as model:

        def fail(*args, **kwargs):
            torch.empty(2**50, dtype=torch.uint8, device=GPU)

        monkeypatch.setattr(type(model.hf_model), "forward", fail)
        with pytest.raises(DeviceError, match="the plan counts") as caught:
            model.logits([1, 2, 3])
        assert caught.value.device == "cuda:0"


def test_registered_host_memory_is_exact_and_pinned():
    memory = HostMemory(3 * 2**20 + 5, pinned=True)
    assert memory.tensor.is_pinned() and memory.tensor.numel() == 3 * 2**20 + 5
    memory.close()
    assert memory.tensor.numel() == 0


def test_a_host_leaf_moves_activations_and_not_weights():
    packed = Packed("none", (64, 64), torch.bfloat16, {"weight": torch.eye(64, dtype=torch.bfloat16)}, {})
    leaf = leaves.HostLeaf("a", packed, bias=None, device=GPU, dtype=torch.bfloat16, store=AdapterStore()).eval()
    x = torch.randn(1, 3, 64, device=GPU, dtype=torch.bfloat16)
    before = torch.cuda.memory_allocated()
    y = leaf(x)
    assert y.device == GPU and torch.equal(y, x)
    del y
    assert torch.cuda.memory_allocated() == before


@pytest.mark.parametrize("attention", [(8, 2, 512), (8, 2, 256), (4, 2, 32)])
def test_checks_of_attention_take_what_is_counted_for_them(attention):
    """At the sizes of real models and of the demo: memory for them is taken from a device that a model may fill."""
    module = attention_and_norms.load(GPU)
    selfcheck.check(module, widths=(64,), attention=(attention,), rows=(1,))
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    assert selfcheck.check(module, widths=(2560, 10240), attention=(attention,)) is None
    counted = device_kernels.check_bytes([attention], torch.bfloat16)
    assert torch.cuda.max_memory_allocated() - before <= counted


def test_checks_of_products_take_what_is_counted_for_them():
    module = gemv4.load(GPU)
    group = [autotune.RandomWeights(GPU).make(10240, 2560)]
    autotune.check(group, module, rows=(1,))
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    assert autotune.check(group, module) is None
    assert torch.cuda.max_memory_allocated() - before <= device_kernels.check_bytes([], torch.bfloat16)


def test_host_memory_is_seen_as_a_tensor_of_the_device_and_unlocked_with_it():
    source = torch.randn(3000, 257).bfloat16()
    for _ in range(2):  # what is still locked could not be locked again
        seen = seen_by(source, GPU)
        assert seen is not None and seen.device == GPU and seen.data_ptr() == source.data_ptr()
        before = torch.cuda.memory_allocated()
        ids = torch.randint(0, 3000, (64,), device=GPU)
        assert torch.equal(torch.nn.functional.embedding(ids, seen).cpu(), source[ids.cpu()])
        assert torch.cuda.memory_allocated() <= before + 2**20
        assert seen_by(source, GPU) is None  # it is locked
        torch.zeros(1, device=GPU).item()  # and the refusal is not reported again
        del seen
    assert seen_by(source.T, GPU) is None


def test_the_context_keeps_short_stacks(tmp_path):
    """What a plan counts for the context: the driver makes stacks larger for a kernel that needs more."""
    assert rates.bound_stacks("cuda:0")
    driver, size = ctypes.CDLL("libcuda.so.1"), ctypes.c_size_t()
    assert driver.cuCtxGetLimit(ctypes.byref(size), 0) == 0 and size.value == THREAD_STACK_BYTES
    sorted_, _ = torch.randn(2**20, device=GPU).sort()  # kernels of torch that use local memory
    assert bool((sorted_[1:] >= sorted_[:-1]).all())


@contextmanager
def with_cudnn():
    """Switch cuDNN's attention on, as torch does, and check that models leave it so: conftest.py has it off for all other tests."""
    torch.backends.cuda.enable_cudnn_sdp(True)
    try:
        yield
        assert torch.backends.cuda.cudnn_sdp_enabled()
    finally:
        torch.backends.cuda.enable_cudnn_sdp(False)


def test_prompts_of_new_lengths_take_no_memory_outside_torch(tmp_path):
    """cuDNN's attention would compile a kernel for each length, which stays in memory of the driver."""
    folder = pico.build("llama", tmp_path / "llama")
    made = trimtab.plan(folder, context=512, decode="eager", quant="none", dtype="bfloat16", gpu_memory="3GiB")
    with with_cudnn(), trimtab.load(made) as model:
        assert not torch.backends.cuda.cudnn_sdp_enabled()
        for count in (30, 31):
            model.logits(list(range(3, 3 + count)))
        before = rates.outside_torch(GPU)
        for count in range(40, 40 + 5 * 40, 5):
            model.logits([3 + number % 40 for number in range(count)])
        assert rates.outside_torch(GPU) - before <= 4 * 2**20


def test_what_a_plan_counts_for_torch_is_held_from_the_start(tmp_path):
    folder = pico.build("llama", tmp_path / "llama")
    torch.cuda.empty_cache()
    before = torch.cuda.memory_reserved()
    made = trimtab.plan(folder, context=64, quant="nf4", decode="eager", gpu_memory="3GiB")
    with trimtab.load(made) as model:
        held = torch.cuda.memory_reserved() - before
        counted = reserve.torch_bytes(made)
        assert held <= counted and (counted < 64 * 2**20 or held >= counted - before - 64 * 2**20)
        model.logits([1, 2, 3])
        assert torch.cuda.memory_reserved() - before <= counted + 2 * 2**21
