"""The state of a request below its batch: its inputs, its tokens, how much of its prompt is computed, and how its positions turn.

Every prompt turns as if it were computed alone and whole. The rotation "longrope" has other angles behind
`original_max_position_embeddings`, "dynamic" for each length. transformers (5.6.2 to 5.23, modeling_rope_utils.py) chooses those of
all rows of a pass by its longest position, and "dynamic" keeps an earlier, longer text's.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from trimtab.engine.kv.prefix_store import Mark, PrefixKey
from trimtab.request import GenerateRequest

if TYPE_CHECKING:
    from transformers.cache_utils import Cache

    from trimtab.engine.formats.hf_types import HFModel


@dataclass(frozen=True)
class Inputs:
    """The inputs of a forward pass: tensors on the execution device, floats in the model's dtype, one row.

    marks: the tokens of each image or audio clip, with the digest of its content; empty where that is unknown. turns: the
    number of tokens up to the end of each turn. opening: how many tokens all chats with its tools and system messages begin with; 0
    without any, and where no prefix cache needs the number.
    """

    tensors: Mapping[str, Tensor]
    prompt_tokens: int
    token_ids: tuple[int, ...]
    has_media: bool
    marks: tuple[Mark, ...] = ()
    turns: tuple[int, ...] = ()
    opening: int = 0

    def to(self, device: torch.device) -> Inputs:
        """Return the same inputs on a device."""
        return replace(self, tensors={name: tensor.to(device) for name, tensor in self.tensors.items()})


@dataclass(eq=False)
class Reuse:
    """The prefix that a request reuses and caches.

    key: of its prompt. serial: of its adapter when it began. border: where its prompt is cut for a snapshot, from which later
    prompts resume. places: where else snapshots are taken, of the states at its end. offset: of positions after its images.
    logits: of its last token, if the whole prompt is cached.
    """

    key: PrefixKey
    serial: int | None
    border: int | None = None
    places: tuple[int, ...] = ()
    offset: int | None = None
    logits: Tensor | None = None

    def pass_border(self) -> None:
        """Record that the prompt was cut for its snapshot."""
        self.border = None

    def end_prompt(self, offset: int) -> None:
        """Record the offset of positions, which is known at the prompt's end."""
        self.offset = offset


@dataclass(eq=False)
class TokenSequence:
    """The tokens of one request, and where their keys and values are.

    adapter: a name, None for the base. token_ids: prompt and answer so far; prompt_tokens: length of the prompt. number: its row in
    the cache, -1 without one. finish: None while it runs, "stop", "length" or "error"; then `error` is why no token could be
    sampled, and the other rows continue. client: whose cached prefixes it may use, None for none; cached_tokens: how many of its
    prompt's tokens it took from them; written: positions written; reuse: its reused prefix. group: rows with one prompt, whose
    computation is copied; shared_tokens: how much of it. logits: of the prompt's last token [V]. pages: of the pool, where rows
    share one.
    """

    adapter: str | None
    request: GenerateRequest
    token_ids: list[int]
    prompt_tokens: int
    number: int = -1
    finish: str | None = None
    error: BaseException | None = None
    client: str | None = None
    cached_tokens: int = 0
    written: int = 0
    reuse: Reuse | None = None
    group: str = ""
    logits: Tensor | None = None
    shared_tokens: int = 0
    pages: tuple[int, ...] | None = None

    @property
    def answer_ids(self) -> list[int]:
        """The answer's tokens so far, its end token included."""
        return self.token_ids[self.prompt_tokens :]

    # Only these write where a sequence stands: it gets an adapter and a row, is moved, has positions written and ends.

    def use_adapter(self, adapter: str | None) -> None:
        """Answer with the adapter of this name."""
        self.adapter = adapter

    def place(self, number: int, written: int) -> None:
        """Give it a row of the cache, which has this many of its positions."""
        self.number, self.written = number, written

    def move(self, number: int) -> None:
        """Record another row; -1 for none."""
        self.number = number

    def write(self, positions: int = 1) -> None:
        """Record more written positions."""
        self.written += positions

    def end(self, finish: str, error: BaseException | None = None) -> None:
        """Let it end: "stop", "length", or "error" and why no token could be sampled."""
        self.finish, self.error = finish, error

    def begin_reuse(self, reuse: Reuse | None, cached_tokens: int) -> None:
        """Record which prefix it takes from a cache, and how many tokens of it."""
        self.reuse, self.cached_tokens = reuse, cached_tokens

    def share(self, tokens: int) -> None:
        """Record how much of its prompt another row of its group has computed."""
        self.shared_tokens = tokens

    def keep_logits(self, logits: Tensor) -> None:
        """Keep the logits [V] of the prompt's last token for others of its group."""
        self.logits = logits

    def forget_states(self) -> None:
        """Let nothing of it be cached or copied."""
        self.reuse = self.logits = None


@dataclass(eq=False)
class PrefillState:
    """How much of a prompt is computed.

    inputs: of `LoadedModel.prepare`. row: its request. done_tokens: tokens computed so far; chunk_tokens: length of the next chunk.
    logits: of its last token [V], once complete. cache, offset: where its keys and values are; no cache where captured chunks write
    them into the batch's own, and before transformers' pass. ends_in_step: the rows' next step computes its last token
    (last_token.py); may_end_in_step: whether the caller of the batch's steps joins such prompts.
    """

    inputs: Inputs
    row: TokenSequence
    cache: Cache | None = None
    done_tokens: int = 0
    logits: Tensor | None = None
    offset: int = 0
    chunk_tokens: int = 0
    ends_in_step: bool = False
    may_end_in_step: bool = False

    @property
    def is_open(self) -> bool:
        """Whether all but its last token are complete, and the rows' next step computes that one."""
        return self.ends_in_step and self.logits is None and 0 < self.done_tokens == self.inputs.prompt_tokens - 1

    # Only these write the state: a prompt begins, has chunks computed or takes states, and gives them to its row or restarts.
    # `may_end_in_step` is a setting of the caller.

    def begin(self, *, ends_in_step: bool) -> None:
        """Record how a prompt without a computed token is computed: with or without its last token."""
        self.ends_in_step, self.offset = ends_in_step, 0

    def begin_chunk(self, tokens: int, *, cache: Cache | None = None) -> None:
        """Record the size of the next chunk, padding included; 0 for a pass of towers. cache: where transformers' pass writes."""
        self.chunk_tokens = tokens
        if cache is not None:
            self.cache = cache

    def end_chunk(self, done_tokens: int, *, logits: Tensor | None = None, offset: int | None = None) -> None:
        """Record a computed chunk. logits [V]: of the last token, once all are computed. offset: of later positions."""
        assert self.done_tokens < done_tokens <= self.inputs.prompt_tokens
        assert (logits is not None) == (done_tokens == self.inputs.prompt_tokens)
        self.done_tokens = done_tokens
        if logits is not None:
            self.logits = logits
        if offset is not None:
            self.offset = offset

    def take_states(
        self, tokens: int, *, logits: Tensor | None = None, cache: Cache | None = None, offset: int | None = None
    ) -> None:
        """Take states that were computed elsewhere: cached ones, another row's, or those of a pass of several prompts."""
        self.done_tokens, self.logits, self.chunk_tokens = tokens, logits, 0
        if cache is not None:
            self.cache = cache
        if offset is not None:
            self.offset = offset

    def release_cache(self) -> None:
        """Drop the keys and values that the row of the prompt now has."""
        self.cache = None

    def release_logits(self) -> None:
        """Drop the logits: the first token is sampled."""
        self.logits = None

    def restart(self, *, keeps_logits: bool = False) -> None:
        """Drop the states: every token is computed again. keeps_logits: the prompt is complete and lost its states alone."""
        self.cache, self.done_tokens = None, 0
        if not keeps_logits:
            self.logits = None


def turn_alone(hf_model: HFModel, rotations: Iterable[nn.Module]) -> None:
    """Make the angles of each row independent of other rows and of earlier texts."""
    own = _ALONE[hf_model] = _Alone()
    for module in rotations:
        module.register_forward_hook(own.turn, with_kwargs=True)


def text_of(hf_model: HFModel, tokens: int) -> AbstractContextManager[None]:
    """Return a context in which passes compute chunks of one text of at least `tokens` tokens."""
    return _ALONE[hf_model].text(tokens) if hf_model in _ALONE else nullcontext()


class _Alone:
    """tokens: of the text whose chunks are computed; 0 where each row is as long as its last position says."""

    tokens = 0

    @contextmanager
    def text(self, tokens: int) -> Iterator[None]:
        before, self.tokens = self.tokens, tokens
        try:
            yield
        finally:
            self.tokens = before

    def turn(self, rotary: nn.Module, args: tuple[object, ...], kwargs: dict[str, object], output: object) -> object:
        """Return cos and sin [..., B, S, D] of positions [..., B, S], or both as complex numbers."""
        more = dict(zip(("x", "position_ids", "layer_type"), args, strict=False)) | kwargs
        x, positions = more.pop("x"), more.pop("position_ids")
        assert isinstance(positions, Tensor)
        count = positions.shape[-1]
        if self.tokens:
            positions = torch.cat((positions, torch.full_like(positions[..., :1], self.tokens - 1)), dim=-1)
        rows = []
        for row in positions.split(1, dim=-2):
            rotary.forward(x, torch.zeros_like(row), **more)  # a short text: "dynamic" forgets an earlier one
            rows.append(rotary.forward(x, row, **more))
        if isinstance(output, Tensor):
            return torch.cat(rows, dim=-3)[..., :count, :]
        return tuple(torch.cat(parts, dim=-3)[..., :count, :] for parts in zip(*rows, strict=True))


_ALONE: WeakKeyDictionary[HFModel, _Alone] = WeakKeyDictionary()
