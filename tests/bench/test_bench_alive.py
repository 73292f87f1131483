"""The statistics of `verify --against`: the committed figures hold what the docs say, and a smaller run gives the same picture."""

import json
import re
from statistics import median

import pytest
import torch

from bench import alive
from tests import ROOT
from trimtab.verification.server import choosing
from trimtab.verification.server import verify as verify_remote
from trimtab.verification.server.faults import write_faults
from trimtab.verification.server.report import MEASURED

PAGE = (ROOT / "docs" / "is-my-adapter-alive.md").read_text("utf-8")
KEPT = json.loads((ROOT / "bench" / "results" / "alive.json").read_text("utf-8"))


def test_the_committed_summary_is_that_of_its_cases():
    assert KEPT["summary"] == alive.summary(KEPT["cases"])


def test_the_committed_cases_keep_what_the_command_promises():
    summary = KEPT["summary"]
    assert summary["right_cases"] >= 200
    assert summary["false_alarms"] == 0
    assert summary["named"] >= 0.95 * summary["faults_above_noise"] > 0
    assert summary["alive_above_noise"] == 0
    # Below the noise the word is never "alive".
    assert "alive" not in summary["words_below_noise"]
    assert "alive" not in summary["older_not_given"]
    # A word that right servers never get would be no use.
    assert summary["right_words"]["alive"] > 0.5 * summary["right_cases"]


def test_no_case_is_called_alive_while_a_fault_is_open():
    assert [row for row in KEPT["cases"] if row["verdict"] == "alive" and row["unseen"]] == []


def test_the_docs_give_the_committed_figures():
    shown = re.search(r"<!-- figures:alive -->\n(.*?)\n<!-- /figures -->", PAGE, re.DOTALL).group(1)
    assert shown == alive.figures(KEPT["summary"])  # else: python -m bench.alive --numbers ... --page


def test_every_report_says_the_measured_false_alarms():
    summary = KEPT["summary"]
    assert (MEASURED.cases, MEASURED.alarms) == (summary["right_cases"], summary["false_alarms"])
    assert MEASURED.at_most == summary["false_alarm_rate_at_most"]


def test_the_bound_of_a_rate_is_the_exact_one():
    # No alarm in n cases: the rate at which that has a chance of 5 % is 1 - 0.05 ** (1 / n).
    assert alive.at_most(0, 200) == pytest.approx(1 - 0.05 ** (1 / 200), abs=1e-4)
    # One in 20: Clopper and Pearson's table gives 0.216 for a one-sided 95 %.
    assert alive.at_most(1, 20) == pytest.approx(0.2161, abs=1e-3)
    assert alive.at_most(0, 0) is None


def test_the_lower_bound_of_a_share_is_the_exact_one_and_stands_in_the_docs():
    # 39 of 39: the share at which that has a chance of 5 % is 0.05 ** (1 / 39).
    assert alive.at_least(39, 39) == pytest.approx(0.05 ** (1 / 39), abs=1e-4)
    assert alive.at_least(19, 20) == pytest.approx(1 - 0.2161, abs=1e-3)
    assert alive.at_least(0, 0) is None
    summary = KEPT["summary"]
    assert summary["named_at_least"] == alive.at_least(summary["named"], summary["faults_above_noise"])
    assert f"share that is named is {summary['named_at_least']:.1%} (95 % confidence)" in PAGE


def test_the_docs_say_which_right_cases_share_a_server():
    right = [row for row in KEPT["cases"] if row["fault"] is None]
    servers = {(row["adapter"], row["server"]) for row in right}
    assert len(right) == 204 and len(servers) == 17
    assert all(sum((row["adapter"], row["server"]) == one for row in right) == 12 for one in servers)
    assert f"{len(servers)} servers and adapters, each asked in 12 ways" in PAGE
    assert f"the bound is {1 - 0.05 ** (1 / len(servers)):.1%}." in PAGE


def test_the_time_on_the_demo_is_recorded():
    kept = json.loads((ROOT / "bench" / "results" / "alive_time.json").read_text("utf-8"))
    assert {run["verdict"] for run in kept["runs"]} == {"alive"}
    assert all(run["requests"] <= 200 and run["cpu_s"] <= 60 for run in kept["runs"])
    assert median(run["wall_s"] for run in kept["runs"]) <= 60


def test_cases_that_are_there_are_judged_and_not_computed_again(tmp_path, monkeypatch):
    right = {"id": "q", "kind": "text", "distance": {"right": 0.0, "ignored": 3.0}, "size": {"ignored": 3.0}, "base_noise": 0.0}
    case = {"adapter": "style", "fault": None, "server": "none", "top": 20, "with_base": True, "jitter": 0.0, "base_noise": 0.0,
            "precision": "none", "questions": 16}  # fmt: skip
    judged = {"questions": [right] * 16, "faults": [["ignored", "", False]], "options": {}}
    (tmp_path / "numbers").mkdir()
    (tmp_path / "numbers" / "none-style-right.json").write_text(json.dumps([{"case": case, "judged": judged}]), "utf-8")
    for name in ("open_reference", "choose", "candidates", "write_faults"):
        monkeypatch.setattr(verify_remote, name, getattr(verify_remote, name))
    proof = alive.Proof(tmp_path / "work", None, tmp_path / "numbers")
    result = proof.run([("none", "style")], with_faults=False)
    assert result["summary"]["right_words"] == {"alive": 1}
    assert not proof.local  # no model was loaded


def test_a_fault_counts_as_right_only_under_its_own_name():
    row = {"verdict": "wrong", "named": "scale", "fault": "scale"}
    assert alive.is_right(row)
    assert not alive.is_right({**row, "named": "merged twice"})
    assert not alive.is_right({**row, "verdict": "alive", "named": None})
    assert alive.is_right({"verdict": "ignored", "named": "ignored", "fault": "ignored"})


@pytest.mark.slow
def test_a_smaller_run_raises_no_false_alarm_and_names_its_faults(tmp_path, monkeypatch):
    monkeypatch.setattr(choosing, "GENERATED", 8)
    for name in ("open_reference", "choose", "candidates", "judge"):  # a run puts its own in their places
        monkeypatch.setattr(verify_remote, name, getattr(verify_remote, name))
    monkeypatch.setattr(verify_remote, "write_faults", write_faults)
    with torch.no_grad():
        result = alive.Proof(tmp_path, tmp_path / "alive.json").run([("none", alive.PATTERNED)])
    summary = result["summary"]
    assert (summary["right_cases"], summary["false_alarms"]) == (12, 0)
    assert summary["named"] >= 0.95 * summary["faults_above_noise"] > 0
    assert summary["alive_above_noise"] == 0
    assert "alive" not in summary["words_below_noise"]
    seeded = {row["fault"] for row in result["cases"]} - {None}
    assert seeded == set(alive.OF_PATTERNED)
