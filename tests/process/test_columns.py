"""Aligned columns: one function for every table of a screen."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import trimtab
from trimtab.process.text_table import aligned


def test_columns_are_as_wide_as_their_widest_cell():
    rows = [("name", "bytes", "why"), ("a", "10", "fits"), ("longer", "7", "")]
    assert aligned(rows, right={1}, indent=" ") == [" name    bytes  why", " a          10  fits", " longer      7"]
    assert aligned([]) == []


def test_rows_of_other_lengths_are_refused():
    with pytest.raises(ValueError, match="zip"):
        aligned([("a", "b"), ("c",)])


def test_no_other_module_aligns_columns_of_its_own():
    folder = Path(trimtab.__file__).parent
    own = {
        path.relative_to(folder).as_posix()
        for path in folder.rglob("*.py")
        if re.search(r"just\(width\)|:[<>]\{(left|right|width)\}", path.read_text(encoding="utf-8"))
    }
    assert own == {"process/text_table.py"}
