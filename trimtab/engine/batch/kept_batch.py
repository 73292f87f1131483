"""Whose turn is it between calls of a loaded model, and which batch does it keep?"""

from __future__ import annotations

import gc
import threading
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from trimtab.engine.batch.batch import Batch, BatchModel
from trimtab.engine.decode import decode_step
from trimtab.engine.decode.step_choice import Fallback
from trimtab.errors import RequestError
from trimtab.process import phases


def compared(model: BatchModel) -> dict[str, str]:
    """Compare the description of a model's decoder with its modules, where steps are to be made of it. Returns what is left out,
    with the reason."""
    mode = model.plan.execution.step.mode if model.decode == "auto" else model.decode
    if mode != "fused":
        return {}
    from trimtab.engine.families import check

    phases.begin("comparing the decoder's description")
    why = check.difference(model)
    return {} if why is None else {"fused step": why}


class KeptBatch:
    """The batch of one model between calls, None without one; it holds no model itself, so that one that is dropped goes at once.
    fallbacks: why its steps are not captured."""

    def __init__(self) -> None:
        self.batch: Batch | None = None
        self.fallbacks: tuple[Fallback, ...] = ()

    def single(self, model: BatchModel) -> Batch | None:
        """Return the result of `LoadedModel.rows`, see there."""
        # transformers' generation would not use the prefix cache.
        keeps = model.prefix_cache is not None and model.prefix_cache.why_not is None
        is_eager = model.decode == "eager" or (model.decode == "auto" and model.device.type != "cuda")
        is_invariant = model.plan.request.batch_invariant
        keeps |= is_invariant  # an answer alone is a row of as many as a batch has
        if is_eager and not keeps:
            return None
        if not is_invariant and (why := decode_step.wrong_rows(model)) is not None:
            self.fallbacks = (Fallback("steps of rows", why),)
            return None
        rows = model.plan.request.batch if is_invariant else 1
        if self.batch is not None and self.batch.rows != rows:
            self.forget(model)
        if self.batch is None and not self.fallbacks:
            self.batch = Batch(model, rows=rows)
            if model.decode == "auto" and not self.batch.steps.is_captured and not keeps:
                self.fallbacks, self.batch = tuple(self.batch.steps.fallbacks), None
        return self.batch

    def take(self, model: BatchModel, rows: int) -> Batch:
        """Return an idle batch of this many rows, the kept one if it has as many. It is the caller's until `keep`."""
        if self.batch is None or self.batch.rows != rows:
            self.forget(model)
            return Batch(model, rows=rows)
        batch, self.batch = self.batch, None
        return batch

    def keep(self, model: BatchModel, batch: Batch) -> bool:
        """Keep an idle batch for the next call if its steps are captured and it is the one that the plan counts. Returns whether it
        is kept."""
        is_idle = batch.free_rows == batch.rows and not batch.prompts.jobs
        planned = model.plan.request.batch
        if not model.is_open or not is_idle or not batch.steps.is_captured or batch.rows != planned:
            return False
        self.batch = batch
        return True

    def drop(self) -> None:
        """Let the batch of a model that closes go. Its fallbacks can still be read."""
        self.batch = None

    def forget(self, model: BatchModel) -> None:
        """Give the batch's memory back."""
        if self.batch is None:
            return
        self.drop()
        model.lend_prompt_room()
        gc.collect()  # a batch and its steps know each other
        if model.device.type == "cuda":
            torch.cuda.empty_cache()


class Turns:
    """One holder at a time; others wait, first come first served.

    A thread that has an unfinished answer and starts a second one would wait for itself: that is refused.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._owner: int | None = None
        self._waiting: deque[tuple[threading.Event, int]] = deque()

    @contextmanager
    def hold(self, what: str) -> Iterator[None]:
        """Wait for the turn and keep it inside. what: the field of the error. Errors: RequestError."""
        self._acquire(what)
        try:
            yield
        finally:
            self._release()

    def _acquire(self, what: str) -> None:
        me = threading.get_ident()
        with self._lock:
            if self._owner is None:
                self._owner = me
                return
            if self._owner == me:
                raise RequestError(
                    "another answer is still running", field=what, hint="Read it to the end or close its generator first"
                )
            mine = (threading.Event(), me)
            self._waiting.append(mine)
        try:
            mine[0].wait()
        except BaseException:  # Ctrl-C while waiting
            with self._lock:
                if mine in self._waiting:
                    self._waiting.remove(mine)
                    raise
            self._release()
            raise

    def _release(self) -> None:
        with self._lock:
            if not self._waiting:
                self._owner = None
                return
            event, self._owner = self._waiting.popleft()
            event.set()
