"""What a prompt's own kernels take beside bitsandbytes' and torch's: weights unpacked, LoRA added, in microseconds; and layers with
an adapter, unpacking and product included, with the adapter inside the product and behind it.

    python -m bench.prompt_kernels [--save bench/results/prompt_kernels.json]

Random weights of E4B's and Qwen3-8B's shapes, NF4 with double quantization, a CUDA graph of one call each, the shortest of three.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional

from bench import environment, parser_of, save
from trimtab.engine.batched_lora import columns
from trimtab.engine.formats.bitsandbytes import quantize
from trimtab.engine.formats.weights import dequantize
from trimtab.engine.kernels import dequantize as prompt_kernels
from trimtab.engine.kernels.autotune import graph_us
from trimtab.engine.lora import layers

SHAPES = ((10240, 2560), (2560, 10240), (2048, 2560), (512, 2560), (12288, 4096), (4096, 12288))
TOKENS, RANKS = (1, 64, 512, 1024), (8, 64)
# Layers over one input: outputs of each, and inputs. E4B's gate, gate and up, down, attention; Qwen3-8B's gate and up.
LAYERS = (
    ((10240,), 2560), ((10240, 10240), 2560), ((2560,), 10240), ((2048, 512, 512), 2560), ((2560,), 2048),
    ((12288, 12288), 4096),
)  # fmt: skip
LAYER_TOKENS, LAYER_RANKS, STEPS = (64, 512, 1024), (8, 32), (64, 8)


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
        found.append({"what": "unpack", "shape": [high, wide], "us": round(ours, 1), "bitsandbytes_us": round(theirs, 1)})
        for n in TOKENS:
            for rank in RANKS:
                found.append(_lora(module, device, n, rank, high, wide))
    for highs, wide in LAYERS:
        found += _layers(module, device, highs, wide)
    return found


def _layers(module: Any, device: torch.device, highs: tuple[int, ...], wide: int) -> list[dict[str, Any]]:
    """Return rows of layers over one input: with adapters inside the products (us; step_8_us: rows of a multiple of 8 values, not
    of 64), behind them (before_us) and without (base_us). extend_us, unpack_us: of the two kernels, for the first layer."""
    weights = [quantize(torch.randn(high, wide, device=device).bfloat16(), "nf4-dq") for high in highs]
    room = torch.empty(max(highs) * (wide + columns.ADAPTER_COLUMNS), dtype=torch.bfloat16, device=device)
    counts = torch.zeros(max(LAYER_TOKENS) // 16, dtype=torch.int32, device=device)
    kernels = prompt_kernels.PromptKernels(module, unpacks=True, adds=True)
    found = []
    for n in LAYER_TOKENS:
        x = torch.zeros(n, wide, dtype=torch.bfloat16, device=device)

        def base(x: torch.Tensor = x) -> Any:
            for one in weights:
                functional.linear(x, prompt_kernels.unpack(one, room, module))

        for rank in LAYER_RANKS:
            given = (weights, room, counts, kernels)
            made = {step: columns.runs(*given, tokens=n, rank=rank, step=step) for step in STEPS}
            one = layers.LinearAdapter(
                "language", 0.5, torch.zeros(rank, wide, device=device), torch.zeros(highs[0], rank, device=device)
            )
            whole = columns.extended_width(wide, rank * len(highs))

            def extend(x: torch.Tensor = x, one: Any = one) -> Any:
                return columns.extend(x, [one] * len(highs), counts, module)

            def unpack(one: Any = one, whole: int = whole) -> Any:
                return columns.unpack_extended(weights[0], one.B, 0, whole, room, module)

            times: dict[str, Callable[[], Any]] = {
                "us": made[64][0], "step_8_us": made[8][0], "before_us": made[64][1], "base_us": base, "extend_us": extend,
                "unpack_us": unpack,
            }  # fmt: skip
            taken = {name: round(graph_us(run, device), 1) for name, run in times.items()}
            found.append({"what": "layers", "shape": [list(highs), wide], "tokens": n, "rank": rank, **taken})
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
    given = parser_of(__doc__).parse_args()
    measured = rows()
    for row in measured:
        print(json.dumps(row), flush=True)
    save(given.save, {"environment": environment(), "rows": measured})


if __name__ == "__main__":
    main()
