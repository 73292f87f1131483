"""The grammar for a mandatory tool call: the texts that a model may write in its family's form, for llguidance.

llguidance itself enforces a function's schema on arguments in JSON. For Gemma 4's form and Qwen's tags, this module makes the
rules from the schema: they enforce names, required ones, types, enums, lengths and numbers' bounds, but not `pattern` and `format`
of texts. Source of the grammar's own syntax: llguidance, docs/syntax.md.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from trimtab.engine.chat.answer_forms import CALL_MARKS, GEMMA_QUOTE
from trimtab.engine.chat.call_values import is_text_schema
from trimtab.errors import RequestError
from trimtab.serve.grammar.schema import target_of

NO_PARAMETERS: dict[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}
# The spaces that JSON may have where a model was trained on one; see constraint.WHITE_SPACE.
_SPACES = {"x-guidance": {"whitespace_flexible": True, "whitespace_pattern": "[ ]?"}}
_SIMPLE_KEY = re.compile(r"[A-Za-z_$][\w$.-]*")
# A definition is written into each rule of JSON below it.
MOST_RULES, MOST_LETTERS = 20_000, 8 * 2**20


# The start of a bare call of Llama's.
BARE_HEAD = '{"name"'


def calls_grammar(
    form: str, functions: Sequence[Mapping[str, Any]], mark: Callable[[str], str], *, several: bool, after: str = ""
) -> str:
    """Return the grammar for one or more calls of these functions.

    mark: the text of a control token -> its form in a grammar. several: whether more than one call is allowed. after: the text
    that is already written, the form's opening mark or BARE_HEAD; then the grammar describes the rest of that opening. Errors:
    RequestError for schemas with too many rules.
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
        match self._form:
            case "gemma4":
                return f"{_literal(f'call:{name}')} {self._object(self._root)}"
            case "qwen-xml":
                opened, closed = _literal(f"\n<function={name}>\n"), _literal("</function>\n")
                return f"{opened} {self._tagged(self._root)} {closed}"
            case "mistral-args":
                return f"{_literal(name)} {self._mark('[ARGS]')} {self._json(self._root)}"
        key = "parameters" if self._form == "llama" else "arguments"
        head = "" if self._after == BARE_HEAD else BARE_HEAD
        opened, closed = _literal(f'{head}: {json.dumps(name)}, "{key}": '), _literal("}")
        return f"{opened} {self._json(self._root)} {closed}"

    def _json(self, schema: Any) -> str:
        """Return a rule of JSON that satisfies a schema; its references are to the function's own."""
        if not isinstance(schema, Mapping):
            schema = {} if schema is not False else {"enum": []}
        shared = {name: self._root[name] for name in ("$defs", "definitions") if name in self._root}
        return self._rule("%json " + json.dumps({**shared, **schema, **_SPACES}))

    # Gemma 4 ----------------------------------------------------------------------------------------------------------

    def _value(self, schema: Any) -> str:
        if not isinstance(schema, Mapping) or not schema:
            return self._anything()
        if isinstance(pointer := schema.get("$ref"), str):
            return self._reference(pointer)
        if "const" in schema or isinstance(schema.get("enum"), list):
            values = [schema["const"]] if "const" in schema else schema["enum"]
            return self._rule(*map(self._written, values)) if values else self._json({"enum": []})
        for several in ("anyOf", "oneOf"):
            if isinstance(schema.get(several), list) and schema[several]:
                return self._rule(*(self._value(one) for one in schema[several]))
        if isinstance(schema.get("allOf"), list) and len(schema["allOf"]) == 1:
            return self._value(schema["allOf"][0])
        kinds = schema.get("type")
        if isinstance(kinds, list) and kinds:
            return self._rule(*(self._value({**schema, "type": kind}) for kind in kinds))
        match kinds:
            case "string":
                return self._string(schema)
            case "integer" | "number" | "boolean" | "null":
                return self._json(schema)
            case "array":
                return self._array(schema)
            case "object":
                return self._object(schema)
        return self._object(schema) if "properties" in schema else self._anything()

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
        self._rules.append(rf"{name}: {_any_text(schema)} & ~/(.|\n)*<[|](.|\n)*/")
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
        item = self._value(schema.get("items", {}))
        least, most = _count(schema, "minItems") or 0, _count(schema, "maxItems")
        if most == 0:
            return '"[" "]"'
        more = f'("," {item}){{{max(least - 1, 0)},{"" if most is None else max(most, least) - 1}}}'
        full = self._rule(f'"[" {item} {more} "]"')
        return full if least else self._rule(full, '"[" "]"')

    def _object(self, schema: Mapping[str, Any]) -> str:
        properties = schema.get("properties")
        if not isinstance(properties, Mapping) or not properties:
            if schema.get("additionalProperties", True) is False:
                return '"{" "}"'
            return self._free_object(schema.get("additionalProperties"))
        required = set(filter(lambda name: isinstance(name, str), schema.get("required") or ()))
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

    def _free_object(self, values: Any) -> str:
        value = self._value(values) if isinstance(values, Mapping) else self._anything()
        pair = f'/[A-Za-z_][A-Za-z0-9_.-]*/ ":" {value}'
        return self._rule(f'"{{" {pair} ("," {pair})* "}}"', '"{" "}"')

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
        properties = schema.get("properties")
        required = schema.get("required") or ()
        pieces = []
        for name, value in (properties if isinstance(properties, Mapping) else {}).items():
            is_text = is_text_schema(value)
            plain = is_text and "enum" not in value and "const" not in value
            opened, closed = _literal(f"<parameter={name}>\n"), _literal("\n</parameter>\n")
            if plain:
                # The end is looked for at every character: as a separate lexeme, the text would contain it.
                inner = f"t{len(self._rules)}"
                self._rules.append(f"{inner}[suffix={closed}]: {_any_text(value)}")
                pair = self._rule(f"{opened} {inner}")
            else:
                if is_text:
                    texts = [value["const"]] if "const" in value else value["enum"]
                    inner = self._rule(*map(_literal, texts))
                else:
                    inner = self._json(value)
                pair = self._rule(f"{opened} {inner} {closed}")
            pieces.append(pair if name in required else f"{pair}?")
        return " ".join(pieces)


def _any_text(schema: Mapping[str, Any]) -> str:
    """Return a regular expression of any text of a schema's length."""
    least, most = _count(schema, "minLength") or 0, _count(schema, "maxLength")
    return f"/(.|\\n){{{least},{'' if most is None else most}}}/" if least or most is not None else r"/(.|\n)*/"


def _literal(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _count(schema: Mapping[str, Any], name: str) -> int | None:
    value = schema.get(name)
    return int(value) if isinstance(value, (int, float)) and not isinstance(value, bool) and 0 <= value < 10_000 else None
