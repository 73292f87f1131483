"""What does a parity report say: verdict, routes, numbers, and how sure they are?"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

from trimtab.errors import ParityError, gib
from trimtab.report.document import Block, Details, Document, Facts, Figure, Heading, Items, Table, number, yes
from trimtab.report.render import Report
from trimtab.verification.render import plots
from trimtab.verification.routes.alarm_rate import FALSE_ALARM_RATE, MARGIN

if TYPE_CHECKING:
    from trimtab.verification.merges.retention import Survival
    from trimtab.verification.merges.variants import LaneReport, LaneRun
    from trimtab.verification.merges.weights import MergedWeights
    from trimtab.verification.routes.compare import Difference, NoiseFloor
    from trimtab.verification.routes.loaded_changes import LoadedChanges


HEAD = ("prompt", "kind", "verdict", "first", "max", "mean", "KL mean", "KL max", "top-1", "text")
MERGE_HEAD = ("prompt", "merged is", "base != adapter", "adapter == merged", "base == merged", "KL", "KL base")
WORST_MODULES = 5
_DRAW_NUMBER = re.compile(r" \(\d+\)$")


@dataclass(frozen=True, kw_only=True)
class PromptParity:
    """One prompt, compared. The three booleans of a merge: base_is_adapter, same_text (adapter == merged),
    base_is_merged.

    same_text: whether the greedy tokens are equal, None if they are not requested (batches). base_kl: the adapter's own
    effect on the base (KL in nats, mean of positions), to compare the difference's KL with. base_is_noise: whether that
    is no more than the noise, so that the prompt cannot distinguish a merged model from the base.
    """

    id: str
    kind: str
    adapter: str | None
    verdict: str
    difference: Difference
    prompt_tokens: int
    reference_text: str | None
    subject_text: str | None
    same_text: bool | None
    expected_text: str | None = None
    base_kl: float | None = None
    base_is_noise: bool | None = None
    base_is_adapter: bool | None = None
    base_is_merged: bool | None = None

    @property
    def merged_matches(self) -> str | None:
        """The side that the merged model's answer equals: "ADAPTER", "BASE" or "NEITHER"; None without a merge."""
        if self.base_is_merged is None:
            return None
        return "ADAPTER" if self.same_text else "BASE" if self.base_is_merged else "NEITHER"

    def to_json(self) -> dict[str, Any]:
        """Return the row as JSON-ready values."""
        values = {name: getattr(self, name) for name in self.__dataclass_fields__}
        return values | {"difference": self.difference.to_json(), "merged_matches": self.merged_matches}


@dataclass(frozen=True, kw_only=True)
class ParityReport(Report):
    """Two routes to the same answers.

    against: the comparison (a word of `comparisons.AGAINST` or a folder). expected: the right verdict: `same`
    (bit-equal or within noise), or `differs` if an adapter must have an effect. floor: the reference's own noise.
    layers: relative difference of the hidden states after each layer, the largest of all prompts. survival: the share
    of the adapter's change in a merged folder, by module; weights: the test of these weights, which is more sensitive
    than answers. changes: whether both routes loaded the same adapters, as sensitive. findings: further notes for the
    reader. unfinished: why a later step, such as the lanes, failed.
    """

    model: str
    against: str
    adapter: str | None
    expected: str
    prompts: tuple[PromptParity, ...]
    floor: NoiseFloor
    layers: tuple[float, ...]
    reference: Mapping[str, Any]
    subject: Mapping[str, Any]
    findings: tuple[str, ...] = ()
    survival: tuple[Survival, ...] = ()
    weights: MergedWeights | None = None
    changes: LoadedChanges | None = None
    lanes: LaneReport | None = None
    unfinished: str | None = None
    versions: Mapping[str, str] = field(default_factory=dict)

    @cached_property
    def verdict(self) -> str:
        """The worst verdict of all prompts and of the merged weights; "cannot tell" if a fault would be below the noise."""
        from trimtab.verification.routes.compare import CANNOT_TELL, DIFFERS, WITHIN_NOISE, worst

        answers = worst(row.verdict for row in self.prompts)
        if DIFFERS in (answers, self.weights.verdict if self.weights is not None else None):
            return DIFFERS
        if self.changes is not None and self.changes.wrong:
            return DIFFERS
        if self.weights is not None and self.weights.others.not_compared:
            return CANNOT_TELL
        if answers != WITHIN_NOISE:
            return answers
        return CANNOT_TELL if self._is_below_noise else WITHIN_NOISE

    @property
    def _is_below_noise(self) -> bool:
        """Whether answers within noise prove nothing: the fault to detect would be within it too."""
        if self.expected == "differs":
            return True
        is_merge = any(row.base_kl is not None for row in self.prompts)
        if not is_merge or (self.weights is not None and self.weights.verdict == "right"):
            return False
        return all(row.base_is_noise for row in self.prompts)

    @property
    def ok(self) -> bool:
        """Whether the verdict is the expected one, which sets the command's exit code.

        "cannot tell" is accepted for answers that should be the same, if they are within a measured noise.
        """
        if self.expected == "differs":
            return self.verdict == "differs"
        return self.verdict != "differs" and (self.verdict != "cannot tell" or self.floor.is_measured)

    @property
    def worst_prompt(self) -> PromptParity:
        """The prompt with the largest difference, of those with the worst verdict."""
        return max(self.prompts, key=lambda row: (row.verdict == "differs", row.difference.max_abs))

    def check(self) -> None:
        """Raise ParityError unless the verdict is the right one."""
        if self.ok:
            return
        row = self.worst_prompt
        limit = self.floor.limits.get(row.id)
        ours, theirs = self.subject["label"], self.reference["label"]
        if self.verdict == "cannot tell":
            reason = f"cannot tell whether {ours} differs from {theirs}: " + (
                "the difference is within the noise" if self.floor.is_measured else "the noise could not be measured"
            )
        elif self.expected == "differs":
            reason = f"{ours} gives the same answers as {theirs}: the adapter is inactive"
        elif self.weights is not None and self.weights.wrong and row.verdict != "differs":
            reason = f"{self.weights.wrong[0].module_path} of {ours} is not base plus change"
        elif self.weights is not None and self.weights.others.differing and row.verdict != "differs":
            reason = f"{self.weights.others.differing[0]} of {ours} is not the base's, and the adapter does not change it"
        elif self.changes is not None and self.changes.wrong:
            reason = f"{ours} did not load the same adapters as {theirs}: {self.changes.wrong[0]}"
        else:
            reason = f"{ours} differs from {theirs} on prompt {row.id}"
        first = row.difference.first_position
        raise ParityError(
            reason, position=-1 if first is None else first, max_abs=row.difference.max_abs,
            mean_abs=row.difference.mean_abs, tolerance=limit.max_abs if limit is not None else 0.0,
            hint="The tolerance is a bound on the reference's own noise, measured in the same run",
        )  # fmt: skip

    def to_json(self) -> dict[str, Any]:
        """Return the report as JSON-ready values."""
        return {
            "format": 1, "model": self.model, "against": self.against, "adapter": self.adapter,
            "verdict": self.verdict, "expected": self.expected, "ok": self.ok, "findings": list(self.findings),
            "prompts": [row.to_json() for row in self.prompts], "noise_floor": self.floor.to_json(),
            "layers": [_finite(value) for value in self.layers], "reference": dict(self.reference),
            "subject": dict(self.subject),
            "survival": [{k: _finite(v) for k, v in row.to_json().items()} for row in self.survival],
            "weights": self.weights.to_json() if self.weights is not None else None,
            "changes": self.changes.to_json() if self.changes is not None else None,
            "lanes": self.lanes.to_json() if self.lanes is not None else None, "versions": dict(self.versions),
        }  # fmt: skip

    def document(self) -> Document:
        return document_of(self)


def _finite(value: Any) -> Any:
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def prompt_row(row: PromptParity) -> tuple[str, ...]:
    """Return one prompt's cells under HEAD."""
    difference = row.difference
    first = "-" if difference.first_position is None else str(difference.first_position)
    name = row.id if row.adapter is None else f"{row.id} ({row.adapter})"
    return (
        name, row.kind, row.verdict, first, number(difference.max_abs), number(difference.mean_abs), number(difference.kl_mean),
        number(difference.kl_max), f"{100 * difference.top1_agreement:.1f} %",
        "-" if row.same_text is None else "same" if row.same_text else "differs",
    )  # fmt: skip


def merge_row(row: PromptParity) -> tuple[str, ...]:
    """Return one prompt's cells under MERGE_HEAD."""
    moved = None if row.base_is_adapter is None else not row.base_is_adapter
    return (
        row.id, row.merged_matches or "-", yes(moved), yes(row.same_text), yes(row.base_is_merged),
        number(row.difference.kl_mean), number(row.base_kl),
    )  # fmt: skip


def floor_rows(report: ParityReport) -> list[tuple[str, str]]:
    """Return the noise floor, its measurement, and the limit above which a difference is more than noise."""
    floor = report.floor
    if not floor.pairs:
        return [("noise floor", "not measured; a difference cannot be judged")]
    size = f"max {number(floor.max_abs)}, mean {number(floor.mean_abs)}, KL {number(floor.kl_max)}"
    orders = Counter(_DRAW_NUMBER.sub("", name) for name in floor.orders)
    rows = [
        ("noise floor", f"{size}: the largest difference between runs of {report.reference['label']}, "
         f"{len(floor.orders)} for each prompt"),
        ("runs", ", ".join(name if count == 1 else f"{name} ({count} times)" for name, count in orders.items())),
    ]  # fmt: skip
    if floor.limit is None:
        return [*rows, ("limit", "too few runs to know the spread of the noise; a difference cannot be judged")]
    limit = floor.limit
    text = (
        f"max {number(limit.max_abs)}, mean {number(limit.mean_abs)}, KL mean {number(limit.kl_mean)} on the noisiest prompt: a "
        f"prediction bound over the runs that are rounded at random, times {MARGIN:g}; false-alarm rate {FALSE_ALARM_RATE:.0e}"
    )
    return [*rows, ("limit", text)]


def weight_rows(report: ParityReport) -> list[tuple[str, str]]:
    """Return what is known of the merged weights, and whether both routes loaded the same changes."""
    weights, changes, rows = report.weights, report.changes, list[tuple[str, str]]()
    if weights is not None:
        sees = "would be detected" if weights.sees_scale_fault else "would not be detected: it is below the rounding"
        rows.append(("weights", (
            f"{weights.verdict}: slope of the written change on the exact one {1 + weights.together.off:.6g} over "
            f"{len(weights.modules)} modules, {len(weights.wrong)} of them wrong; a scale wrong by 1 % {sees}; false-alarm rate "
            f"{weights.false_alarm_rate:.0e}"
        )))  # fmt: skip
        others = weights.others
        counts = {"are the base's": others.equal, "differ": len(others.differing), "were not compared": len(others.not_compared)}
        if words := ", ".join(f"{count} {what}" for what, count in counts.items() if count):
            rows.append(("other tensors", words))
    if changes is not None:
        same = f"the same in all {changes.modules} modules" if not changes.wrong else f"other in {len(changes.wrong)} modules"
        rows.append(("adapters as loaded", f"{same}; a scale wrong by 1 % would be detected"))
    if report.survival:
        from trimtab.verification.merges.retention import mean_survival

        survived, noise = mean_survival(report.survival)
        worst = sorted(report.survival, key=lambda row: row.survived)[:WORST_MODULES] if survived < 0.999 else []
        rows.append(("survival", (
            f"{100 * survived:.1f} % of the adapter's change is in the merged weights of {len(report.survival)} modules, with "
            f"other changes of {number(noise)} times its norm"
        )))  # fmt: skip
        rows += [("", f"minimum: {row.module_path} {100 * row.survived:.1f} %") for row in worst]
    return rows


def route_words(route: Mapping[str, Any]) -> str:
    """Return one line on a route: label, format, placement, time and memory."""
    tiers = ", ".join(f"{count} {tier}" for tier, count in (route.get("tiers") or {}).items())
    memory = route.get("memory") or {}
    took = [f"host peak {gib(memory['host_peak_bytes'])}"] if memory.get("host_peak_bytes") else []
    took += [f"GPU peak {gib(memory['gpu_peak_bytes'])}"] if memory.get("gpu_peak_bytes") else []
    parts = [route["label"], route["engine"], str(route.get("quant") or ""), route.get("head") or "", tiers, *took]
    return " · ".join(part for part in parts if part)


def verdict_words(report: ParityReport) -> str:
    """Return the verdict in one sentence."""
    a, b = report.subject["label"], report.reference["label"]
    if report.verdict == "cannot tell":
        why = "its noise could not be measured" if not report.floor.is_measured else "a fault would be below the noise"
        return f"cannot tell: {a} against {b}; {why}"
    if report.expected == "differs":
        return f"{report.verdict}: {a} {'differs from' if report.ok else 'is the same as'} {b}" + (
            ", so the adapter is active" if report.ok else ": the adapter is inactive"
        )
    return f"{report.verdict}: {a} against {b}"


def document_of(report: ParityReport) -> Document:
    """Return what a parity report says."""
    routes = [("model", report.model), ("adapter", report.adapter or "none")]
    routes += [("compared", route_words(report.subject)), ("with", route_words(report.reference))]
    blocks: list[Block] = [Facts(routes), Table(HEAD, [prompt_row(row) for row in report.prompts])]
    if any(row.merged_matches for row in report.prompts):
        blocks.append(Table(MERGE_HEAD, [merge_row(row) for row in report.prompts]))
    blocks.append(Facts(floor_rows(report) + weight_rows(report)))
    if report.findings:
        blocks += [Heading("Findings"), Items(report.findings)]
    answers = ("prompt", report.reference["label"], report.subject["label"], "expected")
    rows = [(r.id, *(text or "-" for text in (r.reference_text, r.subject_text, r.expected_text))) for r in report.prompts]
    blocks.append(Details("Answers", [Table(answers, rows)]))
    blocks.append(Details("Largest difference by position", [_positions(report, row) for row in report.prompts]))
    if report.layers:
        names = [f"layer {at}" if at else "embedding" for at in range(len(report.layers))]
        blocks.append(_bars("Relative difference of hidden states by layer", report.layers, names, logarithmic=True))
    if report.survival:
        names = [row.module_path for row in report.survival]
        blocks.append(_bars("Survival of the adapter's change by module", [row.survived for row in report.survival], names))
        noise = [row.noise for row in report.survival]
        blocks.append(_bars("Other changes by module, relative to the adapter's", noise, names, logarithmic=True))
    if report.lanes is not None:
        from trimtab.verification.merges.variants import lane_blocks

        blocks += [Heading("Merge lanes"), *lane_blocks(report.lanes, _lane_chart)]
    blocks.append(Facts([("versions", ", ".join(f"{name} {release}" for name, release in report.versions.items()))]))
    return Document(verdict_words(report), blocks, "good" if report.ok else "bad")


def _bars(title: str, values: Sequence[float], names: Sequence[str], *, logarithmic: bool = False) -> Figure:
    line = None if logarithmic else 1.0
    return Figure(title, plots.bars(values, names, label=title, logarithmic=logarithmic, line=line))


def _lane_chart(run: LaneRun) -> Figure:
    shares, names = [row.survived for row in run.survival], [row.module_path for row in run.survival]
    return _bars(f"Survival in {run.lane.name}", shares, names)


def _positions(report: ParityReport, row: PromptParity) -> Figure:
    limit = report.floor.limits.get(row.id)
    title = row.id if row.adapter is None else f"{row.id} ({row.adapter})"
    return Figure(title, plots.lines(
        row.difference.max_abs_by_position, label=f"difference by position, {title}",
        dashed=limit.max_abs if limit is not None else None, dashed_label="limit of the noise", mark=row.prompt_tokens,
        mark_label="answer",
    ))  # fmt: skip
