"""What is read of a text's pass in place of an answer: its embedding, its tokens' log-probabilities, its hidden states?"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from trimtab.engine.batch.request import check_logits
from trimtab.engine.chat import prompt as chat
from trimtab.engine.chat.prompt import check_fits
from trimtab.engine.formats.int8_head import MAX_ROWS
from trimtab.engine.kv.sequence import Inputs
from trimtab.engine.prefill.rows import returns_states
from trimtab.engine.prefill.stock_pass import TextPass, whole_pass
from trimtab.errors import DeviceError, RequestError
from trimtab.request import GenerateRequest, check_choice

if TYPE_CHECKING:
    from trimtab.engine.batch.batch import Batch
    from trimtab.engine.batch.request import Prompt
    from trimtab.engine.calls.asked_model import AskedModel, Chosen


class Embedding(TextPass):
    """One text in progress: `step` until it returns True, then `pooled` or `unit`.

    inputs: without media. batch: whose captured chunks compute the text where they can, as `prompt`; not while another prompt has
    their row. The states are those behind the final norm, which the output head reads. Errors: RequestError for a text longer than
    the context.
    """

    def __init__(
        self, model: AskedModel, inputs: Inputs, *, adapter: str | None = None, pooling: str = "last", batch: Batch | None = None
    ) -> None:
        check_fits(model, inputs, 0)
        hf_model = model.hf_model
        # Llama 4 names its model otherwise; a class without a head is its own.
        is_own = hf_model.base_model is hf_model and model.anatomy.answers_unsupported is None
        super().__init__(model, hf_model.get_submodule("model") if is_own else hf_model.base_model, inputs, adapter)
        self._pooling = pooling
        self._sum: Tensor | None = None  # [D] float32
        self.prompt: Prompt | None = None
        if batch is not None and returns_states(batch, inputs):
            self.prompt = batch.begin(inputs, GenerateRequest(max_new_tokens=1), client=None, returns_states=True)

    def step(self, most_tokens: int | None = None) -> bool:
        """Compute the next chunk, of at most `most_tokens` where transformers' passes do; True when it was the last."""
        chunk = self._model.prefill_tokens or self.prompt_tokens
        if self.prompt is not None and not self.prompt.done_tokens:
            self._sum = None  # it may have lost the row
            if not returns_states(self.prompt.batch, self._inputs):  # an adapter that came since replaces norms
                self.prompt, self._done = None, 0
        if (prompt := self.prompt) is None:
            states = self._next(min(chunk, most_tokens or chunk)).last_hidden_state[0]
        else:
            prompt.row.use_adapter(self.adapter)
            if prompt.step():
                prompt.batch.prompts.release(prompt)
                prompt.batch.pages.forget(prompt.row)
            states, self._done = prompt.states, prompt.done_tokens
        added = states[-1].to(torch.float32, copy=True) if self._pooling == "last" else states.float().sum(0)
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


POOLINGS = ("last", "mean")


def embed(model: AskedModel, texts: Sequence[object], *, adapter: Chosen, pooling: str, normalize: bool) -> Tensor:
    """Return [N, D] float32 on the CPU; see `LoadedModel.embed`. One text at a time: no padding, no rounding by neighbours."""
    check_choice(pooling, POOLINGS, field_name="pooling")
    if isinstance(texts, str) or chat.is_token_ids(texts):
        raise RequestError("is a string; pass a list of strings", field="texts")
    vectors = []
    for text in texts:
        inputs = _plain(model, text)
        with model.answering(adapter):
            embedding = Embedding(model, inputs, adapter=model.adapter_name(adapter), pooling=pooling, batch=_batch(model))
            while not embedding.step():
                pass
            vectors.append((embedding.unit if normalize else embedding.pooled).cpu())
    if not vectors:
        raise RequestError("holds no text", field="texts")
    return torch.stack(vectors)


def _batch(model: AskedModel) -> Batch | None:
    """Return an idle batch with captured chunks, None without one."""
    has_chunks = model.device.type == "cuda" and model.plan.execution.prompt.chunks and not model.anatomy.answers_unsupported
    batch = model.kept.batch or (model.rows() if has_chunks else None)
    if batch is not None:
        batch.prompts.evict(batch.cache.prompt_row, None)  # of a call that failed
    return batch


def _plain(model: AskedModel, text: object) -> Inputs:
    """Return the inputs of a text as it is, with the tokenizer's own first token; of token ids as they are."""
    if isinstance(text, str):
        if not text.strip():
            raise RequestError("a text is empty", field="texts")
        tokenizer = getattr(model.processor, "tokenizer", model.processor)
        with model.preparing:
            text = tokenizer(text, add_special_tokens=True)["input_ids"]
    if not chat.is_token_ids(text):
        raise RequestError("is neither a text nor token ids", field="texts", value=type(text).__name__)
    inputs: Inputs = model.prepare(list(text))
    return inputs


def hidden_states(model: AskedModel, prompt: object, *, adapter: Chosen, **media: Any) -> Tensor:
    """Return [layers + 1, S, D] float32 on the CPU; see `LoadedModel.hidden_states`. Errors: RequestError for a family that
    projects its last state to another width."""
    inputs = model.prepare(prompt, **media)
    with model.answering(adapter):
        states = whole_pass(model, inputs, output_hidden_states=True, logits_to_keep=1).hidden_states
    widths = sorted({int(state.shape[-1]) for state in states})
    if len(widths) > 1:
        raise RequestError(f"this family's states have different widths: {widths}", field="hidden_states")
    return torch.stack([state[0].float().cpu() for state in states])


# Positions whose logits are in memory at a time: 16 MiB in float32 for a vocabulary of 262,144.
PIECE_TOKENS = 16


class PromptScores(TextPass):
    """The log-probabilities of one prompt: call `step` until it returns True, or `read` behind each chunk of a prompt that returns
    states; read `scores`, or `take` the scores of each step.

    top: the number of most likely tokens for each position. scores: for each token of the prompt but the first, {token id:
    (logprob, rank)} of the token and of the most likely ones. A rank of 1 is the most likely. Errors: RequestError for a prompt
    with media, whose tokens are not text. The logits of each position take room that a plan counts for one, so they are computed in
    short pieces, which do not depend on other requests.
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
        self._score(logits, start)
        if self._done == self.prompt_tokens:
            self._logits = logits[-1].float()
        return self._done == self.prompt_tokens

    def read(self, prompt: Prompt) -> None:
        """Score the tokens of a prompt's last chunk; with its last one the prompt gets its logits. Errors: as `step`."""
        prompts = prompt.batch.prompts
        assert prompt.states is not None
        known = self._done - (prompt.done_tokens - len(prompt.states))  # of a prompt that started again
        if known >= len(prompt.states):
            return
        rows = MAX_ROWS if self._model.plan.execution.head == "int8" else PIECE_TOKENS
        with prompts.head_ops(), nullcontext() if prompts.room is None else prompts.room.using():
            for piece in prompt.states[known:].split(rows):
                logits = prompts.chunk_forward().logits_of(piece)
                self._score(logits, self._done)
                self._done += len(piece)
        if self._done == self.prompt_tokens:
            prompt.read_logits(logits[-1].to(torch.float32, copy=True))
        del logits
        if prompts.room is not None:
            prompts.room.check()

    def _score(self, logits: Tensor, start: int) -> None:
        """Add the scores of the tokens behind `start`. logits: [n, V]."""
        check_logits(logits, adapter=self.adapter)
        following = self._inputs.token_ids[start + 1 : start + 1 + len(logits)]
        self._add(torch.log_softmax(logits[: len(following)].float(), dim=-1), following)

    def _add(self, logprobs: Tensor, following: tuple[int, ...]) -> None:
        # The numbers of all rows are read at once: each read waits for the device.
        own = logprobs.gather(1, torch.tensor(following, dtype=torch.long, device=logprobs.device)[:, None])
        ranks = (logprobs > own).sum(dim=1) + 1
        values, ids = logprobs.topk(self._top) if self._top else (logprobs[:, :0], logprobs[:, :0].long())
        rows = zip(following, own[:, 0].tolist(), ranks.tolist(), values.tolist(), ids.tolist(), strict=True)
        for token, logprob, rank, top_values, top_ids in rows:
            top = {one: (value, place + 1) for place, (one, value) in enumerate(zip(top_ids, top_values, strict=True))}
            self.scores.append({token: (logprob, rank), **top})
