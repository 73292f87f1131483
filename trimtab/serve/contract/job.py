"""What is a job: a client's request inside the server, and the events that it receives?"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from trimtab.request import GenerateRequest

# OpenAI's value for a token with probability 0; JSON has no infinity.
LOWEST_LOGPROB = -9999.0

# Events that are part of an answer: after one of them, a job is not given to another worker.
SPOKEN = ("text", "reasoning", "call")
# The last events of a job.
ENDS = ("done", "error", "dropped")


@dataclass(frozen=True)
class Job:
    """One question to one adapter. All fields are plain data, because it is sent between processes.

    id: unique while the server runs. prompt: chat messages with bytes in media parts ({"type": "image", "data":
    b"..."}), a text (completed without a template) or token ids. adapter: None is the base. deadline_s: seconds from
    arrival until the answer must be complete, None: no limit. waited_s: those that its request had used before.
    top_logprobs: None for no logprobs, else the number of most likely tokens to report. fills_context: the answer may
    use the rest of the context if that is less than request.max_new_tokens. client: jobs of one client share cached
    prefixes. sender: jobs of one sender share a turn in the queue, and in decoding media and compiling schemas.
    schema: a JSON schema that the answer has to satisfy ({} is any JSON object); None: free text. tools: what the
    model may call, in OpenAI's form. must_call: None if it need not, "" for any of them, or the name of one.
    holds_calls: the arguments of voluntary calls follow their schemas too. several_calls: whether more than one may
    follow. template_kwargs: variables of the chat template. kind: "answer", or another result: "tokens", "text" (of
    token ids) or "embedding". adds_special: whether a text gets the tokens that its tokenizer adds. pooling: of an
    embedding, "last" or "mean". prompt_logprobs: as top_logprobs, for the prompt's tokens; sent with the last
    event. group: of jobs with the same prompt and adapter, such as the choices of one request: the prompt is
    computed once. continue_final_message: the answer continues the text of the last message, an assistant's.
    """

    id: str
    prompt: Any
    request: GenerateRequest
    adapter: str | None = None
    system: str | None = None
    deadline_s: float | None = None
    waited_s: float = 0.0
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


@dataclass(frozen=True)
class Token:
    """One token for clients that request logprobs, and the most likely tokens at its position: (id, text, logprob).

    The texts are those of `token_text`. offset: where it begins in the answer's text, in characters; a part of a character, where
    that begins.
    """

    token_id: int
    text: str
    logprob: float
    top: tuple[tuple[int, str, float], ...] = ()
    offset: int = 0


@dataclass(frozen=True)
class Event:
    """One event of a job. kind:

    "started"    the computation of its prompt begins (usage: started_at by the worker's clock, sent as ago_s)
    "text"       a fragment of the answer in whole characters, possibly empty (text, tokens)
    "reasoning"  the same for reasoning before the answer (text)
    "call"       a fragment of a tool call (call: index, arguments; with the first fragment of each: id, name)
    "scores"     log-probabilities of a part of its prompt (data: values of a JSON list; result: start, the first token)
    "done"       the answer is complete (finish, usage; of other kinds of jobs: result)
    "error"      the job failed (error: from `TrimtabError.to_dict`; usage: computed tokens)
    "dropped"    its client had left (usage: computed tokens)
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
    """Return a log-probability as a JSON number."""
    return max(logprob, LOWEST_LOGPROB)


def token_text(data: bytes) -> str:
    """Return bytes as a text that keeps them: those of a part of a character are surrogates (PEP 383)."""
    return data.decode("utf-8", "surrogateescape")


def token_bytes(text: str) -> bytes:
    """Return the bytes of a `token_text`."""
    return text.encode("utf-8", "surrogateescape")
