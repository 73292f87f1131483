"""In which order do queued requests become rows, prompts are computed in pieces, and decode steps run?"""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import Any

from trimtab.adapter_names import UNLOADED, label_of, parts_of
from trimtab.errors import DeviceError, RequestError, TrimtabError
from trimtab.serve.contract.engine_protocol import Engine
from trimtab.serve.contract.job import Event, Job
from trimtab.serve.scheduling.in_progress import Budget, InProgress, Room, Rowless
from trimtab.serve.scheduling.queue import FairQueue

# Seconds of each turn for taking up prepared jobs; one job is taken up in any case.
ADMIT_S = 0.02
# Prompts that the model may compute at once.
MOST_CHOSEN = 16


class QueueFullError(RequestError):
    """The queue is full; `retry_after_s` is when a place is likely to be free."""

    def __init__(self, length: int, retry_after_s: float) -> None:
        self.retry_after_s = retry_after_s
        super().__init__(f"{length} requests are waiting", field="queue", hint=f"Try again in {retry_after_s:.0f} seconds")


class DeadlineError(RequestError):
    """The answer was not complete in the time that the request gave it."""

    def __init__(self, deadline_s: float, where: str) -> None:
        self.deadline_s = deadline_s
        super().__init__(f"the time limit passed while {where}", field="timeout", value=deadline_s)


class MistakeError(TrimtabError):
    """The server failed at one request in an unexpected way. The log has the cause, under `error_id`."""

    def __init__(self, error_id: str = "") -> None:
        self.error_id = error_id
        where = f" (its log has the traceback under {error_id})" if error_id else ""
        super().__init__(f"the server failed at this request{where}")


class StoppingError(DeviceError):
    """The server is shutting down: it accepts no new request, and answers that exceed the grace time are cut."""

    def __init__(self) -> None:
        super().__init__("the server is stopping", device="worker", hint="Send the request again shortly")


@dataclass(eq=False)
class _Entry:
    job: Job
    arrived: float
    answer: Any = None
    started: float | None = None
    goes_alone: bool = False
    inputs: Future[Any] | None = None

    @property
    def is_prepared(self) -> bool:
        return self.inputs is None or self.inputs.done()

    def is_over(self, now: float) -> bool:
        return self.job.deadline_s is not None and self.job.waited_s + now - self.arrived > self.job.deadline_s

    def begin(self, engine: Engine) -> None:
        """Begin its answer. Errors: those of preparing its inputs, and the engine's."""
        try:
            self.answer = engine.begin(self.job, None if self.inputs is None else self.inputs.result())
        finally:
            self.inputs = None  # a future that failed has the exception, whose traceback has this frame

    def look_ahead(self, engine: Engine) -> bool:
        """Return and keep whether its prompt goes alone, as the prompts in progress are now."""
        self.goes_alone = engine.goes_alone(self.answer)
        return self.goes_alone

    def start(self, now: float) -> None:
        self.started = now


class _Queue:
    """The requests that wait: those that need a row, in `lines`, and those that need none. Both need slots for their adapters."""

    def __init__(self, engine: Engine, room: Room[_Entry]) -> None:
        self._engine = engine
        self.lines: FairQueue[_Entry] = FairQueue()
        self.rowless: Rowless[_Entry] = Rowless(room)

    def add(self, entry: _Entry) -> None:
        """Let a job wait, if it needs to compute anything."""
        if getattr(entry.answer, "needs_no_row", False):
            self.rowless.add(entry)
        elif not self.rowless.holds_back(entry):
            self.lines.add(entry)

    def remove(self, entry: _Entry) -> None:
        """Take out a job that waits, or needs no row; nothing for any other."""
        if entry in self.lines:
            self.lines.remove(entry)
        self.free(entry)

    def free(self, entry: _Entry) -> None:
        """Take a job out of those that need no row, if it is one; jobs that it kept back wait for rows."""
        for mate in self.rowless.remove(entry):
            self.lines.add(mate)

    def begin_rowless(self, *, is_beside: bool) -> _Entry | None:
        """Begin the pieces of one request more, if there is room, and return it. is_beside: whether a prompt is in progress."""
        rowless, engine = self.rowless, self._engine
        if not rowless.lines:
            return None
        place = rowless.begun.place

        def fits(entry: _Entry) -> bool:
            return rowless.may_begin(entry) and rowless.begun.fits(engine.passing_tokens(entry.answer))

        entry = None if place is None else self._next(rowless.lines, fits)
        if entry is None and (place is None or place in rowless.complete):
            entry = self._next(rowless.lines, rowless.may_begin)
            if entry is not None and place is not None:  # it takes the memory of the one that waits for a row
                engine.release(place.answer)
                rowless.begun.free(place)
        if entry is not None:
            rowless.begun.add(entry, engine.passing_tokens(entry.answer))
        rowless.go_first(is_beside and not (rowless.begun or engine.interleaves))
        return entry

    def next(self, fits: Callable[[_Entry], bool] | None = None, *, is_alone_ahead: bool) -> _Entry | None:
        """Return the next job for a row, None if none can have one now. fits: which can be chosen. is_alone_ahead: whether a prompt
        that goes alone is computed first."""
        scored = self._next_scored(fits, is_alone_ahead=is_alone_ahead)
        return scored or self._next(self.lines, fits, is_alone_ahead=is_alone_ahead)

    def _next_scored(self, fits: Callable[[_Entry], bool] | None, *, is_alone_ahead: bool) -> _Entry | None:
        """Return the job whose log-probabilities are complete, if it can have a row now. fits: as for `_next`."""
        entry = next(iter(self.rowless.complete), None)
        if entry is None or not self._engine.has_room(entry.answer) or (fits is not None and not fits(entry)):
            return None
        if entry.look_ahead(self._engine) and is_alone_ahead:
            return None
        self.free(entry)
        return entry

    def _next(
        self, lines: FairQueue[_Entry], fits: Callable[[_Entry], bool] | None = None, *, is_alone_ahead: bool = False,
    ) -> _Entry | None:  # fmt: skip
        """Return the job of the next client and adapter in turn, and put both last. None if none can be chosen now. lines:
        of those that need a row, or of those that need none; both need slots for their adapters. fits: which of them can be chosen.

        While an adapter waits for a slot, others pass. Once as many jobs as there are rows have passed it, only the base may pass,
        because it needs no slot. Otherwise the adapters that have the slots could keep them forever. Of the adapters that a client
        alone waits for, one at a time counts as passed: many of them would hold up other clients otherwise. One that is still
        being prepared waits for no slot: no other job passes it, and it keeps no other job back.
        """
        passes: dict[str | None, int] = {}  # adapters that may begin -> how many of `passed` come before them
        passed: list[tuple[FairQueue[_Entry], str | None]] = []
        seen: set[str] = set()
        is_barred = False
        # A request without a row waits for a slot only where its turn has come.
        others = [self.lines] if lines is not self.lines else [] if self.rowless.begun else [self.rowless.lines]
        for one, adapter, clients in [(each, *both) for each in (*others, lines) for both in each.adapters]:
            if not self._engine.is_prepared(adapter):
                continue
            may_begin = (adapter is None or not is_barred) and self._engine.is_ready(adapter)
            if may_begin and one is lines:
                passes[adapter] = len(passed)
            elif not may_begin and not clients <= seen:
                passed.append((one, adapter))
                seen |= clients
            is_barred |= one.overtaken[adapter] >= self._engine.rows
        entry = lines.first(passes, fits)
        # Those that run will leave; a smaller one that passed it could keep it waiting indefinitely.
        if entry is None or not self._engine.has_room(entry.answer):
            return None
        if entry.look_ahead(self._engine) and lines is self.lines and is_alone_ahead:
            return None  # it would be computed after that one; until then another client may come
        lines.take(entry)
        if entry.job.adapter is not None:
            for one, adapter in passed[: passes[entry.job.adapter]]:
                one.overtaken[adapter] += 1
        return entry


class _Prompts:
    """The prompts of rows from their turn on. chosen: computed next, each with a row to come. through: complete, with a row in the
    next turn. rows: the jobs that have one. start, fail: called with a job that is chosen, or that an error ends."""

    def __init__(
        self, engine: Engine, queue: _Queue, room: Room[_Entry], rows: list[_Entry], *, start: Callable[[_Entry], None],
        fail: Callable[[_Entry, TrimtabError], None],
    ) -> None:  # fmt: skip
        self._engine, self._queue, self._rows, self._start, self._fail = engine, queue, rows, start, fail
        self.begun: InProgress[_Entry] = InProgress(room)
        self.chosen: deque[_Entry] = deque()
        self.through: deque[_Entry] = deque()
        self._is_apart = False  # whether a pass of several prompts failed: chosen prompts are then computed one by one

    def __len__(self) -> int:
        """How many rows they take, or will take."""
        return len(self.through) + len(self.chosen) + len(self.begun)

    @property
    def _is_alone_ahead(self) -> bool:
        return any(entry.goes_alone for entry in self.chosen)

    def remove(self, entry: _Entry) -> None:
        """Take out a job whose prompt is here; nothing for any other."""
        if entry in self.begun:
            self.begun.remove(entry)
        for others in (self.through, self.chosen):
            if entry in others:
                others.remove(entry)

    def free(self, entry: _Entry) -> None:
        """Count no keys and values of a prompt in addition to those of the rows any more."""
        for begun in (self.begun, self._queue.rowless.begun):
            begun.free(entry)

    def needs_towers(self) -> bool:
        """Whether the next piece is a pass of the towers."""
        self._look()
        entry = self.begun.current or next(iter(self.chosen), None)
        return entry is not None and getattr(entry.answer, "needs_towers", False)

    def prefill(self, most_tokens: int) -> int | None:
        """Compute a chunk of one prompt, or several prompts at once. Return the size of the chunk, None if no prompt can be
        computed."""
        self._look()
        if not self.begun and len(self.chosen) > 1 and not self._is_apart and (size := self._together(most_tokens)):
            return size
        self._begin_chosen()
        if (entry := self.begun.current) is None:
            return None
        try:
            size, is_through = self._engine.prefill(entry.answer, most_tokens)
        except TrimtabError as exc:
            self._fail(entry, exc)
            return 0
        if not (size or is_through):
            self._queue.rowless.go_first()
            return None
        if is_through:
            self.begun.remove(entry)
            self.through.append(entry)
            self.free(entry)
        else:
            self.begun.took(entry)
        return size

    def _look(self) -> None:
        """Take the next prompts out of their lines, if there is room for them."""
        if self.begun.first is None:
            self._choose()
            if self.begun:
                self._begin_chosen()
        elif self._engine.interleaves:
            self._choose_beside()

    def _begin_chosen(self) -> None:
        if self.begun.first is None and self.chosen and not self._queue.rowless.goes_first:
            self._begin(self.chosen.popleft())

    def _begin(self, entry: _Entry) -> None:
        tokens, is_kept = self._engine.passing_tokens(entry.answer), self._engine.kept_tokens(entry.answer) > 0
        self.begun.add(entry, tokens, is_counted=is_kept)

    def _choose(self) -> None:
        """Take the next prompts out of their lines, as many as have a row to go to; one of those at most that go alone."""
        self._is_apart &= bool(self.chosen)
        while len(self.chosen) < MOST_CHOSEN and len(self) + len(self._rows) < self._engine.rows:
            if (entry := self._queue.next(is_alone_ahead=self._is_alone_ahead)) is None:
                return
            self.chosen.append(entry)
            self._start(entry)

    def _choose_beside(self) -> None:
        """Take prompts out of their lines that pass the one that has begun."""

        def fits(entry: _Entry) -> bool:
            if self._engine.kept_tokens(entry.answer):  # it needs no more
                return True
            # The others of a group copy the states of one.
            is_mate = bool(entry.job.group) and any(one.job.group == entry.job.group for one in self.begun)
            return not is_mate and self.begun.fits(self._engine.passing_tokens(entry.answer))

        while len(self) + len(self._rows) < self._engine.rows:
            if (entry := self._queue.next(fits, is_alone_ahead=self._is_alone_ahead)) is None:
                return
            self._begin(entry)
            self._start(entry)

    def _together(self, most_tokens: int) -> int:
        """Compute several of the chosen prompts at once. Return the size of the pass, 0 if the first is computed alone."""
        try:
            size, through = self._engine.prefill_together([entry.answer for entry in self.chosen], most_tokens)
        except TrimtabError:
            self._is_apart = True  # computing each alone shows which one failed
            return 0
        for answer in through:
            entry = next(entry for entry in self.chosen if entry.answer is answer)
            self.chosen.remove(entry)
            self.through.append(entry)
        return size if through else 0


class Scheduler:
    """Queues jobs and sends their events to `emit`. All methods are called from one thread.

    queue_limit: the number of jobs that may wait beyond those with a free row. The next one is a QueueFullError. One thread calls
    `turn` again and again. Prompts of a turn are given to the device before the step's tokens are waited for, and join the rows in
    the next turn. A long prompt is chosen only when the previous one is complete; where prompts have separate keys and values, as
    on a CPU, short ones pass it between its chunks.
    """

    def __init__(
        self, engine: Engine, emit: Callable[[Event], None], *, queue_limit: int = 64,
        now: Callable[[], float] = time.monotonic,
    ) -> None:  # fmt: skip
        self.engine, self._tell, self.queue_limit, self._now = engine, emit, queue_limit, now
        self._arrived: deque[_Entry] = deque()
        self._rows: list[_Entry] = []
        room: Room[_Entry] = Room(engine.beside_tokens)
        self._queue = _Queue(engine, room)
        self._rowless = self._queue.rowless
        self._prompts = _Prompts(engine, self._queue, room, self._rows, start=self._choose, fail=self._fail)
        self.budget = Budget(engine.chunk_sizes)
        self._told_at: float | None = None  # time of the last step's report, if only steps came after it
        self._known: dict[str, _Entry] = {}
        self._uses: Counter[str | None] = Counter()
        self._events: Counter[str] = Counter()
        self._by_adapter: Counter[str] = Counter()  # answers that ended, by the adapter's label
        self._step_s = 0.0

    @property
    def waiting(self) -> int:
        """How many jobs wait for a row, or for their turn without one."""
        return len(self._arrived) + len(self._queue.lines) + self._rowless.waiting

    @property
    def running(self) -> int:
        """How many jobs have a row, or a prompt that is being computed."""
        return self._taken + self._rowless.running

    @property
    def _taken(self) -> int:
        """How many rows are taken, or will be by prompts in progress."""
        return len(self._rows) + len(self._prompts)

    @property
    def is_idle(self) -> bool:
        return not self._known

    @property
    def is_preparing(self) -> bool:
        """Whether all there is to do is being prepared on another thread."""
        return len(self._arrived) == len(self._known) > 0 and not any(entry.is_prepared for entry in self._arrived)

    def uses(self, adapter: str | None) -> int:
        """How many jobs, waiting ones included, need this adapter, alone or in a mix. None: the base alone."""
        return self._uses[adapter]

    @property
    def counts(self) -> dict[str, Any]:
        """Counts of events since the scheduler began, and the seconds of all steps."""
        events = {name: self._events[name] for name in ("finished", "failed", "cancelled", "refused", "steps")}
        return events | {"step_s": self._step_s, "by_adapter": dict(self._by_adapter)}

    def forget(self, adapter: str) -> None:
        """Count an unloaded adapter's answers under UNLOADED."""
        self._by_adapter[UNLOADED] += self._by_adapter.pop(adapter, 0)

    def submit(self, job: Job) -> None:
        """Take a job. Errors: QueueFullError; RequestError for an id in use; errors of the engine before it begins to prepare the
        job, which is forgotten then. Problems of its inputs become events."""
        if job.id in self._known:
            raise RequestError("a job of this id is being answered", field="id", value=job.id)
        if self.waiting >= self.queue_limit + self.engine.rows - self._taken:
            self._events["refused"] += 1
            raise QueueFullError(self.waiting, self._retry_after_s())
        parts = parts_of(job.adapter) or (None,)
        # From here on nothing fails: an entry that is registered in part could neither be answered nor cancelled.
        entry = _Entry(job, self._now(), inputs=self.engine.prepare(job))
        self._known[job.id] = entry
        self._uses.update(parts)
        self._arrived.append(entry)

    def _retry_after_s(self) -> float:
        """Return how long a step of one answer takes times a typical one's steps; a second if nothing is known."""
        mean_s = self._step_s / max(self._events["steps"], 1)
        return min(60.0, max(1.0, mean_s * 64))

    def cancel(self, job_id: str) -> None:
        """Forget a job whose client has left; its row is free before the next step. The event "dropped" has the tokens computed for
        it. An unknown id is no error: it may have just been answered."""
        entry = self._known.get(job_id)
        if entry is not None:
            self._events["cancelled"] += 1
            usage = self._spent(entry)
            self._forget(entry)
            self._tell(Event(job_id, "dropped", usage=usage))

    def _spent(self, entry: _Entry) -> Mapping[str, int]:
        return {} if entry.answer is None else self.engine.spent(entry.answer)

    def _forget(self, entry: _Entry) -> None:
        del self._known[entry.job.id]
        for name in parts_of(entry.job.adapter) or (None,):
            self._uses[name] -= 1
            if not self._uses[name]:
                del self._uses[name]
        if entry.answer is None:
            self._arrived.remove(entry)
            if entry.inputs is not None:
                entry.inputs.cancel()
            return
        self._queue.remove(entry)
        self._prompts.remove(entry)
        if entry in self._rows:
            self._rows.remove(entry)
        self.engine.drop(entry.answer)
        self._prompts.free(entry)

    def _fail(self, entry: _Entry, error: TrimtabError) -> None:
        self._events["failed"] += 1
        usage = self._spent(entry)
        self._forget(entry)
        self._tell(replace(error_event(entry.job.id, error), usage=usage))

    def turn(self) -> bool:
        """Run one turn: drop late jobs, prepare new ones, decode a step of all rows, compute chunks of prompts behind it.
        Returns whether there is more to do."""
        self._drop_late()
        self._admit()
        for size, seconds in self.engine.chunk_times():
            self.budget.took_chunk(size, seconds)
        self._piece()
        if self._rows:
            self._arrive(only_open=True)
            self._step()
        else:
            self._told_at = None
            self._behind()
            self._arrive()
        return not self.is_idle

    @property
    def _has_prompts(self) -> bool:
        """Whether prompts wait, or are about to get a row."""
        return bool(len(self._prompts) or self._queue.lines)

    def _piece(self) -> None:
        """Compute a piece of a request that needs no row, if it is its turn."""
        rowless = self._rowless
        if not (rowless and rowless.is_due(left_s := self.budget.left_s(len(self._rows)), is_shared=self._has_prompts)):
            return
        if (begun := self._queue.begin_rowless(is_beside=self._prompts.begun.first is not None)) is not None:
            self._choose(begun)
            self._told_at = None  # the time to the next step is not that step's alone
        entry, start = rowless.begun.current, self._now()
        if entry is None:
            rowless.waits()
            return
        try:
            tokens, is_over = self.engine.piece(entry.answer, self._rowless.most_tokens(left_s, entry.job.kind))
        except TrimtabError as exc:
            self._fail(entry, exc)
        else:
            rowless.begun.took(entry)
            if not (tokens or is_over):  # another has the row that it needs
                rowless.waits()
                rowless.go_first()
                return
            rowless.took(tokens, self._now() - start, entry.job.kind)
            self._report([entry])
            if is_over and entry in rowless.begun:  # it is no embedding
                rowless.end(entry)
                if not self.engine.kept_tokens(entry.answer):
                    self._prompts.free(entry)
        self._told_at = None

    def _start(self, entry: _Entry) -> None:
        entry.start(now := self._now())
        self._tell(Event(entry.job.id, "started", usage={"started_at": now}))

    def _behind(self) -> bool:
        """Give rows to the complete prompts, then compute chunks of the next ones. Returns whether there were any."""
        rows = len(self._rows)
        self._arrive()
        left_s, count = self.budget.left_s(rows), 0
        while (size := self.budget.size(left_s, is_first=not count)) is not None:
            if count and self._prompts.needs_towers() and not self.budget.fits_towers(left_s):
                break
            size_done = self._prompts.prefill(size)
            if size_done is None:
                break
            self._report(list(self._prompts.begun))  # log-probabilities of its chunk
            count += 1
            if left_s is None:  # no row waits for a token: others may have arrived
                break
            if size_done:  # none where a prompt took over the states of another
                left_s -= self.budget.chunk_s(size_done) or 0.0
        return count > 0

    def _arrive(self, *, only_open: bool = False) -> None:
        """Give rows to the complete prompts. only_open: as long as they need no time, because the next step draws their first
        tokens."""
        through = self._prompts.through
        while through and (not only_open or getattr(through[0].answer, "is_open", False)):
            entry = through.popleft()
            self._rows.append(entry)
            try:
                self.engine.arrive(entry.answer)
            except TrimtabError as exc:
                self._fail(entry, exc)
            else:
                self._report([entry])

    def _drop_late(self) -> None:
        now = self._now()
        for entry in [entry for entry in self._known.values() if entry.is_over(now)]:
            where = "it waited" if entry.started is None else "it was answered"
            self._fail(entry, DeadlineError(entry.job.deadline_s or 0.0, where))

    def _admit(self) -> None:
        start = self._now()
        for entry in [entry for entry in self._arrived if entry.is_prepared]:
            try:
                entry.begin(self.engine)  # a request that cannot fit is refused before it queues
            except TrimtabError as exc:
                self._events["refused"] += 1
                self._forget(entry)
                self._tell(error_event(entry.job.id, exc))
            else:
                self._arrived.remove(entry)
                self._queue.add(entry)
                if getattr(entry.answer, "is_over", False):  # it needs no row
                    self._report([entry])
            if self._now() - start >= ADMIT_S:
                return

    def _choose(self, entry: _Entry) -> None:
        """Let a job have its adapter, and its prompt be computed."""
        if entry.started is None:
            self._start(entry)
        try:
            self.engine.choose(entry.answer)
        except TrimtabError as exc:
            self._fail(entry, exc)

    def _step(self) -> None:
        waiting = self._has_prompts or bool(self._rowless.complete)
        launched = waited = False

        def behind() -> bool:
            nonlocal launched, waited
            launched, waited = (launched if waited else self._behind()), True
            return launched

        while self._rows:
            start, stepping = self._now(), list(self._rows)
            try:
                self.engine.step(behind if waiting else None)
            except TrimtabError as exc:
                # The one that came last needs the room that the others had, or does not go together with them.
                self._fail(self._rows[-1], exc)
                continue
            now = self._now()
            self._events["steps"] += 1
            self._step_s += now - start
            if self._told_at is not None and not launched:
                self.budget.took_step(len(stepping), now - self._told_at)
            # Work launched behind this step delays the next one.
            self._told_at = None if launched else now
            self._report(stepping)
            return

    def _report(self, entries: list[_Entry]) -> None:
        for entry in entries:
            for event in self.engine.news(entry.answer):
                self._tell(event)
                if event.kind in ("done", "error"):
                    self._events["finished" if event.kind == "done" else "failed"] += 1
                    self._by_adapter[label_of(entry.job.adapter)] += 1
                    self._forget(entry)
                    break


def error_event(job_id: str, error: TrimtabError) -> Event:
    """Return the event that ends a job with an error."""
    return Event(job_id, "error", finish="error", error=error.to_dict())
