"""The report of `trimtab doctor http://...`: the server, the known adapter bugs that apply to it, the first checks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from trimtab.doctor.servers.known import APPLIES, FIXED, LATER, MAY_APPLY, MERGED, SERVERS, Server, ServerBug
from trimtab.report.document import Block, Document, Facts, Heading
from trimtab.report.render import Report
from trimtab.verification.server.client import Client, Reply, check_url, plain

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


DEADLINE_S = 30.0
GENERAL = (
    "send a model name that the server does not have: a server that still answers does not select by name",
    "send base and adapter the same question at temperature 0: equal answers on many questions mean that the adapter is ignored",
    "run trimtab: trimtab verify MODEL --adapter NAME=PATH --against ADDRESS --remote-model NAME --remote-base BASE",
)


@dataclass(frozen=True)
class ServerReport(Report):
    """The server at an address, and the known facts about it."""

    url: str
    identity: Identity
    server: Server | None

    def bugs(self, standing: str) -> tuple[ServerBug, ...]:
        """Return the entries of one standing."""
        bugs = () if self.server is None else self.server.bugs
        return tuple(bug for bug in bugs if bug.standing(self.identity.version) == standing)

    @property
    def checks(self) -> tuple[str, ...]:
        return (*(() if self.server is None else self.server.checks), *GENERAL)

    def to_json(self) -> dict[str, Any]:
        """Return the report as JSON-ready values."""
        bugs = () if self.server is None else self.server.bugs
        return {
            "format": 1, "url": self.url, "server": asdict(self.identity), "checks": list(self.checks),
            "bugs": [asdict(bug) | {"standing": bug.standing(self.identity.version)} for bug in bugs],
        }  # fmt: skip

    def document(self) -> Document:
        """Return what it says: the server, the known bugs that apply to it, and the first checks."""
        identity = self.identity
        name = f"{identity.kind} {identity.version or 'of unknown release'}" if identity.kind else "an unknown server"
        rows = [("server", f"{name} ({identity.why})"), ("models", ", ".join(identity.models) or "none listed")]
        rows += [("adapters", ", ".join(identity.adapters))] if identity.adapters else []
        blocks: list[Block] = [Facts(rows)]
        titles = {APPLIES: "applies to this release", MAY_APPLY: "may apply: check these first", MERGED: MERGED}
        for standing, title in titles.items():
            bugs = self.bugs(standing)
            blocks += [Heading(title), Facts([row for bug in bugs for row in _bug_rows(bug)])] if bugs else []
        for standing, title in ((FIXED, "fixed in this release"), (LATER, "came with a later release")):
            bugs = self.bugs(standing)
            blocks += [Heading(title), Facts([_short_row(bug, standing) for bug in bugs])] if bugs else []
        checks = [(f"{place}.", text) for place, text in enumerate(self.checks, 1)]
        return Document("", [*blocks, Heading("check first"), Facts(checks)])


def _bug_rows(bug: ServerBug) -> list[tuple[str, str]]:
    seen = f"; reported with {bug.seen}" if bug.seen else ""
    fault = f"; verify calls it {bug.fault!r}" if bug.fault else ""
    return [
        (bug.id, bug.title), ("", f"when: {bug.when}{seen}{fault}"), ("", f"do: {bug.way_round}"),
        ("", f"{bug.state} ({bug.read}): {' '.join(bug.sources)}"),
    ]  # fmt: skip


def _short_row(bug: ServerBug, standing: str) -> tuple[str, str]:
    first = f"fixed in {bug.fixed_in}" if standing == FIXED else f"since {bug.since}"
    return bug.id, f"{bug.title} ({first}: {bug.evidence})"


def examine(url: str, *, key: str | None = None, transport: Any = None) -> ServerReport:
    """Return the report on a server. Errors: RequestError if it does not answer."""
    root = check_url(url, "url").removesuffix("/v1")
    client = Client(root, key=key, deadline_s=DEADLINE_S, transport=transport, field="url")
    identity = identify(client)
    server = next((one for one in SERVERS if one.name == identity.kind), None)
    return ServerReport(root, identity, server)
