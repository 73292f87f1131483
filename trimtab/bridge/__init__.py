"""How do trimtab's adapters work with a model that transformers and accelerate loaded?

    base = AutoModelForCausalLM.from_pretrained(model_id, device_map={...}, quantization_config=...)
    peft_model = trimtab.bridge.load_peft(base, "path/to/adapter")      # instead of PeftModel.from_pretrained

`PeftModel.from_pretrained` removes the base's hooks and plans placement again; `load_peft` keeps them. Nothing is
patched outside the returned object. Source: PEFT 0.19.1 and 0.21.2, peft_model.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from trimtab.bridge.inspect import Scan

__all__ = ["check", "load_peft", "place_inputs"]


def load_peft(base_model: Any, path: str | Path, adapter_name: str = "default", **peft_kwargs: Any) -> Any:
    """Return a PeftModel around the base with the adapter loaded. The base keeps its placement, hooks and bytes.

    base_model: a model from transformers' `from_pretrained`, quantized or not, on one device or split by accelerate's
    hooks. path: a folder that PEFT wrote. adapter_name: its name in the PeftModel. peft_kwargs: `is_trainable`,
    `autocast_adapter_dtype`. Load further adapters with `load_adapter` of the returned object. Errors, all raised
    before anything changes: RequestError for an argument that is unknown or would have no effect; UpstreamError for a
    base that is broken by a known bug, with a workaround; AdapterError with every key that matches nothing.
    """
    from trimtab.bridge.load import load_first

    return load_first(base_model, Path(path), adapter_name, peft_kwargs)


def place_inputs(model: Any, inputs: Mapping[str, Any]) -> dict[str, Any]:
    """Return the inputs with every tensor on the device where the model's token embedding computes.

    For `model.generate(**trimtab.bridge.place_inputs(model, inputs))` on a split model: `inputs.to("cuda:0")` and
    `inputs.to(model.device)` are wrong if the embedding is on another device. Errors: RequestError for a model without
    one.
    """
    from trimtab.bridge.inputs import place_inputs as place

    return place(model, inputs)


def check(model: Any) -> Scan:
    """Return the placement of a live model and its problems: `trimtab.bridge.inspect.scan`."""
    from trimtab.bridge.inspect import scan

    return scan(model)
