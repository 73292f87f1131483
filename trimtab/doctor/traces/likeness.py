"""Which entries of the catalogue does a report without a traceback look like?"""

from __future__ import annotations

import math
import re
from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from trimtab.doctor.facts.bug import Bug
from trimtab.process.files import read_sections

# The words in which people report each entry.
REPORTED = {
    name.upper(): tuple(text.splitlines())
    for name, text in read_sections(Path(__file__).with_name("reported.ini"))["entries"].items()
}
MOST_LISTED = 3
# Chosen on the development half; tools/score_traces.py measures both halves.
LEAST_SCORE = 2.4
FIELDS = (("title", 3), ("symptom", 2), ("trigger", 1), ("cause", 1))
_SATURATION, _LENGTH_SHARE = 1.2, 0.75
_SPREAD = 0.75
# A word that no entry has speaks against all of them: a name in code more than a word of prose.
_UNKNOWN_WORD, _UNKNOWN_NAME = 0.5, 2.0
MOST_CHARS = 20_000
# The patterns of a line stand in a few sentences, not anywhere in a long paste. Windows overlap by half.
_WINDOW_CHARS = 400

_NAME_MARK = "="
_WORD = re.compile(r"\w+(?:\.\w+)*")
_PART = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|\d+|[^\W\dA-Za-z_]+")
_COUNTED = re.compile(r"\d+[a-z]+")  # "4bit" is two words, no name
_ENDINGS = (
    "ization", "izing", "ized", "izes", "ations", "ation", "ings", "ing", "edly", "ed", "ies", "es", "s", "ly", "e",
)  # fmt: skip
_LEAST_STEM = 3
_STOP = frozenset(
    re.findall(
        r"\w+",
        """a an and are as at be been but by can cannot could did do does for from get got had has have how i if in into is it its
me my no not of on only or so such than that the their then there these they this to too was we what when where which while
who why will with would you your after before also all any some without one other more most same way even just like here
now out up over both each yet ever never let see""",
    )
)


def tokens(text: str) -> list[str]:
    """Return the stems of a text's words and of the parts of its names in code, and each such name as a whole, marked."""
    found: list[str] = []
    for word in _WORD.findall(text[:MOST_CHARS]):
        parts = [part.lower() for part in _PART.findall(word)]
        found += [_stem(part) for part in parts if part not in _STOP and (len(part) > 1 or part.isdigit())]
        found += [
            _NAME_MARK + name.lower() for name in word.split(".")
            if len(_PART.findall(name)) > 1 and not _COUNTED.fullmatch(name)
        ]  # fmt: skip
    return found


def _stem(word: str) -> str:
    for ending in _ENDINGS:
        if word.endswith(ending) and len(word) - len(ending) >= _LEAST_STEM and not word.endswith("ss"):
            return word[: -len(ending)]
    return word


@dataclass(frozen=True)
class Index:
    """The catalogue's words. counts: token -> id -> weighted count. weights: token -> how rare. lengths: id -> tokens. BM25 over
    title, symptom, trigger and cause; a score is divided by what the report's own words could score. Source: Robertson and
    Zaragoza, The Probabilistic Relevance Framework: BM25 and Beyond (2009), section 3."""

    counts: dict[str, dict[str, int]]
    weights: dict[str, float]
    lengths: dict[str, int]

    def alike(self, text: str) -> list[tuple[str, float]]:
        """Return at most MOST_LISTED ids that the text looks like, best first, with their scores; often none."""
        scores = defaultdict(float, self.scores(text))
        for bug_id in reported_as(text):
            scores[bug_id] += LEAST_SCORE
        scored = sorted(scores.items(), key=lambda one: (-one[1], one[0]))
        return [(bug_id, score) for bug_id, score in scored[:MOST_LISTED] if score >= LEAST_SCORE]

    def scores(self, text: str) -> dict[str, float]:
        """Return the score of every entry that shares a word with the text."""
        asked = set(tokens(text))
        mean_length = sum(self.lengths.values()) / max(1, len(self.lengths))
        unknown = _rarity(len(self.lengths), 0)
        possible = sum(
            self.weights.get(token, unknown * (_UNKNOWN_NAME if token.startswith(_NAME_MARK) else _UNKNOWN_WORD))
            for token in sorted(asked)
        )
        found: dict[str, float] = defaultdict(float)
        for token in sorted(asked & self.counts.keys()):
            for bug_id, count in self.counts[token].items():
                length = 1 - _LENGTH_SHARE + _LENGTH_SHARE * self.lengths[bug_id] / mean_length
                found[bug_id] += self.weights[token] * count * (_SATURATION + 1) / (count + _SATURATION * length)
        return {bug_id: score / possible**_SPREAD for bug_id, score in found.items()}


def reported_as(text: str) -> list[str]:
    """Return the ids of the entries that have a line in REPORTED whose patterns are all in one window of the text."""
    text, step = text[:MOST_CHARS], _WINDOW_CHARS // 2
    windows = [text[start : start + _WINDOW_CHARS] for start in range(0, max(1, len(text) - step), step)]
    return [
        bug_id for bug_id, lines in REPORTED.items()
        if any(
            all(_pattern(one).search(text) for one in line.split()) and any(_has_line(line, window) for window in windows)
            for line in lines
        )
    ]  # fmt: skip


def _has_line(line: str, window: str) -> bool:
    return all(_pattern(one).search(window) for one in line.split())


@cache
def _pattern(pattern: str) -> re.Pattern[str]:
    return re.compile(rf"(?<![a-z0-9])(?:{pattern})", re.IGNORECASE)


def index_of(bugs: Iterable[Bug]) -> Index:
    """Return the index of a catalogue."""
    counts: dict[str, dict[str, int]] = defaultdict(dict)
    lengths: dict[str, int] = {}
    for bug in bugs:
        words: Counter[str] = Counter()
        for field, weight in FIELDS:
            for token, count in Counter(tokens(getattr(bug, field))).items():
                words[token] += weight * count
        lengths[bug.id] = sum(words.values())
        for token, count in words.items():
            counts[token][bug.id] = count
    return Index(dict(counts), {token: _rarity(len(lengths), len(own)) for token, own in counts.items()}, lengths)


def _rarity(entries: int, having: int) -> float:
    return math.log(1 + (entries - having + 0.5) / (having + 0.5))
