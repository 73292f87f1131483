"""F3: other quantizers do not support adapters or split models fully."""

from __future__ import annotations

from trimtab.doctor.facts.bug import FIXED, NOT_APPLICABLE, PRESENT, Affected, Bug, Seen
from trimtab.doctor.facts.probe_kit import Kit, installed_source

BUG = Bug(
    title="Other quantizers: no \"cpu\" or \"disk\" in a device map, no merge",
    symptom="ValueError about CPU or disk offload from HQQ, quanto and torchao; TypeError or no merge method for "
    "LoRA on torchao int4, GPTQ, AWQ and AQLM",
    trigger="a LoRA on, or a split of, a model quantized by torchao, HQQ, quanto, GPTQ, AWQ or AQLM",
    cause="transformers quantizers/quantizer_hqq.py, quantizer_quanto.py and quantizer_torchao.py refuse such maps; "
    "PEFT lora/torchao.py re-quantizes only with get_apply_tensor_subclass, and its GPTQ, AWQ and AQLM layers have "
    "no merge",
    affected=(Affected("transformers"), Affected("peft")),
    versions="read in transformers 5.6.2 and 5.23.0 and in peft 0.19.1 and 0.21.2; accelerate moves torchao weights "
    "from 1.14.0 on (accelerate#3973)",
    way_round="bitsandbytes for a base that carries adapters, all of it on one device",
    trackers=("huggingface/accelerate#3973 (merged)",),
    trimtab="files of GPTQ and AWQ are read, placed anywhere, still packed, and merged to 16 bits; torchao, HQQ, quanto and AQLM "
    "are refused by name",
    evidence="source",
)  # fmt: skip


# Distribution, transformers' quantizer, PEFT's layer.
BACKENDS = (
    ("torchao", "quantizer_torchao", "torchao"), ("hqq", "quantizer_hqq", "hqq"),
    ("optimum-quanto", "quantizer_quanto", ""), ("gptqmodel", "quantizer_gptq", "gptq"), ("autoawq", "quantizer_awq", "awq"),
    ("aqlm", "quantizer_aqlm", "aqlm"),
)  # fmt: skip


def probe(kit: Kit) -> Seen:
    """Read the refusals of the installed backends in their packages."""
    installed = [row for row in BACKENDS if kit.version(row[0]) is not None]
    if not installed:
        return Seen(NOT_APPLICABLE, f"none of {', '.join(row[0] for row in BACKENDS)} is installed")
    limits = []
    for name, quantizer, layer in installed:
        place = installed_source(f"transformers.quantizers.{quantizer}", "in device_map.values()")
        if place is not None:
            limits.append(f"{name} checks maps for cpu and disk ({place[0]}:{place[1]})")
        module = f"peft.tuners.lora.{layer}"
        if layer and installed_source(module, "class ") and not installed_source(module, "def merge("):
            limits.append(f"PEFT cannot merge into {name}")
    return Seen(PRESENT, "; ".join(limits)) if limits else Seen(FIXED, "none of the known limits was found in the sources")
