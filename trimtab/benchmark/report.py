"""The report of a benchmark: every run, medians with their spread, the limit, failures; as JSON and as a table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from trimtab.benchmark import stats
from trimtab.benchmark.roofline import Limit, Read
from trimtab.benchmark.stats import Spread
from trimtab.errors import RequestError, TrimtabError, gib
from trimtab.machine.environment import Environment
from trimtab.planning import Plan
from trimtab.process.redact import scrubbed
from trimtab.report.document import Document, Facts, Table, counted
from trimtab.report.render import Report

FORMAT = 1
OURS = "trimtab"


@dataclass(frozen=True, kw_only=True)
class Side:
    """One engine's part. name: "trimtab", "stock" or "eager". failure: why it stopped early; earlier runs are kept. limit: None
    if no bandwidth was measured. reads: the bytes behind it."""

    name: str
    rows: tuple[Mapping[str, Any], ...]
    reads: tuple[Read, ...]
    limit: Limit | None
    failure: TrimtabError | None = None
    failed_run: int | None = None

    @property
    def spreads(self) -> dict[str, Spread]:
        return stats.spreads(self.rows)

    @property
    def fallbacks(self) -> list[dict[str, str]]:
        """The fallbacks of all runs, without duplicates."""
        rows: list[dict[str, str]] = []
        for row in self.rows:
            rows += [fallback for fallback in row["fallbacks"] if fallback not in rows]
        return rows

    @property
    def notes(self) -> list[str]:
        return list(dict.fromkeys(note for row in self.rows for note in row["notes"]))

    def limit_share(self) -> float | None:
        """Return the median decode rate as a share of the limit."""
        decode = self.spreads.get("decode_tok_s")
        return None if self.limit is None or decode is None else self.limit.share(decode.median)

    def to_json(self) -> dict[str, Any]:
        failed = self.failure
        return {
            "medians": {name: value.to_json() for name, value in self.spreads.items()},
            "limit": None if self.limit is None else self.limit.to_json(), "limit_share": self.limit_share(),
            "reads": [asdict(read) for read in self.reads], "fallbacks": self.fallbacks, "notes": self.notes,
            "unsteady_prompts": stats.unsteady(self.rows),
            "failure": None if failed is None else {
                "class": type(failed).__name__, "message": scrubbed(str(failed)), "run": self.failed_run,
            },
        }  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class BenchReport(Report):
    """Two engines on the same model, adapter and prompts. bandwidth: bytes per second, by kind of copy, with spread."""

    plan: Plan
    adapter: str | None
    decode: str
    prompts: tuple[Mapping[str, Any], ...]
    new_tokens: int
    runs: int
    ours: Side
    other: Side
    bandwidth: Mapping[str, Spread]
    environment: Environment
    endings = (".json",)

    def ratio(self, name: str = "decode_tok_s") -> Spread | None:
        """Return trimtab's value of one figure divided by the other engine's, pair by pair."""
        return stats.ratios(self.ours.rows, self.other.rows, name)

    def differences(self) -> list[dict[str, Any]]:
        """Return for each prompt whether both gave the same tokens."""
        return stats.differences(self.ours.rows, self.other.rows)

    def to_json(self) -> dict[str, Any]:
        """Return everything as JSON-ready values, without folders of the machine."""
        plan, request = self.plan, self.plan.request
        tiers = list(plan.tiers().values())
        ratios = {name: self.ratio(name) for name, _, _ in stats.FIGURES}
        return {
            "format": FORMAT, "environment": self.environment.to_json(),
            "model": {
                "name": Path(request.model).name, "class": plan.model_class, "quant": request.quant, "head": request.head,
                "kv": request.kv, "dtype": request.dtype, "device": plan.execution_device, "context_tokens": request.context_tokens,
                "tiers": {tier: tiers.count(tier) for tier in sorted(set(tiers))},
                "planned_device_peak_bytes": plan.gpu_peak_bytes, "adapters": list(request.adapters),
            },
            "adapter": self.adapter, "decode": self.decode, "runs": self.runs, "new_tokens": self.new_tokens,
            "prompts": [dict(prompt) for prompt in self.prompts],
            "bandwidth": {name: value.to_json() for name, value in self.bandwidth.items()},
            "engines": {side.name: side.to_json() for side in (self.ours, self.other)},
            "ratios": {name: value.to_json() for name, value in ratios.items() if value is not None},
            "same_tokens": self.differences(),
            "rows": sorted(map(dict, (*self.ours.rows, *self.other.rows)), key=lambda row: (row["run"], row["engine"] != OURS)),
        }  # fmt: skip

    def document(self) -> Document:
        """Return the medians as a table, and what they rest on."""
        request, sides = self.plan.request, (self.ours, self.other)
        tokens = [prompt["prompt_tokens"] for prompt in self.prompts]
        length = f"{tokens[0]}" if len(set(tokens)) == 1 else f"{min(tokens)} to {max(tokens)}"
        head = (
            f"{self.plan.model_class} on {self.plan.execution_device}: {request.quant}, {request.dtype}, "
            f"{'8-bit head, ' if request.head == 'int8' else ''}"
            f"{'8-bit keys and values, ' if request.kv == 'int8' else ''}"
            f"{f'adapter {self.adapter}' if self.adapter else 'no adapter'}; {counted(len(tokens), 'prompt')} of {length} "
            f"tokens, {self.new_tokens} new ones; {counted(self.runs, 'run')} each, in turn"
        )
        rows = []
        for name, unit, _ in stats.FIGURES:
            if not any(name in side.spreads for side in sides):
                continue
            cells = (_spread_text(side.spreads.get(name), unit) for side in sides)
            rows.append((stats.NAMES[name], *cells, _spread_text(self.ratio(name), "")))
            if name == "decode_tok_s" and any(side.limit for side in sides):
                limits = ("-" if side.limit is None else f"{number(side.limit.tok_s)} tok/s" for side in sides)
                rows.append(("  limit", *limits, ""))
                rows.append(("  share of it", *(_share_cell(side) for side in sides), ""))
        return Document(head, [Table(("median (least..most)", *(side.name for side in sides), "ratio"), rows), Facts(_notes(self))])


def check_save_path(path: str) -> None:
    """Raise RequestError unless a report can be saved under this name."""
    if Path(path).suffix.lower() != ".json":
        raise RequestError("a report is saved as .json", field="--save", value=path, allowed=(".json",))
    if not Path(path).absolute().parent.is_dir():
        raise RequestError(f"there is no folder {Path(path).parent}", field="--save", value=str(path))


def _spread_text(spread: Spread | None, unit: str) -> str:
    if spread is None:
        return "-"
    return f"{number(spread.median)} {unit}".rstrip() + f" ({number(spread.least)}..{number(spread.most)})"


def number(value: float) -> str:
    """Return a number with three or four significant digits."""
    return f"{value:.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def _share_cell(side: Side) -> str:
    share = side.limit_share()
    return "-" if share is None else f"{100 * share:.2g} %"


def _notes(report: BenchReport) -> list[tuple[str, str]]:
    lines = []
    for side in (report.ours, report.other):
        if side.failure is not None:
            at = f"in run {(side.failed_run or 0) + 1}"
            lines.append(("failed", f"{side.name}, {at}: {type(side.failure).__name__}: {side.failure}"))
    for row in report.differences():
        same = "the same tokens" if row["equal"] else f"tokens differ from position {row['first_difference']} on"
        lines.append(("tokens", f"{row['id']}: {same}, of {row['tokens']}"))
    for side in (report.ours, report.other):
        changed = stats.unsteady(side.rows)
        if changed:
            lines.append(("unsteady", f"{side.name} gave other tokens for {', '.join(changed)} in a later run"))
        lines += [("slower", f"{side.name}: {row['what']}: {row['why']}") for row in side.fallbacks]
        lines += [("note", f"{side.name}: {note}") for note in side.notes]
        if side.limit is not None and (side is report.ours or side.reads != report.ours.reads):
            lines.append(("limit", f"{side.name}: a token reads {_reads_text(side.reads)}; bound by {side.limit.bound_by}"))
    rates = [f"{name} {rate.median / 1e9:.3g} GB/s" for name, rate in report.bandwidth.items()]
    return [*lines, *([("measured", f"copies: {', '.join(rates)}")] if rates else [])]


def _reads_text(reads: Sequence[Read]) -> str:
    return ", ".join(f"{read.what} {gib(read.nbytes)}{'' if read.way == 'device' else f' over the {read.way}'}" for read in reads)
