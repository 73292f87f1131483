"""I10: a merge into quantized layers adds the bias of an adapter unscaled."""

from __future__ import annotations

from trimtab.doctor.facts.bug import FIXED, PRESENT, Affected, Bug, Seen
from trimtab.doctor.facts.probe_kit import Kit

BUG = Bug(
    title="Merging an adapter with lora_bias into a bitsandbytes base adds the bias without its scale",
    symptom="silent: the merged bias is off by the factor lora_alpha / r; unmerging hides it, because it forgets the "
    "same factor",
    trigger="an adapter with lora_bias=True merged into a 4-bit or 8-bit base with biases",
    cause="PEFT lora/bnb.py merge adds lora_B.bias; lora/layer.py and the forward pass multiply it by the scale",
    affected=(Affected("peft"), Affected("bitsandbytes")),
    versions="peft 0.19.1 and 0.21.2 run, 4-bit and 8-bit",
    way_round="merge in full precision",
    owner=("peft",),
    trackers=("huggingface/peft#3741 (open when last seen)", "huggingface/peft#3757 (pull request, open)"),
    trimtab="an adapter is never merged into quantized weights; its bias is scaled as PEFT's forward "
    "pass does",
    evidence="run",
)  # fmt: skip


def probe(kit: Kit) -> Seen:
    """Merge an adapter with bias 1 and scale 2, and check the resulting bias."""
    import torch

    path = kit.checkpoint("llama", attention_bias=True)
    adapter = kit.adapter(path, targets=["q_proj"], lora_bias=True)
    added = {}
    for quant in ("none", "nf4"):
        model = kit.peft(kit.load(path, quant=quant, device_map={"": 0}), adapter)
        layer = model.base_model.model.model.layers[0].self_attn.q_proj
        with torch.no_grad():
            layer.lora_B["default"].bias.fill_(1.0)
        before = layer.base_layer.bias.detach().clone()
        layer.merge()
        added[quant] = float((layer.base_layer.bias - before).float().mean())
    # bfloat16 biases near 1 are rounded to 1/128.
    state = PRESENT if abs(added["nf4"] - added["none"]) > 0.1 else FIXED
    return Seen(state, f"a bias of 1 with scale 2 adds {added['none']:.1f} to a plain layer and {added['nf4']:.1f} to a 4-bit one")
