"""How does the chart of a plan show each device and its budget?"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from trimtab.errors import gib
from trimtab.planning.plan.table import marked_rate, tensors_peak, verdict
from trimtab.report.charts import INK, LINE, MARGIN, OVER, PAPER, QUIET, WIDTH, Box, Label, Shape, Stroke, check_path, write_shapes

if TYPE_CHECKING:
    from trimtab.planning.plan.contents import PlanContents

BAR_HEIGHT = 46
BAR_WIDTH = WIDTH - 2 * MARGIN
LEGEND_COLUMNS, LEGEND_ROW = 3, 20

# One hue per part; a lighter shade for memory that is only temporary.
PART_COLORS = {
    "language": "#2f6690", "table": "#3a9188", "head": "#5b6c9e", "vision": "#d98e32", "audio": "#b0587f",
    "connector": "#8a7a4f",
}  # fmt: skip
ITEM_COLORS = {
    "adapters": "#7b4fa3", "kv_cache": "#6fa8dc", "kv_copies": "#8cb8e0", "activations": "#9fc5e8", "staging": "#b7b7a4",
    "buffers": "#b7b7a4", "kernels": "#8fa3b0", "graphs": "#8e7cc3", "logits": "#b4a7d6", "scratch": "#c9c2dd",
    "workspaces": "#d9d2e9", "prompt_graphs": "#7f6db0", "fragments": "#dfe3e6",
    "prompt_buffers": "#a99bd0", "adapter_copy": "#8f6bb8", "checks": "#e3dff0", "cuda_context": "#aab2bb",
    "allocator_reserve": "#cfd5db", "unpacked_weights": "#7d9cbf", "held_adapters": "#7b4fa3", "process": "#aab2bb",
    "fixed": "#45556b", "media": "#d98e32", "media_files": "#e8c39a",
    "tower_graphs": "#6f5aa6", "tower_buffers": "#c3a0b8", "tower_activations": "#d3b8c9",
}  # fmt: skip
ITEM_NAMES = {
    "kv_cache": "KV cache", "loading": "more while loading", "kv_copies": "KV copies of steps", "cuda_context": "driver context",
    "kernels": "libraries and kernels", "graphs": "graph nodes", "workspaces": "cuBLAS workspaces", "checks": "kernel checks",
    "fixed": "shared look-up tables", "media": "decoding of media", "media_files": "received media",
}  # fmt: skip
TIER_TINT = {"resident": 0.0, "gather": 0.25, "stream": 0.35, "host": 0.5, "disk": 0.2}


@dataclass(frozen=True)
class Segment:
    """One segment of a bar."""

    name: str
    nbytes: int
    color: str


@dataclass(frozen=True)
class Bar:
    """One device: its bytes and its budget, None for a disk of unknown size."""

    name: str
    segments: tuple[Segment, ...]
    budget_bytes: int | None
    note: str

    @property
    def nbytes(self) -> int:
        return sum(segment.nbytes for segment in self.segments)


def bars_of(plan: PlanContents) -> list[Bar]:
    """Return the bars of a plan; the segments of a device add up to the bytes that are checked against its budget."""
    gpu, host = plan.gpu, plan.host
    placed = {device: _by_part_and_tier(plan, device) for device in ("gpu", "host", "disk")}
    named = {"weights", "fixed"}
    in_rows = sum(segment.nbytes for segment in placed["gpu"])
    shared = gpu["weights"] + gpu["fixed"] - in_rows
    items = [*([("fixed", shared)] if shared > 0 else []), *((k, v) for k, v in gpu.items() if k not in named)]
    items.append(("loading", plan.gpu_needed_bytes - sum(gpu.values())))  # 0 unless loading takes the most
    device = Bar(
        plan.execution_device, (*placed["gpu"], *_items(items)), plan.gpu_budget_bytes,
        f"needs {gib(plan.gpu_needed_bytes)}: {tensors_peak(plan)}",
    )  # fmt: skip
    memory = Bar(
        "host memory", (*placed["host"], *_items((k, v) for k, v in host.items() if not k.endswith("weights"))),
        plan.host_budget_bytes, f"needs {gib(plan.host_peak_bytes)}",
    )  # fmt: skip
    if not plan.disk_bytes:
        return [device, memory]
    return [device, memory, Bar("disk", tuple(placed["disk"]), None, f"spill file of {gib(plan.disk_bytes)}")]


def _by_part_and_tier(plan: PlanContents, device: str) -> list[Segment]:
    by_tier: dict[tuple[str, str], int] = {}
    for row in plan.placements:
        nbytes = getattr(row, f"{device}_bytes")
        # Tensors that cannot leave the device are resident in every tier of the block.
        tier = "resident" if device == "gpu" else row.tier
        if nbytes:
            by_tier[row.part, tier] = by_tier.get((row.part, tier), 0) + nbytes
    order = {part: place for place, part in enumerate(PART_COLORS)}
    return [
        Segment(f"{part} ({tier})", nbytes, _tinted(PART_COLORS[part], TIER_TINT[tier]))
        for (part, tier), nbytes in sorted(by_tier.items(), key=lambda item: (order[item[0][0]], item[0][1]))
    ]


def _items(named: Iterable[tuple[str, int]]) -> list[Segment]:
    return [
        Segment(ITEM_NAMES.get(name, name.replace("_", " ")), count, ITEM_COLORS.get(name, QUIET)) for name, count in named if count
    ]


def _tinted(color: str, share: float) -> str:
    """Return the color mixed with white."""
    channels = (int(color[at : at + 2], 16) for at in (1, 3, 5))
    return "#" + "".join(f"{round(value + (255 - value) * share):02x}" for value in channels)


def layout(plan: PlanContents) -> tuple[list[Shape], float]:
    """Return the shapes of the chart and its height in pixels."""
    request = plan.request
    shapes: list[Shape] = [
        Label(MARGIN, 40, plan.model_class, 20, INK, bold=True),
        Label(
            MARGIN, 62,
            f"{request.quant}, context {request.context_tokens}, answer {plan.answer_tokens}, batch {request.batch}, "
            f"images {request.images}, audio {request.audio_s:g} s", 13, QUIET,
        ),
        Label(MARGIN, 80, _execution_line(plan), 13, QUIET),
        Label(MARGIN, 98, verdict(plan), 13, INK),
    ]  # fmt: skip
    if plan.card is not None:
        shapes.append(Label(WIDTH - MARGIN, 40, f"ESTIMATE for {plan.card.title}", 13, INK, anchor="end"))
    top = 128.0
    for bar in bars_of(plan):
        bar_shapes, top = _bar(bar, top)
        shapes += bar_shapes
    return shapes, top


def _execution_line(plan: PlanContents) -> str:
    execution = plan.execution
    head = ", 8-bit head" if execution.head == "int8" else ""
    head += ", 8-bit keys and values" if plan.request.kv == "int8" else ""
    towers = "" if execution.towers is None else f"towers {execution.towers.mode}, "
    return f"prompts {execution.prompt.mode}, {towers}decode steps {execution.step.mode}{head}: {marked_rate(plan)} predicted"


def _bar(bar: Bar, top: float) -> tuple[list[Shape], float]:
    # The end of the bar is a little beyond the larger of load and budget, so that the load line is always inside.
    scale = BAR_WIDTH / (max(bar.nbytes, bar.budget_bytes or 0) * 1.04 or 1)
    shapes: list[Shape] = [
        Label(MARGIN, top + 12, bar.name, 15, INK, bold=True),
        Label(WIDTH - MARGIN, top + 12, bar.note, 12, QUIET, anchor="end"),
    ]
    at = top + (42 if bar.budget_bytes is not None else 24)
    shapes.append(Box(MARGIN, at, BAR_WIDTH, BAR_HEIGHT, OVER))
    left = float(MARGIN)
    for segment in bar.segments:
        width = segment.nbytes * scale
        shapes.append(Box(left, at, width, BAR_HEIGHT, segment.color))
        text = gib(segment.nbytes)
        if width > 8 * len(text):
            ink = PAPER if _is_dark(segment.color) else INK
            shapes.append(Label(left + width / 2, at + BAR_HEIGHT / 2 + 4, text, 12, ink, anchor="middle"))
        left += width
    if bar.budget_bytes is not None:
        shapes += _load_line(bar, scale, at)
    legend_top = at + BAR_HEIGHT + 24
    rows = -(-len(bar.segments) // LEGEND_COLUMNS)
    return [*shapes, *_legend(bar.segments, legend_top)], legend_top + rows * LEGEND_ROW + 26


def _load_line(bar: Bar, scale: float, at: float) -> list[Shape]:
    assert bar.budget_bytes is not None
    line = MARGIN + bar.budget_bytes * scale
    free = bar.budget_bytes - bar.nbytes
    text = f"budget {gib(bar.budget_bytes)}, {gib(free)} free" if free >= 0 else f"budget {gib(bar.budget_bytes)}"
    anchor = "end" if line > WIDTH / 2 else "start"
    return [
        Stroke(line, at - 8, at + BAR_HEIGHT + 8, LINE),
        Label(line - 6 if anchor == "end" else line + 6, at - 8, text, 12, LINE, anchor=anchor),
    ]


def _legend(segments: Sequence[Segment], top: float) -> list[Shape]:
    column_width = BAR_WIDTH / LEGEND_COLUMNS
    shapes: list[Shape] = []
    for place, segment in enumerate(segments):
        left = MARGIN + (place % LEGEND_COLUMNS) * column_width
        at = top + (place // LEGEND_COLUMNS) * LEGEND_ROW
        shapes.append(Box(left, at - 10, 12, 12, segment.color))
        shapes.append(Label(left + 20, at, segment.name, 12, INK))
        shapes.append(Label(left + column_width - 36, at, gib(segment.nbytes), 12, QUIET, anchor="end"))
    return shapes


def _is_dark(color: str) -> bool:
    red, green, blue = (int(color[at : at + 2], 16) for at in (1, 3, 5))
    return 0.299 * red + 0.587 * green + 0.114 * blue < 150


def draw(plan: PlanContents, path: str | os.PathLike[str]) -> None:
    """Write the chart of a plan as .svg. Errors: RequestError for another ending or a path that cannot be written."""
    check_path(path)
    write_shapes(*layout(plan), path)
