"""The doctor's results on one page: environment, matrix, known bugs, memory, predictions, bisection and drafts.

The page is one HTML file that loads nothing: it contains its style and its few lines of script, and its policy forbids
everything else. Records are shown as plain text.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

from trimtab.doctor.facts.evidence import PACKAGES
from trimtab.errors import RequestError, gib
from trimtab.printable import printable
from trimtab.process.files import write_text
from trimtab.process.redact import clean_all
from trimtab.report.charts import inline_svg, text

TEMPLATE = Path(__file__).with_name("report_page.html")
# The color of a label, and the sign that means the same without color.
GOOD, SILENT, BAD, ENDED, NONE = "good", "silent", "bad", "ended", "none"
SIGNS = {GOOD: "✓", SILENT: "!", BAD: "✗", ENDED: "■", NONE: "·"}
MEANINGS = {
    GOOD: "right", SILENT: "ended without an error, with a wrong result", BAD: "failed", ENDED: "killed at a limit",
    NONE: "not tried, not applicable or refused with a reason",
}  # fmt: skip
_GOOD = ("PASS", "PASS_NOT_COMPARED", "DIRECT_4BIT_MERGED_MATCHES_ADAPTER", "BF16_MERGED_MATCHES_BF16_ADAPTER")
_ENDED = ("TIMEOUT", "OOM_HOST", "OOM_GPU", "CRASHED")
_NONE = ("NOT_APPLICABLE", "REFUSED_BY_NAME")
STATE_KINDS = {"present": BAD, "fixed": GOOD, "not applicable": NONE, "unknown": ENDED}


@dataclass(frozen=True)
class Cell:
    """One run in the grid."""

    kind: str
    label: str
    meaning: str
    rows: tuple[tuple[str, str], ...]
    trace: str
    lane: str = ""

    @property
    def sign(self) -> str:
        return SIGNS[self.kind]


@dataclass(frozen=True)
class Grid:
    """The matrix: one column for each engine under each set of versions, one row for each case."""

    columns: tuple[tuple[str, str], ...]
    rows: tuple[tuple[str, str, tuple[Cell | None, ...]], ...]
    counts: tuple[tuple[str, str, int], ...]


def write_report(
    path: str | os.PathLike[str],
    *,
    environment: Any,
    records: Sequence[Mapping[str, Any]] = (),
    verdicts: Sequence[Any] = (),
    preflight: Any = None,
    drafts: Any = None,
    bisection: Any = None,
) -> Path:
    """Write the page, whole or not at all, and return its path. Every part but the environment may be missing.

    environment, preflight, drafts, bisection: the doctor's values or their JSON; bisection may be several. records: of the
    matrix. verdicts: of the probes. Errors: RequestError if the path is a folder or cannot be written.
    """
    target = Path(path)
    if target.is_dir():
        raise RequestError("is a folder", field="html", value=str(target))
    text = report_html(
        environment=environment, records=records, verdicts=verdicts, preflight=preflight, drafts=drafts, bisection=bisection
    )
    target.parent.mkdir(parents=True, exist_ok=True)
    write_text(target, text, field="html")
    return target


def report_html(
    *, environment: Any, records: Sequence[Mapping[str, Any]] = (), verdicts: Sequence[Any] = (), preflight: Any = None,
    drafts: Any = None, bisection: Any = None,
) -> str:  # fmt: skip
    """Return the page's text; arguments as for `write_report`."""
    import jinja2

    cleaned = [clean_all(record) for record in records]
    template = jinja2.Environment(
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        finalize=lambda value: printable(value) if type(value) is str else value,
    ).from_string(TEMPLATE.read_text(encoding="utf-8"))
    values = clean_all(_json(environment) or {})
    return template.render(
        machine=machine_rows(values), packages=package_rows(values), grid=grid_of(cleaned), legend=_legend(),
        pictures=memory_pictures(cleaned), verdicts=[clean_all(_verdict(one)) for one in verdicts], state_kinds=STATE_KINDS,
        signs=SIGNS, preflight=_preflight(preflight), bisections=_bisections(bisection), drafts=_drafts(drafts),
    )  # fmt: skip


def _json(value: Any) -> Any:
    return value.to_json() if hasattr(value, "to_json") else value


def machine_rows(values: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return the facts about the machine, as (name, value)."""
    gpus = [
        f"{gpu.get('name')}, {gib(int(gpu.get('total_bytes') or 0))}"
        for gpu in values.get("gpus") or ()
        if isinstance(gpu, Mapping)
    ]
    driver = f"driver {values['driver']}" if values.get("driver") else ""
    total = values.get("host_total_bytes")
    rows = (
        ("OS", values.get("os")), ("Python", values.get("python")), ("CPU", values.get("cpu")),
        ("GPU", "; ".join([*gpus, driver] if gpus else []) or "none that torch can use"), ("CUDA", values.get("cuda")),
        ("memory", gib(total) if isinstance(total, int) else None), ("torch cannot be used", values.get("torch_error")),
    )  # fmt: skip
    return [(name, str(value)) for name, value in rows if value]


def package_rows(values: Mapping[str, Any]) -> list[tuple[str, str, str]]:
    """Return (package, version, kind of installation)."""
    packages = values.get("packages") or {}
    return [
        (str(name), str(package.get("version") or "not installed"), str(package.get("installed") or ""))
        for name, package in packages.items()
        if isinstance(package, Mapping)
    ]


# Matrix ---------------------------------------------------------------------------------------------------------------


def kind_of(label: str) -> str:
    """Return the color class of a label."""
    if label in _GOOD:
        return GOOD
    if label in _NONE:
        return NONE
    if label in _ENDED:
        return ENDED
    return SILENT if label.startswith(("PASS_", "DIRECT_", "BF16_")) else BAD


def grid_of(records: Sequence[Mapping[str, Any]]) -> Grid | None:
    """Return the records as a grid, None without records."""
    if not records:
        return None
    columns: dict[tuple[str, str], None] = {}
    rows: dict[str, tuple[str, dict[tuple[str, str], Cell]]] = {}
    for record in records:
        column = (str(record.get("engine")), _versions(record))
        columns[column] = None
        row = rows.setdefault(str(record.get("case")), (str(record.get("title") or ""), {}))
        row[1][column] = cell_of(record)
    # Stock next to trimtab: by engine within one set of versions.
    order = sorted(columns, key=lambda column: column[0] != "stock")
    kinds = [cell.kind for _, cells in rows.values() for cell in cells.values()]
    return Grid(
        tuple(order),
        tuple((case, title, tuple(cells.get(column) for column in order)) for case, (title, cells) in rows.items()),
        tuple((kind, meaning, kinds.count(kind)) for kind, meaning in MEANINGS.items() if kinds.count(kind)),
    )


def _versions(record: Mapping[str, Any]) -> str:
    versions = record.get("versions") or {}
    return ", ".join(f"{name} {versions[name]}" for name in PACKAGES if versions.get(name))


def cell_of(record: Mapping[str, Any]) -> Cell:
    """Return the cell of one record."""
    label = str(record.get("label"))
    failure = record.get("exception") or {}
    rows = (
        ("ended at", record.get("stage")), ("lane", record.get("lane")), ("modes", _modes(record)),
        ("placement", _placement(record)), ("quantized", _counts(record.get("quantized"))), ("memory", _memory(record)),
        ("seconds", record.get("seconds")), ("device", record.get("device")), ("pressure", record.get("pressure")),
        ("exception", f"{failure.get('type')}: {failure.get('message')}" if failure else None),
        ("warnings", _counts(record.get("warnings"))), ("log", "; ".join(map(str, record.get("log_lines") or ()))),
    )  # fmt: skip
    # A merge that generates the adapter's tokens from other logits has its own label and is not right.
    modes = (record.get("modes") or {}).values()
    is_other = any(isinstance(mode, Mapping) and mode.get("equals_reference") is False for mode in modes)
    kind = kind_of(label)
    return Cell(
        SILENT if kind == GOOD and is_other else kind, label, _meaning(label),
        tuple((name, str(value)) for name, value in rows if value not in (None, "")), str(failure.get("tail") or ""),
        str(record.get("lane") or ""),
    )  # fmt: skip


def _meaning(label: str) -> str:
    from trimtab.doctor.cases.labels import LABELS, meaning_of

    return meaning_of(label) if label in LABELS else ""


def _modes(record: Mapping[str, Any]) -> str:
    modes = record.get("modes") or {}
    return ", ".join(f"{name} {_mode(mode)}" for name, mode in modes.items() if isinstance(mode, Mapping))


def _mode(mode: Mapping[str, Any]) -> str:
    if not mode.get("ok"):
        return "failed"
    equal = mode.get("equals_reference")
    return "ok" if equal is None else "ok, equals the reference" if equal else "ok, differs from the reference"


def _placement(record: Mapping[str, Any]) -> str:
    kept = record.get("placement_kept")
    return "" if kept is None else "kept" if kept else "not kept"


def _counts(counts: Any) -> str:
    return ", ".join(f"{count} x {name}" for name, count in counts.items() if count) if isinstance(counts, Mapping) else ""


def _memory(record: Mapping[str, Any]) -> str:
    memory = record.get("memory") or {}
    shown = (("GPU peak", "gpu_peak_bytes"), ("GPU reserved", "gpu_reserved_bytes"), ("host peak", "host_peak_bytes"))
    return ", ".join(f"{name} {gib(memory[key])}" for name, key in shown if isinstance(memory.get(key), int))


def _legend() -> list[tuple[str, str, str]]:
    return [(kind, SIGNS[kind], meaning) for kind, meaning in MEANINGS.items()]


# The other parts ------------------------------------------------------------------------------------------------------


def _verdict(one: Any) -> dict[str, Any]:
    values = _json(one)
    names = ("id", "title", "state", "evidence", "way_round", "trackers", "owner", "trimtab")
    return {name: values.get(name, "") for name in names}


def _preflight(preflight: Any) -> dict[str, Any] | None:
    """Return the findings as rows, and the whole report with its arithmetic as text."""
    if preflight is None:
        return None
    from trimtab.doctor.preflight.preflight import Preflight, preflight_text

    values = _json(preflight)
    if isinstance(preflight, Preflight):
        text = preflight_text(preflight)
    else:
        text = _as_text(values)
    return {"text": clean_all(text), "findings": clean_all(list(values.get("findings") or ()))}


def _as_text(value: Any) -> str:
    import json

    return json.dumps(value, indent=1, default=str, ensure_ascii=False)


def _bisections(bisections: Any) -> list[Any]:
    if bisections is None:
        return []
    several: Iterable[Any] = bisections if isinstance(bisections, list | tuple) else (bisections,)
    return [clean_all(_json(one)) for one in several]


def _drafts(drafts: Any) -> dict[str, Any] | None:
    if drafts is None:
        return None
    values = _json(drafts)
    return {"drafts": list(values.get("drafts") or ()), "not_to_file": str(values.get("not_to_file") or "")}


WIDTH, NAME_WIDTH, VALUE_WIDTH = 920, 330, 90
BAR, GAP, TOP = 13, 3, 26
KINDS = (("gpu_peak_bytes", "GPU"), ("host_peak_bytes", "host"))


def memory_pictures(records: Sequence[Mapping[str, Any]]) -> list[tuple[str, str]]:
    """Return (title, SVG) for every measured kind of memory, the GPU's first."""
    charts = []
    for field, name in KINDS:
        rows = [(record, nbytes) for record in records if isinstance(nbytes := _peak(record, field), int) and nbytes > 0]
        if rows:
            charts.append((f"Peak of {name} memory", _picture(rows, f"Peak of {name} memory per case")))
    return charts


def _peak(record: Mapping[str, Any], field: str) -> Any:
    memory = record.get("memory")
    return memory.get(field) if isinstance(memory, Mapping) else None


def _picture(rows: Sequence[tuple[Mapping[str, Any], int]], title: str) -> str:
    cases: dict[str, list[tuple[str, int]]] = {}
    for record, nbytes in rows:
        cases.setdefault(str(record.get("case")), []).append((str(record.get("engine")), nbytes))
    largest = max(nbytes for _, nbytes in rows)
    scale = (WIDTH - NAME_WIDTH - VALUE_WIDTH) / largest
    shapes, top = [], float(TOP)
    for case, bars in cases.items():
        shapes.append(text(NAME_WIDTH - 8, top + BAR - 2, case, anchor="end"))
        for engine, nbytes in bars:
            width = max(1.0, nbytes * scale)
            kind = "bar-trimtab" if engine == "trimtab" else "bar-stock"
            shapes.append(
                f'<rect class="{kind}" x="{NAME_WIDTH}" y="{top:.1f}" width="{width:.1f}" height="{BAR}">'
                f"<title>{escape(case)}, {escape(engine)}: {nbytes} bytes</title></rect>"
            )
            shapes.append(text(NAME_WIDTH + width + 6, top + BAR - 2, f"{gib(nbytes)} {engine}"))
            top += BAR + GAP
        top += 2 * GAP
    return inline_svg(shapes, WIDTH, round(top + GAP), title, more=' xmlns="http://www.w3.org/2000/svg"')
