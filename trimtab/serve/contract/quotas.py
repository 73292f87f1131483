"""How many requests and tokens may one API key have?"""

from __future__ import annotations

import hmac
import math
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields

from trimtab.errors import RequestError

MINUTE_S, DAY_S = 60.0, 86400.0


@dataclass(frozen=True, kw_only=True)
class KeyLimits:
    """The limits of one key (None: no limit). name: in the log and the metrics.

    concurrent: requests that wait or are answered. requests_per_minute: requests that began in the last 60 seconds.
    tokens_per_day: tokens of prompts and answers in the 24 hours after the first counted one; for a failed request, or
    if the client left, the computed tokens.
    """

    name: str
    concurrent: int | None = None
    requests_per_minute: int | None = None
    tokens_per_day: int | None = None

    def __post_init__(self) -> None:
        for item in fields(self)[1:]:
            value = getattr(self, item.name)
            if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
                raise RequestError("must be an integer of at least 1", field=f"keys.{self.name}.{item.name}", value=value)


class QuotaError(RequestError):
    """A key has used its quota. `retry_after_s`: seconds until the next request is allowed."""

    def __init__(self, limit: str, most: int, retry_after_s: float) -> None:
        self.retry_after_s = retry_after_s
        words = {"concurrent": "requests at once", "requests_per_minute": "requests a minute", "tokens_per_day": "tokens a day"}
        super().__init__(
            f"this key may use {most} {words[limit]}", field=limit, hint=f"Try again in {math.ceil(retry_after_s)} seconds"
        )


@dataclass(eq=False)
class Use:
    """The use of one key. A request `enter`s it, `charge`s it with tokens, also after its end, and `leave`s it at the end."""

    running: int = 0
    began: deque[float] = field(default_factory=deque)
    tokens: int = 0
    day_began: float = -math.inf

    def enter(self, limits: KeyLimits, now: float) -> None:
        """Count a new request. Errors: QuotaError."""
        while self.began and now - self.began[0] >= MINUTE_S:
            self.began.popleft()
        if now - self.day_began >= DAY_S:
            self.day_began, self.tokens = now, 0
        if limits.concurrent is not None and self.running >= limits.concurrent:
            raise QuotaError("concurrent", limits.concurrent, 1.0)
        if limits.requests_per_minute is not None and len(self.began) >= limits.requests_per_minute:
            raise QuotaError("requests_per_minute", limits.requests_per_minute, MINUTE_S - (now - self.began[0]))
        if limits.tokens_per_day is not None and self.tokens >= limits.tokens_per_day:
            raise QuotaError("tokens_per_day", limits.tokens_per_day, DAY_S - (now - self.day_began))
        self.running += 1
        self.began.append(now)

    def charge(self, tokens: int) -> None:
        self.tokens += tokens

    def leave(self, tokens: int = 0) -> None:
        self.running -= 1
        self.charge(tokens)


class Quotas:
    """Counts the use of each key. limits: key -> its limits; other keys have no limits."""

    def __init__(self, limits: Mapping[str, KeyLimits], *, now: Callable[[], float] = time.monotonic) -> None:
        self._limits, self._now = dict(limits), now
        self._used: dict[str, Use] = {}

    def use(self, limits: Mapping[str, KeyLimits]) -> None:
        """Use other limits. The use of a key with the same name is kept."""
        self._limits = dict(limits)
        names = {one.name for one in limits.values()}
        self._used = {name: used for name, used in self._used.items() if name in names or used.running}

    def of(self, credential: str) -> KeyLimits | None:
        """Return the limits of a request's key, None for a key without limits. credential: as access control has read
        it.
        """
        key_bytes = credential.encode("latin-1")
        best = None
        for key, limits in self._limits.items():  # all are compared, each in constant time
            if hmac.compare_digest(key_bytes, key.encode()):
                best = limits
        return best

    def enter(self, limits: KeyLimits) -> Use:
        """Count a new request, and return its key's use. Errors: QuotaError."""
        used = self._used.setdefault(limits.name, Use())
        used.enter(limits, self._now())
        return used
