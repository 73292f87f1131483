"""Which keywords of a schema are refused before they are compiled, and that what is left compiles in a moment."""

import itertools
import json
import math
import subprocess
import sys
import time
from fractions import Fraction
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from llguidance import LLTokenizer, TokenizerWrapper

from tests.examples import examples
from tests.raised import refused
from trimtab.demo.demo import FOLDER as DEMO
from trimtab.engine.loader.transformers_model import load_tokenizer
from trimtab.errors import RequestError
from trimtab.serve.api.schemas import ChatRequest
from trimtab.serve.api.to_jobs import calls_of
from trimtab.serve.contract.settings import Limits
from trimtab.serve.grammar.child import Vocabulary
from trimtab.serve.grammar.constraint import MOST_AGAIN_S, Grammar
from trimtab.serve.grammar.schema_cost import LIMITS, Merges, check_cost, expanded_pattern, multiple_states
from trimtab.serve.grammar.source import GrammarSource, compiled

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


_FAR = 2**53 + 1
CHANGED = [
    {"const": _FAR}, {"enum": [1, {"a": [-_FAR]}]}, {"const": 2**63}, integer(minimum=_FAR), integer(maximum=_FAR, minimum=0),
    integer(minimum=10**19), {"exclusiveMinimum": 0, "exclusiveMaximum": 0.5}, {"exclusiveMinimum": 7, "maximum": 7.25},
    {"exclusiveMaximum": 0, "minimum": -0.5},
    {"allOf": [{"exclusiveMinimum": 1}, {"$ref": "#/$defs/a"}], "$defs": {"a": {"maximum": 1.5}}},
]  # fmt: skip
KEPT = [
    {"const": 2**53}, {"const": 2.5e-8}, integer(minimum=-(2**53), maximum=2**63 - 1), integer(maximum=2**64 - 1),
    {"exclusiveMinimum": 0, "exclusiveMaximum": 1}, {"exclusiveMinimum": -1, "maximum": -0.5},
    {"exclusiveMinimum": 0.25, "maximum": 0.5}, {"properties": {"minimum": {"const": 1}}},
]  # fmt: skip


def test_numbers_that_the_grammar_would_change_are_refused():
    for schema in CHANGED:
        with pytest.raises(RequestError, match="of its numbers") as caught:
            check_cost([{"properties": {"a": schema}, **schema}], field="here")
        assert caught.value.field == "here"
    for schema in KEPT:
        check_cost([schema], field="here")


PRIMES = (3, 7, 11, 13, 17, 19, 23)


def merged(wrapped):
    """A schema of all multiples of PRIMES, each wrapped by the same objects or arrays."""
    return {"allOf": [wrapped(integer(multipleOf=prime)) for prime in PRIMES]}


def referred(values):
    """The multiples of values, each in a definition that refers to the next."""
    chain = {
        f"d{i}": {"multipleOf": value, **({"$ref": f"#/$defs/d{i + 1}"} if i + 1 < len(values) else {})}
        for i, value in enumerate(values)
    }
    return {"type": "integer", "$ref": "#/$defs/d0", "$defs": chain}


COSTLY = [
    (integer(allOf=[{"multipleOf": 10**6 * one} for one in (4, 9, 13)]), "multipleOf is 468000000"),
    (integer(multipleOf=99900000), "remainders"), (integer(multipleOf=15120000), "remainders"),
    (ATTACK, "22309380 remainders"),
    (integer(multipleOf=99991), "99991 remainders, the limit is 50000"),
    (named(integer(multipleOf=99991) for _ in range(20)), "1999820 remainders"),
    (named(integer(multipleOf=4000 + i) for i in range(20)), "remainders"),
    *((merged(wrap), "remainders") for wrap in (
        lambda one: {"type": "object", "properties": {"a": one}},
        lambda one: {"type": "object", "properties": {"a": {"type": "object", "properties": {"b": one}}}},
        lambda one: {"type": "object", "additionalProperties": one}, lambda one: {"type": "array", "items": one},
        lambda one: {"type": "array", "prefixItems": [{}, one]}, lambda one: {"type": "object", "patternProperties": {"^a": one}},
        lambda one: {"anyOf": [{"type": "object", "properties": {"a": one}}, {"type": "null"}]},
        lambda one: {"type": "array", "items": {"type": "object", "additionalProperties": {"allOf": [one]}}},
    )),
    ({"allOf": [{"properties": {"a": integer(multipleOf=997)}}, {"additionalProperties": integer(multipleOf=991)}]}, "remainders"),
    ({"allOf": [{"items": integer(multipleOf=997)}, {"prefixItems": [integer(multipleOf=991)]}]}, "remainders"),
    ({"$ref": "#/$defs/a", "properties": {"a": integer(multipleOf=997)},
      "$defs": {"a": {"properties": {"a": {"$ref": "#/$defs/b"}}}, "b": integer(multipleOf=991)}}, "remainders"),
    ({"anyOf": [{"properties": {"a": integer(multipleOf=997)}}], "properties": {"a": integer(multipleOf=991)}}, "remainders"),
    ({"allOf": [{"properties": {"a": text(f"{a}.*{b}")}} for a in "abcd" for b in "klmn"]}, "16 of its patterns"),
    ({"allOf": [{"properties": {"a": {"anyOf": [integer(minimum=i + j) for j in range(20)]}}} for i in range(4)]}, "combined in"),
    (referred([3, 7, 11, 13, 17, 19, 23]), "remainders"),
    (integer(allOf=[{"anyOf": [{"multipleOf": 97}, {"multipleOf": 89}]}, {"anyOf": [{"multipleOf": 991}, {"multipleOf": 7}]}]),
     "remainders"),
    (integer(multipleOf=10**18 + 9), "is more than 2147483648"), (integer(multipleOf=10**300 + 1), "is more than"),
    (integer(multipleOf=430_000_000), "multipleOf is 430000000"), ({"type": "number", "multipleOf": 7e-9}, "has 9 decimal places"),
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
    error = refused(check_cost, [schema], field="here")
    assert error.field == "here" and words in str(error), str(error)


def asked(**fields):
    return ChatRequest.model_validate({"model": "m", "messages": [{"role": "user", "content": "a"}], **fields})


def test_a_schema_and_the_tools_that_a_call_is_held_to_are_checked_where_the_request_is_read():
    from trimtab.serve.api.to_jobs import schema_of

    body = asked(response_format={"type": "json_schema", "json_schema": {"name": "a", "schema": ATTACK}})
    with pytest.raises(RequestError, match="multipleOf"):
        schema_of(body, Limits())
    # No tool has more than is allowed; together they have.
    tools = [
        {"type": "function", "function": {"name": f"f{i}", "parameters": named([integer(multipleOf=12001)])}} for i in range(5)
    ]
    calls_of(asked(tools=tools), Limits())  # the model may call them, and nothing is compiled
    calls_of(asked(tools=tools[:3], tool_choice="required"), Limits())
    calls_of(asked(tools=tools, tool_choice={"type": "function", "function": {"name": "f0"}}), Limits())
    strict = [{"type": "function", "function": {**one["function"], "strict": True}} for one in tools]
    for fields in ({"tools": tools, "tool_choice": "required"}, {"tools": strict}):
        assert refused(calls_of, asked(**fields), Limits(), match="60005 remainders").field == "tools"


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
    # Multiples that never hold for one value.
    {"properties": {"a": integer(multipleOf=997)}, "additionalProperties": integer(multipleOf=991)},
    {"allOf": [{"properties": {f"p{prime}": integer(multipleOf=prime)}} for prime in (997, 991, 983)]},
    {"type": "array", "prefixItems": [integer(multipleOf=997), integer(multipleOf=991)], "items": False},
    {"anyOf": [{"type": "object", "properties": {"a": integer(multipleOf=prime)}, "required": ["a"]} for prime in (997, 991, 983)]},
    {"allOf": [{"properties": {"a": integer(multipleOf=60)}}, {"properties": {"a": integer(multipleOf=90)}}]},
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


def merged_widely(width):
    """Objects in allOf whose properties are such objects again, at each level."""
    levels = {"d0": integer(multipleOf=7)}
    for level in range(1, 7):
        one = {"$ref": f"#/$defs/d{level - 1}"}
        branches = [{"anyOf": [{"properties": {f"p{i}": one}, "items": one}, {"additionalProperties": one}]} for i in range(width)]
        levels[f"d{level}"] = {"allOf": branches}
    return {"$ref": "#/$defs/d6", "$defs": levels}


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
        merged_widely(40),
        {"$ref": "#", "allOf": [{"$ref": "#"}]}, {"multipleOf": math.inf, "$ref": 5, "allOf": 7, "pattern": None, "enum": {}},
    ):  # fmt: skip
        start = time.process_time()
        limit.cost(Merges(schema) if limit.is_of_merges else schema)
        assert time.process_time() - start < 1  # some ms when quiet


# Multiples ---------------------------------------------------------------------------------------------------------------

# Seconds of processor time in the process (llguidance 1.9.1, tokens of up to three digits), measured on one core.
TAKEN = {
    7: 0.001, 512: 0.004, 1000: 0.01, 3600: 0.01, 8192: 0.03, 9973: 0.08, 15625: 0.02, 16384: 0.03, 25000: 0.03, 32768: 0.04,
    44100: 0.08, 45000: 0.04, 48000: 0.05, 49999: 0.45, 60000: 0.06, 65536: 0.06, 75000: 0.11, 78125: 0.27, 80000: 0.03,
    86400: 0.35, 90000: 0.02, 96000: 0.11, 100000: 0.02, 131072: 0.21, 1000000: 0.02, 1440000: 0.29, 3600000: 0.19,
}  # fmt: skip
NOT_TAKEN = {
    50021: 0.63, 59049: 0.61, 65534: 0.66, 70001: 1.2, 98304: 0.4, 99968: 0.69, 99991: 1.3, 99998: 1.25, 99999: 1.1, 302400: 1.3,
    604800: 2.9, 720720: 9.2, 1048576: 2.1,
}  # fmt: skip


def test_multiples_are_refused_by_what_they_cost():
    said = {86400: 36_288, 10**6: 9_000}  # by docs/server-api.md
    assert {value: multiple_states(Merges(integer(multipleOf=value))) for value in said} == said
    for value in TAKEN:
        check_cost([integer(multipleOf=value)], field="here")
    for value in NOT_TAKEN:
        with pytest.raises(RequestError, match="remainders"):
            check_cost([integer(multipleOf=value)], field="here")
    assert max(TAKEN.values()) < 0.5 and min(NOT_TAKEN.values()) > 0.35


@pytest.fixture(scope="module")
def digits():
    """A vocabulary in which up to three digits are one token, as Llama 3's has them."""
    tokens = [bytes([one]) for one in range(256)] + [f"{one:0{size}}".encode() for size in (2, 3) for one in range(10**size)]
    return Vocabulary([*tokens, b"<end>"], [len(tokens)], [len(tokens)])


@pytest.mark.parametrize("value", [16384, 49999, 60000, 65536, 78125, 86400, 90000, 100000, 131072, 1000000])
def test_a_multiple_that_is_taken_compiles_in_a_moment_and_can_be_answered(value, digits):
    tokenizer = LLTokenizer(TokenizerWrapper(digits))
    (text,) = GrammarSource("here", schema=integer(multipleOf=value)).grammars().values()
    start = time.process_time()
    matcher, reason = compiled(tokenizer, text)
    assert not reason and time.process_time() - start < MOST_AGAIN_S  # 0.45 s at most when quiet
    for digit in str(value * 91_372_047):
        assert matcher.consume_token(ord(digit)), matcher.get_error()
        matcher.compute_bitmask()
    assert matcher.is_accepting()


# Compiles each multiple in a process with limits, and prints by how many bytes it grew; all grammars are kept.
COMPILED = """
import json, sys
import psutil
from llguidance import LLTokenizer, TokenizerWrapper
from trimtab.serve.grammar.child import Vocabulary
from trimtab.serve.grammar.source import GrammarSource, compiled
if sys.platform == "linux":
    import resource
    resource.setrlimit(resource.RLIMIT_CPU, (60, 60))
    resource.setrlimit(resource.RLIMIT_AS, (2**31, 2**31))
tokens = [bytes([one]) for one in range(256)]
tokenizer = LLTokenizer(TokenizerWrapper(Vocabulary([*tokens, b"<end>"], [256], [256])))
process, kept = psutil.Process(), []
for value in [7, *json.loads(sys.argv[1])]:
    (text,) = GrammarSource("here", schema={"type": "integer", "multipleOf": value}).grammars().values()
    before = process.memory_info().rss
    kept.append(compiled(tokenizer, text))
    print(json.dumps([value, process.memory_info().rss - before, kept[-1][1]]))
"""
# What the expression of a multiple has beside its states, and how the system counts pages.
BESIDE_BYTES = 3 * 2**20


def test_multiples_take_at_most_twice_the_memory_of_the_states_that_are_counted():
    """Of each form: all remainders, twos and fives, zeros behind digits that are even, end in 5, or neither."""
    values = [
        9973, 49865, 79784, 65536, 131072, 78125, 86400, 89600, 102400, 384000, 128000, 1280000, 5600000, 1440000, 3600000,
        166500, 337500, 315000, 3150000, 590625, 199800, 999000, 9990000, 6300000,
    ]  # fmt: skip
    made = subprocess.run([sys.executable, "-c", COMPILED, json.dumps(values)], capture_output=True, text=True, timeout=300)
    assert made.returncode == 0, made.stderr
    (_, *found) = map(json.loads, made.stdout.splitlines())
    assert [(value, reason) for value, _, reason in found] == [(value, "") for value in values]
    short = {
        value: (nbytes, multiple_states(Merges(integer(multipleOf=value))))
        for value, nbytes, _ in found
        if nbytes - BESIDE_BYTES > 2 * 500 * multiple_states(Merges(integer(multipleOf=value)))
    }
    assert short == {}
    assert sum(nbytes for _, nbytes, _ in found) > 100 * 2**20  # what is compared is there


# Remainders of 32 bits: every answer that is allowed is a multiple, and one can be ended.
@pytest.mark.parametrize("value", [300_000_000, 400_000_000, 9.973e-5, 9.97e-6, 1.7e-7, 1e-9, 99.99])
def test_answers_within_the_limits_of_a_multiple_are_multiples(value, digits):
    kind = {"type": "integer" if isinstance(value, int) else "number", "multipleOf": value}
    check_cost([kind], field="here")
    vocabulary = Vocabulary([*digits.tokens[:256], b"<end>"], [256], [256])
    (text,) = GrammarSource("here", schema=kind).grammars().values()
    matcher, reason = compiled(LLTokenizer(TokenizerWrapper(vocabulary)), text)
    assert not reason
    random, ended = Random(7), 0
    for _ in range(40):
        written, one = "", matcher.deep_copy()
        while len(written) < 24 and not (one.is_accepting() and written.strip("-0.")):
            mask = one.compute_bitmask()
            allowed = [chr(token) for token in range(256) if mask[token // 8] >> token % 8 & 1]
            allowed = [char for char in allowed if char in "0123456789."]
            if not allowed:
                break
            written += random.choice(allowed)
            assert one.consume_token(ord(written[-1]))
        if one.is_accepting():
            ended += 1
            assert (Fraction(written) / Fraction(repr(value))).denominator == 1, written
    assert ended


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


LEAVES = st.tuples(ATOMS, REPEATS).map(lambda pair: (pair[0][0] + pair[1][0], 1 if pair[0][2] else pair[0][1] * pair[1][1]))


@given(st.recursive(LEAVES, written_out, max_leaves=8))
@settings(max_examples=examples(200), deadline=None)
def test_counted_repeats_are_counted_as_if_they_were_written_out(case):
    pattern, length = case
    assert expanded_pattern(f"^{pattern}$") == length


@given(st.lists(st.lists(st.sampled_from([3, 7, 9, 11, 13]), min_size=1, max_size=3), min_size=1, max_size=3))
@settings(max_examples=examples(100), deadline=None)
def test_merged_multiples_count_as_every_choice_of_a_branch(groups):
    schema = {"allOf": [{"anyOf": [{"multipleOf": value} for value in group]} for group in groups]}
    merged = {math.lcm(*choice) for choice in itertools.product(*groups)}
    branches = sum(sum(set(group)) for group in groups)
    single = sum(value for group in groups for value in group)
    assert multiple_states(Merges(json.loads(json.dumps(schema)))) == sum(merged) + branches + single
