"""How are names of modules and options matched: patterns, prefixes, similar names and former names?"""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from difflib import SequenceMatcher
from functools import wraps
from importlib import import_module
from inspect import signature
from typing import Any, NamedTuple, ParamSpec, TypeVar

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


Given = ParamSpec("Given")
Made = TypeVar("Made")


def named_options(call: Callable[Given, Made]) -> Callable[Given, Made]:
    """Return a function whose unknown options are a RequestError with the probable intended ones."""
    known = list(signature(call).parameters)

    @wraps(call)
    def checked(*arguments: Given.args, **options: Given.kwargs) -> Made:
        check_options(options, known)
        return call(*arguments, **options)

    return checked


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

    pattern: from transformers, for Python's `re`. target: the replacement; \\1 is the pattern's group. Renames come from the
    installed transformers' table for checkpoints: adapters keep the names of their training.
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


def _of_re(name: str, former: str) -> Any:
    try:
        return import_module(f"re._{name}")
    except ImportError:  # Python 3.10
        return import_module(former)


compiler, sre, parser = (_of_re("compiler", "sre_compile"), _of_re("constants", "sre_constants"), _of_re("parser", "sre_parse"))

# Regular expressions --------------------------------------------------------------------------------------------------

# Limits: characters and nested groups of a pattern; names or patterns of one list; patterns among them that are more
# than a name. A separate rank for each module of 128 experts in 48 layers needs 18,432 names.
MAX_CHARS, MAX_DEPTH, MAX_PATTERNS, MAX_EXPRESSIONS = 100_000, 50, 50_000, 2_000
# Work units of one matcher: 1 for each 64-bit word of a set, and for Python's overhead. About half a second.
WORK = 500_000_000
_OPERATION, _PROBE, _PATTERN, _CHARACTER = 800, 1_000, 50_000, 3_000
_SHOWN_CHARS = 60
# Ways to match at one place of a name, apart from long repeats.
_WAYS = 4096

_META = frozenset("\\^$*+?{}[]|()")
_TYPES = int(re.ASCII | re.LOCALE | re.UNICODE)  # as integers: operations on enum members take microseconds
_IGNORECASE, _MULTILINE = int(re.IGNORECASE), int(re.MULTILINE)
_ONE = (sre.LITERAL, sre.NOT_LITERAL, sre.ANY, sre.IN)
_WORD = [(sre.CATEGORY, sre.CATEGORY_WORD)]
_UNSUPPORTED = {
    "GROUPREF": "a back-reference", "GROUPREF_EXISTS": "a condition on a group", "ATOMIC_GROUP": "an atomic group",
    "POSSESSIVE_REPEAT": "a possessive repeat",
}  # fmt: skip


class PatternError(ValueError):
    """A pattern that is no regular expression, is not supported, or is too expensive; the message says which.

    pattern: which one, None for all of them together.
    """

    def __init__(self, message: str, pattern: str | None = None) -> None:
        super().__init__(message)
        self.pattern = pattern


def shown(pattern: str) -> str:
    """Return a pattern for an error message: quoted, and truncated to 60 characters."""
    return repr(pattern) if len(pattern) <= _SHOWN_CHARS else f"{pattern[:_SHOWN_CHARS]!r}... ({len(pattern):,} characters)"


def is_plain(pattern: str) -> bool:
    """Return whether a pattern has no special characters except dots, which match any character."""
    return _META.isdisjoint(pattern)


def check_count(patterns: Collection[str], *, are_plain: bool = False) -> None:
    """Raise PatternError if a list has too many patterns, or too many that are not plain. are_plain: of names as text."""
    if len(patterns) > MAX_PATTERNS:
        raise PatternError(f"has {len(patterns):,} entries, at most {MAX_PATTERNS:,} are read")
    expressions = 0 if are_plain else sum(not is_plain(pattern) for pattern in patterns)
    if expressions > MAX_EXPRESSIONS:
        raise PatternError(f"has {expressions:,} regular expressions, at most {MAX_EXPRESSIONS:,} are read")


def parse(pattern: str) -> Any:
    """Return Python's tree of a pattern. Errors: PatternError."""
    if len(pattern) > MAX_CHARS:
        raise PatternError(f"has {len(pattern):,} characters, at most {MAX_CHARS:,} are read")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            tree = parser.parse(pattern)
        _check(tree, 0)
    except re.error as exc:
        raise PatternError(f"is not a regular expression ({exc.msg})") from exc
    except RecursionError as exc:
        raise PatternError(f"nests groups more than {MAX_DEPTH} deep") from exc
    except PatternError:
        raise
    except (OverflowError, ValueError) as exc:
        raise PatternError(f"is not a regular expression ({exc})") from exc
    return tree


def is_quick(pattern: str) -> bool:
    """Return whether Python's `re` certainly matches a pattern quickly on names: few long repeats and other ways to match."""
    if is_plain(pattern):
        return True
    repeats, ways = _effort(parse(pattern))
    return repeats <= 4 and ways <= _WAYS


def _effort(tree: Any) -> tuple[int, int]:
    """Return upper limits of (long repeats one after another, other ways to match at one place; more than _WAYS is _WAYS + 1)."""
    repeats, ways = 0, 1
    for op, av in tree:
        inner = [_effort(one) for one in _inner(op, av)]
        own_repeats, own_ways = max((one[0] for one in inner), default=0), sum(one[1] for one in inner) or 1
        if op in (sre.MAX_REPEAT, sre.MIN_REPEAT):
            least, most = int(av[0]), min(int(av[1]), _WAYS)
            if most > 8 and inner == [(0, 1)]:
                own_repeats = 1
            else:
                own_repeats, own_ways = own_repeats * most, own_ways**most * (most - min(least, most) + 1)
        repeats, ways = repeats + own_repeats, min(ways * own_ways, _WAYS + 1)
    return repeats, ways


def _check(tree: Any, depth: int) -> None:
    """Raise PatternError for syntax that the matcher does not support and for errors that `re` finds after parsing."""
    if depth > MAX_DEPTH:
        raise PatternError(f"nests groups more than {MAX_DEPTH} deep")
    for op, av in tree:
        if str(op) in _UNSUPPORTED:
            raise PatternError(f"has {_UNSUPPORTED[str(op)]}, which is not supported")
        for inner in _inner(op, av):
            _check(inner, depth + 1)
        if op in (sre.ASSERT, sre.ASSERT_NOT) and av[0] < 0 and len(set(av[1].getwidth())) > 1:
            raise PatternError("is not a regular expression (look-behind requires fixed-width pattern)")


def _inner(op: Any, av: Any) -> Sequence[Any]:
    """Return the trees inside a node."""
    if op is sre.BRANCH:
        return list(av[1])
    return (av[-1],) if op in (sre.SUBPATTERN, sre.MAX_REPEAT, sre.MIN_REPEAT, sre.ASSERT, sre.ASSERT_NOT) else ()


class Matcher:
    """Finds the names that a pattern matches. Errors: PatternError from every method, also when the work exceeds the limit.
    Python's parser reads a pattern; its tree is evaluated with one set of positions in the text of all names, stored as the bits of
    an integer, without backtracking (docs/decisions/0040). Not supported: back-references, conditions on groups, atomic groups,
    possessive repeats.
    """

    def __init__(self, names: Iterable[str]) -> None:
        self.names = list(dict.fromkeys(names))
        # Each name ends with a position without a character, so no set moves from one name into the next.
        self._text = "\0".join((*self.names, ""))
        self._name_at: dict[int, int] = {}
        at = 0
        for index, name in enumerate(self.names):
            at += len(name)
            self._name_at[at] = index
            at += 1
        self._all = (1 << at) - 1
        self._ends = _bits("".join("0" * len(name) + "1" for name in self.names))
        self._starts = (self._ends << 1 | 1) & self._all
        self._chars = self._all & ~self._ends
        self._alphabet = frozenset("".join(self.names))
        self._longest = max(map(len, self.names), default=0)
        self._operation = at // 64 + _OPERATION
        self._work = WORK
        self._masks: dict[frozenset[str], int] = {}
        self._literals: dict[int, int] = {}
        self._of_node: dict[tuple[Any, ...], int] = {}  # by the identity of nodes, for the current pattern

    def matching(self, pattern: str) -> set[str]:
        """Return the names that the pattern matches as `re.fullmatch` does."""
        return {self.names[index] for index in self._found(self._match(pattern) & self._ends)}

    def first_of(self, patterns: Iterable[str]) -> dict[str, str]:
        """Return name -> the first pattern that is its last whole segments, as PEFT finds it; other names have none.

        Source: PEFT 0.19.1 and 0.21.2, utils/other.py, get_pattern_key: `re.match(rf"(.*\\.)?({pattern})$", name)`; the first
        match wins, not the longest.
        """
        listed = list(patterns)
        check_count(listed)
        first: dict[int, int] = {}
        for index, place in self._hits(listed):
            first[index] = min(place, first.get(index, place))
        return {self.names[index]: listed[place] for index, place in first.items()}

    def idle(self, patterns: Iterable[str]) -> list[str]:
        """Return the patterns that `first_of` finds for none of the names, in any order of the patterns."""
        listed = list(patterns)
        check_count(listed)
        used = {listed[place] for _, place in self._hits(listed)}
        return [pattern for pattern in listed if pattern not in used]

    def leftmost(self, patterns: Iterable[str]) -> dict[str, str]:
        """Return name -> the pattern that `re.search` of all as alternatives finds in it: the leftmost, of several the first; other
        names have none.
        """
        listed = list(patterns)
        check_count(listed)
        best: dict[str, tuple[int, int]] = {}
        for place, pattern in enumerate(listed):
            found, at = f"{self._starting(pattern):b}"[::-1], 0
            for name in self.names:
                if (start := found.find("1", at, at + len(name) + 1)) >= 0:
                    best[name] = min(best.get(name, (start, place)), (start, place))
                at += len(name) + 1
        return {name: listed[place] for name, (_, place) in best.items()}

    def _hits(self, listed: list[str]) -> Iterator[tuple[int, int]]:
        """Yield (name index, pattern index) for every pattern that matches the last segments of a name."""
        yield from self._plain_hits(listed)
        for place, pattern in enumerate(listed):
            if not is_plain(pattern):
                found = self._match(rf"(.*\.)?({pattern})$", pattern)
                # re.match does not require the end: a pattern may close the group and continue. Any position counts for
                # its name.
                for index in self._found(self._run(self._chars, found, back=False) & self._ends):
                    yield index, place

    def _plain_hits(self, listed: list[str]) -> Iterator[tuple[int, int]]:
        """Yield the hits of plain patterns, the first of equal ones, looked up by length and dot positions."""
        forms: dict[int, dict[tuple[int, ...], dict[str, int]]] = {}
        for place, pattern in enumerate(listed):
            if is_plain(pattern):
                dots = tuple(at for at, letter in enumerate(pattern) if letter == ".")
                forms.setdefault(len(pattern), {}).setdefault(dots, {}).setdefault(pattern, place)
        for index, name in enumerate(self.names) if forms else ():
            for end in _last_segments(name):
                for dots, places in forms.get(len(end), {}).items():
                    self._spend(_PROBE * (1 + len(dots)))
                    if (known := places.get(_with_dots(end, dots))) is not None:
                        yield index, known

    def _found(self, ends: int) -> list[int]:
        """Return the names whose last position is in a set."""
        bits, at, found = f"{ends:b}"[::-1], -1, []
        while (at := bits.find("1", at + 1)) >= 0:
            found.append(self._name_at[at])
        return found

    def _spend(self, work: int) -> None:
        self._work -= work
        if self._work < 0:
            raise PatternError("takes too much work to match")

    # Evaluation: sets of positions, forwards or backwards -------------------------------------------------------------

    def _match(self, pattern: str, named: str | None = None) -> int:
        """Return the positions where a pattern can end if it starts at the start of a name. named: the pattern in errors."""
        return self._evaluated(pattern, self._starts, False, named or pattern)

    def _starting(self, pattern: str) -> int:
        """Return the positions where a pattern can start."""
        return self._evaluated(pattern, self._all, True, pattern)

    def _evaluated(self, pattern: str, places: int, back: bool, named: str) -> int:
        try:
            self._spend(_PATTERN + _CHARACTER * len(pattern))
            tree = parse(pattern)
            self._of_node.clear()
            return self._sequence(tree, places, tree.state.flags, back)
        except PatternError as exc:
            raise PatternError(str(exc), named) from exc

    def _sequence(self, tree: Any, places: int, flags: int, back: bool) -> int:
        for op, av in reversed(tree.data) if back else tree.data:
            if not places:
                break
            places = self._node(op, av, places, flags, back)
        return places

    def _node(self, op: Any, av: Any, places: int, flags: int, back: bool) -> int:
        """Return the positions where a node can end if it starts at one of the given positions; backwards, where it can
        start.
        """
        self._spend(self._operation)
        if op in _ONE:
            mask = self._accepting(op, av, flags)
            return places >> 1 & mask if back else (places & mask) << 1
        if op is sre.SUBPATTERN:
            _, added, removed, inner = av
            kept = flags & ~_TYPES if added & _TYPES else flags
            return self._sequence(inner, places, (kept | added) & ~removed, back)
        if op is sre.BRANCH:
            reached = 0
            for inner in av[1]:
                self._spend(self._operation)
                reached |= self._sequence(inner, places, flags, back)
            return reached
        if op in (sre.MAX_REPEAT, sre.MIN_REPEAT):
            least, most, inner = av
            return self._repeat(least, most, inner, places, flags, back)
        if op is sre.AT:
            return places & self._anchors(av, flags)
        if op in (sre.ASSERT, sre.ASSERT_NOT):
            key = (id(av), flags)
            if key not in self._of_node:
                self._spend(64 * self._operation)  # stored, so its memory counts
                self._of_node[key] = self._sequence(av[1], self._all, flags, back=av[0] > 0)
            return places & (self._of_node[key] if op is sre.ASSERT else ~self._of_node[key])
        assert op is sre.FAILURE, op
        return 0

    def _repeat(self, least: int, most: int, inner: Any, places: int, flags: int, back: bool) -> int:
        # More repetitions than a name has positions stay at one of them, so the set does not change any more.
        for _ in range(min(least, self._longest + 2)):
            self._spend(self._operation)
            before, places = places, self._sequence(inner, places, flags, back)
            if not places or places == before:
                break
        if most - least > self._longest and len(inner) == 1 and inner[0][0] in _ONE:
            op, av = inner[0]
            return self._run(self._accepting(op, av, flags), places, back)
        new = places
        for _ in range(min(most - least, self._longest + 2)):
            self._spend(self._operation)
            new = self._sequence(inner, new, flags, back) & ~places
            if not new:
                break
            places |= new
        return places

    def _run(self, mask: int, places: int, back: bool) -> int:
        """Return the positions and all that follow (precede) them through characters of the mask only."""
        self._spend(4 * self._operation)
        if not back:  # the carry of an addition propagates through ones
            return (((places & mask) + mask) ^ mask) | places
        shift = 1
        while shift <= self._longest:
            self._spend(4 * self._operation)
            places |= mask & places >> shift
            mask &= mask >> shift
            shift *= 2
        return places

    def _anchors(self, kind: Any, flags: int) -> int:
        newlines = self._positions(frozenset("\n"))
        if kind in (sre.AT_BEGINNING, sre.AT_BEGINNING_STRING):
            is_line = kind is sre.AT_BEGINNING and flags & _MULTILINE
            return self._starts | newlines << 1 if is_line else self._starts
        if kind is sre.AT_END_STRING:
            return self._ends
        if kind is sre.AT_END:
            return self._ends | (newlines if flags & _MULTILINE else newlines & self._ends >> 1)
        words = self._accepting(sre.IN, _WORD, flags)
        edges = words ^ words << 1
        return edges if kind is sre.AT_BOUNDARY else self._all & ~edges

    def _accepting(self, op: Any, av: Any, flags: int) -> int:
        """Return the positions of the characters that a node accepts. Python compares each character with the node."""
        if op is sre.LITERAL and not flags & _IGNORECASE:
            if av not in self._literals:
                self._literals[av] = self._positions(frozenset(chr(av)))
            return self._literals[av]
        key = (op, av if op in (sre.LITERAL, sre.NOT_LITERAL) else id(av), flags)
        if key not in self._of_node:
            self._spend(_PATTERN + _OPERATION * (len(av) if op is sre.IN else 1))
            tree = parser.SubPattern(parser.State(), [(op, av)])
            accepts = compiler.compile(tree, flags).match
            self._of_node[key] = self._positions(frozenset(filter(accepts, self._alphabet)))
        return self._of_node[key]

    def _positions(self, letters: frozenset[str]) -> int:
        letters &= self._alphabet
        if not letters:
            return 0
        if letters not in self._masks:
            self._spend(64 * self._operation)
            table = {ord(letter): "01"[letter in letters] for letter in (*self._alphabet, "\0")}
            self._masks[letters] = _bits(self._text.translate(table)) & self._chars
        return self._masks[letters]


def _bits(text: str) -> int:
    """Return the integer whose lowest bit is the text's first digit."""
    return int(text[::-1] or "0", 2)


def _with_dots(end: str, dots: tuple[int, ...]) -> str:
    """Return the text with a dot at each of these positions, except at newlines."""
    if all(end[at] == "." for at in dots):
        return end
    letters = list(end)
    for at in dots:
        letters[at] = "." if letters[at] != "\n" else "\n"
    return "".join(letters)


def _last_segments(name: str) -> list[str]:
    """Return the suffixes of a name that begin a segment. A final newline may be omitted; no newline may precede a
    suffix.
    """
    wholes = {name, name[:-1]} if name.endswith("\n") else {name}
    return [
        whole[begin:]
        for whole in wholes
        for begin in (0, *(at + 1 for at, letter in enumerate(whole) if letter == "." and "\n" not in whole[:at]))
    ]
