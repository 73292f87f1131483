"""Decoding on a CPU beside the stock stack: the demo model and a random Llama of 300 million weights, in turn, same inputs.

    OMP_NUM_THREADS=1 python -m bench.cpu --work FOLDER --save bench/results/bench_cpu.json [--runs 3] [--new-tokens 32]

The Llama is made on the first call; its weights mean nothing. What else the machine does meanwhile is in the spread.

    OMP_NUM_THREADS=1 python -m bench.cpu --work FOLDER --save bench/results/cpu_first_token.json --first-tokens 15

measures first tokens and the tokens after them with both models in one process, a prompt of each in turn, so that what else the
machine does meanwhile slows both alike. Elapsed times and the CPU time of all threads; ratios of medians, trimtab's over stock's.

    OMP_NUM_THREADS=1 python -m bench.cpu --work FOLDER --save bench/results/cpu_predictions.json --predictions

puts the tokens per second that plans predict next to measured ones, with and without an adapter, in several formats. --part NAME
keeps the other parts of the file: the same on another machine, under another load or with other instructions.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from contextlib import closing
from dataclasses import asdict
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any

from bench import parser_of, save, saved
from bench.cards import prepare
from trimtab.demo.demo import FOLDER as DEMO


def cases(work: Path) -> dict[str, Any]:
    """Return name -> LoadRequest of what is measured."""
    from trimtab.request import LoadRequest

    prepare("llama-310m", work, device="cpu")
    llama, adapter = work / "llama-310m", work / "llama-310m-r8"
    style = {"adapter": str(DEMO / "adapters" / "style")}
    random = {"adapter": str(adapter)}
    return {
        "demo, nf4-dq": LoadRequest(model=str(DEMO / "base"), adapters=style, device="cpu"),
        "llama-300m, nf4-dq": LoadRequest(model=str(llama), adapters=random, device="cpu"),
        "llama-300m, nf4-dq, float32": LoadRequest(model=str(llama), adapters=random, device="cpu", dtype="float32"),
        "llama-300m, none": LoadRequest(model=str(llama), adapters=random, device="cpu", quant="none"),
        # What bitsandbytes' fast path for some CPUs is worth to the stock side.
        "demo, nf4-dq, without AVX512-BF16": LoadRequest(model=str(DEMO / "base"), adapters=style, device="cpu"),
        "llama-300m, nf4-dq, without AVX512-BF16": LoadRequest(model=str(llama), adapters=random, device="cpu"),
    }


STEPS = 4


def first_tokens(load: Any, *, repeats: int, prompt_tokens: int, own_path: bool) -> dict[str, Any]:
    """Return medians over `repeats` prompts of each model, after one that does not count, and their ratios.

    own_path: whether stock computes with bitsandbytes' fast path for some CPUs. Times in ms, of the first token and of each of
    STEPS - 1 that follow; elapsed, and of all threads on the CPU.
    """
    import torch

    import trimtab
    from trimtab.benchmark.run_stock import ready, with_own_cpu_path
    from trimtab.benchmark.run_trimtab import answer_to_the_end
    from trimtab.engine.batch.generate import Generation
    from trimtab.engine.kv.sequence import Inputs
    from trimtab.planning.planner import ITEM
    from trimtab.request import GenerateRequest
    from trimtab.stock.unsplit import load_unsplit, with_adapters

    ids = 3 + torch.arange(prompt_tokens)[None] * 7 % 400
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    plan = trimtab.plan(load.model, adapters=load.adapters, device="cpu", quant=load.quant, dtype=load.dtype)
    with trimtab.load(plan) as model, tempfile.TemporaryDirectory() as work:
        answer_to_the_end(model.hf_model)
        model.adapter_store.set("adapter")
        folder = str(model.processor_folder)
        stock = load_unsplit(folder, plan.request.quant, plan.request.dtype, "cpu")
        stock, notes = with_adapters(stock, dict(load.adapters), Path(work))
        notes += with_own_cpu_path(stock) if own_path else []

        prepared = Inputs(dict(inputs), prompt_tokens, tuple(ids[0].tolist()), False)

        def ours() -> _Ticks:
            clock = _Ticks()
            with closing(iter(Generation(model, prepared, GenerateRequest(max_new_tokens=STEPS)))) as pieces:  # type: ignore[type-var]
                for piece in pieces:
                    clock.tick(piece.token_ids)
            return clock

        def theirs() -> _Ticks:
            with ready(stock, STEPS) as generate:
                clock = _Ticks()
                generate(inputs, clock.tick)
            return clock

        rows: dict[str, list[dict[str, Any]]] = {"trimtab": [], "stock": []}
        for repeat in range(repeats + 1):
            for name, answer in (("trimtab", ours), ("stock", theirs)):
                row = answer().row()
                rows[name] += [row] if repeat else []
    values = ("first_ms", "first_cpu_ms", "step_ms", "step_cpu_ms")
    medians = {name: {value: median(row[value] for row in made) for value in values} for name, made in rows.items()}
    return {
        "repeats": repeats, "prompt_tokens": prompt_tokens, "dtype": plan.request.dtype, "threads": torch.get_num_threads(),
        "unpacked_bytes": plan.gpu.get(ITEM, 0), "notes": notes, "medians": medians,
        "ratios": {value: round(medians["trimtab"][value] / medians["stock"][value], 4) for value in values},
        "same_tokens": all(row["tokens"] == rows["stock"][0]["tokens"] for made in rows.values() for row in made),
        "rows": rows,
    }  # fmt: skip


class _Ticks:
    """Elapsed and CPU time of each token, from now on."""

    def __init__(self) -> None:
        self._tokens: list[int] = []
        self._times = [(time.perf_counter(), time.process_time())]

    def tick(self, tokens: Any) -> None:
        self._tokens += [int(token) for token in tokens]
        self._times.append((time.perf_counter(), time.process_time()))

    def row(self) -> dict[str, Any]:
        def ms(of: int, start: int, end: int, count: int = 1) -> float:
            return round(1000 * (self._times[end][of] - self._times[start][of]) / count, 3)

        steps = len(self._times) - 2
        return {
            "first_ms": ms(0, 0, 1), "first_cpu_ms": ms(1, 0, 1), "step_ms": ms(0, 1, -1, steps),
            "step_cpu_ms": ms(1, 1, -1, steps), "tokens": self._tokens,
        }  # fmt: skip


def save_first_tokens(given: argparse.Namespace) -> None:
    """Measure first tokens of the chosen cases and write each to the file as it is there."""
    from trimtab.machine.environment import read_environment

    found: dict[str, Any] = {"note": given.note, "environment": read_environment().to_json(), "cases": {}}
    if given.only:
        found["cases"] = saved(given.save).get("cases", {})
    for name, load in cases(given.work).items():
        if given.only and name not in given.only:
            continue
        row = first_tokens(
            load, repeats=given.first_tokens, prompt_tokens=given.prompt_tokens,
            own_path=not name.endswith("without AVX512-BF16"),
        )  # fmt: skip
        print(name, row["medians"], row["ratios"], row["same_tokens"], flush=True)
        found["cases"][name] = row
        save(given.save, found)


def save_predictions(given: argparse.Namespace) -> None:
    """Plan and measure models in several formats, after the rates of this machine are measured anew."""
    import torch

    import trimtab
    from trimtab.engine.batch.generate import Generation
    from trimtab.engine.kv.sequence import Inputs
    from trimtab.engine.memory.rates import device_name, measure_rates
    from trimtab.machine import machine_cache
    from trimtab.machine.environment import read_environment
    from trimtab.request import GenerateRequest

    threads, named, rows = torch.get_num_threads(), cases(given.work), {}
    rates = measure_rates("cpu", cache=False)
    machine_cache.write_rates(device_name("cpu"), str(torch.__version__), threads, rates)
    ids = 3 + torch.arange(64)[None] * 7 % 400
    inputs = Inputs({"input_ids": ids, "attention_mask": torch.ones_like(ids)}, 64, tuple(ids[0].tolist()), False)
    forms = (("nf4-dq", "auto"), ("int8", "auto"), ("none", "auto"), ("none", "float32"))
    for model, has_adapter, (quant, dtype) in product(given.only or ("demo", "llama-300m"), (True, False), forms):
        load = named[f"{model}, nf4-dq"]
        adapters = load.adapters if has_adapter else {}
        plan = trimtab.plan(load.model, adapters=adapters, device="cpu", quant=quant, dtype=dtype, context=1024)
        clocks = []
        with trimtab.load(plan) as loaded:
            if has_adapter:
                loaded.adapter_store.set("adapter")
            ends: Any = loaded.hf_model.generation_config.eos_token_id
            never = tuple((int(end), -100.0) for end in (ends if isinstance(ends, list) else [ends]))
            for _ in range(4):
                clock = _Ticks()
                request = GenerateRequest(max_new_tokens=9, logit_bias=never)
                with closing(iter(Generation(loaded, inputs, request))) as pieces:  # type: ignore[type-var]
                    for piece in pieces:
                        clock.tick(piece.token_ids)
                clocks.append(clock.row())
        step_ms = [row["step_ms"] for row in clocks[1:]]
        predicted, measured = plan.execution.tokens_per_s, 1000 / median(step_ms)
        name = f"{model}, {quant}, {plan.request.dtype}{', an adapter' if has_adapter else ''}"
        rows[name] = {
            "predicted_tokens_per_s": round(predicted, 3), "measured_tokens_per_s": round(measured, 3),
            "ratio": round(predicted / measured, 3), "step_ms": step_ms,
            "step_cpu_ms": [row["step_cpu_ms"] for row in clocks[1:]], "load_average": round(os.getloadavg()[0], 1),
        }  # fmt: skip
        print(name, rows[name], flush=True)
    found = saved(given.save)
    found[given.part] = {
        "note": given.note, "environment": read_environment().to_json(), "threads": threads,
        "cpu_capability": torch.backends.cpu.get_cpu_capability(), "rates": asdict(rates), "rows": rows,
    }  # fmt: skip
    save(given.save, found)


def main() -> None:
    from trimtab.benchmark.bench import BenchRequest, bench

    parser = parser_of(__doc__, work=True, must_save=True)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--new-tokens", type=int, default=32)
    parser.add_argument("--prompt-tokens", type=int, default=128)
    parser.add_argument("--note", default="", help="what else the machine did, for the file")
    parser.add_argument("--only", action="append", help="this case alone, or this model of --predictions; may be repeated")
    parser.add_argument("--first-tokens", type=int, default=0, help="first tokens only, so many of each model")
    parser.add_argument("--part", default="avx512", help="of the file of --predictions")
    parser.add_argument("--predictions", action="store_true", help="predicted and measured tokens per second")
    given = parser.parse_args()
    if given.predictions:
        save_predictions(given)
        return
    if given.first_tokens:
        save_first_tokens(given)
        return
    found: dict[str, Any] = {"note": given.note, "reports": {}}
    if given.only:  # the other cases stay as they were measured
        found |= saved(given.save)
    for name, load in cases(given.work).items():
        asked = BenchRequest(
            load=load, adapter="adapter", runs=given.runs, new_tokens=given.new_tokens,
            prompt_tokens=given.prompt_tokens, stock_cpu_path=not name.endswith("without AVX512-BF16"),
        )  # fmt: skip
        if given.only and name not in given.only:
            continue
        report = bench(asked, say=lambda text: print(text, flush=True))
        print(f"\n{name}\n{report}\n", flush=True)
        found["reports"][name] = report.to_json()
        save(given.save, found)


if __name__ == "__main__":
    main()
