"""Nothing that leaves a server names its folders or its keys: every route, every error, every metric, every line of its log."""

import json
import logging
import os

import pytest
from starlette.testclient import TestClient

import trimtab
from tests import leaky_worker, waiting
from tests.serve.http.test_app import PICTURE
from trimtab.demo.demo import FOLDER as DEMO
from trimtab.process.redact import own_folders, without_paths
from trimtab.request import LoadRequest
from trimtab.serve.contract.settings import Settings
from trimtab.serve.http.app import make_app
from trimtab.serve.http.page import page_routes
from trimtab.serve.observe.metrics import Metrics
from trimtab.serve.pool import Pool, folders_of
from trimtab.serve.slots import shown_plan
from trimtab.serve.worker.registry import ServedModel
from trimtab.serve.worker.supervisor import Supervisor

# In the names of folders, with a space beside it: what no pattern of a path alone can find the end of.
SECRET = "Sentinel7 folder"
KEY = "sentinel7-key"
HEADERS = {"authorization": f"Bearer {KEY}"}


@pytest.fixture(scope="module")
def plan():
    places = {"model.vision_tower*": "stream"}
    return trimtab.plan(DEMO / "base", context=128, device="cpu", batch=2, place=places).to_json()


@pytest.fixture
def folder(tmp_path):
    made = tmp_path / SECRET
    for name in ("base", "style", "root/a", "root/b c"):
        (made / name).mkdir(parents=True)
    return made


@pytest.fixture
def found(folder, plan, monkeypatch, caplog, capfd):
    """A server whose worker tells what it should not; at its end what it wrote is searched too."""
    monkeypatch.chdir(folder)
    caplog.set_level(logging.DEBUG)
    models = [
        ServedModel(name="good", request=LoadRequest(model="base"), adapters={"style": "style"}),
        ServedModel(name="bad", request=LoadRequest(model=str(folder / "base"), context_tokens=1)),
    ]
    settings = Settings(api_keys=(f"{KEY}-of-clients",), admin_keys=(KEY,), adapter_root=folder / "root", host="0.0.0.0")

    def make(told, **options):
        return Supervisor({**told, "a real plan": plan}, target=leaky_worker.main, **options)

    pool = Pool(models, settings, together=2, make=make)
    app = make_app(pool, settings, Metrics(), extra=page_routes(settings), folders=pool.folders)
    with TestClient(app, headers=HEADERS, raise_server_exceptions=False) as client:
        waiting.until(lambda: [m["state"] for m in client.get("/api/status").json()["models"]] == ["ready", "failed"])
        yield client
    check("".join(capfd.readouterr()))
    check("\n".join([caplog.text, *(str(record.args) for record in caplog.records)]))


def check(text):
    for secret in ("Sentinel7", "sentinel7", "folder/", str(os.path.expanduser("~")) + "/"):
        assert secret not in text, text


def ask(client, **fields):
    asked = {"model": "good", "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 1, **fields}
    return client.post("/v1/chat/completions", json=asked)


def test_no_answer_of_any_route_holds_a_folder_or_a_key(found):
    load = {"lora_name": "new", "model": "good"}
    answers = [
        *(found.get(path) for path in (
            "/", "/health", "/ready", "/metrics", "/openapi.json", "/v1/models", "/v1/models/style", "/v1/models/nobody",
            "/api/status", "/page/about.json", "/page/page.js", "/nothing",
        )),
        ask(found), ask(found, stream=True), ask(found, max_tokens=2), ask(found, max_tokens=2, stream=True),
        ask(found, model="bad"), ask(found, model="good:style", n=2), ask(found, model="nobody"),
        ask(found, messages=[{"role": "user", "content": [{"type": "image_url", "image_url": {"url": PICTURE[:-9]}}]}]),
        found.post("/v1/completions", json={"model": "bad", "prompt": "x"}),
        found.post("/v1/completions", content=b"{", headers={"content-type": "application/json"}),
        *(found.post("/v1/load_lora_adapter", json={**load, "lora_path": path}) for path in ("a", "b c", "..", "../base")),
        found.post("/v1/unload_lora_adapter", json={"lora_name": "nobody", "model": "good"}),
        found.get("/v1/models", headers={"authorization": f"Bearer {KEY}x"}),
    ]  # fmt: skip
    assert {answer.status_code for answer in answers} >= {200, 400, 401, 404, 422, 503}
    for answer in answers:
        check(f"{answer.text}\n{answer.headers}")
    errors = [answer.json()["error"] for answer in answers if answer.status_code in (422, 503) and answer.text[0] == "{"]
    assert {error["class"] for error in errors if "class" in error} == {"CheckpointError", "AdapterError", "ModelFailedError"}


def test_an_error_keeps_its_words(found):
    error = ask(found).json()["error"]
    assert error["message"] == "the file: is gone, '[path]' has no [path]."
    error = ask(found, model="bad").json()["error"]
    assert error["message"].startswith("worker: the model cannot be loaded (CheckpointError: [path]: cannot be read, nor [path]")
    error = found.post("/v1/load_lora_adapter", json={"lora_name": "n", "model": "good", "lora_path": "b c"}).json()["error"]
    assert error["fields"]["problems"] == ["the file/adapter_config.json is short", "'the file' is no adapter"]


def test_the_status_has_what_the_page_needs_of_a_plan_and_no_more(found):
    plan = found.get("/api/status").json()["models"][0]["plan"]
    assert set(plan) == {
        "model_class", "execution_device", "gpu", "host", "gpu_peak_bytes", "gpu_budget_bytes", "host_peak_bytes",
        "host_budget_bytes", "disk_bytes", "held_adapters_limit_bytes", "media_reason", "placements", "request",
    }  # fmt: skip
    assert plan["request"] == {"quant": "nf4-dq", "context_tokens": 128, "batch": 2, "images": 1}
    assert all(set(block) == {"part", "tier", "gpu_bytes", "host_bytes", "disk_bytes"} for block in plan["placements"])


def test_the_shown_plan_has_every_byte_of_the_plan(plan):
    shown = shown_plan(plan)
    for name in ("gpu_bytes", "host_bytes", "disk_bytes"):
        assert sum(one[name] for one in shown["placements"]) == sum(one[name] for one in plan["placements"])
    assert {one["tier"] for one in shown["placements"]} == {one["tier"] for one in plan["placements"]}
    assert shown_plan(None) is None


def test_folders_are_found_in_every_spelling(tmp_path, monkeypatch):
    (tmp_path / "my models").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "my models", target_is_directory=True)
    monkeypatch.chdir(tmp_path)
    folders = own_folders(["link", "google/gemma", None])
    for text in (
        f"{tmp_path}/link/x.bin is bad",
        f"{tmp_path}/my models is bad",
        f"read {tmp_path / 'my models'}: no",
        json.dumps(f"{tmp_path}/my models/a/b.json"),
    ):
        hidden = without_paths(text, folders=folders)
        assert "models" not in hidden and "link" not in hidden and "[path]" in hidden
    assert without_paths("google/gemma and/or /v1/models of 3/4", folders=folders) == "google/gemma and/or [path] of 3/4"
    assert without_paths("cannot open <_io.BytesIO object at 0x7f66dc4058d0>: no") == "cannot open [object]: no"
    assert without_paths(f"{tmp_path}xyz", folders=[str(tmp_path)]) == "[path]"


def test_folders_of_a_server_hold_what_it_was_given(tmp_path):
    model = ServedModel(
        name="m", request=LoadRequest(model=str(tmp_path), offload_dir=str(tmp_path / "spill")),
        adapters={"a": str(tmp_path / "a")},
    )  # fmt: skip
    for name in ("spill", "a"):
        (tmp_path / name).mkdir()
    found = folders_of([model], Settings(adapter_root=tmp_path / "a"))
    assert {str(tmp_path), str(tmp_path / "spill"), str(tmp_path / "a")} <= set(found)
    assert os.path.sep not in found and list(found) == sorted(found, key=len, reverse=True)
