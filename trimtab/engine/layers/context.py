"""The model as the rooms of the engine see it: they read it, and none of them writes to it."""

from __future__ import annotations

from typing import Protocol

from trimtab.checkpoint.anatomy import Anatomy
from trimtab.engine.formats.hf_types import PlacedModel
from trimtab.engine.layers.leaves import UnpackedWeights
from trimtab.engine.lora.store import AdapterStore
from trimtab.engine.tiers.streaming import Streamer


class EngineContext(PlacedModel, Protocol):
    """A loaded model as its steps, chunks and towers see it. Each property says what is so now: a closed model has no modules.

    hf_model: transformers' module tree. streamer: copies streamed blocks, None without any. unpacked: weights kept dequantized.
    """

    @property
    def anatomy(self) -> Anatomy: ...

    @property
    def adapters(self) -> tuple[str, ...]: ...

    @property
    def adapter_store(self) -> AdapterStore: ...

    @property
    def streamer(self) -> Streamer | None: ...

    @property
    def unpacked(self) -> UnpackedWeights | None: ...
