"""Which text, tokens and logprobs does one answer of a server have, checked and bounded?"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

MAX_TOKENS = 256
MAX_TOP = 64
MAX_TEXT = 64 * 2**10
MAX_TOKEN_TEXT = 1024
# A smaller number means "impossible" (OpenAI: -9999) and is no measurement.
LOWEST = -1000.0


@dataclass(frozen=True)
class SaidToken:
    """One token as the server reports it. id: if the server gives a number; data: its bytes, if given."""

    text: str
    logprob: float
    id: int | None = None
    data: bytes | None = None


@dataclass(frozen=True)
class Position:
    """One position of the answer: the token that the server chose, and the most likely ones."""

    chosen: SaidToken
    top: tuple[SaidToken, ...]


@dataclass(frozen=True)
class Said:
    """One answer. positions: None if the server gives no logprobs, () for an answer without a token. prompt_tokens: as the server
    counts them. Formats: OpenAI's completions and chat completions, and Ollama's /api/generate. A field of another type, a token
    that is too long or an invalid number makes an answer unusable.
    """

    text: str
    positions: tuple[Position, ...] | None
    prompt_tokens: int | None = None


def read_completion(value: Any) -> Said | None:
    """Return the content of a completion, None for other JSON."""
    choice = _first_choice(value)
    if choice is None or not _is_text(choice.get("text")):
        return None
    return Said(choice["text"], _completion_positions(choice.get("logprobs")), _prompt_tokens(value))


def read_chat(value: Any) -> Said | None:
    """Return the content of a chat completion, None for other JSON."""
    choice = _first_choice(value)
    message = choice.get("message") if choice is not None else None
    if choice is None or not isinstance(message, Mapping):
        return None
    text = message.get("content") or ""
    if not _is_text(text):
        return None
    logprobs = choice.get("logprobs")
    content = logprobs.get("content") if isinstance(logprobs, Mapping) else None
    return Said(text, _listed_positions(content), _prompt_tokens(value))


def read_ollama(value: Any) -> Said | None:
    """Return the answer in a response of Ollama's /api/generate, None for other JSON."""
    if not isinstance(value, Mapping) or not _is_text(value.get("response")):
        return None
    counted = value.get("prompt_eval_count")
    return Said(value["response"], _listed_positions(value.get("logprobs")), counted if _is_count(counted) else None)


def _first_choice(value: Any) -> Mapping[str, Any] | None:
    choices = value.get("choices") if isinstance(value, Mapping) else None
    choice = choices[0] if isinstance(choices, list) and choices else None
    return choice if isinstance(choice, Mapping) else None


def _prompt_tokens(value: Mapping[str, Any]) -> int | None:
    usage = value.get("usage")
    counted = usage.get("prompt_tokens") if isinstance(usage, Mapping) else None
    return counted if _is_count(counted) else None


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**31


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and len(value) <= MAX_TEXT


def _token(text: Any, logprob: Any, number: Any = None, data: Any = None) -> SaidToken | None:
    if not isinstance(text, str) or len(text) > MAX_TOKEN_TEXT:
        return None
    if isinstance(logprob, bool) or not isinstance(logprob, (int, float)):
        return None
    try:
        value = float(logprob)
    except OverflowError:
        return None
    if not math.isfinite(value) or value > 1e-3:
        return None
    raw = None
    if isinstance(data, list) and len(data) <= MAX_TOKEN_TEXT and all(_is_count(b) and b < 256 for b in data):
        raw = bytes(data)
    return SaidToken(text, min(value, 0.0), number if _is_count(number) else _number_in(text), raw)


def _number_in(text: str) -> int | None:
    # vLLM with --return-tokens-as-token-ids.
    digits = text.removeprefix("token_id:")
    return int(digits) if digits != text and digits.isascii() and digits.isdigit() and len(digits) < 10 else None


def _completion_positions(logprobs: Any) -> tuple[Position, ...] | None:
    if not isinstance(logprobs, Mapping):
        return None
    if isinstance(logprobs.get("content"), list):  # llama.cpp returns completions in the form of chats
        return _listed_positions(logprobs["content"])
    tokens, values, tops = (logprobs.get(name) for name in ("tokens", "token_logprobs", "top_logprobs"))
    if not (isinstance(tokens, list) and isinstance(values, list) and isinstance(tops, list)):
        return None
    positions = []
    for text, value, top in zip(tokens[:MAX_TOKENS], values, tops, strict=False):
        if not isinstance(top, Mapping):
            return None
        position = _position(_token(text, value), [_token(name, number) for name, number in _some(top)])
        if position is None:
            return None
        positions.append(position)
    return tuple(positions)


def _some(top: Mapping[Any, Any]) -> list[tuple[Any, Any]]:
    return list(top.items())[:MAX_TOP]


def _listed_positions(content: Any) -> tuple[Position, ...] | None:
    if not isinstance(content, list):
        return None
    positions = []
    for entry in content[:MAX_TOKENS]:
        if not isinstance(entry, Mapping):
            return None
        top = entry.get("top_logprobs")
        listed = [_listed(item) for item in top[:MAX_TOP]] if isinstance(top, list) else []
        position = _position(_listed(entry), listed)
        if position is None:
            return None
        positions.append(position)
    return tuple(positions)


def _listed(entry: Any) -> SaidToken | None:
    if not isinstance(entry, Mapping):
        return None
    return _token(entry.get("token"), entry.get("logprob"), entry.get("id"), entry.get("bytes"))


def _position(chosen: SaidToken | None, top: Sequence[SaidToken | None]) -> Position | None:
    if chosen is None or any(token is None for token in top):
        return None
    kept = tuple(token for token in top if token is not None and token.logprob > LOWEST)
    return Position(chosen, kept or (chosen,))
