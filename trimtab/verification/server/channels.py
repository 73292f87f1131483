"""How can a server be queried: raw completions, chat, Ollama's raw generation?"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from trimtab.errors import RequestError
from trimtab.verification.server.answers import Said, read_chat, read_completion, read_ollama
from trimtab.verification.server.client import Client, Reply

TOP = 20
# OpenAI's limit for completions; many servers have the same.
TOP_SMALL = 5


@dataclass(frozen=True)
class Question:
    """One question to a server. ids: its tokens from the local tokenizer and template. text: the text that encodes to
    them.

    messages: for chats; None for a text that has no chat form. kind: "text", "image" or "audio".
    """

    id: str
    kind: str
    ids: tuple[int, ...]
    text: str | None
    messages: Sequence[Mapping[str, Any]] | None
    prompt: Any = field(default=None, compare=False)
    image: str | None = None
    audio: str | None = None


Make = Callable[[Question], "dict[str, Any] | None"]


@dataclass(frozen=True)
class Channel:
    """A way to query. top: number of returned logprobs, 0 for texts only."""

    name: str
    path: str
    top: int
    make: Make = field(compare=False)
    read: Callable[[Any], Said | None] = field(compare=False)

    def body(self, model: str, question: Question, new_tokens: int) -> dict[str, Any] | None:
        """Return the request body, None for a question that this channel does not support."""
        own = self.make(question)
        if own is None:
            return None
        if self.path.startswith("/api/"):
            logprobs = {"logprobs": True, "top_logprobs": self.top} if self.top else {}
            options = {"temperature": 0, "num_predict": new_tokens}
            return {"model": model, **own, "stream": False, "options": options, **logprobs}
        logprobs = {}
        if self.top:
            is_chat = "messages" in own
            logprobs = {"logprobs": True, "top_logprobs": self.top} if is_chat else {"logprobs": self.top}
        return {"model": model, **own, "max_tokens": new_tokens, "temperature": 0, **logprobs}


def _ids(question: Question) -> dict[str, Any]:
    return {"prompt": list(question.ids)}


def _text(start: str = "", **options: Any) -> Make:
    """Return what makes a request of a question's text without this start."""

    def make(question: Question) -> dict[str, Any] | None:
        return None if question.text is None else {"prompt": question.text.removeprefix(start), **options}

    return make


def _messages(question: Question) -> dict[str, Any] | None:
    return None if question.messages is None else {"messages": list(question.messages)}


def openai_channels(start: str) -> list[Channel]:
    """Return the channels of an OpenAI-compatible server, the most informative first. start: text of the token that begins a
    prompt."""
    channels = []
    forms: list[tuple[str, Make]] = [("completions, token ids", _ids), ("completions, text", _text())]
    if start:
        forms.insert(1, ("completions, text, start token left to the server", _text(start)))
    for top in (TOP, TOP_SMALL):
        channels += [Channel(name, "/completions", top, make, read_completion) for name, make in forms]
    channels += [chat_channel(top) for top in (TOP, TOP_SMALL)]
    channels += [Channel(name, "/completions", 0, make, read_completion) for name, make in forms]
    return [*channels, chat_channel(0)]


def chat_channel(top: int) -> Channel:
    return Channel("chat", "/chat/completions", top, _messages, read_chat)


def ollama_channels(start: str) -> list[Channel]:
    """Return the channels of Ollama's API: raw generation, without its template."""
    forms: list[tuple[str, Make]] = [("raw generation", _text(raw=True))]
    if start:
        forms.insert(0, ("raw generation, start token left to the server", _text(start, raw=True)))
    return [Channel(name, "/api/generate", top, make, read_ollama) for top in (TOP, TOP_SMALL, 0) for name, make in forms]


@dataclass(frozen=True)
class Opened:
    """The first working channel, and the server's refusals of those before it."""

    channel: Channel
    refusals: tuple[str, ...]
    notes: tuple[str, ...]


def open_channel(client: Client, model: str, channels: Sequence[Channel], question: Question) -> Opened:
    """Return the first channel on which the server answers. Errors: RequestError with the refusals if none works. Raw completions
    come first, because they use no chat template."""
    refusals: list[str] = []
    closed: set[tuple[str, int]] = set()
    uncounted: Opened | None = None
    for channel in channels:
        body = channel.body(model, question, 2)
        if body is None or (channel.path, -1) in closed or (channel.path, channel.top) in closed:
            continue
        reply = client.post(channel.path, body)
        _check_admitted(reply, client)
        name = f"{channel.name}, {f'{channel.top} logprobs' if channel.top else 'texts'}"
        answer = channel.read(reply.value) if reply.status == 200 else None
        if answer is None:
            refusals.append(f"{name}: status {reply.status} {reply.words}".strip())
            if reply.status in (404, 405, 501):
                closed.add((channel.path, -1))
            continue
        if channel.top and answer.positions is None:
            refusals.append(f"{name}: answers without logprobs")
            closed |= {(channel.path, TOP), (channel.path, TOP_SMALL)}
            continue
        if answer.prompt_tokens in (None, len(question.ids)):
            return Opened(channel, tuple(refusals), ())
        note = f"the server counts {answer.prompt_tokens} tokens in a prompt of {len(question.ids)}"
        refusals.append(f"{name}: {note}")
        uncounted = uncounted or Opened(channel, (), (f"{note}: its tokenizer or template differs",))
    if uncounted is not None:
        return Opened(uncounted.channel, tuple(refusals), uncounted.notes)
    raise RequestError(
        f"answers no request for {model!r}: {'; '.join(refusals[-3:])}", field="against", value=client.url,
        hint="Check remote_model",
    )  # fmt: skip


def _check_admitted(reply: Reply, client: Client) -> None:
    if reply.status in (401, 403):
        raise RequestError(
            f"refuses the key (status {reply.status})" if reply.words == "" else f"refuses: {reply.words}",
            field="against", value=client.url, hint="Name the variable that holds the key: api_key_env",
        )  # fmt: skip
