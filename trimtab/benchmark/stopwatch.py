"""How long did each token of one answer take?"""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Any

import torch


class Clock:
    """Records the time of each token of an answer. Created when the prompt is submitted."""

    def __init__(self) -> None:
        self.token_ids: list[int] = []
        self._stamps: list[float] = []
        self._cpu: list[float] = []
        self._started = time.perf_counter()

    def tick(self, token_ids: Iterable[int]) -> None:
        """Record tokens that are ready now."""
        for token in token_ids:
            self.token_ids.append(int(token))
            self._stamps.append(time.perf_counter())
            self._cpu.append(time.process_time())

    def told(self, prompt_id: str) -> dict[str, Any]:
        """Return the timing of the answer: milliseconds to the first token, between the others, and of all threads' CPU time
        from the first token to the last."""
        gaps = [later - earlier for earlier, later in zip(self._stamps, self._stamps[1:], strict=False)]
        return {
            "id": prompt_id, "token_ids": self.token_ids, "first_ms": _ms(self._stamps[0] - self._started),
            "gaps_ms": [_ms(gap) for gap in gaps], "cpu_ms": _ms(self._cpu[-1] - self._cpu[0]),
        }  # fmt: skip


def _ms(seconds: float) -> float:
    return round(seconds * 1000, 4)


def wait(device: torch.device) -> None:
    """Wait until a GPU has finished all queued work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
