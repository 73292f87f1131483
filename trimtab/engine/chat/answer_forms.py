"""How does a checkpoint's chat template write tool calls and reasoning?"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property, lru_cache

from jinja2 import TemplateError, meta
from jinja2.sandbox import ImmutableSandboxedEnvironment, SandboxedEnvironment

from trimtab.engine.templates.budget import metered
from trimtab.engine.templates.costs import MAX_TEMPLATE_CHARS, SpentError

GEMMA_QUOTE = '<|"|>'
PYTHON_TAG = "<|python_tag|>"
# Form -> the marks that open a call and close it (llama has nothing, mistral ends with its JSON).
CALL_MARKS: Mapping[str, tuple[str, str]] = {
    "gemma4": ("<|tool_call>", "<tool_call|>"), "hermes": ("<tool_call>", "</tool_call>"),
    "qwen-xml": ("<tool_call>", "</tool_call>"), "llama": (PYTHON_TAG, ""), "mistral": ("[TOOL_CALLS]", ""),
    "mistral-args": ("[TOOL_CALLS]", ""),
}  # fmt: skip
THOUGHT_MARKS = (("<|channel>", "<channel|>"), ("[THINK]", "[/THINK]"), ("<think>", "</think>"))
# Other marks inside a call that are no text.
_INSIDE = {"gemma4": (GEMMA_QUOTE,), "mistral-args": ("[ARGS]", "[CALL_ID]")}
# In the order of the search: a mark, and one that the template must also have.
_SIGNS = (
    ("<|tool_call>", "", "gemma4"), ("[TOOL_CALLS]", "[ARGS]", "mistral-args"), ("[TOOL_CALLS]", "", "mistral"),
    ("<tool_call>", "<function=", "qwen-xml"), ("<tool_call>", "", "hermes"), (PYTHON_TAG, "", "llama"), ("ipython", "", "llama"),
)  # fmt: skip


@dataclass(frozen=True)
class AnswerForm:
    """calls: one of CALL_MARKS, None if calls have no form that is known. thoughts: the marks that open and close one, None
    without. reads: the names that the template reads, such as "tools" and "enable_thinking".

        gemma4        <|tool_call>call:NAME{key:<|"|>text<|"|>,n:5}<tool_call|>      <|channel>thought\\n...<channel|>
        hermes        <tool_call>{"name": "NAME", "arguments": {...}}</tool_call>     <think>...</think>
        qwen-xml      <tool_call><function=NAME><parameter=KEY>text</parameter></function></tool_call>
        llama         {"name": "NAME", "parameters": {...}}, after <|python_tag|> or without it
        mistral       [TOOL_CALLS][{"name": "NAME", "arguments": {...}}, ...]
        mistral-args  [TOOL_CALLS]NAME[ARGS]{...}                                     [THINK]...[/THINK]
    """

    calls: str | None = None
    thoughts: tuple[str, str] | None = None
    reads: frozenset[str] = frozenset()

    @cached_property
    def thought_marks(self) -> tuple[str, ...]:
        """The marks that divide an answer without calls and are none of its text."""
        return tuple(filter(None, self.thoughts or ()))

    @cached_property
    def marks(self) -> tuple[str, ...]:
        """The same of an answer that may have calls."""
        own = () if self.calls is None else (*CALL_MARKS[self.calls], *_INSIDE.get(self.calls, ()))
        return (*self.thought_marks, *filter(None, own))


@lru_cache(maxsize=64)
def form_of(template: str) -> AnswerForm:
    """Return the form of answers that a chat template implies. Sources: the chat templates of google/gemma-4-E4B-it, Qwen/Qwen3-8B,
    Qwen/Qwen3-Coder-30B-A3B-Instruct, meta-llama/Llama-3.1-8B-Instruct, mistralai/Mistral-7B-Instruct-v0.3 and
    Mistral-Small-3.2."""
    if len(template) > MAX_TEMPLATE_CHARS:  # an error where it is rendered
        return AnswerForm()
    reads = _names_read(template)
    calls = None
    if "tools" in reads:
        calls = next((form for mark, beside, form in _SIGNS if mark in template and beside in template), None)
    return AnswerForm(calls, next((marks for marks in THOUGHT_MARKS if marks[1] in template), None), reads)


def _names_read(template: str) -> frozenset[str]:
    # transformers' own tag, which marks the model's part of a conversation.
    plain = re.sub(r"\{%-?\s*(end)?generation\s*-?%\}", "", template)
    try:
        return frozenset(meta.find_undeclared_variables(_environment().parse(plain)))
    except (TemplateError, SpentError, RecursionError, ValueError):  # not jinja2's: only its names are known
        return frozenset(re.findall(r"[A-Za-z_]\w*", template))


@lru_cache(maxsize=1)
def _environment() -> SandboxedEnvironment:
    return metered(ImmutableSandboxedEnvironment(extensions=["jinja2.ext.loopcontrols"]))
