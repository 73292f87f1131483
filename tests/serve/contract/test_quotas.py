"""What one key may use: counted by name, refused with the time to come again, and given back at the end of a request."""

import re

import pytest

from tests.serving import MockPool, client, failed, words
from trimtab.errors import RequestError
from trimtab.serve.contract.quotas import KeyLimits, QuotaError, Quotas
from trimtab.serve.contract.settings import Settings

CHAT = {"model": "demo", "messages": [{"role": "user", "content": "Hello"}]}


class Clock:
    def __init__(self):
        self.now = 1000.0

    def __call__(self):
        return self.now


def quotas(**limits):
    clock = Clock()
    one = KeyLimits(name="alice", **limits)
    return Quotas({"key-a": one}, now=clock), one, clock


def test_requests_at_once_are_counted_until_they_end():
    found, alice, _ = quotas(concurrent=2)
    first = found.enter(alice)
    found.enter(alice)
    with pytest.raises(QuotaError) as caught:
        found.enter(alice)
    assert caught.value.field == "concurrent" and caught.value.retry_after_s == 1
    first.leave(10)
    found.enter(alice)


def test_requests_of_the_last_minute_are_counted():
    found, alice, clock = quotas(requests_per_minute=2)
    found.enter(alice).leave(1)
    clock.now += 20
    found.enter(alice).leave(1)
    clock.now += 20
    with pytest.raises(QuotaError) as caught:
        found.enter(alice)
    assert caught.value.retry_after_s == pytest.approx(20)
    clock.now += 20
    found.enter(alice).leave(1)


def test_tokens_of_a_day_are_counted_from_the_first_one():
    found, alice, clock = quotas(tokens_per_day=100)
    found.enter(alice).leave(99)
    found.enter(alice).leave(50)  # what has begun is answered
    clock.now += 3600
    with pytest.raises(QuotaError) as caught:
        found.enter(alice)
    assert caught.value.retry_after_s == pytest.approx(23 * 3600)
    clock.now += 23 * 3600
    found.enter(alice).leave(1)


def test_a_refused_request_counts_for_nothing():
    found, alice, _ = quotas(concurrent=1, requests_per_minute=2)
    use = found.enter(alice)
    for _ in range(5):
        with pytest.raises(QuotaError):
            found.enter(alice)
    use.leave()
    found.enter(alice).leave(0)  # the second of this minute


def test_other_limits_leave_what_was_used():
    found, alice, _ = quotas(tokens_per_day=100)
    found.enter(alice).leave(150)
    more = KeyLimits(name="alice", tokens_per_day=200)
    found.use({"another-key": more})
    assert found.of("key-a") is None
    found.enter(found.of("another-key")).leave(100)
    with pytest.raises(QuotaError):
        found.enter(more)


@pytest.mark.parametrize("value", [0, -1, 1.5, True, "5"])
def test_a_limit_is_a_whole_number(value):
    with pytest.raises(RequestError) as caught:
        KeyLimits(name="alice", tokens_per_day=value)
    assert caught.value.field == "keys.alice.tokens_per_day"


def test_a_key_with_limits_gets_429_and_others_go_on():
    settings = Settings(page=False, api_keys=("key-a", "key-b"), key_limits={"key-a": KeyLimits(name="alice", tokens_per_day=9)})
    found = client(MockPool(lambda job: words(job, "fine")), settings)

    def chat(key):
        return found.post("/v1/chat/completions", json=CHAT, headers={"authorization": f"Bearer {key}"})

    assert chat("key-a").status_code == 200  # 7 + 2 tokens
    refused = chat("key-a")
    assert refused.status_code == 429 and int(refused.headers["retry-after"]) > 80_000
    error = refused.json()["error"]
    assert (error["class"], error["code"], error["type"]) == ("QuotaError", "quota", "rate_limit_error")
    assert "tokens_per_day" in error["message"] and "key-a" not in refused.text
    assert [chat("key-b").status_code for _ in range(3)] == [200] * 3
    text = found.get("/metrics", headers={"authorization": "Bearer key-b"}).text
    assert re.search(r'^trimtab_key_tokens_total\{key="alice"\} 9.0$', text, re.M)
    assert "key-a" not in text and "key-b" not in text


def test_a_request_that_fails_gives_its_place_back():
    settings = Settings(page=False, api_keys=("key-a",), key_limits={"key-a": KeyLimits(name="alice", concurrent=1)})
    found = client(MockPool(lambda job: [failed(job, "DeviceError")]), settings)
    for stream in (False, True, False):
        answer = found.post("/v1/chat/completions", json={**CHAT, "stream": stream}, headers={"authorization": "Bearer key-a"})
        assert answer.status_code == 503
