"""What is a long command doing now, in words?"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

# A function of a phase and of how far it is: "3 of 12", or "" if that is not known.
Watcher = Callable[[str, str], None]
SLOW_IMPORTS = ("torch", "transformers")
# Time between two counts of one phase; the last count is always reported.
COUNT_EVERY_S = 0.1
_UNITS = (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10))
_watcher: ContextVar[Watcher | None] = ContextVar("watcher", default=None)


def begin(phase: str, far: str = "") -> None:
    """Report a phase to the watcher; "" is the end of the last one."""
    watcher = _watcher.get()
    if watcher is not None:
        watcher(phase, far)


def begin_imports() -> None:
    """Report that torch and transformers are imported now, if they are not imported yet."""
    left = [name for name in SLOW_IMPORTS if not _is_imported(name)]
    if left:
        begin(f"importing {' and '.join(left)}")


def _is_imported(name: str) -> bool:
    module = sys.modules.get(name)  # there from the beginning of its import, which another thread may have begun
    return module is not None and not getattr(getattr(module, "__spec__", None), "_initializing", False)


def counting(phase: str, *, is_bytes: bool = False) -> Callable[[int, int], None]:
    """Return a function of (done, of) that reports to the present watcher, from any thread."""
    watcher, reported_s = _watcher.get(), float("-inf")

    def count(done: int, of: int) -> None:
        nonlocal reported_s
        if watcher is None or (done < of and time.monotonic() - reported_s < COUNT_EVERY_S):
            return
        reported_s = time.monotonic()
        watcher(phase, far_text(done, of, is_bytes=is_bytes))

    return count


def far_text(done: int, of: int, *, is_bytes: bool = False) -> str:
    """Return "3 of 12", or "3.1 of 6.2 GiB"; "" if the whole is not known."""
    if of <= 0:
        return ""
    unit, size = next(((unit, size) for unit, size in _UNITS if is_bytes and of >= size), ("", 1))
    return f"{done / size:.1f} of {of / size:.1f} {unit}" if unit else f"{done} of {of}{' B' if is_bytes else ''}"


@contextmanager
def watched(watcher: Watcher) -> Iterator[None]:
    """Report the phases of the block to this watcher instead of the outer one."""
    token = _watcher.set(watcher)
    try:
        yield
    finally:
        _watcher.reset(token)


@contextmanager
def within(label: str) -> Iterator[None]:
    """Put a label in front of the phases of the block."""
    outer = _watcher.get()
    with watched(lambda phase, far: None if outer is None else outer(f"{label}: {phase}", far)):
        yield
