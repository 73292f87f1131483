"""Is a server's adapter alive, ignored, wrong in a known way, or cannot one tell?"""

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
# The largest probability, over all tests together, of calling a right server wrong or excluding a present fault.
FALSE_ALARM, OVERLOOKED = 0.005, 0.05
# The largest ratio of the nearer hypothesis' mean distance to the other's.
NEARER = 0.5
EXCLUDED_AT = 0.65
# A question can show a fault if the fault changes the answer by this share of its largest effect on any question, or by
# twice the noise and at least the second share.
TELLING, TELLING_ABOVE_NOISE, TWICE = 0.25, 0.02, 2.0
# At a distance of more than this share of the adapter's whole effect, an answer is not the adapter's.
NOT_RIGHT = 0.3
TIMES_NOISE = 3.0
SMALLEST = 1e-9
# Answers may come from an adapter with slightly different values if their distance is larger than this, than twice the
# base's noise, and than this share of the effect of different values.
SAME_VALUES, TWICE_BASE, SHARE_OF_OTHER = 0.02, 2.0, 0.4
OTHER_VALUES = "another version of the adapter"


@dataclass(frozen=True)
class Asked:
    """One question's numbers. distance: hypothesis ("right" or a fault's name) -> distance of the server's answer from
    it.

    size: fault -> the fault's effect on the local right answer. base_noise: distance of the server's base from the
    local base on this question, None if the server's base was not queried.
    """

    id: str
    kind: str
    distance: Mapping[str, float]
    size: Mapping[str, float]
    base_noise: float | None = None


@dataclass(frozen=True)
class Weighed:
    """One fault compared with the right adapter.

    size: its effect on the answers. distance, right_distance: of the server's answers from it and from the right ones,
    on the `questions` that can show it. nearer: number of them on which the fault is nearer; farther: on which the
    right adapter is nearer. Ties count for neither.
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
        """The probability that a right server looks at least as much like the fault."""
        return sign_test(self.nearer, self.farther)

    @property
    def overlooked(self) -> float:
        """The probability that a server with the fault looks at least as much like a right one."""
        return sign_test(self.farther, self.nearer)

    def is_seen(self, tests: int) -> bool:
        """Whether the answers show this fault, as one of this many tests."""
        return tests * self.alarm <= FALSE_ALARM and self.distance <= NEARER * self.right_distance

    def is_excluded(self, tests: int) -> bool:
        """Whether the answers exclude this fault, as one of this many tests."""
        return tests * self.overlooked <= OVERLOOKED and self.right_distance <= EXCLUDED_AT * self.distance


@dataclass(frozen=True)
class Verdict:
    """The verdict. fault: its name, "" for no known fault. confidence: of the verdict, None for "cannot tell".

    false_alarm_rate: upper bound of calling a right server wrong. noise: mean distance of right answers. visible_from:
    the smallest mean shift that would have been detected. unseen: faults that remain possible; none for "alive".
    is_as_a_whole: every fault of the whole adapter is excluded, so "cannot tell" concerns only small faults.
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
    is_as_a_whole: bool

    @property
    def smallest_seen(self) -> Weighed | None:
        """The smallest tried fault that would have been detected."""
        seen = [one for one in self.weighed if one.name in self.excluded or one.name == self.fault]
        return min(seen, key=lambda one: one.size, default=None)


def sign_test(successes: int, failures: int) -> float:
    """Return the probability of at least this many successes if each question were decided by a fair coin."""
    count = successes + failures
    return sum(comb(count, k) for k in range(successes, count + 1)) / 2**count


def weigh(questions: Sequence[Asked], name: str, what: str, *, is_part: bool, floor: float) -> Weighed:
    """Return one fault compared with the right adapter. floor: distance of the nearest of all hypotheses from the
    answers.
    """
    largest = max((one.size[name] for one in questions), default=0.0)
    least = min(TELLING * largest, max(TELLING_ABOVE_NOISE * largest, TWICE * floor))
    telling = [one for one in questions if one.size[name] >= max(least, SMALLEST)]
    gaps = [one.distance[name] - one.distance[RIGHT] for one in telling]
    return Weighed(
        name, what, is_part, _mean([one.size[name] for one in telling]), _mean([one.distance[name] for one in telling]),
        _mean([one.distance[RIGHT] for one in telling]), len(telling), sum(gap < -SMALLEST for gap in gaps),
        sum(gap > SMALLEST for gap in gaps),
    )  # fmt: skip


def judge(
    questions: Sequence[Asked], faults: Sequence[tuple[str, str, bool]], *, is_same_as_base: bool = False, has_logprobs: bool = True
) -> Verdict:
    """Return the verdict. faults: name, description and is_part of each, "ignored" first. is_same_as_base: whether the server gave
    exactly its base's answers to every question. has_logprobs: False if only texts were compared. A sign test: if the server is
    right, a question is nearer to a fault than to the right answer with probability at most 1/2, all n with 2^-n. The number of
    tests multiplies it: one for each fault, and one for answers that match no hypothesis. The nearer hypothesis must be nearer by
    half.
    """
    floor = min(_mean([one.distance[name] for one in questions]) for name in (RIGHT, *(name for name, _, _ in faults)))
    weighed = tuple(weigh(questions, name, what, is_part=is_part, floor=floor) for name, what, is_part in faults)
    count = len(weighed) + 1  # and whether the answers match no hypothesis
    seen = [one for one in weighed if one.is_seen(count)]
    if seen:
        # Of several matching faults, the one that explains all questions best.
        best = min(seen, key=lambda one: _mean([row.distance[one.name] for row in questions]))
        rate = min(1.0, count * best.alarm)
        word: Word = IGNORED if best.name == faults[0][0] else WRONG
        reason = f"{best.nearer} of {best.nearer + best.farther} answers are nearer to this fault than to the right adapter"
        if word == IGNORED and is_same_as_base:
            reason = f"all {len(questions)} answers are exactly those of the server's own base"
        return _made(word, best.name, reason, 1 - rate, rate, weighed, count, best.distance)
    noise = _mean([one.distance[RIGHT] for one in questions])
    unlike = count * _chance_of_unlike(questions, faults[0][0])
    if unlike <= FALSE_ALARM:
        reason = "the answers are neither the adapter's nor those of any known fault, while the base's are right"
        return _made(WRONG, "", reason, 1 - unlike, unlike, weighed, count, noise)
    possible = [one.name for one in weighed if not one.is_excluded(count)]
    other = next((one.size for one in weighed if one.name == OTHER_VALUES), 0.0)
    if OTHER_VALUES not in possible and not (has_logprobs and _has_same_values(questions, other)):
        possible.append(OTHER_VALUES)
    is_near = noise <= 2 * NOT_RIGHT * max((one.size for one in weighed if one.name == faults[0][0]), default=0.0)
    is_whole_open = any(one.name in possible and not one.is_part for one in weighed)
    is_whole = is_near and not is_whole_open
    if is_whole and not possible:
        overlooked = min(1.0, sum(one.overlooked for one in weighed))
        reason = "every fault that was tried is farther from the answers than the right adapter"
        return _made(ALIVE, "", reason, 1 - overlooked, FALSE_ALARM, weighed, count, noise, is_whole=True)
    if is_whole:
        reason = "every fault of the whole adapter is excluded, but a small one may hide in the noise: " + ", ".join(possible)
    elif is_whole_open:
        reason = "with these answers, the following remain possible: " + ", ".join(possible)
    else:
        reason = "the answers are too far from those of the right adapter, and no known fault explains them"
    return _made(CANNOT_TELL, "", reason, None, FALSE_ALARM, weighed, count, noise, possible, is_whole=is_whole)


def nothing_to_tell(reason: str, faults: Sequence[tuple[str, str, bool]] = ()) -> Verdict:
    """Return the verdict if there is nothing to compare."""
    names = tuple(name for name, _, _ in faults)
    return Verdict(CANNOT_TELL, "", reason, None, FALSE_ALARM, 0.0, 0.0, (), (), names, False)


def _chance_of_unlike(questions: Sequence[Asked], ignored: str) -> float:
    """Return the probability that a right server's answers are this often far from right although its base is the local
    base; 1 if they are not.
    """
    known = [one for one in questions if one.base_noise is not None]
    far = [one.distance[RIGHT] > max(TIMES_NOISE * (one.base_noise or 0.0), NOT_RIGHT * one.size[ignored]) for one in known]
    return sign_test(sum(far), len(far) - sum(far)) if far else 1.0


def _has_same_values(questions: Sequence[Asked], other: float) -> bool:
    """Return whether an older version would be farther from right than the answers are. other: the effect of different
    values.
    """
    known = [one.base_noise for one in questions if one.base_noise is not None]
    limit = max(SAME_VALUES, TWICE_BASE * _mean(known), SHARE_OF_OTHER * other)
    return _mean([one.distance[RIGHT] for one in questions]) <= limit


def _made(
    word: Word, fault: str, reason: str, confidence: float | None, rate: float, weighed: tuple[Weighed, ...], count: int,
    noise: float, possible: Sequence[str] = (), *, is_whole: bool = False,
) -> Verdict:  # fmt: skip
    excluded = tuple(one.name for one in weighed if one.is_excluded(count))
    unseen = tuple(possible) or tuple(one.name for one in weighed if one.name not in excluded and one.name != fault)
    # If right answers are at `noise`, EXCLUDED_AT is just reached for a fault of this size.
    visible = noise / EXCLUDED_AT
    return Verdict(word, fault, reason, confidence, rate, noise, visible, weighed, excluded, unseen, is_whole)


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0
