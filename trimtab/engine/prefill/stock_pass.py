"""Pieces of a text in transformers' own pass, with its own cache: where a batch's captured chunks do not compute a prompt."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from trimtab.engine.chat.prompt import check_fits
from trimtab.engine.kv import kv_cache, sequence
from trimtab.engine.kv.sequence import Inputs, PrefillState, text_of
from trimtab.engine.lora.store import covered
from trimtab.engine.prefill.rows import PrefillContext, Rows, ends_in_step
from trimtab.engine.towers.pieces import PausedError


class Output(Protocol):
    """What a model's forward returns: logits [1, S, V]; hidden_states [1, S, D] of each layer, if requested."""

    logits: Tensor
    hidden_states: tuple[Tensor, ...]


def whole_pass(model: PrefillContext, inputs: Inputs, **options: int) -> Output:
    """Return what the model makes of a whole prompt in one pass, without a cache: teacher-forced logits, hidden states.
    Errors: RequestError for a prompt that does not fit the context."""
    check_fits(model, inputs, 0)
    output: Output = _computed(model, model.hf_model, inputs.tensors, inputs.prompt_tokens, None, **options)
    return output


def _computed(
    model: PrefillContext, module: nn.Module, tensors: Mapping[str, Tensor], tokens: int, cache: object, **options: int
) -> Any:  # fmt: skip
    """Return what a module of transformers makes of a text of `tokens` tokens, or of a piece of it: every pass of this file.
    cache: of the text, None for a pass of which nothing is kept."""
    model.lend_prompt_room()
    sequence.reset_offset(model.hf_model)
    kept = {"use_cache": False} if cache is None else {"past_key_values": cache, "use_cache": True}
    with torch.no_grad(), text_of(model.hf_model, tokens):
        return module(**tensors, **kept, return_dict=True, **options)


class TextPass:
    """A text that is computed in chunks by a module of the model, next to a batch. inputs: without media. adapter: a name, None for
    the base."""

    def __init__(self, model: PrefillContext, module: nn.Module, inputs: Inputs, adapter: str | None) -> None:
        self._model, self._module, self._inputs, self.adapter = model, module, inputs, adapter
        # Bamba counts positions from 0 in each chunk if it is given none; others get what they would count themselves.
        has_rows = model.anatomy.capture_unsupported is None
        self._gives_positions = not has_rows and "position_ids" in inspect.signature(module.forward).parameters
        self._cache = kv_cache.prompt_cache(model.hf_model, model.plan.request.kv)
        self._done = 0

    @property
    def prompt_tokens(self) -> int:
        return self._inputs.prompt_tokens

    @property
    def done_tokens(self) -> int:
        """How many tokens of the text are computed."""
        return self._done

    def _next(self, most_tokens: int) -> Any:
        """Return what the module makes of the next tokens, which count as computed from then on."""
        start, end = self._done, min(self.prompt_tokens, self._done + most_tokens)
        assert end - start == self.prompt_tokens or self._model.anatomy.can_chunk
        tensors = _tensors(self._model, self._inputs, start, end)
        if self._gives_positions:
            tensors |= {"position_ids": torch.arange(start, end, device=self._model.device)[None]}
        self._model.adapter_store.set(self.adapter)
        cache = self._cache if self._model.anatomy.can_chunk else None
        output = _computed(self._model, self._module, tensors, self.prompt_tokens, cache)
        self._done = end
        return output


def _tensors(model: PrefillContext, inputs: Inputs, start: int, end: int, offset: int = 0) -> dict[str, Tensor]:
    """Return the model's inputs for a piece of text. offset: as for `kv_cache.prompt_positions`."""
    return {
        "input_ids": inputs.tensors["input_ids"][:, start:end].to(model.device),
        "attention_mask": torch.ones(1, end, dtype=torch.long, device=model.device),
        **kv_cache.prompt_positions(model.hf_model, start, end, model.device, offset),
    }


def step(batch: Rows, prompt: PrefillState, most_tokens: int | None = None) -> bool:
    """Compute the next chunk of a prompt, of at most `most_tokens` where its inputs can be cut. Returns True when the prompt is
    complete, or all of it but a last token that a step computes."""
    model = batch.model
    if not prompt.done_tokens:
        is_text = not prompt.inputs.has_media and prompt.logits is None
        prompt.begin(ends_in_step=is_text and bool(batch.active) and ends_in_step(prompt, batch))
        if not (prompt.inputs.has_media and batch.prompts.tower_passes.is_between_pieces(prompt)):
            batch.prefixes.resume(prompt)
    count = prompt.inputs.prompt_tokens
    start, last = prompt.done_tokens, count - prompt.ends_in_step
    if start == count:  # the same prompt was computed before
        return True
    if start == last:  # all but its last token did
        prompt.begin_chunk(0)
        return True
    # An image or audio clip is in one pass with its tokens, unless its towers were computed before.
    towers = batch.prompts.tower_passes
    is_embedded = prompt.inputs.has_media and towers.has_embeddings(prompt)
    is_whole = prompt.inputs.has_media and not start and not is_embedded
    cache = prompt.cache if prompt.cache is not None else kv_cache.prompt_cache(model.hf_model, batch.cache.kv)
    chunk = model.prefill_tokens or count
    end = count if is_whole else min(last, start + min(chunk, most_tokens or chunk), batch.prefixes.border(prompt))
    prompt.begin_chunk(end - start, cache=cache)
    inputs = prompt.inputs
    tensors = dict(inputs.tensors) if is_whole else _tensors(model, inputs, start, end, prompt.offset)
    model.adapter_store.set(prompt.row.adapter)

    def compute() -> Output:
        output: Output = _computed(model, model.hf_model, tensors, count, prompt.cache, logits_to_keep=1)
        return output

    try:
        if is_whole:
            output = towers.with_towers(prompt, compute)
        else:
            with covered(towers.embedded(prompt, start, end) if is_embedded else {}):
                output = compute()
    except PausedError:
        prompt.begin_chunk(0)
        return False
    if is_embedded and end == count:
        towers.drop_embeddings(prompt)
    logits = output.logits[0, -1].float() if end == count else None
    prompt.end_chunk(end, logits=logits, offset=sequence.read_offset(model.hf_model) if is_whole else None)
    return end == last
