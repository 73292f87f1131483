"""Along which dimension of a stack of experts does an adapter's lora_A run, by the release that wrote it?"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

Layout = Literal["last", "before"]  # the dimension of a stack that corresponds to lora_A's columns
VERSION = "peft_version"

# Releases below the first value -> (layout of plain stacks, of stacks that transformers marks is_transposed). 0.19.0 exchanged
# that of marked stacks, 0.19.1 that of plain ones instead. Marked stacks of 0.19.0 depend on whether its transformers had marks.
_RELEASES: tuple[tuple[tuple[int, int, int], Layout, Layout | None], ...] = (
    ((0, 19, 0), "before", "before"),
    ((0, 19, 1), "before", None),
)
_NOW: tuple[Layout, Layout] = ("last", "before")
# Development versions between these can be from before or after either change.
_UNSURE = ((0, 18, 1), (0, 19, 1))
_VERSION = re.compile(r"(\d{1,6})\.(\d{1,6})(?:\.(\d{1,6}))?(\S*)")


@dataclass(frozen=True)
class Stack:
    """Where an adapter's pairs change a stack.

    parameter: its name in the module; shape: [E, a, b]. experts: those with a pair, in the order of the pairs. outputs: (start,
    stop, step) of the matrices' outputs that a pair changes. is_transposed: the stack is [E, D_in, D_out]. is_swapped: lora_A runs
    along the outputs and lora_B along the inputs. is_expert_first: lora_B's columns are expert after expert, not rank after rank.
    """

    parameter: str
    experts: tuple[int, ...]
    shape: tuple[int, ...]
    outputs: tuple[int, int, int]
    is_transposed: bool = False
    is_swapped: bool = False
    is_expert_first: bool = False


def layout_of_release(version: object, *, is_transposed: bool) -> Layout | None:
    """Return the layout that a release of PEFT writes, None if its version does not determine it.

    version: of adapter_config.json; null or missing: PEFT before 0.18.0, or another program. is_transposed: of the stack. Source:
    PEFT 0.17.0 to 0.21.2, lora/layer.py, ParamWrapper (__init__, _get_in_out_features, update_layer, get_delta_weight).
    """
    if version is None:
        # If releases without the field agree with today's, the programs in between agree too.
        return _RELEASES[0][2] if is_transposed else None
    match = _VERSION.fullmatch(version) if isinstance(version, str) and len(version) < 100 else None
    if match is None:
        return None
    release = (int(match[1]), int(match[2]), int(match[3] or 0))
    is_final = not match[4] or match[4].startswith((".post", "+"))
    if not is_final and _UNSURE[0] <= release <= _UNSURE[1]:
        return None
    for below, plain, transposed in _RELEASES:
        if release < below:
            return transposed if is_transposed else plain
    return _NOW[is_transposed]


def shapes_of(layout: Layout, shape: tuple[int, ...], rank: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the shapes of lora_A and lora_B on a stack [E, a, b] in a layout."""
    experts, high, wide = shape
    if layout == "before":
        high, wide = wide, high
    return (rank * experts, wide), (high, rank * experts)


def decided(fitting: tuple[Layout, ...], seen: Iterable[Layout], version: object, *, is_transposed: bool) -> Layout | None:
    """Return the layout of one pair, None if nothing determines it.

    fitting: those that its shapes allow. seen: the layouts of the file's pairs on stacks of the same kind whose shapes allow one
    only; they were written by the same release. PEFT's releases disagree on whether lora_A multiplies the last dimension of [E, a,
    b] (delta = B A) or the one before it (delta = (B A)^T). The shapes of a pair show it unless a = b.
    """
    if len(fitting) == 1:
        return fitting[0]
    others = set(seen)
    if len(others) == 1:
        return others.pop()
    return layout_of_release(version, is_transposed=is_transposed)


def unsure_words(version: object) -> str:
    """Return why a square pair has no layout, and the next step."""
    said = f"{VERSION} is missing" if version is None else f"{VERSION} is {str(version)[:40]!r}"
    return (
        f"the shapes are square and {said}: PEFT 0.17 and 0.18 apply such a pair transposed to what PEFT 0.19.1 and later do. Set "
        f"{VERSION} in adapter_config.json to the release that trained the adapter (for example 0.17.1), or save it again there"
    )
