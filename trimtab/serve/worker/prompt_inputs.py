"""How do the prompts of jobs become model inputs? On other threads, once for all choices of a request, long texts refused early.

PromptInputs        the threads, and what they need of the model
SharedInputs        one set of inputs for the jobs of a group
check_first_tokens  refuses a text that cannot fit the context by its first part, so that none occupies the tokenizer for seconds
"""

from __future__ import annotations

import json
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import CancelledError, Future, InvalidStateError
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from PIL import Image

from trimtab.engine.batch.generate import hidden_ids
from trimtab.engine.batch.request import Constraint
from trimtab.engine.chat import prompt as chat
from trimtab.engine.chat.content_parts import parts_in
from trimtab.engine.chat.media import SAMPLE_RATE, picture_bytes, sound_rate
from trimtab.engine.chat.media_ahead import audio_ahead, images_ahead
from trimtab.engine.kv.sequence import Inputs
from trimtab.engine.model import LoadedModel
from trimtab.errors import RequestError, TrimtabError
from trimtab.planning.memory.media import LEAST_BUDGET_BYTES, MEDIA, patch_bytes, request_bytes, sound_bytes
from trimtab.serve.api.client_errors import for_client
from trimtab.serve.contract.job import Job
from trimtab.serve.grammar.constraint import Grammar
from trimtab.serve.scheduling.compiling import Compiling
from trimtab.serve.scheduling.media_pool import MediaPool
from trimtab.serve.scheduling.preparing import Preparing
from trimtab.serve.worker.answer import Reading, error_on_host, is_chat, template_kwargs

# Characters per token of the context: shorter texts may well fit, and are tokenized once; of longer ones parts of these sizes are
# counted first. Ordinary text has 2 to 5 characters per token.
FREE, PARTS = 16, (4, 16, 64)
# The end of a part may be cut within a word, and a longer text is merged differently there: by a few tokens, never by half.
MARGIN = 2
# What the processor is shown when the engine starts, and how long an image waits for that.
LEARN_SIDE, LEARN_S = 64, 10.0


@dataclass(frozen=True)
class Compiled:
    """The inputs of a job, the reader of its answer (None: no text), and the constraint of the answer."""

    inputs: Inputs
    reading: Reading | None = None
    constraint: Constraint | None = None


class PromptInputs:
    """Makes the inputs of jobs. ends: the ids that end an answer. audio_s: most seconds of all audio of a request (None, or more
    than planned: the planned ones)."""

    def __init__(self, model: LoadedModel, *, ends: Iterable[int], audio_s: float | None = None) -> None:
        self.model, self._ends = model, sorted(ends)
        planned_s = float(model.plan.request.audio_s)
        self.audio_s = planned_s if audio_s is None else min(audio_s, planned_s)
        self.media = MediaPool(
            self.decoded,
            partial(decoded_bytes, model_type=str(model.hf_model.config.model_type), audio_s=self.audio_s),
            most_bytes=model.plan.host.get(MEDIA, LEAST_BUDGET_BYTES), kept=lambda inputs: inputs.tensors.values(),
        )  # fmt: skip
        self._preparing = Preparing(self.make, self.media)
        self._shared = SharedInputs(self._preparing.submit)
        self._compiling = Compiling()
        self.has_learned = threading.Event()
        self.has_learned.set()
        self._grammar: Grammar | None = None
        self._hidden: dict[tuple[str, ...], frozenset[int]] = {}  # one for each form of answers in a template

    def learn_media(self) -> None:
        """Have the processor see an image and a second of silence, on the thread that prepares prompts. Errors: CheckpointError if
        the model has no tokenizer that can be used."""
        _ = self.model.processor
        self.has_learned.clear()
        self._preparing.start(self._learn_media)

    def _learn_media(self) -> None:
        """Run the processor with an image and a second of silence, so that threads of the pool can prepare the first
        real ones too.
        """
        try:
            self._learn_images_and_audio()
        finally:
            self.has_learned.set()

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

    def prepare(self, job: Job) -> Future[Inputs] | Future[Compiled] | None:
        """Begin to make a job's inputs, on the host; None for token ids. Errors, in the future: as `begin`.

        A schema may take seconds to compile. Separate threads and processes compile it (compiling.py), so it delays
        neither tokens nor other prompts.
        """
        if chat.is_token_ids(job.prompt) and not is_constrained(job):
            return None
        prepared = self._shared.submit(job)
        if not is_constrained(job):
            return prepared
        return self._compiling.after(prepared, job.sender, partial(self._compiled_aside, job))

    def _compiled_aside(self, job: Job, inputs: Inputs) -> Compiled:
        with self._on_host("compiling a schema", job):
            return self.compiled(job, inputs)

    @contextmanager
    def _on_host(self, what: str, job: Job) -> Iterator[None]:
        """Convert an exception into an error of this job alone; the device is not used."""
        try:
            yield
        except RequestError as exc:
            raise for_client(exc, job) from exc
        except (TrimtabError, CancelledError):
            raise
        except BaseException as exc:  # a panic of llguidance is no Exception
            raise error_on_host(exc, what, self.model.device) from exc

    def compiled(self, job: Job, inputs: Inputs) -> Compiled:
        """Return the inputs with what an answer needs in addition. Errors: RequestError."""
        reading = Reading(job, inputs, self.model.processor)
        return Compiled(inputs, reading, reading.constraint(self._made_grammar()) if is_constrained(job) else None)

    def hidden_ids(self, shown: tuple[str, ...]) -> frozenset[int] | None:
        """Return the ids that a `Detokenizer` omits if these control tokens are part of the text; None if none is."""
        if not shown:
            return None
        if shown not in self._hidden:
            self._hidden[shown] = hidden_ids(self.tokenizer, shown)
        return self._hidden[shown]

    @property
    def tokenizer(self) -> Any:
        processor = self.model.processor
        return getattr(processor, "tokenizer", processor)

    def make(self, job: Job) -> Inputs:
        """Return a job's inputs on the host: another thread must not queue work on a GPU that captures steps."""
        with self._on_host("preparing a prompt", job):
            check_first_tokens(job, self.tokenizer, self.model.context_tokens)
            if is_constrained(job):
                self._made_grammar()  # reading a large vocabulary takes longer than a step
            prompt = job.prompt
            if isinstance(prompt, dict):  # a text to continue, no chat
                tokenizer = self.tokenizer
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

    def decoded(self, job: Job) -> Job:
        """Return a job with its media decoded, its images resized and its audio turned into features, on a thread of the pool."""
        with self._on_host("decoding images and audio", job):
            decoded = chat.decode_media(self.model, job.prompt, audio_s=self.audio_s)
            parts: list[Mapping[str, object]] = [part for message in decoded for part in parts_in(message)]
            self.has_learned.wait(LEARN_S)
            for kind, ahead_of in (("image", images_ahead), ("audio", audio_ahead)):
                media = [part[kind] for part in parts if part["type"] == kind]
                if media and (ahead := ahead_of(self.model.processor)) is not None:
                    ahead.prepare(media)
            return replace(job, prompt=decoded)

    def _made_grammar(self) -> Grammar:
        if self._grammar is None:
            self._grammar = Grammar(self.tokenizer, self._ends, self._compiling.prove)
        return self._grammar


def is_constrained(job: Job) -> bool:
    return job.schema is not None or job.must_call is not None or job.holds_calls


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


# Shared inputs ------------------------------------------------------------------------------------------------------


class SharedInputs:
    """Futures of inputs. make: begins to make a job's. `submit` is called from one thread."""

    def __init__(self, make: Callable[[Job], Future[Any]]) -> None:
        self._make = make
        self._by_group: weakref.WeakValueDictionary[str, _Source] = weakref.WeakValueDictionary()

    def submit(self, job: Job) -> Future[Any]:
        """Return the inputs to be, which are also those of other jobs of its group. Cancelling a job's is enough to forget it; the
        last one cancels the work. Errors: those of `make`."""
        if not job.group:
            return self._make(job)
        source = self._by_group.get(job.group)
        if source is None or source.is_cancelled:
            source = _Source(self._make(job))
            self._by_group[job.group] = source
        return source.follow()


class _Source:
    """The work of one group. Its followers keep it, and it keeps them until the work is done: nothing refers to inputs in a circle
    then, and they are dropped with the last follower."""

    def __init__(self, work: Future[Any]) -> None:
        self._lock = threading.Lock()
        self._followers: list[Future[Any]] = []
        self._work: Future[Any] | None = work
        self._result: Any = None
        self._problem: BaseException | None = None
        self.is_cancelled = False
        work.add_done_callback(self._pass_on)

    def follow(self) -> Future[Any]:
        follower: Future[Any] = Future()
        follower.add_done_callback(self._left)
        with self._lock:
            is_done = self._work is None
            if not is_done:
                self._followers.append(follower)
        if is_done:
            self._tell(follower)
        return follower

    def _pass_on(self, work: Future[Any]) -> None:
        with self._lock:
            self.is_cancelled = work.cancelled()
            if not self.is_cancelled:
                self._problem = work.exception()
                self._result = None if self._problem is not None else work.result()
            self._work, followers, self._followers = None, self._followers, []
        for follower in followers:
            self._tell(follower)

    def _tell(self, follower: Future[Any]) -> None:
        with suppress(InvalidStateError):  # its client has left by now
            if self.is_cancelled:
                follower.cancel()
            elif self._problem is not None:
                follower.set_exception(self._problem)
            else:
                follower.set_result(self._result)

    def _left(self, follower: Future[Any]) -> None:
        if not follower.cancelled():
            return
        with self._lock:
            if follower in self._followers:
                self._followers.remove(follower)
            work = None if self._followers else self._work
        if work is not None:
            work.cancel()


# The first part of a text -------------------------------------------------------------------------------------------


def check_first_tokens(job: Job, tokenizer: Any, context_tokens: int) -> None:
    """Refuse a long text whose first part has more tokens than fit. Errors: RequestError."""
    count = sum(map(len, _texts(job)))
    if count <= FREE * context_tokens:
        return
    text = "".join(_texts(job))
    for part in PARTS:
        size = part * context_tokens
        if size >= count:
            return
        tokens = len(tokenizer(text[:size], add_special_tokens=False)["input_ids"])
        if tokens > MARGIN * context_tokens:
            raise RequestError(
                f"the prompt has more than {MARGIN * context_tokens} tokens, the context has {context_tokens}",
                field="prompt", hint=chat.CONTEXT_HINT,
            )  # fmt: skip


def _texts(job: Job) -> Iterator[str]:
    """Yield the texts of a prompt: of its tools, then of its messages. Token ids have none."""
    if isinstance(job.prompt, dict):
        yield job.prompt["text"]
        return
    if any(isinstance(one, int) for one in job.prompt[:1]):
        return
    if job.tools:
        yield json.dumps(job.tools, ensure_ascii=False)
    yield job.system or ""
    for message in job.prompt:
        if calls := message.get("tool_calls"):
            yield json.dumps(calls, ensure_ascii=False)
        content = message.get("content")
        if isinstance(content, str):
            yield content
        else:
            yield from (part["text"] for part in content or () if part["type"] == "text")
