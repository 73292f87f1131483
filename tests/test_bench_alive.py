"""The statistics of `verify --against`: the committed figures hold what the docs say, and a smaller run gives the same picture."""

import json
import re
from pathlib import Path

import pytest
import torch

from bench import alive
from trimtab.proof.remote import choosing, verify_remote
from trimtab.proof.remote.faults import write_faults

ROOT = Path(__file__).parent.parent
PAGE = (ROOT / "docs" / "is-my-adapter-alive.md").read_text("utf-8")
KEPT = json.loads((ROOT / "bench" / "results" / "alive.json").read_text("utf-8"))


def test_the_committed_summary_is_that_of_its_cases():
    assert KEPT["summary"] == alive.summary(KEPT["cases"])


def test_the_committed_cases_keep_what_the_command_promises():
    summary = KEPT["summary"]
    assert summary["false_alarms"] == 0
    assert summary["named"] >= 0.95 * summary["faults_above_noise"] > 0
    assert summary["confident_alive_above"] == summary["confident_alive_below"] == 0
    assert "alive, confident" not in summary["older_not_given"]


def test_the_docs_give_the_committed_figures():
    summary = KEPT["summary"]
    told = re.search(r"<!-- figures:alive -->(.*?)<!-- /figures -->", PAGE, re.DOTALL).group(1)
    numbers = [int(number) for number in re.findall(r"\b\d+\b", told)]
    words = summary["right_words"]
    for wanted in (
        summary["right_cases"], words["alive"], words.get("cannot tell", 0), summary["faults_above_noise"], summary["named"],
        summary["faults_below_noise"],
    ):  # fmt: skip
        assert wanted in numbers
    assert "none was called wrong" in " ".join(told.split())


def test_a_fault_counts_as_right_only_under_its_own_name():
    row = {"verdict": "wrong", "named": "scale", "fault": "scale"}
    assert alive.is_right(row)
    assert not alive.is_right({**row, "named": "merged twice"})
    assert not alive.is_right({**row, "verdict": "alive", "named": None})
    assert alive.is_right({"verdict": "ignored", "named": "ignored", "fault": "ignored"})


@pytest.mark.slow
def test_a_smaller_run_raises_no_false_alarm_and_names_its_faults(tmp_path, monkeypatch):
    monkeypatch.setattr(choosing, "GENERATED", 8)
    for name in ("open_reference", "choose", "candidates"):  # a run puts its own in their places
        monkeypatch.setattr(verify_remote, name, getattr(verify_remote, name))
    monkeypatch.setattr(verify_remote, "write_faults", write_faults)
    with torch.no_grad():
        result = alive.Proof(tmp_path, tmp_path / "alive.json").run([("none", alive.PATTERNED)])
    summary = result["summary"]
    assert (summary["right_cases"], summary["false_alarms"]) == (12, 0)
    assert summary["named"] >= 0.95 * summary["faults_above_noise"] > 0
    assert summary["confident_alive_above"] == summary["confident_alive_below"] == 0
    seeded = {row["fault"] for row in result["cases"]} - {None}
    assert seeded == set(alive.OF_PATTERNED)
