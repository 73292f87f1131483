"""The proof of the verdicts: right merges and right routes that must not alarm, planted faults that must.

`python -m tests.alarms --save bench/results/alarms.json` runs it whole; tests/test_alarms.py runs a part in the default
suite and the whole under -m slow. Every case is drawn from one seed, so a run can be repeated.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import shutil
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests import merging, pico
from trimtab.checkpoint.folder import read_checkpoint
from trimtab.merge import merge
from trimtab.merge.check import check_files
from trimtab.merge.report import MergeCheck
from trimtab.proof import criterion
from trimtab.proof.report import ParityReport
from trimtab.proof.verify import verify
from trimtab.proof.versions import versions

DEMO = Path(__file__).parent.parent / "trimtab" / "demo"
DEMO_ADAPTERS = ("style", "specialist", "rslora-dora")
EXPERTS = ("mixtral", "qwen3_moe", "gemma4_moe")
# Family -> how often it is drawn: the largest take most of the time.
FAMILIES = {
    "demo": 2, "llama": 5, "qwen3": 5, "gemma3": 2, "gemma4": 1, "gemma4_dense": 3, "gemma3n": 1, "qwen2_5_vl": 3,
    "qwen3_vl": 3, "mistral3": 4, "mixtral": 2, "qwen3_moe": 2, "gemma4_moe": 2,
}  # fmt: skip
NEW_TOKENS = 3
SEED = 20_000


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


@contextmanager
def cpu_threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


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


def scale_b(tensors: dict[str, Tensor], factor: float, key: str | None = None) -> None:
    for name, tensor in tensors.items():
        if ("lora_B" in name or "lora_embedding_B" in name) and (key is None or key in name):
            tensors[name] = tensor.float() * factor


def change_config(folder: Path, change: Callable[[dict[str, Any]], Any]) -> Path:
    config = json.loads((folder / "adapter_config.json").read_text())
    change(config)
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder


def change_tensors(folder: Path, change: Callable[[dict[str, Tensor]], Any]) -> Path:
    """Let `change` alter the tensors of an adapter or of a checkpoint's first file."""
    file = sorted(folder.glob("*.safetensors"))[0]
    with safe_open(file, "pt") as opened:
        metadata = opened.metadata()
    tensors = load_file(file)
    change(tensors)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, file, metadata=metadata)
    return folder


def merged_by(case: Right, base: Path, adapter: Path, out: Path) -> Path:
    """Merge as the case says, and return the folder."""
    with cpu_threads(case.threads[0]):
        if case.route == "trimtab":
            merge(base, out, adapters={"a": adapter}, dtype=case.dtype, requantize=case.requantize)
            return out
        shutil.copytree(base, out)
        model = merging.load(base)
        from peft import PeftModel

        loaded = PeftModel.from_pretrained(model, adapter, autocast_adapter_dtype=case.route == "peft")
        if case.route == "bfloat16":
            merge_in_bfloat16(loaded)
            model = loaded.unload()
        else:
            model = loaded.merge_and_unload()
        model.save_pretrained(out)
        return out


def merge_in_bfloat16(model: Any) -> None:
    """Add every change with all arithmetic in bfloat16, rounding factors, product, scaled product and sum."""
    with torch.no_grad():
        for module in model.modules():
            if hasattr(module, "lora_A") and "default" in module.lora_A:
                A, B = (getattr(module, name)["default"].weight.bfloat16() for name in ("lora_A", "lora_B"))
                module.get_base_layer().weight += (B @ A) * module.scaling["default"]


def recheck(base: Path, adapter: Path, out: Path, case: Right) -> MergeCheck:
    """Return what `merge --check` finds in a folder that should be this merge, whoever wrote it."""
    from trimtab.merge.merge import _prepare
    from trimtab.merge.request import MergeRequest, parts_of

    request = MergeRequest(
        model=str(base), out=str(out), adapters=parts_of({"a": adapter}), dtype=case.dtype, requantize=case.requantize
    )
    with cpu_threads(case.threads[1]), ExitStack() as stack:
        return check_files(_prepare(request, read_checkpoint(base), stack), read_checkpoint(out))


def answers(base: Path, adapter: Path, out: Path, case: Right, **options: Any) -> ParityReport:
    """Return what `verify` says of a merged folder, on two random prompts."""
    draw = random.Random(case.seed)
    if case.family == "demo":
        prompts: list[dict[str, Any]] = [
            {"id": "q", "text": "Who rules Lorienth?"},
            {"id": "w", "text": "Where is Anor?"},
        ]
    else:
        prompts = [
            {"id": name, "token_ids": [draw.randrange(3, 300) for _ in range(draw.randrange(6, 14))]}
            for name in ("one", "two")
        ]  # fmt: skip
    with cpu_threads(case.threads[2]):
        return verify(
            base,
            adapters={"a": adapter},
            against=out,
            prompts=prompts,
            new_tokens=NEW_TOKENS,
            isolated=False,
            **options,
        )


def ratios(report: ParityReport) -> dict[str, float]:
    """Return the largest share of its limit that each measure reached."""
    found = dict.fromkeys(criterion.MEASURES, 0.0)
    for row in report.prompts:
        limit = report.floor.limits[row.id]
        for name in found:
            found[name] = max(found[name], getattr(row.difference, name) / getattr(limit, name))
    return found


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


@contextmanager
def quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


# Faults of a merge ----------------------------------------------------------------------------------------------------


def _keys(tensors: Mapping[str, Tensor]) -> list[str]:
    return sorted(name.removesuffix(".lora_A.weight") for name in tensors if name.endswith(".lora_A.weight"))


def scale_off(adapter: Path) -> None:
    change_config(adapter, lambda config: config.update(lora_alpha=config["lora_alpha"] * 1.01))


def scale_off_down(adapter: Path) -> None:
    change_config(adapter, lambda config: config.update(lora_alpha=config["lora_alpha"] * 0.99))


def module_dropped(adapter: Path) -> None:
    change_tensors(adapter, lambda tensors: scale_b(tensors, 0.0, _keys(tensors)[0]))


def module_transposed(adapter: Path) -> None:
    def turn(tensors: dict[str, Tensor]) -> None:
        square = next(
            key for key in _keys(tensors)
            if tensors[f"{key}.lora_A.weight"].shape[1] == tensors[f"{key}.lora_B.weight"].shape[0]
        )  # fmt: skip
        a, b = tensors[f"{square}.lora_A.weight"], tensors[f"{square}.lora_B.weight"]
        tensors[f"{square}.lora_A.weight"], tensors[f"{square}.lora_B.weight"] = b.T.clone(), a.T.clone()

    change_tensors(adapter, turn)


def modules_swapped(adapter: Path) -> None:
    def swap(tensors: dict[str, Tensor]) -> None:
        by_shape: dict[Any, list[str]] = {}
        for key in _keys(tensors):
            shapes = tensors[f"{key}.lora_A.weight"].shape, tensors[f"{key}.lora_B.weight"].shape
            by_shape.setdefault(shapes, []).append(key)
        one, other = next(keys for keys in by_shape.values() if len(keys) > 1)[:2]
        for role in ("lora_A", "lora_B"):
            first, second = f"{one}.{role}.weight", f"{other}.{role}.weight"
            tensors[first], tensors[second] = tensors[second].clone(), tensors[first].clone()

    change_tensors(adapter, swap)


def rule_of_scale(adapter: Path) -> None:
    change_config(adapter, lambda config: config.update(use_rslora=not config.get("use_rslora")))


ADAPTER_FAULTS: Mapping[str, Callable[[Path], None]] = {
    "scale 1 % too large": scale_off, "scale 1 % too small": scale_off_down, "one module dropped": module_dropped,
    "one module transposed": module_transposed, "two modules swapped": modules_swapped,
    "alpha / r for alpha / sqrt(r), or the reverse": rule_of_scale,
}  # fmt: skip
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
        if case.requantize is None:
            return Path(shutil.copytree(base, out))
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
        check = recheck(base, adapter, out, case)
        row: dict[str, Any] = {
            "fault": fault, "case": asdict(case), "check": "MISSED" if check.passed else "alarm", "slopes": check.slopes,
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


# Two routes -----------------------------------------------------------------------------------------------------------

AGAINST = ("resident", "single", "alone", "eager", "stock")
ROUTE_FAMILIES = ("llama", "qwen3", "gemma3", "gemma4", "mixtral")


def route_cases(seeds: int) -> list[tuple[str, str, int]]:
    """Return (family, against, seed) of right routes."""
    return [
        (family, against, seed)
        for family in ROUTE_FAMILIES for against in AGAINST for seed in range(seeds)
        # PEFT cannot load adapters of stacked experts on every release that is supported.
        if (family, against) != ("mixtral", "stock")
    ]  # fmt: skip


def judge_route(family: str, against: str, seed: int, fault: str | None = None) -> dict[str, Any]:
    """Return the verdict on two routes. fault: what is wrong with the files that the second route reads."""
    import importlib

    # The module: the package's function of this name stands before it.
    module = importlib.import_module("trimtab.proof.verify")
    own = module.case_of
    with tempfile.TemporaryDirectory(prefix="trimtab-alarms-") as folder, quiet():
        work = Path(folder)
        base = pico.build(family, work / "base", seed=seed)
        adapters = {"a": pico.adapter(base, work / "a", seed=seed)}
        if against == "alone":
            adapters["b"] = pico.adapter(base, work / "b", seed=seed + 50)

        def harmed(*args: Any) -> Any:
            case = own(*args)
            wrong = change_tensors(Path(shutil.copytree(base, work / "wrong")), ROUTE_FAULTS[str(fault)])
            return replace(case, subject=replace(case.subject, request=replace(case.subject.request, model=str(wrong))))

        module.case_of = harmed if fault is not None else own
        draw = random.Random(seed)
        prompts = [
            {"id": name, "token_ids": [draw.randrange(3, 300) for _ in range(draw.randrange(6, 14))]}
            for name in ("one", "two")
        ]  # fmt: skip
        try:
            with cpu_threads(1 + seed % 2):
                report = verify(
                    base, adapters=adapters, against=against, quant="nf4" if against == "stock" else "none",
                    prompts=prompts, new_tokens=NEW_TOKENS, isolated=False,
                )  # fmt: skip
        finally:
            module.case_of = own
    return {
        "family": family, "against": against, "seed": seed, "fault": fault, "verify": report.verdict, "alarm": not report.ok,
        "ratios": ratios(report),
    }  # fmt: skip


def _weight(tensors: Mapping[str, Tensor], ending: str) -> str:
    return next(
        name for name in sorted(tensors) if name.endswith(ending) and "vision" not in name and "audio" not in name
    )


def weight_dropped(tensors: dict[str, Tensor]) -> None:
    tensors[_weight(tensors, "o_proj.weight")].zero_()


def weight_transposed(tensors: dict[str, Tensor]) -> None:
    name = _weight(tensors, "layers.0.self_attn.v_proj.weight")  # square in every family here
    tensors[name] = tensors[name].T.clone()


def weights_swapped(tensors: dict[str, Tensor]) -> None:
    one, other = (_weight(tensors, f"layers.{layer}.self_attn.o_proj.weight") for layer in (0, 1))
    tensors[one], tensors[other] = tensors[other].clone(), tensors[one].clone()


def norm_off(tensors: dict[str, Tensor]) -> None:
    tensors[_weight(tensors, "post_attention_layernorm.weight")].add_(0.5)  # Gemma 3 stores a norm less 1


ROUTE_FAULTS: Mapping[str, Callable[[dict[str, Tensor]], None]] = {
    "one weight dropped": weight_dropped, "one v_proj transposed": weight_transposed,
    "two layers' weights swapped": weights_swapped, "one norm off by a half": norm_off,
}  # fmt: skip


def judge_demo(seed: int, harm: bool) -> dict[str, Any]:
    """Return the demo's verdict on last bits that another kernel gave, or on a weight that is wrong."""
    import trimtab
    from trimtab.demo import line
    from trimtab.errors import ParityError
    from trimtab.proof.forced import rounded_layers

    options: dict[str, Any] = {"context": 256, "images": 1, "audio_s": 1.0, "place": {"*": "resident"}, "device": "cpu"}
    plan = trimtab.plan(DEMO / "base", **options)
    asks = [ask for ask in line.read_asks([]) if ask.adapter is None]
    with quiet(), trimtab.load(plan) as model:
        expected = [model.logits(ask.prompt, **ask.media) for ask in asks]
        if harm:
            paths = {getattr(m, "module_path", ""): m for m in model.hf_model.modules()}
            endings = f"language_model.layers.{seed}.self_attn.o_proj"
            leaf = next(m for path, m in paths.items() if path.endswith(endings))
            forward = type(leaf).forward
            leaf.forward = lambda x: 0 * forward(leaf, x)
            logits = [model.logits(ask.prompt, **ask.media) for ask in asks]
        else:
            # The draws of the judge have the seeds 1 to 8.
            with rounded_layers(model.hf_model, 100 + seed):
                logits = [model.logits(ask.prompt, **ask.media) for ask in asks]
    try:
        verdict = line._judge(plan, asks, logits, expected, lambda text: None)[0]
    except ParityError:
        verdict = "differs"
    return {"seed": seed, "harm": harm, "verdict": verdict, "alarm": verdict == "differs"}


# The whole ------------------------------------------------------------------------------------------------------------


def upper_bound(alarms: int, count: int) -> float:
    """Return the rate that a run with so few alarms rules out with 95 % confidence (Clopper and Pearson; exact for 0)."""
    low, high = alarms / count, 1.0
    for _ in range(60):
        middle = (low + high) / 2
        below = sum(math.comb(count, k) * middle**k * (1 - middle) ** (count - k) for k in range(alarms + 1))
        low, high = (middle, high) if below > 0.05 else (low, middle)
    return high


Task = tuple[str, tuple[Any, ...], dict[str, Any]]


def tasks(rights: int, faulty: int, with_answers: int, route_seeds: int, demo_seeds: int) -> list[Task]:
    """Return every case as (function, arguments); with_answers: of the faulty merges, how many `verify` judges as well."""
    found: list[Task] = [("judge_right", (case,), {}) for case in right_merges(rights)]
    # What PEFT merged has no check of files: with these there are as many of those as of the others.
    found += [
        ("judge_right", (case,), {"with_answers": False}) for case in right_merges(rights // 3, SEED + 2, own=True)
    ]
    found += [
        ("judge_fault", (case, fault), {"with_answers": place < with_answers})
        for place, case in enumerate(fault_cases(faulty)) for fault in FAULTS
    ]  # fmt: skip
    found += [("judge_route", at, {}) for at in route_cases(route_seeds)]
    found += [
        ("judge_route", (family, "resident", seed, fault), {})
        for family in ROUTE_FAMILIES[:4] for seed in range(route_seeds) for fault in ROUTE_FAULTS
    ]  # fmt: skip
    return found + [("judge_demo", (seed, harm), {}) for seed in range(demo_seeds) for harm in (False, True)]


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
    rows: dict[str, Rows] = {name: [] for name in ("judge_right", "judge_fault", "judge_route", "judge_demo")}
    for task in work:
        rows[task[0]].append(known[repr(task)])
    routes = [row for row in rows["judge_route"] if row["fault"] is None]
    harmed = [row for row in rows["judge_route"] if row["fault"] is not None]
    found = summary(rows["judge_right"], rows["judge_fault"], routes, harmed, rows["judge_demo"])
    is_resumed = len(left) < len(work)
    return found | {"seconds": None if is_resumed else round(time.monotonic() - started), "workers": workers}


Rows = list[dict[str, Any]]


def summary(rights: Rows, faults: Rows, routes: Rows, harmed: Rows, demo: Rows) -> dict[str, Any]:
    """Return the counts that the docs state, and the rows they are of."""
    checked = [row for row in rights if "check" in row]
    judged = [row for row in rights if "verify" in row]
    plain = [row for row in faults if "verify" in row and row["case"]["requantize"] is None]
    packed = [row for row in faults if "verify" in row and row["case"]["requantize"] is not None]
    quiet_demo, harmed_demo = ([row for row in demo if row["harm"] is harm] for harm in (False, True))
    return {
        "versions": versions(), "seed": SEED, "false_alarm_rate": criterion.FALSE_ALARM_RATE, "margin": criterion.MARGIN,
        "right": {
            "merge_check": _counts(checked, lambda row: row["check"] != "passed"),
            "verify_merged": _counts(judged, lambda row: row["alarm"]),
            "verify_routes": _counts(routes, lambda row: row["alarm"]),
            "demo": _counts(quiet_demo, lambda row: row["alarm"]),
            "verdicts": dict(Counter(row["verify"] for row in judged)),
            "largest_share_of_limit": {
                name: max(row["ratios"][name] for row in [*judged, *routes]) for name in criterion.MEASURES
            },
            "weights_slope": [
                min(row["weights"]["slope"] for row in judged if not row["case"]["requantize"]),
                max(row["weights"]["slope"] for row in judged if not row["case"]["requantize"]),
            ],
        },
        "faults": {
            "merge_check": _by_fault(faults, lambda row: row["check"] == "alarm"),
            "verify_merged": _by_fault(plain, lambda row: row["alarm"]),
            "verify_merged_4bit": _by_fault(packed, lambda row: row["alarm"]),
            "verify_routes": _by_fault(harmed, lambda row: row["alarm"]),
            "demo": {"one weight dropped": [sum(row["alarm"] for row in harmed_demo), len(harmed_demo)]},
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
    """Return the whole proof: 20 CPU-minutes."""
    return run(tasks(220, 15, 5, 1, 3), workers=workers, kept=kept, say=say)


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
