"""What are the public names of the library, imported without torch until the first `plan` or `load`?

>>> import trimtab
>>> plan = trimtab.plan("demo", adapters=["demo/style"], device="cpu")  # a small model that is part of trimtab
>>> with trimtab.load(plan) as model:
...     answer = model.answer("hello", adapter="style", max_new_tokens=4)
...     chat = model.chat(adapter="style", max_new_tokens=4)
...     sent = chat.send("hello")
>>> answer.finish_reason, len(answer.token_ids), answer.text == sent.text, len(chat.turns)
('length', 4, True, 2)
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
from trimtab.planning.plan.plan import Plan
from trimtab.process import phases
from trimtab.request import AnswerOptions, GenerateRequest, LoadRequest

sys.meta_path.insert(0, FormerNames())

if TYPE_CHECKING:
    from trimtab import bridge
    from trimtab.engine.batch.generate import Answer, TokenLogprob
    from trimtab.engine.calls.conversation import Conversation, Turn
    from trimtab.engine.model import LoadedModel
    from trimtab.merging.merge import merge
    from trimtab.merging.report import MergeReport
    from trimtab.verification.render.report import ParityReport
    from trimtab.verification.verify import verify

# Names whose modules import torch, or much else: imported at their first use.
_LATE = {
    "Answer": "trimtab.engine.batch.generate", "Conversation": "trimtab.engine.calls.conversation",
    "LoadedModel": "trimtab.engine.model", "MergeReport": "trimtab.merging.report",
    "ParityReport": "trimtab.verification.render.report", "TokenLogprob": "trimtab.engine.batch.generate",
    "Turn": "trimtab.engine.calls.conversation", "merge": "trimtab.merging.merge", "verify": "trimtab.verification.verify",
}  # fmt: skip

__all__ = [
    "AdapterError", "Answer", "AnswerOptions", "CheckpointError", "Conversation", "DeviceError", "DoesNotFitError",
    "GenerateRequest", "LoadRequest", "LoadedModel", "MergeReport", "ParityError", "ParityReport", "Plan", "RequestError",
    "TokenLogprob", "TrimtabError", "Turn", "UpstreamError", "__version__", "bridge", "inspect", "load", "merge", "plan", "verify",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    import importlib

    if name in _LATE:
        phases.begin_imports()
        return getattr(importlib.import_module(_LATE[name]), name)
    if name == "bridge":
        return importlib.import_module("trimtab.bridge")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}", name=name, obj=sys.modules[__name__])


def __dir__() -> list[str]:
    return sorted(__all__)
