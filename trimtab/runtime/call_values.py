"""Arguments of tool calls that are not written as JSON: the forms of Gemma 4 and Qwen.

Gemma 4 writes {city:<|"|>Paris<|"|>,days:3,tags:[<|"|>a<|"|>]}: keys without quotes, texts between two marks, the rest as in JSON.
Source: the macro `format_argument` of google/gemma-4-E4B-it's chat template. Qwen3-Coder writes each argument between tags, as a
text whose type only the tool's schema tells. Imports no torch.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from trimtab.runtime.answer_forms import GEMMA_QUOTE

MOST_DEPTH = 64
_PARAMETER = re.compile(r"<parameter=([^>]*)>\n?(.*?)\n?</parameter>", re.DOTALL)
_NUMBER = re.compile(r"-?(?:0|[1-9]\d*)(?:\.\d+)?(?:[eE][+-]?\d+)?")


def gemma_arguments(body: str) -> dict[str, Any]:
    """Return the arguments of a call. body: what stands after its first brace, the closing one included.

    Errors: ValueError for what is not of this form.
    """
    reader = _Gemma(body)
    arguments = reader.object(0)
    if body[reader.place :].strip():
        raise ValueError("text after the arguments")
    return arguments


class _Gemma:
    def __init__(self, text: str) -> None:
        self._text, self.place = text, 0

    def _skip(self) -> str:
        """Return the next character that is no white space; "" at the end."""
        while self.place < len(self._text) and self._text[self.place].isspace():
            self.place += 1
        return self._text[self.place : self.place + 1]

    def _until(self, ends: str) -> str:
        start = self.place
        while self.place < len(self._text) and self._text[self.place] not in ends:
            self.place += 1
        return self._text[start : self.place].strip()

    def _quoted(self) -> str | None:
        if self._text.startswith(GEMMA_QUOTE, self.place):
            start = self.place + len(GEMMA_QUOTE)
            end = self._text.index(GEMMA_QUOTE, start)
            self.place = end + len(GEMMA_QUOTE)
            return self._text[start:end]
        if self._text.startswith('"', self.place):
            value, self.place = json.JSONDecoder(strict=False).raw_decode(self._text, self.place)
            return str(value)
        return None

    def object(self, depth: int) -> dict[str, Any]:
        """Read an object after its brace."""
        members: dict[str, Any] = {}
        while self._skip() != "}":
            key = self._quoted()
            key = self._until(":}") if key is None else key
            if self._skip() != ":":
                raise ValueError("a key without a value")
            self.place += 1
            members[key] = self._value(depth + 1)
            self._separate("}")
        self.place += 1
        return members

    def _array(self, depth: int) -> list[Any]:
        values = []
        while self._skip() != "]":
            values.append(self._value(depth + 1))
            self._separate("]")
        self.place += 1
        return values

    def _separate(self, end: str) -> None:
        char = self._skip()
        if char == ",":
            self.place += 1
        elif char != end:
            raise ValueError("neither a comma nor an end")

    def _value(self, depth: int) -> Any:
        if depth > MOST_DEPTH:
            raise ValueError("nested too deep")
        char = self._skip()
        if char and char in "{[":
            self.place += 1
            return self.object(depth) if char == "{" else self._array(depth)
        text = self._quoted()
        return _plain(self._until(",}]")) if text is None else text


def _plain(text: str) -> Any:
    if text in ("true", "false"):
        return text == "true"
    if text in ("null", "None"):
        return None
    return json.loads(text) if _NUMBER.fullmatch(text) else text


def tagged_arguments(body: str, parameters: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return the arguments between tags. parameters: the tool's schema, which tells texts from other values."""
    properties = (parameters or {}).get("properties")
    arguments: dict[str, Any] = {}
    for name, text in _PARAMETER.findall(body):
        schema = properties.get(name) if isinstance(properties, Mapping) else None
        arguments[name] = text if is_text_schema(schema) else _read(text)
    return arguments


def is_text_schema(schema: Any) -> bool:
    """Whether a parameter's schema allows texts alone."""
    if not isinstance(schema, Mapping):
        return False
    values = [schema["const"]] if "const" in schema else schema.get("enum")
    if isinstance(values, list) and values:
        return all(isinstance(value, str) for value in values)
    return schema.get("type") == "string"


def _read(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text
