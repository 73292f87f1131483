"""How does a LoRA in a GGUF file become a folder of PEFT?"""

from __future__ import annotations

import json
import math
import re
import struct
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from trimtab.errors import AdapterError, CheckpointError
from trimtab.gguf.architectures import ARCHITECTURES, Order
from trimtab.gguf.folders import folder_for, read_table
from trimtab.gguf.header import GgufHeader, GgufTensor, read_gguf, refuse

HINT = "Give the folder that PEFT wrote, from which it was converted"
MOST_BYTES, MOST_TURNED_BYTES = 8 * 2**30, 2**30
_TENSOR = re.compile(r"(?:(blk\.(\d{1,4}))\.)?([a-z_0-9]+)\.weight\.lora_(a|b)", re.ASCII)
_DTYPES = {"F32": "F32", "F16": "F16", "BF16": "BF16"}
COPY_BYTES = 8 * 2**20
# Llama's queries and keys: the converter moves rows inside a head, which the width of a head undoes.
_TURNED = ("attn_q", "attn_k")


def adapter_folder(path: str, width: int = 0) -> str:
    """Return the PEFT folder of a LoRA in a GGUF file, made if it is missing. width: of the model's heads; without it the rows of
    `turned` modules stay in the file's order. Errors: AdapterError. `X.weight.lora_a` [R, D_in], `X.weight.lora_b` [D_out, R], the
    scale is `adapter.lora.alpha` / R. Rows that the converter moved by the model's heads are moved back. Source: llama.cpp,
    convert_lora_to_gguf.py and llama-adapter.cpp."""
    file = Path(path).absolute()
    try:
        folder = folder_for(file, lambda made: _write(read_gguf(file), made, 0), 0)
        if width and made_for(str(folder))[1]:  # else the copy has no rows that the width moves
            folder = folder_for(file, lambda made: _write(read_gguf(file), made, width), width)
        return str(folder)
    except CheckpointError as exc:
        reason = str(exc).removeprefix(f"{file}: ").removesuffix(f" {exc.hint}")
        raise AdapterError(path, [reason], hint=f"{exc.hint}. {HINT}" if exc.hint else HINT) from exc


def made_for(folder: str) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return, of a folder that `adapter_folder` made, (the types of models that the LoRA is for, the modules whose rows are not in
    the model's order). Errors: AdapterError for a folder that was removed or damaged since."""
    table = read_table(Path(folder))
    if table is None:
        raise AdapterError(folder, ["was removed from the cache while it was read"], hint="Give the adapter again")
    return tuple(table["made_for"]), tuple(table["turned"])


def _write(header: GgufHeader, made: Path, width: int) -> dict[str, Any]:
    """Fill a new folder, and return its table."""
    file, keys = header.files[0], header.keys
    if keys.get("general.type") != "adapter" or keys.get("adapter.type") != "lora":
        kind, hint = _OTHERS.get(str(keys.get("general.type", "model")), ("GGUF file", HINT))
        raise AdapterError(file, [f"is a {kind}, and no LoRA"], hint=hint.format(file))
    pairs, turned, problems = _pairs(header, width)
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
    (made / "adapter_config.json").write_text(json.dumps(config, indent=1), encoding="utf-8")
    _write_tensors(pairs, turned if width else {}, made / "adapter_model.safetensors")
    return {"made_for": ARCHITECTURES[header.architecture].model_types, "turned": [] if width else sorted(turned)}


_KEYS = ("adapter.type", "adapter.lora.alpha")
# general.type -> (what the file is, what to do).
_OTHERS = {
    "model": ("model", "`trimtab plan {0.name}` names its formats"),
    "mmproj": (
        "projector (mmproj) of a model for images",
        "`trimtab plan {0.parent}` plans the model, with its file in the folder",
    ),
}


def _pairs(header: GgufHeader, width: int) -> tuple[dict[str, dict[str, GgufTensor]], dict[str, Order], list[str]]:
    """Return (module path -> its tensors by "a" and "b", module path -> the order of its rows, what is wrong)."""
    made = ARCHITECTURES.get(header.architecture)
    if made is None:
        return {}, {}, [f"is of the architecture {header.architecture!r:.60}; {', '.join(ARCHITECTURES)} are read"]
    pairs: dict[str, dict[str, GgufTensor]] = {}
    turned: dict[str, Order] = {}
    problems: list[str] = []
    for name, tensor in header.tensors.items():
        parts = _TENSOR.fullmatch(name)
        path = made.names.get(parts[3]) if parts else None
        if parts is None or path is None or ("{}" in path) is not (parts[1] is not None) or parts[3] == "token_embd":
            problems.append(f"{name} has no module of a linear layer")
        elif parts[3] in made.orders and parts[3] not in _TURNED:
            problems.append(f"{name}: its rows are in an order that the file does not tell")
        elif tensor.type_name not in _DTYPES or len(tensor.shape) != 2:
            problems.append(f"{name} is {tensor.type_name} {list(tensor.shape)}; matrices of {', '.join(_DTYPES)} are read")
        else:
            path = path.format(f"model.layers.{parts[2]}")
            pairs.setdefault(path, {})[parts[4]] = tensor
            if parts[3] in made.orders and parts[4] == "b":
                turned[path] = (0, tensor.shape[0] // (width or 1), width // 2, 2, 1)
                if width and (tensor.shape[0] % width or width % 2):
                    problems.append(f"{name} has {tensor.shape[0]} rows, which are no whole heads of the model ({width} rows each)")
                elif width and tensor.nbytes > MOST_TURNED_BYTES:
                    problems.append(f"{name} has {tensor.nbytes} B, of at most {MOST_TURNED_BYTES} B the rows are put in order")
    for path, pair in pairs.items():
        if set(pair) != {"a", "b"}:
            problems.append(f"{path} has lora_{'a' if 'a' in pair else 'b'} alone")
        elif pair["a"].shape[0] != pair["b"].shape[1]:
            problems.append(f"{path} has lora_a {list(pair['a'].shape)} and lora_b {list(pair['b'].shape)}")
    if (count := sum(tensor.nbytes for tensor in header.tensors.values())) > MOST_BYTES:
        problems.append(f"its tensors have {count} B, at most {MOST_BYTES} are read")
    return pairs, turned, problems


def _write_tensors(pairs: dict[str, dict[str, GgufTensor]], turned: dict[str, Order], target: Path) -> None:
    """Write a safetensors file with PEFT's names."""
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    sources, at = [], 0
    for path, pair in sorted(pairs.items()):
        for role in ("a", "b"):
            tensor = pair[role]
            entries[f"base_model.model.{path}.lora_{role.upper()}.weight"] = {
                "dtype": _DTYPES[tensor.type_name], "shape": list(tensor.shape), "data_offsets": [at, at + tensor.nbytes],
            }  # fmt: skip
            sources.append((tensor, turned.get(path) if role == "b" else None))
            at += tensor.nbytes
    head = json.dumps(entries).encode()
    with open(target, "wb") as out:
        out.write(struct.pack("<Q", len(head)) + head)
        for tensor, order in sources:
            out.writelines(_rows(tensor, order))


def _rows(tensor: GgufTensor, order: Order | None) -> Iterator[bytes]:
    """Yield the bytes of a tensor, its rows in the model's order. Errors: CheckpointError if the file is shorter by now."""
    row = tensor.nbytes // tensor.shape[0]
    with open(tensor.file, "rb") as source:
        source.seek(tensor.start)
        count = 1 if order is None else order[1]
        step = tensor.nbytes // count if order is not None else COPY_BYTES
        left = tensor.nbytes
        while left:
            piece = source.read(min(left, step))
            if len(piece) != min(left, step):
                refuse(tensor.file, "changed while it was read", tensor.name)
            left -= len(piece)
            if order is not None:  # a head: pairs of rows become two halves
                rows = [piece[at : at + row] for at in range(0, len(piece), row)]
                piece = b"".join(rows[0::2] + rows[1::2])
            yield piece
