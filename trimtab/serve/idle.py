"""Tuning in idle time: a worker measures one launch configuration at a time and stops when a request arrives.

A candidate is compiled on a thread of its own and timed, in a few milliseconds, between two looks at the pipe. What was measured is
kept for the next load; the model that runs keeps its configurations, so that its answers keep their bits. The kernels used here
are copies of their own.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Generator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from trimtab.serve.journal import write_traceback

if TYPE_CHECKING:
    from trimtab.runtime.batch import Batch
    from trimtab.runtime.model import LoadedModel

# Nobody has asked anything for so long before a candidate is tried, and so long is a look at the pipe between two.
QUIET_S, LOOK_S = 5.0, 0.02
# What trying candidates takes of the device for a while: partial sums, inputs, a graph, a few kernels.
NEEDED_BYTES = 128 * 2**20

Trial = Callable[[], Generator[Any, None, Any]]


class IdleTuning:
    """Products whose launch configurations are not measured yet. trials: each gives a generator that yields a candidate and times
    it when it is asked for the next. compile: makes a candidate's kernel, on any thread. keep: of what was measured so far. close:
    gives back what trying took."""

    def __init__(
        self, trials: Sequence[Trial], *, compile: Callable[[int, Any], None], keep: Callable[[], None],
        close: Callable[[], None], clock: Callable[[], float] = time.monotonic,
    ) -> None:  # fmt: skip
        self._trials, self._compile, self._keep, self._close, self._clock = trials, compile, keep, close, clock
        self._number = 0
        self._steps: Generator[Any, None, Any] | None = None
        self._thread: threading.Thread | None = None
        self._asked = clock()
        self.is_over = not trials

    def disturb(self) -> None:
        """A request has arrived: give up the product that is being timed; it begins again when it is quiet again."""
        self._asked = self._clock()
        if self._steps is not None:
            self._steps.close()
            self._steps = None

    def step(self) -> None:
        """Do one short piece of work if it is quiet. An error ends the tuning, never the worker."""
        if self.is_over or self._clock() - self._asked < QUIET_S or (self._thread and self._thread.is_alive()):
            return
        try:
            self._advance()
        except Exception as exc:
            write_traceback(exc, "tuning while idle ends")
            self.end()

    def _advance(self) -> None:
        if self._steps is None:
            self._steps = self._trials[self._number]()
        try:
            candidate = next(self._steps)
        except StopIteration:
            self._keep()
            self._steps, self._number = None, self._number + 1
            if self._number == len(self._trials):
                self.end()
            return
        thread = threading.Thread(
            target=self._compile, args=(self._number, candidate), name="trimtab-compile", daemon=True
        )
        thread.start()
        self._thread = thread  # `end` joins it: one that could not be started cannot be joined

    def end(self) -> None:
        """Stop for good and give back what trying took."""
        if self._steps is not None:
            self._steps.close()
        if self._thread is not None:
            self._thread.join()
        if not self.is_over:
            self.is_over, self._steps = True, None
            self._close()


def idle_tuning(model: LoadedModel, batch: Batch) -> IdleTuning | None:
    """Return the tuning of a loaded model's products that are not measured on a card like this, None if there is nothing to do
    or no memory left for it."""
    from trimtab.plan.execution import PRODUCT_ROWS
    from trimtab.runtime import hf_gemma4, launch_configs, matvec, tuning
    from trimtab.runtime.kernels import TRIED, Kernels, Product

    running, plan = batch.steps.kernels, model.plan
    if running.matvec is None or model.device.type != "cuda" or hf_gemma4.why_not(model.hf_model) is not None:
        return None
    if plan.gpu_budget_bytes - plan.gpu_needed_bytes < NEEDED_BYTES:
        return None
    counts = [count for count in PRODUCT_ROWS if count <= batch.rows]
    groups = hf_gemma4.product_groups(model.hf_model)
    measured = (launch_configs.MEASURED, launch_configs.SHIPPED)
    products = [
        one for one in running.products(groups, model.dtype, counts) if running.configs.get(one.key) not in measured
    ]
    if not products:
        return None
    loaded: list[Kernels] = []

    def own() -> Kernels:
        if not loaded:
            loaded.append(Kernels(matvec=matvec.load(model.device)))
        return loaded[0]

    def trial(one: Product) -> Generator[Any, None, Any]:
        return tuning.tune_stepwise(
            one.groups,
            one.n,
            own().matvec,
            dtype=model.dtype,
            gate=one.gate,
            limit=TRIED,
            repeat=2,
            small=running.small,
        )

    def compile_one(number: int, cut: Any) -> None:
        one = products[number]
        tuning.compile_cuts([(one.groups[0], one.gate is not None, cut)], own().matvec, model.dtype)

    def close() -> None:
        for one in loaded:
            one.matvec.close()
        loaded.clear()

    return IdleTuning(
        [partial(trial, one) for one in products], compile=compile_one, keep=lambda: tuning.keep_tuned(own().matvec),
        close=close,
    )  # fmt: skip
