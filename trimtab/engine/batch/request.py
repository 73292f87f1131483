"""What is a request in a batch: its prompt, its row, and how its tokens are sampled?"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
import transformers
from torch import Tensor

from trimtab.engine.kernels.embed_and_logits import with_argmax, without
from trimtab.engine.kv.sequence import PrefillState, TokenSequence
from trimtab.engine.prefill.rows import Rows, Stage
from trimtab.errors import DeviceError, RequestError
from trimtab.request import GenerateRequest


class AnswerPenalties(transformers.LogitsProcessor):  # type: ignore[misc]
    """Adds a bias to the logits of named tokens, and takes penalties from those of tokens that the answer already has.

    The first call sees the prompt alone: later tokens are the answer. Source: OpenAI's API reference, "Advanced usage",
    logits[j] -= count[j] * frequency_penalty + (count[j] > 0) * presence_penalty; as vLLM does, tokens of the prompt are not
    counted. Errors: RequestError for a token id that the model has no logit for.
    """

    def __init__(self, request: GenerateRequest) -> None:
        self.presence, self.frequency = request.presence_penalty, request.frequency_penalty
        self._bias = dict(request.logit_bias)
        self._prompt_tokens: int | None = None
        self._added: Tensor | None = None  # [V]

    @classmethod
    def of(cls, request: GenerateRequest) -> AnswerPenalties | None:
        """Return the sampling of a request, None if it changes nothing."""
        return cls(request) if request.presence_penalty or request.frequency_penalty or request.logit_bias else None

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        if self._prompt_tokens is None:
            self._prompt_tokens = input_ids.shape[-1]
        if self._bias:
            scores = scores + self._bias_of(scores)
        answer = input_ids[:, self._prompt_tokens :]
        if answer.shape[-1] and (self.presence or self.frequency):
            counts = torch.zeros_like(scores).scatter_add_(1, answer, torch.ones_like(answer, dtype=scores.dtype))
            scores = scores - counts * self.frequency - (counts > 0).to(scores.dtype) * self.presence
        return scores

    def _bias_of(self, scores: Tensor) -> Tensor:
        if self._added is None:
            known = scores.shape[-1]
            if max(self._bias) >= known:
                raise RequestError(f"token ids are below {known}", field="logit_bias", value=max(self._bias))
            ids = torch.tensor(list(self._bias), device=scores.device)
            values = torch.tensor(list(self._bias.values()), device=scores.device, dtype=scores.dtype)
            self._added = torch.zeros(known, device=scores.device, dtype=scores.dtype).index_copy_(0, ids, values)
        return self._added


class Suppressed(transformers.LogitsProcessor):  # type: ignore[misc]
    """Leaves tokens out of an answer: always, and as its first one. The first call sees the prompt alone. Shapes: [k] int64.

    Transformers' own processors search the whole vocabulary for them at each token, and need the prompt's length.
    """

    def __init__(self, always: Tensor | None, first: Tensor | None) -> None:
        self._always, self._first = always, first
        self._prompt_tokens: int | None = None

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        count = input_ids.shape[-1]
        self._prompt_tokens = count if self._prompt_tokens is None else self._prompt_tokens
        for ids in (self._always, self._first if count == self._prompt_tokens else None):
            scores = scores if ids is None else scores.index_fill(-1, ids, -math.inf)
        return scores


class Sampler:
    """Draws the tokens of one request: transformers' own processors in the order in which `generate` applies them.

    The same seed draws the same tokens as `generate` for a batch of one: each row has a separate generator.
    suppressed, suppressed_first: tokens [k] int64 that the answer does not have, and does not begin with.
    """

    def __init__(
        self, request: GenerateRequest, device: torch.device, suppressed: Tensor | None = None,
        suppressed_first: Tensor | None = None,
    ) -> None:  # fmt: skip
        self._processors = transformers.LogitsProcessorList()
        self._looks_back = request.repetition_penalty is not None
        self._ids: Tensor | None = None  # [1, n], the first `_known` of them are the request's known tokens
        self._known = 0
        if request.repetition_penalty is not None:
            penalty = transformers.RepetitionPenaltyLogitsProcessor(penalty=request.repetition_penalty)
            self._processors.append(penalty)
        if (changes := AnswerPenalties.of(request)) is not None:
            self._looks_back = True
            self._processors.append(changes)
        self._suppressed = suppressed
        if suppressed_first is not None or (suppressed is not None and (self._processors or request.temperature)):
            self._looks_back = self._looks_back or suppressed_first is not None
            self._processors.append(Suppressed(suppressed, suppressed_first))
        self._generator: torch.Generator | None = None
        self.alike: object = None  # equal for samplers that change scores alike, by the scores alone
        if request.temperature == 0:
            return
        self._generator = torch.Generator(device)
        if request.seed is not None:
            self._generator.manual_seed(request.seed)
        else:
            self._generator.seed()
        if request.temperature != 1:
            self._processors.append(transformers.TemperatureLogitsWarper(float(request.temperature)))
        if request.top_k:
            self._processors.append(transformers.TopKLogitsWarper(top_k=request.top_k))
        if request.top_p is not None and request.top_p < 1:
            self._processors.append(transformers.TopPLogitsWarper(top_p=request.top_p))
        if request.min_p is not None:
            self._processors.append(transformers.MinPLogitsWarper(min_p=request.min_p))

        # Sums over all words have other bits in a batch on a GPU, and these processors compare sums.
        cuts = (request.top_p is not None and request.top_p < 1) or request.min_p is not None
        self.alike = None if self._looks_back or cuts else (request.temperature, request.top_k)

    @property
    def is_greedy(self) -> bool:
        """Whether it takes the most likely token that is not suppressed, as steps give it."""
        return not self._processors and self._generator is None

    @property
    def is_plain(self) -> bool:
        """Whether it takes the most likely token of all."""
        return self.is_greedy and self._suppressed is None

    def draw(self, token_ids: Sequence[int], logits: Tensor) -> int:
        """Return the next token. token_ids: prompt and answer so far. logits: [V] float32. Errors: DeviceError if there is
        none to draw."""
        token = int(self.queue(token_ids, logits))
        if token < 0:
            raise DeviceError(
                "every token has probability 0", device=str(logits.device),
                hint="Check the model's weights, and the tokens that its generation_config.json suppresses",
            )  # fmt: skip
        return token

    def queue(self, token_ids: Sequence[int], logits: Tensor) -> Tensor:
        """Return the next token as `draw` does, [] int64 on the scores' device: nothing here waits for it. -1: there is none.

        Draws as torch.multinomial does for one token (the same generator, the same token), which waits twice for the device
        to check its input.
        """
        if self.is_plain:
            return logits.argmax()
        if self.is_greedy:
            return without(with_argmax(logits), self._suppressed)[1]
        scores = self._processors(self._history(token_ids, logits.device), logits[None].clone())
        return with_argmax(scores[0])[1] if self._generator is None else _drawn([self], scores)[0]

    def changed(self, logits: Tensor) -> Tensor:
        """Return the scores [n, V] of rows whose samplers are `alike`; no processor of these writes into what it is given."""
        if not self._processors:
            return logits
        return self._processors(torch.empty(len(logits), 0, dtype=torch.long, device=logits.device), logits)

    def _history(self, token_ids: Sequence[int], device: torch.device) -> Tensor:
        """Return the tokens so far [1, n] on the device, to which only new ones are copied; none if no processor needs them."""
        if not self._looks_back:
            return torch.empty(1, 0, dtype=torch.long, device=device)
        count = len(token_ids)
        if self._ids is None or not self._known <= count <= self._ids.shape[1]:
            self._ids, self._known = torch.zeros(1, 2 * count + 64, dtype=torch.long, device=device), 0
        if count > self._known:
            new = torch.tensor(token_ids[self._known :])
            self._ids[0, self._known : count].copy_(new, non_blocking=True)
            self._known = count
        return self._ids[:, :count]


@dataclass(frozen=True, eq=False)
class Draw:
    """A token to be drawn. index: of the row in the step. token_ids: of its prompt and answer so far."""

    sampler: Sampler
    token_ids: Sequence[int]
    index: int


# Rows that are drawn at once: their scores take memory that no plan counts.
MOST_TOGETHER = 8


def queue_draws(draws: Sequence[Draw], logits: Tensor, chosen: Tensor) -> dict[int, Exception]:
    """Write drawn tokens to `chosen` [rows] int64, but where it is below 0; return why a row has none, by its index.

    Rows whose samplers are `alike` are drawn together: a row alone takes ten small operations, and 32 rows as many times more.
    Each row still has its generator, and gets the token that `Sampler.queue` draws. logits: [rows, V] float32.
    """
    groups: dict[object, list[Draw]] = {}
    for draw in draws:
        is_alone = draw.sampler.alike is None or logits.shape[-1] % 4 != 0  # rows of another alignment are summed otherwise
        groups.setdefault(draw if is_alone else draw.sampler.alike, []).append(draw)
    batches = [group[at : at + MOST_TOGETHER] for group in groups.values() for at in range(0, len(group), MOST_TOGETHER)]
    failed: dict[int, Exception] = {}
    while batches:
        batch = batches.pop()
        try:
            _write_drawn(batch, logits, chosen)
        except Exception as exc:
            if len(batch) > 1:  # memory may suffice for one at a time
                batches += [[draw] for draw in batch]
            else:
                failed[batch[0].index] = exc
    return failed


def _write_drawn(batch: Sequence[Draw], logits: Tensor, chosen: Tensor) -> None:
    first, rows = batch[0], [draw.index for draw in batch]
    if len(batch) == 1:
        at: slice | Tensor = slice(first.index, first.index + 1)
        tokens = first.sampler.queue(first.token_ids, logits[first.index])
    else:
        is_run = rows == list(range(rows[0], rows[0] + len(rows)))
        at = slice(rows[0], rows[-1] + 1) if is_run else torch.tensor(rows).to(logits.device, non_blocking=True)
        tokens = _drawn([draw.sampler for draw in batch], first.sampler.changed(logits[at]))
    chosen[at] = torch.where(chosen[at] < 0, chosen[at], tokens)


def _drawn(samplers: Sequence[Sampler], scores: Tensor) -> Tensor:
    """Return a token for each row of scores [n, V], -1 where there is none. Generators advance behind what takes memory."""
    weights = torch.softmax(scores, dim=-1)
    noise = torch.empty_like(weights)
    is_any = weights.sum(-1) > 0  # no number is larger than nothing
    for row, sampler in zip(noise, samplers, strict=True):
        row.exponential_(1, generator=sampler._generator)
    return torch.where(is_any, weights.div_(noise).argmax(-1), -1)


def check_logits(logits: Tensor, *, adapter: str | None) -> None:
    """Raise DeviceError unless the largest logit of every row is finite: from such a row no token can be chosen."""
    if not bool(logits.max(dim=-1).values.isfinite().all()):
        raise no_numbers(logits.device, adapter=adapter)


def no_numbers(device: torch.device, *, adapter: str | None) -> DeviceError:
    """Return the error for logits that are NaN or infinite."""
    hint = f"Check the weights of adapter {adapter!r}" if adapter else "Check the model's weights"
    return DeviceError("the model's logits are NaN or infinite", device=str(device), hint=hint)


Constraint = Callable[[Sequence[int], Tensor], Tensor]


@dataclass(eq=False)
class Row(TokenSequence):
    """One request in the batch: its tokens, and how they are sampled.

    sampler: of its request. constraint: (token ids so far, logits [V]) -> logits, applied before sampling.
    """

    sampler: Sampler = field(kw_only=True)
    constraint: Constraint | None = None


@dataclass(frozen=True)
class SampledToken:
    """One sampled token of one row.

    token_id: its id. logprob: under the model's own distribution (before temperature and truncation). top: the most likely
    (token id, log-probability), if requested.
    """

    row: Row
    token_id: int
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()

    @classmethod
    def of(cls, row: Row, logits: Tensor, token: int, top_count: int | None) -> SampledToken:
        """Return a row's token: the drawn one, or one that its constraint allows. logits: [V]. token: -1 if there is none.
        top_count: as `top_logprobs` of `Batch.begin`. Errors: DeviceError if there is none."""
        if token < 0:
            # A GPU that samples from such a row is lost for all of them.
            raise no_numbers(logits.device, adapter=row.adapter)
        if row.constraint is not None:
            token = row.sampler.draw(row.token_ids, row.constraint(row.token_ids, logits))
        if top_count is None:
            return cls(row, token)
        logprobs = torch.log_softmax(logits, dim=-1)
        values, ids = logprobs.topk(top_count) if top_count else (logprobs[:0], logprobs[:0])
        top = tuple((int(place), float(value)) for place, value in zip(ids.tolist(), values.tolist(), strict=True))
        return cls(row, token, float(logprobs[token]), top)


@dataclass(frozen=True)
class PendingToken:
    """A prompt's first token in transfer to the host, complete after `event`. why: the reason why none could be sampled."""

    token: Tensor
    event: torch.cuda.Event | None
    why: Exception | None = None

    @classmethod
    def of(cls, row: Row, logits: Tensor) -> PendingToken:
        """Queue the sampling of a row's first token. logits: of its prompt's last one [V]."""
        token, why = with_argmax(logits)[1], None
        if row.constraint is None and not row.sampler.is_plain:
            try:
                token = torch.where(token < 0, token, row.sampler.queue(row.token_ids, logits))
            except Exception as exc:  # raised where the row's token is read
                why = exc
        on_gpu = token.device.type == "cuda"
        host = torch.empty((), dtype=torch.long, pin_memory=on_gpu)
        host.copy_(token, non_blocking=True)
        event = torch.cuda.current_stream(token.device).record_event() if on_gpu else None
        return cls(host, event, why)


class PromptRows(Rows, Protocol):
    """A batch as its prompts see it."""

    def fork(self, prompt: Prompt) -> bool: ...

    def prefill(self, prompt: Prompt, most_tokens: int | None = None) -> bool: ...


@dataclass(eq=False)
class Prompt(PrefillState):
    """A prompt that is being computed.

    row: its request. top_logprobs: as in `Batch.begin`. first: its first token on the way to the host. source: the row with the
    same prompt whose results it copies.
    """

    row: Row
    batch: PromptRows = field(kw_only=True)
    top_logprobs: int | None = None
    first: PendingToken | None = None
    source: Row | None = None

    def copy_from(self, row: Row) -> None:
        """Take the results of a row with the same prompt."""
        self.source = row
        self.row.share(self.row.prompt_tokens)

    def draw(self, first: PendingToken) -> None:
        """Record that its first token is on the way."""
        self.first = first

    def release_logits(self) -> None:
        """Drop the logits and the first token: it is in the row."""
        super().release_logits()
        self.first = None

    @property
    def needs_towers(self) -> bool:
        """Whether its next chunk is a pass of the towers, whose time does not depend on a number of tokens."""
        prompts = self.batch.prompts
        return (
            self.inputs.has_media
            and not self.done_tokens
            and ((job := prompts.jobs.get(self)) is None or job.stage is Stage.BEGUN)
            and not prompts.tower_passes.has_embeddings(self)
        )

    def step(self, most_tokens: int | None = None) -> bool:
        """Compute the next chunk. Returns True when the whole prompt is complete, or all of it but its last token (`is_open`).

        most_tokens: the limit of the chunk, where its inputs can be cut. `chunk_tokens` is then the computed size, padding
        included; 0 for a pass of the towers, which is a separate chunk in captured prompts. Errors: DoesNotFitError if rows
        share a pool of pages and it lacks room; then nothing has changed.
        """
        self.batch.pages.reserve(self.row)
        if not self.done_tokens and self.batch.fork(self):
            return True
        is_through = self.batch.prefill(self, most_tokens)
        self.batch.prefixes.piece_done(self)
        return is_through

    def compute(self, most_tokens: int | None = None) -> Prompt:
        """Compute all chunks that are left, as `step` does each. Returns the prompt."""
        while not self.step(most_tokens):
            pass
        return self
