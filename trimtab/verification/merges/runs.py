"""Running merge lanes: their processes, the files that they exchange, and the comparison of their answers."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from trimtab.checkpoint.folder import read_checkpoint
from trimtab.errors import TrimtabError
from trimtab.process import phases
from trimtab.process.packages import stack_versions
from trimtab.process.runner import run_inside
from trimtab.request import LoadRequest
from trimtab.verification.merges.retention import Survival
from trimtab.verification.merges.variants import (  # fmt: skip
    ACTIVE,
    FIRST,
    INACTIVE,
    Lane,
    LanePrompt,
    LaneReport,
    LaneRun,
    check_names,
    classify,
    lane_verdict,
)
from trimtab.verification.routes import compare, teacher_forcing
from trimtab.verification.routes.runner import TIMEOUT_S, Item, Route, run_module, run_route

STOCK_LANE, MERGE_LANE = "trimtab.verification.merges.stock_merge", "trimtab.verification.merges.merge_lane"
WHO = ("adapter", "base", "merged")
Line = dict[str, Any]
Say = Callable[[str], None]


class LaneRunner:
    """Runs lanes on one model and adapter. Keeps the reference answers: bf16 with the adapter loaded."""

    def __init__(
        self, *, model: str, adapter: Path, rows: Sequence[Mapping[str, Any]], work: Path, device: str, dtype: str,
        new_tokens: int, python: str | None, isolated: bool,
    ) -> None:  # fmt: skip
        from trimtab.engine.memory.rates import resolve_device

        self.folder, self.adapter, self.rows, self.work = read_checkpoint(model).folder, adapter, rows, work
        self.device, self.dtype, self.new_tokens = resolve_device(device), dtype, new_tokens
        self.python, self.isolated = python, isolated
        self.yardstick: dict[str, Line] = {}
        self.versions = stack_versions()  # of this interpreter, until a stock lane reports its own

    def run(self, lane: Lane) -> LaneRun:
        """Return the result of a lane; an exception is part of it."""
        out = self.work / lane.name
        out.mkdir(parents=True, exist_ok=True)
        try:
            if lane.engine == "stock":
                return self._stock(lane, out)
            return self._yardstick(lane, out) if lane.name == FIRST else self._own(lane, out)
        finally:
            if lane.name != FIRST:
                shutil.rmtree(out, ignore_errors=True)

    def _items(self, adapter: str | None) -> list[Item]:
        items = []
        for row in self.rows:
            known = self.yardstick.get(row["id"])
            items.append(Item(**row, adapter=adapter, continuation=tuple(known["continuation"]) if known else None))
        return items

    # Stock lanes ------------------------------------------------------------------------------------------------------

    def _stock(self, lane: Lane, out: Path) -> LaneRun:
        request = {
            "folder": str(self.folder), "adapter": str(self.adapter), "quant": lane.quant, "dtype": self.dtype,
            "dequantize": lane.dequantize, "device": self.device, "out": str(out), "new_tokens": self.new_tokens,
            "items": [vars(item) for item in self._items("adapter")],
        }  # fmt: skip
        lines: list[Line] = []
        if self.isolated or self.python is not None:
            outcome = run_inside(STOCK_LANE, request, python=self.python, timeout_s=TIMEOUT_S, on_event=_told)
            lines, seconds, peak = list(outcome.lines), outcome.seconds, outcome.peak_host_bytes
            if outcome.ended != "done" and not any(line["event"] == "upstream" for line in lines):
                lines.append({"event": "upstream", **_ended(outcome.ended, outcome.stderr)})
        else:
            import importlib

            importlib.import_module(STOCK_LANE).main(request, lines.append)
            seconds, peak = 0.0, 0
        return self._stock_run(lane, lines, seconds, peak)

    def _stock_run(self, lane: Lane, lines: Sequence[Line], seconds: float, peak: int) -> LaneRun:
        stages = {line["stage"]: line["memory"] for line in lines if line["event"] == "stage"}
        self.versions = next((line["versions"] for line in lines if "versions" in line), self.versions)
        merge = next((line for line in lines if line["event"] == "merge"), None)
        error = next((line for line in lines if line["event"] == "upstream"), None)
        answers = {who: [line for line in lines if line["event"] == "said" and line["who"] == who] for who in WHO}
        complete = error is None and all(len(answers[who]) == len(self.rows) for who in WHO)
        prompts = self._compared(lane, answers) if complete else ()
        measured = [line["memory"] for line in lines if "memory" in line]
        last = list(stages)[-1] if stages else "import"
        return LaneRun(
            lane=lane, verdict=lane_verdict(lane, prompts) if complete else lane.verdicts["raises"], prompts=prompts,
            survival=tuple(
                Survival(**row) for line in lines if line["event"] == "survival" for row in line["rows"]
            ),
            merge_warnings=merge["rounding_warnings"] if merge else 0, warnings=merge["warnings"] if merge else {},
            memory={
                "host_peak_bytes": peak,
                "gpu_peak_bytes": max((memory["gpu_peak_bytes"] for memory in measured), default=0),
            },
            stages=stages, merge_s=merge["seconds"] if merge else None, seconds=seconds,
            notes=tuple(note for line in lines if line["event"] == "stage" for note in line.get("notes", ())),
            error=_shown(error, last) if error else None,
        )  # fmt: skip

    # trimtab's lanes --------------------------------------------------------------------------------------------------

    def _route(self, label: str, folder: Path, *, quant: str, adapter: bool) -> Route:
        return Route(
            label=label,
            request=LoadRequest(
                model=str(folder), adapters={"adapter": str(self.adapter)} if adapter else {}, quant=quant,
                dtype=self.dtype, device=self.device, place={"*": "resident"}, images=1,
            ),
        )  # fmt: skip

    def _loaded(self, lane: Lane, out: Path) -> tuple[dict[str, list[Line]], Any]:
        """Return the answers of the adapter and of the base, with the base loaded in the lane's format."""
        items = self._items("adapter")
        base = [Item(**{**vars(item), "adapter": None, "follows": at}) for at, item in enumerate(items)]
        ran = run_route(
            self._route("adapter loaded", self.folder, quant=lane.quant, adapter=True), [*items, *base],
            out / "loaded", new_tokens=self.new_tokens, isolated=self.isolated,
        )  # fmt: skip
        lines = [vars(answer) for answer in ran.said]
        return {"adapter": lines[: len(items)], "base": lines[len(items) :]}, ran

    def _yardstick(self, lane: Lane, out: Path) -> LaneRun:
        try:
            answers, ran = self._loaded(lane, out)
        except TrimtabError as exc:
            return _failed(lane, exc, "base")
        self.yardstick = {line["id"]: line for line in answers["adapter"]}
        prompts = []
        for adapter, base in zip(answers["adapter"], answers["base"], strict=True):
            differs = adapter["token_ids"] != base["token_ids"]
            prompts.append(
                LanePrompt(
                    id=adapter["id"], classification=ACTIVE if differs else INACTIVE, base_differs=differs,
                    adapter_is_merged=None, base_is_merged=None, kl_to_adapter=None, kl_base=_kl(adapter, base),
                    kl_to_bf16=None, texts={"adapter": adapter["text"], "base": base["text"]},
                )
            )  # fmt: skip
        return _run_of(lane, lane_verdict(lane, prompts), tuple(prompts), (), ran.memory, {}, None, ran.seconds)

    def _own(self, lane: Lane, out: Path) -> LaneRun:
        from trimtab.verification.merges.retention_files import survival_of_files

        merged_folder = out / "merged"
        request = {
            "folder": str(self.folder), "adapter": str(self.adapter), "out": str(merged_folder),
            "requantize": lane.requantize,
        }  # fmt: skip
        stage = "merge"
        try:
            lines, outcome = run_module(MERGE_LANE, request, lane.name, isolated=self.isolated)
            merge = next(line for line in lines if line["event"] == "merge")
            stage = "adapter"
            answers, loaded = self._loaded(lane, out)
            stage = "merged"
            quant = "none" if lane.requantize is None else "auto"
            ran = run_route(
                self._route("merged", merged_folder, quant=quant, adapter=False), self._follow(answers["adapter"]),
                out / "answers", new_tokens=self.new_tokens, isolated=self.isolated,
            )  # fmt: skip
            rows = survival_of_files(self.folder, merged_folder, self.adapter)
        except TrimtabError as exc:
            return _failed(lane, exc, stage)
        prompts = self._compared(lane, answers | {"merged": [vars(one) for one in ran.said]})
        memory = dict(merge["memory"])
        if outcome is None:
            memory["host_peak_bytes"] = 0
        stages = {"merge": memory, "adapter": dict(loaded.memory), "merged": dict(ran.memory)}
        seconds = (outcome.seconds if outcome else 0.0) + loaded.seconds + ran.seconds
        return _run_of(lane, lane_verdict(lane, prompts), prompts, rows, memory, stages, merge["seconds"], seconds)

    def _follow(self, answers: Sequence[Line]) -> list[Item]:
        return [
            Item(**row, adapter=None, continuation=tuple(line["continuation"]))
            for row, line in zip(self.rows, answers, strict=True)
        ]

    # Answers ----------------------------------------------------------------------------------------------------------

    def _compared(self, lane: Lane, answers: Mapping[str, Sequence[Line]]) -> tuple[LanePrompt, ...]:
        rows = []
        for adapter, base, merged in zip(answers["adapter"], answers["base"], answers["merged"], strict=True):
            tokens = {who: list(line["token_ids"]) for who, line in zip(WHO, (adapter, base, merged), strict=True)}
            is_adapter, is_base = tokens["merged"] == tokens["adapter"], tokens["merged"] == tokens["base"]
            known = self.yardstick.get(adapter["id"])
            rows.append(
                LanePrompt(
                    id=adapter["id"],
                    classification=classify(lane, adapter_is_merged=is_adapter, base_is_merged=is_base),
                    base_differs=tokens["base"] != tokens["adapter"], adapter_is_merged=is_adapter,
                    base_is_merged=is_base, kl_to_adapter=_kl(adapter, merged), kl_base=_kl(adapter, base),
                    kl_to_bf16=_kl(known, merged) if known else None,
                    texts={who: line["text"] for who, line in zip(WHO, (adapter, base, merged), strict=True)},
                )
            )  # fmt: skip
        return tuple(rows)


def _kl(first: Mapping[str, Any], second: Mapping[str, Any]) -> float:
    a, b = teacher_forcing.read_run(first["file"])[0], teacher_forcing.read_run(second["file"])[0]
    return compare.difference(a, b).kl_mean


def _run_of(
    lane: Lane, verdict: str, prompts: tuple[LanePrompt, ...], rows: Sequence[Survival], memory: Mapping[str, int],
    stages: Mapping[str, Mapping[str, int]], merge_s: float | None, seconds: float,
) -> LaneRun:  # fmt: skip
    return LaneRun(
        lane=lane, verdict=verdict, prompts=prompts, survival=tuple(rows), merge_warnings=0, warnings={},
        memory=memory, stages=stages, merge_s=merge_s, seconds=seconds,
    )  # fmt: skip


def _failed(lane: Lane, exc: TrimtabError, stage: str) -> LaneRun:
    error = {"type": type(exc).__name__, "message": str(exc), "package": "trimtab", "installed": "", "frames": []}
    return LaneRun(
        lane=lane, verdict=lane.verdicts["raises"], prompts=(), survival=(), merge_warnings=0, warnings={}, memory={},
        stages={}, merge_s=None, seconds=0.0, error=error | {"stage": stage},
    )  # fmt: skip


def _told(line: Line) -> None:
    """Report the stage that a stock lane has reached."""
    if line["event"] == "stage":
        phases.begin("stock:", line["stage"])


def _shown(error: Line, stage: str) -> dict[str, Any]:
    return {key: value for key, value in error.items() if key != "event"} | {"stage": stage}


def _ended(ended: str, stderr: str) -> dict[str, Any]:
    lines = [line for line in stderr.strip().splitlines() if line.strip()]
    return {
        "type": ended, "message": lines[-1][:300] if lines else "the process printed nothing", "package": "?",
        "installed": "?", "frames": [],
    }  # fmt: skip


def run_lanes(
    model: str | Path, adapter: Path, rows: Sequence[Mapping[str, Any]], work: Path, *, device: str = "auto",
    dtype: str = "bfloat16", new_tokens: int = 32, python: str | None = None, names: Sequence[str] | None = None,
    isolated: bool = True, say: Say | None = None,
) -> LaneReport:  # fmt: skip
    """Return the result of every lane.

    rows: prepared prompts (`inputs.prepare`). work: a folder for logits and merged models, as large as those; emptied
    after each lane. python: the interpreter of the stock lanes. names: some lanes; the reference lane is always run.
    Errors: RequestError; the exception of a lane is in its run.
    """
    lanes = check_names(names)
    runner = LaneRunner(
        model=str(model), adapter=adapter, rows=rows, work=work, device=device, dtype=dtype, new_tokens=new_tokens,
        python=python, isolated=isolated,
    )  # fmt: skip
    runs = []
    for lane in lanes:
        if say is not None:
            say(f"lane: {lane.name}")
        with phases.within(f"lane {lane.name}"):
            runs.append(runner.run(lane))
    return LaneReport(model=str(model), adapter=str(adapter), device=runner.device, lanes=tuple(runs), versions=runner.versions)
