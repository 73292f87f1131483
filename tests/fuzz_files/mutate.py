"""Mutations of a file: of its bytes, of the values of its JSON, and of what a safetensors header says of its data."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from importlib.util import find_spec
from random import Random
from typing import Any

NUMBERS = (0, -1, 1, 2, 2**31, 2**53 + 1, 2**63, 10**9, 10**30, 10**400, 1.5, -0.0, 1e308, 1e-320, True, False)
TEXTS = (
    "", "\0", "\x1b]0;owned\x07\x1b[2J", "a" * 5000, "../../etc/passwd", "q_proj\n", "\u202e\ud800", "(" * 3000 + ")" * 3000,
    "a{100000000000000000000}", "(?P<a>", "[", "*" * 50, "C:\\a", "{{ 1 / 0 }}", "NaN",
)  # fmt: skip
# Patterns that take for ever, where a matcher bounds them.
HARD = (r"([\w.]+)+!", r"(a|a)*$", r"(.*){30}!") if find_spec("trimtab.checkpoint.names") else ()
VALUES = (None, *NUMBERS, *TEXTS, *HARD, [], {}, [None], {"a": 1}, [[1, 2], [3]], [5], ["a", "a"])
# Stands for text that `json` would not write.
RAW = "@raw@"
MOST_ADDED, MOST_CHARS = 2**18, 2**22
RAWS = (
    "NaN", "Infinity", "-Infinity", "1e400", "9" * 5000, "[" * 3000 + "]" * 3000, '{"a":' * 3000 + "1" + "}" * 3000, "[" * 3000,
    "01", "+1", "'a'", "", '"\\ud800"', '"\x01"', "-0", "1E5", "{} {}",
)  # fmt: skip


def places(value: Any) -> list[tuple[Any, Any]]:
    """Return (container, key) of everything in a JSON value."""
    found: list[tuple[Any, Any]] = []
    waiting = [value]
    while waiting:
        one = waiting.pop()
        keys = list(one) if isinstance(one, dict) else range(len(one)) if isinstance(one, list) else ()
        for key in keys:
            found.append((one, key))
            waiting.append(one[key])
    return found


def of_json(raw: bytes, random: Random) -> bytes:
    """Return JSON with one to three of its values, keys or containers changed."""
    whole = copy.deepcopy(json.loads(raw))
    texts: list[str] = []
    for _ in range(random.choice((1, 1, 1, 2, 3))):
        at = places(whole)
        if not at:
            break
        random.choice(CHANGES)(*random.choice(at), random, texts)
    text = json.dumps(whole)
    for place, given in enumerate(texts):
        text = text.replace(f'"{RAW}{place}"', given)
    return text[:MOST_CHARS].encode("utf-8", "surrogatepass")


def _value(holder: Any, key: Any, random: Random, texts: list[str]) -> None:
    holder[key] = copy.deepcopy(random.choice(VALUES))


def _like(holder: Any, key: Any, random: Random, texts: list[str]) -> None:
    """Another value of the same type: what is refused by type alone hides what the value would do."""
    old = holder[key]
    if isinstance(old, (int, float)):
        holder[key] = random.choice(NUMBERS)
    elif isinstance(old, str):
        holder[key] = random.choice((*TEXTS, *HARD, old + "x", old[:-1], old.upper(), old * 2))
    elif isinstance(old, list):
        holder[key] = random.choice((old * 3, old[::-1], old[1:], [*old, random.choice(VALUES)], [old]))
    elif isinstance(old, dict):
        holder[key] = random.choice(({}, {**old, "x": 1}, {str(name).upper(): one for name, one in old.items()}))


def _raw(holder: Any, key: Any, random: Random, texts: list[str]) -> None:
    texts.append(random.choice(RAWS))
    holder[key] = f"{RAW}{len(texts) - 1}"


def _twice(holder: Any, key: Any, random: Random, texts: list[str]) -> None:
    """The key a second time, behind itself."""
    if isinstance(holder, dict):
        texts.append(json.dumps(holder[key]) + f", {json.dumps(key)}: {json.dumps(random.choice(NUMBERS))}")
        holder[key] = f"{RAW}{len(texts) - 1}"


def _renamed(holder: Any, key: Any, random: Random, texts: list[str]) -> None:
    if isinstance(holder, dict):
        name = str(key)
        names = (name + "x", name[:-1], "", "\0", name.upper(), "__proto__", *list(holder))
        holder[random.choice(names)] = holder.pop(key)


def _gone(holder: Any, key: Any, random: Random, texts: list[str]) -> None:
    del holder[key]


def _swapped(holder: Any, key: Any, random: Random, texts: list[str]) -> None:
    old = holder[key]
    holder[key] = dict(enumerate(old)) if isinstance(old, list) else list(old.items()) if isinstance(old, dict) else [old]


def _many(holder: Any, key: Any, random: Random, texts: list[str]) -> None:
    old = holder[key]
    count = min(random.choice((100, 3000)), MOST_ADDED // len(json.dumps(old)))  # many of many would be gigabytes
    holder[key] = [old] * count if random.random() < 0.5 else {f"k{place}": old for place in range(count)}


CHANGES: tuple[Callable[[Any, Any, Random, list[str]], None], ...] = (
    _value, _value, _like, _like, _like, _raw, _twice, _renamed, _gone, _swapped, _many,
)  # fmt: skip


def of_start(raw: bytes, random: Random) -> bytes:
    """Return bytes with some of the first few thousand changed: the header of a GGUF file. Lengths stay in two of three cases."""
    end = random.choice((64, 1024, 4096))
    if random.randrange(3) == 0:
        return of_bytes(raw[:end], random) + raw[end:]
    data = bytearray(raw)
    for _ in range(random.choice((1, 2, 5))):
        at, size = random.randrange(min(end, len(raw) - 8)), random.choice((1, 4, 8))
        number = random.choice((0, 1, 255, 2**31, 2**62, 2**64 - 1, random.randrange(2**16))) % 256**size
        data[at : at + size] = number.to_bytes(size, "little")
    return bytes(data)


def of_bytes(raw: bytes, random: Random) -> bytes:
    """Return bytes that are flipped, cut, doubled or replaced."""
    data = bytearray(raw)
    kind = random.randrange(6)
    if kind == 0 and data:
        for _ in range(random.choice((1, 3, 30))):
            data[random.randrange(len(data))] ^= 1 << random.randrange(8)
    elif kind == 1:
        del data[random.randrange(len(data) + 1) :]
    elif kind == 2:
        at, end = sorted(random.randrange(len(data) + 1) for _ in range(2))
        data[at:end] = b""
    elif kind == 3:
        at = random.randrange(len(data) + 1)
        data[at:at] = random.choice((b"\0" * 64, b"\xff\xfe", b"\xef\xbb\xbf", random.randbytes(32), raw[:200]))
    elif kind == 4:
        data = bytearray(random.choice(
            (b"", b"\0", b"[]", b"null", b"{}", b'""', b"PK\x03\x04", b"\x80\x02}", b"version https://git-lfs", raw * 2),
        ))  # fmt: skip
    elif data:
        at = random.randrange(len(data))
        data[at : at + 8] = random.choice((b"\xff" * 8, b"\0" * 8, random.randbytes(8)))
    return bytes(data)


def of_text(raw: bytes, random: Random) -> bytes:
    """Return a JSON file with changed values, or now and then with changed bytes."""
    return of_bytes(raw, random) if random.random() < 0.15 else of_json(raw, random)


def of_header(raw: bytes, random: Random) -> bytes:
    """Return a safetensors file whose header, length or data is changed."""
    if random.random() < 0.2:
        return of_bytes(raw, random)
    length = int.from_bytes(raw[:8], "little")
    header, data = raw[8 : 8 + length], raw[8 + length :]
    if random.random() < 0.3:
        whole = json.loads(header)
        name = random.choice(list(whole))
        if "shape" in whole[name]:
            entry, (start, end) = whole[name], whole[name]["data_offsets"]
            shift = random.choice((1, -1, 8, end - start, 2**40, -(2**40)))
            entry |= random.choice((
                {"dtype": random.choice(("F64", "F16", "U8", "F4", "C64", "BOOL"))}, {"shape": entry["shape"][::-1]},
                {"shape": [*entry["shape"], random.choice((0, 1, 2, 2**62))]}, {"data_offsets": [start + shift, end + shift]},
                {"data_offsets": [end, start]}, {"data_offsets": [start, end + shift]}, {"shape": [1] * 70},
            ))  # fmt: skip
        header = json.dumps(whole).encode()
    else:
        header = of_json(header, random)
    said = len(header) + random.choice((0, 0, 0, 0, 0, 0, 1, -1, 10**9, 2**40))
    return (said % 2**64).to_bytes(8, "little") + header + data
