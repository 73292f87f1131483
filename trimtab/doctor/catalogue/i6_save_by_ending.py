"""I6: modules_to_save includes every module whose name ends with the entry."""

from __future__ import annotations

from trimtab.doctor.facts.bug import FIXED, PRESENT, Affected, Bug, Seen
from trimtab.doctor.facts.probe_kit import Kit

BUG = Bug(
    title="modules_to_save=[\"norm\"] also takes input_layernorm: names are compared by their last letters",
    symptom="silent: copies of modules that the user did not name are trained and saved; or TypeError for a word that a LoRA "
    "module ends with (\"A\")",
    trigger="modules_to_save with a short name",
    cause="PEFT utils/other.py _set_trainable asks name.endswith(word), without a dot before it; target_modules has "
    "the dot",
    affected=(Affected("peft"),),
    versions="peft 0.19.1 and 0.21.2 run",
    way_round="write a longer ending, \"model.norm\"",
    trackers=("huggingface/peft#1917 (closed)", "huggingface/peft#3755 (open when last seen)"),
    trimtab="trimtab applies the same rule to a configuration, so it reads what PEFT saved",
    evidence="run",
)  # fmt: skip


def probe(kit: Kit) -> Seen:
    """Save the final norm of a tiny Llama with PEFT."""
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(r=4, target_modules=["q_proj"], modules_to_save=["norm"])
    model = get_peft_model(kit.load(kit.checkpoint("llama")), config)
    wrapped = [name for name, module in model.named_modules() if type(module).__name__ == "ModulesToSaveWrapper"]
    others = [name for name in wrapped if not name.endswith(".norm")]
    if others:
        return Seen(PRESENT, f"modules_to_save=['norm'] takes {len(wrapped)} modules, such as {others[0]}")
    return Seen(FIXED, f"modules_to_save=['norm'] takes {', '.join(wrapped)}")
