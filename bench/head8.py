"""What an 8-bit head costs and saves: the demo's answers beside those of the whole head, and on a GPU the product's time.

    python -m bench.head8 --save bench/results/head8.json        (a GPU: products; a CPU: the demo; adds to the file)

The demo has 18 prompts (6 pictures, 6 sounds, 6 texts) and three adapters. The products are those of the Gemma 4 models, over
random bytes: 8 bits by our kernel and by torch, and the whole head in bfloat16 as torch multiplies it.
"""

from __future__ import annotations

import platform
from typing import Any

import torch

import trimtab
from bench import environment, parser_of, save, saved
from trimtab.demo.demo import FOLDER as DEMO
from trimtab.verification.routes.prompts import demo_prompts

ADAPTERS = (None, "style", "specialist", "rslora-dora")
# Model -> (vocabulary, width).
SIZES = {"e2b": (262144, 1536), "e4b": (262144, 2560), "12b": (262144, 3840), "26b-a4b": (262144, 2816)}


def prompts() -> list[dict[str, Any]]:
    return [prompt.to_json() for prompt in demo_prompts(6)]


def parity(quant: str, adapter: str | None) -> dict[str, Any]:
    """Compare the demo's answers with both heads."""
    adapters = {} if adapter is None else {adapter: DEMO / "adapters" / adapter}
    report = trimtab.verify(
        DEMO / "base", adapters=adapters, quant=quant, head="int8", against="full-head", prompts=prompts(), isolated=False
    )
    found = [row.difference for row in report.prompts]
    positions = sum(one.positions for one in found)
    row = {
        "quant": quant, "adapter": adapter, "verdict": report.verdict, "prompts": len(found), "positions": positions,
        "kl_mean": float(f"{sum(one.kl_mean * one.positions for one in found) / positions:.3g}"),
        "kl_max": float(f"{max(one.kl_max for one in found):.3g}"),
        "top1_agreement": round(sum(one.top1_agreement * one.positions for one in found) / positions, 5),
        "same_texts": sum(bool(row.same_text) for row in report.prompts),
    }  # fmt: skip
    print(row, flush=True)
    return row


def products(device: torch.device) -> list[dict[str, Any]]:
    """Measure the products of up to 8 rows, each in a CUDA graph."""
    from trimtab.engine.formats import int8_head
    from trimtab.engine.kernels import autotune
    from trimtab.engine.loader import head_kernel

    module, rows = int8_head.load(device), []
    for model, (vocabulary, width) in SIZES.items():
        q = torch.randint(-127, 128, (vocabulary, width), dtype=torch.int8, device=device)
        head = int8_head.Head(q, torch.rand(vocabulary, device=device) / 500, None)
        weight = torch.randn(vocabulary, width, dtype=torch.bfloat16, device=device)
        why = head_kernel.check(module, head)
        for n in (1, 2, 4, 8):

            def time_us(run: Any) -> float:
                return autotune.graph_us(lambda: [run() for _ in range(10)], device) / 10  # type: ignore[func-returns-value]

            found = head_kernel.measure(module, head, time_us, weight=weight, n=n)
            (ours, torch_us), (_, whole) = found[int8_head.NAME], found["whole head"]
            rows.append({
                "model": model, "rows": n, "wrong": why, "us": round(ours, 1), "torch_us": round(torch_us, 1),
                "whole_us": round(whole, 1), "TBps": round(vocabulary * width / ours / 1e6, 3),
                "whole_TBps": round(2 * vocabulary * width / whole / 1e6, 3),
            })  # fmt: skip
            print(rows[-1], flush=True)
    return rows


def main() -> None:
    given = parser_of(__doc__).parse_args()
    has_gpu = torch.cuda.is_available()
    run: dict[str, Any] = {"environment": environment(system=platform.system())}
    if has_gpu:
        run["products"] = products(torch.device("cuda:0"))
    else:
        run["demo"] = [parity(quant, adapter) for quant in ("nf4-dq", "none") for adapter in ADAPTERS]
    runs = [old for old in saved(given.save).get("runs", []) if ("products" in old) != has_gpu]
    save(given.save, {"runs": [*runs, run]})


if __name__ == "__main__":
    main()
