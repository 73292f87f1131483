"""Do overlapping launches make a decode step faster, measured on whole captured steps?"""

from __future__ import annotations

import torch
from torch import Tensor

from trimtab.engine.decode.step_choice import StepChoice
from trimtab.engine.kernels.device_kernels import DeviceKernels
from trimtab.engine.memory.graph_cache import Body, GraphCache, Policy, restore
from trimtab.engine.memory.out_of_memory import is_out_of_memory
from trimtab.errors import DeviceError
from trimtab.planning import Plan


def streams_layers(plan: Plan) -> bool:
    """Whether a step copies weights to the device: layers or the head, not towers, which steps do not enter."""
    return any(row.part in ("language", "text", "head") and row.tier == "stream" for row in plan.placements)


class StepCapture:
    """Measures the steps of one batch. tokens [rows, 1]: where a step reads each row's last token, and writes the next one."""

    def __init__(self, choice: StepChoice, tokens: Tensor, graphs: GraphCache) -> None:
        self.choice, self.model, self.device, self.tokens = choice, choice.model, choice.device, tokens
        self.graphs = graphs
        self.has_streamed_layers = streams_layers(self.model.plan)
        self._pays_beside_copies: bool | None = None

    @property
    def kernels(self) -> DeviceKernels:
        return self.choice.kernels

    def overlap_pays(self, body: Body, count: int) -> bool:
        """Return whether overlapping kernels give the same bits and a faster step here; measured once for
        kernels, and once for each batch whose decoder layers are copied during its steps."""
        if self.device.type != "cuda" or self.kernels.is_empty:
            return False
        # The time of a step whose weights are copied during it is also that of its copies.
        if self.has_streamed_layers or any(one.order for one in self.graphs.values()):
            if self._pays_beside_copies is None:
                self._pays_beside_copies = self._try_overlap(body)
            return self._pays_beside_copies
        if self.kernels.overlap_pays is None:
            made_of, request = self.kernels.made_of, repr(self.model.plan.request)
            key = ("overlapping launches", made_of, request, count, self.tokens.shape[0])
            if self.kernels.checks.find(*key) is not None:
                self.kernels.overlap_pays = True
                return True
            self.kernels.overlap_pays = self._try_overlap(body)
            if self.kernels.overlap_pays:
                self.kernels.checks.keep({}, *key)
                self.kernels.checks.save()
        return self.kernels.overlap_pays

    def _try_overlap(self, body: Body) -> bool:
        plain_ms, plain = self.tried(body, overlap=False)
        try:
            ms, scores = self.tried(body, overlap=True)
            is_same = torch.equal(plain, scores)
            pays = is_same and ms < plain_ms
            why = f"{ms:.2f} ms per step against {plain_ms:.2f}" if is_same else "the logits of a step differ"
        except (RuntimeError, DeviceError) as exc:
            if is_out_of_memory(exc):
                raise
            why, pays = f"{type(exc).__name__}: {exc}", False
        if not pays:
            self.choice.fall_back("overlapping launches", why, requested=False)
        return pays

    def tried(self, body: Body, *, overlap: bool) -> tuple[float, Tensor]:
        """Return the milliseconds of a captured step and its scores; inputs of the next step stay unchanged."""
        before = [(self.tokens, self.tokens.clone())]
        policy = Policy(self.model, "a decode step", lambda why: None, streamer=self.model.streamer, is_trial=True)
        try:
            with self.kernels.overlapping(overlap):
                one = self.graphs.capture(body, before, policy)
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            best, here = float("inf"), torch.cuda.current_stream(self.model.device)
            for _ in range(8):
                restore(before)
                start.record(here)
                one.replay()
                end.record(here)
                end.synchronize()
                best = min(best, start.elapsed_time(end))
        finally:
            restore(before)
        return best, one.outputs[0].clone()
