"""The calls of transformers, bitsandbytes and PEFT that load a model and generate, in any interpreter that has these packages."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any


def model_class(folder: str | os.PathLike[str]) -> tuple[Any, Any]:
    """Return a checkpoint's class and config."""
    import transformers

    config = transformers.AutoConfig.from_pretrained(folder)
    return getattr(transformers, (config.architectures or ["AutoModelForCausalLM"])[0]), config


def bitsandbytes(**fields: Any) -> Any:
    """Return transformers' configuration of bitsandbytes with these fields."""
    from transformers import BitsAndBytesConfig

    return BitsAndBytesConfig(**fields)


def quantization(kind: str, *, dtype: Any = "bfloat16", **fields: Any) -> Any:
    """Return the configuration of "nf4", "nf4-dq", "fp4" or "int8" as trimtab names them, None for "none". dtype: torch's, or
    its name."""
    if kind == "none":
        return None
    if kind == "int8":
        return bitsandbytes(load_in_8bit=True, **fields)
    return bitsandbytes(
        load_in_4bit=True, bnb_4bit_quant_type=kind[:3], bnb_4bit_use_double_quant=kind.endswith("-dq"),
        bnb_4bit_compute_dtype=dtype, **fields,
    )  # fmt: skip


def load_base(folder: str | os.PathLike[str], *, repack: bool = False, **options: Any) -> Any:
    """Return the model of a checkpoint's class, in eval mode. repack: keep the path of `without_repacking`. options: of
    from_pretrained."""
    kind, _ = model_class(folder)
    model = kind.from_pretrained(folder, **options).eval()
    return model if repack else without_repacking(model)


def load_adapter(model: Any, folder: str | os.PathLike[str], **options: Any) -> Any:
    """Return the PeftModel of a base with an adapter, in eval mode. options: of its from_pretrained."""
    from peft import PeftModel

    return PeftModel.from_pretrained(model, str(folder), **options).eval()


def without_repacking(model: Any) -> Any:
    """Return the model with bitsandbytes' AVX512 path off: its first forward repacks weights in place and loses bits (A8).

    Source: bitsandbytes #2078; a merge or a comparison after that forward would use other weights.
    """
    for module in model.modules():
        if hasattr(module, "support_avx512bf16_for_cpu"):
            module.support_avx512bf16_for_cpu = False
    return model


@contextmanager
def generating(model: Any) -> Iterator[Callable[..., Any]]:
    """Yield `generate` of a model, a PeftModel's base, without gradients and without the values of the checkpoint's generation
    config: transformers fills them in where a call gives none."""
    import torch
    import transformers

    holder = model.get_base_model() if hasattr(model, "get_base_model") else model
    kept, holder.generation_config = holder.generation_config, transformers.GenerationConfig()
    try:
        with torch.no_grad():
            yield holder.generate
    finally:
        holder.generation_config = kept
