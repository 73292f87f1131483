"""What is wrong with a file to read, a file to write or a name is said before a model is read: on every command of the parser."""

from __future__ import annotations

from typing import Any

import pytest

from tests.cli.test_vocabulary import BASE, COMMANDS, STYLE, ask, those_with

__all__ = ["ask"]
WRITTEN = ("--save", "--picture", "--html", "--export", "--out")
READ = (
    "--image", "--audio", "--prompt-file", "--system-file", "--prompts", "--config", "--max-memory", "--plan", "--trace", "--runs",
    "--lanes", "--device-map", "--admin-key-file", "--api-key-file",
)  # fmt: skip
# --drafts and --patched make the folders that they name; --print-config takes standard output.
ELSEWHERE = {"--drafts", "--patched", "--print-config"}
# What a flag needs beside it to be looked at.
BESIDE = {
    ("run", "--out"): ["--prompts", "{prompts}"], ("run", "--prompts"): ["--out", "{tmp}/out.jsonl"],
    ("merge", "--max-memory"): ["--check"], ("doctor", "--save"): ["--matrix"],
}  # fmt: skip
# What is positional elsewhere and has no effect beside a flag.
WITHOUT = {("run", flag): {"PROMPT": ""} for flag in ("--out", "--prompts", "--prompt-file")}
PAIRS = [(name, flag) for flag in WRITTEN for name in those_with(flag)]
ASKED = [(name, flag) for flag in READ for name in those_with(flag)]


def given(name: str, flag: str, tmp_path: Any) -> list[str]:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "hi"}\n')
    return [word.format(tmp=tmp_path, prompts=prompts) for word in BESIDE.get((name, flag), [])]


def test_every_flag_that_names_a_file_is_tried():
    known = {
        text for parser in COMMANDS.values() for action in parser._actions if action.metavar == "FILE"
        for text in action.option_strings
    }  # fmt: skip
    assert known <= {*WRITTEN, *READ, *ELSEWHERE}, known - {*WRITTEN, *READ, *ELSEWHERE}


@pytest.mark.parametrize("name, flag", PAIRS, ids=lambda words: words)
def test_a_file_that_cannot_be_written_is_said_before_the_model_is_read(ask, name, flag, tmp_path):
    file = tmp_path / "none" / ("x.svg" if flag == "--picture" else "x.json")
    code, _, err = ask(name, flag, str(file), *given(name, flag, tmp_path), **WITHOUT.get((name, flag), {}))
    assert code == 2 and flag in err and ("there is no folder" in err or "its folder does not exist" in err), err


@pytest.mark.parametrize("name, flag", ASKED, ids=lambda words: words)
def test_a_file_that_is_not_there_is_said_before_the_model_is_read(ask, name, flag, tmp_path):
    none = str(tmp_path / "none.json")
    code, _, err = ask(name, flag, none, *given(name, flag, tmp_path), **WITHOUT.get((name, flag), {}))
    assert code in (2, 3) and (flag in err or "none.json" in err) and "no/model" not in err, err


@pytest.mark.parametrize("flag", ["--image", "--audio"])
@pytest.mark.parametrize("name", those_with("--image"))
def test_a_picture_that_is_none_is_said_before_weights_are_read(ask, name, flag, tmp_path, monkeypatch):
    monkeypatch.setattr("trimtab.engine.loader.load.fill", lambda *args, **kwargs: pytest.fail("weights were read"))
    monkeypatch.setattr("subprocess.Popen", lambda *args, **kwargs: pytest.fail("a process was started"))
    file = tmp_path / "x.pdf"
    file.write_bytes(b"%PDF-1.7 nothing")
    code, _, err = ask(name, flag, str(file), MODEL=BASE)
    assert code == 2 and "x.pdf" in err, err


@pytest.mark.parametrize("name", those_with("--use"))
def test_a_name_that_is_mistyped_is_said_before_weights_are_read(ask, name, monkeypatch):
    monkeypatch.setattr("trimtab.engine.loader.load.fill", lambda *args, **kwargs: pytest.fail("weights were read"))
    monkeypatch.setattr("subprocess.Popen", lambda *args, **kwargs: pytest.fail("a process was started"))
    code, _, err = ask(name, "--adapter", f"style={STYLE}", "--use", "stile", MODEL=BASE)
    assert code == 2 and "--use" in err and "stile" in err and "style" in err, err
