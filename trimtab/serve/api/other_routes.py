"""How do routes without a generated answer work: embeddings, tokens of a text or chat, and the text of tokens?"""

from __future__ import annotations

import base64
import json
import struct
import time
import uuid
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

from trimtab.errors import RequestError
from trimtab.request import GenerateRequest
from trimtab.serve.api import schemas, to_jobs
from trimtab.serve.api.answer_types import Embedding, Embeddings, EmbeddingsUsage, TokenCount, Tokens, TokensText
from trimtab.serve.api.answers import Fragments, Shape
from trimtab.serve.contract.job import Event, Job
from trimtab.serve.contract.settings import Limits

_NO_ANSWER = GenerateRequest(max_new_tokens=1)


async def in_turn(
    pool: Any, model: str, jobs: Sequence[Job], on_dropped: Callable[[Mapping[str, Any]], None] | None = None
) -> AsyncIterator[Event]:
    """Yield each job's result as a "result", then one "done"; the first error ends it. The time of one request is that of all its
    jobs. on_dropped: as for `Pool.submit`.
    """
    began = time.monotonic()
    for job in jobs:
        async with aclosing(pool.submit(model, replace(job, waited_s=time.monotonic() - began), on_dropped)) as stream:
            async for event in stream:
                if event.kind == "error":
                    yield event
                    return
                if event.kind == "done":
                    yield replace(event, kind="result")
    yield Event("", "done")


class _Result(Shape):
    """A response that is only sent whole."""

    def __init__(self, body: Any) -> None:
        super().__init__(SimpleNamespace(model=body.model, stream=False, n=1))
        self.given = body
        self.results: list[Any] = []

    def pieces(self, index: int, event: Event) -> list[dict[str, Any]]:
        if event.kind == "result" and event.result is not None:
            self.results.append(self.shown(event.result))
            self.prompt_tokens += event.usage["prompt_tokens"]
        return []

    def shown(self, result: Mapping[str, Any]) -> Any:
        """Return the part of a result that is kept until all have arrived."""
        return result


# Embeddings -----------------------------------------------------------------------------------------------------------


def embedding_jobs(body: schemas.EmbeddingsRequest, *, adapter: str | None, context_tokens: int, limits: Limits) -> list[Job]:
    """Return a job for each text. Errors: RequestError."""
    texts = to_jobs.prompts_of(body, field="input")
    if len(texts) > limits.embeddings:
        raise RequestError(f"this server embeds at most {limits.embeddings} texts at once", field="input")
    for text in texts:
        to_jobs.check_length(text, context_tokens, "input")
    pooling = body.pooling or "last"
    return [Job(uuid.uuid4().hex, text, _NO_ANSWER, adapter=adapter, kind="embedding", pooling=pooling) for text in texts]


class EmbeddingsShape(_Result):
    def shown(self, result: Mapping[str, Any]) -> Any:
        vector = result["embedding"]
        if self.given.encoding_format == "base64":
            return _packed(vector)
        return Fragments([json.dumps(vector, allow_nan=False, separators=(",", ":")).encode()])

    def whole(self) -> Embeddings:
        data: list[Embedding] = [
            {"object": "embedding", "index": place, "embedding": one} for place, one in enumerate(self.results)
        ]
        usage: EmbeddingsUsage = {"prompt_tokens": self.prompt_tokens, "total_tokens": self.prompt_tokens}
        return {"object": "list", "model": self.given.model, "data": data, "usage": usage}


def _packed(vector: Sequence[float]) -> str:
    """Return a vector in OpenAI's packing: float32, little-endian, in base64."""
    return base64.b64encode(struct.pack(f"<{len(vector)}f", *vector)).decode()


# Tokens ---------------------------------------------------------------------------------------------------------------


# Fields that only apply to messages.
_OF_CHAT = ("tools", "chat_template_kwargs", "continue_final_message", "add_generation_prompt")


def chat_to_tokenize(body: schemas.TokenizeRequest) -> schemas.ChatRequest:
    """Return the chat to tokenize."""
    fields = {name: getattr(body, name) for name in ("messages", *_OF_CHAT)}
    return schemas.chat_of({"model": body.model, **fields})


def check_tokenize(body: schemas.TokenizeRequest) -> None:
    """Raise RequestError for fields that have no effect together."""
    if (body.prompt is None) == (body.messages is None):
        raise RequestError("set this or messages", field="prompt")
    if body.messages is None:
        for name in _OF_CHAT:
            if getattr(body, name) is not None:
                raise RequestError("has no effect without messages", field=name)
    elif body.add_special_tokens is not None:
        raise RequestError("has no effect with messages: the chat template decides", field="add_special_tokens")


def text_job(body: schemas.TokenizeRequest, *, context_tokens: int) -> Job:
    """Return the job that tokenizes a text. Errors: RequestError."""
    if not body.prompt:
        raise RequestError("is empty", field="prompt")
    prompt = {"text": body.prompt}
    to_jobs.check_length(prompt, context_tokens, "prompt")
    adds = body.add_special_tokens is not False
    return Job(uuid.uuid4().hex, prompt, _NO_ANSWER, kind="tokens", adds_special=adds)


def chat_job(chat: schemas.ChatRequest, messages: list[dict[str, Any]], *, context_tokens: int, limits: Limits) -> Job:
    """Return the job that tokenizes a chat. Errors: RequestError."""
    to_jobs.check_length(messages, context_tokens, "messages")
    to_jobs.check_continued(chat)
    calls = to_jobs.calls_of(chat, limits)
    kept = {name: calls[name] for name in ("tools", "template_kwargs") if name in calls}
    is_continued = bool(chat.continue_final_message)
    return Job(uuid.uuid4().hex, messages, _NO_ANSWER, kind="tokens", continue_final_message=is_continued, **kept)


def ids_job(body: schemas.DetokenizeRequest, *, context_tokens: int) -> Job:
    """Return the job that decodes tokens to text. Errors: RequestError."""
    if not body.tokens:
        raise RequestError("is empty", field="tokens")
    to_jobs.check_length(body.tokens, context_tokens, "tokens")
    return Job(uuid.uuid4().hex, list(body.tokens), _NO_ANSWER, kind="text")


class TokensShape(_Result):
    def __init__(self, body: Any, context_tokens: int) -> None:
        super().__init__(body)
        self._context_tokens = context_tokens

    def whole(self) -> Tokens:
        (result,) = self.results
        ids = result["tokens"]
        shown = result["token_strs"] if self.given.return_token_strs else None
        return {"count": len(ids), "max_model_len": self._context_tokens, "tokens": ids, "token_strs": shown}


class CountShape(_Result):
    def whole(self) -> TokenCount:
        return {"input_tokens": len(self.results[0]["tokens"])}


class TextShape(_Result):
    def whole(self) -> TokensText:
        return {"prompt": self.results[0]["prompt"]}
