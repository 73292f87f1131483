"""How do the parts of prefill see each other, and how is the next piece of a prompt computed?"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, MutableMapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import torch
from torch import Tensor

from trimtab.engine.batched_lora import columns as adapter_columns
from trimtab.engine.decode.decode_step import BatchState, DecodeStep
from trimtab.engine.families.chunk import ChunkLayers, LastLayers, pays
from trimtab.engine.families.mixture import hold
from trimtab.engine.kernels.dequantize import PromptKernels
from trimtab.engine.kv.kv_cache import BatchedKVCache
from trimtab.engine.kv.prefix_store import Match
from trimtab.engine.kv.sequence import Inputs, PrefillState, RowPages, TokenSequence
from trimtab.engine.layers.context import EngineContext
from trimtab.engine.layers.leaves import Leaf
from trimtab.engine.lora.store import Fitting, HeldAdapter, Place
from trimtab.engine.memory.shared_pool import PrefillMemoryPool
from trimtab.engine.passes import chunk_forward
from trimtab.engine.passes.chunk_forward import Chunk, ChunkForward, FirstLayers
from trimtab.engine.passes.media_embeddings import Media
from trimtab.engine.towers.graphs import Towers
from trimtab.errors import DeviceError
from trimtab.planning.values.execution import CHOSEN_ON_HOST

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


def layers_of(prompts: Passes, forward: ChunkForward, key: Hashable = None, name: str | None = None) -> FirstLayers | None:
    """Return the replacement of these layers in a pass, None where the modules compute them. key, name: of the one adapter of the
    pass, which is selected; None where its rows look theirs up."""
    step, store = prompts.batch.steps.fused_step(), prompts.model.adapter_store
    if step is None or not pays(step, prompts.device):
        return None
    if any(own.source is not None for number, own in step.decoder.attentions.items() if number < forward.first_shared):
        return None
    if prompts.firsts is None or prompts.firsts.step is not step:
        groups = [group for layer in step.layers[: forward.first_shared] for group in layer.products]
        columns = adapter_columns.choose_kept(prompts.model, prompts.kernels(), groups, prompts.fall_back)
        prompts.firsts = ChunkLayers(step, forward.first_shared, columns)
    prompts.firsts.forget()
    prompts.firsts.adds_experts = step.kernels.experts is not None and hold(step.layers, store)
    if (columns := prompts.firsts.columns) is not None:
        columns.weights.hold(key, None if key is None else store.selection.name, (name, prompts.serial_of(name)))
    return prompts.firsts.forward


def has_layers(prompts: Passes) -> bool:
    """Whether kernels of a step compute the layers of passes, not transformers' modules."""
    prompts.chunk_forward()  # the cache's layers are known from then on, and the step gives states memory
    return (step := prompts.batch.steps.fused_step()) is not None and pays(step, prompts.device)


def knows_padding(prompts: Passes) -> bool:
    """Whether padding behind a prompt leaves recurrent states as they are: a step's kernels receive the count, modules do not."""
    return not prompts.is_recurrent or has_layers(prompts)


def returns_states(batch: Rows, inputs: Inputs) -> bool:
    """Whether the states of all tokens of a text are computed in chunks of fixed shapes, independent of other requests."""
    fits = inputs.prompt_tokens < batch.cache.context_tokens  # the padding of a chunk is written behind it
    has_body = batch.model.hf_model.base_model is not batch.model.hf_model
    is_possible = bool(batch.prompts.sizes) and fits and has_body and not batch.is_invariant and not inputs.has_media
    return is_possible and knows_padding(batch.prompts)


def select_adapter(prompts: Passes, forward: ChunkForward, name: str | None) -> tuple[Hashable, int | None, bool]:
    """Select the adapter of the next pass and return the result of Layouts.set_adapter, and whether its layers are computed here
    and in chunk.py: where the batch's steps are made of kernels."""
    key, serial = prompts.layouts.set_adapter(name)
    step = prompts.batch.steps.fused_step()
    firsts = None if step is None else layers_of(prompts, forward, key, name)
    forward.use(firsts, None)
    if prompts.is_recurrent and firsts is None:  # an adapter that replaces norms came between two pieces
        raise DeviceError(
            "the kernels of a step compute this prompt's recurrent layers, and are not used any more",
            device=str(prompts.device), hint="Send the prompt again",
        )  # fmt: skip
    if step is None:
        return key, serial, False
    if forward.first_shared < len(forward.layers) and prompts.batch.cache.kv == "full":
        if prompts.lasts is None or prompts.lasts.step is not step:
            prompts.lasts = LastLayers(step, forward.first_shared, prompts.batch.cache.prompt_row)
        prompts.lasts.select(key, prompts.model.adapter_store.selection.name, prompts.layouts.names)
        forward.use(firsts, prompts.lasts.forward)
    return key, serial, True


def reads_experts(prompts: Passes) -> bool:
    """Whether the pass of the selected adapter reads on the host which experts were chosen: it cannot be captured, which a fallback
    says."""
    store = prompts.model.adapter_store
    if not store.reads_on_host():
        return False
    steps = prompts.batch.steps
    firsts = None if steps.kernels.experts is None or steps.fused_step() is None else prompts.firsts
    if firsts is not None and firsts.takes_many and (firsts.adds_experts or not store.changes_experts()):
        return False
    prompts.fall_back(CHOSEN_ON_HOST)
    return True


def may_be_open(prompts: Passes) -> bool:
    """Whether a batch may have such prompts: one of several rows, with room for the graphs of their chunks if they are captured.
    Captured chunks of such a prompt need no logits: neither the head nor the last token's pass through layers that share keys and
    values. The kernels of steps compute the token, whose scores differ from a chunk's by rounding."""
    return prompts.batch.rows > 1 and not prompts.batch.is_invariant and prompts.may_be_cut


def ends_in_step(prompt: PrefillState, batch: Rows, may_end_at: Callable[[int], bool] = lambda _: True) -> bool:
    """Return whether a step computes a prompt's last token. may_end_at: whether a chunk may end before a token.

    Without active rows no step would run anyway. Rows of a group copy the logits of one prompt, and the placeholder of an image or
    audio clip has no embedding. Batch-invariant answers have the bits of their chunks.
    """
    row = prompt.row
    if not prompt.may_end_in_step or prompt.returns_states or not batch.active or not may_be_open(batch.prompts) or row.group:
        return False
    return row.prompt_tokens > 1 and may_end_at(row.prompt_tokens - 1) and row.token_ids[-1] not in batch.prompts.placeholders


def chunks_of(
    prompt: PrefillState, sizes: Sequence[int], start: int, prefixes: PrefixUse, may_end_at: Callable[[int], bool] = lambda _: True
) -> list[Chunk] | None:
    """Return the chunks of a prompt from a token on, as `chunk_forward.chunks_of`; without its last token if a step computes that
    one."""
    count = prompt.inputs.prompt_tokens - prompt.ends_in_step
    if start == count:
        return []
    border = prefixes.border(prompt)
    chunks = chunk_forward.chunks_of(count, sizes, may_end_at=may_end_at, start=start, border=border)
    if chunks is None or not prompt.ends_in_step:
        return chunks
    return [replace(chunk, is_last=False) for chunk in chunks]


def share_of_layers(forward: ChunkForward) -> float:
    """Return the share of a model's layers that compute such a chunk: those with separate keys and values."""
    return forward.first_shared / max(len(forward.layers), 1)
