"""The remaining time of a request, including the wait for its model."""

from __future__ import annotations

import asyncio
import time
from typing import Any

from trimtab.serve.scheduling.scheduler import DeadlineError


class Clock:
    """The time that one request has, waiting included. deadline_s: None is all the time there is."""

    def __init__(self, deadline_s: float | None) -> None:
        self._deadline_s, self._began = deadline_s, time.monotonic()

    @property
    def left_s(self) -> float | None:
        if self._deadline_s is None:
            return None
        return max(0.001, self._deadline_s - (time.monotonic() - self._began))

    async def limit(self, work: Any, where: str, *, slack_s: float) -> Any:
        """Return the result of work. Errors: DeadlineError when the time is over."""
        if self._deadline_s is None:
            return await work
        left_s = self.left_s
        assert left_s is not None
        try:
            return await asyncio.wait_for(work, left_s + slack_s)
        except asyncio.TimeoutError as exc:
            raise DeadlineError(self._deadline_s, where) from exc
