"""Do activations stay within float16, measured on the loaded model where the plan chose that type?"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Protocol

from torch import Tensor, nn

from trimtab.engine.chat.control_tokens import ChatModel, HasContext
from trimtab.errors import CheckpointError, DeviceError, RequestError, UpstreamError

if TYPE_CHECKING:
    from trimtab.engine.formats.hf_types import HFModel
    from trimtab.engine.kv.sequence import Inputs

LARGEST = 65504.0
# The largest activation may be this share of the type's range: a choice, not a measurement.
HEADROOM = 0.25
TOKENS = 64
# Sides of the image, the first that the context has room for; seconds and samples per second of the audio clip.
SIDES = (448, 224, 96, 64)
SOUND_S, SOUND_RATE = 1.0, 16_000
PROMPT = "What is it?"


class MeasuredModel(ChatModel, HasContext, Protocol):
    """A loaded model whose activations are measured."""

    def prepare(self, prompt: object, *, image: object = ..., audio: object = ...) -> Inputs: ...

    def logits(self, prompt: object, *, image: object = ..., audio: object = ...) -> Tensor: ...


def largest_activations(model: MeasuredModel) -> dict[str, float]:
    """Return the largest output magnitude of each decoder layer, its MLP and each tower module; infinite for an output with a NaN.

    Names are module paths; those of the passes with media end in "(image)" or "(audio)". The first token that texts begin with has
    the largest activations ("Massive activations", arXiv 2402.17762). Images and audio are of noise, which has every frequency.
    """
    prompts: list[tuple[str, dict[str, object]]] = [("", {"prompt": _ids(model)}), *_with_media(model)]
    found: dict[str, float] = {}
    for medium, prompt in prompts:
        suffix = f" ({medium})" if medium else ""
        with _measuring(model, with_towers=bool(medium)) as largest:
            model.logits(**prompt)
        found |= {f"{name}{suffix}": float(value) for name, value in largest.items()}
    return found


_WITHOUT = (("(image)", "images=0"), ("(audio)", "audio_s=0"))


def check(model: MeasuredModel) -> float:
    """Return the largest activation of a loaded model. Errors: DeviceError if it is near the limit of float16."""
    activations = largest_activations(model)
    name, most = max(activations.items(), key=lambda pair: pair[1])
    if most > LARGEST * HEADROOM:
        without = next((f", or with {flag}" for end, flag in _WITHOUT if name.endswith(end) and _fits_text(activations)), "")
        raise DeviceError(
            f"activations reach {most:.3g} in {name}, float16 holds {LARGEST:g}", device=str(model.device),
            hint=f"Plan again with dtype='float32'{without}",
        )  # fmt: skip
    return most


def _fits_text(activations: dict[str, float]) -> bool:
    """Whether the prompt without media stays within the type."""
    return all(value <= LARGEST * HEADROOM for name, value in activations.items() if not name.endswith(")"))


@contextmanager
def _measuring(model: MeasuredModel, *, with_towers: bool) -> Iterator[dict[str, Tensor]]:
    """Give the dictionary that the passes inside fill, by module path."""
    largest: dict[str, Tensor] = {}
    with ExitStack() as stack:
        for number, layer in enumerate(model.hf_model.get_decoder().layers):
            for name, module in ((f"layers.{number}", layer), (f"layers.{number}.mlp", getattr(layer, "mlp", None))):
                if module is not None:
                    stack.callback(module.register_forward_hook(_measure(name, largest)).remove)
        for name, module in _tower_modules(model.hf_model) if with_towers else ():
            stack.callback(module.register_forward_hook(_measure(name, largest)).remove)
        yield largest


def _tower_modules(hf_model: HFModel) -> Iterator[tuple[str, nn.Module]]:
    """Give every module of the parts other than the decoder, with its path."""
    decoder, base = hf_model.get_decoder(), getattr(hf_model, "model", hf_model)
    for part_name, part in base.named_children():
        if not any(module is decoder for module in part.modules()):
            yield from part.named_modules(prefix=part_name)


def _measure(name: str, largest: dict[str, Tensor]) -> Callable[[nn.Module, object, object], None]:
    def hook(module: nn.Module, given: object, output: object) -> None:
        value = output[0] if isinstance(output, tuple) else getattr(output, "last_hidden_state", output)
        if not isinstance(value, Tensor) or not value.is_floating_point() or not value.numel():
            return  # masks, lengths and positions
        most = value.detach().abs().amax().float().nan_to_num(nan=float("inf"))
        before = largest.get(name)
        largest[name] = most if before is None else before.maximum(most)

    return hook


def _with_media(model: MeasuredModel) -> Iterator[tuple[str, dict[str, object]]]:
    """Give "image" and "audio" with a prompt of each, where the plan and the model have them."""
    import numpy as np
    from PIL import Image

    config, request = model.hf_model.config, model.plan.request
    noise = np.random.default_rng(0)
    if request.images and getattr(config, "vision_config", None) is not None:
        pictures = [Image.fromarray(noise.integers(0, 256, (side, side, 3), np.uint8)) for side in SIDES]
        yield from _first_possible(model, "image", pictures)
    if request.audio_s and getattr(config, "audio_config", None) is not None:
        samples = noise.uniform(-1, 1, int(min(SOUND_S, request.audio_s) * SOUND_RATE)).astype(np.float32)
        yield from _first_possible(model, "audio", [samples])


def _first_possible(model: MeasuredModel, medium: str, tries: Sequence[object]) -> Iterator[tuple[str, dict[str, object]]]:
    """Give a prompt with the first medium that the model and its context take. If there is none, as without processor files, no
    request can have one."""
    for one in tries:
        prompt = {"prompt": PROMPT, medium: one}
        try:
            tokens = len(model.prepare(**prompt).token_ids)
        except (RequestError, CheckpointError, UpstreamError):
            continue
        if tokens <= model.context_tokens:
            yield medium, prompt
            return


def _ids(model: MeasuredModel) -> list[int]:
    config = model.hf_model.config.get_text_config()
    first = config.bos_token_id
    first = first[0] if isinstance(first, (list, tuple)) else first
    step = max(int(config.vocab_size) // TOKENS, 1)
    count = min(TOKENS, model.context_tokens)
    return [int(first or 0), *(number * step for number in range(1, count))]
