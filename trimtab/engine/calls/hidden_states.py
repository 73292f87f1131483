"""Results before the logits: hidden states, and one vector for a text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from trimtab.engine.calls.embedding import Embedding
from trimtab.engine.chat import prompt as chat
from trimtab.engine.kv.sequence import Inputs
from trimtab.errors import RequestError
from trimtab.request import check_choice

if TYPE_CHECKING:
    from trimtab.engine.calls.asked_model import AskedModel, Chosen

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
            embedding = Embedding(model, inputs, adapter=model.adapter_name(adapter), pooling=pooling)
            while not embedding.step():
                pass
            vectors.append((embedding.unit if normalize else embedding.pooled).cpu())
    if not vectors:
        raise RequestError("holds no text", field="texts")
    return torch.stack(vectors)


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
    chat.check_fits(model, inputs, 0)
    with model.answering(adapter), torch.no_grad():
        model.lend_prompt_room()
        states = model.hf_model(
            **inputs.tensors, use_cache=False, output_hidden_states=True, logits_to_keep=1, return_dict=True
        ).hidden_states
    widths = sorted({int(state.shape[-1]) for state in states})
    if len(widths) > 1:
        raise RequestError(f"this family's states have different widths: {widths}", field="hidden_states")
    return torch.stack([state[0].float().cpu() for state in states])
