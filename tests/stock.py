"""The stock stack as the independent route: transformers' from_pretrained, bitsandbytes, PEFT, on an unsplit model."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import torch


def load_stock(folder: Path, quant: str = "none", *, device: str = "cpu", dtype: torch.dtype = torch.bfloat16) -> Any:
    """Return the stock model on one device, in eval mode."""
    import transformers
    from transformers import AutoConfig, BitsAndBytesConfig

    options: dict[str, Any] = {}
    if quant == "int8":
        options["quantization_config"] = BitsAndBytesConfig(load_in_8bit=True)
    elif quant != "none":
        options["quantization_config"] = BitsAndBytesConfig(
            load_in_4bit=True, bnb_4bit_quant_type=quant[:3], bnb_4bit_use_double_quant=quant == "nf4-dq",
            bnb_4bit_compute_dtype=dtype,
        )  # fmt: skip
    config = AutoConfig.from_pretrained(folder)
    model_class = getattr(transformers, config.architectures[0])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = model_class.from_pretrained(folder, dtype=dtype, device_map={"": device}, **options).eval()
    return without_cpu_repacking(model)


def without_cpu_repacking(model: Any) -> Any:
    """Return the model with bitsandbytes' AVX512 path off: it repacks weights in place and computes other roundings."""
    for module in model.modules():
        if hasattr(module, "support_avx512bf16_for_cpu"):
            module.support_avx512bf16_for_cpu = False
    return model


def with_adapter(model: Any, adapter: Path) -> Any:
    """Return the stock PeftModel of an adapter."""
    from peft import PeftModel

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return without_cpu_repacking(PeftModel.from_pretrained(model, adapter).eval())


def logits(model: Any, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
    """Return [B, S, V] of one forward pass."""
    with torch.no_grad():
        return model(**inputs).logits
