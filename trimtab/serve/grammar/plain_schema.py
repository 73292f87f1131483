"""Which alternatives without allOf, anyOf, oneOf and lists of types does a schema have?"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from trimtab.engine.chat.call_values import target_of
from trimtab.errors import RequestError

# Kind of value -> keywords that have a meaning for it alone.
KEYWORDS = {
    "object": ("properties", "required", "additionalProperties", "patternProperties", "minProperties", "maxProperties"),
    "array": ("items", "prefixItems", "additionalItems", "minItems", "maxItems"),
    "string": ("minLength", "maxLength", "pattern", "format"),
    "number": ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"),
}  # fmt: skip
_KNOWN = {"$ref", "const", "enum", "type", "allOf", "anyOf", "oneOf", *(name for names in KEYWORDS.values() for name in names)}
MOST_ALTERNATIVES, MOST_DEPTH = 256, 64


class PlainSchemas:
    """The alternatives of one tool's schemas. root: its parameters, to which references lead. tool: its name, for errors. Sources:
    JSON Schema 2020-12, and `definitions` and lists of `items` of draft 7."""

    def __init__(self, root: Mapping[str, Any], tool: str) -> None:
        self._root, self._tool = root, tool

    def refused(self, keyword: str) -> RequestError:
        return RequestError(
            f"the parameters of {self._tool!r} have {keyword!r} in a way that the checkpoint's form of calls cannot enforce",
            field="tools",
        )  # fmt: skip

    def of(self, schema: Any, depth: int = 0) -> list[dict[str, Any]]:
        """Return the alternatives of a schema: {"$ref": ...} alone, or keywords of KEYWORDS with `type`, `const` and `enum`.

        None is for a schema that no value satisfies, {} for any value. Errors: RequestError for what cannot be merged.
        """
        if depth > MOST_DEPTH:
            raise self.refused("$ref")
        if not isinstance(schema, Mapping):
            return [] if schema is False else [{}]
        own = {name: value for name, value in schema.items() if name in _KNOWN}
        parts = [[one] for one in own.pop("allOf", ())]
        parts += [own.pop(name) for name in ("anyOf", "oneOf") if name in own]
        if "$ref" in own and (len(own) > 1 or parts):
            parts.append([{"$ref": own.pop("$ref")}])
        kinds = own.get("type")
        found = [{**own, "type": kind} for kind in kinds] if isinstance(kinds, list) else [own]
        for options in parts:
            others = [other for option in options for other in self.of(option, depth + 1)]
            merged = [self._both(one, other, depth) for one in found for other in others]
            found = [one for several in merged for one in several]
            if len(found) > max(MOST_ALTERNATIVES, len(others)):
                raise self.refused("anyOf")
        return found

    def objects(self, schema: Any) -> list[dict[str, Any]]:
        """Return the alternatives that are objects, their references followed. Errors: also if there are none."""
        found = [one for one in self.followed(schema) if one.get("type", "object") == "object"]
        if not found:
            raise self.refused("type")
        return found

    def followed(self, schema: Any) -> list[dict[str, Any]]:
        """Return the alternatives of a schema without references."""
        return self._followed(self.of(schema), 0)

    def _followed(self, schemas: Sequence[dict[str, Any]], depth: int) -> list[dict[str, Any]]:
        if depth > MOST_DEPTH:
            raise self.refused("$ref")
        found = []
        for one in schemas:
            targets = self.of(target_of(self._root, one["$ref"]), depth) if "$ref" in one else None
            found += [one] if targets is None else self._followed(targets, depth + 1)
        return found

    def _both(self, one: dict[str, Any], other: dict[str, Any], depth: int) -> list[dict[str, Any]]:
        """Return the alternatives of values that satisfy both."""
        if not one or not other:
            return [one or other]
        pairs = [(left, right) for left in self._followed([one], depth) for right in self._followed([other], depth)]
        return [merged for left, right in pairs if (merged := self._merged(left, right)) is not None]

    def _merged(self, one: dict[str, Any], other: dict[str, Any]) -> dict[str, Any] | None:
        if {"integer", "number"} == {one.get("type"), other.get("type")}:
            one, other = {**one, "type": "integer"}, {**other, "type": "integer"}
        if one.get("type") != other.get("type") and "type" in one and "type" in other:
            return None
        merged = {**one, **other}
        for name in one.keys() & other.keys():
            left, right = one[name], other[name]
            if left == right or name in ("properties", "additionalProperties"):
                continue
            if name == "required":
                merged[name] = [*left, *right]
            elif name == "enum":
                merged[name] = [value for value in left if value in right]
            elif name.lower().startswith("min") or name == "exclusiveMinimum":
                merged[name] = max(left, right)
            elif name.lower().startswith("max") or name == "exclusiveMaximum":
                merged[name] = min(left, right)
            else:
                raise self.refused(name)
        if "properties" in merged or "additionalProperties" in merged:
            self._merge_properties(merged, one, other)
        return merged

    def _merge_properties(self, merged: dict[str, Any], one: dict[str, Any], other: dict[str, Any]) -> None:
        if "patternProperties" in merged:
            raise self.refused("patternProperties")
        named = [side.get("properties", {}) for side in (one, other)]
        extra = [side.get("additionalProperties", True) for side in (one, other)]
        merged["properties"] = {
            name: _all_of(*(side.get(name, rest) for side, rest in zip(named, extra, strict=True)))
            for name in (*named[0], *(name for name in named[1] if name not in named[0]))
        }  # fmt: skip
        merged["additionalProperties"] = _all_of(*extra)


def _all_of(one: Any, other: Any) -> Any:
    if one is False or other is False:
        return False
    if one in (True, {}) or other in (True, {}):
        return other if one in (True, {}) else one
    return one if one == other else {"allOf": [one, other]}


def values_of(schema: Mapping[str, Any]) -> list[Any] | None:
    """Return the values that an alternative lists by `const` and `enum` and that have its type; None if it lists none."""
    if "const" not in schema and not isinstance(schema.get("enum"), list):
        return None
    values = schema["enum"] if isinstance(schema.get("enum"), list) else [schema["const"]]
    if "const" in schema:
        values = [value for value in values if json.dumps(value) == json.dumps(schema["const"])]
    return [value for value in values if _has_kind(value, schema.get("type"))]


def _has_kind(value: Any, kind: Any) -> bool:
    if isinstance(value, bool) or value is None:
        return kind in (None, "null" if value is None else "boolean")
    if isinstance(value, (int, float)):
        return kind in (None, "number") or (kind == "integer" and int(value) == value)
    return kind in (None, "string" if isinstance(value, str) else "array" if isinstance(value, list) else "object")


def in_document(schema: Any, root: Mapping[str, Any]) -> dict[str, Any]:
    """Return a part of a tool's schema as a separate schema, whose references lead to the same places."""
    schema = {"enum": []} if schema is False else schema if isinstance(schema, Mapping) else {}
    shared = {name: root[name] for name in ("$defs", "definitions") if name in root}
    if _refers_elsewhere({**schema, "$defs": shared}):
        return {**_moved(schema), "$defs": {"root": _moved(root)}}
    return {**shared, **schema}


def _refers_elsewhere(node: Any) -> bool:
    if isinstance(node, Mapping):
        pointer = node.get("$ref")
        return (isinstance(pointer, str) and not pointer.startswith(("#/$defs/", "#/definitions/"))) or any(
            map(_refers_elsewhere, node.values())
        )
    return isinstance(node, list) and any(map(_refers_elsewhere, node))


def _moved(node: Any) -> Any:
    if isinstance(node, list):
        return [_moved(one) for one in node]
    if not isinstance(node, Mapping):
        return node
    return {
        name: f"#/$defs/root{value[1:]}" if name == "$ref" and isinstance(value, str) and value[:1] == "#" else _moved(value)
        for name, value in node.items()
    }
