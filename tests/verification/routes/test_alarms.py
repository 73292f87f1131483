"""Verdicts do not cry wolf and do not sleep: a part of the proof in `tests/alarms.py`, its recorded result, and the whole."""

import json
import os
from dataclasses import replace

import pytest

from tests import ROOT, alarm_routes, alarms
from tests.alarm_faults import ADAPTER_FAULTS
from tests.alarm_routes import Route, judge_demos, judge_route
from tests.alarms import FAULTS, Right, judge_fault, judge_right
from trimtab.process.packages import stack_versions
from trimtab.verification.routes import alarm_rate

RECORDED = ROOT / "bench" / "results" / "alarms.json"
RIGHT = Right(
    family="llama", seed=1, base_dtype="bfloat16", route="trimtab", rank=8, alpha=16, strength=1.0, rslora=True,
    dora=False, embeddings=False, targets="text", dtype=None, requantize=None, threads=(1, 2, 1),
)  # fmt: skip


@pytest.mark.parametrize(
    "change",
    [
        {}, {"base_dtype": "float16", "dora": True}, {"base_dtype": "float32", "strength": 0.03, "rslora": False},
        {"requantize": "nf4-dq"}, {"dtype": "float32", "embeddings": True},
    ],
    ids=str,
)  # fmt: skip
def test_a_right_merge_passes_its_check_on_another_number_of_threads(change):
    row = judge_right(replace(RIGHT, **change), with_answers=False)
    assert row["check"] == "passed" and row["slopes"] == pytest.approx([1.0, 1.0], abs=1e-4)


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_of_a_merge_is_found(fault):
    row = judge_fault(RIGHT, fault, with_answers=False)
    assert row["check"] == "alarm"
    low, high = row["slopes"]
    expected = {
        "scale 1 % too large": (1.01, 1.01), "scale 1 % too small": (0.99, 0.99), "one module dropped": (0.0, 1.0),
        "merged twice": (2.0, 2.0), "nothing merged": (0.0, 0.0),
    }.get(fault)  # fmt: skip
    if expected is not None:
        # A slope of one tensor: rounding moves it by a step of bfloat16 over the length of a change of 8,192 values.
        assert (low, high) == pytest.approx(expected, abs=0.001)
    else:
        assert low < 0.5


@pytest.mark.parametrize("fault", ["scale 1 % too large", "one module dropped"])
def test_a_planted_fault_of_a_packed_merge_is_found(fault):
    row = judge_fault(replace(RIGHT, requantize="nf4"), fault, with_answers=False)
    assert (row["check"], row["wrong"]) == ("alarm", 14 if "scale" in fault else 1)


@pytest.mark.parametrize("route", ["peft", "bfloat16"])
def test_a_merge_that_others_rounded_is_right_and_one_percent_is_not(route):
    row = judge_right(replace(RIGHT, route=route))
    assert (row["verify"], row["alarm"], row["weights"]["verdict"]) == ("same within noise", False, "right")
    assert row["weights"]["sees_scale_fault"] and row["weights"]["false_alarm_rate"] == 1e-6
    # Far from the limit, which is for the noise of other machines.
    assert max(row["ratios"].values()) < 0.7


def test_a_wrong_scale_is_found_in_files_where_the_answers_are_within_noise():
    row = judge_fault(RIGHT, "scale 1 % too large")
    assert (row["verify"], row["alarm"], row["weights"]) == ("differs", True, "differs")


@pytest.mark.parametrize("form", ["nf4-dq", pytest.param("int8", marks=pytest.mark.slow)])
def test_a_wrong_scale_is_found_in_packed_files_and_a_right_merge_passes_whoever_packed_it(form):
    case = replace(RIGHT, route="peft", requantize=form)
    row = judge_right(case)
    assert (row["alarm"], row["weights"]["verdict"], row["weights"]["sees_scale_fault"]) == (False, "right", True)
    assert judge_fault(case, "scale 1 % too large")["verify"] == "differs"


@pytest.mark.parametrize("fault", ["scale 1 % too small", *(pytest.param(f"one module {how}", marks=pytest.mark.slow) for how in (
    "transposed", "dropped",
))])  # fmt: skip
def test_two_routes_name_the_module_whose_adapter_was_loaded_otherwise(fault):
    row = judge_route(Route("llama", "stock", 1), fault)
    assert (row["verify"], row["alarm"]) == ("differs", True)
    assert all("layers." in text for text in row["named"]) and row["named"]


def test_two_right_routes_in_other_tiers_load_the_same():
    row = judge_route(Route("qwen3", "resident", 2, dtype="float16", threads=2, rank=2, place=2))
    assert (row["alarm"], row["changes"], row["named"]) == (False, 14, [])


@pytest.mark.slow
def test_the_demo_tells_faults_from_last_bits():
    rows = judge_demos("bfloat16", 3)["rows"]
    assert [row["alarm"] for row in rows] == [row["fault"] is not None for row in rows]


# The recorded proof ---------------------------------------------------------------------------------------------------


def assert_is_proof(found):
    right, faults = found["right"], found["faults"]
    for name in ("merge_check", "verify_merged", "verify_routes", "demo"):
        assert right[name]["alarms"] == 0 and right[name]["of"] >= 200, name
    assert right["verify_merged_4bit"]["alarms"] == 0 and right["verify_merged_4bit"]["of"] >= 80
    assert set(faults["merge_check"]) == set(faults["verify_merged_4bit"]) == set(FAULTS)
    assert set(faults["verify_routes"]) == {*ADAPTER_FAULTS, *alarm_routes.ROUTE_FAULTS}
    assert set(faults["demo"]) == set(alarm_routes.DEMO_FAULTS)
    for kind in faults:
        assert all(caught == planted > 0 for caught, planted in faults[kind].values()), (kind, faults[kind])
    assert max(right["largest_share_of_limit"].values()) < 1


def test_the_recorded_proof_has_no_alarm_and_misses_no_fault():
    found = json.loads(RECORDED.read_text(encoding="utf-8"))
    assert_is_proof(found)
    assert (found["false_alarm_rate"], found["margin"]) == (alarm_rate.FALSE_ALARM_RATE, alarm_rate.MARGIN)
    assert set(found["versions"]) == set(stack_versions()) and found["seed"] == alarms.SEED
    for name in ("merge_check", "verify_merged", "verify_routes", "demo"):
        assert found["right"][name]["rate_below"] == pytest.approx(alarms.upper_bound(0, found["right"][name]["of"]))
        assert found["right"][name]["rate_below"] < 0.015
    counted = found["right"]["verify_merged"]
    assert sum(row.get("alarm", False) for row in found["rows"]["right"]) == counted["alarms"]


def test_no_alarm_in_two_hundred_bounds_the_rate_at_one_and_a_half_percent():
    assert alarms.upper_bound(0, 200) == pytest.approx(1 - 0.05 ** (1 / 200))


@pytest.mark.slow
def test_the_whole_proof(tmp_path):
    assert_is_proof(alarms.whole(max(1, (os.cpu_count() or 1) // 2), tmp_path / "rows.jsonl"))
