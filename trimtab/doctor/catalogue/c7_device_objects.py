"""C7: torch.device values in a map break modules on disk."""

from __future__ import annotations

from trimtab.doctor.facts.bug import FIXED, PRESENT, Affected, Bug, Seen
from trimtab.doctor.facts.probe_kit import LLAMA_SPLIT, Kit, failure

BUG = Bug(
    title="torch.device objects in a device map break what is on disk: \"device(type=...) is invalid\"",
    symptom="SafetensorError: device device(type='cpu') is invalid, at the first forward",
    trigger="device_map values that are torch.device objects, and something on \"disk\"",
    cause="accelerate utils/offload.py OffloadedWeightsLoader hands the value of the map to safetensors.safe_open, "
    "which takes text and numbers",
    affected=(Affected("accelerate"), Affected("safetensors")),
    versions="accelerate 1.13.0 and 1.15.0 with safetensors of today, both run",
    way_round="write 0, \"cuda:0\", \"cpu\" instead of torch.device",
    trimtab="a value of a device map is a number, text or anything whose str() is a device",
    evidence="run",
)  # fmt: skip


def probe(kit: Kit) -> Seen:
    """Run a model with one layer on disk and device objects for the rest."""
    import torch
    from safetensors import SafetensorError

    here = torch.device("cpu")
    places = {name: "disk" if place == "cpu" else here for name, place in LLAMA_SPLIT.items()}
    try:
        kit.forward(kit.load(kit.checkpoint("llama"), device_map=places))
    except SafetensorError as error:
        if "is invalid" not in str(error):
            raise
        return Seen(PRESENT, failure(error))
    return Seen(FIXED, "device objects and disk work together")
