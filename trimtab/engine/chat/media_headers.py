"""What do the headers of image and audio files say, and is a file safe to open, without a library?"""

from __future__ import annotations

import re
import struct
import zlib
from dataclasses import dataclass

# The sample formats of an audio clip: PCM, float, and the extensible form of both. Rates and channels beyond these are lies.
# Libraries walk through a whole file to open some formats. Each function here reads a bounded number of chunks or pages.
WAV_FORMATS = (1, 3, 0xFFFE)
RATES, CHANNELS = range(1_000, 768_001), range(1, 17)
WAV_CHUNKS = 256
# libpng writes chunks of 8 KiB: a PNG of 64 MiB has half as many.
PNG_CHUNKS = 16_384
# Profiles and previews take a few hundred segments. Bytes between segments are an error that decoders pass over.
JPEG_SEGMENTS, JPEG_JUNK_BYTES = 1_024, 4_096
# Ten minutes of Opus with a page for each packet of 20 ms.
OGG_PAGES = 32_768
OPUS_RATE = 48_000
_PNG, _JPEG = b"\x89PNG\r\n\x1a\n", b"\xff\xd8\xff"
# The byte before the marker's own; those before it are fill bytes or junk, which count alike.
_JPEG_MARKER = re.compile(rb"\xff([^\x00\xff])")
# Markers without a length: of restarts, the image's begin and end, and extensions that Pillow passes over.
_JPEG_BARE = {0xC8, *range(0xD0, 0xDA), *range(0xF0, 0xFE)}
_JPEG_SIZES = {*range(0xC0, 0xD0), 0xDE} - {0xC4, 0xC8, 0xCC}
_JPEG_SCAN = 0xDA
_REVERSED = bytes(int(f"{byte:08b}"[::-1], 2) for byte in range(256))


# Images ---------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ImageHeader:
    """The kind of an image file, "PNG", "JPEG" or "WEBP", and its size in pixels."""

    kind: str
    width: int
    height: int


def image_header(data: bytes) -> ImageHeader | None:
    """Return the header of an image file; None if it is none of the three kinds. Of a PNG it is the first of its headers."""
    if data[:8] == _PNG:
        is_sized = data[12:16] == b"IHDR" and len(data) >= 33
        return ImageHeader("PNG", *struct.unpack_from(">II", data, 16)) if is_sized else None
    kind, size = ("JPEG", _jpeg_size(data)) if data[:3] == _JPEG else ("WEBP", webp_size(data))
    return None if size is None else ImageHeader(kind, *size)


def png_is_orderly(data: bytes) -> bool:
    """Whether a PNG has one header and at most `PNG_CHUNKS` chunks. Source: PNG specification, section 5."""
    place = len(_PNG)
    for number in range(PNG_CHUNKS + 1):
        if place + 8 > len(data):
            return True
        size, name = struct.unpack_from(">I4s", data, place)
        if (name == b"IHDR") != (number == 0):
            return False
        if name == b"IEND":
            return True
        place += 12 + size
    return False


def _jpeg_size(data: bytes) -> tuple[int, int] | None:
    """Return the size in a JPEG's frame header; None without exactly one before the first scan. Source: ITU-T T.81, annex B."""
    place, junk_bytes, size = 2, 0, None
    for _ in range(JPEG_SEGMENTS):
        marker = _JPEG_MARKER.search(data, place, place + JPEG_JUNK_BYTES + 2)
        if marker is None:
            return None
        junk_bytes += marker.start() - place
        kind, place = marker[1][0], marker.end()
        if junk_bytes > JPEG_JUNK_BYTES or kind < 0xC0:
            return None
        if kind == _JPEG_SCAN:
            return size
        if kind in _JPEG_BARE:
            continue
        if place + 9 > len(data):
            return None
        (length,) = struct.unpack_from(">H", data, place)
        if kind in _JPEG_SIZES:
            if size is not None:
                return None
            height, width = struct.unpack_from(">HH", data, place + 3)
            size = (width, height)
        place += length
    return None


def webp_size(data: bytes) -> tuple[int, int] | None:
    """Return the size at the beginning of a WebP file. Pillow would allocate the whole image for it.

    Source: RFC 9649 (section 2.7 VP8X), RFC 6386 section 9.1 (VP8), WebP lossless specification section 3 (VP8L).
    """
    if len(data) < 25 or data[:4] != b"RIFF" or data[8:12] != b"WEBP":
        return None
    kind = data[12:16]
    if kind in (b"VP8X", b"VP8 ") and len(data) < 30:
        return None
    if kind == b"VP8X":
        return 1 + int.from_bytes(data[24:27], "little"), 1 + int.from_bytes(data[27:30], "little")
    if kind == b"VP8L" and data[20] == 0x2F:
        bits = int.from_bytes(data[21:25], "little")
        return 1 + (bits & 0x3FFF), 1 + (bits >> 14 & 0x3FFF)
    if kind == b"VP8 " and data[23:26] == b"\x9d\x01\x2a":
        return int.from_bytes(data[26:28], "little") & 0x3FFF, int.from_bytes(data[28:30], "little") & 0x3FFF
    return 0, 0


# Audio ----------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class AudioHeader:
    """The header of an audio file. frames: samples of one channel."""

    rate: int
    channels: int
    frames: int

    @property
    def is_plausible(self) -> bool:
        return self.rate in RATES and self.channels in CHANNELS and self.frames > 0


def wav_header(data: bytes) -> AudioHeader | None:
    """Return the header of a WAV file, by the bytes that are really there; None if it is not one.

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


def _wav_sound(known: tuple[int, ...], held_bytes: int) -> AudioHeader | None:
    tag, channels, rate, _, _, bits = known
    frame_bytes = channels * (bits // 8)  # the header's own bytes per second and a frame may say anything
    if tag not in WAV_FORMATS or bits not in (8, 16, 24, 32, 64) or not channels:
        return None
    return AudioHeader(rate, channels, held_bytes // frame_bytes)


def flac_header(data: bytes) -> AudioHeader | None:
    """Return the fields of a FLAC file's first block; None if it is not FLAC or does not state its length. Source: RFC 9639
    section 8.2."""
    if len(data) < 26 or data[:4] != b"fLaC" or data[4] & 0x7F != 0:
        return None
    packed = int.from_bytes(data[18:26], "big")
    return AudioHeader(packed >> 44, (packed >> 41 & 7) + 1, packed & (2**36 - 1))


def ogg_rate(data: bytes) -> int | None:
    """Return the rate of an Ogg file at most, by its first packet; None for another codec than Vorbis and Opus. libsndfile decodes
    Opus at `OPUS_RATE` or less. Source: RFC 3533 section 6, Vorbis I section 4.2.2, RFC 7845 section 5.1."""
    if len(data) < 28 or data[:4] != b"OggS":
        return None
    packet = data[27 + data[26] : 27 + data[26] + 16]
    if packet[:7] == b"\x01vorbis" and len(packet) == 16:
        return int.from_bytes(packet[12:16], "little")
    return OPUS_RATE if packet[:8] == b"OpusHead" else None


def ogg_is_orderly(data: bytes) -> bool:
    """Whether an Ogg file is at most `OGG_PAGES` whole pages of one stream, each at once behind the other, with right checksums.

    libogg looks for the next page at every byte after a wrong one, and libsndfile does so again and again. Source: RFC 3533
    section 6.
    """
    place, serial = 0, data[14:18]
    for _ in range(OGG_PAGES):
        if place == len(data):
            return True
        segments = place + 27
        if data[place : place + 5] != b"OggS\0" or segments > len(data) or data[place + 14 : place + 18] != serial:
            return False
        body = segments + data[segments - 1]
        end = body + sum(data[segments:body])
        if end > len(data):
            return False
        page = data[place : place + 22] + bytes(4) + data[place + 26 : end]
        if _ogg_checksum(page) != int.from_bytes(data[place + 22 : place + 26], "little"):
            return False
        place = end
    return False


def _ogg_checksum(page: bytes) -> int:
    """Return the CRC of RFC 3533: zlib's polynomial with the bits of bytes and result in the other order, from 0."""
    mirrored = zlib.crc32(page.translate(_REVERSED), 0xFFFFFFFF) ^ 0xFFFFFFFF
    return int.from_bytes(mirrored.to_bytes(4, "little").translate(_REVERSED), "big")
