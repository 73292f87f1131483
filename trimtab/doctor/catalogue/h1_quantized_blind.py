"""H1: a quantized Gemma 4 ignores images in older releases."""

from __future__ import annotations

from trimtab.doctor.facts.bug import FIXED, PRESENT, Affected, Bug, Seen
from trimtab.doctor.facts.probe_kit import Kit

BUG = Bug(
    title="A 4-bit or 8-bit Gemma 4 ignores the image",
    symptom="silent: halving every pixel changes no logit",
    trigger="images given to a Gemma 4 whose vision tower is quantized by bitsandbytes",
    cause="transformers modeling_gemma4.py Gemma4VisionPatchEmbedder.forward casts pixels to "
    "input_proj.weight.dtype, which is uint8 or int8 for a packed weight",
    affected=(Affected("transformers", fixed_in="5.13.0"), Affected("bitsandbytes")),
    versions="5.6.2 run, images ignored in 4-bit and 8-bit; 5.23.0 run, images used; the cast is still in 5.9.0 and no longer in "
    "5.13.0 (read in the wheels)",
    way_round="a newer transformers, or llm_int8_skip_modules with patch_embedder.input_proj and the head (H4)",
    owner=("transformers",),
    trackers=(
        "huggingface/transformers#46932 (closed)",
        "huggingface/transformers#46933 (merged)",
        "huggingface/transformers#46904 (the same in gemma4_unified, merged)",
    ),
    trimtab="its quantized layers report the computing dtype, so pixels are never cast to integers",
    evidence="run",
)  # fmt: skip


def probe(kit: Kit) -> Seen:
    """Run a 4-bit Gemma 4 with an image, and with the same image at half brightness."""
    import torch

    model = kit.load(kit.checkpoint(), quant="nf4", device_map={"": 0})
    inputs = kit.inputs(model, "image")
    with torch.no_grad():
        bright = model(**inputs).logits
        dark = model(**inputs | {"pixel_values": inputs["pixel_values"] / 2}).logits
    change = float((bright - dark).abs().max())
    return Seen(FIXED if change else PRESENT, f"half the brightness changes the logits of a 4-bit model by up to {change:.2f}")
