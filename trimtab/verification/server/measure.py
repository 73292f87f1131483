"""The distance of a server's answers from each hypothesis: the mean difference of the logprobs that it returned.

For a server that returns only text, the distance is the difference between the log-probabilities of the local next
token and of the server's token, at each position of its answer. It is 0 while both are the same.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from trimtab.verification.server.local import Row

# One token that a server calls impossible must not outweigh all the others.
LARGEST = 10.0
# Number of the local most likely tokens on which a fault is measured if the server returns none.
OWN_TOP = 5


@dataclass(frozen=True)
class Values:
    """One hypothesis on one row: the logprobs of the compared tokens, and the distance from the server's answer."""

    logprobs: Tensor
    distance: float


@dataclass
class Measured:
    """Every hypothesis on every row. `ids` are the compared tokens: (position, token) pairs of each row."""

    rows: Sequence[Row]
    ids: list[list[tuple[int, int]]] = field(default_factory=list)
    values: dict[str, list[Values]] = field(default_factory=dict)

    def take_right(self, name: str, logprobs: Sequence[Tensor]) -> None:
        """Record the right answers first: they define the compared tokens if the server returns none."""
        self.ids = [_compared(row, one) for row, one in zip(self.rows, logprobs, strict=True)]
        self.take(name, logprobs)

    def take(self, name: str, logprobs: Sequence[Tensor]) -> None:
        """Record the logits of a hypothesis for all rows."""
        self.values[name] = [_values(row, ids, one) for row, ids, one in zip(self.rows, self.ids, logprobs, strict=True)]

    def distance(self, name: str, place: int) -> float:
        return self.values[name][place].distance

    def size(self, name: str, other: str, place: int) -> float:
        """Return the distance of two hypotheses on one row."""
        a, b = self.values[name][place].logprobs, self.values[other][place].logprobs
        return float((a - b).abs().clamp(max=LARGEST).mean())


def _compared(row: Row, logprobs: Tensor) -> list[tuple[int, int]]:
    if row.tops:
        return [(place, token) for place, top in enumerate(row.tops) for token in top]
    likely = torch.topk(logprobs, min(OWN_TOP, logprobs.shape[1]), dim=-1).indices.tolist()
    return [(place, token) for place, tokens in enumerate(likely) for token in tokens]


def _values(row: Row, ids: Sequence[tuple[int, int]], logprobs: Tensor) -> Values:
    places, tokens = (torch.tensor(column) for column in zip(*ids, strict=True))
    own = logprobs[places, tokens]
    if not row.tops:
        chosen = logprobs[torch.arange(len(row.tokens)), torch.tensor(row.tokens)]
        behind = logprobs.max(dim=-1).values - chosen
        return Values(own, float(behind.clamp(max=LARGEST).mean()))
    theirs = torch.tensor([row.tops[place][token] for place, token in ids])
    return Values(own, float((own - theirs).abs().clamp(max=LARGEST).mean()))


def between(a: Row, b: Row) -> float:
    """Return the distance of two answers of a server to one question, over their common prefix."""
    if not (a.tops and b.tops):
        return 0.0 if a.tokens == b.tokens else LARGEST
    gaps: list[float] = []
    for place in range(min(len(a.tops), len(b.tops))):
        gaps += _gaps(a.tops[place], b.tops[place])
        if a.tokens[place] != b.tokens[place]:
            break
    return sum(gaps) / len(gaps)


def _gaps(a: Mapping[int, float], b: Mapping[int, float]) -> list[float]:
    # A token in only one of the lists is at most as likely in the other as that list's last token.
    low_a, low_b = min(a.values()), min(b.values())
    return [min(abs(a.get(token, low_a) - b.get(token, low_b)), LARGEST) for token in {*a, *b}]


def is_identical(a: Row, b: Row) -> bool:
    """Return whether two answers are identical, including all digits."""
    return a.tokens == b.tokens and a.tops == b.tops
