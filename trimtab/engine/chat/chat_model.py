"""The model as its prompts see it: types alone."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    import torch

    from trimtab.engine.chat.control_tokens import ControlTokens
    from trimtab.engine.formats.hf_types import HFModel
    from trimtab.planning import Plan


class HasContext(Protocol):
    """A model with a planned context."""

    @property
    def context_tokens(self) -> int: ...


class ChatModel(Protocol):
    """A model as its prompts see it. processor: its tokenizer if it only reads. processor_folder: where the files of both are."""

    @property
    def plan(self) -> Plan: ...

    @property
    def hf_model(self) -> HFModel: ...

    @property
    def device(self) -> torch.device: ...

    @property
    def dtype(self) -> torch.dtype: ...

    @property
    def processor(self) -> Any: ...

    @property
    def processor_folder(self) -> Path: ...

    @property
    def control_tokens(self) -> ControlTokens: ...
