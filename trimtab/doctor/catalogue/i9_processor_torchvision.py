"""I9: the processor of Gemma 4 needs torchvision even for text."""

from __future__ import annotations

from pathlib import Path

from trimtab.doctor.facts.bug import FIXED, NOT_APPLICABLE, PRESENT, UNKNOWN, Affected, Bug, Seen
from trimtab.doctor.facts.probe_kit import Kit, failure

BUG = Bug(
    title="AutoProcessor for Gemma 4 fails without torchvision, even if only text is wanted",
    symptom="ImportError: Gemma4VideoProcessor requires the Torchvision library but it was not found in your "
    "environment",
    trigger="AutoProcessor.from_pretrained for Gemma 4 (or another model with a video processor) where torchvision "
    "is not installed",
    cause="transformers processing_utils.py makes every part of a processor, and video processors exist for "
    "torchvision alone",
    affected=(Affected("transformers"),),
    versions="5.6.2 and 5.23.0 run without torchvision; others report it from 5.4.0 on",
    way_round="install the torchvision that belongs to your torch, or AutoTokenizer for text",
    trackers=("huggingface/transformers#43986 (open when last seen)",),
    trimtab="without torchvision it puts the processor together from its other parts; only videos are refused",
    evidence="run",
)  # fmt: skip


DEMO = Path(__file__).parents[2] / "demo" / "base"


def probe(kit: Kit) -> Seen:
    """Load the processor of the bundled Gemma 4."""
    from transformers import AutoProcessor

    if kit.has("torchvision"):
        return Seen(NOT_APPLICABLE, f"torchvision {kit.version('torchvision')} is installed")
    if not (DEMO / "processor_config.json").exists():
        return Seen(UNKNOWN, "the bundled demo model is missing")
    try:
        AutoProcessor.from_pretrained(DEMO)
    except ImportError as error:
        if "torchvision" not in str(error).lower():
            raise
        return Seen(PRESENT, failure(error))
    return Seen(FIXED, "the processor was loaded without torchvision")
