"""Which status and error object does an error have over HTTP?"""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import fields
from itertools import takewhile
from typing import Any

from starlette.responses import JSONResponse, Response

from trimtab.checkpoint.names import near_names
from trimtab.errors import RequestError, TrimtabError
from trimtab.process.redact import without_paths
from trimtab.request import GenerateRequest, LoadRequest
from trimtab.serve.contract.log import note, request_id

# Class -> (HTTP status, OpenAI's type, code). Any other class is a bug of the server: 500, without its text.
ERRORS: Mapping[str, tuple[int, str, str]] = {
    "RequestError": (400, "invalid_request_error", "invalid_value"),
    "BodyTooLargeError": (413, "invalid_request_error", "body_too_large"),
    "UnknownModelError": (404, "invalid_request_error", "model_not_found"),
    "CheckpointError": (422, "invalid_request_error", "bad_file"), "AdapterError": (422, "invalid_request_error", "bad_adapter"),
    "QueueFullError": (429, "rate_limit_error", "queue_full"), "QuotaError": (429, "rate_limit_error", "quota"),
    "BodiesFullError": (503, "server_error", "bodies_full"), "DeviceError": (503, "server_error", "device"),
    "WorkerDiedError": (503, "server_error", "worker_died"), "ModelFailedError": (503, "server_error", "model_failed"),
    "StoppingError": (503, "server_error", "stopping"), "DeadlineError": (504, "timeout_error", "deadline"),
    "TemporaryFolderError": (507, "server_error", "temporary_folder"), "DoesNotFitError": (507, "server_error", "does_not_fit"),
    "ParityError": (500, "server_error", "parity"), "MistakeError": (500, "server_error", "mistake"),
    "UpstreamError": (500, "server_error", "upstream"),
}  # fmt: skip
BUG = (500, "server_error", "bug")
# Refusals before routing, with HTTP's names.
HTTP_CODES = {
    401: "invalid_api_key", 403: "admin_off", 404: "not_found", 405: "method_not_allowed", 413: "body_too_large", 415: "not_json",
    421: "wrong_host",
}  # fmt: skip
# The fields of an error that a client may see: never a path of this machine.
SHOWN_FIELDS = (
    "field", "value", "allowed", "hint", "problems", "needed_bytes", "budget_bytes", "device", "exit_code",
    "limit_bytes", "retry_after_s", "deadline_s", "error_id",
)  # fmt: skip
MOST_NAMES = 20
# The most names that an unknown name is compared with: a thousand comparisons take a tenth of a second.
NEAR_CHARACTERS, NEAR_NAMES = 64, 32
# Errors that no change of a request's fields can fix.
OF_NO_FIELD = ("QueueFullError", "QuotaError", "DeadlineError")


class UnknownModelError(RequestError):
    """No model or adapter of this name is served."""

    def __init__(self, name: str, known: Sequence[str], *, field: str = "model") -> None:
        near = near_names(name[:NEAR_CHARACTERS], _nearest(name, known))
        shown = list(dict.fromkeys([*near, *known]))[:MOST_NAMES]
        hint = "" if near or len(shown) == len(known) else f"These are {len(shown)} of {len(known)}; GET /v1/models lists all"
        super().__init__("is not served here", field=field, value=name, allowed=shown, near=near, hint=hint)


def _nearest(name: str, known: Sequence[str]) -> list[str]:
    """Return the few names with the longest common prefix, all if they are few."""
    if len(known) <= NEAR_NAMES:
        return list(known)
    low = name[:NEAR_CHARACTERS].lower()

    def alike(one: str) -> int:
        pairs = zip(one.lower(), low, strict=False)
        return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))

    return sorted(known, key=lambda one: (-alike(one), one))[:NEAR_NAMES]


def error_json(error: Mapping[str, Any], folders: Sequence[str] = (), *, is_admin: bool = False) -> tuple[int, dict[str, Any]]:
    """Return the HTTP status and OpenAI's error object of an error, as `TrimtabError.to_dict` gives it. folders: from
    `redact.own_folders`. is_admin: for an administrator, who may see flags and arguments."""
    name, message, fields = error["class"], error["message"], error["fields"]
    status, kind, code = ERRORS.get(name, BUG)
    if name not in ERRORS:
        where = f" under {request_id()}" if request_id() else ""
        name, message, fields = ("bug", f"The server failed; its log has the traceback{where}", {"error_id": request_id()})
    if not is_admin:
        message, fields = for_clients(name, message, fields)
    known = str(fields.get("path") or "")
    shown = {key: _as_json(fields[key]) for key in SHOWN_FIELDS if fields.get(key) not in (None, "", (), [])}
    return status, _object(
        without_paths(message, known, folders=folders), kind, code,
        param=None if name in OF_NO_FIELD else fields.get("field"), name=name,
        fields=without_paths(shown, known, folders=folders),
    )  # fmt: skip


def _as_json(value: Any) -> Any:
    """Return a field's value; NaN and infinity as text, because JSON has no such numbers."""
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def _object(
    message: str, kind: str, code: str, *, param: Any = None, name: str = "", fields: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    return {
        "error": {
            "message": message, "type": kind, "param": param if isinstance(param, str) else None, "code": code,
            "class": name, "fields": dict(fields or {}),
        }
    }  # fmt: skip


def note_refusal(error: Mapping[str, Any], folders: Sequence[str] = ()) -> None:
    """Add to the request's line why it is refused: class, field and reason. The value that a client sent is left out."""
    fields = error["fields"]
    reason = fields.get("reason") if isinstance(fields.get("reason"), str) else None
    note(
        error=error["class"], field=fields.get("field"),
        reason=None if reason is None else without_paths(reason, str(fields.get("path") or ""), folders=folders),
    )  # fmt: skip


def plain_error(exc: BaseException) -> Mapping[str, Any]:
    """Return an error as the plain values of an event. An exception of another class is a bug: its text is not included."""
    return exc.to_dict() if isinstance(exc, TrimtabError) else {"class": "bug", "message": "", "fields": {}}


def error_response(status: int, body: Mapping[str, Any]) -> Response:
    """Return an error object as a response; with Retry-After if the error has a time, or passes by itself."""
    headers = {}
    retry = body["error"]["fields"].get("retry_after_s")
    if retry is not None:
        headers["retry-after"] = str(max(1, round(retry)))
    elif status == 503:
        headers["retry-after"] = "1"
    return JSONResponse(body, status, headers=headers)


def http_error(
    status: int, message: str, *, kind: str = "invalid_request_error", code: str | None = None,
    headers: Mapping[str, str] | None = None, logged: str = "",
) -> Response:  # fmt: skip
    """Return an HTTP error in the same form. logged: for the request's line, where the message has a value of the client."""
    note(reason=logged or message)
    body = _object(message, kind, code or HTTP_CODES.get(status, "http"))
    return JSONResponse(body, status, headers=headers)


# The server's flags, which its administrators know.
SERVER_FLAGS = ("adapter-root", "resident-adapters")
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

log = logging.getLogger("trimtab.serve")


def is_foreign(text: str) -> bool:
    """Whether a text mentions plans, arguments, flags or addresses."""
    return _FOREIGN.search(text) is not None


def for_clients(name: str, message: str, error_fields: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    """Return an error's message and fields without what a client cannot follow. name: its class. A hint that only the operator can
    follow is omitted, and so is a reason that names a Python argument."""
    shown, hint = dict(error_fields), str(error_fields.get("hint") or "")
    if hint and is_foreign(hint):
        message = message.removesuffix(hint).rstrip().removesuffix(".")
        del shown["hint"]
    if shown.get("problems"):
        shown["problems"] = [HIDDEN if is_foreign(str(problem)) else problem for problem in shown["problems"]]
    # Text from the client's request is returned unchanged.
    if not (name.endswith("RequestError") or "field" in shown) and is_foreign(_OBJECT.sub("", message)):
        log.error("not shown to a client: %s", message)
        message = HIDDEN
    return message, shown
