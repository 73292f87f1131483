"""How well pasted errors are recognized: the corpora of tests/data/traces against the signatures.

python tools/score_traces.py            write bench/results/traces.json and the table and samples of docs/paste-your-error.md
python tools/score_traces.py --check    exit 1 if they do not say what the corpora and the doctor give

Precision: of the failures that get a name, the share with the right one. Recall: of those that people named, the share that
gets the right name. A "miss" gets UNKNOWN, a "false alarm" another's name.
"""

from __future__ import annotations

import hashlib
import json
import re
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from trimtab.doctor.traces.answer import diagnose, diagnosis_text  # noqa: E402
from trimtab.doctor.traces.classify import UNKNOWN, classify  # noqa: E402

CORPORA = ROOT / "tests" / "data" / "traces"
RESULT = ROOT / "bench" / "results" / "traces.json"
PAGE = ROOT / "docs" / "paste-your-error.md"
_TABLE = re.compile(r"(<!-- scores -->\n).*?(<!-- /scores -->)", re.DOTALL)
_PASTE = re.compile(r"(<!-- paste -->\n```text\n(.*?)\n```\n\n```text\n).*?(\n```\n<!-- /paste -->)", re.DOTALL)
WORDS = {
    "tune": "looked at while the signatures were written", "held-out": "looked at once, afterwards",
    "blind": "collected after the signatures were written",
}  # fmt: skip


def half_of(link: str) -> str:
    """Return which half of the corpus a link is in."""
    return "held-out" if int(hashlib.sha256(link.encode()).hexdigest(), 16) % 2 else "tune"


def entries() -> list[dict[str, Any]]:
    """Return every entry of every corpus, its half with it."""
    return [
        entry
        for file in sorted(CORPORA.glob("*.json"))
        for entry in json.loads(file.read_text(encoding="utf-8"))["entries"]
    ]


def score(found: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the counts, precision and recall of entries, with the links of what went wrong."""
    right, misses, alarms, known = 0, [], [], 0
    total = 0
    for entry in found:
        total += 1
        label = classify(entry["text"])[1][0].label
        known += entry["label"] != UNKNOWN
        if label != UNKNOWN and label == entry["label"]:
            right += 1
        elif label != UNKNOWN:
            alarms.append({"link": entry["link"], "is": entry["label"], "named": label})
        elif entry["label"] != UNKNOWN:
            misses.append({"link": entry["link"], "is": entry["label"]})
    named = right + len(alarms)
    return {
        "entries": total, "named_by_hand": known, "right": right, "misses": misses, "false_alarms": alarms,
        "precision": round(right / named, 4) if named else None, "recall": round(right / known, 4) if known else None,
    }  # fmt: skip


def scores() -> dict[str, Any]:
    """Return the scores by half."""
    every = entries()
    halves = sorted({entry["half"] for entry in every})
    return {half: score(entry for entry in every if entry["half"] == half) for half in halves}


def page(text: str, found: Mapping[str, Any]) -> str:
    """Return the page with today's table and answers."""
    rows = [
        f"| {half}: {WORDS[half]} | {one['entries']} | {one['named_by_hand']} | {_percent(one['precision'])} "
        f"({len(one['false_alarms'])} false alarms) | {_percent(one['recall'])} ({len(one['misses'])} missed) |"
        for half, one in found.items()
    ]
    head = ["| set | pastes | with a name | precision | recall |", "|---|---|---|---|---|"]
    table = "\n".join([*head, *rows]) + "\n"
    text = _TABLE.sub(lambda match: match[1] + table + match[2], text)
    return _PASTE.sub(lambda match: match[1] + diagnosis_text(diagnose(match[2])) + match[3], text)


def _percent(value: float) -> str:
    return f"{100 * value:.0f} %"


def main(arguments: list[str]) -> int:
    found = scores()
    made = {
        RESULT: json.dumps(found, indent=1, ensure_ascii=False) + "\n",
        PAGE: page(PAGE.read_text(encoding="utf-8"), found),
    }
    if "--check" in arguments:
        return int(any(not file.is_file() or file.read_text(encoding="utf-8") != text for file, text in made.items()))
    for file, text in made.items():
        file.write_text(text, encoding="utf-8", newline="\n")
    for half, one in found.items():
        print(f"{half}: {one['entries']} pastes, precision {one['precision']}, recall {one['recall']}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
