"""B8: a LoRA layer does not move its input and its matrices to one device."""

from __future__ import annotations

from typing import Any

from trimtab.doctor.facts.bug import FIXED, NOT_APPLICABLE, PRESENT, Affected, Bug, Seen
from trimtab.doctor.facts.probe_kit import Kit, failure

BUG = Bug(
    title="LoRA matrices on another device than their layer: Expected all tensors to be on the same device",
    symptom="RuntimeError: Expected all tensors to be on the same device, but found at least two devices, cuda:0 and cpu, in "
    "the forward of peft/tuners/lora",
    trigger="the LoRA matrices of a layer are on the CPU while its input is on the GPU: transformers' load_adapter on a base "
    "with offloaded layers (B9), or a base moved after the adapter was loaded",
    cause="tuners/lora/layer.py and bnb.py forward cast the input's dtype to that of lora_A, not its device; matrices of a layer "
    "whose weight is on meta (offloaded) stay where they were made, on the CPU, without a hook",
    affected=(Affected("peft"),),
    versions="the forward of 0.19.1 and 0.21.2 shown with torch's fake CUDA tensors on the CPU; on a GPU with a real layer. "
    "0.20.0 changed only dequantization (peft#3418)",
    way_round="move the LoRA matrices to the layer's execution device after loading; trimtab.bridge.load_peft does",
    trackers=(
        "huggingface/peft#3169 (open)", "huggingface/peft#3181 (pull request, closed: a reproducer was requested)",
        "huggingface/peft#3418 (merged, of dequantization)",
    ),
    trimtab="the matrices of a LoRA are put on the device where their layer computes, independent of its weight's tier",
    evidence="run",
)  # fmt: skip


NEEDS_GPU = True


def probe(kit: Kit) -> Seen:
    """Run a LoRA layer on the GPU with its matrices on the CPU; without a GPU, with tensors that imitate one."""
    import torch
    from peft import LoraConfig, get_peft_model

    model = torch.nn.Sequential(torch.nn.Linear(8, 8, bias=False))
    get_peft_model(model, LoraConfig(r=2, target_modules=["0"]))
    if torch.cuda.is_available():
        return _run(model[0], "a CUDA layer")
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        try:
            torch.empty(1, device="cuda")
        except (AssertionError, RuntimeError) as error:
            return Seen(NOT_APPLICABLE, f"no GPU, and this torch cannot simulate one: {failure(error)}")
        return _run(model[0], "a fake CUDA layer")


def _run(layer: Any, what: str) -> Seen:
    import torch

    for module, device in ((layer.base_layer, "cuda"), (layer.lora_A["default"], "cpu"), (layer.lora_B["default"], "cpu")):
        weight = torch.empty(module.weight.shape, device=device)
        module.weight = torch.nn.Parameter(weight, requires_grad=False)
    try:
        with torch.no_grad():
            layer(torch.empty(1, 8, device="cuda"))
    except RuntimeError as error:
        if "same device" not in str(error):
            raise
        return Seen(PRESENT, f"{what}, matrices on the CPU: {failure(error)}")
    return Seen(FIXED, f"{what}, matrices on the CPU: runs")
