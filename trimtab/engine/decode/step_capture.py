"""Capturing a decode step as a CUDA graph, and measuring whole steps before one is kept.

    capture = StepCapture(choice, tokens, graphs, tables)
    step = capture.record(run, keep, count)       # step.graph, step.outputs
    step.replay()

A graph repeats the very addresses that it was captured with. `run` queues a step and returns (logits, each row's most likely
token), which every replay writes again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from trimtab.engine.cuda.capture_stream import side_stream
from trimtab.engine.cuda.graph_cache import GraphCache
from trimtab.engine.decode.step_choice import StepChoice
from trimtab.engine.kernels.device_kernels import DeviceKernels
from trimtab.engine.layers import embedding as tables
from trimtab.engine.memory.out_of_memory import is_out_of_memory
from trimtab.engine.tiers import streaming as tiers
from trimtab.errors import DeviceError
from trimtab.planning import Plan
from trimtab.planning.values.copy_order import Piece

Run = Callable[[], tuple[Tensor, Tensor]]
# Of the largest score: a rounding of every layer in bfloat16 (2^-9), a few of them in one direction.
REPLAY_TOLERANCE = 2**-6


def check_replay(actual: Tensor, expected: Tensor, count: int) -> None:
    """Raise RuntimeError unless a graph's scores of the first `count` rows are those of the step it was captured from.

    The same kernels on the same numbers: bit for bit, but for a library that takes another algorithm in a graph. Weights
    that a replay reads too early, or from where they no longer are, give unrelated scores.
    """
    actual, expected = actual[:count], expected[:count]
    allowed = REPLAY_TOLERANCE * float(expected.nan_to_num().abs().max())
    if not torch.allclose(actual, expected, rtol=0.0, atol=allowed, equal_nan=True):
        most = float((actual - expected).nan_to_num().abs().max())
        raise RuntimeError(f"a replay's logits differ by up to {most:.3g} from the step it was captured from")


def streams_layers(plan: Plan) -> bool:
    """Whether a step copies weights to the device: layers or the head, not towers, which steps do not enter."""
    return any(row.part in ("language", "text", "head") and row.tier == "stream" for row in plan.placements)


@contextmanager
def in_pass(
    streamer: tiers.Streamer | None, order: Sequence[Piece] = (), *, entered: list[Piece] | None = None
) -> Iterator[None]:  # fmt: skip
    """A pass through the model that begins with empty staging buffers, as every replay of it will; around a replay, the graph fills
    them unknown to the streamer. order: of the pieces that it enters, where that is known. entered: becomes their real order."""
    if streamer is None:
        yield
        return
    streamer.begin_pass(tuple(order))
    try:
        yield
    finally:
        groups = streamer.end_pass()
        if entered is not None:
            entered[:] = groups


@dataclass(eq=False)
class CapturedStep:
    """A graph of one step, and the outputs of its replays: logits [count, V] float32, tokens [count]."""

    graph: torch.cuda.CUDAGraph
    outputs: tuple[Tensor, Tensor]
    keep: object  # tensors that the graph reads by address
    streamer: tiers.Streamer | None = None
    order: Sequence[Piece] = ()  # the pieces of streamed blocks that it enters

    def replay(self) -> None:
        tiers.replay(self.streamer, self.order, self.graph)


class StepCapture:
    """Captures the steps of one batch. tokens [rows, 1]: where a step reads each row's last token, and writes the next one."""

    def __init__(
        self, choice: StepChoice, tokens: Tensor, graphs: GraphCache[CapturedStep], staged: Sequence[tables.GatheredTable]
    ) -> None:  # fmt: skip
        self.choice, self.model, self.device, self.tokens = choice, choice.model, choice.device, tokens
        self.graphs, self.tables = graphs, staged
        # The pieces of streamed blocks that a step enters, in order, once one was run.
        self.order: list[Piece] = []
        self.has_streamed_layers = streams_layers(self.model.plan)
        self._pays_beside_copies: bool | None = None

    @property
    def kernels(self) -> DeviceKernels:
        return self.choice.kernels

    def overlap_pays(self, run: Run, keep: object, count: int) -> bool:
        """Return whether overlapping kernels give the same bits and a faster step here; measured once for
        kernels, and once for each batch whose decoder layers are copied during its steps."""
        if self.device.type != "cuda" or self.kernels.is_empty:
            return False
        if self.streams_decoder:
            if self._pays_beside_copies is None:
                self._pays_beside_copies = self._try_overlap(run, keep, count)
            return self._pays_beside_copies
        if self.kernels.overlap_pays is None:
            made_of, request = self.kernels.made_of, repr(self.model.plan.request)
            key = ("overlapping launches", made_of, request, count, self.tokens.shape[0])
            if self.kernels.checks.find(*key) is not None:
                self.kernels.overlap_pays = True
                return True
            self.kernels.overlap_pays = self._try_overlap(run, keep, count)
            if self.kernels.overlap_pays:
                self.kernels.checks.keep({}, *key)
                self.kernels.checks.save()
        return self.kernels.overlap_pays

    def _try_overlap(self, run: Run, keep: object, count: int) -> bool:
        plain_ms, plain = self.tried(run, keep, count, overlap=False)
        try:
            ms, scores = self.tried(run, keep, count, overlap=True)
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

    @property
    def streams_decoder(self) -> bool:
        """Whether a step's weights are copied during it: the time of one step is then also that of its copies."""
        return bool(self.order) or self.has_streamed_layers

    def tried(self, run: Run, keep: object, count: int, *, overlap: bool) -> tuple[float, Tensor]:
        """Return the milliseconds of a captured step and its scores; inputs of the next step stay unchanged."""
        with self.kernels.overlapping(overlap):
            one = self.record(run, keep, count)
        before = self.tokens.clone()
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        best = float("inf")
        for _ in range(8):
            self.tokens.copy_(before)
            start.record()
            one.replay()
            end.record()
            end.synchronize()
            best = min(best, start.elapsed_time(end))
        self.tokens.copy_(before)
        return best, one.outputs[0].clone()

    def record(self, run: Run, keep: object, count: int) -> CapturedStep:
        """Return a graph of `run` whose first replay gave the same logits of `count` rows as the run itself.

        keep: objects that it reads by address. Errors: RuntimeError and DeviceError, also for a replay with other logits.
        """
        with side_stream(self.device) as side:
            # Once for objects made on first use; the replay writes the same values again, except for the tokens.
            with torch.cuda.stream(side), in_pass(self.model.streamer, entered=self.order):
                before = self.tokens.clone()
                expected = run()[0].clone()
                self.tokens.copy_(before)
            torch.cuda.current_stream(self.device).wait_stream(side)
            torch.cuda.synchronize(self.device)

            def in_order() -> tuple[Tensor, Tensor]:
                with in_pass(self.model.streamer, self.order, entered=self.order):
                    return run()

            graph, outputs = self.graphs.record(side, in_order)
        step = CapturedStep(graph, outputs, keep, self.model.streamer, tuple(self.order))
        for _ in range(2 if self.order else 1):  # the second begins with the buffers as the first left them
            self.tokens.copy_(before)
            step.replay()
            check_replay(outputs[0], expected, count)
        self.tokens.copy_(before)
        return step
