"""How are the keys and values of earlier prompts and answers used for prompts that begin with the same tokens?"""

from __future__ import annotations

import secrets
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_unflatten

from trimtab.engine.decode import batch_invariant
from trimtab.engine.kv import int8, kv_cache, sequence
from trimtab.engine.kv.kv_cache import BatchedKVCache, LayerCache
from trimtab.engine.kv.prefix_layout import CopyBuffer, Layout, RowViews, copy, holds_window
from trimtab.engine.kv.prefix_store import Match, PrefixKey, PrefixStore, scope_of
from trimtab.engine.kv.recurrent import RecurrentLayer, set_states
from trimtab.engine.kv.sequence import Inputs, PrefillState, Reuse, TokenSequence
from trimtab.engine.lora.store import Place
from trimtab.engine.passes import attention
from trimtab.engine.prefill import encoder_cache
from trimtab.engine.prefill.rows import Rows
from trimtab.engine.tiers.reader import HostMemory
from trimtab.errors import DoesNotFitError, RequestError, gib
from trimtab.planning.memory.prefix_cache import ALIGNED, BLOCK_TOKENS, LEAST_PAGE_BYTES, prefix_reason, staging_bytes

if TYPE_CHECKING:
    from transformers.cache_utils import Cache

    from trimtab.engine.prefill.rows import PrefillContext

# A snapshot that saves fewer tokens than this is not worth its room, nor a separate chunk behind the prefix that two prompts share.
LEAST_SAVED_TOKENS = 64
# An opening that saves fewer is not worth a cut, which costs one pass more: with E4B on an H100 64 tokens take 9.5 ms, as long as
# about 600 tokens more of a long prompt. No second prompt has shown yet that the opening is shared.
LEAST_CUT_TOKENS = 256


class _Kept(NamedTuple):
    """A tensor of a blob. start: its first byte there."""

    start: int
    shape: torch.Size
    dtype: torch.dtype


class PrefixCache:
    """Cached prefixes of one loaded model, in `capacity_bytes` of host memory. Errors: RequestError below one page.

    why_not: why this family's state cannot be kept, None if it can. The key of a prompt is its tokens, the content of its adapter,
    images and audio, and its client. `prefix_store.py` decides the place of each entry.
    """

    def __init__(self, model: PrefillContext, capacity_bytes: int, *, block_tokens: int = BLOCK_TOKENS) -> None:
        if capacity_bytes < LEAST_PAGE_BYTES:
            raise RequestError(f"must be at least {LEAST_PAGE_BYTES} bytes", field="prefix_cache", value=capacity_bytes)
        self.capacity_bytes, self.block_tokens = capacity_bytes, block_tokens
        self.device: torch.device = model.device
        self.why_not = model.anatomy.capture_unsupported
        self.context_tokens: int = model.context_tokens
        # Keys of a text that is longer than its rotation's limit turn otherwise than those of a shorter one.
        self.most_tokens = attention.most_tokens(model.hf_model) or self.context_tokens
        # The windows of sliding layers, and whether layers are recurrent. Without either a prompt resumes behind every block.
        self.windows = () if self.why_not else kv_cache.windows(model.hf_model, self.context_tokens)
        self.is_recurrent = self.why_not is None and kv_cache.keeps_states(model.hf_model)
        self.layout: Layout | None = None
        self.store: PrefixStore | None = None
        # Keys cannot be guessed from tokens: the secret belongs to this process alone.
        self._secret = secrets.token_bytes(32)
        is_gpu = self.device.type == "cuda"
        self._memory = HostMemory(capacity_bytes if self.why_not is None else 0, pinned=is_gpu)
        self._staging: Tensor | None = None
        self._buffer: CopyBuffer | None = None
        self.encoder_counts: Counter[str] = Counter()  # of images and groups of audio clips, and passes of towers
        if is_gpu and self.why_not is None:
            layers, dtype = model.anatomy.kv_layers, model.anatomy.dtype
            count = staging_bytes(layers, dtype, context_tokens=self.context_tokens)
            self._staging = torch.empty(count, dtype=torch.uint8, device=self.device)

    @classmethod
    def within(cls, model: PrefillContext, capacity_bytes: int) -> PrefixCache:
        """Return a model's cache. Errors: RequestError if no prompt could resume from so few bytes, DoesNotFitError if the plan's
        host budget leaves less."""
        plan = model.plan
        prefix_reason(plan.request, model.anatomy, capacity_bytes)
        free_bytes = int(plan.host_budget_bytes - plan.host_peak_bytes + plan.host.get("prefix_cache", 0))
        if capacity_bytes > free_bytes:
            raise DoesNotFitError(
                f"the plan leaves {gib(max(free_bytes, 0))} of host memory", block="prefix cache", device="host",
                needed_bytes=capacity_bytes, budget_bytes=max(free_bytes, 0), hint="Plan with prefix_cache=",
            )  # fmt: skip
        return cls(model, capacity_bytes)

    def close(self) -> None:
        """Free the memory."""
        self._memory.close()
        self.layout, self.store, self._staging, self._buffer = None, None, None, None

    @property
    def staging_bytes(self) -> int:
        """Bytes of the buffer on the device that copies pass."""
        return 0 if self._staging is None else self._staging.numel()

    def switch_off(self, exc: Exception) -> None:
        """Stop using the cache after a failure, which `LoadedModel.fallbacks` names."""
        self.why_not = f"switched off: {type(exc).__name__}: {exc}"
        if self.store is not None:
            self.store.clear()

    def scope(self, client: str, adapter_content: str) -> bytes:
        """Return the scope that separates clients and adapters of other content."""
        return scope_of(self._secret, client, adapter_content)

    def numbers(self) -> dict[str, int]:
        """Return the values for metrics: lookups, hits, hit_tokens, added, evicted, bytes held and at most, and of images and audio
        media_lookups, media_hits, media_passes."""
        media = {f"media_{name}": self.encoder_counts[name] for name in ("lookups", "hits", "passes")}
        store, layout = self.store, self.layout
        used = 0 if store is None or layout is None else store.used_pages * layout.page_bytes
        names = ("lookups", "hits", "hit_tokens", "added", "evicted")
        ours = {name: 0 if store is None else store.counts[name] for name in names}
        return ours | media | {"bytes": used, "capacity_bytes": self.capacity_bytes}

    def learn(self, cache: BatchedKVCache) -> bool:
        """Set the layout from a family's first states. Returns whether it is known and a page fits."""
        if self.layout is None:
            if not all(one.is_initialized for one in cache.layers if isinstance(one, LayerCache | RecurrentLayer)):
                return False  # recurrent layers have memory before the first prompt is computed, others have not
            layout = Layout.of(cache, self.block_tokens)
            pages = self.capacity_bytes // layout.page_bytes
            if not (layout.blocks or layout.rings) or not pages:
                return False
            snapshot = -(-layout.snapshot_bytes // layout.page_bytes)
            self.layout, self._buffer = layout, CopyBuffer(layout, self._staging)
            self.store = PrefixStore(pages=pages, block_tokens=self.block_tokens, snapshot_pages=snapshot)
        return self.store is not None

    # Moving bytes -----------------------------------------------------------------------------------------------------

    def save(self, key: PrefixKey, views: RowViews, *, snapshot: bool, offset: int | None = None) -> None:
        """Keep the states after all tokens of a key. snapshot: whether the sliding layers' are those after the last of them."""
        assert self.store is not None and self._buffer is not None
        added = self.store.add(key, snapshot=snapshot, offset=offset)
        try:
            for group in self._groups(added.blocks):
                flat, parts = self._buffer.blocks(len(group))
                views.copy_blocks(group[0][0], parts, into_row=False)
                self._to_pages([page for _, page in group], 0, flat)
            if added.snapshot:
                self._move_snapshot(added.snapshot, len(key.token_ids), views, into_row=False)
        except BaseException:
            self.store.clear()  # reserved pages that were not filled have no owner
            raise

    def load(self, match: Match, views: RowViews) -> None:
        """Copy the states of the first match.tokens tokens into a row or prompt."""
        assert self._buffer is not None
        for group in self._groups(list(enumerate(match.blocks))):
            flat, parts = self._buffer.blocks(len(group))
            self._from_pages([page for _, page in group], 0, flat)
            views.copy_blocks(group[0][0], parts, into_row=True)
        if match.snapshot:
            self._move_snapshot(match.snapshot, match.tokens, views, into_row=True)

    def put_blob(self, key: bytes, value: object) -> None:
        """Keep a value of tensors, dictionaries and lists, if there is room."""
        if self.store is None or self.layout is None:
            return
        leaves, form = tree_flatten(value)
        flats = [one.detach().contiguous().reshape(-1).view(torch.uint8) for one in leaves if isinstance(one, Tensor)]
        starts = [sum(-(-flat.numel() // ALIGNED) * ALIGNED for flat in flats[:n]) for n in range(len(flats) + 1)]
        at = iter(starts)
        kept = [_Kept(next(at), one.shape, one.dtype) if isinstance(one, Tensor) else one for one in leaves]
        pages = self.store.add_blob(key, max(-(-starts[-1] // self.layout.page_bytes), 1), (form, kept))
        if pages is None:
            return
        try:
            for start, flat in zip(starts, flats, strict=False):
                self._to_pages(pages, start, flat)
        except Exception as exc:  # the answer goes on without a cache
            self.switch_off(exc)

    def get_blob(self, key: bytes) -> Any:
        """Return a value that was kept, on the model's device; None if it was not."""
        found = None if self.store is None else self.store.find_blob(key)
        if found is None:
            return None
        pages, (form, leaves) = found
        return tree_unflatten([self._read(pages, one) if isinstance(one, _Kept) else one for one in leaves], form)

    def _read(self, pages: Sequence[int], kept: _Kept) -> Tensor:
        tensor = torch.empty(kept.shape, dtype=kept.dtype, device=self.device)
        self._from_pages(pages, kept.start, tensor.reshape(-1).view(torch.uint8))
        return tensor

    def _groups(self, blocks: Sequence[tuple[int, int]]) -> Iterator[Sequence[tuple[int, int]]]:
        """Yield consecutive blocks, as many at a time as the buffer holds."""
        assert self._buffer is not None
        count = self._buffer.most_pages
        for first in range(0, len(blocks), count):
            yield blocks[first : first + count]

    def _move_snapshot(self, pages: Sequence[int], tokens: int, views: RowViews, *, into_row: bool) -> None:
        """Copy a snapshot: the sliding layers' states after `tokens`, and the tokens after the last whole block."""
        assert self._buffer is not None
        tail = tokens % self.block_tokens
        for part in self._buffer.parts(has_tail=bool(tail)):
            flat, rings, tails = self._buffer.part(part)
            if into_row:
                self._from_pages(pages, part.start, flat)
            # Two lists: one tensor with gaps would make torch copy all of a list one by one.
            copy(views.rings[part.rings.start : part.rings.stop], rings, into_row=into_row)
            if tails:
                row_tails = views.tails(tokens - tail, tail, part.tails)
                copy(row_tails, [view.narrow(1, 0, tail) for view in tails], into_row=into_row)
            if not into_row:
                self._to_pages(pages, part.start, flat)

    def _runs(self, pages: Sequence[int], start: int, count: int) -> Iterator[tuple[int, int, int]]:
        """Yield (byte of the memory, byte of a buffer, how many) for `count` bytes from byte `start` of these pages on."""
        assert self.layout is not None
        size, done = self.layout.page_bytes, 0
        while done < count:
            number, inside = divmod(start + done, size)
            last = number
            while last + 1 < len(pages) and pages[last + 1] == pages[last] + 1:
                last += 1
            length = min((last + 1 - number) * size - inside, count - done)
            place = pages[number] * size + inside
            yield place, done, length
            done += length

    def _to_pages(self, pages: Sequence[int], start: int, flat: Tensor) -> None:
        for place, first, count in self._runs(pages, start, flat.numel()):
            self._memory.tensor.narrow(0, place, count).copy_(flat.narrow(0, first, count), non_blocking=True)

    def _from_pages(self, pages: Sequence[int], start: int, flat: Tensor) -> None:
        for place, first, count in self._runs(pages, start, flat.numel()):
            flat.narrow(0, first, count).copy_(self._memory.tensor.narrow(0, place, count), non_blocking=True)


@dataclass(frozen=True)
class _Unsaved:
    """A computed prompt, whose first token is sent before its states are copied."""

    row: TokenSequence
    offset: int
    logits: Tensor | None


# One batch -----------------------------------------------------------------------------------------------------------


class Prefixes:
    """The use of a model's prefix cache by one batch; nothing where the model has none. Families with sliding or recurrent layers
    resume where a snapshot is kept: at the end of prompts, answers and openings, and where a second prompt parts from an earlier
    one. Batch-invariant prompts resume only where their pieces begin."""

    def __init__(self, batch: Rows) -> None:
        self.batch, self.model = batch, batch.model
        # Where each pass copies weights, a cut takes longer than many openings save.
        self.cuts_openings = batch.model.plan.is_whole
        self._unsaved: list[_Unsaved] = []
        # By row, of a cache of this layout.
        self._row_views: dict[int, RowViews] = {}
        self._layout_of_views: Layout | None = None

    @property
    def cache(self) -> PrefixCache | None:
        """The model's cache, None if this batch cannot use it: rings of another context have another layout."""
        cache = self.model.prefix_cache
        if cache is None or cache.why_not is not None or cache.context_tokens != self.batch.context_tokens:
            return None
        return cache

    def find(self, prompt: PrefillState, *, may_end_at: Callable[[int], bool] = lambda _: True) -> Match:
        """Return the cached part of a prompt: all of it with the logits of its last token, or at most all tokens but the last; none
        of one that returns states. Also records where a snapshot would help."""
        self.flush()
        cache, inputs, row = self.cache, prompt.inputs, prompt.row
        row.begin_reuse(None, 0)
        if cache is None or row.client is None or (inputs.has_media and not inputs.marks) or self._is_gone(row.adapter):
            return Match()
        piece = batch_invariant.piece_tokens(self.batch.prompts.sizes, self.model.prefill_tokens) if self.batch.is_invariant else 0
        if inputs.prompt_tokens > cache.most_tokens or (piece and inputs.has_media):
            return Match()
        serial = None if row.adapter is None else self.model.adapter_store.serial_of(row.adapter)
        scope = cache.scope(row.client, self.model.adapter_content(row.adapter))
        key, store, last = PrefixKey(scope, inputs.token_ids, inputs.marks), cache.store, inputs.prompt_tokens - 1
        if piece:  # a batch-invariant prompt takes whole pieces, and is cut behind its last one to keep them
            match = Match() if store is None else store.find(key, limit=last, may_end_at=lambda place: place % piece == 0)
            whole = inputs.prompt_tokens // piece * piece
            row.begin_reuse(Reuse(key, serial, whole if whole > match.tokens else None, offset=match.offset), match.tokens)
            return match
        match, logits = Match(), None
        if store is not None and not prompt.returns_states:
            logits = cache.get_blob(_logits_key(key))  # of an identical earlier prompt
            if logits is not None:
                match = store.find(key, limit=inputs.prompt_tokens, may_end_at=may_end_at)
                logits = logits if match.tokens == inputs.prompt_tokens else None
            if logits is None:
                match = store.find(key, limit=last, may_end_at=may_end_at)
        border: int | None = None
        places: tuple[int, ...] = ()
        if (cache.windows or cache.is_recurrent) and logits is None and not prompt.returns_states:
            border, places = self._snapshots(cache, inputs, match, may_end_at)
        row.begin_reuse(Reuse(key, serial, border, places, match.offset, logits), match.tokens)
        return match

    def peek(self, prompt: PrefillState) -> int:
        """Return how many tokens of a prompt are cached. The prompt reuses none of them yet."""
        row = prompt.row
        reuse, cached_tokens = row.reuse, row.cached_tokens
        found = self.find(prompt)
        row.begin_reuse(reuse, cached_tokens)
        return found.tokens

    def _snapshots(
        self, cache: PrefixCache, inputs: Inputs, match: Match, may_end_at: Callable[[int], bool]
    ) -> tuple[int | None, tuple[int, ...]]:
        """Return where in a prompt snapshots are kept for later prompts: with a cut where the sliding layers will have written over
        them by its end, None for none; and at its end."""
        # The end of a turn, where it saves half of the tokens that two prompts share: the text behind it is often equal by chance.
        least = (match.tokens + match.shared_tokens) / 2
        turns = [turn for turn in inputs.turns if least <= turn <= match.shared_tokens]
        shared, border, places = max(turns, default=match.shared_tokens), 0, set[int]()
        may_cut_opening = self.cuts_openings and inputs.opening - match.tokens >= LEAST_CUT_TOKENS
        for place, may_cut in ((shared, True), (inputs.opening, may_cut_opening)):
            if place - match.tokens < LEAST_SAVED_TOKENS or any(mark.start < place < mark.end for mark in inputs.marks):
                continue
            # A prompt leaves window - 1 positions at least: those that transformers keeps.
            holds = (holds_window(place, inputs.prompt_tokens, window, window - 1) for window in cache.windows)
            if not cache.is_recurrent and all(holds):
                places.add(place)
            elif may_cut and may_end_at(place):
                border = max(place, border)
        return border or None, tuple(sorted(places))

    def _is_gone(self, adapter: str | None) -> bool:
        """Whether an adapter was unloaded: the pass itself refuses it."""
        return adapter is not None and adapter not in self.model.adapter_store.names

    def resume(self, prompt: PrefillState) -> None:
        """Start a prompt that transformers computes after its cached part, at the positions of that part.

        Images and audio are computed with the whole prompt: it resumes after the last one, or not at all.
        """
        behind = max((mark.end for mark in prompt.inputs.marks), default=0)
        match = self.find(prompt, may_end_at=lambda place: place >= behind)
        needs_offset = prompt.inputs.has_media and sequence.has_three_axes(self.model.hf_model)
        if not match.tokens or (needs_offset and match.offset is None):
            prompt.row.begin_reuse(prompt.row.reuse, 0)
            return
        reuse, offset = prompt.row.reuse, (match.offset or 0) if needs_offset else 0
        logits = None if reuse is None else reuse.logits
        prompt.take_states(match.tokens, logits=logits, cache=self.into_cache(match), offset=offset)

    def border(self, prompt: PrefillState) -> int:
        """Return where a prompt's next piece has to end at the latest, so that a snapshot can be taken."""
        reuse = prompt.row.reuse
        if reuse is None or reuse.border is None or reuse.border <= prompt.done_tokens:
            return prompt.inputs.prompt_tokens
        return reuse.border

    def into_row(self, match: Match, row: int) -> None:
        """Copy the kept states into a row that has been cleared."""
        if not match.tokens:
            return
        cache, slots = self.cache, self.batch.cache
        assert cache is not None and cache.layout is not None
        for field in (*cache.layout.blocks, *cache.layout.rings):
            layer = slots.layers[field.layer]
            if isinstance(layer, RecurrentLayer):
                if field.name == "conv" and not layer.is_initialized:
                    conv, recurrent = (cache.layout.empty(field.layer, name, self.model.device) for name in ("conv", "recurrent"))
                    layer.lazy_initialization(conv, recurrent[None])
            elif not layer.is_initialized:
                empty = torch.empty(1, field.shape[0], 1, field.shape[2], dtype=field.dtype, device=self.model.device)
                layer.lazy_initialization(empty, cache.layout.values_like(field, empty))
        cache.load(match, self._views_of(row))

    def into_cache(self, match: Match) -> Cache:
        """Return transformers' cache with the first match.tokens tokens of a prompt."""
        cache = self.cache
        prompt_states = kv_cache.prompt_cache(self.model.hf_model, self.batch.cache.kv)
        assert cache is not None and cache.layout is not None
        states = {
            (field.layer, field.name): torch.zeros(
                field.shape[0], match.tokens if field in cache.layout.blocks else field.shape[1], field.shape[2],
                dtype=field.dtype, device=self.model.device,
            )
            for field in (*cache.layout.blocks, *cache.layout.rings)
        }  # fmt: skip
        cache.load(match, RowViews.of(cache.layout, states))
        for number, layer in enumerate(prompt_states.layers):
            if (number, "conv") in states:
                set_states(layer, states[number, "conv"], states[number, "recurrent"])
            if (number, "keys") not in states:
                continue
            keys, values = states[number, "keys"][None], states[number, "values"][None]
            if layer.is_sliding:
                order = _order(match.tokens, layer.sliding_window, keys.shape[2], keys.device)
                keys, values = keys.index_select(2, order), values.index_select(2, order)
            int8.extend(layer, keys, values)
            if layer.is_sliding:
                layer.cumulative_length = match.tokens
        return prompt_states

    def encoders(self, prompt: PrefillState, counts: Counter[str]) -> dict[Place, object]:
        """Return the functions of towers that return the kept outputs for a prompt's images and audio. counts: what a pass with
        them counts, for `count_media`."""
        cache, inputs, row = self.cache, prompt.inputs, prompt.row
        if cache is None or row.client is None or not inputs.marks or self._is_gone(row.adapter) or self.batch.is_invariant:
            return {}
        cache.learn(self.batch.cache)
        scope = cache.scope(row.client, self.model.tower_content(row.adapter))
        return encoder_cache.encoders(self.model.hf_model, cache, scope, inputs, counts)

    def count_media(self, counts: Counter[str]) -> None:
        """Count the look-ups of a pass. A pass that ends by an error runs again, and is counted then."""
        if self.cache is not None:
            self.cache.encoder_counts.update(counts)

    # Keeping ----------------------------------------------------------------------------------------------------------

    def piece_done(self, prompt: PrefillState) -> None:
        """Keep a prompt's states where it was cut for a snapshot."""
        reuse, cache = prompt.row.reuse, self.cache
        if reuse is None or reuse.border is None or prompt.done_tokens != reuse.border:
            return
        reuse.pass_border()
        if cache is None:
            return
        if prompt.cache is not None:  # the batch's own states have no shapes before the first prompt is complete
            self.batch.cache.prepare(prompt.cache)
        if not cache.learn(self.batch.cache):
            return
        if self.batch.prompts.is_on and self.batch.prompts.holds(prompt):
            views = partial(self._views_of, self.batch.cache.prompt_row)
        else:
            assert cache.layout is not None
            views = partial(RowViews.of_prompt, cache.layout, prompt.cache, prompt.done_tokens)
        self._keep(prompt.row, prompt.done_tokens, views, snapshot=True, offset=None)

    def joined(self, prompt: PrefillState) -> None:
        """Count the reused tokens of a complete prompt with a row. `flush` copies its states after its first token is out."""
        cache, row = self.cache, prompt.row
        if cache is None or row.reuse is None or not cache.learn(self.batch.cache) or cache.store is None:
            return
        cache.store.counts.update(lookups=1, hits=int(row.cached_tokens > 0), hit_tokens=row.cached_tokens)
        row.reuse.end_prompt(prompt.offset)
        if not self.batch.is_invariant:  # such prompts are kept where their last whole piece ended
            self._unsaved.append(_Unsaved(row, prompt.offset, prompt.logits))

    def first_logits(self, row: TokenSequence, logits: Tensor) -> None:
        """Let the logits [V] of a prompt's last token, which a step computed, be kept with its states: `flush` copies them before
        the next step overwrites them."""
        if self.cache is None or self.cache.store is None or not self.cache.store.snapshot_pages:
            return
        self._unsaved = [replace(one, logits=logits.float()) if one.row is row else one for one in self._unsaved]

    @property
    def awaits_tokens(self) -> bool:
        """Whether a prompt is kept as soon as its first token is known, and before its row's next step writes over a ring."""
        has_rings = self.cache is not None and bool(self.cache.windows or self.cache.is_recurrent)
        return has_rings and any(not one.row.answer_ids for one in self._unsaved)

    def flush(self) -> None:
        """Copy the states of prompts that joined: before their rows' next step, which writes over the oldest place of a ring. Those
        whose last token that step computes are copied behind it, once their first token is known."""
        unsaved, self._unsaved = self._unsaved, []
        for one in unsaved:
            cache, row = self.cache, one.row
            if cache is None or cache.store is None or row.reuse is None or row.number < 0:
                continue
            if row.error is not None or (not row.answer_ids and row.written > row.prompt_tokens):
                continue  # its scores were no numbers, or its step failed: their states are not kept
            if not row.answer_ids:
                self._unsaved.append(one)
                continue
            views = partial(self._views_of, row.number)
            for place in row.reuse.places:
                self._keep(row, place, views, snapshot=True, offset=one.offset)
            is_whole = not cache.is_recurrent or row.written == row.prompt_tokens  # a state of these tokens and no more
            kept = self._keep(row, row.prompt_tokens, views, snapshot=is_whole, offset=one.offset)
            if kept and cache.store.snapshot_pages and one.logits is not None:
                cache.put_blob(_logits_key(row.reuse.key), one.logits)

    def leaving(self, row: TokenSequence, *, queued: bool = False) -> None:
        """Keep the answer of a row that is about to leave, for the next turn of its chat. queued: a step more of it was queued,
        which has advanced its recurrent layers."""
        self.flush()
        if row.reuse is None or row.error is not None or row.finish == "error" or self.batch.is_invariant:
            return
        # A row that others stepped on with after its end has lost the oldest positions of its rings.
        written = row.written + (queued and self.cache is not None and self.cache.is_recurrent)
        is_whole = written <= len(row.token_ids)
        count = min(written, len(row.token_ids))
        views = partial(self._views_of, row.number)
        self._keep(row, count, views, snapshot=is_whole, offset=row.reuse.offset)

    def _keep(
        self, row: TokenSequence, count: int, views: Callable[[], RowViews], *, snapshot: bool, offset: int | None
    ) -> bool:  # fmt: skip
        """Keep the states of a row's first `count` tokens; returns whether they may be kept."""
        cache, reuse = self.cache, row.reuse
        if cache is None or reuse is None or count > cache.most_tokens or not cache.learn(self.batch.cache):
            return False
        serial = None if row.adapter is None else self.model.adapter_store.serial_of(row.adapter)
        if serial != reuse.serial:  # another adapter has this name now
            return False
        key = reuse.key.with_tokens(row.token_ids[:count])
        try:
            cache.save(key, views(), snapshot=snapshot, offset=offset)
        except Exception as exc:  # the answer goes on without a cache
            cache.switch_off(exc)
            return False
        return True

    def _views_of(self, row: int) -> RowViews:
        """Return the states of a row. Its views are made once: layers stay where they are."""
        slots, layout = self.batch.cache, None if self.cache is None else self.cache.layout
        assert layout is not None
        if self._layout_of_views is not layout:
            self._layout_of_views, self._row_views = layout, {}
        views = self._row_views.get(row)
        if views is None:
            states = {
                (number, name): state
                for number, layer in slots.with_memory().items() for name, state in layer.row_states(row).items()
            }  # fmt: skip
            views = self._row_views[row] = RowViews.of(layout, states)
        return views if slots.pool is None else replace(views, pages=slots.pool.pages_at(row))


def _order(tokens: int, window: int, places: int, device: torch.device) -> Tensor:
    """Return the places of the last window - 1 positions in a ring, in order."""
    first = max(tokens - (window - 1), 0)
    return torch.arange(first, tokens, device=device) % places


def _logits_key(key: PrefixKey) -> bytes:
    return key.digest(key.scope, 0, len(key.token_ids), b"logits")
