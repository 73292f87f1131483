"""What clients notice of another one that sends schemas made to cost: their first tokens, and the processes that compile.

Scene "grammars" of `python -m bench.attackers`; `python -m bench.grammar_attacks` runs it alone. Two normal clients ask for text
and for JSON of a schema. In turns they are alone, or beside one attacker of another address who sends each attack over and over:

refused: the 228 bytes of allOf with seven multipleOf, multipleOf 99991, twenty of them, a counted repeat of a counted repeat.
taken: a schema that has the most of four keywords and compiles for seconds, a multipleOf of the largest size, wide unions.
left: the same schema, and the client leaves after a second: how long the process that compiles it lives on.

Linux: it reads /proc, and the attacker has the address 127.0.0.2.
"""

from __future__ import annotations

import json
import threading
import time
from collections import Counter
from contextlib import suppress
from typing import Any

from bench import client
from bench.served import DEMO, Served, _children, _command_of, rss_bytes
from trimtab.serve.grammar.prover import MODULE

ATTACKER = "127.0.0.2"
SCHEMA = {
    "type": "object", "properties": {"shape": {"enum": ["star", "square"]}, "count": {"type": "integer"}},
    "required": ["shape", "count"], "additionalProperties": False,
}  # fmt: skip
LEAVE_AFTER_S, LEFT_TIMES = 1.0, 5


def _ask(**fields: Any) -> dict[str, Any]:
    return {"model": "demo", "max_tokens": 40, "messages": [{"role": "user", "content": "a"}], **fields}


def _held_to(schema: dict[str, Any]) -> dict[str, Any]:
    return _ask(response_format={"type": "json_schema", "json_schema": {"name": "a", "schema": schema}})


def _named(*schemas: dict[str, Any]) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": {f"p{i}": one for i, one in enumerate(schemas)},
        "required": [f"p{i}" for i in range(len(schemas))],
    }


def _slow(number: int = 0) -> dict[str, Any]:
    """A schema that has the most of several keywords. number: of otherwise the same ones."""
    options = {"type": "object", "properties": {f"{i:x}": {} for i in range(2048)}}
    ranges = [{"type": "integer", "minimum": -(10**12) - i, "maximum": 10**12 + i} for i in range(250)]
    unions = {"allOf": [{"anyOf": [{"type": "integer", "minimum": i + j} for j in range(10)]} for i in range(4)]}
    return _held_to(_named(options, *ranges, unions, unions, {"type": "integer", "multipleOf": 49900 - number}))


ALL_OF = [{"multipleOf": value} for value in (3, 7, 11, 13, 17, 19, 23)]
ATTACKS: dict[str, dict[str, Any]] = {
    "allOf of seven multipleOf": _held_to(_named({"type": "integer", "allOf": ALL_OF})),
    "multipleOf 99991": _held_to({"type": "integer", "multipleOf": 99991}),
    "twenty times multipleOf 99991": _held_to(_named(*[{"type": "integer", "multipleOf": 99991}] * 20)),
    "a counted repeat of a counted repeat": _held_to({"type": "string", "pattern": "^(a{1000}){1000}$"}),
    "a union of 250 arrays": _held_to({"anyOf": [{"type": "array", "items": {}, "minItems": 9}] * 250}),
    "a multipleOf of the largest size": _held_to({"type": "integer", "multipleOf": 49999}),
}
SLOW = _slow()


def post(address: str, body: dict[str, Any], timeout_s: float = 60.0) -> str:
    """Send a request from the attacker's address and return its status, or what broke; "left" where nothing came in time."""
    asked = client.ask(address, body, timeout_s=timeout_s, source=ATTACKER)
    return str(asked.status) if asked.status else "left" if asked.ended == "hang" else asked.error


def compilers(server: Served) -> list[int]:
    """The processes that compile grammars."""
    worker = server.worker_pid()
    return [] if worker is None else [pid for pid in _children(worker) if MODULE in _command_of(pid)]


class Turn:
    """Normal clients for some seconds; their first tokens, and the most memory of the worker and of the processes that compile."""

    def __init__(self) -> None:
        self.first_s: dict[str, list[float]] = {"text": [], "json": []}
        self.ended: Counter[str] = Counter()
        self.worker_bytes = self.compiler_bytes = 0

    def run(self, server: Served, seconds: float) -> None:
        end = time.monotonic() + seconds
        bodies = {
            "text": client.chat_body("How are you?", model="demo", max_tokens=4),
            "json": {**_held_to(SCHEMA), "stream": True},
        }

        def ask(kind: str) -> None:
            while time.monotonic() < end:
                answer = client.ask(server.address, bodies[kind], timeout_s=60)
                self.ended[f"{kind}: {answer.ended} {answer.error or ''}".strip()] += 1
                if answer.ttft_s is not None:
                    self.first_s[kind].append(answer.ttft_s)

        threads = [threading.Thread(target=ask, args=(kind,), daemon=True) for kind in bodies]
        for thread in threads:
            thread.start()
        while any(thread.is_alive() for thread in threads):
            self.worker_bytes = max(self.worker_bytes, server.resident_bytes()[1])
            self.compiler_bytes = max([self.compiler_bytes, *map(rss_bytes, compilers(server))])
            time.sleep(0.05)

    def shown(self) -> dict[str, Any]:
        first = {f"first_{kind}_s": client.percentiles(values) for kind, values in self.first_s.items()}
        mib = {"worker_mib": self.worker_bytes / 2**20, "compiler_mib": self.compiler_bytes / 2**20}
        return {"ended": dict(sorted(self.ended.items())), **first, **{name: round(one, 1) for name, one in mib.items()}}


def _beside(server: Served, bodies: dict[str, dict[str, Any]], turn: Turn, seconds: float, got: Counter[str]) -> None:
    over = threading.Event()

    def attack() -> None:
        while not over.is_set():
            for name, body in bodies.items():
                got[f"{name}: {post(server.address, body)}"] += 1

    thread = threading.Thread(target=attack, daemon=True)
    thread.start()
    turn.run(server, seconds)
    over.set()
    thread.join(60)


def _left(server: Served) -> list[float]:
    """Return how long processes lived on after the client of their grammar had left."""
    lived = []
    for number in range(LEFT_TIMES):
        before = set(compilers(server))
        assert (got := post(server.address, _slow(number + 1), LEAVE_AFTER_S)) == "left", got
        start = time.monotonic()
        while set(compilers(server)) >= before and time.monotonic() - start < 10:
            time.sleep(0.005)
        lived.append(round(time.monotonic() - start, 3))
        time.sleep(3.0)  # another one starts
    return lived


def grammars(seconds: float = 20.0, turns: int = 2) -> dict[str, Any]:
    """Return what normal clients saw, quiet and beside each kind of attack, and how soon processes end."""
    with Served(DEMO) as server:
        client.ask(server.address, {**_held_to(SCHEMA), "stream": True})
        kinds = {"refused_or_quick": ATTACKS, "slow": {"a schema with the most of four keywords": SLOW}}
        seen, got = {name: Turn() for name in ("quiet", *kinds)}, Counter[str]()
        for _ in range(turns):
            seen["quiet"].run(server, seconds)
            for name, bodies in kinds.items():
                _beside(server, bodies, seen[name], seconds, got)
        shown = {name: turn.shown() for name, turn in seen.items()}
        lived_s = _left(server)
        with suppress(OSError):
            pids = compilers(server)
        return {
            "seconds": seconds, "turns": turns, **shown, "attacks": dict(sorted(got.items())), "lived_on_s": lived_s,
            "processes": len(pids), "log_bytes": len(server.log.encode()),
        }  # fmt: skip


if __name__ == "__main__":
    print(json.dumps(grammars(6.0, 1), indent=1))
