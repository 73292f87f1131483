"""How do trimtab's adapters work with a model that transformers and accelerate loaded?"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trimtab.errors import RequestError

if TYPE_CHECKING:
    from trimtab.bridge.inspect import Scan

__all__ = ["check", "load_peft", "place_inputs"]


def load_peft(base_model: Any, path: str | Path, adapter_name: str = "default", **peft_kwargs: Any) -> Any:
    """Return a PeftModel around the base with the adapter loaded. The base keeps its placement, hooks and bytes.

    base_model: a model from transformers' `from_pretrained`, quantized or not, on one device or split by accelerate's hooks. path:
    a folder that PEFT wrote. adapter_name: its name in the PeftModel. peft_kwargs: `is_trainable`, `autocast_adapter_dtype`. Load
    further adapters with `load_adapter` of the returned object. Errors, all raised before anything changes: RequestError for an
    argument that is unknown or would have no effect; UpstreamError for a base that is broken by a known bug, with a workaround;
    AdapterError with every key that matches nothing. `PeftModel.from_pretrained` removes the base's hooks and plans placement
    again. Source: PEFT 0.19.1 and 0.21.2, peft_model.py.

        base = AutoModelForCausalLM.from_pretrained(model_id, device_map={...}, quantization_config=...)
        peft_model = trimtab.bridge.load_peft(base, "path/to/adapter")      # instead of PeftModel.from_pretrained
    """
    from trimtab.bridge.load import load_first

    return load_first(base_model, Path(path), adapter_name, peft_kwargs)


def place_inputs(model: Any, inputs: Mapping[str, Any]) -> dict[str, Any]:
    """Return the inputs with every tensor on the device where the model's token embedding computes; the given ones are not
    changed.

    For `model.generate(**trimtab.bridge.place_inputs(model, inputs))` on a split model: `inputs.to("cuda:0")` and
    `inputs.to(model.device)` are wrong if the embedding is on another device, and where an offloaded weight lies does not
    matter: the hook defines where the module computes. Errors: RequestError for a model without a token embedding, or one whose
    embedding is on meta and has no hook.
    """
    import torch

    from trimtab.bridge.hooks import execution_device

    embedding = model.get_input_embeddings() if hasattr(model, "get_input_embeddings") else None
    if embedding is None or getattr(embedding, "weight", None) is None:
        raise RequestError(f"a {type(model).__name__} has no token embedding", field="model")
    where = execution_device(embedding)
    if where is None or torch.device(where).type == "meta":
        raise RequestError(
            "the token embedding is on meta and no hook says where it computes", field="model",
            hint="Load the weights first, or dispatch the model with accelerate",
        )  # fmt: skip
    device = torch.device(where)
    return {name: value.to(device) if torch.is_tensor(value) else value for name, value in inputs.items()}


def check(model: Any) -> Scan:
    """Return the placement of a live model and its problems: `trimtab.bridge.inspect.scan`."""
    from trimtab.bridge.inspect import scan

    return scan(model)
