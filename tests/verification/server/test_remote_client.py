"""What is sent to a server, and how much of what it sends back is taken."""

import json

import anyio
import httpx2
import pytest

from trimtab.errors import RequestError
from trimtab.verification.server import client as remote_client
from trimtab.verification.server.client import Client, check_url, plain, read_key


def client(answer, **options):
    return Client("http://host:8000/v1", transport=httpx2.MockTransport(answer), **options)


def refused(call):
    with pytest.raises(RequestError) as caught:
        call()
    return caught.value


def test_a_request_carries_the_key_and_asks_for_bytes_as_they_are():
    seen = []

    def answer(request):
        seen.append(request)
        return httpx2.Response(200, json={"ok": True})

    reply = client(answer, key="secret").post("/completions", {"a": 1})
    assert (reply.status, reply.value) == (200, {"ok": True})
    (request,) = seen
    assert str(request.url) == "http://host:8000/v1/completions"
    assert request.headers["authorization"] == "Bearer secret"
    assert request.headers["accept-encoding"] == "identity"
    assert json.loads(request.content) == {"a": 1}


def test_a_redirect_is_not_followed():
    def answer(request):
        return httpx2.Response(307, headers={"location": "http://elsewhere/"})

    error = refused(lambda: client(answer, key="secret").get("/models"))
    assert error.value == "http://host:8000/v1"
    assert "not followed" in str(error)
    assert "secret" not in str(error)


def test_an_answer_beyond_the_limit_is_not_read(monkeypatch):
    monkeypatch.setattr(remote_client, "ANSWER_BYTES", 1000)
    error = refused(lambda: client(lambda request: httpx2.Response(200, content=b"x" * 1001)).get("/models"))
    assert "more than 1000 bytes" in str(error)


def test_a_packed_answer_is_not_unpacked():
    def answer(request):
        return httpx2.Response(200, headers={"content-encoding": "gzip"}, stream=httpx2.ByteStream(b"\x1f\x8b"))

    assert "sends compressed answers" in str(refused(lambda: client(answer).get("/models")))


def test_a_server_that_drips_bytes_meets_the_deadline():
    async def drip():
        while True:
            await anyio.sleep(0.01)
            yield b" "

    class Dripping(httpx2.AsyncByteStream):
        def __aiter__(self):
            return drip()

        async def aclose(self):
            pass

    async def answer(request):
        return httpx2.Response(200, stream=Dripping())

    error = refused(lambda: client(answer, deadline_s=0.2).get("/models"))
    assert "did not answer within 0.2 seconds" in str(error)


def test_the_deadline_is_of_all_requests_together():
    async def answer(request):
        await anyio.sleep(0.15)
        return httpx2.Response(200, json={})

    error = refused(lambda: client(answer, deadline_s=0.25).post_each("/x", [{}] * 9))
    assert "0.25 seconds" in str(error)


def test_no_more_than_the_limit_of_requests_is_sent():
    sent = []
    asking = client(lambda request: sent.append(1) or httpx2.Response(200, json={}), max_requests=3)
    asking.post_each("/x", [{}] * 3)
    assert "more than 3 requests" in str(refused(lambda: asking.get("/x")))
    assert len(sent) == 3


@pytest.mark.parametrize("body", [b'{"a": NaN}', b"[" * 200_000, b"\xff", b"<html>", b'{"a": ' + b"9" * 5000 + b"}"])
def test_a_body_that_is_no_sound_json_is_none(body):
    assert client(lambda request: httpx2.Response(200, content=body)).get("/models").value is None


def test_a_server_that_is_not_there_is_named():
    def answer(request):
        raise httpx2.ConnectError("All connection attempts failed")

    error = refused(lambda: client(answer).get("/models"))
    assert (error.field, error.value) == ("against", "http://host:8000/v1")


@pytest.mark.parametrize(
    "url", ["http://", "ftp://host", "http://u:p@host/v1", "http://host/v1?key=x", "http://host:99999/v1", "http://[::1", "host:80"]
)  # fmt: skip
def test_what_is_no_plain_address_is_refused(url):
    error = refused(lambda: check_url(url))
    assert error.field == "against"
    assert "u:p" not in str(error)


def test_the_key_comes_from_a_variable_that_has_to_be_set(monkeypatch):
    monkeypatch.setenv("SOME_KEY", "abc")
    assert read_key("SOME_KEY") == "abc"
    assert read_key(None) is None
    monkeypatch.setenv("SOME_KEY", "abc\nX-Other: 1")
    assert "abc" not in str(refused(lambda: read_key("SOME_KEY")))
    monkeypatch.delenv("SOME_KEY")
    assert refused(lambda: read_key("SOME_KEY")).value == "SOME_KEY"


def test_a_servers_words_reach_the_terminal_without_control_characters():
    assert plain("a\x1b[31mb\nc" + "x" * 500) == "a [31mb c" + "x" * 191 + "..."
    reply = client(lambda request: httpx2.Response(400, json={"error": {"message": "no\x07pe"}})).get("/x")
    assert reply.words == "no pe"
