"""E2: missing adapter weights stay without data when low_cpu_mem_usage is on."""

from __future__ import annotations

import shutil

from trimtab.doctor.facts.bug import FIXED, PRESENT, Affected, Bug, Seen
from trimtab.doctor.facts.probe_kit import Kit, failure

WEIGHTS = "adapter_model.safetensors"

BUG = Bug(
    title="Missing adapter keys and low_cpu_mem_usage=True: LoRA weights without data, arbitrary answers",
    symptom="silent after the warning of E1: those LoRA weights are on the meta device, and a forward pass on the "
    "CPU gives other numbers, NaN among them, each time",
    trigger="PeftModel.from_pretrained(..., low_cpu_mem_usage=True) with a file that lacks keys",
    cause="PEFT makes the LoRA layers on meta and fills what the file has; nothing checks what is left. Operators "
    "that mix a meta tensor with a real one compute on uninitialized memory",
    affected=(Affected("peft"),),
    versions="peft 0.19.1 and 0.21.2 run on the CPU (both, not only the newest); not tried on CUDA",
    way_round="look for parameters on meta after loading",
    trimtab="an adapter is attached whole or not at all, from keys that were all matched before",
    evidence="run",
)  # fmt: skip


def probe(kit: Kit) -> Seen:
    """Load an adapter that lacks one of two layers with low_cpu_mem_usage, and run it."""
    from safetensors.torch import load_file, save_file

    path = kit.checkpoint("llama")
    half = kit.folder / "e2"
    if not half.exists():
        shutil.copytree(kit.adapter(path, targets=["q_proj"]), half)
        kept = {key: tensor for key, tensor in load_file(half / WEIGHTS).items() if ".layers.0." in key}
        save_file(kept, half / WEIGHTS, {"format": "pt"})
    base = kit.load(path)
    try:
        model = kit.peft(base, half, low_cpu_mem_usage=True)
    except (KeyError, RuntimeError, ValueError) as error:
        if "missing" not in str(error).lower() and "lora_" not in str(error):
            raise
        return Seen(FIXED, f"refused: {failure(error)}")
    empty = [name for name, parameter in model.named_parameters() if parameter.is_meta]
    if not empty:
        return Seen(FIXED, "no LoRA weight was left without data")
    try:
        kit.forward(model)
    except (NotImplementedError, RuntimeError) as error:
        return Seen(PRESENT, f"{len(empty)} LoRA weights on meta; the forward pass gives {failure(error)}")
    return Seen(PRESENT, f"{len(empty)} LoRA weights on meta, such as {empty[0]}; the forward pass still answers")
