"""What does a device map do in the stock stack: keys that match nothing or too much, and modules that stay unquantized?"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from trimtab.checkpoint.names import near_names
from trimtab.doctor.preflight.shape import ModelShape, device_of
from trimtab.doctor.preflight.unquantized import quantized_paths, stock_bytes, stock_kept, weight_bytes
from trimtab.errors import RequestError

OFF = ("cpu", "disk")


@dataclass(frozen=True)
class KeptOut:
    """A linear that the stock stack leaves in full precision: its bytes there, and its quantized bytes."""

    module_path: str
    part: str
    reason: str
    bytes: int
    quantized_bytes: int


@dataclass(frozen=True)
class UnknownKey:
    """A key that matches no module; near: similar names."""

    key: str
    near: tuple[str, ...]


@dataclass(frozen=True)
class Collision:
    """A key that also matches modules whose names only have it as a prefix: their device, the device in the map, an example."""

    key: str
    tensors: int
    example: str
    goes_to: str
    asked: str


@dataclass(frozen=True, kw_only=True)
class MapReading:
    """The map as the stock stack interprets it.

    devices: key -> device as text; main: the device that computes. kept: linears that stay unquantized. map_cost_bytes:
    additional bytes of those that stay unquantized only because of the map, compared with the requested format.
    uncovered: tensors without a key. object_keys: keys whose value is neither a number nor text. bytes_on: device ->
    bytes of the loaded base. tensor_devices: tensor_path -> device, after collisions.
    """

    devices: dict[str, str]
    main: str
    kept: tuple[KeptOut, ...]
    map_cost_bytes: int
    quantized: frozenset[str]
    unknown: tuple[UnknownKey, ...]
    collisions: tuple[Collision, ...]
    uncovered: tuple[str, ...]
    object_keys: tuple[str, ...]
    bytes_on: dict[str, int]
    tensor_devices: dict[str, str]

    @property
    def is_split(self) -> bool:
        """Whether anything of the base is on the CPU or disk: the condition for PEFT's second plan."""
        return any(device in OFF for device in self.devices.values())

    def keys_on(self, *devices: str) -> list[str]:
        return [key for key, device in self.devices.items() if device in devices]


def check_map(device_map: Any) -> dict[str, Any]:
    """Return the map as a dict. Errors: RequestError unless it maps names to devices."""
    if device_map is None:
        return {}
    if not isinstance(device_map, Mapping) or not device_map:
        raise RequestError(
            "must map module names to devices", field="device_map", value=device_map,
            hint='For example {"model.vision_tower": "cpu", "": 0}',
        )  # fmt: skip
    wrong = [key for key in device_map if not isinstance(key, str)]
    wrong += [key for key, value in device_map.items() if isinstance(value, bool) or not device_text(value)]
    if wrong:
        raise RequestError("keys are module names, values devices", field="device_map", value=wrong)
    return dict(device_map)


def device_text(value: Any) -> str:
    """Return a device of a map as text: a GPU by its number, "cpu" and "disk" unchanged; "" if it is no device."""
    text = str(value)
    if text.startswith("cuda"):
        text = text.partition(":")[2] or "0"
    return text if text.isdecimal() or text in (*OFF, "mps", "meta") or text.startswith(("xpu", "npu")) else ""


def read_map(shape: ModelShape, device_map: Mapping[str, Any]) -> MapReading:
    """Return the stock stack's reading of the map (empty: everything on GPU 0)."""
    entries = dict(device_map) or {"": 0}
    devices = {key: device_text(value) for key, value in entries.items()}
    kept = stock_kept(shape, takes_map=bool(device_map))
    quantized = quantized_paths(shape, kept)
    sizes = stock_bytes(shape, quantized)
    tensors = {tensor: device_of(tensor, devices) for tensor in sizes}
    tensors |= {tensor: device_text(device) for tensor, device in shape.loaded_to.items() if tensor in tensors}
    main = next((device for device in devices.values() if device not in OFF), "cpu")
    counts: Counter[str] = Counter()
    for tensor, nbytes in sizes.items():
        counts[tensors[tensor] or main] += nbytes
    rows = _kept_rows(shape, kept)
    return MapReading(
        devices=devices, main=main, kept=rows,
        map_cost_bytes=sum(
            row.bytes - row.quantized_bytes for row in rows if row.module_path in shape.skipped_by_key
            and row.reason.startswith("the map's key")
        ),
        quantized=quantized, unknown=_unknown(shape, devices), collisions=_collisions(shape, devices),
        uncovered=tuple(tensor for tensor, device in tensors.items() if device is None),
        object_keys=tuple(key for key, value in entries.items() if not isinstance(value, (int, str))),
        bytes_on=dict(counts), tensor_devices={tensor: device or main for tensor, device in tensors.items()},
    )  # fmt: skip


def _kept_rows(shape: ModelShape, kept: Mapping[str, str]) -> tuple[KeptOut, ...]:
    rows = shape.anatomy.by_path()
    kept_rows = []
    for path, reason in kept.items():
        row, size, packed = rows[path], 0, 0  # of a tied weight
        if row.kind == "experts":
            size = sum(tensor.nbytes for tensor in row.tensors if not tensor.is_buffer)
            packed = size // 4 if shape.quant != "int8" else size // 2
        elif row.weight is not None and row.weight.tied_to is None:
            size, packed = row.weight.nbytes, weight_bytes(row, shape.quant)
        if row.kind == "experts" or row.weight is not None:
            kept_rows.append(KeptOut(path, row.part, reason, size, packed))
    return tuple(kept_rows)


def _unknown(shape: ModelShape, devices: Mapping[str, str]) -> tuple[UnknownKey, ...]:
    modules = {module.module_path for module in shape.modules}
    tensors = {f"{module.module_path}.{own.name}" for module in shape.modules for own in module.tensors}
    names = sorted(modules - {""})
    return tuple(
        UnknownKey(key, tuple(near_names(key, names))) for key in devices if key and key not in modules and key not in tensors
    )


def _collisions(shape: ModelShape, devices: Mapping[str, str]) -> tuple[Collision, ...]:
    caught: dict[str, list[str]] = {}
    for tensor in shape.loaded_to:
        key = next((key for key in sorted(devices, key=len, reverse=True) if key and tensor.startswith(key)), None)
        if key is not None:
            caught.setdefault(key, []).append(tensor)
    return tuple(
        Collision(key, len(tensors), tensors[0], shape.loaded_to[tensors[0]], str(device_of(tensors[0], devices)))
        for key, tensors in caught.items()
    )
