"""Adapters in host memory: the same files once, counted, refused beyond the budget; what somebody waits for is prepared first."""

import gc
import json
import os
import shutil
from dataclasses import replace

import pytest

import trimtab
from tests.raised import raised
from trimtab.api import plan_request
from trimtab.demo.demo import FOLDER as DEMO
from trimtab.engine.lora import layers
from trimtab.errors import AdapterError, DoesNotFitError, RequestError, gib
from trimtab.planning import Plan
from trimtab.planning.values.byte_sizes import HELD_OBJECT_BYTES
from trimtab.report.render import WIDTH, Lines
from trimtab.request import GenerateRequest, LoadRequest
from trimtab.serve.adapters.new_adapters import AdapterQueue, Unprepared, Urgency
from trimtab.serve.contract.job import Job
from trimtab.serve.scheduling.scheduler import Scheduler
from trimtab.serve.worker.engine import LoadedEngine

STYLE = DEMO / "adapters" / "style"


@pytest.fixture(scope="module")
def model():
    plan = trimtab.plan(DEMO / "base", device="cpu", quant="none", dtype="float32", context=128, batch=2)
    with trimtab.load(plan) as loaded:
        yield loaded


@pytest.fixture
def shelf(model):
    made = LoadedEngine(model, rows=2).shelf
    yield made
    for name in made.resident:
        model.unload_adapter(name)


@pytest.fixture
def copy(tmp_path):
    def copied(name):
        folder = shutil.copytree(STYLE, tmp_path / name)
        config = json.loads((folder / "adapter_config.json").read_text(encoding="utf-8"))
        (folder / "adapter_config.json").write_text(json.dumps(config | {"base_model_name_or_path": name}))
        return folder

    return copied


def test_equal_files_in_several_folders_are_held_once(shelf, tmp_path):
    shelf.add("first", STYLE)
    one = shelf.host.nbytes
    for number in range(3):
        shelf.add(f"copy-{number}", shutil.copytree(STYLE, tmp_path / f"copy-{number}"))
    assert shelf.host.nbytes == one and len(set(map(id, shelf.held))) == 1


def test_one_folder_under_many_names_is_held_once(shelf, tmp_path):
    shelf.add("first", STYLE)
    one = shelf.host.nbytes
    assert one > (STYLE / "adapter_model.safetensors").stat().st_size
    if hasattr(os, "symlink"):
        (tmp_path / "link").symlink_to(STYLE, target_is_directory=True)
        shelf.add("link", tmp_path / "link")
    for number in range(119):
        shelf.add(f"name-{number}", str(STYLE))
    assert shelf.host.nbytes == one and len(shelf.held) == 1
    shelf.remove("first", [])
    assert shelf.host.nbytes == one and "name-0" in shelf.names


def test_names_of_one_folder_answer_alike_beside_each_other(model, shelf):
    engine = LoadedEngine(model, rows=2)
    for name in ("a", "b"):
        engine.shelf.add(name, STYLE)
    told = []
    scheduler = Scheduler(engine, told.append)
    for name in ("a", "b"):
        scheduler.submit(Job(name, [5, 6, 7], GenerateRequest(max_new_tokens=8), adapter=name))
    while scheduler.turn():
        pass
    texts = {name: "".join(event.text for event in told if event.job_id == name) for name in ("a", "b")}
    assert texts["a"] == texts["b"] and set(engine.shelf.resident) == {"a", "b"}
    engine.shelf.remove("a", [])
    scheduler.submit(Job("c", [5, 6, 7], GenerateRequest(max_new_tokens=8), adapter="b"))
    while scheduler.turn():
        pass
    assert "".join(event.text for event in told if event.job_id == "c") == texts["a"]
    engine.shelf.remove("b", [])


def test_beyond_the_hosts_budget_an_adapter_is_refused_by_name_before_it_is_read(model, shelf, copy, monkeypatch):
    shelf.add("one", copy("one"))
    each = shelf.host.nbytes
    plan = model.plan
    used = plan.host_peak_bytes + plan.gpu_needed_bytes
    monkeypatch.setattr(model, "plan", replace(plan, host_budget_bytes=used + 2 * each + 2**16))
    shelf.add("two", copy("two"))
    assert shelf.host.nbytes == 2 * each
    with monkeypatch.context() as patch:
        patch.setattr(type(model), "read_adapter", lambda self, path: pytest.fail("read"))
        with pytest.raises(DoesNotFitError) as caught:
            shelf.add("three", copy("three"))
    assert caught.value.block == "adapter three" and caught.value.device == "host"
    assert caught.value.needed_bytes > caught.value.budget_bytes == 2**16
    limit = model.plan.held_adapters_limit_bytes
    assert f"the plan leaves {limit} B of host memory for adapters, those that are loaded take {2 * each} B" in str(caught.value)
    shelf.remove("one", [])
    gc.collect()
    shelf.add("three", copy("four"))


def test_a_model_refuses_an_adapter_without_room_before_it_is_read(model, monkeypatch):
    monkeypatch.setattr(type(model), "free_adapter_bytes", lambda self: 1000)
    monkeypatch.setattr(type(model), "read_adapter", lambda self, path: pytest.fail("read"))
    error = raised(DoesNotFitError, model.load_adapter, "style", STYLE)
    assert error.block == "adapter style" and error.needed_bytes > error.budget_bytes == 1000


def test_files_that_have_changed_are_read_again(shelf, copy):
    folder = copy("changing")
    shelf.add("before", folder)
    config = folder / "adapter_config.json"
    config.write_text(config.read_text(encoding="utf-8").rstrip() + "\n\n", encoding="utf-8")
    shelf.add("after", folder)
    assert len(shelf.held) == 2 and shelf.host.nbytes > 2 * HELD_OBJECT_BYTES


def test_what_is_no_adapter_is_refused_and_counts_nothing(shelf, tmp_path):
    before = shelf.host.nbytes
    with pytest.raises(AdapterError):
        shelf.add("nothing", tmp_path)
    assert shelf.host.nbytes == before


def test_the_plan_of_a_server_counts_what_its_adapters_take_and_says_how_much_more_may_come(tmp_path):
    request = LoadRequest(
        model=str(DEMO / "base"), device="cpu", quant="none", dtype="float32", context_tokens=128,
        adapters={"style": str(STYLE), "again": str(STYLE)},
    )  # fmt: skip
    alone = plan_request(request)
    plan = plan_request(request, later={"waits": str(DEMO / "adapters" / "specialist"), "same": str(STYLE)})
    sizes = [(DEMO / "adapters" / name / "adapter_model.safetensors").stat().st_size for name in ("style", "specialist")]
    counted = sum(sizes) + 2 * HELD_OBJECT_BYTES  # each folder once
    assert plan.host["held_adapters"] == counted and "held_adapters" not in alone.host
    assert plan.host_peak_bytes - plan.host["process"] == alone.host_peak_bytes - alone.host["process"] + counted
    # What is counted, and what the budget leaves beside the plan, which is on the host too.
    left = plan.host_budget_bytes - plan.host_peak_bytes - plan.gpu_needed_bytes
    assert plan.held_adapters_limit_bytes == counted + left
    for text in (str(plan), Lines(WIDTH).show(plan.document()).replace("\n", " ")):
        words = f"held adapters {gib(counted)} of {gib(plan.held_adapters_limit_bytes)} for adapters"
        assert words in " ".join(text.split())
        assert "for adapters" not in str(alone)
    # What plans one prompt at a time says of a server what it does not count.
    kept = f"trimtab serve also keeps the adapters here: {gib(sizes[0] + HELD_OBJECT_BYTES)}"
    for text in (str(alone), Lines(WIDTH).show(alone.document())):
        assert f"{kept} of {gib(alone.held_adapters_limit_bytes)}" in " ".join(text.split())
    assert "also keeps" not in str(plan) and "also keeps" not in str(plan_request(replace(request, adapters={})))
    values = plan.to_json()
    assert values["host"]["held_adapters"] == counted and values["held_adapters_limit_bytes"] == counted + left
    assert Plan.from_json(json.loads(json.dumps(values))).to_json() == values
    with pytest.raises(RequestError, match="plan.held_adapters_limit_bytes"):
        Plan.from_json({**values, "held_adapters_limit_bytes": 2**60})


def test_what_the_plan_counts_is_what_is_held(monkeypatch):
    """The figure of the plan is an upper bound, and close to what the server holds then."""
    folders = {name: str(DEMO / "adapters" / name) for name in ("style", "specialist", "rslora-dora")}
    request = LoadRequest(
        model=str(DEMO / "base"), device="cpu", quant="none", dtype="float32", context_tokens=128, batch=2, adapters=folders
    )
    plan = plan_request(request, later={})
    with trimtab.load(plan) as model:
        engine = LoadedEngine(model, rows=2)
        host = engine.shelf.host
        assert 0.9 * plan.host["held_adapters"] < host.nbytes <= plan.host["held_adapters"]
        assert host.nbytes + host.room_bytes == plan.held_adapters_limit_bytes
        # A budget that only just holds what is planned takes no more.
        full = replace(plan, host_budget_bytes=plan.host_peak_bytes + plan.gpu_needed_bytes)
        assert full.held_adapters_limit_bytes == plan.host["held_adapters"]


def test_one_registry_says_which_adapters_are_on_the_model(model):
    model.load_adapter("one", STYLE)
    assert model.adapters == ("one",) and set(model.adapter_store.names) == {"one"} and set(model.adapter_sizes) == {"one"}
    layers.detach(model.hf_model, "one", store=model.adapter_store)
    assert model.adapters == () and not model.adapter_store.names and not model.adapter_sizes


def entry(log, name, urgency, *, pieces=2, names=(), fails=False):
    def compute():
        for number in range(pieces):
            log.append(f"{name}{number}")
            yield
        if fails:
            raise ValueError(name)

    def finish(work):
        try:
            work()
        except ValueError as exc:
            log.append(f"{exc} failed")

    return Unprepared(compute(), finish, lambda: log.append(f"{name} ready"), urgency, set(names))


def nobody(name):
    return False


def run(queue, is_needed=nobody):
    while queue:
        queue.step(is_needed)


def test_who_is_waited_for_comes_before_changed_files_and_those_before_the_start():
    log, queue = [], AdapterQueue()
    queue.add(entry(log, "s", Urgency.START))
    queue.step(nobody)
    queue.add(entry(log, "c", Urgency.CHANGED))
    queue.add(entry(log, "x", Urgency.AWAITED))
    queue.add(entry(log, "y", Urgency.AWAITED))
    run(queue)
    assert log == ["s0", "x0", "x1", "x ready", "y0", "y1", "y ready", "c0", "c1", "c ready", "s1", "s ready"]


def test_an_adapter_that_a_request_needs_comes_first_as_long_as_it_is_needed():
    log, needed = [], set()
    queue = AdapterQueue()
    for name in ("s", "t"):
        queue.add(entry(log, name, Urgency.START, names={name}))
    needed.add("t")
    queue.step(needed.__contains__)
    needed.clear()
    run(queue)
    assert log == ["t0", "s0", "s1", "s ready", "t1", "t ready"]


def test_pieces_for_requests_alone_are_those_of_adapters_that_a_request_needs():
    log, needed = [], {"t"}
    queue = AdapterQueue()
    for name, urgency in (("s", Urgency.START), ("t", Urgency.START), ("c", Urgency.CHANGED), ("x", Urgency.AWAITED)):
        queue.add(entry(log, name, urgency, names={name} if urgency is Urgency.START else ()))
    for _ in range(10):
        queue.step(needed.__contains__, only_for_requests=True)
    assert log == ["t0", "t1", "t ready"]
    run(queue, needed.__contains__)
    assert log[3:6] == ["x0", "x1", "x ready"]


def test_one_that_fails_is_finished_with_its_error_and_the_next_goes_on():
    log, queue = [], AdapterQueue()
    queue.add(entry(log, "x", Urgency.AWAITED, fails=True))
    queue.add(entry(log, "y", Urgency.AWAITED, pieces=0))
    run(queue)
    assert log == ["x0", "x1", "x failed", "y ready"]
    queue.step(nobody)  # nothing is left


@pytest.mark.parametrize("names", [{"s"}, {"s", "again"}])
def test_an_unloaded_adapter_is_prepared_only_for_its_other_names(names):
    log, queue = [], AdapterQueue()
    queue.add(entry(log, "s", Urgency.START, names=names))
    assert queue.has("s")
    queue.forget("s")
    assert not queue.has("s") and queue.has("again") == bool(queue) == (len(names) == 2)


def test_changed_files_of_an_unloaded_or_changed_again_adapter_are_never_used():
    used = []

    def changed(name, what):
        return Unprepared(iter([None]), lambda work: work(), lambda: used.append(what), Urgency.CHANGED, replaces=name)

    queue = AdapterQueue()
    for one in (changed("a", "a1"), changed("b", "b1"), changed("a", "a2")):
        queue.add(one)
    queue.forget_changed("b")
    while queue:
        queue.step(nobody)
    assert used == ["a2"]
