"""Answers as models of five families write them, read in whatever pieces they come: text, thoughts, calls."""

import json
import random

import pytest

from trimtab.engine.chat.answer_forms import CALL_MARKS, AnswerForm
from trimtab.engine.chat.answer_reader import AnswerReader, Call, JsonSpan

THINK, CHANNEL = ("<think>", "</think>"), ("<|channel>", "<channel|>")
FUNCTIONS = {"weather": {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}}, "now": {}}
PARIS = ("weather", {"city": "Paris", "days": 3})
Q = '<|"|>'

CASES = {
    "gemma4": [
        (f"<|tool_call>call:weather{{city:{Q}Paris{Q},days:3}}<tool_call|>", "", [PARIS]),
        (f"I look.\n<|tool_call>call:weather{{days:3,city:{Q}Paris{Q}}}<tool_call|><|tool_call>call:now{{}}<tool_call|>",
         "I look.", [PARIS, ("now", {})]),
        (f"<|tool_call>call:now{{a:{{b:[1,-2.5,true,null,{Q}x,}}]{Q}],c:{{}}}},{Q}odd key{Q}:plain}}<tool_call|>", "",
         [("now", {"a": {"b": [1, -2.5, True, None, "x,}]"], "c": {}}, "odd key": "plain"})]),
        ('<|tool_call>call:weather{"city":"Pa\\"ris"}<tool_call|>', "", [("weather", {"city": 'Pa"ris'})]),
        ("a < b, <|tool, {} done", "a < b, <|tool, {} done", []),
    ],
    "hermes": [
        ('<tool_call>\n{"name": "weather", "arguments": {"city": "Paris", "days": 3}}\n</tool_call>', "", [PARIS]),
        ('Let me see.\n\n<tool_call>\n{"name": "weather", "arguments": {"city": "Paris", "days": 3}}\n</tool_call>\n'
         '<tool_call>\n{"arguments": {}, "name": "now"}\n</tool_call>', "Let me see.", [PARIS, ("now", {})]),
        ('<tool_call>{"name": "now", "arguments": {"a": "}</tool_call> \\\\\\" {"}}</tool_call> and so', "and so",
         [("now", {"a": '}</tool_call> \\" {'})]),
        ('<tool_call>{"name": "now", "arguments": "{\\"a\\": 1}"}</tool_call>', "", [("now", {"a": 1})]),
        ("<tool_call>never mind</tool_call>", "<tool_call>never mind</tool_call>", []),
        ('<tool_call>{"name": 5, "arguments": {}}</tool_call>', '<tool_call>{"name": 5, "arguments": {}}</tool_call>', []),
    ],
    "qwen-xml": [
        ("<tool_call>\n<function=weather>\n<parameter=city>\nParis\n</parameter>\n<parameter=days>\n3\n</parameter>\n</function>\n"
         "</tool_call>", "", [PARIS]),
        ("<tool_call>\n<function=weather>\n<parameter=city>\n12\nlines\n</parameter>\n</function>\n</tool_call>\n<tool_call>\n"
         "<function=now>\n</function>\n</tool_call>", "", [("weather", {"city": "12\nlines"}), ("now", {})]),
    ],
    "llama": [
        ('{"name": "weather", "parameters": {"city": "Paris", "days": 3}}', "", [PARIS]),
        ('<|python_tag|>{"name": "weather", "parameters": {"city": "Paris", "days": 3}}; {"name": "now", "parameters": {}}', "",
         [PARIS, ("now", {})]),
        ('{"type": "function", "name": "now", "parameters": {"a": 1}}', "", [("now", {"a": 1})]),
        ('{"answer": 5}', '{"answer": 5}', []), ("It is {so}", "It is {so}", []),
    ],
    "mistral": [
        ('[TOOL_CALLS][{"name": "weather", "arguments": {"city": "Paris", "days": 3}, "id": "abcdefghi"}]', "", [PARIS]),
        ('[TOOL_CALLS] [{"name": "weather", "arguments": {"city": "Paris", "days": 3}}, {"name": "now", "arguments": {}}]', "",
         [PARIS, ("now", {})]),
        ("[TOOL_", "[TOOL_", []),
    ],
    "mistral-args": [
        ('Well[TOOL_CALLS]weather[ARGS]{"city": "Paris", "days": 3}[TOOL_CALLS]now[CALL_ID]abcdefghi[ARGS]{}', "Well",
         [PARIS, ("now", {})]),
        ('[TOOL_CALLS][{"name": "now", "arguments": {"a": [{}]}}]', "", [("now", {"a": [{}]})]),
        ("[TOOL_CALLS]weather", "[TOOL_CALLS]weather", []),
    ],
}  # fmt: skip
ALL = [(form, *case) for form, cases in CASES.items() for case in cases]


def read(form, pieces, **options):
    """Return (text, thoughts, calls) of an answer in pieces, and check that each call's first piece has its name."""
    reader = AnswerReader(form, **options)
    parts = [part for piece in pieces for part in reader.push(piece)] + reader.finish()
    texts = {"text": "", "reasoning": ""}
    calls = []
    for kind, value in parts:
        if kind != "call":
            assert value
            texts[kind] += value
        elif value.name is not None:
            assert value == Call(len(calls), id=value.id, name=value.name) and value.id
            calls.append((value.name, ""))
        else:
            assert value.index == len(calls) - 1
            calls[-1] = (calls[-1][0], calls[-1][1] + value.arguments)
    assert reader.calls == len(calls)
    return texts["text"], texts["reasoning"], [(name, json.loads(text)) for name, text in calls]


def cuts(text):
    """Return the same text whole, by the character, and in pieces of many sizes."""
    yield [text]
    yield list(text)
    for seed in range(6):
        draw = random.Random(seed)
        places = sorted(draw.sample(range(1, len(text)), min(len(text) - 1, draw.randint(1, 6)))) if len(text) > 1 else []
        yield [text[start:end] for start, end in zip([0, *places], [*places, len(text)], strict=True)]


@pytest.mark.parametrize("form, text, said, calls", ALL)
def test_a_call_is_read_in_whatever_pieces_it_comes(form, text, said, calls):
    for pieces in cuts(text):
        assert read(AnswerForm(form), pieces, functions=FUNCTIONS) == (said, "", calls), pieces


@pytest.mark.parametrize("form, text, said, calls", ALL)
def test_without_tools_the_same_is_text(form, text, said, calls):
    for pieces in cuts(text):
        assert read(AnswerForm(form), pieces) == (text, "", [])


@pytest.mark.parametrize("form, text, said, calls", [case for case in ALL if case[0] != "llama"])
def test_a_thought_stands_apart_from_what_follows(form, text, said, calls):
    marks = CHANNEL if form == "gemma4" else THINK
    label = "thought\n" if form == "gemma4" else "\n"
    thought = f"{marks[0]}{label}So, {marks[1][:-1]} it is.\n{marks[1]}\n\n"
    for pieces in cuts(thought + text):
        found = read(AnswerForm(form, marks), pieces, functions=FUNCTIONS)
        assert found == (said, f"So, {marks[1][:-1]} it is.", calls), pieces
    for pieces in cuts(thought.removeprefix(marks[0]) + text):
        assert read(AnswerForm(form, marks), pieces, functions=FUNCTIONS, in_thought=True)[1:] == found[1:]


def test_an_empty_thought_is_none_and_one_that_is_cut_is_told():
    form = AnswerForm("gemma4", CHANNEL)
    assert read(form, ["<|channel>thought\n<channel|>", "Yes"]) == ("Yes", "", [])
    assert read(form, ["<|channel>thou", "ght\nWell, I"]) == ("", "Well, I", [])


def test_arguments_come_as_they_are_written():
    reader = AnswerReader(AnswerForm("hermes"), functions=FUNCTIONS)
    pieces = ["<tool_call>", '{"name": "now", ', '"arguments": {"a"', ": 1", "}}", "</tool_call>"]
    found = [[value for _, value in reader.push(piece)] for piece in pieces]
    assert [[call.arguments or call.name for call in calls] for calls in found] == [[], [], ["now", '{"a"'], [": 1"], ["}"], []]


def test_a_call_that_is_cut_keeps_what_was_written():
    reader = AnswerReader(AnswerForm("gemma4"), functions=FUNCTIONS)
    parts = [*reader.push("<|tool_call>call:now{a:[1,"), *reader.finish()]
    assert [(call.name, call.arguments) for _, call in parts] == [("now", ""), (None, "a:[1,")]


@pytest.mark.parametrize("form", sorted(CASES))
def test_nothing_that_a_model_writes_is_an_error(form):
    words = ["<tool_call>", "</tool_call>", "<|tool_call>", "<tool_call|>", "call:f{", "{", "}", "[", "]", '"', "\\", Q, ":", ",",
             '"name"', '"arguments"', "[TOOL_CALLS]", "[ARGS]", "<function=f>", "<parameter=a>", "</parameter>", "<think>",
             "</think>", " ", "\n", "a", "1", "<|python_tag|>", "[" * 2000, "{a:" * 300]  # fmt: skip
    for seed in range(400):
        draw = random.Random(seed)
        reader = AnswerReader(AnswerForm(form, THINK), functions=FUNCTIONS)
        for _ in range(draw.randint(1, 25)):
            reader.push(draw.choice(words))
        reader.finish()


CUT_FORMS = [case for case in ALL if case[3]]


@pytest.mark.parametrize("form, text, said, calls", CUT_FORMS)
def test_a_call_that_is_cut_anywhere_gives_the_beginning_of_its_json(form, text, said, calls):
    whole = AnswerReader(AnswerForm(form), functions=FUNCTIONS)
    expected, mark = _calls([*whole.push(text), *whole.finish()]), CALL_MARKS[form][0]
    assert not whole.is_call_cut
    for place in range(len(text)):
        reader = AnswerReader(AnswerForm(form), functions=FUNCTIONS, must_call=not said)
        parts = [*reader.push(text[:place]), *reader.finish(is_cut=True)]
        written = "".join(value for kind, value in parts if kind == "text")
        begun = next(size for size in range(len(mark), -1, -1) if written.endswith(mark[:size]))  # a mark that is not whole
        assert said.startswith(written[: len(written) - begun].strip()), (place, written)
        found = _calls(parts)
        assert [name for name, _ in found] == [name for name, _ in expected[: len(found)]]
        for (_, arguments), (_, complete) in zip(found, expected, strict=False):
            assert complete.startswith(arguments), (text[:place], arguments)
        for _, arguments in found[:-1]:
            json.loads(arguments)
    in_order = not text.startswith('{"type"')  # a name is looked for at the beginning; elsewhere the whole object is needed
    assert not in_order or (found and found[-1][1])


def _calls(parts):
    """Return (name, arguments as they are written) of each call."""
    calls = []
    for kind, value in parts:
        if kind == "call" and value.name is not None:
            calls.append((value.name, ""))
        elif kind == "call":
            calls[-1] = (calls[-1][0], calls[-1][1] + value.arguments)
    return calls


@pytest.mark.parametrize("body, json_prefix", [
    ("", "{"), ("ci", "{"), ("city:", '{"city": '), ("city:<|", '{"city": '), (f"city:{Q}", '{"city": "'),
    (f"city:{Q}a\nb", '{"city": "a\\nb'), (f"city:{Q}Pa<|", '{"city": "Pa'), ("days:1", '{"days": 1'),
    ("days:-", '{"days": -'), ("x:tru", '{"x": tru'), ("x:No", '{"x": '), ("x:plai", '{"x": "plai'),
    (f"tags:[{Q}a{Q},", '{"tags": ["a"'), ("a:{b:[1,2", '{"a": {"b": [1, 2'), ("a:{}", '{"a": {}'), ("a:1}", '{"a": 1}'),
])  # fmt: skip
def test_arguments_of_gemma4_that_are_cut_are_the_beginning_of_json(body, json_prefix):
    reader = AnswerReader(AnswerForm("gemma4"), functions=FUNCTIONS)
    parts = [*reader.push("<|tool_call>call:now{" + body), *reader.finish(is_cut=True)]
    assert _calls(parts) == [("now", json_prefix)] and reader.is_call_cut


def test_a_call_without_its_whole_name_is_told_only_where_one_function_may_be_called():
    for form, text in [("gemma4", "<|tool_call>call:no"), ("gemma4", "<|tool_call>"), ("hermes", '<tool_call>{"na'),
                       ("llama", '{"na'), ("llama", '<|python_tag|>{"name": "no'), ("mistral", "[TOOL_CALLS][{"),
                       ("mistral-args", "[TOOL_CALLS]no"), ("qwen-xml", "<tool_call>\n<func")]:  # fmt: skip
        reader = AnswerReader(AnswerForm(form), functions=FUNCTIONS, must_call=True)
        assert reader.push(text) + reader.finish(is_cut=True) == []
        reader = AnswerReader(AnswerForm(form), functions=FUNCTIONS, must_call=True, only_name="now")
        assert _calls(reader.push(text) + reader.finish(is_cut=True)) == [("now", "")]
    # An answer that may be text: an object of Llama's may be one, a mark that no call follows is one.
    for form, text in [("llama", '{"na'), ("gemma4", "<|tool_call>never"), ("hermes", "<tool_call>never")]:
        reader = AnswerReader(AnswerForm(form), functions=FUNCTIONS)
        assert reader.push(text) + reader.finish(is_cut=True) == [("text", text)]


@pytest.mark.parametrize(
    "text", ["<tool_call>\n" + "{" * 20_000, '<tool_call>{"arguments": {"a": "' + "x" * 20_000 + '"}, "name": "f"}</tool_call>']
)
def test_a_call_whose_name_comes_late_is_looked_at_once(text, monkeypatch):
    """32,000 tokens of brackets took minutes, in which no other answer had a token."""
    looked_at, feed = [], JsonSpan.feed
    monkeypatch.setattr(JsonSpan, "feed", lambda span, piece: looked_at.append(len(piece)) or feed(span, piece))
    reader = AnswerReader(AnswerForm("hermes"), functions={"f": {}})
    parts = [part for start in range(0, len(text), 4) for part in reader.push(text[start : start + 4])]
    parts += reader.finish()
    assert sum(looked_at) <= len(text)
    if "name" in text:
        assert "".join(call.arguments for kind, call in parts if kind == "call") == '{"a": "' + "x" * 20_000 + '"}'


def _strict(text):
    def refuse(word):
        raise ValueError(word)

    return json.loads(text, parse_constant=refuse)


@pytest.mark.parametrize(("form", "text", "expected"), [
    ("gemma4", "<|tool_call>call:f{x:1e999,y:-1e400}<tool_call|>", {"x": "1e999", "y": "-1e400"}),
    ("qwen-xml", "<tool_call>\n<function=f>\n<parameter=x>\n[1, -Infinity]\n</parameter>\n</function>\n</tool_call>",
     {"x": [1, "-Infinity"]}),
    ("hermes", '<tool_call>\n{"name": "f", "arguments": {"x": NaN, "y": [-Infinity, -5, "a\\"NaN"]}}\n</tool_call>',
     {"x": "NaN", "y": ["-Infinity", -5, 'a"NaN']}),
    ("hermes", '<tool_call>\n{"arguments": {"x": 1e999}, "name": "f"}\n</tool_call>', {"x": "1e999"}),
    ("llama", '{"parameters": {"x": ' + "1" * 5000 + '}, "name": "f"}', {"x": "1" * 5000}),
])  # fmt: skip
@pytest.mark.parametrize("size", [1, 3, 999])
def test_arguments_are_json_where_a_model_writes_numbers_that_json_does_not_have(form, text, expected, size):
    reader = AnswerReader(AnswerForm(form), functions={"f": None})
    parts = [part for start in range(0, len(text), size) for part in reader.push(text[start : start + size])] + reader.finish()
    assert _strict("".join(call.arguments for kind, call in parts if kind == "call")) == expected


@pytest.mark.parametrize(("schema", "text", "expected"), [
    ({"type": "boolean"}, "True", True), ({"anyOf": [{"type": "boolean"}, {"type": "null"}]}, "None", None),
    ({"type": ["integer", "null"]}, "None", None), ({"type": "integer"}, "None", "None"), ({"type": "string"}, "True", "True"),
    ({"$ref": "#/definitions/Zip"}, "01234", "01234"), ({"$ref": "#/definitions/Flag"}, "False", False),
])  # fmt: skip
def test_values_between_tags_are_of_the_kind_that_their_schema_has(schema, text, expected):
    whole = {"Zip": {"type": "string"}, "Flag": {"type": "boolean"}, "F": {"type": "object", "properties": {"x": schema}}}
    reader = AnswerReader(AnswerForm("qwen-xml"), functions={"f": {"$ref": "#/definitions/F", "definitions": whole}})
    parts = reader.push(f"<tool_call>\n<function=f>\n<parameter=x>\n{text}\n</parameter>\n</function>\n</tool_call>")
    assert json.loads("".join(call.arguments for kind, call in parts if kind == "call")) == {"x": expected}
