"""The cache of anatomies from earlier processes, so that a plan needs neither torch nor transformers.

The key of an entry has everything that shapes the tree: the hashes of config.json and of the other files that
transformers reads for it, the tensors' names, types and shapes, the request's formats, the releases of Python, torch,
transformers, bitsandbytes and this package, and this package's files. If the loader compared stored values, the weight
files must be the same files. An unreadable entry counts as missing.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from trimtab.checkpoint.anatomy import Anatomy, KVLayer, ModuleRow, TensorRow
from trimtab.checkpoint.folder import CONFIG, Checkpoint
from trimtab.checkpoint.names import Rename
from trimtab.formats.packed import split_packed
from trimtab.process.json_file import JsonError, parse, read_bytes
from trimtab.process.packages import deciding_versions
from trimtab.process.user_cache import hashed, own_folder, prune, read_own, touch, write_own
from trimtab.request import LoadRequest

FOLDER = "anatomies"
MOST_FILES, MOST_BYTES, MOST_FILE_BYTES = 64, 64 * 2**20, 16 * 2**20
# Files other than weights that transformers reads when it makes the empty model (5.6.2 to 5.23.0).
SHAPING_FILES = (CONFIG, "generation_config.json")
# This package's files that make an anatomy: an editable installation keeps its version when they change.
MAKERS = (
    "checkpoint/anatomy.py", "formats/*.py", "engine/loader/anatomy_builder.py", "engine/loader/transformers_model.py",
    "engine/loader/tracing.py", "engine/loader/pieces.py", "engine/families/*.py", "engine/kv/*.py", "engine/passes/*.py",
    "engine/lora/experts.py", "engine/lora/routers.py", "engine/towers/bounds_check.py",
)  # fmt: skip


def key_of(checkpoint: Checkpoint, request: LoadRequest, *, keeps_16bit: bool = False) -> str:
    """Return the cache key of a checkpoint's anatomy for a request, as text. request: its quant is not "auto"."""
    plain, packed = split_packed(checkpoint)
    tensors: list[tuple[Any, ...]] = [(name, entry.dtype, entry.shape) for name, entry in sorted(plain.items())]
    tensors += [(name, entry.kind, entry.dtype, entry.shape) for name, entry in sorted(packed.items())]
    facts = {
        "form": form(), "files": {name: _hash_of(checkpoint.folder / name) for name in SHAPING_FILES},
        "tensors": hashlib.sha256(json.dumps(tensors).encode()).hexdigest(), "has_weights": checkpoint.has_weights,
        "quant": request.quant, "dtype": request.dtype, "keep_unquantized": request.keep_unquantized, "head": request.head,
        "keeps_16bit": keeps_16bit, "experts": request.experts,
        "versions": deciding_versions(),
        "makers": [_stamp(file) for name in MAKERS for file in sorted(Path(__file__).parent.parent.glob(name))],
    }  # fmt: skip
    return json.dumps(facts, sort_keys=True)


def _hash_of(file: Path) -> str | None:
    try:
        return hashlib.sha256(read_bytes(file, file.name)).hexdigest()
    except (OSError, JsonError):
        return None


def _stamp(file: Path) -> tuple[int, int] | None:
    try:
        seen = file.stat()
    except OSError:
        return None
    return seen.st_size, seen.st_mtime_ns


def find_anatomy(checkpoint: Checkpoint, request: LoadRequest, *, keeps_16bit: bool = False) -> Anatomy | None:
    """Return the anatomy that an earlier process read of this checkpoint for the same kind of request, None if it was
    not cached.
    """
    key = key_of(checkpoint, request, keeps_16bit=keeps_16bit)
    with suppress(OSError, ValueError, KeyError, TypeError):
        path = own_folder(FOLDER) / hashed(key)
        text = read_own(path, key, limit_bytes=MOST_FILE_BYTES)
        if text is not None:
            whole = parse(text, "own state")
            if whole["values_of"] in (None, _same_files(checkpoint)):
                anatomy = read_anatomy(whole["anatomy"])
                touch(path)
                return anatomy
    return None


def keep_anatomy(
    checkpoint: Checkpoint, request: LoadRequest, anatomy: Anatomy, *, compares_values: bool, keeps_16bit: bool = False
) -> None:
    """Cache an anatomy for later processes. compares_values: whether it depends on stored values."""
    key = key_of(checkpoint, request, keeps_16bit=keeps_16bit)
    whole = {"values_of": _same_files(checkpoint) if compares_values else None, "anatomy": write_anatomy(anatomy)}
    contents = json.dumps(whole).encode()
    if len(contents) <= MOST_FILE_BYTES:
        with suppress(OSError):
            folder = own_folder(FOLDER)
            if read_own(folder / hashed(key), key, limit_bytes=MOST_FILE_BYTES) == contents:
                return
            write_own(folder / hashed(key), key, contents)
            prune(folder, most_files=MOST_FILES, most_bytes=MOST_BYTES)


def find_refusal(checkpoint: Checkpoint, request: LoadRequest, *, keeps_16bit: bool = False) -> str | None:
    """Return why an earlier process could make no anatomy of this checkpoint for the same kind of request, None if
    unknown.
    """
    key = key_of(checkpoint, request, keeps_16bit=keeps_16bit)
    with suppress(OSError, ValueError, KeyError, TypeError):
        text = read_own(own_folder(FOLDER) / hashed(key), key, limit_bytes=MOST_FILE_BYTES)
        whole = {} if text is None else parse(text, "own state")
        if isinstance(whole["refused"], str):
            return whole["refused"]
    return None


def keep_refusal(checkpoint: Checkpoint, request: LoadRequest, reason: str, *, keeps_16bit: bool = False) -> None:
    """Cache the reason why no anatomy could be made for a request."""
    key = key_of(checkpoint, request, keeps_16bit=keeps_16bit)
    with suppress(OSError):
        folder = own_folder(FOLDER)
        write_own(folder / hashed(key), key, json.dumps({"refused": reason}).encode())
        prune(folder, most_files=MOST_FILES, most_bytes=MOST_BYTES)


def _same_files(checkpoint: Checkpoint) -> list[Any]:
    """Return values that identify the weight files, in the form that JSON reads back."""
    stamps: Iterable[tuple[str, int, int]] = checkpoint.stamps
    return [str(checkpoint.folder.absolute()), *([*stamp] for stamp in stamps)]


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
