"""Tiers: a staged weight gives the resident answer in any order of calls, and leaves nothing stale behind."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from tests.raised import raised
from trimtab.engine.formats.bitsandbytes import quantize
from trimtab.engine.formats.packed import CodeTables, Packed, keep
from trimtab.engine.formats.weights import dequantize, shell
from trimtab.engine.layers import leaves
from trimtab.engine.lora.store import AdapterStore
from trimtab.engine.tiers import reader, streaming
from trimtab.engine.tiers.streaming import Spill
from trimtab.errors import CheckpointError, DeviceError
from trimtab.planning.values.copy_order import Piece

CPU = torch.device("cpu")
QUANTS = ("none", "int8", "fp4", "nf4", "nf4-dq")


def packed_weight(quant: str, rows: int, columns: int, seed: int) -> Packed:
    generator = torch.Generator().manual_seed(seed)
    weight = (torch.randn(rows, columns, generator=generator) / columns**0.5).to(torch.bfloat16)
    return keep(weight) if quant == "none" else quantize(weight, quant)


def stack(quant: str, tmp_path, *, home: str, count: int = 4, slots: int = 2, cuts: bool = True):
    """Return (staged leaves, resident leaves, streamer): `count` blocks of two linears of unlike shapes, each of them a piece."""
    codes, store = CodeTables(), AdapterStore()
    spill = Spill(tmp_path) if home == "disk" else None
    staged_leaves, resident, groups, staged = [], [], [], []
    common = {"bias": None, "device": CPU, "dtype": torch.bfloat16, "store": store}
    for block in range(count):
        writer = streaming.GroupWriter(f"layers.{block}", 0 if block % 2 else 2**17, pinned=False)  # less or more than is written
        # The larger one comes first in every other block: pieces of two blocks do not begin at the same places.
        for place, shape in enumerate(((128, 64), (64, 192)) if block % 2 else ((64, 192), (128, 64))):
            if cuts:
                writer.begin_piece()
            packed = codes.share(packed_weight(quant, *shape, seed=10 * block + place))
            path = f"layers.{block}.{place}"
            facts = packed.with_parts({}, packed.codes)
            staged.append((path, writer, facts, writer.add(packed.parts), len(writer.piece_starts)))
            resident.append(leaves.ResidentLeaf(path, packed, **common).eval())
        groups.append(writer.finish(spill))
    streamer = streaming.Streamer(CPU, groups, slot_count=slots, spill=spill)
    streamer.poison = True
    for path, writer, *weight in staged:
        staged_leaves.append(leaves.StagedLinear(path, streaming.Staged(streamer, writer.group, *weight), **common).eval())
    return staged_leaves, resident, streamer


def order_of(staged) -> list[Piece]:
    """Return the pieces that calling all leaves in turn enters."""
    return list(dict.fromkeys(leaf.staged.group.pieces[leaf.staged.piece] for leaf in staged))


def inputs_for(leaf: leaves.Leaf, rows: int = 3) -> torch.Tensor:
    generator = torch.Generator().manual_seed(leaf.in_features)
    return torch.randn(1, rows, leaf.in_features, generator=generator).to(torch.bfloat16)


@pytest.mark.parametrize("home", ["host", "disk"])
@pytest.mark.parametrize("quant", QUANTS)
def test_staged_equals_resident_bit_for_bit_twice(quant, home, tmp_path):
    staged, resident, streamer = stack(quant, tmp_path, home=home)
    for _ in range(2):
        for mine, reference in zip(staged, resident, strict=True):
            x = inputs_for(mine)
            assert torch.equal(mine(x), reference(x)), mine.module_path
    streamer.close()


@pytest.mark.parametrize("home", ["host", "disk"])
@pytest.mark.parametrize("slots", [1, 2, 3])
def test_any_order_of_calls_gives_the_same_answer(slots, home, tmp_path):
    staged, resident, streamer = stack("nf4-dq", tmp_path, home=home, slots=slots)
    order = torch.randint(0, len(staged), (60,), generator=torch.Generator().manual_seed(0)).tolist()
    for place in order:
        x = inputs_for(staged[place])
        assert torch.equal(staged[place](x), resident[place](x)), place
    streamer.close()


@pytest.mark.parametrize("slots", [1, 2, 3])
@pytest.mark.parametrize("cuts", [False, True])
def test_a_pass_in_a_known_order_copies_each_block_once_and_ahead(cuts, slots, tmp_path):
    """What a CUDA graph holds: the first blocks are there, and each of the others comes as soon as a buffer is free."""
    staged, resident, streamer = stack("nf4-dq", tmp_path, home="host", count=6, slots=slots, cuts=cuts)
    order, groups = order_of(staged), streamer.groups
    assert len(order) == (12 if cuts else 6)
    for says_so in (True, False):
        streamer.begin_pass(order)
        before = streamer.copied_bytes
        assert {slot.owner for slot in streamer.slots} == set(groups[:slots])
        for number, group in enumerate(groups):
            for mine, reference in zip(staged, resident, strict=True):
                if mine.staged.group is group:
                    assert torch.equal(mine(inputs_for(mine)), reference(inputs_for(mine)))
            if says_so:
                mine = next(leaf for leaf in staged if leaf.staged.group is group)
                mine.staged.leave()
                if slots == 2:  # its buffer has the one after the next already
                    held = {slot.owner for slot in streamer.slots}
                    assert set(groups[number + 1 : number + 3]) <= held
        assert streamer.end_pass() == order
        # The first ones are copied again at the end: the next pass begins with them.
        assert streamer.copied_bytes - before == sum(group.nbytes for group in groups)
        assert [slot.owner for slot in streamer.slots] == groups[:slots]
    streamer.close()


@pytest.mark.parametrize(("count", "slots"), [(1, 2), (2, 2), (3, 2), (5, 2), (5, 3), (4, 1)])
def test_the_buffers_hold_the_same_blocks_at_both_ends_of_a_pass(count, slots, tmp_path):
    """What lets a replay follow a replay without a copy between them; a block that has a buffer to itself is not copied again."""
    staged, resident, streamer = stack("nf4", tmp_path, home="host", count=count, slots=slots)
    order, groups = order_of(staged), streamer.groups
    again = sum(group.nbytes for place, group in enumerate(groups) if len(groups[place % slots :: slots]) > 1)
    for number in range(3):
        streamer.hold(order)
        before = streamer.copied_bytes
        streamer.hold(order)
        assert streamer.copied_bytes == before
        streamer.begin_pass(order)
        for place, (mine, reference) in enumerate(zip(staged, resident, strict=True)):
            assert torch.equal(mine(inputs_for(mine)), reference(inputs_for(mine)))
            if number and place % 2:  # the second layer of its block
                mine.staged.leave()
        assert streamer.end_pass() == order and streamer.copied_bytes - before == again
        held = [slot.owner for slot in streamer.slots]
        assert held == groups[: len(held)]
    streamer.close()


def test_what_another_pass_left_in_the_buffers_is_exchanged_before_a_replay(tmp_path):
    staged, _, streamer = stack("nf4", tmp_path, home="host", count=4, slots=2)
    order = order_of(staged)
    staged[-1](inputs_for(staged[-1]))
    before, replays = streamer.copied_bytes, []
    streaming.replay(streamer, order, SimpleNamespace(replay=lambda: replays.append([slot.owner for slot in streamer.slots])))
    assert replays == [streamer.groups[:2]] and streamer.copied_bytes > before
    # Blocks that are entered twice have no such order: a replay then begins with empty buffers.
    streaming.replay(
        streamer, [*order, order[0]], SimpleNamespace(replay=lambda: replays.append([s.owner for s in streamer.slots]))
    )
    assert replays[1] == [None, None]
    streamer.close()


@pytest.mark.parametrize("slots", [1, 2, 3])
@pytest.mark.parametrize("places", [(0, 6, 7, 3, 1, 8, 4, 0), (0, 1, 2, 1, 3), (0, 1, 2, 3, 2), (0, 2, 4, 6, 8), (9, 0), (0, 1, 2)])
def test_a_pass_that_leaves_its_order_is_right_all_the_same(places, slots, tmp_path):
    staged, resident, streamer = stack("nf4", tmp_path, home="host", count=5, slots=slots)
    streamer.begin_pass(order_of(staged))
    for place in places:
        x = inputs_for(staged[place])
        assert torch.equal(staged[place](x), resident[place](x)), place
    streamer.end_pass()
    assert [slot.owner for slot in streamer.slots] == streamer.groups[:slots]
    streamer.close()


@pytest.mark.parametrize("home", ["host", "disk"])
@pytest.mark.parametrize("slots", [1, 2, 3])
def test_a_block_that_was_left_too_early_is_copied_again(slots, home, tmp_path):
    staged, resident, streamer = stack("nf4", tmp_path, home=home, slots=slots)
    generator = torch.Generator().manual_seed(1)
    for place in torch.randint(0, len(staged), (80,), generator=generator).tolist():
        x = inputs_for(staged[place])
        assert torch.equal(staged[place](x), resident[place](x)), place
        if torch.randint(0, 2, (1,), generator=generator):
            staged[place].staged.leave()
            other = int(torch.randint(0, len(staged), (1,), generator=generator))
            staged[other].staged.leave()
    streamer.close()


def test_a_loop_over_blocks_is_prefetched_once_it_was_seen(tmp_path):
    """The step from the last block back to the first is learned when it is first taken."""
    staged, _, streamer = stack("nf4", tmp_path, home="host")
    for leaf in (*staged, *staged):
        leaf(inputs_for(leaf))
    for leaf in staged:
        group = leaf.staged.group
        if streamer._current is not None and streamer._current.owner is not group:
            assert any(slot.owner is group for slot in streamer.slots), group.block
        leaf(inputs_for(leaf))
    streamer.close()


def test_an_exception_in_the_middle_leaves_no_stale_weight(tmp_path):
    staged, resident, streamer = stack("nf4", tmp_path, home="host")
    with pytest.raises(RuntimeError):
        staged[1](torch.randn(1, 3, 7, dtype=torch.bfloat16))
    for mine, reference in zip(staged, resident, strict=True):
        assert torch.equal(mine(inputs_for(mine)), reference(inputs_for(mine)))
    streamer.close()


def test_a_pass_that_cannot_begin_leaves_the_streamer_as_it_was(tmp_path, monkeypatch):
    staged, resident, streamer = stack("nf4", tmp_path, home="host", slots=1)
    copy = streaming.Streamer._copy

    def fails(*args):
        raise DeviceError("the copy failed", device="cpu")

    staged[-1](inputs_for(staged[-1]))
    monkeypatch.setattr(streaming.Streamer, "_copy", fails)
    with pytest.raises(DeviceError):
        streamer.begin_pass(order_of(staged))
    monkeypatch.setattr(streaming.Streamer, "_copy", copy)
    assert streamer._order is None
    for mine, reference in zip(staged, resident, strict=True):
        assert torch.equal(mine(inputs_for(mine)), reference(inputs_for(mine)))
    streamer.close()


def test_a_spill_file_that_is_cut_short_is_named(tmp_path):
    staged, _, streamer = stack("nf4", tmp_path, home="disk")
    assert streamer.spill is not None
    streamer.spill._file.truncate(streamer.spill.nbytes // 2)
    with pytest.raises(CheckpointError, match="changed while in use") as caught:
        for leaf in staged:
            leaf(inputs_for(leaf))
    assert caught.value.path == str(tmp_path)
    streamer.close()


def test_the_spill_file_has_no_name_and_is_gone_at_close(tmp_path):
    *_, streamer = stack("nf4", tmp_path, home="disk")
    assert list(tmp_path.iterdir()) == []
    streamer.close()


def test_a_full_disk_is_a_device_error(tmp_path, monkeypatch):
    spill = Spill(tmp_path)

    class Full:
        def write(self, data):
            raise OSError(28, "No space left on device")

        def close(self):
            pass

    spill._file.close()
    spill._file = Full()
    assert raised(DeviceError, spill.append, torch.zeros(16, dtype=torch.uint8), match="No space left").device == "disk"


@pytest.mark.parametrize("quant", QUANTS)
def test_a_host_leaf_equals_the_resident_one_on_the_same_device(quant):
    packed = packed_weight(quant, 64, 128, 1)
    common = {"bias": torch.ones(64, dtype=torch.bfloat16), "device": CPU, "dtype": torch.bfloat16, "store": AdapterStore()}
    x = torch.randn(2, 5, 128, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)
    host = leaves.HostLeaf("a", packed, **common).eval()
    assert torch.equal(host(x), leaves.ResidentLeaf("a", packed, **common).eval()(x))


@pytest.mark.parametrize("quant", QUANTS)
def test_the_dense_weight_is_what_the_layer_computes_with(quant):
    """float64 product with the dequantized weight; the tolerance is the bf16 rounding of input-sized sums (2^-8 of |y|)
    for float weights, and int8's own activation step (1/127 of the row maximum a term) for int8."""
    packed = packed_weight(quant, 64, 256, 2)
    x = torch.randn(4, 256, generator=torch.Generator().manual_seed(1)).to(torch.bfloat16)
    y = shell(packed, None, torch.bfloat16)(x.unsqueeze(0))[0].double()
    expected = x.double() @ dequantize(packed).double().T
    bound = 2**-7 * expected.abs().max() if quant != "int8" else 256**0.5 / 127 * x.abs().max()
    assert (y - expected).abs().max() <= bound


def test_host_memory_is_given_back_after_everything_that_was_queued(monkeypatch):
    """A replay of a graph copies from it on no stream of the streamer's."""
    done = []
    group = streaming.Group("layers.0", 8, SimpleNamespace(tensor=torch.zeros(8), close=lambda: done.append("given back")))
    streamer = streaming.Streamer(CPU, [group])
    monkeypatch.setattr(streaming, "wait_for_all", lambda device: done.append(device))
    streamer.close()
    assert done == [CPU, "given back"]


def test_registered_memory_that_a_queued_copy_reads_is_given_back_after_it(monkeypatch):
    """An adapter that is loaded from its folder is dropped as soon as its copy is queued."""
    done = []
    event = SimpleNamespace(synchronize=lambda: done.append("copied"))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: SimpleNamespace(record_event=lambda: event))
    driver = SimpleNamespace(cudaHostUnregister=lambda address: done.append("given back"))
    monkeypatch.setattr(torch.cuda, "cudart", lambda: driver)
    monkeypatch.setattr(reader, "_register", lambda tensor: True)
    for is_used in (True, False):
        memory = reader.HostMemory(reader.HostMemory.REGISTER_FROM_BYTES, pinned=True)
        if is_used:
            memory.is_used(torch.device("cuda"))
        memory.close()
        memory.close()
    assert done == ["copied", "given back", "given back"]


def test_code_tables_are_shared_only_when_equal():
    codes = CodeTables()
    first, second = codes.share(packed_weight("nf4-dq", 64, 64, 1)), codes.share(packed_weight("nf4-dq", 64, 64, 2))
    assert first.codes["code"] is second.codes["code"] and first.codes["nested_code"] is second.codes["nested_code"]
    assert codes.share(packed_weight("fp4", 64, 64, 1)).codes["code"] is not first.codes["code"]


def test_a_streamed_leaf_shows_shape_and_computing_dtype_but_no_data():
    staged, _, streamer = stack("nf4", None, home="host")
    assert staged[1].weight.shape == (128, 64) and staged[1].weight.dtype == torch.bfloat16
    with pytest.raises(DeviceError, match="layers.0.0"):
        staged[0].weight.sum()
    streamer.close()


def test_a_block_is_left_behind_its_only_reader_or_as_a_whole():
    """Fused experts read their block too, whose names are parameters and no layers."""
    group, block = streaming.Group("block", 0), torch.nn.Module()
    block.first, block.second, block.third = (torch.nn.Module() for _ in range(3))
    assert leaves.last_reader(block, group) is block
    block.first.staged = SimpleNamespace(group=group)
    block.third.staged = SimpleNamespace(group=streaming.Group("another", 0))
    assert leaves.last_reader(block, group) is block.first
    block.second.staged = SimpleNamespace(group=group)
    assert leaves.last_reader(block, group) is block
