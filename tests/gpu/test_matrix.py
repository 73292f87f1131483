"""The matrix on a GPU: the imitation's answers for real, memory measured, the placement by devices."""

import pytest

from trimtab.doctor.cases.runner import run_matrix

CASES = ("R05_ALL_GPU_4BIT", "R03_SPLIT_4BIT", "SPLIT_4BIT_NO_ADAPTER", "SPLIT_4BIT_ADAPTER", "SPLIT_4BIT_BRIDGE")


@pytest.fixture(scope="module")
def runs():
    found = run_matrix(cases=CASES, device="cuda", timeout_s=120)
    return {(run["case"], run["engine"]): run for run in found}


def test_control_case_passes_with_its_memory_measured(runs):
    run = runs["R05_ALL_GPU_4BIT", "stock"]
    assert run["label"] == "PASS"
    assert 0 < run["memory"]["gpu_allocated_bytes"] <= run["memory"]["gpu_peak_bytes"] <= run["memory"]["gpu_reserved_bytes"]


def test_first_reports_case_fails_under_pressure(runs):
    assert runs["R03_SPLIT_4BIT", "stock"]["label"] in (
        "FAIL_BNB_PARAM_CONSTRUCTOR", "FAIL_QUANT_STATE_META_COPY", "FAIL_EMBED_TOKENS_META",
    )  # fmt: skip


def test_offload_is_undone_by_peft_and_kept_by_the_bridge(runs):
    undone, kept = runs["SPLIT_4BIT_ADAPTER", "stock"], runs["SPLIT_4BIT_BRIDGE", "stock"]
    assert undone["label"] == "PASS_BUT_PLACEMENT_UNDONE" and undone["offloaded"]["after"] == 0
    assert kept["label"] == "PASS" and kept["offloaded"]["after"] == kept["offloaded"]["before"] > 0


def test_split_base_without_an_adapter_passes(runs):
    run = runs["SPLIT_4BIT_NO_ADAPTER", "stock"]
    assert run["label"] == "PASS" and run["placement_kept"] is True


@pytest.mark.parametrize("case", CASES)
def test_trimtab_answers_every_case(runs, case):
    run = runs[case, "trimtab"]
    assert run["label"] == "PASS" and run["placement_kept"] is True, run["exception"]
