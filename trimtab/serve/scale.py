"""How one server becomes many: the same app and the same worker as a Ray Serve application.

The ingress is the HTTP face of `app.py`; each replica of a model keeps a supervised worker, as the pool does on one
machine. Ray Serve spreads requests, starts and stops replicas with the load, and multiplexes adapters: a request goes to
a replica that already holds its adapter where there is one. Needs `pip install trimtab[ray]`.

    application(arguments)   what Ray runs; `arguments` are plain values, from the command line or a config file
    config(arguments)        that file, for `serve deploy`
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any

from trimtab.errors import DeviceError, RequestError
from trimtab.request import LoadRequest
from trimtab.serve.channel import event_from_message, event_to_message, job_from_message, job_to_message
from trimtab.serve.faults import UnknownModelError
from trimtab.serve.job import Event, Job
from trimtab.serve.pool import Pool
from trimtab.serve.registry import ServedModel
from trimtab.serve.settings import Limits, Settings
from trimtab.serve.supervisor import Supervisor, WorkerError

IMPORT_PATH = "trimtab.serve.scale:application"
NUMBERS_S = 2.0


def check_ray() -> Any:
    """Return ray, with its Serve. Errors: RequestError that says how to get it."""
    try:
        import ray
        import ray.serve
    except ImportError as exc:
        raise RequestError("Ray is not installed", field="--ray", hint="pip install 'trimtab[ray]'") from exc
    return ray


# Arguments ------------------------------------------------------------------------------------------------------------


def arguments_of(
    models: Sequence[ServedModel], settings: Settings, *, replicas: tuple[int, int], gpus: float, cpus: float
) -> dict[str, Any]:
    """Return everything an application needs as plain values. replicas: fewest and most of each model."""
    low, high = replicas
    if not 1 <= low <= high:
        raise RequestError("must be 1 or more, as N or LOW..HIGH", field="--replicas", value=f"{low}..{high}")
    shown = {item.name: getattr(settings, item.name) for item in fields(Settings)}
    shown |= {"limits": asdict(settings.limits), "adapter_root": settings.adapter_root and str(settings.adapter_root)}
    served = [
        {**asdict(replace(model, request=LoadRequest(model="x"))), "request": model.request.to_json()}
        for model in models
    ]
    return {
        "models": served, "settings": shown, "replicas": [low, high], "gpus": gpus, "cpus": cpus,
    }  # fmt: skip


def read_arguments(arguments: Mapping[str, Any]) -> tuple[list[ServedModel], Settings]:
    """Return the models and settings of `arguments_of`'s values. Errors: RequestError."""
    models = []
    for table in arguments["models"]:
        values = {**table, "request": LoadRequest.from_json(table["request"])}
        values |= {"kept": tuple(table["kept"]), "supports": tuple(table["supports"])}
        models.append(ServedModel(**values))
    given = dict(arguments["settings"])
    given["limits"] = Limits(**given["limits"])
    given["adapter_root"] = None if given["adapter_root"] is None else Path(given["adapter_root"])
    for name in ("api_keys", "allow_fetch", "cors_origins"):
        given[name] = tuple(given[name])
    return models, Settings(**given)


def config(arguments: Mapping[str, Any]) -> str:
    """Return the file for `serve deploy`, in YAML. Keys are left out: they belong into TRIMTAB_API_KEY on the cluster."""
    import yaml

    settings = {**arguments["settings"], "api_keys": []}
    value = {
        "proxy_location": "EveryNode",
        "http_options": {"host": settings["host"], "port": settings["port"]},
        "applications": [
            {
                "name": "trimtab", "route_prefix": "/", "import_path": IMPORT_PATH,
                "args": _plain({**arguments, "settings": settings}),
            }
        ],
    }  # fmt: skip
    return str(yaml.safe_dump(value, sort_keys=False))


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, (list, tuple)) else value


# Replicas -------------------------------------------------------------------------------------------------------------


class _Held:
    """Stands for an adapter that a replica holds; Ray drops it when the replica has to hold others."""

    def __init__(self, supervisor: Supervisor, name: str) -> None:
        self._supervisor, self._name = supervisor, name

    def __del__(self) -> None:
        self._supervisor.call("unload_adapter", name=self._name)


class Replica:
    """One copy of a model: a supervised worker. Methods are called by the ingress, wherever that is."""

    def __init__(self, table: Mapping[str, Any], queue_limit: int, retry: bool) -> None:
        (served,) = read_arguments({"models": [table], "settings": _DEFAULTS})[0]
        # Kept adapters are there from the start; the others come when a request first wants them here.
        first = {name: path for name, path in served.adapters.items() if name in served.kept}
        self._limit = served.resident_limit
        self._supervisor = Supervisor({**served.settings(queue_limit), "adapters": first}, retry=retry)
        self._supervisor.start()
        self._paths: dict[str, str] = dict(first)
        self._kept = set(first)
        self._asked = self._loaded = 0

    async def check_health(self) -> None:
        """Raise when the worker is given up: Ray then replaces the replica."""
        if self._supervisor.state == "failed":
            raise WorkerError(self._supervisor.failure or {"class": "DeviceError", "message": "failed", "fields": {}})

    async def answer(self, message: Mapping[str, Any], path: str | None) -> AsyncIterator[dict[str, Any]]:
        """Yield what a job is told. message: `job_to_message`. path: the folder of its adapter."""
        job = job_from_message(message)
        if job.adapter is not None and job.adapter not in self._kept:
            assert path is not None
            try:
                await self._bring(job.adapter, path)
            except WorkerError as exc:
                yield event_to_message(Event(job.id, "error", finish="error", error=exc.error))
                return
        loop = asyncio.get_running_loop()
        told: asyncio.Queue[Event] = asyncio.Queue()
        is_over = False

        def tell(event: Event) -> None:
            loop.call_soon_threadsafe(told.put_nowait, event)

        self._supervisor.submit(job, tell)
        try:
            while not is_over:
                event = await told.get()
                is_over = event.kind in ("done", "error")
                yield event_to_message(event)
        finally:
            if not is_over:
                self._supervisor.cancel(job.id)

    async def _bring(self, name: str, path: str) -> None:
        from ray import serve

        self._paths[name] = path
        self._asked += 1
        await self.held(serve.get_multiplexed_model_id() or name)

    async def held(self, name: str) -> _Held:
        """Return an adapter of this replica, read into its worker's host memory now if it was not there."""
        await asyncio.to_thread(self._supervisor.wait_ready)
        if name not in self._supervisor.numbers.get("adapters", ()):
            self._loaded += 1
            await asyncio.wrap_future(self._supervisor.call("load_adapter", name=name, path=self._paths[name]))
        return _Held(self._supervisor, name)

    async def numbers(self) -> dict[str, Any]:
        """Return what the page and the metrics show, and how often an adapter that was asked for was already here."""
        supervisor = self._supervisor
        numbers = supervisor.numbers
        if supervisor.state == "ready":
            numbers = await asyncio.wrap_future(supervisor.call("numbers"))
        return {
            "state": supervisor.state, "restarts": supervisor.restarts, "loading": supervisor.loading,
            "numbers": numbers, "plan": supervisor.plan, "asked": self._asked, "loaded": self._loaded,
            "pid": supervisor.pid,
        }  # fmt: skip


_DEFAULTS: Mapping[str, Any] = {
    **{item.name: getattr(Settings(), item.name) for item in fields(Settings)}, "limits": asdict(Limits())
}  # fmt: skip


# The ingress ----------------------------------------------------------------------------------------------------------


class RayPool:
    """The app's pool on Ray: names are resolved here, jobs go to replicas."""

    def __init__(self, models: Sequence[ServedModel], settings: Settings, handles: Mapping[str, Any]) -> None:
        # Names, lists and limits are the local pool's own; none of its supervisors is ever started.
        self._names = Pool(models, settings)
        self._handles = dict(handles)
        self._seen: dict[str, dict[str, Any]] = {name: {} for name in handles}
        self._keeper: asyncio.Task[None] | None = None
        self._is_stopping = False

    def resolve(self, model_id: str) -> tuple[str, str | None]:
        return self._names.resolve(model_id)

    def context_tokens(self, model: str) -> int:
        return self._names.context_tokens(model)

    def takes(self, model: str) -> tuple[str, ...]:
        return self._names.takes(model)

    def models(self) -> list[dict[str, Any]]:
        return self._names.models()

    def _adapters(self, model: str | None) -> dict[str, str]:
        return self._names._one(model).adapters

    async def submit(self, model: str, job: Job) -> AsyncIterator[Event]:
        """Yield what a job is told; closing the iterator cancels it. Errors: DeviceError if its replica is lost."""
        if self._is_stopping:
            raise DeviceError("the server is stopping", device="replica")
        path = None if job.adapter is None else self._adapters(model)[job.adapter]
        handle = self._handles[model].options(stream=True, multiplexed_model_id=job.adapter or "")
        stream = handle.answer.remote(job_to_message(job), path)
        is_over = False
        try:
            async for message in stream:
                event = event_from_message(message)
                is_over = event.kind in ("done", "error")
                yield event
        except (asyncio.CancelledError, GeneratorExit):
            raise
        except Exception as exc:  # Ray has a class for every way to lose an actor
            raise DeviceError(
                f"the replica was lost ({type(exc).__name__})", device="replica", hint="Send it again"
            ) from exc
        finally:
            if not is_over:
                stream.cancel()

    async def load_adapter(self, model: str | None, name: str, path: str) -> None:
        """Let clients name an adapter; the replicas read it when it is first asked of them. Errors: RequestError."""
        from trimtab.checkpoint.adapter import read_adapter

        adapters = self._adapters(model)
        if name in adapters or name in self._handles:
            raise RequestError("is in use", field="lora_name", value=name)
        await asyncio.to_thread(read_adapter, path)
        adapters[name] = path

    async def unload_adapter(self, model: str | None, name: str) -> None:
        """Forget an adapter; replicas drop it as others take its place. Errors: RequestError."""
        adapters = self._adapters(model)
        if name not in adapters:
            raise UnknownModelError(name, list(adapters))
        del adapters[name]

    def status(self) -> Mapping[str, Any]:
        return {"models": [self._status(dict(entry)) for entry in self._names.status()["models"]]}

    def _status(self, entry: dict[str, Any]) -> dict[str, Any]:
        seen = self._seen[entry["name"]]
        return entry | {key: seen[key] for key in ("state", "restarts", "loading", "numbers", "plan") if key in seen}

    @property
    def is_ready(self) -> bool:
        return not self._is_stopping and any(seen.get("state") == "ready" for seen in self._seen.values())

    async def start(self) -> None:
        self._keeper = asyncio.create_task(self._keep())

    async def _keep(self) -> None:
        while True:
            for name, handle in self._handles.items():
                try:
                    self._seen[name] = await handle.numbers.remote()
                except Exception:
                    self._seen[name] = {"state": "restarting"}
            await asyncio.sleep(NUMBERS_S)

    def refuse_new(self) -> None:
        self._is_stopping = True

    async def drain(self, grace_s: float) -> None:
        """Take nothing new; Ray waits for what is running as each deployment's graceful shutdown says."""
        self.refuse_new()
        if self._keeper is not None:
            self._keeper.cancel()


class Ingress:
    """The HTTP face inside Ray: `face` is an ASGI application (`app` is a name of Ray's own)."""

    def __init__(self, arguments: Mapping[str, Any], *handles: Any) -> None:
        import os

        from trimtab.commands.serve import KEY_VARIABLE
        from trimtab.serve.app import make_app
        from trimtab.serve.metrics import Metrics
        from trimtab.serve.run import page_of

        if os.environ.get(KEY_VARIABLE):
            keys = [*arguments["settings"]["api_keys"], os.environ[KEY_VARIABLE]]
            arguments = {**arguments, "settings": {**arguments["settings"], "api_keys": keys}}
        models, settings = read_arguments(arguments)
        self.pool = RayPool(
            models, settings, {model.name: handle for model, handle in zip(models, handles, strict=True)}
        )
        self.face = make_app(self.pool, settings, Metrics(), extra=page_of(settings))
        self._started = False

    async def begin(self) -> None:
        """Start what the app starts in its lifespan, once."""
        if not self._started:
            self._started = True
            await self.pool.start()


async def to_replica(scope: Any, receive: Any, send: Any) -> None:
    """Hand a request to the app of the ingress that this process holds."""
    from ray import serve

    if scope["type"] == "lifespan":  # begins before there is an ingress to ask
        await receive()
        await send({"type": "lifespan.startup.complete"})
        await receive()
        await send({"type": "lifespan.shutdown.complete"})
        return
    ingress: Any = serve.get_replica_context().servable_object
    await ingress.begin()
    await ingress.face(scope, receive, send)


def application(arguments: Mapping[str, Any]) -> Any:
    """Return the Ray Serve application of `arguments_of`'s values."""
    check_ray()
    from ray import serve

    models, settings = read_arguments(arguments)
    low, high = arguments["replicas"]
    handles = []
    for table, model in zip(arguments["models"], models, strict=True):
        held = model.resident_limit or max(1, len(model.adapters))
        replica = type("Replica", (Replica,), {
            "held": serve.multiplexed(max_num_models_per_replica=held)(Replica.held), "__module__": __name__,
        })  # fmt: skip
        deployment = serve.deployment(
            replica, name=model.name.replace("/", "-"), max_ongoing_requests=model.rows * 2,
            ray_actor_options={"num_cpus": arguments["cpus"], "num_gpus": arguments["gpus"]},
            health_check_period_s=5, health_check_timeout_s=30, graceful_shutdown_timeout_s=settings.grace_s,
            **_scaling(low, high, model.rows),
        )  # fmt: skip
        handles.append(deployment.bind(table, settings.queue_limit, settings.retry))
    ingress = serve.deployment(
        serve.ingress(to_replica)(Ingress), name="ingress", num_replicas=1, max_ongoing_requests=10_000,
        ray_actor_options={"num_cpus": 0}, graceful_shutdown_timeout_s=settings.grace_s,
    )  # fmt: skip
    return ingress.bind(dict(arguments), *handles)


def _scaling(low: int, high: int, rows: int) -> dict[str, Any]:
    if low == high:
        return {"num_replicas": low}
    return {"autoscaling_config": {"min_replicas": low, "max_replicas": high, "target_ongoing_requests": rows}}


def run(arguments: Mapping[str, Any], *, address: str | None = None, say: Any = None, block: bool = True) -> None:
    """Deploy on the Ray at `address`, on the one that is reachable, or on a local one started now; then wait.

    Errors: RequestError if Ray is missing or its address does not answer.
    """
    ray = check_ray()
    from ray import serve

    if not ray.is_initialized():
        try:
            ray.init(address=address or "auto", log_to_driver=False, logging_level="warning")
        except ConnectionError as exc:
            if address is not None:
                raise RequestError("no Ray answers there", field="--ray-address", value=address) from exc
            ray.init(log_to_driver=False, logging_level="warning", include_dashboard=False)
    settings = arguments["settings"]
    serve.start(http_options={"host": settings["host"], "port": settings["port"]}, proxy_location="HeadOnly")
    serve.run(application(arguments), name="trimtab", route_prefix="/")
    if say is not None:
        say(f"http://{settings['host']}:{settings['port']}  on Ray, {arguments['replicas'][0]} replicas to begin with")
    try:
        while block:
            time.sleep(1)
    except KeyboardInterrupt:
        serve.shutdown()
        raise
