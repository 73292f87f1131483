"""What does a decoder see of a prompt with images or audio: tower outputs among the embeddings, positions, masks?"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypedDict

import torch
from torch import Tensor

from trimtab.engine.kv import kv_cache
from trimtab.engine.lora.store import Place, covered

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from trimtab.engine.formats.hf_types import Config, HFModel

# Families whose masks are causal for images too, unless their config says otherwise (transformers 5.23.0). Gemma 3 is not one.
CAUSAL_IMAGES = ("gemma3n", "gemma4", "internvl", "llava", "mistral3", "qwen2_5_vl", "qwen3_5", "qwen3_vl")


def images_look_ahead(config: Config) -> bool:
    """Return whether the tokens of one image see each other in both directions; True for a family that is not known."""
    if getattr(config.get_text_config(), "use_bidirectional_attention", None):
        return True
    return not str(config.model_type).startswith(CAUSAL_IMAGES)


@dataclass(frozen=True)
class Media:
    """A prompt with images or audio once its towers have run, of all its S tokens.

    Shapes: embeddings [1, S, D]; deep [n][1, S, D], added behind the first n layers; positions [3, S] on the CPU or None;
    masks: kind of layer -> [S, S], only where tokens attend to later ones. reach: by token, the last one that it attends to.
    """

    embeddings: Tensor
    deep: tuple[Tensor, ...] = ()
    positions: Tensor | None = None
    masks: Mapping[str, Tensor] = field(default_factory=dict)
    reach: tuple[int, ...] = ()

    def may_end_at(self, place: int) -> bool:
        """Whether no token before this one attends to it or beyond."""
        return not self.reach or max(self.reach[:place], default=-1) < place


class _DecoderInputs(TypedDict, total=False):  # those that are read
    inputs_embeds: Tensor
    position_ids: Tensor | None
    attention_mask: object
    deepstack_visual_embeds: Sequence[Tensor] | None
    visual_pos_masks: Tensor | None


class _StoppedError(Exception):
    """Has the arguments of the decoder's call."""

    def __init__(self, inputs: _DecoderInputs) -> None:
        super().__init__()
        self.inputs = inputs


def media_of(hf_model: HFModel, tensors: Mapping[str, Tensor], functions: Mapping[Place, object] | None = None) -> Media:
    """Return the decoder's inputs from the model's own code for a prompt with images or audio: the towers run, the decoder does
    not. functions: of the towers, in place of the model's own. Errors: RuntimeError for inputs of a form that is not known."""

    def stop(*args: object, **kwargs: Unpack[_DecoderInputs]) -> object:
        if args:
            raise RuntimeError(f"{type(hf_model).__name__} calls its decoder by position")
        raise _StoppedError(kwargs)

    decoder = hf_model.get_decoder()
    try:
        with covered({**(functions or {}), decoder: stop}):
            hf_model(
                **tensors, past_key_values=kv_cache.prompt_cache(hf_model), use_cache=True, logits_to_keep=1,
                return_dict=True,
            )  # fmt: skip
    except _StoppedError as exc:
        inputs = exc.inputs
    else:
        raise RuntimeError(f"{type(hf_model).__name__} does not call its decoder")
    embeddings = inputs["inputs_embeds"]
    positions = inputs.get("position_ids")
    if positions is not None and positions.dim() == 3:
        positions = positions[-3:, 0].cpu()
        if positions.shape != (3, embeddings.shape[1]):
            name, shape = type(hf_model).__name__, list(positions.shape)
            raise RuntimeError(f"{name} gives positions of shape {shape} for {embeddings.shape[1]} tokens along three axes")
    else:
        positions = None
    masks, reach = looking_ahead(inputs.get("attention_mask"))
    return Media(embeddings, _dense(inputs, embeddings), positions, masks, reach)


def _dense(inputs: _DecoderInputs, embeddings: Tensor) -> tuple[Tensor, ...]:
    """Return the values that later layers add at some positions as tensors of all positions."""
    deep, where = inputs.get("deepstack_visual_embeds"), inputs.get("visual_pos_masks")
    if deep is None or where is None:
        return ()
    arguments = []
    for number, part in enumerate(deep):
        if part.shape[0] != int(where.sum()):
            raise RuntimeError(f"layer {number} adds {part.shape[0]} values at {int(where.sum())} places of images")
        whole = torch.zeros_like(embeddings)
        whole[where] = part.to(whole.dtype)
        arguments.append(whole)
    return tuple(arguments)


def looking_ahead(masks: object) -> tuple[dict[str, Tensor], tuple[int, ...]]:
    """Return (kind -> [S, S], True where a token attends; the last token that each attends to) if any attends to later ones."""
    if not isinstance(masks, dict):
        return {}, ()
    looks = {
        kind: (mask if mask.dtype == torch.bool else mask >= 0)[0, 0]
        for kind, mask in masks.items() if isinstance(mask, Tensor)
    }  # fmt: skip
    if not any(bool(mask.triu(1).any()) for mask in looks.values()):
        return {}, ()
    causal = torch.ones_like(next(iter(looks.values()))).tril()  # the meaning of a missing mask
    looks = {kind: looks.get(kind, causal) for kind in masks}
    furthest = torch.zeros(next(iter(looks.values())).shape[0], dtype=torch.long)
    for mask in looks.values():
        numbers = torch.arange(mask.shape[1], device=mask.device)
        furthest = torch.maximum(furthest, (mask * numbers).amax(dim=1).cpu())
    return looks, tuple(furthest.tolist())
