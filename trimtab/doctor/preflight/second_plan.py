"""Does PEFT make a second plan for a map, which memory does it assume, and what is its result?"""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trimtab.adapters.config import PEFT_HEAD
from trimtab.adapters.patch import patched_config
from trimtab.doctor.preflight.adapter import AdapterReading
from trimtab.doctor.preflight.device_map import OFF, MapReading
from trimtab.doctor.preflight.shape import ModelShape
from trimtab.doctor.preflight.unquantized import stock_bytes
from trimtab.errors import gib
from trimtab.process.runner import DONE, Outcome, run_inside
from trimtab.report.document import Block, Items, Table, Text, counted, some

Device = int | str
ROOT = PEFT_HEAD.rstrip(".")
TIMEOUT_S = 300.0
_PUT = re.compile(r"Putting .* on (\S+)\.")
_NO_ROOM = re.compile(r"Not enough space on (\S+) to put (\S+) .* size (\d+)\)\.")


@dataclass(frozen=True)
class Line:
    """One line of the arithmetic."""

    text: str
    bytes: int


@dataclass(frozen=True, kw_only=True)
class SecondPlan:
    """PEFT's plan.

    runs: whether it is made at all; why: the condition, or why there is none. steps: accelerate's output during
    planning. device_map: the result, in the wrapped model's names. required: the figure of accelerate's log line for an
    unused device. free_bytes: of the first GPU as the plan would see it. moved_to_main_bytes, moved_off_bytes: bytes
    that move, compared with the user's map. offloaded_quantized: quantized linears that it moves off the accelerator.
    all_on_cpu: everything is on the CPU. disk_keys: keys on disk, in the wrapped model's names.
    """

    runs: bool
    why: str
    lines: tuple[Line, ...] = ()
    steps: tuple[str, ...] = ()
    device_map: Mapping[str, Device] | None = None
    required: Mapping[Device, int] | None = None
    required_words: tuple[str, ...] = ()
    free_bytes: int = 0
    total_bytes: int = 0
    moved_to_main_bytes: int = 0
    moved_off_bytes: int = 0
    offloaded_quantized: tuple[str, ...] = ()
    all_on_cpu: bool = False
    disk_keys: tuple[str, ...] = ()
    is_split: bool = False


def second_plan(
    shape: ModelShape, reading: MapReading, adapter: AdapterReading, free: Mapping[Device, int], *,
    model: str | os.PathLike[str], dtype: str, python: str | os.PathLike[str] | None = None,
) -> SecondPlan:  # fmt: skip
    """Return the plan that PEFT of an interpreter (None: this one) makes for the first adapter on a base with this map.

    free: device -> bytes free now, before the base is loaded: GPUs by number, then "cpu". The free memory is the present one minus
    base and adapter, an upper bound: torch's cache (a map with "" moves the whole model through the GPU) and other programs reduce
    it.
    """
    if not reading.is_split:
        return SecondPlan(runs=False, why="nothing of the base is on the CPU or disk, so PEFT keeps the map")
    left = {device: nbytes - reading.bytes_on.get(str(device), 0) for device, nbytes in free.items()}
    plan = run_peft(
        {
            "model": os.fspath(Path(model).absolute()) if os.path.isdir(model) else os.fspath(model), "dtype": dtype,
            "adapter": os.fspath(Path(adapter.path).absolute()), "config": config_changes(adapter),
            "device_map": reading.devices, "devices": reading.tensor_devices, "main": reading.main,
            "quantized": sorted(reading.quantized), "quant": shape.quant,
            "free": [[device, nbytes] for device, nbytes in left.items()],
        },
        python,
    )  # fmt: skip
    if not plan["runs"]:
        return SecondPlan(runs=False, why=plan["why"])
    device_map, budgets = dict(plan["map"]), dict(plan["budgets"])
    required = {_device(name): int(nbytes) for name, nbytes in plan["required"]}
    lines, left = _free_then(reading, dict(plan["adapter"]), free)
    after: dict[str, str] = plan["after"]
    moved = _moved(shape, reading, after)
    gpus = [device for device in budgets if isinstance(device, int)]
    offloaded = tuple(sorted(path for path in reading.quantized if after.get(f"{path}.weight") in OFF))
    devices = set(map(str, device_map.values()))
    return SecondPlan(
        runs=True, why=f"the base has modules on the CPU or disk ({', '.join(reading.keys_on(*OFF)[:4])})",
        lines=(*lines, *_budget_lines(plan, budgets, left, gpus)), steps=tuple(plan["steps"]), device_map=device_map,
        required=required, required_words=tuple(_required(plan, *one) for one in required.items()),
        free_bytes=int(left.get(gpus[0], 0)) if gpus else 0, total_bytes=int(plan["total_bytes"]),
        moved_to_main_bytes=moved["main"], moved_off_bytes=moved["off"], offloaded_quantized=offloaded,
        all_on_cpu=devices == {"cpu"}, is_split=len(devices) > 1,
        disk_keys=tuple(path for path, device in device_map.items() if device == "disk"),
    )  # fmt: skip


def config_changes(adapter: AdapterReading) -> dict[str, Any]:
    """Return the changes of PEFT's configuration for an adapter with wrappers as targets. {} for an adapter that does not
    match."""
    if adapter.spec is None:
        return {}
    config = adapter.spec.file.config
    patched = patched_config(adapter.spec, adapter.plain_targets)
    return {name: value for name, value in patched.items() if value != config.get(name)}


def run_peft(request: Mapping[str, Any], python: str | os.PathLike[str] | None) -> dict[str, Any]:
    """Return the result of `peft_dispatch.plan_of` in a separate process without a GPU."""
    outcome = run_inside(
        "trimtab.doctor.preflight.peft_dispatch", request, python=python, timeout_s=TIMEOUT_S,
        environment={"CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1"},
    )  # fmt: skip
    if outcome.ended == DONE and outcome.lines:
        return outcome.lines[0]
    return {"runs": False, "why": f"PEFT could not be run there: {_last_line(outcome)}"}


def _last_line(outcome: Outcome) -> str:
    return (outcome.stderr.strip().splitlines() or [outcome.ended])[-1]


def _device(text: str) -> Device:
    return int(text) if text.isdecimal() else text


def _free_then(reading: MapReading, adapter: Mapping[str, int], free: Mapping[Device, int]) -> tuple[list[Line], dict[Device, int]]:
    lines, left = [], {}
    for device, nbytes in free.items():
        name = "host memory available" if device == "cpu" else f"free on GPU {device}"
        base, own = reading.bytes_on.get(str(device), 0), adapter.get(str(device), 0)
        left[device] = nbytes - base - own
        lines += [Line(f"{name} now", nbytes), Line("less the base that is loaded there", -base)]
        if own:
            lines.append(Line("less the adapter next to its layers, in float32", -own))
        lines.append(Line("= what PEFT finds free", left[device]))
    return lines, {device: max(nbytes, 0) for device, nbytes in left.items()}


def _budget_lines(
    plan: Mapping[str, Any], budgets: Mapping[Device, float], left: Mapping[Device, int], gpus: list[int]
) -> list[Line]:
    lines = []
    for device in gpus:
        budget = int(budgets[device])
        share = f", {budget / left[device]:.0%} of what is free" if left.get(device) else ""
        lines.append(Line(f"GPU {device}: budget that accelerate takes{share}", budget))
        if device == gpus[0]:
            path, nbytes = plan["largest"]
            lines.append(Line(f"less the largest layer, to bring it back when it is offloaded ({_own(path)})", -int(nbytes)))
            lines.append(Line("= room for what is placed there", int(budgets[device] - nbytes)))
    lines.append(Line("the model as accelerate counts it (no scales, LoRA in float32)", int(plan["total_bytes"])))
    return lines


def _required(plan: Mapping[str, Any], device: Device, nbytes: int) -> str:
    """Return the parts of the number in accelerate's log line: the first module that it tried and the largest layer."""
    refused = [match.groups() for match in map(_NO_ROOM.match, plan["steps"]) if match and match.group(1) == str(device)]
    if not refused:
        return f"{device}: {nbytes} bytes required"
    path = refused[-1][1]
    size = max(int(count) for _, path_refused, count in refused if path_refused == path)  # with the modules that are tied to it
    rest, share = nbytes - size, 100 * (nbytes - size) / nbytes if nbytes else 0.0
    kept = f"{rest} for the largest layer ({_own(plan['largest'][0])}, {share:.1f} %)" if rest else "nothing kept back"
    return (
        f"{device}: {nbytes} bytes required = {size} for {_own(path)}, the first module that was tried, + {kept}. It says "
        "what one placement would need, not how much memory is missing"
    )


def _own(path: str) -> str:
    return path.removeprefix(f"{ROOT}.")


def _moved(shape: ModelShape, reading: MapReading, after: Mapping[str, str]) -> dict[str, int]:
    moved = {"main": 0, "off": 0}
    for tensor, nbytes in stock_bytes(shape, reading.quantized).items():
        was_off, is_off = reading.tensor_devices[tensor] in OFF, after[tensor] in OFF
        if was_off != is_off:
            moved["off" if is_off else "main"] += nbytes
    return moved


def arithmetic(second: SecondPlan) -> list[Block]:
    """Return the lines of the arithmetic, the map and the log line explained."""
    if not second.runs:
        return [Text(f"No second plan by PEFT: {second.why}")]
    placed = Counter(match.group(1) for match in map(_PUT.match, second.steps) if match)
    texts = [f"{counted(count, 'module')} put on {device}" for device, count in placed.items()]
    shown = [f"{path!r}: {device!r}" for path, device in (second.device_map or {}).items()]
    texts += [*second.required_words, f"its map: {some(shown, 8, ' keys')}"]
    rows = [(f"{line.bytes:,}", gib(line.bytes), line.text) for line in second.lines]
    return [Text(f"PEFT plans again: {second.why}"), Table(("bytes", "", ""), rows, has_note=True), Items(texts)]
