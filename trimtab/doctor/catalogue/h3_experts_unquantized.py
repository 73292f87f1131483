"""H3: experts of a mixture stay in full precision under bitsandbytes."""

from __future__ import annotations

from trimtab.doctor.facts.bug import FIXED, PRESENT, Affected, Bug, Seen
from trimtab.doctor.facts.probe_kit import Kit, quantized

BUG = Bug(
    title="\"4-bit\" mixture-of-experts models keep their experts in 16 bits",
    symptom="silent: the model needs several times the memory that 4-bit promises",
    trigger="Mixtral, Qwen3-MoE, Qwen3-VL-MoE, Gemma 4 MoE and others of transformers 5 with load_in_4bit or "
    "load_in_8bit",
    cause="transformers 5 keeps experts as 3-D parameters; bitsandbytes replaces nn.Linear alone",
    affected=(Affected("transformers"), Affected("bitsandbytes")),
    versions="5.6.2 and 5.23.0 run, with Mixtral, Qwen3-MoE and Gemma 4 MoE",
    way_round="count bytes after loading; bitsandbytes.nn.parametrize for parameters by hand",
    trackers=(
        "bitsandbytes-foundation/bitsandbytes#1849 (open when last seen)",
        "bitsandbytes-foundation/bitsandbytes#1965 (pull request, open)",
        "huggingface/transformers#39859 (pull request, open)",
    ),
    trimtab="the plan shows experts as unquantized, with bytes and reason; --experts nf4 packs each of them while loading",
    evidence="run",
)  # fmt: skip


def probe(kit: Kit) -> Seen:
    """Load a tiny Mixtral in 4-bit and check its experts."""
    model = kit.load(kit.checkpoint("mixtral"), quant="nf4", device_map={"": 0})
    experts = [parameter for name, parameter in model.named_parameters() if ".experts." in name]
    plain = [parameter for parameter in experts if parameter.is_floating_point() and parameter.element_size() > 1]
    values = sum(parameter.numel() for parameter in plain)
    linears = quantized(model)["Linear4bit"]
    if plain:
        return Seen(PRESENT, f"{linears} Linear4bit, and {values:,} expert weights as {plain[0].dtype}")
    return Seen(FIXED, f"{linears} Linear4bit, and no expert weight in full precision")
