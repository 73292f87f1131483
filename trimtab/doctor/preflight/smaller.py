"""The smaller model of a family, by its config only: an alternative if the requested one does not fit.

Only Gemma 4 E4B has one here: E2B, in the sizes of the released model.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from typing import Any

from trimtab.doctor.preflight.shape import ModelShape, read_shape
from trimtab.process.work_folder import work_folder

SMALLER_NAME = "E2B"
# E4B is recognized by the text model's type, width and layers.
_E4B = ("gemma4_text", 2560, 42)
_LAYERS, _FULL_EVERY = 35, 5
E2B: Mapping[str, Any] = {
    "architectures": ["Gemma4ForConditionalGeneration"], "model_type": "gemma4", "dtype": "bfloat16",
    "text_config": {
        "model_type": "gemma4_text", "vocab_size": 262144, "hidden_size": 1536, "intermediate_size": 6144,
        "num_hidden_layers": _LAYERS, "num_attention_heads": 8, "num_key_value_heads": 1, "head_dim": 256,
        "global_head_dim": 512, "hidden_size_per_layer_input": 256, "num_kv_shared_layers": 20, "sliding_window": 512,
        "use_double_wide_mlp": True, "final_logit_softcapping": 30.0,
        "layer_types": [
            "sliding_attention" if (layer + 1) % _FULL_EVERY else "full_attention" for layer in range(_LAYERS)
        ],
    },
    "vision_config": {"model_type": "gemma4_vision", "use_clipped_linears": True},
    "audio_config": {"model_type": "gemma4_audio", "output_proj_dims": 1536},
}  # fmt: skip


def has_smaller(config: Mapping[str, Any]) -> bool:
    """Return whether a model of this config.json has a smaller one in its family."""
    text = config.get("text_config")
    if not isinstance(text, Mapping):
        return False
    return (text.get("model_type"), text.get("hidden_size"), text.get("num_hidden_layers")) == _E4B


def smaller_shape(*, quant: str, dtype: str, python: str | os.PathLike[str] | None) -> ModelShape:
    """Return the shape of the smaller model. Errors: as those of `read_shape`."""
    with work_folder("smaller") as folder:
        (folder / "config.json").write_text(json.dumps(E2B), encoding="utf-8")
        return read_shape(str(folder), {}, quant=quant, dtype=dtype, python=python)
