"""Ctrl-C at any moment of any command: exit code 130, one line, no traceback."""

from __future__ import annotations

import os
import random
import re
import signal
import socket
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from contextlib import suppress
from itertools import product
from pathlib import Path
from types import SimpleNamespace

import pytest

import trimtab.demo as demo
from tests import waiting
from trimtab.cli import main
from trimtab.process import interrupts

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="sends a POSIX signal")
BASE = str(demo.BASE)
STYLE = f"style={demo.ADAPTERS['style']}"
# What takes longer than a moment, by the parser's commands; {tmp}, {prompts} and {hub} are filled in.
COMMANDS = {
    "plan": ["plan", BASE, "--device", "cpu"],
    "inspect": ["inspect", str(demo.ADAPTERS["style"]), "--model", BASE],
    "run": ["run", BASE, "Who are you?", "--device", "cpu", "--adapter", STYLE, "--max-new-tokens", "400",
            "--temperature", "100"],
    "run --prompts": ["run", BASE, "--prompts", "{prompts}", "--out", "{tmp}/out.jsonl", "--device", "cpu"],
    "chat": ["chat", BASE, "--device", "cpu"],
    "verify": ["verify", BASE, "--device", "cpu", "--against", "base", "--adapter", STYLE],
    "verify --against a server": ["verify", BASE, "--device", "cpu", "--against", "{hub}/v1", "--adapter", STYLE,
                                  "--remote-model", "style"],
    "merge": ["merge", BASE, "{tmp}/merged", "--adapter", STYLE, "--check", "--device", "cpu"],
    "bench": ["bench", BASE, "--device", "cpu", "--runs", "1", "--adapter", STYLE],
    "tune": ["tune", BASE, "--device", "cpu"],
    "doctor": ["doctor", "--probe", "A1"],
    "doctor MODEL": ["doctor", BASE, "--adapter", STYLE],
    "demo": ["demo"],
    "models": ["models", str(demo.FOLDER), "--device", "cpu"],
    "adapters": ["adapters", str(demo.FOLDER), "--model", BASE],
    "serve": ["serve", BASE, "--device", "cpu", "--port", "0"],
    "pull": ["pull", "someone/model"],
}  # fmt: skip
MOMENTARY = {"completion": "prints a text"}
# What never ends by itself, and exit codes of those that do, beside 0.
LASTING = ("serve", "chat", "pull")
OWN_CODES = {"tune": 2, "verify --against a server": 9}
MOMENTS, LATEST_STEP_S = 7, 1.7
LIBRARIES = ("libtorch_cpu", "libtorch_python", "safetensors")
# Of the commands, those of other kinds: one that answers, one that never ends, one that waits for another machine.
FIRST = ("run", "serve", "pull")
LATER_LIBRARIES = [case for case in product(("run", "demo"), LIBRARIES) if case != ("run", "libtorch_cpu")]
LATER_IMPORTS = [(False, 2), (False, 4), (True, 1), (True, 4)]


def moments(command: str) -> list[float]:
    """Return seconds after the start, at random but the same in each run, from 0 on."""
    random_ = random.Random(command)
    at = [random_.uniform(0, 0.1)]
    while len(at) < MOMENTS:
        at.append(at[-1] + random_.uniform(0.05, LATEST_STEP_S))
    return [round(one, 3) for one in at]


@pytest.fixture(scope="module")
def silent_server() -> Iterator[str]:
    """The address of a server that takes connections and says nothing."""
    with socket.create_server(("127.0.0.1", 0), backlog=200) as listener:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"


def start(
    arguments: list[str], *, as_script: bool = False, environ: dict[str, str] | None = None, stdin: int | None = None
) -> subprocess.Popen[bytes]:
    # The console script is a file of this name with these lines.
    script = "import sys; sys.argv[0] = '/usr/bin/trimtab'; from trimtab.cli.main import main; sys.exit(main())"
    entry = ["-c", script] if as_script else ["-m", "trimtab"]
    return python(*entry, *arguments, stdin=stdin, env={**os.environ, **(environ or {})})


def python(*arguments: str, stdin: int | None = None, env: dict[str, str] | None = None) -> subprocess.Popen[bytes]:
    """Start an interpreter that Ctrl-C reaches, in a session of its own."""
    return subprocess.Popen(
        [sys.executable, *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler), stdin=stdin, env=env,
    )  # fmt: skip


def stopped(process: subprocess.Popen[bytes]) -> None:
    out, err = process.communicate(timeout=120)
    assert process.returncode == 130, err.decode()
    assert b"Traceback" not in err and b"KeyboardInterrupt" not in err and b"Exception ignored" not in err, err.decode()
    assert err.decode().splitlines()[-1] == "trimtab: stopped" and b"Traceback" not in out


def wait_for_module(process: subprocess.Popen[bytes], name: str) -> None:
    """Wait until the process has mapped a library of that name: a moment that does not depend on the machine's speed."""
    maps = Path(f"/proc/{process.pid}/maps")
    waiting.until(lambda: process.poll() is not None or name in maps.read_text())


def test_an_interrupt_that_another_package_turned_into_an_error_stops_the_command() -> None:
    code = """
import os, signal, sys
sys.argv[0] = "/usr/bin/trimtab"
from trimtab.cli import main as cli
from trimtab.cli.commands import plan_run as line
from trimtab.errors import CheckpointError

def interrupted(options):
    try:
        os.kill(os.getpid(), signal.SIGINT)
        signal.pause()
    except KeyboardInterrupt:
        raise CheckpointError("is refused: could not import a module", path="x") from None

line.run_plan.__code__ = interrupted.__code__
line.run_plan.__globals__.update(os=os, signal=signal, CheckpointError=CheckpointError)
sys.exit(cli.main(["plan", "model"]))
"""
    stopped(python("-c", code))


@pytest.mark.parametrize(
    ("as_script", "imports"), [(False, 1), (True, 2), *(pytest.param(*case, marks=pytest.mark.slow) for case in LATER_IMPORTS)]
)
def test_while_the_package_is_imported(as_script: bool, imports: int) -> None:
    # Slow as on a cold disk, from the first import of the package on.
    code = (
        "import sys, threading, importlib.abc\n"
        "class Slow(importlib.abc.MetaPathFinder):\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name.startswith('trimtab.'):\n"
        "            print('importing', flush=True); threading.Event().wait(0.1)\n"
        "sys.meta_path.insert(0, Slow())\n"
    )
    start_it = (
        "sys.argv[0] = '/usr/bin/trimtab'; from trimtab.cli.main import main; sys.exit(main())"
        if as_script
        else "sys.argv[0] = '-m'; sys.orig_argv[1:] = ['-m', 'trimtab']; from trimtab.cli.main import main; sys.exit(main())"
    )
    process = python("-c", code + start_it, "plan", BASE)
    assert process.stdout is not None
    assert [process.stdout.readline() for _ in range(imports)] == [b"importing\n"] * imports
    process.send_signal(signal.SIGINT)
    stopped(process)


@pytest.mark.skipif(sys.platform != "linux", reason="sees in /proc how far a process is")
@pytest.mark.parametrize(
    ("command", "library"), [("run", "libtorch_cpu"), *(pytest.param(*case, marks=pytest.mark.slow) for case in LATER_LIBRARIES)]
)
def test_while_what_a_command_needs_is_imported(command: str, library: str) -> None:
    process = start(COMMANDS[command])
    wait_for_module(process, library)
    process.send_signal(signal.SIGINT)
    stopped(process)


def test_every_command_that_takes_longer_than_a_moment_is_tried() -> None:
    known = next(action.choices for action in main.parser()._actions if action.dest == "name" and action.choices)
    assert {arguments[0] for arguments in COMMANDS.values()} | set(MOMENTARY) == set(known)


def interrupt(command: str, after_s: float, tmp_path: Path, hub: str) -> None:
    """Press Ctrl-C once after so many seconds, as a terminal does: in the children too."""
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "Who are you?"}\n' * 50, encoding="utf-8")
    arguments = [text.format(tmp=tmp_path, prompts=prompts, hub=hub) if text[0] == "{" else text for text in COMMANDS[command]]
    environ = {"HF_HUB_OFFLINE": "0", "HF_ENDPOINT": hub} if command == "pull" else {}
    process = start(arguments, as_script=True, environ=environ, stdin=subprocess.PIPE)  # `chat` waits for a line
    with suppress(subprocess.TimeoutExpired):
        process.wait(after_s)
    if process.poll() is not None:
        out, err = process.communicate()
        assert command not in LASTING and process.returncode in (0, OWN_CODES.get(command)), err.decode()
        return
    os.killpg(process.pid, signal.SIGINT)
    held, process.stdin = process.stdin, None  # `communicate` would close it, and a chat ends at the end of its input
    try:
        out, err = process.communicate(timeout=30)
    except subprocess.TimeoutExpired:  # lost in a callback of Python's: the second one ends at once
        os.killpg(process.pid, signal.SIGINT)
        out, err = process.communicate(timeout=30)
    assert held is not None
    held.close()
    code = shell_code(process.returncode)
    if after_s < PYTHONS_OWN_S and code != STOPPED:
        assert is_pythons_own(code, err.decode()), (code, err.decode())
        return
    ended_itself = () if command in LASTING else (0, OWN_CODES.get(command))
    assert code in (STOPPED, *ended_itself), (code, err.decode())
    if after_s < PYTHONS_OWN_S and is_pythons_own(code, err.decode()):
        return
    assert b"Traceback" not in err + out and b"KeyboardInterrupt" not in err + out, err.decode()


# The longest that Python may need to come to our first line, on a machine with other work.
STOPPED, PYTHONS_OWN_S = interrupts.STOPPED, 2.0


def shell_code(code: int) -> int:
    """Return an exit code as a shell shows it: before Python has set up its signals, and once it has put them away, Ctrl-C ends
    a process without a word."""
    return 128 - code if code < 0 else code


def is_pythons_own(code: int, err: str) -> bool:
    """Return whether a process ended before our first line, with a traceback of Python's start alone."""
    files = re.findall(r'File "([^"]+)"', err)
    library = sysconfig.get_path("stdlib")
    return code in (1, STOPPED) and all(file.startswith(("<", library)) and "site-packages" not in file for file in files)


@pytest.mark.parametrize("command", [name if name in FIRST else pytest.param(name, marks=pytest.mark.slow) for name in COMMANDS])
def test_early_in_every_command(command: str, tmp_path: Path, silent_server: str) -> None:
    interrupt(command, 0.05 + random.Random(command).uniform(0, 0.7), tmp_path, silent_server)


@pytest.mark.slow
@pytest.mark.parametrize("number", range(MOMENTS))
@pytest.mark.parametrize("command", COMMANDS)
def test_at_random_moments_of_every_command(command: str, number: int, tmp_path: Path, silent_server: str) -> None:
    interrupt(command, moments(command)[number], tmp_path, silent_server)


def test_a_wrong_command_line_of_a_real_process_is_no_interrupt() -> None:
    done = subprocess.run([sys.executable, "-m", "trimtab", "plan"], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (2, "") and done.stderr.startswith("usage: trimtab plan")


def test_a_second_ctrl_c_ends_what_does_not_listen() -> None:
    code = (
        "import sys, threading\n"
        "sys.argv[0] = 'trimtab'\n"
        "from trimtab.cli import main as cli\n"
        "from trimtab.cli.commands import plan_run as line\n"
        "def deaf(options):\n"
        "    for _ in range(2):\n"
        "        try:\n"
        "            print('working', flush=True); threading.Event().wait(60)\n"
        "        except KeyboardInterrupt: pass\n"
        "line.run_demo = deaf\n"
        "sys.exit(cli.main(['demo']))\n"
    )
    process = python("-c", code)
    assert process.stdout is not None
    for _ in range(2):
        assert process.stdout.readline() == b"working\n"
        process.send_signal(signal.SIGINT)
    stopped(process)


def test_other_programs_keep_their_own_ctrl_c() -> None:
    code = "import signal, trimtab, trimtab.cli.main\nassert signal.getsignal(signal.SIGINT) is signal.default_int_handler\n"
    subprocess.run(
        [sys.executable, "-c", code], check=True, preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler)
    )
    assert not interrupts.is_command()


def test_what_was_started_without_ctrl_c_stays_so() -> None:
    code = "import signal, sys\nsys.argv[0] = 'trimtab'\nimport trimtab\nassert signal.getsignal(signal.SIGINT) is signal.SIG_IGN\n"
    subprocess.run([sys.executable, "-c", code], check=True, preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_IGN))


def test_ctrl_c_while_torch_is_imported_ends_at_once_and_raises_otherwise(monkeypatch):
    """An exception in the middle of that import goes through C++ that aborts the process."""
    before, ended = signal.getsignal(signal.SIGINT), []
    monkeypatch.setattr(interrupts, "_end", lambda number, frame: ended.append(number))
    try:
        for is_imported, ends in ((False, []), (True, [signal.SIGINT])):
            torch = SimpleNamespace(__spec__=SimpleNamespace(_initializing=is_imported))
            monkeypatch.setitem(sys.modules, "torch", torch)
            with pytest.raises(KeyboardInterrupt):
                interrupts._raise(signal.SIGINT, None)
            assert ended == ends
    finally:
        signal.signal(signal.SIGINT, before)
