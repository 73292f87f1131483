"""The doctor's page: one file that loads nothing, without private data, hostile text shown as text."""

import re
import xml.etree.ElementTree as ElementTree

import pytest

from tests.doctor.issues.test_draft import BUGS, META_ITEM, make, r03, record, the_runs
from tests.machine.test_environment import read_only_environment
from tests.raised import refused
from tests.verification.render.test_proof_report import Page
from trimtab.doctor import report
from trimtab.doctor.facts.bug import PRESENT, Seen
from trimtab.doctor.probes.runner import Verdict
from trimtab.doctor.report import document_of, write_report
from trimtab.errors import RequestError
from trimtab.report.render import FORMS

HOSTILE = "<script>alert(1)</script>\"'><img src=x onerror=alert(2)>&amp;"


def page_of(environment=None, **parts):
    return FORMS[".html"].show(document_of(environment or read_only_environment(), **parts))


def test_the_page_has_every_part_that_is_given():
    text = page_of(own="it works", records=the_runs(), verdicts=[Verdict(BUGS["B1"], Seen(PRESENT, "seen it"), 0.1)], drafts=make())
    page, words = Page(text), " ".join(Page(text).words)
    parts = "it works", "Some Linux 9", "seen it", "huggingface/peft#287 (open)", "Peak of host memory"
    assert [part for part in (*parts, "FAIL_QUANT_STATE_META_ITEM") if part not in words] == []
    for one in make().drafts:
        assert one.markdown().rstrip() in "".join(page.words)
    assert page.tags.count("details") == page.tags.count("summary") > 8 and text.count("<pre") == text.count('<pre tabindex="0"')
    alone = " ".join(Page(page_of()).words)
    assert "Some Linux 9" in alone and "seen it" not in alone and "draft" not in alone


def test_hostile_text_is_shown_and_does_nothing():
    runs = [r03(title=HOSTILE, log_lines=[HOSTILE]), record(HOSTILE, label=HOSTILE)]
    runs[0]["exception"] = {**META_ITEM, "message": HOSTILE, "tail": HOSTILE}
    runs[0]["versions"] = {"transformers": HOSTILE}
    verdicts = [Verdict(BUGS["B1"], Seen(PRESENT, HOSTILE), 0.1)]
    text = page_of(read_only_environment(os=HOSTILE), records=runs, verdicts=verdicts)
    page = Page(text)
    assert not {"script", "img"} & set(page.tags) and page.links == [] and "default-src 'none'" in text
    assert " ".join(page.words).count("<script>alert(1)</script>") >= 8


def test_nothing_personal_is_on_the_page(tmp_path):
    runs = [r03(log_lines=["/home/jane/x/y.py said"], title=r"C:\Users\jane\x")]
    verdicts = [Verdict(BUGS["B1"], Seen(PRESENT, "in /home/jane/a/b.py"), 0.1)]
    path = write_report(tmp_path / "page.html", document_of(read_only_environment(), records=runs, verdicts=verdicts))
    assert "jane" not in path.read_text(encoding="utf-8")


def contrast(one, other):
    """Return the contrast of two colours. Source: WCAG 2.2, relative luminance and contrast ratio."""

    def luminance(color):
        channels = [int(color[at : at + 2], 16) / 255 for at in (1, 3, 5)]
        linear = [value / 12.92 if value <= 0.04045 else ((value + 0.055) / 1.055) ** 2.4 for value in channels]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    high, low = sorted((luminance(one), luminance(other)), reverse=True)
    return (high + 0.05) / (low + 0.05)


def test_text_can_be_read_in_light_and_dark():
    style = re.search(r"<style>(.*?)</style>", page_of(), re.DOTALL)[1]
    blocks = [dict(re.findall(r"--([\w-]+): (#\w{6})", block)) for block in re.findall(r":root \{(.*?)\}", style, re.DOTALL)]
    assert len(blocks) == 2 and set(blocks[0]) == set(blocks[1]) >= set(re.findall(r"var\(--([\w-]+)\)", style))
    for colors in blocks:
        for ink in ("ink", "soft", "good", "bad", "unsure"):
            # 4.5 is WCAG 2.2's level AA for text.
            assert contrast(colors[ink], colors["paper"]) >= 4.5, ink


def test_bars_are_as_long_as_the_bytes():
    runs = [
        record("A", memory={"host_peak_bytes": 2**30, "gpu_peak_bytes": 2**31}),
        {**record("A", memory={"host_peak_bytes": 2**29, "gpu_peak_bytes": None}), "engine": "trimtab"},
    ]
    gpu, host = report.memory_charts(runs)
    assert (gpu.title, host.title) == ("Peak of GPU memory", "Peak of host memory")
    bars = [found for found in ElementTree.fromstring(host.svg).iter() if found.tag.endswith("rect")]
    assert [found.get("class") for found in bars] == ["bar-stock", "bar-trimtab"]
    assert float(bars[0].get("width")) == pytest.approx(2 * float(bars[1].get("width")), rel=1e-3)  # written with 1 digit
    assert "1.00 GiB stock" in host.svg and "512.0 MiB trimtab" in host.svg
    assert report.memory_charts([record("A", memory={})]) == []


def test_the_file_is_written_whole_or_not_at_all(tmp_path, monkeypatch):
    path, document = tmp_path / "a" / "page.html", document_of(read_only_environment())
    assert write_report(path, document) == path and refused(write_report, tmp_path, document).field == "html"
    first = path.read_text(encoding="utf-8")

    def refuse(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.replace", refuse)
    with pytest.raises(RequestError, match="cannot be written"):
        write_report(path, document_of(read_only_environment(), records=[record("A")]))
    assert path.read_text(encoding="utf-8") == first and [file.name for file in path.parent.iterdir()] == ["page.html"]
