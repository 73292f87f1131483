"""Text for the terminal: an adapter's report, an answer's numbers. Imports no torch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from trimtab.adapters.file import DIVERGED
from trimtab.errors import gib
from trimtab.printable import printable
from trimtab.process.text_table import aligned

if TYPE_CHECKING:
    from trimtab.engine.batch.generate import Answer
    from trimtab.engine.decode.step_choice import Fallback
    from trimtab.planning import Plan

SHOWN_PATHS = 5


def adapter_text(report: Mapping[str, Any]) -> str:
    """Return the report of `trimtab inspect` for people: a table of parts, then its effect on a model."""
    dtypes = ", ".join(f"{count} in {dtype}" for dtype, count in report["dtypes"].items())
    lines = [
        f"adapter   {report['path']}",
        f"made for  {report['base_model'] or 'not said'}, with peft {report['peft_version'] or 'not said'}",
        f"holds     {report['tensors']} tensors, {gib(report['bytes'])} ({dtypes})",
        f"config    {', '.join(f'{name} {value}' for name, value in report['config'].items()) or 'all defaults'}",
        f"targets   {_target_text(report['target_modules'])}",
        "",
        *aligned([("part", "tensors"), *((part, str(count)) for part, count in report["parts"].items())], right=(1,)),
    ]
    spoiled = report.get("not_finite") or []
    if spoiled:
        lines += ["", f"cannot be used: {len(spoiled)} tensors hold values that are not finite", *_some(spoiled), DIVERGED]
    return "\n".join(lines if "targets" not in report else [*lines, "", *_match_lines(report)])


def _target_text(targets: Any) -> str:
    return printable(", ".join(map(str, targets)) if isinstance(targets, list) else str(targets), one_line=True)


def _match_lines(report: Mapping[str, Any]) -> list[str]:
    targets = dict(report["targets"])
    total = targets.pop("total")
    kinds = ", ".join(f"{count} {_KINDS[kind]}" for kind, count in targets.items() if count)
    ranks = ", ".join(f"{rank} ({count})" for rank, count in report["ranks"].items())
    scales = ", ".join(f"{scale} ({count})" for scale, count in report["scales"].items())
    lines = [
        f"applied   to {total} modules: {kinds}; {gib(report['bytes_attached'])} on the device, in float32",
        f"ranks     {ranks or '-'}; scales {scales or '-'}",
    ]
    formats = ", ".join(f"{form['name']} ({form['bits_per_value']:.2f} bits a value)" for form in report.get("model_formats", ()))
    if formats:
        lines.insert(0, f"model     holds {formats}")
    if report["dora"]:
        lines.append(f"dora      on {report['dora']} modules")
    if report["lora_bias"]:
        lines.append(f"bias      on {report['lora_bias']} modules")
    for reason, count in Counter(row["reason"] for row in report["dropped"]).items():
        lines.append(f"no effect {count} tensors: {reason}")
        lines += _some([row["key"] for row in report["dropped"] if row["reason"] == reason])
    if report["remapped"]:
        lines.append(f"remapped  {len(report['remapped'])} modules")
        lines += _some([f"{row['from']} -> {row['to']}" for row in report["remapped"]])
    return lines + [f"note      {note}" for note in report["notes"]]


_KINDS = {
    "linear": "linears", "wrapped": "linears inside a wrapper", "embedding": "embeddings", "router": "routers",
    "saved": "saved whole",
}  # fmt: skip


def _some(names: Sequence[str]) -> list[str]:
    rest = [f"            and {len(names) - SHOWN_PATHS} more (--json has all)"] if len(names) > SHOWN_PATHS else []
    return [*(f"            {printable(name, one_line=True)}" for name in names[:SHOWN_PATHS]), *rest]


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
