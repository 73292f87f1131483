"""A2: a 4-bit layer that accelerate offloads loses its scales, and fails at the first forward."""

from __future__ import annotations

from trimtab.doctor.facts.bug import FIXED, PRESENT, Affected, Bug, Seen
from trimtab.doctor.facts.probe_kit import LLAMA_SPLIT, Kit, failure, on_cpu, unmark

BUG = Bug(
    title="An offloaded 4-bit layer loads without an error, then the first forward cannot copy out of a meta tensor",
    symptom="NotImplementedError: Cannot copy out of meta tensor; no data! at bitsandbytes functional.py QuantState.to",
    trigger="any quantized Linear4bit that accelerate's hooks keep on \"cpu\": by a map a block (given to dispatch_model or to "
    "PEFT), by PEFT's own plan (B2) or by device_map=\"auto\" (A6); with double quantization A1 comes first",
    cause="bitsandbytes nn/modules.py Params4bit.to calls quant_state.to(device), which changes the one shared object: moving "
    "the weight to meta moves its scales there too. accelerate keeps the packed bytes, and its hook builds the parameter "
    "again with the old quant_state, which is on meta by then",
    affected=(Affected("bitsandbytes"), Affected("accelerate")),
    versions="bitsandbytes 0.49.2 with accelerate 1.13.0 (with A3 fixed) and 0.50.2 with 1.15.0, both run; 8-bit "
    "weights pass the same test in the newer pair",
    way_round="keep 4-bit layers on one accelerator and offload only modules that are not quantized; or 8-bit for what must go",
    trackers=(
        "huggingface/accelerate#3566 (closed: a current limitation)",
        "huggingface/accelerate#2934 (pull request, merged, a part)",
        "huggingface/diffusers#12719 (same failure)",
        "huggingface/diffusers#12799 (pull request, closed)",
        "huggingface/transformers#43873 (named by users)",
    ),
    trimtab="a packed weight and its scales are plain tensors of one block: every tier copies them together, still quantized",
    evidence="run",
)  # fmt: skip


def probe(kit: Kit) -> Seen:
    """Offload one of two 4-bit decoder layers with accelerate's dispatch, and run it."""
    from accelerate import dispatch_model

    model = unmark(kit.load(kit.checkpoint("llama"), quant="nf4", device_map={"": 0}))
    dispatch_model(model, on_cpu(LLAMA_SPLIT), force_hooks=True)
    try:
        kit.forward(model)
    except NotImplementedError as error:
        return Seen(PRESENT, f"dispatched without an error; {failure(error)}")
    return Seen(FIXED, "an offloaded 4-bit layer was run")
