"""The report of `trimtab doctor http://...`: the server, the known adapter bugs that apply to it, the first checks."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from trimtab.doctor.servers.identify import Identity, identify
from trimtab.doctor.servers.known import APPLIES, FIXED, LATER, MAY_APPLY, MERGED, SERVERS, Server, ServerBug
from trimtab.verification.server.client import Client, check_url

DEADLINE_S = 30.0
GENERAL = (
    "send a model name that the server does not have: a server that still answers does not select by name",
    "send base and adapter the same question at temperature 0: equal answers on many questions mean that the adapter is ignored",
    "run trimtab: trimtab verify MODEL --adapter NAME=PATH --against ADDRESS --remote-model NAME --remote-base BASE",
)


@dataclass(frozen=True)
class ServerReport:
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

    def __str__(self) -> str:
        identity = self.identity
        name = f"{identity.kind} {identity.version or 'of unknown release'}" if identity.kind else "an unknown server"
        lines = [f"server    {name} ({identity.why})"]
        lines.append(f"models    {', '.join(identity.models) or 'none listed'}")
        if identity.adapters:
            lines.append(f"adapters  {', '.join(identity.adapters)}")
        titles = {APPLIES: "applies to this release", MAY_APPLY: "may apply: check these first", MERGED: MERGED}
        for standing, title in titles.items():
            bugs = self.bugs(standing)
            if bugs:
                lines += ["", f"{title}:", *(line for bug in bugs for line in _bug_lines(bug))]
        for standing, title in ((FIXED, "fixed in this release"), (LATER, "came with a later release")):
            bugs = self.bugs(standing)
            if bugs:
                lines += ["", f"{title}:", *(_short_line(bug, standing) for bug in bugs)]
        return "\n".join([*lines, "", "check first:", *(f"  {place}. {text}" for place, text in enumerate(self.checks, 1))])


def _bug_lines(bug: ServerBug) -> list[str]:
    seen = f"; reported with {bug.seen}" if bug.seen else ""
    fault = f"; verify calls it {bug.fault!r}" if bug.fault else ""
    return [
        f"  {bug.id:<4} {bug.title}",
        f"       when: {bug.when}{seen}{fault}",
        f"       do: {bug.way_round}",
        f"       {bug.state} ({bug.read}): {' '.join(bug.sources)}",
    ]


def _short_line(bug: ServerBug, standing: str) -> str:
    first = f"fixed in {bug.fixed_in}" if standing == FIXED else f"since {bug.since}"
    return f"  {bug.id:<4} {bug.title} ({first}: {bug.evidence})"


def examine(url: str, *, key: str | None = None, transport: Any = None) -> ServerReport:
    """Return the report on a server. Errors: RequestError if it does not answer."""
    root = check_url(url, "url").removesuffix("/v1")
    client = Client(root, key=key, deadline_s=DEADLINE_S, transport=transport, field="url")
    identity = identify(client)
    server = next((one for one in SERVERS if one.name == identity.kind), None)
    return ServerReport(root, identity, server)
