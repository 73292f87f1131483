"""I3: MLP targets of a mixture become adapters on 3-D parameters."""

from __future__ import annotations

from trimtab.doctor.facts.bug import FIXED, PRESENT, Affected, Bug, Seen
from trimtab.doctor.facts.probe_kit import Kit, failure

BUG = Bug(
    title="gate_proj, up_proj and down_proj on Qwen3-MoE become adapters on 3-D parameters, which refuse DoRA and "
    "lora_bias",
    symptom="ValueError: lora.ParamWrapper does not work with use_dora=True (or lora_bias=True). Without them: "
    "target_modules is emptied, target_parameters filled, the rank of gate_up_proj doubled, and newer PEFT warns "
    "that \"rank_pattern keys did not match any targeted module and were ignored\" although they were used",
    trigger="target_modules with MLP names on a model whose experts are fused in transformers 5",
    cause="PEFT utils/transformers_weight_conversion.py rewrites the configuration; lora/layer.py ParamWrapper "
    "supports plain LoRA alone",
    affected=(Affected("peft"),),
    versions="peft 0.19.1 and 0.21.2 run (older than expected); the wrong warning is in 0.21.2 (run) and not in "
    "0.20.0 (read)",
    way_round="target attention alone, or plain LoRA on experts",
    trackers=("huggingface/peft#2638 (adapters on parameters, merged)", "huggingface/peft#3112 (closed)"),
    trimtab="pairs of single experts are applied to their part of the stack, at the rank and scale of the file",
    evidence="run",
)  # fmt: skip


def probe(kit: Kit) -> Seen:
    """Create a PEFT DoRA adapter on the MLP of a tiny Qwen3-MoE."""
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(r=4, target_modules=["gate_proj", "up_proj", "down_proj"], use_dora=True)
    base = kit.load(kit.checkpoint("qwen3_moe"))
    try:
        get_peft_model(base, config)
    except ValueError as error:
        if "ParamWrapper" not in str(error):
            raise
        return Seen(PRESENT, failure(error))
    return Seen(FIXED, "DoRA was put on the MLP of a tiny Qwen3-MoE")
