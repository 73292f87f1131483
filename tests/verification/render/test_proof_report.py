"""Parity reports: the table, JSON, Markdown and the page, with every text escaped and nothing fetched."""

from __future__ import annotations

import json
import math
import re
from dataclasses import replace
from html.parser import HTMLParser

import pytest
import torch

from trimtab.errors import ParityError, RequestError
from trimtab.report.render import FORMS
from trimtab.verification.merges.retention import Survival
from trimtab.verification.merges.variants import BY_NAME, LanePrompt, LaneReport, LaneRun
from trimtab.verification.merges.weights import MergedWeights, module_weight
from trimtab.verification.render import plots
from trimtab.verification.render.report import ParityReport, PromptParity
from trimtab.verification.routes import compare

NASTY = "</td><script>alert('x')</script> a | b `c`\nnext"


def parity(name: str = "p1", apart: float = 0.5, **options) -> PromptParity:
    first = torch.randn(6, 9, generator=torch.Generator().manual_seed(0))
    second = first.clone()
    second[2, 3] += apart
    values = {
        "kind": "text", "adapter": "a", "verdict": "differs" if apart else "same", "prompt_tokens": 4,
        "reference_text": "yes", "subject_text": "no", "same_text": not apart,
    }  # fmt: skip
    return PromptParity(id=name, difference=compare.difference(first, second), **(values | options))


def report(**options) -> ParityReport:
    noise = compare.noise_between("p1", {"once": torch.zeros(1, 3), "the same again": torch.full((1, 3), 0.001)})
    for prompt in ("p1", "p2"):
        noise += tuple(
            compare.Noise(prompt, "once", f"every layer rounded at random ({at})", 0.0009, 0.0002, 1e-9, 1e-8, "draw")
            for at in range(1, 4)
        )  # fmt: skip
    route = {"label": "every weight resident", "engine": "trimtab", "quant": "nf4", "tiers": {"resident": 3}}
    values = {
        "model": "model", "against": "resident", "adapter": "a", "expected": "same",
        "prompts": (parity(), parity("p2", 0.0)), "floor": compare.NoiseFloor(noise), "layers": (0.0, 0.01, 0.2),
        "reference": route | {"memory": {"host_peak_bytes": 2**30, "gpu_peak_bytes": 0}},
        "subject": route | {"label": "the plan's tiers"}, "versions": {"torch": "2"},
    }  # fmt: skip
    return ParityReport(**(values | options))


def lane_report(**options) -> LaneReport:
    prompt = LanePrompt(
        id="p1", classification="DIRECT_4BIT_MERGED_MATCHES_NEITHER", base_differs=True, adapter_is_merged=False,
        base_is_merged=False, kl_to_adapter=0.25, kl_base=0.5, kl_to_bf16=None, texts={"merged": NASTY},
    )  # fmt: skip
    run = LaneRun(
        lane=BY_NAME["direct_4bit_merge"], verdict="DIRECT_4BIT_MERGE_STILL_DIVERGES", prompts=(prompt,),
        survival=(Survival("layers.0", 0.25, 3.0, 1.0, 0.01),), merge_warnings=525, warnings={},
        memory={"host_peak_bytes": 2**30, "gpu_peak_bytes": 2**20}, stages={}, merge_s=1.0, seconds=2.0,
    )  # fmt: skip
    error = {"type": "AttributeError", "message": NASTY, "package": "peft", "installed": "0.1", "stage": "merge"}
    broken = LaneRun(
        lane=BY_NAME["dequantize_then_merge"], verdict="DEQUANTIZE_THEN_MERGE_STILL_RAISES", prompts=(), survival=(),
        merge_warnings=0, warnings={}, memory={}, stages={}, merge_s=None, seconds=0.0, error=error,
    )  # fmt: skip
    return LaneReport(model="m", adapter="a", device="cpu", lanes=(run, broken), versions={})


class Page(HTMLParser):
    """Collects what a page is made of, and refuses tags that do not close."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[str] = []
        self.links: list[str] = []
        self.words: list[str] = []
        self.feed(text)
        assert self.open == []

    def handle_starttag(self, tag, attributes):
        self.tags.append(tag)
        self.links += [value for name, value in attributes if name in ("src", "href")]
        if tag not in ("meta", "br"):
            self.open.append(tag)

    def handle_startendtag(self, tag, attributes):
        self.tags.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.words.append(data)


# Values ---------------------------------------------------------------------------------------------------------------


def test_the_worst_prompt_decides():
    found = report()
    assert (found.verdict, found.ok, found.worst_prompt.id) == ("differs", False, "p1")
    fine = replace(found, prompts=(parity(apart=0.0),))
    assert (fine.verdict, fine.ok) == ("same", True)
    assert replace(fine, expected="differs").ok is False and replace(found, expected="differs").ok is True


@pytest.mark.parametrize("same, base, words", [(True, False, "ADAPTER"), (False, True, "BASE"), (False, False, "NEITHER")])
def test_a_merged_answer_is_named(same, base, words):
    assert parity(same_text=same, base_is_merged=base).merged_matches == words and parity().merged_matches is None


def test_a_report_that_is_not_finite_is_still_json():
    row = parity(apart=math.nan)
    text = json.dumps(report(prompts=(row,), layers=(math.inf,)).to_json(), allow_nan=False)
    assert json.loads(text)["prompts"][0]["difference"]["max_abs"] == "inf"


# On screen and as Markdown --------------------------------------------------------------------------------------------


def test_the_table_says_verdict_numbers_floor_and_memory():
    text = str(report(findings=("route x: gave different bits",)))
    assert text.startswith("differs: the plan's tiers against every weight resident")
    assert re.search(r"p1 \(a\) +text +differs +2 +0\.5 +0\.00926", text)
    assert re.search(r"p2 \(a\) +text +same +- +0 +0 +0 +0 +100\.0 %", text)
    assert "noise floor  max 0.001" in text
    assert "once, the same again, every layer rounded at random (3 times)" in text
    # Three equal draws have no spread, so the limit is the largest order of summation, times 2.
    assert "limit        max 0.002, mean 0.002" in text and "false-alarm rate 1e-04" in text
    assert "host peak 1.00 GiB" in text and "- route x: gave different bits" in text


def test_a_merge_report_shows_its_three_booleans():
    row = parity(base_kl=0.75, base_is_adapter=False, base_is_merged=True, same_text=False)
    rows = (Survival("layers.0.q", 0.25, 3.0, 1.0, 0.01), Survival("layers.1.q", 1.0, 0.0, 1.0, 0.01))
    text = str(report(prompts=(row,), survival=rows))
    assert re.search(r"p1 +BASE +yes +no +yes", text) and re.search(r"KL base\np1 +.* 0\.75\n", text)
    assert "62.5 % of the adapter's change is in the merged weights of 2 modules" in text
    assert "minimum: layers.0.q 25.0 %" in text


def test_an_unmeasured_floor_is_said():
    assert "noise floor  not measured; a difference cannot be judged" in str(report(floor=compare.NoiseFloor()))


def test_answers_within_noise_that_say_nothing_are_called_that():
    """A merge whose adapter moves the base by no more than noise, with nothing known of its weights."""
    blind = parity(apart=0.001, verdict="same within noise", base_kl=1e-12, base_is_noise=True)
    found = report(prompts=(blind,))
    assert (found.verdict, found.ok) == ("cannot tell", True)
    assert str(found).startswith("cannot tell: the plan's tiers against every weight resident; a fault would be below")
    found.check()
    seen = parity("p2", apart=0.001, verdict="same within noise", base_kl=0.5, base_is_noise=False)
    assert report(prompts=(blind, seen)).verdict == "same within noise"
    idle = report(prompts=(parity(apart=0.001, verdict="same within noise"),), expected="differs")
    assert (idle.verdict, idle.ok) == ("cannot tell", False)
    with pytest.raises(ParityError, match="cannot tell whether the plan's tiers differs"):
        idle.check()


def test_a_difference_without_a_known_noise_is_no_pass():
    found = report(prompts=(parity(verdict="cannot tell"),), floor=compare.NoiseFloor())
    assert (found.verdict, found.ok) == ("cannot tell", False)
    with pytest.raises(ParityError, match="the noise could not be measured") as caught:
        found.check()
    assert caught.value.tolerance == 0.0


def weights(factor: float, form: str = "bfloat16") -> MergedWeights:
    generator = torch.Generator().manual_seed(0)
    base, delta = torch.randn(64, 64, generator=generator), 0.05 * torch.randn(64, 64, generator=generator)
    base = base.bfloat16().float()
    merged = (base + factor * delta).bfloat16().float()
    return MergedWeights((module_weight("layers.0.q", base, merged, delta, form, terms=3 * delta.abs()),))


def test_right_weights_decide_where_answers_cannot_and_wrong_ones_where_answers_pass():
    blind = parity(apart=0.001, verdict="same within noise", base_kl=1e-12, base_is_noise=True)
    right = report(prompts=(blind,), weights=weights(1.0))
    assert (right.verdict, right.ok) == ("same within noise", True)
    assert "weights      right: slope of the written change on the exact one 1 over 1 modules, 0 of them wrong" in str(right)
    assert "a scale wrong by 1 % would be detected; false-alarm rate 1e-06" in str(right)
    wrong = report(prompts=(blind,), weights=weights(1.01))
    assert (wrong.verdict, wrong.ok) == ("differs", False)
    with pytest.raises(ParityError, match="layers.0.q of the plan's tiers is not base plus change"):
        wrong.check()
    found = json.loads(json.dumps(wrong.to_json()))["weights"]
    assert (found["verdict"], found["wrong"], found["false_alarm_rate"]) == ("differs", ["layers.0.q"], 1e-6)
    assert found["slope"] == pytest.approx(1.01, abs=0.002)


def test_markdown_cells_hold_any_text():
    text = report(prompts=(parity(reference_text=NASTY),), findings=(NASTY,))
    found = FORMS[".md"].show(text.document())
    line = next(line for line in found.splitlines() if "script" in line and line.startswith("| p1"))
    assert "<script" not in found and line.count(" | ") == 3 and "a \\| b" in line
    assert found.startswith("# differs") and "## Answers" in found and "- &lt;/td\\>" in found


def test_lanes_are_shown_with_labels_counts_and_what_was_raised():
    text = str(report(lanes=lane_report()))
    cells = re.findall(r"^direct_4bit_merge +(\S.*)", text, re.MULTILINE)
    words = " ".join(" ".join(cells).split())
    assert words.startswith("DIRECT_4BIT_MERGE_STILL_DIVERGES 0 of 1 525 0.25 0.5 - 25.0 % 3")
    assert re.search(r"p1 +DIRECT_4BIT_MERGED_MATCHES_NEITHER +yes +no +no\n", text)
    assert "dequantize_then_merge raised at stage merge: AttributeError" in text and "(peft 0.1)" in text


# The page -------------------------------------------------------------------------------------------------------------


def test_the_page_is_whole_escaped_and_fetches_nothing(tmp_path):
    rows = (Survival("layers.0.<b>q</b>", 0.25, 3.0, 1.0, 0.01), Survival("layers.1.q", 1.0, 0.0, 1.0, 0.01))
    row = parity(reference_text=NASTY, base_kl=0.1, base_is_adapter=False, base_is_merged=False)
    whole = report(prompts=(row, parity("p2", 0.0)), model=NASTY, findings=(NASTY,), survival=rows, lanes=lane_report())
    whole.save(tmp_path / "r.html")
    text = (tmp_path / "r.html").read_text(encoding="utf-8")
    page = Page(text)
    assert "script" not in page.tags and "b" not in page.tags and page.links == []
    assert text.count("http") == 1 and "@import" not in text and "url(" not in text
    assert "prefers-color-scheme: dark" in text
    assert NASTY in page.words and "layers.0.<b>q</b>: 0.25" in page.words
    # One plot a prompt, layers, survival and its noise, and the survival of the lane that merged.
    assert page.tags.count("svg") == 2 + 1 + 2 + 1 and "limit of the noise" in page.words and "answer" in page.words
    assert any(word.startswith("max 0.002") for word in page.words)


def test_a_report_without_extras_has_no_empty_parts():
    text = FORMS[".html"].show(report(layers=(), findings=()).document())
    assert "Merge lanes" not in text and "Survival" not in text and "Findings" not in text and "by layer" not in text


def test_plots_stay_inside_their_frame():
    values = [0.0, 1e-12, 1e-3, 0.5, math.inf, math.nan]
    for text in (
        plots.lines(values, label="x", dashed=0.01), plots.bars(values[:4], list("abcd"), label="x", logarithmic=True),
        plots.bars([-0.5, 0.2, 2.0], list("abc"), label="x", logarithmic=False, line=1.0), plots.lines([], label="x"),
        plots.lines([0.0, 0.0], label="x"), plots.bars([], [], label="x", logarithmic=False),
    ):  # fmt: skip
        numbers = [float(n) for n in re.findall(r' (?:y|y1|y2|cy)="([^"]+)"', text)]
        numbers += [float(pair.split(",")[1]) for points in re.findall(r'points="([^"]*)"', text) for pair in points.split()]
        assert all(0 <= number <= plots.HEIGHT for number in numbers) and "nan" not in re.sub(r"<title>.*?</title>", "", text)


def test_a_larger_value_stands_higher_and_zero_at_the_foot():
    heights = [float(y) for y in re.findall(r'cy="([^"]+)"', plots.lines([0.0, 1e-4, 1e-2], label="x"))]
    assert heights[0] > heights[1] > heights[2] and heights[0] == plots.HEIGHT - plots.BOTTOM


# Saving ---------------------------------------------------------------------------------------------------------------


def test_the_name_decides_the_form(tmp_path):
    found = report()
    for ending, start in ((".json", "{"), (".md", "# differs"), (".html", "<!doctype html>")):
        found.save(tmp_path / f"r{ending}")
        assert (tmp_path / f"r{ending}").read_text(encoding="utf-8").startswith(start)
    assert json.loads((tmp_path / "r.json").read_text())["verdict"] == "differs"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["r.html", "r.json", "r.md"]


@pytest.mark.parametrize("name, words", [("r.pdf", "unknown form"), ("none/r.json", "does not exist")])
def test_a_place_that_cannot_be_written_is_refused_before_the_work(tmp_path, name, words):
    with pytest.raises(RequestError, match=words) as caught:
        ParityReport.check_save_path(tmp_path / name)
    assert caught.value.field == "save"
    with pytest.raises(RequestError):
        report().save(tmp_path / name)
