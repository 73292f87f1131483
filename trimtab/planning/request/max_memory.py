"""Which budgets does a `max_memory` in transformers' form give?"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from trimtab.errors import RequestError
from trimtab.planning.values.cards import check_budget, find_card
from trimtab.request import parse_bytes

FIELD = "max_memory"
_GPU = re.compile(r"(?:cuda:)?(\d{1,3})|cuda")
_ZERO = re.compile(r"0+(?:\.0*)?\s*(?:[KMG]?i?B)?", re.IGNORECASE)
# accelerate reads a small "b" as bits: "4Gb" is 0.5 GB there.
_BITS = re.compile(r"\s*[\d.]+\s*[KMGkmg][iI]?b\s*")


@dataclass(frozen=True, kw_only=True)
class MemoryBudgets:
    """The budgets of a max_memory. device: "cuda:N" or "cpu"; None is the machine's free memory."""

    device: str
    gpu_memory_bytes: int | None = None
    host_memory_bytes: int | None = None
    disk_memory_bytes: int | None = None


def read_max_memory(max_memory: Any) -> MemoryBudgets:
    """Return the budgets of a max_memory in transformers' form.

    max_memory: such as {0: "4GiB", "cpu": "16GiB", "disk": "64GiB"}. Without an entry for a GPU, the CPU computes; without one for
    host memory or disk, all free bytes may be used. Errors: RequestError for another type, unknown devices, several GPUs, a
    repeated device, and invalid sizes.
    """
    if not isinstance(max_memory, Mapping) or not max_memory:
        raise RequestError(
            "must set a size for at least one device", field=FIELD, value=max_memory,
            allowed=('{0: "4GiB", "cpu": "16GiB"}',),
        )  # fmt: skip
    sizes: dict[str, int] = {}
    for key, value in max_memory.items():
        device = _device(key)
        if device in sizes:
            raise RequestError(f"{device} is named twice", field=f"{FIELD}[{key!r}]", value=value)
        sizes[device] = _size(key, value)
    gpus = sorted(device for device in sizes if device.startswith("cuda"))
    if len(gpus) > 1:
        raise RequestError(
            f"names {len(gpus)} GPUs ({', '.join(gpus)}); the model runs on one", field=FIELD, value=dict(max_memory),
            allowed=gpus, hint="Keep one GPU; the rest of the model goes to host memory and disk",
        )  # fmt: skip
    if not gpus and "cpu" not in sizes:
        raise RequestError(
            "names no device that can compute", field=FIELD, value=dict(max_memory), allowed=("0", "cpu"),
            hint="Add a GPU or cpu",
        )  # fmt: skip
    return MemoryBudgets(
        device=gpus[0] if gpus else "cpu", gpu_memory_bytes=sizes[gpus[0]] if gpus else None,
        host_memory_bytes=sizes.get("cpu"), disk_memory_bytes=sizes.get("disk"),
    )  # fmt: skip


def merged_budgets(
    max_memory: Any, *, gpu_memory_bytes: int | None, host_memory_bytes: int | None, device: str, card: str | None = None
) -> dict[str, Any]:  # fmt: skip
    """Return the fields of LoadRequest that a max_memory sets, and the separately given ones where it has no entry.

    card: the name of the card that the plan is for. Errors: RequestError as `read_max_memory`, for a budget or device
    that is set twice, and for more memory than the card has.
    """
    budgets = read_max_memory(max_memory)
    if card is not None:
        profile = find_card(card)
        if budgets.device != "cuda:0":
            raise RequestError(
                f"names {budgets.device}, and a plan for {profile.title} computes on that card, cuda:0", field=FIELD,
                value=dict(max_memory), allowed=("0", "cuda:0"), hint="Add a size for it",
            )  # fmt: skip
        check_budget(profile, budgets.gpu_memory_bytes, field=FIELD)
    given = (
        ("gpu_memory", gpu_memory_bytes, budgets.gpu_memory_bytes), ("host_memory", host_memory_bytes, budgets.host_memory_bytes)
    )  # fmt: skip
    for name, value, other in given:
        if value is not None and (other is not None or (name == "gpu_memory" and budgets.device == "cpu")):
            raise RequestError(
                f"max_memory and {name} both set a budget", field=FIELD, value=dict(max_memory), hint="Give one of them"
            )
    if device not in ("auto", budgets.device) and not (device == "cuda" and budgets.device == "cuda:0"):
        raise RequestError(f"names {budgets.device}, device is {device}", field=FIELD, value=dict(max_memory), allowed=(device,))
    return {
        "gpu_memory_bytes": gpu_memory_bytes if budgets.gpu_memory_bytes is None else budgets.gpu_memory_bytes,
        "host_memory_bytes": host_memory_bytes if budgets.host_memory_bytes is None else budgets.host_memory_bytes,
        "device": budgets.device,
        "disk_memory_bytes": budgets.disk_memory_bytes,
    }  # fmt: skip


def device_refusal(exc: RequestError, max_memory: Mapping[Any, Any]) -> RequestError:
    """Return the refusal of the device that a max_memory chose, with the key that names it there."""
    value = next((key for key in max_memory if _device(key) == exc.value), exc.value)
    allowed = [one.removeprefix("cuda:") for one in exc.allowed if one != "auto"]
    return RequestError(exc.reason, field=FIELD, value=value, allowed=allowed, hint=exc.hint)


def _device(key: Any) -> str:
    text = str(key).strip()
    gpu = _GPU.fullmatch(text)
    if isinstance(key, bool) or not isinstance(key, (int, str)) or (gpu is None and text not in ("cpu", "disk")):
        raise RequestError(
            "no device has this name", field=FIELD, value=text[:60],
            allowed=("0", "cuda:0", "cpu", "disk"),
        )  # fmt: skip
    return text if gpu is None else f"cuda:{int(gpu.group(1) or 0)}"


def _size(key: Any, value: Any) -> int:
    where = f"{FIELD}[{key!r}]"
    if isinstance(value, str) and _BITS.fullmatch(value):
        raise RequestError(
            "a small b means bits in transformers' form", field=where, value=value, allowed=("4GB", "4GiB"),
            hint="Write B for bytes",
        )  # fmt: skip
    if isinstance(value, bool) or not isinstance(value, (int, float, str)):
        raise RequestError("not a size", field=where, value=value, allowed=("4GiB", "500MB", "a whole number of bytes"))
    if value == 0 or (isinstance(value, str) and _ZERO.fullmatch(value.strip())):
        hint = "Omit a GPU that is not used" if _device(key).startswith("cuda") else ""
        raise RequestError("a size must be above zero", field=where, value=value, hint=hint)
    size = parse_bytes(value, field_name=where)
    assert size is not None  # None only for None
    return size
