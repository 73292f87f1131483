"""The HTTP face on a pool without models: shapes, statuses, refusals, streams, clients that leave."""

import asyncio
import base64
import hmac
import io
import itertools
import json
import re
import struct
import subprocess
import sys
import wave
import zlib
from dataclasses import fields
from types import SimpleNamespace

import pytest
from pydantic import TypeAdapter
from starlette.testclient import TestClient

from tests import ROOT
from tests.serving import MockPool, client, failed, forever, late, token, words
from tests.waiting import turns, until_async
from trimtab import errors
from trimtab.errors import DeviceError, RequestError, TrimtabError
from trimtab.serve.api import admission, answers
from trimtab.serve.api.answer_types import Error
from trimtab.serve.api.answers import ChatShape
from trimtab.serve.api.routes import BESIDE, COMPLETIONS, MESSAGES, ROUTES, Described
from trimtab.serve.api.routes import CHAT as CHATS
from trimtab.serve.contract import errors as faults
from trimtab.serve.contract import quotas
from trimtab.serve.contract.errors import ERRORS, UnknownModelError
from trimtab.serve.contract.job import Event, Token, token_text
from trimtab.serve.contract.settings import ADMIN_PATHS, Limits, Settings
from trimtab.serve.http.app import make_app
from trimtab.serve.http.openapi import description
from trimtab.serve.observe.metrics import Metrics
from trimtab.serve.scheduling import scheduler
from trimtab.serve.scheduling.scheduler import QueueFullError
from trimtab.serve.worker import supervisor

WAIT_S = 10.0
CHAT = {"model": "demo", "messages": [{"role": "user", "content": "Hello"}]}
PNG = base64.b64decode("iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg==")
PICTURE = "data:image/png;base64," + base64.b64encode(PNG).decode()


def picture_of(width, height):
    """Return a data URL whose header promises so many pixels: a few bytes that would be gigabytes."""
    head = b"IHDR" + struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    made = b"\x89PNG\r\n\x1a\n" + struct.pack(">I", 13) + head + struct.pack(">I", zlib.crc32(head)) + PNG[33:]
    return "data:image/png;base64," + base64.b64encode(made).decode()


BOMB, HUGE = picture_of(30, 30), picture_of(100_000, 100_000)


def chat(found, **fields):
    return found.post("/v1/chat/completions", json={**CHAT, **fields})


def error_of(response, status):
    assert response.status_code == status, response.text
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code", "class", "fields"}
    return error


NOT_CACHED = {"prompt_tokens_details": {"cached_tokens": 0}}


def events_of(response):
    """Return (event name or None, data) of a stream."""
    found = []
    for block in response.text.split("\n\n"):
        lines = dict(line.split(": ", 1) for line in block.splitlines() if line and not line.startswith(":"))
        if lines:
            found.append((lines.get("event"), lines["data"]))
    return found


# Answers --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("field", ["output_head", "kv"])
def test_usage_names_the_output_head_and_the_form_of_keys_and_values_where_the_engine_says_it(field):
    for form in ("full", "int8", None):
        shape = ChatShape(SimpleNamespace(model="demo", n=1, logprobs=False))
        usage = {"prompt_tokens": 7, "completion_tokens": 2} | ({} if form is None else {field: form})
        shape.chunk(0, Event("1", "done", finish="stop", usage=usage))
        assert shape.usage().get(field) == form and (field in shape.usage()) == (form is not None)
        assert shape.usage()["total_tokens"] == 9


def test_a_chat_is_answered_in_openais_shape():
    pool = MockPool()
    found = chat(client(pool)).json()
    assert found["id"].startswith("chatcmpl-") and found["object"] == "chat.completion" and found["model"] == "demo"
    assert found["choices"] == [
        {"index": 0, "message": {"role": "assistant", "content": "Hello there", "refusal": None}, "logprobs": None,
         "finish_reason": "stop"}
    ]  # fmt: skip
    assert found["usage"] == {"prompt_tokens": 7, "completion_tokens": 2, "total_tokens": 9, **NOT_CACHED}
    assert pool.jobs[0].prompt == [{"role": "user", "content": "Hello"}] and pool.jobs[0].adapter is None
    assert pool.left == [pool.jobs[0].id]


def test_a_chat_is_streamed_in_openais_shape():
    found = chat(client(), stream=True, stream_options={"include_usage": True})
    assert found.headers["content-type"].startswith("text/event-stream") and found.headers["cache-control"] == "no-store"
    *chunks, last = [data for _, data in events_of(found)]
    chunks = [json.loads(chunk) for chunk in chunks]
    assert last == "[DONE]"
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks[:-1]]
    # How many pieces there are depends on who is faster.
    assert deltas[0] == {"role": "assistant", "content": ""} and deltas[-1] == {}
    assert "".join(delta["content"] for delta in deltas[1:-1]) == "Hello there"
    assert chunks[-2]["choices"][0]["finish_reason"] == "stop"
    assert chunks[-1]["choices"] == [] and chunks[-1]["usage"]["total_tokens"] == 9
    assert [chunk["usage"] for chunk in chunks[:-1]] == [None] * (len(chunks) - 1)
    assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"} and len({chunk["id"] for chunk in chunks}) == 1


def test_choices_have_seeds_of_their_own_and_share_the_prompts_tokens():
    pool = MockPool()
    found = chat(client(pool), n=3, seed=5).json()
    assert [choice["index"] for choice in found["choices"]] == [0, 1, 2]
    assert [job.request.seed for job in pool.jobs] == [5, 6, 7]
    assert found["usage"] == {"prompt_tokens": 7, "completion_tokens": 6, "total_tokens": 13, **NOT_CACHED}


def test_logprobs_come_in_openais_shape_and_have_no_infinity():
    pool = MockPool(lambda job: [Event(job.id, "text", text="é", tokens=(token("é"), token("", float("-inf")))), *words(job)[1:]])
    content = chat(client(pool), logprobs=True, top_logprobs=2).json()["choices"][0]["logprobs"]["content"]
    assert content[0] == {
        "token": "é", "logprob": -0.5, "bytes": [195, 169],
        "top_logprobs": [{"token": "é", "logprob": -0.5, "bytes": [195, 169]}, {"token": "x", "logprob": -3.0, "bytes": [120]}],
    }  # fmt: skip
    assert content[1]["logprob"] == -9999.0
    assert pool.jobs[0].top_logprobs == 2


def test_logprobs_have_the_bytes_of_parts_of_characters_and_one_value_a_text():
    part, same = (
        token_text(b"\xc3"),
        ((1, "é", -1.0), (2, token_text(b"\xa9"), -2.0), (3, token_text(b"\xc3"), -3.0), (4, "é", -4.0)),
    )
    tokens = (Token(3, part, -3.0, same, 5), Token(2, token_text(b"\xa9"), -2.0, same, 5), Token(5, "x", -9.0, same, 6))
    pool = MockPool(lambda job: [Event(job.id, "text", text="éx", tokens=tokens), *words(job)[-1:]])
    content = chat(client(pool), logprobs=True, top_logprobs=4).json()["choices"][0]["logprobs"]["content"]
    assert bytes(itertools.chain(*(one["bytes"] for one in content))) == "éx".encode()
    assert [one["token"] for one in content] == ["\ufffd", "\ufffd", "x"] and content[0]["top_logprobs"][2]["bytes"] == [0xC3]
    asked = {"model": "style", "prompt": "one", "logprobs": 4}
    whole = client(pool).post("/v1/completions", json=asked).json()["choices"][0]["logprobs"]
    # Of several tokens with one text, the answer's own counts, else the most likely.
    assert whole["top_logprobs"] == [{"é": -1.0, "\ufffd": value} for value in (-3.0, -2.0, -2.0)]
    assert whole["tokens"] == ["\ufffd", "\ufffd", "x"] and whole["text_offset"] == [5, 5, 6]


def test_a_completion_is_answered_in_openais_shape():
    pool = MockPool()
    asked = {"model": "style", "prompt": ["one", "two"], "n": 2, "max_tokens": 3, "logprobs": 1}
    found = client(pool).post("/v1/completions", json=asked).json()
    assert found["object"] == "text_completion" and [choice["index"] for choice in found["choices"]] == [0, 1, 2, 3]
    choice = found["choices"][0]
    assert choice["text"] == "Hello there" and choice["finish_reason"] == "stop"
    assert choice["logprobs"]["tokens"] == ["Hello", " there"] and choice["logprobs"]["text_offset"] == [0, 5]
    assert found["usage"] == {"prompt_tokens": 14, "completion_tokens": 8, "total_tokens": 22, **NOT_CACHED}
    assert [job.prompt for job in pool.jobs] == [{"text": "one"}] * 2 + [{"text": "two"}] * 2
    assert {job.adapter for job in pool.jobs} == {"style"}


def test_tokens_whose_states_were_kept_are_told_once_a_prompt():
    usage = {"prompt_tokens": 7, "completion_tokens": 2, "cached_tokens": 5}
    pool = MockPool(lambda job: [Event(job.id, "done", finish="stop", usage=usage)])
    found = chat(client(pool), n=2).json()["usage"]
    assert found["prompt_tokens_details"] == {"cached_tokens": 5} and found["prompt_tokens"] == 7


def test_requests_take_turns_by_key_and_without_keys_by_address():
    pool = MockPool()
    found = client(pool, api_keys=("one", "two"), share_prefixes=True)
    for key in ("one", "two", "one"):
        for path, asked in (("/v1/chat/completions", CHAT), ("/tokenize", {"model": "demo", "prompt": "a"})):
            found.post(path, json=asked, headers={"authorization": f"Bearer {key}"})
    senders = [job.sender for job in pool.jobs]
    assert senders == [*senders[:1] * 2, *senders[2:3] * 2, *senders[:1] * 2]
    assert senders[0] != senders[2] and not any(key in "".join(senders) for key in ("one", "two"))
    pool = MockPool()
    chat(client(pool))
    assert [job.sender for job in pool.jobs] == ["testclient"]  # as TestClient calls its address


def test_without_keys_a_client_with_a_network_of_ipv6_addresses_has_one_turn():
    pool = MockPool()
    app = client(pool).app
    for address in ("2001:db8::1", "2001:db8::dead:beef", "2001:db8:0:1::1"):
        found = TestClient(app, base_url="http://127.0.0.1", client=(address, 50000))
        chat(found)
    one, same, other = [job.sender for job in pool.jobs]
    assert one == same != other


def test_a_key_has_cached_prefixes_of_its_own_unless_they_are_shared():
    def post(found, key):
        return found.post("/v1/chat/completions", json=CHAT, headers={"authorization": f"Bearer {key}"})

    def clients_of(keys, **options):
        pool = MockPool()
        found = client(pool, api_keys=("one", "two"), admin_keys=("three",), **options)
        for key in keys:
            assert post(found, key).status_code == 200
        return [job.client for job in pool.jobs]

    one, two, again, three = clients_of(("one", "two", "one ", "three"))
    assert one == again and len({one, two, three, ""}) == 4
    assert not any(key in "".join((one, two, three)) for key in ("one", "two", "three"))
    assert clients_of(("one", "two"), share_prefixes=True) == ["", ""]
    pool = MockPool()
    post(client(pool), "whatever")
    assert pool.jobs[0].client == ""  # without keys there is one client: this machine


def test_a_streamed_completion_ends_with_its_reason():
    asked = {"model": "demo", "prompt": [1, 2, 3], "stream": True}
    pool = MockPool(lambda job: words(job, "a", finish="length"))
    chunks = [json.loads(data) for _, data in events_of(client(pool).post("/v1/completions", json=asked))[:-1]]
    assert [(chunk["choices"][0]["text"], chunk["choices"][0]["finish_reason"]) for chunk in chunks] == [
        ("a", None), ("", "length")
    ]  # fmt: skip
    assert pool.jobs[0].prompt == [1, 2, 3]


@pytest.mark.parametrize("detail, more, kept", [("auto", [{"type": "text", "text": "?"}], {}), ("low", [], {"detail": "low"})])
def test_pictures_become_bytes_in_the_job_and_low_detail_and_names_reach_it(detail, more, kept):
    pool, said = MockPool(), {"role": "user", "name": "bob"} if kept else {"role": "user"}
    parts = [{"type": "image_url", "image_url": {"url": PICTURE, "detail": detail}}, *more]
    assert chat(client(pool), messages=[said | {"content": parts}]).status_code == 200
    assert pool.jobs[0].prompt == [said | {"content": [{"type": "image", "image": PNG, **kept}, *more]}]


def test_a_lenient_server_says_in_a_header_what_it_did_not_use():
    found = chat(client(lenient=True), store=True, foo=1, **{"é\n": 2})
    assert found.status_code == 200
    assert sorted(found.headers["x-trimtab-ignored"].split(", ")) == ["\\xe9?", "foo", "store"]
    many = chat(client(lenient=True), **{f"field{number}": 1 for number in range(50)}).headers["x-trimtab-ignored"]
    assert many.count("field") == 20 and many.endswith(", and 30 more")
    assert "x-trimtab-ignored" not in chat(client(lenient=True)).headers
    assert "x-trimtab-ignored" in chat(client(lenient=True), foo=1, stream=True).headers
    error = error_of(chat(client(), foo=1), 400)
    assert "not supported: foo" in error["message"] and error["param"] == "foo"


# Refusals -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fields, status, param", [
    ({"model": "nobody"}, 404, "model"),
    ({"foo": 1}, 400, "foo"),
    ({"temperature": 3}, 400, "temperature"),
    ({"messages": [{"role": "user", "content": [{"type": "text", "text": "a", "size": 1}]}]}, 400,
     "messages[0].content[0].size"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": PICTURE, "detail": "fine"}}]}]},
     400, "messages[0].content[0].image_url.detail"),
    ({"messages": [{"role": "user", "content": "a", "name": ""}]}, 400, "messages[0].name"),
    ({"messages": [{"role": "function", "content": "a", "name": "f"}]}, 400, "messages[0].role"),
    ({"messages": [{"role": "user", "content": [{"type": "file", "file": {}}]}]}, 400, "messages[0].content[0]"),
    ({"tools": [{"type": "function"}]}, 400, "tools[0].function"),
    ({"n": 9}, 400, "n"),
    ({"stream_options": {"include_usage": True}}, 400, "stream_options"),
    ({"response_format": {"type": "json_schema"}}, 400, "response_format.json_schema"),
    ({"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": {"x-guidance": {}}}}}, 400,
     "response_format.json_schema.schema"),
    ({"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": {"$ref": "#"}}}}, 400,
     "response_format.json_schema.schema"),
    ({"stop": [""]}, 400, "stop"), ({"stop": "x" * 1025}, 400, "stop"), ({"stop": ["a", "x" * 1025]}, 400, "stop[1]"),
    ({"messages": [{"role": "user", "content": "x" * 200_000}]}, 400, "messages"),
    ({"messages": [{"role": "user", "content": ""}]}, 400, "messages[0].content"),
    ({"messages": [{"role": "system", "content": "a"}, {"role": "user", "content": [{"type": "text", "text": " "}]}]}, 400,
     "messages[1].content"),
    ({"messages": [{"role": "user", "content": [
        {"type": "image_url", "image_url": {"url": "http://10.0.0.1/x.png"}}]}]}, 400,
     "messages[0].content[0].image_url.url"),
])  # fmt: skip
def test_what_is_wrong_is_named_and_asks_no_model(fields, status, param):
    pool = MockPool()
    assert error_of(chat(client(pool), **fields), status)["param"] == param and pool.jobs == []


def test_a_medium_that_the_model_does_not_take_is_refused_at_its_place():
    pool = MockPool(takes=("text",))
    parts = [{"type": "text", "text": "?"}, {"type": "image_url", "image_url": {"url": PICTURE}}]
    error = error_of(chat(client(pool), messages=[{"role": "user", "content": parts}]), 400)
    assert error["param"] == "messages[0].content[1]" and "takes text" in error["message"]


def wav(frames, rate=8000):
    held = io.BytesIO()
    with wave.open(held, "wb") as found:
        found.setparams((1, 2, rate, 0, "NONE", ""))
        found.writeframes(b"\0\0" * frames)
    return base64.b64encode(held.getvalue()).decode()


@pytest.mark.parametrize("limits, part, param, words", [
    ({"image_pixels": 899}, {"type": "image_url", "image_url": {"url": BOMB}}, "messages[0].content[1].image_url.url",
     "has 30 x 30 pixels, the limit is 899"),
    ({}, {"type": "image_url", "image_url": {"url": HUGE}}, "messages[0].content[1].image_url.url", "pixels"),
    ({"audio_s": 0.5}, {"type": "input_audio", "input_audio": {"data": wav(4001), "format": "wav"}},
     "messages[0].content[1].input_audio.data", "the limit is 0.5"),
    ({"audio_bytes": 1000}, {"type": "input_audio", "input_audio": {"data": wav(300), "format": "wav"}},
     "messages[0].content[1].input_audio.data", "bytes decoded"),
    ({"request_pixels": 1}, {"type": "image_url", "image_url": {"url": PICTURE}}, "messages[0].content[1].image_url.url",
     "the images up to here have 2 pixels, the limit of a request is 1"),
    ({"request_audio_s": 0.5}, {"type": "input_audio", "input_audio": {"data": wav(4001), "format": "wav"}},
     "messages[0].content[1].input_audio.data", "the limit of a request is 0.5"),
    ({"media_count": 1}, {"type": "image_url", "image_url": {"url": PICTURE}}, "messages[0].content[1]", "at most 1"),
    ({"messages": 1}, None, "messages", "more than 1"), ({"max_tokens": 3}, None, "max_tokens", "at most 3"),
    ({"n": 1}, None, "n", "at most 1"),
])  # fmt: skip
def test_what_is_beyond_a_limit_is_refused_at_its_place_and_asks_no_model(limits, part, param, words):
    pool = MockPool()
    picture = {"type": "image_url", "image_url": {"url": PICTURE}}
    message = {"role": "user", "content": [picture if part else {"type": "text", "text": "?"}, *([part] if part else [])]}
    fields = {} if part else {"max_tokens": 4 if "max_tokens" in limits else 1, "n": 1 + ("n" in limits)}
    messages = [message] * (2 if "messages" in limits else 1)
    error = error_of(chat(client(pool, limits=Limits(**limits)), messages=messages, **fields), 400)
    assert error["param"] == param and words in error["message"]
    assert pool.jobs == []


def test_too_many_addresses_are_refused_before_one_is_fetched(monkeypatch):
    monkeypatch.setattr("trimtab.serve.media.fetch.Fetcher._read", lambda *_: pytest.fail("fetched"))
    parts = [{"type": "image_url", "image_url": {"url": f"http://example.org/{i}.png"}} for i in range(20)]
    found = client(MockPool(), allow_fetch=("example.org",))
    assert "at most 16" in error_of(chat(found, messages=[{"role": "user", "content": parts}]), 400)["message"]


def test_the_fields_that_clients_send_back_with_an_answer_are_taken():
    pool = MockPool()
    found = client(pool)
    message = chat(found).json()["choices"][0]["message"]
    again = chat(found, messages=[*CHAT["messages"], {**message, "tool_calls": [], "annotations": []}, *CHAT["messages"]])
    assert again.status_code == 200
    assert pool.jobs[1].prompt[1] == {"role": "assistant", "content": "Hello there"}


@pytest.mark.parametrize("name", sorted(ERRORS))
def test_every_error_has_its_status_and_openais_shape(name):
    status, kind, code = ERRORS[name]
    pool = MockPool(lambda job: [failed(job, name, "why", field="here")])
    for stream in (False, True):
        error = error_of(chat(client(pool), stream=stream), status)
        param = None if name in faults.OF_NO_FIELD else "here"
        assert (error["class"], error["type"], error["code"], error["param"]) == (name, kind, code, param)
        assert error["message"] == "why"


def test_every_error_class_of_ours_is_in_the_table():
    known = {
        kind.__name__
        for module in (errors, scheduler, supervisor, faults, admission, quotas)
        for kind in vars(module).values()
        if isinstance(kind, type) and issubclass(kind, TrimtabError)
    }
    # The root is never raised; the worker's own word travels with the error it carries.
    assert known - {"TrimtabError", "WorkerError"} == set(ERRORS)


def test_the_table_of_errors_in_the_docs_is_this_one():
    rows = re.findall(r"^\| (\d+) \| (\w+) \| (\w+) \|", (ROOT / "docs" / "server-api.md").read_text("utf-8"), re.M)
    assert {name: (int(status), code) for status, name, code in rows} == {
        name: (status, code) for name, (status, _, code) in ERRORS.items()
    }


def test_every_metric_and_limit_in_the_docs_is_one_of_the_servers():
    text = (ROOT / "docs" / "operate.md").read_text("utf-8")
    metrics = {family.name for family in Metrics().registry.collect() if not family.name.startswith("process_")}
    assert {name.removesuffix("_total") for name in re.findall(r"`(trimtab_\w+)`", text)} == metrics
    named = set(re.findall(r"--limit (\w+)=N", text)) | set(re.findall(r"`(\w+)=N`", text))
    assert named - {"NAME"} == {item.name for item in fields(Limits)}


def test_a_full_queue_says_when_to_come_again():
    def full(job):
        return [QueueFullError(64, 2.6)]

    for stream in (False, True):
        found = chat(client(MockPool(full)), stream=stream)
        error = error_of(found, 429)
        assert error["class"] == "QueueFullError" and error["param"] is None and found.headers["retry-after"] == "3"


def test_an_error_of_the_servers_own_tells_nothing():
    def broken(job):
        raise ValueError("/home/someone/secret")

    for stream in (False, True):
        error = error_of(chat(client(MockPool(broken)), stream=stream), 500)
        assert error["code"] == "bug" and "someone" not in json.dumps(error)


def test_no_path_of_this_machine_leaves():
    path = "/srv/models/my adapter/adapter_model.safetensors"
    message = f"{path}: bad header in C:\\Users\\me\\x.bin near /usr/lib/python3/x.py and/or /v1/models"
    pool = MockPool(lambda job: [failed(job, "CheckpointError", message, path=path, problems=[f"{path} is short"])])
    text = chat(client(pool)).text
    assert "srv" not in text and "Users" not in text and "usr" not in text and "my adapter" not in text
    assert "bad header" in text and "and/or" in text and "the file is short" in text


# Streams --------------------------------------------------------------------------------------------------------------


def test_an_error_in_a_stream_is_an_event_and_the_stream_has_no_end_mark():
    pool = MockPool(late(lambda job: failed(job, "WorkerDiedError", "gone", exit_code=-9)))
    events = events_of(chat(client(pool), stream=True))
    assert [name for name, _ in events] == [None, None, "error"]
    assert json.loads(events[1][1])["choices"][0]["delta"] == {"content": "so far"}
    error = json.loads(events[2][1])["error"]
    assert (error["class"], error["fields"]) == ("WorkerDiedError", {"exit_code": -9})


def test_an_error_raised_in_a_stream_is_an_event_too():
    events = events_of(chat(client(MockPool(late(lambda _: DeviceError("gone", device="worker")))), stream=True))
    assert events[-1][0] == "error" and json.loads(events[-1][1])["error"]["class"] == "DeviceError"


def test_a_stream_begins_without_text_when_the_model_takes_its_time(monkeypatch):
    monkeypatch.setattr(answers, "HOLD_S", 0.0)

    async def without_text(job):
        await turns(20)
        yield failed(job, "DeviceError", "out of memory")

    found = chat(client(MockPool(without_text)), stream=True)
    assert found.status_code == 200 and events_of(found)[-1][0] == "error"


def test_one_choices_error_ends_the_whole_answer():
    def one(job):
        return [failed(job, "DeviceError")] if job.request.seed == 8 else forever(job)

    pool = MockPool(one)
    assert error_of(chat(client(pool), n=2, seed=7), 503)["class"] == "DeviceError"
    assert sorted(pool.left) == sorted(job.id for job in pool.jobs)


async def drive_raw(app, body, leaves=None, *, path="/v1/chat/completions", send_wait=None):
    """Call the app as a server would; returns what it sent. leaves: ends when the client leaves (None: it stays)."""
    sent, first = [], [{"type": "http.request", "body": body, "more_body": False}]

    async def receive():
        if first:
            return first.pop()
        await (asyncio.Event().wait() if leaves is None else leaves())
        return {"type": "http.disconnect"}

    async def send(message):
        sent.append(message)
        if send_wait is not None and message["type"] == "http.response.body":
            await send_wait()

    scope = {
        "type": "http", "asgi": {"version": "3.0", "spec_version": "2.3"}, "http_version": "1.1", "method": "POST",
        "path": path, "raw_path": path.encode(), "query_string": b"", "root_path": "", "scheme": "http",
        "headers": [(b"host", b"localhost"), (b"content-type", b"application/json")], "client": None, "server": None,
    }  # fmt: skip
    await asyncio.wait_for(app(scope, receive, send), 2 * WAIT_S)
    return sent


def drive(app, body, leaves=None, **options):
    return asyncio.run(drive_raw(app, json.dumps(body).encode(), leaves, **options))


def once_begun(pool, choices, waits):
    """Return how a client leaves in the midst of its answer: bodies are read on threads, which may take a while to begin. waits:
    the turns of other tasks before it does."""

    async def leaves():
        while len(pool.jobs) < choices:
            await turns()
        await turns(waits)

    return leaves


async def silent(job):
    yield Event(job.id, "started")
    await asyncio.Event().wait()


@pytest.mark.parametrize("answers, fields, waits", [
    (forever, {"stream": False, "n": 1}, 20), (forever, {"stream": False, "n": 3}, 20), (forever, {"stream": True, "n": 1}, 20),
    (forever, {"stream": True, "n": 3}, 20), (silent, {"stream": True}, 20),  # before the first text
    (forever, {"stream": True}, 0),  # before its stream began
])  # fmt: skip
def test_a_client_that_leaves_cancels_its_jobs(answers, fields, waits):
    pool, metrics, choices = MockPool(answers), Metrics(), fields.get("n", 1)
    drive(make_app(pool, Settings(page=False), metrics), {**CHAT, **fields}, once_begun(pool, choices, waits))
    assert len(pool.jobs) == choices and sorted(pool.left) == sorted(job.id for job in pool.jobs)
    assert [seen["ended"] for seen in metrics.recent()] == ["cancelled"]


def test_a_reader_that_takes_nothing_is_given_up():
    pool = MockPool(forever)
    app = make_app(pool, Settings(page=False, limits=Limits(send_s=0.1)), Metrics())

    drive(app, {**CHAT, "stream": True}, send_wait=lambda: asyncio.Event().wait())
    assert len(pool.left) == 1


def test_a_slow_reader_costs_no_more_than_the_text_it_has_not_read():
    async def many():
        async def stream():
            for _ in range(10_000):
                yield Event("1", "text", text="x")
            yield Event("1", "done", finish="stop")

        merged = answers.Merged([stream()])
        await merged.begun()
        await until_async(lambda: any(event.kind == "done" for _, event in merged._waiting))
        assert len(merged._waiting) == 2
        return "".join([event.text async for _, event in merged])

    assert asyncio.run(many()) == "x" * 10_000


@pytest.mark.parametrize("field, value", [("temperature", 1e-38), ("temperature", 5e-324), ("repetition_penalty", 1e-39)])
def test_what_would_leave_the_numbers_of_the_logits_is_the_clients_mistake(field, value):
    response = chat(client(pool := MockPool()), **{field: value})
    assert error_of(response, 400)["param"] == field and "retry-after" not in response.headers and pool.jobs == []


# The way in -----------------------------------------------------------------------------------------------------------


def test_a_key_is_needed_where_one_is_set():
    pool = MockPool()
    found = client(pool, api_keys=("first", "second"), host="0.0.0.0", base_url="http://example.org")
    for headers in (
        {}, {"authorization": "Bearer wrong"}, {"authorization": "Basic first"}, {"authorization": "Bearer"},
        {"authorization": "Bearer first second"}, {"authorization": "first"},
    ):  # fmt: skip
        response = found.post("/v1/chat/completions", json=CHAT, headers=headers)
        assert error_of(response, 401)["code"] == "invalid_api_key"
        assert response.headers["www-authenticate"] == "Bearer" and "first" not in response.text
    for path in ("/v1/models", "/metrics", "/api/status", "/openapi.json"):
        assert found.get(path).status_code == 401
    assert (found.get("/health").status_code, found.get("/ready").status_code) == (200, 200)
    assert pool.jobs == []
    for key in ("first", "second"):
        assert found.get("/v1/models", headers={"authorization": f"Bearer {key}"}).status_code == 200


ADMIN = (("/v1/load_lora_adapter", {"lora_name": "a", "lora_path": "a"}), ("/v1/unload_lora_adapter", {"lora_name": "style"}))


def test_administration_needs_a_key_of_its_own(tmp_path):
    (tmp_path / "a").mkdir()
    pool, base = MockPool(), {"host": "0.0.0.0", "base_url": "http://example.org", "adapter_root": tmp_path}
    off = client(pool, api_keys=("one",), **base)
    found = client(pool, api_keys=("one",), admin_keys=("two", "three"), **base)
    for path, sent in ADMIN:
        # Without an admin key nobody may; with one, who has only an API key may not.
        for server, code in ((off, "admin_off"), (found, "admin_key_needed")):
            error = error_of(server.post(path, json=sent, headers={"authorization": "Bearer one"}), 403)
            assert (error["code"], error["type"]) == (code, "permission_error")
        error_of(found.post(path, json=sent), 401)
        error_of(off.post(path, json=sent, headers={"authorization": "Bearer two"}), 401)
    assert pool.calls == []
    for path, sent in ADMIN[:2]:
        assert found.post(path, json=sent, headers={"authorization": "Bearer three"}).status_code == 200
    assert [call[0] for call in pool.calls] == ["load", "unload"]
    # It opens what an API key opens.
    assert found.get("/v1/models", headers={"authorization": "Bearer two"}).status_code == 200
    # On this machine alone, without API keys: clients ask freely, and administration has its key.
    local = client(pool, admin_keys=("two",), adapter_root=tmp_path)
    assert chat(local).status_code == 200
    assert error_of(local.post(ADMIN[1][0], json=ADMIN[1][1]), 403)["code"] == "admin_key_needed"


def test_every_key_is_compared_in_constant_time(monkeypatch):
    compared = []

    def compare(one, other):
        compared.append((len(one), len(other)))
        return hmac_compare(one, other)

    hmac_compare = hmac.compare_digest
    monkeypatch.setattr("trimtab.serve.api.admission.hmac.compare_digest", compare)
    found = client(MockPool(), api_keys=("a", "a-much-longer-key"))
    for key, status in (("a", 200), ("b" * 100, 401), ("", 401)):
        assert found.get("/v1/models", headers={"authorization": f"Bearer {key}"}).status_code == status
    # All keys each time, also after one that matched, and digests of one length whatever the keys' is.
    assert compared == [(32, 32)] * 6


@pytest.mark.parametrize("keys", [(), ("key",)])
def test_a_body_above_the_limit_is_refused_with_and_without_a_length(keys):
    found = client(MockPool(), api_keys=keys, limits=Limits(body_bytes=1000, media_body_bytes=1000))
    headers = {"authorization": "Bearer key", "content-type": "application/json"}
    body = json.dumps({**CHAT, "user": "x" * 2000}).encode()
    assert error_of(found.post("/v1/chat/completions", content=body, headers=headers), 413)["code"] == "body_too_large"

    def pieces():
        for start in range(0, len(body), 100):
            yield body[start : start + 100]

    error_of(found.post("/v1/chat/completions", content=pieces(), headers=headers), 413)


def test_a_page_of_another_site_cannot_reach_a_server_without_a_key():
    pool = MockPool()
    for host in (
        "http://evil.example",
        "http://127.0.0.1.evil.example:8000",
        "http://[2001:db8::1]",
        "http://127.0.0.1%.evil.example",
    ):
        assert error_of(chat(client(pool, base_url=host)), 421)["code"] == "wrong_host"
    error_of(client(pool).post("/v1/chat/completions", json=CHAT, headers={"host": "[::1]evil.example"}), 421)
    for host in ("localhost:8000", "127.0.0.1:1", "[::1]:8000", "demo.localhost"):
        assert chat(client(pool, base_url=f"http://{host}")).status_code == 200
    # What a browser sends to another site without asking first is no JSON.
    for kind in ("text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=x", ""):
        response = client(pool).post("/v1/chat/completions", content=json.dumps(CHAT), headers={"content-type": kind})
        error_of(response, 415)


def test_a_compressed_body_is_refused():
    headers = {"content-type": "application/json", "content-encoding": "gzip"}
    error_of(client().post("/v1/chat/completions", content=b"\x1f\x8b", headers=headers), 415)


def test_other_sites_may_call_only_if_they_are_named():
    ask = {"origin": "https://app.example", "access-control-request-method": "POST",
           "access-control-request-headers": "authorization,x-stainless-os"}  # fmt: skip
    closed = client().options("/v1/chat/completions", headers=ask)
    assert closed.status_code == 405 and "access-control-allow-origin" not in closed.headers
    found = client(MockPool(), cors_origins=("https://app.example",), api_keys=("key",))
    opened = found.options("/v1/chat/completions", headers=ask)
    assert opened.status_code == 200 and opened.headers["access-control-allow-origin"] == "https://app.example"
    other = found.options("/v1/chat/completions", headers={**ask, "origin": "https://other.example"})
    assert "access-control-allow-origin" not in other.headers


def test_unknown_ways_and_methods_are_errors_in_the_same_shape():
    found = client()
    nothing = error_of(found.get("/v1/nothing"), 404)
    assert nothing["code"] == "not_found" and "GET /openapi.json" in nothing["message"]
    for typed, meant in (("/v1/modles", "/v1/models"), ("/chat/completions", "/v1/chat/completions")):
        assert f"There is no such route (did you mean {meant}" in error_of(found.get(typed), 404)["message"]
    response = found.get("/v1/chat/completions")
    assert error_of(response, 405)["code"] == "method_not_allowed" and "POST" in response.headers["allow"]
    for method in ("PUT", "DELETE", "PATCH", "TRACE", "OPTIONS"):
        error_of(found.request(method, "/v1/models"), 405)
    response = found.post("/v1/chat/completions/", json=CHAT, follow_redirects=False)
    assert response.status_code == 404


# What else there is ---------------------------------------------------------------------------------------------------


def test_models_are_listed_and_each_name_is_known():
    found = client()
    assert [(m["id"], m["parent"]) for m in found.get("/v1/models").json()["data"]] == [("demo", None), ("style", "demo")]
    for name in ("demo", "style", "demo:style"):
        assert found.get(f"/v1/models/{name}").json()["id"] == name
    assert error_of(found.get("/v1/models/nobody"), 404)["class"] == UnknownModelError.__name__


def test_adapters_are_loaded_below_the_root_only_and_unloaded(tmp_path):
    (tmp_path / "a").mkdir()
    pool = MockPool()
    found = client(pool, adapter_root=tmp_path)
    asked = {"lora_name": "a", "lora_path": "a", "load_inplace": False}
    assert found.post("/v1/load_lora_adapter", json=asked).json() == {"status": "loaded", "lora_name": "a"}
    assert pool.calls == [("load", None, "a", str((tmp_path / "a").resolve()))]
    assert chat(found, model="a").status_code == 200
    assert found.post("/v1/unload_lora_adapter", json={"lora_name": "a", "lora_int_id": 1}).status_code == 200
    assert error_of(chat(found, model="a"), 404)
    for path in ("..", "../x", "/etc", "nothing"):
        error = error_of(found.post("/v1/load_lora_adapter", json={**asked, "lora_path": path}), 400)
        assert error["param"] == "lora_path" and str(tmp_path) not in error["message"]
    error = error_of(found.post("/v1/load_lora_adapter", json={**asked, "lora_name": "bad"}), 400)
    assert error["param"] == "lora_name"
    error_of(client().post("/v1/load_lora_adapter", json=asked), 400)


def test_health_is_the_process_and_ready_is_the_model():
    pool = MockPool()
    found = client(pool)
    assert (found.get("/health").status_code, found.get("/ready").json()) == (200, {"status": "ready"})
    pool.is_ready = False
    assert (found.get("/health").status_code, found.get("/ready").status_code) == (200, 503)
    assert found.head("/ready").status_code == 503
    for states, word in (
        (("loading", "failed"), "loading"), (("restarting",), "loading"), (("failed", "failed"), "failed"),
        (("ready", "stopped"), "stopping"), (("unresponsive", "stopped"), "unresponsive"),
    ):  # fmt: skip
        pool.status = lambda states=states: {"models": [{"state": state} for state in states]}
        assert (found.get("/ready").status_code, found.get("/ready").json()) == (503, {"status": word})


def test_the_pool_starts_and_drains_with_the_app():
    pool = MockPool()
    with client(pool, grace_s=7.0) as found:
        assert pool.is_started and found.get("/health").status_code == 200
    assert pool.drained == 7.0


def test_what_the_page_reads_has_no_paths_and_the_last_requests():
    found = client(pool := MockPool())
    chat(found)
    status = found.get("/api/status").json()
    assert pool.refreshes == 1 and status["models"][0]["plan"]["request"]["model"] == "[path]"
    assert [(seen["model"], seen["ended"]) for seen in status["requests"]] == [("demo", "done")]


def test_the_description_names_what_the_server_reads():
    found = client().get("/openapi.json").json()
    assert set(found["paths"]["/v1/chat/completions"]["post"]["responses"]) >= {"200", "400", "404", "429", "503"}
    schema = found["components"]["schemas"]["ChatRequest"]
    assert schema["additionalProperties"] is False and "messages" in schema["required"]
    assert "securitySchemes" not in found["components"]
    for path, methods in found["paths"].items():
        assert client().request(next(iter(methods)), path.replace("{name}", "demo")).status_code not in (404, 405)
    assert "404" in found["paths"]["/v1/models/{name}"]["get"]["responses"]
    stream = found["paths"]["/v1/chat/completions"]["post"]["responses"]["200"]["content"]["text/event-stream"]
    end, error, piece = stream["itemSchema"]["anyOf"]
    assert piece["properties"]["data"]["contentSchema"] == {"$ref": "#/components/schemas/ChatCompletionChunk"}
    assert error["properties"]["event"] == {"const": "error"} and end["properties"]["data"] == {"const": "[DONE]"}
    stream = found["paths"]["/v1/messages"]["post"]["responses"]["200"]["content"]["text/event-stream"]
    piece = stream["itemSchema"]["anyOf"][1]["properties"]
    assert piece["data"]["contentSchema"] == {"$ref": "#/components/schemas/MessageStart"}
    assert piece["event"] == {"enum": ["message_start"]}


@pytest.mark.parametrize("stream", [False, True])
def test_answers_have_the_fields_of_their_types_and_no_others(stream):
    found, text = client(), {"model": "demo", "prompt": "a", "logprobs": 1}
    for path, asked in {
        "/health": None, "/v1/models": None, "/v1/models/style": None, CHATS: {**CHAT, "logprobs": True}, COMPLETIONS: text,
        MESSAGES: {**CHAT, "max_tokens": 3}, "/nothing": None,
    }.items():  # fmt: skip
        route = ROUTES.get("/v1/models/{name}" if path.endswith("style") else path) or Described("", Error)
        if not stream:
            answers, kind = [(found.get(path) if asked is None else found.post(path, json=asked)).json()], route.answer
        elif path not in (CHATS, COMPLETIONS):
            continue
        else:
            answers, kind = (
                [json.loads(data) for _, data in events_of(found.post(path, json={**asked, "stream": True}))[:-1]],
                route.event,
            )
        for answer in answers:
            TypeAdapter(kind).validate_python(answer, strict=True, extra="forbid")


def test_every_route_of_the_api_is_described():
    app = client().app
    routes = {route.path.replace("{name:path}", "{name}") for route in app.routes}
    assert routes == set(description(has_key=True)["paths"])


def test_administration_is_described_with_what_refuses_it():
    found = description(has_key=True, beside=BESIDE)["paths"]
    for path in ADMIN_PATHS:
        assert {"401", "403"} <= set(found[path]["post"]["responses"])
    assert "403" not in found["/v1/completions"]["post"]["responses"]


@pytest.mark.parametrize("method, path, allowed", [
    ("POST", "/health", "GET"), ("POST", "/v1/models", "GET"), ("POST", "/v1/models/demo", "GET"), ("PUT", "/metrics", "GET"),
    ("GET", "/v1/chat/completions", "POST"), ("DELETE", "/v1/load_lora_adapter", "POST"), ("POST", "/openapi.json", "GET"),
])  # fmt: skip
def test_a_path_with_another_method_is_405_whatever_the_body_is(method, path, allowed):
    for headers in ({}, {"content-type": "text/plain"}, {"content-type": "application/json"}):
        response = client().request(method, path, content=b"{", headers=headers)
        assert error_of(response, 405)["code"] == "method_not_allowed" and allowed in response.headers["allow"]


def test_the_api_process_imports_no_torch():
    code = (
        "import sys, trimtab.serve.run, trimtab.serve.http.page, trimtab.cli.commands.serve, PIL.Image\n"
        "heavy = {'torch', 'numpy', 'transformers', 'bitsandbytes', 'safetensors'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_refusals_of_ours_keep_their_fields():
    refused = faults.plain_error(RequestError("no", field="a", value=1, allowed=("b",)))
    assert faults.error_json(refused)[1]["error"]["fields"] == {"field": "a", "value": 1, "allowed": ["b"]}
