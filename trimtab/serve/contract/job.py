"""A job: a client's request inside the server, and the events that it receives. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from trimtab.request import GenerateRequest

# What OpenAI says for a token of no probability; JSON has no infinity.
LOWEST_LOGPROB = -9999.0

# The events that are part of an answer: a job that had one is not given to another worker.
SPOKEN = ("text", "reasoning", "call")
# The events after which no other comes.
ENDS = ("done", "error", "dropped")


@dataclass(frozen=True)
class Job:
    """One question to one adapter. Everything in it is plain data: it travels between processes.

    id: unique while the server runs. prompt: chat messages whose media parts hold bytes ({"type": "image", "data": b"..."}),
    a text (completed as it is) or token ids. adapter: None is the base. deadline_s: seconds from arrival until the answer
    has to be complete, None: no limit. top_logprobs: None for no logprobs, else how many of the most likely tokens to tell.
    fills_context: the answer may take what the prompt leaves of the context, if that is less than request.max_new_tokens.
    client: whose cached prefixes it may use, and is cached for; jobs of one client share them. sender: with whose other jobs it
    shares a turn in the queue, and where media are decoded and schemas compiled.
    schema: a JSON schema that the answer has to satisfy ({} is any JSON object); None: free text. tools: what the model may call,
    in OpenAI's form. must_call: None if it need not, "" for any of them, or the name of one. holds_calls: the arguments of calls
    that it makes of its own are held to their schemas. several_calls: whether more than one may follow. template_kwargs: what the
    chat template is told. kind: "answer", or what else is made of the prompt: "tokens",
    "text" (of token ids) or "embedding". adds_special: whether a text gets the tokens that its tokenizer adds. pooling:
    of an embedding, "last" or "mean". prompt_logprobs: as top_logprobs, of the prompt's own tokens; they come with the end.
    group: of jobs with the same prompt and adapter, such as the choices of one request: the prompt goes through once.
    continue_final_message: the answer continues the text of the last message, an assistant's.
    """

    id: str
    prompt: Any
    request: GenerateRequest
    adapter: str | None = None
    system: str | None = None
    deadline_s: float | None = None
    top_logprobs: int | None = None
    fills_context: bool = False
    client: str = ""
    sender: str = ""
    schema: Mapping[str, Any] | None = None
    tools: Sequence[Mapping[str, Any]] = ()
    must_call: str | None = None
    holds_calls: bool = False
    several_calls: bool = True
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    kind: str = "answer"
    adds_special: bool = True
    pooling: str = "last"
    prompt_logprobs: int | None = None
    group: str = ""
    continue_final_message: bool = False

    @property
    def continues(self) -> bool:
        """Whether the answer continues a text that the client has."""
        return self.continue_final_message or isinstance(self.prompt, dict)


@dataclass(frozen=True)
class Token:
    """One token as clients that asked for logprobs see it: its text, bytes, and the most likely tokens in its place."""

    token_id: int
    text: str
    logprob: float
    top: tuple[tuple[int, str, float], ...] = ()


@dataclass(frozen=True)
class Event:
    """What a job is told. kind:

    "started"  its prompt begins to go through the model (queued_s, prompt_tokens)
    "text"     a piece of the answer in whole characters, possibly empty (text, tokens)
    "reasoning"  the same of a thought before the answer (text)
    "call"     a piece of a call of a tool (call: index, arguments; with the first piece of each: id, name)
    "scores"   log-probabilities of a piece of its prompt (data: values of a JSON list; result: start, the first token)
    "done"     the answer is complete (finish, usage; of other kinds of jobs: result)
    "error"    it ends here (error: class, message and fields as `TrimtabError.to_dict` writes them; usage: what was computed)
    "dropped"  its client had left (usage: what was computed)
    """

    job_id: str
    kind: str
    text: str = ""
    tokens: tuple[Token, ...] = ()
    finish: str | None = None
    usage: Mapping[str, Any] = field(default_factory=dict)
    error: Mapping[str, Any] | None = None
    call: Mapping[str, Any] | None = None
    result: Mapping[str, Any] | None = None
    data: bytes = b""


def finite_logprob(logprob: float) -> float:
    """Return a log-probability as JSON can hold it."""
    return max(logprob, LOWEST_LOGPROB)
