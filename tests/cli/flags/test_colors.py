"""Color where a terminal has it, and texts and labels that stand where they can be read."""

import io
import json
import re
import sys
from types import SimpleNamespace

import pytest

from trimtab.cli import main
from trimtab.cli.chat.session import Session
from trimtab.cli.flags.output import apart, has_color, print_error, set_off, show
from trimtab.errors import RequestError
from trimtab.report.document import Document, Table, Text
from trimtab.report.render import CODES
from trimtab.request import TIERS
from trimtab.verification.render import plots

RED = "\x1b[1;31mtrimtab:\x1b[0m "
ROWS = [("layers.0", "resident", "1"), ("layers.1", "stream", "2")]
PLAN = Document("Fits: 3 GiB", [Table(("block", "tier", "bytes"), ROWS), Text("resident of a town")])


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.fixture
def a_terminal(monkeypatch):
    """Return a function that puts a terminal with color in place of stdout and stderr; pytest sets them anew for each test."""
    for name in ("NO_COLOR", "FORCE_COLOR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm")

    def begin():
        out, err = Terminal(), Terminal()
        monkeypatch.setattr(sys, "stdout", out)
        monkeypatch.setattr(sys, "stderr", err)
        return SimpleNamespace(out=out, err=err)

    return begin


def left_of(stream):
    """Return what a terminal was told besides the phases of a command."""
    return re.sub(r"(\r[ a-z]*)+\r|^reading the model\n", "", stream.getvalue())


def test_a_refusal_keeps_to_the_columns_of_a_terminal_and_to_one_line_of_a_pipe(a_terminal, monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "60")
    print_error(text := "word " * 40 + "end\n  - a problem " + "of " * 30 + "it")
    assert capsys.readouterr().err == f"trimtab: {text}\n"
    terminal = a_terminal()
    print_error(text)
    lines = terminal.err.getvalue().removeprefix(RED[:-1]).splitlines()
    assert " ".join(lines).split() == text.split() and "    of of" in " ".join(lines) and max(map(len, lines)) <= 60


# Where there is color -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("variable, value", [("NO_COLOR", "1"), ("TERM", "dumb")])
def test_errors_and_plans_have_no_color_where_it_is_refused(a_terminal, monkeypatch, variable, value):
    terminal = a_terminal()
    monkeypatch.setenv(variable, value)
    assert main.main(["plan", "no-such-model"]) == 3
    assert "\x1b" not in terminal.err.getvalue() and left_of(terminal.err).startswith("trimtab: no-such-model")
    show(PLAN)
    assert "Fits: 3 GiB\n" in terminal.out.getvalue() and "\x1b" not in terminal.out.getvalue()


def test_a_pipe_gets_no_color(monkeypatch, capsys):
    monkeypatch.delenv("FORCE_COLOR", raising=False)
    assert main.main(["plan", "no-such-model"]) == 3
    assert "\x1b" not in capsys.readouterr().err
    assert not has_color(io.StringIO()) and set_off("x", "error", io.StringIO()) == "x"
    show(PLAN)
    assert "\x1b" not in capsys.readouterr().out


def test_an_error_on_a_terminal_begins_in_red(a_terminal):
    terminal = a_terminal()
    assert main.main(["plan", "no-such-model"]) == 3
    assert left_of(terminal.err).startswith(f"{RED}no-such-model")
    assert main.main(["plan", "--no-such-flag"]) == 2
    assert terminal.err.getvalue().count(RED) == 2


def test_a_plan_on_a_terminal_has_a_bold_head_and_a_color_for_each_tier(a_terminal):
    terminal = a_terminal()
    show(PLAN)
    shown = terminal.out.getvalue()
    assert shown.startswith("\x1b[1mFits: 3 GiB\x1b[0m\n")
    assert re.search(r"  \x1b\[32mresident\x1b\[0m +1\n", shown) and re.search(r"  \x1b\[33mstream\x1b\[0m +2\n", shown)
    assert shown.endswith("\nresident of a town\n")
    assert set(TIERS) <= set(CODES)


def test_what_is_set_off_has_no_control_character_of_its_own(a_terminal):
    a_terminal()
    assert set_off("a\x1b[2Jb", "note", sys.stderr) == "\x1b[2ma\\x1b[2Jb\x1b[0m"


# A chat ---------------------------------------------------------------------------------------------------------------


def session(as_json=False):
    answer = SimpleNamespace(
        text="fine", token_ids=(1, 2), finish_reason="length", prompt_tokens=3, max_new_tokens=2, ttft_s=0.1, tokens_per_s=1.0
    )
    chat = SimpleNamespace(
        last=answer, options={}, adapter=None, beside=lambda text, adapter: (piece for piece in [f"the {adapter} answer"])
    )
    model = SimpleNamespace(context_tokens=64, adapters=("style",))
    return Session(chat, model, as_json=as_json, is_terminal=not as_json)


def test_a_note_of_a_chat_is_dimmed_and_not_escaped(a_terminal):
    terminal = a_terminal()
    session()._show((piece for piece in ["fine"]), None)
    assert terminal.out.getvalue() == "fine\n"
    assert terminal.err.getvalue() == "\x1b[2m[the answer was cut after 2 tokens: --max-new-tokens sets the limit]\x1b[0m\n"
    session()._refuse(RequestError("is wrong", field="x"))
    assert f"{RED}x: is wrong\n" in terminal.err.getvalue()


def test_a_comparison_prints_each_answer_once(capsys):
    session()._compare("base style Who?")
    out, err = capsys.readouterr()
    assert (out + err).count("the None answer") == (out + err).count("the style answer") == 1
    assert err.endswith("differing words: 1 of 3, 1 of 3\nbase: None\nstyle: style\n")


def test_a_comparison_as_json_has_each_answer_once(capsys):
    session(as_json=True)._compare("base style Who?")
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [line["text"] for line in lines if "text" in line] == ["the None answer", "the style answer"]
    assert not any("answer" in line["note"] for line in lines if line.get("note", "").startswith("differing"))


@pytest.mark.parametrize("first, second, shown", [
    ("the cat sat", "the dog sat down", "differing words: 1 of 3, 2 of 4\na: cat\nb: dog ... down"),
    ("cat", "dog", "differing words: 1 of 1, 1 of 1"), ("one", "one", "a and b give the same answer"),
    ("", "two", "differing words: 0 of 0, 1 of 1"),
])  # fmt: skip
def test_words_apart_are_counted_and_named(first, second, shown):
    assert apart(first, second, names=("a", "b")) == shown


# Tables and texts -----------------------------------------------------------------------------------------------------


def test_a_broken_adapter_leaves_the_table_its_width(tmp_path, capsys):
    from trimtab.demo.demo import FOLDER

    (tmp_path / "style").symlink_to(FOLDER / "adapters" / "style")
    assert main.main(["adapters", str(tmp_path)]) == 0
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        (tmp_path / "copy").mkdir(exist_ok=True)
        (tmp_path / "copy" / name).write_bytes((FOLDER / "adapters" / "style" / name).read_bytes())
    capsys.readouterr()
    main.main(["adapters", str(tmp_path)])
    whole = capsys.readouterr().out.splitlines()
    (tmp_path / "bad").mkdir()
    (tmp_path / "bad" / "adapter_config.json").write_text('{"peft_type": "' + "x" * 300 + '"}')
    assert main.main(["adapters", str(tmp_path)]) == 0
    shown = capsys.readouterr().out.splitlines()
    assert [line for line in shown if line in whole] == whole and max(map(len, shown[: len(whole) + 1])) <= max(map(len, whole))
    assert shown[-1].startswith("bad: ") and any(line.startswith("bad   ") and "cannot be used" in line for line in shown)


@pytest.mark.parametrize("reason, text", [
    ("which one?", "a: which one? Ask"), ("is wrong", "a: is wrong. Ask"), ("Stop!", "a: Stop! Ask"),
    ("is wrong.", "a: is wrong. Ask"),
])  # fmt: skip
def test_a_hint_follows_one_sign_that_ends_the_sentence(reason, text):
    assert str(RequestError(reason, field="a", hint="Ask")) == text


# Plots ----------------------------------------------------------------------------------------------------------------


def labels_of(svg):
    """Return (left, right, base, words) of every label, letters taken as 6.5 px wide."""
    found = []
    for shape in re.findall(r"<text[^>]*>[^<]*</text>", svg):
        x, y = (float(re.search(rf'\b{name}="([-\d.]+)"', shape).group(1)) for name in "xy")
        words = re.search(r">([^<]*)<", shape).group(1)
        left = x - 6.5 * len(words) if 'text-anchor="end"' in shape else x
        found.append((left, left + 6.5 * len(words), y, words))
    return found


def overlaps(svg):
    boxes = labels_of(svg)
    assert boxes
    return [
        (one[3], other[3]) for at, one in enumerate(boxes) for other in boxes[at + 1 :]
        if one[0] < other[1] and other[0] < one[1] and abs(one[2] - other[2]) < 10
    ]  # fmt: skip


LONG = "model.language_model.layers.{}.self_attn.q_proj.of_a_long_name_that_goes_on_and_on"


@pytest.mark.parametrize("svg", [
    plots.bars([1.0, 2.0], [LONG.format(0), LONG.format(1)], label="x", logarithmic=False),
    plots.bars([1.0], [LONG.format(0) * 3], label="x", logarithmic=True),
    plots.bars([-0.001, 1.0], ["a", "b"], label="x", logarithmic=False),
    plots.bars([-1.0, 0.99], ["a", "b"], label="x", logarithmic=False),
    *(plots.lines([1e-7, 1e-3, top, 1e-5] * 5, label="x", dashed=level, dashed_label="noise floor 1e-3", mark=mark,
                  mark_label="the answer begins here")
      for top in (1e-3, 1.0) for level in (1.0, 1e-3, 9e-4, 1e-7) for mark in (1, 10, 18)),
    plots.lines([1.0], label="x"),
])  # fmt: skip
def test_no_label_of_a_plot_lies_on_another(svg):
    assert overlaps(svg) == []
