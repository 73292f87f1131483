"""The one reader of JSON files: limits before parsing, one kind of error, and no other way in the package to read one."""

from __future__ import annotations

import ast
import json
import os
import sys
import tracemalloc
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests import ROOT
from tests.raised import raised
from trimtab.errors import CheckpointError
from trimtab.process import json_file
from trimtab.process.json_file import KINDS, JsonError, count, parse, read_bytes, read_json, read_object

# Where `json` parses what is no file of a user's: its reason by module and function.
NO_FILES = {
    "trimtab/cli/commands/prompts_file.py:__init__": "what this process wrote",
    "trimtab/demo/demo.py:read_asks": "this package's own file",
    "trimtab/doctor/bisect/environments.py:_installed": "the output of a process of this package",
    "trimtab/doctor/bisect/environments.py:read": "the output of a process of this package",
    "trimtab/doctor/cases/inputs.py:_asked": "this package's own file",
    "trimtab/doctor/catalogue/e_adapter_weights.py:e3_extra_keys": "a file that this process wrote",
    "trimtab/doctor/catalogue/h_loading.py:_pack": "a file that this process wrote",
    "trimtab/checkpoint/end_tokens.py:_number": "a list in the first 4 MiB of tokenizer.json; in doubt nothing is said",
    "trimtab/serve/grammar/source.py:from_json": "what the worker sent",
    "trimtab/serve/grammar/prover.py:prove": "what a process of this package sent",
    "trimtab/gguf/companion.py": "what the tokenizers package wrote in this process",
    "trimtab/gguf/folders.py:read_table": "this package's own file, with its checksum",
    "trimtab/machine/environment_child.py:how_installed": "in interpreters without this package; an installed package's metadata",
    "trimtab/process/child.py:main": "runs in interpreters without this package; the parent process wrote it",
    "trimtab/process/json_file.py:parse": "the reader",
    "trimtab/planning/values/cards.py:_data": "this package's own file",
    "trimtab/process/runner.py:read": "what a process of this package sent",
    "trimtab/verification/routes/prompts.py:demo_prompts": "this package's own file",
    "trimtab/verification/server/choosing.py:_demo_prompts": "this package's own file",
    "trimtab/verification/server/client.py:_json": "a server's answer of ANSWER_BYTES at most",
    "trimtab/engine/chat/answer_reader.py": "the model's text, within the limits of an answer",
    "trimtab/engine/chat/call_values.py": "the model's text, within the limits of an answer",
    "trimtab/serve/api/to_jobs.py:arguments_of": "a message of the API, within the server's limits",
    "trimtab/serve/worker/ipc.py:receive": "what a process of this package sent",
    "trimtab/serve/api/messages_api.py:_arguments": "a message of the API, within the server's limits",
    "trimtab/serve/api/messages_api.py:as_anthropics": "a message of the API, within the server's limits",
}


def parsers(file: Path) -> set[str]:
    """Return FILE:FUNCTION of every use of json.load, json.loads and json.JSONDecoder in a file."""
    name = file.relative_to(ROOT).as_posix()
    found: set[str] = set()

    def visit(node: ast.AST, function: str) -> None:
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            function = node.name
        is_json = isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "json"
        if is_json and node.attr in ("load", "loads", "JSONDecoder"):
            found.add(f"{name}:{function}")
        if isinstance(node, ast.ImportFrom) and node.module == "json":
            found.add(f"{name}:from json import")
        for child in ast.iter_child_nodes(node):
            visit(child, function)

    text = file.read_text(encoding="utf-8")
    if "json" in text:  # else nothing of it is used: a tree takes a while
        visit(ast.parse(text), "")
    return found


def test_no_other_code_parses_a_file():
    used = {one for file in (ROOT / "trimtab").rglob("*.py") for one in parsers(file)}
    unknown = {one for one in used if one not in NO_FILES and one.partition(":")[0] not in NO_FILES}
    assert unknown == set(), "read it with trimtab.process.json_file, or say here why it is no file of a user's"
    assert {one for one in NO_FILES if ":" in one} <= used, "names what is no longer there"


@pytest.mark.parametrize("kind", [kind for kind, limits in KINDS.items() if limits.values is not None])
def test_values_are_counted_before_they_are_parsed(kind: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(json_file.json, "loads", lambda *args, **options: pytest.fail("parsed"))
    most = KINDS[kind].values
    with pytest.raises(JsonError, match=f"more than {most} values"):
        parse(b"[" + b"1," * most + b"1]", kind)
    with pytest.raises(JsonError, match=f"more than {KINDS[kind].nbytes} B"):
        parse(b" " * (KINDS[kind].nbytes + 1), kind)


def test_a_header_of_empty_objects_is_refused_without_its_objects():
    raw = b"{" + b",".join(b'"%x":{}' % number for number in range(900_000)) + b"}"
    tracemalloc.start()
    try:
        with pytest.raises(JsonError, match="900001 objects"):
            parse(raw, "header")
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 100 * 2**20  # of 1.7 GB when they were made


def test_strings_are_neither_values_nor_levels():
    text = json.dumps({"a": '[{",' * 70_000, "b\\": ['"' * 9, "\\", "x"]}).encode()
    count(text, "config.json")
    assert parse(text, "config.json")["b\\"] == ['"' * 9, "\\", "x"]


@given(st.recursive(st.none() | st.text(alphabet='"\\{}[],a'), lambda inner: st.lists(inner) | st.dictionaries(
    st.text(alphabet='"\\{}[],a'), inner,
)))  # fmt: skip
def test_the_structure_is_what_is_left_without_strings(value):
    def shape(one):
        if isinstance(one, list):
            return "[" + ",".join(map(shape, one)) + "]"
        if isinstance(one, dict):
            return "{" + ",".join(f":{shape(item)}" for item in one.values()) + "}"
        return "null" if one is None else ""

    raw = json.dumps(value, separators=(",", ":")).encode()
    assert json_file._count_structure(raw, 10_000, 200).decode() == shape(value)


@pytest.mark.parametrize(("depth", "is_read"), [(64, True), (65, False), (100_000, False)])
def test_depth_is_counted(depth: int, is_read: bool):
    for opened, closed in ((b"[", b"]"), (b'{"a":', b"}")):
        raw = opened * depth + b"1" + closed * depth
        if is_read:
            assert parse(raw, "plan")
        else:
            with pytest.raises(JsonError, match="more than 64 levels"):
                parse(raw, "plan")


@pytest.mark.parametrize(("text", "kind", "words"), [
    *((text, "plan", "not JSON") for text in (b"\xff{}", b'{"a": ' + b"9" * 5000 + b"}", b"{", b"", b'{"a" 1}')),
    *((b"[" * 100_000 + b"]" * 100_000, kind, "nested too deep") for kind in ("header", "tokenizer", "index")),
    (b'{"a": 1, "a": 2}', "option", "'a' is given twice"),
], ids=["UTF-8", "a long number", "cut", "empty", "no colon", "header", "tokenizer", "index", "a key twice"])  # fmt: skip
def test_what_is_no_json_is_one_error(text: bytes, kind: str, words: str):
    with pytest.raises(JsonError, match=words):
        parse(text, kind)


def test_digits_are_counted_where_python_does_not(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(sys, "get_int_max_str_digits", lambda: 0, raising=False)
    with pytest.raises(JsonError, match="4300 digits"):
        count(b'{"a": ' + b"9" * 4301 + b"}", "plan")
    count(b'{"a": ' + b"9" * 4300 + b"}", "plan")


@pytest.mark.parametrize("text", [b'{"a": NaN}', b'{"a": -Infinity}', b'{"a": 1e400}'])
def test_numbers_of_an_adapter_are_finite(text: bytes):
    with pytest.raises(JsonError, match="not JSON"):
        parse(text, "adapter_config.json")
    assert "a" in parse(text, "config.json")  # Mamba's configs hold Infinity


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no pipes in the file system")
def test_a_pipe_is_no_file(tmp_path: Path):
    os.mkfifo(tmp_path / "config.json")
    with pytest.raises(JsonError, match="no plain file"):
        read_json(tmp_path / "config.json", "config.json")


def test_a_folder_a_device_and_a_missing_file_are_refused(tmp_path: Path):
    (tmp_path / "config.json").mkdir()
    for path, words in (
        (tmp_path / "config.json", "folder|Permission|directory"),
        (tmp_path / "b", "No such file"),
        (tmp_path / "\0", "null"),
    ):
        assert raised(CheckpointError, read_object, path, "config.json", match=words).path == str(path)
    if os.path.exists("/dev/zero"):
        with pytest.raises(JsonError, match="no plain file"):
            read_bytes("/dev/zero", "plan")


@pytest.mark.parametrize("kind", list(KINDS))
def test_a_sparse_file_is_refused_unread(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    with (tmp_path / "a").open("wb") as file:
        file.truncate(2**31)
    monkeypatch.setattr(os, "fdopen", lambda *args: pytest.fail("read"))
    with pytest.raises(JsonError, match="too large"):
        read_bytes(tmp_path / "a", kind)


@pytest.mark.parametrize("name", sorted(json_file.FOREIGN_FILES))
def test_files_that_transformers_opens_are_held_to_limits(name: str, tmp_path: Path):
    (tmp_path / name).write_bytes(b"{}")
    json_file.check_files(tmp_path)
    with (tmp_path / name).open("wb") as file:
        file.truncate(2**31)
    assert raised(CheckpointError, json_file.check_files, tmp_path, match="too large").path == str(tmp_path / name)
