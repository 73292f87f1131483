"""D3: newer releases refuse attn_implementation="sdpa" for Gemma 4 with audio."""

from __future__ import annotations

from trimtab.doctor.facts.bug import FIXED, PRESENT, Affected, Bug, Seen
from trimtab.doctor.facts.probe_kit import Kit, failure

BUG = Bug(
    title="attn_implementation=\"sdpa\" is refused for Gemma 4 with audio",
    symptom="ValueError: Gemma4AudioModel does not support an attention implementation through "
    "torch.nn.functional.scaled_dot_product_attention yet",
    trigger="from_pretrained with the text \"sdpa\" for a Gemma 4 that has an audio tower; scripts that worked on "
    "older releases break",
    cause="the audio model has _supports_sdpa = False, and transformers modeling_utils.py applies a plain text to "
    "every sub-model",
    affected=(Affected("transformers", since="5.20.0"),),
    versions="accepted in 5.6.2, refused in 5.23.0 (both run); the flag is in 5.20.0, 5.21.0 and 5.22.2 and not in "
    "5.19.0 (read in the wheels)",
    way_round="leave attn_implementation out (sdpa for text and vision, eager for audio), or give a value for each "
    "part: {\"\": \"sdpa\", \"audio_config\": \"eager\"}",
    trimtab="it passes no attention implementation",
    evidence="run",
)  # fmt: skip


def probe(kit: Kit) -> Seen:
    """Load a Gemma 4 with an audio tower and the text "sdpa"."""
    try:
        kit.load(kit.checkpoint(), attn_implementation="sdpa")
    except ValueError as error:
        if "does not support an attention implementation" not in str(error):
            raise
        return Seen(PRESENT, failure(error))
    return Seen(FIXED, 'attn_implementation="sdpa" was accepted')
