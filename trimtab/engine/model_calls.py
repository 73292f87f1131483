"""Which further calls does a loaded model have (batches, several answers, embeddings, asyncio), and how are its adapters read?"""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import AsyncIterator, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing, suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from trimtab.adapters.adapter import AdapterSpec, match_adapter, read_adapter
from trimtab.adapters.file import check_vocabulary, stamps_of
from trimtab.checkpoint.names import check_options, named_options
from trimtab.engine.batch.generate import Answer, Timed
from trimtab.engine.calls import batch_calls, embedding
from trimtab.engine.lora import layers
from trimtab.engine.lora.store import HeldAdapter
from trimtab.errors import AdapterError, DoesNotFitError, RequestError, gib
from trimtab.planning.memory.adapters import head_change
from trimtab.planning.plan.contents import FilesRead
from trimtab.planning.values.byte_sizes import check_answers
from trimtab.request import GenerateRequest

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from trimtab.engine.calls.asked_model import AskedModel, Chosen
    from trimtab.engine.calls.conversation import Conversation
    from trimtab.engine.kv.sequence import Inputs
    from trimtab.engine.loader.transformers_model import Probe
    from trimtab.request import AnswerOptions, QuestionOptions


class Asking:
    """The base of `LoadedModel`: nothing here holds memory."""

    def __repr__(self: Any) -> str:
        """Return the model, its device and its adapters in one line."""
        if self._loaded is None:
            return f"LoadedModel({self.plan.request.model!r}, closed)"
        names = ", ".join(self.adapters) or "none"
        return (
            f"LoadedModel({self.plan.request.model!r}, {self.hf_model.config.architectures[0]}, {self.plan.request.quant} on "
            f"{self.device}, context {self.context_tokens}, adapters: {names})"
        )

    def batch(
        self: AskedModel,
        requests: Iterable[object],
        *,
        rows: int | None = None,
        errors: str = "raise",
        **options: Unpack[QuestionOptions],
    ) -> Iterator[Answer]:
        """Yield the answers of many requests in their order; they are decoded together.

        requests: prompts, or mappings with `prompt` and, as in `answer`, image, audio, system, adapter, template_kwargs and
        any option. They are read as rows become free. rows: number of requests decoded together; None is the plan's
        `batch`. options: defaults for requests without their own. errors: "raise", or "return", which yields a wrong
        request's RequestError in place of its answer. The next answer starts when this one was read or the iterator is
        closed.
        Errors: RequestError; DeviceError if memory runs out.
        """
        return batch_calls.in_order(batch_calls.answers(self, requests, rows=rows, errors=errors, options=options))

    def batch_as_finished(
        self: AskedModel,
        requests: Iterable[object],
        *,
        rows: int | None = None,
        errors: str = "raise",
        **options: Unpack[QuestionOptions],
    ) -> Iterator[tuple[int, Answer]]:
        """Yield (index, answer) as answers finish.

        requests, rows, errors, options: as in `batch`. Errors: as `batch`.
        """
        return batch_calls.answers(self, requests, rows=rows, errors=errors, options=options)

    def answers(
        self: AskedModel, prompt: object, n: int, *, rows: int | None = None, **options: Unpack[QuestionOptions]
    ) -> tuple[Answer, ...]:
        """Return n answers to one prompt, sampled independently. The prompt is computed once for answers that are decoded
        together.

        prompt, options: as in `answer`; a seed counts up from answer to answer. rows: as in `batch`.
        Errors: RequestError for n below 1, and for n above 1 at temperature 0, where all answers would be equal.
        """
        if not isinstance(n, int) or isinstance(n, bool) or n < 1:
            raise RequestError("must be an integer of at least 1", field="n", value=n)
        if n > 1 and not options.get("temperature"):
            raise RequestError("answers at temperature 0 are all equal", field="n", value=n, hint="Set a temperature")
        given: dict[str, Any] = dict(options)
        question = {name: given.pop(name) for name in batch_calls.QUESTION if name in given}
        seed = given.pop("seed", None)
        seeds: list[dict[str, object]] = [{} if seed is None else {"seed": seed + number} for number in range(n)]
        requests = [{"prompt": prompt, **question, **one} for one in seeds]
        pairs = batch_calls.answers(self, requests, rows=rows, errors="raise", options=given, group="answers")
        return tuple(batch_calls.in_order(pairs))

    def question(self: AskedModel, prompt: object, options: Mapping[str, Any]) -> tuple[Inputs, GenerateRequest, Chosen]:
        """Return the inputs, sampling request and adapter of `answer(prompt, **options)`. Errors: RequestError."""
        check_answers(self.anatomy)
        image, audio, system, adapter, template_kwargs = (options.get(name) for name in batch_calls.QUESTION[1:])
        sampling = {name: value for name, value in options.items() if name not in batch_calls.QUESTION}
        check_options(sampling, batch_calls.OPTIONS)
        request = GenerateRequest(**sampling)
        self.check_tokens(request)
        self.check_adapter(adapter)
        inputs = self.prepare(prompt, image=image, audio=audio, system=system, template_kwargs=template_kwargs)
        return inputs, request, adapter

    # Other threads ----------------------------------------------------------------------------------------------------

    async def answer_async(self: AskedModel, prompt: object, **options: Unpack[QuestionOptions]) -> Answer:
        """Return the whole answer, as `answer` does, without blocking the event loop (asyncio).

        Cancelling the task ends the answer. prompt, options, errors: as in `answer`.
        """
        answers: list[Answer] = []
        async for _ in _pieces(self, prompt, options, answers):
            pass
        return answers[0]

    def generate_async(self: AskedModel, prompt: object, **options: Unpack[QuestionOptions]) -> AsyncIterator[str]:
        """Yield the answer's text as it arrives, as `generate` does, without blocking the event loop (asyncio).

        Closing the iterator ends the answer. prompt, options, errors: as in `generate`.
        """
        return _pieces(self, prompt, options, [])

    # Inside -----------------------------------------------------------------------------------------------------------

    @named_options
    def embed(
        self: AskedModel, texts: Sequence[object], *, adapter: Chosen = None, pooling: str = "last", normalize: bool = True
    ) -> Tensor:
        """Return one vector for each text: its last hidden state, pooled.

        texts: used without a chat template, or lists of token ids. adapter: as in `answer`. pooling: "last" (the last
        token) or "mean". normalize: scale to length 1.
        Shapes: [N, D] float32 on the CPU. Errors: RequestError for another pooling, an empty text, or one longer than the
        context.
        """
        return embedding.embed(self, texts, adapter=adapter, pooling=pooling, normalize=normalize)

    @named_options
    def hidden_states(
        self: AskedModel, prompt: object, *, adapter: Chosen = None, image: object = None, audio: object = None,
        system: str | None = None, template_kwargs: Mapping[str, object] | None = None,
    ) -> Tensor:  # fmt: skip
        """Return the hidden states of a prompt before the first layer and after each layer.

        prompt, adapter, image, audio, system, template_kwargs: as in `answer`. The last state has passed the final norm, as in
        transformers' `output_hidden_states`.
        Shapes: [layers + 1, S, D] float32 on the CPU. Errors: RequestError.
        """
        return embedding.hidden_states(
            self, prompt, adapter=adapter, image=image, audio=audio, system=system, template_kwargs=template_kwargs
        )

    def adapter_name(self: AskedModel, adapter: Chosen, in_use: Collection[str | None] = ()) -> str | None:
        """Return the name under which an adapter or mix is attached; a new mix is attached first.

        in_use: names that stay attached. Errors: as `Mixes.name_of`.
        """
        return self.mixes.name_of(adapter, in_use) if isinstance(adapter, Mapping) else adapter

    # Conversations and adapters ---------------------------------------------------------------------------------------

    def chat(
        self: AskedModel,
        *,
        system: str | None = None,
        adapter: Chosen = None,
        when_full: str = "error",
        **options: Unpack[AnswerOptions],
    ) -> Conversation:
        """Return a conversation that keeps its turns (`engine/calls/conversation.py`).

        system: the system message. adapter, options: as in `generate`, for every answer without its own; without
        max_new_tokens an answer can use the rest of the context. when_full: "error" or "drop" (the oldest turns), once the
        context is full.
        Errors: RequestError.
        """
        from trimtab.engine.calls.conversation import Conversation

        return Conversation(self, system=system, adapter=adapter, when_full=when_full, **options)

    def reload_adapter(self: Any, name: str) -> bool:
        """Read an adapter's folder again if its files have changed, and return whether they have.

        name: a loaded adapter. The new files are read and matched first; if they have an error, the old adapter stays.
        Errors: RequestError for an unknown name, AdapterError, CheckpointError; DoesNotFitError if the new adapter needs
        more than the plan leaves.
        """
        self.check_adapter(name)
        before = self.adapter_spec(name).file
        if tuple(read_adapter(before.folder, values=False).stamps) == tuple(before.stamps):
            return False
        held = self.read_adapter(before.folder, name=name)
        with self.turns.hold("reload_adapter"), self.exchanging, self._out_of_memory_named(f"loading adapter {name}"):
            self.check_adapter(name)  # it may have been unloaded since
            free = self.free_adapter_bytes() + self.adapter_sizes[name]
            if held.device_bytes > free:
                raise DoesNotFitError(
                    f"the plan leaves {gib(max(free, 0))} for this adapter", block=f"adapter {name}",
                    device=str(self.device), needed_bytes=held.device_bytes, budget_bytes=max(free, 0),
                    hint="Plan again with the new files",
                )  # fmt: skip
            self.mixes.forget(name)
            layers.detach(self.hf_model, name, store=self.adapter_store)
            self._attach(name, held)
        return True

    def check_adapter(self: AskedModel, name: Chosen) -> None:
        """Raise RequestError for an adapter that is not loaded, or a sum of adapters that cannot be made."""
        with self.exchanging:
            if isinstance(name, Mapping):
                self.mixes.check(name)
            elif isinstance(name, str):
                self.adapter_spec(name)
            elif name is not None:
                raise RequestError("must be a name, {name: weight} for a mix, or None for the base", field="adapter", value=name)

    def check_tokens(self: AskedModel, request: GenerateRequest) -> None:
        """Raise RequestError for a stop token that the vocabulary does not have: it would end no answer."""
        vocabulary = int(self.hf_model.config.get_text_config().vocab_size)
        for token in request.stop_token_ids:
            if token >= vocabulary:
                raise RequestError(f"token ids are below {vocabulary}", field="stop_token_ids", value=token)


_END = object()


async def _pieces(model: AskedModel, prompt: object, options: Mapping[str, object], answers: list[Answer]) -> AsyncIterator[str]:
    """Yield an answer in pieces and put the whole of it into `answers`; leaving early ends it within one step. Errors: as
    `answer`."""
    loop, queue, stop = asyncio.get_running_loop(), asyncio.Queue[object](), threading.Event()

    def emit(item: object) -> None:
        with suppress(RuntimeError):  # a loop that was closed waits for nothing
            loop.call_soon_threadsafe(queue.put_nowait, item)

    def work() -> None:
        try:
            inputs, request, adapter = model.question(prompt, options)
            timed = Timed(model, inputs, request)
            with model.answering(adapter), closing(iter(timed)) as chunks:  # type: ignore[type-var]
                for piece in () if stop.is_set() else chunks:
                    emit(piece.text)
                    if stop.is_set():
                        break
            answers.append(timed.answer)
        except BaseException as exc:
            emit(exc)
        finally:
            emit(_END)

    threading.Thread(target=work, name="trimtab-answer", daemon=True).start()
    try:
        while (item := await queue.get()) is not _END:
            if isinstance(item, BaseException):
                raise item
            if isinstance(item, str) and item:
                yield item
    finally:
        stop.set()


# Adapters in host memory before their turn: a server keeps them all; another program has a plan that counts none of them there.
AHEAD_KEPT, AHEAD = 4, 2


def match_planned(
    model: AskedModel, path: str | Path, spec: AdapterSpec | None = None, *, log_name: str | None = None
) -> AdapterSpec:  # fmt: skip
    """Return the adapter of a folder matched with a model. spec: it, where this is known. log_name: as for the `read_adapter` of
    adapters/file.py. Errors: AdapterError, CheckpointError."""
    spec = spec or match_adapter(read_adapter(path, values=False, log_name=log_name), model.anatomy)
    check_vocabulary(spec.file.folder, model.processor_folder)
    _check_head(model, path, spec)
    return spec


def _check_head(model: AskedModel, path: str | Path, spec: AdapterSpec) -> None:
    execution = model.plan.execution
    is_chosen = execution.head == "int8" and not execution.is_head_asked
    change = head_change({spec.file.folder.name: spec}, model.anatomy) if is_chosen else ""
    if change:
        raise AdapterError(
            path, [f"{change}, and the plan chose an 8-bit output head, which an adapter cannot change later"],
            hint="Plan with head='full', or with this adapter (adapters=)",
        )  # fmt: skip


def read_held(model: AskedModel, spec: AdapterSpec) -> HeldAdapter:
    """Return a matched adapter in host memory, for a model; on any thread. Errors: AdapterError for its values, CheckpointError."""
    held = HeldAdapter.read(spec, pinned=model.device.type == "cuda")
    if model.prefix_cache is not None:
        _ = held.content  # hashed once, where no request waits
    return held


def _use_device(device: torch.device) -> None:
    """Name this thread's GPU: to lock pages without one makes a context on the first GPU."""
    if device.type == "cuda":
        torch.cuda.set_device(device)


def read_planned(
    model: AskedModel, files: FilesRead[Probe] | None, held: dict[str, HeldAdapter] | None
) -> Iterator[tuple[str, HeldAdapter]]:
    """Yield name and adapter of a model's plan, in its order. files: what planning read. held: gets the adapters by name, for a
    server, which keeps them in host memory; None: not kept. Errors: as `LoadedModel.read_adapter`."""
    specs = {} if files is None else files.specs
    known = {path: spec for (path, _), (spec, anatomy) in specs.items() if anatomy is model.anatomy}
    threads = AHEAD if held is None else AHEAD_KEPT
    pool = ThreadPoolExecutor(threads, "trimtab-adapter", initializer=partial(_use_device, model.device))
    reading: deque[tuple[str, Future[HeldAdapter]]] = deque()

    def first() -> tuple[str, HeldAdapter]:
        name, future = reading.popleft()
        adapter = future.result()
        if held is not None:
            held[name] = adapter
        return name, adapter

    try:
        for name, path in model.plan.request.adapters.items():
            spec = known.get(path)
            is_same = spec is not None and spec.file.stamps == stamps_of(path)
            reading.append((name, pool.submit(read_held, model, match_planned(model, path, spec if is_same else None))))
            if len(reading) > threads:
                yield first()
        while reading:
            yield first()
    finally:
        pool.shutdown(cancel_futures=True)
