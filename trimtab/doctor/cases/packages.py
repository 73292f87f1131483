"""Which packages does an interpreter have, and does its torch find a GPU?"""

from __future__ import annotations

import importlib.util
import platform
from collections.abc import Callable, Mapping
from typing import Any

from trimtab.process.packages import versions_of

NEEDED = ("torch", "transformers", "accelerate", "peft", "bitsandbytes", "safetensors", "numpy", "PIL")
VERSIONED = ("torch", "transformers", "accelerate", "peft", "bitsandbytes", "safetensors", "tokenizers", "numpy")


def main(request: Mapping[str, Any], emit: Callable[[dict[str, Any]], None]) -> None:
    """Report the versions of this interpreter's packages, the missing ones, and whether there is a GPU."""
    missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    has_gpu = False
    if not missing:
        import torch

        has_gpu = torch.cuda.is_available()
    emit({"versions": versions(), "missing": missing, "has_gpu": has_gpu})


def versions() -> dict[str, str]:
    """Return the installed versions, by package, Python's own included."""
    return {"python": platform.python_version()} | versions_of(VERSIONED)
