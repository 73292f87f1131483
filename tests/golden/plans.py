"""Plans for cards that are not here: tiers, execution, bytes and predicted seconds of requests on hand-written anatomies.

The planner's pure functions on estimated machines: the same on every computer.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

from tests.anatomies import e_series, qwen3_8b, with_int8_head

FILE = Path(__file__).with_name("plans.json")
GIB, MIB = 2**30, 2**20
# Host memory of the machine that the cards are in.
HOST_BYTES = 32 * GIB
ADAPTERS = {"a": 80 * MIB}
TEXT: dict[str, Any] = {"images": 0, "audio_s": 0.0}
MEDIA: dict[str, Any] = {"images": 2, "audio_s": 30.0}
# Model, card, whether there is an adapter, and the request.
REQUESTS: tuple[tuple[str, str, bool, dict[str, Any]], ...] = (
    ("E2B", "4GiB", False, {"head": "auto", **TEXT}), ("E2B", "RTX 3050 laptop 4GB", True, {"head": "full", **MEDIA}),
    ("E4B", "4GiB", True, {"head": "auto", **TEXT}),
    ("E4B", "RTX 3050 laptop 4GB", False, {"head": "full", "images": 1, "audio_s": 0.0}),
    ("E4B", "RTX 4050 laptop", True, {"head": "int8", "decode": "graph", **MEDIA}),
    ("E4B", "RTX 4060 8GB", True, {"head": "auto", **MEDIA}), ("E4B", "RTX 4060 8GB", True, {"head": "auto", "batch": 8, **TEXT}),
    ("E4B", "RTX 2070 8GB", True, {"head": "auto", "images": 0, "audio_s": 30.0}),
    ("E4B", "RTX 4090 24GB", True, {"head": "int8", "batch": 32, "kv_tokens": 65536, **MEDIA}),
    ("E4B", "RTX 4090 24GB", False, {"head": "full", "batch": 32, "decode": "eager", **TEXT}),
    ("Qwen3-8B", "6GiB", True, {"head": "auto", **TEXT}),
    ("Qwen3-8B", "RTX 5060 8GB", True, {"head": "full", "batch": 8, "decode": "fused", **TEXT}),
    ("Qwen3-8B", "RTX 3090 24GB", False, {"head": "int8", "batch": 32, "decode": "graph", **TEXT}),
    ("Qwen3-8B", "RTX 3060 12GB, pcie 3.0 x8", False, {"head": "full", "kv": "int8", "context_tokens": 32768, **TEXT}),
    ("E4B", "2GiB", True, {"head": "full", **MEDIA}),
)  # fmt: skip


def plans() -> dict[str, Any]:
    """Return what each request gives, by the request in words."""
    from trimtab.errors import DoesNotFitError
    from trimtab.planning import make_plan
    from trimtab.planning.request.card_machine import machine_of, rates_of
    from trimtab.planning.values.cards import find_card
    from trimtab.request import LoadRequest

    anatomies = {"E2B": e_series("E2B"), "E4B": e_series("E4B"), "Qwen3-8B": qwen3_8b()}
    small = {name: with_int8_head(anatomy) for name, anatomy in anatomies.items()}
    records: dict[str, Any] = {}
    for model, title, has_adapter, asked in REQUESTS:
        card = find_card(title)
        options = ", ".join(f"{name} {value}" for name, value in asked.items())
        name = f"{model} on {title}, {'an adapter' if has_adapter else 'no adapter'}, {options}"
        try:
            plan = make_plan(
                LoadRequest(model="m", quant="nf4-dq", **asked), (small if asked["head"] == "int8" else anatomies)[model],
                adapters=ADAPTERS if has_adapter else {}, machine=machine_of(card, host_available_bytes=HOST_BYTES),
                rates=rates_of(card), head8=small[model],
            )  # fmt: skip
        except DoesNotFitError as exc:
            records[name] = {"needs": exc.needed_bytes, "helps": [exc.option, exc.option_bytes]}
            continue
        records[name] = recorded(plan)
    return records


def recorded(plan: Any) -> dict[str, Any]:
    """Return what a record holds of a plan. Seconds have three digits: what another libm rounds otherwise is no change."""
    execution = plan.execution
    phases = {"prompt": execution.prompt, "step": execution.step, "towers": execution.towers}
    return {
        "tiers": dict(sorted(Counter(f"{row.part} {row.tier} {row.home}" for row in plan.placements).items())),
        "execution": {
            name: [phase.mode, list(phase.chunks), float(f"{phase.seconds:.3g}"), phase.reason]
            for name, phase in phases.items() if phase is not None
        },
        "head": [execution.head, execution.head_reason],
        "gpu": dict(plan.gpu), "peak": [plan.gpu_peak_bytes, plan.peak_phase], "load_peak": plan.gpu_load_peak_bytes,
        "needs": plan.gpu_needed_bytes, "host_peak": plan.host_peak_bytes, "slots": plan.staging_slots,
        "prefill_tokens": plan.prefill_tokens,
    }  # fmt: skip
