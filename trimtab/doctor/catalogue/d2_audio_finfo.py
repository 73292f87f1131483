"""D2: a quantized Gemma 4 fails on audio in older releases."""

from __future__ import annotations

from trimtab.doctor.facts.bug import FIXED, PRESENT, Affected, Bug, Seen
from trimtab.doctor.facts.probe_kit import Kit, failure

BUG = Bug(
    title="A 4-bit or 8-bit Gemma 4 fails on any audio: \"torch.finfo() requires a floating point input type\"",
    symptom="TypeError: torch.finfo() requires a floating point input type. Use torch.iinfo to handle ...",
    trigger="audio given to a Gemma 4 whose audio tower is quantized by bitsandbytes",
    cause="transformers models/gemma4/modeling_gemma4.py clips to torch.finfo(self.ffw_layer_1.linear.weight.dtype), "
    "and the dtype of a packed weight is uint8 or int8",
    affected=(Affected("transformers", fixed_in="5.11.0"), Affected("bitsandbytes")),
    versions="fails in 5.6.2 (run) and in 5.5.4 to 5.9.0 (read in the released wheels); gone in 5.11.0 at the "
    "latest; 5.23.0 run",
    way_round="transformers 5.11.0 or newer, or llm_int8_skip_modules with the audio tower and the head (H4)",
    owner=("transformers",),
    trackers=("huggingface/transformers#45672 (closed)",),
    trimtab="its quantized layers report the computing dtype, so audio works with all supported releases",
    evidence="run",
)  # fmt: skip


def probe(kit: Kit) -> Seen:
    """Run a 4-bit Gemma 4 with an audio clip."""
    try:
        kit.forward(kit.load(kit.checkpoint(), quant="nf4", device_map={"": 0}), "audio")
    except TypeError as error:
        if "torch.finfo()" not in str(error):
            raise
        return Seen(PRESENT, failure(error))
    return Seen(FIXED, "a 4-bit Gemma 4 processed audio")
