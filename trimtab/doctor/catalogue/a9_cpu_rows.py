"""A9: a 4-bit layer whose outputs are not a multiple of 32 cannot run on a CPU with AVX512-BF16."""

from __future__ import annotations

from trimtab.doctor.facts.bug import FIXED, NOT_APPLICABLE, PRESENT, Affected, Bug, Seen
from trimtab.doctor.facts.probe_kit import Kit

BUG = Bug(
    title="A 4-bit layer whose outputs are not a multiple of 32 fails on CPUs with AVX512-BF16",
    symptom="AssertionError: N must be divisible by block_n, at the first forward without gradients",
    trigger="a 4-bit layer of 40 outputs, say, computed on a CPU with AVX512-BF16; the same layer runs on other CPUs and on GPUs",
    cause="bitsandbytes nn/modules.py Linear4bit.forward repacks every 4-bit weight on such a CPU; functional.py "
    "_convert_weight_packed_for_cpu asserts whole groups of 32 rows, and nothing checks before",
    affected=(Affected("bitsandbytes"),),
    versions="bitsandbytes 0.49.2 and 0.50.2, run",
    way_round="support_avx512bf16_for_cpu = False on the layer",
    trimtab="it computes over the bytes as they are stored",
    evidence="run",
)  # fmt: skip


def probe(kit: Kit) -> Seen:
    """Run a 4-bit layer of 40 outputs on the CPU."""
    import torch
    from bitsandbytes.nn import Linear4bit, Params4bit

    layer = Linear4bit(64, 40, bias=False, compute_dtype=torch.bfloat16, quant_type="nf4")
    layer.weight = Params4bit(torch.ones(40, 64, dtype=torch.bfloat16), requires_grad=False, quant_type="nf4")
    layer.to("cpu").eval()
    if not getattr(layer, "support_avx512bf16_for_cpu", False):
        return Seen(NOT_APPLICABLE, "this CPU has no AVX512-BF16, so bitsandbytes repacks nothing")
    try:
        with torch.no_grad():
            output = layer(torch.ones(1, 64, dtype=torch.bfloat16))
    except AssertionError as exc:
        return Seen(PRESENT, f"64 inputs, 40 outputs: AssertionError: {exc}")
    return Seen(FIXED, f"an output of shape {list(output.shape)}")
