"""Which known failures will occur with this map, adapter and versions?"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from packaging.version import InvalidVersion, Version

from trimtab.doctor.catalogue import read_catalogue
from trimtab.doctor.facts.bug import Bug
from trimtab.doctor.preflight.adapter import AdapterReading
from trimtab.doctor.preflight.device_map import OFF, MapReading
from trimtab.doctor.preflight.second_plan import SecondPlan
from trimtab.doctor.preflight.shape import ModelShape
from trimtab.doctor.preflight.unquantized import STACKED
from trimtab.errors import gib
from trimtab.report.document import counted

FAILS, WRONG, WASTES, NOTE = "fails", "wrong", "wastes", "note"
SEVERITIES = (FAILS, WRONG, WASTES, NOTE)
SHOWN = 3


@dataclass(frozen=True)
class Foreseen:
    """One failure that will occur. severity: "fails" (an exception), "wrong" (a silently wrong answer), "wastes" (silently
    slower, larger or elsewhere than requested), "note". bug: the catalogue's id, "" if it is not a bug. when: the step at which
    it appears."""

    severity: str
    bug: str
    when: str
    title: str
    detail: str


@dataclass(frozen=True)
class Facts:
    """The inputs of all rules."""

    shape: ModelShape
    map: MapReading
    adapter: AdapterReading | None
    second: SecondPlan | None
    versions: Mapping[str, str]
    is_local: bool
    has_gpu: bool = True


def foresee(facts: Facts) -> tuple[Foreseen, ...]:
    """Return the expected failures, the most severe first, in the order in which they would occur."""
    findings = [*_map_keys(facts), *_base(facts), *_model(facts), *_adapter(facts), *_second(facts)]
    met = [one for one in findings if not one.bug or is_met(one.bug, facts.versions)]
    return tuple(sorted(met, key=lambda one: SEVERITIES.index(one.severity)))


# Versions -------------------------------------------------------------------------------------------------------------


def find_bug(bug_id: str) -> Bug | None:
    """Return the catalogue's entry, None if it has none of this id."""
    return next((entry.bug for entry in read_catalogue() if entry.bug.id == bug_id), None)


def is_met(bug_id: str, versions: Mapping[str, str]) -> bool:
    """Return whether these versions have the bug: none of its packages is too old or fixed.

    Missing or unreadable versions are ignored.
    """
    bug = find_bug(bug_id)
    for affected in bug.affected if bug is not None else ():
        installed = _version(versions.get(affected.package))
        since, fixed = _version(affected.since), _version(affected.fixed_in)
        if installed is not None and since is not None and installed < since:
            return False
        if installed is not None and fixed is not None and installed >= fixed:
            return False
    return True


def _version(text: str | None) -> Version | None:
    try:
        return None if text is None else Version(text)
    except InvalidVersion:
        return None


# The base -------------------------------------------------------------------------------------------------------------


def _map_keys(facts: Facts) -> Iterator[Foreseen]:
    device_map = facts.map
    for unknown in device_map.unknown:
        near = f"; similar names: {', '.join(unknown.near)}" if unknown.near else ""
        yield Foreseen(
            WASTES, "C5", "base", f"the map's key {unknown.key!r} names no module",
            f"at most a warning; the intended module goes where the other keys say{near}",
        )  # fmt: skip
    for hit in device_map.collisions:
        yield Foreseen(
            WRONG if hit.goes_to == "disk" else WASTES, "C6", "base",
            f"the map's key {hit.key!r} also takes {counted(hit.tensors, 'tensor')} of modules whose names begin with it",
            f"{hit.example} is loaded to {hit.goes_to}, the map says {hit.asked}; give every module a separate key",
        )  # fmt: skip
    if device_map.uncovered:
        yield Foreseen(
            FAILS, "", "base", "the map gives no device to a part of the model",
            f"ValueError: The device_map provided does not give any device for {counted(len(device_map.uncovered), 'tensor')}: "
            f"{_some(device_map.uncovered)}",
        )  # fmt: skip
    if device_map.object_keys and "disk" in device_map.devices.values():
        yield Foreseen(
            FAILS, "C7", "first forward", "the map holds torch.device objects next to \"disk\"",
            f"SafetensorError: device(...) is invalid; write numbers and texts instead (keys: {_some(device_map.object_keys)})",
        )  # fmt: skip
    if "" in device_map.devices and device_map.devices[""] not in OFF:
        yield from _catch_all(facts)


def _catch_all(facts: Facts) -> Iterator[Foreseen]:
    device_map = facts.map
    if device_map.keys_on("disk"):
        yield Foreseen(
            FAILS, "C1", "base", 'the map has both "" and "disk"',
            "ValueError: ... is on the meta device, we need a value to put in on ...; name every module instead of \"\"",
        )  # fmt: skip
    if device_map.keys_on("cpu"):
        off = sum(device_map.bytes_on.get(device, 0) for device in OFF)
        yield Foreseen(
            WASTES, "C4", "base", 'the map\'s "" loads every module to the main device first',
            f"the load peaks at {gib(sum(device_map.bytes_on.values()))} there, {gib(off)} more than what stays; a map that "
            "names every module does not",
        )  # fmt: skip
        yield Foreseen(
            WRONG, "C2", "merge", 'with "" in the map a merge drops the adapter of offloaded modules',
            "merge_and_unload returns without an error and without them while this map is in use; name every module",
        )  # fmt: skip


def _base(facts: Facts) -> Iterator[Foreseen]:
    device_map, kind = facts.map, facts.shape.quant
    if facts.has_gpu is False and device_map.main not in OFF:
        yield Foreseen(
            FAILS, "", "base", f"the map names GPU {device_map.main}, and torch can use no GPU here",
            "without a map the model goes to the CPU; trimtab computes there too",
        )  # fmt: skip
    if kind == "none":
        return
    if set(device_map.devices) == {""} and device_map.devices[""] in OFF:
        yield Foreseen(
            WASTES, "A5", "base", "nothing is quantized: the whole model is on the CPU",
            f"the key \"\" keeps every linear in {facts.shape.anatomy.dtype}, and is_loaded_in_4bit still says True",
        )  # fmt: skip
    elif device_map.map_cost_bytes:
        away = [row for row in device_map.kept if row.reason.startswith("the map's key")]
        yield Foreseen(
            WASTES, "A4", "base", f"{counted(len(away), 'linear')} on the CPU or disk stay unquantized",
            f"{gib(sum(row.bytes for row in away))} of host memory and of copies at every forward instead of "
            f"{gib(sum(row.quantized_bytes for row in away))} in {kind}; needs llm_int8_enable_fp32_cpu_offload=True",
        )  # fmt: skip
    experts = [row for row in device_map.kept if row.reason == STACKED]
    if experts:
        yield Foreseen(
            WASTES, "H3", "base", f"the experts of {counted(len(experts), 'layer')} stay unquantized",
            f"{gib(sum(row.bytes for row in experts))} in {facts.shape.anatomy.dtype}",
        )  # fmt: skip


# The model ------------------------------------------------------------------------------------------------------------


def _model(facts: Facts) -> Iterator[Foreseen]:
    shape, device_map = facts.shape, facts.map
    if not shape.anatomy.model_type.startswith("gemma4"):
        return
    tables = [row for row in shape.anatomy.rows if row.gather_only]
    for row in shape.anatomy.rows:
        off = device_map.tensor_devices.get(f"{row.module_path}.weight", "") in OFF
        if off and tables and row.kind == "embedding" and not row.gather_only and row.part == "language":
            yield Foreseen(
                FAILS, "D4", "first forward", f"{row.module_path} is offloaded",
                "RuntimeError: Tensor on device meta is not on the expected device, also for text alone: "
                "Gemma4Model.forward reads its weight outside the module; keep it on the main device",
            )  # fmt: skip
    for row in tables:
        size = row.weight.nbytes if row.weight is not None else 0
        off = device_map.tensor_devices.get(f"{row.module_path}.weight", "") in OFF
        detail = (
            f"accelerate copies all {gib(size)} to the main device at every forward" if off
            else f"{gib(size)} on the main device, of which one token reads {gib(_row_bytes(row.weight))}"
        )  # fmt: skip
        yield Foreseen(WASTES if off else NOTE, "D6", "first forward", f"{row.module_path} is never quantized", detail)
    patches = [path for path in device_map.quantized if path.endswith("patch_embedder.input_proj")]
    if patches:
        yield Foreseen(
            WRONG, "H1", "first forward", "the quantized model ignores the image",
            f"{patches[0]} casts pixels to the dtype of packed weights: one constant value",
        )  # fmt: skip
    if any(row.part == "vision" and row.module_path in device_map.quantized for row in shape.anatomy.rows):
        yield Foreseen(
            NOTE, "H2", "first forward", "the quantized vision tower computes in float32 on float32 pixels",
            f"slower; give pixel_values in {shape.anatomy.dtype}",
        )  # fmt: skip
    if any(path.startswith("model.audio_tower.") for path in device_map.quantized):
        yield Foreseen(
            FAILS, "D2", "first forward", "a quantized audio tower raises on audio",
            "TypeError: torch.finfo() requires a floating point input type",
        )  # fmt: skip
    if not shape.takes_sdpa:
        yield Foreseen(
            NOTE, "D3", "base", 'attn_implementation="sdpa" is refused for the whole model',
            "omit it: text and vision use sdpa by default, audio uses eager",
        )  # fmt: skip


def _row_bytes(weight: object) -> int:
    shape, nbytes = getattr(weight, "shape", (1,)), getattr(weight, "nbytes", 0)
    return int(nbytes // shape[0])


# The adapter ----------------------------------------------------------------------------------------------------------


def _adapter(facts: Facts) -> Iterator[Foreseen]:
    adapter = facts.adapter
    if adapter is None:
        return
    if adapter.wrappers:
        rows = facts.shape.anatomy.by_path()
        name = rows[adapter.wrappers[0]].class_name
        yield Foreseen(
            FAILS, "D1", "adapter", f"target_modules names {counted(len(adapter.wrappers), 'wrapper')} ({name})",
            f"ValueError: Target module {name}(...) is not supported; name the inner .linear in a copy of the config "
            f"({_some(adapter.wrappers)})",
        )  # fmt: skip
    if adapter.problems:
        yield Foreseen(
            WRONG, "E3", "adapter", f"{counted(len(adapter.problems), 'problem')}: the adapter is not made for this model",
            f"PEFT silently drops keys that match no module. {'; '.join(adapter.problems[:SHOWN])}",
        )  # fmt: skip
    if adapter.dropped:
        yield Foreseen(
            WRONG, "E3", "adapter", f"{counted(len(adapter.dropped), 'module')} of the adapter are dropped silently",
            f"target_modules does not name {_some(adapter.dropped)}",
        )  # fmt: skip
    if adapter.renamed:
        yield Foreseen(
            WRONG, "E3", "adapter", "the file writes module paths differently than the model",
            "PEFT uses keys unchanged; trimtab applies the rule "
            f"{adapter.spec.prefix if adapter.spec is not None else ''!r}",
        )  # fmt: skip
    if adapter.unfilled:
        yield Foreseen(
            WRONG, "E1", "adapter", f"{counted(len(adapter.unfilled), 'module')} get a LoRA layer that stays at zero",
            f"one warning; the file has no keys for {_some(adapter.unfilled)}",
        )  # fmt: skip
    if adapter.no_effect:
        yield Foreseen(
            NOTE, "", "adapter", f"{counted(len(adapter.no_effect), 'tensor')} have no effect",
            "they are for k/v projections of KV-shared layers, which the model does not have",
        )  # fmt: skip


# PEFT's second plan ---------------------------------------------------------------------------------------------------


def _second(facts: Facts) -> Iterator[Foreseen]:
    second, device_map = facts.second, facts.map
    if second is None or not second.runs:
        return
    yield Foreseen(
        WASTES, "B1", "adapter", "PEFT discards the map and plans again",
        f"{gib(second.moved_to_main_bytes)} that the map keeps off the main device would go there, "
        f"{gib(second.moved_off_bytes)} the other way",
    )  # fmt: skip
    if device_map.keys_on("disk"):
        yield Foreseen(
            FAILS, "B5", "adapter", "an adapter on a base with modules on disk",
            "NotImplementedError: Cannot copy out of meta tensor, or KeyError in _update_offload on older PEFT",
        )  # fmt: skip
        if facts.is_local:
            yield Foreseen(
                WASTES, "B6", "adapter", "PEFT writes a copy of the checkpoint below the current folder",
                "the path of the original without its root is joined to the working directory",
            )  # fmt: skip
    elif second.disk_keys:
        yield Foreseen(
            FAILS, "B7", "adapter", f"the second plan puts {counted(len(second.disk_keys), 'module')} on disk without a folder",
            f"ValueError: We need an `offload_dir` to dispatch this model ({_some(second.disk_keys)}): {gib(second.free_bytes)} "
            "seem free on the GPU, and the host has no room for the rest",
        )  # fmt: skip
        return  # with the folder it would continue to the following failures
    yield from _offloaded(facts, second)
    reader = next((layer for layer in facts.shape.anatomy.kv_layers if layer.shares is not None), None)
    if second.is_split and reader is not None:
        yield Foreseen(
            FAILS, "B4", "first forward", "layers that share keys and values get copies of the dictionary",
            f"KeyError: {reader.shares} (from transformers 5.8 on: of a layer type) in shared_kv_states: PEFT dispatches "
            "without skip_keys",
        )  # fmt: skip


def _offloaded(facts: Facts, second: SecondPlan) -> Iterator[Foreseen]:
    """Check the effect of accelerate's hooks on quantized weights that the second plan moves off the main device."""
    if second.all_on_cpu:
        yield Foreseen(
            FAILS, "B2", "first forward", "the second plan puts the whole model on the CPU",
            "Expected all tensors to be on the same device, when inputs are on the GPU; otherwise the CPU computes",
        )  # fmt: skip
        return
    count = len(second.offloaded_quantized)
    if not count:
        return
    yield Foreseen(
        WASTES, "B2", "adapter", f"the second plan offloads {counted(count, 'quantized linear')}",
        f"it counts the memory of the loaded base as unavailable: {gib(second.free_bytes)} seem free for a model of "
        f"{gib(second.total_bytes)}",
    )  # fmt: skip
    four_bit = facts.shape.quant != "int8"
    names = _some(second.offloaded_quantized)
    if is_met("A3", facts.versions):
        kind = "Params4bit" if four_bit else "Int8Params"
        yield Foreseen(
            FAILS, "A3", "adapter", "accelerate cannot move a quantized weight that transformers has marked",
            f"TypeError: {kind}.__new__() got an unexpected keyword argument '_is_hf_initialized' ({names})",
        )  # fmt: skip
    elif facts.shape.quant == "nf4-dq":
        yield Foreseen(
            FAILS, "A1", "adapter", "the scales of offloaded 4-bit weights are moved to the meta device",
            f"RuntimeError: Tensor.item() cannot be called on meta tensors ({names}); or, where it loads, A2",
        )  # fmt: skip
    elif four_bit:
        yield Foreseen(
            FAILS, "A2", "first forward", "the scales of offloaded 4-bit weights are moved to the meta device",
            f"NotImplementedError: Cannot copy out of meta tensor; no data! ({names})",
        )  # fmt: skip


def _some(names: tuple[str, ...]) -> str:
    return ", ".join(names[:SHOWN]) + (f" and {len(names) - SHOWN} more" if len(names) > SHOWN else "")
