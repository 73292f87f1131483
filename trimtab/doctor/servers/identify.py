"""The kind and release of the server at an address, from routes that only that kind has."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from trimtab.verification.server.client import Client, Reply, plain

TRIMTAB, VLLM, SGLANG, LLAMA_CPP, OLLAMA, TRANSFORMERS = ("trimtab", "vLLM", "SGLang", "llama.cpp", "Ollama", "transformers")
# Values of "owned_by" in a list of models.
_OWNERS = {
    "vllm": VLLM, "sglang": SGLANG, "llamacpp": LLAMA_CPP, "trimtab": TRIMTAB, "library": OLLAMA, "me": LLAMA_CPP,
}  # fmt: skip
MAX_MODELS = 200


@dataclass(frozen=True)
class Identity:
    """The identified server. kind: "" if unknown. why: the evidence. models: the server's list."""

    kind: str
    version: str | None
    why: str
    models: tuple[str, ...]
    adapters: tuple[str, ...] = ()


def identify(client: Client) -> Identity:
    """Return the kind of server. client: of the address without /v1. Errors: RequestError if nothing answers."""
    listed = client.get("/v1/models")
    models, owners, adapters = _models(listed)
    for kind, path, field in (
        (OLLAMA, "/api/version", "version"), (LLAMA_CPP, "/props", "build_info"), (SGLANG, "/server_info", "version"),
        (SGLANG, "/get_server_info", "version"), (VLLM, "/version", "version"),
    ):  # fmt: skip
        reply = client.get(path)
        version = _text(reply, field)
        if version is not None:
            if kind == LLAMA_CPP:
                adapters = _llama_adapters(client)
            return Identity(kind, version, f"GET {path} gives {field} {version}", models, adapters)
    for owner in owners:
        kind = _OWNERS.get(owner, "")
        if kind:
            return Identity(kind, None, f"its models are owned by {owner!r}", models, adapters)
    return Identity("", None, "no address of a known server answers", models, adapters)


def _text(reply: Reply, field: str) -> str | None:
    value = reply.value.get(field) if reply.status == 200 and isinstance(reply.value, Mapping) else None
    return plain(value, 80) if isinstance(value, str) and value else None


def _models(reply: Reply) -> tuple[tuple[str, ...], tuple[str, ...], tuple[str, ...]]:
    rows: Any = reply.value.get("data") if isinstance(reply.value, Mapping) else None
    entries: Sequence[Any] = rows[:MAX_MODELS] if isinstance(rows, list) else ()
    named = [row for row in entries if isinstance(row, Mapping) and isinstance(row.get("id"), str)]
    owners = [row["owned_by"] for row in named if isinstance(row.get("owned_by"), str)]
    # vLLM and trimtab report the base of an adapter.
    adapters = [plain(row["id"], 120) for row in named if isinstance(row.get("parent"), str) and row["parent"]]
    return tuple(plain(row["id"], 120) for row in named), tuple(dict.fromkeys(owners)), tuple(adapters)


def _llama_adapters(client: Client) -> tuple[str, ...]:
    reply = client.get("/lora-adapters")
    rows = reply.value[:MAX_MODELS] if isinstance(reply.value, list) else []
    return tuple(
        f"{plain(str(row.get('path')), 120)} (scale {plain(str(row.get('scale')), 20)})" for row in rows if isinstance(row, Mapping)
    )
