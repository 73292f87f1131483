"""What is sent to a server, what is read of its answer, hostile or not, and when its adapter is called alive or wrong."""

import json
import random
from types import SimpleNamespace

import anyio
import httpx2
import pytest

from tests.raised import refused
from trimtab.verification.server import client as remote_client
from trimtab.verification.server.answers import MAX_TOKENS, read_chat, read_completion, read_ollama
from trimtab.verification.server.client import Client, check_url, plain, read_key
from trimtab.verification.server.tokens import TokenTable
from trimtab.verification.server.verdict import (
    ALIVE,
    CANNOT_TELL,
    FALSE_ALARM,
    IGNORED,
    OTHER_VALUES,
    WRONG,
    Asked,
    judge,
    nothing_to_tell,
    sign_test,
)


def completion(**logprobs):
    given = {"tokens": [" a"], "token_logprobs": [-0.5], "top_logprobs": [{" a": -0.5, " b": -1.0}], **logprobs}
    return {"choices": [{"text": " a", "logprobs": given}], "usage": {"prompt_tokens": 3}}


def chat(*entries, text="a"):
    return {"choices": [{"message": {"content": text}, "logprobs": {"content": list(entries)}}]}


def entry(token=" a", logprob=-0.5, **more):
    return {"token": token, "logprob": logprob, "top_logprobs": [{"token": " b", "logprob": -1.0}], **more}


def test_a_completion_gives_text_tokens_and_the_count_of_its_prompt():
    said = read_completion(completion())
    assert (said.text, said.prompt_tokens) == (" a", 3)
    (position,) = said.positions
    assert (position.chosen.text, position.chosen.logprob) == (" a", -0.5)
    assert [(token.text, token.logprob) for token in position.top] == [(" a", -0.5), (" b", -1.0)]


def test_a_chat_gives_bytes_and_numbers_of_tokens_where_the_server_does():
    said = read_chat(chat(entry(bytes=[32, 97], id=7)))
    assert (said.positions[0].chosen.data, said.positions[0].chosen.id) == (b" a", 7)


def test_a_token_named_by_number_is_known_by_it():
    given = completion(tokens=["token_id:12"], top_logprobs=[{"token_id:12": -0.5}])
    assert read_completion(given).positions[0].chosen.id == 12


def test_llama_cpp_gives_completions_the_logprobs_of_chats():
    said = read_completion({"choices": [{"text": "a", "logprobs": {"content": [entry()]}}]})
    assert said.positions[0].top[0].text == " b"


def test_ollama_gives_its_logprobs_beside_the_response():
    said = read_ollama({"response": " a", "logprobs": [entry()], "prompt_eval_count": 5})
    assert (said.text, said.prompt_tokens, said.positions[0].chosen.text) == (" a", 5, " a")


@pytest.mark.parametrize("value", [None, [], {}, {"choices": []}, {"choices": [3]}, {"choices": [{"text": 3}]}, "x", 5])
def test_what_is_no_answer_is_none(value):
    assert read_completion(value) is None and read_chat(value) is None and read_ollama(value) is None


@pytest.mark.parametrize("logprobs", [
    {"token_logprobs": ["-0.5"]}, {"token_logprobs": [True]}, {"token_logprobs": [10**400]}, {"token_logprobs": [0.5]},
    {"top_logprobs": [[1]]}, {"top_logprobs": "x"}, {"tokens": [3]}, {"tokens": ["x" * 2000]}, {"tokens": {}},
    {"top_logprobs": [{" a": None}]},
])  # fmt: skip
def test_logprobs_of_another_form_are_not_read(logprobs):
    assert read_completion(completion(**logprobs)).positions is None


def test_a_stand_in_for_impossible_is_not_measured():
    said = read_completion(completion(top_logprobs=[{" a": -0.5, " b": -9999.0}]))
    assert [token.text for token in said.positions[0].top] == [" a"]


def test_an_endless_answer_is_cut():
    assert len(read_chat(chat(*[entry()] * (MAX_TOKENS + 50))).positions) == MAX_TOKENS
    assert read_chat(chat(text="x" * 10**6)) is None


class Vocabulary:
    """A tokenizer by its pieces."""

    def __init__(self, *pieces):
        self.pieces = pieces

    def __len__(self):
        return len(self.pieces)

    def convert_ids_to_tokens(self, ids):
        return [self.pieces[number] for number in ids]


def ids_of(said, table):
    return [(chosen, dict(top)) for chosen, top in table.positions(said)]


def test_tokens_of_a_sentencepiece_vocabulary_are_found_by_text():
    table = TokenTable(Vocabulary("<s>", "\u2581a", "\u2581b", "a", "<0x41>"))
    assert ids_of(read_completion(completion()), table) == [(1, {1: -0.5, 2: -1.0})]


def test_the_piece_of_a_byte_is_not_taken_for_a_letter_that_has_a_piece_of_its_own():
    table = TokenTable(Vocabulary("\u2581a", "<0x2C>", "<0x0A>", ",", "<0xC3>"))
    entries = [entry(",", logprob=-0.1), entry("\n", logprob=-0.2), entry("\ufffd", logprob=-0.3, bytes=[0xC3])]
    assert [chosen for chosen, _ in table.positions(read_chat(chat(*entries)))] == [3, 2, 4]


def test_tokens_of_a_byte_level_vocabulary_are_found_by_text_and_by_bytes():
    table = TokenTable(Vocabulary("x", "Ġa", "Ġb", "Ã¤"))
    assert ids_of(read_completion(completion()), table) == [(1, {1: -0.5, 2: -1.0})]
    said = read_chat(chat(entry("ä", bytes=list("ä".encode()))))
    assert ids_of(said, table) == [(3, {3: -0.5, 2: -1.0})]


def test_a_text_of_two_tokens_names_neither_and_ends_the_answer():
    table = TokenTable(Vocabulary("a", "a", "b"))
    assert ids_of(read_chat(chat(entry("b"), entry("a"), entry("b"))), table) == [(2, {2: -0.5})]


def test_tokens_shown_without_their_spaces_are_found_where_only_one_fits():
    table = TokenTable(Vocabulary("\u2581the", "\u2581sea", "sea", "."))
    entries = [{"token": text, "logprob": -0.1, "top_logprobs": []} for text in ("the", "sea")]
    assert [chosen for chosen, _ in table.positions(read_chat(chat(*entries, text="the sea")))] == [0]


def test_a_number_outside_the_vocabulary_names_nothing():
    assert TokenTable(Vocabulary("a", "b")).positions(read_chat(chat(entry("a", id=99)))) == []


def client(answer, **options):
    return Client("http://host:8000/v1", transport=httpx2.MockTransport(answer), **options)


def test_a_request_carries_the_key_and_asks_for_bytes_as_they_are():
    seen = []

    def answer(request):
        seen.append(request)
        return httpx2.Response(200, json={"ok": True})

    reply = client(answer, key="secret").post("/completions", {"a": 1})
    assert (reply.status, reply.value) == (200, {"ok": True})
    (request,) = seen
    assert str(request.url) == "http://host:8000/v1/completions"
    assert request.headers["authorization"] == "Bearer secret" and request.headers["accept-encoding"] == "identity"
    assert json.loads(request.content) == {"a": 1}


def test_a_redirect_is_not_followed():
    def answer(request):
        return httpx2.Response(307, headers={"location": "http://elsewhere/"})

    error = refused(lambda: client(answer, key="secret").get("/models"))
    assert error.value == "http://host:8000/v1" and "not followed" in str(error) and "secret" not in str(error)


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
            await anyio.lowlevel.checkpoint()
            yield b" "

    class Dripping(httpx2.AsyncByteStream):
        def __aiter__(self):
            return drip()

        async def aclose(self):
            pass

    async def answer(request):
        return httpx2.Response(200, stream=Dripping())

    assert "did not answer within 0.05 seconds" in str(refused(lambda: client(answer, deadline_s=0.05).get("/models")))


def test_the_deadline_is_of_all_requests_together(monkeypatch):
    moments = [0.0]
    monkeypatch.setattr(remote_client, "time", SimpleNamespace(monotonic=lambda: moments[-1]))

    async def answer(request):
        await anyio.lowlevel.checkpoint()
        moments.append(moments[-1] + 15.0)
        return httpx2.Response(200, json={})

    error = refused(lambda: client(answer, deadline_s=25.0).post_each("/x", [{}] * 9))
    assert "25 seconds" in str(error) and moments[-1] == 30.0


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
    assert error.field == "against" and "u:p" not in str(error)


def test_the_key_comes_from_a_variable_that_has_to_be_set(monkeypatch):
    monkeypatch.setenv("SOME_KEY", "abc")
    assert read_key("SOME_KEY") == "abc" and read_key(None) is None
    monkeypatch.setenv("SOME_KEY", "abc\nX-Other: 1")
    assert "abc" not in str(refused(lambda: read_key("SOME_KEY")))
    monkeypatch.delenv("SOME_KEY")
    assert refused(lambda: read_key("SOME_KEY")).value == "SOME_KEY"


def test_a_servers_words_reach_the_terminal_without_control_characters():
    assert plain("a\x1b[31mb\nc" + "x" * 500) == "a [31mb c" + "x" * 191 + "..."
    reply = client(lambda request: httpx2.Response(400, json={"error": {"message": "no\x07pe"}})).get("/x")
    assert reply.words == "no pe"


FAULTS = [("ignored", "the base answers", False), ("scale", "the scale", False), ("one module dropped", "q is", True)]
SIZES = {"ignored": 3.0, "scale": 1.0, "one module dropped": 0.1}


def asked(count, *, base_noise=0.0, sizes=SIZES, **distance):
    """Questions that are all alike. distance: hypothesis -> distance; `one` is the fault of one module."""
    distance = {{"one": "one module dropped"}.get(name, name): value for name, value in distance.items()}
    return [Asked(f"q{place}", "text", distance, sizes, base_noise) for place in range(count)]


def test_answers_that_are_nearest_to_right_are_alive():
    verdict = judge(asked(16, right=0.02, ignored=3.0, scale=1.0, one=0.1), FAULTS)
    assert (verdict.word, verdict.fault, verdict.unseen) == (ALIVE, "", ())
    assert set(verdict.excluded) == {"ignored", "scale", "one module dropped"}
    assert (verdict.smallest_seen.name, verdict.smallest_seen.size) == ("one module dropped", pytest.approx(0.1))
    # Three faults, each overlooked with 2^-16.
    assert verdict.confidence == pytest.approx(1 - 3 * 2**-16)


def test_a_fault_below_the_noise_leaves_it_open_and_the_smallest_that_would_have_been_seen_is_named():
    verdict = judge(asked(16, base_noise=0.3, right=0.3, ignored=3.0, scale=1.1, one=0.31), FAULTS)
    assert (verdict.word, verdict.confidence, verdict.unseen) == (CANNOT_TELL, None, ("one module dropped",))
    assert verdict.is_as_a_whole  # neither ignored nor another scale
    assert verdict.smallest_seen.name == "scale"
    assert verdict.reason.endswith("a small one may hide in the noise: one module dropped")


def test_an_alive_excludes_every_fault_that_was_tried_whatever_the_noise():
    for noise in (0.0, 0.01, 0.05, 0.1, 0.3, 0.8, 2.0):
        far = {name: max(size, noise) for name, size in SIZES.items()}
        one = far.pop("one module dropped")
        verdict = judge(asked(16, base_noise=noise, right=noise, one=one, **far), FAULTS)
        assert (verdict.word == ALIVE) == (set(verdict.excluded) == set(SIZES)) == (noise <= 0.05), noise


@pytest.mark.parametrize(("base_noise", "right", "is_alive"), [
    (0.0, 0.02, True), (0.0, 0.04, False), (0.03, 0.05, True), (0.03, 0.08, False), (None, 0.015, True), (None, 0.05, False),
])  # fmt: skip
def test_answers_farther_from_right_than_the_precision_explains_may_be_an_older_version(base_noise, right, is_alive):
    verdict = judge(asked(16, base_noise=base_noise, right=right, ignored=3.0, scale=1.0, one=0.5), FAULTS)
    assert verdict.word == (ALIVE if is_alive else CANNOT_TELL)
    assert verdict.unseen == (() if is_alive else (OTHER_VALUES,)) and verdict.is_as_a_whole


@pytest.mark.parametrize(("right", "other", "word"), [(0.06, 0.19, ALIVE), (0.1, 0.22, CANNOT_TELL), (0.18, 0.25, CANNOT_TELL)])
def test_other_values_are_excluded_where_they_would_move_the_answers_much_farther_than_they_are(right, other, word):
    """An older version is as far from right as the stand-in moves answers, 0.18, and farther from the stand-in."""
    faults, sizes = [*FAULTS, (OTHER_VALUES, "", True)], {**SIZES, "one module dropped": 0.5, OTHER_VALUES: 0.18}
    rows = asked(16, base_noise=None, sizes=sizes, right=right, ignored=3.0, scale=1.0, one=0.5, **{OTHER_VALUES: other})
    assert judge(rows, faults).word == word


def test_texts_alone_leave_slightly_other_values_open():
    verdict = judge(asked(16, right=0.0, ignored=3.0, scale=1.0, one=0.5), FAULTS, has_logprobs=False)
    assert (verdict.word, verdict.is_as_a_whole, verdict.unseen) == (CANNOT_TELL, True, (OTHER_VALUES,))


def test_a_fault_that_is_nearer_by_half_is_named_with_its_false_alarm_rate():
    verdict = judge(asked(16, right=1.0, ignored=2.0, scale=0.05, one=1.0), FAULTS)
    assert (verdict.word, verdict.fault) == (WRONG, "scale")
    # Three faults, and the test whether the answers are nobody's.
    assert verdict.false_alarm_rate == pytest.approx(4 * 2**-16)
    ignored = judge(asked(16, right=3.0, ignored=0.05, scale=2.0, one=3.0), FAULTS)
    assert (ignored.word, ignored.fault) == (IGNORED, "ignored")


def test_a_nearer_fault_is_no_alarm_unless_it_is_nearer_by_half():
    # Another precision can lie a little towards a fault.
    verdict = judge(asked(16, right=0.3, ignored=3.0, scale=0.9, one=0.25), FAULTS)
    assert (verdict.word, verdict.is_as_a_whole) == (CANNOT_TELL, True)


def test_few_questions_do_not_suffice_for_an_alarm():
    verdict = judge(asked(5, right=3.0, ignored=0.05, scale=2.0, one=3.0), FAULTS)
    assert (verdict.word, verdict.confidence) == (CANNOT_TELL, None) and "ignored" in verdict.reason


def test_noise_that_hides_a_fault_of_the_whole_adapter_leaves_nothing_to_tell():
    verdict = judge(asked(16, base_noise=0.8, right=0.9, ignored=3.0, scale=1.2, one=0.9), FAULTS)
    assert verdict.word == CANNOT_TELL
    assert verdict.reason.endswith("the following remain possible: scale, one module dropped")
    assert not verdict.is_as_a_whole and verdict.visible_from > 1.0


def test_a_fault_that_no_question_shows_is_not_excluded():
    sizes = {**SIZES, "scale": 0.0}
    verdict = judge(asked(16, sizes=sizes, right=0.02, ignored=3.0, scale=0.02, one=0.1), FAULTS)
    assert (verdict.word, verdict.unseen) == (CANNOT_TELL, ("scale",))


def test_answers_far_from_everything_are_wrong_only_where_the_base_is_known_to_be_right():
    far = {"right": 2.0, "ignored": 2.5, "scale": 2.2, "one": 2.0}
    verdict = judge(asked(16, base_noise=0.05, **far), FAULTS)
    assert (verdict.word, verdict.fault) == (WRONG, "")
    assert judge(asked(16, base_noise=None, **far), FAULTS).word == CANNOT_TELL
    assert judge(asked(16, base_noise=1.0, **far), FAULTS).word == CANNOT_TELL


def test_of_two_faults_that_fit_the_one_that_explains_all_questions_is_named():
    faults = [("ignored", "", False), ("vision part dropped", "", False), ("tower parts dropped", "", False)]
    images = [
        Asked(f"i{n}", "image", {"right": 1.0, "ignored": 3.0, "vision part dropped": 0.01, "tower parts dropped": 0.01},
              {"ignored": 3.0, "vision part dropped": 1.0, "tower parts dropped": 1.0}, 0.0)
        for n in range(12)
    ]  # fmt: skip
    sounds = [
        Asked(f"s{n}", "audio", {"right": 1.0, "ignored": 3.0, "vision part dropped": 1.0, "tower parts dropped": 0.01},
              {"ignored": 3.0, "vision part dropped": 0.0, "tower parts dropped": 1.0}, 0.0)
        for n in range(12)
    ]  # fmt: skip
    assert judge(images + sounds, faults).fault == "tower parts dropped"


def test_the_sign_test_is_the_tail_of_a_fair_coin():
    assert sign_test(16, 0) == 2**-16 and sign_test(3, 1) == pytest.approx(5 / 16) and sign_test(0, 0) == 1.0


def test_nothing_compared_tells_nothing():
    verdict = nothing_to_tell("no question", FAULTS)
    assert (verdict.word, verdict.unseen, verdict.is_as_a_whole) == (CANNOT_TELL, tuple(SIZES), False)
    assert verdict.smallest_seen is None


def test_a_right_server_is_called_wrong_no_more_often_than_the_bound_says():
    """Answers that are nearer to every fault as often as not, the worst that a right server can do."""
    draw = random.Random(0)
    runs, alarms = 4000, 0
    for _ in range(runs):
        rows = [
            Asked(f"q{n}", "text", {"right": 1.0, **{name: draw.choice((0.0, 2.0)) for name in SIZES}}, SIZES, None)
            for n in range(10)
        ]
        alarms += judge(rows, FAULTS).word in (IGNORED, WRONG)
    # 10 questions: all of them must be nearer, one chance in 1024 for each of three faults; 4 tests * 2^-10 <= 0.005.
    assert 0 < alarms / runs <= FALSE_ALARM
