"""Library errors on the command line: arguments become the flags of the command that was run."""

from __future__ import annotations

import argparse
import re
from collections.abc import Mapping

# Arguments and fields whose flag is called otherwise; the first one that the command has.
_OTHERWISE = {
    "context_tokens": ("--context",), "gpu_memory_bytes": ("--gpu-memory",), "host_memory_bytes": ("--host-memory",),
    "adapters": ("--adapter",), "adapter": ("--use", "--adapter"), "new_tokens": ("--new-tokens", "--max-new-tokens"),
    "max_tokens": ("--max-new-tokens",),
}  # fmt: skip
_POSITIONAL = ("model", "out", "prompt")
_BUDGETS = ("--gpu-memory", "--host-memory")


def flags_of(command: argparse.ArgumentParser) -> dict[str, str]:
    """Return argument -> flag of one command, positional arguments in capitals."""
    options = {text for action in command._actions for text in action.option_strings}
    named = {text.removeprefix("--").replace("-", "_"): text for text in options if text.startswith("--")}
    for argument, flags in _OTHERWISE.items():
        flag = next((flag for flag in flags if flag in options), None)
        if flag is not None:
            named[argument] = flag
    positional = {action.dest for action in command._actions if not action.option_strings}
    words = {name: name.upper() for name in _POSITIONAL if name in positional}
    return named | words | ({"registry": "MODEL"} if "model" in positional else {})


def as_typed(text: str) -> str:
    """Return an error's text with the flag, or the command of a chat, that begins it as users type it: `/save x.txt`."""
    return re.sub(r"\A((?:--|/)[a-z][a-z-]*)=(?:'([^'\n]+)'|\"([^\"\n]+)\")(?=:)", r"\1 \2\3", text)


def in_flags(text: str, field: object, flags: Mapping[str, str]) -> str:
    """Return an error's text with its arguments as flags: `quant='nf5'` becomes `--quant nf5`, `gpu_memory` `--gpu-memory`.

    field: the error's own, which begins the text. Plain words become flags only there or before "=".
    """
    if not flags:
        return text
    names = "|".join(sorted(map(re.escape, flags), key=len, reverse=True))
    spelled = "|".join(sorted((re.escape(name) for name in flags if "_" in name), key=len, reverse=True)) or "(?!)"
    first = field.partition("[")[0] if isinstance(field, str) else ""
    if first in flags and re.match(rf"{re.escape(first)}(?=[:\[])", text):
        text = flags[first] + text[len(first) :]

    def given(match: re.Match[str]) -> str:
        flag, value = flags[match.group(1)], next((part for part in match.groups()[1:] if part is not None), "")
        if flag in _BUDGETS and value.isdecimal():
            value += "B"
        if value:
            return f"{flag} {value}"
        after = match.string[match.end() : match.end() + 1]
        is_other_value = match[0].endswith("=") and after.strip(".,;) ") != ""  # a tuple, for example
        return f"{flag}=" if is_other_value else flag

    text = as_typed(text)
    edge = r"(?<![\w./\\'\"=-])"
    text = re.sub(
        rf"{edge}({names})=(?:'([^'\n]*)'|\"([^\"\n]*)\"|(-?\d+(?:\.\d+)?(?:e[+-]?\d+)?\b|-?inf\b|nan\b)|True\b|)",
        given,
        text,
    )
    return re.sub(rf"{edge}({spelled})(?![\w=/\\'\"-]|\.\w)", lambda match: flags[match.group(1)], text)
