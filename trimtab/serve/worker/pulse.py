"""Detects whether a worker still makes progress: its loop sends beats and announces long work; without either, the
parent checks its activity.

    Pulse     the worker's side: the expected time of a piece of work, announced before it begins if it is long
    Silence   the API process's side: since when nothing was received, whether that is too long, and when to end it

The loop that makes tokens sends the beats, not a separate thread, so a loop that hangs is silent. One call can be long
without a fault, such as a prompt chunk on a slow CPU. The worker knows how long work of a kind has taken per unit, and
announces a bound before it begins if the bound is more than `LONG_S` or unknown. A worker that is silent without a
bound, or beyond it, is not ready.

It is ended later, and only if it does nothing: the CPU time of a process that hangs or was stopped does not grow, while
that of one on a swapping machine does, or it reads. Activity is accepted up to `most_s`, since a loop can also run
without end. Silence is counted in checks: if checks are late, this process was stopped or the machine slept, and
perhaps the worker too.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import Any

from trimtab.process.runner import Activity

# Seconds between two beats of a worker without other messages.
BEAT_S = 0.5
# Expected seconds from which work is announced, and its bound: a multiple of the expected time, within these seconds.
LONG_S, MARGIN, LEAST_S, MOST_S = 1.0, 10.0, 30.0, 900.0
# The bound of work of a kind that has not run yet: a first time may compile or capture.
FIRST_S = 300.0
# The longest time per unit of a kind decays with each shorter one.
FADE = 0.9


class Pulse:
    """The announcements of a worker's loop. send: to the API process. now: seconds."""

    def __init__(self, send: Callable[[Mapping[str, Any]], None], *, now: Callable[[], float] = time.monotonic) -> None:
        self.send, self.now = send, now
        self.unit_s: dict[str, float] = {}

    def work(self, kind: str, units: float = 1.0) -> _Work:
        """Return a context for one unit of work. units: the quantity to which its time is proportional, such as tokens."""
        return _Work(self, kind, max(units, 1.0))


class _Work:
    __slots__ = ("_kind", "_pulse", "_start", "_units")

    def __init__(self, pulse: Pulse, kind: str, units: float) -> None:
        self._pulse, self._kind, self._units = pulse, kind, units

    def __enter__(self) -> None:
        pulse = self._pulse
        unit_s = pulse.unit_s.get(self._kind)
        if unit_s is None or unit_s * self._units > LONG_S:
            most_s = FIRST_S if unit_s is None else min(max(MARGIN * unit_s * self._units, LEAST_S), MOST_S)
            pulse.send({"say": "busy", "what": self._kind, "most_s": most_s})
        self._start = pulse.now()

    def __exit__(self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None) -> None:
        if exc is None:
            unit_s = self._pulse.unit_s
            took_s = (self._pulse.now() - self._start) / self._units
            unit_s[self._kind] = max(took_s, FADE * unit_s.get(self._kind, 0.0))


@dataclass(frozen=True)
class Patience:
    """Seconds of silence.

    unresponsive_s: until a worker is not ready. restart_s: until an inactive one is ended. most_s: until any silent one
    is ended. loading_s: the same while loading: a worker reports after every block, but starting Python, planning and
    reading one block may be slow.
    """

    unresponsive_s: float = 4.0
    restart_s: float = 25.0
    most_s: float = 300.0
    loading_s: float = 900.0

    @property
    def look_s(self) -> float:
        """Seconds between two checks."""
        return self.unresponsive_s / 8


class Silence:
    """The silence of one worker. patience: its limits. work: the worker's activity since its start, None if it is
    stopped.
    """

    def __init__(self, patience: Patience, work: Callable[[], Activity | None]) -> None:
        self.patience, self._work = patience, work
        self.silent_s = 0.0
        self._bound_s = 0.0  # announced work may take until then
        self._before: Activity | None = None
        self._due_s = self._window_s = 0.0

    def heard(self) -> None:
        """Record a beat, or any other message except `announced` ones."""
        self.silent_s = self._bound_s = 0.0

    def announced(self, most_s: float) -> None:
        """Record work that may take this long. An outer unit of work may have announced more."""
        self._bound_s = max(self._bound_s - self.silent_s, most_s)
        self.silent_s = 0.0

    def looked(self, seconds: float) -> None:
        """Record a check without a new message, this many seconds after the last one."""
        self.silent_s += min(seconds, 2 * self.patience.look_s)

    @property
    def is_unresponsive(self) -> bool:
        """Whether the worker should have sent a message."""
        return self.silent_s > max(self.patience.unresponsive_s, self._bound_s)

    def is_over(self, *, is_loading: bool) -> bool:
        """Whether to end the worker."""
        if is_loading:
            return self.silent_s > max(self.patience.loading_s, self._bound_s)
        if not self.is_unresponsive:
            self._before, self._due_s = None, 0.0
            return False
        if not self._due_s:
            self._begin(max(self.patience.restart_s, self._bound_s))
        if self.silent_s > max(self.patience.most_s, self._bound_s):
            return True
        if self.silent_s <= self._due_s:
            return False
        before, window_s = self._before, self._window_s
        self._begin(self.silent_s + self.patience.restart_s - self.patience.unresponsive_s)
        works = before is not None and self._before is not None and self._before.is_more(before, window_s)
        return not works

    def _begin(self, due_s: float) -> None:
        self._before, self._due_s, self._window_s = self._work(), due_s, due_s - self.silent_s
