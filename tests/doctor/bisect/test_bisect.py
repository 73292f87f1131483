"""The search finds what changed with few runs, and environments are made, kept and given up as asked."""

from __future__ import annotations

import json
import math
import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.raised import raised, refused
from trimtab.doctor.bisect.bisect import (
    Bisection,
    Change,
    Range,
    bisect,
    bisect_each,
    bisection_document,
    find_changes,
    label_of,
    parse_range,
    releases_between,
)
from trimtab.doctor.bisect.environments import (
    PACKAGES,
    READY,
    Base,
    Environments,
    InstallError,
    reason_of,
    run_command,
    sorted_versions,
)
from trimtab.errors import AdapterError, CheckpointError
from trimtab.report.render import Lines

LISTED = ("1.10.0", "1.9.1", "1.9.0", "1.8.0", "1.7.0", "1.6.0")
ORDER = tuple(reversed(LISTED))


class Index:
    """Stands for pip, venv and the interpreters they make: what is offered, what cannot be installed, what was done."""

    def __init__(self, *, broken: Sequence[str] = (), offline: bool = False) -> None:
        self.broken, self.offline = set(broken), offline
        self.commands: list[list[str]] = []
        self.made: list[str] = []

    def __call__(self, command: Sequence[str], timeout_s: float) -> tuple[int, str]:
        command = list(command)
        self.commands.append(command)
        if "index" in command:
            if self.offline:
                return 1, "WARNING: x\nERROR: Could not reach https://user:key@index.example/simple: no route\n"
            return 0, f"peft (1.10.0)\nAvailable versions: {', '.join(LISTED)}, 2.0.0rc1\n"
        if "venv" in command:
            python = Path(command[-1], "Scripts/python.exe" if os.name == "nt" else "bin/python")
            python.parent.mkdir(parents=True)
            python.touch()
            (Path(command[-1]) / "packages").mkdir()
            return 0, ""
        if "install" in command:
            wanted = dict(word.split("==") for word in command if "==" in word)
            if wanted["peft"] in self.broken:
                return 1, f"ERROR: Cannot install peft=={wanted['peft']} from https://index.example/a: no wheel\nmore\n"
            home = Path(command[command.index("--python") + 1]).parents[1]
            (home / "pins.json").write_text(json.dumps(wanted))
            self.made.append(wanted["peft"])
            return 0, ""
        if "-c" in command and len(command) == 3:
            return 0, str(Path(command[0]).parents[1] / "packages")
        assert "-c" in command
        pins = json.loads((Path(command[0]).parents[1] / "pins.json").read_text())
        return 0, json.dumps({"versions": pins})


BASE = Base(Path(sys.executable), {"torch": "2.13.0+cpu", "transformers": "5.6.2", "peft": "1.6.0"}, ("/base/site",), "x")


def made_by(index: Index, folder: Path, **options) -> Environments:
    return Environments(BASE, options.pop("others", {}), folder, runner=index, **options)


class Case:
    """A case whose label depends on the version alone."""

    def __init__(self, labels: dict[str, str]) -> None:
        self.labels, self.ran = labels, []

    def __call__(self, python: Path, case: str) -> dict:
        version = json.loads((python.parents[1] / "pins.json").read_text())["peft"]
        self.ran.append(version)
        label = self.labels[version]
        if label == "STOP":
            raise KeyboardInterrupt
        if label == "REFUSED":
            raise CheckpointError("no question could be made", path="model")
        return {"case": case, "label": label, "exception": None}


def labels(text: str) -> dict[str, str]:
    return dict(zip(ORDER, text.split()))


def run(tmp_path: Path, case: Case, index: Index | None = None, *, low: str = "1.6.0", high: str = "1.10.0", **options):
    environments = made_by(index or Index(), tmp_path / "kept")
    return bisect("peft", low, high, case="R03", run_case=case, environments=environments, **options)


# The search -----------------------------------------------------------------------------------------------------------


@settings(deadline=None)
@given(st.integers(2, 60), st.data())
def test_one_change_is_found_exactly_and_with_few_runs(count, data):
    at = data.draw(st.integers(1, count - 1))
    asked: list[str] = []

    def label(version: str) -> str:
        asked.append(version)
        return "PASS" if int(version) >= at else "FAIL"

    assert find_changes([str(i) for i in range(count)], label) == (Change(str(at - 1), str(at), "FAIL", "PASS"),)
    assert len(asked) == len(set(asked)) <= 2 + math.ceil(math.log2(count))


@settings(deadline=None)
@given(st.lists(st.sampled_from(["A", "B", "C", None]), min_size=0, max_size=40))
def test_every_change_that_is_told_is_one_between_neighbours(table):
    versions = [str(i) for i in range(len(table))]
    changes = find_changes(versions, lambda version: table[int(version)])
    for change in changes:
        low, high = int(change.before), int(change.after)
        assert low < high and (table[low], table[high]) == (change.label_before, change.label_after)
        assert change.label_before != change.label_after
        assert all(found is None for found in table[low + 1 : high]) and change.between == tuple(versions[low + 1 : high])
    assert [int(change.after) for change in changes] == sorted(int(change.after) for change in changes)
    have = [found for found in table if found is not None]
    if have and have[0] != have[-1]:
        # The labels lead from the first one's to the last one's without a gap.
        path = [changes[0].label_before, *(change.label_after for change in changes)]
        assert path[0] == have[0] and path[-1] == have[-1]


@settings(deadline=None)
@given(st.integers(3, 40), st.data())
def test_releases_that_cannot_run_are_gone_round(count, data):
    at = data.draw(st.integers(1, count - 1))
    broken = data.draw(st.sets(st.integers(0, count - 1), max_size=count - 2))
    runnable = [i for i in range(count) if i not in broken]

    def label(version: str) -> str | None:
        return None if int(version) in broken else "PASS" if int(version) >= at else "FAIL"

    changes = find_changes([str(i) for i in range(count)], label)
    below, above = [i for i in runnable if i < at], [i for i in runnable if i >= at]
    expected = [(str(below[-1]), str(above[0]))] if below and above else []
    assert [(change.before, change.after) for change in changes] == expected


@pytest.mark.parametrize(("labels", "found"), [("AAABBCCC", [("2", "3"), ("4", "5")]), ("AABBBBAA", [("1", "2"), ("5", "6")])])
def test_a_third_label_or_equal_ends_around_another_show_two_changes(labels, found):
    changes = find_changes([str(i) for i in range(8)], lambda version: labels[int(version)])
    assert [(change.before, change.after) for change in changes] == found


def test_nothing_to_search_gives_nothing():
    assert find_changes([], lambda version: "A") == find_changes(["1"], lambda version: "A") == ()
    assert find_changes(["1", "2"], lambda version: None) == ()


# The question ---------------------------------------------------------------------------------------------------------


def test_range_is_read():
    assert parse_range("transformers=5.6.2..5.23.0") == Range("transformers", "5.6.2", "5.23.0")
    assert parse_range("huggingface-hub = 1.0 .. 2.0").package == "huggingface_hub"


@pytest.mark.parametrize(
    "text", ["", "peft", "peft=1.0", "peft 1.0..2.0", "=1..2", "peft=..", "peft=1..", "peft=a..b", "peft=1..1.0", "peft=2..1"]
)
def test_other_text_and_an_empty_range_are_refused(text):
    assert refused(parse_range, text).field == "bisect"


def test_unknown_package_is_refused_with_near_names():
    assert refused(parse_range, "tranformers=1.0..2.0").near[0] == "transformers"
    assert refused(parse_range, "numpy=1.0..2.0").allowed == PACKAGES


def test_releases_of_a_range_include_both_ends():
    assert releases_between(Range("peft", "1.7.0", "1.9.1"), ORDER) == ("1.7.0", "1.8.0", "1.9.0", "1.9.1")


def test_unknown_release_is_refused_with_the_nearest_ones():
    error = refused(lambda: releases_between(Range("peft", "1.6.0", "1.9.7"), ORDER))
    assert error.value == "1.9.7" and {"1.9.1", "1.9.0"} <= set(error.near)


def test_versions_are_sorted_as_versions_without_candidates():
    assert sorted_versions(["1.10.0", "1.9", "2.0rc1", "x", "1.9"]) == ("1.9", "1.10.0")


# The whole search on fake environments --------------------------------------------------------------------------------


def test_first_release_with_another_label_is_found(tmp_path):
    case = Case(labels("FAIL FAIL FAIL PASS PASS PASS"))
    found = run(tmp_path, case)
    assert found.first == "1.9.0" and found.changes == (Change("1.8.0", "1.9.0", "FAIL", "PASS"),)
    assert len(case.ran) == len(set(case.ran)) <= 5
    assert found.releases == 6 and found.is_monotone and not found.stopped
    assert found.others == {"torch": "2.13.0+cpu", "transformers": "5.6.2"}
    assert [row.version for row in found.rows] == [name for name in ORDER if name in case.ran]


def test_release_that_cannot_be_installed_is_said_and_skipped(tmp_path):
    said: list[str] = []
    found = run(tmp_path, Case(labels("FAIL FAIL FAIL PASS PASS PASS")), Index(broken=["1.9.0", "1.8.0"]), say=said.append)
    assert found.changes == (Change("1.7.0", "1.9.1", "FAIL", "PASS", ("1.8.0", "1.9.0")),)
    skipped = [row for row in found.rows if row.label is None]
    assert {row.version for row in skipped} == {"1.8.0", "1.9.0"}
    assert "Cannot install peft==1.8.0 from an address no wheel" in skipped[0].note.replace(": no", " no")
    assert any("1.8.0: cannot be installed" in text for text in said)
    assert "index.example" not in json.dumps(found.to_json())


@pytest.mark.parametrize("text, broken, changed, is_monotone", [
    ("FAIL FAIL FAIL PASS PASS PASS", ("1.6.0", "1.10.0"), ["1.9.0"], True),  # the ends move inwards
    ("FAIL REFUSED FAIL PASS PASS PASS", (), ["1.9.0"], True), ("A B B C C C", (), ["1.7.0", "1.9.0"], False),
    ("FAIL FAIL FAIL PASS PASS PASS", ORDER, [], True),
])  # fmt: skip
def test_releases_that_cannot_run_are_skipped_and_each_change_is_said(tmp_path, text, broken, changed, is_monotone):
    found = run(tmp_path, Case(labels(text)), Index(broken=broken))
    assert ([one.after for one in found.changes], found.is_monotone) == (changed, is_monotone)
    assert found.first == (changed[0] if changed else None)
    assert {row.version for row in found.rows if row.label is None} <= {*broken, "1.7.0"}
    said = Lines().show(bisection_document(found))
    assert ("changed more than once" in said) != is_monotone and ("no change was seen" in said) != bool(changed)


def test_interpreter_that_the_case_refuses_is_noted(tmp_path):
    found = run(tmp_path, Case(labels("FAIL FAIL REFUSED PASS PASS PASS")))
    assert next(row for row in found.rows if row.version == "1.8.0").note.startswith("cannot be run")


def test_ctrl_c_keeps_what_was_done(tmp_path):
    found = run(tmp_path, Case(labels("FAIL FAIL STOP PASS PASS PASS")))
    assert found.stopped
    assert {row.version for row in found.rows} == {"1.6.0", "1.10.0"} and found.changes[0].between == ORDER[1:-1]
    assert "stopped early" in Lines().show(bisection_document(found)) and "not tried yet" in Lines().show(bisection_document(found))


def test_both_sides_are_run_again_when_asked(tmp_path):
    case = Case(labels("FAIL FAIL FAIL PASS PASS PASS"))
    found = run(tmp_path, case, confirm=True)
    assert found.changes[0].confirmed is True
    assert case.ran.count("1.8.0") == case.ran.count("1.9.0") == 2
    assert {row.version: row.runs for row in found.rows}["1.9.0"] == 2


def test_a_second_run_that_differs_is_said(tmp_path):
    class Flaky(Case):
        def __call__(self, python: Path, case: str) -> dict:
            found = super().__call__(python, case)
            return {**found, "label": "PASS"} if self.ran.count(self.ran[-1]) > 1 else found

    found = run(tmp_path, Flaky(labels("FAIL FAIL FAIL PASS PASS PASS")), confirm=True)
    assert found.changes[0].confirmed is False and "a second run gave PASS" in Lines().show(bisection_document(found))


@pytest.mark.parametrize(
    "text, firsts", [("FAIL FAIL FAIL PASS PASS PASS", [None, "1.9.0"]), ("STOP FAIL FAIL PASS PASS PASS", [None])]
)
def test_several_ranges_are_searched_one_after_the_other_until_one_is_stopped(tmp_path, text, firsts):
    ranges = [Range("peft", "1.6.0", "1.8.0"), Range("peft", "1.8.0", "1.9.0")]
    found = bisect_each(ranges, case="R03", run_case=Case(labels(text)), environments=made_by(Index(), tmp_path))
    assert [one.first for one in found] == firsts and found[-1].stopped == (len(firsts) == 1)


def test_catalogue_ids_run_their_probe(tmp_path, monkeypatch):
    """Other packages' versions are the base's; only the probe's state is asked."""
    from trimtab.doctor.facts.bug import Seen
    from trimtab.doctor.probes import runner

    asked = []

    def run_probes(*, python, ids):
        version = json.loads((python.parents[1] / "pins.json").read_text())["peft"]
        asked.append(tuple(ids))
        return (runner.Verdict(runner.read_catalogue()[0].bug, Seen("fixed" if version > "1.8" else "present", ""), 0.0),)

    monkeypatch.setattr(runner, "run_probes", run_probes)
    found = bisect("peft", "1.6.0", "1.9.1", case="A1", environments=made_by(Index(), tmp_path))
    assert found.changes == (Change("1.7.0", "1.8.0", "present", "fixed"),)
    assert set(asked) == {("A1",)}


def test_unknown_case_is_refused_before_anything_is_made():
    assert "R03_SPLIT_4BIT" in refused(bisect, "peft", "0.19.1", "0.21.2", case="R03_SPLIT_4BITS").allowed


def test_folders_that_are_no_model_or_adapter_are_refused_before_anything_is_made(tmp_path):
    options = {"case": "R03_SPLIT_4BIT", "environments": made_by(Index(), tmp_path / "kept")}
    with pytest.raises(CheckpointError):
        bisect("peft", "1.6.0", "1.8.0", model=tmp_path, **options)
    with pytest.raises(AdapterError):
        bisect("peft", "1.6.0", "1.8.0", adapter=tmp_path, **options)


def test_label_of_an_unknown_ending_holds_its_exception():
    assert label_of({"label": "PASS", "exception": None}) == "PASS"
    assert label_of({"label": "UNKNOWN", "exception": {"type": "KeyError"}}) == "UNKNOWN (KeyError)"


def test_bisection_is_json_and_text(tmp_path):
    found = run(tmp_path, Case(labels("FAIL FAIL FAIL PASS PASS PASS")))
    values = json.loads(json.dumps(found.to_json()))
    assert values["first"] == "1.9.0" and values["package"] == "peft" and values["is_monotone"] is True
    text = Lines().show(bisection_document(found))
    assert re.search(r"1\.8\.0 +FAIL", text) and "changed in 1.9.0: FAIL in 1.8.0, then PASS" in text
    assert isinstance(found, Bisection)


# Environments ---------------------------------------------------------------------------------------------------------


def test_pins_are_the_bases_the_given_ones_and_the_version(tmp_path):
    index = Index()
    environments = made_by(index, tmp_path, others={"transformers": "5.7.0"})
    environments.python_for("peft", "1.8.0")
    install = next(command for command in index.commands if "install" in command)
    assert {word for word in install if "==" in word} == {"torch==2.13.0+cpu", "transformers==5.7.0", "peft==1.8.0"}
    assert "--only-binary" in install and "--index-url" not in install
    assert not any("://" in word for word in install), "no address unless one is given"


def test_environment_sees_the_packages_of_its_base_behind_its_own(tmp_path):
    python = made_by(Index(), tmp_path).python_for("peft", "1.8.0")
    text = (python.parents[1] / "packages" / "base-packages.pth").read_text()
    assert text == "import site; site.addsitedir('/base/site')\n"


def test_kept_environment_is_used_again_and_another_pin_makes_another(tmp_path):
    index = Index()
    environments = made_by(index, tmp_path)
    first = environments.python_for("peft", "1.8.0")
    assert environments.python_for("peft", "1.8.0") == first and index.made == ["1.8.0"]
    other = made_by(index, tmp_path, others={"transformers": "5.7.0"})
    assert other.python_for("peft", "1.8.0") != first and index.made == ["1.8.0", "1.8.0"]
    assert environments.kept_versions("peft") == ("1.8.0",)


def test_half_made_environment_is_made_again_and_a_failed_one_is_gone(tmp_path):
    index = Index(broken=["1.9.0"])
    environments = made_by(index, tmp_path)
    python = environments.python_for("peft", "1.8.0")
    (python.parents[1] / READY).unlink()
    environments.python_for("peft", "1.8.0")
    assert index.made == ["1.8.0", "1.8.0"]
    with pytest.raises(InstallError):
        environments.python_for("peft", "1.9.0")
    assert [path.name[:10] for path in tmp_path.iterdir()] == ["peft-1.8.0"]


def test_environment_that_is_not_as_asked_is_no_environment(tmp_path):
    class Lying(Index):
        def __call__(self, command, timeout_s):
            code, output = super().__call__(command, timeout_s)
            return code, output.replace("5.6.2", "5.9.0") if '"versions"' in output else output

    error = raised(InstallError, lambda: made_by(Lying(), tmp_path).python_for("peft", "1.8.0"))
    assert "transformers is 5.9.0" in str(error)


def test_without_the_index_kept_environments_are_searched(tmp_path):
    case = Case(labels("FAIL FAIL FAIL PASS PASS PASS"))
    run(tmp_path, case)
    offline = run(tmp_path, case, Index(offline=True))
    assert offline.first == "1.9.0"
    assert "only environments that were kept" in offline.notes[0] and "index.example" not in offline.notes[0]


def test_without_index_and_environments_it_is_refused(tmp_path):
    error = refused(lambda: run(tmp_path, Case({}), Index(offline=True)))
    assert error.field == "bisect" and "index.example" not in str(error)


def test_interpreter_without_pip_is_told(tmp_path):
    environments = Environments(BASE, {}, tmp_path, runner=lambda command, timeout_s: (1, "No module named pip"))
    assert refused(environments.releases, "peft").hint == "python -m ensurepip"


def test_reason_is_the_error_line_without_addresses():
    assert reason_of("a\nERROR: no match for https://u:k@host.example/x (from versions)\nERROR: b") == (
        "no match for an address (from versions)"
    )
    assert reason_of("") == "no output"


def test_commands_run_end_and_are_timed():
    assert run_command([sys.executable, "-c", "print('x')"], 60) == (0, "x\n" if os.name != "nt" else "x\r\n")
    assert run_command([sys.executable, "-c", "import threading; threading.Event().wait(60)"], 0.3)[0] == 124
    assert run_command(["/no/such/program"], 5)[0] == 127


def test_base_is_read_from_its_interpreter():
    base = Base.read(None)
    import torch

    assert base.versions["torch"] == torch.__version__
    assert any(Path(folder) == Path(torch.__file__).parents[1] for folder in base.folders)
    assert refused(Base.read, "/no/such/python").field == "python"


def test_a_real_environment_imports_the_bases_torch(tmp_path):
    """Only pip is left out: nothing has to be installed for the link to work."""

    def without_pip(command: Sequence[str], timeout_s: float) -> tuple[int, str]:
        return (0, "") if "pip" in command else run_command(command, timeout_s)

    base = Base.read(None)
    own = Base(base.python, {"peft": base.versions["peft"]}, base.folders, base.identity)
    environments = Environments(own, {}, tmp_path, runner=without_pip)
    python = environments.python_for("peft", base.versions["peft"])
    code, output = run_command(
        [str(python), "-c", "import importlib.util, sys; print(sys.prefix, importlib.util.find_spec('torch').origin)"], 60
    )
    prefix, origin = output.split()
    import torch

    assert code == 0 and Path(prefix) == python.parents[1] and Path(origin) == Path(torch.__file__)
