"""Marks beside a prompt's tokens: the image or audio of a placeholder, and the ends of turns."""

from __future__ import annotations

from collections.abc import Sequence, Set
from itertools import groupby
from typing import Any

import numpy as np

from trimtab.runtime.prefix_store import Mark, scope_of


def picture_digest(picture: Any) -> bytes:
    """Return the digest of a decoded picture's pixels (Pillow, RGB)."""
    return scope_of("picture", repr((picture.mode, picture.size)), picture.tobytes())


def sound_digest(samples: np.ndarray) -> bytes:
    """Return the digest of an audio clip's samples."""
    return scope_of("sound", repr((samples.shape, str(samples.dtype))), np.ascontiguousarray(samples).tobytes())


def marks_of(token_ids: Sequence[int], kinds: Sequence[tuple[Set[int], Sequence[bytes]]]) -> tuple[Mark, ...]:
    """Return the marks of a prompt, in order. kinds: (placeholder ids, digests in the order of the prompt) of pictures, of sounds.

    Where runs of placeholders and media do not match one to one (rows of an image with a separator between them), each run
    stands for all of them. Empty where media have no placeholders: then nothing says what the tokens stand for.
    """
    marks: list[Mark] = []
    for placeholders, digests in kinds:
        runs, place = [], 0
        for is_media, group in groupby(token in placeholders for token in token_ids):
            count = len(list(group))
            if is_media:
                runs.append((place, place + count))
            place += count
        if bool(runs) != bool(digests):
            return ()
        each = list(digests) if len(runs) == len(digests) else [scope_of("several", *digests)] * len(runs)
        marks += [Mark(start, end, digest) for (start, end), digest in zip(runs, each, strict=True)]
    return tuple(sorted(marks, key=lambda mark: mark.start))


def turns_of(token_ids: Sequence[int], control_ids: Set[int]) -> tuple[int, ...]:
    """Return how many tokens there are up to each control token, itself included: turns, system prompts and tools end there."""
    return tuple(place + 1 for place, token in enumerate(token_ids) if token in control_ids)
