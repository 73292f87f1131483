"""How are CUDA graphs captured, checked, replayed and dropped, and how many of steps fit?"""

from __future__ import annotations

import sys
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Collection, Hashable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol, TypeVar
from weakref import WeakSet

import torch
from torch import Tensor

from trimtab.engine.cuda.nvrtc import side_stream
from trimtab.engine.memory.out_of_memory import is_out_of_memory, memory_error
from trimtab.engine.tiers import streaming
from trimtab.errors import DoesNotFitError, RequestError, gib
from trimtab.planning.memory.activations import row_cache_bytes
from trimtab.planning.values.byte_sizes import pool_tokens
from trimtab.planning.values.copy_order import Piece
from trimtab.planning.values.execution import CAPTURED, MOST_GRAPHS, graph_bytes, graph_count, step_bytes

if TYPE_CHECKING:
    from trimtab.checkpoint.anatomy import Anatomy
    from trimtab.planning import Plan

Key = tuple[Hashable, ...]
Tensors = Sequence[Tensor]
# (a tensor that a pass overwrites, a copy from before the pass)
Overwritten = Sequence[tuple[Tensor, Tensor]]
Result = TypeVar("Result")
# Of the largest score: a rounding of every layer in bfloat16 (2^-9), a few of them in one direction.
REPLAY_TOLERANCE = 2**-6


def check_replay(actual: Tensor, expected: Tensor) -> None:
    """Raise RuntimeError unless the first rows of a graph's results are those of the pass that it was captured from.

    The same kernels on the same numbers: bit for bit, but for a library that takes another algorithm in a graph. Weights
    that a replay reads too early, or from where they no longer are, give unrelated results. Integers are not compared.
    """
    if not expected.is_floating_point():
        return
    actual, expected = (actual[: len(expected)] if expected.dim() else actual).float(), expected.float()
    allowed = REPLAY_TOLERANCE * float(expected.nan_to_num().abs().max())
    if not torch.allclose(actual, expected, rtol=0.0, atol=allowed, equal_nan=True):
        most = float((actual - expected).nan_to_num().abs().max())
        raise RuntimeError(f"a replay's results differ by up to {most:.3g} from the pass it was captured from")


@dataclass(frozen=True)
class Body:
    """The pass that a graph repeats. run: queues it, and returns its results; outputs: the tensors that they are copied into, made
    from those of `first`, None where replays write the results themselves. first: computes the pass before a capture, so that
    objects made on first use are there, and returns copies of its results, or of rows of them, that replays are compared with.
    serial: of the adapter whose own addresses it reads; kept: what it reads by address."""

    run: Callable[[], Tensors]
    first: Callable[[], Tensors]
    outputs: Callable[[Tensors], Tensors] | None = None
    serial: int | None = None
    kept: Callable[[], object] = lambda: None


@dataclass(frozen=True)
class Inputs:
    """load: copies values of the host to where the graph reads them. overwritten: copies what a pass writes that another reads."""

    load: Callable[[], None] = lambda: None
    overwritten: Callable[[], Overwritten] = tuple


@dataclass(frozen=True)
class Policy:
    """What the owner of graphs decides. what: it captures, in words. failed: ends captures, with the reason; forget: drops
    what a failed capture leaves. may_capture: a key without a graph; has_room: memory, which may fail as a capture does. most:
    graphs. capturing: the state of the model in a capture. streamer: of blocks that the pass copies. is_trial: replays of a
    capture change nothing, and one more is the pass; else the first one is. frees: unused memory, before a capture. is_static:
    nothing is captured, and a replay runs the body."""

    model: SteppedModel
    what: str
    failed: Callable[[str], None]
    forget: Callable[[], None] = lambda: None
    may_capture: Callable[[Key], bool] = lambda key: True
    has_room: Callable[[], bool] = lambda: True
    most: Callable[[], int] = lambda: sys.maxsize
    capturing: Callable[[], AbstractContextManager[None]] = nullcontext
    streamer: streaming.Streamer | None = None
    is_trial: bool = False
    frees: bool = False
    is_static: bool = False


@dataclass(eq=False)
class Captured:
    """A graph, and the outputs of its replays. order: the pieces of streamed blocks that it enters; serial, kept: as its body's."""

    graph: streaming.Replayable
    outputs: Tensors
    serial: int | None = None
    kept: object = None
    streamer: streaming.Streamer | None = None
    order: Sequence[Piece] = ()

    def replay(self) -> None:
        streaming.replay(self.streamer, self.order, self.graph)


@dataclass(frozen=True)
class _Repeated:
    """What is replayed where nothing is captured."""

    replay: Callable[[], object]


class GraphCache(OrderedDict[Key, Captured]):
    """Captured graphs by key, least recently used first. pool: returns the memory to capture into, None for the cache's own. A
    graph repeats the very addresses that it was captured with, so its key has everything in a pass that is no value in a tensor."""

    def __init__(self, pool: Callable[[], Any] = lambda: None) -> None:
        super().__init__()
        self.captures, self.capture_s = 0, 0.0
        self._pool: Any = None
        self._in_pool = WeakSet[torch.cuda.CUDAGraph]()
        self._given_pool = pool

    def run(self, key: Key, body: Body, inputs: Inputs, policy: Policy) -> Tensors | None:
        """Return the outputs of a pass by the graph of its key, which is captured where there is none; None if it is not.

        Errors: DeviceError if a capture finds no memory, and as `policy.failed` raises it; RequestError of the body.
        """
        captured = self.get(key)
        if captured is None:
            captured = self._captured(key, body, inputs, policy)
            if captured is None or not policy.is_trial:
                return None if captured is None else captured.outputs
        else:
            inputs.load()
        self.move_to_end(key)
        captured.replay()
        return captured.outputs

    def _captured(self, key: Key, body: Body, inputs: Inputs, policy: Policy) -> Captured | None:
        if not policy.may_capture(key):
            return None
        has_room = False
        with self._told(policy):
            has_room = policy.has_room()
        if not has_room:
            return None
        while len(self) >= policy.most():
            self.popitem(last=False)
        before = inputs.overwritten()
        inputs.load()
        with self._told(policy, before):
            with policy.capturing():
                start = time.perf_counter()
                captured = self.capture(body, before, policy)
                self.capture_s += time.perf_counter() - start
            self[key] = captured
            self.captures += 1
        return self.get(key)

    @contextmanager
    def _told(self, policy: Policy, before: Overwritten = ()) -> Iterator[None]:
        """End captures where the block fails, and go on behind it."""
        model = policy.model
        try:
            yield
        except RequestError:
            restore(before)
            raise
        except Exception as exc:
            self.forget_pool()
            policy.forget()
            if not (is_full := is_out_of_memory(exc)):
                torch.zeros(1, device=model.device).item()  # raises if the device is lost
            restore(before)
            if is_full:  # planned: never a reason for a slower fallback
                raise memory_error(exc, f"capturing {policy.what}", model.plan, model.device) from exc
            policy.failed(f"capturing failed: {type(exc).__name__}: {exc}")

    def capture(self, body: Body, before: Overwritten, policy: Policy) -> Captured:
        """Return a graph that was replayed with the results of its body; the cache does not keep it. before: `Inputs.overwritten`.

        Errors: RuntimeError for other results; those of the body and of CUDA.
        """
        if policy.is_static:
            outputs = () if body.outputs is None else body.outputs(body.first())
            return Captured(_Repeated(partial(_written, body, outputs)), outputs, body.serial, body.kept())
        order: list[Piece] = []
        graph, outputs, expected = self._recorded(body, before, order, policy)
        captured = Captured(graph, outputs, body.serial, body.kept(), policy.streamer, tuple(order))
        for number in range(2 if policy.is_trial and order else 1):  # the second begins with the buffers as the first left them
            if number:
                restore(before)
            for one in outputs:
                one.zero_()
            captured.replay()
            for one, wanted in zip(outputs, expected, strict=False):
                check_replay(one, wanted)
        if policy.is_trial:
            restore(before)
        return captured

    def _recorded(
        self, body: Body, before: Overwritten, order: list[Piece], policy: Policy
    ) -> tuple[streaming.Replayable, Tensors, Tensors]:  # fmt: skip
        """Return a graph, its outputs, and results from before the capture. order: becomes the pieces that the pass enters."""
        device = policy.model.device
        with side_stream(device) as side:
            with torch.cuda.stream(side), streaming.in_pass(policy.streamer, entered=order):
                expected = body.first()
            torch.cuda.current_stream(device).wait_stream(side)
            outputs = None if body.outputs is None else body.outputs(expected)
            restore(before)
            torch.cuda.synchronize(device)
            if policy.frees:
                torch.cuda.empty_cache()  # the pass's memory on the side stream has no other user

            def in_order() -> Tensors:
                with streaming.in_pass(policy.streamer, order, entered=order):
                    return _written(body, outputs)

            graph, made = self.record(side, in_order)
        return graph, made, expected

    def drop(self, is_unwanted: Callable[[Key, Captured], bool]) -> None:
        """Drop these graphs."""
        for key in [key for key, one in self.items() if is_unwanted(key, one)]:
            del self[key]

    def forget_pool(self) -> None:
        """Take another pool from now on: a failed capture makes its pool unusable."""
        self._pool = None

    def record(self, side: torch.cuda.Stream, run: Callable[[], Result]) -> tuple[torch.cuda.CUDAGraph, Result]:
        """Return a graph of the work that `run` queues on the capture stream, and `run`'s result. Earlier work is done before.

        Errors: those of `run` and of CUDA; the caller then drops the pool.
        """
        graph, pool = torch.cuda.CUDAGraph(), self._given_pool()
        if pool is None:
            if self._pool is None or not self._in_pool:  # a pool ends with the last graph that was captured into it
                self._pool, self._in_pool = torch.cuda.graph_pool_handle(), WeakSet()
            pool = self._pool
        with torch.cuda.stream(side), _ended_on_error(side, pool):
            # Other threads (a reader of the disk) may use the device at the same time.
            graph.capture_begin(pool=pool, capture_error_mode="thread_local")
            try:
                output = run()
            except BaseException:
                with suppress(Exception):  # it would only say that something failed before
                    graph.capture_end()
                raise
            graph.capture_end()
        self._in_pool.add(graph)
        return graph, output


def restore(before: Overwritten) -> None:
    """Copy back what passes have overwritten."""
    for state, copy in before:
        state.copy_(copy)


def _written(body: Body, outputs: Tensors | None) -> Tensors:
    """Run a body, and return its results where replays will write them."""
    made = body.run()
    return made if outputs is None else [target.copy_(source) for target, source in zip(outputs, made, strict=True)]


@contextmanager
def _ended_on_error(side: torch.cuda.Stream, pool: object) -> Iterator[None]:
    """Tell torch's allocator that a capture that fails in the block has ended.

    Up to torch 2.12 `capture_end` raises before it does so (https://github.com/pytorch/pytorch/pull/180395): every later
    `torch.cuda.empty_cache` then ends in an internal assertion, and an allocation that finds no memory gives nothing back before it
    fails. The memory of the failed capture stays in its pool.
    """
    try:
        yield
    except BaseException:
        end = getattr(torch._C, "_cuda_endAllocateToPool", None)
        with suppress(Exception):  # torch knows already
            if end is not None:
                end(side.device.index, pool)
        raise


# After this many passes, earlier counts are halved.
PERIOD = 64
# Forms that are remembered.
MOST_FORMS = 4096


class FormUses:
    """Counts of forms: counts before the last passes are halved, but never below one."""

    def __init__(self) -> None:
        self._counts: Counter[Hashable] = Counter()
        self._noted = 0

    def note(self, key: Hashable) -> None:
        """Count a pass of this form."""
        self._counts[key] += 1
        self._noted += 1
        if self._noted % PERIOD == 0:
            often = self._counts.most_common(MOST_FORMS)
            self._counts = Counter({form: max(count // 2, 1) for form, count in often})

    def pays(self, key: Hashable, oldest: Hashable | None) -> bool:
        """Whether a form is to be captured: it is needed again, and more often than the one that would be dropped."""
        return self._counts[key] > 1 and (oldest is None or self._counts[key] > self._counts[oldest])


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
