"""A decode step of all rows and a chunk of a prompt in one pass of transformers' modules, on a CPU.

    beside = Beside(prompt, most_tokens)
    drawn = batch.step(beside=beside)        # then: beside.is_through, or beside.has_failed

Reading the weights is most of a step of a few rows on a CPU, and a good part of a chunk. One pass reads them once: 8 rows of a
Llama of 310 million weights take 62 ms, a chunk of 64 tokens 140, both together 147 (2 cores, bfloat16).

Each token of the chunk is a row of the step with one token, as linear layers, norms, embeddings, experts and rotary positions treat
every token alike, and adapters are selected by row. Attention alone knows which tokens are a prompt. A layer's cache gives it a
`States` in place of a tensor: what the rows attend to, and what the chunk does. Both halves are then computed as without the other,
by the attention that the modules would have used. The head sees the rows and the prompt's last token.

Scores differ from those of two passes by rounding: products of more rows may sum in another order.

What is not covered (`why_not`, `takes`): images and audio, batch-invariant answers, steps or chunks that are captured or made of
kernels, attention other than torch's `sdpa`, layers with a state that is not keys and values by position.
"""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from math import ceil
from typing import TYPE_CHECKING, Any
from weakref import WeakSet

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from trimtab.errors import TrimtabError
from trimtab.runtime import hf_attention, hf_own_pass, hf_prefill, hf_slots
from trimtab.runtime.batch_state import BatchState
from trimtab.runtime.hf_slots import LayerCache
from trimtab.runtime.out_of_memory import is_host_memory, is_out_of_memory
from trimtab.runtime.step_choice import Fallback

if TYPE_CHECKING:
    from trimtab.runtime.batch import Batch
    from trimtab.runtime.batch_request import Prompt

# Under which name transformers finds the attention of a mixed pass, by the attention that computes each half.
NAMES = {"sdpa": "trimtab_mixed", hf_attention.NAME: "trimtab_mixed_grouped"}


@dataclass(eq=False)
class Beside:
    """A prompt whose next chunk, of at most `most_tokens`, goes through with a step. Afterwards: the `tokens` of the chunk, and
    `is_through` when the prompt is complete. has_failed: the rows' step was computed without the chunk, and the prompt begins again
    by itself, where what was wrong with it is told."""

    prompt: Prompt
    most_tokens: int
    tokens: int = 0
    is_through: bool = False
    has_failed: bool = False


@dataclass(frozen=True)
class States:
    """Keys or values of a mixed pass: rows [n, KV, places, D], chunk [1, KV, S, D]. mask [1, 1, tokens, S] of the chunk; None if
    it is causal."""

    rows: Tensor
    chunk: Tensor
    mask: Tensor | None

    def to(self, *args: Any, **kwargs: Any) -> States:
        """Return itself: layers that share keys and values bring them to their own device, and here there is one."""
        return self


class _Layer(CacheLayerMixin):  # type: ignore[misc]
    """One layer's keys and values: those of the rows in the batch's cache, those of the chunk in its prompt's."""

    is_compileable = True

    def __init__(self, slots: LayerCache, prompt: Any, window: int | None, chunk: _Chunk) -> None:
        super().__init__()
        self.slots, self.prompt, self.window, self.chunk = slots, prompt, window, chunk
        self.is_sliding = slots.is_ring

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Do nothing: both caches allocate their own."""

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[States, States]:
        """Write one position of each row, and the chunk's. Shapes: [rows + tokens, KV, 1, D]."""
        count = self.chunk.rows
        rows = self.slots.update(key_states[:count], value_states[:count])
        # [tokens, KV, 1, D] -> [1, KV, tokens, D]
        own = self.prompt.update(*(states[count:, :, 0].transpose(0, 1)[None] for states in (key_states, value_states)))
        mask = self.chunk.mask(own[0].shape[2], self.window)
        keys, values = (States(mine, theirs, mask) for mine, theirs in zip(rows, own, strict=True))
        return keys, values

    def get_mask_sizes(self, query_length: Any) -> tuple[int, int]:
        return self.slots.get_mask_sizes(query_length)

    def get_seq_length(self, *args: Any) -> int:
        return 0

    def get_max_cache_shape(self) -> int:
        return self.slots.places

    def get_max_length(self) -> int:
        return self.slots.places


@dataclass(eq=False)
class _Chunk:
    """Tokens start .. end of a prompt beside `rows` rows, and their masks."""

    rows: int
    start: int
    end: int
    device: torch.device

    def __post_init__(self) -> None:
        self._masks: dict[tuple[int, int | None], Tensor | None] = {}

    def mask(self, kept: int, window: int | None) -> Tensor | None:
        """Return which of the last `kept` positions each token attends to, bool [1, 1, tokens, kept]; None if it is causal."""
        key = kept, window
        if key not in self._masks:
            positions = torch.arange(self.start, self.end, device=self.device)[:, None]
            places = torch.arange(self.end - kept, self.end, device=self.device)
            seen = places <= positions
            if window is not None:
                seen = seen & (places > positions - window)
            is_causal = self.start == 0 and kept == self.end and (window is None or window >= kept)
            self._masks[key] = None if is_causal else seen[None, None]
        return self._masks[key]


def attention(
    own: Callable[..., Any], module: Any, query: Tensor, key: States, value: States, attention_mask: Tensor | None, **kwargs: Any
) -> tuple[Tensor, None]:  # fmt: skip
    """Return ([rows + tokens, 1, H, D], None): each half as `own` has it, the module's attention.

    Shapes: query [rows + tokens, H, 1, D], attention_mask [rows, 1, 1, places].
    """
    count = key.rows.shape[0]
    rows, _ = own(module, query[:count], key.rows, value.rows, attention_mask, **kwargs)
    tokens, _ = own(module, query[count:, :, 0].transpose(0, 1)[None], key.chunk, value.chunk, key.mask, **kwargs)
    return torch.cat((rows, tokens.transpose(0, 1))), None


for _own, _name in NAMES.items():
    ALL_ATTENTION_FUNCTIONS.register(_name, partial(attention, ALL_ATTENTION_FUNCTIONS[_own]))


class MixedPasses:
    """The passes of one batch that compute a step and a chunk."""

    def __init__(self, batch: Batch) -> None:
        # Whoever has this is the one that it belongs to.
        self._owner = weakref.ref(batch)
        self._why_model: str | None = None
        self._modules: list[tuple[Any, Any]] | None = None
        self._by_itself: WeakSet[Prompt] = WeakSet()  # prompts of which a chunk failed
        self.passes = 0

    @property
    def batch(self) -> Batch:
        owner = self._owner()
        assert owner is not None
        return owner

    def why_not(self) -> str | None:
        """Return why no chunk goes through with a step here, None if chunks can."""
        batch = self.batch
        if batch.model.device.type != "cpu":
            return "the device is no CPU"
        if batch.rows < 2:
            return "the batch has one row"
        if batch.is_invariant:
            return "answers are batch-invariant"
        if batch.prompts.is_on or batch.steps.is_captured or batch.steps.mode not in ("auto", "eager"):
            return "steps or chunks are not transformers' own"
        if self._why_model is None and self._modules is None:
            self._why_model = self._recognize()
        return self._why_model

    def takes(self, prompt: Prompt) -> bool:
        """Whether a prompt's next chunk can go through with the next step."""
        batch, group = self.batch, prompt.row.group
        if self.why_not() is not None or not batch.active or prompt.inputs.has_media or prompt.logits is not None:
            return False
        if prompt in self._by_itself or prompt.source is not None:
            return False
        # One of a group copies the states of another, which a step would have gone on from.
        if group and any(row.group == group for row in (*batch.active, *batch.placed)):
            return False
        return not batch.steps.has_placeholder(batch.state())

    def _recognize(self) -> str | None:
        """Find the attention of every layer. Return why it cannot be exchanged, None if it can."""
        hf_model = self.batch.model.hf_model
        if (why := hf_prefill.why_not(hf_model)) is not None:
            return why
        found = []
        for layer in hf_model.get_decoder().layers:
            module = getattr(layer, "self_attn", None)
            names = inspect.unwrap(type(module).forward).__code__.co_names if module is not None else ()
            config = getattr(module, "config", None)
            if "ALL_ATTENTION_FUNCTIONS" not in names or config is None:
                return f"the attention of {type(layer).__name__} was not recognized"
            name = config._attn_implementation
            if name not in NAMES:
                return f"its attention is {name}, not sdpa"
            found.append((module, hf_attention.view(config, NAMES)))
        self._modules = found
        return None

    # One pass ----------------------------------------------------------------------------------------------------------

    def run(self, state: BatchState, beside: Beside) -> tuple[Tensor, Tensor]:
        """Return what `DecodeStep.run` does, with the chunk computed too, if it can be."""
        outputs, why = None, None
        try:
            if self.takes(beside.prompt):
                outputs = self._run(state, beside)
            else:
                beside.has_failed = True
        except Exception as exc:
            why = self._failed(beside, exc)
        if outputs is None:  # what went wrong is no longer alive, and if it was the rows' fault it does again
            outputs = self.batch.steps.run(state)
        if why is not None:
            self._why_model = why
            self.batch.steps.fallbacks.append(Fallback("chunks of prompts with steps", why))
        return outputs

    def _failed(self, beside: Beside, exc: Exception) -> str | None:
        """Let the prompt begin again by itself. Return why no other goes through with a step either; None if memory ran out or a
        request was wrong."""
        prompt = beside.prompt
        beside.has_failed, beside.tokens = True, 0
        self._by_itself.add(prompt)
        # Some layers have the chunk.
        prompt.cache, prompt.done_tokens, prompt.chunk_tokens, prompt.ends_in_step = None, 0, 0, False
        if isinstance(exc, TrimtabError) or is_out_of_memory(exc) or is_host_memory(exc):
            return None
        return f"a pass failed: {type(exc).__name__}: {exc}"

    def _run(self, state: BatchState, beside: Beside) -> tuple[Tensor, Tensor] | None:
        """Return the outputs of a pass of both; None if the prompt needs none."""
        batch, prompt = self.batch, beside.prompt
        batch.pages.reserve(prompt.row)
        if not prompt.done_tokens:
            prompt.may_end_in_step = False  # its last token is in a pass with the rows anyway
        start = hf_own_pass.begin(batch, prompt)
        if start is None:
            beside.is_through = True
            return None
        end = hf_own_pass.end_of(batch, prompt, start, self._even(prompt, start, beside.most_tokens, rows=state.count))
        if prompt.cache is None:
            prompt.cache = hf_slots.prompt_cache(batch.model.hf_model, batch.cache.kv)
        prompt.chunk_tokens = beside.tokens = end - start
        found: list[Tensor] = []

        def forward(count: int) -> Tensor:
            logits = self._forward(state, prompt, _Chunk(count, start, end, batch.model.device))
            found.append(logits[count:])
            return logits[:count]

        outputs = batch.steps.run_with(state, forward)
        prompt.done_tokens = end
        if end == prompt.inputs.prompt_tokens:
            prompt.logits = found[0][0].float()
        batch.prefixes.piece_done(prompt)
        beside.is_through = end == prompt.inputs.prompt_tokens - prompt.ends_in_step
        self.passes += 1
        return outputs

    def _even(self, prompt: Prompt, start: int, most_tokens: int, *, rows: int) -> int:
        """Return the tokens of the next chunk where the rest of a prompt is cut into as few as possible, all about as long: rows
        wait for the longest."""
        # The plan counts what a chunk by itself needs for a moment.
        most_tokens = min(most_tokens, max(self.batch.model.prefill_tokens - rows, 1))
        left = prompt.inputs.prompt_tokens - prompt.ends_in_step - start
        return ceil(left / ceil(left / most_tokens))

    def _forward(self, state: BatchState, prompt: Prompt, chunk: _Chunk) -> Tensor:
        """Return [rows, V] and, of the prompt's last token, one row more."""
        batch, model, count = self.batch, self.batch.model, chunk.rows
        hf_model, tokens = model.hf_model, chunk.end - chunk.start
        is_last = chunk.end == prompt.inputs.prompt_tokens
        own = slice(chunk.start, chunk.end)
        batch.cache.begin()
        numbers = torch.arange(chunk.start, chunk.end, device=model.device)
        rows = hf_slots.step_positions(hf_model, batch.cache, count)
        positions = torch.cat((rows, numbers[:, None].expand(*rows.shape[:-2], tokens, 1)), dim=-2)
        ids = torch.cat((batch.tokens[:count], prompt.inputs.tensors["input_ids"][0, own, None].to(model.device)))
        names = (*state.adapters, *[prompt.row.adapter] * tokens)
        model.adapter_store.set_rows(names)
        seen = names[: count + is_last]

        def narrowed(*args: Any, **kwargs: Any) -> Any:
            output = inner(*args, **kwargs)
            states = output.last_hidden_state
            output.last_hidden_state = torch.cat((states[:count], states[-1:])) if is_last else states[:count]
            model.adapter_store.set_rows(seen)
            return output

        decoder = hf_model.get_decoder()
        inner: Callable[..., Any] = decoder.forward
        with self._attending(), hf_prefill.covered({decoder: narrowed}):
            output = hf_model(
                input_ids=ids, position_ids=positions, attention_mask=hf_slots.step_masks(hf_model, batch.cache, count),
                past_key_values=self._cache(prompt, chunk), use_cache=True, logits_to_keep=1, return_dict=True,
            )  # fmt: skip
        logits: Tensor = output.logits[:, -1]
        return logits

    def _cache(self, prompt: Prompt, chunk: _Chunk) -> Cache:
        config = self.batch.model.hf_model.config.get_text_config()
        kinds = getattr(config, "layer_types", None)
        layers: list[Any] = []
        for number, (mine, theirs) in enumerate(zip(self.batch.cache.layers, prompt.cache.layers, strict=True)):
            if not isinstance(mine, LayerCache):  # it stands for a layer that reads another one's
                layers.append(mine)
                continue
            slides = mine.is_ring if kinds is None else kinds[number] == "sliding_attention"
            layers.append(_Layer(mine, theirs, int(config.sliding_window) if slides else None, chunk))
        return Cache(layers=layers)

    @contextmanager
    def _attending(self) -> Iterator[None]:
        """Let every layer's attention know both halves while the block runs."""
        assert self._modules is not None
        before = [module.config for module, _ in self._modules]
        try:
            for module, config in self._modules:
                module.config = config
            yield
        finally:
            for (module, _), config in zip(self._modules, before, strict=True):
                module.config = config
