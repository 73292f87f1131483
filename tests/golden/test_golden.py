"""Placements, plans, demo answers, merged files and verdicts are what was recorded."""

import json

import pytest

from tests import golden

RECORDS = golden.read_records()


@pytest.mark.parametrize(
    "what", ["placements", "merged", *(pytest.param(name, marks=pytest.mark.slow) for name in ("answers", "verified"))]
)
def test_nothing_moved(what):
    assert golden.RECORDED[what]() == RECORDS[what]


@pytest.fixture(scope="module")
def plans():
    return json.loads(json.dumps(golden.plans()))


@pytest.mark.parametrize("name", RECORDS["plans"])
def test_no_plan_moved(plans, name):
    """After a change of the memory model on purpose: `python -m tests.golden plans`."""
    assert plans[name] == RECORDS["plans"][name]


def test_every_request_is_recorded(plans):
    assert list(plans) == list(RECORDS["plans"])


def test_records_are_written_as_they_are_read(tmp_path, monkeypatch):
    files = {name: tmp_path / f"{name}.json" for name in ("FILE", "PLANS_FILE")}
    for name, file in files.items():
        file.write_text(getattr(golden, name).read_text(encoding="utf-8"), encoding="utf-8")
        monkeypatch.setattr(golden, name, file)
    monkeypatch.setattr(golden, "RECORDED", {"merged": lambda: {"file": "hash"}})
    golden.write_records(["merged"])
    assert golden.read_records() == RECORDS | {"merged": {"file": "hash"}}
