"""Streamed towers copied in a known order between captured chunks: the bits of passes without it, in every family with images.

A stand-in replays chunks on a CPU: as a graph does, it begins and ends with the first layers in the buffers. tests/gpu runs the
same tests with graphs and streams. What copies wait for is in test_staging_order.py.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import trimtab
from tests import pico
from tests.test_prefill import DEVICE, ON_GPU, WITH_PICTURES, Again, captured, load, picture, through
from trimtab.plan.pieces import blocks_in
from trimtab.runtime import tower_copies
from trimtab.runtime.prefill_graphs import Prompts
from trimtab.runtime.step_capture import in_pass
from trimtab.runtime.tiers import CopyOrder
from trimtab.runtime.tower_copies import TowerCopies


class AsGraph(Again):
    """A replay that fills the buffers as a graph does."""

    def __init__(self, prompts, form, output, order):
        super().__init__(prompts, form, output)
        self.order = order

    def replay(self):
        with in_pass(self.prompts.model.streamer, self.order):
            super().replay()


@pytest.fixture
def as_graphs(monkeypatch):
    if ON_GPU:
        return

    def warm(self, form):
        order = []
        with in_pass(self.model.streamer, entered=order):
            return self._static(form).clone(), order

    monkeypatch.setattr(Prompts, "_warm", warm)
    monkeypatch.setattr(Prompts, "_record", lambda self, form, order, output: AsGraph(self, form, output, order))


def answers(model, family, batch, count=5):
    """Return the scores of prompts with images, each of which is another one."""
    logits = []
    for number in range(count):
        inputs = picture(model, family, 5 + number % 2)
        for name, value in inputs.tensors.items():
            if value.is_floating_point():
                inputs.tensors[name] = value + 0.01 * (number + 1)
        prompt = through(batch, inputs)
        logits.append(prompt.logits.clone().cpu())
        batch.prompts.release(prompt)
    return logits


def placed_load(family, folder, placed):
    """Load it with its layers on the device ("towers") or all of it off the device ("all"), tables excepted."""
    every = trimtab.plan(pico.build(family, folder), quant="none", device=DEVICE, place={"*": "stream"}).placements
    movable = {row.part for row in every if row.tier == "stream"} - {"head", "table"}
    place = {part: "stream" for part in movable if placed == "all" or part != "language"}
    place |= {row.part: "resident" for row in every if row.part in ("head", "table")}
    return load(family, folder, place=place)


def with_slots(model, slots):
    if len(model.streamer.slots) < slots:
        pytest.skip("planned with one staging buffer")
    model.streamer.slots, model.streamer.poison = model.streamer.slots[:slots], True
    return model


class Off(TowerCopies):
    def running(self, kinds, *, is_cut=False):
        return super().running(kinds, is_cut=True)


@pytest.mark.parametrize("slots", [1, 2])
@pytest.mark.parametrize("placed", ["all", "towers"])
@pytest.mark.parametrize("family", WITH_PICTURES)
def test_the_bits_are_those_of_towers_copied_block_by_block(family, placed, slots, tmp_path, as_graphs, monkeypatch):
    with placed_load(family, tmp_path / "a", placed) as model:
        batch = captured(with_slots(model, slots), (16, 64))
        batch.prompts.tower_passes.copies = Off(model.streamer)
        expected = answers(model, family, batch)
    assert not any(torch.equal(expected[0], one) for one in expected[1:])
    with placed_load(family, tmp_path / "b", placed) as model:
        streamer, ends = with_slots(model, slots).streamer, []
        whole = type(streamer).end_expected

        def seen(self):
            is_kept, order = self._order is not None and self._in_order, self._order
            whole(self)
            ends.append((is_kept, order, [slot.owner for slot in self.slots]))

        monkeypatch.setattr(type(streamer), "end_expected", seen)
        batch = captured(model, (16, 64))
        found = answers(model, family, batch)
        for one, other in zip(found, expected, strict=True):
            assert torch.equal(one, other)
        (order,) = batch.prompts.tower_passes.copies.orders.values()
        assert len(blocks_in(order)) >= 2
        assert [kept for kept, *_ in ends] == [False, True, True, True, True], "the first pass shows the order"
        decoder = blocks_in(streamer.replayed)
        assert ON_GPU or bool(decoder) == (placed == "all")  # some families are not captured there
        for _, copy_order, owners in ends[3:]:
            assert owners == copy_order.closing == [*decoder, *blocks_in(order)[len(decoder) :]][:slots]


def test_what_lies_beyond_the_tower_s_blocks_stays_in_the_buffer(tmp_path, as_graphs):
    """The last copies of a pass are those pieces of the decoder's first layer that lie where the towers have been."""
    with placed_load("mistral3", tmp_path, "all") as model:
        batch = captured(with_slots(model, 1), (16, 64))
        answers(model, "mistral3", batch)
        copies, streamer = batch.prompts.tower_passes.copies, model.streamer
        ((kinds, order),) = copies.orders.items()
        towers, (first, *_) = blocks_in(order), blocks_in(streamer.replayed)
        reach = max(block.nbytes for block in towers)
        over = [piece for piece in first.pieces if piece.start < reach]
        before = streamer.copied_bytes
        with copies.running(kinds):
            for piece in order:
                streamer.enter(piece)
        assert streamer.slots[0].owner is first
        assert streamer.copied_bytes - before == sum(one.nbytes for one in (*towers, *over))


def test_bytes_that_only_seem_intact_change_the_answer(tmp_path, as_graphs, monkeypatch):
    """A fault is planted: none of the decoder's first layer is copied, as if the towers had not been in its buffer."""

    class Wrong(CopyOrder):
        def __init__(self, *args, following=(), **options):
            super().__init__(*args, following=following, **options)
            if following:
                (end,) = (copy for copy in self.last_copies if copy.block in following)
                nothing = replace(end, start=end.end)
                self.due = [[copy for copy in due if copy.block not in following] for due in self.due]
                self.due[-1].append(nothing)
                self.slot_of[nothing] = self.slot_of[end]
                self.last_copies.add(nothing)

    with placed_load("gemma4", tmp_path / "a", "all") as model:
        expected = answers(model, "gemma4", captured(with_slots(model, 1), (16, 64)))
    monkeypatch.setattr("trimtab.runtime.tiers.CopyOrder", Wrong)
    with placed_load("gemma4", tmp_path / "b", "all") as model:
        found = answers(model, "gemma4", captured(with_slots(model, 1), (16, 64)))
    assert not all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))


def test_a_pass_that_fails_or_is_cut_leaves_nothing_expected(tmp_path, as_graphs):
    with placed_load("gemma4", tmp_path, "all") as model:
        batch = captured(with_slots(model, 2), (16, 64))
        expected = answers(model, "gemma4", batch)
        copies, streamer = batch.prompts.tower_passes.copies, model.streamer
        ((kinds, order),) = copies.orders.items()
        with pytest.raises(ZeroDivisionError), copies.running(kinds):
            for piece in order[:3]:
                streamer.enter(piece)
            raise ZeroDivisionError
        with copies.running(kinds, is_cut=True):
            assert streamer._expected is None and streamer.watched is None
        assert streamer._expected is None and streamer._order is None and copies.orders == {kinds: order}
        for one, other in zip(answers(model, "gemma4", batch), expected, strict=True):
            assert torch.equal(one, other)


def test_few_orders_are_known(monkeypatch, tmp_path):
    monkeypatch.setattr(tower_copies, "MOST_KINDS", 1)
    with placed_load("gemma4", tmp_path, "all") as model:
        copies, pieces = TowerCopies(model.streamer), model.streamer.groups[0].pieces
        for kinds in ("a", "b"):
            with copies.running(kinds):
                for piece in pieces:
                    model.streamer.enter(piece)
        assert copies.orders == {"a": pieces}
