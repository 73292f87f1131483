"""Which texts may a mandatory tool call be, in its family's form, as a grammar for llguidance?"""

from __future__ import annotations

import json
import operator
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from trimtab.engine.chat.answer_forms import CALL_MARKS, GEMMA_QUOTE
from trimtab.engine.chat.call_values import are_texts, parameter_schemas, target_of
from trimtab.errors import RequestError
from trimtab.serve.contract.plain_values import is_number
from trimtab.serve.grammar.schema import nodes_of

NO_PARAMETERS: dict[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}
# The spaces that JSON may have where a model was trained on one; see constraint.WHITE_SPACE.
_SPACES = {"x-guidance": {"whitespace_flexible": True, "whitespace_pattern": "[ ]?"}}
_SIMPLE_KEY = re.compile(r"[A-Za-z_$][\w$.-]*")
# A definition is written into each rule of JSON below it.
MOST_RULES, MOST_LETTERS = 20_000, 8 * 2**20
MOST_COUNT = 1_000_000


# Bounds of listed values, which say nothing about values of other kinds: of a text's length, and of numbers.
_LENGTHS: dict[str, Callable[[Any, Any], bool]] = {"minLength": operator.ge, "maxLength": operator.le}
_NUMBERS: dict[str, Callable[[Any, Any], bool]] = {
    "minimum": operator.ge, "maximum": operator.le, "exclusiveMinimum": operator.gt, "exclusiveMaximum": operator.lt,
}  # fmt: skip

# The start of a bare call of Llama's.
BARE_HEAD = '{"name"'


def calls_grammar(
    form: str, functions: Sequence[Mapping[str, Any]], mark: Callable[[str], str], *, several: bool, after: str = ""
) -> str:
    """Return the grammar for one or more calls of these functions.

    mark: the text of a control token -> its form in a grammar. several: whether more than one call is allowed. after: the text that
    is already written, the form's opening mark or BARE_HEAD; then the grammar describes the rest of that opening. Errors:
    RequestError for schemas with too many rules. llguidance enforces a function's schema on arguments in JSON. Rules for Gemma 4's
    form and Qwen's tags do not enforce `pattern` and `format` of texts. Source of the syntax: llguidance, docs/syntax.md.
    """
    return _Grammar(form, mark, after).text(functions, several=several)


class _Grammar:
    def __init__(self, form: str, mark: Callable[[str], str], after: str = "") -> None:
        self._form, self._mark, self._after = form, mark, after
        self._rules: list[str] = []
        self._letters = 0
        self._root: Mapping[str, Any] = {}
        self._known: dict[str, str] = {}
        self._any: str | None = None

    def _rule(self, *alternatives: str) -> str:
        """Add a rule and return its name."""
        if len(self._rules) > MOST_RULES:
            raise RequestError(f"its schemas have more than {MOST_RULES} rules", field="tools")
        name = f"r{len(self._rules)}"
        self._rules.append(f"{name}: " + " | ".join(alternatives))
        self._letters += len(self._rules[-1])
        if self._letters > MOST_LETTERS:
            raise RequestError(f"its schemas have rules of more than {MOST_LETTERS} characters", field="tools")
        return name

    def text(self, functions: Sequence[Mapping[str, Any]], *, several: bool) -> str:
        opened, closed = (self._mark(text) if text else "" for text in CALL_MARKS[self._form])
        if self._after:
            opened = ""
            several &= self._form == "mistral"  # elsewhere each call has its opening
        one = self._rule(*(self._call(function) for function in functions))
        more = "" if not several else "*"
        match self._form:
            case "hermes":
                call = self._rule(f'{opened} "\\n" {one} "\\n" {closed}')
                start = f'{call} ("\\n" {call}){more}' if several else call
            case "mistral":
                start = f'{opened} "[" {one} (", " {one}){more} "]"' if several else f'{opened} "[" {one} "]"'
            case "llama":
                start = one
            case _:
                call = self._rule(f"{opened} {one} {closed}")
                start = f"{call}+" if several else call
        return "\n".join([f"start: {start}", *self._rules]) + "\n"

    def _call(self, function: Mapping[str, Any]) -> str:
        name, self._root, self._known = function["name"], function.get("parameters") or NO_PARAMETERS, {}
        self._plain = PlainSchemas(self._root, name)
        match self._form:
            case "gemma4":
                return f"{_literal(f'call:{name}')} {self._rule(*map(self._object, self._plain.objects(self._root)))}"
            case "qwen-xml":
                opened, closed = _literal(f"\n<function={name}>\n"), _literal("</function>\n")
                return f"{opened} {self._rule(*map(self._tagged, self._plain.objects(self._root)))} {closed}"
            case "mistral-args":
                return f"{_literal(name)} {self._mark('[ARGS]')} {self._whole()}"
        key = "parameters" if self._form == "llama" else "arguments"
        head = "" if self._after == BARE_HEAD else BARE_HEAD
        opened, closed = _literal(f'{head}: {json.dumps(name)}, "{key}": '), _literal("}")
        return f"{opened} {self._whole()} {closed}"

    def _json(self, schema: Any) -> str:
        """Return a rule of JSON that satisfies a schema; its references are to the function's own."""
        return self._rule("%json " + json.dumps({**in_document(schema, self._root), **_SPACES}))

    def _whole(self) -> str:
        """Return a rule of all arguments as JSON: an object, also if the schema allows others."""
        kinds = self._root.get("type", "object")
        if "object" not in (kinds if isinstance(kinds, list) else [kinds]):
            raise self._plain.refused("type")
        return self._rule("%json " + json.dumps({**self._root, "type": "object", **_SPACES}))

    # Gemma 4 ----------------------------------------------------------------------------------------------------------

    def _value(self, schema: Any) -> str:
        rules = [self._plain_value(one) for one in self._plain.of(schema)]
        return self._rule(*rules) if rules else self._json(False)

    def _plain_value(self, schema: Mapping[str, Any]) -> str:
        if isinstance(pointer := schema.get("$ref"), str):
            return self._reference(pointer)
        if (values := self._listed(schema)) is not None:
            return self._rule(*map(self._written, values)) if values else self._json(False)
        kinds = (
            [schema["type"]] if "type" in schema else [kind for kind in KEYWORDS if any(name in schema for name in KEYWORDS[kind])]
        )
        rules = []
        for kind in kinds:
            match kind:
                case "string":
                    rules.append(self._string(schema))
                case "array":
                    rules.append(self._array(schema))
                case "object":
                    rules.append(self._object(schema))
                case _:
                    rules.append(self._json({**schema, "type": kind}))
        return self._rule(*rules) if rules else self._anything()

    def _listed(self, schema: Mapping[str, Any]) -> list[Any] | None:
        """Return the values that an alternative lists, without those that its bounds forbid, None if it lists none."""
        values = values_of(schema)
        if values is None:
            return None
        for name in (name for names in KEYWORDS.values() for name in names if name in schema):
            bound = schema[name]
            if name in _LENGTHS | _NUMBERS and is_number(bound):
                if name in _LENGTHS:
                    values = [value for value in values if not isinstance(value, str) or _LENGTHS[name](len(value), bound)]
                else:
                    values = [value for value in values if not is_number(value) or _NUMBERS[name](value, bound)]
            elif name != "format":
                raise self._plain.refused(name)
        return values

    def _reference(self, pointer: str) -> str:
        if pointer not in self._known:
            self._known[pointer] = name = self._rule("")
            target = target_of(self._root, pointer)
            rule = self._value({} if target is None else target)
            self._rules[int(name[1:])] = f"{name}: {rule}"
        return self._known[pointer]

    def _quote(self) -> str:
        return self._mark(GEMMA_QUOTE)

    def _string(self, schema: Mapping[str, Any]) -> str:
        name = f"L{len(self._rules)}"  # in capitals: a rule would be split into separate tokens
        # The end mark of the text is not written inside it.
        self._rules.append(rf"{name}: {self._any_text(schema)} & ~/(.|\n)*<[|](.|\n)*/")
        return self._rule(f"{self._quote()} {name} {self._quote()}")

    def _written(self, value: Any) -> str:
        """Return a value as Gemma 4 writes it."""
        if isinstance(value, str):
            return f"{self._quote()} {_literal(value)} {self._quote()}" if value else f"{self._quote()} {self._quote()}"
        if isinstance(value, Mapping):
            pairs = [f'{self._key(key)} ":" {self._written(item)}' for key, item in sorted(value.items())]
            return " ".join(['"{"', ' "," '.join(pairs), '"}"'])
        if isinstance(value, list):
            return " ".join(['"["', ' "," '.join(map(self._written, value)), '"]"'])
        return _literal(json.dumps(value))

    def _key(self, name: str) -> str:
        return _literal(name) if _SIMPLE_KEY.fullmatch(name) else f"{self._quote()} {_literal(name)} {self._quote()}"

    def _array(self, schema: Mapping[str, Any]) -> str:
        first, rest = schema.get("prefixItems") or (), schema.get("items", {})
        if isinstance(rest, list):  # as drafts before 2020-12 have it
            first, rest = rest, schema.get("additionalItems", {})
        least, most = self._count(schema, "minItems") or 0, self._count(schema, "maxItems")
        first = first[:most]
        size = len(first)
        if rest is False and least > size:
            return self._json(False)
        has_more = rest is not False and most != size
        item = self._value(rest) if has_more else ""
        begun = max(size, 1)  # of the elements before those that repeat
        after = _times(f'"," {item}', least - begun, None if most is None else max(most, least) - begun) if has_more else '""'
        if not size:
            full = f"{item} {after}"
            return self._rule(*(['"[" "]"'] if not least else []), *([f'"[" {full} "]"'] if has_more else []))
        for place in range(size - 1, -1, -1):
            comma = '"," ' if place else ""
            one = f"{comma}{self._value(first[place])} {after}"
            after = self._rule(one) if place < least else self._rule(one, '""')
        return self._rule(f'"[" {after} "]"')

    def _properties(self, schema: Mapping[str, Any]) -> tuple[dict[str, Any], set[str], Any]:
        """Return name -> schema of an object's properties, the required ones (declared or not), and the schema of others, without
        names that no value may have. Errors: RequestError."""
        given, others = schema.get("properties"), schema.get("additionalProperties", True)
        required = {name for name in schema.get("required") or () if isinstance(name, str)}
        named = dict(given) if isinstance(given, Mapping) else {}
        if "patternProperties" in schema and (required - named.keys() or not named):
            raise self._plain.refused("patternProperties")
        named |= {name: others for name in schema.get("required") or () if isinstance(name, str) and name not in named}
        named = {name: one for name, one in named.items() if name in required or one is not False}
        least, most = self._count(schema, "minProperties") or 0, self._count(schema, "maxProperties")
        if least > (len(required) if named else 1):  # a key may be repeated
            raise self._plain.refused("minProperties")
        if named and most is not None and most < len(named):
            raise self._plain.refused("maxProperties")
        return named, required, others

    def _object(self, schema: Mapping[str, Any]) -> str:
        properties, required, others = self._properties(schema)
        if not properties:
            key = "/[A-Za-z_][A-Za-z0-9_.-]*/"
            return self._free(schema, '"{"', lambda: f'{key} ":" {self._value(others)}', '","', '"}"')
        # Templates write keys in this order, so models do.
        names = sorted(properties, key=str.lower)
        first, more = '""', '""'
        for name in reversed(names):
            pair = f'{self._key(name)} ":" {self._value(properties[name])}'
            after = more
            with_first, with_more = f"{pair} {after}", f'"," {pair} {after}'
            is_needed = name in required
            first = self._rule(with_first) if is_needed else self._rule(with_first, first)
            more = self._rule(with_more) if is_needed else self._rule(with_more, more)
        return self._rule(f'"{{" {first} "}}"')

    def _free(self, schema: Mapping[str, Any], opened: str, pair_of: Callable[[], str], comma: str, closed: str) -> str:
        """Return a rule of an object whose names are free."""
        least, most = self._count(schema, "minProperties") or 0, self._count(schema, "maxProperties")
        if schema.get("additionalProperties", True) is False or most == 0:
            return f"{opened} {closed}" if not least else self._json(False)
        pair = pair_of()
        full = self._rule(f"{opened} {pair} {_times(f'{comma} {pair}', 0, None if most is None else most - 1)} {closed}")
        return full if least else self._rule(full, f"{opened} {closed}")

    def _count(self, schema: Mapping[str, Any], name: str) -> int | None:
        """Return a length or a number of parts. A greatest one beyond MOST_COUNT is none. Errors: RequestError for a least one."""
        value = schema.get(name)
        if not isinstance(value, (int, float)) or isinstance(value, bool) or value < 0:
            return None
        if value >= MOST_COUNT:
            if name.startswith("max"):
                return None
            raise self._plain.refused(name)
        return int(value)

    def _anything(self) -> str:
        if self._any is None:
            self._any = name = self._rule("")
            simple = [self._string({}), self._json({"type": ["number", "boolean", "null"]})]
            array = f'"[" ({name} ("," {name})*)? "]"'
            pair = f'/[A-Za-z_][A-Za-z0-9_.-]*/ ":" {name}'
            self._rules[int(name[1:])] = f'{name}: {" | ".join([*simple, array])} | "{{" ({pair} ("," {pair})*)? "}}"'
        return self._any

    # Qwen's tags ------------------------------------------------------------------------------------------------------

    def _tagged(self, schema: Mapping[str, Any]) -> str:
        properties, required, others = self._properties(schema)
        if not properties:
            return self._free(schema, '""', lambda: self._argument(None, others), '""', '""')
        pairs = [(name, self._argument(name, one)) for name, one in properties.items()]
        return " ".join(pair if name in required else f"{pair}?" for name, pair in pairs)

    def _argument(self, name: str | None, schema: Any) -> str:
        """Return a rule of one argument. name: None for any."""
        opened = r"/<parameter=[A-Za-z_][A-Za-z0-9_.-]*>\n/" if name is None else _literal(f"<parameter={name}>\n")
        closed = _literal("\n</parameter>\n")
        if not are_texts(parameter_schemas(self._root, name)):
            return self._rule(f"{opened} {self._json(schema)} {closed}")
        rules = []
        for one in self._plain.followed(schema):
            if (values := self._listed(one)) is not None:
                rules += [f"{opened} {_literal(value)} {closed}" for value in values]
                continue
            # The end is looked for at every character: as a separate lexeme, the text would contain it.
            inner = f"t{len(self._rules)}"
            self._rules.append(f"{inner}[suffix={closed}]: {self._any_text(one)}")
            rules.append(f"{opened} {inner}")
        return self._rule(*rules) if rules else self._json(False)

    def _any_text(self, schema: Mapping[str, Any]) -> str:
        """Return a regular expression of any text of a schema's length."""
        least, most = self._count(schema, "minLength") or 0, self._count(schema, "maxLength")
        return f"/(.|\\n){{{least},{'' if most is None else most}}}/" if least or most is not None else r"/(.|\n)*/"


def _times(what: str, least: int, most: int | None) -> str:
    return '""' if most == 0 else f"({what}){{{max(least, 0)},{'' if most is None else most}}}"


def _literal(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


# Schemas without allOf, anyOf, oneOf and lists of types ---------------------------------------------------------------

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
    pointers = (node.get("$ref") for node in nodes_of({**schema, "$defs": shared}))
    if any(isinstance(one, str) and not one.startswith(("#/$defs/", "#/definitions/")) for one in pointers):
        return {**_moved(schema), "$defs": {"root": _moved(root)}}
    return {**shared, **schema}


def _moved(node: Any) -> Any:
    if isinstance(node, list):
        return [_moved(one) for one in node]
    if not isinstance(node, Mapping):
        return node
    return {
        name: f"#/$defs/root{value[1:]}" if name == "$ref" and isinstance(value, str) and value[:1] == "#" else _moved(value)
        for name, value in node.items()
    }
