"""The stock stack as the independent route: transformers' from_pretrained, bitsandbytes, PEFT, on an unsplit model."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import torch

from trimtab.stock import load

without_cpu_repacking = load.without_repacking


def load_stock(folder: Path, quant: str = "none", *, device: str = "cpu", dtype: torch.dtype = torch.bfloat16) -> Any:
    """Return the stock model on one device, in eval mode."""
    own = {} if quant == "none" else {"quantization_config": load.quantization(quant, dtype=dtype)}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return load.load_base(folder, dtype=dtype, device_map={"": device}, **own)


def with_adapter(model: Any, adapter: Path) -> Any:
    """Return the stock PeftModel of an adapter."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return without_cpu_repacking(load.load_adapter(model, adapter))


def logits(model: Any, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
    """Return [B, S, V] of one forward pass."""
    with torch.no_grad():
        return model(**inputs).logits


def next_logits(model: Any, inputs: dict[str, torch.Tensor], token_ids: list[int]) -> torch.Tensor:
    """Return the scores [V] behind a prompt of one row and the tokens that follow it, in one pass. token_ids: of both."""
    more = torch.tensor([token_ids[inputs["input_ids"].shape[1] :]], dtype=torch.long)
    tensors = dict(inputs)
    for name in ("input_ids", "attention_mask", "token_type_ids", "mm_token_type_ids"):
        if name in tensors:
            rest = more if name == "input_ids" else torch.full_like(more, int(name == "attention_mask"))
            tensors[name] = torch.cat([tensors[name], rest.to(tensors[name])], dim=1)
    return logits(model, tensors)[0, -1].float()
