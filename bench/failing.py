"""`trimtab serve` with a fault inside: prompts of one adapter run out of memory, as a GPU that is full would say it.

    python -m bench.failing MODEL ... (the flags of `trimtab serve`)

What fails is torch's own error at the place where it comes from; everything after it is the server as it is.
"""

from __future__ import annotations

import functools
import sys
from multiprocessing.connection import Connection
from typing import Any

FAILING_ADAPTER = "specialist"


def worker(connection: Connection, settings: dict[str, Any]) -> None:
    """Be the worker, with prompts that cannot be read."""
    import torch

    from trimtab.engine.batch.batch import Batch
    from trimtab.serve.worker import worker as real

    prefill = Batch.prefill

    def failing(self: Batch, prompt: Any, *given: Any) -> Any:
        if prompt.row.adapter == FAILING_ADAPTER:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
        return prefill(self, prompt, *given)

    Batch.prefill = failing  # type: ignore[method-assign]
    real.main(connection, settings)


def main() -> int:
    from trimtab.cli import main as cli
    from trimtab.serve import pool
    from trimtab.serve.worker.supervisor import Supervisor

    made = functools.partial(pool.Pool, make=functools.partial(Supervisor, target=worker))
    pool.Pool = made  # type: ignore[misc, assignment]
    return cli.main(["serve", *sys.argv[1:]])


if __name__ == "__main__":
    sys.exit(main())
