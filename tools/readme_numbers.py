"""Put the measured figures into the docs: their tables are made from bench/results, so that no number is typed by hand.

python tools/readme_numbers.py            write
python tools/readme_numbers.py --check    exit 1 if a page does not say what the results say
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from tools import benchmark_tables  # noqa: E402

RESULTS = ROOT / "bench" / "results"
PAGES = (
    ROOT / "README.md", ROOT / "docs" / "how-fast.md", ROOT / "docs" / "benchmarks.md", ROOT / "docs" / "keep-peft.md",
    ROOT / "docs" / "is-my-merge-right.md", ROOT / "docs" / "server-under-load.md",
    ROOT / "docs" / "operate.md", ROOT / "docs" / "read-a-plan.md", ROOT / "docs" / "fit-a-model.md",
    ROOT / "docs" / "mixtures.md",
)  # fmt: skip
PACKAGES = ("torch", "transformers", "peft", "accelerate", "bitsandbytes")
SLOT = re.compile(r"(<!-- numbers:(\w+) -->\n).*?(<!-- /numbers -->)", re.DOTALL)
# (heading, key of a row, decimals)
COLUMNS = (
    ("GPU peak GiB", "gpu_peak_gib", 2), ("planned", "gpu_planned_gib", 2), ("host peak GiB", "host_peak_gib", 1),
    ("load s", "load_s", 1), ("first token ms", "ttft_ms", 0), ("with media ms", "ttft_media_ms", 0),
    ("tokens/s", "decode_tok_s", 1),
)  # fmt: skip


def memory(results: Mapping[str, Any]) -> str:
    """Return the table of bench/results/memory.json and a line on where it was measured."""
    rows = results["rows"]
    head = ["model", "engine", "placement", "rank", *(heading for heading, *_ in COLUMNS), "logits as stock's"]
    lines = [head, ["---"] * 4 + ["---:"] * len(COLUMNS) + ["---"], *(_row(row, rows) for row in rows)]
    where = results["environment"]
    packages = ", ".join(
        f"{name} {where[name]}" for name in ("torch", "transformers", "bitsandbytes", "peft", "accelerate") if name in where
    )
    table = "\n".join(f"| {' | '.join(cells)} |" for cells in lines)
    return f"{table}\n\n{where['gpu']}, Python {where['python']}, {packages}; context {results['context']}.\n"


def _row(row: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]) -> list[str]:
    label = [row["model"].upper(), row["engine"], row["placement"], str(row["adapter_rank"])]
    if "error" in row:
        return [*label, *([""] * len(COLUMNS)), f"failed: {row['error']}"]
    figures = [f"{row[key]:.{decimals}f}" if key in row else "-" for _, key, decimals in COLUMNS]
    return [*label, *figures, _same(row, rows)]


def _same(row: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]) -> str:
    """Return whether the logits of a text prompt and of one with media are stock's own, all on the GPU, bit for bit."""
    stock = [
        r for r in rows
        if (r["model"], r["engine"], r["placement"], r["adapter_rank"])
        == (row["model"], "stock", "resident", row["adapter_rank"]) and "logits" in r
    ]  # fmt: skip
    if not stock:
        return "not compared"
    if row is stock[0]:
        return "-"
    found = {key: row.get(key) == stock[0][key] for key in ("logits", "media_logits")}
    words = {(True, True): "yes", (True, False): "text yes, media no", (False, True): "text no, media yes"}
    return words.get((found["logits"], found["media_logits"]), "no")


def decode(results: Mapping[str, Any]) -> str:
    """Return the table of bench/results/decode.json, what else the run says, and where it was measured."""
    heads = [
        "model",
        "engine",
        "placement",
        "decode",
        "rank",
        "adapters",
        "rows",
        "tokens/s",
        "ms per step",
        "of the limit",
        "context",
        "run",
    ]
    lines = [heads, ["---"] * 4 + ["---:"] * 8]
    for row in results["rows"]:
        if "ms" in row:
            lines.append([
                row["model"].upper(), row["engine"], _where(row), _way(row), str(row["adapter_rank"] or "-"),
                str(row["adapters"] or "-"), str(row["batch"]), f"{row['tok_s']:.1f}", f"{row['ms']:.2f}",
                f"{100 * row['share']:.1f} %" if "share" in row else "-", f"{row['context']:,}", str(row.get("run", "-")),
            ])  # fmt: skip
    table = "\n".join(f"| {' | '.join(cells)} |" for cells in lines)
    where = results["environment"]
    packages = ", ".join(f"{name} {where[name]}" for name in ("torch", "transformers", "bitsandbytes", "peft"))
    said = [f"- {row['model'].upper()}, {row['what']}: {_words(row)}" for row in results["rows"] if "what" in row]
    failed = [
        f"- {row['model'].upper()}, {row['engine']}, {row['placement']}: failed: {row['error']}"
        for row in results["rows"] if "error" in row
    ]  # fmt: skip
    notes = [f"- {note}" for note in results.get("notes", ())]
    closing = f"{where['gpu']}, Python {where['python']}, {packages}; a prompt of 512 tokens."
    return "\n\n".join(part for part in (table, closing, "\n".join([*said, *failed, *notes])) if part) + "\n"


def _where(row: Mapping[str, Any]) -> str:
    """Return the placement, and what else was varied."""
    if "loaded" in row:
        return f"{row['placement']}, adapters loaded: {row['loaded']}"
    if "draws" not in row:
        return str(row["placement"])
    given = ", ".join(f"{name} {value}" for name, value in row["draws"].items() if name != "seed") or "greedy"
    return f"{row['placement']}, {given}{', not ahead' if row.get('waits') else ''}"


def _way(row: Mapping[str, Any]) -> str:
    """Return how the steps were computed: what was asked for, and what it came to."""
    if row["decode"] == "auto":
        return "fused" if row.get("captures") else "eager (capture failed)"
    return str(row["decode"])


def _words(row: Mapping[str, Any]) -> str:
    known = ("model", "engine", "placement", "what", "error", "decode", "run")
    return ", ".join(f"{name} {value}" for name, value in row.items() if name not in known)


def bridge(results: Mapping[str, Any]) -> str:
    """Return the table of each run of bench/results/bridge.json that loaded its base, and why the others are no figures."""
    parts = []
    for run in results["runs"]:
        where = run["environment"]
        packages = ", ".join(f"{name} {where[name]}" for name in PACKAGES)
        if not any("base_bytes" in row for row in run["rows"]):
            failure = run["rows"][0]["exception"]
            parts.append(
                f"With {packages}: no figures. The random checkpoint of this run could not be read by that release "
                f"(`{failure['type']}: {failure['message']}`), with stock as with the bridge.\n"
            )
            continue
        heads = ["case", "ends", "map kept", "GPU with the base, GiB", "with the adapter", "peak", "largest difference of a logit"]
        lines = [heads, ["---"] * 3 + ["---:"] * 3 + ["---"], *(_bridge_row(row) for row in run["rows"])]
        table = "\n".join(f"| {' | '.join(cells)} |" for cells in lines)
        parts.append(f"{table}\n\n{where['device']}, {run['size'].upper()} size, Python {where['python']}, {packages}.\n")
    return "\n".join(parts)


def _bridge_row(row: Mapping[str, Any]) -> list[str]:
    sizes = [row.get(key) for key in ("base_bytes", "model_bytes", "gpu_peak_bytes")]
    modes = row.get("modes", {})
    apart = [f"{kind} {mode['max_abs']:g}" for kind, mode in modes.items() if "max_abs" in mode]
    failure = row.get("exception")
    ends = "answers" if failure is None else f"at {row['stage']}: `{failure['type']}: {failure['message'].split(', but')[0]}`"
    return [
        row["name"], ends, {True: "yes", False: "no"}.get(row.get("placement_kept"), "-"),
        *("-" if size is None else f"{size / 2**30:.2f}" for size in sizes), ", ".join(apart) or "-",
    ]  # fmt: skip


LOADED = {"llama-310m": "a Llama of 310 million random weights in bfloat16"}


def load(results: Mapping[str, Any]) -> str:
    """Return the table of a load run: all servers under the same clients, and what each says of itself."""
    heads = ["clients", "server", "tokens/s", "answers", "cut", "first token ms, p50", "p99", "between tokens ms, p50", "p99"]
    lines = [heads, ["---"] * 2 + ["---:"] * 7]
    order = [(row["loop"], row.get("clients", row.get("rate"))) for row in results["rows"] if "failed" not in row]
    answered = [row for row in results["rows"] if "failed" not in row and row["loop"] != "outside" and "temperature" not in row]
    for row in sorted(answered, key=lambda one: order.index((one["loop"], one.get("clients", one.get("rate"))))):
        who = f"{row['clients']}, closed loop" if row["loop"] == "closed" else f"{row['rate']:.3g} arrivals/s"
        first, between = row["ttft_ms"], row["between_ms"]  # none where no answer began in time
        assert not row["errors"], row
        cells = [*(_part(first, name, 0) for name in ("p50", "p99")), *(_part(between, name, 1) for name in ("p50", "p99"))]
        others = row["adapters"] != results["rows"][0]["adapters"]
        server = f"{row['engine']}, {row['adapters'] or 'no'} adapters" if others else row["engine"]
        lines.append([who, server, f"{row['tok_s']:.1f}", str(row["requests"]), str(row["unfinished"]), *cells])
    table = "\n".join(f"| {' | '.join(cells)} |" for cells in lines)
    where, row = results["environment"], results["rows"][0]
    packages = ", ".join(f"{name} {where[name]}" for name in ("torch", "transformers", "bitsandbytes", "peft"))
    prompt_tokens = results["settings"].get("text_tokens")
    texts = f"texts of {prompt_tokens} tokens, " if prompt_tokens else ""
    size = LOADED.get(row["model"], f"{row['model'].upper()}'s size with random weights, {row['quant']}")
    closing = (
        f"{where['gpu'] or str(where['cpu_count']) + ' cores of a CPU'}, {size}, {row['adapters']} adapters, "
        f"{results['settings']['rows'] or 32} rows, {texts}answers of {results['settings']['max_tokens']} tokens, no errors; "
        f"Python {where['python']}, {packages}."
    )
    said = {row["engine"]: row["note"] for row in results["rows"] if row.get("note")}
    said |= {row["engine"]: row["failed"].splitlines()[0] for row in results["rows"] if "failed" in row}
    notes = [*results.get("notes", ()), *(f"`{engine}`: {note}" for engine, note in said.items())]
    return "\n\n".join([table, closing, "\n".join(f"- {note}" for note in notes)]).rstrip() + "\n"


def _part(values: Mapping[str, float] | None, name: str, digits: int) -> str:
    return "-" if values is None else f"{values[name]:.{digits}f}"


def lanes(results: Mapping[str, Any]) -> str:
    """Return the table of each run of bench/results/lanes.json, and where it was measured."""
    heads = ["lane", "verdict", "prompts", "KL", "KL base", "KL bf16", "survived", "noise", "PEFT's warnings", "GPU peak GiB"]
    parts = []
    for run in results["runs"]:
        lines = [heads, ["---"] * 3 + ["---:"] * 7]
        for lane in run["lanes"]:
            counts = "<br>".join(f"{count} `{name}`" for name, count in lane["counts"].items())
            figures = [lane[key] for key in ("kl_to_adapter", "kl_base", "kl_to_bf16", "survived", "survival_noise")]
            lines.append([
                f"`{lane['lane']}`", f"`{lane['verdict']}`", counts,
                *("-" if value is None else f"{value:.3g}" for value in figures), str(lane["merge_warnings"]),
                f"{lane['memory']['gpu_peak_bytes'] / 2**30:.1f}",
            ])  # fmt: skip
        table = "\n".join(f"| {' | '.join(cells)} |" for cells in lines)
        parts.append(f"{table}\n\n{run['model']}; adapter of {run['adapter']}.")
    where = results["environment"]
    packages = ", ".join(f"{name} {where[name]}" for name in PACKAGES)
    closing = f"{where['device']}, Python {where['python']}, {packages}; {results['new_tokens']} tokens per answer."
    return "\n\n".join(parts) + f" {closing}\n"


def alarms(results: Mapping[str, Any]) -> str:
    """Return the table of bench/results/alarms.json: false alarms and planted faults, and how they were drawn."""
    right, faults = results["right"], results["faults"]
    kinds = {
        "merge_check": "`merge --check`, files", "verify_merged": "`verify`, a merged folder",
        "verify_merged_4bit": "`verify`, of these in 4 bits or int8", "verify_routes": "`verify`, two routes",
        "demo": "`demo`, other rounding",
    }  # fmt: skip
    lines = [["", "false alarms", "rate below (95 %)", "planted faults detected"], ["---", "---:", "---:", "---:"]]
    for name, title in kinds.items():
        count = right.get(name)
        caught, planted = (sum(pair[place] for pair in faults[name].values()) for place in (0, 1))
        lines.append([
            title, f"{count['alarms']} of {count['of']}" if count else "included above",
            f"{100 * count['rate_below']:.1f} %" if count else "-", f"{caught} of {planted}",
        ])  # fmt: skip
    table = "\n".join(f"| {' | '.join(cells)} |" for cells in lines)
    missed = [
        f"{name} ({caught} of {planted} detected)"
        for name, (caught, planted) in faults["verify_merged_4bit"].items() if caught < planted
    ]  # fmt: skip
    shares = ", ".join(f"{name.replace('_', ' ')} {100 * share:.0f} %" for name, share in right["largest_share_of_limit"].items())
    packages = ", ".join(f"{name} {results['versions'][name]}" for name in ("torch", "transformers", "peft"))
    return (
        f"{table}\n\nRates are exact binomial bounds (Clopper and Pearson). Right merges of 13 models in bfloat16, float16, "
        "float32, 4 bits and int8, by trimtab, PEFT and bfloat16 arithmetic, packed by trimtab or bitsandbytes, on 1 to 4 "
        f"threads, seed {results['seed']}. Two routes: 8 models in 3 dtypes, 5 comparisons, random adapters of rank 1 to 16, "
        "tiers, prompts and 1 to 4 threads, in one process. `demo`: one load for each of 3 dtypes, questions to the base and 3 "
        "adapters, 1 to 4 threads, the roundings of every layer drawn anew in 4 of 5 runs. Faults of a merge: "
        f"{'; '.join(faults['merge_check'])}. Faults of a route: {'; '.join(faults['verify_routes'])}. Faults of `demo`: "
        f"{'; '.join(faults['demo'])}. "
        + (f"In 4 bits, below the noise floor of `verify`: {'; '.join(missed)}. " if missed else "")
        + f"Largest share of its limit that a right merge or route reached: {shares}. {packages}.\n"
    )


# (heading, key of a row, decimals)
CARD_COLUMNS = (
    ("tokens/s", "tok_s", 0), ("predicted", "predicted_tok_s", 0), ("first token ms", "ttft_ms", 0),
    ("streamed GiB", "streamed_gib", 2), ("planned GiB", "planned_gib", 2), ("process GiB", "process_gib", 2),
)  # fmt: skip
# Shown once a row has them: what the link allows with the bytes that a step copies, the share of it that was reached, and the
# fewest bytes that the budget forces off the card (bench/cards.py).
LINK_COLUMNS = (
    ("link limit tokens/s", "link_limit_tok_s", 0), ("of it", "link_share", 2), ("forced GiB", "forced_gib", 2),
)  # fmt: skip


def _case_of(row: Mapping[str, Any]) -> tuple[Any, ...]:
    return row["model"], row["card_gib"], row["head"], row.get("copies", 1), row.get("engine", "")


def _latest_cards(results: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Return the rows of bench/results/cards.json, the smallest cards first.

    Of a case that was measured twice on one GPU the later run counts.
    """
    latest = {(_case_of(row), _gpu(row, results)): row for row in results["rows"] if "error" not in row}
    return sorted(latest.values(), key=lambda row: (row["model"], row["card_gib"] or 999, *_case_of(row)[2:], _gpu(row, results)))


def _gpu(row: Mapping[str, Any], results: Mapping[str, Any]) -> str:
    """Return the short name of the GPU that a row was measured on: H100 of "NVIDIA H100 80GB HBM3"."""
    return str(row.get("gpu", results["environment"]["gpu"])).removeprefix("NVIDIA ").split()[0]


def _gpus(rows: Sequence[Mapping[str, Any]], results: Mapping[str, Any]) -> str:
    names = dict.fromkeys(row.get("gpu", results["environment"]["gpu"]) for row in rows)
    return " and ".join(sorted(names))


def _card_size(row: Mapping[str, Any]) -> str:
    size = f"{row['card_gib']:g} GiB" if row["card_gib"] else "whole GPU"
    return size + (f", link / {row['copies']}" if "copies" in row else "")


def cards(results: Mapping[str, Any]) -> str:
    """Return the table of bench/results/cards.json, the smallest cards first, and a line on where it was measured."""
    ordered = _latest_cards(results)
    columns = CARD_COLUMNS + (LINK_COLUMNS if any("forced_gib" in row for row in ordered) else ())
    head = ["model", "card", "GPU", "`--head`", "head", "decode steps", *(heading for heading, *_ in columns)]
    lines = [head, ["---"] * 6 + ["---:"] * len(columns)]
    for row in ordered:
        steps = "stock" if row.get("engine") == "stock" else row["execution"]
        heads = [row["head"], row.get("chosen_head", row["head"])]
        label = [row["model"].upper(), _card_size(row), _gpu(row, results), *heads, steps]
        lines.append([*label, *("-" if row.get(key) is None else f"{row[key]:.{decimals}f}" for _, key, decimals in columns)])
    table = "\n".join(f"| {' | '.join(cells)} |" for cells in lines)
    where = results["environment"]
    packages = ", ".join(f"{name} {where[name]}" for name in PACKAGES if name in where)
    return f"{table}\n\n{_gpus(ordered, results)}, Python {where['python']}, {packages}; context 4096, rank 8.\n"


def small_cards(results: Mapping[str, Any]) -> str:
    """Return the few rows of bench/results/cards.json that a newcomer looks for, with fewer columns."""
    found = {
        (row["model"], row["card_gib"], row["head"], row.get("copies", 1)): row for row in results["rows"] if "engine" not in row
    }
    heads = ["model", "card", "GPU", "output head", "tokens/s", "predicted", "first token (512)", "planned", "process"]
    lines = [heads, ["---"] * 4 + ["---:"] * 5]
    for case in SMALL_CARDS:
        row = found[case]
        lines.append([
            row["model"].upper(), _card_size(row), _gpu(row, results),
            {"int8": "8 bits", "full": "full"}[row["chosen_head"]],
            f"{row['tok_s']:.0f}", f"{row['predicted_tok_s']:.0f}", f"{row['ttft_ms']:.0f} ms",
            f"{row['planned_gib']:.2f} GiB", f"{row['process_gib']:.2f} GiB",
        ])  # fmt: skip
    table = "\n".join(f"| {' | '.join(cells)} |" for cells in lines)
    shown = [found[case] for case in SMALL_CARDS]
    closing = f"{_gpus(shown, results)}, 4-bit weights, an adapter of rank 8 on text, vision and audio, context 4096. "
    links = sorted(round(row["link_gb_s"]) for row in shown if row.get("link_gb_s") and "copies" not in row)
    slow = " and ".join(sorted({f"{row['link_gb_s']:.0f}" for row in shown if "copies" in row}))
    closing += (
        f"Before each run their link measured {links[0]} to {links[-1]} GB/s; with link / 4 each copy is issued four times: "
        f"{slow} GB/s, as small cards have it."
    )
    newest = max(row["run"] for row in shown)
    gpus = {
        gpu
        for gpu in (_gpus([row], results) for row in shown)
        if all(row["run"] < newest for row in shown if _gpus([row], results) == gpu)
    }
    older = [*(f"the rows of the {gpu}" for gpu in sorted(gpus)), *(
        f"{row['model'].upper()} on {_card_size(row)}" for row in shown if row["run"] < newest and _gpus([row], results) not in gpus
    )]  # fmt: skip
    note = f" Measured with an earlier version: {', '.join(older)}." if older else ""
    return f"{table}\n\n{closing}{note} {above_plan(results)}"


def card_predictions(results: Mapping[str, Any]) -> str:
    """Return a table of bench/results/cards.json for the cards that stream layers, and a sentence on the others."""
    rows = [row for row in _latest_cards(results) if "predicted_tok_s" in row]
    lines = [["model", "card", "GPU", "predicted tokens/s", "measured", "difference"], ["---"] * 3 + ["---:"] * 3]
    resident = []
    for row in rows:
        share = 100 * (row["predicted_tok_s"] / row["tok_s"] - 1)
        if not row["streamed_gib"]:
            resident.append(share)
            continue
        head = {"int8": "8-bit head", "full": "full head"}[row["chosen_head"]]
        lines.append([
            row["model"].upper(), f"{_card_size(row)}, {head}", _gpu(row, results), f"{row['predicted_tok_s']:.0f}",
            f"{row['tok_s']:.0f}",
            f"{share:+.0f} %",
        ])  # fmt: skip
    table = "\n".join(f"| {' | '.join(cells)} |" for cells in lines)
    return (
        f"{table}\n\n{_gpus(rows, results)}, cards that stream layers. On the {len(resident)} others, which hold the "
        f"whole decoder, the predictions differ by {min(resident):+.0f} to {max(resident):+.0f} % (`bench/results/cards.json`).\n"
    )


def _since(row: Mapping[str, Any]) -> str:
    return f"; {row['since']}" if "since" in row else ""


def above_plan(results: Mapping[str, Any]) -> str:
    """Return the sentence that names each case whose process took more than its plan, by at least a MiB."""
    rows = [row for row in _latest_cards(results) if "planned_gib" in row]
    above = [row for row in rows if row["process_gib"] - row["planned_gib"] >= 2**-10]
    if not above:
        return "No process took more memory than its plan.\n"
    named = "; ".join(
        f"{row['model'].upper()} on {_card_size(row)} took {row['process_gib']:.3f} GiB, and its plan counts "
        f"{row['planned_gib']:.3f} ({(row['process_gib'] - row['planned_gib']) * 2**10:.0f} MiB more{_since(row)})"
        for row in above
    )
    return f"Of {len(rows)} measured processes, {len(above)} took more memory than planned: {named}.\n"


def link_limit(results: Mapping[str, Any]) -> str:
    """Return the sentence on E4B below 4 GiB, from the latest row of each size that streams layers in bench/results/cards.json."""
    latest = {row["card_gib"]: row for row in results["rows"] if row["model"] == "e4b" and 0 < row["card_gib"] < 4}
    # A few copied layers cost nothing where their copies end before the step's computing does.
    whole: dict[str, float] = {}
    for row in results["rows"]:
        if row["model"] == "e4b" and "predicted_tok_s" in row:
            gpu = _gpu(row, results)
            whole[gpu] = max(whole.get(gpu, 0.0), row["tok_s"])
    speeds = {
        size: row["tok_s"] for size, row in latest.items()
        if row["streamed_gib"] > 0 and row["tok_s"] < 0.9 * whole[_gpu(row, results)]
    }  # fmt: skip
    least, most = min(speeds), max(speeds)
    gpus = " and ".join(sorted({_gpu(latest[size], results) for size in (least, most)}))
    return (
        f"- On {most:g} GiB and less, E4B's decoder does not fit the card, and the link limits the speed: "
        f"{speeds[least]:.0f} tokens per second at {least:g} GiB,\n  {speeds[most]:.0f} at {most:g} GiB ({gpus}).\n"
    )


def install_size(results: Mapping[str, Any]) -> str:
    """Return the sentence on what an installation on Linux takes, from bench/results/install_size.json."""
    usual, cpu = (f"{results[name]['bytes'] / 1e9:.1f} GB" for name in ("usual", "cpu"))
    return (
        f"An installation on Linux takes {usual}, almost all of it torch with its CUDA libraries, and {cpu} with torch's CPU "
        f"build\n(measured with torch {results['usual']['versions']['torch']} and {results['cpu']['versions']['torch']}).\n"
    )


def start(results: Mapping[str, Any]) -> str:
    """Return the table of bench/results/start.json: seconds of the first process that sees a model, and of the next one."""
    seconds = {row["what"]: row["s"] for row in results["rows"]}
    lines = [["start", "first process, s", "next process, s"], ["---", "---:", "---:"]]
    for what in dict.fromkeys(name.rpartition(", ")[0] for name in seconds if ", " in name):
        both = (seconds[f"{what}, {when}"] for when in ("unseen", "seen"))
        lines.append([what, *(f"{one:.2f}" if one < 1 else f"{one:.1f}" for one in both)])
    table = "\n".join(f"| {' | '.join(cells)} |" for cells in lines)
    about = results["about"]
    packages = ", ".join(f"{name} {release}" for name, release in about["versions"].items())
    closing = (
        f"{about['gpu']}, {about['model'].upper()}'s size with random weights, {about['gpu_memory']}, files in the page cache, "
        f"{about['runs']} run each; Python {about['python']}, {packages}."
    )
    parts = "; ".join(f"{name} {spent:.1f}" for name, spent in results["parts"]["parts"].items() if spent >= 0.05)
    return f"{table}\n\n{closing}\n\nParts of the worker's start in one more server, in seconds, sampled: {parts}.\n"


def together(results: Mapping[str, Any]) -> str:
    """Return the table of bench/results/together.json: steps of many rows and passes of prompts, packed and unpacked."""
    found = {
        (row["what"], row.get("rows", row.get("tokens")), row.get("adapters", row.get("prompts")), row["unpacked"]): row["ms"]
        for row in results["rows"]
        if "least" not in row
    }
    lines = [["what", "packed ms", "unpacked ms"], ["---", "---:", "---:"]]
    for what, first, second, unpacked in found:
        if unpacked and (what, first, second, False) in found:
            words = {
                "step": f"step of {first} rows, {second or 'no'} adapters",
                "alone": f"prompt of {first} tokens alone",
                "together": f"{second} prompts of {first} tokens in one pass",
            }[what]
            lines.append([words, *(f"{found[what, first, second, kept]:.1f}" for kept in (False, True))])
    table = "\n".join(f"| {' | '.join(cells)} |" for cells in lines)
    where = results["environment"]
    packages = ", ".join(f"{name} {where[name]}" for name in ("torch", "transformers", "bitsandbytes", "peft"))
    return (
        f"{table}\n\n{where['gpu']}, E4B's size with random weights, nf4-dq, adapters of rank 8, rows of 512 tokens; Python "
        f"{where['python']}, {packages}.\n\n" + "".join(f"- {note}\n" for note in results["notes"])
    )


# Model, GiB of the card, head, and how often each copy is issued.
SMALL_CARDS = (
    ("e2b", 2, "auto", 1), ("e2b", 2.5, "auto", 1), ("e4b", 3.2, "auto", 1), ("e4b", 4, "auto", 1), ("e4b", 4, "full", 1),
    ("e4b", 4, "full", 4), ("e4b", 6, "full", 1), ("qwen3-8b", 5, "auto", 1),
)  # fmt: skip
MAKERS = {
    "alarms": alarms,
    "cards": cards,
    "small_cards": small_cards,
    "link_limit": link_limit,
    "card_predictions": card_predictions,
    "above_plan": above_plan,
    "install_size": install_size,
    "memory": memory,
    "decode": decode,
    "bridge": bridge,
    "lanes": lanes,
    "load": load,
    "load_text": load,
    "load_mixed": load,
    "load_short": load,
    "load_many": load,
    "load_llama_cpu": load,
    "load_qwen": load,
    "together": together,
    "start": start,
    **benchmark_tables.MAKERS,
}


# A table that is made of another one's results.
SOURCES = dict.fromkeys(("small_cards", "link_limit", "card_predictions", "above_plan"), "cards") | benchmark_tables.SOURCES


def filled(text: str) -> str:
    """Return the text with every slot filled from the result file of its name."""

    def fill(slot: re.Match[str]) -> str:
        name = slot.group(2)
        file = RESULTS / f"{SOURCES.get(name, name)}.json"
        if not file.is_file():
            return f"{slot.group(1)}Not measured yet: `make bench` on a machine with a GPU fills this in.\n{slot.group(3)}"
        return slot.group(1) + MAKERS[name](json.loads(file.read_text(encoding="utf-8"))) + slot.group(3)

    return SLOT.sub(fill, text)


def main(arguments: list[str]) -> int:
    """Return 0 if every page says what the results say."""
    from tools.pages import write_or_check

    return write_or_check(
        PAGES, filled, arguments, is_wrong="does not say what bench/results says; run: python tools/readme_numbers.py"
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
