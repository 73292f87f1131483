"""How blocks are cut into pieces that are copied one by one, and in which order a pass copies them."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.planning.values.test_execution import E4B
from trimtab.planning.values.blocks import _pieces_of as pieces_of
from trimtab.planning.values.blocks import blocks_of
from trimtab.planning.values.copy_order import CopyOrder, Piece, blocks_in


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
    assert names(pieces_of([*MLP, *ATTENTION])) == [
        ["gate_proj", "up_proj"], ["down_proj", "q_proj", "k_proj", "v_proj", "o_proj"]
    ]  # fmt: skip
    equal = [linear(f"self_attn.{name}_proj", 10, 10) for name in "qkvo"] + MLP
    assert names(pieces_of(equal))[0] == ["q_proj", "k_proj", "v_proj", "o_proj"]


def test_modules_that_are_listed_in_another_order_are_together_all_the_same():
    turned = [ATTENTION[0], ATTENTION[3], *MLP, ATTENTION[1], ATTENTION[2]]
    assert names(pieces_of(turned))[0] == ["q_proj", "k_proj", "v_proj", "o_proj"]


def test_the_experts_of_a_layer_are_one_piece():
    experts = [Weight("layers.0.mlp.experts", (4, 20, 10)), Weight("layers.0.mlp.experts", (4, 10, 10))]
    assert pieces_of([*ATTENTION, *experts])[-1] == ("layers.0.mlp.experts",)
    assert pieces_of([]) == ()


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
