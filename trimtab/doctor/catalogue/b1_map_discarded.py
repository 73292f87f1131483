"""B1: PEFT plans placement again when it loads the first adapter, and forgets the user's map."""

from __future__ import annotations

from trimtab.doctor.facts.bug import FIXED, PRESENT, Affected, Bug, Seen
from trimtab.doctor.facts.probe_kit import EVERYWHERE, TOWERS_OFF, Kit

BUG = Bug(
    title="Loading an adapter with PEFT undoes the base's device map",
    symptom="silent: hf_device_map becomes {\"base_model\": <device>} and the offload hooks are gone; towers that the user put "
    "on the CPU are on the GPU (or the reverse)",
    trigger="any base whose hf_device_map holds \"cpu\" or \"disk\", its first adapter, no device_map given to PEFT",
    cause="peft_model.py PeftModel.from_pretrained removes all hooks, load_adapter takes device_map=\"auto\" and infers a new "
    "map; the base's map and max_memory are not used. For a map of one device it calls model.to(device)",
    affected=(Affected("peft"),),
    versions="peft 0.19.1 and 0.21.2, run; on a GPU the towers of a 4-bit model come back unquantized (A4)",
    way_round="give PEFT a map of your own with every key behind base_model.model. and no \"\" key (C2); or transformers' "
    "load_adapter (B9); or trimtab.bridge.load_peft",
    trackers=("huggingface/peft#287 (closed, never done as asked)",),
    trimtab="placement is decided once, before loading; an adapter goes to its layer's device and moves nothing",
    evidence="run",
)  # fmt: skip


def probe(kit: Kit) -> Seen:
    """Load an adapter on a base with its towers on the CPU, and check the map and a tower's hook."""
    base = kit.checkpoint()
    adapter = kit.adapter(base, targets=EVERYWHERE)
    model = kit.load(base, device_map=TOWERS_OFF)
    before = {key for key, place in model.hf_device_map.items() if place == "cpu"}
    after = kit.peft(model, adapter).hf_device_map
    tower = model.model.vision_tower.encoder.layers[0].mlp.up_proj.linear.base_layer
    is_offloaded = tower.weight.device.type == "meta"
    evidence = f"before: {', '.join(sorted(before))} on the CPU; after: {after}, the tower's offload hook is "
    if is_offloaded and len(after) > 1:
        return Seen(FIXED, evidence + "there")
    return Seen(PRESENT, evidence + "gone")
