"""Images and audio of a request: bytes from data URLs, base64 or allowed hosts, measured before they are decoded.

Nothing here decodes pixels or samples; that is the worker's. What is checked here costs a few header bytes, so that a
decompression bomb is refused in the process that survives it. Sizes are counted as they will be in memory, whatever
seconds or bytes a header claims.
"""

from __future__ import annotations

import io
import re
import struct
import warnings
from dataclasses import dataclass
from typing import Any

from trimtab.errors import RequestError
from trimtab.request import check_picture_size
from trimtab.runtime.content_parts import from_base64, split_data_url
from trimtab.serve.cut_media import Cut
from trimtab.serve.settings import Limits

IMAGE_TYPES = ("image/png", "image/jpeg", "image/webp")
AUDIO_FORMATS = ("wav", "flac", "ogg", "mp3")
# How files begin that do not say in their head how long they are. The worker decodes no more of them than it has room for.
_BEGINNINGS = {"ogg": re.compile(rb"OggS\0"), "mp3": re.compile(rb"ID3[\2-\4]|\xff[\xe2-\xff]")}
# What an audio clip may be made of: PCM, float, and the extensible form of both. Rates and channels beyond these are lies.
WAV_FORMATS = (1, 3, 0xFFFE)
RATES, CHANNELS = range(1_000, 768_001), range(1, 17)
WAV_CHUNKS = 256
SAMPLE_BYTES = 4  # samples are float32 once decoded


def from_data_url(url: str, *, field: str, cut: Cut | None = None) -> bytes:
    """Return the bytes of an image's data URL. Errors: RequestError."""
    parts = split_data_url(url)
    if parts is None:
        raise RequestError("must be a data URL with base64", field=field, allowed=("data:image/png;base64,...",))
    media_type, start = parts
    if media_type not in IMAGE_TYPES:
        raise RequestError("is not an image of a known type", field=field, value=media_type, allowed=IMAGE_TYPES)
    return from_text(url, field=field, start=start, cut=cut)


def from_text(text: str, *, field: str, cut: Cut | None = None, start: int = 0) -> bytes:
    """Return what base64 holds, or the name of what was cut out of the body. start: where it begins. Errors: RequestError."""
    name = text[start : start + 64]
    if not cut or name not in cut:
        return from_base64(text, field=field, start=start)
    data = cut[name]
    if data is None:
        raise RequestError("is not base64", field=field)
    return data


# Pictures -------------------------------------------------------------------------------------------------------------


@dataclass
class Total:
    """The images and audio of one request, counted from their headers in their order. limits: of each of them, and of all."""

    limits: Limits
    pixels: int = 0
    audio_s: float = 0.0

    def take_image(self, data: bytes, *, field: str) -> bytes:
        """Return an image's bytes, its pixels counted in. Errors: RequestError, as `check_image` and for more than the limit."""
        limit = self.limits.request_pixels
        self.pixels += check_image(data, field=field, limits=self.limits)
        if self.pixels > limit:
            raise RequestError(
                f"the images up to here have {self.pixels} pixels, the limit of a request is {limit}", field=field,
                hint="Send smaller or fewer images",
            )  # fmt: skip
        return data

    def take_sound(self, data: bytes, kind: str, *, field: str) -> bytes:
        """Return an audio clip's bytes, its seconds counted in. Errors: RequestError, as `check_sound` and for more than the
        limit."""
        limit = self.limits.request_audio_s
        self.audio_s += check_sound(data, kind, field=field, limits=self.limits)
        if self.audio_s > limit:
            raise RequestError(
                f"the audio up to here has {self.audio_s:.1f} seconds, the limit of a request is {limit:g}", field=f"{field}.data",
                hint="Send shorter or fewer clips",
            )  # fmt: skip
        return data


def check_image(data: bytes, *, field: str, limits: Limits) -> int:
    """Return the pixels of an image, by its header. Errors: RequestError if it is none, or larger than the limit."""
    width, height = _webp_size(data) or _pillow_size(data, field)
    if not width or not height:
        raise RequestError("has no pixels", field=field)
    check_picture_size(width, height, max_pixels=limits.image_pixels, field_name=field)
    return width * height


def _pillow_size(data: bytes, field: str) -> tuple[int, int]:
    from PIL import Image

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", Image.DecompressionBombWarning)  # our own limit is asked next
            with Image.open(io.BytesIO(data), formats=("PNG", "JPEG", "WEBP")) as image:
                return image.size
    except Image.DecompressionBombError as exc:
        raise RequestError("has more pixels than any limit", field=field) from exc
    except Exception as exc:  # Pillow's plugins raise many kinds for broken headers
        raise RequestError("is not a png, jpeg or webp image", field=field) from exc


def _webp_size(data: bytes) -> tuple[int, int] | None:
    """Return the size that a WebP file begins with. Pillow would make room for the whole picture to learn it.

    Source: RFC 9649 (section 2.7 VP8X), RFC 6386 section 9.1 (VP8), WebP lossless specification section 3 (VP8L).
    """
    if len(data) < 30 or data[:4] != b"RIFF" or data[8:12] != b"WEBP":
        return None
    kind = data[12:16]
    if kind == b"VP8X":
        return 1 + int.from_bytes(data[24:27], "little"), 1 + int.from_bytes(data[27:30], "little")
    if kind == b"VP8L" and data[20] == 0x2F:
        bits = int.from_bytes(data[21:25], "little")
        return 1 + (bits & 0x3FFF), 1 + (bits >> 14 & 0x3FFF)
    if kind == b"VP8 " and data[23:26] == b"\x9d\x01\x2a":
        return int.from_bytes(data[26:28], "little") & 0x3FFF, int.from_bytes(data[28:30], "little") & 0x3FFF
    return 0, 0


# Sounds ---------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Sound:
    """The header of an audio file. frames: samples of one channel."""

    rate: int
    channels: int
    frames: int

    @property
    def is_plausible(self) -> bool:
        return self.rate in RATES and self.channels in CHANNELS and self.frames > 0


def check_sound(data: bytes, kind: str, *, field: str, limits: Limits) -> float:
    """Return the seconds of audio of the declared kind. Errors: RequestError if it is none, or beyond the limits.

    The length of ogg and mp3 is known only after decoding, and counts 0 here: the worker refuses audio that is longer than its
    plan counted.
    """
    if kind not in AUDIO_FORMATS:
        raise RequestError(
            "is not an audio format of this server", field=f"{field}.format", value=kind, allowed=AUDIO_FORMATS
        )
    field = f"{field}.data"
    if kind in _BEGINNINGS:
        if not _BEGINNINGS[kind].match(data):
            raise RequestError(f"is not an {kind} file", field=field)
        return 0.0
    size = _wav(data) if kind == "wav" else _flac(data)
    if size is None or not size.is_plausible:
        raise RequestError(f"is not a {kind} file with audio", field=field)
    seconds = size.frames / size.rate
    if seconds > limits.audio_s:
        raise RequestError(f"has {seconds:.1f} seconds, the limit is {limits.audio_s:g}", field=field)
    decoded_bytes = size.frames * size.channels * SAMPLE_BYTES
    if decoded_bytes > limits.audio_bytes:
        raise RequestError(f"has {decoded_bytes} bytes decoded, the limit is {limits.audio_bytes}", field=field)
    return seconds


def _wav(data: bytes) -> _Sound | None:
    """Return what a WAV file holds, by the bytes that are really there; None if it is not one.

    Source: Microsoft "Multiple Channel Audio Data and WAVE Files"; RF64 as EBU Tech 3306.
    """
    if len(data) < 12 or data[:4] not in (b"RIFF", b"RF64") or data[8:12] != b"WAVE":
        return None
    place, known = 12, None
    for _ in range(WAV_CHUNKS):
        if place + 8 > len(data):
            return None
        name, size = struct.unpack_from("<4sI", data, place)
        if name == b"fmt ":
            if known is not None or size < 16 or place + 24 > len(data):
                return None
            known = struct.unpack_from("<HHIIHH", data, place + 8)
        if name == b"data":
            return None if known is None else _wav_sound(known, min(size, len(data) - place - 8))
        place += 8 + size + size % 2
    return None


def _wav_sound(known: tuple[int, ...], held_bytes: int) -> _Sound | None:
    tag, channels, rate, _, _, bits = known
    frame_bytes = channels * (bits // 8)  # the header's own bytes per second and a frame may say anything
    if tag not in WAV_FORMATS or bits not in (8, 16, 24, 32, 64) or not channels:
        return None
    return _Sound(rate, channels, held_bytes // frame_bytes)


def _flac(data: bytes) -> _Sound | None:
    """Return the fields of a FLAC file's first block; None if it is not FLAC or does not state its length. Source: RFC 9639
    section 8.2."""
    if len(data) < 26 or data[:4] != b"fLaC" or data[4] & 0x7F != 0:
        return None
    packed = int.from_bytes(data[18:26], "big")
    return _Sound(packed >> 44, (packed >> 41 & 7) + 1, packed & (2**36 - 1))


def image_part(data: bytes, *, detail: str | None = None) -> dict[str, Any]:
    """Return an image as a message part that the worker takes."""
    return {"type": "image", "image": data, **({"detail": "low"} if detail == "low" else {})}


def sound_part(data: bytes) -> dict[str, Any]:
    """Return an audio clip as a message part that the worker takes."""
    return {"type": "audio", "audio": data}
