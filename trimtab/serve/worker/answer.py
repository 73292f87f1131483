"""What is a running answer of the engine: its prompt, its row, its tokens as the parts of a response, its errors?"""

from __future__ import annotations

import time
from collections.abc import Container, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any

import torch

from trimtab.engine.batch.generate import AnswerText, TokenTexts
from trimtab.engine.batch.request import Constraint, Prompt, Row, SampledToken
from trimtab.engine.calls.embedding import Embedding, PromptScores
from trimtab.engine.chat import prompt as chat
from trimtab.engine.chat.answer_forms import AnswerForm
from trimtab.engine.chat.answer_reader import AnswerReader
from trimtab.engine.kv.sequence import Inputs
from trimtab.engine.memory.out_of_memory import is_host_memory, is_out_of_memory
from trimtab.engine.model import LoadedModel
from trimtab.errors import DeviceError, RequestError, TrimtabError
from trimtab.serve.api.client_errors import for_client
from trimtab.serve.contract.job import Event, Job, Token, token_text
from trimtab.serve.contract.log import write_traceback
from trimtab.serve.grammar.constraint import AfterThought, Grammar, MayThink
from trimtab.serve.scheduling.scheduler import MistakeError

LESS_HINT = "Send a smaller request, or try again later"
# How many tokens at the end of a prompt are searched for the start of reasoning.
END_TOKENS = 12
NO_EFFORT = ("none", "minimal")


@dataclass(eq=False)
class Answer:
    """One running job: first a prompt, then a row. pending: unsent events. is_begun: its adapter is on the model, under
    the key in `row`."""

    job: Job
    prompt: Prompt | None
    row: Row
    text: AnswerText | None
    began: float
    first_token: float | None = None
    is_over: bool = False
    is_begun: bool = False
    pending: list[Event] = field(default_factory=list)
    reading: Reading | None = None
    embedding: Embedding | None = None
    scores: PromptScores | None = None
    scored_twice: int = 0  # tokens of a prompt that is computed again after its log-probabilities

    @property
    def is_open(self) -> bool:
        """Whether its complete prompt gets its row without a wait, because the next step samples its first token."""
        return self.prompt is not None and self.prompt.is_open

    @property
    def needs_towers(self) -> bool:
        """Whether the next piece of its prompt is a pass of the towers."""
        return self.prompt is not None and self.prompt.needs_towers

    @property
    def work(self) -> Embedding | PromptScores | None:
        """The embedding, or the log-probabilities of its prompt, that its next piece computes without a row."""
        return self.embedding or (None if self.prompt is not None and self.prompt.returns_states else self.scores)

    @property
    def needs_no_row(self) -> bool:
        return self.work is not None

    @property
    def is_in_row(self) -> bool:
        """Whether the states of its prompt are in the row of prompts."""
        return self.prompt is not None and self.prompt.batch.prompts.holds(self.prompt)

    @property
    def is_for_row(self) -> bool:
        """Whether it is an embedding that has the row of prompts, or is the next to have it."""
        return self.embedding is not None and self.embedding.prompt is not None

    def next_tokens(self, most_tokens: int) -> int:
        """Return the most tokens of its next piece."""
        work = self.work
        if work is not None:
            return min(most_tokens, work.prompt_tokens - work.done_tokens)
        if self.prompt is None:
            return most_tokens
        return min(most_tokens, self.prompt.inputs.prompt_tokens - self.prompt.done_tokens)

    @property
    def is_complete(self) -> bool:
        """Whether its prompt is completely computed."""
        return self.prompt is not None and self.prompt.done_tokens >= self.prompt.inputs.prompt_tokens

    # Only these write its state: it gets its adapter, its pieces and its prompt end, tokens are taken, and its events are sent.

    def begin(self, adapter: str | None) -> None:
        """Use the adapter of this key, which is on the model now."""
        self.row.use_adapter(adapter)
        self.is_begun = True
        for one in (self.embedding, self.scores):
            if one is not None:
                one.adapter = adapter

    def end_embedding(self, event: Event) -> None:
        """End with an embedding."""
        self.embedding = None
        self.end(event)

    def end_scores(self, *, is_again: bool) -> None:
        """Let its prompt follow the log-probabilities. is_again: whether it is computed from its first token on."""
        assert self.scores is not None and self.prompt is not None
        scores, self.scores = self.scores, None
        if is_again:
            self.scored_twice = scores.done_tokens
        elif not self.prompt.returns_states:
            scores.hand_over(self.prompt)

    def spent(self) -> dict[str, int]:
        """Return the tokens that were computed for this; a prompt copied from another choice has none."""
        row, work = self.row, self.work
        done = row.prompt_tokens if work is None else work.done_tokens
        if work is None and self.prompt is not None and not self.is_complete:
            done = self.prompt.done_tokens
        return {"prompt_tokens": done + self.scored_twice - row.shared_tokens, "completion_tokens": len(row.answer_ids)}

    def kept_tokens(self) -> int:
        """Return the tokens whose keys and values it has in host memory, apart from those of rows."""
        return 0 if self.prompt is None or self.prompt.cache is None else self.prompt.done_tokens

    def release(self) -> None:
        """Free the keys and values that its prompt received; the prompt is computed again."""
        assert self.prompt is not None
        if self.prompt.cache is not None:
            self.scored_twice = self.prompt.done_tokens
            self.prompt.restart()

    def end_prompt(self) -> None:
        """Forget the prompt: its row has the states, or they are not needed."""
        self.prompt = self.embedding = None

    def end(self, event: Event) -> None:
        """End with this event."""
        self.is_over = True
        self.pending.append(event)

    def news(self) -> list[Event]:
        """Return the events since the last call."""
        events, self.pending = self.pending, []
        return events

    def take(self, sampled: SampledToken, model: LoadedModel, ends: Container[int], texts: TokenTexts) -> None:
        """Turn a sampled token into events. ends: the ids of which no log-probability is reported."""
        self.first_token = self.first_token or time.monotonic()
        if self.is_over:
            return
        assert self.text is not None and self.reading is not None
        tokens = () if sampled.logprob is None or sampled.token_id in ends else (_token(sampled, texts, self.text),)
        text = self.text.take(sampled.token_id)
        finish = "stop" if self.text.stop_text is not None else self.row.finish
        if finish is not None:
            text += self.text.end()
            if self.text.stop_text is not None:
                finish = "stop"
        is_cut = finish == "length" or self.text.stop_text is not None
        self.pending += self.reading.events(text, tokens, is_last=finish is not None, is_cut=is_cut)
        if finish == "stop" and self.reading.has_called:
            finish = "tool_calls"
        if finish is not None:
            self.end(Event(self.job.id, "done", finish=finish, usage=self._usage(model)))

    def _usage(self, model: LoadedModel) -> dict[str, Any]:
        now, row = time.monotonic(), self.row
        assert self.first_token is not None
        return {
            "prompt_tokens": row.prompt_tokens, "completion_tokens": len(row.answer_ids),
            "cached_tokens": row.cached_tokens, "shared_tokens": row.shared_tokens,
            **({"scored_tokens": self.scored_twice} if self.scored_twice else {}),
            "stop_text": None if self.text is None else self.text.stop_text,
            "ttft_s": self.first_token - self.began, "decode_s": now - self.first_token,
            "output_head": model.plan.execution.head, "kv": model.plan.request.kv,
        }  # fmt: skip


def _token(sampled: SampledToken, texts: TokenTexts, before: AnswerText) -> Token:
    assert sampled.logprob is not None
    top = tuple((token, token_text(texts.bytes_of(token)), logprob) for token, logprob in sampled.top)
    data = texts.bytes_of(sampled.token_id)
    return Token(sampled.token_id, token_text(data), sampled.logprob, top, before.place_of(data))


# Text to parts ------------------------------------------------------------------------------------------------------


def is_chat(job: Job) -> bool:
    """Whether a job's prompt is messages: only their answers have reasoning and calls."""
    return isinstance(job.prompt, list) and not chat.is_token_ids(job.prompt)


def template_kwargs(job: Job, processor: Any) -> dict[str, Any]:
    """Return the variables of the chat template. A reasoning effort that the template does not read switches its thinking on or
    off.

    Errors: RequestError for tools and arguments that the template does not support.
    """
    kwargs = dict(job.template_kwargs)
    if not is_chat(job):
        return kwargs
    form = chat.answer_form(processor, with_tools=bool(job.tools))
    if job.tools and "tools" not in form.reads:
        raise RequestError("not supported: tools (the checkpoint's chat template has no tools)", field="tools")
    if job.tools and form.calls is None:
        raise RequestError("not supported: tools (the checkpoint writes calls in a form that is not known)", field="tools")
    if "reasoning_effort" in kwargs and not {"reasoning_effort", *kwargs} & {*form.reads} and "enable_thinking" in form.reads:
        kwargs["enable_thinking"] = kwargs.pop("reasoning_effort") not in NO_EFFORT
    for name in kwargs:
        if name not in form.reads:
            raise RequestError(
                f"not supported: {name} (the checkpoint's chat template does not read it)", field=f"chat_template_kwargs.{name}"
            )
    return kwargs


class Reading:
    """The reader of one answer. reader: None if all of it is text. shown: control tokens that the reader needs."""

    def __init__(self, job: Job, inputs: Inputs, processor: Any) -> None:
        self._job, self._form = job, AnswerForm()
        self._tokenizer = getattr(processor, "tokenizer", processor)
        self.reader: AnswerReader | None = None
        self.shown: tuple[str, ...] = ()
        self._is_in_thought = self._may_think = False
        # Tokens of undecided text.
        self._held: tuple[Token, ...] = ()
        if is_chat(job):
            self._form = chat.answer_form(processor, with_tools=bool(job.tools))
            self.shown = self._form.marks if job.tools else self._form.thought_marks
        if self.shown or job.tools:
            is_new = not job.continue_final_message  # the end of a continued prompt is always text
            self._is_in_thought = is_new and self._opens_thought(inputs.token_ids[-END_TOKENS:])
            kwargs = template_kwargs(job, processor)
            self._may_think = is_new and bool(kwargs.get("enable_thinking") or kwargs.get("thinking"))
            functions = {tool["function"]["name"]: tool["function"].get("parameters") for tool in job.tools}
            allowed = list(functions) if job.must_call == "" else [job.must_call]
            self.reader = AnswerReader(
                self._form, functions=functions, in_thought=self._is_in_thought, must_call=job.must_call is not None,
                only_name=allowed[0] if len(allowed) == 1 else None,
            )  # fmt: skip

    def _opens_thought(self, ids: Sequence[int]) -> bool:
        if self._form.thoughts is None:
            return False
        text = str(self._tokenizer.decode(list(ids), skip_special_tokens=False)).rstrip()
        opened, closed = (text.rfind(mark) for mark in self._form.thoughts)
        return opened > closed and text.endswith((self._form.thoughts[0], f"{self._form.thoughts[0]}thought"))

    def constraint(self, grammar: Grammar) -> Constraint:
        """Return the constraint of the answer's schema or calls. Errors: RequestError."""
        job = self._job
        if job.holds_calls and job.schema is None:
            functions = [tool["function"] for tool in job.tools]
            return grammar.calls_once_opened(
                self._form, functions, several=job.several_calls, in_thought=self._is_in_thought, client=job.sender
            )
        if job.must_call is None:
            constraint = grammar.constraint(job.schema or {}, client=job.sender)
        else:
            functions = [tool["function"] for tool in job.tools if job.must_call in ("", tool["function"]["name"])]
            constraint = grammar.calls(
                self._form.calls or "", functions, several=job.several_calls and not job.must_call, client=job.sender
            )
        if self._form.thoughts is None or not (self._is_in_thought or self._may_think):
            return constraint
        opened, closed = (self._tokenizer(mark, add_special_tokens=False)["input_ids"] for mark in self._form.thoughts)
        if self._is_in_thought:
            return AfterThought(constraint, closed)
        return MayThink(constraint, opened[0], closed) if len(opened) == 1 else constraint

    def events(
        self, text: str, tokens: tuple[Token, ...], *, is_last: bool, is_cut: bool = False
    ) -> list[Event]:  # fmt: skip
        """Return the events of one chunk of the answer. tokens: the tokens of that chunk with their logprobs; reasoning and
        calls have none. is_cut: the last chunk, and the model has not ended the answer."""
        job_id = self._job.id
        if self.reader is None:
            return [Event(job_id, "text", text=text, tokens=tokens)] if text or tokens else []
        was_aside = self.reader.is_aside
        parts = self.reader.push(text)
        self._held = () if was_aside or self.reader.is_aside else self._held + tokens
        if is_last:
            parts += self.reader.finish(is_cut=is_cut)
        events = []
        for kind, value in parts:
            if kind == "call":
                call = {name: item for name, item in asdict(value).items() if item is not None}
                events.append(Event(job_id, "call", call=call))
            elif kind == "text":
                events.append(Event(job_id, kind, text=value, tokens=self._held))
                self._held = ()
            else:
                events.append(Event(job_id, kind, text=value))
        if any(event.kind != "text" for event in events):
            self._held = ()
        if is_last and self._held:
            events.append(Event(job_id, "text", tokens=self._held))
        return events

    @property
    def has_called(self) -> bool:
        """Whether the answer has calls, all of them complete."""
        return self.reader is not None and self.reader.calls > 0 and not self.reader.is_call_cut


# Errors -------------------------------------------------------------------------------------------------------------


@contextmanager
def named(what: str, device: torch.device, job: Job | None = None) -> Iterator[None]:
    """Convert an exception into its error: DeviceError for memory of the device or host, MistakeError for an unexpected
    failure.

    A failure after which the device is unusable is raised unchanged, and ends the worker. job: the fields that a
    RequestError names.
    """
    try:
        yield
    except RequestError as exc:
        if job is None:
            raise
        raise for_client(exc, job) from exc
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as exc:  # a panic of llguidance is no Exception
        error = error_of(exc, what, device)
        try:
            if error is exc:
                raise
            raise error from exc
        finally:
            del error  # it refers to this frame, and through its cause to frames with the inputs


def error_of(exc: BaseException, what: str, device: torch.device) -> TrimtabError:
    """Return the error of an exception. Raises the device's error if the device is unusable."""
    if isinstance(exc, DeviceError) and exc.planned_bytes is not None:
        # The planned bytes are only for the log.
        write_traceback(exc, "the device has less memory than planned")
        short = str(exc).removeprefix(f"{exc.device}: ").split(":")[0]
        return DeviceError(short, device=exc.device, hint=LESS_HINT)
    if isinstance(exc, TrimtabError):
        return exc
    if not is_out_of_memory(exc) and not is_host_memory(exc):
        # After some errors a GPU is unusable: then this raises its error.
        torch.zeros(1, device=device).item()
    return error_on_host(exc, what, device)


def error_on_host(exc: BaseException, what: str, device: torch.device) -> TrimtabError:
    """Return the error of an exception without using the device. Clients do not receive the text in the log."""
    error_id = write_traceback(exc, f"internal error while {what}")
    if is_host_memory(exc):
        return DeviceError(f"out of host memory while {what}", device="cpu", hint=LESS_HINT)
    if is_out_of_memory(exc):
        return DeviceError(f"out of memory while {what}", device=str(device), hint=LESS_HINT)
    return MistakeError(error_id)
