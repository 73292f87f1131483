"""GGUF checkpoints: every matrix is one tensor of blocks along its rows, each in any type.

The tensors stand here by the model's names (trimtab/gguf). Rows that the file has in another order are moved when they are read,
packed; columns of another order cross blocks, and are moved when a weight is dequantized.
"""

from __future__ import annotations

from dataclasses import replace

from trimtab.checkpoint.folder import Checkpoint
from trimtab.checkpoint.headers import TensorEntry
from trimtab.formats.record import GGML_BLOCKS, INDEXED, PackedEntry, refuse


def read(checkpoint: Checkpoint) -> tuple[dict[str, TensorEntry], dict[str, PackedEntry]]:
    """Return (plain tensors, packed weights by name). Errors: CheckpointError for a type that is not read."""
    plain = {name: entry for name, entry in checkpoint.tensors.items() if name not in checkpoint.orders}
    packed: dict[str, PackedEntry] = {}
    problems: list[tuple[str, str]] = []
    for name, orders in checkpoint.orders.items():
        entry = checkpoint.tensors[name]
        kind = entry.dtype.lower()
        if kind not in GGML_BLOCKS:
            problems.append((name, f"{entry.dtype} is not read"))
            continue
        values, nbytes = GGML_BLOCKS[kind]
        rows, columns = entry.shape
        part = replace(entry, dtype="uint8", shape=(rows, columns // values * nbytes))
        named = kind + (INDEXED if "columns" in orders else "")
        packed[name] = PackedEntry(name, named, entry.shape, "bfloat16", None, False, {"weight": part}, orders)
    refuse(checkpoint, problems)
    return plain, packed
