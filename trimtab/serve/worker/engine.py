"""Jobs become rows of a batch, and tokens become the text that clients receive.

Implements `engine_protocol.Engine` on a loaded model; `adapter_cache.py` has its adapters.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import CancelledError, Future
from contextlib import AbstractContextManager, suppress
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
from PIL import Image

from trimtab.adapter_names import parts_of
from trimtab.engine.batch.batch import Batch
from trimtab.engine.batch.generate import Detokenizer, hidden_ids
from trimtab.engine.batch.request import Row, SampledToken
from trimtab.engine.batch.sampling import Sampler
from trimtab.engine.calls.embedding import Embedding
from trimtab.engine.calls.prompt_logprobs import PromptScores
from trimtab.engine.chat import prompt as chat
from trimtab.engine.chat.content_parts import parts_in
from trimtab.engine.chat.media import SAMPLE_RATE, picture_bytes, sound_rate
from trimtab.engine.chat.media_ahead import audio_ahead, images_ahead
from trimtab.engine.kv.sequence import Inputs
from trimtab.engine.lora.host_adapter import HeldAdapter
from trimtab.engine.model import LoadedModel
from trimtab.engine.prefill.chunk_times import ChunkTimes
from trimtab.errors import RequestError, TrimtabError
from trimtab.planning.memory.activations import passing_tokens
from trimtab.planning.memory.media import LEAST_BUDGET_BYTES, MEDIA, patch_bytes, request_bytes, sound_bytes
from trimtab.request import GenerateRequest
from trimtab.serve.adapters.adapter_cache import AdapterCache
from trimtab.serve.api.client_errors import for_client
from trimtab.serve.contract.job import Event, Job, Token
from trimtab.serve.contract.log import write_traceback
from trimtab.serve.grammar.constraint import Grammar
from trimtab.serve.scheduling.budget import TOWERS
from trimtab.serve.scheduling.compiling import Compiling
from trimtab.serve.scheduling.media_pool import MediaPool
from trimtab.serve.scheduling.preparing import Preparing
from trimtab.serve.scheduling.prompt_length import check_first_tokens
from trimtab.serve.scheduling.scheduler import error_event
from trimtab.serve.scheduling.shared_inputs import SharedInputs
from trimtab.serve.worker import rowless_pieces as pieces
from trimtab.serve.worker.answer_parts import Reading, is_chat, template_kwargs
from trimtab.serve.worker.engine_errors import error_of, error_on_host, named
from trimtab.serve.worker.pulse import Pulse
from trimtab.serve.worker.running_answer import Answer, Compiled

# What the processor is shown when the engine starts, and how long an image waits for that.
LEARN_SIDE, LEARN_S = 64, 10.0


def decoded_bytes(job: Job, *, model_type: str, audio_s: float) -> int:
    """Return the most bytes of a job's media before they are model inputs. audio_s: the most decoded seconds of all its
    audio.
    """
    parts = [part for message in job.prompt for part in message["content"] or () if isinstance(part, dict)]
    images = [picture_bytes(part["image"]) for part in parts if part["type"] == "image"]
    rate = max((sound_rate(part["audio"]) for part in parts if part["type"] == "audio"), default=0)
    audio_bytes = sound_bytes(audio_s, rate) if rate else 0
    image_bytes = sum(nbytes for nbytes, _ in images) + patch_bytes(len(images), model_type)
    return request_bytes(image_bytes, sum(pixels for _, pixels in images), audio_bytes)


class LoadedEngine:
    """The scheduler's engine on a loaded model. rows: requests decoded together. prompt_limit: the most tokens of a
    prompt (None: the context). audio_s: most seconds of all audio of a request (None, or more than planned: the planned
    ones). held: as for `AdapterCache`.
    """

    def __init__(
        self, model: LoadedModel, *, rows: int, kept: Iterable[str] = (), resident_limit: int | None = None,
        prompt_limit: int | None = None, audio_s: float | None = None, held: Mapping[str, HeldAdapter] | None = None,
    ) -> None:  # fmt: skip
        self.model, self.rows, self.prompt_limit = model, rows, prompt_limit
        model.forget_batch()
        self.batch = Batch(model, rows)
        self.shelf = AdapterCache(model, kept=kept, resident_limit=resident_limit, held=held)
        plan = model.plan
        planned_s = float(plan.request.audio_s)
        self._audio_s = planned_s if audio_s is None else min(audio_s, planned_s)
        pool = MediaPool(
            self._decoded,
            partial(decoded_bytes, model_type=str(model.hf_model.config.model_type), audio_s=self._audio_s),
            most_bytes=plan.host.get(MEDIA, LEAST_BUDGET_BYTES), kept=lambda inputs: inputs.tensors.values(),
        )  # fmt: skip
        self._preparing = Preparing(self._inputs, pool)
        self._shared = SharedInputs(self._preparing.submit)
        self._compiling = Compiling()
        self._has_learned = threading.Event()
        self._has_learned.set()
        self._by_row: dict[Row, Answer] = {}
        # Answers whose prompts or pieces are computed now or soon: their adapters stay on the model.
        self._begun: list[Answer] = []
        self._times = ChunkTimes(model.device)
        self._grammar: Grammar | None = None
        self._hidden: dict[tuple[str, ...], frozenset[int]] = {}  # one for each form of answers in a template
        # Announces long work; a worker sets its own.
        self.pulse = Pulse(lambda message: None)
        # Whether the adapter of this name is still being prepared between steps.
        self.is_unprepared: Callable[[str], bool] = lambda name: False

    def capture(self) -> None:
        """Capture the graphs of first requests; `capture_more` captures the rest.

        Errors: DeviceError; CheckpointError if the model has no tokenizer that can be used: no prompt could be
        answered.
        """
        with self.model._out_of_memory_named("capturing the first steps"):
            self.batch.captures_ahead.prepare(self.shelf.held, first=True)
        _ = self.model.processor
        self._has_learned.clear()
        self._preparing.start(self._learn_media)

    def _learn_media(self) -> None:
        """Run the processor with an image and a second of silence, so that threads of the pool can prepare the first
        real ones too.
        """
        try:
            self._learn_images_and_audio()
        finally:
            self._has_learned.set()

    def _learn_images_and_audio(self) -> None:
        request, processor = self.model.plan.request, self.model.processor
        # A model may lack either, or have an unusable processor, which the first prompt reports.
        with suppress(Exception):
            if request.images and images_ahead(processor) is not None:
                picture = Image.new("RGB", (LEARN_SIDE, LEARN_SIDE))
                chat.prepare(self.model, "?", images=[picture], device=torch.device("cpu"))
        with suppress(Exception):
            if request.audio_s >= 1 and audio_ahead(processor) is not None:
                silence = np.zeros(SAMPLE_RATE, np.float32)
                chat.prepare(self.model, "?", audios=[silence], device=torch.device("cpu"))

    def compile_ahead(self) -> None:
        """Begin to read the vocabulary and to start the grammar process, so that the first schema waits for neither."""
        if self._grammar is None:
            with suppress(TrimtabError):  # requests with a schema get the error
                self._compiling.warm(lambda: self._made_grammar().vocabulary())

    @property
    def has_more_to_capture(self) -> bool:
        return not self.batch.captures_ahead.is_over

    def capture_more(self) -> None:
        """Capture one more graph, or a few of one form, while no request runs. Errors: DeviceError."""
        with self.model._out_of_memory_named("capturing a step"):
            self.batch.captures_ahead.prepare_more(self.shelf.held)

    # Scheduler interface ----------------------------------------------------------------------------------------------

    def prepare(self, job: Job) -> Future[Inputs] | Future[Compiled] | None:
        """Begin to make a job's inputs, on the host; None for token ids. Errors, in the future: as `begin`.

        A schema may take seconds to compile. Separate threads and processes compile it (compiling.py), so it delays
        neither tokens nor other prompts.
        """
        if chat.is_token_ids(job.prompt) and not _is_constrained(job):
            return None
        prepared = self._shared.submit(job)
        if not _is_constrained(job):
            return prepared
        return self._compiling.after(prepared, job.sender, partial(self._compiled_aside, job))

    def _compiled_aside(self, job: Job, inputs: Inputs) -> Compiled:
        """Return the result of `_compiled`. Errors: only those of this job; the device is not used."""
        try:
            return self._compiled(job, inputs)
        except RequestError as exc:
            raise for_client(exc, job) from exc
        except (TrimtabError, CancelledError):
            raise
        except BaseException as exc:  # a panic of llguidance is no Exception
            raise error_on_host(exc, "compiling a schema", self.model.device) from exc

    def _compiled(self, job: Job, inputs: Inputs) -> Compiled:
        reading = Reading(job, inputs, self.model.processor)
        return Compiled(inputs, reading, reading.constraint(self._made_grammar()) if _is_constrained(job) else None)

    def begin(self, job: Job, prepared: Inputs | Compiled | None = None) -> Answer:
        """Check a job and return its answer. Errors: RequestError and those of `chat.prepare`; MistakeError."""
        with self._named("preparing a prompt"), self.pulse.work("preparing a prompt"):
            try:
                given = self._inputs(job) if prepared is None else prepared
                if not isinstance(given, Compiled):
                    given = self._compiled(job, given) if job.kind == "answer" else Compiled(given)
                return self._begin(job, given)
            except RequestError as exc:
                raise for_client(exc, job) from exc

    def _begin(self, job: Job, compiled: Compiled) -> Answer:
        inputs, reading = compiled.inputs, compiled.reading
        self.shelf.check(job.adapter)
        if job.kind in ("tokens", "text"):
            return self._told_at_once(job, inputs)
        if self.prompt_limit is not None and inputs.prompt_tokens > self.prompt_limit:
            raise RequestError(
                f"the prompt has {inputs.prompt_tokens} tokens, this server takes {self.prompt_limit}", field="prompt"
            )
        if job.kind == "embedding":
            row = empty_row(self.model, job.adapter, job.request)
            embedding = Embedding(self.model, inputs, adapter=job.adapter, pooling=job.pooling)
            return Answer(job, None, row, None, time.monotonic(), embedding=embedding)
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
            inputs, job.request, top_logprobs=job.top_logprobs, constraint=compiled.constraint, client=job.client, group=job.group
        )
        prompt.row.adapter = job.adapter  # it may stay in host memory until its turn
        prompt.may_end_in_step = True
        before = inputs.token_ids if job.continues else ()
        hidden = self._hidden_ids(reading.shown)
        detokenizer = Detokenizer(self._tokenizer, job.request.stop, hidden=hidden, before=before)
        return Answer(job, prompt, prompt.row, detokenizer, time.monotonic(), reading=reading, scores=scores)

    def _told_at_once(self, job: Job, inputs: Inputs) -> Answer:
        """Return the answer of a job that needs only the tokenizer: it ends without a row."""
        answer = Answer(job, None, empty_row(self.model, job.adapter, job.request), None, time.monotonic(), is_over=True)
        ids = list(inputs.token_ids)
        if job.kind == "text":
            result: dict[str, Any] = {"prompt": str(self._tokenizer.decode(ids))}
        else:
            result = {"tokens": ids, "token_strs": self._tokenizer.convert_ids_to_tokens(ids)}
        usage = {"prompt_tokens": len(ids), "completion_tokens": 0}
        answer.pending.append(Event(job.id, "done", finish="stop", usage=usage, result=result))
        return answer

    def _hidden_ids(self, shown: tuple[str, ...]) -> frozenset[int] | None:
        """Return the ids that a `Detokenizer` omits if these control tokens are part of the text; None if none is."""
        if not shown:
            return None
        if shown not in self._hidden:
            self._hidden[shown] = hidden_ids(self._tokenizer, shown)
        return self._hidden[shown]

    @property
    def _tokenizer(self) -> Any:
        processor = self.model.processor
        return getattr(processor, "tokenizer", processor)

    def _inputs(self, job: Job) -> Inputs:
        """Return a job's inputs on the host: another thread must not queue work on a GPU that captures steps."""
        try:
            check_first_tokens(job, self._tokenizer, self.model.context_tokens)
            if _is_constrained(job):
                self._made_grammar()  # reading a large vocabulary takes longer than a step
            prompt = job.prompt
            if isinstance(prompt, dict):  # a text to continue, no chat
                tokenizer = self._tokenizer
                text = prompt["text"]
                adds_special = job.adds_special and not (tokenizer.bos_token and text.startswith(tokenizer.bos_token))
                prompt = tokenizer(text, add_special_tokens=adds_special)["input_ids"]
                if not prompt:
                    raise RequestError("is empty", field="prompt")
            return chat.prepare(
                self.model, prompt, system=job.system, tools=job.tools, device=torch.device("cpu"),
                template_kwargs=template_kwargs(job, self.model.processor) if is_chat(job) else None,
                continue_final_message=job.continue_final_message,
            )  # fmt: skip
        except RequestError as exc:
            raise for_client(exc, job) from exc
        except TrimtabError:
            raise
        except BaseException as exc:
            raise error_on_host(exc, "preparing a prompt", self.model.device) from exc

    def _decoded(self, job: Job) -> Job:
        """Return a job with its media decoded, its images resized and its audio turned into features, on a thread of the pool."""
        try:
            decoded = chat.decode_media(self.model, job.prompt, audio_s=self._audio_s)
            parts: list[Mapping[str, object]] = [part for message in decoded for part in parts_in(message)]
            self._has_learned.wait(LEARN_S)
            for kind, ahead_of in (("image", images_ahead), ("audio", audio_ahead)):
                media = [part[kind] for part in parts if part["type"] == kind]
                if media and (ahead := ahead_of(self.model.processor)) is not None:
                    ahead.prepare(media)
            return replace(job, prompt=decoded)
        except RequestError as exc:
            raise for_client(exc, job) from exc
        except TrimtabError:
            raise
        except BaseException as exc:
            raise error_on_host(exc, "decoding images and audio", self.model.device) from exc

    def _made_grammar(self) -> Grammar:
        if self._grammar is None:
            self._grammar = Grammar(self._tokenizer, sorted(self.batch.ends), self._compiling.prove)
        return self._grammar

    def is_prepared(self, adapter: str | None) -> bool:
        """Whether each part of an adapter is on the model or completely prepared."""
        return all(not self.is_unprepared(name) or self.shelf.is_resident(name) for name in parts_of(adapter))

    def is_ready(self, adapter: str | None) -> bool:
        return self.shelf.has_room_for(adapter, self._in_use())

    def has_room(self, answer: Answer) -> bool:
        return answer.needs_no_row or answer.prompt is None or self.batch.pages.has_room(answer.row)

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
            if answer.prompt is not None:
                self.batch.pages.reserve(answer.row)

    @property
    def beside_tokens(self) -> int:
        return passing_tokens(self.model.context_tokens, is_chunked=bool(self.model.plan.execution.prompt.chunks))

    @property
    def interleaves(self) -> bool:
        """Whether each prompt has separate keys and values, in host memory. Captured chunks write into one row of the
        batch, and batch-invariant prompts are computed one at a time.
        """
        return self.model.device.type == "cpu" and not self.batch.prompts.is_on and not self.batch.is_invariant

    def passing_tokens(self, answer: Answer) -> int:
        work = answer.embedding or answer.scores
        if work is not None:
            return work.prompt_tokens
        if not self.interleaves or answer.prompt is None or answer.prompt.inputs.has_media:
            return 0
        return answer.prompt.inputs.prompt_tokens

    def kept_tokens(self, answer: Answer) -> int:
        return 0 if answer.prompt is None or answer.prompt.cache is None else answer.prompt.done_tokens

    release = staticmethod(pieces.release)

    def goes_alone(self, answer: Answer) -> bool:
        if answer.prompt is None or answer.is_complete:
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

        Errors: DeviceError if memory runs out. MistakeError for any other failure that leaves the device usable: it
        ends this answer only.
        """
        kind = "towers" if answer.needs_towers else "a prompt"
        with self._named("reading a prompt", answer.job), self.pulse.work(kind, answer.next_tokens(most_tokens)):
            self._begin_adapter(answer)
            assert answer.prompt is not None
            has_towers = answer.prompt.needs_towers
            self._times.begin()
            is_through = answer.prompt.step(most_tokens)
            if has_towers and not is_through and not answer.prompt.chunk_tokens:
                self._times.end(TOWERS)
                return TOWERS, False
            if answer.prompt.source is None and self.batch.prompts.is_steady and not has_towers:
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
        answer.row.adapter, answer.is_begun = key, True
        self._begun.append(answer)
        for one in (answer.embedding, answer.scores):
            if one is not None:
                one.adapter = key

    def arrive(self, answer: Answer) -> None:
        """Give an answer with a computed prompt its row and its first token, which the next step samples if it computes
        the prompt's last token. Errors: as `prefill`.
        """
        assert answer.prompt is not None
        if answer.is_open:
            with self._named("reading a prompt"):
                self.batch.enter(answer.prompt)
            answer.prompt = None
            self._by_row[answer.row] = answer
            return
        with self._named("reading a prompt"):
            sampled = self.batch.join(answer.prompt)
        answer.prompt = None
        self._by_row[answer.row] = answer
        self._told(answer, sampled)

    def piece(self, answer: Answer, most_tokens: int) -> tuple[int, bool]:
        """Compute the next piece of an embedding, or of a prompt's log-probabilities, and wait for it, because others
        wait for it too. Errors: as `prefill`.
        """
        with self._named("reading a prompt", answer.job), self.pulse.work("a piece", answer.next_tokens(most_tokens)):
            self._begin_adapter(answer)
            return pieces.run(answer, most_tokens, self.batch, self._tokenizer.decode)

    def spent(self, answer: Answer) -> dict[str, int]:
        return pieces.spent(answer)

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
        answer.first_token = answer.first_token or time.monotonic()
        try:
            self._take(answer, sampled)
        except BaseException as exc:
            self._break(answer, exc)

    def _break(self, answer: Answer, exc: BaseException) -> None:
        """End one answer with an error. The others continue."""
        answer.is_over = True
        answer.pending.append(error_event(answer.job.id, error_of(exc, "answering", self.model.device)))

    def news(self, answer: Answer) -> Sequence[Event]:
        events, answer.pending = answer.pending, []
        return events

    def drop(self, answer: Answer) -> None:
        if answer in self._begun:
            self._begun.remove(answer)
        answer.prompt = None
        if answer.row.number < 0:
            self.batch.pages.forget(answer.row)
        if answer.row in self.batch.placed:
            self.batch.leave(answer.row)
        if answer.row in self._by_row:
            del self._by_row[answer.row]
            self.batch.leave(answer.row)

    # Tokens to text ---------------------------------------------------------------------------------------------------

    def _take(self, answer: Answer, sampled: SampledToken) -> None:
        if answer.is_over:
            return
        assert answer.detokenizer is not None
        row, job = answer.row, answer.job
        is_end = sampled.token_id in self.batch.ends
        text = "" if is_end else answer.detokenizer.push(sampled.token_id)
        tokens = () if sampled.logprob is None or is_end else (self._token(sampled),)
        finish = "stop" if answer.detokenizer.stopped else row.finish
        if finish is not None:
            text += answer.detokenizer.finish()
            if answer.detokenizer.stopped:
                finish = "stop"
        assert answer.reading is not None
        is_cut = finish == "length" or answer.detokenizer.stopped
        answer.pending += answer.reading.events(text, tokens, is_last=finish is not None, is_cut=is_cut)
        if finish == "stop" and answer.reading.has_called:
            finish = "tool_calls"
        if finish is not None:
            answer.is_over = True
            answer.pending.append(Event(job.id, "done", finish=finish, usage=self._usage(answer)))

    def _token(self, sampled: SampledToken) -> Token:
        assert sampled.logprob is not None
        decode = self._tokenizer.decode
        top = tuple((token, str(decode([token])), logprob) for token, logprob in sampled.top)
        return Token(sampled.token_id, str(decode([sampled.token_id])), sampled.logprob, top)

    def _usage(self, answer: Answer) -> dict[str, Any]:
        now = time.monotonic()
        assert answer.first_token is not None
        return {
            "prompt_tokens": answer.row.prompt_tokens, "completion_tokens": len(answer.row.answer_ids),
            "cached_tokens": answer.row.cached_tokens, "shared_tokens": answer.row.shared_tokens,
            **({"scored_tokens": answer.scored_twice} if answer.scored_twice else {}),
            "stop_text": None if answer.detokenizer is None else answer.detokenizer.stop_text,
            "ttft_s": answer.first_token - answer.began, "decode_s": now - answer.first_token,
            "output_head": self.model.plan.execution.head, "kv": self.model.plan.request.kv,
        }  # fmt: skip


def empty_row(model: LoadedModel, adapter: str | None, request: GenerateRequest) -> Row:
    """Return a row outside any batch, for a job that samples no tokens."""
    return Row(adapter, request, [], 0, sampler=Sampler(request, model.device))


def _is_constrained(job: Job) -> bool:
    return job.schema is not None or job.must_call is not None or job.holds_calls
