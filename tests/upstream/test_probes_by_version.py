"""Every probe, live, on the oldest and the newest set of packages: red where the bug is, green where it is not."""

import tempfile
from pathlib import Path

import pytest

from tests.upstream.expected import EXPECTED, SETS, F, P, expected_states

pytestmark = pytest.mark.slow

TELLING = [bug_id for bug_id, row in EXPECTED.items() if set(row) == {P, F}]


@pytest.mark.parametrize("set_name", SETS)
@pytest.mark.parametrize("bug_id", EXPECTED)
def test_probe_says_what_is_expected_of_the_set(verdicts, set_name, bug_id):
    verdict = verdicts(set_name)[bug_id]
    assert verdict.seen.state in expected_states(bug_id, set_name), verdict.seen.evidence


@pytest.mark.parametrize("bug_id", TELLING)
def test_probe_tells_a_version_with_the_bug_from_one_without(verdicts, bug_id):
    assert verdicts("oldest")[bug_id].seen.state != verdicts("newest")[bug_id].seen.state


@pytest.mark.parametrize("set_name", SETS)
def test_every_entry_of_the_catalogue_gets_a_verdict(verdicts, set_name):
    assert set(verdicts(set_name)) == set(EXPECTED)


@pytest.mark.parametrize("set_name", SETS)
def test_evidence_names_no_folder_of_this_machine(verdicts, set_name):
    for verdict in verdicts(set_name).values():
        for folder in (tempfile.gettempdir(), str(Path.home())):
            assert folder not in verdict.seen.evidence
