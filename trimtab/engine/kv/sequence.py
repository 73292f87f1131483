"""What is the state of a request below its batch: inputs, tokens, pages and positions?"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Protocol
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from trimtab.engine.kv.prefix_store import Mark, PrefixKey
from trimtab.errors import DoesNotFitError, RequestError
from trimtab.planning.values.byte_sizes import FIRST, NONE, PAGE_TOKENS, SCRAP, pages_of
from trimtab.request import GenerateRequest

if TYPE_CHECKING:
    from transformers.cache_utils import Cache

    from trimtab.engine.formats.hf_types import HFModel


# Inputs and tokens ----------------------------------------------------------------------------------------------------


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
    (rows.py); may_end_in_step: whether the caller of the batch's steps joins such prompts. returns_states: whether each chunk
    has `states` [n, D] of its tokens, until the next pass (chunk_forward.py); the reader gives the logits.
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
    returns_states: bool = False
    states: Tensor | None = None

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

    def end_chunk(
        self, done_tokens: int, *, logits: Tensor | None = None, offset: int | None = None, states: Tensor | None = None
    ) -> None:
        """Record a computed chunk. logits [V]: of the last token, once all are computed. offset: of later positions."""
        assert self.done_tokens < done_tokens <= self.inputs.prompt_tokens
        assert (states is not None) == self.returns_states
        assert self.returns_states or (logits is not None) == (done_tokens == self.inputs.prompt_tokens)
        self.done_tokens, self.states = done_tokens, states
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

    def forgo_states(self) -> None:
        """Return no states: an adapter that came since makes modules compute the prompt. Nothing of it is computed."""
        self.returns_states = False

    def release_cache(self) -> None:
        """Drop the keys and values that the row of the prompt now has."""
        self.cache = None

    def read_logits(self, logits: Tensor) -> None:
        """Take the logits [V] that the last token's state gives."""
        self.logits, self.states = logits, None

    def release_logits(self) -> None:
        """Drop the logits: the first token is sampled."""
        self.logits = None

    def restart(self, *, keeps_logits: bool = False) -> None:
        """Drop the states: every token is computed again. keeps_logits: the prompt is complete and lost its states alone."""
        self.cache, self.done_tokens = None, 0
        if not keeps_logits:
            self.logits = None


# Rotations of a text alone --------------------------------------------------------------------------------------------


def turn_alone(hf_model: HFModel, rotations: Iterable[nn.Module]) -> None:
    """Make the angles of each row independent of other rows and of earlier texts. transformers (5.6.2 to 5.23,
    modeling_rope_utils.py) chooses the angles of "longrope" and "dynamic" for all rows of a pass by its longest position."""
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


# Pages ----------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class PageTable:
    """Which pages hold each row's places. table [rows, pages] int32; places: of a row, if it had them all. Page p holds positions p
    * PAGE_TOKENS and following, for every layer. Page NONE marks places that a row does not have: it is never written and reads as
    zeros. Writes to such a place go to page SCRAP, which is never read."""

    table: Tensor
    places: int

    def rows(self, pool: Tensor, count: int, places: int | None = None) -> Tensor:
        """Return a copy of the first places of the first rows: pool [H, P, D] -> [count, H, places, D]."""
        return self.of(pool, self.table[:count], places or self.places)

    def of(self, pool: Tensor, table: Tensor, places: int) -> Tensor:
        """Return a copy of the first places of rows of the table [n, pages]: [n, H, places, D]."""
        heads, width = pool.shape[0], pool.shape[-1]
        pages = table[:, : -(-places // PAGE_TOKENS)]
        whole = pool.view(heads, -1, PAGE_TOKENS * width).index_select(1, pages.reshape(-1))
        return whole.view(heads, pages.shape[0], -1, width).transpose(0, 1)[:, :, :places]

    def written(self, places: Tensor, table: Tensor | None = None) -> Tensor:
        """Return the addresses of rows' places: [n] -> [n] one place of each of the first rows; with table [n, pages], places
        [n, S] -> [n, S]; int64."""
        if table is None:
            return self.written(places[:, None], self.table[: places.shape[0]])[:, 0]
        pages = table.gather(1, places // PAGE_TOKENS).clamp(min=SCRAP)
        return pages * PAGE_TOKENS + places % PAGE_TOKENS


class PagePool:
    """The pages of one batch: which are free, and the table of its rows. tokens: that the pool holds, whole pages of them."""

    def __init__(self, tokens: int, rows: int, context_tokens: int, device: torch.device) -> None:
        self.device, self.pages = device, tokens // PAGE_TOKENS
        self.places = (FIRST + self.pages) * PAGE_TOKENS
        table = torch.full((rows, pages_of(context_tokens)), NONE, dtype=torch.int32, device=device)
        self.table = PageTable(table, context_tokens)
        self._free = list(range(FIRST + self.pages - 1, FIRST - 1, -1))
        self._bound: dict[int, tuple[int, ...]] = {}

    @property
    def free_tokens(self) -> int:
        """How many more tokens there are pages for."""
        return len(self._free) * PAGE_TOKENS

    @property
    def tokens(self) -> int:
        """How many tokens the pool holds."""
        return self.pages * PAGE_TOKENS

    def fits(self, tokens: int) -> bool:
        """Whether a row of this many tokens finds room now."""
        return pages_of(tokens) <= len(self._free)

    def take(self, tokens: int) -> tuple[int, ...]:
        """Return the pages of a row of this many tokens, reserved until `give`. Errors: DoesNotFitError."""
        count = pages_of(tokens)
        if count > len(self._free):
            raise DoesNotFitError(
                f"keys and values of {tokens} tokens: {self.free_tokens} of the pool's {self.tokens} are free", block=None,
                device=str(self.device), needed_bytes=0, budget_bytes=0,
                hint="Wait until an answer ends, request fewer tokens, or plan with more kv_tokens",
            )  # fmt: skip
        return tuple(self._free.pop() for _ in range(count))

    def give(self, pages: Sequence[int]) -> None:
        """Take pages back."""
        self._free += reversed(pages)

    def bind(self, row: int, pages: Sequence[int]) -> None:
        """Let a row's places be in these pages."""
        self._bound[row] = tuple(pages)
        entries = torch.full((self.table.table.shape[1],), NONE, dtype=torch.int32, pin_memory=self._is_gpu)
        entries[: len(pages)] = torch.tensor(pages, dtype=torch.int32)
        self.table.table[row].copy_(entries, non_blocking=True)

    def unbind(self, row: int) -> None:
        """Let a row have no places."""
        if self._bound.pop(row, None) is not None:
            self.table.table[row].fill_(NONE)

    def move(self, source: int, target: int) -> None:
        """Move another row's places to a row."""
        self._bound.pop(target, None)
        self.table.table[target].copy_(self.table.table[source])
        if source in self._bound:
            self._bound[target] = self._bound.pop(source)
        self.table.table[source].fill_(NONE)

    def of_row(self, row: int, tokens: int | None = None) -> Tensor:
        """Return the pages of a row's first tokens (None: of all its places), int64 on the device."""
        pages = self._bound.get(row, ())[: None if tokens is None else pages_of(tokens)]
        numbers = torch.tensor(pages, dtype=torch.long, pin_memory=self._is_gpu and bool(pages))
        return numbers.to(self.device, non_blocking=True)

    def pages_at(self, row: int) -> tuple[int, ...]:
        """Return the pages of a row, on the host."""
        return self._bound.get(row, ())

    @property
    def _is_gpu(self) -> bool:
        return self.device.type == "cuda"


class PagedCache(Protocol):
    """The keys and values of rows that may share a pool of pages."""

    pool: PagePool | None

    def bind(self, row: int, pages: Sequence[int] | None) -> None: ...

    def unbind_all(self) -> None: ...


class RowPages:
    """Which of a batch's requests have which pages; every request has room where rows share no pool."""

    def __init__(self, cache: PagedCache, context_tokens: int) -> None:
        self.cache, self.context_tokens = cache, context_tokens
        # Gives pages back when it is called, or when the request is garbage-collected.
        self._given: weakref.WeakKeyDictionary[TokenSequence, weakref.finalize[..., TokenSequence]] = weakref.WeakKeyDictionary()

    def has_room(self, row: TokenSequence) -> bool:
        """Whether keys and values of a prompt and the longest answer to it find room now."""
        pool = self.cache.pool
        return pool is None or row.pages is not None or pool.fits(self._most_tokens(row))

    def reserve(self, *rows: TokenSequence) -> None:
        """Keep room for prompts and the longest answers to them until the rows leave or are forgotten. Errors: DoesNotFitError."""
        pool = self.cache.pool
        for row in rows:
            if pool is not None and row.pages is None:
                row.pages = pool.take(self._most_tokens(row))
                self._given[row] = weakref.finalize(row, pool.give, row.pages)

    def bind(self, row: TokenSequence, number: int) -> None:
        """Let the keys and values of a request be written to a row of the cache. Errors: as `reserve`."""
        self.reserve(row)
        self.cache.bind(number, row.pages)

    def forget(self, row: TokenSequence) -> None:
        """Give back the room of a request that has no row, or no longer."""
        give = self._given.pop(row, None)
        if give is not None:
            give()
            row.pages = None

    def forget_all(self, row: TokenSequence) -> None:
        """Let no row of the cache have pages, those that this request lent them."""
        self.cache.unbind_all()
        self.forget(row)

    def vacate(self, row: TokenSequence) -> int:
        """Take a request's row of the cache away and free its pages. Returns the number of that row."""
        number = row.number
        row.move(-1)
        self.cache.bind(number, None)
        self.forget(row)
        return number

    @contextmanager
    def unbound_on_error(self, numbers: Sequence[int]) -> Iterator[None]:
        """Leave rows of the cache without pages if they are not filled after all: padded steps write to rows without a request."""
        try:
            yield
        except BaseException:
            for number in numbers:
                self.cache.bind(number, None)
            raise

    def numbers(self) -> dict[str, int]:
        """Return the values for metrics: tokens of the pool, and those that requests have reserved; nothing without a pool."""
        pool = self.cache.pool
        return {} if pool is None else {"kv_tokens": pool.tokens, "kv_reserved_tokens": pool.tokens - pool.free_tokens}

    def _most_tokens(self, row: TokenSequence) -> int:
        return min(row.prompt_tokens + row.request.answer_tokens, self.context_tokens)


# Positions of families with three axes, and tokens of media -----------------------------------------------------------


def reset_offset(hf_model: HFModel) -> None:
    """Forget the last request's offset: Qwen-VL keeps it on the model."""
    module = rope_module(hf_model)
    if module is not None:
        module.rope_deltas = None


def copy_offset(hf_model: HFModel) -> None:
    """Let the model keep a copy of its offset: later passes use the memory of this pass."""
    module = rope_module(hf_model)
    if module is not None and module.rope_deltas is not None:
        module.rope_deltas = module.rope_deltas.clone()


def read_offset(hf_model: HFModel) -> int:
    """Return the position offset of the answer, from the prompt that was computed last."""
    module = rope_module(hf_model)
    deltas = None if module is None else module.rope_deltas
    return 0 if deltas is None else int(deltas)


def rope_module(hf_model: HFModel) -> Any:
    """Return the module that keeps the offset, if there is one: the model itself or the one within its head. Every pass needs it,
    and a model has thousands of modules below."""
    near = (hf_model, *(one for child in hf_model.children() for one in (child, *child.children())))
    return next((module for module in near if "rope_deltas" in vars(module)), None)


def has_three_axes(hf_model: HFModel) -> bool:
    """Whether the family's positions count along three axes."""
    return rope_module(hf_model) is not None


def placeholder_ids(hf_model: HFModel) -> frozenset[int]:
    """Return the token ids that represent an image, frame or audio clip in a prompt."""
    return frozenset().union(*media_ids(hf_model))


def lost_words(hf_model: HFModel) -> frozenset[int]:
    """Return the token ids of the vocabulary that a table of the layers' own inputs has no row for; none is a placeholder."""
    config = hf_model.config.get_text_config()
    if not getattr(config, "hidden_size_per_layer_input", None) or config.model_type.startswith("gemma3n"):
        return frozenset()  # Gemma 3n looks any other id up in the first row
    return frozenset(range(int(config.vocab_size_per_layer_input), int(config.vocab_size))) - placeholder_ids(hf_model)


def without_row(token: int, who: str) -> RequestError:
    """Return the error for a token id of `lost_words`. who: has it."""
    return RequestError(f"{who} has token id {token}: a table of the model's layers has no row for it", field="prompt")


def check_words(hf_model: HFModel, token_ids: Sequence[int]) -> None:
    """Raise RequestError for a prompt with ids of `lost_words`."""
    lost = lost_words(hf_model)
    if lost and not lost.isdisjoint(token_ids):
        raise without_row(max(lost.intersection(token_ids)), "the prompt")


def suppressed_ids(hf_model: HFModel, device: torch.device) -> tuple[Tensor | None, Tensor | None]:
    """Return the token ids that no answer has, and those with which none begins, by the checkpoint's generation config: [k] int64
    on the device, None without any.

    Source: transformers 5.23's SuppressTokensLogitsProcessor, SuppressTokensAtBeginLogitsProcessor, and NoBadWordsLogitsProcessor
    for words of one token; ids beyond the vocabulary are no tokens.
    """
    own, words = getattr(hf_model, "generation_config", None), range(int(hf_model.config.get_text_config().vocab_size))
    ends = getattr(own, "eos_token_id", None)
    bad = {word[0] for word in getattr(own, "bad_words_ids", None) or () if len(word) == 1}
    bad -= set(ends if isinstance(ends, (list, tuple)) else [ends])
    always, first = bad.union(getattr(own, "suppress_tokens", None) or ()), getattr(own, "begin_suppress_tokens", None) or ()
    known = ([token for token in ids if token in words] for ids in (always, first))
    all_ids, first_ids = (torch.tensor(ids, device=device) if ids else None for ids in known)
    return all_ids, first_ids


def media_ids(hf_model: HFModel) -> tuple[frozenset[int], frozenset[int]]:
    """Return the token ids that represent images and frames, and those that represent audio clips."""

    def named(*kinds: str) -> frozenset[int]:
        names = (f"{what}_token_{word}" for what in kinds for word in ("id", "index"))
        return frozenset(value for name in names if isinstance(value := getattr(hf_model.config, name, None), int))

    return named("image", "video"), named("audio")
