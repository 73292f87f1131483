"""What travels between the processes comes out as it went in, and nothing a client writes is taken for something else."""

import json
import multiprocessing
import threading
from dataclasses import asdict

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trimtab.request import GenerateRequest
from trimtab.serve.contract.job import Event, Job, Token, token_text
from trimtab.serve.worker.ipc import Channel, Inbox, event_from_message, event_to_message, job_from_message, job_to_message

values = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(-(2**53), 2**53), st.text(), st.binary(max_size=64)),
    lambda inner: st.one_of(st.lists(inner, max_size=4), st.dictionaries(st.text(), inner, max_size=4)),
    max_leaves=12,
)


@pytest.fixture
def ends():
    here, there = multiprocessing.Pipe()
    yield Channel(here), Channel(there)
    here.close()
    there.close()


@given(st.dictionaries(st.text(), values, max_size=4))
def test_any_message_comes_out_as_it_went_in(message):
    here, there = multiprocessing.Pipe()
    Channel(here).send(message)
    assert Channel(there).receive() == message
    here.close()
    there.close()


def test_a_large_blob_goes_beside_the_json(ends):
    picture = bytes(range(256)) * 40_000
    sender = threading.Thread(target=ends[0].send, args=({"a": [{"image": picture}], "b": 1},))
    sender.start()
    assert ends[1].receive() == {"a": [{"image": picture}], "b": 1}
    sender.join()


def test_what_a_client_writes_is_never_taken_for_bytes(ends):
    schema = {"blobs": [["message"]], "message": {"$blob": 0}}
    ends[0].send({"schema": schema, "data": b"x"})
    assert ends[1].receive() == {"schema": schema, "data": b"x"}


def test_a_closed_pipe_is_said(ends):
    ends[0].close()
    with pytest.raises(EOFError):
        ends[1].receive()


def test_a_job_keeps_every_field():
    job = Job(
        "1", [{"role": "user", "content": [{"type": "image", "image": b"\x89PNG"}]}],
        GenerateRequest(max_new_tokens=7, temperature=0.5, seed=3, stop=("a", "b")), adapter="x", system="s",
        deadline_s=2.0, top_logprobs=3, schema={"type": "object"},
    )  # fmt: skip
    here, there = multiprocessing.Pipe()
    Channel(here).send(job_to_message(job))
    assert job_from_message(Channel(there).receive()) == job


def test_an_event_keeps_every_field():
    event = Event(
        "1", "text", text="hé", tokens=(Token(5, token_text(b"\xc3"), -0.5, ((5, "h", -0.5), (6, "i", -1.0)), 3),), finish="stop",
        usage={"prompt_tokens": 3}, error={"class": "X"},
    )  # fmt: skip
    here, there = multiprocessing.Pipe()
    Channel(here).send(event_to_message(event))
    assert asdict(event_from_message(Channel(there).receive())) == asdict(event)


WAIT_S = 60.0
HEAD = json.dumps({"message": {"picture": None}, "blobs": [["picture"]]}).encode()


def test_an_inbox_has_a_message_when_all_of_it_has_come(ends):
    inbox = Inbox(ends[1])
    inbox.start()
    assert not inbox.poll(0)
    ends[0].send({"a": 1})
    assert inbox.poll(WAIT_S)
    ends[0]._connection.send_bytes(HEAD)
    assert inbox.receive() == {"a": 1} and not inbox.poll(0.05)
    ends[0]._connection.send_bytes(b"x")
    assert inbox.poll(WAIT_S) and inbox.receive() == {"picture": b"x"}
    ends[0].send({"last": 1})
    ends[0].close()
    assert inbox.poll(WAIT_S) and inbox.receive() == {"last": 1}
    for _ in range(2):
        assert inbox.poll(WAIT_S)
        with pytest.raises(EOFError):
            inbox.receive()
    assert list(inbox.rest()) == []


def test_the_rest_of_an_inbox_has_what_is_on_its_way(ends, monkeypatch):
    inbox = Inbox(ends[1])
    ends[0].send({"first": 1})
    ends[0]._connection.send_bytes(HEAD)
    inbox.start()
    wait_for, waits = inbox._came.wait_for, []

    def sends_what_is_awaited(condition):
        waits.append(condition)
        if len(waits) == 2:
            ends[0]._connection.send_bytes(b"x")
        return wait_for(condition)

    monkeypatch.setattr(inbox._came, "wait_for", sends_what_is_awaited)
    assert list(inbox.rest()) == [{"first": 1}, {"picture": b"x"}] and list(inbox.rest()) == [] and not inbox.poll(0)
