"""Which numbers and texts of schemas, tools and call arguments can JSON not represent?"""

from __future__ import annotations

import sys
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
    waiting = [value]
    while waiting:
        item = waiting.pop()
        if isinstance(item, dict):
            waiting.extend(item)
            waiting.extend(item.values())
        elif isinstance(item, (list, tuple)):
            waiting.extend(item)
        elif isinstance(item, str):
            try:
                item.encode()
            except UnicodeEncodeError as exc:
                raise RequestError("contains half of a surrogate pair, which is not a character", field=field) from exc
        elif isinstance(item, (int, float)) and not abs(item) <= LARGEST:  # NaN is not below any number
            raise RequestError("contains a number that JSON does not allow", field=field)
