"""Copies of an adapter for the cases: the same weights, another config. The original is never written. Pure."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

from trimtab.adapters.adapter import read_adapter
from trimtab.doctor.cases.cases import BROAD_TARGETS

_PATH = re.compile(r"^base_model\.model\.(?P<path>.+?)\.lora_")
_TOWER = re.compile(r"(^|\.)(vision_tower|audio_tower|visual|vision_model|embed_vision|embed_audio)(\.|$)")
VARIANTS = ("patched", "broad", "narrow")


def write_variants(adapter: Path, out: Path) -> dict[str, str]:
    """Return the folder of every variant ("original" is the adapter itself), written below out.

    "patched" targets exactly the modules that the adapter has keys for: stock PEFT can load it even if the config names
    wrappers. "broad" names only the projections. "narrow" is "patched" without towers and connectors.
    Errors: AdapterError, CheckpointError for a folder that is no adapter.
    """
    file = read_adapter(str(adapter))
    paths = list(dict.fromkeys(match["path"] for match in map(_PATH.match, file.tensors) if match))
    targets: dict[str, str | list[str]] = {
        "patched": _pattern(paths),
        "broad": list(BROAD_TARGETS),
        "narrow": _pattern([path for path in paths if not _TOWER.search(path)]),
    }
    folders = {"original": str(adapter)}
    for variant in VARIANTS:
        folder = out / f"adapter-{variant}"
        folder.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(file.file, folder / file.file.name)
        config = {**file.config, "target_modules": targets[variant]}
        (folder / "adapter_config.json").write_text(json.dumps(config, indent=1), encoding="utf-8")
        folders[variant] = str(folder)
    return folders


def _pattern(paths: list[str]) -> str:
    """Return a regular expression for exactly these paths. PEFT shortens a list of names to suffixes, but never a
    pattern.
    """
    return "|".join(re.escape(path) for path in paths)
