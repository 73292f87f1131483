"""I23: PEFT refuses every linear layer that transformers packs in NVFP4."""

from __future__ import annotations

from trimtab.doctor.facts.bug import NOT_APPLICABLE, Affected, Bug, Seen
from trimtab.doctor.facts.probe_kit import Kit, adapted

BUG = Bug(
    title="PEFT puts no adapter on layers that transformers packs in NVFP4",
    symptom="ValueError: Target module NVFP4Linear(in_features=..., out_features=..., nvfp4) is not supported",
    trigger="a model loaded with transformers' NVFP4 quantizer, and PEFT on its linear layers",
    cause="integrations/nvfp4.py NVFP4Linear is an nn.Module and no nn.Linear, and PEFT has no dispatcher for it",
    affected=(Affected("peft"),),
    versions="transformers 5.23.0 with PEFT 0.21.2, run on a CPU with an empty layer",
    way_round="use the checkpoint in 16 bits, in FP8, or bitsandbytes' 4 bits",
    owner=("peft", "transformers"),
    trimtab="it reads NVFP4 files packed, and an adapter is added to each product",
    evidence="run",
)  # fmt: skip


def probe(kit: Kit) -> Seen:
    """Put a LoRA on one layer. Its constructor needs a kernel of a GPU, so that it is made without its buffers."""
    from torch import nn

    try:
        from transformers.integrations.nvfp4 import NVFP4Linear
    except ImportError as exc:
        return Seen(NOT_APPLICABLE, str(exc))
    layer = NVFP4Linear.__new__(NVFP4Linear)
    nn.Module.__init__(layer)
    layer.in_features = layer.out_features = 32
    return adapted(nn.Sequential(layer, nn.Linear(2, 2)), ValueError)
