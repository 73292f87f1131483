"""`transformers serve --continuous-batching` as a server that bench.load measures: started, waited for, named as it is.

    with TransformersServed(folder, device="cuda", quant="nf4-dq", dtype="bfloat16") as server: ...

The command of transformers 5.23 serves one model and no adapters, so its answers are the base's. Its continuous batching takes
models that only read (`GenerationState.use_continuous_batching`, cli/serving/utils.py): what hears and sees is answered one request
at a time, which its log says and `notes` repeats. It needs fastapi and openai (`pip install "transformers[serving]"`), and for a
model with a video processor torchvision.
"""

from __future__ import annotations

import re
import time
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

from bench import client
from bench.served import Served

ENGINE = "transformers"
COMMAND = ("-m", "transformers.cli.transformers", "serve")
QUANTS = {"none": (), "nf4-dq": ("--quantization", "bnb-4bit")}
# What it writes of a model that its continuous batching does not take.
FALLBACK = re.compile(r"(\w+ does not support continuous batching\. [^\n]*)")
# Answers that the end of a cell cut are cancelled at their next token.
QUIET_S = 2.0


class TransformersServed(Served):
    """A server of `transformers serve`. quant: "none" or "nf4-dq", which is what its "bnb-4bit" means. Errors: ValueError for
    another quant."""

    def __init__(
        self, folder: Path, *, device: str, quant: str, dtype: str, flags: Sequence[str] = ("--continuous-batching",)
    ) -> None:  # fmt: skip
        if quant not in QUANTS:
            raise ValueError(f"transformers serve quantizes to {', '.join(QUANTS)}, not {quant}")
        self.folder = folder
        arguments = [str(folder), *flags, *QUANTS[quant], "--device", device, "--dtype", dtype, "--host", "127.0.0.1"]
        super().__init__(arguments, command=COMMAND)

    def body_of(self, body: Mapping[str, Any]) -> dict[str, Any]:
        """Return a request as this server takes it: for the one model that it serves."""
        return {**body, "model": str(self.folder)}

    def notes(self) -> dict[str, Any]:
        """Return what a row of this server has to say of it."""
        fallback = FALLBACK.search(self.log)
        note = f"transformers {version('transformers')} serve, base model only: it serves no adapters"
        return {"adapters": 0, "note": note if fallback is None else f"{note}; {fallback.group(1)}"}

    def is_ready(self) -> bool:
        try:
            return client.get(self.address, "/health")[0] == 200
        except OSError:
            return False

    def _has_failed(self) -> bool:
        return False

    def status(self) -> dict[str, Any]:
        """Return the little that it says of itself."""
        return {"state": "ready" if self.is_ready() else "failed", "in_flight": 0, "numbers": {}}

    def wait_quiet(self, timeout_s: float) -> dict[str, Any]:
        """Wait for answers that were cut to be cancelled; it does not say whether they are."""
        time.sleep(min(QUIET_S, timeout_s))
        return self.status()
