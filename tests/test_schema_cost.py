"""Which keywords of a schema are refused before they are compiled, and that what is left compiles in a moment."""

from __future__ import annotations

import itertools
import json
import math
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.examples import examples
from trimtab.demo.line import FOLDER as DEMO
from trimtab.errors import RequestError
from trimtab.runtime.hf import load_tokenizer
from trimtab.serve.calling import calls_of
from trimtab.serve.constraint import Grammar
from trimtab.serve.schema_cost import LIMITS, check_cost, expanded_pattern, multiple_states
from trimtab.serve.settings import Limits
from trimtab.serve.wire import ChatRequest

ATTACK = {
    "type": "object", "properties": {"a": {"type": "integer", "allOf": [
        {"multipleOf": 3}, {"multipleOf": 7}, {"multipleOf": 11}, {"multipleOf": 13}, {"multipleOf": 17}, {"multipleOf": 19},
        {"multipleOf": 23},
    ]}}, "required": ["a"],
}  # fmt: skip


def integer(**keywords):
    return {"type": "integer", **keywords}


def text(pattern):
    return {"type": "string", "pattern": pattern}


def named(schemas):
    return {"type": "object", "properties": {f"p{i}": one for i, one in enumerate(schemas)}}


def referred(values):
    """The multiples of values, each in a definition that refers to the next."""
    chain = {
        f"d{i}": {"multipleOf": value, **({"$ref": f"#/$defs/d{i + 1}"} if i + 1 < len(values) else {})}
        for i, value in enumerate(values)
    }
    return {"type": "integer", "$ref": "#/$defs/d0", "$defs": chain}


COSTLY = [
    (ATTACK, "22309380 remainders"),
    (integer(multipleOf=99991), "99991 remainders, the limit is 50000"),
    (named(integer(multipleOf=99991) for _ in range(20)), "1999820 remainders"),
    (named(integer(multipleOf=4000 + i) for i in range(20)), "remainders"),
    (referred([3, 7, 11, 13, 17, 19, 23]), "remainders"),
    (integer(allOf=[{"anyOf": [{"multipleOf": 97}, {"multipleOf": 89}]}, {"anyOf": [{"multipleOf": 991}, {"multipleOf": 7}]}]),
     "remainders"),
    (integer(multipleOf=10**18 + 9), "more than 2147483648 remainders"), (integer(multipleOf=10**300 + 1), "remainders"),
    (integer(multipleOf=3 * 2**20), "remainders"), ({"type": "number", "multipleOf": 0.99991}, "99991 remainders"),
    (text("^(a{1000}){1000}$"), "1000000 characters"), (text("^[ab](a{300}){300}$"), "90001 characters"),
    (text("^((((a{99}){99}){99}){99}){99}$"), "more than 2147483648 characters"), (text("a{99999999999999999999}"), "characters"),
    (named(text("^(ab){4000}$") for _ in range(20)), "160000 characters"),
    ({"type": "object", "patternProperties": {"^(a{1000}){1000}$": {}}}, "1000000 characters"),
    ({"type": "string", "allOf": [{"pattern": f".*{a}.{{5}}{b}"} for a in "abcd" for b in "klmn"]}, "16 of its patterns"),
    (named({"allOf": [{"anyOf": [integer(minimum=i + j) for j in range(10)]} for i in range(4)]} for _ in range(3)),
     "combined in 30000 ways"),
    ({"enum": ["x" * 9000, "a"]}, "9000 characters"), ({"const": {"a": ["x" * 9000]}}, "9000 characters"),
    ({"type": "object", "properties": {"x" * 9000: {}}}, "9000 characters"),
    (named([{}] * 4000), "4000 properties"), ({"anyOf": [{"type": "array", "items": {}}] * 900}, "900 branches"),
    (named(integer(minimum=-(10**12) - i, maximum=10**12 + i) for i in range(400)), "digits"),
]  # fmt: skip


@pytest.mark.parametrize("schema, words", COSTLY)
def test_what_is_costly_to_compile_is_refused_at_once(schema, words):
    with pytest.raises(RequestError) as caught:
        check_cost([schema], field="here")
    assert caught.value.field == "here" and words in str(caught.value), str(caught.value)


def asked(**fields):
    return ChatRequest.model_validate({"model": "m", "messages": [{"role": "user", "content": "a"}], **fields})


def test_a_schema_and_the_tools_that_a_call_is_held_to_are_checked_where_the_request_is_read():
    from trimtab.serve.asking import schema_of

    body = asked(response_format={"type": "json_schema", "json_schema": {"name": "a", "schema": ATTACK}})
    with pytest.raises(RequestError, match="multipleOf"):
        schema_of(body, Limits())
    # No tool has more than is allowed; together they have.
    tools = [
        {"type": "function", "function": {"name": f"f{i}", "parameters": named([integer(multipleOf=12001)])}}
        for i in range(5)
    ]
    calls_of(asked(tools=tools), Limits())  # the model may call them, and nothing is compiled
    calls_of(asked(tools=tools[:3], tool_choice="required"), Limits())
    calls_of(asked(tools=tools, tool_choice={"type": "function", "function": {"name": "f0"}}), Limits())
    strict = [{"type": "function", "function": {**one["function"], "strict": True}} for one in tools]
    for fields in ({"tools": tools, "tool_choice": "required"}, {"tools": strict}):
        with pytest.raises(RequestError, match="60005 remainders") as caught:
            calls_of(asked(**fields), Limits())
        assert caught.value.field == "tools"


SENSIBLE = [
    named(integer(multipleOf=value) for value in (2, 5, 10, 15, 60, 100, 3600, 86400, 1000, 1024, 4096, 10**6)),
    named({"type": "number", "multipleOf": value} for value in (0.01, 0.5, 0.25, 0.001, 1e-6, 2.5, 1.0)),
    {"anyOf": [integer(multipleOf=value) for value in (7, 11, 13, 17, 19, 23)]},
    integer(minimum=0, maximum=10**9, allOf=[{"multipleOf": 6}, {"multipleOf": 15}]),
    text(r"^\+?[1-9]\d{1,14}$"), text(r"^[a-z]{1,8000}$"), text(r"^(\d{1,3}\.){3}\d{1,3}$"), text(r"^.{0,65535}$"),
    text(r"^[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}$"), text(r"^(([A-Z][a-z]{1,30} ?){1,10}, ?){1,20}$"),
    {"type": "string", "format": "email", "maxLength": 200}, {"type": "string", "minLength": 10**5, "maxLength": 10**9},
    {"enum": [f"value {i}" for i in range(3000)]}, {"anyOf": [{"const": f"value {i}"} for i in range(1000)]},
    {"anyOf": [{"type": "object", "properties": {"kind": {"const": i}}, "required": ["kind"]} for i in range(200)]},
    {"const": "x" * 4000}, named([{"type": "string"}] * 1500),
    {"type": "array", "items": {"type": "array", "items": integer(), "maxItems": 10**6}, "minItems": 10**4},
    named(integer(minimum=-(10**6), maximum=10**6) for _ in range(200)),
    {"allOf": [{"anyOf": [{"properties": {f"a{i}": {"const": 1}}}, {"properties": {f"b{i}": {}}}]} for i in range(6)]},
]  # fmt: skip


@pytest.fixture(scope="module")
def grammar():
    return Grammar(load_tokenizer(DEMO / "base"), [1])


@pytest.mark.parametrize("schema", SENSIBLE)
def test_what_is_sensible_is_taken_and_compiles_in_a_moment(schema, grammar):
    check_cost([schema], field="here")
    start = time.process_time()
    grammar.constraint(schema)
    assert time.process_time() - start < 3  # 0.7 s at most when quiet: 1,500 properties


@pytest.mark.parametrize("limit", LIMITS, ids=lambda limit: limit.cost.__name__)
def test_the_checks_themselves_cost_little(limit):
    deep = {"type": "integer"}
    for i in range(60):
        deep = {"allOf": [deep, {"anyOf": [{"minimum": i}, {"pattern": "a" * 100}]}]}
    chain = {f"d{i}": {"$ref": f"#/$defs/d{i + 1}", "title": "a"} for i in range(1400)}
    doubled = {
        f"d{i}": {"allOf": [{"$ref": f"#/$defs/d{i + 1}"}, {"anyOf": [{"multipleOf": i + 2}, {"multipleOf": i + 3}]}]}
        for i in range(400)
    }
    for schema in (
        deep, {"$ref": "#/$defs/d0", "$defs": chain}, {"$ref": "#/$defs/d0", "$defs": doubled}, text("(" * 20_000 + "{9}[" * 9000),
        {"$ref": "#", "allOf": [{"$ref": "#"}]}, {"multipleOf": math.inf, "$ref": 5, "allOf": 7, "pattern": None, "enum": {}},
    ):  # fmt: skip
        start = time.process_time()
        limit.cost(schema)
        assert time.process_time() - start < 1  # some ms when quiet


# The numbers, by another route ------------------------------------------------------------------------------------------

ATOMS = st.sampled_from(
    [("a", 1, False), ("\\n", 1, False), ("[ab]", 1, True), ("[^a]", 1, True), (".", 1, True), ("\\d", 1, True)]
)
REPEATS = st.sampled_from([("", 1), ("*", 1), ("+?", 1), ("{3}", 3), ("{2,5}", 5), ("{4,}", 4), ("{0,0}", 1)])


def written_out(children):
    """A pattern with its length written out: a sequence of groups, each with its repeat."""

    def joined(parts):
        pieces = [f"({pattern}){repeat}" for (pattern, _), (repeat, _) in parts]
        return "|".join(pieces), sum(length * times for (_, length), (_, times) in parts)

    return st.lists(st.tuples(children, REPEATS), min_size=1, max_size=3).map(joined)


LEAVES = st.tuples(ATOMS, REPEATS).map(
    lambda pair: (pair[0][0] + pair[1][0], 1 if pair[0][2] else pair[0][1] * pair[1][1])
)


@given(st.recursive(LEAVES, written_out, max_leaves=8))
@settings(max_examples=examples(200), deadline=None)
def test_counted_repeats_are_counted_as_if_they_were_written_out(case):
    pattern, length = case
    assert expanded_pattern(f"^{pattern}$") == length


@given(st.lists(st.lists(st.sampled_from([2, 3, 7, 9, 11, 13]), min_size=1, max_size=3), min_size=1, max_size=3))
@settings(max_examples=examples(100), deadline=None)
def test_merged_multiples_count_as_every_choice_of_a_branch(groups):
    schema = {"allOf": [{"anyOf": [{"multipleOf": value} for value in group]} for group in groups]}
    merged = {math.lcm(*choice) for choice in itertools.product(*groups)}
    branches = sum(sum(set(group)) for group in groups)
    single = sum(value for group in groups for value in group)
    assert multiple_states(json.loads(json.dumps(schema))) == sum(merged) + branches + single
