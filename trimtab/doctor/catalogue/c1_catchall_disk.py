"""C1: a base map with an empty key cannot keep anything on disk."""

from __future__ import annotations

from trimtab.doctor.facts.bug import FIXED, PRESENT, Affected, Bug, Seen
from trimtab.doctor.facts.probe_kit import Kit, failure

BUG = Bug(
    title="A device map with \"\" and \"disk\" cannot be loaded: a tensor \"is on the meta device\"",
    symptom="ValueError: <first parameter> is on the meta device, we need a `value` to put in on <device>",
    trigger="device_map with the empty key for \"everything else\" and \"disk\" for some module, on any model, "
    "quantized or not",
    cause="accelerate hooks.py attach_align_device_hook_on_blocks gives the root module a hook with "
    "place_submodules=True, which places every tensor below it, also those left on disk, before their own module "
    "gets its hook",
    affected=(Affected("accelerate"),),
    versions="accelerate 1.13.0 and 1.15.0 run, with Llama and with Gemma 4: nothing in it belongs to one family",
    way_round="write a map that names every module and has no \"\" key",
    trackers=("huggingface/transformers#36766 (same message, Gemma 3 with an automatic map, closed)",),
    trimtab="\"\" in its device map only says where the rest belongs; the longest key decides and each tensor is "
    "placed once",
    evidence="run",
)  # fmt: skip


def probe(kit: Kit) -> Seen:
    """Keep one of two decoder layers on disk, everything else by the empty key."""
    try:
        kit.load(kit.checkpoint("llama"), device_map={"model.layers.1": "disk", "": 0})
    except ValueError as error:
        if "is on the meta device" not in str(error):
            raise
        return Seen(PRESENT, failure(error))
    return Seen(FIXED, 'a map with "" and "disk" was loaded')
