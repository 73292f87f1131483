"""On which stream are CUDA graphs captured: one per device, for the life of the process?"""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from functools import cache

import torch


class CaptureStreams:
    """The capture streams of a process, which its models share, and the lock of the thread that captures. cuBLAS keeps a workspace
    for every stream that it was called on (32 MiB on compute capability 9.0): torch's 32 streams would take 1 GiB that no plan
    counts."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._streams: dict[torch.device, torch.cuda.Stream] = {}

    @contextmanager
    def side(self, device: torch.device) -> Iterator[torch.cuda.Stream]:
        """Give a device's stream, as `side_stream`."""
        with self._lock:
            stream = self._streams.get(device)
            if stream is None:
                stream = self._streams[device] = torch.cuda.Stream(device)
            stream.wait_stream(torch.cuda.current_stream(device))
            collects = gc.isenabled()
            gc.disable()
            try:
                yield stream
            finally:
                if collects:
                    gc.enable()

    def wait_for_all(self, device: torch.device) -> None:
        """Wait for a GPU, as `wait_for_all`."""
        with self._lock, suppress(RuntimeError):
            torch.cuda.synchronize(device)


@cache
def of_this_process() -> CaptureStreams:
    """Return the process's streams: cuBLAS' workspaces belong to the process, not to a model."""
    return CaptureStreams()


def side_stream(device: torch.device) -> AbstractContextManager[torch.cuda.Stream]:
    """Give the stream, which waits for work queued on the current one; one thread at a time has it.

    Python's cyclic collector is off until the block ends: a graph, an event or page-locked memory that it frees in the middle
    of a capture is a call that CUDA forbids there, and the capture would be lost (error 901 at the next launch).
    """
    return of_this_process().side(device)


def wait_for_all(device: torch.device) -> None:
    """Wait for all work queued on a GPU, on every stream: replays of graphs copy from host memory on none of ours.

    While another thread captures, this waits for it: synchronizing the device would end its capture. The next CUDA call of the
    caller reports errors of failed work.
    """
    if device.type == "cuda":
        of_this_process().wait_for_all(device)
