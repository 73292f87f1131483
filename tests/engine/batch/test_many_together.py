"""`LoadedModel.batch` where several prompts go through in one pass: the answers given alone, and whose error is whose."""

import contextlib
import gc
import weakref

import pytest

import trimtab
from tests.engine.calls.test_many import QUESTION, REQUESTS, alone
from trimtab import demo
from trimtab.engine.batch.batch import Batch
from trimtab.engine.batch.request import SampledToken
from trimtab.engine.prefill import packing
from trimtab.engine.prefill.packing import PackedPrefill
from trimtab.engine.prefill.prefill import PrefillRunner
from trimtab.errors import RequestError

ROWS = 8


def loaded(**options):
    adapters = {name: str(demo.ADAPTERS[name]) for name in ("style", "specialist")}
    given = {"quant": "none", "dtype": "float32", "head": "full", "device": "cpu", "context": 128, "batch": ROWS}
    return trimtab.load(trimtab.plan(demo.BASE, adapters=adapters, images=2, audio_s=2.0, **given | options))


@pytest.fixture(scope="module")
def model():
    with loaded() as found:
        yield found


class Passes(list):
    """The prompts of each pass; batches: references to those that were made."""

    def __init__(self):
        super().__init__()
        self.batches = []


@pytest.fixture
def passes(monkeypatch):
    """Let batches on a CPU compute prompts as a GPU does, in chunks and several at once; the sizes of the passes."""
    own_init, own_run, found = Batch.__post_init__, PackedPrefill.run, Passes()

    def init(self):
        own_init(self)
        found.batches.append(weakref.ref(self))
        self.prompts = PrefillRunner(self, "static", (16, 64))

    def run(self, together, numbers):
        found.append(len(together.prompts))
        return own_run(self, together, numbers)

    monkeypatch.setattr(Batch, "__post_init__", init)
    monkeypatch.setattr(PackedPrefill, "run", run)
    monkeypatch.setattr(PrefillRunner, "most_packed", property(lambda self: 512))
    monkeypatch.setattr(packing, "LEAST_TOKENS", 16)
    return found


MORE = [*REQUESTS, *({"prompt": f"{number} and {number}?", "adapter": "style"} for number in range(6)), *REQUESTS[:2]]


@pytest.fixture(scope="module")
def expected(model):
    """What each of MORE is answered alone."""
    return [alone(model, request) for request in MORE]


@pytest.mark.parametrize("rows", [3, ROWS])
def test_prompts_that_go_through_together_have_the_answers_given_alone(model, expected, passes, rows):
    found = list(model.batch(MORE, rows=rows, max_new_tokens=10))
    assert max(passes) > 1 and max(passes) <= rows
    for one, other in zip(found, expected, strict=True):
        assert (one.token_ids, one.text, one.finish_reason) == (other.token_ids, other.text, other.finish_reason)
        assert one.prompt_tokens == other.prompt_tokens and one.ttft_s > 0


def test_prompts_together_wait_for_room_in_the_pool_of_pages(expected, passes):
    with loaded(kv_tokens=256) as model:
        found = list(model.batch(MORE, max_new_tokens=10))
        assert max(passes) > 1
        assert [one.token_ids for one in found] == [one.token_ids for one in expected]


def test_a_wrong_request_among_them_is_its_own_error_alone(model, passes):
    requests = [{"prompt": QUESTION}, {"prompt": QUESTION, "adapter": "nobody"}, {"prompt": "Hello"}, {"text": "none"}]
    found = list(model.batch(requests, rows=ROWS, max_new_tokens=4, errors="return"))
    assert [isinstance(one, RequestError) for one in found] == [False, True, False, True]
    assert found[1].field == "adapter" and passes
    for place in (0, 2):
        assert found[place].token_ids == alone(model, {**requests[place], "max_new_tokens": 4}).token_ids


def test_a_pass_that_fails_leaves_each_prompt_to_itself(model, expected, passes, monkeypatch):
    def refused(self, together, numbers):
        raise RequestError("is not possible together", field="prompt")

    monkeypatch.setattr(PackedPrefill, "run", refused)
    found = list(model.batch(REQUESTS, rows=ROWS, max_new_tokens=10))
    assert [one.token_ids for one in found] == [one.token_ids for one in expected[: len(REQUESTS)]]


@pytest.mark.parametrize("errors", ["return", "raise"])
def test_a_first_token_that_cannot_be_drawn_is_the_error_of_its_request(model, passes, monkeypatch, errors):
    own = SampledToken.of

    def draw(row, logits, token, top_count):
        if row.adapter == "specialist" and not row.answer_ids:
            raise RequestError("has no token", field="prompt")
        return own(row, logits, token, top_count)

    adapters = [None, "specialist", "style", None]
    requests = [{"prompt": f"{QUESTION} {number}", "adapter": name} for number, name in enumerate(adapters)]
    expected = [alone(model, {**one, "max_new_tokens": 4}) for one in requests]
    monkeypatch.setattr(SampledToken, "of", draw)
    answers = model.batch(requests, rows=ROWS, max_new_tokens=4, errors=errors)
    if errors == "raise":
        with pytest.raises(RequestError, match="has no token"):
            list(answers)
    else:
        found = list(answers)
        assert passes and isinstance(found[1], RequestError)
        for place in (0, 2, 3):
            assert found[place].token_ids == expected[place].token_ids
    monkeypatch.setattr(SampledToken, "of", own)
    # Nobody's row or pages are left.
    again = list(model.batch(requests, rows=ROWS, max_new_tokens=4))
    assert [one.token_ids for one in again] == [one.token_ids for one in expected]


def test_images_are_not_prepared_ahead_of_a_prompt_that_has_one(model, passes, monkeypatch):
    own, begun = Batch.begin, []

    def begin(self, inputs, *given, **options):
        begun.append((inputs.has_media, len(self.active)))
        return own(self, inputs, *given, **options)

    monkeypatch.setattr(Batch, "begin", begin)
    asked = {"prompt": "What is shown?", "image": str(demo.IMAGES[0])}
    list(model.batch([asked] * 4, rows=ROWS, max_new_tokens=6))
    assert begun == [(True, number) for number in range(4)]  # each when the one before has its row


@pytest.mark.parametrize("errors", ["return", "raise"])
def test_a_batch_whose_answers_nobody_wants_is_nobodys(passes, monkeypatch, errors):
    """Its keys and values are counted once: another batch's come when they are gone."""
    with loaded(kv_tokens=128) as model:
        answers = model.batch([[5] * 70, [6] * 70, [7] * 70], rows=ROWS, max_new_tokens=40)
        next(answers)
        answers.close()
        assert [made() for made in passes.batches] == [None]
        own = SampledToken.of

        def draw(row, logits, token, top_count):
            raise RequestError("has no token", field="prompt")

        monkeypatch.setattr(SampledToken, "of", draw)
        kept = []
        with contextlib.suppress(RequestError):
            kept += model.batch(["one", "two"], rows=ROWS, max_new_tokens=4, errors=errors)
        monkeypatch.setattr(SampledToken, "of", own)
        gc.collect()
        assert [made() for made in passes.batches] == [None, None]
        assert errors == "raise" or [type(one) for one in kept] == [RequestError] * 2
