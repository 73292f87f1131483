"""Which numbers and texts do plain values have, and which of them can JSON not represent?"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

from trimtab.errors import RequestError

# The largest number of a parser that uses float64, as most do. RFC 8259 section 6.
LARGEST = sys.float_info.max


def check_values(value: Any, *, field: str) -> None:
    """Raise RequestError for NaN, for a number beyond float64, and for half a surrogate pair, also in the name of a
    field.

    value: as a JSON parser gives it, of bounded depth and size. Python reads such values; the tokenizer and llguidance do not, and
    a request with them would fail there.
    """
    for item in scalars(value):
        if isinstance(item, str):
            try:
                item.encode()
            except UnicodeEncodeError as exc:
                raise RequestError("contains half of a surrogate pair, which is not a character", field=field) from exc
        elif isinstance(item, (int, float)) and not abs(item) <= LARGEST:  # NaN is not below any number
            raise RequestError("contains a number that JSON does not allow", field=field)


def scalars(value: Any) -> Iterator[Any]:
    """Yield the names of fields, texts, numbers, truth values and nulls of a value, in no order that matters."""
    waiting = [value]
    while waiting:
        item = waiting.pop()
        if isinstance(item, dict):
            yield from item
            waiting.extend(item.values())
        elif isinstance(item, (list, tuple)):
            waiting.extend(item)
        else:
            yield item


def is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)
