"""The child process of POST /api/verify: checks the free memory, then compares.

The copy that is compared has the placements of the running plan. It keeps keys and values in full, because most comparisons are of
passes that keep none: where the server keeps them in 8 bits, the copy is planned again, and the report says so.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from math import prod
from typing import Any

from trimtab.checkpoint.adapter_file import read_adapter
from trimtab.errors import DoesNotFitError
from trimtab.plan import Plan
from trimtab.work_folder import work_folder

Emit = Callable[[dict[str, Any]], None]
ALIVE_S = 0.5
LOWEST_PRIORITY = 19
HINT = "The running model keeps its memory; `trimtab verify` compares while no server runs"
KV_NOTE = (
    "the served model keeps keys and values in 8 bits (kv int8); both sides of this comparison keep them in full, so the effect of "
    "8 bits on the answers was not compared"
)


def main(request: Mapping[str, Any], emit: Emit) -> None:
    """Do what request["what"] says: "room" or "compare". Errors: DoesNotFitError and what `trimtab.verify` raises."""
    _give_way()
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
        plan = _plan(request)
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
    """Return the running plan with the adapters that are compared, and keys and values in full: its placements depend on neither.

    Errors: DoesNotFitError if full keys and values have no room; those of `plan_request`; AdapterError for an adapter that clients
    loaded, if its files cannot be read.
    """
    plan, adapters = Plan.from_json(request["plan"]), dict(request["adapters"])
    # One that clients loaded is not in the plan: it is counted and stamped now, by the tensors of its file in float32.
    later = {
        name: read_adapter(path, values=False) for name, path in adapters.items() if name not in plan.adapter_bytes
    }
    counted = {name: sum(4 * prod(entry.shape) for entry in file.tensors.values()) for name, file in later.items()}
    stamps = {name: file.stamps for name, file in later.items()}
    plan = replace(
        plan, request=replace(plan.request, adapters=adapters),
        adapter_bytes={name: plan.adapter_bytes.get(name, counted.get(name, 0)) for name in adapters},
        adapter_stamps={name: plan.adapter_stamps.get(name, stamps.get(name, ())) for name in adapters},
    )  # fmt: skip
    return plan if plan.request.kv == "full" else _with_full_kv(plan)


def _with_full_kv(plan: Plan) -> Plan:
    """Return the plan with keys and values in full and their memory counted. Every block keeps its tier."""
    from trimtab.api import plan_request

    # Of two patterns that name a block the last one counts: a module comes before what lies under it.
    tiers = dict(sorted(plan.tiers().items(), key=lambda block: len(block[0])))
    copied = replace(
        plan.request, kv="full", place=tiers, device_map=None, gpu_memory_bytes=None, host_memory_bytes=None,
        head=plan.execution.head,
    )  # fmt: skip
    with _told_of_room():
        made = plan_request(copied, is_advised=False)
    # The other routes are planned from the server's request, and files that have changed since are refused, as for any plan.
    return replace(
        made, request=replace(plan.request, kv="full"), checkpoint_stamps=plan.checkpoint_stamps,
        adapter_stamps={**made.adapter_stamps, **plan.adapter_stamps},
    )  # fmt: skip


@contextmanager
def _told_of_room() -> Iterator[None]:
    """Replace the advice of a DoesNotFitError, which is about flags, by what an operator of a server can do."""
    try:
        yield
    except DoesNotFitError as exc:
        raise DoesNotFitError(
            exc.reason, block=exc.block, device=exc.device, needed_bytes=exc.needed_bytes, budget_bytes=exc.budget_bytes,
            hint=HINT,
        ) from exc  # fmt: skip


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
    with work_folder("verify") as folder:
        chosen = prompts.built_in(checkpoint.folder, checkpoint.config, folder)
        if not plan.request.images:
            chosen = tuple(prompt for prompt in chosen if not prompt.image)
        if not plan.request.audio_s:
            chosen = tuple(prompt for prompt in chosen if not prompt.audio)
        with _told_of_room():
            report = verify(plan, adapter=request["adapter"], against=request["against"], prompts=chosen, say=say)
    shown = report_json(report)
    if request["plan"]["request"]["kv"] != "full":
        shown["findings"] = [KV_NOTE, *shown["findings"]]
    return shown


def report_json(report: Any) -> dict[str, Any]:
    """Return what a page shows of a ParityReport: its verdict and table, and no path of this machine."""
    from trimtab.proof import words

    return {
        "verdict": report.verdict, "ok": report.ok, "against": report.against, "adapter": report.adapter,
        "reference": report.reference["label"], "subject": report.subject["label"], "head": list(words.HEAD),
        "rows": [list(words.prompt_row(row)) for row in report.prompts], "findings": list(report.findings),
        "floor": [line.strip() for line in words.floor_words(report)],
    }  # fmt: skip
