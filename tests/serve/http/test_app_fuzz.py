"""Malformed bodies by the thousand: never a mistake of the server, never another shape than OpenAI's."""

import asyncio
import base64
import json
from functools import cache

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests import ROOT
from tests.serve.http.test_app import PICTURE, drive_raw
from tests.serving import MockPool
from trimtab.serve.api.routes import REQUESTS
from trimtab.serve.contract.settings import Settings
from trimtab.serve.http.app import make_app
from trimtab.serve.http.openapi import description
from trimtab.serve.observe.metrics import Metrics

DEMO = ROOT / "trimtab" / "demo"
WAV = base64.b64encode((DEMO / "sounds" / "audio_1.wav").read_bytes()).decode()
VALID = {
    "/v1/chat/completions": {
        "model": "demo", "temperature": 0.5, "top_p": 0.9, "n": 2, "seed": 3, "stop": ["a"], "max_tokens": 4,
        "logprobs": True, "top_logprobs": 2, "stream": False, "user": "me",
        "response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "object"}}},
        "tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {"a": {}}}}}],
        "tool_choice": "auto", "parallel_tool_calls": False, "chat_template_kwargs": {"enable_thinking": True},
        "presence_penalty": 0.5, "logit_bias": {"7": 1.5},
        "messages": [
            {"role": "system", "content": "be brief"},
            {"role": "assistant", "content": None, "tool_calls": [
                {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}]},
            {"role": "tool", "tool_call_id": "c1", "content": "12"},
            {"role": "user", "content": [
                {"type": "text", "text": "?"}, {"type": "image_url", "image_url": {"url": PICTURE}},
                {"type": "input_audio", "input_audio": {"data": WAV, "format": "wav"}},
            ]},
        ],
    },
    "/v1/completions": {"model": "style", "prompt": [[1, 2], [3]], "logprobs": 1, "echo": False, "stream": True,
                        "stream_options": {"include_usage": True}},
    "/v1/responses": {
        "model": "demo", "instructions": "be brief", "max_output_tokens": 5, "stream": True, "reasoning": {"effort": "low"},
        "tools": [{"type": "function", "name": "f", "parameters": {"type": "object"}}], "text": {"format": {"type": "text"}},
        "input": [
            {"role": "user", "content": [{"type": "input_text", "text": "?"}, {"type": "input_image", "image_url": PICTURE}]},
            {"type": "reasoning", "id": "r", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]},
            {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "c", "output": "12"},
        ],
    },
    "/v1/messages": {
        "model": "demo", "max_tokens": 5, "system": [{"type": "text", "text": "be brief"}], "stop_sequences": ["x"],
        "tools": [{"name": "f", "input_schema": {"type": "object"}}], "tool_choice": {"type": "auto"}, "temperature": 0.5,
        "messages": [
            {"role": "user", "content": [
                {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": PICTURE.partition(",")[2]}},
                {"type": "text", "text": "?", "cache_control": {"type": "ephemeral"}}]},
            {"role": "assistant", "content": [
                {"type": "thinking", "thinking": "hm", "signature": ""},
                {"type": "tool_use", "id": "c", "name": "f", "input": {"a": 1}}]},
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c", "content": "12"}]},
        ],
    },
    "/v1/messages/count_tokens": {"model": "demo", "messages": [{"role": "user", "content": "Hello"}]},
    "/v1/embeddings": {"model": "style", "input": ["a", "b"], "encoding_format": "base64"},
    "/tokenize": {"model": "demo", "prompt": "Hello", "return_token_strs": True},
    "/detokenize": {"model": "demo", "tokens": [5, 6]},
    "/v1/load_lora_adapter": {"lora_name": "a", "lora_path": "style", "model": "demo"},
    "/v1/unload_lora_adapter": {"lora_name": "style"},
}  # fmt: skip
assert set(VALID) == set(REQUESTS)

numbers = st.integers() | st.floats() | st.sampled_from([0, -1, 2**31, 2**63, 10**400, 1e308, -0.0])
texts = st.text(max_size=8) | st.sampled_from(["", "\0", "demo", "data:image/png;base64,", PICTURE, WAV, "http://a/b"])
plain = st.none() | st.booleans() | numbers | texts
values = st.recursive(plain, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(texts, inner, max_size=4))


def places(value, path=()):
    """Return the path of everything inside a JSON value."""
    found = [path]
    if isinstance(value, dict):
        found += [place for key, item in value.items() for place in places(item, (*path, key))]
    elif isinstance(value, list):
        found += [place for index, item in enumerate(value) for place in places(item, (*path, index))]
    return found


def changed(value, path, new):
    """Return a copy with one place replaced."""
    if not path:
        return new
    copy = dict(value) if isinstance(value, dict) else list(value)
    copy[path[0]] = changed(copy[path[0]], path[1:], new)
    return copy


DESCRIBED = description(has_key=False)
SCHEMAS = DESCRIBED["components"]["schemas"]
# How often something else stands where the description says what it should be.
WRONG_ONE_IN = 25
NAMED = {"model": ["demo", "style", "nobody"], "url": [PICTURE, "data:,", "http://a/b"], "data": [WAV, "AAAA"]}


@st.composite
def described(draw, schema, name=""):
    """Return a value that a schema of the description allows, with now and then a wrong one inside."""
    if draw(st.integers(1, WRONG_ONE_IN)) == 1:
        return draw(values)
    if "$ref" in schema:
        return draw(described(SCHEMAS[schema["$ref"].rpartition("/")[2]], name))
    for several in ("anyOf", "oneOf"):
        if several in schema:
            return draw(described(draw(st.sampled_from(schema[several])), name))
    if "const" in schema or "enum" in schema:
        return draw(st.sampled_from(schema.get("enum") or [schema["const"]]))
    match schema.get("type"):
        case "object":
            known = schema.get("properties", {})
            chosen = draw(st.sets(st.sampled_from(sorted(known)), max_size=6)) if known else set()
            made = {key: draw(described(known[key], key)) for key in sorted(chosen | set(schema.get("required", ())))}
            return made | (draw(st.dictionaries(texts, values, max_size=1)) if not draw(st.integers(0, 9)) else {})
        case "array":
            most = min(3, schema.get("maxItems", 3))
            return [draw(described(schema["items"], name)) for _ in range(draw(st.integers(min(most, 1), most)))]
        case "integer":
            low, high = schema.get("minimum", 0), schema.get("maximum", schema.get("exclusiveMaximum", 2**31) - 1)
            return draw(st.sampled_from([low, high, min(high, max(low, 3))]) | st.integers(low, min(high, low + 40)))
        case "number":
            low = schema.get("minimum", schema.get("exclusiveMinimum", 0))
            return draw(st.floats(low, schema["maximum"], exclude_min="exclusiveMinimum" in schema))
        case "boolean" | "null" as kind:
            return draw(st.booleans()) if kind == "boolean" else None
        case "string":
            return draw(st.sampled_from(NAMED[name]) if name in NAMED else texts | st.sampled_from(["wav", "flac", "a"]))
    return draw(values)


def of_the_description(path):
    """Return a strategy of the bodies that the description gives a path."""
    content = DESCRIBED["paths"][path]["post"]["requestBody"]["content"]
    return described(content["application/json"]["schema"])


@st.composite
def bodies(draw):
    """Return (path, body): what the description says, noise, any JSON, or a good request with something wrong in it."""
    path = draw(st.sampled_from(sorted(VALID)))
    hows = ["described"] * 6 + ["changed"] * 3 + ["noise", "json", "added", "cut", "bytes"]
    how = draw(st.sampled_from(hows))
    good = VALID[path]
    if how == "described":
        return path, json.dumps(draw(of_the_description(path))).encode()
    if how == "noise":
        return path, draw(st.binary(max_size=64))
    if how == "json":
        return path, json.dumps(draw(values)).encode()
    if how == "changed":
        for _ in range(draw(st.integers(1, 2))):
            good = changed(good, draw(st.sampled_from(places(good))), draw(values))
            if not isinstance(good, dict):
                break
    if how == "added":
        at = draw(st.sampled_from([place for place in places(good) if isinstance(_at(good, place), dict)]))
        good = changed(good, at, {**_at(good, at), draw(texts): draw(values)})
    body = json.dumps(good, ensure_ascii=draw(st.booleans())).encode("utf-8", "surrogatepass")
    if how == "cut":
        body = body[: draw(st.integers(0, len(body)))]
    if how == "bytes":
        place = draw(st.integers(0, len(body) - 1))
        body = body[:place] + draw(st.binary(min_size=1, max_size=3)) + body[place + 1 :]
    return path, body


def _at(value, path):
    for step in path:
        value = value[step]
    return value


@cache
def app():
    """Return one server for all bodies: none of them changes how the next is read."""
    return make_app(MockPool(), Settings(page=False, adapter_root=DEMO / "adapters"), Metrics())


def check(path, body):
    sent = asyncio.run(drive_raw(app(), body, path=path))
    status = sent[0]["status"]
    text = b"".join(message.get("body", b"") for message in sent[1:])
    assert status < 500, text
    if status >= 400:
        error = json.loads(text)["error"]
        assert set(error) == {"message", "type", "param", "code", "class", "fields"}
        kinds = {"invalid_request_error", *({"not_found_error", "request_too_large"} if "messages" in path else ())}
        assert error["message"] and error["type"] in kinds
        assert str(DEMO) not in text.decode()


quiet = settings(deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)


@settings(quiet, max_examples=150)
@given(bodies())
def test_a_malformed_body_is_refused_in_openais_shape(found):
    check(*found)


@pytest.mark.slow
@settings(quiet, max_examples=10_000)
@given(bodies())
def test_ten_thousand_malformed_bodies_are_refused_in_openais_shape(found):
    check(*found)


@pytest.mark.parametrize("body", [
    b"[" * 100_000, b'{"a":' * 50_000, b'{"messages":' + b"[" * 5000, b'{"seed":' + b"9" * 100_000 + b"}", b"\xef\xbb\xbf{}",
    b'{"model":"\\ud800"}', b'{"model":"\xed\xa0\x80"}', b"{}" * 1000, b"\0" * 100, b"NaN", b'"' + b"x" * 10**6,
])  # fmt: skip
def test_bodies_made_to_hurt_are_refused(body):
    for path in VALID:
        check(path, body)


def test_what_the_description_allows_gets_past_the_first_look():
    # Otherwise the bodies made from it would all end at the same early refusal. One in twenty is answered.
    seen = set()
    paths = ("/v1/chat/completions", "/v1/completions")

    @settings(quiet, max_examples=150, database=None)
    @given(st.sampled_from(paths).flatmap(lambda path: st.tuples(st.just(path), of_the_description(path))))
    def look(found):
        path, body = found
        seen.add(asyncio.run(drive_raw(app(), json.dumps(body).encode(), path=path))[0]["status"])

    look()
    assert seen >= {200, 400}


def test_the_good_requests_are_answered():
    # Otherwise nothing above would get past the first check.
    for path, body in VALID.items():
        assert asyncio.run(drive_raw(app(), json.dumps(body).encode(), path=path))[0]["status"] == 200, path
