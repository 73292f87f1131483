"""I1: a cache loses its sliding windows when no layer shares keys and values."""

from __future__ import annotations

from trimtab.doctor.facts.bug import FIXED, PRESENT, Affected, Bug, Seen
from trimtab.doctor.facts.probe_kit import Kit

BUG = Bug(
    title="The cache of a model with num_kv_shared_layers = 0 keeps everything: no sliding window is used",
    symptom="silent: layers with a sliding window keep all keys and values; the answer is the same, the memory grows "
    "with the context",
    trigger="Gemma 4 without KV-shared layers (26B-A4B, 31B), or Gemma 3n configured so",
    cause="transformers cache_utils.py cuts the list of layers with [:-num_kv_shared_layers], and [:-0] is empty; "
    "each layer then gets the default, unlimited cache",
    affected=(Affected("transformers", fixed_in="5.19.0"),),
    versions="5.6.2 run: no layer of the cache has a window; 5.23.0 run: right; the cut is in 5.18.0 and no longer "
    "in 5.19.0 (read in the wheels)",
    way_round="a newer transformers; past_key_values with a cache built by hand",
    trimtab="the plan asks the installed cache itself for its windows, so the bytes it counts are those that "
    "transformers' own generation uses; batches lay the cache out by hand, with windows",
    evidence="run",
)  # fmt: skip


def probe(kit: Kit) -> Seen:
    """Count the windows in the cache for a model with one sliding layer of two and none that shares."""
    import transformers

    path = kit.checkpoint("gemma4_moe")
    config = transformers.AutoConfig.from_pretrained(path).get_text_config()
    layers = transformers.DynamicCache(config=config).layers
    windows = sum(bool(getattr(layer, "is_sliding", False)) for layer in layers)
    sliding = list(config.layer_types).count("sliding_attention")
    shared = config.num_kv_shared_layers
    text = f"{windows} of {sliding} sliding layers have a window in the cache (num_kv_shared_layers is {shared})"
    return Seen(FIXED if windows == sliding else PRESENT, text)
