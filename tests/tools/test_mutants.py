"""Tests that fail without a mutant are found before they judge one."""

from tools import mutants

SEES = """import pytest


def test_right():
    pass


@pytest.mark.parametrize('x', [1, 2])
def test_wrong(x):
    assert x == 1
"""


def test_tests_that_fail_or_cannot_be_imported_without_a_mutant_are_named(tmp_path):
    (tmp_path / "test_a.py").write_text(SEES, encoding="utf-8")
    (tmp_path / "test_b.py").write_text("import nothing_here\n\n\ndef test_lost():\n    pass\n", encoding="utf-8")
    right, wrong, lost = "test_a.py::test_right", "test_a.py::test_wrong", "test_b.py::test_lost"
    assert mutants.failing(tmp_path, [right]) == mutants.failing(tmp_path, []) == []
    assert mutants.failing(tmp_path, [wrong, lost, right]) == [lost, wrong]
