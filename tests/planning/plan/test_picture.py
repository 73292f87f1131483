"""The picture of a plan: every device's bar, its load line, the same bytes each time, no label over another."""

import re
import xml.etree.ElementTree as ElementTree
from itertools import pairwise

import pytest

from tests.planning.test_planner import E4B, MIB, plan
from tests.raised import refused
from trimtab.errors import gib
from trimtab.planning.plan.chart import BAR_WIDTH, bars_of, draw, layout
from trimtab.report.charts import MARGIN, WIDTH, Box, Label, Stroke

SVG = "{http://www.w3.org/2000/svg}"


@pytest.fixture(scope="module")
def made():
    return plan(E4B, gpu=3.5, host=1.5, adapters={"a": 100 * MIB})


def test_a_bar_holds_what_its_budget_is_checked_against(made):
    device, host, disk = bars_of(made)
    assert (device.name, device.nbytes, device.budget_bytes) == ("cuda:0", made.gpu_needed_bytes, made.gpu_budget_bytes)
    assert (host.nbytes, host.budget_bytes) == (made.host_peak_bytes, made.host_budget_bytes)
    assert (disk.nbytes, disk.budget_bytes) == (made.disk_bytes, None)


def test_bars_are_stacked_by_part_and_tier(made):
    device, host, disk = bars_of(made)
    assert [segment.name for segment in disk.segments][:3] == ["language (disk)", "vision (disk)", "audio (disk)"]
    assert {"language (resident)", "adapters", "KV cache", "staging", "driver context"} <= {s.name for s in device.segments}
    assert [segment.name for segment in host.segments] == ["language (stream)", "process", "buffers"]


def test_without_a_spill_file_there_is_no_disk():
    assert [bar.name for bar in bars_of(plan())] == ["cuda:0", "host memory"]


def test_segments_lie_side_by_side_inside_the_bar_and_the_load_line_is_where_the_budget_ends(made):
    shapes, _ = layout(made)
    bars = bars_of(made)
    frames = [shape for shape in shapes if isinstance(shape, Box) and shape.width == BAR_WIDTH]
    assert len(frames) == len(bars)
    for bar, frame in zip(bars, frames, strict=True):
        boxes = [s for s in shapes if isinstance(s, Box) and s.top == frame.top and s is not frame]
        assert len(boxes) == len(bar.segments)
        for left, right in pairwise(boxes):
            assert right.left == pytest.approx(left.left + left.width)
        assert boxes[-1].left + boxes[-1].width <= frame.left + frame.width
        if bar.budget_bytes is not None:
            line = next(s for s in shapes if isinstance(s, Stroke) and s.top < frame.top < s.bottom)
            share = (boxes[-1].left + boxes[-1].width - MARGIN) / (line.left - MARGIN)
            assert share == pytest.approx(bar.nbytes / bar.budget_bytes) and share <= 1


def test_a_picture_names_what_the_plan_was_made_for(made):
    shapes, _ = layout(made)
    (line,) = [shape.text for shape in shapes if isinstance(shape, Label) and "context" in shape.text and "batch" in shape.text]
    assert f"context {made.request.context_tokens}, answer {made.answer_tokens}, batch 1" in line


def check_labels(shapes, height, letter=0.62):
    # A letter of a sans-serif face is at most 0.62 of the size wide on average, its height 0.75 above the baseline.
    spans = []
    for label in (shape for shape in shapes if isinstance(shape, Label)):
        width = letter * label.size * len(label.text)
        left = label.left - {"start": 0.0, "middle": width / 2, "end": width}[label.anchor]
        spans.append((left, left + width, label.base - 0.75 * label.size, label.base + 0.2 * label.size, label.text))
    assert all(left >= 0 and right <= WIDTH and top >= 0 and bottom <= height for left, right, top, bottom, _ in spans)
    for place, one in enumerate(spans):
        for other in spans[place + 1 :]:
            apart = one[1] <= other[0] or other[1] <= one[0] or one[3] <= other[2] or other[3] <= one[2]
            assert apart, (one[4], other[4])


def test_labels_stay_on_the_page_and_off_each_other(made):
    check_labels(*layout(made))


def test_svg_is_the_same_every_time_and_names_every_segment(made, tmp_path):
    draw(made, tmp_path / "a.svg")
    draw(made, tmp_path / "b.svg")
    text = (tmp_path / "a.svg").read_bytes()
    assert text == (tmp_path / "b.svg").read_bytes() and b"\r" not in text
    words = {element.text for element in ElementTree.fromstring(text).iter(f"{SVG}text")}
    for bar in bars_of(made):
        assert bar.name in words and {segment.name for segment in bar.segments} <= words
        assert {gib(segment.nbytes) for segment in bar.segments} <= words
    assert any(word.startswith("budget 3.50 GiB") for word in words)


def test_svg_escapes_what_a_model_is_called(tmp_path):
    from dataclasses import replace

    draw(replace(plan(), model_class="A<b>&c"), tmp_path / "a.svg")
    assert next(ElementTree.parse(tmp_path / "a.svg").iter(f"{SVG}text")).text == "A<b>&c"


@pytest.mark.parametrize("ending", ["gif", "png"])
def test_another_ending_is_refused(ending, tmp_path):
    assert refused(lambda: draw(plan(), tmp_path / f"plan.{ending}")).allowed == (".svg",) and list(tmp_path.iterdir()) == []


def test_colors_are_colors(made):
    assert all(re.fullmatch(r"#[0-9a-f]{6}", segment.color) for bar in bars_of(made) for segment in bar.segments)
