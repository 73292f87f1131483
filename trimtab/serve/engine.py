"""How jobs become rows of a batch, and tokens become the text that clients are told.

The engine's side of `scheduler.Engine`, on a loaded model. Adapters beyond what the plan has room for wait in host
memory and take the place of the one that was used longest ago, never of one that a row is using or that is kept.
"""

from __future__ import annotations

import time
import traceback
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from trimtab.checkpoint.names import near_names
from trimtab.errors import DeviceError, DoesNotFitError, RequestError, TrimtabError
from trimtab.runtime.batch import Batch, Constraint, Drawn, Prompt, Row
from trimtab.runtime.generate import Detokenizer
from trimtab.runtime.model import HeldAdapter, LoadedModel
from trimtab.serve.constraint import Grammar
from trimtab.serve.job import Event, Job, Token
from trimtab.serve.scheduler import MistakeError


@dataclass(eq=False)
class Answer:
    """One job on its way: first a prompt, then a row; `pending` is what was decided and not told yet."""

    job: Job
    prompt: Prompt | None
    row: Row
    detokenizer: Detokenizer | None
    began: float
    first_token: float | None = None
    is_over: bool = False
    pending: list[Event] = field(default_factory=list)


class AdapterShelf:
    """Every adapter that may be asked for: all in host memory, some of them on the model.

    kept: names that are never taken off. resident_limit: how many may be on the model at once (None: what the plan has
    room for).
    """

    def __init__(self, model: LoadedModel, *, kept: Iterable[str] = (), resident_limit: int | None = None) -> None:
        self.model, self.kept, self._limit = model, set(kept), resident_limit
        self._held: dict[str, HeldAdapter] = {}
        # The one used longest ago comes first.
        self._resident: OrderedDict[str, None] = OrderedDict((name, None) for name in model.adapters)
        for name in model.adapters:
            self._held[name] = model.read_adapter(model.plan.request.adapters[name])
        self.swaps = 0
        self.swap_s: list[float] = []

    @property
    def names(self) -> tuple[str, ...]:
        """Every known adapter, sorted."""
        return tuple(sorted(self._held))

    @property
    def resident(self) -> tuple[str, ...]:
        """Those on the model, the one used longest ago first."""
        return tuple(self._resident)

    def check(self, name: str | None) -> None:
        """Raise RequestError for an adapter that is not known."""
        if name is not None and name not in self._held:
            known = list(self._held)
            raise RequestError(
                "no adapter of this name is loaded", field="model", value=name, allowed=near_names(name, known) or known
            )

    def add(self, name: str, path: str | Path) -> None:
        """Read an adapter into host memory. Errors: AdapterError, CheckpointError; RequestError for a name in use."""
        if name in self._held:
            raise RequestError("an adapter of this name is loaded", field="lora_name", value=name)
        held = self.model.read_adapter(path)
        room = self.model.free_adapter_bytes() + sum(self._held[other].device_bytes for other in self._resident)
        if held.device_bytes > room:
            raise DoesNotFitError(
                "it is larger than all the room that the plan has for adapters", block=f"adapter {name}",
                device=str(self.model.device), needed_bytes=held.device_bytes, budget_bytes=room,
            )  # fmt: skip
        self._held[name] = held

    def remove(self, name: str, in_use: Iterable[str | None]) -> None:
        """Forget an adapter. Errors: RequestError if it is not known or a request needs it."""
        self.check(name)
        if name in set(in_use):
            raise RequestError("requests are being answered with this adapter", field="lora_name", value=name)
        if name in self._resident:
            self.model.unload_adapter(name)
            del self._resident[name]
        del self._held[name]
        self.kept.discard(name)

    def has_room_for(self, name: str | None, in_use: Iterable[str | None]) -> bool:
        """Whether an adapter is on the model or could be put there without taking off one in use."""
        if name is None or name in self._resident:
            return True
        used = set(in_use) | self.kept
        movable = [other for other in self._resident if other not in used]
        room = self.model.free_adapter_bytes() + sum(self._held[other].device_bytes for other in movable)
        is_place = self._limit is None or len(self._resident) - len(movable) < self._limit
        return is_place and self._held[name].device_bytes <= room

    def bring(self, name: str | None, in_use: Iterable[str | None]) -> None:
        """Put an adapter on the model, taking off what was used longest ago. Errors: DoesNotFitError."""
        if name is None:
            return
        if name not in self._resident:
            start = time.perf_counter()
            self._make_room(name, set(in_use) | self.kept)
            self.model.load_adapter(name, self._held[name])
            self._resident[name] = None
            self.swaps += 1
            self.swap_s = [*self.swap_s[-999:], time.perf_counter() - start]
        self._resident.move_to_end(name)

    def _make_room(self, name: str, used: set[str | None]) -> None:
        for other in [other for other in self._resident if other not in used]:
            is_place = self._limit is None or len(self._resident) < self._limit
            if is_place and self._held[name].device_bytes <= self.model.free_adapter_bytes():
                return
            self.model.unload_adapter(other)
            del self._resident[other]


class LoadedEngine:
    """The scheduler's engine on a loaded model. rows: requests decoded together. prompt_limit: the most tokens of a prompt
    (None: what the context holds)."""

    def __init__(
        self, model: LoadedModel, *, rows: int, kept: Iterable[str] = (), resident_limit: int | None = None,
        prompt_limit: int | None = None,
    ) -> None:  # fmt: skip
        self.model, self.rows, self.prompt_limit = model, rows, prompt_limit
        self.batch = Batch(model, rows)
        self.shelf = AdapterShelf(model, kept=kept, resident_limit=resident_limit)
        self._by_row: dict[Row, Answer] = {}
        self._prefilling: Answer | None = None
        self._grammar: Grammar | None = None

    # What the scheduler calls -----------------------------------------------------------------------------------------

    def begin(self, job: Job) -> Answer:
        """Check a job, prepare its inputs and return its answer. Errors: RequestError and what `prepare` raises."""
        self.shelf.check(job.adapter)
        inputs = self._inputs(job)
        if self.prompt_limit is not None and inputs.prompt_tokens > self.prompt_limit:
            raise RequestError(
                f"the prompt has {inputs.prompt_tokens} tokens, this server takes {self.prompt_limit}", field="prompt"
            )
        if job.fills_context:
            left = self.model.context_tokens - inputs.prompt_tokens
            request = replace(job.request, max_new_tokens=max(1, min(job.request.max_new_tokens, left)))
            job = replace(job, request=request)
        constraint = self._constraint(job)
        prompt = self.batch.begin(inputs, job.request, top_logprobs=job.top_logprobs, constraint=constraint)
        prompt.row.adapter = job.adapter  # it may be in host memory until its turn comes
        detokenizer = Detokenizer(self._tokenizer, job.request.stop)
        return Answer(job, prompt, prompt.row, detokenizer, time.monotonic())

    @property
    def _tokenizer(self) -> Any:
        processor = self.model.processor
        return getattr(processor, "tokenizer", processor)

    def _inputs(self, job: Job) -> Any:
        prompt = job.prompt
        if isinstance(prompt, dict):  # a text to go on with, no chat
            tokenizer = self._tokenizer
            text = prompt["text"]
            adds_special = not (tokenizer.bos_token and text.startswith(tokenizer.bos_token))
            prompt = tokenizer(text, add_special_tokens=adds_special)["input_ids"]
            if not prompt:
                raise RequestError("is empty", field="prompt")
        return self.model.prepare(prompt, system=job.system)

    def _constraint(self, job: Job) -> Constraint | None:
        if job.schema is None:
            return None
        if self._grammar is None:
            self._grammar = Grammar(self._tokenizer, sorted(self.batch.ends))
        return self._grammar.constraint(job.schema)

    def is_ready(self, adapter: str | None) -> bool:
        return self.shelf.has_room_for(adapter, self._in_use())

    def _in_use(self) -> list[str | None]:
        used = [row.adapter for row in self.batch.active]
        return used if self._prefilling is None else [*used, self._prefilling.job.adapter]

    def prefill(self, answer: Answer) -> bool:
        """Put the next piece of the prompt through the model.

        Errors: DeviceError if memory runs out; MistakeError for anything else that left the device well: one strange prompt
        does not end everybody's answers.
        """
        assert answer.prompt is not None
        self._prefilling = answer
        try:
            self.shelf.bring(answer.job.adapter, self._in_use())
            with self.model._out_of_memory_named("reading a prompt"):
                if not answer.prompt.step():
                    return False
                drawn = self.batch.join(answer.prompt)
        except TrimtabError:
            raise
        except Exception as exc:
            self._check_device()
            traceback.print_exc()  # to the log of the worker, never to a client
            raise MistakeError from exc
        self._prefilling, answer.prompt = None, None
        self._by_row[answer.row] = answer
        answer.first_token = time.monotonic()
        self._take(answer, drawn)
        return True

    def _check_device(self) -> None:
        """Raise what a GPU says to everything after an error that it does not get over."""
        torch.zeros(1, device=self.model.device).item()

    def step(self) -> None:
        with self.model._out_of_memory_named("answering"):
            found = self.batch.step()
        for drawn in found:
            self._take(self._by_row[drawn.row], drawn)

    def news(self, answer: Answer) -> Sequence[Event]:
        found, answer.pending = answer.pending, []
        return found

    def drop(self, answer: Answer) -> None:
        if self._prefilling is answer:
            self._prefilling = None
        answer.prompt = None
        if answer.row in self._by_row:
            del self._by_row[answer.row]
            self.batch.leave(answer.row)

    # Tokens to text ---------------------------------------------------------------------------------------------------

    def _take(self, answer: Answer, drawn: Drawn) -> None:
        if answer.is_over:
            return
        assert answer.detokenizer is not None
        row, job = answer.row, answer.job
        is_end = drawn.token_id in self.batch.ends
        text = "" if is_end else answer.detokenizer.push(drawn.token_id)
        tokens = () if drawn.logprob is None or is_end else (self._token(drawn),)
        finish = "stop" if answer.detokenizer.stopped else row.finish
        if finish is not None:
            text += answer.detokenizer.finish()
            if answer.detokenizer.stopped:
                finish = "stop"
        if text or tokens:
            answer.pending.append(Event(job.id, "text", text=text, tokens=tokens))
        if finish is not None:
            answer.is_over = True
            answer.pending.append(Event(job.id, "done", finish=finish, usage=self._usage(answer)))

    def _token(self, drawn: Drawn) -> Token:
        assert drawn.logprob is not None
        decode = self._tokenizer.decode
        top = tuple((token, str(decode([token])), logprob) for token, logprob in drawn.top)
        return Token(drawn.token_id, str(decode([drawn.token_id])), drawn.logprob, top)

    def _usage(self, answer: Answer) -> dict[str, Any]:
        now = time.monotonic()
        assert answer.first_token is not None
        return {
            "prompt_tokens": answer.row.prompt_tokens, "completion_tokens": len(answer.row.answer_ids),
            "ttft_s": answer.first_token - answer.began, "decode_s": now - answer.first_token,
        }  # fmt: skip


def out_of_memory(error: DeviceError) -> bool:
    """Whether the device only ran out of memory: the engine can go on with less."""
    return "out of memory" in str(error)
