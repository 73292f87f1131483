"""Library errors on the command line: arguments become the flags of the command that was run, or the keys of its file."""

from __future__ import annotations

import argparse
import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from trimtab.cli.flags.flags import MAX_MEMORY, read_json_object
from trimtab.errors import RequestError, TrimtabError
from trimtab.planning.request.max_memory import device_refusal

# Arguments and fields whose flag has another name; the first one that the command has is used.
_OTHERWISE = {
    "context_tokens": ("--context",), "gpu_memory_bytes": ("--gpu-memory",), "host_memory_bytes": ("--host-memory",),
    "adapters": ("--adapter",), "adapter": ("--use", "--adapter"), "new_tokens": ("--new-tokens", "--max-new-tokens"),
    "max_tokens": ("--max-new-tokens",), "timeout_s": ("--timeout",), "grace_s": ("--grace",), "queue_limit": ("--queue",),
    "idle_unload_s": ("--idle-unload",), "ids": ("--probe",),
}  # fmt: skip
_POSITIONAL = ("model", "out", "prompt")
_BUDGETS = ("--gpu-memory", "--host-memory")
# The values that an error lists. They are no arguments, also where one has an argument's name.
_LISTED = re.compile(r"(\((?:choices: |did you mean )[^()\n]*\))")


@dataclass(frozen=True)
class Words:
    """The user's names of a command's arguments. options: the parsed command line. keys: flag -> key of the file of --config."""

    options: argparse.Namespace | None = None
    keys: Mapping[str, str] = field(default_factory=dict)

    def of(self, text: str, field: object) -> str:
        """Return an error's text with these names. field: the error's, which begins the text; None: it does not."""
        if self.options is None:
            return text
        if field == "--prompts":  # of a file: a line's keys are no flags
            return as_typed(text)
        return in_keys(in_flags(text, field, flags_of(self.options.parser)), self.keys, getattr(self.options, "config", None) or "")

    def named(self, exc: TrimtabError) -> TrimtabError:
        """Return an error, of the key of --max-memory if this flag chose the device that it is about."""
        given = getattr(self.options, "max_memory", None)
        if given is None or getattr(self.options, "device", None) is not None:
            return exc
        if not isinstance(exc, RequestError) or exc.field != "device":
            return exc
        return device_refusal(exc, read_json_object(given, "--max-memory", MAX_MEMORY))


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
    return named | words | (dict.fromkeys(("registry", "url"), "MODEL") if "model" in positional else {})


def as_typed(text: str) -> str:
    """Return an error's text with its leading flag, or chat command, in the form that users type: `/save x.txt`."""
    named = r"\A(--[a-z][a-z-]*)\['([^'\n]+)'\]='([^'\n]*)'(?=:)"  # one value of a table: --place v=host
    given = r"\A((?:--|/)[a-z][a-z-]*|[A-Z]+)=(?:\['([^'\n]+)'\](?=:)|'([^'\n]+)'(?=:)|\"([^\"\n]+)\"(?=:)|(-?\d[\d.]*)(?=:))"
    return re.sub(given, r"\1 \2\3\4\5", re.sub(named, r"\1 \2=\3", text))


def in_keys(text: str, keys: Mapping[str, str], file: str) -> str:
    """Return a text of `in_flags` for the author of a file: `--gpu-memory 4: ...` becomes `FILE: gpu_memory = 4: ...`.

    keys: flag -> key of the file, for values that were not set by flags.
    """
    first = re.match(r"(--[a-z][a-z-]*|MODEL)(?=[ =:])", text)
    if first and first[1] in keys:
        key, rest = keys[first[1]], text[first.end() :]
        if key == "limits" and (limit := re.match(r" ([a-z_]+)(?==)", rest)):
            key, rest = f"limits.{limit[1]}", rest[limit.end() :]
        text = f"{file}: {key}" + re.sub(r"\A[ =]", " = ", rest)
    return re.sub(r"(?<![\w`-])--[a-z][a-z-]*(?<!-)", lambda match: keys.get(match[0], match[0]), text)


def in_flags(text: str, field: object, flags: Mapping[str, str]) -> str:
    """Return an error's text with its arguments as flags: `quant='nf5'` becomes `--quant nf5`, `gpu_memory`
    `--gpu-memory`.

    field: the error's, which begins the text. Plain words become flags only there or before "=".
    """
    if not flags:
        return text
    parts = _LISTED.split(text)
    parts[::2] = [_part_in_flags(part, field if at == 0 else None, flags) for at, part in enumerate(parts[::2])]
    return as_typed("".join(parts))


def _part_in_flags(text: str, field: object, flags: Mapping[str, str]) -> str:
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
            return f'{flag} "{value}"' if " " in value and '"' not in value else f"{flag} {value}"
        after = match.string[match.end() : match.end() + 1]
        is_other_value = match[0].endswith("=") and after.strip(".,;) ") != ""  # a tuple, for example
        return f"{flag}=" if is_other_value else flag

    edge = r"(?<![\w./\\'\"=-])"
    text = re.sub(
        rf"{edge}({names})=(?:'([^'\n]*)'|\"([^\"\n]*)\"|(-?\d+(?:\.\d+)?(?:e[+-]?\d+)?\b|-?inf\b|nan\b)|True\b|)", given, text
    )
    return re.sub(rf"{edge}({spelled})(?![\w=/\\'\"-]|\.\w)", lambda match: flags[match.group(1)], text)
