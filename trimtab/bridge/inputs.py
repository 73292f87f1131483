"""Moves the inputs of a model that accelerate has split to the device of its token embedding."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from trimtab.bridge.hooks import execution_device
from trimtab.errors import RequestError


def place_inputs(model: Any, inputs: Mapping[str, Any]) -> dict[str, Any]:
    """Return the inputs with every tensor on the device where the token embedding computes; the given ones are not
    changed.

    model: of transformers or PEFT, split by hooks or not. The device of an offloaded weight does not matter: the hook
    defines where the module computes. Errors: RequestError for a model without a token embedding, or one whose
    embedding is on meta and has no hook.
    """
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
