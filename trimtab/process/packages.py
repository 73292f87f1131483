"""Which packages are installed? An error names each missing package on one line, with the command that installs it."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import metadata
from importlib.util import find_spec

from trimtab.errors import RequestError

# Packages of the stock stack other than torch and transformers, which this package always needs.
STOCK = ("accelerate", "bitsandbytes", "peft")
# Packages whose versions can change the answers of a comparison.
STACK = ("torch", "transformers", "peft", "bitsandbytes", "accelerate", "safetensors")


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
