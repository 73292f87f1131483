"""What bench/start.py reads and says: imports by package, unseen before seen, medians."""

import os
import sys
from pathlib import Path

from bench import start, start_parts

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
    assert os.path.isabs(here) and shown.startswith("tests/bench/test_bench_start:test_a_function") and here.endswith(shown)
    assert start_parts.from_import_folder("<string>:<module>") == "<string>:<module>"
