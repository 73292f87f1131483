"""What must not move while the code is rearranged: placements, plans, the demo's answers in every tier, a merge's files, verdicts.

    python -m tests.golden          writes records.json and plans.json anew: a reviewer reads that as a change of behaviour
    python -m tests.golden plans    only what is named, in seconds: after a change of the memory model

Recorded on a CPU: placements by the planner's pure functions on hand-written anatomies, plans for cards that are not here
(plans.py), the demo model's greedy tokens with its stored weights in every tier, the hash of every file of one merge, and what two
reports of `verify` say beside their figures.
"""

from __future__ import annotations

import hashlib
import json
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from tests.anatomies import e_series
from tests.golden.plans import FILE as PLANS_FILE
from tests.golden.plans import plans

FILE = Path(__file__).with_name("records.json")
GIB = 2**30
TIERS = {
    "resident": {"*": "resident"}, "gather": {"table": "gather"}, "stream": {"*": "stream", "table": "gather"},
    "disk": {"language": "disk"}, "host": {"language": "host"},
}  # fmt: skip
PROMPTS = ("Which colour is the sky?", "Describe the picture.")


def placements() -> dict[str, Any]:
    """Return name -> how many blocks of each part are in each tier, for requests on the CPU, whose plans own no execution."""
    from trimtab.planning import Machine, Rates, make_plan
    from trimtab.request import LoadRequest

    records = {}
    for model in ("E2B", "E4B"):
        for host_gib in (3, 4, 6, 16):
            machine = Machine(execution_device="cpu", host_available_bytes=host_gib * GIB)
            request = LoadRequest(model="m", quant="nf4-dq", context_tokens=1024, images=0, audio_s=0.0)
            try:
                plan = make_plan(request, e_series(model), adapters={"a": 50 * 2**20}, machine=machine, rates=Rates())
            except Exception as exc:
                records[f"{model} {host_gib} GiB"] = type(exc).__name__
                continue
            counts: dict[str, int] = {}
            for row in plan.placements:
                key = f"{row.part} {row.tier} {row.home}"
                counts[key] = counts.get(key, 0) + 1
            records[f"{model} {host_gib} GiB"] = {"blocks": counts, "peak_bytes": plan.gpu_peak_bytes}
    return records


def answers() -> dict[str, list[list[int]]]:
    """Return tier -> token ids of the demo model's greedy answers, base first, then the style adapter."""
    import trimtab
    from trimtab.demo import ADAPTERS, BASE

    records = {}
    for tier, place in TIERS.items():
        plan = trimtab.plan(
            BASE, adapters={"style": ADAPTERS["style"]}, device="cpu", context=256, images=0, audio_s=0,
            place=place,
        )  # fmt: skip
        with trimtab.load(plan) as model:
            records[tier] = [
                list(model.answer(prompt, adapter=adapter, max_new_tokens=16).token_ids)
                for adapter in (None, "style") for prompt in PROMPTS
            ]  # fmt: skip
    return records


def merged() -> dict[str, str]:
    """Return file name -> SHA-256 of every safetensors file of a merge of the demo model with its style adapter."""
    import trimtab
    from trimtab.demo import ADAPTERS, BASE

    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "merged"
        trimtab.merge(BASE, out, adapters={"style": ADAPTERS["style"]})
        return {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in sorted(out.glob("*.safetensors"))}


def verified() -> dict[str, Any]:
    """Return what does not depend on the machine of two reports: one of a placement, one that has to differ."""
    import trimtab
    from trimtab.demo import ADAPTERS, BASE

    records = {}
    for against, place in (("resident", TIERS["stream"]), ("base", {})):
        plan = trimtab.plan(
            BASE, adapters={"style": ADAPTERS["style"]}, device="cpu", context=256, images=0, audio_s=0, place=place,
        )  # fmt: skip
        report = trimtab.verify(plan, prompts=list(PROMPTS), against=against, new_tokens=8, isolated=False)
        records[against] = {
            "verdict": report.verdict, "expected": report.expected,
            "prompts": [
                [row.kind, row.adapter, row.verdict, row.prompt_tokens, row.difference.positions, row.same_text,
                 row.reference_text, row.subject_text]
                for row in report.prompts
            ],
        }  # fmt: skip
    return records


RECORDED = {"placements": placements, "plans": plans, "answers": answers, "merged": merged, "verified": verified}


def read_records() -> dict[str, Any]:
    """Return what is recorded, by the names of RECORDED."""
    records: dict[str, Any] = json.loads(FILE.read_text(encoding="utf-8"))
    return records | {"plans": json.loads(PLANS_FILE.read_text(encoding="utf-8"))}


def write_records(names: Iterable[str]) -> None:
    """Record the named ones anew; the others stay as they are. A plan is a line."""
    records = (read_records() if FILE.exists() and PLANS_FILE.exists() else {}) | {name: RECORDED[name]() for name in names}
    lines = [f" {json.dumps(name)}: {json.dumps(values)}" for name, values in records.pop("plans").items()]
    PLANS_FILE.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")
    FILE.write_text(json.dumps(records, indent=1) + "\n", encoding="utf-8")
