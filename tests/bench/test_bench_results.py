"""What benches write down: the statistics of `verify --against`, the limits of a card, and results by case and device."""

import json
import re
from dataclasses import replace
from functools import partial
from statistics import median

import pytest
import torch

from bench import alive, cards
from bench.kv8 import add
from tests import ROOT
from tests.anatomies import with_int8_head
from tests.planning.values.test_execution import ADAPTER, E4B, GIB, H200, card
from tools import readme_numbers
from trimtab.planning import make_plan
from trimtab.request import LoadRequest
from trimtab.verification.server import choosing, verify
from trimtab.verification.server.faults import write_faults
from trimtab.verification.server.report import MEASURED

PAGE = (ROOT / "docs" / "is-my-adapter-alive.md").read_text("utf-8")
KEPT = json.loads((ROOT / "bench" / "results" / "alive.json").read_text("utf-8"))


def test_the_committed_summary_is_that_of_its_cases():
    assert KEPT["summary"] == alive.summary(KEPT["cases"])


def test_the_committed_cases_keep_what_the_command_promises():
    summary = KEPT["summary"]
    assert summary["right_cases"] >= 200 and summary["false_alarms"] == 0
    assert summary["named"] >= 0.95 * summary["faults_above_noise"] > 0 and summary["alive_above_noise"] == 0
    # Below the noise the word is never "alive".
    assert "alive" not in summary["words_below_noise"] and "alive" not in summary["older_not_given"]
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
    assert alive.at_most(1, 20) == pytest.approx(0.2161, abs=1e-3) and alive.at_most(0, 0) is None


def test_the_lower_bound_of_a_share_is_the_exact_one_and_stands_in_the_docs():
    # 39 of 39: the share at which that has a chance of 5 % is 0.05 ** (1 / 39).
    assert alive.at_least(39, 39) == pytest.approx(0.05 ** (1 / 39), abs=1e-4)
    assert alive.at_least(19, 20) == pytest.approx(1 - 0.2161, abs=1e-3) and alive.at_least(0, 0) is None
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
        monkeypatch.setattr(verify, name, getattr(verify, name))
    proof = alive.Proof(tmp_path / "work", None, tmp_path / "numbers")
    assert proof.run([("none", "style")], with_faults=False)["summary"]["right_words"] == {"alive": 1}
    assert not proof.local  # no model was loaded


def test_a_fault_counts_as_right_only_under_its_own_name():
    row = {"verdict": "wrong", "named": "scale", "fault": "scale"}
    assert alive.is_right(row) and not alive.is_right({**row, "named": "merged twice"})
    assert not alive.is_right({**row, "verdict": "alive", "named": None})
    assert alive.is_right({"verdict": "ignored", "named": "ignored", "fault": "ignored"})


@pytest.mark.slow
def test_a_smaller_run_raises_no_false_alarm_and_names_its_faults(tmp_path, monkeypatch):
    monkeypatch.setattr(choosing, "GENERATED", 8)
    for name in ("open_reference", "choose", "candidates", "judge"):  # a run puts its own in their places
        monkeypatch.setattr(verify, name, getattr(verify, name))
    monkeypatch.setattr(verify, "write_faults", write_faults)
    with torch.no_grad():
        result = alive.Proof(tmp_path, tmp_path / "alive.json").run([("none", alive.PATTERNED)])
    summary = result["summary"]
    assert (summary["right_cases"], summary["false_alarms"]) == (12, 0)
    assert summary["named"] >= 0.95 * summary["faults_above_noise"] > 0 and summary["alive_above_noise"] == 0
    assert "alive" not in summary["words_below_noise"]
    seeded = {row["fault"] for row in result["cases"]} - {None}
    assert seeded == set(alive.OF_PATTERNED)


def planned(gib, head="full", *, anatomy=E4B, gpu_memory=None, **asked):
    request = LoadRequest(model="m", quant="nf4-dq", head=head, gpu_memory_bytes=gpu_memory, **asked)
    return make_plan(request, anatomy, adapters=ADAPTER, machine=card(gib), rates=H200, head8=with_int8_head(E4B), is_advised=False)


def row_of(gib, tok_s=None):
    plan = planned(gib)
    return plan, cards.link_row(plan, tok_s, cards.forced_bytes(plan, partial(planned, gib)))


def test_the_link_allows_its_rate_over_the_bytes_that_a_step_copies():
    plan, row = row_of(3.5, tok_s=50.0)
    off = [one for one in plan.placements if one.part in ("language", "head") and one.tier == "stream"]
    copied = sum(one.host_bytes for one in off)
    assert copied and row["copied_gib"] == round(copied / GIB, 3) and row["link_gb_s"] == 52.4
    assert row["link_limit_tok_s"] == pytest.approx(52.4e9 / copied, abs=0.1)
    assert row["link_share"] == pytest.approx(50 * copied / 52.4e9, abs=1e-3)
    assert plan.execution.tokens_per_s < row["link_limit_tok_s"]


def test_a_card_that_holds_the_decoder_has_no_limit_by_its_link():
    plan, row = row_of(8, tok_s=400.0)
    assert not plan.blocks_off_device
    assert (row["copied_gib"], row["forced_gib"], row["link_limit_tok_s"], row["link_share"]) == (0.0, 0.0, None, None)


def test_no_plan_copies_less_than_its_budget_forces():
    forced = []
    for gib in (2.6, 3.0, 3.5, 4.0):
        _, row = row_of(gib)
        assert row["forced_gib"] <= row["copied_gib"]
        forced.append(row["forced_gib"])
    assert forced == sorted(forced, reverse=True) and forced[0] > 0.5 and forced[-1] < forced[0]


def test_towers_tables_and_what_the_cpu_computes_are_not_copied_in_a_step():
    plan = planned(8, place={"vision": "stream", "audio": "disk", "language": "host"})
    assert cards.copied_bytes(plan) == 0
    some = planned(8, place={"model.language_model.layers.1": "disk"})
    (row,) = [one for one in some.placements if one.tier == "disk"]
    assert cards.copied_bytes(some) == row.disk_bytes + row.host_bytes > 0


def test_modes_that_a_model_does_not_have_are_left_out():
    again = partial(planned, 3.5, anatomy=replace(E4B, fused_unsupported="its layers have experts"))
    assert cards.forced_bytes(again(), again) > 0


def test_stock_rows_of_whole_models_are_among_the_cases():
    names = {cards.name_of(case) for case in cards.CASES}
    assert {"e4b:0:full:enginestock", "e2b:0:full:enginestock", "qwen3-8b:0:full:enginestock"} <= names


def test_the_table_shows_the_link_once_a_row_has_it():
    row = {"model": "e4b", "card_gib": 4, "head": "full", "chosen_head": "full", "execution": "fused", "tok_s": 111.1}
    where = {"gpu": "a GPU", "python": "3.12"}
    assert "link limit" not in readme_numbers.cards({"environment": where, "rows": [row]})
    link = {"link_limit_tok_s": 140.2, "link_share": 0.792, "forced_gib": 0.31}
    whole = {**row, "card_gib": 8, "link_limit_tok_s": None, "link_share": None, "forced_gib": 0.0}
    lines = readme_numbers.cards({"environment": where, "rows": [{**row, **link}, whole]}).splitlines()
    assert "| link limit tokens/s | of it | forced GiB |" in lines[0]
    assert lines[2].endswith("| 140 | 0.79 | 0.31 |") and lines[3].endswith("| - | - | 0.00 |")


def test_rows_of_another_machine_are_named_after_it_and_compared_with_its_own():
    first, other = ({"gpu": f"NVIDIA {name}", "python": "3.12"} for name in ("H200", "H100 80GB HBM3"))

    def row(gib, tok_s, streamed):
        return {"model": "e4b", "card_gib": gib, "head": "auto", "tok_s": tok_s, "predicted_tok_s": tok_s, "streamed_gib": streamed}

    results = cards.merged({}, [row(4, 400.0, 0.0)], first)
    results = cards.merged(results, [row(4, 380.0, 0.0), row(3.7, 358.0, 0.1), row(3.5, 176.0, 0.3)], other)
    # 358 is nine tenths of 380 and more, but not of another GPU's 400.
    assert "On 3.5 GiB and less" in readme_numbers.link_limit(results) and "(H100)" in readme_numbers.link_limit(results)
    assert [readme_numbers._gpu(one, results) for one in results["rows"]] == ["H200", "H100", "H100", "H100"]


RESULTS = ROOT / "bench" / "results" / "kv8.json"


def run(gpu: str | None, mark: int, **case) -> dict:
    return {"environment": {"gpu": gpu}, "case": case, "steps": [{"ms": mark}]}


def test_a_run_replaces_its_own_case_and_no_other(tmp_path):
    file = tmp_path / "kv8.json"
    file.write_text(RESULTS.read_text(encoding="utf-8"), encoding="utf-8")
    recorded = json.loads(file.read_text(encoding="utf-8"))["runs"]
    e4b, longer = {"model": "e4b", "rows": 8, "context": 4096}, {"model": "e4b", "rows": 8, "context": 32768}
    qwen = {"model": "qwen3-8b", "rows": 8, "context": 4096}
    own = {"environment": {"gpu": "H100"}, "case": {"model": "mine", "prompts": "a.jsonl", "quant": "nf4-dq"}, "own": {}}
    kept = [run("H200", 1, **e4b), run("H100", 2, **longer), run("H100", 3, **qwen), own]
    for one in (kept[0], run("H100", 4, **e4b), *kept[1:], run("H100", 5, **dict(reversed(e4b.items())))):
        add(file, one)
    runs = json.loads(file.read_text(encoding="utf-8"))["runs"]
    assert runs == [*recorded, *kept, run("H100", 5, **e4b)]
    demo = {"environment": {"gpu": None}, "demo": [{"quant": "none"}], "random": []}
    add(file, demo)
    assert json.loads(file.read_text(encoding="utf-8"))["runs"] == [*runs[len(recorded) :], demo]


def test_a_first_run_makes_the_file(tmp_path):
    add(tmp_path / "new.json", run("H100", 1, model="e4b"))
    assert json.loads((tmp_path / "new.json").read_text(encoding="utf-8")) == {"runs": [run("H100", 1, model="e4b")]}
