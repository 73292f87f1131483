"""Where `trimtab run` takes its prompts from: the command line, standard input, files."""

from __future__ import annotations

import subprocess
import sys

import pytest

from trimtab import cli, demo

BASE = str(demo.BASE)
PLACED = ["--device", "cpu", "--context", "256"]


def run(*arguments, given=None):
    done = subprocess.run(
        [sys.executable, "-m", "trimtab", "run", BASE, *PLACED, *map(str, arguments)], input=given, capture_output=True,
        text=True, timeout=300,
    )  # fmt: skip
    return done.returncode, done.stdout, done.stderr


def test_a_prompt_from_standard_input_or_a_file_is_the_one_from_the_command_line(tmp_path):
    (tmp_path / "prompt.txt").write_text("\ufeffWho are you?\n", encoding="utf-8")
    (tmp_path / "system.txt").write_text("Speak.\n")
    options = ["--max-new-tokens", 8]
    expected = run("Who are you?", "--system", "Speak.", *options)
    assert expected[0] == 0 and expected[1].strip()
    files = ["--system-file", tmp_path / "system.txt", *options]
    assert run("-", *files, given="Who are you?\n") == expected
    assert run("--prompt-file", tmp_path / "prompt.txt", *files) == expected


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["Hello", "--prompt-file", "x"], "--prompt-file"), (["--prompt-file", "no/such"], "cannot be read"),
        (["--prompt-file", "{bad}"], "not UTF-8"), (["a", "--system", "b", "--system-file", "x"], "--system-file"),
        (["--prompt-file", "{empty}"], "nothing to answer"), ([], "PROMPT"),
    ],
)  # fmt: skip
def test_a_wrong_source_is_refused_before_anything_is_loaded(arguments, words, tmp_path, capsys):
    (tmp_path / "bad").write_bytes(b"ab\xff")
    (tmp_path / "empty").write_bytes(b"\n")
    given = [text.format(bad=tmp_path / "bad", empty=tmp_path / "empty") for text in arguments]
    assert cli.main(["run", BASE, *PLACED, *given]) == 2
    assert words in capsys.readouterr().err


def test_an_answer_that_ends_at_once_says_so(tmp_path, capsys, monkeypatch):
    from trimtab.runtime import hf_generate

    monkeypatch.setattr(hf_generate, "end_token_ids", lambda model: tuple(range(512)))
    assert cli.main(["run", BASE, *PLACED, "Who are you?", "--max-new-tokens", "8"]) == 0
    out, err = capsys.readouterr()
    assert out.strip() == "" and "the answer is empty: the model ended it at once" in err
