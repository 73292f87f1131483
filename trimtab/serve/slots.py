"""Which models have a worker now?"""

from __future__ import annotations

import asyncio
import logging
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

from trimtab.adapter_names import check_mix, is_mix, parse_mix
from trimtab.serve.contract.errors import UnknownModelError, error_json
from trimtab.serve.scheduling.scheduler import QueueFullError, StoppingError
from trimtab.serve.worker.registry import ServedModel
from trimtab.serve.worker.supervisor import FAILED_S, ModelFailedError, Supervisor

TICK_S = 0.5
# How long a reader of the status waits for its worker's numbers; then it gets the last ones.
NUMBERS_S = 0.5
# After such a reader, the keeper requests them at each tick for this time: the next reader's are a turn old at most.
LATE_S = 60.0
LIVING = ("loading", "ready", "unresponsive", "restarting")

log = logging.getLogger("trimtab.serve")


@dataclass(eq=False)
class Member:
    """One model. in_flight: requests that have entered. waiting: those that wait to enter. wanted_since: the time since
    which any waits. turn_began: when its worker was started. ready_since: when it was first seen to answer.
    """

    served: ServedModel
    supervisor: Supervisor
    adapters: dict[str, str]
    last_used: float = field(default_factory=time.monotonic)
    in_flight: int = 0
    waiting: int = 0
    wanted_since: float | None = None
    turn_began: float = 0.0
    ready_since: float | None = None
    is_leaving: bool = False
    failed_at: float | None = None
    numbers: Future[Any] | None = None
    asked_at: float = 0.0
    late_until: float = 0.0
    # The last shown plan and its values, cached for frequent status requests.
    _shown: tuple[Mapping[str, Any] | None, dict[str, Any] | None] = (None, None)

    def shown_plan(self) -> dict[str, Any] | None:
        plan = self.supervisor.plan
        if plan is not self._shown[0]:
            self._shown = plan, shown_plan(plan)
        return self._shown[1]

    @property
    def rows(self) -> int:
        """The rows of all its copies: the planned ones, before the first plan the most."""
        plan = self.supervisor.plan
        return self.served.expected_rows if not plan else self.served.copies * int(plan["request"]["batch"])

    @property
    def is_living(self) -> bool:
        return self.supervisor.state in LIVING and not self.is_leaving

    @property
    def failed_s(self) -> float:
        """The seconds until a model that could not be loaded is tried again; 0 if it may be started."""
        if self.supervisor.state != "failed":
            self.failed_at = None
            return 0.0
        self.failed_at = self.failed_at or time.monotonic()
        return max(0.0, self.failed_at + FAILED_S - time.monotonic())

    def start(self) -> None:
        """Start its worker, and its turn."""
        self.turn_began = time.monotonic()
        self.supervisor.start()

    async def stop(self) -> None:
        """Stop its worker. No request enters until it has stopped."""
        self.is_leaving = True
        try:
            await asyncio.to_thread(self.supervisor.stop)
        finally:
            self.is_leaving = False

    @contextmanager
    def waits(self) -> Iterator[None]:
        """Count a request that waits to enter, and that has entered if nothing is raised."""
        self.waiting += 1
        self.wanted_since = self.wanted_since or time.monotonic()
        try:
            yield
            self.in_flight += 1
        finally:
            self.waiting -= 1
            if not self.waiting:
                self.wanted_since = None

    def leave(self) -> None:
        """Count a request less."""
        self.in_flight -= 1
        self.last_used = time.monotonic()

    @property
    def idle_s(self) -> float:
        """The seconds since its last request ended or it became ready; 0 while it has or awaits one, or does not answer."""
        now = time.monotonic()
        self.ready_since = (self.ready_since or now) if self.supervisor.state == "ready" else None
        if self.ready_since is None or self.in_flight or self.waiting:
            return 0.0
        return now - max(self.last_used, self.ready_since)

    @property
    def is_counted(self) -> bool:
        """Whether its numbers have the time of a step, which a refusal needs."""
        return bool((self.supervisor.numbers.get("counts") or {}).get("steps"))

    @property
    def needs_numbers(self) -> bool:
        """Whether they are requested unread: for a long queue, before a step is counted, or where readers get them late."""
        # A worker that only embeds counts none: it is asked once a tick.
        is_first = self.in_flight > 0 and not self.is_counted and time.monotonic() - self.asked_at >= TICK_S
        is_full = self.in_flight + self.waiting > self.served.expected_rows
        return is_first or is_full or time.monotonic() < self.late_until

    def ask_numbers(self) -> Future[Any] | None:
        """Request its numbers, if they are not requested, and return them; None while no worker answers."""
        if self.supervisor.state != "ready":
            return None
        if self.numbers is None or self.numbers.done():
            self.asked_at = time.monotonic()
            self.numbers = self.supervisor.call("numbers")
        return self.numbers

    @property
    def retry_after_s(self) -> float:
        """The seconds until a slot is probably free: a typical answer's steps, or a load."""
        if self.supervisor.state != "ready" or not self.is_counted:
            return 5.0
        counts = self.supervisor.numbers["counts"]
        return min(60.0, max(1.0, counts["step_s"] / counts["steps"] * 64))

    def has(self, text: str) -> bool:
        """Whether a text is one of its adapters, or begins with one, like a mix."""
        return text in self.adapters or (is_mix(text) and re.split(r"[:+]", text, maxsplit=1)[0].strip() in self.adapters)

    def adapter_of(self, text: str, field: str) -> str:
        """Return the adapter or mix in a text, with the configured weights."""
        weights = parse_mix(text, field=field, weights=self.served.weights)
        for name in weights:
            if name not in self.adapters:
                raise UnknownModelError(name, sorted(self.adapters), field=field)
        return check_mix(weights, field=field)

    @property
    def takes(self) -> tuple[str, ...]:
        return ("text", *self.served.supports)

    def status(self, folders: Sequence[str]) -> dict[str, Any]:
        """Return its present state, without these folders."""
        supervisor = self.supervisor
        is_ready, failure = supervisor.state == "ready", supervisor.failure
        plan = self.shown_plan()
        return {
            "name": self.served.name, "state": supervisor.state, "restarts": supervisor.restarts, "loading": supervisor.loading,
            "in_flight": self.in_flight, "waiting": self.waiting, "adapters": sorted(self.adapters),
            "named": sorted(self.served.adapters), "takes": self.takes, "numbers": supervisor.numbers if is_ready else {},
            "plan": plan,
            "error": None if failure is None else error_json(failure, folders)[1]["error"]["message"],
            "context_tokens": self.served.request.context_tokens, "tier_bytes": _tier_bytes(plan, is_loaded=is_ready),
        }  # fmt: skip


class Slots:
    """The workers of some models, which are added to `members`. together: the most at once. turn_s: how long a model may keep its
    slot while another one waits. queue_limit: the requests of a model that may wait beyond its rows. All methods but `stop` and
    `changed` belong to one event loop. When another model is requested, an idle one is stopped at once. A busy one keeps its slot
    for `turn_s` from its start, finishes its running requests, and is replaced by the model that has waited longest. Only the
    keeper, one task, starts and stops workers.
    """

    def __init__(self, *, together: int, turn_s: float, queue_limit: int) -> None:
        self.members: dict[str, Member] = {}
        self._together, self._turn_s, self._queue_limit = together, turn_s, queue_limit
        self.is_stopping = self._has_begun = False
        self._loop: asyncio.AbstractEventLoop | None = None
        self._keeper: asyncio.Task[None] | None = None
        self._changed = asyncio.Event()

    def begin(self) -> None:
        """Start the workers of the first models, as many as may run at once. Needs no event loop; a second call does
        nothing.
        """
        if self._has_begun:
            return
        self._has_begun = True
        for member in list(self.members.values())[: self._together]:
            member.start()
            self._emit_all()

    async def start(self) -> None:
        """Start the first models if they are not started, without waiting for them, and give slots to waiting models."""
        self._loop = asyncio.get_running_loop()
        self.begin()
        self._keeper = asyncio.create_task(self._keep())

    def refuse_new(self) -> None:
        """Accept no new request from now on, including those that wait for their model's turn."""
        self.is_stopping = True
        self._emit_all()

    async def drain(self, grace_s: float) -> None:
        """Refuse new requests, let running answers end within a time limit, then stop every worker."""
        self.refuse_new()
        if self._keeper is not None:
            self._keeper.cancel()
            await asyncio.gather(self._keeper, return_exceptions=True)
        await asyncio.gather(*(asyncio.to_thread(member.supervisor.drain, grace_s) for member in self.members.values()))

    def stop(self) -> None:
        """Stop every worker now, from any thread: used when a server is requested to end twice."""
        for member in self.members.values():
            member.supervisor.stop()

    def changed(self, state: str) -> None:
        """Handle a supervisor's change of state, on any of its threads."""
        if self._loop is not None:
            with suppress(RuntimeError):  # the loop has ended: nothing waits any more
                self._loop.call_soon_threadsafe(self._emit_all)

    def _emit_all(self) -> None:
        """Wake all waiters for a change, including the keeper."""
        self._changed.set()
        self._changed = asyncio.Event()

    async def _keep(self) -> None:
        """Give slots to waiting models, stop idle ones, and request the numbers of those that need them."""
        # Before Python 3.12, `wait_for` loses a cancellation that arrives together with its result, so the end is
        # requested twice.
        while not self.is_stopping:
            changed = self._changed
            try:
                await self._give_places()
                await self._stop_idle()
                for member in self.members.values():
                    if member.needs_numbers:
                        member.ask_numbers()
            except Exception:
                log.exception("internal error while models were swapped")
                # A failure has changed a state, which would wake this loop at once.
                await asyncio.sleep(TICK_S)
            with suppress(asyncio.TimeoutError):
                await asyncio.wait_for(changed.wait(), TICK_S)

    async def refresh(self) -> None:
        """Wait for the present numbers of every worker that answers, NUMBERS_S at most. Numbers that come later are kept.

        A worker answers between two turns. Where a turn takes longer, this reader's numbers are the last known ones; those of
        a reader in the next LATE_S are from the end of a turn shortly before it.
        """
        asked = {asyncio.wrap_future(one): member for member in self.members.values() if (one := member.ask_numbers()) is not None}
        for call in asked:
            call.add_done_callback(lambda done: done.cancelled() or done.exception())  # a failed call leaves the last numbers
        if asked:
            await asyncio.wait(asked, timeout=NUMBERS_S)
        now = time.monotonic()
        for call, member in asked.items():
            if not call.done():
                member.late_until = now + LATE_S

    async def _give_places(self) -> None:
        # The time of a failure counts from the change of the state, so it is read first.
        wanting = [m for m in self.members.values() if not m.failed_s and m.wanted_since is not None and not m.is_living]
        for member in sorted(wanting, key=lambda m: m.wanted_since or 0.0):
            living = [other for other in self.members.values() if other.is_living]
            if len(living) >= self._together:
                # An idle one, or one whose turn is over and whose work is done.
                free = [m for m in living if not m.in_flight and (not m.waiting or self._is_turn_over(m))]
                if not free:
                    return
                await self._stop(min(free, key=lambda other: other.last_used))
            member.start()
            self._emit_all()

    async def _stop_idle(self) -> None:
        for member in self.members.values():
            most_s = member.served.idle_unload_s
            if most_s is not None and member.idle_s > most_s:
                await self._stop(member)

    async def _stop(self, member: Member) -> None:
        try:
            await member.stop()
        finally:
            self._emit_all()

    async def enter(self, member: Member) -> None:
        """Wait for a model's slot and count one more request. Errors: StoppingError; QueueFullError; the error of its
        load.
        """
        count, rows = member.in_flight + member.waiting, member.served.expected_rows
        if count >= rows + self._queue_limit:
            raise QueueFullError(count - rows, member.retry_after_s)
        with member.waits():
            if not self._may_enter(member):
                self._emit_all()
            while not self._may_enter(member):
                await self._changed.wait()

    def _may_enter(self, member: Member) -> bool:
        if self.is_stopping:
            raise StoppingError
        if failed_s := member.failed_s:
            raise ModelFailedError(member.supervisor.failure, failed_s)
        return member.is_living and not self._is_turn_over(member)

    def _is_turn_over(self, member: Member) -> bool:
        """Whether a running model accepts no more requests: its time is over, and another one waits for a slot."""
        waits = any(
            other.wanted_since is not None and not other.is_living
            for other in self.members.values() if other is not member
        )  # fmt: skip
        return waits and time.monotonic() - member.turn_began >= self._turn_s

    async def ready(self, member: Member) -> None:
        """Wait until a model that was entered answers. Errors: ModelFailedError, StoppingError."""
        while member.supervisor.state != "ready":
            if member.supervisor.state == "failed":
                raise ModelFailedError(member.supervisor.failure, member.failed_s)
            if self.is_stopping:
                raise StoppingError
            await self._changed.wait()

    def leave(self, member: Member) -> None:
        """Count a request less."""
        member.leave()
        self._emit_all()


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
