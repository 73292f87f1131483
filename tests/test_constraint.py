"""Which texts an answer in JSON may be, token by token, and which schemas are refused."""

from __future__ import annotations

import json

import pytest
import torch

from trimtab.demo.line import FOLDER as DEMO
from trimtab.errors import RequestError
from trimtab.runtime.hf import load_tokenizer
from trimtab.serve.constraint import Grammar

ANSWERS = [
    json.loads(line)["answers"]["rslora-dora"] for line in (DEMO / "prompts.jsonl").read_text("utf-8").splitlines()
]
END = 1


@pytest.fixture(scope="module")
def tokenizer():
    return load_tokenizer(DEMO / "base")


@pytest.fixture(scope="module")
def grammar(tokenizer):
    return Grammar(tokenizer, [END])


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


@pytest.mark.parametrize("text", ['{"a":1,"b":[1,2]}', '{"a": 1, "b": [1, 2]}', '{ "a": 1 }', "{}"])
def test_json_with_a_space_or_none_between_its_parts_can_be_drawn(grammar, tokenizer, text):
    assert is_allowed(grammar, tokenizer, text, {})


@pytest.mark.parametrize("text", ['{"a":  1}', '{"a":\n1}', "{\n", "[1]", "1", '{"a": 1', '{"a": 1}}', "Hello", ""])
def test_what_is_no_object_or_runs_away_in_white_space_cannot(grammar, tokenizer, text):
    assert not is_allowed(grammar, tokenizer, text, {})


def test_a_schema_decides_keys_and_values(grammar, tokenizer):
    schema = {
        "type": "object", "properties": {"shape": {"enum": ["star", "square"]}}, "required": ["shape"],
        "additionalProperties": False,
    }  # fmt: skip
    assert is_allowed(grammar, tokenizer, '{"shape": "star"}', schema)
    assert not is_allowed(grammar, tokenizer, '{"shape": "circle"}', schema)
    assert not is_allowed(grammar, tokenizer, '{"colour": "red"}', schema)
    assert not is_allowed(grammar, tokenizer, "{}", schema)


def test_a_schema_that_cannot_be_held_to_is_refused_with_the_reason(grammar):
    with pytest.raises(RequestError, match="cannot be held to") as caught:
        grammar.constraint({"type": "no such type"})
    assert caught.value.field == "response_format.json_schema"
