"""Chunks of a prompt in transformers' own pass, with its own cache: where a batch's captured chunks do not compute it."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch

from trimtab.engine.kv import kv_cache as hf_slots
from trimtab.engine.kv.sequence import PrefillState
from trimtab.engine.prefill import last_token as open_prompts
from trimtab.engine.prefill.rows import Rows
from trimtab.engine.towers.pieces import PausedError


def step(batch: Rows, prompt: PrefillState, most_tokens: int | None = None) -> bool:
    """Compute the next chunk of a prompt, of at most `most_tokens` where its inputs can be cut. Returns True when the prompt is
    complete, or all of it but a last token that a step computes."""
    model = batch.model
    if not prompt.done_tokens:
        is_text = not prompt.inputs.has_media and prompt.logits is None
        prompt.begin(ends_in_step=is_text and bool(batch.active) and open_prompts.ends_in_step(prompt, batch))
        if not (prompt.inputs.has_media and batch.prompts.tower_passes.is_between_pieces(prompt)):
            batch.prefixes.resume(prompt)
    tensors, count = dict(prompt.inputs.tensors), prompt.inputs.prompt_tokens
    start, last = prompt.done_tokens, count - prompt.ends_in_step
    if start == count:  # the same prompt was computed before
        return True
    if start == last:  # all but its last token did
        prompt.begin_chunk(0)
        return True
    # An image or audio clip is in one pass with its tokens, unless its towers were computed before.
    is_embedded = prompt.inputs.has_media and batch.prompts.tower_passes.has_embeddings(prompt)
    is_whole = prompt.inputs.has_media and not start and not is_embedded
    cache = prompt.cache if prompt.cache is not None else hf_slots.prompt_cache(model.hf_model, batch.cache.kv)
    chunk = model.prefill_tokens or count
    end = count if is_whole else min(last, start + min(chunk, most_tokens or chunk), batch.prefixes.border(prompt))
    prompt.begin_chunk(end - start, cache=cache)
    if not is_whole:
        positions = hf_slots.prompt_positions(model.hf_model, start, end, model.device, prompt.offset)
        tensors = {
            "input_ids": tensors["input_ids"][:, start:end].to(model.device),
            "attention_mask": torch.ones(1, end, dtype=torch.long, device=model.device), **positions,
        }  # fmt: skip
    model.adapter_store.set(prompt.row.adapter)
    model.lend_prompt_room()
    hf_slots.reset_offset(model.hf_model)

    def compute() -> Any:
        return model.hf_model(**tensors, past_key_values=prompt.cache, use_cache=True, logits_to_keep=1, return_dict=True)

    with torch.no_grad():
        try:
            if is_whole:
                output = batch.prompts.tower_passes.with_towers(prompt, compute)
            else:
                with batch.prompts.tower_passes.embedded(prompt, start, end) if is_embedded else nullcontext():
                    output = compute()
        except PausedError:
            prompt.begin_chunk(0)
            return False
    logits = output.logits[0, -1].float() if end == count else None
    prompt.end_chunk(end, logits=logits, offset=hf_slots.read_offset(model.hf_model) if is_whole else None)
    return end == last
