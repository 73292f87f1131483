"""How is the next piece of a prompt computed: with which adapter, by modules or kernels, with or without the last token?"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace

from trimtab.engine.batched_lora import columns as adapter_columns
from trimtab.engine.families.chunk import ChunkLayers, LastLayers, pays
from trimtab.engine.families.mixture import hold
from trimtab.engine.kv.sequence import Inputs, PrefillState
from trimtab.engine.passes import chunk_forward as hf_prefill
from trimtab.engine.passes.chunk_forward import Chunk, ChunkForward, FirstLayers
from trimtab.engine.prefill.rows import Passes, PrefixUse, Rows
from trimtab.errors import DeviceError
from trimtab.planning.values.execution import CHOSEN_ON_HOST


def layers_of(prompts: Passes, forward: ChunkForward, key: Hashable = None, name: str | None = None) -> FirstLayers | None:
    """Return the replacement of these layers in a pass, None where the modules compute them. key, name: of the one adapter of the
    pass, which is selected; None where its rows look theirs up."""
    step, store = prompts.batch.steps.fused_step(), prompts.model.adapter_store
    if step is None or not pays(step, prompts.device):
        return None
    if any(own.source is not None for number, own in step.decoder.attentions.items() if number < forward.first_shared):
        return None
    if prompts.firsts is None or prompts.firsts.step is not step:
        groups = [group for layer in step.layers[: forward.first_shared] for group in layer.products]
        columns = adapter_columns.choose_kept(prompts.model, prompts.kernels(), groups, prompts.fall_back)
        prompts.firsts = ChunkLayers(step, forward.first_shared, columns)
    prompts.firsts.forget()
    prompts.firsts.adds_experts = step.kernels.experts is not None and hold(step.layers, store)
    if (columns := prompts.firsts.columns) is not None:
        columns.weights.hold(key, None if key is None else store.selection.name, (name, prompts.serial_of(name)))
    return prompts.firsts.forward


def has_layers(prompts: Passes) -> bool:
    """Whether kernels of a step compute the layers of passes, not transformers' modules."""
    prompts.chunk_forward()  # the cache's layers are known from then on, and the step gives states memory
    return (step := prompts.batch.steps.fused_step()) is not None and pays(step, prompts.device)


def knows_padding(prompts: Passes) -> bool:
    """Whether padding behind a prompt leaves recurrent states as they are: a step's kernels receive the count, modules do not."""
    return not prompts.is_recurrent or has_layers(prompts)


def returns_states(batch: Rows, inputs: Inputs) -> bool:
    """Whether the states of all tokens of a text are computed in chunks of fixed shapes, independent of other requests."""
    fits = inputs.prompt_tokens < batch.cache.context_tokens  # the padding of a chunk is written behind it
    has_body = batch.model.hf_model.base_model is not batch.model.hf_model
    is_possible = bool(batch.prompts.sizes) and fits and has_body and not batch.is_invariant and not inputs.has_media
    return is_possible and knows_padding(batch.prompts)


def select_adapter(prompts: Passes, forward: ChunkForward, name: str | None) -> tuple[Hashable, int | None, bool]:
    """Select the adapter of the next pass and return the result of Layouts.set_adapter, and whether its layers are computed here
    and in chunk.py: where the batch's steps are made of kernels."""
    key, serial = prompts.layouts.set_adapter(name)
    step = prompts.batch.steps.fused_step()
    firsts = None if step is None else layers_of(prompts, forward, key, name)
    forward.use(firsts, None)
    if prompts.is_recurrent and firsts is None:  # an adapter that replaces norms came between two pieces
        raise DeviceError(
            "the kernels of a step compute this prompt's recurrent layers, and are not used any more",
            device=str(prompts.device), hint="Send the prompt again",
        )  # fmt: skip
    if step is None:
        return key, serial, False
    if forward.first_shared < len(forward.layers) and prompts.batch.cache.kv == "full":
        if prompts.lasts is None or prompts.lasts.step is not step:
            prompts.lasts = LastLayers(step, forward.first_shared, prompts.batch.cache.prompt_row)
        prompts.lasts.select(key, prompts.model.adapter_store.selection.name, prompts.layouts.names)
        forward.use(firsts, prompts.lasts.forward)
    return key, serial, True


def reads_experts(prompts: Passes) -> bool:
    """Whether the pass of the selected adapter reads on the host which experts were chosen: it cannot be captured, which a fallback
    says."""
    store = prompts.model.adapter_store
    if not store.reads_on_host():
        return False
    steps = prompts.batch.steps
    firsts = None if steps.kernels.experts is None or steps.fused_step() is None else prompts.firsts
    if firsts is not None and firsts.takes_many and (firsts.adds_experts or not store.changes_experts()):
        return False
    prompts.fall_back(CHOSEN_ON_HOST)
    return True


def may_be_open(prompts: Passes) -> bool:
    """Whether a batch may have such prompts: one of several rows, with room for the graphs of their chunks if they are captured.
    Captured chunks of such a prompt need no logits: neither the head nor the last token's pass through layers that share keys and
    values. The kernels of steps compute the token, whose scores differ from a chunk's by rounding."""
    return prompts.batch.rows > 1 and not prompts.batch.is_invariant and prompts.may_be_cut


def ends_in_step(prompt: PrefillState, batch: Rows, may_end_at: Callable[[int], bool] = lambda _: True) -> bool:
    """Return whether a step computes a prompt's last token. may_end_at: whether a chunk may end before a token.

    Without active rows no step would run anyway. Rows of a group copy the logits of one prompt, and the placeholder of an image or
    audio clip has no embedding. Batch-invariant answers have the bits of their chunks.
    """
    row = prompt.row
    if not prompt.may_end_in_step or prompt.returns_states or not batch.active or not may_be_open(batch.prompts) or row.group:
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
