"""Put the recorded cases into docs/whose-bug.md: its tables are made from bench/results, so that nothing is typed twice.

python tools/matrix_table.py            write
python tools/matrix_table.py --check    exit 1 if the page does not say what the result files say
"""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from trimtab.doctor.cases import labels  # noqa: E402
from trimtab.doctor.cases.cases import CASES  # noqa: E402
from trimtab.doctor.cases.runner import matrix_document, read_runs  # noqa: E402
from trimtab.report.render import Lines  # noqa: E402

PAGE = ROOT / "docs" / "whose-bug.md"
RESULTS = ROOT / "bench" / "results"
SETS = ("oldest", "newest")
ENGINES = ("stock", "trimtab")
DEVICES = {"cpu": "a CPU that plays the GPU", "gpu": "a GPU"}
REASON_CHARS = 150
PACKAGES = ("transformers", "peft", "accelerate", "bitsandbytes", "torch")
SAMPLE = ("R05_ALL_GPU_4BIT", "R03_SPLIT_4BIT", "SPLIT_4BIT_ADAPTER", "BROAD_TARGETS_4BIT")
SAMPLE_WIDTH = 120
Runs = Mapping[tuple[str, str], Mapping[str, Any]]


def read(device: str, version_set: str) -> Runs:
    """Return the recorded runs of a device and a version set by case and engine; empty where none were recorded."""
    file = RESULTS / f"matrix_{device}_{version_set}.json"
    return {(run["case"], run["engine"]): run for run in read_runs(file)["runs"]} if file.is_file() else {}


def sample() -> str:
    """Return what a person reads of a few cases."""
    runs = [run for (case, _), run in read("cpu", "newest").items() if case in SAMPLE]
    lines = [line.rstrip() for line in Lines(SAMPLE_WIDTH).show(matrix_document(runs)).splitlines()]
    return "```text\n" + "\n".join(lines).strip("\n") + "\n```\n"


def tables() -> str:
    """Return for each device the table of its cases: stock with the oldest set, with the newest one, and trimtab.

    Below the GPU's stands where it says something else than the CPU that plays it.
    """
    parts = []
    for device, words in DEVICES.items():
        runs = {name: found for name in SETS if (found := read(device, name))}
        if runs:
            parts.append(f"{_head(runs, words)}{_share(runs)}\n\n{_table(runs)}\n")
    return "\n".join([*parts, *differences()])


def _share(runs: Mapping[str, Runs]) -> str:
    """Return how many of the cases were run, where it is not all of them; nothing else may be read out of the rest."""
    done = [sum((case.name, engine) in found for found in runs.values()) for case in CASES for engine in ENGINES]
    if all(count == len(runs) for count in done):
        return ""
    begun = len({case for found in runs.values() for case, _ in found})
    return (
        f" Cases run there so far: {begun} of {len(CASES)} ({sum(done)} of {len(done) * len(runs)} runs); the others have "
        "not been run on a GPU."
    )


def differences() -> list[str]:
    """Return the list of what a GPU said otherwise than the CPU that plays it, one line a case and engine; [] for none."""
    found: dict[tuple[str, str, str, str, str], list[str]] = {}
    compared = 0
    for name in SETS:
        played = read("cpu", name)
        for (case, engine), run in read("gpu", name).items():
            other = played.get((case, engine))
            compared += other is not None
            if other is not None and _said(other) != _said(run):
                reason = _reason(run) or _reason(other)
                found.setdefault((case, engine, _said(other), _said(run), reason), []).append(name)
    if not compared:
        return []
    if not found:
        return [f"The GPU said what the CPU that plays it had said in all {compared} runs made on both.\n"]
    count = sum(len(sets) for sets in found.values())
    lines = [f"Of {compared} runs made on both, {compared - count} ended alike. Otherwise on the GPU:", ""]
    for (case, engine, before, now, reason), sets in found.items():
        which = "both sets" if len(sets) == len(SETS) else f"{sets[0]} set"
        lines.append(f"- `{case}`, {engine}, {which}: {now}, not {before}{f' ({reason})' if reason else ''}")
    return ["\n".join(lines) + "\n"]


def _reason(run: Mapping[str, Any]) -> str:
    """Return the first sentence of a run's error as code, without what stands in brackets; "" if it had none."""
    failure = run.get("exception")
    if not failure:
        return ""
    words = re.sub(r"\s*\([^)]*\)", "", str(failure["message"]).splitlines()[0]).partition(": ")[0]
    return f"`{failure['type']}: {words[:REASON_CHARS]}`"


def _head(runs: Mapping[str, Runs], words: str) -> str:
    said = []
    for name, found in runs.items():
        run = next(iter(found.values()))
        versions = ", ".join(f"{package} {run['versions'][package]}" for package in PACKAGES)
        said.append(f"{name} set: {versions}")
    name = next(str(run["device"]) for found in runs.values() for run in found.values() if run.get("device"))
    where = words if name.startswith("CPU") else f"{words}, {name}"
    return f"On {where}. {'; '.join(said).capitalize()}."


def _table(runs: Mapping[str, Runs]) -> str:
    cases = list(dict.fromkeys(case for found in runs.values() for case, _ in found))
    head = ["case", *(f"stock, {name} set" for name in runs), "trimtab"]
    lines = [f"| {' | '.join(head)} |", "|" + "---|" * len(head)]
    for case in cases:
        rows = [found for found in runs.values() if (case, "stock") in found]
        title = rows[0][case, "stock"]["title"] if rows else ""
        stock = [_said(found.get((case, "stock"))) for found in runs.values()]
        ours = dict.fromkeys(_said(found.get((case, "trimtab"))) for found in runs.values())
        lines.append(f"| `{case}`<br>{title} | {' | '.join(stock)} | {'; '.join(ours)} |")
    return "\n".join(lines)


def _said(run: Mapping[str, Any] | None) -> str:
    """Return a run's label, where it ended if that was early, and the lane's verdict."""
    if run is None:
        return "not recorded"
    early = "" if run["stage"] == "done" or run["label"] == labels.REFUSED_BY_NAME else f" at {run['stage']}"
    lane = f"<br>`{run['lane']}`" if run.get("lane") else ""
    return f"`{run['label']}`{early}{lane}"


SLOTS = {"sample": sample, "matrix": tables}


def filled(text: str) -> str:
    """Return the page with its tables as the result files have them."""
    for name, make in SLOTS.items():
        slot = re.compile(rf"(<!-- {name} -->\n).*?(<!-- /{name} -->)", re.DOTALL)
        made = make()
        text = slot.sub(lambda found, made=made: f"{found[1]}{made}{found[2]}", text)
    return text


def main(arguments: Sequence[str]) -> int:
    """Write or check the page; returns the exit code."""
    text = PAGE.read_text(encoding="utf-8")
    if "--check" in arguments:
        return int(filled(text) != text)
    PAGE.write_text(filled(text), encoding="utf-8", newline="\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
