"""The models behind the routes: one supervised worker each; models that do not fit together are swapped.

A model is started on its first request and stopped after its idle time. At most `together` workers exist at once. When
another model is requested, an idle one is stopped at once. A busy one keeps its slot for `turn_s` from its start, then
accepts no new requests, finishes its running ones, and is replaced by the model that has waited longest. So no model
starves, and a model is not loaded for each single request.

Only the keeper, one task, starts and stops workers; requests wait for it.
"""

from __future__ import annotations

import asyncio
import logging
import re
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

from trimtab.adapter_names import check_mix, is_mix, parse_mix
from trimtab.errors import RequestError, TrimtabError
from trimtab.process.redact import own_folders
from trimtab.serve.contract.errors import UnknownModelError, error_from_worker, plain_error
from trimtab.serve.contract.job import Event, Job
from trimtab.serve.contract.settings import Settings
from trimtab.serve.scheduling.scheduler import DeadlineError, QueueFullError, StoppingError
from trimtab.serve.worker.registry import ServedModel, check_sharing, in_full
from trimtab.serve.worker.supervisor import ModelFailedError, Supervisor

TICK_S = 0.5
NUMBERS_AFTER_S = 10.0
# A model that could not be loaded is not tried again for each request.
FAILED_S = 30.0
# The worker enforces the deadline of its jobs; this is for jobs that never reach it.
DEADLINE_SLACK_S = 1.0
SEPARATOR = ":"
LIVING = ("loading", "ready", "unresponsive", "restarting")

log = logging.getLogger("trimtab.serve")


class Clock:
    """The time that one request has, waiting included. deadline_s: None is all the time there is."""

    def __init__(self, deadline_s: float | None) -> None:
        self._deadline_s, self._began = deadline_s, time.monotonic()

    @property
    def left_s(self) -> float | None:
        if self._deadline_s is None:
            return None
        return max(0.001, self._deadline_s - (time.monotonic() - self._began))

    async def limit(self, work: Any, where: str, *, slack_s: float) -> Any:
        """Return the result of work. Errors: DeadlineError when the time is over."""
        if self._deadline_s is None:
            return await work
        left_s = self.left_s
        assert left_s is not None
        try:
            return await asyncio.wait_for(work, left_s + slack_s)
        except asyncio.TimeoutError as exc:
            raise DeadlineError(self._deadline_s, where) from exc


@dataclass(eq=False)
class _Member:
    """One model. in_flight: requests that have entered. waiting: those that wait to enter. wanted_since: the time since
    which any waits.
    """

    served: ServedModel
    supervisor: Supervisor
    adapters: dict[str, str]
    last_used: float = field(default_factory=time.monotonic)
    in_flight: int = 0
    waiting: int = 0
    wanted_since: float | None = None
    turn_began: float = 0.0
    is_leaving: bool = False
    failed_at: float | None = None
    numbers: Future[Any] | None = None
    # The last shown plan and its values, cached for frequent status requests.
    _shown: tuple[Mapping[str, Any] | None, dict[str, Any] | None] = (None, None)

    def shown_plan(self) -> dict[str, Any] | None:
        plan = self.supervisor.plan
        if plan is not self._shown[0]:
            self._shown = plan, shown_plan(plan)
        return self._shown[1]

    @property
    def is_living(self) -> bool:
        return self.supervisor.state in LIVING and not self.is_leaving

    @property
    def has_failed(self) -> bool:
        """Whether it could not be loaded recently."""
        if self.supervisor.state != "failed":
            self.failed_at = None
            return False
        self.failed_at = self.failed_at or time.monotonic()
        return time.monotonic() - self.failed_at < FAILED_S


class Pool:
    """Every model of a server, by name. together: the most workers at once. turn_s: how long a model may keep its slot
    while another one waits. All methods belong to one event loop.
    """

    def __init__(
        self, models: Sequence[ServedModel], settings: Settings, *, together: int = 1, turn_s: float = 30.0,
        make: Callable[..., Supervisor] = Supervisor,
    ) -> None:  # fmt: skip
        if together > 1 and len(models) == 1:
            raise RequestError("has no effect with one model", field="together", value=together)
        if not 1 <= together <= max(len(models), 1):
            raise RequestError(f"must be between 1 and {len(models)}", field="together", value=together)
        check_sharing(models, settings)
        self.settings, self._together, self._turn_s = settings, together, turn_s
        # Paths that no answer may contain.
        self.folders = folders_of(models, settings)
        self._members: dict[str, _Member] = {}
        self._loop: asyncio.AbstractEventLoop | None = None
        for served in models:
            worker_settings = served.settings(settings.queue_limit, settings.limits)
            supervisor = make(worker_settings, retry=settings.retry, on_change=self._on_change)
            self._members[served.name] = _Member(served, supervisor, dict(served.adapters))
        self._created = int(time.time())
        self._is_stopping = self._has_begun = False
        self._keeper: asyncio.Task[None] | None = None
        self._changed = asyncio.Event()

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
            if adapter in member.adapters or _names_adapter(adapter, member.adapters):
                return model, _adapter_of(member, adapter, field)
        owners = [name for name, member in self._members.items() if model_id in member.adapters]
        owners = owners or [name for name, member in self._members.items() if _names_adapter(model_id, member.adapters)]
        if len(owners) == 1:
            return owners[0], _adapter_of(self._members[owners[0]], model_id, field)
        if owners:
            raise RequestError(
                "several models have an adapter of this name", field=field, value=model_id,
                allowed=[f"{name}{SEPARATOR}{model_id}" for name in owners],
            )  # fmt: skip
        raise UnknownModelError(model_id, [entry["id"] for entry in self.models()], field=field)

    def context_tokens(self, model: str) -> int:
        return self._members[model].served.request.context_tokens

    def takes(self, model: str) -> tuple[str, ...]:
        return ("text", *self._members[model].served.supports)

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

    def _one(self, model: str | None) -> _Member:
        if model is None:
            if len(self._members) > 1:
                raise RequestError("several models are served: name one", field="model", allowed=list(self._members))
            return next(iter(self._members.values()))
        if model not in self._members:
            raise UnknownModelError(model, list(self._members))
        return self._members[model]

    # Start and end ----------------------------------------------------------------------------------------------------

    def begin(self) -> None:
        """Start the workers of the first models, as many as may run at once. Needs no event loop; a second call does
        nothing.
        """
        if self._has_begun:
            return
        self._has_begun = True
        for member in list(self._members.values())[: self._together]:
            self._start(member)

    async def start(self) -> None:
        """Start the first models if they are not started, without waiting for them, and give slots to waiting models."""
        self._loop = asyncio.get_running_loop()
        self.begin()
        self._keeper = asyncio.create_task(self._keep())

    def _start(self, member: _Member) -> None:
        member.turn_began = time.monotonic()
        member.supervisor.start()
        self._emit_all()

    def refuse_new(self) -> None:
        """Accept no new request from now on, including those that wait for their model's turn."""
        self._is_stopping = True
        self._emit_all()

    @property
    def in_flight(self) -> int:
        """How many requests are being answered."""
        return sum(member.in_flight for member in self._members.values())

    async def drain(self, grace_s: float) -> None:
        """Refuse new requests, let running answers end within a time limit, then stop every worker."""
        self.refuse_new()
        if self._keeper is not None:
            self._keeper.cancel()
            await asyncio.gather(self._keeper, return_exceptions=True)
        await asyncio.gather(*(asyncio.to_thread(member.supervisor.drain, grace_s) for member in self._members.values()))

    def stop(self) -> None:
        """Stop every worker now, from any thread: used when a server is requested to end twice."""
        for member in self._members.values():
            member.supervisor.stop()

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
        return not self._is_stopping and any(
            member.supervisor.state == "ready" or (member.supervisor.state == "stopped" and member.supervisor.plan is not None)
            for member in self._members.values()
        )

    def _on_change(self, state: str) -> None:
        """Handle a supervisor's change of state, on any of its threads."""
        if self._loop is not None:
            with suppress(RuntimeError):  # the loop has ended: nothing waits any more
                self._loop.call_soon_threadsafe(self._emit_all)

    def _emit_all(self) -> None:
        """Wake all waiters for a change, including the keeper."""
        self._changed.set()
        self._changed = asyncio.Event()

    # The keeper -------------------------------------------------------------------------------------------------------

    async def _keep(self) -> None:
        """Give slots to waiting models, stop idle ones, and request metrics regularly."""
        # Before Python 3.12, `wait_for` loses a cancellation that arrives together with its result, so the end is
        # requested twice.
        while not self._is_stopping:
            changed = self._changed
            try:
                await self._give_places()
                await self._stop_idle()
                self._ask_numbers()
            except Exception:
                log.exception("internal error while models were swapped")
                # A failure has changed a state, which would wake this loop at once.
                await asyncio.sleep(TICK_S)
            with suppress(asyncio.TimeoutError):
                await asyncio.wait_for(changed.wait(), TICK_S)

    async def _give_places(self) -> None:
        wanting = [m for m in self._members.values() if m.wanted_since is not None and not m.is_living and not m.has_failed]
        for member in sorted(wanting, key=lambda m: m.wanted_since or 0.0):
            living = [other for other in self._members.values() if other.is_living]
            if len(living) >= self._together:
                # An idle one, or one whose turn is over and whose work is done.
                free = [m for m in living if not m.in_flight and (not m.waiting or self._is_turn_over(m))]
                if not free:
                    return
                await self._stop(min(free, key=lambda other: other.last_used))
            self._start(member)

    async def _stop_idle(self) -> None:
        now = time.monotonic()
        for member in self._members.values():
            idle_s = member.served.idle_unload_s
            is_quiet = not member.in_flight and not member.waiting and member.supervisor.state == "ready"
            if idle_s is not None and is_quiet and now - member.last_used > idle_s:
                await self._stop(member)

    async def _stop(self, member: _Member) -> None:
        member.is_leaving = True  # no request enters from here on
        try:
            await asyncio.to_thread(member.supervisor.stop)
        finally:
            member.is_leaving = False
            self._emit_all()

    def _ask_numbers(self) -> None:
        now = time.monotonic()
        for member in self._members.values():
            is_busy = member.in_flight or now - member.last_used < NUMBERS_AFTER_S
            is_asked = member.numbers is not None and not member.numbers.done()
            if member.supervisor.state == "ready" and is_busy and not is_asked:
                member.numbers = member.supervisor.call("numbers")

    # Entering and leaving ---------------------------------------------------------------------------------------------

    async def _enter(self, member: _Member) -> None:
        """Wait for a model's slot and count one more request. Errors: StoppingError; QueueFullError; the error of its
        load.
        """
        if member.in_flight + member.waiting >= member.served.expected_rows + self.settings.queue_limit:
            raise QueueFullError(member.in_flight + member.waiting - member.served.expected_rows, _retry_after_s(member))
        member.waiting += 1
        member.wanted_since = member.wanted_since or time.monotonic()
        try:
            if not self._may_enter(member):
                self._emit_all()
            while not self._may_enter(member):
                await self._changed.wait()
            member.in_flight += 1
        finally:
            member.waiting -= 1
            if not member.waiting:
                member.wanted_since = None

    def _may_enter(self, member: _Member) -> bool:
        if self._is_stopping:
            raise StoppingError
        if member.has_failed:
            raise ModelFailedError(member.supervisor.failure)
        return member.is_living and not self._is_turn_over(member)

    def _is_turn_over(self, member: _Member) -> bool:
        """Whether a running model accepts no more requests: its time is over, and another one waits for a slot."""
        waits = any(
            other.wanted_since is not None and not other.is_living
            for other in self._members.values() if other is not member
        )  # fmt: skip
        return waits and time.monotonic() - member.turn_began >= self._turn_s

    def _leave(self, member: _Member) -> None:
        member.in_flight -= 1
        member.last_used = time.monotonic()
        self._emit_all()

    # Work -------------------------------------------------------------------------------------------------------------

    async def submit(
        self, model: str, job: Job, on_dropped: Callable[[Mapping[str, Any]], None] | None = None
    ) -> AsyncIterator[Event]:
        """Yield the events of a job until it is done. Closing the iterator early cancels the job. Errors: TrimtabError.

        on_dropped: called later with the computed tokens of a cancelled job.
        """
        member, clock = self._members[model], Clock(job.deadline_s)
        await clock.limit(self._enter(member), "it waited for its model", slack_s=0.0)
        loop = asyncio.get_running_loop()
        events: asyncio.Queue[Event] = asyncio.Queue()

        def take(event: Event) -> None:
            if event.kind != "dropped":
                events.put_nowait(event)
            elif on_dropped is not None:
                on_dropped(event.usage)

        def emit(event: Event) -> None:
            with suppress(RuntimeError):  # the loop has ended: nothing reads events any more
                loop.call_soon_threadsafe(take, event)

        is_over = False
        try:
            member.supervisor.submit(replace(job, deadline_s=clock.left_s), emit)
            while not is_over:
                event = await clock.limit(events.get(), "it was answered", slack_s=DEADLINE_SLACK_S)
                is_over = event.kind in ("done", "error")
                yield event
        finally:
            if not is_over:
                member.supervisor.cancel(job.id)
            self._leave(member)

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
                    report["problems"].append(
                        f"{shown}: {error_from_worker(plain_error(exc), self.folders)[1]['error']['message']}"
                    )
                kept = tuple(name for name in member.served.kept if name in named)
                member.served = replace(member.served, adapters=dict(named), kept=kept, weights=dict(weights))
        return report

    async def _call(self, member: _Member, what: str, **arguments: Any) -> Any:
        await self._enter(member)
        try:
            while member.supervisor.state != "ready":
                if member.supervisor.state == "failed":
                    raise ModelFailedError(member.supervisor.failure)
                if self._is_stopping:
                    raise StoppingError
                await self._changed.wait()
            return await asyncio.wrap_future(member.supervisor.call(what, **arguments))
        finally:
            self._leave(member)

    def status(self) -> Mapping[str, Any]:
        """Return the current state of every model for the page and the metrics, without paths. plan: None before the first
        load. numbers: none while no worker answers."""
        return {"models": [self._status(name, member) for name, member in self._members.items()]}

    @property
    def phase(self) -> tuple[str, str]:
        """What the first model that is loading does now, and how far it is."""
        loading = (one.supervisor for one in self._members.values() if one.supervisor.state == "loading")
        return next((one.phase for one in loading), ("", ""))

    def _status(self, name: str, member: _Member) -> dict[str, Any]:
        supervisor = member.supervisor
        is_ready, failure = supervisor.state == "ready", supervisor.failure
        plan = member.shown_plan()
        return {
            "name": name, "state": supervisor.state, "restarts": supervisor.restarts, "loading": supervisor.loading,
            "in_flight": member.in_flight, "waiting": member.waiting, "adapters": sorted(member.adapters),
            "named": sorted(member.served.adapters),
            "takes": self.takes(name), "numbers": supervisor.numbers if is_ready else {}, "plan": plan,
            "error": None if failure is None else error_from_worker(failure, self.folders)[1]["error"]["message"],
            "context_tokens": self.context_tokens(name), "tier_bytes": _tier_bytes(plan, is_loaded=is_ready),
        }  # fmt: skip


def _names_adapter(text: str, adapters: Mapping[str, str]) -> bool:
    """Whether a text that is no adapter name begins with one, like a mix."""
    return is_mix(text) and re.split(r"[:+]", text, maxsplit=1)[0].strip() in adapters


def _adapter_of(member: _Member, text: str, field: str) -> str:
    """Return the adapter or mix in a text, with the configured weights."""
    weights = parse_mix(text, field=field, weights=member.served.weights)
    for name in weights:
        if name not in member.adapters:
            raise UnknownModelError(name, sorted(member.adapters), field=field)
    return check_mix(weights, field=field)


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


def _retry_after_s(member: _Member) -> float:
    """Return the seconds until a slot is probably free: a typical answer's steps, or a load."""
    counts = member.supervisor.numbers.get("counts") or {}
    if member.supervisor.state != "ready" or not counts.get("steps"):
        return 5.0
    return min(60.0, max(1.0, counts["step_s"] / counts["steps"] * 64))


SHOWN = (
    "model_class", "execution_device", "gpu", "host", "gpu_peak_bytes", "gpu_budget_bytes", "host_peak_bytes",
    "host_budget_bytes", "disk_bytes", "held_adapters_limit_bytes", "media_reason",
)  # fmt: skip
COUNTED = ("gpu_bytes", "host_bytes", "disk_bytes")


def shown_plan(plan: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """Return the values of a plan's chart, None without a plan: bytes by modality and tier, budgets, and the request.
    Folders and rates of this machine are not included.
    """
    if not plan:
        return None
    placed: dict[tuple[str, str], dict[str, Any]] = {}
    for block in plan["placements"]:
        key = (block["part"], block["tier"])
        counted = placed.setdefault(key, {"part": key[0], "tier": key[1], **dict.fromkeys(COUNTED, 0)})
        for name in COUNTED:
            counted[name] += block[name]
    request = {name: plan["request"][name] for name in ("quant", "context_tokens", "batch", "images") if name in plan["request"]}
    return {**{name: plan[name] for name in SHOWN}, "placements": list(placed.values()), "request": request}


def _tier_bytes(plan: Mapping[str, Any] | None, *, is_loaded: bool) -> dict[str, int]:
    """Return the bytes of each tier's blocks on all devices: zero for a model that is not loaded."""
    by_tier: dict[str, int] = {}
    for block in (plan or {}).get("placements", ()):
        count = sum(block[name] for name in COUNTED)
        by_tier[block["tier"]] = by_tier.get(block["tier"], 0) + count * is_loaded
    return by_tier
