"""What do experts in host memory with slots on the card take, and what does a step fetch?"""

from __future__ import annotations

from collections.abc import Sequence

from trimtab.checkpoint.anatomy import Anatomy, ModuleRow
from trimtab.formats.record import packed_parts
from trimtab.planning.values.blocks import Block
from trimtab.planning.values.byte_sizes import ALIGN_BYTES, buffer_bytes, round_up

# Of an expert's number, of a slot's expert and last use, and of what a step brings.
_WHERE_BYTES, _SLOT_BYTES = 4, 16


def rows_of(anatomy: Anatomy) -> list[ModuleRow]:
    """Return the modules whose experts can be apart: every stack is packed."""
    return [row for row in anatomy.rows if row.stacks and all(row.form_of(one) is not None for one in row.stacks)]


def limits_of(anatomy: Anatomy) -> tuple[int, int] | None:
    """Return the fewest and the most slots of a module; None where the experts of a model cannot be apart."""
    rows = rows_of(anatomy)
    if not rows or len(rows) < sum(bool(row.stacks) for row in anatomy.rows) or not all(row.chosen for row in rows):
        return None
    least, most = max(row.chosen for row in rows), min(row.stacks[0].shape[0] for row in rows)
    return (least, most) if least < most else None


def slots_bytes(anatomy: Anatomy, slots: int) -> int:
    """Return the device bytes of the slots of all modules, with their tables."""
    return sum(row_bytes(row, slots) for row in rows_of(anatomy))


def row_bytes(row: ModuleRow, slots: int) -> int:
    """Return the device bytes of one module's slots, with their tables and with what stays whole of its stacks."""
    count = row.stacks[0].shape[0]
    shapes = [((slots, *one.shape[1:]), row.form_of(one) or "", one.dtype) for one in row.stacks]
    whole = len(row.stacks) * round_up(count * 8, ALIGN_BYTES)
    tables = 4 * ALIGN_BYTES + count * _WHERE_BYTES + slots * _SLOT_BYTES
    return sum(buffer_bytes(packed_parts(*one)) for one in shapes) + whole + tables


def stacks_bytes(anatomy: Anatomy) -> int:
    """Return the host bytes of the experts of all modules."""
    stacks = [(one, row.form_of(one) or "") for row in rows_of(anatomy) for one in row.stacks]
    return sum(buffer_bytes(packed_parts(one.shape, form, one.dtype)) for one, form in stacks)


def fetched_bytes(blocks: Sequence[Block], tokens: int, slots: int, *, in_turns: bool = False) -> int:
    """Return the bytes that a pass of this many tokens reads over the link. in_turns: as those of a prompt, each expert once; in a
    step each token reads a chosen expert for which no slot is left by itself. Every expert is assumed to be as likely as any other;
    a skewed router finds more of them in slots."""
    taken = 0.0
    for block in blocks:
        count, share = block.expert_count, block.expert_share
        if count <= slots:
            continue
        chosen = count * (1 - (1 - share) ** tokens)
        held = chosen * slots / count
        read = chosen - held
        if not in_turns and (left := read - (slots - held)) > 0:
            read += left * (tokens * share * count / chosen - 1)
        taken += read * block.expert_bytes / count
    return int(taken)
