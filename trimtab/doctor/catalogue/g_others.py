"""Which bugs belong to no other topic?"""

from __future__ import annotations

import os
import platform

from trimtab.doctor.facts.bug import FIXED, NOT_APPLICABLE, PRESENT, Affected, Bug, Seen
from trimtab.doctor.facts.probe_kit import Kit, error_of, installed_source, seen

G1_TIED = Bug(
    title="A tied head offloaded together with its embedding: the model cannot be saved, and older sets cannot run "
    "it from disk",
    symptom="RuntimeError: Some tensors share memory, this will lead to duplicate memory on disk (save_pretrained); "
    "KeyError: lm_head.weight at the first forward pass when both are on \"disk\"",
    trigger="embed_tokens and lm_head of a model with tied weights, both \"cpu\" or both \"disk\". The head alone on "
    "\"cpu\" is silently tied to the resident table again, which is harmless",
    cause="dispatch makes two meta parameters of the one tensor, so that transformers no longer sees a tie when it "
    "saves; the disk index has the name of one end only (accelerate utils/offload.py)",
    affected=(Affected("transformers"), Affected("accelerate")),
    versions="saving: transformers 5.6.2 and 5.23.0 run, both fail. Disk: fails with accelerate 1.13.0 and "
    "transformers 5.6.2, runs with 1.15.0 and 5.23.0",
    way_round="keep both ends of a tied weight on one device, and not offloaded",
    trackers=(
        "huggingface/accelerate#4083 (disk, in 1.15.0)",
        "huggingface/peft#3126 (tied heads of adapters, in 0.19.0)",
    ),
    trimtab="a tied weight is one tensor on the execution device, and a map that sends it away is refused with the "
    "reason",
    evidence="run",
)  # fmt: skip


def g1_tied(kit: Kit) -> Seen:
    """Save a tied model with table and head on the CPU, then run it with both on disk."""
    path = kit.checkpoint("qwen3")
    on_host, on_disk = (kit.load(path, device_map=_map(place)) for place in ("cpu", "disk"))
    unsaved = error_of(lambda: on_host.save_pretrained(str(kit.folder / "g1")), RuntimeError, "share memory")
    unread = error_of(lambda: kit.forward(on_disk), KeyError, "lm_head.weight")
    faults = (("saving with both on the CPU", unsaved), ("running with both on disk", unread))
    text = "; ".join(f"{title}: {fault}" for title, fault in faults if fault)
    return seen(text, "a tied pair was saved from the CPU and run from disk")


def _map(place: str) -> dict[str, int | str]:
    resident: dict[str, int | str] = {"model.layers": 0, "model.norm": 0, "model.rotary_emb": 0}
    return resident | {"model.embed_tokens": place, "lm_head": place}


G2_WINDOWS = Bug(
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


def g2_windows(kit: Kit) -> Seen:
    """On Windows, look for PEFT's line that loses a path's root."""
    if os.name != "nt":
        return Seen(NOT_APPLICABLE, f"this is {platform.system()}")
    place = installed_source("peft.peft_model", "fname.split(os.sep)")
    if place is None:
        return Seen(FIXED, "PEFT no longer takes absolute paths apart")
    return Seen(PRESENT, f"absolute paths are taken apart, and lose their root, at {place[0]}:{place[1]}")
