"""What clients send is read exactly: types, unions, unknown fields, numbers that are none, paths of what is wrong."""

import json

import pytest

from tests.raised import refused
from trimtab.errors import RequestError
from trimtab.request import GenerateRequest
from trimtab.serve.api import schemas, to_jobs
from trimtab.serve.api.answers import ChatShape, CompletionShape
from trimtab.serve.contract.settings import Limits
from trimtab.serve.worker.ipc import job_from_message, job_to_message

CHAT = {"model": "demo", "messages": [{"role": "user", "content": "a"}]}
TEXT = {"model": "demo", "prompt": "a"}


def chat(**fields):
    return schemas.read(schemas.ChatRequest, json.dumps({**CHAT, **fields}).encode())


def completion(**fields):
    return schemas.read(schemas.CompletionRequest, json.dumps({**TEXT, **fields}).encode())


def jobs(asked, prompts=({"text": "a"},), limits=Limits(), context=100, most_jobs=96):  # noqa: B008
    return to_jobs.jobs_of(asked, prompts, adapter=None, context_tokens=context, limits=limits, most_jobs=most_jobs)


def requested(**fields):
    return jobs(chat(**fields))[0].request


@pytest.mark.parametrize("fields, message", [
    ({"messages": []}, "messages: must have at least 1 item, has 0"),
    ({"messages": [{"role": "robot", "content": "a"}]},
     "messages[0].role: must be one of system, developer, user, assistant, tool"),
    ({"messages": [{"role": "user", "content": [{"type": "video_url"}]}]},
     "messages[0].content[0]: not supported: this type (its type must be one of text, image_url, input_audio)"),
    ({"logit_bias": {"a": 5}}, "logit_bias.a: must be a token id"), ({"n": "2"}, "n: must be a valid integer"),
    ({"temperature": 3}, "temperature: must be less than or equal to 2"),
    ({"store": True}, "store: not supported: store (must be False; trimtab serve --lenient takes and ignores it)"),
    ({"zoo": 1}, "zoo: not supported: zoo. This server refuses unknown fields; trimtab serve --lenient takes and ignores it"),
    ({"temprature": 1}, "temprature: not supported: temprature (did you mean temperature?). This server refuses unknown "
                        "fields; trimtab serve --lenient takes and ignores it"),
    ({"model": None}, "model: must be a valid string"),
])  # fmt: skip
def test_what_is_wrong_is_said_in_plain_words(fields, message):
    assert str(refused(chat, **fields)) == message


def test_a_long_field_is_not_compared_with_those_that_there_are(monkeypatch):
    monkeypatch.setattr("trimtab.serve.api.schemas.near_names", lambda name, known: [name])
    assert "did you mean" in str(refused(chat, **{"x" * 40: 1})) and "did you mean" not in str(refused(chat, **{"x" * 41: 1}))


@pytest.mark.parametrize("fields, field", [
    ({"max_tokens": "5"}, "max_tokens"), ({"max_tokens": 0}, "max_tokens"), ({"max_tokens": True}, "max_tokens"),
    ({"max_tokens": 2**31}, "max_tokens"), ({"n": 1.0}, "n"), ({"stream": 1}, "stream"), ({"stream": "true"}, "stream"),
    ({"repetition_penalty": 1e-39}, "repetition_penalty"),
    ({"temperature": -0.1}, "temperature"), ({"temperature": "1"}, "temperature"), ({"top_p": 0}, "top_p"),
    ({"top_p": 1.1}, "top_p"), ({"min_p": -1}, "min_p"), ({"top_k": -2}, "top_k"), ({"seed": 2**63}, "seed"),
    ({"repetition_penalty": 0}, "repetition_penalty"), ({"presence_penalty": 2.1}, "presence_penalty"),
    ({"frequency_penalty": False}, "frequency_penalty"), ({"logit_bias": {"1": 101}}, "logit_bias.1"),
    ({"logit_bias": {"a": 5}}, "logit_bias.a"), ({"logit_bias": {"01": 5}}, "logit_bias.01"),
    ({"logit_bias": {str(token): 0 for token in range(1025)}}, "logit_bias"), ({"logit_bias": {"1": True}}, "logit_bias.1"),
    ({"stop": 5}, "stop"), ({"stop": ["a"] * 17}, "stop"), ({"stop": ["a", 5]}, "stop[1]"), ({"store": True}, "store"),
    ({"modalities": ["audio"]}, "modalities[0]"), ({"tool_choice": "any"}, "tool_choice"), ({"tool_choice": 5}, "tool_choice"),
    ({"tool_choice": {"type": "function"}}, "tool_choice.function"), ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
    ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0].function.name"),
    ({"chat_template_kwargs": {"add_generation_prompt": False}}, "chat_template_kwargs.add_generation_prompt"),
    ({"service_tier": "priority"}, "service_tier"), ({"messages": []}, "messages"), ({"model": ""}, "model"),
    ({"messages": [{"role": "robot", "content": "a"}]}, "messages[0].role"),
    ({"messages": [{"role": "user", "content": None}]}, "messages[0].content"),
    ({"messages": [{"role": "user"}]}, "messages[0].content"),
    ({"messages": [{"role": "assistant", "content": "a", "tool_calls": [{}]}]}, "messages[0].tool_calls[0].id"),
    ({"messages": [{"role": "tool", "content": "a"}]}, "messages[0].tool_call_id"),
    ({"messages": [{"role": "user", "content": "a", "tool_calls": []}]}, "messages[0].tool_calls"),
    ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content[0].text"),
    ({"messages": [{"role": "user", "content": ["a"]}]}, "messages[0].content[0]"),
    ({"messages": [{"role": "user", "content": [{"type": "input_audio", "input_audio": {"data": 1, "format": "wav"}}]}]},
     "messages[0].content[0].input_audio.data"),
    ({"response_format": {"type": "json_schema", "json_schema": {"name": "a b"}}}, "response_format.json_schema.name"),
    ({"response_format": {"type": "grammar"}}, "response_format.type"),
    ({"stream_options": {"continuous_usage_stats": True}}, "stream_options.continuous_usage_stats"),
    ({"reasoning_effort": "extreme"}, "reasoning_effort"),
])  # fmt: skip
def test_a_wrong_value_is_named_by_its_path(fields, field):
    assert refused(chat, **fields).field == field


@pytest.mark.parametrize("fields, name", [
    ({"store": True}, "store"), ({"metadata": {"a": "b"}}, "metadata"), ({"service_tier": "priority"}, "service_tier"),
    ({"functions": [{"name": "f"}]}, "functions"), ({"modalities": ["audio"]}, "modalities"),
    ({"tools": [{"type": "web_search"}]}, "this type of tool"), ({"prediction": {}}, "prediction"),
])  # fmt: skip
def test_a_value_that_the_server_does_not_support_is_called_so(fields, name):
    assert f"not supported: {name}" in str(refused(chat, **fields))


def test_a_field_that_must_be_empty_is_refused_in_words_of_its_own():
    text = str(refused(chat, functions=[{"name": "f"}]))
    assert "not supported: functions (must be empty or left out)" in text and "validation" not in text


def test_everything_that_is_wrong_is_named():
    error = refused(chat, n="x", foo=1, top_k="y")
    assert error.field == "top_k" and "also wrong: n, foo" in str(error)


def test_values_of_clients_are_not_repeated():
    assert "secret" not in str(refused(chat, n="secret"))


def test_what_changes_nothing_is_taken():
    chat(
        presence_penalty=0.0, frequency_penalty=0, logit_bias={}, metadata=None, tools=[], tool_choice="auto", store=False,
        parallel_tool_calls=True, modalities=["text"], service_tier="auto", user="me", safety_identifier="me",
        max_tokens=None, temperature=None, stop=None, response_format=None, stream_options=None, seed=None,
    )  # fmt: skip
    completion(echo=False, best_of=1, suffix="", logprobs=None)


@pytest.mark.parametrize("number", ["NaN", "Infinity", "-Infinity", "1e999", "-1e999"])
def test_numbers_that_json_has_not_are_refused(number):
    body = json.dumps({**CHAT, "temperature": 7}).replace("7", number)
    assert refused(schemas.read, schemas.ChatRequest, body.encode()).field == "temperature"


@pytest.mark.parametrize("prompt, expected", [
    ("a", [{"text": "a"}]), (["a", "b"], [{"text": "a"}, {"text": "b"}]), ([1, 2], [[1, 2]]), ([[1], [2]], [[1], [2]]),
])  # fmt: skip
def test_every_form_of_prompt_is_read(prompt, expected):
    assert to_jobs.prompts_of(completion(prompt=prompt)) == expected


@pytest.mark.parametrize("prompt, field", [
    ([1, "a"], "prompt[1]"), ([True], "prompt[0]"), ([[1], ["a"]], "prompt[1][0]"), ([-1], "prompt[0]"), ({}, "prompt"),
    (5, "prompt"), ([2**31], "prompt[0]"), (["a", 1], "prompt[1]"), ([1.5], "prompt[0]"),
])  # fmt: skip
def test_a_prompt_of_no_form_is_refused_at_its_place(prompt, field):
    assert refused(completion, prompt=prompt).field == field


@pytest.mark.parametrize("prompt, field", [("", "prompt"), ([], "prompt"), (["a", ""], "prompt[1]"), ([[]], "prompt")])
def test_an_empty_prompt_is_refused(prompt, field):
    assert refused(lambda: to_jobs.prompts_of(completion(prompt=prompt))).field == field


# To jobs --------------------------------------------------------------------------------------------------------------


def test_openais_defaults_hold():
    assert requested() == GenerateRequest(max_new_tokens=100, temperature=1.0)
    assert jobs(chat())[0].fills_context and not jobs(chat(max_tokens=5))[0].fills_context


def test_sampling_reaches_the_request():
    found = requested(
        temperature=0.5, top_p=0.9, top_k=40, min_p=0.1, repetition_penalty=1.1, seed=4, stop="x", max_completion_tokens=7,
        presence_penalty=0.5, frequency_penalty=-1, logit_bias={"5": -100, "7": 1.5},
    )  # fmt: skip
    assert found == GenerateRequest(
        max_new_tokens=7, temperature=0.5, top_p=0.9, top_k=40, min_p=0.1, repetition_penalty=1.1, seed=4, stop=("x",),
        presence_penalty=0.5, frequency_penalty=-1, logit_bias={5: -100, 7: 1.5},
    )  # fmt: skip
    assert job_from_message(json.loads(json.dumps(job_to_message(jobs(chat(logit_bias={"5": 1}))[0])))).request.logit_bias == (
        (5, 1.0),
    )


# Lenient --------------------------------------------------------------------------------------------------------------


def leniently(**fields):
    ignored = []
    return schemas.read(schemas.ChatRequest, json.dumps({**CHAT, **fields}).encode(), ignored=ignored), ignored


def test_a_lenient_server_names_what_it_does_not_use():
    message = {"role": "user", "content": [{"type": "text", "text": "a", "cache": {"deep": [1]}}], "weight": 1}
    asked, ignored = leniently(
        store=True, metadata={"a": "b"}, service_tier="flex", messages=[message], temperature=0.5, prediction={"a": 1},
    )  # fmt: skip
    assert sorted(ignored) == [
        "messages[0].content[0].cache", "messages[0].weight", "metadata", "prediction", "service_tier", "store",
    ]  # fmt: skip
    assert asked.temperature == 0.5 and asked.messages[0].content[0].text == "a" and asked.store is None
    assert leniently()[1] == []


def test_a_lenient_server_refuses_wrong_values_as_others_do():
    for fields, field in (({"foo": 1, "n": "x"}, "n"), ({"temperature": 9}, "temperature"), ({"suffix": 1, "stop": 5}, "stop")):
        assert refused(leniently, **fields).field == field
    for number in ("1e999", "NaN", "9" * 5000):
        body = json.dumps({**CHAT, "temperature": 7, "foo": 1}).replace("7", number).encode()
        with pytest.raises(RequestError):
            schemas.read(schemas.ChatRequest, body, ignored=[])


def test_a_lenient_server_takes_more_unknown_fields_than_it_names_otherwise():
    asked, ignored = leniently(**{f"unknown_{number}": [] for number in range(50)})
    assert len(ignored) == 50 and asked.model == "demo"


def test_what_has_no_effect_on_a_greedy_answer_is_left_out():
    assert requested(temperature=0, seed=4, top_p=0.5, top_k=3, min_p=0.2) == GenerateRequest(max_new_tokens=100)


def test_the_values_that_cut_nothing_are_left_out():
    assert requested(top_p=1, top_k=-1, min_p=0) == requested(top_k=0) == requested()


def test_the_last_choices_seed_stays_within_its_numbers():
    assert [job.request.seed for job in jobs(chat(seed=2**63 - 1, n=2))] == [2**63 - 1, 0]


@pytest.mark.parametrize("fields, limits, field", [
    ({"max_tokens": 11}, {"max_tokens": 10}, "max_tokens"), ({"n": 3}, {"n": 2}, "n"),
    ({"top_logprobs": 1}, {}, "top_logprobs"), ({"logprobs": False, "top_logprobs": 0}, {}, "top_logprobs"),
    ({"max_tokens": 1, "max_completion_tokens": 1}, {}, "max_completion_tokens"),
    ({"response_format": {"type": "text", "json_schema": {"name": "a"}}}, {}, "response_format.json_schema"),
    ({"response_format": {"type": "json_object", "json_schema": {"name": "a"}}}, {}, "response_format.json_schema"),
    ({"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": {"x": "y" * 50}}}},
     {"schema_bytes": 50}, "response_format.json_schema.schema"),
])  # fmt: skip
def test_what_is_beyond_the_limits_is_refused(fields, limits, field):
    assert refused(lambda: jobs(chat(**fields), limits=Limits(**limits))).field == field


def test_a_schema_reaches_the_job():
    schema = {"type": "object", "properties": {"a": {"enum": [1]}}}
    asked = {"type": "json_schema", "json_schema": {"name": "a", "schema": schema, "strict": True}}
    assert jobs(chat(response_format=asked))[0].schema == schema
    assert jobs(chat(response_format={"type": "json_object"}))[0].schema == {}
    assert jobs(chat(response_format={"type": "text"}))[0].schema is None


@pytest.mark.parametrize(
    "prompt", [{"text": "x" * 30_000}, [1] * 101, [{"role": "user", "content": [{"type": "text", "text": "x" * 30_000}]}]]
)
def test_what_cannot_fit_is_refused_without_asking_the_worker(prompt):
    with pytest.raises(RequestError, match="context of 100"):
        jobs(completion(), [prompt])


def test_prompts_times_choices_are_limited():
    assert refused(lambda: jobs(completion(prompt=["a"] * 3, n=3), [{"text": "a"}] * 3)).field == "prompt"
    for count, n, field in ((1, 6, "n"), (3, 2, "prompt"), (6, 1, "prompt")):  # 429 would invite to send it again, in vain
        error = refused(lambda: jobs(completion(prompt=["a"] * count, n=n), [{"text": "a"}] * count, most_jobs=5))  # noqa: B023
        assert error.field == field and "queue of this model hold at most 5 choices" in str(error)
    assert len(jobs(completion(n=5), most_jobs=5)) == 5


def test_more_messages_than_the_limit_are_refused():
    error = refused(lambda: to_jobs.check_media(chat(messages=CHAT["messages"] * 3), takes=("text",), limits=Limits(messages=2)))
    assert error.field == "messages"


def test_a_developer_is_the_system_of_the_template():
    asked = chat(messages=[{"role": "developer", "content": "a"}])
    assert to_jobs.messages_of(asked, limits=Limits(), fetched={}) == [{"role": "system", "content": "a"}]


def test_addresses_are_found_with_their_places_and_data_urls_are_not():
    parts = [{"type": "image_url", "image_url": {"url": url}} for url in ("HTTP://a/b", "data:x", "https://c/d", "HTTP://a/b")]
    asked = chat(messages=[{"role": "user", "content": parts}])
    assert to_jobs.urls_of(asked) == {
        "HTTP://a/b": "messages[0].content[0].image_url.url", "https://c/d": "messages[0].content[2].image_url.url"
    }  # fmt: skip


def test_ids_of_answers_differ():
    heads = {shape(chat()).head["id"] for shape in (ChatShape, CompletionShape) for _ in range(2)}
    assert len(heads) == 4
