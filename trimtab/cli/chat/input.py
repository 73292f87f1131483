"""Input lines of a chat: a terminal with editing, history and completion, or any stream of lines."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol, TextIO

from trimtab.cli.flags.output import print_text
from trimtab.errors import RequestError
from trimtab.process.user_cache import own_folder

HISTORY_LINES, HISTORY_FILE = 1000, "lines"
# A longer line is refused: it fits no context, and a terminal would redraw it for every key.
LONGEST_LINE = 1_000_000
QUOTES = '"""'


class Reader(Protocol):
    """Reads the user's next message. Errors: EOFError at the end, KeyboardInterrupt for Ctrl-C."""

    def __call__(self, prompt: str) -> str: ...


# (possible words, whether file paths are possible) for a line that is being typed.
Completions = Callable[[str], "tuple[list[str], bool]"]


def line_reader(stream: TextIO) -> Reader:
    """Return a reader of one message per line; triple quotes enclose a message of several lines."""

    def read(prompt: str) -> str:
        return _with_quotes(_line(stream), lambda: _line(stream))

    return read


def _with_quotes(text: str, next_line: Callable[[], str]) -> str:
    """Return a line, or all lines of a message that triple quotes enclose. Errors: RequestError for one that is too long, after
    its last line is read: none of its lines becomes another message."""
    if not text.lstrip().startswith(QUOTES):
        return text
    lines = [text.lstrip()[len(QUOTES) :]]
    length = len(lines[0])
    while QUOTES not in lines[-1]:  # each line is searched once
        line = next_line()
        length += 1 + len(line)
        if length > LONGEST_LINE:
            lines.clear()
        lines.append(line)
    if length > LONGEST_LINE:
        raise _too_long()
    return "\n".join(lines).replace(QUOTES, "", 1).strip("\n")


def _line(stream: TextIO) -> str:
    try:
        text = stream.readline(LONGEST_LINE + 1)
        text.encode()  # some locales decode invalid bytes to halves of surrogate pairs
    except UnicodeError as exc:
        raise RequestError("is not UTF-8 text", field="prompt") from exc
    if not text:
        raise EOFError
    if len(text) > LONGEST_LINE:
        while text and not text.endswith("\n"):
            text = stream.readline(LONGEST_LINE)
        raise _too_long()
    return text.rstrip("\r\n")


def terminal_reader(
    completions: Completions, *, keep_history: bool, has_color: bool = False, source: Any = None, output: Any = None
) -> Reader:  # fmt: skip
    """Return a reader that edits lines, with prompt_toolkit; without that package a plain one, with a note on stderr.

    Enter sends, Alt-Enter starts a line, triple quotes enclose several. has_color: of the prompt. source, output:
    prompt_toolkit's, for tests.
    """
    try:
        from prompt_toolkit import PromptSession
        from prompt_toolkit.completion import Completer, Completion, PathCompleter
        from prompt_toolkit.document import Document
        from prompt_toolkit.history import FileHistory, InMemoryHistory
        from prompt_toolkit.key_binding import KeyBindings
    except ImportError as exc:
        print_text(f"prompt_toolkit cannot be imported ({exc}): no editing, history or completion here", file=sys.stderr)
        return _plain_terminal

    keys = KeyBindings()

    @keys.add("escape", "enter")
    def _(event: Any) -> None:
        event.current_buffer.insert_text("\n")

    paths = PathCompleter(expanduser=True)

    class Words(Completer):
        def get_completions(self, document: Any, complete_event: Any) -> Iterator[Any]:
            line = document.text_before_cursor
            words, has_paths = completions(line)
            last = line.rpartition(" ")[2]
            for word in words:
                if word.startswith(last):
                    yield Completion(word, -len(last))
            if has_paths:
                yield from paths.get_completions(Document(last.rpartition("=")[2]), complete_event)

    history: Any = InMemoryHistory()
    if keep_history:
        with suppress(OSError):
            history = FileHistory(str(_history_file()))
    session: Any = PromptSession(
        history=history, completer=Words(), complete_while_typing=False, key_bindings=keys, input=source, output=output
    )

    def read(prompt: str) -> str:
        shown: Any = [("bold ansigreen", prompt)] if has_color else prompt
        text = _with_quotes(str(session.prompt(shown, prompt_continuation="  ")), lambda: str(session.prompt("  ")))
        if len(text) > LONGEST_LINE:
            raise _too_long()
        return text

    return read


def _too_long() -> RequestError:
    return RequestError(f"is longer than {LONGEST_LINE} characters", field="prompt")


def _plain_terminal(prompt: str) -> str:
    sys.stdout.write(prompt)
    sys.stdout.flush()
    return line_reader(sys.stdin)(prompt)


def _history_file() -> Path:
    """Return the user's history file, created if it is missing, shortened to its last lines. Errors: OSError."""
    path = own_folder("chat") / HISTORY_FILE
    path.touch(mode=0o600)
    entries = path.read_text(encoding="utf-8", errors="replace").split("\n# ")
    if len(entries) > HISTORY_LINES:
        path.write_text("\n# " + "\n# ".join(entries[-HISTORY_LINES:]), encoding="utf-8")
    return path
