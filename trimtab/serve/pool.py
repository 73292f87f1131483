"""The models behind the routes: one supervised worker each; models that do not fit together are swapped (slots.py)."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import replace
from functools import partial
from typing import Any

from trimtab.errors import RequestError, TrimtabError
from trimtab.process.redact import own_folders
from trimtab.serve.contract.errors import UnknownModelError, error_json, plain_error
from trimtab.serve.contract.job import Event, Job
from trimtab.serve.contract.settings import Settings
from trimtab.serve.scheduling.scheduler import DeadlineError
from trimtab.serve.slots import Member, Slots
from trimtab.serve.worker.registry import ServedModel, check_sharing, in_full
from trimtab.serve.worker.supervisor import Supervisor, events_of

# The worker enforces the deadline of its jobs; this is for jobs that never reach it.
DEADLINE_SLACK_S = 1.0
SEPARATOR = ":"


class Clock:
    """The time that one request has, waiting included. deadline_s: None is all the time there is. waited_s: used before."""

    def __init__(self, deadline_s: float | None, waited_s: float) -> None:
        self._deadline_s, self._began = deadline_s, time.monotonic() - waited_s

    @property
    def waited_s(self) -> float:
        return time.monotonic() - self._began

    async def limit(self, work: Any, where: str, *, slack_s: float) -> Any:
        """Return the result of work. Errors: DeadlineError when the time is over."""
        if self._deadline_s is None:
            return await work
        try:
            return await asyncio.wait_for(work, max(0.001, self._deadline_s - self.waited_s + slack_s))
        except asyncio.TimeoutError as exc:
            raise DeadlineError(self._deadline_s, where) from exc


class Pool:
    """Every model of a server, by name. together: the most workers at once. turn_s: how long a model may keep its slot while
    another one waits. All methods belong to one event loop."""

    def __init__(
        self, models: Sequence[ServedModel], settings: Settings, *, together: int = 1, turn_s: float = 30.0,
        make: Callable[..., Supervisor] = Supervisor,
    ) -> None:  # fmt: skip
        if together > 1 and len(models) == 1:
            raise RequestError("has no effect with one model", field="together", value=together)
        if not 1 <= together <= max(len(models), 1):
            raise RequestError(f"must be between 1 and {len(models)}", field="together", value=together)
        check_sharing(models, settings)
        self.settings = settings
        self.slots = Slots(together=together, turn_s=turn_s, queue_limit=settings.queue_limit)
        # Paths that no answer may contain.
        self.folders = folders_of(models, settings)
        self._members = self.slots.members
        for served in models:
            worker_settings = served.settings(settings.queue_limit, settings.limits)
            supervisor = make(worker_settings, retry=settings.retry, on_change=self.slots.changed)
            self._members[served.name] = Member(served, supervisor, dict(served.adapters))
        self._created = int(time.time())
        self.begin, self.start, self.refresh = self.slots.begin, self.slots.start, self.slots.refresh
        self.refuse_new, self.drain, self.stop = self.slots.refuse_new, self.slots.drain, self.slots.stop

    # Names ------------------------------------------------------------------------------------------------------------

    def resolve(self, model_id: str, *, field: str = "model") -> tuple[str, str | None]:
        """Return (model, adapter) of an id: a model's name, "model:adapter", or an adapter's name that only one model
        has. Instead of an adapter, a mix is accepted, such as "a:0.7+b:0.3". field: of the id in a request, for errors.

        An adapter with a configured weight uses that weight if the id has none. Errors: UnknownModelError; RequestError
        for an invalid mix.
        """
        if model_id in self._members:
            return model_id, None
        model, _, adapter = model_id.partition(SEPARATOR)
        if model in self._members and adapter:
            member = self._members[model]
            if member.has(adapter):
                return model, member.adapter_of(adapter, field)
        owners = [name for name, member in self._members.items() if model_id in member.adapters]
        owners = owners or [name for name, member in self._members.items() if member.has(model_id)]
        if len(owners) == 1:
            return owners[0], self._members[owners[0]].adapter_of(model_id, field)
        if owners:
            raise RequestError(
                "several models have an adapter of this name", field=field, value=model_id,
                allowed=[f"{name}{SEPARATOR}{model_id}" for name in owners],
            )  # fmt: skip
        raise UnknownModelError(model_id, [entry["id"] for entry in self.models()], field=field)

    def context_tokens(self, model: str) -> int:
        return self._members[model].served.request.context_tokens

    def most_jobs(self, model: str) -> int:
        """Return how many jobs its rows and its queue hold."""
        return self._members[model].rows + self.settings.queue_limit

    def takes(self, model: str) -> tuple[str, ...]:
        return self._members[model].takes

    def models(self) -> list[dict[str, Any]]:
        """Return every model and adapter in the form of /v1/models."""
        entries = []
        is_one = len(self._members) == 1
        for name, member in self._members.items():
            head: dict[str, Any] = {
                "object": "model", "created": self._created, "owned_by": "trimtab",
                "max_model_len": self.context_tokens(name),
            }  # fmt: skip
            # If the plan chose the head, answers may differ from those of another card.
            plan = member.supervisor.plan or {}
            if "execution" in plan:
                head["output_head"] = plan["execution"]["head"]
            if "kv" in plan.get("request", ()):
                head["kv"] = plan["request"]["kv"]
            entries.append({"id": name, **head, "root": name, "parent": None})
            for adapter in sorted(member.adapters):
                shown = adapter if is_one else f"{name}{SEPARATOR}{adapter}"
                entries.append({"id": shown, **head, "root": adapter, "parent": name})
        return entries

    def _one(self, model: str | None) -> Member:
        if model is None:
            if len(self._members) > 1:
                raise RequestError("several models are served: name one", field="model", allowed=list(self._members))
            return next(iter(self._members.values()))
        if model not in self._members:
            raise UnknownModelError(model, list(self._members))
        return self._members[model]

    # Work -------------------------------------------------------------------------------------------------------------

    async def submit(
        self, model: str, job: Job, on_dropped: Callable[[Mapping[str, Any]], None] | None = None
    ) -> AsyncIterator[Event]:
        """Yield the events of a job until it is done. Closing the iterator early cancels the job. Errors: TrimtabError.

        on_dropped: called later with the computed tokens of a cancelled job.
        """
        member, clock = self._members[model], Clock(job.deadline_s, job.waited_s)
        await clock.limit(self.slots.enter(member), "it waited for its model", slack_s=0.0)
        limit = partial(clock.limit, where="it was answered", slack_s=DEADLINE_SLACK_S)
        try:
            job = replace(job, waited_s=clock.waited_s)
            async with aclosing(events_of(member.supervisor, job, on_dropped=on_dropped, wait=limit)) as events:
                async for event in events:
                    yield event
        finally:
            self.slots.leave(member)
            if job.kind == "answer" and not member.is_counted:  # no other kind takes a step
                member.ask_numbers()

    async def load_adapter(self, model: str | None, name: str, path: str) -> None:
        """Load an adapter for a client, from below the server's adapter folder. Errors: those of the worker."""
        root = self.settings.adapter_root
        await self._load(model, name, path, None if root is None else str(root.resolve()))

    async def _load(self, model: str | None, name: str, path: str, root: str | None) -> None:
        member = self._one(model)
        if name in self._members:
            raise RequestError("is the name of a model", field="lora_name", value=name)
        if name in member.adapters:
            raise RequestError("an adapter of this name is loaded", field="lora_name", value=name)
        await self._call(member, "load_adapter", name=name, path=path, **({} if root is None else {"root": root}))
        member.adapters[name] = path

    async def unload_adapter(self, model: str | None, name: str) -> None:
        """Unload an adapter. Errors: UnknownModelError if it is not loaded, RequestError if it is being used or
        was named at the start."""
        member = self._one(model)
        if name not in member.adapters:
            loaded = sorted(set(member.adapters) - set(member.served.adapters))
            raise UnknownModelError(name, loaded, field="lora_name")
        if name in member.served.adapters:
            raise RequestError(
                "was named at the start of the server and stays", field="lora_name", value=name,
                hint="Only adapters that were loaded over HTTP can be unloaded over HTTP",
            )  # fmt: skip
        await self._call(member, "unload_adapter", name=name)
        member.adapters.pop(name, None)

    @property
    def names(self) -> Sequence[str]:
        """The names of the models."""
        return tuple(self._members)

    async def use(self, served: ServedModel) -> dict[str, list[str]]:
        """Load and unload adapters until a model has those in its present file. Adapters that clients loaded stay.

        Returns "model:adapter" under "changed" (another weight), "loaded" and "unloaded", under "needs_restart" names
        of other differences, and under "problems" why an adapter is not changed.
        """
        report: dict[str, list[str]] = {"changed": [], "loaded": [], "unloaded": [], "needs_restart": [], "problems": []}
        member = self._members.get(served.name)
        if member is None or _fixed(served) != _fixed(member.served) or _keeps_others(served, member.served):
            report["needs_restart"].append(f"models.{served.name}")
        if member is None:
            return report
        named, weights = dict(member.served.adapters), dict(member.served.weights)
        removed = [name for name, path in named.items() if served.adapters.get(name) != path]
        new = [name for name, path in served.adapters.items() if named.get(name) != path]
        for name in sorted(named.keys() - removed):
            if weights.get(name, 1.0) != served.weights.get(name, 1.0):
                weights[name] = served.weights.get(name, 1.0)
                report["changed"].append(f"{served.name}{SEPARATOR}{name}")
        member.served = replace(member.served, weights=dict(weights))
        for what, names in (("unload_adapter", removed), ("load_adapter", new)):
            for name in names:
                shown = f"{served.name}{SEPARATOR}{name}"
                try:
                    if what == "unload_adapter":
                        await self._call(member, what, name=name)
                        member.adapters.pop(name, None)
                        del named[name]
                        weights.pop(name, None)
                        report["unloaded"].append(shown)
                    elif name in named:  # the earlier one could not be unloaded: its problem is reported
                        continue
                    elif name in member.adapters:
                        raise RequestError("an adapter of this name is loaded", field="adapters", value=name)
                    else:
                        await self._load(served.name, name, in_full(served.adapters[name]), None)
                        named[name], weights[name] = served.adapters[name], served.weights.get(name, 1.0)
                        report["loaded"].append(shown)
                except TrimtabError as exc:
                    _, body = error_json(plain_error(exc), self.folders, is_admin=True)
                    report["problems"].append(f"{shown}: {body['error']['message']}")
                kept = tuple(name for name in member.served.kept if name in named)
                member.served = replace(member.served, adapters=dict(named), kept=kept, weights=dict(weights))
        return report

    async def _call(self, member: Member, what: str, **arguments: Any) -> Any:
        await self.slots.enter(member)
        try:
            await self.slots.ready(member)
            return await asyncio.wrap_future(member.supervisor.call(what, **arguments))
        finally:
            self.slots.leave(member)

    @property
    def in_flight(self) -> int:
        """How many requests are being answered."""
        return sum(member.in_flight for member in self._members.values())

    @property
    def failure(self) -> Mapping[str, Any] | None:
        """The error of a server without any usable model: none could ever be loaded. None for any other server."""
        supervisors = [member.supervisor for member in self._members.values()]
        if not supervisors or any(one.state != "failed" or one.plan is not None for one in supervisors):
            return None
        return supervisors[0].failure

    @property
    def is_ready(self) -> bool:
        """Whether a model answers now, or would after a start (one that was swapped out)."""
        return not self.slots.is_stopping and any(
            member.supervisor.state == "ready" or (member.supervisor.state == "stopped" and member.supervisor.plan is not None)
            for member in self._members.values()
        )

    def status(self) -> Mapping[str, Any]:
        """Return the current state of every model for the page and the metrics, without paths. plan: None before the first
        load. numbers: the last ones that its worker sent, none while no worker answers."""
        return {"models": [member.status(self.folders) for member in self._members.values()]}

    @property
    def phase(self) -> tuple[str, str]:
        """What the first model that is loading does now, and how far it is."""
        loading = (one.supervisor for one in self._members.values() if one.supervisor.state == "loading")
        return next((one.phase for one in loading), ("", ""))


def _fixed(served: ServedModel) -> ServedModel:
    """Return the settings of a model that no reload changes."""
    return replace(served, adapters={}, kept=(), weights={})


def _keeps_others(served: ServedModel, before: ServedModel) -> bool:
    """Whether a model's file pins other adapters than before, apart from removed adapters."""
    return set(served.kept) != {name for name in before.kept if name in served.adapters}


def folders_of(models: Sequence[ServedModel], settings: Settings) -> tuple[str, ...]:
    """Return every folder of a server, in every spelling."""
    paths = [path for one in models for path in (one.request.model, one.request.offload_dir, *one.adapters.values())]
    return own_folders([*paths, settings.adapter_root])
