"""Images cut into patches and audio turned into features before their prompt is tokenized, on threads other than the tokenizer's.

    ahead = images_ahead(processor)       # or audio_ahead; None for a processor without
    ahead.prepare(images)                 # any thread
    processor(text=..., images=images)    # takes the prepared patches of these very images

A processor calls its image processor and its feature extractor with separate options, so they are known after the first prompt
with such media, which are prepared where it is tokenized. Prepared media are used once, and only for the same media with the
same options: the result is that of the same call.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import numpy as np
from PIL import Image

_installing = threading.Lock()


@dataclass(frozen=True)
class _Call:
    """How a processor calls the processor of its media. name: of the argument with them, None without one. is_nested: whether the
    media of its one text are in a separate list."""

    name: str | None
    is_nested: bool
    options: dict[str, object]


@dataclass(frozen=True)
class _Prepared:
    """media: weak references, so that media dropped with their request are dropped here."""

    media: tuple[weakref.ref[object], ...]
    call: _Call
    output: object


class MediaAhead:
    """Replaces an image processor or a feature extractor, with all of its attributes. names: of its argument with
    media. kind: of each of them."""

    def __init__(self, real: Callable[..., object], names: Sequence[str], kind: type) -> None:
        self._real, self._names, self._kind = real, names, kind
        self._call: _Call | None = None
        # By the identity of the first of them.
        self._prepared: dict[int, _Prepared] = {}

    def __getattr__(self, name: str) -> object:
        return getattr(self._real, name)

    def __call__(self, *args: object, **kwargs: object) -> object:
        name = next((name for name in self._names if name in kwargs), None)
        given = kwargs[name] if name else args[0] if args else None
        call, media = self._call_of(given, name, args, kwargs), self._flat(given)
        if call is None or not media:
            return self._real(*args, **kwargs)
        self._call = call
        prepared = self._prepared.pop(id(media[0]), None)
        if prepared is not None and prepared.call == call and _are_same(prepared.media, media):
            return prepared.output
        return self._real(*args, **kwargs)

    def prepare(self, media: Sequence[object]) -> None:
        """Prepare the media of one prompt now. Nothing is raised: an error is raised where the result is needed."""
        call = self._call
        if call is None or not media:
            return
        given = [list(media)] if call.is_nested else list(media)
        with suppress(Exception):
            named = {call.name: given} if call.name else {}
            output = self._real(*(() if named else (given,)), **named, **call.options)
            key = id(media[0])
            first = weakref.ref(media[0], lambda _: self._prepared.pop(key, None))
            self._prepared[key] = _Prepared((first, *map(weakref.ref, media[1:])), call, output)

    def _call_of(self, given: object, name: str | None, args: tuple[object, ...], kwargs: dict[str, object]) -> _Call | None:
        """Return how a call was made, None for one that cannot be repeated with other media."""
        is_nested = isinstance(given, (list, tuple)) and len(given) == 1 and isinstance(given[0], (list, tuple))
        options = {key: value for key, value in kwargs.items() if key != name}
        return None if len(args) > (name is None) else _Call(name, is_nested, options)

    def _flat(self, given: Any) -> list[object]:
        """Return the media of a call; none if something else is among them, or they belong to several texts."""
        if isinstance(given, (list, tuple)) and len(given) == 1 and isinstance(given[0], (list, tuple)):
            given = given[0]
        is_plain = isinstance(given, (list, tuple)) and all(isinstance(one, self._kind) for one in given)
        return list(given) if is_plain else []


# The part of a processor -> the name of its argument, and the form of each medium.
_PARTS: dict[str, tuple[tuple[str, ...], type]] = {
    "image_processor": (("images",), Image.Image),
    "feature_extractor": (("raw_speech", "audio"), np.ndarray),
}


def images_ahead(processor: object) -> MediaAhead | None:
    """Return the object that prepares images for a processor ahead of its prompts, made the first time; None without images."""
    return _ahead(processor, "image_processor")


def audio_ahead(processor: object) -> MediaAhead | None:
    """Return the object that prepares audio for a processor ahead of its prompts, made the first time; None without audio."""
    return _ahead(processor, "feature_extractor")


def _ahead(processor: object, part: str) -> MediaAhead | None:
    with _installing:
        preprocessor = vars(processor).get(part)
        if preprocessor is None or isinstance(preprocessor, MediaAhead):
            return preprocessor
        ahead = MediaAhead(preprocessor, *_PARTS[part])
        setattr(processor, part, ahead)
        return ahead


def _are_same(first: Sequence[weakref.ref[object]], second: Sequence[object]) -> bool:
    return len(first) == len(second) and all(one() is other for one, other in zip(first, second, strict=True))
