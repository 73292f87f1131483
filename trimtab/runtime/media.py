"""How pictures and sounds become pixels and samples: files, bytes or objects in, one form out, with limits.

Pictures: anything Pillow reads of png, jpeg and webp; turned upright by their EXIF, transparency on white. Sounds: what
libsndfile reads of wav and flac, at any rate and channel count, mixed to mono and resampled to 16 kHz by soxr.
"""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image, ImageOps, UnidentifiedImageError

from trimtab.errors import RequestError

IMAGE_FORMATS = ("PNG", "JPEG", "WEBP")
AUDIO_FORMATS = ("WAV", "WAVEX", "FLAC", "RF64")
MAX_PIXELS = 64 * 10**6
MAX_AUDIO_S = 3600.0
SAMPLE_RATE = 16_000


def _named(source: Any) -> str:
    return str(source) if isinstance(source, (str, Path)) else type(source).__name__


def read_image(source: Any, *, max_pixels: int = MAX_PIXELS) -> Image.Image:
    """Return an RGB picture from a path, bytes or a Pillow image. Errors: RequestError(field="image")."""
    if isinstance(source, Image.Image):
        return _upright(source, max_pixels, _named(source))
    stream: Any = io.BytesIO(source) if isinstance(source, (bytes, bytearray, memoryview)) else source
    if not isinstance(stream, (io.BytesIO, str, Path)):
        raise RequestError("is neither a path, bytes nor a Pillow image", field="image", value=_named(source))
    try:
        with Image.open(stream, formats=IMAGE_FORMATS) as found:
            return _upright(found, max_pixels, _named(source))
    except FileNotFoundError as exc:
        raise RequestError("no such file", field="image", value=_named(source)) from exc
    except UnidentifiedImageError as exc:
        raise RequestError(
            "is not a picture of a known format", field="image", value=_named(source), allowed=IMAGE_FORMATS
        ) from exc
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as exc:
        raise RequestError(f"cannot be decoded ({exc})", field="image", value=_named(source)) from exc


def _upright(found: Image.Image, max_pixels: int, name: str) -> Image.Image:
    width, height = found.size
    if width * height > max_pixels:  # asked before the pixels are decoded
        raise RequestError(f"has {width} x {height} pixels, the limit is {max_pixels}", field="image", value=name)
    turned = ImageOps.exif_transpose(found)
    if turned.mode in ("RGBA", "LA", "PA") or "transparency" in turned.info:
        turned = turned.convert("RGBA")
        white = Image.new("RGBA", turned.size, (255, 255, 255, 255))
        turned = Image.alpha_composite(white, turned)
    return turned.convert("RGB")


def read_audio(source: Any, *, max_s: float = MAX_AUDIO_S) -> np.ndarray:
    """Return mono float32 samples at 16 kHz from a path, bytes, or samples [N] that are already so.

    Errors: RequestError(field="audio").
    """
    import soundfile
    import soxr

    if isinstance(source, np.ndarray):
        if source.ndim != 1 or not np.issubdtype(source.dtype, np.floating) or not np.isfinite(source).all():
            raise RequestError("samples must be one row of finite floats at 16 kHz", field="audio", value=source.shape)
        return _limited(source.astype(np.float32), max_s, "samples")
    stream: Any = io.BytesIO(source) if isinstance(source, (bytes, bytearray, memoryview)) else source
    if not isinstance(stream, (io.BytesIO, str, Path)):
        raise RequestError("is neither a path, bytes nor samples", field="audio", value=_named(source))
    if isinstance(stream, (str, Path)) and not Path(stream).is_file():
        raise RequestError("no such file", field="audio", value=_named(source))
    try:
        with soundfile.SoundFile(stream) as file:
            if file.format not in AUDIO_FORMATS:
                raise RequestError(f"is {file.format}", field="audio", value=_named(source), allowed=("wav", "flac"))
            if file.frames / file.samplerate > max_s:
                raise RequestError(
                    f"lasts {file.frames / file.samplerate:.1f} s, the limit is {max_s:.1f} s",
                    field="audio",
                    value=_named(source),
                )
            samples, rate = file.read(dtype="float32", always_2d=True), file.samplerate
    except soundfile.LibsndfileError as exc:
        raise RequestError(f"cannot be decoded ({exc})", field="audio", value=_named(source)) from exc
    if not len(samples) or not np.isfinite(samples).all():
        raise RequestError("holds no samples", field="audio", value=_named(source))
    mono = samples.mean(axis=1)
    return mono if rate == SAMPLE_RATE else soxr.resample(mono, rate, SAMPLE_RATE).astype(np.float32)


def _limited(samples: np.ndarray, max_s: float, name: str) -> np.ndarray:
    if not samples.size or samples.size > max_s * SAMPLE_RATE:
        raise RequestError(
            f"{samples.size / SAMPLE_RATE:.1f} s, allowed are 0 to {max_s:.1f} s", field="audio", value=name
        )
    return samples
