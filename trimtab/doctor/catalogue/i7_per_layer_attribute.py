"""I7: reading head_dim of a Gemma 4 config raises an error that getattr does not catch."""

from __future__ import annotations

from trimtab.doctor.facts.bug import FIXED, PRESENT, Affected, Bug, Seen
from trimtab.doctor.facts.probe_kit import Kit, failure

BUG = Bug(
    title="getattr(config, \"head_dim\", default) raises on Gemma 4: a per-layer attribute is a RuntimeError",
    symptom="AmbiguousGlobalPerLayerAttributeError: 'head_dim' is a per-layer attribute and may vary across layers",
    trigger="any code that reads head_dim (or another attribute that differs between layers) from a Gemma 4 text "
    "config; hasattr and getattr with a default do not help",
    cause="transformers integrations/heterogeneity/configuration_utils.py raises a RuntimeError where Python's own "
    "protocol wants an AttributeError",
    affected=(Affected("transformers", since="5.15.0"),),
    versions="5.23.0 run, raises; 5.6.2 run, gives the value; in 5.15.0 and not in 5.13.0 (read in the wheels)",
    way_round="config.per_layer_config[layer].head_dim, or allow_global_per_layer_attribute_access = True on the "
    "config",
    trackers=(
        "huggingface/transformers#47384 (named by vLLM as its origin)",
        "vllm-project/vllm#52768 (closed)",
        "vllm-project/compressed-tensors#844 (pull request, open)",
    ),
    trimtab="sizes are read from each layer's own config where there is one",
    evidence="run",
)  # fmt: skip


def probe(kit: Kit) -> Seen:
    """Read head_dim of a Gemma 4 whose global layers have wider heads, with a default."""
    import transformers

    config = transformers.AutoConfig.from_pretrained(kit.checkpoint()).get_text_config()
    try:
        width = getattr(config, "head_dim", None)
    except RuntimeError as error:
        return Seen(PRESENT, failure(error))
    return Seen(FIXED, f"getattr gives {width}")
