"""Which texts an answer in JSON may be, token by token, and which schemas are refused."""

import copy
import json
import time

import llguidance.hf
import pytest
import torch

from tests.raised import refused
from trimtab.demo.demo import FOLDER as DEMO
from trimtab.engine.loader.transformers_model import load_tokenizer
from trimtab.errors import CheckpointError, RequestError
from trimtab.serve.grammar.child import Vocabulary
from trimtab.serve.grammar.constraint import Grammar, Pace
from trimtab.serve.grammar.schema import MOST_PAIRS, check_patterns, check_schema

ANSWERS = [json.loads(line)["answers"]["rslora-dora"] for line in (DEMO / "prompts.jsonl").read_text("utf-8").splitlines()]
END = 1


@pytest.fixture(scope="module")
def tokenizer():
    return load_tokenizer(DEMO / "base")


@pytest.fixture(scope="module")
def grammar(tokenizer):
    return Grammar(tokenizer, [END])


@pytest.mark.parametrize("ends", [[1, 106], [106, 1]])
def test_each_end_token_ends_an_answer_that_could_go_on(ends, tokenizer):
    grammar, zeros = Grammar(tokenizer, ends), torch.zeros(len(tokenizer))
    given = [2, 3, *tokenizer("7", add_special_tokens=False)["input_ids"]]
    constraint = grammar.constraint({"type": "integer"})
    constraint(given[:2], zeros)
    assert [end for end in (1, 106) if constraint(given, zeros)[end] == 0] == [1, 106]
    assert Vocabulary.from_bytes(grammar.vocabulary).ends == ends


def test_only_end_tokens_of_the_vocabulary_end_an_answer_or_else_the_tokenizers_own(tokenizer):
    own = tokenizer.eos_token_id
    for ends, kept in (([106, 1, len(tokenizer), -1], [106, 1]), ([-1, 10**6], [own]), ([], [own])):
        assert Grammar(tokenizer, ends).ends == kept
    nameless = copy.deepcopy(tokenizer)
    nameless.eos_token = None
    with pytest.raises(CheckpointError, match="no token ends an answer"):
        Grammar(nameless, [])


@pytest.mark.parametrize("change", [None, "enable_padding", "enable_truncation"])
def test_a_tokenizer_is_read_as_llguidance_reads_it_and_copied_only_if_it_pads_or_truncates(change, tokenizer, monkeypatch):
    given = copy.deepcopy(tokenizer)
    if change:
        getattr(given.backend_tokenizer, change)(**({"max_length": 3} if change == "enable_truncation" else {"length": 9}))
    text, wanted, copies = "a picture of the sea", llguidance.hf.from_tokenizer(tokenizer, eos_token=[END]), []
    real = llguidance.hf.from_tokenizer
    monkeypatch.setattr(llguidance.hf, "from_tokenizer", lambda *args, **named: copies.append(1) or real(*args, **named))
    grammar = Grammar(given, [END])
    read = grammar._tokenizer
    assert read.tokenize_str(text) == wanted.tokenize_str(text)
    assert read.eos_tokens == [END]
    assert vars(Vocabulary.from_bytes(grammar.vocabulary)) == vars(Vocabulary.of(wanted))
    assert copies == [1] * bool(change)


def test_a_part_of_a_vocabulary_is_no_vocabulary(grammar):
    whole = grammar.vocabulary
    for part in (b"", whole[:2], whole[:40], whole[:-1], whole[: len(whole) // 2], whole + b"a"):
        with pytest.raises(ValueError):
            Vocabulary.from_bytes(part)


def is_allowed(grammar, tokenizer, text, schema):
    """Whether an answer could be drawn, its end included, if the model wanted it."""
    constraint, given = grammar.constraint(schema), [2, 3]
    for token in [*tokenizer(text, add_special_tokens=False)["input_ids"], END]:
        scores = constraint(given, torch.zeros(len(tokenizer)))
        if scores[token] == float("-inf"):
            return False
        given.append(token)
    return True


@pytest.mark.parametrize("text", ANSWERS[:4])
def test_what_an_adapter_was_trained_to_answer_is_not_bent(grammar, tokenizer, text):
    # Its spaces after separators too: another token there would be another answer than the one without JSON mode.
    assert ": " in text and ", " in text
    assert is_allowed(grammar, tokenizer, text, {})


@pytest.mark.parametrize("text, is_drawn", [
    *((text, True) for text in ('{"a":1,"b":[1,2]}', '{"a": 1, "b": [1, 2]}', '{ "a": 1 }', "{}")),
    *((text, False) for text in ('{"a":  1}', '{"a":\n1}', "{\n", "[1]", "1", '{"a": 1', '{"a": 1}}', "Hello", "")),
])  # fmt: skip
def test_an_object_with_a_space_or_none_between_its_parts_can_be_drawn_and_nothing_else(grammar, tokenizer, text, is_drawn):
    assert is_allowed(grammar, tokenizer, text, {}) is is_drawn


def test_a_schema_decides_keys_and_values(grammar, tokenizer):
    schema = {
        "type": "object", "properties": {"shape": {"enum": ["star", "square"]}}, "required": ["shape"],
        "additionalProperties": False,
    }  # fmt: skip
    assert is_allowed(grammar, tokenizer, '{"shape": "star"}', schema)
    assert not is_allowed(grammar, tokenizer, '{"shape": "circle"}', schema)
    assert not is_allowed(grammar, tokenizer, '{"colour": "red"}', schema) and not is_allowed(grammar, tokenizer, "{}", schema)


def test_a_token_that_the_grammar_refuses_is_an_error_and_no_short_answer(grammar, tokenizer):
    constraint, token_ids = grammar.constraint({"type": "object"}), [2, 3]
    constraint(token_ids, torch.zeros(len(tokenizer)))
    with pytest.raises(RuntimeError, match="the grammar refused token"):
        constraint([*token_ids, tokenizer("x", add_special_tokens=False)["input_ids"][0]], torch.zeros(len(tokenizer)))


# What no finite value satisfies, and what looks like it and has one.
ENDLESS = [
    {"$ref": "#"}, {"allOf": [{"$ref": "#"}]}, {"anyOf": [{"$ref": "#"}, {"$ref": "#/anyOf/0"}]},
    {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}},
    {"type": "object", "properties": {"a": {"$ref": "#"}}, "required": ["a"]},
    {"type": ["object", "array"], "properties": {"a": {"$ref": "#"}}, "required": ["a"], "minItems": 1, "items": {"$ref": "#"}},
    {"type": "array", "items": {"$ref": "#"}, "minItems": 1}, {"type": "array", "prefixItems": [{"$ref": "#"}], "minItems": 1},
    {"type": "object", "additionalProperties": {"$ref": "#"}, "minProperties": 1},
    {"type": "object", "additionalProperties": {"$ref": "#"}, "required": ["a"]},
    {"$ref": "#/$defs/a~1b%20c", "$defs": {"a/b c": {"type": "array", "minItems": 2, "prefixItems": [{}, {"$ref": "#"}]}}},
    {"anyOf": [{"type": "object", "properties": {"a": {"$ref": "#"}}, "required": ["a"]}, {"type": "integer", "$ref": "#"}]},
]  # fmt: skip
ENDING = [
    ({"type": "object", "properties": {"a": {"$ref": "#"}}}, '{"a": {}}'),
    ({"type": "object", "properties": {"a": {"anyOf": [{"$ref": "#"}, {"type": "null"}]}}, "required": ["a"]},
     '{"a": {"a": null}}'),
    ({"type": "array", "items": {"$ref": "#"}}, "[[], []]"), ({"anyOf": [{"$ref": "#"}, {"type": "null"}]}, "null"),
    ({"properties": {"a": {"$ref": "#"}}, "required": ["a"]}, "5"),  # an object must have it, and 5 is none
    ({"type": "object", "additionalProperties": {"$ref": "#"}}, '{"a": {}}'),
    ({"$ref": "#/$defs/tree", "$defs": {"tree": {"type": "object", "properties": {
        "left": {"$ref": "#/$defs/leaf"}, "right": {"$ref": "#/$defs/tree"}}, "required": ["left"], "additionalProperties": False},
        "leaf": {"type": "array", "minItems": 1, "items": {"anyOf": [{"$ref": "#/$defs/tree"}, {"const": 1}]}}}},
     '{"left": [1], "right": {"left": [1]}}'),
]  # fmt: skip


@pytest.mark.parametrize("schema", ENDLESS)
def test_a_schema_that_no_finite_value_satisfies_is_refused(schema):
    assert refused(check_schema, schema, field="here", match="no finite value").field == "here"


@pytest.mark.parametrize("schema, text", ENDING)
def test_a_schema_that_refers_to_itself_and_ends_is_taken(schema, text, grammar, tokenizer):
    check_schema(schema, field="here")
    assert is_allowed(grammar, tokenizer, text, schema)


@pytest.mark.parametrize("order", [1, -1])
def test_a_long_chain_of_references_is_followed_and_its_cost_has_an_end(order, monkeypatch):
    names = [f"d{i}" for i in range(1000)][::order]
    chain = {
        name: {"type": "array", "minItems": 1, "items": {"$ref": f"#/$defs/{after}"}}
        for name, after in zip(names, [*names[1:], "end"], strict=True)
    }
    schema = {"$ref": f"#/$defs/{names[0]}", "$defs": {**chain, "end": {"type": "null"}}}
    check_schema(schema, field="here")
    with pytest.raises(RequestError, match="no finite value"):
        check_schema({**schema, "$defs": {**chain, "end": {"$ref": "#"}}}, field="here")
    monkeypatch.setattr("trimtab.serve.grammar.schema.MOST_VISITS", 500)
    with pytest.raises(RequestError, match="more references"):
        check_schema(schema, field="here")


@pytest.mark.parametrize("schema", [{"$ref": "#"}, {"enum": []}, {"anyOf": []}, {"type": "integer", "minimum": 5, "maximum": 3},
                                    {"type": "object", "required": ["a"], "additionalProperties": False}])  # fmt: skip
def test_a_schema_without_any_value_is_refused_by_the_grammar_too(grammar, schema):
    with pytest.raises(RequestError, match="cannot be enforced"):
        grammar.constraint(schema)


def test_a_schema_that_cannot_be_held_to_is_refused_with_the_reason(grammar):
    error = refused(grammar.constraint, {"type": "no such type"}, match="cannot be enforced")
    assert error.field == "response_format.json_schema"


def properties(count):
    return {"type": "object", "properties": {f"p{i}": {"type": "string"} for i in range(count)}}


def test_an_object_with_many_optional_properties_is_held_to(grammar, tokenizer):
    # llguidance's own limit is passed at 500.
    assert is_allowed(grammar, tokenizer, '{"p7": "a", "p1400": "b"}', properties(1500))
    assert not is_allowed(grammar, tokenizer, '{"p7": 5}', properties(1500))


def test_a_schema_that_outgrows_its_limits_in_an_answer_is_an_error_and_no_short_answer(grammar, tokenizer):
    # Its states grow with the text. llguidance then allows the end alone, which would look like a whole answer.
    constraint = grammar.constraint({"type": "string", "pattern": "^(?:.{0,200}[a-m]){40}(?:.{0,200}[n-z]){40}$"})
    given, letters = [2, 3], tokenizer('"' + "aebzcydxewfv" * 20, add_special_tokens=False)["input_ids"]
    with pytest.raises(RequestError, match="cannot be enforced") as caught:
        for token in letters:
            assert constraint(given, torch.zeros(len(tokenizer)))[token] == 0
            given.append(token)
    assert caught.value.field == "response_format.json_schema" and "\n" not in str(caught.value)


def test_a_token_that_is_allowed_and_goes_beyond_a_limit_is_the_schemas_error(grammar, tokenizer, monkeypatch):
    monkeypatch.setattr("trimtab.serve.grammar.source.MOST_ROW_ITEMS", 2000)
    constraint, given = grammar.constraint(properties(1500)), [2, 3]
    with pytest.raises(RequestError, match="cannot be enforced"):
        for token in tokenizer('{"p7', add_special_tokens=False)["input_ids"]:
            assert constraint(given, torch.zeros(len(tokenizer)))[token] == 0
            given.append(token)
        constraint(given, torch.zeros(len(tokenizer)))


# Each bracket may be one of any branch: the parser keeps all of them.
AMBIGUOUS = {"anyOf": [{"type": "array", "items": {}}] * 900}


def test_a_grammar_whose_tokens_take_long_ends_its_answer(grammar, tokenizer, monkeypatch):
    steps_s, took = [], Pace.took

    def timed(pace, seconds, field):
        steps_s.append(seconds)
        took(pace, seconds, field)

    monkeypatch.setattr(Pace, "took", timed)
    constraint, given = grammar.constraint(AMBIGUOUS), [2, 3]
    with pytest.raises(RequestError, match="takes too long: its tokens took") as caught:
        for token in tokenizer("[" + "1," * 1000, add_special_tokens=False)["input_ids"]:
            assert constraint(given, torch.zeros(len(tokenizer)))[token] == 0
            given.append(token)
    assert caught.value.field == "response_format.json_schema"
    assert sum(step_s - 0.005 for step_s in steps_s if step_s > 0.005) < 0.5 + max(steps_s)


def test_a_step_is_bounded_and_an_ordinary_answer_uses_none_of_its_time(grammar, tokenizer):
    constraint, given = grammar.constraint(properties(20)), [2, 3]
    for token in tokenizer('{"p7": "' + "some text " * 50, add_special_tokens=False)["input_ids"]:
        assert constraint(given, torch.zeros(len(tokenizer)))[token] == 0
        given.append(token)
    assert constraint._matcher._pace.slow_s < 0.1


@pytest.mark.parametrize("name, value", [("MOST_LEXER_STATES", 2000), ("MOST_STEP_ITEMS", 4000), ("MOST_STEP_FUEL", 300)])
def test_each_limit_of_a_step_ends_the_answer_with_an_error(name, value, grammar, tokenizer, monkeypatch):
    monkeypatch.setattr(f"trimtab.serve.grammar.source.{name}", value)
    schema = {"anyOf": [{"type": "array", "items": {}}] * 400 + [{"type": "string", "pattern": "^.*a.{30}b.*$"}]}
    constraint, given = grammar.constraint(schema), [2, 3]
    text = "[" * 300 if name == "MOST_STEP_ITEMS" else '"' + "abbabaaabbab" * 60
    with pytest.raises(RequestError, match="cannot be enforced"):
        for token in tokenizer(text, add_special_tokens=False)["input_ids"]:
            constraint(given, torch.zeros(len(tokenizer)))
            given.append(token)


def named(count, **others):
    return {"patternProperties": {f"^[ab]*a[ab]{{12}}{i:03}$": {} for i in range(count)}, **others}


MERGED = {"$defs": {"a": named(8)}, "properties": {f"p{i}": {"$ref": "#/$defs/a", "minProperties": 1} for i in range(99)}}


MANY = [
    [named(900)], [named(30), named(60)], [named(8)] * 65, [named(60, anyOf=[{}] * 9)], [named(64, anyOf=[{}] * 100)],
    [named(30, allOf=[{}] * 9, items={"allOf": [named(20)]})], [MERGED],
]  # fmt: skip


@pytest.mark.parametrize("schemas", MANY)
def test_many_patterns_of_names_are_refused_before_they_are_compiled(schemas):
    for are_tools in (False, True):
        error = refused(check_patterns, schemas, field="here", are_tools=are_tools, match="patternProperties")
        assert error.field == "here"


@pytest.mark.parametrize("schemas,are_tools,words", [
    ([named(900)], False, "its patternProperties are compared in 810000 pairs, the limit is 4096"),
    ([named(64, anyOf=[{}] * 100)], False, "compared in 413696 pairs, the limit is 4096"),
    ([named(1)] * 4000 + [named(10)], True, "of all tools are compared in 4100 pairs, the limit is 4096"),
])  # fmt: skip
def test_the_refusal_of_many_patterns_names_the_limit_and_the_count(schemas, are_tools, words):
    assert words in str(refused(check_patterns, schemas, field="here", are_tools=are_tools))


def test_patterns_of_different_tools_are_not_counted_as_pairs(grammar):
    tools = [{"name": f"f{i}", "parameters": {"type": "object", **named(1)}} for i in range(200)]
    check_patterns([tool["parameters"] for tool in tools], field="tools", are_tools=True)
    begun = time.process_time()
    grammar.calls("hermes", tools, several=True)
    assert time.process_time() - begun < 5  # measured: 0.2 s for 200


def test_a_definition_of_tools_counts_again_for_each_argument_that_refers_to_it():
    """Between tags each argument is compiled by itself: 60 patterns in 20 arguments took 8.6 s."""
    properties = {f"p{i}": {"$ref": "#/$defs/a"} for i in range(20)}
    schema = {"type": "object", "$defs": {"a": named(60)}, "properties": properties}
    check_patterns([schema], field="here")  # one schema of an answer compiles it once, in 0.4 s
    with pytest.raises(RequestError, match="in 75600 pairs"):
        check_patterns([schema], field="here", are_tools=True)


def test_as_many_patterns_as_are_taken_compile_in_a_moment(grammar):
    most = named(int(MOST_PAIRS**0.5))
    check_patterns([most], field="here")
    begun = time.process_time()
    grammar.constraint({"type": "object", **most})
    assert time.process_time() - begun < 5  # about one second; a hundred times as many pairs took ten minutes
