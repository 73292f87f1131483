"""The anatomy as JSON and back, equal in every field; rows are lists in field order, which keeps the file small."""

from __future__ import annotations

import json
from dataclasses import fields, replace
from typing import Any

from trimtab.checkpoint.anatomy import Anatomy, KVLayer, ModuleRow, TensorRow
from trimtab.checkpoint.renames import Rename
from trimtab.process.json_file import parse

FORM = 1


def form() -> list[Any]:
    """Return the names of the rows' fields. A reader compares them, because another release may have others."""
    return [FORM, *([item.name for item in fields(kind)] for kind in (Anatomy, ModuleRow, TensorRow, KVLayer))]


def write_anatomy(anatomy: Anatomy) -> str:
    """Return the anatomy as JSON text."""
    rows = [[*_values(row, without="tensors"), [_values(tensor) for tensor in row.tensors]] for row in anatomy.rows]
    whole = {
        "form": form(), "anatomy": _values(replace(anatomy, rows=(), kv_layers=())), "rows": rows,
        "kv_layers": [_values(layer) for layer in anatomy.kv_layers],
    }  # fmt: skip
    return json.dumps(whole, separators=(",", ":"))


def _values(item: Any, *, without: str = "") -> list[Any]:
    return [getattr(item, field.name) for field in fields(item) if field.name != without]


def read_anatomy(text: str) -> Anatomy:
    """Return the anatomy that `write_anatomy` wrote. Errors: ValueError for any other text."""
    whole = parse(text.encode(), "own state")
    if not isinstance(whole, dict) or whole.get("form") != form():
        raise ValueError("not an anatomy of this release")
    try:
        anatomy = Anatomy(*(_frozen(value) for value in whole["anatomy"]))
        return replace(
            anatomy, rows=tuple(_row(values) for values in whole["rows"]),
            renames=tuple(Rename(*values) for values in anatomy.renames),
            kv_layers=tuple(KVLayer(*values) for values in whole["kv_layers"]),
        )  # fmt: skip
    except (TypeError, KeyError) as exc:
        raise ValueError(f"not an anatomy: {exc}") from exc


def _row(values: list[Any]) -> ModuleRow:
    *plain, tensors = values
    names = [field.name for field in fields(ModuleRow) if field.name != "tensors"]
    rows = tuple(TensorRow(*(_frozen(value) for value in tensor)) for tensor in tensors)
    return ModuleRow(**dict(zip(names, plain, strict=True)), tensors=rows)


def _frozen(value: Any) -> Any:
    return tuple(_frozen(item) for item in value) if isinstance(value, list) else value
