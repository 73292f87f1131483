"""I5: trained biases of bias="lora_only" are not saved by older PEFT."""

from __future__ import annotations

from trimtab.doctor.facts.bug import FIXED, PRESENT, Affected, Bug, Seen
from trimtab.doctor.facts.probe_kit import Kit

BUG = Bug(
    title="bias=\"lora_only\" trains biases of the base that save_pretrained leaves out",
    symptom="silent: the file has no bias, and a reloaded adapter answers otherwise than the trained one",
    trigger="LoraConfig(bias=\"lora_only\") on layers with biases, then save_pretrained",
    cause="PEFT utils/save_and_load.py looks for \"<module>.bias\", and the trained one is "
    "\"<module>.base_layer.bias\"",
    affected=(Affected("peft", fixed_in="0.21.0"),),
    versions="peft 0.19.1 run, nothing saved; 0.21.2 run, saved; 0.20.0 has the old code, 0.21.0 the new (read in "
    "the wheels)",
    way_round="a newer PEFT, or bias=\"all\"",
    trackers=("huggingface/peft#3306 (closed)", "huggingface/peft#3490 (the fix)"),
    trimtab="it trains nothing; it says when a configuration requests biases that the file does not hold, and "
    "refuses full biases",
    evidence="run",
)  # fmt: skip


def probe(kit: Kit) -> Seen:
    """Save an adapter with bias="lora_only" on a model with biases."""
    from safetensors.torch import load_file

    path = kit.checkpoint("llama", attention_bias=True)
    adapter = kit.adapter(path, targets=["q_proj"], bias="lora_only")
    saved = sum(key.endswith(".bias") for key in load_file(adapter / "adapter_model.safetensors"))
    return Seen(FIXED if saved else PRESENT, f"{saved} of 2 biases of the adapted layers are in the file")
