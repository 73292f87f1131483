"""Copies into staging buffers and what reads them are in an order that streams and graphs keep, whatever comes after what.

CUDA's part is played by a stand-in that runs nothing and remembers what has to happen before what: a stream does one thing after
the other, a wait adds what an event or a stream was behind, a replay is one piece of the stream that it is queued on.
"""

from __future__ import annotations

import random
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import accumulate
from types import SimpleNamespace

import pytest
import torch

from trimtab.engine.tiers import streaming
from trimtab.engine.tiers.streaming import in_pass
from trimtab.planning.values.copy_order import Piece


@dataclass
class Stream:
    """behind: stream -> how many of its operations are done before what is queued here next."""

    cuda: Cuda
    name: str
    behind: dict[str, int] = field(default_factory=dict)

    def queue(self, place, what, group):
        self.behind[self.name] = self.behind.get(self.name, 0) + 1
        self.cuda.log.append((place, what, group, self.name, dict(self.behind)))

    def record_event(self):
        return SimpleNamespace(behind=dict(self.behind), capture=self.cuda.capture)

    def wait_event(self, event):
        assert event.capture == self.cuda.capture, "CUDA refuses to wait within a capture for what is outside, and the reverse"
        for name, count in event.behind.items():
            self.behind[name] = max(self.behind.get(name, 0), count)

    def wait_stream(self, other):
        self.wait_event(other.record_event())


class Cuda:
    """The stand-in. log: (place, "copy" or "read", group, stream, what is done before it, itself included). place: a slot's number
    and the bytes of its buffer that are written or read, from start to end."""

    def __init__(self, monkeypatch):
        self.log, self.captures, self.replays, self.capture = [], 0, 0, 0
        self.main, self.copies = Stream(self, "main"), Stream(self, "copies")
        self.current = self.main
        monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: self.current)
        monkeypatch.setattr(torch.cuda, "stream", self.on)
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: bool(self.capture))

    @contextmanager
    def on(self, stream):
        before, self.current = self.current, stream
        yield
        self.current = before

    def captured(self, run):
        """Return a graph of what `run` queues."""
        self.captures += 1
        outside, log, self.log = self.copies.behind, self.log, []
        self.capture, self.copies.behind = self.captures, {}
        side = Stream(self, "side")
        with self.on(side):
            run()
        assert side.behind.get("copies", 0) == self.copies.behind.get("copies", 0), "CUDA refuses a stream that is not joined"
        inside, end = self.log, dict(side.behind)
        self.log, self.capture, self.copies.behind = log, 0, outside

        def replay():
            self.replays += 1
            before, own = (dict(self.main.behind), {name: f"{name} of replay {self.replays}" for name in ("side", "copies")})
            for place, what, group, stream, behind in inside:
                done = before | {own[name]: count for name, count in behind.items()}
                self.log.append((place, what, group, own[stream], done))
            self.main.behind |= {own[name]: count for name, count in end.items()}

        return SimpleNamespace(replay=replay)

    def check(self):
        """Every two operations on one place of which one writes are ordered, and what is read is what was copied there last, each
        byte of it."""

        def is_before(one, other):
            return other[4].get(one[3], 0) >= one[4][one[3]]

        def overlap(one, other):
            return one[0] == other[0] and one[1] < other[2] and other[1] < one[2]

        for other in self.log:
            mine = [one for one in self.log if one is not other and overlap(one[0], other[0]) and "copy" in (one[1], other[1])]
            assert all(is_before(one, other) or is_before(other, one) for one in mine), other
            if other[1] == "read":
                before = [one for one in mine if is_before(one, other)]
                for byte in range(*other[0][1:]):
                    there = [one for one in before if one[0][1] <= byte < one[0][2]]
                    last = next(one for one in there if all(is_before(two, one) for two in there if two is not one))
                    assert last[2] == other[2], (last, other)


class Bytes:
    """A block's bytes on the host, or the part of them that is copied."""

    def __init__(self, block, start, end):
        self.block, self.start, self.end = block, start, end

    def numel(self):
        return self.end - self.start

    def __getitem__(self, part):
        return Bytes(self.block, self.start + part.start, self.start + part.stop)


def made(cuda, sizes, slots):
    """Return a streamer of blocks with pieces of these sizes, whose buffers are watched."""

    class Buffer:
        def __init__(self, index):
            self.index = index

        def __getitem__(self, part):
            start = part.start or 0

            def copy_(source, non_blocking):
                assert source.start == start and source.end == part.stop, "bytes keep their places within the block"
                cuda.current.queue((self.index, start, part.stop), "copy", source.block)

            return SimpleNamespace(copy_=copy_)

    groups = []
    for number, pieces in enumerate(sizes):
        ends = list(accumulate(pieces))
        host = SimpleNamespace(tensor=Bytes(number, 0, ends[-1]), close=lambda: None)
        groups.append(streaming.Group(str(number), ends[-1], host, piece_starts=ends[:-1]))
    streamer = streaming.Streamer(torch.device("cpu"), groups, slot_count=slots)
    streamer._stream = cuda.copies
    for slot in streamer.slots:
        slot.buffer = Buffer(slot.index)
    return streamer


def passed(cuda, streamer, pieces, leaves):
    """Compute with these pieces in turn, several linears each."""
    for piece, following in zip(pieces, [*pieces[1:], None], strict=True):
        for _ in range(2):
            slot = streamer.enter(piece).index
            cuda.current.queue((slot, piece.start, piece.end), "read", int(piece.block.block))
        if leaves and (following is None or following.block is not piece.block):
            streamer.leave(piece.block)


def captured(cuda, streamer, pieces, leaves):
    """Return a graph of a pass through these pieces, and their order, which a pass before it shows."""
    order: list[Piece] = []
    with in_pass(streamer, entered=order):
        passed(cuda, streamer, pieces, leaves)
    assert order == list(pieces)

    def run():
        with in_pass(streamer, order):
            passed(cuda, streamer, pieces, leaves)

    return cuda.captured(run), order


def without_repeats(pieces):
    """Leave out a piece right behind itself: that is entering it once."""
    return (piece for piece, before in zip(pieces, [None, *pieces], strict=False) if piece is not before)


def sizes_of(count, chance):
    return [[chance.randint(1, 4) for _ in range(chance.randint(1, 3))] for _ in range(count)]


@pytest.mark.parametrize("slots", [1, 2, 3])
@pytest.mark.parametrize("count", [1, 2, 3, 5])
def test_no_copy_overtakes_what_reads_and_nothing_reads_what_is_not_there(count, slots, monkeypatch):
    for seed in range(8):
        chance, cuda = random.Random(f"{count} {slots} {seed}"), Cuda(monkeypatch)
        streamer = made(cuda, sizes_of(count, chance), slots)
        leaves = bool(seed % 2)
        once = [piece for group in streamer.groups for piece in group.pieces]
        # Modules that are computed in another order than they are listed, and passes that read some pieces of a block only.
        turned = [piece for group in streamer.groups for piece in reversed(group.pieces)]
        some = [piece for group in streamer.groups for piece in group.pieces[-2:]]
        again = [piece for group in streamer.groups for piece in (*group.pieces, group.pieces[0])]
        twice = [*once, once[0]] if len(once) > 1 else once
        parts = (
            twice, once, turned, some, list(without_repeats(again)),
            [piece for piece in once if piece.block is not streamer.groups[0]],
        )  # fmt: skip
        captures = [captured(cuda, streamer, part, leaves) for part in parts if part]
        for _ in range(10):
            if chance.random() < 0.6:  # steps, one queued behind the other
                graph, order = chance.choice(captures)
                for _ in range(chance.choice((1, 2, 3))):
                    streaming.replay(streamer, order, graph)
            else:  # a prompt, or a part of one that failed
                passed(cuda, streamer, once[: chance.randint(1, len(once))], leaves)
        cuda.check()
        assert sum(one[1] == "read" for one in cuda.log) > 20


@pytest.mark.parametrize("slots", [1, 2, 3])
def test_a_pass_that_leaves_its_order_is_ordered_too(slots, monkeypatch):
    """Eager passes that are told an order and then enter anything, some of it twice or not at all."""
    for seed in range(30):
        chance, cuda = random.Random(f"{slots} {seed}"), Cuda(monkeypatch)
        streamer = made(cuda, sizes_of(chance.randint(2, 5), chance), slots)
        once = [piece for group in streamer.groups for piece in group.pieces]
        for _ in range(3):
            kept = chance.randint(0, len(once))
            pieces = once[:kept] + chance.choices(once, k=chance.randint(1, 6))
            with in_pass(streamer, once):
                passed(cuda, streamer, pieces, chance.random() < 0.5)
        cuda.check()


def test_the_check_sees_a_copy_that_begins_too_early(monkeypatch):
    """A fault is planted: pieces are copied as if each were used as soon as it is entered."""
    cuda = Cuda(monkeypatch)
    streamer = made(cuda, [[2, 3, 2]] * 3, 1)
    whole = streaming.Streamer._use
    monkeypatch.setattr(streaming.Streamer, "_use", lambda self, count: whole(self, min(count + 1, len(self._order.steps))))
    graph, order = captured(cuda, streamer, [piece for group in streamer.groups for piece in group.pieces], True)
    streaming.replay(streamer, order, graph)
    with pytest.raises((AssertionError, StopIteration)):
        cuda.check()


def test_a_step_whose_buffers_hold_what_it_needs_copies_nothing(monkeypatch):
    cuda = Cuda(monkeypatch)
    streamer = made(cuda, [[4, 4], [8]], 2)
    pieces = [piece for group in streamer.groups for piece in group.pieces]
    graph, order = captured(cuda, streamer, pieces, True)
    streaming.replay(streamer, order, graph)
    copies = [one for one in cuda.log if one[1] == "copy"]
    for _ in range(3):
        streaming.replay(streamer, order, graph)
    assert [one for one in cuda.log if one[1] == "copy"] == copies
    cuda.check()


def test_one_buffer_takes_a_piece_of_the_next_block_while_the_rest_of_this_one_is_read(monkeypatch):
    cuda = Cuda(monkeypatch)
    streamer = made(cuda, [[2, 6, 3]] * 3, 1)
    pieces = [piece for group in streamer.groups for piece in group.pieces]
    graph, order = captured(cuda, streamer, pieces, True)
    streaming.replay(streamer, order, graph)
    before = len(cuda.log)
    streaming.replay(streamer, order, graph)
    copies = [one for one in cuda.log[before:] if one[1] == "copy"]
    places = ((0, 2), (2, 8), (8, 11))
    assert [(one[0][1:], one[2]) for one in copies] == [(place, number) for number in (1, 2, 0) for place in places]
    reads = [one for one in cuda.log[before:] if one[1] == "read" and one[2] == 0]
    done = [sum(copy[4].get(one[3], 0) >= one[4][one[3]] for one in reads) for copy in copies[:3]]
    assert done == [2, 4, 6]  # behind the two linears of one piece, then of two, then of all
    cuda.check()
