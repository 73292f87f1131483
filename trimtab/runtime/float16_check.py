"""Whether activations stay within float16, measured on the loaded model where the plan chose that type.

One pass over a prompt of tokens from all over the vocabulary, the first one that texts begin with: there models have their
largest activations ("Massive activations", arXiv 2402.17762). Measured is what every layer of the decoder gives, and its MLP.

What is not measured: pictures, audio clips, and other prompts. The headroom is for them.
"""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

from torch import Tensor

from trimtab.errors import DeviceError

LARGEST = 65504.0
# The largest activation may be this share of what the type holds: a choice, not a measurement.
HEADROOM = 0.25
TOKENS = 64


def largest_activations(model: Any) -> dict[str, float]:
    """Return the largest magnitude of each decoder layer's output and of its MLP's; infinite where one is not a number."""
    decoder = model.hf_model.get_decoder()
    largest: dict[str, Tensor] = {}
    with ExitStack() as stack:
        for number, layer in enumerate(decoder.layers):
            for name, module in ((f"layers.{number}", layer), (f"layers.{number}.mlp", getattr(layer, "mlp", None))):
                if module is not None:
                    stack.callback(module.register_forward_hook(_measure(name, largest)).remove)
        model.logits(_ids(model))
    return {name: float(value) for name, value in largest.items()}


def check(model: Any) -> float:
    """Return the largest activation of a loaded model. Errors: DeviceError if it comes near what float16 holds."""
    activations = largest_activations(model)
    name, most = max(activations.items(), key=lambda pair: pair[1])
    if most > LARGEST * HEADROOM:
        raise DeviceError(
            f"activations reach {most:.3g} in {name}, float16 holds {LARGEST:g}", device=str(model.device),
            hint="Plan again with dtype='float32'",
        )  # fmt: skip
    return most


def _measure(name: str, largest: dict[str, Tensor]) -> Any:
    def hook(module: Any, given: Any, output: Any) -> None:
        value = output[0] if isinstance(output, tuple) else output
        largest[name] = value.detach().abs().amax().float().nan_to_num(nan=float("inf"))

    return hook


def _ids(model: Any) -> list[int]:
    config = model.hf_model.config.get_text_config()
    first = config.bos_token_id
    first = first[0] if isinstance(first, (list, tuple)) else first
    step = max(int(config.vocab_size) // TOKENS, 1)
    count = min(TOKENS, model.context_tokens)
    return [int(first or 0), *(number * step for number in range(1, count))]
