"""I16: on CPUs with AVX512, a 4-bit weight whose rows are not whole blocks is unpacked with scales of wrong blocks."""

from __future__ import annotations

import copy
import os

from trimtab.doctor.facts.bug import FIXED, NOT_APPLICABLE, PRESENT, Affected, Bug, Seen
from trimtab.doctor.facts.probe_kit import Kit

BUG = Bug(
    title="4-bit weights whose rows are not whole blocks of 64 values get wrong scales on CPUs with AVX512, silently",
    symptom="silent: dequantized values are off by up to 2.5 standard deviations of the weight, a layer's outputs by 23 %. With "
    "AVX512-BF16 a forward without gradients fails instead: RuntimeError: shape '[1152, 67]' is invalid for input of size 77472",
    trigger="a 4-bit weight with rows of a multiple of 16 values that are not whole blocks, such as 4,304 in Gemma 3's vision "
    "tower, computed or dequantized on an x86 CPU with AVX512; other row lengths, other CPUs and GPUs are right",
    cause="bitsandbytes csrc/cpu_ops.cpp dequantizeBlockwise4bitCpu begins each row with a new block; quantize_4bit counts blocks "
    "over the flattened weight. The branch for ARM leaves such rows to the scalar code, the one for AVX512 does not. "
    "functional.py _convert_weight_packed_for_cpu counts in rows too, and its reshape fails",
    affected=(Affected("bitsandbytes", since="0.49.0"),),
    versions="bitsandbytes 0.49.2, 0.50.0 and 0.50.2, run on an AMD EPYC: nf4 and fp4, float32, bfloat16 and float16; 0.49.0, "
    "0.50.1 and the main branch of August 2026 have the branch, 0.48.2 has not (read)",
    way_round="unpack as one row: quant_state.shape = torch.Size((1, numel)), then .view(shape); for a whole model "
    "llm_int8_skip_modules (mind H4)",
    trimtab="it unpacks such a weight as one row, and multiplies with that; `verify` names the stock side's layers that are wrong",
    evidence="run",
)  # fmt: skip

ROWS, WIDTH, BLOCK = 24, 80, 64
# Other roundings differ by 1e-6 of a scale; other scales by about their own size.
MOST = 0.01


def probe(kit: Kit) -> Seen:
    """Unpack 24 rows of 80 values as rows and as one row, and compare both with code * absmax."""
    import torch
    from bitsandbytes.functional import dequantize_4bit, quantize_4bit

    weight = torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(0))
    packed, state = quantize_4bit(weight, blocksize=BLOCK, quant_type="nf4")
    stored = packed.flatten()
    places = torch.stack((stored >> 4, stored & 15), dim=1).flatten().long()
    true = state.code[places] * state.absmax.repeat_interleave(BLOCK)
    one_row = copy.copy(state)
    one_row.shape = torch.Size((1, true.numel()))
    away, away_as_one = (float((dequantize_4bit(packed, one).flatten() - true).abs().max()) for one in (state, one_row))
    text = f"{ROWS} rows of {WIDTH} values: up to {away:.2g} away from code * absmax, {away_as_one:.2g} as one row"
    if away > MOST:
        return Seen(PRESENT, text)
    if os.name == "nt" or "AVX512" not in torch.backends.cpu.get_cpu_capability():
        return Seen(NOT_APPLICABLE, f"not shown here, without bitsandbytes' code for AVX512: {text}")
    return Seen(FIXED, text)
