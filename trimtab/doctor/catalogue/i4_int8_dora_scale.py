"""I4: an 8-bit layer with DoRA loses its scale after the first forward pass on the CPU."""

from __future__ import annotations

from trimtab.doctor.facts.bug import FIXED, PRESENT, Affected, Bug, Seen
from trimtab.doctor.facts.probe_kit import Kit, failure

BUG = Bug(
    title="DoRA on an 8-bit base works once on the CPU: 'NoneType' object has no attribute 'dtype'",
    symptom="AttributeError: 'NoneType' object has no attribute 'dtype' at the second forward pass",
    trigger="an adapter with use_dora=True on an 8-bit base, run on the CPU",
    cause="bitsandbytes moves the scale SCB from the weight to the layer's state in the first forward pass; PEFT "
    "lora/dora.py dequantizes with the weight's own SCB, which is None by then",
    affected=(Affected("peft"), Affected("bitsandbytes")),
    versions="peft 0.19.1 and 0.21.2 with bitsandbytes 0.49.2 and 0.50.2 run on the CPU; not tried on CUDA",
    way_round="4-bit, or a plain LoRA",
    trimtab="scales stay with their weight, and norms for DoRA are computed once, when the adapter is attached",
    evidence="run",
)  # fmt: skip


def probe(kit: Kit) -> Seen:
    """Run an 8-bit model with a DoRA adapter twice."""
    path = kit.checkpoint("llama")
    adapter = kit.adapter(path, targets=["q_proj"], use_dora=True)
    model = kit.peft(kit.load(path, quant="int8", device_map={"": 0}), adapter)
    first = kit.forward(model)
    try:
        second = kit.forward(model)
    except AttributeError as error:
        if "NoneType" not in str(error):
            raise
        return Seen(PRESENT, f"the second forward pass: {failure(error)}")
    change = float((second - first).abs().max())
    return Seen(FIXED, f"two forward passes differ by up to {change:.2f}")
