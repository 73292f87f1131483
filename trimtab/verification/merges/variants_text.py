"""What does a report say about merge lanes: one row per lane, one row per prompt?"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from trimtab.errors import gib
from trimtab.report.document import Block, Figure, Heading, Items, Table, Text, number, yes
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


def lane_blocks(report: LaneReport, chart_of: Callable[[LaneRun], Figure] | None = None) -> list[Block]:
    """Return what the lanes' part of a report says. chart_of: makes the chart of a lane's survival."""
    blocks: list[Block] = [Table(HEAD, [lane_row(run) for run in report.lanes]), Text(LEGEND, "note")]
    for run in report.lanes:
        blocks.append(Heading(f"{run.lane.name}: {run.lane.title}"))
        blocks += [Table(PROMPT_HEAD, prompt_rows(run))] if run.prompts else []
        blocks.append(Items([text for text in (error_words(run), *run.notes) if text]))
        blocks += [chart_of(run)] if chart_of is not None and run.survival else []
    return blocks
