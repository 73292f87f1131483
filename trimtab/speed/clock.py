"""What a run tells of one answer: its tokens, when each of them came, and nothing before the device is done. Needs torch alone."""

from __future__ import annotations

from typing import Any

import torch


def timed(prompt_id: str, token_ids: list[int], started: float, stamps: list[float]) -> dict[str, Any]:
    """Return one answer as it is told. stamps: when each token was there, on the clock of `started`, in seconds."""
    gaps = [later - earlier for earlier, later in zip(stamps, stamps[1:], strict=False)]
    return {
        "id": prompt_id, "token_ids": token_ids, "first_ms": round((stamps[0] - started) * 1000, 4),
        "gaps_ms": [round(gap * 1000, 4) for gap in gaps],
    }  # fmt: skip


def wait(device: torch.device) -> None:
    """Wait until a GPU has done all that it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
