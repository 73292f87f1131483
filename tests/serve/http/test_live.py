"""A reload: keys, limits and adapters change while requests are answered; a file that is wrong changes nothing."""

import asyncio
import json
import os
import signal
from dataclasses import replace
from functools import partial

import pytest
from starlette.testclient import TestClient

from tests import toy_worker, waiting
from tests.serve.test_pool import model, run
from tests.serve.test_serve_run import posix, serving
from tests.serving import MockPool
from trimtab.errors import CheckpointError, RequestError
from trimtab.serve.contract.quotas import KeyLimits
from trimtab.serve.contract.settings import Limits, Live, Settings
from trimtab.serve.http import live as lives
from trimtab.serve.http.app import make_app
from trimtab.serve.http.live import FIXED, FIXED_LIMITS, Reloader
from trimtab.serve.observe.metrics import Metrics
from trimtab.serve.worker.supervisor import Supervisor

CHAT = {"model": "demo", "messages": [{"role": "user", "content": "Hello"}]}
BEFORE = Settings(page=False, api_keys=("old",), admin_keys=("root",))


class Reloaded(MockPool):
    settings, names = BEFORE, ("demo",)

    async def use(self, served):
        self.calls.append(("use", served.name))
        return {"loaded": ["demo:new"], "unloaded": ["demo:style"], "needs_restart": [], "problems": []}


def server(reread):
    pool, live, metrics = Reloaded(), Live(BEFORE), Metrics()
    reloader = Reloader(pool, live, reread, metrics.forget)
    app = make_app(pool, BEFORE, metrics, extra=reloader.routes(), live=live)
    found = TestClient(app, base_url="http://localhost")

    def post(path, key, body=None):
        return found.post(path, json=body or {}, headers={"authorization": f"Bearer {key}"})

    post.get = lambda path, key: found.get(path, headers={"authorization": f"Bearer {key}"})
    return pool, post


def test_keys_and_limits_change_between_two_requests():
    after = replace(
        BEFORE, api_keys=("new",), limits=Limits(messages=1), queue_limit=3,
        key_limits={"new": KeyLimits(name="new", requests_per_minute=2)},
    )  # fmt: skip
    pool, post = server(lambda: ([model("demo")], after, ()))
    assert post("/v1/chat/completions", "old", CHAT).status_code == 200
    found = post("/admin/reload", "root").json()
    assert found["status"] == "reloaded" and found["changed"] == ["api_keys", "queue_limit", "limits", "key_limits"]
    assert (found["loaded"], found["unloaded"], found["needs_restart"]) == (["demo:new"], ["demo:style"], [])
    assert pool.calls == [("use", "demo")] and pool.settings.queue_limit == 3
    assert post("/v1/chat/completions", "old", CHAT).status_code == 401
    two = {**CHAT, "messages": CHAT["messages"] * 2}
    assert post("/v1/chat/completions", "new", two).status_code == 400
    assert [post("/v1/chat/completions", "new", CHAT).status_code for _ in range(3)] == [200, 200, 429]
    assert "new" not in json.dumps(found["changed"])  # names, never values


def test_only_an_administrator_reloads():
    _, post = server(lambda: ([model("demo")], BEFORE, ()))
    assert post("/admin/reload", "none").status_code == 401 and post("/admin/reload", "old").status_code == 403
    assert post("/admin/reload", "root").status_code == 200


def test_a_reload_takes_no_fields():
    _, post = server(lambda: ([model("demo")], BEFORE, ()))
    refused = post("/admin/reload", "root", {"host": "0.0.0.0"})
    assert refused.status_code == 400 and refused.json()["error"]["fields"]["field"] == "host"


def test_a_file_that_is_wrong_changes_nothing():
    def wrong():
        raise CheckpointError("1 problem\n  - unknown key 'prot' (did you mean port?)", path="serve.toml")

    pool, post = server(wrong)
    found = post("/admin/reload", "root")
    assert found.status_code == 422 and "prot" in found.json()["error"]["message"]
    assert post("/v1/chat/completions", "old", CHAT).status_code == 200 and pool.settings is BEFORE


@pytest.mark.parametrize("value", [-4, float("nan")])
def test_a_value_that_is_wrong_is_the_files_fault_and_not_the_requests(value):
    def wrong():
        raise RequestError("must be above zero", field="send_s", value=value)

    pool, post = server(wrong)
    found = post("/admin/reload", "root")
    assert found.status_code == 422 and found.json()["error"]["message"] == f"the file: send_s={value}: must be above zero"
    assert pool.settings is BEFORE


@pytest.mark.parametrize("kind", [RequestError, CheckpointError])
def test_an_administrator_is_told_the_reason_that_names_a_flag_but_no_folder(kind):
    where = {"field": "--api-key-file", "value": "f"} if kind is RequestError else {"path": "/srv/own/keys.toml"}

    def wrong():
        raise kind("holds no key, --lenient or not", **where)

    error = server(wrong)[1]("/admin/reload", "root").json()["error"]
    assert "holds no key, --lenient or not" in error["message"] and "/srv/own" not in str(error)


def test_an_open_server_on_all_addresses_is_refused_also_where_the_file_names_another_host():
    # `host` waits for a restart: without keys the address that it listens on now would be open.
    pool, live = Reloaded(), Live(replace(BEFORE, host="0.0.0.0"))
    after = replace(BEFORE, host="127.0.0.1", api_keys=(), admin_keys=())
    reloader = Reloader(pool, live, lambda: ([model("demo")], after, ()), Metrics().forget)
    with pytest.raises(RequestError, match="an API key is required"):
        asyncio.run(reloader.reload())
    assert live.settings.api_keys == ("old",)


def test_a_key_that_a_reload_names_is_in_the_metrics_before_its_first_request():
    limits = {"old": KeyLimits(name="batch")}
    _, post = server(lambda: ([model("demo")], replace(BEFORE, key_limits=limits), ()))
    post("/admin/reload", "root")
    text = post.get("/metrics", "root").text
    assert 'trimtab_key_tokens_total{key="batch"} 0.0' in text
    assert 'trimtab_key_requests_total{ended="done",key="batch"} 0.0' in text


def test_what_needs_a_restart_is_named_and_stays():
    after = replace(BEFORE, port=9, grace_s=1.0, limits=Limits(connections=3, n=2))
    pool, post = server(lambda: ([model("demo")], after, ()))
    found = post("/admin/reload", "root").json()
    assert found["needs_restart"] == ["port", "grace_s", "limits.connections"] and found["changed"] == ["limits"]
    assert (pool.settings.port, pool.settings.limits.connections, pool.settings.limits.n) == (8000, 512, 2)


def test_what_is_read_once_and_a_model_that_is_gone_wait_for_a_restart():
    _, post = server(lambda: ([model("other")], BEFORE, ("log_level",)))
    assert post("/admin/reload", "root").json()["needs_restart"] == ["log_level", "models.demo"]


def test_every_name_that_waits_for_a_restart_is_one():
    assert set(FIXED) <= {item.name for item in lives.fields(Settings)}
    assert set(FIXED_LIMITS) <= {item.name for item in lives.fields(Limits)}


def test_a_model_gets_the_adapters_that_its_file_names_now():
    first = model("a", adapters={"one": "x", "two": "y"})

    async def work(pool):
        found = await pool.use(replace(first, adapters={"two": "z", "three": "w"}))
        assert (found["unloaded"], found["loaded"]) == (["a:one", "a:two"], ["a:two", "a:three"])
        assert found["needs_restart"] == found["problems"] == []
        assert sorted(pool._members["a"].adapters) == ["three", "two"]
        again = await pool.use(replace(first, adapters={"two": "z", "three": "w"}))
        assert not any(again.values())
        # What a client has loaded stays; a name that it took is a problem that is told.
        await pool.load_adapter("a", "mine", "v")
        found = await pool.use(replace(first, adapters={"mine": "q"}, rows=3))
        assert found["problems"] and "mine" in found["problems"][0] and found["needs_restart"] == ["models.a"]
        assert sorted(pool._members["a"].adapters) == ["mine"]
        with pytest.raises(RequestError):
            await pool.load_adapter("a", "mine", "again")
        assert (await pool.use(model("b")))["needs_restart"] == ["models.b"]

    run(first, work=work, make=partial(Supervisor, target=toy_worker.main))


def test_other_weights_and_adapters_to_keep_are_told_and_an_adapter_in_use_keeps_its_weight():
    first = model("a", adapters={"one": "x", "busy": "y"}, weights={"one": 0.5, "busy": 0.5}, kept=("busy",))

    def weights(pool):
        return {name: pool.resolve(name)[1] for name in ("one", "busy")}

    async def work(pool):
        assert weights(pool) == {"one": "one:0.5", "busy": "busy:0.5"}
        # Which adapters stay on the model waits for a restart; one that is removed need not be kept.
        for kept, needs in (((), ["models.a"]), (("busy", "one"), ["models.a"]), (("busy",), [])):
            assert (await pool.use(replace(first, kept=kept)))["needs_restart"] == needs
        found = await pool.use(replace(first, adapters={"one": "x"}, weights={"one": 0.5}, kept=()))
        assert (found["changed"], found["needs_restart"], len(found["problems"])) == ([], [], 1)
        found = await pool.use(replace(first, adapters={"one": "x", "busy": "z"}, weights={"one": 0.7}))
        assert (found["changed"], found["loaded"], found["unloaded"]) == (["a:one"], [], [])
        assert len(found["problems"]) == 1 and "is in use" in found["problems"][0]
        assert weights(pool) == {"one": "one:0.7", "busy": "busy:0.5"}
        found = await pool.use(replace(first, adapters={"busy": "y"}, weights={"busy": 0.5}))
        assert (found["changed"], found["unloaded"], found["problems"]) == ([], ["a:one"], [])
        found = await pool.use(replace(first, adapters={"busy": "y", "one": "w"}, weights={"busy": 0.5}))
        assert found["loaded"] == ["a:one"] and weights(pool) == {"one": "one", "busy": "busy:0.5"}

    run(first, work=work, make=partial(Supervisor, target=toy_worker.main))


@posix
def test_a_hangup_signal_reloads_a_running_server(tmp_path):
    file = tmp_path / "keys"
    file.write_text("old")
    with serving(api_keys=["old"], key_file=str(file)) as found:

        def status(key):
            return found.ask("GET", "/v1/models", authorization=f"Bearer {key}")[0]

        assert (status("old"), status("new")) == (200, 401)
        file.write_text("new")
        os.kill(found.process.pid, signal.SIGHUP)
        waiting.until(lambda: status("new") == 200)
        assert status("old") == 401
        file.write_text("two words")
        os.kill(found.process.pid, signal.SIGHUP)  # refused, and the server goes on
        assert status("new") == 200
