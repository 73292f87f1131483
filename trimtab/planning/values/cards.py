"""What is the profile of a GPU that is not in this machine?"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from difflib import get_close_matches
from functools import cache
from importlib import resources
from typing import Any

from trimtab.checkpoint.names import COMPARED_CHARS
from trimtab.errors import DeviceError, RequestError, gib
from trimtab.planning.values.reading import read_row
from trimtab.report.document import Document, Table, Text, changed
from trimtab.request import parse_bytes

MIB = 2**20
UNKNOWN = "unknown"
# The share of the lanes' bandwidth that a page-locked copy of 64 MiB reaches: 12 of 15.75 GB/s over PCIe 3.0 x16 (T4).
LINK_SHARE = 0.76
# Bytes per second of one lane: 8, 16 and 32 GT/s with 128 of 130 bits used.
LANE_BPS = {generation: rate * 1e9 * 128 / 130 / 8 for generation, rate in (("3.0", 8), ("4.0", 16), ("5.0", 32))}
LANES = (4, 8, 16)
# The advertised size in GB; a driver counts up to 7 % less if error correction takes a share.
BOX_GB = (4, 6, 8, 10, 11, 12, 16, 20, 24, 32, 40, 48, 80, 94, 96, 141, 180)
BOX_SHARE = 0.93
# Two cards of one name are the same card if their memory differs by less.
MEMORY_TOLERANCE = 0.1

_LINK = re.compile(r"[,;]?\s*\bpcie?\s*(\d)(?:\.0)?\s*x\s*(\d+)\s*$", re.IGNORECASE)
_SIZE = re.compile(r"\b(\d+(?:\.\d+)?)\s*(?:gib|gb|g)\b", re.IGNORECASE)
_BARE = re.compile(r"\s*\d+(?:\.\d+)?\s*[kmg]i?b\s*", re.IGNORECASE)
_DROPPED = frozenset(
    ("nvidia", "geforce", "rtx", "gtx", "gpu", "card", "graphics", "tesla", "generation", "workstation", "server", "edition")
    + ("design", "with", "q", "blackwell", "sxm", "sxm2", "sxm3", "sxm4", "sxm5", "hbm2", "hbm2e", "hbm3", "hbm3e")
)
_LAPTOP = "laptop"
# Words of many names: alone they make no two of them alike.
_SHARED = frozenset((_LAPTOP, "super", "ti"))
_SAME_WORD = {"mobile": _LAPTOP, "notebook": _LAPTOP, "max": _LAPTOP, "s": "super"}


@dataclass(frozen=True, kw_only=True)
class Card:
    """A GPU as its maker describes it. memory_mib: as its driver counts it. pcie: generation and lanes, "4.0 x8".

    tflops: dense products of 16-bit values with float32 sums. source: a key of `sources()`. estimated: always true for figures from
    a profile. All values are estimates of the data sheet (sources: cards.json). Fewer lanes in a laptop and power limits are not
    known; for an older slot add "pcie 3.0 x8" to the name.
    """

    name: str
    memory_mib: int
    bandwidth_GBps: float
    pcie: str
    capability: str
    tflops: float
    multiprocessors: int
    source: str
    estimated: bool = True

    @property
    def memory_bytes(self) -> int:
        return self.memory_mib * MIB

    @property
    def title(self) -> str:
        """The card's name with its memory, as for `--card`."""
        if self.source == UNKNOWN:
            return self.name
        return f"{self.name} {_box_gb(self.memory_mib)}GB"

    @property
    def link_Bps(self) -> float:
        """Approximate bytes per second of a page-locked copy to the card."""
        generation, _, lanes = self.pcie.partition(" x")
        return LANE_BPS[generation] * int(lanes) * LINK_SHARE

    @classmethod
    def from_json(cls, values: Any) -> Card:
        """Return the card of a saved plan. Errors: RequestError for other keys or values of the wrong kind."""
        card = read_row(cls, values, "plan.card")
        if card.source not in sources():
            raise RequestError("unknown choice", field="plan.card.source", value=card.source, allowed=sorted(sources()))
        for name, value, pattern in (("capability", card.capability, r"\d{1,2}\.\d"), ("pcie", card.pcie, r"[3-5]\.0 x\d{1,2}")):
            if not re.fullmatch(pattern, value):
                raise RequestError("is not a valid figure", field=f"plan.card.{name}", value=value)
        return card


# Finding a card -------------------------------------------------------------------------------------------------------


@cache
def _data() -> dict[str, Any]:
    text = (resources.files("trimtab.planning.values") / "cards.json").read_text(encoding="utf-8")
    data: dict[str, Any] = json.loads(text)
    return data


@cache
def known_cards() -> tuple[Card, ...]:
    """Return every card that has a profile."""
    return tuple(Card(**values) for values in _data()["cards"])


def sources() -> dict[str, str]:
    """Return where the figures come from, by key."""
    return dict(_data()["sources"])


def find_card(text: str) -> Card:
    """Return the profile of a name: "RTX 4060 8GB", "rtx4060 laptop", "T4, pcie 3.0 x8", or a bare size such as "8GiB".

    Case, "NVIDIA" and "GeForce" do not matter; the memory is needed if a card exists in several sizes. A bare size is
    an unknown card with that much memory. Errors: RequestError with near names for a card that has no profile.
    """
    if not isinstance(text, str) or not text.strip() or len(text) > 200:
        raise RequestError("is not a card name", field="card", value=str(text)[:200], allowed=("RTX 4060 8GB", "8GiB"))
    name, pcie = _split_link(text)
    card = _unknown(name) if _BARE.fullmatch(name) else _named(name)
    return replace(card, pcie=pcie) if pcie else card


def _split_link(text: str) -> tuple[str, str]:
    """Return the name without its link, and the link ("" if the name has none)."""
    link = _LINK.search(text)
    if link is None:
        return text, ""
    generation, lanes = f"{link.group(1)}.0", int(link.group(2))
    if generation not in LANE_BPS or lanes not in LANES:
        allowed = [f"pcie {known} x{count}" for known in LANE_BPS for count in LANES]
        raise RequestError("unknown link", field="card", value=text, allowed=allowed)
    return text[: link.start()], f"{generation} x{lanes}"


def _unknown(text: str) -> Card:
    size = parse_bytes(text.strip(), field_name="card") or 0
    profile = Card(**(_data()["unknown"] | {"memory_mib": max(1, size // MIB)}))
    return replace(profile, name=f"unknown card of {gib(size)}")


def _named(text: str) -> Card:
    size = _SIZE.search(text)
    words = _words(text)
    alike = [card for card in known_cards() if _words(card.name) == words]
    if size is not None:
        alike = [card for card in alike if _is_in_box(card, float(size.group(1)))]
    if len(alike) == 1:
        return alike[0]
    if alike:
        raise RequestError(
            "has several memory sizes; add the size", field="card", value=text,
            allowed=[card.title for card in alike],
        )  # fmt: skip
    raise RequestError("there is no profile of this card", field="card", value=text, near=_near(text, words), hint=_HINT)


def cards_document() -> Document:
    """Return every profile: its name as `--card` takes it, bandwidth, link and compute capability."""
    rows = [(card.title, f"{card.bandwidth_GBps:g}", card.pcie, card.capability) for card in known_cards()]
    note = 'A bare size, such as "8GiB", is an unknown card of that size.'
    return Document("", [Table(("card", "GB/s", "PCIe", "capability"), rows), Text(note)])


# GiB of unknown cards that are smaller than any known one.
SMALL_BOXES = (1, 2, 3)


def larger_cards(card: Card) -> list[str]:
    """Return names, as `find_card` takes them, of cards with more memory, the smallest first: no older cards, laptop cards for
    a laptop; of each size the nearest in bandwidth. For an unknown card, unknown cards."""

    def is_alike(one: Card) -> bool:
        is_newer = _number(one.capability) >= _number(card.capability)
        is_kind = card.source == UNKNOWN or (_LAPTOP in _words(one.name)) == (_LAPTOP in _words(card.name))
        return is_newer and is_kind

    larger = [
        one for one in known_cards()
        if one.memory_bytes > card.memory_bytes * (1 + MEMORY_TOLERANCE) and is_alike(one)
    ]  # fmt: skip
    small = [box for box in SMALL_BOXES if card.source == UNKNOWN and box * 2**30 > card.memory_bytes]
    boxes = sorted({*small, *(_box_gb(one.memory_mib) for one in larger)})
    titles = []
    for box in boxes:
        if card.source == UNKNOWN:
            titles.append(f"{box}GiB")
            continue
        alike = [one for one in larger if _box_gb(one.memory_mib) == box]
        titles.append(min(alike, key=lambda one: (abs(one.bandwidth_GBps - card.bandwidth_GBps), one.name)).title)
    return titles


def _number(capability: str) -> tuple[int, ...]:
    return tuple(int(part) for part in capability.split("."))


def _box_gb(memory_mib: int) -> int:
    """Return the advertised size of a card."""
    size = memory_mib / 1024
    return next((box for box in BOX_GB if box + 0.1 >= size), round(size))


_HINT = (
    "Only NVIDIA cards have profiles; the command `trimtab plan` prints them with card='list'. "
    'A bare size, such as "8GiB", plans for an unknown card of that size'
)
# How alike a card's name must be to be one that was meant: difflib's ratio, without the words that many names share.
MIN_ALIKE, NEAR_CARDS = 0.6, 5


def _is_in_box(card: Card, box_gb: float) -> bool:
    """Whether a card has the memory of an advertised size."""
    return BOX_SHARE * box_gb <= card.memory_mib / 1024 <= box_gb + 0.1


def _near(text: str, words: frozenset[str]) -> list[str]:
    """Return the titles nearest to a name: those with the same number, otherwise those with similar spelling; often none."""
    numbers = {word for word in words if any(char.isdigit() for char in word)}
    shared = [card.title for card in known_cards() if numbers & _words(card.name)]
    titles: dict[str, list[str]] = {}
    for card in known_cards():
        titles.setdefault(" ".join(sorted(_words(card.name) - _SHARED)), []).append(card.title)
    wanted = " ".join(sorted(words - _SHARED))[:COMPARED_CHARS]
    alike = get_close_matches(wanted, titles, n=5, cutoff=MIN_ALIKE)
    alike.sort(key=lambda name: sorted(name) != sorted(wanted))  # two digits that changed places
    return (shared or [title for name in alike for title in titles[name]])[:NEAR_CARDS]


def _words(name: str) -> frozenset[str]:
    """Return the distinguishing words of a card's name, the same for the spellings of `--card` and of the driver."""
    spaced = re.sub(r"(?<=\d)(?=(?:ti|super|laptop|mobile|ada)\b)|(?<=tx)(?=\d)", " ", _SIZE.sub(" ", name.lower()))
    words = (_SAME_WORD.get(word, word) for word in re.findall(r"[a-z0-9]+", spaced))
    return frozenset(word for word in words if word not in _DROPPED)


# A plan that was made for a card -------------------------------------------------------------------------------------


def check_here(card: Card, device_names: Iterable[tuple[str, int]], device: str) -> None:
    """Raise DeviceError unless the plan's GPU is the card that the plan was made for, with as much memory.

    device_names: of all GPUs, (name, total bytes). device: "cuda:N", the plan's own.
    """
    here = list(device_names)
    index = int(device.partition(":")[2] or 0)
    same = [number for number, (name, total_bytes) in enumerate(here) if _is_card(card, name, total_bytes)]
    if index in same:
        return
    if same:
        raise DeviceError(
            f"the plan is for {card.title}, and {device} is {here[index][0] if index < len(here) else 'not here'}; that card is "
            f"cuda:{same[0]}", device=device, hint=f"Set CUDA_VISIBLE_DEVICES={same[0]}, or plan with device='cuda:{same[0]}'",
        )  # fmt: skip
    seen = ", ".join(f"{name} ({gib(total)})" for name, total in here) or "no GPU"
    raise DeviceError(
        f"the plan is for {card.title}, which is not here: this machine has {seen}", device=device,
        hint="Plan again without card= on the machine that runs it",
    )  # fmt: skip


def check_budget(card: Card, budget_bytes: int | None, *, field: str = "gpu_memory") -> None:
    """Raise RequestError for a budget that is larger than the card. field: that set it."""
    if budget_bytes is not None and budget_bytes > card.memory_bytes:
        raise RequestError(
            f"is more than the memory of {card.title}: {gib(card.memory_bytes)}", field=field, value=gib(budget_bytes),
            hint="Omit it to plan for the whole card",
        )  # fmt: skip


def _is_card(card: Card, name: str, total_bytes: int) -> bool:
    is_same = card.source == UNKNOWN or _words(card.name) in (_words(name), _words(name) - {"pcie"})
    return is_same and abs(total_bytes / card.memory_bytes - 1) < MEMORY_TOLERANCE


def marked(document: Document, card: Card) -> Document:
    """Return what a plan says with every figure of bytes, seconds and rates marked "~", and what the card is below its verdict."""
    figure = re.compile(r"(?<![\w.~-])\d+(?:\.\d+)?\s+(?:GiB|MiB|KiB|B|s|ms|tokens/s)(?!\w)")
    about = (
        f"ESTIMATE for {card.title}: {card.memory_mib} MiB, {card.bandwidth_GBps:g} GB/s, PCIe {card.pcie}, compute capability "
        f"{card.capability}, {card.tflops:g} TFLOPS in 16 bits. From {sources()[card.source]}; nothing was measured."
    )
    made = changed(document, lambda text: figure.sub(lambda match: f"~{match.group()}", text))
    return replace(made, blocks=(Text(about, is_fixed=True), *made.blocks))
