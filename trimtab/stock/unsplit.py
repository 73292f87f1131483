"""How does the stock stack load a model of any format in one piece with its adapters, and what had to be changed for that?"""

from __future__ import annotations

import importlib.util
import json
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from trimtab.adapters.config import Rules
from trimtab.adapters.file import for_peft
from trimtab.process.json_file import read_object
from trimtab.request import MADE_EXPERTS
from trimtab.stock.load import load_adapter, load_base, model_class, quantization, without_repacking
from trimtab.stock.second_reading import is_read, second_reading

# quant_method -> the package that transformers needs to dequantize such weights while it loads (None: no other).
DEQUANTIZED_BY_STOCK: dict[str, str | None] = {"fp8": None, "compressed-tensors": "compressed_tensors"}
# quant_method that transformers computes with as it is, which PEFT adapts too (I19 of the doctor's catalogue: it cannot merge).
MOBILE = "gemma"
_KEY = re.compile(r"^base_model\.model\.(.+?)\.(lora_[AB]|lora_embedding_[AB]|lora_magnitude_vector)(\..*)?$")


def load_unsplit(folder: str, quant: str, dtype: str, device: str) -> Any:
    """Return the stock model on one device, in eval mode, with bitsandbytes' quantization as trimtab names it.

    Of other formats stock dequantizes the weights while it loads, where it can (`dense_note`), else the second reading does.
    """
    options: dict[str, Any] = {"device_map": {"": device}, "dtype": getattr(torch, dtype)}
    method = _method(folder)
    if method in (None, "bitsandbytes"):
        own = {"quantization_config": quantization(quant, dtype=dtype)} if method is None and quant != "none" else {}
        return load_base(folder, **options, **own)
    kind, config = model_class(folder)
    if method == MOBILE:
        return _mobile_model(kind, config, Path(folder), options)
    source: str | None = folder
    if not dense_note(folder):
        config.quantization_config["dequantize"] = True
    else:
        for part in (config, config.get_text_config()):
            if getattr(part, "quantization_config", None) is not None:
                del part.quantization_config
        source, options["state_dict"] = None, _dense_state(Path(folder), options["dtype"])
    return without_repacking(kind.from_pretrained(source, config=config, **options).eval())


def round_experts(model: Any, kind: str) -> None:
    """Give every stacked expert the values that bitsandbytes, or GGML's Q8_0 of "int8", has after it packed that matrix: stock
    holds none packed."""
    if kind not in MADE_EXPERTS:
        return
    from bitsandbytes.functional import dequantize_4bit, quantize_4bit

    for path, module in model.named_modules():
        for parameter in module.parameters(recurse=False) if "expert" in f"{path} {type(module).__name__}".lower() else ():
            for matrix in parameter.data if parameter.dim() == 3 else ():
                if kind == "int8":
                    matrix.copy_(_q8_0(matrix))
                    continue
                packed = quantize_4bit(
                    matrix.contiguous(), blocksize=64, quant_type=kind[:3], compress_statistics=kind.endswith("-dq")
                )
                matrix.copy_(dequantize_4bit(*packed))


def _q8_0(matrix: torch.Tensor) -> torch.Tensor:
    """Return the float32 values of a matrix's blocks of 32. Source: gguf 0.19.0, quants.py (Q8_0), whose values are ggml's."""
    blocks = matrix.float().reshape(-1, 32)
    scale = blocks.abs().max(dim=1, keepdim=True)[0].div(127)
    steps = blocks * torch.where(scale.half() == 0, 0, scale.reciprocal())
    low = steps.abs().floor()
    q = steps.sign() * (low + (2 * (steps.abs() - low)).floor())
    return (q * scale.half().float()).view(matrix.shape)


def _mobile_model(kind: Any, config: Any, folder: Path, options: Mapping[str, Any]) -> Any:
    """Return transformers' own model of Gemma's mobile files. 5.23 refuses a table with more than one scale a row, which its
    forward takes: they are set after it has loaded the first of each row."""
    from trimtab.checkpoint.folder import read_checkpoint
    from trimtab.engine.tiers.reader import read_small

    state: dict[str, torch.Tensor] = dict(read_small(read_checkpoint(folder).tensors))
    wide = {name: scale for name, scale in state.items() if name.endswith(".embedding_scale") and scale.shape[-1] > 1}
    state |= {name: scale[:, :1].contiguous() for name, scale in wide.items()}
    model = kind.from_pretrained(None, config=config, state_dict=state, **options)
    for name, scale in wide.items():
        stem = name.removesuffix(".embedding_scale")
        table = next(module for path, module in model.named_modules() if path and f".{stem}".endswith(f".{path}"))
        table.embedding_scale = torch.nn.Parameter(scale.to(table.embedding_scale.device), requires_grad=False)
    return without_repacking(model.eval())


def _method(folder: str) -> str | None:
    """Return the quant_method of a folder's config, at the top or in its text part; None for plain weights."""
    config = read_object(Path(folder) / "config.json", "config.json")
    text = config.get("text_config")
    settings = config.get("quantization_config") or (text.get("quantization_config") if isinstance(text, dict) else None)
    return str(settings.get("quant_method", "bitsandbytes")) if isinstance(settings, dict) else None


def _has(package: str | None) -> bool:
    return package is None or importlib.util.find_spec(package) is not None


def dense_note(folder: str) -> list[str]:
    """Return a note where the stock stack cannot load a checkpoint's format here: what read the weights that it computes with."""
    method = _method(folder)
    is_nested = "quantization_config" not in read_object(Path(folder) / "config.json", "config.json")
    if method in (None, "bitsandbytes", MOBILE):
        return []
    if method in DEQUANTIZED_BY_STOCK and _has(DEQUANTIZED_BY_STOCK[method]) and not is_nested:
        return []
    if not is_read(method):
        return [f"the weights ({method}) were dequantized by trimtab's own reader: nothing that is installed checks their values"]
    by = "transformers' reader of GGUF" if method == "gguf" else "plain arithmetic in float64"
    return [f"the weights ({method}) were dequantized by {by}, apart from trimtab's reader: the stock stack cannot load them here"]


def _dense_state(folder: Path, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Return the tensors of a checkpoint with its packed weights dequantized, apart from our reader where that is possible."""
    from trimtab.checkpoint.folder import read_checkpoint
    from trimtab.engine.formats.weights import dequantize, prequantized
    from trimtab.engine.tiers.reader import read_small
    from trimtab.formats.packed import split_packed

    plain, packed = split_packed(read_checkpoint(folder))
    state: dict[str, torch.Tensor] = dict(read_small(plain))
    is_second = is_read(_method(str(folder)) or "")
    for name, entry in packed.items():
        parts = read_small(entry.read_parts)
        state[name] = second_reading(entry, parts, dtype) if is_second else dequantize(prequantized(entry, parts, dtype))
    return state


def with_adapters(model: Any, adapters: Mapping[str, str], work: Path) -> tuple[Any, list[str]]:
    """Return the PeftModel with every adapter loaded (the base itself for none), and notes on changes that this needed."""
    if not adapters:
        return model, []
    notes = []
    for place, (name, folder) in enumerate(adapters.items()):
        base = model if place == 0 else model.get_base_model()
        loadable, note = loadable_adapter(base, for_peft(folder, base.config.to_dict()), work / f"adapter-{place}")
        notes += [f"{name}: {note}"] if note else []
        if place == 0:
            model = load_adapter(model, loadable, adapter_name=name)
        else:
            model.load_adapter(str(loadable), adapter_name=name)
    return without_repacking(model.eval()), notes


def loadable_adapter(model: Any, folder: Path, copy: Path) -> tuple[Path, str]:
    """Return an adapter folder that PEFT can load, and a note if it is a changed copy."""
    config = read_object(folder / "adapter_config.json", "adapter_config.json")
    targets = config.get("target_modules")
    paths = dict(model.named_modules())
    named = Rules(folder, {"target_modules": targets}, paths).named
    wrappers = [path for path in paths if f"{path}.linear" in paths and path in named]
    if not wrappers:
        return folder, ""
    keys = _adapted_paths(folder / "adapter_model.safetensors")
    exact = sorted(key for key in keys if key in paths)
    shutil.copytree(folder, copy)
    config["target_modules"] = "|".join(re.escape(path) for path in exact)
    (copy / "adapter_config.json").write_text(json.dumps(config), encoding="utf-8")
    return copy, (
        f"target_modules names {len(wrappers)} wrapped projections, which PEFT refuses; a copy of the adapter names "
        f"the {len(exact)} paths that it has keys for"
    )


def _adapted_paths(file: Path) -> set[str]:
    from safetensors import safe_open

    with safe_open(str(file), framework="pt") as opened:
        matches = (_KEY.match(key) for key in opened.keys())  # noqa: SIM118 - it has no iterator
        return {match.group(1) for match in matches if match}
