"""The doctor's results as one document: environment, predictions, known bugs, matrix, memory, bisection and drafts."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, requires
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement
from packaging.version import InvalidVersion

from trimtab.errors import RequestError, gib
from trimtab.machine.environment import Environment
from trimtab.process.files import write_text
from trimtab.process.packages import install_command
from trimtab.process.redact import clean
from trimtab.report.charts import escape, inline_svg, text
from trimtab.report.document import Document, Figure, changed, joined
from trimtab.report.render import FORMS


def document_of(
    environment: Any, *, own: str = "", verdicts: Sequence[Any] = (), preflight: Any = None, bisections: Sequence[Any] = (),
    records: Sequence[Mapping[str, Any]] = (), drafts: Any = None,
) -> Document:  # fmt: skip
    """Return what the doctor says. own: the verdict on trimtab. records: of the matrix. Every part but the environment may be
    missing."""
    from trimtab.machine.environment import environment_document

    parts = [environment_document(environment)]
    if verdicts:
        from trimtab.doctor.probes.runner import probes_document

        parts.append(probes_document(verdicts))
    if preflight is not None:
        from trimtab.doctor.preflight.preflight import preflight_document

        parts.append(preflight_document(preflight))
    if bisections:
        from trimtab.doctor.bisect.bisect import bisection_document

        parts += map(bisection_document, bisections)
    if records:
        from trimtab.doctor.cases.runner import matrix_document

        parts += [matrix_document(records), Document("", memory_charts(records))]
    if drafts is not None:
        from trimtab.doctor.issues.draft import drafts_document

        parts.append(drafts_document(drafts))
    return joined(own or "trimtab doctor", parts)


def write_report(path: str | os.PathLike[str], document: Document) -> Path:
    """Write the page without private data, whole or not at all, and return its path.

    Errors: RequestError if the path is a folder or cannot be written.
    """
    target = Path(path)
    if target.is_dir():
        raise RequestError("is a folder", field="html", value=str(target))
    target.parent.mkdir(parents=True, exist_ok=True)
    write_text(target, FORMS[".html"].show(changed(document, clean)), field="html")
    return target


WIDTH, NAME_WIDTH, VALUE_WIDTH = 920, 330, 90
BAR, GAP, TOP = 13, 3, 26
KINDS = (("gpu_peak_bytes", "GPU"), ("host_peak_bytes", "host"))


def memory_charts(records: Sequence[Mapping[str, Any]]) -> list[Figure]:
    """Return a chart for every measured kind of memory, the GPU's first."""
    charts = []
    for field, name in KINDS:
        rows = [(record, nbytes) for record in records if isinstance(nbytes := _peak(record, field), int) and nbytes > 0]
        if rows:
            charts.append(Figure(f"Peak of {name} memory", _picture(rows, f"Peak of {name} memory per case")))
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
    return inline_svg(shapes, WIDTH, round(top + GAP), title)


# Without one of these no model is loaded.
NEEDED = ("torch", "transformers", "accelerate", "bitsandbytes", "safetensors")


@dataclass(frozen=True)
class OwnVerdict:
    """Whether trimtab can run models here. problems: the obstacles, each with its remedy; empty without any."""

    text: str
    problems: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """Return it as JSON."""
        return {"works": not self.problems, "text": self.text, "problems": list(self.problems)}


def own_verdict(environment: Environment, requirements: Sequence[str] | None = None) -> OwnVerdict:
    """Return the verdict on the interpreter that asks. requirements: of trimtab, None reads its own metadata."""
    versions = environment.versions
    outside = [
        _outside(one, versions) for one in map(Requirement, _own_requirements() if requirements is None else requirements)
        if one.name in environment.packages and _is_for_all(one)
    ]  # fmt: skip
    stops = [f"{name} is not installed ({install_command([name])})" for name in NEEDED if name not in versions]
    if environment.torch_error:
        stops.append(
            f"torch cannot be used ({environment.torch_error}): python -c 'import torch; torch.cuda.device_count()' says why"
        )
    wrong = tuple(problem for problem in (*stops, *outside) if problem)
    name = f"trimtab {versions['trimtab']}" if "trimtab" in versions else "trimtab"
    if wrong:
        does = "does not work" if stops else "was not tested with what is installed"
        return OwnVerdict(f"{name} {does} on this machine: {'; '.join(wrong)}", wrong)
    places = [f"GPU {gpu.index} ({gpu.name}, {gib(gpu.free_bytes)} free)" for gpu in environment.gpus]
    where = ", ".join(places) if places else "the CPU, without a GPU"
    return OwnVerdict(f"{name} works on this machine; models run on {where}")


def _own_requirements() -> Sequence[str]:
    try:
        return requires("trimtab") or ()
    except PackageNotFoundError:  # run from a folder of its source
        return ()


def _is_for_all(needed: Requirement) -> bool:
    """Whether it belongs to every installation on this machine, not to an extra."""
    return needed.marker is None or ("extra" not in str(needed.marker) and needed.marker.evaluate())


def _outside(needed: Requirement, versions: Mapping[str, str]) -> str:
    version = versions.get(needed.name)
    try:
        is_in_range = version is None or needed.specifier.contains(version, prereleases=True)
    except InvalidVersion:
        return ""
    if is_in_range:
        return ""
    return f"{needed.name} {version} is not {needed.specifier} (pip install '{needed.name}{needed.specifier}')"
