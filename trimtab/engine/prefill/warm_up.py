"""Which graphs of a batch are captured before its first request, and which in moments without requests."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from trimtab.engine.kv import sequence
from trimtab.engine.lora.store import HeldAdapter
from trimtab.engine.memory import reserve
from trimtab.engine.prefill.rows import Rows
from trimtab.errors import RequestError


class CaptureAhead:
    """The graphs of one batch that are captured before they are needed. Steps of one row and of all rows, and prompts of the
    largest chunk, are captured first: what cannot be captured here, or finds no memory, is then known when the model is loaded.
    Others are captured while the server is idle, or at their first use."""

    def __init__(self, batch: Rows) -> None:
        self.batch, self.model = batch, batch.model
        self.left: list[tuple[str, list[int]]] = []  # ("steps" or "prompts", sizes; none: prompts of several), for `prepare_more`

    def prepare(self, expected: Iterable[HeldAdapter] = (), *, first: bool = False) -> None:
        """Capture the steps and prompts that the first requests would otherwise wait for; where steps are not captured, do nothing.

        first: leave graphs that a first request does not need to `prepare_more`, where steps may be captured or not (decode "auto")
        and the plan leaves room for graphs at any time. expected: adapters that may be put on the model later, in captured steps
        too. Errors: RequestError while requests are running; DeviceError if memory runs out or a requested mode is unavailable.
        """
        self._check_idle()
        self.left = []
        steps, prompts = self.batch.steps, self.batch.prompts
        if not steps.is_captured:
            return
        sizes, chunks = steps.sizes(), sorted(prompts.sizes, reverse=True)
        first = first and steps.mode == "auto" and not reserve.is_wanted(self.model.plan, self.model.device)
        now = [size for size in sizes if not first or size in (sizes[0], 1)]
        token = self._token()
        self._capture_steps(token, expected, now)
        self._capture_prompts(token, chunks[:1] if first and chunks else None)
        if first:
            self.left = [("prompts", [size]) for size in chunks[1:]] + ([("prompts", [])] if chunks else [])
            self.left += [("steps", [size]) for size in sizes if size not in now]
        reserve.take(self.model.plan, self.model.device)

    def prepare_more(self, expected: Iterable[HeldAdapter] = ()) -> None:
        """Capture the next of the remaining graphs. Errors: as `prepare`; then nothing more is captured before its first use."""
        pending, self.left = self.left, []
        self._check_idle()
        if not pending or not self.batch.steps.is_captured:
            return
        what, sizes = pending[0]
        if what == "prompts":
            self._capture_prompts(self._token(), sizes)
        else:
            self._capture_steps(self._token(), expected, sizes)
        self.left = pending[1:]

    def _check_idle(self) -> None:
        rows = len(self.batch.active) + len(self.batch.placed) + len(self.batch.prompts.jobs)
        if rows:  # stand-ins are written to every row, and to the prompts' one
            raise RequestError("requests are running", field="rows", value=rows)

    def _token(self) -> int:
        """Return a token that is no placeholder."""
        placeholders = sequence.placeholder_ids(self.model.hf_model)
        middle = int(self.model.hf_model.config.get_text_config().vocab_size) // 2
        return next(number for number in range(middle, 0, -1) if number not in placeholders)

    def _capture_steps(self, token: int, expected: Iterable[HeldAdapter], sizes: Sequence[int]) -> None:
        with self.batch.stand_ins(token):
            self.batch.steps.prepare(self.batch.state(), [self.model.fitting(held) for held in expected], sizes)

    def _capture_prompts(self, token: int, sizes: Sequence[int] | None) -> None:
        self.batch.prompts.prepare(token, next(iter(self.model.adapters), None), sizes)
        self.model.adapter_store.none()
