"""Which issue on a direct merge into 4-bit weights does a saved `trimtab verify --lanes` support?"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

from trimtab.checkpoint.unreadable import request_refusal
from trimtab.doctor.issues.markdown import render
from trimtab.errors import CheckpointError
from trimtab.process.json_file import JsonError, read_json
from trimtab.process.redact import check_clean, clean, clean_all

DIRECT, CONTROL = "direct_4bit_merge", "fresh_bf16_merge"
FILE = "peft-merge-parity.md"
TRACKER = "huggingface/peft#2321"
TITLE = "Direct merge_and_unload into bitsandbytes 4-bit layers does not reproduce the adapter-loaded output; a bf16 merge does"
TEMPLATE = "merge_parity.md.j2"


def read_lanes(path: str) -> dict[str, Any]:
    """Return the lanes of a report that `trimtab verify --lanes --save FILE` or `--json` wrote, with model and
    versions.

    Errors: RequestError for a file that cannot be read; CheckpointError for one without lanes.
    """
    try:
        values = read_json(path, "report")
    except OSError as exc:
        raise request_refusal("--lanes", path, exc) from exc
    except JsonError as exc:
        raise CheckpointError(str(exc), path=path) from exc
    kept = values.get("lanes") if isinstance(values, dict) else None
    lanes = kept if isinstance(kept, dict) else values
    if not isinstance(lanes, dict) or not isinstance(lanes.get("lanes"), list):
        raise CheckpointError("has no merge lanes: save a report of trimtab verify --lanes", path=path)
    return dict(lanes)


def merge_parity(report: Mapping[str, Any]) -> tuple[str | None, str]:
    """Return (Markdown of the issue, "") or (None, why there is none). It needs an adapter that has an effect, another answer of
    the merge on the 4-bit base on some prompt, and a merge on the bf16 base that answers as the adapter on all."""
    lanes = {lane.get("lane"): lane for lane in report["lanes"]}
    direct, control = lanes.get(DIRECT), lanes.get(CONTROL)
    reason = _why_not(direct, control)
    if reason or direct is None or control is None:
        return None, reason
    text = render(TEMPLATE, **clean_all({
        "title": TITLE, "tracker": TRACKER, "state": "supporting: a separate finding, not part of an issue on offload",
        "versions": dict(report.get("versions") or {}), "device": str(report.get("device") or "not said"),
        "model": _name(report.get("model")), "adapter": _name(report.get("adapter")), "direct": _lane(direct),
        "control": _lane(control),
    }))  # fmt: skip
    check_clean(text, what=FILE)
    return text, ""


def _why_not(direct: Mapping[str, Any] | None, control: Mapping[str, Any] | None) -> str:
    """Return why the lanes support no issue, "" if they do."""
    if direct is None or control is None:
        missing = [name for name, lane in ((DIRECT, direct), (CONTROL, control)) if lane is None]
        return f"the lane {' and '.join(missing)} was not run"
    for lane in (direct, control):
        if lane.get("error") or not lane.get("prompts"):
            return f"the lane {lane['lane']} has no prompts: {(lane.get('error') or {}).get('message', 'nothing ran')}"
    if not any(row["base_differs"] for row in direct["prompts"]):
        return "the adapter has no effect on these prompts: they do not test a merge"
    if all(row["adapter_is_merged"] for row in direct["prompts"]):
        return "the merged 4-bit model answered every prompt as the adapter did"
    if not all(row["adapter_is_merged"] for row in control["prompts"]):
        return "the bf16 merge differs too: there is no passing case"
    return ""


def _lane(lane: Mapping[str, Any]) -> dict[str, Any]:
    rows = lane["prompts"]
    return {
        "prompts": rows, "total": len(rows), "matches": sum(bool(row["adapter_is_merged"]) for row in rows),
        "active": sum(bool(row["base_differs"]) for row in rows), "counts": dict(Counter(row["classification"] for row in rows)),
        "warnings": lane["merge_warnings"], "kl": lane.get("kl_to_adapter"),
    }  # fmt: skip


def _name(value: Any) -> str:
    """Return a model's or adapter's hub id; for a folder only its last name."""
    return clean(str(value or "not said"))
