"""C6: a map key also catches modules whose name only begins like it."""

from __future__ import annotations

from trimtab.doctor.facts.bug import FIXED, PRESENT, Affected, Bug, Seen
from trimtab.doctor.facts.probe_kit import Kit

BUG = Bug(
    title="A device map key for layers.1 also catches layers.10 to 19, embed_tokens also embed_tokens_per_layer",
    symptom="silent: modules without a separate key go where a shorter name says; to disk, they are left on meta",
    trigger="a map that names layers.1 (or embed_tokens) and leaves longer names to a \"\" key",
    cause="transformers integrations/accelerate.py expand_device_map joins the keys to a regular expression without "
    "an end of name; quantizers/quantizers_utils.py should_convert_module had the same fault",
    affected=(Affected("transformers"),),
    versions="the device map: 5.6.2 and 5.23.0 run. The skip list of the quantizer: fault in 5.6.2, boundary in "
    "5.23.0 (both run), none yet in 5.20.0 (read)",
    way_round="give every module a separate key",
    trimtab="names are compared segment by segment, in device maps and in place patterns",
    evidence="run",
)  # fmt: skip


def probe(kit: Kit) -> Seen:
    """Check with transformers' functions where two modules with similar names are placed, and whether both are quantized."""
    from transformers.integrations.accelerate import expand_device_map
    from transformers.quantizers.quantizers_utils import should_convert_module

    names = ["model.layers.11.norm.weight", "model.embed_tokens_per_layer.weight"]
    placed = expand_device_map({"model.layers.1": "cpu", "model.embed_tokens": "cpu", "": 0}, names)
    wrong = [name for name in names if placed[name] == "cpu"]
    quantizer = "has a boundary" if should_convert_module("model.layers.11.norm", ["model.layers.1"]) else "collides too"
    if wrong:
        return Seen(PRESENT, f"layers.1 and embed_tokens also place {', '.join(wrong)}; the quantizer's list {quantizer}")
    return Seen(FIXED, f"names end where a key ends; the quantizer's list {quantizer}")
