"""What does the server log: which lines, with which fields and ids, and how does it read a header line of a request?"""

from __future__ import annotations

import json
import logging
import os
import re
import sys
import time
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from contextvars import ContextVar
from datetime import datetime, timezone
from typing import Any, Protocol

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from trimtab.errors import RequestError
from trimtab.printable import printable

FORMATS = ("text", "json")
LEVELS = ("debug", "info", "warning", "error")
# A worker is a separate process: it reads its log format from these.
FORMAT_VARIABLE, LEVEL_VARIABLE = "TRIMTAB_LOG_FORMAT", "TRIMTAB_LOG_LEVEL"
HEADER = "x-request-id"
# A note that is no field of the line: the time when the request's body had been read, on the monotonic clock.
ARRIVED = "_arrived"
# Routes that monitoring and the page poll are logged only at debug level.
QUIET_PATHS = ("/health", "/ready", "/metrics", "/api/status")
_GIVEN = re.compile(rb"[A-Za-z0-9._-]{1,64}")
# The most characters of a client's field, of any other field, of a message, and of a traceback.
_CHOSEN_LETTERS, _METHOD_LETTERS = 200, 20
_FIELD_LETTERS, _MESSAGE_LETTERS, _TRACEBACK_LETTERS = 2_000, 8_000, 64_000

# Two readers could use two values of these: a second line is refused. Credentials, the host, and what defines the body.
ONCE = (
    "authorization", "x-api-key", "host", "content-length", "content-type", "content-encoding", "transfer-encoding", "origin",
    "access-control-request-method",
)  # fmt: skip
# A repeated one counts as absent, as in W3C Trace Context section 3.2 for `traceparent`.
LABELS = ("x-request-id", "traceparent")
# All lines are one list. RFC 9110 section 5.3.
LISTS = ("tracestate", "if-none-match", "access-control-request-headers")

# In ASGI's form: lower-case names, in the order of arrival.
Lines = Iterable[tuple[bytes, bytes]]

log = logging.getLogger("trimtab.serve.requests")
# Without a configured journal, the lines of requests are discarded.
log.addHandler(logging.NullHandler())
_log = logging.getLogger("trimtab.serve")
_id: ContextVar[str] = ContextVar("request_id", default="")
_notes: ContextVar[dict[str, Any] | None] = ContextVar("notes", default=None)


class Counts(Protocol):
    """The journal's interface to the metrics."""

    def responded(self, path: str, status: int) -> None: ...


class Spans(Protocol):
    """The journal's interface to `tracing.Spans`."""

    def request(
        self, headers: Iterable[tuple[bytes, bytes]], route: str, fields: Mapping[str, Any], *, start_ns: int, end_ns: int,
        arrived_ns: int | None = None,
    ) -> str: ...  # fmt: skip


def request_id() -> str:
    """Return the id of the current request, "" outside of one."""
    return _id.get()


def note(**fields: Any) -> None:
    """Add fields to the line of this request."""
    notes = _notes.get()
    if notes is not None:
        notes.update(fields)


def write_traceback(exc: BaseException, what: str) -> str:
    """Log an error with its traceback; return its id."""
    error_id = request_id() or uuid.uuid4().hex[:16]
    _log.error(what, exc_info=exc, extra={"fields": {"error_id": error_id}})
    return error_id


def drop_tracebacks(exc: BaseException) -> None:
    """Remove the tracebacks of a stored exception and of its causes, because their frames refer to a request's inputs."""
    seen: set[int] = set()
    left: list[BaseException | None] = [exc]
    while left:
        error = left.pop()
        if error is not None and id(error) not in seen:
            seen.add(id(error))
            error.__traceback__ = None
            left += (error.__cause__, error.__context__)


# Header lines ---------------------------------------------------------------------------------------------------------


def value_of(lines: Lines, name: str) -> bytes:
    """Return the value of a line of ONCE or LABELS, b"" without one. A repeated label has none."""
    assert name in ONCE or name in LABELS
    values = [value for known, value in lines if known == name.encode()]
    return values[0].strip() if len(values) == 1 else b""


def list_of(lines: Lines, name: str) -> bytes:
    """Return the lines of one of LISTS as one."""
    assert name in LISTS
    return b",".join(value.strip() for known, value in lines if known == name.encode())


# Streams --------------------------------------------------------------------------------------------------------------


class Unfailing:
    """A stream that drops text that cannot be written. Everything else is delegated to the stream. A log that cannot be written (a
    full disk, a closed reader) never ends the server."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        with suppress(OSError, ValueError):  # full, removed or closed
            self._stream.write(text)
        return len(text)

    def writelines(self, lines: Iterable[str]) -> None:
        for line in lines:
            self.write(line)

    def flush(self) -> None:
        with suppress(OSError, ValueError):
            self._stream.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def keep_streams() -> None:
    """From now on, no code in this process fails because its output or its log cannot be written."""
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:  # it was closed: a client's socket would get its file descriptor, and the output of libraries
            os.open(os.devnull, os.O_RDWR)
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:
            stream = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115 - as long as the process
        if not isinstance(stream, Unfailing):
            setattr(sys, name, Unfailing(stream))


# Formats of lines -----------------------------------------------------------------------------------------------------


def set_up(form: str = "text", level: str = "info") -> None:
    """Set the log format, here and in child processes. Errors: RequestError."""
    for name, value, known in (("log_format", form, FORMATS), ("log_level", level, LEVELS)):
        if value not in known:
            raise RequestError("is not known", field=name, value=value, allowed=known)
    os.environ[FORMAT_VARIABLE], os.environ[LEVEL_VARIABLE] = form, level
    set_up_as_parent()


def set_up_as_parent() -> None:
    """Use the log format of the parent process. Changes nothing if the parent has not set one."""
    form, level = os.environ.get(FORMAT_VARIABLE), os.environ.get(LEVEL_VARIABLE)
    if form not in FORMATS or level not in LEVELS:
        return
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonLines() if form == "json" else TextLines())
    handler.addFilter(_is_no_repetition)
    for name in ("trimtab", "uvicorn"):
        logger = logging.getLogger(name)
        logger.handlers[:] = [handler]
        logger.propagate = False
    logging.getLogger("trimtab").setLevel(level.upper())
    logging.getLogger("uvicorn").setLevel(logging.WARNING)


def _is_no_repetition(record: logging.LogRecord) -> bool:
    """Filters uvicorn's second copy, without an id, of errors that `Journal` has logged."""
    return not (record.name == "uvicorn.error" and record.getMessage().startswith("Exception in ASGI application"))


def _time(record: logging.LogRecord) -> str:
    at = datetime.fromtimestamp(record.created, timezone.utc)
    return at.strftime("%Y-%m-%dT%H:%M:%S.") + f"{at.microsecond // 1000:03d}Z"


def _fields(record: logging.LogRecord) -> Mapping[str, Any]:
    own = _cut(getattr(record, "fields", {}), _FIELD_LETTERS)
    return {"request_id": request_id(), **own} if request_id() else own


def _message(record: logging.LogRecord) -> str:
    return short(record.getMessage(), _MESSAGE_LETTERS)


def _traceback(formatter: logging.Formatter, record: logging.LogRecord) -> str:
    assert record.exc_info
    return short(formatter.formatException(record.exc_info), _TRACEBACK_LETTERS)  # type: ignore[arg-type]


def _cut(fields: Mapping[str, Any], most: int) -> dict[str, Any]:
    return {name: short(value, most) if isinstance(value, str) else value for name, value in fields.items()}


def short(text: str, most: int) -> str:
    """Return a text whole, or its two ends with the number of omitted characters between them."""
    if len(text) <= most:
        return text
    half = most // 2
    return f"{text[:half]}...({len(text) - 2 * half} letters)...{text[-half:]}"


class TextLines(logging.Formatter):
    """2026-01-31T12:00:00.123Z INFO ready models=gemma, without fields that are None; a traceback follows on separate
    lines.
    """

    def format(self, record: logging.LogRecord) -> str:
        fields = "".join(f" {name}={_word(value)}" for name, value in _fields(record).items() if value is not None)
        # A message is one line: quoted text may have line ends that look like log lines.
        line = f"{_time(record)} {record.levelname} {_line(_message(record))}{fields}"
        return f"{line}\n{printable(_traceback(self, record))}" if record.exc_info else line


class JsonLines(logging.Formatter):
    """{"time": ..., "level": "info", "message": ..., "request_id": ..., "traceback": ...}, one object per line."""

    def format(self, record: logging.LogRecord) -> str:
        entry: dict[str, Any] = {
            "time": _time(record), "level": record.levelname.lower(), "logger": record.name,
            "message": _message(record), **_fields(record),
        }  # fmt: skip
        if record.exc_info:
            entry["traceback"] = _traceback(self, record)
        return json.dumps(entry, default=str)


def _word(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.3f}"
    text = _line(str(value))
    return text if text and not re.search(r'[\s"=]', text) else json.dumps(text)


def _line(text: str) -> str:
    return "".join(char if char.isprintable() else "?" for char in text)


# Requests -------------------------------------------------------------------------------------------------------------


class Journal:
    """Gives each request its id, counts its status, and writes one line about it. paths: of all routes. spans: makes a trace of it.
    An answer with status 500 has the id of its traceback in the log (`error_id`). No line has a key, an address, a message or an
    answer.
    """

    def __init__(self, app: ASGIApp, counts: Counts, paths: Sequence[str] = (), spans: Spans | None = None) -> None:
        self._app, self._counts, self._name, self._spans = app, counts, named(paths), spans

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        header = value_of(scope["headers"], HEADER)
        known = header.decode("ascii") if _GIVEN.fullmatch(header) else uuid.uuid4().hex
        # Not reset at the end: an outer exception handler still belongs to this request.
        _id.set(known)
        _notes.set({})
        began, status = time.monotonic(), 500

        async def noted(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message = {**message, "headers": [*message.get("headers", ()), (HEADER.encode(), known.encode())]}
            await send(message)

        try:
            await self._app(scope, receive, noted)
        except Exception as exc:
            write_traceback(exc, "the server failed")
            raise
        finally:
            self._write(scope, status, time.monotonic() - began)

    def _write(self, scope: Scope, status: int, seconds: float) -> None:
        path = scope["path"]
        fields: dict[str, Any]
        self._counts.responded(self._name(path), status)
        level = logging.DEBUG if path in QUIET_PATHS or path.startswith("/page/") else logging.INFO
        level = logging.WARNING if status >= 500 and path not in QUIET_PATHS else level
        fields = {
            "method": scope["method"][:_METHOD_LETTERS], "path": path[:_CHOSEN_LETTERS], "status": status,
            "seconds": round(seconds, 4), **_cut(_notes.get() or {}, _CHOSEN_LETTERS),
        }  # fmt: skip
        arrived = fields.pop(ARRIVED, None)
        if self._spans is not None and level != logging.DEBUG:
            end_ns = time.time_ns()
            ago_ns = None if arrived is None else end_ns - int((time.monotonic() - arrived) * 1e9)
            values = {"request_id": request_id(), **fields}
            fields["trace_id"] = self._spans.request(
                scope["headers"], self._name(path), values, start_ns=end_ns - int(seconds * 1e9), end_ns=end_ns, arrived_ns=ago_ns
            )
        log.log(level, "request", extra={"fields": fields})


def named(paths: Sequence[str]) -> Callable[[str], str]:
    """Return the route of a path: clients choose paths, and a metric must not have a series for each path."""
    whole = {path for path in paths if "{" not in path}
    begun = sorted((path for path in paths if "{" in path), key=len, reverse=True)

    def name(path: str) -> str:
        if path in whole:
            return path
        return next((one for one in begun if path.startswith(one.partition("{")[0])), "other")

    return name
