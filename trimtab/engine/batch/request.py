"""A request in a batch: its prompt while that is computed, its row while it decodes, and the tokens sampled for it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from torch import Tensor

from trimtab.engine.batch import sampling as hf_generate
from trimtab.engine.kv.sequence import PrefillState, TokenSequence

if TYPE_CHECKING:
    import torch

    from trimtab.engine.batch.batch import Batch

Constraint = Callable[[Sequence[int], Tensor], Tensor]


@dataclass(eq=False)
class Row(TokenSequence):
    """One request in the batch: its tokens, and how they are sampled.

    sampler: of its request. constraint: (token ids so far, logits [V]) -> logits, applied before sampling.
    """

    sampler: hf_generate.Sampler = field(kw_only=True)
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


@dataclass(frozen=True)
class PendingToken:
    """A prompt's first token in transfer to the host, complete after `event`. why: the reason why none could be sampled."""

    token: Tensor
    event: torch.cuda.Event | None
    why: Exception | None = None


@dataclass(eq=False)
class Prompt(PrefillState):
    """A prompt that is being computed.

    row: its request. top_logprobs: as in `Batch.begin`. first: its first token on the way to the host. source: the row with the
    same prompt whose results it copies.
    """

    row: Row
    batch: Batch = field(kw_only=True)
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
            and self not in prompts.jobs
            and not prompts.tower_passes.has_embeddings(self)
        )

    def step(self, most_tokens: int | None = None) -> bool:
        """Compute the next chunk. Returns True when the whole prompt is complete, or all of it but its last token (`is_open`).

        most_tokens: the limit of the chunk, where its inputs can be cut. `chunk_tokens` is then the computed size, padding
        included; 0 for a pass of the towers, which is a separate chunk in captured prompts. Errors: DoesNotFitError if rows
        share a pool of pages and it lacks room; then nothing has changed.
        """
        self.batch.pages.reserve(self.row)
        if not self.done_tokens and self.batch._fork(self):
            return True
        is_through = self.batch._prefill(self, most_tokens)
        self.batch.prefixes.piece_done(self)
        return is_through
