"""A model keeps one batch between calls: the one that its plan counts, if its steps are captured."""

import gc

import pytest
import torch

from tests.engine.decode.test_graphs import DEMO, demo, replayed  # noqa: F401 - a fixture
from tests.raised import raising
from trimtab.engine.batch.batch import Batch
from trimtab.engine.batch.request import PendingToken
from trimtab.errors import RequestError, TrimtabError

PROMPTS = ["Hello", {"prompt": "What is this?", "adapter": "style"}, "Hello again"]


@pytest.fixture(scope="module")
def planned():
    with demo(batch=3) as model:
        yield model


@pytest.fixture(autouse=True)
def nothing_kept(planned):
    yield
    planned.forget_batch()


def answers(model, **options):
    return [answer.token_ids for answer in model.batch(PROMPTS, max_new_tokens=6, **options)]


def batches(model):
    return [one for one in gc.get_objects() if type(one) is Batch and one.model is model]


def test_a_second_call_captures_nothing_and_answers_the_same(planned, replayed):  # noqa: F811 - the fixture
    first = answers(planned)
    (kept,) = batches(planned)
    captures = len(replayed)
    assert captures and planned.kept.batch is kept and not kept.active and not kept.placed
    assert answers(planned) == first and planned.kept.batch is kept
    assert len(replayed) == captures


def test_a_call_with_other_rows_gives_it_back(planned, replayed):  # noqa: F811 - the fixture
    expected = answers(planned)
    assert answers(planned, rows=2) == expected
    assert planned.kept.batch is None and not batches(planned)  # two rows are not what the plan counts


def test_an_answer_by_itself_gives_it_back(planned, replayed):  # noqa: F811 - the fixture
    expected = answers(planned)
    planned.decode = "graph"  # as on a GPU: one row, captured
    try:
        assert planned.answer(PROMPTS[0], max_new_tokens=6).token_ids == expected[0]
        assert [one.rows for one in batches(planned)] == [1] and answers(planned) == expected and planned.kept.batch.rows == 3
    finally:
        planned.decode = "auto"


def test_a_batch_that_was_left_or_failed_is_not_kept(planned, replayed):  # noqa: F811 - the fixture
    left = planned.batch_as_finished(PROMPTS, max_new_tokens=6)
    next(left)
    left.close()
    assert planned.kept.batch is None and not batches(planned)
    with pytest.raises(RequestError):
        list(planned.batch([*PROMPTS, {"prompt": "Hello", "adapter": "nobody"}], max_new_tokens=6))
    assert planned.kept.batch is None


def test_requests_that_cannot_be_read_leave_no_batch(planned, replayed):  # noqa: F811 - the fixture
    answers(planned)

    def broken():
        raise OSError("the file of prompts is gone")
        yield

    with pytest.raises(OSError, match="file of prompts"):
        list(planned.batch(broken()))
    assert planned.kept.batch is None and not batches(planned)


def test_an_adapter_of_the_same_name_answers_anew(planned, replayed):  # noqa: F811 - the fixture
    before = answers(planned)
    planned.unload_adapter("style")
    planned.load_adapter("style", str(DEMO / "adapters" / "rslora-dora"))
    try:
        found = answers(planned)
        planned.forget_batch()
        assert found == answers(planned) and found[1] != before[1]
    finally:
        planned.unload_adapter("style")
        planned.load_adapter("style", str(DEMO / "adapters" / "style"))
    assert answers(planned) == before


def test_a_closed_model_keeps_none(replayed):  # noqa: F811 - the fixture
    model = demo(batch=3)
    found = model.batch_as_finished(PROMPTS, max_new_tokens=4)
    for _ in PROMPTS:
        next(found)
    model.close()
    assert list(found) == [] and model.kept.batch is None


def test_one_whose_steps_are_not_captured_is_not_kept(planned):
    answers(planned)
    assert planned.kept.batch is None and not batches(planned)


def test_an_answer_whose_first_token_has_no_memory_leaves_its_row_to_the_next(planned, replayed, monkeypatch):  # noqa: F811
    monkeypatch.setattr(planned, "decode", "graph")
    expected = planned.answer(PROMPTS[0], max_new_tokens=6).token_ids

    with monkeypatch.context() as while_full:
        while_full.setattr(PendingToken, "of", raising(torch.OutOfMemoryError("planted")))
        with pytest.raises((torch.OutOfMemoryError, TrimtabError)):
            planned.answer(PROMPTS[0], max_new_tokens=6)
    assert planned.answer(PROMPTS[0], max_new_tokens=6).token_ids == expected
