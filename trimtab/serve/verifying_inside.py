"""The child process of POST /api/verify: checks the free memory, then compares."""

from __future__ import annotations

import os
import tempfile
import threading
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from trimtab.errors import DoesNotFitError
from trimtab.plan import Plan

Emit = Callable[[dict[str, Any]], None]
ALIVE_S = 0.5
LOWEST_PRIORITY = 19
HINT = "The running model keeps its memory; `trimtab verify` compares while no server runs"


def main(request: Mapping[str, Any], emit: Emit) -> None:
    """Do what request["what"] says: "room" or "compare". Errors: DoesNotFitError and what `trimtab.verify` raises."""
    _give_way()
    plan = _plan(request)
    lock, is_over = threading.Lock(), threading.Event()

    def said(event: str, value: Any = None) -> None:
        with lock:
            emit({"event": event, "value": value})

    def live() -> None:
        while not is_over.wait(ALIVE_S):
            said("alive")

    alive = threading.Thread(target=live, daemon=True)
    alive.start()
    try:
        if request["what"] == "room":
            check_room(plan)
        else:
            said("report", _compared(plan, request, lambda text: said("say", text)))
    finally:
        # Nothing may be told after this returns.
        is_over.set()
        alive.join()


def _give_way() -> None:
    """Take processor time only where the server needs none. Windows has no such number and divides it equally."""
    if hasattr(os, "nice"):
        os.nice(LOWEST_PRIORITY)


def _plan(request: Mapping[str, Any]) -> Plan:
    """Return the running plan with the adapters that are compared: its placements do not depend on which those are."""
    plan, adapters = Plan.from_json(request["plan"]), dict(request["adapters"])
    # One that clients loaded is not in the plan: what each takes is then counted again.
    counted = plan.adapter_bytes if adapters.keys() <= plan.adapter_bytes.keys() else {}
    return replace(
        plan, request=replace(plan.request, adapters=adapters),
        adapter_bytes={name: counted[name] for name in adapters if name in counted},
        adapter_stamps={name: plan.adapter_stamps[name] for name in adapters if name in plan.adapter_stamps},
    )  # fmt: skip


def check_room(plan: Plan) -> None:
    """Raise DoesNotFitError if the plan cannot be loaded a second time beside what runs."""
    import trimtab.runtime.model  # noqa: F401  # so that the process has what loading imports (`read_machine`)
    from trimtab.runtime import devices

    machine = devices.read_machine(plan.request.device)
    needed = {"host": (plan.host_peak_bytes, machine.host_available_bytes)}
    if machine.on_cpu:
        needed["host"] = (plan.host_peak_bytes + plan.gpu_needed_bytes, machine.host_available_bytes)
    else:
        needed[machine.execution_device] = (plan.gpu_needed_bytes, machine.gpu_free_bytes)
    for device, (needed_bytes, free_bytes) in needed.items():
        if needed_bytes > free_bytes:
            raise DoesNotFitError(
                "there is not enough memory for a second copy of the plan", block=None, device=device,
                needed_bytes=needed_bytes, budget_bytes=free_bytes, hint=HINT,
            )  # fmt: skip


def _compared(plan: Plan, request: Mapping[str, Any], say: Callable[[str], None]) -> dict[str, Any]:
    from trimtab.checkpoint.folder import read_checkpoint
    from trimtab.proof import prompts
    from trimtab.proof.verify import verify

    checkpoint = read_checkpoint(plan.request.model)
    with tempfile.TemporaryDirectory(prefix="trimtab-verify-", ignore_cleanup_errors=True) as folder:
        chosen = prompts.built_in(checkpoint.folder, checkpoint.config, Path(folder))
        if not plan.request.images:
            chosen = tuple(prompt for prompt in chosen if not prompt.image)
        if not plan.request.audio_s:
            chosen = tuple(prompt for prompt in chosen if not prompt.audio)
        try:
            report = verify(plan, adapter=request["adapter"], against=request["against"], prompts=chosen, say=say)
        except DoesNotFitError as exc:
            exc.hint = HINT
            exc.args = (f"{exc}. {HINT}",)
            raise
    return report_json(report)


def report_json(report: Any) -> dict[str, Any]:
    """Return what a page shows of a ParityReport: its verdict and table, and no path of this machine."""
    from trimtab.proof import words

    return {
        "verdict": report.verdict, "ok": report.ok, "against": report.against, "adapter": report.adapter,
        "reference": report.reference["label"], "subject": report.subject["label"], "head": list(words.HEAD),
        "rows": [list(words.prompt_row(row)) for row in report.prompts], "findings": list(report.findings),
        "floor": [line.strip() for line in words.floor_words(report)],
    }  # fmt: skip
