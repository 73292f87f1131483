"""Which figures do runs have: medians with their spread, and the first difference of two answers?"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import ceil
from statistics import median
from typing import Any

# The figures of a run in the order of the table: (name, unit, whether more is better).
FIGURES = (
    ("load_s", "s", False), ("first_token_ms", "ms", False), ("decode_tok_s", "tok/s", True),
    ("between_p50_ms", "ms", False), ("between_p99_ms", "ms", False), ("cpu_ms", "ms", False),
    ("expert_hits_pct", "%", True), ("device_peak_gib", "GiB", False),
    ("host_peak_gib", "GiB", False),
)  # fmt: skip
NAMES = {
    "load_s": "load", "first_token_ms": "first token", "decode_tok_s": "decode", "between_p50_ms": "between tokens, p50",
    "between_p99_ms": "between tokens, p99", "cpu_ms": "CPU time per token", "expert_hits_pct": "chosen experts in slots",
    "device_peak_gib": "device peak", "host_peak_gib": "host peak",
}  # fmt: skip


@dataclass(frozen=True)
class Spread:
    """The median of several runs, with their minimum and maximum."""

    median: float
    least: float
    most: float
    count: int

    def to_json(self) -> dict[str, Any]:
        return {"median": self.median, "min": self.least, "max": self.most, "runs": self.count}


def spread(values: Sequence[float]) -> Spread | None:
    """Return the spread of some values, None for none."""
    return Spread(median(values), min(values), max(values), len(values)) if values else None


def percentile(values: Sequence[float], share: float) -> float:
    """Return the percentile of the values by nearest rank."""
    ordered = sorted(values)
    return ordered[max(ceil(share * len(ordered)), 1) - 1]


def run_figures(row: Mapping[str, Any]) -> dict[str, float]:
    """Return the figures of one run.

    row: load_s, device_peak_bytes, host_peak_bytes (0: not known), expert_hits where steps choose among slots, and answers
    (first_ms, gaps_ms, cpu_ms: as `Clock.told`). First tokens are a median over the prompts, gaps of all prompts together.
    """
    gaps = [gap for answer in row["answers"] for gap in answer["gaps_ms"]]
    values = {"load_s": row["load_s"], "first_token_ms": median(answer["first_ms"] for answer in row["answers"])}
    if sum(gaps) > 0:
        values["decode_tok_s"] = 1000 * len(gaps) / sum(gaps)
        values |= {"between_p50_ms": percentile(gaps, 0.5), "between_p99_ms": percentile(gaps, 0.99)}
        values["cpu_ms"] = sum(answer["cpu_ms"] for answer in row["answers"]) / len(gaps)
    if row.get("expert_hits") is not None:
        values["expert_hits_pct"] = 100 * row["expert_hits"]
    for name in ("device", "host"):
        if row.get(f"{name}_peak_bytes"):
            values[f"{name}_peak_gib"] = row[f"{name}_peak_bytes"] / 2**30
    return values


def spreads(rows: Sequence[Mapping[str, Any]]) -> dict[str, Spread]:
    """Return the spread of every figure over the runs of one engine; a figure that no run has is omitted."""
    by_name = {name: spread([row["figures"][name] for row in rows if name in row["figures"]]) for name, _, _ in FIGURES}
    return {name: value for name, value in by_name.items() if value is not None}


def ratios(ours: Sequence[Mapping[str, Any]], other: Sequence[Mapping[str, Any]], name: str) -> Spread | None:
    """Return trimtab's value of one figure divided by the other engine's, for every pair of consecutive runs."""
    by_run = {row["run"]: row["figures"].get(name) for row in other}
    pairs = [(row["figures"].get(name), by_run.get(row["run"])) for row in ours]
    return spread([a / b for a, b in pairs if a and b])


def first_difference(a: Sequence[int], b: Sequence[int]) -> int | None:
    """Return the index of the first token that differs, None for equal answers; the end of the shorter one counts."""
    for place, (one, other) in enumerate(zip(a, b, strict=False)):
        if one != other:
            return place
    return None if len(a) == len(b) else min(len(a), len(b))


def differences(rows: Sequence[Mapping[str, Any]], others: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return for each prompt whether the first runs of two engines gave the same tokens, else the first difference."""
    if not rows or not others:
        return []
    parted = []
    for one, other in zip(rows[0]["answers"], others[0]["answers"], strict=True):
        place = first_difference(one["token_ids"], other["token_ids"])
        parted.append({"id": one["id"], "tokens": len(one["token_ids"]), "equal": place is None, "first_difference": place})
    return parted


def unsteady(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the prompts for which later runs of the same engine gave other tokens than the first run."""
    tokens_of: Callable[[Mapping[str, Any]], dict[str, list[int]]] = lambda row: {  # noqa: E731
        answer["id"]: list(answer["token_ids"]) for answer in row["answers"]
    }
    first = tokens_of(rows[0]) if rows else {}
    return sorted({name for row in rows[1:] for name, ids in tokens_of(row).items() if ids != first[name]})
