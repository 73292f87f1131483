"""Errors about a prompt in the HTTP API, with the request's fields instead of plans, flags or Python's arguments."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from trimtab.engine.chat.prompt import CONTEXT_HINT, PLAN_HINT, is_token_ids
from trimtab.errors import RequestError
from trimtab.serve.contract.job import Job

FIELDS = {"max_new_tokens": "max_tokens", "adapter": "model", "system": "messages", "template_kwargs": "chat_template_kwargs"}
PARTS = {"image": "image_url", "audio": "input_audio"}


def for_client(exc: RequestError, job: Job) -> RequestError:
    """Return the same error with the field names of the client's request."""
    if type(exc) is not RequestError:
        return exc
    is_chat = isinstance(job.prompt, list) and not is_token_ids(job.prompt)
    field, value, hint = FIELDS.get(exc.field, exc.field), exc.value, exc.hint
    if field == "prompt" and is_chat:
        field = "messages"
    if field in PARTS:
        # Internally, a media part has the name of its Python type.
        field, value = _path(field, exc.number, job.prompt), None
    if field == "prompt":
        field = {"embedding": "input", "text": "tokens"}.get(job.kind, field)
    if field == "name" and is_chat:
        named = [place for place, one in enumerate(job.prompt) if one.get("name") and one["role"] != "tool"]
        field = f"messages[{named[0]}].name" if named else field
    if hint == CONTEXT_HINT:
        hint = "Shorten it, or lower max_tokens" if job.kind == "answer" else "Shorten it"
    elif hint.startswith(PLAN_HINT):
        hint = ""
    return RequestError(exc.reason, field=field, value=value, allowed=exc.allowed, near=exc.near, hint=hint)


def _path(kind: str, number: int | None, messages: Any) -> str:
    """Return the path in the messages of the image or audio clip with this index."""
    paths = list(_media(kind, messages))
    number = 0 if number is None and len(paths) == 1 else number
    return paths[number] if number is not None and number < len(paths) else "messages"


def _media(kind: str, messages: Any) -> Iterator[str]:
    for place, message in enumerate(messages if isinstance(messages, list) else ()):
        content = message.get("content") if isinstance(message, dict) else None
        for number, part in enumerate(content if isinstance(content, list) else ()):
            if part.get("type") == kind:
                yield f"messages[{place}].content[{number}].{PARTS[kind]}"
