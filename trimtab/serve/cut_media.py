"""Removes long base64 from a body before it is parsed as JSON, chunk by chunk.

A parser holds the interpreter from the first byte of a text to its last: an image of 20 MiB would keep every other request of the
process waiting for 10 to 30 ms. What is cut out is decoded in small pieces, and a random name stands in its place.
"""

from __future__ import annotations

import base64
import binascii
import re
import secrets
import time
from collections.abc import Mapping

# Longer texts than any that is no image or audio may be: tools and schemas have fewer bytes.
CUT_BYTES = 2**20
PIECE_BYTES = 2**16  # a multiple of four
WINDOW_BYTES = 2**20
# After each piece: on a machine without a core to spare this thread would hold the interpreter most of the time, and every answer
# of the event loop waits for it several times. An image of 20 MiB takes 0.15 s longer.
PAUSE_S = 0.0003
# Of quotes within texts: with more of them looking for long texts would cost more than it saves.
MOST_QUOTES = 2**16
_KEY = re.compile(rb'"(?P<name>url|image_url|data)"\s*:\s*$')
_KEY_BYTES = 64
_HEAD = re.compile(rb"data:[\w.+/-]{1,160};base64,", re.IGNORECASE)

# Name -> bytes, None for what is not base64.
Cut = Mapping[str, bytes | None]


def cut_media(body: bytes | bytearray) -> tuple[bytes | bytearray, Cut]:
    """Return a body with names in the place of long base64 of images and audio, and what each name stands for."""
    pieces: list[bytes | bytearray] = []
    found: dict[str, bytes | None] = {}
    if _count_quotes(body) > MOST_QUOTES:
        return body, found
    last = place = 0
    while (start := body.find(b'"', place)) >= 0 and (end := _end_of_text(body, start + 1)) >= 0:
        first = _first_of_base64(body, start, end) if end - start > CUT_BYTES else None
        if first is not None:
            name = secrets.token_hex(16)
            pieces += [body[last:first], name.encode()]
            found[name] = _decoded(memoryview(body)[first:end])
            last = end
        place = end + 1
    return (b"".join([*pieces, body[last:]]), found) if found else (body, found)


def _count_quotes(body: bytes | bytearray) -> int:
    """Return how many quotes within texts a body has, those at the border of two windows aside."""
    count = 0
    for start in range(0, len(body), WINDOW_BYTES):
        count += body.count(b'\\"', start, start + WINDOW_BYTES)
        time.sleep(PAUSE_S)
    return count


def _find(body: bytes | bytearray, what: bytes, start: int, end: int) -> int:
    """Return where one byte is, -1 for nowhere: as `bytes.find`, with pauses on a long way."""
    while start < end:
        found = body.find(what, start, min(start + WINDOW_BYTES, end))
        if found >= 0:
            return found
        start += WINDOW_BYTES
        if start < end:
            time.sleep(PAUSE_S)
    return -1


def _end_of_text(body: bytes | bytearray, start: int) -> int:
    """Return where the quote is that ends a text, -1 for none."""
    end = _find(body, b'"', start, len(body))
    while end >= 0 and _slashes(body, start, end) % 2:
        end = _find(body, b'"', end + 1, len(body))
    return end


def _slashes(body: bytes | bytearray, start: int, end: int) -> int:
    """Return how many backslashes stand before a place."""
    count = 0
    while end > start:
        window = body[max(start, end - PIECE_BYTES) : end]
        found = len(window) - len(window.rstrip(b"\\"))
        count, end = count + found, end - found
        if found < len(window):
            break
    return count


def _first_of_base64(body: bytes | bytearray, start: int, end: int) -> int | None:
    """Return where base64 begins in the text between two quotes; None if it is no image or audio, or written with escapes."""
    key = _KEY.search(body[max(0, start - _KEY_BYTES) : start])
    head = _HEAD.match(body, start + 1, start + 257)
    if key is None or _find(body, b"\\", start, end) >= 0:
        return None
    if head is not None:
        return head.end()
    return start + 1 if key["name"] == b"data" else None


def _decoded(text: memoryview) -> bytes | None:
    pieces = []
    try:
        for start in range(0, len(text), PIECE_BYTES):
            piece = bytes(text[start : start + PIECE_BYTES])
            if b"=" in piece and start + PIECE_BYTES < len(text):
                return None
            pieces.append(base64.b64decode(piece, validate=True))
            time.sleep(PAUSE_S)
    except (binascii.Error, ValueError):
        return None
    return b"".join(pieces) or None
