"""Chat templates of the structures that published ones have, in our own words: what each is given, and what it writes.

Compared by hand with published templates, which are not copied here (their licences differ): Gemma 4 E2B, E4B and 31B, Gemma 2,
Qwen2.5, Qwen3.5 and 3.6, Llama 3 and 3.2, Mistral 7B and Nemo, each with text, system messages, parts, calls, results and thoughts,
through `prompt.prepare`. What differed and was mended: templates that join contents as text were given lists by models with a
processor (refused, or written as Python writes a list), and ids of calls that are not nine letters long were refused by Mistral's.
Of Gemma 3 (ALTERNATES) and Mistral Small 3.2 (NAMES) the structure alone is known here: whole templates were not at hand.
"""

import pytest
import torch

import trimtab
from tests.raised import raised
from trimtab.demo.demo import FOLDER as DEMO
from trimtab.engine.chat import prompt
from trimtab.engine.chat.answer_forms import form_of
from trimtab.errors import RequestError

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
# The system message becomes the head of the first message, from its text or its first part; roles alternate; there are no tools.
ALTERNATES = """{{ bos_token }}{%- if messages[0]['role'] == 'system' -%}
    {%- set head = (messages[0]['content'] if messages[0]['content'] is string else messages[0]['content'][0]['text']) + '\n\n' -%}
    {%- set rest = messages[1:] -%}
{%- else -%}{%- set head = '' -%}{%- set rest = messages -%}{%- endif -%}
{%- for message in rest -%}
    {%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) -%}
        {{ raise_exception('user and assistant take turns') }}{%- endif -%}
    {{ '<turn of ' + ('model' if message['role'] == 'assistant' else message['role']) + '>\n' + (head if loop.first else '') }}
    {%- if message['content'] is string -%}{{ message['content'] | trim }}
    {%- elif message['content'] is iterable -%}{%- for item in message['content'] -%}
        {{ '<image>' if item['type'] == 'image' else item['text'] | trim }}{%- endfor -%}
    {%- else -%}{{ raise_exception('neither text nor parts') }}{%- endif -%}{{ '<end of turn>\n' }}
{%- endfor -%}{%- if add_generation_prompt -%}{{ '<turn of model>\n' }}{%- endif -%}"""
# Calls are a name and arguments, with an id of nine letters; parts are read by kind; a turn without a call has to alternate.
NAMES = """{{- bos_token }}{%- set rest = messages %}{%- if messages[0]['role'] == 'system' %}{{- '[SYSTEM_PROMPT]' -}}
    {%- if messages[0]['content'] is string %}{{- messages[0]['content'] -}}
    {%- else %}{%- for block in messages[0]['content'] %}
        {{- block['text'] if block['type'] == 'text' else raise_exception('text alone') }}{%- endfor %}{%- endif %}
    {{- '[/SYSTEM_PROMPT]' -}}{%- set rest = messages[1:] %}{%- endif %}
{%- if tools is defined and tools is not none and tools | length > 0 %}
    {{- '[AVAILABLE_TOOLS]' + (tools | tojson) + '[/AVAILABLE_TOOLS]' }}{%- endif %}
{%- set ns = namespace(index=0) %}
{%- for message in rest %}
    {%- set has_calls = message.tool_calls is defined and message.tool_calls is not none and message.tool_calls | length > 0 %}
    {%- if message.role == 'user' or (message.role == 'assistant' and not has_calls) %}
        {%- if (message['role'] == 'user') != (ns.index % 2 == 0) %}
            {{- raise_exception('user and assistant take turns') }}{%- endif %}
        {%- set ns.index = ns.index + 1 %}{%- endif %}
{%- endfor %}
{%- for message in rest %}
    {%- if message['role'] == 'user' %}{{- '[INST]' }}
        {%- if message['content'] is string %}{{- message['content'] }}
        {%- else %}{%- for block in message['content'] %}
            {{- block['text'] if block['type'] == 'text' else '[IMG]' }}{%- endfor %}{%- endif %}
        {{- '[/INST]' }}
    {%- elif message['role'] == 'assistant' %}
        {%- if message.tool_calls is defined and message.tool_calls is not none and message.tool_calls | length > 0 %}
            {%- for tool in message['tool_calls'] %}{%- set arguments = tool['function']['arguments'] %}
                {%- if tool.id | length != 9 %}{{- raise_exception('ids have nine letters') }}{%- endif %}
                {%- if arguments is not string %}{%- set arguments = arguments | tojson %}{%- endif %}
                {{- '[TOOL_CALLS]' + tool['function']['name'] + '[CALL_ID]' + tool.id + '[ARGS]' + arguments }}{%- endfor %}
        {%- else %}{{- message['content'] if message['content'] is string else message['content'][0]['text'] }}{%- endif %}
        {{- eos_token }}
    {%- elif message['role'] == 'tool' %}
        {{- '[TOOL_RESULTS]' + message.tool_call_id + '[TOOL_CONTENT]' + message['content'] | string + '[/TOOL_RESULTS]' }}
    {%- else %}{{- raise_exception('no such role') }}{%- endif %}
{%- endfor %}"""
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
    with trimtab.load(DEMO / "base", quant="none", dtype="float32", context=1024, device="cpu") as loaded:
        yield loaded


@pytest.fixture
def written(model, monkeypatch):
    def write(template, messages, tools=(), **kwargs):
        monkeypatch.setattr(model.processor, "chat_template", template)
        model.__dict__.pop("control_tokens", None)
        inputs = prompt.prepare(model, messages, tools=tools, device=torch.device("cpu"), template_kwargs=kwargs or None)
        return model.processor.tokenizer.decode(list(inputs.token_ids))

    yield write
    model.__dict__.pop("control_tokens", None)


PARTS = [{"type": "text", "text": "How is it "}, {"type": "text", "text": "in Paris?"}]


@pytest.mark.parametrize("content", ["How is it in Paris?", PARTS])
@pytest.mark.parametrize("template", [JOINS, TRIMS, SCANS, ALTERNATES, NAMES])
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


@pytest.mark.parametrize("content", ["Be brief.", [{"type": "text", "text": "Be brief."}]])
@pytest.mark.parametrize("template", [ALTERNATES, NAMES])
def test_a_system_message_and_turns_of_both_are_written_in_order(written, template, content):
    said = [
        {"role": "system", "content": content}, ASKED, {"role": "assistant", "content": "Cold."},
        {"role": "user", "content": "And now?"},
    ]  # fmt: skip
    text = written(template, said)
    places = [text.index(words) for words in ("Be brief.", "How is it in Paris?", "Cold.", "And now?")]
    assert places == sorted(places) and "'type'" not in text and '"type"' not in text
    assert "user and assistant take turns" in str(raised(RequestError, written, template, [ASKED, ASKED]))


def test_a_template_without_tools_refuses_them_by_name(written):
    assert form_of(ALTERNATES).calls is None and form_of(ALTERNATES).thoughts is None
    assert "not supported: tools" in str(raised(RequestError, written, ALTERNATES, [ASKED], [TOOL]))
    assert not {"tools", "enable_thinking"} & form_of(ALTERNATES).reads  # what the server refuses by name


def test_calls_by_name_go_into_the_prompt_with_ids_of_nine_letters(written):
    assert form_of(NAMES).calls == "mistral-args"
    text = written(NAMES, answered("call_0123456789"), [TOOL])
    made = text.partition("[CALL_ID]")[2].partition("[ARGS]")[0]
    assert len(made) == 9 and f"[TOOL_CALLS]weather[CALL_ID]{made}[ARGS]" in text
    assert f"[TOOL_RESULTS]{made}[TOOL_CONTENT]12 degrees[/TOOL_RESULTS]" in text
