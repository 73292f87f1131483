"""Every kernel of ours once, on small shapes and in every way it is cut: what a memory checker can follow in a minute or two.

    compute-sanitizer --tool memcheck --error-exitcode 9 python -m tests.gpu.once

Also with --tool initcheck, synccheck and racecheck. That one needs many times as long: `python -m tests.gpu.once 2 12` runs the
second of twelve parts, several of which may run beside each other. `python -m tests.gpu.once many` runs the kernels of prompts, of
steps of more than 8 rows and of the 8-bit head alone, `python -m tests.gpu.once layers` those of mixtures and of recurrent layers.
Values are compared as well, as when a model is loaded.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch

from trimtab.engine.batched_lora import columns as adapter_columns
from trimtab.engine.cuda import launch_config
from trimtab.engine.formats import int8_head
from trimtab.engine.kernels import (
    attention_and_norms,
    autotune,
    delta_rule,
    dequantize,
    device_kernels,
    embed_and_logits,
    experts,
    gemm4,
    gemv4,
    routers,
    selfcheck,
)
from trimtab.engine.loader import head_kernel
from trimtab.planning.memory.prompts import ADAPTER_COLUMNS

# Outputs of layers over one input, columns, whether two are gate and up.
PRODUCTS = (((64,), 1024, False), ((48, 48), 512, True), ((96, 32, 32), 512, False), ((40,), 192, False))
TURNED = tuple((2, 1, 64, None, False, None, False, way) for way in ("pairs", "wide"))
ATTENTION = ((8, 2, 256), (4, 1, 512), (2, 1, 128), (4, 2, 64), *TURNED)
PAGED = ((8, 2, 256), (4, 1, 512))
# Vectors that are normed and gated: 8 values at once, and one at a time. Scores of a vocabulary in the same two ways.
WIDTHS = (64, 60, 512)
SIZES = (embed_and_logits.Sizes(500, 512, 30.0, 3, 64), embed_and_logits.Sizes(512, 512, 30.0, 3, 64))
RANKS = (8, 40)
# A prompt's: tokens of chunks and their edges (8 and 16 tokens of a block), and weights [D_out, D_in], one with a block not full.
TOKENS = (1, 7, 16, 17, 130)
UNPACKED = ((96, 320), (40, 1088))
EXTENDED = ((96, 320), (40, 1104))
# Rows of a step of many: each size of tile (16, 32, 64), full and not. Layers over one input, as PRODUCTS.
MANY_ROWS = (9, 16, 27, 33, 64)
MANY_PRODUCTS = (((64,), 1024), ((48, 16), 512), ((256,), 2560))
HEADS = ((500, 512), (1031, 256))
# Experts, hidden and inner size of mixtures, by the format of both stacks. Tokens with slots and of how many rows: of steps, and
# two of prompts.
MIXTURES = {
    "nf4": (5, 128, 64), "nf4-dq": (5, 320, 64), "none": (5, 128, 64), "q8_0": (4, 128, 64), "q4_k": (4, 256, 256),
    "int4-g32-zp": (4, 128, 64), "fp8-128x128": (4, 128, 128), "nvfp4-g16": (4, 128, 64),
}  # fmt: skip
NEAR_TOKENS = ((1, 1), (8, 2), (9, 9), (64, 64), (70, 2))
DELTAS = (delta_rule.DeltaShape(2, 4, 32, 64, 4), delta_rule.DeltaShape(1, 2, 128, 128, 4))


def findings(
    products: Any, small: Any, both_ends: Any, *, rows: tuple[int, ...] = (1, 3, 8), limit: int = 6, part: int = 1,
    parts: int = 1,
) -> Iterator[str]:  # fmt: skip
    """Yield what is wrong with the kernels of these modules. limit: ways to cut a product that are tried. part: which of so
    many equal parts of the work, from 1 on; the kernels that are no products belong to the last."""
    turn = 0
    for quant in ("nf4-dq", "nf4"):
        weights = autotune.RandomWeights(products.device, quant=quant)
        for counts, columns, pair in PRODUCTS:
            group = [weights.make(one, columns) for one in counts]
            for n in rows:
                for number, cut in enumerate(launch_config.unlike(gemv4.ways(group, n, products, pair=pair), limit)):
                    turn += 1
                    if turn % parts != part % parts:
                        continue
                    rank = RANKS[number % len(RANKS)]
                    why = autotune.check(group, products, rows=(n,), cut=None if pair else cut, rank=rank)
                    if pair:
                        out = torch.empty(n, counts[0], dtype=torch.bfloat16, device=products.device)
                        x = torch.randn(n, columns, device=products.device).bfloat16()
                        gemv4.matvec4(x, group, out, gate=gemv4.Gate("gelu_tanh"), module=products, cut=cut)
                        why = why or (None if bool(out.isfinite().all()) else "not all outputs are written")
                    if why is not None:
                        yield f"{cut} of {list(counts)} x {columns}, {n} rows, rank {rank}: {why}"
    if part != parts:
        return
    for found in (
        selfcheck.check(small, widths=WIDTHS, attention=ATTENTION, rows=rows),
        selfcheck.check_pages(small, PAGED),
        wrong_turns(small),
        routers.check(small, 128, 2816, routers.Choice(8), torch.bfloat16),
        *(embed_and_logits.check(both_ends, sizes, rows=rows) for sizes in SIZES),
        *(device_kernels.wrong_lora(products, dtype) for dtype in (torch.bfloat16, torch.float16)),
    ):
        if found is not None:
            yield found


def wrong_turns(small: Any) -> str | None:
    """Return what is wrong with cos and sin of positions, for one kind of layers and for two, None if nothing."""
    positions = torch.tensor([0, 1, 7, 1000, 131071], device=small.device)
    for dims in ((64,), (256, 512)):
        made = []
        for module in (small, None):
            kinds = []
            for dim in dims:
                inverse = 1e4 ** (-torch.arange(dim // 2, device=small.device).float() / (dim // 2))
                pair = [torch.full((len(positions), dim), math.nan, device=small.device).bfloat16() for _ in range(2)]
                kinds.append((inverse, 1.5, *pair))
            attention_and_norms.turns(positions, kinds, module)
            made.append(torch.cat([one for kind in kinds for one in kind[2:]], dim=1))
        if not torch.allclose(*made, rtol=2**-7, atol=2**-7):  # a rounding to bfloat16, of a sine that CUDA computes otherwise
            return f"turns of {dims}: {float((made[0] - made[1]).abs().max()):.1e} off"
    return None


def findings_of_many(
    prompts: Any, many: Any, head: Any, *, tokens: Sequence[int] = TOKENS, rows: Sequence[int] = MANY_ROWS
) -> Iterator[str]:  # fmt: skip
    """Yield what is wrong with the kernels of prompts, of steps of many rows and of the 8-bit head, of these modules."""
    device = prompts.device
    for dtype in (torch.bfloat16, torch.float16):
        found = dequantize.wrong_add(prompts, dtype, tokens=tokens)
        found = found or dequantize.wrong_add_rows(prompts, dtype, tokens=(16, 32, 64))
        if found is not None:
            yield f"adapters of a prompt, {dtype}: {found}"
        for quant in ("nf4-dq", "nf4", "fp4"):
            weights = autotune.RandomWeights(device, quant=quant)
            for shape in UNPACKED:
                found = dequantize.wrong_unpack(weights.make(*shape, dtype), prompts)
                if found is not None:
                    yield f"an unpacked weight, {quant}, {dtype}: {found}"
            for shape in EXTENDED if dtype == torch.bfloat16 else ():
                room = torch.empty(shape[0] * (shape[1] + ADAPTER_COLUMNS), dtype=dtype, device=device)
                found = adapter_columns.wrong(weights.make(*shape, dtype), room, prompts, tokens=tokens)
                if found is not None:
                    yield f"adapters inside products, {quant}: {found}"
            for counts, columns in MANY_PRODUCTS if quant != "fp4" else ():
                group = [weights.make(one, columns, dtype) for one in counts]
                found = gemm4.wrong(group, many, dtype, counts=rows)
                if found is not None:
                    yield f"many rows, {quant}, {dtype}: {found}"
    if (found := adapter_columns.wrong_kept(prompts)) is not None:
        yield f"adapters inside products of unpacked weights: {found}"
    for shape in HEADS:
        for bias in (None, torch.randn(shape[0], device=device).bfloat16()):
            q, scale = int8_head.quantize_rows(torch.randn(shape, device=device).bfloat16())
            found = head_kernel.check(head, int8_head.Head(q, scale, bias))
            if found is not None:
                yield f"the 8-bit head: {found}"


def findings_of_mixtures(module: Any, *, slots: int = 2) -> Iterator[str]:
    """Yield what is wrong with the products of mixtures: experts on the device, and in host memory with so many slots."""
    from tests.engine.kernels import test_experts
    from tests.engine.tiers.test_near_experts import apart

    for kind, (count, width, inner) in MIXTURES.items():
        if kind in ("nf4", "nf4-dq", "none"):
            mixture = test_experts.mixture_of(count, width, inner, torch.bfloat16, kind)
        else:
            stacks = [test_experts.file_stack(kind, count, *one, module.device) for one in ((2 * inner, width), (width, inner))]
            mixture = experts.Mixture(*stacks, "silu")
        if (found := experts.check(module, mixture, 2, torch.bfloat16, rows=(1, 9))) is not None:
            yield f"a mixture of {kind}: {found}"
        if kind == "none":
            continue
        with torch.device("cpu"):
            far = apart(mixture, slots, module.device)
        for n, n_rows in NEAR_TOKENS:
            x, index, weights, tables = test_experts.case(mixture, n, 2, torch.bfloat16, slots=(0, -1, 2), rows=n_rows)
            made = [
                experts.experts(x, index, weights, one, torch.empty_like(x), lora=tables, module=module) for one in (far, mixture)
            ]
            if not torch.equal(*made):
                yield f"{n} tokens of a mixture of {kind} with {slots} slots are not those of experts on the device"


def findings_of_deltas(modules: Iterable[tuple[Any, delta_rule.DeltaShape]]) -> Iterator[str]:
    """Yield what is wrong with the kernels of recurrent layers."""
    for module, shape in modules:
        if (found := delta_rule.check(module, shape)) is not None:
            yield f"{shape}: {found}"


def main(part: int | str = 1, parts: int = 1) -> int:
    """Run all of it, or one part, on the first GPU, print what is wrong. part: "many" for the kernels of many tokens alone,
    "layers" for those of mixtures and recurrent layers."""
    device = torch.device("cuda", 0)
    said = []
    if part == "layers":
        with device:
            said += findings_of_mixtures(experts.load(device))
        said += findings_of_deltas((delta_rule.load(device, shape, torch.bfloat16), shape) for shape in DELTAS)
    elif part != "many":
        products, small = gemv4.load(device), attention_and_norms.load(device)
        said += findings(products, small, embed_and_logits.load(device), part=int(part), parts=parts)
    if part == "many" or part == parts:
        many = dequantize.load(device), gemm4.load(device), int8_head.load(device)
        said += findings_of_many(*many)
    torch.cuda.synchronize()
    print("\n".join(said) or "every kernel ran once and is right")
    return bool(said)


if __name__ == "__main__":
    sys.exit(main(*(int(word) if word.isdigit() else word for word in sys.argv[1:])))
