"""A4: modules that a map puts on the CPU are not quantized."""

from __future__ import annotations

from trimtab.doctor.facts.bug import FIXED, PRESENT, Affected, Bug, Seen
from trimtab.doctor.facts.probe_kit import LLAMA_SPLIT, Kit, quantized

BUG = Bug(
    title="Modules that the device map puts on \"cpu\" or \"disk\" stay unquantized, silently",
    symptom="silent: plain nn.Linear in the load dtype (bfloat16, not float32 as the flag's name says); four times the host "
    "memory, and four times the bytes to copy at every forward, of what a 4-bit user expects",
    trigger="llm_int8_enable_fp32_cpu_offload=True with a dict as device_map that holds \"cpu\" or \"disk\", 4-bit or 8-bit",
    cause="transformers quantizers/quantizer_bnb_4bit.py _process_model_before_weight_loading adds those keys to "
    "modules_to_not_convert; by design, and what makes towers on the CPU work at all (A2)",
    affected=(Affected("transformers"),),
    versions="transformers 5.6.2 and 5.23.0, run",
    way_round="count the quantized layers after loading, and plan host memory for full precision",
    trackers=(
        "huggingface/transformers#22018 (closed)",
        "huggingface/transformers#44772 (pull request, documentation)",
        "huggingface/accelerate#1699 (pull request)",
        "huggingface/accelerate#2934 (pull request, merged: the flag should not be needed for 4-bit)",
    ),
    trimtab="weights stay quantized in every tier; the plan names the format and the bytes of each block",
    evidence="run",
)  # fmt: skip


def probe(kit: Kit) -> Seen:
    """Load a 4-bit model with one of two decoder layers on the CPU, and count."""
    model = kit.load(kit.checkpoint("llama"), quant="nf4", device_map=LLAMA_SPLIT)
    resident, offloaded = (quantized(layer) for layer in model.model.layers)
    dtype = str(model.model.layers[1].mlp.up_proj.weight.dtype).removeprefix("torch.")
    evidence = (
        f"layer 0 on the GPU: {resident['Linear4bit']} Linear4bit; layer 1 on the CPU: {offloaded['Linear4bit']} "
        f"Linear4bit, {offloaded['Linear']} Linear in {dtype}"
    )
    return Seen(FIXED if offloaded["Linear4bit"] == resident["Linear4bit"] else PRESENT, evidence)
