"""Streamed towers copied in a known order between captured chunks: the bits of passes without it, in every family with images.

A stand-in replays chunks on a CPU: as a graph does, it begins and ends with the first layers in the buffers. tests/gpu runs the same
tests with graphs and streams. What copies wait for is in test_staging_order.py.
"""

from __future__ import annotations

import os

import pytest
import torch

from tests.test_prefill import WITH_PICTURES, Again, captured, load, picture, through
from trimtab.plan.pieces import blocks_in
from trimtab.runtime import tower_copies
from trimtab.runtime.prefill_graphs import Prompts
from trimtab.runtime.step_capture import in_pass
from trimtab.runtime.tiers import CopyOrder, is_cycle
from trimtab.runtime.tower_copies import TowerCopies

ON_GPU = os.environ.get("TRIMTAB_TEST_DEVICE", "cpu") != "cpu"
ALL = {"place": {"*": "stream", "table": "gather"}}
TOWERS = {"place": {"vision": "stream", "audio": "stream", "connector": "stream"}}


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


def with_slots(model, slots):
    assert len(model.streamer.slots) == 2
    model.streamer.slots, model.streamer.poison = model.streamer.slots[:slots], True
    return model


class Off(TowerCopies):
    def running(self, kinds, *, is_cut=False):
        return super().running(kinds, is_cut=True)


@pytest.mark.parametrize("slots", [1, 2])
@pytest.mark.parametrize("placed", [ALL, TOWERS], ids=["all", "towers"])
@pytest.mark.parametrize("family", WITH_PICTURES)
def test_the_bits_are_those_of_towers_copied_block_by_block(family, placed, slots, tmp_path, as_graphs, monkeypatch):
    with load(family, tmp_path / "a", **placed) as model:
        batch = captured(with_slots(model, slots), (16, 32))
        batch.prompts.tower_passes.copies = Off(model.streamer)
        expected = answers(model, family, batch)
    assert not any(torch.equal(expected[0], one) for one in expected[1:])
    with load(family, tmp_path / "b", **placed) as model:
        streamer, ends = with_slots(model, slots).streamer, []
        whole = type(streamer).end_expected

        def seen(self):
            ends.append((self._order is not None and self._in_order, self._order, whole(self), [s.owner for s in self.slots]))

        monkeypatch.setattr(type(streamer), "end_expected", seen)
        batch = captured(model, (16, 32))
        found = answers(model, family, batch)
        for one, other in zip(found, expected, strict=True):
            assert torch.equal(one, other)
        (order,) = batch.prompts.tower_passes.copies.orders.values()
        assert is_cycle(order) and len(blocks_in(order)) > 2
        assert [kept for kept, *_ in ends] == [False, True, True, True, True], "the first pass shows the order"
        decoder = blocks_in(streamer.replayed)
        assert bool(decoder) == (placed is ALL)
        for _, copy_order, _, owners in ends[3:]:
            assert owners == copy_order.closing == [*decoder, *blocks_in(order)[len(decoder) :]][:slots]


def test_what_lies_beyond_the_tower_s_blocks_stays_in_the_buffer(tmp_path, as_graphs):
    """The last pass copies the tower once, and of the decoder's first layer the pieces that it has overwritten."""
    with load("gemma4", tmp_path, **ALL) as model:
        batch = captured(with_slots(model, 1), (16, 32))
        answers(model, "gemma4", batch)
        copies, streamer = batch.prompts.tower_passes.copies, model.streamer
        ((kinds, order),) = copies.orders.items()
        first = blocks_in(streamer.replayed)[0]
        reach = max(block.nbytes for block in blocks_in(order))
        again = [piece for piece in first.pieces if piece.start < reach]
        before, entered = streamer.copied_bytes, 0
        inputs = picture(model, "gemma4", 5)
        with torch.no_grad(), copies.running(kinds):
            for piece in order:
                streamer.enter(piece)
        assert inputs and entered == 0 and streamer.slots[0].owner is first
        assert streamer.copied_bytes - before == sum(block.nbytes for block in blocks_in(order)) + sum(
            piece.nbytes for piece in again
        )


def test_a_wrong_order_of_copies_changes_the_bits(tmp_path, as_graphs, monkeypatch):
    """A fault is planted: the decoder's first layer counts as intact where the tower has been."""

    class Wrong(CopyOrder):
        def __init__(self, *args, following=(), **options):
            super().__init__(*args, following=following, **options)
            lost = {block for block in following if block in self.final and block not in self.last}
            for block in lost:
                self.due = [[Piece0(copy) if copy.block is block else copy for copy in due] for due in self.due]
                self.final[block] = next(copy for due in self.due for copy in reversed(due) if copy.block is block)

    def Piece0(copy):
        return type(copy)(copy.block, copy.end, copy.end)

    with load("gemma4", tmp_path / "a", **ALL) as model:
        expected = answers(model, "gemma4", captured(with_slots(model, 1), (16, 32)))
    monkeypatch.setattr("trimtab.runtime.tiers.CopyOrder", Wrong)
    with load("gemma4", tmp_path / "b", **ALL) as model:
        found = answers(model, "gemma4", captured(with_slots(model, 1), (16, 32)))
    assert not all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))


def test_a_pass_that_fails_or_is_cut_leaves_nothing_expected(tmp_path, as_graphs):
    with load("gemma4", tmp_path, **ALL) as model:
        batch = captured(with_slots(model, 2), (16, 32))
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
    with load("gemma4", tmp_path, **ALL) as model:
        copies, pieces = TowerCopies(model.streamer), model.streamer.groups[0].pieces
        for kinds in ("a", "b"):
            with copies.running(kinds):
                for piece in pieces:
                    model.streamer.enter(piece)
        assert copies.orders == {"a": pieces}
