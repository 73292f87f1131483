"""Can the model read the processed images and audio: patches within its position table, none empty?"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, TypeGuard

from PIL import Image
from torch import Tensor

from trimtab.engine.kv.sequence import media_ids
from trimtab.errors import CheckpointError, RequestError

if TYPE_CHECKING:
    import numpy as np

    from trimtab.engine.formats.hf_types import FeatureExtractor, HFModel

# Audio below this is tried on the extractor alone first: there are windows of up to a tenth of a second.
SHORT_S = 0.5
# Families whose processor gives rows of patches and a grid of them for each image.
IN_GRIDS = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_5")
FILES_HINT = "Copy the processor files of the model into the folder (processor_config.json, preprocessor_config.json)"
SHAPE_HINT = "Crop it, or send one that is less narrow"


def check_pictures(config: object, encoded: Mapping[str, object], pictures: Sequence[Image.Image]) -> None:
    """Raise RequestError(field="image") for an image that the model has no patches or no positions for. A GPU answers a position
    beyond a table with an assertion that ends the process. Gemma 3, 3n, CLIP and SigLIP towers resize every image to one size;
    bounds_check.py checks families that are unknown here."""
    vision = getattr(config, "vision_config", None)
    for number, (columns, rows) in enumerate(_grids(vision, encoded)):
        size = f"image {number + 1}"
        if number < len(pictures):
            size += f" of {pictures[number].width} x {pictures[number].height} pixels"
        if not rows or not columns:
            raise _refused(number, "image", f"{size} is too small or too narrow: it has no complete patch", SHAPE_HINT)
        limit = _positions(vision, encoded)
        if limit is not None and max(rows, columns) > limit:
            why = f"{size} becomes {columns} x {rows} patches, this model has {limit} positions per side"
            raise _refused(number, "image", why, SHAPE_HINT)


def check_taken(encoded: Mapping[str, object], folder: Path) -> None:
    """Raise CheckpointError if the processor made no values of images and audio clips: the model would ignore them.

    A folder that has a tokenizer and no processor files gives a processor that takes media and drops them.
    """
    if not any(isinstance(value, Tensor) and value.is_floating_point() for value in encoded.values()):
        raise CheckpointError("its processor ignores images and audio", path=folder, hint=FILES_HINT)


def check_tower(hf_model: HFModel, encoded: Mapping[str, object], folder: Path) -> None:
    """Raise CheckpointError if a processor makes other images than the tower reads: its files are another model's. Known are Qwen's
    patches (IN_GRIDS), and Gemma 3's images of one size."""
    config, vision = hf_model.config, getattr(hf_model.config, "vision_config", None)
    pixels, grids, ids = (encoded.get(name) for name in ("pixel_values", "image_grid_thw", "input_ids"))
    if vision is None or not isinstance(pixels, Tensor) or not isinstance(ids, Tensor):
        return
    if str(config.model_type).startswith(IN_GRIDS) and isinstance(grids, Tensor):
        sides = (vision.temporal_patch_size, vision.patch_size)
        if not all(isinstance(one, int) for one in sides):
            return
        made, read = pixels.shape[-1:], [getattr(vision, "in_channels", 3) * sides[0] * sides[1] ** 2]
        soft = int(grids.prod(dim=-1).sum()) // vision.spatial_merge_size**2
    elif config.model_type == "gemma3":
        made, read = pixels.shape[-2:], [vision.image_size] * 2
        soft = config.mm_tokens_per_image * pixels.shape[0]
    else:
        return
    found, wanted = (" x ".join(map(str, shape)) + " values" for shape in (made, read))
    if found == wanted:
        count = sum(int((ids == token).sum()) for token in media_ids(hf_model)[0])
        found, wanted = f"{count} tokens", f"{soft} tokens"
    if found != wanted:
        raise CheckpointError(f"its processor makes images of {found}, the model reads {wanted}", path=folder, hint=FILES_HINT)


class Vision(Protocol):  # the configuration of Pixtral's tower
    patch_size: int
    image_size: int


def _refused(number: int, field: str, reason: str, hint: str) -> RequestError:
    return RequestError(reason, field=field, hint=hint, number=number)


def _grids(vision: object, encoded: Mapping[str, object]) -> list[tuple[int, int]]:
    """Return how many patches each image has in a row and in a column."""
    positions, grids, sizes = (encoded.get(name) for name in ("image_position_ids", "image_grid_thw", "image_sizes"))
    if isinstance(positions, Tensor):  # Gemma 4: [N, patches, (x, y)], -1 where there is none
        return [tuple(int(side) for side in picture.amax(0) + 1) for picture in positions]  # type: ignore[misc]
    if isinstance(grids, Tensor):  # Qwen: [N, (time, rows, columns)]
        return [(int(columns), int(rows)) for _, rows, columns in grids]
    if isinstance(sizes, Tensor) and _is_pixtral(vision):  # [N, (height, width)] once resized
        return [(int(width) // vision.patch_size, int(height) // vision.patch_size) for height, width in sizes]
    return []


def _is_pixtral(vision: object) -> TypeGuard[Vision]:
    return getattr(vision, "model_type", None) == "pixtral"


def _positions(vision: object, encoded: Mapping[str, object]) -> int | None:
    """Return how many positions a side may have; None where they are computed for any."""
    if "image_position_ids" in encoded:
        return getattr(vision, "position_embedding_size", None)
    return int(vision.image_size // vision.patch_size) if _is_pixtral(vision) else None


def check_sound_lengths(extractor: FeatureExtractor | None, sounds: Sequence[np.ndarray], rate: int) -> None:
    """Raise RequestError(field="audio") for audio that gives no frame, or whose end the feature extractor would cut off."""
    if extractor is None or not sounds:  # a model without audio has no extractor
        return
    limit = _most_samples(extractor)
    for number, samples in enumerate(sounds):
        if limit is not None and len(samples) > limit:
            why = (
                f"audio {number + 1} lasts {len(samples) / rate:.1f} s, this model reads {limit / rate:g} s and would "
                "ignore the rest"
            )
            raise _refused(number, "audio", why, "Send it in several parts")
        if len(samples) < SHORT_S * rate and not _has_frames(extractor, samples, rate):
            raise _too_short(number, samples, rate)


def _most_samples(extractor: FeatureExtractor) -> int | None:
    """Return how many samples an extractor reads before it cuts an audio clip off, None if it reads any number."""
    known = inspect.signature(extractor.__call__).parameters
    default = known["max_length"].default if "max_length" in known else None
    if isinstance(default, int):
        return default
    cuts = "truncation" in known and known["truncation"].default is True
    own = getattr(extractor, "n_samples", None)  # Whisper's: its max_length is None and means this
    return own if cuts and isinstance(own, int) else None


def _has_frames(extractor: FeatureExtractor, samples: np.ndarray, rate: int) -> bool:
    try:
        features = extractor([samples], sampling_rate=rate, return_tensors="pt")
    except (ValueError, IndexError, RuntimeError, TypeError, ZeroDivisionError):
        return False  # numpy's and torch's words for a window that is longer than the audio
    return all(value.numel() for value in features.values() if isinstance(value, Tensor))


def _too_short(number: int, samples: np.ndarray, rate: int) -> RequestError:
    why = (
        f"audio {number + 1} lasts {1000 * len(samples) / rate:.1f} ms ({len(samples)} samples at {rate} Hz), too "
        "short for a frame of this model"
    )
    return _refused(number, "audio", why, "Send longer audio")


def check_frames(encoded: Mapping[str, object], sounds: Sequence[np.ndarray], rate: int) -> None:
    """Raise RequestError(field="audio") for an audio clip that is too short for a single frame."""
    mask = encoded.get("input_features_mask")
    if not isinstance(mask, Tensor):
        return
    for number, (frames, samples) in enumerate(zip(mask, sounds, strict=False)):
        # The first of two steps that halve the frames takes every other one.
        if not frames[::2].any():
            raise _too_short(number, samples, rate)
