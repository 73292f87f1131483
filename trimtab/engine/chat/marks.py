"""Marks of a prompt's tokens: media, and the opening that chats share."""

from __future__ import annotations

from collections.abc import Callable, Sequence, Set
from itertools import groupby
from typing import TYPE_CHECKING

import numpy as np

from trimtab.engine.kv.prefix_store import Mark, scope_of

if TYPE_CHECKING:
    from PIL import Image


def picture_digest(picture: Image.Image) -> bytes:
    """Return the digest of a decoded image's pixels (Pillow, RGB)."""
    return scope_of("picture", repr((picture.mode, picture.size)), picture.tobytes())


def sound_digest(samples: np.ndarray) -> bytes:
    """Return the digest of an audio clip's samples."""
    return scope_of("sound", repr((samples.shape, str(samples.dtype))), np.ascontiguousarray(samples).tobytes())


def marks_of(token_ids: Sequence[int], kinds: Sequence[tuple[Set[int], Sequence[bytes]]]) -> tuple[Mark, ...]:
    """Return the marks of a prompt, in order. kinds: (placeholder ids, digests in the order of the prompt) of images, of audio.

    Where runs of placeholders and media do not match one to one (rows of an image with a separator between them), each run
    represents all of them. Empty where media have no placeholders: then the media of the tokens are unknown.
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


def opening_of(
    opening: str, controls: Sequence[tuple[int, int]], token_ids: Sequence[int], turns: Sequence[int],
    encode: Callable[[str], Sequence[int]],
) -> int:  # fmt: skip
    """Return how many tokens of a prompt are those of its opening, the text at its beginning; 0 if that is unknown.

    controls: (end, token id) of each control token of the opening. turns: of the prompt (`turns_of`). The text after the last
    control token is tokenized by itself, as tokenizers do; a last token that reaches beyond the opening is not counted.
    """
    ends, ids = [end for end, _ in controls], [token_id for _, token_id in controls]
    own = [token_ids[turn - 1] for turn in turns[: len(ids) + 1]]
    before = next((place for place in (0, 1) if own[place : place + len(ids)] == ids), None)  # 1: the tokenizer added one
    if not opening or before is None:
        return 0
    start = turns[before + len(ids) - 1] if before + len(ids) else 0
    behind = encode(opening[ends[-1] if ends else 0 :])
    pairs = enumerate(zip(behind, token_ids[start:], strict=False))
    return start + next((place for place, (one, other) in pairs if one != other), min(len(behind), len(token_ids) - start))
