"""Further methods of `LoadedModel`: batches, several answers, embeddings, asyncio and the like."""

from __future__ import annotations

from collections.abc import AsyncIterator, Collection, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

from torch import Tensor

from trimtab.checkpoint.adapter import read_adapter
from trimtab.errors import DoesNotFitError, RequestError, gib
from trimtab.runtime import inner, lora, many, waiting
from trimtab.runtime.generate import Answer

if TYPE_CHECKING:
    from trimtab.request import GenerateRequest
    from trimtab.runtime.chat import Inputs
    from trimtab.runtime.conversation import Conversation


# Which adapter answers: a name, None for the base, or name -> weight for a weighted sum of several.
Chosen: TypeAlias = "str | Mapping[str, float] | None"


class Asking:
    """The base of `LoadedModel`: nothing here holds memory."""

    def __repr__(self: Any) -> str:
        """What it is, where it computes and which adapters it has."""
        if self._loaded is None:
            return f"LoadedModel({self.plan.request.model!r}, closed)"
        names = ", ".join(self.adapters) or "none"
        return (
            f"LoadedModel({self.plan.request.model!r}, {self.hf_model.config.architectures[0]}, {self.plan.request.quant} on "
            f"{self.device}, context {self.context_tokens}, adapters: {names})"
        )

    def batch(
        self, requests: Iterable[Any], *, rows: int | None = None, errors: str = "raise", **options: Any
    ) -> Iterator[Answer]:
        """Yield the answers of many requests in their order; they are decoded together.

        requests: prompts, or mappings with `prompt` and, as in `answer`, image, audio, system, adapter, template_kwargs and any
        option; read as rows become free. rows: decoded together, as many as were planned (`batch=` of the plan) if None.
        options: of requests that do not say otherwise. errors: "raise", or "return": a wrong request's RequestError stands in
        its answer's place. No other answer is begun before the last one is read or the iterator closed. Errors: RequestError;
        DeviceError if memory runs out.
        """
        return many.in_order(many.answers(self, requests, rows=rows, errors=errors, options=options))

    def batch_as_finished(
        self, requests: Iterable[Any], *, rows: int | None = None, errors: str = "raise", **options: Any
    ) -> Iterator[tuple[int, Answer]]:
        """Yield (index, answer) as answers are finished. Arguments and errors: as `batch`."""
        return many.answers(self, requests, rows=rows, errors=errors, options=options)

    def answers(self, prompt: Any, n: int, *, rows: int | None = None, **options: Any) -> tuple[Answer, ...]:
        """Return n answers to one prompt, sampled independently; the prompt goes through once for answers that are
        decoded together. options: as in `answer`; a seed counts up from answer to answer.

        Errors: RequestError for less than one, and for more than one at temperature 0, which would all be equal.
        """
        if not isinstance(n, int) or isinstance(n, bool) or n < 1:
            raise RequestError("must be an integer of at least 1", field="n", value=n)
        if n > 1 and not options.get("temperature"):
            raise RequestError("answers at temperature 0 are all equal", field="n", value=n, hint="Set a temperature")
        question = {name: options.pop(name) for name in many.QUESTION if name in options}
        seed = options.pop("seed", None)
        seeds: list[dict[str, Any]] = [{} if seed is None else {"seed": seed + number} for number in range(n)]
        requests = [{"prompt": prompt, **question, **one} for one in seeds]
        pairs = many.answers(self, requests, rows=rows, errors="raise", options=options, group="answers")
        return tuple(many.in_order(pairs))

    def question(self: Any, prompt: Any, options: Mapping[str, Any]) -> tuple[Inputs, GenerateRequest, Any]:
        """Return the inputs, sampling and adapter of `answer(prompt, **options)`. Errors: RequestError."""
        media = [options.get(name) for name in many.QUESTION[1:]]
        asked = {name: value for name, value in options.items() if name not in many.QUESTION}
        inputs, request = self._question(prompt, *media, asked)
        return inputs, request, media[many.QUESTION.index("adapter") - 1]

    # Other threads ----------------------------------------------------------------------------------------------------

    async def answer_async(self: Any, prompt: Any, **options: Any) -> Answer:
        """Return the whole answer, as `answer`, without holding up the event loop (asyncio). Cancelling it ends the answer."""
        found: list[Answer] = []
        async for _ in waiting.pieces(self, prompt, options, found):
            pass
        return found[0]

    def generate_async(self, prompt: Any, **options: Any) -> AsyncIterator[str]:
        """Yield the answer in pieces, as `generate`, without holding up the event loop (asyncio). Closing it ends the answer."""
        return waiting.pieces(self, prompt, options, [])

    # Inside -----------------------------------------------------------------------------------------------------------

    def embed(
        self: Any, texts: Sequence[Any], *, adapter: Chosen = None, pooling: str = "last", normalize: bool = True
    ) -> Tensor:
        """Return one vector for each text: its last hidden state, pooled. [N, D] float32 on the CPU.

        texts: taken as they are, without a chat template, or token ids. pooling: "last" (the last token's) or "mean".
        normalize: to length 1. Errors: RequestError for another pooling, an empty text, one longer than the context.
        """
        return inner.embed(self, texts, adapter=adapter, pooling=pooling, normalize=normalize)

    def hidden_states(self: Any, prompt: Any, *, adapter: Chosen = None, **media: Any) -> Tensor:
        """Return the hidden states of a prompt before the first layer and after each: [layers + 1, S, D] float32 on the CPU.

        The last one has gone through the final norm, as transformers' `output_hidden_states` has it. prompt, media: as in
        `answer`. Errors: RequestError.
        """
        return inner.hidden_states(self, prompt, adapter=adapter, **media)

    def _adapter_name(self: Any, adapter: Chosen, in_use: Collection[str | None] = ()) -> str | None:
        """Return under which name an adapter or mix is attached, which a mix is if it was not. Errors: as `Mixes.name_of`."""
        name: str | None = self.mixes.name_of(adapter, in_use) if isinstance(adapter, Mapping) else adapter
        return name

    # Conversations and adapters ---------------------------------------------------------------------------------------

    def chat(
        self, *, system: str | None = None, adapter: Chosen = None, when_full: str = "error", **options: Any
    ) -> Conversation:
        """Return a conversation whose turns are kept (`runtime/conversation.py`).

        adapter, options: as in `generate`, for every answer that does not say otherwise; without max_new_tokens an answer may
        take what is left of the context. when_full: "error" or "drop" (the oldest turns), once the context is full. Errors:
        RequestError.
        """
        from trimtab.runtime.conversation import Conversation

        return Conversation(self, system=system, adapter=adapter, when_full=when_full, **options)

    def reload_adapter(self: Any, name: str) -> bool:
        """Read an adapter's folder again if its files changed since it was loaded; returns whether they did.

        The new files are read and matched first: what is wrong with them leaves the old adapter in place. Errors: AdapterError,
        CheckpointError; DoesNotFitError if the new adapter is larger than the room that the plan leaves.
        """
        self._check_adapter(name)
        before = self._specs[name].file
        if tuple(read_adapter(before.folder, values=False).stamps) == tuple(before.stamps):
            return False
        held = self.read_adapter(before.folder)
        free = self.free_adapter_bytes() + self._adapter_bytes[name]
        if held.device_bytes > free:
            raise DoesNotFitError(
                f"the plan leaves {gib(max(free, 0))} for this adapter", block=f"adapter {name}", device=str(self.device),
                needed_bytes=held.device_bytes, budget_bytes=max(free, 0), hint="Plan again with the new files",
            )  # fmt: skip
        with self.turns.hold("reload_adapter"), self._out_of_memory_named(f"loading adapter {name}"):
            self.mixes.forget(name)
            lora.detach(self.hf_model, name, route=self.route)
            del self._specs[name], self._adapter_bytes[name]
            self._attach(name, held)
        return True
