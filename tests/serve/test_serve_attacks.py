"""Hostile clients against a server process: bodies made to cost, connections that say nothing, heads that smuggle."""

import base64
import http.client
import json
import os
import socket
import threading
import time
from contextlib import ExitStack, closing, contextmanager, suppress

import h11
import psutil
import pytest

from tests import waiting
from tests.serve.test_serve_run import WAIT_S, serving
from trimtab.serve.contract.settings import Limits
from trimtab.serve.http.connection import HEAD_BYTES, RESERVE, Guard, StrictConnection

PATH = "/v1/chat/completions"
posix = pytest.mark.skipif(not os.path.isdir("/proc/self"), reason="memory of a process is read from /proc")


@pytest.fixture(scope="module")
def server():
    with serving() as running:
        yield running


class Watch:
    """Asks for /health all the time, on new connections, and keeps what the server computed until each answer, in seconds of
    processor time: those that other programs take do not count."""

    def __init__(self, server, every_s=0.005):
        self._server, self._every_s, self._is_over = server, every_s, threading.Event()
        self._process = psutil.Process(server.process.pid)
        self.times_s, self.errors = [], []
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self):
        self._thread.start()
        return self

    def __exit__(self, *_):
        self._is_over.set()
        self._thread.join()

    def _watch(self):
        while not self._is_over.wait(self._every_s):
            start = self._cpu_s()
            try:
                assert self._server.ask("GET", "/health")[0] == 200
            except (OSError, http.client.HTTPException, AssertionError) as exc:
                self.errors.append(repr(exc))
            self.times_s.append(self._cpu_s() - start)

    def _cpu_s(self):
        times = self._process.cpu_times()
        return times.user + times.system


def peak_bytes(server):
    """Return the most resident memory that the server's own process has had."""
    with open(f"/proc/{server.process.pid}/status") as status:
        return next(int(line.split()[1]) * 1024 for line in status if line.startswith("VmHWM"))


def post(server, body, path):
    """Send a body and return (status, error); one that is refused while it is sent is read all the same."""
    connection = server.connect()
    connection.putrequest("POST", path)
    connection.putheader("content-type", "application/json")
    connection.putheader("content-length", str(len(body)))
    connection.endheaders()
    with suppress(OSError):
        connection.send(body)
    answer = connection.getresponse()
    body = json.loads(answer.read())
    connection.close()
    return answer.status, body.get("error", {})


def chat_of(*messages):
    return b'{"model":"toy","messages":[' + b",".join(messages) + b"]}"


VALID = b'{"role":"user","content":"a"}'


def image_of(count):
    url = "data:image/png;base64," + base64.b64encode(b"\0" * count).decode()
    return json.dumps({"role": "user", "content": [{"type": "image_url", "image_url": {"url": url}}]}).encode()


def field(name, value):
    return b'{"model":"toy","%s":' % name + value + b"}"


def tools_of(parameters):
    tool = b'{"type":"function","function":{"name":"f","parameters":' + parameters + b"}}"
    return chat_of(VALID)[:-1] + b',"tools":[' + tool + b'],"tool_choice":"required"}'


ARGUMENTS = b'{"role":"assistant","tool_calls":[{"id":"a","type":"function","function":{"name":"f","arguments":"%s"}}]}'
BLOCKS = b'{"model":"toy","max_tokens":5,"messages":[{"role":"user","content":[%s]}]}'

# What a body is called -> its path, how it is made, and the status and field that refuse it.
ATTACKS = {
    "1.1 MiB of empty messages": (PATH, lambda: chat_of(*[b"{}"] * 380_000), 400, "body"),
    "57 MiB of empty messages": (PATH, lambda: b'{"model":"toy","messages":[' + b"{}," * 19_900_000 + b"{}]}", 400, "body"),
    "1,000,000 valid messages": (PATH, lambda: chat_of(*[VALID] * 1_000_000), 400, "body"),
    "as many valid ones as a body may have values": (PATH, lambda: chat_of(*[VALID] * 5_000), 400, "messages"),
    "unknown fields": (PATH, lambda: chat_of()[:-1] + b"".join(b',"%d":1' % i for i in range(16_000)) + b"}", 400, "messages"),
    "depth": (PATH, lambda: b"[" * 2_000_000, 400, "body"),
    "quotes": (PATH, lambda: b'"' * 40_000_000, 400, "body"),
    "escapes": (
        PATH, lambda: chat_of(b'{"role":"user","content":"a' + b"\\n" * 10**6 + b'"}')[:-1] + b',"max_tokens":99999}', 400,
        "max_tokens",
    ),
    "60 MiB that are no image": (PATH, lambda: chat_of(image_of(45 * 2**20)), 400, "messages[0].content[0].image_url.url"),
    "tools without end": (PATH, lambda: chat_of(VALID)[:-1] + b',"tools":[' + b"{}," * 10**6 + b"{}]}", 400, "body"),
    "a schema of references": (PATH, lambda: tools_of(b'{"$ref":"#"}'), 400, "tools[0].function.parameters"),
    "a large schema": (PATH, lambda: tools_of(b'{"description":"' + b"x" * 10**6 + b'"}'), 400, "tools"),
    "deep arguments inside a text": (
        PATH, lambda: chat_of(ARGUMENTS % (b"[" * 1_000_000)), 400, "messages[0].tool_calls[0].function.arguments"),
    "many arguments inside a text": (
        PATH, lambda: chat_of(ARGUMENTS % (b"[" + b"0," * 500_000 + b"0]")), 400, "messages[0].tool_calls[0].function.arguments"),
    "blocks without end": ("/v1/messages", lambda: BLOCKS % b",".join([b'{"type":"text"}'] * 10**6), 400, "body"),
    "a deep input": (
        "/v1/messages", lambda: BLOCKS % (b'{"type":"tool_use","id":"a","name":"f","input":' + b'{"a":' * 10**5), 400, "body"),
    "items without end": ("/v1/responses", lambda: field(b"input", b"[" + b"{}," * 10**6 + b"{}]"), 400, "body"),
    "texts without end": ("/v1/embeddings", lambda: field(b"input", b"[" + b'"a",' * 200_000 + b'"a"]'), 400, "input"),
    "a text without end": ("/tokenize", lambda: field(b"prompt", b'"' + b"a" * 60_000_000 + b'"'), 413, "body"),
    "ids without end": ("/detokenize", lambda: field(b"tokens", b"[" + b"1," * 900_000 + b"1]"), 400, "body"),
}  # fmt: skip


@posix
def test_bodies_made_to_cost_are_refused_while_health_answers_and_memory_stays(server):
    before, figures = peak_bytes(server), {}
    for name, (path, make, status, param) in ATTACKS.items():
        body = make()
        with Watch(server) as watch:
            seen = post(server, body, path)
        figures[name] = max(watch.times_s, default=0.0)
        assert (seen[0], seen[1].get("param")) == (status, param), (name, seen)
        assert not watch.errors, name
    # A second is far above what an answer takes, and below what parsing one of these on the loop took.
    assert max(figures.values()) < 1.0, figures
    assert peak_bytes(server) - before < 400 * 2**20


# Connections ----------------------------------------------------------------------------------------------------------


def open_to(server, data=b""):
    raw = socket.create_connection((server.host, server.port), timeout=WAIT_S)
    raw.sendall(data)
    return raw


def said(raw):
    """Return everything that the server says on a socket until it closes it, within the socket's time."""
    pieces = []
    with suppress(ConnectionError):
        while piece := raw.recv(65536):
            pieces.append(piece)
    return b"".join(pieces)


def refusal(server, data):
    """Return the status and error of what is refused, after which the connection is closed."""
    with open_to(server, data) as raw:
        head, _, body = said(raw).partition(b"\r\n\r\n")
    assert b"connection: close" in head.lower(), head
    return int(head.split()[1]), json.loads(body)["error"]


HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
BODY = b'{"model":"toy","prompt":"say 1"}'
WHOLE = HEAD + b"Content-Length: %d\r\n\r\n" % len(BODY) + BODY


@pytest.fixture(scope="module")
def quick():
    with serving(limits={"head_s": 0.4, "body_s": 0.4, "idle_s": 0.4, "connections": 40}) as running:
        yield running


@pytest.mark.parametrize("begun, stage", [(b"GET /health HT", "head"), (HEAD + b"Content-Length: 99\r\n\r\n{", "body")])
def test_a_head_or_body_that_does_not_come_ends_with_408(quick, begun, stage):
    status, error = refusal(quick, begun)
    assert (status, error["code"]) == (408, "too_slow") and f"request's {stage}" in error["message"]


def test_dripping_does_not_move_a_deadline(quick):
    with open_to(quick) as raw, pytest.raises(OSError):
        # A minute, if nothing ends it.
        for byte in waiting.dripped(b"GET /health HTTP/1.1\r\nHost: localhost\r\nX: " + b"x" * 1000, 0.05):
            raw.send(bytes([byte]))


@pytest.mark.parametrize("first", [b"", b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n", WHOLE])
def test_a_connection_that_says_nothing_more_is_closed(quick, first):
    with open_to(quick, first) as raw:
        text = said(raw)  # or its timeout
    assert text.startswith(b"HTTP/1.1 200") if first else not text


def test_an_answer_takes_longer_than_every_deadline_of_its_request(quick):
    connection, answer = quick.stream("count 16")  # 0.8 s
    assert answer.read().endswith(b"data: [DONE]\n\n")
    connection.close()


def test_half_open_connections_make_room_for_others(quick):
    held = [open_to(quick, b"GET /") for _ in range(200)]
    assert quick.ask("GET", "/health")[0] == 200 and quick.ask("POST", "/v1/completions", json.loads(BODY))[0] == 200
    for one in held:
        one.close()


class MockConnection:
    def __init__(self, closed):
        self.closed = closed

    def cut(self):
        self.closed.append(self)


def test_bodies_that_drip_leave_room_for_new_connections_among_half_open_ones():
    """Else the few places that the bodies leave go round so fast that a new connection is closed before it is read."""
    closed = []
    guard = Guard(Limits(), most=40)
    for drip in [MockConnection(closed) for _ in range(38)]:
        assert guard.enter(drip)
        guard.move(drip, "head", "body")
    new = MockConnection(closed)
    assert guard.enter(new)
    for _ in range(15):  # half-open ones that come before its head is read
        assert guard.enter(MockConnection(closed))
    assert closed and new not in closed
    for _ in range(40):
        assert guard.enter(MockConnection(closed))
    assert new in closed and len(guard) == 40  # it had said nothing for so long


def test_beyond_the_limit_health_answers_and_others_get_503():
    with serving(limits={"connections": 3, "n": 8}) as running:
        streams = [running.stream("wait") for _ in range(3)]
        assert running.ask("GET", "/health")[0] == 200
        status, headers, body = running.ask("GET", "/v1/models")
        assert (status, body["error"]["code"], headers["retry-after"]) == (503, "connections_full", "1")
        for connection, answer in streams:
            connection.sock.close()
            answer.close()
        waiting.until(lambda: running.ask("GET", "/v1/models")[0] == 200)


@contextmanager
def unread(server, count=3):
    """Give connections that ask for an answer without an end and read nothing of it but its first byte."""
    with ExitStack() as stack:
        for _ in range(count):
            one = stack.enter_context(closing(socket.socket()))
            one.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
            one.connect((server.host, server.port))
            one.settimeout(WAIT_S)
            one.sendall(completion("fill", stream=True))
            assert one.recv(1) == b"H"  # it is being answered: what has not sent its head makes room for others
        yield


def test_answers_that_nobody_reads_end_after_their_time():
    with serving(limits={"connections": 3, "send_s": 4}) as running, unread(running):
        assert running.ask("GET", "/v1/models")[0] == 503
        waiting.until(lambda: running.ask("GET", "/v1/models")[0] == 200, WAIT_S)


def test_answers_that_nobody_reads_make_room_long_before_their_time():
    with serving(limits={"connections": 3}) as running, unread(running):  # send_s: a minute
        start = time.monotonic()
        assert running.ask("GET", "/v1/models")[0] == 503
        waiting.until(lambda: running.ask("GET", "/v1/models")[0] == 200, WAIT_S)
        assert time.monotonic() - start < Limits().send_s / 2


HEALTH = b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"


def answer(stream):
    """Return (status line, header lines) of the next answer, whose body is read; None at the end of the connection."""
    lines = []
    while (line := stream.readline().strip()) or not lines:
        if not line:
            return None
        lines.append(line.lower())
    size = next(int(line.partition(b":")[2]) for line in lines if line.startswith(b"content-length:"))
    stream.read(size)
    return lines[0], lines[1:]


@contextmanager
def asking(server):
    """Give a connection and what comes from it."""
    with socket.create_connection((server.host, server.port), timeout=WAIT_S) as one, one.makefile("rb") as stream:
        yield one, stream


def completion(prompt, **more):
    body = json.dumps({"model": "toy", "prompt": prompt, **more}).encode()
    return HEAD + b"Content-Length: %d\r\n\r\n" % len(body) + body


def test_a_client_that_keeps_a_request_ahead_is_answered_without_an_end(server):
    asked = completion("count 2")  # it takes long enough that another one waits at each end
    with asking(server) as (one, stream):
        one.sendall(asked * 3)
        for _ in range(12):
            status, headers = answer(stream)
            assert status == b"http/1.1 200 ok"
            assert b"connection: close" not in headers
            one.sendall(asked)


@pytest.mark.parametrize("ahead", [1, 8])
def test_a_client_may_send_a_few_requests_ahead_each_time(server, ahead):
    with asking(server) as (one, stream):
        for _ in range(3):
            one.sendall(HEALTH * (ahead + 1))
            assert all(b"connection: close" not in answer(stream)[1] for _ in range(ahead + 1))


@pytest.mark.parametrize("count", [30, 400])
def test_with_many_requests_ahead_the_answer_says_that_it_is_the_last(server, count):
    with asking(server) as (one, stream):
        one.sendall(HEALTH * count)
        answers = []
        with suppress(ConnectionResetError):
            while (next_answer := answer(stream)) is not None:
                answers.append(next_answer)
    assert 1 <= len(answers) <= 9
    assert [b"connection: close" in headers for _, headers in answers] == [False] * (len(answers) - 1) + [True]


def test_requests_ahead_of_a_stream_end_the_connection_after_the_next_answer(server):
    with asking(server) as (one, stream):
        one.sendall(completion("count 4", stream=True))
        started = stream.readline()
        one.sendall(HEALTH * 100)  # the head of the stream can no longer say anything about the connection
        with suppress(ConnectionResetError):
            rest = started + stream.read()
        assert b"[DONE]" in rest and rest.lower().count(b"connection: close") == 1 and rest.count(b"HTTP/1.1 200") == 2


POSTED = b"POST /a HTTP/1.1\r\nHost: a\r\nContent-Length: 9\r\n\r\n\r\n\r\nabc\r\n"
CHUNKED = b"POST /a HTTP/1.1\r\nhost: a\r\ntransfer-encoding: chunked\r\n\r\n4\r\n\r\n\r\n\r\n0\r\n\r\n"
EMPTY_CHUNKED = b"POST /a HTTP/1.1\r\nhost: a\r\ntransfer-encoding: Chunked\r\n\r\n0\r\n\r\n"


@pytest.mark.parametrize(("data", "waiting"), [
    (b"", 0), (HEALTH[:-1], 0), (HEALTH, 1), (HEALTH * 3 + HEALTH[:9], 3), (POSTED, 1), (POSTED[:-1], 0), (POSTED * 2, 2),
    (CHUNKED, 1), (CHUNKED[:-1], 0), (CHUNKED + EMPTY_CHUNKED + POSTED + HEALTH, 4), (EMPTY_CHUNKED[:-3], 0), (HEALTH * 400, 9),
])  # fmt: skip
def test_the_requests_that_wait_are_counted_as_they_will_be_parsed(data, waiting):
    connection = StrictConnection(h11.SERVER)
    connection.receive_data(data)
    assert connection.waiting_requests() == waiting


def test_one_that_is_closed_beyond_the_limit_does_not_make_its_successor_one_of_those_that_are_answered():
    closed, guard = [], Guard(Limits(), 2)
    answered = [MockConnection(closed) for _ in range(2)]
    for one in answered:
        assert guard.enter(one)
        guard.move(one, "head", "answer")
    for _ in range(3 * RESERVE):
        half_open, successor = MockConnection(closed), MockConnection(closed)
        assert not guard.enter(half_open) and not guard.enter(successor) and half_open in closed
        guard.move(successor, "head", "answer")  # an answer that it does not read
        assert len(guard) <= 2 + RESERVE
        guard.leave(successor)
    guard.leave(answered[0])
    assert guard.enter(MockConnection(closed))


@posix
def test_without_file_descriptors_it_answers_on_and_says_so_once():
    # The limit is above what the files allow: accepting fails before any connection has to make room.
    with serving(files=150 + 60, limits={"connections": 5000, "head_s": 30}) as running:
        assert running.process.stdout.readline().startswith("66 connections at once instead of 5000")
        held = []
        for _ in range(400):
            with suppress(OSError):
                held.append(open_to(running, b"GET /"))
        with Watch(running, 0.05) as watch:
            waiting.until(lambda: len(watch.times_s) >= 20)
        assert not watch.errors
        for one in held:
            one.close()
        running.process.terminate()
        log = running.process.communicate(timeout=WAIT_S)[1].splitlines()
    assert len(log) <= 1 and all(line.startswith("no file descriptor") for line in log), log[:3]


def test_of_a_refused_body_bytes_are_counted_and_not_parsed():
    body = StrictConnection(h11.SERVER, HEAD_BYTES)
    body.receive_data(HEAD + b"Content-Length: 100000\r\n\r\n")
    assert type(body.next_event()) is h11.Request and body.next_event() is h11.NEED_DATA
    body.send(h11.Response(status_code=413, headers=[("content-length", "0")]))
    body.send(h11.EndOfMessage())
    assert body.skip(60_000) and body.skip(39_999) and not body.skip(1)
    body.receive_data(b"." + WHOLE)  # the last byte, and the next request
    assert [type(body.next_event()) for _ in range(2)] == [h11.Data, h11.EndOfMessage]
    body.start_next_cycle()
    assert type(body.next_event()) is h11.Request
    chunked = StrictConnection(h11.SERVER, HEAD_BYTES)
    chunked.receive_data(HEAD + b"Transfer-Encoding: chunked\r\n\r\n")
    assert type(chunked.next_event()) is h11.Request and not chunked.skip(1)


def test_a_refused_body_is_read_to_its_end_and_the_connection_goes_on(server):
    body = b"[" * 300_000
    with open_to(server, HEAD + b"Content-Length: %d\r\n\r\n" % len(body) + body) as raw:
        raw.sendall(WHOLE)
        pieces = b""
        while b'"text_completion"' not in pieces:
            pieces += raw.recv(65536)
    assert pieces.startswith(b"HTTP/1.1 400") and pieces.count(b"HTTP/1.1 200") == 1


CHUNKED = HEAD + b"Transfer-Encoding: chunked\r\n\r\n"
WHOLE_CHUNK = b"%x\r\n%s\r\n" % (len(BODY), BODY)


@pytest.mark.parametrize("data", [
    HEAD + b"Content-Length: %d\r\nTransfer-Encoding: chunked\r\n\r\n" % len(BODY) + WHOLE_CHUNK + b"0\r\n\r\n",
    HEAD + b"Transfer-Encoding: chunked\r\nContent-Length: 5\r\n\r\n0\r\n\r\n",
    HEAD.replace(b"HTTP/1.1", b"HTTP/1.0") + b"Transfer-Encoding: chunked\r\n\r\n" + WHOLE_CHUNK + b"0\r\n\r\n",
    WHOLE.replace(b"\r\n", b"\n"), WHOLE.replace(b"localhost\r\n", b"localhost\n"),
    HEAD + b"Content-Length: 3\r\n\n{} ", HEAD + b"Content-Length: 3\r\nContent-Length: 4\r\n\r\n{}  ",
    HEAD + b"Content-Length: +3\r\n\r\n{} ", HEAD + b"Content-Length : 3\r\n\r\n{} ",
    HEAD + b"Transfer-Encoding: chunked, chunked\r\n\r\n0\r\n\r\n",
    HEAD + b"Transfer-Encoding: xchunked\r\n\r\n0\r\n\r\n",
    CHUNKED + WHOLE_CHUNK + b"0\r\n\n", CHUNKED + WHOLE_CHUNK + b"0\r\nX: y\r\n\r\n",
    CHUNKED + WHOLE_CHUNK.replace(b"\r\n", b"\n") + b"0\n\n", CHUNKED + b"1\r\n[\r\n" * 3000,
    b"GET /health HTTP/1.1\r\nHost: a\r\nHost: b\r\n\r\n", b"GET /health HTTP/1.1\r\n\r\n",
    b"GET /health HTTP/1.1\r\nHost: localhost\r\n" + b"a: b\r\n" * 200 + b"\r\n",
    b"GET /" + b"a" * 40_000 + b" HTTP/1.1\r\nHost: localhost\r\n\r\n", b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n",
])  # fmt: skip
def test_what_two_servers_could_read_in_two_ways_closes_the_connection(server, data):
    # A second request behind it must not be answered.
    status, error = refusal(server, data + WHOLE)
    assert status in (400, 431, 501) and error["type"] == "invalid_request_error" and error["message"]
    assert "bytearray" not in error["message"] and "b'" not in error["message"]


@pytest.mark.parametrize("cut", [1, 7, 10_000])
def test_chunks_are_read_however_they_are_cut(server, cut):
    data = CHUNKED + WHOLE_CHUNK + b"0\r\n\r\n"
    with open_to(server) as raw:
        raw.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for start in waiting.dripped(range(0, len(data), cut), 0.002):
            raw.send(data[start : start + cut])
        assert raw.recv(65536).startswith(b"HTTP/1.1 200")


def odd(head, *lines, body=b""):
    return b"\r\n".join([head + b" HTTP/1.1", b"Host: localhost", *lines, b"", b""]) + body


CHUNKED_LINES = (b"Content-Type: application/json", b"Transfer-Encoding: chunked")
ODD = {
    "upgrade to websocket": (
        odd(
            b"GET /health", b"Upgrade: websocket", b"Connection: Upgrade", b"Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==",
            b"Sec-WebSocket-Version: 13",
        ),
        200,
    ),
    "upgrade to h2c": (
        odd(b"GET /health", b"Upgrade: h2c", b"Connection: Upgrade, HTTP2-Settings", b"HTTP2-Settings: AAMAAABkAARAAAAAAAIAAAAA"),
        200,
    ),
    "preface of HTTP/2": (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", 505), "HTTP/1.0": (b"GET /health HTTP/1.0\r\n\r\n", 200),
    "HTTP/1.2": (b"GET /health HTTP/1.2\r\nHost: localhost\r\n\r\n", 505),
    "HTTP/9.9": (b"GET /health HTTP/9.9\r\nHost: localhost\r\n\r\n", 505),
    "HTTP/0.9 that says so": (b"GET /health HTTP/0.9\r\nHost: localhost\r\n\r\n", 505),
    "HTTP/1.10": (b"GET /health HTTP/1.10\r\nHost: localhost\r\n\r\n", 400),
    "http/1.1 in small letters": (b"GET /health http/1.1\r\nHost: localhost\r\n\r\n", 400),
    "CONNECT": (odd(b"CONNECT evil:443"), 404), "OPTIONS *": (odd(b"OPTIONS *"), 404), "TRACE": (odd(b"TRACE /health"), 405),
    "an address of another server": (odd(b"GET http://evil.com/health"), 421),
    "an address of this server": (odd(b"GET http://localhost:1/health"), 200),
    "a path of 40 KB": (odd(b"GET /" + b"a" * 40_000), 431), "5,000 header lines": (odd(b"GET /health", *[b"a: b"] * 5000), 431),
    "control characters in a name": (odd(b"GET /v1/models/%00%0a%1b[31m"), 404),
    "no UTF-8 in a name": (odd(b"GET /v1/models/%ff%fe"), 404),
    "a way out of the page": (odd(b"GET /page/..%2f..%2f..%2fetc%2fpasswd"), 404),
    "two hosts": (odd(b"GET /health", b"Host: evil"), 400), "a zero byte in a header": (odd(b"GET /health", b"X: a\0b"), 400),
    "a key of 20 KB": (odd(b"GET /health", b"Authorization: Bearer " + b"\xff" * 20_000), 200),
    "lengths that differ": (odd(b"POST /v1/completions", b"Content-Length: 5, 6", body=b"aaaaa"), 400),
    "the same length twice": (odd(b"POST /v1/completions", *2 * [b"Content-Length: 5"], body=b"aaaaa"), 400),
    "the same length twice in one line": (odd(b"POST /v1/completions", b"Content-Length: 5, 5", body=b"aaaaa"), 400),
    "an empty key, then another": (odd(b"GET /health", b"Authorization:", b"Authorization: Bearer a"), 400),
    "keys in two spellings": (odd(b"GET /health", b"X-Api-Key: a", b"x-aPI-key: b"), 400),
    "two content types": (odd(b"GET /health", b"Content-Type: a/b", b"Content-Type: application/json"), 400),
    "a signed length": (odd(b"POST /v1/completions", b"Content-Length: +5", body=b"aaaaa"), 400),
    "a length of 5,000 digits": (odd(b"POST /v1/completions", b"Content-Length: " + b"9" * 5000, body=b"aaaaa"), 400),
    "gzip, chunked": (odd(b"POST /v1/completions", b"Content-Type: application/json", b"Transfer-Encoding: gzip, chunked"), 501),
    "chunked twice": (odd(b"POST /v1/completions", *CHUNKED_LINES, b"Transfer-Encoding: chunked"), 501),
    "a chunk with an extension": (
        odd(b"POST /v1/completions", *CHUNKED_LINES, body=b'%x;a="b"\r\n%b\r\n0;c=d\r\n\r\n' % (len(BODY), BODY)), 200,
    ),
    "a chunk with an extension of 40 KB": (
        odd(b"POST /v1/completions", *CHUNKED_LINES, body=b"1;" + b"a" * 40_000 + b"\r\n{\r\n0\r\n\r\n"), 400,
    ),
    "a chunk of a negative size": (odd(b"POST /v1/completions", *CHUNKED_LINES, body=b"-1\r\n{"), 400),
    "multipart": (
        odd(
            b"POST /v1/chat/completions", b"Content-Type: multipart/form-data; boundary=x", b"Content-Length: 10000000",
            body=b"--x\r\n" * 1000,
        ),
        415,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", ODD)
def test_odd_requests_are_answered_and_the_next_client_too(server, name):
    data, expected = ODD[name]
    with open_to(server, data) as raw:
        assert raw.recv(2**16).split(b" ", 2)[1] == b"%d" % expected
    assert server.ask("GET", "/health")[0] == 200


def test_who_asks_without_reading_ends_without_an_answer_to_all(server):
    """Requests one behind the other are answered one by one, and no further than the client reads."""
    before = peak_bytes(server)
    with open_to(server) as raw:
        raw.settimeout(2)
        with suppress(OSError):
            for _ in range(40):
                raw.sendall(odd(b"GET /openapi.json") * 500)
        assert server.ask("GET", "/health")[0] == 200
    assert peak_bytes(server) - before < 64 * 2**20


def test_a_server_under_all_of_these_has_written_nothing(server):
    assert server.ask("GET", "/health")[0] == 200
    server.process.terminate()
    assert server.process.communicate(timeout=WAIT_S)[1] == ""
