"""Which known failure a run is: signatures of exceptions and of silent faults, as data. Pure.

A signature matches on what it names: exception type, message, a frame, the stage. A failure that no signature knows is
UNKNOWN, never the nearest one. What ended without an exception is judged by facts of the record: nothing quantized
first (another arithmetic altogether), then a wrong answer, an ignored picture or key, and last the placement.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

PASS, UNKNOWN, NOT_APPLICABLE = "PASS", "UNKNOWN", "NOT_APPLICABLE"
REFUSED_BY_NAME = "REFUSED_BY_NAME"
OF_ENDINGS = {"timeout": "TIMEOUT", "oom-host": "OOM_HOST", "crashed": "CRASHED"}


@dataclass(frozen=True)
class Signature:
    """One failure. label: its name. catalogue: its id, "" for what is no bug. owner: whose it is.

    type: the exception's class name. message: searched for. frame: searched for in "file:function" of every frame, ""
    matches any. stages: where it shows, () is anywhere. meaning: one line for people.
    """

    label: str
    type: str
    message: str
    frame: str
    stages: tuple[str, ...]
    catalogue: str
    owner: str
    meaning: str


_LOADING = ("base", "adapter")
_RUNNING = ("first forward", "generate")

SIGNATURES: tuple[Signature, ...] = (
    Signature(
        "FAIL_BNB_PARAM_CONSTRUCTOR", "TypeError",
        r"(Params4bit|Int8Params|Parameter)\.__new__\(\) got an unexpected keyword argument '_is_hf_initialized'",
        "", (), "A3", "accelerate", "accelerate rebuilds a quantized weight with an attribute it does not take",
    ),
    Signature(
        "FAIL_QUANT_STATE_META_ITEM", "RuntimeError", r"Tensor\.item\(\) cannot be called on meta tensors",
        r"bitsandbytes/functional\.py:as_dict", (), "A1", "bitsandbytes",
        "the scales of an offloaded 4-bit weight are gone when its state is asked for",
    ),
    Signature(
        "FAIL_QUANT_STATE_META_COPY", "NotImplementedError", r"Cannot copy out of meta tensor; no data",
        r"bitsandbytes/functional\.py:to", (), "A2", "bitsandbytes",
        "an offloaded 4-bit weight comes back without its scales",
    ),
    Signature(
        "FAIL_QUANT_STATE_META_USE", "RuntimeError", r"(on device meta|meta is not on the expected device)",
        r"bitsandbytes/", (), "A2", "bitsandbytes", "a 4-bit weight is used although its scales are gone",
    ),
    Signature(
        "FAIL_INT8_SCALES_LOST", "(AttributeError|TypeError|RuntimeError)", r"SCB|'NoneType' object has no attribute '(to|device)'",
        r"bitsandbytes/|accelerate/hooks", (), "A7", "accelerate", "an 8-bit weight comes back without its scales",
    ),
    Signature(
        "FAIL_DISPATCH_OF_DISK_WEIGHTS", "NotImplementedError", r"Cannot copy out of meta tensor; no data",
        r"accelerate/big_modeling\.py:(dispatch_model|to)|torch/nn/modules/module\.py:to|peft/peft_model\.py", _LOADING,
        "B5", "peft", "PEFT plans one device and moves weights that are on disk",
    ),
    Signature(
        "FAIL_DISK_OFFLOAD_INDEX", "KeyError", r"base_model\.model\.", r"peft/peft_model\.py:_update_offload", _LOADING,
        "B5", "peft", "PEFT joins the names of a disk-offloaded base wrongly",
    ),
    Signature(
        "FAIL_DEVICE_MAP_KEYS", "ValueError", r"device_map provided does not give any device .*base_model\.model",
        r"accelerate/", _LOADING, "B3", "peft", "PEFT's map needs the names of the wrapped model",
    ),
    Signature(
        "FAIL_DEVICE_MAP_LAYER_SCALAR", "ValueError", r"device_map provided does not give any device .*layer_scalar",
        r"accelerate/", _LOADING, "C8", "accelerate", "an inferred map leaves out Gemma 4's layer_scalar",
    ),
    Signature(
        "FAIL_SHARED_KV_KEYERROR", "KeyError", r"^(\d+|'?(sliding|full)_attention'?)$",
        r"transformers/models/gemma\w+/modeling_gemma\w+\.py:forward", _RUNNING, "B4", "transformers",
        "accelerate hands the layers copies of the shared key/value states",
    ),
    Signature(
        "FAIL_OFFLOAD_DIR_NEEDED", "ValueError", r"We need an `offload_dir` to dispatch", "", _LOADING, "B7", "peft",
        "PEFT's plan puts something on disk and was given no folder",
    ),
    Signature(
        "FAIL_OFFLOAD_FLAG_NEEDED", "ValueError", r"Some modules are dispatched on the CPU or the disk", r"transformers/",
        _LOADING, "A4", "transformers", "a map with the CPU needs llm_int8_enable_fp32_cpu_offload",
    ),
    Signature(
        "FAIL_LORA_ON_WRONG_DEVICE", "RuntimeError", r"(Expected all tensors to be on the same device|is on cuda)",
        r"peft/tuners/lora/", _RUNNING, "B8", "peft", "LoRA weights and their layer are on different devices",
    ),
    Signature(
        "FAIL_INPUTS_ON_WRONG_DEVICE", "RuntimeError",
        r"Expected all tensors to be on the same device.*(index is on|argument index)", "", _RUNNING, "B2", "peft",
        "the re-plan put the model on the CPU; the inputs are on the GPU",
    ),
    Signature(
        "FAIL_CROSS_DEVICE", "RuntimeError", r"Expected all tensors to be on the same device",
        r"transformers/", _RUNNING, "D5", "transformers", "tensors of one layer are on different devices",
    ),
    Signature(
        "FAIL_CATCH_ALL_DISK", "ValueError", r"is on the meta device, we need a `?value`? to put in on", r"accelerate/",
        _LOADING, "C1", "accelerate", "a catch-all entry places what another entry left on disk",
    ),
    Signature(
        "FAIL_SAVE_SEQUENTIAL_HOOK", "AttributeError", r"'SequentialHook' object has no attribute 'weights_map'", "", (),
        "C3", "transformers", "saving does not know the hooks that a catch-all entry leaves",
    ),
    Signature(
        "FAIL_DEVICE_OBJECT_ON_DISK", "SafetensorError", r"device .* is invalid", "", (), "C7", "accelerate",
        "a map with torch.device objects and something on disk",
    ),
    Signature(
        "GEMMA4_CLIPPABLE_LINEAR_UNSUPPORTED", "ValueError", r"Target module Gemma4ClippableLinear\(", r"peft/",
        ("adapter",), "D1", "peft", "the adapter's target is a wrapper whose inner Linear is meant",
    ),
    Signature(
        "FAIL_AUDIO_FINFO", "TypeError", r"torch\.finfo\(\) requires a floating point input type", r"transformers/",
        _RUNNING, "D2", "transformers", "a quantized audio tower asks for the limits of its integer weights",
    ),
    Signature(
        "FAIL_SDPA_AUDIO", "ValueError",
        r"does not support an attention implementation through torch\.nn\.functional\.scaled_dot_product_attention",
        r"transformers/", ("base",), "D3", "transformers", "one attention name is forced on a tower that cannot do it",
    ),
    Signature(
        "FAIL_EMBED_TOKENS_META", "RuntimeError", r"Tensor on device meta is not on the expected device",
        r"transformers/models/gemma", _RUNNING, "D4", "transformers",
        "the model reads the embedding's weight outside its module",
    ),
    Signature(
        "FAIL_DEQUANTIZED_UNDER_LORA", "AttributeError", r"'Parameter' object has no attribute 'quant_state'", "", (),
        "F2", "peft", "the base was dequantized under the adapter's 4-bit layers",
    ),
    Signature(
        "FAIL_SAFE_MERGE_BIAS", "RuntimeError", r"Boolean value of Tensor with more than one value is ambiguous",
        r"peft/tuners/lora/bnb\.py", ("merge",), "F5", "peft", "safe_merge tests a bias as one truth value",
    ),
    Signature(
        "FAIL_SKIP_LIST_TIED", "AssertionError", r"", r"bitsandbytes/", (), "H4", "transformers",
        "a skip list replaced the default one and the tied head was quantized",
    ),
    Signature(
        "FAIL_TORCHAO_LORA", "TypeError", r"Int4Tensor|get_apply_tensor_subclass", r"peft/tuners/lora/torchao", (), "F3",
        "peft", "LoRA on torchao works for int8 alone",
    ),
    Signature(
        "FAIL_PREQUANTIZED_EXPERTS", "RuntimeError", r"size mismatch|mismatched sizes", r"transformers/", ("base",), "H5",
        "transformers", "per-expert 4-bit files of an older release",
    ),
    Signature("OOM_GPU", "OutOfMemoryError", r"", "", (), "", "", "the GPU's memory ran out"),
    Signature(
        "OOM_GPU", "RuntimeError", r"CUDA (error: )?out of memory|CUBLAS_STATUS_ALLOC_FAILED", "", (), "", "",
        "the GPU's memory ran out",
    ),
)  # fmt: skip

# What a run that ended without an exception can be; the catalogue id of each, and what it means.
SILENT: Mapping[str, tuple[str, str]] = {
    PASS: ("", "the right answer, everything where it was asked to be"),
    "PASS_BUT_MERGE_DROPPED_OFFLOADED": ("C2", "the merge left out the adapters of offloaded modules"),
    "PASS_BUT_ADAPTER_HAS_NO_EFFECT": ("E1", "with the adapter it answers as the base does"),
    "PASS_BUT_DIFFERENT_ANSWER": ("", "it answers, and not what the unsplit model answers"),
    "PASS_BUT_TOWER_WEIGHTS_DROPPED": (
        "E3",
        "the adapter's weights for modules that its config leaves out are dropped",
    ),
    "PASS_BUT_IMAGE_IGNORED": ("H1", "another picture gives the same answer"),
    "PASS_BUT_NOT_QUANTIZED": ("A5", "a quantization was asked and no layer has one"),
    "PASS_BUT_MAP_KEY_IGNORED": ("C5", "a key of the map names no module"),
    "PASS_BUT_PLACEMENT_UNDONE": ("B1", "the offload that was asked for is gone"),
    "PASS_BUT_EVERYTHING_ON_HOST": ("B2", "the re-plan put the whole model on the CPU"),
    "PASS_NOT_COMPARED": ("", "it answers; there was no reference to compare with"),
    "DIRECT_4BIT_MERGED_MATCHES_ADAPTER": ("", "the 4-bit merge says what the adapter said"),
    "DIRECT_4BIT_MERGED_MATCHES_BASE": ("F1", "the 4-bit merge says what the base said"),
    "DIRECT_4BIT_MERGED_MATCHES_NEITHER": (
        "F1",
        "the 4-bit merge says neither what the adapter nor what the base said",
    ),
    "BF16_MERGED_MATCHES_BF16_ADAPTER": ("", "the bf16 merge says what the adapter said"),
    "BF16_MERGED_MATCHES_BF16_BASE": ("", "the bf16 merge says what the base said"),
    "BF16_MERGED_MATCHES_NEITHER": ("", "the bf16 merge says neither what the adapter nor what the base said"),
    REFUSED_BY_NAME: ("", "refused before any harm, with the reason and the way round"),
    NOT_APPLICABLE: ("", "the model has not what the case is about"),
    "TIMEOUT": ("", "did not end in time and was killed"),
    "OOM_HOST": ("", "killed for its host memory"),
    "CRASHED": ("", "ended inside native code"),
    UNKNOWN: ("", "no signature knows it"),
}
LABELS: tuple[str, ...] = (*dict.fromkeys(signature.label for signature in SIGNATURES), *SILENT)
_MERGE_LABELS = {"direct-4bit-merge": "DIRECT_4BIT_MERGED_MATCHES_", "fresh-bf16-merge": "BF16_MERGED_MATCHES_BF16_"}


def label_of(record: Mapping[str, Any], *, lane: str = "", adapter: str = "") -> str:
    """Return the label of a run. lane, adapter: those of its case. A partly failing run has its first failure's."""
    failure = record.get("exception")
    if failure is not None:
        found = signature_of(failure, str(record.get("stage")))
        return found.label if found else (REFUSED_BY_NAME if failure.get("ours") else UNKNOWN)
    if record.get("ended") in OF_ENDINGS:
        return OF_ENDINGS[record["ended"]]
    modes = record.get("modes") or {}
    if record.get("ended") != "done" or record.get("stage") != "done" or not modes:
        return UNKNOWN
    return _silent(record, list(modes.values()), lane, adapter)


def signature_of(failure: Mapping[str, Any], stage: str) -> Signature | None:
    """Return the first signature that an exception has, None for an unknown one."""
    frames = [f"{frame['file']}:{frame['function']}" for frame in failure.get("frames", ())]
    for signature in SIGNATURES:
        if (
            re.fullmatch(signature.type, failure["type"])
            and re.search(signature.message, failure["message"], re.DOTALL)
            and (not signature.frame or any(re.search(signature.frame, frame) for frame in frames))
            and (not signature.stages or stage in signature.stages)
        ):
            return signature
    return None


def _silent(record: Mapping[str, Any], modes: list[Mapping[str, Any]], lane: str, adapter: str) -> str:
    if lane in _MERGE_LABELS:
        return _merged(modes, lane)
    equal = [mode.get("equals_reference") for mode in modes]
    asked = record.get("configuration", {}).get("base", {}).get("quantization_config")
    counts = record.get("quantized") or {}
    if asked and not record.get("merged") and not counts.get("Linear4bit") and not counts.get("Linear8bitLt"):
        return "PASS_BUT_NOT_QUANTIZED"
    if False in equal:
        if adapter == "narrow":
            return "PASS_BUT_TOWER_WEIGHTS_DROPPED"
        if record.get("merged") and record.get("sequential_hooks"):
            return "PASS_BUT_MERGE_DROPPED_OFFLOADED"
        if all(mode.get("equals_base") for mode in modes if mode.get("equals_base") is not None) and any(
            mode.get("equals_base") for mode in modes
        ):
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
    """Return whose tokens the merged model generated: any prompt that matches neither decides, then one that lost it."""
    voices = [mode.get("matches") for mode in modes]
    head = _MERGE_LABELS[lane]
    if all(voice is None for voice in voices):
        return "PASS_NOT_COMPARED"
    if "neither" in voices:
        return head.removesuffix("BF16_") + "NEITHER" if lane == "fresh-bf16-merge" else head + "NEITHER"
    return head + ("BASE" if "base" in voices else "ADAPTER")


def lane_of(label: str, record: Mapping[str, Any], lane: str) -> str | None:
    """Return the lane's verdict, None for a case that is no lane or a run that says nothing about it.

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
    found = signature_of(failure, str(record.get("stage"))) if failure else None
    return found.catalogue if found else SILENT.get(str(record.get("label")), ("", ""))[0]


def meaning_of(label: str) -> str:
    """Return a label in words. Errors: KeyError for what is no label."""
    found = next((signature.meaning for signature in SIGNATURES if signature.label == label), None)
    return found if found is not None else SILENT[label][1]
