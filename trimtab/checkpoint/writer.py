"""How is a safetensors file laid out and written at offsets?"""

from __future__ import annotations

import errno
import json
import math
import os
import threading
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

from trimtab.checkpoint.headers import DTYPES, TensorEntry

_SPELLED = {spelled: (code, width) for code, (spelled, width) in DTYPES.items()}
ALIGNMENT = 8
PAGE = 4096


@dataclass(frozen=True)
class NewTensor:
    """One tensor that a file will hold. dtype: torch's spelling."""

    tensor_name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * width_of(self.dtype)


def width_of(dtype: str) -> int:
    """Return the bytes of one value of a dtype in torch's spelling."""
    return _SPELLED[dtype][1]


@dataclass(frozen=True)
class Layout:
    """The layout of a file before it is written: its header bytes, and the offset of every tensor in data order."""

    head: bytes
    places: Mapping[str, TensorEntry]
    file_bytes: int


def lay_out(path: Path, tensors: Sequence[NewTensor], metadata: Mapping[str, str], *, ordered: bool = True) -> Layout:
    """Return where each tensor goes in a file at `path`.

    ordered: keep the given order of data. Otherwise wide types come first, then names, as in the safetensors library:
    readers that use the file's bytes in place need every value at a multiple of its size.
    """
    if not ordered:
        tensors = sorted(tensors, key=lambda tensor: (-width_of(tensor.dtype), tensor.tensor_name))
    content: dict[str, object] = {"__metadata__": dict(metadata)} if metadata else {}
    at = 0
    for tensor in tensors:
        content[tensor.tensor_name] = {
            "dtype": _SPELLED[tensor.dtype][0], "shape": list(tensor.shape), "data_offsets": [at, at + tensor.nbytes]
        }  # fmt: skip
        at += tensor.nbytes
    raw = json.dumps(content, separators=(",", ":"), ensure_ascii=False).encode("utf-8")
    raw += b" " * (-len(raw) % ALIGNMENT)
    head = len(raw).to_bytes(8, "little") + raw
    places: dict[str, TensorEntry] = {}
    start = len(head)
    for tensor in tensors:
        places[tensor.tensor_name] = TensorEntry(tensor.tensor_name, tensor.dtype, tensor.shape, path, start, tensor.nbytes)
        start += tensor.nbytes
    return Layout(head, places, start)


def same_layout(path: Path, head: bytes, entries: Iterable[TensorEntry]) -> Layout:
    """Return the layout of a file with exactly the header and tensors of another one."""
    places = {
        entry.tensor_name: TensorEntry(entry.tensor_name, entry.dtype, entry.shape, path, entry.start, entry.nbytes)
        for entry in sorted(entries, key=lambda entry: entry.start)
    }
    end = max((entry.start + entry.nbytes for entry in places.values()), default=len(head))
    return Layout(head, places, end)


class PositionedWriter:
    """A new file that any number of threads write at offsets. It is on the disk when `finish` returns.

    direct: open it a second time for `write_aligned`, without the page cache if the system supports that.
    Errors: OSError, unchanged. A file that is left without `finish` is removed.
    """

    def __init__(self, path: Path, *, direct: bool = False) -> None:
        self.path = path
        self._file = open(path, "wb", buffering=0)  # noqa: SIM115 - closed by finish or __exit__
        self._direct: int | None = None
        if direct and hasattr(os, "O_DIRECT") and hasattr(os, "pwrite"):
            with suppress(OSError):  # a file system in memory refuses it, for example
                self._direct = os.open(path, os.O_WRONLY | os.O_DIRECT)
        self._lock = threading.Lock()
        self._is_finished = False

    def write(self, data: memoryview | bytes, start: int) -> None:
        """Write the bytes at an offset."""
        view = memoryview(data)
        done = 0
        while done < len(view):
            if hasattr(os, "pwrite"):
                count = os.pwrite(self._file.fileno(), view[done:], start + done)
            else:  # Windows: one writer at a time
                with self._lock:
                    self._file.seek(start + done)
                    count = self._file.write(view[done:]) or 0
            if count <= 0:
                raise OSError(f"wrote {count} of {len(view) - done} bytes")
            done += count

    @property
    def is_direct(self) -> bool:
        return self._direct is not None

    def write_aligned(self, data: memoryview, start: int) -> None:
        """Write bytes whose address, number and offset are multiples of PAGE; bypasses the page cache if it is direct."""
        done = 0
        while self._direct is not None and done < len(data) and done % PAGE == 0:
            try:
                done += os.pwrite(self._direct, data[done:], start + done)
            except OSError as exc:
                if exc.errno != errno.EINVAL:
                    raise
                self._close_direct()  # this file system needs another alignment, or accepts the flag without support
        if done < len(data):
            self.write(data[done:], start + done)

    def _close_direct(self) -> None:
        handle, self._direct = self._direct, None
        if handle is not None:
            os.close(handle)

    def flush(self) -> None:
        """Flush everything written so far to the disk; other threads may continue to write."""
        getattr(os, "fdatasync", os.fsync)(self._file.fileno())

    def finish(self) -> None:
        """Flush every byte to the disk and close the file."""
        self._close_direct()
        os.fsync(self._file.fileno())
        self._file.close()
        self._is_finished = True

    def __enter__(self) -> PositionedWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None) -> None:
        self._close_direct()
        self._file.close()
        if not self._is_finished:
            self.path.unlink(missing_ok=True)


def write_synced(path: Path, content: bytes) -> None:
    """Write a small file and flush it to the disk."""
    with PositionedWriter(path) as writer:
        writer.write(content, 0)
        writer.finish()


def sync_folder(folder: Path) -> None:
    """Flush a folder's directory entries to the disk, if the system has a call for that."""
    if os.name != "posix":
        return
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
