"""Every kernel of ours once, on small shapes and in every way it is cut: what a memory checker can follow in a minute or two.

    compute-sanitizer --tool memcheck --error-exitcode 9 python -m tests.gpu.once

Also with --tool initcheck, synccheck and racecheck. That one needs many times as long: `python -m tests.gpu.once 2 12` runs the
second of twelve parts, several of which may run beside each other. Values are compared as well, as when a model is loaded.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import torch

from trimtab.runtime import cuts, ends, fused, fused_check, matvec, tuning

# Outputs of layers over one input, columns, whether two are gate and up.
PRODUCTS = (((64,), 1024, False), ((48, 48), 512, True), ((96, 32, 32), 512, False), ((40,), 192, False))
ATTENTION = ((8, 2, 256), (4, 1, 512), (4, 2, 64))
SIZES = ends.Sizes(500, 512, 30.0, 3, 64)
RANKS = (8, 40)


def findings(
    products: Any, small: Any, both_ends: Any, *, rows: tuple[int, ...] = (1, 3, 8), limit: int = 6, part: int = 1,
    parts: int = 1,
) -> Iterator[str]:  # fmt: skip
    """Yield what is wrong with the kernels of these modules. limit: ways to cut a product that are tried. part: which of so
    many equal parts of the work, from 1 on; the kernels that are no products belong to the last."""
    turn = 0
    for quant in ("nf4-dq", "nf4"):
        weights = tuning.RandomWeights(products.device, quant=quant)
        for counts, columns, pair in PRODUCTS:
            group = [weights.make(one, columns) for one in counts]
            for n in rows:
                for number, cut in enumerate(cuts.unlike(matvec.ways(group, n, products, pair=pair), limit)):
                    turn += 1
                    if turn % parts != part % parts:
                        continue
                    rank = RANKS[number % len(RANKS)]
                    why = tuning.check(group, products, rows=(n,), cut=None if pair else cut, rank=rank)
                    if pair:
                        out = torch.empty(n, counts[0], dtype=torch.bfloat16, device=products.device)
                        x = torch.randn(n, columns, device=products.device).bfloat16()
                        matvec.matvec4(x, group, out, gate=matvec.Gate("gelu_tanh"), module=products, cut=cut)
                        why = why or (None if bool(out.isfinite().all()) else "not all outputs are written")
                    if why is not None:
                        yield f"{cut} of {list(counts)} x {columns}, {n} rows, rank {rank}: {why}"
    if part != parts:
        return
    found = fused_check.check(small, widths=(64, 512), attention=ATTENTION, rows=rows)
    found = found or ends.check(both_ends, SIZES, rows=rows)
    if found is not None:
        yield found


def main(part: int = 1, parts: int = 1) -> int:
    """Run all of it, or one part, on the first GPU, print what is wrong."""
    device = torch.device("cuda", 0)
    products, small = matvec.load(device), fused.load(device)
    said = list(findings(products, small, ends.load(device), part=part, parts=parts))
    torch.cuda.synchronize()
    print("\n".join(said) or "every kernel ran once and is right")
    return bool(said)


if __name__ == "__main__":
    sys.exit(main(*map(int, sys.argv[1:])))
