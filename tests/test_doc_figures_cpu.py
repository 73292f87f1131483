"""Figures of pages that a server on a CPU was measured for, as test_doc_figures.py has them of the other results."""

from tests.test_doc_figures import ROOT, results_of


def _range(values: list[float], form: str) -> str:
    ends = [form.format(value) for value in (min(values), max(values))]
    return ends[0] if ends[0] == ends[1] else f"{ends[0]} to {ends[1]}"


def test_steps_between_tokens_on_a_cpu():
    rows = results_of("load_cpu_steps")["rows"]
    page = (ROOT / "docs" / "server-under-load.md").read_text(encoding="utf-8")
    figures = (("p99_steps", "{:.1f}"), ("tok_s", "{:.0f}"), ("ttft_ms", "{:.0f}"))
    for tokens, clients in sorted({(row["text_tokens"], row["clients"]) for row in rows}):
        cells = []
        for name, form in figures:
            for version in ("behind", "with"):
                found = [
                    row[name]["p50"] if name == "ttft_ms" else row[name]
                    for row in rows
                    if (row["text_tokens"], row["clients"], row["version"]) == (tokens, clients, version)
                ]
                cells.append(_range(found, form))
        line = f"| {tokens} | {clients} | {' | '.join(cells)} |"
        assert line in page, line


def test_the_decision_has_the_range_of_its_record():
    rows = [row for row in results_of("load_cpu_steps")["rows"] if row["version"] == "with"]
    page = (ROOT / "docs" / "decisions" / "0034-chunks-with-steps-on-a-cpu.md").read_text(encoding="utf-8")
    low, high = (f"{end(row['p99_steps'] for row in rows):.1f}" for end in (min, max))
    assert len(rows) == 8 and f"{low} to {high} steps" in page


def test_the_later_run_is_told_with_its_own_figures():
    rows = [row for row in results_of("load_cpu_steps")["rows"] if row["version"] == "later"]
    page = (ROOT / "docs" / "server-under-load.md").read_text(encoding="utf-8").replace("\n", " ")
    short, long = (
        _range([row["p99_steps"] for row in rows if row["text_tokens"] == tokens], "{:.1f}") for tokens in (64, 256)
    )
    assert len(rows) == 4 and f"had {short} steps for 64 tokens and {long} for 256" in page
