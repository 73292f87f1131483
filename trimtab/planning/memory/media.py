"""How much host memory do the images and audio of a server's requests take?"""

from __future__ import annotations

from dataclasses import dataclass, field

from trimtab.checkpoint.anatomy import Anatomy
from trimtab.errors import gib
from trimtab.planning.memory.activations import FLOAT32_BYTES, patches_of
from trimtab.request import LoadRequest

MEDIA, FILES = "media", "media_files"
# The most bytes per pixel of an image before it becomes patches: 4 of Pillow's RGB image, up to 13.8 of its conversion and of an
# image processor (17.8 measured with Gemma 4's, rotated PNG or JPEG), and two frames of libwebp: 20.4 measured.
PREPARED_PIXEL_BYTES, WEBP_PIXEL_BYTES = 18, 21
# Bytes per pixel of a decoded image that waits for the others of its request.
HELD_PIXEL_BYTES = 4
# Values of a patch (Qwen's: 2 frames of 14 x 14 pixels; others have fewer), and how many copies of all patches exist
# while a processor stacks those of several images: 2.8 measured with Pixtral's, 2.0 with Gemma 4's and Qwen's.
PATCH_VALUES, PATCH_COPIES = 1176, 3
# Bytes per frame of an audio clip in its own rate (mono float32, twice while its blocks are joined), and bytes per
# second of a feature extractor's output (measured with Gemma 4's).
FRAME_BYTES, FEATURE_BYTES_PER_S = 8, 1_300_000
MOST_RATE = 768_000
# Several ordinary requests are decoded at once, even with small limits.
LEAST_BUDGET_BYTES = 256 * 2**20
# Base64 takes four characters for three bytes.
FILE_SHARE = 3 / 4


@dataclass(frozen=True, kw_only=True)
class ServedMedia:
    """The media that requests of a server may contain.

    kinds: "image", "audio" or both, as clients may send. request_pixels, request_audio_s: all images and all audio of
    one request. all_body_bytes: the bodies of all requests together.
    """

    kinds: tuple[str, ...]
    request_pixels: int
    request_audio_s: float
    all_body_bytes: int


@dataclass(frozen=True, kw_only=True)
class MediaMemory:
    """Host memory of media, by item; the reason names the limits behind it. Empty for a model that takes text only."""

    by_item: dict[str, int] = field(default_factory=dict)
    reason: str = ""


NO_MEDIA = MediaMemory()


def sound_bytes(seconds: float, rate: int) -> int:
    """Return the most bytes of audio of a length and a rate before it becomes features. Channels are mixed block by block."""
    return int(seconds * (rate * FRAME_BYTES + FEATURE_BYTES_PER_S))


def patch_bytes(images: int, model_type: str) -> int:
    """Return the bytes of image patches while a processor makes them, for images of the processor's largest default
    size.

    Not covered: families with tiles that `PATCHES` does not list make up to twice as many.
    """
    return images * patches_of(model_type)[0] * PATCH_VALUES * FLOAT32_BYTES * PATCH_COPIES


def request_bytes(image_bytes: int, pixels: int, audio_bytes: int) -> int:
    """Return the bytes of one request. image_bytes: of its decoded images and their patches. Images are decoded first, and wait
    in `HELD_PIXEL_BYTES` while its audio is decoded."""
    return max(image_bytes, HELD_PIXEL_BYTES * pixels + audio_bytes)


def media_memory(request: LoadRequest, anatomy: Anatomy, served: ServedMedia) -> MediaMemory:
    """Return the host memory of a server's media. The budget of the decoding threads is taken from the start of a decoding until
    the prompt is computed, and is never below the need of one allowed request."""
    images = request.images if "image" in served.kinds and "vision" in anatomy.parts else 0
    pixels = served.request_pixels if images else 0
    audio_s = min(served.request_audio_s, request.audio_s) if "audio" in served.kinds and "audio" in anatomy.parts else 0.0
    if not pixels and not audio_s:
        return NO_MEDIA
    image_bytes = WEBP_PIXEL_BYTES * pixels + patch_bytes(images, anatomy.model_type)
    needed = request_bytes(image_bytes, pixels, sound_bytes(audio_s, MOST_RATE))
    by_item = {MEDIA: max(needed, LEAST_BUDGET_BYTES), FILES: int(served.all_body_bytes * FILE_SHARE)}
    limits = [f"{pixels} pixels in images={images}"] * bool(pixels) + [f"audio_s={audio_s:g}"] * bool(audio_s)
    reason = (
        f"one request with {' and '.join(limits)} needs up to {gib(needed)}, the budget of all is {gib(by_item[MEDIA])}; received "
        f"files take up to {gib(by_item[FILES])} (all_body_bytes={served.all_body_bytes})"
    )
    return MediaMemory(by_item=by_item, reason=reason)
