"""A recorded run as text, from its configuration: the loaded model, its placement, the calls."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from trimtab.doctor.cases.cases import TARGETS
from trimtab.doctor.facts.evidence import OFFLOAD, Run
from trimtab.report.document import some
from trimtab.report.render import inline

MOST_NAMES = 3
LINE_CHARS = 300
SPARE_CHARS = 100  # shorter texts are not shortened
# Notes that every run has.
_NOISE = re.compile(
    r"deprecat|kernels-community|Failed to load CPU|torch\.jit|FutureWarning|will be removed|for class LoraConfig"
    r"|Some parameters are on the meta device because they were offloaded",
    re.IGNORECASE,
)
_CALL = re.compile(r"torch/nn/modules/module\.py:\d+ in (_wrapped_call_impl|_call_impl)$")
_MARKS = re.compile(r"^\s*[\^~]+\s*$")
_PATH = re.compile(r"\b\w+(\.\w+){2,}")
_TELLING = re.compile(r"devic|offload|meta|memory|adapter|merge|dispatch|target|key|hook|quant|round", re.IGNORECASE)


def described(run: Run) -> str:
    """Return a run's configuration as a phrase; its title if it ended before the configuration was known."""
    base = run.configuration.get("base")
    if not isinstance(base, Mapping):
        return run.title or run.case
    parts = [_format(base), _placed(base.get("device_map")), *_extras(base), _call(run), *_then(run)]
    return ", ".join(part for part in parts if part)


def _format(base: Mapping[str, Any]) -> str:
    quant = base.get("quantization_config")
    dtype = str(base.get("dtype") or "unquantized").rpartition(".")[2]
    if not isinstance(quant, Mapping):
        return f"base in {dtype}"
    if quant.get("load_in_8bit"):
        return "8-bit base"
    double = "double" if quant.get("bnb_4bit_use_double_quant") else "no double"
    return f"4-bit base ({quant.get('bnb_4bit_quant_type', 'fp4')}, {double} quantization)"


def _placed(device_map: Any) -> str:
    if not isinstance(device_map, Mapping):
        return f"`device_map` {inline(str(device_map))}" if device_map else ""
    off = {key: str(place) for key, place in device_map.items() if str(place) in OFFLOAD}
    catch_all = "with" if "" in device_map else "without"
    if not off:
        return "all on the GPU"
    if set(off) == {""}:
        return f"all on {inline(off[''])}"
    names = some([inline(name) for name in off], MOST_NAMES)
    return f"{names} on {inline(' and '.join(sorted(set(off.values()))))} ({catch_all} a catch-all entry)"


def _extras(base: Mapping[str, Any]) -> list[str]:
    return [f"`{name}={base[name]!r}`" for name in ("attn_implementation", "max_memory") if base.get(name)]


def _then(run: Run) -> list[str]:
    """Return the steps between loading and running the model."""
    then = str(run.configuration.get("then") or ("merge" if run.merges else ""))
    words = {"dequantize": "`model.dequantize()`", "merge": "`merge_and_unload()`"}
    return [words.get(step, inline(step)) for step in then.split(", ") if step]


def _call(run: Run) -> str:
    options = run.configuration.get("adapter") or {}
    arguments = f" with {', '.join(inline(name) for name in options)}" if options else ""
    words = {
        "": "", "none": "no adapter", "native": "`model.load_adapter()`", "peft": f"`PeftModel.from_pretrained()`{arguments}",
        "dispatch": f"`dispatch_model()`, {_placed(options.get('device_map'))}",
        "dequantize, peft": f"`base.dequantize()`, `PeftModel.from_pretrained()`{arguments}",
    }  # fmt: skip
    pressed = f", GPU {run.record['pressure']:.0%} full" if isinstance(run.record.get("pressure"), int | float) else ""
    targets = run.configuration.get("targets")
    # The default ones are omitted: they would be in every row.
    named = f" (`target_modules`: {targets})" if targets not in (None, TARGETS["patched"]) else ""
    return words.get(run.call, run.call) + named + pressed


def telling_lines(run: Run) -> list[tuple[str, int]]:
    """Return the run's log lines and warnings about placement, adapters or formats, with their counts.

    Lines that differ only in the module that they name count as the first of them.
    """
    logged = [(str(line), 1) for line in run.record.get("log_lines") or ()]
    warned = [(str(line), int(count)) for line, count in (run.record.get("warnings") or {}).items()]
    lines_by_text: dict[str, tuple[str, int]] = {}
    for line, count in (*logged, *warned):
        if _TELLING.search(line) and not _NOISE.search(line):
            first, before = lines_by_text.get(_PATH.sub("", line), (line, 0))
            lines_by_text[_PATH.sub("", line)] = (first, before + count)
    return list(lines_by_text.values())


def ended(run: Run) -> str:
    """Return how a run ended, as text and by its label."""
    from trimtab.doctor.cases.labels import LABELS, meaning_of

    if run.exception is not None:
        return inline(whole_sentences(run.ended()))
    return f"{meaning_of(run.label)} ({inline(run.label)})" if run.label in LABELS else inline(run.label)


def failing_frame(run: Run) -> str:
    """Return the innermost frame outside torch, as " in `file`, `function`"; "" without a trace."""
    frames = [frame for frame in run.frames if frame.get("library") != "torch"] or list(run.frames)
    if not frames:
        return ""
    return f" in {inline(str(frames[-1].get('file')))}, {inline(str(frames[-1].get('function')))}"


def trace_text(tail: str, most_lines: int) -> str:
    """Return a trace without torch's two frames of every module call; repeated lines are shown once with their count."""
    lines: list[tuple[str, int]] = []
    for line in tail.splitlines():
        if _CALL.search(line):
            continue
        if lines and lines[-1][0] == line:
            lines[-1] = (line, lines[-1][1] + 1)
        else:
            lines.append((line, 1))
    shown = [cut(line) if count == 1 else f"{cut(line)} (x{count})" for line, count in lines]
    return "\n".join(shown[-most_lines:])


def cut(line: str) -> str:
    """Return a line, shortened at its end if it is long, with the number of omitted characters."""
    if len(line) <= LINE_CHARS + SPARE_CHARS:
        return line
    kept = line[:LINE_CHARS].rpartition(" ")[0] or line[:LINE_CHARS]
    return f"{kept} [{len(line) - len(kept)} characters omitted]"


def whole_sentences(text: str) -> str:
    """Return recorded prose without its last sentences if it is long; a single long sentence is shortened to its first words
    and "..."."""
    if len(text) <= LINE_CHARS + SPARE_CHARS:
        return text
    end = max(text.rfind(mark, 0, LINE_CHARS) for mark in (". ", "! ", "? "))
    return text[: end + 1] if end > 0 else f"{text[:LINE_CHARS].rpartition(' ')[0] or text[:LINE_CHARS]} ..."


def shortened(output: str, *, first: int = 15, last: int = 45) -> str:
    """Return an output with long lines shortened, and its middle if it is long, with the omitted amount.

    Python's marks below a line of a trace are removed: they double its length.
    """
    lines = [cut(line) for line in output.splitlines() if not _MARKS.match(line)]
    if len(lines) <= first + last:
        return "\n".join(lines)
    return "\n".join([*lines[:first], f"[{len(lines) - first - last} lines omitted]", *lines[-last:]])
