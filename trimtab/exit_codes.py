"""With which code a command ends after each kind of error (`cli.py` lists all codes)."""

from __future__ import annotations

import os

from trimtab.errors import (
    AdapterError,
    CheckpointError,
    DeviceError,
    DoesNotFitError,
    ParityError,
    RequestError,
    TrimtabError,
    UpstreamError,
)

EXIT_CODES: tuple[tuple[type[TrimtabError], int], ...] = (
    (RequestError, 2),
    (CheckpointError, 3),
    (DoesNotFitError, 4),
    (AdapterError, 5),
    (DeviceError, 6),
    (ParityError, 7),
    (UpstreamError, 8),
)
# Of a model or adapter that is not there.
MISSING = 3


def exit_code(error: TrimtabError) -> int:
    """Return the exit code of an error; an adapter that is not there has the code of a model that is not there."""
    if isinstance(error, AdapterError) and not os.path.exists(error.path):
        return MISSING
    return next(code for kind, code in EXIT_CODES if isinstance(error, kind))
