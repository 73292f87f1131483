"""F5: safe_merge fails on quantized layers whose adapter has a bias."""

from __future__ import annotations

from trimtab.doctor.facts.bug import FIXED, PRESENT, Affected, Bug, Seen
from trimtab.doctor.facts.probe_kit import Kit, failure

BUG = Bug(
    title="safe_merge=True with lora_bias on a bitsandbytes base always fails",
    symptom="RuntimeError: Boolean value of Tensor with more than one value is ambiguous; by then the weight has "
    "been replaced already",
    trigger="merge_and_unload(safe_merge=True) of an adapter made with lora_bias=True, on a 4-bit or 8-bit base with "
    "biases",
    cause="PEFT lora/bnb.py merge asks \"not torch.isfinite(bias_data)\" without .all(), after it has set the new "
    "weight",
    affected=(Affected("peft"), Affected("bitsandbytes")),
    versions="peft 0.19.1 and 0.21.2 run, 4-bit and 8-bit",
    way_round="merge without safe_merge and check for NaN yourself; mind I10",
    owner=("peft",),
    trackers=(
        "huggingface/peft#3710 (open when last seen)",
        "huggingface/peft#3779 (pull request, open)",
        "huggingface/peft#3757 (pull request, open)",
    ),
    trimtab="an adapter is never merged into quantized weights; lora_bias runs in addition to them",
    evidence="run",
)  # fmt: skip


def probe(kit: Kit) -> Seen:
    """Merge an adapter with a bias, safely, into a 4-bit base with biases."""
    path = kit.checkpoint("llama", attention_bias=True)
    adapter = kit.adapter(path, targets=["q_proj"], lora_bias=True)
    model = kit.peft(kit.load(path, quant="nf4", device_map={"": 0}), adapter)
    try:
        model.merge_adapter(safe_merge=True)
    except RuntimeError as error:
        if "Boolean value of Tensor" not in str(error):
            raise
        return Seen(PRESENT, failure(error))
    return Seen(FIXED, "an adapter with a bias was merged safely into a 4-bit base")
