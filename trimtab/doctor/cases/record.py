"""The record of a run on the stock stack: packages, library frames, counted warnings, log lines; no paths of the machine."""

from __future__ import annotations

import platform
import traceback
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

from trimtab.doctor.facts.probe_kit import Heard, frames
from trimtab.process.packages import missing, versions_of
from trimtab.process.redact import Cleaner

NEEDED = ("torch", "transformers", "accelerate", "peft", "bitsandbytes", "safetensors", "numpy", "PIL")
VERSIONED = ("torch", "transformers", "accelerate", "peft", "bitsandbytes", "safetensors", "tokenizers", "numpy")
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


def heard_json(heard: Heard, clean: Cleaner) -> dict[str, Any]:
    """Return warnings by first line with their counts, and log lines, in order without duplicates."""
    counts = Counter(map(_line, heard.warnings))
    lines = dict.fromkeys(_line(line.replace("\n", " ")) for line in heard.log_lines)
    return {
        "warnings": {clean(line): count for line, count in counts.most_common(MOST_LINES)},
        "log_lines": [clean(line) for line in list(lines)[:MOST_LINES]],
    }


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
