"""A prompt that is computed in chunks of a separate batch (prefill.py): what is computed, and what may come next."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from trimtab.engine.kv.prefix_store import Match
from trimtab.engine.passes.chunk_forward import Chunk
from trimtab.engine.passes.media_embeddings import Media


class Stage(Enum):
    """Where a prompt in progress stands. TOWERS: they have run, which is a piece by itself. CHUNKS: the next piece is a chunk.
    COMPLETE: none is left, or a step computes the last token."""

    TOWERS = "towers"
    CHUNKS = "chunks"
    COMPLETE = "complete"


# What may follow.
_FOLLOWING = {Stage.TOWERS: (Stage.CHUNKS,), Stage.CHUNKS: (Stage.CHUNKS, Stage.COMPLETE), Stage.COMPLETE: ()}


@dataclass(eq=False)
class PromptJob:
    """A prompt in progress: its chunks, and how many are computed. serial: of its adapter when it began. kept: the tokens that need
    no computation."""

    chunks: list[Chunk]
    media: Media | None
    offset: int
    serial: int | None
    kept: Match
    done: int = 0

    def __post_init__(self) -> None:
        self.stage = Stage.CHUNKS if self.media is None else Stage.TOWERS

    def enter(self, stage: Stage) -> None:
        """Go on to a stage. Errors: ValueError for one that cannot follow."""
        if stage not in _FOLLOWING[self.stage]:
            raise ValueError(f"{stage.value} cannot follow {self.stage.value}")
        self.stage = stage

    def cut(self, chunks: list[Chunk]) -> None:
        """Compute the rest in other chunks."""
        self.chunks[self.done :] = chunks

    def end_chunk(self, *, ends_in_step: bool) -> bool:
        """Record that a chunk is computed. Returns whether the prompt is complete, or all of it but what a step computes."""
        chunk, self.done = self.chunks[self.done], self.done + 1
        is_through = chunk.is_last or (ends_in_step and self.done == len(self.chunks))
        self.enter(Stage.COMPLETE if is_through else Stage.CHUNKS)
        if is_through:
            self.media = None
        return is_through
