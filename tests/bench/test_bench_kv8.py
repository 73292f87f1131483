"""The file of results of bench/kv8.py: a new run replaces its own case on its own device, and no other."""

import json

from bench.kv8 import save
from tests import ROOT

RESULTS = ROOT / "bench" / "results" / "kv8.json"


def run(gpu: str | None, mark: int, **case) -> dict:
    return {"environment": {"gpu": gpu}, "case": case, "steps": [{"ms": mark}]}


def test_a_run_replaces_its_own_case_and_no_other(tmp_path):
    file = tmp_path / "kv8.json"
    file.write_text(RESULTS.read_text(encoding="utf-8"), encoding="utf-8")
    recorded = json.loads(file.read_text(encoding="utf-8"))["runs"]
    e4b, longer = {"model": "e4b", "rows": 8, "context": 4096}, {"model": "e4b", "rows": 8, "context": 32768}
    qwen = {"model": "qwen3-8b", "rows": 8, "context": 4096}
    own = {"environment": {"gpu": "H100"}, "case": {"model": "mine", "prompts": "a.jsonl", "quant": "nf4-dq"}, "own": {}}
    kept = [run("H200", 1, **e4b), run("H100", 2, **longer), run("H100", 3, **qwen), own]
    for one in (kept[0], run("H100", 4, **e4b), *kept[1:], run("H100", 5, **dict(reversed(e4b.items())))):
        save(file, one)
    runs = json.loads(file.read_text(encoding="utf-8"))["runs"]
    assert runs == [*recorded, *kept, run("H100", 5, **e4b)]
    demo = {"environment": {"gpu": None}, "demo": [{"quant": "none"}], "random": []}
    save(file, demo)
    assert json.loads(file.read_text(encoding="utf-8"))["runs"] == [*runs[len(recorded) :], demo]


def test_a_first_run_makes_the_file(tmp_path):
    save(tmp_path / "new.json", run("H100", 1, model="e4b"))
    assert json.loads((tmp_path / "new.json").read_text(encoding="utf-8")) == {"runs": [run("H100", 1, model="e4b")]}
