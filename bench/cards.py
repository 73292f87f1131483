"""Small cards: how fast a model decodes on them, how fast the plan said it would, and what the process really holds.

    python -m bench.cards --work FOLDER --save bench/results/cards.json [--cases e4b:4:auto,...] [--total-s 500]

A second process holds all of the device but `card_gib`, so that context, code, graphs and allocator of the measured process have
to fit as well. Each case is a fresh process and uses the public API: plan, load, one answer to a picture and a sound, then timed
text with a rank-8 adapter on text, vision and audio. `tok_s` is taken between an answer of 33 and one of 801 tokens.
`process_gib` is the device's free memory before the process began less the free memory after its last answer; `planned_gib` is
what the plan asks of the device, context and reserve included; `process_peak_gib` is `process_gib` with the most that torch's
allocator held in place of what it holds at the end. copies 4: every copy to the device is issued four times, as a
link of a quarter of the rate takes (PCIe 4.0 x8).

Of the link a row says the measured rate (`link_gb_s`), what a step copies of the decoder and the head (`copied_gib`),
the tokens per second that the link allows with that (`link_limit_tok_s`), the share of them that was reached (`link_share`),
and what the budget forces off the card at least (`forced_gib`, see `forced_bytes`).

Rows that FILE has already stay in it (`merged`); with `--missing` their cases are not run again, and the exit code is 3 while rows
are missing.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from bench import environment, parser_of, row_of, save, saved, table
from bench.memory import run_stock

MIB, GIB = 2**20, 2**30
# A budget that nothing exceeds, and where a plan of the least memory has what is not the decoder.
WHOLE_BYTES = 2**40
LEAN = (("table", "gather"), ("vision", "host"), ("audio", "host"), ("connector", "host"))
CONTEXT = 4096
PROMPT_TOKENS = 512
SHORT, LONG = 33, 801
MIDDLE = 257  # instead of the long answer where tokens take milliseconds each
MIXED = 200
MEDIA_EVERY = 8  # of the mixed requests, one with an image and a sound
# model, card_gib (0: all of it), head, further options; the most wanted first. The first of a model measures its kernels.
CASES: tuple[dict[str, Any], ...] = (
    {"model": "e4b", "card_gib": 0, "head": "full"},
    {"model": "e4b", "card_gib": 4, "head": "auto"},
    {"model": "e4b", "card_gib": 4, "head": "full"},
    {"model": "e4b", "card_gib": 3.7, "head": "auto"},
    {"model": "e4b", "card_gib": 3.2, "head": "auto"},
    {"model": "e2b", "card_gib": 0, "head": "full"},
    {"model": "e2b", "card_gib": 2, "head": "auto"},
    {"model": "e2b", "card_gib": 2.5, "head": "auto"},
    {"model": "e2b", "card_gib": 3, "head": "full"},
    {"model": "e4b", "card_gib": 6, "head": "full"},
    {"model": "qwen3-8b", "card_gib": 5, "head": "auto"},
    {"model": "e4b", "card_gib": 3.8, "head": "auto", "mixed": True},
    {"model": "e4b", "card_gib": 3.75, "head": "auto", "mixed": True},
    {"model": "e4b", "card_gib": 3.5, "head": "auto", "mixed": True},
    {"model": "e4b", "card_gib": 4, "head": "full", "copies": 4},
    {"model": "e4b", "card_gib": 4, "head": "auto", "copies": 4, "mixed": True},
    {"model": "e4b", "card_gib": 0, "head": "full", "engine": "stock"},
    {"model": "e2b", "card_gib": 0, "head": "full", "engine": "stock"},
    {"model": "qwen3-8b", "card_gib": 0, "head": "full", "engine": "stock"},
)
COLUMNS = (
    "model", "card_gib", "head", "chosen_head", "execution", "streamed_gib", "tok_s", "predicted_tok_s", "link_limit_tok_s",
    "forced_gib", "ttft_ms", "planned_gib", "process_gib", "load_s", "first_answers_s", "copies", "error",
)  # fmt: skip


def name_of(case: dict[str, Any]) -> str:
    extra = "".join(f":{key}{case[key]}" for key in ("copies", "engine") if key in case)
    return f"{case['model']}:{case['card_gib']}:{case['head']}{extra}"


# The rest of the card --------------------------------------------------------------------------------------------------


def hold() -> None:
    """Hold all of the device but what each line of standard input says, in bytes; answer with the bytes left free."""
    import torch

    torch.empty(1, device="cuda")
    held: list[torch.Tensor] = []
    for line in sys.stdin:
        held.clear()
        torch.cuda.empty_cache()
        wanted = int(line)
        for size in (GIB, 64 * MIB, 2 * MIB):
            while wanted and torch.cuda.mem_get_info()[0] - wanted >= size:
                held.append(torch.empty(size, dtype=torch.uint8, device="cuda"))
        print(torch.cuda.mem_get_info()[0], flush=True)


class Holder:
    """The process that holds the rest of the card."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "bench.cards", "--hold"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def leave(self, free_bytes: int) -> int:
        """Leave so many bytes free (0: all that there are), and return how many are."""
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(f"{free_bytes}\n")
        self._process.stdin.flush()
        return int(self._process.stdout.readline())

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(timeout=30)


# One case --------------------------------------------------------------------------------------------------------------


def slow_link(copies: int) -> None:
    """Issue every copy of streamed weights so many times, and plan with a link of that share of its rate."""
    from dataclasses import replace

    from trimtab.engine.memory import rates as devices
    from trimtab.engine.tiers import streaming

    copy, measure = streaming.Streamer._copy, devices.measure_rates

    def repeated(self: Any, *given: Any) -> Any:
        for _ in range(copies - 1):
            copy(self, *given)
        return copy(self, *given)

    def slower(device: str, **options: Any) -> Any:
        rates = measure(device, **options)
        return replace(rates, pinned_h2d_Bps=rates.pinned_h2d_Bps / copies)

    streaming.Streamer._copy = repeated  # type: ignore[method-assign]
    devices.measure_rates = slower


def copied_bytes(plan: Any) -> int:
    """Return the bytes of the decoder and the head that every step copies to the device."""
    return sum(
        row.host_bytes + row.disk_bytes for row in plan.placements
        if row.part in ("language", "head") and row.tier in ("stream", "disk")
    )  # fmt: skip


def forced_bytes(plan: Any, again: Callable[..., Any]) -> int:
    """Return the fewest bytes of the decoder and the head that the plan's budget forces off the device, 0 if they fit.

    again: makes the plan of the same request and head, with other options. Defined as what the whole decoder and the head need
    on the device beyond the budget, in the way of running that takes the least memory: towers, connectors and tables elsewhere,
    steps in the mode that needs the least (without graphs and captured prompts where these take more), no staging buffers. No
    placement copies less. What a plan copies more goes to graphs, chunks, staging buffers, and blocks that cannot be divided.
    """
    from trimtab.errors import TrimtabError

    parts = {row.part for row in plan.placements}
    place = {part: tier for part, tier in LEAN if part in parts} | {"language": "resident", "head": "resident"}
    needed = []
    for decode in ("fused", "graph", "eager"):
        with suppress(TrimtabError):  # a mode that this model or card does not have
            needed.append(again(place=place, decode=decode, gpu_memory=WHOLE_BYTES).gpu_needed_bytes)
    return max(0, min(needed) - plan.gpu_budget_bytes)


def keep_rates() -> None:
    """Measure the machine's rates while nothing else runs: those that it has kept may be of a busy machine."""
    import torch

    from trimtab.engine.memory import rates as devices
    from trimtab.machine import machine_cache

    device = "cuda:0" if torch.cuda.is_available() else "cpu"
    rates = devices.measure_rates(device, cache=False)
    machine_cache.write_rates(devices.device_name(device), str(torch.__version__), torch.get_num_threads(), rates)
    print(f"link {rates.pinned_h2d_Bps / 1e9:.1f} GB/s, device {rates.device_Bps / 1e9:.0f} GB/s", flush=True)


def link_row(plan: Any, tok_s: float | None, forced: int = 0, copied: float | None = None) -> dict[str, Any]:
    """Return what a row says of the link. The limits are None where nothing is copied. copied: bytes a step, if not the plan's."""
    copied, link_Bps = copied_bytes(plan) if copied is None else copied, plan.rates.pinned_h2d_Bps
    limit = link_Bps / copied if copied else None
    return {
        "link_gb_s": round(link_Bps / 1e9, 2), "copied_gib": round(copied / GIB, 3), "forced_gib": round(forced / GIB, 3),
        "link_limit_tok_s": None if limit is None else round(limit, 1),
        "link_share": None if limit is None or tok_s is None else round(tok_s / limit, 3),
    }  # fmt: skip


def run_trimtab(case: dict[str, Any], work: Path) -> dict[str, Any]:
    import torch

    import trimtab
    from bench.checkpoints import media_prompt, text_inputs
    from trimtab.request import GenerateRequest

    if case.get("copies"):
        slow_link(case["copies"])
    start = time.perf_counter()
    asked = {"adapters": {"a": work / f"{case['model']}-r8"}, "context": CONTEXT, "quant": "nf4-dq"}
    plan = trimtab.plan(work / case["model"], head=case["head"], **asked)
    row: dict[str, Any] = {"plan_s": round(time.perf_counter() - start, 1)}
    step = plan.execution.step
    off = [row for row in plan.placements if row.part in ("language", "head") and row.tier != "resident"]
    row |= {
        "chosen_head": plan.execution.head, "execution": step.mode, "prompt": plan.execution.prompt.mode,
        "streamed_gib": round(sum(one.host_bytes for one in off) / GIB, 3),
        "predicted_tok_s": round(plan.execution.tokens_per_s, 1), "planned_gib": round(plan.gpu_needed_bytes / GIB, 3),
        "items_mib": {name: round(count / MIB) for name, count in plan.gpu.items()},
    }  # fmt: skip
    print("PLAN " + json.dumps(row | {"prompt_chunks": list(plan.execution.prompt.chunks)}), file=sys.stderr, flush=True)
    start = time.perf_counter()
    model = trimtab.load(plan)
    row["load_s"] = round(time.perf_counter() - start, 1)
    config = model.hf_model.config
    shares = {"loaded": shares_of(torch)}
    start = time.perf_counter()
    if case["model"].startswith("e"):
        model.answer_inputs(media_prompt(config), GenerateRequest(max_new_tokens=8), adapter="a")
        shares["media"] = shares_of(torch)
    ids = text_inputs(config, PROMPT_TOKENS, device="cpu")["input_ids"][0].tolist()
    model.answer(ids, adapter="a", max_new_tokens=2)
    row["first_answers_s"] = round(time.perf_counter() - start, 1)
    row["ttft_ms"] = round(statistics.median(model.answer(ids, adapter="a", max_new_tokens=1).ttft_s for _ in range(7)) * 1e3, 1)
    taken = {}
    counts = [SHORT, LONG]
    for count in counts:
        start = time.perf_counter()
        answer = model.answer(ids, adapter="a", max_new_tokens=count)
        taken[len(answer.token_ids)] = time.perf_counter() - start
        if count == SHORT and answer.tokens_per_s < 200:
            counts[1] = MIDDLE
    few, many = min(taken), max(taken)
    row["tok_s"] = round((many - few) / (taken[many] - taken[few]), 1) if many > few else None
    row["tokens"] = [few, many]
    again = partial(trimtab.plan, work / case["model"], head=plan.execution.head, **asked)
    row |= link_row(plan, row["tok_s"], forced_bytes(plan, again))
    longest = (ids * (CONTEXT // len(ids) + 1))[: CONTEXT - 16]
    # The first of them captures the graphs of its chunks.
    taken_s = [model.answer(longest, adapter="a", max_new_tokens=4).ttft_s for _ in range(3)]
    row["longest_first_ms"], row["longest_ttft_ms"] = round(taken_s[0] * 1e3, 1), round(taken_s[-1] * 1e3, 1)
    if case.get("mixed"):
        looks = case["model"].startswith("e") and max(plan.request.audio_s or 0, 10.0)
        for number in range(MIXED):
            if looks and number % MEDIA_EVERY == 0:  # the longest sound that the plan admits among them
                inputs = media_prompt(config, seconds=(looks, 5.0, 10.0)[number // MEDIA_EVERY % 3])
                model.answer_inputs(inputs, GenerateRequest(max_new_tokens=4), adapter="a" if number % 3 else None)
                continue
            size = 16 + (number * 37) % 900
            model.answer(ids[:1] + ids[: min(size, len(ids))], adapter="a" if number % 3 else None, max_new_tokens=4)
        row["mixed"] = MIXED
    torch.cuda.synchronize()
    shares["after"] = shares_of(torch)
    free, _ = torch.cuda.mem_get_info()
    unused = torch.cuda.max_memory_reserved() - torch.cuda.memory_reserved()
    memory = model.memory()
    row |= {
        "process_gib": round((case["free_bytes"] - free) / GIB, 3), "driver_says_gib": round(memory["gpu_process_bytes"] / GIB, 3),
        "tensors_peak_gib": round(memory["gpu_peak_bytes"] / GIB, 3),
        "reserved_peak_gib": round(torch.cuda.max_memory_reserved() / GIB, 3),
        "process_peak_gib": round((case["free_bytes"] - free + unused) / GIB, 3),
        "planned_measured_mib": {
            one.name: [round(one.planned_bytes / MIB), None if one.measured_bytes is None else round(one.measured_bytes / MIB)]
            for one in model.memory_shares()
        },
        "captured": captured_of(model), "predicted_prompt_ms": round(plan.execution.prompt.seconds * 1e3, 1),
        "launch_us": round(plan.rates.launch_s * 1e6, 2), "prompt_chunks": list(plan.execution.prompt.chunks),
        "shares_mib": shares, "fallbacks": [f"{one.what}: {one.why}" for one in model.fallbacks],
    }  # fmt: skip
    model.close()
    return row


def captured_of(model: Any) -> dict[str, Any]:
    """Return how many graphs a model's own batch holds, and the MiB that the driver took while they were captured beforehand."""
    batch = model.rows()
    if batch is None:
        return {}
    steps, prompts = batch.steps, batch.prompts
    return {
        "steps": len(steps._graphs), "prompts": len(prompts._graphs), "tower_layers": prompts.towers.captured,
        "steps_mib": round(steps.graph_bytes / MIB, 1), "prompts_mib": round(prompts.graph_bytes / MIB, 1),
        "room_mib": room_of(model),
    }  # fmt: skip


def room_of(model: Any) -> list[float] | None:
    """Return the MiB of the segment that prompts share, of what torch holds for them, and of what passes have left there."""
    room = model.prompt_room
    return None if room is None else [round(one / MIB, 1) for one in (room.segment_bytes, room.held_bytes, room.left_bytes)]


def shares_of(torch: Any) -> dict[str, Any]:
    """Return MiB in tensors, reserved by torch, and in the driver's own count of the process beyond that; for each pool of torch's
    what it reserves, what is in use and the largest free piece; how often torch gave its cache back to have room."""
    from trimtab.engine.memory.rates import gpu_process_bytes
    from trimtab.engine.memory.shared_pool import segments

    torch.cuda.synchronize()
    reserved = torch.cuda.memory_reserved()
    pools: dict[str, list[int]] = {}
    for segment in segments():
        is_graph = tuple(segment["segment_pool_id"]) != (0, 0)
        name = f"{'graphs' if is_graph else 'stream'} {segment['stream']} {segment['segment_type']}"
        one = pools.setdefault(name, [0, 0, 0])
        for place, count in enumerate((segment["total_size"], segment["allocated_size"])):
            one[place] += count
        one[2] = max(one[2], max((b["size"] for b in segment["blocks"] if b["state"] == "inactive"), default=0))
    stats = torch.cuda.memory_stats()
    return {
        "tensors": round(torch.cuda.memory_allocated() / MIB), "reserved": round(reserved / MIB),
        "outside_torch": round((gpu_process_bytes("cuda:0") - reserved) / MIB),
        "free": round(torch.cuda.mem_get_info()[0] / MIB),
        "pools": {name: [round(count / MIB) for count in one] for name, one in pools.items()},
        "retries": stats["num_alloc_retries"],
    }  # fmt: skip


def run_stock_case(case: dict[str, Any], work: Path) -> dict[str, Any]:
    row = run_stock({"name": "resident"}, work / case["model"], work / f"{case['model']}-r8")
    return {"tok_s": row["decode_tok_s"], "ttft_ms": row["ttft_ms"], "process_gib": row["gpu_peak_gib"]}


# All of them -----------------------------------------------------------------------------------------------------------


def prepare(model: str, work: Path, ranks: Sequence[int] = (8,), device: str = "cuda") -> None:
    """Make the checkpoint and an adapter of each rank unless they are there."""
    from bench.checkpoints import write_adapter, write_checkpoint

    folder = work / model
    if not (folder / "config.json").exists():
        write_checkpoint(model, folder, device=device)
    for rank in ranks:
        if not (work / f"{model}-r{rank}" / "adapter_config.json").exists():
            write_adapter(folder, work / f"{model}-r{rank}", rank)


def run_case(case: dict[str, Any], work: Path, timeout_s: float) -> dict[str, Any]:
    row = row_of(["bench.cards", "--work", str(work), "--case", json.dumps(case)], timeout_s=timeout_s) or {}
    return {key: value for key, value in case.items() if key != "free_bytes"} | row


def missing(cases: list[dict[str, Any]], results: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the cases that no row of these results is of."""
    names = {name_of(row) for row in results.get("rows", [])}
    return [case for case in cases if name_of(case) not in names]


def merged(results: dict[str, Any], rows: list[dict[str, Any]], where: dict[str, Any]) -> dict[str, Any]:
    """Return the results of earlier runs with these rows behind them, as one more run. Rows that failed are left out; of a case
    that was measured before, the earlier row stays and the later one counts. Rows of another machine name it."""
    kept = results.get("rows", [])
    run = max((row.get("run", 0) for row in kept), default=0) + 1
    other = {} if results.get("environment", where) == where else {"gpu": where.get("gpu"), "environment": where}
    return {"environment": where, **results, "rows": [*kept, *({**row, "run": run, **other} for row in rows if "error" not in row)]}


def main() -> int:
    parser = parser_of(__doc__)
    parser.add_argument("--work", type=Path)
    parser.add_argument("--cases", default="", help="names such as e4b:4:auto; all without it")
    parser.add_argument("--timeout-s", type=float, default=110)
    parser.add_argument("--total-s", type=float, default=3600)
    parser.add_argument("--missing", action="store_true", help="only cases that the file of --save has no row of")
    parser.add_argument("--mixed", action="store_true", help=f"{MIXED} mixed requests before the memory of every case is read")
    parser.add_argument("--case", help=argparse.SUPPRESS)
    parser.add_argument("--hold", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--rates", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.hold:
        hold()
        return 0
    if given.rates:
        keep_rates()
        return 0
    if given.case:
        case = json.loads(given.case)
        print("ROW " + json.dumps((run_stock_case if case.get("engine") == "stock" else run_trimtab)(case, given.work)))
        return 0
    begun, rows = time.monotonic(), []
    before = saved(given.save)
    known = {name_of(case): case for case in CASES}
    unknown = sorted(set(filter(None, given.cases.split(","))) - set(known))
    if unknown:
        parser.error(f"--cases: {unknown}, known are {sorted(known)}")
    wanted = [known[name] for name in given.cases.split(",")] if given.cases else list(CASES)
    wanted = missing(wanted, before) if given.missing else wanted
    if given.mixed:
        wanted = [case if case.get("engine") else {**case, "mixed": True} for case in wanted]
    given.work.mkdir(parents=True, exist_ok=True)
    subprocess.run([sys.executable, "-m", "bench.cards", "--rates"], check=True)
    holder = Holder()
    try:
        for case in wanted:
            left_s = given.total_s - (time.monotonic() - begun)
            if left_s < 25:
                print(f"no time left for {name_of(case)}", flush=True)
                continue
            holder.leave(0)
            prepare(case["model"], given.work)
            free_bytes = holder.leave(int(case["card_gib"] * GIB))
            row = run_case({**case, "free_bytes": free_bytes}, given.work, min(given.timeout_s, left_s))
            rows.append(row)
            print(json.dumps(row), flush=True)
            save(given.save, merged(before, rows, environment()))
    finally:
        holder.close()
    print(table(rows, COLUMNS))
    return 3 if given.missing and missing(wanted, {"rows": [row for row in rows if "error" not in row]}) else 0


if __name__ == "__main__":
    raise SystemExit(main())
