"""A disk without room, a real one: every command that writes says so in one line, and nothing half-written stays."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import trimtab.demo as demo
from tests.machine.test_environment import read_only_environment
from tests.raised import refused
from trimtab.cli import main
from trimtab.doctor.issues.draft import Drafts
from trimtab.doctor.report import document_of, write_report

BASE, STYLE = str(demo.BASE), f"style={demo.ADAPTERS['style']}"
LEFT_BYTES = 4096  # a page: less than any file below needs


def mount(folder: Path, size: str) -> bool:
    done = subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder)], capture_output=True, check=False)
    return done.returncode == 0


@pytest.fixture
def full(tmp_path: Path) -> Iterator[Path]:
    """A folder of a file system of its own, with room for LEFT_BYTES."""
    folder = tmp_path / "full"
    folder.mkdir()
    if sys.platform != "linux" or os.geteuid() != 0 or not mount(folder, "1m"):
        pytest.skip("a small file system can be mounted by root on Linux alone")
    try:
        (folder / "taken").write_bytes(bytes(2**20 - LEFT_BYTES))
        yield folder
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


def names(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))


PLAN = ["plan", BASE, "--device", "cpu", "--context", "128"]
COMMANDS: dict[str, tuple[list[str], int]] = {
    "plan --save": ([*PLAN, "--save", "{full}/plan.json"], 2),
    "plan --picture svg": ([*PLAN, "--picture", "{full}/plan.svg"], 2),
    "inspect --patched": (["inspect", str(demo.ADAPTERS["style"]), "--model", BASE, "--patched", "{full}/copy"], 2),
    "merge": (["merge", BASE, "{full}/merged", "--adapter", STYLE], 4),
    "merge into a folder": (["merge", BASE, "{full}/a/merged", "--adapter", STYLE], 2),
    "serve --print-config": (["serve", BASE, "--ray", "--device", "cpu", "--print-config", "{full}/serve.yaml"], 2),
}  # fmt: skip


@pytest.mark.parametrize("name", COMMANDS)
def test_a_command_says_it_in_one_line_and_leaves_nothing(
    name: str, full: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trimtab.serve.ray.deploy.check_ray", lambda: None)
    arguments, code = COMMANDS[name]
    if name == "serve --print-config":
        (full / "taken").write_bytes(bytes(2**20))  # its file is small
    before = names(full)
    assert main.main([text.format(full=full) for text in arguments]) == code
    err = capsys.readouterr().err
    assert err.startswith("trimtab: ") and err.count("\n") == 1, err
    assert names(full) == before and list(tmp_path.iterdir()) == [full]


def test_answers_of_a_file_stay_whole_lines(full: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "Who are you?"}\n' * 4, encoding="utf-8")
    (full / "taken").write_bytes(bytes(2**20 - 4096))
    (full / "taken").write_bytes(bytes(2**20))
    arguments = ["run", BASE, "--prompts", str(prompts), "--out", str(full / "out.jsonl"), "--device", "cpu"]
    assert main.main(arguments) == 2
    err = capsys.readouterr().err
    assert "--out" in err and "No space left" in err and "Traceback" not in err
    assert (full / "out.jsonl").read_bytes() == b""


def wide(text: str) -> str:
    return text * 2 * LEFT_BYTES


@pytest.mark.parametrize(("write", "field"), [
    (lambda folder: write_report(folder / "page.html", document_of(read_only_environment(os=wide("a")))), "html"),
    (lambda folder: Drafts((), (), (), wide("a")).written_to(folder / "drafts"), "drafts"),
])  # fmt: skip
def test_what_the_doctor_writes_is_whole_or_not_there(write: Callable[[Path], Any], field: str, full: Path) -> None:
    before = names(full)
    assert refused(write, full, match="No space left").field == field and names(full) == before


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full here")
@pytest.mark.parametrize("arguments", [["completion", "bash", "--json"], ["inspect", STYLE]])
def test_an_output_that_takes_no_more_is_one_line(arguments: list[str]) -> None:
    with Path("/dev/full").open("wb") as out:
        done = subprocess.run(
            [sys.executable, "-m", "trimtab", *arguments], stdout=out, stderr=subprocess.PIPE, text=True, check=False, timeout=120
        )
    assert (done.returncode, done.stderr) == (2, "trimtab: cannot be written (No space left on device)\n")
