"""Do the tests of a room find a wrong line? Seeded mutants of it, each run with the tests that reach the mutated line.

    python tools/mutants.py planning --count 60         # needs cosmic-ray and coverage: `make mutants` makes their environment

A mutant is one change by cosmic-ray (another operator, number or condition). Its tests are those of the room that execute the line,
the quickest first, up to a minute; it is found when one fails or hangs. The tests chosen for a file's mutants run first without
one: those that fail then judge no mutant of it; they are printed and saved. Each result is saved at once: the command goes on
where it was stopped. The score and the mutants that no test finds go to bench/results/mutants.json. A change that is not Python,
as another operator for the ** of `{**a}`, is no mutant: the score does not count it. Works in a copy of the committed tree.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sqlite3
import subprocess
import sys
import time
import xml.etree.ElementTree as ElementTree
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
WORK, RESULT = ROOT / ".mutants", ROOT / "bench/results/mutants.json"
TOOLS = WORK / "tools/bin"
# A room, and the folders of tests that speak of it.
ROOMS = {
    "planning": ("trimtab/planning", ["tests/planning"]),
    "adapters": ("trimtab/adapters", ["tests/adapters"]),
    "lora": ("trimtab/engine/lora", ["tests/engine/lora", "tests/engine/batched_lora"]),
    "merging": ("trimtab/merging", ["tests/merging"]),
    "scheduling": ("trimtab/serve/scheduling", ["tests/serve/scheduling"]),
}
MOST_TEST_S, MOST_MUTANT_S = 60.0, 180.0
# `X | None` of an annotation, which nothing evaluates.
EQUAL = "core/ReplaceBinaryOperator_BitOr_"


@dataclass(frozen=True)
class Mutant:
    file: str
    operator: str
    occurrence: int
    line: int

    @property
    def name(self) -> str:
        return f"{self.file}:{self.line} {self.operator.removeprefix('core/')} {self.occurrence}"


def environment(tree: Path) -> dict[str, str]:
    found = {**os.environ, "PYTHONPATH": f"{tree}:{WORK / 'coverage'}", "PYTHONDONTWRITEBYTECODE": "1", "OMP_NUM_THREADS": "1"}
    return found | {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}


def sample(tree: Path, folder: str, count: int, seed: int) -> list[Mutant]:
    """Return `count` mutants: lines of the room at random, at each of them a change at random."""
    session = WORK / "session.sqlite"
    session.unlink(missing_ok=True)
    config = WORK / "session.toml"
    config.write_text(
        f'[cosmic-ray]\nmodule-path = "{tree / folder}"\ntimeout = 60\nexcluded-modules = []\ntest-command = "true"\n'
        '[cosmic-ray.distributor]\nname = "local"\n'
    )
    subprocess.run([TOOLS / "cosmic-ray", "init", config, session], check=True)
    with sqlite3.connect(session) as data:
        rows = data.execute("SELECT module_path, operator_name, occurrence, start_pos_row, start_pos_col FROM mutation_specs")
        places: dict[tuple[str, int, int], list[Mutant]] = {}
        for path, operator, occurrence, line, column in sorted(rows):
            if not operator.startswith(EQUAL):
                file = Path(path).relative_to(tree).as_posix()
                places.setdefault((file, line, column), []).append(Mutant(file, operator, occurrence, line))
    chance = random.Random(seed)
    return [chance.choice(places[place]) for place in chance.sample(sorted(places), min(count, len(places)))]


def reached(tree: Path, folder: str, tests: list[str]) -> tuple[dict[tuple[str, int], set[str]], dict[str, float]]:
    """Return the tests that execute each line, "" for those of an import, and the seconds of each test."""
    import coverage

    commit = subprocess.run(["git", "rev-parse", "HEAD"], cwd=tree, check=True, capture_output=True, text=True).stdout[:12]
    name = f"{folder.replace('/', '-')}-{commit}"
    data, times = WORK / f"{name}.coverage", WORK / f"{name}.xml"
    if not data.exists() or not times.exists():
        (WORK / "coveragerc").write_text(f"[run]\nsource = {tree / folder}\ndynamic_context = test_function\ndata_file = {data}\n")
        command = [sys.executable, "-m", "coverage", "run", f"--rcfile={WORK / 'coveragerc'}", "-m", "pytest", "-q", "-p"]
        ran = subprocess.run(
            [*command, "no:cacheprovider", f"--junitxml={times}", *tests], cwd=tree, env=environment(tree), check=False
        )
        if ran.returncode:
            times.unlink(missing_ok=True)
            raise SystemExit(f"{folder}: its tests fail without a mutant")
    lines: dict[tuple[str, int], set[str]] = {}
    found = coverage.CoverageData(str(data))
    found.read()
    for file in found.measured_files():
        for line, names in found.contexts_by_lineno(file).items():
            lines[Path(file).relative_to(tree).as_posix(), line] = set(names)
    seconds: dict[str, float] = {}
    for case in ElementTree.parse(times).iter("testcase"):
        name = f"{case.get('classname')}.{str(case.get('name')).partition('[')[0]}"
        seconds[name] = seconds.get(name, 0.0) + float(case.get("time") or 0.0)
    return lines, seconds


def chosen(mutant: Mutant, lines: dict[tuple[str, int], set[str]], seconds: dict[str, float]) -> list[str]:
    """Return the tests of a mutant as pytest takes them, the quickest first."""
    names = lines.get((mutant.file, mutant.line), set())
    names = set(seconds) if "" in names else names & set(seconds)
    total, tests = 0.0, list[str]()
    for name in sorted(names, key=lambda one: (seconds[one], one)):
        total += seconds[name]
        if tests and total > MOST_TEST_S:
            break
        module, _, function = name.rpartition(".")
        tests.append(f"{module.replace('.', '/')}.py::{function}")
    return tests


def ran(tree: Path, tests: list[str], *options: str, timeout_s: float | None = None) -> subprocess.CompletedProcess[bytes]:
    """Run tests. Errors: SystemExit where pytest itself fails; TimeoutExpired."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *options, *tests]
    found = subprocess.run(command, cwd=tree, env=environment(tree), capture_output=True, timeout=timeout_s, check=False)
    if found.returncode not in (0, 1, 2, 3, 4):  # 2, 3 and 4: a module cannot be imported; 3: by a hook
        raise SystemExit(f"pytest ended with {found.returncode}: {found.stdout[-500:].decode(errors='replace')}")
    return found


def failing(tree: Path, tests: list[str]) -> list[str]:
    """Return those of the tests, as `chosen` names them, that fail in this order without a mutant. The tree has none."""
    found = ran(tree, tests, "-rfE") if tests else None
    if found is None or not found.returncode:
        return []
    said = found.stdout.decode(errors="replace").splitlines()
    named = {line.split(" ")[1].partition("[")[0] for line in said if line.startswith(("FAILED ", "ERROR "))}
    # One that cannot be imported is named by its file.
    failed = [test for test in tests if {test, test.partition("::")[0]} & named]
    if not failed:
        raise SystemExit(f"pytest ended with {found.returncode}: {found.stdout[-500:].decode(errors='replace')}")
    if found.returncode != 1:  # then no other test ran
        failed += failing(tree, [test for test in tests if test not in failed])
    return failed


def outcome(tree: Path, mutant: Mutant, tests: list[str]) -> dict[str, object]:
    """Apply a mutant, run its tests, and put the file back."""
    path = tree / mutant.file
    before = path.read_text()
    try:
        subprocess.run([TOOLS / "cosmic-ray", "apply", path, mutant.operator, str(mutant.occurrence)], check=True, cwd=tree)
        after = path.read_text()
        number, (old, new) = next(
            (number, pair)
            for number, pair in enumerate(zip(before.splitlines(), after.splitlines(), strict=False), 1)
            if pair[0] != pair[1]
        )
        said: dict[str, object] = {"line": number, "old": old.strip(), "new": new.strip(), "tests": len(tests)}
        try:
            compile(after, path, "exec")
        except SyntaxError:
            return said | {"outcome": "not Python"}
        if not tests:
            return said | {"outcome": "not reached"}
        try:
            found = ran(tree, tests, "-x", timeout_s=MOST_MUTANT_S)
        except subprocess.TimeoutExpired:
            return said | {"outcome": "hangs"}
        return said | {"outcome": "found" if found.returncode else "survives"}
    finally:
        path.write_text(before)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("room", choices=ROOMS)
    parser.add_argument("--count", type=int, default=60)
    parser.add_argument("--seed", type=int, default=1)
    given = parser.parse_args()
    folder, tests_folders = ROOMS[given.room]
    tree = WORK / "tree"
    if not tree.exists():
        subprocess.run(["git", "clone", "-q", "--local", ROOT, tree], check=True)
    subprocess.run(["git", "fetch", "-q", ROOT, "HEAD"], cwd=tree, check=True)
    subprocess.run(["git", "reset", "-q", "--hard", "FETCH_HEAD"], cwd=tree, check=True)  # also without a mutant of a killed run
    sys.path.append(str(WORK / "coverage"))
    kept = json.loads(RESULT.read_text()) if RESULT.exists() else {}
    room = kept.setdefault(given.room, {"seed": given.seed, "mutants": {}})
    assert room["seed"] == given.seed, f"{RESULT} has mutants of seed {room['seed']}"
    lines, seconds = reached(tree, folder, tests_folders)
    mutants = sample(tree, folder, given.count, given.seed)
    left = [mutant for mutant in mutants if mutant.name not in room["mutants"]]
    tests_of = {mutant: chosen(mutant, lines, seconds) for mutant in left}
    useless: dict[str, list[str]] = {}
    for number, mutant in enumerate(left, 1 + len(mutants) - len(left)):
        start = time.monotonic()
        if mutant.file not in useless:
            of_file = dict.fromkeys(test for other in left if other.file == mutant.file for test in tests_of[other])
            useless[mutant.file] = room.setdefault("fail_unmutated", {})[mutant.file] = failing(tree, list(of_file))
            for test in useless[mutant.file]:
                print(f"fails without a mutant of {mutant.file}: {test}", flush=True)
        tests = [test for test in tests_of[mutant] if test not in useless[mutant.file]]
        room["mutants"][mutant.name] = outcome(tree, mutant, tests)
        found = [one["outcome"] in ("found", "hangs") for one in room["mutants"].values() if one["outcome"] != "not Python"]
        room["score"] = round(sum(found) / max(1, len(found)), 3)
        RESULT.write_text(json.dumps(kept, indent=1, sort_keys=True) + "\n")
        said = room["mutants"][mutant.name]["outcome"]
        print(f"{number}/{len(mutants)} {said:12} {time.monotonic() - start:5.1f} s  {mutant.name}", flush=True)
    judged = sum(one["outcome"] != "not Python" for one in room["mutants"].values())
    print(f"{given.room}: {room['score']:.0%} of {judged} are found")


if __name__ == "__main__":
    main()
