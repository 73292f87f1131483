"""How far apart are two sets of logits, and is that more than the measured noise?"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from itertools import combinations
from typing import TYPE_CHECKING, Any, Literal

from trimtab.errors import RequestError
from trimtab.verification.routes import alarm_rate
from trimtab.verification.routes.alarm_rate import Limits

if TYPE_CHECKING:
    import torch
    from torch import Tensor

Verdict = Literal["same", "same within noise", "cannot tell", "differs"]
SAME, WITHIN_NOISE, CANNOT_TELL, DIFFERS = "same", "same within noise", "cannot tell", "differs"
ORDER, DRAW = "order", "draw"
# Float64 values in one chunk of a comparison, which needs about six arrays of this size.
_PIECE_VALUES = 4 * 2**20


@dataclass(frozen=True)
class Difference:
    """Two logits [S, V] of the same tokens, compared.

    first_position: the first one with any unequal value, None if there is none. max_abs, mean_abs: of all values. KL in
    nats, of the first's distribution from the second's. top1_agreement: share of positions with the same largest value.
    A NaN in either makes max_abs, mean_abs and KL infinite.
    """

    positions: int
    first_position: int | None
    max_abs: float
    mean_abs: float
    kl_mean: float
    kl_max: float
    top1_agreement: float
    max_abs_by_position: tuple[float, ...] = field(repr=False)
    kl_by_position: tuple[float, ...] = field(repr=False)

    @property
    def is_same(self) -> bool:
        """Whether every value is equal."""
        return self.first_position is None

    def to_json(self) -> dict[str, Any]:
        """Return the difference as JSON-ready values; infinities as the text "inf"."""
        values = {name: getattr(self, name) for name in self.__dataclass_fields__}
        return {name: _plain(value) for name, value in values.items()}


@dataclass(frozen=True)
class Noise:
    """One pair of runs of the same route: the two runs and their distance.

    kind: "order" of two orders of summation; "draw" of a run with random roundings and the first run.
    """

    prompt_id: str
    first: str
    second: str
    max_abs: float
    mean_abs: float
    kl_mean: float
    kl_max: float
    kind: str = ORDER

    def measures(self) -> dict[str, float]:
        """Return the values that the criterion compares."""
        return {name: getattr(self, name) for name in alarm_rate.MEASURES}


@dataclass(frozen=True)
class NoiseFloor:
    """The differences between runs of one route: the maxima over `pairs`. skipped: order changes that were impossible.

    The maxima are for the reader; verdicts use `limits`.
    """

    pairs: tuple[Noise, ...] = ()
    skipped: tuple[str, ...] = ()

    @property
    def max_abs(self) -> float:
        return max((pair.max_abs for pair in self.pairs), default=0.0)

    @property
    def mean_abs(self) -> float:
        return max((pair.mean_abs for pair in self.pairs), default=0.0)

    @property
    def kl_max(self) -> float:
        return max((pair.kl_max for pair in self.pairs), default=0.0)

    @property
    def orders(self) -> tuple[str, ...]:
        """The names of the runs that were compared."""
        return tuple(dict.fromkeys(name for pair in self.pairs for name in (pair.first, pair.second)))

    @property
    def is_measured(self) -> bool:
        """Whether there were enough runs to measure the noise."""
        return bool(self.limits)

    @cached_property
    def limits(self) -> dict[str, Limits]:
        """The limit of the noise for each prompt; empty if there were too few runs."""
        draws: dict[str, list[dict[str, float]]] = {}
        least: dict[str, dict[str, float]] = {}
        for pair in self.pairs:
            measures = pair.measures()
            if not all(math.isfinite(value) for value in measures.values()):
                continue
            if pair.kind == DRAW:
                draws.setdefault(pair.prompt_id, []).append(measures)
            else:
                known = least.setdefault(pair.prompt_id, measures)
                least[pair.prompt_id] = {name: max(known[name], value) for name, value in measures.items()}
        return alarm_rate.limits(draws, least)

    @property
    def limit(self) -> Limits | None:
        """The largest limits of all prompts, None if the noise is unknown."""
        rows = self.limits.values()
        if not rows:
            return None
        return Limits(**{name: max(getattr(row, name) for row in rows) for name in alarm_rate.MEASURES})

    def verdict(self, difference: Difference, prompt_id: str | None = None) -> Verdict:
        """Return the verdict on a difference with this noise; prompt_id None: with that of the noisiest prompt."""
        if difference.is_same:
            return "same"
        if not math.isfinite(difference.max_abs):
            return "differs"
        limit = self.limits.get(prompt_id) if prompt_id is not None else self.limit
        if limit is None:
            return "cannot tell"
        within = all(getattr(difference, name) <= getattr(limit, name) for name in alarm_rate.MEASURES)
        return "same within noise" if within else "differs"

    def to_json(self) -> dict[str, Any]:
        """Return the floor as JSON-ready values."""
        return {
            "max_abs": _plain(self.max_abs), "mean_abs": _plain(self.mean_abs), "kl_max": _plain(self.kl_max),
            "orders": list(self.orders), "skipped": list(self.skipped), "pairs": len(self.pairs),
            "largest": _largest(self.pairs), "is_measured": self.is_measured,
            "limits": {prompt: asdict(limit) for prompt, limit in self.limits.items()},
            "false_alarm_rate": alarm_rate.FALSE_ALARM_RATE, "margin": alarm_rate.MARGIN,
            "draws": sum(pair.kind == DRAW for pair in self.pairs),
        }  # fmt: skip


def _largest(pairs: Sequence[Noise]) -> list[dict[str, Any]]:
    """Return the pair with the largest difference for every two orders."""
    noises: dict[tuple[str, str], Noise] = {}
    for pair in pairs:
        known = noises.get((pair.first, pair.second))
        if known is None or pair.max_abs > known.max_abs:
            noises[pair.first, pair.second] = pair
    return [
        {"first": p.first, "second": p.second, "prompt": p.prompt_id, "max_abs": _plain(p.max_abs),
         "kl_max": _plain(p.kl_max)} for p in noises.values()
    ]  # fmt: skip


def worst(verdicts: Iterable[str]) -> Verdict:
    """Return the verdict of several: the worst of them, `same` for none."""
    present = set(verdicts)
    order: tuple[Verdict, ...] = ("differs", "cannot tell", "same within noise")
    return next((verdict for verdict in order if verdict in present), "same")


def difference(first: Tensor, second: Tensor) -> Difference:
    """Return the difference of two logits.

    Shapes: [S, V] each, any floating dtypes, on one device. Errors: RequestError if the shapes differ. Source: KL(P || Q) = sum_v
    P(v) (ln P(v) - ln Q(v)), P and Q the softmax of the first and the second. It is computed in float64, a few positions at a time,
    so that [S, 262144] needs no second copy.
    """
    import torch  # here: the verdicts are read before it is needed

    if first.shape != second.shape or first.dim() != 2:
        raise RequestError(
            f"logits of shape {list(first.shape)} cannot be compared with {list(second.shape)}", field="logits",
            hint="Both sides need the same tokens and the same vocabulary",
        )  # fmt: skip
    positions, vocabulary = first.shape
    step = max(1, _PIECE_VALUES // max(1, vocabulary))
    largest: list[float] = []
    sums: list[float] = []
    divergences: list[float] = []
    agreed = 0
    with torch.no_grad():
        for start in range(0, positions, step):
            a, b = first[start : start + step].double(), second[start : start + step].double()
            agreed += int((a.argmax(-1) == b.argmax(-1)).sum())
            apart = _apart(a, b)
            largest += apart.amax(-1).tolist()
            sums += apart.sum(-1).tolist()
            divergences += _kl(a, b).tolist()
    count = max(1, positions)
    return Difference(
        positions=positions, first_position=next((at for at, value in enumerate(largest) if value > 0), None),
        max_abs=max(largest, default=0.0), mean_abs=math.fsum(sums) / (count * max(1, vocabulary)),
        kl_mean=math.fsum(divergences) / count, kl_max=max(divergences, default=0.0), top1_agreement=agreed / count,
        max_abs_by_position=tuple(largest), kl_by_position=tuple(divergences),
    )  # fmt: skip


def _apart(a: Tensor, b: Tensor) -> Tensor:
    """Return |a - b| [S, V]; 0 for equal infinities, infinite for NaN."""
    apart = (a - b).abs_().masked_fill_(a == b, 0.0)
    return apart.nan_to_num_(nan=math.inf, posinf=math.inf)


def _kl(a: Tensor, b: Tensor) -> Tensor:
    """Return KL in nats of every position: [S, V], [S, V] -> [S]."""
    log_p, log_q = a.log_softmax(-1), b.log_softmax(-1)
    p = log_p.exp()
    per_position = (p * (log_p - log_q)).masked_fill_(p == 0, 0.0).sum(-1)
    # The sum of rounded terms of two nearly equal distributions can be slightly below zero.
    return per_position.clamp_min(0.0).masked_fill_(per_position.isnan(), math.inf)


def drawn_noise(
    prompt_id: str, first: str, once: Tensor, draws: Mapping[str, Tensor], device: torch.device | str = "cpu"
) -> tuple[Noise, ...]:
    """Return the difference of each run with random roundings from the first run, computed on a device."""
    rows = []
    for name, logits in draws.items():
        apart = difference(once.to(device), logits.to(device))
        rows.append(Noise(prompt_id, first, name, apart.max_abs, apart.mean_abs, apart.kl_mean, apart.kl_max, DRAW))
    return tuple(rows)


def noise_between(prompt_id: str, runs: Mapping[str, Tensor], device: torch.device | str = "cpu") -> tuple[Noise, ...]:
    """Return the differences of every two runs of one route on one prompt, computed on a device.

    runs: order of summation -> logits [S, V].
    """
    noises = []
    for (first, a), (second, b) in combinations(runs.items(), 2):
        apart = difference(a.to(device), b.to(device))
        noises.append(Noise(prompt_id, first, second, apart.max_abs, apart.mean_abs, apart.kl_mean, apart.kl_max))
    return tuple(noises)


def relative_by_layer(first: Sequence[Tensor], second: Sequence[Tensor]) -> tuple[float, ...]:
    """Return ||a - b|| / ||a|| of every layer's hidden states ([S, D] each), in float64."""
    relative = []
    for a, b in zip(first, second, strict=True):
        length = float(a.double().norm())
        apart = float((a.double() - b.double()).norm())
        relative.append(apart / length if length else (math.inf if apart else 0.0))
    return tuple(relative)


def _plain(value: Any) -> Any:
    if isinstance(value, tuple):
        return [_plain(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value
