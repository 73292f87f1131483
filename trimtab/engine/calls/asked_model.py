"""A loaded model as its callers see it: types alone."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Protocol, TypeAlias

from trimtab.engine.batch.batch import BatchModel
from trimtab.engine.chat.control_tokens import ChatModel

if TYPE_CHECKING:
    from trimtab.adapters.adapter import AdapterSpec
    from trimtab.engine.batch.batch import Batch
    from trimtab.engine.batch.kept_batch import KeptBatch
    from trimtab.engine.kv.sequence import Inputs
    from trimtab.engine.lora.mixes import Mixes
    from trimtab.request import GenerateRequest

# Which adapter answers: a name, None for the base, or name -> weight for a weighted sum of several.
Chosen: TypeAlias = "str | Mapping[str, float] | None"


class AskedModel(BatchModel, ChatModel, Protocol):
    """A loaded model as its callers see it. kept: its batch between calls."""

    kept: KeptBatch

    @property
    def exchanging(self) -> AbstractContextManager[object]: ...

    @property
    def preparing(self) -> AbstractContextManager[object]: ...

    @property
    def mixes(self) -> Mixes: ...

    def adapter_spec(self, name: str, /) -> AdapterSpec: ...

    def check_tokens(self, request: GenerateRequest, /) -> None: ...

    def prepare(
        self, prompt: object, /, *, image: object = ..., audio: object = ..., system: str | None = ...,
        template_kwargs: Mapping[str, object] | None = ...,
    ) -> Inputs: ...  # fmt: skip

    def question(self, prompt: object, options: Mapping[str, object], /) -> tuple[Inputs, GenerateRequest, Chosen]: ...

    def rows(self) -> Batch | None: ...

    def answering(self, adapter: Chosen, /) -> AbstractContextManager[None]: ...

    def adapter_name(self, adapter: Chosen, in_use: Collection[str | None] = ..., /) -> str | None: ...

    def check_adapter(self, name: Chosen, /) -> None: ...
