"""Normal clients beside hostile ones, and kills while adapters come and go: `bench/attackers.py` with smaller numbers."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

RECORD = Path(__file__).resolve().parents[2] / "bench" / "results" / "attackers.json"
MOST_RATIO = 3.0
linux = pytest.mark.skipif(sys.platform != "linux", reason="the scenes read /proc and send signals")
NOTHING_LEFT = {"in_flight": 0, "waiting": 0, "running": 0}


@pytest.mark.slow
@linux
def test_normal_clients_are_answered_while_others_attack():
    from bench import attackers

    found = attackers.attacked(10.0, 2)
    # Every answer is complete and the one that it was before; every probe of /health is answered.
    assert set(found["attacked"]["ended"]) == set(found["quiet"]["ended"]) == {"complete", "health 200"}
    assert found["same_worker"] and found["left"] == NOTHING_LEFT
    # The largest hostile body has 57 MiB, the largest that is parsed 27.
    assert found["api_peak_mib"][1] - found["api_peak_mib"][0] < 400
    refused = {name.split(": ")[-1] for name in found["attackers"] if ": " in name}
    assert refused <= {"400", "431", "closed"}, found["attackers"]


@pytest.mark.slow
@linux
def test_kills_while_adapters_come_and_go_lose_no_answer_without_a_name():
    from bench import attackers

    found = attackers.killed(3, 8)
    assert {name: found[name] for name in ("hang", "broken", "different", "nameless")} == dict.fromkeys(
        ("hang", "broken", "different", "nameless"), 0
    )
    assert set(found["errors"]) <= {"WorkerDiedError"} and found["restarts"] == 3 and found["left"] == NOTHING_LEFT
    assert any(name.startswith("load_lora_adapter: complete") for name in found["adapters"])
