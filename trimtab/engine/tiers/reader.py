"""How are file tensors read to a device, in parallel, ahead of use and through a fixed amount of host memory?"""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Hashable, Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from math import prod
from pathlib import Path
from queue import SimpleQueue
from types import TracebackType
from typing import TypeVar

import torch
from torch import Tensor

from trimtab.checkpoint.headers import TensorEntry
from trimtab.engine.cuda import nvrtc
from trimtab.engine.formats.packed import Packed
from trimtab.errors import CheckpointError

Key = TypeVar("Key", bound=Hashable)
PIECE_BYTES = 8 * 2**20
RING_PIECES = 16
AHEAD_BYTES = 64 * 2**20
SMALL_BYTES = 64 * 2**10  # below this a read costs less than handing it to a thread


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
        stat = os.fstat(self._file.fileno())
        return stat.st_size, stat.st_mtime_ns

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
                    hint="The file was truncated: copy or download it again",
                )  # fmt: skip
            done += count

    def close(self) -> None:
        self._file.close()


def bytes_of(tensor: Tensor) -> memoryview:
    """Return the writable bytes of a contiguous CPU tensor, without a copy."""
    return tensor.reshape(-1).view(torch.uint8).numpy().data


class HostMemory:
    """Host bytes (`tensor`, uint8 [byte_count]), page-locked on request, freed by `close`.

    Large buffers are ordinary memory that is registered with the driver. torch's own pinned allocator rounds every size up to a
    power of two and keeps freed memory, up to twice the bytes that a plan counts.
    """

    REGISTER_FROM_BYTES = 2**20

    def __init__(self, byte_count: int, *, pinned: bool) -> None:
        self._registered = 0
        self._used: torch.cuda.Event | None = None
        if pinned and byte_count >= self.REGISTER_FROM_BYTES:
            self.tensor = torch.empty(byte_count, dtype=torch.uint8)
            if _register(self.tensor):
                self._registered = self.tensor.data_ptr()
                return
        self.tensor = torch.empty(byte_count, dtype=torch.uint8, pin_memory=pinned)

    def is_used(self, device: torch.device) -> None:
        """Record that a copy of these bytes was queued on a device: `close` waits for it, as torch does for its own memory."""
        if self._registered and device.type == "cuda":
            self._used = torch.cuda.current_stream(device).record_event()

    def close(self) -> None:
        """Unlock and drop the memory; views of it that are still around keep the bytes, unlocked."""
        registered, self._registered = self._registered, 0
        used, self._used = self._used, None
        if registered:
            if used is not None:
                with suppress(RuntimeError):  # the next CUDA call reports failed work
                    used.synchronize()
            torch.cuda.cudart().cudaHostUnregister(registered)
        self.tensor = torch.empty(0, dtype=torch.uint8)

    def __del__(self) -> None:
        if getattr(self, "_registered", 0):
            self.close()


def _register(tensor: Tensor) -> bool:
    """Page-lock the tensor's memory; False if the driver will not."""
    if int(torch.cuda.cudart().cudaHostRegister(tensor.data_ptr(), tensor.nbytes, 0)) == 0:
        return True
    with suppress(RuntimeError):  # the next kernel launch would report the refusal again
        torch.zeros(1, device="cuda")
    return False


class _SeenMemory:
    """A tensor's memory, page-locked while this object lives, described so that torch makes a device tensor of it."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor
        self.__cuda_array_interface__ = {
            "shape": (tensor.nbytes,), "typestr": "|u1", "data": (tensor.data_ptr(), False), "strides": None, "version": 2,
        }  # fmt: skip

    def __del__(self) -> None:
        with suppress(Exception):  # at the end of the process the driver may be gone
            torch.cuda.cudart().cudaHostUnregister(self.tensor.data_ptr())


def seen_by(tensor: Tensor, device: torch.device) -> Tensor | None:
    """Return host memory as a tensor of a device, which kernels read over the link.

    None where this is impossible: no GPU, or a driver that uses other addresses than the host's. The memory is page-locked
    while the returned tensor exists.
    """
    if device.type != "cuda" or not tensor.is_contiguous() or not nvrtc.reads_registered_memory(device):
        return None
    with torch.cuda.device(device):
        if not _register(tensor):
            return None
        memory = _SeenMemory(tensor)  # unlocks it again, also after an error
        try:
            mapped = torch.as_tensor(memory, device=device)
        except (RuntimeError, TypeError, ValueError):  # a torch that makes no tensor of a host's address
            return None
    # A copy would be as right and take the device memory that a gathered table saves.
    return mapped.view(tensor.dtype).view(tensor.shape) if mapped.data_ptr() == tensor.data_ptr() else None


@dataclass(frozen=True)
class Wanted:
    """One tensor that will be requested. is_passing: it is used up before the next one is taken (packed, or copied on)."""

    entry: TensorEntry
    device: torch.device
    is_passing: bool = False


@dataclass
class _Job:
    entry: TensorEntry
    target: Tensor
    pieces: list[Future[torch.cuda.Event | None]]
    buffer: Tensor | None = None


class Reader:
    """Gives file tensors in an agreed order, reading ahead.

    order: the tensors of the calls of `take`, in that order, each once. Passing tensors on a GPU use two buffers of the largest
    one's size, so that they do not fragment memory allocated for tensors that stay. Memory beyond the tensors: RING_PIECES x
    PIECE_BYTES pinned on the host, the two buffers on the device, up to AHEAD_BYTES of tensors early. Worker threads read pieces
    with positioned reads (the GIL is released) into a ring of pinned buffers. No file is memory-mapped: a mapped file that is cut
    short kills the process, a positioned read returns too few bytes and becomes a CheckpointError.
    """

    def __init__(self, order: Iterable[Wanted]) -> None:
        self._waiting = deque(order)
        self._jobs: deque[_Job | None] = deque()  # None: small, read when it is taken
        self._ahead_bytes = 0
        self._files: dict[Path, PositionedFile] = {}
        self._next_small: deque[torch.device] = deque()
        gpu = next((wanted.device for wanted in self._waiting if wanted.device.type == "cuda"), None)
        self._pool = ThreadPoolExecutor(min(16, os.cpu_count() or 1), thread_name_prefix="trimtab-read")
        self._ring: SimpleQueue[tuple[Tensor, torch.cuda.Event | None]] = SimpleQueue()
        self._stream = torch.cuda.Stream(gpu) if gpu is not None else None
        self._pieces = [HostMemory(PIECE_BYTES, pinned=True) for _ in range(RING_PIECES if gpu is not None else 0)]
        for piece in self._pieces:
            self._ring.put((piece.tensor, None))
        passing = [w.entry.nbytes for w in self._waiting if w.is_passing and w.device.type == "cuda"]
        size = max((nbytes for nbytes in passing if nbytes > SMALL_BYTES), default=0)
        # Two buffers on the device for passing tensors: the free ones, each with when its last tensor was used up.
        self._free_buffers: deque[tuple[Tensor, torch.cuda.Event | None]] = deque(
            (torch.empty(size, dtype=torch.uint8, device=gpu), None) for _ in range(2 if size else 0)
        )
        self._taken: Tensor | None = None
        self.read_bytes = 0

    def __enter__(self) -> Reader:
        return self

    def __exit__(self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None) -> None:
        self._pool.shutdown(wait=True, cancel_futures=True)
        if self._stream is not None:
            self._stream.synchronize()
        self._jobs.clear()
        self._free_buffers.clear()
        self._taken = None
        for piece in self._pieces:
            piece.close()
        for file in self._files.values():
            file.close()

    def take(self, entry: TensorEntry) -> Tensor:
        """Return the next tensor of the order; it must be this entry's.

        A passing tensor is valid until the next call. Errors: CheckpointError if the file is short.
        """
        self._give_back_buffer()
        self._fill()
        job = self._jobs.popleft()
        self.read_bytes += entry.nbytes
        if job is None:
            device = self._next_small.popleft()
            return self._read_now(entry, device)
        assert job.entry == entry, (job.entry.tensor_name, entry.tensor_name)
        self._ahead_bytes -= entry.nbytes
        for piece in job.pieces:
            event = piece.result()
            if event is not None:
                torch.cuda.current_stream(job.target.device).wait_event(event)
        self._taken = job.buffer
        self._fill()
        return job.target

    def _give_back_buffer(self) -> None:
        if self._taken is not None:
            self._free_buffers.append((self._taken, torch.cuda.current_stream(self._taken.device).record_event()))
            self._taken = None

    def _fill(self) -> None:
        while self._waiting:
            wanted = self._waiting[0]
            nbytes = wanted.entry.nbytes
            if nbytes <= SMALL_BYTES:
                self._next_small.append(self._waiting.popleft().device)
                self._jobs.append(None)
                continue
            needs_buffer = wanted.is_passing and wanted.device.type == "cuda"
            if needs_buffer and not self._free_buffers:
                return
            if not needs_buffer and self._ahead_bytes and self._ahead_bytes + nbytes > AHEAD_BYTES:
                return
            self._waiting.popleft()
            self._ahead_bytes += nbytes
            self._jobs.append(self._start(wanted, *(self._free_buffers.popleft() if needs_buffer else (None, None))))

    def _file(self, entry: TensorEntry) -> PositionedFile:
        file = self._files.get(entry.file)
        if file is None:
            file = self._files[entry.file] = PositionedFile(entry.file)
        return file

    def _read_now(self, entry: TensorEntry, device: torch.device) -> Tensor:
        dtype = getattr(torch, entry.dtype)
        if not entry.nbytes:
            return torch.empty(entry.shape, dtype=dtype, device=device)
        raw = bytearray(entry.nbytes)
        self._file(entry).read_into(memoryview(raw), entry.start)
        return torch.frombuffer(raw, dtype=dtype).reshape(entry.shape).to(device)

    def _start(self, wanted: Wanted, buffer: Tensor | None, ready: torch.cuda.Event | None) -> _Job:
        entry, device = wanted.entry, wanted.device
        file = self._file(entry)
        dtype = getattr(torch, entry.dtype)
        if buffer is not None:
            flat = buffer[: entry.nbytes]
            target = flat.view(dtype).view(entry.shape)
        else:
            target = torch.empty(entry.shape, dtype=dtype, device=device)
            flat = target.reshape(-1).view(torch.uint8)
        if device.type == "cuda" and ready is None:
            # The allocator may hand out memory that work on the main stream still uses: the side stream waits for it.
            ready = torch.cuda.current_stream(device).record_event()
        pieces = [
            self._pool.submit(self._read_piece, file, flat[at : at + PIECE_BYTES], entry.start + at, ready)
            for at in range(0, entry.nbytes, PIECE_BYTES)
        ]
        return _Job(entry, target, pieces, buffer)

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


def read_small(entries: Mapping[Key, TensorEntry]) -> dict[Key, Tensor]:
    """Return a few tensors on the CPU, in the keys of the mapping."""
    tensors: dict[Key, Tensor] = {}
    with Reader([Wanted(entry, torch.device("cpu")) for entry in entries.values()]) as reader:
        for key, entry in entries.items():
            tensors[key] = reader.take(entry)
    return tensors


# One warp reads 128 bytes at a time and bitsandbytes loads 16-byte vectors; 256 keeps every part aligned for both.
ALIGN_BYTES = 256


def aligned(byte_count: int) -> int:
    """Return the size rounded up to the alignment of a part inside a block buffer."""
    return -(-byte_count // ALIGN_BYTES) * ALIGN_BYTES


@dataclass(frozen=True)
class Part:
    """The place of one tensor inside its block's buffer."""

    offset: int
    nbytes: int
    shape: tuple[int, ...]
    dtype: torch.dtype

    def view(self, buffer: Tensor) -> Tensor:
        return buffer[self.offset : self.offset + self.nbytes].view(self.dtype).view(self.shape)


class Arena:
    """One allocation for all packed weights that stay on the device, filled from its beginning.

    torch gives a tensor of 10 MiB and more a separate segment in steps of 2 MiB and leaves the rest unused: with a
    tensor a weight that is 3 % of a 4-bit model, and holes that a small card cannot spare.
    """

    def __init__(self, nbytes: int, device: torch.device) -> None:
        self.nbytes, self.device = nbytes, device
        self._buffer: Tensor | None = None
        self._used = 0

    def hold(self, packed: Packed) -> Packed:
        """Return the weight with its parts in the arena, itself if the arena is full."""
        if self._buffer is None:  # allocated at first use: weights that leave the device are packed first
            self._buffer = torch.empty(self.nbytes, dtype=torch.uint8, device=self.device)
        needed = sum(aligned(part.numel() * part.element_size()) for part in packed.parts.values())
        if self._used + needed > self.nbytes:
            return packed
        parts = {}
        for name, part in packed.parts.items():
            parts[name] = self._next(tuple(part.shape), part.dtype)
            parts[name].copy_(part)
        return packed.with_parts(parts, packed.codes)

    def room(self, forms: Mapping[str, tuple[tuple[int, ...], torch.dtype]]) -> dict[str, Tensor]:
        """Return tensors of these shapes and types to be filled, in the arena, which was made with room for them."""
        if self._buffer is None:
            self._buffer = torch.empty(self.nbytes, dtype=torch.uint8, device=self.device)
        return {name: self._next(shape, dtype) for name, (shape, dtype) in forms.items()}

    def _next(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        assert self._buffer is not None
        place = Part(self._used, prod(shape) * dtype.itemsize, shape, dtype)
        self._used += aligned(place.nbytes)
        return place.view(self._buffer)
