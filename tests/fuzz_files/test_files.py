"""Mutated files of every kind end in an answer or in an error of this package, within a second and 500 MB."""

from __future__ import annotations

import gc
import json
import os
import time
from pathlib import Path

import pytest

from tests.fuzz_files import kinds, mutate, run
from tests.fuzz_files.kinds import Input

# `make test-all` tries thousands.
CASES = int(os.environ.get("TRIMTAB_FUZZ_CASES", "60"))


@pytest.mark.parametrize("kind", list(kinds.KINDS))
def test_no_mutated_file_is_more_than_an_error(kind: str):
    result = run.run(kind, CASES)
    assert result["findings"] == []
    assert result["outcomes"]["taken"] and len(result["outcomes"]) > 1  # some are still valid, and some are refused


def used(monkeypatch: pytest.MonkeyPatch, work: Path, use) -> dict:
    """Return the result of ten cases of a kind that does something of its own with its file."""
    (work / "a.json").write_text('{"a": [1, "b"]}')
    given = Input(work, (("a.json", mutate.of_text),), use)
    monkeypatch.setitem(kinds.KINDS, "own", (lambda folder: [given], 10))
    return run.run("own", 10)


def test_the_fuzz_sees_foreign_exceptions_and_names_the_case(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    valid = (tmp_path / "a.json", '{"a": [1, "b"]}')

    def use(folder: Path) -> None:
        if (folder / "a.json").read_text(errors="replace") != valid[1]:
            raise KeyError("gone")

    result = used(monkeypatch, tmp_path, use)
    assert result["outcomes"]["foreign"] >= 8 and {finding["outcome"] for finding in result["findings"]} == {"KeyError"}
    assert "gone" in result["findings"][0]["trace"] and result["findings"][0]["number"] == 0
    assert valid[0].read_text() == valid[1]  # put back after each case


def test_the_fuzz_sees_time_and_memory(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setattr(run, "MOST_S", 0.02)
    monkeypatch.setattr(run, "MOST_BYTES", 32 * 2**20)

    def spend(folder: Path) -> None:
        end = time.process_time() + 0.03
        while time.process_time() < end:
            pass

    assert len(used(monkeypatch, tmp_path, spend)["findings"]) == 10
    gc.collect()
    held: list[bytearray] = []  # counts in what is resident too, where the kernel's peak cannot be read
    result = used(monkeypatch, tmp_path, lambda folder: held.append(bytearray(b"x") * (64 * 2**20)))
    assert len(result["findings"]) >= 8  # what other tests' threads and garbage free during a case hides as much of it
    assert used(monkeypatch, tmp_path, lambda folder: None)["findings"] == []


@pytest.mark.parametrize("change", [mutate.of_text, mutate.of_bytes])
def test_a_case_is_the_same_again(change):
    raw = json.dumps({"a": {"b": [1, 2.5, "c", None, {}]}, "d": "e" * 50}).encode()
    first = [change(raw, run.Random(f"k 1 {number}")) for number in range(100)]
    assert first == [change(raw, run.Random(f"k 1 {number}")) for number in range(100)]
    assert len(set(first)) > 60


@pytest.mark.skipif(not run.RECORD.exists(), reason="python -m tests.fuzz_files.run --save has not been run yet")
def test_the_record_has_as_many_cases_as_are_promised():
    record = json.loads(run.RECORD.read_text())
    assert {one["kind"]: one["cases"] for one in record["kinds"]} == {kind: cases for kind, (_, cases) in kinds.KINDS.items()}
    assert [one for one in record["kinds"] if one["findings"]] == []
    slowest = {one["kind"]: one["slowest_cpu_s"] for one in record["kinds"]}
    # A config is taken with as many layers as no file contradicts, and each takes time to build.
    assert slowest.pop("configs") <= run.MOST_S + run.LAYER_S * run.MODULES and max(slowest.values()) <= run.MOST_S
