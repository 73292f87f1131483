"""How blocks are cut into pieces, in which order a pass copies them, and which layers are copied in every step."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.planning.values.test_execution import E4B, GIB, card, off_device, plan, with_int8_head
from tests.raised import raised
from trimtab.errors import DoesNotFitError
from trimtab.planning.values.blocks import Choice, Item, blocks_of
from trimtab.planning.values.blocks import _pieces_of as pieces_of
from trimtab.planning.values.byte_sizes import Rates, Weights, Work, unhidden_s
from trimtab.planning.values.copy_order import CopyOrder, Piece, blocks_in
from trimtab.planning.values.pipeline import Stage, evened, pipeline_s


@dataclass(frozen=True)
class Weight:
    module_path: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return self.shape[0] * self.shape[-1]


def linear(path: str, d_out: int, d_in: int) -> Weight:
    return Weight(f"layers.0.{path}", (d_out, d_in))


ATTENTION = [
    linear("self_attn.q_proj", 8, 10), linear("self_attn.k_proj", 2, 10), linear("self_attn.v_proj", 2, 10),
    linear("self_attn.o_proj", 10, 8),
]  # fmt: skip
MLP = [linear("mlp.gate_proj", 40, 10), linear("mlp.up_proj", 40, 10), linear("mlp.down_proj", 10, 40)]


def names(pieces) -> list[list[str]]:
    return [[path.rpartition(".")[2] for path in piece] for piece in pieces]


def test_what_reads_one_input_is_one_piece_and_small_neighbours_are_joined():
    small = [linear("per_layer_input_gate", 2, 10), linear("per_layer_projection", 10, 2)]
    assert names(pieces_of([*ATTENTION, *MLP, *small])) == [
        ["q_proj", "k_proj", "v_proj", "o_proj"], ["gate_proj", "up_proj"],
        ["down_proj", "per_layer_input_gate", "per_layer_projection"],
    ]  # fmt: skip


def test_attention_first_or_last_and_a_model_whose_sides_are_equal():
    assert names(pieces_of([*MLP, *ATTENTION])) == [["gate_proj", "up_proj"], ["down_proj", "q_proj", "k_proj", "v_proj", "o_proj"]]
    equal = [linear(f"self_attn.{name}_proj", 10, 10) for name in "qkvo"] + MLP
    assert names(pieces_of(equal))[0] == ["q_proj", "k_proj", "v_proj", "o_proj"]


def test_modules_that_are_listed_in_another_order_are_together_all_the_same():
    turned = [ATTENTION[0], ATTENTION[3], *MLP, ATTENTION[1], ATTENTION[2]]
    assert names(pieces_of(turned))[0] == ["q_proj", "k_proj", "v_proj", "o_proj"]


def test_the_experts_of_a_layer_are_one_piece():
    experts = [Weight("layers.0.mlp.experts", (4, 20, 10)), Weight("layers.0.mlp.experts", (4, 10, 10))]
    assert pieces_of([*ATTENTION, *experts])[-1] == ("layers.0.mlp.experts",) and pieces_of([]) == ()


def test_every_layer_of_the_real_size_has_three_pieces_that_fill_its_buffer():
    layers = [block for block in blocks_of(E4B, "nf4-dq") if block.is_decoder_layer]
    assert len(layers) == 42
    for block in layers:
        own = {"k_proj", "v_proj"} if len(block.leaves) == 9 else set()
        attention, up, down = map(set, names(block.pieces))
        assert attention == {"q_proj", "o_proj"} | own and up == {"gate_proj", "up_proj"}
        assert down == {"down_proj", "per_layer_input_gate", "per_layer_projection"}
        assert sum(block.piece_bytes) == block.buffer_bytes and block.piece_bytes[1] == max(block.piece_bytes)


WEIGHTS = st.lists(
    st.builds(
        lambda parent, name, d_out, d_in: Weight(f"{parent}.{name}", (d_out, d_in)),
        st.sampled_from(["self_attn", "mlp", "x.y"]), st.sampled_from("abcdefgh"), st.integers(1, 9), st.integers(1, 3),
    ),
    max_size=12, unique_by=lambda one: one.module_path,
)  # fmt: skip


@given(WEIGHTS)
def test_pieces_hold_every_weight_once_and_what_reads_one_input_together(weights):
    pieces = pieces_of(weights)
    assert sorted(path for piece in pieces for path in piece) == sorted(one.module_path for one in weights)
    number = {path: count for count, piece in enumerate(pieces) for path in piece}
    for one in weights:
        for other in weights:
            parents = {weight.module_path.rpartition(".")[0] for weight in (one, other)}
            if len(parents) == 1 and one.shape[1] == other.shape[1]:
                assert number[one.module_path] == number[other.module_path]
    by_path = {one.module_path: one for one in weights}
    sizes = [sum(by_path[path].nbytes for path in piece) for piece in pieces]
    groups: dict[tuple[str, int], int] = {}
    for one in weights:
        key = one.module_path.rpartition(".")[0], one.shape[1]
        groups[key] = groups.get(key, 0) + one.nbytes
    assert max(sizes, default=0) == max(groups.values(), default=0), "joining makes nothing larger than the largest"


# The order of copies -------------------------------------------------------------------------------------------------------


class Block:
    def __init__(self, name: str, *sizes: int) -> None:
        ends = [sum(sizes[: number + 1]) for number in range(len(sizes))]
        self.name = name
        self.pieces = [Piece(self, end - size, end) for size, end in zip(sizes, ends, strict=True)]


def told(order: CopyOrder) -> list[list[tuple[str, int, int]]]:
    return [[(copy.block.name, copy.start, copy.end) for copy in due] for due in order.due]


def entered(*blocks: Block) -> list[Piece]:
    return [piece for block in blocks for piece in block.pieces]


def test_a_piece_is_copied_once_what_lies_in_its_place_has_been_used():
    a, b = Block("a", 2, 6), Block("b", 4, 2, 2)
    order = CopyOrder(entered(a, b), 1)
    # b's first piece lies over both of a's; of a's pieces the second needs all of b.
    assert told(order) == [[], [("b", 0, 4), ("b", 4, 6), ("b", 6, 8)], [("a", 0, 2)], [], [("a", 2, 8)]]
    assert order.steps == [*a.pieces, *b.pieces] and order.last == {a: 1, b: 4}


def test_a_block_with_a_buffer_to_itself_is_never_copied_again():
    a, b, c = Block("a", 1, 1), Block("b", 1, 1), Block("c", 1, 1)
    order = CopyOrder(entered(a, b, c), 2)
    assert order.slot_of == {a: 0, b: 1, c: 0}
    assert told(order) == [[("c", 0, 1)], [("c", 1, 2)], [], [], [("a", 0, 1)], [("a", 1, 2)]]
    assert told(CopyOrder(entered(a, b, c), 3)) == [[]] * 6


@pytest.mark.parametrize("numbers", [(1,), (0, 1, 0), (0, 1, 2, 0), (2, 1, 2)])
def test_a_block_is_copied_as_a_whole_unless_each_of_its_pieces_is_entered_once(numbers):
    a, b = Block("a", 1, 1, 1), Block("b", 1, 1, 1)
    order = CopyOrder([*a.pieces, *(b.pieces[number] for number in numbers)], 1)
    assert told(order) == [[], [], [("b", 0, 3)], [("a", 0, 1), ("a", 1, 2), ("a", 2, 3)]]
    assert {order.place[b.pieces[number]] for number in numbers} == {3} and order.last[b] == 3


def test_pieces_that_are_entered_in_another_order_are_copied_in_that_order():
    a, b = Block("a", 1, 2), Block("b", 1, 2)
    order = CopyOrder([*reversed(a.pieces), *reversed(b.pieces)], 1)
    assert told(order) == [[("b", 1, 3)], [("b", 0, 1)], [("a", 1, 3)], [("a", 0, 1)]]


@given(st.lists(st.lists(st.integers(1, 5), min_size=1, max_size=4), min_size=1, max_size=8), st.integers(1, 3))
def test_every_copy_comes_before_its_piece_and_after_all_that_it_overwrites(sizes, slots):
    blocks = [Block(str(number), *one) for number, one in enumerate(sizes)]
    order = CopyOrder(entered(*blocks), slots)
    assert order.blocks == blocks and order.steps == entered(*blocks)
    again = [block for number, block in enumerate(blocks) if len(blocks[number % slots :: slots]) > 1]
    copies = [(place, copy) for place, due in enumerate(order.due) for copy in due]
    assert sorted(id(copy) for _, copy in copies) == sorted(id(piece) for block in again for piece in block.pieces)
    for place, copy in copies:
        number = blocks.index(copy.block)
        before = blocks[number - slots] if number >= slots else blocks[number % slots :: slots][-1]
        assert number < slots or place < order.place[copy]
        over = [one for one in before.pieces if one.start < copy.end and copy.start < one.end]
        assert all(order.place[one] <= place for one in over)
        assert not over or place == max(
            max(order.place[one] for one in over),
            max((at for at, other in copies if other.block is copy.block and other.start < copy.start), default=0),
        )


@pytest.mark.parametrize("slots", [1, 2])
def test_blocks_in_keeps_a_block_that_comes_back(slots):
    a, b = Block("a", 1, 1), Block("b", 1)
    assert blocks_in([*a.pieces, *b.pieces, a.pieces[0]]) == [a, b, a] and blocks_in([]) == []


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
    assert pipeline_s(side_by_side, link_Bps=1, slots=2) == 11 + 4 * 4 and pipeline_s(side_by_side, link_Bps=1, slots=4) == 14
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


@given(st.lists(st.tuples(SECONDS, st.integers(0, 50)), min_size=1, max_size=20), st.integers(1, 4), st.floats(1, 100))
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
    return pipeline_s([Stage(1e-3, choice.staged_bytes) for choice in chosen], link_Bps=40e9, slots=2)


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
    least = raised(DoesNotFitError, plan, 8, decode="fused", gpu_memory_bytes=int(2.3 * GIB), is_advised=False).needed_bytes
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
