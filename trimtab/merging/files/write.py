"""How is one weight file of a merge written in fixed memory?"""

from __future__ import annotations

import hashlib
import mmap
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch import Tensor

from trimtab.checkpoint.folder import Checkpoint
from trimtab.checkpoint.writer import PositionedWriter
from trimtab.engine.formats.coded_files import packed_parts
from trimtab.engine.tiers.reader import PositionedFile, bytes_of
from trimtab.formats.packed import split_packed
from trimtab.merging.changes.delta import Change, EntryRows, Rows, merged, row_count, row_pieces
from trimtab.merging.changes.dequantize import packed_rows
from trimtab.merging.changes.inverse import lay_back, without_casts
from trimtab.merging.changes.plan import Adapters, Edit
from trimtab.merging.files.layout import Out, Shard

COPY_BYTES = 4 * 2**20
HASH_BYTES = 4 * 2**20
# Bytes of one open file for its other threads, in addition to the current chunk.
BEHIND_BYTES = 16 * 2**20
FLUSH_BYTES = 256 * 2**20
ALIGNED_BYTES = 4 * 2**20


@dataclass
class Sources:
    """The inputs of a merge: the base's files and the adapters. Files are opened once, by any thread.

    whole: lock of the thread that computes whole tensors, so that only one whole tensor is in memory.
    """

    checkpoint: Checkpoint
    adapters: Adapters
    stack: ExitStack
    packed: Mapping[str, Any] = field(init=False)
    whole: threading.Lock = field(default_factory=threading.Lock)
    _files: dict[Path, PositionedFile] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.packed = split_packed(self.checkpoint)[1]
        for file in self.checkpoint.files:
            opened = self._files[file] = PositionedFile(file)
            self.stack.callback(opened.close)

    def file(self, path: Path) -> PositionedFile:
        return self._files[path]

    def rows(self, leaf: str) -> Rows:
        """Return the rows of a base tensor: as stored, or in float32 if it is packed."""
        if leaf in self.packed:
            return packed_rows(self.packed[leaf], lambda entry: self._files[entry.file])
        entry = self.checkpoint.tensors[leaf]
        return EntryRows(self._files[entry.file], entry)

    def room(self, out: Out) -> AbstractContextManager[Any]:
        """Return the memory in bytes while a tensor of the merged model is computed."""
        is_whole = any(edit.asks for edit in out.edits) and not all(edit.by_rows for edit in out.edits)
        return self.whole if is_whole else nullcontext()

    def shape(self, leaf: str) -> tuple[int, ...]:
        shape: tuple[int, ...] = (self.packed if leaf in self.packed else self.checkpoint.tensors)[leaf].shape
        return shape


class MergedRows:
    """Rows of one tensor of the merged model: float32 if it changes, else as stored."""

    def __init__(self, out: Out, sources: Sources) -> None:
        self.out, self.shape = out, out.shape
        self.base = sources.rows(out.leaf)
        self._changes: list[Change] = []
        self._whole: Tensor | None = None
        if not any(edit.asks for edit in out.edits):
            return
        if all(edit.by_rows for edit in out.edits):
            (edit,) = out.edits
            self._changes = [sources.adapters.change(ask) for ask in edit.asks]
            for change in self._changes:
                change.prepare(self.base, self.shape)
        else:
            self._whole = _laid_back(out, sources)

    def __call__(self, start: int, stop: int, stored: Tensor | None = None) -> Tensor:
        """Return rows start to stop. stored: the base's, if the caller has read them; they are not changed."""
        if self._whole is not None:
            return self._whole[start:stop]
        if not self._changes:
            return self.base(start, stop)
        base = self.base(start, stop).float() if stored is None else stored.to(torch.float32, copy=True)
        return merged(base, start, stop, self._changes)


def _laid_back(out: Out, sources: Sources) -> Tensor:
    """Return a whole file tensor, float32, with the changes of all parameters that use it."""

    def read(leaf: str) -> Tensor:
        return sources.rows(leaf)(0, row_count(sources.shape(leaf))).float()

    shapes = {name: entry.shape for name, entry in sources.checkpoint.tensors.items()}
    shapes |= {name: entry.shape for name, entry in sources.packed.items()}
    into = read(out.leaf)
    for edit in out.edits:
        parameter = without_casts(edit.expression, read).contiguous()
        lay_back(edit.expression, out.leaf, _changed(edit, parameter, sources), into, shapes)
    return into


def _changed(edit: Edit, parameter: Tensor, sources: Sources) -> Tensor:
    changes = [sources.adapters.change(ask) for ask in edit.asks]
    for change in changes:
        change.prepare(lambda start, stop: parameter[start:stop], parameter.shape)
    return merged(parameter, 0, row_count(parameter.shape), changes)


class _Behind:
    """Runs work in the background, each kind in order, with a limit on the waiting bytes."""

    QUEUES = ("old", "new", "write", "flush")

    def __init__(self) -> None:
        self._threads = {queue: ThreadPoolExecutor(1, thread_name_prefix=f"trimtab-merge-{queue}") for queue in _Behind.QUEUES}
        self._pending: deque[tuple[int, list[Future[Any]]]] = deque()
        self._pending_bytes = 0

    def start(self, queue: str, call: Callable[[], Any]) -> Future[Any]:
        """Start work on the thread of a queue, after its earlier work."""
        return self._threads[queue].submit(call)

    def piece(self, byte_count: int, **work: Callable[[], Any]) -> None:
        """Start the work of a chunk of byte_count bytes; `work` names its queues. Errors: exceptions of earlier chunks."""
        self._pending.append((byte_count, [self.start(queue, call) for queue, call in work.items()]))
        self._pending_bytes += byte_count
        while self._pending_bytes > BEHIND_BYTES:
            self._wait()

    def _wait(self) -> None:
        byte_count, futures = self._pending.popleft()
        for future in futures:
            future.result()
        self._pending_bytes -= byte_count

    def drain(self) -> None:
        while self._pending:
            self._wait()

    def __enter__(self) -> _Behind:
        return self

    def __exit__(self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None) -> None:
        for thread in self._threads.values():
            thread.shutdown(wait=False, cancel_futures=True)
        for thread in self._threads.values():
            thread.shutdown(wait=True)


class _Aligned:
    """Writes a file front to back in chunks that may bypass the page cache: `write` gathers them.

    Copying into the page cache costs more than the rest of a merge, most of all if a virtual machine has to allocate
    its memory first. Without it, cached pages of the base, the adapters and other programs are kept.
    """

    def __init__(self, writer: PositionedWriter) -> None:
        self._writer = writer
        self._memory = mmap.mmap(-1, ALIGNED_BYTES)  # starts at a page boundary
        self._buffer = torch.frombuffer(self._memory, dtype=torch.uint8)
        self._held = self._start = 0

    def write(self, data: memoryview, start: int) -> None:
        """Append the bytes; called on one thread. Errors: OSError."""
        assert start == self._start + self._held
        done = 0
        while done < len(data):
            count = min(len(data) - done, ALIGNED_BYTES - self._held)
            part = torch.frombuffer(data[done : done + count], dtype=torch.uint8)
            self._buffer[self._held : self._held + count].copy_(part)
            self._held, done = self._held + count, done + count
            if self._held == ALIGNED_BYTES:
                self._writer.write_aligned(memoryview(self._memory), self._start)
                self._start, self._held = self._start + self._held, 0

    def check(self) -> None:
        """Write the remaining bytes. Errors: OSError."""
        if self._held:
            self._writer.write(memoryview(self._memory)[: self._held], self._start)
            self._start, self._held = self._start + self._held, 0


class _Flushed:
    """Writes a file and flushes it in the background, so that little is left to flush at the end."""

    def __init__(self, writer: PositionedWriter, behind: _Behind) -> None:
        self._writer, self._behind = writer, behind
        self._bytes = 0
        self._last: Future[Any] | None = None

    def write(self, data: memoryview, start: int) -> None:
        """Write the bytes at an offset; called on one thread. Errors: OSError, also of an earlier flush."""
        self._writer.write(data, start)
        self._bytes += len(data)
        if self._bytes >= FLUSH_BYTES and (self._last is None or self._last.done()):
            self.check()
            self._bytes = 0
            self._last = self._behind.start("flush", self._writer.flush)

    def check(self) -> None:
        """Wait for the running flush, if any.

        Errors: OSError if it failed; the next one could pass although bytes were lost.
        """
        if self._last is not None:
            self._last.result()


@dataclass
class Written:
    """The result of one file: sha256 of the base's and of the new file, and the problem of each tensor."""

    base_sha256: str
    sha256: str
    problems: list[str]


def write_shard(shard: Shard, path: Path, sources: Sources, tick: Callable[[int], None]) -> Written:
    """Write one file and flush it to the disk. tick: called with the number of added bytes.

    Errors: OSError of the disk; CheckpointError if the base is shorter than its header says. Results that are not finite are
    returned as problems, so that all of them can be reported. A plain file is written front to back, with both hashes at the same
    time; any other one tensor by tensor at its offset, and hashed afterwards.
    """
    is_large = shard.is_plain and shard.layout.file_bytes >= ALIGNED_BYTES
    with PositionedWriter(path, direct=is_large) as writer, _Behind() as behind:
        flushed = _Aligned(writer) if writer.is_direct else _Flushed(writer, behind)
        flushed.write(memoryview(bytearray(shard.layout.head)), 0)
        tick(len(shard.layout.head))
        if shard.is_plain:
            base, new, problems = _plain(shard, flushed, sources, behind, tick)
        else:
            base_hash = behind.start("old", partial(hash_file, shard.file))
            problems = _by_tensor(shard, flushed, sources, behind, tick)
            behind.drain()
            new_hash = behind.start("new", partial(hash_file, path))
            base, new = base_hash.result, new_hash.result
        flushed.check()
        writer.finish()
        return Written(base(), new(), problems)


def _plain(
    shard: Shard, writer: _Aligned | _Flushed, sources: Sources, behind: _Behind, tick: Callable[[int], None]
) -> tuple[Callable[[], str], Callable[[], str], list[str]]:
    base_hash = hashlib.sha256(shard.layout.head)
    new_hash = hashlib.sha256(shard.layout.head)
    file = sources.file(shard.file)
    problems: list[str] = []
    position = len(shard.layout.head)
    is_changed = {out.tensor_name: bool(out.edits) for out in shard.outs}
    any_changed = any(is_changed.values())

    def copy(stop: int) -> None:
        while position < stop:
            size = min(COPY_BYTES, stop - position)
            buffer = bytes_of(torch.empty(size, dtype=torch.uint8))
            file.read_into(buffer, position)
            send(buffer, buffer)

    def send(old: memoryview, new: memoryview) -> None:
        nonlocal position
        work = {"old": partial(base_hash.update, old), "write": partial(writer.write, new, position)}
        if any_changed:  # otherwise the new file's hash is the base's
            work["new"] = partial(new_hash.update, new)
        behind.piece(len(new) if new is old else len(old) + len(new), **work)
        position += len(new)
        tick(len(new))

    for out in shard.outs:
        if not is_changed[out.tensor_name]:
            continue
        place = shard.layout.places[out.tensor_name]
        copy(place.start)
        with sources.room(out):
            rows, stored = MergedRows(out, sources), EntryRows(file, place)
            is_own = out.leaf == out.tensor_name and out.leaf not in sources.packed
            for start, stop in row_pieces(out.shape):
                old = stored(start, stop)
                new = rows(start, stop, old if is_own else None).to(old.dtype)
                _check_finite(out, new, old, problems)
                send(bytes_of(old), bytes_of(new.contiguous()))
            del rows
    copy(shard.layout.file_bytes)
    behind.drain()
    return base_hash.hexdigest, (new_hash if any_changed else base_hash).hexdigest, problems


def _by_tensor(
    shard: Shard, writer: _Aligned | _Flushed, sources: Sources, behind: _Behind, tick: Callable[[int], None]
) -> list[str]:
    problems: list[str] = []
    for out in shard.outs:
        with sources.room(out):
            rows = MergedRows(out, sources)
            if out.pack is not None:
                for name, at, content in packed_content(out, rows):
                    data = bytes_of(content)
                    start = shard.layout.places[name].start + at
                    behind.piece(len(data), write=partial(writer.write, data, start))
                    tick(len(data))
                continue
            place = shard.layout.places[out.tensor_name]
            dtype = getattr(torch, out.dtype)
            at = place.start
            for start, stop in row_pieces(out.shape):
                new = rows(start, stop).to(dtype)
                if out.edits or out.leaf in sources.packed:
                    _check_finite(out, new, partial(rows.base, start, stop), problems)
                data = bytes_of(new.contiguous())
                behind.piece(len(data), write=partial(writer.write, data, at))
                at += len(data)
                tick(len(data))
            del rows
    return problems


def packed_content(out: Out, rows: Rows) -> Iterator[tuple[str, int, Tensor]]:
    """Yield (file tensor, byte offset in it, a part of its content) of a tensor that is written packed."""
    assert out.pack is not None
    return packed_parts(out.pack, out.tensor_name, rows, out.shape, out.dtype)


def _check_finite(out: Out, new: Tensor, old: Tensor | Callable[[], Tensor], problems: list[str]) -> None:
    if not new.is_floating_point() or _is_finite(new):
        return
    base = old if isinstance(old, Tensor) else old()
    bad = int((~new.isfinite() & base.float().isfinite()).sum())
    if bad:
        problems.append(f"{out.tensor_name}: {bad} values would be NaN or infinite in {out.dtype} although the base's are finite")


def _is_finite(values: Tensor) -> bool:
    """Return whether no value is NaN or infinite. A sum shows this in a fiftieth of the time, unless it overflows."""
    if values.dtype in (torch.bfloat16, torch.float32, torch.float64) and bool(values.sum().isfinite()):
        return True
    return bool(values.isfinite().all())


def use_threads(count: int) -> int:
    """Set the number of threads that torch uses when this thread calls it. Returns the previous number.

    Other threads keep their number, except those that first use torch later: they copy the last number.
    """
    before = torch.get_num_threads()  # a thread copies the process's number at its first call: make that call now
    torch.set_num_threads(count)
    return before


def hash_file(path: Path) -> str:
    """Return the sha256 of a file."""
    digest = hashlib.sha256()
    buffer = memoryview(bytearray(HASH_BYTES))
    with open(path, "rb", buffering=0) as handle:
        while count := handle.readinto(buffer):
            digest.update(buffer[:count])
    return digest.hexdigest()


@dataclass
class Work:
    """Everything that is decided before anything is written. replaced: small files with new content."""

    shards: tuple[Shard, ...]
    sources: Sources
    replaced: dict[str, bytes]
    key: str
    adapter_hashes: tuple[dict[str, str], ...]
    notes: tuple[str, ...]
    untied: tuple[str, ...]
