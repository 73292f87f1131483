"""Releases of installed packages, read without importing them."""

from __future__ import annotations

import importlib.util
import platform
import re
import sys
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from trimtab._version import __version__
from trimtab.process.packages import version_of

PACKAGES = ("torch", "transformers", "bitsandbytes")


@dataclass(frozen=True)
class TorchBuild:
    """The build of torch. cuda: such as (12, 8), None for a build without it. has_hip: a build for AMD's GPUs."""

    version: str
    cuda: tuple[int, ...] | None
    has_hip: bool


@cache
def torch_build() -> TorchBuild | None:
    """Return torch's build from the file that the build wrote; None if it cannot be read."""
    folder = _folder("torch")
    try:
        text = "" if folder is None else (folder / "version.py").read_text(encoding="utf-8")
    except OSError:
        return None
    pairs = re.findall(r"^(\w+)\s*(?::[^=\n]+)?=\s*(None|'[^'\n]*'|\"[^\"\n]*\")", text, re.MULTILINE)
    values = {name: None if value == "None" else value[1:-1] for name, value in pairs}
    name = values.get("__version__")
    if name is None or not {"cuda", "hip"} <= values.keys():
        return None
    cuda = values["cuda"]
    numbers = None if cuda is None else tuple(int(part) for part in re.findall(r"\d+", cuda))
    return TorchBuild(name, numbers, values["hip"] is not None)


def _folder(package: str) -> Path | None:
    spec = importlib.util.find_spec(package)
    return None if spec is None or spec.origin is None else Path(spec.origin).parent


@cache
def versions() -> dict[str, str]:
    """Return the values that decide a module tree and a process's memory: releases of packages, their folders, and
    Python's release.
    """
    values = {"python": platform.python_version(), "system": sys.platform, "trimtab": __version__}
    for package in PACKAGES:
        values[package] = version_of(package) or "missing"
        values[f"{package} folder"] = str(_folder(package))
    build = torch_build()
    return values | {"torch build": str(build)}
