"""Whose request is next: clients take turns, whichever adapters they ask for, in any order of arrivals and departures."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.examples import examples
from trimtab.request import GenerateRequest
from trimtab.serve.contract.job import Job
from trimtab.serve.scheduling.queue import FairQueue


@dataclass(eq=False)
class Entry:
    job: Job


ALL = (None, "x", "y")


def entry(name, sender, group="", adapter=None):
    return Entry(Job(name, {}, GenerateRequest(max_new_tokens=1), sender=sender, group=group, adapter=adapter))


def take(line, adapters=ALL):
    taken = line.first(adapters)
    line.take(taken)
    return taken


def line_of(*entries):
    line = FairQueue()
    for one in entries:
        line.add(one)
    return line


def names_of(line):
    return [take(line).job.id for _ in range(len(line))]


def test_a_client_that_comes_after_a_turn_is_before_the_one_that_had_it():
    line = line_of(*(entry(f"a{number}", "a") for number in range(3)))
    assert take(line).job.id == "a0"
    for name in ("b0", "b1", "c0"):
        line.add(entry(name, name[0]))
    assert take(line).job.id == "b0"
    line.add(entry("d0", "d"))
    assert names_of(line) == ["c0", "a1", "d0", "b1", "a2"]


def test_a_client_whose_work_has_ended_is_before_those_that_come_later():
    line = line_of(entry("a0", "a"), entry("a1", "a"), entry("b0", "b"))
    line.begin(line.first(ALL))
    line.end("a")
    line.add(entry("c0", "c"))
    assert names_of(line) == ["b0", "a1", "c0"]


def test_the_choices_of_a_request_are_one_turn():
    choices = [entry(f"a{number}", "a", group="g") for number in range(3)]
    line = line_of(*choices, entry("a3", "a"), entry("b0", "b"), entry("b1", "b"))
    assert names_of(line) == ["a0", "a1", "a2", "b0", "a3", "b1"]


def test_clients_take_turns_whichever_adapters_they_ask_for_and_one_alone_has_all():
    line = line_of(
        *(entry(f"ax{number}", "a", adapter="x") for number in range(3)), entry("ay0", "a", adapter="y"), entry("a0", "a"),
        entry("b0", "b"), entry("b1", "b"), entry("bx0", "b", adapter="x"),
    )  # fmt: skip
    assert names_of(line) == ["ax0", "b0", "ay0", "bx0", "a0", "b1", "ax1", "ax2"]


def test_who_asks_for_an_adapter_that_cannot_begin_keeps_its_turn():
    line = line_of(entry("ax0", "a", adapter="x"), *(entry(f"b{number}", "b") for number in range(2)), entry("a0", "a"))
    line.remove(line.first([None]))  # the other request of the same client could begin
    assert take(line, [None]).job.id == "b0" and line.first(["y"]) is None and names_of(line) == ["ax0", "b1"]


def test_a_request_whose_client_left_is_not_in_the_line():
    first, second, other = entry("a0", "a"), entry("a1", "a"), entry("b0", "b")
    line = line_of(first, second, other)
    line.remove(first)
    assert line.first(ALL) is second and first not in line and second in line and len(line) == 2
    line.remove(second)
    assert line.first(ALL) is other and entry("c0", "c") not in line
    with pytest.raises(KeyError):
        line.remove(first)


MOVES = st.lists(
    st.one_of(st.tuples(st.sampled_from("abcd"), st.sampled_from(ALL)), st.just("take"), st.integers(0, 60)), max_size=80
)


@given(moves=MOVES)
@settings(deadline=None, max_examples=examples(100))
def test_while_a_client_waits_every_other_has_one_turn_at_most(moves):
    """moves: a client sends a request, the next one is taken, or the request of a number leaves."""
    line, entries, waiting = FairQueue(), [], []
    turns = defaultdict(lambda: defaultdict(int))  # of a client that waits: the turns of others since it last had one
    for move in [*moves, *["take"] * len(moves)]:
        if move == "take" and waiting:
            taken = take(line)
            waiting.remove(taken)
            client = taken.job.sender
            same = [one for one in waiting if (one.job.sender, one.job.adapter) == (client, taken.job.adapter)]
            assert all(entries.index(one) > entries.index(taken) for one in same)
            turns.pop(client, None)
            for other in {one.job.sender for one in waiting} - {client}:
                turns[other][client] += 1
                assert turns[other][client] == 1, f"{client} passed {other} twice"
        elif isinstance(move, tuple):
            entries.append(entry(str(len(entries)), move[0], adapter=move[1]))
            waiting.append(entries[-1])
            line.add(entries[-1])
        elif isinstance(move, int) and move < len(entries) and entries[move] in waiting:
            gone = entries[move]
            waiting.remove(gone)
            line.remove(gone)
            if not any(one.job.sender == gone.job.sender for one in waiting):
                turns.pop(gone.job.sender, None)
        assert len(line) == len(waiting) and all(one in line for one in waiting)
    assert not line
