"""A5: a map with the empty key on the CPU quantizes nothing, yet the model says that it is 4-bit."""

from __future__ import annotations

from trimtab.doctor.facts.bug import FIXED, PRESENT, Affected, Bug, Seen
from trimtab.doctor.facts.probe_kit import Kit, quantized

BUG = Bug(
    title="{\"\": \"cpu\"} with the offload flag: no layer is quantized, yet is_loaded_in_4bit is True",
    symptom="nearly silent: 0 Linear4bit while model.is_loaded_in_4bit is True; the one warning names another backend (\"eetq\")",
    trigger="device_map={\"\": \"cpu\"} together with llm_int8_enable_fp32_cpu_offload=True, 4-bit or 8-bit",
    cause="the keys on the CPU become modules_to_not_convert (A4), and the empty key matches every module's name",
    affected=(Affected("transformers"),),
    versions="transformers 5.6.2 and 5.23.0, run; the warning's wrong backend too",
    way_round="omit the flag when everything is on one device; count the quantized layers after loading",
    trimtab="the format does not depend on the placement; the plan lists it for each block",
    evidence="run",
)  # fmt: skip


def probe(kit: Kit) -> Seen:
    """Load a 4-bit model with everything on the CPU by the empty key, and count."""
    model = kit.load(kit.checkpoint("llama"), quant="nf4", device_map={"": "cpu"})
    counts, says = quantized(model), getattr(model, "is_loaded_in_4bit", False)
    evidence = f"{counts['Linear4bit']} Linear4bit, {counts['Linear']} Linear, is_loaded_in_4bit {says}"
    return Seen(PRESENT if says and not counts["Linear4bit"] else FIXED, evidence)
