"""`trimtab doctor --matrix`: flags reach the cases, Ctrl-C keeps what was done, wrong questions are refused first."""

import json
import os
import signal
import subprocess
import sys

import pytest

from tests import ROOT, waiting
from trimtab.cli import main
from trimtab.doctor.cases import runner
from trimtab.doctor.cases.runner import read_runs
from trimtab.machine import environment
from trimtab.report.document import Document

PASSED = {
    "case": "R05_ALL_GPU_4BIT", "engine": "stock", "label": "PASS", "stage": "done", "modes": {}, "memory": {},
    "exception": None, "versions": {},
}  # fmt: skip


@pytest.fixture
def asked(monkeypatch):
    """What the matrix was asked; `asked["stop"]` makes it end by Ctrl-C after its first record."""
    found = {}

    def run_matrix(*, on_record, progress, **options):
        found.update(options)
        if found.get("stop") == "at once":
            raise KeyboardInterrupt
        on_record(PASSED)
        if found.get("stop"):
            raise KeyboardInterrupt
        return (PASSED,)

    monkeypatch.setattr(runner, "run_matrix", run_matrix)
    monkeypatch.setattr(environment, "read_environment", lambda python=None: environment_of(python))
    monkeypatch.setattr(environment, "environment_document", lambda found: Document(f"environment of {found['python']}", []))
    return found


def environment_of(python):
    return {"python": python or "this"}


def test_flags_of_the_matrix_reach_it(asked, capsys):
    code = main.main([
        "doctor", "--matrix", "--case", "R05_ALL_GPU_4BIT", "--engine", "stock", "--device", "cpu", "--pressure", "0.9",
        "--timeout", "7", "--memory-limit", "2 GiB", "--python", "other",
    ])  # fmt: skip
    assert code == 0
    assert asked == {
        "cases": ["R05_ALL_GPU_4BIT"], "engines": ["stock"], "device": "cpu", "pressure": 0.9, "timeout_s": 7.0,
        "memory_bytes": 2 * 2**30, "python": "other", "model": None, "adapter": None,
    }  # fmt: skip
    shown = capsys.readouterr().out
    assert "environment of other" in shown and "R05_ALL_GPU_4BIT" in shown


def test_a_second_adapter_is_refused_and_does_not_replace_the_first(asked, tmp_path, capsys):
    for given in (["a=one", "b=two"], ["one", "other/one"]):
        flags = [word for text in given for word in ("--adapter", text)]
        assert main.main(["doctor", str(tmp_path), *flags]) == 2
        assert capsys.readouterr().err.startswith("trimtab: --adapter ")
    assert main.main(["doctor", "--matrix", "--adapter", "a=one"]) == 2  # of no model
    assert asked == {}


def test_ctrl_c_shows_and_keeps_what_was_done_and_makes_no_drafts(asked, tmp_path, capsys):
    asked["stop"] = True
    file, drafts = tmp_path / "runs.json", tmp_path / "drafts"
    assert main.main(["doctor", "--matrix", "--save", str(file), "--drafts", str(drafts)]) == 130
    shown = capsys.readouterr().out
    assert "R05_ALL_GPU_4BIT" in shown and "stopped early" in shown
    assert [run["case"] for run in read_runs(file)["runs"]] == ["R05_ALL_GPU_4BIT"] and not drafts.exists()


def test_ctrl_c_before_the_first_case_is_an_ordinary_stop(asked, capsys):
    asked["stop"] = "at once"
    assert main.main(["doctor", "--matrix"]) == 130
    assert capsys.readouterr().err == "trimtab: stopped\n"


def test_json_of_a_stopped_matrix_says_so(asked, capsys):
    asked["stop"] = True
    assert main.main(["doctor", "--matrix", "--json"]) == 130
    found = json.loads(capsys.readouterr().out)
    assert found["stopped"] is True and [run["label"] for run in found["runs"]] == ["PASS"]


@pytest.mark.parametrize("flags, words", [
    (["--matrix", "--timeout", "0"], "--timeout"), (["--case", "R05_ALL_GPU_4BIT"], "--matrix or --bisect"),
    (["--drafts", "out"], "recorded runs"), (["--matrix", "--runs", "x.json"], "--matrix makes new ones"),
    (["--engine", "stock"], "has no effect"), (["--matrix", "--memory-limit", "much"], "--memory-limit"),
    (["--matrix", "--case", "R3_SPLIT_4BIT"], "R03_SPLIT_4BIT"),  # a near name
])  # fmt: skip
def test_wrong_question_is_refused_before_anything_runs(asked, flags, words, capsys):
    assert main.main(["doctor", *flags]) == 2
    assert words in capsys.readouterr().err and asked == {}


def test_saved_runs_are_shown_again(asked, tmp_path, capsys):
    runner.save_runs(tmp_path / "runs.json", {}, [PASSED])
    assert main.main(["doctor", "--runs", str(tmp_path / "runs.json")]) == 0
    assert "R05_ALL_GPU_4BIT" in capsys.readouterr().out and asked == {}


@pytest.mark.slow
@pytest.mark.skipif(os.name == "nt", reason="a console's Ctrl-C cannot be sent to one process alone")
def test_real_ctrl_c_leaves_a_whole_file_and_no_process(tmp_path):
    file = tmp_path / "runs.json"
    command = [sys.executable, "-m", "trimtab", "doctor", "--matrix", "--engine", "stock", "--device", "cpu"]
    running = subprocess.Popen([*command, "--save", str(file)], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    try:
        waiting.until(lambda: file.is_file() and read_runs(file)["runs"], 120)
        running.send_signal(signal.SIGINT)
        shown, _ = running.communicate(timeout=30)
    finally:
        running.kill()
    assert running.returncode == 130 and "stopped early" in shown
    assert read_runs(file)["runs"][0]["label"] != "UNKNOWN"
