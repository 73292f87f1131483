"""Which tokens can still lead to an answer that satisfies a JSON schema?"""

from __future__ import annotations

import os
import sys
import threading
import time
import weakref
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from typing import Any

import torch
from torch import Tensor

from trimtab.engine.chat.answer_forms import CALL_MARKS, GEMMA_QUOTE, AnswerForm
from trimtab.errors import CheckpointError, DeviceError, RequestError
from trimtab.serve.grammar.call_grammar import BARE_HEAD
from trimtab.serve.grammar.child import MOST_S, Vocabulary, answer
from trimtab.serve.grammar.prover import SLOW_NICE, SLOW_S, Proof
from trimtab.serve.grammar.source import GrammarSource, compiled

# A tokenizer's JSON, if it neither pads nor truncates.
PLAIN = '{"version":"1.0","truncation":null,"padding":null,'
# A mark that opens a call has no more tokens than this.
TAIL_TOKENS = 24
# Processor time of one step of an answer, and of all its steps beyond that: all others' tokens wait for it. Ordinary grammars take
# 0.05 ms, the first step of an object with 1,500 optional properties 14, the worst that llguidance's limits allow 120.
STEP_S, MOST_SLOW_S = 0.005, 0.5
# Memory of all grammars that are being made or wait. One takes half at most, so that others have room.
MOST_HELD_BYTES = 512 * 2**20
MOST_OWN_BYTES = MOST_HELD_BYTES // 2
# The compile in the worker cannot be ended: it takes as long as the first one did, both together no more than one grammar may.
MOST_AGAIN_S = MOST_S / 2
# Compiles a source where it can be ended. The second value is the vocabulary of that process.
Prove = Callable[[GrammarSource, bytes], Proof]


def _read(tokenizer: Any, ends: list[int]) -> Any:
    """Return llguidance's tokenizer of transformers' one. llguidance copies it first, so that the copy neither pads nor truncates.
    That takes as long as reading it, and one that does neither needs no copy. Errors: ValueError for a tokenizer without a fast
    form, and those of llguidance."""
    from llguidance import LLTokenizer, hf

    backend = getattr(tokenizer, "backend_tokenizer", None)
    text = "" if backend is None else backend.to_str()
    return LLTokenizer(text, eos_token=ends) if text.startswith(PLAIN) else hf.from_tokenizer(tokenizer, eos_token=ends)


class Grammar:
    """The tokenizer's side of every constraint: made once per model.

    end_ids: tokens that end an answer; those outside the vocabulary are passed over, and without any the tokenizer's own is one.
    prove: compiles each grammar first (None: it is compiled at once, without limits).
    Errors: CheckpointError for a tokenizer that llguidance cannot read (it needs the fast form, tokenizer.json), and where no token
    ends an answer.
    """

    def __init__(self, tokenizer: Any, end_ids: Sequence[int], prove: Prove | None = None) -> None:
        try:
            known = range(len(tokenizer))
            self.ends = [token for token in end_ids if token in known] or [tokenizer.eos_token_id]
            if self.ends == [None]:
                raise ValueError("no token ends an answer: eos_token_id and eos_token are missing")
            self._tokenizer = _read(tokenizer, self.ends)
            # What another process needs to compile for this tokenizer.
            self.vocabulary = Vocabulary.of(self._tokenizer).to_bytes()
        except (ValueError, TypeError, AttributeError, AssertionError) as exc:
            raise CheckpointError(
                f"its tokenizer cannot restrict an answer to a schema ({exc})", path=str(getattr(tokenizer, "name_or_path", ""))
            ) from exc
        self._words, self._prove = tokenizer, prove
        self._held = HeldMemory()

    def constraint(self, schema: Mapping[str, Any], *, client: str = "") -> SchemaConstraint:
        """Return the constraint of one answer; {} allows any JSON object. client: whose memory of grammars it counts in.

        Errors: RequestError for a schema that cannot be enforced, with the library's reason, or that takes too long or too much
        memory to compile. DeviceError where the grammars of its client, or of all answers, take too much together.
        """
        source = GrammarSource("response_format.json_schema", schema=dict(schema))
        return SchemaConstraint(self._matchers(source, client)[""], self.ends)

    def calls(self, form: str, functions: Sequence[Mapping[str, Any]], *, several: bool, client: str = "") -> SchemaConstraint:
        """Return the constraint of an answer that calls one of these functions. form: one of `answer_forms.CALL_MARKS`.

        Errors: as `constraint`, for parameters.
        """
        source = GrammarSource("tools", form=form, functions=list(functions), several=several, marks=self._marks(form))
        return SchemaConstraint(self._matchers(source, client)[""], self.ends)

    def calls_once_opened(
        self, form: AnswerForm, functions: Sequence[Mapping[str, Any]], *, several: bool, in_thought: bool, client: str = ""
    ) -> HeldCalls:
        """Return the constraint of an answer that may call these functions: free text until it opens a call. in_thought: the
        prompt ends inside a thought, where nothing is a call. Errors: as `calls`."""
        calls = form.calls or ""
        openings = [CALL_MARKS[calls][0], *([BARE_HEAD] if calls == "llama" else ())]
        source = GrammarSource(
            "tools", form=calls, functions=list(functions), several=several, openings=openings, marks=self._marks(calls)
        )
        return HeldCalls(self._matchers(source, client), self._words, thoughts=form.thoughts, in_thought=in_thought)

    def _matchers(self, source: GrammarSource, client: str) -> dict[str, Matcher]:
        """Return opening -> its matcher. Errors: as `constraint`."""
        if self._prove is None:
            found = answer(self._tokenizer, source)
            if "reason" in found:
                raise RequestError(found["reason"], field=found["field"])
            if "mistake" in found:
                raise RuntimeError(found["mistake"])
            proof = Proof(found["grammars"], 0)
        else:
            proof = self._prove(source, self.vocabulary)
            _check_proof(proof, source.field)
        self._held.take(proof.nbytes, client)
        pace, matchers = Pace(), {}
        try:
            for opening, text in proof.grammars.items():
                work = partial(compiled, self._tokenizer, text)
                matcher, reason = at_low_priority(work) if proof.seconds > SLOW_S else work()
                if reason:
                    raise RequestError(f"cannot be enforced ({reason})", field=source.field)
                matchers[opening] = Matcher(matcher, source.field, pace)
        except BaseException:
            self._held.give_back(proof.nbytes, client)
            raise
        weakref.finalize(pace, self._held.give_back, proof.nbytes, client)
        return matchers

    def _marks(self, form: str) -> dict[str, str]:
        """Return the grammar's form of each mark that is a control token."""
        marks = {}
        for text in (*CALL_MARKS.get(form, ()), GEMMA_QUOTE, "[ARGS]"):
            token_id: Any = self._words.convert_tokens_to_ids(text) if text else None
            token = self._words.added_tokens_decoder.get(token_id)
            # To llguidance an added token as "<tool_call>" is a control token, also where its file says that it is none (Qwen's).
            if token is not None and token.content == text and self._tokenizer.is_special_token(token_id):
                marks[text] = f"<[{token_id}]>"
        return marks


def at_low_priority(work: Callable[[], Any]) -> Any:
    """Return the result of work that keeps no core from others, where the system has priorities of threads (Linux)."""
    future: Future[Any] = Future()

    def run() -> None:
        with suppress(OSError, AttributeError):
            if sys.platform == "linux":
                os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), SLOW_NICE)
        try:
            future.set_result(work())
        except BaseException as exc:  # a panic of a library in Rust is no Exception
            future.set_exception(exc)

    threading.Thread(target=run, name="trimtab-slow-schema", daemon=True).start()
    return future.result()


def _check_proof(proof: Proof, field: str) -> None:
    """Raise RequestError for a grammar that compiled in its process and takes too much here, where nothing can end it."""
    hint = "Make the schema simpler: fewer branches, shorter counted repeats, smaller multipleOf"
    if proof.seconds > MOST_AGAIN_S:
        raise RequestError(
            f"takes {proof.seconds:.1f} s of processor time to compile, the limit is {MOST_AGAIN_S:g} s", field=field, hint=hint
        )
    if proof.nbytes > MOST_OWN_BYTES:
        raise RequestError(
            f"its grammar takes {proof.nbytes // 2**20} MiB, the limit is {MOST_OWN_BYTES // 2**20} MiB", field=field, hint=hint
        )


class HeldMemory:
    """The memory of all matchers that are in use, as measured in the process that compiled them first.

    A client may have half of the memory that others leave: one alone half of all, the next one a quarter, and there is always some
    left. Source: the dynamic threshold of Choudhury and Hahne for shared buffers (IEEE/ACM ToN 6(2), 1998), with alpha = 1.
    """

    def __init__(self, most_bytes: int = MOST_HELD_BYTES) -> None:
        self._most = most_bytes
        self._by_client: Counter[str] = Counter()
        self._lock = threading.Lock()
        # Bytes that a garbage collection frees while a thread runs here count from the next look on.
        self._given_back: deque[tuple[int, str]] = deque()

    @property
    def nbytes(self) -> int:
        with self._lock:
            return self._counted().total()

    def take(self, nbytes: int, client: str = "") -> None:
        """Count a client's matcher. Errors: DeviceError beyond its share."""
        with self._lock:
            by_client = self._counted()
            own = by_client[client] + nbytes
            share = (self._most - (by_client.total() - by_client[client])) // 2
            if nbytes and own > share:
                raise DeviceError(
                    f"the grammars of your answers would take {own // 2**20} MiB together, {share // 2**20} MiB are yours now",
                    device="cpu", hint="Send a smaller schema, or try again later",
                )  # fmt: skip
            by_client[client] = own

    def give_back(self, nbytes: int, client: str = "") -> None:
        self._given_back.append((nbytes, client))

    def _counted(self) -> Counter[str]:
        """Return the bytes of each client that has some. The caller has the lock."""
        while self._given_back:
            nbytes, client = self._given_back.popleft()
            self._by_client[client] -= nbytes
            if not self._by_client[client]:
                del self._by_client[client]
        return self._by_client


class Pace:
    """The processor time of one answer's steps beyond `STEP_S` each."""

    def __init__(self) -> None:
        self.slow_s = 0.0

    def took(self, seconds: float, field: str) -> None:
        """Count a step. Errors: RequestError once the answer has kept others waiting for too long."""
        self.slow_s += max(0.0, seconds - STEP_S)
        if self.slow_s > MOST_SLOW_S:
            raise RequestError(
                f"takes too long: its tokens took {self.slow_s:.1f} s of processor time more than {1000 * STEP_S:g} ms each",
                field=field, hint="Make the schema simpler: fewer branches, patterns and optional properties",
            )  # fmt: skip


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


class MayThink:
    """A constraint before which an answer may have one thought. open_id: the token that opens it; close_ids: those that end it."""

    def __init__(self, constraint: SchemaConstraint, open_id: int, close_ids: Sequence[int]) -> None:
        self._constraint, self._open_id = constraint, open_id
        self._thought = AfterThought(constraint, close_ids)
        self._start: int | None = None

    def __call__(self, token_ids: Sequence[int], scores: Tensor) -> Tensor:
        if self._start is None:
            self._start = len(token_ids)
        begun = len(token_ids) - self._start
        if begun and token_ids[self._start] == self._open_id:
            if begun == 1:
                self._constraint.restart()
            return self._thought(token_ids, scores)
        allowed = self._constraint(token_ids, scores)
        if not begun:
            allowed[self._open_id] = scores[self._open_id]
        return allowed


class SchemaConstraint:
    """One answer's constraint: call with the tokens so far and the logits [V]; forbidden tokens get minus infinity.

    Errors: RequestError where the grammar grows beyond llguidance's limits, or takes too long, while the answer is written.
    """

    def __init__(self, matcher: Matcher, ends: Sequence[int]) -> None:
        self._matcher, self._ends = matcher, list(ends)
        self._seen: int | None = None

    def restart(self) -> None:
        """Begin at the next call, where no token was taken yet."""
        self._seen = None

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
                self._matcher = None  # the call has ended, or the rest of its mark's token began none


class Matcher:
    """llguidance's matcher of one answer, whose failures are errors: it allows the end of the answer once it has failed.

    field: the request's, which a RequestError names. pace: of all matchers of the answer.
    """

    def __init__(self, matcher: Any, field: str, pace: Pace) -> None:
        self._matcher, self._field, self._pace = matcher, field, pace
        self._mask = b""

    def copy(self) -> Matcher:
        return Matcher(self._matcher.deep_copy(), self._field, self._pace)

    @property
    def is_stopped(self) -> bool:
        return bool(self._matcher.is_stopped())

    @property
    def is_accepting(self) -> bool:
        return bool(self._matcher.is_accepting())

    def look(self) -> None:
        """Compute which tokens may come next. Errors: RequestError where that grows beyond llguidance's limits."""
        start = time.thread_time()
        # A grammar that is wrong says so from the start.
        self._mask = b"" if self._matcher.is_error() else bytes(self._matcher.compute_bitmask())
        if self._matcher.is_error():
            raise self._failed()
        self._pace.took(time.thread_time() - start, self._field)

    def take(self, token: int) -> bool:
        """Take the next token; False if the grammar does not allow it. Errors: as `look`."""
        is_allowed = token // 8 < len(self._mask) and bool(self._mask[token // 8] >> (token % 8) & 1)
        self._mask = b""
        start = time.thread_time()
        if self._matcher.consume_token(token):
            self._pace.took(time.thread_time() - start, self._field)
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
