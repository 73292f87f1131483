"""How do images and audio become pixels and samples, with limits?"""

from __future__ import annotations

import io
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, SupportsInt

import numpy as np
from PIL import Image, ImageOps, UnidentifiedImageError

from trimtab.checkpoint.unreadable import path_hint
from trimtab.engine.chat.media_headers import flac_header, image_header, ogg_rate, wav_header
from trimtab.errors import RequestError
from trimtab.planning.memory.media import MOST_RATE, PREPARED_PIXEL_BYTES, WEBP_PIXEL_BYTES
from trimtab.request import MAX_SOUND_S, check_picture_size

if TYPE_CHECKING:
    from soundfile import SoundFile

IMAGE_FORMATS = ("PNG", "JPEG", "WEBP")
# libsndfile's names of accepted formats, and the users' names.
AUDIO_FORMATS = ("WAV", "WAVEX", "FLAC", "RF64", "OGG", "MP3")
AUDIO_NAMES = ("wav", "flac", "ogg", "mp3")
MAX_PIXELS = 64 * 10**6
# The longer side of an image that is requested in low detail, OpenAI's number.
LOW_DETAIL_SIDE = 512
ORIENTATION = 0x0112  # EXIF's tag
# The rotation that makes an image upright, by the value of that tag. Source: EXIF 2.32, section 4.6.4.
TURNS = {
    2: Image.Transpose.FLIP_LEFT_RIGHT, 3: Image.Transpose.ROTATE_180, 4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE, 6: Image.Transpose.ROTATE_270, 7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}  # fmt: skip
# Transparent images are put on white in strips of this many pixels.
STRIP_PIXELS = 2**18
SAMPLE_RATE = 16_000
RATES, MAX_CHANNELS = range(1_000, MOST_RATE + 1), 16
# Frames of a file that are decoded and mixed at a time: all channels of a whole clip would be up to 16 times its samples.
BLOCK_FRAMES = 2**16
# No MP3 has a higher one, and learning the rate of a given one takes reading the whole file.
MOST_MP3_RATE = 48_000
_MP3_FRAME = re.compile(rb"\xff[\xe2-\xff]")
_ID3_HEADER_BYTES, MOST_ID3_TAGS = 10, 8


def _named(source: object) -> str:
    return str(source) if isinstance(source, (str, Path)) else type(source).__name__


def several(value: object) -> Sequence[object]:
    """Return one medium or several as a sequence; (samples, rate) is one audio clip."""
    if value is None:
        return ()
    is_samples = isinstance(value, tuple) and len(value) == 2 and isinstance(value[1], int)
    is_swapped = isinstance(value, tuple) and len(value) == 2 and isinstance(value[0], int)  # refused where it is read
    return tuple(value) if isinstance(value, (list, tuple)) and not (is_samples or is_swapped) else (value,)


def read_image(source: object) -> Image.Image:
    """Return an RGB image from a path, bytes, a Pillow image, or uint8 values [H, W] or [H, W, 3 or 4].

    Errors: RequestError(field="image"). The image is turned upright by its EXIF, and its transparency becomes white.
    """
    if isinstance(source, LowDetail):
        return source.read()
    if isinstance(source, np.ndarray):
        source = _of_array(source)
    if isinstance(source, Image.Image):
        return _upright(source, _named(source))
    stream = io.BytesIO(source) if isinstance(source, (bytes, bytearray, memoryview)) else source
    if not isinstance(stream, (io.BytesIO, str, Path)):
        raise RequestError("is not a path, bytes, a Pillow image or an array", field="image", value=_named(source))
    try:
        with Image.open(stream, formats=IMAGE_FORMATS) as image:
            return _upright(image, _named(source))
    except FileNotFoundError as exc:
        raise RequestError("no such file", field="image", value=_named(source), hint=path_hint(_named(source))) from exc
    except UnidentifiedImageError as exc:
        raise RequestError(
            "is not an image in a supported format", field="image", value=_named(source), allowed=IMAGE_FORMATS
        ) from exc
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as exc:
        why = getattr(exc, "strerror", None)  # the system's
        reason = f"cannot be {'read' if why else 'decoded'} ({why or exc})"
        raise RequestError(reason, field="image", value=_named(source)) from exc


def picture_bytes(data: bytes) -> tuple[int, int]:
    """Return how many bytes an image takes at most while it is decoded and prepared for a tower, and its pixels, by its header;
    zeros without one."""
    header = image_header(data)
    if header is None:  # the decoder reports the error
        return 0, 0
    pixels = header.width * header.height
    return (WEBP_PIXEL_BYTES if header.kind == "WEBP" else PREPARED_PIXEL_BYTES) * pixels, pixels


def sound_rate(data: bytes) -> int:
    """Return the rate of an audio file at most, by its header; 0 for a file that is not decoded."""
    start = _after_tags(data)
    if _MP3_FRAME.match(data, start):
        return MOST_MP3_RATE
    if start:  # a tag may precede other formats too, which libsndfile then decodes
        return MOST_RATE
    if data[:4] == b"OggS":
        return min(ogg_rate(data) or MOST_RATE, MOST_RATE)
    header = wav_header(data) or flac_header(data)
    return 0 if header is None else min(header.rate, MOST_RATE)


def _after_tags(data: bytes) -> int:
    """Return where a file begins after its ID3 tags; footers are not skipped, as in libsndfile. Source: ID3v2.4 section 3.1; a
    size has 7 bits per byte."""
    start = 0
    for _ in range(MOST_ID3_TAGS):
        head = data[start : start + _ID3_HEADER_BYTES]
        if len(head) < _ID3_HEADER_BYTES or head[:3] != b"ID3":
            break
        size = sum((byte & 0x7F) << shift for byte, shift in zip(head[6:], (21, 14, 7, 0), strict=True))
        start += _ID3_HEADER_BYTES + size
    return start


@dataclass(frozen=True)
class LowDetail:
    """An image that the model sees with sides of LOW_DETAIL_SIDE pixels at most."""

    source: object

    def read(self) -> Image.Image:
        """Return it as `read_image` does, made smaller if it is larger."""
        picture, most = read_image(self.source), (LOW_DETAIL_SIDE, LOW_DETAIL_SIDE)
        return ImageOps.contain(picture, most) if max(picture.size) > LOW_DETAIL_SIDE else picture


def _of_array(values: np.ndarray) -> Image.Image:
    is_shaped = values.ndim == 2 or (values.ndim == 3 and values.shape[2] in (3, 4))
    if values.dtype != np.uint8 or not is_shaped or not values.size:
        raise RequestError(
            "values are uint8, in the shape [H, W] or [H, W, 3 or 4]", field="image", value=(values.shape, str(values.dtype))
        )
    return Image.fromarray(np.ascontiguousarray(values))


def _upright(image: Image.Image, name: str) -> Image.Image:
    check_picture_size(*image.size, max_pixels=MAX_PIXELS, field_name="image", value=name)  # before pixels are decoded
    # Each copy of a large image is 128 MB: none is made without a change.
    image.load()
    # Not by Pillow's exif_transpose: it writes the other tags again, and fails where one of them is no valid value.
    turn = TURNS.get(image.getexif().get(ORIENTATION, 1))
    turned = image if turn is None else image.transpose(turn)
    if turn is not None:  # the result may be read again: the tag, from EXIF or XMP, must not turn it twice
        turned.info = {key: value for key, value in turned.info.items() if key == "transparency"}
    if turned.mode in ("RGBA", "LA", "PA") or "transparency" in turned.info:
        return _on_white(turned)
    if turned.mode != "RGB":
        return turned.convert("RGB")
    # A WebP file's object keeps libwebp's frames, twice the size of the image.
    return turned.copy() if turned.format == "WEBP" else turned


def _on_white(image: Image.Image) -> Image.Image:
    """Return a transparent image as RGB on white, in strips: three whole copies would take 12 bytes per pixel more."""
    width, height = image.size
    picture, step = Image.new("RGB", image.size), max(1, STRIP_PIXELS // width)
    for top in range(0, height, step):
        strip = image.crop((0, top, width, min(top + step, height))).convert("RGBA")
        white = Image.new("RGBA", strip.size, (255, 255, 255, 255))
        picture.paste(Image.alpha_composite(white, strip).convert("RGB"), (0, top))
    return picture


def read_audio(source: object, *, max_s: float = MAX_SOUND_S) -> np.ndarray:
    """Return mono float32 samples at 16 kHz from a path, bytes, (samples, rate), or samples [N] that are at 16 kHz.

    samples: floats [N] or [N, channels]. No more than max_s seconds are decoded. Errors: RequestError(field="audio"). Channels are
    mixed; soxr resamples.
    """
    if isinstance(source, np.ndarray):
        source = (source, SAMPLE_RATE)
    if isinstance(source, tuple):
        samples, rate = _given(source)
    else:
        samples, rate = _decoded(source, max_s)
    if not len(samples) or not np.isfinite(samples).all():
        raise RequestError("holds no samples, or some that are not numbers", field="audio", value=_named(source))
    if len(samples) > max_s * rate:
        raise RequestError(f"lasts {len(samples) / rate:.1f} s, the limit is {max_s:.1f} s", field="audio", value=_named(source))
    mono = np.asarray(samples.mean(axis=1) if samples.ndim == 2 else samples, dtype=np.float32)
    if rate == SAMPLE_RATE:
        return mono
    import soxr

    return np.asarray(soxr.resample(mono, rate, SAMPLE_RATE), dtype=np.float32)


def _mixed(file: SoundFile, most_frames: int) -> np.ndarray:
    """Return up to this many frames of an open file as mono float32 [N], mixed block by block."""
    blocks: list[np.ndarray] = []
    while most_frames > 0:
        block = file.read(frames=min(BLOCK_FRAMES, most_frames), dtype="float32", always_2d=True)
        if not len(block):
            break
        blocks.append(block.mean(axis=1))
        most_frames -= len(block)
    return np.concatenate(blocks) if blocks else np.zeros(0, np.float32)


def _given(source: tuple[object, ...]) -> tuple[np.ndarray, int]:
    """Return samples and their rate. Errors: RequestError for anything else."""
    samples, rate = source if len(source) == 2 else (None, None)
    if not isinstance(samples, np.ndarray) or not isinstance(rate, SupportsInt) or isinstance(rate, bool) or rate not in RATES:
        raise RequestError(
            "is not (samples, rate)", field="audio", value=tuple(type(item).__name__ for item in source),
            hint=f"Give an array of floats and a rate from {RATES[0]} to {RATES[-1]}",
        )  # fmt: skip
    is_shaped = samples.ndim == 1 or (samples.ndim == 2 and samples.shape[1] <= MAX_CHANNELS)
    if not is_shaped or not np.issubdtype(samples.dtype, np.floating):
        raise RequestError(
            "samples are floats from -1 to 1, in one row or as [samples, channels]", field="audio",
            value=(samples.shape, str(samples.dtype)),
        )  # fmt: skip
    return samples, int(rate)


def _decoded(source: object, max_s: float) -> tuple[np.ndarray, int]:
    """Return the samples [N] of a file at its rate, all channels mixed. Errors: RequestError."""
    import soundfile

    stream = io.BytesIO(source) if isinstance(source, (bytes, bytearray, memoryview)) else source
    if not isinstance(stream, (io.BytesIO, str, Path)):
        raise RequestError("is not a path, bytes or samples", field="audio", value=_named(source))
    if isinstance(stream, (str, Path)) and not Path(stream).is_file():
        raise RequestError("no such file", field="audio", value=_named(source), hint=path_hint(_named(source)))
    try:
        with soundfile.SoundFile(stream) as file:
            if file.format not in AUDIO_FORMATS:
                raise RequestError(f"is {file.format}", field="audio", value=_named(source), allowed=AUDIO_NAMES)
            rate = file.samplerate
            if rate not in RATES or file.channels > MAX_CHANNELS:
                raise RequestError(
                    f"has {file.channels} channels at {rate} Hz, which is not supported", field="audio", value=_named(source)
                )
            if 0 < file.frames < 2**62 and file.frames / rate > max_s:  # some files do not say how long they are
                raise RequestError(
                    f"lasts {file.frames / rate:.1f} s, the limit is {max_s:.1f} s", field="audio", value=_named(source)
                )
            # A header may say less than there is: no more than one sample above the limit is decoded.
            return _mixed(file, int(max_s * rate) + 1), rate
    except (soundfile.LibsndfileError, RuntimeError) as exc:
        # Its own text names Python's object in place of a path.
        why = str(getattr(exc, "error_string", exc)).strip().rstrip(".")
        raise RequestError(f"cannot be decoded ({why})", field="audio", value=_named(source), allowed=AUDIO_NAMES) from exc
