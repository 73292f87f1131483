"""Log-probabilities of a prompt's own tokens, each given those before it, while other requests run.

The prompt is computed in short pieces: the logits of every position take room that a plan counts for one. The pieces do not depend
on other requests, so neither do the numbers.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from trimtab.engine.batch.request import check_logits
from trimtab.engine.kv.sequence import Inputs
from trimtab.engine.prefill.stock_pass import TextPass
from trimtab.errors import RequestError

if TYPE_CHECKING:
    from trimtab.engine.batch.request import Prompt
    from trimtab.engine.calls.asked_model import AskedModel

# Positions whose logits are in memory at a time: 16 MiB in float32 for a vocabulary of 262,144.
PIECE_TOKENS = 16


class PromptScores(TextPass):
    """The log-probabilities of one prompt: call `step` until it returns True; read `scores`, or `take` the scores of each step.

    top: the number of most likely tokens for each position. scores: for each token of the prompt but the first, {token id:
    (logprob, rank)} of the token and of the most likely ones. A rank of 1 is the most likely. Errors: RequestError for a prompt
    with media, whose tokens are not text.
    """

    def __init__(self, model: AskedModel, inputs: Inputs, *, adapter: str | None, top: int) -> None:
        if inputs.has_media:
            raise RequestError("not supported: prompt_logprobs of images and audio", field="prompt_logprobs")
        super().__init__(model, model.hf_model, inputs, adapter)
        self._top = top
        self._logits: Tensor | None = None  # of the last token [V]
        self.scores: list[dict[int, tuple[float, int]]] = []

    def take(self) -> list[dict[int, tuple[float, int]]]:
        """Return the scores that no call has returned yet."""
        found, self.scores = self.scores, []
        return found

    def hand_over(self, prompt: Prompt) -> None:
        """Let a prompt of the same tokens, of which nothing is computed, be complete: its keys, values and logits are known."""
        prompt.take_states(self._done, logits=self._logits, cache=self._cache)

    def step(self) -> bool:
        """Compute the next piece; True when it was the last. Errors: DeviceError for logits that are no numbers."""
        start = self._done
        logits = self._next(PIECE_TOKENS).logits[0]
        end = self._done
        check_logits(logits, adapter=self.adapter)
        following = self._inputs.token_ids[start + 1 : end + 1]
        self._add(torch.log_softmax(logits[: len(following)].float(), dim=-1), following)
        if end == self.prompt_tokens:
            self._logits = logits[-1].float()
        return end == self.prompt_tokens

    def _add(self, logprobs: Tensor, following: tuple[int, ...]) -> None:
        # The numbers of all rows are read at once: each read waits for the device.
        own = logprobs.gather(1, torch.tensor(following, dtype=torch.long, device=logprobs.device)[:, None])
        ranks = (logprobs > own).sum(dim=1) + 1
        values, ids = logprobs.topk(self._top) if self._top else (logprobs[:, :0], logprobs[:, :0].long())
        rows = zip(following, own[:, 0].tolist(), ranks.tolist(), values.tolist(), ids.tolist(), strict=True)
        for token, logprob, rank, top_values, top_ids in rows:
            top = {one: (value, place + 1) for place, (one, value) in enumerate(zip(top_ids, top_values, strict=True))}
            self.scores.append({token: (logprob, rank), **top})
