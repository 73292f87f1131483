"""How do jobs become rows of a batch, and tokens the text that clients receive?"""

from __future__ import annotations

import json
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import cached_property
from typing import Any

import torch

from trimtab.adapter_names import parts_of
from trimtab.engine.batch.batch import Batch
from trimtab.engine.batch.generate import AnswerText, Detokenizer, TokenTexts
from trimtab.engine.batch.request import Row, SampledToken, Sampler
from trimtab.engine.calls.embedding import Embedding, PromptScores
from trimtab.engine.kv.sequence import Inputs
from trimtab.engine.lora.store import HeldAdapter
from trimtab.engine.model import LoadedModel
from trimtab.engine.prefill.rows import returns_states
from trimtab.errors import RequestError
from trimtab.planning.memory.activations import passing_tokens
from trimtab.request import GenerateRequest
from trimtab.serve.adapters.adapter_cache import AdapterCache
from trimtab.serve.api.client_errors import for_client
from trimtab.serve.contract.job import Event, Job, finite_logprob
from trimtab.serve.contract.log import write_traceback
from trimtab.serve.scheduling.in_progress import TOWERS
from trimtab.serve.scheduling.scheduler import error_event
from trimtab.serve.worker.answer import Answer, error_of, is_chat, named
from trimtab.serve.worker.ipc import Pulse
from trimtab.serve.worker.prompt_inputs import Compiled, PromptInputs

MOST_TIMED = 64  # chunks whose times are not known yet, or not taken


class LoadedEngine:
    """The scheduler's engine on a loaded model. rows: requests decoded together. prompt_limit: the most tokens of a
    prompt (None: the context). audio_s: as for `PromptInputs`. held, lost: as for `AdapterCache`. pulse: announces long work.
    is_unprepared: whether the adapter of this name is still being prepared between steps."""

    def __init__(
        self, model: LoadedModel, *, rows: int, kept: Iterable[str] = (), resident_limit: int | None = None,
        prompt_limit: int | None = None, audio_s: float | None = None, held: Mapping[str, HeldAdapter] | None = None,
        lost: Mapping[str, str] | None = None, pulse: Pulse | None = None,
        is_unprepared: Callable[[str], bool] = lambda name: False,
    ) -> None:  # fmt: skip
        self.model, self.rows, self.prompt_limit = model, rows, prompt_limit
        model.forget_batch()
        self.batch = Batch(model, rows)
        self.shelf = AdapterCache(model, kept=kept, resident_limit=resident_limit, held=held, lost=lost)
        self.inputs = PromptInputs(model, ends=self.batch.ends, audio_s=audio_s)
        self.prepare, self.compile_ahead = self.inputs.prepare, self.inputs.compile_ahead
        self._by_row: dict[Row, Answer] = {}
        # Answers whose prompts or pieces are computed now or soon: their adapters stay on the model.
        self._begun: list[Answer] = []
        self._times = ChunkTimes(model.device)
        self.pulse, self._is_unprepared = Pulse(lambda message: None) if pulse is None else pulse, is_unprepared

    def capture(self) -> None:
        """Capture the graphs of first requests; `capture_more` captures the rest.

        Errors: DeviceError, also for a family without rows; CheckpointError without a tokenizer that can be used.
        """
        self.batch.check_rows()
        reading = self.inputs.read_vocabulary()
        with self.model._out_of_memory_named("capturing the first steps"):
            self.batch.captures_ahead.prepare(self.shelf.held, first=True)
        reading.join()
        self.inputs.learn_media()

    @property
    def has_more_to_capture(self) -> bool:
        return bool(self.batch.captures_ahead.left)

    def capture_more(self) -> None:
        """Capture one more graph, or a few of one form, while no request runs. Errors: DeviceError."""
        with self.model._out_of_memory_named("capturing a step"):
            self.batch.captures_ahead.prepare_more(self.shelf.held)

    # Scheduler interface ----------------------------------------------------------------------------------------------

    def begin(self, job: Job, prepared: Inputs | Compiled | None = None) -> Answer:
        """Check a job and return its answer. Errors: RequestError and those of `prompt.prepare`; MistakeError."""
        with self._named("preparing a prompt"), self.pulse.work("preparing a prompt"):
            try:
                given = self.inputs.make(job) if prepared is None else prepared
                if not isinstance(given, Compiled):
                    given = self.inputs.compiled(job, given) if job.kind == "answer" else Compiled(given)
                return self._begin(job, given)
            except RequestError as exc:
                raise for_client(exc, job) from exc

    def _begin(self, job: Job, compiled: Compiled) -> Answer:
        inputs, reading = compiled.inputs, compiled.reading
        self.shelf.check(job.adapter)
        if job.kind in ("tokens", "text"):
            return told_at_once(self.inputs, self.model, job, list(inputs.token_ids))
        if self.prompt_limit is not None and inputs.prompt_tokens > self.prompt_limit:
            raise RequestError(
                f"the prompt has {inputs.prompt_tokens} tokens, this server takes {self.prompt_limit}", field="prompt"
            )
        if job.kind == "embedding":
            embedding = Embedding(self.model, inputs, adapter=job.adapter, pooling=job.pooling, batch=self.batch)
            row = embedding.prompt.row if embedding.prompt else empty_row(self.model, job.adapter, job.request)
            return Answer(job, embedding.prompt, row, None, time.monotonic(), embedding=embedding)
        if job.fills_context:
            left = self.model.context_tokens - inputs.prompt_tokens
            request = replace(job.request, max_new_tokens=None).within(left, most_tokens=job.request.answer_tokens)
            job = replace(job, request=request)
        assert reading is not None
        scores = None
        if job.prompt_logprobs is not None:
            scores = PromptScores(self.model, inputs, adapter=job.adapter, top=job.prompt_logprobs)
        # Tokens are copied with their chunk: a separate copy would wait for the device.
        if inputs.has_media:
            inputs = inputs.to(self.model.device)
        prompt = self.batch.begin(
            inputs, compiled.ended(job.request), top_logprobs=job.top_logprobs, constraint=compiled.constraint, client=job.client,
            group=job.group, may_end_in_step=True, returns_states=scores is not None and returns_states(self.batch, inputs),
        )  # fmt: skip
        prompt.row.use_adapter(job.adapter)  # it may stay in host memory until its turn
        # The client has the text that an answer continues.
        before = inputs.token_ids if job.continue_final_message or not is_chat(job) else ()
        hidden = self.inputs.hidden_ids(reading.shown)
        detokenizer = Detokenizer(self.inputs.tokenizer, job.request.stop, hidden=hidden, before=before)
        text = AnswerText(detokenizer, self.batch.ends.union(compiled.ends))
        return Answer(job, prompt, prompt.row, text, time.monotonic(), reading=reading, scores=scores)

    def is_prepared(self, adapter: str | None) -> bool:
        """Whether each part of an adapter is on the model or completely prepared."""
        return all(not self._is_unprepared(name) or self.shelf.is_resident(name) for name in parts_of(adapter))

    def is_ready(self, adapter: str | None) -> bool:
        return self.shelf.has_room_for(adapter, self._in_use())

    def has_room(self, answer: Answer) -> bool:
        if answer.prompt is None or (answer.needs_no_row and answer.embedding is None):
            return True
        is_taken = not self._may_have_row(answer) or any(one.is_for_row for one in self._begun)
        return not (answer.needs_no_row and is_taken) and self.batch.pages.has_room(answer.row)

    def _may_have_row(self, answer: Answer) -> bool:
        """Whether no other answer has the row of prompts, which is a row of the batch where that has one alone."""
        has_row = self.batch.cache.has_prompt_row or self.batch.free_rows == self.rows
        return has_row and not any(one is not answer and one.is_in_row for one in self._begun)

    def _in_use(self) -> list[str | None]:
        """Return the keys that rows and prompts in progress use."""
        rows = (*self.batch.active, *self.batch.placed, *(answer.row for answer in self._begun))
        return [row.adapter for row in rows]

    @property
    def chunk_sizes(self) -> tuple[int, ...]:
        """Chunk sizes in tokens; empty for any size."""
        prompts = self.batch.prompts
        return prompts.sizes if prompts.may_be_cut else prompts.sizes[-1:]

    def chunk_times(self) -> Iterable[tuple[int, float]]:
        return self._times.take()

    def choose(self, answer: Answer) -> None:
        """Load an answer's adapter onto the model, where it stays until the prompt is complete. Errors: as `prefill`."""
        with self._named("reading a prompt"), self.pulse.work("an adapter's turn"):
            self._begin_adapter(answer)
            if answer.prompt is not None and (answer.embedding or not answer.needs_no_row):
                self.batch.pages.reserve(answer.row)

    @property
    def beside_tokens(self) -> int:
        return passing_tokens(self.model.context_tokens, is_chunked=bool(self.model.plan.execution.prompt.chunks))

    @property
    def interleaves(self) -> bool:
        """Whether each prompt has separate keys and values, in host memory. Captured chunks write into one row of the
        batch, and batch-invariant prompts are computed one at a time."""
        return self.model.device.type == "cpu" and not self.batch.prompts.is_on and not self.batch.is_invariant

    def passing_tokens(self, answer: Answer) -> int:
        if answer.work is not None:
            return answer.work.prompt_tokens
        if not self.interleaves or answer.prompt is None or answer.prompt.inputs.has_media:
            return 0
        return answer.prompt.inputs.prompt_tokens

    release, spent, kept_tokens = staticmethod(Answer.release), staticmethod(Answer.spent), staticmethod(Answer.kept_tokens)

    def goes_alone(self, answer: Answer) -> bool:
        if answer.prompt is None or answer.is_complete or not self.batch.prompts.is_on:
            return True
        try:
            return not self.batch.prompts.packs.has_place(answer.prompt)
        except Exception as exc:
            # After a step, the error would end another row; it is reported where the prompt is computed.
            write_traceback(exc, "choosing a prompt")
            return True

    def prefill_together(self, candidates: Sequence[Answer], most_tokens: int) -> tuple[int, list[Answer]]:
        """Compute several prompts in one pass, each with its adapter, if that is faster (`packing.PackedPrefill`). Complete
        prompts get their rows.

        Errors: as `prefill`; then nothing has changed.
        """
        able: list[Answer] = []
        for answer in candidates:
            if answer.prompt is not None and not answer.is_complete:
                able.append(answer)
            elif not able:
                return 0, []
        by_prompt = {id(answer.prompt): answer for answer in able}
        with self._named("reading prompts"), self.pulse.work("prompts", most_tokens):
            self._times.begin()
            through, tokens = self.batch.place_together([one.prompt for one in able if one.prompt is not None], most_tokens)
            if through and self.batch.prompts.is_steady:
                self._times.end(tokens)
        complete = [by_prompt[id(prompt)] for prompt in through]
        for answer in complete:
            self._begun.remove(answer)
        return tokens, complete

    def prefill(self, answer: Answer, most_tokens: int) -> tuple[int, bool]:
        """Compute the next chunk of the prompt. A complete prompt gets its row.

        Errors: DeviceError if memory runs out. MistakeError for any other failure that leaves the device usable: it ends this one.
        """
        if any(one.is_for_row for one in self._begun) and not answer.is_in_row:
            return 0, False
        kind = "towers" if answer.needs_towers else "a prompt"
        with self._named("reading a prompt", answer.job), self.pulse.work(kind, answer.next_tokens(most_tokens)):
            self._begin_adapter(answer)
            assert answer.prompt is not None
            if answer.scores and not answer.scores.done_tokens and not returns_states(self.batch, answer.prompt.inputs):
                answer.prompt.forgo_states()
            if answer.work is not None:
                return run_chunk(answer, most_tokens, self.batch, self._token_texts)[0], False
            has_towers = answer.prompt.needs_towers
            self._times.begin()
            is_through = answer.prompt.step(most_tokens)
            if has_towers and not is_through and not answer.prompt.chunk_tokens:
                self._times.end(TOWERS)
                return TOWERS, False
            if answer.scores is not None:
                start = answer.scores.done_tokens
                answer.scores.read(answer.prompt)
                answer.pending.append(scored_event(answer.job.id, start, answer.scores.take(), self._token_texts))
                if is_through:
                    answer.end_scores(is_again=False)
            elif answer.prompt.source is None and self.batch.prompts.is_steady and not has_towers:
                self._times.end(answer.prompt.chunk_tokens)
            if is_through:
                self.batch.place(answer.prompt)
        if is_through:
            self._begun.remove(answer)
        return answer.prompt.chunk_tokens, is_through

    def reload(self, name: str, adapter: Any) -> bool:
        """Use an adapter's new files from the next answer on; return whether they differ. Errors: DoesNotFitError."""
        return self.shelf.replace(name, adapter, self._in_use())

    def _begin_adapter(self, answer: Answer) -> None:
        """Load an answer's adapter onto the model. The answer keeps this adapter, even if its name later means another."""
        if answer.is_begun:
            return
        key = self.shelf.bring(answer.job.adapter, self._in_use())
        answer.begin(key)
        self._begun.append(answer)

    def arrive(self, answer: Answer) -> None:
        """Give an answer with a computed prompt its row and its first token, which the next step samples if it computes
        the prompt's last token. Errors: as `prefill`."""
        assert answer.prompt is not None
        sampled = None
        with self._named("reading a prompt"):
            if answer.is_open:
                self.batch.enter(answer.prompt)
            else:
                sampled = self.batch.join(answer.prompt)
        answer.end_prompt()
        self._by_row[answer.row] = answer
        if sampled is not None:
            self._told(answer, sampled)

    def piece(self, answer: Answer, most_tokens: int) -> tuple[int, bool]:
        """Compute the next piece of an embedding, or of a prompt's log-probabilities, and wait for it, because others
        wait for it too; (0, False) as long as another has the row that it needs. Errors: as `prefill`."""
        if answer.is_for_row and not self._may_have_row(answer):
            return 0, False
        with self._named("reading a prompt", answer.job), self.pulse.work("a piece", answer.next_tokens(most_tokens)):
            self._begin_adapter(answer)
            return run_chunk(answer, most_tokens, self.batch, self._token_texts)

    @cached_property
    def _token_texts(self) -> TokenTexts:
        return TokenTexts(self.inputs.tokenizer)

    def _named(self, what: str, job: Job | None = None) -> AbstractContextManager[None]:
        return named(what, self.model.device, job)

    def step(self, behind: Callable[[], bool] | None = None) -> None:
        with self._named("answering"), self.pulse.work("steps"):
            tokens = self.batch.step(behind)
        for sampled in tokens:
            self._told(self._by_row[sampled.row], sampled)
        for row, answer in self._by_row.items():
            if row.error is not None and not answer.is_over:
                self._break(answer, row.error)

    def _told(self, answer: Answer, sampled: SampledToken) -> None:
        try:
            answer.take(sampled, self.model, self.batch.ends, self._token_texts)
        except BaseException as exc:
            self._break(answer, exc)

    def _break(self, answer: Answer, exc: BaseException) -> None:
        """End one answer with an error. The others continue."""
        answer.end(error_event(answer.job.id, error_of(exc, "answering", self.model.device)))

    def news(self, answer: Answer) -> Sequence[Event]:
        return answer.news()

    def drop(self, answer: Answer) -> None:
        if answer in self._begun:
            self._begun.remove(answer)
        if answer.prompt is not None:
            self.batch.prompts.release(answer.prompt)
        answer.end_prompt()
        if answer.row.number < 0:
            self.batch.pages.forget(answer.row)
        if answer.row in self.batch.placed:
            self.batch.leave(answer.row)
        if answer.row in self._by_row:
            del self._by_row[answer.row]
            self.batch.leave(answer.row)


def empty_row(model: LoadedModel, adapter: str | None, request: GenerateRequest) -> Row:
    """Return a row outside any batch, for a job that samples no tokens."""
    return Row(adapter, request, [], 0, sampler=Sampler(request, model.device))


def told_at_once(inputs: PromptInputs, model: LoadedModel, job: Job, ids: Sequence[int]) -> Answer:
    """Return the answer of a job that needs only the tokenizer: it ends without a row."""
    answer = Answer(job, None, empty_row(model, job.adapter, job.request), None, time.monotonic(), is_over=True)
    if job.kind == "text":
        result: dict[str, Any] = {"prompt": str(inputs.tokenizer.decode(ids))}
    else:
        result = {"tokens": ids, "token_strs": inputs.tokenizer.convert_ids_to_tokens(ids)}
    usage = {"prompt_tokens": len(ids), "completion_tokens": 0}
    answer.pending.append(Event(job.id, "done", finish="stop", usage=usage, result=result))
    return answer


class ChunkTimes:
    """Device times of prompt chunks, known after they have run, without waiting.

    The caller omits three kinds of chunks, because their times do not predict the next one of the same size: chunks whose graph
    had to be captured, chunks that ran kernel by kernel where others are captured, and chunks with images or audio, which include
    their towers.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._begun: Any = None
        self._waiting: deque[tuple[int, Any, Any]] = deque(maxlen=MOST_TIMED)
        self._known: deque[tuple[int, float]] = deque(maxlen=MOST_TIMED)

    def _mark(self) -> Any:
        if self._device.type != "cuda":
            return time.perf_counter()
        return torch.cuda.current_stream(self._device).record_event(torch.cuda.Event(enable_timing=True))

    def begin(self) -> None:
        """A chunk begins now, behind all that was queued before."""
        self._begun = self._mark()

    def end(self, size: int) -> None:
        """It ends here; size: in tokens, padding included."""
        end = self._mark()
        if self._device.type == "cuda":
            self._waiting.append((size, self._begun, end))
        else:
            self._known.append((size, end - self._begun))

    def take(self) -> Iterator[tuple[int, float]]:
        """Yield the size and the seconds of every chunk that has ended since."""
        while self._known:
            yield self._known.popleft()
        while self._waiting and self._waiting[0][2].query():
            size, begin, end = self._waiting.popleft()
            yield size, begin.elapsed_time(end) / 1000


def run_chunk(answer: Answer, most_tokens: int, batch: Batch, texts: TokenTexts) -> tuple[int, bool]:
    """Compute the next chunk and wait for it. Return its tokens, and True when it was the last. Errors: those of the model."""
    work = answer.work
    assert work is not None
    before = work.done_tokens
    if isinstance(work, Embedding):
        # Kernels that a GPU is given one by one take as long for few tokens as for many. Batch-invariant ones ignore the load.
        is_whole = batch.model.device.type == "cuda" or batch.is_invariant
        is_over = work.step(None if is_whole else most_tokens)
        if is_over:
            usage = {"prompt_tokens": work.prompt_tokens, "completion_tokens": 0}
            answer.end_embedding(Event(answer.job.id, "done", finish="stop", usage=usage, result={"embedding": work.unit.tolist()}))
    else:
        is_over = work.step()
        answer.pending.append(scored_event(answer.job.id, before, work.take(), texts))
        if is_over:
            answer.end_scores(is_again=bool(batch.prompts.sizes) or batch.is_invariant or batch.prefixes.cache is not None)
    if batch.model.device.type == "cuda":
        torch.cuda.current_stream(batch.model.device).synchronize()
    return work.done_tokens - before, is_over


def scored_event(job_id: str, start: int, scores: Sequence[Mapping[int, tuple[float, int]]], texts: TokenTexts) -> Event:
    """Return a piece of a prompt's log-probabilities in vLLM's form: values of a JSON list, inserted unchanged into the
    response. start: the first token of the piece; the first token of a prompt has no probability, which is null."""
    shown: list[Any] = [None] if start == 0 else []
    for entry in scores:
        shown.append(
            {
                str(token): {
                    "logprob": finite_logprob(logprob), "rank": rank, "decoded_token": texts.text_of(token),
                }
                for token, (logprob, rank) in entry.items()
            }
        )  # fmt: skip
    data = json.dumps(shown, ensure_ascii=False, allow_nan=False, separators=(",", ":"))[1:-1].encode()
    return Event(job_id, "scores", result={"start": start}, data=data)
