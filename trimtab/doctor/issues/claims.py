"""Which claims do the recorded runs not support?"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from trimtab.doctor.facts.buckets import map_given, map_prefixed
from trimtab.doctor.facts.evidence import Run

REFUTED, WIDER, NOT_TESTED = "refuted", "wider than the evidence", "not tested"


@dataclass(frozen=True)
class Claim:
    """One sentence that users want to file. tests: whether a run tests it. against: whether a run refutes it. A claim is general
    and a run is one case, so runs can refute a claim and never prove it."""

    text: str
    tests: Callable[[Run], bool]
    against: Callable[[Run], bool]
    instead: str


@dataclass(frozen=True)
class Decision:
    """The decision on a claim: state, the runs that refute it, the runs that test it."""

    claim: Claim
    state: str
    refuted_by: tuple[Run, ...]
    asked: tuple[Run, ...]

    def to_json(self) -> dict[str, Any]:
        return {
            "claim": self.claim.text, "state": self.state, "instead": self.claim.instead,
            "refuted_by": [run.mark for run in self.refuted_by], "asked": [run.mark for run in self.asked],
        }  # fmt: skip


def _ended(run: Run) -> bool:
    return run.exception is not None or run.stage == "done"


def _towers_off(run: Run) -> bool:
    return any("tower" in path and str(device) in ("cpu", "disk") for path, device in run.map_asked.items())


CLAIMS: tuple[Claim, ...] = (
    Claim(
        "CPU offload is broken.", lambda run: run.offloads, lambda run: run.passed,
        "Say which modules, in which format, were off the GPU.",
    ),
    Claim(
        "PEFT with bitsandbytes in 4 bits is broken.", lambda run: run.adapter and run.four_bit_layers > 0,
        lambda run: run.passed, "Say which placement and which call failed.",
    ),
    Claim(
        "QLoRA adapters are broken.", lambda run: run.adapter and run.four_bit_layers > 0,
        lambda run: run.passed, "Say which placement, which targets and which call failed.",
    ),
    Claim(
        "PEFT expects the towers on the GPU.", lambda run: run.adapter and _towers_off(run), lambda run: run.passed,
        "Say that PEFT planned the placement again, if the runs show it.",
    ),
    Claim(
        "All Gemma 4 adapters fail.", lambda run: run.adapter, lambda run: run.passed,
        "Say which targets the adapter has.",
    ),
    Claim(
        "Merging is broken.",
        lambda run: run.merges or "MERGE" in run.label,
        lambda run: run.label == "BF16_MERGED_MATCHES_BF16_ADAPTER" or (run.passed and run.merges),
        "Say in which format the base was when it was merged.",
    ),
    Claim(
        "8-bit layers cannot be offloaded either.", lambda run: run.eight_bit_layers > 0 and _off_or_dispatched(run),
        lambda run: run.passed, "Keep the formats apart.",
    ),
    Claim(
        "Switching double quantization off is a fix.",
        lambda run: run.four_bit_layers > 0 and _single_quant(run) and _off_or_dispatched(run),
        lambda run: run.label in ("FAIL_QUANT_STATE_META_COPY", "FAIL_QUANT_STATE_META_USE", "FAIL_BNB_PARAM_CONSTRUCTOR"),
        "Name it as a second place where the same configuration fails.",
    ),
    Claim(
        "offload_buffers=True and ephemeral_gpu_offload=True make PEFT keep the offload.",
        lambda run: "adapter.offload_buffers" in run.settings,
        lambda run: not run.passed, "Leave both out of the recipe.",
    ),
    Claim(
        "PEFT keeps the placement if it is given the base's own device_map.",
        lambda run: run.adapter and run.offloads and map_given(run) and not map_prefixed(run),
        lambda run: not run.passed and _ended(run), "Show the map with PEFT's prefix before every key.",
    ),
)  # fmt: skip


def _off_or_dispatched(run: Run) -> bool:
    return run.offloads or run.call == "dispatch"


def _single_quant(run: Run) -> bool:
    return not run.settings.get("base.quantization_config.bnb_4bit_use_double_quant")


def decide_claims(runs: Sequence[Run]) -> tuple[Decision, ...]:
    """Return the decision of the runs on the stock stack for every claim, in the table's order."""
    stock = [run for run in runs if run.is_stock]
    return tuple(_decide(claim, stock) for claim in CLAIMS)


def _decide(claim: Claim, runs: Sequence[Run]) -> Decision:
    tested = tuple(run for run in runs if claim.tests(run))
    refuting = tuple(run for run in tested if claim.against(run))
    state = REFUTED if refuting else WIDER if tested else NOT_TESTED
    return Decision(claim, state, refuting, tested)


def keys_without_module(runs: Sequence[Run]) -> dict[str, tuple[Run, ...]]:
    """Return the keys of maps that name no module of the model, with their runs."""
    runs_by_key: dict[str, list[Run]] = {}
    for run in runs:
        for key in run.record.get("map_keys_without_module") or ():
            runs_by_key.setdefault(key, []).append(run)
    return {key: tuple(shown) for key, shown in runs_by_key.items()}
