"""H2: the vision tower of a quantized Gemma 4 computes in float32."""

from __future__ import annotations

from typing import Any

from trimtab.doctor.facts.bug import FIXED, PRESENT, Affected, Bug, Seen
from trimtab.doctor.facts.probe_kit import Kit

BUG = Bug(
    title="The vision tower of a quantized Gemma 4 runs in float32",
    symptom="silent and slow: hidden states of the tower are float32, twice the memory of bfloat16",
    trigger="a Gemma 4 quantized by bitsandbytes, and pixels as the image processor gives them (float32)",
    cause="since the fix of H1, transformers modeling_gemma4.py casts pixels only to a floating dtype, and "
    "Linear4bit gives back the dtype it was given",
    affected=(Affected("transformers", since="5.13.0"), Affected("bitsandbytes")),
    versions="5.23.0 run, 4-bit and 8-bit; not in 5.6.2, where H1 hides it; it came with the fix of H1, in 5.13.0 "
    "at the latest",
    way_round="pass pixel_values.to(torch.bfloat16)",
    owner=("transformers",),
    trackers=("huggingface/transformers#46933 (the change that introduced it, merged)",),
    trimtab="its quantized layers report the computing dtype, so the tower runs in that",
    evidence="run",
)  # fmt: skip


def probe(kit: Kit) -> Seen:
    """Check the dtype of the input to the first layer of a 4-bit vision tower."""
    model = kit.load(kit.checkpoint(), quant="nf4", device_map={"": 0})
    dtypes = []

    def look(module: Any, args: Any, kwargs: Any) -> None:
        dtypes.append((args[0] if args else kwargs["hidden_states"]).dtype)

    model.model.vision_tower.encoder.layers[0].register_forward_pre_hook(look, with_kwargs=True)
    kit.forward(model, "image")
    state = PRESENT if str(dtypes[0]) == "torch.float32" else FIXED
    return Seen(state, f"hidden states of the tower are {dtypes[0]} in a model that computes in bfloat16")
