"""A server as a process: its address, its end, clients that leave or misbehave at the socket."""

import http.client
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
from contextlib import contextmanager, suppress

import pytest

from tests import ROOT, waiting
from tests.raised import refused
from trimtab.cli import main
from trimtab.cli.commands import serve
from trimtab.errors import RequestError
from trimtab.serve import run
from trimtab.serve.contract.settings import Settings
from trimtab.serve.http import listener
from trimtab.serve.http.listener import address_of, listen
from trimtab.serve.slots import Slots

WAIT_S = 30
posix = pytest.mark.skipif(os.name != "posix", reason="signals are POSIX's; Windows has Ctrl-C alone")


class Server:
    def __init__(self, process, address):
        self.process, self.address = process, address
        self.host, self.port = "127.0.0.1", int(address.rpartition(":")[2])

    def connect(self):
        return http.client.HTTPConnection(self.host, self.port, timeout=WAIT_S)

    def ask(self, method, path, body=None, **headers):
        """Return (status, headers, JSON) of one request."""
        connection = self.connect()
        try:
            sent = None if body is None else json.dumps(body)
            connection.request(method, path, sent, {"content-type": "application/json", **headers})
            answer = connection.getresponse()
            text = answer.read()
            return answer.status, answer.headers, json.loads(text)
        finally:
            connection.close()

    def stream(self, prompt):
        """Begin a stream and wait for its first piece; returns the open connection and response."""
        connection = self.connect()
        body = json.dumps({"model": "toy", "prompt": prompt, "stream": True})
        connection.request("POST", "/v1/completions", body, {"content-type": "application/json"})
        answer = connection.getresponse()
        assert answer.status == 200 and answer.readline().startswith(b"data: ")
        return connection, answer

    def running(self):
        return self.ask("GET", "/api/status")[2]["models"][0]["in_flight"]


@contextmanager
def serving(**options):
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.toy_server", json.dumps({"port": 0, "grace_s": 20, **options})],
        cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=os.name == "posix",
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    try:
        assert process.stdout.readline().startswith("toy: ")
        found = Server(process, process.stdout.readline().split()[0])
        assert process.stdout.readline().startswith("base URL for clients: ")
        headers = {"authorization": f"Bearer {options['api_keys'][0]}"} if options.get("api_keys") else {}
        waiting.until(lambda: found.ask("GET", "/ready", **headers)[0] == 200, WAIT_S)
        yield found
    finally:
        process.kill()
        process.communicate()


BODY_BYTES = 10_000


@pytest.fixture(scope="module")
def server():
    with serving(limits={"body_bytes": BODY_BYTES}) as found:
        yield found


# The socket -----------------------------------------------------------------------------------------------------------


def test_the_address_has_the_port_that_was_taken(server):
    assert server.address == f"http://127.0.0.1:{server.port}" and server.port > 0
    assert server.ask("GET", "/health")[2] == {"status": "ok"}


def test_a_port_in_use_is_refused_by_name():
    with listen("127.0.0.1", 0) as first, pytest.raises(RequestError) as caught:
        listen("127.0.0.1", first.getsockname()[1])
    assert caught.value.field == "port" and "in use" in str(caught.value)


@pytest.mark.parametrize("host", ["192.0.2.1", "no such host", "x" * 300])
def test_an_address_of_another_machine_is_refused(host):
    assert refused(listen, host, 0).field == "host"


@pytest.mark.skipif(not socket.has_ipv6, reason="this machine has no IPv6")
@pytest.mark.parametrize("host", ["::1", "[::1]"])
def test_an_ipv6_address_is_shown_as_browsers_take_it(host):
    try:
        found = listen(host, 0)
    except RequestError:
        pytest.skip("this machine has no IPv6 address")
    with found:
        assert address_of(found) == f"http://[::1]:{found.getsockname()[1]}"


def test_threads_of_large_bodies_hand_the_interpreter_on_soon(monkeypatch):
    """At Python's own 5 ms every read and write of the event loop waits so long while a thread reads a body."""

    class StopError(Exception):
        pass

    def stop(*arguments, **options):
        raise StopError

    seen = []
    monkeypatch.setattr(sys, "setswitchinterval", seen.append)
    monkeypatch.setattr(run, "Pool", stop)
    with pytest.raises(StopError):
        run.serve([], Settings(page=False), say=print)
    assert len(seen) == 1 and seen[0] <= 0.0005


def test_what_lives_for_good_is_not_looked_through_again():
    code = (
        "import gc\nfrom trimtab.serve import run\nrun.keep_for_good()\n"
        "assert gc.get_freeze_count() > 10_000 and len(gc.get_objects()) < 1_000"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


# Clients --------------------------------------------------------------------------------------------------------------


def test_a_stream_comes_piece_by_piece(server):
    connection, _ = server.stream("wait")  # its first piece was read, and the rest never comes
    connection.close()
    connection, answer = server.stream("count 4")
    pieces = answer.read().decode().split("\n\n")
    connection.close()
    assert len(pieces) > 4 and pieces[-2] == "data: [DONE]"


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_frees_its_place(server, stream):
    if stream:
        connection, _ = server.stream("wait")
    else:
        connection = server.connect()
        body = json.dumps({"model": "toy", "prompt": "wait"})
        connection.request("POST", "/v1/completions", body, {"content-type": "application/json"})
        waiting.until(lambda: server.running() == 1)
    assert server.running() == 1
    connection.sock.close() if connection.sock else connection.close()
    connection.close()
    if stream:
        _.close()
    waiting.until(lambda: server.running() == 0)


def test_a_body_in_pieces_above_the_limit_is_refused(server):
    connection = server.connect()
    connection.putrequest("POST", "/v1/completions")
    connection.putheader("content-type", "application/json")
    connection.putheader("transfer-encoding", "chunked")
    connection.endheaders()
    for _ in range(3):
        connection.send(b"1388\r\n" + b"x" * (BODY_BYTES // 2) + b"\r\n")
    connection.send(b"0\r\n\r\n")
    answer = connection.getresponse()
    assert answer.status == 413 and json.loads(answer.read())["error"]["code"] == "body_too_large"
    connection.close()
    assert server.ask("GET", "/health")[0] == 200


@pytest.mark.parametrize("data", [
    b"\0" * 1000, b"GET\r\n\r\n", b"GET / HTTP/9.9\r\n\r\n", b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n"
    b"Content-Type: application/json\r\nContent-Length: -5\r\n\r\n", b"GET /health HTTP/1.1\r\n" + b"X: " + b"a" * 200_000,
    b"GET /health HTTP/1.1\r\n" + b"X: a\r\n" * 30_000, b"GET /" + b"a" * 100_000 + b" HTTP/1.1\r\n\r\n",
    b"GET /health HTTP/1.1\r\nHost: a\r\nHost: b\r\n\r\n",
    b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
])  # fmt: skip
def test_what_is_no_http_is_refused_and_the_server_goes_on(server, data):
    with socket.create_connection((server.host, server.port), timeout=WAIT_S) as raw:
        try:
            raw.sendall(data)
            raw.shutdown(socket.SHUT_WR)
            answer = raw.recv(65536)
        except OSError:
            answer = b""  # closed before all was sent
    assert not answer or answer.split()[1].startswith(b"4") or (b"9.9" in data and answer.split()[1] == b"505")
    assert server.ask("GET", "/health")[0] == 200


def test_a_client_that_never_sends_its_body_holds_nobody_up(server):
    head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: 99\r\n\r\n{"
    with socket.create_connection((server.host, server.port)) as raw:
        raw.sendall(head)
        assert server.ask("POST", "/v1/completions", {"model": "toy", "prompt": "count 1"})[0] == 200
    assert server.ask("GET", "/health")[0] == 200


@posix
def test_neither_key_nor_client_is_in_the_log():
    with serving(api_keys=["very-secret-key"]) as found:
        key = {"authorization": "Bearer very-secret-key"}
        assert found.ask("POST", "/v1/completions", {"model": "toy", "prompt": "count"}, **key)[0] in (200, 500, 503)
        found.ask("POST", "/v1/completions", {"model": "no", "prompt": "hidden words"}, **key)
        assert found.ask("GET", "/v1/models", authorization="Bearer wrong-key")[0] == 401
        found.process.send_signal(signal.SIGTERM)
        out, err = found.process.communicate(timeout=WAIT_S)
    assert "very-secret" not in out + err and "wrong-key" not in err and "hidden words" not in err


# The end --------------------------------------------------------------------------------------------------------------


@posix
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_server_told_to_end_finishes_its_streams_and_refuses_what_is_new(number):
    with serving() as found:
        connection, answer = found.stream("count 30")  # a second and a half
        # To the whole group, as Ctrl-C in a terminal does; SIGTERM goes to the server.
        os.killpg(found.process.pid, number) if number == signal.SIGINT else found.process.send_signal(number)
        waiting.until(lambda: found.ask("GET", "/ready")[0] == 503)
        status, headers, body = found.ask("POST", "/v1/completions", {"model": "toy", "prompt": "count 1"})
        assert (status, body["error"]["class"], headers["retry-after"]) == (503, "StoppingError", "1")
        assert found.ask("GET", "/health")[0] == 200
        text = answer.read().decode()
        connection.close()
        assert '"text": "30 "' in text and text.rstrip().endswith("data: [DONE]")
        out, err = found.process.communicate(timeout=WAIT_S)
        assert (found.process.returncode, out, err) == (0, "ended\n", "")


@posix
def test_a_stream_longer_than_the_grace_time_is_cut():
    with serving(grace_s=0.5) as found:
        connection, answer = found.stream("wait")
        found.process.send_signal(signal.SIGTERM)
        found.process.wait(30)
        assert b"[DONE]" not in _rest(answer)
        connection.close()


@posix
def test_a_second_ctrl_c_ends_at_once():
    with serving(grace_s=60) as found:
        connection, _ = found.stream("wait")
        found.process.send_signal(signal.SIGINT)
        waiting.until(lambda: found.ask("GET", "/ready")[0] == 503)
        found.process.send_signal(signal.SIGINT)
        _, err = found.process.communicate(timeout=30)
        connection.close()
        assert "Traceback" not in err and "CancelledError" not in err


def _rest(answer):
    try:
        return answer.read()
    except (OSError, http.client.HTTPException):
        return b""


@posix
def test_a_killed_server_leaves_no_worker_behind():
    with serving() as found:
        found.process.kill()
        found.process.wait()
        waiting.until(lambda: not _group_lives(found.process.pid))


def _group_lives(group):
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True


# The command ----------------------------------------------------------------------------------------------------------


SERVE = ("-m", "trimtab", "serve")


def python(*arguments):
    return subprocess.run(
        [sys.executable, *arguments], cwd=ROOT, capture_output=True, text=True, timeout=120,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip


@pytest.mark.parametrize("arguments, words", [
    (("trimtab/demo/base", "--host", "0.0.0.0"), "API key"), (("trimtab/demo/base", "--limit", "pixels=1"), "limit"),
    (("trimtab/demo/base", "--rows", "0"), "rows"), (("trimtab/demo/base", "--together", "2"), "together"),
    (("trimtab/demo/base", "--api-key-file", "nothing"), "--api-key-file"), (("nothing.toml",), "cannot be read"),
    (("trimtab/demo/base", "--admin-key-file", "nothing"), "--admin-key-file"),
    (("trimtab/demo/base", "--api-key", "a", "--admin-key", "a"), "--admin-key"),
    (("trimtab/demo/base", "--keep", "nobody"), "keep"),
])  # fmt: skip
def test_what_the_command_cannot_do_is_said_before_anything_is_loaded(arguments, words, monkeypatch, capsys):
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(Slots, "begin", lambda slots: pytest.fail("a worker was started"))
    assert main.main(["serve", *arguments, "--port", "0"]) == 2
    said = capsys.readouterr().err
    assert words in said and "Traceback" not in said


def test_a_port_in_use_ends_the_command_with_its_name():
    with listen("127.0.0.1", 0) as first:
        found = python(*SERVE, "trimtab/demo/base", "--port", str(first.getsockname()[1]))
    assert found.returncode == 2 and "in use" in found.stderr


class BeginError(Exception):
    """In place of the start of the workers."""


def test_no_worker_starts_before_the_port_is_taken(monkeypatch):
    def begin(slots):
        raise BeginError

    monkeypatch.setattr(Slots, "begin", begin)
    with listen("127.0.0.1", 0) as first:
        settings = Settings(port=first.getsockname()[1], page=False)
        with pytest.raises(RequestError) as caught:
            serve._serve([], settings, 1, print, reread=None)
    assert caught.value.field == "port"


def test_connections_wait_from_the_start_of_the_workers_on_and_end_with_the_command(monkeypatch):
    early, listening = [], []

    def listen_here(host, port):
        listening.append(listen(host, port))
        return listening[0]

    def begin(slots):
        early.append(socket.create_connection(listening[0].getsockname(), timeout=WAIT_S))
        raise BeginError

    monkeypatch.setattr(Slots, "begin", begin)
    monkeypatch.setattr(listener, "listen", listen_here)
    with pytest.raises(BeginError):
        serve._serve([], Settings(port=0, page=False), 1, print, reread=None)
    with early[0], suppress(ConnectionResetError):
        assert early[0].recv(1) == b""
    assert listening[0].fileno() == -1


# The command whose worker ends as one does that cannot load its model.
FAILING = """
import functools, sys
from tests import toy_worker
from trimtab.cli.main import main
from trimtab.serve import pool
from trimtab.serve.worker.supervisor import Supervisor
pool.Pool = functools.partial(pool.Pool, make=functools.partial(Supervisor, target=toy_worker.failing))
sys.exit(main(sys.argv[1:]))
"""


def with_a_toy(tmp_path):
    return ["-c", FAILING, "serve", "trimtab/demo/base"], "no model", 3


def without_tokenizer(tmp_path):
    shutil.copytree(ROOT / "trimtab" / "demo" / "base", tmp_path / "m", ignore=shutil.ignore_patterns("*token*"))
    return [*SERVE, str(tmp_path / "m")], "has no tokenizer files", 3


def in_too_little_memory(tmp_path):
    return [*SERVE, "trimtab/demo/base", "--host-memory", "300MiB"], "the host budget, 300.0 MiB", 4


@pytest.mark.parametrize(
    "case", [with_a_toy, *(pytest.param(one, marks=pytest.mark.slow) for one in (without_tokenizer, in_too_little_memory))]
)
def test_a_server_whose_only_model_cannot_be_loaded_ends_with_the_reason(tmp_path, case):
    arguments, words, code = case(tmp_path)
    found = python(*arguments, "--context", "512", "--audio-s", "1", "--port", "0")
    assert found.returncode == code and "Traceback" not in found.stderr, found.stderr
    last = found.stderr.splitlines()[-1]
    assert last.startswith("trimtab: ") and words in last


# Clients that close their direction -----------------------------------------------------------------------------------


def half_closed(server, *requests):
    """Send requests, close the sending direction, and return everything that comes back until the server closes."""
    with socket.create_connection((server.host, server.port), timeout=WAIT_S) as raw:
        raw.sendall(b"".join(requests))
        raw.shutdown(socket.SHUT_WR)
        pieces = []
        while piece := raw.recv(65536):
            pieces.append(piece)
    return b"".join(pieces)


def request(prompt, *, stream=False, version="1.1"):
    body = json.dumps({"model": "toy", "prompt": prompt, "stream": stream})
    head = f"POST /v1/completions HTTP/{version}\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    return f"{head}Content-Length: {len(body)}\r\n\r\n{body}".encode()


CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"
GET = b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"


@pytest.mark.parametrize("version", ["1.0", "1.1"])
def test_a_client_that_closes_its_direction_gets_its_answer(server, version):
    found = half_closed(server, request("count 6", version=version))
    # What asks whether it is still there is nothing that a client has to understand.
    assert found.startswith(CONTINUE) == (version == "1.1")
    head, _, body = found.replace(CONTINUE, b"").partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 200") and b"\r\nconnection: close" in head.lower()
    assert json.loads(body)["choices"][0]["text"] == "1 2 3 4 5 6 "
    waiting.until(lambda: server.running() == 0)


def test_a_client_that_closes_its_direction_gets_its_stream(server):
    head, _, body = half_closed(server, request("count 6", stream=True)).replace(CONTINUE, b"").partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 200") and body.endswith(b"0\r\n\r\n")
    assert b"".join(b"%d " % number in body and b"%d " % number for number in range(1, 7)) == b"1 2 3 4 5 6 "
    assert body.count(b"data: [DONE]") == 1


def test_requests_that_came_before_the_end_are_all_answered(server):
    found = half_closed(server, GET, request("count 2"), GET).replace(CONTINUE, b"")
    assert found.count(b"HTTP/1.1 200 ") == 3 and found.count(b'{"status":"ok"}') == 2


def test_half_a_request_behind_the_last_answer_is_dropped(server):
    found = half_closed(server, request("count 2"), GET[:20]).replace(CONTINUE, b"")
    assert found.count(b"HTTP/1.1 ") == 1 and found.startswith(b"HTTP/1.1 200")
    assert half_closed(server, request("count 2")[:-5]) == b""  # whoever ends in the midst of a body has nothing to be told
    assert half_closed(server, GET[:20]) == half_closed(server) == b""


@pytest.mark.parametrize("version", ["1.0", "1.1"])
@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_closes_its_direction_and_leaves_later_frees_its_place(server, stream, version):
    raw = socket.create_connection((server.host, server.port), timeout=WAIT_S)
    raw.sendall(request("wait", stream=stream, version=version))
    raw.shutdown(socket.SHUT_WR)
    waiting.until(lambda: server.running() == 1)
    assert raw.recv(1) == b"H"
    assert server.running() == 1
    raw.close()
    waiting.until(lambda: server.running() == 0)


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="this system has no /dev/full")
def test_a_server_whose_output_and_log_are_full_answers_and_ends_well(tmp_path):
    with listen("127.0.0.1", 0) as free:
        port = free.getsockname()[1]
    with open("/dev/full", "w") as full:
        process = subprocess.Popen(
            [sys.executable, "-m", "tests.toy_server", json.dumps({"port": port, "grace_s": 20})],
            cwd=ROOT, stdout=full, stderr=full, env={**os.environ, "PYTHONPATH": str(ROOT)},
        )  # fmt: skip
    found = Server(process, f"http://127.0.0.1:{port}")

    def is_ready():
        assert process.poll() is None
        with suppress(OSError):
            return found.ask("GET", "/ready")[0] == 200

    try:
        waiting.until(is_ready, WAIT_S)
        for _ in range(3):
            assert found.ask("GET", "/nothing")[0] == 404  # a line of the log
        assert found.ask("POST", "/v1/completions", {"model": "toy", "prompt": "count 2"})[0] == 200
        process.terminate()
        assert process.wait(WAIT_S) == 0
    finally:
        process.kill()
        process.communicate()
