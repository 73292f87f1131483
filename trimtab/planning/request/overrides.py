"""Which tier does the user's placement give each block, by `place` patterns or a device map?"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from trimtab.checkpoint.anatomy import PARTS, Anatomy, ModuleRow
from trimtab.checkpoint.names import is_under, matches, near_names
from trimtab.errors import RequestError
from trimtab.planning.values.blocks import Block, tied_paths, why_fixed

CATCH_ALL = "*"
# The error if a GPU is named and none can be used.
NO_GPU = "No GPU can be used here; card='RTX 4060 8GB', for example, plans for one that is not in this machine"
# A device of a map -> the tier and, for tables, the location of the rows. "cpu" keeps weights in host memory, "disk" on
# disk.
_MAPPED = {"cpu": (("stream", None), ("gather", "host")), "disk": (("disk", None), ("gather", "file"))}


@dataclass(frozen=True)
class Asked:
    """A tier that the user decided for one block. home: the required location of a gathered table, None if the plan may
    choose."""

    tier: str
    home: str | None
    asked: str


def _has_tensors(anatomy: Anatomy) -> list[ModuleRow]:
    return [row for row in anatomy.rows if row.tensors or row.wraps]


def _names_of(anatomy: Anatomy, blocks: Sequence[Block]) -> list[str]:
    """Return every name that a pattern may match: parts, blocks, modules and their parents."""
    names: dict[str, None] = dict.fromkeys(anatomy.parts)
    names.update(dict.fromkeys(block.block_path for block in blocks))
    for row in anatomy.rows:
        pieces = row.module_path.split(".")
        names.update(dict.fromkeys(".".join(pieces[:end]) for end in range(1, len(pieces) + 1)))
    return [name for name in names if name]


def resolve_place(place: Mapping[str, str], blocks: Sequence[Block], anatomy: Anatomy) -> dict[str, Asked]:
    """Return block_path -> the request of `place` for it; blocks that no pattern decides are absent.

    A pattern names blocks, modules (their block is placed whole) or a part; the last one that applies wins. A pattern
    over several blocks skips those that do not allow its tier.
    Errors: RequestError for a pattern that names nothing, that none of its blocks allows, or that later patterns undo.
    """
    decided: dict[str, tuple[str, str]] = {}
    for pattern, tier in place.items():
        hit = _hit(pattern, blocks, anatomy)
        if not hit:
            raise RequestError(
                "matches no block, module or modality of this model", field=f"place[{pattern!r}]", value=tier,
                allowed=anatomy.parts, near=near_names(pattern, _names_of(anatomy, blocks)),
                hint="`trimtab plan` lists the blocks",
            )  # fmt: skip
        applied = [block for block in hit if tier in block.allowed_tiers and _moves(pattern, tier, block, anatomy)]
        if not applied:
            raise RequestError(
                _why_not(pattern, tier, hit, anatomy), field=f"place[{pattern!r}]", value=tier,
                allowed=tuple(dict.fromkeys(tier for block in hit for tier in block.allowed_tiers)),
            )  # fmt: skip
        for block in applied:
            decided.pop(block.block_path, None)
            decided[block.block_path] = (pattern, tier)
    used = {pattern for pattern, _ in decided.values()}
    for pattern, tier in place.items():
        if pattern not in used:
            later = sorted({decided[b.block_path][0] for b in _hit(pattern, blocks, anatomy) if b.block_path in decided})
            raise RequestError(
                f"has no effect: a later pattern decides every block that it matches ({', '.join(later)})",
                field=f"place[{pattern!r}]", value=tier, hint="The last matching pattern wins: remove or reorder patterns",
            )  # fmt: skip
    return {path: Asked(tier, None, f"place {pattern}={tier}") for path, (pattern, tier) in decided.items()}


def _hit(pattern: str, blocks: Sequence[Block], anatomy: Anatomy) -> list[Block]:
    if pattern == CATCH_ALL:
        return list(blocks)
    if pattern in PARTS:
        return [block for block in blocks if block.part == pattern]
    named = {row.block for row in _has_tensors(anatomy) if matches(pattern, row.module_path)}
    return [block for block in blocks if block.block_path in named or matches(pattern, block.block_path)]


def _moves(pattern: str, tier: str, block: Block, anatomy: Anatomy) -> bool:
    """Return whether the pattern covers a weight of this block that can be in the tier, not only weights that must stay."""
    if tier == "resident" or pattern == CATCH_ALL or pattern in PARTS or matches(pattern, block.block_path):
        return True
    return any(matches(pattern, leaf) for leaf in block.leaves) or any(
        row.wraps in block.leaves for row in anatomy.rows if row.block == block.block_path and matches(pattern, row.module_path)
    )


def _why_not(pattern: str, tier: str, hit: Sequence[Block], anatomy: Anatomy) -> str:
    """Return the reasons why none of the blocks may be in the tier, without duplicates."""
    reasons = dict.fromkeys(block.refused[tier] for block in hit if tier in block.refused)
    if not reasons:
        tied = tied_paths(anatomy)
        rows = [row for row in _has_tensors(anatomy) if matches(pattern, row.module_path)]
        reasons = dict.fromkeys(why_fixed(row, anatomy, tied) for row in rows)
    return f"cannot be placed on {tier}: " + "; ".join(list(reasons)[:4])


def resolve_device_map(
    device_map: Mapping[str, Any], blocks: Sequence[Block], anatomy: Anatomy, *, execution_device: str
) -> dict[str, Asked]:
    """Return block_path -> the request of the map for it.

    The longest key that is a prefix of a module's path decides ("" is everything else); devices are int, text or any object whose
    str() is a device. The execution device means resident, "cpu" stream (tables: gather from host memory), "disk" disk (tables:
    rows stay in the checkpoint file). On a machine whose execution device is the CPU, "cpu" is resident. Errors: RequestError for
    keys that name nothing, other devices, modules that the map omits, blocks split over devices, and keys that move weights which
    cannot move.
    """
    devices = {key: _device(key, value, execution_device) for key, value in device_map.items()}
    _check_keys(devices, blocks, anatomy)
    asked_by: dict[str, dict[str, set[str]]] = {}
    followed: set[str] = set()
    forgotten: list[str] = []
    leaves = {leaf: block for block in blocks for leaf in block.leaves}
    for row in _has_tensors(anatomy):
        key = _longest(row.module_path, devices)
        if key is None:
            forgotten.append(row.module_path)
        elif row.module_path in leaves:
            asked_by.setdefault(row.block, {}).setdefault(devices[key], set()).add(key)
            followed.add(key)
    if forgotten:
        raise RequestError(
            f"has no device for {len(forgotten)} modules, for example {', '.join(forgotten[:3])}", field="device_map",
            hint='Add "": 0 for everything else',
        )  # fmt: skip
    _check_followed(devices, followed, anatomy)
    decided: dict[str, Asked] = {}
    for block in blocks:
        keys_by_device = asked_by.get(block.block_path, {})
        if len(keys_by_device) > 1:
            cutting = sorted(key for of_device in keys_by_device.values() for key in of_device)
            raise RequestError(
                f"cuts the block {block.block_path} in two ({', '.join(map(repr, cutting))}): a block moves as a whole",
                field="device_map", value={key: device_map[key] for key in cutting},
            )  # fmt: skip
        for device, keys in keys_by_device.items():
            decided[block.block_path] = _asked(block, device, min(keys))
    return decided


def _asked(block: Block, device: str, key: str) -> Asked:
    tier, home = _MAPPED[device][block.is_table] if device in _MAPPED else ("resident", None)
    return Asked(tier, home, f"device_map {key!r}: {device}")


def _device(key: str, value: Any, execution_device: str) -> str:
    """Return "cpu", "disk" or "resident" for one value of the map."""
    field = f"device_map[{key!r}]"
    text = f"cuda:{value}" if isinstance(value, int) and not isinstance(value, bool) else str(value)
    text = f"cuda:{text}" if re.fullmatch(r"\d+", text) else text
    index = "cuda:0" if execution_device == "cuda" else execution_device
    if text in (execution_device, index) or (text == "cuda" and execution_device.startswith("cuda")):
        return "resident"
    if text in _MAPPED:
        return text
    allowed = tuple(dict.fromkeys((index, "cpu", "disk")))
    if text == "meta":
        raise RequestError("meta tensors hold no data to compute with", field=field, value=text, allowed=allowed)
    if re.fullmatch(r"cuda(:\d+)?", text):
        hint = NO_GPU if execution_device == "cpu" else ""
        raise RequestError(f"the model runs on one device, {index}", field=field, value=text, allowed=allowed, hint=hint)
    raise RequestError("not a device of this machine", field=field, value=text, allowed=allowed)


def _longest(module_path: str, keys: Iterable[str]) -> str | None:
    return max((key for key in keys if is_under(module_path, key)), key=len, default=None)


def _check_keys(devices: Mapping[str, str], blocks: Sequence[Block], anatomy: Anatomy) -> None:
    tensors = {tensor.tensor_path for row in anatomy.rows for tensor in row.tensors}
    paths = set(_names_of(anatomy, blocks)) - set(PARTS) | {row.module_path for row in anatomy.rows} | tensors
    unknown = [key for key in devices if key and key not in paths]
    if unknown:
        near = dict.fromkeys(name for key in unknown for name in near_names(key, sorted(paths)))
        raise RequestError("no module of this model has such a name", field="device_map", value=unknown, near=tuple(near))


def _check_followed(devices: Mapping[str, str], followed: set[str], anatomy: Anatomy) -> None:
    """Raise RequestError for keys that move weights which cannot leave, or that decide nothing."""
    tied, problems = tied_paths(anatomy), []
    for key, device in devices.items():
        if key in followed or not key:
            continue
        rows = [row for row in _has_tensors(anatomy) if _longest(row.module_path, devices) == key]
        if not rows and device == "resident":
            continue  # maps from accelerate list every tensor that stays
        if not rows:
            problems.append(f"{key!r} has no effect: it names a tensor, or longer keys decide every module under it")
        elif device != "resident":
            reasons = dict.fromkeys(why_fixed(row, anatomy, tied) for row in rows)
            problems.append(f"{key!r} cannot go to {device}: " + "; ".join(list(reasons)[:3]))
    if problems:
        raise RequestError("; ".join(problems), field="device_map")
