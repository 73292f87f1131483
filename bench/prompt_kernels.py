"""What a prompt's own kernels take beside bitsandbytes' and torch's: weights unpacked, LoRA added, in microseconds.

    python -m bench.prompt_kernels [--save bench/results/prompt_kernels.json]

Random weights of E4B's and Qwen3-8B's shapes, NF4 with double quantization, a CUDA graph of one call each, the shortest of three.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional

from trimtab.runtime import prompt_kernels
from trimtab.runtime.quant import dequantize, quantize
from trimtab.runtime.tuning import graph_us

SHAPES = ((10240, 2560), (2560, 10240), (2048, 2560), (512, 2560), (12288, 4096), (4096, 12288))
TOKENS, RANKS = (1, 64, 512, 1024), (8, 64)


def rows() -> list[dict[str, Any]]:
    """Return a row for each shape: of unpacking, and of adding by tokens and rank."""
    device = torch.device("cuda", torch.cuda.current_device())
    module = prompt_kernels.load(device)
    found: list[dict[str, Any]] = []
    for high, wide in SHAPES:
        weight = quantize(torch.randn(high, wide, device=device).bfloat16(), "nf4-dq")
        out = torch.empty(high * wide, dtype=torch.bfloat16, device=device)
        ours = graph_us(lambda weight=weight, out=out: prompt_kernels.unpack(weight, out, module), device)
        theirs = graph_us(lambda weight=weight: dequantize(weight), device)
        found.append(
            {"what": "unpack", "shape": [high, wide], "us": round(ours, 1), "bitsandbytes_us": round(theirs, 1)}
        )
        for n in TOKENS:
            for rank in RANKS:
                found.append(_lora(module, device, n, rank, high, wide))
    return found


def _lora(module: Any, device: torch.device, n: int, rank: int, high: int, wide: int) -> dict[str, Any]:
    A, B = torch.randn(rank, wide, device=device) / wide**0.5, torch.randn(high, rank, device=device)
    x, y = (torch.randn(n, size, device=device).bfloat16() for size in (wide, high))

    def ours() -> Any:
        return prompt_kernels.add(A, B, 0.5, x, y, module, round_change=True)

    def plain() -> Any:
        return y.add_(functional.linear(functional.linear(x.float(), A), B), alpha=0.5)

    times: dict[str, Callable[[], Any]] = {"us": ours, "torch_us": plain}
    taken = {name: round(graph_us(run, device), 1) for name, run in times.items()}
    return {"what": "lora", "shape": [high, wide], "tokens": n, "rank": rank, **taken}


def main() -> None:
    from bench.memory import environment

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--save", type=Path)
    given = parser.parse_args()
    measured = rows()
    for row in measured:
        print(json.dumps(row), flush=True)
    if given.save:
        given.save.write_text(json.dumps({"environment": environment(), "rows": measured}, indent=1) + "\n")


if __name__ == "__main__":
    main()
