"""Work in a process of its own: what it said comes back, and its limits hold."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from tests import waiting
from tests.process import toy_work
from tests.raised import refused
from trimtab.process import child as inside
from trimtab.process import runner

WORK = "trimtab.toy_work"


@pytest.fixture(autouse=True)
def work(monkeypatch, tmp_path):
    """Let the child find toy_work.py as a module of trimtab: a copy of the child's script in a package with one file more."""
    package = tmp_path / "trimtab"
    package.mkdir()
    source = Path(inside.__file__)
    (package / "__init__.py").write_text("", encoding="utf-8")
    (package / "toy_work.py").write_text(Path(toy_work.__file__).read_text(encoding="utf-8"), encoding="utf-8")
    # A file that would hide the standard library's if the script's own folder stayed on the search path.
    (package / "json.py").write_text("raise AssertionError('hidden')", encoding="utf-8")
    target = package / "process" / "child.py"
    target.parent.mkdir()
    (target.parent / "__init__.py").write_text("", encoding="utf-8")
    target.write_text(source.read_text(encoding="utf-8"), encoding="utf-8")
    monkeypatch.setattr(runner, "INSIDE", target)


def test_what_was_told_comes_back_in_order_and_as_it_is_said():
    heard = []
    found = runner.run_inside(WORK, {"do": "tell", "count": 3}, on_event=heard.append)
    assert found.ended == "done" and found.exit_code == 0
    assert list(found.lines) == heard == [{"line": 0}, {"line": 1}, {"line": 2}] and found.stdout == "to stdout\n"
    assert found.stderr == "to stderr\n"


def test_an_exception_leaves_what_was_said_before_it():
    found = runner.run_inside(WORK, {"do": "fail", "count": 1})
    assert (found.ended, found.lines) == ("failed", ({"line": 0},)) and "ZeroDivisionError" in found.stderr


def test_a_hang_is_killed_at_the_limit_with_its_children():
    started = time.monotonic()
    found = runner.run_inside(WORK, {"do": "hang"}, timeout_s=2.0)
    assert found.ended == "timeout"
    assert time.monotonic() - started < 50  # the work itself takes a minute
    child = found.lines[0]["child"]
    waiting.until(lambda: runner.resident_bytes(child) == 0)


def test_the_child_ends_by_itself_when_its_parent_is_killed():
    code = (
        "import sys; from pathlib import Path; from trimtab.process import runner as process; process.INSIDE = Path(sys.argv[1]); "
        "process.run_inside(sys.argv[2], {'do': 'stay'}, on_event=lambda line: print(line['pid'], flush=True))"
    )
    with subprocess.Popen([sys.executable, "-c", code, str(runner.INSIDE), WORK], stdout=subprocess.PIPE, text=True) as parent:
        child = psutil.Process(int(parent.stdout.readline()))
        parent.kill()
    assert psutil.wait_procs([child], timeout=30)[1] == []


def test_too_much_memory_is_killed_and_said():
    found = runner.run_inside(WORK, {"do": "eat"}, memory_bytes=300 * 2**20, timeout_s=60)
    assert found.ended == "oom-host" and found.peak_host_bytes > 300 * 2**20


@pytest.mark.skipif(os.name != "posix", reason="signals")
@pytest.mark.parametrize("signal, ended", [("SIGKILL", "oom-host"), ("SIGSEGV", "crashed")])
def test_a_signal_is_a_crash_and_the_systems_kill_is_for_memory(signal, ended):
    found = runner.run_inside(WORK, {"do": "signal", "signal": signal, "count": 1})
    assert (found.ended, found.lines) == (ended, ({"line": 0},))


def test_an_early_exit_is_not_taken_for_done():
    assert runner.run_inside(WORK, {"do": "exit"}).ended == "crashed"


def test_an_interpreter_that_is_not_there_is_refused(tmp_path):
    error = refused(runner.run_inside, WORK, {}, python=tmp_path / "python")
    assert (error.field, error.value) == ("python", str(tmp_path / "python"))


def test_a_module_outside_trimtab_is_refused(tmp_path):
    request = tmp_path / "request.json"
    request.write_text("{}", encoding="utf-8")
    with pytest.raises(SystemExit, match="not a module of trimtab: os"):
        inside.main(["os", str(request), str(tmp_path / "lines")])


def test_the_child_sees_no_package_beside_trimtab(tmp_path):
    # The folder above trimtab may be a site-packages of other versions: nothing but trimtab is found there.
    (runner.INSIDE.parent.parent / "neighbour.py").write_text("", encoding="utf-8")
    found = runner.run_inside(WORK, {"do": "import", "name": "neighbour"}, cwd=tmp_path.parent)
    assert found.lines == ({"imported": False},)


def test_inside_runs_as_a_script_without_trimtab_on_the_path(tmp_path):
    request, lines = tmp_path / "r.json", tmp_path / "l.jsonl"
    request.write_text(json.dumps({"do": "tell", "count": 1}), encoding="utf-8")
    done = subprocess.run(
        [sys.executable, str(runner.INSIDE), WORK, str(request), str(lines)], cwd=tmp_path, check=False,
        env={k: v for k, v in os.environ.items() if k != "PYTHONPATH"}, capture_output=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert [json.loads(text) for text in lines.read_text("utf-8").splitlines()] == [{"line": 0}, {"event": "end"}]
