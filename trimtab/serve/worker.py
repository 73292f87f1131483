"""The process that holds a model: it loads a plan, answers jobs from the pipe, and ends when the pipe does.

Run by `supervisor.py` with spawn, never fork. Messages to it: {"do": "submit", "job"}, {"do": "cancel", "id"},
{"do": "call", "id", "what", ...} for adapters and numbers, {"do": "drain"}. Messages from it: {"say": "loading", "done",
"of"}, {"say": "ready", ...}, {"say": "events", "events"}, {"say": "reply", "id", "value" or "error"}, {"say": "fatal",
"error"} just before it ends because its device can do no more.
"""

from __future__ import annotations

import signal
import sys
import time
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from multiprocessing.connection import Connection
from typing import Any

from trimtab.errors import DeviceError, RequestError, TrimtabError
from trimtab.request import LoadRequest
from trimtab.serve.channel import Channel, event_to_message, job_from_message
from trimtab.serve.job import Event
from trimtab.serve.scheduler import MistakeError, Scheduler, error_event

LOADING_STEP_S = 0.2
# A worker that is busy without anything to tell, as with one long prompt, says at least so often that it lives.
ALIVE_S = 10.0


def main(connection: Connection, settings: dict[str, Any]) -> None:
    """Load and answer until the other end of the pipe is gone.

    settings: request (LoadRequest as JSON), adapters (name -> folder, those that are loaded at the start), kept, rows,
    queue_limit, resident_limit, prompt_tokens (the longest prompt; None: what the context holds), plan (of the worker
    before this one, as JSON; None: plan now).
    """
    # Ctrl-C reaches every process of a terminal, and SIGTERM every process of a service; this one ends when the API process
    # is done with it.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    channel = Channel(connection)
    try:
        _Worker(channel, settings).run()
    except (EOFError, OSError, KeyboardInterrupt):
        return  # the API process is gone or ends the server: nobody is left to tell
    except BaseException as exc:
        _tell_fatal(channel, exc)
        sys.exit(1)


def _tell_fatal(channel: Channel, exc: BaseException) -> None:
    traceback.print_exc()  # the whole trace goes to the log, never to a client
    error = exc if isinstance(exc, TrimtabError) else DeviceError(type(exc).__name__, device="worker")
    try:
        channel.send({"say": "fatal", "error": error_event("", error).error})
    except OSError:
        return


class _Worker:
    def __init__(self, channel: Channel, settings: dict[str, Any]) -> None:
        from trimtab.api import load, plan_request
        from trimtab.plan import Plan

        self.channel = channel
        self.events: list[Event] = []
        before = None if not settings.get("plan") else Plan.from_json(settings["plan"])
        request, later = _split_adapters(settings, None if before is None else list(before.request.adapters))
        is_same = before is not None and dict(before.request.adapters) == dict(request.adapters)
        self.plan = before if is_same and before is not None else plan_request(request)
        self._told = 0.0
        self.model = load(self.plan, progress=self._loading)
        from trimtab.serve.engine import LoadedEngine

        self.engine = LoadedEngine(
            self.model, rows=settings["rows"], kept=settings.get("kept", ()),
            resident_limit=settings.get("resident_limit"), prompt_limit=settings.get("prompt_tokens"),
        )  # fmt: skip
        for name, path in later.items():
            self.engine.shelf.add(name, path)
        self.scheduler = Scheduler(self.engine, self.events.append, queue_limit=settings["queue_limit"])
        self.is_draining = False

    def _loading(self, done: int, of: int) -> None:
        now = time.monotonic()
        if now - self._told > LOADING_STEP_S:
            self._told = now
            self.channel.send({"say": "loading", "done": done, "of": of})

    def run(self) -> None:
        """Answer until the pipe closes, or until the last job is done while draining."""
        self.channel.send({"say": "ready", **self.numbers(), "plan": self.plan.to_json()})
        while not (self.is_draining and self.scheduler.is_idle):
            while self.channel.poll(None if self.scheduler.is_idle and not self.is_draining else 0):
                self._obey(self.channel.receive())
                if self.is_draining and self.scheduler.is_idle:
                    break
            self.scheduler.turn()
            self._tell()
        self.model.close()

    def _tell(self) -> None:
        if self.events or time.monotonic() - self._told > ALIVE_S:
            self._told = time.monotonic()
            events, self.events[:] = list(self.events), []
            self.channel.send({"say": "events", "events": [event_to_message(event) for event in events]})

    def _obey(self, message: Mapping[str, Any]) -> None:
        match message["do"]:
            case "submit":
                job = job_from_message(message["job"])
                try:
                    self.scheduler.submit(job)
                except TrimtabError as exc:
                    self.events.append(error_event(job.id, exc))
                except Exception:
                    # Nothing has been computed for it yet, so the others go on.
                    traceback.print_exc()
                    self.events.append(error_event(job.id, MistakeError()))
                self._tell()
            case "cancel":
                self.scheduler.cancel(message["id"])
            case "drain":
                self.is_draining = True
            case "call":
                self._reply(message)

    def _reply(self, message: Mapping[str, Any]) -> None:
        answer: dict[str, Any] = {"say": "reply", "id": message["id"]}
        try:
            answer["value"] = self._call(message)
        except TrimtabError as exc:
            answer["error"] = error_event("", exc).error
        self.channel.send(answer)

    def _call(self, message: Mapping[str, Any]) -> Any:
        match message["what"]:
            case "load_adapter":
                self.engine.shelf.add(message["name"], message["path"])
            case "unload_adapter":
                name = message["name"]
                self.engine.shelf.remove(name, [name] if self.scheduler.uses(name) else [])
            case "numbers":
                pass
            case what:
                raise RequestError("no such call", field="what", value=what)
        return self.numbers()

    def numbers(self) -> dict[str, Any]:
        """Return what the page and the metrics show: adapters, rows, bytes, what has been done."""
        shelf, batch = self.engine.shelf, self.engine.batch
        swap_s = sorted(shelf.swap_s)
        return {
            "adapters": list(shelf.names), "resident": list(shelf.resident), "kept": sorted(shelf.kept),
            "rows": self.engine.rows, "running": self.scheduler.running, "waiting": self.scheduler.waiting,
            "queue_limit": self.scheduler.queue_limit, "counts": asdict(self.scheduler.counts),
            "memory": self.model.memory(), "kv_bytes": batch.cache.nbytes(), "swaps": shelf.swaps,
            "swap_p50_s": swap_s[len(swap_s) // 2] if swap_s else None,
            "swap_p99_s": swap_s[int(len(swap_s) * 0.99)] if swap_s else None,
        }  # fmt: skip


def _split_adapters(
    settings: Mapping[str, Any], planned_before: Sequence[str] | None
) -> tuple[LoadRequest, dict[str, str]]:
    """Return the request that is planned, and the adapters that wait in host memory.

    The plan counts memory for those that may be on the model at once: the kept ones first, then in the order given. After a
    restart they are those that were planned before: what has been loaded since may be more than there is room for.
    """
    request = LoadRequest.from_json(settings["request"])
    adapters = dict(settings.get("adapters", {}))
    kept = [name for name in settings.get("kept", ()) if name in adapters]  # one may have been unloaded since
    limit = settings.get("resident_limit")
    order = [*kept, *(name for name in adapters if name not in kept)]
    first = order if limit is None else order[:limit]
    if planned_before is not None:
        first = [name for name in planned_before if name in adapters]
    planned = {name: adapters[name] for name in first}
    return replace(request, adapters=planned, batch=settings["rows"]), {
        name: path for name, path in adapters.items() if name not in planned
    }
