"""What does a model answer in each mode, and is that the reference's answer?"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from trimtab.doctor.cases.inputs import NEW_TOKENS

# Tolerance: a tenth of the adapter's own effect, which is well below half the distance of two answers.
EFFECT_SHARE = 0.1
# Two roundings of the largest logit: bf16 keeps 8 bits.
ROUNDING = 2.0**-7
ADAPTER, BASE = "adapter", "base"


class References:
    """The answers of the model completely on one device, by mode, with the adapter and without."""

    def __init__(self, path: str | None) -> None:
        self.tensors: dict[str, Any] = {}
        if path is not None and Path(path).is_file():
            from safetensors.torch import load_file

            self.tensors = load_file(path)

    def compare(self, mode: str, logits: Any, ids: list[int] | None, *, to: str) -> dict[str, Any]:
        """Compare an answer of a mode with the references; `to` is the expected one.

        equals_reference, equals_base: None without a reference. max_abs: largest difference of a logit from the
        expected one. matches: whose tokens were generated, "adapter", "base", "both" or "neither".
        """
        own, base = self.tensors.get(f"{mode}.{to}.logits"), self.tensors.get(f"{mode}.{BASE}.logits")
        compared: dict[str, Any] = {"equals_reference": None, "equals_base": None, "max_abs": None, "matches": None}
        if own is not None:
            tolerance = self._tolerance(mode, to)
            compared["max_abs"] = float((logits - own).abs().max())
            # NaN is not within any tolerance.
            compared["equals_reference"] = compared["max_abs"] <= tolerance and self._same(mode, to, ids)
            if base is not None and to == ADAPTER and float((own - base).abs().max()) > tolerance:
                compared["equals_base"] = float((logits - base).abs().max()) <= tolerance
        if ids is not None and f"{mode}.{ADAPTER}.ids" in self.tensors:
            same = [voice for voice in (ADAPTER, BASE) if self._same(mode, voice, ids)]
            compared["matches"] = "both" if len(same) == 2 else (same[0] if same else "neither")
        return compared

    def _tolerance(self, mode: str, to: str) -> float:
        own, base = self.tensors[f"{mode}.{to}.logits"], self.tensors.get(f"{mode}.{BASE}.logits")
        effect = 0.0 if base is None else float((own - base).abs().max())
        return max(ROUNDING * float(own.abs().max()), EFFECT_SHARE * effect)

    def _same(self, mode: str, voice: str, ids: list[int] | None) -> bool:
        expected = self.tensors.get(f"{mode}.{voice}.ids")
        return ids is None or expected is None or expected.tolist() == ids


def sees(model: Any, inputs: Mapping[str, Any]) -> bool:
    """Return whether another image changes the answer (a tower quantized by an old release returns a constant)."""
    darker = {**inputs, "pixel_values": inputs["pixel_values"] * 0.5}
    return not forward(model, inputs).equal(forward(model, darker))


def forward(model: Any, inputs: Mapping[str, Any]) -> Any:
    """Return the last position's logits [V], float32 on the CPU."""
    import torch

    with torch.no_grad():
        return model(**inputs, logits_to_keep=1).logits[0, -1].float().cpu()


def generate(model: Any, inputs: Mapping[str, Any]) -> tuple[list[int], list[int]]:
    """Return the greedily generated tokens and the shape of the result of `generate`."""
    import torch

    with torch.no_grad():
        generated = model.generate(**inputs, max_new_tokens=NEW_TOKENS, do_sample=False)
    return generated[0, inputs["input_ids"].shape[1] :].tolist(), list(generated.shape)
