"""H6: a Qwen-VL model keeps state of the last request."""

from __future__ import annotations

from typing import Any

from trimtab.doctor.facts.bug import FIXED, PRESENT, Affected, Bug, Seen
from trimtab.doctor.facts.probe_kit import Kit

BUG = Bug(
    title="Qwen-VL keeps position offsets of the last request on the model",
    symptom="silent: model.rope_deltas holds the offsets of the last image, and a call with inputs_embeds alone "
    "gives other logits after a request with an image than before. With input_ids they are computed again",
    trigger="Qwen2-VL, Qwen2.5-VL, Qwen3-VL: a server or a test that uses one model for several requests",
    cause="transformers modeling_qwen2_5_vl.py compute_3d_position_ids keeps rope_deltas as an attribute and uses it "
    "whenever input_ids is None",
    affected=(Affected("transformers"),),
    versions="5.6.2 and 5.23.0 run with Qwen2.5-VL; new generations were fixed before 5.6.2",
    way_round="set model.model.rope_deltas = None between requests",
    trackers=("huggingface/transformers#43952 (generation, merged)", "huggingface/transformers#36013 (merged)"),
    trimtab="the attribute is reset before every request",
    evidence="run",
)  # fmt: skip


def probe(kit: Kit) -> Seen:
    """Run the same embedded text before and after a request with an image."""
    import torch

    model = kit.load(kit.checkpoint("qwen2_5_vl"))
    with torch.no_grad():
        embedded = model.get_input_embeddings()(kit.inputs(model)["input_ids"])
        before = model(inputs_embeds=embedded).logits
        model(**kit.inputs(model, "image"))
        change = float((model(inputs_embeds=embedded).logits - before).abs().max())
    kept: Any = getattr(model.model, "rope_deltas", None)
    if change:
        return Seen(PRESENT, f"the same text differs by up to {change:.3f} after an image; rope_deltas is {kept.tolist()}")
    return Seen(FIXED, "the same text has the same logits before and after an image")
