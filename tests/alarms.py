"""The proof of the verdicts: right merges and right routes that must not alarm, planted faults that must.

`python -m tests.alarms --save bench/results/alarms.json` runs it whole; tests/verification/routes/test_alarms.py runs a part in the
default suite and the whole under -m slow. Every case is drawn from one seed, so a run can be repeated.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch

from tests import alarm_routes, merged_models, pico
from tests.alarm_faults import ADAPTER_FAULTS, change_config, change_tensors, cpu_threads, quiet, scale_b
from tests.alarm_routes import judge_demos, judge_route, ratios, upper_bound  # noqa: F401 - judged by name
from trimtab.checkpoint.folder import read_checkpoint
from trimtab.merging import merge
from trimtab.merging.check import check_files
from trimtab.merging.report import MergeCheck
from trimtab.process.packages import stack_versions
from trimtab.stock.unsplit import load_unsplit
from trimtab.verification.render.report import ParityReport
from trimtab.verification.routes import alarm_rate
from trimtab.verification.verify import verify

DEMO = Path(__file__).parent.parent / "trimtab" / "demo"
DEMO_ADAPTERS = ("style", "specialist", "rslora-dora")
EXPERTS = ("mixtral", "qwen3_moe", "gemma4_moe")
# Family -> how often it is drawn: the largest take most of the time.
FAMILIES = {
    "demo": 2, "llama": 5, "qwen3": 5, "gemma3": 2, "gemma4": 1, "gemma4_dense": 3, "gemma3n": 1, "qwen2_5_vl": 3,
    "qwen3_vl": 3, "mistral3": 4, "mixtral": 2, "qwen3_moe": 2, "gemma4_moe": 2,
}  # fmt: skip
NEW_TOKENS = 3
# Of the merges that bitsandbytes packed, how many have faults planted in them: one of each form.
STOCK_FAULTY = 4
SEED = 20_000
# How all of it is judged again.
RERUN = "python -m tests.alarms --save bench/results/alarms.json --workers 2"


@dataclass(frozen=True)
class Right:
    """One right merge. route: who merges: trimtab, PEFT, or bfloat16 arithmetic as a GPU does it. threads: of merge, check
    and verify. strength: factor on the random adapter's B."""

    family: str
    seed: int
    base_dtype: str
    route: str
    rank: int
    alpha: float
    strength: float
    rslora: bool
    dora: bool
    embeddings: bool
    targets: str
    dtype: str | None
    requantize: str | None
    threads: tuple[int, int, int]


def right_merges(count: int, seed: int = SEED, *, own: bool = False) -> list[Right]:
    """Return right merges drawn at random: families, dtypes, adapters, outputs, routes (own: trimtab's alone), threads."""
    draw = random.Random(seed)
    cases = []
    for place in range(count):
        family = draw.choice([family for family, times in FAMILIES.items() for _ in range(times)])
        route = "trimtab" if own or family in EXPERTS else draw.choice(("trimtab",) * 4 + ("peft", "bfloat16"))
        base_dtype = "bfloat16" if family == "demo" else draw.choice(("bfloat16", "bfloat16", "float16", "float32"))
        if route == "bfloat16":
            base_dtype = "bfloat16"
        is_plain = route != "trimtab"
        cases.append(
            Right(
                family=family, seed=place + 1000 * own, base_dtype=base_dtype, route=route, rank=draw.choice((1, 2, 4, 8, 16, 32)),
                alpha=draw.choice((1, 2, 8, 16, 24.5, 64)), strength=draw.choice((0.03, 0.3, 1.0, 1.0, 3.0)),
                rslora=draw.random() < 0.3, dora=not is_plain and family not in EXPERTS and draw.random() < 0.25,
                embeddings=not is_plain and family in ("llama", "qwen3") and draw.random() < 0.3,
                targets="text" if family == "demo" or is_plain else draw.choice(("text", "text", "all")),
                dtype=None if is_plain else draw.choice((None, None, None, "float32", "float16", "bfloat16")),
                requantize=None if is_plain else draw.choice((None, None, None, "nf4", "nf4-dq")),
                threads=(draw.choice((1, 2, 3, 4)), draw.choice((1, 2, 3, 4)), draw.choice((1, 2))),
            )
        )  # fmt: skip
    return [replace(case, dtype=None) if case.requantize else case for case in cases]


STOCK_FORMS = ("nf4", "nf4-dq", "fp4", "int8")


def stock_merges(count: int, seed: int = SEED) -> list[Right]:
    """Return right merges of PEFT's, packed by bitsandbytes: codes that trimtab did not choose."""
    draw = random.Random(seed + 3)
    return [
        Right(
            family=draw.choice(("llama", "qwen3", "mistral3")), seed=2000 + place, base_dtype=draw.choice(("bfloat16", "float16")),
            route=draw.choice(("peft", "bfloat16")) if place % 2 else "peft", rank=draw.choice((2, 4, 8, 16)),
            alpha=draw.choice((8, 16, 24.5)), strength=draw.choice((0.3, 1.0, 3.0)) if place >= STOCK_FAULTY else 1.0,
            rslora=draw.random() < 0.3, dora=False, embeddings=False, targets="text", dtype=None,
            requantize=STOCK_FORMS[place % len(STOCK_FORMS)], threads=(draw.choice((1, 2)), 1, draw.choice((1, 2))),
        )
        for place in range(count)
    ]  # fmt: skip


def base_of(case: Right, work: Path) -> Path:
    """Return the base's folder; the demo's is the bundled one."""
    if case.family == "demo":
        return DEMO / "base"
    return pico.build(case.family, work / "base", seed=case.seed % 7, dtype=case.base_dtype)


def adapter_of(case: Right, base: Path, folder: Path, *, seed: int | None = None) -> Path:
    """Return the case's adapter: random, or for some demo cases a trained one."""
    if case.family == "demo" and seed is None and case.route == "trimtab" and case.seed % 2 == 0:
        return Path(shutil.copytree(DEMO / "adapters" / DEMO_ADAPTERS[case.seed // 2 % 3], folder))
    pico.adapter(
        base, folder, targets=case.targets, rank=case.rank, rslora=case.rslora, dora=case.dora,
        embeddings=case.embeddings, seed=case.seed if seed is None else seed,
    )  # fmt: skip
    change_config(folder, lambda config: config.update(lora_alpha=case.alpha))
    change_tensors(folder, lambda tensors: scale_b(tensors, case.strength))
    return folder


def merged_by(case: Right, base: Path, adapter: Path, out: Path) -> Path:
    """Merge as the case says, and return the folder."""
    with cpu_threads(case.threads[0]):
        if case.route == "trimtab":
            merge(base, out, adapters={"a": adapter}, dtype=case.dtype, requantize=case.requantize)
            return out
        shutil.copytree(base, out)
        model = merged_models.load(base)
        from peft import PeftModel

        loaded = PeftModel.from_pretrained(model, adapter, autocast_adapter_dtype=case.route == "peft")
        if case.route == "bfloat16":
            merge_in_bfloat16(loaded)
            model = loaded.unload()
        else:
            model = loaded.merge_and_unload()
        model.save_pretrained(out)
        return stock_packed(out, case) if case.requantize else out


def stock_packed(folder: Path, case: Right) -> Path:
    """Pack a merged folder with transformers and bitsandbytes, in place, and return it."""
    plain = folder.rename(folder.with_name(f"{folder.name}-plain"))
    load_unsplit(str(plain), str(case.requantize), case.base_dtype, "cpu").save_pretrained(folder)
    return folder


def merge_in_bfloat16(model: Any) -> None:
    """Add every change with all arithmetic in bfloat16, rounding factors, product, scaled product and sum."""
    with torch.no_grad():
        for module in model.modules():
            if hasattr(module, "lora_A") and "default" in module.lora_A:
                A, B = (getattr(module, name)["default"].weight.bfloat16() for name in ("lora_A", "lora_B"))
                module.get_base_layer().weight += (B @ A) * module.scaling["default"]


def recheck(base: Path, adapter: Path, out: Path, case: Right) -> MergeCheck:
    """Return what `merge --check` finds in a folder that should be this merge, whoever wrote it."""
    from trimtab.merging.changes.request import MergeRequest, parts_of
    from trimtab.merging.merge import _prepare

    request = MergeRequest(
        model=str(base), out=str(out), adapters=parts_of({"a": adapter}), dtype=case.dtype, requantize=case.requantize
    )
    with cpu_threads(case.threads[1]), ExitStack() as stack:
        return check_files(_prepare(request, read_checkpoint(base), stack), read_checkpoint(out))


def answers(base: Path, adapter: Path, out: Path, case: Right, **options: Any) -> ParityReport:
    """Return what `verify` says of a merged folder, on two random prompts."""
    draw = random.Random(case.seed)
    if case.family == "demo":
        prompts: list[dict[str, Any]] = [{"id": "q", "text": "Who rules Lorienth?"}, {"id": "w", "text": "Where is Anor?"}]
    else:
        prompts = [
            {"id": name, "token_ids": [draw.randrange(3, 300) for _ in range(draw.randrange(6, 14))]}
            for name in ("one", "two")
        ]  # fmt: skip
    with cpu_threads(case.threads[2]):
        return verify(base, adapters={"a": adapter}, against=out, prompts=prompts, new_tokens=NEW_TOKENS, isolated=False, **options)


def judge_right(case: Right, *, with_answers: bool = True) -> dict[str, Any]:
    """Return the verdicts on one right merge."""
    with tempfile.TemporaryDirectory(prefix="trimtab-alarms-") as folder, quiet():
        work = Path(folder)
        base = base_of(case, work)
        adapter = adapter_of(case, base, work / "adapter")
        out = merged_by(case, base, adapter, work / "merged")
        row: dict[str, Any] = {"case": asdict(case)}
        if case.route == "trimtab":
            check = recheck(base, adapter, out, case)
            row |= {
                "check": "passed" if check.passed else "ALARM", "error_ulps": check.error_ulps, "slopes": check.slopes,
                "blind": len(check.blind), "changed": len(check.changed),
            }  # fmt: skip
        if with_answers:
            report = answers(base, adapter, out, case)
            row |= {
                "verify": report.verdict, "alarm": not report.ok, "ratios": ratios(report),
                "weights": report.weights.to_json() | {"modules": len(report.weights.modules)} if report.weights else None,
                "findings": list(report.findings),
            }  # fmt: skip
        return row


# Faults of a merge ----------------------------------------------------------------------------------------------------


FAULTS = (*ADAPTER_FAULTS, "another adapter's values", "merged twice", "nothing merged")


def fault_cases(count: int, seed: int = SEED) -> list[Right]:
    """Return merges to plant faults in: every dtype and form; rank above 1, for at 1 both rules of scale are one."""
    draw = random.Random(seed + 1)
    forms = [("bfloat16", None), ("float16", None), ("float32", None), ("bfloat16", "nf4"), ("bfloat16", "nf4-dq")]
    cases = []
    for place in range(count):
        base_dtype, requantize = forms[place % len(forms)]
        cases.append(
            Right(
                family=draw.choice(("llama", "qwen3", "gemma3", "gemma4", "mistral3", "qwen3_vl")), seed=place,
                base_dtype=base_dtype, route="trimtab", rank=draw.choice((2, 4, 8, 16)), alpha=draw.choice((8, 16, 24.5)),
                strength=1.0, rslora=draw.random() < 0.3, dora=False, embeddings=False, targets="text", dtype=None,
                requantize=requantize,
                threads=(draw.choice((1, 2, 4)), draw.choice((1, 2, 4)), draw.choice((1, 2))),
            )
        )  # fmt: skip
    return cases


def faulty_merge(case: Right, fault: str, base: Path, adapter: Path, work: Path) -> Path:
    """Return a folder that should hold the merge of `adapter` and holds a fault."""
    out = work / "faulty"
    if fault == "nothing merged":
        if case.requantize is None or case.route != "trimtab":
            copy = Path(shutil.copytree(base, out))
            return stock_packed(copy, case) if case.requantize else copy
        merge(base, out, requantize=case.requantize)
        return out
    if fault == "merged twice":
        once = merged_by(replace(case, requantize=None), base, adapter, work / "once")
        return merged_by(case, once, adapter, out)
    wrong = Path(shutil.copytree(adapter, work / "wrong"))
    if fault == "another adapter's values":
        wrong = adapter_of(case, base, work / "another", seed=case.seed + 1000)
    else:
        ADAPTER_FAULTS[fault](wrong)
    return merged_by(case, base, wrong, out)


def judge_fault(case: Right, fault: str, *, with_answers: bool = True) -> dict[str, Any]:
    """Return the verdicts on one planted fault."""
    with tempfile.TemporaryDirectory(prefix="trimtab-alarms-") as folder, quiet():
        work = Path(folder)
        base = base_of(case, work)
        adapter = adapter_of(case, base, work / "adapter")
        out = faulty_merge(case, fault, base, adapter, work)
        row: dict[str, Any] = {"fault": fault, "case": asdict(case)}
        if case.route == "trimtab":
            check = recheck(base, adapter, out, case)
            row |= {
                "check": "MISSED" if check.passed else "alarm", "slopes": check.slopes,
                "wrong": len(check.changed) - check.applied,
            }  # fmt: skip
        if with_answers:
            report = answers(base, adapter, out, case)
            row |= {
                "verify": report.verdict, "alarm": not report.ok,
                "weights": report.weights.verdict if report.weights else None,
                "sees_scale_fault": report.weights.sees_scale_fault if report.weights else None,
            }  # fmt: skip
        return row


# The whole ------------------------------------------------------------------------------------------------------------


Task = tuple[str, tuple[Any, ...], dict[str, Any]]


def tasks(rights: int, faulty: int, with_answers: int, routes: int, demos: int) -> list[Task]:
    """Return every case as (function, arguments); with_answers: of the faulty merges, how many `verify` judges as well."""
    stock = stock_merges(rights // 10)
    found: list[Task] = [("judge_right", (case,), {}) for case in right_merges(rights)]
    # What PEFT merged has no check of files: with these there are as many of those as of the others.
    found += [("judge_right", (case,), {"with_answers": False}) for case in right_merges(rights // 3, SEED + 2, own=True)]
    found += [
        ("judge_fault", (case, fault), {"with_answers": place < with_answers})
        for place, case in enumerate(fault_cases(faulty)) for fault in FAULTS
    ]  # fmt: skip
    found += [("judge_right", (case,), {}) for case in stock]
    found += [("judge_fault", (case, fault), {}) for case in stock[:STOCK_FAULTY] for fault in FAULTS]
    found += [("judge_route", (route,), {}) for route in alarm_routes.routes(routes, SEED)]
    found += [("judge_route", given, {}) for given in alarm_routes.route_faults()]
    each = -(-demos // len(alarm_routes.DEMO_DTYPES))
    return found + [("judge_demos", (dtype, each), {}) for dtype in alarm_routes.DEMO_DTYPES]


def judge(task: Task) -> dict[str, Any]:
    """Return a task's row: runs in a process of its own."""
    name, given, options = task
    row: dict[str, Any] = json.loads(json.dumps(globals()[name](*given, **options)))
    return row


def run(
    work: Sequence[Task], *, workers: int = 1, kept: Path | None = None, say: Callable[[str], None] = lambda text: None
) -> dict[str, Any]:
    """Return everything: counts, verdicts and rows.

    workers: processes, each with the threads that a case asks for. kept: a file of rows, one a line, that a run which was
    stopped goes on from.
    """
    known = dict(map(json.loads, kept.read_text("utf-8").splitlines())) if kept is not None and kept.is_file() else {}
    left = [task for task in work if repr(task) not in known]
    started = time.monotonic()
    with ProcessPoolExecutor(workers, mp_context=get_context("spawn")) as pool:
        for task, row in zip(left, pool.map(judge, left) if workers > 1 else map(judge, left)):
            known[repr(task)] = row
            say(f"{len(known)} of {len(work)}: {task[0]} {json.dumps(row)}")
            if kept is not None:
                with kept.open("a", encoding="utf-8") as file:
                    file.write(json.dumps([repr(task), row]) + "\n")
    rows: dict[str, Rows] = {name: [] for name in ("judge_right", "judge_fault", "judge_route", "judge_demos")}
    for task in work:
        row = known[repr(task)]
        rows[task[0]] += row.get("rows", [row])
    routes = [row for row in rows["judge_route"] if row["fault"] is None]
    harmed = [row for row in rows["judge_route"] if row["fault"] is not None]
    found = summary(rows["judge_right"], rows["judge_fault"], routes, harmed, rows["judge_demos"])
    is_resumed = len(left) < len(work)
    return found | {
        "seconds": None if is_resumed else round(time.monotonic() - started), "workers": workers,
        "tasks": len(work), "kept": len(work) - len(left), "rerun": RERUN,
    }  # fmt: skip


Rows = list[dict[str, Any]]


def summary(rights: Rows, faults: Rows, routes: Rows, harmed: Rows, demo: Rows) -> dict[str, Any]:
    """Return the counts that the docs state, and the rows they are of."""
    checked = [row for row in rights if "check" in row]
    judged = [row for row in rights if "verify" in row]
    checked_faults = [row for row in faults if "check" in row]
    plain = [row for row in faults if "verify" in row and row["case"]["requantize"] is None]
    packed = [row for row in faults if "verify" in row and row["case"]["requantize"] is not None]
    packed_rights = [row for row in judged if row["case"]["requantize"] is not None]
    quiet_demo = [row for row in demo if row["fault"] is None]
    harmed_demo = [row for row in demo if row["fault"] is not None]
    return {
        "versions": stack_versions(), "seed": SEED, "false_alarm_rate": alarm_rate.FALSE_ALARM_RATE, "margin": alarm_rate.MARGIN,
        "right": {
            "merge_check": _counts(checked, lambda row: row["check"] != "passed"),
            "verify_merged": _counts(judged, lambda row: row["alarm"]),
            "verify_merged_4bit": _counts(packed_rights, lambda row: row["alarm"]),
            "verify_routes": _counts(routes, lambda row: row["alarm"]),
            "demo": _counts(quiet_demo, lambda row: row["alarm"]),
            "verdicts": dict(Counter(row["verify"] for row in judged)),
            "largest_share_of_limit": {
                name: max(row["ratios"][name] for row in [*judged, *routes]) for name in alarm_rate.MEASURES
            },
            "weights_slope": [
                min(row["weights"]["slope"] for row in judged), max(row["weights"]["slope"] for row in judged),
            ],
        },
        "faults": {
            "merge_check": _by_fault(checked_faults, lambda row: row["check"] == "alarm"),
            "verify_merged": _by_fault(plain, lambda row: row["alarm"]),
            "verify_merged_4bit": _by_fault(packed, lambda row: row["alarm"]),
            "verify_routes": _by_fault(harmed, lambda row: row["alarm"]),
            "demo": _by_fault(harmed_demo, lambda row: row["alarm"]),
        },
        "rows": {"right": rights, "faults": faults, "routes": routes, "route_faults": harmed, "demo": demo},
    }  # fmt: skip


def _counts(rows: Rows, is_alarm: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
    alarms = sum(map(is_alarm, rows))
    return {"alarms": alarms, "of": len(rows), "rate_below": upper_bound(alarms, len(rows)) if rows else None}


def _by_fault(rows: Rows, is_caught: Callable[[dict[str, Any]], bool]) -> dict[str, list[int]]:
    """Return fault -> [caught, planted]."""
    names = dict.fromkeys(row["fault"] for row in rows)
    return {
        name: [sum(is_caught(row) for row in rows if row["fault"] == name), sum(row["fault"] == name for row in rows)]
        for name in names
    }


def whole(workers: int, kept: Path | None = None, say: Callable[[str], None] = lambda text: None) -> dict[str, Any]:
    """Return the whole proof: half an hour of CPU."""
    return run(tasks(220, 15, 5, 210, 210), workers=workers, kept=kept, say=say)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--save", type=Path, required=True)
    parser.add_argument("--workers", type=int, default=1, help="processes")
    parser.add_argument("--kept", type=Path, help="rows of a run that was stopped, to go on from")
    options = parser.parse_args()
    found = whole(options.workers, options.kept, lambda text: print(text, flush=True))
    options.save.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    print(json.dumps({name: found[name] for name in ("right", "faults", "seconds")}, indent=1))


if __name__ == "__main__":
    main()
