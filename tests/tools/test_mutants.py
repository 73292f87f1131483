"""Tests that fail without a mutant are found before they judge one, and so are changes that cannot be imported."""

import pytest

from tools import mutants

SEES = """import pytest
def test_right(): pass
@pytest.mark.parametrize('x', [1, 2])
def test_wrong(x): assert x == 1
"""


def test_tests_that_fail_or_cannot_be_imported_without_a_mutant_are_named(tmp_path):
    (tmp_path / "test_a.py").write_text(SEES, encoding="utf-8")
    (tmp_path / "test_b.py").write_text("import nothing_here\n\n\ndef test_lost():\n    pass\n", encoding="utf-8")
    right, wrong, lost = "test_a.py::test_right", "test_a.py::test_wrong", "test_b.py::test_lost"
    assert mutants.failing(tmp_path, [right]) == mutants.failing(tmp_path, []) == []
    assert mutants.failing(tmp_path, [wrong, lost, right]) == [lost, wrong]


@pytest.mark.skipif("os.name == 'nt'", reason="the change is made by a script of a shell")
@pytest.mark.parametrize(("line", "said"), [("x = {/y}", "not Python"), ("raise ValueError", "found")])
def test_a_change_that_is_not_python_is_no_mutant_and_one_that_a_hook_cannot_import_is_found(line, said, tmp_path, monkeypatch):
    (tmp_path / "cosmic-ray").write_text(f"#!/bin/sh\necho '{line}' > $2\n", encoding="utf-8")
    (tmp_path / "cosmic-ray").chmod(0o755)
    (tmp_path / "a.py").write_text("x = {**y}\n", encoding="utf-8")
    (tmp_path / "conftest.py").write_text("def pytest_collection_modifyitems():\n    import a\n", encoding="utf-8")
    (tmp_path / "test_a.py").write_text("def test_a():\n    pass\n", encoding="utf-8")
    monkeypatch.setattr(mutants, "TOOLS", tmp_path)
    assert mutants.outcome(tmp_path, mutants.Mutant("a.py", "core/Pow_Div", 0, 1), ["test_a.py::test_a"])["outcome"] == said
