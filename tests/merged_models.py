"""How merge tests ask the stock stack: PEFT's merge_and_unload on an unsplit model, and the tensors of a folder."""

from __future__ import annotations

import json
import re
import warnings
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from trimtab.checkpoint.folder import read_checkpoint


def load(folder: Path, *, dtype: str | None = None) -> Any:
    """Return the stock model in the folder's own dtype."""
    import transformers

    config = transformers.AutoConfig.from_pretrained(folder)
    model_class = getattr(transformers, config.architectures[0])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return model_class.from_pretrained(folder, dtype=dtype or config.dtype).eval()


def peft_merged(base: Path, *adapters: Path) -> dict[str, Tensor]:
    """Return the state dict of PEFT's merged model; several adapters are merged in turn."""
    from peft import PeftModel

    model = load(base)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for adapter in adapters:
            try:
                loaded = PeftModel.from_pretrained(model, adapter)
            except TypeError as exc:
                # PEFT 0.19.1 cannot read any adapter of a model with stacked experts on transformers 5.6.2.
                if "distributed_operation" not in str(exc):
                    raise
                loaded = _filled_by_hand(load(base), adapter)
            model = loaded.merge_and_unload()
    return {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}


def _filled_by_hand(model: Any, adapter: Path) -> Any:
    from peft import PeftConfig, get_peft_model

    loaded = get_peft_model(model, PeftConfig.from_pretrained(adapter))
    parameters = dict(loaded.named_parameters())
    with torch.no_grad():
        for key, tensor in load_file(adapter / "adapter_model.safetensors").items():
            parameters[re.sub(r"\.(lora_[AB])\.weight$", r".\1.default.weight", key)].copy_(tensor)
    return loaded


def state_of(folder: Path) -> dict[str, Tensor]:
    """Return the state dict of the stock model of a folder."""
    return {name: tensor.detach() for name, tensor in load(folder).state_dict().items()}


def tensors_of(folder: Path) -> dict[str, Tensor]:
    """Return the file tensors of a folder."""
    found: dict[str, Tensor] = {}
    for file in read_checkpoint(folder).files:
        found |= load_file(file)
    return found


def ulps(a: Tensor, b: Tensor) -> int:
    """Return how many steps of their dtype lie between two tensors at most."""
    assert a.dtype == b.dtype
    kind = {torch.float32: torch.int32, torch.bfloat16: torch.int16, torch.float16: torch.int16}[a.dtype]

    def ordered(tensor: Tensor) -> Tensor:
        bits = tensor.contiguous().view(kind).long()
        low = -(2 ** (31 if kind is torch.int32 else 15))
        return torch.where(bits < 0, low - bits, bits)

    return int((ordered(a) - ordered(b)).abs().max()) if a.numel() else 0


def left_over(folder: Path) -> list[str]:
    """Return the names in a folder, hidden ones too."""
    return sorted(path.name for path in folder.iterdir())


def read_record(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "trimtab_merge.json").read_text())
    return found


def content(folder: Path) -> dict[str, bytes]:
    """Return every file of a folder by its place."""
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
