"""Are a JSON schema's options valid, and does any finite value satisfy it?"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from trimtab.engine.chat.call_values import target_of
from trimtab.errors import RequestError

# Every schema that a person or a library writes stays far below it; it stops schemas made to be expensive.
MOST_VISITS = 50_000
# llguidance compares every pair of a schema's `patternProperties`, again wherever their object is merged with another one, with no
# limit: a thousand would take many minutes. This number of pairs takes about a second, of a request's schemas together.
MOST_PAIRS = 4096
_MANY = 2**31


def check_patterns(schemas: Sequence[Mapping[str, Any]], *, field: str, are_tools: bool = False) -> None:
    """Raise RequestError if too many pairs of `patternProperties` would be compared. Each schema is compiled by itself: patterns of
    different ones are not compared.

    are_tools: the schemas are of tools. Where a model writes each argument between tags, a definition is compiled again for each
    argument that refers to it.
    """
    count = sum(_pairs(schema, are_tools=are_tools) for schema in schemas)
    if count > MOST_PAIRS:
        total = "the patternProperties of all tools are" if are_tools else "its patternProperties are"
        raise RequestError(
            f"{total} compared in {count} pairs, the limit is {MOST_PAIRS}", field=field,
            hint="N patterns of one schema count N x N, and again for each allOf, each branch of anyOf or oneOf, and references",
        )  # fmt: skip


def _pairs(schema: Mapping[str, Any], *, are_tools: bool) -> int:
    patterns, merges = 0, 1
    for node in nodes_of(schema):
        named = node.get("patternProperties")
        patterns += len(named) if isinstance(named, dict) else 0
        merges += "allOf" in node or ("$ref" in node and (are_tools or len(node) > 1))
        merges += sum(len(list_of(node, name)) for name in ("anyOf", "oneOf"))
    return patterns**2 * merges


def check_schema(schema: Mapping[str, Any], *, field: str) -> None:
    """Raise RequestError for options of llguidance in a schema, if no finite value satisfies it, or if its references are too many
    to follow.

    With the option `lenient`, llguidance would ignore keywords that it cannot enforce. `{"$ref": "#"}` is satisfied by no value
    that ends. A schema is called endless only where that is certain.
    """
    if "x-guidance" in schema:
        raise RequestError('"x-guidance" is not a keyword of a JSON schema', field=field)
    if any("$ref" in node for node in nodes_of(schema)) and not _Ends(schema, field).has_finite_value():
        raise RequestError("no finite value satisfies it: its references lead back to themselves", field=field)


def nodes_of(schema: Any) -> Iterator[Mapping[str, Any]]:
    """Give every object of a schema, in no order that matters."""
    waiting = [schema]
    while waiting:
        node = waiting.pop()
        if isinstance(node, dict):
            yield node
            waiting.extend(node.values())
        elif isinstance(node, list):
            waiting.extend(node)


class _Ends:
    """The least set of references that a finite value satisfies: begun empty, and grown until it stays the same."""

    def __init__(self, schema: Mapping[str, Any], field: str) -> None:
        self._root, self._field, self._visits = schema, field, 0
        self._known: set[str] = set()
        # Every reference so far, in order.
        self._met: list[str] = []
        self._seen: set[str] = set()
        self._targets = Targets(schema)

    def has_finite_value(self) -> bool:
        while not self._is_finite(self._root):
            before = len(self._known)
            for pointer in self._met:  # grows as it goes on
                self._look(pointer)
            for pointer in reversed(self._met):
                self._look(pointer)
            if before == len(self._known):
                return False
        return True

    def _look(self, pointer: str) -> None:
        if pointer not in self._known and self._is_finite(self._targets[pointer]):
            self._known.add(pointer)

    def _is_finite(self, schema: Any) -> bool:
        """Whether a value that is known to end satisfies a schema."""
        self._visits += 1
        if self._visits > MOST_VISITS:
            raise RequestError("has more references than this server follows", field=self._field)
        if not isinstance(schema, dict):
            return schema is not False
        if "$ref" in schema and not self._is_known(schema["$ref"]):
            return False
        if not all(map(self._is_finite, list_of(schema, "allOf"))):
            return False
        for name in ("anyOf", "oneOf"):
            if name in schema and not any(map(self._is_finite, list_of(schema, name))):
                return False
        kinds = schema.get("type")
        kinds = [kinds] if isinstance(kinds, str) else kinds
        if not isinstance(kinds, list) or not set(map(str, kinds)) <= {"object", "array"}:
            return True
        return any(self._is_finite_object(schema) if kind == "object" else self._is_finite_array(schema) for kind in kinds)

    def _is_known(self, pointer: Any) -> bool:
        if not isinstance(pointer, str) or not pointer.startswith("#") or self._targets[pointer] is None:
            return True  # not ours to judge
        if pointer not in self._seen:
            self._seen.add(pointer)
            self._met.append(pointer)
        return pointer in self._known

    def _is_finite_object(self, schema: Mapping[str, Any]) -> bool:
        named = schema.get("properties")
        named = named if isinstance(named, dict) else {}
        patterns = schema.get("patternProperties")
        others = [*(patterns.values() if isinstance(patterns, dict) else ()), schema.get("additionalProperties", True)]
        allows_others = any(map(self._is_finite, others))
        for name in list_of(schema, "required"):
            if not (self._is_finite(named[name]) if name in named else allows_others):
                return False
        fewest = schema.get("minProperties", 0)
        if not isinstance(fewest, (int, float)) or fewest <= 0:
            return True
        return (_MANY if allows_others else sum(map(self._is_finite, named.values()))) >= fewest

    def _is_finite_array(self, schema: Mapping[str, Any]) -> bool:
        items, first = schema.get("items", True), list_of(schema, "prefixItems")
        if isinstance(items, list):  # as drafts before 2020-12 have it
            items, first = schema.get("additionalItems", True), items
        fewest = schema.get("minItems", 0)
        if not isinstance(fewest, (int, float)) or fewest <= 0:
            return True
        needed = first[: int(min(fewest, len(first)))]
        return all(map(self._is_finite, needed)) and (fewest <= len(first) or self._is_finite(items))


class Targets(dict[Any, Any]):
    """JSON pointer -> what it leads to in a schema, found once: a pointer may be long, and is needed again and again."""

    def __init__(self, root: Any) -> None:
        super().__init__()
        self._root = root

    def __missing__(self, pointer: Any) -> Any:
        return self.setdefault(pointer, target_of(self._root, pointer))


def list_of(schema: Mapping[str, Any], name: str) -> list[Any]:
    value = schema.get(name)
    return value if isinstance(value, list) else []
