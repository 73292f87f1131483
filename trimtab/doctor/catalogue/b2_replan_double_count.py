"""B2: PEFT's plan counts memory for a second copy of the base that is already loaded."""

from __future__ import annotations

from typing import Any
from unittest import mock

from trimtab.doctor.facts.bug import FIXED, PRESENT, Affected, Bug, Seen
from trimtab.doctor.facts.probe_kit import EVERYWHERE, TOWERS_OFF, Kit

BUG = Bug(
    title="PEFT's own plan counts the loaded base twice, and moves layers that fit to the CPU",
    symptom="log line \"no modules could be assigned to the following devices due to insufficient memory: 0: N bytes\", then A1, "
    "A2 or A3; or everything lands on the CPU: \"Expected all tensors to be on the same device, but got index is on cuda:0\"",
    trigger="as B1, on a GPU with less free memory than the base takes, which is every GPU that the base fills by half",
    cause="peft_model.py load_adapter passes max_memory=None on, so accelerate's get_max_memory asks the driver for free "
    "memory while the base is already there, and infer_auto_device_map places the whole base in it again",
    affected=(Affected("peft"),),
    versions="peft 0.19.1 and 0.21.2, for 4-bit, 8-bit and bfloat16 alike, run under pressure on a GPU; the probe plays a GPU "
    "of 1.5 times the base",
    way_round="as B1; or pass PEFT a max_memory that counts the base as free",
    trackers=("huggingface/peft#287 (closed)",),
    trimtab="one plan from the weights' bytes and the budget, made before anything is loaded",
    evidence="run",
)  # fmt: skip


def probe(kit: Kit) -> Seen:
    """Give PEFT's plan the free memory of a GPU of 1.5 times the base with the base on it, and check the placement."""
    base = kit.checkpoint()
    adapter = kit.adapter(base, targets=EVERYWHERE)
    model = kit.load(base, device_map=TOWERS_OFF)
    size_bytes = sum(file.stat().st_size for file in base.glob("*.safetensors"))

    def balanced(_: Any, max_memory: Any = None, **__: Any) -> Any:
        return max_memory or {0: size_bytes // 2, "cpu": 100 * size_bytes}

    with mock.patch("peft.peft_model.get_balanced_memory", balanced), mock.patch("peft.peft_model.dispatch_model", _stop):
        try:
            kit.peft(model, adapter)
        except _PlannedError as planned:
            places = list(planned.device_map.values())
            on_cpu = places.count("cpu")
            evidence = f"1.5 times the base, the base on it: {on_cpu} of {len(places)} modules planned on the CPU"
            return Seen(PRESENT if on_cpu else FIXED, evidence)
    return Seen(FIXED, "an adapter was loaded without a plan of PEFT's own")


class _PlannedError(Exception):
    """Ends the load when the plan is known, before PEFT moves anything to a missing GPU."""

    def __init__(self, device_map: dict[str, Any]) -> None:
        self.device_map = device_map
        super().__init__("planned")


def _stop(_: Any, device_map: dict[str, Any], **__: Any) -> None:
    raise _PlannedError(device_map)
