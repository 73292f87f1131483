"""Which keywords of a JSON schema cost more than its bytes, and how much may a request have?"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from functools import cached_property
from itertools import islice
from typing import Any

from trimtab.engine.chat.call_values import target_of
from trimtab.errors import RequestError
from trimtab.serve.contract.plain_values import is_number, scalars
from trimtab.serve.grammar.schema import Targets, list_of, nodes_of

MOST_REFERENCES = 16  # that lead to one another are followed

# States of llguidance's expression of a multiple: for each remainder (a quarter where the number has no primes but 2 and 5),
# by the count of zeros at its end (the last is for more); each zero has at least that number. Fitted to 400 (test_schema_cost.py).
_TWOS_AND_FIVES_SHARE, _STATES_A_ZERO = 4, 1500
_STATES_A_REMAINDER = {
    "even": (1, 10, 42, 99, 231, 800, 2000), "ends in 5": (1, 10, 30, 57, 158, 275, 300), "neither": (1, 10, 21, 50, 50, 80, 130),
}  # fmt: skip
# Beyond these a common multiple counts as one that has no end: a prime of 19 digits.
_ENDLESS, _MOST_CASES, _MOST_DEPTH = 10**18 + 9, 256, 200
_MANY = 2**31


@dataclass(frozen=True)
class Limit:
    """The most that all schemas of a request may have of one cost. cost: of the schema, or of its `Merges` if is_of_merges. what:
    the cost in words, with {count} and {most}. Costs are measured with llguidance 1.9.1 on schemas below 64 KiB. A keyword without
    a limit costs milliseconds for each KiB there.
    """

    most: int
    cost: Callable[[Any], int]
    what: str
    hint: str
    is_total: bool = True
    is_of_merges: bool = False


def check_cost(schemas: Sequence[Mapping[str, Any]], *, field: str) -> None:
    """Raise RequestError if the schemas of a request (one, or those of its tools) cost too much to compile."""
    merges = list(map(Merges, schemas))
    for limit in LIMITS:
        costs = list(map(limit.cost, merges if limit.is_of_merges else schemas))
        count = sum(costs) if limit.is_total else max(costs, default=0)
        if count > limit.most:
            shown = str(count) if count < _MANY else f"more than {_MANY}"
            raise RequestError(limit.what.format(count=shown, most=limit.most), field=field, hint=limit.hint)


# multipleOf, and merges by allOf --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Merged:
    """The constraints of one value. multiples: the least common multiple in each case that `anyOf` and `oneOf` allow. patterns:
    regular expressions that all have to match. cases: in how many ways branches can be combined. bounds: keyword and value, of
    any branch."""

    multiples: frozenset[int] = frozenset((1,))
    patterns: int = 0
    cases: int = 1
    bounds: frozenset[tuple[str, float]] = frozenset()

    def __and__(self, other: _Merged) -> _Merged:
        pairs = {math.lcm(one, two) for one in self.multiples for two in other.multiples}
        return _Merged(
            _bounded(pairs), self.patterns + other.patterns, min(_MANY, self.cases * other.cases), self.bounds | other.bounds
        )

    def __or__(self, other: _Merged) -> _Merged:
        multiples, cases = _bounded(self.multiples | other.multiples), min(_MANY, self.cases + other.cases)
        return _Merged(multiples, max(self.patterns, other.patterns), cases, self.bounds | other.bounds)


def _bounded(multiples: set[int] | frozenset[int]) -> frozenset[int]:
    return frozenset((_ENDLESS,)) if len(multiples) > _MOST_CASES or max(multiples) > _ENDLESS else frozenset(multiples)


class Merges:
    """The merged form of each node of a schema, by following allOf, anyOf, oneOf and references."""

    def __init__(self, root: Any) -> None:
        self.root, self.targets, self._depth = root, Targets(root), 0
        self._known: dict[int, _Merged] = {}

    @cached_property
    def below(self) -> tuple[_Merged, ...]:
        return tuple(_merged_below(self))

    @cached_property
    def multiples(self) -> tuple[int, ...]:
        """Each multiple that an expression is made of: a node's own, and what it is merged to."""
        found: list[int] = []
        for node in nodes_of(self.root):
            found += {_multiple(node), *(self.of(node).multiples if any(name in node for name in _MERGING) else ())}
        return (*found, *(one for below in self.below for one in below.multiples))

    def of(self, node: Any) -> _Merged:
        if not isinstance(node, dict):
            return _Merged()
        if id(node) not in self._known:
            if self._depth > _MOST_DEPTH:  # a chain of references alone merges nothing expensive
                return _Merged()
            self._known[id(node)] = _Merged()  # a reference to itself adds nothing
            self._depth += 1
            self._known[id(node)] = self._computed(node)
            self._depth -= 1
        return self._known[id(node)]

    def _computed(self, node: Mapping[str, Any]) -> _Merged:
        bounds = frozenset((name, node[name]) for name in _BOUNDS if is_number(node.get(name)))
        merged = _Merged(_bounded({_multiple(node)}), ("pattern" in node) + ("format" in node), bounds=bounds)
        for one in list_of(node, "allOf"):
            merged &= self.of(one)
        for name in ("anyOf", "oneOf"):
            if branches := list_of(node, name):
                either = self.of(branches[0])
                for one in branches[1:]:
                    either |= self.of(one)
                merged &= either
        return merged & self.of(self.targets[node["$ref"]]) if isinstance(node.get("$ref"), str) else merged


# Merges below merged objects and arrays ---------------------------------------------------------------------------

_BOUNDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")
_MERGING = ("allOf", "$ref", "anyOf", "oneOf")
_TELLING = ("multipleOf", "pattern", "format", "anyOf", "oneOf")
_OTHERS = ("additionalProperties", "unevaluatedProperties", "items", "additionalItems", "unevaluatedItems")
_MOST_ALTERNATIVES, _MOST_VISITS = 64, 20_000


def _merged_below(merges: Merges) -> Iterator[_Merged]:
    """Yield the constraints of each part whose schemas come from two or more merged schemas: properties of one name, or with the
    other's `additionalProperties`, and elements. The process that compiles bounds the rest."""
    if sum(any(name in node for name in _TELLING) for node in nodes_of(merges.root)) < 2:
        return
    choices = _Choices(merges)
    seen: set[frozenset[int]] = set()
    waiting: list[Sequence[Any]] = [(node,) for node in nodes_of(merges.root) if any(name in node for name in _MERGING)]
    while waiting:
        for parts in choices.of(waiting.pop()):
            for below in _below(parts):
                choices.visits += len(below)
                if choices.visits > _MOST_VISITS:
                    return
                key = frozenset(map(id, below))
                if len(key) > 1 and key not in seen:
                    seen.add(key)
                    waiting.append(below)
                    merged = _Merged()
                    for node in below:
                        merged &= merges.of(node)
                    yield merged


class _Choices:
    """Which schemas of objects and arrays hold together, once for each choice of the branches of anyOf and oneOf."""

    def __init__(self, merges: Merges) -> None:
        self._merges, self.visits = merges, 0

    def of(self, nodes: Sequence[Any], depth: int = 0) -> list[list[Mapping[str, Any]]]:
        """Return the constraints of all of these schemas together."""
        found: list[list[Mapping[str, Any]]] = [[]]
        for node in nodes:
            self.visits += 1
            if not isinstance(node, dict) or depth > MOST_REFERENCES or self.visits > _MOST_VISITS:
                continue
            merged = list_of(node, "allOf")
            if isinstance(node.get("$ref"), str):
                merged = [*merged, self._merges.targets[node["$ref"]]]
            if _named(node) or _others(node):
                found = [[*one, node] for one in found]
            if merged:
                found = self._product(found, self.of(merged, depth + 1))
            for name in ("anyOf", "oneOf"):
                if branches := list_of(node, name)[:_MOST_ALTERNATIVES]:
                    found = self._product(found, [one for branch in branches for one in self.of([branch], depth + 1)])
        return found

    def _product(self, one: list[list[Any]], other: list[list[Any]]) -> list[list[Any]]:
        pairs = islice(itertools.product(one, other), _MOST_ALTERNATIVES)
        made = {tuple(map(id, joined)): joined for joined in ([*left, *right] for left, right in pairs)}
        self.visits += sum(map(len, made.values()))
        return list(made.values())


def _below(parts: Sequence[Mapping[str, Any]]) -> Iterator[tuple[Any, ...]]:
    """Yield the schemas that hold together for each part of a value for which all of `parts` hold, one of each."""
    split = [(_named(node), _others(node)) for node in parts]
    if len(split) > 1:
        for key in (*dict.fromkeys(key for named, _ in split for key in named), None):
            options = [[named[key]] if key in named else others for named, others in split]
            yield from islice(itertools.product(*(one for one in options if one)), _MOST_ALTERNATIVES)


def _named(node: Mapping[str, Any]) -> dict[Any, Any]:
    """Return the schemas of single parts: a property by its name, an element by its place."""
    items, properties = node.get("items"), node.get("properties")
    places = dict(enumerate(items if isinstance(items, list) else list_of(node, "prefixItems")))
    return {**places, **(properties if isinstance(properties, dict) else {})}


def _others(node: Mapping[str, Any]) -> list[Any]:
    """Return the schemas of all parts that are not named."""
    patterns = node.get("patternProperties")
    found = [*(patterns.values() if isinstance(patterns, dict) else ()), *(node.get(name) for name in _OTHERS)]
    return [one for one in found if isinstance(one, dict)]


def _multiple(node: Mapping[str, Any]) -> int:
    """Return a node's multiple in units of its last decimal place (25 of 0.25), 1 without."""
    value = node.get("multipleOf")
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < math.inf:
        return 1
    digits = int("".join(map(str, _decimal(node).as_tuple().digits)))
    return max(digits, min(int(value), _ENDLESS))


def _decimal(node: Mapping[str, Any]) -> Decimal:
    return Decimal(repr(node["multipleOf"])).normalize()


def _states(multiple: int) -> int:
    """Return how many states the expression of a multiple has, about."""
    before_zeros, zeros = multiple, 0
    while before_zeros % 10 == 0:
        before_zeros, zeros = before_zeros // 10, zeros + 1
    table = _STATES_A_REMAINDER["even" if before_zeros % 2 == 0 else "ends in 5" if before_zeros % 5 == 0 else "neither"]
    is_of_twos_and_fives = _without(2, _without(5, multiple)) == 1
    most = -(-multiple // _TWOS_AND_FIVES_SHARE) if is_of_twos_and_fives else multiple
    return min(most, max(before_zeros * table[min(zeros, len(table) - 1)], zeros * _STATES_A_ZERO))


def _without(factor: int, number: int) -> int:
    while number % factor == 0:
        number //= factor
    return number


def multiple_states(merges: Merges) -> int:
    """Return how many states the expressions of all multiples have, about."""
    return min(_MANY, sum(_states(one) for one in merges.multiples if one > 1))


def largest_multiple(merges: Merges) -> int:
    return max(merges.multiples, default=1)


def multiple_places(schema: Any) -> int:
    """Return how many decimal places a multiple has, at most; powers of ten, which need no remainder, have none."""
    values = [_decimal(node) for node in nodes_of(schema) if _multiple(node) > 1]
    return max((-int(one.as_tuple().exponent) for one in values), default=0)


def merged_patterns(merges: Merges) -> int:
    """Return how many regular expressions one text has to match at once, at most."""
    nodes = map(merges.of, nodes_of(merges.root))
    return max((one.patterns for one in (*nodes, *merges.below)), default=0)


def combined_branches(merges: Merges) -> int:
    """Return how many combinations of branches are made of the unions that allOf and references merge."""
    nodes = (node for node in nodes_of(merges.root) if "allOf" in node or ("$ref" in node and len(node) > 1))
    cases = [one.cases for one in (*map(merges.of, nodes), *merges.below)]
    return min(_MANY, sum(count for count in cases if count > 1))


# Counted repeats --------------------------------------------------------------------------------------------------------


def expanded_pattern(pattern: str) -> int:
    """Return how many characters a regular expression has once its counted repeats are written out.

    A repeated class (`[a-z]{1,5000}`, `.{3}`, `\\d{4}`) counts once: llguidance counts it without writing it out.
    """
    sums, alone = [0], [0]  # of each open group: its length, and that of its last atom
    place = 0
    while place < len(pattern):
        char = pattern[place]
        if char == "(":
            sums.append(0)
            alone.append(0)
        elif char == ")" and len(sums) > 1:
            inner = sums.pop()
            alone.pop()
            sums[-1] += inner
            alone[-1] = inner
        elif char == "{" and (times := _counted(pattern, place)) is not None:
            most, place = times
            sums[-1] = min(_MANY, sums[-1] + alone[-1] * (most - 1))
            alone[-1] = min(_MANY, alone[-1] * most)
            continue
        elif char not in "*+?|^$":
            place, is_class = _atom_end(pattern, place)
            sums[-1] += 1
            alone[-1] = 0 if is_class and pattern.startswith("{", place) else 1
            continue
        place += 1
    return min(_MANY, sum(sums))


def _atom_end(pattern: str, place: int) -> tuple[int, bool]:
    """Return the place after an atom that is no group, and whether it is a class."""
    char = pattern[place]
    if char == "\\":
        return place + 2, pattern[place + 1 : place + 2] in tuple("dDwWsSpP")
    if char != "[":
        return place + 1, char == "."
    start = place + 1
    place += 3 if pattern[start : start + 1] == "^" else 2  # a bracket that comes first is a member
    while place < len(pattern) and pattern[place] != "]":
        place += 2 if pattern[place] == "\\" else 1
    return place + 1, len(set(pattern[start:place])) > 1  # a class of one character repeats a text


def _counted(pattern: str, place: int) -> tuple[int, int] | None:
    """Return the most repeats of {n}, {n,} or {n,m} at least 1, and the place after it; None for other braces."""
    end = pattern.find("}", place)
    counts = pattern[place + 1 : max(end, place + 1)].split(",")
    if end < 0 or len(counts) > 2 or not all(one == "" or (one.isascii() and one.isdecimal()) for one in counts):
        return None
    return max([1, *(_MANY if len(one) > 9 else int(one) for one in counts if one)]), end + 1


def _patterns(schema: Any) -> Iterator[str]:
    for node in nodes_of(schema):
        if isinstance(node.get("pattern"), str):
            yield node["pattern"]
        named = node.get("patternProperties")
        yield from named if isinstance(named, dict) else ()


def longest_pattern(schema: Any) -> int:
    return max(map(expanded_pattern, _patterns(schema)), default=0)


def all_patterns(schema: Any) -> int:
    return min(_MANY, sum(map(expanded_pattern, _patterns(schema))))


# Texts, properties, ranges ----------------------------------------------------------------------------------------------


def longest_text(schema: Any) -> int:
    """Return the characters of the longest name or text that an answer can have to repeat as a whole."""
    longest = 0
    for node in nodes_of(schema):
        named = node.get("properties")
        names = [*(named if isinstance(named, dict) else ()), *list_of(node, "required")]
        texts = (one for one in scalars([*names, node.get("const"), *list_of(node, "enum")]) if isinstance(one, str))
        longest = max(longest, *map(len, texts), 0)
    return longest


def optional_properties(schema: Any) -> int:
    """Return how many properties an object may leave out, at most."""
    most = 0
    for node in nodes_of(schema):
        named = node.get("properties")
        if isinstance(named, dict):
            required = {name for name in list_of(node, "required") if isinstance(name, str)}
            most = max(most, len(named.keys() - required))
    return most


def open_branches(schema: Any) -> int:
    """Return how many branches of one anyOf or oneOf may begin with the same bracket, at most."""
    lists = (list_of(node, name) for node in nodes_of(schema) for name in ("anyOf", "oneOf"))
    return max((sum(_may_be_nested(schema, branch) for branch in branches) for branches in lists), default=0)


def _may_be_nested(root: Any, branch: Any, depth: int = 0) -> bool:
    if not isinstance(branch, dict):
        return branch is not False
    kinds = branch.get("type")
    if kinds is None:
        if "$ref" in branch and depth < MOST_REFERENCES:
            return _may_be_nested(root, target_of(root, branch["$ref"]), depth + 1)
        return not {"const", "enum", "pattern", "format"} & branch.keys()
    return bool({"object", "array"} & set(map(str, kinds if isinstance(kinds, list) else [kinds])))


def range_digits(schema: Any) -> int:
    """Return how many digits the bounds of all numbers have."""
    return sum(len(str(node[name])) for node in nodes_of(schema) for name in _BOUNDS if is_number(node.get(name)))


# Numbers that llguidance would change ----------------------------------------------------------------------------------


def inexact_numbers(schema: Any) -> int:
    """Return how many numbers of a schema llguidance would replace by others: it has float64 for all, and 64 bits for integers.

    Its least and greatest integer are exact nevertheless, and a bound beyond them only makes fewer answers possible.
    """
    count = 0
    for node in nodes_of(schema):
        for name in _BOUNDS:
            for value in filter(is_number, scalars(node.get(name))):
                read = max(-(2**63), min(int(float(value)), 2**63 - 1))
                is_beyond = read > value if name.lower().endswith("minimum") else read < value
                count += read != int(value) and not (abs(read) >= 2**63 - 1 and is_beyond)
        for value in filter(is_number, scalars([node.get("const"), *list_of(node, "enum")])):
            count += int(float(value)) != int(value) or abs(value) >= 2**63
    return count


def open_units(merges: Merges) -> int:
    """Return how many values have an integer as exclusive bound and the other one in the same unit, farther from zero: llguidance
    would allow that integer."""
    return sum(_is_open_unit(one.bounds) for one in (*map(merges.of, nodes_of(merges.root)), *merges.below))


def _is_open_unit(bounds: frozenset[tuple[str, float]]) -> bool:
    # A maximum is the minimum of the negated number.
    for sign, exclusive, others in ((1, "exclusiveMinimum", "maximum"), (-1, "exclusiveMaximum", "minimum")):
        lows = [sign * value for name, value in bounds if name == exclusive and int(value) == value]
        ups = [sign * value for name, value in bounds if name.lower().endswith(others)]
        if any(0 <= low < up < low + 1 for low in lows for up in ups):
            return True
    return False


LIMITS = (
    Limit(
        0, inexact_numbers, "{count} of its numbers would be changed: a grammar has 53 bits of an integer's value",
        "Write large integers as texts", is_total=False,
    ),
    Limit(
        0, open_units,
        "{count} of its numbers have an integer as exclusive bound and the other one in the same unit: a grammar cannot enforce it",
        "Write a bound with a fraction (exclusiveMinimum 0.001) or as minimum", is_total=False, is_of_merges=True,
    ),
    # llguidance 1.9.1 has remainders of 32 bits: beyond them an answer never ends, or is no multiple.
    Limit(
        (2**32 - 1) // 10, largest_multiple, "a multipleOf is {count} without its decimal point, the limit is {most}",
        "Multiples of one value (allOf, references) count as their least common multiple", is_total=False, is_of_merges=True,
    ),
    Limit(
        8, multiple_places, "a multipleOf has {count} decimal places, the limit is {most}",
        "A power of ten may have more", is_total=False,
    ),
    # 99991 took 1.3 to 5 s and 50 MB; 3, 7, 11, 13, 17, 19 and 23 in allOf have 22 million states, and no end.
    Limit(
        50_000, multiple_states, "its multipleOf have {count} remainders, the limit is {most}",
        "Multiples of one value (allOf, references) count as their least common multiple, others are added", is_of_merges=True,
    ),
    # 12 expressions of one text took 0.3 s, 16 took 12 s, 100 had no end.
    Limit(
        8, merged_patterns, "a text has to match {count} of its patterns and formats at once, the limit is {most}",
        "Write what allOf and references merge as fewer patterns", is_total=False, is_of_merges=True,
    ),
    # ^(a{1000}){1000}$ took 5 s and 250 MB, and (a{300}){300} 0.5 s within an answer.
    Limit(
        8192, longest_pattern, "a pattern has {count} characters once its counted repeats are written out, the limit is {most}",
        "Repeats of repeats are multiplied", is_total=False,
    ),
    Limit(
        65_536, all_patterns, "its patterns have {count} characters once counted repeats are written out, the limit is {most}",
        "Repeats of repeats are multiplied",
    ),
    # The rest of a text is looked through again for each token of it: 60,000 characters took 40 ms per token.
    Limit(
        8192, longest_text, "a name or text of its enum, const or properties has {count} characters, the limit is {most}",
        "An answer cannot repeat longer ones", is_total=False,
    ),
    # Each is compared with those after it: 4,000 took 2.4 s, and then passed a limit of the grammar.
    Limit(
        2048, optional_properties, "an object has {count} properties that are not required, the limit is {most}",
        "Require some of them, or nest objects", is_total=False,
    ),
    # 10,000 took 0.4 s.
    Limit(
        20_000, combined_branches, "the branches of its unions are combined in {count} ways, the limit is {most}",
        "allOf and references next to a union multiply its branches", is_of_merges=True,
    ),
    # Each token is matched against every branch that may have begun: 900 arrays took 100 ms per token.
    Limit(
        256, open_branches, "an anyOf or oneOf has {count} branches that may be objects or arrays, the limit is {most}",
        "Write one object with fewer branches inside", is_total=False,
    ),
    # 1,400 bounds of 13 digits took 1.9 s.
    Limit(
        8192, range_digits, "its minimum and maximum have {count} digits, the limit is {most}",
        "Leave out bounds that do not matter",
    ),
)  # fmt: skip
