"""How the parts of a chat message may be written: this package's own form, or OpenAI's with data URLs.

    {"type": "image", "image": X}                          X: a path, bytes, a Pillow image or an array
    {"type": "image_url", "image_url": {"url": "data:image/png;base64,...", "detail": "low"}}
    {"type": "audio", "audio": X}                          X: a path, bytes, samples or (samples, rate)
    {"type": "input_audio", "input_audio": {"data": "...", "format": "wav"}}

An address on another machine is refused: nothing is fetched.
"""

from __future__ import annotations

import base64
import binascii
import re
from collections.abc import Mapping
from typing import Any

from trimtab.errors import RequestError

_DATA_URL = re.compile(r"data:([\w.+-]+/[\w.+-]+)?(;[\w=.+-]+)*;base64,", re.ASCII | re.IGNORECASE)
# The largest file that a message may hold: more is no picture or sound that would be taken.
MOST_BYTES = 256 * 2**20


def own_form(part: Any) -> Any:
    """Return a part in this package's form; one of another form is given back as it is. Errors: RequestError."""
    kind = part.get("type") if isinstance(part, Mapping) else None
    if kind == "image_url" and kind in part:
        given = part[kind]
        url = given.get("url") if isinstance(given, Mapping) else given
        detail = given.get("detail") if isinstance(given, Mapping) else None
        return {"type": "image", "image": _of_url(url, "image"), **({} if detail is None else {"detail": detail})}
    if kind == "input_audio" and kind in part:
        given = part[kind]
        if not isinstance(given, Mapping) or not isinstance(given.get("data"), str):
            raise RequestError("input_audio has no data", field="audio")
        text = given["data"]
        return {
            "type": "audio",
            "audio": _of_url(text, "audio") if text.startswith("data:") else _decoded(text, "audio"),
        }
    return part


def _of_url(url: Any, field: str) -> bytes:
    match = _DATA_URL.match(url) if isinstance(url, str) else None
    if match is None:
        raise RequestError(
            "must be a data URL with base64; nothing is fetched", field=field, value=str(url)[:80],
            allowed=("data:image/png;base64,...",),
        )  # fmt: skip
    return _decoded(url[match.end() :], field)


def _decoded(text: str, field: str) -> bytes:
    if len(text) > MOST_BYTES * 4 // 3 + 4:
        raise RequestError(f"has more than {MOST_BYTES} bytes", field=field)
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError) as exc:
        raise RequestError(f"is not base64 ({exc})", field=field) from exc
