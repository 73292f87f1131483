"""How well pasted errors are recognized: the corpora of tests/data/traces against the signatures.

python tools/score_traces.py            write bench/results/traces.json and the table and samples of docs/paste-your-error.md
python tools/score_traces.py --check    exit 1 if they do not say what the corpora and the doctor give

Reports without a traceback (tests/data/reports, and the last lines of the pastes) are scored apart: whether the right entry is
among those listed under UNKNOWN, and whether none is listed for a cause that is no entry.

Precision: of the failures that get a name, the share with the right one. Recall: of those that people named, the share that
gets the right name. A "miss" gets UNKNOWN, a "false alarm" another's name. Beside each share stands its exact one-sided lower
bound with 95 % confidence, which takes the pastes for independent; "threads" counts what the named ones come from.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
import sys
import textwrap
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from bench.rates import at_least  # noqa: E402
from trimtab.doctor.cases.labels import SIGNATURES  # noqa: E402
from trimtab.doctor.traces.answer import UNKNOWN, classify, diagnose, diagnosis_document  # noqa: E402  # noqa: E402
from trimtab.doctor.traces.reading import read_paste  # noqa: E402
from trimtab.report.render import Lines  # noqa: E402

CORPORA = ROOT / "tests" / "data" / "traces"
REPORTS = ROOT / "tests" / "data" / "reports" / "reports.json"
RESULT = ROOT / "bench" / "results" / "traces.json"
PAGE = ROOT / "docs" / "paste-your-error.md"
PAGE_WIDTH = 132
_POST = re.compile(r"(/t/[^/]+/\d+)/\d+$")
_TABLE = re.compile(r"(<!-- scores -->\n).*?(<!-- /scores -->)", re.DOTALL)
_LIKENESS = re.compile(r"(<!-- likeness -->\n).*?(<!-- /likeness -->)", re.DOTALL)
_PASTE = re.compile(r"(<!-- paste -->\n```text\n(.*?)\n```\n\n```text\n).*?(```\n<!-- /paste -->)", re.DOTALL)
WORDS = {
    "tune": "looked at while the signatures were written", "held-out": "looked at once, afterwards",
    "blind": "collected after the signatures were written",
}  # fmt: skip


def half_of(link: str) -> str:
    """Return which half of the corpus a link is in."""
    return "held-out" if int(hashlib.sha256(link.encode()).hexdigest(), 16) % 2 else "tune"


def entries() -> list[dict[str, Any]]:
    """Return every entry of every corpus, its half with it."""
    return [entry for file in sorted(CORPORA.glob("*.json")) for entry in json.loads(file.read_text(encoding="utf-8"))["entries"]]


def score(found: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the counts, precision and recall of entries, with the links of what went wrong."""
    right, misses, alarms, known = 0, [], [], 0
    total, threads = 0, set()
    for entry in found:
        total += 1
        label = classify(entry["text"])[1][0].label
        if entry["label"] != UNKNOWN:
            known += 1
            threads.add(_POST.sub(r"\1", entry["link"].partition("#")[0]))
        if label != UNKNOWN and label == entry["label"]:
            right += 1
        elif label != UNKNOWN:
            alarms.append({"link": entry["link"], "is": entry["label"], "named": label})
        elif entry["label"] != UNKNOWN:
            misses.append({"link": entry["link"], "is": entry["label"]})
    named = right + len(alarms)
    return {
        "entries": total, "named_by_hand": known, "threads": len(threads), "right": right, "misses": misses, "false_alarms": alarms,
        "precision": round(right / named, 4) if named else None, "precision_at_least": at_least(right, named),
        "recall": round(right / known, 4) if known else None, "recall_at_least": at_least(right, known),
    }  # fmt: skip


def scores() -> dict[str, Any]:
    """Return the scores by half."""
    every = entries()
    halves = sorted({entry["half"] for entry in every})
    return {half: score(entry for entry in every if entry["half"] == half) for half in halves}


def untested() -> list[str]:
    """Return the labels of signatures that no paste of a corpus has."""
    return sorted({one.label for one in SIGNATURES} - {entry["label"] for entry in entries()})


# How a report without a traceback reads, in the order of the table.
KINDS = {
    "report": "titles, warnings and sentences of threads",
    "last line": "the last line alone of a paste that has a name",
    "same message": "pastes without frames and without a name: mostly an entry's own message, with another or an unknown cause",
}


def reports() -> list[dict[str, Any]]:
    """Return every report without a traceback that gets no name: its kind, half, link, text, and its entry ("" for none)."""
    found = [{"kind": "report", **one} for one in json.loads(REPORTS.read_text(encoding="utf-8"))["entries"]]
    catalogue = {one.label: one.catalogue for one in SIGNATURES}
    for entry in entries():
        traces = read_paste(entry["text"]).traces
        same = {"link": entry["link"], "half": entry["half"]}
        if entry["label"] == UNKNOWN:
            if not any(not frame.startswith("torch/") for trace in traces for frame in trace.frames):
                found.append({"kind": "same message", **same, "bug": "", "text": entry["text"]})
        elif catalogue[entry["label"]] and traces and (line := traces[0].message.split("\n")[0].strip()):
            text = f"{traces[0].kind}: {line}"
            found.append({"kind": "last line", **same, "bug": catalogue[entry["label"]], "text": text})
    return [one for one in found if classify(one["text"])[1][0].label == UNKNOWN]


def likeness() -> dict[str, Any]:
    """Return, by half and kind, how many reports of an entry list it, how many of none list nothing, and which go wrong."""
    found: dict[str, Any] = {}
    for one in reports():
        listed = [alike.bug.id for alike in diagnose(one["text"]).answers[0].looks_like]
        row = found.setdefault(one["half"], {}).setdefault(
            one["kind"], {"with_an_entry": 0, "listed": 0, "without_an_entry": 0, "silent": 0, "wrong": []}
        )
        is_right = one["bug"] in listed if one["bug"] else not listed
        row["with_an_entry" if one["bug"] else "without_an_entry"] += 1
        row["listed" if one["bug"] else "silent"] += is_right
        if not is_right:
            row["wrong"].append({"link": one["link"], "is": one["bug"] or None, "listed": listed})
    return {half: {kind: found[half][kind] for kind in KINDS if kind in found[half]} for half in sorted(found)}


def likeness_table(found: Mapping[str, Any]) -> str:
    """Return the page's table of `likeness`: its kinds, and each half's sums with their lower bounds."""
    rows = []
    for half, kinds in found.items():
        total = {
            name: sum(one[name] for one in kinds.values()) for name in ("listed", "with_an_entry", "silent", "without_an_entry")
        }
        for kind, one in [("all", total), *kinds.items()]:
            cells = [_of(one["listed"], one["with_an_entry"]), _of(one["silent"], one["without_an_entry"])]
            if kind == "all":
                bounds = [at_least(total["listed"], total["with_an_entry"]), at_least(total["silent"], total["without_an_entry"])]
                cells = [f"**{cell}, at least {math.floor(100 * bound)} %**" for cell, bound in zip(cells, bounds, strict=True)]
            rows.append(f"| {half}: {KINDS.get(kind, kind)} | {' | '.join(cells)} |")
    return "\n".join(["| set | entry is listed | no entry, none listed |", "|---|---|---|", *rows]) + "\n"


def _of(part: int, whole: int) -> str:
    return f"{part} of {whole} ({100 * part / whole:.0f} %)" if whole else "none"


def page(text: str, found: Mapping[str, Any]) -> str:
    """Return the page with today's table and answers."""
    rows = [
        f"| {half}: {WORDS[half]} | {one['entries']} | {one['named_by_hand']} of {one['threads']} threads "
        f"| {_share(one, 'precision')}, {len(one['false_alarms'])} false alarms "
        f"| {_share(one, 'recall')}, {len(one['misses'])} missed |"
        for half, one in found.items()
    ]
    head = ["| set | pastes | with a name | precision | recall |", "|---|---|---|---|---|"]
    without, labels = untested(), len({one.label for one in SIGNATURES})
    gap = textwrap.fill(
        f"{len(without)} of {labels} labels have no paste in either set; recorded runs or made-up pastes test them: "
        f"{', '.join(f'`{label}`' for label in without)}.",
        PAGE_WIDTH, break_on_hyphens=False,
    )  # fmt: skip
    table = "\n".join([*head, *rows]) + f"\n\n{gap}\n"
    text = _TABLE.sub(lambda match: match[1] + table + match[2], text)
    if _LIKENESS.search(text):
        alike = likeness_table(likeness())
        text = _LIKENESS.sub(lambda match: match[1] + alike + match[2], text)
    return answered(text)


def answered(text: str) -> str:
    """Return the page with today's answer to each paste that it shows."""
    lines = Lines(100)
    return _PASTE.sub(lambda match: f"{match[1]}{lines.show(diagnosis_document(diagnose(match[2])))}\n{match[3]}", text)


def _share(one: Mapping[str, Any], name: str) -> str:
    """Return a share with its lower bound, rounded down."""
    if one[name] is None:
        return "none named"
    return f"{100 * one[name]:.0f} % (at least {math.floor(100 * one[f'{name}_at_least'])} %)"


def main(arguments: list[str]) -> int:
    found = scores()
    made = {
        RESULT: json.dumps(
            {"sets": found, "labels_without_a_paste": untested(), "looks_like": likeness()}, indent=1, ensure_ascii=False
        )
        + "\n",
        PAGE: page(PAGE.read_text(encoding="utf-8"), found),
    }
    if "--check" in arguments:
        return int(any(not file.is_file() or file.read_text(encoding="utf-8") != text for file, text in made.items()))
    for file, text in made.items():
        file.write_text(text, encoding="utf-8", newline="\n")
    for half, one in found.items():
        print(f"{half}: {one['entries']} pastes, precision {_share(one, 'precision')}, recall {_share(one, 'recall')}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
