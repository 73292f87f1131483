"""Completion in real shells: what the Tab key makes of a line after the script was sourced as the docs say."""

import os
import re
import shutil
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest

from tests import ROOT
from trimtab.cli import main

DOCS = ROOT / "docs" / "command-line.md"
INTERACTIVE = {"bash": ["--norc", "--noprofile", "-i"], "zsh": ["-f", "-i"]}
SOURCES = {"bash": "source <(trimtab completion bash)", "zsh": "source <(trimtab completion zsh)",
           "fish": "trimtab completion fish | source"}  # fmt: skip
# What is typed before Tab -> what the line is afterwards.
CASES = [
    ("trimtab ru", "trimtab run "), ("trimtab run --gpu-m", "trimtab run --gpu-memory "),
    ("trimtab serve x --adapter-r", "trimtab serve x --adapter-root "),
    ("trimtab plan --quant nf4-", "trimtab plan --quant nf4-dq "),
    ("trimtab serve x --log-format j", "trimtab serve x --log-format json "),
    ("trimtab completion zs", "trimtab completion zsh "), ("trimtab plan models/sm", "trimtab plan models/small/"),
    ("trimtab run models/small --adapter style=models/sm", "trimtab run models/small --adapter style=models/small/"),
    ("trimtab doctor --adapter models/sm", "trimtab doctor --adapter models/small/"),
]  # fmt: skip


@pytest.fixture
def folder(tmp_path, request):
    shell = request.getfixturevalue("shell")
    if shutil.which(shell) is None:
        pytest.skip(f"no {shell} here")
    if shell != "fish":
        pytest.importorskip("pty", reason="no pseudo-terminals here")
    (tmp_path / "models" / "small").mkdir(parents=True)
    (tmp_path / "bin").mkdir()
    command = tmp_path / "bin" / "trimtab"
    command.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m trimtab "$@"\n')
    command.chmod(0o755)
    return tmp_path


def environment(folder):
    path = f"{folder / 'bin'}{os.pathsep}{os.environ['PATH']}"
    root = str(Path(main.__file__).parent.parent)
    return {**os.environ, "PATH": path, "PYTHONPATH": root, "HOME": str(folder), "TERM": "dumb", "PS1": "> "}


class Shell:
    """An interactive shell on a terminal of its own."""

    def __init__(self, shell, folder):
        import pty

        self.master, terminal = pty.openpty()
        self.process = subprocess.Popen(
            [shell, *INTERACTIVE[shell]], stdin=terminal, stdout=terminal, stderr=terminal, cwd=folder,
            env=environment(folder), start_new_session=True,
        )  # fmt: skip
        os.close(terminal)

    def read(self, is_over, wait_s):
        """Return what came until it is over, or after the wait."""
        import select

        text, end = "", time.monotonic() + wait_s
        while time.monotonic() < end and not is_over(text):
            if select.select([self.master], [], [], 0.1)[0]:
                with suppress(OSError):
                    text += os.read(self.master, 65536).decode(errors="replace")
        return text

    def do(self, command):
        os.write(self.master, f"{command}; echo DO''NE\n".encode())
        text = self.read(lambda text: "DONE" in text, 60)
        assert "DONE" in text, text
        return text

    def complete(self, line, expected):
        os.write(self.master, b"\x15" + f"{line}\t".encode())
        return self.read(lambda text: expected in text, 20)

    def end(self):
        os.close(self.master)
        self.process.kill()
        self.process.wait(30)


@pytest.mark.parametrize("shell", ["bash", "zsh"])
def test_tab_completes_the_line(shell, folder):
    terminal = Shell(shell, folder)
    try:
        terminal.do("stty rows 50 cols 200" + ("; autoload -Uz compinit; compinit -u" if shell == "zsh" else ""))
        said = terminal.do(SOURCES[shell])
        assert "command not found" not in said and "can only be called" not in said
        for line, expected in CASES:
            seen = terminal.complete(line, expected)
            assert expected in seen, (line, seen)
            assert "not found" not in seen
    finally:
        terminal.end()


@pytest.mark.parametrize("shell", ["fish"])
def test_fish_offers_what_the_line_becomes(shell, folder):
    lines = "; ".join(f"complete -C '{line}'; echo DONE" for line, _ in CASES)
    done = subprocess.run(
        ["fish", "--no-config", "-c", f"{SOURCES[shell]}; {lines}"],
        capture_output=True, text=True, cwd=folder, env=environment(folder), timeout=120,
    )  # fmt: skip
    assert done.returncode == 0 and not done.stderr, done.stderr
    for (line, expected), found in zip(CASES, re.split(r"^DONE$", done.stdout, flags=re.M)[:-1], strict=True):
        words = [one.split("\t")[0] for one in found.strip().splitlines()]
        assert expected.split()[-1] in words, (line, words)


@pytest.mark.parametrize("shell", SOURCES)
def test_the_docs_say_how_each_script_is_sourced(shell):
    assert SOURCES[shell] in DOCS.read_text("utf-8").replace("\\|", "|")  # a table's cell


@pytest.mark.parametrize("shell", SOURCES)
def test_a_script_has_no_error_for_its_shell(shell, tmp_path, capsys):
    assert main.main(["completion", shell]) == 0
    script = capsys.readouterr().out
    assert "prefix-cache" in script and "adapters" in script
    if shutil.which(shell) is None:
        pytest.skip(f"no {shell} here")
    (tmp_path / "script").write_text(script)
    subprocess.run([shell, "-n", str(tmp_path / "script")], check=True)
