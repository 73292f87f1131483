"""How do model inputs become text, delivered as it arrives?"""

from __future__ import annotations

import re
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Container, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, closing, nullcontext
from dataclasses import dataclass, field
from functools import lru_cache, partial
from itertools import product
from queue import SimpleQueue
from typing import TYPE_CHECKING, Literal, Protocol

import torch
import transformers
from torch import Tensor
from transformers.convert_slow_tokenizer import bytes_to_unicode

from trimtab.engine.batch.request import AnswerPenalties, Suppressed, check_logits
from trimtab.engine.chat.call_values import mark_overlap
from trimtab.engine.chat.control_tokens import ChatModel, HasContext, end_token_ids, tokenizer_of
from trimtab.engine.chat.prompt import fitted
from trimtab.engine.kv import kv_cache, sequence
from trimtab.engine.kv.sequence import Inputs, text_of
from trimtab.engine.prefill.rows import PrefillContext
from trimtab.engine.prefill.stock_pass import whole_pass
from trimtab.errors import CheckpointError
from trimtab.request import DEFAULT_NEW_TOKENS, GenerateRequest

if TYPE_CHECKING:
    from trimtab.engine.batch.batch import Batch, BatchModel
    from trimtab.engine.batch.request import SampledToken
    from trimtab.engine.formats.hf_types import HFModel, Tokenizer

Finish = Literal["stop", "length", "cancelled"]


@dataclass(frozen=True)
class TokenLogprob:
    """One token's log-probability (natural logarithm) under the model's own distribution.

    token_id: of the answer. logprob: before penalties, temperature and truncation. top: the most likely (token id,
    log-probability), as many as requested.
    """

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True)
class Piece:
    """A delta: some text (possibly none yet) and the token ids that were decided since the last delta."""

    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...] = ()


@dataclass(frozen=True)
class Answer:
    """A whole answer.

    text: without stop texts. token_ids: of the answer, its end token included. finish_reason: "stop", "length" or "cancelled".
    prompt_tokens: length of the prompt. cached_tokens: tokens of the prompt whose keys and values came from the prefix
    cache. max_new_tokens: the most that the answer could have. ttft_s: seconds to the first token; decode_s: seconds of
    the other tokens; tokens_per_s: their rate. logprobs: one for each token, empty if not requested.
    """

    text: str
    token_ids: tuple[int, ...]
    finish_reason: Finish
    prompt_tokens: int
    ttft_s: float
    decode_s: float
    tokens_per_s: float
    logprobs: tuple[TokenLogprob, ...] = ()
    cached_tokens: int = 0
    max_new_tokens: int = DEFAULT_NEW_TOKENS


class Detokenizer:
    """Turns token ids into text as they come: `push` returns the part that is sure, `finish` the rest.

    Text waits while it is an incomplete character (the tokenizer shows U+FFFD) or may become a stop text. stopped: a stop text was
    met; it and later text are not part of the answer. hidden: ids of the control tokens that are left out (`hidden_ids`); None
    leaves out all. before: the tokens that the answer continues; its first token is decoded after them, and completes their last
    character. open_characters: how many U+FFFD may still change.
    """

    # A character is at most 4 bytes, one token each at worst: a U+FFFD that stays longer is the model's own.
    LONGEST_CHARACTER_TOKENS = 6
    # Tokens without a text, such as control tokens, of which this many are decoded together with the next one.
    MOST_EMPTY_TOKENS = 64

    def __init__(
        self, tokenizer: Tokenizer, stop: Sequence[str] = (), *, hidden: Collection[int] | None = None, before: Sequence[int] = ()
    ) -> None:
        self._stop, self._hidden = tuple(stop), hidden or ()
        self._text_of = _decoder(tokenizer, hides_all=hidden is None)
        (self._ids, self._to), self._from = self._end_of(before[-self.MOST_EMPTY_TOKENS :]), 0
        prompt, whole = self._text_of(self._ids), self._text_of(self._ids[: self._to]).rstrip("\ufffd")
        self._taken = max(len(whole), len(prompt.rstrip("\ufffd")))
        self.open_characters = self._of_prompt = len(prompt) - self._taken
        self._waits, self._sure, self._held, self.stopped = 0, 0, "", False
        self.stop_text: str | None = None

    @property
    def length(self) -> int:
        """The characters of the answer so far, those that wait included."""
        return self._sure + max(0, self.open_characters - self._of_prompt)

    def _end_of(self, before: Sequence[int]) -> tuple[list[int], int]:
        """Return a prompt's last tokens, and how many of them end with a character; bytes next to a part may be U+FFFD."""
        most, ids = self.LONGEST_CHARACTER_TOKENS, [token for token in before if token not in self._hidden]
        for end, size in product(range(len(ids), max(-1, len(ids) - 4), -1), range(most, most + 4)):
            start = max(0, end - size)
            if "\ufffd" not in self._text_of(ids[start:end]):
                return ids[start:], end - start
        return ids[-most:], len(ids[-most:])

    def push(self, token_id: int) -> str:
        """Return the text that is now sure."""
        if token_id in self._hidden:
            return ""
        self._ids.append(token_id)
        # Decoded together with the tokens before: many tokenizers drop the space of a first token.
        now = self._text_of(self._ids[self._from :])
        sure, border = len(now.rstrip("\ufffd")), len(self._ids)
        self._waits = 0 if sure > self._taken else self._waits + 1
        if self._waits >= self.LONGEST_CHARACTER_TOKENS and len(now) > self._taken:
            border -= self.LONGEST_CHARACTER_TOKENS - 1
            sure = max(sure, min(len(now), len(self._text_of(self._ids[self._from : border]))))
        if sure > self._taken:
            return self._take(now, sure, border)
        self.open_characters = max(0, len(now) - self._taken)
        if not self.open_characters and len(self._ids) - self._to > self.MOST_EMPTY_TOKENS:
            del self._ids[self._to :]  # every step would decode all of them again
        return ""

    def _take(self, now: str, sure: int, border: int) -> str:
        """Release the first `sure` characters of the text now. border: no token behind it has a whole character."""
        text, self.open_characters = now[self._taken : sure], len(now) - sure
        # What waits is decoded again without the tokens before the last border. It may begin inside one: count from its end.
        taken = len(self._text_of(self._ids[self._to :])) - self.open_characters
        self._from, self._taken = (self._to, taken) if taken >= 0 else (self._from, sure)
        self._to = border
        return self._release(self._answers(text))

    def _answers(self, text: str) -> str:
        """Return a text without the U+FFFD of a prompt's last character that was not completed."""
        own = text.lstrip("\ufffd")
        skipped = min(self._of_prompt, len(text) - len(own))
        self._of_prompt = self._of_prompt - skipped if not own else 0
        self._sure += len(text) - skipped
        return text[skipped:]

    def _release(self, text: str) -> str:
        self._held += text
        starts = [place for stop in self._stop if (place := self._held.find(stop)) >= 0]
        if starts:
            self.stop_text = min((self._held.find(stop), stop) for stop in self._stop if stop in self._held)[1]
            sure, self._held, self.stopped = self._held[: min(starts)], "", True
            return sure
        keep = max((mark_overlap(self._held, stop) for stop in self._stop), default=0)
        sure, self._held = self._held[: len(self._held) - keep], self._held[len(self._held) - keep :]
        return sure

    def finish(self) -> str:
        """Return the waiting text."""
        if self.stopped:
            return ""
        self.open_characters = 0
        rest = self._release(self._answers(self._text_of(self._ids[self._from :])[self._taken :]))
        if self.stopped:
            return rest
        rest, self._held = rest + self._held, ""
        return rest


class AnswerText:
    """The text of one answer, token by token: what drives its detokenizer. is_over: an end token or a stop text was met."""

    def __init__(self, detokenizer: Detokenizer | None, end_ids: Container[int]) -> None:
        self._detokenizer, self._end_ids = detokenizer, end_ids
        self.is_over = self._has_begun = False
        self._begins = 0

    @property
    def stop_text(self) -> str | None:
        """The stop text that was met, if any."""
        return None if self._detokenizer is None else self._detokenizer.stop_text

    def place_of(self, data: bytes) -> int:
        """Return where in the text the next token begins, which has these bytes: a part of a character, where that begins."""
        if self._detokenizer is None:
            return 0
        self._begins = self._detokenizer.length - 1 if self._has_begun else self._begins
        begins = [byte & 0xC0 != 0x80 for byte in data]  # UTF-8: the first byte of a character
        self._has_begun = any(begins[1:])
        if any(begins[:1]) or not self._detokenizer.open_characters:
            self._begins = self._detokenizer.length
        return self._begins

    def take(self, token_id: int) -> str:
        """Return the text that is now sure. An end token has none."""
        if token_id in self._end_ids:
            self.is_over = True
            return ""
        return self._watched(self._detokenizer.push(token_id)) if self._detokenizer is not None else ""

    def end(self) -> str:
        """Return the waiting text of an answer that has ended."""
        return self._watched(self._detokenizer.finish()) if self._detokenizer is not None else ""

    def _watched(self, text: str) -> str:
        self.is_over = self.is_over or self.stop_text is not None
        return text


@dataclass(eq=False)
class AnswerSoFar:
    """The part of an answer that has come. start, first: when it began and had its first token, as `time.perf_counter`."""

    prompt_tokens: int
    start: float
    first: float = 0.0
    texts: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)

    def take(self, piece: Piece) -> None:
        if not self.token_ids:
            self.first = time.perf_counter()
        self.texts.append(piece.text)
        self.token_ids += piece.token_ids
        self.logprobs += piece.logprobs

    def answer(self, finish: Finish, end: float, *, max_new_tokens: int, cached_tokens: int = 0) -> Answer:
        """Return it as an answer that ended then."""
        decode_s = end - self.first
        rate = (len(self.token_ids) - 1) / decode_s if len(self.token_ids) > 1 and decode_s > 0 else 0.0
        return Answer(
            text="".join(self.texts), token_ids=tuple(self.token_ids), finish_reason=finish, prompt_tokens=self.prompt_tokens,
            ttft_s=self.first - self.start, decode_s=decode_s, tokens_per_s=rate, logprobs=tuple(self.logprobs),
            cached_tokens=cached_tokens, max_new_tokens=max_new_tokens,
        )  # fmt: skip


def hidden_ids(tokenizer: Tokenizer, shown: Collection[str]) -> frozenset[int]:
    """Return the ids of the tokenizer's control tokens that are not `shown`. Takes milliseconds for thousands of them."""
    added = tokenizer.added_tokens_decoder.items()
    return frozenset(token_id for token_id, token in added if token.special and token.content not in shown)


def _decoder(tokenizer: Tokenizer, *, hides_all: bool) -> Callable[[list[int]], str]:
    """Return the function from token ids to their text. A fast tokenizer's `decode` checks its arguments for ten times as long as
    its `tokenizers` object decodes."""
    fast, own = transformers.PreTrainedTokenizerFast, type(tokenizer)
    if issubclass(own, fast) and all(getattr(own, name) is getattr(fast, name) for name in ("decode", "_decode")):
        return partial(tokenizer.backend_tokenizer.decode, skip_special_tokens=hides_all)

    def decode(ids: list[int]) -> str:
        return str(tokenizer.decode(ids, skip_special_tokens=hides_all, clean_up_tokenization_spaces=False))

    return decode


class TokenTexts:
    """Single tokens of a tokenizer as they are behind other text: many decoders drop the space of a first token."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._text_of, self._piece_of = _decoder(tokenizer, hides_all=False), tokenizer.convert_ids_to_tokens
        letter: int | None = tokenizer.convert_tokens_to_ids("a")
        self._before = [] if letter is None else [letter]
        self._skipped = len(self._text_of(self._before))
        self.bytes_of = lru_cache(2**14)(self._bytes_of)

    def text_of(self, token_id: int) -> str:
        """Return a token's text. A part of a character is U+FFFD."""
        return self.bytes_of(token_id).decode("utf-8", "replace")

    def _bytes_of(self, token_id: int) -> bytes:
        """Return the bytes of a token's text; of a part of a character, its own from the vocabulary."""
        text = self._text_of([*self._before, token_id])[self._skipped :]
        if "\ufffd" not in text:
            return text.encode()
        piece = str(self._piece_of(token_id))
        if re.fullmatch("<0x[0-9A-Fa-f]{2}>", piece):
            return bytes.fromhex(piece[3:5])
        letters = {letter: value for value, letter in bytes_to_unicode().items()}
        return bytes(letters[letter] for letter in piece) if letters.keys() >= set(piece) else text.encode()


@dataclass
class _Stream:
    """The queue between the worker and the consumer: generation adds tokens (`put`), the consumer reads until None."""

    text: AnswerText
    stop: threading.Event
    queue: SimpleQueue[Piece | BaseException | None] = field(default_factory=SimpleQueue)
    prompt_seen: bool = False
    logprobs: Logprobs | None = None

    def put(self, value: Tensor) -> None:
        if not self.prompt_seen:  # transformers puts the prompt first
            self.prompt_seen = True
            return
        for token in value.reshape(-1).tolist():
            if self.text.is_over:  # transformers 5.23 has the next step under way before it hands a token out
                return
            logprobs = () if self.logprobs is None else (TokenLogprob(token, *self.logprobs.take(token)),)
            self.take(token, logprobs)

    def take(self, token: int, logprobs: tuple[TokenLogprob, ...] = ()) -> None:
        """Hand out one decided token."""
        self.queue.put(Piece(self.text.take(token), (token,), logprobs))

    def end(self) -> None:
        if rest := self.text.end():
            self.queue.put(Piece(rest, ()))

    def is_over(self) -> bool:
        return self.stop.is_set() or self.text.is_over


class AnsweringModel(PrefillContext, ChatModel, HasContext, Protocol):
    """A loaded model that answers."""

    def rows(self) -> Batch | None: ...


class Generation:
    """One answer under way: iterate over its pieces, `close` to end it early. finish_reason is known at the end.

    request: with max_new_tokens as a number. Pieces are whole characters and never part of a stop text. Closing the iterator, or
    Ctrl-C while waiting, ends the worker within one step; its errors are raised here.
    """

    def __init__(self, model: AnsweringModel, inputs: Inputs, request: GenerateRequest) -> None:
        self.request = fitted(model, inputs, request)
        self._model, self._inputs = model, inputs
        self._stop = threading.Event()
        end_ids = {*end_token_ids(model.hf_model), *request.stop_token_ids}
        logprobs = None if request.logprobs is None else Logprobs(request.logprobs)
        self._stream = _Stream(AnswerText(detokenizer_of(model, request.stop), end_ids), self._stop, logprobs=logprobs)
        self._thread: threading.Thread | None = None
        self.cached_tokens = 0

    @property
    def finish_reason(self) -> Finish:
        if self._stream.text.is_over:
            return "stop"
        return "cancelled" if self._stop.is_set() else "length"

    def __iter__(self) -> Iterator[Piece]:
        self._thread = threading.Thread(target=self._run, name="trimtab-generate", daemon=True)
        self._thread.start()
        try:
            while (item := self._stream.queue.get()) is not None:
                if isinstance(item, BaseException):
                    raise item
                yield item
            self._thread.join()
        finally:
            self.close()

    def close(self) -> None:
        """End the worker within one step and wait for it."""
        thread, self._thread = self._thread, None
        if thread is not None and thread.is_alive():
            self._stop.set()
            thread.join()

    def _run(self) -> None:
        try:
            rows = self._model.rows()
            if rows is not None:
                self._run_rows(rows)
                return
            sequence.reset_offset(self._model.hf_model)
            stock_generate(
                self._model.hf_model, dict(self._inputs.tensors), self.request, streamer=self._stream,
                is_over=self._stream.is_over, prefill_chunk_tokens=self._chunk(), device=self._model.device,
                adapter=self._model.adapter_store.selection.name, logprobs=self._stream.logprobs,
                kv=self._model.plan.request.kv,
            )  # fmt: skip
        except BaseException as exc:  # raised in the consumer's thread
            self._stream.queue.put(exc)
        finally:
            self._stream.queue.put(None)

    def _run_rows(self, batch: Batch) -> None:
        """Answer as the only row of a batch: its steps are captured, transformers' generation is not."""
        adapter = self._model.adapter_store.selection.name
        prompt = batch.begin(self._inputs, self.request, adapter=adapter, top_logprobs=self.request.logprobs)
        while not prompt.step():
            if self._stream.is_over():
                return
        try:
            first = batch.join(prompt)
            self.cached_tokens = first.row.cached_tokens
            self._stream.take(first.token_id, logprobs_of(first))
            while first.row.finish is None and not self._stream.is_over():
                for sampled in batch.step():
                    self._stream.take(sampled.token_id, logprobs_of(sampled))
                if first.row.error is not None:
                    raise first.row.error
            self._stream.end()
        finally:  # a row that was placed and has no first token, for want of memory, too
            for row in [*batch.active, *batch.placed]:
                batch.leave(row)

    def _chunk(self) -> int | None:
        """Return the prompt's piece size, None for one piece: an image or audio clip has to be in one with its tokens."""
        chunk = self._model.prefill_tokens
        is_whole = not chunk or self._inputs.has_media or self._inputs.prompt_tokens <= chunk
        return None if is_whole else chunk


def logprobs_of(sampled: SampledToken) -> tuple[TokenLogprob, ...]:
    """Return a batch's log-probabilities of a token, in an answer's form."""
    return () if sampled.logprob is None else (TokenLogprob(sampled.token_id, sampled.logprob, sampled.top),)


def detokenizer_of(model: ChatModel, stop: Sequence[str]) -> Detokenizer | None:
    """Return a detokenizer; a checkpoint without tokenizer answers token ids, and cannot watch for stop texts."""
    try:
        processor = model.processor
    except CheckpointError:
        if stop:
            raise
        return None
    return Detokenizer(tokenizer_of(processor), stop)


def generate(model: AnsweringModel, inputs: Inputs, request: GenerateRequest) -> Iterator[Piece]:
    """Yield the answer in pieces. Errors: RequestError if prompt and answer exceed the context, before any work."""
    return iter(Generation(model, inputs, request))


class Timed:
    """One answer in pieces, with its timings: iterate over it, then read `answer`.

    Closing the iterator early ends the answer; `answer` then has the text so far.
    """

    def __init__(self, model: AnsweringModel, inputs: Inputs, request: GenerateRequest) -> None:
        self._generation = Generation(model, inputs, request)
        self._so_far, self._end = AnswerSoFar(inputs.prompt_tokens, 0.0), 0.0

    def __iter__(self) -> Iterator[Piece]:
        self._end = now = time.perf_counter()
        self._so_far = AnswerSoFar(self._so_far.prompt_tokens, now, now)
        try:
            with closing(iter(self._generation)) as pieces:  # type: ignore[type-var]
                for piece in pieces:
                    self._so_far.take(piece)
                    yield piece
        finally:
            self._end = time.perf_counter()

    @property
    def answer(self) -> Answer:
        """The answer so far."""
        generation = self._generation
        return self._so_far.answer(
            generation.finish_reason, self._end, cached_tokens=generation.cached_tokens,
            max_new_tokens=generation.request.answer_tokens,
        )  # fmt: skip


def texts(answer: Iterable[Piece], within: AbstractContextManager[None]) -> Iterator[str]:
    """Yield the texts of an answer's pieces. within: entered while they are made. Closing the iterator ends the answer."""
    with within, closing(iter(answer)) as pieces:  # type: ignore[type-var]
        yield from filter(None, (piece.text for piece in pieces))


def generate_text(model: AnsweringModel, inputs: Inputs, request: GenerateRequest) -> Answer:
    """Return the whole answer with its timings."""
    timed = Timed(model, inputs, request)
    for _ in timed:
        pass
    return timed.answer


def logits(model: BatchModel, inputs: Inputs) -> Tensor:
    """Return teacher-forced logits of the whole prompt: [S, V] float32 on the CPU."""
    logits_of_prompt: Tensor = whole_pass(model, inputs).logits
    return logits_of_prompt[0].float().cpu()


class _Over(transformers.StoppingCriteria):  # type: ignore[misc]
    def __init__(self, is_over: Callable[[], bool]) -> None:
        self.is_over = is_over

    def __call__(self, input_ids: Tensor, scores: object, **kwargs: object) -> Tensor:
        return torch.full((input_ids.shape[0],), self.is_over(), device=input_ids.device, dtype=torch.bool)


class _Numbers(transformers.LogitsProcessor):  # type: ignore[misc]
    """Leaves the logits as they are, and raises DeviceError where they are NaN or infinite."""

    def __init__(self, adapter: str | None) -> None:
        self.adapter = adapter

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        check_logits(scores, adapter=self.adapter)
        return scores


class Logprobs(transformers.LogitsProcessor):  # type: ignore[misc]
    """Keeps each step's log-probabilities, before penalties, temperature and cuts, until the step's token is known.

    count: how many of the most likely tokens are reported with it.
    """

    def __init__(self, count: int) -> None:
        self.count = count
        self._steps: deque[Tensor] = deque()  # [V] each; transformers 5.23 has one step more under way

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        self._steps.append(torch.log_softmax(scores[0].float(), dim=-1))
        return scores

    def take(self, token: int) -> tuple[float, tuple[tuple[int, float], ...]]:
        """Return the log-probability of the next step's token, and the most likely (token, log-probability)."""
        logprobs = self._steps.popleft()
        values, ids = logprobs.topk(self.count)
        return float(logprobs[token]), tuple(zip(ids.tolist(), values.tolist(), strict=True))


def stock_generate(
    model: HFModel, tensors: dict[str, Tensor], request: GenerateRequest, *, streamer: object, is_over: Callable[[], bool],
    prefill_chunk_tokens: int | None, device: torch.device, adapter: str | None = None, logprobs: Logprobs | None = None,
    kv: str = "full",
) -> None:  # fmt: skip
    """Run transformers' own generation; tokens go to streamer.put, one row each step.

    Only the request decides how tokens are drawn: of the checkpoint's generation_config suppressed tokens count, sampling values
    do not.
    adapter: the name in an error of the logits. logprobs: receives each step's logits. kv: the form of keys and
    values, "full" or "int8". Errors: DeviceError for logits that are not numbers.
    """
    own = model.generation_config
    text = model.config.get_text_config()
    ends = end_token_ids(model)
    pad = getattr(own, "pad_token_id", None)
    pad = pad if pad is not None else getattr(text, "pad_token_id", None)
    # Neutral values, not None: None is filled in from the model's own generation config.
    options: dict[str, object] = {"do_sample": False}
    if request.temperature > 0:
        options = {
            "do_sample": True, "temperature": float(request.temperature), "top_k": request.top_k or 0,
            "top_p": request.top_p if request.top_p is not None else 1.0,
        }  # fmt: skip
        if request.min_p is not None:
            options["min_p"] = request.min_p
    cache = {"past_key_values": kv_cache.prompt_cache(model, kv)} if kv == "int8" else {}
    if prefill_chunk_tokens is not None:
        options["prefill_chunk_size"] = prefill_chunk_tokens
    config = transformers.GenerationConfig(
        max_new_tokens=request.answer_tokens, eos_token_id=[*ends, *request.stop_token_ids] or None,
        pad_token_id=pad if pad is not None else (ends[0] if ends else 0), bos_token_id=getattr(own, "bos_token_id", None),
        **options,
    )  # fmt: skip
    devices = [device] if device.type == "cuda" else []
    in_chunks = nullcontext() if prefill_chunk_tokens is None else text_of(model, tensors["input_ids"].shape[-1])
    with torch.random.fork_rng(devices=devices, enabled=request.temperature > 0), torch.no_grad(), in_chunks:
        if request.temperature > 0:
            if request.seed is not None:
                torch.manual_seed(request.seed)
            else:
                torch.seed()
        # In the order of `Sampler`: these processors run before temperature and cuts.
        repeats = request.repetition_penalty
        penalty = None if repeats is None else transformers.RepetitionPenaltyLogitsProcessor(penalty=repeats)
        suppressed = Suppressed(*sequence.suppressed_ids(model, device))
        processors = [_Numbers(adapter), logprobs, penalty, AnswerPenalties.of(request), suppressed]
        model.generation_config = transformers.GenerationConfig()  # nothing of the file's may be filled in
        try:
            model.generate(
                **tensors, **cache, generation_config=config, streamer=streamer,
                logits_processor=transformers.LogitsProcessorList(filter(None, processors)),
                stopping_criteria=transformers.StoppingCriteriaList([_Over(is_over)]),
            )  # fmt: skip
        finally:
            model.generation_config = own
