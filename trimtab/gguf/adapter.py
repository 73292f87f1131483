"""A LoRA in a GGUF file as an adapter's folder of PEFT, in the user's cache.

`X.weight.lora_a` [R, D_in], `X.weight.lora_b` [D_out, R], the scale is `adapter.lora.alpha` / R. Source: llama.cpp,
convert_lora_to_gguf.py and llama-adapter.cpp. No torch: the values are copied as they are.
"""

from __future__ import annotations

import json
import math
import os
import re
import shutil
import struct
import tempfile
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import Any

from trimtab.errors import AdapterError, CheckpointError
from trimtab.gguf.architectures import ARCHITECTURES
from trimtab.gguf.companion import home_of, key_of
from trimtab.gguf.header import GgufHeader, GgufTensor, read_gguf

HINT = "Give the folder that PEFT wrote, from which it was converted"
MOST_BYTES = 8 * 2**30
_TENSOR = re.compile(r"(?:(blk\.(\d{1,4}))\.)?([a-z_0-9]+)\.weight\.lora_(a|b)", re.ASCII)
_DTYPES = {"F32": "F32", "F16": "F16", "BF16": "BF16"}
COPY_BYTES = 8 * 2**20


def adapter_folder(path: str) -> str:
    """Return the PEFT folder of a LoRA in a GGUF file, made if it is missing; any other path unchanged. Errors: AdapterError."""
    if not path.lower().endswith(".gguf") or not os.path.isfile(path):
        return path
    file = Path(path).absolute()
    key = key_of([file])
    folder = home_of() / key / file.name
    if not (folder / "adapter_config.json").is_file():
        try:
            _make(read_gguf(file), folder, key)
        except CheckpointError as exc:
            raise AdapterError(file, [str(exc).removeprefix(f"{file}: ")], hint=HINT) from exc
    with suppress(OSError):  # a folder in use is not removed for its age
        os.utime(folder.parent)
    return str(folder)


def _make(header: GgufHeader, folder: Path, key: str) -> None:
    file, keys = header.files[0], header.keys
    if keys.get("general.type") != "adapter" or keys.get("adapter.type") != "lora":
        raise AdapterError(file, ["is a GGUF file, and no LoRA in it"], hint=HINT)
    pairs, problems = _pairs(header)
    alpha = keys.get("adapter.lora.alpha")
    if not isinstance(alpha, float) or not math.isfinite(alpha) or alpha <= 0:
        problems.append(f"adapter.lora.alpha is {alpha!r:.40}")
    unknown = [name for name in keys if name.startswith("adapter.") and name not in _KEYS]
    problems += [f"{name}={keys[name]!r:.40}: unknown key, its effect is not known" for name in unknown]
    if problems or not pairs:
        shown = problems[:10] + ([f"and {len(problems) - 10} more"] if len(problems) > 10 else [])
        raise AdapterError(file, shown or ["has no tensors"], hint=HINT)
    ranks = Counter(pair["a"].shape[0] for pair in pairs.values())
    usual = ranks.most_common(1)[0][0]
    config = {
        "peft_type": "LORA", "task_type": "CAUSAL_LM", "r": usual, "lora_alpha": alpha, "target_modules": sorted(pairs),
        "rank_pattern": {path: pair["a"].shape[0] for path, pair in pairs.items() if pair["a"].shape[0] != usual},
        "lora_dropout": 0.0, "bias": "none", "inference_mode": True,
    }  # fmt: skip
    folder.parent.mkdir(exist_ok=True)
    made = Path(tempfile.mkdtemp(prefix=".new-", dir=folder.parent))
    try:
        _write(pairs, made / "adapter_model.safetensors")
        (made / "adapter_config.json").write_text(json.dumps(config, indent=1), encoding="utf-8")
        if key_of([file]) != key:
            raise AdapterError(file, ["changed while it was read"], hint="Try again when the file is complete")
        with suppress(OSError):  # another process made it first
            made.replace(folder)
    finally:
        shutil.rmtree(made, ignore_errors=True)


_KEYS = ("adapter.type", "adapter.lora.alpha")


def _pairs(header: GgufHeader) -> tuple[dict[str, dict[str, GgufTensor]], list[str]]:
    """Return (module path -> its tensors by "a" and "b", what is wrong)."""
    made = ARCHITECTURES.get(header.architecture)
    if made is None:
        return {}, [f"is of the architecture {header.architecture!r:.60}; {', '.join(ARCHITECTURES)} are read"]
    pairs: dict[str, dict[str, GgufTensor]] = {}
    problems: list[str] = []
    for name, tensor in header.tensors.items():
        parts = _TENSOR.fullmatch(name)
        path = made.names.get(parts[3]) if parts else None
        if parts is None or path is None or ("{}" in path) is not (parts[1] is not None) or parts[3] == "token_embd":
            problems.append(f"{name} has no module of a linear layer")
        elif parts[3] in made.orders:
            problems.append(f"{name}: its rows are in an order that the file does not tell")
        elif tensor.type_name not in _DTYPES or len(tensor.shape) != 2:
            problems.append(f"{name} is {tensor.type_name} {list(tensor.shape)}; matrices of {', '.join(_DTYPES)} are read")
        else:
            pairs.setdefault(path.format(f"model.layers.{parts[2]}"), {})[parts[4]] = tensor
    for path, pair in pairs.items():
        if set(pair) != {"a", "b"}:
            problems.append(f"{path} has lora_{'a' if 'a' in pair else 'b'} alone")
        elif pair["a"].shape[0] != pair["b"].shape[1]:
            problems.append(f"{path} has lora_a {list(pair['a'].shape)} and lora_b {list(pair['b'].shape)}")
    if sum(tensor.nbytes for tensor in header.tensors.values()) > MOST_BYTES:
        problems.append(f"has more than {MOST_BYTES} B")
    return pairs, problems


def _write(pairs: dict[str, dict[str, GgufTensor]], target: Path) -> None:
    """Write a safetensors file with PEFT's names."""
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    sources, at = [], 0
    for path, pair in sorted(pairs.items()):
        for role in ("a", "b"):
            tensor = pair[role]
            entries[f"base_model.model.{path}.lora_{role.upper()}.weight"] = {
                "dtype": _DTYPES[tensor.type_name], "shape": list(tensor.shape), "data_offsets": [at, at + tensor.nbytes],
            }  # fmt: skip
            sources.append(tensor)
            at += tensor.nbytes
    head = json.dumps(entries).encode()
    with open(target, "wb") as out:
        out.write(struct.pack("<Q", len(head)) + head)
        for tensor in sources:
            with open(tensor.file, "rb") as source:
                source.seek(tensor.start)
                left = tensor.nbytes
                while left and (piece := source.read(min(left, COPY_BYTES))):
                    out.write(piece)
                    left -= len(piece)
