"""What one request that computes as much as one may does to the first token of a chat: a scene of `bench.attackers`."""

from __future__ import annotations

import json
import os
import threading
import time
from contextlib import closing, suppress
from http.client import HTTPConnection, HTTPException
from typing import Any

from bench import client
from bench.served import DEMO, Served

QUESTION = client.chat_body("How are you?", model="style", max_tokens=4)
EMBEDDED = 2048
KEYS = ("attacker", "normal")


def scored_body(context_tokens: int) -> tuple[str, dict[str, Any]]:
    """Return the route and the body of the largest request for the log-probabilities of prompts."""
    prompt = [100 + number % 1500 for number in range(context_tokens - 2)]
    return "/v1/completions", {"model": "demo", "prompt": [prompt] * 8, "max_tokens": 1, "prompt_logprobs": 20}


def embedded_body(context_tokens: int) -> tuple[str, dict[str, Any]]:
    """Return the route and the body of a request for embeddings of many texts, together as long as a body may be."""
    text = "cat " * min(context_tokens // 2, 240)
    return "/v1/embeddings", {"model": "demo", "input": [text] * EMBEDDED}


def _compute(address: str, path: str, body: dict[str, Any], headers: dict[str, str], found: dict[str, Any]) -> None:
    """Send one large request; `found` gets its status, seconds and bytes unless the server ends first."""
    start = time.perf_counter()
    connection = HTTPConnection(address, timeout=3600)
    with suppress(OSError, HTTPException), closing(connection):
        connection.request("POST", path, json.dumps(body), {"Content-Type": "application/json", **headers})
        answer = connection.getresponse()
        found |= {"status": answer.status, "bytes": len(answer.read()), "seconds": round(time.perf_counter() - start, 1)}


def computed(seconds: float = 20.0) -> dict[str, Any]:
    """Return the first token of a chat, quiet and beside one large request for `seconds`; `unanswered` had none in a minute."""
    result: dict[str, Any] = {}
    for context_tokens in (512, 8192):
        for keys in ((), KEYS):
            for name, make in (("prompt_logprobs", scored_body), ("embeddings", embedded_body)):
                shown = f"{name}, context {context_tokens}, {'keys' if keys else 'no keys'}"
                result[shown] = _beside(context_tokens, keys, *make(context_tokens), seconds)
    return result


def _beside(context_tokens: int, keys: tuple[str, ...], path: str, body: dict[str, Any], seconds: float) -> dict[str, Any]:
    arguments = [*DEMO, "--context", str(context_tokens), "--limit", f"embeddings={EMBEDDED}"]
    for key in keys:
        arguments += ["--api-key", key]
    attacker, normal = ({"Authorization": f"Bearer {key}"} for key in keys or ("", ""))
    with Served(arguments) as server:
        firsts: dict[str, list[float | None]] = {}
        ended: dict[str, Any] = {}
        large = threading.Thread(target=_compute, args=(server.address, path, body, attacker, ended), daemon=True)
        client.ask(server.address, QUESTION, headers=normal)
        for turn in ("quiet", "beside"):
            if turn == "beside":
                large.start()
                time.sleep(0.3)
            firsts[turn], end = [], time.monotonic() + seconds
            while time.monotonic() < end and (turn == "quiet" or large.is_alive()):
                firsts[turn].append(client.ask(server.address, QUESTION, headers=normal).ttft_s)
                time.sleep(0.05)
        request = dict(ended) or "was still running"
        figures = {
            turn: {
                "count": len(values), "unanswered": values.count(None),
                **(client.percentiles([one for one in values if one is not None]) or {}),
            }
            for turn, values in firsts.items()
        }  # fmt: skip
    return {**figures, "request": request, "load": round(os.getloadavg()[0], 1)}
