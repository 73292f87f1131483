"""What a server's answers say of its adapter: alive, ignored, wrong in a known way, or that it cannot be told.

Every fault is held against the right adapter question by question: on how many questions is the server's answer nearer to the fault
than to the right one? If the server were right, a question would be nearer to the fault at most as often as not, so that all of n
questions are has a chance of at most 2^-n: a sign test, which needs no noise model. The number of faults multiplies that chance.
A verdict also needs size: the nearer one must be nearer by half. Pure: numbers in, a verdict out; imports no torch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import comb
from typing import Literal

Word = Literal["alive", "ignored", "wrong", "cannot tell"]
ALIVE: Word = "alive"
IGNORED: Word = "ignored"
WRONG: Word = "wrong"
CANNOT_TELL: Word = "cannot tell"
RIGHT = "right"
# The chance, over all faults together, at which a right server may be called wrong, and a fault be taken for excluded.
FALSE_ALARM, OVERLOOKED = 0.005, 0.05
# The nearer hypothesis is at most so far away as the other one, in means.
NEARER = 0.5
EXCLUDED_AT = 0.65
# A question tells of a fault where the fault moves the answer by this share of what it does to any question, or else by twice the
# noise and no less than the second share.
TELLING, TELLING_ABOVE_NOISE, TWICE = 0.25, 0.02, 2.0
# Beyond this share of the adapter's whole effect an answer is no longer the adapter's.
NOT_RIGHT = 0.3
TIMES_NOISE = 3.0
SMALLEST = 1e-9
# Answers farther from right than this and than twice the base's noise may be those of an adapter with slightly other values.
SAME_VALUES, TWICE_BASE = 0.02, 2.0
OTHER_VALUES = "another version of the adapter"


@dataclass(frozen=True)
class Asked:
    """One question's numbers. distance: hypothesis ("right" or a fault's name) -> how far the server's answer is from it.

    size: fault -> how far the fault moves our own right answer. base_noise: how far the server's base is from ours on this
    question, None if the server's base was not asked.
    """

    id: str
    kind: str
    distance: Mapping[str, float]
    size: Mapping[str, float]
    base_noise: float | None = None


@dataclass(frozen=True)
class Weighed:
    """One fault beside the right adapter.

    size: how far it moves the answers. distance, right_distance: of the server's answers from it and from the right ones, on the
    `questions` that tell of it. nearer: on how many of them the fault is nearer; farther: the right one. Ties count for neither.
    """

    name: str
    what: str
    is_part: bool
    size: float
    distance: float
    right_distance: float
    questions: int
    nearer: int
    farther: int

    @property
    def alarm(self) -> float:
        """The chance that a right server looks so much like the fault."""
        return sign_test(self.nearer, self.farther)

    @property
    def overlooked(self) -> float:
        """The chance that a server with the fault looks so much like a right one."""
        return sign_test(self.farther, self.nearer)

    def is_seen(self, faults: int) -> bool:
        """Whether the answers show this fault, among so many."""
        return faults * self.alarm <= FALSE_ALARM and self.distance <= NEARER * self.right_distance

    def is_excluded(self, faults: int) -> bool:
        """Whether the answers exclude this fault, among so many."""
        return faults * self.overlooked <= OVERLOOKED and self.right_distance <= EXCLUDED_AT * self.distance


@dataclass(frozen=True)
class Verdict:
    """What came out. fault: which one, "" for none that is known here. confidence: of the word, None where nothing can be told.

    false_alarm_rate: at most how often a right server would be called wrong. noise: mean distance of the right answers' kind.
    visible_from: the smallest mean shift that would have been seen. unseen: faults that remain possible. is_confident: False for an
    "alive" under which a fault of one module, or slightly other values of the adapter, would not have been seen.
    """

    word: Word
    fault: str
    reason: str
    confidence: float | None
    false_alarm_rate: float
    noise: float
    visible_from: float
    weighed: tuple[Weighed, ...]
    excluded: tuple[str, ...]
    unseen: tuple[str, ...]
    is_confident: bool


def sign_test(successes: int, failures: int) -> float:
    """Return the chance of at least so many successes if each question were decided by a fair coin."""
    count = successes + failures
    return sum(comb(count, k) for k in range(successes, count + 1)) / 2**count


def weigh(asked: Sequence[Asked], name: str, what: str, *, is_part: bool, floor: float) -> Weighed:
    """Return one fault beside the right adapter. floor: how far the nearest of all hypotheses is from the answers."""
    largest = max((one.size[name] for one in asked), default=0.0)
    least = min(TELLING * largest, max(TELLING_ABOVE_NOISE * largest, TWICE * floor))
    telling = [one for one in asked if one.size[name] >= max(least, SMALLEST)]
    gaps = [one.distance[name] - one.distance[RIGHT] for one in telling]
    return Weighed(
        name, what, is_part, _mean([one.size[name] for one in telling]), _mean([one.distance[name] for one in telling]),
        _mean([one.distance[RIGHT] for one in telling]), len(telling), sum(gap < -SMALLEST for gap in gaps),
        sum(gap > SMALLEST for gap in gaps),
    )  # fmt: skip


def judge(
    asked: Sequence[Asked],
    faults: Sequence[tuple[str, str, bool]],
    *,
    is_same_as_base: bool = False,
    has_logprobs: bool = True,
) -> Verdict:
    """Return the verdict. faults: name, words and is_part of each, "ignored" first. is_same_as_base: whether the server gave
    exactly its own base's answers to every question. has_logprobs: False where texts alone were compared.
    """
    floor = min(_mean([one.distance[name] for one in asked]) for name in (RIGHT, *(name for name, _, _ in faults)))
    weighed = tuple(weigh(asked, name, what, is_part=is_part, floor=floor) for name, what, is_part in faults)
    count = len(weighed)
    seen = [one for one in weighed if one.is_seen(count)]
    if seen:
        # Of several that fit, the one that explains the whole set of questions best.
        best = min(seen, key=lambda one: _mean([row.distance[one.name] for row in asked]))
        rate = min(1.0, count * best.alarm)
        word: Word = IGNORED if best.name == faults[0][0] else WRONG
        reason = (
            f"{best.nearer} of {best.nearer + best.farther} answers are nearer to this fault than to the right adapter"
        )
        if word == IGNORED and is_same_as_base:
            reason = f"all {len(asked)} answers are exactly those of the server's own base"
        return _made(word, best.name, reason, 1 - rate, rate, weighed, count, best.distance)
    noise = _mean([one.distance[RIGHT] for one in asked])
    unlike = _is_unlike(asked, faults[0][0])
    if unlike is not None:
        reason = "the answers are neither the adapter's nor those of any fault that is known here, while the base's are right"
        return _made(WRONG, "", reason, 1 - unlike, unlike, weighed, count, noise)
    possible = [one for one in weighed if not one.is_part and not one.is_excluded(count)]
    is_near = noise <= 2 * NOT_RIGHT * max((one.size for one in weighed if one.name == faults[0][0]), default=0.0)
    if not possible and is_near:
        overlooked = min(1.0, sum(one.overlooked for one in weighed if not one.is_part))
        reason = "every fault that concerns the whole adapter is farther from the answers than the right adapter"
        open_too = () if has_logprobs and _has_same_values(asked) else (OTHER_VALUES,)
        return _made(ALIVE, "", reason, 1 - overlooked, FALSE_ALARM, weighed, count, noise, open_too)
    if possible:
        reason = "as the answers are, these remain possible: " + ", ".join(one.name for one in possible)
    else:
        reason = "the answers are too far from the right adapter's to be called so, and no fault explains them"
    return _made(CANNOT_TELL, "", reason, None, FALSE_ALARM, weighed, count, noise)


def nothing_to_tell(reason: str, faults: Sequence[tuple[str, str, bool]] = ()) -> Verdict:
    """Return the verdict where there is nothing to compare."""
    names = tuple(name for name, _, _ in faults)
    return Verdict(CANNOT_TELL, "", reason, None, FALSE_ALARM, 0.0, 0.0, (), (), names, False)


def _is_unlike(asked: Sequence[Asked], ignored: str) -> float | None:
    """Return the chance of a false alarm if the answers are far from right although the server's base is ours; None if not."""
    known = [one for one in asked if one.base_noise is not None]
    far = [
        one.distance[RIGHT] > max(TIMES_NOISE * (one.base_noise or 0.0), NOT_RIGHT * one.size[ignored]) for one in known
    ]
    chance = sign_test(sum(far), len(far) - sum(far)) if far else 1.0
    return chance if chance <= FALSE_ALARM else None


def _has_same_values(asked: Sequence[Asked]) -> bool:
    """Return whether the answers are as near to right as the precision alone explains: an older version would be farther."""
    known = [one.base_noise for one in asked if one.base_noise is not None]
    return _mean([one.distance[RIGHT] for one in asked]) <= max(SAME_VALUES, TWICE_BASE * _mean(known))


def _made(
    word: Word, fault: str, reason: str, confidence: float | None, rate: float, weighed: tuple[Weighed, ...], count: int,
    noise: float, open_too: tuple[str, ...] = (),
) -> Verdict:  # fmt: skip
    excluded = tuple(one.name for one in weighed if one.is_excluded(count))
    unseen = tuple(one.name for one in weighed if one.name not in excluded and one.name != fault) + open_too
    # Where right is at `noise`, a fault of this size lies just so far that EXCLUDED_AT holds.
    visible = noise / EXCLUDED_AT
    is_confident = word != CANNOT_TELL and (word != ALIVE or not unseen)
    return Verdict(word, fault, reason, confidence, rate, noise, visible, weighed, excluded, unseen, is_confident)


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0
