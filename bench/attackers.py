"""What a normal client notices of hostile ones, and whether the server survives kills while adapters come and go.

    python -m bench.attackers --save bench/results/attackers.json [--seconds 20 --turns 4 --kills 10 --clients 32]

attacked: one server of the demo model, with 1,024 file descriptors. Two clients ask a short question over and over, and a
    probe asks /health twenty times a second, in turns: quiet, attacked, quiet, ... The attackers run in a process of their own:
    bodies made to cost, long texts, half-open and dripping connections, requests that smuggle, small hostile images and sounds,
    values that no answer survives, unloading of the operator's adapters, one adapter under 120 names, streams left at once.
together: the fault run, and the same with the attackers beside it, in turns. In each turn 32 more clients ask, adapters are loaded
    and unloaded over HTTP, and SIGKILL ends the worker several times. Times are those of complete answers; requests that ended
    with a killed worker are counted apart, under "ended".
killed: SIGKILL to the worker under load while adapters are loaded and unloaded over HTTP, without attackers.
grammars: schemas made to cost, by another client (grammar_attacks.py).
computed: the first token of a chat, quiet and beside one request that computes as much as one may: log-probabilities of the
    longest prompts (prompt_logprobs, 20 of each token, as many prompts as `n` allows), and the embeddings of 2,048 texts. Servers
    with and without keys, so that the chat comes from another client and from the same one, and two sizes of the context.

Quiet and attacked turns are compared with each other, because other work on the same cores changes both. Linux: it reads /proc.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import resource
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from bench import client, load_bodies, parser_of
from bench.faults import Clients, Scene, Tally, at_once, kill, plain_png, rest, run_scenes, until
from bench.grammar_attacks import grammars
from bench.large_requests import computed
from bench.served import DEMO, Served
from trimtab.demo.demo import FOLDER

RERUN = "python -m bench.attackers --turns 4 --kills 20 --save bench/results/attackers.json"
FILES = 1024
HALF_OPEN = 1100
TIMEOUT_S = 30.0
# Beside 32 others and kills: so many normal clients, and so many rounds of answers at most before the next kill, that enough of
# their requests are complete.
NORMAL, ROUNDS = 8, 3
# Between two hostile bodies of one attacker.
PAUSE_S = 0.5
ATTACKERS_NICE = 10
# Under how many names one adapter is loaded.
NAMES = 120
CHANGING = [*DEMO, "--adapter-root", str(FOLDER / "adapters")]
HEAD = b"POST %s HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n"
QUESTION = client.chat_body("How are you?", model="style", max_tokens=4)


# The attackers --------------------------------------------------------------------------------------------------------


def _media(**media: bytes) -> bytes:
    return json.dumps(client.chat_body("?", model="demo", max_tokens=1, **media)).encode()


def _png(width: int, height: int) -> bytes:
    return _media(image=plain_png(width, height, bits=1))


def _chat(messages: bytes) -> bytes:
    return b'{"model":"demo","messages":[' + messages + b"]}"


BODIES: dict[str, Callable[[], bytes]] = {
    "1.1 MiB of {}": lambda: _chat(b",".join([b"{}"] * 380_000)),
    "57 MiB of {}": lambda: _chat(b"{}," * 19_900_000 + b"{}"),
    "1,000,000 messages": lambda: _chat(b",".join([b'{"role":"user","content":"a"}'] * 1_000_000)),
    "5,000 messages": lambda: _chat(b",".join([b'{"role":"user","content":"a"}'] * 5_000)),
    "a 20 MiB image that is none": lambda: _media(image=b"\0" * 20 * 2**20),
    "a text of 60 MiB": lambda: _chat(b'{"role":"user","content":"%s"}' % (b"a" * 60 * 2**20)),
    "900,000 quotes": lambda: _chat(b'{"role":"user","content":"%s"}' % (b'\\"' * 900_000)),
}
MEDIA: dict[str, Callable[[], bytes]] = {
    "PNG 31,000,000 x 1": lambda: _png(31_000_000, 1), "PNG 1 x 65": lambda: _png(1, 65),
    "PNG 20 x 1300": lambda: _png(20, 1300), "WAV of 20 samples": lambda: _media(audio=load_bodies.wav(bytes(40))),
}  # fmt: skip
CHAT, UNLOAD, LOAD = "/v1/chat/completions", "/v1/unload_lora_adapter", "/v1/load_lora_adapter"


def _asked(**fields: Any) -> bytes:
    return json.dumps({"model": "demo", "max_tokens": 1, "messages": [{"role": "user", "content": "a"}], **fields}).encode()


def _held_to(schema: dict[str, Any]) -> bytes:
    return _asked(response_format={"type": "json_schema", "json_schema": {"name": "a", "schema": schema}})


# What is refused by field, and costs whoever sends it nothing.
VALUES: dict[str, tuple[str, bytes]] = {
    "temperature 1e-38": (CHAT, _asked(temperature=1e-38)),
    "repetition_penalty 1e-39": (CHAT, _asked(repetition_penalty=1e-39)),
    "logit_bias 1e308": (CHAT, _asked(logit_bias={"1": 1e308})),
    "temperature NaN": (CHAT, _asked(temperature=float("nan"))),
    "schema of itself": (CHAT, _held_to({"$ref": "#"})),
    "schema of itself, farther": (CHAT, _held_to({"$defs": {"a": {"allOf": [{"$ref": "#/$defs/a"}]}}, "$ref": "#/$defs/a"})),
    "an empty message": (CHAT, _asked(messages=[{"role": "user", "content": " "}])),
    "unloading the operator's adapter": (UNLOAD, b'{"lora_name":"style"}'),
    "an adapter of another folder": (LOAD, b'{"lora_name":"x","lora_path":"../../../../etc"}'),
}
SMUGGLED = (
    b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    b"GET /health HTTP/1.1\nHost: localhost\n\n", b"GET /health HTTP/1.1\r\nHost: localhost\r\n" + b"a: b\r\n" * 5000 + b"\r\n",
    b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03", b"\0" * 100_000,
)  # fmt: skip

REQUESTS_AHEAD = 400
AHEAD = b"GET /openapi.json HTTP/1.1\r\nHost: localhost\r\n\r\n" * REQUESTS_AHEAD


class Attack:
    """Every kind of attacker, each in a thread, until a time. counts: what they did and what they got."""

    def __init__(self, address: str, seconds: float) -> None:
        host, port = address.split(":")
        self._to, self._seconds, self._end = (host, int(port)), seconds, 0.0
        self._costly = {name: make() for name, make in BODIES.items()}
        self._media = {name: make() for name, make in MEDIA.items()}
        self.counts: Counter[str] = Counter()
        self.most_host_bytes = 0
        self._lock = threading.Lock()

    def run(self) -> dict[str, Any]:
        """Attack until the time is over or standard input ends.

        Returns what was done and what came back, and the most bytes that adapters had on the host.
        Real attackers have machines of their own: here they take what the others leave of the cores.
        """
        os.nice(ATTACKERS_NICE)
        self._end = time.monotonic() + self._seconds
        threading.Thread(target=self._listen, daemon=True).start()
        works = [
            lambda: self._bodies(self._costly), lambda: self._bodies(self._media), self._half_open, self._unread, self._drip,
            self._smuggle, self._send_values, self._flood_names, self._leave,
        ]  # fmt: skip
        at_once(works)
        return {"counts": dict(sorted(self.counts.items())), "most_host_bytes": self.most_host_bytes}

    def _listen(self) -> None:
        sys.stdin.buffer.read()
        self._end = 0.0

    def _goes_on(self) -> bool:
        return time.monotonic() < self._end

    def _count(self, what: str) -> None:
        with self._lock:
            self.counts[what] += 1

    def _connect(self) -> socket.socket:
        return socket.create_connection(self._to, timeout=TIMEOUT_S)

    def _bodies(self, bodies: dict[str, bytes]) -> None:
        while self._goes_on():
            for name, body in bodies.items():
                self._count(f"{name}: {self._post(body)}")
                time.sleep(PAUSE_S)
                if not self._goes_on():
                    return

    def _send_values(self) -> None:
        while self._goes_on():
            for name, (path, body) in VALUES.items():
                self._count(f"{name}: {self._post(body, path)}")
                time.sleep(0.1)

    def _flood_names(self) -> None:
        """Load one adapter under many names, and unload all of them."""
        names = [f"flood-{number}" for number in range(NAMES)]
        while self._goes_on():
            for name in names:
                body = json.dumps({"lora_name": name, "lora_path": "specialist"}).encode()
                self._count(f"one adapter under {NAMES} names: {self._post(body, LOAD)}")
            with suppress(OSError, ValueError, LookupError):
                numbers = client.get(":".join(map(str, self._to)), "/api/status")[1]["models"][0]["numbers"]
                self.most_host_bytes = max(self.most_host_bytes, numbers["adapter_host_bytes"])
            for name in names:
                until(lambda name=name: self._post(b'{"lora_name":"%s"}' % name.encode(), UNLOAD) in ("200", "404"), 60.0)

    def _leave(self) -> None:
        """Ask for streams and leave at their first byte."""
        body = _asked(stream=True, max_tokens=400)
        while self._goes_on():
            with suppress(OSError), self._connect() as raw:
                raw.sendall(HEAD % (CHAT.encode(), len(body)) + body)
                raw.recv(1)
                self._count("streams that were left")
            time.sleep(PAUSE_S)

    def _post(self, body: bytes, path: str = CHAT) -> str:
        try:
            with self._connect() as raw:
                with suppress(BrokenPipeError, ConnectionResetError):
                    raw.sendall(HEAD % (path.encode(), len(body)) + body)
                return raw.recv(2**16).split(b" ", 2)[1].decode()
        except (OSError, IndexError) as exc:
            return type(exc).__name__

    def _half_open(self) -> None:
        """Keep as many connections as the server has file descriptors; what it closes is opened again."""
        held: list[socket.socket] = []
        while self._goes_on():
            for _ in range(40):
                with suppress(OSError):
                    raw = self._connect()
                    raw.sendall(b"POST /v1/chat/completions HT")
                    held.append(raw)
                    self._count("half-open connections")
            while len(held) > HALF_OPEN:
                held.pop(0).close()
            time.sleep(0.1)
        for raw in held:
            raw.close()

    def _unread(self) -> None:
        """Ask for much on each of many connections, ahead of the answers, and read nothing."""
        held: list[socket.socket] = []
        while self._goes_on():
            with suppress(OSError):
                raw = self._connect()
                held.append(raw)
                raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
                raw.setblocking(False)
                raw.send(AHEAD)
                self._count(f"connections with {REQUESTS_AHEAD} requests ahead of answers that are not read")
            while len(held) > HALF_OPEN:
                held.pop(0).close()
            time.sleep(0.1)
        for raw in held:
            raw.close()

    def _drip(self) -> None:
        """Send bodies a byte at a time, on a few connections at once."""
        held: list[socket.socket] = []
        while self._goes_on():
            with suppress(OSError):
                held.append(self._connect())
                held[-1].sendall(HEAD % (CHAT.encode(), 999))
                self._count("dripping bodies")
            for raw in list(held):
                try:
                    raw.sendall(b" ")
                except OSError:
                    held.remove(raw)
                    raw.close()
            time.sleep(0.1)
        for raw in held:
            raw.close()

    def _smuggle(self) -> None:
        while self._goes_on():
            for data in SMUGGLED:
                try:
                    with self._connect() as raw:
                        raw.sendall(data)
                        raw.shutdown(socket.SHUT_WR)
                        got = raw.recv(4096).split(b" ", 2)[1:2]
                    self._count(f"smuggled: {got[0].decode() if got else 'closed'}")
                except OSError:
                    self._count("smuggled: closed")
                time.sleep(0.05)


# The normal client ----------------------------------------------------------------------------------------------------


class Normal:
    """Clients that ask a short question, and a probe of /health, for a time; what they saw is in `seen`."""

    def __init__(self, server: Served, clients: int = 2) -> None:
        self._server, self._clients = server, clients
        self.seen: dict[str, list[float]] = {"first_s": [], "whole_s": [], "health_s": []}
        self.ended: Counter[str] = Counter()

    def run(self, expected: str, wait: Callable[[], None]) -> None:
        """Ask until `wait` returns."""
        over = threading.Event()
        works = [lambda: self._ask(over, expected)] * self._clients + [lambda: self._probe(over)]
        threads = [threading.Thread(target=work, daemon=True) for work in works]
        for thread in threads:
            thread.start()
        try:
            wait()
        finally:
            over.set()
        for thread in threads:
            thread.join(120)

    def _ask(self, over: threading.Event, expected: str) -> None:
        while not over.is_set():
            answer = client.ask(self._server.address, QUESTION, timeout_s=60)
            how = answer.ended if answer.ended != "complete" or answer.text == expected else "different"
            self.ended[f"{how} {answer.error}".strip()] += 1
            if answer.ended != "complete":
                time.sleep(0.05)
                continue
            self.seen["whole_s"].append(answer.total_s)
            if answer.ttft_s is not None:
                self.seen["first_s"].append(answer.ttft_s)

    def _probe(self, over: threading.Event) -> None:
        while not over.is_set():
            start = time.perf_counter()
            try:
                status = client.get(self._server.address, "/health")[0]
            except OSError as exc:
                status = type(exc).__name__
            self.ended[f"health {status}"] += 1
            self.seen["health_s"].append(time.perf_counter() - start)
            time.sleep(0.05)

    def shown(self) -> dict[str, Any]:
        figures = {name: {"count": len(values), **client.percentiles(values, digits=4)} for name, values in self.seen.items()}
        return {"ended": dict(sorted(self.ended.items())), **figures}


def _peak_mib(pid: int) -> float:
    line = next(line for line in Path(f"/proc/{pid}/status").read_text().splitlines() if line.startswith("VmHWM"))
    return round(int(line.split()[1]) / 1024, 1)


@contextmanager
def _attackers(server: Served, got: Counter[str], most: list[int]) -> Iterator[None]:
    """Have every attacker at work for a block. got: what they did and what they got. most: bytes of adapters on the host."""
    command = [sys.executable, "-m", "bench.attackers", "--attack", server.address, "--seconds", "600"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as attackers:
        assert attackers.stdin is not None and attackers.stdout is not None
        attackers.stdout.readline()  # their bodies are made
        try:
            yield
        finally:
            attackers.stdin.close()
        found = json.loads(attackers.stdout.read())
        got.update(found["counts"])
        most.append(found["most_host_bytes"])


def _p99_ratio(result: dict[str, Any]) -> dict[str, float]:
    names = ("first_s", "whole_s", "health_s")
    return {name: round(result["attacked"][name]["p99"] / result["quiet"][name]["p99"], 2) for name in names}


class Turns:
    """Quiet and attacked turns of normal clients on one server, one after the other."""

    def __init__(self, server: Served, expected: str, clients: int = 2) -> None:
        self._server, self._expected = server, expected
        self.quiet, self.under = Normal(server, clients), Normal(server, clients)
        self.got: Counter[str] = Counter()
        self.loads: list[float] = []
        self._host_bytes = [int(server.status()["numbers"].get("adapter_host_bytes", 0))]
        resource.prlimit(server.process.pid, resource.RLIMIT_NOFILE, (FILES, FILES))
        self._before = _peak_mib(server.process.pid)

    def run(self, count: int, wait: Callable[[], None]) -> None:
        """Run so many pairs of turns. wait: returns when a turn is over."""
        for _ in range(count):
            self.quiet.run(self._expected, wait)
            self.loads.append(round(os.getloadavg()[0], 1))
            with _attackers(self._server, self.got, self._host_bytes):
                self.under.run(self._expected, wait)
            self.loads.append(round(os.getloadavg()[0], 1))
            time.sleep(2)

    def shown(self) -> dict[str, Any]:
        result = {"quiet": self.quiet.shown(), "attacked": self.under.shown()}
        server = self._server
        return {
            "files": FILES, "p99_ratio": _p99_ratio(result), **result, "attackers": dict(sorted(self.got.items())),
            "adapter_host_bytes": [self._host_bytes[0], max(self._host_bytes)],
            "api_peak_mib": [self._before, _peak_mib(server.process.pid)], "left": rest(server),
            "log_bytes": len(server.log.encode()), "loads": self.loads,
        }  # fmt: skip


def attacked(seconds: float = 20.0, turns: int = 4) -> dict[str, Any]:
    """Return what two normal clients saw in quiet and in attacked turns, and what the server took."""
    with Served(CHANGING) as server:
        worker = server.worker_pid()
        both = Turns(server, client.ask(server.address, QUESTION).text)
        both.run(turns, lambda: time.sleep(seconds))
        same = server.worker_pid() == worker
        return {"seconds": seconds, "turns": turns, **both.shown(), "same_worker": same, "log_tail": server.log[-400:]}


# Kills while adapters come and go -------------------------------------------------------------------------------------


class Faults:
    """Clients, adapters that come and go over HTTP, and kills, on one server."""

    def __init__(self, server: Served, clients: int, seed: int) -> None:
        self._server, self._clients, self._chance = server, clients, random.Random(seed)
        self._over = threading.Event()
        self._seed = seed
        self.tally, self.changes, self.back_s = Tally(), Counter[str](), list[float]()

    @contextmanager
    def at_work(self) -> Iterator[None]:
        """Have the clients ask and the adapters change for a block."""
        changer = threading.Thread(target=self._change, daemon=True)
        with Clients(self._server, self._clients, self.tally, seed=self._seed):
            changer.start()
            try:
                yield
            finally:
                self._over.set()
                changer.join(120)

    def _change(self) -> None:
        number = 0
        while not self._over.is_set():
            number += 1
            name = f"more-{number}"
            for path, body in (
                ("/v1/load_lora_adapter", {"lora_name": name, "lora_path": "specialist"}),
                ("/v1/unload_lora_adapter", {"lora_name": name}),
            ):
                answer = client.ask(self._server.address, body, path=path, timeout_s=120)
                self.changes[f"{path.split('/')[-1]}: {answer.error or answer.ended}"] += 1
                if answer.ended != "complete":
                    time.sleep(0.2)

    def kill(self, count: int, rounds: int = 1) -> None:
        """End the worker so many times, each at a random moment after the one before is back and has answered.

        rounds: how often all clients together may be answered in between, at most."""
        server = self._server
        for _ in range(count):
            wanted = self.tally.ended["complete"] + self._chance.randrange(rounds * self._clients + 1)
            until(lambda: self.tally.ended["complete"] >= wanted, 60.0)  # noqa: B023
            self.back_s.append(kill(server))

    def shown(self) -> dict[str, Any]:
        return {
            "kills": len(self.back_s), "clients": self._clients, **self.tally.shown(),
            "restarts": self._server.status()["restarts"],
            "adapters": dict(sorted(self.changes.items())), "back_s": client.percentiles(self.back_s, digits=2),
        }  # fmt: skip


def killed(kills: int = 10, clients: int = 32, *, seed: int = 0) -> dict[str, Any]:
    """SIGKILL to the worker at random moments under load, while an adapter is loaded and unloaded over and over."""
    with Served(CHANGING) as server:
        faults = Faults(server, clients, seed)
        with faults.at_work():
            faults.kill(kills)
        return {**faults.shown(), "left": rest(server)}


def together(kills: int = 10, clients: int = 32, turns: int = 2, *, seconds: float = 20.0, seed: int = 0) -> dict[str, Any]:
    """Return what normal clients saw of kills, load and changing adapters, with and without attackers beside.

    kills: in all attacked turns; as many in the quiet ones. seconds: of a turn at least."""
    with Served(CHANGING) as server:
        faults = Faults(server, clients, seed)
        both = Turns(server, client.ask(server.address, QUESTION).text, NORMAL)

        def turn() -> None:
            start = time.monotonic()
            faults.kill(kills // turns, ROUNDS)
            until(lambda: time.monotonic() - start > seconds, seconds)

        with faults.at_work():
            both.run(turns, turn)
        return {"turns": turns, "faults": faults.shown(), **both.shown()}


SCENES: dict[str, Scene] = {
    "attacked": lambda given: attacked(given.seconds, given.turns),
    "together": lambda given: together(given.kills, given.clients, min(given.turns, given.kills), seconds=given.seconds),
    "killed": lambda given: killed(given.kills, given.clients),
    "grammars": lambda given: grammars(given.seconds, given.turns),
    "computed": lambda given: computed(given.seconds),
}


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--turns", type=int, default=4)
    parser.add_argument("--kills", type=int, default=10)
    parser.add_argument("--clients", type=int, default=32)
    parser.add_argument("--only", nargs="*", choices=list(SCENES), default=list(SCENES))
    parser.add_argument("--note", default="", help="what else ran on the machine")
    parser.add_argument("--attack", metavar="ADDRESS", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.attack:
        work = Attack(given.attack, given.seconds)
        print("ready", flush=True)
        print(json.dumps(work.run()), flush=True)
        return
    run_scenes(SCENES, given, note=given.note, rerun=RERUN)


if __name__ == "__main__":
    main()
