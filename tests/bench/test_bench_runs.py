"""Loads of formats with their limit, a matrix shared among processes, servers that end, and what a start imports."""

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from bench import formats, matrix, row_of, start, start_parts
from bench.served import Served
from tests import ROOT, waiting
from tests.raised import raised
from trimtab.doctor.cases.cases import CASE_NAMES, CASES


def test_rows_of_loads_are_kept_and_a_load_that_takes_too_long_is_one(tmp_path, monkeypatch):
    seconds = iter(range(100))

    def run(command, *, timeout, **_):
        side, name = command[command.index("--side") + 1], command[command.index("--one") + 1]
        if name == "e4b:fp8" and side == "stock":
            raise subprocess.TimeoutExpired(command, timeout)
        return SimpleNamespace(
            returncode=0, stdout="ROW " + json.dumps({"load_s": next(seconds), "answer_s": 1, "layer": side}), stderr=""
        )

    def main(*arguments):
        monkeypatch.setattr(sys, "argv", ["formats", "--work", str(tmp_path), "--save", str(file), "--loads", *arguments])
        formats.main()

    file = tmp_path / "saved.json"
    file.write_text(json.dumps({"environment": "of rates", "rows": ["of rates"]}))
    monkeypatch.setattr(formats, "write", lambda *_: tmp_path / "none")
    monkeypatch.setattr(subprocess, "run", run)
    main("--cases", "e4b:awq,e4b:fp8,e4b:gptq")
    with pytest.raises(SystemExit, match="no time left for e4b:ct-g32"):
        main("--cases", "e4b:ct-g32", "--total-s", "5")
    whole = json.loads(file.read_text())
    assert (whole["environment"], whole["rows"]) == ("of rates", ["of rates"])
    awq, fp8, gptq = whole["loads"]["rows"]
    assert awq["trimtab"] == {"first_s": 0, "layer": "trimtab", "load_s": [2, 4, 6], "answer_s": [1, 1, 1]}
    assert (awq["stock"]["first_s"], awq["of_stock"], gptq["form"]) == (1, round(4 / 5, 2), "gptq")
    assert fp8["stock"] == {"over_s": 400} and "of_stock" not in fp8
    assert len(fp8["trimtab"]["load_s"]) == 3  # the other side is timed to the end


def test_a_case_has_its_last_row_or_the_reason_why_it_has_none():
    def ran(code, **limits):
        return row_of(["timeit", "-n1", "-r1", code], **limits)

    assert ran("""print('ROW {"at": 1}', 'ROW {"at": 2}', sep=chr(10))""") == {"at": 2}
    assert ran("raise RuntimeError('no card')")["error"].endswith("RuntimeError: no card")
    assert ran("import os; os._exit(3)")["error"] == "exit 3"
    assert ran("""import os; print('ROW {"at": 1}', flush=True); os._exit(3)""") == {"error": "exit 3"}
    assert ran("import threading; threading.Event().wait(9)", timeout_s=0.2) == {"error": "longer than 0.2 s", "over_s": 0.2}
    assert ran("import threading; threading.Event().wait(9)", timeout_s=5, left_s=0.2) is None


# What each side imports first is imported once for both; that each side asks for it before its seconds is noted.
TIMED = """
import os, sys
from pathlib import Path
from types import SimpleNamespace
from bench import formats
at = []
formats.time = SimpleNamespace(perf_counter=lambda: at.append(set(sys.modules)) or 0.0)
formats._import_all("nf4-dq")
formats._import_all = at.append
for side in ("trimtab", "stock"):
    if not os.fork():
        formats.load_once("qwen3-8b-tiny", "nf4-dq", Path(sys.argv[1]), 1, side)
        print(side, at[0], sorted(at[2] - at[1]), flush=True)
        os._exit(0)
    os.wait()
"""


def test_a_load_finds_its_modules_imported(tmp_path, monkeypatch):
    monkeypatch.setenv("DEVICE", "cpu")
    monkeypatch.setattr(formats, "DEVICE", "cpu")
    formats.write("qwen3-8b-tiny", "nf4-dq", formats.folder_of("qwen3-8b-tiny", "nf4-dq", tmp_path, 1), 1)
    found = subprocess.run([sys.executable, "-c", TIMED, str(tmp_path)], cwd=ROOT, capture_output=True, text=True)
    assert {"trimtab nf4-dq []", "stock nf4-dq []"} <= set(found.stdout.splitlines()), found.stdout + found.stderr


def test_every_case_is_run_once_and_those_that_fill_the_card_alone():
    groups, alone = matrix.shared_out(None, 7)
    assert sorted([*alone, *(name for group in groups for name in group)]) == sorted(CASE_NAMES)
    assert len(groups) == 7 and max(map(len, groups)) - min(map(len, groups)) <= 1
    assert {case.name for case in CASES if case.pressure is not None} == set(alone) != set()
    assert matrix.shared_out([alone[0]], 4) == ([], [alone[0]])


def test_later_runs_replace_earlier_ones_in_the_tables_order():
    old = [
        {"case": CASE_NAMES[2], "engine": "stock", "label": "OLD"},
        {"case": CASE_NAMES[0], "engine": "trimtab", "label": "KEPT"},
    ]
    new = [{"case": CASE_NAMES[2], "engine": "stock", "label": "NEW"}, {"case": CASE_NAMES[0], "engine": "stock", "label": "NEW"}]
    found = [(run["case"], run["engine"], run["label"]) for run in matrix.in_order(old, new)]
    first, third = CASE_NAMES[0], CASE_NAMES[2]
    assert found == [(first, "stock", "NEW"), (first, "trimtab", "KEPT"), (third, "stock", "NEW")]


def test_a_process_that_ends_early_is_no_short_table():
    kept = []
    with pytest.raises(SystemExit, match="1 of 1 processes ended early"):
        matrix.in_jobs(["--engines", "nonsense"], [CASE_NAMES[0]], 2, kept.extend)
    assert kept == []


def test_what_was_found_is_kept_when_the_run_is_ended_from_outside(monkeypatch):
    """SIGTERM becomes SystemExit while a process is waited for; those that still run are ended."""
    killed, kept = [], []

    class Process:
        def __init__(self, command):
            matrix.write(Path(command[-1]), {}, [{"case": CASE_NAMES[0], "engine": "stock", "label": "PASS"}])

        def wait(self):
            raise SystemExit(143)

        def kill(self):
            killed.append(self)

    monkeypatch.setattr(matrix.subprocess, "Popen", Process)
    assert raised(SystemExit, matrix.in_jobs, [], [CASE_NAMES[0]], 2, kept.extend).code == 143 and len(killed) == 1
    assert [run["label"] for run in kept] == ["PASS"]


WAITS = "import threading; threading.Event().wait(600)"


def test_an_ended_server_has_no_guard_left():
    server = Served((), command=("-c", WAITS))
    assert server.process.poll() is None and server._guard.poll() is None
    server.end()
    assert server.process.poll() is not None and server._guard.poll() == 0
    server.end()  # a second time is no error


@pytest.mark.skipif(os.name != "posix", reason="asks for a process by its id")
def test_a_server_ends_with_a_bench_that_is_killed():
    code = f"from bench.served import Served\nprint(Served((), command=('-c', {WAITS!r})).process.pid, flush=True)\n{WAITS}"
    bench = subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    assert bench.stdout is not None
    with bench.stdout:
        server = int(bench.stdout.readline())
        os.kill(server, 0)
        bench.kill()
        bench.wait()
    waiting.until(lambda: waiting.is_gone(server))


IMPORTTIME = """import time: self [us] | cumulative | imported package
import time:       120 |        120 |   _io
import time:      2000 |    1500000 |     torch._dynamo
import time:    300000 |    2500000 |   torch
import time:        10 |    4000000 | transformers.modeling_utils
a line of a package
"""


def test_imports_are_read_with_all_that_they_import():
    assert start.parse_imports(IMPORTTIME) == {
        "_io": 0.00012, "torch._dynamo": 1.5, "torch": 2.5, "transformers.modeling_utils": 4.0,
    }  # fmt: skip


def test_each_unseen_run_has_a_folder_of_its_own_and_the_seen_one_after_it_the_same():
    homes = []

    def run(home):
        homes.append(home)
        return float(len(homes))

    rows = start._pairs("plan", run, 2)
    assert [row["what"] for row in rows] == ["plan, unseen", "plan, seen"] and [row["s"] for row in rows] == [2.0, 3.0]
    assert homes[0] == homes[1] != homes[2] == homes[3]


def test_the_table_is_short_and_aligned():
    whole = {
        "rows": [{"what": "trimtab plan, seen", "s": 1.234}], "parts": {"parts": {"weights": 2.25}},
        "imports": [{"package": "torch", "s": 2.5}],
    }  # fmt: skip
    lines = start.text_of(whole).splitlines()
    assert lines[1].split() == ["trimtab", "plan,", "seen", "1.23"] and lines[-1].split() == ["torch", "2.50"]
    assert {len(line) for line in lines if line} == {54}


def test_a_sample_is_in_one_part_of_a_start():
    worker, model = "/x/trimtab/serve/worker/worker:__init__", "/x/trimtab/engine/model:__init__"
    weights = "/x/trimtab/engine/loader/load:run"
    assert start_parts.part_of(["/x/torch/nn:f", weights, model, worker]) == "weights"
    assert start_parts.part_of(["<frozen importlib._bootstrap>:_find_and_load", weights, worker]) == "imports"
    assert start_parts.part_of(["/x/trimtab/engine/kernels/selfcheck:_one", model, worker]) == "checks of kernels"
    assert start_parts.part_of([model, worker]) == "rest of loading" and start_parts.part_of([worker]) == "rest"


def test_the_functions_of_parts_exist():
    root = Path(start_parts.__file__).parents[1]
    for _, functions in [*start_parts.PARTS, ("ready", [start_parts.READY])]:
        for function in functions:
            path, _, name = function.partition(":")
            if path.startswith("<"):
                continue
            text = (root / "trimtab" / f"{path.removeprefix('trimtab/')}.py").read_text(encoding="utf-8")
            assert f"def {name}" in text, function


def test_a_function_is_named_by_its_file_without_the_folder_of_this_machine():
    here = start_parts.names_of(sys._getframe())[0]
    shown = start_parts.from_import_folder(here)
    assert os.path.isabs(here) and shown.startswith("tests/bench/test_bench_runs:test_a_function") and here.endswith(shown)
    assert start_parts.from_import_folder("<string>:<module>") == "<string>:<module>"
