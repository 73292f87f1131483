"""What must not move while the code is rearranged: placements, the demo's answers in every tier, a merge's files.

    python -m tests.golden          writes records.json anew, which a reviewer then reads as a change of behaviour

Recorded on a CPU: placements by the planner's pure functions on hand-written anatomies, the demo model's greedy tokens with
its stored weights in every tier, the hash of every file of one merge.
"""

from __future__ import annotations

import hashlib
import tempfile
from pathlib import Path
from typing import Any

from tests.anatomies import e_series

FILE = Path(__file__).with_name("records.json")
GIB = 2**30
TIERS = {
    "resident": {"*": "resident"}, "gather": {"table": "gather"}, "stream": {"*": "stream", "table": "gather"},
    "disk": {"language": "disk"}, "host": {"language": "host"},
}  # fmt: skip
PROMPTS = ("Which colour is the sky?", "Describe the picture.")


def placements() -> dict[str, Any]:
    """Return name -> how many blocks of each part are in each tier, for requests on the CPU, whose plans own no execution."""
    from trimtab.plan import Machine, Rates, make_plan
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


def record() -> dict[str, Any]:
    return {"placements": placements(), "answers": answers(), "merged": merged()}
