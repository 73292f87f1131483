"""The record of a run on the stock stack: packages, library frames, counted warnings, log lines; no paths of the machine."""

from __future__ import annotations

import logging
import platform
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from trimtab.doctor.facts.probe_kit import frames
from trimtab.process.packages import missing, versions_of
from trimtab.process.redact import Cleaner

NEEDED = ("torch", "transformers", "accelerate", "peft", "bitsandbytes", "safetensors", "numpy", "PIL")
VERSIONED = ("torch", "transformers", "accelerate", "peft", "bitsandbytes", "safetensors", "tokenizers", "numpy")
LIBRARIES = ("accelerate", "bitsandbytes", "peft", "transformers")
LINE_CHARS, MESSAGE_CHARS, TAIL_CHARS, MOST_LINES = 300, 2000, 4000, 60


def main(request: Mapping[str, Any], emit: Callable[[dict[str, Any]], None]) -> None:
    """Report the versions of this interpreter's packages, the missing ones, and whether there is a GPU."""
    absent, has_gpu = missing(NEEDED), False
    if not absent:
        import torch

        has_gpu = torch.cuda.is_available()
    emit({"versions": versions(), "missing": absent, "has_gpu": has_gpu})


def versions() -> dict[str, str]:
    """Return the installed versions, by package, Python's own included."""
    return {"python": platform.python_version()} | versions_of(VERSIONED)


@dataclass
class LogEvents:
    """Warnings by first line with their counts, and log lines, in order without duplicates."""

    warnings: Counter[str] = field(default_factory=Counter)
    log_lines: dict[str, None] = field(default_factory=dict)

    def to_json(self, clean: Cleaner) -> dict[str, Any]:
        return {
            "warnings": {clean(line): count for line, count in self.warnings.most_common(MOST_LINES)},
            "log_lines": [clean(line) for line in list(self.log_lines)[:MOST_LINES]],
        }


class _Handler(logging.Handler):
    def __init__(self, events: LogEvents) -> None:
        super().__init__(logging.INFO)
        self.events = events

    def emit(self, record: logging.LogRecord) -> None:
        if record.levelno >= logging.WARNING or record.name.startswith("accelerate"):
            self.events.log_lines[_line(record.getMessage().replace("\n", " "))] = None


@contextmanager
def listening() -> Iterator[LogEvents]:
    """Yield the log events of the libraries from now on, including accelerate's INFO lines, which name modules that do not
    fit."""
    import transformers

    log = LogEvents()
    handler = _Handler(log)
    transformers.utils.logging.disable_progress_bar()
    loggers = [logging.getLogger(name) for name in LIBRARIES]
    kept = [(logger, logger.handlers[:], logger.propagate, logger.level) for logger in loggers]
    for logger in loggers:
        logger.handlers, logger.propagate = [handler], False
    logging.getLogger("accelerate").setLevel(logging.INFO)

    def show(message: Any, *_: Any, **__: Any) -> None:
        log.warnings[_line(str(message))] += 1

    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.showwarning = show
        try:
            yield log
        finally:
            for logger, handlers, propagate, level in kept:
                logger.handlers, logger.propagate = handlers, propagate
                logger.setLevel(level)


def _line(text: str) -> str:
    return (text.strip().splitlines() or [""])[0][:LINE_CHARS]


def exception_json(error: BaseException, clean: Cleaner) -> dict[str, Any]:
    """Return an exception for the record; `fields` only for trimtab's errors."""
    message = clean(str(error))[:MESSAGE_CHARS]
    kept = frames(error)
    shown = [f"{frame['file']}:{frame['line']} in {frame['function']}" for frame in kept]
    while sum(map(len, shown)) > TAIL_CHARS:
        shown.pop(0)
    tail = "\n".join(shown)
    last = clean(traceback.format_exception_only(type(error), error)[-1].strip())[:MESSAGE_CHARS]
    return {
        "type": type(error).__name__, "message": message, "frames": kept, "tail": f"{tail}\n{last}".strip(),
        "ours": any(base.__name__ == "TrimtabError" for base in type(error).__mro__),
    }  # fmt: skip
