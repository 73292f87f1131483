"""Which releases a proof was made with; asks the installed packages' metadata, imports none of them."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

NAMES = ("torch", "transformers", "peft", "bitsandbytes", "accelerate", "safetensors")


def versions() -> dict[str, str]:
    """Return package -> installed version; "not installed" where there is none."""
    found = {}
    for name in NAMES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = "not installed"
    return found
