"""Tools and thoughts over HTTP, on a pool without models: shapes, streams, what reaches the job, what is refused."""

import json

import pytest

from tests.serve.http.test_app import CHAT, chat, error_of, events_of
from tests.serving import USAGE, MockPool, client
from trimtab.serve.contract.job import Event

TOOL = {"type": "function", "function": {"name": "f", "description": "d", "parameters": {"type": "object", "properties": {}}}}
OTHER = {"type": "function", "function": {"name": "g"}}
CALL = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"a": [1, "x"]}'}}


def called(job, *, text="", thought=""):
    """Answer with a thought, a text and two calls, the first one in pieces."""
    events = [Event(job.id, kind, text=word) for kind, word in (("reasoning", thought), ("text", text)) if word]
    pieces = [
        {"index": 0, "id": "c1", "name": "f", "arguments": ""},
        {"index": 0, "arguments": '{"a"'}, {"index": 0, "arguments": ": 1}"},
        {"index": 1, "id": "c2", "name": "g", "arguments": ""}, {"index": 1, "arguments": "{}"},
    ]  # fmt: skip
    events += [Event(job.id, "call", call=piece) for piece in pieces]
    return [*events, Event(job.id, "done", finish="tool_calls", usage=USAGE)]


def test_calls_come_in_openais_shape():
    choice = chat(client(MockPool(called)), tools=[TOOL, OTHER]).json()["choices"][0]
    assert choice["finish_reason"] == "tool_calls"
    assert choice["message"] == {
        "role": "assistant", "content": None, "refusal": None,
        "tool_calls": [
            {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}},
            {"id": "c2", "type": "function", "function": {"name": "g", "arguments": "{}"}},
        ],
    }  # fmt: skip


def test_a_text_and_a_thought_stand_beside_calls():
    pool = MockPool(lambda job: called(job, text="I look.", thought="Hm."))
    message = chat(client(pool), tools=[TOOL]).json()["choices"][0]["message"]
    assert (message["content"], message["reasoning_content"], len(message["tool_calls"])) == ("I look.", "Hm.", 2)


def tools_with_patterns(count, each):
    parameters = {"type": "object", "patternProperties": {f"^x{i}_": {} for i in range(each)}}
    return [{"type": "function", "function": {"name": f"f{i}", "parameters": parameters, "strict": True}} for i in range(count)]


def test_many_strict_tools_with_a_pattern_each_are_taken_and_many_patterns_of_one_are_not():
    assert chat(client(MockPool(called)), tools=tools_with_patterns(65, 1)).status_code == 200
    refused = chat(client(MockPool(called)), tools=tools_with_patterns(2, 65))
    assert "8450 pairs, the limit is 4096" in error_of(refused, 400)["message"]
    # A call of one function compiles that function alone.
    several = [
        *tools_with_patterns(1, 1),
        *({**one, "function": {**one["function"], "name": "g"}} for one in tools_with_patterns(1, 65)),
    ]
    for name, status in (("f0", 200), ("g", 400)):
        chosen = {"type": "function", "function": {"name": name}}
        assert chat(client(MockPool(called)), tools=several, tool_choice=chosen).status_code == status


def test_a_stream_has_the_pieces_with_their_index():
    pool = MockPool(lambda job: called(job, thought="Hm."))
    chunks = [json.loads(data) for _, data in events_of(chat(client(pool), tools=[TOOL], stream=True))[:-1]]
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    assert deltas[0] == {"role": "assistant", "content": ""} and deltas[1] == {"reasoning_content": "Hm."}
    assert [delta["tool_calls"][0] for delta in deltas[2:-1]] == [
        {"index": 0, "id": "c1", "type": "function", "function": {"name": "f", "arguments": ""}},
        {"index": 0, "function": {"arguments": '{"a"'}}, {"index": 0, "function": {"arguments": ": 1}"}},
        {"index": 1, "id": "c2", "type": "function", "function": {"name": "g", "arguments": ""}},
        {"index": 1, "function": {"arguments": "{}"}},
    ]  # fmt: skip
    assert deltas[-1] == {} and chunks[-1]["choices"][0]["finish_reason"] == "tool_calls"


def test_choices_have_calls_of_their_own():
    found = chat(client(MockPool(called)), tools=[TOOL], n=2).json()["choices"]
    assert [len(choice["message"]["tool_calls"]) for choice in found] == [2, 2]


def test_a_round_of_calls_reaches_the_job():
    pool = MockPool()
    messages = [
        *CHAT["messages"], {"role": "assistant", "content": None, "tool_calls": [CALL], "reasoning_content": "Hm."},
        {"role": "tool", "tool_call_id": "c1", "content": "12"},
    ]  # fmt: skip
    assert chat(client(pool), messages=messages, tools=[TOOL, OTHER], chat_template_kwargs={"enable_thinking": False}).is_success
    job = pool.jobs[0]
    arguments = {"name": "f", "arguments": {"a": [1, "x"]}}
    assert job.prompt[1:] == [
        {"role": "assistant", "content": None, "reasoning_content": "Hm.", "tool_calls": [{**CALL, "function": arguments}]},
        {"role": "tool", "content": "12", "tool_call_id": "c1", "name": "f"},
    ]  # fmt: skip
    nothing = {"type": "object", "properties": {}, "additionalProperties": False}
    assert job.tools == [TOOL, {"type": "function", "function": {"name": "g", "parameters": nothing}}]
    assert (job.must_call, job.several_calls, job.template_kwargs) == (None, True, {"enable_thinking": False})


@pytest.mark.parametrize("fields, expected", [
    ({"tool_choice": "auto"}, (2, None, True)), ({"tool_choice": "none"}, (0, None, True)), ({}, (2, None, True)),
    ({"tool_choice": "required", "parallel_tool_calls": False}, (2, "", False)),
    ({"tool_choice": {"type": "function", "function": {"name": "g"}}}, (2, "g", True)),
])  # fmt: skip
def test_what_has_to_be_called_reaches_the_job(fields, expected):
    pool = MockPool()
    assert chat(client(pool), tools=[TOOL, OTHER], **fields).is_success
    job = pool.jobs[0]
    assert (len(job.tools), job.must_call, job.several_calls) == expected


def assistant(**function):
    return [{"role": "assistant", "tool_calls": [{**CALL, "function": {**CALL["function"], **function}}]}]


@pytest.mark.parametrize("fields, param", [
    ({"tool_choice": "required"}, "tool_choice"), ({"tools": [TOOL, TOOL]}, "tools"), ({"tools": [TOOL] * 129}, "tools"),
    ({"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "h"}}}, "tool_choice.function.name"),
    ({"tools": [{**TOOL, "function": {**TOOL["function"], "description": "x" * 300_000}}]}, "tools"),
    ({"tools": [{**TOOL, "function": {"name": "f", "parameters": {"$ref": "#"}, "strict": True}}]},
     "tools[0].function.parameters"),
    ({"tools": [{**TOOL, "function": {"name": "f", "parameters": {"$ref": "#"}}}], "tool_choice": "required"},
     "tools[0].function.parameters"),
    ({"tools": [{**TOOL, "function": {"name": "f", "parameters": {"x-guidance": {"lenient": True}}, "strict": True}}]},
     "tools[0].function.parameters"),
    ({"tools": [TOOL], "tool_choice": "required", "response_format": {"type": "json_object"}}, "tool_choice"),
    ({"messages": [{"role": "assistant"}]}, "messages[0].content"),
    ({"messages": assistant(arguments="[1]")}, "messages[0].tool_calls[0].function.arguments"),
    ({"messages": assistant(arguments="{")}, "messages[0].tool_calls[0].function.arguments"),
    ({"messages": assistant(arguments='{"a":' + "[" * 100_000)}, "messages[0].tool_calls[0].function.arguments"),
    ({"messages": assistant(arguments='{"a":[' + "0," * 50_000 + "0]}")}, "messages[0].tool_calls[0].function.arguments"),
    ({"messages": assistant(arguments='{"a":' + "9" * 5000 + "}")}, "messages[0].tool_calls[0].function.arguments"),
    ({"messages": [{"role": "assistant", "tool_calls": [CALL] * 129}]}, "messages[0].tool_calls"),
    ({"reasoning_effort": "low", "chat_template_kwargs": {"reasoning_effort": "low"}}, "chat_template_kwargs.reasoning_effort"),
])  # fmt: skip
def test_what_is_wrong_is_named_and_asks_no_model(fields, param):
    pool = MockPool()
    assert error_of(chat(client(pool), **fields), 400)["param"] == param and pool.jobs == []


def test_a_tools_answer_may_be_parts_and_carries_no_pictures_of_unknown_form():
    pool = MockPool()
    result = {"role": "tool", "tool_call_id": "c1", "content": [{"type": "text", "text": "12"}]}
    assert chat(client(pool), messages=[{"role": "assistant", "tool_calls": [CALL]}, result]).is_success
    assert pool.jobs[0].prompt[1]["content"] == [{"type": "text", "text": "12"}]


CALLS = {"role": "assistant", "tool_calls": [CALL, {**CALL, "id": "c2"}]}
RESULTS = [{"role": "tool", "tool_call_id": name, "content": "12"} for name in ("c2", "c1")]
ASK, SAID = {"role": "user", "content": "?"}, {"role": "assistant", "content": "It is."}


@pytest.mark.parametrize("messages, param, words", [
    ([ASK, RESULTS[0]], "messages[1].tool_call_id", "no tool_calls come before this message"),
    ([ASK, CALLS, *RESULTS, {**RESULTS[0], "tool_call_id": "c3"}], "messages[4].tool_call_id", "(choices: c1, c2)"),
    ([CALLS, *RESULTS, SAID, RESULTS[0]], "messages[4].tool_call_id", "no tool_calls come before this message"),
    ([CALLS, RESULTS[0], ASK], "messages[0].tool_calls", "no tool message answers c1."),
    ([ASK, CALLS, ASK], "messages[1].tool_calls", "no tool message answers c1, c2."),
    ([ASK, CALLS], "messages[1].tool_calls", "no tool message answers c1, c2."),
])  # fmt: skip
def test_a_result_without_its_call_is_refused_and_a_call_without_its_result(messages, param, words):
    pool = MockPool()
    error = error_of(chat(client(pool), messages=messages), 400)
    assert error["param"] == param and words in error["message"] and pool.jobs == []
    found = chat(client(pool, lenient=True), messages=messages)
    assert found.is_success and found.headers["x-trimtab-ignored"] == param


def test_several_rounds_of_calls_are_accepted():
    messages = [ASK, CALLS, *RESULTS, SAID, ASK, CALLS, *reversed(RESULTS), ASK]
    assert chat(client(MockPool()), messages=messages).is_success


def test_other_routes_name_their_own_fields_of_such_calls():
    use = {"role": "assistant", "content": [{"type": "tool_use", "id": "c1", "name": "f", "input": {}}]}
    result = {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c2", "content": "12"}]}
    for path, body, field in (
        ("messages", {"messages": [ASK, use, result], "max_tokens": 9}, "messages[2].content[0].tool_use_id"),
        ("messages", {"messages": [ASK, use, ASK], "max_tokens": 9}, "messages[1].content"),
        ("responses", {"input": [{"type": "function_call_output", "call_id": "c9", "output": "12"}]}, "input[0].call_id"),
    ):
        found = client(MockPool()).post(f"/v1/{path}", json={"model": "demo", **body})
        assert found.status_code == 400 and field in found.json()["error"]["message"], found.text


# Continuing a message ---------------------------------------------------------------------------------------------------

HALF = {"role": "assistant", "content": "Hel"}
ON = {"messages": [*CHAT["messages"], HALF], "continue_final_message": True}


def test_a_message_is_continued():
    pool = MockPool()
    assert chat(client(pool), **ON, add_generation_prompt=False, n=2, tools=[TOOL]).is_success
    assert [job.continue_final_message for job in pool.jobs] == [True, True] and pool.jobs[0].prompt[-1] == HALF
    parts = [{"type": "text", "text": "Hel"}]
    assert chat(client(pool), **{**ON, "messages": [*CHAT["messages"], {**HALF, "content": parts}]}).is_success
    assert chat(client(pool), add_generation_prompt=True, continue_final_message=False).is_success
    assert [job.continue_final_message for job in pool.jobs] == [True, True, True, False]


@pytest.mark.parametrize("fields, param", [
    ({"messages": CHAT["messages"]}, "messages[0].role"), ({"add_generation_prompt": True}, "add_generation_prompt"),
    ({"continue_final_message": None, "add_generation_prompt": False}, "add_generation_prompt"),
    ({"messages": [*CHAT["messages"], {"role": "assistant", "content": " "}]}, "messages[1].content"),
    ({"messages": [*CHAT["messages"], {"role": "assistant", "content": []}]}, "messages[1].content"),
    ({"messages": [*CHAT["messages"], {**HALF, "tool_calls": [CALL]}]}, "messages[1].tool_calls"),
    ({"response_format": {"type": "json_object"}}, "response_format"),
    ({"tools": [TOOL], "tool_choice": "required"}, "tool_choice"), ({"continue_final_message": 1}, "continue_final_message"),
])  # fmt: skip
def test_what_cannot_be_continued_is_refused(fields, param):
    pool = MockPool()
    assert error_of(chat(client(pool), **{**ON, **fields}), 400)["param"] == param and not pool.jobs


# A number beyond float64: Python reads it, llguidance does not.
LONG = "9" * 400


@pytest.mark.parametrize(("value", "words"), [
    ("NaN", "number"), ("1e999", "number"), ("-Infinity", "number"), (LONG, "number"), ('"\\ud800"', "surrogate"),
])  # fmt: skip
def test_arguments_of_a_call_that_json_cannot_hold_are_refused_by_field(value, words):
    asked = {"role": "assistant", "tool_calls": [CALL | {"function": {"name": "f", "arguments": f'{{"a": [{value}]}}'}}]}
    answer = {"role": "tool", "tool_call_id": "c1", "content": "r"}
    pool = MockPool()
    error = error_of(chat(client(pool), messages=[{"role": "user", "content": "q"}, asked, answer], tools=[TOOL]), 400)
    assert error["param"] == "messages[1].tool_calls[0].function.arguments" and words in error["message"]
    assert not pool.jobs


@pytest.mark.parametrize("value", ["NaN", "1e999", LONG])
def test_a_schema_with_a_number_that_json_cannot_hold_is_refused_by_field(value):
    pool = MockPool()
    schema = {"properties": {"a": {"const": "?"}}}
    for fields, param in (
        ({"tools": [TOOL | {"function": {"name": "f", "parameters": schema}}]}, "tools"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "s", "schema": schema}}},
            "response_format.json_schema.schema",
        ),
    ):
        body = json.dumps({**CHAT, **fields}).replace('"?"', value)
        headers = {"content-type": "application/json"}
        error = error_of(client(pool).post("/v1/chat/completions", content=body, headers=headers), 400)
        assert error["param"] == param and "number" in error["message"]
    assert not pool.jobs
