"""The line of phases: what a terminal shows of it, and that nothing else sees it."""

import io
import os
import sys
import threading

import pytest

from tests.cli.flags.test_colors import Terminal
from trimtab.cli import main
from trimtab.cli.flags import output
from trimtab.process import phases


def screen(text):
    """Return the lines that a terminal shows of a text: a carriage return goes to the margin, what is written there replaces."""
    lines, column = [""], 0
    for char in text:
        if char == "\n":
            lines.append("")
            column = 0
        elif char == "\r":
            column = 0
        else:
            lines[-1] = lines[-1][:column] + char + lines[-1][column + 1 :]
            column += 1
    return [line.rstrip() for line in lines]


def on_terminal(monkeypatch, term="xterm"):
    """Return the terminal that stdout and stderr share from now on."""
    found = Terminal()
    monkeypatch.setenv("TERM", term)
    monkeypatch.setenv("NO_COLOR", "1")
    for name in ("stdout", "stderr"):
        monkeypatch.setattr(sys, name, found)
    return found


def seen(terminal):
    return screen(terminal.getvalue())


def test_a_phase_takes_the_place_of_the_last_one_and_gives_way_to_other_text(monkeypatch):
    terminal = on_terminal(monkeypatch)
    with output.shown("run"):
        assert seen(terminal) == ["reading the model"]
        phases.begin("importing torch and transformers")
        assert seen(terminal) == ["importing torch and transformers"]
        phases.begin("loading", "3.1 of 6.2 GiB")
        assert seen(terminal) == ["loading 3.1 of 6.2 GiB"]
        print("a note", file=sys.stderr)
        assert seen(terminal) == ["a note", ""]
        phases.begin("capturing steps")
        assert seen(terminal) == ["a note", "capturing steps"]
        print("An answer", end="")
        phases.begin("measuring")  # it waits until the line of the answer has ended
        assert seen(terminal) == ["a note", "An answer"]
        print(".")
        phases.begin("answering")
    assert seen(terminal) == ["a note", "An answer.", ""] and sys.stdout is terminal and sys.stderr is terminal


def test_an_error_and_a_gone_terminal_leave_no_line(monkeypatch):
    terminal = on_terminal(monkeypatch)
    assert main.main(["run", "/nowhere", "hi"]) == 3
    assert "reading the model" in terminal.getvalue()
    assert next(line for line in seen(terminal) if line).startswith("trimtab: /nowhere")
    line = output.PhaseLine(terminal)
    terminal.close()
    line("loading", "")  # as on a terminal that was closed


def test_the_first_phase_is_there_before_the_command_is_imported(monkeypatch):
    terminal = on_terminal(monkeypatch)
    shown = []

    def parser(named):
        shown.append(seen(terminal))
        raise KeyboardInterrupt

    monkeypatch.setattr(main, "parser", parser)
    for command in ("plan", "run", "chat", "serve", "merge", "verify", "bench", "tune", "demo"):
        main.main([command, "model"])
    assert [lines[-1] for lines in shown] == ["reading the model"] * 9


@pytest.mark.parametrize("words", [["run", "/nowhere", "hi", "--json"], ["run", "--help"], ["models"]])
def test_there_is_no_line_in_json_in_help_or_where_nothing_takes_long(words, monkeypatch):
    terminal = on_terminal(monkeypatch)
    try:
        main.main(words)
    except SystemExit as done:
        assert done.code == 0
    assert "reading" not in terminal.getvalue().partition("usage")[0] and "\r" not in terminal.getvalue()


def test_there_is_no_line_without_a_terminal(monkeypatch):
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    with output.shown("run"):
        phases.begin("loading", "1 of 2")
    assert sys.stderr.getvalue() == ""


def test_a_dumb_terminal_gets_each_phase_once_on_a_line_of_its_own(monkeypatch):
    terminal = on_terminal(monkeypatch, "dumb")
    with output.shown("run"):
        for done in range(1, 4):
            phases.begin("loading", f"{done} of 3 GiB")
        phases.begin("")
    assert terminal.getvalue() == "reading the model\nloading\n"


def test_a_phase_is_one_line_without_control_characters(monkeypatch):
    terminal = on_terminal(monkeypatch)
    monkeypatch.setattr(os, "get_terminal_size", lambda number: os.terminal_size((20, 10)))
    monkeypatch.setattr(terminal, "fileno", lambda: 2)
    line = output.PhaseLine(terminal)
    line("a\x1b[2J\nb", "of a name that is too long")
    assert seen(terminal) == ["a\\x1b[2J\\nb of a na"]


@pytest.mark.parametrize(("done", "of", "is_bytes", "text"), [
    (0, 0, True, ""), (0, 6 * 2**30, True, "0.0 of 6.0 GiB"), (13 * 2**28, 13 * 2**29, True, "3.2 of 6.5 GiB"),
    (2**19, 2**20, True, "0.5 of 1.0 MiB"), (1, 17, True, "1 of 17 B"), (3, 12, False, "3 of 12"), (5, 0, False, ""),
])  # fmt: skip
def test_how_far_a_phase_is(done, of, is_bytes, text):
    assert phases.far_text(done, of, is_bytes=is_bytes) == text


def test_a_count_reaches_the_watcher_from_any_thread_but_not_at_every_step():
    told = []
    with phases.watched(lambda *phase: told.append(phase)), phases.within("run 1 of 2"):
        count = phases.counting("writing", is_bytes=True)
        work = threading.Thread(target=lambda: [count(done, 1000) for done in range(1, 1001)])
        work.start()
        work.join()
    assert told[0] == ("run 1 of 2: writing", "1 of 1000 B") and told[-1] == ("run 1 of 2: writing", "1000 of 1000 B")
    assert len(told) < 20
    phases.counting("nobody watches")(1, 2)
