"""A parity report as text: a table on a screen, Markdown for a page or an issue."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from trimtab.errors import gib
from trimtab.report.cells import markdown_cell, markdown_table, number, table, yes
from trimtab.verification.merges.retention import mean_survival
from trimtab.verification.merges.variants_text import lanes_markdown
from trimtab.verification.routes.alarm_rate import FALSE_ALARM_RATE, MARGIN

if TYPE_CHECKING:
    from trimtab.verification.render.report import ParityReport, PromptParity

HEAD = ("prompt", "kind", "verdict", "first", "max", "mean", "KL mean", "KL max", "top-1", "text")
MERGE_HEAD = ("prompt", "merged is", "base != adapter", "adapter == merged", "base == merged", "KL", "KL base")
WORST_MODULES = 5
_DRAW_NUMBER = re.compile(r" \(\d+\)$")


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


def floor_words(report: ParityReport) -> list[str]:
    """Return the noise floor, its measurement, and the limit above which a difference is more than noise."""
    floor = report.floor
    if not floor.pairs:
        return ["noise floor: not measured; a difference cannot be judged"]
    size = f"max {number(floor.max_abs)}, mean {number(floor.mean_abs)}, KL {number(floor.kl_max)}"
    orders = Counter(_DRAW_NUMBER.sub("", name) for name in floor.orders)
    lines = [
        f"noise floor: {size}: the largest difference between runs of {report.reference['label']}, "
        f"{len(floor.orders)} for each prompt",
        "  runs: " + ", ".join(name if count == 1 else f"{name} ({count} times)" for name, count in orders.items()),
    ]
    if floor.limit is None:
        return [*lines, "limit: too few runs to know the spread of the noise; a difference cannot be judged"]
    limit = floor.limit
    lines.append(
        f"limit: max {number(limit.max_abs)}, mean {number(limit.mean_abs)}, KL mean {number(limit.kl_mean)} on the "
        f"noisiest prompt: a prediction bound over the runs that are rounded at random, times {MARGIN:g}; "
        f"false-alarm rate {FALSE_ALARM_RATE:.0e}"
    )
    return lines


def weights_words(report: ParityReport) -> list[str]:
    """Return the text about the test of the merged weights."""
    weights = report.weights
    if weights is None:
        return []
    sees = "would be detected" if weights.sees_scale_fault else "would not be detected: it is below the rounding"
    return [
        f"weights: {weights.verdict}: slope of the written change on the exact one {1 + weights.together.off:.6g} over "
        f"{len(weights.modules)} modules, {len(weights.wrong)} of them wrong",
        f"  a scale wrong by 1 % {sees}; false-alarm rate {weights.false_alarm_rate:.0e}",
    ]


def changes_words(report: ParityReport) -> list[str]:
    """Return whether both routes loaded the same changes."""
    changes = report.changes
    if changes is None:
        return []
    same = f"the same in all {changes.modules} modules" if not changes.wrong else f"other in {len(changes.wrong)} modules"
    return [f"adapters as loaded: {same}; a scale wrong by 1 % would be detected"]


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


def survival_words(report: ParityReport) -> list[str]:
    """Return the retained share of the adapter's change, and the modules with the smallest share."""
    if not report.survival:
        return []
    survived, noise = mean_survival(report.survival)
    worst = sorted(report.survival, key=lambda row: row.survived)[:WORST_MODULES]
    lines = [
        f"{100 * survived:.1f} % of the adapter's change is in the merged weights of {len(report.survival)} modules, with other "
        f"changes of {number(noise)} times its norm"
    ]
    if survived < 0.999:
        lines += [f"  minimum: {row.module_path} {100 * row.survived:.1f} %" for row in worst]
    return lines


def report_text(report: ParityReport) -> str:
    """Return the report as printed text."""
    lines = [verdict_words(report), ""]
    lines += [f"  {route_words(route)}" for route in (report.reference, report.subject)]
    lines += ["", *table(HEAD, [prompt_row(row) for row in report.prompts]), ""]
    if any(row.merged_matches for row in report.prompts):
        lines += [*table(MERGE_HEAD, [merge_row(row) for row in report.prompts]), ""]
    lines += floor_words(report)
    lines += weights_words(report) + changes_words(report)
    lines += survival_words(report)
    lines += [f"! {finding}" for finding in report.findings]
    if report.lanes is not None:
        lines += ["", str(report.lanes)]
    return "\n".join(lines)


def report_markdown(report: ParityReport) -> str:
    """Return the report as Markdown."""
    lines = [f"# {markdown_cell(verdict_words(report))}", ""]
    lines += [f"- model: {markdown_cell(report.model)}", f"- adapter: {markdown_cell(report.adapter or 'none')}"]
    lines += [f"- {markdown_cell(route_words(route))}" for route in (report.reference, report.subject)]
    lines += ["", *markdown_table(HEAD, [prompt_row(row) for row in report.prompts]), ""]
    if any(row.merged_matches for row in report.prompts):
        lines += [*markdown_table(MERGE_HEAD, [merge_row(row) for row in report.prompts]), ""]
    lines += ["## Answers", ""]
    lines += markdown_table(
        ("prompt", report.reference["label"], report.subject["label"], "expected"),
        [(row.id, row.reference_text or "-", row.subject_text or "-", row.expected_text or "-") for row in report.prompts],
    )  # fmt: skip
    lines += ["", "## How sure", "", *[line.strip() for line in floor_words(report)], ""]
    lines += [line.strip() for line in weights_words(report)] + changes_words(report)
    lines += survival_words(report)
    if report.findings:
        lines += ["", "## Findings", "", *[f"- {markdown_cell(finding)}" for finding in report.findings]]
    if report.lanes is not None:
        lines += ["", "## Merge lanes", "", lanes_markdown(report.lanes)]
    if report.versions:
        lines += ["", "Versions: " + ", ".join(f"{name} {release}" for name, release in report.versions.items())]
    return "\n".join(lines).rstrip() + "\n"
