"""The batch as the parts of prefill see it, and these parts as they see each other: types alone."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, MutableMapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import torch
from torch import Tensor

from trimtab.engine.decode.decode_step import BatchState, DecodeStep
from trimtab.engine.families.chunk import ChunkLayers, LastLayers
from trimtab.engine.kernels.dequantize import PromptKernels
from trimtab.engine.kv.kv_cache import BatchedKVCache
from trimtab.engine.kv.prefix_store import Match
from trimtab.engine.kv.sequence import PrefillState, RowPages, TokenSequence
from trimtab.engine.layers.context import EngineContext
from trimtab.engine.layers.leaves import Leaf
from trimtab.engine.lora.attached import Fitting
from trimtab.engine.lora.store import HeldAdapter, Place
from trimtab.engine.memory.shared_pool import PrefillMemoryPool
from trimtab.engine.passes.chunk_forward import Chunk, ChunkForward
from trimtab.engine.passes.media_embeddings import Media
from trimtab.engine.towers.graphs import Towers

if TYPE_CHECKING:
    from trimtab.engine.layers.leaves import GatheredTable


class Stage(Enum):
    """Where a prompt in progress stands. BEGUN: nothing is computed, or pieces of its towers. TOWERS: they have run, which is a
    piece by itself. CHUNKS: the next piece is a chunk. COMPLETE: none is left, or a step computes the last token."""

    BEGUN = "begun"
    TOWERS = "towers"
    CHUNKS = "chunks"
    COMPLETE = "complete"


# What may follow.
_FOLLOWING: dict[Stage, tuple[Stage, ...]] = {Stage.BEGUN: (Stage.TOWERS, Stage.CHUNKS), Stage.TOWERS: (Stage.CHUNKS,)}
_FOLLOWING |= {Stage.CHUNKS: (Stage.CHUNKS, Stage.COMPLETE), Stage.COMPLETE: ()}


@dataclass(eq=False)
class PromptJob:
    """A prompt in progress, which has the row of prompts: its chunks, and how many are computed. serial: of its adapter when it
    began. kept: the tokens that need no computation."""

    stage: Stage = Stage.BEGUN
    chunks: list[Chunk] = field(default_factory=list)
    media: Media | None = None
    offset: int = 0
    serial: int | None = None
    kept: Match = field(default_factory=Match)
    done: int = 0

    def begin(self, chunks: list[Chunk], media: Media | None, offset: int, serial: int | None, kept: Match) -> None:
        """Let chunks follow. media: of a prompt whose towers have run."""
        self.enter(Stage.CHUNKS if media is None else Stage.TOWERS)
        self.chunks, self.media, self.offset, self.serial, self.kept = chunks, media, offset, serial, kept

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


T = TypeVar("T")


class PrefillContext(EngineContext, Protocol):
    """A loaded model as prefill sees it."""

    @property
    def context_tokens(self) -> int: ...

    @property
    def prefill_tokens(self) -> int: ...

    @property
    def prompt_room(self) -> PrefillMemoryPool | None: ...

    @property
    def prefix_cache(self) -> Any: ...  # `PrefixCache`, which itself reads this

    def lend_prompt_room(self) -> None: ...

    def fitting(self, held: HeldAdapter) -> Fitting: ...

    def adapter_content(self, name: str | None) -> str: ...

    def tower_content(self, name: str | None) -> str: ...


class PrefixUse(Protocol):
    """The part of a prompt from the prefix cache."""

    def find(self, prompt: PrefillState, *, may_end_at: Callable[[int], bool] = ...) -> Match: ...

    def peek(self, prompt: PrefillState) -> int: ...

    def border(self, prompt: PrefillState) -> int: ...

    def resume(self, prompt: PrefillState) -> None: ...

    def into_row(self, match: Match, row: int) -> None: ...

    def piece_done(self, prompt: PrefillState) -> None: ...

    def encoders(self, prompt: PrefillState, counts: Counter[str]) -> dict[Place, object]: ...

    def count_media(self, counts: Counter[str]) -> None: ...


class TowerUse(Protocol):
    """The towers of prompts with media."""

    def is_between_pieces(self, prompt: PrefillState) -> bool: ...

    def has_embeddings(self, prompt: PrefillState) -> bool: ...

    def embedded(self, prompt: PrefillState, start: int, end: int) -> dict[Place, object]: ...

    def drop_embeddings(self, prompt: PrefillState) -> None: ...

    def with_towers(self, prompt: PrefillState, compute: Callable[[], T], *, is_counted: bool = True) -> T: ...


class LayoutUse(Protocol):
    """Where passes read adapters."""

    @property
    def names(self) -> set[str]: ...

    def set_adapter(self, name: str | None) -> tuple[Hashable, int | None]: ...

    def set_towers(self, name: str | None) -> tuple[Hashable, int | None]: ...


class Passes(Protocol):
    """The captured prompts of a batch (`PrefillRunner`), as the parts that it owns see them.

    is_recurrent: whether layers keep a state of all tokens.
    firsts, lasts: the computation of layers of a pass in place of modules, made for the present steps.
    """

    firsts: ChunkLayers | None
    lasts: LastLayers | None
    is_recurrent: bool
    four_bit: list[Leaf]

    @property
    def batch(self) -> Rows: ...

    @property
    def model(self) -> PrefillContext: ...

    @property
    def device(self) -> torch.device: ...

    @property
    def sizes(self) -> tuple[int, ...]: ...

    @property
    def captures(self) -> bool: ...

    @property
    def is_on(self) -> bool: ...

    @property
    def may_be_cut(self) -> bool: ...

    @property
    def most_packed(self) -> int: ...

    @property
    def jobs(self) -> MutableMapping[PrefillState, PromptJob]: ...

    @property
    def layouts(self) -> LayoutUse: ...

    @property
    def tower_passes(self) -> TowerUse: ...

    @property
    def towers(self) -> Towers: ...

    @property
    def room(self) -> PrefillMemoryPool | None: ...

    @property
    def staged_tables(self) -> Sequence[GatheredTable]: ...

    @property
    def placeholders(self) -> frozenset[int]: ...

    def chunk_forward(self) -> ChunkForward: ...

    def computed(
        self, key: tuple[Hashable, ...], serial: int | None, rows: Sequence[int], stage: Callable[[], None] = ...,
        *, at_once: bool = False,
    ) -> Tensor: ...  # fmt: skip

    def extra_bytes(self, sizes: Sequence[int] | None = None, *, adapters: bool = True) -> int: ...

    def fall_back(self, why: str, what: str = ...) -> None: ...

    def forget(self, key: Hashable) -> None: ...

    def has_room_for(self, graphs: int, spare_bytes: int) -> bool: ...

    def holds(self, prompt: PrefillState) -> bool: ...

    def kernels(self) -> PromptKernels: ...

    def left_bytes(self) -> int: ...

    def prepare(self, token: int, adapter: str | None, sizes: Sequence[int] | None = None) -> None: ...

    def release(self, prompt: PrefillState) -> None: ...

    def serial_of(self, name: str | None) -> int | None: ...

    def head_ops(self) -> AbstractContextManager[None]: ...

    def tower_ops(self) -> AbstractContextManager[None]: ...


class Rows(Protocol):
    """A batch as prefill sees it. active: the rows that decode; placed: those whose prompts are complete."""

    @property
    def model(self) -> PrefillContext: ...

    @property
    def rows(self) -> int: ...

    @property
    def context_tokens(self) -> int | None: ...

    @property
    def cache(self) -> BatchedKVCache: ...

    @property
    def pages(self) -> RowPages: ...

    @property
    def steps(self) -> DecodeStep: ...

    @property
    def prompts(self) -> Passes: ...

    @property
    def prefixes(self) -> PrefixUse: ...

    @property
    def active(self) -> Sequence[TokenSequence]: ...

    @property
    def placed(self) -> Sequence[TokenSequence]: ...

    @property
    def free_rows(self) -> int: ...

    @property
    def is_invariant(self) -> bool: ...

    def state(self) -> BatchState: ...

    def stand_ins(self, token: int) -> AbstractContextManager[None]: ...
