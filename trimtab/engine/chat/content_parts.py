"""What does a part of a chat message hold, in trimtab's own form or in OpenAI's with data URLs?"""

from __future__ import annotations

import base64
import binascii
import re
from collections.abc import Mapping, Sequence
from typing import Any, TypedDict

from trimtab.errors import RequestError

OPENAI_TYPES = ("image_url", "input_audio")
_DATA_URL = re.compile(r"data:(?P<type>[\w.+-]{1,40}/[\w.+-]{1,80})?(?:;[\w=.+-]{1,80}){0,8};base64,", re.ASCII | re.IGNORECASE)
BASE64_PIECE = 2**16  # characters, a multiple of four
# The largest file of a message: larger images and audio are refused anyway.
MOST_BYTES = 256 * 2**20


class Part(TypedDict, total=False):
    """A part of a message: a text, or a place for an image or an audio clip."""

    type: str
    text: str
    image: object
    audio: object


class _Said(TypedDict):
    role: str
    content: str | list[Part]


class Message(_Said, total=False):
    """A message as chat templates read it. tool_calls: in OpenAI's form, with objects as arguments."""

    name: str
    tool_calls: Sequence[Mapping[str, Any]]
    tool_call_id: str
    reasoning_content: str


def parts_in(message: Message) -> list[Part]:
    """Return the parts of a message; a text is one.

    {"type": "image", "image": X}                          X: a path, bytes, a Pillow image or an array
    {"type": "image_url", "image_url": {"url": "data:image/png;base64,...", "detail": "low"}}
    {"type": "audio", "audio": X}                          X: a path, bytes, samples or (samples, rate)
    {"type": "input_audio", "input_audio": {"data": "...", "format": "wav"}}
    """
    content = message["content"]
    return [{"type": "text", "text": content}] if isinstance(content, str) else content


def own_form(part: Mapping[str, object]) -> Mapping[str, object]:
    """Return a part of OPENAI_TYPES, with what it names, in this package's form. Errors: RequestError. An address on another
    machine is refused: nothing is fetched."""
    given = part[str(part["type"])]
    if part["type"] == "image_url":
        url = given.get("url") if isinstance(given, Mapping) else given
        detail = given.get("detail") if isinstance(given, Mapping) else None
        return {"type": "image", "image": _of_url(url, "image"), **({} if detail is None else {"detail": detail})}
    if not isinstance(given, Mapping) or not isinstance(given.get("data"), str):
        raise RequestError("input_audio has no data", field="audio")
    text = given["data"]
    return {"type": "audio", "audio": _of_url(text, "audio") if text.startswith("data:") else from_base64(text, field="audio")}


def _of_url(url: object, field: str) -> bytes:
    if not isinstance(url, str) or (parts := split_data_url(url)) is None:
        raise RequestError(
            "must be a data URL with base64; nothing is fetched", field=field, value=str(url)[:80],
            allowed=("data:image/png;base64,...",),
        )  # fmt: skip
    return from_base64(url, field=field, start=parts[1])


def split_data_url(url: str) -> tuple[str, int] | None:
    """Return the media type of a data URL ("" without one) and the offset of its base64; None for anything else."""
    match = _DATA_URL.match(url)
    return None if match is None else ((match["type"] or "").lower(), match.end())


def from_base64(text: str, *, field: str, start: int = 0) -> bytes:
    """Return decoded bytes. start: where the base64 begins. Errors: RequestError for text that is not plain base64, for none, for
    too much."""
    if len(text) - start > MOST_BYTES * 4 // 3 + 4:
        raise RequestError(f"has more than {MOST_BYTES} bytes", field=field)
    pieces: list[bytes] = []
    try:
        # One call for all would keep every other thread waiting until it is done.
        for place in range(start, len(text), BASE64_PIECE):
            piece = text[place : place + BASE64_PIECE]
            if "=" in piece and place + BASE64_PIECE < len(text):
                raise ValueError("padding before the end")
            pieces.append(base64.b64decode(piece, validate=True))
    except (binascii.Error, ValueError) as exc:
        raise RequestError("is not base64", field=field) from exc
    data = b"".join(pieces)
    if not data:
        raise RequestError("is empty", field=field)
    return data


def empty_place(messages: Sequence[Mapping[str, Any]]) -> int | None:
    """Return the message that leaves a chat without a prompt: an empty message of a user at its end, or the last one of
    a chat without any content; None for a chat with a prompt. messages: at least one."""
    last = len(messages) - 1
    if _says_something(messages[last]):
        return None
    return last if messages[last]["role"] == "user" or not any(map(_says_something, messages)) else None


def _says_something(message: Mapping[str, Any]) -> bool:
    content = message["content"]
    parts = [{"type": "text", "text": content}] if isinstance(content, str) else content or ()
    return bool(message.get("tool_calls")) or any(part["type"] != "text" or part["text"].strip() for part in parts)
