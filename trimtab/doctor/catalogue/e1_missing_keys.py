"""E1: an adapter whose file lacks keys loads without an error."""

from __future__ import annotations

import shutil

from trimtab.doctor.facts.bug import FIXED, PRESENT, Affected, Bug, Seen
from trimtab.doctor.facts.probe_kit import Kit, failure, quiet

WEIGHTS = "adapter_model.safetensors"

BUG = Bug(
    title="An adapter with missing weights loads with a warning and does nothing there",
    symptom="UserWarning \"Found missing adapter keys while loading the checkpoint\", and the run goes on: those "
    "modules have a fresh LoRA, which is zero (or random if init_lora_weights was false). PeftModel.load_adapter and "
    "transformers load_adapter do not even warn through warnings",
    trigger="keys renamed by another release or tool, towers left out, an adapter of another model",
    cause="PEFT peft_model.py loads with strict=False; from_pretrained warns, load_adapter returns the names, "
    "transformers writes a log line that set_verbosity_error hides",
    affected=(Affected("peft"),),
    versions="peft 0.19.1 and 0.21.2 run",
    way_round="compare the keys of the file with the model's, or the answers with those of the base",
    owner=("peft", "transformers"),
    trackers=(
        "huggingface/peft#2566 (closed)",
        "huggingface/peft#2699 (closed)",
        "huggingface/peft#2118 (the warning, merged)",
        "huggingface/transformers#34068 (merged)",
        "huggingface/transformers#46766 (merged)",
    ),
    trimtab="every key of the file is applied, or named with its reason, or the adapter is refused with the whole list",
    evidence="run",
)  # fmt: skip


def probe(kit: Kit) -> Seen:
    """Load an adapter from a file that lacks one of two layers."""
    from safetensors.torch import load_file, save_file

    path = kit.checkpoint("llama")
    half = kit.folder / "e1"
    if not half.exists():
        shutil.copytree(kit.adapter(path, targets=["q_proj"]), half)
        kept = {key: tensor for key, tensor in load_file(half / WEIGHTS).items() if ".layers.0." in key}
        save_file(kept, half / WEIGHTS, {"format": "pt"})
    base = kit.load(path)
    with quiet() as messages:
        try:
            model = kit.peft(base, half)
        except (KeyError, RuntimeError, ValueError) as error:
            if "missing" not in str(error).lower() and "lora_" not in str(error):
                raise
            return Seen(FIXED, f"refused: {failure(error)}")
    layer = model.base_model.model.model.layers[1].self_attn.q_proj
    change = float(layer.get_delta_weight("default").abs().max())
    warned = any("missing adapter keys" in line for line in messages)
    reported = "a warning" if warned else "no warning"
    return Seen(PRESENT, f"loads with {reported}; the layer that the file lacks changes its weight by {change:.2f}")
