"""How tests split a stock model: a device map for any pico family, and the GPU imitated where there is none.

accelerate compares devices by value, so `torch.device("cpu")` plays the GPU and the string "cpu" is offload, through the
same code as on a real one. With "disk" in the map the GPU must be a string (accelerate hands it to safetensors): then the
plain "cpu" plays it and only "disk" offloads.
"""

from __future__ import annotations

import os
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import nn

from tests import stock

DEVICE = os.environ.get("TRIMTAB_TEST_DEVICE", "cpu")
GPU: Any = torch.device("cpu") if DEVICE == "cpu" else torch.device(DEVICE).index or 0
DISK_GPU: Any = "cpu" if DEVICE == "cpu" else GPU
TOWERS = ("model.vision_tower", "model.audio_tower", "model.embed_vision", "model.embed_audio")


def towers_off(place: str = "cpu", gpu: Any = None) -> dict[str, Any]:
    """Return a map for pico's gemma4 with both towers and connectors away, every module named."""
    gpu = (DISK_GPU if place == "disk" else GPU) if gpu is None else gpu
    return {"model.language_model": gpu, "lm_head": gpu} | dict.fromkeys(TOWERS, place)


def catch_all() -> dict[str, Any]:
    """Return a map in the style of the field: towers away, everything else by the "" entry."""
    return {"model.vision_tower": "cpu", "model.audio_tower": "cpu", "": GPU}


def last_layer_off(folder: Path, place: str = "cpu") -> dict[str, Any]:
    """Return a map of any family that names every module; the last element of each list of layers is away."""
    gpu = DISK_GPU if place == "disk" else GPU
    found: dict[str, Any] = {}

    def walk(path: str, module: nn.Module) -> None:
        own = (*module._parameters, *module._buffers)
        found.update({f"{path}.{name}" if path else name: gpu for name in own})
        for name, child in module.named_children():
            below = f"{path}.{name}" if path else name
            if isinstance(child, nn.ModuleList):
                last = len(child) - 1
                found.update({f"{below}.{n}": place if n == last else gpu for n in range(len(child))})
            elif any(isinstance(inner, nn.ModuleList) for inner in child.modules()):
                walk(below, child)
            else:
                found[below] = gpu

    walk("", empty(folder))
    return found


def empty(folder: Path) -> Any:
    import transformers

    config = transformers.AutoConfig.from_pretrained(folder)
    with torch.device("meta"):
        return getattr(transformers, config.architectures[0])._from_config(config, dtype=torch.bfloat16)


def load(folder: Path, device_map: Any, quant: str = "none", **options: Any) -> Any:
    """Return the stock model split by accelerate's hooks, in eval mode."""
    import transformers
    from transformers import AutoConfig, BitsAndBytesConfig

    if quant != "none":
        options["quantization_config"] = BitsAndBytesConfig(
            load_in_8bit=quant == "int8", load_in_4bit=quant != "int8", bnb_4bit_quant_type="nf4",
            bnb_4bit_use_double_quant=quant == "nf4-dq", bnb_4bit_compute_dtype=torch.bfloat16,
            llm_int8_enable_fp32_cpu_offload=True, llm_int8_skip_modules=options.pop("skip", None),
        )  # fmt: skip
    config = AutoConfig.from_pretrained(folder)
    model_class = getattr(transformers, config.architectures[0])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = model_class.from_pretrained(folder, dtype=torch.bfloat16, device_map=dict(device_map), **options).eval()
    return stock.without_cpu_repacking(model)


def to_device(inputs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: value.to(DEVICE) for name, value in inputs.items()}


def placement(model: Any) -> dict[str, Any]:
    """Return what must stay as it is: hook objects, tensors with their memory, the map object."""
    hooks = {path: id(module._hf_hook) for path, module in model.named_modules() if hasattr(module, "_hf_hook")}
    tensors = {
        name: (id(value), str(value.device), None if value.device.type == "meta" else value.data_ptr())
        for name, value in (*model.named_parameters(), *model.named_buffers())
    }
    return {"hooks": hooks, "tensors": tensors, "map": id(model.hf_device_map), "map_is": dict(model.hf_device_map)}
