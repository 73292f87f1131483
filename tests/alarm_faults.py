"""What the proof of the verdicts plants in an adapter: a wrong scale, a module that is dropped, transposed or swapped."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor


@contextmanager
def cpu_threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextmanager
def quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def scale_b(tensors: dict[str, Tensor], factor: float, key: str | None = None) -> None:
    for name, tensor in tensors.items():
        if ("lora_B" in name or "lora_embedding_B" in name) and (key is None or key in name):
            tensors[name] = tensor.float() * factor


def change_config(folder: Path, change: Callable[[dict[str, Any]], Any]) -> Path:
    config = json.loads((folder / "adapter_config.json").read_text())
    change(config)
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder


def change_tensors(folder: Path, change: Callable[[dict[str, Tensor]], Any]) -> Path:
    """Let `change` alter the tensors of an adapter or of a checkpoint's first file."""
    file = sorted(folder.glob("*.safetensors"))[0]
    with safe_open(file, "pt") as opened:
        metadata = opened.metadata()
    tensors = load_file(file)
    change(tensors)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, file, metadata=metadata)
    return folder


def _keys(tensors: Mapping[str, Tensor]) -> list[str]:
    return sorted(name.removesuffix(".lora_A.weight") for name in tensors if name.endswith(".lora_A.weight"))


def alpha_times(factor: float) -> Callable[[Path], Path]:
    return lambda adapter: change_config(adapter, lambda config: config.update(lora_alpha=config["lora_alpha"] * factor))


def module_dropped(adapter: Path) -> Path:
    return change_tensors(adapter, lambda tensors: scale_b(tensors, 0.0, _keys(tensors)[0]))


def module_transposed(adapter: Path) -> None:
    def turn(tensors: dict[str, Tensor]) -> None:
        square = next(
            key for key in _keys(tensors)
            if tensors[f"{key}.lora_A.weight"].shape[1] == tensors[f"{key}.lora_B.weight"].shape[0]
        )  # fmt: skip
        a, b = tensors[f"{square}.lora_A.weight"], tensors[f"{square}.lora_B.weight"]
        tensors[f"{square}.lora_A.weight"], tensors[f"{square}.lora_B.weight"] = b.T.clone(), a.T.clone()

    change_tensors(adapter, turn)


def modules_swapped(adapter: Path) -> None:
    def swap(tensors: dict[str, Tensor]) -> None:
        by_shape: dict[Any, list[str]] = {}
        for key in _keys(tensors):
            shapes = tensors[f"{key}.lora_A.weight"].shape, tensors[f"{key}.lora_B.weight"].shape
            by_shape.setdefault(shapes, []).append(key)
        one, other = next(keys for keys in by_shape.values() if len(keys) > 1)[:2]
        for role in ("lora_A", "lora_B"):
            first, second = f"{one}.{role}.weight", f"{other}.{role}.weight"
            tensors[first], tensors[second] = tensors[second].clone(), tensors[first].clone()

    change_tensors(adapter, swap)


ADAPTER_FAULTS: Mapping[str, Callable[[Path], object]] = {
    "scale 1 % too large": alpha_times(1.01), "scale 1 % too small": alpha_times(0.99), "one module dropped": module_dropped,
    "one module transposed": module_transposed, "two modules swapped": modules_swapped,
    "alpha / r for alpha / sqrt(r), or the reverse": lambda adapter: change_config(
        adapter, lambda config: config.update(use_rslora=not config.get("use_rslora"))
    ),
}  # fmt: skip
