"""Which deadline ends a connection, and what the log says of it: on a clock of the test's own, without sockets."""

import errno
import json
import logging
import socket
import types
from contextlib import suppress

import pytest
import uvicorn
from uvicorn.server import ServerState

from trimtab.serve.contract.settings import Limits
from trimtab.serve.http.connection import DRAIN_S, UNREAD_S, Guard, GuardedProtocol, ask_often

LIMITS = Limits(head_s=20.0, body_s=30.0, idle_s=40.0, send_s=100.0)
HEAD = b"POST / HTTP/1.1\r\nHost: localhost\r\nContent-Length: 99\r\n\r\n"
GET = b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n"


class Timer:
    def __init__(self, at, call):
        self.at, self.call = at, call

    def cancel(self):
        self.call = None


@types.coroutine
def client():
    """Wait for a client that sends nothing more."""
    yield


class Task:
    """A request that runs until it waits for the client."""

    def __init__(self, coroutine):
        self.coroutine = coroutine
        with suppress(StopIteration):
            coroutine.send(None)

    def add_done_callback(self, call):
        pass


class Loop:
    def __init__(self):
        self.now, self.timers = 0.0, []

    def call_later(self, after_s, call, *arguments):
        self.timers.append(Timer(self.now + after_s, lambda: call(*arguments)))
        return self.timers[-1]

    def create_task(self, coroutine, **options):
        self.task = Task(coroutine)
        return self.task

    def advance(self, by_s):
        end = self.now + by_s
        while due := [timer for timer in self.timers if timer.call is not None and timer.at <= end]:
            timer = min(due, key=lambda timer: timer.at)
            self.now, call, timer.call = timer.at, timer.call, None
            call()
        self.now = end


class Transport:
    def __init__(self):
        self.written, self.was_aborted, self.was_closed, self.options = b"", False, False, {}

    def write(self, data):
        self.written += data
        self.was_reset |= self.has_left and bool(data)

    def abort(self):
        self.was_aborted = True

    def close(self):
        self.was_closed = True

    def is_closing(self):
        return self.was_closed or self.was_aborted

    has_left = was_reset = False

    def get_extra_info(self, name):
        return self if name == "socket" else None

    def getsockname(self):
        return ("127.0.0.1", 1)

    getpeername = getsockname

    def getsockopt(self, level, option):
        """The system of a client that has left answers what is sent with a reset."""
        return errno.ECONNRESET if self.was_reset else 0

    def setsockopt(self, level, option, value):
        self.options[option] = value

    def pause_reading(self):
        pass

    resume_reading = pause_reading


class Connection:
    """A connection on a clock. answer: whether requests are answered at once, without their body."""

    def __init__(self, *, answer, app=None):
        async def answered(scope, receive, send):
            if not answer:
                await client()
            await send({"type": "http.response.start", "status": 400, "headers": [(b"content-length", b"2")]})
            await send({"type": "http.response.body", "body": b"no"})

        self.loop, self.transport, self.guard = Loop(), Transport(), Guard(LIMITS, most=4)
        config = uvicorn.Config(app or answered, log_config=None, timeout_keep_alive=1000, lifespan="off", interface="asgi3")
        self.protocol = GuardedProtocol(config, ServerState(), {}, self.loop, guard=self.guard)
        self.protocol.connection_made(self.transport)

    def place(self):
        return next(name for name, held in self.guard._stages.items() if self.protocol in held)

    def leave_unread(self):
        self.protocol.pause_writing()
        self.loop.advance(UNREAD_S)
        assert self.place() == "unread"


@pytest.fixture
def logged(caplog):
    """Return the level, the message and the fields of what the server's log says. What uvicorn writes while Python collects the
    connections of tests before is not part of it."""
    caplog.set_level(logging.DEBUG, "trimtab.serve")
    return lambda: [(one.levelname, one.getMessage(), one.fields) for one in caplog.records if one.name == "trimtab.serve"]


def test_an_unread_answer_does_not_move_the_deadline_of_a_request_that_is_still_sent(logged):
    one = Connection(answer=True)
    one.protocol.data_received(HEAD + b"{")
    assert one.place() == "drain" and b"400" in one.transport.written
    one.leave_unread()
    one.loop.advance(DRAIN_S - UNREAD_S - 1)
    one.protocol.resume_writing()
    assert one.place() == "drain" and not one.transport.was_aborted
    one.loop.advance(1)
    assert one.transport.was_aborted
    words = "a connection was ended: the client was still sending a request that was already answered"
    assert logged() == [("DEBUG", words, {"limit": None, "after_s": DRAIN_S})]


def test_a_body_that_does_not_come_while_an_answer_is_unread_ends_by_its_own_deadline(logged):
    one = Connection(answer=False)
    one.protocol.data_received(HEAD + b"{")
    assert one.place() == "body"
    one.leave_unread()
    one.loop.advance(LIMITS.body_s - UNREAD_S)
    assert one.transport.was_closed and one.transport.written.startswith(b"HTTP/1.1 408")
    error = json.loads(one.transport.written.partition(b"\r\n\r\n")[2])["error"]
    assert error["message"] == "The request's body was not complete after 30 seconds (body_s)"
    fields = {"limit": "body_s", "after_s": LIMITS.body_s}
    assert logged() == [("INFO", "a connection was ended: the request's body was not complete", fields)]


def test_a_connection_is_idle_only_once_its_answer_has_been_read():
    one = Connection(answer=True)
    one.protocol.data_received(GET)
    assert one.place() == "idle"
    one.leave_unread()
    one.loop.advance(LIMITS.idle_s)
    one.protocol.resume_writing()
    one.loop.advance(LIMITS.idle_s - 1)
    assert one.place() == "idle" and not one.transport.is_closing()
    one.loop.advance(1)
    assert one.transport.was_closed and not one.transport.was_aborted


def test_an_answer_that_is_not_read_ends_with_its_deadline_in_the_log(logged):
    one = Connection(answer=True)
    one.protocol.data_received(GET)
    one.leave_unread()
    one.loop.advance(LIMITS.send_s - UNREAD_S)
    assert one.transport.was_aborted
    fields = {"limit": "send_s", "after_s": LIMITS.send_s}
    assert logged() == [("INFO", "a connection was ended: the client did not read its answer", fields)]


def test_heads_that_do_not_come_are_in_the_log_for_debugging_alone(logged):
    one = Connection(answer=True)
    one.protocol.data_received(GET[:9])
    one.loop.advance(LIMITS.head_s)
    assert b"The request's head was not complete after 20 seconds (head_s)" in one.transport.written
    assert [(level, fields["limit"]) for level, _, fields in logged()] == [("DEBUG", "head_s")]
    silent = Connection(answer=True)
    silent.loop.advance(LIMITS.head_s)
    assert silent.transport.was_aborted and not silent.transport.written and len(logged()) == 1


# Clients that close their direction -----------------------------------------------------------------------------------


def half_closed(version, kind, *, has_left=False):
    """Return the connection of a client that has closed its direction while its answer is made. kind: "whole" or "stream", of which
    a first piece has been sent."""

    async def app(scope, receive, send):
        headers = [(b"content-type", b"text/event-stream"), (b"content-length", b"8")]
        if kind == "stream":
            await send({"type": "http.response.start", "status": 200, "headers": headers[:1]})
            await send({"type": "http.response.body", "body": b"data: a\n\n", "more_body": True})
        await client()
        if kind == "whole":
            await send({"type": "http.response.start", "status": 200, "headers": headers[1:]})
        await send({"type": "http.response.body", "body": b"data: b\n"})

    one = Connection(answer=False, app=app)
    one.transport.has_left = has_left
    one.protocol.data_received(GET.replace(b"1.1", version))
    assert one.protocol.eof_received()
    return one


@pytest.mark.parametrize("kind", ["whole", "stream"])
@pytest.mark.parametrize("version", [b"1.0", b"1.1"])
def test_a_client_that_has_closed_both_directions_is_noticed_within_a_second(version, kind):
    one = half_closed(version, kind, has_left=True)
    one.loop.advance(1)
    assert one.transport.was_aborted and one.protocol.cycle.disconnected


@pytest.mark.parametrize("kind", ["whole", "stream"])
@pytest.mark.parametrize("version", [b"1.0", b"1.1"])
@pytest.mark.parametrize("after_s", [3, 9, 17, 23.9])
def test_a_client_that_leaves_later_is_noticed_soon(version, kind, after_s):
    one = half_closed(version, kind)
    one.loop.advance(after_s)
    one.transport.has_left = True
    assert not one.transport.was_aborted
    one.loop.advance(4.25 if (version, kind) == (b"1.0", "whole") else 15.25)
    assert one.transport.was_aborted and one.protocol.cycle.disconnected


def test_the_system_of_a_client_of_http_1_0_is_asked_once_all_bytes_that_every_answer_begins_with_are_sent():
    one = half_closed(b"1.0", "whole")
    one.loop.advance(27)
    assert not one.transport.options
    one.loop.advance(2)
    assert one.transport.written == b"HTTP/1.1 " and one.transport.options[socket.SO_KEEPALIVE] == 1
    one.loop.advance(400)
    one.transport.was_reset = True  # by the system's own question
    one.loop.advance(0.25)
    assert one.transport.was_aborted and one.protocol.cycle.disconnected


def test_a_system_is_asked_every_few_seconds():
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as one:
        ask_often(one)
        assert one.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
        if hasattr(socket, "TCP_KEEPINTVL"):
            assert one.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL) <= 4


def test_a_stream_to_a_client_that_has_closed_its_direction_says_close_alone():
    async def app(scope, receive, send):
        await client()
        headers = [(b"content-type", b"text/event-stream"), (b"Connection", b"keep-alive")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})

    one = Connection(answer=False, app=app)
    one.protocol.data_received(GET)
    assert one.protocol.eof_received()
    with suppress(StopIteration):
        one.loop.task.coroutine.send(None)
    lines = one.transport.written.lower().split(b"\r\n")
    assert [line for line in lines if line.startswith(b"connection")] == [b"connection: close"]


@pytest.mark.parametrize(("target", "path", "query"), [
    (b"http://other:81/v1/models?a=http://b", "/v1/models", b"a=http://b"), (b"HTTPS://other:81", "/", b""),
    (b"http://other:81?x", "/", b"x"), *((bad, None, b"") for bad in (b"ftp://other/x", b"http:///x", b"http://me@other/x")),
])  # fmt: skip
def test_a_target_that_is_a_whole_address_is_its_path_on_its_own_host(target, path, query):
    async def app(scope, receive, send):
        seen.append((scope["path"], scope["query_string"], [value for name, value in scope["headers"] if name == b"host"]))

    seen, one = [], Connection(answer=True, app=app)
    one.protocol.data_received(GET.replace(b"/", target, 1))
    assert seen == ([] if path is None else [(path, query, [b"other:81"])])
    assert path is not None or b" 400 " in one.transport.written


@pytest.mark.parametrize("wait_s", [0, 0.6, 40, 3600])
def test_a_client_of_http_1_0_that_waits_gets_its_answer_as_it_is(wait_s):
    one = half_closed(b"1.0", "whole")
    one.loop.advance(wait_s)
    with suppress(StopIteration):
        one.loop.task.coroutine.send(None)
    head, _, body = one.transport.written.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 200 OK\r\n") and b"HTTP" not in head[4:] and body == b"data: b\n"
    assert one.transport.was_closed and not one.transport.was_aborted
