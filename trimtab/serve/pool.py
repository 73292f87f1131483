"""The models behind the routes: one supervised worker each, taking turns where they do not fit together.

A model is started when it is first asked for and stopped after its idle time. With `together` at 1 (several models on one
device), one runs at a time: another one's first request lets the running one finish what it has, within `turn_s`, then
they change places; whoever has waited longest is next.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from trimtab.errors import DeviceError, RequestError
from trimtab.serve.faults import UnknownModelError
from trimtab.serve.job import Event, Job
from trimtab.serve.registry import ServedModel
from trimtab.serve.settings import Settings
from trimtab.serve.supervisor import Supervisor

TICK_S = 0.5
SEPARATOR = ":"


@dataclass(eq=False)
class _Member:
    served: ServedModel
    supervisor: Supervisor
    adapters: dict[str, str]
    last_used: float = field(default_factory=time.monotonic)
    wanted_since: float | None = None
    in_flight: int = 0
    turn_began: float = 0.0
    changed: asyncio.Condition = field(default_factory=asyncio.Condition)


class Pool:
    """Every model of a server, by name. together: how many workers may live at once. turn_s: how long a model may keep its
    place while another one waits. All methods belong to one event loop."""

    def __init__(
        self, models: Sequence[ServedModel], settings: Settings, *, together: int = 1, turn_s: float = 30.0,
        make: Callable[..., Supervisor] = Supervisor,
    ) -> None:  # fmt: skip
        self.settings, self._together, self._turn_s = settings, together, turn_s
        self._members: dict[str, _Member] = {}
        for served in models:
            supervisor = make(served.settings(settings.queue_limit), retry=settings.retry)
            self._members[served.name] = _Member(served, supervisor, dict(served.adapters))
        self._is_stopping = False
        self._keeper: asyncio.Task[None] | None = None
        self._moving = asyncio.Lock()

    # Names ------------------------------------------------------------------------------------------------------------

    def resolve(self, model_id: str) -> tuple[str, str | None]:
        """Return (model, adapter) of an id: a model's name, "model:adapter", or an adapter's name that only one model has."""
        if model_id in self._members:
            return model_id, None
        model, _, adapter = model_id.partition(SEPARATOR)
        if model in self._members and adapter in self._members[model].adapters:
            return model, adapter
        owners = [name for name, member in self._members.items() if model_id in member.adapters]
        if len(owners) == 1:
            return owners[0], model_id
        if owners:
            raise RequestError(
                "several models have an adapter of this name", field="model", value=model_id,
                allowed=[f"{name}{SEPARATOR}{model_id}" for name in owners],
            )  # fmt: skip
        raise UnknownModelError(model_id, [entry["id"] for entry in self.models()])

    def context_tokens(self, model: str) -> int:
        return self._members[model].served.request.context_tokens

    def takes(self, model: str) -> tuple[str, ...]:
        return ("text", *self._members[model].served.supports)

    def models(self) -> list[dict[str, Any]]:
        """Return every model and adapter as /v1/models shows it."""
        found = []
        is_one = len(self._members) == 1
        for name, member in self._members.items():
            head = {"object": "model", "created": 0, "owned_by": "trimtab"}
            found.append({"id": name, **head, "root": name, "parent": None})
            for adapter in sorted(member.adapters):
                shown = adapter if is_one else f"{name}{SEPARATOR}{adapter}"
                found.append({"id": shown, **head, "root": adapter, "parent": name})
        return found

    # Life -------------------------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Start the first models, as many as may live together, without waiting for them."""
        for member in list(self._members.values())[: self._together]:
            member.supervisor.start()
            member.turn_began = time.monotonic()
        self._keeper = asyncio.create_task(self._keep())

    def refuse_new(self) -> None:
        """Take no new request from now on."""
        self._is_stopping = True

    async def drain(self, grace_s: float) -> None:
        """Refuse what is new, let what is being answered end within a time, then stop everything."""
        self.refuse_new()
        if self._keeper is not None:
            self._keeper.cancel()
        await asyncio.gather(
            *(asyncio.to_thread(member.supervisor.drain, grace_s) for member in self._members.values())
        )

    @property
    def is_ready(self) -> bool:
        """Whether a model answers now, or would after being started (an idle one that has been stopped)."""
        states = [member.supervisor.state for member in self._members.values()]
        return not self._is_stopping and any(
            state == "ready" or (state == "stopped" and member.supervisor.plan is not None)
            for state, member in zip(states, self._members.values(), strict=True)
        )

    async def _keep(self) -> None:
        """Stop what is idle, and ask for numbers now and then."""
        while True:
            await asyncio.sleep(TICK_S)
            now = time.monotonic()
            for member in self._members.values():
                if member.supervisor.state != "ready":
                    continue
                idle_s = member.served.idle_unload_s
                if idle_s is not None and not member.in_flight and now - member.last_used > idle_s:
                    async with self._moving:
                        if not member.in_flight:
                            await asyncio.to_thread(member.supervisor.stop)
                elif member.in_flight or now - member.last_used < 10:
                    member.supervisor.call("numbers")

    async def _enter(self, member: _Member) -> None:
        """Make sure that a model's worker lives, changing places with others if need be, and count one more request."""
        if self._is_stopping:
            raise DeviceError("the server is stopping", device="worker")
        if member.supervisor.state in ("ready", "loading", "restarting") and self._may_stay(member):
            member.in_flight += 1
            return
        member.wanted_since = member.wanted_since or time.monotonic()
        async with self._moving:
            if member.supervisor.state not in ("ready", "loading", "restarting"):
                await self._change_places(member)
                member.supervisor.start()
                member.turn_began = time.monotonic()
            member.wanted_since = None
            member.in_flight += 1

    def _may_stay(self, member: _Member) -> bool:
        """Whether a running model may take one more request: not when its turn is over and another one waits."""
        waits = any(other.wanted_since is not None for other in self._members.values() if other is not member)
        return not waits or time.monotonic() - member.turn_began < self._turn_s

    async def _change_places(self, member: _Member) -> None:
        living = [other for other in self._members.values() if other.supervisor.state not in ("stopped", "failed")]
        while len(living) >= self._together:
            # The one that has been quiet longest; one with work gets to finish it.
            oldest = min(living, key=lambda other: (other.in_flight > 0, other.last_used))
            while oldest.in_flight:
                async with oldest.changed:
                    await oldest.changed.wait()
            await asyncio.to_thread(oldest.supervisor.stop)
            living.remove(oldest)

    async def _leave(self, member: _Member) -> None:
        member.in_flight -= 1
        member.last_used = time.monotonic()
        async with member.changed:
            member.changed.notify_all()

    # Work -------------------------------------------------------------------------------------------------------------

    async def submit(self, model: str, job: Job) -> AsyncIterator[Event]:
        """Yield what a job is told until it is done; closing the iterator early cancels it. Errors: TrimtabError."""
        member = self._members[model]
        await self._enter(member)
        loop = asyncio.get_running_loop()
        told: asyncio.Queue[Event] = asyncio.Queue()

        def tell(event: Event) -> None:
            loop.call_soon_threadsafe(told.put_nowait, event)

        is_over = False
        try:
            member.supervisor.submit(job, tell)
            while not is_over:
                event = await told.get()
                is_over = event.kind in ("done", "error")
                yield event
        finally:
            if not is_over:
                member.supervisor.cancel(job.id)
            await asyncio.shield(self._leave(member))

    def _one(self, model: str | None) -> _Member:
        if model is None:
            if len(self._members) > 1:
                raise RequestError("several models are served; say which", field="model", allowed=list(self._members))
            return next(iter(self._members.values()))
        if model not in self._members:
            raise UnknownModelError(model, list(self._members))
        return self._members[model]

    async def load_adapter(self, model: str | None, name: str, path: str) -> None:
        """Load an adapter for clients to name. Errors: what the worker says of its files."""
        member = self._one(model)
        if name in self._members:
            raise RequestError("is the name of a model", field="lora_name", value=name)
        if name in member.adapters:
            raise RequestError("an adapter of this name is loaded", field="lora_name", value=name)
        await self._call(member, "load_adapter", name=name, path=path)
        member.adapters[name] = path

    async def unload_adapter(self, model: str | None, name: str) -> None:
        """Forget an adapter. Errors: RequestError if it is not loaded or being used."""
        member = self._one(model)
        if name not in member.adapters:
            raise RequestError(
                "no adapter of this name is loaded", field="lora_name", value=name, allowed=sorted(member.adapters)
            )
        await self._call(member, "unload_adapter", name=name)
        member.adapters.pop(name, None)

    async def _call(self, member: _Member, what: str, **arguments: Any) -> Any:
        await self._enter(member)
        try:
            await asyncio.to_thread(member.supervisor.wait_ready)
            return await asyncio.wrap_future(member.supervisor.call(what, **arguments))
        finally:
            await asyncio.shield(self._leave(member))

    def status(self) -> Mapping[str, Any]:
        """Return what the page and the metrics show of every model."""
        return {"models": [self._status(name, member) for name, member in self._members.items()]}

    def _status(self, name: str, member: _Member) -> dict[str, Any]:
        supervisor = member.supervisor
        plan = supervisor.plan
        return {
            "name": name, "state": supervisor.state, "restarts": supervisor.restarts, "loading": supervisor.loading,
            "in_flight": member.in_flight, "adapters": sorted(member.adapters), "takes": self.takes(name),
            "numbers": supervisor.numbers, "plan": plan, "error": (supervisor.failure or {}).get("message"),
            "context_tokens": self.context_tokens(name), "tier_bytes": None if plan is None else _tier_bytes(plan),
        }  # fmt: skip


def _tier_bytes(plan: Mapping[str, Any]) -> dict[str, int]:
    """Return the bytes of each tier's blocks, wherever they lie."""
    found: dict[str, int] = {}
    for block in plan["placements"]:
        count = block["gpu_bytes"] + block["host_bytes"] + block["disk_bytes"]
        found[block["tier"]] = found.get(block["tier"], 0) + count
    return found
