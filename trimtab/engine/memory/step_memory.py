"""Memory of captured steps beyond their plan, and how many graphs fit."""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING, Protocol

from trimtab.errors import DoesNotFitError, gib
from trimtab.planning.memory.activations import row_cache_bytes
from trimtab.planning.values.byte_sizes import pool_tokens
from trimtab.planning.values.execution import CAPTURED, MOST_GRAPHS, graph_bytes, graph_count, step_bytes

if TYPE_CHECKING:
    import torch

    from trimtab.checkpoint.anatomy import Anatomy
    from trimtab.planning import Plan


class SteppedModel(Protocol):
    """A loaded model as the memory of its steps is counted."""

    @property
    def plan(self) -> Plan: ...

    @property
    def anatomy(self) -> Anatomy: ...

    @property
    def device(self) -> torch.device: ...

    @property
    def adapters(self) -> Collection[str]: ...


def extra_bytes(model: SteppedModel, rows: int, mode: str | None = None) -> int:
    """Return the device bytes of captured steps of `rows` rows in addition to the model's plan: 0 for the steps that were
    planned, the difference for more rows and for a mode that was requested after planning. mode: None for the planned one."""
    plan, anatomy = model.plan, model.anatomy
    planned, context_tokens = plan.execution.step, plan.request.context_tokens
    mode = mode or (planned.mode if planned.mode in CAPTURED else "fused")
    if planned.mode == mode and rows <= plan.request.batch:
        return 0
    has_rows = planned.mode in CAPTURED or plan.request.batch > 1
    caches = [
        row_cache_bytes(
            anatomy.kv_layers, anatomy.dtype, rows=count, context_tokens=context_tokens,
            pool=pool_tokens(plan.request.kv_tokens, rows=count, context_tokens=context_tokens),
            kv=plan.request.kv,
        )
        for count in (rows, plan.request.batch if has_rows else 0)
    ]  # fmt: skip
    wanted = step_bytes(
        mode, anatomy, quant=plan.request.quant, rows=rows, context_tokens=context_tokens,
        has_adapters=bool(plan.request.adapters), kv=plan.request.kv,
        is_paged=pool_tokens(plan.request.kv_tokens, rows=rows, context_tokens=context_tokens) is not None,
    )  # fmt: skip
    return max(sum(wanted.values()) + caches[0] - sum(planned.bytes.values()) - caches[1], 0)


def check_room(model: SteppedModel, rows: int, mode: str) -> None:
    """Raise DoesNotFitError unless the budget leaves room for steps of another mode or of more rows than were planned."""
    plan, needed = model.plan, extra_bytes(model, rows, mode)
    free = max(plan.gpu_budget_bytes - plan.gpu_needed_bytes, 0)
    if needed > free:
        what = f"batch={rows}" if rows > plan.request.batch else f"decode={mode!r}"
        raise DoesNotFitError(
            f"captured steps of {rows} rows need more memory than the plan counts, which leaves {gib(free)}", block=None,
            device=str(model.device), needed_bytes=needed, budget_bytes=free, hint=f"Plan with {what}",
        )  # fmt: skip


def most_graphs(model: SteppedModel, rows: int) -> int:
    """Return how many graphs of steps are kept: as many as were counted, and more where the budget leaves room."""
    plan, anatomy = model.plan, model.anatomy
    mode = plan.execution.step.mode if plan.execution.step.mode in CAPTURED else "fused"
    counted = graph_count(
        mode, rows=rows, context_tokens=plan.request.context_tokens, has_adapters=bool(model.adapters),
        kv=plan.request.kv,
    )  # fmt: skip
    each = graph_bytes(mode, anatomy, kv=plan.request.kv) + 4 * anatomy.vocab_size * rows
    free = max(plan.gpu_budget_bytes - plan.gpu_needed_bytes - extra_bytes(model, rows), 0)
    return max(min(counted + free // each, MOST_GRAPHS), 1)
