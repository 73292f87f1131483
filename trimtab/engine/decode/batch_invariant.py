"""How does an answer get the same bits alone and next to others (`LoadRequest.batch_invariant`)?"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from trimtab.errors import RequestError
from trimtab.planning.values.execution import INVARIANT_CHUNK

if TYPE_CHECKING:
    from trimtab.engine.layers.context import EngineContext


def piece_tokens(sizes: Sequence[int], prefill_tokens: int) -> int:
    """Return the number at whose multiples the pieces of a prompt begin: the largest chunk, or the most of transformers' own pass.

    sizes: of captured chunks, none where there are none. prefill_tokens: of transformers' own chunks, 0 where it takes all at once.
    Prompts are computed one at a time, in such pieces, and resume behind a cached prefix only where one begins, behind tokens that
    were computed as whole pieces of a prompt.
    """
    return max(sizes) if sizes else min(prefill_tokens or INVARIANT_CHUNK, INVARIANT_CHUNK)


def check_rows(model: EngineContext, rows: int) -> None:
    """Raise RequestError for a batch of another number of rows than the plan's, whose answers would have other bits. A captured
    step computes all rows of the batch with one graph. The bits may differ on another card, after another choice of kernels, and
    after an adapter was loaded that changes other layers or has a larger rank."""
    planned = model.plan.request.batch
    if model.plan.request.batch_invariant and rows != planned:
        raise RequestError(
            "a batch-invariant model computes as many rows as it was planned for", field="rows", value=rows,
            allowed=(str(planned),), hint=f"Plan with batch={rows}",
        )  # fmt: skip
