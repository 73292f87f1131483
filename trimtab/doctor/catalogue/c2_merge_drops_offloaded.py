"""C2: merging omits the adapters of offloaded modules when the map has an empty key."""

from __future__ import annotations

from typing import Any

from trimtab.doctor.facts.bug import FIXED, PRESENT, Affected, Bug, Seen
from trimtab.doctor.facts.probe_kit import Kit

BUG = Bug(
    title="Merging silently drops the adapters of offloaded modules if the device map has a \"\" key",
    symptom="silent: merge_and_unload or merge_adapter returns, and on offloaded modules the weight is what it was",
    trigger="a map with \"\" and \"cpu\" that is in force while merging: given to PEFT with the adapter, or that of "
    "the base when transformers load_adapter was used. PEFT's own new plan (B1) hides it by undoing the offload",
    cause="the empty key leaves a first hook on every submodule, so that offload becomes the second of an accelerate "
    "SequentialHook; PEFT tuners_utils.py onload_layer knows AlignDevicesHook alone and merges into tensors without "
    "data",
    affected=(Affected("peft"), Affected("accelerate")),
    versions="peft 0.19.1 and 0.21.2 run, through PEFT and through transformers load_adapter; a map without \"\" "
    "merges every layer in both",
    way_round="give a map without \"\", and compare weights before and after a merge",
    trimtab="the line has no hooks; for stock models the bridge brings the offload hook in front while PEFT merges, "
    "so that every layer is reached",
    evidence="run",
)  # fmt: skip


def probe(kit: Kit) -> Seen:
    """Merge an adapter on two layers, one of them offloaded, and list the changed weights."""
    path = kit.checkpoint("llama")
    adapter = kit.adapter(path, targets=["q_proj"])
    split = {"base_model.model.model.layers.1": "cpu", "": 0}
    model = kit.peft(kit.load(path, device_map={"model.layers.1": "cpu", "": 0}), adapter, device_map=split)
    layers = model.base_model.model.model.layers
    before = [_weight(layer.self_attn.q_proj.base_layer).clone() for layer in layers]
    model.merge_adapter()
    after = [_weight(layer.self_attn.q_proj.base_layer) for layer in layers]
    resident, offloaded = [float((new - old).abs().max()) for new, old in zip(after, before)]
    if resident == 0:
        raise RuntimeError("the resident layer was not merged either")
    text = f"merged weights differ from the base by up to {resident:.2f} (resident layer), {offloaded:.2f} (offloaded layer)"
    return Seen(FIXED if offloaded else PRESENT, text)


def _weight(layer: Any) -> Any:
    """Return a layer's weight, from the storage of its offload hook if the layer itself has no data."""
    if not layer.weight.is_meta:
        return layer.weight.detach()
    hook = layer._hf_hook
    parts = getattr(hook, "hooks", [hook])
    return next(part.weights_map["weight"] for part in parts if getattr(part, "offload", False))
