"""Package releases of a comparison, from the installed packages' metadata, without importing them."""

from __future__ import annotations

from trimtab.packages import versions_of

NAMES = ("torch", "transformers", "peft", "bitsandbytes", "accelerate", "safetensors")


def versions() -> dict[str, str]:
    """Return package -> installed version; "not installed" where there is none."""
    return dict.fromkeys(NAMES, "not installed") | versions_of(NAMES)
