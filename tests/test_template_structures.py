"""Chat templates of the structures that published ones have, in our own words: what each is given, and what it writes.

Compared by hand with published templates, which are not copied here (their licences differ): Gemma 4 E2B, E4B and 31B, Gemma 2,
Qwen2.5, Qwen3.5 and 3.6, Llama 3 and 3.2, Mistral 7B and Nemo, each with text, system messages, parts, calls, results and thoughts,
through `chat.prepare`. What differed and was mended: templates that join contents as text were given lists by models with a
processor (refused, or written as Python writes a list), and ids of calls that are not nine letters long were refused by Mistral's.
Not compared: templates of Gemma 3 and Mistral Small 3.2.
"""

from __future__ import annotations

import pytest
import torch

import trimtab
from trimtab.demo.line import FOLDER as DEMO
from trimtab.errors import RequestError
from trimtab.runtime import chat
from trimtab.runtime.answer_forms import form_of

# Contents are added to texts; ids of calls have nine letters; results are no JSON.
JOINS = """{{- bos_token }}{% if not tools is defined %}{% set tools = none %}{% endif %}
{%- for message in messages %}
    {%- if message["role"] == "user" %}
        {%- if tools is not none and loop.last %}{{- "[TOOLS]" + (tools | tojson) + "[/TOOLS]" }}{% endif %}
        {{- "[INST]" + message["content"] + "[/INST]" }}
    {%- elif message.tool_calls is defined and message.tool_calls is not none %}
        {{- "[TOOL_CALLS][" }}{% for call in message.tool_calls %}
            {%- if call.id is not defined or call.id | length != 9 %}{{- raise_exception("ids have nine letters") }}{% endif %}
            {{- (call.function | tojson)[:-1] + ', "id": "' + call.id + '"}' }}{{- ", " if not loop.last else "]" }}
        {%- endfor %}
    {%- elif message["role"] == "tool" %}
        {%- if message.tool_call_id | length != 9 %}{{- raise_exception("ids have nine letters") }}{% endif %}
        {{- '[RESULT]{"content": ' + message.content | string + ', "call_id": "' + message.tool_call_id + '"}[/RESULT]' }}
    {%- else %}{{- message["content"] + "</s>" }}{% endif %}
{%- endfor %}"""
# A filter turns lists into their Python form without an error; a call is alone in its message.
TRIMS = """{{- bos_token }}{% for message in messages %}
    {%- if not (message.role == 'tool' or 'tool_calls' in message) %}
        {{- '<|head|>' + message['role'] + '\n\n' + message['content'] | trim + '<|end|>' }}
    {%- elif 'tool_calls' in message %}
        {%- if message.tool_calls | length != 1 %}{{- raise_exception("one call at once") }}{% endif %}
        {{- '{"name": "' + message.tool_calls[0].function.name + '", "parameters": ' }}
        {{- message.tool_calls[0].function.arguments | tojson }}{{- '}' }}
    {%- else %}{{- 'ipython\n\n' }}{{- (message.content | tojson) if message.content is iterable else message.content }}{% endif %}
{%- endfor %}{% if tools is defined and tools %}{{- tools | tojson(indent=4) }}{% endif %}
{%- if add_generation_prompt %}{{- '<|head|>assistant\n\n' }}{% endif %}"""
# Contents may be both, a result of a tool is text alone; after one the model's turn goes on.
SCANS = """{{- bos_token }}{% set last = namespace(kind='') %}{% for message in messages %}
    {%- set place = loop.index0 %}{% if message.role != 'tool' %}
        {{- '<|turn>' + message.role + '\n' }}
        {%- for call in message.get('tool_calls') or [] %}
            {{- '<|tool_call>call:' + call.function.name + '{' }}{% for key, value in call.function.arguments | dictsort %}
                {{- key + ':<|"|>' + value | string + '<|"|>' }}{% endfor %}{{- '}<tool_call|>' }}
            {%- for other in messages[place + 1:] if other.role == 'tool' and other.tool_call_id == call.id %}
                {{- '<|tool_response>' + call.function.name + ':' + other.content | string + '<tool_response|>' }}
            {%- endfor %}
        {%- endfor %}{% set last.kind = 'call' if message.get('tool_calls') else 'text' %}
        {%- if message.content is string %}{{- message.content | trim }}
        {%- else %}{% for part in message.content or [] %}
            {{- part.text | trim if part.type == 'text' else '<|image|>' }}{% endfor %}{% endif %}
        {{- '' if last.kind == 'call' else '<turn|>\n' }}
    {%- endif %}
{%- endfor %}{% if add_generation_prompt and last.kind != 'call' %}{{- '<|turn>model\n' }}
    {%- if not enable_thinking | default(false) %}{{- '<|channel>thought\n<channel|>' }}{% endif %}{% endif %}
{%- if tools %}{{- '' }}{% endif %}"""
TOOL = {"type": "function", "function": {
    "name": "weather", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}}}  # fmt: skip
ASKED = {"role": "user", "content": "How is it in Paris?"}


def call(call_id, city="Paris"):
    return {"id": call_id, "type": "function", "function": {"name": "weather", "arguments": {"city": city}}}


def answered(call_id):
    return [ASKED, {"role": "assistant", "content": None, "tool_calls": [call(call_id)]},
            {"role": "tool", "tool_call_id": call_id, "content": "12 degrees"}]  # fmt: skip


@pytest.fixture(scope="module")
def model():
    plan = trimtab.plan(DEMO / "base", quant="none", dtype="float32", context=1024, device="cpu")
    with trimtab.load(plan) as loaded:
        yield loaded


@pytest.fixture
def written(model, monkeypatch):
    def write(template, messages, tools=(), **kwargs):
        monkeypatch.setattr(model.processor, "chat_template", template)
        model.__dict__.pop("control_tokens", None)
        inputs = chat.prepare(model, messages, tools=tools, device=torch.device("cpu"), template_kwargs=kwargs or None)
        return model.processor.tokenizer.decode(list(inputs.token_ids))

    yield write
    model.__dict__.pop("control_tokens", None)


PARTS = [{"type": "text", "text": "How is it "}, {"type": "text", "text": "in Paris?"}]


@pytest.mark.parametrize("content", ["How is it in Paris?", PARTS])
@pytest.mark.parametrize("template", [JOINS, TRIMS, SCANS])
def test_every_structure_is_given_texts_in_its_form(written, template, content):
    text = written(template, [{"role": "user", "content": content}])
    assert "How is it" in text and "Paris?" in text and "'type'" not in text and '"type"' not in text


def test_results_are_written_as_text(written):
    for template in (JOINS, TRIMS, SCANS):
        text = written(template, answered("abcdefghi"), [TOOL])
        assert "12 degrees" in text and "{'type': 'text'" not in text and '"text": "12' not in text
    assert written(JOINS, answered("abcdefghi"), [TOOL]).count("abcdefghi") == 2


@pytest.mark.parametrize("call_id", ["call_0123456789abcdef", "toolu_01", "x"])
def test_ids_of_calls_have_the_length_that_the_template_wants(written, call_id):
    text = written(JOINS, answered(call_id), [TOOL])
    assert call_id not in text.replace("degrees", "")
    made = text.partition('"id": "')[2].partition('"')[0]
    assert len(made) == 9 and made.isalnum() and text.count(made) == 2
    two = [*answered(call_id), {"role": "assistant", "content": "12."}, ASKED, *answered(f"{call_id}2")[1:]]
    assert written(JOINS, two, [TOOL]).count(made) == 2


def test_a_users_own_words_of_that_kind_stay(written):
    said = "Is {'type': 'text', 'text': 'a'} a part, and {\"type\": \"text\", \"text\": \"b\"}?"
    for template in (JOINS, TRIMS, SCANS):
        assert said in written(template, [{"role": "user", "content": said}])


def test_after_a_result_the_models_turn_goes_on_and_a_thought_is_closed(written, model):
    assert written(SCANS, answered("a"), [TOOL]).endswith("<tool_response|>")
    assert written(SCANS, [ASKED]).endswith("<|turn>model\n<|channel>thought\n<channel|>")
    assert written(SCANS, [ASKED], enable_thinking=True).endswith("<|turn>model\n")
    assert form_of(SCANS).calls == "gemma4" and form_of(JOINS).calls == "mistral"


def test_what_the_template_itself_refuses_is_said_in_its_words(written):
    two = [ASKED, {"role": "assistant", "content": None, "tool_calls": [call("a"), call("b", "Rome")]}]
    with pytest.raises(RequestError, match="one call at once"):
        written(TRIMS, two, [TOOL])
