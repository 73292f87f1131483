"""How fast is trimtab against the stock stack or its own eager steps?"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from trimtab.benchmark import stats
from trimtab.benchmark.report import OURS, BenchReport, Side
from trimtab.benchmark.roofline import Bandwidth, Limit, Read, limit_of
from trimtab.benchmark.stats import Spread
from trimtab.errors import RequestError, TrimtabError
from trimtab.machine.environment import read_environment
from trimtab.machine.machine_cache import find_machine
from trimtab.planning import Plan
from trimtab.process import packages, phases
from trimtab.process.work_folder import work_folder
from trimtab.request import DECODE_MODES, MADE_EXPERTS, LoadRequest, check_choice
from trimtab.verification.routes.prompts import Prompt
from trimtab.verification.routes.runner import run_module

Say = Callable[[str], None]
AGAINST = ("stock", "eager")
PREPARE, OWN, STOCK = "trimtab.benchmark.prepare", "trimtab.benchmark.run_trimtab", "trimtab.benchmark.run_stock"
RUNS, NEW_TOKENS = 3, 64
# The first answer of a process compiles, captures and fills caches, so one answer runs before the measurement.
WARM_TOKENS = 4
TIMEOUT_S = 3600.0


@dataclass(frozen=True, kw_only=True)
class BenchRequest:
    """The request of a measurement.

    load: a request to plan, or a plan. adapter: the one that answers. against: "stock", transformers with bitsandbytes
    and PEFT, or "eager", trimtab without captured steps. prompts: without any, one is made from the given images and
    audio clips, or of exactly prompt_tokens tokens. decode: as in LoadedModel. stock_cpu_path: False disables
    bitsandbytes' fast path for CPUs with AVX512-BF16 on the stock side, to measure its gain.
    Errors: RequestError for values without effect or out of range.
    """

    load: LoadRequest | Plan
    adapter: str | None = None
    against: str = "stock"
    runs: int = RUNS
    new_tokens: int = NEW_TOKENS
    prompt_tokens: int | None = None
    prompts: tuple[Prompt, ...] | None = None
    images: tuple[str, ...] = ()
    audios: tuple[str, ...] = field(default=())
    decode: str = "auto"
    stock_cpu_path: bool = True

    def __post_init__(self) -> None:
        check_choice(self.against, AGAINST, field_name="--against")
        check_choice(self.decode, DECODE_MODES, field_name="--decode")
        for name, value, low in (
            ("--runs", self.runs, 1), ("--new-tokens", self.new_tokens, 2), ("--prompt-tokens", self.prompt_tokens, 1)
        ):  # fmt: skip
            if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < low):
                raise RequestError(f"must be an integer of at least {low}", field=name, value=value)
        media = [name for name, given in (("--image", self.images), ("--audio", self.audios)) if given]
        if self.prompts is not None:
            for name in [*media, *(["--prompt-tokens"] if self.prompt_tokens is not None else [])]:
                raise RequestError("has no effect with a file of prompts", field=name)
        if media and self.prompt_tokens is not None:
            raise RequestError(f"has no effect with {media[0]}", field="--prompt-tokens", value=self.prompt_tokens)
        if self.decode == "eager" and self.against == "eager":
            raise RequestError("both sides would run the same steps", field="--decode", value="eager")
        if self.adapter is not None and self.adapter not in self.request.adapters:
            raise RequestError(
                "no adapter of this name is given", field="--use", value=self.adapter,
                allowed=tuple(self.request.adapters),
            )  # fmt: skip

    @property
    def request(self) -> LoadRequest:
        return self.load.request if isinstance(self.load, Plan) else self.load


def bench(request: BenchRequest, *, say: Say | None = None) -> BenchReport:
    """Return the measurements.

    Errors: RequestError, CheckpointError, AdapterError, DoesNotFitError before a run is made. After planning, an error of a side
    becomes its `failure`. Runs alternate, so that other load affects both sides.
    """
    speak = say or phases.begin
    if request.against == "stock":
        packages.check_installed(packages.STOCK, field="against", value="stock")
    with work_folder("bench") as work:
        speak("planning and preparing the prompts")
        here = None if isinstance(request.load, Plan) or request.request.card else find_machine(request.request.device)
        if here is not None:
            _check_sides(request, here[0].execution_device)
        prepared = _prepared(request, work)
        plan = Plan.from_json(prepared["plan"])
        _check_sides(request, plan.execution_device)
        rows: dict[str, list[dict[str, Any]]] = {OURS: [], request.against: []}
        failures: dict[str, tuple[TrimtabError, int]] = {}
        for run in range(request.runs):
            for name in rows:
                if name in failures:
                    continue
                speak(f"run {run + 1} of {request.runs}: {name}")
                try:
                    with phases.within(f"run {run + 1} of {request.runs}"):
                        rows[name].append(_run(name, run, request, plan, prepared, work))
                except TrimtabError as exc:
                    failures[name] = (exc, run)
                    speak(f"{name} failed: {exc}")
    speak("measuring the machine")
    bandwidth = _bandwidth([row for made in rows.values() for row in made])
    sides = [_side(name, made, prepared, bandwidth, plan, failures.get(name)) for name, made in rows.items()]
    shown = tuple({key: value for key, value in item.items() if key != "file"} for item in prepared["items"])
    return BenchReport(
        plan=plan, adapter=request.adapter, decode=request.decode, prompts=shown, new_tokens=request.new_tokens,
        runs=request.runs, ours=sides[0], other=sides[1], bandwidth=bandwidth, environment=read_environment(),
    )  # fmt: skip


def _check_sides(request: BenchRequest, device: str) -> None:
    """Raise RequestError where both sides would run the same steps on a device."""
    if request.against == "eager" and request.decode == "auto" and device == "cpu":
        raise RequestError(
            "both sides would run the same steps: there is no GPU to capture them on",
            field="--against", value="eager", allowed=("stock",),
        )  # fmt: skip


def _prepared(wanted: BenchRequest, work: Path) -> dict[str, Any]:
    request = {
        "plan": wanted.load.to_json() if isinstance(wanted.load, Plan) else None, "request": wanted.request.to_json(),
        "adapter": wanted.adapter, "prompts": [prompt.to_json() for prompt in wanted.prompts or ()],
        "images": list(wanted.images), "audios": list(wanted.audios), "prompt_tokens": wanted.prompt_tokens,
        "new_tokens": wanted.new_tokens, "out": str(work),
    }  # fmt: skip
    lines, _ = run_module(PREPARE, request, "planning", isolated=True, timeout_s=TIMEOUT_S)
    return next(line for line in lines if line["event"] == "prepared")


def _run(
    name: str, run: int, request: BenchRequest, plan: Plan, prepared: Mapping[str, Any], work: Path
) -> dict[str, Any]:  # fmt: skip
    out = work / f"{name}-{run}"
    out.mkdir()
    shared = {
        "adapter": request.adapter, "items": prepared["items"], "new_tokens": request.new_tokens,
        "warm_tokens": min(WARM_TOKENS, request.new_tokens), "out": str(out),
    }  # fmt: skip
    if name == "stock":
        module, own = STOCK, {
            "folder": prepared["folder"], "quant": plan.request.quant, "dtype": plan.request.dtype,
            "device": plan.execution_device, "adapters": dict(plan.request.adapters), "own_cpu_path": request.stock_cpu_path,
        }  # fmt: skip
    else:
        module, own = OWN, {"plan": prepared["plan"], "decode": request.decode if name == OURS else "eager"}
    lines, outcome = run_module(module, shared | own, name, isolated=True, timeout_s=TIMEOUT_S)
    row: dict[str, Any] = {"engine": name, "run": run}
    row |= {key: value for key, value in next(x for x in lines if x["event"] == "ran").items() if key != "event"}
    # If a process cannot measure itself on this system, the values measured from outside are used.
    if not row["host_peak_bytes"] and outcome is not None:
        row["host_peak_bytes"] = outcome.peak_host_bytes
    if name == "stock" and plan.request.keep_unquantized:
        row["notes"] = [*row["notes"], "quantizes what --keep-unquantized names as well"]
    if name == "stock" and plan.request.experts in MADE_EXPERTS:
        row["notes"] = [*row["notes"], "computes with experts in 16 bits"]
    if name == "stock" and plan.request.head != "full":
        row["notes"] = [*row["notes"], "computes with the full head, not with an 8-bit copy"]
    if name == "stock" and plan.request.kv != "full":
        row["notes"] = [*row["notes"], "keeps keys and values in full, not in 8 bits"]
    return row | {"figures": stats.run_figures(row)}


def _bandwidth(rows: Sequence[Mapping[str, Any]]) -> dict[str, Spread]:
    names = {"device_Bps": "device memory", "host_Bps": "host memory", "link_Bps": "host to device"}
    spreads = {
        words: stats.spread([row["bandwidth"][name] for row in rows if row["bandwidth"][name]]) for name, words in names.items()
    }
    return {words: rate for words, rate in spreads.items() if rate is not None}


def _side(
    name: str, rows: Sequence[Mapping[str, Any]], prepared: Mapping[str, Any], bandwidth: Mapping[str, Spread],
    plan: Plan, failed: tuple[TrimtabError, int] | None,
) -> Side:  # fmt: skip
    reads = tuple(Read(**read) for read in prepared["reads"]["stock" if name == "stock" else "trimtab"])
    limit: Limit | None = None
    if bandwidth:
        link = bandwidth.get("host to device")
        limit = limit_of(reads, Bandwidth(
            device_Bps=bandwidth["device memory"].median, host_Bps=bandwidth["host memory"].median,
            link_Bps=None if link is None else link.median, disk_Bps=plan.rates.disk_Bps,
        ))  # fmt: skip
    return Side(
        name=name, rows=tuple(rows), reads=reads, limit=limit, failure=failed[0] if failed else None,
        failed_run=failed[1] if failed else None,
    )  # fmt: skip
