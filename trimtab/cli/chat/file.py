"""A chat's conversation in a file: JSON that `/load` reads again, or Markdown to read."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trimtab.cli.flags.flags import mix_text, read_json_object, read_text
from trimtab.errors import RequestError
from trimtab.process.files import write_text

if TYPE_CHECKING:
    from trimtab.engine.calls.conversation import Conversation
    from trimtab.request import LoadRequest

KEYS = ("model", "adapters", "system", "options", "messages")


def save(chat: Conversation, request: LoadRequest, path: Path) -> None:
    """Write a conversation: JSON or Markdown, by the name's ending. Errors: RequestError(field="/save")."""
    if path.suffix.lower() not in (".json", ".md"):
        raise RequestError(
            "must end in .json (to load again) or .md (to read)", field="/save", value=str(path)
        )  # fmt: skip
    if path.suffix.lower() == ".md":
        text = _as_markdown(chat, request)
    else:
        text = json.dumps(_as_json(chat, request), indent=1) + "\n"
    write_text(path, text, field="/save", newline=None)


def load(chat: Conversation, path: str) -> None:
    """Replace a conversation's turns and system message by those of a file that `save` wrote.

    Errors: RequestError(field="/load", or the field of the message); then the conversation does not change.
    """
    text = read_text(path, "/load")
    if not text.lstrip().startswith("{"):
        raise RequestError("is not JSON that /save wrote", field="/load", value=path)
    saved = read_json_object(text, "/load", "a file that /save wrote")
    system, messages = saved.get("system"), saved.get("messages")
    if not isinstance(messages, list) or set(saved) - set(KEYS):
        raise RequestError("is not a conversation that /save wrote", field="/load", value=path)
    if not (system is None or isinstance(system, str)):
        raise RequestError("the system message must be text", field="/load", value=path)
    chat.resume(messages)
    chat.system = system


def _as_json(chat: Conversation, request: LoadRequest) -> dict[str, Any]:
    return {
        "model": request.model, "adapters": dict(request.adapters), "system": chat.system, "options": chat.options,
        "messages": [_message(turn) for turn in chat.turns],
    }  # fmt: skip


def _message(turn: Any) -> Mapping[str, Any]:
    message: dict[str, Any] = {"role": turn.role, "content": turn.text}
    images, audios = turn.sources[: len(turn.images)], turn.sources[len(turn.images) :]
    if images:
        message["images"] = [str(Path(source).resolve()) for source in images]
    if audios:
        message["audios"] = [str(Path(source).resolve()) for source in audios]
    return message if turn.role == "user" else {**message, "adapter": turn.adapter}


def _as_markdown(chat: Conversation, request: LoadRequest) -> str:
    parts = [f"# {request.model}"]
    if chat.system:
        parts.append(f"*System:* {chat.system}")
    for turn in chat.turns:
        who = "You" if turn.role == "user" else mix_text(turn.adapter)
        media = "".join(f"\n\n`{source}`" for source in turn.sources)
        parts.append(f"**{who}**{media}\n\n{turn.text}")
    return "\n\n".join(parts) + "\n"
