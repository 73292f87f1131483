"""G2: Windows has the same bugs, and another one in PEFT's joining of paths."""

from __future__ import annotations

import os
import platform

from trimtab.doctor.facts.bug import FIXED, NOT_APPLICABLE, PRESENT, Affected, Bug, Seen
from trimtab.doctor.facts.probe_kit import Kit, installed_source

BUG = Bug(
    title="Windows: the reports are the bugs of this list; PEFT writes copies relative to the drive",
    symptom="as B5, B6 and B7 say; a copy of a disk-offloaded base may land on the original file when the current "
    "directory is the root of the drive",
    trigger="offload to disk on Windows, with PEFT; a path with a backslash in a plain Python string, where "
    "backslash and f mean a form feed",
    cause="PEFT peft_model.py _update_offload splits the absolute file name and joins it again without its root (B6)",
    affected=(Affected("peft"),),
    versions="read in peft 0.19.1 and 0.21.2; no cause that only Windows has was found in the reports",
    way_round="write paths as r\"E:\\models\" or with forward slashes; do not start a program in the root of a drive",
    owner=("peft", "accelerate"),
    trackers=(
        "huggingface/accelerate#1281 (reported by others)",
        "huggingface/transformers#22018 (closed)",
        "huggingface/transformers#22492 (closed)",
        "huggingface/transformers#45672 (closed)",
    ),
    trimtab="it writes no copies of a base; its paths are pathlib's",
    evidence="source",
)  # fmt: skip


def probe(kit: Kit) -> Seen:
    """On Windows, look for PEFT's line that loses a path's root."""
    if os.name != "nt":
        return Seen(NOT_APPLICABLE, f"this is {platform.system()}")
    place = installed_source("peft.peft_model", "fname.split(os.sep)")
    if place is None:
        return Seen(FIXED, "PEFT no longer takes absolute paths apart")
    return Seen(PRESENT, f"absolute paths are taken apart, and lose their root, at {place[0]}:{place[1]}")
