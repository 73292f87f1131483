"""Hostile clients against a server process: bodies made to cost, connections that say nothing, heads that smuggle."""

from __future__ import annotations

import base64
import http.client
import json
import os
import threading
import time
from contextlib import suppress

import pytest

from tests.test_serve_run import serving

PATH = "/v1/chat/completions"
posix = pytest.mark.skipif(not os.path.isdir("/proc/self"), reason="memory of a process is read from /proc")


@pytest.fixture(scope="module")
def server():
    with serving() as found:
        yield found


class Watch:
    """Asks for /health all the time, on new connections, and keeps the longest answer's seconds."""

    def __init__(self, server, every_s=0.005):
        self._server, self._every_s, self._is_over = server, every_s, threading.Event()
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
            start = time.perf_counter()
            try:
                assert self._server.ask("GET", "/health")[0] == 200
            except (OSError, http.client.HTTPException, AssertionError) as exc:
                self.errors.append(repr(exc))
            self.times_s.append(time.perf_counter() - start)


def peak_bytes(server):
    """Return the most resident memory that the server's own process has had."""
    with open(f"/proc/{server.process.pid}/status") as status:
        return next(int(line.split()[1]) * 1024 for line in status if line.startswith("VmHWM"))


def post(server, body):
    """Send a body and return (status, error); one that is refused while it is sent is read all the same."""
    connection = server.connect()
    connection.putrequest("POST", PATH)
    connection.putheader("content-type", "application/json")
    connection.putheader("content-length", str(len(body)))
    connection.endheaders()
    with suppress(OSError):
        connection.send(body)
    answer = connection.getresponse()
    found = json.loads(answer.read())
    connection.close()
    return answer.status, found.get("error", {})


def chat_of(*messages):
    return b'{"model":"toy","messages":[' + b",".join(messages) + b"]}"


VALID = b'{"role":"user","content":"a"}'


def image_of(count):
    url = "data:image/png;base64," + base64.b64encode(b"\0" * count).decode()
    return json.dumps({"role": "user", "content": [{"type": "image_url", "image_url": {"url": url}}]}).encode()


# What a body is called -> how it is made, and the status and field that refuse it.
ATTACKS = {
    "1.1 MiB of empty messages": (lambda: chat_of(*[b"{}"] * 380_000), 400, "body"),
    "57 MiB of empty messages": (lambda: b'{"model":"toy","messages":[' + b"{}," * 19_900_000 + b"{}]}", 400, "body"),
    "1,000,000 valid messages": (lambda: chat_of(*[VALID] * 1_000_000), 400, "body"),
    "as many valid ones as a body may have values": (lambda: chat_of(*[VALID] * 20_000), 400, "messages"),
    "unknown fields": (lambda: chat_of()[:-1] + b"".join(b',"%d":1' % i for i in range(60_000)) + b"}", 400, "messages"),
    "depth": (lambda: b"[" * 2_000_000, 400, "body"),
    "quotes": (lambda: b'"' * 40_000_000, 400, "body"),
    "escapes": (
        lambda: chat_of(b'{"role":"user","content":"' + b"\\n" * 10**6 + b'"}')[:-1] + b',"max_tokens":99999}', 400, "max_tokens",
    ),
    "60 MiB that are no image": (lambda: chat_of(image_of(45 * 2**20)), 400, "messages[0].content[0].image_url.url"),
}  # fmt: skip


@posix
def test_bodies_made_to_cost_are_refused_while_health_answers_and_memory_stays(server):
    with Watch(server) as quiet:
        time.sleep(0.5)
    figures = {"quiet": max(quiet.times_s)}
    before = peak_bytes(server)
    for name, (make, status, param) in ATTACKS.items():
        body = make()
        with Watch(server) as watch:
            seen = post(server, body)
        figures[name] = max(watch.times_s, default=0.0)
        assert (seen[0], seen[1].get("param")) == (status, param), (name, seen)
        assert not watch.errors, name
    print({name: round(value * 1e3) for name, value in figures.items()}, (peak_bytes(server) - before) >> 20, "MiB")
    # A second is far above what a loaded machine adds, and below what parsing one of these on the loop took.
    assert max(figures.values()) < 1.0, figures
    assert peak_bytes(server) - before < 400 * 2**20
