"""What a real server does when something goes wrong: each fault of the docs' table, done to `trimtab serve` on the demo model.

    python -m bench.faults --save bench/results/faults.json [--kills 100 --clients 32] [--only killed]

Every scene starts a server of its own, does its harm over HTTP and with signals, and returns counts. A request may end in
two ways only: a complete answer, or an error with a name. What else can happen has a count of its own, which has to be 0:
a connection that broke, a client to whom nothing came for two minutes ("hang"), a complete answer that is not the one that the
same question had before ("different"). tests/faults runs the same scenes with smaller numbers. Linux: it reads /proc.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import resource
import shutil
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import textwrap
import threading
import time
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import trimtab
from bench import client, environment, parser_of, save, saved
from bench.client import Asked
from bench.served import DEMO, Served, rss_bytes
from trimtab.demo.demo import ADAPTERS, FOLDER, read_asks

HANG_S = 120.0
# Answers that are long whatever the model wants to say: three hundred numbers.
LONG = {
    "type": "json_schema",
    "json_schema": {
        "name": "numbers",
        "schema": {
            "type": "object", "required": ["n"], "additionalProperties": False,
            "properties": {"n": {"type": "array", "minItems": 300, "items": {"type": "integer", "minimum": 1}}},
        },
    },
}  # fmt: skip


def questions() -> list[dict[str, Any]]:
    """Return the demo's questions, text, picture and sound, to the base and every adapter, as request bodies."""
    asks = [(ask, {kind: Path(path).read_bytes() for kind, path in ask.media.items()}) for ask in read_asks(list(ADAPTERS))]
    return [client.chat_body(ask.prompt, model=ask.adapter or "demo", **media) for ask, media in asks]


# Of a slow reader's request, on a server of eight rows: more megabytes than the system keeps for a connection.
CHOICES = 7


def long_body(tokens: int = 400, **more: Any) -> dict[str, Any]:
    """Return a request whose answer takes seconds, with pieces all the time."""
    return client.chat_body("Count.", model="demo", max_tokens=tokens, response_format=LONG, **more)


@dataclass
class Tally:
    """How requests ended. expected: request body as JSON -> the text it was answered with before anything went wrong."""

    expected: dict[str, str] = field(default_factory=dict)
    ended: Counter[str] = field(default_factory=Counter)
    errors: Counter[str] = field(default_factory=Counter)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def add(self, body: Mapping[str, Any], asked: Asked) -> None:
        with self.lock:
            how = asked.ended
            if how == "complete" and asked.text != self.expected.get(json.dumps(body), asked.text):
                how = "different"
            if how == "error" and not asked.error:
                how = "nameless"
            self.ended[how] += 1
            if asked.error:
                self.errors[asked.error] += 1

    def shown(self) -> dict[str, Any]:
        names = ("complete", "error", "left", "hang", "broken", "different", "nameless")
        counts = {name: self.ended[name] for name in names if self.ended[name] or name not in ("left",)}
        return {"requests": sum(self.ended.values()), **counts, "errors": dict(sorted(self.errors.items()))}


class Clients:
    """Clients that ask one question after the other until the block ends."""

    def __init__(self, server: Served, count: int, tally: Tally, *, seed: int = 0) -> None:
        self._server, self.tally, self._over = server, tally, threading.Event()
        self._bodies = questions()
        self._threads = [
            threading.Thread(target=self._run, args=(random.Random(seed * 1000 + number),), daemon=True) for number in range(count)
        ]

    def _run(self, chance: random.Random) -> None:
        while not self._over.is_set():
            body = chance.choice(self._bodies)
            asked = client.ask(self._server.address, body, timeout_s=HANG_S)
            self.tally.add(body, asked)
            if asked.ended != "complete":
                time.sleep(0.05)  # who was refused does not come back in the same instant

    def __enter__(self) -> Clients:
        for body in self._bodies:  # alone, before anything goes wrong
            asked = client.ask(self._server.address, body, timeout_s=HANG_S)
            if asked.ended != "complete":
                raise RuntimeError(f"not answered before any fault: {asked}")
            self.tally.expected[json.dumps(body)] = asked.text
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._over.set()
        for thread in self._threads:
            thread.join(HANG_S + 30)
        stuck = sum(thread.is_alive() for thread in self._threads)
        self.tally.ended["hang"] += stuck


def until(condition: Callable[[], Any], within_s: float, *, every_s: float = 0.01) -> float | None:
    """Return after how many seconds something was true, None if time was over first."""
    start = time.monotonic()
    while time.monotonic() - start < within_s:
        if condition():
            return time.monotonic() - start
        time.sleep(every_s)
    return None


def rest(server: Served) -> dict[str, Any]:
    """Return what is left in a server that nobody asks any more: all zeros."""
    found = server.wait_quiet(20.0)
    numbers = found["numbers"]
    return {
        "in_flight": found["in_flight"], "waiting": found["waiting"] + numbers.get("waiting", 0),
        "running": numbers.get("running", 0),
    }  # fmt: skip


@contextmanager
def serving(server: Served | None, *arguments: str) -> Iterator[Served]:
    """Use a server that runs already, or one of its own with these flags."""
    if server is not None:
        yield server
        return
    with Served([*DEMO, *arguments]) as own:
        yield own


# The worker dies ------------------------------------------------------------------------------------------------------


def kill(server: Served) -> float:
    """End the worker with SIGKILL; returns the seconds until the server is ready again. Errors: RuntimeError after 300 s."""
    before, start = server.worker_pid(), time.monotonic()
    server.kill_worker()
    if until(lambda: server.worker_pid() not in (None, before) and server.is_ready(), 300.0) is None:
        raise RuntimeError(f"not back after 300 s:\n{server.log[-2000:]}")
    return time.monotonic() - start


def killed(
    kills: int = 100, clients: int = 32, *, retry: bool = False, seed: int = 0, limit_s: float = float("inf"),
    server: Served | None = None,
) -> dict[str, Any]:  # fmt: skip
    """SIGKILL to the worker at random moments under load, also while it prepares, reads and answers.

    limit_s: after so long no more kills, however many were asked for; the counts are those of the kills that there were.
    """
    tally, chance, back_s, begun = Tally(), random.Random(seed), [], time.monotonic()
    with serving(server, *(["--retry"] if retry else [])) as server:
        earlier = server.status()["restarts"]
        with Clients(server, clients, tally, seed=seed):
            while len(back_s) < kills and time.monotonic() - begun < limit_s:
                # After none to as many more answers as there are clients: also while it prepares and reads the first of them.
                wanted = tally.ended["complete"] + chance.randrange(clients + 1)
                until(lambda: tally.ended["complete"] >= wanted, 60.0)  # noqa: B023
                back_s.append(kill(server))
        found = {**tally.shown(), "restarts": server.status()["restarts"] - earlier, "left": rest(server)}
    return {
        "kills": len(back_s), "clients": clients, "retry": retry, **found, "back_s": client.percentiles(back_s, digits=2),
        "load_after": round(os.getloadavg()[0], 2),
    }  # fmt: skip


# Memory ---------------------------------------------------------------------------------------------------------------


def out_of_memory(seconds: float = 10.0, clients: int = 8) -> dict[str, Any]:
    """Prompts of one adapter run out of memory while they are read; the others are answered as before."""
    from bench.failing import FAILING_ADAPTER

    bodies = questions()
    failing = [body for body in bodies if body["model"] == FAILING_ADAPTER]
    others = [body for body in bodies if body["model"] != FAILING_ADAPTER]
    refused, tally = Tally(), Tally()
    with Served(command=("-m", "bench.failing")) as server:
        pid = server.worker_pid()
        for body in others:
            tally.expected[json.dumps(body)] = client.ask(server.address, body).text
        end = time.monotonic() + seconds

        def run(number: int) -> None:
            chance = random.Random(number)
            while time.monotonic() < end:
                body, counts = (chance.choice(failing), refused) if number % 2 else (chance.choice(others), tally)
                counts.add(body, client.ask(server.address, body, timeout_s=HANG_S))

        at_once([lambda number=number: run(number) for number in range(clients)])
        return {
            "clients": clients, "that_ran_out": refused.shown(), "others": tally.shown(),
            "same_worker": server.worker_pid() == pid, "left": rest(server),
        }  # fmt: skip


def host_memory(tries: int = 5) -> dict[str, Any]:
    """Pictures that decode to more than the worker may have, by a limit that the system keeps, beside long answers."""
    side = 5600
    body = client.chat_body("What do you see?", model="demo", image=plain_png(side, side, bits=24))
    tally, others = Tally(), Tally()
    with Served() as server:
        pid = server.worker_pid()
        assert pid is not None
        before = client.ask(server.address, body).ended
        used = int(Path(f"/proc/{pid}/statm").read_text().split()[0]) * resource.getpagesize()
        resource.prlimit(pid, resource.RLIMIT_AS, (used + 80 * 2**20, resource.RLIM_INFINITY))

        def ask() -> None:
            for _ in range(tries):
                tally.add(body, client.ask(server.address, body, timeout_s=HANG_S))

        def answer() -> None:
            others.add({}, client.ask(server.address, long_body(), timeout_s=HANG_S))

        at_once([ask, answer, answer])
        resource.prlimit(pid, resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        after = client.ask(server.address, body).ended
        return {
            "pixels": side * side, "before": before, "that_ran_out": tally.shown(), "others": others.shown(), "after": after,
            "same_worker": server.worker_pid() == pid, "left": rest(server),
        }  # fmt: skip


def plain_png(width: int, height: int, *, bits: int) -> bytes:
    """Return a PNG of one colour, far smaller than what it decodes to. bits: of a pixel, 24 (RGB) or 1 (black and white)."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    head = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, *((8, 2) if bits == 24 else (1, 0)), 0, 0, 0))
    rows = zlib.compress(bytes(1 + (width * bits + 7) // 8) * height, 9)
    return b"\x89PNG\r\n\x1a\n" + head + chunk(b"IDAT", rows) + chunk(b"IEND", b"")


def at_once(works: Sequence[Callable[[], None]]) -> None:
    """Do works in threads of their own, and wait for all of them."""
    threads = [threading.Thread(target=work, daemon=True) for work in works]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(HANG_S * 3)


# Adapters -------------------------------------------------------------------------------------------------------------


def bad_adapters(clients: int = 4, *, server: Served | None = None, root: Path | None = None) -> dict[str, Any]:
    """Damaged adapters are loaded while others are being answered; then a good one is. root: of a server that runs already."""
    tally, refused = Tally(), {}
    with tempfile.TemporaryDirectory() as folder:
        root = root or Path(folder)
        for name, harm in HARMS.items():
            harm(shutil.copytree(FOLDER / "adapters" / "rslora-dora", root / name))
        shutil.copytree(FOLDER / "adapters" / "rslora-dora", root / "sound")
        with serving(server, "--adapter-root", folder) as server:
            pid = server.worker_pid()
            with Clients(server, clients, tally):
                for name in HARMS:
                    refused[name] = _load(server, name)
                loaded = _load(server, "sound")
                body = client.chat_body("What is shown?", model="sound", image=(FOLDER / "images" / "image_1.png").read_bytes())
                answered = client.ask(server.address, body)
            return {
                "refused": refused, "sound": loaded, "its_answer": answered.text, "others": tally.shown(),
                "same_worker": server.worker_pid() == pid, "left": rest(server),
            }  # fmt: skip


def _load(server: Served, name: str) -> str:
    asked = client.ask(server.address, {"lora_name": name, "lora_path": name}, path="/v1/load_lora_adapter")
    return asked.error if asked.ended == "error" else asked.ended


def _cut(folder: Path) -> None:
    file = folder / "adapter_model.safetensors"
    file.write_bytes(file.read_bytes()[:100_000])


def _no_json(folder: Path) -> None:
    (folder / "adapter_config.json").write_text('{"peft_type": "LORA", "r": ')


def _empty(folder: Path) -> None:
    (folder / "adapter_model.safetensors").write_bytes(b"")


def _noise(folder: Path) -> None:
    (folder / "adapter_model.safetensors").write_bytes(random.Random(0).randbytes(200_000))


def _other_model(folder: Path) -> None:
    from safetensors.torch import load_file, save_file

    file = folder / "adapter_model.safetensors"
    save_file({name.replace(".layers.", ".blocks."): tensor for name, tensor in load_file(file).items()}, file)


def _other_shapes(folder: Path) -> None:
    from safetensors.torch import load_file, save_file

    file = folder / "adapter_model.safetensors"
    halves = {name: tensor[..., : tensor.shape[-1] // 2].contiguous() for name, tensor in load_file(file).items()}
    save_file(halves, file)


def _not_numbers(folder: Path) -> None:
    from safetensors.torch import load_file, save_file

    file = folder / "adapter_model.safetensors"
    save_file({name: tensor * float("nan") for name, tensor in load_file(file).items()}, file)


HARMS: dict[str, Callable[[Path], None]] = {
    "cut": _cut, "config-no-json": _no_json, "empty": _empty, "noise": _noise, "other-model": _other_model,
    "other-shapes": _other_shapes, "not-numbers": _not_numbers,
}  # fmt: skip


# Clients --------------------------------------------------------------------------------------------------------------


def leaving(requests: int = 200, clients: int = 16, *, seed: int = 0, server: Served | None = None) -> dict[str, Any]:
    """Clients leave at random: before they are answered, after a few pieces, in the middle of what they send."""
    counts: Counter[str] = Counter()
    lock = threading.Lock()
    with serving(server) as server:
        pid, chance = server.worker_pid(), random.Random(seed)
        plan = [(chance.choice(("unanswered", "pieces", "half", "stays")), chance.randrange(1, 30)) for _ in range(requests)]

        def run() -> None:
            while True:
                with lock:
                    if not plan:
                        return
                    how, pieces = plan.pop()
                ended = _leave(server, how, pieces)
                with lock:
                    counts[f"{how}: {ended}"] += 1

        at_once([run] * clients)
        after = rest(server)
        # How long after a client left its request is no longer counted.
        freed_s = []
        for _ in range(8):
            _leave(server, "pieces", 3)
            start = time.monotonic()
            while server.status()["in_flight"]:
                time.sleep(0.002)
            freed_s.append(time.monotonic() - start)
        return {
            "clients": clients, "ended": dict(sorted(counts.items())), "left": after, "same_worker": server.worker_pid() == pid,
            "freed_ms": round(1000 * max(freed_s), 1),
        }  # fmt: skip


def _leave(server: Served, how: str, pieces: int) -> str:
    body = long_body(60 if how == "stays" else 400)
    if how == "stays":
        return client.ask(server.address, body, timeout_s=HANG_S).ended
    if how == "pieces":
        left = iter(range(pieces))
        return client.ask(server.address, body, timeout_s=HANG_S, on_piece=lambda _: next(left, None) is not None).ended
    host, port = server.address.split(":")
    data = json.dumps(body).encode()
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: {server.address}\r\nContent-Type: application/json\r\nContent-Length: "
    with socket.create_connection((host, int(port)), timeout=HANG_S) as raw:
        raw.sendall(f"{head}{len(data)}\r\n\r\n".encode() + (data[: len(data) // 2] if how == "half" else data))
        if how == "unanswered":
            time.sleep(pieces / 100)
    return "left"


def slow_readers(readers: int = 1, *, send_s: float = 3.0, tokens: int = 400, server: Served | None = None) -> dict[str, Any]:
    """Clients take nothing of large streams: others do not notice, memory is bounded, and they are cut after a time."""
    body = {**long_body(tokens), "n": CHOICES, "logprobs": True, "top_logprobs": 20}
    with serving(server, "--limit", f"send_s={send_s}") as server:
        quick = long_body(60)
        alone = client.ask(server.address, quick)
        first = rss_bytes(server.process.pid)
        sockets = [_silent(server, body) for _ in range(readers)]
        until(lambda: server.status()["in_flight"] >= CHOICES * readers, 10.0)
        beside = [client.ask(server.address, quick, timeout_s=HANG_S) for _ in range(3)]
        largest = rss_bytes(server.process.pid)
        until(lambda: not server.status()["in_flight"], HANG_S, every_s=0.1)
        largest = max(largest, rss_bytes(server.process.pid))
        time.sleep(2 * send_s)  # their answers are complete, and lie in front of them
        got = [_rest_of(raw) for raw in sockets]
        return {
            "readers": readers, "streams": CHOICES * readers, "send_s": send_s, "cut": sum(b"[DONE]" not in one for one in got),
            "taken_mib": round(max(map(len, got)) / 2**20, 2), "others": [asked.ended for asked in beside],
            "others_ttft_ms": [round(1000 * (asked.ttft_s or 0)) for asked in beside],
            "alone_ttft_ms": round(1000 * (alone.ttft_s or 0)), "grown_mib": round((largest - first) / 2**20, 1),
            "left": rest(server),
        }  # fmt: skip


def _rest_of(raw: socket.socket) -> bytes:
    """Return what a connection still holds, and close it."""
    raw.settimeout(HANG_S)
    found = b""
    with raw:
        try:
            while piece := raw.recv(2**16):
                found += piece
        except OSError:
            pass  # cut in the middle
    return found


def _silent(server: Served, body: Mapping[str, Any]) -> socket.socket:
    """Ask for something and read nothing of it."""
    host, port = server.address.split(":")
    raw = socket.socket()
    raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    raw.connect((host, int(port)))
    data = json.dumps(body).encode()
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: {server.address}\r\nContent-Type: application/json\r\n"
    raw.sendall(f"{head}Content-Length: {len(data)}\r\n\r\n".encode() + data)
    return raw


# The server -----------------------------------------------------------------------------------------------------------


def port_in_use(*, server: Served | None = None) -> dict[str, Any]:
    """A second server on the same port says so and ends; the first goes on."""
    with serving(server) as server:
        command = [sys.executable, "-m", "trimtab", "serve", *DEMO, "--port", server.address.split(":")[1]]
        second = subprocess.run(command, capture_output=True, text=True, timeout=120)
        said = second.stderr.strip().splitlines()[-1]
        return {"exit_code": second.returncode, "said": said, "first_is_ready": server.is_ready()}


def told_to_end(clients: int = 8, *, grace_s: float = 30.0, tokens: int = 150) -> dict[str, Any]:
    """SIGTERM while clients are being answered: they get their answers, or an error with a name once the grace time is over."""
    tally, late = Tally(), Tally()
    begun = threading.Semaphore(0)
    with Served([*DEMO, "--grace", str(grace_s)]) as server:

        def run() -> None:
            first = iter([begun.release])
            body = long_body(tokens)
            tally.add(body, client.ask(server.address, body, timeout_s=HANG_S, on_piece=lambda _: next(first, bool)() or True))

        threads = [threading.Thread(target=run, daemon=True) for _ in range(clients)]
        for thread in threads:
            thread.start()
        for _ in threads:
            if not begun.acquire(timeout=HANG_S):
                raise RuntimeError("a client was not answered")
        start = time.monotonic()
        server.process.send_signal(signal.SIGTERM)
        until(lambda: not server.is_ready(), 5.0)
        body = long_body(8)
        late.add(body, client.ask(server.address, body))
        for thread in threads:
            thread.join(HANG_S)
        code = server.process.wait(grace_s + 30)
        took_s = time.monotonic() - start
        return {
            "clients": clients, "grace_s": grace_s, "running": tally.shown(), "new": late.shown(), "exit_code": code,
            "took_s": round(took_s, 1), "worker_is_gone": server.worker_pid() is None,
        }  # fmt: skip


def table(scenes: Mapping[str, Any]) -> str:
    """Return the docs' table of a run, as text between its marks."""
    dead, retry, full, host = (scenes[name] for name in ("killed", "killed_retry", "out_of_memory", "host_memory"))
    bad, left, slow, port = (scenes[name] for name in ("bad_adapters", "leaving", "slow_readers", "port_in_use"))
    end, late = scenes["told_to_end"], scenes["told_to_end_late"]
    kinds = Counter(name.split(": ")[1] for name, count in left["ended"].items() for _ in range(count))
    lines = [
        ("kill -9 of the worker", f"{dead['kills']} times under {dead['clients']} clients, at random moments", _said(dead)
         + f"; restart {dead['back_s']['p50']:.1f} s (median), {dead['back_s']['max']:.1f} s maximum"),
        ("the same with `--retry`", f"{retry['kills']} times under {retry['clients']} clients", _said(retry)),
        ("out of GPU memory during a prompt", f"every prompt of one adapter of three, {full['clients']} clients",
         f"{_said(full['that_ran_out'])}; others: {_said(full['others'])}; the same worker"),
        ("out of host memory", f"{host['pixels'] // 10**6} million pixels, {host['that_ran_out']['requests']} times, "
         "with no memory left for it", f"{_said(host['that_ran_out'])}; others: {_said(host['others'])}; the same worker"),
        ("damaged adapters loaded at run time", ", ".join(bad["refused"]),
         f"all {len(bad['refused'])} refused with the reason, an intact one loaded; others: {_said(bad['others'])}"),
        ("client disconnects", f"{sum(left['ended'].values())} requests of {left['clients']} clients: before an answer, during "
         "it, in the middle of the body", f"{kinds['left']} disconnected, {kinds['complete']} were answered; freed within "
         f"{left['freed_ms']:.0f} ms; no leak"),
        ("clients that do not read", f"{slow['streams']} large streams", f"server grew by {slow['grown_mib']:.0f} MiB, others "
         f"were answered; {slow['cut']} of {slow['readers']} connections cut after {slow['send_s']:.0f} s (`send_s`)"),
        ("a port in use", "a second server", f"exit code {port['exit_code']}, the port named; the first server continues"),
        ("SIGTERM", f"{end['clients']} clients being answered", f"{_said(end['running'])}; a new request: "
         f"{_names(end['new'])}; exit code {end['exit_code']}"),
        ("SIGTERM, grace time too short", f"{late['clients']} clients being answered, {late['grace_s']} s",
         f"{_said(late['running'])}; exit code {late['exit_code']}"),
    ]  # fmt: skip
    head = ["| fault | how often | what happened |", "|---|---|---|"]
    return "\n".join([*head, *(f"| {' | '.join(line)} |" for line in lines)])


def section(scenes: Mapping[str, Any], soak: Mapping[str, Any]) -> str:
    """Return what the docs say of a run, with its table."""
    abouts = [scene["environment"] for scene in scenes.values()]
    loads = sorted(about["load_before"] for about in abouts)
    passing = soak["done"].get("adapter: complete", 0)
    run = (
        f"From a run of `python -m bench.faults` on the demo model, on {abouts[0]['cpu_count']} cores of a CPU ([all "
        'counts](../bench/results/faults.json)). "Otherwise" counts what must not happen: a broken connection, a client that '
        "waited two minutes for nothing, an answer that differs from the one before the fault. A restart starts Python and "
        "reads the model, which takes seconds of one core. The load average was "
        f"{loads[0]:.1f} to {loads[-1]:.1f} when the scenes began."
    )
    memory = (
        f"Memory: in {soak['minutes']:g} minutes after a warm-up of {soak['warm_minutes']:g}, with {soak['requests']} requests "
        f"of all kinds, client disconnects, refused requests, {soak['swaps']} adapter swaps and {passing} adapters loaded "
        f"and unloaded, the API process went {_grown(soak['growth']['api'])} and the worker "
        f"{_grown(soak['growth']['worker'])} ([samples](../bench/results/soak.json))."
    )
    return "\n\n".join([table(scenes), *(textwrap.fill(text, 120, break_long_words=False) for text in (run, memory))]) + "\n"


def _grown(found: Mapping[str, float]) -> str:
    return f"from {found['first_mib']:.1f} to {found['last_mib']:.1f} MiB ({found['percent']:+.2f} %)"


def write_docs(page: Path, scenes: Mapping[str, Any], soak: Mapping[str, Any]) -> None:
    """Put the section between the page's marks."""
    before, _, rest = page.read_text(encoding="utf-8").partition("<!-- faults -->\n")
    _, _, after = rest.partition("<!-- /faults -->\n")
    text = f"{before}<!-- faults -->\n{section(scenes, soak)}<!-- /faults -->\n{after}"
    page.write_text(text, encoding="utf-8", newline="\n")


def _said(tally: Mapping[str, Any]) -> str:
    bad = sum(tally[name] for name in ("hang", "broken", "different", "nameless"))
    errors = f", {tally['error']} errors ({_names(tally)})" if tally["error"] else ""
    return f"{tally['requests']} requests: {tally['complete']} complete{errors}, {bad} otherwise"


def _names(tally: Mapping[str, Any]) -> str:
    return ", ".join(f"`{name}`" for name in tally["errors"])


Scene = Callable[[argparse.Namespace], dict[str, Any]]
SCENES: dict[str, Scene] = {
    "killed": lambda given: killed(given.kills, given.clients, limit_s=given.limit_s),
    "killed_retry": lambda given: killed(max(1, given.kills // 10), given.clients, retry=True, seed=1, limit_s=given.limit_s / 5),
    "out_of_memory": lambda given: out_of_memory(20.0, given.clients),
    "host_memory": lambda given: host_memory(),
    "bad_adapters": lambda given: bad_adapters(),
    "leaving": lambda given: leaving(1000, given.clients),
    "slow_readers": lambda given: slow_readers(),
    "port_in_use": lambda given: port_in_use(),
    "told_to_end": lambda given: told_to_end(given.clients // 4),
    "told_to_end_late": lambda given: told_to_end(given.clients // 4, grace_s=0.5, tokens=400),
}


def about() -> dict[str, Any]:
    load = round(os.getloadavg()[0], 2)
    return environment("cpu", device="cpu", system=platform.system(), load_before=load, trimtab=trimtab.__version__)


def run_scenes(scenes: Mapping[str, Scene], given: argparse.Namespace, *, note: str | None = None, **more: Any) -> None:
    """Run the scenes that are asked for and save each as it ends; the others of the file stay. more: what the file says too."""
    done: dict[str, Any] = saved(given.save).get("scenes", {})
    for name in given.only:
        start, where = time.monotonic(), about()
        try:
            found = scenes[name](given)
        except Exception as exc:
            found = {"failed": f"{type(exc).__name__}: {exc}"[:2000]}
        done[name] = {**found, "wall_s": round(time.monotonic() - start, 1), "environment": where}
        done[name] |= {} if note is None else {"note": note}
        print(json.dumps({name: done[name]}), flush=True)
        save(given.save, {"model": "demo", **more, "scenes": done})


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--clients", type=int, default=32)
    parser.add_argument("--limit-s", type=float, default=3600.0, help="no more kills after so long")
    parser.add_argument("--only", nargs="*", choices=list(SCENES), default=list(SCENES))
    parser.add_argument("--docs", type=Path, help="put what --save and soak.json beside it hold between this page's marks")
    given = parser.parse_args()
    if given.docs:
        write_docs(given.docs, saved(given.save)["scenes"], saved(given.save.parent / "soak.json"))
        return
    run_scenes(SCENES, given)


if __name__ == "__main__":
    main()
