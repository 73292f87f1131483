"""Two copies of the demo model on a local Ray: requests are spread, adapters found where they are, a lost copy costs named
errors at most. Slow, and only where Ray is installed (`make test-ray`). With RAY_RESULTS=FILE the counts are saved there."""

import json
import os
import platform
import random
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.parse
import urllib.request
import uuid
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import pytest

from tests import waiting

ray = pytest.importorskip("ray")
pytest.importorskip("ray.serve")
openai = pytest.importorskip("openai")
psutil = pytest.importorskip("psutil")

from trimtab.demo.demo import ADAPTERS
from trimtab.demo.demo import FOLDER as DEMO
from trimtab.errors import RequestError
from trimtab.request import GenerateRequest
from trimtab.serve.contract.job import Job
from trimtab.serve.ray import deploy as on_ray
from trimtab.serve.ray.config import NAME
from trimtab.serve.worker.ipc import event_from_message, job_to_message

pytestmark = pytest.mark.slow
ROOT = Path(__file__).resolve().parents[3]
KEY, ADMIN_KEY = "a-key-for-the-test", "an-admin-key-for-the-test"
START_S = 240
BACK_S = 120
PROMPT = [{"role": "user", "content": "Hello"}]
# Four adapters and room for two on each of two copies: a copy chosen by chance has an adapter in half of the cases.
NAMES = {**{name: DEMO / "adapters" / name for name in ADAPTERS}, "second-style": DEMO / "adapters" / "style"}
# An answer that takes its time: the demo's own are a dozen tokens long.
NUMBERS = {"type": "array", "items": {"type": "integer"}, "minItems": 60, "maxItems": 60}
SCHEMA = {"type": "object", "properties": {"found": NUMBERS}, "required": ["found"], "additionalProperties": False}
LONG = {"max_tokens": 300, "response_format": {"type": "json_schema", "json_schema": {"name": "s", "schema": SCHEMA}}}
ERRORS = ("WorkerDiedError", "DeviceError", "ModelFailedError")


def free_port():
    """A port that a starting Ray does not take: below what systems give to connections, outside Ray's own 10002 to 19999."""
    for port in random.sample(range(20_000, 32_000), 100):
        with socket.socket() as found, suppress(OSError):
            found.bind(("0.0.0.0", port))
            return port
    raise AssertionError("no free port")


class Served:
    """`trimtab serve --ray` as a process, and what it said."""

    def __init__(self, port, *flags, **environment):
        command = [sys.executable, "-m", "trimtab", "serve", str(DEMO / "base"), "--name", "demo", "--device", "cpu"]
        command += ["--context", "384", "--audio-s", "1", "--rows", "4", "--port", str(port), *flags]
        for name, folder in NAMES.items():
            command += ["--adapter", f"{name}={folder}"]
        environment = {**os.environ, "PYTHONPATH": str(ROOT), **environment}
        self.address, self.said = f"http://127.0.0.1:{port}", []
        self.process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment, cwd=ROOT)
        self._is_up = threading.Event()
        threading.Thread(target=self._listen, daemon=True).start()
        if not self._is_up.wait(START_S) or self.process.poll() is not None:
            self.end()  # what is left of it would be the Ray that later tests find
            raise AssertionError(self.said)

    def _listen(self):
        for line in self.process.stderr:
            self.said.append(line.strip())
            if line.startswith(self.address):
                self._is_up.set()
        self._is_up.set()

    def end(self):
        if self.process.poll() is None:
            self.process.terminate()
        return self.process.wait(60)


@pytest.fixture(scope="module")
def counts():
    found = {}
    yield found
    print(json.dumps(found, indent=1))
    if os.environ.get("RAY_RESULTS"):
        where = {"python": platform.python_version(), "system": platform.system(), "cpu_count": os.cpu_count()}
        value = {"environment": {**where, "ray": ray.__version__, "device": "cpu"}, **found}
        Path(os.environ["RAY_RESULTS"]).write_text(json.dumps(value, indent=1) + "\n", encoding="utf-8")


@pytest.fixture(scope="module")
def served():
    flags = ("--ray", "--replicas", "2", "--cpus-per-replica", "0.25", "--resident-adapters", "2", "--no-page")
    flags += ("--adapter-root", str(DEMO / "adapters"), "--limit", "body_bytes=1000000")
    found = Served(free_port(), *flags, TRIMTAB_API_KEY=KEY, TRIMTAB_ADMIN_KEY=ADMIN_KEY)
    try:
        ray.init(address="auto", log_to_driver=False, logging_level="error", namespace="serve")
        yield found
    finally:
        ray.shutdown()
        found.end()


@pytest.fixture(scope="module")
def client(served):
    return openai.OpenAI(base_url=f"{served.address}/v1", api_key=KEY, timeout=120, max_retries=0)


def ask(client, model, **options):
    options = {"temperature": 0, "max_tokens": 16, **options}
    return client.chat.completions.create(model=model, messages=PROMPT, **options).choices[0].message.content


def end_of(client, model, *, stream=False, **options):
    """Return ("answer", text) of a whole answer, or ("error", class) of a named one. What is neither is raised."""
    options = {"temperature": 0, "max_tokens": 16, **options}
    try:
        if not stream:
            found = client.chat.completions.create(model=model, messages=PROMPT, **options).choices[0]
            return "answer", found.message.content
        text, finish = "", None
        for chunk in client.chat.completions.create(model=model, messages=PROMPT, stream=True, **options):
            text += chunk.choices[0].delta.content or ""
            finish = finish or chunk.choices[0].finish_reason
        assert finish is not None
        return "answer", text
    except openai.APIError as exc:
        return "error", exc.body["class"]


def handle():
    return ray.serve.get_deployment_handle("demo", NAME)


def copies():
    """Return what each copy says of itself, by its process id."""
    found = handle().broadcast("numbers").results(timeout_s=30, return_exceptions=True)
    return {one["pid"]: one for one in found if isinstance(one, dict)}


def post(served, path, body, **headers):
    """Return (status, JSON) of one request."""
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    headers = {"content-type": "application/json", "authorization": f"Bearer {ADMIN_KEY}", **headers}
    try:
        with urllib.request.urlopen(urllib.request.Request(served.address + path, data, headers), timeout=120) as found:
            return found.status, json.load(found)
    except urllib.error.HTTPError as exc:
        return exc.code, json.load(exc)


# Answers --------------------------------------------------------------------------------------------------------------


def test_answers_are_those_of_generate_and_stream_through(client):
    import trimtab

    plan = trimtab.plan(DEMO / "base", adapters=dict(NAMES), context=384, audio_s=1.0, device="cpu")
    with trimtab.load(plan) as model:
        for name in (None, *NAMES):
            expected = model.answer("Hello", adapter=name, max_new_tokens=16).text
            assert ask(client, name or "demo") == expected
    pieces = client.chat.completions.create(model="style", messages=PROMPT, temperature=0, max_tokens=16, stream=True)
    texts = [chunk.choices[0].delta.content for chunk in pieces if chunk.choices]
    assert len([text for text in texts if text]) > 3 and "".join(text or "" for text in texts) == ask(client, "style")


def test_a_stream_arrives_while_it_is_made(client):
    stream = client.chat.completions.create(model="demo", messages=PROMPT, temperature=0, stream=True, **LONG)
    next(iter(stream))
    assert sum(one["in_flight"] for one in copies().values()) == 1
    stream.close()
    # And a client that leaves frees its row.
    waiting.until(lambda: not sum(one["in_flight"] for one in copies().values()), 30)
    waiting.until(lambda: not sum(one["numbers"]["running"] for one in copies().values()), 30)


def test_what_the_way_through_ray_costs(client, counts):
    alone = Served(free_port(), "--no-page")
    try:
        other = openai.OpenAI(base_url=f"{alone.address}/v1", api_key="none", timeout=120, max_retries=0)
        ask(other, "demo")
        found = {client: [], other: []}
        for _ in range(30):  # in turns: the machine has other work
            for one, seconds in found.items():
                began = time.monotonic()
                ask(one, "demo")
                seconds.append(time.monotonic() - began)
    finally:
        alone.end()
    through_ray, without = (sorted(seconds)[15] for seconds in found.values())
    counts["one_request"] = {"tokens": 16, "through_ray_s": round(through_ray, 4), "single_server_s": round(without, 4)}
    assert through_ray < without + 0.25


def test_requests_are_spread_over_both_copies(client, counts):
    before = {pid: one["numbers"]["counts"]["finished"] for pid, one in copies().items()}
    with ThreadPoolExecutor(16) as pool:
        answers = list(pool.map(lambda _: ask(client, "demo", max_tokens=32), range(48)))
    assert len(set(answers)) == 1
    after = {pid: one["numbers"]["counts"]["finished"] - before[pid] for pid, one in copies().items()}
    counts["spread"] = {"requests": 48, "clients": 16, "by_copy": sorted(after.values())}
    assert len(after) == 2 and sum(after.values()) == 48 and min(after.values()) >= 8


# Adapters -------------------------------------------------------------------------------------------------------------


def totals():
    found = copies().values()
    assert len(found) == 2
    swaps = sum(one["numbers"]["swaps"] for one in found)
    return {"asked": sum(one["asked"] for one in found), "missed": sum(one["missed"] for one in found), "swaps": swaps}


def since(before):
    found = {name: count - before[name] for name, count in totals().items()}
    return {**found, "hit_rate": round(1 - found["missed"] / found["asked"], 3)}


def ask_anywhere(name):
    """Ask a copy that chance chose: the same request, without telling Ray which adapter it names."""
    request = GenerateRequest(max_new_tokens=16)
    message = job_to_message(Job(uuid.uuid4().hex, [{"role": "user", "content": "Hello"}], request, adapter=name))
    told = handle().options(stream=True).answer.remote(message, str(NAMES[name]))
    (*_, last) = [event_from_message(found) for found in told]
    assert last.kind == "done"


def test_requests_go_where_their_adapter_is(client, counts):
    names = [sorted(NAMES)[(number * 7 + number // 4) % 4] for number in range(160)]
    before = totals()
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(ask_anywhere, names))
    by_chance = since(before)
    before = totals()
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda name: ask(client, name), names))
    multiplexed = since(before)
    counts["multiplexing"] = {
        "requests": len(names), "adapters": 4, "copies": 2, "places_a_copy": 2, "by_chance": by_chance,
        "multiplexed": multiplexed,
    }  # fmt: skip
    print(counts["multiplexing"])
    assert by_chance["asked"] == multiplexed["asked"] == 160 and by_chance["hit_rate"] < 0.75
    assert multiplexed["hit_rate"] > 0.85


def test_adapters_come_and_go_and_a_name_is_never_an_older_adapter(served, client):
    expected = {name: ask(client, name) for name in ("style", "specialist")}
    assert expected["style"] != expected["specialist"]
    for name in ("style", "specialist", "style"):
        assert post(served, "/v1/load_lora_adapter", {"lora_name": "new", "lora_path": name})[0] == 200
        with ThreadPoolExecutor(12) as pool:
            assert set(pool.map(lambda _: ask(client, "new"), range(24))) == {expected[name]}
        assert post(served, "/v1/unload_lora_adapter", {"lora_name": "new"})[0] == 200
        assert end_of(client, "new") == ("error", "UnknownModelError")
    # No copy keeps what nobody can name.
    waiting.until(lambda: all(set(one["numbers"]["adapters"]) <= set(NAMES) for one in copies().values()), 30)


# The way in -----------------------------------------------------------------------------------------------------------


def test_keys_limits_and_refusals_are_the_single_servers(served, client):
    with pytest.raises(openai.AuthenticationError):
        ask(openai.OpenAI(base_url=f"{served.address}/v1", api_key="wrong", max_retries=0), "demo")
    assert {model.id for model in client.models.list()} == {"demo", *NAMES}
    body = {"model": "demo", "messages": PROMPT}
    status, found = post(served, "/v1/chat/completions", {**body, "colour": "blue"})
    assert (status, found["error"]["class"], found["error"]["param"]) == (400, "RequestError", "colour")
    assert post(served, "/v1/chat/completions", b"{" + b" " * 1_100_000 + b"}")[0] == 413
    assert post(served, "/v1/chat/completions", body, **{"content-type": "text/plain"})[0] == 415
    status, found = post(served, "/v1/load_lora_adapter", {"lora_name": "x", "lora_path": "../base"})
    assert (status, found["error"]["class"]) == (400, "RequestError")
    assert post(served, "/v1/chat/completions", {**body, "model": "nobody"})[0] == 404 and KEY not in "".join(served.said)


def test_metrics_are_of_all_copies(served):
    request = urllib.request.Request(f"{served.address}/api/status", headers={"authorization": f"Bearer {KEY}"})

    def rows():
        with urllib.request.urlopen(request, timeout=30) as found:
            return json.load(found)["models"][0]["numbers"].get("rows")

    waiting.until(lambda: rows() == 8, 30)


# What is lost ---------------------------------------------------------------------------------------------------------


def under_load(client, kill, requests=48):
    """Return how the requests ended, some of them streams; kill() is called when a few have been answered."""
    lock, done = threading.Lock(), 0

    def one(number):
        nonlocal done
        found = end_of(client, "demo", stream=number % 2 == 1, max_tokens=64)
        with lock:
            done += 1
            is_time = done == 6
        if is_time:
            kill()
        return found

    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(one, range(requests)))
    errors = [text for kind, text in found if kind == "error"]
    assert set(errors) <= set(ERRORS)
    assert len({text for kind, text in found if kind == "answer"}) == 1
    return {"requests": requests, "clients": 8, "answers": requests - len(errors), "errors": sorted(errors)}


def test_a_worker_killed_under_load_costs_named_errors_and_comes_back(client, counts):
    pid, before = next(iter(copies().items()))
    found = under_load(client, lambda: os.kill(before["worker_pid"], signal.SIGKILL))

    def is_back():
        one = copies().get(pid)
        return one is not None and one["state"] == "ready" and one["worker_pid"] != before["worker_pid"]

    waiting.until(is_back, BACK_S)
    assert copies()[pid]["restarts"] == before["restarts"] + 1
    counts["worker_killed"] = found
    # It had four rows and twice as many requests at most.
    assert found["answers"] >= 48 - 8 and found["errors"]


def test_a_copy_killed_under_load_costs_named_errors_and_is_replaced(client, counts):
    pid, before = next(iter(copies().items()))
    moment = []

    def kill():
        moment.append(time.monotonic())
        os.kill(pid, signal.SIGKILL)

    found = under_load(client, kill)
    waiting.until(lambda: len(copies()) == 2 and pid not in copies() and not psutil.pid_exists(before["worker_pid"]), BACK_S)
    counts["copy_killed"] = {**found, "back_s": round(time.monotonic() - moment[0], 1)}
    assert found["answers"] >= 48 - 8 and found["errors"]
    assert end_of(client, "style")[0] == "answer"


def test_a_front_that_is_killed_is_replaced(served, client, counts):
    def front():
        children = psutil.Process(served.process.pid).children(recursive=True)
        return [one.pid for one in children if f"ServeReplica:{NAME}:_front" in " ".join(one.cmdline())]

    (pid,) = front()
    stream = client.chat.completions.create(model="demo", messages=PROMPT, temperature=0, stream=True, **LONG)
    next(iter(stream))
    with ThreadPoolExecutor(1) as pool:
        whole = pool.submit(client.chat.completions.create, model="demo", messages=PROMPT, temperature=0, **LONG)
        waiting.until(lambda: sum(one["in_flight"] for one in copies().values()) == 2, 30)
        began = time.monotonic()
        os.kill(pid, signal.SIGKILL)
        # Whoever had a part of an answer sees that it has no end; whoever waits is told by Ray.
        with pytest.raises(openai.APIStatusError) as caught:
            whole.result(60)
        finishes = []
        with suppress(Exception):  # of whatever library carries it: the end of the connection
            finishes = [chunk.choices[0].finish_reason for chunk in stream]
        assert not any(finishes)

    def answers():
        try:
            return bool(ask(client, "style"))
        except openai.APIError:
            return False

    waiting.until(answers, BACK_S)
    counts["front_killed"] = {"back_s": round(time.monotonic() - began, 1), "status": caught.value.status_code}
    # And no copy goes on with what nobody waits for.
    waiting.until(lambda: not sum(one["in_flight"] for one in copies().values()), 60)


# The end, and files -----------------------------------------------------------------------------------------------------


def test_told_to_end_it_lets_a_stream_finish_and_leaves_nothing_behind(served, client):
    everything = psutil.Process(served.process.pid).children(recursive=True)
    stream = client.chat.completions.create(model="demo", messages=PROMPT, temperature=0, stream=True, **LONG)
    next(iter(stream))
    assert sum(one["in_flight"] for one in copies().values()) == 1
    ray.shutdown()
    served.process.terminate()
    assert [chunk.choices[0].finish_reason for chunk in stream][-1] in ("stop", "length")
    assert served.process.wait(90) == 0
    _, left = psutil.wait_procs(everything, 30)
    assert left == []
    assert "Error" not in "".join(served.said)


@pytest.fixture
def cluster():
    """A Ray that was there before, with what `serve deploy` talks to."""
    ray.shutdown()
    port = free_port()
    found = ray.init(
        address="local", num_cpus=4, include_dashboard=True, dashboard_port=port, log_to_driver=False,
        logging_level="error",
    )  # fmt: skip
    yield found
    ray.serve.shutdown()
    ray.shutdown()


def test_the_printed_file_is_deployed_as_it_is_and_follows_the_load(cluster, tmp_path, counts):
    import yaml
    from ray.serve.schema import ServeDeploySchema

    port, file = free_port(), tmp_path / "serve.yaml"
    command = [sys.executable, "-m", "trimtab", "serve", "--ray", "--print-config", str(file), str(DEMO / "base")]
    command += ["--name", "demo", "--device", "cpu", "--context", "384", "--audio-s", "1", "--port", str(port)]
    command += ["--replicas", "1..2", "--adapter", f"style={DEMO / 'adapters' / 'style'}"]
    subprocess.run(command, check=True, cwd=ROOT, env={**os.environ, "TRIMTAB_API_KEY": KEY})
    value = yaml.safe_load(file.read_text("utf-8"))
    assert KEY not in file.read_text("utf-8")
    schema = ServeDeploySchema.model_validate(value)
    assert schema.http_options.port == port and schema.applications[0].args == value["applications"][0]["args"]
    deploy = [sys.executable, "-m", "ray.serve.scripts", "deploy", str(file), "--address", f"http://{cluster.dashboard_url}"]
    subprocess.run(deploy, check=True, timeout=120)
    client = openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none", max_retries=0, timeout=60)

    def answers():
        try:
            return ask(client, "style")
        except openai.APIError:
            return None

    waiting.until(answers, START_S)
    assert running() == 1
    # A second server would have another address, and Ray Serve has one.
    other = [sys.executable, "-m", "trimtab", "serve", "--ray", str(DEMO / "base"), "--port", str(free_port())]
    found = subprocess.run(other, capture_output=True, text=True, timeout=START_S, cwd=ROOT)
    assert found.returncode == 2 and f"--port {port}" in found.stderr, found.stderr
    # As docs/on-a-cluster.md says: how fast Ray follows the load is said in the same file.
    faster = {"min_replicas": 1, "max_replicas": 2, "target_ongoing_requests": 2, "upscale_delay_s": 1}
    value["applications"][0]["deployments"] = [{"name": "demo", "autoscaling_config": faster}]
    file.write_text(yaml.safe_dump(value), "utf-8")
    subprocess.run(deploy, check=True, timeout=120)
    waiting.until(lambda: running() == 1 and answers(), START_S)
    moment, is_over = time.monotonic(), threading.Event()

    def load():
        while not is_over.is_set():
            client.chat.completions.create(model="style", messages=PROMPT, temperature=0, **LONG)

    with ThreadPoolExecutor(8) as pool:
        asked = [pool.submit(load) for _ in range(8)]
        try:
            waiting.until(lambda: running() == 2, START_S)
        finally:
            is_over.set()
        counts["autoscaling"] = {"clients": 8, "from": 1, "to": 2, "s": round(time.monotonic() - moment, 1)}
        assert [one.exception() for one in asked] == [None] * 8


def running():
    found = ray.serve.status().applications[NAME].deployments.get("demo")  # none for a moment of a new deployment
    return 0 if found is None else found.replica_states.get("RUNNING", 0)


def test_on_a_ray_that_is_there_only_the_application_comes_and_goes(cluster):
    found = Served(free_port(), "--ray", "--cpus-per-replica", "0.5")
    try:
        assert f"Ray: {cluster.address_info['gcs_address']}" in found.said
        assert ask(openai.OpenAI(base_url=f"{found.address}/v1", api_key="none", max_retries=0), "style")
        taken = urllib.parse.urlparse(found.address).port
        assert found.end() == 0
    finally:
        found.end()
    with socket.socket() as free:
        free.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        free.bind(("127.0.0.1", taken))
    assert ray.is_initialized() and ray.get(ray.remote(lambda: 1).remote()) == 1


def test_a_model_that_cannot_be_loaded_is_told(tmp_path):
    broken = tmp_path / "nothing"
    shutil.copytree(DEMO / "base", broken)
    weights = broken / "model-00001-of-00002.safetensors"  # its header promises more than there is
    weights.write_bytes(weights.read_bytes()[:-1000])
    command = [sys.executable, "-m", "trimtab", "serve", "--ray", str(broken), "--device", "cpu"]
    command += ["--name", "x", "--port", str(free_port()), "--cpus-per-replica", "0.25"]
    found = subprocess.run(command, capture_output=True, text=True, timeout=START_S, cwd=ROOT)
    assert found.returncode == 6, found.stderr
    assert "Ray could not start the model" in found.stderr and weights.name in found.stderr
    found = subprocess.run([*command[:5], str(tmp_path / "none"), *command[6:]], capture_output=True, text=True, cwd=ROOT)
    assert found.returncode == 3 and "no such folder" in found.stderr


def test_a_port_in_use_is_told_before_ray_is_started():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        command = [sys.executable, "-m", "trimtab", "serve", "--ray", str(DEMO / "base")]
        command += ["--port", str(taken.getsockname()[1])]
        found = subprocess.run(command, capture_output=True, text=True, timeout=60, cwd=ROOT)
    assert found.returncode == 2 and "is in use" in found.stderr, found.stderr


def test_a_ray_that_is_not_there_is_named():
    command = [sys.executable, "-m", "trimtab", "serve", "--ray", str(DEMO / "base"), "--ray-address", "127.0.0.1:1"]
    found = subprocess.run(command, capture_output=True, text=True, timeout=60, cwd=ROOT)
    assert found.returncode == 2 and "--ray-address" in found.stderr, found.stderr


def test_a_ray_that_has_ended_without_saying_so_is_not_waited_for(monkeypatch):
    from ray._private import services

    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr(services, "find_gcs_addresses", list)
    monkeypatch.setattr(services, "find_bootstrap_address", lambda folder: "127.0.0.1:1")
    assert on_ray._find_address(None) == "127.0.0.1:1" and not on_ray._answers("127.0.0.1:1")


def test_more_copies_than_a_local_ray_has_room_for_are_refused():
    command = [sys.executable, "-m", "trimtab", "serve", "--ray", str(DEMO / "base"), "--device", "cpu"]
    command += ["--port", str(free_port()), "--replicas", "1000"]
    found = subprocess.run(command, capture_output=True, text=True, timeout=START_S, cwd=ROOT)
    assert found.returncode == 2, found.stderr
    assert "--cpus-per-replica" in found.stderr


def test_an_old_ray_is_named(monkeypatch):
    from ray.serve.handle import DeploymentHandle

    monkeypatch.delattr(DeploymentHandle, "broadcast")
    with pytest.raises(RequestError) as caught:
        on_ray.check_ray()
    assert caught.value.field == "--ray" and caught.value.value == ray.__version__
