"""A step that was queued before its rows' last tokens were read: of which rows it is, and when it matches the requested one."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from trimtab.engine.batch.request import Row

# What a row was when the step was queued: its tokens, the last of them, and the serial of its adapter.
_Seen = tuple[int, int, tuple[str, int | None] | None]


@dataclass(frozen=True)
class QueuedStep:
    """The outputs of a queued step, and its rows. Shapes: logits [rows, V] float32, greedy [rows] int64. places: of each row."""

    logits: Tensor
    greedy: Tensor
    places: dict[Row, int]
    _seen: dict[Row, _Seen]

    @classmethod
    def of(
        cls, outputs: tuple[Tensor, Tensor], rows: Sequence[Row], new: Mapping[Row, int], serial_of: Callable[[str], int | None]
    ) -> QueuedStep:
        """Return the step of these rows. outputs: (logits, greedy). new: the tokens that are not in their rows' lists yet."""
        seen = {row: (len(row.token_ids) + (row in new), new.get(row, row.token_ids[-1]), _adapter(row, serial_of)) for row in rows}
        return cls(*outputs, {row: row.number for row in rows}, seen)

    def matches(self, rows: Sequence[Row], serial_of: Callable[[str], int | None]) -> bool:
        """Whether the step is that of these rows now: the same tokens, adapters and rows. A row that has finished has any."""
        return all(
            row in self._seen
            and (row.finish is not None or self._seen[row] == (len(row.token_ids), row.token_ids[-1], _adapter(row, serial_of)))
            for row in rows
        )


def _adapter(row: Row, serial_of: Callable[[str], int | None]) -> tuple[str, int | None] | None:
    return None if row.adapter is None else (row.adapter, serial_of(row.adapter))
