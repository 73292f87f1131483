"""Which weights does a GGUF checkpoint hold, each in any type?"""

from __future__ import annotations

from dataclasses import replace

from trimtab.checkpoint.folder import Checkpoint
from trimtab.checkpoint.headers import TensorEntry
from trimtab.formats.record import GGML_BLOCKS, INDEXED, PackedEntry, refuse

MISTRAL_WINDOW = 4096


def read(checkpoint: Checkpoint) -> tuple[dict[str, TensorEntry], dict[str, PackedEntry]]:
    """Return (plain tensors, packed weights by name). Errors: CheckpointError for a type that is not read. Rows that the file has
    in another order are moved when they are read, packed; columns of another order cross blocks, and are moved when a weight is
    dequantized."""
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
        packed[name] = PackedEntry(name, named, entry.shape, "bfloat16", {"weight": part}, orders)
    refuse(checkpoint, problems)
    return plain, packed


def window_reason(checkpoint: Checkpoint, context_tokens: int) -> str:
    """Return why answers to a longer context than the window of Mistral 7B 0.1 may differ from it; "" for others.

    llama.cpp's converter writes no window for the architecture `llama`, and llama.cpp computes none. Of its released models only
    that one has these positions. Source: config.json of mistralai/Mistral-7B-v0.1.
    """
    config, rope = checkpoint.config, {"rope_theta": 10000.0, "rope_type": "default"}
    if config.get("model_type") not in ("llama", "mistral") or context_tokens <= MISTRAL_WINDOW:
        return ""
    if config.get("rope_parameters") != rope or config.get("max_position_embeddings") != 8 * MISTRAL_WINDOW:
        return ""
    return (
        f"each token attends to all before it, as in llama.cpp: the file names no window, and Mistral 7B 0.1, whose positions it "
        f"has, was trained with one of {MISTRAL_WINDOW} tokens"
    )
