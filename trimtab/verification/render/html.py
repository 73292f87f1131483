"""A parity report as one HTML page: self-contained, light and dark, all text escaped, plots inline."""

from __future__ import annotations

import html
from collections.abc import Sequence
from typing import TYPE_CHECKING

from trimtab.printable import printable
from trimtab.verification.merges import variants_text as lane_words
from trimtab.verification.render import plots
from trimtab.verification.render import text as words

if TYPE_CHECKING:
    from trimtab.verification.merges.variants import LaneReport
    from trimtab.verification.render.report import ParityReport

STYLE = """
:root { color-scheme: light dark; --ink: #1c2330; --soft: #5d6778; --paper: #fbfaf7; --rule: #d9d6cd;
  --good: #1f7a4d; --bad: #b3361e; --noise: #8a6a12; --line: #2458a8; --bar: #5b84c4; }
@media (prefers-color-scheme: dark) { :root { --ink: #e6e8ec; --soft: #9aa4b5; --paper: #14181f; --rule: #303846;
  --good: #58c48c; --bad: #f0806a; --noise: #d9b450; --line: #86b2f5; --bar: #4a72b0; } }
body { font: 15px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--paper); max-width: 72rem;
  margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.4rem; } h2 { font-size: 1.1rem; margin-top: 2rem; } h3 { font-size: 1rem; }
table { border-collapse: collapse; font-size: 13px; display: block; overflow-x: auto; }
th, td { border-bottom: 1px solid var(--rule); padding: .25rem .6rem; text-align: left; white-space: nowrap; }
td.wide { white-space: normal; min-width: 14rem; }
.same { color: var(--good); } .differs { color: var(--bad); } .noise { color: var(--noise); }
.soft { color: var(--soft); font-size: 13px; }
svg { width: 100%; max-width: 720px; height: auto; display: block; margin: .3rem 0 1rem; }
svg text { fill: var(--soft); font-size: 10px; } svg .grid { stroke: var(--rule); }
svg .line { fill: none; stroke: var(--line); } svg .dot { fill: var(--line); } svg .bar { fill: var(--bar); }
svg .floor { stroke: var(--noise); stroke-dasharray: 5 4; } svg .mark { stroke: var(--soft); stroke-dasharray: 2 3; }
"""
CLASSES = {"same": "same", "same within noise": "noise", "cannot tell": "noise", "differs": "differs"}


def escape(text: str) -> str:
    """Return text for HTML, with control characters of names escaped."""
    return html.escape(printable(text))


def report_html(report: ParityReport) -> str:
    """Return the page."""
    words_of_verdict = words.verdict_words(report)
    parts = [f'<h1 class="{"same" if report.ok else "differs"}">{escape(words_of_verdict)}</h1>']
    parts.append(f"<p>model {escape(report.model)}<br>adapter {escape(report.adapter or 'none')}</p>")
    parts.append(_list([words.route_words(report.reference), words.route_words(report.subject)]))
    parts.append(_table(words.HEAD, [words.prompt_row(row) for row in report.prompts]))
    if any(row.merged_matches for row in report.prompts):
        parts.append(_table(words.MERGE_HEAD, [words.merge_row(row) for row in report.prompts]))
    parts += [f'<p class="soft">{escape(line.strip())}</p>' for line in words.floor_words(report)]
    parts += [f'<p class="soft">{escape(line.strip())}</p>' for line in words.weights_words(report)]
    if report.findings:
        parts += ["<h2>Findings</h2>", _list(report.findings)]
    parts += ["<h2>Answers</h2>", _answers(report), "<h2>Largest difference by position</h2>", _positions(report)]
    if report.layers:
        names = [f"layer {at}" if at else "embedding" for at in range(len(report.layers))]
        parts += ["<h2>Relative difference of hidden states by layer</h2>"]
        parts.append(plots.bars(report.layers, names, label="difference by layer", logarithmic=True))
    if report.survival:
        parts += ["<h2>Survival of the adapter's change by module</h2>", *_survival(report)]
    if report.lanes is not None:
        parts += ["<h2>Merge lanes</h2>", lanes_html(report.lanes)]
    versions = ", ".join(f"{name} {version}" for name, version in report.versions.items())
    parts.append(f'<p class="soft">{escape(versions)}</p>')
    return _document(words_of_verdict, parts)


def lanes_html(report: LaneReport) -> str:
    """Return the lanes as a section of a page."""
    parts = [_table(lane_words.HEAD, [lane_words.lane_row(run) for run in report.lanes])]
    parts.append(f'<p class="soft">{escape(lane_words.LEGEND)}</p>')
    for run in report.lanes:
        parts.append(f"<h3>{escape(run.lane.name)}: {escape(run.lane.title)}</h3>")
        if run.prompts:
            parts.append(_table(lane_words.PROMPT_HEAD, lane_words.prompt_rows(run)))
        notes = [text for text in (lane_words.error_words(run), *run.notes) if text]
        if notes:
            parts.append(_list(notes))
        if run.survival:
            shares, names = [row.survived for row in run.survival], [row.module_path for row in run.survival]
            parts.append(plots.bars(shares, names, label=f"survival in {run.lane.name}", logarithmic=False, line=1.0))
    return "".join(parts)


def _positions(report: ParityReport) -> str:
    parts = []
    for row in report.prompts:
        title = row.id if row.adapter is None else f"{row.id} ({row.adapter})"
        parts.append(f"<h3>{escape(title)}</h3>")
        limit = report.floor.limits.get(row.id)
        parts.append(
            plots.lines(
                row.difference.max_abs_by_position, label=f"difference by position, {title}",
                dashed=limit.max_abs if limit is not None else None, dashed_label="limit of the noise", mark=row.prompt_tokens,
                mark_label="answer",
            )
        )  # fmt: skip
    return "".join(parts)


def _survival(report: ParityReport) -> list[str]:
    names = [row.module_path for row in report.survival]
    return [
        *[f'<p class="soft">{escape(line)}</p>' for line in words.survival_words(report)],
        plots.bars([row.survived for row in report.survival], names, label="survival by module", logarithmic=False, line=1.0),
        '<p class="soft">other changes, relative to the norm of the adapter\'s</p>',
        plots.bars([row.noise for row in report.survival], names, label="noise by module", logarithmic=True),
    ]


def _answers(report: ParityReport) -> str:
    head = ("prompt", report.reference["label"], report.subject["label"], "expected")
    rows = [(r.id, r.reference_text or "-", r.subject_text or "-", r.expected_text or "-") for r in report.prompts]
    return _table(head, rows, wide=True)


def _table(head: Sequence[str], rows: Sequence[Sequence[str]], *, wide: bool = False) -> str:
    def cell(text: str) -> str:
        kind = CLASSES.get(text) or ("wide" if wide else "")
        return f'<td class="{kind}">{escape(text)}</td>' if kind else f"<td>{escape(text)}</td>"

    top = "".join(f"<th>{escape(text)}</th>" for text in head)
    body = "".join(f"<tr>{''.join(cell(text) for text in row)}</tr>" for row in rows)
    return f"<table><thead><tr>{top}</tr></thead><tbody>{body}</tbody></table>"


def _list(items: Sequence[str]) -> str:
    return f"<ul>{''.join(f'<li>{escape(item)}</li>' for item in items)}</ul>"


def _document(title: str, parts: Sequence[str]) -> str:
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(title)}</title><style>{STYLE}</style></head>\n<body>\n" + "\n".join(parts) + "\n</body></html>\n"
    )
