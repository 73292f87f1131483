"""The exit code of a command after each kind of error, and the meaning of every code."""

from __future__ import annotations

import os

from trimtab.errors import KINDS, AdapterError, TrimtabError

# From 2 on, in the order of the errors: EXIT_TEXTS says which is which.
EXIT_CODES: tuple[tuple[type[TrimtabError], int], ...] = tuple(zip(KINDS, range(2, 9), strict=True))
# For a path that does not exist, or is no model or adapter.
MISSING = 3
# For a later step that failed: the earlier step's result is valid and was reported.
UNFINISHED = 10
# What each exit code means, for --help; docs/command-line.md has the same table.
EXIT_TEXTS = {
    0: "success", 1: "answers differ, or a server's adapter is ignored or wrong", 2: "the request is invalid",
    3: "a model or an adapter is missing, or a file is not what it claims to be", 4: "no placement fits the budgets",
    5: "adapter and model do not match", 6: "the device failed while running, for example out of memory",
    7: "a check of trimtab's own result failed", 8: "a known bug of another package prevents the run",
    9: "a server's answers do not show whether its adapter is alive",
    10: "a step is done, and its result stands, but a later step could not be done",
    129: "stopped because its terminal was closed (SIGHUP)", 130: "stopped by Ctrl-C", 141: "the reader of the output closed it",
    143: "stopped by SIGTERM",
}  # fmt: skip


# Where the texts begin in `exit_codes_text`.
EXIT_TEXT_COLUMN = 7


def exit_codes_text() -> str:
    """Return the exit codes for --help."""
    lines = [f"  {code:<{EXIT_TEXT_COLUMN - 2}}{text}" for code, text in sorted(EXIT_TEXTS.items())]
    return "\n".join(["exit codes:", *lines])


def exit_code(error: TrimtabError) -> int:
    """Return the exit code of an error; a path that is no adapter, or does not exist, has the code of a path that is no
    model."""
    if isinstance(error, AdapterError) and not _is_adapter(error.path):
        return MISSING
    return next(code for kind, code in EXIT_CODES if isinstance(error, kind))


def _is_adapter(path: str) -> bool:
    """Whether a path is one of PEFT's adapter folders, or a file of one; a GGUF file is neither."""
    folder = path if os.path.isdir(path) else os.path.dirname(path)
    return os.path.exists(path) and os.path.isfile(os.path.join(folder, "adapter_config.json"))
