"""When is a difference above the noise, with a stated false-alarm rate?"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

FALSE_ALARM_RATE = 1e-4
DRAWS = 8
# The largest ratio of a right route's noise to the random noise, in logits.
MARGIN = 2.0
# A measure and the power of the logits' difference with which it grows: KL grows with the square.
MEASURES: Mapping[str, int] = {"mean_abs": 1, "max_abs": 1, "kl_mean": 2}
# Below this, a measure is only float64 rounding.
_SMALLEST = 1e-14


@dataclass(frozen=True)
class Limits:
    """The limit of the noise on one prompt, for each of MEASURES."""

    mean_abs: float
    max_abs: float
    kl_mean: float


def limits(
    draws: Mapping[str, Sequence[Mapping[str, float]]], least: Mapping[str, Mapping[str, float]] | None = None,
    *, rate: float = FALSE_ALARM_RATE, margin: float = MARGIN,
) -> dict[str, Limits]:  # fmt: skip
    """Return the limits of each prompt, none if there are too few runs to estimate their spread.

    draws: prompt -> measures of each randomized run. least: prompt -> measures that are certainly noise (another order of
    summation); the mean of the noise is at least these. A prediction bound: the reference answers DRAWS more times with random
    roundings. The logarithm of each measure is assumed to be normal, with a mean for each prompt and one variance for all; a
    further run exceeds the bound with probability FALSE_ALARM_RATE for all prompts and measures together (Bonferroni).
    """
    known = {prompt: rows for prompt, rows in draws.items() if rows}
    freedom = sum(len(rows) - 1 for rows in known.values())
    if freedom < 2:
        return {}
    each = rate / (len(known) * len(MEASURES))
    by_prompt: dict[str, dict[str, float]] = {prompt: {} for prompt in known}
    for measure, power in MEASURES.items():
        logs = {p: [math.log(max(row[measure], _SMALLEST)) for row in rows] for p, rows in known.items()}
        means = {p: math.fsum(values) / len(values) for p, values in logs.items()}
        variance = math.fsum((v - means[p]) ** 2 for p, values in logs.items() for v in values) / freedom
        for prompt, values in logs.items():
            middle = max(means[prompt], math.log(max((least or {}).get(prompt, {}).get(measure, 0.0), _SMALLEST)))
            spread = math.sqrt(variance * (1 + 1 / len(values)))
            reach = middle + student_quantile(each, freedom) * spread + power * math.log(margin)
            by_prompt[prompt][measure] = math.exp(min(reach, 700.0))
    return {prompt: Limits(**values) for prompt, values in by_prompt.items()}


def student_quantile(rate: float, freedom: int) -> float:
    """Return a value that Student's t exceeds with probability at most `rate`, for small rates.

    Source: P(T > t) <= c / t * n / (n - 1) * (1 + t^2 / n)^(-(n - 1) / 2), from x / t >= 1 under the integral; c is the
    density's constant. For rates below 1e-3 it is at most a few percent above the quantile.
    """
    n = freedom
    constant = math.exp(math.lgamma((n + 1) / 2) - math.lgamma(n / 2)) / math.sqrt(n * math.pi)

    def log_tail(t: float) -> float:
        return math.log(constant / t * n / (n - 1)) - (n - 1) / 2 * math.log1p(t * t / n)

    low, high = 1e-3, 1e9
    while high / low > 1 + 1e-9:
        middle = math.sqrt(low * high)
        low, high = (middle, high) if log_tail(middle) > math.log(rate) else (low, middle)
    return high


def symmetric_limit(rate: float, tests: int) -> float:
    """Return the limit that |sum of x| / sqrt(sum of x^2) exceeds with probability at most `rate` in any of several
    tests.

    For independent x of any size that are as likely positive as negative: P(S > t) <= exp(-t^2 / 2).
    Source: Hoeffding's bound for random signs; Efron, Student's t-test under symmetry conditions, 1969.
    """
    return math.sqrt(2 * math.log(2 * max(1, tests) / rate))
