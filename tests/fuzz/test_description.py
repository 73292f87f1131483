"""The server and its description agree: thousands of requests, no 5xx, no answer of another form."""

import json
import os
import re

import pytest

from tests.fuzz import run

needs_schemathesis = pytest.mark.skipif(
    run.VARIABLE not in os.environ, reason=f"{run.VARIABLE} names no environment with Schemathesis"
)
EVERY = run.operations()


def toy_problems(record):
    return run.problems(record, operations=EVERY, accepted=EVERY, fewest=run.FEWEST_CASES)


def demo_problems(record):
    return run.problems(record, operations=EVERY, accepted=run.ANSWERED, fewest=run.FEWEST_REAL)


@pytest.mark.slow
@needs_schemathesis
def test_every_answer_is_one_that_the_description_allows():
    assert toy_problems(run.run()) == []


@pytest.mark.slow
@needs_schemathesis
def test_a_real_model_keeps_to_the_description_too():
    assert demo_problems(run.run_real()) == []


def test_the_record_covers_every_operation_of_todays_description():
    record = json.loads(run.RECORD.read_text("utf-8"))
    assert toy_problems(record["toy"]) == [] and demo_problems(record["demo"]) == []


def test_a_record_with_a_fault_is_no_proof():
    record = json.loads(run.RECORD.read_text("utf-8"))["toy"]
    chat = "POST /v1/chat/completions"
    for changed, words in (
        ({"statuses": {name: seen for name, seen in record["statuses"].items() if name != chat}}, f"no case of {chat}"),
        ({"statuses": {**record["statuses"], chat: {"200": 9, "500": 1}}}, f"{chat} gave 500"),
        ({"log": "Traceback"}, "log: Traceback"), ({"is_healthy": False}, "is_healthy is false"),
        ({"failures": [{"type": "ServerError"}]}, "failures: [{'type': 'ServerError'}]"),
        ({"statuses": {name: {"400": 1} for name in record["statuses"]}}, f"no 200 of {chat}"),
    ):  # fmt: skip
        assert words in toy_problems({**record, **changed})


def test_the_page_says_how_many_requests_the_record_has():
    record = json.loads(run.RECORD.read_text("utf-8"))
    page = (run.RECORD.parents[2] / "docs" / "server-under-load.md").read_text("utf-8")
    counts = [record[name]["test_cases"]["generated"] for name in ("toy", "demo")]
    assert [f"{count:,}" for count in counts] == re.findall(r"([\d,]+)(?: requests generated| more to the demo)", page)
