"""What does Ctrl-C or SIGTERM do before, during and after a command?"""

from __future__ import annotations

import _signal as signal  # type: ignore[import-not-found]  # `signal` imports enum first
import atexit
import os
import sys

STOPPED = 130


# Signal -> exit code. The servers install their own handlers for both.
ENDING = {number: 128 + number for name in ("SIGHUP", "SIGTERM") if (number := getattr(signal, name, None)) is not None}


def is_command() -> bool:
    """Return whether this process was started as `trimtab` or `python -m trimtab`. From the first line of `trimtab/__init__.py`
    until a command begins, and once it has ended, Ctrl-C ends the process with exit code 130. A program that imports trimtab is not
    affected."""
    program = os.path.basename(sys.argv[0] if sys.argv else "").lower()
    if program in ("trimtab", "trimtab.exe", "trimtab-script.py", "trimtab-script.pyw"):
        return True
    given = sys.orig_argv[1:]
    return program in ("-m", "__main__.py") and "-m" in given and given[given.index("-m") + 1 :][:1] == ["trimtab"]


def end_at_once() -> None:
    """Make Ctrl-C end the process without Python's traceback, if this is trimtab's command and Ctrl-C was not disabled."""
    if is_command() and signal.getsignal(signal.SIGINT) not in (signal.SIG_IGN, None):
        signal.signal(signal.SIGINT, _end)


def raise_again() -> None:
    """Make Ctrl-C raise KeyboardInterrupt again after `end_at_once`; a second Ctrl-C ends the process immediately."""
    if signal.getsignal(signal.SIGINT) in (_end, _end_second):
        signal.signal(signal.SIGINT, _raise)


def raise_at_end() -> None:
    """Make SIGTERM and SIGHUP raise KeyboardInterrupt in a running command, unless they are already handled or ignored."""
    if is_command():
        for number in ENDING:
            if signal.getsignal(number) == signal.SIG_DFL:
                signal.signal(number, _raise)


def stopped_code() -> int:
    """Return the exit code of a command that was stopped: that of the signal that came, else of Ctrl-C. SIGTERM, and SIGHUP unless
    it is ignored (`nohup`), stop a running command as Ctrl-C does."""
    return next((code for number, code in ENDING.items() if signal.getsignal(number) is _end_second), STOPPED)


def was_raised() -> bool:
    """Return whether a running command got its first Ctrl-C: other packages turn it into their own errors (transformers 5.23
    reports missing requirements of a config class)."""
    return is_command() and any(signal.getsignal(number) is _end_second for number in (signal.SIGINT, *ENDING))


def leave_stopped(code: int = STOPPED) -> None:
    """End the process with an exit code, after the functions that were registered with atexit.

    A return is not enough: if the interrupt was raised in code that a C module ran, Python ends itself by a signal,
    even if the exception was handled (CPython 3.11, pythonrun.c, run_eval_code_obj).
    """
    try:
        atexit._run_exitfuncs()
        sys.stderr.flush()
    finally:
        os._exit(code)


def _raise(number: int, frame: object) -> None:
    # An exception during torch's import passes through C++ code that aborts the process. There is nothing to clean up
    # yet.
    if getattr(getattr(sys.modules.get("torch"), "__spec__", None), "_initializing", False):
        _end(number, frame)
    # Python discards an exception that is raised in a destructor or callback: the user has to press Ctrl-C again.
    signal.signal(number, _end_second)
    raise KeyboardInterrupt


def _end_second(number: int, frame: object) -> None:
    """End as `_end` does. A separate function shows that a command got a first Ctrl-C."""
    _end(number, frame)


def _end(number: int, frame: object) -> None:
    try:
        os.write(2, b"trimtab: stopped\n")
    finally:
        os._exit(ENDING.get(number, STOPPED))
