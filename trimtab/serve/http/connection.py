"""Which limits does one client connection have, and which connection is closed at the connection limit?"""

from __future__ import annotations

import asyncio
import errno
import logging
import re
import socket
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

import h11
from h11._readers import ContentLengthReader
from starlette.types import Receive, Scope, Send
from uvicorn.protocols.http.flow_control import CLOSE_HEADER
from uvicorn.protocols.http.h11_impl import H11Protocol

from trimtab.serve.api.admission import OPEN_PATHS
from trimtab.serve.contract.errors import http_error
from trimtab.serve.contract.settings import Limits

HEAD_BYTES = 32 * 2**10
HEAD_LINES = 128
# Connections beyond the limit, for /health and /ready alone.
RESERVE = 16
# Seconds that a refused client may go on sending before it is cut off: without a limit it would hold its connection.
DRAIN_S = 10.0
# Each read is parsed at once, so it is not larger than this.
READ_BYTES = 64 * 2**10
# Chunks smaller than this on average cost more to parse than they carry.
CHUNK_BYTES, CHUNKS_FREE = 16, 512
# The most bytes of the line of a last chunk and the empty line after it.
LAST_BYTES = 256
SILENT_S = 60.0
# After this time an answer that its client does not read is closed for others.
UNREAD_S = 5.0
# A client that has closed its direction may have left: the pause between two looks at its connection, and the looks at which a
# probe is sent, then one each this many.
GONE_LOOK_S = 0.25
GONE_PROBES, GONE_PROBE_EVERY = (0, 4), 60
# The start of every answer. A client of HTTP/1.0 knows no interim answer: it receives a byte of this at each of these looks.
ANSWER_BEGINS = b"HTTP/1.1 "
GONE_PROBES_1_0 = (0, 4, *range(16, 16 * (len(ANSWER_BEGINS) - 1), 16))
# Behind the last byte the system asks the client's, this many seconds apart.
GONE_ASK_S = 4
VERSIONS = (b"1.0", b"1.1")
# Complete requests that may wait at one time behind the one that is answered. With more of them, the answer ends the connection.
# RFC 9112 section 9.3.2.
MOST_PIPELINED = 8
_BODY = re.compile(rb"\r\n(?:content-length:[ \t]*([0-9]{1,18})|transfer-encoding:[ \t]*(chunked))[ \t]*\r\n", re.IGNORECASE)
_LENGTHS = re.compile(rb"^content-length[ \t]*:([^\r\n]*)", re.IGNORECASE | re.MULTILINE)
# A request target in absolute form, its authority and what is behind it. RFC 9112 section 3.2.2, RFC 9110 section 4.2.4.
_ABSOLUTE = re.compile(rb"https?://([^/?#@]+)((?:[/?][^#]*)?)", re.IGNORECASE)
_SCHEME = re.compile(rb"[a-z][a-z0-9+.-]*://", re.IGNORECASE)
# h11's types of its events.
_READ = re.compile(r"bytearray\(b(['\"])(.*)\1\)|\bb(['\"])(.*?)\3")
_NO_FILES = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
# States of a connection, in the order in which they are closed at the limit.
WAITING = ("head", "drain", "idle", "unread", "body")
ANSWERED = "answer"

log = logging.getLogger("trimtab.serve")
# The answer has the client's mistake; uvicorn would also log a line for each.
_quiet = logging.getLogger("trimtab.serve.http.connection")
_quiet.setLevel(logging.ERROR)


class Guard:
    """Every open connection of a server. most: how many there may be, of those that are answered.

    At the limit the oldest connection without a complete request is closed: one that waits longest for its head, then an idle one,
    then one that sends its body. Where more send bodies than heads, the one that has sent longest goes first, because bodies that
    come a byte at a time would leave few places.
    """

    def __init__(self, limits: Limits, most: int) -> None:
        self.limits, self._most = limits, most
        self._stages: dict[str, dict[GuardedProtocol, None]] = {name: {} for name in (*WAITING, ANSWERED)}
        self._logged_at = float("-inf")

    def __len__(self) -> int:
        return sum(map(len, self._stages.values()))

    def enter(self, connection: GuardedProtocol) -> bool:
        """Count a connection in, closing another one if there is no room. False: it may use OPEN_PATHS alone, or is closed."""
        # If the closed connection was beyond the limit, its successor is too.
        has_room = len(self) < self._most or (self.make_room() and len(self) < self._most)
        if not has_room and len(self) >= self._most + RESERVE:
            connection.cut()
            return False
        self._stages["head"][connection] = None
        return has_room

    def move(self, connection: GuardedProtocol, old: str, new: str) -> None:
        if connection in self._stages[old]:
            del self._stages[old][connection]
            self._stages[new][connection] = None

    def leave(self, connection: GuardedProtocol) -> None:
        for stage in self._stages.values():
            stage.pop(connection, None)

    def make_room(self) -> bool:
        """Close the connection that has waited longest without a whole request, or a reader; False if there is none."""
        has_more_bodies = len(self._stages["body"]) > len(self._stages["head"])
        for name in ("body", *WAITING) if has_more_bodies else WAITING:
            oldest = next(iter(self._stages[name]), None)
            if oldest is not None:
                self.leave(oldest)
                oldest.cut()
                return True
        return False

    def on_loop_error(self, loop: asyncio.AbstractEventLoop, context: Mapping[str, Any]) -> None:
        """Handle asyncio's reports. Without a free file descriptor for a new connection an old one is closed, and the log has
        one line per minute; asyncio accepts again after a second."""
        exc = context.get("exception")
        if "_start_serving" in str(context.get("message")) and isinstance(exc, (OSError, ValueError)):
            return  # it wanted to accept again after the server had closed its socket
        if not (isinstance(exc, OSError) and exc.errno in _NO_FILES and "socket" in context):
            loop.default_exception_handler(dict(context))
            return
        self.make_room()
        if time.monotonic() - self._logged_at >= SILENT_S:
            self._logged_at = time.monotonic()
            log.error("no file descriptor for a new connection (%s); raise the limit (ulimit -n, LimitNOFILE)", exc.strerror)


class GuardedProtocol(H11Protocol):
    """uvicorn's connection. guard: where it is counted; the other arguments are uvicorn's. A client that closes its own direction
    after a whole request (half-close) gets its answer (RFC 9112 section 9.6)."""

    def __init__(self, *arguments: Any, guard: Guard, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.conn: StrictConnection = StrictConnection(h11.SERVER, HEAD_BYTES)
        self.logger = _quiet
        self._guard, self._limits = guard, guard.limits
        self._stage = self._place = "head"  # its state, and its place in the guard, where it may be "unread"
        self._timer: asyncio.TimerHandle | None = None
        self._reading_timer: asyncio.TimerHandle | None = None
        self._has_spoken = self._is_unread = self._is_half_closed = False
        self._gone_timer: asyncio.TimerHandle | None = None

    # Calls by asyncio -------------------------------------------------------------------------------------------------

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        if hasattr(transport, "max_size"):
            transport.max_size = READ_BYTES
        if not self._guard.enter(self):
            self.app = _reserved(self.app)
        self._set_deadline(self._limits.head_s)

    def data_received(self, data: bytes) -> None:
        if self.transport.is_closing():
            return
        self._has_spoken = True
        if self._stage == "drain" and self.conn.skip(len(data)):
            return
        super().data_received(data)
        self._end_if_many_wait()
        self._look()

    def eof_received(self) -> bool:  # type: ignore[override] # uvicorn's never keeps it open
        """The client sends nothing more: it has left, or waits for its answer. Returns whether the connection stays open."""
        if self.transport.is_closing() or self._stage_now() != ANSWERED:
            return False
        if not self._is_half_closed:
            self._is_half_closed = True
            self._end_with_answer()
            self._look_whether_gone(0)
        return True

    def connection_lost(self, exc: Exception | None) -> None:
        self._set_deadline(None)
        if self._gone_timer is not None:
            self._gone_timer.cancel()
        self._stop_waiting_for_a_reader()
        self._guard.leave(self)
        super().connection_lost(exc)
        self._unset_keepalive_if_required()

    def pause_writing(self) -> None:
        """The client reads more slowly than it is written to: an answer that is not read ends after `send_s`."""
        super().pause_writing()
        self._stop_waiting_for_a_reader()
        self._reading_timer = self.loop.call_later(min(UNREAD_S, self._limits.send_s), self._on_unread)

    def resume_writing(self) -> None:
        super().resume_writing()
        self._stop_waiting_for_a_reader()
        if self._is_unread:
            self._is_unread = False
            self._look()

    def _on_unread(self) -> None:
        left_s = self._limits.send_s - UNREAD_S
        if left_s <= 0:
            self._cut_unread()
            return
        self._reading_timer = self.loop.call_later(left_s, self._cut_unread)
        self._is_unread = True
        self._look()

    def _stop_waiting_for_a_reader(self) -> None:
        if self._reading_timer is not None:
            self._reading_timer.cancel()
            self._reading_timer = None

    # Calls by uvicorn -------------------------------------------------------------------------------------------------

    def on_response_complete(self) -> None:
        if self.transport.is_closing():  # the client or this answer ends the connection
            self._guard.move(self, self._place, "drain")
            self._stage = self._place = "drain"
            self._cut_later(self._limits.send_s)  # unread bytes are still in transit
        super().on_response_complete()
        self._end_if_many_wait()
        self._look()
        if self._is_half_closed and not self.transport.is_closing() and self._stage_now() != ANSWERED:
            self._abandon()  # half of a request may have come behind the one that was answered
            self.transport.close()
            self._cut_later(self._limits.send_s)

    def _end_if_many_wait(self) -> None:
        """Make the next answer the last one of this connection, and let it say so, if too many requests wait behind it."""
        if self.cycle is None or self.cycle.response_started or self.conn.their_state is not h11.DONE:
            return
        if self.conn.waiting_requests() > MOST_PIPELINED:
            self._end_with_answer()

    def _end_with_answer(self) -> None:
        if self.cycle.response_started or CLOSE_HEADER in self.cycle.default_headers:
            return
        if not (self._is_half_closed and self.conn.has_data):  # requests that came before the end are answered too
            self.cycle.default_headers = [*self.cycle.default_headers, CLOSE_HEADER]

    def timeout_keep_alive_handler(self) -> None:
        super().timeout_keep_alive_handler()
        self._cut_later(self._limits.send_s)  # unread bytes are still in transit

    def send_400_response(self, msg: str) -> None:
        problem = self.conn.problem
        words = _READ.sub(lambda read: read[2] or read[4] or "", str(problem or msg))
        self._refuse(problem.error_status_hint if problem else 400, words)

    def _look_whether_gone(self, look: int) -> None:
        """Find out whether a client that has closed its direction has left: its system then answers the bytes with a reset.

        The probe changes nothing of the answer: `100 Continue`, which a client of HTTP/1.1 passes over, a comment in a stream,
        or the first bytes of the answer to a client of HTTP/1.0. Behind the last of these its system is asked (`ask_often`).
        """
        self._gone_timer = None
        if self.cycle is None or self.cycle.response_complete or self.transport.is_closing():
            return
        socket_here = self.transport.get_extra_info("socket")
        if socket_here is not None and socket_here.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
            self.cut()
            return
        is_early = self.conn.our_state is h11.SEND_RESPONSE
        if is_early and self.conn.their_http_version != b"1.1":
            if look in GONE_PROBES_1_0:
                self.transport.write(self.conn.first_byte())
                if look == GONE_PROBES_1_0[-1] and socket_here is not None:
                    ask_often(socket_here)
        elif (look in GONE_PROBES or not look % GONE_PROBE_EVERY) and not self.flow.write_paused:
            if is_early:
                event = h11.InformationalResponse(status_code=100, headers=[], reason=b"Continue")
                self.transport.write(self.conn.send(event) or b"")
            elif self.conn.our_state is h11.SEND_BODY and self.conn.is_event_stream:
                self.transport.write(self.conn.send(h11.Data(data=b":\n\n")) or b"")
        self._gone_timer = self.loop.call_later(GONE_LOOK_S, self._look_whether_gone, look + 1)

    # Deadlines --------------------------------------------------------------------------------------------------------

    def _look(self) -> None:
        """Record the state of this connection and its deadline. An unread answer moves no deadline of data that the client has to
        send; a connection is idle only once its answer has been read."""
        now = self._stage_now()
        place = "unread" if self._is_unread else now
        if (now, place) == (self._stage, self._place) or self.transport.is_closing():
            return
        self._guard.move(self, self._place, place)
        is_new, self._stage, self._place = now != self._stage, now, place
        limits = self._limits
        times = {"head": limits.head_s, "body": limits.body_s, "drain": DRAIN_S}
        if now == "idle":
            self._set_deadline(None if self._is_unread else limits.idle_s)
        elif is_new:
            self._set_deadline(times.get(now))

    def _stage_now(self) -> str:
        is_answered = self.cycle is not None and self.cycle.response_complete
        if self.conn.their_state is h11.IDLE:
            return "head" if self.cycle is None or self.conn.has_data else "idle"
        if self.conn.their_state is h11.SEND_BODY:
            return "drain" if is_answered else "body"
        return "idle" if is_answered else ANSWERED

    def _set_deadline(self, after_s: float | None) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = None if after_s is None else self.loop.call_later(after_s, self._on_late)

    def _on_late(self) -> None:
        if not self._has_spoken:
            self.cut()
        elif self._stage == "drain":
            _tell("the client was still sending a request that was already answered", None, DRAIN_S)
            self.cut()
        elif self._stage == "idle":
            self.timeout_keep_alive_handler()
        elif not self.transport.is_closing():
            limit = f"{self._stage}_s"
            limit_s = getattr(self._limits, limit)
            _tell(f"the request's {self._stage} was not complete", limit, limit_s)
            self._refuse(408, f"The request's {self._stage} was not complete after {limit_s:g} seconds ({limit})")

    def _cut_unread(self) -> None:
        _tell("the client did not read its answer", "send_s", self._limits.send_s)
        self.cut()

    # Ends -------------------------------------------------------------------------------------------------------------

    def _refuse(self, status: int, message: str) -> None:
        """Answer that a request cannot be read, and close."""
        if self.conn.our_state not in (h11.IDLE, h11.SEND_RESPONSE):
            self.cut()
            return
        answer = http_error(status, message, code=_CODES.get(status, "bad_request"), headers={"connection": "close"})
        head = h11.Response(status_code=status, headers=answer.raw_headers, reason=b"")
        for event in (head, h11.Data(data=bytes(answer.body)), h11.EndOfMessage()):
            self.transport.write(self.conn.send(event) or b"")
        self._abandon()
        self.transport.close()
        self._cut_later(DRAIN_S)

    def cut(self) -> None:
        """End this connection now; unsent bytes are lost."""
        self._abandon()
        self.transport.abort()

    def _abandon(self) -> None:
        if self.cycle is not None and not self.cycle.response_complete:
            self.cycle.disconnected = True
            self.cycle.message_event.set()

    def _cut_later(self, after_s: float) -> None:
        self._set_deadline(None)
        self._timer = self.loop.call_later(after_s, self.transport.abort)


def _tell(why: str, limit: str | None, after_s: float) -> None:
    """Write to the log which deadline ended a connection: its request has a line that says only that the client is gone. limit: the
    field of `Limits`. Anyone can send heads, and requests that are answered before they are complete (401): these are for debugging
    alone."""
    level = logging.DEBUG if limit in (None, "head_s") else logging.INFO
    log.log(level, "a connection was ended: %s", why, extra={"fields": {"limit": limit, "after_s": after_s}})


_CODES = {408: "too_slow", 431: "head_too_large", 501: "not_implemented", 505: "http_version"}


def _reserved(app: Callable[..., Any]) -> Any:
    """Return an app that answers OPEN_PATHS alone, for connections beyond the limit."""

    async def answer(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["path"] in OPEN_PATHS:
            await app(scope, receive, send)
            return
        words = "This server has reached its limit of connections"
        headers = {"retry-after": "1", "connection": "close"}
        refused = http_error(503, words, kind="server_error", code="connections_full", headers=headers)
        await refused(scope, receive, send)

    return answer


def ask_often(connected: Any) -> None:
    """Have the system ask that of a client every few seconds whether it knows this connection: once it does not, the socket has an
    error. Systems that name no interval ask after two hours."""
    with suppress(OSError):
        connected.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name in ("TCP_KEEPIDLE", "TCP_KEEPALIVE", "TCP_KEEPINTVL"):
            if hasattr(socket, name):
                connected.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), GONE_ASK_S)


class StrictConnection(h11.Connection):
    """h11 that refuses requests which two servers in a row could read differently. problem: the text of the last refusal.

    Refused: other versions than HTTP/1.0 and 1.1 (there is no 1.2, and its sender may mean framing that is not supported here),
    Content-Length twice or together with Transfer-Encoding, Transfer-Encoding in HTTP/1.0, lines that end in LF alone,
    fields after a chunked body. Refused for their cost: heads with too many lines, bodies with too many tiny chunks. Source:
    RFC 9112 sections 2.2, 6.1, 6.3, 7.1, 11.2.
    """

    problem: h11.RemoteProtocolError | None = None
    is_event_stream = False
    _is_chunked = False
    _chunks = _chunk_bytes = 0
    _sent_bytes = 0  # of ANSWER_BEGINS, before the answer

    @property
    def has_data(self) -> bool:
        return len(self._receive_buffer) > 0

    def waiting_requests(self) -> int:
        """Return how many complete requests have been read and not parsed, at most one more than may wait. Only valid between
        two requests."""
        data, position, count = self._receive_buffer._data, 0, 0
        while count <= MOST_PIPELINED and (position := _end_of_request(data, position)) >= 0:
            count += 1
        return count

    def skip(self, count: int) -> bool:
        """Count bytes of a body that the app does not read. Returns False if they have to be parsed."""
        body = self._reader
        if not isinstance(body, ContentLengthReader) or self._receive_buffer or body._remaining <= count:
            return False
        body._remaining -= count
        return True

    def send(self, event: Any) -> bytes | None:  # type: ignore[override]
        if type(event) is h11.Response:
            kinds = [value for name, value in event.headers if name == b"content-type"]
            self.is_event_stream = any(kind.startswith(b"text/event-stream") for kind in kinds)
            if (b"connection", b"close") in event.headers:  # a stream's own header says the contrary
                lines = [line for line in event.headers if line != (b"connection", b"keep-alive")]
                event = h11.Response(status_code=event.status_code, headers=lines, reason=event.reason)
            data, sent_bytes, self._sent_bytes = super().send(event) or b"", self._sent_bytes, 0
            assert data.startswith(ANSWER_BEGINS)
            return data[sent_bytes:]
        return super().send(event)

    def first_byte(self) -> bytes:
        """Return the next byte of ANSWER_BEGINS, b"" behind the last; the answer's head follows without it."""
        byte = ANSWER_BEGINS[self._sent_bytes : self._sent_bytes + 1]
        self._sent_bytes += len(byte)
        return byte

    def next_event(self) -> Any:
        try:
            return self._next_event()
        except h11.RemoteProtocolError as exc:
            self.problem = exc
            raise

    def _next_event(self) -> Any:
        is_head = self.their_state is h11.IDLE
        is_chunk = self.their_state is h11.SEND_BODY and self._is_chunked
        size = len(self._receive_buffer)
        # At the end of a chunked body only its last line and an empty one are read.
        before = b""
        if is_head:
            before = self.trailing_data[0]
        elif is_chunk:
            before = bytes(self._receive_buffer._data[:LAST_BYTES])
        if is_head:
            head = before.partition(b"\r\n\r\n")[0]
            if len(head) > HEAD_BYTES or head.count(b"\n") > HEAD_LINES:
                raise self._error(f"The head has more than {HEAD_BYTES} bytes or {HEAD_LINES} lines", 431)
        event = super().next_event()
        read = before[: size - len(self._receive_buffer)]
        if type(event) is h11.Request:
            self._check_head(event, read)
            event = self._in_origin_form(event)
        elif type(event) is h11.Data and self._is_chunked:
            self._count_chunk(event)
        elif type(event) is h11.EndOfMessage and is_chunk:
            # The first LF may be the second half of the line end after a chunk.
            if event.headers or read == b"\n" or _has_bare_lf(read.removeprefix(b"\n")):
                raise self._error("Fields after a body, and lines that end in LF alone, are not read")
        return event

    def _check_head(self, event: h11.Request, head: bytes) -> None:
        if event.http_version not in VERSIONS:
            raise self._error("Only HTTP/1.1 and HTTP/1.0 are spoken here", 505)
        names = {name for name, _ in event.headers}
        self._is_chunked, self._chunks, self._chunk_bytes = b"transfer-encoding" in names, 0, 0
        if _has_bare_lf(head):
            raise self._error("A line of the head ends in LF without CR")
        # h11 takes lengths that are equal as one.
        lengths = _LENGTHS.findall(head)
        if len(lengths) > 1 or (lengths and b"," in lengths[0]):
            raise self._error("Content-Length is given more than once")
        if self._is_chunked and (b"content-length" in names or event.http_version != b"1.1"):
            raise self._error("Transfer-Encoding needs HTTP/1.1 and no Content-Length")

    def _in_origin_form(self, event: h11.Request) -> h11.Request:
        """Return a request whose target is a whole address as one to its path, with its host in place of the header's."""
        if not _SCHEME.match(event.target):
            return event
        parts = _ABSOLUTE.fullmatch(event.target)
        if parts is None:
            raise self._error("The request target is no path and no address of http or https")
        authority, target = parts[1], parts[2] if parts[2].startswith(b"/") else b"/" + parts[2]
        others = [line for line in event.headers if line[0] != b"host"]
        return h11.Request(
            method=event.method, target=target, headers=[(b"host", authority), *others], http_version=event.http_version
        )

    def _count_chunk(self, event: h11.Data) -> None:
        self._chunks += event.chunk_start
        self._chunk_bytes += len(event.data)
        if self._chunks > CHUNKS_FREE and self._chunk_bytes < CHUNK_BYTES * self._chunks:
            raise self._error("The chunks of the body are too small")

    def _error(self, words: str, status: int = 400) -> h11.RemoteProtocolError:
        self._process_error(self.their_role)
        return h11.RemoteProtocolError(words, error_status_hint=status)


def _has_bare_lf(data: bytes) -> bool:
    return data.count(b"\n") != data.count(b"\r\n")


def _end_of_request(data: bytearray, start: int) -> int:
    """Return where the request that begins at `start` ends, -1 if it is not complete. It is not checked: parsing does that."""
    end = data.find(b"\r\n\r\n", start)
    if end < 0:
        return -1
    body = _BODY.search(data, start, end + 2)
    if body is None:
        return end + 4
    if body[2]:
        last = data.find(b"\r\n0\r\n\r\n", end + 2)
        return -1 if last < 0 else last + 7
    end += 4 + int(body[1])
    return end if end <= len(data) else -1
