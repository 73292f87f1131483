"""What will the stock stack do with this model, map and adapter, and which calls work, before a weight is read?"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from trimtab.adapters.adapter import read_adapter
from trimtab.checkpoint.folder import read_checkpoint
from trimtab.doctor.preflight import findings
from trimtab.doctor.preflight.adapter import AdapterReading, read_adapter_for
from trimtab.doctor.preflight.answer import TOWERS, Answer, Asking, adapter_name, answer_for
from trimtab.doctor.preflight.device_map import MapReading, check_map, read_map
from trimtab.doctor.preflight.findings import Foreseen, foresee, is_met
from trimtab.doctor.preflight.second_plan import Device, SecondPlan, arithmetic, second_plan
from trimtab.doctor.preflight.shape import ModelShape, read_shape
from trimtab.doctor.traces.answer import known_bugs
from trimtab.errors import gib
from trimtab.machine.environment import Environment, read_environment
from trimtab.planning.request.max_memory import merged_budgets
from trimtab.planning.values.blocks import Machine
from trimtab.planning.values.byte_sizes import Rates
from trimtab.report.document import Block, Code, Document, Facts, Heading, Table, Text, some
from trimtab.request import LoadRequest, parse_bytes

FORMAT = 1


@dataclass(frozen=True, kw_only=True)
class Preflight:
    """The whole prediction.

    versions: of the packages concerned. free: device -> free bytes. findings: the most severe first.
    """

    model: str
    model_class: str
    quant: str
    device_map: Mapping[str, str]
    versions: Mapping[str, str]
    free: Mapping[Device, int]
    map: MapReading
    adapter: AdapterReading | None
    second: SecondPlan | None
    findings: tuple[Foreseen, ...]
    answer: Answer

    def to_json(self) -> dict[str, Any]:
        """Return the prediction as JSON-ready values, including the steps of the second plan."""
        return {
            "format": FORMAT, "model": self.model, "model_class": self.model_class, "quant": self.quant,
            "device_map": dict(self.device_map), "versions": dict(self.versions),
            "free_bytes": {str(device): nbytes for device, nbytes in self.free.items()},
            "findings": [asdict(finding) for finding in self.findings], "answer": self.answer.to_json(),
            "map": _map_json(self.map), "adapter": None if self.adapter is None else _adapter_json(self.adapter),
            "second_plan": None if self.second is None else _second_json(self.second),
        }  # fmt: skip


def preflight(
    model: str | os.PathLike[str], *, adapter: str | os.PathLike[str] | None = None,
    device_map: Mapping[str, Any] | None = None, quant: str = "auto", dtype: str = "bfloat16",
    gpu_memory: int | str | None = None, host_memory: int | str | None = None,
    max_memory: Mapping[Any, Any] | None = None, python: str | os.PathLike[str] | None = None,
    machine: Machine | None = None, environment: Environment | None = None, called: str | None = None,
) -> Preflight:  # fmt: skip
    """Return the expected failures of the stock stack with these arguments, and the calls that work instead.

    device_map: in transformers' form, None is everything on GPU 0. quant: "auto" is the checkpoint's own format, else
    nf4-dq. gpu_memory, host_memory: assumed free memory; max_memory: both in transformers' form. python: the
    interpreter of the packages (None: this one). machine, environment: if already known. called: the adapter's name in
    the suggested calls (None: its folder's).
    Errors: CheckpointError, AdapterError for folders that are not a model or an adapter; RequestError.
    """
    gpu_bytes = parse_bytes(gpu_memory, field_name="gpu_memory")
    host_bytes = parse_bytes(host_memory, field_name="host_memory")
    asked_map = check_map(device_map)
    device, disk_bytes = "auto", None
    if max_memory is not None:
        budgets = merged_budgets(max_memory, gpu_memory_bytes=gpu_bytes, host_memory_bytes=host_bytes, device=device)
        gpu_memory = gpu_bytes = budgets["gpu_memory_bytes"]
        host_memory = host_bytes = budgets["host_memory_bytes"]
        device, disk_bytes = budgets["device"], budgets["disk_memory_bytes"]
    checkpoint = read_checkpoint(model)
    if adapter is not None:
        read_adapter(os.fspath(adapter))  # before any slow work
    environment = environment or read_environment(python)
    machine = machine or _machine(gpu_bytes, host_bytes, device)
    shape = read_shape(model, asked_map, quant=quant, dtype=dtype, python=python)
    reading = read_map(shape, asked_map)
    adapter_reading = None if adapter is None else read_adapter_for(adapter, shape)
    free = _free(machine, environment)
    second = None
    if adapter_reading is not None:
        second = second_plan(shape, reading, adapter_reading, free, model=model, dtype=dtype, python=python)
    facts = findings.Facts(shape, reading, adapter_reading, second, environment.versions, os.path.isdir(model), not machine.on_cpu)
    fits = adapter is not None and adapter_reading is not None and adapter_reading.spec is not None
    request = LoadRequest(
        model=os.fspath(model), adapters={called or adapter_name(adapter): os.fspath(adapter)} if fits and adapter else {},
        quant=shape.quant, dtype=dtype, gpu_memory_bytes=gpu_bytes, host_memory_bytes=host_bytes,
        disk_memory_bytes=disk_bytes,
    )  # fmt: skip
    foreseen = foresee(facts)
    asking = Asking(
        checkpoint=checkpoint, request=request, shape=shape, adapter=adapter_reading, machine=machine,
        rates=_rates(machine), given=_given(gpu_memory, host_memory),
        towers_dense=_towers_dense(shape, environment), python=python,
    )  # fmt: skip
    return Preflight(
        model=os.fspath(model), model_class=shape.anatomy.model_class, quant=shape.quant, device_map=reading.devices,
        versions=environment.versions, free=free, map=reading, adapter=adapter_reading, second=second,
        findings=foreseen, answer=answer_for(asking),
    )  # fmt: skip


def _machine(gpu_bytes: int | None, host_bytes: int | None, device: str = "auto") -> Machine:
    """Return this machine, or one like it with other memory. The driver's context is part of the free memory."""
    import trimtab.engine.model  # noqa: F401  # so that the process has what loading imports (`read_machine`)
    from trimtab.engine.memory import rates

    machine = rates.read_machine()
    if device == "cpu":
        machine = replace(machine, execution_device="cpu", gpu_total_bytes=0, gpu_free_bytes=0)
    if gpu_bytes is not None:
        machine = replace(
            machine, execution_device="cuda:0", gpu_total_bytes=max(machine.gpu_total_bytes, gpu_bytes),
            gpu_free_bytes=max(gpu_bytes - machine.context_bytes, 0),
        )  # fmt: skip
    return machine if host_bytes is None else replace(machine, host_available_bytes=host_bytes)


def _free(machine: Machine, environment: Environment) -> dict[Device, int]:
    """Return the free memory that accelerate would find: the GPUs by number, then the CPU."""
    free: dict[Device, int] = {} if machine.on_cpu else {0: machine.gpu_free_bytes}
    free |= {gpu.index: gpu.free_bytes for gpu in environment.gpus if gpu.index > 0 and not machine.on_cpu}
    return {**free, "cpu": machine.host_available_bytes}


def _given(gpu_memory: int | str | None, host_memory: int | str | None) -> dict[str, str]:
    budgets = {"gpu-memory": gpu_memory, "host-memory": host_memory}
    return {flag: str(value) for flag, value in budgets.items() if value is not None}


def _towers_dense(shape: ModelShape, environment: Environment) -> bool:
    """Return whether the stock stack of these versions must not quantize the towers of this model."""
    towers = any(row.part in TOWERS and row.quantized for row in shape.anatomy.rows)
    is_hit = shape.anatomy.model_type.startswith("gemma4") and shape.anatomy.prequantized is None
    return towers and is_hit and any(is_met(bug, environment.versions) for bug in ("H1", "D2"))


def _rates(machine: Machine) -> Rates:
    import torch

    from trimtab.engine.memory import rates

    # Another machine's rates are unknown: those of an old consumer machine are enough to compare placements.
    is_here = machine.on_cpu or torch.cuda.is_available()
    return rates.measure_rates(machine.execution_device) if is_here else Rates()


# JSON -----------------------------------------------------------------------------------------------------------------


def _map_json(reading: MapReading) -> dict[str, Any]:
    return {
        "main": reading.main, "bytes_on": reading.bytes_on, "map_cost_bytes": reading.map_cost_bytes,
        "quantized_modules": len(reading.quantized), "unquantized": [asdict(row) for row in reading.kept],
        "unknown_keys": [asdict(row) for row in reading.unknown], "collisions": [asdict(row) for row in reading.collisions],
        "uncovered_tensors": list(reading.uncovered),
    }  # fmt: skip


def _adapter_json(reading: AdapterReading) -> dict[str, Any]:
    lists = ("problems", "wrappers", "dropped", "unfilled", "no_effect")
    counts = None if reading.spec is None else reading.spec.counts()
    return {"path": reading.path, "counts": counts, "plain_targets": reading.plain_targets} | {
        name: list(getattr(reading, name)) for name in lists
    }


def _second_json(second: SecondPlan) -> dict[str, Any]:
    values = asdict(second)
    values["steps"] = list(second.steps)
    values["required"] = {str(device): nbytes for device, nbytes in (second.required or {}).items()}
    values["offloaded_quantized"] = list(second.offloaded_quantized)
    return values


# For people -----------------------------------------------------------------------------------------------------------


def preflight_document(result: Preflight) -> Document:
    """Return the prediction for people: the expected failures, the reasons, and the call that works."""
    rows = [("stock stack", _stack(result.versions)), ("device map", _shown_map(result.device_map))]
    blocks: list[Block] = [Facts([*rows, *_unquantized(result.map, result.quant)])]
    blocks += [] if result.second is None else arithmetic(result.second)
    blocks.append(Heading("What will fail" if result.findings else "No known failure applies."))
    if result.findings:
        found = [(one.severity, one.bug or "-", one.when, f"{one.title}: {one.detail}{_way_round(one)}") for one in result.findings]
        blocks.append(Table(("", "bug", "when", "what"), found, has_note=True))
    blocks.append(Text(f"What works here: {result.answer.kind} ({result.answer.reason})"))
    if result.answer.stock:
        blocks += [Heading("With the stock objects"), Code(result.answer.stock)]
    if result.answer.python:
        blocks += [Heading("With trimtab"), Code(f"{result.answer.command}\n\n{result.answer.python}")]
    return Document(f"{result.model_class} ({result.model}), {result.quant}", blocks)


def _stack(versions: Mapping[str, str]) -> str:
    names = ("transformers", "accelerate", "peft", "bitsandbytes", "torch")
    return ", ".join(f"{name} {versions.get(name, 'missing')}" for name in names)


def _shown_map(devices: Mapping[str, str]) -> str:
    return some([f"{key!r}: {device}" for key, device in devices.items()], 8, " keys")


def _unquantized(reading: MapReading, quant: str) -> list[tuple[str, str]]:
    if quant == "none":
        return [("quantized", "nothing")]
    if not reading.kept:
        return [("quantized", f"{len(reading.quantized)} linears, all there are")]
    rows = [("quantized", f"{len(reading.quantized)} linears; in full precision stay:")]
    for reason, count in Counter(row.reason for row in reading.kept).items():
        alike = [row for row in reading.kept if row.reason == reason]
        size = sum(row.bytes for row in alike)
        kept = f"{gib(size)}, {gib(sum(row.quantized_bytes for row in alike))} if they were" if size else "a tied copy"
        rows.append(("", f"{count} ({kept}): {reason}; {alike[0].module_path}{' ...' if count > 1 else ''}"))
    return rows


def _way_round(one: Foreseen) -> str:
    bug = known_bugs().get(one.bug)
    return "" if bug is None else f"; workaround: {bug.way_round}"
