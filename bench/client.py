"""One client of a running server, over the standard library alone: what came back, when, and how it ended."""

from __future__ import annotations

import base64
import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from http.client import HTTPConnection, HTTPException
from typing import Any

TIMEOUT_S = 60.0


@dataclass
class Asked:
    """How one request ended. ended: "complete", "error" (one of the server's, named), "broken" (the connection ended first)
    or "hang" (nothing came for the time). status: 0 where none came. ttft_s: to the first piece of text.
    gaps_s: between pieces."""

    ended: str
    status: int = 0
    text: str = ""
    error: str = ""
    ttft_s: float | None = None
    total_s: float = 0.0
    gaps_s: list[float] = field(default_factory=list)
    prompt_tokens: int = 0
    completion_tokens: int = 0
    finish: str | None = None


def chat_body(
    prompt: str, *, model: str, max_tokens: int = 48, image: bytes | None = None, audio: bytes | None = None, **more: Any
) -> dict[str, Any]:
    """Return a streamed, greedy request with a picture (PNG) before its text and a sound (WAV) after it."""
    parts: list[dict[str, Any]] = [{"type": "text", "text": prompt}]
    if image is not None:
        url = "data:image/png;base64," + base64.b64encode(image).decode()
        parts.insert(0, {"type": "image_url", "image_url": {"url": url}})
    if audio is not None:
        data = base64.b64encode(audio).decode()
        parts.append({"type": "input_audio", "input_audio": {"data": data, "format": "wav"}})
    return {
        "model": model, "messages": [{"role": "user", "content": parts}], "max_tokens": max_tokens, "temperature": 0,
        "stream": True, "stream_options": {"include_usage": True}, **more,
    }  # fmt: skip


def ask(
    address: str, body: Mapping[str, Any], *, timeout_s: float = TIMEOUT_S, path: str = "/v1/chat/completions",
    on_piece: Callable[[str], bool] | None = None, headers: Mapping[str, str] | None = None, source: str = "",
) -> Asked:  # fmt: skip
    """Return how a request ended. on_piece: told each piece of text; when it returns False the client leaves, "left". source: the
    client's own address."""
    began = time.perf_counter()
    found = Asked("broken")
    connection = HTTPConnection(address, timeout=timeout_s, source_address=(source, 0) if source else None)
    try:
        connection.request("POST", path, json.dumps(body), {"Content-Type": "application/json", **(headers or {})})
        answer = connection.getresponse()
        found.status = answer.status
        if answer.getheader("Content-Type", "").startswith("text/event-stream"):
            _read_stream(answer, found, began, on_piece)
        else:
            _read_whole(answer.read(), found)
    except TimeoutError:
        found.ended = "hang"
    except (OSError, HTTPException, ValueError) as exc:
        found.ended, found.error = "broken", type(exc).__name__
    finally:
        connection.close()
        found.total_s = time.perf_counter() - began
    return found


def _read_stream(lines: Any, found: Asked, began: float, on_piece: Callable[[str], bool] | None) -> None:
    event, last = "", began
    for raw in lines:
        line = raw.decode().rstrip("\r\n")
        if line.startswith("event:"):
            event = line[6:].strip()
        if not line.startswith("data:"):
            continue
        data = line[5:].strip()
        if data == "[DONE]":
            found.ended = "complete"
            return
        value = json.loads(data)
        if event == "error" or "error" in value:
            found.ended, found.error = "error", _name(value["error"])
            return
        _take_usage(value.get("usage"), found)
        for choice in value["choices"]:
            found.finish = choice.get("finish_reason") or found.finish
            piece = choice["delta"].get("content") or ""
            if not piece:
                continue
            now = time.perf_counter()
            if found.ttft_s is None:
                found.ttft_s = now - began
            else:
                found.gaps_s.append(now - last)
            last = now
            found.text += piece
            if on_piece is not None and not on_piece(piece):
                found.ended = "left"
                return
    if found.finish is not None and found.completion_tokens:  # another server's: without [DONE]
        found.ended = "complete"


def _read_whole(raw: bytes, found: Asked) -> None:
    value = json.loads(raw)
    if "error" in value:
        found.ended, found.error = "error", _name(value["error"])
        return
    found.ended = "complete"
    _take_usage(value.get("usage"), found)
    if "choices" in value:
        choice = value["choices"][0]
        found.text, found.finish = choice["message"]["content"], choice["finish_reason"]


def _take_usage(usage: Mapping[str, Any] | None, found: Asked) -> None:
    if usage:
        found.prompt_tokens, found.completion_tokens = usage["prompt_tokens"], usage.get("completion_tokens", 0)


def _name(error: Any) -> str:
    if not isinstance(error, dict):  # another server's: its text
        return str(error)[:200]
    return str(error.get("class") or error.get("code") or "")


def get(address: str, path: str, *, timeout_s: float = 10.0) -> tuple[int, Any]:
    """Return (status, JSON or text) of a GET. Errors: OSError."""
    connection = HTTPConnection(address, timeout=timeout_s)
    try:
        connection.request("GET", path)
        answer = connection.getresponse()
        raw = answer.read()
        kind = answer.getheader("Content-Type", "")
        return answer.status, json.loads(raw) if kind.startswith("application/json") else raw.decode()
    finally:
        connection.close()


def percentiles(values: Sequence[float], *, digits: int = 4) -> dict[str, float] | None:
    """Return p50, p90, p99 and the largest of some values, None of none."""
    if not values:
        return None
    ordered = sorted(values)
    found = {f"p{part}": ordered[min(len(ordered) - 1, int(len(ordered) * part / 100))] for part in (50, 90, 99)}
    return {name: round(value, digits) for name, value in {**found, "max": ordered[-1]}.items()}
