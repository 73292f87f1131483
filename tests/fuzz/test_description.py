"""The server and its description agree: thousands of requests, no 5xx, no answer of another form."""

from __future__ import annotations

import os

import pytest

from tests.fuzz import run

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(run.VARIABLE not in os.environ, reason=f"{run.VARIABLE} names no environment with Schemathesis"),
]


def test_every_answer_is_one_that_the_description_allows():
    record = run.run()
    assert record["failures"] == [] and record["errors"] == [] and record["complete"]
    assert record["test_cases"]["generated"] >= run.FEWEST_CASES
    assert record["operations"]["tested"] == record["operations"]["total"] - 1  # all but the comparison
    assert record["is_healthy"] and record["log"] == ""
    # Otherwise every request would end at its first look.
    for operation in ("POST /v1/chat/completions", "POST /v1/completions", "POST /v1/messages", "POST /v1/responses"):
        assert record["answers"][operation]["fuzzing"]["accepted"] > 20
