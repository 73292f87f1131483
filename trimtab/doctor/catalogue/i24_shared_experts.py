"""I24: PEFT puts the adapter of a shared expert on the routed ones."""

from __future__ import annotations

from trimtab.doctor.facts.bug import FIXED, NOT_APPLICABLE, PRESENT, Affected, Bug, Seen
from trimtab.doctor.facts.probe_kit import Kit, quiet

BUG = Bug(
    title="LoRA on the shared experts of GLM-4.5 is put on its routed experts, silently",
    symptom="silent: no parameter with lora_ in its name is below shared_experts, target_modules is emptied and "
    "target_parameters filled",
    trigger="target_modules, as names or a pattern, with shared_experts.down_proj, or with shared_experts.gate_proj and up_proj, "
    "on GLM-4.5 (glm4_moe) in transformers 5; gate_proj without up_proj is refused with an error",
    cause="PEFT utils/transformers_weight_conversion.py finds the names of the experts' former layers anywhere in a target",
    affected=(Affected("peft"),),
    versions="peft 0.21.2 with transformers 5.23.0, run",
    way_round="leave shared experts out: names and patterns in target_modules were both tried",
    trimtab="it applies what a file names: pairs below shared_experts to these layers, those of stacks to the stacks",
    evidence="run",
)  # fmt: skip


def probe(kit: Kit) -> Seen:
    """Put a LoRA on the shared expert of a tiny GLM-4.5."""
    try:
        from peft import LoraConfig, get_peft_model
        from transformers import Glm4MoeConfig, Glm4MoeForCausalLM
    except ImportError as exc:
        return Seen(NOT_APPLICABLE, str(exc))
    sizes = dict.fromkeys(("hidden_size", "intermediate_size", "moe_intermediate_size"), 16)
    sizes |= {"num_hidden_layers": 1, "first_k_dense_replace": 0, "n_routed_experts": 2, "num_experts_per_tok": 1, "vocab_size": 8}
    sizes |= {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8}
    with quiet():
        model = Glm4MoeForCausalLM(Glm4MoeConfig(**sizes))
        made = get_peft_model(model, LoraConfig(r=2, target_modules=["shared_experts.down_proj"]))
    names = [name for name, _ in made.named_parameters() if "lora_A" in name]
    if names and not any(".shared_experts." in name for name in names):
        return Seen(PRESENT, f"the adapter is {names[0]}")
    return Seen(FIXED, "the adapter is on the shared expert")
