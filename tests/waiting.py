"""How does a test wait? Only here does anything in tests sleep: until a condition is true, or to be slow on purpose."""

import asyncio
import threading
import time

import psutil

WAIT_S = 60.0  # a deadline that only what hangs meets, also on a busy machine


def _pauses(within_s):
    """Yield how long to wait before each next look: a twentieth of the time so far, so that looking costs little."""
    start = time.monotonic()
    while (waited_s := time.monotonic() - start) < within_s:
        yield min(0.2, max(0.002, waited_s / 20))
    raise AssertionError(f"not so within {within_s:g} seconds")


def until(condition, within_s=WAIT_S):
    """Return the first true value of condition(). Errors: AssertionError if there is none in time."""
    pauses = _pauses(within_s)
    while not (value := condition()):
        time.sleep(next(pauses))
    return value


async def until_async(condition, within_s=WAIT_S):
    """The same while the other tasks of the event loop run."""
    pauses = _pauses(within_s)
    while not (value := condition()):
        await asyncio.sleep(next(pauses))
    return value


async def turns(count=1):
    """Let the other tasks of the event loop run this many times."""
    for _ in range(count):
        await asyncio.sleep(0)


def is_gone(pid):
    """Whether a process has ended, also if its parent has not asked for its end."""
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def dripped(pieces, every_s):
    """Yield each piece after a pause: what a slow peer sends."""
    for piece in pieces:
        time.sleep(every_s)
        yield piece


def hang(most_s=600.0):
    """Do nothing, as a process or thread that another one ends."""
    threading.Event().wait(most_s)
