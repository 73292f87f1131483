"""Text for the terminal: an adapter's report, an answer's numbers. Imports no torch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from trimtab.adapters.file import DIVERGED
from trimtab.errors import gib
from trimtab.report.document import Block, Document, Facts, Items, Table, Text

if TYPE_CHECKING:
    from trimtab.engine.batch.generate import Answer
    from trimtab.engine.decode.step_choice import Fallback
    from trimtab.planning import Plan

SHOWN_PATHS = 5


def adapter_document(report: Mapping[str, Any]) -> Document:
    """Return what `trimtab inspect` says: a table of parts, then the effect on a model."""
    dtypes = ", ".join(f"{count} in {dtype}" for dtype, count in report["dtypes"].items())
    targets = report["target_modules"]
    rows = [
        ("adapter", report["path"]),
        ("made for", f"{report['base_model'] or 'not said'}, with peft {report['peft_version'] or 'not said'}"),
        ("holds", f"{report['tensors']} tensors, {gib(report['bytes'])} ({dtypes})"),
        ("config", ", ".join(f"{name} {value}" for name, value in report["config"].items()) or "all defaults"),
        ("targets", ", ".join(map(str, targets)) if isinstance(targets, list) else str(targets)),
    ]
    parts = [(part, str(count)) for part, count in report["parts"].items()]
    blocks: list[Block] = [Facts(rows), Table(("part", "tensors"), parts)]
    spoiled = report.get("not_finite") or []
    if spoiled:
        blocks.append(Text(f"cannot be used: {len(spoiled)} tensors hold values that are not finite", "bad"))
        blocks += [Items(_some(spoiled)), Text(DIVERGED)]
    return Document("", blocks if "targets" not in report else [*blocks, Facts(_match_rows(report))])


def _match_rows(report: Mapping[str, Any]) -> list[tuple[str, str]]:
    targets = dict(report["targets"])
    total = targets.pop("total")
    kinds = ", ".join(f"{count} {_KINDS[kind]}" for kind, count in targets.items() if count)
    ranks = ", ".join(f"{rank} ({count})" for rank, count in report["ranks"].items())
    scales = ", ".join(f"{scale} ({count})" for scale, count in report["scales"].items())
    rows = [
        *(
            ("model" * (not number), f"holds {form['name']} ({form['bits_per_value']:.2f} bits a value); on a GPU {form['on_gpu']}")
            for number, form in enumerate(report.get("model_formats", ()))
        ),
        ("applied", f"to {total} modules: {kinds}; {gib(report['bytes_attached'])} on the device, in float32"),
        ("ranks", f"{ranks or '-'}; scales {scales or '-'}"),
        *((name, f"on {report[key]} modules") for name, key in (("dora", "dora"), ("bias", "lora_bias")) if report[key]),
    ]
    for reason, count in Counter(row["reason"] for row in report["dropped"]).items():
        rows.append(("no effect", f"{count} tensors: {reason}"))
        rows += [("", name) for name in _some([row["key"] for row in report["dropped"] if row["reason"] == reason])]
    if report["remapped"]:
        rows.append(("remapped", f"{len(report['remapped'])} modules"))
        rows += [("", name) for name in _some([f"{row['from']} -> {row['to']}" for row in report["remapped"]])]
    return rows + [("note", note) for note in report["notes"]]


_KINDS = {
    "linear": "linears", "wrapped": "linears inside a wrapper", "embedding": "embeddings", "router": "routers",
    "saved": "saved whole", "experts": "stacks of experts",
}  # fmt: skip


def _some(names: Sequence[str]) -> list[str]:
    rest = [f"and {len(names) - SHOWN_PATHS} more (--json has all)"] if len(names) > SHOWN_PATHS else []
    return [*names[:SHOWN_PATHS], *rest]


def answer_json(
    answer: Answer, plan: Plan, memory: Mapping[str, int], adapter: str | None, fallbacks: Sequence[Fallback] = ()
) -> dict[str, Any]:
    """Return the output of `trimtab run --json`: the answer, its timings, measured and planned peaks, and the
    fallbacks.
    """
    return {
        "text": answer.text, "token_ids": list(answer.token_ids), "finish_reason": answer.finish_reason,
        "max_new_tokens": answer.max_new_tokens,
        "adapter": adapter, "prompt_tokens": answer.prompt_tokens, "ttft_s": answer.ttft_s, "decode_s": answer.decode_s,
        "tokens_per_s": answer.tokens_per_s, "memory": dict(memory),
        "fallbacks": [{"what": one.what, "why": one.why} for one in fallbacks],
        "planned": {
            "gpu_peak_bytes": max(plan.gpu_peak_bytes, plan.gpu_load_peak_bytes),
            "gpu_budget_bytes": plan.gpu_budget_bytes, "host_peak_bytes": plan.host_peak_bytes,
            "host_budget_bytes": plan.host_budget_bytes,
        },
    }  # fmt: skip
