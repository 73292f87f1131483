"""What is the constraint of an answer as plain values, and which grammars does it have for llguidance?"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from dataclasses import field as given
from typing import Any

from trimtab.serve.grammar.call_grammar import NO_PARAMETERS, calls_grammar

ANY_OBJECT: dict[str, Any] = {"type": "object"}
# One space may be between two tokens of JSON, as in most training data. Free white space lets a small model
# write newlines until its tokens are used up.
WHITE_SPACE: Any = {"whitespace_flexible": True, "whitespace_pattern": "[ ]?"}
# llguidance's limits where its defaults do not fit: a thousand optional properties, a grammar that compiles in about a second. A
# state of the lexer takes 0.5 KiB. The limits on items and fuel of the lexer are 120 ms of one step.
MOST_ROW_ITEMS, MOST_GRAMMAR_SYMBOLS, MOST_LEXER_STATES = 10_000, 100_000, 50_000
MOST_STEP_ITEMS, MOST_STEP_FUEL = 50_000, 400_000


@dataclass(frozen=True)
class GrammarSource:
    """The constraint of an answer: a JSON schema, or calls of functions (form is not empty).

    field: of the request, which errors name. openings: the texts after which a call's grammar begins, "" for its start. marks: the
    grammar's form of each control token.
    """

    field: str
    schema: Mapping[str, Any] = given(default_factory=dict)
    form: str = ""
    functions: Sequence[Mapping[str, Any]] = ()
    several: bool = False
    openings: Sequence[str] = ("",)
    marks: Mapping[str, str] = given(default_factory=dict)

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> GrammarSource:
        return cls(**json.loads(text))

    def grammars(self) -> dict[str, str]:
        """Return opening -> the grammar of the text after it. Errors: RequestError for schemas with too many rules."""
        from llguidance import LLMatcher

        if not self.form:
            text = LLMatcher.grammar_from_json_schema(json.dumps(dict(self.schema) or ANY_OBJECT), defaults=WHITE_SPACE)
            return {"": str(text)}
        return {
            after: str(LLMatcher.grammar_from_lark(calls_grammar(
                self.form, self.functions, self._mark, several=self.several, after=after,
            )))
            for after in self.openings
        }  # fmt: skip

    def checks(self) -> dict[str, str]:
        """Return function -> a grammar that has to compile too: of its parameters, where some forms enforce less."""
        from llguidance import LLMatcher

        parameters = {function["name"]: function.get("parameters") or NO_PARAMETERS for function in self.functions}
        return {name: str(LLMatcher.grammar_from_json_schema(json.dumps(one))) for name, one in parameters.items()}

    def _mark(self, text: str) -> str:
        return self.marks.get(text, json.dumps(text))


def compiled(tokenizer: Any, grammar: str) -> tuple[Any, str]:
    """Return llguidance's matcher of a grammar, whose first tokens were looked for, and why it cannot be used ("" if it can)."""
    from llguidance import LLMatcher, LLParserLimits

    limits = LLParserLimits(
        max_items_in_row=MOST_ROW_ITEMS, max_grammar_size=MOST_GRAMMAR_SYMBOLS, max_lexer_states=MOST_LEXER_STATES,
        step_max_items=MOST_STEP_ITEMS, step_lexer_fuel=MOST_STEP_FUEL,
    )  # fmt: skip
    matcher = LLMatcher(tokenizer, grammar, log_level=0, limits=limits)
    if not matcher.is_error():
        matcher.compute_bitmask()  # a grammar that no text satisfies is known only once a first token is looked for
    return matcher, matcher.get_error().partition("\n")[0] if matcher.is_error() else ""
