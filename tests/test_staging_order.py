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

from trimtab.plan.pieces import Piece
from trimtab.runtime import tiers
from trimtab.runtime.step_capture import in_pass


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
        assert event.capture == self.cuda.capture, (
            "CUDA refuses to wait within a capture for what is outside, and the reverse"
        )
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
        assert side.behind.get("copies", 0) == self.copies.behind.get("copies", 0), (
            "CUDA refuses a stream that is not joined"
        )
        inside, end = self.log, dict(side.behind)
        self.log, self.capture, self.copies.behind = log, 0, outside

        def replay():
            self.replays += 1
            before, own = (
                dict(self.main.behind),
                {name: f"{name} of replay {self.replays}" for name in ("side", "copies")},
            )
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
            mine = [
                one
                for one in self.log
                if one is not other and overlap(one[0], other[0]) and "copy" in (one[1], other[1])
            ]
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
        groups.append(tiers.Group(str(number), ends[-1], host, piece_starts=ends[:-1]))
    streamer = tiers.Streamer(torch.device("cpu"), groups, slot_count=slots)
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
            twice,
            once,
            turned,
            some,
            list(without_repeats(again)),
            [piece for piece in once if piece.block is not streamer.groups[0]],
        )
        captures = [captured(cuda, streamer, part, leaves) for part in parts if part]
        for _ in range(10):
            if chance.random() < 0.6:  # steps, one queued behind the other
                graph, order = chance.choice(captures)
                for _ in range(chance.choice((1, 2, 3))):
                    tiers.replay(streamer, order, graph)
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
    whole = tiers.Streamer._use
    monkeypatch.setattr(
        tiers.Streamer, "_use", lambda self, count: whole(self, min(count + 1, len(self._order.entries)))
    )
    graph, order = captured(cuda, streamer, [piece for group in streamer.groups for piece in group.pieces], True)
    tiers.replay(streamer, order, graph)
    with pytest.raises((AssertionError, StopIteration)):
        cuda.check()


def test_a_step_whose_buffers_hold_what_it_needs_copies_nothing(monkeypatch):
    cuda = Cuda(monkeypatch)
    streamer = made(cuda, [[4, 4], [8]], 2)
    pieces = [piece for group in streamer.groups for piece in group.pieces]
    graph, order = captured(cuda, streamer, pieces, True)
    tiers.replay(streamer, order, graph)
    copies = [one for one in cuda.log if one[1] == "copy"]
    for _ in range(3):
        tiers.replay(streamer, order, graph)
    assert [one for one in cuda.log if one[1] == "copy"] == copies
    cuda.check()


def test_one_buffer_takes_a_piece_of_the_next_block_while_the_rest_of_this_one_is_read(monkeypatch):
    cuda = Cuda(monkeypatch)
    streamer = made(cuda, [[2, 6, 3]] * 3, 1)
    pieces = [piece for group in streamer.groups for piece in group.pieces]
    graph, order = captured(cuda, streamer, pieces, True)
    tiers.replay(streamer, order, graph)
    before = len(cuda.log)
    tiers.replay(streamer, order, graph)
    copies = [one for one in cuda.log[before:] if one[1] == "copy"]
    places = ((0, 2), (2, 8), (8, 11))
    assert [(one[0][1:], one[2]) for one in copies] == [(place, number) for number in (1, 2, 0) for place in places]
    reads = [one for one in cuda.log[before:] if one[1] == "read" and one[2] == 0]
    done = [sum(copy[4].get(one[3], 0) >= one[4][one[3]] for one in reads) for copy in copies[:3]]
    assert done == [2, 4, 6]  # behind the two linears of one piece, then of two, then of all
    cuda.check()


# Passes that are expected --------------------------------------------------------------------------------------------------


def expected_pass(cuda, streamer, order, following, pieces=None, leaves=True):
    """Enter these pieces, all of the order unless others are given, in a pass that is expected to enter the order."""
    streamer.expect(order, following)
    if pieces is None or pieces:
        passed(cuda, streamer, order if pieces is None else pieces, leaves)
    streamer.end_expected()


def pieces_in(groups):
    return [piece for group in groups for piece in group.pieces]


def nothing_copied(cuda):
    """Return the graph of a pass that enters no streamed block, and its order."""
    return cuda.captured(lambda: cuda.current.queue((-1, 0, 0), "compute", None)), ()


def copies_in(log):
    return [(one[0], one[2]) for one in log if one[1] == "copy"]


@pytest.mark.parametrize("slots", [1, 2, 3])
@pytest.mark.parametrize(("towers", "layers"), [(1, 1), (3, 0), (3, 1), (4, 3), (1, 4), (5, 2)])
def test_expected_passes_between_replays_are_ordered_whatever_they_enter(towers, layers, slots, monkeypatch):
    """Images between chunks and steps: towers that run, that are cached, that stop or go on elsewhere."""
    for seed in range(12):
        chance, cuda = random.Random(f"{towers} {layers} {slots} {seed}"), Cuda(monkeypatch)
        streamer = made(cuda, sizes_of(towers + layers, chance), slots)
        order, decoder = pieces_in(streamer.groups[:towers]), pieces_in(streamer.groups[towers:])
        if seed % 3 == 1:  # pieces that are used again in a block
            order = [one for group in streamer.groups[:towers] for one in (*group.pieces, *group.pieces[:2])]
        elif seed % 3 == 2 and towers > 1:  # a block that comes back
            order = [*order, *streamer.groups[0].pieces]
        order = list(without_repeats(order))
        graphs = [captured(cuda, streamer, decoder, True) if decoder else nothing_copied(cuda)]
        if layers > 1:  # a form of chunks that begins with another layer
            graphs.append(captured(cuda, streamer, pieces_in(streamer.groups[towers + 1 :]), True))
        for _ in range(14):
            kind = chance.random()
            if kind < 0.4:
                for _ in range(chance.randint(1, 3)):
                    graph, steps = chance.choice(graphs)
                    tiers.replay(streamer, steps, graph)
            elif kind < 0.7:
                expected_pass(cuda, streamer, order, streamer.replayed, leaves=chance.random() < 0.5)
            elif kind < 0.9:  # none, the beginning, or anything after it
                some = order[: chance.randint(0, len(order))]
                some += chance.choices(order + decoder, k=chance.choice((0, 0, 2, 4)))
                expected_pass(cuda, streamer, order, streamer.replayed, some, chance.random() < 0.5)
            else:  # a chunk that is not captured
                passed(cuda, streamer, decoder or order, True)
        cuda.check()
        assert sum(one[1] == "read" for one in cuda.log) > 20


@pytest.mark.parametrize("slots", [1, 2])
def test_the_decoder_s_first_blocks_are_copied_before_the_last_block_of_a_tower_is_left(slots, monkeypatch):
    cuda = Cuda(monkeypatch)
    streamer = made(cuda, [[2, 2]] * 4 + [[4, 4, 4]] * 3, slots)
    order, decoder = pieces_in(streamer.groups[:4]), pieces_in(streamer.groups[4:])
    graph, steps = captured(cuda, streamer, decoder, True)
    tiers.replay(streamer, steps, graph)
    before = len(cuda.log)
    streamer.expect(order, streamer.replayed)
    passed(cuda, streamer, order, leaves=False)  # the last block is not left
    inside = copies_in(cuda.log[before:])
    streamer.end_expected()
    after = copies_in(cuda.log[before:])[len(inside) :]
    reads = [one for one in cuda.log[before:] if one[1] == "read"]
    if slots == 1:
        # Bytes 0 to 4 of the buffer were the tower's: of the first layer only the piece there is copied, behind the last reads.
        assert not [one for one in inside if one[1] == 4] and after == [((0, 0, 4), 4)]
    else:
        # The buffer that the last block does not use takes its layer while that block computes.
        assert [one for one in inside if one[1] >= 4] == [((0, 0, 4), 4)] and after == [((1, 0, 4), 5)]
        early = next(one for one in cuda.log[before:] if one[1] == "copy" and one[2] == 4)
        last = [one for one in reads if one[2] == 3]
        assert len(last) == 4 and not any(early[4].get("main", 0) >= one[4]["main"] for one in last)
    before = len(cuda.log)
    tiers.replay(streamer, steps, graph)
    outside = [one for one in cuda.log[before:] if one[1] == "copy" and one[3] == "copies"]
    assert not outside, "all that the chunk begins with was on its way"
    cuda.check()


def test_with_one_buffer_a_tower_s_last_block_computes_beside_the_decoder_s_first_copy(monkeypatch):
    """The first layer is another one than that in the buffer: its pieces follow those of the tower's last block."""
    cuda = Cuda(monkeypatch)
    streamer = made(cuda, [[2, 2, 2]] * 3 + [[2, 2, 2]] * 2, 1)
    order, decoder = pieces_in(streamer.groups[:3]), pieces_in(streamer.groups[3:])
    passed(cuda, streamer, order, True)  # nothing of the decoder is in the buffer
    before = len(cuda.log)
    expected_pass(cuda, streamer, order, decoder)
    copies = [one for one in cuda.log[before:] if one[1] == "copy" and one[2] == 3]
    assert [one[0] for one in copies] == [(0, 0, 2), (0, 2, 4), (0, 4, 6)]
    last = [one for one in cuda.log[before:] if one[1] == "read" and one[2] == 2]
    assert [sum(copy[4]["main"] >= one[4]["main"] for one in last) for copy in copies] == [2, 4, 6]
    cuda.check()


@pytest.mark.parametrize("slots", [1, 2])
def test_beside_a_resident_decoder_the_next_image_s_first_blocks_are_copied_during_the_chunk(slots, monkeypatch):
    cuda = Cuda(monkeypatch)
    streamer = made(cuda, [[2, 3]] * 4, slots)
    order = pieces_in(streamer.groups)
    chunk, none = nothing_copied(cuda)
    expected_pass(cuda, streamer, order, streamer.replayed)
    ended = cuda.copies.behind["copies"]
    tiers.replay(streamer, none, chunk)
    computed = next(one for one in reversed(cuda.log) if one[1] == "compute")
    assert computed[4].get("copies", 0) < ended, "the chunk does not wait for them"
    before = len(cuda.log)
    expected_pass(cuda, streamer, order, streamer.replayed)
    number = next(place for place, one in enumerate(cuda.log[before:]) if one[1] == "read")
    assert number == 0, "nothing is copied before the first block computes"
    cuda.check()


def test_an_image_that_is_cached_copies_nothing(monkeypatch):
    cuda = Cuda(monkeypatch)
    streamer = made(cuda, [[2, 2]] * 3 + [[4]] * 2, 1)
    order, decoder = pieces_in(streamer.groups[:3]), pieces_in(streamer.groups[3:])
    graph, steps = captured(cuda, streamer, decoder, True)
    tiers.replay(streamer, steps, graph)
    before = len(cuda.log)
    expected_pass(cuda, streamer, order, streamer.replayed, [])
    assert len(cuda.log) == before
    tiers.replay(streamer, steps, graph)
    cuda.check()


def test_another_pass_drops_what_was_expected(monkeypatch):
    cuda = Cuda(monkeypatch)
    streamer = made(cuda, [[2, 2]] * 3 + [[4]] * 2, 2)
    order, decoder = pieces_in(streamer.groups[:3]), pieces_in(streamer.groups[3:])
    streamer.expect(order, decoder)
    passed(cuda, streamer, [*decoder, *order], True)
    assert streamer._order is None and streamer._expected is None
    streamer.expect(order, decoder)
    with in_pass(streamer):
        passed(cuda, streamer, order, True)
    assert streamer._expected is None
    streamer.end_expected()
    cuda.check()


@pytest.mark.parametrize("slots", [1, 2])
@pytest.mark.parametrize("fault", ["early", "intact", "unwaited"])
def test_the_check_sees_faults_at_the_border(fault, slots, monkeypatch):
    """Planted: the next part's copies begin before the last block is read; overwritten pieces count as intact; a first block is
    read before its copy has ended."""
    cuda = Cuda(monkeypatch)
    streamer = made(cuda, [[2, 3]] * 3 + [[4, 4]] * 3, slots)
    order, decoder = pieces_in(streamer.groups[:3]), pieces_in(streamer.groups[3:])
    graph, steps = captured(cuda, streamer, decoder, True)
    tiers.replay(streamer, steps, graph)
    plain = tiers.CopyOrder
    if fault == "early":

        def wrong(*args, **options):
            one = plain(*args, **options)
            one.due = [one.due[0] + one.due[1], *one.due[2:], []]
            return one

        monkeypatch.setattr(tiers, "CopyOrder", wrong)
    elif fault == "intact":

        def wrong(*args, **options):
            one = plain(*args, **options)
            one.due = [[copy for copy in due if copy.block not in streamer.groups[3:]] for due in one.due]
            return one

        monkeypatch.setattr(tiers, "CopyOrder", wrong)
        monkeypatch.setattr(tiers.Streamer, "end_expected", lambda self: as_if_filled(self, decoder))
    else:
        monkeypatch.setattr(tiers.Streamer, "_wait_for", lambda self, copied: None)
    expected_pass(cuda, streamer, order, streamer.replayed)
    tiers.replay(streamer, steps, graph)
    with pytest.raises((AssertionError, StopIteration)):
        cuda.check()


def as_if_filled(streamer, pieces):
    """End a pass as if its buffers held these blocks."""
    for slot, group in zip(streamer.slots, tiers.blocks_in(pieces), strict=False):
        slot.owner = group
    streamer._order = None
    streamer._in_order = False
