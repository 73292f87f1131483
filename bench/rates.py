"""Exact bounds of rates that were counted. Pure."""

from math import comb


def at_most(alarms: int, cases: int) -> float | None:
    """Return the upper bound, with 95 % confidence, of a rate that gave so many alarms; None without a case.

    Source: Clopper and Pearson 1934. The rate at which so few alarms have a chance of 5 %, by bisection.
    """
    if not cases:
        return None
    low, high = 0.0, 1.0
    for _ in range(60):
        rate = (low + high) / 2
        few = sum(comb(cases, k) * rate**k * (1 - rate) ** (cases - k) for k in range(alarms + 1))
        low, high = (rate, high) if few > 0.05 else (low, rate)
    return round(high, 4)


def at_least(right: int, cases: int) -> float | None:
    """Return the lower bound, with 95 % confidence, of a rate that gave so many right ones; None without a case."""
    most = at_most(cases - right, cases)
    return None if most is None else round(1 - most, 4)
