"""Figures of pages that a server on a CPU was measured for, as test_doc_figures.py has them of the other results."""

from tests.docs.test_doc_figures import ROOT, results_of


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
            found = [
                row[name]["p50"] if name == "ttft_ms" else row[name]
                for row in rows
                if (row["text_tokens"], row["clients"], row["version"]) == (tokens, clients, "behind")
            ]
            cells.append(_range(found, form))
        line = f"| {tokens} | {clients} | {' | '.join(cells)} |"
        assert line in page, line


def test_a_prediction_for_a_cpu_is_within_a_factor_of_two():
    rows = results_of("cpu_predictions")["rows"].values()
    ratios = [row["predicted_tokens_per_s"] / row["measured_tokens_per_s"] for row in rows]
    assert "within a factor of two of the measured rate" in (ROOT / "docs" / "read-a-plan.md").read_text(encoding="utf-8")
    assert len(ratios) == 8 and 0.5 <= min(ratios) <= max(ratios) <= 2
