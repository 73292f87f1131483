"""Tables of docs/benchmarks.md and docs/how-fast.md made from bench/results: first tokens, images, towers, a CPU, few rows.

`tools/readme_numbers.py` fills slots with them.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

PACKAGES = ("torch", "transformers", "bitsandbytes", "peft")
TITLES = {"e4b": "E4B", "e2b": "E2B", "qwen3-8b": "Qwen3-8B", "qwen3-vl-4b": "Qwen3-VL-4B"}
MIXTURES = {"26b-a4b": "Gemma 4 26B-A4B", "qwen3-30b-a3b": "Qwen3-30B-A3B", "qwen3.5-35b-a3b": "Qwen3.5-35B-A3B"}
WAYS = ("stock", "eager", "captured")
TOKENS = (64, 512, 2048)
# Model, engine, mode, rank, adapters, rows: what a reader of docs/how-fast.md compares.
FEW = (
    ("e4b", "trimtab", "auto", 0, 0, 1), ("e4b", "trimtab", "auto", 8, 1, 1), ("e4b", "trimtab", "auto", 8, 8, 8),
    ("e4b", "stock", "eager", 0, 0, 1), ("e4b", "stock", "eager", 8, 1, 1), ("e4b", "stock", "eager", 8, 1, 8),
    ("e2b", "trimtab", "auto", 8, 1, 1), ("e2b", "stock", "eager", 8, 1, 1),
)  # fmt: skip


def _table(heads: Sequence[str], numbers: int, rows: Iterable[Sequence[str]]) -> str:
    """Return a table whose last columns hold numbers."""
    rule = ["---"] * (len(heads) - numbers) + ["---:"] * numbers
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (heads, rule, *rows))


def _where(results: Mapping[str, Any]) -> str:
    where = results["environment"]
    return f"{where['gpu']}, Python {where['python']}, {', '.join(f'{name} {where[name]}' for name in PACKAGES)}"


EARLIER = "*: an earlier call."


def _mark(row: Mapping[str, Any]) -> str:
    return " *" if row.get("earlier") else ""


def _run(results: Mapping[str, Any], run: int | None) -> list[Mapping[str, Any]]:
    return [row for row in results["rows"] if run is None or row["run"] == run]


def _first_tokens(results: Mapping[str, Any], run: int | None) -> str:
    ms = {
        (row["model"], row["tokens"], row["way"]): row["ms"]
        for row in _run(results, run)
        if row["what"] == "text" and row["adapter"] and "ms" in row
    }
    models = [model for model in TITLES if (model, 64, "captured") in ms]
    rows = []
    for model in models:
        cells = [
            " / ".join(f"{ms[model, tokens, way]:.0f}" for way in WAYS[:2]) + f" / **{ms[model, tokens, WAYS[2]]:.1f}**"
            for tokens in TOKENS
        ]
        title = TITLES[model] + (": stock / eager / captured" if model == models[0] else "")
        rows.append([title, *cells])
    heads = ["model, ms to the first token, adapter of rank 8", *(f"{tokens:,} tokens" for tokens in TOKENS)]
    return f"{_table(heads, 3, rows)}\n\n{_where(results)}; random weights of these sizes, NF4 with double quantization.\n"


def first_tokens(results: Mapping[str, Any]) -> str:
    """Return the table of the texts of the last run of bench/results/prompts.json."""
    return _first_tokens(results, max(row["run"] for row in results["rows"]))


def first_tokens_h100(results: Mapping[str, Any]) -> str:
    """Return the same table of bench/results/prompts_h100.json."""
    return _first_tokens(results, None)


def images(results: Mapping[str, Any]) -> str:
    """Return the table of an image and a question, from the last run of bench/results/prompts.json."""
    rows = [row for row in _run(results, max(row["run"] for row in results["rows"])) if row["what"] == "picture 640x480"]
    lines = []
    for model in dict.fromkeys(row["model"] for row in rows):
        ways = {row["way"]: row for row in rows if row["model"] == model}
        tokens = f", {ways['captured']['tokens']} tokens" if not lines else ""
        lines.append(
            [TITLES[model] + tokens, *(f"{ways[way]['ms']:.0f} ms" for way in WAYS[:2]), f"**{ways[WAYS[2]]['ms']:.0f} ms**"]
        )
    heads = ["one image of 640x480 and a question, from the PNG file's bytes to the first token", *WAYS]
    return _table(heads, 3, lines) + "\n"


def towers(results: Mapping[str, Any]) -> str:
    """Return the table of an image and audio in three versions, from three runs of bench/results/prompts.json."""
    runs = [
        next(
            row for row in _run(results, run)
            if (row["model"], row["what"], row.get("way")) == ("e4b", "picture and sound", "captured")
        )
        for run in (2, 3, 5)
    ]  # fmt: skip
    ms = [f"{row['ms']:.0f} ms" for row in runs]
    heads = [
        "E4B, adapter of rank 8 on decoder and towers",
        "towers eager (run 2)",
        "captured (run 3)",
        "with prompt kernels (run 5)",
    ]
    rows = [
        [f"image of 280 tokens and 10 s of audio, {runs[2]['tokens']} tokens, to the first token", *ms[:2], f"**{ms[2]}**"],
        ["of it: the decoder's chunk of 1,024 tokens on the GPU", *(f"{row['gpu_ms']:.1f}" for row in runs)],
    ]
    return _table(heads, 3, rows) + "\n"


CPU_CASES = {
    "llama-300m, none": ("Llama 310 M", "none"), "llama-300m, nf4-dq": ("Llama 310 M", "nf4-dq"),
    "llama-300m, nf4-dq, without AVX512-BF16": ("Llama 310 M", "nf4-dq, stock without AVX512-BF16"),
    "demo, nf4-dq": ("demo", "nf4-dq"), "demo, nf4-dq, without AVX512-BF16": ("demo", "nf4-dq, stock without AVX512-BF16"),
}  # fmt: skip


def bench_cpu(results: Mapping[str, Any]) -> str:
    """Return the table of bench/results/bench_cpu.json: trimtab over stock, median of pairs with their range."""
    rows = []
    for name, titles in CPU_CASES.items():
        ratios = [results["reports"][name]["ratios"][key] for key in ("decode_tok_s", "cpu_ms")]
        rows.append([*titles, *(f"{one['median']:.2f} ({one['min']:.2f} to {one['max']:.2f})" for one in ratios)])
    return _table(["model", "format", "tokens per second", "CPU time per token"], 2, rows) + "\n"


def start_cpu(results: Mapping[str, Any]) -> str:
    """Return the table of bench/results/start_cpu.json: seconds of a start with patched imports and without."""
    found = {(row["what"], row["tree"]): row for row in results["rows"]}
    columns = (("before", "cpu_median_s"), ("now", "cpu_median_s"), ("now", "wall_median_s"))
    rows = [
        [what, *(f"{found[what, tree][name]:.1f}" if (what, tree) in found else "-" for tree, name in columns)]
        for what in dict.fromkeys(row["what"] for row in results["rows"])
    ]
    about = results["about"]
    return (
        f"{_table(['start', 'CPU seconds before', 'now', 'seconds now'], 3, rows)}\n\n"
        f"The demo model, medians of {about['runs']}, one thread on {about['cpu_count']} cores with a load average of "
        f"{about['load'][0]:.1f}, Python {about['python']}, torch {about['versions']['torch']}.\n"
    )


def fast_decode(results: Mapping[str, Any]) -> str:
    """Return few rows of bench/results/decode.json."""
    found = {}
    for row in results["rows"]:
        if "ms" in row and row["placement"] == "resident" and row.get("run") == 4:
            key = (row["model"], row["engine"], row["decode"], row["adapter_rank"], row["adapters"], row["batch"])
            found[key] = row
    rows = [
        [
            case[0].upper(), case[1], f"{case[4]} of rank {case[3]}" if case[3] else "none", str(case[5]),
            f"{found[case]['tok_s']:,.0f}", f"{found[case]['ms']:.2f}",
        ]
        for case in FEW
    ]  # fmt: skip
    table = _table(["model", "engine", "adapters", "rows", "tokens/s", "ms per step"], 3, rows)
    return f"{table}\n\n{_where(results)}; a prompt of 512 tokens, everything on the GPU.\n"


def families(results: Mapping[str, Any]) -> str:
    """Return the families of bench/results/families.json, the stock stack in brackets where it was run."""
    names = {
        "qwen3-8b": "Qwen3-8B", "llama-3-8b": "Llama-3-8B", "gemma3-4b": "Gemma 3 4B (text)", "qwen3-vl-4b": "Qwen3-VL-4B",
        "qwen3.5-9b": "Qwen3.5-9B", "e4b": "Gemma 4 E4B",
    }  # fmt: skip
    found = {(row["model"], row["engine"], row.get("card_gib")): row for row in results["rows"] if "error" not in row}
    rows = []
    for (model, engine, card), own in found.items():
        if engine != "trimtab":
            continue
        stock = found.get((model, "stock", card))
        beside = [f" ({stock[key]:,.1f}{_mark(stock)})" if stock is not None else "" for key in ("tok_s", "first_ms")]
        many = f"{own['rows8_tok_s']:,.0f}" if "rows8_tok_s" in own else "-"
        gpu = own.get("gpu", results["environment"]["gpu"]).split()[1]
        rows.append([
            names[model] + _mark(own), f"{card:g} GiB" if card else "whole", gpu, own["step"], f"{own['tok_s']:,.0f}{beside[0]}",
            f"{own['predicted_tok_s']:,.0f}" if card else "-", many, f"{own['first_ms']:.1f}{beside[1]}",
        ])  # fmt: skip
    rows.sort(key=lambda row: list(names.values()).index(row[0].removesuffix(" *")))
    heads = ["model", "card", "GPU", "steps", "tokens/s, one row (stock)", "planned", "eight rows, eight adapters",
             "first token of 512, ms (stock)"]  # fmt: skip
    where = _where(results).partition(", ")[2]
    what = "random weights, NF4 with double quantization, adapters of rank 8 on all linears"
    return f"{_table(heads, 4, rows)}\n\n{where}; {what}. {EARLIER}\n"


def experts(results: Mapping[str, Any]) -> str:
    """Return the mixtures of bench/results/experts.json."""
    rows = []
    for row in results["rows"]:
        if "error" in row:
            continue
        size, kind, card, _, copies, *_ = [*row["case"].split(":"), "", "", "", ""]
        near = f"{row['slots']} of 128" if row.get("slots") else "all"
        hits = f"{row['hits']:.0%}" if "hits" in row else "-"
        names = ("predicted_tok_s", "tok_s", "experts_tok_s", "rows8_tok_s", "first_ms")
        cells = [f"{row[name]:,.{int(row[name] < 10)}f}" if name in row else "-" for name in names]
        where = f"{card} GiB, 1/{copies} of the link" if copies else f"{card} GiB" if card else "whole"
        if "predicted_at_hits_tok_s" in row:
            cells[0] += f" ({row['predicted_at_hits_tok_s']:,.0f})"
        link = f"{row['link_share']:.0%} of {row['link_gb_s']:.1f} GB/s" if "link_share" in row else "-"
        name = MIXTURES[size] + OTHER_ENGINES.get(kind, "") + _mark(row)
        rows.append([name, where, near, hits, link, *cells, f"{row['process_gib']:.2f} GiB" if "process_gib" in row else "-"])
    heads = ["model", "card", "experts of a layer on it", "chosen ones found there", "of what the link allows", "planned",
             "tokens/s", "adapter on experts", "eight rows, eight of these", "first token of 512, ms", "process"]  # fmt: skip
    table = _table(heads, 8, rows)
    what = "random weights, NF4 with double quantization, an adapter of rank 8 on attention and dense parts"
    return f"{table}\n\n{_where(results)}; {what}. The process holds the adapters. {EARLIER}\n"


OTHER_ENGINES = {"stock": ", stock, 16 bits", "llama.cpp": ", llama.cpp, Q4_K, no adapter"}
LOOPS = {"outside": "sampled, whole, all of the time counted", "closed": "greedy, streamed"}


def load_outside(results: Mapping[str, Any]) -> str:
    """Return the servers of bench/results/load_outside.json."""
    rows = []
    for row in results["rows"]:
        times = [f"{row[name][part]:.0f}" if row[name] else "-" for name in ("ttft_ms", "between_ms") for part in ("p50", "p99")]
        how = "sampled, streamed" if "temperature" in row else LOOPS[row["loop"]]
        rows.append([TITLES[row["model"]] + _mark(row), f"{row['text_tokens']:,}", how, f"{row['tok_s']:,.0f}", *times])
    heads = ["model", "tokens of a text", "answers", "tokens/s", "first token ms, p50", "p99", "between tokens ms, p50", "p99"]
    what = "32 clients, 8 adapters, answers of 128 tokens, random weights, NF4 with double quantization, no errors"
    return f"{_table(heads, 5, rows)}\n\n{_where(results)}; {what}. {EARLIER}\n"


# Case -> (what a reader calls it, goal, what NF4's rate of the same call is compared with, what holds it back). Figures of other
# calls: the record's `before` and its former versions (git log).
FORMAT_GOALS = {
    ("e4b", "ct-g32"): (
        "E4B int4, groups of 32, of NF4's tokens/s", 1.1,
        "a linear reads 4.5 bits a value, NF4 4.13: at the same rate of memory that is 0.92x",
    ),
    ("qwen3-8b", "awq"): (
        "Qwen3-8B AWQ, groups of 128, of NF4's tokens/s", 1.1,
        "zero points: without them (`ct-g128`) 342 in a former record (7588c3b5), where AWQ made 325 and NF4 330",
    ),
    ("e2b", "mobile"): (
        "E2B mobile on 2 GiB, tokens/s", 500,
        "roundings of inputs and outputs: 22 µs a layer beyond NF4's (`layer_s` of `formats/record.py`, fitted to these rows)",
    ),
    ("e4b", "mobile"): ("E4B mobile on 3.25 GiB, tokens/s", 380, "the same"),
    ("qwen3-8b", "q4_k_m"): (
        "Qwen3-8B GGUF Q4_K_M, tokens/s", 380,
        "decoding: 21 µs a product in a profile, NF4's half of 26 ([decision 52](decisions/0052-k-quants-as-small-numbers.md))",
    ),
    ("qwen3-8b", "fp8"): ("Qwen3-8B FP8 in blocks, tokens/s", 260, "-"),
}  # fmt: skip


def format_goals(results: Mapping[str, Any]) -> str:
    """Return the goals of formats beside bench/results/formats.json."""
    found = {(row["model"], row["form"]): row for row in results["rows"] if "tok_s" in row}
    rows = []
    for (model, form), (title, goal, why) in FORMAT_GOALS.items():
        own = found[model, form]["tok_s"]
        if "of NF4" in title:
            nf4 = found[model, "nf4-dq"]["tok_s"]
            rows.append([title, f"{goal}x", f"{own / nf4:.2f}x ({own:.1f} and {nf4:.1f})", why])
            continue
        before = found[model, form].get("before")
        was = f" (before {before['tok_s']:.0f}: {before['note']})" if before else ""
        rows.append([title, str(goal), f"{own:.0f}{was}", why])
    for row in results["loads"]["rows"]:
        seconds = {
            side: f"{statistics.median(one['load_s']):.1f}" if "load_s" in one
            else f"{one['first_s']:.1f}, its first" if "first_s" in one else f"more than {one['over_s']}"
            for side in ("trimtab", "stock") for one in (row[side],)
        }  # fmt: skip
        title = f"load of {TITLES[row['model']]} `{row['form']}` from the page cache, seconds"
        rows.append([title, "half of stock's", f"{seconds['trimtab']}; stock {seconds['stock']}", LOADS.get(row["form"], "-")])
    return _table(["formats", "goal", "measured", "what holds it back"], 0, rows) + f"\n\n{_where(results)}.\n"


LOADS = {
    "ct-g32": "a profile: weights 2.2, captures 1.9, comparing the description 1.0, module tree 0.8. Stock captures nothing and "
    "unpacks in its first pass: 0.7 s more, trimtab's first token 0.02"
}


def cpu_predictions(results: Mapping[str, Any]) -> str:
    """Return the table of bench/results/cpu_predictions.json: the least and the most of predicted over measured rates."""
    rows = []
    for part in (one for one in results.values() if "rows" in one):
        load = [row["load_average"] for row in part["rows"].values()]
        for model in ("demo", "llama-300m"):
            found = {name: row["ratio"] for name, row in part["rows"].items() if name.startswith(model)}
            ends = [[ratio for name, ratio in found.items() if ("an adapter" in name) is one] for one in (True, False)]
            if found:
                where = [part["title"], f"{min(load):.1f} to {max(load):.1f}", model]
                rows.append([*where, *(f"{min(ratios):.2f} to {max(ratios):.2f}" for ratios in ends)])
    return _table(["instructions", "load average", "model", "predicted / measured, an adapter", "none"], 2, rows) + "\n"


MAKERS: Mapping[str, Callable[[Mapping[str, Any]], str]] = {
    "first_tokens": first_tokens, "first_tokens_h100": first_tokens_h100, "images": images, "towers": towers,
    "bench_cpu": bench_cpu, "start_cpu": start_cpu, "fast_decode": fast_decode,
    "families": families, "experts": experts, "load_outside": load_outside, "format_goals": format_goals,
    "cpu_predictions": cpu_predictions,
}  # fmt: skip
# Slot -> the result file that it is made of, where that has another name.
SOURCES = {
    "first_tokens": "prompts",
    "first_tokens_h100": "prompts_h100",
    "images": "prompts",
    "towers": "prompts",
    "fast_decode": "decode",
    "format_goals": "formats",
}
