"""A request in a batch: its prompt while that is computed, its row while it decodes, and the tokens sampled for it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import Tensor

from trimtab.engine.batch import sampling as hf_generate
from trimtab.engine.prefill import prefix_cache
from trimtab.request import GenerateRequest

if TYPE_CHECKING:
    from trimtab.engine.batch.batch import Batch
    from trimtab.engine.chat.prompt import Inputs

Constraint = Callable[[Sequence[int], Tensor], Tensor]


@dataclass(eq=False)
class Row:
    """One request in the batch.

    adapter: a name, None for the base. request, sampler, constraint: how it is sampled. token_ids: prompt and answer so
    far; prompt_tokens: length of the prompt. number: its row in the cache, -1 without one. finish: None while it runs,
    "stop", "length" or "error"; then `error` is why no token could be sampled, and the other rows continue. client,
    cached_tokens, written, reuse: its prefix cache: the owner, tokens taken from it, positions written. group: rows with
    one prompt, whose computation is copied; shared_tokens: how much of it. logits: of the prompt's last token [V].
    """

    adapter: str | None
    request: GenerateRequest
    sampler: hf_generate.Sampler
    token_ids: list[int]
    prompt_tokens: int
    number: int = -1
    finish: str | None = None
    constraint: Constraint | None = None
    error: BaseException | None = None
    # Whose cached prefixes it may use (None: none), how many of its prompt's tokens it has used, and how many of its positions
    # have been written.
    client: str | None = None
    cached_tokens: int = 0
    written: int = 0
    reuse: prefix_cache.Reuse | None = None
    # Rows of one group have one prompt: what it computed is copied from row to row. logits: of the prompt's last token.
    group: str = ""
    logits: Tensor | None = None
    shared_tokens: int = 0
    pages: tuple[int, ...] | None = None  # of the pool, where rows share one

    @property
    def answer_ids(self) -> list[int]:
        """The answer's tokens so far, its end token included."""
        return self.token_ids[self.prompt_tokens :]


@dataclass(frozen=True)
class Drawn:
    """One sampled token of one row.

    token_id: its id. logprob: under the model's own distribution (before temperature and truncation). top: the most likely
    (token id, log-probability), if requested.
    """

    row: Row
    token_id: int
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True)
class First:
    """A prompt's first token on its way to the host, complete after `event`. why: the reason why none could be sampled."""

    token: Tensor
    event: Any
    why: Exception | None = None


@dataclass(eq=False)
class Prompt:
    """A prompt that is being computed.

    inputs: of `LoadedModel.prepare`. row: its request. top_logprobs: as in `Batch.begin`. done_tokens: tokens computed so
    far; chunk_tokens: length of the next chunk. logits: of its last token [V], once complete. cache, offset: where its keys
    and values are; no cache where captured chunks write them into the batch's own, and before transformers' pass. first: its
    first token on the way to the host. source: the row with the same prompt whose results it copies. ends_in_step: its last token
    goes through with the rows' next step (last_token.py); may_end_in_step: whether whoever steps the batch joins such prompts.
    """

    batch: Batch
    inputs: Inputs
    row: Row
    top_logprobs: int | None
    cache: Any = None
    done_tokens: int = 0
    logits: Tensor | None = None
    offset: int = 0
    chunk_tokens: int = 0
    first: First | None = None
    source: Row | None = None
    ends_in_step: bool = False
    may_end_in_step: bool = False

    @property
    def is_open(self) -> bool:
        """Whether all but its last token are complete, and that one goes through with the rows' next step."""
        return self.ends_in_step and self.logits is None and 0 < self.done_tokens == self.inputs.prompt_tokens - 1

    @property
    def needs_towers(self) -> bool:
        """Whether its next chunk is a pass of the towers, whose time does not depend on a number of tokens."""
        prompts = self.batch.prompts
        return (
            self.inputs.has_media
            and not self.done_tokens
            and self not in prompts.jobs
            and not prompts.tower_passes.has_embeddings(self)
        )

    def step(self, most_tokens: int | None = None) -> bool:
        """Compute the next chunk. Returns True when the whole prompt is complete, or all of it but its last token (`is_open`).

        most_tokens: the limit of the chunk, where its inputs can be cut. `chunk_tokens` is then the computed size, padding
        included; 0 for a pass of the towers, which is a chunk of its own in captured prompts. Errors: DoesNotFitError if rows
        share a pool of pages and it lacks room; then nothing has changed.
        """
        self.batch.pages.reserve(self.row)
        if not self.done_tokens and self.batch._fork(self):
            return True
        is_through = self.batch._prefill(self, most_tokens)
        self.batch.prefixes.piece_done(self)
        return is_through
