"""How is a saved plan read, with every type and range checked?"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from functools import cache
from types import NoneType, UnionType
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints

from trimtab.errors import RequestError

Made = TypeVar("Made")
# Larger than any machine's memory, and than 64 bits.
MOST = 2**62


def read_fields(kind: type[Made], value: Any, where: str) -> dict[str, Any]:
    """Return the checked values of a frozen dataclass by name, nested ones made. Errors: RequestError with the field's path."""
    if not isinstance(value, Mapping):
        raise RequestError("must be an object", field=where, value=_short(value))
    known = set(_hints(kind))  # type: ignore[arg-type]
    for key in [*sorted(map(str, value.keys() - known)), *sorted(known - value.keys())]:
        raise RequestError("is missing" if key in known else "unknown key", field=f"{where}.{key}", allowed=sorted(known))
    hints = _hints(kind)  # type: ignore[arg-type]
    return {name: read_value(hint, value[name], f"{where}.{name}") for name, hint in hints.items()}


def read_row(kind: type[Made], value: Any, where: str) -> Made:
    """Return a frozen dataclass. Errors: as `read_fields`, and those of the class itself."""
    return kind(**read_fields(kind, value, where))


@cache
def _hints(kind: type) -> dict[str, Any]:
    """Return name -> type of the fields that are part of a value."""
    hints = get_type_hints(kind)
    return {item.name: hints[item.name] for item in fields(kind) if item.compare}


def read_value(hint: Any, value: Any, where: str) -> Any:
    """Return a value converted to a type: numbers, texts, None, tuples, mappings with text keys, and frozen dataclasses."""
    origin, inner = get_origin(hint), get_args(hint)
    if origin in (Union, UnionType):
        return _one_of(inner, value, where)
    if is_dataclass(hint):
        return read_row(hint, value, where)  # type: ignore[arg-type]
    if origin is tuple:
        return _tuple(inner, value, where)
    if origin is not None and issubclass(origin, Mapping):
        if not isinstance(value, Mapping) or not all(isinstance(key, str) for key in value):
            raise RequestError("must be an object", field=where, value=_short(value))
        return {key: read_value(inner[1], one, f"{where}.{key}") for key, one in value.items()}
    return _plain(hint, value, where)


def _one_of(hints: tuple[Any, ...], value: Any, where: str) -> Any:
    if value is None and NoneType in hints:
        return None
    rest = [hint for hint in hints if hint is not NoneType]
    if len(rest) == 1:
        return read_value(rest[0], value, where)
    for hint in rest:  # plain types alone, such as int | str
        if type(value) is hint:
            return read_value(hint, value, where)
    words = " or ".join(_WORDS[hint] for hint in rest)
    raise RequestError(f"must be {words}", field=where, value=_short(value))


def _tuple(inner: tuple[Any, ...], value: Any, where: str) -> tuple[Any, ...]:
    if not isinstance(value, (list, tuple)):
        raise RequestError("must be a list", field=where, value=_short(value))
    if len(inner) == 2 and inner[1] is Ellipsis:
        return tuple(read_value(inner[0], one, f"{where}[{place}]") for place, one in enumerate(value))
    if len(value) != len(inner):
        raise RequestError(f"must have {len(inner)} values", field=where, value=_short(value))
    pairs = enumerate(zip(inner, value, strict=True))
    return tuple(read_value(hint, one, f"{where}[{place}]") for place, (hint, one) in pairs)


_WORDS = {int: "an integer", float: "a number", str: "a text", bool: "true or false"}


def _plain(hint: Any, value: Any, where: str) -> Any:
    kinds = (int, float) if hint is float else (hint,)
    if type(value) not in kinds:  # a bool is no number here
        raise RequestError(f"must be {_WORDS[hint]}", field=where, value=_short(value))
    if hint in (int, float) and not (0 <= value < MOST and math.isfinite(value)):
        raise RequestError(f"must be {_WORDS[hint]} from 0 on", field=where, value=_short(value))
    return float(value) if hint is float else value


def _short(value: Any) -> Any:
    return value if value is None or isinstance(value, (int, float)) else repr(value)[:80]
