"""How are the files of `trimtab run --prompts` read and written: one prompt per input line, one answer per output line?"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import sys
from codecs import BOM_UTF8
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import trimtab
from trimtab.adapter_names import is_mix
from trimtab.checkpoint.names import near_names
from trimtab.checkpoint.unreadable import path_hint, request_refusal
from trimtab.errors import RequestError
from trimtab.process.files import lock, write_whole
from trimtab.process.json_file import JsonError, parse
from trimtab.request import GenerateRequest

LONGEST_LINE_BYTES, MOST_LINES = 4 * 2**20, 1_000_000
FIELDS = ("id", "prompt", "messages", "image", "audio", "system", "adapter")
# Keys of other tools in a prompt line.
UNUSED = ("expected", "answers", "kind", "metadata")
# The first bytes of every file of answers.
BEGUN = b'{"trimtab": '
OPTIONS = tuple(item.name for item in fields(GenerateRequest))
_TOKEN = re.compile(r"0|[1-9][0-9]{0,8}")


@dataclass(frozen=True)
class PromptLine:
    """One line. number: from 1 on. digest: of its bytes. request: for `LoadedModel.batch`, or its error. A line has `prompt` (or
    `messages`), and optionally `id`, `image`, `audio` (relative to the file), `system`, `adapter`, and sampling options."""

    number: int
    digest: str
    id: Any
    request: Mapping[str, Any] | RequestError

    @property
    def images(self) -> int:
        """The number of its images, except those in messages."""
        return 0 if isinstance(self.request, RequestError) else len(self.request.get("image", ()))


def read_prompts(path: str) -> Iterator[PromptLine]:
    """Yield the prompts of a file; empty lines are skipped, an invalid line has its error.

    Errors: RequestError if the file cannot be read, has a line that is too long, or too many of them.
    """
    folder = Path(path).absolute().parent
    try:
        with Path(path).open("rb") as file:
            number = 0
            while line := file.readline(LONGEST_LINE_BYTES + 1):
                number += 1
                if number > MOST_LINES:
                    raise RequestError(f"has more than {MOST_LINES} lines", field="--prompts", value=path)
                if len(line) > LONGEST_LINE_BYTES:
                    raise RequestError(f"line {number} has more than {LONGEST_LINE_BYTES} bytes", field="--prompts", value=path)
                if line.strip():
                    yield _read_line(number, line.strip(), folder)
    except OSError as exc:
        raise request_refusal("--prompts", path, exc) from exc


def _read_line(number: int, line: bytes, folder: Path) -> PromptLine:
    digest, name = hashlib.sha256(line).hexdigest()[:16], f"line {number}"
    try:
        values = parse(line.removeprefix(BOM_UTF8), "prompt")
    except JsonError as exc:
        return PromptLine(number, digest, None, RequestError(str(exc), field=name))
    if not isinstance(values, dict):
        return PromptLine(number, digest, None, RequestError("is not a JSON object", field=name))
    try:
        return PromptLine(number, digest, values.get("id"), _request(values, name, folder))
    except RequestError as exc:
        return PromptLine(number, digest, values.get("id"), exc)


def _request(values: Mapping[str, Any], name: str, folder: Path) -> dict[str, Any]:
    known = (*FIELDS, *OPTIONS)
    for key in values:
        if key not in (*FIELDS, *UNUSED, *OPTIONS):
            raise RequestError("unknown key", field=f"{name}: {key}", allowed=known, near=near_names(key, known))
    if ("prompt" in values) == ("messages" in values):
        raise RequestError("must have either a prompt or messages", field=name)
    request = {key: values[key] for key in (*OPTIONS, "system") if values.get(key) is not None}
    if "adapter" in values:
        request["adapter"] = values["adapter"]  # null is the base, even with --use
    request["prompt"] = values["prompt"] if "prompt" in values else values["messages"]
    if "stop" in request:
        request["stop"] = tuple(request["stop"]) if isinstance(request["stop"], list) else request["stop"]
    if isinstance(bias := request.get("logit_bias"), dict):  # the keys of a JSON object are texts
        request["logit_bias"] = {int(token) if _TOKEN.fullmatch(token) else token: value for token, value in bias.items()}
    for kind in ("image", "audio"):
        value = values.get(kind)
        files = [value] if isinstance(value, str) else value or []
        if not isinstance(files, list) or not all(isinstance(file, str) and file for file in files):
            raise RequestError("must be a file or a list of files", field=f"{name}: {kind}")
        if files:
            request[kind] = [str(folder / file) for file in files]
    return request


class Doubts:
    """What is wrong with the lines of a file, as far as it is known without a model. Lines are kept by their adapter alone."""

    def __init__(self) -> None:
        self._count = 0
        self._first: tuple[int, RequestError] | None = None
        self._adapters: dict[str, tuple[int, int]] = {}  # name -> (its lines, the first one's number)

    def add(self, line: PromptLine) -> None:
        """Count a line that is wrong, or note which adapter it names."""
        problem = line.request if isinstance(line.request, RequestError) else _missing_file(line)
        if problem is not None:
            self._count += 1
            self._first = self._first or (line.number, problem)
            return
        assert not isinstance(line.request, RequestError)
        name = line.request.get("adapter")
        if isinstance(name, str) and not is_mix(name):
            lines, number = self._adapters.get(name, (0, line.number))
            self._adapters[name] = lines + 1, number

    def with_adapters(self, names: Collection[str]) -> tuple[int, RequestError | None]:
        """Return how many lines are wrong where these adapters are given, and what is wrong with the first."""
        count, found = self._count, [] if self._first is None else [self._first]
        for name, (lines, number) in self._adapters.items():
            if name not in (*names, "base"):
                count += lines
                near = near_names(name, names)
                reason = f"no adapter of the name {name!r} is given"
                error = RequestError(reason, field=f"line {number}", allowed=tuple(names), near=near)
                found.append((number, error))
        return count, min(found, key=lambda one: one[0])[1] if found else None


def _missing_file(line: PromptLine) -> RequestError | None:
    assert not isinstance(line.request, RequestError)
    for kind in ("image", "audio"):
        for path in line.request.get(kind, ()):
            if not os.path.isfile(path):
                reason, hint = f"there is no {kind} file {path}", path_hint(path)
                return RequestError(reason, field=f"line {line.number}", hint=hint)
    return None


def check_answers_file(path: str) -> None:
    """Raise RequestError for a folder, and for a file that no run wrote, before anything is loaded."""
    try:
        with Path(path).open("rb") as file:
            begun = file.read(len(BEGUN))
    except FileNotFoundError:
        return
    except OSError as exc:
        raise RequestError(f"cannot be written ({exc.strerror})", field="--out", value=path) from exc
    if begun != BEGUN[: len(begun)]:
        raise _foreign(path, 1)


def _foreign(path: str, count: int) -> RequestError:
    return RequestError(f"line {count} was not written by trimtab run", field="--out", value=path, hint="Give another file")


class AnswersFile:
    """The file of answers. header: the options of the run that can change an answer. done: number -> digest of an answered prompt.
    The first line has the model, the adapters and the options, with their hash: a run resumes only if they are the same. Every
    other line is one answer or one error, with the number of its prompt and a hash of its line; the next run tries errors again."""

    def __init__(self, path: str, header: Mapping[str, Any]) -> None:
        self.path, self.done = Path(path), dict[int, str]()
        text = json.dumps(header, sort_keys=True, default=str)
        self._header = {
            "trimtab": trimtab.__version__, "options_sha256": hashlib.sha256(text.encode()).hexdigest(), **json.loads(text),
        }  # fmt: skip
        self._handle: int | None = None

    def open(self) -> None:
        """Open the file, new or existing, and read its answers. Errors, and an incomplete line after a kill, are
        removed.

        Errors: RequestError if it is another run's, another kind of file, or locked by another process.
        """
        try:
            self._handle = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
            self._lock()
            with os.fdopen(os.dup(self._handle), "rb") as file:
                whole, errors = self._read(file)
            os.truncate(self._handle, whole)
            if errors:
                self._remove_errors()
        except OSError as exc:
            raise RequestError(f"cannot be written ({exc.strerror})", field="--out", value=str(self.path)) from exc
        if not whole:
            self._write(self._header)

    def _lock(self) -> None:
        assert self._handle is not None
        try:
            lock(self._handle)
            if os.fstat(self._handle).st_ino != self.path.stat().st_ino:  # replaced since it was opened
                raise BlockingIOError
        except (BlockingIOError, PermissionError) as exc:
            raise RequestError("another process is writing it", field="--out", value=str(self.path)) from exc

    def _remove_errors(self) -> None:
        """Replace the file with one without its errors, which another process cannot open in between. Errors: OSError."""
        assert self._handle is not None
        before, is_windows = self._handle, sys.platform == "win32"
        if is_windows:
            os.close(before)  # an open file cannot be replaced there
        write_whole(Path(os.path.realpath(self.path)), self._write_answers, field="--out")
        self._handle = os.open(self.path, os.O_RDWR | os.O_APPEND)
        self._lock()
        if not is_windows:
            os.close(before)  # only now: the old file stays locked until it is replaced

    def _write_answers(self, sibling: Path) -> None:
        with self.path.open("rb") as old, sibling.open("wb") as new:
            shutil.copymode(self.path, sibling)
            for count, line in enumerate(old, 1):
                if "error" not in self._values(line, count):
                    new.write(line)
            new.flush()
            os.fsync(new.fileno())

    def _read(self, file: Any) -> tuple[int, int]:
        """Read the answers. Returns the bytes of complete lines, and the number of errors among them."""
        whole = errors = 0
        file.seek(0)
        for count, line in enumerate(file):
            if not line.endswith(b"\n"):
                if count == 0 and line[: len(BEGUN)] != BEGUN[: len(line)]:  # a kill leaves an incomplete line
                    raise self._foreign(1)
                break
            values = self._values(line, count + 1)
            if count == 0:
                self._check_header(values)
            elif "error" in values:
                errors += 1
            else:
                self.done[values["line"]] = values["prompt_sha256"]
            whole += len(line)
        return whole, errors

    def _values(self, line: bytes, count: int) -> dict[str, Any]:
        try:
            values = parse(line, "answer")
            if count > 1:
                _ = values["line"], values["prompt_sha256"]
        except (JsonError, TypeError, KeyError) as exc:
            raise self._foreign(max(count, 1)) from exc
        return dict(values)

    def _foreign(self, count: int) -> RequestError:
        return _foreign(str(self.path), count)

    def _check_header(self, values: Mapping[str, Any]) -> None:
        if values.get("options_sha256") == self._header["options_sha256"]:
            return
        if "options_sha256" not in values:
            raise self._foreign(1)
        known = [key for key in {**self._header, **values} if key not in ("trimtab", "options_sha256")]
        changed = [key for key in known if values.get(key) != self._header.get(key)]
        raise RequestError(
            f"holds answers of another run ({', '.join(changed)} differ)", field="--out", value=str(self.path),
            hint="Give the same model, adapters and options, or another file",
        )  # fmt: skip

    def check(self, line: PromptLine) -> bool:
        """Return whether a prompt is answered. Errors: RequestError if another prompt was on its line."""
        digest = self.done.get(line.number)
        if digest is not None and digest != line.digest:
            raise RequestError(
                f"line {line.number} of the prompts has changed since it was answered", field="--out",
                value=str(self.path), hint="Give another file",
            )  # fmt: skip
        return digest is not None

    def add(self, line: PromptLine, values: Mapping[str, Any]) -> None:
        """Write one answer or error as one complete line. Errors: RequestError, for example if the disk is full."""
        about = {"line": line.number, "prompt_sha256": line.digest, **({} if line.id is None else {"id": line.id})}
        self._write({**about, **values})
        if "error" not in values:
            self.done[line.number] = line.digest

    def _write(self, values: Mapping[str, Any]) -> None:
        assert self._handle is not None
        data = (json.dumps(values, ensure_ascii=False, default=str) + "\n").encode("utf-8", "replace")
        whole_bytes = os.fstat(self._handle).st_size
        try:
            while data:
                data = data[os.write(self._handle, data) :]
        except OSError as exc:
            os.ftruncate(self._handle, whole_bytes)  # an incomplete line is no answer
            raise RequestError(f"cannot be written ({exc.strerror})", field="--out", value=str(self.path)) from exc

    def close(self) -> None:
        if self._handle is not None:
            os.close(self._handle)
            self._handle = None
