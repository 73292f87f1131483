"""How does `LoadedModel.batch` decode many prompts together, each with its own adapter, media and options?"""

from __future__ import annotations

import gc
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from trimtab.checkpoint.names import near_names
from trimtab.engine.batch.generate import Answer, AnswerSoFar, AnswerText, Finish, Piece, detokenizer_of, generate_text, logprobs_of
from trimtab.engine.decode import batch_invariant, decode_step
from trimtab.engine.kv.sequence import Inputs
from trimtab.engine.memory.out_of_memory import is_out_of_memory
from trimtab.errors import RequestError, TrimtabError
from trimtab.request import GenerateRequest, check_choice

if TYPE_CHECKING:
    from trimtab.engine.batch.batch import Batch
    from trimtab.engine.batch.request import Prompt, Row, SampledToken
    from trimtab.engine.calls.asked_model import AskedModel, Chosen

QUESTION = ("prompt", "image", "audio", "system", "adapter", "template_kwargs")
OPTIONS = tuple(item.name for item in fields(GenerateRequest))
T = TypeVar("T")
ON_ERROR = ("raise", "return")
# Prompts that are begun before the first of them is computed: as many as one pass takes.
MOST_BEGUN = 16


@dataclass(frozen=True, eq=False)
class _Flight:
    """One prompt that has a row."""

    index: int
    text: AnswerText
    so_far: AnswerSoFar
    max_new_tokens: int

    def take(self, sampled: SampledToken) -> None:
        text = self.text.take(sampled.token_id)
        self.so_far.take(Piece(text, (sampled.token_id,), logprobs_of(sampled)))

    def answer(self, finish: str | None) -> Answer:
        self.so_far.texts.append(self.text.end())
        ended: Finish = "stop" if finish == "stop" or self.text.is_over else "length"
        return self.so_far.answer(ended, time.perf_counter(), max_new_tokens=self.max_new_tokens)


def answers(
    model: AskedModel, requests: Iterable[object], *, rows: int | None, errors: str, options: Mapping[str, object], group: str = ""
) -> Iterator[tuple[int, Any]]:
    """Yield (index, answer) as answers are finished. Arguments and errors: as `LoadedModel.batch`. group: where all requests have
    one prompt, media and adapter, a name for them: the prompt is computed once. A family with other states than keys and values by
    position is answered one prompt after the other."""
    check_choice(errors, ON_ERROR, field_name="errors")
    rows = model.plan.request.batch if rows is None else rows
    if rows < 1:
        raise RequestError("a batch has at least one row", field="rows", value=rows)
    batch_invariant.check_rows(model, rows)
    if isinstance(requests, (str, Mapping)):
        raise RequestError("is one request; give a list of requests", field="requests", value=type(requests).__name__)
    prepared = (_prepared(model, index, one, options) for index, one in enumerate(requests))
    run = _one_by_one if model.anatomy.capture_unsupported or decode_step.wrong_rows(model) else _together
    return run(model, prepared, rows, _raised if errors == "raise" else _returned, group)


def _raised(error: TrimtabError) -> TrimtabError:
    raise error


def _returned(error: TrimtabError) -> TrimtabError:
    return error.with_traceback(None)  # its frames know the batch, whose memory would stay as long as the caller keeps the error


_OnError = Callable[[TrimtabError], TrimtabError]
_Question = Callable[[], "tuple[Inputs, GenerateRequest, Chosen]"]
_Prepared = tuple[int, _Question]


def _prepared(model: AskedModel, index: int, request: object, options: Mapping[str, object]) -> _Prepared:
    def question() -> tuple[Inputs, GenerateRequest, Chosen]:
        values = {"prompt": request} if isinstance(request, (str, list, tuple)) else request
        if not isinstance(values, Mapping) or "prompt" not in values:
            raise RequestError("a request is a prompt or a mapping with one", field=f"requests[{index}]")
        for name in values:
            if name not in QUESTION and name not in OPTIONS:
                known = (*QUESTION, *OPTIONS)
                near = near_names(str(name), known)
                raise RequestError("unknown key", field=f"requests[{index}].{name}", allowed=known, near=near)
        inputs, answering, adapter = model.question(values["prompt"], {**options, **values})
        return inputs, answering, adapter

    return index, question


def _one_by_one(
    model: AskedModel, prepared: Iterator[_Prepared], rows: int, on_error: _OnError, group: str
) -> Iterator[tuple[int, Answer | TrimtabError]]:
    for index, question in prepared:
        try:
            inputs, request, adapter = question()
            with model.answering(adapter):
                answer: Answer | TrimtabError = generate_text(model, inputs, request)
        except RequestError as exc:
            answer = on_error(exc)
        yield index, answer


def _together(
    model: AskedModel, prepared: Iterator[_Prepared], rows: int, on_error: _OnError, group: str
) -> Iterator[tuple[int, Answer | TrimtabError]]:
    with model.answering(None):
        batch = model.rows() if rows == 1 or model.plan.request.batch_invariant else None
        is_own = batch is None
        is_over = False
        if batch is None:
            batch = model.kept.take(model, rows)
        flights: dict[Row, _Flight] = {}
        waiting: _Prepared | None = None
        begun: deque[_Begun] = deque()  # prompts that are not computed yet
        ready: list[_Begun] = []
        failed: tuple[int, RequestError] | None = None
        try:
            waiting = next(prepared, None)
            while waiting is not None or begun or flights:
                while (waiting is not None or begun) and batch.free_rows:
                    while waiting is not None and len(begun) < _most_begun(batch, begun):
                        (index, question), waiting = waiting, next(prepared, None)
                        try:
                            begun.append(_begin(model, batch, index, question, group, begun))
                        except RequestError as exc:
                            yield index, on_error(exc)
                    ready = _with_room(batch, begun)
                    if not ready:
                        break  # until an answer ends
                    for failed in _go_on(model, batch, begun, ready, flights):
                        yield failed[0], on_error(failed[1])
                yield from _leave(batch, flights, on_error)  # a first token may have met a stop text
                for sampled in batch.step() if flights else ():
                    flights[sampled.row].take(sampled)
                yield from _leave(batch, flights, on_error)
            is_over = True
        finally:
            while begun:
                batch.pages.forget(begun.popleft().prompt.row)
            for row in [*batch.active, *batch.placed]:
                batch.leave(row)
            if is_own and not (is_over and model.kept.keep(model, batch)):
                # The plan counts one batch: this one's keys and values go before another is made.
                del batch
                ready, failed = [], None  # they know the batch
                gc.collect()  # a batch and its steps know each other
                if model.device.type == "cuda":
                    torch.cuda.empty_cache()


def _leave(batch: Batch, flights: dict[Row, _Flight], on_error: _OnError) -> Iterator[tuple[int, Answer | TrimtabError]]:
    """Yield the answers that are over. Their rows leave first."""
    for row in [row for row, flight in flights.items() if row.finish is not None or flight.text.is_over]:
        batch.leave(row)
        flight = flights.pop(row)
        if row.error is not None and not isinstance(row.error, RequestError):
            raise row.error
        yield flight.index, flight.answer(row.finish) if row.error is None else on_error(row.error)


@dataclass(frozen=True, eq=False)
class _Begun:
    """A prompt that has its inputs and its adapter, and no row yet. start: when it began, seconds."""

    index: int
    prompt: Prompt
    start: float


def _begin(
    model: AskedModel, batch: Batch, index: int, question: _Question, group: str, begun: Iterable[_Begun]
) -> _Begun:  # fmt: skip
    inputs, request, adapter = question()
    start = time.perf_counter()
    used = {row.adapter for row in batch.active} | {one.prompt.row.adapter for one in begun}
    name = model.adapter_name(adapter, used)
    prompt = batch.begin(inputs, request, adapter=name, top_logprobs=request.logprobs, group=group)
    return _Begun(index, prompt, start)


def _most_begun(batch: Batch, begun: Sequence[_Begun]) -> int:
    """Return how many prompts are begun before the first of them is computed: one whose images or audio are on the device runs
    alone, and so do all where prompts cannot be joined."""
    if batch.prompts.packs.why_not() is not None or any(one.prompt.inputs.has_media for one in begun):
        return 1
    return min(MOST_BEGUN, batch.free_rows)


def _with_room(batch: Batch, begun: Iterable[_Begun]) -> list[_Begun]:
    """Return the first prompts whose keys and values find room, and keep it for them."""
    found = []
    for one in begun:
        if not batch.pages.has_room(one.prompt.row):
            break
        batch.pages.reserve(one.prompt.row)
        found.append(one)
    return found


def _through(batch: Batch, ready: Sequence[_Begun]) -> list[_Begun]:
    """Compute prompts, the first among them, several at once where that is faster, and return them in the order in which they join.
    Errors: of the first prompt."""
    by_prompt = {id(one.prompt): one for one in ready}
    try:
        together, _ = batch.place_together([one.prompt for one in ready]) if len(ready) > 1 else ([], 0)
    except Exception as exc:  # computing each alone shows the failed one, and takes less memory too
        if not isinstance(exc, TrimtabError) and not is_out_of_memory(exc):
            raise
        together = []
    if together:
        return [by_prompt[id(prompt)] for prompt in together]
    ready[0].prompt.compute()
    return [ready[0]]


def _go_on(
    model: AskedModel, batch: Batch, begun: deque[_Begun], ready: Sequence[_Begun], flights: dict[Row, _Flight]
) -> Iterator[tuple[int, RequestError]]:
    """Compute prompts, the first among them, and give them their rows. Yield those that could not have one, and why."""
    try:
        through = _through(batch, ready)
    except RequestError as exc:
        begun.remove(ready[0])
        yield ready[0].index, exc
        return
    for one in through:
        begun.remove(one)
        try:
            _join(model, batch, one, flights)
        except RequestError as exc:
            yield one.index, exc


def _join(model: AskedModel, batch: Batch, one: _Begun, flights: dict[Row, _Flight]) -> None:
    request = one.prompt.row.request
    detokenizer = detokenizer_of(model, request.stop)
    sampled = batch.join(one.prompt)
    text = AnswerText(detokenizer, batch.ends | set(request.stop_token_ids))
    flight = _Flight(one.index, text, AnswerSoFar(one.prompt.inputs.prompt_tokens, one.start), request.answer_tokens)
    flights[sampled.row] = flight
    flight.take(sampled)


def in_order(pairs: Iterator[tuple[int, T]]) -> Iterator[T]:
    """Yield answers by index: one that is finished early waits for those before it."""
    waiting: dict[int, T] = {}
    following = 0
    for index, answer in pairs:
        waiting[index] = answer
        while following in waiting:
            yield waiting.pop(following)
            following += 1
