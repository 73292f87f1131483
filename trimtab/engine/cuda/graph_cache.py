"""The CUDA graphs of one batch, least recently used first, and their common memory pool.

graphs = GraphCache()
with side_stream(device) as side:
    graph, outputs = graphs.record(side, run)
graphs[key] = Captured(graph, ...)
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, TypeVar

import torch

Captured = TypeVar("Captured")
Output = TypeVar("Output")


class GraphCache(OrderedDict[tuple[Hashable, ...], Captured]):
    """Captured graphs by key. pool: returns the memory pool to capture into, None for the cache's own."""

    def __init__(self, pool: Callable[[], Any] = lambda: None) -> None:
        super().__init__()
        self._pool: Any = None
        self._given_pool = pool

    def forget_pool(self) -> None:
        """Take another pool from now on: a failed capture makes its pool unusable."""
        self._pool = None

    def record(self, side: torch.cuda.Stream, run: Callable[[], Output]) -> tuple[torch.cuda.CUDAGraph, Output]:
        """Return a graph of the work that `run` queues on the capture stream, and `run`'s result. Earlier work is done before.

        Errors: those of `run` and of CUDA; the caller then drops the pool.
        """
        graph, pool = torch.cuda.CUDAGraph(), self._given_pool()
        if pool is None:
            if self._pool is None or not self:  # a pool ends with the last graph that was captured into it
                self._pool = torch.cuda.graph_pool_handle()
            pool = self._pool
        with torch.cuda.stream(side), _ended_on_error(side, pool):
            # Other threads (a reader of the disk) may use the device at the same time.
            graph.capture_begin(pool=pool, capture_error_mode="thread_local")
            try:
                output = run()
            except BaseException:
                with suppress(Exception):  # it would only say that something failed before
                    graph.capture_end()
                raise
            graph.capture_end()
        return graph, output


@contextmanager
def _ended_on_error(side: torch.cuda.Stream, pool: object) -> Iterator[None]:
    """Tell torch's allocator that a capture that fails in the block has ended.

    Up to torch 2.12 `capture_end` raises before it does so (https://github.com/pytorch/pytorch/pull/180395): every later
    `torch.cuda.empty_cache` then ends in an internal assertion, and an allocation that finds no memory gives nothing back before it
    fails. The memory of the failed capture stays in its pool.
    """
    try:
        yield
    except BaseException:
        end = getattr(torch._C, "_cuda_endAllocateToPool", None)
        with suppress(Exception):  # torch knows already
            if end is not None:
                end(side.device.index, pool)
        raise
