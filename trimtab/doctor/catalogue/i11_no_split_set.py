"""I11: classes that must not be split are ignored when they come as a set."""

from __future__ import annotations

from trimtab.doctor.facts.bug import FIXED, PRESENT, Affected, Bug, Seen
from trimtab.doctor.facts.probe_kit import Kit

BUG = Bug(
    title="accelerate takes transformers' set of classes that must not be split for one name, and splits them",
    symptom="silent: the map cuts decoder layers in two; with Gemma 4 what is cut loses its buffers (C8)",
    trigger="infer_auto_device_map or get_balanced_memory with no_split_module_classes=model._no_split_modules, "
    "which is a set in transformers 5",
    cause="accelerate utils/modeling.py wraps what is neither a list nor a tuple in a list, so that no class name is "
    "found in it",
    affected=(Affected("accelerate", fixed_in="1.14.0"),),
    versions="accelerate 1.13.0 run, splits; 1.15.0 run, does not; 1.14.0 has the fix (read in the wheel)",
    way_round="pass list(model._no_split_modules); PEFT and transformers do",
    trimtab="blocks are found in the model itself and moved as one piece",
    evidence="run",
)  # fmt: skip


def probe(kit: Kit) -> Seen:
    """Plan a tiny Llama within half of its size, with the classes as a list and as a set."""
    import torch
    import transformers
    from accelerate import infer_auto_device_map
    from accelerate.utils import compute_module_sizes

    config = transformers.AutoConfig.from_pretrained(kit.checkpoint("llama"))
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(config)
    total_bytes = compute_module_sizes(model)[""]
    cut = {}
    for kind in (list, set):
        memory = {"cpu": total_bytes * 45 // 100, "disk": 10 * total_bytes}
        device_map = infer_auto_device_map(model, max_memory=memory, no_split_module_classes=kind(["LlamaDecoderLayer"]))
        cut[kind.__name__] = sum(name.startswith("model.layers.") and name.count(".") > 2 for name in device_map)
    text = f"keys below a decoder layer: {cut['list']} with a list of classes, {cut['set']} with a set"
    return Seen(PRESENT if cut["set"] > cut["list"] else FIXED, text)
