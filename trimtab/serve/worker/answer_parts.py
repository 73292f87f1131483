"""An answer's text becomes the parts of a chat response: content, reasoning and calls, in the checkpoint's form.

Features that a checkpoint lacks are refused here with "not supported: NAME".
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from trimtab.engine.batch.request import Constraint
from trimtab.engine.chat import prompt as chat
from trimtab.engine.chat.answer_forms import AnswerForm
from trimtab.engine.chat.answer_reader import AnswerReader
from trimtab.engine.kv.sequence import Inputs
from trimtab.errors import RequestError
from trimtab.serve.contract.job import Event, Job, Token
from trimtab.serve.grammar.constraint import AfterThought, Grammar

# How many tokens at the end of a prompt are searched for the start of reasoning.
END_TOKENS = 12
NO_EFFORT = ("none", "minimal")


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
        self._is_in_thought = False
        # Tokens of undecided text.
        self._held: tuple[Token, ...] = ()
        if is_chat(job):
            self._form = chat.answer_form(processor, with_tools=bool(job.tools))
            self.shown = self._form.marks(with_calls=bool(job.tools))
        if self.shown or job.tools:
            is_new = not job.continue_final_message  # the end of a continued prompt is always text
            self._is_in_thought = is_new and self._opens_thought(inputs.token_ids[-END_TOKENS:])
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
        if not self._is_in_thought:
            return constraint
        assert self._form.thoughts is not None
        return AfterThought(constraint, self._tokenizer(self._form.thoughts[1], add_special_tokens=False)["input_ids"])

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
