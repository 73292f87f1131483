"""How many requests does a worker decode together: the requested number, or the most that moves no block?"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from trimtab.errors import DoesNotFitError, RequestError
from trimtab.planning import Plan
from trimtab.planning.values.execution import BUCKETS
from trimtab.request import LoadRequest

MOST_ROWS = max(BUCKETS)
# Tried in this order; the last one is always accepted.
PLANNED = (32, 16, 8)


def check_rows(rows: int | None) -> None:
    """Raise RequestError for an unsupported number of rows; None means a planned number."""
    if rows is not None and not 1 <= rows <= MOST_ROWS:
        raise RequestError(f"must be between 1 and {MOST_ROWS}", field="rows", value=rows)


def plan_rows(request: LoadRequest, rows: int | None, make: Callable[[LoadRequest], Plan]) -> Plan:
    """Return the plan of a request for this many rows (None: as many as change no placement). `plan.request.batch` is the number.
    Errors: those of `make`. Without a number it is the largest of `PLANNED` whose plan keeps every block in the same tier as the
    plan of the smallest, and runs prompts and steps in the same way."""
    if rows is not None:
        return make(replace(request, batch=rows))
    least = make(replace(request, batch=PLANNED[-1]))
    if least.execution_device == "cpu":
        return least
    for count in PLANNED[:-1]:
        try:
            plan = make(replace(request, batch=count))
        except DoesNotFitError:
            continue
        if _layout(plan) == _layout(least):
            return plan
    return least


def _layout(plan: Plan) -> tuple[Any, ...]:
    """Return the tier of every block, and the modes of prompts and steps."""
    placements = [(one.block_path, one.tier, one.home) for one in plan.placements]
    return placements, plan.execution.step.mode, plan.execution.prompt.chunks, plan.execution.head, plan.staging_slots
