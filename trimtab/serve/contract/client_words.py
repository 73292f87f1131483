"""The words that an error may contain for clients: those of the request and the server, none of the layers below.

A hint that only the operator can follow is omitted, and so is a reason that names a Python argument. The operator reads
both in the log. Pure: imports nothing of the model.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from trimtab.request import GenerateRequest, LoadRequest

# The server's flags, which its administrators know.
SERVER_FLAGS = ("adapter-root", "resident-adapters")
RENAMED = {"max_new_tokens": "max_tokens", "template_kwargs": "chat_template_kwargs"}
HIDDEN = "The server cannot do this; its log has the reason"
# Names of arguments that bodies of requests have too.
ALSO_SENT = frozenset(
    ("frequency_penalty", "logit_bias", "logprobs", "min_p", "model", "presence_penalty", "repetition_penalty", "seed", "stop",
     "temperature", "top_k", "top_p")
)  # fmt: skip
# Names of arguments that no request has.
ARGUMENTS = {field.name for kind in (LoadRequest, GenerateRequest) for field in fields(kind)} - ALSO_SENT
_LONG = sorted(name for name in ARGUMENTS if "_" in name)
_FOREIGN = re.compile(
    rf"(?<![\w-])--(?!(?:{'|'.join(SERVER_FLAGS)})\b)[a-z]|\b(?:{'|'.join(_LONG)})\b|\b(?:{'|'.join(sorted(ARGUMENTS))})="
    r"|\bplan (?:again|with)\b|\bthe plan again\b|`trimtab |\btrimtab\.\w|\b0x[0-9a-f]{6,}",
    re.IGNORECASE,
)
# Removed from every message later.
_OBJECT = re.compile(r"<[^<>]* at 0x[0-9a-f]+>", re.IGNORECASE)
_RENAMED = re.compile(rf"\b(?:{'|'.join(RENAMED)})\b")

log = logging.getLogger("trimtab.serve")


def is_foreign(text: str) -> bool:
    """Whether a text mentions plans, arguments, flags or addresses."""
    return _FOREIGN.search(text) is not None


def for_clients(name: str, message: str, error_fields: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    """Return an error's message and fields in the client's words. name: its class."""
    shown, hint = dict(error_fields), str(error_fields.get("hint") or "")
    if hint and is_foreign(hint):
        message = message.removesuffix(hint).rstrip().removesuffix(".")
        del shown["hint"]
    message = _RENAMED.sub(lambda match: RENAMED[match[0]], message)
    if isinstance(shown.get("field"), str):
        shown["field"] = RENAMED.get(shown["field"], shown["field"])
    if shown.get("problems"):
        shown["problems"] = [HIDDEN if is_foreign(str(problem)) else problem for problem in shown["problems"]]
    # Text from the client's request is returned unchanged.
    if not (name.endswith("RequestError") or "field" in shown) and is_foreign(_OBJECT.sub("", message)):
        log.error("not shown to a client: %s", message)
        message = HIDDEN
    return message, shown
