"""How a matrix is shared out among processes, and how their runs come together again."""

from pathlib import Path

import pytest

from bench import matrix
from trimtab.doctor.cases.cases import CASE_NAMES, CASES


def test_every_case_is_run_once_and_those_that_fill_the_card_alone():
    groups, alone = matrix.shared_out(None, 7)
    assert sorted([*alone, *(name for group in groups for name in group)]) == sorted(CASE_NAMES)
    assert len(groups) == 7 and max(map(len, groups)) - min(map(len, groups)) <= 1
    assert {case.name for case in CASES if case.pressure is not None} == set(alone) != set()
    assert matrix.shared_out([alone[0]], 4) == ([], [alone[0]])


def test_later_runs_replace_earlier_ones_in_the_tables_order():
    old = [
        {"case": CASE_NAMES[2], "engine": "stock", "label": "OLD"},
        {"case": CASE_NAMES[0], "engine": "trimtab", "label": "KEPT"},
    ]
    new = [{"case": CASE_NAMES[2], "engine": "stock", "label": "NEW"}, {"case": CASE_NAMES[0], "engine": "stock", "label": "NEW"}]
    found = [(run["case"], run["engine"], run["label"]) for run in matrix.in_order(old, new)]
    first, third = CASE_NAMES[0], CASE_NAMES[2]
    assert found == [(first, "stock", "NEW"), (first, "trimtab", "KEPT"), (third, "stock", "NEW")]


def test_a_process_that_ends_early_is_no_short_table():
    kept = []
    with pytest.raises(SystemExit, match="1 of 1 processes ended early"):
        matrix.in_jobs(["--engines", "nonsense"], [CASE_NAMES[0]], 2, kept.extend)
    assert kept == []


def test_what_was_found_is_kept_when_the_run_is_ended_from_outside(monkeypatch):
    """SIGTERM becomes SystemExit while a process is waited for; those that still run are ended."""
    killed, kept = [], []

    class Process:
        def __init__(self, command):
            matrix.write(Path(command[-1]), {}, [{"case": CASE_NAMES[0], "engine": "stock", "label": "PASS"}])

        def wait(self):
            raise SystemExit(143)

        def kill(self):
            killed.append(self)

    monkeypatch.setattr(matrix.subprocess, "Popen", Process)
    with pytest.raises(SystemExit) as ended:
        matrix.in_jobs([], [CASE_NAMES[0]], 2, kept.extend)
    assert ended.value.code == 143 and len(killed) == 1
    assert [run["label"] for run in kept] == ["PASS"]
