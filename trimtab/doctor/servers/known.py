"""What is known about one bug of a server: to which releases it applies, what it does, where it is told, what to check."""

from __future__ import annotations

import re
from dataclasses import dataclass

APPLIES, MAY_APPLY, FIXED = "applies", "may apply", "fixed"
# What `verify --against` calls the fault, where it is one of those that it tries.
FAULTS = (
    "ignored", "scale", "alpha_pattern ignored", "rank_pattern ignored", "DoRA ignored", "tower parts dropped",
    "expert part dropped", "one module dropped", "another adapter",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class ServerBug:
    """One entry.

    id: letter and number. title: what a user sees, in one line. when: whom it hits. fault: what `verify --against` calls it, ""
    for one that is refused or answers wrongly from time to time. seen: the release it was reported with ("" if not said). since,
    fixed_in: releases, where known. way_round: what helps today. sources: the threads. state: theirs, as read on `read`.
    """

    id: str
    title: str
    when: str
    way_round: str
    sources: tuple[str, ...]
    state: str
    read: str
    fault: str = ""
    seen: str = ""
    since: str | None = None
    fixed_in: str | None = None

    def standing(self, version: str | None) -> str:
        """Return whether it applies to a release: "applies" only from the release on that it was seen with."""
        here = numbers(version)
        if here is None:
            return MAY_APPLY
        if self.fixed_in is not None and here >= (numbers(self.fixed_in) or ()):
            return FIXED
        first = numbers(self.since or self.seen)
        return APPLIES if first is not None and here == first else MAY_APPLY


@dataclass(frozen=True, kw_only=True)
class Server:
    """One kind of server: its entries, and what to check first with any release."""

    name: str
    bugs: tuple[ServerBug, ...]
    checks: tuple[str, ...]


def numbers(version: str | None) -> tuple[int, ...] | None:
    """Return the numbers at the start of a release ("0.19.2rc1" -> 0, 19, 2; "b10121" -> 10121), None if there are none."""
    matched = re.match(r"[vb]?(\d{1,9}(?:\.\d{1,9}){0,5})", version or "", re.ASCII)
    return tuple(int(part) for part in matched.group(1).split(".")) if matched else None
