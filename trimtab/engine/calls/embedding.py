"""The embedding of a text: its last hidden state, pooled and scaled to length 1, while other requests run.

The states are those behind the final norm, which the output head reads. "last" takes the last token's, "mean" the average of all in
float32. A prompt is computed in the chunks that the plan counts for prompts, with an adapter as usual.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from trimtab.engine.chat.prompt import check_fits
from trimtab.engine.kv.sequence import Inputs
from trimtab.engine.prefill.stock_pass import TextPass
from trimtab.errors import DeviceError

if TYPE_CHECKING:
    from trimtab.engine.calls.asked_model import AskedModel


class Embedding(TextPass):
    """One text in progress: `step` until it returns True, then `pooled`, `unit` or `vector`.

    inputs: without media. Errors: RequestError for a text longer than the context.
    """

    def __init__(self, model: AskedModel, inputs: Inputs, *, adapter: str | None = None, pooling: str = "last") -> None:
        check_fits(model, inputs, 0)
        super().__init__(model, inputs, adapter)
        self._pooling = pooling
        self._sum: Tensor | None = None  # [D] float32

    def step(self, most_tokens: int | None = None) -> bool:
        """Compute the next chunk, of at most `most_tokens`; True when it was the last. Errors: DeviceError for
        states that are no numbers."""
        chunk = self._model.prefill_tokens or self.prompt_tokens
        hf_model = self._model.hf_model
        inner = hf_model.get_submodule("model") if hf_model.base_model is hf_model else hf_model.base_model
        states = self._next(inner, min(chunk, most_tokens or chunk)).last_hidden_state
        added = states[0, -1].float() if self._pooling == "last" else states[0].float().sum(0)
        self._sum = added if self._sum is None or self._pooling == "last" else self._sum + added
        return self._done == self.prompt_tokens

    @property
    def pooled(self) -> Tensor:
        """The pooled hidden state, [D] float32 on the model's device."""
        assert self._sum is not None
        return self._sum if self._pooling == "last" else self._sum / self.prompt_tokens

    @property
    def unit(self) -> Tensor:
        """The same with length 1. Errors: DeviceError for states that are no numbers."""
        pooled = self.pooled
        length = torch.linalg.vector_norm(pooled)
        if not torch.isfinite(length) or not length > 0:
            raise DeviceError("the hidden states are NaN or infinite", device=str(pooled.device))
        return pooled / length

    @property
    def vector(self) -> list[float]:
        """`unit` as D numbers."""
        numbers: list[float] = self.unit.tolist()
        return numbers
