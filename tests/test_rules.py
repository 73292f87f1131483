"""A rule over many files or records names every one that breaks it, and still takes fixtures."""

import inspect

import pytest

from tests.raised import raised
from tests.rules import ROOT, each


def test_every_item_that_breaks_a_rule_is_named_with_its_reason():
    @each("number, kind", [(1, "a"), (2, "b"), (3, 0)], where=lambda item: f"item {item[0]}")
    def rule(number, kind, tmp_path):
        if not isinstance(kind, str):
            raise TypeError(f"{tmp_path} {kind}")
        assert number == 2, "odd"

    assert list(inspect.signature(rule).parameters) == ["tmp_path"]
    first, *rest = str(raised(pytest.fail.Exception, rule, tmp_path="t")).splitlines()
    assert first == "2 of 3:" and [line.partition(": ")[0] for line in rest if line.startswith("item")] == ["item 1", "item 3"]
    assert "odd" in rest[0] and "TypeError: t 0" in rest[-1]


def test_a_file_is_named_by_its_path_from_the_root():
    @each("file", [ROOT / "tests" / "rules.py"])
    def rule(file):
        assert not file.exists(), "there"

    with pytest.raises(pytest.fail.Exception, match=r"(?m)^tests/rules\.py: there"):
        rule()


def test_a_rule_about_nothing_is_refused_and_items_may_be_found_by_the_test():
    for nothing in ([], list):
        with pytest.raises(AssertionError, match="nothing to check"):
            each("file", nothing)(lambda file: None)()
    seen = []
    each("number", lambda: range(3))(lambda number: seen.append(number))()
    assert seen == [0, 1, 2]
