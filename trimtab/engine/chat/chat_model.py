"""The model as its prompts see it: types alone."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from trimtab.engine.layers.context import PlacedModel

if TYPE_CHECKING:
    from trimtab.engine.chat.control_tokens import ControlTokens


class HasContext(Protocol):
    """A model with a planned context."""

    @property
    def context_tokens(self) -> int: ...


class ChatModel(PlacedModel, Protocol):
    """A model as its prompts see it. processor: its tokenizer if it only reads. processor_folder: where the files of both are."""

    @property
    def processor(self) -> Any: ...

    @property
    def processor_folder(self) -> Path: ...

    @property
    def control_tokens(self) -> ControlTokens: ...
