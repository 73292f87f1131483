"""Probes run apart: one that hangs or crashes takes no other with it."""

import importlib.metadata
import os
import re
import sys
import venv
from pathlib import Path

import pytest

from tests.raised import refused
from tests.upstream.expected import SETS, expected_states, set_of
from tools import upstream_table
from trimtab.doctor.catalogue import read_catalogue
from trimtab.doctor.facts.bug import NOT_APPLICABLE, UNKNOWN, Affected, Bug, Seen
from trimtab.doctor.probes.runner import Verdict, probes_document, run_probes
from trimtab.report.render import Lines

BUG = read_catalogue()[0].bug

ENTRY = """
from trimtab.doctor.facts.bug import PRESENT, Affected, Bug, Seen
from trimtab.report.render import Lines
X{number}_{variable} = Bug(
    title="a title", symptom="s", trigger="t", cause="c", affected=({affected}), versions="v", way_round="w", owner=("torch",),
    trimtab="t", evidence="run",
)
def x{number}_{name}(kit):
{body}
"""


def write_catalogue(folder, bodies, affected=""):
    """Write one entry a body, in order: X1, X2, ... and return the folder."""
    for number, (name, body) in enumerate(bodies.items(), start=1):
        lines = "\n".join(f"    {line}" for line in body.splitlines())
        text = ENTRY.format(number=number, name=name, variable=name.upper(), body=lines, affected=affected)
        (folder / f"x{number}_{name}.py").write_text(text, encoding="utf-8")
    return folder


SEES = 'return Seen(PRESENT, "it is there")'
HANGS = "import threading; lock = threading.Lock()\ndef forever():\n    lock.acquire() and lock.acquire(timeout=600)\nforever()"
CRASHES = "import faulthandler\nfaulthandler._sigsegv()"


# The runner -----------------------------------------------------------------------------------------------------------


def test_hang_and_crash_cost_only_their_own_verdict(tmp_path):
    bodies = {"sees": SEES, "hangs": HANGS, "between": SEES, "crashes": CRASHES, "last": SEES}
    verdicts = run_probes(catalogue=write_catalogue(tmp_path, bodies), timeout_s=1)
    assert [verdict.bug.id for verdict in verdicts] == ["X1", "X2", "X3", "X4", "X5"]
    assert [verdict.seen.state for verdict in verdicts] == ["present", UNKNOWN, "present", UNKNOWN, "present"]
    assert verdicts[1].seen.evidence == "the probe hung and was ended in x2_hangs.py, line 11 in forever"
    assert "'crashed'" in verdicts[3].seen.evidence


@pytest.mark.parametrize("body, evidence", [
    ('raise LookupError("not there")', "^LookupError: not there$"), ("import sys\nsys.exit(3)", "exit code 3"),
], ids=["raises", "exits"])  # fmt: skip
def test_probe_that_raises_or_exits_is_unknown_with_the_error(tmp_path, body, evidence):
    first, second = run_probes(catalogue=write_catalogue(tmp_path, {"fails": body, "sees": SEES}))
    assert first.seen.state == UNKNOWN and re.search(evidence, first.seen.evidence) and second.seen.state == "present"


def test_state_that_is_none_is_unknown(tmp_path):
    (verdict,) = run_probes(catalogue=write_catalogue(tmp_path, {"odd_state": 'return Seen("perhaps", "")'}))
    assert (verdict.bug.id, verdict.bug.name) == ("X1", "odd-state")
    assert verdict.seen == Seen(UNKNOWN, "the probe said 'perhaps', which is no state")


def test_missing_package_is_not_applicable(tmp_path):
    folder = write_catalogue(tmp_path, {"sees": SEES}, affected='Affected("nowhere-to-be-found"),')
    text = next(folder.iterdir()).read_text(encoding="utf-8")
    next(folder.iterdir()).write_text(text.replace("PRESENT, Bug", "PRESENT, Affected, Bug"), encoding="utf-8")
    (verdict,) = run_probes(catalogue=folder)
    assert verdict.seen == Seen(NOT_APPLICABLE, "nowhere-to-be-found is not installed")


def test_noise_of_probes_does_not_reach_the_terminal(tmp_path, capfd):
    noise = 'import sys, os, warnings\nprint("noise")\nprint("noise", file=sys.stderr)\nos.write(1, b"noise")\n'
    folder = write_catalogue(tmp_path, {"noisy": noise + 'warnings.warn("noise")\n' + SEES})
    (verdict,) = run_probes(catalogue=folder)
    assert verdict.seen.state == "present"
    assert capfd.readouterr() == ("", "")


def test_probe_may_change_its_folder(tmp_path):
    bodies = {
        "leaves": 'import os\nos.mkdir("below")\nos.chdir("below")\n' + SEES,
        "looks": "import os\nreturn Seen(PRESENT, os.path.basename(os.getcwd()))",
    }
    verdicts = run_probes(catalogue=write_catalogue(tmp_path, bodies))
    assert verdicts[1].seen.evidence.startswith("trimtab-probes-")


def test_progress_counts_every_verdict(tmp_path):
    told = []
    bodies = {"sees": SEES, "exits": "import sys\nsys.exit(3)", "last": SEES}
    run_probes(catalogue=write_catalogue(tmp_path, bodies), progress=lambda done, of: told.append((done, of)))
    assert told == [(1, 3), (2, 3), (3, 3)]


def test_unknown_id_is_refused_with_near_ones():
    error = refused(run_probes, ids=["A11"])
    assert (error.field, error.value) == ("ids", "A11") and "A1" in error.allowed


def test_interpreter_that_is_not_there_is_refused(tmp_path):
    assert refused(run_probes, python=tmp_path / "python", ids=["A1"]).field == "python"


def test_interpreter_may_be_named_from_the_current_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(Path(sys.executable).parent)
    folder = write_catalogue(tmp_path, {"says": "import sys\nreturn Seen(PRESENT, sys.prefix)"})
    (verdict,) = run_probes(python=f".{os.sep}{Path(sys.executable).name}", catalogue=folder)
    assert Path(verdict.seen.evidence).resolve() == Path(sys.prefix).resolve()


def test_interpreter_without_the_packages_gets_not_applicable_everywhere(tmp_path):
    venv.create(tmp_path / "bare", with_pip=False, symlinks=sys.platform != "win32")
    binary = tmp_path / "bare" / ("Scripts/python.exe" if sys.platform == "win32" else "bin/python")
    for verdict in run_probes(python=binary):
        if verdict.bug.id == "G2":  # looks at the operating system alone
            continue
        assert verdict.seen.state == NOT_APPLICABLE and "install" in verdict.seen.evidence, verdict


@pytest.mark.slow
def test_chosen_probes_run_live_in_the_order_of_the_catalogue():
    name = set_of({name: importlib.metadata.version(name) for name in SETS["newest"]})
    if name is None:
        pytest.skip("neither the oldest nor the newest set of packages is installed here")
    verdicts = run_probes(ids=["b8", "A1", "A3", "A5", "A7"])
    assert [verdict.bug.id for verdict in verdicts] == ["A1", "A3", "A5", "A7", "B8"]
    for verdict in verdicts:
        assert verdict.seen.state in expected_states(verdict.bug.id, name), verdict.seen.evidence


# What people see ------------------------------------------------------------------------------------------------------


def test_text_shows_each_verdict_and_counts_the_states():
    verdicts = [Verdict(BUG, Seen("present", "[red]a line[/red] of\nevidence"), 0.1), Verdict(BUG, Seen("fixed", "gone"), 0.1)]
    text = Lines(100).show(probes_document(verdicts))
    assert "[red]a line[/red]" in text and BUG.id in text and "gone" in text
    assert text.count("none of trimtab") == 1 and "\n2 known bugs: 1 present, 1 fixed. Programs" in text
    assert max(map(len, text.splitlines())) <= 100


def test_json_has_the_verdict_and_all_that_is_known():
    bug = Bug(
        id="X1", name="n", title="t", symptom="s", trigger="t", cause="c", affected=(Affected("peft", None, "1.0"),),
        versions="v", way_round="w", owner=("peft",), trackers=("a/b#1",), trimtab="t", evidence="run",
    )  # fmt: skip
    found = Verdict(bug, Seen("fixed", "gone"), 0.5).to_json()
    assert (found["id"], found["state"], found["seconds"]) == ("X1", "fixed", 0.5)
    assert found["affected"][0] == {"package": "peft", "since": None, "fixed_in": "1.0"}
    assert found["evidence"] == "gone" and found["known_from"] == "run"


def test_the_page_has_the_catalogue():
    text = upstream_table.PAGE.read_text("utf-8")
    assert "<!-- catalogue -->" in text
    assert upstream_table.filled(text) == text
