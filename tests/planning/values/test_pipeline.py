"""Which layers are copied in every step: orders are tried, and the seconds are those of a link that works ahead by its buffers."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.planning.values.test_execution import E4B, GIB, card, off_device, plan, with_int8_head
from trimtab.errors import DoesNotFitError
from trimtab.planning.values.blocks import Choice, Item, blocks_of
from trimtab.planning.values.byte_sizes import Rates, Weights, Work, unhidden_s
from trimtab.planning.values.pipeline import Stage, evened, pipeline_s

BLOCKS = [
    block for block in blocks_of(E4B, "nf4-dq") if block.block_path.rpartition(".")[2].isdecimal() and block.part == "language"
]


def test_a_link_that_is_slower_than_computing_sets_the_time():
    stages = [Stage(1.0, 10), Stage(1.0, 10), Stage(1.0, 10)]
    # One buffer: each copy begins when the layer in the buffer is computed, the last one is for the next step.
    assert pipeline_s(stages, link_Bps=2, slots=1) == 3 * (1 + 5)
    # Two: the second layer stays in its own, the others take turns in the first.
    assert pipeline_s(stages, link_Bps=2, slots=2) == 1 + 5 + 1 + 5


@pytest.mark.parametrize("slots", [1, 2, 3])
def test_blocks_that_are_no_more_than_the_buffers_are_not_copied_again(slots):
    stages = [Stage(1.0), *[Stage(1.0, 10)] * slots, Stage(1.0)]
    assert pipeline_s(stages, link_Bps=1e-3, slots=slots) == slots + 2


def test_buffers_bound_how_far_the_link_works_ahead():
    """Side by side the link is idle before the first copied layer; spread over the step it is not."""
    side_by_side = [*[Stage(1.0)] * 10, *[Stage(1.0, 4)] * 4]
    assert pipeline_s(side_by_side, link_Bps=1, slots=2) == 11 + 4 * 4
    assert pipeline_s(side_by_side, link_Bps=1, slots=4) == 14
    spread = [one for _ in range(4) for one in (Stage(1.0, 4), *[Stage(1.0)] * 2)] + [Stage(1.0)] * 2
    assert pipeline_s(spread, link_Bps=1, slots=2) == 1 + 4 * 4


def test_one_buffer_goes_on_copying_while_the_rest_of_a_layer_is_computed():
    """A layer in three pieces, 1 s to compute and 5 s to copy: the link stops for nothing but the layers that stay."""
    stages = [Stage(1.0, 10, (2, 6, 2))] * 3
    whole = pipeline_s([Stage(1.0, 10)] * 3, link_Bps=2, slots=1)
    # A piece's copy begins once it has been computed with, 0.2 s into a step; what follows waits for copies alone.
    assert whole == 18 and pipeline_s(stages, link_Bps=2, slots=1) == pytest.approx(0.2 + 3 * 5)
    # What lies in a piece's place is waited for: a larger first piece begins once two have been computed with.
    shifted = [Stage(1.0, 10, (2, 6, 2)), Stage(1.0, 10, (6, 4)), Stage(1.0, 10, (2, 6, 2))]
    assert 15.2 < pipeline_s(shifted, link_Bps=2, slots=1) < whole


# Seconds without the smallest floats, whose parts cannot be told apart.
SECONDS = st.integers(0, 2000).map(lambda thousandths: thousandths / 1000)
CUTS = st.lists(st.integers(1, 30), min_size=1, max_size=4)


@given(st.lists(st.tuples(SECONDS, st.one_of(st.just([]), CUTS)), min_size=1, max_size=20), st.integers(1, 4), st.floats(1, 100))
def test_pieces_make_no_step_slower(given_stages, slots, link_Bps):
    whole = [Stage(seconds, sum(pieces)) for seconds, pieces in given_stages]
    cut = [Stage(seconds, sum(pieces), tuple(pieces)) for seconds, pieces in given_stages]
    taken_s = pipeline_s(cut, link_Bps=link_Bps, slots=slots)
    assert taken_s <= pipeline_s(whole, link_Bps=link_Bps, slots=slots) * (1 + 1e-9)
    copied = [one.copied_bytes for one in cut if one.copied_bytes]
    again = [count for place, count in enumerate(copied) if len(copied[place % slots :: slots]) > 1]
    assert taken_s * (1 + 1e-9) >= max(sum(again) / link_Bps, sum(one.seconds for one in cut))


@given(
    st.lists(st.tuples(SECONDS, st.integers(0, 50)), min_size=1, max_size=20), st.integers(1, 4),
    st.floats(1, 100),
)  # fmt: skip
def test_no_step_is_faster_than_its_link_or_its_computing(given_stages, slots, link_Bps):
    stages = [Stage(*one) for one in given_stages]
    found = pipeline_s(stages, link_Bps=link_Bps, slots=slots)
    copied = [one.copied_bytes for one in stages if one.copied_bytes]
    # A buffer that only one block uses keeps it.
    again = [count for place, count in enumerate(copied) if len(copied[place % slots :: slots]) > 1]
    link_s, computing_s = sum(again) / link_Bps, sum(one.seconds for one in stages)
    assert max(link_s, computing_s) <= found * (1 + 1e-9) and found <= (link_s + computing_s) * (1 + 1e-9)


# Another order -------------------------------------------------------------------------------------------------------------


def item(block) -> Item:
    stay = Choice("resident", "device", block.movable_allocated_bytes, 0, 0, 0, 0.0, 0.0, 0.0)
    away = Choice("stream", "host", 0, block.buffer_bytes, 0, block.buffer_bytes, 0.0, 0.0, 0.0)
    return Item((stay, away), False, 0, 0)


ITEMS = [item(block) for block in BLOCKS]


def side_by_side(first: int, count: int) -> list[Choice]:
    return [one.choices[first <= number < first + count] for number, one in enumerate(ITEMS)]


def seconds(chosen) -> float:
    stages = [Stage(1e-3, choice.staged_bytes) for choice in chosen]
    return pipeline_s(stages, link_Bps=40e9, slots=2)


def freed(chosen) -> int:
    return sum(choice.tier == "stream" and choice.host_bytes for choice in chosen)


def test_layers_side_by_side_are_spread_where_that_takes_less():
    chosen = side_by_side(4, 20)
    least = freed(chosen)
    found = evened(
        BLOCKS, ITEMS, chosen, is_free=lambda _: True, is_allowed=lambda tried: freed(tried) >= least, seconds_of=seconds
    )
    assert seconds(found) < seconds(chosen) and freed(found) >= least
    numbers = [number for number, choice in enumerate(found) if choice.tier == "stream"]
    assert max(b - a for a, b in zip(numbers, numbers[1:])) <= 3


def test_nothing_changes_where_nothing_better_is_allowed():
    chosen = side_by_side(4, 20)
    for is_free, is_allowed in ((lambda _: True, lambda _: False), (lambda _: False, lambda _: True)):
        assert evened(BLOCKS, ITEMS, chosen, is_free=is_free, is_allowed=is_allowed, seconds_of=seconds) == chosen
    resident = side_by_side(0, 0)
    assert evened(BLOCKS, ITEMS, resident, is_free=lambda _: True, is_allowed=lambda _: True, seconds_of=seconds) == resident


@pytest.mark.parametrize("gib", [3.2, 3.4, 3.5, 3.6])
def test_a_plan_keeps_its_budget_and_what_was_placed_by_hand(gib):
    by_hand = {f"model.language_model.layers.{number}": "stream" for number in range(3)}
    made = plan(gib, head="int8", anatomy=with_int8_head(E4B), machine=card(gib), place=by_hand)
    assert made.gpu_needed_bytes <= gib * GIB and off_device(made) >= 3
    assert all(row.tier == "stream" for row in made.placements if row.block_path in by_hand)


def test_one_buffer_is_chosen_where_the_copies_of_a_step_fit_behind_it():
    made = plan(3.65, head="int8", anatomy=with_int8_head(E4B), machine=card(3.65))
    assert made.staging_slots == 1 and 0 < off_device(made) <= 4
    assert made.gpu["staging"] == max(row.host_bytes for row in made.placements if row.tier == "stream")
    assert made.execution.tokens_per_s > 300


def test_one_buffer_is_taken_where_two_do_not_fit():
    with pytest.raises(DoesNotFitError) as refused:
        plan(8, decode="fused", gpu_memory_bytes=int(2.3 * GIB), is_advised=False)
    least = refused.value.needed_bytes
    made = plan(8, decode="fused", gpu_memory_bytes=least)
    assert made.staging_slots == 1 and made.gpu_needed_bytes <= least
    assert made.gpu["staging"] == max(row.host_bytes for row in made.placements if row.tier == "stream")
    wider = plan(8, decode="fused", gpu_memory_bytes=least + 150 * 2**20)
    assert wider.execution.tokens_per_s > made.execution.tokens_per_s


def test_with_one_buffer_a_prompt_copies_and_computes_in_turn():
    rates = Rates(pinned_h2d_Bps=100, device_Bps=1000, launch_s=1e-9, transfer_s=1e-9)
    work = Work(passes=3, prompt_rows=6, step_rows=1)
    for nbytes, flops, shorter_s in ((1000, 0, 1.0), (100, 10 * rates.device_flops, 1.0)):
        added_s = unhidden_s(Weights(nbytes=nbytes, flops=flops, leaves=1), work, rates, pinned=True)
        assert added_s == pytest.approx(3 * shorter_s)
    idle = Work(passes=0, prompt_rows=0, step_rows=0)
    assert unhidden_s(Weights(nbytes=1000, flops=0, leaves=1), idle, rates, pinned=True) == 0
