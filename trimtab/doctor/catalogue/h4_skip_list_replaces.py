"""H4: a user's skip list replaces the default one."""

from __future__ import annotations

from trimtab.doctor.facts.bug import FIXED, PRESENT, Affected, Bug, Seen
from trimtab.doctor.facts.probe_kit import OFFLOAD, Kit, failure, frames
from trimtab.stock.load import quantization

BUG = Bug(
    title="llm_int8_skip_modules replaces the default list: the head becomes 4-bit, tied models fail without a message",
    symptom="AssertionError without text (4-bit) or \"'Parameter' object has no attribute 'CB'\" (8-bit) at the "
    "first forward pass of a tied model; a 4-bit head, silently, on an untied one; a name such as \"self_attn\" "
    "matches nothing, silently",
    trigger="BitsAndBytesConfig(llm_int8_skip_modules=[...]) without the head",
    cause="transformers quantizers/base.py get_modules_to_not_convert looks for the head only if no list was given; "
    "names are compared with the start or the end of a path",
    affected=(Affected("transformers"), Affected("bitsandbytes")),
    versions="5.6.2 with bitsandbytes 0.49.2 and 5.23.0 with 0.50.2 run, in 4-bit and in 8-bit",
    way_round="add \"lm_head\" to every list of your own, and write full module paths",
    owner=("transformers",),
    trackers=(
        "huggingface/transformers#45674 (closed)",
        "bitsandbytes-foundation/bitsandbytes#1634 (8-bit)",
        "bitsandbytes-foundation/bitsandbytes#1865 (8-bit, pull request)",
    ),
    trimtab="keep_unquantized adds to the default list, and a pattern that names no linear is an error",
    evidence="run",
)  # fmt: skip


def probe(kit: Kit) -> Seen:
    """Load an untied and a tied model in 4-bit with a list that names one MLP."""
    config = quantization("nf4", **OFFLOAD)
    config.llm_int8_skip_modules = ["model.layers.0.mlp"]
    untied = kit.load(kit.checkpoint("llama"), quantization_config=config, device_map={"": 0})
    kind = type(untied.lm_head).__name__
    try:
        kit.forward(kit.load(kit.checkpoint("qwen3"), quantization_config=config, device_map={"": 0}))
    except AssertionError as error:
        if not any(frame["library"] == "bitsandbytes" for frame in frames(error)):
            raise
        return Seen(PRESENT, f"the head of an untied model is {kind}; a tied one: {failure(error)}")
    if kind != "Linear":
        return Seen(PRESENT, f"the head of an untied model is {kind}; a tied one runs")
    return Seen(FIXED, "the head stays as it was with a list that does not name it")
