"""The proof of the verdicts on two routes and of the demo's: right runs that must not alarm, planted faults that must be named."""

from __future__ import annotations

import importlib
import math
import random
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from torch import Tensor

import trimtab
from tests import pico
from tests.alarm_faults import ADAPTER_FAULTS, change_tensors, cpu_threads, quiet
from trimtab.demo import demo
from trimtab.errors import ParityError
from trimtab.request import LoadRequest
from trimtab.verification.render.report import ParityReport
from trimtab.verification.routes import alarm_rate
from trimtab.verification.routes.teacher_forcing import rounded_layers
from trimtab.verification.routes.trimtab_run import own_changes
from trimtab.verification.verify import verify

DEMO = demo.FOLDER
NEW_TOKENS = 3
AGAINST = ("resident", "single", "alone", "eager", "stock")
ROUTE_FAMILIES = ("llama", "qwen3", "gemma3", "gemma4", "mixtral")
# Family -> how often it is drawn: the largest take most of the time.
DRAWN = {"llama": 4, "qwen3": 4, "gemma3": 1, "gemma4": 1, "mixtral": 2, "mistral3": 2, "qwen2_5_vl": 2, "qwen3_vl": 2}
PLACES = ({}, {"*": "stream"}, {"*": "disk"}, {"*": "host"})


@dataclass(frozen=True)
class Route:
    """Two right routes. place: tiers of the one that is judged. prompts: how many, of 6 to 13 tokens each."""

    family: str
    against: str
    seed: int
    dtype: str = "bfloat16"
    threads: int = 1
    rank: int = 4
    rslora: bool = False
    place: int = 0
    prompts: int = 2


def routes(count: int, seed: int) -> list[Route]:
    """Return right routes drawn at random: families, comparisons, dtypes, threads, adapters, tiers, prompts."""
    draw = random.Random(seed + 5)
    found = []
    for number in range(count):
        family = draw.choice([family for family, times in DRAWN.items() for _ in range(times)])
        # PEFT cannot load adapters of stacked experts on every release that is supported.
        against = draw.choice([word for word in AGAINST if (family, word) != ("mixtral", "stock")])
        found.append(
            Route(
                family=family, against=against, seed=number, dtype=draw.choice(("bfloat16", "bfloat16", "float16", "float32")),
                threads=draw.choice((1, 2, 3, 4)), rank=draw.choice((1, 2, 4, 8, 16)), rslora=draw.random() < 0.3,
                place=draw.choice((0, 1, 2, 3)) if against in ("resident", "eager") else 0, prompts=draw.choice((1, 2, 3)),
            )
        )  # fmt: skip
    return found


def route_faults() -> list[tuple[Route, str]]:
    """Return every fault of files on every family, and every fault of an adapter also against the stock stack."""
    found = []
    for seed, family in enumerate(ROUTE_FAMILIES[:4]):
        found += [(Route(family, "resident", seed), fault) for fault in ROUTE_FAULTS]
        for against in ("resident", "stock"):
            found += [(Route(family, against, seed), fault) for fault in ADAPTER_FAULTS]
    return found


def judge_route(route: Route, fault: str | None = None) -> dict[str, Any]:
    """Return the verdict on two routes. fault: what is wrong with the files that the second route reads."""
    # The module: the package's function of this name stands before it.
    module = importlib.import_module("trimtab.verification.verify")
    own = module.case_of
    with tempfile.TemporaryDirectory(prefix="trimtab-alarms-") as folder, quiet():
        work = Path(folder)
        base = pico.build(route.family, work / "base", seed=route.seed % 5, dtype=route.dtype)
        made: dict[str, Any] = {"rank": route.rank, "rslora": route.rslora}
        adapters = {"a": str(pico.adapter(base, work / "a", seed=route.seed, **made))}
        if route.against == "alone":
            adapters["b"] = str(pico.adapter(base, work / "b", seed=route.seed + 50, **made))

        def harmed(*args: Any) -> Any:
            case = own(*args)
            if fault in ADAPTER_FAULTS:
                wrong = Path(shutil.copytree(work / "a", work / "wrong"))
                ADAPTER_FAULTS[fault](wrong)
                changed = replace(case.subject.request, adapters={"a": str(wrong)})
            else:
                wrong = change_tensors(Path(shutil.copytree(base, work / "wrong")), ROUTE_FAULTS[str(fault)])
                changed = replace(case.subject.request, model=str(wrong))
            return replace(case, subject=replace(case.subject, request=changed))

        draw = random.Random(route.seed)
        prompts = [
            {"id": f"{number}", "token_ids": [draw.randrange(3, 300) for _ in range(draw.randrange(6, 14))]}
            for number in range(route.prompts)
        ]  # fmt: skip
        request = LoadRequest(
            model=str(base), adapters=adapters, quant="nf4" if route.against == "stock" else "none", dtype=route.dtype,
            place=PLACES[route.place], context_tokens=64, images=0, audio_s=0.0,
        )  # fmt: skip
        module.case_of = harmed if fault is not None else own
        try:
            with cpu_threads(route.threads):
                report = verify(request, against=route.against, prompts=prompts, new_tokens=NEW_TOKENS, isolated=False)
        finally:
            module.case_of = own
    return {
        "route": asdict(route), "fault": fault, "verify": report.verdict, "alarm": not report.ok, "ratios": ratios(report),
        "changes": report.changes.modules if report.changes is not None else 0,
        "named": [str(row) for row in report.changes.wrong[:2]] if report.changes is not None else [],
    }  # fmt: skip


def ratios(report: ParityReport) -> dict[str, float]:
    """Return the largest share of its limit that each measure reached."""
    found = dict.fromkeys(alarm_rate.MEASURES, 0.0)
    for row in report.prompts:
        limit = report.floor.limits[row.id]
        for name in found:
            found[name] = max(found[name], getattr(row.difference, name) / getattr(limit, name))
    return found


def _weight(tensors: Mapping[str, Tensor], ending: str) -> str:
    return next(name for name in sorted(tensors) if name.endswith(ending) and "vision" not in name and "audio" not in name)


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


# The demo -------------------------------------------------------------------------------------------------------------

# Questions that are drawn from the demo's 72, for each of its four voices and each dtype.
DEMO_ASKS = 3
DEMO_DTYPES = ("bfloat16", "float16", "float32")
DEMO_FAULTS = ("one weight dropped", "scale 1 % too large", "scale 1 % too small", "one module dropped", "one module transposed")


def judge_demos(dtype: str, count: int, faults: bool = True) -> dict[str, Any]:
    """Return the demo's verdicts on `count` right runs and on planted faults, all of one loaded model.

    A right run has another number of threads and, but for every fifth, its layers' roundings drawn anew, as another kernel's;
    its questions are drawn anew from those of the dtype, base and adapters. The noise of a question is measured once.
    """
    draw = random.Random(dtype)
    every = _asks()
    voices: tuple[str | None, ...] = (None, *demo.ADAPTERS)
    asks = [ask for voice in voices for ask in draw.sample([ask for ask in every if ask.adapter == voice], DEMO_ASKS)]
    plan = trimtab.plan(
        DEMO / "base", adapters={name: DEMO / "adapters" / name for name in demo.ADAPTERS}, context=256, images=1,
        audio_s=1.0, place={"*": "resident"}, device="cpu", dtype=dtype,
    )  # fmt: skip
    rows = []
    with quiet(), trimtab.load(plan) as model, cpu_threads(1):
        expected: dict[int, Tensor] = {}
        noise: dict[int, Any] = {}
        changes = own_changes(model)

        def verdict(chosen: list[int], seed: int | None, threads: int) -> str:
            for number in chosen:
                if number not in expected:
                    expected[number] = _logits(model, asks[number])
            with cpu_threads(threads), rounded_layers(model.hf_model, seed) if seed is not None else cpu_threads(threads):
                logits = [_logits(model, asks[number]) for number in chosen]
            found = own_changes(model)
            known = [expected[number] for number in chosen]
            pairs = []
            for place, number in enumerate(chosen):
                if logits[place].equal(known[place]):
                    continue
                if number not in noise:
                    noise[number] = demo.ask_noise(model, "0", asks[number])
                pairs += [replace(pair, prompt_id=str(place)) for pair in noise[number]]
            try:
                demo.check_changes(found, changes)
                demo.judge(pairs, [asks[number] for number in chosen], logits, known)
            except ParityError as exc:
                return f"differs: {exc}"
            return "same within noise" if pairs else "same"

        for run in range(count):
            chosen = draw.sample(range(len(asks)), draw.choice((1, 2, 3, 4)))
            seed, threads = (None if run % 5 == 4 else 100 + run), draw.choice((1, 2, 3, 4))
            said = verdict(chosen, seed, threads)
            rows.append({"dtype": dtype, "seed": seed, "threads": threads, "asks": chosen, "fault": None, "verdict": said})
        for name in (*demo.ADAPTERS, None) if faults else ():
            chosen = [number for number, ask in enumerate(asks) if ask.adapter == name][:2]
            for number in chosen:  # known, and its noise measured, before anything is wrong
                expected.setdefault(number, _logits(model, asks[number]))
                noise.setdefault(number, demo.ask_noise(model, "0", asks[number]))
            for fault in DEMO_FAULTS:
                if (fault == DEMO_FAULTS[0]) is not (name is None):
                    continue
                with harmed_model(model, fault, name):
                    said = verdict(chosen, None, 1)
                rows.append({"dtype": dtype, "adapter": name, "fault": fault, "verdict": said})
    return {"rows": [row | {"alarm": row["verdict"].startswith("differs")} for row in rows]}


def _asks() -> list[demo.Ask]:
    """Return every question of the demo, to the base and to every adapter that has an answer to it."""
    import json

    found = []
    for text in (DEMO / "prompts.jsonl").read_text(encoding="utf-8").splitlines():
        row = json.loads(text)
        media = {name: str(DEMO / row[name]) for name in ("image", "audio") if name in row}
        found += [
            demo.Ask(row["kind"], row["prompt"], media, None if voice == "base" else voice, answer)
            for voice, answer in row["answers"].items()
        ]
    return found


def _logits(model: Any, ask: demo.Ask) -> Tensor:
    return model.logits(ask.prompt, **ask.media, adapter=ask.adapter)  # type: ignore[no-any-return]


@contextmanager
def harmed_model(model: Any, fault: str, name: str | None) -> Iterator[None]:
    """Plant a fault in one loaded adapter, or with None in one weight of the base, and take it back."""
    modules = [module for module in model.hf_model.modules() if hasattr(module, "module_path")]
    if name is None:
        leaf = next(m for m in modules if m.module_path.endswith("language_model.layers.0.self_attn.o_proj"))
        forward = type(leaf).forward
        leaf.forward = lambda x: 0 * forward(leaf, x)
        try:
            yield
        finally:
            del leaf.forward
        return
    pairs = [(m, m.adapters[name]) for m in modules if name in m.__dict__.get("adapters", {}) and m.adapters[name].A is not None]
    square = [(m, a) for m, a in pairs if a.A.shape[1] == a.B.shape[0]]
    try:
        if fault.startswith("scale"):
            for module, adapter in pairs:
                module.adapters[name] = replace(adapter, scale=adapter.scale * (1.01 if "large" in fault else 0.99))
        elif fault == "one module dropped":
            module, adapter = pairs[0]
            module.adapters[name] = replace(adapter, B=adapter.B * 0)
        else:
            module, adapter = square[0]
            module.adapters[name] = replace(adapter, A=adapter.B.T.contiguous(), B=adapter.A.T.contiguous())
        yield
    finally:
        for module, adapter in pairs:
            module.adapters[name] = adapter


def upper_bound(alarms: int, count: int) -> float:
    """Return the rate that a run with so few alarms rules out with 95 % confidence (Clopper and Pearson; exact for 0)."""
    low, high = alarms / count, 1.0
    for _ in range(60):
        middle = (low + high) / 2
        below = sum(math.comb(count, k) * middle**k * (1 - middle) ** (count - k) for k in range(alarms + 1))
        low, high = (middle, high) if below > 0.05 else (low, middle)
    return high
