"""Which launch configurations of 4-bit matmuls are known, shipped as data or cached from an earlier tuning?"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from importlib import resources
from typing import Any

from trimtab.engine.cuda.check_cache import CardEntries
from trimtab.engine.cuda.launch_config import CutKey, LaunchConfig, cuts, key_name
from trimtab.engine.cuda.nvrtc import KernelLimits
from trimtab.process.json_file import parse

FORM = 1
# Bytes a thread for spilled registers, up to which a timing on another such card counts: another compiler may spill more there.
TIMED_LOCAL_BYTES = 64
MOST_CONFIGS = 5000
# How a configuration came to be: tuned here; shipped, from such a card; shipped, from another card or an older kernel; estimated.
MEASURED, SHIPPED, SHIPPED_ELSEWHERE, ESTIMATED = ("measured here", "measured", "tuned on another card", "not measured")
# A multiprocessor has this many registers; a warp takes them in pieces of 256 (compute capability 7.5 to 12.0).
_REGISTERS, _REGISTER_PIECE, _WARP = 65536, 256, 32


@dataclass(frozen=True)
class Target:
    """The card and the kernels that configurations are for. source: the hash of the CUDA source."""

    name: str
    capability: tuple[int, int]
    multiprocessors: int
    shared_bytes: int
    source: str


def why_not(cut: LaunchConfig, limits: KernelLimits, shared_bytes: int, *, is_timed: bool = False) -> str | None:
    """Return why a compiled kernel cannot be launched well with a configuration on a card, or None. is_timed: on such a card it was
    the fastest, with a few spilled registers."""
    if limits.static_shared_bytes + cut.shared_bytes > shared_bytes:
        return f"{limits.static_shared_bytes + cut.shared_bytes} B of shared memory, a block may have {shared_bytes}"
    if cut.threads > limits.max_threads:
        return f"{cut.threads} threads a block, the kernel may have {limits.max_threads}"
    warp = -(-limits.registers * _WARP // _REGISTER_PIECE) * _REGISTER_PIECE
    needed = warp * (cut.threads // _WARP)
    if needed > _REGISTERS:
        return f"{needed} registers a block, a multiprocessor has {_REGISTERS}"
    if cut.held and limits.local_bytes > (TIMED_LOCAL_BYTES if is_timed else 0):
        return f"{limits.local_bytes} B a thread have no room in registers"
    return None


# Files ----------------------------------------------------------------------------------------------------------------


def document(target: Target, configs: Mapping[CutKey, LaunchConfig], about: Mapping[str, str]) -> dict[str, object]:
    """Return the text of a file of configurations. about: releases that they were measured with."""
    return {"form": FORM, "target": asdict(target), "about": dict(about), "configs": [*_rows(configs).values()]}


def _rows(configs: Mapping[CutKey, LaunchConfig]) -> dict[CutKey, dict[str, object]]:
    return {
        key: {"rows": list(key[1]), "columns": key[2], "pair": key[4], **asdict(replace(cut, estimated_us=0.0))}
        for key, cut in sorted(configs.items())
    }


def to_text(whole: Mapping[str, Any]) -> str:
    """Return a document as text, one configuration a line, so that a change of one is a change of one line."""
    head = json.dumps({name: value for name, value in whole.items() if name != "configs"}, indent=1)
    lines = ",\n".join(f"  {json.dumps(row)}" for row in whole["configs"])
    return f'{head[:-2]},\n "configs": [\n{lines}\n ]\n}}\n'


def from_text(text: str) -> tuple[Target, dict[CutKey, LaunchConfig]]:
    """Return the card of a document and its configurations; those that this code would not make itself are dropped.

    Errors: ValueError for a text that is no such document.
    """
    try:
        whole = parse(text.encode(), "own state")
        if whole["form"] != FORM or len(whole["configs"]) > MOST_CONFIGS:
            raise ValueError("not launch configurations of this form")
        target = Target(**{**whole["target"], "capability": tuple(whole["target"]["capability"])})
        rows = [dict(row) for row in whole["configs"]]
    except (TypeError, KeyError, AttributeError) as exc:
        raise ValueError(f"not launch configurations: {exc}") from exc
    return target, _configs(rows)


def _configs(rows: Iterable[Mapping[str, Any]]) -> dict[CutKey, LaunchConfig]:
    configs: dict[CutKey, LaunchConfig] = {}
    for row in rows:
        with suppress(TypeError, KeyError, ValueError, ZeroDivisionError):
            key, cut = _config(dict(row))
            configs[key] = cut
    return configs


def _config(row: dict[str, Any]) -> tuple[CutKey, LaunchConfig]:
    """Return one configuration. Errors: ValueError unless `cuts` would make it, TypeError and KeyError for another form."""
    rows, columns, pair = tuple(row.pop("rows")), row.pop("columns"), row.pop("pair")
    cut = LaunchConfig(**row)
    if not all(isinstance(size, int) and 0 < size < 2**24 for size in (*rows, columns, cut.n, cut.shared_bytes)):
        raise ValueError("a size is out of range")
    candidates = cuts(rows, columns, cut.n, multiprocessors=1, shared_bytes=cut.shared_bytes, pair=pair, layout=cut.layout)
    plain = replace(cut, estimated_us=0.0, normed=False)
    if plain not in {replace(one, estimated_us=0.0) for one in candidates} or (cut.normed and not cut.may_be_normed):
        raise ValueError("not a configuration of these kernels")
    return (key_name(cut.layout), rows, columns, cut.n, pair), cut


def shipped(target: Target) -> tuple[dict[CutKey, LaunchConfig], str]:
    """Return the configurations that came with this package for a card's compute capability, and how they were measured. They are
    in cuda/launch_configs_sm_NN.json, which `trimtab tune MODEL --export` writes."""
    name = f"launch_configs_sm_{target.capability[0]}{target.capability[1]}.json"
    file = resources.files("trimtab.engine.kernels") / "cuda" / name
    try:
        card, configs = from_text(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}, ESTIMATED
    fitting = {key: cut for key, cut in configs.items() if cut.shared_bytes <= target.shared_bytes}
    is_such = card.multiprocessors == target.multiprocessors and card.source == target.source
    return fitting, SHIPPED if is_such else SHIPPED_ELSEWHERE


def kept(target: Target) -> dict[CutKey, LaunchConfig]:
    """Return the configurations that were tuned on this card with these kernels."""
    return _configs(_entries_of(target).all())


def keep(target: Target, configs: Mapping[CutKey, LaunchConfig]) -> None:
    """Save the configurations that were tuned on this card, together with earlier ones."""
    entries = _entries_of(target)
    for key, row in _rows(configs).items():
        entries.keep(row, *key)
    entries.save()


def _entries_of(target: Target) -> CardEntries:
    return CardEntries(json.dumps(asdict(target), sort_keys=True))
