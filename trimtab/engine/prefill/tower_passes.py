"""When do the towers of a prompt with media run: before its chunks, or in pieces between the steps of other rows?"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from trimtab.engine.kv import kv_cache, sequence
from trimtab.engine.kv.sequence import PrefillState
from trimtab.engine.lora.store import Place, covered
from trimtab.engine.memory.out_of_memory import is_out_of_memory
from trimtab.engine.memory.shared_pool import PrefillMemoryPool
from trimtab.engine.passes.media_embeddings import Media, looking_ahead, media_of
from trimtab.engine.prefill.rows import Passes
from trimtab.engine.towers.pieces import (
    PIECE_POSITIONS,
    PIECE_S,
    NotKeptError,
    OtherInputsError,
    PausedError,
    TowerPieces,
    TowersDoneError,
)
from trimtab.errors import RequestError

T = TypeVar("T")


class TowerPasses:
    """The towers' passes of one batch's prompts. takes_media: whether captured prompts know this family's media. paused: prompts in
    the middle of their towers."""

    def __init__(self, prompts: Passes) -> None:
        self.prompts, self.takes_media = prompts, True
        self.paused: WeakKeyDictionary[PrefillState, TowerPieces] = WeakKeyDictionary()
        # Of prompts whose towers are complete: the adapter's serial, and embeddings [1, S, D].
        self._embeddings: WeakKeyDictionary[PrefillState, tuple[int | None, Tensor]] = WeakKeyDictionary()

    def media_of(self, prompt: PrefillState) -> Media | None:
        """Return the inputs of a prompt with media after its towers have run; None where this is unknown for the family.

        Errors: PausedError if the towers continue in the next chunk, because rows are being decoded.
        """
        is_busy, pieces = bool(self.prompts.batch.active), self._begin_pieces(prompt)
        key = self.prompts.layouts.set_towers(prompt.row.adapter)
        sequence.reset_offset(self.prompts.model.hf_model)
        ops, room = self.prompts.tower_ops(), self._room()
        prefixes, counts = self.prompts.batch.prefixes, Counter[str]()
        try:
            with (
                torch.no_grad(),
                nullcontext() if room is None else room.using(),
                ops,
                self.prompts.towers.running(*key, is_busy=is_busy, pieces=pieces),
            ):
                media = media_of(self.prompts.model.hf_model, prompt.inputs.tensors, prefixes.encoders(prompt, counts))
        except PausedError:
            self.paused[prompt] = pieces
            if room is not None:
                pieces.copy_kept()
            raise
        except (RuntimeError, KeyError) as exc:
            if is_out_of_memory(exc):
                raise
            if not pieces.is_cut:
                self.takes_media = False
                self.prompts.fall_back(f"{type(exc).__name__}: {exc}", "captured prompts with media")
                return None
            self.prompts.towers.stop_cutting()
            self.prompts.fall_back(f"{type(exc).__name__}: {exc}", "towers in pieces")
        else:
            prefixes.count_media(counts)
            if room is not None:
                media = _copied(media)
                sequence.copy_offset(self.prompts.model.hf_model)
                del pieces  # it keeps the last layer's output
                room.check()
            return media
        return self.media_of(prompt)

    def _room(self) -> PrefillMemoryPool | None:
        """Return the room that towers share with prompts, None for captured towers: their graphs have separate memory, and
        operations between two of them must not allocate where a graph of a prompt may write."""
        return None if self.prompts.towers.captures else self.prompts.room

    def _begin_pieces(self, prompt: PrefillState) -> TowerPieces:
        """Return the pieces of a prompt's next towers' pass: None while no row is being decoded."""
        serial, pieces = self.prompts.serial_of(prompt.row.adapter), self.paused.pop(prompt, None)
        if pieces is None or pieces.serial != serial:
            pieces = TowerPieces(serial)
        if self.prompts.batch.active and self.prompts.towers.may_cut:
            pieces.begin(PIECE_POSITIONS, PIECE_S if self.prompts.device.type == "cpu" else None)
        else:
            pieces.begin(None)
        return pieces

    def is_between_pieces(self, prompt: PrefillState) -> bool:
        """Whether a prompt's towers have begun, and nothing of its decoder."""
        return prompt in self.paused or (self.has_embeddings(prompt) and not prompt.done_tokens)

    def has_embeddings(self, prompt: PrefillState) -> bool:
        """Whether a prompt's towers are complete, and transformers' passes of its chunks take their embeddings from here."""
        return prompt in self._embeddings

    def embedded(self, prompt: PrefillState, start: int, end: int) -> dict[Place, object]:
        """Return the decoder's forward for transformers' pass of a chunk: of the embeddings that the towers' pass has made of its
        tokens.

        Errors: RequestError if the prompt's adapter was unloaded since then.
        """
        serial, embeddings = self._embeddings[prompt]
        if serial != self.prompts.serial_of(prompt.row.adapter):
            raise unloaded_error(prompt, self.prompts.model.adapters)
        decoder = self.prompts.model.hf_model.get_decoder()
        inner = decoder.forward

        def decode(**kwargs: object) -> object:
            return inner(**kwargs | {"inputs_embeds": embeddings[:, start:end]})

        return {decoder: decode}

    def drop_embeddings(self, prompt: PrefillState) -> None:
        """Forget the embeddings of a prompt whose last chunk was computed."""
        del self._embeddings[prompt]

    def with_towers(self, prompt: PrefillState, compute: Callable[[], T], *, is_counted: bool = True) -> T:
        """Return the result of `compute`: transformers' pass of a whole prompt with media. On a CPU the towers are computed in
        pieces before the decoder while rows are being decoded. is_counted: False where an earlier pass has counted the
        look-ups of its media.

        Errors: PausedError if the pass continues in the next piece; then nothing of the decoder has run.
        """
        prefixes, counts = self.prompts.batch.prefixes, Counter[str]()
        if self.prompts.device.type != "cpu" or not self.prompts.towers.may_cut:
            paused = self.paused.pop(prompt, None)  # not None if another prompt has ended the cutting in between
            is_counted = is_counted and not (paused is not None and paused.is_done)
            with covered(prefixes.encoders(prompt, counts if is_counted else Counter())):
                output = compute()
            prefixes.count_media(counts)
            return output
        pieces, decoder = self._begin_pieces(prompt), self.prompts.model.hf_model.get_decoder()
        is_counted = is_counted and not pieces.is_done
        inner = decoder.forward

        def decode(*args: object, **kwargs: Any) -> object:
            try:
                pieces.end()
            except TowersDoneError:
                if not args and not self.prompts.batch.is_invariant and _may_be_chunked(kwargs):
                    self._embeddings[prompt] = (pieces.serial, kwargs["inputs_embeds"])
                raise
            return inner(*args, **kwargs)

        try:
            with (
                self.prompts.towers.running(None, pieces.serial, is_busy=bool(self.prompts.batch.active), pieces=pieces),
                covered({**prefixes.encoders(prompt, counts if is_counted else Counter()), decoder: decode}),
            ):
                output = compute()
        except PausedError as exc:
            if isinstance(exc, TowersDoneError):  # only the decoder is left
                prefixes.count_media(counts)
            if prompt not in self._embeddings:
                self.paused[prompt] = pieces
            raise
        except (NotKeptError, OtherInputsError) as exc:
            self.prompts.towers.stop_cutting()
            self.prompts.fall_back(f"{type(exc).__name__}: {exc}", "towers in pieces")
        else:
            prefixes.count_media(counts)
            return output
        cache = kv_cache.prompt_cache(self.prompts.model.hf_model, self.prompts.batch.cache.kv)
        prompt.begin_chunk(prompt.chunk_tokens, cache=cache)
        return self.with_towers(prompt, compute, is_counted=is_counted)


def _copied(media: Media) -> Media:
    """Return the same with separate tensors."""
    masks = {kind: mask.clone() for kind, mask in media.masks.items()}
    deep = tuple(one.clone() for one in media.deep)
    return replace(media, embeddings=media.embeddings.clone(), deep=deep, masks=masks)


def unloaded_error(prompt: PrefillState, adapters: Sequence[str]) -> RequestError:
    """Return the error of a prompt whose adapter was unloaded since it began."""
    return RequestError(
        "this adapter was unloaded while a prompt was running", field="adapter", value=prompt.row.adapter,
        allowed=adapters, hint="Send the request again",
    )  # fmt: skip


def _may_be_chunked(inputs: Mapping[str, object]) -> bool:
    """Whether the inputs of a decoder's pass of a whole prompt with media can be given in chunks as embeddings alone: no token
    looks ahead, positions count up, and later layers add nothing."""
    positions, mask = inputs.get("position_ids"), inputs.get("attention_mask")
    if inputs.get("inputs_embeds") is None or inputs.get("deepstack_visual_embeds") is not None:
        return False
    if (isinstance(positions, Tensor) and positions.dim() == 3) or (isinstance(mask, Tensor) and mask.dim() != 2):
        return False
    return not looking_ahead(mask)[0]
