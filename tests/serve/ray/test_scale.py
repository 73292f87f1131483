"""What Ray Serve is told, and the front and a copy with Ray's part played by the test (the real one is in tests/serve/ray)."""

import asyncio
import json
import sys
import types
from concurrent.futures import Future
from pathlib import Path

import pytest
import yaml
from starlette.testclient import TestClient

from tests.raised import raised
from tests.serving import words
from tests.waiting import turns, until_async
from trimtab.cli import main
from trimtab.errors import RequestError
from trimtab.request import GenerateRequest, LoadRequest
from trimtab.serve.contract.job import Job
from trimtab.serve.contract.settings import Limits, Settings
from trimtab.serve.ray import config, deploy, ingress, replica
from trimtab.serve.ray.ingress import Ingress, Replicas, summed
from trimtab.serve.ray.replica import Replica
from trimtab.serve.scheduling.scheduler import StoppingError
from trimtab.serve.worker.ipc import event_from_message, event_to_message, job_to_message
from trimtab.serve.worker.registry import ServedModel
from trimtab.serve.worker.supervisor import ModelFailedError, WorkerDiedError, WorkerError

KEY = "a-key-for-the-test"
WAIT_S = 10


@pytest.fixture(autouse=True)
def no_key(monkeypatch):
    for name in (config.KEY_VARIABLE, config.ADMIN_KEY_VARIABLE):
        monkeypatch.delenv(name, raising=False)


def model(name="demo", *, device="cpu", **options):
    return ServedModel(name=name, request=LoadRequest(model="somewhere/else", device=device), **options)


def job(name="1", adapter=None):
    return Job(name, "echo", GenerateRequest(max_new_tokens=4), adapter=adapter)


# What Ray is told -----------------------------------------------------------------------------------------------------


def test_models_and_settings_come_back_from_plain_values(tmp_path):
    given = ServedModel(
        name="a/b", request=LoadRequest(model="hub/id", place={"*.1": "host"}, keep_unquantized=("x",), device="cpu"),
        adapters={"one": "adapters/one", "two": "adapters/two"}, kept=("two",), rows=3, resident_limit=2,
        supports=("image",),
    )  # fmt: skip
    settings = Settings(
        host="0.0.0.0", api_keys=(KEY,), adapter_root=tmp_path, allow_fetch=("example.org",), retry=True,
        limits=Limits(n=2, prompt_tokens=7),
    )  # fmt: skip
    found = config.arguments_of([given], settings, replicas=(1, 4), gpus=None, cpus=2)
    models, back = config.read_arguments(json.loads(json.dumps(found)))
    assert (models, back) == ([given], settings)
    assert (found["replicas"], found["gpus"], found["cpus"]) == ([1, 4], None, 2)


def test_paths_that_exist_here_are_told_in_full(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for folder in ("model", "adapters/one"):
        Path(folder).mkdir(parents=True)
    request = LoadRequest(model="model", device="cpu", offload_dir="offload")
    given = ServedModel(name="a", request=request, adapters={"one": "adapters/one", "two": "not/here"})
    settings = Settings(adapter_root=Path("adapters"))
    (found,), back = config.read_arguments(config.arguments_of([given], settings))
    assert found.request.model == str(tmp_path / "model") and found.request.offload_dir == str(tmp_path / "offload")
    assert dict(found.adapters) == {"one": str(tmp_path / "adapters" / "one"), "two": "not/here"}
    assert back.adapter_root == tmp_path / "adapters"


def test_the_key_of_the_machine_that_runs_it_counts(monkeypatch):
    found = config.arguments_of([model()], Settings(host="0.0.0.0", api_keys=(KEY,)))
    found["settings"]["api_keys"] = []
    assert raised(RequestError, config.read_arguments, found).field == "host"
    monkeypatch.setenv(config.KEY_VARIABLE, "another")
    monkeypatch.setenv(config.ADMIN_KEY_VARIABLE, "admin")
    settings = config.read_arguments(found)[1]
    assert (settings.api_keys, settings.admin_keys) == (("another",), ("admin",))


@pytest.mark.parametrize("options, given, field", [
    ({}, {"cpus": 0}, "--cpus-per-replica"), ({}, {"gpus": -1}, "--gpus-per-replica"),
    ({"device": "cuda"}, {"gpus": 1.5}, "--gpus-per-replica"), ({}, {"gpus": 1}, "--gpus-per-replica"),
    ({"device": "cuda"}, {"gpus": 0}, "--gpus-per-replica"), ({"device": "cuda:1"}, {}, "device"),
    ({"device": "auto"}, {"gpus": 0.5}, "gpu_memory"), ({"idle_unload_s": 60.0}, {}, "idle_unload"),
    ({"adapters": {"one": "/1"}, "weights": {"one": 0.7}}, {}, "--adapter"),
])  # fmt: skip
def test_what_cannot_hold_on_ray_is_refused(options, given, field):
    assert raised(RequestError, lambda: config.arguments_of([model(**options)], Settings(), **given)).field == field


@pytest.mark.parametrize("text, found", [("1", (1, 1)), ("3", (3, 3)), ("1..4", (1, 4))])
def test_replicas_are_a_number_or_a_range(text, found):
    assert config.read_replicas(text) == found


@pytest.mark.parametrize("text", ["0", "4..1", "1..", "..2", "two", "", "-1", "1.5", "0..2"])
def test_other_numbers_of_replicas_are_refused(text):
    assert raised(RequestError, config.read_replicas, text).field == "--replicas"


def test_gpus_are_for_models_that_may_use_one():
    arguments = {"gpus": 1}
    assert [config.gpus_of(arguments, device) for device in ("cpu", "auto", "cuda")] == [0.0, 1.0, 1.0]


# The command ----------------------------------------------------------------------------------------------------------


def serve(*flags, capsys):
    """Run the command; returns its exit code and what it wrote."""
    return main.main(["serve", "somewhere/else", "--name", "demo", "--device", "cpu", *flags]), capsys.readouterr()


@pytest.mark.parametrize("flags", [
    ("--replicas", "2"), ("--ray-address", "auto"), ("--gpus-per-replica", "0"), ("--cpus-per-replica", "1"),
    ("--print-config", "-"),
])  # fmt: skip
def test_what_says_something_of_copies_needs_ray(flags, capsys):
    code, said = serve(*flags, capsys=capsys)
    assert code == 2 and flags[0] in said.err and "without --ray" in said.err


@pytest.mark.parametrize("flags, named", [
    (("--together", "1"), "--together"), (("--idle-unload", "60"), "--idle-unload"),
    (("--print-config", "-", "--ray-address", "auto"), "--ray-address"),
    (("--print-config", "-", "--api-key", KEY), "--api-key"),
    (("--print-config", "-", "--api-key-file", "keys.txt"), "--api-key-file"),
    (("--print-config", "-", "--admin-key", KEY), "--admin-key"), (("--print-config", "-", "--port", "0"), "--port"),
    (("--print-config", "no/such/folder/file.yaml"), "--print-config"),
])  # fmt: skip
def test_what_has_no_effect_on_ray_is_refused(flags, named, capsys, monkeypatch):
    monkeypatch.setattr(deploy, "check_ray", lambda: None)
    code, said = serve("--ray", *flags, capsys=capsys)
    assert code == 2 and said.err.startswith(f"trimtab: {named}"), said.err
    assert KEY not in said.err


def test_without_ray_the_command_says_how_to_get_it(capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    code, said = serve("--ray", capsys=capsys)
    assert code == 2 and "--ray" in said.err and "pip install 'trimtab[ray]'" in said.err


def test_a_printed_file_holds_what_was_asked_and_no_key(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(deploy, "check_ray", lambda: None)
    monkeypatch.setenv(config.KEY_VARIABLE, KEY)
    monkeypatch.setenv(config.ADMIN_KEY_VARIABLE, "another-" + KEY)
    file = tmp_path / "serve.yaml"
    flags = ["--ray", "--replicas", "1..4", "--host", "0.0.0.0", "--port", "9000", "--rows", "3", "--timeout", "5", "--grace", "1"]
    flags += ["--audio-s", "3", "--cpus-per-replica", "0.5", "--gpus-per-replica", "0"]
    assert serve(*flags, "--print-config", str(file), capsys=capsys)[0] == 0
    assert serve(*flags, "--print-config", "-", capsys=capsys)[1].out == file.read_text("utf-8")
    assert KEY not in file.read_text("utf-8")
    found = yaml.safe_load(file.read_text("utf-8"))
    assert found["http_options"] == {"host": "0.0.0.0", "port": 9000}
    (application,) = found["applications"]
    module, _, name = application["import_path"].partition(":")
    assert getattr(sys.modules[module], name) is deploy.application
    models, settings = config.read_arguments(application["args"])
    assert (models[0].rows, settings.api_keys, application["args"]["replicas"]) == (3, (KEY,), [1, 4])
    assert (application["args"]["gpus"], application["args"]["cpus"]) == (0, 0.5)


def test_a_file_for_a_model_that_may_use_a_gpu_asks_for_one():
    arguments = config.arguments_of([model(device="auto")], Settings())
    assert yaml.safe_load(config.config(arguments))["applications"][0]["args"]["gpus"] == 1


def test_neither_the_front_nor_what_ray_is_told_imports_torch():
    import subprocess

    code = (
        "import sys, trimtab.serve.ray.config, trimtab.serve.ray.deploy, trimtab.serve.ray.ingress, trimtab.serve.ray.replica\n"
        "found = {'torch', 'ray', 'transformers'} & set(sys.modules)\nassert not found, found"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


# The front ------------------------------------------------------------------------------------------------------------


class Stream:
    """What a copy says: messages, an exception to raise, or "wait"."""

    def __init__(self, script):
        self.script, self.is_cancelled = list(script), False

    def __aiter__(self):
        return self

    async def __anext__(self):
        if not self.script:
            raise StopAsyncIteration
        found = self.script.pop(0)
        if found == "wait":
            await asyncio.Event().wait()
        if isinstance(found, BaseException):
            raise found
        return event_to_message(found)

    def cancel(self):
        self.is_cancelled = True


class Handle:
    """Ray's handle to copies. scripts: what each request is answered with, in their order; the last one goes on."""

    def __init__(self, *scripts, numbers=(), load_error=None):
        self.scripts, self.numbers, self.load_error = list(scripts), list(numbers), load_error
        self.asked, self.loaded, self.told, self.streams = [], [], [], []

    def options(self, **given):
        return Called(self, given)

    def __getattr__(self, name):
        return getattr(Called(self, {}), name)

    def broadcast(self, what, *arguments):
        self.told.append((what, *arguments))
        return self

    async def results_async(self, **given):
        return self.numbers


class Called:
    def __init__(self, handle, given):
        self.handle, self.given = handle, given

    def options(self, **given):
        return Called(self.handle, {**self.given, **given})

    @property
    def answer(self):
        def remote(message, path):
            script = self.handle.scripts[0] if len(self.handle.scripts) == 1 else self.handle.scripts.pop(0)
            self.handle.asked.append((message["adapter"], path, self.given.get("multiplexed_model_id")))
            self.handle.streams.append(Stream(script(message["id"]) if callable(script) else script))
            return self.handle.streams[-1]

        assert self.given["stream"]
        return types.SimpleNamespace(remote=remote)

    @property
    def load(self):
        async def remote(key, path):
            self.handle.loaded.append((key, path, self.given["multiplexed_model_id"]))
            return self.handle.load_error

        return types.SimpleNamespace(remote=remote)


@pytest.fixture(autouse=True)
def lost_is_connection_error(monkeypatch):
    """Ray is not here to say which exceptions are its own: an OSError stands for a lost copy."""

    def lost(exc):
        return WorkerDiedError(None, "lost") if isinstance(exc, OSError) else exc

    monkeypatch.setattr(ingress, "lost", lost)


def on_front(handle, work, *, retry=False, adapters=None, kept=()):
    """Run work(replicas, ask) on the copies of one model; ask(job) returns the events of a job once it has ended."""

    async def all_of_it():
        found = Replicas(handle, {"adapters": adapters or {}, "kept": list(kept)}, retry=retry)
        found.start()

        async def ask(one):
            events, ended = [], asyncio.Event()

            def emit(event):
                events.append(event)
                if event.kind in ("done", "error"):
                    ended.set()

            found.submit(one, emit)
            await asyncio.wait_for(ended.wait(), WAIT_S)
            await turns()
            return events

        try:
            return await asyncio.wait_for(work(found, ask), 2 * WAIT_S)
        finally:
            found.stop()
            await turns()

    return asyncio.run(all_of_it())


def said(events):
    return [event.text or event.finish or event.kind for event in events]


def answer(job_id):
    return words(types.SimpleNamespace(id=job_id, top_logprobs=None), "Hello", " there")


def error_class(events):
    assert events[-1].kind == "error" and [event.kind for event in events].count("error") == 1
    return events[-1].error["class"]


def test_a_job_is_told_what_its_copy_says():
    handle = Handle(answer)

    async def work(replicas, ask):
        assert said(await ask(job())) == ["started", "Hello", " there", "stop"]
        assert replicas.in_flight == 0

    on_front(handle, work)
    assert handle.asked == [(None, None, None)]


def test_ray_is_told_which_adapter_is_wanted_unless_every_copy_keeps_it():
    handle = Handle(answer)

    async def work(replicas, ask):
        for name in ("one", "two"):
            await ask(job(name, adapter=name))

    on_front(handle, work, adapters={"one": "/1", "two": "/2"}, kept=("two",))
    assert handle.asked == [("one", "/1", "one"), ("two", "/2", None)]


def test_a_mix_is_refused_by_name():
    handle = Handle(answer)

    async def work(replicas, ask):
        events = await ask(job(adapter="one:0.7+two:0.3"))
        assert error_class(events) == "RequestError" and "not supported: a mix of adapters with --ray" in str(events[-1])

    on_front(handle, work, adapters={"one": "/1", "two": "/2"})
    assert handle.asked == []


def test_a_copy_that_is_lost_is_a_named_error():
    handle = Handle([*words(job(), "so far")[:2], OSError()])

    async def work(replicas, ask):
        events = await ask(job())
        assert said(events)[:2] == ["started", "so far"] and error_class(events) == "WorkerDiedError"

    on_front(handle, work, retry=True)
    assert len(handle.asked) == 1  # it had spoken
    assert handle.streams[0].is_cancelled


def test_what_had_said_nothing_is_tried_once_more_if_asked():
    async def work(replicas, ask):
        assert said(await ask(job()))[-3:] == ["Hello", " there", "stop"]

    on_front(Handle([OSError()], answer), work, retry=True)

    async def not_twice(replicas, ask):
        assert error_class(await ask(job())) == "WorkerDiedError"

    handle = Handle([OSError()], [OSError()], answer)
    on_front(handle, not_twice, retry=True)
    assert len(handle.asked) == 2
    on_front(Handle([OSError()], answer), not_twice)


@pytest.mark.parametrize(
    "script", [[], words(job(), "so far")[:2], [asyncio.CancelledError()]], ids=["nothing", "words", "a cancellation"]
)
def test_an_answer_without_an_end_is_an_error(script):
    async def work(replicas, ask):
        assert error_class(await ask(job())) == "WorkerDiedError"

    on_front(Handle(script), work)


def test_what_is_ours_is_told_as_it_is_and_not_tried_again():
    handle = Handle([ModelFailedError(None)])

    async def work(replicas, ask):
        assert error_class(await ask(job())) == "ModelFailedError"

    on_front(handle, work, retry=True)
    assert len(handle.asked) == 1


def test_a_client_that_leaves_is_told_nothing_and_its_copy_hears_of_it():
    handle, events = Handle(["wait"]), []

    async def work(replicas, ask):
        replicas.submit(job(), events.append)
        await until_async(lambda: handle.streams)
        replicas.cancel("1")
        await turns(5)
        assert handle.streams[0].is_cancelled and replicas.in_flight == 0

    on_front(handle, work)
    assert events == []


def test_the_end_is_told_to_what_is_being_answered():
    handle = Handle(["wait"])

    async def work(replicas, ask):
        waiting = asyncio.create_task(ask(job()))
        await until_async(lambda: handle.streams)
        await asyncio.to_thread(replicas.drain, 0.1)
        assert error_class(await waiting) == "StoppingError"
        assert replicas.state == "stopped"
        with pytest.raises(StoppingError):
            replicas.submit(job(), print)

    on_front(handle, work)


def test_a_name_that_is_used_again_is_another_adapter():
    handle = Handle(answer)

    async def work(replicas, ask):
        for path in ("/1", "/2"):
            await asyncio.wrap_future(replicas.call("load_adapter", name="new", path=path))
            await ask(job(adapter="new"))
            await asyncio.wrap_future(replicas.call("unload_adapter", name="new"))
        assert error_class(await ask(job(adapter="new"))) == "UnknownModelError"

    on_front(handle, work)
    (first, second) = handle.loaded
    assert first[0] != second[0] and [first[1], second[1]] == ["/1", "/2"]
    assert first[2] == first[0]  # the copy that reads it is one that Ray sends its requests to
    assert handle.asked == [(first[0], "/1", first[0]), (second[0], "/2", second[0])]
    assert [told for told in handle.told if told[0] == "forget"] == [("forget", first[0]), ("forget", second[0])]


def test_an_adapter_that_a_copy_refuses_is_not_known():
    error = {"class": "AdapterError", "message": "bad", "fields": {"problems": ["x"]}}

    async def work(replicas, ask):
        with pytest.raises(WorkerError) as caught:
            await asyncio.wrap_future(replicas.call("load_adapter", name="new", path="/1"))
        assert caught.value.error == error
        assert error_class(await ask(job(adapter="new"))) == "UnknownModelError"

    on_front(Handle(answer, load_error=error), work)


def one_copy(pid=1, state="ready", **numbers):
    return {"state": state, "restarts": 1, "numbers": numbers, "plan": {"a": 1}, "pid": pid}


def test_the_state_is_that_of_the_copies(monkeypatch):
    monkeypatch.setattr(ingress, "POLL_S", 0.01)
    handle = Handle()

    async def work(replicas, ask):
        assert replicas.state == "loading"
        handle.numbers = [one_copy(1, rows=4), one_copy(2, state="restarting"), OSError()]
        await until_async(lambda: replicas.state == "ready")
        assert (replicas.numbers, replicas.restarts, replicas.plan) == ({"rows": 4}, 2, {"a": 1})
        handle.numbers = []
        await until_async(lambda: replicas.state == "restarting")
        handle.numbers = [one_copy(3, rows=4), one_copy(4, rows=4)]
        await until_async(lambda: replicas.state == "ready")
        assert replicas.numbers == {"rows": 8} and replicas.restarts == 4

    on_front(handle, work)


def test_numbers_of_copies_are_added_and_memory_is_the_fullest_ones():
    def numbers(resident, counts, memory, swap_s):
        return {
            "adapters": ["a", "b.1"], "resident": resident, "rows": 4, "swaps": 1, "counts": counts,
            "memory": {"gpu_bytes": memory}, "swap_p50_s": swap_s,
        }  # fmt: skip

    found = summed(
        [
            numbers(["a"], {"finished": 1, "by_adapter": {"": 7, "a": 1, "b.1": 2}}, 5, None),
            numbers(["b.1"], {"finished": 2, "by_adapter": {"b.1": 3, "gone.2": 9, "(unloaded)": 1}}, 3, 0.1),
        ],
        {"a": "a", "b.1": "b"},
    )
    assert found == {
        "adapters": ["a", "b"], "resident": ["a", "b"], "rows": 8, "swaps": 2,
        "counts": {"finished": 3, "by_adapter": {"": 7, "a": 1, "b": 5, "(unloaded)": 10}},
        "memory": {"gpu_bytes": 5}, "swap_p50_s": 0.1,
    }  # fmt: skip


def test_the_front_is_the_single_servers_app(monkeypatch):
    arguments = config.arguments_of(
        [model(adapters={"one": "/1"})], Settings(api_keys=(KEY,), admin_keys=("admin",), page=False), replicas=(1, 2)
    )
    handle = Handle(answer)
    app = Ingress(json.loads(json.dumps(arguments)), handle).__serve_build_asgi_app__()
    body = {"model": "one", "messages": [{"role": "user", "content": "Hi"}]}
    with TestClient(app, base_url="http://127.0.0.1", raise_server_exceptions=False) as client:
        assert client.post("/v1/chat/completions", json=body).status_code == 401
        client.headers["authorization"] = f"Bearer {KEY}"
        found = client.post("/v1/chat/completions", json=body)
        assert found.json()["choices"][0]["message"]["content"] == "Hello there"
        lines = client.post("/v1/chat/completions", json={**body, "stream": True}).text
        assert "there" in lines and lines.rstrip().endswith("data: [DONE]")
        assert client.post("/v1/chat/completions", json={**body, "model": "two"}).status_code == 404
        for mix in ({"model": "one:0.7"}, {"model": "demo", "adapter": {"one": 0.7}}):
            refused = client.post("/v1/chat/completions", json={**body, **mix})
            assert refused.status_code == 400, refused.text
            assert "not supported: a mix of adapters with --ray" in refused.json()["error"]["message"]
    assert handle.asked == [("one", "/1", "one")] * 2


# One copy -------------------------------------------------------------------------------------------------------------


class Worker:
    """A supervisor without a process. adapters: those it knows. in_use: those it will not give up."""

    def __init__(self, told, *, retry=False):
        self.told, self.retry = told, retry
        self.state, self.failure, self.restarts, self.pid, self.plan, self.in_flight = "loading", None, 0, 7, {}, 0
        self.numbers = {"adapters": sorted(told["adapters"])}
        self.in_use, self.calls, self.cancelled, self.jobs = set(), [], [], []

    def start(self):
        self.state = self.told.get("state", "ready")
        self.failure = {"class": "CheckpointError", "message": "no model", "fields": {}} if self.state == "failed" else None

    def stop(self):
        self.state = "stopped"

    def call(self, what, **given):
        future = Future()
        self.calls.append((what, *given.values()))
        known = set(self.numbers["adapters"])
        if what == "load_adapter" and given["path"] == "/bad":
            future.set_exception(WorkerError({"class": "AdapterError", "message": "bad", "fields": {}}))
            return future
        if what == "unload_adapter" and given["name"] in self.in_use:
            future.set_exception(WorkerError({"class": "RequestError", "message": "in use", "fields": {}}))
            return future
        known = known | {given["name"]} if what == "load_adapter" else known - {given.get("name")}
        self.numbers = {"adapters": sorted(known)}
        future.set_result(self.numbers)
        return future

    def submit(self, one, emit):
        self.jobs.append(one)
        if one.prompt == "echo":
            for event in answer(one.id):
                emit(event)

    def cancel(self, job_id):
        self.cancelled.append(job_id)


def multiplexed(max_num_models_per_replica):
    """Ray's, in small: the last few names, without a word to anyone."""

    def decorate(function):
        held = []

        async def wrapped(name):
            if name not in held:
                await function(name)
            held[:] = [*(one for one in held if one != name), name]
            if max_num_models_per_replica > 0:
                held[:] = held[-max_num_models_per_replica:]
            return name

        return wrapped

    return decorate


def on_copy(work, *, adapters=None, kept=(), places=2, **told):
    """Run work(copy, worker) on a copy of a model."""

    async def all_of_it():
        copy = Replica.__new__(Replica)
        await copy.__init__({"adapters": adapters or {}, "kept": list(kept), **told}, False, places)
        return await asyncio.wait_for(work(copy, copy._supervisor), WAIT_S)

    return asyncio.run(all_of_it())


@pytest.fixture(autouse=True)
def no_ray(monkeypatch):
    serve_module = types.ModuleType("ray.serve")
    serve_module.multiplexed = multiplexed
    ray_module = types.ModuleType("ray")
    ray_module.serve = serve_module
    monkeypatch.setitem(sys.modules, "ray", ray_module)
    monkeypatch.setitem(sys.modules, "ray.serve", serve_module)
    monkeypatch.setattr(replica, "Supervisor", Worker)


async def heard(copy, one, path=None):
    return [event_from_message(message) async for message in copy.answer(job_to_message(one), path)]


def test_a_copy_begins_with_its_adapters_and_reads_others_once():
    async def work(copy, worker):
        assert worker.calls == []
        for name in ("one", "three", "three", "one", "four", "three"):
            assert said(await heard(copy, job(name, adapter=name), f"/{name}"))[-1] == "stop"
        # Read once each; "three" had been forgotten by Ray, not by the worker.
        assert worker.calls == [("load_adapter", "three", "/three"), ("load_adapter", "four", "/four")]
        numbers = await copy.numbers()
        assert (numbers["asked"], numbers["missed"], numbers["read"]) == (6, 3, 2)

    on_copy(work, adapters={"one": "/one", "two": "/two"})


def test_kept_adapters_are_no_matter_of_rays():
    async def work(copy, worker):
        await heard(copy, job(adapter="one"), "/one")
        assert (copy.asked, copy.missed, worker.calls) == (0, 0, [])

    on_copy(work, adapters={"one": "/one"}, kept=("one",), places=1)


def test_an_adapter_that_is_bad_is_told_and_the_next_job_is_answered():
    async def work(copy, worker):
        assert error_class(await heard(copy, job(adapter="bad"), "/bad")) == "AdapterError"
        assert (await copy.load("bad", "/bad"))["class"] == "AdapterError" and await copy.load("good", "/good") is None
        assert said(await heard(copy, job("2", adapter="good"), "/good"))[-1] == "stop"

    on_copy(work)


def test_a_forgotten_adapter_goes_once_nobody_uses_it():
    async def work(copy, worker):
        await copy.load("one", "/one")
        worker.in_use = {"one"}
        await copy.forget("one")
        assert worker.numbers["adapters"] == ["one"]
        worker.in_use = set()
        await copy.numbers()
        assert worker.numbers["adapters"] == []

    on_copy(work)


def test_a_client_that_leaves_frees_its_row():
    async def work(copy, worker):
        asking = asyncio.create_task(heard(copy, Job("9", "wait", GenerateRequest(max_new_tokens=4))))
        await until_async(lambda: worker.jobs)
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)
        assert worker.cancelled == ["9"]

    on_copy(work)


def test_a_copy_is_unhealthy_once_its_worker_is_given_up():
    async def work(copy, worker):
        await copy.check_health()
        worker.state = "restarting"
        await copy.check_health()
        worker.state, worker.failure = "failed", {"class": "DeviceError", "message": "gone", "fields": {}}
        with pytest.raises(RuntimeError, match="gone"):
            await copy.check_health()

    on_copy(work)


def test_a_copy_whose_model_cannot_be_loaded_is_not_made():
    with pytest.raises(RuntimeError, match="ModelFailedError: .*no model"):
        on_copy(None, state="failed")
