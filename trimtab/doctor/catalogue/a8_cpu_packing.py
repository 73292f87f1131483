"""A8: bitsandbytes repacks 4-bit weights at the first CPU forward, and other functions read them as before."""

from __future__ import annotations

from trimtab.doctor.facts.bug import FIXED, NOT_APPLICABLE, PRESENT, Affected, Bug, Seen
from trimtab.doctor.facts.probe_kit import Kit

BUG = Bug(
    title="After one CPU forward a 4-bit weight dequantizes to garbage (CPUs with AVX512-BF16)",
    symptom="silent: dequantized weights off by 140 % (9 % before) until the next state_dict(); without double quantization "
    "they stay off by 24 % after it, and so does every later forward",
    trigger="a forward without gradients on a CPU with AVX512-BF16, then merge, dequantize(), .to(\"cuda\"), saving, or anything "
    "that calls state_dict(), such as accelerate's dispatch when PEFT loads an adapter",
    cause="bitsandbytes nn/modules.py Linear4bit.forward repacks weight and scales in place; dequantize_4bit and Params4bit.to "
    "do not look at packing_format_for_cpu; functional.py _convert_weight_packed_for_cpu_inverse, which state_dict() calls, "
    "turns the scales back only for nested ones: without double quantization they stay transposed",
    affected=(Affected("bitsandbytes"),),
    versions="bitsandbytes 0.49.2 and 0.50.2, run; the remaining error shows where a row holds more than one block of 64",
    way_round="merge, move and save before any forward on the CPU; or support_avx512bf16_for_cpu = False on every Linear4bit",
    trackers=("bitsandbytes-foundation/bitsandbytes#2078 (open, names only .to)",),
    trimtab="it holds the packed bytes itself, as quantized, and never repacks them",
    evidence="run",
)  # fmt: skip


def probe(kit: Kit) -> Seen:
    """Dequantize one 4-bit layer before a forward, after it, and after the state_dict() that should undo the packing."""
    import torch
    from bitsandbytes.functional import dequantize_4bit
    from bitsandbytes.nn import Linear4bit, Params4bit

    true = torch.randn(128, 128, generator=torch.Generator().manual_seed(0)) / 12
    layer = Linear4bit(128, 128, bias=False, compute_dtype=torch.bfloat16, compress_statistics=False, quant_type="nf4")
    layer.weight = Params4bit(true.bfloat16(), requires_grad=False, quant_type="nf4", compress_statistics=False)
    layer.to("cpu").eval()
    if not getattr(layer, "support_avx512bf16_for_cpu", False):
        return Seen(NOT_APPLICABLE, "this CPU has no AVX512-BF16, so bitsandbytes repacks nothing")

    def error() -> float:
        unpacked = dequantize_4bit(layer.weight.data, layer.weight.quant_state).float().reshape(true.shape)
        return float((unpacked - true).norm() / true.norm())

    fresh = error()
    with torch.no_grad():
        layer(torch.ones(1, 128, dtype=torch.bfloat16))
    ran = error()
    layer.state_dict()
    saved = error()
    evidence = f"error of the dequantized weight: fresh {fresh:.3f}, after a forward {ran:.3f}, after state_dict() {saved:.3f}"
    # Packing may round scales to bfloat16, 2^-9 of the weight.
    return Seen(PRESENT if max(ran, saved) > fresh + 0.01 else FIXED, evidence)
