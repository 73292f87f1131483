"""Names of modules and options: patterns with boundaries, prefixes, the names most similar to a mistyped one, and former names.

transformers renames parts of models between releases, but adapters keep the names of their training. The renames come from the
installed release's table for checkpoints (engine/loader/transformers_model.py) and are part of the anatomy. Imports no torch.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from difflib import SequenceMatcher
from typing import NamedTuple

from trimtab.errors import RequestError

# Only this many characters at the end of a name are compared, because the cost grows with the square of the length.
COMPARED_CHARS = 200
# How alike a name must be, from 0 to 1: a path of modules has parts that differ between families, a plain word has none.
# 0.6 is difflib's own cutoff, which keeps "foo" from "tools".
MIN_SCORE, MIN_WORD_SCORE = 0.5, 0.6

# The names of the same part in different families. Source: the module names of transformers 5.23.0's multimodal models.
SAME_PART: tuple[tuple[str, ...], ...] = (
    ("multi_modal_projector", "mm_projector", "embed_vision", "embed_audio", "merger", "connector", "aligner"),
    ("vision_tower", "vision_model", "visual", "vision_encoder"),
    ("audio_tower", "audio_model", "audio_encoder"),
    ("language_model", "text_model"),
)
_PART_OF = {segment: group for group, segments in enumerate(SAME_PART) for segment in segments}


def is_under(path: str, prefix: str) -> bool:
    """Return whether path is prefix or lies below it at a dot; every path is under the empty prefix."""
    return not prefix or path == prefix or path.startswith(prefix + ".")


def matches(pattern: str, path: str) -> bool:
    """Return whether the pattern names the path or something above it.

    `*` matches any text, including dots and the empty text; every other character matches itself. "a.b" names "a.b" and
    everything below, "layers.1" never "layers.11". The empty pattern names the empty path alone.
    """
    return _matches_whole(pattern, path) or _matches_whole(pattern + ".*", path)


def _matches_whole(pattern: str, path: str) -> bool:
    head, *rest = pattern.split("*")
    if not rest:
        return pattern == path
    *middle, tail = rest
    if not path.startswith(head):
        return False
    at = len(head)
    for piece in middle:  # the leftmost match leaves the most text for the next segments
        at = path.find(piece, at)
        if at < 0:
            return False
        at += len(piece)
    return at <= len(path) - len(tail) and path.endswith(tail)


def check_options(options: Iterable[str], known: Iterable[str]) -> None:
    """Raise RequestError for an option that a call does not take, with the probable intended ones."""
    names = list(known)
    for name in options:
        if name not in names:
            raise RequestError("unknown option", field=name, allowed=names, near=near_names(name, names))


def near_names(name: str, choices: Iterable[str], count: int = 3) -> list[str]:
    """Return up to `count` of the choices that a mistyped name may have meant, best first; often empty.

    A choice is near when its text is alike, when it ends like the name and shares words with it, or when it is alike
    after its part gets the name from the choices' family ("multi_modal_projector" is "embed_vision" elsewhere).
    """
    comparison = _Comparison(name.lower())
    scored = [(choice != name, -comparison.score(choice.lower()), choice) for choice in dict.fromkeys(choices)]
    near = sorted(item for item in scored if -item[1] >= (MIN_SCORE if "." in item[2] or "." in name else MIN_WORD_SCORE))
    return [choice for *_, choice in near[: max(count, 0)]]


class _Comparison:
    """Compares one name with many choices. Work that depends on the name, or on a last segment that many choices share,
    is done once.
    """

    def __init__(self, name: str) -> None:
        self.name = name[-COMPARED_CHARS:]
        self.words = _words(self.name)
        self.segments = self.name.split(".")
        self.parts = _parts(self.segments)
        self.matchers: dict[str, SequenceMatcher[str]] = {}
        self.last_ratios: dict[str, float] = {}

    def score(self, choice: str) -> float:
        """Return how near the choice is, from 0 to 1."""
        choice = choice[-COMPARED_CHARS:]
        last = choice.rpartition(".")[2]
        if last not in self.last_ratios:
            self.last_ratios[last] = SequenceMatcher(None, self.segments[-1], last, autojunk=False).ratio()
        shared = len(self.words & _words(choice)) / max(len(self.words), 1)
        best = 0.5 * shared + 0.5 * self.last_ratios[last]
        best = max(best, self._ratio(self.name, choice))
        theirs = _parts(choice.split("."))
        if self.parts and theirs and not self.parts.keys() & theirs.keys():
            return 0.8 * best  # a projection of another tower has the same name
        if renamed := self._renamed(theirs):
            best = max(best, self._ratio(renamed, choice))
        return best

    def _ratio(self, name: str, choice: str) -> float:
        matcher = self.matchers.get(name)
        if matcher is None:
            matcher = self.matchers[name] = SequenceMatcher(None, "", name, autojunk=False)
        matcher.set_seq1(choice)
        if matcher.real_quick_ratio() < MIN_SCORE or matcher.quick_ratio() < MIN_SCORE:
            return 0.0
        return matcher.ratio()

    def _renamed(self, theirs: dict[int, list[str]]) -> str | None:
        """Return the name with its part spelled as in the choice, None if both agree already or share no part."""
        for group, (mine, *_) in self.parts.items():
            if group in theirs and mine not in theirs[group]:
                return ".".join(theirs[group][0] if segment == mine else segment for segment in self.segments)
        return None


def _parts(segments: list[str]) -> dict[int, list[str]]:
    """Return the segments that name a part, by the index of that part in SAME_PART."""
    by_length: dict[int, list[str]] = {}
    for segment in segments:
        if segment in _PART_OF:
            by_length.setdefault(_PART_OF[segment], []).append(segment)
    return by_length


def _words(name: str) -> set[str]:
    return {word for word in re.split(r"[._]", name) if word}


class Rename(NamedTuple):
    """One renaming of tensor names: below `base.scope`, or `scope`, the first match of a pattern is replaced.

    pattern: from transformers, for Python's `re`. target: the replacement; \\1 is the pattern's group.
    """

    base: str
    scope: str
    pattern: str
    target: str

    def apply(self, tensor_name: str) -> str:
        """Return the new name. Source: transformers 5.23.0, core_model_loading.py, WeightTransform.rename_source_key."""
        scope = f"{self.scope}." if self.scope else ""
        base = f"{self.base}." if self.base else ""
        head = next((head for head in (base + scope, scope) if tensor_name.startswith(head)), None)
        if head is None:
            return tensor_name
        rest = tensor_name[len(head) :]
        match = re.search(self.pattern, rest)
        if match is None:
            return tensor_name
        target = self.target.replace(r"\1", match[1]) if r"\1" in self.target else self.target
        return head + rest.replace(match[0], target, 1)


def renamed(path: str, renames: Iterable[Rename]) -> str:
    """Return the present path of a module. The table has tensor names, so the name of the module's weight is used."""
    name = f"{path}.weight"
    for rename in renames:
        name = rename.apply(name)
    return name.removesuffix(".weight")


def former_words(renames: Iterable[Rename], paths: Iterable[str]) -> frozenset[str]:
    """Return the words of former names that occur in no present path."""
    words = {word for rename in renames for word in re.findall(r"[A-Za-z_]\w{2,}", re.sub(r"\\.", " ", Rename(*rename).pattern))}
    return frozenset(words - {segment for path in paths for segment in path.split(".")}) if words else frozenset()
