"""Our own expressions over foreign texts: what they find stays, and the time does not grow with the square of the text."""

from __future__ import annotations

import re
import time
from collections.abc import Callable

import pytest

from trimtab.doctor.bisect.environments import reason_of
from trimtab.doctor.issues.run import _NOISE
from trimtab.doctor.traces.reading import _versions, plain_text
from trimtab.engine.chat import call_values
from trimtab.engine.chat.answer_forms import CALL_MARKS, AnswerForm
from trimtab.engine.chat.answer_reader import HEAD_LETTERS, AnswerReader
from trimtab.planning.request.max_memory import _ZERO
from trimtab.process import redact
from trimtab.request import _SIZE


def test_arguments_without_an_end_are_not_read_and_cost_little() -> None:
    body = "<parameter=a>\n1\n</parameter>\n<parameter=b>\ntwo" + "<parameter=c>\n" * 100_000
    assert call_values.tagged_arguments(body, None) == {"a": 1}


@pytest.mark.parametrize(
    ("pattern", "text"), [(redact._MAIL, "_" * 200_000), (redact._PACKAGES, "<|" * 100_000)], ids=["mail", "packages"]
)
def test_a_long_text_without_a_match_is_searched_once(pattern: re.Pattern[str], text: str) -> None:
    assert pattern.sub("", text) == text


def test_addresses_and_package_paths_are_found_as_before() -> None:
    mail = redact._MAIL.sub("*", "write to jane.doe+x@mail.example.org, or a@b.cc+y@d.example")
    assert mail == "write to *, or **"
    assert redact._PACKAGES.sub("", "/usr/site-packages/torch/a.py 'C:\\x\\dist-packages\\y'") == "torch/a.py 'y'"


SAMPLE_S = 0.003
# A factor of four above linear work, and below the square.
LIMIT = 64


def growth(work: Callable[[int], object], size: int) -> float:
    """Return by what factor 16 times the size takes longer: 16 for linear work, 256 for the square.

    Processor time of this thread, the least of three samples of some milliseconds: other programs change it by less than twice.
    """

    def sample_s(count: int, runs: int) -> float:
        start = time.thread_time()
        for _ in range(runs):
            work(count)
        return time.thread_time() - start

    def taken_s(count: int) -> float:
        runs = 1
        while sample_s(count, runs) < SAMPLE_S:
            runs *= 4
        return min(sample_s(count, runs) for _ in range(3)) / runs

    return taken_s(16 * size) / taken_s(size)


@pytest.mark.parametrize(("work", "size"), [
    (lambda n: plain_text("│" + " " * n + "x"), 1250),
    (lambda n: plain_text("│" + "─" * n), 500),
    (lambda n: plain_text("│" + "──x" * n), 500),
    (lambda n: _versions("torch:" + " " * n + "x"), 500),
    (lambda n: redact.scrubbed("/a" * n), 500),
    (lambda n: redact.clean("/peft/a" * n), 500),
    (lambda n: _NOISE.search("0" * n), 750),
    (lambda n: reason_of("ERROR: " + "a" * n), 750),
    (lambda n: _SIZE.fullmatch("1" + " " * n + "!"), 750),
    (lambda n: _ZERO.fullmatch("0" + " " * n + "!"), 750),
    (lambda n: call_values.tagged_arguments("<parameter=" * n + "</parameter>", None), 1250),
    (lambda n: call_values.tagged_arguments_prefix("<parameter=a>" * n + "</parameter>", None), 500),
],
ids=[
    "spaces", "rule", "rules", "version", "packages", "files", "digits", "address", "size", "zero", "tags",
    "opened tags",
])  # fmt: skip
def test_the_time_of_a_text_does_not_grow_with_the_square_of_its_length(work: Callable[[int], object], size: int) -> None:
    assert growth(work, size) < LIMIT


@pytest.mark.parametrize(("calls", "opening", "token"), [
    (None, "<think>", " " * 16), ("hermes", '<tool_call>{"name": "f", "arguments": {}}', " " * 16),
    ("gemma4", "<|tool_call>call:", "a" * 16), ("qwen-xml", "<tool_call><function=", "a" * 16),
])  # fmt: skip
def test_a_token_of_a_long_answer_costs_what_one_of_a_short_answer_does(calls: str | None, opening: str, token: str) -> None:
    def read(tokens: int) -> None:
        reader = AnswerReader(AnswerForm(calls, ("<think>", "</think>")), functions={"f": {}})
        reader.push(opening)
        for _ in range(tokens):
            reader.push(token)

    assert growth(read, 250) < LIMIT


@pytest.mark.parametrize("piece", [1, 7, 10**6])
@pytest.mark.parametrize(("calls", "body"), [
    ("hermes", '{"name": "f", "arguments": {}}'), ("gemma4", "call:f{}"), ("qwen-xml", "<function=f></function>"),
])  # fmt: skip
def test_a_mark_that_comes_in_pieces_after_a_long_wait_is_found(calls: str, body: str, piece: int) -> None:
    opening, close = CALL_MARKS[calls]
    text = f"so{' ' * HEAD_LETTERS}{opening}{' ' * 500}{body}{close} and {close[:-1]} on"
    reader = AnswerReader(AnswerForm(calls), functions={"f": {}})
    parts = [part for start in range(0, len(text), piece) for part in reader.push(text[start : start + piece])]
    parts += reader.finish()
    told = "".join(value for kind, value in parts if kind == "text")
    assert reader.calls == 1
    assert told == f"soand {close[:-1]} on"


def test_white_space_without_an_end_is_told_as_text() -> None:
    reader = AnswerReader(AnswerForm("hermes"), functions={"f": {}})
    parts = [part for _ in range(HEAD_LETTERS) for part in reader.push("  ")]
    assert len("".join(value for _, value in [*parts, *reader.finish()])) == 2 * HEAD_LETTERS
    assert parts


def test_boxes_versions_and_paths_are_read_as_before() -> None:
    box = "╭─ Traceback ──╮ x\n│ /a/peft/b.py:3 in f │ more  │\n│  │\n╰───╯ ── ─╮───\n  │"
    assert plain_text(box) == "\n x\n/a/peft/b.py:3 in f more\n\n\n\n\n\n"
    assert _versions("torch: `2.1.0`\npeft : 'v0.19.1\naccelerate==1.2 transformers version 5.0") == {
        "torch": "2.1.0", "peft": "0.19.1", "accelerate": "1.2", "transformers": "5.0",
    }  # fmt: skip
    assert redact.scrubbed("at lib:C:\\p\\site-packages\\torch, x/y/z/site-packages/peft") == "at lib:torch, xpeft"
    assert redact.clean("in /o/torch/lib/site-packages/peft/a.py and /o/site-packages/x/b.so") == (
        "in torch/lib/site-packages/peft/a.py and x/b.so"
    )
