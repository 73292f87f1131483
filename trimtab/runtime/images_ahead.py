"""Images resized and cut into patches before their prompt is tokenized, on other threads than the one that tokenizes.

    ahead = ahead_of(processor)          # None for a processor without images
    ahead.prepare(pictures)              # any thread
    processor(text=..., images=pictures) # takes what was prepared for these very pictures

A processor calls its image processor with options of its own, so they are known after the first prompt with images, which is
resized where it is tokenized. What was prepared is used once, and only for the same pictures with the same options: the result is
that of the same call.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from PIL import Image

_KEPT = "trimtab_prepared"
_installing = threading.Lock()


@dataclass(frozen=True)
class _Call:
    """How a processor calls its image processor. is_nested: the pictures of its one text are in a list of their own."""

    is_by_name: bool
    is_nested: bool
    options: dict[str, Any]


@dataclass(frozen=True)
class _Prepared:
    pictures: tuple[Image.Image, ...]
    call: _Call
    output: Any


class ImagesAhead:
    """Stands for an image processor, and is one to all who ask it anything."""

    def __init__(self, image_processor: Any) -> None:
        self._real = image_processor
        self._call: _Call | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        given = kwargs["images"] if "images" in kwargs else args[0] if args else None
        call, pictures = _call_of(given, args, kwargs), _flat(given)
        if call is None or not pictures:
            return self._real(*args, **kwargs)
        self._call = call
        prepared = vars(pictures[0]).pop(_KEPT, None)
        if prepared is not None and prepared.call == call and _are_same(prepared.pictures, pictures):
            return prepared.output
        return self._real(*args, **kwargs)

    def prepare(self, pictures: Sequence[Image.Image]) -> None:
        """Resize the pictures of one prompt now. Nothing is raised: what cannot be prepared fails where it is needed."""
        call = self._call
        if call is None or not pictures:
            return
        given: Any = [list(pictures)] if call.is_nested else list(pictures)
        with suppress(Exception):
            output = self._real(images=given, **call.options) if call.is_by_name else self._real(given, **call.options)
            vars(pictures[0])[_KEPT] = _Prepared(tuple(pictures), call, output)


def ahead_of(processor: Any) -> ImagesAhead | None:
    """Return what resizes images for a processor ahead of its prompts, put in place the first time; None without images."""
    with _installing:
        found = vars(processor).get("image_processor")
        if found is None or isinstance(found, ImagesAhead):
            return found
        processor.image_processor = ImagesAhead(found)
        return processor.image_processor  # type: ignore[no-any-return]


def _call_of(given: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Call | None:
    """Return how a call was made, None for one that cannot be repeated with other pictures."""
    is_by_name = "images" in kwargs
    is_nested = isinstance(given, (list, tuple)) and len(given) == 1 and isinstance(given[0], (list, tuple))
    options = {name: value for name, value in kwargs.items() if name != "images"}
    return None if len(args) > (not is_by_name) else _Call(is_by_name, is_nested, options)


def _flat(given: Any) -> list[Image.Image]:
    """Return the pictures of a call; none if something else is among them, or they belong to several texts."""
    if isinstance(given, (list, tuple)) and len(given) == 1 and isinstance(given[0], (list, tuple)):
        given = given[0]
    is_plain = isinstance(given, (list, tuple)) and all(isinstance(one, Image.Image) for one in given)
    return list(given) if is_plain else []


def _are_same(first: Sequence[Any], second: Sequence[Any]) -> bool:
    return len(first) == len(second) and all(one is other for one, other in zip(first, second, strict=True))
