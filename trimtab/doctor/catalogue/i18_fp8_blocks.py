"""I18: FP8 weights whose sides are not multiples of their blocks are dequantized with scales of wrong blocks."""

from __future__ import annotations

from trimtab.doctor.facts.bug import FIXED, NOT_APPLICABLE, PRESENT, Affected, Bug, Seen
from trimtab.doctor.facts.probe_kit import Kit

BUG = Bug(
    title="FP8 weights whose sides are not multiples of 128 are dequantized with the scales of other blocks, silently",
    symptom="silent: a weight of 192 rows with two scales gets 96 rows of each, not 128 and 64; where the number of scales does "
    "not divide the side: ValueError: Weight shape (...) not divisible by scale grid (...)",
    trigger="an FP8 checkpoint (quant_method fp8, blocks) loaded with dequantize=True, or on a machine without FP8 kernels, with a "
    "weight whose rows or columns are no multiple of the block",
    cause="integrations/finegrained_fp8.py Fp8Dequantize._dequantize_one takes the size of a block from the shapes of weight and "
    "scales, not from weight_block_size",
    affected=(Affected("transformers", since="5.8.0"),),
    versions="transformers 5.23.0, run; 5.8.0 to 5.20.0 have the lines (read); 5.6.2 refuses such weights by name (read)",
    way_round="none by option: dequantize such weights by weight_block_size, and load the result",
    trimtab="it takes the size of a block from weight_block_size; `verify` shows the difference to the stock stack",
    evidence="run",
)  # fmt: skip


def probe(kit: Kit) -> Seen:
    """Dequantize 192 rows of ones with the scales 1 and 2 of blocks of 128, and count the rows of each."""
    import torch

    try:
        from transformers.integrations.finegrained_fp8 import Fp8Dequantize

        dequantize = Fp8Dequantize(None)._dequantize_one
    except (ImportError, AttributeError) as exc:
        return Seen(NOT_APPLICABLE, f"this release dequantizes FP8 elsewhere ({exc})")
    weight = torch.ones(192, 128).to(torch.float8_e4m3fn)
    try:
        found = dequantize(weight, torch.tensor([[1.0], [2.0]]))
    except Exception as exc:
        return Seen(PRESENT, f"{type(exc).__name__}: {exc}")
    ones = int((found[:, 0].float() == 1).sum())
    text = f"192 rows in blocks of 128: the first scale reaches {ones} rows"
    return Seen(FIXED if ones == 128 else PRESENT, text)
