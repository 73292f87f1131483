"""Killed at any point, a merge leaves the old model or the new one, and the next run finishes what was begun."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests import ROOT, merged_models, pico
from tests.merged_models import content
from trimtab.merging import merge


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "fork"), reason="ten processes that each import torch would take minutes")
def test_killed_at_ten_points_there_is_the_old_model_or_the_new_one_and_the_next_run_finishes(tmp_path: Path) -> None:
    base = pico.build("llama", tmp_path / "base", shards=3)
    adapter = pico.adapter(base, tmp_path / "adapter")
    command = [sys.executable, "-m", "tests.merging.merge_killed", str(base), str(adapter), str(tmp_path), "10"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    first, *killed = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    whole = content(tmp_path / "whole" / "out")
    assert first["events"] > 30
    assert "old.txt" not in whole
    assert [run["ended"] for run in killed] == [-signal.SIGKILL] * 10
    resumed = []
    for run in killed:
        out = tmp_path / str(run["number"]) / "out"
        assert content(out) in ({"old.txt": b"the model that was there before"}, whole)
        report = merge(base, out, adapters={"a": adapter}, overwrite=True)
        assert content(out) == whole and merged_models.left_over(out.parent) == ["out"]
        resumed.append(sum(file.is_resumed for file in report.files))
    # Points late in the run find finished files, the first one finds none; after the swap there is nothing to resume.
    assert resumed[0] == 0 and max(resumed) >= 2
