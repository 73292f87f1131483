"""Which errors does this package raise on purpose?"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

from trimtab.printable import printable

# An adapter for another model can have hundreds of mismatches of one kind.
SHOWN_PROBLEMS = 5


def gib(byte_count: int) -> str:
    """Return a byte count for people: "3.25 GiB", "12.0 MiB" or "17 B"."""
    if abs(byte_count) >= 2**30:
        return f"{byte_count / 2**30:.2f} GiB"
    if abs(byte_count) >= 2**20:
        return f"{byte_count / 2**20:.1f} MiB"
    if abs(byte_count) >= 2**10:
        return f"{byte_count / 2**10:.1f} KiB"
    return f"{byte_count} B"


def choices_text(allowed: Sequence[str], near: Sequence[str] = ()) -> str:
    """Return the names that a wrong one probably meant, as a question; every choice where none is near."""
    if near:
        *others, last = near
        return f" (did you mean {', '.join(others)}{' or ' if others else ''}{last}?)"
    return f" (choices: {', '.join(allowed)})" if allowed else ""


def public_fields(error: BaseException) -> dict[str, Any]:
    """Return the fields that code reads: attributes without a leading underscore."""
    return {name: value for name, value in vars(error).items() if not name.startswith("_")}


class TrimtabError(Exception):
    """Every error that this package raises on purpose.

        TrimtabError
          RequestError      the question is wrong              field, value, allowed
          CheckpointError   a file is not what it claims       path, tensor_name
          DoesNotFitError   no placement within the budgets    block, device, needed_bytes, budget_bytes, needs_both
          AdapterError      adapter and model do not match     path, problems (all of them, with both shapes)
          DeviceError       the machine refused at run time    device, block, planned_bytes, free_bytes
          ParityError       two routes differ too much         position, max_abs, mean_abs, tolerance
          UpstreamError     a known bug is in the way          package, installed, fixed_in, url

    The class writes the message; code reads the fields, never the text. Exit codes: process/exit_codes.py.
    """

    def __init__(self, message: str, *, hint: str = "") -> None:
        self.hint = hint
        end = "" if message.endswith((".", "?", "!")) else "."
        super().__init__(printable(f"{message}{end} {hint}" if hint else message))

    def to_dict(self) -> dict[str, Any]:
        """Return class, message and fields as plain values, for another process or for JSON."""
        return {"class": type(self).__name__, "message": str(self), "fields": public_fields(self)}

    @staticmethod
    def from_dict(values: Mapping[str, Any]) -> TrimtabError:
        """Return the error that `to_dict` wrote. A class that this file does not define becomes DeviceError."""
        kind = next((known for known in KINDS if known.__name__ == values["class"]), DeviceError)
        error = kind.__new__(kind)
        Exception.__init__(error, values["message"])
        fields = values["fields"].items()
        vars(error).update({name: tuple(value) if isinstance(value, list) else value for name, value in fields})
        return error


class RequestError(TrimtabError):
    """The question is wrong: an option that names nothing, contradicts another or has no effect.

    allowed: every accepted value. near: the probable intended values; the message names only these.
    number: index of the image or audio clip, from 0.
    """

    near: tuple[str, ...] = ()
    number: int | None = None

    def __init__(
        self, reason: str, *, field: str, value: Any = None, allowed: Sequence[str] = (), near: Sequence[str] = (),
        hint: str = "", number: int | None = None,
    ) -> None:  # fmt: skip
        self.reason, self.field, self.value, self.allowed = reason, field, value, tuple(allowed)
        if near:
            self.near = tuple(near)
        if number is not None:
            self.number = number
        message = f"{field}={value!r}: {reason}" if value is not None else f"{field}: {reason}"
        super().__init__(message + choices_text(self.allowed, self.near), hint=hint)


class CheckpointError(TrimtabError):
    """A file is not what it claims to be.

    field, value, allowed: of a saved plan, the part that cannot be read, such as "plan.version". field is None for
    other files.
    """

    field: str | None = None
    value: Any = None
    allowed: tuple[str, ...] = ()

    def __init__(
        self, reason: str, *, path: str | os.PathLike[str], tensor_name: str | None = None, cause: RequestError | None = None,
        hint: str = "",
    ) -> None:  # fmt: skip
        self.path, self.tensor_name = os.fspath(path), tensor_name
        if cause is not None:
            self.field, self.value, self.allowed = cause.field, cause.value, cause.allowed
        where = f"{self.path}, tensor {tensor_name}" if tensor_name else self.path
        super().__init__(f"{where}: {reason}", hint=hint)


class DoesNotFitError(TrimtabError):
    """No placement keeps every device within its budget. needs_both: whether a larger budget of one device is not
    enough.

    smallest: of a plan, the smallest sufficient budgets in words, with their arguments. option: the change of its request
    that helps most, "" if none does; option_bytes: the smallest budget with it, 0 if the present one is enough. options:
    the table of `trimtab plan --options --json`: the plans of changed requests, each a `plan.options.Option` as JSON.
    """

    options: tuple[Mapping[str, Any], ...] = ()
    smallest: str = ""
    option: str = ""
    option_bytes: int = 0

    def __init__(
        self, reason: str, *, block: str | None, device: str, needed_bytes: int, budget_bytes: int, hint: str = "",
        needs_both: bool = False, smallest: str = "", option: str = "", option_bytes: int = 0,
    ) -> None:  # fmt: skip
        self.reason, self.block, self.device = reason, block, device
        self.needed_bytes, self.budget_bytes, self.needs_both = needed_bytes, budget_bytes, needs_both
        if smallest:
            self.smallest, self.option, self.option_bytes = smallest, option, option_bytes
            enough = f"{gib(option_bytes)} are enough" if option_bytes else "it fits this one"
            helps = f", and with {option}, which helps most, {enough}" if option else ""
            super().__init__(f"{reason}; the smallest that it fits is {smallest}{helps}", hint=hint)
            return
        where = f"{block} on {device}" if block else device
        super().__init__(
            f"{where} needs {gib(needed_bytes)} ({needed_bytes} B), the budget is {gib(budget_bytes)} ({budget_bytes} B): {reason}",
            hint=hint,
        )


class AdapterError(TrimtabError):
    """Adapter and model do not match; `problems` lists every mismatch.

    about: what the first line says before their number.
    """

    def __init__(self, path: str | os.PathLike[str], problems: Sequence[str], *, hint: str = "", about: str = "") -> None:
        self.path, self.problems = os.fspath(path), tuple(problems)
        shown = [f"  - {problem}" for problem in self.problems[:SHOWN_PROBLEMS]]
        if len(self.problems) > SHOWN_PROBLEMS:
            shown.append(f"  - and {len(self.problems) - SHOWN_PROBLEMS} more (`problems` has all)")
        count = len(self.problems)
        lines = [f"{self.path}: {about}{count} problem{'s' if count != 1 else ''}", *shown]
        super().__init__("\n".join([*lines, hint] if hint else lines))
        self.hint = hint


class DeviceError(TrimtabError):
    """The machine refused while running.

    planned_bytes, free_bytes: the planned bytes of the process and the free bytes if memory ran out; else None.
    """

    def __init__(
        self, reason: str, *, device: str, block: str | None = None, planned_bytes: int | None = None,
        free_bytes: int | None = None, hint: str = "",
    ) -> None:  # fmt: skip
        self.device, self.block = device, block
        self.planned_bytes, self.free_bytes = planned_bytes, free_bytes
        super().__init__(f"{device}{f', {block}' if block else ''}: {reason}", hint=hint)


class ParityError(TrimtabError):
    """Two routes to the same answer differ by more than their noise floor.

    position: of the first logits that differ; -1 if weights differ.
    """

    def __init__(self, reason: str, *, position: int, max_abs: float, mean_abs: float, tolerance: float, hint: str = "") -> None:
        self.position, self.max_abs, self.mean_abs, self.tolerance = position, max_abs, mean_abs, tolerance
        apart = f": first difference at position {position}, max {max_abs:.3g}, mean {mean_abs:.3g}, tolerance {tolerance:.3g}"
        super().__init__(reason + (apart if position >= 0 else ""), hint=hint)


class UpstreamError(TrimtabError):
    """A known bug of another package is in the way."""

    def __init__(
        self, reason: str, *, package: str, installed: str, fixed_in: str | None = None, url: str = "", hint: str = ""
    ) -> None:
        self.package, self.installed, self.fixed_in, self.url = package, installed, fixed_in, url
        fixed = f"fixed in {fixed_in}" if fixed_in else "not fixed in a release known to us"
        super().__init__(f"{package} {installed} ({fixed}): {reason}{f' ({url})' if url else ''}", hint=hint)


# In the order of their exit codes (process/exit_codes.py).
KINDS: tuple[type[TrimtabError], ...] = (
    RequestError, CheckpointError, DoesNotFitError, AdapterError, DeviceError, ParityError, UpstreamError,
)  # fmt: skip
