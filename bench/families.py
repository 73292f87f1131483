"""How fast every family decodes, and how soon its first token comes: one process a model, one GPU, the stock stack beside it.

    python -m bench.families --work FOLDER --save bench/results/families.json [--models qwen3-8b,...] [--engines stock,...]

Checkpoints are random, of released sizes, the decoder in NF4 with double quantization, and an adapter of rank 8 on all its linears.
Answers are the public API's: token ids in, text out. A row: `tok_s` of one row (256 tokens behind the first 33), `rows8_tok_s` of
eight rows with an adapter each, `first_ms` of 512 tokens (median of five, no prompt comes twice), `load_s`, how steps run and why.
What the file to be saved has rows of is not run again. `--card-gib`: the planned budget of the GPU, and the memory that its
allocator may take, for one row and one adapter; `link_share`: of the rate that the link allows for what a step copies.
llama.cpp: of Qwen3 in Q4_K_M without an adapter, by the program that PEER names: `PEER FILE.gguf` prints a line
`PEER {"tok_s": ..., "ttft512_ms": ...}`.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import time
from pathlib import Path
from typing import Any

from bench import DEVICE, empty_cache, environment, generated, parser_of, row_of, save, saved, synchronize, table
from bench.cards import link_row
from bench.memory import bound_tensors

MODELS = ("qwen3-8b", "llama-3-8b", "gemma3-4b", "qwen3-vl-4b", "qwen3.5-9b", "e4b")
PROMPT, SHORT, LONG, CONTEXT = (512, 33, 289, 2048) if DEVICE == "cuda" else (48, 3, 8, 128)


def prepare(size: str, work: Path) -> Path:
    """Make a packed checkpoint with a tokenizer, and its eight adapters, unless they are there."""
    from bench import voices
    from bench.checkpoints import write_adapter, write_checkpoint
    from bench.load import turned

    folder, adapters = work / f"{size}-packed", work / f"{size}-packed-r8"
    if not (adapters / "a7" / "adapter_config.json").exists():
        write_checkpoint(size, folder, device=DEVICE, packed=True)
        voices.give(folder)
        write_adapter(folder, adapters / "a0", 8, size=size)
        for number in range(1, 8):
            turned(adapters / "a0", adapters / f"a{number}", number)
        empty_cache()
    return folder


def prompts(seed: int) -> Any:
    """Yield lists of token ids, no two alike."""
    import random

    chance = random.Random(seed)
    while True:
        yield [chance.randrange(1000, 120000) for _ in range(PROMPT)]


def run_trimtab(case: dict[str, Any], work: Path) -> dict[str, Any]:
    import trimtab

    folder = prepare(case["model"], work)
    rows = 1 if case.get("card_gib") else 8
    adapters = {f"a{number}": work / f"{case['model']}-packed-r8" / f"a{number}" for number in range(rows)}
    asked: dict[str, Any] = {"gpu_memory": f"{case['card_gib']}GiB"} if case.get("card_gib") else {}
    start = time.perf_counter()
    plan = trimtab.plan(folder, adapters=adapters, context=CONTEXT, device=DEVICE, batch=rows, **asked)
    planned = time.perf_counter()
    found: dict[str, Any] = {"plan_s": round(planned - start, 1)}
    if asked and DEVICE == "cuda":
        bound_tensors(plan, case["card_gib"] * 2**30)
    asks = prompts(1)
    with trimtab.load(plan) as model:
        found["load_s"] = round(time.perf_counter() - planned, 1)

        def once(tokens: int) -> float:
            ids, begin = next(asks), time.perf_counter()
            answer = model.answer(ids, adapter="a0", max_new_tokens=tokens)
            assert len(answer.token_ids) == tokens, answer.finish_reason
            return time.perf_counter() - begin

        once(SHORT), once(SHORT)
        found["first_ms"] = round(statistics.median(once(1) for _ in range(5)) * 1000, 1)
        short, long = (statistics.median(once(tokens) for _ in range(3)) for tokens in (SHORT, LONG))
        found["tok_s"] = round((LONG - SHORT) / (long - short), 1)

        def eight(tokens: int) -> float:
            asked = [{"prompt": next(asks), "adapter": f"a{number}"} for number in range(8)]
            begin = time.perf_counter()
            list(model.batch(asked, max_new_tokens=tokens))
            return time.perf_counter() - begin

        if rows == 8:
            eight(SHORT)
            found["rows8_tok_s"] = round(8 * (LONG - SHORT) / (eight(LONG) - eight(SHORT)), 1)
        else:
            link = link_row(plan, found["tok_s"])
            found |= {name: link[name] for name in link if name.startswith("link") and link["link_share"] is not None}
        step = model.plan.execution.step
        found |= {
            "step": step.mode, "reason": step.reason, "head": model.plan.execution.head,
            "predicted_tok_s" if rows == 1 else "predicted_row_tok_s": round(model.plan.execution.tokens_per_s, 1),
            "fallbacks": sorted({f"{one.what}: {one.why}" for one in getattr(model, "fallbacks", [])}),
        }  # fmt: skip
    return found


def run_stock(case: dict[str, Any], work: Path) -> dict[str, Any]:
    """transformers, bitsandbytes and PEFT as their pages show them."""
    import torch

    from trimtab.stock.load import load_adapter, load_base

    base = load_base(prepare(case["model"], work), dtype=torch.bfloat16, device_map=DEVICE)
    return stock_rates(load_adapter(base, work / f"{case['model']}-packed-r8" / "a0"))


def stock_rates(model: Any) -> dict[str, Any]:
    """Return the first token's ms after a prompt, and tokens/s behind it, of a model that transformers generates with."""
    import torch

    asks = prompts(1)

    def once(tokens: int) -> float:
        ids = torch.tensor([next(asks)], device=DEVICE)
        begin = time.perf_counter()
        with torch.inference_mode():
            generated(model, {"input_ids": ids}, tokens)
        synchronize()
        return time.perf_counter() - begin

    once(4)
    first = statistics.median(once(1) for _ in range(3))
    return {"first_ms": round(first * 1000, 1), "tok_s": round(16 / (once(20) - once(4)), 1)}


def run_llama(case: dict[str, Any], work: Path) -> dict[str, Any]:
    from bench import gguf
    from bench.checkpoints import config_of

    file = work / f"{case['model']}-q4_k_m.gguf"
    if not file.exists():
        gguf.write(config_of(case["model"]), file, device=DEVICE)
    program = os.environ.get("PEER", "")
    if not Path(program).is_file():
        raise SystemExit(f"PEER={program!r}: there is no such program")
    ran = subprocess.run([program, str(file)], capture_output=True, text=True)
    lines = [line for line in ran.stdout.splitlines() if line.startswith("PEER ")]
    if not lines:
        raise SystemExit(f"exit {ran.returncode}: {ran.stdout[-300:]} {ran.stderr[-600:]}")
    found = json.loads(lines[-1][5:])
    return {"first_ms": found["ttft512_ms"], "tok_s": found["tok_s"], "note": "Q4_K_M, no adapter"}


RUNS = {"trimtab": run_trimtab, "stock": run_stock, "llama.cpp": run_llama}


def main() -> None:
    parser = parser_of(__doc__, work=True)
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--engines", default="trimtab,stock")
    parser.add_argument("--card-gib", type=float)
    parser.add_argument("--timeout-s", type=float, default=150)
    parser.add_argument("--total-s", type=float, default=36000, help="no case begins when 40 s of this are left")
    parser.add_argument("--again", action="store_true", help="what failed before")
    parser.add_argument("--case")
    given = parser.parse_args()
    if given.case:
        case = json.loads(given.case)
        print("ROW " + json.dumps(RUNS[case["engine"]](case, given.work)))
        return
    end = time.monotonic() + given.total_s
    before = saved(given.save)
    rows = before.get("rows", [])
    done = {key(row) for row in rows if not (given.again and "error" in row)}
    left_out: list[str] = []
    for size in given.models.split(","):
        for engine in given.engines.split(","):
            case: dict[str, Any] = {"model": size, "engine": engine}
            if given.card_gib:
                case["card_gib"] = given.card_gib
            if key(case) in done:
                continue
            left_s = end - time.monotonic()
            if left_s < 40:
                left_out.append(f"{size}:{engine}")
                continue
            command = ["bench.families", "--work", str(given.work), "--case", json.dumps(case)]
            found = row_of(command, timeout_s=given.timeout_s, left_s=left_s - 5)
            if found is None:
                left_out.append(f"{size}:{engine}")
                continue
            row = case | found
            rows = [one for one in rows if key(one) != key(row)] + [row]
            print(json.dumps(row)[:1800], flush=True)
            save(given.save, {**before, "environment": environment(), "rows": rows})
    print(table(rows, ("model", "engine", "card_gib", "tok_s", "rows8_tok_s", "first_ms", "step", "error")))
    if left_out:
        raise SystemExit(f"no time left for {', '.join(left_out)}")
    if failed := [f"{row['model']}:{row['engine']}" for row in rows if "error" in row and key(row) not in done]:
        raise SystemExit(f"failed: {', '.join(failed)}")


def key(row: dict[str, Any]) -> tuple[Any, ...]:
    return row["model"], row["engine"], row.get("card_gib")


if __name__ == "__main__":
    main()
