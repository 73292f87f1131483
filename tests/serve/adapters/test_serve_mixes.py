"""Mixes in the server: what a request names, what is on the model for it, and that it answers what Python's mix answers."""

import pytest
import torch

import trimtab
from tests import pico
from tests.raised import raised, refused
from tests.serve.worker.test_serve_engine import LOOK, PATHS, ask, run
from tests.serving import MockPool, words
from trimtab.adapter_names import check_mix, is_mix, mix_name, parse_mix, parts_of, weights_of
from trimtab.demo.demo import FOLDER as DEMO
from trimtab.engine.lora.mixes import MOST_MIXES
from trimtab.errors import DoesNotFitError, RequestError
from trimtab.request import LoadRequest
from trimtab.serve.api.schemas import ChatRequest, EmbeddingsRequest
from trimtab.serve.api.to_jobs import voice_of
from trimtab.serve.contract.errors import UnknownModelError
from trimtab.serve.contract.settings import Settings
from trimtab.serve.pool import Pool
from trimtab.serve.scheduling.scheduler import Scheduler
from trimtab.serve.worker.engine import LoadedEngine
from trimtab.serve.worker.registry import ServedModel

WEIGHTS = {"a0": 0.7, "a1": -0.3}
MIX = mix_name(WEIGHTS)
IDS = list(range(5, 25))


# Names ----------------------------------------------------------------------------------------------------------------


def test_a_mix_has_one_name_whatever_its_order():
    assert MIX == "a0:0.7+a1:-0.3" == mix_name(dict(reversed(WEIGHTS.items())))
    assert weights_of(MIX) == WEIGHTS and parts_of(MIX) == ("a0", "a1")
    assert parts_of("a0") == ("a0",) and parts_of(None) == () and is_mix("a:1") and not is_mix("a-1.b_2")
    assert parse_mix("a+b:2", field="model", weights={"a": 0.5}) == {"a": 0.5, "b": 2.0}
    assert check_mix({"a": 1.0}, field="adapter") == "a" and check_mix({"a": 0.5}, field="adapter") == "a:0.5"


@pytest.mark.parametrize(("weights", "words"), [
    ({}, "at least one"), ({f"a{n}": 1.0 for n in range(9)}, "at most 8"), ({"a": 0.0}, "weight of 0"),
    ({"a": float("inf")}, "finite number"), ({"a": 1001.0}, "between -1000 and 1000"), ({"a b": 1.0}, "letters"),
])  # fmt: skip
def test_what_is_no_mix_is_refused_by_name(weights, words):
    assert refused(check_mix, weights, field="adapter", match=words).field.startswith("adapter")


@pytest.fixture
def pool():
    request = LoadRequest(model="none")
    served = ServedModel(name="demo", request=request, adapters={"a": "/a", "b": "/b"}, weights={"b": 0.5})
    return Pool([served, ServedModel(name="other", request=request, adapters={"c": "/c"})], Settings())


def test_a_models_name_may_hold_a_mix(pool):
    for name in ("a:0.7+b:0.3", "b:0.3+a:0.7", "demo:a:0.7+b:0.3", "demo:b:0.3 + a:.7"):
        assert pool.resolve(name) == ("demo", "a:0.7+b:0.3")
    assert pool.resolve("c:2") == ("other", "c:2.0")
    # A weight that was given with the path holds where the request says none.
    assert pool.resolve("b") == pool.resolve("demo:b") == ("demo", "b:0.5")
    assert pool.resolve("b:1") == ("demo", "b") and pool.resolve("a+b") == ("demo", "a:1.0+b:0.5")


@pytest.mark.parametrize(("name", "kind", "words"), [
    ("a:x", RequestError, "the weight of a is not a number"), ("a:0.5+a:0.5", RequestError, "names a twice"),
    ("a:0.5+nobody:0.5", UnknownModelError, "nobody"), ("a:0.5+c:0.5", UnknownModelError, "c"),
    ("a:0", RequestError, "weight of 0"), ("a:nan", RequestError, "finite number"), ("a:", RequestError, "not a number"),
    ("nobody:0.5", UnknownModelError, "nobody:0.5"), ("demo:nobody:1", UnknownModelError, "demo:nobody:1"),
])  # fmt: skip
def test_a_wrong_mix_is_named(pool, name, kind, words):
    error = raised(kind, pool.resolve, name, match=words)
    assert type(error) is kind and error.field.startswith("model")


def chat(**fields):
    return ChatRequest(messages=[{"role": "user", "content": "x"}], **fields)


def test_the_field_adapter_names_one_or_several(pool):
    assert voice_of(pool, chat(model="demo", adapter={"a": 0.7, "b": 0.3})) == ("demo", "a:0.7+b:0.3")
    assert voice_of(pool, chat(model="demo", adapter="a")) == ("demo", "a")
    assert voice_of(pool, chat(model="demo", adapter={"b": 1})) == ("demo", "b")  # what it says, not the served weight
    assert voice_of(pool, EmbeddingsRequest(model="demo", input="x", adapter="a:2")) == ("demo", "a:2.0")
    for wrong in ({"model": "a", "adapter": "b"}, {"model": "demo", "adapter": {"nobody": 1.0}}, {"model": "demo", "adapter": {}}):
        assert refused(voice_of, pool, chat(**wrong)).field.startswith("adapter")


def test_a_request_with_a_mix_reaches_the_model_and_a_wrong_one_is_400():
    from starlette.testclient import TestClient

    from trimtab.serve.http.app import make_app
    from trimtab.serve.observe.metrics import Metrics

    class Named(MockPool):
        def resolve(self, name, *, field="model"):
            served = ServedModel(name="demo", request=LoadRequest(model="none"), adapters={"a": "/a", "b": "/b"})
            return Pool([served], Settings()).resolve(name, field=field)

    mock, metrics = Named(lambda job: words(job, "fine")), Metrics()
    with TestClient(make_app(mock, Settings(), metrics), base_url="http://127.0.0.1") as client:
        said = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 5}
        mixed = {"adapter": {"a": 0.7, "b": 0.3}}
        for path, body in (
            ("/v1/chat/completions", {"model": "demo", **mixed, **said}),
            ("/v1/chat/completions", {"model": "a:0.7+b:0.3", **said}),
            ("/v1/completions", {"model": "demo", "prompt": "x", **mixed}), ("/v1/messages", {"model": "demo", **mixed, **said}),
            ("/v1/messages", {"model": "b:0.3+a:0.7", **said}), ("/v1/responses", {"model": "demo", "input": "x", **mixed}),
            ("/v1/responses", {"model": "demo:a:0.7+b:0.3", "input": "x"}),
        ):  # fmt: skip
            assert client.post(path, json=body).status_code == 200, body
            assert mock.jobs.pop().adapter == "a:0.7+b:0.3"
        shown = client.get("/v1/models/a:0.7+b:0.3").json()
        assert (shown["id"], shown["root"], shown["parent"]) == ("a:0.7+b:0.3", "a:0.7+b:0.3", "demo")
        for adapter, param in (({"a": "0.7"}, "adapter.a"), ({"a": 0}, "adapter.a"), ({"n": 1}, "adapter"), ([1], "adapter")):
            found = client.post("/v1/chat/completions", json={"model": "demo", "adapter": adapter, **said})
            assert found.status_code in (400, 404) and found.json()["error"]["param"] == param
        counted = client.get("/metrics").text
    assert 'adapter="(mix)"' in counted and "0.7" not in counted.partition("trimtab_requests_total{")[2].partition("}")[0]


def test_weights_of_paths_come_from_the_command_line_and_the_registry(tmp_path):
    from trimtab.cli.commands.serve import served_models
    from trimtab.cli.main import parser
    from trimtab.serve.worker.registry import read_registry

    path = DEMO / "adapters" / "style"
    (one,) = served_models(parser().parse_args(["serve", str(DEMO / "base"), "--adapter", f"s={path}:0.7"]))
    assert one.adapters == {"s": str(path)} and one.weights == {"s": 0.7}
    file = tmp_path / "models.toml"
    file.write_text(f'[models.demo]\npath = "{DEMO / "base"}"\n[models.demo.adapters]\ns = "{path}:0.7"\nt = "{path}"\n')
    (two,) = read_registry(file)
    assert two.adapters == {"s": str(path), "t": str(path)} and two.weights == {"s": 0.7}


# On a model -----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def paths(tmp_path_factory):
    folder = tmp_path_factory.mktemp("mixes")
    base = DEMO / "base"
    made = {f"a{n}": pico.adapter(base, folder / f"a{n}", seed=n, targets="all", rank=4 + 4 * n) for n in (0, 1, 2)}
    return {**made, "dora": pico.adapter(base, folder / "dora", seed=5, targets="all", dora=True), "base": base}


@pytest.fixture
def loaded(paths):
    adapters = {name: path for name, path in paths.items() if name != "base"}
    plan = trimtab.plan(
        paths["base"], adapters=adapters, quant="none", dtype="float32", context=128, audio_s=1.0, device="cpu", batch=3
    )
    with trimtab.load(plan) as model:
        yield model


def engine_of(model, limit):
    engine = LoadedEngine(model, rows=3, resident_limit=None)
    for name, path in model.plan.request.adapters.items():
        if name not in engine.shelf.names:
            engine.shelf.add(name, path)
    for key in list(engine.shelf._resident):
        engine.shelf._take_off(key)
    engine.shelf._limit = limit
    return engine


def answered(engine, *names):
    jobs = [ask(str(name), prompt=IDS, adapter=name, tokens=8, top_logprobs=0) for name in names]
    found = run(engine, *jobs)
    return [[token.token_id for event in found[job.id][2] for token in event.tokens] for job in jobs]


def test_a_mix_from_host_memory_holds_the_values_of_pythons_and_needs_no_other_place(loaded):
    name = loaded.adapter_name(WEIGHTS)  # compared with PEFT's weighted sum in test_many.py
    expected = {place.leaf.module_path: place.leaf.adapters[name] for place in loaded.adapter_store.holders[name].fitting.plain}
    values = {path: (one.A.clone(), one.B.clone()) for path, one in expected.items()}
    alone = {str(one): loaded.answer(IDS, adapter=one, max_new_tokens=8).token_ids for one in (WEIGHTS, "a2", None)}
    engine = engine_of(loaded, 1)
    assert engine.shelf.bring(MIX, []) == MIX and engine.shelf.resident == () and engine.shelf.mixes == (MIX,)
    places = loaded.adapter_store.holders[MIX].fitting.plain
    assert len(places) == len(values) > 5
    for place in places:
        A, B = values[place.leaf.module_path]
        assert torch.equal(place.leaf.adapters[MIX].A, A) and torch.equal(place.leaf.adapters[MIX].B, B)
    found = answered(engine, MIX, "a2", None)
    for ids, one in zip(found, alone.values(), strict=True):
        assert tuple(ids) == tuple(one[: len(ids)]) and len(ids) > 1
    assert alone[str(WEIGHTS)] != alone["None"] and engine.shelf.swaps == 2


def test_a_mix_with_dora_has_its_adapters_beside_it(loaded):
    weights = {"dora": 0.5}
    expected = loaded.answer(IDS, adapter=weights, max_new_tokens=8).token_ids
    engine = engine_of(loaded, 2)
    name = mix_name(weights)
    (ids,) = answered(engine, name)
    assert tuple(ids) == tuple(expected[: len(ids)]) and set(engine.shelf.resident) == {"dora"}
    # An adapter that the mix needs goes with it.
    engine.shelf.bring("a1", [])
    engine.shelf.bring("a2", [])
    assert engine.shelf.mixes == () and name not in loaded.adapter_store.names
    with pytest.raises(RequestError, match="needs 2 adapter slots"):
        engine_of(loaded, 1).shelf.check(name)
    with pytest.raises(RequestError, match="depends on their order"):
        engine.shelf.check(mix_name({**weights, "a0": 2.0}))


def test_what_is_in_use_stays_and_the_oldest_mix_goes(loaded):
    engine = engine_of(loaded, 2)
    engine.shelf.bring(MIX, [])
    assert not engine.shelf.has_room_for("a0", [MIX, "a2"]) or engine.shelf.has_room_for("a0", [MIX])
    engine.shelf.bring("a2", [MIX])
    assert not engine.shelf.has_room_for("a0:0.5", [MIX, "a2"]) and engine.shelf.has_room_for("a0:0.5", [MIX])
    engine.shelf.bring("a0:0.5", [MIX])
    assert engine.shelf.mixes == (MIX, "a0:0.5") and engine.shelf.resident == ()
    engine.shelf._limit = None
    for number in range(MOST_MIXES + 3):
        engine.shelf.bring(mix_name({"a0": 1 + number / 8, "a1": 1.0}), [])
    assert len(engine.shelf.mixes) == MOST_MIXES


def test_an_adapter_of_a_mix_that_is_in_use_is_not_unloaded(loaded):
    engine = engine_of(loaded, None)
    scheduler = Scheduler(engine, [].append)
    scheduler.submit(ask("1", prompt=IDS, adapter=MIX))
    assert scheduler.uses("a0") == scheduler.uses("a1") == 1 and scheduler.uses("a2") == 0
    while scheduler.turn():
        pass
    assert scheduler.counts["by_adapter"] == {"(mix)": 1}
    engine.shelf.remove("a1", [])
    assert engine.shelf.mixes == ()
    with pytest.raises(RequestError, match="a1"):
        engine.shelf.check(MIX)


def test_a_mix_without_room_is_refused_before_it_waits(loaded, monkeypatch):
    engine = engine_of(loaded, None)
    monkeypatch.setattr(type(loaded), "free_adapter_bytes", lambda self: 10)
    error = raised(DoesNotFitError, lambda: engine.begin(ask("1", prompt=IDS, adapter=MIX)))
    assert (
        error.budget_bytes == 10 < error.needed_bytes == loaded.mixes.needed_bytes([engine.shelf._held[name] for name in WEIGHTS])
    )


def test_the_demos_adapters_mix_with_pictures():
    plan = trimtab.plan(
        DEMO / "base", quant="none", dtype="float32", adapters=PATHS, context=384, audio_s=1.0, device="cpu", batch=2
    )
    with trimtab.load(plan) as model:
        weights = {"style": 0.6, "specialist": 0.4}
        expected = model.answer(LOOK, adapter=weights, max_new_tokens=30).text
        engine = LoadedEngine(model, rows=2)
        found = run(engine, ask("mix", adapter=mix_name(weights), tokens=30), ask("one", adapter="style", tokens=30))
        assert found["mix"][0] == expected and found["one"][0] != expected
