"""One renderer: columns of a terminal, words that stay whole, color where it is, text of others made safe."""

import re

import pytest

from trimtab.report.document import Code, Details, Document, Facts, Figure, Heading, Items, Table, Text, changed
from trimtab.report.render import FORMS, WIDEST, Lines

PROSE = "every word of a running text stays whole, also model.language_model.layers.0.self_attn.q_proj, and 1.00 GiB stays one"
WIDE = Table(("prompt", *(f"column {at}" for at in range(12))), [("text_1", *(f"v{at}" for at in range(12)))])
NOTED = Table(("block", "tier", "home", "bytes", "why"), [("layers.0-3", "stream", "host", "1.00 GiB", PROSE)], True, (2,))
DOCUMENT = Document(PROSE, [
    Text(PROSE, "note"), Heading("Part"), Facts([("one", PROSE), ("", PROSE)]), Items([PROSE]), WIDE, NOTED, Code("  a  b"),
    Details("hidden", [Text("not in a terminal")]), Figure("a chart", "<svg></svg>"),
])  # fmt: skip


@pytest.mark.parametrize("width", [60, 80, 120, 200])
def test_text_keeps_to_the_columns_and_breaks_no_word(width):
    text = Lines(width).show(DOCUMENT)
    assert max(map(len, text.splitlines())) <= width and all(line == line.rstrip() for line in text.splitlines())
    assert set(PROSE.split()) <= set(text.split()) and re.search(r"[ ~]1\.00 GiB", text)
    words = text.split()
    assert all(words.count(f"v{at}") == 1 for at in range(12))  # columns without room go on below
    assert "not in a terminal" not in text and "a chart" not in text and "\n    a  b".replace("    a", "      a") in text


def test_a_narrow_terminal_omits_what_is_optional_and_a_long_name_has_its_own_line():
    name = "language_model.layers." + ",".join(map(str, range(0, 60, 2)))
    rows = [(name, "stream", "x", "1.0 MiB"), ("b", "disk", "y", "-")]
    table = Table(("block", "tier", "a thing of no weight", "bytes"), rows, optional=(2,))
    lines = Lines(60).show(Document("", [table])).splitlines()
    assert "weight" not in lines[0] and lines[-2].split() == ["stream", "1.0", "MiB"] and lines[-1].split() == ["b", "disk", "-"]
    assert "".join(line.strip() for line in lines[1:-2]) == name and max(map(len, lines)) <= 60
    assert "weight" in Lines(200).show(Document("", [table]))


def test_a_regular_expression_is_broken_behind_its_bars():
    pattern = r".*\.language_model\.layers\.\d+\.(self_attn|mlp)\.(q|k|v|o|gate|up|down)_proj"
    lines = Lines(60).show(Document("", [Facts([("targets", pattern)])])).splitlines()
    assert max(map(len, lines)) <= 60 and "".join(lines).replace(" ", "") == f"targets{pattern}"


def test_only_a_terminal_with_color_has_color():
    assert "\x1b" not in Lines(80).show(DOCUMENT)
    colored = Lines(80, has_color=True).show(DOCUMENT)
    assert "\x1b[33mstream\x1b[0m" in colored and "\x1b[1mPart\x1b[0m" in colored
    assert re.sub(r"\x1b\[[\d;]*m", "", colored) == Lines(80).show(DOCUMENT)


def test_a_changed_document_keeps_what_is_fixed():
    made = changed(Document("a", [Text("a"), Text("a", is_fixed=True), Table(("a",), [("a",)])]), str.upper)
    assert (made.title, made.blocks[0].text, made.blocks[1].text, made.blocks[2].rows) == ("A", "A", "a", (("A",),))


def test_text_of_others_is_text_in_every_form():
    evil = "<script>alert(1)</script> [x](http://y) @you #1 `a` | b\x1b]0;t\x07"
    blocks = [
        Heading(evil), Text(evil), Facts([(evil, evil)]), Items([evil]), Table((evil, evil), [(evil, evil)]), Code(evil),
        Details(evil, [Text(evil)]),
    ]  # fmt: skip
    text, marked, page = (form.show(Document(evil, blocks)) for form in FORMS.values())
    assert not [form for form in (text, marked, page) if "\x1b" in form or "\x07" in form]
    assert "<script" not in page and "href" not in page and "default-src 'none'" in page
    outside = re.sub(r"(?s)```.*?```", "", marked)
    assert not [mark for mark in ("<script", " [x](http", "@you", "#1", " | b") if mark in outside]


def test_every_form_is_in_the_table():
    assert list(FORMS) == [".txt", ".md", ".html"] and WIDEST == 200
