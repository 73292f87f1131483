"""Which known failure does a run show, by exception signatures and by silent faults?"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from trimtab.doctor.traces.signatures import SIGNATURES, Signature, match

PASS, UNKNOWN, NOT_APPLICABLE = "PASS", "UNKNOWN", "NOT_APPLICABLE"
REFUSED_BY_NAME = "REFUSED_BY_NAME"
OF_ENDINGS = {"timeout": "TIMEOUT", "oom-host": "OOM_HOST", "crashed": "CRASHED"}


# Labels of runs without an exception: the catalogue id and the meaning of each.
SILENT: Mapping[str, tuple[str, str]] = {
    PASS: ("", "the right answer, with the requested placement"),
    "PASS_BUT_MERGE_DROPPED_OFFLOADED": ("C2", "the merge skipped the adapters of offloaded modules"),
    "PASS_BUT_ADAPTER_HAS_NO_EFFECT": ("E1", "the model answers as the base, although the adapter is loaded"),
    "PASS_BUT_DIFFERENT_ANSWER": ("", "no error, but another answer than that of the unsplit model"),
    "PASS_BUT_TOWER_WEIGHTS_DROPPED": ("E3", "the adapter's weights for modules that its config leaves out are dropped"),
    "PASS_BUT_IMAGE_IGNORED": ("H1", "another image gives the same answer"),
    "PASS_BUT_NOT_QUANTIZED": ("A5", "quantization was requested, and no layer is quantized"),
    "PASS_BUT_MAP_KEY_IGNORED": ("C5", "a key of the map names no module"),
    "PASS_BUT_PLACEMENT_UNDONE": ("B1", "the requested offload was undone"),
    "PASS_BUT_EVERYTHING_ON_HOST": ("B2", "the second plan put the whole model on the CPU"),
    "PASS_NOT_COMPARED": ("", "no error; there was no reference to compare with"),
    "DIRECT_4BIT_MERGED_MATCHES_ADAPTER": ("", "the 4-bit merge answers as the adapter"),
    "DIRECT_4BIT_MERGED_MATCHES_BASE": ("F1", "the 4-bit merge answers as the base"),
    "DIRECT_4BIT_MERGED_MATCHES_NEITHER": ("F1", "the 4-bit merge answers neither as the adapter nor as the base"),
    "BF16_MERGED_MATCHES_BF16_ADAPTER": ("", "the bf16 merge answers as the adapter"),
    "BF16_MERGED_MATCHES_BF16_BASE": ("", "the bf16 merge answers as the base"),
    "BF16_MERGED_MATCHES_NEITHER": ("", "the bf16 merge answers neither as the adapter nor as the base"),
    REFUSED_BY_NAME: ("", "refused before loading, with the reason and a workaround"),
    NOT_APPLICABLE: ("", "the model lacks what the case needs"), "TIMEOUT": ("", "did not end in time and was killed"),
    "OOM_HOST": ("", "killed because it exceeded the host memory limit"), "CRASHED": ("", "crashed in native code"),
    UNKNOWN: ("", "no known signature matches"),
}  # fmt: skip
LABELS: tuple[str, ...] = (*dict.fromkeys(signature.label for signature in SIGNATURES), *SILENT)
_MERGE_LABELS = {"direct-4bit-merge": "DIRECT_4BIT_MERGED_MATCHES_", "fresh-bf16-merge": "BF16_MERGED_MATCHES_BF16_"}


def label_of(record: Mapping[str, Any], *, lane: str = "", adapter: str = "") -> str:
    """Return the label of a run. lane, adapter: those of its case. A partly failing run has the label of its first failure."""
    failure = record.get("exception")
    if failure is not None:
        signature = signature_of(failure, str(record.get("stage")), record.get("configuration"))
        return signature.label if signature else (REFUSED_BY_NAME if failure.get("ours") else UNKNOWN)
    if record.get("ended") in OF_ENDINGS:
        return OF_ENDINGS[record["ended"]]
    modes = record.get("modes") or {}
    if record.get("ended") != "done" or record.get("stage") != "done" or not modes:
        return UNKNOWN
    return _silent(record, list(modes.values()), lane, adapter)


def signature_of(failure: Mapping[str, Any], stage: str, configuration: Mapping[str, Any] | None = None) -> Signature | None:
    """Return the first signature that matches an exception, None for an unknown one. configuration: of its run."""
    frames = [f"{frame['file']}:{frame['function']}" for frame in failure.get("frames", ())]
    settings = json.dumps(configuration or {}, default=str)
    signature = match(failure["type"], failure["message"], frames, stage=stage, settings=settings)
    return signature.signature if signature else None


def _silent(record: Mapping[str, Any], modes: list[Mapping[str, Any]], lane: str, adapter: str) -> str:
    if lane in _MERGE_LABELS:
        return _merged(modes, lane)
    equal = [mode.get("equals_reference") for mode in modes]
    requested = record.get("configuration", {}).get("base", {}).get("quantization_config")
    counts = record.get("quantized") or {}
    if requested and not record.get("merged") and not counts.get("Linear4bit") and not counts.get("Linear8bitLt"):
        return "PASS_BUT_NOT_QUANTIZED"
    if False in equal:
        if adapter == "narrow":
            return "PASS_BUT_TOWER_WEIGHTS_DROPPED"
        if record.get("merged") and record.get("sequential_hooks"):
            return "PASS_BUT_MERGE_DROPPED_OFFLOADED"
        of_base = {mode["equals_base"] for mode in modes if mode.get("equals_base") is not None}
        if of_base == {True}:
            return "PASS_BUT_ADAPTER_HAS_NO_EFFECT"
        return "PASS_BUT_DIFFERENT_ANSWER"
    if any(mode.get("sees") is False for mode in modes):
        return "PASS_BUT_IMAGE_IGNORED"
    if record.get("map_keys_without_module"):
        return "PASS_BUT_MAP_KEY_IGNORED"
    if record.get("placement_kept") is False:
        places = set((record.get("map_after") or {}).values())
        return "PASS_BUT_EVERYTHING_ON_HOST" if places == {"cpu"} else "PASS_BUT_PLACEMENT_UNDONE"
    return "PASS_NOT_COMPARED" if all(value is None for value in equal) else PASS


def _merged(modes: list[Mapping[str, Any]], lane: str) -> str:
    """Return whose tokens the merged model generated. A prompt that matches neither decides first, then one that lost the
    adapter."""
    voices = [mode.get("matches") for mode in modes]
    head = _MERGE_LABELS[lane]
    if all(voice is None for voice in voices):
        return "PASS_NOT_COMPARED"
    if "neither" in voices:
        return head.removesuffix("BF16_") + "NEITHER" if lane == "fresh-bf16-merge" else head + "NEITHER"
    return head + ("BASE" if "base" in voices else "ADAPTER")


def lane_of(label: str, record: Mapping[str, Any], lane: str) -> str | None:
    """Return the lane's verdict, None for a case that is no lane or a run that does not test it.

    A direct 4-bit merge diverges when a prompt's tokens or its logits (beyond rounding) are not the adapter's.
    """
    equal = [mode.get("equals_reference") for mode in (record.get("modes") or {}).values()]
    if lane == "clippable":
        if label == "GEMMA4_CLIPPABLE_LINEAR_UNSUPPORTED":
            return "GEMMA4_CLIPPABLE_LINEAR_STILL_BLOCKS"
        return "GEMMA4_CLIPPABLE_LINEAR_NOW_ACCEPTED" if label.startswith("PASS") else None
    if not label.startswith(_MERGE_LABELS.get(lane, "\0")[:4]):
        return None
    right = label.endswith("_ADAPTER") and False not in equal
    if lane == "direct-4bit-merge":
        return "DIRECT_4BIT_MERGE_NOW_MATCHES" if right else "DIRECT_4BIT_MERGE_STILL_DIVERGES"
    return "FRESH_BF16_MERGE_STILL_PASSES" if right else "FRESH_BF16_MERGE_NOW_DIVERGES"


def catalogue_of(record: Mapping[str, Any]) -> str:
    """Return the catalogue id behind a record's label, "" for none."""
    failure = record.get("exception")
    signature = signature_of(failure, str(record.get("stage")), record.get("configuration")) if failure else None
    return signature.catalogue if signature else SILENT.get(str(record.get("label")), ("", ""))[0]


def meaning_of(label: str) -> str:
    """Return the meaning of a label. Errors: KeyError for an unknown label."""
    meaning = next((signature.meaning for signature in SIGNATURES if signature.label == label), None)
    return meaning if meaning is not None else SILENT[label][1]
