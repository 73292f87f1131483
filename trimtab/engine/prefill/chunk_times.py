"""Device times of prompt chunks, known after they have run, without waiting.

The caller omits three kinds of chunks, because their times do not predict the next one of the same size: chunks whose graph had
to be captured, chunks that ran kernel by kernel where others are captured, and chunks with images or audio, which include their
towers.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator
from typing import Any

import torch

_MOST_WAITING = 64


class ChunkTimes:
    """Times between `begin` and `end`, on the device's own clock where it has one."""

    def __init__(self, device: torch.device) -> None:
        self._on_gpu = device.type == "cuda"
        self._begun: Any = None
        self._waiting: deque[tuple[int, Any, Any]] = deque(maxlen=_MOST_WAITING)
        self._known: deque[tuple[int, float]] = deque(maxlen=_MOST_WAITING)

    def _mark(self) -> Any:
        if not self._on_gpu:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def begin(self) -> None:
        """A chunk begins now, behind all that was queued before."""
        self._begun = self._mark()

    def end(self, size: int) -> None:
        """It ends here; size: in tokens, padding included."""
        end = self._mark()
        if self._on_gpu:
            self._waiting.append((size, self._begun, end))
        else:
            self._known.append((size, end - self._begun))

    def take(self) -> Iterator[tuple[int, float]]:
        """Yield the size and the seconds of every chunk that has ended since."""
        while self._known:
            yield self._known.popleft()
        while self._waiting and self._waiting[0][2].query():
            size, begin, end = self._waiting.popleft()
            yield size, begin.elapsed_time(end) / 1000
