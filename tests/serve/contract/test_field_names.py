"""Errors of /v1/responses and /v1/messages name the fields that the client sent, not those of the chat between."""

import base64
import json

import pytest

from tests.serve.http.test_app import PNG
from tests.serve.http.test_app_fuzz import VALID
from tests.serving import MockPool, client, failed, late
from trimtab.errors import RequestError
from trimtab.serve.api import messages_api, responses_api, schemas
from trimtab.serve.api.client_errors import for_client
from trimtab.serve.contract.errors import plain_error
from trimtab.serve.contract.field_names import client_error, client_field
from trimtab.serve.contract.job import Event
from trimtab.serve.contract.settings import Limits

IMAGE = "data:image/png;base64," + base64.b64encode(PNG).decode()
NO_IMAGE = "data:image/png;base64," + base64.b64encode(b"no image").decode()
TOOL = {"type": "function", "name": "f", "parameters": {"$ref": "#"}}
ANTHROPICS_TOOL = {"name": "f", "input_schema": {"$ref": "#"}}


def user(content):
    return {"role": "user", "content": content}


def error_of(path, pool=None, **fields):
    body = {"model": "demo", **({"max_tokens": 5} if path == "/v1/messages" else {}), **fields}
    found = client(pool or MockPool()).post(path, json=body)
    assert found.status_code in (400, 413), found.text
    return found.json()["error"]


RESPONSES = [
    ({"input": "x" * 200_000}, "input"), ({"input": " "}, "input"), ({"input": [user("")]}, "input[0].content"),
    ({"instructions": "Be kind", "input": [user("a"), user([{"type": "input_text", "text": "b"},
      {"type": "input_image", "image_url": NO_IMAGE}])]}, "input[1].content[1].image_url"),
    ({"input": [user([{"type": "input_image", "image_url": "ftp://a"}])]}, "input[0].content[0].image_url"),
    # Thoughts of which nothing came are no message: the places after them move.
    ({"input": [{"type": "reasoning", "content": [{"type": "reasoning_text", "text": "hm"}]}, user("a"),
      {"type": "function_call", "call_id": "a", "name": "f", "arguments": "{}"},
      {"type": "function_call", "call_id": "b", "name": "f", "arguments": "no JSON"}]}, "input[3].arguments"),
    ({"input": [user([{"type": "input_audio", "input_audio": {"data": "AAAA", "format": "wav"}}])]},
     "input[0].content[0].input_audio.data"),
    ({"input": [user("a")] * 1025}, "input"),
    ({"input": [user("a")] * 5000}, "input"),
    ({"input": [{"type": "reasoning", "content": [{"type": "reasoning_text", "text": "hm"}]}]}, "input"),
    ({"input": "a", "max_output_tokens": 5000}, "max_output_tokens"),
    ({"input": "a", "tools": [TOOL], "tool_choice": "required"}, "tools[0].parameters"),
    ({"input": "a", "tools": [TOOL], "tool_choice": {"type": "function", "name": "g"}}, "tool_choice.name"),
    ({"input": "a", "text": {"format": {"type": "json_schema", "name": "a", "schema": {"$ref": "#"}}}},
     "text.format.schema"),
]  # fmt: skip
MESSAGES = [
    ({"messages": [user("x" * 200_000)]}, "messages"), ({"messages": [user("")], "system": "s"}, "messages[0].content"),
    ({"system": "Be kind", "messages": [user([{"type": "text", "text": "a"},
      {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AAAA"}}])]},
     "messages[0].content[1].source.data"),
    # A result is a message of its own, and its user's parts begin anew.
    ({"messages": [user("a"), user([{"type": "tool_result", "tool_use_id": "a", "content": "1"},
      {"type": "text", "text": "b"}, {"type": "image", "source": {"type": "url", "url": "ftp://a"}}])]},
     "messages[1].content[2].source.url"),
    ({"messages": [user("a")], "tools": [ANTHROPICS_TOOL], "tool_choice": {"type": "any"}}, "tools[0].input_schema"),
    ({"messages": [user("a")], "tools": [ANTHROPICS_TOOL], "tool_choice": {"type": "tool", "name": "g"}},
     "tool_choice.name"),
    ({"messages": [user("a")], "stop_sequences": [""]}, "stop_sequences"),
    ({"messages": [user("a")], "stop_sequences": ["x" * 1025]}, "stop_sequences[0]"),
]  # fmt: skip


@pytest.mark.parametrize(
    "path, fields, param", [*(("/v1/responses", *one) for one in RESPONSES), *(("/v1/messages", *one) for one in MESSAGES)]
)
def test_an_error_of_a_response_or_message_names_the_field_that_was_sent(path, fields, param):
    error = error_of(path, **fields)
    assert error["param"] == param and error["fields"]["field"] == param and error["message"].startswith(param)


def test_a_chats_effort_is_named_as_it_was_sent():
    pool = MockPool(lambda job: [failed(job, "RequestError", field="chat_template_kwargs")])
    asked = {"messages": [user("a")]}
    assert error_of("/v1/chat/completions", pool, **asked, reasoning_effort="low")["param"] == "reasoning_effort"
    given = {"chat_template_kwargs": {"enable_thinking": True}}
    assert error_of("/v1/chat/completions", pool, **asked, **given)["param"] == "chat_template_kwargs"


@pytest.mark.parametrize("is_stream", [False, True])
def test_what_the_worker_refuses_is_named_as_it_was_sent_too(is_stream):
    def refused(field):
        return MockPool(lambda job: [failed(job, "RequestError", field=field)])

    ask = {"input": [user("a"), user([{"type": "input_image", "image_url": IMAGE}])], "stream": is_stream}
    assert error_of("/v1/responses", refused("messages[1].content[0].image_url"), **ask)["param"] == (
        "input[1].content[0].image_url"
    )
    picture = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": IMAGE[22:]}}
    ask = {"system": "s", "messages": [user([picture])], "stream": is_stream}
    error = error_of("/v1/messages", refused("messages[1].content[0].image_url"), **ask)
    assert error["param"] == "messages[0].content[0].source"


def test_a_late_error_of_a_stream_is_named_as_it_was_sent():
    body = {"model": "demo", "input": "a", "stream": True}
    found = client(MockPool(late(lambda job: failed(job, "RequestError", field="max_tokens")))).post("/v1/responses", json=body)
    error = json.loads(found.text.split("event: error")[1].split("data: ", 1)[1].splitlines()[0])["error"]
    assert error["param"] == "max_output_tokens"


def test_hints_and_reasons_speak_of_the_fields_that_were_sent():
    exc = RequestError("cannot be combined with response_format", field="tool_choice", hint="Lower max_tokens")
    _, names = responses_api.chat_of(responses_api.ResponsesRequest(model="demo", input="a"))
    error = client_error(plain_error(exc), names)
    assert error["message"] == "tool_choice: cannot be combined with text.format. Lower max_output_tokens"
    assert error["fields"]["hint"] == "Lower max_output_tokens"
    assert client_error(plain_error(exc), {}) == plain_error(exc)


@pytest.mark.parametrize("typed", ["max_new_tokens", "template_kwargs"])
@pytest.mark.parametrize("path", [path for path in VALID if "lora" not in path])
def test_an_unknown_field_is_named_as_it_was_sent(path, typed):
    error = error_of(path, **VALID[path], **{typed: 1})
    assert error["message"].startswith(f"{typed}: not supported: {typed}") and error["fields"]["field"] == typed


def test_the_longest_beginning_with_a_name_decides():
    names = {"messages": "input", "messages[1]": "input[5]", "messages[1].content": "instructions"}
    assert client_field("messages[1].content", names) == "instructions"
    assert client_field("messages[1].role", names) == "input[5].role"
    assert client_field("messages[11].role", names) == "input[11].role" and client_field("temperature", names) == "temperature"


def test_thoughts_of_many_items_are_one_in_their_order():
    def thought(text):
        return {"type": "reasoning", "content": [{"type": "reasoning_text", "text": text}]}

    answer = {"type": "message", "role": "assistant", "content": "c"}
    given = {"model": "demo", "input": [thought("a"), thought("b"), answer, user("x"), thought("d"), answer]}
    asked = schemas.read(responses_api.ResponsesRequest, json.dumps(given).encode())
    chat, _ = responses_api.chat_of(asked)
    thoughts = [getattr(message, "reasoning_content", None) for message in chat.messages]
    assert thoughts == ["ab", None, "d"]


def test_a_count_of_tokens_names_them_too():
    found = client(MockPool()).post(
        "/v1/messages/count_tokens",
        json={"model": "demo", "system": "s", "messages": [user([{"type": "image", "source": {"type": "url", "url": "x"}}])]},
    )
    assert found.json()["error"]["param"] == "messages[0].content[0].source.url"


def test_every_field_of_a_chat_that_a_request_can_become_has_a_name():
    """No error of a response or a message may name a field that its request does not have."""
    shared = {"model", "adapter", "messages", "tools", "tool_choice", "temperature", "top_p", "stream", "user"}
    for api, kind, own in (
        (responses_api, responses_api.ResponsesRequest, {"parallel_tool_calls"}),
        (messages_api, messages_api.MessagesRequest, {"top_k", "max_tokens"}),
    ):
        fields = {field.alias or name for name, field in kind.model_fields.items()}
        for name in shared | own | set(api._NAMES):
            top = client_field(name, api._NAMES).partition(".")[0].partition("[")[0]
            if name != "user":
                assert top in fields, name


# The longest answer, as each API calls it.
LENGTHS = [
    ("/v1/chat/completions", "max_tokens"), ("/v1/chat/completions", "max_completion_tokens"), ("/v1/completions", "max_tokens"),
    ("/v1/responses", "max_output_tokens"), ("/v1/messages", "max_tokens"),
]  # fmt: skip
TEXTS = {"/v1/completions": {"prompt": "a"}, "/v1/responses": {"input": "a"}}


@pytest.mark.parametrize("path, name", LENGTHS)
def test_an_answer_that_is_too_long_is_refused_by_the_name_that_was_sent(path, name):
    text = TEXTS.get(path, {"messages": [user("a")]})
    if path != "/v1/messages":  # it is as long as the context allows
        error = error_of(path, **text, **{name: 100_000})
        assert error["param"] == error["fields"]["field"] == name and error["message"].startswith(f"{name}=100000: ")
        found = client(limits=Limits(max_tokens=5)).post(path, json={"model": "demo", **text, name: 6})
        assert found.status_code == 400 and found.json()["error"]["param"] == name
    # So do the worker's errors, and its hints.
    told = RequestError("is too large", field="max_new_tokens", hint="Shorten it, or lower max_tokens")
    late = MockPool(lambda job: [Event(job.id, "error", finish="error", error=plain_error(for_client(told, job)))])
    error = error_of(path, late, **text, **{name: 5})
    assert error["param"] == name and error["message"] == f"{name}: is too large. Shorten it, or lower {name}"


def test_of_two_names_the_one_that_is_too_many_is_named():
    error = error_of("/v1/chat/completions", messages=[user("a")], max_tokens=5, max_completion_tokens=5)
    assert error["param"] == "max_completion_tokens" and "set this or max_tokens, not both" in error["message"]


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages", "/v1/embeddings"])
def test_an_adapter_that_is_gone_is_named_as_it_was_sent(path):
    text = TEXTS.get(path, {"input": "a"} if "embed" in path else {"messages": [user("a")]})
    pool = MockPool(lambda job: [failed(job, "RequestError", field="model")])
    assert error_of(path, pool, **text, adapter="style")["param"] == "adapter"
    assert error_of(path, pool, **text, model="style")["param"] == "model"


@pytest.mark.parametrize("path, fields, inside, param", [
    ("/v1/chat/completions", {"reasoning_effort": "low"}, "reasoning_effort", "reasoning_effort"),
    ("/v1/chat/completions", {"reasoning_effort": "low", "chat_template_kwargs": {"thinking": True}}, "reasoning_effort",
     "reasoning_effort"),
    ("/v1/chat/completions", {"reasoning_effort": "low", "chat_template_kwargs": {"thinking": True}}, "thinking",
     "chat_template_kwargs.thinking"),
    ("/v1/responses", {"reasoning": {"effort": "low"}}, "reasoning_effort", "reasoning.effort"),
    ("/v1/messages", {"thinking": {"type": "enabled"}}, "enable_thinking", "thinking.type"),
    ("/v1/messages", {"thinking": {"type": "disabled"}}, "reasoning_effort", "thinking.type"),
])  # fmt: skip
def test_a_template_that_does_not_think_is_told_of_the_field_that_was_sent(path, fields, inside, param):
    text = TEXTS.get(path, {"messages": [user("a")]})

    def unread(job):
        # As the worker does with a template that reads no variable.
        assert inside in job.template_kwargs
        return [failed(job, "RequestError", field=f"chat_template_kwargs.{inside}")]

    assert error_of(path, MockPool(unread), **text, **fields)["param"] == param
