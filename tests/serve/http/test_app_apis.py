"""Anthropic's Messages, OpenAI's Responses, embeddings and tokens over HTTP, on a pool without models."""

import base64
import json
import re
import struct
from pathlib import Path

import pytest
from pydantic import TypeAdapter

from tests.serve.http.test_app import PICTURE, PNG, events_of, wav
from tests.serve.http.test_app_calling import called
from tests.serving import USAGE, MockPool, client, failed, late, words
from trimtab.serve.api.routes import ROUTES
from trimtab.serve.contract.job import Event

RECORD = json.loads((Path(__file__).parents[2] / "data" / "named_events.json").read_text("utf-8"))
ASK = {"model": "demo", "max_tokens": 9, "messages": [{"role": "user", "content": "Hello"}]}


def messages(found, **fields):
    return found.post("/v1/messages", json={**ASK, **fields})


def responses(found, **fields):
    return found.post("/v1/responses", json={"model": "demo", "input": "Hello", **fields})


def named(response):
    """Return the data of a stream, and check that each event is called after its type."""
    events = [(name, json.loads(data)) for name, data in events_of(response)]
    assert all(name == data["type"] for name, data in events)
    return [data for _, data in events]


@pytest.mark.parametrize("name", RECORD)
def test_a_body_is_that_of_the_record_byte_for_byte_and_of_its_described_type(name):
    one = RECORD[name]
    several = lambda job: called(job, text="I look. é☃\U0001f600", thought="Hm.")  # noqa: E731
    pool = MockPool(several if one["answer"] == "several parts" else lambda job: words(job, "abc", finish="length"))
    found, route = client(pool).post(one["path"], json=one["asked"]), ROUTES[one["path"]]
    text = re.sub(r"(?<=created_at\":)( ?)\d+", " 0", re.sub(r"[0-9a-f]{32}", "ID", found.text))
    is_streamed = one["asked"]["stream"]
    assert (text.split("\n\n") if is_streamed else text) == one["body"]
    for answer in named(found) if is_streamed else [found.json()]:
        kind = route.event if is_streamed else route.answer
        TypeAdapter(kind).validate_python(answer, strict=True, extra="forbid")


# Anthropic ------------------------------------------------------------------------------------------------------------


def test_a_message_is_answered_in_anthropics_shape():
    pool = MockPool()
    found = messages(client(pool), system="be brief", stop_sequences=["x"], top_k=3, temperature=0.5).json()
    assert found["id"].startswith("msg_") and found["type"] == "message" and found["role"] == "assistant"
    assert found["content"] == [{"type": "text", "text": "Hello there"}] and found["stop_reason"] == "end_turn"
    assert found["usage"] == {"input_tokens": 7, "output_tokens": 2, "cache_read_input_tokens": 0, "cache_creation_input_tokens": 0}
    job = pool.jobs[0]
    assert job.prompt == [{"role": "system", "content": "be brief"}, {"role": "user", "content": "Hello"}]
    assert (job.request.max_new_tokens, job.request.stop, job.request.top_k) == (9, ("x",), 3)


def test_blocks_of_every_kind_reach_the_job():
    pool = MockPool()
    source = {"type": "base64", "media_type": "image/png", "data": base64.b64encode(PNG).decode()}
    turns = [
        {"role": "user", "content": [{"type": "image", "source": source}, {"type": "text", "text": "?"}]},
        {"role": "assistant", "content": [
            {"type": "thinking", "thinking": "Hm."}, {"type": "text", "text": "I look."},
            {"type": "tool_use", "id": "c1", "name": "f", "input": {"a": 1}}]},
        {"role": "user", "content": [
            {"type": "tool_result", "tool_use_id": "c1", "content": [{"type": "text", "text": "12"}], "is_error": True},
            {"type": "text", "text": "Well?"}]},
    ]  # fmt: skip
    tools = [{"name": "f", "description": "d", "input_schema": {"type": "object"}}]
    choice = {"type": "tool", "name": "f", "disable_parallel_tool_use": True}
    found = messages(
        client(pool), messages=turns, tools=tools, tool_choice=choice, thinking={"type": "enabled", "budget_tokens": 5}
    )
    assert found.is_success and found.headers["x-trimtab-ignored"] == "thinking.budget_tokens"
    job = pool.jobs[0]
    call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": {"a": 1}}}
    assert job.prompt == [
        {"role": "user", "content": [{"type": "image", "image": PNG}, {"type": "text", "text": "?"}]},
        {"role": "assistant", "content": "I look.", "reasoning_content": "Hm.", "tool_calls": [call]},
        {"role": "tool", "content": "Error: 12", "tool_call_id": "c1", "name": "f"},
        {"role": "user", "content": [{"type": "text", "text": "Well?"}]},
    ]  # fmt: skip
    assert (job.must_call, job.several_calls, job.template_kwargs) == ("f", False, {"enable_thinking": True})
    assert job.tools == [{"type": "function", "function": {"name": "f", "description": "d", "parameters": {"type": "object"}}}]


def test_calls_and_thoughts_come_as_blocks():
    pool = MockPool(lambda job: called(job, text="I look.", thought="Hm."))
    found = messages(client(pool), tools=[{"name": "f", "input_schema": {"type": "object"}}]).json()
    assert found["content"] == [
        {"type": "thinking", "thinking": "Hm.", "signature": ""}, {"type": "text", "text": "I look."},
        {"type": "tool_use", "id": "c1", "name": "f", "input": {"a": 1}},
        {"type": "tool_use", "id": "c2", "name": "g", "input": {}},
    ]  # fmt: skip
    assert found["stop_reason"] == "tool_use"


def test_a_message_is_streamed_in_anthropics_events():
    pool = MockPool(lambda job: called(job, text="I look.", thought="Hm."))
    events = named(messages(client(pool), stream=True))
    assert [event["type"] for event in events] == [
        "message_start",
        "content_block_start", "content_block_delta", "content_block_stop",
        "content_block_start", "content_block_delta", "content_block_stop",
        "content_block_start", "content_block_delta", "content_block_delta", "content_block_stop",
        "content_block_start", "content_block_delta", "content_block_stop",
        "message_delta", "message_stop",
    ]  # fmt: skip
    assert [event["index"] for event in events[1:-2]] == [0] * 3 + [1] * 3 + [2] * 4 + [3] * 3
    assert events[7]["content_block"] == {"type": "tool_use", "id": "c1", "name": "f", "input": {}}
    assert events[8]["delta"] == {"type": "input_json_delta", "partial_json": '{"a"'}
    assert events[-2]["delta"] == {"stop_reason": "tool_use", "stop_sequence": None} and events[-2]["usage"]["output_tokens"] == 2


@pytest.mark.parametrize("finish, stop_text, expected", [
    ("stop", None, ("end_turn", None)), ("stop", "x", ("stop_sequence", "x")), ("length", None, ("max_tokens", None)),
])  # fmt: skip
def test_how_a_message_ended_is_said(finish, stop_text, expected):
    end = lambda job: Event(job.id, "done", finish=finish, usage={**USAGE, "stop_text": stop_text})  # noqa: E731
    found = messages(client(MockPool(lambda job: [*words(job, "a")[:-1], end(job)]))).json()
    assert (found["stop_reason"], found["stop_sequence"]) == expected


def test_more_tokens_than_there_are_is_as_many_as_there_are():
    # Clients that have to say a number say that of the model that they were made for.
    pool = MockPool()
    assert messages(client(pool), max_tokens=64_000).is_success
    assert (pool.jobs[0].request.max_new_tokens, pool.jobs[0].fills_context) == (384, True)


def test_a_last_message_of_the_assistant_is_continued():
    pool = MockPool()
    half = [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": [{"type": "text", "text": "Hel"}]}]
    assert messages(client(pool), messages=half).is_success and messages(client(pool), messages=half[:1]).is_success
    assert [job.continue_final_message for job in pool.jobs] == [True, False]
    assert messages(client(pool), messages=[half[0], {"role": "assistant", "content": " "}]).status_code == 400
    choice = {"tools": [{"name": "f", "input_schema": {"type": "object"}}], "tool_choice": {"type": "any"}}
    assert messages(client(pool), messages=half, **choice).status_code == 400


def test_a_call_that_was_cut_says_so():
    def cut(job):
        pieces = [{"index": 0, "id": "c", "name": "f", "arguments": ""}, {"index": 0, "arguments": '{"a'}]
        yield from (Event(job.id, "call", call=piece) for piece in pieces)
        yield Event(job.id, "done", finish="length", usage=USAGE)

    assert messages(client(MockPool(cut))).json()["content"][0]["input"] == {"not_json": '{"a'}


@pytest.mark.parametrize("fields, status, kind", [
    ({"model": "nobody"}, 404, "not_found_error"), ({"max_tokens": None}, 400, "invalid_request_error"),
    ({"foo": 1}, 400, "invalid_request_error"), ({"tool_choice": {"type": "tool"}}, 400, "invalid_request_error"),
    ({"messages": [{"role": "user", "content": [{"type": "document"}]}]}, 400, "invalid_request_error"),
    ({"messages": [{"role": "assistant", "content": [{"type": "tool_result", "tool_use_id": "a"}]}]}, 400,
     "invalid_request_error"),
    ({"messages": [{"role": "user", "content": [{"type": "tool_use", "id": "a", "name": "f", "input": {}}]}]}, 400,
     "invalid_request_error"),
    ({"messages": [{"role": "user", "content": "x" * 3_000_000}]}, 413, "request_too_large"),
])  # fmt: skip
def test_errors_have_anthropics_form(fields, status, kind):
    found = messages(client(MockPool(takes=("text",))), **fields)
    assert found.status_code == status, found.text
    body = found.json()
    assert body["type"] == "error" and body["error"]["type"] == kind and body["error"]["message"]


def test_an_error_of_the_worker_has_anthropics_form_whole_and_in_a_stream():
    pool = MockPool(lambda job: [failed(job, "DeviceError")])
    assert messages(client(pool)).json()["error"]["type"] == "overloaded_error"

    pool = MockPool(late(lambda job: failed(job, "DeviceError")))
    (name, data) = events_of(messages(client(pool), stream=True))[-1]
    assert name == "error" and json.loads(data)["type"] == "error"


def test_anthropics_key_opens_the_door_and_a_wrong_one_does_not():
    found = client(api_keys=("key",))
    assert found.post("/v1/messages", json=ASK, headers={"x-api-key": "key"}).is_success
    wrong = found.post("/v1/messages", json=ASK, headers={"x-api-key": "wrong"})
    assert wrong.status_code == 401 and wrong.headers["www-authenticate"] == "Bearer"
    assert (wrong.json()["type"], wrong.json()["error"]["type"]) == ("error", "authentication_error")
    # Whichever of the two was checked elsewhere, it may have been the other one.
    both = {"x-api-key": "key", "authorization": "Bearer wrong"}
    assert found.post("/v1/messages", json=ASK, headers=both).status_code == 400


def test_clients_with_anthropics_keys_share_no_beginnings():
    pool = MockPool()
    found = client(pool, api_keys=("one", "two"))
    for headers in ({"x-api-key": "one"}, {"x-api-key": "two"}, {"authorization": "Bearer one"}):
        assert found.post("/v1/messages", json=ASK, headers=headers).is_success
    first, second, third = (job.client for job in pool.jobs)
    assert first == third != second


# Responses ------------------------------------------------------------------------------------------------------------


def test_a_response_is_answered_in_openais_shape():
    pool = MockPool()
    found = responses(client(pool), instructions="be brief", max_output_tokens=9, temperature=0.5).json()
    assert found["id"].startswith("resp_") and found["object"] == "response" and found["status"] == "completed"
    (item,) = found["output"]
    assert item["type"] == "message" and item["role"] == "assistant" and item["status"] == "completed"
    assert item["content"] == [{"type": "output_text", "text": "Hello there", "annotations": [], "logprobs": []}]
    assert (found["store"], found["previous_response_id"], found["instructions"]) == (False, None, "be brief")
    assert (found["usage"]["input_tokens"], found["usage"]["output_tokens"], found["usage"]["total_tokens"]) == (7, 2, 9)
    job = pool.jobs[0]
    assert job.prompt == [{"role": "system", "content": "be brief"}, {"role": "user", "content": "Hello"}]
    assert (job.request.max_new_tokens, job.request.temperature) == (9, 0.5)


def test_items_of_every_kind_reach_the_job():
    pool = MockPool()
    items = [
        {"role": "user", "content": [{"type": "input_text", "text": "?"}, {"type": "input_image", "image_url": PICTURE}]},
        {"type": "reasoning", "id": "r", "summary": [], "content": [{"type": "reasoning_text", "text": "Hm."}]},
        {"type": "message", "id": "m", "status": "completed", "role": "assistant",
         "content": [{"type": "output_text", "text": "I look.", "annotations": []}]},
        {"type": "function_call", "id": "f", "call_id": "c1", "name": "f", "arguments": '{"a": 1}'},
        {"type": "function_call", "call_id": "c2", "name": "g", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c1", "output": "12"},
        {"type": "function_call_output", "call_id": "c2", "output": [{"type": "input_text", "text": "13"}]},
        {"role": "assistant", "content": "It is."}, {"role": "assistant", "content": "Yes."},
    ]  # fmt: skip
    tools = [{"type": "function", "name": name, "parameters": {"type": "object"}, "strict": True} for name in "fg"]
    found = responses(
        client(pool), input=items, tools=tools, tool_choice={"type": "function", "name": "g"}, reasoning={"effort": "low"}
    )
    assert found.is_success, found.text
    job = pool.jobs[0]
    calls = [{"id": f"c{number}", "type": "function", "function": {"name": name, "arguments": given}}
             for number, name, given in ((1, "f", {"a": 1}), (2, "g", {}))]  # fmt: skip
    assert job.prompt == [
        {"role": "user", "content": [{"type": "text", "text": "?"}, {"type": "image", "image": PNG}]},
        {"role": "assistant", "content": "I look.", "reasoning_content": "Hm.", "tool_calls": calls},
        {"role": "tool", "content": "12", "tool_call_id": "c1", "name": "f"},
        {"role": "tool", "content": "13", "tool_call_id": "c2", "name": "g"},
        {"role": "assistant", "content": "It is."}, {"role": "assistant", "content": "Yes."},
    ]  # fmt: skip
    assert (job.must_call, len(job.tools), job.template_kwargs) == ("g", 2, {"reasoning_effort": "low"})
    assert "x-trimtab-ignored" not in found.headers
    for strict in (True, False):
        pool = MockPool()
        free = responses(client(pool), tools=[tools[0] | {"strict": strict}, tools[1] | {"strict": False}], tool_choice="auto")
        assert free.is_success and "x-trimtab-ignored" not in free.headers
        assert (pool.jobs[0].must_call, pool.jobs[0].holds_calls) == (None, strict)


def test_a_sound_of_a_response_is_that_of_a_chat():
    sound = {"type": "input_audio", "input_audio": {"data": wav(300), "format": "wav"}}
    pool = MockPool()
    text = {"type": "input_text", "text": "?"}
    found = responses(client(pool), input=[{"role": "user", "content": [text, sound]}])
    assert found.is_success, found.text
    chat = [{"role": "user", "content": [{"type": "text", "text": "?"}, sound]}]
    asked = client(pool).post("/v1/chat/completions", json={"model": "demo", "messages": chat})
    assert asked.is_success and pool.jobs[0].prompt == pool.jobs[1].prompt
    assert pool.jobs[0].prompt[0]["content"][1]["type"] == "audio"
    refused = responses(
        client(pool), input=[{"role": "user", "content": "a"}, {"type": "function_call_output", "call_id": "c", "output": [sound]}]
    )
    assert refused.json()["error"]["message"].startswith("input[1].output[0]: not supported: audio here")


def test_a_response_is_streamed_in_openais_events():
    pool = MockPool(lambda job: called(job, text="I look.", thought="Hm."))
    events = named(responses(client(pool), stream=True))
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    kinds = [event["type"].removeprefix("response.") for event in events]
    assert kinds == [
        "created", "in_progress",
        "output_item.added", "reasoning_text.delta", "reasoning_text.done", "output_item.done",
        "output_item.added", "content_part.added", "output_text.delta", "output_text.done", "content_part.done", "output_item.done",
        "output_item.added", *["function_call_arguments.delta"] * 2, "function_call_arguments.done", "output_item.done",
        "output_item.added", "function_call_arguments.delta", "function_call_arguments.done", "output_item.done",
        "completed",
    ]  # fmt: skip
    whole = events[-1]["response"]
    assert [item["type"] for item in whole["output"]] == ["reasoning", "message", "function_call", "function_call"]
    assert whole["output"][2]["arguments"] == '{"a": 1}' and whole["output"][2]["call_id"] == "c1"
    assert events[0]["response"]["output"] == [] and events[0]["response"]["usage"] is None


def test_a_response_that_was_cut_is_incomplete():
    pool = MockPool(lambda job: words(job, "a", finish="length"))
    found = responses(client(pool)).json()
    assert (found["status"], found["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})
    assert named(responses(client(pool), stream=True))[-1]["type"] == "response.incomplete"


def test_a_schema_of_a_response_reaches_the_job():
    pool = MockPool()
    form = {"type": "json_schema", "name": "a", "schema": {"type": "object"}, "strict": True}
    assert responses(client(pool), text={"format": form}).json()["text"]["format"]["schema"] == {"type": "object"}
    assert pool.jobs[0].schema == {"type": "object"}


@pytest.mark.parametrize("fields, param, words", [
    ({"previous_response_id": "resp_1"}, "previous_response_id", "not supported: previous_response_id"),
    ({"conversation": "c"}, "conversation", "not supported: conversation"), ({"store": True}, "store", "not supported: store"),
    ({"background": True}, "background", "not supported: background"),
    ({"tools": [{"type": "web_search"}]}, "tools[0].type", "not supported: this type of tool"),
    ({"input": []}, "input", ""), ({"input": 5}, "input", ""),
    ({"input": [{"type": "item_reference", "id": "a"}]}, "input[0]", "its type must be one of"),
    ({"max_tool_calls": 1}, "max_tool_calls", "not supported: max_tool_calls"),
    ({"text": {"format": {"type": "json_schema"}}}, "text.format", ""),
])  # fmt: skip
def test_what_a_server_that_keeps_nothing_cannot_do_is_refused(fields, param, words):
    pool = MockPool()
    found = responses(client(pool), **fields)
    error = found.json()["error"]
    assert found.status_code == 400 and error["param"] == param and words in error["message"] and pool.jobs == []


# Embeddings and tokens ------------------------------------------------------------------------------------------------


def post(path, pool=None, **fields):
    return client(pool or MockPool()).post(path, json={"model": "demo", **fields})


@pytest.mark.parametrize("given", ["a", ["a", "b"], [1, 2], [[1], [2]]])
def test_embeddings_come_in_openais_shape(given):
    pool = MockPool()
    found = post("/v1/embeddings", pool, input=given, pooling="mean").json()
    count = len(found["data"])
    assert [item["index"] for item in found["data"]] == list(range(count)) and count in (1, 2)
    assert found["data"][0]["embedding"] == [0.6, 0.8] and found["usage"] == {"prompt_tokens": 7 * count, "total_tokens": 7 * count}
    assert [(job.kind, job.pooling) for job in pool.jobs] == [("embedding", "mean")] * count


def test_embeddings_are_packed_as_openai_packs_them():
    packed = post("/v1/embeddings", input="a", encoding_format="base64").json()["data"][0]["embedding"]
    assert struct.unpack("<2f", base64.b64decode(packed)) == pytest.approx((0.6, 0.8))


def test_the_first_error_ends_a_request_of_many_texts():
    pool = MockPool(lambda job: [failed(job, "RequestError", field="input")])
    assert post("/v1/embeddings", pool, input=["a", "b"]).status_code == 400 and len(pool.jobs) == 1


def test_tokens_of_texts_and_chats_and_back():
    pool = MockPool()
    assert post("/tokenize", pool, prompt="a b").json() == {"count": 2, "max_model_len": 384, "tokens": [5, 6], "token_strs": None}
    assert post("/tokenize", pool, prompt="a b", return_token_strs=True, add_special_tokens=False).json()["token_strs"] == [
        "a",
        "b",
    ]
    assert post("/tokenize", pool, messages=[{"role": "user", "content": "a"}]).json()["count"] == 2
    half = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    on = {"continue_final_message": True, "add_generation_prompt": False}
    assert post("/tokenize", pool, messages=half, **on).is_success and pool.jobs[-1].continue_final_message
    assert post("/detokenize", pool, tokens=[5, 6]).json() == {"prompt": "a b"}
    assert post("/v1/messages/count_tokens", pool, messages=[{"role": "user", "content": "a"}]).json() == {"input_tokens": 2}
    assert [(job.kind, job.adds_special) for job in pool.jobs] == [
        ("tokens", True), ("tokens", False), ("tokens", True), ("tokens", True), ("text", True), ("tokens", True)
    ]  # fmt: skip


@pytest.mark.parametrize("path, fields, param", [
    ("/v1/embeddings", {"input": ""}, "input"), ("/v1/embeddings", {"input": ["a", ""]}, "input[1]"),
    ("/v1/embeddings", {"input": ["a"] * 257}, "input"), ("/v1/embeddings", {"input": "a", "dimensions": 5}, "dimensions"),
    ("/v1/embeddings", {"input": "x" * 200_000}, "input"), ("/tokenize", {}, "prompt"), ("/tokenize", {"prompt": ""}, "prompt"),
    ("/tokenize", {"prompt": "a", "messages": [{"role": "user", "content": "a"}]}, "prompt"),
    ("/tokenize", {"prompt": "a", "continue_final_message": True}, "continue_final_message"),
    ("/tokenize", {"messages": [{"role": "user", "content": "a"}], "continue_final_message": True}, "messages[0].role"),
    ("/tokenize", {"prompt": "a", "tools": []}, "tools"), ("/detokenize", {"tokens": []}, "tokens"),
    ("/detokenize", {"tokens": [1] * 385}, "tokens"), ("/detokenize", {"tokens": [-1]}, "tokens[0]"),
])  # fmt: skip
def test_what_is_wrong_is_named_and_asks_no_model(path, fields, param):
    pool = MockPool()
    found = post(path, pool, **fields)
    assert found.status_code == 400 and found.json()["error"]["param"] == param, found.text
    assert pool.jobs == []


def test_probabilities_of_the_prompt_come_as_vllm_tells_them():
    scored = [None, {"5": {"logprob": -0.5, "rank": 1, "decoded_token": 'é"\\'}}, {"6": {"logprob": -9999.0, "rank": 2}}]
    pieces = [json.dumps(part)[1:-1].encode() for part in (scored[:2], scored[2:], [])]
    pool = MockPool(lambda job: [
        *(Event(job.id, "scores", result={"start": start}, data=data)
          for start, data in zip((0, 16, 32), pieces, strict=True) if job.prompt_logprobs is not None),
        *words(job, "a"),
    ])  # fmt: skip
    asked = {"messages": [{"role": "user", "content": "a"}], "prompt_logprobs": 1, "n": 2}
    found = post("/v1/chat/completions", pool, **asked).json()
    assert found["prompt_logprobs"] == scored and len(found["choices"]) == 2
    assert [job.prompt_logprobs for job in pool.jobs] == [1, None]  # choices share their prompt
    found = post("/v1/completions", pool, prompt=["a", "b"], prompt_logprobs=0).json()
    assert [choice["prompt_logprobs"] for choice in found["choices"]] == [scored, scored]
    assert "prompt_logprobs" not in post("/v1/completions", pool, prompt="a").json()["choices"][0]
    error = post("/v1/completions", pool, prompt="a", prompt_logprobs=0, stream=True).json()["error"]
    assert error["param"] == "prompt_logprobs" and "not supported: prompt_logprobs in a stream" in error["message"]
