"""The public names of the library. Importing trimtab imports no torch: the first `plan` or `load` does.

`trimtab.plan` and `trimtab.merge` are functions. `trimtab.bridge` is the package of that name. Modules that were
renamed in 0.2.0 can still be imported by their former names (former_names.py).
"""

# ruff: noqa: E402
# First, without reading a file: Ctrl-C is deferred until the next import can handle it.
import _signal  # type: ignore[import-not-found]

_mask = _signal.pthread_sigmask(_signal.SIG_BLOCK, {_signal.SIGINT}) if hasattr(_signal, "pthread_sigmask") else None

from trimtab.process import interrupts

interrupts.end_at_once()  # until a command begins; other programs are not affected
if _mask is not None:
    _signal.pthread_sigmask(_signal.SIG_SETMASK, _mask)

import sys
from typing import TYPE_CHECKING, Any

from trimtab._version import __version__
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
from trimtab.former_names import FormerNames
from trimtab.merging.merge import merge
from trimtab.planning.plan.plan import Plan
from trimtab.request import GenerateRequest, LoadRequest

sys.meta_path.insert(0, FormerNames())

if TYPE_CHECKING:
    from trimtab import bridge
    from trimtab.engine.model import LoadedModel
    from trimtab.verification.verify import verify

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
    "bridge",
    "inspect",
    "load",
    "merge",
    "plan",
    "verify",
]


def __getattr__(name: str) -> Any:
    if name == "LoadedModel":
        from trimtab.engine.model import LoadedModel

        return LoadedModel
    if name == "verify":
        from trimtab.verification.verify import verify

        return verify
    if name == "bridge":
        import importlib

        return importlib.import_module("trimtab.bridge")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
