"""The token that ends a turn in a checkpoint's chat template, and whether the checkpoint's own lists end answers with it.

transformers' `generate` ends an answer with the ids of generation_config.json, else of config.json. Some published checkpoints
lack the token that their template writes behind an answer, so every answer runs to the token limit. vLLM also ends answers with
the tokenizer's own end token (v1/core/sched/utils.py, check_stop), llama.cpp with a list of texts (llama-vocab.cpp,
special_eog_ids). `trimtab run`, `chat` and `serve` do as vLLM where that token is the template's; elsewhere they report that
answers go on, and end there on request. `trimtab.load` and `verify` do as transformers.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from trimtab.engine.templates.budget import REFUSALS, render
from trimtab.errors import CheckpointError

if TYPE_CHECKING:
    from trimtab.engine.chat.chat_model import ChatModel
    from trimtab.engine.formats.hf_types import HFModel

# A private character that no template changes.
_ANSWER = "\U0010fffc"


class TurnEnd(NamedTuple):
    """A control token: its id and its text."""

    token_id: int
    text: str


def end_token_ids(hf_model: HFModel) -> tuple[int, ...]:
    """Return every token id that ends an answer, from the generation config or else the model's config."""
    ids = getattr(hf_model.generation_config, "eos_token_id", None)
    if ids is None:
        ids = getattr(hf_model.config.get_text_config(), "eos_token_id", None)
    if ids is None:
        return ()
    return tuple(int(token) for token in ids) if isinstance(ids, (list, tuple)) else (int(ids),)


def turn_end(model: ChatModel) -> TurnEnd | None:
    """Return the control token that the template writes first behind an answer; None without a template or such a token."""
    processor = model.processor
    tokenizer = getattr(processor, "tokenizer", processor)
    owner = processor if getattr(processor, "chat_template", None) else tokenizer
    if not getattr(owner, "chat_template", None):
        return None
    chat = [{"role": "user", "content": "x"}, {"role": "assistant", "content": _ANSWER}]
    parts = [{**one, "content": [{"type": "text", "text": one["content"]}]} for one in chat]
    for form in (parts, chat):
        try:
            _, mark, behind = render(owner, form, model.processor_folder).rpartition(_ANSWER)
        except (*REFUSALS, CheckpointError):
            continue
        start, end = next(iter(model.control_tokens.matches(behind)), (0, 0))
        if mark and end and not behind[:start].strip():
            return TurnEnd(int(tokenizer.convert_tokens_to_ids(behind[start:end])), behind[start:end])
    return None


def missing_turn_end(model: ChatModel) -> TurnEnd | None:
    """Return the token that ends a turn, if no list of the checkpoint has it: then answers do not end there."""
    found = turn_end(model)
    return found if found is not None and found.token_id not in end_token_ids(model.hf_model) else None


def stop_at_turn_end(model: ChatModel, *, is_asked: bool | None = None) -> TurnEnd | None:
    """Let answers of a loaded model end where its chat template ends a turn, also if the checkpoint's lists do not say so.

    is_asked: None ends them there if the tokenizer's own end token is that token, False never. Returns the token at which
    answers go on without a request for it. Call it before a batch is made: a batch keeps the end tokens.
    """
    missing = None if is_asked is False else missing_turn_end(model)
    if missing is None:
        return None
    if is_asked or missing.token_id == getattr(model.processor, "tokenizer", model.processor).eos_token_id:
        model.hf_model.generation_config.eos_token_id = [*end_token_ids(model.hf_model), missing.token_id]
        return None
    return missing


def going_on(missing: TurnEnd, remedy: str) -> str:
    """Return the message about a token at which answers go on. remedy: the option that ends them there."""
    return (
        f"the chat template ends turns with {missing.text}, which is not among the checkpoint's end tokens: answers may run to "
        f"the token limit. {remedy} ends them there"
    )
