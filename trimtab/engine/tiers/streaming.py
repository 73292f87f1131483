"""Where is a weight of a streamed block, and how does it come to the computing device?"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from math import prod
from pathlib import Path
from typing import Protocol, TypeVar

import torch
from torch import Tensor

from trimtab.engine.cuda.nvrtc import wait_for_all
from trimtab.engine.formats.packed import Packed
from trimtab.engine.tiers.reader import HostMemory, Part, aligned, bytes_of
from trimtab.errors import CheckpointError, DeviceError, RequestError
from trimtab.planning.values.copy_order import CopyOrder, Piece, blocks_in


class Spill:
    """The disk tier's file: packed blocks one after the other, in a nameless temporary file that no one else can open.

    Nothing stays behind: the file goes with the process, however that ends. Errors: CheckpointError if the file is
    changed or short, DeviceError if the disk is full or the folder cannot be written.
    """

    def __init__(self, folder: Path) -> None:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._file = tempfile.TemporaryFile(dir=folder, buffering=0)  # noqa: SIM115 - closed by close()
        except OSError as exc:
            raise DeviceError(
                f"the spill file in {folder} cannot be made ({exc.strerror or exc})", device="disk",
                hint="Name a folder that can be written with offload_dir",
            ) from exc  # fmt: skip
        self.folder, self.nbytes = folder, 0

    def append(self, buffer: Tensor) -> int:
        """Write one block and return where it starts."""
        start, view = self.nbytes, bytes_of(buffer)
        try:
            done = 0
            while done < len(view):
                done += self._file.write(view[done : done + 2**30]) or 0
        except OSError as exc:
            raise DeviceError(
                f"writing {len(view)} B to the spill file in {self.folder} failed ({exc.strerror})", device="disk",
                hint="Free disk space or name another folder with offload_dir",
            ) from exc  # fmt: skip
        self.nbytes += len(view)
        return start

    def read_into(self, target: Tensor, start: int) -> None:
        # One reader thread only (Streamer's), so seek and read need no lock.
        self._file.seek(start)
        view, done = bytes_of(target), 0
        while done < len(view):
            count = self._file.readinto(view[done:])  # type: ignore[attr-defined]
            if not count:
                raise CheckpointError(
                    f"spill file ends at byte {start + done}, {len(view) - done} bytes are missing: it was changed "
                    "while in use", path=self.folder, hint="Load the model again",
                )  # fmt: skip
            done += count

    def close(self) -> None:
        self._file.close()


@dataclass(frozen=True, eq=False)
class Group:
    """One streamed block: its bytes side by side, in host memory (`host`) or at `spill_start` of the spill file. piece_starts: of
    its pieces but the first."""

    block: str
    nbytes: int
    host: HostMemory | None = None
    spill_start: int | None = None
    piece_starts: Sequence[int] = ()

    @cached_property
    def pieces(self) -> list[Piece]:
        """The pieces of the complete block, in order."""
        return [Piece(self, *ends) for ends in pairwise([0, *self.piece_starts, self.nbytes])]


class GroupWriter:
    """Writes the weights of one block into one host buffer as they come, and remembers where each part went.

    nbytes: given, of the whole block, as planned; kept, what is written of it. pinned: whether its memory is page-locked, for
    blocks that stay in host memory. places: of the tensors that came last. group: the block, once it is finished.
    """

    group: Group

    def __init__(self, block: str, nbytes: int, *, pinned: bool) -> None:
        self.block, self.nbytes, self.pinned = block, 0, pinned
        self.piece_starts: list[int] = []
        self._memory = HostMemory(nbytes, pinned=pinned)
        self.places: dict[str, Part] = {}

    def begin_piece(self) -> None:
        """Begin another piece: tensors added from here on are used after those added before."""
        if self.nbytes > (self.piece_starts or [0])[-1]:
            self.piece_starts.append(self.nbytes)

    def add(self, tensors: Mapping[str, Tensor]) -> dict[str, Part]:
        """Copy tensors into the block and return their places."""
        room = self.room({name: (tuple(tensor.shape), tensor.dtype) for name, tensor in tensors.items()})
        for name, tensor in tensors.items():
            room[name].copy_(tensor)
        return self.places

    def room(self, forms: Mapping[str, tuple[tuple[int, ...], torch.dtype]]) -> dict[str, Tensor]:
        """Return tensors of these shapes and types to be filled before the next call, in the block's memory at `places`."""
        self.places = {}
        for name, (shape, dtype) in forms.items():
            self.places[name] = Part(self.nbytes, prod(shape) * dtype.itemsize, shape, dtype)
            self.nbytes += aligned(self.places[name].nbytes)
        if self.nbytes > (planned := self._memory.tensor.numel()):  # files of bitsandbytes may have more scales
            larger = HostMemory(self.nbytes, pinned=self.pinned)
            larger.tensor[:planned].copy_(self._memory.tensor)
            self._memory.close()
            self._memory = larger
        return {name: place.view(self._memory.tensor) for name, place in self.places.items()}

    def finish(self, spill: Spill | None = None) -> Group:
        """Return the block, its bytes in host memory or in the spill file."""
        if spill is None:
            self.group = Group(self.block, self.nbytes, self._memory, piece_starts=self.piece_starts)
        else:
            start = spill.append(self._memory.tensor[: self.nbytes])
            self.group = Group(self.block, self.nbytes, spill_start=start, piece_starts=self.piece_starts)
            self._memory.close()  # the writer may live until the load ends
        return self.group


@dataclass(eq=False)
class Slot:
    """One staging buffer on the execution device and its content (present once `pending` is done)."""

    index: int
    buffer: Tensor
    owner: Group | None = None
    ready: torch.cuda.Event | None = None
    pending: Future[torch.cuda.Event | None] | None = None

    def set_content(
        self, owner: Group | None, ready: torch.cuda.Event | None = None, pending: Future[torch.cuda.Event | None] | None = None
    ) -> None:
        """Have another content or none, or the same one, whose copy has been waited for. ready: what readers wait for; pending:
        gives it once the bytes are read from disk."""
        self.owner, self.ready, self.pending = owner, ready, pending

    def settle(self) -> None:
        """Wait until the copy is queued. Errors: those of reading from disk; the slot then holds nothing."""
        if self.pending is not None:
            pending, owner = self.pending, self.owner
            self.set_content(None)
            self.set_content(owner, pending.result())


@dataclass(eq=False)
class _HostBuffer:
    """One host buffer of the disk tier; `copied` is recorded once its bytes have left for the device."""

    memory: HostMemory
    owner: Group | None = None
    copied: torch.cuda.Event | None = None

    def read(self, group: Group, spill: Spill) -> None:
        """Read a group's bytes once those from before have left."""
        if self.copied is not None:
            self.copied.synchronize()
        self.owner = None
        assert group.spill_start is not None
        spill.read_into(self.memory.tensor[: group.nbytes], group.spill_start)
        self.owner = group


Buffer = TypeVar("Buffer", Slot, _HostBuffer)


def _used_last(buffers: Sequence[Buffer], used: Buffer) -> list[Buffer]:
    """Return buffers in the order of their last use, this one's being the last."""
    return [one for one in buffers if one is not used] + [used]


def is_cycle(order: Sequence[Piece]) -> bool:
    """Whether the buffers can hold the first groups of this order at both ends of a pass: all in host memory, each entered once."""
    groups = blocks_in(order)
    return bool(groups) and len(set(groups)) == len(groups) and all(group.host is not None for group in groups)


class Replayable(Protocol):
    """A CUDA graph, or a function in place of one."""

    def replay(self) -> object: ...


def replay(streamer: Streamer | None, order: Sequence[Piece], graph: Replayable) -> None:
    """Replay a pass that was captured with this order of streamed blocks: it fills the buffers unknown to the streamer. One
    that enters none leaves the buffers as they are."""
    if streamer is None or not order:
        graph.replay()
    elif is_cycle(order):
        streamer.hold(order)
        graph.replay()
    else:
        streamer.begin_pass()
        graph.replay()
        streamer.end_pass()


@contextmanager
def in_pass(streamer: Streamer | None, order: Sequence[Piece] = (), *, entered: list[Piece] | None = None) -> Iterator[None]:
    """A pass through the model that begins with empty staging buffers, as every replay of it will; around a replay, the graph fills
    them unknown to the streamer. order: of the pieces that it enters, where that is known. entered: becomes their real order."""
    if streamer is None:
        yield
        return
    streamer.begin_pass(tuple(order))
    try:
        yield
    finally:
        groups = streamer.end_pass()
        if entered is not None:
            entered[:] = groups


class Streamer:
    """The ring of staging buffers: `enter(group)` gives the slot that holds the group's bytes, ready for this stream.

    Memory: `slot_count` x the largest group on the device; with disk groups also two host buffers of the largest of them. The
    copies run on their own stream. A slot is overwritten only after everything that was enqueued on the computing stream before the
    overwrite has run. Entering a block prefetches the one that followed it last time; skipped or repeated blocks cost time only. In
    a pass whose order is known, a block is copied piece by piece (planning/values/copy_order.py). Inference only: autograd would
    save views that are overwritten.
    """

    def __init__(self, device: torch.device, groups: Sequence[Group], *, slot_count: int = 2, spill: Spill | None = None):
        self.device, self.groups, self.spill = device, list(groups), spill
        self.poison = False  # tests fill a slot with 0xAB before each copy, so that a stale read cannot pass
        self.copied_bytes = 0
        cuda = device.type == "cuda"
        largest = max((group.nbytes for group in groups), default=0)
        count = min(slot_count, len(self.groups))
        self.slots = [Slot(i, torch.empty(largest, dtype=torch.uint8, device=device)) for i in range(count)]
        self._stream = torch.cuda.Stream(device) if cuda else None
        self._mark = torch.zeros(1, dtype=torch.int32, device=device)
        self._disk_buffers: list[_HostBuffer] = []
        self._worker: ThreadPoolExecutor | None = None
        on_disk = [group.nbytes for group in groups if group.host is None]
        if on_disk:
            self._disk_buffers = [_HostBuffer(HostMemory(max(on_disk), pinned=cuda)) for _ in range(min(2, len(on_disk)))]
            self._worker = ThreadPoolExecutor(1, thread_name_prefix="trimtab-disk")
        self._by_use = self.slots  # the least recently used one first, as in `_disk_buffers`
        self._current: Slot | None = None
        self._next: dict[Group, Group | None] | None = None
        self._entered: list[Piece] = []
        # In a pass of a known order: that order, whether the pass still follows it, how many of its steps have been used, and the
        # copies that nothing has waited for.
        self._order: CopyOrder | None = None
        self._in_order, self._used = False, 0
        self._copied: dict[Piece, torch.cuda.Event | None] = {}
        self._copies_before, self._is_capturing = 0, False
        self._follows = dict(pairwise(self.groups))  # the group that is expected next; learned from the last pass

    def begin_pass(self, order: Sequence[Piece] = ()) -> None:
        """Begin a pass that depends on no pass before it, as one that is captured in a CUDA graph has to be.

        order: the groups that it will enter, as `end_pass` of an earlier one returned them. Where each block is entered once, the
        buffers hold the first of them from the start and again at the end, so that the next such pass waits for no copy: before a
        replay `hold` sees to it. Otherwise they alone are fetched ahead, the first ones now, as many as there are buffers.
        """
        if is_cycle(order):
            copy_order = CopyOrder(order, len(self.slots))
            self._is_capturing = self._stream is not None and torch.cuda.is_current_stream_capturing()
            if self._is_capturing:
                self._forget()
                for slot, group in zip(self.slots, copy_order.blocks, strict=False):
                    slot.set_content(group)
            else:
                self.hold(order)
            self._order, self._current, self._in_order, self._used, self._copied = copy_order, None, True, 0, {}
            self._entered, self._next, self._copies_before = [], {}, self.copied_bytes
            return
        self._forget()
        self._entered, self._next = [], {}
        self._join()
        if groups := blocks_in(order):
            self._next = dict(zip(groups, [*groups[1:], None], strict=True))
            for group in dict.fromkeys(groups[: len(self.slots)]):
                self._fetch(group)

    def end_pass(self) -> list[Piece]:
        """End it with every copy done for later work on this stream; returns the pieces in the order entered."""
        if self._order is not None:
            order = self._order
            try:
                if self._in_order and self._entered and order.place[self._entered[-1]] == len(order.steps) - 1:
                    self._use(len(order.steps))
                self._in_order = False
                for slot, group in zip(self.slots, order.blocks, strict=False):
                    if slot.owner is not group:
                        self._fetch(group, into=slot)
                    slot.set_content(group)
                if self._stream is not None and self.copied_bytes != self._copies_before:
                    torch.cuda.current_stream(self.device).wait_stream(self._stream)
            finally:
                self._order, self._in_order, self._next, self._current, self._copied = None, False, None, None, {}
                if self._is_capturing:
                    self._forget()  # captured copies have not run
            return self._entered
        self._forget()
        if self._entered:
            self._join()
        self._next = None
        return self._entered

    def hold(self, order: Sequence[Piece]) -> None:
        """Let the buffers hold the first groups of an order, for later work on this stream; groups that they hold are not copied
        again. A replay of a pass that was captured with this order leaves them so."""
        self._current = None
        for slot, group in zip(self.slots, blocks_in(order), strict=False):
            if slot.owner is not group or slot.pending is not None:
                self._fetch(group, into=slot)
            self._wait(slot)
            slot.set_content(group)

    def _forget(self) -> None:
        """Let no buffer count as filled: a captured pass fills them unknown to this object."""
        for slot in self.slots:
            with suppress(CheckpointError, OSError):
                slot.settle()
            slot.set_content(None)
        self._current = None

    def _join(self) -> None:
        """Let the computing stream wait for all copies."""
        if self._stream is None:
            return
        if not self._entered and torch.cuda.is_current_stream_capturing():
            return  # copies from before the capture are no part of it; the capturing code has waited for them
        torch.cuda.current_stream(self.device).wait_stream(self._stream)

    def enter(self, piece: Piece) -> Slot:
        """Return the slot with a piece of a group; work enqueued on the current stream from now on may read it, until another piece
        is entered."""
        slot = self._enter_in_order(piece) if self._in_order else None
        if slot is not None:
            return slot
        if self._next is not None and (not self._entered or self._entered[-1] is not piece):
            self._entered.append(piece)
        group, current = piece.block, self._current
        if current is not None and current.owner is group:
            return current
        slot = next((slot for slot in self.slots if slot.owner is group), None)
        if slot is None:
            slot = self._fetch(group)
        self._wait(slot)
        self._by_use = _used_last(self._by_use, slot)
        if self._next is None and current is not None and current.owner is not None:
            self._follows[current.owner] = group
        following = self._following(group)
        self._current = slot
        if len(self.slots) > 1 and following is not None and all(s.owner is not following for s in self.slots):
            self._fetch(following, avoid=slot)
            self._read_ahead(self._follows.get(following), keep=following)
        return slot

    def _enter_in_order(self, piece: Piece) -> Slot | None:
        """Return the slot of a piece in a pass of a known order, None if the order no longer gives the content of the buffers."""
        assert self._order is not None
        place = self._order.place.get(piece, -1)
        if place < self._used:  # not in it, or given up to another block
            self._in_order = False
            return None
        if not self._entered or self._entered[-1] is not piece:
            self._use(place)
            self._entered.append(piece)
            self._wait_for(self._copied.pop(self._order.steps[place], None))
        return self.slots[self._order.slot_of[piece.block]]

    def _use(self, count: int) -> None:
        """In a pass of a known order, begin the copies that may begin once its first `count` steps have been used."""
        assert self._order is not None
        for copies in self._order.due[self._used : count]:
            for copy in copies:
                slot, group = self.slots[self._order.slot_of[copy.block]], copy.block
                free = torch.cuda.current_stream(self.device).record_event() if self._stream is not None else None
                slot.set_content(None)
                ready = self._copied[copy] = self._copy(group.host.tensor[copy.start : copy.end], slot, free, copy.start)
                slot.set_content(group if copy is self._order.steps[self._order.last[group]] else None, ready)
        self._used = max(self._used, count)

    def leave(self, group: Group) -> None:
        """Let the copy of the group after the next one begin: every reader of this one's bytes is queued. Without it that copy
        waits until the next group is entered, behind all that is computed between the two."""
        if self._order is not None:
            if self._in_order and self._entered and self._entered[-1].block is group:
                self._use(self._order.last[group] + 1)
            return
        slot, following = self._current, self._following(group)
        if slot is None or slot.owner is not group or following is None:
            return
        second = self._following(following)
        if second is None or second.host is None or any(one.owner is second for one in self.slots):
            return
        if any(one.owner is following for one in self.slots):
            self._fetch(second, into=slot)

    def _following(self, group: Group) -> Group | None:
        return (self._follows if self._next is None else self._next).get(group)

    def _fetch(self, group: Group, *, avoid: Slot | None = None, into: Slot | None = None) -> Slot:
        if not self._by_use:
            raise RequestError("the model is closed", field="model")
        slot = into or next(slot for slot in self._by_use if slot is not avoid)
        if slot is self._current:
            self._current = None
        # An unused prefetch ends before its slot is written again; its error belongs to a block that no pass requested.
        with suppress(CheckpointError, OSError):
            slot.settle()
        slot.set_content(None)
        free = torch.cuda.current_stream(self.device).record_event() if self._stream is not None else None
        if group.host is not None:
            slot.set_content(group, self._copy(group.host.tensor[0 : group.nbytes], slot, free))
        else:
            assert self._worker is not None
            slot.set_content(group, pending=self._worker.submit(self._copy_from_disk, group, slot, free))
        self._by_use = _used_last(self._by_use, slot)
        return slot

    def _copy(self, source: Tensor, slot: Slot, free: torch.cuda.Event | None, start: int = 0) -> torch.cuda.Event | None:
        self.copied_bytes += source.numel()
        target = slot.buffer[start : start + source.numel()]
        if self._stream is None:
            if self.poison:
                target.fill_(0xAB)
            target.copy_(source)
            return None
        with torch.cuda.stream(self._stream):
            assert free is not None
            self._stream.wait_event(free)
            if self.poison:
                target.fill_(0xAB)
            target.copy_(source, non_blocking=True)
            return self._stream.record_event()

    def _copy_from_disk(self, group: Group, slot: Slot, free: torch.cuda.Event | None) -> torch.cuda.Event | None:
        buffer = self._read_disk(group, keep=None)
        event = self._copy(buffer.memory.tensor[: group.nbytes], slot, free)
        buffer.copied = event
        return event

    def _read_disk(self, group: Group, *, keep: Group | None) -> _HostBuffer:
        """Return the host buffer with the group's bytes, read if needed. Runs on the disk thread only."""
        disk_buffer = next((buffer for buffer in self._disk_buffers if buffer.owner is group), None)
        if disk_buffer is None:
            free = [buffer for buffer in self._disk_buffers if keep is None or buffer.owner is not keep]
            disk_buffer = free[0]
            assert self.spill is not None
            disk_buffer.read(group, self.spill)
        self._disk_buffers = _used_last(self._disk_buffers, disk_buffer)
        return disk_buffer

    def _read_ahead(self, group: Group | None, *, keep: Group) -> None:
        if group is not None and group.host is None and len(self._disk_buffers) > 1:
            assert self._worker is not None
            self._worker.submit(self._read_ahead_quietly, group, keep)

    def _read_ahead_quietly(self, group: Group, keep: Group) -> None:
        # A read-ahead is a guess: its error is raised by the read that needs the bytes, if one comes.
        with suppress(CheckpointError, OSError, ValueError):
            self._read_disk(group, keep=keep)

    def _wait(self, slot: Slot) -> None:
        slot.settle()
        self._wait_for(slot.ready)

    def _wait_for(self, copied: torch.cuda.Event | None) -> None:
        if copied is not None:
            torch.cuda.current_stream(self.device).wait_event(copied)
            # A kernel that may begin before the one in front of it ends must not begin before the copy has ended. It begins after
            # this one, which waits for both and does not let others begin early.
            self._mark.zero_()

    def close(self) -> None:
        """Give back every buffer and the spill file."""
        if self._worker is not None:
            self._worker.shutdown(wait=True, cancel_futures=True)
        wait_for_all(self.device)  # a step that was queued ahead copies from here as well
        for group in self.groups:
            if group.host is not None:
                group.host.close()
        for buffer in self._disk_buffers:
            buffer.memory.close()
        self.slots, self._by_use, self._disk_buffers, self.groups, self._current = [], [], [], [], None
        if self.spill is not None:
            self.spill.close()


@dataclass(frozen=True, eq=False)
class Staged:
    """The weight of one leaf inside a streamed block, and the position of each tensor in the block's buffer."""

    streamer: Streamer
    group: Group
    packed: Packed  # its parts are empty; facts and shared code tables only
    places: Mapping[str, Part]
    piece: int = 0  # which of the block's pieces it is part of
    views: dict[int, Packed] = field(default_factory=dict)

    def leave(self) -> None:
        """Report that every reader of the block in this pass is queued: its buffer can take another one."""
        self.streamer.leave(self.group)

    def open(self) -> tuple[int, Packed]:
        """Return the slot's index and the weight as views of its buffer, valid until a weight outside its piece is opened."""
        slot = self.streamer.enter(self.group.pieces[self.piece])
        packed = self.views.get(slot.index)
        if packed is None:
            parts = {name: place.view(slot.buffer) for name, place in self.places.items()}
            packed = self.views[slot.index] = self.packed.with_parts(parts, self.packed.codes)
        return slot.index, packed
