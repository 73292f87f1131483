"""Our own expressions over foreign texts: what they find stays, and the time does not grow with the square of the text."""

from __future__ import annotations

import re

import pytest

from trimtab import redact
from trimtab.runtime import call_values


def test_arguments_without_an_end_are_not_read_and_cost_little() -> None:
    body = "<parameter=a>\n1\n</parameter>\n<parameter=b>\ntwo" + "<parameter=c>\n" * 100_000
    assert call_values.tagged_arguments(body, None) == {"a": 1}


@pytest.mark.parametrize(
    ("pattern", "text"), [(redact._MAIL, "_" * 200_000), (redact._PACKAGES, "<|" * 100_000)], ids=["mail", "packages"]
)
def test_a_long_text_without_a_match_is_searched_once(pattern: re.Pattern[str], text: str) -> None:
    assert pattern.sub("", text) == text


def test_addresses_and_package_paths_are_found_as_before() -> None:
    mail = redact._MAIL.sub("*", "write to jane.doe+x@mail.example.org, or a@b.cc+y@d.example")
    assert mail == "write to *, or **"
    assert redact._PACKAGES.sub("", "/usr/site-packages/torch/a.py 'C:\\x\\dist-packages\\y'") == "torch/a.py 'y'"
