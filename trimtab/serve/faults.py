"""What each of our errors is called over HTTP: a status, OpenAI's error object, and none of this machine's paths."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from starlette.responses import JSONResponse, Response

from trimtab.checkpoint.names import near_names
from trimtab.errors import RequestError, TrimtabError
from trimtab.serve.supervisor import WorkerError

# Our class -> (HTTP status, OpenAI's type, code). A class that is not here is a bug of the server: 500, nothing told.
ERRORS: Mapping[str, tuple[int, str, str]] = {
    "RequestError": (400, "invalid_request_error", "invalid_value"),
    "QueueFullError": (429, "rate_limit_error", "queue_full"),
    "DeadlineError": (504, "timeout_error", "deadline"),
    "CheckpointError": (422, "invalid_request_error", "bad_file"),
    "AdapterError": (422, "invalid_request_error", "bad_adapter"),
    "DoesNotFitError": (507, "server_error", "does_not_fit"),
    "DeviceError": (503, "server_error", "device"),
    "WorkerDiedError": (503, "server_error", "worker_died"),
    "ParityError": (500, "server_error", "parity"),
    "UpstreamError": (500, "server_error", "upstream"),
}
UNKNOWN_MODEL = (404, "invalid_request_error", "model_not_found")
# What a client may see of an error's fields: never a path of this machine.
SHOWN_FIELDS = (
    "field", "value", "allowed", "hint", "problems", "needed_bytes", "budget_bytes", "device", "exit_code",
    "retry_after_s", "deadline_s",
)  # fmt: skip


class UnknownModelError(RequestError):
    """No model or adapter of this name is served."""

    def __init__(self, name: str, known: Sequence[str]) -> None:
        super().__init__(
            "is not served here", field="model", value=name, allowed=near_names(name, list(known)) or list(known)
        )


def error_json(name: str, message: str, fields: Mapping[str, Any]) -> tuple[int, dict[str, Any]]:
    """Return the HTTP status and OpenAI's error object of one of our errors."""
    status, kind, code = (
        UNKNOWN_MODEL if name == "UnknownModelError" else ERRORS.get(name, (500, "server_error", "bug"))
    )
    if name not in ERRORS and name != "UnknownModelError":
        message, fields = "The server made a mistake; its log says more", {}
    shown = {key: fields[key] for key in SHOWN_FIELDS if fields.get(key) not in (None, "", (), [])}
    param = fields.get("field") if isinstance(fields.get("field"), str) else None
    if "path" in fields:  # the file's place on this machine is not the client's business
        message = message.replace(str(fields["path"]), "the file")
    return status, {
        "error": {"message": message, "type": kind, "param": param, "code": code, "class": name, "fields": shown}
    }


def told_error(error: Mapping[str, Any]) -> tuple[int, dict[str, Any]]:
    """Return status and object of an error that came from the worker."""
    return error_json(error["class"], error["message"], error["fields"])


def raised_error(exc: TrimtabError) -> tuple[int, dict[str, Any]]:
    """Return status and object of an error raised in this process."""
    if isinstance(exc, WorkerError):
        return told_error(exc.error)
    fields = {name: value for name, value in vars(exc).items() if not name.startswith("_")}
    return error_json(type(exc).__name__, str(exc), fields)


def error_response(status: int, body: Mapping[str, Any]) -> Response:
    headers = {}
    retry = body["error"]["fields"].get("retry_after_s")
    if retry is not None:
        headers["retry-after"] = str(max(1, round(retry)))
    return JSONResponse(body, status, headers=headers)
