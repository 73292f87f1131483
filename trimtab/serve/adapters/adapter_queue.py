"""The order in which adapters are prepared between steps: first those that a client waits for, the server's own last.

    AdapterQueue   adapters whose files were read, with their remaining work

A client waits for an adapter that it loads, and a request for one that it names. Next come adapters whose files
changed, because the old ones still answer. The adapters of the server's start come last: no request has named them yet.
Adapters of the same urgency are prepared in the order of arrival. Imports no torch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from enum import IntEnum
from functools import partial
from typing import Any


class Urgency(IntEnum):
    """The urgency of an adapter. A smaller number is prepared first."""

    AWAITED = 0
    CHANGED = 1
    START = 2


@dataclass(eq=False)
class Unprepared:
    """An adapter whose files were read.

    pieces: the remaining work. finish: called with `work`, which makes the adapter available, or with a function that
    raises the error of a piece. names: of an adapter that requests may name already. replaces: the name whose adapter
    has changed files.
    """

    pieces: Iterator[None]
    finish: Callable[[Callable[[], Any]], None]
    work: Callable[[], Any]
    urgency: Urgency
    names: set[str] = field(default_factory=set)
    replaces: str | None = None


class AdapterQueue:
    """Adapters that are being prepared."""

    def __init__(self) -> None:
        self._waiting: list[Unprepared] = []

    def __bool__(self) -> bool:
        return bool(self._waiting)

    def add(self, one: Unprepared) -> None:
        if one.replaces is not None:
            self.forget_changed(one.replaces)
        self._waiting.append(one)

    def forget_changed(self, name: str) -> None:
        """Drop the changed files of an adapter: it was unloaded and its name may be reused, or there are newer files."""
        self._waiting = [one for one in self._waiting if one.replaces != name]

    def has(self, name: str) -> bool:
        """Whether requests that name this adapter should wait for it."""
        return any(name in one.names for one in self._waiting)

    def forget(self, name: str) -> None:
        """Drop the preparation for requests that name this adapter: it was unloaded, or has newer files."""
        for one in [one for one in self._waiting if name in one.names]:
            one.names.remove(name)
            if not one.names:
                self._waiting.remove(one)

    def step(self, is_needed: Callable[[str], bool], *, only_for_requests: bool = False) -> None:
        """Compute one piece of the most urgent adapter, or use the adapter if it is complete. is_needed: whether a request waits
        for the adapter of this name. only_for_requests: only of adapters that requests wait for.
        """
        requested = [one for one in self._waiting if any(map(is_needed, one.names))]
        able = requested if only_for_requests else self._waiting
        if not able:
            return
        one = min(able, key=lambda one: Urgency.AWAITED if one in requested else one.urgency)
        try:
            next(one.pieces)
        except StopIteration:
            self._waiting.remove(one)
            one.finish(one.work)
        except Exception as exc:
            self._waiting.remove(one)
            one.finish(partial(_throw, exc))


def _throw(exc: Exception) -> None:
    raise exc
