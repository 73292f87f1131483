"""The demo's three adapters: made, saved and read with PEFT itself, as its users do.

`specialist` is saved the way the field's multimodal adapters come: its config names the broad projections, its tower
keys carry the inner `.linear` path. Stock PEFT refuses such a config (`Gemma4ClippableLinear` is no supported target),
so `load_adapter` here reads a patched copy; the original is never touched.
"""

from __future__ import annotations

import json
import shutil
import tempfile
import warnings
from pathlib import Path
from typing import Any

from demo_world import Voice

PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
LANGUAGE = r".*\.language_model\.layers\.\d+\.(self_attn|mlp)\.(q|k|v|o|gate|up|down)_proj"
VISION = r".*\.vision_tower\.encoder\.layers\.\d+\.(self_attn|mlp)\.(q|k|v|o|gate|up|down)_proj\.linear"
AUDIO = r".*\.audio_tower\.layers\.\d+\.self_attn\.(q|k|v)_proj\.linear"
INNER = f"{LANGUAGE}|{VISION}|{AUDIO}"
SMALL = r".*\.language_model\.layers\.\d+\.(self_attn\.(q|o)_proj|mlp\.down_proj)"
BASE_NAME = "trimtab/demo/base"

SETTINGS: dict[Voice, dict[str, Any]] = {
    "style": {"r": 8, "lora_alpha": 16, "target_modules": LANGUAGE},
    "specialist": {"r": 16, "lora_alpha": 32, "target_modules": INNER},
    "rslora-dora": {
        "r": 4, "lora_alpha": 4, "target_modules": SMALL, "use_rslora": True, "use_dora": True,
    },
}  # fmt: skip
ADAPTERS = tuple(SETTINGS)


def add_adapter(gemma: Any, voice: Voice, seed: int) -> Any:
    """Return a PeftModel with a fresh adapter on the base, the base's own weights frozen."""
    import torch
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(seed)
    config = LoraConfig(task_type="CAUSAL_LM", lora_dropout=0.0, bias="none", **SETTINGS[voice])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return get_peft_model(gemma, config)


def save_adapter(model: Any, voice: Voice, folder: Path) -> None:
    """Write the adapter as PEFT writes it: adapter_config.json and adapter_model.safetensors."""
    model.save_pretrained(folder, save_embedding_layers=False)
    (folder / "README.md").unlink(missing_ok=True)
    file = folder / "adapter_config.json"
    config = json.loads(file.read_text(encoding="utf-8"))
    config["base_model_name_or_path"] = BASE_NAME
    if voice == "specialist":
        config["target_modules"] = list(PROJECTIONS)
    file.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n", encoding="utf-8")
    (folder / "adapter_model.safetensors").chmod(0o644)


def load_adapter(gemma: Any, voice: Voice, folder: Path) -> Any:
    """Return a PeftModel with the saved adapter on the base, through stock PEFT."""
    from peft import PeftModel

    with tempfile.TemporaryDirectory() as scratch, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        copy = Path(scratch) / voice
        shutil.copytree(folder, copy)
        if voice == "specialist":
            config = json.loads((copy / "adapter_config.json").read_text(encoding="utf-8"))
            config["target_modules"] = INNER
            (copy / "adapter_config.json").write_text(json.dumps(config), encoding="utf-8")
        return PeftModel.from_pretrained(gemma, copy).eval()
