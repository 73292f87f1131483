"""Whether what the catalogue says of each bug is whole, fit to be printed, and agrees with itself."""

from __future__ import annotations

import re
from dataclasses import fields

from tests.rules import each
from tests.upstream.expected import EXPECTED
from trimtab.doctor.catalogue import read_catalogue
from trimtab.doctor.facts.bug import Bug

BUGS = [entry.bug for entry in read_catalogue()]
IDS = [bug.id for bug in BUGS]
TEXTS = [field.name for field in fields(Bug) if field.type == "str"]
OWNERS = {"accelerate", "bitsandbytes", "peft", "transformers", "safetensors", "servers", "torch"}

each_bug = each("bug", BUGS, where=lambda bug: bug.id)


def texts_of(bug: Bug) -> dict[str, str]:
    return {name: getattr(bug, name) for name in TEXTS} | {f"tracker {i}": text for i, text in enumerate(bug.trackers)}


def test_entries_are_in_the_order_of_their_ids_and_each_has_its_expectation():
    assert sorted(IDS, key=lambda bug_id: (bug_id[0], int(bug_id[1:]))) == IDS and set(IDS) == set(EXPECTED)


def test_no_two_entries_share_an_id_a_name_a_title_or_a_symptom():
    for field in ("id", "name", "title", "symptom"):
        values = [getattr(bug, field) for bug in BUGS]
        assert len(set(values)) == len(values), field


@each_bug
def test_every_text_is_there_and_is_one_tidy_line(bug):
    for name, text in texts_of(bug).items():
        assert len(text) >= (2 if name == "id" else 3), name
        assert text == " ".join(text.split()), f"{name}: line breaks or doubled spaces"
        assert not re.search(r"\b(todo|tbd|fixme|xxx)\b", text, re.IGNORECASE), name
    assert len(bug.title) <= 130 and not bug.title.endswith(".") and "next to meta" not in bug.cause


@each_bug
def test_no_text_names_a_place_of_somebodys_machine(bug):
    for name, text in texts_of(bug).items():
        assert not re.search(r"(^|[\s\"'(])(/|~/)[A-Za-z]+/", text), f"{name}: {text}"
        assert not re.search(r"site-packages|dist-packages|Users|/home|/root|/tmp", text), f"{name}: {text}"


@each_bug
def test_every_tracker_says_what_it_is_or_how_it_stands_and_is_named_once(bug):
    trackers = bug.trackers
    assert [tracker for tracker in trackers if not re.fullmatch(r"[\w.-]+/[\w.-]+#\d+ \([^() ][^()]*\)", tracker)] == []
    places = [tracker.split(" ")[0] for tracker in trackers]
    assert len(set(places)) == len(places)


@each_bug
def test_owners_are_known_and_the_first_is_one_of_the_packages(bug):
    packages = [affected.package for affected in bug.affected]
    assert packages and len(set(packages)) == len(packages) and set(bug.owner) <= OWNERS
    assert bug.owner[0] in (*packages, "servers")


@each_bug
def test_a_cure_comes_after_the_bug(bug):
    for affected in bug.affected:
        named = [version for version in (affected.since, affected.fixed_in) if version]
        assert [version for version in named if not re.fullmatch(r"\d+(\.\d+)*", version)] == []
        numbers = [tuple(map(int, version.split("."))) for version in named]
        assert len(set(numbers)) == len(numbers) and sorted(numbers) == numbers


@each_bug
def test_the_kind_of_evidence_is_one_that_the_texts_carry(bug):
    assert bug.evidence in ("run", "source", "tracker")
    if bug.evidence == "run":
        assert re.search(r"\brun\b|\bruns\b|\breproduced\b|\bshown\b", bug.versions), bug.versions
    if bug.evidence == "tracker":
        assert bug.trackers and "reported" in bug.versions


@each_bug
def test_other_entries_that_a_text_names_exist(bug):
    for name, text in texts_of(bug).items():
        named = re.findall(r"(?<![\w.-])([A-I]\d{1,2})(?![\w.-]*[\w])", text)
        assert set(named) <= set(IDS), f"{name} names {sorted(set(named) - set(IDS))}"


@each_bug
def test_a_version_in_affected_agrees_with_the_expected_states(bug):
    """A bug has a first cured release where it is present in the oldest set and fixed in the newest, and nowhere else."""
    expected = EXPECTED[bug.id]
    assert any(affected.fixed_in for affected in bug.affected) == (expected == ("present", "fixed"))
    if expected == ("fixed", "present"):
        assert any(affected.since for affected in bug.affected)
