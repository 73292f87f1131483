"""A1: saving the state of an offloaded 4-bit layer calls `.item()` on a meta tensor."""

from __future__ import annotations

from trimtab.doctor.facts.bug import FIXED, PRESENT, Affected, Bug, Seen
from trimtab.doctor.facts.probe_kit import LLAMA_SPLIT, Kit, failure, on_cpu, unmark

BUG = Bug(
    title="A block with double-quantized 4-bit layers cannot be offloaded: .item() on a meta tensor",
    symptom="RuntimeError: Tensor.item() cannot be called on meta tensors",
    trigger="4-bit with double quantization, and a block that holds such layers is offloaded: by an explicit map a block, "
    "or because PEFT plans it there again (B2). Without double quantization the same map meets A2 instead",
    cause="Params4bit.to('meta') moves the one shared QuantState to meta (A2); accelerate then asks whether a module has "
    "tensors by building its state_dict (hooks.py attach_execution_device_hook), and bitsandbytes writes the nested offset "
    "with .item() (functional.py QuantState.as_dict)",
    affected=(Affected("bitsandbytes"), Affected("accelerate")),
    versions="bitsandbytes 0.49.2 and 0.50.2, each run with accelerate 1.13.0 and 1.15.0; with the older pair A3 comes first",
    way_round="never let a 4-bit layer be offloaded: give \"cpu\" only to modules that are not quantized",
    trackers=(
        "bitsandbytes-foundation/bitsandbytes#1951 (pull request, closed unmerged)",
        "bitsandbytes-foundation/bitsandbytes#1525 (4-bit and sequential offload, named by others)",
        "huggingface/diffusers#13096 (same message, an unquantized model, closed)",
        "huggingface/diffusers#10869 (closed)",
    ),
    trimtab="its layers keep packed bytes and scales together, and nothing is moved after loading",
    evidence="run",
)  # fmt: skip


def probe(kit: Kit) -> Seen:
    """Offload one of two double-quantized decoder layers with accelerate's dispatch."""
    from accelerate import dispatch_model

    model = unmark(kit.load(kit.checkpoint("llama"), quant="nf4-dq", device_map={"": 0}))
    try:
        dispatch_model(model, on_cpu(LLAMA_SPLIT), force_hooks=True)
    except RuntimeError as error:
        if ".item()" not in str(error):
            raise
        return Seen(PRESENT, failure(error))
    return Seen(FIXED, "a block of double-quantized layers was dispatched to the CPU")
