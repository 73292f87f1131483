"""The CUDA graphs of one batch, least recently used first, and their common memory pool.

graphs = GraphCache()
with side_stream(device) as side:
    graph, outputs = graphs.record(side, run)
graphs[key] = Captured(graph, ...)
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable
from contextlib import suppress
from typing import Any, TypeVar

import torch

Captured = TypeVar("Captured")
Output = TypeVar("Output")


class GraphCache(OrderedDict[tuple[Hashable, ...], Captured]):
    """Captured graphs by what they were captured for."""

    def __init__(self) -> None:
        super().__init__()
        self._pool: Any = None

    def forget_pool(self) -> None:
        """Take another pool from now on: a failed capture leaves its own unusable."""
        self._pool = None

    def record(self, side: torch.cuda.Stream, run: Callable[[], Output]) -> tuple[torch.cuda.CUDAGraph, Output]:
        """Return a graph of what `run` queues on the capture stream, and what it returned. Everything queued before is done.

        Errors: what `run` raises and what CUDA refuses; the pool is then to be forgotten.
        """
        graph = torch.cuda.CUDAGraph()
        if self._pool is None or not self:  # a pool ends with the last graph that was captured into it
            self._pool = torch.cuda.graph_pool_handle()
        with torch.cuda.stream(side):
            # Other threads (a reader of the disk) may use the device at the same time.
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            try:
                output = run()
            except BaseException:
                with suppress(Exception):
                    graph.capture_end()
                raise
            graph.capture_end()
        return graph, output
