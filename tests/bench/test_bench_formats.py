"""Loads of formats: what is saved when a load takes too long, and that neither side's seconds have its imports."""

import json
import subprocess
import sys
from types import SimpleNamespace

import pytest

from bench import formats
from tests import ROOT


def test_rows_of_loads_are_kept_and_a_load_that_takes_too_long_is_one(tmp_path, monkeypatch):
    seconds = iter(range(100))

    def run(command, *, timeout, **_):
        side, name = command[command.index("--side") + 1], command[command.index("--one") + 1]
        if name == "e4b:fp8" and side == "stock":
            raise subprocess.TimeoutExpired(command, timeout)
        return SimpleNamespace(stdout="ROW " + json.dumps({"load_s": next(seconds), "answer_s": 1, "layer": side}), stderr="")

    def main(*arguments):
        monkeypatch.setattr(sys, "argv", ["formats", "--work", str(tmp_path), "--save", str(file), "--loads", *arguments])
        formats.main()

    file = tmp_path / "saved.json"
    file.write_text(json.dumps({"environment": "of rates", "rows": ["of rates"]}))
    monkeypatch.setattr(formats, "write", lambda *_: tmp_path / "none")
    monkeypatch.setattr(formats.subprocess, "run", run)
    with pytest.raises(SystemExit, match="failed: e4b:fp8"):
        main("--cases", "e4b:awq,e4b:fp8")
    main("--cases", "e4b:gptq")
    with pytest.raises(SystemExit, match="no time left for e4b:ct-g32"):
        main("--cases", "e4b:ct-g32", "--total-s", "5")
    whole = json.loads(file.read_text())
    assert (whole["environment"], whole["rows"]) == ("of rates", ["of rates"])
    awq, fp8, gptq = whole["loads"]["rows"]
    assert awq["trimtab"] == {"first_s": 0, "layer": "trimtab", "load_s": [2, 4, 6], "answer_s": [1, 1, 1]}
    assert (awq["stock"]["first_s"], awq["of_stock"], gptq["form"]) == (1, round(4 / 5, 2), "gptq")
    assert fp8["error"] == "stock: longer than 400 s" and "of_stock" not in fp8


# What each side imports first is imported once for both; that each side asks for it before its seconds is noted.
TIMED = """
import os, sys
from pathlib import Path
from types import SimpleNamespace
from bench import formats
at = []
formats.time = SimpleNamespace(perf_counter=lambda: at.append(set(sys.modules)) or 0.0)
formats._import_all("nf4-dq")
formats._import_all = at.append
for side in ("trimtab", "stock"):
    if not os.fork():
        formats.load_once("qwen3-8b-tiny", "nf4-dq", Path(sys.argv[1]), 1, side)
        print(side, at[0], sorted(at[2] - at[1]), flush=True)
        os._exit(0)
    os.wait()
"""


def test_a_load_finds_its_modules_imported(tmp_path, monkeypatch):
    monkeypatch.setenv("DEVICE", "cpu")
    monkeypatch.setattr(formats, "DEVICE", "cpu")
    formats.write("qwen3-8b-tiny", "nf4-dq", formats.folder_of("qwen3-8b-tiny", "nf4-dq", tmp_path, 1), 1)
    found = subprocess.run([sys.executable, "-c", TIMED, str(tmp_path)], cwd=ROOT, capture_output=True, text=True)
    assert {"trimtab nf4-dq []", "stock nf4-dq []"} <= set(found.stdout.splitlines()), found.stdout + found.stderr
