"""How an answer gets the same bits alone and next to others: batch-invariant execution (`LoadRequest.batch_invariant`).

A kernel sums in another order for another number of rows, and a prompt's numbers depend on its chunk boundaries. Here neither
depends on other requests:

- A captured step computes all rows of the batch, whether requests are in them or not, with one graph: each row is multiplied by
  the same kernels with the same launch configuration, and attention of each looks at the same number of places. Adapters are looked
  up by table whether a row has one or not.
- Transformers' modules compute a row alone that no graph of all rows computes (an adapter that no table has, an image's placeholder
  token), and every row where steps are not captured, as on a CPU (`DecodeStep._one_by_one`).
- Prompts are computed one at a time, each in pieces that begin at multiples of `piece_tokens`, and never several in one pass. A
  prompt resumes behind a cached prefix only where one of its pieces begins, and only behind tokens that were computed as whole
  pieces of a prompt, not of an answer (prefix_cache.py).

No guarantee covers the same bits for another number of rows, on another card, after another choice of kernels (which a card's
first start makes), or after an adapter was loaded that changes layers that none did before or has a larger rank than all before.
"""

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
    """
    return max(sizes) if sizes else min(prefill_tokens or INVARIANT_CHUNK, INVARIANT_CHUNK)


def check_rows(model: EngineContext, rows: int) -> None:
    """Raise RequestError for a batch of another number of rows than the plan's, whose answers would have other bits."""
    planned = model.plan.request.batch
    if model.plan.request.batch_invariant and rows != planned:
        raise RequestError(
            "a batch-invariant model computes as many rows as it was planned for", field="rows", value=rows,
            allowed=(str(planned),), hint=f"Plan with batch={rows}",
        )  # fmt: skip
