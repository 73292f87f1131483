"""Merge lanes as text: one row per lane, one row per prompt, on a screen and as Markdown."""

from __future__ import annotations

from typing import TYPE_CHECKING

from trimtab.errors import gib
from trimtab.report.cells import markdown_cell, markdown_table, number, table, yes
from trimtab.verification.merges.retention import mean_survival

if TYPE_CHECKING:
    from trimtab.verification.merges.variants import LaneReport, LaneRun

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


def lanes_text(report: LaneReport) -> str:
    """Return the lanes as printed text."""
    lines = [*table(HEAD, [lane_row(run) for run in report.lanes]), "", LEGEND]
    for run in report.lanes:
        lines += ["", f"{run.lane.name}: {run.lane.title}"]
        lines += table(PROMPT_HEAD, prompt_rows(run), indent="  ") if run.prompts else []
        lines += [f"  ! {text}" for text in (error_words(run), *run.notes) if text]
    return "\n".join(lines)


def lanes_markdown(report: LaneReport) -> str:
    """Return the lanes as Markdown."""
    lines = [*markdown_table(HEAD, [lane_row(run) for run in report.lanes]), "", LEGEND]
    for run in report.lanes:
        lines += ["", f"### {run.lane.name}", "", f"{run.lane.title}.", ""]
        lines += markdown_table(PROMPT_HEAD, prompt_rows(run)) if run.prompts else []
        lines += [f"- {markdown_cell(text)}" for text in (error_words(run), *run.notes) if text]
    return "\n".join(lines)
