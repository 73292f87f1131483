"""The nginx configuration of the docs, run by a real nginx before a real server: pieces at once, clients that leave, doors shut."""

from __future__ import annotations

import http.client
import json
import re
import shutil
import socket
import subprocess
import time
from pathlib import Path

import pytest

from tests import waiting
from tests.serve.test_serve_run import ROOT, WAIT_S, Server, posix, serving

NGINX = shutil.which("nginx") or shutil.which("nginx", path="/usr/sbin:/usr/local/sbin:/opt/homebrew/bin")
pytestmark = [posix, pytest.mark.skipif(NGINX is None, reason="nginx is not installed")]
KEY = "outer-key"
HEADERS = {"authorization": f"Bearer {KEY}"}


def configuration(folder: Path, port: int, behind: int) -> str:
    """Return the docs' server block between what a private nginx needs, without TLS."""
    text = (ROOT / "docs" / "behind-a-proxy.md").read_text("utf-8")
    (block,) = re.findall(r"```nginx\n(server \{.*?\n\})\n```", text, re.DOTALL)
    block, listens = re.subn(r"listen 443 ssl;", f"listen 127.0.0.1:{port};", block)
    block, certificates = re.subn(r"ssl_certificate\w* .*?;", "", block)
    block, passes = re.subn(r"http://127\.0\.0\.1:8000", f"http://127.0.0.1:{behind}", block)
    assert (listens, certificates, passes) == (1, 2, 1)
    kept = "\n".join(f"    {kind}_temp_path {folder}/{kind};" for kind in ("client_body", "proxy", "fastcgi", "uwsgi", "scgi"))
    return (
        f"daemon off;\nmaster_process off;\npid {folder}/pid;\nerror_log stderr;\n"
        f"events {{}}\nhttp {{\n    access_log off;\n{kept}\n{block}\n}}\n"
    )


@pytest.fixture(scope="module")
def both(tmp_path_factory):
    """A server and its proxy, as two addresses."""
    folder = tmp_path_factory.mktemp("nginx")
    with socket.socket() as found, serving(api_keys=[KEY]) as behind:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]
        found.close()
        (folder / "nginx.conf").write_text(configuration(folder, port, behind.port), encoding="utf-8")
        process = subprocess.Popen(
            [NGINX, "-e", "stderr", "-p", str(folder), "-c", str(folder / "nginx.conf")], stderr=subprocess.PIPE, text=True
        )
        outer = Server(process, f"http://127.0.0.1:{port}")
        try:
            waiting.until(lambda: process.poll() is not None or is_open(port), WAIT_S)
            assert process.poll() is None, process.stderr.read()
            yield outer, behind
        finally:
            process.terminate()
            process.communicate(timeout=WAIT_S)


def is_open(port):
    with socket.socket() as found:
        return found.connect_ex(("127.0.0.1", port)) == 0


def begin(server, prompt):
    """Begin a stream; returns the connection and its response."""
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=WAIT_S)
    body = json.dumps({"model": "toy", "prompt": prompt, "stream": True})
    connection.request("POST", "/v1/completions", body, {"content-type": "application/json", **HEADERS})
    return connection, connection.getresponse()


def running(server):
    return server.ask("GET", "/api/status", **HEADERS)[2]["models"][0]["in_flight"]


def test_pieces_pass_as_they_come(both):
    connection, answer = begin(both[0], "count 20")  # one second in all
    times = [time.monotonic() for line in answer if line.startswith(b"data: ")]
    connection.close()
    assert answer.status == 200 and answer.headers["content-type"].startswith("text/event-stream")
    # Gathered by the proxy they would all have one time.
    assert len(times) > 10 and times[-1] - times[0] > 0.4


def test_a_client_that_leaves_the_proxy_frees_its_row(both):
    outer, behind = both
    connection, answer = begin(outer, "wait")
    assert answer.readline().startswith(b"data: ") and running(behind) == 1
    answer.close()
    connection.close()
    waiting.until(lambda: running(behind) == 0)


def test_a_large_body_passes_and_a_larger_one_does_not(both):
    asked = {"model": "toy", "prompt": "count 1 " + "x" * 2**20}
    assert both[0].ask("POST", "/v1/completions", asked, **HEADERS)[0] in (200, 400)  # 400: longer than the context
    connection = http.client.HTTPConnection("127.0.0.1", both[0].port, timeout=WAIT_S)
    head = {"content-type": "application/json", "content-length": str(65 * 2**20), **HEADERS}
    connection.request("POST", "/v1/completions", headers=head)
    assert connection.getresponse().status == 413
    connection.close()


def test_the_key_passes_and_the_metrics_do_not(both):
    outer, behind = both
    assert outer.ask("GET", "/v1/models", **HEADERS)[0] == 200 and outer.ask("GET", "/v1/models")[0] == 401
    assert outer.ask("GET", "/ready")[0] == 200

    def metrics(server):
        connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=WAIT_S)
        connection.request("GET", "/metrics", headers=HEADERS)
        status = connection.getresponse().status
        connection.close()
        return status

    assert (metrics(outer), metrics(behind)) == (404, 200)
