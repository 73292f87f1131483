"""How a parity report reads: as a table on a screen and as Markdown for a page or an issue."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from trimtab.errors import gib
from trimtab.proof.survival import mean_survival

if TYPE_CHECKING:
    from trimtab.proof.report import ParityReport, PromptParity

HEAD = ("prompt", "kind", "verdict", "first", "max", "mean", "KL mean", "KL max", "top-1", "text")
MERGE_HEAD = ("prompt", "merged is", "base != adapter", "adapter == merged", "base == merged", "KL", "KL base")
WORST_MODULES = 5


def number(value: float | None) -> str:
    """Return a number for people: 0 only if it is exactly 0."""
    return "-" if value is None else "0" if value == 0 else f"{value:.3g}"


def yes(value: bool | None) -> str:
    """Return yes, no, or - for what was not asked."""
    return "-" if value is None else "yes" if value else "no"


def prompt_row(row: PromptParity) -> tuple[str, ...]:
    """Return one prompt's cells under HEAD."""
    found = row.difference
    first = "-" if found.first_position is None else str(found.first_position)
    name = row.id if row.adapter is None else f"{row.id} ({row.adapter})"
    return (
        name, row.kind, row.verdict, first, number(found.max_abs), number(found.mean_abs), number(found.kl_mean),
        number(found.kl_max), f"{100 * found.top1_agreement:.1f} %",
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
    """Return what the noise floor is and how it was measured."""
    floor = report.floor
    if not floor.pairs:
        return ["noise floor: not measured; any difference counts"]
    size = f"max {number(floor.max_abs)}, mean {number(floor.mean_abs)}, KL {number(floor.kl_max)}"
    tried = ", ".join(floor.orders)
    return [
        f"noise floor: {size}: the largest difference between any two of {len(floor.orders)} runs of "
        f"{report.reference['label']}",
        f"  runs: {tried}",
    ]


def route_words(route: Mapping[str, Any]) -> str:
    """Return one line on a route: label, format, placement, what it took."""
    tiers = ", ".join(f"{count} {tier}" for tier, count in (route.get("tiers") or {}).items())
    memory = route.get("memory") or {}
    took = [f"host peak {gib(memory['host_peak_bytes'])}"] if memory.get("host_peak_bytes") else []
    took += [f"GPU peak {gib(memory['gpu_peak_bytes'])}"] if memory.get("gpu_peak_bytes") else []
    parts = [route["label"], route["engine"], str(route.get("quant") or ""), route.get("head") or "", tiers, *took]
    return " · ".join(part for part in parts if part)


def verdict_words(report: ParityReport) -> str:
    """Return the verdict in one sentence."""
    a, b = report.subject["label"], report.reference["label"]
    if report.expected == "differs":
        return f"{report.verdict}: {a} {'differs from' if report.ok else 'is the same as'} {b}" + (
            ", so the adapter is active" if report.ok else ": the adapter is inactive"
        )
    return f"{report.verdict}: {a} against {b}"


def survival_words(report: ParityReport) -> list[str]:
    """Return what of the adapter's change is in the merged weights, and the modules where it fares worst."""
    if not report.survival:
        return []
    survived, noise = mean_survival(report.survival)
    worst = sorted(report.survival, key=lambda row: row.survived)[:WORST_MODULES]
    lines = [
        f"of the adapter's change {100 * survived:.1f} % is in the merged weights of {len(report.survival)} modules, with "
        f"{number(noise)} times its length of other changes"
    ]
    if survived < 0.999:
        lines += [f"  least: {row.module_path} {100 * row.survived:.1f} %" for row in worst]
    return lines


def table(head: Sequence[str], rows: Sequence[Sequence[str]], *, indent: str = "") -> list[str]:
    """Return lines of aligned columns."""
    widths = [max(len(row[at]) for row in [head, *rows]) for at in range(len(head))]
    return [
        (indent + "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True))).rstrip()
        for row in [head, *rows]
    ]


def report_text(report: ParityReport) -> str:
    """Return the report as it is printed."""
    lines = [verdict_words(report), ""]
    lines += [f"  {route_words(route)}" for route in (report.reference, report.subject)]
    lines += ["", *table(HEAD, [prompt_row(row) for row in report.prompts]), ""]
    if any(row.merged_matches for row in report.prompts):
        lines += [*table(MERGE_HEAD, [merge_row(row) for row in report.prompts]), ""]
    lines += floor_words(report)
    lines += survival_words(report)
    lines += [f"! {finding}" for finding in report.findings]
    if report.lanes is not None:
        lines += ["", str(report.lanes)]
    return "\n".join(lines)


def markdown_table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Return a Markdown table; bars and line ends in cells are escaped."""
    lines = [head, ["---"] * len(head), *rows]
    return ["| " + " | ".join(markdown_cell(cell) for cell in row) + " |" for row in lines]


def markdown_cell(text: str) -> str:
    """Return text that stays inside its cell."""
    escaped = text.replace("\\", "\\\\").replace("|", "\\|").replace("<", "&lt;").replace("`", "\\`")
    return " ".join(escaped.split())


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
    lines += survival_words(report)
    if report.findings:
        lines += ["", "## Findings", "", *[f"- {markdown_cell(finding)}" for finding in report.findings]]
    if report.lanes is not None:
        from trimtab.proof.lane_words import lanes_markdown

        lines += ["", "## Merge lanes", "", lanes_markdown(report.lanes)]
    if report.versions:
        lines += ["", "Versions: " + ", ".join(f"{name} {found}" for name, found in report.versions.items())]
    return "\n".join(lines).rstrip() + "\n"
