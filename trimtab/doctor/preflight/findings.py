"""Which known failures will occur with this map, adapter and versions?"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from packaging.version import InvalidVersion, Version

from trimtab.doctor.preflight.adapter import AdapterReading
from trimtab.doctor.preflight.device_map import OFF, MapReading
from trimtab.doctor.preflight.second_plan import SecondPlan
from trimtab.doctor.preflight.shape import ModelShape
from trimtab.doctor.preflight.unquantized import STACKED
from trimtab.doctor.traces.answer import known_bugs
from trimtab.errors import gib
from trimtab.process.files import read_sections
from trimtab.report.document import counted, some

FAILS, WRONG, WASTES, NOTE = "fails", "wrong", "wastes", "note"
SEVERITIES = (FAILS, WRONG, WASTES, NOTE)
SHOWN = 3
TEXTS = read_sections(Path(__file__).with_suffix(".ini"))


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


def is_met(bug_id: str, versions: Mapping[str, str]) -> bool:
    """Return whether these versions have the bug: none of its packages is too old or fixed.

    Missing or unreadable versions are ignored.
    """
    bug = known_bugs().get(bug_id)
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


# The rules -----------------------------------------------------------------------------------------------------------


def _foreseen(name: str, severity: str = "", **values: Any) -> Foreseen:
    """Return a finding with the texts of a section of findings.ini, filled with the values. severity: if the case decides it."""
    texts = TEXTS[name]
    title, detail = (texts[field].format(**values) for field in ("title", "detail"))
    return Foreseen(severity or texts["severity"], name.partition(" ")[0].strip("-"), texts["when"], title, detail)


def _map_keys(facts: Facts) -> Iterator[Foreseen]:
    device_map = facts.map
    for unknown in device_map.unknown:
        yield _foreseen("C5", key=unknown.key, near=f"; similar names: {', '.join(unknown.near)}" if unknown.near else "")
    for hit in device_map.collisions:
        yield _foreseen("C6", WRONG if hit.goes_to == "disk" else WASTES, hit=hit, tensors=counted(hit.tensors, "tensor"))
    if device_map.uncovered:
        tensors = counted(len(device_map.uncovered), "tensor")
        yield _foreseen("- uncovered", tensors=tensors, names=some(device_map.uncovered, SHOWN))
    if device_map.object_keys and "disk" in device_map.devices.values():
        yield _foreseen("C7", keys=some(device_map.object_keys, SHOWN))
    if "" not in device_map.devices or device_map.devices[""] in OFF:
        return
    if device_map.keys_on("disk"):
        yield _foreseen("C1")
    if device_map.keys_on("cpu"):
        off = sum(device_map.bytes_on.get(device, 0) for device in OFF)
        yield _foreseen("C4", peak=gib(sum(device_map.bytes_on.values())), more=gib(off))
        yield _foreseen("C2")


def _base(facts: Facts) -> Iterator[Foreseen]:
    device_map, kind, dtype = facts.map, facts.shape.quant, facts.shape.anatomy.dtype
    if facts.has_gpu is False and device_map.main not in OFF:
        yield _foreseen("- gpu", gpu=device_map.main)
    if kind == "none":
        return
    if set(device_map.devices) == {""} and device_map.devices[""] in OFF:
        yield _foreseen("A5", dtype=dtype)
    elif device_map.map_cost_bytes:
        away = [row for row in device_map.kept if row.reason.startswith("the map's key")]
        kept, quantized = (gib(sum(nbytes)) for nbytes in zip(*((row.bytes, row.quantized_bytes) for row in away)))
        yield _foreseen("A4", linears=counted(len(away), "linear"), kept=kept, quantized=quantized, quant=kind)
    experts = [row for row in device_map.kept if row.reason == STACKED]
    if experts:
        yield _foreseen("H3", layers=counted(len(experts), "layer"), size=gib(sum(row.bytes for row in experts)), dtype=dtype)


def _model(facts: Facts) -> Iterator[Foreseen]:
    shape, device_map = facts.shape, facts.map
    if not shape.anatomy.model_type.startswith("gemma4"):
        return
    off = {tensor for tensor, device in device_map.tensor_devices.items() if device in OFF}
    tables = [row for row in shape.anatomy.rows if row.gather_only]
    for row in shape.anatomy.rows if tables else ():
        if row.kind == "embedding" and not row.gather_only and row.part == "language" and f"{row.module_path}.weight" in off:
            yield _foreseen("D4", path=row.module_path)
    for row in tables:
        rows, nbytes = (row.weight.shape[0], row.weight.nbytes) if row.weight is not None else (1, 0)
        name = "D6 offloaded" if f"{row.module_path}.weight" in off else "D6"
        yield _foreseen(name, path=row.module_path, size=gib(nbytes), row=gib(nbytes // rows))
    patches = [path for path in device_map.quantized if path.endswith("patch_embedder.input_proj")]
    if patches:
        yield _foreseen("H1", path=patches[0])
    if any(row.part == "vision" and row.module_path in device_map.quantized for row in shape.anatomy.rows):
        yield _foreseen("H2", dtype=shape.anatomy.dtype)
    if any(path.startswith("model.audio_tower.") for path in device_map.quantized):
        yield _foreseen("D2")
    if not shape.takes_sdpa:
        yield _foreseen("D3")


def _adapter(facts: Facts) -> Iterator[Foreseen]:
    adapter = facts.adapter
    if adapter is None:
        return
    if adapter.wrappers:
        class_name = facts.shape.anatomy.by_path()[adapter.wrappers[0]].class_name
        wrappers = counted(len(adapter.wrappers), "wrapper")
        yield _foreseen("D1", wrappers=wrappers, class_name=class_name, names=some(adapter.wrappers, SHOWN))
    if adapter.problems:
        problems = counted(len(adapter.problems), "problem")
        yield _foreseen("E3 problems", problems=problems, first="; ".join(adapter.problems[:SHOWN]))
    if adapter.dropped:
        yield _foreseen("E3 dropped", modules=counted(len(adapter.dropped), "module"), names=some(adapter.dropped, SHOWN))
    if adapter.renamed:
        yield _foreseen("E3 renamed", rule=adapter.spec.prefix if adapter.spec is not None else "")
    if adapter.unfilled:
        yield _foreseen("E1", modules=counted(len(adapter.unfilled), "module"), names=some(adapter.unfilled, SHOWN))
    if adapter.no_effect:
        yield _foreseen("- no effect", tensors=counted(len(adapter.no_effect), "tensor"))


def _second(facts: Facts) -> Iterator[Foreseen]:
    second = facts.second
    if second is None or not second.runs:
        return
    yield _foreseen("B1", to_main=gib(second.moved_to_main_bytes), off=gib(second.moved_off_bytes))
    if facts.map.keys_on("disk"):
        yield _foreseen("B5")
        if facts.is_local:
            yield _foreseen("B6")
    elif second.disk_keys:
        names, modules = some(second.disk_keys, SHOWN), counted(len(second.disk_keys), "module")
        yield _foreseen("B7", modules=modules, names=names, free=gib(second.free_bytes))
        return  # with the folder it would continue to the following failures
    yield from _offloaded(facts, second)
    reader = next((layer for layer in facts.shape.anatomy.kv_layers if layer.shares is not None), None)
    if second.is_split and reader is not None:
        yield _foreseen("B4", layer=reader.shares)


def _offloaded(facts: Facts, second: SecondPlan) -> Iterator[Foreseen]:
    """Check the effect of accelerate's hooks on quantized weights that the second plan moves off the main device."""
    if second.all_on_cpu:
        yield _foreseen("B2 everything")
        return
    if not second.offloaded_quantized:
        return
    linears, names = counted(len(second.offloaded_quantized), "quantized linear"), some(second.offloaded_quantized, SHOWN)
    yield _foreseen("B2", linears=linears, free=gib(second.free_bytes), total=gib(second.total_bytes))
    four_bit = facts.shape.quant != "int8"
    if is_met("A3", facts.versions):
        yield _foreseen("A3", parameter="Params4bit" if four_bit else "Int8Params", names=names)
    elif four_bit:
        yield _foreseen("A1" if facts.shape.quant == "nf4-dq" else "A2", names=names)
