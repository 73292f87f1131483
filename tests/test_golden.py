"""Placements, demo answers and merged files are what was recorded."""

import json

import pytest

from tests import golden

RECORDS = json.loads(golden.FILE.read_text(encoding="utf-8"))


@pytest.mark.parametrize("what", ["placements", pytest.param("answers", marks=pytest.mark.slow), "merged"])
def test_nothing_moved(what):
    assert getattr(golden, what)() == RECORDS[what]
