"""Copies into staging buffers and what reads them are in an order that streams and graphs keep, whatever comes after what.

CUDA's part is played by a stand-in that runs nothing and remembers what has to happen before what: a stream does one thing after
the other, a wait adds what an event or a stream was behind, a replay is one piece of the stream that it is queued on.
"""

from __future__ import annotations

import random
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import SimpleNamespace

import pytest
import torch

from trimtab.runtime import tiers
from trimtab.runtime.step_capture import in_pass


@dataclass
class Stream:
    """behind: stream -> how many of its operations are done before what is queued here next."""

    cuda: Cuda
    name: str
    behind: dict[str, int] = field(default_factory=dict)

    def queue(self, slot, what, group):
        self.behind[self.name] = self.behind.get(self.name, 0) + 1
        self.cuda.log.append((slot, what, group, self.name, dict(self.behind)))

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
    """The stand-in. log: (slot, "copy" or "read", group, stream, what is done before it, itself included)."""

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
            for slot, what, group, stream, behind in inside:
                done = before | {own[name]: count for name, count in behind.items()}
                self.log.append((slot, what, group, own[stream], done))
            self.main.behind |= {own[name]: count for name, count in end.items()}

        return SimpleNamespace(replay=replay)

    def check(self):
        """Every two operations on a buffer of which one writes are ordered, and what is read is what was copied there last."""

        def is_before(one, other):
            return other[4].get(one[3], 0) >= one[4][one[3]]

        for other in self.log:
            mine = [one for one in self.log if one is not other and one[0] == other[0] and "copy" in (one[1], other[1])]
            assert all(is_before(one, other) or is_before(other, one) for one in mine), other
            if other[1] == "read":
                before = [one for one in mine if is_before(one, other)]
                last = next(one for one in before if all(is_before(two, one) for two in before if two is not one))
                assert last[2] == other[2], (last, other)


def made(cuda, count, slots):
    """Return a streamer of so many blocks whose buffers are watched."""

    class Buffer:
        def __init__(self, index):
            self.index = index

        def __getitem__(self, part):
            return SimpleNamespace(
                copy_=lambda source, non_blocking: cuda.current.queue(self.index, "copy", source.block)
            )

    groups = []
    for number in range(count):
        source = SimpleNamespace(block=number, numel=lambda: 8)
        groups.append(tiers.Group(str(number), 8, SimpleNamespace(tensor=source, close=lambda: None)))
    streamer = tiers.Streamer(torch.device("cpu"), groups, slot_count=slots)
    streamer._stream = cuda.copies
    for slot in streamer.slots:
        slot.buffer = Buffer(slot.index)
    return streamer


def passed(cuda, streamer, groups, leaves):
    """Compute with these blocks in turn, several linears each."""
    for group in groups:
        for _ in range(2):
            cuda.current.queue(streamer.enter(group).index, "read", int(group.block))
        if leaves:
            streamer.leave(group)


def captured(cuda, streamer, groups, leaves):
    """Return a graph of a pass through these blocks, and their order, which a pass before it shows."""
    order: list[tiers.Group] = []
    with in_pass(streamer, entered=order):
        passed(cuda, streamer, groups, leaves)
    assert order == list(groups)

    def run():
        with in_pass(streamer, order):
            passed(cuda, streamer, groups, leaves)

    return cuda.captured(run), order


@pytest.mark.parametrize("slots", [1, 2, 3])
@pytest.mark.parametrize("count", [1, 2, 3, 5])
def test_no_copy_overtakes_what_reads_and_nothing_reads_what_is_not_there(count, slots, monkeypatch):
    for seed in range(6):
        chance, cuda = random.Random(f"{count} {slots} {seed}"), Cuda(monkeypatch)
        streamer = made(cuda, count, slots)
        leaves = bool(seed % 2)
        twice = [*streamer.groups, streamer.groups[0]] if count > 1 else streamer.groups
        captures = [
            captured(cuda, streamer, part, leaves) for part in (twice, streamer.groups, streamer.groups[1:]) if part
        ]
        for _ in range(12):
            if chance.random() < 0.6:  # steps, one queued behind the other
                graph, order = chance.choice(captures)
                for _ in range(chance.choice((1, 2, 3))):
                    tiers.replay(streamer, order, graph)
            else:  # a prompt, or a part of one that failed
                passed(cuda, streamer, streamer.groups[: chance.randint(1, count)], leaves)
        cuda.check()
        assert sum(one[1] == "read" for one in cuda.log) > 20


def test_a_step_whose_buffers_hold_what_it_needs_copies_nothing(monkeypatch):
    cuda = Cuda(monkeypatch)
    streamer = made(cuda, 2, 2)
    graph, order = captured(cuda, streamer, streamer.groups, True)
    tiers.replay(streamer, order, graph)
    copies = [one for one in cuda.log if one[1] == "copy"]
    for _ in range(3):
        tiers.replay(streamer, order, graph)
    assert [one for one in cuda.log if one[1] == "copy"] == copies
    cuda.check()
