"""tools/gpu_all.sh and tools/load_all.sh: every step once and within its limit; what has a result is not run again."""

import argparse
import ast
import importlib
import json
import os
import re
import shutil
import subprocess
import sys
import time
from types import SimpleNamespace

import pytest

from tests import ROOT

pytestmark = pytest.mark.skipif(shutil.which("bash") is None or sys.platform == "win32", reason="needs bash")

# Stands for Python: it writes down what it is asked for, and ends as `codes` (first word that fits -> exit code) says.
STAND_IN = """#!{python} -IS
import os, sys  # nothing that takes longer to import: there are a hundred of these
words = sys.argv[1:]
if words[:2] == ["-c", "import xdist"]:
    sys.exit(0)
with open(os.environ["ASKED"], "a") as file:
    file.write(ascii(words) + "\\n")
with open(os.environ["CODES"]) as file:
    codes = eval(file.read())
code = next((code for word, code in codes.items() if any(word in one for one in words)), 0)
print("FAILED tests/gpu/test_graphs.py::test_one - no" if code == 1 else "said at the end")
if code == 124:
    import threading
    threading.Event().wait(60)
sys.exit(code)
"""


@pytest.fixture
def run(tmp_path):
    """Return a call of a script: (its words, exit codes by word) -> (what it printed, the commands that it ran)."""
    python, asked, codes = tmp_path / "python", tmp_path / "asked", tmp_path / "codes"
    python.write_text(STAND_IN.format(python=sys.executable))
    python.chmod(0o755)
    (tmp_path / "work").mkdir()

    def call(script, *words, fails=None, steps=None, sanitizer=None):
        asked.write_text("")
        codes.write_text(ascii(fails or {}))
        environment = {name: value for name, value in os.environ.items() if name not in ("STEPS", "SANITIZER", "OLD_SITE", "SIZE")}
        environment |= {"PYTHON": str(python), "WORK": str(tmp_path / "work"), "ASKED": str(asked), "CODES": str(codes)}
        environment |= {"STEPS": steps} if steps else {}
        environment |= {"SANITIZER": str(sanitizer or python)}
        done = subprocess.run(
            ["bash", str(ROOT / "tools" / script), *map(str, words)], cwd=ROOT, env=environment, capture_output=True, text=True,
            timeout=120,
        )  # fmt: skip
        return done, [ast.literal_eval(line) for line in asked.read_text().splitlines()]

    return call


def states(out):
    """Return step -> its state, from the table."""
    return {line[:22].strip(): line[23:37].strip() for line in (out / "steps.txt").read_text().splitlines()}


def test_every_step_runs_once_and_a_second_call_runs_what_has_no_result(run, tmp_path):
    out = tmp_path / "out"
    done, asked = run("gpu_all.sh", out, 1000, fails={"bench.turns": 5, "test_paged_rows.py": 1, "bench.start": 139})
    assert done.returncode == 0 and len(asked) > 40, done.stderr
    found = states(out)
    # A failed test is a result: its name is kept. A step that broke is not.
    assert (found["tests-new"], found["turns"], found["start"], found["cards"]) == ("tests failed", "exit 5", "exit 139", "ok")
    assert (out / "failed-tests.txt").read_text() == "FAILED tests/gpu/test_graphs.py::test_one - no\n"
    assert "1 tests failed" in done.stdout.splitlines()[-1]
    (tmp_path / "work" / "e4b-talking").mkdir()
    (tmp_path / "work" / "e4b-talking" / "tokenizer.json").touch()
    done, again = run("gpu_all.sh", out, 1000)
    assert sorted(words[1] for words in again) == ["bench.start", "bench.turns"]
    assert set(states(out).values()) <= {"ok", "tests failed", "not run"}
    assert [name for name, state in states(out).items() if state == "not run"] == ["bridge-old", "matrix-old"]
    assert run("gpu_all.sh", out, 1000)[1] == []


def test_a_round_goes_on_where_the_last_one_ended_on_another_machine(run, tmp_path, monkeypatch):
    carried = tmp_path / "carried"
    (carried / "llama").mkdir(parents=True)
    (carried / "outsider.py").touch()
    monkeypatch.setenv("CARRIED", str(carried))
    asked = []
    for machine in ("one", "two"):
        monkeypatch.setenv("TMPDIR", str(tmp_path / machine))
        (tmp_path / machine).mkdir()
        done, words = run("../bench/device_round.sh", tmp_path / "back", 1000, fails={"bench.attention": 5 * (machine == "one")})
        asked.append(words)
        shutil.copy(tmp_path / "back" / "round.tgz", carried)
    assert len(asked[0]) > 15 and [words[1] for words in asked[1] if words[0] == "-m"] == ["bench.attention"], done.stdout
    found = states(tmp_path / "back")
    script = (ROOT / "tools" / "gpu_all.sh").read_text(encoding="utf-8")
    assert list(found) == re.search(r'round="(.*?)"', script, re.DOTALL)[1].replace("\\\n", " ").split()
    assert {name for name, state in found.items() if state != "ok"} <= {"peer"}  # `bash peer build`


def test_checkpoints_that_are_gone_with_their_machine_are_made_again(run, tmp_path):
    out = tmp_path / "out"
    for _ in range(2):
        assert [words[0] for words in run("gpu_all.sh", out, 1000, steps="make")[1]] == ["-c"]


def test_checkpoints_share_weights_and_nothing_that_is_written_anew(run, tmp_path, monkeypatch):
    from bench import cards, load, prompts
    from bench.checkpoints import config_of

    def prepare(name, work):
        (work / name).mkdir()
        config_of(name).to_json_file(work / name / "config.json")
        (work / name / "model.safetensors").write_bytes(b"weights")

    made = []
    monkeypatch.setattr(cards, "prepare", prepare)
    monkeypatch.setattr(load, "sized", lambda name, work, count, **options: made.append((name, count)))
    ((_, program, *names),) = run("gpu_all.sh", tmp_path / "out", 1000, steps="make")[1]
    monkeypatch.setattr(sys, "argv", ["-c", *names])
    exec(compile(program, "make", "exec"), {})
    assert names == ["e4b", "e2b"] and made == [("e4b", 32)]
    folder, talking = tmp_path / "work" / "e4b", tmp_path / "work" / "e4b-talking"
    assert (folder / "model.safetensors").samefile(talking / "model.safetensors")
    lengths = [json.loads((one / "processor_config.json").read_text())["image_seq_length"] for one in (folder, talking)]
    assert lengths[0] == prompts.PICTURE_TOKENS != lengths[1]
    assert not (tmp_path / "work" / "e2b-talking").exists()


def test_a_step_is_cut_at_its_limit_or_at_the_end_of_all(run, tmp_path):
    begun = time.monotonic()
    done, asked = run("gpu_all.sh", tmp_path / "out", 13, steps="turns kv-pages", fails={"bench.kv_pages": 124})
    assert time.monotonic() - begun < 40
    assert [words[1] for words in asked] == ["bench.kv_pages"]  # less than 10 s are left for the other
    assert states(tmp_path / "out")["kv-pages"].startswith("cut at 1") and states(tmp_path / "out")["turns"] == "not run"
    assert "cut at 1" in done.stdout


def test_a_load_part_that_failed_is_run_again_and_no_other(run, tmp_path):
    done, asked = run("load_all.sh", tmp_path / "work", tmp_path / "out", 1000, fails={"qwen3-8b": 1})
    loads = [words for words in asked if "bench.load" in words]
    assert done.returncode == 1 and len(loads) == 6, done.stdout + done.stderr
    done, asked = run("load_all.sh", tmp_path / "work", tmp_path / "out", 1000)
    assert done.returncode == 0 and ["qwen3-8b" in words for words in asked if "bench.load" in words] == [True]
    assert run("load_all.sh", tmp_path / "work", tmp_path / "other", 5)[0].returncode == 1


def test_a_load_part_measures_what_its_limit_leaves_time_for(run, tmp_path):
    """Besides the cells servers start, which takes up to 50 s; what is cut has no row."""
    from bench.load import cells_of

    script = (ROOT / "tools" / "load_all.sh").read_text(encoding="utf-8")
    limits = [int(limit) for limit in re.findall(r"(?m)^run \S+ (\d+)", script)]
    asked = run("load_all.sh", tmp_path / "work", tmp_path / "out", 1000)[1]
    loads = [words[words.index("bench.load") + 1 :] for words in asked if "bench.load" in words]
    for words, limit in zip(loads, limits, strict=True):
        given = parsed("bench.load", words)
        given["rates"] = given["rates"] if given["rates"] is not None else [] if given["share"] else [3.0, 10.0]
        cells = cells_of(SimpleNamespace(**given))
        assert [cell["loop"] for cell in cells] == ["closed"] * len(given["clients"]), words
        seconds = given["seconds"] * (len(cells) * len(given["engines"]) + bool(given["share"]))
        assert seconds + 50 <= limit, words


def parsed(module, words):
    """Return what a benchmark reads from its words: flag, with underscores -> value."""

    class ParsedError(Exception):
        pass

    parse = argparse.ArgumentParser.parse_args

    def parse_args(parser, arguments=None, namespace=None):
        raise ParsedError(parse(parser, arguments, namespace))

    with pytest.MonkeyPatch.context() as patch, pytest.raises(ParsedError) as caught:
        patch.setattr(sys, "argv", [module, *words])
        patch.setattr(argparse.ArgumentParser, "parse_args", parse_args)
        importlib.import_module(module).main()
    return vars(caught.value.args[0])


def test_every_command_of_the_steps_has_its_module_flags_and_files(run, tmp_path):
    asked = [*run("gpu_all.sh", tmp_path / "out", 1000)[1]]
    asked += run("load_all.sh", tmp_path / "work", tmp_path / "loads", 1000)[1]
    named = [words[words.index("-m") + 1 :] for words in asked if "-m" in words]
    benches = {words[0] for words in named}
    assert {
        "bench.cards", "bench.prompts", "bench.start", "bench.load", "bench.company", "bench.kv_pages", "bench.turns",
    } <= benches  # fmt: skip
    for module, *words in named:
        if module == "pytest":
            assert "-v" in words and all((ROOT / word).is_file() for word in words if word.endswith(".py")), words
            continue
        flags = {word for word in words if word.startswith("--")}
        if module == "trimtab":
            from trimtab.cli.main import parser

            parser().parse_args(words)
            continue
        assert "{S}" not in " ".join(words)
        if module.startswith("bench."):
            assert flags <= {f"--{name.replace('_', '-')}" for name in parsed(module, words)}, (module, words)
    tested = {word for words in named if words[0] == "pytest" for word in words}
    assert tested >= {path.relative_to(ROOT).as_posix() for path in (ROOT / "tests" / "gpu").glob("test_*.py")}


def test_cards_that_have_a_row_are_not_measured_again():
    from bench.cards import CASES, merged, missing, name_of

    cases = [case for case in CASES if case["model"] == "e4b"]
    results = merged({}, [{**cases[0], "tok_s": 1.0, "mixed": 200}, {**cases[1], "error": "longer than 110 s"}], {})
    assert missing(cases, results) == cases[1:]
    names = [name_of(case) for case in CASES]
    assert len(set(names)) == len(names)
    script = (ROOT / "tools" / "gpu_all.sh").read_text(encoding="utf-8")
    listed = [name for words in re.findall(r"bench\.cards [^\n]*--cases \\?\s*(\S+)", script) for name in words.split(",")]
    assert sorted(listed) == sorted(names)
