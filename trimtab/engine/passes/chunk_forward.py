"""How do chunks of prompts run in passes with fixed shapes and addresses, so that a CUDA graph can include them?"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache

from trimtab.engine.kv import kv_cache, sequence
from trimtab.engine.kv.kv_cache import BatchedKVCache, FixedLayer, LayerCache, PagedLayer
from trimtab.engine.kv.recurrent import MODEL_TYPES, RecurrentLayer
from trimtab.engine.lora.store import covered
from trimtab.engine.passes.attention import most_tokens

if TYPE_CHECKING:
    from trimtab.engine.formats.hf_types import HFModel
    from trimtab.engine.kernels.delta_rule import DeltaShape
    from trimtab.engine.passes.media_embeddings import Media

CHUNKS = (16, 64, 128, 256, 512, 1024)
# Attention of a chunk that is not the first reads this many places at least, doubled until its last token fits.
SMALLEST_PLACES = 256
_KINDS = ("full_attention", "sliding_attention")


@dataclass(frozen=True)
class Chunk:
    """Tokens start .. start + count of a prompt, padded to `size`."""

    start: int
    count: int
    size: int
    is_last: bool

    @property
    def end(self) -> int:
        return self.start + self.count


@dataclass(frozen=True)
class Piece:
    """The part of one prompt in a pass: its tokens from `start` to the list's end. row: of the cache, with the tokens before."""

    token_ids: Sequence[int]
    start: int
    row: int

    @property
    def new_ids(self) -> Sequence[int]:
        """The tokens that the pass computes."""
        return self.token_ids[self.start :]

    @property
    def part(self) -> slice:
        """Where they are in the prompt."""
        return slice(self.start, len(self.token_ids))


@dataclass(frozen=True)
class Form:
    """The properties of a pass that are part of its program.

    places: the positions of a full layer's cache that attention reads, 0 in a first chunk. has_embeddings: the tokens'
    embeddings are given (images and audio are among them), and `deep` later layers' parts. has_own_mask: the mask between the
    chunk's tokens is given, not causal. rows: prompts side by side, each of up to `size` tokens; by_table: their adapters are
    looked up. returns_states: of all tokens, behind the final norm, in place of the last one's logits.
    """

    size: int
    places: int
    is_last: bool
    has_embeddings: bool = False
    deep: int = 0
    has_own_mask: bool = False
    rows: int = 1
    by_table: bool = False
    returns_states: bool = False

    @property
    def is_first(self) -> bool:
        return self.places == 0


def chunks_of(
    tokens: int, sizes: Sequence[int], *, may_end_at: Callable[[int], bool] = lambda _: True, start: int = 0,
    border: int | None = None,
) -> list[Chunk] | None:  # fmt: skip
    """Return the chunks of a prompt: the largest size as often as it is filled, then the smallest that fits the rest.

    may_end_at: whether a chunk may end before this token. start: how many tokens are computed already. border: a place
    where a chunk has to end. None if the tokens that have to be in one chunk exceed every size.
    """
    if border is not None and start < border < tokens:
        before = chunks_of(border, sizes, may_end_at=may_end_at, start=start)
        behind = chunks_of(tokens, sizes, may_end_at=may_end_at, start=border)
        if before is None or behind is None:
            return None
        return [*(replace(chunk, is_last=False) for chunk in before), *behind]
    largest, chunks = max(sizes), []
    while tokens - start > largest:
        end = next((place for place in range(start + largest, start, -1) if may_end_at(place)), None)
        if end is None:
            return None
        chunks.append(_chunk(start, end, sizes, is_last=False))
        start = end
    return [*chunks, _chunk(start, tokens, sizes, is_last=True)]


def _chunk(start: int, end: int, sizes: Sequence[int], *, is_last: bool) -> Chunk:
    return Chunk(start, end - start, min(size for size in sizes if size >= end - start), is_last)


def why_not(hf_model: HFModel) -> str | None:
    """Return why this family's prompts cannot be computed in such chunks, None if they can; `why_not_now` knows the rest."""
    if (state := kv_cache.why_not(hf_model)) is not None:
        return state
    config = hf_model.config.get_text_config()
    kinds = set(getattr(config, "layer_types", None) or ()) - ({"linear_attention"} if config.model_type in MODEL_TYPES else set())
    if not kinds <= set(_KINDS):
        return f"its layers are of kinds {sorted(kinds - set(_KINDS))}"
    layers = getattr(hf_model.get_decoder(), "layers", None)
    cached = len(kv_cache.prompt_cache(hf_model).layers)
    # transformers 5.6.2 caches no layer that uses another one's keys and values.
    if layers is None or not (len(layers) == cached or (cached and all(map(_is_shared, layers[cached:])))):
        return f"the layers of {type(hf_model).__name__} were not recognized"
    if getattr(config, "use_bidirectional_attention", None) == "all":
        return "its attention is not causal"
    return why_not_now(hf_model)


def why_not_now(hf_model: HFModel, context_tokens: int = 0) -> str | None:
    """Return the same of what a loaded model may be given: another attention, and prompts of up to this many tokens."""
    attention = getattr(hf_model.config.get_text_config(), "_attn_implementation", None)
    if attention not in ("sdpa", "eager"):
        return f"its attention is {attention}, not sdpa or eager"
    most = most_tokens(hf_model)
    if most is None or context_tokens <= most:
        return None
    return f"its rotation changes behind {most} tokens, and its context has {context_tokens}"


def _is_shared(layer: object) -> bool:
    """Whether a decoder layer uses the keys and values of an earlier one."""
    return bool(getattr(getattr(layer, "self_attn", None), "is_kv_shared_layer", False))


# The cache -----------------------------------------------------------------------------------------------------------


class ChunkLayer(FixedLayer):
    """One layer's keys and values of the rows of a pass, as it writes and reads them."""

    def __init__(self, target: LayerCache, owner: ChunkForward) -> None:
        super().__init__()
        self.target, self.owner = target, owner
        self.is_sliding, self.places = target.is_ring, target.places

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        self.target.lazy_initialization(key_states, value_states)

    def update(self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object) -> tuple[Tensor, Tensor]:
        """Write the pass's keys and values. Return those that its tokens attend to: their own and the earlier ones."""
        shared, dtype = self.target.shared, key_states.dtype
        key_states, value_states = shared.hold(key_states), shared.hold(value_states)
        if not self.target.is_initialized:
            self.lazy_initialization(key_states, value_states)
        pairs = ((self.target.keys, key_states), (self.target.values, value_states))
        keys, values = (shared.read(self._one(kept, new), dtype) for kept, new in pairs)
        return keys, values

    def _one(self, kept: Tensor, new: Tensor) -> Tensor:
        """Write and return states in the cache's form.

        Shapes: kept [cache rows, H, places, D], in pages [H, P, D]; new [rows, H, size, D]; in 8 bits D + 4 for D.
        """
        owner, form, buffers = self.owner, self.owner.form, self.owner.buffers
        if isinstance(self.target, PagedLayer):
            table = self.target.pool.table
            kept.index_copy_(1, owner.paged_places(), new.transpose(0, 1).flatten(1, 2))
            return new if form.is_first else table.of(kept, owner.of_rows(table.table), form.places)
        row = kept[owner.row] if form.rows == 1 else None
        if self.target.is_ring:
            both = new if form.is_first else torch.cat((owner.of_rows(kept), new), dim=2)
            sources = owner.ring_sources(self.target.places)
            if row is not None:
                row.copy_(both[0].index_select(1, sources[0]))
            else:
                kept.index_copy_(0, buffers.row, both.take_along_dim(sources[:, None, :, None], dim=2))
            return both
        if form.is_first:
            count = min(form.size, self.target.places)
            if row is not None:
                row[:, :count].copy_(new[0, :, :count])
            else:
                kept[:, :, :count].index_copy_(0, buffers.row, new[:, :, :count])
            return new
        if row is not None:
            row.index_copy_(1, buffers.places[0], new[0])
        else:
            kept[buffers.row[:, None], :, buffers.places] = new.transpose(1, 2)
        return owner.of_rows(kept[:, :, : form.places])

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.owner.form.places or self.owner.form.size, 0


class ChunkState:
    """A recurrent layer's state of one row, as a chunk reads and writes it."""

    is_compileable = True
    is_sliding = False

    def __init__(self, target: RecurrentLayer, owner: ChunkForward) -> None:
        self.target, self.owner = target, owner

    def states(self, shape: DeltaShape, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return the row's states, which the first chunk of all makes memory for. x: of the model's dtype."""
        if not self.target.is_initialized:
            self.target.make(shape, x.dtype, x.device)
        return self.target.states(self.owner.row)

    @property
    def count(self) -> Tensor:
        """How many tokens of the chunk are there [1] int32."""
        return self.owner.buffers.count.view(torch.int32)[:1]


# Inputs of a pass ----------------------------------------------------------------------------------------------------


class Buffers:
    """The tensors of one shape of pass, written before each. Shapes: ids [rows, size], positions [1 or 3, rows, size], start, count
    and row [rows], all parts of one tensor; of one row, made on first use: embeddings [1, size, D], deep [n][1, size, D], own masks
    [size, size]."""

    def __init__(self, rows: int, size: int, axes: int, context_tokens: int, device: torch.device) -> None:
        self.rows, self.size, self.axes, self.context_tokens, self.device = rows, size, axes, context_tokens, device
        self._held = torch.zeros((1 + axes) * rows * size + 3 * rows, dtype=torch.long, device=device)
        self.ids, self.positions, (self.start, self.count, self.row) = self._parts(self._held)
        self.numbers = torch.arange(size, device=device)
        self.causal = self.numbers[None, :] <= self.numbers[:, None]
        self.embeddings: Tensor | None = None
        self.deep: list[Tensor] = []
        self.own_masks: dict[str, Tensor] = {}
        self.last, self.places = torch.empty_like(self.count), torch.empty_like(self.ids)
        self.derive()

    def _parts(self, held: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return (ids, positions, [start, count, row]) in a tensor of all of them."""
        ids, positions, numbers = held.split((self.rows * self.size, self.axes * self.rows * self.size, 3 * self.rows))
        return ids.view(self.rows, self.size), positions.view(self.axes, self.rows, self.size), numbers.view(3, self.rows)

    def derive(self) -> None:
        """Compute the values that depend on start and count; the first operations of a pass."""
        torch.sub(self.count, 1, out=self.last)
        # Padding behind the context's end goes to its last place, which no prompt that leaves room for an answer uses.
        torch.clamp(self.start[:, None] + self.numbers, max=self.context_tokens - 1, out=self.places)

    def write(self, pieces: Sequence[Piece], own_positions: Tensor | None = None) -> None:
        """Copy the numbers of a pass to the device at once. own_positions [axes, count]: of one row, on the CPU; None for those in
        order."""
        values = torch.zeros_like(self._held, device="cpu", pin_memory=self.device.type == "cuda")
        ids, positions, numbers = self._parts(values)
        for at in range(self.rows):
            piece = pieces[at] if at < len(pieces) else pieces[0]
            count = len(piece.new_ids)
            ids[at, :count] = torch.tensor(piece.new_ids, dtype=torch.long)
            numbers[:, at] = torch.tensor((piece.start, count, piece.row))
        positions.copy_((numbers[0][:, None] + torch.arange(self.size)).clamp_(max=self.context_tokens - 1))  # padding too
        if own_positions is not None:
            positions[:, 0, : own_positions.shape[1]] = own_positions
        self._held.copy_(values, non_blocking=True)

    def write_media(self, part: slice, media: Media) -> None:
        """Copy the embeddings of this part of a prompt; behind them are zeros."""
        self._fill(embeddings := self.held_embeddings(media.embeddings), media.embeddings[:, part])
        while len(self.deep) < len(media.deep):
            self.deep.append(torch.zeros_like(embeddings))
        for target, source in zip(self.deep, media.deep, strict=False):
            self._fill(target, source[:, part])
        count = part.stop - part.start
        for kind, mask in media.masks.items():
            own = self.own_masks.setdefault(kind, torch.zeros_like(self.causal))
            own.copy_(self.causal)
            own[:count, :count] = mask[part, part]

    def held_embeddings(self, like: Tensor) -> Tensor:
        """Return the memory of embeddings [1, size, D], which a text has none of: its states go there."""
        if self.embeddings is None:
            self.embeddings = like.new_zeros(1, self.size, like.shape[-1])
        return self.embeddings

    def _fill(self, target: Tensor, source: Tensor) -> None:
        target[:, : source.shape[1]].copy_(source)
        target[:, source.shape[1] :].zero_()


# Number of a layer, and its mask or the pass's buffers -> the replacement of its forward.
FirstLayers = Callable[[int, "Tensor | None"], Callable[..., Tensor]]
LastLayers = Callable[[int, Buffers], Callable[..., Tensor]]


# The pass ------------------------------------------------------------------------------------------------------------


class ChunkForward:
    """Passes of chunks through a model, their keys and values in rows of a cache. Inference only.

    All tensors that a pass reads and writes have fixed addresses: it may be captured after an uncaptured pass of its form.

    A pass has one row, or several with a whole prompt each. A chunk is padded; its first position, number of tokens and row are
    tensors. Layers that read the keys and values of earlier ones (Gemma 3n, Gemma 4) see the last token of the last chunk alone.
    """

    def __init__(
        self, hf_model: HFModel, cache: BatchedKVCache, dtype: torch.dtype, least_places: int = SMALLEST_PLACES
    ) -> None:  # fmt: skip
        self.hf_model, self.cache, self.device, self.dtype = hf_model, cache, cache.device, dtype
        self.config = hf_model.config.get_text_config()
        self.decoder = hf_model.get_decoder()
        self.layers = list(self.decoder.layers)
        if not cache.layers:
            cache.lay_out(kv_cache.prompt_cache(hf_model))
        self._cache = Cache(layers=[self._in_chunks(one) for one in cache.layers])
        # Eager attention is causal by its mask alone.
        self.adds_masks = getattr(self.config, "_attn_implementation", None) == "eager"
        self._axes = 3 if sequence.has_three_axes(hf_model) else 1
        self._buffers: dict[tuple[int, int], Buffers] = {}
        self.least_places = least_places
        self._places = torch.arange(cache.context_tokens, device=self.device)
        self._kinds = self._kinds_of_layers()
        self.first_shared = self._first_shared()
        self.row = 0
        self.form = Form(0, 0, is_last=False)
        self._output_class: Callable[..., object] = dict  # of the model's body; known from its first pass
        self._ring_sources: dict[int, Tensor] = {}
        self._paged_places: Tensor | None = None
        self.use(None, None)
        # transformers uses any mask of four dimensions as it is: each layer gets its own instead.
        self._ready = torch.ones(1, 1, 1, 1, dtype=torch.bool, device=self.device)

    def _in_chunks(self, layer: Any) -> Any:
        if isinstance(layer, RecurrentLayer):
            return ChunkState(layer, self)
        return ChunkLayer(layer, self) if isinstance(layer, LayerCache) else layer

    def _kinds_of_layers(self) -> list[str]:
        kinds = getattr(self.config, "layer_types", None)
        if kinds is not None:
            return list(kinds)
        return [_KINDS[1 if getattr(one, "is_ring", False) else 0] for one in self.cache.layers]

    def _first_shared(self) -> int:
        """Return the number of the first layer such that it and all later ones use the keys and values of earlier ones."""
        shared = [_is_shared(layer) for layer in self.layers]
        first = len(shared)
        while first and shared[first - 1]:
            first -= 1
        return first

    def use(self, firsts: FirstLayers | None, lasts: LastLayers | None) -> None:
        """Replace the layers in front (chunk.py), and those from `first_shared` on (LastLayers); None: modules compute."""
        self.firsts, self.lasts = firsts, lasts

    @property
    def buffers(self) -> Buffers:
        """The buffers of the form that runs."""
        return self._buffers[self.form.rows, self.form.size]

    def of_rows(self, kept: Tensor) -> Tensor:
        """Return the parts of a tensor [cache rows, ...] that belong to the rows of the pass: of one row where they are."""
        return kept[self.row : self.row + 1] if self.form.rows == 1 else kept.index_select(0, self.buffers.row)

    def form_of(
        self, pieces: Sequence[Piece], size: int, *, is_last: bool = True, rows: int = 1, by_table: bool = False,
        media: Media | None = None, returns_states: bool = False,
    ) -> Form:  # fmt: skip
        """Return the form of a pass of these pieces, each of up to `size` tokens, in `rows` rows."""
        places = 0
        if any(piece.start for piece in pieces):
            places = self.least_places
            while places < max(len(piece.token_ids) for piece in pieces):
                places *= 2
            places = min(places, self.cache.context_tokens)
        form = Form(size, places, is_last and not returns_states, rows=rows, by_table=by_table, returns_states=returns_states)
        if media is None:
            return form
        return replace(form, has_embeddings=True, deep=len(media.deep), has_own_mask=bool(media.masks))

    def load(self, form: Form, pieces: Sequence[Piece], media: Media | None = None) -> None:
        """Copy the tokens of a pass, and the embeddings of images and audio among them, to where it reads them."""
        self.row, part = pieces[0].row, pieces[0].part
        key = form.rows, form.size
        buffers = self._buffers.get(key)
        if buffers is None:
            buffers = self._buffers[key] = Buffers(*key, self._axes, self.cache.context_tokens, self.device)
        buffers.write(pieces, None if media is None or media.positions is None else media.positions[:, part])
        if media is not None:
            buffers.write_media(part, media)

    def run(self, form: Form) -> Tensor:
        """Return the logits [rows, V] of each row's last token; of a chunk that is not the last its hidden state [1, D], read only
        to compare a graph with its pass; float32. Or the states [size, D] that the form returns. Keys and values are written."""
        self.form = form
        try:
            return self._run(form)
        finally:  # no tensor of a pass outlives it
            self._ring_sources.clear()
            self._paged_places = None

    def _run(self, form: Form) -> Tensor:
        buffers = self.buffers
        buffers.derive()
        masks = {kind: self._mask(kind) for kind in dict.fromkeys(self._kinds)}
        forwards = {layer: self._layer(number, masks) for number, layer in enumerate(self.layers)}
        forwards[self.decoder] = self._decoder()
        inputs: dict[str, object] = {
            "input_ids": buffers.ids, "position_ids": buffers.positions if self._axes == 3 else buffers.positions[0],
            "past_key_values": self._cache,
            "attention_mask": self._ready if getattr(self.config, "layer_types", None) is None else masks,
            "use_cache": True, "return_dict": True,
        }  # fmt: skip
        with torch.no_grad(), covered(forwards):
            if not form.is_last:
                output = self.hf_model.base_model(**inputs)
                self._output_class, hidden = type(output), output.last_hidden_state
                return hidden[0] if form.returns_states else hidden[:, -1].float()
            # A number would have transformers drop all tokens but the last, which may be padding.
            logits: Tensor = self.hf_model(**inputs, logits_to_keep=torch.zeros_like(buffers.last[:1])).logits
        return logits[:, -1].float()

    def logits_of(self, states: Tensor) -> Tensor:
        """Return the logits [n, V] of states [n, D] that a pass has returned, as the model's own class computes them."""
        made = self._output_class(last_hidden_state=states[None])
        ids = torch.zeros(1, len(states), dtype=torch.long, device=self.device)
        with torch.no_grad(), covered({self.hf_model.base_model: lambda *args, **kwargs: made}):
            logits: Tensor = self.hf_model(input_ids=ids, use_cache=False, return_dict=True).logits
        return logits[0]

    # Masks ---------------------------------------------------------------------------------------------------------

    def ring_sources(self, places: int) -> Tensor:
        """Return [rows, places]: for each place of a sliding layer, which of (places kept, tokens of the pass) it holds
        afterwards."""
        if places not in self._ring_sources:
            buffers, numbers = self.buffers, self._places[:places]
            last, start = buffers.last[:, None], buffers.start[:, None]
            if self.form.is_first:  # none are kept; a place without a token has the first one, and is masked
                self._ring_sources[places] = (last - torch.remainder(last - numbers, places)).clamp(min=0)
            else:
                end = start + last
                newest = end - torch.remainder(end - numbers, places)
                self._ring_sources[places] = torch.where(newest >= start, places + newest - start, numbers)
        return self._ring_sources[places]

    def paged_places(self) -> Tensor:
        """Return where a pool's pages hold the pass's positions: [size], of several rows one after the other."""
        if self._paged_places is None:
            assert self.cache.pool is not None
            table = self.cache.pool.table
            self._paged_places = table.written(self.buffers.places, self.of_rows(table.table)).flatten()
        return self._paged_places

    def _mask(self, kind: str) -> Tensor | None:
        """Return the additive mask of a kind of layer [1 or rows, 1, size, keys], None if it is causal."""
        form, buffers = self.form, self.buffers
        window, ring = self._window(kind)
        own = buffers.own_masks.get(kind) if form.has_own_mask else None
        if own is None:
            is_narrow = window is not None and window < form.size
            if form.is_first and not is_narrow and not self.adds_masks:
                return None
            own = buffers.causal
            if window is not None and is_narrow:
                own = own & (buffers.numbers[None, :] > buffers.numbers[:, None] - window)
        if form.is_first:
            return self._added(own)
        positions = (buffers.start[:, None] + buffers.numbers)[:, :, None]
        if ring is not None:
            end = buffers.start[:, None] - 1
            kept = (end - torch.remainder(end - self._places[:ring], ring))[:, None, :]
            before = (kept >= 0) & (kept > positions - (window or ring))
            return self._added(torch.cat((before, own.expand(form.rows, -1, -1)), dim=2))
        numbers = self._places[: form.places]
        visible = numbers <= positions
        if form.has_own_mask:
            among = numbers - buffers.start  # where a place is in the chunk
            selected = own.index_select(1, among.clamp(0, form.size - 1))
            visible = torch.where((among >= 0) & (among < form.size), selected, visible)
        if window is not None:
            visible = visible & (numbers > positions - window)
        return self._added(visible)

    def _window(self, kind: str) -> tuple[int | None, int | None]:
        """Return (how far a token looks back, itself included, None for everything; the places of the layer's ring, None for
        one that keeps every position)."""
        if kind != "sliding_attention":
            return None, None
        for number, layer in enumerate(self.cache.layers):
            if self._kinds[number] == kind and isinstance(layer, LayerCache):
                if layer.is_ring:
                    return layer.places, layer.places
                break
        return int(self.config.sliding_window), None

    def _added(self, mask: Tensor) -> Tensor:
        added = torch.zeros_like(mask, dtype=self.dtype).masked_fill_(~mask, float("-inf"))
        return added.view(-1, 1, *added.shape[-2:])

    # Inputs of modules ---------------------------------------------------------------------------------------------

    def _decoder(self) -> Callable[..., object]:
        """Return the replacement of the decoder's forward, which may be given embeddings and returns the states of each row's last
        token only, unless the form returns all."""
        inner, given = self.decoder.forward, self.buffers.embeddings if self.form.has_embeddings else None

        def forward(*args: object, **kwargs: object) -> object:
            if given is not None and (args or "inputs_embeds" not in kwargs):
                raise RuntimeError(f"{type(self.hf_model).__name__} does not give its decoder embeddings by name")
            output = inner(*args, **kwargs if given is None else kwargs | {"inputs_embeds": given})
            if not self.form.returns_states:
                output.last_hidden_state = self._last_of(output.last_hidden_state)
            return output

        return forward

    def _layer(self, number: int, masks: Mapping[str, Tensor | None]) -> Callable[..., object]:
        """Return the replacement of a decoder layer's forward in this pass."""
        layer, mask, form = self.layers[number], masks[self._kinds[number]], self.form
        inner = layer.forward

        def own(*args: object, **kwargs: object) -> Any:
            if "attention_mask" not in kwargs:
                raise RuntimeError(f"{type(layer).__name__} is not given its mask by name")
            return inner(*args, **kwargs | {"attention_mask": mask})

        def deep(*args: object, **kwargs: object) -> object:
            return own(*args, **kwargs) + self.buffers.deep[number]

        def skipped(hidden_states: Tensor, *args: object, **kwargs: object) -> object:
            return hidden_states

        def last(*args: object, **kwargs: object) -> object:
            named = {name: self._last_of(value) for name, value in kwargs.items()}
            return inner(*map(self._last_of, args), **named | {"attention_mask": self._mask_of_last(mask)})

        if number >= self.first_shared and not form.returns_states:
            return skipped if not form.is_last else last if self.lasts is None else self.lasts(number, self.buffers)
        if number < form.deep:
            return deep
        return own if self.firsts is None or number >= self.first_shared else self.firsts(number, mask)

    def _mask_of_last(self, mask: Tensor | None) -> Tensor:
        if mask is None:
            return self._added((self.buffers.numbers <= self.buffers.last[:, None])[:, None, :])
        return self._at_last(mask[:, 0])[:, None]

    def _last_of(self, value: object) -> object:
        """Return a layer's input for each row's last token: of every tensor whose second to last dimension is the tokens and
        whose third to last is the rows (Gemma 3n has several states of each token in front)."""
        if isinstance(value, tuple):
            return tuple(self._last_of(one) for one in value)
        if isinstance(value, Tensor) and value.dim() > 2 and value.shape[-2] == self.form.size:
            return self._at_last(value)
        return value

    def _at_last(self, value: Tensor) -> Tensor:
        """Shapes: [..., rows or 1, size, D] -> [..., rows, 1, D]."""
        if self.form.rows == 1:
            return value.index_select(-2, self.buffers.last)
        value = value.expand(*value.shape[:-3], self.form.rows, *value.shape[-2:])
        return value.take_along_dim(self.buffers.last[:, None, None].expand(*value.shape[:-2], 1, 1), dim=-2)
