"""Which packages does one interpreter have, how was each installed, and which GPUs does its torch see?"""

from __future__ import annotations

import importlib
import json
import platform
import sys
from collections.abc import Callable, Mapping
from importlib import metadata
from typing import Any

PACKAGES = (
    "torch", "transformers", "accelerate", "peft", "bitsandbytes", "safetensors", "huggingface_hub", "triton",
    "torchvision", "timm", "torchao",
)  # fmt: skip
# The same module under another distribution name: ROCm and Windows builds.
OTHER_NAMES: Mapping[str, tuple[str, ...]] = {"triton": ("pytorch-triton", "triton-windows", "pytorch-triton-rocm")}


def main(request: Mapping[str, Any], emit: Callable[[dict[str, Any]], None]) -> None:
    """Report the interpreter's packages, then its torch with the GPUs; if torch crashes, the packages remain. It runs in a separate
    process, so that reading a GPU leaves no CUDA context, and needs only the standard library."""
    version = ".".join(str(number) for number in sys.version_info[:3])
    emit({
        "python": {"version": version, "implementation": platform.python_implementation()},
        "packages": {name: read_package(name) for name in PACKAGES},
    })  # fmt: skip
    emit({"torch": read_torch()})


def read_package(name: str) -> dict[str, Any]:
    """Return {"version", "installed"} of a distribution; both None if it is not installed."""
    for spelled in (name, *OTHER_NAMES.get(name, ())):
        try:
            distribution = metadata.distribution(spelled)
        except metadata.PackageNotFoundError:
            continue
        return {"version": distribution.version, "installed": how_installed(distribution)}
    return {"version": None, "installed": None}


def how_installed(distribution: metadata.Distribution) -> str:
    """Return the kind of an installation, as text.

    Source: PEP 610 (direct_url.json: written for every installation not from an index by name) and PEP 376 (INSTALLER).
    """
    installer = (distribution.read_text("INSTALLER") or "").strip().split("\n")[0][:20] or "unknown installer"
    direct = distribution.read_text("direct_url.json")
    if direct is None:
        return "conda" if installer == "conda" else f"index, {installer}"
    try:
        origin = json.loads(direct)
        assert isinstance(origin, dict)
    except (ValueError, AssertionError):
        return f"unreadable direct_url.json, {installer}"
    if vcs := origin.get("vcs_info"):
        commit = str(vcs.get("commit_id", ""))[:12]
        return f"{vcs.get('vcs', 'VCS')} {commit}, {installer}".replace(" ,", ",")
    if (folder := origin.get("dir_info")) is not None:
        return f"{'editable' if folder.get('editable') else 'local folder'}, {installer}"
    is_file = str(origin.get("url", "")).startswith("file:")
    return f"{'local file' if is_file else 'file from an address'}, {installer}"


def read_torch() -> dict[str, Any]:
    """Return torch's build and the GPUs that it reports."""
    try:
        torch: Any = importlib.import_module("torch")
    except Exception as exc:  # a missing library, a wrong architecture: its import can raise any exception
        return {"error": None if isinstance(exc, ModuleNotFoundError) else type(exc).__name__, "gpus": []}
    values: dict[str, Any] = {
        "error": None, "cuda": torch.version.cuda, "hip": getattr(torch.version, "hip", None),
        "cpu_capability": str(torch.backends.cpu.get_cpu_capability()), "threads": torch.get_num_threads(),
    }  # fmt: skip
    try:
        return values | {"gpus": _gpus(torch)}
    except Exception as exc:  # a driver that does not match the build
        return values | {"error": type(exc).__name__, "gpus": []}


def _gpus(torch: Any) -> list[dict[str, Any]]:
    if not torch.cuda.is_available():
        return []
    gpus = []
    for index in range(torch.cuda.device_count()):
        free, total = torch.cuda.mem_get_info(index)
        about = torch.cuda.get_device_properties(index)
        gpus.append({
            "index": index, "name": about.name, "total_bytes": total, "free_bytes": free,
            "compute_capability": f"{about.major}.{about.minor}",
        })  # fmt: skip
    return gpus
