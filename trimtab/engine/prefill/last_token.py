"""Which prompts leave their last token to the next decode step of the rows?"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from trimtab.engine.kv.sequence import PrefillState
from trimtab.engine.passes import chunk_forward as hf_prefill
from trimtab.engine.passes.chunk_forward import Chunk, ChunkForward
from trimtab.engine.prefill.rows import Passes, PrefixUse, Rows


def are_possible(prompts: Passes) -> bool:
    """Whether a batch may have such prompts: one of several rows, with room for the graphs of their chunks if they are captured.
    Captured chunks of such a prompt need no logits: neither the head nor the last token's pass through layers that share keys and
    values. The kernels of steps compute the token, whose scores differ from a chunk's by rounding."""
    return prompts.batch.rows > 1 and not prompts.batch.is_invariant and prompts.may_be_cut


def ends_in_step(
    prompt: PrefillState, batch: Rows, may_end_at: Callable[[int], bool] = lambda _: True
) -> bool:  # fmt: skip
    """Return whether a step computes a prompt's last token. may_end_at: whether a chunk may end before a token.

    Without active rows no step would run anyway. Rows of a group copy the logits of one prompt, and the placeholder of an image or
    audio clip has no embedding. Batch-invariant answers have the bits of their chunks.
    """
    row = prompt.row
    if not prompt.may_end_in_step or prompt.returns_states or not batch.active or not are_possible(batch.prompts) or row.group:
        return False
    return row.prompt_tokens > 1 and may_end_at(row.prompt_tokens - 1) and row.token_ids[-1] not in batch.prompts.placeholders


def chunks_of(
    prompt: PrefillState, sizes: Sequence[int], start: int, prefixes: PrefixUse, may_end_at: Callable[[int], bool] = lambda _: True
) -> list[Chunk] | None:
    """Return the chunks of a prompt from a token on, as `hf_prefill.chunks_of`; without its last token if a step computes that
    one."""
    count = prompt.inputs.prompt_tokens - prompt.ends_in_step
    if start == count:
        return []
    border = prefixes.border(prompt)
    chunks = hf_prefill.chunks_of(count, sizes, may_end_at=may_end_at, start=start, border=border)
    if chunks is None or not prompt.ends_in_step:
        return chunks
    return [replace(chunk, is_last=False) for chunk in chunks]


def share_of_layers(forward: ChunkForward) -> float:
    """Return the share of a model's layers that compute such a chunk: those with separate keys and values."""
    return forward.first_shared / max(len(forward.layers), 1)
