"""What are the arguments of tool calls that are not written as JSON, but in the forms of Gemma 4 and Qwen?"""

from __future__ import annotations

import json
import math
import re
from collections import deque
from collections.abc import Iterable, Mapping
from contextlib import suppress
from urllib.parse import unquote

from trimtab.engine.chat.answer_forms import GEMMA_QUOTE

MOST_DEPTH, MOST_BRANCHES, MOST_DIGITS = 64, 256, 4000
_NO_JSON = ("NaN", "Infinity", "-Infinity")
_NAMES = {str: "string", bool: "boolean", type(None): "null"}
_WORDS = {"True": (True, "boolean"), "False": (False, "boolean"), "None": (None, "null")}
_PARAMETER = re.compile(r"<parameter=([^<>]*)>\n?(.*?)\n?</parameter>", re.DOTALL)
_OPENED = re.compile(r"<parameter=([^<>]*)>\n?")
_NUMBER_START = re.compile(r"-?(?:0|[1-9]\d*)?(?:(?<=\d)\.\d*)?(?:(?<=\d)[eE][+-]?\d*)?")
_NUMBER = re.compile(r"-?(?:0|[1-9]\d*)(?:\.\d+)?(?:[eE][+-]?\d+)?")


def gemma_arguments(body: str) -> dict[str, object]:
    """Return the arguments of a call. body: the text after its first brace, the closing one included.

    Errors: ValueError for text of another form. A call is {city:<|"|>Paris<|"|>,days:3}: keys without quotes, texts between two
    marks. Source: the macro `format_argument` of google/gemma-4-E4B-it's chat template.
    """
    writer = _GemmaWriter(body)
    try:
        writer.write_object(0)
    except _CutError:
        raise ValueError("the call is cut") from None
    if body[writer.place :].strip():
        raise ValueError("text after the arguments")
    return dict(json.loads(writer.json))


class _CutError(Exception):
    """The text of a call ends here."""


class _GemmaWriter:
    """Writes JSON as far as a text goes. Errors: _CutError at its end, ValueError for text of another form."""

    def __init__(self, text: str) -> None:
        self._text, self.place = text, 0
        self._pieces: list[str] = []

    @property
    def json(self) -> str:
        return "".join(self._pieces)

    def _skip(self) -> str:
        """Return the next character that is no white space, if it cannot begin a mark that is cut."""
        while self.place < len(self._text) and self._text[self.place].isspace():
            self.place += 1
        left = len(self._text) - self.place
        if left == 0 or (left < len(GEMMA_QUOTE) and GEMMA_QUOTE.startswith(self._text[self.place :])):
            raise _CutError
        return self._text[self.place]

    def _until(self, ends: str) -> str:
        start = self.place
        while self.place < len(self._text) and self._text[self.place] not in ends:
            self.place += 1
        return self._text[start : self.place].strip()

    def _separate(self, end: str) -> None:
        char = self._skip()
        if char == ",":
            self.place += 1
        elif char != end:
            raise ValueError("neither a comma nor an end")

    def write_object(self, depth: int) -> None:
        self._pieces.append("{")
        separator = ""
        while self._skip() != "}":
            self._pieces.append(separator)
            self._key()
            if self._skip() != ":":
                raise ValueError("a key without a value")
            self.place += 1
            self._pieces.append(": ")
            self._write_value(depth + 1)
            self._separate("}")
            separator = ", "
        self.place += 1
        self._pieces.append("}")

    def _key(self) -> None:
        if not self._write_quoted():
            key = self._until(":}")
            if self.place == len(self._text):
                raise _CutError
            self._pieces.append(_dumps(key))

    def _write_value(self, depth: int) -> None:
        if depth > MOST_DEPTH:
            raise ValueError("nested too deep")
        char = self._skip()
        if char == "{":
            self.place += 1
            self.write_object(depth)
        elif char == "[":
            self.place += 1
            self._pieces.append("[")
            separator = ""
            while self._skip() != "]":
                self._pieces.append(separator)
                self._write_value(depth + 1)
                self._separate("]")
                separator = ", "
            self.place += 1
            self._pieces.append("]")
        elif not self._write_quoted():
            text = self._until(",}]")
            if self.place == len(self._text):
                self._pieces.append(_plain_prefix(text))
                raise _CutError
            self._pieces.append(_dumps(_plain(text)))

    def _write_quoted(self) -> bool:
        if self._text.startswith('"', self.place):
            try:
                text, self.place = json.JSONDecoder(strict=False).raw_decode(self._text, self.place)
            except ValueError:
                raise _CutError from None
        elif self._text.startswith(GEMMA_QUOTE, self.place):
            start = self.place + len(GEMMA_QUOTE)
            end = self._text.find(GEMMA_QUOTE, start)
            if end < 0:
                text = self._text[start:]
                self._pieces.append(_dumps(text[: len(text) - mark_overlap(text, GEMMA_QUOTE)])[:-1])
                raise _CutError
            text, self.place = self._text[start:end], end + len(GEMMA_QUOTE)
        else:
            return False
        self._pieces.append(_dumps(text))
        return True


def gemma_arguments_prefix(body: str) -> str:
    """Return the beginning of the JSON of a call's arguments. body: the text after its first brace, as far as it was written.

    Errors: ValueError for text of another form.
    """
    writer = _GemmaWriter(body)
    with suppress(_CutError):
        writer.write_object(0)
    return writer.json


def mark_overlap(text: str, mark: str) -> int:
    """Return how many characters at the end of a text may be the beginning of a mark."""
    longest = min(len(mark) - 1, len(text))
    return next((size for size in range(longest, 0, -1) if text.endswith(mark[:size])), 0)


def _dumps(value: object) -> str:
    return json.dumps(value, ensure_ascii=False)


def _plain_prefix(text: str) -> str:
    if any(word.startswith(text) for word in ("true", "false", "null")) or _NUMBER_START.fullmatch(text):
        return text
    return "" if "None".startswith(text) else _dumps(text)[:-1]


def _plain(text: str) -> object:
    if text in ("true", "false"):
        return text == "true"
    if text in ("null", "None"):
        return None
    return read_json(text) if _NUMBER.fullmatch(text) else text


def tagged_arguments(body: str, parameters: Mapping[str, object] | None) -> dict[str, object]:
    """Return the arguments between tags. parameters: the tool's schema, which distinguishes texts from other values."""
    arguments: dict[str, object] = {}
    known: dict[str, list[Mapping[str, object]]] = {}
    # Up to the last end alone: each start behind it would look for one through all the text.
    whole, end, _ = body.rpartition("</parameter>")
    for name, text in _PARAMETER.findall(whole + end):
        schemas = known[name] = known[name] if name in known else parameter_schemas(parameters, name)
        arguments[name] = text if are_texts(schemas) else _read(text, schemas)
    return arguments


def tagged_arguments_prefix(body: str, parameters: Mapping[str, object] | None) -> str:
    """Return the beginning of the JSON of arguments between tags. body: the call as far as it was written."""
    written = _dumps(tagged_arguments(body, parameters))[:-1]
    tail = body.rpartition("</parameter>")[2]
    opened = _OPENED.search(tail)
    if opened is None:
        return written
    name, text = opened[1], tail[opened.end() :]
    written += f"{', ' if len(written) > 1 else ''}{_dumps(name)}: "
    if not are_texts(parameter_schemas(parameters, name)):
        return written  # whether it is a number, an object or a text is known at its end
    end = "\n</parameter>"
    return written + _dumps(text[: len(text) - mark_overlap(text, end)])[:-1]


def parameter_schemas(parameters: object, name: str | None) -> list[Mapping[str, object]]:
    """Return the schemas of an argument, references followed. name: None for one that is not declared."""
    declared: list[object] = []
    others: list[object] = []
    for node in _branches([parameters], parameters):
        named, rest = node.get("properties"), node.get("additionalProperties")
        if isinstance(named, Mapping) and name in named:
            declared.append(named[name])
        others += [rest] if isinstance(rest, Mapping) else []
    return _branches(declared or others, parameters)


def _branches(schemas: Iterable[object], root: object) -> list[Mapping[str, object]]:
    """Return schemas and what their references, allOf, anyOf and oneOf have, at most MOST_BRANCHES."""
    found: list[Mapping[str, object]] = []
    seen, waiting = set[int](), deque(schemas)
    while waiting and len(found) < MOST_BRANCHES:
        node = waiting.popleft()
        if not isinstance(node, Mapping) or id(node) in seen:
            continue
        seen.add(id(node))
        found.append(node)
        waiting += [target_of(root, node["$ref"])] if "$ref" in node else []
        for several in ("allOf", "anyOf", "oneOf"):
            options = node.get(several)
            waiting += options if isinstance(options, list) else []
    return found


def are_texts(schemas: list[Mapping[str, object]]) -> bool:
    """Whether a parameter's schemas allow texts alone."""
    kinds = set[str]()
    for schema in schemas:
        kinds |= _kinds(schema)
    return kinds == {"string"}


def _kinds(schema: Mapping[str, object]) -> set[str]:
    values = [schema["const"]] if "const" in schema else schema.get("enum")
    if isinstance(values, list) and values:
        return {_NAMES.get(type(value), "number") for value in values}
    kinds = schema.get("type")
    if kinds is None:
        return set() if any(name in schema for name in ("$ref", "allOf", "anyOf", "oneOf")) else {""}
    return set(map(str, kinds if isinstance(kinds, list) else [kinds]))


def _read(text: str, schemas: list[Mapping[str, object]]) -> object:
    # Published templates write these values of Python.
    value, kind = _WORDS.get(text, (None, "string"))
    if any(kind in _kinds(schema) for schema in schemas) and kind != "string":
        return value
    try:
        return read_json(text)
    except (ValueError, RecursionError):
        return text


def read_json(text: str, *, strict: bool = True) -> object:
    """Return the value of JSON. NaN, infinities and numbers beyond float64 or thousands of digits, which JSON cannot pass on, are
    texts as they were written. Errors: as json.loads."""
    return json.loads(text, strict=strict, parse_constant=str, parse_float=_number, parse_int=_integer)


def _number(text: str) -> float | str:
    return number if math.isfinite(number := float(text)) else text


def _integer(text: str) -> int | str:
    return int(text) if len(text) <= MOST_DIGITS else text


class JsonNumbers:
    """Quotes NaN and infinities in JSON that arrives in pieces: they are no JSON."""

    def __init__(self) -> None:
        self._word, self._is_text, self._is_escaped = "", False, False

    def push(self, text: str) -> str:
        """Return what is sure: the beginning of such a word waits."""
        pieces = []
        for char in text:
            if not self._is_text and any(word.startswith(self._word + char) for word in _NO_JSON):
                self._word += char
                continue
            pieces.append(f'"{self._word}"' if self._word in _NO_JSON else self._word)
            pieces.append(char)
            self._word = ""
            if self._is_escaped:
                self._is_escaped = False
            elif self._is_text:
                self._is_escaped, self._is_text = char == "\\", char != '"'
            else:
                self._is_text = char == '"'
        return "".join(pieces)


def target_of(root: object, pointer: object) -> object:
    """Return the value at a JSON pointer (#/...), None if it leads nowhere. Source: RFC 6901."""
    if not isinstance(pointer, str) or not pointer.startswith("#"):
        return None
    value = root
    for step in unquote(pointer[1:]).split("/")[1:]:
        step = step.replace("~1", "/").replace("~0", "~")
        if isinstance(value, dict) and step in value:
            value = value[step]
        elif isinstance(value, list) and step.isdecimal() and len(step) < 10 and int(step) < len(value):
            value = value[int(step)]
        else:
            return None
    return value if pointer[1:2] in ("", "/") else None
