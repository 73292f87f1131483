"""Which releases of packages are installed, read without importing them?"""

from __future__ import annotations

import os
import platform
import re
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path

from trimtab._version import __version__
from trimtab.errors import RequestError

# Packages of the stock stack other than torch and transformers, which this package always needs.
STOCK = ("accelerate", "bitsandbytes", "peft")
# Packages whose versions can change the answers of a comparison.
STACK = ("torch", "transformers", "peft", "bitsandbytes", "accelerate", "safetensors")
# Packages that decide a module tree and a process's memory.
DECIDING = ("torch", "transformers", "bitsandbytes")


def versions_of(names: Sequence[str]) -> dict[str, str]:
    """Return package -> version of the installed packages. Nothing is imported."""
    kept = {}
    for name in names:
        try:
            kept[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return kept


def version_of(name: str) -> str | None:
    """Return the version of an installed package, None if it is not installed."""
    return versions_of((name,)).get(name)


def stack_versions() -> dict[str, str]:
    """Return package -> installed version of STACK; "not installed" where there is none."""
    return dict.fromkeys(STACK, "not installed") | versions_of(STACK)


def missing(names: Sequence[str]) -> tuple[str, ...]:
    """Return the packages that cannot be imported. Nothing is imported."""
    return tuple(name for name in names if not _is_installed(name))


def check_installed(names: Sequence[str], *, field: str, value: str) -> None:
    """Raise RequestError if one of them is not installed, before any work that needs it."""
    absent = missing(names)
    if absent:
        raise RequestError(
            f"needs {' and '.join(absent)}, which {'is' if len(absent) == 1 else 'are'} not installed",
            field=field, value=value, hint=install_command(absent),
        )  # fmt: skip


def install_command(names: Sequence[str]) -> str:
    """Return the command that installs packages in the environment of this package."""
    return f"pip install {' '.join(names)}"


def _is_installed(name: str) -> bool:
    try:
        return find_spec(name) is not None
    except (ImportError, ValueError):
        return False


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
    spec = find_spec(package)
    return None if spec is None or spec.origin is None else Path(spec.origin).parent


@cache
def deciding_versions() -> dict[str, str]:
    """Return the values that decide a module tree and a process's memory: releases of packages, their folders, and Python's
    release."""
    values = {"python": platform.python_version(), "system": sys.platform, "trimtab": __version__}
    for package in DECIDING:
        values[package] = version_of(package) or "missing"
        values[f"{package} folder"] = str(_folder(package))
    build = torch_build()
    return values | {"torch build": str(build)}


@contextmanager
def switch(name: str) -> Iterator[None]:
    """Set a package's environment variable to 1, and what it was afterwards."""
    before = os.environ.get(name)
    os.environ[name] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before
