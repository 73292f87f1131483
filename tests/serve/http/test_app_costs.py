"""What a client can ask for again and again costs the event loop little: the description, names that nobody knows."""

import json
import threading

import pytest

from tests.serve.http.test_app import CHAT
from tests.serving import MockPool, client
from trimtab.serve.contract import errors
from trimtab.serve.http import app


def test_the_description_is_made_once_and_away_from_the_event_loop(monkeypatch):
    """It takes a tenth of a second: whoever reads it again and again must not keep others waiting."""
    made, own = [], app.description

    def noted(**options):
        made.append(threading.current_thread())
        return own(**options)

    monkeypatch.setattr(app, "description", noted)
    server = client(MockPool())
    first, second = (server.get("/openapi.json") for _ in range(2))
    assert first.json() == second.json() == own(has_key=False) and first.headers["content-type"] == "application/json"
    assert len(made) == 1 and not made[0].name.startswith("asyncio-portal") and "MainThread" not in made[0].name


@pytest.mark.parametrize("name", ["nobody", "x" * 30_000, "style-77" * 20])
def test_an_unknown_name_is_compared_with_a_few_of_a_thousand(name, monkeypatch):
    compared = []

    def noted(text, choices):
        compared.append((len(text), len(choices)))
        return near(text, choices)

    near = errors.near_names
    monkeypatch.setattr(errors, "near_names", noted)
    pool = MockPool(adapters=[f"style-{number}" for number in range(1000)])
    assert client(pool).get(f"/v1/models/{name}").status_code == 404
    ((length, count),) = compared
    assert length <= 64 and count <= 32
    assert errors.UnknownModelError("style-77x", [f"style-{number}" for number in range(1000)]).allowed[0] == "style-77"


def test_of_a_key_that_is_given_twice_the_last_one_counts():
    pool = MockPool()
    body = json.dumps(CHAT)
    json_type = {"content-type": "application/json"}
    for twice, status in (('{"model": "nobody", ' + body[1:], 200), (body[:-1] + ', "model": "nobody"}', 404)):
        assert client(pool).post("/v1/chat/completions", content=twice, headers=json_type).status_code == status
