"""Tables for a screen: rows of texts become lines of aligned columns."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from trimtab.printable import printable


def aligned(rows: Sequence[Sequence[str]], *, right: Collection[int] = (), indent: str = "") -> list[str]:
    """Return one line for each row, without trailing spaces. right: right-aligned columns.

    Errors: ValueError if the rows are not of one length.
    """
    rows = [[printable(cell, one_line=True) for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for row in rows:
        pairs = zip(row, widths, strict=True)
        cells = [cell.rjust(width) if at in right else cell.ljust(width) for at, (cell, width) in enumerate(pairs)]
        lines.append((indent + "  ".join(cells)).rstrip())
    return lines
