"""How are requests with their own adapter, length and sampling decoded together, one step at a time?"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from trimtab.checkpoint.names import near_names
from trimtab.engine.batch.request import Constraint, Draw, PendingToken, Prompt, Row, SampledToken, Sampler, queue_draws
from trimtab.engine.chat.control_tokens import end_token_ids
from trimtab.engine.chat.prompt import fitted
from trimtab.engine.decode import batch_invariant, decode_step
from trimtab.engine.decode.decode_step import BatchState, StepBuffers
from trimtab.engine.kv import kv_cache
from trimtab.engine.kv.sequence import Inputs, RowPages, lost_words, without_row
from trimtab.engine.prefill import prefix_cache, stock_pass
from trimtab.engine.prefill.prefill import PrefillRunner
from trimtab.engine.prefill.rows import PrefillContext
from trimtab.engine.prefill.warm_up import CaptureAhead
from trimtab.errors import DeviceError, RequestError
from trimtab.planning.memory.activations import row_cache_bytes
from trimtab.planning.values.byte_sizes import ALLOCATION_BYTES, pool_tokens
from trimtab.request import GenerateRequest

if TYPE_CHECKING:
    from trimtab.engine.lora.store import HeldAdapter

# What a row was when the step was queued: its tokens, the last of them, and the serial of its adapter.
_Seen = tuple[int, int, tuple[str, int | None] | None]


@dataclass(frozen=True)
class QueuedStep:
    """The outputs of a queued step, and its rows. Shapes: logits [rows, V] float32, greedy [rows] int64. numbers: of each row."""

    logits: Tensor
    greedy: Tensor
    numbers: dict[Row, int]
    _seen: dict[Row, _Seen]

    @classmethod
    def of(
        cls, outputs: tuple[Tensor, Tensor], rows: Sequence[Row], new: Mapping[Row, int], serial_of: Callable[[str], int | None]
    ) -> QueuedStep:
        """Return the step of these rows. outputs: (logits, greedy). new: the tokens that are not in their rows' lists yet."""
        seen = {row: (len(row.token_ids) + (row in new), new.get(row, row.token_ids[-1]), _adapter(row, serial_of)) for row in rows}
        return cls(*outputs, {row: row.number for row in rows}, seen)

    def matches(self, rows: Sequence[Row], serial_of: Callable[[str], int | None]) -> bool:
        """Whether the step is that of these rows now: the same tokens, adapters and rows. A row that has finished has any."""
        return all(
            row in self._seen
            and (row.finish is not None or self._seen[row] == (len(row.token_ids), row.token_ids[-1], _adapter(row, serial_of)))
            for row in rows
        )


def _adapter(row: Row, serial_of: Callable[[str], int | None]) -> tuple[str, int | None] | None:
    return None if row.adapter is None else (row.adapter, serial_of(row.adapter))


class BatchModel(PrefillContext, Protocol):
    """A loaded model as its batches see it."""

    @property
    def decode(self) -> str: ...

    @property
    def is_open(self) -> bool: ...

    @property
    def prefix_cache(self) -> prefix_cache.PrefixCache | None: ...

    def prepare(self, prompt: object, /) -> Inputs: ...


@dataclass(eq=False)
class Batch:
    """Up to `rows` requests of one loaded model, decoded together.

    context_tokens: positions of a row; None is the plan's context. decode: how a step is computed, as in `DecodeStep`; None is the
    model's mode. active: the rows that decode. placed: rows whose prompts are complete, in order, each with a place behind the
    active ones. Errors: RequestError for less than one row. Rows are contiguous from row 0 on: the last one fills the place of a
    row that leaves, so a request is known by its `Row` object. Not thread-safe. A row alone equals `LoadedModel.generate` up to
    rounding.
    """

    model: BatchModel
    rows: int
    context_tokens: int | None = None
    decode: str | None = None
    active: list[Row] = field(default_factory=list)
    placed: list[Row] = field(default_factory=list)

    def __post_init__(self) -> None:
        if self.rows < 1:
            raise RequestError("a batch has at least one row", field="rows", value=self.rows)
        self.context_tokens = self.context_tokens or self.model.context_tokens
        self.ends = frozenset(end_token_ids(self.model.hf_model))
        self._lost_words = lost_words(self.model.hf_model)
        self.cache = kv_cache.BatchedKVCache(
            self.rows, self.context_tokens, self.model.device, kv_tokens=self.model.plan.request.kv_tokens,
            kv=self.model.plan.request.kv, bytes_of=partial(_kv_bytes, self.model, self.context_tokens, self.rows),
        )  # fmt: skip
        self.pages = RowPages(self.cache, self.context_tokens)
        self.tokens = torch.zeros(self.rows, 1, dtype=torch.long, device=self.model.device)
        self._top: dict[Row, int | None] = {}
        # On a fast GPU Python's work takes as long as a step: the next step is queued before this one is read.
        self._ahead: QueuedStep | None = None
        self._lost: tuple[list[Row], Exception] | None = None  # rows whose states a failed step has advanced in part
        self._told = False  # whether `tokens` has the last tokens of the lists, not those of a later step
        self._read = torch.empty(self.rows, dtype=torch.long, pin_memory=self.model.device.type == "cuda")
        mode = self.decode or self.model.decode
        self.is_invariant = bool(self.model.plan.request.batch_invariant)
        self.steps = decode_step.DecodeStep(self.model, StepBuffers(self.tokens, self.cache, self.rows, self.context_tokens), mode)
        self.prompts = PrefillRunner(self, "eager" if mode == "eager" else "auto")
        self.prefixes = prefix_cache.Prefixes(self)
        self.captures_ahead = CaptureAhead(self)

    def prepare(self, expected: Iterable[HeldAdapter] = ()) -> None:
        """Capture the steps and prompts that the first requests would otherwise wait for; see `CaptureAhead.prepare`."""
        self.captures_ahead.prepare(expected)

    @contextmanager
    def stand_ins(self, token: int) -> Iterator[None]:
        """Fill every row with a computed prompt of one token while the block runs. A row is cleared when a request gets it."""
        prompt = self.begin(self.model.prepare([token]), GenerateRequest(max_new_tokens=1), client=None).compute()
        one = prompt.row
        try:
            for number in range(self.rows):
                self._fill(number, prompt)
                self.active.append(Row(None, one.request, [token, token], 1, number, sampler=one.sampler))
            yield
        finally:
            self.active.clear()
            self.pages.forget_all(one)
            self.prompts.release(prompt)
            self.cache.positions.zero_()
            self.model.adapter_store.none()

    @property
    def free_rows(self) -> int:
        """How many more requests can join."""
        return self.rows - len(self.active) - len(self.placed)

    def check_rows(self) -> None:
        """Raise DeviceError for a family whose rows cannot be computed."""
        if why := self.model.anatomy.capture_unsupported or decode_step.wrong_rows(self.model):
            raise self._no_rows(why)

    def begin(
        self, inputs: Inputs, request: GenerateRequest, *, adapter: str | None = None, top_logprobs: int | None = None,
        constraint: Constraint | None = None, client: str | None = "", group: str = "", may_end_in_step: bool = False,
        returns_states: bool = False,
    ) -> Prompt:  # fmt: skip
        """Return a prompt to be computed. Nothing is computed yet, and no row is taken.

        inputs: of `LoadedModel.prepare`; those of a text may be on the host. top_logprobs: how many of the most likely tokens to
        report with each token (0: only the token itself; None: none). constraint: as for `Row`. client: the owner of cached
        prefixes, where the model has a prefix cache; None uses no cache. group: requests of one prompt, media and adapter share the
        first one's computation. may_end_in_step, returns_states: as for `PrefillState`. Errors: RequestError if prompt and answer
        exceed the context, or for an adapter that is not loaded; those of `check_rows`.
        """
        self.check_rows()
        request = fitted(self.model, inputs, request)
        if adapter is not None and adapter not in self.model.adapter_store.names:
            raise RequestError(
                "no adapter of this name is loaded", field="adapter", value=adapter, allowed=self.model.adapters,
                near=near_names(str(adapter), self.model.adapters),
            )  # fmt: skip
        row = Row(
            adapter, request, list(inputs.token_ids), inputs.prompt_tokens, client=client, group=group, constraint=constraint,
            sampler=Sampler(request, self.model.device, self.steps.suppressed, self.steps.suppressed_first),
        )  # fmt: skip
        return Prompt(
            inputs, row, batch=self, top_logprobs=top_logprobs, may_end_in_step=may_end_in_step, returns_states=returns_states
        )

    def fork(self, prompt: Prompt) -> bool:
        """Use the prompt of a row of the same group, if its states are complete. Returns whether there is one."""
        row = prompt.row
        if not row.group or prompt.returns_states:
            return False
        for one in (*self.placed, *self.active):
            # A ring keeps the window before the next token: after one step more it lacks the oldest position.
            is_whole = one.written <= one.prompt_tokens + 1 or not self.cache.has_rings
            if self.cache.has_recurrent:  # a state of these tokens and no more
                is_whole = one.written <= one.prompt_tokens and (self._ahead is None or one not in self._ahead.numbers)
            if one.group == row.group and one.adapter == row.adapter and one.logits is not None and is_whole:
                prompt.take_states(row.prompt_tokens, logits=one.logits)
                prompt.copy_from(one)
                return True
        return False

    def prefill(self, prompt: Prompt, most_tokens: int | None = None) -> bool:
        """Compute the next chunk of a prompt, captured or by transformers' modules; True when it was the last."""
        if self.is_invariant:  # the time that a step leaves cuts no prompt
            most_tokens = batch_invariant.piece_tokens(self.prompts.sizes, self.model.prefill_tokens)
        takes = self.prompts.is_on and self.prompts.takes(prompt)
        return self.prompts.step(prompt, most_tokens) if takes else stock_pass.step(self, prompt, most_tokens)

    def place(self, prompt: Prompt) -> None:
        """Give a complete prompt a row behind the active ones, and queue the sampling of its first token, unless the next step
        computes its last token (`Prompt.is_open`).

        Nothing waits for the device, and another prompt can be computed. Errors: RequestError if no row is free.
        """
        if prompt.logits is None and not prompt.is_open:
            raise RequestError("the prompt is not complete yet", field="prompt")
        if not self.free_rows:
            raise RequestError("every row of the batch is taken", field="rows", value=self.rows)
        while prompt.done_tokens < prompt.inputs.prompt_tokens and not prompt.is_open:
            self.prefill(prompt)  # another prompt took the place where its states were
        number = self._places_behind(1)[0]
        self._fill(number, prompt)
        prompt.release_cache()
        if self.prompts.is_on:
            self.prompts.release(prompt)
        self._is_placed(prompt, number)

    def place_together(self, prompts: Sequence[Prompt], most_tokens: int | None = None) -> tuple[list[Prompt], int]:
        """Compute several waiting prompts in one pass, the first among them, and give each a row behind the active ones.

        Returns these prompts and the number of computed tokens, padding included; an empty list and 0 if the first one is
        computed alone (`Prompt.step`).
        """
        together = self.prompts.packs.choose(prompts, most_tokens)
        if together is None:
            return [], 0
        self.pages.reserve(*(prompt.row for prompt in together.prompts))
        numbers = self._places_behind(len(together.prompts))
        for number in numbers:
            self.prompts.evict(number, None)
        with self.pages.unbound_on_error(numbers):
            all_logits = self.prompts.packs.run(together, numbers)
        for prompt, number, logits in zip(together.prompts, numbers, all_logits, strict=True):
            prompt.take_states(prompt.inputs.prompt_tokens, logits=logits, offset=0)
            self.cache.place(number, prompt.done_tokens)
            self._is_placed(prompt, number)
        return list(together.prompts), together.tokens

    def _places_behind(self, count: int) -> list[int]:
        """Return the numbers of this many free rows behind the active and the placed ones."""
        number = max([len(self.active), *(one.number + 1 for one in self.placed)])
        if number + count > self.rows:
            self._close_up()
            number = len(self.active) + len(self.placed)
        return list(range(number, number + count))

    def _is_placed(self, prompt: Prompt, number: int) -> None:
        prompt.row.place(number, prompt.done_tokens)
        self.placed.append(prompt.row)
        if prompt.is_open:
            return
        assert prompt.logits is not None
        if prompt.row.group:
            prompt.row.keep_logits(prompt.logits)
        prompt.draw(PendingToken.of(prompt.row, prompt.logits))

    def _close_up(self) -> None:
        """Move placed prompts down, in their order, to where rows have left."""
        for number, row in enumerate(self.placed, len(self.active)):
            if row.number != number:
                self.cache.move(row.number, number)
                row.move(number)

    def join(self, prompt: Prompt) -> SampledToken:
        """Make a complete prompt an active row and return its first token.

        Errors: RequestError if no row is free, or if an earlier placed prompt has not joined.
        """
        if prompt.is_open:
            raise RequestError("the next step computes its last token", field="prompt", value=prompt.row.number)
        if prompt.first is None:
            self.place(prompt)
        row, first, logits = prompt.row, prompt.first, prompt.logits
        assert first is not None and logits is not None
        self._activate(prompt)
        with self._leaving_on_error(row):
            if first.event is not None:
                first.event.synchronize()
            if first.why is not None:
                raise first.why
            token = SampledToken.of(row, logits, int(first.token), self._top[row])
            self._commit(token)
            if row.error:
                raise row.error
            self.prefixes.joined(prompt)
            self.tokens[row.number, 0].fill_(self._fed(token.token_id))  # an assignment would wait for the device
        prompt.release_logits()
        return token

    def enter(self, prompt: Prompt) -> None:
        """Make a placed prompt an active row whose last token the next step computes (`Prompt.is_open`). Nothing waits for
        the device. Errors: as `join`."""
        row = prompt.row
        if not prompt.is_open:
            raise RequestError("the prompt is not complete yet", field="prompt")
        self._activate(prompt)
        with self._leaving_on_error(row):
            self.prefixes.joined(prompt)
            self.tokens[row.number, 0].fill_(row.token_ids[-1])

    @contextmanager
    def _leaving_on_error(self, row: Row) -> Iterator[None]:
        """Let a row leave if the block fails: without a token it could not take part in a step."""
        try:
            yield
        except BaseException:
            row.forget_states()  # a failed prompt is not cached
            self.leave(row)
            raise

    def _activate(self, prompt: Prompt) -> None:
        row = prompt.row
        if not self.placed or self.placed[0] is not row:
            raise RequestError("prompts join in the order of their placement", field="prompt", value=row.number)
        if row.number != len(self.active):  # a row has left since
            self.cache.move(row.number, len(self.active))
            row.move(len(self.active))
        self.placed.pop(0)  # where the move failed it still leaves as a placed one, and its pages with it
        self.active.append(row)
        self._top[row] = prompt.top_logprobs

    def _fill(self, number: int, prompt: Prompt) -> None:
        if self.prompts.is_on:
            self.prompts.evict(number, prompt)
            if prompt.source is None and self.prompts.holds(prompt):
                self.cache.take(number, prompt.done_tokens, offset=prompt.offset)
                return
        self.pages.bind(prompt.row, number)
        if prompt.source is not None:
            self.cache.copy(prompt.source.number, number, prompt.row.prompt_tokens)
            return
        try:
            self.cache.fill(number, prompt.cache, prompt.done_tokens, offset=prompt.offset)
        except kv_cache.UnsupportedLayersError as exc:
            raise self._no_rows(exc) from exc

    def _no_rows(self, why: object) -> DeviceError:
        hint, device = "`trimtab run` and `model.answer` run requests one at a time", str(self.model.device)
        return DeviceError(f"this family cannot be batched: {why}", device=device, hint=hint)

    def step(self, behind: Callable[[], bool] | None = None) -> list[SampledToken]:
        """Return the next token of every unfinished row, in the order of the rows. A row without a token gets an `error`.

        behind: called after the step is queued and before anything waits for it. It may compute prompts and let them join, and
        returns whether it gave the device work. If it did not, or without it, the next step may be queued. Errors: RequestError
        if a layer cannot apply different adapters to different rows.
        """
        self._end_lost()
        going = [row for row in self.active if row.finish is None]
        if not going:
            return []
        self.prefixes.flush()
        numbers = {row: row.number for row in self.active}
        ahead, self._ahead = self._ahead, None
        has_moved, waits = False, False
        if ahead is not None and self._counts(ahead):
            logits, greedy, numbers = ahead.logits, ahead.greedy, ahead.numbers
            has_moved = self._told  # a row that left was filled by another
            waits = any(row not in numbers for row in self.active)  # who joined since has the next step
            going = [row for row in going if row in numbers]
        else:
            if ahead is not None:
                self.write_last_tokens()  # it had the next step's tokens, which were not sampled
                for row in self.active:  # states of finished rows have read one more
                    row.write(self.cache.has_recurrent and row in ahead.numbers)
            logits, greedy = self._forward()
        # From here on the step counts as done: if memory ran out before, it can be done again.
        self._advance(numbers)
        self._keep_first_logits(going, numbers, logits)
        wrote_tokens = self.steps.wrote_tokens and not waits
        queued, failed = self._queue_draws(going, numbers, logits, greedy, write=wrote_tokens and not has_moved)
        if has_moved and wrote_tokens:
            self._write_moved(queued, numbers)
        tokens, has_tuned = self._read_tokens(queued, going, numbers, look_ahead=not failed and not waits, behind=behind)
        sampled = []
        for row in going:
            try:
                if row in failed:
                    raise failed[row]
                sampled.append(SampledToken.of(row, logits[numbers[row]], tokens[numbers[row]], self._top[row]))
            except (KeyboardInterrupt, SystemExit):
                raise
            except BaseException as exc:  # a panic of llguidance, which masks tokens, is no Exception
                row.end("error", exc)
        for one in sampled:
            self._commit(one)
        for row in () if self._lost is None else self._lost[0]:  # nothing of them is kept or copied
            row.forget_states()
        has_tuned = has_tuned or any(self._fed(one.token_id) != tokens[numbers[one.row]] for one in sampled)
        if self._ahead is None and (has_tuned or not wrote_tokens):
            self.write_last_tokens()
        return sampled

    def _queue_draws(
        self, going: Sequence[Row], numbers: dict[Row, int], logits: Tensor, greedy: Tensor, *, write: bool
    ) -> tuple[Tensor, dict[Row, Exception]]:  # fmt: skip
        """Return the token of each row on the device, [count] int64 (-1: none), and why rows cannot be sampled. Nothing waits for
        them. write: sampled tokens replace the most likely ones that a captured step has written for the next step."""
        drawing = {numbers[row]: row for row in going if row.constraint is None and not row.sampler.is_greedy}
        if not drawing:
            return greedy, {}
        chosen = greedy.clone()
        draws = [Draw(row.sampler, row.token_ids, at) for at, row in drawing.items()]
        failed = {drawing[at]: why for at, why in queue_draws(draws, logits, chosen).items()}
        if write:
            self.tokens[: chosen.shape[0], 0].copy_(chosen.clamp_min(0))
        return chosen, failed

    def _write_moved(self, queued: Tensor, numbers: dict[Row, int]) -> None:
        """Write the tokens of a step whose rows have moved since to where the next one reads them. queued: by the numbers then."""
        order = torch.tensor([numbers[row] for row in self.active]).to(queued.device, non_blocking=True)
        self.tokens[: len(self.active), 0].copy_(queued.index_select(0, order).clamp_min(0))

    def _read_tokens(
        self, greedy: Tensor, going: Sequence[Row], numbers: dict[Row, int], *, look_ahead: bool,
        behind: Callable[[], bool] | None = None,
    ) -> tuple[list[int], bool]:  # fmt: skip
        """Return the tokens by the rows' numbers in the step, and whether the next step was queued or attempted during this only
        wait for the device. It overwrites the logits: only rows that no longer need them look ahead."""
        count = greedy.shape[0]
        self._read[:count].copy_(greedy, non_blocking=True)
        read = None
        if self._read.is_pinned():
            read = torch.cuda.current_stream(greedy.device).record_event()
        outputs = None
        is_busy = behind is not None and behind()
        may = self.steps.may_look_ahead() and not self.prefixes.awaits_tokens
        tries = look_ahead and not is_busy and may and self._will_go_on(going)
        if tries:
            # An error here occurs again when the step is requested, and is reported there.
            with suppress(Exception):
                self.prefixes.flush()
                outputs = self._run(self.state(ahead=True))
        if read is not None:
            read.synchronize()
        token_ids: list[int] = self._read[:count].tolist()
        if outputs is not None:
            new = {row: token_ids[numbers[row]] for row in going}
            self._ahead = QueuedStep.of(outputs, self.active, new, self.model.adapter_store.serial_of)
            self._told = False
        return token_ids, tries

    def _will_go_on(self, going: Sequence[Row]) -> bool:
        """Whether the next step's tokens are already where it reads them, and some row needs another token."""
        plain = all(row.constraint is None and self._top[row] is None for row in going)
        return plain and any(len(row.answer_ids) + 1 < row.request.answer_tokens for row in going)

    def _counts(self, queued: QueuedStep) -> bool:
        """Whether a queued step is that of its rows: it matches the requested one, or has advanced states of recurrent layers,
        which no other step may do again. An adapter that a row has got since holds from the next step on."""
        if self.cache.has_recurrent:
            return any(row in queued.numbers for row in self.active if row.finish is None)
        return queued.matches(self.active, self.model.adapter_store.serial_of) and not self.steps.has_placeholder(self.state())

    def state(self, *, ahead: bool = False) -> BatchState:
        """Return the state of the active rows for the next step. ahead: their last tokens are not in their lists yet."""
        rows = self.active
        return BatchState(
            tuple(row.adapter for row in rows), tuple(row.token_ids[-1] for row in rows),
            max(len(row.token_ids) for row in rows), ahead,
        )  # fmt: skip

    def logits(self) -> Tensor:
        """Return [rows, V] float32 of one decode step of all rows, their last tokens written into the cache. Errors: RequestError
        where a queued step has advanced the states of recurrent layers."""
        self._end_lost()
        if self._ahead is not None:
            if self.cache.has_recurrent and self._counts(self._ahead):
                raise RequestError("the next step of recurrent layers was queued by `step`", field="logits", value=len(self.active))
            self._ahead = None
            self.write_last_tokens()
        self.prefixes.flush()
        logits, _ = self._forward()
        self._advance(self.active)
        self._keep_first_logits(self.active, {row: row.number for row in self.active}, logits)
        self.write_last_tokens()  # a captured step has written the most likely ones
        return logits

    def _forward(self) -> tuple[Tensor, Tensor]:
        try:
            return self._run(self.state())
        except Exception:
            self._end_lost()
            raise

    def _run(self, state: BatchState) -> tuple[Tensor, Tensor]:
        try:
            return self.steps.run(state)
        except Exception as exc:
            if self.cache.has_recurrent:  # some layers have advanced their states, and which ones is unknown: no second try
                self._lost = list(self.active), exc
            raise

    def _end_lost(self) -> None:
        """End the rows whose states a failed step has advanced in part."""
        lost, self._lost = self._lost, None
        for row in () if lost is None else lost[0]:
            if row.finish is None and lost is not None:
                row.end("error", lost[1])

    def _advance(self, rows: Collection[Row]) -> None:
        """Count a step of these rows."""
        assert self.context_tokens is not None
        active = [row for row in self.active if row in rows]
        for row in active:
            row.write()
        # A row that has finished and not left yet keeps writing to its last place.
        positions = self.cache.positions[: len(self.active)]
        if len(active) == len(self.active):
            positions.add_(1).clamp_(max=self.context_tokens - 1)
        else:
            numbers = torch.tensor([row.number for row in active]).to(positions.device, non_blocking=True)
            positions[numbers] = (positions[numbers] + 1).clamp(max=self.context_tokens - 1)

    def _keep_first_logits(self, rows: Iterable[Row], numbers: dict[Row, int], logits: Tensor) -> None:
        """Give the prefix cache the logits of prompts whose last token was computed by a step."""
        for row in rows:
            if row.written == row.prompt_tokens:
                self.prefixes.first_logits(row, logits[numbers[row]])

    def _commit(self, sampled: SampledToken) -> None:
        row, token = sampled.row, sampled.token_id
        row.token_ids.append(token)
        if token in self.ends or token in row.request.stop_token_ids:
            row.end("stop")
        elif len(row.answer_ids) >= row.request.answer_tokens:
            row.end("length")
        elif token in self._lost_words:
            row.end("error", without_row(token, "the answer"))

    def write_last_tokens(self) -> None:
        """Write each row's last token to where the next step reads it."""
        self._told = True
        tokens = torch.tensor([[self._fed(row.token_ids[-1])] for row in self.active])
        self.tokens[: len(self.active)].copy_(tokens, non_blocking=True)

    def _fed(self, token: int) -> int:
        return 0 if token in self._lost_words else token  # of an answer that has ended with it

    def leave(self, row: Row) -> None:
        """Remove a request; the last row takes its place. Errors: RequestError if it is not in the batch."""
        if row in self.placed:
            self.placed.remove(row)
            self.pages.vacate(row)
            return
        if row not in self.active:
            raise RequestError("this request is not in the batch", field="row", value=row.number)
        self.prefixes.leaving(row, queued=self._ahead is not None and row in self._ahead.numbers)
        last = self.active.pop()
        del self._top[row]
        number = self.pages.vacate(row)
        if last is not row:
            self.cache.move(last.number, number)
            self.active[number] = last
            last.move(number)
            self.write_last_tokens()


def _kv_bytes(model: BatchModel, context_tokens: int, rows: int, held_rows: int) -> int:
    """Return the bytes of a batch's keys and values in one piece, each tensor rounded up as torch does."""
    layers, request = model.anatomy.kv_layers, model.plan.request
    pool = pool_tokens(request.kv_tokens, rows=rows, context_tokens=context_tokens)
    count = row_cache_bytes(layers, request.dtype, rows=held_rows, context_tokens=context_tokens, pool=pool, kv=request.kv)
    return count + 2 * len(layers) * ALLOCATION_BYTES
