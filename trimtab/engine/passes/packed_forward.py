"""Several prompts in one chunk of fixed shapes: a batch of rows, each with its own prompt.

    forward = PackForward(hf_model, cache, dtype)
    form = forward.pack_form(pieces, size, rows)   # pieces: of up to `rows` prompts, each with its row of the cache
    forward.load_pack(form, pieces)               # the only copy from the host
    logits = forward.run(form)                     # [rows, V] float32 of each prompt's last token

A prompt of 64 tokens takes nearly as long as one of 512, because either reads and unpacks every weight. As rows of one pass they
share that: products see all tokens, attention sees one prompt at a time, with the keys and values of its row of the cache.
Every piece goes to its prompt's end. A row has as many places as the longest piece needs; a pass of fewer prompts than rows
repeats the first one, which writes the same values to the same places.

Positions, masks, rows of the cache and last tokens are computed on the device from tensors, as chunk_forward.py has it: a pass can
be captured, and prompts of any lengths up to the form's use the same graph. Layers that read the keys and values of earlier ones
see the last token of each prompt alone.

Not covered: images and audio, prompts of more than one chunk: these are computed alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from trimtab.engine.kv.kv_cache import BatchedKVCache, LayerCache, PagedLayer
from trimtab.engine.lora.store import covered
from trimtab.engine.passes.chunk_forward import SMALLEST_PLACES, ChunkForward, ChunkLayer, Form

if TYPE_CHECKING:
    from trimtab.engine.formats.hf_types import HFModel


@dataclass(frozen=True)
class Piece:
    """The part of one prompt in a pass: its tokens from `start` to its end. row: of the cache, with the tokens before them."""

    token_ids: Sequence[int]
    start: int
    row: int

    @property
    def count(self) -> int:
        return len(self.token_ids) - self.start


class PackBuffers:
    """The tensors of one shape of pass, written before each. Shapes: ids [rows, size], positions [1 or 3, rows, size]; start, count
    and row [rows], all parts of one tensor."""

    def __init__(self, rows: int, size: int, axes: int, context_tokens: int, device: torch.device) -> None:
        self.rows, self.size, self.axes, self.context_tokens, self.device = rows, size, axes, context_tokens, device
        tokens = rows * size
        self._held = torch.zeros((1 + axes) * tokens + 3 * rows, dtype=torch.long, device=device)
        self.ids = self._held[:tokens].view(rows, size)
        self.positions = self._held[tokens : (1 + axes) * tokens].view(axes, rows, size)
        self.start, self.count, self.row = self._held[(1 + axes) * tokens :].view(3, rows)
        self.numbers = torch.arange(size, device=device)
        self.causal = self.numbers[None, :] <= self.numbers[:, None]
        self.last, self.places = torch.empty_like(self.count), torch.empty_like(self.ids)
        self.derive()

    def derive(self) -> None:
        """Compute the values that depend on start and count; the first operations of a pass."""
        torch.sub(self.count, 1, out=self.last)
        # Padding behind the context's end goes to its last place, which no prompt that leaves room for an answer uses.
        torch.clamp(self.start[:, None] + self.numbers, max=self.context_tokens - 1, out=self.places)

    def write(self, pieces: Sequence[Piece]) -> None:
        """Copy the numbers of a pass to the device at once."""
        values = torch.zeros_like(self._held, device="cpu", pin_memory=self.device.type == "cuda")
        tokens = self.rows * self.size
        ids = values[:tokens].view(self.rows, self.size)
        numbers = values[(1 + self.axes) * tokens :].view(3, self.rows)
        for at in range(self.rows):
            piece = pieces[at] if at < len(pieces) else pieces[0]
            ids[at, : piece.count] = torch.tensor(piece.token_ids[piece.start :], dtype=torch.long)
            numbers[:, at] = torch.tensor((piece.start, piece.count, piece.row))
        positions = values[tokens : (1 + self.axes) * tokens].view(self.axes, self.rows, self.size)
        positions.copy_((numbers[0][:, None] + torch.arange(self.size)).clamp_(max=self.context_tokens - 1))
        self._held.copy_(values, non_blocking=True)

    @property
    def nbytes(self) -> int:
        return self._held.nbytes + self.numbers.nbytes + self.causal.nbytes


class _PackLayer(ChunkLayer):
    """One layer's keys and values of the rows of a pass, as it writes and reads them."""

    owner: PackForward

    def _one(self, kept: Tensor, new: Tensor) -> Tensor:
        """Shapes: kept [cache rows, H, places, D], in pages [H, P, D]; new [rows, H, size, D]."""
        form, buffers = self.owner.form, self.owner.pack
        if isinstance(self.target, PagedLayer):
            table = self.target.pool.table
            kept.index_copy_(1, self.owner.paged_places(), new.transpose(0, 1).flatten(1, 2))
            return new if form.is_first else table.of(kept, table.table.index_select(0, buffers.row), form.places)
        if self.target.is_ring:
            both = new if form.is_first else torch.cat((kept.index_select(0, buffers.row), new), dim=2)
            sources = self.owner.ring_sources(self.target.places)[:, None, :, None]
            kept.index_copy_(0, buffers.row, both.take_along_dim(sources, dim=2))
            return both
        if form.is_first:
            count = min(form.size, self.target.places)
            kept[:, :, :count].index_copy_(0, buffers.row, new[:, :, :count])
            return new
        kept[buffers.row[:, None], :, buffers.places] = new.transpose(1, 2)
        return kept[:, :, : form.places].index_select(0, buffers.row)


class PackForward(ChunkForward):
    """Passes of several prompts through a model, their keys and values in rows of a cache. Inference only."""

    def __init__(self, hf_model: HFModel, cache: BatchedKVCache, dtype: torch.dtype) -> None:
        super().__init__(hf_model, cache, dtype)
        mine = [_PackLayer(one, self) if isinstance(one, LayerCache) else one for one in cache.layers]
        self._cache = type(self._cache)(layers=mine)
        self._packs: dict[tuple[int, int], PackBuffers] = {}

    @property
    def pack(self) -> PackBuffers:
        """The buffers of the form that runs."""
        return self._packs[self.form.rows, self.form.size]

    def pack_form(self, pieces: Sequence[Piece], size: int, rows: int, *, by_table: bool = False) -> Form:
        """Return the form of a pass of these pieces, each of up to `size` tokens, in `rows` rows."""
        places = 0
        if any(piece.start for piece in pieces):
            places = SMALLEST_PLACES
            while places < max(len(piece.token_ids) for piece in pieces):
                places *= 2
            places = min(places, self.cache.context_tokens)
        return Form(size, places, is_last=True, rows=rows, by_table=by_table)

    def load_pack(self, form: Form, pieces: Sequence[Piece]) -> None:
        """Copy the tokens of a pass to its buffers."""
        key = form.rows, form.size
        if key not in self._packs:
            self._packs[key] = PackBuffers(*key, self._axes, self.cache.context_tokens, self.device)
        self._packs[key].write(pieces)

    def _run(self, form: Form) -> Tensor:
        """Return the logits [rows, V] float32 of each row's last token. Keys and values are written."""
        buffers = self.pack
        buffers.derive()
        masks = {kind: self._mask(kind) for kind in dict.fromkeys(self._kinds)}
        forwards = {layer: self._layer(number, masks) for number, layer in enumerate(self.layers)}
        if self.first_shared == len(self.layers):
            forwards[self.decoder] = self._with_last_tokens()
        positions = buffers.positions if self._axes == 3 else buffers.positions[0]
        inputs: dict[str, object] = {
            "input_ids": buffers.ids, "position_ids": positions, "past_key_values": self._cache,
            "attention_mask": self._ready if getattr(self.config, "layer_types", None) is None else masks,
            # A number would have transformers drop all tokens but the last, which may be padding.
            "use_cache": True, "return_dict": True, "logits_to_keep": torch.zeros_like(buffers.last[:1]),
        }  # fmt: skip
        with torch.no_grad(), covered(forwards):
            logits: Tensor = self.hf_model(**inputs).logits
        return logits[:, -1].float()

    # Masks ---------------------------------------------------------------------------------------------------------

    def ring_sources(self, places: int) -> Tensor:
        """Return [rows, places]: for each place of a sliding layer, which of (places kept, tokens of the pass) it holds
        afterwards."""
        if places not in self._ring_sources:
            buffers, numbers = self.pack, self._places[:places]
            last, start = buffers.last[:, None], buffers.start[:, None]
            if self.form.is_first:
                self._ring_sources[places] = (last - torch.remainder(last - numbers, places)).clamp(min=0)
            else:
                end = start + last
                newest = end - torch.remainder(end - numbers, places)
                self._ring_sources[places] = torch.where(newest >= start, places + newest - start, numbers)
        return self._ring_sources[places]

    def _places_in_pages(self) -> Tensor:
        assert self.cache.pool is not None
        table = self.cache.pool.table
        return table.written(self.pack.places, table.table.index_select(0, self.pack.row)).flatten()

    def _mask(self, kind: str) -> Tensor | None:
        """Return the additive mask of a kind of layer [1 or rows, 1, size, keys], None if it is causal."""
        form, buffers = self.form, self.pack
        window, ring = self._window(kind)
        own = buffers.causal
        if window is not None and window < form.size:
            own = own & (buffers.numbers[None, :] > buffers.numbers[:, None] - window)
        elif form.is_first and not self.adds_masks:
            return None
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
        if window is not None:
            visible = visible & (numbers > positions - window)
        return self._added(visible)

    def _added(self, mask: Tensor) -> Tensor:
        added = torch.zeros_like(mask, dtype=self.dtype).masked_fill_(~mask, float("-inf"))
        return added.view(-1, 1, *added.shape[-2:])

    # Inputs of modules ---------------------------------------------------------------------------------------------

    def _with_last_tokens(self) -> Callable[..., object]:
        """Return a replacement of the decoder's forward that returns the states of each row's last token only."""
        inner = self.decoder.forward

        def forward(*args: object, **kwargs: object) -> object:
            output = inner(*args, **kwargs)
            output.last_hidden_state = self._last_of(output.last_hidden_state)
            return output

        return forward

    def _mask_of_last(self, mask: Tensor | None) -> Tensor:
        if mask is None:
            return self._added((self.pack.numbers <= self.pack.last[:, None])[:, None, :])
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
        value = value.expand(*value.shape[:-3], self.form.rows, *value.shape[-2:])
        return value.take_along_dim(self.pack.last[:, None, None].expand(*value.shape[:-2], 1, 1), dim=-2)
