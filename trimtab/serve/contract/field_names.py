"""What does the client call a field that the server knows as a field of a chat?"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

Names = Mapping[str, str]


def client_field(field: str, names: Names) -> str:
    """Return the client's name of a field: the longest prefix with a name decides. "messages[1].content[0].text" is
    "input[3].content[0].text" if "messages[1]" is "input[3]"."""
    end = len(field)
    while end > 0:
        if field[:end] in names:
            return names[field[:end]] + field[end:]
        end = max(field.rfind(".", 0, end), field.rfind("[", 0, end))
    return field


def client_error(error: Mapping[str, Any], names: Names) -> Mapping[str, Any]:
    """Return an error, as plain values of an event, with the client's names in its field and its text."""
    field = error["fields"].get("field")
    if not names or not isinstance(field, str):
        return error
    shown = client_field(field, names)
    message, fields = str(error["message"]), {**error["fields"], "field": shown}
    if message.startswith(field):
        message = shown + message[len(field) :]
    for part in ("reason", "hint"):
        if isinstance(text := fields.get(part), str) and text:
            fields[part] = _renamed(text, names)
            message = message.replace(text, fields[part])
    return {**error, "message": message, "fields": fields}


def _renamed(text: str, names: Names) -> str:
    """Return text with the client's names of fields such as max_tokens, which are no English words."""
    for name, own in names.items():
        if name.isidentifier() and "_" in name:
            text = re.sub(rf"\b{name}\b", own, text)
    return text
