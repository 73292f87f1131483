"""Which launch configurations of 4-bit matmuls are known, shipped as data or cached from an earlier tuning?"""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from importlib import resources
from typing import Any

from trimtab.engine.cuda.launch_config import CutKey, LaunchConfig, cuts, key_name
from trimtab.process.json_file import parse
from trimtab.process.user_cache import hashed, own_folder, read_own, write_own

FORM = 1
# Bytes a thread for spilled registers, up to which a timing on another such card counts: another compiler may spill more there.
TIMED_LOCAL_BYTES = 64
FOLDER = "tuned"
MOST_BYTES = 4 * 2**20
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


@dataclass(frozen=True)
class KernelLimits:
    """The driver's figures for a compiled kernel. local_bytes: per thread, for registers that were spilled."""

    registers: int
    max_threads: int
    static_shared_bytes: int
    local_bytes: int


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
    rows = [
        {"rows": list(key[1]), "columns": key[2], "pair": key[4], **asdict(replace(cut, estimated_us=0.0))}
        for key, cut in sorted(configs.items())
    ]
    return {"form": FORM, "target": asdict(target), "about": dict(about), "configs": rows}


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
    configs: dict[CutKey, LaunchConfig] = {}
    for row in rows:
        with suppress(TypeError, KeyError, ValueError, ZeroDivisionError):
            key, cut = _config(row)
            configs[key] = cut
    return target, configs


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
    try:
        text = read_own(own_folder(FOLDER) / hashed(_key(target)), _key(target), limit_bytes=MOST_BYTES)
        return {} if text is None else from_text(text.decode())[1]
    except (OSError, ValueError):
        return {}


def keep(target: Target, configs: Mapping[CutKey, LaunchConfig], about: Mapping[str, str]) -> None:
    """Save the configurations that were tuned on this card, together with earlier ones. If the folder cannot be written, later
    processes tune again."""
    with suppress(OSError):
        whole = document(target, kept(target) | dict(configs), about)
        write_own(own_folder(FOLDER) / hashed(_key(target)), _key(target), to_text(whole).encode())


def _key(target: Target) -> str:
    return json.dumps(asdict(target), sort_keys=True)
