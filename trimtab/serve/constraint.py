"""Answers restricted to a JSON schema: at every step only tokens that can still lead to a valid answer are sampled.

The grammar work is llguidance's (the library behind several servers' structured output); here it meets our sampler.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from trimtab.errors import CheckpointError, RequestError
from trimtab.runtime.answer_forms import CALL_MARKS, AnswerForm
from trimtab.serve.call_grammar import BARE_HEAD, NO_PARAMETERS, calls_grammar

ANY_OBJECT: dict[str, Any] = {"type": "object"}
# One space may stand between two tokens of JSON, as in what most models were trained on. Free white space lets a small model
# write newlines until its tokens are used up.
WHITE_SPACE: Any = {"whitespace_flexible": True, "whitespace_pattern": "[ ]?"}
# A mark that opens a call has no more tokens than this.
TAIL_TOKENS = 24
# llguidance's limits where its defaults do not fit. An object may have a thousand optional properties: each adds a few items to a
# row of the parser. A grammar of this size compiles in about a second.
MOST_ROW_ITEMS, MOST_GRAMMAR_SYMBOLS = 10_000, 100_000


class Grammar:
    """The tokenizer's side of every constraint: made once per model. end_ids: tokens that end an answer.

    Errors: CheckpointError for a tokenizer that llguidance cannot read (it needs the fast form, tokenizer.json).
    """

    def __init__(self, tokenizer: Any, end_ids: Sequence[int]) -> None:
        import llguidance.hf

        try:
            self._tokenizer = llguidance.hf.from_tokenizer(tokenizer, eos_token=end_ids[0] if end_ids else None)
        except (ValueError, TypeError, AttributeError, AssertionError) as exc:
            raise CheckpointError(
                f"its tokenizer cannot restrict an answer to a schema ({exc})",
                path=str(getattr(tokenizer, "name_or_path", "")),
            ) from exc
        self._ends, self._words = list(end_ids), tokenizer

    def constraint(self, schema: Mapping[str, Any]) -> SchemaConstraint:
        """Return the constraint of one answer; {} allows any JSON object. Errors: RequestError for a schema that cannot be
        held to, with the library's reason."""
        from llguidance import LLMatcher

        grammar = LLMatcher.grammar_from_json_schema(json.dumps(dict(schema) or ANY_OBJECT), defaults=WHITE_SPACE)
        return SchemaConstraint(self._checked(grammar, "response_format.json_schema"), self._ends)

    def calls(
        self, form: str, functions: Sequence[Mapping[str, Any]], *, several: bool, field: str = "tools"
    ) -> SchemaConstraint:
        """Return the constraint of an answer that calls one of these functions. form: one of `answer_forms.CALL_MARKS`.

        Errors: RequestError for parameters that no call can be held to.
        """
        self._check_parameters(functions, field)
        return SchemaConstraint(self._checked(self._calls_text(form, functions, several=several), field), self._ends)

    def calls_once_opened(
        self,
        form: AnswerForm,
        functions: Sequence[Mapping[str, Any]],
        *,
        several: bool,
        in_thought: bool,
        field: str = "tools",
    ) -> HeldCalls:
        """Return the constraint of an answer that may call these functions: free text until it opens a call. in_thought: the
        prompt ends inside a thought, where nothing is a call. Errors: as `calls`."""
        self._check_parameters(functions, field)
        calls = form.calls or ""
        openings = {
            CALL_MARKS[calls][0]: self._calls_text(calls, functions, several=several, after=CALL_MARKS[calls][0])
        }
        if calls == "llama":
            openings[BARE_HEAD] = self._calls_text(calls, functions, several=several, after=BARE_HEAD)
        matchers = {mark: self._checked(text, field) for mark, text in openings.items()}
        return HeldCalls(matchers, self._words, thoughts=form.thoughts, in_thought=in_thought)

    def _checked(self, grammar: str, field: str) -> Matcher:
        """Return the matcher of a grammar. Errors: RequestError for one that cannot be enforced."""
        from llguidance import LLMatcher, LLParserLimits

        limits = LLParserLimits(max_items_in_row=MOST_ROW_ITEMS, max_grammar_size=MOST_GRAMMAR_SYMBOLS)
        matcher = Matcher(LLMatcher(self._tokenizer, grammar, log_level=0, limits=limits), field)
        matcher.look()  # a grammar that no text satisfies is known only once a first token is looked for
        return matcher

    def _calls_text(self, form: str, functions: Sequence[Mapping[str, Any]], *, several: bool, after: str = "") -> str:
        from llguidance import LLMatcher

        text = calls_grammar(form, functions, self._mark, several=several, after=after)
        return str(LLMatcher.grammar_from_lark(text))

    def _check_parameters(self, functions: Sequence[Mapping[str, Any]], field: str) -> None:
        from llguidance import LLMatcher

        for function in functions:  # what the rules of some forms would not notice
            self._checked(
                LLMatcher.grammar_from_json_schema(json.dumps(function.get("parameters") or NO_PARAMETERS)), field
            )

    def _mark(self, text: str) -> str:
        """Return what stands for a mark in a grammar: its control token, or its characters if it is none."""
        token_id = self._words.convert_tokens_to_ids(text)
        token = self._words.added_tokens_decoder.get(token_id)
        # To llguidance an added token as "<tool_call>" is a control token, also where its file says that it is none (Qwen's).
        is_control = token is not None and token.content == text and self._tokenizer.is_special_token(token_id)
        return f"<[{token_id}]>" if is_control else json.dumps(text)


class AfterThought:
    """A constraint that begins when a thought has ended. close_ids: the tokens that end it."""

    def __init__(self, constraint: SchemaConstraint, close_ids: Sequence[int]) -> None:
        self._constraint, self._close = constraint, list(close_ids)
        self._start: int | None = None
        self._is_inside = True

    def __call__(self, token_ids: Sequence[int], scores: Tensor) -> Tensor:
        if self._start is None:
            self._start = len(token_ids)
        if self._is_inside:
            size = len(self._close)
            self._is_inside = list(token_ids[self._start :])[-size:] != self._close
        return scores if self._is_inside else self._constraint(token_ids, scores)


class SchemaConstraint:
    """One answer's constraint: call with the tokens so far and the logits [V]; forbidden tokens get minus infinity.

    Errors: RequestError where the grammar grows beyond llguidance's limits while the answer is written.
    """

    def __init__(self, matcher: Matcher, ends: Sequence[int]) -> None:
        self._matcher, self._ends = matcher, list(ends)
        self._seen: int | None = None

    def __call__(self, token_ids: Sequence[int], scores: Tensor) -> Tensor:
        if self._seen is None:
            self._seen = len(token_ids)  # the prompt is free
        for token in token_ids[self._seen :]:
            # Only tokens of the mask are sampled: a refusal is a mistake of the grammar, which then allows the end alone.
            if not self._matcher.take(token):
                raise RuntimeError(f"the grammar refused token {token}")
        self._seen = len(token_ids)
        if not self._matcher.is_stopped:
            return self._matcher.masked(scores)
        allowed = torch.zeros(len(scores), dtype=torch.bool, device=scores.device)
        allowed[self._ends] = True
        return scores.masked_fill(~allowed, float("-inf"))


class HeldCalls:
    """A constraint that begins where the answer opens a call and ends with that call.

    openings: opening text -> the matcher of the rest; BARE_HEAD opens a call only at the start of the
    answer. thoughts: marks of reasoning, in which nothing is a call. in_thought: whether the answer begins inside reasoning.
    Errors: as SchemaConstraint.
    """

    def __init__(
        self, openings: Mapping[str, Matcher], tokenizer: Any, *, thoughts: tuple[str, str] | None, in_thought: bool
    ) -> None:  # fmt: skip
        self._openings, self._tokenizer, self._thoughts = openings, tokenizer, thoughts
        self._is_in_thought, self._is_first = in_thought, True
        self._seen: int | None = None
        self._tail: list[int] = []
        self._matcher: Matcher | None = None

    def __call__(self, token_ids: Sequence[int], scores: Tensor) -> Tensor:
        if self._seen is None:
            self._seen = len(token_ids)
        for token in token_ids[self._seen :]:
            self._take(token)
        self._seen = len(token_ids)
        return scores if self._matcher is None else self._matcher.masked(scores)

    def _take(self, token: int) -> None:
        if self._matcher is not None:
            self._feed([token])
            return
        self._tail.append(token)
        text = str(self._tokenizer.decode(self._tail, skip_special_tokens=False))
        if self._is_in_thought:
            assert self._thoughts is not None
            if self._thoughts[1] in text:
                self._tail, self._is_in_thought = [], False
        elif self._thoughts is not None and self._thoughts[0] in text:
            self._tail, self._is_in_thought = [], True
        else:
            self._look_for_opening(text)
        self._tail = self._tail[-TAIL_TOKENS:]

    def _look_for_opening(self, text: str) -> None:
        bare = text.lstrip()
        if self._is_first and BARE_HEAD in self._openings and bare.startswith(BARE_HEAD):
            self._open(BARE_HEAD, bare)
            return
        self._is_first = self._is_first and BARE_HEAD.startswith(bare[: len(BARE_HEAD)])
        mark = next((one for one in self._openings if one != BARE_HEAD and one in text), None)
        if mark is not None:
            self._open(mark, text)

    def _open(self, mark: str, text: str) -> None:
        self._matcher, self._tail, self._is_first = self._openings[mark].copy(), [], False
        # The token that ended the mark may hold more.
        rest = text.partition(mark)[2]
        self._feed(self._tokenizer(rest, add_special_tokens=False)["input_ids"] if rest else [])

    def _feed(self, ids: Sequence[int]) -> None:
        for token in ids:
            if self._matcher is not None and (not self._matcher.take(token) or self._matcher.is_accepting):
                self._matcher = None  # the call has ended, or what its mark's token held began none


class Matcher:
    """llguidance's matcher of one answer, whose failures are errors: it allows the end of the answer once it has failed.

    field: the request's, which a RequestError names.
    """

    def __init__(self, matcher: Any, field: str) -> None:
        self._matcher, self._field = matcher, field
        self._mask = b""

    def copy(self) -> Matcher:
        return Matcher(self._matcher.deep_copy(), self._field)

    @property
    def is_stopped(self) -> bool:
        return bool(self._matcher.is_stopped())

    @property
    def is_accepting(self) -> bool:
        return bool(self._matcher.is_accepting())

    def look(self) -> None:
        """Compute which tokens may come next. Errors: RequestError where that grows beyond llguidance's limits."""
        # A grammar that is wrong says so from the start.
        self._mask = b"" if self._matcher.is_error() else bytes(self._matcher.compute_bitmask())
        if self._matcher.is_error():
            raise self._failed()

    def take(self, token: int) -> bool:
        """Take the next token; False if the grammar does not allow it. Errors: as `look`."""
        is_allowed = token // 8 < len(self._mask) and bool(self._mask[token // 8] >> (token % 8) & 1)
        self._mask = b""
        if self._matcher.consume_token(token):
            return True
        if is_allowed:
            raise self._failed()
        return False

    def masked(self, scores: Tensor) -> Tensor:
        """Return logits [V] with minus infinity for each token that may not come next. Errors: as `look`."""
        self.look()
        # The bits are copied as they are, an eighth of a mask of bytes.
        mask = torch.frombuffer(bytearray(self._mask), dtype=torch.uint8).to(scores.device)
        bits = (mask[:, None] >> torch.arange(8, dtype=torch.uint8, device=scores.device)) & 1
        allowed = torch.zeros(len(scores), dtype=torch.bool, device=scores.device)
        known = bits.flatten()[: len(scores)].bool()
        allowed[: len(known)] = known
        return scores.masked_fill(~allowed, float("-inf"))

    def _failed(self) -> RequestError:
        reason = self._matcher.get_error().partition("\n")[0]
        return RequestError(f"cannot be enforced ({reason})", field=self._field)
