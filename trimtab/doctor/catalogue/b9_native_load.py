"""B9: transformers' own load_adapter keeps the map, and leaves LoRA matrices of offloaded layers on the CPU."""

from __future__ import annotations

from trimtab.doctor.facts.bug import FIXED, PRESENT, Affected, Bug, Seen
from trimtab.doctor.facts.probe_kit import EVERYWHERE, TOWERS_OFF, Kit

BUG = Bug(
    title="transformers' load_adapter keeps the device map, but LoRA matrices of offloaded layers stay on the CPU without a hook",
    symptom="right answers and an untouched map as long as execution is on the CPU; on a GPU B8 at the first forward through an "
    "offloaded layer",
    trigger="model.load_adapter(path) on a base with offloaded layers that the adapter targets",
    cause="PEFT makes the matrices of a layer whose weight is on meta on the CPU (tuners_utils.py "
    "_move_adapter_to_device_of_base_layer moves no matrix of such a layer), and nothing gives them a hook",
    affected=(Affected("peft"), Affected("transformers")),
    versions="transformers 5.6.2 with peft 0.19.1 and 5.23.0 with 0.21.2, run: map and hooks kept, logits equal the unsplit "
    "model's, matrices without a hook. The failure on a GPU is deduced from that and B8",
    way_round="the best stock path where the adapter targets no offloaded layer; else move the matrices to the execution device "
    "after loading, or trimtab.bridge.load_peft",
    trackers=("huggingface/peft#3169 (open, the same error)",),
    trimtab="the matrices of a LoRA are put on the device where their layer computes, independent of its weight's tier",
    evidence="run",
)  # fmt: skip


def probe(kit: Kit) -> Seen:
    """Load an adapter natively on a base with its towers on the CPU: the map, a tower's LoRA, the answer."""
    base = kit.checkpoint()
    adapter = kit.adapter(base, targets=EVERYWHERE)
    whole, split = kit.load(base), kit.load(base, device_map=TOWERS_OFF)
    before = dict(split.hf_device_map)
    for model in (whole, split):
        model.load_adapter(str(adapter))
    kept = "kept" if split.hf_device_map == before else "changed"
    apart = float((kit.forward(split, "image") - kit.forward(whole, "image")).abs().max())
    layer = split.model.vision_tower.encoder.layers[0].mlp.up_proj.linear
    matrix = layer.lora_A["default"]
    is_offloaded = layer.base_layer.weight.device.type == "meta"
    has_hook = hasattr(matrix, "_hf_hook") or hasattr(layer, "_hf_hook")
    evidence = (
        f"map {kept}, logits differ by {apart:.3g} from the unsplit model's; LoRA of an offloaded layer on "
        f"{matrix.weight.device}, {'with' if has_hook else 'without'} a hook"
    )
    return Seen(PRESENT if is_offloaded and not has_hook else FIXED, evidence)
