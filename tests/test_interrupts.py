"""Ctrl-C at any moment of any command: exit code 130, one line, no traceback."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import trimtab.demo as demo
from trimtab import interrupts

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="sends a POSIX signal")
BASE = str(demo.BASE)
STYLE = f"style={demo.ADAPTERS['style']}"
COMMANDS = {
    "plan": ["plan", BASE, "--device", "cpu"],
    "run": ["run", BASE, "Who are you?", "--device", "cpu", "--adapter", STYLE, "--max-new-tokens", "400",
            "--temperature", "100"],
    "verify": ["verify", BASE, "--device", "cpu", "--against", "base", "--adapter", STYLE],
    "doctor": ["doctor", "--probe", "A1"],
    "demo": ["demo"],
}  # fmt: skip


def start(arguments: list[str], *, as_script: bool = False) -> subprocess.Popen[bytes]:
    # The console script is a file of this name with these lines.
    script = "import sys; sys.argv[0] = '/usr/bin/trimtab'; from trimtab.cli import main; sys.exit(main())"
    entry = ["-c", script] if as_script else ["-m", "trimtab"]
    return subprocess.Popen(
        [sys.executable, *entry, *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )  # fmt: skip


def stopped(process: subprocess.Popen[bytes]) -> None:
    out, err = process.communicate(timeout=120)
    assert process.returncode == 130, err.decode()
    assert b"Traceback" not in err and b"KeyboardInterrupt" not in err and b"Exception ignored" not in err, err.decode()
    assert err.decode().splitlines()[-1] == "trimtab: stopped" and b"Traceback" not in out


def wait_for_module(process: subprocess.Popen[bytes], name: str) -> None:
    """Wait until the process has mapped a library of that name: a moment that does not depend on the machine's speed."""
    maps = Path(f"/proc/{process.pid}/maps")
    until = time.monotonic() + 60
    while time.monotonic() < until and process.poll() is None:
        if name in maps.read_text():
            return
        time.sleep(0.005)


def test_an_interrupt_that_another_package_turned_into_an_error_stops_the_command() -> None:
    code = """
import os, signal, sys
sys.argv[0] = "/usr/bin/trimtab"
from trimtab import cli
from trimtab.commands import line
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
    stopped(
        subprocess.Popen(
            [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True,
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
        )
    )  # fmt: skip


@pytest.mark.parametrize("as_script", [False, True])
@pytest.mark.parametrize("after_s", [0.0, 0.1, 0.3])
def test_while_the_package_is_imported(as_script: bool, after_s: float) -> None:
    # Slow as on a cold disk, from the first import of the package on.
    code = (
        "import sys, time, importlib.abc\n"
        "class Slow(importlib.abc.MetaPathFinder):\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name.startswith('trimtab.') and name != 'trimtab.interrupts':\n"
        "            print('importing', flush=True); time.sleep(0.1)\n"
        "sys.meta_path.insert(0, Slow())\n"
    )
    start_it = (
        "sys.argv[0] = '/usr/bin/trimtab'; from trimtab.cli import main; sys.exit(main())"
        if as_script
        else "sys.argv[0] = '-m'; sys.orig_argv[1:] = ['-m', 'trimtab']; from trimtab.cli import main; sys.exit(main())"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code + start_it, "plan", BASE], stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )  # fmt: skip
    assert process.stdout is not None and process.stdout.readline() == b"importing\n"
    time.sleep(after_s)
    process.send_signal(signal.SIGINT)
    stopped(process)


@pytest.mark.skipif(sys.platform != "linux", reason="sees in /proc how far a process is")
@pytest.mark.parametrize("library", ["libtorch_cpu", "libtorch_python", "safetensors"])
@pytest.mark.parametrize("command", ["run", "demo"])
def test_while_what_a_command_needs_is_imported(command: str, library: str) -> None:
    process = start(COMMANDS[command])
    wait_for_module(process, library)
    process.send_signal(signal.SIGINT)
    stopped(process)


@pytest.mark.slow
@pytest.mark.parametrize("after_s", [0.5, 1.0, 2.0, 3.0, 4.5, 6.0])
@pytest.mark.parametrize("command", COMMANDS)
def test_at_several_moments_of_every_command(command: str, after_s: float) -> None:
    process = start(COMMANDS[command], as_script=True)
    time.sleep(after_s)
    if process.poll() is None:  # as a terminal does: to the children too
        os.killpg(process.pid, signal.SIGINT)
        try:
            out, err = process.communicate(timeout=30)
        except subprocess.TimeoutExpired:  # lost in a callback of Python's
            os.killpg(process.pid, signal.SIGINT)
            out, err = process.communicate(timeout=30)
        assert process.returncode in (0, 130), err.decode()  # it may have ended by itself in this moment
        assert b"Traceback" not in err + out, err.decode()
    process.communicate()


def test_a_wrong_command_line_of_a_real_process_is_no_interrupt() -> None:
    done = subprocess.run([sys.executable, "-m", "trimtab", "plan"], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (2, "") and done.stderr.startswith("usage: trimtab plan")


def test_a_second_ctrl_c_ends_what_does_not_listen() -> None:
    code = (
        "import sys, time\n"
        "sys.argv[0] = 'trimtab'\n"
        "from trimtab import cli\n"
        "from trimtab.commands import line\n"
        "def deaf(options):\n"
        "    for _ in range(2):\n"
        "        try:\n"
        "            print('working', flush=True); time.sleep(60)\n"
        "        except KeyboardInterrupt: pass\n"
        "line.run_demo = deaf\n"
        "sys.exit(cli.main(['demo']))\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )  # fmt: skip
    assert process.stdout is not None
    for _ in range(2):
        assert process.stdout.readline() == b"working\n"
        process.send_signal(signal.SIGINT)
    stopped(process)


def test_other_programs_keep_their_own_ctrl_c() -> None:
    code = "import signal, trimtab, trimtab.cli\nassert signal.getsignal(signal.SIGINT) is signal.default_int_handler\n"
    subprocess.run(
        [sys.executable, "-c", code],
        check=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )
    assert not interrupts.is_command()


def test_what_was_started_without_ctrl_c_stays_so() -> None:
    code = (
        "import signal, sys\n"
        "sys.argv[0] = 'trimtab'\n"
        "import trimtab\n"
        "assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN\n"
    )
    subprocess.run(
        [sys.executable, "-c", code], check=True, preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_IGN)
    )
