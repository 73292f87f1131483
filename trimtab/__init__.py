"""What a user of the library may name. Importing trimtab imports no torch: that is loaded by the first `plan` or `load`.

`trimtab.plan` is the function. The folder of the same name is reached as `from trimtab.plan import ...`: its import is
done here first, so that it never hides the function later.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from trimtab.api import inspect, load, plan
from trimtab.errors import (
    AdapterError,
    CheckpointError,
    DeviceError,
    DoesNotFitError,
    ParityError,
    RequestError,
    TrimtabError,
    UpstreamError,
)
from trimtab.plan.plan import Plan
from trimtab.request import GenerateRequest, LoadRequest

if TYPE_CHECKING:
    from trimtab.runtime.model import LoadedModel

__version__ = "0.1.0"

__all__ = [
    "AdapterError",
    "CheckpointError",
    "DeviceError",
    "DoesNotFitError",
    "GenerateRequest",
    "LoadRequest",
    "LoadedModel",
    "ParityError",
    "Plan",
    "RequestError",
    "TrimtabError",
    "UpstreamError",
    "__version__",
    "inspect",
    "load",
    "plan",
]


def __getattr__(name: str) -> Any:
    if name == "LoadedModel":
        from trimtab.runtime.model import LoadedModel

        return LoadedModel
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
