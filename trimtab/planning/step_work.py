"""Reads, copies and kernel launches of one decode step of a placement, block by block in order; rows and linears of a prompt."""

from __future__ import annotations

from collections.abc import Sequence

from trimtab.checkpoint.anatomy import Anatomy
from trimtab.formats.record import stored_format
from trimtab.planning.memory.activations import Use
from trimtab.planning.memory.towers import PARTS
from trimtab.planning.values.blocks import Block, widened_bytes
from trimtab.planning.values.budget import STAGING_SLOTS, Choice
from trimtab.planning.values.execution import (
    EXPERT_LAYER_S,
    EXPERT_RATE_SHARE,
    ROW_LAYER_S,
    ROW_VALUE_S,
    STATE_LAYER_S,
    STATE_ROW_S,
    BlockWork,
    StepWork,
    head_bytes,
    head_rows,
    rows_beyond_first,
)


def step_work(
    anatomy: Anatomy, blocks: Sequence[Block], chosen: Sequence[Choice], *, rows: int, slots: int = STAGING_SLOTS,
    reads_packed: bool = False,
) -> StepWork:  # fmt: skip
    """Return the work of one decode step of `rows` rows with the blocks in their placements, a choice for each block.
    slots: staging buffers. reads_packed: as `execution.reads_packed`.
    """
    device = link = linears = layers = 0
    other_s = row_s = 0.0
    states = {str(layer.layer) for layer in anatomy.kv_layers if layer.state_values}
    first: list[BlockWork] = []  # modules outside the layers come before them
    after: list[BlockWork] = []
    for block, choice in zip(blocks, chosen, strict=True):
        if block.paid != "token":
            continue
        if block.is_table:
            other_s += choice.step_s
            continue
        is_layer = block.is_decoder_layer
        linears, layers = linears + len(block.leaves), layers + is_layer
        if choice.tier == "host":
            other_s += choice.step_s
            continue
        copied = block.movable_bytes if choice.tier == "stream" else 0
        own = block.read_bytes(rows)
        if reads_packed and block.expert_bytes:
            others = block.movable_bytes - (0 if block.are_apart else block.expert_bytes)
            own = others + int(rows * block.expert_bytes * block.expert_share / EXPERT_RATE_SHARE)
            other_s += EXPERT_LAYER_S[block.beside]
        if reads_packed and is_layer:
            is_state = block.block_path.rpartition(".")[2] in states
            other_s += block.layer_s + is_state * STATE_LAYER_S
            row_s += ROW_LAYER_S + ROW_VALUE_S * block.attended + is_state * STATE_ROW_S
        device, link = device + own + (0 if reads_packed else block.widened_bytes), link + copied
        other_s += choice.step_s if choice.tier == "disk" else 0.0
        one = BlockWork(own, copied, len(block.leaves), is_layer, block.piece_bytes if copied else ())
        (first if block.part == "language" and not is_layer else after).append(one)
    head = head_bytes(anatomy)
    tied = {path for row in head_rows(anatomy) for path in [row.weight and row.weight.tied_to] if path}
    read = {row.stored for row in head_rows(anatomy) if row.stored and stored_format(row.stored).layout} if reads_packed else set()
    head += sum(widened_bytes(row, anatomy.dtype) for row in head_rows(anatomy) if row.stored not in read)
    device += head if tied else 0  # a weight that the head shares with a table is no separate block
    return StepWork(
        device_bytes=device, link_bytes=link, other_s=other_s, tail_bytes=head, layers=layers, linears=linears,
        rows_s=row_s * rows_beyond_first(rows), blocks=(*first, *after), slots=max(slots, 1),
    )  # fmt: skip


def prompt_linears(anatomy: Anatomy, blocks: Sequence[Block], use: Use, *, is_cut: bool) -> tuple[int, int, int]:
    """Return the number of linears of the decoder, of its layers that only the last pass of a prompt enters, and of
    towers that run. is_cut: whether prompts are computed in chunks of fixed shapes: layers that read the keys of
    earlier ones then see only the last token (engine/passes/chunk_forward.py).
    """
    shared = {str(layer.layer) for layer in anatomy.kv_layers if layer.shares is not None and is_cut}
    whole = skipped = towers = 0
    for block in blocks:
        if block.part in PARTS and (use.patches or use.sound_s):
            towers += len(block.leaves)
        if block.paid == "token" and not block.is_table:
            whole += len(block.leaves)
            skipped += len(block.leaves) * (block.block_path.rpartition(".")[2] in shared)
    return whole, skipped, towers
