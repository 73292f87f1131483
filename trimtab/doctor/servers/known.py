"""The known facts about one bug of a server: the releases, the effect, the threads, and the check."""

from __future__ import annotations

import re
from dataclasses import dataclass

APPLIES, MAY_APPLY, FIXED = "applies", "may apply", "fixed"
MERGED, LATER = "fixed upstream, release not known", "came later"
STANDINGS = (APPLIES, MAY_APPLY, MERGED, FIXED, LATER)
# The fault's name in `verify --against`, if it is one that it tries.
FAULTS = (
    "ignored", "scale", "alpha_pattern ignored", "rank_pattern ignored", "DoRA ignored", "tower parts dropped",
    "connector part dropped",
    "expert part dropped", "one module dropped", "another adapter",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class ServerBug:
    """One entry.

    id: letter and number. title: what a user sees, in one line. when: the affected configuration. fault: its name in
    `verify --against`, "" for a refusal or an occasional wrong answer. seen: the release of the report ("" if not
    given). since: the first release with it, fixed_in: the first without it, if known. merged: the fix is merged, its
    release is unknown. evidence: the source of since and fixed_in. way_round: the workaround. sources: the threads.
    state: theirs, as read on `read`.
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
    merged: bool = False
    evidence: str = ""

    def standing(self, version: str | None) -> str:
        """Return whether it applies to a release: one of STANDINGS.

        "applies" from `since` on; if that is unknown, for the release of the report, including its patches.
        """
        here = numbers(version)
        if here is not None and self.fixed_in is not None and here >= (numbers(self.fixed_in) or ()):
            return FIXED
        if self.merged:
            return MERGED
        if here is None:
            return MAY_APPLY
        since, seen = numbers(self.since), numbers(self.seen)
        if since is not None:
            return APPLIES if here >= since else LATER
        return APPLIES if seen is not None and here[: len(seen)] == seen else MAY_APPLY


@dataclass(frozen=True, kw_only=True)
class Server:
    """One kind of server: its entries, and the first checks for any release."""

    name: str
    bugs: tuple[ServerBug, ...]
    checks: tuple[str, ...]


def numbers(version: str | None) -> tuple[int, ...] | None:
    """Return the numbers at the start of a release, None if there are none.

    "0.19.2rc1" -> 0, 19, 2; "0.4.6.post2" -> 0, 4, 6, 2; "b10121" -> 10121.
    """
    matched = re.match(r"[vb]?(\d{1,9}(?:\.(?:post)?\d{1,9}){0,5})", version or "", re.ASCII)
    return tuple(int(part.removeprefix("post")) for part in matched.group(1).split(".")) if matched else None
