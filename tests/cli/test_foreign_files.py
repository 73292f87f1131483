"""Files of other kinds, given to every command that takes such a file: each is called what it is, in one line."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

import trimtab.demo as demo
from trimtab.cli import main
from trimtab.cli.commands.prompts_file import read_prompts
from trimtab.errors import RequestError

BASE, STYLE = str(demo.BASE), str(demo.ADAPTERS["style"])
KNOWN = next(action.choices for action in main.parser()._actions if action.dest == "name" and action.choices)
PLACES = {
    name: [str(one.metavar) for one in parser._actions if not one.option_strings and one.metavar] for name, parser in KNOWN.items()
}  # type: ignore[union-attr]
WITH_MODEL = [name for name, places in PLACES.items() if "MODEL" in places and name != "pull"]  # `pull` takes a hub id
WITH_ADAPTER = [name for name, parser in KNOWN.items() if "--adapter" in parser._option_string_actions]  # type: ignore[union-attr]


@pytest.fixture
def gguf(tmp_path: Path) -> Path:
    (tmp_path / "packed").mkdir()
    file = tmp_path / "packed" / "model-Q4_K_M.gguf"
    file.write_bytes(b"GGUF\3\0\0\0" + bytes(64))
    return file


def command_line(command: str, model: object, tmp_path: Path) -> list[str]:
    values = {"MODEL": str(model), "PROMPT": "hi", "OUT": str(tmp_path / "out"), "ADAPTER": STYLE}
    return [command, *(values[place] for place in PLACES[command])]


@pytest.mark.parametrize("command", WITH_MODEL)
def test_a_damaged_gguf_file_is_called_that(command: str, gguf: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    beside = ["--adapter", STYLE] if command == "merge" else []
    for given in (gguf, gguf.parent):
        assert main.main([*command_line(command, given, tmp_path), *beside]) == 3
        err = capsys.readouterr().err
        assert "40 B follow the last tensor" in err and "model-Q4_K_M.gguf" in err and err.count("\n") == 1


# `serve` reads adapters in its worker and asks for a folder before.
@pytest.mark.parametrize("command", [name for name in WITH_ADAPTER if name != "serve"])
def test_a_gguf_adapter_is_called_that_too(command: str, gguf: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    beside = ["--device", "cpu"] if command not in ("merge", "doctor") else []
    for given, words in ((gguf, "40 B follow the last tensor"), (gguf.parent, "has GGUF files and no adapter of PEFT")):
        if command == "doctor" and given.is_dir():
            continue  # its report names it; a process is started for that
        assert main.main([*command_line(command, BASE, tmp_path), "--adapter", f"a={given}", *beside]) == 3
        err = capsys.readouterr().err
        assert words in err and "the folder that PEFT wrote" in err and "model-Q4_K_M.gguf" in err


def test_a_folder_of_gguf_files_lists_no_models_and_says_why(gguf: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main.main(["models", str(gguf.parent)]) == 0
    assert "40 B follow the last tensor" in " ".join(capsys.readouterr().out.split())
    assert main.main(["adapters", str(gguf.parent)]) == 0
    assert "it has GGUF files (model-Q4_K_M.gguf), and trimtab reads PEFT's folders" in capsys.readouterr().err
    assert main.main(["inspect", str(gguf)]) == 3 and "40 B follow the last tensor" in capsys.readouterr().err


@pytest.mark.parametrize("missing", [False, True])
def test_a_path_to_compare_with_that_is_no_model_is_called_that(
    missing: bool, gguf: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given, words = (tmp_path / "gone", "no such folder") if missing else (gguf, "40 B follow the last tensor")
    assert main.main(["verify", BASE, "--adapter", STYLE, "--against", str(given), "--device", "cpu"]) == 3
    assert words in capsys.readouterr().err
    assert main.main(["verify", BASE, "--adapter", STYLE, "--against", "gone", "--device", "cpu"]) == 2
    assert "unknown comparison" in capsys.readouterr().err


# Text that is not UTF-8 ------------------------------------------------------------------------------------------------


@pytest.fixture
def latin(tmp_path: Path) -> dict[str, str]:
    """Files with the byte of an é in Latin-1, by what they are; and copies of the demo's folders with such a file in them."""
    made = {}
    texts = {
        "text": b"caf\xe9\n", "json": b'{"a": "caf\xe9"}', "toml": b'model = "caf\xe9"\n',
        "jsonl": b'{"id": "1", "text": "caf\xe9"}\n',
    }  # fmt: skip
    for name, text in texts.items():
        (tmp_path / f"latin.{name}").write_bytes(text)
        made[name] = str(tmp_path / f"latin.{name}")
    for name, source in (
        ("config.json", BASE), ("model.safetensors.index.json", BASE), ("tokenizer.json", BASE), ("adapter_config.json", STYLE),
    ):  # fmt: skip
        folder = tmp_path / f"with-{name}"
        shutil.copytree(source, folder)
        (folder / name).write_bytes(b'{"a": "caf\xe9"}')
        made[name] = str(folder)
    return made


READ = [
    (["run", BASE, "--prompt-file", "{text}"], 2), (["run", BASE, "hi", "--system-file", "{text}"], 2),
    (["chat", BASE, "--system-file", "{text}"], 2), (["verify", BASE, "--device", "cpu", "--prompts", "{jsonl}"], 2),
    (["bench", BASE, "--device", "cpu", "--prompts", "{jsonl}"], 2), (["serve", "{toml}"], 3), (["serve", "--config", "{toml}"], 3),
    (["serve", BASE, "--device", "cpu", "--api-key-file", "{text}"], 2),
    (["serve", BASE, "--device", "cpu", "--admin-key-file", "{text}"], 2),
    (["run", "{json}", "hi"], 3), (["run", "--plan", "{text}", "hi"], 3), (["plan", BASE, "--device-map", "{text}"], 2),
    (["plan", BASE, "--max-memory", "{text}"], 2), (["doctor", BASE, "--max-memory", "{text}"], 2),
    (["plan", "{config.json}"], 3), (["plan", "{model.safetensors.index.json}", "--device", "cpu"], 3),
    (["merge", "{config.json}", "{text}.out", "--adapter", STYLE], 3), (["models", "{config.json}", "--quick"], 0),
    (["run", "{tokenizer.json}", "hi", "--device", "cpu"], 3), (["inspect", "{adapter_config.json}"], 5),
    (["plan", BASE, "--device", "cpu", "--adapter", "a={adapter_config.json}"], 5),
]  # fmt: skip


@pytest.mark.parametrize(("arguments", "code"), READ)
def test_text_that_is_not_utf8_is_one_line(
    arguments: list[str], code: int, latin: dict[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    filled = []
    for text in arguments:
        for name, path in latin.items():
            text = text.replace(f"{{{name}}}", path)
        filled.append(text)
    assert main.main(filled) == code
    printed = capsys.readouterr()
    # An adapter's problems stand below its path, one a line.
    assert printed.err.count("\n") == {0: 0, 5: 2}.get(code, 1), printed.err
    said = printed.out if code == 0 else printed.err
    assert any(words in said for words in ("utf-8", "UTF-8")) and ("latin." in said or "with-" in said)


def test_a_line_of_prompts_that_is_not_utf8_is_the_error_of_its_answer(latin: dict[str, str]) -> None:
    (line,) = read_prompts(latin["jsonl"])
    assert isinstance(line.request, RequestError) and line.request.field == "line 1" and "UTF-8" in str(line.request)


def test_a_pasted_error_in_any_encoding_is_read(latin: dict[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main.main(["doctor", "--trace", latin["text"]]) == 0
    assert "UNKNOWN" in capsys.readouterr().out
