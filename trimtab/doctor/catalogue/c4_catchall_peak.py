"""C4: a map with an empty key puts offloaded modules on the main device first."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from trimtab.doctor.facts.bug import FIXED, PRESENT, Affected, Bug, Seen
from trimtab.doctor.facts.probe_kit import LLAMA_SPLIT, Kit

BUG = Bug(
    title="A \"\" key in the device map puts the whole model on the GPU before it offloads part of it",
    symptom="silent, or out of memory while loading although the final placement fits",
    trigger="device_map with \"\" on the GPU and \"cpu\" for large modules",
    cause="accelerate hooks.py attach_align_device_hook_on_blocks: the root's hook places all tensors below it on "
    "the main device; modules to offload get their own hook afterwards",
    affected=(Affected("accelerate"),),
    versions="accelerate 1.13.0 and 1.15.0 run: every tensor of the offloaded module goes to the main device once; "
    "without \"\" none does",
    way_round="write a map that names every module and has no \"\" key",
    trimtab="it reads each tensor straight into its place, so loading never needs more than the plan says",
    evidence="run",
)  # fmt: skip


def probe(kit: Kit) -> Seen:
    """Count the bytes of an offloaded layer that accelerate puts on the main device while it attaches its hooks."""
    path = kit.checkpoint("llama")
    catch_all = _moved_bytes(kit, path, {"model.layers.1": "cpu", "": 0})
    explicit = _moved_bytes(kit, path, LLAMA_SPLIT)
    text = f'bytes of the offloaded layer put on the main device: {catch_all} with a "" key, {explicit} without'
    return Seen(PRESENT if catch_all > explicit else FIXED, text)


def _moved_bytes(kit: Kit, path: Path, device_map: Mapping[str, Any]) -> int:
    import accelerate.hooks as hooks
    import torch

    moved: dict[str, int] = {}
    original = hooks.set_module_tensor_to_device

    def watched(module: Any, tensor_name: str, device: Any, *args: Any, **kwargs: Any) -> Any:
        # The imitated GPU is a device object; the text "cpu" would be offload.
        if isinstance(device, torch.device) and device.type == "cpu" and tensor_name.startswith("model.layers.1."):
            moved[tensor_name] = module.get_parameter(tensor_name).nbytes
        return original(module, tensor_name, device, *args, **kwargs)

    hooks.set_module_tensor_to_device = watched
    try:
        kit.load(path, device_map=device_map)
    finally:
        hooks.set_module_tensor_to_device = original
    return sum(moved.values())
