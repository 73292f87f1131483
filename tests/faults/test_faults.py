"""Each fault of the docs' table, done to a real `trimtab serve` on the demo model: small here, in full with `-m slow`.

What happens and what is counted is in `bench/faults.py`, whose full run is bench/results/faults.json.
"""

import json
import os
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the scenes read /proc and send signals")
if sys.platform == "linux":
    from bench import faults
    from bench.served import DEMO, Served

NOTHING_LEFT = {"in_flight": 0, "waiting": 0, "running": 0}
BAD_ENDS = ("hang", "broken", "different", "nameless")
# Starting Python and reading the model, on a machine that does nothing else; a loaded one is slower by its own measure.
BACK_S = 10.0


SEND_S = 1.0


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    return tmp_path_factory.mktemp("adapters")


@pytest.fixture(scope="module")
def server(root):
    """One server for every scene that leaves it as it was."""
    with Served([*DEMO, "--adapter-root", str(root), "--limit", f"send_s={SEND_S}"]) as found:
        yield found


def check_ends(tally, *, error_names=()):
    """Every request ended in a complete answer or in an error with one of these names."""
    assert {name: tally[name] for name in BAD_ENDS} == dict.fromkeys(BAD_ENDS, 0), tally
    assert set(tally["errors"]) <= set(error_names), tally
    assert tally["requests"] == tally["complete"] + tally["error"]


def check_killed(found):
    check_ends(found, error_names=["WorkerDiedError"])
    assert found["complete"] > 0 and found["restarts"] == found["kills"] and found["left"] == NOTHING_LEFT
    assert found["back_s"]["max"] <= BACK_S * max(1.0, 2 * os.getloadavg()[0] / (os.cpu_count() or 1)), found["back_s"]


def test_a_worker_killed_under_load_loses_no_answer_without_a_name(server):
    found = faults.killed(1, 4, server=server)
    check_killed(found)
    assert found["error"] > 0


@pytest.mark.slow
def test_with_retry_only_what_had_begun_to_speak_is_lost():
    check_killed(faults.killed(1, 8, retry=True))


@pytest.mark.slow
def test_a_hundred_kills_under_32_clients():
    check_killed(faults.killed(100, 32))


@pytest.mark.slow  # in one process in test_prompts_that_fail.py
def test_prompts_that_run_out_of_memory_are_refused_and_the_others_go_on():
    found = faults.out_of_memory(3.0, 4)
    assert found["that_ran_out"]["complete"] == 0 and found["that_ran_out"]["error"] > 0
    check_ends(found["that_ran_out"], error_names=["DeviceError"])
    check_ends(found["others"])
    assert found["others"]["complete"] > 0 and found["same_worker"] and found["left"] == NOTHING_LEFT


@pytest.mark.slow
def test_host_memory_that_runs_out_for_one_picture_ends_that_request_alone():
    found = faults.host_memory(2)
    check_ends(found["that_ran_out"], error_names=["DeviceError"])
    assert found["that_ran_out"]["error"] == 2 and found["before"] == found["after"] == "complete"
    check_ends(found["others"])
    assert found["same_worker"] and found["left"] == NOTHING_LEFT


def test_damaged_adapters_are_refused_by_name_while_others_are_answered(server, root):
    found = faults.bad_adapters(2, server=server, root=root)
    assert set(found["refused"]) == set(faults.HARMS) and set(found["refused"].values()) <= {"AdapterError", "CheckpointError"}
    assert found["sound"] == "complete" and json.loads(found["its_answer"])["shape"] == "square"
    check_ends(found["others"])
    assert found["same_worker"] and found["left"] == NOTHING_LEFT


def test_clients_that_leave_at_random_free_their_rows(server):
    found = faults.leaving(16, 4, server=server)
    assert found["left"] == NOTHING_LEFT and found["same_worker"]
    assert {name.split(": ")[1] for name in found["ended"]} == {"left", "complete"} and sum(found["ended"].values()) == 16


@pytest.mark.slow
def test_a_thousand_clients_leave_at_random():
    found = faults.leaving(1000, 32)
    assert found["left"] == NOTHING_LEFT and found["same_worker"] and sum(found["ended"].values()) == 1000


def test_slow_readers_cost_little_memory_and_hold_nobody_up(server):
    found = faults.slow_readers(send_s=SEND_S, server=server)
    assert found["others"] == ["complete"] * 3 and found["cut"] == found["readers"] and found["left"] == NOTHING_LEFT
    # What nobody has read yet is the answers themselves: a token with its twenty likeliest is a few KB.
    assert found["grown_mib"] < found["streams"] * 10, found


def test_a_port_in_use_ends_the_second_server_with_its_name(server):
    found = faults.port_in_use(server=server)
    assert found["exit_code"] == 2 and "in use" in found["said"] and "port" in found["said"] and found["first_is_ready"]


@pytest.mark.slow  # with a toy model in test_serve_run.py
def test_told_to_end_a_server_finishes_its_answers_and_refuses_what_is_new():
    found = faults.told_to_end(4, tokens=60)
    check_ends(found["running"])
    assert found["running"]["complete"] == 4 and found["new"]["errors"] == {"StoppingError": 1}
    assert (found["exit_code"], found["worker_is_gone"]) == (0, True)


@pytest.mark.slow  # with a toy model in test_serve_run.py
def test_what_its_grace_time_is_too_short_for_is_cut_by_name():
    found = faults.told_to_end(4, grace_s=0.3, tokens=400)
    check_ends(found["running"], error_names=["StoppingError"])
    assert found["running"]["error"] == 4 and (found["exit_code"], found["worker_is_gone"]) == (0, True)
    assert found["took_s"] < 15


def test_the_results_in_the_docs_are_those_of_a_run():
    root = Path(__file__).resolve().parent.parent.parent
    results = root / "bench" / "results"
    scenes = json.loads((results / "faults.json").read_text(encoding="utf-8"))["scenes"]
    soak = json.loads((results / "soak.json").read_text(encoding="utf-8"))
    docs = (root / "docs" / "server-under-load.md").read_text(encoding="utf-8")
    assert f"<!-- faults -->\n{faults.section(scenes, soak)}<!-- /faults -->" in docs
    assert max(soak["growth"][name]["percent"] for name in ("api", "worker")) < 1.0
    check_ends(scenes["killed"], error_names=["WorkerDiedError"])
    assert scenes["killed"]["left"] == NOTHING_LEFT
