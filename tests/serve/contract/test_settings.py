"""What a server may be told (hosts, keys, limits, folders), and what one key may use."""

import os
import re

import pytest

from tests.raised import raised, refused
from tests.serve.http.test_app import CHAT
from tests.serve.scheduling.test_scheduler import Clock
from tests.serving import MockPool, client, failed, words
from trimtab.errors import RequestError
from trimtab.serve.contract.quotas import KeyLimits, QuotaError, Quotas
from trimtab.serve.contract.settings import Limits, Settings, is_loopback


@pytest.mark.parametrize("host", ["127.0.0.1", "127.1.2.3", "::1", "[::1]", "localhost"])
def test_this_machine_alone_needs_no_key(host):
    assert is_loopback(host) and Settings(host=host).api_keys == ()


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.168.1.5", "example.org", "", "127.1", "localhost.example.org", "10.0.0.1"])
def test_other_hosts_need_a_key(host):
    assert refused(Settings, host=host).field == "host" and Settings(host=host, api_keys=("k",)).host == host


@pytest.mark.parametrize("key", ["", " ", "a b", "ü", "a\n", "a\0"])
def test_a_key_that_cannot_be_sent_is_refused_and_not_repeated(key):
    error = refused(Settings, api_keys=("good", key))
    assert error.field == "api_key" and error.value is None


def test_keys_are_not_shown():
    assert "secret" not in repr(Settings(api_keys=("secret",)))


@pytest.mark.parametrize("options, field", [
    ({"port": -1}, "port"), ({"port": 65536}, "port"), ({"queue_limit": 0}, "queue_limit"), ({"grace_s": -1}, "grace_s"),
    ({"grace_s": float("nan")}, "grace_s"), ({"timeout_s": 0}, "timeout_s"), ({"timeout_s": float("inf")}, "timeout_s"),
    ({"cors_origins": ("*",)}, "cors_origin"), ({"cors_origins": ("example.org",)}, "cors_origin"),
    ({"cors_origins": ("https://example.org/",)}, "cors_origin"), ({"allow_fetch": ("*",)}, "allow_fetch"),
    ({"allow_fetch": ("http://a",)}, "allow_fetch"), ({"allow_fetch": ("a:80",)}, "allow_fetch"),
    ({"allow_fetch": ("",)}, "allow_fetch"), ({"allow_fetch": ("a b",)}, "allow_fetch"),
])  # fmt: skip
def test_a_setting_that_cannot_be_is_refused(options, field):
    assert refused(Settings, **options).field == field


def test_the_adapter_root_must_be_a_folder(tmp_path):
    assert refused(Settings, adapter_root=tmp_path / "nothing").field == "adapter_root"


@pytest.mark.parametrize(
    "limits", [{"body_bytes": 0}, {"n": -1}, {"n": 1.5}, {"audio_s": float("nan")}, {"max_tokens": 0}, {"n": None}, {"n": True}]
)
def test_a_limit_that_cannot_be_is_refused(limits):
    assert refused(Limits, **limits).field == next(iter(limits))


def test_limits_are_read_from_texts():
    assert Limits.of({"image_pixels": "100", "audio_s": "1.5", "prompt_tokens": "7"}) == Limits(
        image_pixels=100, audio_s=1.5, prompt_tokens=7
    )
    assert "image_pixels" in refused(Limits.of, {"image_pixel": "1"}).allowed
    error = refused(Limits.of, {"n": "many"})
    assert (error.field, error.value) == ("limit", "n=many")
    error = refused(Limits.of, {"n": "-1"})
    assert (error.field, error.value) == ("limit", "n=-1")


def test_a_limit_of_one_medium_raises_that_of_a_request_unless_it_is_given():
    one = Limits.of({"image_pixels": "64000000", "audio_s": "600"})
    assert (one.request_pixels, one.request_audio_s) == (64_000_000, 600.0)
    assert Limits.of({"image_pixels": "100", "audio_s": "1"}).request_pixels == Limits().request_pixels
    assert Limits.of({"request_pixels": "100"}).request_pixels == 100
    both = Limits.of({"image_pixels": "64000000", "request_pixels": "64000000"})
    assert both.image_pixels == both.request_pixels == 64_000_000
    for single, total in (("image_pixels", "request_pixels"), ("audio_s", "request_audio_s")):
        error = refused(Limits.of, {single: "400", total: "399"})
        assert (error.field, error.value) == ("limit", f"{single}=400") and f"{total}=399" in str(error)


# Adapter folders ------------------------------------------------------------------------------------------------------


@pytest.fixture
def root(tmp_path):
    (tmp_path / "root" / "client" / "medical").mkdir(parents=True)
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside" / "adapter_config.json").write_text("{}")
    return tmp_path / "root"


def test_folders_below_the_root_are_found(root):
    settings = Settings(adapter_root=root)
    expected = (root / "client" / "medical").resolve()
    for given in ("client/medical", "./client/../client/medical/", str(root / "client" / "medical")):
        assert settings.adapter_path(given) == expected


@pytest.mark.parametrize("given", [
    "..", "../outside", "client/../../outside", ".", "", "client/medical/../..", "/", "/etc", "nothing", "client/nothing",
    "C:\\Windows", "\\\\server\\share", "~", "a\0b", "client\0", "x" * 5000, "file:///etc", "//etc", "client/medical/\n",
])  # fmt: skip
def test_what_is_no_folder_below_the_root_is_refused_in_the_same_words(root, given):
    error = refused(Settings(adapter_root=root).adapter_path, given)
    assert error.field == "lora_path"
    assert str(error) == "lora_path: is not a folder below the server's adapter folder"


@pytest.mark.parametrize("name, text, words", [("n", "1.5", "must be an integer"), ("send_s", "soon", "must be a number")])
def test_a_limit_of_another_kind_says_which_it_must_be(name, text, words):
    assert words in str(refused(Limits.of, {name: text}))


@pytest.mark.skipif(os.name == "nt", reason="making links needs a right on Windows")
def test_links_out_of_the_root_are_refused(root):
    settings = Settings(adapter_root=root)
    (root / "link").symlink_to(root.parent / "outside")
    (root / "loop").symlink_to(root / "loop")
    (root / "client" / "medical" / "adapter_config.json").symlink_to(root.parent / "outside" / "adapter_config.json")
    for given in ("link", "loop", "client/medical"):
        assert refused(settings.adapter_path, given).field == "lora_path"


@pytest.mark.skipif(os.name == "nt", reason="making links needs a right on Windows")
def test_links_within_the_root_are_followed(root):
    (root / "link").symlink_to(root / "client" / "medical")
    assert Settings(adapter_root=root).adapter_path("link") == (root / "client" / "medical").resolve()


def test_without_a_root_no_client_loads_anything():
    assert "does not load adapters" in str(refused(Settings().adapter_path, "a"))


def quotas(**limits):
    clock = Clock()
    one = KeyLimits(name="alice", **limits)
    return Quotas({"key-a": one}, now=clock), one, clock


def test_requests_at_once_are_counted_until_they_end():
    found, alice, _ = quotas(concurrent=2)
    first = found.enter(alice)
    found.enter(alice)
    error = raised(QuotaError, found.enter, alice)
    assert error.field == "concurrent" and error.retry_after_s == 1
    first.leave(10)
    found.enter(alice)


def test_requests_of_the_last_minute_are_counted():
    found, alice, clock = quotas(requests_per_minute=2)
    found.enter(alice).leave(1)
    clock.now += 20
    found.enter(alice).leave(1)
    clock.now += 20
    assert raised(QuotaError, found.enter, alice).retry_after_s == pytest.approx(20)
    clock.now += 20
    found.enter(alice).leave(1)


def test_tokens_of_a_day_are_counted_from_the_first_one():
    found, alice, clock = quotas(tokens_per_day=100)
    found.enter(alice).leave(99)
    found.enter(alice).leave(50)  # what has begun is answered
    clock.now += 3600
    assert raised(QuotaError, found.enter, alice).retry_after_s == pytest.approx(23 * 3600)
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
    assert raised(RequestError, KeyLimits, name="alice", tokens_per_day=value).field == "keys.alice.tokens_per_day"


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
