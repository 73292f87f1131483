"""What is refused before its JSON is parsed: two keys, header lines that come twice, and bodies by bytes, depth, values."""

import asyncio
import base64
import errno
import functools
import io
import json
import os
import re
import threading
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from starlette.testclient import TestClient

import trimtab.serve
from tests.examples import examples
from tests.raised import raised
from tests.serve.http.test_app import CHAT, PNG, chat, error_of
from tests.serving import MockPool, client, forever
from tests.waiting import turns, until_async
from trimtab.errors import RequestError
from trimtab.serve.api import admission, schemas
from trimtab.serve.api.admission import FREE_BYTES, BodiesFullError, BodyLimits, BodyTooLargeError, Budget, JsonCounter
from trimtab.serve.contract.log import LABELS, LISTS, ONCE, list_of, value_of
from trimtab.serve.contract.quotas import KeyLimits
from trimtab.serve.contract.settings import Limits, Settings
from trimtab.serve.http.app import make_app
from trimtab.serve.observe.metrics import Metrics

ANY = BodyLimits(2**20, 2**20, 2**20, 2**20)


def counted(pieces, **limits):
    values = {"most_bytes": 2**20, "text_bytes": 2**20, "most_values": 2**20, "most_depth": 2**20, **limits}
    counter = JsonCounter(BodyLimits(**values))
    for piece in pieces:
        counter.feed(piece)


def refusal(pieces, **limits):
    error = raised(RequestError, counted, pieces, **limits)
    assert error.field == "body"
    return error


def depth_of(value):
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else None
    return 0 if inner is None else 1 + max(map(depth_of, inner), default=0)


def values_of(value):
    """Return the commas and opening brackets of a JSON value that stand outside of its texts."""
    if not isinstance(value, (dict, list)):
        return 0
    inner = list(value.values() if isinstance(value, dict) else value)
    return 1 + max(0, len(inner) - 1) + sum(map(values_of, inner))


texts = st.text(alphabet='ab"\\/[]{},:é\n😀', max_size=12)
anything = st.recursive(
    st.none() | st.integers() | texts, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(texts, inner, max_size=4)
)


@hypothesis_settings(deadline=None, derandomize=True, max_examples=examples(300))
@given(anything, st.booleans(), st.lists(st.integers(0, 200), max_size=6))
def test_depth_and_values_are_those_of_the_json_however_it_is_cut(value, is_ascii, cuts):
    body = json.dumps(value, ensure_ascii=is_ascii).encode()
    places = sorted({0, len(body), *(cut for cut in cuts if cut < len(body))})
    pieces = [body[start:end] for start, end in zip(places, places[1:], strict=False)]
    depth, count = depth_of(value), values_of(value)
    counted(pieces, most_depth=depth, most_values=max(count, body.count(b'"') // 4))
    if depth:
        assert "nested deeper" in str(refusal(pieces, most_depth=depth - 1))
        assert "values" in str(refusal(pieces, most_values=count - 1))


def test_a_text_full_of_brackets_and_commas_counts_as_one_value():
    body = json.dumps({"content": '[{,:"\\' * 1000}).encode()
    counted([body[place : place + 7] for place in range(0, len(body), 7)], most_values=1, most_depth=1)


def test_a_long_text_beyond_ascii_is_refused_where_media_may_be_large():
    limits = {"most_bytes": 10_000, "text_bytes": 1000}
    counted([b'"', *[b"QUJD" * 25] * 40, b'"'], **limits)
    # One such character makes Python's text four times as large.
    for wide in ("é".encode(), b"\\u00e9"):
        assert isinstance(refusal([b'"', *[b"QUJD" * 25] * 40, wide, b'"'], **limits), BodyTooLargeError)
    counted([b'"\xc3\xa9","', *[b"QUJD" * 25] * 40, b'"'], **limits)  # in another text
    assert isinstance(refusal([b'"' + b" " * 1001], **limits), BodyTooLargeError)


def test_the_budget_is_one_for_all_bodies():
    budget = Budget(100)
    budget.take(60)
    assert raised(BodiesFullError, budget.take, 41).retry_after_s > 0
    budget.give_back(60)
    budget.take(100)


# Over HTTP ------------------------------------------------------------------------------------------------------------


def sized(count, **fields):
    """Return a chat body with a text of so many characters."""
    return json.dumps({"model": "demo", "messages": [{"role": "user", "content": "x" * count}], **fields}).encode()


def post(server, body, path="/v1/chat/completions"):
    return server.post(path, content=body, headers={"content-type": "application/json"})


def test_two_mebibytes_are_allowed_and_images_may_take_more():
    text = client(MockPool(takes=("text",), context=2**20))
    assert post(text, sized(2**21 - 200)).status_code == 200
    error = error_of(post(text, sized(2**21)), 413)
    assert (error["class"], error["code"], error["fields"]["limit_bytes"]) == ("BodyTooLargeError", "body_too_large", 2**21)
    server = client(MockPool())
    image = "data:image/png;base64," + base64.b64encode(PNG + b"\0" * 3 * 2**20).decode()  # more than the image needs
    assert chat(server, messages=[image_message(image)]).status_code == 200
    # Other routes of the same server carry no media.
    for path in ("/v1/completions", "/v1/load_lora_adapter", "/v1/unload_lora_adapter"):
        assert error_of(post(server, sized(2**21), path), 413)["fields"]["limit_bytes"] == 2**21


@pytest.mark.parametrize("key", ["content", "url"])
def test_a_long_text_that_is_no_image_is_refused_before_it_is_parsed(key, monkeypatch):
    parsed = []
    monkeypatch.setattr(schemas, "read", lambda *given, **options: parsed.append(given))
    server = client(MockPool(context=2**20), limits=Limits(media_count=1))
    text = "QUJD" * 2**20  # as base64 has no other bytes than these, it is not counted as text when it arrives
    content = text if key == "content" else [{"type": "image_url", "image_url": {"url": text}}]
    error = error_of(chat(server, messages=[{"role": "user", "content": content}]), 413)
    assert (error["class"], error["fields"]["limit_bytes"]) == ("BodyTooLargeError", 2**21)
    assert "Only images and audio" in error["message"] and not parsed


def image_message(url):
    return {"role": "user", "content": [{"type": "image_url", "image_url": {"url": url}}]}


def test_a_large_body_to_a_model_of_text_alone_is_refused_beside_one_of_images():
    pool = MockPool(adapters=())
    pool.takes = lambda model: ("text",) if pool.is_running else ("text", "image")
    pool.is_running = False
    server = client(pool, limits=Limits(body_bytes=1000))
    pool.is_running = True
    error = error_of(post(server, sized(2000)), 413)
    assert error["fields"]["limit_bytes"] == 1000 and "supports text only" in error["message"]


def test_too_many_values_and_too_much_depth_are_refused_by_name():
    server = client(limits=Limits(json_values=100, json_depth=10))
    many = error_of(chat(server, messages=[CHAT["messages"][0]] * 200), 400)
    assert many["param"] == "body" and "more than 100 values" in many["message"]
    deep = {"name": "a", "schema": json.loads('{"a":' * 20 + "1" + "}" * 20)}
    error = error_of(chat(server, response_format={"type": "json_schema", "json_schema": deep}), 400)
    assert error["param"] == "body" and "nested deeper than 10" in error["message"]
    # Token ids within the context are values that a prompt may have.
    ids = {"model": "demo", "prompt": [1] * 384}
    assert post(server, json.dumps(ids).encode(), "/v1/completions").status_code == 200
    texts = {"model": "demo", "input": [[1] * 384] * 90}
    assert post(server, json.dumps(texts).encode(), "/v1/embeddings").status_code == 200


def test_validation_stops_at_the_first_errors():
    wrong = [
        ({"messages": [{}] * 500}, "messages[0].role"), ({"messages": [{"role": "user", "content": [{}] * 1000}]}, None),
        ({f"a{i}": 1 for i in range(1000)}, None), ({"stop": [1] * 10}, "stop[0]"),
    ]  # fmt: skip
    for fields, param in wrong:
        try:
            schemas.ChatRequest.model_validate_json(json.dumps({**CHAT, **fields}))
        except schemas.ValidationError as exc:
            assert exc.error_count() <= 8
        else:
            pytest.fail("is taken")
        if param is not None:
            assert error_of(chat(client(), **fields), 400)["param"] == param
    assert error_of(chat(client(), **{f"a{i}": 1 for i in range(1000)}), 400)["param"] == "a0"


def test_a_list_beyond_its_limit_is_refused_before_its_items_are_looked_at():
    server = client(limits=Limits(messages=4, tools=2))
    items = {"role": "user", "content": "a", "unknown": 1}  # wrong too, were it looked at
    for path, field, most, more in (
        ("/v1/chat/completions", "messages", 4, {}), ("/v1/messages", "messages", 4, {"max_tokens": 1}),
        ("/v1/messages/count_tokens", "messages", 4, {}), ("/tokenize", "messages", 4, {}),
        ("/v1/responses", "input", 16, {}), ("/v1/chat/completions", "tools", 2, {"messages": CHAT["messages"]}),
        ("/v1/messages", "tools", 2, {"max_tokens": 1, "messages": CHAT["messages"]}),
    ):  # fmt: skip
        answer = server.post(path, json={"model": "demo", field: [items] * (most + 1), **more})
        assert answer.status_code == 400 and f"has more than {most} " in answer.text, (path, answer.text)


def test_a_body_that_never_finds_room_is_too_large():
    server = client(pool := MockPool(), limits=Limits(all_body_bytes=1000))
    refused = post(server, sized(FREE_BYTES + 1000))
    assert error_of(refused, 413)["fields"]["limit_bytes"] == FREE_BYTES + 1000 and "retry-after" not in refused.headers
    pool._context = 2**20
    assert post(server, sized(FREE_BYTES)).status_code == 200


def test_bodies_without_room_get_503_and_their_room_comes_back():
    pool = MockPool(forever)
    app = make_app(pool, Settings(page=False, limits=Limits(all_body_bytes=FREE_BYTES)), Metrics())
    body = sized(100_000 - 200)
    pool._context = 2**20

    async def ask(hold):
        sent, done = [], asyncio.Event()
        first = [{"type": "http.request", "body": body, "more_body": False}]

        async def receive():
            if first:
                return first.pop()
            await done.wait()
            return {"type": "http.disconnect"}

        async def send(message):
            sent.append(message)

        scope = {"type": "http", "method": "POST", "path": "/v1/chat/completions", "headers": [
            (b"content-type", b"application/json"), (b"host", b"localhost")], "query_string": b"", "root_path": ""}  # fmt: skip
        task = asyncio.create_task(app(scope, receive, send))
        await hold(sent)
        done.set()
        await task
        return sent

    async def both():
        async def second(_):
            await until_async(lambda: pool.jobs)
            refused = await ask(lambda sent: until_async(lambda: sent))
            assert refused[0]["status"] == 503 and dict(refused[0]["headers"])[b"retry-after"] == b"2"
            assert json.loads(refused[1]["body"])["error"]["class"] == "BodiesFullError"

        await ask(second)
        assert len(pool.jobs) == 1
        await ask(lambda _: until_async(lambda: len(pool.jobs) == 2))

    asyncio.run(both())


@pytest.mark.parametrize("count", [1, 100_000])
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/load_lora_adapter"])
def test_no_body_is_parsed_on_the_event_loop_however_small_it_is(count, path, monkeypatch):
    loops, parsers = set(), set()
    read, receive = schemas.read, admission._receive

    async def noted(*arguments):
        loops.add(threading.get_ident())
        return await receive(*arguments)

    def parsed(*arguments, **options):
        parsers.add(threading.get_ident())
        return read(*arguments, **options)

    monkeypatch.setattr(admission, "_receive", noted)
    monkeypatch.setattr(schemas, "read", parsed)
    post(client(MockPool(takes=("text",), context=2**20)), sized(count), path)
    assert loops and parsers and not loops & parsers


def test_small_bodies_do_not_wait_for_larger_ones():
    reader = admission.Reader(Limits(body_bytes=2**21))
    is_over = threading.Event()

    async def small_beside_large():
        large = [asyncio.create_task(reader.run(size, lambda: is_over.wait(60))) for size in [2**20] * 4 + [2**26] * 2]
        await turns()
        try:
            return await asyncio.wait_for(reader.run(100, threading.get_ident), 30)
        finally:
            is_over.set()
            await asyncio.gather(*large)

    assert asyncio.run(small_beside_large()) != threading.get_ident()


# The temporary folder -------------------------------------------------------------------------------------------------


class FullFile(io.BytesIO):
    """A file on a disk that is full: at its first write, or at the last one when it is read again, and when it is closed."""

    def __init__(self, at):
        super().__init__()
        self.at = at

    def _fail(self, at):
        if at == self.at:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def writelines(self, pieces):
        self._fail("write")
        super().writelines(pieces)

    def seek(self, *arguments):
        self._fail("seek")
        return super().seek(*arguments)

    def close(self):
        super().close()
        if self.at in ("write", "seek", "close"):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


LARGE_URL = "data:image/png;base64," + base64.b64encode(PNG + bytes(2 * admission.MEMORY_BYTES)).decode()
LARGE = {"type": "image_url", "image_url": {"url": LARGE_URL}}


def no_folder():
    raise FileNotFoundError(errno.ENOENT, "No usable temporary directory found in ['/tmp']")


@pytest.mark.parametrize(
    "make", [no_folder, *(functools.partial(FullFile, at) for at in ("write", "seek"))], ids=["no folder", "write", "seek"]
)
def test_a_temporary_folder_that_takes_nothing_is_said_with_what_to_do(monkeypatch, caplog, make):
    monkeypatch.setattr(admission.tempfile, "TemporaryFile", make)
    pool = MockPool()
    found = client(pool)
    for _ in range(2):
        error = error_of(chat(found, messages=[{"role": "user", "content": [LARGE]}]), 507)
        assert (error["class"], error["code"], error["type"]) == ("TemporaryFolderError", "temporary_folder", "server_error")
        assert "temporary folder" in error["message"] and "TMPDIR" in error["fields"]["hint"]
    assert [one.levelname for one in caplog.records if "temporary folder" in one.getMessage()] == ["ERROR"] * 2
    assert all(one.exc_info is None for one in caplog.records)  # no traceback
    # Nothing is held of what was refused, and what needs no file is answered.
    assert chat(found).status_code == 200 and len(pool.jobs) == 1


def test_a_file_that_cannot_be_closed_changes_no_answer(monkeypatch):
    monkeypatch.setattr(admission.tempfile, "TemporaryFile", functools.partial(FullFile, "close"))
    assert chat(client(), messages=[{"role": "user", "content": [LARGE]}]).status_code == 200


# Keys and header lines ------------------------------------------------------------------------------------------------

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
    for file in Path(trimtab.serve.__file__).parent.rglob("*.py"):
        text = file.read_text("utf-8")
        assert not re.search(r'request\.headers|dict\(.*scope\["headers"\]\)', text), file.name
        if not re.search(r"contract\.log import .*(value_of|list_of)", text):
            continue  # functions of these names for something else
        for name in re.findall(r'(?:value_of|list_of)\([^()]*?(?:\[[^()]*\])?, "([^"]+)"\)', text):
            assert name in (*ONCE, *LABELS, *LISTS), (file.name, name)
