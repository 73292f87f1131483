"""D1: PEFT refuses the wrapped linears of the Gemma 4 towers."""

from __future__ import annotations

from trimtab.doctor.facts.bug import FIXED, PRESENT, Affected, Bug, Seen
from trimtab.doctor.facts.probe_kit import Kit, failure

BUG = Bug(
    title="Broad LoRA targets on Gemma 4 are refused: \"Target module Gemma4ClippableLinear is not supported\"",
    symptom="ValueError: Target module Gemma4ClippableLinear(...) is not supported. Currently, only the following "
    "modules are supported: ...",
    trigger="target_modules such as q_proj, k_proj, gate_proj on a Gemma 4 with vision or audio: they also name the "
    "wrappers of the towers",
    cause="the wrapper keeps the real layer in .linear; PEFT lora/model.py _create_new_module knows no such class. "
    "PEFT's own default for Gemma 4 is language-only since 0.19.0",
    affected=(Affected("peft"),),
    versions="peft 0.19.1 and 0.21.2 run, on CPU and GPU",
    way_round="a regular expression that names the inner module, \"...q_proj.linear\" in the towers; keys in the "
    "file are those of the inner modules too",
    owner=("peft", "transformers"),
    trackers=(
        "huggingface/peft#3129 (open when last seen; maintainers: name the inner .linear)",
        "huggingface/peft#3130 (a patch)",
        "huggingface/peft#3154 (pull request, closed)",
        "huggingface/transformers#45388 (pull request, closed)",
        "unslothai/unsloth#4807 (patch, merged)",
    ),
    trimtab="a key that names a wrapper is applied to the linear inside it, and the report says so",
    evidence="run",
)  # fmt: skip


def probe(kit: Kit) -> Seen:
    """Create PEFT adapters on every q_proj of a tiny Gemma 4 with towers."""
    from peft import LoraConfig, get_peft_model

    try:
        get_peft_model(kit.load(kit.checkpoint()), LoraConfig(r=4, target_modules=["q_proj"]))
    except ValueError as error:
        if "Gemma4ClippableLinear" not in str(error):
            raise
        return Seen(PRESENT, failure(error))
    return Seen(FIXED, "adapters were put on every q_proj, those of the towers too")
