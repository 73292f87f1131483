"""The demo model's forward pass as training runs it: the stock one's modules and numbers, without asking the GPU anything.

The stock forward looks up how many soft tokens there are, several times a step. Here every picture has 64 and every
sound 25, so a whole step can be recorded as one CUDA graph. `tests/demo/test_demo_world.py` holds that both give the same
logits.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from demo_data import ANSWER_TOKENS, AUDIO_TOKENS, PICTURE_CLASSES, SOUND_CLASSES, patch_positions
from torch import nn
from torch.nn import functional

KINDS = ("image", "audio", "text")


@dataclass
class Batch:
    """ids [B, S] right-padded with 0; answer_start, answer_tokens [B]; pixels [I, 256, 192]; features [A, 99, 128].

    The first I rows are pictures, the next A rows are sounds, the rest is text. picture_labels [I, 6] and sound_labels
    [A, 5] number what is shown and heard (`demo_data.labels`); only training has them.
    """

    ids: torch.Tensor
    answer_start: torch.Tensor
    answer_tokens: torch.Tensor
    pixels: torch.Tensor
    features: torch.Tensor
    picture_labels: torch.Tensor
    sound_labels: torch.Tensor

    def copy_(self, other: Batch) -> None:
        for name, tensor in vars(self).items():
            tensor.copy_(getattr(other, name))

    def parts(self) -> dict[str, slice]:
        """Return the rows of each kind."""
        edges = (0, len(self.pixels), len(self.pixels) + len(self.features), len(self.ids))
        return {kind: slice(*edge) for kind, edge in zip(KINDS, zip(edges, edges[1:]))}

    def targets(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return positions [B, T] whose logits predict the answer, and the answer [B, T] (-100 past its end)."""
        offsets = torch.arange(ANSWER_TOKENS, device=self.ids.device)
        places = (self.answer_start[:, None] + offsets).clamp(max=self.ids.shape[1] - 1)
        inside = offsets < self.answer_tokens[:, None]
        return places - 1, self.ids.gather(1, places).masked_fill(~inside, -100)


class Constants:
    """What every forward of one width shares: attention masks and patch positions, on the model's device."""

    def __init__(self, gemma: Any, width: int) -> None:
        device = next(gemma.parameters()).device
        row, column = torch.arange(width, device=device)[:, None], torch.arange(width, device=device)[None]
        # Padding is on the right, so no real token could see it: causality alone is enough.
        full = column <= row
        window = gemma.config.text_config.sliding_window
        self.text_masks = {"full_attention": full[None, None], "sliding_attention": (full & (row - column < window))[None, None]}
        self.positions = torch.arange(width, device=device)[None]
        self.patches = patch_positions().to(device)
        self.audio_mask = _audio_mask(gemma.model.audio_tower, device)


def _audio_mask(tower: Any, device: torch.device) -> torch.Tensor:
    """Return the audio tower's blocked mask [1, 1, blocks, chunk, context] for one sound without padding."""
    from transformers.masking_utils import create_bidirectional_mask
    from transformers.models.gemma4.modeling_gemma4 import sliding_window_mask_function

    left, right = tower.config.attention_context_left - 1, tower.config.attention_context_right
    mask = create_bidirectional_mask(
        config=tower.config, inputs_embeds=torch.zeros(1, AUDIO_TOKENS, 1, device=device),
        attention_mask=torch.ones(1, AUDIO_TOKENS, dtype=torch.bool, device=device),
        and_mask_function=sliding_window_mask_function((left, right)),
    )  # fmt: skip
    blocked: torch.Tensor = tower._convert_4d_mask_to_blocked_5d(mask)
    return blocked


class Hints(nn.Module):
    """Linear heads that name what is seen and heard from the soft tokens; the checkpoint has none of them.

    They give the towers a short way to the labels. From the words alone the model first learns to guess, and stays
    there for thousands of steps before it begins to look and listen.
    """

    def __init__(self, width: int) -> None:
        super().__init__()
        self.picture = nn.Linear(2 * width, sum(PICTURE_CLASSES))
        self.sound = nn.Linear(2 * width, sum(SOUND_CLASSES))

    def forward(self, soft: dict[str, torch.Tensor], batch: Batch) -> torch.Tensor:
        """Return the mean cross entropy of an attribute for pictures and sounds, [2]."""
        sides = (
            ("image", self.picture, PICTURE_CLASSES, batch.picture_labels),
            ("audio", self.sound, SOUND_CLASSES, batch.sound_labels),
        )
        means = []
        for kind, head, classes, labels in sides:
            tokens = soft[kind]
            guesses = head(torch.cat([tokens.mean(1), tokens.amax(1)], -1)).split(list(classes), -1)
            each = [functional.cross_entropy(guess, labels[:, column]) for column, guess in enumerate(guesses)]
            means.append(torch.stack(each).mean())
        return torch.stack(means)


def answer_logits(
    gemma: Any, batch: Batch, constants: Constants, soft: dict[str, torch.Tensor] | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (logits [B, T, V], answers [B, T]) at the positions that predict the answer.

    The soft tokens of pictures and sounds are put into `soft`, by kind, where it is given.
    """
    soft = {} if soft is None else soft
    core, config = gemma.model, gemma.config
    image, audio = batch.ids == config.image_token_id, batch.ids == config.audio_token_id
    ids = batch.ids.masked_fill(image | audio, config.text_config.pad_token_id)
    embeds = core.language_model.embed_tokens(ids)
    per_layer = core.language_model.get_per_layer_inputs(ids, embeds)
    parts = batch.parts()
    rows = [embeds[parts["text"]]]
    if len(batch.features):
        soft["audio"] = sound_tokens(core, batch, constants)
        rows.insert(0, _put(embeds[parts["audio"]], audio[parts["audio"]], soft["audio"]))
    if len(batch.pixels):
        soft["image"] = picture_tokens(core, batch, constants)
        rows.insert(0, _put(embeds[parts["image"]], image[parts["image"]], soft["image"]))
    hidden = core.language_model(
        inputs_embeds=torch.cat(rows), per_layer_inputs=per_layer, attention_mask=constants.text_masks,
        position_ids=constants.positions, use_cache=False,
    ).last_hidden_state  # fmt: skip
    places, answers = batch.targets()
    hidden = hidden.gather(1, places[..., None].expand(-1, -1, hidden.shape[-1]))
    cap = config.text_config.final_logit_softcapping
    return torch.tanh(gemma.lm_head(hidden) / cap) * cap, answers


def _put(embeds: torch.Tensor, where: torch.Tensor, soft: torch.Tensor) -> torch.Tensor:
    """Return embeds [B, S, D] with the soft tokens [B, N, D] in order at the marked places [B, S] (N in each row)."""
    order = (where.long().cumsum(1) - 1).clamp(0, soft.shape[1] - 1)
    spread = soft.gather(1, order[..., None].expand(-1, -1, soft.shape[-1]))
    return torch.where(where[..., None], spread, embeds)


def picture_tokens(core: Any, batch: Batch, constants: Constants) -> torch.Tensor:
    """Return the soft tokens [I, 64, D]: the vision tower without padding patches, so without a search for them."""
    tower = core.vision_tower
    positions = constants.patches.expand(len(batch.pixels), -1, -1)
    padding = torch.zeros(positions.shape[:2], dtype=torch.bool, device=positions.device)
    hidden = tower.patch_embedder(batch.pixels, positions, padding)
    rotary = tower.encoder.rotary_emb(hidden, positions)
    for layer in tower.encoder.layers:
        hidden = layer(hidden, attention_mask=None, position_embeddings=rotary, position_ids=positions)
    pooled, _ = tower.pooler(
        hidden_states=hidden, pixel_position_ids=positions, padding_positions=padding,
        output_length=positions.shape[1] // tower.config.pooling_kernel_size**2,
    )  # fmt: skip
    soft: torch.Tensor = core.embed_vision(inputs_embeds=pooled.to(hidden.dtype))
    return soft


def sound_tokens(core: Any, batch: Batch, constants: Constants) -> torch.Tensor:
    """Return the soft tokens [A, 25, D] of the audio tower for sounds without padding."""
    tower = core.audio_tower
    hidden, _ = tower.subsample_conv_projection(batch.features, None)
    relative = tower.rel_pos_enc(hidden)
    mask = constants.audio_mask.expand(len(hidden), -1, -1, -1, -1)
    for layer in tower.layers:
        hidden = layer(hidden, attention_mask=mask, position_embeddings=relative)
    soft: torch.Tensor = core.embed_audio(inputs_embeds=tower.output_proj(hidden))
    return soft


def losses(gemma: Any, batch: Batch, constants: Constants, hints: Hints | None) -> torch.Tensor:
    """Return the mean cross entropy of an answer token for pictures, sounds and texts, then that of the hints, [5]."""
    soft: dict[str, torch.Tensor] = {}
    logits, answers = answer_logits(gemma, batch, constants, soft)
    each = functional.cross_entropy(logits.flatten(0, 1).float(), answers.flatten(), reduction="none").view_as(answers)
    counts = (answers >= 0).float()
    told = torch.stack([each[part].sum() / counts[part].sum().clamp(min=1) for part in batch.parts().values()])
    return torch.cat([told, hints(soft, batch) if hints is not None else told.new_zeros(2)])


@torch.no_grad()
def share_right(gemma: Any, batches: Iterable[Batch], constants: Constants) -> dict[str, float]:
    """Return for each kind the share of rows whose whole answer is the most likely one, token by token.

    With the right answer as input so far, this is what a greedy decode gets right.
    """
    right, rows = dict.fromkeys(KINDS, 0), dict.fromkeys(KINDS, 0)
    for batch in batches:
        logits, answers = answer_logits(gemma, batch, constants)
        good = ((logits.argmax(-1) == answers) | (answers < 0)).all(1)
        for kind, part in batch.parts().items():
            right[kind] += int(good[part].sum())
            rows[kind] += len(good[part])
    return {kind: round(right[kind] / rows[kind], 4) for kind in KINDS if rows[kind]}


@torch.no_grad()
def set_clip_bounds(gemma: Any, batches: Iterable[Batch], constants: Constants) -> int:
    """Set every clipped linear's bounds to nine tenths of the widest values it meets; return how many there are.

    The published towers have finite bounds too; where none ever binds, a runtime that forgets them goes unnoticed.
    """
    found: dict[Any, list[torch.Tensor]] = {}

    def watch(module: Any, args: tuple[torch.Tensor, ...], output: torch.Tensor) -> None:
        low, high = torch.stack([args[0].amin(), output.amin()]), torch.stack([args[0].amax(), output.amax()])
        kept = found.setdefault(module, [low, high])
        found[module] = [torch.minimum(kept[0], low), torch.maximum(kept[1], high)]

    clipped = [module for module in gemma.modules() if type(module).__name__ == "Gemma4ClippableLinear"]
    hooks = [module.register_forward_hook(watch) for module in clipped]
    for batch in batches:
        answer_logits(gemma, batch, constants)
    for hook in hooks:
        hook.remove()
    for module, (low, high) in found.items():
        bounds = zip(("input_min", "output_min", "input_max", "output_max"), (*low, *high))
        for name, bound in bounds:
            # Rounded as they will be stored, so that training meets the bounds that the files will have.
            getattr(module, name).copy_((bound * 0.9).to(torch.bfloat16))
    return len(found)
