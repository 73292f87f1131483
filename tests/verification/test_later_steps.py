"""A finished step is reported, whatever becomes of a later one; and what a signal leaves behind."""

import json
import os
import signal
import subprocess
import sys

import psutil
import pytest

import trimtab
from tests import pico, talking_families, waiting
from tests.merging.changes.test_merge_experts import BOTH, stack_adapter
from trimtab import demo
from trimtab.cli.main import main
from trimtab.errors import AdapterError, UpstreamError
from trimtab.process import interrupts
from trimtab.verification import verify
from trimtab.verification.routes import runner

BASE, STYLE = str(demo.FOLDER / "base"), str(demo.ADAPTERS["style"])
NOT_COMPARED = (
    AdapterError(STYLE, ["its experts cannot be compared"]),
    UpstreamError("torchvision is not installed", package="transformers", installed="5", fixed_in=None),
)


@pytest.mark.parametrize(
    ("problem", "as_json"),
    [(NOT_COMPARED[0], False), (NOT_COMPARED[1], True)]
    + [pytest.param(*case, marks=pytest.mark.slow) for case in ((NOT_COMPARED[0], True), (NOT_COMPARED[1], False))],
)
def test_a_merge_that_cannot_be_compared_is_reported_with_its_check(tmp_path, monkeypatch, capsys, problem, as_json):
    def fails(*args, **kwargs):
        raise problem

    monkeypatch.setattr(trimtab, "verify", fails)
    out = tmp_path / "out"
    flags = ["--check", "--device", "cpu", *(["--json"] if as_json else [])]
    assert main(["merge", BASE, str(out), "--adapter", f"style={STYLE}", *flags]) == 10
    said = capsys.readouterr()
    assert (out / "config.json").is_file()
    if as_json:
        report = json.loads(said.out)
        assert report["check"]["passed"] and report["parity"] is None and report["changed"]
        assert report["not_compared"]["class"] == type(problem).__name__ and not said.err
    else:
        shown = " ".join(said.out.split())
        assert f"-> {out} " in shown and " changed" in shown
        assert said.err.strip().startswith("the answers could not be compared: ") and str(problem) in said.err


def test_lanes_that_cannot_be_run_leave_the_comparison(monkeypatch, capsys):
    def lanes(*args, **kwargs):
        raise UpstreamError("peft cannot merge it", package="peft", installed="1", fixed_in=None)

    monkeypatch.setattr(verify, "_with_lanes", lanes)
    report = trimtab.verify(
        BASE, adapters={"style": STYLE}, against="base", prompts=["Who are you?"], new_tokens=2, lanes=True, isolated=False
    )
    assert report.ok and "peft cannot merge it" in report.unfinished and report.unfinished in report.findings
    monkeypatch.setattr(trimtab, "verify", lambda *args, **kwargs: report)
    assert main(["verify", BASE, "--adapter", f"style={STYLE}", "--against", "base", "--lanes"]) == 10
    assert "peft cannot merge it" in capsys.readouterr().out


def children_of(process):
    """Return the processes that a command has started, once there is one."""
    parent = psutil.Process(process.pid)
    return waiting.until(lambda: process.poll() is not None or parent.children(recursive=True), 120)


@pytest.mark.skipif(sys.platform == "win32", reason="POSIX signals")
@pytest.mark.parametrize("number", [signal.SIGTERM, pytest.param(getattr(signal, "SIGHUP", None), marks=pytest.mark.slow)])
def test_a_signal_ends_a_command_with_its_processes_and_folders(tmp_path, number):
    process = subprocess.Popen(
        [sys.executable, "-m", "trimtab", "verify", BASE, "--device", "cpu", "--against", "base", "--adapter", f"style={STYLE}"],
        env={**os.environ, "TMPDIR": str(tmp_path)}, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True,
    )  # fmt: skip
    children = children_of(process)
    process.send_signal(number)
    _, err = process.communicate(timeout=60)
    assert process.returncode == interrupts.ENDING[number] == 128 + number
    assert err.decode().splitlines()[-1] == "trimtab: stopped" and "Traceback" not in err.decode()
    assert psutil.wait_procs(children, timeout=5)[1] == []
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith("trimtab-")] == []


@pytest.mark.slow  # with toys in test_process.py and test_serve_run.py
@pytest.mark.skipif(sys.platform == "win32", reason="POSIX signals")
@pytest.mark.parametrize("command", [
    ["verify", BASE, "--device", "cpu", "--against", "base", "--adapter", f"style={STYLE}"],
    ["serve", BASE, "--device", "cpu", "--port", "0", "--context", "128"],
], ids=["verify", "serve"])  # fmt: skip
def test_processes_end_by_themselves_when_their_parent_is_killed(tmp_path, command):
    process = subprocess.Popen(
        [sys.executable, "-m", "trimtab", *command], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True,
        env={**os.environ, "TMPDIR": str(tmp_path)},
    )  # fmt: skip
    children = children_of(process)
    process.kill()
    process.wait()
    assert psutil.wait_procs(children, timeout=8)[1] == []  # a verify of this model takes longer, as a load does


def in_one_process(replace):
    """Let the routes of a comparison run where the command does. replace: `setattr`, or one that is undone."""
    run_module = runner.run_module
    replace(runner, "run_module", lambda *given, isolated, **named: run_module(*given, isolated=False, **named))


def test_a_merge_of_experts_is_checked_and_compared(tmp_path, capsys, monkeypatch):
    in_one_process(monkeypatch.setattr)
    base = pico.build("mixtral", tmp_path / "base", dtype="float32")
    talking_families.save("mixtral", base)
    adapter = stack_adapter(base, tmp_path / "adapter", BOTH)
    capsys.readouterr()
    assert main(["merge", str(base), str(tmp_path / "out"), "--adapter", f"a={adapter}", "--check", "--device", "cpu"]) == 0
    said = capsys.readouterr()
    assert "25 of 25 changes applied" in " ".join(said.out.split()) and not said.err


def merge_without_processor(family, tmp_path):
    """Return the command of a merge of a new model of a family."""
    base = pico.build(family, tmp_path / "base")
    talking_families.save(family, base)
    adapter = pico.adapter(base, tmp_path / "adapter")
    return ["merge", str(base), str(tmp_path / "out"), "--adapter", f"a={adapter}", "--check", "--device", "cpu"]


def check_merged(code, out, err, why):
    assert code == 10, err
    assert "14 of 14 changes applied" in " ".join(out.split())
    (line,) = [one for one in err.splitlines() if one.startswith("the answers could not be compared: ")]
    assert why in line


def test_a_merge_without_a_package_of_its_processor_is_reported(tmp_path):
    # None hides a package from importlib, also from transformers' own look, in a process that has not looked yet.
    code = (
        "import sys; sys.modules['torchvision'] = None; from tests.verification.test_later_steps import main, in_one_process; "
        "in_one_process(setattr); sys.exit(main(sys.argv[1:]))"
    )
    command = [sys.executable, "-c", code, *merge_without_processor("mistral3", tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    check_merged(done.returncode, done.stdout, done.stderr, "needs torchvision")


def test_a_merge_without_a_file_of_its_processor_is_reported(tmp_path, capsys, monkeypatch):
    in_one_process(monkeypatch.setattr)
    command = merge_without_processor("gemma3", tmp_path)
    (tmp_path / "base" / "processor_config.json").unlink()
    capsys.readouterr()
    check_merged(main(command), *capsys.readouterr(), "no usable processor")
