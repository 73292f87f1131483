"""F1: a LoRA merged into 4-bit weights no longer answers as the adapter."""

from __future__ import annotations

from trimtab.doctor.facts.bug import FIXED, PRESENT, Affected, Bug, Seen
from trimtab.doctor.facts.probe_kit import Kit
from trimtab.stock.load import without_repacking

BUG = Bug(
    title="merge_and_unload on a 4-bit base gives answers of neither the adapter nor the base",
    symptom="UserWarning \"Merge lora module to 4-bit linear may get different generations due to rounding errors\", "
    "once a layer, and different answers",
    trigger="merging an adapter into a base loaded in 4-bit",
    cause="PEFT lora/bnb.py dequantizes, adds, and quantizes again: a LoRA delta is smaller than a step of the 4-bit "
    "grid",
    affected=(Affected("peft"), Affected("bitsandbytes")),
    versions="by design; peft 0.19.1 and 0.21.2 run on a tiny model; on E2B, 525 warnings and three of three prompts "
    "different",
    way_round="merge in bfloat16 from the original checkpoint and quantize the result last",
    owner=("peft",),
    trackers=(
        "huggingface/peft#2321 (closed, by design)",
        "huggingface/peft#2105 (named by others)",
        "huggingface/peft#1388 (named by others)",
        "huggingface/transformers#31293 (closed)",
    ),
    trimtab="an adapter is never merged into quantized weights; it runs in addition to them",
    evidence="run",
)  # fmt: skip


def probe(kit: Kit) -> Seen:
    """Compare logits of adapter and merged model, in bfloat16 and in 4-bit."""
    path = kit.checkpoint("llama")
    adapter = kit.adapter(path, targets=["q_proj", "v_proj", "up_proj", "down_proj"])
    errors = {}
    for quant in ("none", "nf4"):
        base, beside, merged = (kit.load(path, quant=quant, device_map={"": 0}) for _ in range(3))
        expected = kit.forward(kit.peft(beside, adapter))
        logits = kit.forward(without_repacking(kit.peft(merged, adapter).merge_and_unload()))
        errors[quant] = float((logits - expected).abs().max() / (expected - kit.forward(base)).abs().max())
    # bfloat16 rounds each sum once; 4-bit must lose at least several times that to count.
    state = PRESENT if errors["nf4"] > 4 * errors["none"] else FIXED
    return Seen(state, f"merging misses {errors['nf4']:.0%} of the adapter's effect in 4-bit, {errors['none']:.0%} in bfloat16")
