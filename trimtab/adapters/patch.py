"""How is an adapter copied with a config that names exactly the modules with weights, inner linears included?"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from trimtab.adapters.config import PEFT_HEAD, Rules
from trimtab.adapters.file import CONFIG_NAME, TENSORS_NAME, AdapterFile, read_adapter
from trimtab.adapters.match import AdapterSpec, match_adapter
from trimtab.checkpoint.anatomy import Anatomy
from trimtab.errors import AdapterError, RequestError
from trimtab.process.files import whole_folder
from trimtab.process.json_file import parse

# Fields that would narrow an exact pattern further.
_OTHER_RULES = ("exclude_modules", "layers_to_transform", "layers_pattern")
_CHUNK = 2**20


def write_patched(adapter: str | Path, anatomy: Anatomy, out: str | Path) -> dict[str, Any]:
    """Write the copy and return its description: "written", "target_modules", "modules", "renamed" keys, "linked".

    Errors: AdapterError for an adapter that does not fit the model, or a copy that would not equal it; RequestError for a folder
    that exists already or cannot be written; no partial copy remains. PEFT refuses a target that is a wrapper
    (Gemma4ClippableLinear), although the weights belong to the linear inside it.
    """
    folder = Path(out)
    if folder.exists():
        raise RequestError("exists already", field="patched", value=str(folder), hint="Name a new folder")
    file = read_adapter(adapter)
    spec = match_adapter(file, anatomy)
    if any(target.kind == "experts" for target in spec.targets):
        raise AdapterError(file.folder, ["changes stacks of experts, which a pattern of modules cannot name"])
    paths = sorted({target.module_path for target in spec.targets if target.kind != "saved"})
    if not paths:
        raise AdapterError(file.folder, ["has no LoRA weights that a target could name"])
    others = [row.module_path for row in anatomy.rows if row.module_path not in set(paths)]
    pattern = short_pattern(paths, others)
    with whole_folder(folder, field="patched") as staged:
        config = patched_config(spec, pattern)
        (staged / CONFIG_NAME).write_text(json.dumps(config, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
        renamed = _renamed(spec)
        linked = _weights(spec.file.file, staged / TENSORS_NAME, renamed)
        _check_equal(spec, read_adapter(staged), anatomy, paths)
    return {
        "written": str(folder), "target_modules": pattern, "modules": len(paths), "renamed": len(renamed), "linked": linked,
    }  # fmt: skip


def short_pattern(paths: Sequence[str], others: Iterable[str]) -> str:
    """Return a regular expression that matches these paths and none of the others, with numbers as `\\d+` where that is
    so.
    """
    foreign = list(others)
    groups: dict[str, list[str]] = {}
    for path in paths:
        groups.setdefault(re.sub(r"\d+", "#", path), []).append(path)
    parts: dict[str, list[str]] = {}
    for shape, members in groups.items():
        for text in _texts(shape, members, foreign):
            head, mark, tail = text.rpartition(r"\d+\.")
            parts.setdefault(head + mark, []).append(tail)
    return "|".join(
        f"{head}({'|'.join(tails)})" if head and len(tails) > 1 else "|".join(head + tail for tail in tails)
        for head, tails in parts.items()
    )


def _texts(shape: str, members: list[str], foreign: list[str]) -> list[str]:
    """Return the patterns of paths that differ only in numbers: one for all if it matches no other path, else one for each."""
    short = re.escape(shape).replace(r"\#", "#").replace("#", r"\d+")
    if len(members) > 1 and not any(re.fullmatch(short, path) for path in foreign):
        return [short]
    return [re.escape(path) for path in members]


def patched_config(spec: AdapterSpec, pattern: str) -> dict[str, Any]:
    """Return an adapter's configuration with the pattern as its targets. Ranks and scales are unchanged."""
    config = dict(spec.file.config) | {"target_modules": pattern}
    config |= {name: None for name in _OTHER_RULES if name in config}
    if any(target.wrapped for target in spec.targets):
        # Rank patterns end at the wrapper, but PEFT matches them against the inner linear.
        for name in ("rank_pattern", "alpha_pattern"):
            config[name] = {rf"({key})(\.linear)?": value for key, value in (config.get(name) or {}).items()}
    return config


def _renamed(spec: AdapterSpec) -> dict[str, str]:
    """Return key -> new key of tensors whose key spells the module differently from PEFT."""
    names = {}
    for target in spec.targets:
        if target.kind == "saved" or not target.adapter_path:
            continue
        for entry in target.tensors.values():
            _, mark, tail = entry.tensor_name.partition(f"{target.adapter_path}.")
            new = f"{PEFT_HEAD}{target.module_path}.{tail}" if mark else entry.tensor_name
            if new != entry.tensor_name:
                names[entry.tensor_name] = new
    return names


def _weights(source: Path, copy: Path, renamed: dict[str, str]) -> bool:
    """Link or copy the weights; return whether they are a link to the same file."""
    if not renamed:
        try:
            os.link(source, copy)
        except OSError:  # another file system, or one without links
            shutil.copyfile(source, copy)
            return False
        return True
    with source.open("rb") as file, copy.open("wb") as out:
        header = parse(file.read(int.from_bytes(file.read(8), "little")), "header")
        raw = json.dumps({renamed.get(name, name): value for name, value in header.items()}, separators=(",", ":")).encode()
        raw += b" " * (-len(raw) % 8)
        out.write(len(raw).to_bytes(8, "little") + raw)
        shutil.copyfileobj(file, out, _CHUNK)
    return False


def _check_equal(spec: AdapterSpec, copy: AdapterFile, anatomy: Anatomy, paths: Sequence[str]) -> None:
    """Raise AdapterError unless the copy changes exactly the same modules in the same way, from the same bytes."""
    again = match_adapter(copy, anatomy)
    problems = []
    if _what(spec) != _what(again):
        problems.append("the copy would behave differently: ranks, scales or modules differ")
    named = Rules(copy.folder, copy.config, (row.module_path for row in anatomy.rows)).named
    if sorted(named) != sorted(paths):
        problems.append(f"the pattern names {len(named)} modules, the adapter has weights for {len(paths)}")
    if _data(spec.file.file) != _data(copy.file):
        problems.append("the copied weights differ")
    if problems:
        raise AdapterError(spec.file.folder, problems)


def _what(spec: AdapterSpec) -> dict[tuple[str, str], Any]:
    return {
        (target.module_path, target.kind): (
            target.rank, target.scale, target.use_dora, target.has_bias,
            {role: (entry.dtype, entry.shape) for role, entry in target.tensors.items()},
        )
        for target in spec.targets
    }  # fmt: skip


def _data(file: Path) -> tuple[int, str]:
    """Return length and digest of a file's tensor data, without its header."""
    digest = hashlib.sha256()
    with file.open("rb") as stream:
        start = 8 + int.from_bytes(stream.read(8), "little")
        stream.seek(start)
        while chunk := stream.read(_CHUNK):
            digest.update(chunk)
    return file.stat().st_size - start, digest.hexdigest()
