"""A server that a bench starts ends with it, also where the bench is killed."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from bench.served import Served
from tests import ROOT

WAITS = "import time; time.sleep(600)"


def test_an_ended_server_has_no_guard_left():
    server = Served((), command=("-c", WAITS))
    assert server.process.poll() is None and server._guard.poll() is None
    server.end()
    assert server.process.poll() is not None and server._guard.poll() == 0
    server.end()  # a second time is no error


@pytest.mark.skipif(os.name != "posix", reason="asks for a process by its id")
def test_a_server_ends_with_a_bench_that_is_killed():
    code = (
        "import time\nfrom bench.served import Served\n"
        f"print(Served((), command=('-c', {WAITS!r})).process.pid, flush=True)\ntime.sleep(600)"
    )
    bench = subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    assert bench.stdout is not None
    with bench.stdout:
        server = int(bench.stdout.readline())
        os.kill(server, 0)
        bench.kill()
        bench.wait()
    end = time.monotonic() + 30
    while time.monotonic() < end:
        state = Path(f"/proc/{server}/stat")
        try:
            os.kill(server, 0)
        except ProcessLookupError:
            return
        if state.exists() and state.read_text().rsplit(")", 1)[1].split()[0] == "Z":  # nobody has asked for its end yet
            return
        time.sleep(0.05)
    raise AssertionError("the server goes on")
