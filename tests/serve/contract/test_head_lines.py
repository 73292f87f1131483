"""Header lines that come twice: what is refused, what counts as absent, and whose key everything else goes by."""

import asyncio
import re
from pathlib import Path

import pytest
from starlette.testclient import TestClient

import trimtab.serve
from tests.serve.http.test_app import CHAT
from tests.serving import MockPool, client
from trimtab.serve.contract.head_lines import LABELS, LISTS, ONCE, list_of, value_of
from trimtab.serve.contract.quotas import KeyLimits
from trimtab.serve.contract.settings import Settings
from trimtab.serve.http.app import make_app
from trimtab.serve.observe.metrics import Metrics

KEYS = ("limited", "free", "other")
LIMITS = {"limited": KeyLimits(name="alice", requests_per_minute=1), "other": KeyLimits(name="bob")}
PATHS = {
    "/v1/chat/completions": CHAT, "/v1/completions": {"model": "demo", "prompt": "a"},
    "/v1/messages": {**CHAT, "max_tokens": 5}, "/v1/embeddings": {"model": "demo", "input": "a"},
}  # fmt: skip


@pytest.fixture
def served():
    """Return (a client of a server with keys and limits, its pool, its metrics)."""
    pool, metrics = MockPool(), Metrics()
    settings = Settings(page=False, api_keys=KEYS, admin_keys=("admin",), key_limits=LIMITS)
    return TestClient(make_app(pool, settings, metrics), base_url="http://localhost"), pool, metrics


def used(metrics):
    """Return how many requests of each named key were counted."""
    samples = [sample for family in metrics.key_requests.collect() for sample in family.samples]
    return {one.labels["key"]: one.value for one in samples if one.name.endswith("_total")}


TWO_KEYS = {
    "two keys": [("Authorization", "Bearer limited"), ("Authorization", "Bearer free")],
    "two keys, the other way round": [("Authorization", "Bearer free"), ("Authorization", "Bearer limited")],
    "an empty line first": [("Authorization", ""), ("Authorization", "Bearer limited")],
    "an empty line last": [("Authorization", "Bearer limited"), ("Authorization", "")],
    "another client's key first": [("Authorization", "Bearer other"), ("authorization", "Bearer limited")],
    "the same key twice": [("Authorization", "Bearer free"), ("Authorization", "Bearer free")],
    "an admin's key first": [("Authorization", "Bearer admin"), ("Authorization", "Bearer limited")],
    "two of Anthropic's": [("x-api-key", "free"), ("X-Api-Key", "limited")],
    "an empty one of Anthropic's": [("x-api-key", ""), ("x-api-key", "limited")],
    "one of each": [("Authorization", "Bearer limited"), ("x-api-key", "free")],
    "one of each, the other way round": [("x-api-key", "limited"), ("Authorization", "Bearer free")],
}


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("name", TWO_KEYS)
def test_a_request_with_two_keys_is_refused_and_charged_to_nobody(served, name, path):
    found, pool, metrics = served
    answer = found.post(path, json=PATHS[path], headers=TWO_KEYS[name])
    assert answer.status_code == 400 and answer.json()["error"]["code"] in ("repeated_header", "different_keys")
    assert not re.search("limited|free|other", answer.text)  # keys are not repeated
    assert pool.jobs == [] and used(metrics) == {"alice": 0, "bob": 0}


ONE_KEY = {
    "Bearer": [("Authorization", "Bearer limited")], "bearer": [("authorization", "bearer   limited  ")],
    "Anthropic's": [("X-API-Key", "limited")], "both": [("Authorization", "Bearer limited"), ("x-api-key", "limited")],
    "an empty line beside": [("Authorization", ""), ("x-api-key", "limited")],
    "another scheme": [("Authorization", "Basic bGltaXRlZDo="), ("x-api-key", "limited")],
    "a scheme without a key": [("Authorization", "Bearer"), ("x-api-key", "limited")],
}  # fmt: skip


@pytest.mark.parametrize("name", ONE_KEY)
def test_access_quota_turn_owner_and_metrics_go_by_the_same_key(served, name):
    found, pool, metrics = served
    first = found.post("/v1/chat/completions", json=CHAT, headers=[("Authorization", "Bearer limited")])
    assert first.status_code == 200 and used(metrics) == {"alice": 1, "bob": 0}
    # Whichever way the key comes, its one request of this minute is used.
    assert found.post("/v1/chat/completions", json=CHAT, headers=ONE_KEY[name]).status_code == 429
    owners = [(job.client, job.sender) for job in pool.jobs]
    settings = Settings(page=False, api_keys=KEYS)
    again = MockPool()
    other = TestClient(make_app(again, settings, Metrics()), base_url="http://localhost")
    assert other.post("/v1/chat/completions", json=CHAT, headers=ONE_KEY[name]).status_code == 200
    assert [(job.client, job.sender) for job in again.jobs] == owners and all(owners[0])


def test_a_server_without_keys_takes_whatever_two_keys_a_client_sends():
    headers = [("Authorization", "Bearer none"), ("x-api-key", "dummy")]
    assert client().post("/v1/chat/completions", json=CHAT, headers=headers).status_code == 200


@pytest.mark.parametrize("name", ONCE)
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages", "/health"])
def test_a_second_line_is_refused_whatever_it_says(name, path):
    values = {"host": "localhost", "content-type": "application/json", "content-encoding": "identity"}
    value = values.get(name, "1").encode()
    lines = [(b"host", b"localhost"), (b"content-type", b"application/json")]
    lines = [line for line in lines if line[0] != name.encode()] + 2 * [(name.encode(), value)]
    status, body = ask(lines, path)
    assert status == 400 and f"The header {name} is repeated".encode() in body


def ask(lines, path="/v1/chat/completions", pool=None, **settings):
    """Call the app as another server would, which checks nothing; returns (status, body)."""
    sent, body = [], [{"type": "http.request", "body": b"{}", "more_body": False}]
    app = make_app(pool or MockPool(), Settings(page=False, **settings), Metrics())
    scope = {
        "type": "http", "method": "POST" if path.startswith("/v1") else "GET", "path": path, "raw_path": path.encode(),
        "query_string": b"", "root_path": "", "scheme": "http", "headers": lines, "client": None, "server": None,
    }  # fmt: skip

    async def receive():
        return body.pop() if body else await asyncio.Event().wait()

    async def send(message):
        sent.append(message)

    asyncio.run(app(scope, receive, send))
    return sent[0]["status"], sent[1]["body"]


def test_a_second_origin_is_refused_where_other_sites_may_call():
    found = client(cors_origins=("https://app.example",))
    headers = [("Origin", "https://app.example"), ("Origin", "https://evil.example")]
    answer = found.post("/v1/chat/completions", json=CHAT, headers=headers)
    assert answer.status_code == 400 and answer.json()["error"]["code"] == "repeated_header"


def test_labels_that_come_twice_are_none_and_lists_are_one():
    lines = [(b"traceparent", b"a"), (b"x-request-id", b" b "), (b"traceparent", b"c"), *2 * [(b"tracestate", b"k=v ")]]
    assert value_of(lines, "traceparent") == b"" and value_of(lines, "x-request-id") == b"b"
    assert list_of(lines, "tracestate") == b"k=v,k=v" and list_of(lines, "if-none-match") == b""
    found = client()
    assert found.get("/health", headers=[("X-Request-Id", "mine")]).headers["x-request-id"] == "mine"
    twice = found.get("/health", headers=[("X-Request-Id", "mine"), ("X-Request-Id", "his")]).headers["x-request-id"]
    assert re.fullmatch("[0-9a-f]{32}", twice)


@pytest.mark.parametrize("name", ["X-Forwarded-For", "Forwarded", "X-Forwarded-Host", "Cookie", "Idempotency-Key", "Accept"])
def test_lines_that_are_not_read_change_nothing_however_often_they_come(name):
    pool = MockPool()
    found = client(pool)
    for headers in ([], [(name, "1.2.3.4"), (name, "5.6.7.8")]):
        assert found.post("/v1/chat/completions", json=CHAT, headers=headers).status_code == 200
    assert len({(job.client, job.sender) for job in pool.jobs}) == 1


def test_a_websocket_gets_no_further_than_the_door():
    sent = []
    app = make_app(MockPool(), Settings(page=False), Metrics())
    scope = {"type": "websocket", "path": "/v1/chat/completions", "headers": [(b"host", b"localhost")], "query_string": b""}

    async def receive():
        return {"type": "websocket.connect"}

    async def send(message):
        sent.append(message)

    asyncio.run(app(scope, receive, send))
    assert sent == [{"type": "websocket.close", "code": 1008}]


def test_every_line_is_read_by_its_rule():
    # A header that is read in another way has no rule for a second line.
    for file in Path(trimtab.serve.__file__).parent.glob("*.py"):
        text = file.read_text("utf-8")
        assert not re.search(r'request\.headers|dict\(scope\["headers"\]\)', text), file.name
        if "head_lines" not in text and file.name != "head_lines.py":
            continue  # functions of these names for something else
        for name in re.findall(r'(?:value_of|list_of)\([^()]*?(?:\[[^()]*\])?, "([^"]+)"\)', text):
            assert name in (*ONCE, *LABELS, *LISTS), (file.name, name)
