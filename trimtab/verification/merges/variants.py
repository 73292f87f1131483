"""How does each way to merge change the answers, on any model and adapter?"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from trimtab.checkpoint.names import near_names
from trimtab.errors import RequestError, gib
from trimtab.report.document import Block, Document, Figure, Heading, Items, Table, Text, number, yes
from trimtab.report.render import Report
from trimtab.request import REQUANTIZE
from trimtab.verification.merges.retention import Survival, mean_survival


@dataclass(frozen=True, kw_only=True)
class Lane:
    """A way to merge. prefix: of its per-prompt labels. verdict: of the whole lane, by its outcome.

    quant: the base that is loaded. dequantize: when the stock lane dequantizes, "base" before the adapter is loaded, "adapted"
    after. requantize: the form trimtab's merge writes. A lane answers the prompts three times: base, adapter loaded, merged. Greedy
    texts decide the labels. `adapter_vs_base` merges nothing: its answers in bf16 are the reference for all others.
    """

    name: str
    title: str
    engine: Literal["stock", "trimtab"]
    prefix: str
    verdicts: Mapping[str, str]
    quant: str = "none"
    dequantize: str = ""
    requantize: str | None = None


def _verdicts(name: str) -> dict[str, str]:
    return {how: f"{name}_{how.upper()}" for how in ("passes", "diverges", "raises", "shows_nothing")}


ACTIVE, INACTIVE = "ADAPTER_ACTIVE", "ADAPTER_INACTIVE"
FIRST = "adapter_vs_base"
LANES: tuple[Lane, ...] = (
    Lane(
        name=FIRST, title="adapter loaded against base, bf16", engine="trimtab", prefix="ADAPTER",
        verdicts=_verdicts("ADAPTER_VS_BASE") | {"passes": ACTIVE, "diverges": INACTIVE, "shows_nothing": INACTIVE},
    ),
    Lane(
        name="direct_4bit_merge", title="PEFT merge_and_unload on a 4-bit base", engine="stock", quant=REQUANTIZE[0],
        prefix="DIRECT_4BIT_MERGED",
        verdicts=_verdicts("DIRECT_4BIT_MERGE")
        | {"passes": "DIRECT_4BIT_MERGE_NO_LONGER_DIVERGES", "diverges": "DIRECT_4BIT_MERGE_STILL_DIVERGES"},
    ),
    Lane(
        name="fresh_bf16_merge", title="PEFT merge_and_unload on the bf16 base", engine="stock", prefix="BF16_MERGED",
        verdicts=_verdicts("FRESH_BF16_MERGE")
        | {"passes": "FRESH_BF16_MERGE_STILL_PASSES", "diverges": "FRESH_BF16_MERGE_NO_LONGER_PASSES"},
    ),
    Lane(
        name="dequantize_then_merge", title="4-bit base, adapter, dequantize() in place, merge", engine="stock",
        quant=REQUANTIZE[0], dequantize="adapted", prefix="DEQUANTIZED_MERGED",
        verdicts=_verdicts("DEQUANTIZE_THEN_MERGE") | {"raises": "DEQUANTIZE_THEN_MERGE_STILL_RAISES"},
    ),
    Lane(
        name="base_dequantize_then_merge", title="4-bit base.dequantize(), adapter, merge", engine="stock", quant=REQUANTIZE[0],
        dequantize="base", prefix="BASE_DEQUANTIZED_MERGED", verdicts=_verdicts("BASE_DEQUANTIZE_THEN_MERGE"),
    ),
    Lane(
        name="trimtab_merge", title="trimtab merge of the bf16 files", engine="trimtab", prefix="TRIMTAB_MERGED",
        verdicts=_verdicts("TRIMTAB_MERGE"),
    ),
    Lane(
        name="trimtab_requantized_merge", title="trimtab merge, requantized to 4 bits", engine="trimtab", quant=REQUANTIZE[0],
        requantize=REQUANTIZE[0], prefix="TRIMTAB_REQUANTIZED_MERGED", verdicts=_verdicts("TRIMTAB_REQUANTIZED_MERGE"),
    ),
)  # fmt: skip
BY_NAME: Mapping[str, Lane] = {lane.name: lane for lane in LANES}


@dataclass(frozen=True, kw_only=True)
class LanePrompt:
    """One prompt in one lane: which answer the merged model gives, and the distance of its distribution from the
    others'.

    kl_to_adapter: of merged from the same lane's adapter-loaded output; kl_base: of the base from that output;
    kl_to_bf16: of merged from the bf16 adapter-loaded output. KL in nats, means over positions, on the bf16 adapter's
    greedy text.
    """

    id: str
    classification: str
    base_differs: bool
    adapter_is_merged: bool | None
    base_is_merged: bool | None
    kl_to_adapter: float | None
    kl_base: float | None
    kl_to_bf16: float | None
    texts: Mapping[str, str | None]


@dataclass(frozen=True, kw_only=True)
class LaneRun:
    """A lane that was run: its verdict, its prompts, the share of the adapter's change in the weights, its time and
    memory.

    stages: the peaks of memory up to each stage. merge_warnings: how often PEFT warned of different generations. error:
    the exception (type, message, package, installed, frames, stage), with the earlier stages.
    """

    lane: Lane
    verdict: str
    prompts: tuple[LanePrompt, ...]
    survival: tuple[Survival, ...]
    merge_warnings: int
    warnings: Mapping[str, int]
    memory: Mapping[str, int]
    stages: Mapping[str, Mapping[str, int]]
    merge_s: float | None
    seconds: float
    notes: tuple[str, ...] = ()
    error: Mapping[str, Any] | None = None

    @property
    def counts(self) -> dict[str, int]:
        """Classification -> prompts."""
        return dict(Counter(row.classification for row in self.prompts))

    def mean(self, name: str) -> float | None:
        """Return the mean of a KL column over the prompts that have it."""
        values = [value for row in self.prompts if (value := getattr(row, name)) is not None]
        return sum(values) / len(values) if values else None

    def to_json(self) -> dict[str, Any]:
        """Return the run as JSON-ready values."""
        survived, noise = mean_survival(self.survival) if self.survival else (None, None)
        return {
            "lane": self.lane.name, "title": self.lane.title, "engine": self.lane.engine, "verdict": self.verdict,
            "counts": self.counts, "prompts": [asdict(row) for row in self.prompts],
            "merge_warnings": self.merge_warnings, "warnings": dict(self.warnings), "survived": survived,
            "survival_noise": noise, "survival": [row.to_json() for row in self.survival],
            "kl_to_adapter": self.mean("kl_to_adapter"), "kl_base": self.mean("kl_base"),
            "kl_to_bf16": self.mean("kl_to_bf16"), "memory": dict(self.memory),
            "stages": {name: dict(peaks) for name, peaks in self.stages.items()}, "merge_s": self.merge_s,
            "seconds": round(self.seconds, 2), "notes": list(self.notes), "error": dict(self.error) if self.error else None,
        }  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class LaneReport(Report):
    """All lanes that were run on one model and adapter."""

    model: str
    adapter: str
    device: str
    lanes: tuple[LaneRun, ...]
    versions: Mapping[str, str]

    def to_json(self) -> dict[str, Any]:
        """Return the report as JSON-ready values."""
        return {
            "format": 1, "model": self.model, "adapter": self.adapter, "device": self.device,
            "versions": dict(self.versions), "lanes": [run.to_json() for run in self.lanes],
        }  # fmt: skip

    def document(self) -> Document:
        return Document(f"merge lanes of {self.adapter} on {self.model}", lane_blocks(self))


def classify(lane: Lane, *, adapter_is_merged: bool, base_is_merged: bool) -> str:
    """Return whose answer a merged model gives: the adapter's, the base's or neither. If all are equal, it counts as the
    adapter's."""
    bf16 = "BF16_" if lane.prefix == "BF16_MERGED" else ""
    if adapter_is_merged:
        return f"{lane.prefix}_MATCHES_{bf16}ADAPTER"
    return f"{lane.prefix}_MATCHES_{bf16}BASE" if base_is_merged else f"{lane.prefix}_MATCHES_NEITHER"


def lane_verdict(lane: Lane, prompts: Sequence[LanePrompt]) -> str:
    """Return the verdict of a lane that ran to its end.

    If base and adapter answer a prompt equally, the same merged answer proves nothing. A merged answer that equals
    neither is a divergence on any prompt.
    """
    if lane.name == FIRST:
        return lane.verdicts["passes" if any(row.base_differs for row in prompts) else "diverges"]
    if any(not row.adapter_is_merged for row in prompts):
        return lane.verdicts["diverges"]
    return lane.verdicts["passes" if any(row.base_differs for row in prompts) else "shows_nothing"]


def check_names(names: Sequence[str] | None) -> tuple[Lane, ...]:
    """Return the lanes of these names, all lanes for None, the reference lane first. Errors: RequestError."""
    if names is None:
        return LANES
    for name in names:
        if name not in BY_NAME:
            raise RequestError("no such lane", field="lanes", value=name, allowed=tuple(BY_NAME), near=near_names(name, BY_NAME))
    return tuple(lane for lane in LANES if lane.name in names or lane.name == FIRST)


HEAD = ("lane", "verdict", "like adapter", "warnings", "KL", "KL base", "KL bf16", "survived", "noise", "host", "GPU")
PROMPT_HEAD = ("prompt", "classification", "base != adapter", "adapter == merged", "base == merged")


def lane_row(run: LaneRun) -> tuple[str, ...]:
    """Return one lane's cells under HEAD."""
    compared = [row for row in run.prompts if row.adapter_is_merged is not None]
    alike = f"{sum(bool(row.adapter_is_merged) for row in compared)} of {len(compared)}" if compared else "-"
    survived, noise = mean_survival(run.survival) if run.survival else (None, None)
    host, gpu = run.memory.get("host_peak_bytes"), run.memory.get("gpu_peak_bytes")
    return (
        run.lane.name, run.verdict, alike, str(run.merge_warnings), number(run.mean("kl_to_adapter")),
        number(run.mean("kl_base")), number(run.mean("kl_to_bf16")),
        "-" if survived is None else f"{100 * survived:.1f} %", number(noise), gib(host) if host else "-",
        gib(gpu) if gpu else "-",
    )  # fmt: skip


def prompt_rows(run: LaneRun) -> list[tuple[str, ...]]:
    """Return the prompt table of a lane under PROMPT_HEAD."""
    return [
        (row.id, row.classification, yes(row.base_differs), yes(row.adapter_is_merged), yes(row.base_is_merged))
        for row in run.prompts
    ]


def error_words(run: LaneRun) -> str:
    """Return a lane's exception in one line; empty if it finished."""
    error = run.error
    if error is None:
        return ""
    where = f" ({error['package']} {error['installed']})" if error.get("installed") else ""
    return f"{run.lane.name} raised at stage {error['stage']}: {error['type']}: {error['message']}{where}"


LEGEND = (
    "KL: merged model from loaded adapter, same lane; KL base: base from loaded adapter, the effect of the adapter; KL bf16: "
    "merged model from the adapter in bf16. survived: share of the adapter's change that is in the weights; noise: other "
    "changes, relative to the norm of the adapter's."
)


def lane_blocks(report: LaneReport, chart_of: Callable[[LaneRun], Figure] | None = None) -> list[Block]:
    """Return what the lanes' part of a report says. chart_of: makes the chart of a lane's survival."""
    blocks: list[Block] = [Table(HEAD, [lane_row(run) for run in report.lanes]), Text(LEGEND, "note")]
    for run in report.lanes:
        blocks.append(Heading(f"{run.lane.name}: {run.lane.title}"))
        blocks += [Table(PROMPT_HEAD, prompt_rows(run))] if run.prompts else []
        blocks.append(Items([text for text in (error_words(run), *run.notes) if text]))
        blocks += [chart_of(run)] if chart_of is not None and run.survival else []
    return blocks
