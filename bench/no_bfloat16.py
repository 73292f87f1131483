"""A card that emulates bfloat16, imitated on the GPU at hand: what Gemma 4 E2B takes there, and whether the answer is right.

    python -m bench.no_bfloat16 --work FOLDER --save bench/results/no_bfloat16.json

Plans are made as for compute capability 7.5: trimtab computes in float32 and keeps unquantized weights in 16 bits (`16bit`),
or is asked for float32, which keeps them in 32 (`wide`). Stock computes in bfloat16, as on the Tesla T4 where it took 6.507 GiB
(`stock`), and in float32 (`stock32`), with whose logits both of ours are compared. NF4 without double quantization, an adapter of
rank 8, each case in its own process. `eager` is the plan of the first report (everything resident, 8 tokens, no adapter), `auto`
the default plan. `tensors_gib`: the most that torch's allocator held, without context and code; the plan's figure is `plan_gib`.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

from bench import environment, parser_of, row_of, save

GIB = 2**30
CASES = ("stock32", "stock", "16bit", "wide")
TOKENS, NEW = 200, 65


def run_ours(case: str, checkpoint: Path, adapter: Path, work: Path) -> dict[str, Any]:
    import torch

    import trimtab
    from bench.checkpoints import text_inputs
    from trimtab.planning.values import byte_sizes

    byte_sizes.LEAST_BF16 = (99, 0)
    asked: dict[str, Any] = {"quant": "nf4", "images": 0, "audio_s": 0.0, **({"dtype": "float32"} if case == "wide" else {})}
    row: dict[str, Any] = {}
    plan = trimtab.plan(checkpoint, place={"*": "resident"}, decode="eager", context=8, **asked)
    with trimtab.load(plan) as model:
        ids = text_inputs(model.hf_model.config, 4, device="cpu")["input_ids"][0].tolist()
        model.answer(ids, max_new_tokens=4)
        row["eager"] = {
            "plan_gib": round(plan.gpu_peak_bytes / GIB, 3),
            "tensors_gib": round(model.memory()["gpu_peak_bytes"] / GIB, 3),
            "process_gib": round(model.memory()["gpu_process_bytes"] / GIB, 3),
            "planned_process_gib": round(plan.gpu_needed_bytes / GIB, 3),
        }  # fmt: skip
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    plan = trimtab.plan(checkpoint, adapters={"a": adapter}, context=1024, **asked)
    with trimtab.load(plan) as model:
        ids = text_inputs(model.hf_model.config, TOKENS, device="cpu")["input_ids"][0].tolist()
        torch.save(model.logits(ids, adapter="a"), work / f"{case}.pt")
        model.answer(ids, adapter="a", max_new_tokens=NEW)
        start = time.perf_counter()
        answer = model.answer(ids, adapter="a", max_new_tokens=NEW)
        taken = time.perf_counter() - start
        row["auto"] = {
            "plan_gib": round(plan.gpu_peak_bytes / GIB, 3),
            "tensors_gib": round(model.memory()["gpu_peak_bytes"] / GIB, 3), "mode": plan.execution.step.mode,
            "ttft_ms": round(answer.ttft_s * 1e3, 1),
            "tok_s": round((len(answer.token_ids) - 1) / (taken - answer.ttft_s), 1),
            "predicted_tok_s": round(plan.execution.tokens_per_s, 1),
            "fallbacks": [f"{one.what}: {one.why}" for one in model.fallbacks],
        }  # fmt: skip
    return row


def run_stock(case: str, checkpoint: Path, adapter: Path, work: Path) -> dict[str, Any]:
    import torch

    from bench.checkpoints import text_inputs
    from trimtab.stock.load import load_adapter, load_base, quantization

    dtype = torch.float32 if case == "stock32" else torch.bfloat16
    model = load_base(checkpoint, dtype=dtype, device_map={"": 0}, quantization_config=quantization("nf4", dtype=dtype))
    loaded = torch.cuda.memory_allocated()
    peft_model = load_adapter(model, adapter)
    inputs = text_inputs(model.config, TOKENS, device="cuda")
    with torch.no_grad():
        torch.save(peft_model(**inputs).logits[0].float().cpu(), work / f"{case}.pt")
    return {"eager": {"tensors_gib": round(loaded / GIB, 3), "peak_gib": round(torch.cuda.max_memory_allocated() / GIB, 3)}}


def gap(work: Path, case: str) -> dict[str, float]:
    """Return how far a case's logits are from stock's in float32, and how large those are."""
    import torch

    ours, theirs = (torch.load(work / f"{name}.pt", weights_only=True) for name in (case, "stock32"))
    return {"max_abs": float((ours - theirs).abs().max()), "largest": float(theirs.abs().max()),
            "greedy_same": float((ours.argmax(-1) == theirs.argmax(-1)).float().mean())}  # fmt: skip


def main() -> int:
    parser = parser_of(__doc__, work=True)
    parser.add_argument("--case", help=argparse.SUPPRESS)
    given = parser.parse_args()
    checkpoint, adapter = given.work / "e2b", given.work / "e2b-r8"
    if given.case:
        run = run_stock if given.case.startswith("stock") else run_ours
        print("ROW " + json.dumps(run(given.case, checkpoint, adapter, given.work)))
        return 0
    from bench.cards import prepare

    prepare("e2b", given.work)
    results: dict[str, Any] = {"environment": environment(), "t4_stock_gib": 6.507, "rows": {}}
    for case in CASES:
        row = row_of(["bench.no_bfloat16", "--work", str(given.work), "--case", case]) or {}
        if "error" not in row and case != "stock32":
            row["logits"] = gap(given.work, case)
        results["rows"][case] = row
        print(case, json.dumps(row, indent=1), flush=True)
        save(given.save, results)
    return 0


if __name__ == "__main__":
    sys.exit(main())
