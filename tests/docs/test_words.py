"""The words of docs, docstrings, comments, messages and --help: terms of the field, one index of all pages, and a glossary."""

import ast
import io
import re
import shlex
import tokenize
from collections.abc import Iterator
from pathlib import Path

from tests import ROOT
from tests.rules import each
from trimtab.cli import main
from trimtab.cli.commands.merge_verify import DIFFERS
from trimtab.cli.main import EXAMPLES
from trimtab.process import exit_codes, interrupts
from trimtab.process.files import read_sections
from trimtab.verification.server.report import EXIT_CANNOT_TELL

DOCS = ROOT / "docs"
PAGES = [
    *(ROOT / name for name in ("README.md", "SECURITY.md", "CONTRIBUTING.md")),
    *sorted(DOCS.glob("*.md")), *sorted((DOCS / "decisions").glob("*.md")),
]  # fmt: skip
# What readers stumbled over, with the field's word for it.
FORBIDDEN = {
    r"likeliest": "greedy, most likely", r"is told": "receives", r"meanwhile": "at the same time", r"found while": "detected while",
    r"asked for by name": "explicitly requested", r"on top nothing": "no overhead",
    r"an? (issue|draft) a failure": "one issue per failure", r"tokens? a (second|token)": "per second", r"ms a step": "per step",
    r"come again": "retry", r"left[_ ]out by name": "disabled", r"(?<!numpy )\bsounds?\b(?! card)": "audio",
    r"pictures?\b(?! FILE)": "image", r"whole line": "end to end", r"lies ahead": "will fail", r"put back": "restarted",
    r"why_not|left_out|lay_back": "unsupported_reason, disabled, inverse", r"cannot be had": "unavailable",
    r"brought|bring near": "loaded, prefetched", r"way round": "workaround", r"without a word": "silently",
    r"all the same": "nevertheless", r"(?<!once )anew": "again", r"who asks|was asked for|were asked for": "requested",
}  # fmt: skip
# The same for docstrings, comments and messages, in addition to FORBIDDEN.
FORBIDDEN_IN_CODE = {
    r"whoever|nobody|somebody": "the code, the user, no request", r"whatever": "any, every, independent of",
    r"besides?\b": "in addition to, next to, other than", r"(?:goes?|went|gone) through": "is computed, uses",
    r"stands? for": "means, represents, matches", r"what stands": "the text before or after",
    r"asks? for|asked for|who asks": "requests, requested", r"told\b": "reported, receives", r"says? of": "reports",
    r"so many": "this many", r"for good\b": "permanently", r"takes? note": "record", r"(?:is|are) held": "is stored, follows",
    r"of (?:its|our|their) own": "separate",
}  # fmt: skip
TERMS = ("anatomy", "block", "chunk", "host", "lane", "load line", "noise floor", "plan", "row", "stock stack", "tier", "tower")


def prose_of(page: Path) -> str:
    """Return the text of a page without code, links' targets and generated tables: those follow the code's own names."""
    text = page.read_text("utf-8")
    text = re.sub(r"<!-- (\w+)(:\w+)? -->\n.*?<!-- /\w+ -->", "", text, flags=re.DOTALL)
    text = re.sub(r"^ *```.*?^ *```", "", text, flags=re.DOTALL | re.M)
    return re.sub(r"`[^`]*`|\]\([^)]*\)|^ {4,}(trimtab|\{).*$", "", text, flags=re.M)


@each("page", PAGES)
def test_pages_use_the_fields_words(page):
    text = prose_of(page)
    hits = {
        f"{match.group(0)!r} (line {text[: match.start()].count(chr(10)) + 1}): write {instead}"
        for pattern, instead in FORBIDDEN.items()
        for match in re.finditer(rf"\b(?:{pattern})", text, re.IGNORECASE)
    }
    assert hits == set()


def test_a_forbidden_word_is_seen_in_prose_and_not_in_code():
    page = DOCS / "glossary.md"
    assert "likeliest" not in prose_of(page)
    assert re.search(r"\b(?:likeliest)", "the Likeliest token", re.IGNORECASE)


# Docstrings, comments, messages ---------------------------------------------------------------------------------------


def prose_in(source: str) -> Iterator[tuple[int, str]]:
    """Yield (line, text) of every string with a space and block of comments, in one line each, without code and field names."""
    nodes = (node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Constant) and isinstance(node.value, str))
    strings = [(node.lineno, node.value) for node in nodes if " " in node.value]
    lines: dict[int, tuple[int, str]] = {}
    previous = 0
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            line, text = token.start[0], token.string.lstrip("# ")
            first, before = lines.pop(previous, (line, "")) if previous == line - 1 else (line, "")
            lines[line], previous = (first, f"{before} {text}"), line
    for first, text in [*strings, *lines.values()]:
        yield first, re.sub(r"`[^`]*`|(?:--|\.)\w+|\w*\|[\w|]*|\b\w+(?=: )|Describe the \w+\.", "", " ".join(text.split()))


def forbidden_in(source: str) -> set[str]:
    """Return the words of docstrings, comments and messages that the tables replace, with their lines."""
    return {
        f"{match.group(0)!r} (line {line}): write {instead}"
        for line, text in prose_in(source)
        for pattern, instead in (FORBIDDEN | FORBIDDEN_IN_CODE).items()
        for match in re.finditer(rf"\b(?:{pattern})", text, re.IGNORECASE)
    }


MESSAGES = ("title", "detail", "meaning", "ask")  # of .ini files
FILES = sorted({*(ROOT / "trimtab").rglob("*.py")} - {ROOT / "trimtab" / "former_names.py"})  # former words in former names


@each("file", [*FILES, *sorted((ROOT / "trimtab").rglob("*.ini"))], where=lambda file: file.relative_to(ROOT).as_posix())
def test_docstrings_comments_and_messages_use_the_fields_words(file):
    source = file.read_text(encoding="utf-8")
    if file.suffix == ".ini":
        texts = [text for values in read_sections(file).values() for name, text in values.items() if name in MESSAGES]
        source = "\n".join([*map(repr, texts), *re.findall(r"^#.*", source, re.M)])
    assert forbidden_in(source) == set() and re.findall(r"^(?: *#.*\n){3,}", source, re.M) == []  # a comment has two lines at most


def test_a_forbidden_word_is_seen_in_docstrings_comments_and_messages_and_not_in_code():
    source = (
        '"""Whatever `whoever` reads.\n\nbeside: a field. See --picture, .SOUNDS.\n"""\n\n'
        'whoever = "told"  # so\n# many of\n# its own\nprint(f"it {asks} for", f"goes through {told}")\n'
    )
    assert {hit.split(":")[0] for hit in forbidden_in(source)} == {
        "'Whatever' (line 1)", "'of its own' (line 6)", "'so many' (line 6)", "'goes through' (line 9)",
    }  # fmt: skip


def is_one_sentence(text: str) -> bool:
    """Whether a docstring is one sentence of at most two lines."""
    plain = re.sub(r"`[^`]*`|\b(?:e\.g|i\.e|etc|vs|cf)\.|\.{3}", "", text)
    return len(re.findall(r"[.?!][\"')]*(?=\s|$)|\n\n", plain)) == 1 and text.count("\n") < 2


def test_a_modules_docstring_says_what_it_answers_in_one_sentence():
    texts = {file.relative_to(ROOT).as_posix(): ast.get_docstring(ast.parse(file.read_text("utf-8"))) or "" for file in FILES}
    # `help(trimtab)` shows the example, and tests/test_typed_calls.py runs it.
    assert {name for name, text in texts.items() if not is_one_sentence(text)} == {"trimtab/__init__.py"}


def test_a_second_sentence_and_an_example_are_seen():
    assert is_one_sentence('Which files, e.g. `a. b`, "x.json" or 0.5 of\n..., does json_file.py read?')
    assert not any(
        map(is_one_sentence, ("The plan. Pure.", "What is it? No torch.", "A plan.\n\n    plan()", "A plan", "a\nb\nc."))
    )


def test_the_glossary_explains_each_term_once_and_in_order():
    table = (DOCS / "glossary.md").read_text("utf-8").split("|---|---|---|")[1]
    rows = re.findall(r"^\| ([a-z ]+) \| ([^|]+) \| ([^|]+) \|$", table.split("\n\n")[0], re.M)
    terms = [term for term, *_ in rows]
    assert terms == sorted(set(terms)) and set(TERMS) <= set(terms)
    assert all(len(meaning) > 25 and nearest.strip() for _, meaning, nearest in rows)


def test_the_index_lists_every_page_once_and_the_readme_leads_to_it():
    index = (DOCS / "README.md").read_text("utf-8")
    linked = re.findall(r"\]\(([\w.-]+\.(?:md|ipynb))\)", index)
    pages = {page.name for pattern in ("*.md", "*.ipynb") for page in DOCS.glob(pattern)} - {"README.md"}
    assert sorted(linked) == sorted(pages)
    readme = (ROOT / "README.md").read_text("utf-8")
    assert "(docs/README.md)" in readme and "(docs/glossary.md)" in readme and len(readme.splitlines()) < 120


# Words of pages that a reader goes through from end to end; cells of tables count.
MOST_WORDS = {
    "CONTRIBUTING.md": 900, "docs/architecture.md": 1100, "docs/how-fast.md": 800, "docs/why-fast.md": 1500,
    "docs/serve-many-adapters.md": 800,
}  # fmt: skip


def test_short_pages_stay_short():
    counts = {page: sum(bool(re.search(r"\w", word)) for word in (ROOT / page).read_text("utf-8").split()) for page in MOST_WORDS}
    assert {page: count for page, count in counts.items() if count > MOST_WORDS[page]} == {}


STATUS = re.compile(r"\*\*Status\.\*\* (Accepted|Superseded by \[\d+\]\(|Removed|Rejected)")


@each("page", sorted((DOCS / "decisions").glob("0*.md")))
def test_a_decision_says_its_status_and_the_index_lists_it(page):
    title, blank, status = page.read_text("utf-8").splitlines()[:3]
    assert title.startswith(f"# {int(page.name[:4])}. ") and not blank and STATUS.match(status)
    assert f"[{int(page.name[:4])}]({page.name})" in (DOCS / "decisions" / "README.md").read_text("utf-8")


def test_the_second_example_of_the_readme_tests_a_server_and_shows_the_pages_output():
    readme = (ROOT / "README.md").read_text("utf-8")
    examples = readme.partition("## First commands")[2].partition("\nIn Python:")[0]
    blocks = re.findall(r"(?:^ {4}trimtab .+\n)+", examples, re.M)
    verbs = [[line.split()[1] for line in block.splitlines()] for block in blocks]
    assert verbs == [["pull", "plan", "run", "chat"], ["verify"]]
    assert {"--against", "--remote-model", "--remote-base"} <= set(shlex.split(blocks[1]))
    page = (DOCS / "is-my-adapter-alive.md").read_text("utf-8")
    assert blocks[1] in page
    shown = [text.partition("<!-- output:alive -->\n")[2].partition("<!-- /output -->")[0] for text in (readme, page)]
    assert shown[0].startswith("    WRONG: ") and len(shown[0].splitlines()) >= 2 and shown[1].startswith(shown[0])


def test_every_page_says_its_task_in_one_heading():
    for page in DOCS.glob("*.md"):
        text = re.sub(r"^```.*?^```", "", page.read_text("utf-8"), flags=re.DOTALL | re.M)
        headings = re.findall(r"^# .+$", text, re.M)
        assert len(headings) == 1 and text.startswith(headings[0]), page.name


# Help -----------------------------------------------------------------------------------------------------------------

COMMANDS = next(action.choices for action in main.parser()._actions if action.dest == "name")


def test_every_command_ends_its_help_with_examples_that_can_be_parsed():
    assert set(EXAMPLES) == set(COMMANDS)
    for name, examples in EXAMPLES.items():
        for words in examples:
            assert main.parser().parse_args(shlex.split(f"{name} {words}")).name_of_command == name
        lines = COMMANDS[name].format_help().splitlines()
        assert f"  trimtab {name} {examples[0]}".rstrip() in lines
        assert max(len(line) for line in lines[lines.index("examples:") :]) <= 96


@each("name", COMMANDS)
def test_help_uses_the_fields_words(name):
    text = " ".join(COMMANDS[name].format_help().split("examples:")[0].split())
    hits = {match.group(0) for pattern in FORBIDDEN for match in re.finditer(rf"\b(?:{pattern})", text, re.IGNORECASE)}
    assert hits == set()


def test_help_lists_every_exit_code():
    codes = {0, DIFFERS, EXIT_CANNOT_TELL, *(code for _, code in exit_codes.EXIT_CODES), main.STOPPED, main.READER_GONE}
    codes |= {exit_codes.UNFINISHED, *interrupts.ENDING.values()}
    assert set(exit_codes.EXIT_TEXTS) == codes
    assert all(
        f"{code} " in exit_codes.exit_codes_text() and text in exit_codes.exit_codes_text()
        for code, text in exit_codes.EXIT_TEXTS.items()
    )
