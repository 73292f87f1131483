"""How one weight file of a merge is written: read ahead, changed by rows, hashed and written behind, in fixed memory.

A plain file goes front to back: unchanged bytes in large pieces, changed tensors row by row, both hashes on the way, so
that every byte is read once and written once. Any other file is written tensor by tensor at its place, and hashed after.
"""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch import Tensor

from trimtab.checkpoint.folder import Checkpoint
from trimtab.checkpoint.packed import split_packed
from trimtab.checkpoint.write import PositionedWriter
from trimtab.merge import pack
from trimtab.merge.delta import Change, EntryRows, Rows, merged, row_count, row_pieces
from trimtab.merge.lay_back import lay_back, without_casts
from trimtab.merge.recipe import Adapters, Edit
from trimtab.merge.shards import Out, Shard
from trimtab.merge.unpack import PackedRows
from trimtab.runtime.read import PositionedFile, bytes_of

COPY_BYTES = 4 * 2**20
PENDING_PIECES = 6
HASH_BYTES = 8 * 2**20


@dataclass
class Sources:
    """What a merge reads: the base's files and the adapters. Files are opened once, by any thread."""

    checkpoint: Checkpoint
    adapters: Adapters
    stack: ExitStack
    packed: Mapping[str, Any] = field(init=False)
    _files: dict[Path, PositionedFile] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.packed = split_packed(self.checkpoint)[1]
        for file in self.checkpoint.files:
            opened = self._files[file] = PositionedFile(file)
            self.stack.callback(opened.close)

    def file(self, path: Path) -> PositionedFile:
        return self._files[path]

    def rows(self, leaf: str) -> Rows:
        """Return the rows of a base tensor: as stored, or float32 of a packed one."""
        if leaf in self.packed:
            return PackedRows(self.packed[leaf], lambda entry: self._files[entry.file])
        entry = self.checkpoint.tensors[leaf]
        return EntryRows(self._files[entry.file], entry)

    def shape(self, leaf: str) -> tuple[int, ...]:
        found: tuple[int, ...] = (self.packed if leaf in self.packed else self.checkpoint.tensors)[leaf].shape
        return found


class MergedRows:
    """Rows of one tensor of the merged model, float32 where it changes, and as stored where it does not."""

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

    def __call__(self, start: int, stop: int) -> Tensor:
        if self._whole is not None:
            return self._whole[start:stop]
        base = self.base(start, stop)
        return merged(base.float(), start, stop, self._changes) if self._changes else base


def _laid_back(out: Out, sources: Sources) -> Tensor:
    """Return a file tensor whole, float32, with the changes of the parameters that it takes part in."""

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
    """Runs work behind the caller, each kind in its order, with a bound on the pieces that wait."""

    def __init__(self) -> None:
        self._threads: dict[str, ThreadPoolExecutor] = {}
        self._pending: deque[list[Future[Any]]] = deque()

    def piece(self, **work: Callable[[], Any]) -> None:
        """Start the work of one piece; `work` names its queues. Errors: what earlier pieces raised."""
        futures = []
        for queue, call in work.items():
            if queue not in self._threads:
                self._threads[queue] = ThreadPoolExecutor(1, thread_name_prefix=f"trimtab-merge-{queue}")
            futures.append(self._threads[queue].submit(call))
        self._pending.append(futures)
        while len(self._pending) > PENDING_PIECES:
            self._wait()

    def _wait(self) -> None:
        for future in self._pending.popleft():
            future.result()

    def drain(self) -> None:
        while self._pending:
            self._wait()

    def __enter__(self) -> _Behind:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        for thread in self._threads.values():
            thread.shutdown(wait=True, cancel_futures=True)


@dataclass
class Written:
    """What came of one file: sha256 of the base's and of the new one, and what went wrong in which tensor."""

    base_sha256: str
    sha256: str
    problems: list[str]


def write_shard(
    shard: Shard,
    path: Path,
    sources: Sources,
    tick: Callable[[int], None],
    *,
    make: Callable[[Path], Any] | None = None,
) -> Written:
    """Write one file and bring it to the disk. tick: called with the bytes that were added.

    Errors: OSError of the disk, CheckpointError if the base is shorter than it said. Not-finite results are returned as
    problems, so that all of them can be told.
    """
    with (make or PositionedWriter)(path) as writer, _Behind() as behind:
        writer.write(shard.layout.head, 0)
        tick(len(shard.layout.head))
        found = _plain(shard, writer, sources, behind, tick) if shard.is_plain else None
        if found is None:
            problems = _by_tensor(shard, writer, sources, behind, tick)
        behind.drain()
        writer.finish()
    if found is not None:
        base, new, problems = found
        return Written(base.hexdigest(), new.hexdigest(), problems)
    return Written(hash_file(shard.file), hash_file(path), problems)


def _plain(
    shard: Shard, writer: PositionedWriter, sources: Sources, behind: _Behind, tick: Callable[[int], None]
) -> tuple[Any, Any, list[str]]:
    base_hash = hashlib.sha256(shard.layout.head)
    new_hash = hashlib.sha256(shard.layout.head)
    file = sources.file(shard.file)
    problems: list[str] = []
    position = len(shard.layout.head)
    is_changed = {out.tensor_name: bool(out.edits) for out in shard.outs}
    any_changed = any(is_changed.values())

    def copy(stop: int) -> None:
        nonlocal position
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
        behind.piece(**work)
        position += len(new)
        tick(len(new))

    for out in shard.outs:
        if not is_changed[out.tensor_name]:
            continue
        place = shard.layout.places[out.tensor_name]
        copy(place.start)
        rows, stored = MergedRows(out, sources), EntryRows(file, place)
        for start, stop in row_pieces(out.shape):
            old = stored(start, stop)
            new = rows(start, stop).to(old.dtype)
            _check_finite(out, new, old, problems)
            send(bytes_of(old), bytes_of(new.contiguous()))
    copy(shard.layout.file_bytes)
    behind.drain()
    return base_hash, new_hash if any_changed else base_hash, problems


def _by_tensor(
    shard: Shard, writer: PositionedWriter, sources: Sources, behind: _Behind, tick: Callable[[int], None]
) -> list[str]:
    problems: list[str] = []
    for out in shard.outs:
        rows = MergedRows(out, sources)
        if out.pack is not None:
            parts = pack.packed_parts(out.tensor_name, rows, out.shape, out.dtype, nested=out.pack == "nf4-dq")
            for name, at, data in parts:
                start = shard.layout.places[name].start + at
                behind.piece(write=partial(writer.write, data, start))
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
            behind.piece(write=partial(writer.write, data, at))
            at += len(data)
            tick(len(data))
    return problems


def _check_finite(out: Out, new: Tensor, old: Tensor | Callable[[], Tensor], problems: list[str]) -> None:
    if not new.is_floating_point() or bool(new.isfinite().all()):
        return
    base = old if isinstance(old, Tensor) else old()
    bad = int((~new.isfinite() & base.float().isfinite()).sum())
    if bad:
        problems.append(
            f"{out.tensor_name}: {bad} values would be NaN or infinite in {out.dtype} although the base's are finite"
        )


def hash_file(path: Path) -> str:
    """Return the sha256 of a file."""
    digest = hashlib.sha256()
    buffer = memoryview(bytearray(HASH_BYTES))
    with open(path, "rb", buffering=0) as handle:
        while count := handle.readinto(buffer):
            digest.update(buffer[:count])
    return digest.hexdigest()
