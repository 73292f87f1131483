"""Which attacks on connections does granian hold, and uvicorn with the project's own layer? (docs/decisions/0046)

    pip install --target /tmp/granian granian==2.8.7
    PYTHONPATH=/tmp/granian python -m bench.http_servers --save bench/results/granian.json

Each attack runs on two servers of the demo model, one after the other: `trimtab serve` as it is, and `trimtab serve` with granian's
embedded server in the same process, on the same listening socket, with every option of it that bounds a client. Linux: /proc.
"""

from __future__ import annotations

import asyncio
import importlib
import json
import os
import resource
import signal
import socket
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

from bench import attackers, client, faults, parser_of, save
from bench.served import DEMO, Served
from trimtab.process import phases
from trimtab.serve.http.connection import HEAD_BYTES
from trimtab.serve.http.listener import BACKLOG

RERUN = "PYTHONPATH=/tmp/granian python -m bench.http_servers --save bench/results/granian.json"
# Short times, so that each is seen to end; CONNECTIONS is a limit that one attacker reaches.
CONNECTIONS, LIMITS = 64, {"head_s": 3.0, "body_s": 5.0, "idle_s": 6.0, "send_s": 8.0}
GRACE_S = 3
# How long an attacker waits for its end.
WATCHED_S = 20.0
# How long normal clients send requests next to connections that are held, how long they wait, and between which two of them.
HELD_S, PATIENCE_S, PAUSE_S = 8.0, 2.0, 0.25
# granian bounds connections by one option, its backpressure: at the limit it accepts no more. Also with more of it than files.
SERVERS: dict[str, tuple[str, ...]] = {
    "uvicorn": ("-m", "trimtab", "serve"), "granian": ("-m", "bench.http_servers", "--granian", "", "serve"),
    "granian_no_limit": ("-m", "bench.http_servers", "--granian", "100000", "serve"),
}  # fmt: skip
CHAT = attackers.CHAT.encode()
GET = b"GET /health HTTP/1.1\r\nHost: localhost\r\n%s\r\n"
POST = b"POST " + CHAT + b" HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n%s\r\n"
CHUNKED = b"Transfer-Encoding: chunked\r\n"


# granian in the place of trimtab.serve.run._Server --------------------------------------------------------------------


class Granian:
    """What `serve` needs of a server, by granian's embedded one."""

    failure: Mapping[str, Any] | None = None
    was_interrupted = False
    most = ""

    def __init__(self, app: Any, pool: Any, settings: Any, guard: Any, reloader: Any) -> None:
        self._app, self._limits, self._most = app, settings.limits, int(self.most or guard._most)
        self._grace_s = settings.grace_s

    def run(self, sockets: Sequence[socket.socket]) -> None:
        asyncio.run(self._serve(sockets[0]))

    async def _serve(self, listener: socket.socket) -> None:
        granian, net, http = (importlib.import_module(f"granian.{name}") for name in ("server.embed", "net", "http"))
        constants = importlib.import_module("granian.constants")
        head_ms = round(self._limits.head_s * 1000)
        server = granian.Server(
            self._app, interface=constants.Interfaces.ASGI, http=constants.HTTPModes.http1, websockets=False,
            backlog=BACKLOG, backpressure=self._most, log_enabled=False,
            http1_settings=http.HTTP1Settings(header_read_timeout=head_ms, max_buffer_size=HEAD_BYTES),
        )  # fmt: skip
        held = net.SocketHolder(listener.dup().detach(), False, BACKLOG)
        listener.close()  # granian closes its own
        server._init_shared_socket = lambda: setattr(server, "_shd", held)
        server.workers_kill_timeout = self._grace_s
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, server.stop)
        phases.begin("")
        await server.serve()


def _serve_with_granian(most: str, *arguments: str) -> None:
    from trimtab.serve import run

    Granian.most = most
    run._Server = Granian  # type: ignore[assignment, misc]
    main = importlib.import_module("trimtab.__main__").main
    sys.argv = ["trimtab", *arguments]
    sys.exit(main())


# One connection -------------------------------------------------------------------------------------------------------


def _connect(server: Served, *, receives: int | None = None) -> socket.socket:
    raw = socket.socket()
    if receives is not None:
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receives)
    raw.settimeout(PATIENCE_S)
    host, port = server.address.split(":")
    raw.connect((host, int(port)))
    return raw


def _answer(raw: socket.socket, within_s: float = PATIENCE_S) -> str:
    """Return the status that came, and whether its body is the project's error; "closed" or "nothing"."""
    raw.settimeout(within_s)
    got = b""
    with suppress(OSError):
        while piece := raw.recv(2**16):
            got += piece
            if b"\r\n\r\n" in got and not got.startswith(b"HTTP/1.1 1"):
                time.sleep(0.05)
                raw.settimeout(0.05)
        return _read(got) or "closed"
    return _read(got) or ("closed" if _is_closed(raw) else "nothing")


def _read(got: bytes) -> str:
    if not got.startswith(b"HTTP/"):
        return ""
    status = got.split(b" ", 2)[1].decode()
    body = got.partition(b"\r\n\r\n")[2]
    form = "JSON" if b'"error"' in body else "text" if body else "empty"
    return status if status < "400" else f"{status} {form}"


def _is_closed(raw: socket.socket) -> bool:
    try:
        raw.setblocking(False)
        return raw.recv(1) == b""
    except BlockingIOError:
        return False
    except OSError:
        return True


def _ends(server: Served, start: bytes, drip: bytes = b"", *, ask: bytes = b"") -> dict[str, Any]:
    """Return after how many seconds a connection that sends this ended, None if not, and with which answer."""
    with _connect(server) as raw:
        if ask:
            raw.sendall(ask)
            _answer(raw, 1.0)
        raw.sendall(start)
        raw.settimeout(0.25)
        got, began = b"", time.monotonic()
        while time.monotonic() - began < WATCHED_S:
            try:
                piece = raw.recv(2**16)
                got += piece
                if not piece:
                    break
                continue
            except TimeoutError:
                pass
            except OSError:
                break
            with suppress(OSError):
                raw.sendall(drip)
        else:
            return {"ended_s": None, "answer": _read(got)}
        return {"ended_s": round(time.monotonic() - began, 1), "answer": _read(got)}


# Attacks: each on a server with LIMITS and CONNECTIONS ----------------------------------------------------------------


def slow_clients(server: Served) -> dict[str, Any]:
    cases = {
        "a head a byte at a time": partial(_ends, server, POST[:40], b"a"),
        "a connection without a byte": partial(_ends, server, b""),
        "a body a byte at a time": partial(_ends, server, POST % b"Content-Length: 999\r\n", b" "),
        "a body that stops": partial(_ends, server, POST % b"Content-Length: 999\r\n" + b"{"),
        "idle after an answer": partial(_ends, server, b"", ask=GET % b""),
    }  # fmt: skip
    found: dict[str, Any] = {}
    faults.at_once([lambda n=name, c=case: found.update({n: c()}) for name, case in cases.items()])
    return {name: found[name] for name in cases}


def held_connections(server: Served) -> dict[str, Any]:
    """Twice as many connections as there may be, each in one state (heads and bodies again when closed): who else is answered?"""
    ahead = GET.replace(b"/health", b"/openapi.json") % b"" * 40
    kinds = {
        "heads": (POST[:40], b"a"), "bodies": (POST % b"Content-Length: 9999\r\n", b" "), "idle": (GET % b"", b""),
        "unread": (ahead, b""),
    }  # fmt: skip
    return {name: _held_next_to(server, start, drip) for name, (start, drip) in kinds.items()}


def _held_next_to(server: Served, start: bytes, drip: bytes) -> dict[str, Any]:
    over = threading.Event()

    def hold() -> None:
        held: list[socket.socket] = []
        while not over.is_set():
            while len(held) < 2 * CONNECTIONS and not over.is_set():
                with suppress(OSError):
                    raw = _connect(server, receives=4096)
                    raw.setblocking(False)
                    raw.send(start)
                    held.append(raw)
            for raw in list(held):
                try:
                    raw.send(drip)
                    if start[:1] == b"P" and raw.recv(4096) == b"":
                        raise OSError
                except BlockingIOError:
                    pass
                except OSError:
                    held.remove(raw)
                    raw.close()
            over.wait(0.1)
        for raw in held:
            raw.close()

    holder = threading.Thread(target=hold)
    before, counts = attackers._peak_mib(server.process.pid), Counter[str]()
    holder.start()
    time.sleep(1.0)
    end = time.monotonic() + HELD_S
    while time.monotonic() < end:
        for name, path in (("/health", "/health"), ("other", "/v1/models")):
            try:
                counts[f"{name} {client.get(server.address, path, timeout_s=PATIENCE_S)[0]}"] += 1
            except OSError as exc:
                counts[f"{name} {type(exc).__name__}"] += 1
        time.sleep(PAUSE_S)
    over.set()
    holder.join()
    back_s = faults.until(server.is_ready, 30.0)
    grown = round(attackers._peak_mib(server.process.pid) - before, 1)
    return {"answered": dict(sorted(counts.items())), "back_s": back_s and round(back_s, 2), "peak_grew_mib": grown}


# A body that is answered with 200 where its framing is accepted.
VALID = attackers._asked()
LENGTH, PIECES = b"Content-Length: %d\r\n" % len(VALID), b"%x\r\n%s\r\n" % (len(VALID), VALID)
MALFORMED: dict[str, bytes] = {
    "5,000 fields": GET % (b"a: b\r\n" * 5000), "200 fields": GET % (b"a: b\r\n" * 200),
    "a field of 40 KiB": GET % (b"a: " + b"b" * 40 * 2**10 + b"\r\n"),
    "a field of 400 KiB": GET % (b"a: " + b"b" * 400 * 2**10 + b"\r\n"),
    "a length and chunks": POST % (LENGTH + CHUNKED) + PIECES + b"0\r\n\r\n", "a length twice, equal": POST % (LENGTH * 2) + VALID,
    "a length twice, different": POST % (LENGTH + b"Content-Length: 2\r\n") + VALID,
    "chunks in HTTP/1.0": (POST % CHUNKED).replace(b"HTTP/1.1", b"HTTP/1.0") + PIECES + b"0\r\n\r\n",
    "lines that end in LF": (GET % b"").replace(b"\r\n", b"\n"),
    "a field behind a chunked body": POST % CHUNKED + PIECES + b"0\r\na: b\r\n\r\n",
    "chunks that end in LF": (POST % CHUNKED) + (PIECES + b"0\r\n\r\n").replace(b"\r\n", b"\n"),
    "10,000 chunks of a byte": POST % CHUNKED + b"1\r\n \r\n" * 10_000 + PIECES + b"0\r\n\r\n",
    "HTTP/1.2": (GET % b"").replace(b"1.1", b"1.2"), "no host": b"GET /v1/models HTTP/1.1\r\n\r\n",
    "a TLS hello": attackers.SMUGGLED[3] + b"\0" * 300, "100,000 zeros": attackers.SMUGGLED[4],
}  # fmt: skip


def malformed(server: Served) -> dict[str, Any]:
    found = {}
    for name, data in MALFORMED.items():
        with _connect(server) as raw:
            with suppress(OSError):
                raw.sendall(data)
            found[name] = _answer(raw, LIMITS["body_s"] + 1)
    return found


def pipelined(server: Served) -> dict[str, Any]:
    """400 requests ahead of answers on each of 40 connections that read nothing: memory, and whether the connections end."""
    pid = server.process.pid
    before = attackers._peak_mib(pid)
    held = [_connect(server, receives=2048) for _ in range(40)]
    for raw in held:
        raw.setblocking(False)
        with suppress(OSError):
            raw.send(attackers.AHEAD)
    time.sleep(LIMITS["send_s"] + 4)
    grown = round(attackers._peak_mib(pid) - before, 1)
    open_here = _connections(server.address)
    for raw in held:
        raw.close()
    return {"peak_grew_mib": grown, "open_after_send_s": open_here}


def _connections(address: str) -> int:
    """Return how many connections a server has open (state 01), as /proc/net/tcp lists them."""
    port = f":{int(address.split(':')[1]):04X}"
    lines = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    return sum(line[1].endswith(port) and line[3] == "01" for line in lines)


def half_closed(server: Served) -> dict[str, Any]:
    """Clients that close their direction: one waits for its answer, one leaves; and one that leaves without a word."""

    def whole(tokens: int) -> bytes:
        return json.dumps({**faults.long_body(tokens), "stream": False, "stream_options": None}).encode()

    body, short = whole(300), whole(20)
    head = POST % b"Content-Length: %d\r\n" % len(body)
    found: dict[str, Any] = {}
    with _connect(server) as raw:
        raw.sendall(POST % b"Content-Length: %d\r\n" % len(short) + short)
        raw.shutdown(socket.SHUT_WR)
        raw.settimeout(20)
        got = b""
        with suppress(OSError):
            while piece := raw.recv(2**16):
                got += piece
        found["waits"] = "answered" if b'"choices"' in got else _read(got) or "closed without an answer"
    for name, closes_first in (("leaves after closing its direction", True), ("leaves", False)):
        raw = _connect(server)
        raw.sendall(head + body)
        faults.until(lambda: server.status()["in_flight"], 5.0)
        if closes_first:
            raw.shutdown(socket.SHUT_WR)
            time.sleep(0.3)
        raw.close()
        freed_s = faults.until(lambda: not server.status()["in_flight"], 20.0)
        found[f"{name}: freed_s"] = None if freed_s is None else round(freed_s, 2)
    return found


def ended(server: Served) -> dict[str, Any]:
    """SIGTERM with one connection of each state: seconds until the process has ended, within a grace time of GRACE_S."""
    started = (POST[:40], POST % b"Content-Length: 999\r\n{", GET % b"", attackers.AHEAD)
    held = [_connect(server, receives=2048) for _ in started]
    for raw, data in zip(held, started, strict=True):
        raw.setblocking(False)
        raw.send(data)
    time.sleep(0.5)
    server.process.send_signal(signal.SIGTERM)
    took_s = faults.until(lambda: server.process.poll() is not None, WATCHED_S)
    for raw in held:
        raw.close()
    return {"took_s": took_s and round(took_s, 1), "exit_code": server.process.poll()}


def few_files(server: Served) -> dict[str, Any]:
    """Fewer file descriptors than connections: is /health answered, what does the log get, what does the process compute?"""
    pid, address = server.process.pid, server.address
    used = len(os.listdir(f"/proc/{pid}/fd"))
    resource.prlimit(pid, resource.RLIMIT_NOFILE, (used + 30, used + 30))
    log, ticks = len(server.log), _ticks(pid)
    held: list[socket.socket] = []
    counts = Counter[str]()
    end = time.monotonic() + 5
    while time.monotonic() < end:
        for _ in range(20):
            with suppress(OSError):
                held.append(_connect(server))
                held[-1].sendall(POST[:40])
        try:
            counts[str(client.get(address, "/health", timeout_s=PATIENCE_S)[0])] += 1
        except OSError as exc:
            counts[type(exc).__name__] += 1
    cpu = (_ticks(pid) - ticks) / os.sysconf("SC_CLK_TCK") / 5
    for raw in held:
        raw.close()
    back_s = faults.until(server.is_ready, 30.0)
    grown = len(server.log) - log
    return {"health": dict(counts), "log_bytes": grown, "cores": round(cpu, 2), "back_s": back_s and round(back_s, 2)}


def _ticks(pid: int) -> int:
    words = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return int(words[11]) + int(words[12])


ATTACKS: dict[str, Callable[[Served], dict[str, Any]]] = {
    "slow_clients": slow_clients, "malformed": malformed, "half_closed": half_closed,
    "leaving": lambda server: faults.leaving(40, 4, server=server),
    "slow_readers": lambda server: faults.slow_readers(2, send_s=LIMITS["send_s"], server=server),
    "held_connections": held_connections, "pipelined": pipelined, "few_files": few_files, "ended": ended,
}  # fmt: skip


def _all_of(name: str, seconds: float, turns: int, only: Sequence[str]) -> dict[str, Any]:
    """Return what one server held: each attack, its end at SIGTERM, and the attackers of bench/attackers.py together."""
    flags = [word for limit, value in {"connections": CONNECTIONS, **LIMITS}.items() for word in ("--limit", f"{limit}={value}")]
    made = partial(Served, command=SERVERS[name])
    found: dict[str, Any] = {}
    for attack, run in ATTACKS.items():
        if attack not in only:
            continue
        with made([*DEMO, *flags, "--rows", "8", "--grace", str(GRACE_S)]) as server:
            before = attackers._peak_mib(server.process.pid)
            try:
                found[attack] = run(server)
            except Exception as exc:
                found[attack] = {"failed": f"{type(exc).__name__}: {exc}"[:300]}
            with suppress(OSError, StopIteration):
                found[attack]["api_peak_mib"] = [before, attackers._peak_mib(server.process.pid)]
        print(name, attack, json.dumps(found[attack]), flush=True)
    for scene, run_scene in (
        ("told_to_end", partial(faults.told_to_end, 4, grace_s=20.0, tokens=100)),
        ("attacked", partial(attackers.attacked, seconds, turns)),
    ):  # fmt: skip
        if scene in only:
            vars(faults)["Served"] = vars(attackers)["Served"] = made
            try:
                found[scene] = run_scene()
                found[scene].pop("log_tail", None)
            except Exception as exc:
                found[scene] = {"failed": f"{type(exc).__name__}: {exc}"[:600]}
            print(name, scene, json.dumps(found[scene]), flush=True)
    return found


def main() -> None:
    names = [*ATTACKS, "told_to_end", "attacked"]
    parser = parser_of(__doc__)
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--turns", type=int, default=2)
    parser.add_argument("--only", nargs="*", choices=names, default=names)
    parser.add_argument("--servers", nargs="*", choices=list(SERVERS), default=list(SERVERS))
    given = parser.parse_args()
    about = {**faults.about(), "granian": version("granian"), "h11": version("h11")}
    found = {name: _all_of(name, given.seconds, given.turns, given.only) for name in given.servers}
    limits = {"connections": CONNECTIONS, **LIMITS}
    result = {"model": "demo", "rerun": RERUN, "limits": limits, "environment": about, "servers": found}
    print(json.dumps(result, indent=1))
    save(given.save, result)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--granian"]:
        _serve_with_granian(*sys.argv[2:])
    else:
        main()
