"""The inputs of a decode step: buffers at fixed addresses, and the state of the rows at this step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from trimtab.engine.kv.kv_cache import BatchedKVCache


@dataclass(frozen=True, eq=False)
class StepBuffers:
    """The tensors that the steps of one batch read and write, at the same addresses in each of them.

    tokens [rows, 1] int64: each row's last token, where a step reads it and a captured one writes the next. cache: keys, values and
    positions of `rows` rows of up to context_tokens tokens.
    """

    tokens: Tensor
    cache: BatchedKVCache
    rows: int
    context_tokens: int


@dataclass(frozen=True)
class BatchState:
    """The rows of one step, from row 0 on.

    adapters: of each row, None for the base. last_tokens: of each row, as far as the host knows. longest: tokens of the longest
    row. A step that is queued ahead of its tokens has one more (`ahead`).
    """

    adapters: tuple[str | None, ...]
    last_tokens: tuple[int, ...]
    longest: int
    ahead: bool = False

    def __post_init__(self) -> None:
        if not self.adapters or len(self.adapters) != len(self.last_tokens):
            raise ValueError(f"{len(self.adapters)} adapters and {len(self.last_tokens)} tokens of rows")

    @property
    def count(self) -> int:
        """How many rows there are."""
        return len(self.adapters)

    @property
    def tokens_in_reach(self) -> int:
        """How many tokens the longest row has when the step runs."""
        return self.longest + self.ahead

    def uniform(self, adapter: str | None, count: int) -> BatchState:
        """Return the state of the first `count` rows, all with one adapter."""
        return BatchState((adapter,) * count, self.last_tokens[:count], self.longest, self.ahead)

    def any_of(self, token_ids: Sequence[int] | frozenset[int]) -> bool:
        """Whether a row's last token is one of these."""
        return any(token in token_ids for token in self.last_tokens)
