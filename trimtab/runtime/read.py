"""How file tensors get to a device: in parallel, ahead of use, through a fixed amount of host memory.

Worker threads read pieces of a file with positioned reads (the GIL is released while they wait) into a small ring of
pinned buffers and copy them on from there on a side stream; on the CPU they read straight into the tensor. No file is
memory-mapped: a mapped file that is cut short kills the process, a positioned read returns too few bytes and becomes a
CheckpointError.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue
from types import TracebackType

import torch
from torch import Tensor

from trimtab.checkpoint.headers import TensorEntry
from trimtab.errors import CheckpointError

PIECE_BYTES = 16 * 2**20
RING_PIECES = 8
AHEAD_BYTES = 128 * 2**20


class PositionedFile:
    """A file opened once and read at offsets by any number of threads.

    stamp: the size and modification time in ns that the file must keep; `check` compares.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self._file = open(path, "rb", buffering=0)  # noqa: SIM115 - closed by close()
        except OSError as exc:
            raise CheckpointError(f"cannot be opened ({exc.strerror})", path=path) from exc
        self._lock = threading.Lock()
        self.stamp = self._stamp()

    def _stamp(self) -> tuple[int, int]:
        found = os.fstat(self._file.fileno())
        return found.st_size, found.st_mtime_ns

    def check(self) -> None:
        """Raise CheckpointError if the file changed since it was opened."""
        now = self._stamp()
        if now != self.stamp:
            raise CheckpointError(
                f"changed while in use (size {self.stamp[0]} -> {now[0]} B, modified {self.stamp[1]} -> {now[1]} ns)",
                path=self.path, hint="Load the model again; weights on disk must not be written while they are served",
            )  # fmt: skip

    def read_into(self, target: memoryview, start: int) -> None:
        """Fill target with the bytes from start. Errors: CheckpointError if the file ends first."""
        done = 0
        while done < len(target):
            if hasattr(os, "preadv"):
                count = os.preadv(self._file.fileno(), [target[done:]], start + done)
            else:  # Windows and macOS before 11: one reader at a time
                with self._lock:
                    self._file.seek(start + done)
                    count = self._file.readinto(target[done:]) or 0
            if count <= 0:
                raise CheckpointError(
                    f"ends at byte {start + done}, {len(target) - done} bytes are missing", path=self.path,
                    hint="The file was cut short; copy or download it again",
                )  # fmt: skip
            done += count

    def close(self) -> None:
        self._file.close()


def bytes_of(tensor: Tensor) -> memoryview:
    """Return the writable bytes of a contiguous CPU tensor, without a copy."""
    return memoryview(tensor.reshape(-1).view(torch.uint8).numpy())


class HostMemory:
    """Host bytes (`tensor`, uint8 [byte_count]), page-locked if asked, given back by `close`.

    Large buffers are ordinary memory that is registered with the driver: torch's own pinned allocator rounds every size
    up to a power of two and keeps what is freed, up to twice the memory that a plan counts.
    """

    REGISTER_FROM_BYTES = 2**20

    def __init__(self, byte_count: int, *, pinned: bool) -> None:
        self._registered = 0
        if pinned and byte_count >= self.REGISTER_FROM_BYTES:
            self.tensor = torch.empty(byte_count, dtype=torch.uint8)
            if int(torch.cuda.cudart().cudaHostRegister(self.tensor.data_ptr(), byte_count, 0)) == 0:
                self._registered = self.tensor.data_ptr()
                return
        self.tensor = torch.empty(byte_count, dtype=torch.uint8, pin_memory=pinned)

    def close(self) -> None:
        """Unlock and drop the memory; views of it that are still around keep the bytes, unlocked."""
        registered, self._registered = self._registered, 0
        if registered:
            torch.cuda.cudart().cudaHostUnregister(registered)
        self.tensor = torch.empty(0, dtype=torch.uint8)

    def __del__(self) -> None:
        if getattr(self, "_registered", 0):
            self.close()


@dataclass
class _Job:
    entry: TensorEntry
    target: Tensor
    pieces: list[Future[torch.cuda.Event | None]]


class Reader:
    """Gives the tensors of a list of files in an agreed order, reading ahead.

    order: (entry, device) in the order in which `take` will ask; an entry that occurs twice is read twice, so ask once.
    Host memory: RING_PIECES x PIECE_BYTES pinned; device memory ahead of use: AHEAD_BYTES or one tensor.
    """

    def __init__(self, order: Iterable[tuple[TensorEntry, torch.device]], *, workers: int | None = None) -> None:
        self._waiting = deque(order)
        self._jobs: deque[_Job] = deque()
        self._ahead_bytes = 0
        self._files: dict[Path, PositionedFile] = {}
        self._cuda = any(device.type == "cuda" for _, device in self._waiting)
        self._pool = ThreadPoolExecutor(workers or min(8, os.cpu_count() or 1), thread_name_prefix="trimtab-read")
        self._ring: SimpleQueue[tuple[Tensor, torch.cuda.Event | None]] = SimpleQueue()
        self._stream = torch.cuda.Stream() if self._cuda else None
        self._pieces = [HostMemory(PIECE_BYTES, pinned=True) for _ in range(RING_PIECES if self._cuda else 0)]
        for piece in self._pieces:
            self._ring.put((piece.tensor, None))
        self.read_bytes = 0

    def __enter__(self) -> Reader:
        return self

    def __exit__(self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None) -> None:
        self._pool.shutdown(wait=True, cancel_futures=True)
        if self._stream is not None:
            self._stream.synchronize()
        self._jobs.clear()
        for piece in self._pieces:
            piece.close()
        for file in self._files.values():
            file.close()

    def take(self, entry: TensorEntry) -> Tensor:
        """Return the next tensor of the order; it must be this entry's. Errors: CheckpointError if the file is short."""
        self._fill()
        job = self._jobs.popleft()
        assert job.entry is entry or job.entry == entry, (job.entry.tensor_name, entry.tensor_name)
        self._ahead_bytes -= entry.nbytes
        for piece in job.pieces:
            event = piece.result()
            if event is not None:
                torch.cuda.current_stream(job.target.device).wait_event(event)
        self.read_bytes += entry.nbytes
        self._fill()
        return job.target

    def _fill(self) -> None:
        while self._waiting and (not self._jobs or self._ahead_bytes + self._waiting[0][0].nbytes <= AHEAD_BYTES):
            entry, device = self._waiting.popleft()
            self._ahead_bytes += entry.nbytes
            self._jobs.append(self._start(entry, device))

    def _start(self, entry: TensorEntry, device: torch.device) -> _Job:
        file = self._files.get(entry.file)
        if file is None:
            file = self._files[entry.file] = PositionedFile(entry.file)
        target = torch.empty(entry.shape, dtype=getattr(torch, entry.dtype), device=device)
        flat = target.reshape(-1).view(torch.uint8) if target.numel() else target
        # The allocator may hand out memory that work on the main stream still uses: the side stream waits for it once.
        ready = torch.cuda.current_stream(device).record_event() if device.type == "cuda" else None
        pieces = [
            self._pool.submit(self._read_piece, file, flat[at : at + PIECE_BYTES], entry.start + at, ready)
            for at in range(0, entry.nbytes, PIECE_BYTES)
        ]
        return _Job(entry, target, pieces)

    def _read_piece(
        self, file: PositionedFile, target: Tensor, start: int, ready: torch.cuda.Event | None
    ) -> torch.cuda.Event | None:
        if ready is None:
            file.read_into(bytes_of(target), start)
            return None
        assert self._stream is not None
        buffer, used = self._ring.get()
        event: torch.cuda.Event | None = None
        try:
            if used is not None:
                used.synchronize()
            part = buffer[: target.numel()]
            file.read_into(bytes_of(part), start)
            with torch.cuda.stream(self._stream):
                self._stream.wait_event(ready)
                target.copy_(part, non_blocking=True)
                event = self._stream.record_event()
        finally:
            self._ring.put((buffer, event))
        return event


def read_small(entries: Mapping[str, TensorEntry]) -> dict[str, Tensor]:
    """Return a few tensors on the CPU, in the keys of the mapping: adapters and other small files."""
    found: dict[str, Tensor] = {}
    with Reader([(entry, torch.device("cpu")) for entry in entries.values()]) as reader:
        for key, entry in entries.items():
            found[key] = reader.take(entry)
    return found
