"""The doctor's page: one file that loads nothing, valid, with whatever parts there are, and hostile text shown as text."""

import re
import xml.etree.ElementTree as ElementTree
from html.parser import HTMLParser
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.doctor.issues.test_draft import BUGS, ENVIRONMENT, META_ITEM, NEW, OLD, make, r03, record, the_runs
from trimtab.doctor import report
from trimtab.doctor.cases.labels import LABELS
from trimtab.doctor.report import kind_of, report_html, write_report
from trimtab.errors import RequestError

VOID = {"meta", "br", "wbr", "link", "img", "hr", "input", "rect"}
HOSTILE = "<script>alert(1)</script>\"'><img src=x onerror=alert(2)>&amp;"
PREFLIGHT = {
    "findings": [{"severity": "fails", "bug": "A1", "when": "adapter", "title": "a title", "detail": "5 of 7 bytes"}],
    "second_plan": {"free": 123456},
}
BISECTION = {
    "package": "accelerate", "low": "1.13.0", "high": "1.15.0", "case": "R03_SPLIT_4BIT", "first": "1.14.0", "notes": ["a note"],
    "rows": [{"version": "1.13.0", "label": "FAIL", "note": ""}, {"version": "1.14.0", "label": None, "note": "no wheel"}],
}  # fmt: skip


class Page(HTMLParser):
    """Reads a page: every tag is closed in order, and what it holds."""

    def __init__(self, text):
        super().__init__(convert_charrefs=True)
        self.stack, self.tags, self.attributes, self.texts, self.by_tag = [], [], [], [], {}
        self.feed(text)
        self.close()
        assert self.stack == []

    def handle_starttag(self, tag, attributes):
        self.tags.append(tag)
        self.attributes += [(tag, name, value) for name, value in attributes]
        if tag not in VOID:
            self.stack.append(tag)

    def handle_startendtag(self, tag, attributes):
        self.tags.append(tag)
        self.attributes += [(tag, name, value) for name, value in attributes]

    def handle_endtag(self, tag):
        if tag not in VOID:
            assert self.stack and self.stack.pop() == tag, tag

    def handle_data(self, data):
        if self.stack and self.stack[-1] not in ("style", "script"):
            self.texts.append(data)
        if self.stack:
            self.by_tag.setdefault(self.stack[-1], []).append(data)

    @property
    def text(self):
        return re.sub(r"\s+", " ", " ".join(self.texts))

    def values(self, name):
        return [value for _, found, value in self.attributes if found == name]


def verdict(state="present", evidence="seen"):
    return SimpleNamespace(to_json=lambda: {
        "id": "A1", "title": "a bug", "state": state, "evidence": evidence, "way_round": "go round", "owner": ["peft"],
        "trackers": [], "trimtab": "avoids it",
    })  # fmt: skip


def whole(**options):
    runs = the_runs()
    runs += [{**run, "engine": "trimtab", "label": "PASS", "exception": None} for run in runs[:2]]
    return report_html(
        **{"environment": ENVIRONMENT, "records": runs, "verdicts": [verdict()], "preflight": PREFLIGHT, "drafts": make(),
           "bisection": BISECTION, **options}
    )  # fmt: skip


def test_the_whole_page_is_valid_and_has_every_part():
    page = Page(whole())
    assert page.by_tag["h2"] == [
        "Environment", "Preflight", "Matrix", "Memory", "Known bugs in these packages", "Bisection", "Drafts",
    ]  # fmt: skip
    ids = page.values("id")
    assert len(ids) == len(set(ids))
    assert all(target[1:] in ids for target in page.values("href"))
    assert "Ubuntu 24.04" in page.text and "5 of 7 bytes" in page.text and "1.14.0" in page.text


@pytest.mark.parametrize("part", ["records", "verdicts", "preflight", "drafts", "bisection"])
def test_a_missing_part_leaves_the_others(part):
    page = Page(whole(**{part: () if part in ("records", "verdicts") else None}))
    gone = {"records": ("Matrix", "Memory"), "verdicts": ("Known bugs in these packages",), "preflight": ("Preflight",),
            "drafts": ("Drafts",), "bisection": ("Bisection",)}[part]  # fmt: skip
    assert not set(gone) & set(page.by_tag["h2"]) and "Environment" in page.by_tag["h2"]
    assert len(page.by_tag["h2"]) == 7 - len(gone)


def test_the_environment_alone_is_a_page_and_even_that_may_be_empty():
    assert Page(report_html(environment=ENVIRONMENT)).by_tag["h2"] == ["Environment"]
    assert Page(report_html(environment=None)).by_tag["h2"] == ["Environment"]


def test_nothing_is_loaded_from_outside():
    text = whole()
    page = Page(text)
    assert not {"link", "img", "iframe", "object", "embed", "audio", "video"} & set(page.tags)
    assert page.values("src") == [] and all(target.startswith("#") for target in page.values("href"))
    assert "default-src 'none'" in " ".join(page.values("content"))
    style = "".join(page.by_tag["style"])
    assert "url(" not in style and "@import" not in style


def test_hostile_text_is_shown_and_does_nothing():
    runs = [r03(title=HOSTILE, log_lines=[HOSTILE]), record(HOSTILE, label=HOSTILE)]
    runs[0]["exception"] = {**META_ITEM, "message": HOSTILE, "tail": HOSTILE}
    runs[0]["versions"] = {"transformers": HOSTILE}
    page = Page(whole(
        records=runs, verdicts=[verdict(state=HOSTILE, evidence=HOSTILE)], environment={**ENVIRONMENT, "os": HOSTILE},
        preflight={"findings": [{"title": HOSTILE}], "x": HOSTILE}, bisection={**BISECTION, "case": HOSTILE},
        drafts={"drafts": [{"title": HOSTILE, "state": HOSTILE, "file": HOSTILE, "markdown": HOSTILE}], "not_to_file": HOSTILE},
    ))  # fmt: skip
    assert page.tags.count("script") == 1 and "img" not in page.tags
    assert not [name for _, name, _ in page.attributes if name.startswith("on")]
    assert page.text.count("<script>alert(1)</script>") >= 12


@settings(max_examples=25, deadline=None)
@given(st.text(alphabet=st.sampled_from("<>&\"'/`\n a-]!"), max_size=30))
def test_any_message_keeps_the_page_valid(message):
    runs = [r03(title=message), record("B" + message)]
    runs[0]["exception"] = {**META_ITEM, "message": message, "tail": message}
    page = Page(report_html(environment={"os": message}, records=runs))
    assert page.by_tag["h2"] == ["Environment", "Matrix", "Memory"]


# The grid -------------------------------------------------------------------------------------------------------------


def test_stock_stands_beside_trimtab_by_case_and_versions():
    runs = [r03(), {**r03(), "engine": "trimtab", "label": "PASS"}, {**r03(), "versions": OLD, "label": "UNKNOWN"}, record("B")]
    grid = report.grid_of(runs)
    assert [engine for engine, _ in grid.columns] == ["stock", "stock", "trimtab"]
    assert "5.23.0" in grid.columns[0][1] and "5.6.2" in grid.columns[1][1]
    (first, second) = grid.rows
    assert [cell and cell.label for cell in first[2]] == ["FAIL_QUANT_STATE_META_ITEM", "UNKNOWN", "PASS"]
    assert [cell and cell.label for cell in second[2]] == ["PASS", None, None]
    assert {kind: count for kind, _, count in grid.counts} == {"good": 2, "bad": 2}


def test_every_label_has_a_colour_and_a_sign():
    assert {kind_of(label) for label in LABELS} == set(report.SIGNS)
    wanted = {
        "PASS": "good", "PASS_BUT_PLACEMENT_UNDONE": "silent", "DIRECT_4BIT_MERGED_MATCHES_NEITHER": "silent", "TIMEOUT": "ended",
        "REFUSED_BY_NAME": "none", "UNKNOWN": "bad", "FAIL_AUDIO_FINFO": "bad", "GEMMA4_CLIPPABLE_LINEAR_UNSUPPORTED": "bad",
        "OOM_GPU": "ended", "BF16_MERGED_MATCHES_BF16_ADAPTER": "good",
    }  # fmt: skip
    assert {label: kind_of(label) for label in wanted} == wanted


def test_a_merge_with_other_logits_is_not_shown_as_right_and_names_its_lane():
    label, lane = "DIRECT_4BIT_MERGED_MATCHES_ADAPTER", "DIRECT_4BIT_MERGE_STILL_DIVERGES"
    modes = {"text": {"ok": True, "equals_reference": False}, "image": {"ok": True, "equals_reference": True}}
    found = report.cell_of(record("M", label, lane=lane, modes=modes))
    assert (found.kind, found.label, found.lane) == ("silent", label, lane)
    assert report.cell_of(record("M", label)).kind == "good"
    text = report_html(environment=ENVIRONMENT, records=[record("M", label, lane=lane, modes=modes)])
    assert lane in "".join(Page(text).texts)


def test_a_cell_opens_to_its_trace_and_facts():
    text = whole()
    page = Page(text)
    assert "bitsandbytes/functional.py:565 in as_dict" in page.text
    assert "RuntimeError: Tensor.item() cannot be called on meta tensors" in page.text
    # details and summary are opened with the keyboard, and what scrolls can be reached with it.
    assert page.tags.count("details") == page.tags.count("summary") > 8
    assert text.count("<pre") == text.count('<pre tabindex="0"')


def test_light_and_dark_have_the_same_colours_defined():
    style = "".join(Page(whole()).by_tag["style"])
    light, dark = re.findall(r":root \{(.*?)\}", style, re.DOTALL)
    names = [set(re.findall(r"--([\w-]+):", block)) for block in (light, dark)]
    assert names[0] == names[1] and "prefers-color-scheme: dark" in style
    assert set(re.findall(r"var\(--([\w-]+)\)", style)) <= names[0]


def contrast(one, other):
    """Return the contrast of two colours. Source: WCAG 2.2, relative luminance and contrast ratio."""

    def luminance(color):
        channels = [int(color[at : at + 2], 16) / 255 for at in (1, 3, 5)]
        linear = [value / 12.92 if value <= 0.04045 else ((value + 0.055) / 1.055) ** 2.4 for value in channels]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    high, low = sorted((luminance(one), luminance(other)), reverse=True)
    return (high + 0.05) / (low + 0.05)


def test_text_can_be_read_in_both():
    style = "".join(Page(whole()).by_tag["style"])
    for block in re.findall(r":root \{(.*?)\}", style, re.DOTALL):
        colors = dict(re.findall(r"--([\w-]+): (#\w{6})", block))
        pairs = [(f"{kind}-ink", kind) for kind in report.SIGNS] + [("ink", "paper"), ("quiet", "paper"), ("ink", "soft")]
        for ink, paper in [*pairs, ("link", "paper")]:
            # 4.5 is WCAG 2.2's level AA for text.
            assert contrast(colors[ink], colors[paper]) >= 4.5, (ink, paper)


# Memory ---------------------------------------------------------------------------------------------------------------


def test_bars_are_as_long_as_the_bytes():
    runs = [
        record("A", memory={"host_peak_bytes": 2**30, "gpu_peak_bytes": 2**31}),
        {**record("A", memory={"host_peak_bytes": 2**29, "gpu_peak_bytes": None}), "engine": "trimtab"},
    ]
    (gpu_title, _), (host_title, svg) = report.memory_pictures(runs)
    assert (gpu_title, host_title) == ("Peak of GPU memory", "Peak of host memory")
    bars = [found for found in ElementTree.fromstring(svg).iter() if found.tag.endswith("rect")]
    assert [found.get("class") for found in bars] == ["bar-stock", "bar-trimtab"]
    assert float(bars[0].get("width")) == pytest.approx(2 * float(bars[1].get("width")), rel=1e-3)  # written with 1 digit
    assert "1.00 GiB stock" in svg and "512.0 MiB trimtab" in svg
    assert report.memory_pictures([record("A", memory={})]) == []


# Drafts and files -----------------------------------------------------------------------------------------------------


def test_a_draft_is_shown_as_it_is_with_a_button_to_copy_it():
    made = make()
    page = Page(whole(drafts=made))
    shown = "".join(page.by_tag["pre"])
    for one in made.drafts:
        assert one.markdown() in shown
    assert made.not_to_file in shown
    assert set(page.values("data-copy")) == {f"draft-{place}" for place in range(1, len(made.drafts) + 1)}
    assert set(page.values("data-copy")) <= set(page.values("id"))


def test_nothing_personal_is_on_the_page():
    runs = [r03(log_lines=["/home/jane/x/y.py said"], title=r"C:\Users\jane\x")]
    text = report_html(
        environment=ENVIRONMENT, records=runs, verdicts=[verdict(evidence="in /home/jane/a/b.py")],
        preflight={"findings": [], "model": "/home/jane/models/m"}, bisection={**BISECTION, "notes": ["/home/jane/env/x failed"]},
    )  # fmt: skip
    assert "jane" not in text


def test_the_file_is_written_whole_and_replaced(tmp_path):
    path = tmp_path / "a" / "page.html"
    assert write_report(path, environment=ENVIRONMENT) == path
    first = path.read_text(encoding="utf-8")
    write_report(path, environment=ENVIRONMENT, records=[record("A")])
    assert path.read_text(encoding="utf-8") != first
    assert [file.name for file in path.parent.iterdir()] == ["page.html"]
    with pytest.raises(RequestError) as caught:
        write_report(tmp_path, environment=ENVIRONMENT)
    assert caught.value.field == "html"


def test_a_failed_write_keeps_the_old_page(tmp_path, monkeypatch):
    path = tmp_path / "page.html"
    path.write_text("old")

    def refuse(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.replace", refuse)
    with pytest.raises(RequestError, match="cannot be written"):
        write_report(path, environment=ENVIRONMENT)
    assert path.read_text() == "old" and [file.name for file in tmp_path.iterdir()] == ["page.html"]


def test_real_verdicts_are_read():
    from trimtab.doctor.facts.bug import PRESENT, Seen
    from trimtab.doctor.probes.runner import Verdict

    page = Page(report_html(environment=ENVIRONMENT, verdicts=[Verdict(BUGS["B1"], Seen(PRESENT, "seen it"), 0.1)]))
    assert "seen it" in page.text and "huggingface/peft#287 (open)" in page.text
    assert NEW["peft"] not in page.text
