"""Transformers' own generation, where a batch's steps are not captured: the numbers and bits of the stock stack."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
import transformers
from torch import Tensor

from trimtab.engine.batch.request import AnswerPenalties, check_logits
from trimtab.engine.chat.control_tokens import end_token_ids
from trimtab.engine.kv import kv_cache as hf_slots
from trimtab.request import GenerateRequest

if TYPE_CHECKING:
    from trimtab.engine.formats.hf_types import HFModel


class _Over(transformers.StoppingCriteria):  # type: ignore[misc]
    def __init__(self, is_over: Callable[[], bool]) -> None:
        self.is_over = is_over

    def __call__(self, input_ids: Tensor, scores: object, **kwargs: object) -> Tensor:
        return torch.full((input_ids.shape[0],), self.is_over(), device=input_ids.device, dtype=torch.bool)


class _Numbers(transformers.LogitsProcessor):  # type: ignore[misc]
    """Leaves the logits as they are, and raises DeviceError where they are NaN or infinite."""

    def __init__(self, adapter: str | None) -> None:
        self.adapter = adapter

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        check_logits(scores, adapter=self.adapter)
        return scores


class Logprobs(transformers.LogitsProcessor):  # type: ignore[misc]
    """Keeps each step's log-probabilities, before penalties, temperature and cuts, until the step's token is known.

    count: how many of the most likely tokens are reported with it.
    """

    def __init__(self, count: int) -> None:
        self.count = count
        self._steps: deque[Tensor] = deque()  # [V] each; transformers 5.23 has one step more under way

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        self._steps.append(torch.log_softmax(scores[0].float(), dim=-1))
        return scores

    def take(self, token: int) -> tuple[float, tuple[tuple[int, float], ...]]:
        """Return the log-probability of the next step's token, and the most likely (token, log-probability)."""
        logprobs = self._steps.popleft()
        values, ids = logprobs.topk(self.count)
        return float(logprobs[token]), tuple(zip(ids.tolist(), values.tolist(), strict=True))


def generate(
    model: HFModel, tensors: dict[str, Tensor], request: GenerateRequest, *, streamer: object, is_over: Callable[[], bool],
    prefill_chunk_tokens: int | None, device: torch.device, adapter: str | None = None, logprobs: Logprobs | None = None,
    kv: str = "full",
) -> None:  # fmt: skip
    """Run transformers' own generation; tokens go to streamer.put, one row each step.

    Only the request decides how tokens are drawn: sampling values in the checkpoint's generation_config are not used.
    adapter: the name in an error of the logits. logprobs: receives each step's logits. kv: the form of keys and
    values, "full" or "int8". Errors: DeviceError for logits that are not numbers.
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
    cache = {"past_key_values": hf_slots.prompt_cache(model, kv)} if kv == "int8" else {}
    if prefill_chunk_tokens is not None:
        options["prefill_chunk_size"] = prefill_chunk_tokens
    config = transformers.GenerationConfig(
        max_new_tokens=request.answer_tokens, eos_token_id=[*ends, *request.stop_token_ids] or None,
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
        # In the order of `Sampler`: these processors run before temperature and cuts.
        repeats = request.repetition_penalty
        penalty = None if repeats is None else transformers.RepetitionPenaltyLogitsProcessor(penalty=repeats)
        processors = [_Numbers(adapter), logprobs, penalty, AnswerPenalties.of(request)]
        model.generation_config = transformers.GenerationConfig()  # nothing of the file's may be filled in
        try:
            model.generate(
                **tensors, **cache, generation_config=config, streamer=streamer,
                logits_processor=transformers.LogitsProcessorList(filter(None, processors)),
                stopping_criteria=transformers.StoppingCriteriaList([_Over(is_over)]),
            )  # fmt: skip
        finally:
            model.generation_config = own
