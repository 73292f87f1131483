"""How does a KV cache hold a fixed number of rows, each at its own position, behind transformers' cache interface?"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from math import prod
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from transformers import DynamicCache
from transformers.cache_utils import Cache, CacheLayerMixin, DynamicLayer, DynamicSlidingWindowLayer

from trimtab.engine.kv import int8
from trimtab.engine.kv.recurrent import MODEL_TYPES, RecurrentLayer, is_recurrent
from trimtab.engine.kv.sequence import PagePool, rope_module
from trimtab.planning.values.byte_sizes import ALLOCATION_BYTES, PAGE_TOKENS, pool_tokens, round_up

if TYPE_CHECKING:
    from trimtab.engine.formats.hf_types import Config, HFModel


class UnsupportedLayersError(Exception):
    """The family keeps a state that is not keys and values by position; the message names it."""


class FixedLayer(CacheLayerMixin):  # type: ignore[misc]
    """A layer with a fixed number of places."""

    is_compileable = True
    places: int

    def get_seq_length(self, *args: object) -> int:
        return 0

    def get_max_cache_shape(self) -> int:
        return self.places

    def get_max_length(self) -> int:  # its name from transformers 5.23 on
        return self.places


class LayerCache(FixedLayer):
    """One layer's keys and values: [rows, H, places, D], one of them for a prompt in progress if the cache has one.

    shared: the cache that knows the rows' positions, and how states are stored.
    """

    def __init__(self, shared: BatchedKVCache, places: int, is_ring: bool) -> None:
        super().__init__()
        self.shared, self.places, self.is_ring = shared, places, is_ring
        self.is_sliding = is_ring

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        rows = self.shared.held_rows
        self.keys = self.shared.zeros(key_states, rows, key_states.shape[1], self.places, key_states.shape[-1])
        self.values = self.shared.zeros(value_states, rows, value_states.shape[1], self.places, value_states.shape[-1])
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object) -> tuple[Tensor, Tensor]:
        """Write one position of each row of the step, and return the places that the step reads."""
        places = self.shared.ring_places[self.places] if self.is_ring else self.shared.positions
        return self.written(key_states, value_states, places[self.shared.rows_of_step(key_states.shape[0])])

    def written(self, key_states: Tensor, value_states: Tensor, places: Tensor) -> tuple[Tensor, Tensor]:
        """Do what `update` does. Shapes: states [n, H, 1, D]; places [n] int64, as `BatchedKVCache.begin` writes them."""
        step = self.shared.rows_of_step(key_states.shape[0])
        rows = self.shared.row_numbers[step]
        hold, dtype = self.shared.hold, key_states.dtype
        self.keys[rows, :, places] = hold(key_states[:, :, 0])
        self.values[rows, :, places] = hold(value_states[:, :, 0])
        length = min(self.places, self.shared.seen_places)
        return self.shared.read(self.keys[step, :, :length], dtype), self.shared.read(self.values[step, :, :length], dtype)

    def fill(self, row: int, keys: Tensor, values: Tensor, length: int) -> None:
        """Take over one row's states: [1, H, S, D], of the last S of `length` positions."""
        if not self.is_initialized:
            self.lazy_initialization(keys, values)
        kept = min(keys.shape[-2], self.places)
        first = length - kept
        for target, source in zip(self.tensors, (keys, values), strict=True):
            # An unwritten place is masked, but zero times NaN is NaN.
            target[row].zero_()
            if self.is_ring:
                places = torch.arange(first, length, device=target.device) % self.places
                target[row].index_copy_(1, places, source[0, :, -kept:])
            else:
                target[row, :, first:length].copy_(source[0, :, -kept:])

    def move(self, source: int, target: int) -> None:
        """Copy one row over another."""
        for tensor in self.tensors:
            tensor[target].copy_(tensor[source])

    @property
    def tensors(self) -> list[Tensor]:
        """Keys and values of all rows."""
        return [self.keys, self.values]

    def row_states(self, row: int) -> dict[str, Tensor]:
        """Return one row's "keys" and "values": [H, places, D]; those of all rows where they share a pool."""
        return {"keys": self.keys[row], "values": self.values[row]}

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return min(self.places, self.shared.seen_places), 0


class PagedLayer(LayerCache):
    """A full layer's keys and values in pages of a pool: [H, P, D]."""

    def __init__(self, shared: BatchedKVCache, pool: PagePool) -> None:
        super().__init__(shared, shared.context_tokens, is_ring=False)
        self.pool = pool

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        places = self.pool.places
        self.keys = self.shared.zeros(key_states, key_states.shape[1], places, key_states.shape[-1])
        self.values = self.shared.zeros(value_states, value_states.shape[1], places, value_states.shape[-1])
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object) -> tuple[Tensor, Tensor]:
        """Write one position of each row of the step, and return a copy of the places that the step reads."""
        places = self.shared.step_places[self.shared.rows_of_step(key_states.shape[0])]
        return self._written(key_states, value_states, places)

    def written(self, key_states: Tensor, value_states: Tensor, places: Tensor) -> tuple[Tensor, Tensor]:
        """Do what `update` does, at places of the rows."""
        return self._written(key_states, value_states, self.pool.table.written(places))

    def _written(self, key_states: Tensor, value_states: Tensor, places: Tensor) -> tuple[Tensor, Tensor]:
        step, table = self.shared.rows_of_step(key_states.shape[0]), self.pool.table
        hold, dtype = self.shared.hold, key_states.dtype
        self.keys[:, places] = hold(key_states[:, :, 0]).transpose(0, 1)
        self.values[:, places] = hold(value_states[:, :, 0]).transpose(0, 1)
        length = min(self.places, self.shared.seen_places)
        keys, values = (table.of(held, table.table[step], length) for held in self.tensors)
        return self.shared.read(keys, dtype), self.shared.read(values, dtype)

    def fill(self, row: int, keys: Tensor, values: Tensor, length: int) -> None:
        if not self.is_initialized:
            self.lazy_initialization(keys, values)
        self.clear(self.pool.of_row(row))
        first = length - keys.shape[-2]
        table = self.pool.table
        at = table.written(torch.arange(first, length, device=self.keys.device)[None], table.table[row : row + 1])[0]
        for target, source in zip(self.tensors, (keys, values), strict=True):
            target.index_copy_(1, at, source[0])

    def row_states(self, row: int) -> dict[str, Tensor]:
        return {"keys": self.keys, "values": self.values}

    def clear(self, pages: Tensor) -> None:
        """Set pages to zero: the places that a row has not written yet are masked, which zeros are needed for."""
        for target in self.tensors:
            target.view(target.shape[0], -1, PAGE_TOKENS * target.shape[-1]).index_fill_(1, pages, 0.0)

    def copy(self, sources: Tensor, targets: Tensor) -> None:
        """Copy pages."""
        for tensor in self.tensors:
            pages = tensor.view(tensor.shape[0], -1, PAGE_TOKENS * tensor.shape[-1])
            pages.index_copy_(1, targets, pages.index_select(1, sources))

    def move(self, source: int, target: int) -> None:
        """Do nothing: the pool's table says where a row is."""


class BatchedKVCache(Cache):  # type: ignore[misc]
    """The keys and values of `rows` rows of up to `context_tokens` positions.

    positions [rows]: the position that the next step writes, on the device. masks: the model's
    `attention_mask` of a step, see `begin`. has_prompt_row: one row more is kept, which no step touches, for a prompt computed
    in pieces; it can be set until the first states are kept. kv_tokens: tokens of full layers for all rows together, None
    for every row's whole context. kv: "full" or "int8". bytes_of: the bytes of all keys and values, by number of rows; None
    if unknown.

    transformers' own growing cache computes a row's prompt, which is copied in. A full layer has a place for every position, or
    pages where rows share a pool (sequence.py); a sliding layer is a ring: position p is at place p % window. Keys are rotated
    before they get here. In 8 bits (int8.py) D + 4 bytes replace D values.
    """

    def __init__(
        self, rows: int, context_tokens: int, device: torch.device, *, kv_tokens: int | None = None, kv: str = "full",
        bytes_of: Callable[[int], int] | None = None,
    ) -> None:  # fmt: skip
        super().__init__(layers=[])
        self._bytes_of, self._memory, self._used_bytes = bytes_of, torch.empty(0, dtype=torch.uint8, device=device), 0
        self.kv = kv
        self.rows, self.context_tokens, self.device = rows, context_tokens, device
        self.positions = torch.zeros(rows, dtype=torch.long, device=device)
        # Families that count images along three axes go on after one at a position that is less than the token count.
        self.offsets = torch.zeros(rows, dtype=torch.long, device=device)
        self.row_numbers = torch.arange(rows, device=device)
        self.ring_places: dict[int, Tensor] = {}
        self.seen_places = context_tokens
        self._masks: dict[int, Tensor] = {}
        self._numbers = torch.arange(context_tokens, device=device)
        self._row_tensors: dict[int, list[Tensor]] = {}
        self.has_prompt_row = False
        shared = pool_tokens(kv_tokens, rows=rows, context_tokens=context_tokens)
        self.pool = None if shared is None else PagePool(shared, rows + 1, context_tokens, device)
        self.step_places = torch.zeros_like(self.positions)  # in the pool
        # The first row of the step: 0, but where rows are computed one by one; and how many rows it is of.
        self.first_row, self.step_count = 0, rows
        # How many rows a step advances: states of padding rows, which may be placed ones, stay as they are.
        self.live = torch.full((1,), rows, dtype=torch.int32, device=device)

    def hold(self, states: Tensor) -> Tensor:
        """Return the stored form of new keys or values."""
        return states if self.kv == "full" else int8.round_states(states)

    def read(self, held: Tensor, dtype: torch.dtype) -> Tensor:
        """Return attention's input from the stored form."""
        return held if self.kv == "full" else int8.read_states(held, dtype)

    def rows_of_step(self, count: int) -> slice:
        """Return which rows a step of `count` rows is of."""
        return slice(self.first_row, self.first_row + count)

    def zeros(self, like: Tensor, *shape: int) -> Tensor:
        """Return a layer's keys or values before any are written, in one piece of memory with those of the other layers.

        Separate tensors of 1 to 10 MiB share segments of 20 MiB in torch with unused remainders. No plan counts them: two tensors
        of 8 MiB leave 4 (a layer of Qwen3-8B, 4,096 tokens). Tensors that `bytes_of` does not count are allocated separately.
        """
        count = prod(shape) * like.element_size()
        if self._bytes_of is not None:
            self._memory = torch.zeros(self._bytes_of(self.held_rows), dtype=torch.uint8, device=like.device)
            self._bytes_of = None
        start = round_up(self._used_bytes, ALLOCATION_BYTES)
        if start + count > self._memory.numel():
            return like.new_zeros(shape)
        self._used_bytes = start + count
        return self._memory[start : start + count].view(like.dtype).view(shape)

    @property
    def held_rows(self) -> int:
        """How many rows there is memory for."""
        return self.rows + self.has_prompt_row

    @property
    def prompt_row(self) -> int:
        """The row of a prompt that has no row yet; the only row of a cache that has but one."""
        return self.rows if self.has_prompt_row else 0

    def lay_out(self, prompt: DynamicCache) -> None:
        """Take over the kinds of a family's layers. Errors: UnsupportedLayersError."""
        try:
            self._build(prompt)
        except BaseException:
            self.layers.clear()  # a partial list would count as complete next time
            raise

    def fill(self, row: int, prompt: DynamicCache, length: int, *, offset: int = 0) -> None:
        """Copy a computed prompt of `length` tokens into a row. Errors: UnsupportedLayersError."""
        self.prepare(prompt)
        for mine, theirs in zip(self.layers, prompt.layers, strict=True):
            if isinstance(mine, LayerCache):
                mine.fill(row, theirs.keys, theirs.values, length)
            elif isinstance(mine, RecurrentLayer):
                mine.fill(row, theirs)
        self.place(row, length, offset)

    def prepare(self, prompt: DynamicCache) -> None:
        """Allocate keys and values of the shapes that a prompt's have, if there are none. Errors: UnsupportedLayersError."""
        if not self.layers:
            self.lay_out(prompt)
        for mine, theirs in zip(self.layers, prompt.layers, strict=True):
            if isinstance(mine, LayerCache) and not mine.is_initialized:
                mine.lazy_initialization(theirs.keys, theirs.values)
            elif isinstance(mine, RecurrentLayer):
                mine.like(theirs)

    def clear(self, row: int) -> None:
        """Set a row's keys and values to zero: an unwritten place is masked, but zero times NaN is NaN."""
        tensors = self._tensors_of(row)
        if tensors:
            torch._foreach_zero_(tensors)
        if self.pool is not None and (pages := self.pool.of_row(row)).numel():
            for layer in self._paged():
                layer.clear(pages)

    def bind(self, row: int, pages: Sequence[int] | None) -> None:
        """Let a row's positions be in these pages of the pool, if there is one; None: in none."""
        if self.pool is not None:
            self.pool.unbind(row) if pages is None else self.pool.bind(row, pages)

    def unbind_all(self) -> None:
        """Let no row have any pages."""
        for row in range(self.rows + 1):
            self.bind(row, None)

    def take(self, row: int, length: int, *, offset: int = 0) -> None:
        """Give a row the prompt of `length` tokens that was written to the prompt's row."""
        if row != self.prompt_row:
            tensors = self._tensors_of(row)
            if tensors:
                torch._foreach_copy_(tensors, self._tensors_of(self.prompt_row))
            if self.pool is not None:
                self.pool.move(self.prompt_row, row)
        self.place(row, length, offset)

    def place(self, row: int, length: int, offset: int = 0) -> None:
        """Let a row's next token be at position `length`. Nothing waits for the device, as an assignment of a number would."""
        self.positions[row].fill_(length)
        self.offsets[row].fill_(offset)

    def _build(self, prompt: DynamicCache) -> None:
        for number, layer in enumerate(prompt.layers):
            if type(layer) in int8.SLIDING_LAYERS:
                window = min(layer.sliding_window, self.context_tokens)
                self.layers.append(LayerCache(self, window, is_ring=True))
                if window not in self.ring_places:
                    self.ring_places[window] = torch.zeros_like(self.positions)
                    self._masks[window] = torch.zeros(self.rows, 1, 1, window, dtype=torch.bool, device=self.device)
            elif type(layer) in int8.FULL_LAYERS and self.pool is not None:
                self.layers.append(PagedLayer(self, self.pool))
            elif type(layer) in int8.FULL_LAYERS:
                self.layers.append(LayerCache(self, self.context_tokens, is_ring=False))
            elif is_recurrent(layer):
                self.layers.append(RecurrentLayer(self))
            elif type(layer).__name__ == "DummyLayer":  # a layer that shares another one's keys and values
                self.layers.append(type(layer)())
            else:
                raise UnsupportedLayersError(_unsupported(number, layer))
        self._masks.setdefault(
            self.context_tokens, torch.zeros(self.rows, 1, 1, self.context_tokens, dtype=torch.bool, device=self.device)
        )

    def limit_attention(self, places: int) -> None:
        """Let the attention of the next steps read this many places of the context."""
        self.seen_places = places

    @contextmanager
    def from_row(self, number: int) -> Iterator[None]:
        """Let steps be of this row and those behind it while the block runs."""
        self.first_row = number
        try:
            yield
        finally:
            self.first_row = 0

    def keep_prompt_row(self) -> None:
        """Keep one row more, for a prompt that has none yet; before the first states are kept."""
        self.has_prompt_row = True

    def begin(self, count: int) -> None:
        """Write places and masks of a step of `count` rows from the positions, on the device."""
        self.step_count = count
        for window, places in self.ring_places.items():
            torch.remainder(self.positions, window, out=places)
        for size, mask in self._masks.items():
            torch.le(self._numbers[:size], self.positions[:, None], out=mask.view(self.rows, size))
        if self.pool is not None:
            self.step_places.copy_(self.pool.table.written(self.positions))

    def mask(self, count: int, *, is_ring: bool) -> Tensor:
        """Return the positions that the rows of a step attend to: [count, 1, 1, places], True where they do."""
        window = next(iter(self.ring_places)) if is_ring else self.context_tokens
        return self._masks[window][self.rows_of_step(count), :, :, : min(window, self.seen_places)]

    @property
    def has_states(self) -> bool:
        """Whether memory for keys and values is allocated, which the first pass does."""
        return any(isinstance(layer, LayerCache) for layer in self.with_memory().values())

    def with_memory(self) -> dict[int, LayerCache | RecurrentLayer]:
        """Return the layers that have memory, by number."""
        kinds = (LayerCache, RecurrentLayer)
        return {number: one for number, one in enumerate(self.layers) if isinstance(one, kinds) and one.is_initialized}

    @property
    def has_recurrent(self) -> bool:
        """Whether layers keep a state of exactly the tokens that a row has read."""
        return any(isinstance(layer, RecurrentLayer) for layer in self.layers)

    def _tensors_of(self, row: int) -> list[Tensor]:
        """Return a row's keys and values in layers that are no pool. Its views are made once: layers stay where they are."""
        tensors = self._row_tensors.get(row)
        if tensors is None:
            held = self.with_memory().values()
            tensors = [tensor[row] for layer in held if not isinstance(layer, PagedLayer) for tensor in layer.tensors]
            if held and len(held) == sum(isinstance(layer, (LayerCache, RecurrentLayer)) for layer in self.layers):
                self._row_tensors[row] = tensors
        return tensors

    def _paged(self) -> list[PagedLayer]:
        return [layer for layer in self.with_memory().values() if isinstance(layer, PagedLayer)]

    def window_mask(self, count: int, window: int) -> Tensor:
        """Return the last `window` positions of each row, for sliding layers that keep a place for every position."""
        length = min(self.context_tokens, self.seen_places)
        positions = self.positions[self.rows_of_step(count), None, None, None]
        return (self._numbers[:length] <= positions) & (self._numbers[:length] > positions - window)

    @property
    def has_rings(self) -> bool:
        return bool(self.ring_places)

    def move(self, source: int, target: int) -> None:
        """Move another row's keys and values to a row."""
        for layer in self.with_memory().values():
            layer.move(source, target)
        if self.pool is not None:
            self.pool.move(source, target)
        self.positions[target] = self.positions[source]
        self.offsets[target] = self.offsets[source]

    def copy(self, source: int, target: int, length: int) -> None:
        """Copy the first `length` positions of a row over another, which has separate pages."""
        for layer in self.with_memory().values():
            layer.move(source, target)
        if self.pool is not None:
            pages, (sources, targets) = (self.pool.of_row(target), (self.pool.of_row(row, length) for row in (source, target)))
            for paged in self._paged():
                paged.clear(pages)
                paged.copy(sources, targets)
        self.positions[target].fill_(length)  # an assignment would wait for the device
        self.offsets[target] = self.offsets[source]

    def rings(self, rows: Sequence[int]) -> list[tuple[Tensor, Tensor]]:
        """Return (a sliding or recurrent layer's states in a row, a copy in host memory): a second pass of a chunk would find its
        own there."""
        rings = [layer for layer in self.with_memory().values() if isinstance(layer, RecurrentLayer) or layer.is_ring]
        states = [tensor[row] for layer in rings for tensor in layer.tensors for row in rows]
        return [(state, state.to("cpu", copy=True)) for state in states]

    def nbytes(self) -> int:
        """Return the bytes that the keys and values hold."""
        return sum(tensor.nbytes for layer in self.with_memory().values() for tensor in layer.tensors)


def prompt_cache(hf_model: HFModel, kv: str = "full") -> DynamicCache:
    """Return an empty cache for one prompt, in full or in 8 bits ("int8")."""
    config = hf_model.config.get_text_config()
    cache = DynamicCache(config=config)
    if not cache.layers and getattr(config, "num_kv_shared_layers", None) == 0:
        # Up to transformers 5.18 `layer_types[:-0]` leaves none (the doctor's I1): no states could be copied back.
        cache.layers = [_prompt_layer(kind, config) for kind in config.layer_types or ()]
    return cache if kv == "full" else int8.with_form(cache)


def _prompt_layer(kind: str, config: Config) -> DynamicLayer:
    return DynamicSlidingWindowLayer(config.sliding_window) if kind == "sliding_attention" else DynamicLayer()


def why_not(hf_model: HFModel) -> str | None:
    """Return why this family's state cannot be kept by rows, None if it can."""
    config = hf_model.config.get_text_config()
    for number, layer in enumerate(prompt_cache(hf_model).layers):
        if is_recurrent(layer) and config.model_type in MODEL_TYPES:
            continue
        if type(layer) not in (*int8.FULL_LAYERS, *int8.SLIDING_LAYERS) and type(layer).__name__ != "DummyLayer":
            return _unsupported(number, layer)
    if "chunked_attention" in (getattr(config, "layer_types", None) or ()):  # kept in transformers' sliding layers
        return "it has layers of the kind chunked_attention"
    if not takes_states(hf_model):
        return f"{type(hf_model).__name__} takes no keys and values of earlier tokens"
    return _why_not_placed(hf_model)


# transformers 5.23: a bias by the distance from the last key is that from the token plus a constant, which softmax drops.
UNPLACED = {"mpt"}


def _why_not_placed(hf_model: HFModel) -> str | None:
    """Return why a step of rows at separate positions, over a fixed number of keys, is not stock's step of each; None if
    nothing is known against it. Needs no weights."""
    config = hf_model.config.get_text_config()
    found = (hf_model.get_decoder(), getattr(hf_model, "base_model", hf_model))  # of ModernBERT the first is its head
    inner = next((one for one in found if "past_key_values" in inspect.signature(type(one).forward).parameters), hf_model)
    if "position_ids" not in inspect.signature(type(inner).forward).parameters and config.model_type not in UNPLACED:
        return f"{type(inner).__name__} takes no position_ids"
    if getattr(config, "alibi", False):
        return "its biases by distance (alibi) are made from the mask of a growing cache"
    if getattr(config, "cross_attention_layers", None):
        return f"its layers {list(config.cross_attention_layers)} attend to images"
    if "local" in (getattr(config, "attention_layers", None) or ()):
        return "its local layers cut their masks by the number of keys"
    return f"{type(hf_model).__name__} moves the positions that it generates at" if _moves_positions(hf_model) else None


def _moves_positions(hf_model: HFModel) -> bool:
    """Whether transformers' generation changes the positions of a text before the modules get them."""
    given = torch.arange(3)[None]
    ids = torch.full_like(given, 3)
    prepare = getattr(hf_model, "prepare_inputs_for_generation", None)
    if prepare is None:
        return False
    try:
        made = prepare(ids, attention_mask=torch.ones_like(ids), position_ids=given, use_cache=True)
        return made.get("position_ids") is not None and not bool((made["position_ids"] == given).all())
    except (RuntimeError, ValueError, TypeError, LookupError, AttributeError, NotImplementedError):
        return False  # it needs more than a text; `decode_step.wrong_rows` compares a step


def takes_states(hf_model: HFModel) -> bool:
    """Whether a model, or the one inside it, takes `past_key_values`; others have a cache of another name, or none."""
    inner = getattr(hf_model, "base_model", hf_model)
    return any("past_key_values" in inspect.signature(type(one).forward).parameters for one in (hf_model, inner))


# transformers 5.23: a pass of several tokens behind a cache has other numbers than one pass over all of them (Jamba), or takes a
# cache of another class (MiniMax).
UNCHUNKED = {"jamba", "minimax"}


def can_chunk(hf_model: HFModel) -> bool:
    """Whether a text may be computed in chunks, each behind the cache of those before."""
    return takes_states(hf_model) and hf_model.config.get_text_config().model_type not in UNCHUNKED


def keeps_states(hf_model: HFModel) -> bool:
    """Whether layers keep a state of exactly the tokens that were read, which cannot be cut back."""
    return any(is_recurrent(layer) for layer in prompt_cache(hf_model).layers)


def windows(hf_model: HFModel, context_tokens: int) -> tuple[int, ...]:
    """Return the windows of a family's sliding layers, each once; () if all layers keep every position."""
    sliding = (layer for layer in prompt_cache(hf_model).layers if type(layer) in int8.SLIDING_LAYERS)
    return tuple(sorted({min(int(layer.sliding_window), context_tokens) for layer in sliding}))


def _unsupported(number: int, layer: object) -> str:
    return f"layer {number} keeps a {type(layer).__name__}"


def step_masks(
    hf_model: HFModel, cache: BatchedKVCache, count: int, dtype: torch.dtype, *, are_added: bool = False
) -> Tensor | dict[str, Tensor | None]:  # fmt: skip
    """Return the `attention_mask` of a decode step of `count` rows: a mask, or one for each kind of layer of the family.

    `sdpa` selects by a mask of bool, other attention adds one of `dtype` to its scores. are_added: `sdpa` too, which makes the same
    of a mask of bool by three operations in each layer. A family whose configuration lists the kinds of its layers takes a
    dictionary (transformers, `create_masks_for_generate`).
    """
    config = hf_model.config.get_text_config()
    kinds = getattr(config, "layer_types", None)
    if kinds is None:
        return _as_taken(cache.mask(count, is_ring=cache.has_rings), config, dtype, are_added)
    masks = {kind: None if kind == "linear_attention" else cache.mask(count, is_ring=False) for kind in set(kinds)}
    if "sliding_attention" in masks and cache.has_rings:
        masks["sliding_attention"] = cache.mask(count, is_ring=True)
    elif "sliding_attention" in masks:  # transformers 5.6.2 gives Gemma 4 without shared layers no sliding cache
        masks["sliding_attention"] = cache.window_mask(count, int(config.sliding_window))
    return {kind: None if mask is None else _as_taken(mask, config, dtype, are_added) for kind, mask in masks.items()}


def _as_taken(mask: Tensor, config: object, dtype: torch.dtype, is_added: bool) -> Tensor:
    is_sdpa = getattr(config, "_attn_implementation", "sdpa") == "sdpa"
    if is_sdpa and not is_added:
        return mask
    return torch.zeros_like(mask, dtype=dtype).masked_fill_(~mask, -torch.inf if is_sdpa else torch.finfo(dtype).min)


def step_positions(hf_model: HFModel, cache: BatchedKVCache, count: int) -> Tensor:
    """Return the `position_ids` of a decode step: [count, 1], or the same for each of three axes [3, count, 1]."""
    if rope_module(hf_model) is None:
        return cache.positions[cache.rows_of_step(count), None]
    return (cache.positions + cache.offsets)[cache.rows_of_step(count), None].expand(3, count, 1)


def prompt_positions(
    hf_model: HFModel, start: int, end: int, device: torch.device, offset: int = 0
) -> dict[str, Tensor]:  # fmt: skip
    """Return `position_ids` of a piece of text where the family would else take them from its last request. offset: the number of
    positions that earlier images save."""
    if rope_module(hf_model) is None:
        return {}
    return {"position_ids": torch.arange(start + offset, end + offset, device=device).expand(3, 1, end - start)}
