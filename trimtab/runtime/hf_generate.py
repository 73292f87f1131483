"""How tokens are drawn: transformers' own generation, asked with this request's values and nothing of the file's."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import transformers
from torch import Tensor

from trimtab.request import GenerateRequest


def end_token_ids(model: Any) -> tuple[int, ...]:
    """Return every token id that ends an answer, from the generation config or else the model's config."""
    found = getattr(model.generation_config, "eos_token_id", None)
    if found is None:
        found = getattr(model.config.get_text_config(), "eos_token_id", None)
    if found is None:
        return ()
    return tuple(int(token) for token in found) if isinstance(found, (list, tuple)) else (int(found),)


class _Over(transformers.StoppingCriteria):  # type: ignore[misc]
    def __init__(self, is_over: Callable[[], bool]) -> None:
        self.is_over = is_over

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Any:
        return torch.full((input_ids.shape[0],), self.is_over(), device=input_ids.device, dtype=torch.bool)


class Sampler:
    """Draws the tokens of one request: transformers' own processors in the order in which `generate` applies them.

    The same seed draws what `generate` draws for a batch of one: each row has a generator of its own.
    """

    def __init__(self, request: GenerateRequest, device: torch.device) -> None:
        self._processors = transformers.LogitsProcessorList()
        if request.repetition_penalty is not None:
            penalty = transformers.RepetitionPenaltyLogitsProcessor(penalty=request.repetition_penalty)
            self._processors.append(penalty)
        self._generator: torch.Generator | None = None
        if request.temperature == 0:
            return
        self._generator = torch.Generator(device)
        if request.seed is not None:
            self._generator.manual_seed(request.seed)
        else:
            self._generator.seed()
        if request.temperature != 1:
            self._processors.append(transformers.TemperatureLogitsWarper(float(request.temperature)))
        if request.top_k:
            self._processors.append(transformers.TopKLogitsWarper(top_k=request.top_k))
        if request.top_p is not None and request.top_p < 1:
            self._processors.append(transformers.TopPLogitsWarper(top_p=request.top_p))
        if request.min_p is not None:
            self._processors.append(transformers.MinPLogitsWarper(min_p=request.min_p))

    @property
    def is_greedy(self) -> bool:
        """Whether it takes the likeliest token as it is."""
        return not self._processors and self._generator is None

    def draw(self, token_ids: Sequence[int], logits: Tensor) -> int:
        """Return the next token. token_ids: prompt and answer so far. logits: [V] float32."""
        if self.is_greedy:
            return int(logits.argmax())
        ids = torch.tensor([list(token_ids)], device=logits.device)
        scores = self._processors(ids, logits[None].clone())
        if self._generator is None:
            return int(scores[0].argmax())
        return int(torch.multinomial(torch.softmax(scores, dim=-1), 1, generator=self._generator))


def generate(
    model: Any, tensors: dict[str, Tensor], request: GenerateRequest, *, streamer: Any, is_over: Callable[[], bool],
    prefill_chunk_tokens: int | None, device: torch.device,
) -> None:  # fmt: skip
    """Run transformers' own generation; tokens go to streamer.put, one row each step.

    Only the request decides how tokens are drawn: sampling values in the checkpoint's generation_config are not used.
    """
    own = model.generation_config
    text = model.config.get_text_config()
    ends = end_token_ids(model)
    pad = getattr(own, "pad_token_id", None)
    pad = pad if pad is not None else getattr(text, "pad_token_id", None)
    # Neutral values, not None: None is filled in from the model's own generation config.
    options: dict[str, Any] = {"do_sample": False}
    if request.temperature > 0:
        options = {
            "do_sample": True, "temperature": float(request.temperature), "top_k": request.top_k or 0,
            "top_p": request.top_p if request.top_p is not None else 1.0,
        }  # fmt: skip
        if request.min_p is not None:
            options["min_p"] = request.min_p
    if request.repetition_penalty is not None:
        options["repetition_penalty"] = request.repetition_penalty
    if prefill_chunk_tokens is not None:
        options["prefill_chunk_size"] = prefill_chunk_tokens
    config = transformers.GenerationConfig(
        max_new_tokens=request.max_new_tokens, eos_token_id=list(ends) or None,
        pad_token_id=pad if pad is not None else (ends[0] if ends else 0), bos_token_id=getattr(own, "bos_token_id", None),
        **options,
    )  # fmt: skip
    devices = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices=devices, enabled=request.temperature > 0), torch.no_grad():
        if request.temperature > 0:
            if request.seed is not None:
                torch.manual_seed(request.seed)
            else:
                torch.seed()
        model.generation_config = transformers.GenerationConfig()  # nothing of the file's may be filled in
        try:
            model.generate(
                **tensors, generation_config=config, streamer=streamer,
                stopping_criteria=transformers.StoppingCriteriaList([_Over(is_over)]),
            )  # fmt: skip
        finally:
            model.generation_config = own
