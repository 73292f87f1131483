"""I14: the last token's product with a frozen bfloat16 weight is slow on a CPU."""

from __future__ import annotations

import time

from trimtab.doctor.facts.bug import FIXED, NOT_APPLICABLE, PRESENT, Affected, Bug, Seen
from trimtab.doctor.facts.probe_kit import Kit

BUG = Bug(
    title="First tokens of a frozen bfloat16 model on a CPU are slow: the head is multiplied as a batch",
    symptom="prefill is slow by a constant: 0.1 s for a head of 32,000 x 1,024, more for larger ones; no error, right numbers",
    trigger="a CPU with AVX512-BF16, a bfloat16 head whose weight needs no gradient (as PEFT leaves it), and "
    "`logits_to_keep=1`, which makes a view of the last position",
    cause="torch.matmul folds a batch of one into a matrix only where the strides fit or the weight needs a gradient; a dimension "
    "of size 1 has a stride that does not (LinearAlgebra.cpp, should_fold), and oneDNN's batched product is slow there",
    affected=(Affected("torch"),),
    versions="2.13.0+cpu run on an AMD EPYC with AVX512-BF16: 12.3 ms instead of 0.34 for 8,192 x 1,024, the same bits; float16 "
    "and float32 are not slower",
    way_round="head.weight.requires_grad_(True) under inference_mode, or hidden[:, -1] in place of hidden[:, -1:]",
    trackers=(
        "pytorch/pytorch#186148 (closed: the same strides on a GPU)",
        "pytorch/pytorch#151934 (open: such batched products on a CPU)",
    ),
    trimtab="a weight that is not quantized is multiplied with a matrix of rows on a CPU",
    evidence="run",
)  # fmt: skip

WIDTH, OUTPUTS, TOKENS, TRIES = 1024, 8192, 64, 7
# A factor of 36 was measured; without the bug, both times are equal within a third.
LEAST_RATIO = 5.0


def probe(kit: Kit) -> Seen:
    """Multiply the last of 64 positions alternately as a view with three dimensions and as a matrix."""
    import torch

    supported = getattr(torch.cpu, "_is_avx512_bf16_supported", None)
    if supported is None or not supported():
        return Seen(NOT_APPLICABLE, "this CPU has no AVX512-BF16, or this torch does not say so")
    weight = torch.zeros(OUTPUTS, WIDTH, dtype=torch.bfloat16)
    last = torch.zeros(1, TOKENS, WIDTH, dtype=torch.bfloat16)[:, -1:]

    def seconds(x: torch.Tensor) -> float:
        start = time.perf_counter()
        torch.nn.functional.linear(x, weight)
        return time.perf_counter() - start

    with torch.inference_mode():
        times = [(seconds(last), seconds(last[0])) for _ in range(TRIES)]
    view, matrix = (min(column) for column in zip(*times, strict=True))
    text = f"{1000 * view:.2f} ms as a view of a prompt, {1000 * matrix:.2f} ms as a matrix"
    return Seen(PRESENT if view >= LEAST_RATIO * matrix else FIXED, text)
