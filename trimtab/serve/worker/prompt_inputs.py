"""How do the prompts of jobs become model inputs?"""

from __future__ import annotations

import json
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
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
from trimtab.engine.chat.media import SAMPLE_RATE, picture_bytes, sound_rate
from trimtab.engine.kv.sequence import Inputs
from trimtab.engine.model import LoadedModel
from trimtab.errors import RequestError, TrimtabError
from trimtab.planning.memory.media import LEAST_BUDGET_BYTES, MEDIA, patch_bytes, request_bytes, sound_bytes
from trimtab.request import GenerateRequest, parts_in, texts_in
from trimtab.serve.api.client_errors import for_client
from trimtab.serve.contract.job import Job
from trimtab.serve.contract.log import drop_tracebacks, write_traceback
from trimtab.serve.grammar.constraint import Grammar
from trimtab.serve.scheduling.compiling import Compiling
from trimtab.serve.scheduling.media_pool import MediaPool
from trimtab.serve.scheduling.queue import FairPool, Turn, Work, WorkLine, settle
from trimtab.serve.scheduling.scheduler import MistakeError
from trimtab.serve.worker.answer import Reading, error_on_host, is_chat, template_kwargs

# Characters per token of the context: shorter texts may well fit, and are tokenized once; of longer ones parts of these sizes are
# counted first. Ordinary text has 2 to 5 characters per token.
FREE, PARTS = 16, (4, 16, 64)
# The end of a part may be cut within a word, and a longer text is merged differently there: by a few tokens, never by half.
MARGIN = 2
# What the processor is shown when the engine starts, and how long an image waits for that.
LEARN_SIDE, LEARN_S = 64, 10.0
# A text of more characters waits with the media.
SHORT_CHARACTERS = 32_768


@dataclass(frozen=True)
class Compiled:
    """The inputs of a job, the reader of its answer (None: no text), and the constraint of the answer. ends: tokens that end it,
    the model's or the tokenizer's own."""

    inputs: Inputs
    reading: Reading | None = None
    constraint: Constraint | None = None
    ends: tuple[int, ...] = ()

    def ended(self, request: GenerateRequest) -> GenerateRequest:
        """Return a request whose answer also ends at `ends`."""
        return replace(request, stop_token_ids=(*request.stop_token_ids, *self.ends)) if self.ends else request


class PromptInputs:
    """Makes the inputs of jobs. ends: the ids that end an answer. audio_s: most seconds of all audio of a request (None, or more
    than planned: the planned ones)."""

    def __init__(self, model: LoadedModel, *, ends: Iterable[int], audio_s: float | None = None) -> None:
        vocabulary = int(model.hf_model.config.get_text_config().vocab_size)
        self.model, self._ends = model, [token for token in sorted(ends) if 0 <= token < vocabulary]
        planned_s = float(model.plan.request.audio_s)
        self.audio_s = planned_s if audio_s is None else min(audio_s, planned_s)
        self.media = MediaPool(
            self.decoded,
            partial(decoded_bytes, model_type=str(model.hf_model.config.model_type), audio_s=self.audio_s),
            most_bytes=model.plan.host.get(MEDIA, LEAST_BUDGET_BYTES), kept=lambda inputs: inputs.tensors.values(),
        )  # fmt: skip
        self._preparing = Preparing(self.make, self.media)
        self._shared = SharedInputs(self._preparing.submit)
        self._compiling = Compiling(self.media.pool)
        self.has_learned = threading.Event()
        self.has_learned.set()
        self._grammar: Grammar | None = None
        self._hidden: dict[tuple[str, ...], frozenset[int]] = {}  # one for each form of answers in a template

    def learn_media(self) -> None:
        """Have the processor see an image and a second of silence, before any prompt is prepared. Errors: CheckpointError if
        the model has no tokenizer that can be used."""
        _ = self.model.processor
        self.has_learned.clear()
        self._preparing.start(self._learn_media)

    def _learn_media(self) -> None:
        """Run the processor with an image and a second of silence, so that threads of the pool can prepare the first
        real ones too."""
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

    def read_vocabulary(self) -> threading.Thread:
        """Begin to read the vocabulary for grammars, on a thread that is returned. It holds the interpreter's lock, for a second
        and more with 262,000 tokens: every token of a server that answers would wait for it."""

        def read() -> None:
            with suppress(TrimtabError):  # requests with a schema get the error
                self._made_grammar()

        thread = threading.Thread(target=read, name="vocabulary", daemon=True)
        thread.start()
        return thread

    def compile_ahead(self) -> None:
        """Begin to start the grammar process, so that the first schema does not wait for it."""
        if self._grammar is not None:
            self._compiling.warm(self._grammar.vocabulary)

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
        if not is_constrained(job):
            return Compiled(inputs, reading)
        grammar = self._made_grammar()
        return Compiled(inputs, reading, reading.constraint(grammar), tuple(grammar.ends))

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
    audio."""
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
        yield from texts_in(message)


_installing = threading.Lock()


@dataclass(frozen=True)
class _Call:
    """How a processor calls the processor of its media. name: of the argument with them, None without one. is_nested: whether the
    media of its one text are in a separate list."""

    name: str | None
    is_nested: bool
    options: dict[str, object]


@dataclass(frozen=True)
class _Prepared:
    """media: weak references, so that media dropped with their request are dropped here."""

    media: tuple[weakref.ref[object], ...]
    call: _Call
    output: object


class MediaAhead:
    """Replaces an image processor or a feature extractor, with all of its attributes. names: of its argument with media. kind: of
    each of them. The options of its call are known after the first prompt with such media. Prepared media are used once, and only
    for the same media with the same options."""

    def __init__(self, real: Callable[..., object], names: Sequence[str], kind: type) -> None:
        self._real, self._names, self._kind = real, names, kind
        self._call: _Call | None = None
        # By the identity of the first of them.
        self._prepared: dict[int, _Prepared] = {}

    def __getattr__(self, name: str) -> object:
        return getattr(self._real, name)

    def __call__(self, *args: object, **kwargs: object) -> object:
        name = next((name for name in self._names if name in kwargs), None)
        given = kwargs[name] if name else args[0] if args else None
        call, media = self._call_of(given, name, args, kwargs), self._flat(given)
        if call is None or not media:
            return self._real(*args, **kwargs)
        self._call = call
        prepared = self._prepared.pop(id(media[0]), None)
        if prepared is not None and prepared.call == call and _are_same(prepared.media, media):
            return prepared.output
        return self._real(*args, **kwargs)

    def prepare(self, media: Sequence[object]) -> None:
        """Prepare the media of one prompt now. Nothing is raised: an error is raised where the result is needed."""
        call = self._call
        if call is None or not media:
            return
        given = [list(media)] if call.is_nested else list(media)
        with suppress(Exception):
            named = {call.name: given} if call.name else {}
            output = self._real(*(() if named else (given,)), **named, **call.options)
            key = id(media[0])
            first = weakref.ref(media[0], lambda _: self._prepared.pop(key, None))
            self._prepared[key] = _Prepared((first, *map(weakref.ref, media[1:])), call, output)

    def _call_of(self, given: object, name: str | None, args: tuple[object, ...], kwargs: dict[str, object]) -> _Call | None:
        """Return how a call was made, None for one that cannot be repeated with other media."""
        is_nested = isinstance(given, (list, tuple)) and len(given) == 1 and isinstance(given[0], (list, tuple))
        options = {key: value for key, value in kwargs.items() if key != name}
        return None if len(args) > (name is None) else _Call(name, is_nested, options)

    def _flat(self, given: Any) -> list[object]:
        """Return the media of a call; none if something else is among them, or they belong to several texts."""
        if isinstance(given, (list, tuple)) and len(given) == 1 and isinstance(given[0], (list, tuple)):
            given = given[0]
        is_plain = isinstance(given, (list, tuple)) and all(isinstance(one, self._kind) for one in given)
        return list(given) if is_plain else []


# The part of a processor -> the name of its argument, and the form of each medium.
_PARTS: dict[str, tuple[tuple[str, ...], type]] = {
    "image_processor": (("images",), Image.Image),
    "feature_extractor": (("raw_speech", "audio"), np.ndarray),
}


def images_ahead(processor: object) -> MediaAhead | None:
    """Return the object that prepares images for a processor ahead of its prompts, made the first time; None without images."""
    return _ahead(processor, "image_processor")


def audio_ahead(processor: object) -> MediaAhead | None:
    """Return the object that prepares audio for a processor ahead of its prompts, made the first time; None without audio."""
    return _ahead(processor, "feature_extractor")


def _ahead(processor: object, part: str) -> MediaAhead | None:
    with _installing:
        preprocessor = vars(processor).get(part)
        if preprocessor is None or isinstance(preprocessor, MediaAhead):
            return preprocessor
        ahead = MediaAhead(preprocessor, *_PARTS[part])
        setattr(processor, part, ahead)
        return ahead


def _are_same(first: Sequence[weakref.ref[object]], second: Sequence[object]) -> bool:
    return len(first) == len(second) and all(one() is other for one, other in zip(first, second, strict=True))


@dataclass(eq=False)
class _Prompt(Work):
    """prompt: the job until its inputs are made. pass_on: called with the inputs of decoded media."""

    prompt: list[Job]
    is_short: bool
    pass_on: Callable[[Any], None] | None = None


class Preparing(WorkLine[_Prompt]):
    """The prompts that wait. prepare: job -> its inputs; its exception becomes the future's. media: decodes images and audio first,
    in the same pool (None: prepare does). One is prepared at a time, because a tokenizer is changed while it encodes. Clients take
    turns, and short texts come first: a text waits for one prompt with media at most."""

    def __init__(self, prepare: Callable[[Job], Any], media: MediaPool | None = None) -> None:
        super().__init__(FairPool() if media is None else media.pool, 1)
        self._prepare, self._media = prepare, media
        self._first: Callable[[], None] = lambda: None

    def start(self, first: Callable[[], None]) -> None:
        """Begin `first`, before any prompt; if that fails, prompts are prepared nevertheless."""
        self._first = first
        self.put(_Prompt(Turn(""), Future(), [], True))

    def submit(self, job: Job) -> Future[Any]:
        """Return the inputs to be; cancelling them is enough to forget the job."""
        future: Future[Any] = Future()
        try:
            if self._media is not None and has_media(job.prompt):
                self._media.submit(job, future, lambda decoded, pass_on: self.put_prompt(decoded, future, pass_on))
            else:
                self.put_prompt(job, future)
        except RuntimeError as exc:  # the system starts no thread: this prompt's problem alone
            future.set_exception(MistakeError(write_traceback(exc, "preparing a prompt")))
        return future

    def put_prompt(self, job: Job, future: Future[Any], pass_on: Callable[[Any], None] | None = None) -> None:
        """Let a prompt wait. pass_on: of one whose media were decoded; it has been running since."""
        self.put(_Prompt(Turn(job.sender), future, [job], is_short(job.prompt), pass_on))

    def choose(self) -> _Prompt | None:
        return min(self.turns.in_turn(), key=lambda one: not one.is_short, default=None)

    def do(self, work: _Prompt) -> None:
        if not work.prompt:
            try:
                self._first()
            except BaseException as exc:
                # A panic of a library in Rust too: without this thread every later prompt would wait indefinitely.
                write_traceback(exc, "before the first prompt")
        # A job with media has been running since it was decoded.
        elif work.pass_on is not None or work.future.set_running_or_notify_cancel():
            settle(work.future, lambda: self._inputs(work), is_running=True)

    def _inputs(self, work: _Prompt) -> Any:
        inputs = None
        try:
            inputs = self._prepare(work.prompt.pop())
        except BaseException as exc:
            drop_tracebacks(exc)  # its frames have the media, whose memory is about to count as free
            raise
        finally:
            if work.pass_on is not None:
                self._pass_on(work.pass_on, inputs)
        return inputs

    def _pass_on(self, pass_on: Callable[[Any], None], inputs: Any) -> None:
        try:
            pass_on(inputs)
        except BaseException as exc:
            raise MistakeError(write_traceback(exc, "counting the memory of images and audio")) from None


def has_media(prompt: Any) -> bool:
    """Whether a prompt is messages with images or audio."""
    return isinstance(prompt, list) and any(
        part["type"] != "text" for message in prompt if isinstance(message, dict) for part in parts_in(message)
    )


def is_short(prompt: Any) -> bool:
    """Whether a prompt has no media and little text."""
    if isinstance(prompt, dict):
        return len(prompt["text"]) <= SHORT_CHARACTERS
    if isinstance(prompt, str):
        return len(prompt) <= SHORT_CHARACTERS
    if has_media(prompt):
        return False
    return sum(len(text) for message in prompt if isinstance(message, dict) for text in texts_in(message)) <= SHORT_CHARACTERS
