"""Which content, reasoning and tool calls does an answer's text have, as it streams?"""

from __future__ import annotations

import json
import re
import secrets
import string
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from trimtab.engine.chat.answer_forms import CALL_MARKS, PYTHON_TAG, AnswerForm
from trimtab.engine.chat.call_values import (
    JsonNumbers,
    gemma_arguments,
    gemma_arguments_prefix,
    mark_overlap,
    read_json,
    tagged_arguments,
    tagged_arguments_prefix,
)

# Gemma 4's text at the beginning of a thought.
_LABEL = "thought\n"
_HEAD = re.compile(r'\s*\{\s*"name"\s*:\s*("(?:[^"\\]|\\.)*")\s*,\s*"(?:arguments|parameters)"\s*:\s*(?=\{)', re.DOTALL)
# A JSON call whose name does not end before is read when it is complete; longer names between marks, and more white space where a
# call could begin, are text.
HEAD_LETTERS = 4096
_GEMMA_HEAD = re.compile(r"\s*call:([^{<]*)\{")
_XML_HEAD = re.compile(r"\s*<function=([^>]*)>")
_LETTERS = string.ascii_letters + string.digits
# Mistral's templates take ids of this length alone.
MISTRAL_ID = 9


@dataclass(frozen=True)
class Call:
    """A piece of one call. index: which of the answer's calls. id and name: with its first piece alone."""

    index: int
    arguments: str = ""
    id: str | None = None
    name: str | None = None


Part = tuple[str, Any]


class JsonSpan:
    """Where a JSON object or array ends, in text that arrives in pieces. depth: number of open brackets at its start."""

    def __init__(self, depth: int = 0) -> None:
        self._depth, self._is_text, self._is_escaped = depth, False, False
        self._letters = 0  # of a growing text that were searched

    def feed(self, text: str) -> int | None:
        """Return the place after its end; None if it goes on."""
        for place, char in enumerate(text):
            if self._is_escaped:
                self._is_escaped = False
            elif self._is_text:
                self._is_escaped, self._is_text = char == "\\", char != '"'
            elif char == '"':
                self._is_text = True
            elif char in "{[":
                self._depth += 1
            elif char in "}]":
                self._depth -= 1
                if self._depth <= 0:
                    return place + 1
        return None

    def end_in(self, text: str) -> int | None:
        """Return the same for a text that is the one of the last call and more: only what is new is searched."""
        end, before, self._letters = self.feed(text[self._letters :]), self._letters, len(text)
        return None if end is None else before + end


class AnswerReader:
    """One answer's reader. functions: name -> parameters of the tools, {} if none may be called. in_thought: the prompt ends inside
    a thought. must_call: a grammar allows nothing but calls; only_name: of this function alone, None for any of them. A part is
    emitted as soon as it is sure: text that may become a mark waits. A beginning of a call that turns out to be none is text."""

    def __init__(
        self,
        form: AnswerForm,
        *,
        functions: Mapping[str, Mapping[str, object] | None] | None = None,
        in_thought: bool = False,
        must_call: bool = False,
        only_name: str | None = None,
    ) -> None:
        self._form, self._functions = form, functions or {}
        self._must_call, self._only_name = must_call, only_name
        self._calls = form.calls if functions else None
        self._close = CALL_MARKS[self._calls][1] if self._calls else ""
        self.calls = 0
        # Whether the answer ended inside a call.
        self.is_call_cut = False
        # Of the call or thought that is being read.
        self._name, self._is_named, self._is_list, self._has_thought = "", False, False, False
        self._buffer, self._taken = "", ""
        # The length of the buffer that was searched for marks: the cost of a token must not grow with the buffer.
        self._looked = 0
        self._is_first, self._skips_space = True, False
        self._label = _LABEL if form.thoughts and form.thoughts[0] == "<|channel>" else ""
        self._is_labelled = not self._label
        self._read = self._thought if in_thought else self._text
        self._span, self._numbers = JsonSpan(), JsonNumbers()
        # Of a call whose name is not known yet.
        self._head = JsonSpan()
        self._parts: list[Part] = []

    @property
    def is_aside(self) -> bool:
        """Whether the next text is inside a thought or a call."""
        return self._read != self._text

    def push(self, text: str) -> list[Part]:
        """Return the parts that are now sure."""
        self._buffer += text
        while self._read():
            self._looked = 0
        self._looked = len(self._buffer)
        return self._told()

    def finish(self, *, is_cut: bool = False) -> list[Part]:
        """Return the rest: the answer has ended. is_cut: by its most tokens or a stop text, and not by the model."""
        self.is_call_cut = is_cut and (
            self._is_call_head() or self._read == self._json_arguments or (self._read == self._marked_call and self._is_named)
        )
        if is_cut and self._is_call_head():
            if self._only_name is not None and not self.calls:
                self._begin(self._only_name)
        elif self._read == self._text:
            self._say(self._buffer)
        elif self._read == self._thought:
            self._think(self._buffer.rstrip())
        elif self._read == self._marked_call:
            self._end_marked(self._buffer, is_cut=is_cut)
        elif self._read == self._json_head:
            self._whole_json(self._buffer)
        elif self._read == self._mistral_head:
            self._no_call(self._buffer)
        self._buffer = ""
        return self._told()

    def _is_call_head(self) -> bool:
        """Whether the text not emitted yet is the beginning of a call without its whole name."""
        text = self._buffer.lstrip()
        if self._read == self._text:
            return self._must_call
        if self._read == self._marked_call:
            head = "call:" if self._calls == "gemma4" else "<function="
            return not self._is_named and (head.startswith(text) or text.startswith(head))
        # Without a mark before it, an object is a call only if nothing else may be written.
        return self._read == self._mistral_head or (self._read == self._json_head and (bool(self._taken) or self._must_call))

    def _place_of(self, mark: str) -> int:
        """Return where a mark is in the buffer, -1 for nowhere."""
        return self._buffer.find(mark, max(0, self._looked - len(mark) + 1))

    def _told(self) -> list[Part]:
        parts, self._parts = self._parts, []
        return parts

    # Text and thoughts ------------------------------------------------------------------------------------------------

    def _text(self) -> bool:
        if self._calls == "llama" and self._is_first and self._begins_bare():
            return True
        marks = [self._form.thoughts[0]] if self._form.thoughts else []
        marks += [CALL_MARKS[self._calls][0]] if self._calls else []
        places = [(place, mark) for mark in marks if (place := self._place_of(mark)) >= 0]
        if not places:
            overlap = max((mark_overlap(self._buffer, mark) for mark in marks), default=0)
            sure = self._buffer[: len(self._buffer) - overlap]
            if self._calls:  # white space before a call is none of the text
                sure = _without_space(sure)
            if self._calls == "llama" and self._is_first and not sure:
                return False
            self._say(sure)
            self._buffer = self._buffer[len(sure) :]
            return False
        place, mark = min(places)
        before = self._buffer[:place]
        is_thought = self._form.thoughts is not None and mark == self._form.thoughts[0]
        self._say(before if is_thought and not self._calls else before.rstrip())
        self._buffer = self._buffer[place + len(mark) :]
        if is_thought:
            self._read, self._is_labelled = self._thought, not self._label
        else:
            self._open_call(mark)
        return True

    def _begins_bare(self) -> bool:
        """Whether the answer begins with a JSON object, which is how Llama calls without a mark."""
        text = self._buffer.lstrip()
        if not text.startswith("{"):
            return False
        self._buffer, self._taken = text, ""
        self._read, self._is_first = self._json_head, False
        return True

    def _say(self, text: str) -> None:
        if self._skips_space:
            text = text.lstrip()
        if text:
            self._skips_space = self._is_first = False
            self._parts.append(("text", text))

    def _thought(self) -> bool:
        assert self._form.thoughts is not None
        if not self._is_labelled:
            if self._label.startswith(self._buffer) and self._buffer != self._label:
                return False
            self._buffer, self._is_labelled = self._buffer.removeprefix(self._label), True
        close = self._form.thoughts[1]
        place = self._place_of(close)
        if place < 0:
            overlap = mark_overlap(self._buffer, close)
            sure = _without_space(self._buffer[: len(self._buffer) - overlap])
            self._think(sure)
            self._buffer = self._buffer[len(sure) :]
            return False
        self._think(self._buffer[:place].rstrip())
        self._buffer = self._buffer[place + len(close) :]
        self._read, self._skips_space, self._has_thought = self._text, True, False
        return True

    def _think(self, text: str) -> None:
        if not self._has_thought:
            text = text.lstrip("\n")
        if text:
            self._has_thought = True
            self._parts.append(("reasoning", text))

    # Calls ------------------------------------------------------------------------------------------------------------

    def _open_call(self, mark: str) -> None:
        self._taken, self._is_named = mark, False
        if self._calls in ("gemma4", "qwen-xml"):
            self._read = self._marked_call
        elif self._calls in ("mistral", "mistral-args"):
            self._read = self._mistral_head
        else:
            self._read = self._json_head

    def _begin(self, name: str) -> None:
        self._parts.append(("call", Call(self.calls, id=_new_id(self._calls), name=name)))
        self.calls, self._numbers = self.calls + 1, JsonNumbers()

    def _add(self, arguments: str) -> None:
        if arguments:
            self._parts.append(("call", Call(self.calls - 1, arguments)))

    def _no_call(self, text: str) -> None:
        """Treat the beginning of a call as text."""
        self._skips_space = False
        self._say(self._taken + text)
        self._read, self._taken = self._text, ""

    def _json_head(self) -> bool:
        match = _HEAD.match(self._buffer, 0, HEAD_LETTERS) if self._looked < HEAD_LETTERS else None
        if match is not None and (name := _text_of(match[1])) is not None:
            self._begin(name)
            self._head = JsonSpan()
            self._buffer, self._span, self._read = self._buffer[match.end() :], JsonSpan(), self._json_arguments
            return True
        text = self._buffer.lstrip()
        if not text:
            return self._is_only_space()
        place = self._place_of(self._close) if self._close else -1
        closed = place - len(self._buffer) + len(text) if place >= 0 else None
        end = self._head.end_in(text) if text.startswith("{") else None
        if end is None and closed is None and text.startswith("{"):
            return False
        if end is None:
            end = len(text) if closed is None else closed
        self._head = JsonSpan()
        self._whole_json(text[:end])
        self._buffer = text[end:]
        return True

    def _is_only_space(self) -> bool:
        """Turn too much white space at the place of a call into text; return whether it was too much."""
        if len(self._buffer) <= HEAD_LETTERS:
            return False
        self._no_call(self._buffer)
        self._buffer = ""
        return True

    def _whole_json(self, text: str) -> None:
        """Parse a complete call. Its fields may be in any order."""
        if (call := _call_in(text)) is None:
            self._no_call(text)
            return
        name, arguments = call
        self._begin(name)
        self._add(arguments)
        self._read = self._after_json

    def _json_arguments(self) -> bool:
        end = self._span.feed(self._buffer)
        self._add(self._numbers.push(self._buffer[:end]))
        self._buffer = "" if end is None else self._buffer[end:]
        if end is None:
            return False
        is_bare = self._calls == "mistral-args" and not self._is_list
        self._read, self._span, self._skips_space = (self._text if is_bare else self._json_tail), JsonSpan(1), True
        return True

    def _json_tail(self) -> bool:
        end = self._span.feed(self._buffer)
        self._buffer = "" if end is None else self._buffer[end:]
        if end is not None:
            self._read = self._after_json
        return end is not None

    def _after_json(self) -> bool:
        """Find the part after a call's JSON: its closing mark, another call, or text."""
        close = self._close
        text = self._buffer.lstrip() if close else self._buffer.lstrip(" \n\t,;")
        if not text or (close and close.startswith(text) and close != text):
            self._buffer = text
            return False
        self._skips_space, self._taken = True, ""
        if close:
            self._buffer, self._read = text.removeprefix(close), self._text
        elif text[0] == "{":
            self._buffer, self._read = text, self._json_head
        elif self._calls == "llama" and PYTHON_TAG.startswith(text[: len(PYTHON_TAG)]):
            if len(text) < len(PYTHON_TAG):
                return False
            self._buffer, self._read = text.removeprefix(PYTHON_TAG), self._json_head
        else:
            self._buffer = text.removeprefix("]") if self._calls != "llama" else text
            self._read = self._text
        return True

    def _mistral_head(self) -> bool:
        text = self._buffer.lstrip()
        if not text:
            return self._is_only_space()
        if text[0] in "[{":
            self._is_list = True
            self._buffer, self._read = text.removeprefix("["), self._json_head
            return True
        place = self._place_of("[ARGS]")
        if place < 0:
            return False
        name, rest = self._buffer[:place], self._buffer[place + len("[ARGS]") :]
        self._is_list = False
        self._begin(name.partition("[CALL_ID]")[0].strip())
        self._buffer, self._span, self._read = rest.lstrip(), JsonSpan(), self._json_arguments
        return True

    def _marked_call(self) -> bool:
        if not self._is_named and self._looked < HEAD_LETTERS:
            match = (_GEMMA_HEAD if self._calls == "gemma4" else _XML_HEAD).match(self._buffer, 0, HEAD_LETTERS)
            if match is not None:
                self._begin(match[1].strip())
                self._is_named = True
                self._name, self._buffer, self._looked = match[1].strip(), self._buffer[match.end() :], 0
        place = self._place_of(self._close)
        if place < 0:
            return False
        body, self._buffer = self._buffer[:place], self._buffer[place + len(self._close) :]
        self._end_marked(body, self._close)
        return True

    def _end_marked(self, body: str, close: str = "", *, is_cut: bool = False) -> None:
        if not self._is_named:
            self._no_call(body + close)
            return
        self._add(_arguments_in(body, self._calls, self._functions.get(self._name), is_cut=is_cut))
        self._read, self._skips_space = self._text, True


def _text_of(quoted: str) -> str | None:
    try:
        return str(json.loads(quoted, strict=False))
    except ValueError:
        return None


def _without_space(text: str) -> str:
    """Return the beginning of a text that may be emitted: white space at its end waits for the next text."""
    sure = text.rstrip()
    return sure if len(text) - len(sure) <= HEAD_LETTERS else text


def _new_id(calls: str | None) -> str:
    if calls in ("mistral", "mistral-args"):
        return "".join(secrets.choice(_LETTERS) for _ in range(MISTRAL_ID))
    return f"call_{secrets.token_hex(12)}"


def _call_in(text: str) -> tuple[str, str] | None:
    """Return the name and the arguments' JSON of a whole call as JSON, None if it is none."""
    try:
        call = read_json(text, strict=False)
        if not isinstance(call, dict):
            return None
        name, given = call["name"], call.get("arguments", call.get("parameters", {}))
        arguments = json.dumps(read_json(given) if isinstance(given, str) else given, ensure_ascii=False)
        return (name, arguments) if isinstance(name, str) and arguments[0] == "{" else None
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None


def _arguments_in(body: str, calls: str | None, parameters: Mapping[str, object] | None, *, is_cut: bool) -> str:
    """Return the arguments' JSON of a call between marks, or its beginning; as it was written where it is none: the client sees
    that."""
    try:
        if is_cut:
            return gemma_arguments_prefix(body) if calls == "gemma4" else tagged_arguments_prefix(body, parameters)
        arguments = gemma_arguments(body) if calls == "gemma4" else tagged_arguments(body, parameters)
        return json.dumps(arguments, ensure_ascii=False)
    except (ValueError, RecursionError):
        return body
