"""A3: accelerate hands transformers' mark on a parameter to bitsandbytes' constructor."""

from __future__ import annotations

from trimtab.doctor.facts.bug import FIXED, PRESENT, Affected, Bug, Seen
from trimtab.doctor.facts.probe_kit import LLAMA_SPLIT, Kit, failure, on_cpu

BUG = Bug(
    title="Offloading a bitsandbytes weight: __new__() got an unexpected keyword argument '_is_hf_initialized'",
    symptom="TypeError: Params4bit.__new__() got an unexpected keyword argument '_is_hf_initialized' (also Int8Params)",
    trigger="accelerate moves a 4-bit or 8-bit parameter (to meta, for offload) that transformers 5 has marked as loaded",
    cause="accelerate utils/modeling.py set_module_tensor_to_device builds the parameter again with its __dict__ as keyword "
    "arguments; transformers 5 puts _is_hf_initialized there, bitsandbytes' constructors do not take it",
    affected=(Affected("accelerate", None, "1.14.0"), Affected("bitsandbytes", None, "0.50.0")),
    versions="run: fails with accelerate 1.13.0 and bitsandbytes 0.49.2, for 4-bit and 8-bit; accelerate 1.14.0 alone (takes "
    "the mark out) fixes it, and bitsandbytes 0.50.0 alone (takes any keyword)",
    way_round="upgrade accelerate to 1.14.0 or bitsandbytes to 0.50.0; 4-bit offload then meets A1 or A2",
    trackers=(
        "huggingface/accelerate#3976 (pull request, merged)",
        "bitsandbytes-foundation/bitsandbytes#1900 (pull request, merged)",
        "huggingface/transformers#43872 (closed, named by users)",
        "verl-project/verl#4522 (the same of a plain Parameter, open)",
    ),
    trimtab="trimtab builds no parameter from another one's attributes, and no accelerate hook accesses its weights",
    evidence="run",
)  # fmt: skip


def probe(kit: Kit) -> Seen:
    """Offload one of two decoder layers of a 4-bit and of an 8-bit model."""
    from accelerate import dispatch_model

    messages = []
    for quant in ("nf4", "int8"):
        model = kit.load(kit.checkpoint("llama"), quant=quant, device_map={"": 0})
        try:
            dispatch_model(model, on_cpu(LLAMA_SPLIT), force_hooks=True)
        except TypeError as error:
            if "_is_hf_initialized" not in str(error):
                raise
            messages.append(f"{quant}: {failure(error)}")
    return Seen(PRESENT, "; ".join(messages)) if messages else Seen(FIXED, "4-bit and 8-bit layers were dispatched to the CPU")
