"""What does each operation of a chat template cost in steps and characters?"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence, Sized
from contextlib import contextmanager
from types import BuiltinMethodType, GeneratorType, MethodType
from typing import Any, TypeGuard, TypeVar

from jinja2.ext import Extension
from jinja2.runtime import LoopContext
from jinja2.utils import Cycler, Namespace

T = TypeVar("T")

# Of one template. The largest published ones have about 30,000 characters and 8,000 words and signs.
MAX_TEMPLATE_CHARS, MAX_TEMPLATE_TOKENS = 256 * 2**10, 24_000
# Of one rendering: the base for every template, and the amount for each value and character of its messages.
MAX_STEPS, STEPS_PER_VALUE = 1_000_000, 1_000
MAX_CHARS, CHARS_PER_CHAR = 48 * 2**20, 64
# A template that adds each message to one text copies that text again for each: 4,000 messages of 100 characters are copied 430
# times per counted character, 860 times by sums of more than four parts. The factor limits how often freed texts are written.
FREED_PER_CHAR = 1024
MAX_DEPTH = 100  # of calls, and of values in values
MAX_INT_BITS = 16_384  # 4,300 digits, Python's limit for texts of integers, have 14,285
# The cost of an element of a list or dict, in characters.
ITEM = 64


class SpentError(Exception):
    """A template used more than its budget."""


class Meter:
    """The rest of one rendering's budget."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.steps = self.chars = self.depth = 0
        self.freed = self._reusable = 0
        self._inputs: Mapping[str, object] | None = None

    def step(self) -> None:
        """Count a step. Errors: SpentError."""
        self.steps -= 1
        if self.steps < 0:
            self.check()

    def read(self, chars: int) -> None:
        """Count characters. Errors: SpentError."""
        self.chars -= chars
        if self.chars < 0:
            self.check()

    def spend(self, steps: int, chars: int) -> None:
        """Count both. Errors: SpentError."""
        self.steps -= steps
        self.chars -= chars
        if self.steps < 0 or self.chars < 0:
            self.check()

    def free(self, chars: int) -> None:
        """Count characters of a text that is freed: a part of them may be used again."""
        self.freed += chars

    def enter(self) -> None:
        """Count a call that others may be inside of, until `leave`. Errors: SpentError."""
        self.depth += 1
        if self.depth > MAX_DEPTH:
            raise SpentError(f"its macros call each other more than {MAX_DEPTH} deep")

    def leave(self) -> None:
        self.depth -= 1

    def check(self) -> None:
        """Add the amount for the inputs, once, and for freed texts: few renderings need more than every template may use.

        Errors: SpentError.
        """
        if self._inputs is not None:
            inputs, self._inputs = self._inputs, None
            steps, chars = self.steps, self.chars
            self.chars = 2**60
            size, values = self._measured(inputs)
            self.steps, self.chars = steps + values * STEPS_PER_VALUE, chars + size * CHARS_PER_CHAR
            self._reusable = size * FREED_PER_CHAR
        freed, self.freed = min(self.freed, self._reusable), 0
        self._reusable -= freed
        self.chars += freed
        if self.steps < 0:
            raise SpentError("it takes more steps than a chat template may")
        if self.chars < 0:
            raise SpentError("it reads and writes more characters than a chat template may")

    def weighed(self, value: T) -> T:
        """Return a value whose characters are counted."""
        self.read(self.size(value))
        return value

    def size(self, value: object) -> int:
        """Return the characters of a value written out, its elements included: a list that holds another twice has it twice.

        Errors: SpentError for a value larger than the budget, and for one of too many levels.
        """
        if type(value) is str:
            return len(value)
        return ITEM if type(value) in SCALARS else self._measured(value)[0]

    def _measured(self, value: object) -> tuple[int, int]:
        """Return the characters and the number of values."""
        level: list[Any] = [value]
        total, count, depth = 0, 0, 0
        while level:
            below: list[Any] = []
            for one in level:
                kind = type(one)
                if kind is str or kind is bytes:
                    total += len(one)
                    continue
                if kind in SCALARS:
                    continue
                if isinstance(one, Namespace):
                    one = object.__getattribute__(one, "_Namespace__attrs")
                if kind is dict or isinstance(one, Mapping):
                    total += ITEM * len(one)
                    self._check(total)
                    below += one
                    below += one.values()
                elif isinstance(one, _COLLECTIONS):
                    total += ITEM * len(one)
                    self._check(total)
                    below += one
                elif isinstance(one, (str, range)):
                    total += length(one)
            count += len(level)
            total += ITEM * len(level)
            self._check(total)
            depth += 1
            if depth > MAX_DEPTH:
                raise SpentError(f"it nests more than {MAX_DEPTH} values in each other")
            level = below
        return total, count

    def _check(self, total: int) -> None:
        if total > self.chars:
            self.check()
        if total > self.chars:
            raise SpentError("it makes a value that is larger than a chat template may write")

    @contextmanager
    def fresh(self, inputs: Mapping[str, object]) -> Iterator[None]:
        """The budget of one rendering. inputs: of the template."""
        with self.lock:
            before = self.steps, self.chars, self.depth, self._inputs, self.freed, self._reusable
            self.steps, self.chars, self.depth, self._inputs = MAX_STEPS, MAX_CHARS, 0, inputs
            self.freed = self._reusable = 0
            try:
                yield
            finally:
                self.steps, self.chars, self.depth, self._inputs, self.freed, self._reusable = before


SCALARS = frozenset((int, float, bool, type(None)))
_COLLECTIONS: tuple[type[Any], ...] = (list, tuple, set, frozenset, type({}.keys()), type({}.values()), type({}.items()))


def length(value: Any) -> int:
    """Return the elements of a collection or the characters of a text, its elements not included; 1 where it has no length."""
    return len(value) * (1 if isinstance(value, (str, bytes)) else ITEM) if hasattr(value, "__len__") else 1


def _number(value: object, default: int = 0) -> int:
    return int(value) if isinstance(value, (int, float)) and abs(value) < 2**53 else default if value is None else 2**53


# The cost of an operation in characters, from its arguments. `self` of a method is the first.
Cost = Callable[..., int]


def times(factor: int) -> Cost:
    """Return the cost of an operation that reads all its arguments, this many times."""

    def cost(meter: Meter, *args: object, **kwargs: object) -> int:
        total = 0
        for value in args:
            total += len(value) if type(value) is str else meter.size(value)
        return factor * (total + sum(map(meter.size, kwargs.values())))

    return cost


def _shallow(meter: Meter, *args: object, **kwargs: object) -> int:
    return sum(map(length, args))


def _lazily(meter: Meter, value: object, *args: object, **kwargs: object) -> int:
    """Of an operation that reads its arguments once for each element of a collection."""
    return 3 * length(value) + sum(map(meter.size, args)) + sum(map(meter.size, kwargs.values()))


def _constant(meter: Meter, *args: object, **kwargs: object) -> int:
    return 1


def _positional(meter: Meter, *args: object, **kwargs: object) -> int:
    return 1 + sum(map(meter.size, args))


def _own(meter: Meter, text: Sized, *args: object, **kwargs: object) -> int:
    return len(text)


def _arguments(meter: Meter, text: object, *args: object, **kwargs: object) -> int:
    return 1 + sum(map(meter.size, args))


def _split(meter: Meter, text: str, sep: object = None, *args: object, **kwargs: object) -> int:
    pieces = text.count(sep) if isinstance(sep, str) and sep else len(text) // 2
    return len(text) + ITEM * pieces


def _padded(meter: Meter, text: object, width: object = 80, *args: object, **kwargs: object) -> int:
    return meter.size(text) + abs(_number(width))


def _joined(meter: Meter, items: Any, sep: object = "", *args: object, **kwargs: object) -> int:
    length = len(items) if hasattr(items, "__len__") else 1
    return 6 * meter.size(items) + 6 * length * meter.size(kwargs.get("d", sep))


def _joined_by(meter: Meter, sep: object, items: object = (), *args: object) -> int:
    return _joined(meter, items, sep)


def _replaced(meter: Meter, text: object, old: object = "", new: object = "", *args: object, **kwargs: object) -> int:
    size = meter.size(text)
    places = text.count(old) if isinstance(text, str) and isinstance(old, str) and old else size + 1
    return size + meter.size(old) + places * meter.size(new)


def _translated(meter: Meter, text: Sized, table: object = (), *args: object) -> int:
    values = table.values() if isinstance(table, Mapping) else table if isinstance(table, (list, tuple)) else ()
    longest = max((len(one) for one in values if isinstance(one, str)), default=1)
    return meter.size(table) + len(text) * max(longest, 1)


def _tabs(meter: Meter, text: str, tabsize: object = 8, *args: object, **kwargs: object) -> int:
    return len(text) + text.count("\t") * abs(_number(kwargs.get("tabsize", tabsize)))


def _indented(meter: Meter, text: object, width: object = 4, *args: object, **kwargs: object) -> int:
    width = kwargs.get("width", width)
    size = meter.size(text)
    lines = text.count("\n") + 2 if isinstance(text, str) else size
    return size + lines * (len(width) if isinstance(width, str) else abs(_number(width)))


def _batched(meter: Meter, value: object, count: object = 1, *args: object, **kwargs: object) -> int:
    """Also of `slice`: both make up to `count` elements that the value does not have."""
    return length(value) + ITEM * sum(abs(_number(number)) for number in (count, *kwargs.values()) if not isinstance(number, str))


def _rounded(meter: Meter, value: object, precision: object = 0, *args: object, **kwargs: object) -> int:
    return 4 ** min(abs(_number(kwargs.get("precision", precision))) // 8, 64)


def _converted(meter: Meter, value: object, *args: object, **kwargs: object) -> int:
    size = meter.size(value)
    return size if size * 4 <= MAX_INT_BITS else MAX_CHARS * size


def _wrapped(meter: Meter, text: object, width: object = 79, *args: object, **kwargs: object) -> int:
    others = sum(meter.size(value) for value in (*args, *kwargs.values()))
    return meter.size(text) * (64 + others)


def _dumped(meter: Meter, value: object, *args: object, **kwargs: object) -> int:
    def width(option: object) -> int:
        return abs(_number(option)) if not isinstance(option, (str, list, tuple)) else meter.size(option)

    return meter.size(value) * (1 + sum(map(width, args)) + sum(map(width, kwargs.values())))


def _sorted_keys(meter: Meter, value: object, *args: object, **kwargs: object) -> int:
    if not (args or kwargs) and isinstance(value, Mapping):
        value = list(value)
    return 8 * meter.size(value)


def _summed(meter: Meter, value: object, attribute: object = None, start: object = 0, **kwargs: object) -> int:
    count = 1 if isinstance(kwargs.get("start", start), (int, float)) and attribute is None else max(length(value) // ITEM, 1)
    return meter.size(value) * count


_WIDTH = re.compile(r"\d+")


def _formatted(meter: Meter, pattern: object, *args: object, **kwargs: object) -> int:
    """Of `%`: each width and precision of the pattern adds its number of characters."""
    pattern = str(meter.weighed(pattern))
    if "*" in pattern and "%" in pattern:
        return MAX_CHARS * 2**20  # a width that is an argument
    widths = digits(pattern) if "%" in pattern else 0
    places = pattern.count("%")
    return len(pattern) + widths + 6 * places * (sum(map(meter.size, args)) + sum(map(meter.size, kwargs.values())))


def _timed(meter: Meter, pattern: object, *args: object) -> int:
    return 256 * meter.size(pattern) ** 2


def _lorem(meter: Meter, *args: object, **kwargs: object) -> int:
    count, longest = (*args[:1], 5)[0], (*args[3:4], 100)[0]
    return 10 * abs(_number(kwargs.get("n", count))) * abs(_number(kwargs.get("max", longest)))


# Filters. A filter that is in neither table is refused.
FILTERS: Mapping[str, Cost] = {
    "attr": times(1),  # a name that is a tuple is hashed, with all its elements
    **dict.fromkeys(("abs", "count", "d", "default", "filesizeformat", "first", "items", "last", "length"), _constant),
    **dict.fromkeys(("map", "random", "reject", "rejectattr", "reverse", "select", "selectattr", "list"), _lazily),
    **dict.fromkeys(("capitalize", "float", "lower", "string", "trim", "upper", "safe"), times(1)),
    **dict.fromkeys(("e", "escape", "forceescape", "urlencode", "xmlattr"), times(12)),
    **dict.fromkeys(("groupby", "max", "min", "sort", "unique"), times(8)),
    **dict.fromkeys(("pprint", "striptags", "title", "truncate", "wordcount"), times(64)),
    "dictsort": _sorted_keys,
    "urlize": times(1000), "batch": _batched, "slice": _batched, "center": _padded, "format": _formatted,
    "indent": _indented, "int": _converted, "join": _joined, "replace": _replaced, "round": _rounded, "sum": _summed,
    "tojson": _dumped, "wordwrap": _wrapped,
}  # fmt: skip
# Filters that read an iterator to its end, where the cost is that of a list.
READ_WHOLE = frozenset(("groupby", "join", "list", "max", "min", "sort", "sum"))
# Filters that return an iterator.
LAZY = frozenset(("batch", "items", "map", "reject", "rejectattr", "reverse", "select", "selectattr", "slice", "unique"))
# Tests that read their arguments; all others look at a type or a number.
TESTS = ("!=", "<", "<=", "==", ">", ">=", "eq", "equalto", "filter", "ge", "greaterthan", "gt", "in", "le", "lessthan", "lower",
         "lt", "ne", "test", "upper")  # fmt: skip
GLOBALS: Mapping[str, Cost] = {
    "cycler": _constant, "dict": _positional, "joiner": _constant, "lipsum": _lorem, "namespace": _positional,
    "raise_exception": times(1), "range": _constant, "strftime_now": _timed,
}  # fmt: skip
_STR: Mapping[str, Cost] = {
    **dict.fromkeys(("capitalize", "casefold", "lower", "swapcase", "title", "upper"), times(3)),
    **dict.fromkeys(("encode", "lstrip", "partition", "rpartition", "rstrip", "strip"), _own),
    **dict.fromkeys(("count", "find", "index", "rfind", "rindex"), times(1)),
    **dict.fromkeys(("endswith", "startswith"), _arguments),
    **dict.fromkeys(("removeprefix", "removesuffix"), times(1)),
    **dict.fromkeys((name for name in dir(str) if name.startswith("is")), _own),
    **dict.fromkeys(("rsplit", "split", "splitlines"), _split),
    **dict.fromkeys(("center", "ljust", "rjust", "zfill"), _padded),
    **dict.fromkeys(("striptags", "unescape"), times(20)),
    "expandtabs": _tabs, "join": _joined_by, "replace": _replaced, "translate": _translated,
}  # fmt: skip
# Methods, by the type of their object. `format` and `format_map` are metered where they are read (`wrap_str_format`).
METHODS: Sequence[tuple[type | tuple[type, ...], Mapping[str, Cost]]] = (
    (str, _STR), (Mapping, {"copy": _shallow, "get": _arguments, "items": _constant, "keys": _constant, "values": _constant}),
    ((list, tuple), {"copy": _shallow, "count": times(1), "index": times(1)}),
    ((int, float), dict.fromkeys(("bit_count", "bit_length", "conjugate", "hex", "is_integer"), _constant)),
    (bytes, {"decode": _own, "hex": _own}), (range, {"count": _own, "index": _own}),
    ((LoopContext, Cycler), dict.fromkeys(("changed", "cycle", "next", "reset"), times(1))),
)  # fmt: skip


def _bits(value: object) -> int:
    return value.bit_length() if isinstance(value, int) else 0


def _product_cost(meter: Meter, left: object, right: object) -> int:
    if isinstance(left, int) and isinstance(right, int):
        return _int_cost(_bits(left) + _bits(right))
    for one, other in ((left, right), (right, left)):
        if isinstance(one, int):
            return max(one, 0) * length(other)
    return ITEM


def _power_cost(meter: Meter, left: object, right: object) -> int:
    if isinstance(left, int) and isinstance(right, int):
        return _int_cost(_bits(left) * max(right, 1))
    return ITEM


def _int_cost(bits: int) -> int:
    return ITEM if bits <= MAX_INT_BITS else MAX_CHARS * bits


def sum_cost(made: object) -> int:
    """Return the cost of a sum, by its result."""
    return _int_cost(_bits(made)) if isinstance(made, int) else length(made)


def _remainder_cost(meter: Meter, left: object, right: object) -> int:
    return _formatted(meter, left, right) if isinstance(left, (str, bytes)) else ITEM


BINOPS: Mapping[str, Cost] = {"*": _product_cost, "**": _power_cost, "%": _remainder_cost}


KINDS: Mapping[type, Mapping[str, Cost]] = {
    kind: costs for kinds, costs in METHODS for kind in (kinds if isinstance(kinds, tuple) else (kinds,)) if kind is not Mapping
} | {dict: METHODS[1][1]}  # fmt: skip


def method_cost(method: MethodType | BuiltinMethodType) -> Cost | None:
    """Return the cost of a bound method, None for one that may not be called."""
    owner, name = method.__self__, method.__name__
    if isinstance(owner, Extension):
        return _constant
    if isinstance(owner, type) or type(owner).__name__ == "TemplateDict":
        return _positional if name == "fromkeys" else None
    return next((costs.get(name) for kind, costs in METHODS if isinstance(owner, kind)), None)


# Iterators that filters return.
_ITERATORS = frozenset(
    (GeneratorType, reversed, type(iter([])), *map(type, (reversed([]), reversed({}), reversed({}.items()), reversed({}.values()))),
     type(iter(range(0))), type(iter(range(2**80))))
)  # fmt: skip


def is_iterator(value: object) -> TypeGuard[Iterator[object]]:
    """Whether a value is read only once."""
    return type(value) in _ITERATORS


def digits(text: str) -> int:
    """Return the sum of the numbers in a format."""
    return sum(min(int(number[:12]), 2**40) for number in _WIDTH.findall(text))
