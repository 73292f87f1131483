"""How is long base64 removed from a body before it is parsed as JSON?"""

from __future__ import annotations

import base64
import binascii
import re
import secrets
import time
from collections.abc import Iterator, Mapping

# Larger than tool definitions and a schema, so that these are never cut.
CUT_BYTES = 2**18
PIECE_BYTES = 2**16
WINDOW_BYTES = 2**20
# Pause after each chunk: on a machine without a free core, this thread would hold the GIL most of the time, and the
# event loop would wait for it several times per answer. An image of 20 MiB takes 0.15 s longer.
PAUSE_S = 0.0003
_KEY = re.compile(rb'"(?P<name>url|image_url|data)"\s*:\s*$')
_KEY_BYTES = 64
# Some writers escape every slash.
_HEAD = re.compile(rb"data:(?:[\w.+=;/-]|\\/){0,800};base64,", re.IGNORECASE)
_HEAD_BYTES = 900
_OTHER_ESCAPE = re.compile(rb"\\[^/]")

# Name -> bytes, None for invalid base64.
Cut = Mapping[str, bytes | None]


def cut_media(body: bytes | bytearray) -> tuple[bytes | bytearray, Cut]:
    """Return the body with long base64 of images and audio replaced by names, and the bytes of each name. A parser holds the GIL
    from the first byte of a string to its last: 10 to 30 ms for an image of 20 MiB."""
    pieces: list[bytes | bytearray] = []
    media: dict[str, bytes | None] = {}
    last = 0
    for start, end in _long_texts(body):
        first = _first_of_base64(body, start, end)
        if first is not None:
            name = secrets.token_hex(16)
            pieces += [body[last:first], name.encode()]
            media[name] = _decoded(memoryview(body)[first:end])
            last = end
    return (b"".join([*pieces, body[last:]]), media) if media else (body, media)


def _long_texts(body: bytes | bytearray) -> Iterator[tuple[int, int]]:
    """Yield the positions of two quotes with more than CUT_BYTES and no quote between them: each such range contains a multiple
    of CUT_BYTES."""
    place = CUT_BYTES
    while place < len(body):
        start = body.rfind(b'"', place - CUT_BYTES, place)
        end = _find(body, b'"', place, len(body))
        if end < 0:
            return
        if start >= 0 and end - start > CUT_BYTES:
            yield start, end
        place = (end // CUT_BYTES + 1) * CUT_BYTES


def _find(body: bytes | bytearray, what: bytes, start: int, end: int) -> int:
    """Return the position of a byte, -1 if missing: like `bytes.find`, with pauses in a long search."""
    while start < end:
        at = body.find(what, start, min(start + WINDOW_BYTES, end))
        if at >= 0:
            return at
        start += WINDOW_BYTES
        if start < end:
            time.sleep(PAUSE_S)
    return -1


def _first_of_base64(body: bytes | bytearray, start: int, end: int) -> int | None:
    """Return the start of base64 in the text between two quotes; None if it is no image or audio, or has escapes other than
    those of slashes."""
    key = _KEY.search(body[max(0, start - _KEY_BYTES) : start])
    head = _HEAD.match(body, start + 1, start + _HEAD_BYTES)
    if key is None or body[end - 1 : end] == b"\\" or _has_other_escapes(body, start + 1, end):
        return None
    if head is not None:
        return head.end()
    return start + 1 if key["name"] == b"data" else None


def _has_other_escapes(body: bytes | bytearray, start: int, end: int) -> bool:
    place = _find(body, b"\\", start, end)
    while 0 <= place < end:
        if _OTHER_ESCAPE.search(body, place, min(place + WINDOW_BYTES + 1, end)):
            return True
        place += WINDOW_BYTES
        time.sleep(PAUSE_S)
    return False


def _decoded(text: memoryview) -> bytes | None:
    """Return the decoded bytes, None for invalid base64. text: without escapes other than those of slashes."""
    pieces, rest = [], b""
    try:
        for start in range(0, len(text), PIECE_BYTES):
            piece = (rest + bytes(text[start : start + PIECE_BYTES])).replace(b"\\/", b"/")
            is_last = start + PIECE_BYTES >= len(text)
            whole = len(piece) if is_last else len(piece.rstrip(b"\\")) // 4 * 4
            piece, rest = piece[:whole], piece[whole:]
            if b"=" in piece and not is_last:
                return None
            pieces.append(base64.b64decode(piece, validate=True))
            time.sleep(PAUSE_S)
    except (binascii.Error, ValueError):
        return None
    return b"".join(pieces) or None
