"""null in a request means that the field is absent: of every object of every API, found by looking at the models themselves."""

import inspect
import json

import pytest
from pydantic import ValidationError

from tests.raised import refused
from tests.rules import each
from tests.serve.http.test_app import CHAT
from tests.serve.http.test_app_fuzz import VALID
from tests.serving import MockPool, client
from trimtab.serve.api import messages_api, responses_api, schemas
from trimtab.serve.api.routes import BESIDE, REQUESTS
from trimtab.serve.contract.settings import Limits
from trimtab.serve.http.openapi import description

KINDS = {
    kind.__name__: kind
    for module in (schemas, messages_api, responses_api) for _, kind in inspect.getmembers(module, inspect.isclass)
    if issubclass(kind, schemas.Strict) and kind.__module__ == module.__name__ and not kind.__name__.startswith("_")
}  # fmt: skip
del KINDS["Strict"]
DESCRIBED = description(has_key=False, beside=BESIDE)["components"]["schemas"]


def name_of(kind, field):
    return kind.model_fields[field].alias or field


FIELDS = [(kind, name_of(KINDS[kind], field)) for kind in KINDS for field in KINDS[kind].model_fields]
IS_REQUIRED = {
    (kind, name_of(KINDS[kind], field)): info.is_required()
    for kind in KINDS for field, info in KINDS[kind].model_fields.items()
}  # fmt: skip
OPTIONAL, REQUIRED = ([one for one in FIELDS if IS_REQUIRED[one] == are_required] for are_required in (False, True))


def least(schema, definitions):
    """Return the smallest value that a JSON schema of a required field allows."""
    if "$ref" in schema:
        return least(definitions[schema["$ref"].rpartition("/")[2]], definitions)
    for several in ("anyOf", "oneOf"):
        if several in schema:
            return least(schema[several][0], definitions)
    if "const" in schema or "enum" in schema:
        return schema.get("const", schema.get("enum", [None])[0])
    match schema["type"]:
        case "object":
            return {name: least(schema["properties"][name], definitions) for name in schema.get("required", ())}
        case "array":
            return [least(schema["items"], definitions)] * schema.get("minItems", 0)
        case "string":
            return "a"
    return schema.get("minimum", 0)


def smallest(kind):
    schema = KINDS[kind].model_json_schema()
    return least(schema, schema.get("$defs", {}))


def read(kind, value):
    return KINDS[kind].model_validate_json(json.dumps(value))


def test_every_object_of_every_request_is_among_those_that_are_looked_at():
    known = {kind.__name__ for kind in (*REQUESTS.values(), schemas.ReloadRequest)}
    assert known <= KINDS.keys() and KINDS.keys() >= {"ToolCall", "StreamOptions", "TextBlock", "FunctionCallItem"}
    assert len(OPTIONAL) > 150 and len(REQUIRED) > 60


@each("kind, field", OPTIONAL)
def test_null_in_an_optional_field_is_its_absence(kind, field):
    without = smallest(kind)
    without.pop(field, None)
    assert read(kind, {**without, field: None}) == read(kind, without)


@each("kind, field", REQUIRED)
def test_null_in_a_required_field_is_an_error_that_names_it(kind, field):
    with pytest.raises(ValidationError) as caught:
        read(kind, {**smallest(kind), field: None})
    assert {error["loc"][0] for error in caught.value.errors()} == {field}


@each("kind", KINDS)
def test_null_in_a_field_that_is_not_known_is_its_absence(kind):
    value = smallest(kind)
    assert read(kind, {**value, "nobody_knows": None}) == read(kind, value)
    with pytest.raises(ValidationError):
        read(kind, {**value, "nobody_knows": 0})


@each("kind, field", [one for one in OPTIONAL if one[0] in DESCRIBED])
def test_the_description_says_that_an_optional_field_may_be_null(kind, field):
    found = DESCRIBED[kind]["properties"][field]
    values = {key: found[key] for key in found.keys() - {"default", "title"}}
    assert field not in DESCRIBED[kind].get("required", ())
    assert not values or values == {"type": "null"} or {"type": "null"} in values["anyOf"]


@each("kind, field", [one for one in REQUIRED if one[0] in DESCRIBED])
def test_the_description_says_that_a_required_field_is_never_null(kind, field):
    assert field in DESCRIBED[kind]["required"] and '"null"' not in json.dumps(DESCRIBED[kind]["properties"][field])


# Over HTTP ------------------------------------------------------------------------------------------------------------


def with_nulls(value):
    """Return a read request as JSON again, with null in every field that was not sent, and in one that nobody knows."""
    if isinstance(value, schemas.Strict):
        fields = type(value).model_fields
        sent = {name: with_nulls(getattr(value, name)) for name in value.model_fields_set}
        return {**{fields[name].alias or name: sent.get(name) for name in fields}, "nobody_knows": None}
    return [with_nulls(item) for item in value] if isinstance(value, list) else value


def seen(path, body, tmp_path):
    (tmp_path / "style").mkdir(exist_ok=True)
    pool = MockPool()
    found = client(pool, adapter_root=tmp_path).post(path, json=body)
    assert found.status_code == 200, found.text
    return [(job.prompt, job.request, job.tools, job.template_kwargs, job.schema) for job in pool.jobs], pool.calls


@pytest.mark.parametrize("path", VALID)
def test_a_request_with_null_wherever_nothing_was_sent_is_the_same_request(path, tmp_path):
    body = VALID[path]
    nulls = with_nulls(REQUESTS[path].model_validate_json(json.dumps(body)))
    assert '"nobody_knows": null' in json.dumps(nulls) and seen(path, nulls, tmp_path) == seen(path, body, tmp_path)


CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}


@pytest.mark.parametrize("name", [
    "n", "stream", "audio", "prediction", "verbosity", "web_search_options", "prompt_cache_key", "modalities", "logit_bias",
    "stream_options", "response_format", "tools", "tool_choice", "metadata", "store", "service_tier", "max_completion_tokens",
])  # fmt: skip
def test_fields_that_clients_send_as_null_are_absent(name):
    found = client().post("/v1/chat/completions", json={**CHAT, name: None})
    assert found.status_code == 200 and found.json()["object"] == "chat.completion" and len(found.json()["choices"]) == 1


@pytest.mark.parametrize("name", ["tool_calls", "tool_call_id", "name", "refusal", "audio", "function_call", "reasoning_content"])
def test_a_users_message_may_have_nulls_of_other_roles(name):
    pool = MockPool()
    found = client(pool).post("/v1/chat/completions", json={**CHAT, "messages": [{**CHAT["messages"][0], name: None}]})
    assert found.status_code == 200 and pool.jobs[0].prompt == CHAT["messages"]


@pytest.mark.parametrize("path, given", [
    ("chat/completions", {}), ("chat/completions", {"arguments": None}), ("chat/completions", {"arguments": ""}),
    ("responses", {}), ("responses", {"arguments": None}), ("messages", {}), ("messages", {"input": None}),
])  # fmt: skip
def test_an_earlier_call_without_arguments_has_none(path, given):
    call, asked = {"name": "f", **given}, {"role": "user", "content": "?"}
    body = {
        "chat/completions": {"messages": [
            asked, {"role": "assistant", "content": None, "tool_calls": [{**CALL, "function": call}]},
            {"role": "tool", "tool_call_id": "c", "content": "12"},
        ]},
        "responses": {"input": [
            asked, {"type": "function_call", "call_id": "c", **call},
            {"type": "function_call_output", "call_id": "c", "output": "12"},
        ]},
        "messages": {"max_tokens": 5, "messages": [
            asked, {"role": "assistant", "content": [{"type": "tool_use", "id": "c", **call}]},
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c", "content": "12"}]},
        ]},
    }  # fmt: skip
    pool = MockPool()
    assert client(pool).post(f"/v1/{path}", json={"model": "demo", **body[path]}).status_code == 200
    assert pool.jobs[0].prompt[1]["tool_calls"] == [{**CALL, "function": {"name": "f", "arguments": {}}}]


@pytest.mark.parametrize("body, param", [
    ({"model": None}, "model"), ({"messages": None}, "messages"),
    ({"messages": [{"role": "user", "content": None}]}, "messages[0].content"),
    ({"messages": [{"role": None, "content": "a"}]}, "messages[0].role"), ({"messages": [None]}, "messages[0]"),
    ({"tools": [None]}, "tools[0]"), ({"stop": [None]}, "stop[0]"),
    ({"tools": [{"type": "function", "function": {"name": None}}]}, "tools[0].function.name"),
    ({"response_format": {"type": None}}, "response_format.type"), ({"tool_choice": {"type": "function"}}, "tool_choice.function"),
])  # fmt: skip
def test_null_where_something_has_to_be_is_named(body, param):
    found = client().post("/v1/chat/completions", json={**CHAT, **body})
    assert found.status_code == 400 and found.json()["error"]["param"] == param


def test_nulls_inside_schemas_and_tools_stay_as_they_are_sent():
    pool, schema = MockPool(), {"type": "object", "properties": {"a": {"enum": ["x", None], "default": None}}}
    tool = {"type": "function", "function": {"name": "f", "parameters": schema, "strict": None, "description": None}}
    assert client(pool).post("/v1/chat/completions", json={**CHAT, "tools": [tool]}).status_code == 200
    assert pool.jobs[0].tools[0]["function"]["parameters"] == schema


def test_a_lenient_server_names_no_null_as_ignored():
    found = client(lenient=True).post("/v1/chat/completions", json={**CHAT, "prediction": None, "audio": None, "zoo": 1})
    assert found.status_code == 200 and found.headers["x-trimtab-ignored"] == "zoo"


def test_many_nulls_are_as_many_values_as_others():
    # They are dropped after they were counted: a body of nulls has the limit of every body.
    body = json.dumps({**CHAT, **{f"x{number}": None for number in range(Limits().json_values)}}).encode()
    found = client().post("/v1/chat/completions", content=body, headers={"content-type": "application/json"})
    assert found.status_code == 400 and found.json()["error"]["param"] == "body"


def test_a_list_that_is_too_long_is_refused_beside_nulls():
    error = refused(
        schemas.read, schemas.ChatRequest, json.dumps({**CHAT, "n": None, "tools": [1] * 9}).encode(), most={"tools": 8}
    )
    assert error.field == "tools"
