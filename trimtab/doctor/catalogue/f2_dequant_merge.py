"""F2: a model dequantized under its adapter cannot be merged."""

from __future__ import annotations

from trimtab.doctor.facts.bug import FIXED, PRESENT, Affected, Bug, Seen
from trimtab.doctor.facts.probe_kit import Kit, failure

BUG = Bug(
    title="dequantize() on a PEFT model, then a merge: 'Parameter' object has no attribute 'quant_state'",
    symptom="AttributeError: 'Parameter' object has no attribute 'quant_state'",
    trigger="peft_model.dequantize() and then merge_and_unload()",
    cause="transformers replaces the base layer under PEFT's lora.Linear4bit, which goes on to read "
    "weight.quant_state (lora/bnb.py merge)",
    affected=(Affected("peft"), Affected("transformers"), Affected("bitsandbytes")),
    versions="peft 0.19.1 and 0.21.2 run",
    way_round="base.dequantize() first, then load the adapter, then merge: that works in both",
    owner=("peft", "transformers"),
    trimtab="a merge starts from the original checkpoint, not from a loaded model",
    evidence="run",
)  # fmt: skip


def probe(kit: Kit) -> Seen:
    """Dequantize a 4-bit model that has an adapter, then merge."""
    path = kit.checkpoint("llama")
    adapter = kit.adapter(path, targets=["q_proj"])
    model = kit.peft(kit.load(path, quant="nf4", device_map={"": 0}), adapter)
    model.dequantize()
    try:
        model.merge_and_unload()
    except AttributeError as error:
        if "quant_state" not in str(error):
            raise
        return Seen(PRESENT, failure(error))
    return Seen(FIXED, "a dequantized PEFT model was merged")
