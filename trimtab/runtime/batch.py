"""How several requests answer together: each with its own adapter, length and sampling, one step of all of them at a time.

    batch = Batch(model, rows=8)
    prompt = batch.begin(inputs, request, adapter="medical")
    while not prompt.step(): ...         # in pieces, so that the other rows' steps can run between them
    row = batch.join(prompt)             # its first token is drawn
    for drawn in batch.step(): ...       # one token of every row
    batch.leave(row)

Rows stand close together from row 0 on: a row that leaves is filled by the last one, so that a step computes no empty
rows. The same row numbers would change then, so a request is known by the `Row` object it got. Not thread-safe: whoever
schedules calls from one thread. A row alone computes what `LoadedModel.generate` computes up to rounding: attention
reads a fixed number of places, where a growing cache has exactly as many as there are tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from trimtab.errors import DeviceError, RequestError
from trimtab.request import GenerateRequest
from trimtab.runtime import graphs, hf_generate, hf_slots
from trimtab.runtime.chat import Inputs, check_fits

Constraint = Callable[[Sequence[int], Tensor], Tensor]


@dataclass(eq=False)
class Row:
    """One request in the batch. token_ids: prompt and answer so far. finish: None while it goes on, "stop", "length" or
    "error": then `error` is why no token could be drawn for it, and the other rows go on."""

    adapter: str | None
    request: GenerateRequest
    sampler: hf_generate.Sampler
    token_ids: list[int]
    prompt_tokens: int
    number: int = -1
    finish: str | None = None
    constraint: Constraint | None = None
    error: Exception | None = None

    @property
    def answer_ids(self) -> list[int]:
        """The answer's tokens so far, its end token included."""
        return self.token_ids[self.prompt_tokens :]


@dataclass(frozen=True)
class Drawn:
    """One token of one row. logprob: of the token under the model's own distribution (before temperature and cuts), with
    `top`, the likeliest tokens, if the row asked for it."""

    row: Row
    token_id: int
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()


@dataclass(eq=False)
class Prompt:
    """A prompt on its way through the model. done_tokens: how much of it has gone through."""

    batch: Batch
    inputs: Inputs
    row: Row
    top_logprobs: int | None
    cache: Any
    done_tokens: int = 0
    logits: Tensor | None = None
    offset: int = 0

    def step(self) -> bool:
        """Put the next piece through the model; returns True when the whole prompt is through."""
        return self.batch._prefill(self)


@dataclass(eq=False)
class Batch:
    """Up to `rows` requests of one loaded model, decoded together. decode: how a step is computed, as in
    `graphs.Steps` (None: as the model was loaded).

    Errors: DeviceError at the first `join`, by name, for a family whose state cannot be kept by rows.
    """

    model: Any
    rows: int
    context_tokens: int | None = None
    decode: str | None = None
    active: list[Row] = field(default_factory=list)

    def __post_init__(self) -> None:
        if self.rows < 1:
            raise RequestError("a batch has at least one row", field="rows", value=self.rows)
        self.context_tokens = self.context_tokens or self.model.context_tokens
        self.ends = frozenset(hf_generate.end_token_ids(self.model.hf_model))
        self.cache = hf_slots.SlotCache(self.rows, self.context_tokens, self.model.device)
        self.tokens = torch.zeros(self.rows, 1, dtype=torch.long, device=self.model.device)
        self._top: dict[Row, int | None] = {}
        self.steps = graphs.Steps(self, self.decode or self.model.decode)

    @property
    def free_rows(self) -> int:
        """How many more requests can join."""
        return self.rows - len(self.active)

    def begin(
        self, inputs: Inputs, request: GenerateRequest, *, adapter: str | None = None,
        top_logprobs: int | None = None, constraint: Constraint | None = None,
    ) -> Prompt:  # fmt: skip
        """Return a prompt to put through the model. Nothing is computed yet, and no row is taken.

        top_logprobs: how many of the likeliest tokens to report with each token (0: the token's own alone; None: none).
        constraint: (token ids so far, scores [V]) -> scores, applied before sampling. Errors: RequestError if prompt and
        answer exceed the context, or for an adapter that is not loaded.
        """
        check_fits(self.model, inputs, request.max_new_tokens)
        if adapter is not None and adapter not in self.model.adapters:
            raise RequestError(
                "no adapter of this name is loaded", field="adapter", value=adapter, allowed=self.model.adapters
            )
        sampler = hf_generate.Sampler(request, self.model.device)
        row = Row(adapter, request, sampler, list(inputs.token_ids), inputs.prompt_tokens, constraint=constraint)
        return Prompt(self, inputs, row, top_logprobs, hf_slots.prompt_cache(self.model.hf_model))

    def _prefill(self, prompt: Prompt) -> bool:
        tensors, count = dict(prompt.inputs.tensors), prompt.inputs.prompt_tokens
        chunk = getattr(self.model, "prefill_tokens", None) or count
        start = prompt.done_tokens
        # A picture or sound has to be in one piece with its tokens.
        end = count if prompt.inputs.has_media else min(count, start + chunk)
        if not prompt.inputs.has_media:
            tensors = {
                "input_ids": tensors["input_ids"][:, start:end],
                "attention_mask": torch.ones(1, end, dtype=torch.long, device=self.model.device),
                **hf_slots.prompt_positions(self.model.hf_model, start, end, self.model.device),
            }
        self.model.route.set(prompt.row.adapter)
        hf_slots.reset_offset(self.model.hf_model)
        with torch.no_grad():
            found = self.model.hf_model(
                **tensors, past_key_values=prompt.cache, use_cache=True, logits_to_keep=1, return_dict=True
            )
        prompt.done_tokens = end
        if end == count:
            prompt.logits = found.logits[0, -1].float()
            prompt.offset = hf_slots.read_offset(self.model.hf_model) if prompt.inputs.has_media else 0
        return end == count

    def join(self, prompt: Prompt) -> Drawn:
        """Give a prompt that is through a row and draw its first token. Errors: RequestError if no row is free."""
        if prompt.logits is None:
            raise RequestError("the prompt is not through the model yet", field="prompt")
        if not self.free_rows:
            raise RequestError("every row of the batch is taken", field="rows", value=self.rows)
        row = prompt.row
        row.number = len(self.active)
        try:
            self.cache.fill(row.number, prompt.cache, prompt.inputs.prompt_tokens, offset=prompt.offset)
        except hf_slots.UnsupportedLayersError as exc:
            raise DeviceError(
                f"this family cannot be batched: {exc}", device=str(self.model.device),
                hint="Run the requests one at a time",
            ) from exc  # fmt: skip
        self.active.append(row)
        self._top[row] = prompt.top_logprobs
        try:
            found = self._draw(row, prompt.logits, int(graphs.with_likeliest(prompt.logits)[1]))
        except BaseException:
            self.leave(row)  # without a token it could not take part in a step
            raise
        prompt.logits, prompt.cache = None, None
        self._commit(found)
        self.tell_tokens()
        return found

    def step(self) -> list[Drawn]:
        """Return the next token of every row that has not finished, in the order of the rows; a row that no token could be
        drawn for has an `error` instead.

        Errors: RequestError if rows that differ in their adapters cannot be told apart by a layer.
        """
        going = [row for row in self.active if row.finish is None]
        if not going:
            return []
        logits, greedy = self._forward()
        # From here on the step counts as done: if memory ran out before, the same one can be done again.
        self._advance()
        likeliest = greedy.tolist()  # the step's one wait for the device
        found = []
        for row in going:
            try:
                found.append(self._draw(row, logits[row.number], likeliest[row.number]))
            except Exception as exc:
                row.error, row.finish = exc, "error"
        for drawn in found:
            self._commit(drawn)
        if not self.steps.wrote_tokens or any(d.token_id != likeliest[d.row.number] for d in found):
            self.tell_tokens()
        return found

    def logits(self) -> Tensor:
        """Return [rows, V] float32 of one decode step of all rows, their last tokens written into the cache."""
        found, _ = self._forward()
        self._advance()
        self.tell_tokens()  # a captured step has gone on to the likeliest ones
        return found

    def _forward(self) -> tuple[Tensor, Tensor]:
        return self.steps.run()

    def _advance(self) -> None:
        assert self.context_tokens is not None
        # A row that has finished and not left yet goes on writing into its last place.
        self.cache.positions[: len(self.active)].add_(1).clamp_(max=self.context_tokens - 1)

    def _draw(self, row: Row, logits: Tensor, likeliest: int) -> Drawn:
        if likeliest < 0:
            # A GPU that samples from such a row is lost for all of them.
            raise DeviceError(
                "the model's scores are not numbers", device=str(self.model.device),
                hint=f"Check the weights of adapter {row.adapter!r}" if row.adapter else "Check the model's weights",
            )  # fmt: skip
        if row.constraint is None and row.sampler.is_greedy:
            token = likeliest
        else:
            scores = logits if row.constraint is None else row.constraint(row.token_ids, logits)
            token = row.sampler.draw(row.token_ids, scores)
        asked = self._top[row]
        if asked is None:
            return Drawn(row, token)
        logprobs = torch.log_softmax(logits, dim=-1)
        values, ids = logprobs.topk(asked) if asked else (logprobs[:0], logprobs[:0])
        top = tuple((int(place), float(value)) for place, value in zip(ids.tolist(), values.tolist(), strict=True))
        return Drawn(row, token, float(logprobs[token]), top)

    def _commit(self, drawn: Drawn) -> None:
        row, token = drawn.row, drawn.token_id
        row.token_ids.append(token)
        if token in self.ends:
            row.finish = "stop"
        elif len(row.answer_ids) >= row.request.max_new_tokens:
            row.finish = "length"

    def tell_tokens(self) -> None:
        """Put each row's last token where the next step reads it."""
        tokens = torch.tensor([[row.token_ids[-1]] for row in self.active])
        self.tokens[: len(self.active)].copy_(tokens, non_blocking=True)

    def leave(self, row: Row) -> None:
        """Take a request out; the last row takes its place."""
        if row not in self.active:
            raise RequestError("this request is not in the batch", field="row", value=row.number)
        last = self.active.pop()
        del self._top[row]
        if last is not row:
            self.cache.move(last.number, row.number)
            self.active[row.number] = last
            last.number = row.number
            self.tell_tokens()
        row.number = -1
