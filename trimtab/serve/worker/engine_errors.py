"""Converts an engine's exceptions for clients: out of memory, an unexpected failure, or a device that has become
unusable.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from trimtab.engine.memory.out_of_memory import is_host_memory, is_out_of_memory
from trimtab.errors import DeviceError, RequestError, TrimtabError
from trimtab.serve.api.client_errors import for_client
from trimtab.serve.contract.job import Job
from trimtab.serve.contract.log import write_traceback
from trimtab.serve.scheduling.scheduler import MistakeError

LESS_HINT = "Send a smaller request, or try again later"


@contextmanager
def named(what: str, device: torch.device, job: Job | None = None) -> Iterator[None]:
    """Convert an exception into its error: DeviceError for memory of the device or host, MistakeError for an unexpected
    failure.

    A failure after which the device is unusable is raised unchanged, and ends the worker. job: the fields that a
    RequestError names.
    """
    try:
        yield
    except RequestError as exc:
        if job is None:
            raise
        raise for_client(exc, job) from exc
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as exc:  # a panic of llguidance is no Exception
        error = error_of(exc, what, device)
        try:
            if error is exc:
                raise
            raise error from exc
        finally:
            del error  # it refers to this frame, and through its cause to frames with the inputs


def error_of(exc: BaseException, what: str, device: torch.device) -> TrimtabError:
    """Return the error of an exception. Raises the device's error if the device is unusable."""
    if isinstance(exc, DeviceError) and exc.planned_bytes is not None:
        # The planned bytes are only for the log.
        write_traceback(exc, "the device has less memory than planned")
        short = str(exc).removeprefix(f"{exc.device}: ").split(":")[0]
        return DeviceError(short, device=exc.device, hint=LESS_HINT)
    if isinstance(exc, TrimtabError):
        return exc
    if not is_out_of_memory(exc) and not is_host_memory(exc):
        # After some errors a GPU is unusable: then this raises its error.
        torch.zeros(1, device=device).item()
    return error_on_host(exc, what, device)


def error_on_host(exc: BaseException, what: str, device: torch.device) -> TrimtabError:
    """Return the error of an exception without using the device. Clients do not receive the text in the log."""
    error_id = write_traceback(exc, f"internal error while {what}")
    if is_host_memory(exc):
        return DeviceError(f"out of host memory while {what}", device="cpu", hint=LESS_HINT)
    if is_out_of_memory(exc):
        return DeviceError(f"out of memory while {what}", device=str(device), hint=LESS_HINT)
    return MistakeError(error_id)
