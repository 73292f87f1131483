"""Which images and audio does a request have, measured before they are decoded?"""

from __future__ import annotations

import re
from dataclasses import dataclass

from trimtab.engine.chat.media_headers import (
    OGG_PAGES,
    PNG_CHUNKS,
    flac_header,
    image_header,
    ogg_is_orderly,
    png_is_orderly,
    wav_header,
)
from trimtab.errors import RequestError
from trimtab.request import check_picture_size, from_base64, split_data_url
from trimtab.serve.contract.settings import Limits
from trimtab.serve.media.cut_media import Cut

IMAGE_TYPES = ("image/png", "image/jpeg", "image/webp")
AUDIO_FORMATS = ("wav", "flac", "ogg", "mp3")
# First bytes of formats without a length in their header. The worker limits the decoded length.
_BEGINNINGS = {"ogg": re.compile(rb"OggS\0"), "mp3": re.compile(rb"ID3[\2-\4]|\xff[\xe2-\xff]")}
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
    """Return the decoded base64, or the bytes that were removed from the body under this name. start: of the base64. Errors:
    RequestError."""
    name = text[start : start + 64]
    if not cut or name not in cut:
        return from_base64(text, field=field, start=start)
    data = cut[name]
    if data is None:
        raise RequestError("is not base64", field=field)
    return data


# Images ---------------------------------------------------------------------------------------------------------------


@dataclass
class Total:
    """The images and audio of one request, counted from their headers in their order. limits: of each of them, and of all. Only
    headers are read, so that a decompression bomb is refused; sizes are counted as decoded in memory."""

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
    """Return the pixels of an image, by its header. Errors: RequestError if it is invalid, or larger than the limit."""
    header = image_header(data)
    if header is None:
        raise RequestError("is not a png, jpeg or webp image", field=field)
    if not header.width or not header.height:
        raise RequestError("has no pixels", field=field)
    check_picture_size(header.width, header.height, max_pixels=limits.image_pixels, field_name=field)
    if header.kind == "PNG" and not png_is_orderly(data):
        raise RequestError(f"is a png with several headers or more than {PNG_CHUNKS} chunks", field=field)
    return header.width * header.height


# Audio ----------------------------------------------------------------------------------------------------------------


def check_sound(data: bytes, kind: str, *, field: str, limits: Limits) -> float:
    """Return the seconds of audio of the declared kind. Errors: RequestError if it is invalid, or beyond the limits.

    The length of ogg and mp3 is known only after decoding, and counts 0 here: the worker refuses audio that is longer
    than a request may have, or than its plan counted.
    """
    if kind not in AUDIO_FORMATS:
        raise RequestError("is not an audio format of this server", field=f"{field}.format", value=kind, allowed=AUDIO_FORMATS)
    field = f"{field}.data"
    if kind in _BEGINNINGS:
        if not _BEGINNINGS[kind].match(data):
            raise RequestError(f"is not an {kind} file", field=field)
        if kind == "ogg" and not ogg_is_orderly(data):
            raise RequestError(
                f"is not an ogg file of one stream in at most {OGG_PAGES} whole pages", field=field,
                hint="Encode the audio again, or send it as flac",
            )  # fmt: skip
        return 0.0
    size = wav_header(data) if kind == "wav" else flac_header(data)
    if size is None or not size.is_plausible:
        raise RequestError(f"is not a {kind} file with audio", field=field)
    seconds = size.frames / size.rate
    if seconds > limits.audio_s:
        raise RequestError(f"has {seconds:.1f} seconds, the limit is {limits.audio_s:g}", field=field)
    decoded_bytes = size.frames * size.channels * SAMPLE_BYTES
    if decoded_bytes > limits.audio_bytes:
        raise RequestError(f"has {decoded_bytes} bytes decoded, the limit is {limits.audio_bytes}", field=field)
    return seconds
