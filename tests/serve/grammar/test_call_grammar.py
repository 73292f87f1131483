"""What a model may write where it has to call: every call that can be drawn is read again, and satisfies its tool's schema."""

import copy
import json
import random
from functools import cache

import pytest
import torch

from tests import talking
from tests.raised import refused
from trimtab.engine.chat.answer_forms import CALL_MARKS, AnswerForm
from trimtab.engine.chat.answer_reader import AnswerReader
from trimtab.errors import RequestError
from trimtab.serve.grammar.constraint import AfterThought, Grammar, MayThink

END = 1
TREE = {
    "type": "object", "required": ["value"], "additionalProperties": False,
    "properties": {"value": {"type": "integer", "minimum": 0, "maximum": 9},
                   "next": {"anyOf": [{"$ref": "#/$defs/tree"}, {"type": "null"}]}},
}  # fmt: skip
FUNCTIONS = [
    {"name": "weather", "parameters": {
        "type": "object", "required": ["city", "unit"], "additionalProperties": False,
        "properties": {
            "city": {"type": "string", "minLength": 1, "maxLength": 8}, "unit": {"enum": ["C", "F"]},
            "days": {"type": "integer", "minimum": 1, "maximum": 7}, "tags": {"type": "array", "items": {"type": "boolean"},
                                                                               "minItems": 1, "maxItems": 3},
            "exact": {"type": ["boolean", "null"]},
        }}},
    {"name": "tree", "parameters": {
        "$defs": {"tree": TREE}, "type": "object", "properties": {"root": {"$ref": "#/$defs/tree"}}, "required": ["root"],
        "additionalProperties": False}},
    {"name": "now"},
]  # fmt: skip
FORMS = sorted(CALL_MARKS)
BY_NAME = {function["name"]: function for function in FUNCTIONS}


@pytest.fixture(scope="module")
def tokenizer():
    return talking._tokenizer()


@pytest.fixture(scope="module")
def grammar(tokenizer):
    return Grammar(tokenizer, [END])


@cache
def _starts():
    tokenizer = talking._tokenizer()
    return [tokenizer.decode([token]).strip()[:1] for token in range(len(tokenizer))]


def drawn(constraint, tokenizer, draw, *, most=400):
    """Return the text of an answer that a model without any opinion draws; white space and long texts are less likely."""
    ids, text, starts = [2], "", _starts()
    while len(ids) < most:
        scores = constraint(ids, torch.zeros(len(tokenizer)))
        allowed = torch.nonzero(scores > -1).flatten().tolist()
        assert allowed
        # What closes something is preferred now and then, so that answers end.
        closing = [token for token in allowed if token == END or starts[token] in ('"', "}", "]", "<")]
        token = draw.choice(closing if closing and draw.random() < 0.5 else allowed)
        if token == END:
            return text
        ids.append(token)
        text = tokenizer.decode(ids[1:], skip_special_tokens=False)
    return None


@pytest.mark.parametrize("is_special", [False, True])
@pytest.mark.parametrize("form", FORMS)
def test_a_call_whose_marks_are_tokens_can_be_written(form, is_special):
    """As in published checkpoints: Qwen's marks are added tokens that are not special."""
    tokenizer = copy.deepcopy(talking._tokenizer())
    marks = [mark for mark in (*CALL_MARKS[form], "[ARGS]") if mark and mark not in tokenizer.get_vocab()]
    tokenizer.add_tokens(marks, special_tokens=is_special)
    text = {
        "gemma4": "<|tool_call>call:now{}<tool_call|>", "llama": '{"name": "now", "parameters": {}}',
        "hermes": '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>',
        "qwen-xml": "<tool_call>\n<function=now>\n</function>\n</tool_call>",
        "mistral": '[TOOL_CALLS][{"name": "now", "arguments": {}}]', "mistral-args": "[TOOL_CALLS]now[ARGS]{}",
    }[form]  # fmt: skip
    constraint, ids = Grammar(tokenizer, [END]).calls(form, [{"name": "now"}], several=False), [2]
    for token in [*tokenizer(text, add_special_tokens=False)["input_ids"], END]:
        allowed = constraint(ids, torch.zeros(len(tokenizer)))
        assert torch.isfinite(allowed[token]), tokenizer.decode(ids)
        ids.append(token)


def check(name, arguments):
    """Hold arguments against their schema without llguidance or a grammar: in plain words of Python."""
    if name == "now":
        assert arguments == {}
    elif name == "tree":
        assert set(arguments) == {"root"}
        node = arguments["root"]
        while node is not None:
            assert set(node) in ({"value"}, {"value", "next"}) and node["value"] in range(10)
            node = node.get("next")
    else:
        assert {"city", "unit"} <= set(arguments) <= {"city", "unit", "days", "tags", "exact"}
        assert isinstance(arguments["city"], str) and 1 <= len(arguments["city"]) <= 8 and arguments["unit"] in ("C", "F")
        assert arguments.get("days", 1) in range(1, 8) and arguments.get("exact") in (None, True, False)
        tags = arguments.get("tags", [True])
        assert 1 <= len(tags) <= 3 and all(isinstance(tag, bool) for tag in tags)


@pytest.mark.parametrize(("form", "several"), [
    *((form, True) for form in FORMS), ("hermes", False),
    *(pytest.param(form, False, marks=pytest.mark.slow) for form in FORMS if form != "hermes"),
])  # fmt: skip
def test_every_answer_that_can_be_drawn_is_calls_of_these_functions(form, several, grammar, tokenizer):
    draw, seen, ended = random.Random(5), set(), 0
    for _ in range(25):
        text = drawn(grammar.calls(form, FUNCTIONS, several=several), tokenizer, draw)
        if text is None:
            continue
        ended += 1
        reader = AnswerReader(AnswerForm(form), functions={name: f.get("parameters") for name, f in BY_NAME.items()})
        parts = reader.push(text) + reader.finish()
        assert {kind for kind, _ in parts} == {"call"}, text
        calls = {}
        for _, call in parts:
            name, written = calls.get(call.index, (call.name, ""))
            calls[call.index] = (name, written + call.arguments)
        assert several or len(calls) == 1
        for name, written in calls.values():
            check(name, json.loads(written))
            seen.add(name)
    assert ended >= 8 and seen == {"weather", "tree", "now"}


def is_allowed(constraint, tokenizer, text):
    given = [2]
    for token in [*tokenizer(text, add_special_tokens=False)["input_ids"], END]:
        if constraint(given, torch.zeros(len(tokenizer)))[token] == float("-inf"):
            return False
        given.append(token)
    return True


Q = '<|"|>'
WRITTEN = {
    "gemma4": f"<|tool_call>call:weather{{city:{Q}Pa < is{Q},days:3,tags:[true,false],unit:{Q}C{Q}}}<tool_call|>",
    "hermes": '<tool_call>\n{"name": "weather", "arguments": {"city": "Paris", "unit": "C"}}\n</tool_call>',
    "qwen-xml": "<tool_call>\n<function=weather>\n<parameter=city>\nParis\n</parameter>\n<parameter=unit>\nC\n</parameter>\n"
                "<parameter=days>\n3\n</parameter>\n</function>\n</tool_call>",
    "llama": '{"name": "weather", "parameters": {"city": "Paris", "unit": "C"}}',
    "mistral": '[TOOL_CALLS][{"name": "weather", "arguments": {"city":"Paris","unit":"F"}}]',
    "mistral-args": '[TOOL_CALLS]weather[ARGS]{"city": "Paris", "unit": "C", "days": 7}',
}  # fmt: skip


@pytest.mark.parametrize("form", FORMS)
def test_a_call_as_models_write_it_can_be_drawn_and_a_wrong_one_cannot(form, grammar, tokenizer):
    good = WRITTEN[form]
    assert is_allowed(grammar.calls(form, FUNCTIONS, several=True), tokenizer, good)
    assert is_allowed(grammar.calls(form, [BY_NAME["weather"]], several=False), tokenizer, good)
    for wrong in (good.replace("weather", "whether"), good.replace("city", "town"), "Hello", "", good[:-3]):
        assert not is_allowed(grammar.calls(form, FUNCTIONS, several=True), tokenizer, wrong), wrong
    assert not is_allowed(grammar.calls(form, [BY_NAME["now"]], several=True), tokenizer, good)


@pytest.mark.parametrize("form", FORMS)
def test_parameters_that_no_value_satisfies_are_refused(form, grammar):
    bad = {"name": "f", "parameters": {"type": "object", "properties": {"a": {"enum": []}}, "required": ["a"]}}
    assert refused(grammar.calls, form, [bad], several=False, match="cannot be enforced").field == "tools"


def test_free_values_of_gemma4_are_any_of_its_forms(grammar, tokenizer):
    free = [{"name": "f", "parameters": {"type": "object", "properties": {"a": {}, "b": {"type": "object"}}}}]
    for body in (f"a:[1,{{x:{Q}y{Q}}},null],b:{{k:true}}", "", "b:{}", f"a:{Q}{Q}"):
        assert is_allowed(grammar.calls("gemma4", free, several=False), tokenizer, f"<|tool_call>call:f{{{body}}}<tool_call|>"), (
            body
        )
    assert not is_allowed(grammar.calls("gemma4", free, several=False), tokenizer, "<|tool_call>call:f{b:1}<tool_call|>")


DIGIT = {"type": "integer", "minimum": 0, "maximum": 3}


def of(properties, **others):
    return {"type": "object", "properties": properties, "required": list(properties), "additionalProperties": False, **others}


# What each schema needs is drawn in every form, and the answer satisfies it in plain words of Python.
SHAPES = [
    ({"$ref": "#/definitions/X", "definitions": {"X": of({"n": DIGIT})}}, lambda v: v["n"] in range(4)),
    ({"anyOf": [of({"a": DIGIT}), of({"b": DIGIT})]}, lambda v: [*v] in (["a"], ["b"])),
    ({"allOf": [of({"a": DIGIT})]}, lambda v: [*v] == ["a"]),
    ({"properties": {"a": DIGIT}, "required": ["a"]}, lambda v: v["a"] in range(4)),
    ({"properties": {"a": DIGIT}, "required": ["a", "z"], "additionalProperties": DIGIT}, lambda v: v["z"] in range(4)),
    (of({"x": {**of({"a": DIGIT, "b": DIGIT}), "required": [], "anyOf": [{"required": ["a"]}]}}), lambda v: "a" in v["x"]),
    (of({"x": {"type": "array", "prefixItems": [DIGIT, {"const": 7}], "items": False, "minItems": 2}}), lambda v: v["x"][1] == 7),
    (of({"x": {"allOf": [{"type": "integer", "minimum": 2}, {"maximum": 3}]}}), lambda v: v["x"] in (2, 3)),
    (of({"x": {"type": "array", "items": DIGIT, "maxItems": 1}}), lambda v: len(v["x"]) < 2),
    ({"type": "object", "properties": {"a": DIGIT, "b": False}, "required": ["a"]}, lambda v: "b" not in v),
    (of({"v": DIGIT, "next": {"anyOf": [{"$ref": "#"}, {"type": "null"}]}}), lambda v: v["next"] is None or "v" in v["next"]),
    (of({"a": DIGIT, "b": {"$ref": "#/properties/a"}}), lambda v: v["b"] in range(4)),
    (of({"a": {"enum": ["a", "bc"], "maxLength": 1}}), lambda v: v["a"] == "a"),
    (of({"a": {"allOf": [{"enum": [1, 2]}, {"enum": [2, 3], "maximum": 3}]}}), lambda v: v["a"] == 2),
    (of({"a": {"anyOf": [{"const": n, "title": "n"} for n in range(300)]}}), lambda v: v["a"] in range(300)),
]  # fmt: skip


@pytest.mark.parametrize("form", ["gemma4", "qwen-xml", "hermes"])
@pytest.mark.parametrize("place", range(len(SHAPES)))
def test_arguments_satisfy_the_shapes_in_which_libraries_write_schemas(place, form, grammar, tokenizer):
    (schema, is_right), draw, ended = SHAPES[place], random.Random(3), 0
    for _ in range(40):
        text = drawn(grammar.calls(form, [{"name": "f", "parameters": schema}], several=False), tokenizer, draw, most=120)
        if text is not None:
            reader = AnswerReader(AnswerForm(form), functions={"f": schema})
            written = json.loads("".join(call.arguments for _, call in reader.push(text) + reader.finish()))
            assert isinstance(written, dict) and is_right(written), text
            ended += 1
        if ended == 3:
            return
    raise AssertionError("no answer ended")


def test_an_object_of_free_names_is_held_to_its_values_and_its_count(grammar, tokenizer):
    free = [{"name": "f", "parameters": {"type": "object", "additionalProperties": DIGIT, "minProperties": 1, "maxProperties": 1}}]
    forms = {"gemma4": ("<|tool_call>call:f{%s}<tool_call|>", "k:%s", ","), "qwen-xml": (
        "<tool_call>\n<function=f>\n%s</function>\n</tool_call>", "<parameter=k>\n%s\n</parameter>\n", "")}  # fmt: skip
    for form, (call, pair, comma) in forms.items():
        for values, is_right in (["2"], True), (["9"], False), ([], False), (["1", "2"], False):
            text = call % comma.join(pair % value for value in values)
            assert is_allowed(grammar.calls(form, free, several=False), tokenizer, text) == is_right, text


@pytest.mark.parametrize("form", ["gemma4", "qwen-xml"])
def test_a_greatest_length_that_no_answer_reaches_is_none(form, grammar):
    grammar.calls(form, [{"name": "f", "parameters": of({"a": {"type": "string", "maxLength": 2**31 - 1}})}], several=False)


@pytest.mark.parametrize(("keyword", "schema"), [
    ("minProperties", {"type": "object", "additionalProperties": DIGIT, "minProperties": 2}),
    ("patternProperties", {"type": "object", "patternProperties": {"^a": DIGIT}}),
    ("minLength", of({"a": {"type": "string", "minLength": 10**6}})),
    ("pattern", of({"a": {"enum": ["a", "bc"], "pattern": "a"}})), ("type", {"type": "string"}),
])  # fmt: skip
def test_what_a_form_of_calls_cannot_enforce_is_refused(keyword, schema, grammar):
    for form in ("gemma4", "qwen-xml"):
        with pytest.raises(RequestError, match=f"parameters of 'f' have '{keyword}'") as caught:
            grammar.calls(form, [{"name": "f", "parameters": schema}], several=False)
        assert caught.value.field == "tools"


def test_after_a_thought_the_calls_are_held(grammar, tokenizer):
    close = tokenizer.convert_tokens_to_ids("<channel|>")
    constraint = AfterThought(grammar.calls("gemma4", FUNCTIONS, several=False), [close])
    given, zeros = [2, 5], torch.zeros(len(tokenizer))
    assert torch.equal(constraint(given, zeros), zeros) and torch.equal(constraint([*given, 300], zeros), zeros)
    opened = constraint([*given, 300, close], zeros)
    allowed = torch.nonzero(opened > -1).flatten().tolist()
    assert allowed == [tokenizer.convert_tokens_to_ids("<|tool_call>")]


def test_a_thought_that_the_answer_opens_is_free_and_may_be_left_out(grammar, tokenizer):
    opens, closes, calls = tokenizer.convert_tokens_to_ids(["<|channel>", "<channel|>", "<|tool_call>"])
    zeros = torch.zeros(len(tokenizer))

    def allowed(*answer):
        constraint = MayThink(grammar.calls("gemma4", FUNCTIONS, several=False), opens, [closes])
        ids = [2, 5, *answer]
        return [torch.nonzero(constraint(ids[:size], zeros) > -1).flatten().tolist() for size in range(2, len(ids) + 1)]

    assert sorted(allowed()[0]) == sorted([opens, calls])
    thought = allowed(opens, 300, closes, calls)
    assert len(thought[1]) == len(thought[2]) == len(tokenizer) and thought[3] == [calls] and opens not in thought[4]
    assert opens not in allowed(calls)[1]


# Calls that need not be made ------------------------------------------------------------------------------------------

SAID = "DIGIT look it up: 3 < 5 {now} \n"


def continued(constraint, tokenizer, draw, text, *, most=300):
    """Return a text that is given, and the rest of the call that it opens as a model without any opinion draws it."""
    ids, starts = [2], _starts()
    zeros = torch.zeros(len(tokenizer))
    for token in tokenizer(text, add_special_tokens=False)["input_ids"]:
        assert torch.equal(constraint(ids, zeros), zeros), tokenizer.decode(ids)  # what is no call is free
        ids.append(token)
    for _ in range(most):
        scores = constraint(ids, zeros)
        if torch.equal(scores, zeros):
            return tokenizer.decode(ids[1:], skip_special_tokens=False)
        allowed = torch.nonzero(scores > -1).flatten().tolist()
        assert allowed and END not in allowed
        closing = [token for token in allowed if starts[token] in ('"', "}", "]", "<")]
        ids.append(draw.choice(closing if closing and draw.random() < 0.5 else allowed))
    return None


def opened(grammar, form, **options):
    return grammar.calls_once_opened(AnswerForm(form, **options), FUNCTIONS, several=False, in_thought=False)


@pytest.mark.parametrize("form", FORMS)
def test_a_call_that_is_opened_is_held_and_what_stands_around_it_is_free(form, grammar, tokenizer):
    draw, seen, ended = random.Random(7), set(), 0
    functions = {name: f.get("parameters") for name, f in BY_NAME.items()}
    for _ in range(25):
        constraint = opened(grammar, form)
        text = continued(constraint, tokenizer, draw, f"{SAID}{CALL_MARKS[form][0]}")
        if text is None:
            continue
        ended += 1
        parts = AnswerReader(AnswerForm(form), functions=functions).push(text)
        assert parts[0][0] == "text" and {kind for kind, _ in parts} == {"text", "call"}, text
        calls = [call for kind, call in parts if kind == "call"]
        name = calls[0].name
        check(name, json.loads("".join(call.arguments for call in calls)))
        seen.add(name)
        # A second call is held as the first one was, after free text again.
        again = tokenizer(f" and{CALL_MARKS[form][0]}", add_special_tokens=False)["input_ids"]
        assert (constraint([0] * constraint._seen + again, torch.zeros(len(tokenizer))) < 0).any()
    assert ended >= 8 and seen == {"weather", "tree", "now"}


@pytest.mark.parametrize("text", ['{"name"', ' {"name"', '{"name": "weather"', '{"name": "weather", "parameters": {"city'])
def test_a_bare_call_of_llamas_is_held_at_the_beginning_of_an_answer_alone(text, grammar, tokenizer):
    zeros = torch.zeros(len(tokenizer))

    def last(text):
        constraint, ids = opened(grammar, "llama"), [2, *tokenizer(text, add_special_tokens=False)["input_ids"]]
        return [constraint(ids[:size], zeros) for size in range(1, len(ids) + 1)][-1]

    assert (last(text) < 0).any()
    assert torch.equal(last("It is " + text), zeros) and torch.equal(last('{"city": "Paris", {"name"'), zeros)


def test_nothing_is_held_inside_a_thought(grammar, tokenizer):
    zeros = torch.zeros(len(tokenizer))
    form = AnswerForm("gemma4", thoughts=("<|channel>", "<channel|>"))
    for in_thought, begins in ((True, ""), (False, "<|channel>thought\n")):
        constraint = grammar.calls_once_opened(form, FUNCTIONS, several=True, in_thought=in_thought)
        ids = [2]
        text = f"{begins}Maybe <|tool_call> or not<channel|>So <|tool_call>"
        for token in tokenizer(text, add_special_tokens=False)["input_ids"]:
            assert torch.equal(constraint(ids, zeros), zeros)
            ids.append(token)
        held = constraint(ids, zeros)
        assert (held < 0).any() and held[tokenizer.convert_tokens_to_ids("<tool_call|>")] < 0


def test_parameters_of_a_strict_tool_that_no_value_satisfies_are_refused(grammar):
    bad = {"name": "f", "parameters": {"type": "object", "properties": {"a": {"enum": []}}, "required": ["a"]}}
    for form in FORMS:
        with pytest.raises(RequestError, match="cannot be enforced"):
            grammar.calls_once_opened(AnswerForm(form), [bad], several=False, in_thought=False)
