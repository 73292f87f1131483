"""What products of 8 to 128 rows take: our kernel, a weight unpacked for cuBLAS, and bitsandbytes' own, in microseconds.

    python -m bench.many_rows [--size e4b] [--save bench/results/many_rows.json]

Random weights of one layer's shapes, NF4 with double quantization, groups over one input as a step has them, enough copies that
weights come from memory and not from L2. "check" compares with float64 first. The last lines sum a whole step: all layers' products
and their adapters of rank 8, a slot for each row.
"""

from __future__ import annotations

import json
from functools import partial
from typing import Any

import torch
from torch.nn import functional

from bench import parser_of, save
from trimtab.engine.formats.weights import dequantize
from trimtab.engine.kernels import dequantize as prompt_kernels
from trimtab.engine.kernels import gemm4, gemv4
from trimtab.engine.kernels.autotune import RandomWeights, graph_us

# Outputs of the group's members, columns, how often a step has it.
SHAPES: dict[str, tuple[tuple[tuple[int, ...], int, int], ...]] = {
    "e4b": (
        ((2048, 512, 512), 2560, 24), ((2048,), 2560, 18), ((2560,), 2048, 42), ((10240, 10240), 2560, 42),
        ((2560,), 10240, 42), ((256,), 2560, 42), ((2560,), 256, 42),
    ),
    "qwen3_8b": (((4096,), 4096, 72), ((1024,), 4096, 72), ((12288,), 4096, 72), ((4096,), 12288, 36)),
}  # fmt: skip
COUNTS = (8, 16, 32, 64, 128)
COPIES_BYTES = 200 * 2**20
RANK = 8


def rows(size: str, device: torch.device) -> list[dict[str, Any]]:
    """Return a row for each shape and number of rows."""
    module, unpack = gemm4.load(device), prompt_kernels.load(device)
    found: list[dict[str, Any]] = []
    for shape, columns, count in SHAPES[size]:
        weights = RandomWeights(device)
        groups = weights.groups(shape, columns, COPIES_BYTES)
        wrong = gemm4.wrong(groups[0], module, torch.bfloat16)
        room = torch.empty(max(shape) * columns, dtype=torch.bfloat16, device=device)
        for n in COUNTS:
            x = torch.randn(n, columns, device=device).bfloat16()
            out = torch.empty(n, sum(shape), dtype=torch.bfloat16, device=device)
            slots = [[(torch.randn(RANK, columns, device=device), torch.randn(one, RANK, device=device), 0.5)] * n for one in shape]
            lora = gemv4.lora_args(slots, torch.arange(n, dtype=torch.int32, device=device), 16)

            def every(lora: Any, x: Any = x, out: Any = out, groups: Any = groups) -> None:
                for group in groups:
                    gemm4.linear(x, group, out, lora=lora, module=module)

            def unpacked(x: Any = x, groups: Any = groups, room: Any = room) -> None:
                for group in groups:
                    for one in group:
                        functional.linear(x, prompt_kernels.unpack(one, room, unpack))

            def theirs(x: Any = x, groups: Any = groups) -> None:
                for group in groups:
                    for one in group:
                        functional.linear(x, dequantize(one))

            runs = {"us": partial(every, None), "with_adapters_us": partial(every, lora), "unpacked_us": unpacked}
            taken = {name: round(graph_us(run, device) / len(groups), 1) for name, run in runs.items()}
            taken["bitsandbytes_us"] = round(graph_us(theirs, device) / len(groups), 1)
            gb_s = sum(one.nbytes for one in groups[0]) / taken["us"] / 1000
            found.append(
                {"shape": list(shape), "columns": columns, "times": count, "rows": n, "check": wrong, **taken, "GB_s": round(gb_s)}
            )
            print(json.dumps(found[-1]), flush=True)
    return found


def sums(found: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the milliseconds of all products of a step, by number of rows."""
    names = ("us", "with_adapters_us", "unpacked_us", "bitsandbytes_us")
    return [
        {"rows": n, **{
            name.replace("_us", "").replace("us", "ours") + "_ms": round(
                sum(row[name] * row["times"] for row in found if row["rows"] == n) / 1000, 2
            )
            for name in names
        }}
        for n in COUNTS
    ]  # fmt: skip


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--size", choices=sorted(SHAPES), default="e4b")
    given = parser.parse_args()
    device = torch.device("cuda", torch.cuda.current_device())
    found = rows(given.size, device)
    steps = sums(found)
    for step in steps:
        print(json.dumps(step), flush=True)
    about = {"gpu": torch.cuda.get_device_name(device), "torch": torch.__version__, "size": given.size}
    save(given.save, {**about, "steps": steps, "rows": found})


if __name__ == "__main__":
    main()
