"""I20: PEFT refuses every linear layer of a GGUF file that transformers keeps packed."""

from __future__ import annotations

from trimtab.doctor.facts.bug import NOT_APPLICABLE, Affected, Bug, Seen
from trimtab.doctor.facts.probe_kit import Kit, adapted

BUG = Bug(
    title="PEFT puts no adapter on a GGUF file that transformers keeps packed",
    symptom="ValueError: Target module GgufLinear(in_features=..., out_features=..., ggml_type=...) is not supported",
    trigger="a GGUF checkpoint loaded with transformers without dequantizing it, and PEFT on its linear layers",
    cause="integrations/gguf/utils.py GgufLinear is an nn.Module and no nn.Linear, and PEFT has no dispatcher for it",
    affected=(Affected("peft"),),
    versions="transformers 5.23.0 with PEFT 0.21.2, run; transformers 5.20.0 has the class, 5.16.0 has not (read)",
    way_round="load the file dequantized (in 16 bits), or use the safetensors files of the same model",
    owner=("peft", "transformers"),
    trimtab="it reads the packed weights itself, and an adapter is added to each product",
    evidence="run",
)  # fmt: skip


def probe(kit: Kit) -> Seen:
    """Put a LoRA on one packed layer of type Q4_0."""
    from torch import nn

    try:
        from transformers.integrations.gguf.utils import GgufLinear
    except ImportError as exc:
        return Seen(NOT_APPLICABLE, str(exc))
    return adapted(nn.Sequential(GgufLinear(32, 8, 2)), ValueError)
