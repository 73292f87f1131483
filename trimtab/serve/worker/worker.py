"""What does the worker process do: load a plan, answer jobs from the pipe, and end with it?"""

from __future__ import annotations

import gc
import logging
import multiprocessing
import signal
import sys
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trimtab.errors import AdapterError, CheckpointError, DeviceError, DoesNotFitError, RequestError, TrimtabError
from trimtab.machine import machine_cache
from trimtab.machine.memory import process_bytes
from trimtab.process import before_torch, phases
from trimtab.process.child import end_after
from trimtab.request import LoadRequest
from trimtab.serve.adapters.new_adapters import LOOK_S as WATCH_S
from trimtab.serve.adapters.new_adapters import AdapterQueue, NewAdapters, files_stamp, lost_reason, throw
from trimtab.serve.contract.inside_root import look
from trimtab.serve.contract.job import Event
from trimtab.serve.contract.log import keep_streams, set_up_as_parent, write_traceback
from trimtab.serve.scheduling.scheduler import MistakeError, Scheduler, StoppingError, error_event
from trimtab.serve.worker.ipc import BEAT_S, Channel, Inbox, Pulse, event_to_message, job_from_message
from trimtab.serve.worker.row_count import plan_rows

if TYPE_CHECKING:
    from trimtab.api import PlanInputs
    from trimtab.engine.lora.store import HeldAdapter
    from trimtab.planning import Plan
    from trimtab.planning.memory.media import ServedMedia

log = logging.getLogger("trimtab.serve")

LOADING_STEP_S = 0.2
# How often an idle worker checks whether an adapter's files have been read.
READING_S = 0.02
# How long a worker waits for a request before it captures another graph, which takes up to 0.3 s.
CAPTURING_S = 0.1
# How often an idle worker checks whether a prompt has been prepared.
PREPARING_S = 0.001
# GIL switch interval between the thread that prepares prompts and the one that makes tokens; Python's default is 5 ms.
SWITCH_S = 0.0005
# How long a worker may take to notice that its API process has ended, and to end itself.
ORPHAN_S = 1.0
# Errors that the operator can fix: the log has the message without a traceback.
FOR_OPERATORS = (RequestError, CheckpointError, DoesNotFitError, AdapterError)


def main(connection: Connection, settings: dict[str, Any]) -> None:
    """Load and answer until the other end of the pipe is closed.

    settings: name (of the model, for the log), request (LoadRequest as JSON), adapters (name -> folder, those that are
    loaded at the start), kept, rows (None: as many as change no placement), queue_limit, resident_limit, prompt_tokens
    (the longest prompt; None: the context), stop_at_turn_end (as for `ServedModel`), media (the fields of
    `ServedMedia`, of which the seconds of audio limit each request; none: no memory is planned for images and audio),
    plan (of the previous worker, as JSON; None: plan now).

    Messages to it: {"do": "submit", "job"}, {"do": "cancel", "id"}, {"do": "call", "id", "what", ...} for adapters and numbers,
    {"do": "drain"}. Messages from it: {"say": "loading", "done", "of"} and {"say": "phase", "phase", "far"} until {"say": "ready",
    ...}, {"say": "events", "events"} (without events: a beat), {"say": "busy", "what", "most_s"} before long work, {"say": "reply",
    "id", "value" or "error"}, {"say": "fatal", "error"} just before it ends because its device is unusable.
    """
    # Ctrl-C reaches every process of a terminal, and SIGTERM every process of a service; this one ends when the API
    # process closes the pipe.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    keep_streams()
    set_up_as_parent()
    if (parent := multiprocessing.parent_process()) is not None:
        end_after(parent.join, grace_s=ORPHAN_S)  # also during loading, when it does not read the pipe
    channel = Channel(connection)
    try:
        with before_torch.collecting_rarely():
            with phases.watched(partial(_tell_phase, channel)):
                worker = _Worker(channel, settings)
            worker.run()
    except (EOFError, OSError, KeyboardInterrupt):
        return  # the API process has ended or ends the server: no receiver is left
    except BaseException as exc:
        _tell_fatal(channel, exc, model=settings["request"]["model"])
        sys.exit(1)


def _begin_imports(request: Mapping[str, Any], inputs: PlanInputs) -> None:
    """Import torch while the plan is made, if the plan does not need it; otherwise only load torch's libraries."""
    device = request["device"]
    found = None if request.get("card") else machine_cache.find_machine(device, inputs.process_bytes)
    if found is None:
        before_torch.load_libraries()
        return
    inputs.machines[device, None] = found
    before_torch.import_module("trimtab.engine.model")


def _tell_phase(channel: Channel, phase: str, far: str) -> None:
    channel.send({"say": "phase", "phase": phase, "far": far})


def _tell_fatal(channel: Channel, exc: BaseException, *, model: str) -> None:
    if isinstance(exc, FOR_OPERATORS):
        log.error("%s cannot be loaded: %s", model, exc)
    else:
        write_traceback(exc, "the worker ends")  # the traceback goes to the log, never to a client
    error = exc if isinstance(exc, TrimtabError) else DeviceError(type(exc).__name__, device="worker")
    try:
        channel.send({"say": "fatal", "error": error_event("", error).error})
    except OSError:
        return


class _Worker:
    def __init__(self, channel: Channel, settings: dict[str, Any]) -> None:
        from trimtab.api import PlanInputs, load_plan
        from trimtab.planning import Plan

        # The model and the machine are read once for all numbers of rows that are planned.
        is_first = not settings.get("plan")
        inputs = PlanInputs(process_bytes=process_bytes(), sees_values=False, is_served=True, checks_folder=is_first)
        _begin_imports(settings["request"], inputs)

        self.channel, self.inbox = channel, Inbox(channel)
        self.events: list[Event] = []
        before = None if not settings.get("plan") else Plan.from_json(settings["plan"])
        lost = {} if before is None else _lost_adapters(settings)
        stamps = {name: files_stamp(path) for name, path in settings.get("adapters", {}).items()}
        request, later = _split_adapters(settings, None if before is None else list(before.request.adapters), lost)
        is_same = before is not None and _has_same_adapters(before, request)
        rows = settings["rows"] if before is None else before.request.batch
        self.plan = (
            before
            if is_same and before is not None
            else _planned(request, rows, later, inputs, media=_media(settings), is_first=before is None)
        )
        before_torch.make_context(self.plan.execution_device)  # while torch is imported
        self._told = 0.0
        # Adapters that are read for the device stay in host memory, and are neither matched nor read again.
        read: dict[str, HeldAdapter] = {}
        decode = settings.get("decode", "auto")
        self.model = load_plan(self.plan, progress=self._loading, decode=decode, held=read, reads_text=True)
        self.going_on = _stop_at_turn_end(self.model, settings.get("stop_at_turn_end"))
        from trimtab.serve.worker.engine import LoadedEngine

        self.pulse, waiting = Pulse(channel.send), AdapterQueue()
        self.engine = LoadedEngine(
            self.model, rows=self.plan.request.batch, kept=settings.get("kept", ()),
            resident_limit=settings.get("resident_limit"), prompt_limit=settings.get("prompt_tokens"),
            audio_s=(settings.get("media") or {}).get("request_audio_s"), held=read, lost=lost, pulse=self.pulse,
            is_unprepared=waiting.has,
        )  # fmt: skip
        shelf, roots = self.engine.shelf, settings.get("roots", {})
        self.adapters = NewAdapters(shelf, waiting, pieces=self.model.adapter_pieces, reload=self.engine.reload, reply=self._reply)
        for name, path in request.adapters.items():
            self.adapters.watcher.watch(name, path, stamps[name], roots.get(name))
        for name, path in later.items():
            self.adapters.add(name, path, roots.get(name), is_first=before is None)
        self.scheduler = Scheduler(self.engine, self.events.append, queue_limit=settings["queue_limit"])
        for held in shelf.held:  # their first use should need no more computing
            self.adapters.prepare(held, set(shelf.names_of(held)))
        self.is_draining = self._has_compiled = False

    def _loading(self, done: int, of: int) -> None:
        now = time.monotonic()
        if now - self._told > LOADING_STEP_S:
            self._told = now
            self.channel.send({"say": "loading", "done": done, "of": of})

    def run(self) -> None:
        """Answer until the pipe closes, or until the last job is done while draining."""
        with phases.watched(partial(_tell_phase, self.channel)):
            phases.begin("capturing steps")
            self.engine.capture()
        sys.setswitchinterval(SWITCH_S)
        gc.collect()
        before_torch.collect_again()
        gc.freeze()  # a garbage collection over the model's objects and all modules would stop all answers for 0.1 s
        self.channel.send({"say": "ready", **self.numbers(), "plan": self.plan.to_json()})
        self.adapters.watcher.start()
        try:
            self._answer()
        finally:
            self.adapters.watcher.end()
        self.model.close()

    def _answer(self) -> None:
        self.inbox.start()
        while not (self.is_draining and self.scheduler.is_idle):
            while self.inbox.poll(self._patience_s()):
                self._obey(self.inbox.receive())
                if self.is_draining and self.scheduler.is_idle:
                    break
            is_quiet = self.scheduler.is_idle and self._patience_s() >= CAPTURING_S  # it has waited so long
            self.adapters.take()
            if self.adapters.waiting:
                with self.pulse.work("an adapter"):
                    self.adapters.waiting.step(self._is_needed, only_for_requests=self.is_draining)
            self.scheduler.turn()
            self._tell()
            if is_quiet and not self.adapters.waiting:  # not right behind an answer or a load, which a request may follow
                self._use_idle_time()
        self._refuse_rest()

    def _refuse_rest(self) -> None:
        """Answer messages that arrived after the last job ended, so that every request gets an answer."""
        for message in self.inbox.rest():
            if message["do"] == "call":
                self._reply(message["id"], partial(throw, StoppingError()))
            elif message["do"] == "submit":
                self.events.append(error_event(message["job"]["id"], StoppingError()))
        self._tell()

    def _use_idle_time(self) -> None:
        if self.engine.has_more_to_capture:
            self._capture_more()
        elif not self._has_compiled:
            self._has_compiled = True
            self.engine.compile_ahead()

    def _capture_more(self) -> None:
        """Capture one more graph. A graph that cannot be captured now is captured, or reported, at its first use."""
        try:
            with self.pulse.work("capturing"):
                self.engine.capture_more()
        except TrimtabError as exc:
            log.warning("capturing while idle ends: %s", exc)

    def _patience_s(self) -> float:
        """Return how long to wait for the next message."""
        if self.scheduler.is_preparing:
            return PREPARING_S
        if self.is_draining or not self.scheduler.is_idle or self.adapters.waiting:
            return 0
        if self.adapters.is_reading:
            return READING_S
        if self.engine.has_more_to_capture:
            return CAPTURING_S
        return WATCH_S

    def _tell(self) -> None:
        if self.events or time.monotonic() - self._told > BEAT_S:
            self._told = time.monotonic()
            events, self.events[:] = list(self.events), []
            self.channel.send({"say": "events", "events": [event_to_message(_dated(event)) for event in events]})

    def _obey(self, message: Mapping[str, Any]) -> None:
        match message["do"]:
            case "submit":
                self._submit(message["job"])
                self._tell()
            case "cancel":
                self.scheduler.cancel(message["id"])
            case "drain":
                self.is_draining = True
                self.adapters.drain()
            case "call" if message["what"] == "load_adapter":
                self.adapters.begin(message["id"], message["name"], message["path"], message.get("root"))
            case "call":
                with self.pulse.work("a call"):
                    self._reply(message["id"], lambda: self._call(message))

    def _submit(self, plain: Mapping[str, Any]) -> None:
        """Submit a job to the scheduler, or answer it with its error."""
        try:
            self.scheduler.submit(job_from_message(plain))
        except TrimtabError as exc:
            self.events.append(error_event(plain["id"], exc))
        except Exception as exc:
            # A request can fail in unforeseen ways; nothing was computed, so the others continue.
            error = MistakeError(write_traceback(exc, "internal error while taking a request"))
            self.events.append(error_event(plain["id"], error))

    def _reply(self, call_id: int, work: Callable[[], Any]) -> None:
        answer: dict[str, Any] = {"say": "reply", "id": call_id}
        try:
            work()
            answer["value"] = self.numbers()
        except TrimtabError as exc:
            answer["error"] = error_event("", exc).error
        except Exception as exc:
            # A client's files can fail in unforeseen ways; nothing was computed, so the others continue.
            answer["error"] = error_event("", MistakeError(write_traceback(exc, "internal error of the worker"))).error
        self.channel.send(answer)

    def _is_needed(self, name: str) -> bool:
        """Whether a request waits until this adapter is prepared."""
        return bool(self.scheduler.uses(name)) and not self.engine.is_prepared(name)

    def _call(self, message: Mapping[str, Any]) -> None:
        match message["what"]:
            case "unload_adapter":
                name = message["name"]
                self.engine.shelf.remove(name, [name] if self.scheduler.uses(name) else [])
                self.adapters.forget(name)
                self.scheduler.forget(name)
            case "numbers":
                pass
            case what:
                raise RequestError("no such call", field="what", value=what)

    def numbers(self) -> dict[str, Any]:
        """Return the values for the page and the metrics: adapters, rows, bytes, counts."""
        shelf, batch = self.engine.shelf, self.engine.batch
        swap_s = sorted(shelf.swap_s)
        return {
            "adapters": list(shelf.names), "resident": list(shelf.resident), "mixes": list(shelf.mixes), "kept": sorted(shelf.kept),
            "lost": sorted(shelf.lost),
            "rows": self.engine.rows, "running": self.scheduler.running, "waiting": self.scheduler.waiting,
            "queue_limit": self.scheduler.queue_limit, "counts": self.scheduler.counts,
            "memory": self.model.memory(),
            "memory_shares": [one.to_json() for one in self.model.memory_shares(batch)],
            "kv_bytes": batch.cache.nbytes(), **batch.pages.numbers(), "swaps": shelf.swaps, "reloads": shelf.reloads,
            "adapter_host_bytes": shelf.host.nbytes,
            "adapter_host_budget_bytes": shelf.host.nbytes + shelf.host.room_bytes,
            "prompt_chunks": list(batch.prompts.sizes),
            "fallbacks": [f"{one.what}: {one.why}" for one in (*self.model.fallbacks, *batch.steps.fallbacks)],
            "prefix_cache": None if self.model.prefix_cache is None else self.model.prefix_cache.numbers(),
            "captures": batch.steps.captures, "capture_s": batch.steps.capture_s,
            "goes_on_behind": self.going_on,
            "swap_p50_s": swap_s[len(swap_s) // 2] if swap_s else None,
            "swap_p99_s": swap_s[int(len(swap_s) * 0.99)] if swap_s else None,
        }  # fmt: skip


def _dated(event: Event) -> Event:
    """Return an event as it is sent: a start has its age, because the receiver's clock is another one."""
    if event.kind != "started":
        return event
    return replace(event, usage={"ago_s": time.monotonic() - event.usage["started_at"]})


def _stop_at_turn_end(model: Any, is_asked: bool | None) -> str | None:
    """End answers at the chat template's end-of-turn token. If they continue after it, log the token and return its
    text."""
    from trimtab.engine.chat import control_tokens

    missing = control_tokens.stop_at_turn_end(model, is_asked=is_asked)
    if missing is None:
        return None
    log.warning("%s", control_tokens.going_on(missing, "--stop-at-turn-end (stop_at_turn_end = true in a file)"))
    return missing.text


def _planned(
    request: LoadRequest, rows: int | None, later: Mapping[str, str], inputs: PlanInputs, *, media: ServedMedia | None,
    is_first: bool,
) -> Plan:  # fmt: skip
    """Return the plan of a request. One client's adapter must not prevent a model's restart after its first start."""
    from trimtab.api import plan_request

    try:
        return plan_rows(request, rows, partial(plan_request, later=later, inputs=inputs, media=media))
    except TrimtabError:
        if is_first:
            raise
        return plan_rows(request, rows, partial(plan_request, later={}, inputs=inputs, media=media))


def _media(settings: Mapping[str, Any]) -> ServedMedia | None:
    from trimtab.planning.memory.media import ServedMedia

    media = settings.get("media")
    return None if media is None else ServedMedia(**{**media, "kinds": tuple(media["kinds"])})


def _has_same_adapters(before: Plan, request: LoadRequest) -> bool:
    """Whether a plan of an earlier worker counts the adapters with their present files."""
    from trimtab.adapters.file import stamps_of

    if dict(before.request.adapters) != dict(request.adapters):
        return False
    planned = {name: tuple(map(tuple, stamps)) for name, stamps in before.adapter_stamps.items()}
    now = {name: stamps_of(path) for name, path in request.adapters.items()}
    return all(planned.get(name) in (None, tuple(map(tuple, stamps))) for name, stamps in now.items())


def _lost_adapters(settings: Mapping[str, Any]) -> dict[str, str]:
    """Return the adapters whose files can no longer be read, with the reason. settings: of a restarted worker."""
    from trimtab.adapters.adapter import read_adapter

    lost = {}
    for name, path in settings.get("adapters", {}).items():
        try:
            if (root := settings.get("roots", {}).get(name)) is not None:
                look(Path(path), Path(root))
            read_adapter(path)
        except (TrimtabError, OSError) as exc:
            lost[name] = lost_reason(exc)
    return lost


def _split_adapters(
    settings: Mapping[str, Any], planned_before: Sequence[str] | None, lost: Collection[str] = ()
) -> tuple[LoadRequest, dict[str, str]]:
    """Return the planned request, and the adapters that stay in host memory. Planned are those that may be on the model at once:
    pinned ones first; after a restart those of the previous plan, as later ones may need more memory than is available."""
    request = LoadRequest.from_json(settings["request"])
    adapters = {name: path for name, path in settings.get("adapters", {}).items() if name not in lost}
    kept = [name for name in settings.get("kept", ()) if name in adapters]  # one may have been unloaded since
    limit = settings.get("resident_limit")
    order = [*kept, *(name for name in adapters if name not in kept)]
    first = order if limit is None else order[:limit]
    if planned_before is not None:
        first = [name for name in planned_before if name in adapters]
    planned = {name: adapters[name] for name in first}
    decode = settings.get("decode", "auto")
    return replace(request, adapters=planned, decode=decode), {name: path for name, path in adapters.items() if name not in planned}
