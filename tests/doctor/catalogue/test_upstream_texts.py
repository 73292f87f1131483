"""Whether what the catalogue says of each bug is fit to be printed and agrees with itself; its form is in test_probes.py."""

from __future__ import annotations

import inspect
import re
from dataclasses import fields

from tests import ROOT
from tests.rules import each
from tests.upstream.expected import EXPECTED
from trimtab.doctor.catalogue import FILES, read_entry
from trimtab.doctor.facts.bug import Bug

FOLDER = ROOT / "trimtab" / "doctor" / "catalogue"
MODULES = {stem: read_entry(FOLDER / f"{stem}.py") for stem in FILES}
BUGS: dict[str, Bug] = {stem: module.BUG for stem, module in MODULES.items()}
IDS = {bug.id for bug in BUGS.values()}
TEXTS = [field.name for field in fields(Bug) if field.type == "str"]

each_bug = each("stem", BUGS)


def texts_of(bug: Bug) -> dict[str, str]:
    return {name: getattr(bug, name) for name in TEXTS} | {f"tracker {i}": text for i, text in enumerate(bug.trackers)}


def test_no_two_entries_share_a_title_or_a_symptom():
    for field in ("title", "symptom"):
        values = [getattr(bug, field) for bug in BUGS.values()]
        assert len(set(values)) == len(values), field


@each_bug
def test_file_opens_with_its_id_and_has_a_probe(stem):
    bug, module = BUGS[stem], MODULES[stem]
    assert module.__doc__.startswith(f"{bug.id}: ") and list(inspect.signature(module.probe).parameters) == ["kit"]


@each_bug
def test_every_text_is_there_and_is_one_tidy_line(stem):
    for name, text in texts_of(BUGS[stem]).items():
        assert len(text) >= (2 if name == "id" else 3), name
        assert text == " ".join(text.split()), f"{name}: line breaks or doubled spaces"
        assert not re.search(r"\b(todo|tbd|fixme|xxx)\b", text, re.IGNORECASE), name


@each_bug
def test_no_text_names_a_place_of_somebodys_machine(stem):
    for name, text in texts_of(BUGS[stem]).items():
        assert not re.search(r"(^|[\s\"'(])(/|~/)[A-Za-z]+/", text), f"{name}: {text}"
        assert not re.search(r"site-packages|dist-packages|Users|/home|/root|/tmp", text), f"{name}: {text}"


@each_bug
def test_every_tracker_says_what_it_is_or_how_it_stands_and_is_named_once(stem):
    trackers = BUGS[stem].trackers
    assert [tracker for tracker in trackers if not re.fullmatch(r"\S+#\d+ \(\S.*\)", tracker)] == []
    places = [tracker.split(" ")[0] for tracker in trackers]
    assert len(set(places)) == len(places)


@each_bug
def test_the_first_owner_is_one_of_the_packages(stem):
    bug = BUGS[stem]
    packages = [affected.package for affected in bug.affected]
    assert len(set(packages)) == len(packages) and bug.owner[0] in (*packages, "servers")


@each_bug
def test_a_cure_comes_after_the_bug(stem):
    for affected in BUGS[stem].affected:
        if affected.since and affected.fixed_in:
            since, fixed_in = (tuple(map(int, text.split("."))) for text in (affected.since, affected.fixed_in))
            assert since < fixed_in


@each_bug
def test_the_kind_of_evidence_is_one_that_the_texts_carry(stem):
    bug = BUGS[stem]
    assert bug.evidence in ("run", "source", "tracker")
    if bug.evidence == "run":
        assert re.search(r"\brun\b|\bruns\b|\breproduced\b|\bshown\b", bug.versions), bug.versions
    if bug.evidence == "tracker":
        assert bug.trackers and "reported" in bug.versions


@each_bug
def test_other_entries_that_a_text_names_exist(stem):
    for name, text in texts_of(BUGS[stem]).items():
        named = re.findall(r"(?<![\w.-])([A-I]\d{1,2})(?![\w.-]*[\w])", text)
        assert set(named) <= IDS, f"{name} names {sorted(set(named) - IDS)}"


def test_a_version_in_affected_agrees_with_the_expected_states():
    """A bug with a first cured release must be present in the oldest set or fixed in the newest, never the reverse."""
    for bug in BUGS.values():
        oldest, newest = EXPECTED[bug.id]
        if any(affected.fixed_in for affected in bug.affected):
            assert (oldest, newest) == ("present", "fixed"), bug.id
        if (oldest, newest) == ("fixed", "present"):
            assert any(affected.since for affected in bug.affected), bug.id
