"""A server takes as many rows as cost the model nothing, and no more than steps are made for."""

import pytest

from tests.planning.values.test_execution import ADAPTER, E4B, H200, card
from trimtab.errors import DoesNotFitError, RequestError
from trimtab.planning import make_plan
from trimtab.request import LoadRequest
from trimtab.serve.worker.row_count import MOST_ROWS, check_rows, plan_rows

REQUEST = LoadRequest(model="m", quant="nf4-dq", head="full", context_tokens=1024, images=0, audio_s=0.0)


def planned(gib, rows=None):
    seen = []

    def make(request):
        seen.append(request.batch)
        return make_plan(request, E4B, adapters=ADAPTER, machine=card(gib), rates=H200)

    return plan_rows(REQUEST, rows, make), seen


def test_a_large_card_gets_32_rows_and_a_small_one_8():
    large, seen = planned(140)
    assert large.request.batch == 32 and seen == [8, 32]
    assert large.execution.step.mode == "fused" and large.execution.prompt.mode == "graph"
    small, seen = planned(5)
    assert small.request.batch == 8 and seen == [8, 32, 16]
    # More rows would have moved layers off the card.
    more, _ = planned(5, 32)
    assert [one.tier for one in more.placements] != [one.tier for one in small.placements]


def test_a_number_that_is_named_is_planned_as_it_is():
    made, seen = planned(140, 3)
    assert made.request.batch == 3 and seen == [3]
    with pytest.raises(DoesNotFitError):
        planned(1.2, 64)


def test_rows_beyond_the_largest_step_are_refused():
    check_rows(None)
    check_rows(MOST_ROWS)
    for rows in (0, 65):
        with pytest.raises(RequestError, match="between 1 and 64"):
            check_rows(rows)
