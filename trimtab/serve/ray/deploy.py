"""How does the server run as a Ray Serve application?"""

from __future__ import annotations

import logging
import os
import signal
import socket
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from trimtab.errors import DeviceError, RequestError
from trimtab.serve.contract.settings import Settings
from trimtab.serve.http.listener import listen
from trimtab.serve.ray.config import FRONT, NAME, deployment_name, gpus_of, read_arguments
from trimtab.serve.worker.registry import ServedModel

# The newest features of Ray in use: `broadcast`, and an app made in the ingress.
OLDEST = "2.60"
WATCH_S = 5.0
CONNECT_S = 5.0
# A model that cannot be loaded is not retried twenty times.
CONSTRUCTOR_TRIES = 2
HEALTH_PERIOD_S = 5.0
HEALTH_TIMEOUT_S = 30.0


def check_ray() -> Any:
    """Return ray, with its Serve. Errors: RequestError with the command that installs it."""
    hint = "pip install 'trimtab[ray]'"
    try:
        import ray
        import ray.serve
        from ray.serve.handle import DeploymentHandle
    except ImportError as exc:
        raise RequestError("Ray Serve is not installed", field="--ray", hint=hint) from exc
    if not hasattr(DeploymentHandle, "broadcast"):
        raise RequestError(f"needs Ray {OLDEST} or newer", field="--ray", value=ray.__version__, hint=hint)
    return ray


# The application ------------------------------------------------------------------------------------------------------


def application(arguments: dict) -> Any:
    """Return the Ray Serve application of `arguments_of`'s values. Errors: RequestError."""
    from ray import serve

    from trimtab.serve.ray.ingress import Ingress

    models, settings = read_arguments(arguments)
    handles = [_copies(model, settings, arguments) for model in models]
    front = serve.deployment(
        serve.ingress()(Ingress), name=FRONT, num_replicas=1, max_ongoing_requests=100_000,
        ray_actor_options={"num_cpus": 0}, graceful_shutdown_timeout_s=settings.grace_s,
        max_constructor_retry_count=CONSTRUCTOR_TRIES,
    )  # fmt: skip
    return front.bind(dict(arguments), *handles)


def _copies(model: ServedModel, settings: Settings, arguments: Mapping[str, Any]) -> Any:
    """Return the deployment of one model's copies, with the arguments of each."""
    from ray import serve

    from trimtab.serve.ray.replica import Replica

    low, high = arguments["replicas"]
    scaling: dict[str, Any] = {"num_replicas": low}
    if low < high:
        # More copies as soon as the present ones have more requests than rows.
        target = {"min_replicas": low, "max_replicas": high, "target_ongoing_requests": model.expected_rows}
        scaling = {"autoscaling_config": target}
    # A copy accepts up to twice its rows, so that the next requests wait at the rows; all others wait in the ingress.
    settings_of_model = model.settings(max(settings.queue_limit, model.expected_rows), settings.limits)
    limit = model.resident_limit
    order = [*model.kept, *(name for name in model.adapters if name not in model.kept)]
    settings_of_model["adapters"] = {name: model.adapters[name] for name in order[:limit]}
    deployment = serve.deployment(
        Replica, name=deployment_name(model.name), max_ongoing_requests=2 * model.expected_rows,
        ray_actor_options={"num_cpus": arguments["cpus"], "num_gpus": gpus_of(arguments, model.request.device)},
        health_check_period_s=HEALTH_PERIOD_S, health_check_timeout_s=HEALTH_TIMEOUT_S,
        graceful_shutdown_timeout_s=settings.grace_s, max_constructor_retry_count=CONSTRUCTOR_TRIES, **scaling,
    )  # fmt: skip
    places = -1 if limit is None else max(1, limit - len(model.kept))
    return deployment.bind(settings_of_model, settings.retry, places)


# Deploying --------------------------------------------------------------------------------------------------------------


def run(arguments: Mapping[str, Any], *, address: str | None = None, say: Callable[[str], None]) -> bool:
    """Deploy and wait for SIGTERM or Ctrl-C; then remove the application from Ray, with a grace time for running
    answers.

    Returns whether Ctrl-C ended it. address: of a Ray; None is the one that Ray itself finds, or a local one that is
    started now and ends with this process, as "local" always is.
    Errors: RequestError if Ray is missing, too old, or unreachable, or lacks the resources of the copies; DeviceError
    if it cannot start them.
    """
    ray = check_ray()
    logging.getLogger("ray.serve").setLevel(logging.WARNING)
    settings = read_arguments(arguments)[1]
    ended = threading.Event()
    is_ours = _begin(ray, address, settings)
    try:
        with _signals(ended) as received:
            say("Ray: a local one was started" if is_ours else f"Ray: {ray.get_runtime_context().gcs_address}")
            arguments = _shares(ray, arguments, is_ours=is_ours, say=say)
            _serve(arguments, settings, is_ours=is_ours, ended=ended, say=say)
    finally:
        ray.shutdown()
    return signal.SIGINT in received


def _begin(ray: Any, address: str | None, settings: Settings) -> bool:
    """Connect; returns whether a local Ray was started for it. Errors: RequestError if no Ray is at the address, or if a local
    one cannot listen."""
    quiet: dict[str, Any] = {"log_to_driver": False, "logging_level": "error"}
    field = "--ray-address" if address is not None else "RAY_ADDRESS" if os.environ.get("RAY_ADDRESS") else None
    if address != "local":
        where = _find_address(address)
        if where is not None and _answers(where):
            try:
                ray.init(address=where, **quiet)
                return False
            except (ConnectionError, ValueError, RuntimeError) as exc:
                raise RequestError(f"Ray refuses: {exc}", field=field or "--ray-address", value=where) from exc
        if field is not None:
            raise RequestError("no Ray cluster answers at this address", field=field, value=address or os.environ["RAY_ADDRESS"])
    listen(settings.host, settings.port).close()  # reports the process that uses the port, as the single server does
    ray.init(address="local", include_dashboard=False, **quiet)
    return True


def _find_address(address: str | None) -> str | None:
    """Return the configured address of Ray, or the one that Ray finds; None without one."""
    if address is not None and address != "auto":
        return address
    # ray.init does the same, but then waits minutes for a Ray that has ended silently.
    from ray._private.services import get_ray_address_from_environment

    try:
        return str(get_ray_address_from_environment("auto", None))
    except ConnectionError:
        return None


def _answers(address: str) -> bool:
    """Whether something listens at host:port or ray://host:port."""
    host, _, port = address.rpartition("://")[2].rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), CONNECT_S).close()
    except (OSError, ValueError):
        return False
    return True


def _shares(ray: Any, arguments: Mapping[str, Any], *, is_ours: bool, say: Callable[[str], None]) -> dict[str, Any]:
    """Return the arguments with the GPUs of one copy decided. Errors: RequestError if the fewest copies do not fit here; of a
    cluster, which may grow, that is only a note."""
    total, devices = ray.cluster_resources(), [table["request"].get("device") for table in arguments["models"]]
    filled = {**arguments, "gpus": (1 if total.get("GPU") else 0) if arguments["gpus"] is None else arguments["gpus"]}
    low = arguments["replicas"][0]
    shares = {
        "CPU": ("--cpus-per-replica", low * len(devices) * arguments["cpus"]),
        "GPU": ("--gpus-per-replica", low * sum(gpus_of(filled, device or "auto") for device in devices)),
    }
    for kind, (flag, count) in shares.items():
        if count > total.get(kind, 0):
            text = f"the copies request {count:g} {kind}s together, and Ray has {total.get(kind, 0):g}"
            if is_ours:
                raise RequestError(text, field=flag, hint=f"Fewer --replicas, or less {flag}")
            say(f"Ray waits until it has more nodes: {text}")
    return filled


def _serve(
    arguments: dict[str, Any], settings: Settings, *, is_ours: bool, ended: threading.Event, say: Callable[[str], None]
) -> None:
    from ray import serve
    from ray.serve.context import _get_global_client

    there = _get_global_client(raise_if_no_controller_running=False)
    host, port = settings.host, settings.port
    if there is not None:
        # Ray only warns, and continues with its present address.
        has = there.http_config
        if (has.host, has.port) != (host, port):
            hint = f"Give --host {has.host} --port {has.port}, or `serve shutdown` first"
            raise RequestError("Ray Serve already runs, at another address", field="port", value=port, hint=hint)
    elif port == 0:
        with listen(host, port) as free:
            port = free.getsockname()[1]
    location = "HeadOnly" if is_ours else "EveryNode"
    try:
        if there is None:
            serve.start(http_options={"host": host, "port": port}, proxy_location=location)
        _deploy(arguments, ended)
        if not ended.is_set():
            low, high = arguments["replicas"]
            count = f"{low} to {high} copies" if low < high else "1 copy" if low == 1 else f"{low} copies"
            say(f"http://{host}:{port}  ({count} on Ray)")
        while not ended.wait(WATCH_S):
            _check_there()
    finally:
        serve.delete(NAME)  # waits for running answers, at most for the grace time
        if there is None and not is_ours:
            serve.shutdown()


def _deploy(arguments: dict[str, Any], ended: threading.Event) -> None:
    """Deploy and wait until every copy is loaded, or until the end is requested. Errors: DeviceError."""
    from ray import serve

    target = serve.RunTarget(application(arguments), name=NAME, route_prefix="/")
    serve.run_many([target], wait_for_applications_running=False)
    while not ended.wait(0.2):
        status = serve.status().applications.get(NAME)
        if status is not None and status.status == "RUNNING":
            return
        if status is not None and status.status == "DEPLOY_FAILED":
            raise DeviceError(f"Ray could not start the model: {_why(status)}", device="ray")


def _why(status: Any) -> str:
    """Return the line with the cause, out of all output of Ray."""
    texts = [status.message, *(one.message for one in status.deployments.values())]
    lines = [line.strip() for text in texts for line in text.splitlines() if "Error" in line]
    return lines[-1] if lines else status.message


def _check_there() -> None:
    from ray import serve

    try:
        application = serve.status().applications.get(NAME)
    except Exception as exc:
        raise DeviceError(f"Ray no longer answers ({type(exc).__name__})", device="ray") from exc
    if application is None:
        raise DeviceError("the application was removed from Ray", device="ray")


@contextmanager
def _signals(ended: threading.Event) -> Iterator[list[int]]:
    """Let SIGTERM and Ctrl-C request the end; a second one ends at once. Yields the list of received signals."""
    received: list[int] = []
    if threading.current_thread() is not threading.main_thread():
        yield received
        return

    def ask(number: int, frame: Any) -> None:
        if ended.is_set():
            raise KeyboardInterrupt
        received.append(number)
        ended.set()

    before = {number: signal.signal(number, ask) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
