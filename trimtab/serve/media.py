"""Pictures and sounds in a request: bytes out of data URLs, base64 or allowed hosts, measured before they are decoded.

Nothing here decodes pixels or samples; that is the worker's. What is checked here costs a few header bytes, so that a
decompression bomb is refused in the process that survives it.
"""

from __future__ import annotations

import base64
import binascii
import io
import re
import struct
from typing import Any

from trimtab.errors import RequestError
from trimtab.serve.settings import Limits

_DATA_URL = re.compile(r"data:(?P<type>[\w.+-]+/[\w.+-]+)?(?P<base64>;base64)?,", re.ASCII)
IMAGE_TYPES = ("image/png", "image/jpeg", "image/webp")
AUDIO_FORMATS = ("wav", "flac")


def from_data_url(url: str, *, field: str, limits: Limits) -> bytes:
    """Return the bytes of a picture's data URL. Errors: RequestError."""
    found = _DATA_URL.match(url)
    if found is None or not found["base64"]:
        raise RequestError("must be a data URL with base64", field=field, allowed=("data:image/png;base64,...",))
    if found["type"] not in IMAGE_TYPES:
        raise RequestError("is not a picture of a known type", field=field, value=found["type"], allowed=IMAGE_TYPES)
    return check_image(from_base64(url[found.end() :], field=field), field=field, limits=limits)


def from_base64(text: str, *, field: str) -> bytes:
    """Return decoded bytes. Errors: RequestError for anything that is not plain base64."""
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError) as exc:
        raise RequestError("is not base64", field=field) from exc


def check_image(data: bytes, *, field: str, limits: Limits) -> bytes:
    """Return the bytes if their header is a picture's and its pixels are within the limit. Errors: RequestError."""
    from PIL import Image

    try:
        # Pillow reads the header only; its own bomb warning is above our limit and never reached.
        with Image.open(io.BytesIO(data), formats=("PNG", "JPEG", "WEBP")) as found:
            width, height = found.size
    except Exception as exc:  # Pillow's plugins raise many kinds for broken headers
        raise RequestError("is not a png, jpeg or webp picture", field=field) from exc
    if width * height > limits.image_pixels:
        raise RequestError(f"has {width} x {height} pixels, the limit is {limits.image_pixels}", field=field)
    return data


def check_sound(data: bytes, kind: str, *, field: str, limits: Limits) -> bytes:
    """Return the bytes if they are a sound of the kind that was said, within the limit. Errors: RequestError."""
    if kind not in AUDIO_FORMATS:
        raise RequestError(
            "is not a sound format of this server", field=f"{field}.format", value=kind, allowed=AUDIO_FORMATS
        )
    seconds = _wav_s(data) if kind == "wav" else _flac_s(data)
    if seconds is None:
        raise RequestError(f"is not a {kind} file", field=f"{field}.data")
    if seconds > limits.audio_s:
        raise RequestError(f"has {seconds:.1f} seconds, the limit is {limits.audio_s:g}", field=f"{field}.data")
    return data


def _wav_s(data: bytes) -> float | None:
    """Return the seconds of a WAV file from its header, by the bytes that are really there; None if it is not one."""
    if len(data) < 12 or data[:4] not in (b"RIFF", b"RF64") or data[8:12] != b"WAVE":
        return None
    place, bytes_per_s = 12, 0
    while place + 8 <= len(data):
        name, size = struct.unpack_from("<4sI", data, place)
        if name == b"fmt " and size >= 16 and place + 24 <= len(data):
            (bytes_per_s,) = struct.unpack_from("<I", data, place + 16)
        if name == b"data":
            held = min(size, len(data) - place - 8)
            return held / bytes_per_s if bytes_per_s else None
        place += 8 + size + size % 2
    return None


def _flac_s(data: bytes) -> float | None:
    """Return the seconds of a FLAC file from its first block; None if it is not one or does not say."""
    if len(data) < 26 or data[:4] != b"fLaC" or data[4] & 0x7F != 0:
        return None
    packed = int.from_bytes(data[18:26], "big")
    rate, samples = packed >> 44, packed & (2**36 - 1)
    return samples / rate if rate and samples else None


def image_part(data: bytes) -> dict[str, Any]:
    """Return a picture as a message part that the worker takes."""
    return {"type": "image", "image": data}


def sound_part(data: bytes) -> dict[str, Any]:
    """Return a sound as a message part that the worker takes."""
    return {"type": "audio", "audio": data}
