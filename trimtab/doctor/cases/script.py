"""A script that reproduces a case on a tiny model with the stock stack only, and prints the result.

It (`case.py.j2`) builds a small Gemma 4 and an adapter with transformers and PEFT, needs no download and does not import trimtab.
Without a GPU, `torch.device("cpu")` imitates one. It ends with a line that begins "RESULT: ", after the exception if
there is one. Pure: only text is made here.
"""

from __future__ import annotations

from pathlib import Path

from trimtab.doctor.cases.cases import BROAD_TARGETS, GEMMA4, Case, device_map, skip_modules
from trimtab.doctor.facts.probe_kit import EVERYWHERE, LANGUAGE
from trimtab.report.render import filled

LINE_CHARS = 90
# By an adapter's copy: the target_modules that are written over its own.
_RETARGETED = {"broad": list(BROAD_TARGETS), "original": list(BROAD_TARGETS), "narrow": LANGUAGE}
# Arguments of PEFT that are expressions in the script.
_SPECIAL = {"offload_dir": 'work / "peft-offload"', "torch_device": '"cuda:0" if gpu == 0 else "cpu"'}


def script_of(case: Case) -> str:
    """Return the script of a case. The bridge's cases show the stock call instead."""
    return filled(
        Path(__file__).resolve().parents[1], "cases/case.py.j2", (repr, placed), case=case, targets=EVERYWHERE,
        retargeted=_RETARGETED.get(case.adapter), skipped=skip_modules(GEMMA4), special=_SPECIAL,
    )  # fmt: skip


def placed(name: str) -> str:
    """Return a map as Python text in which 0 is the name of the imitated GPU; if it is long, one entry per line inside a call."""
    places = device_map(name, GEMMA4)
    if isinstance(places, str):
        return repr(places)
    entries = [f"{key!r}: {'gpu' if place == 0 else repr(place)}" for key, place in places.items()]
    one_line = f"{{{', '.join(entries)}}}"
    if len(one_line) <= LINE_CHARS:
        return one_line
    return "{\n" + "".join(f"            {entry},\n" for entry in entries) + "        }"
