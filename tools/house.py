"""Is the code getting simpler? Counts files, lines, imports and types, and fails where one is worse than its record.

    python tools/house.py              the table, with the files that `trimtab run` and a chat request enter (a minute or two)
    python tools/house.py --static     without those: seconds; tests/tools/test_house.py does the same
    python tools/house.py --save       and write the record, bench/results/house.json
    python tools/house.py --timed      times, which fail nothing, into bench/results/house_timed.json (`make house-timed`)

Lower is better for every number. Lines and KB are recorded in whole steps (`Number.grain`), so that a small repair is no failure.
Whoever makes a number worse on purpose saves the record, and the change shows it.
"""

from __future__ import annotations

import argparse
import ast
import json
import math
import os
import platform
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))

from tools import rooms, traced_files, ways  # noqa: E402

RECORD = ROOT / "bench" / "results" / "house.json"
TIMED = ROOT / "bench" / "results" / "house_timed.json"
LONG_FILE, LONG_CLASS = 600, 300
KB = 1000


class House:
    """The tree whose numbers are counted: that of `rooms`."""

    def __init__(self) -> None:
        self.root, self.package = rooms.ROOT, rooms.PACKAGE

    @cached_property
    def imported(self) -> dict[Path, set[Path]]:
        return rooms.graph()

    def upward(self) -> int:
        return len(rooms.upward(self.imported))

    def largest_circle(self) -> int:
        return max(map(len, circles(self.imported)), default=0)

    def largest_room(self) -> int:
        counts = {room: sum(file.name != "__init__.py" for file in files) for room, files in rooms.files().items()}
        return max(count for room, count in counts.items() if room != rooms.CATALOGUE)

    def any_in_engine(self) -> int:
        return sum(anys(file.read_text(encoding="utf-8") for file in sorted((self.package / "engine").rglob("*.py"))))

    @cached_property
    def trees(self) -> dict[Path, ast.Module]:
        return {file: ast.parse(file.read_text(encoding="utf-8")) for file in sorted(self.package.rglob("*.py"))}

    def long_classes(self) -> int:
        classes = (node for tree in self.trees.values() for node in ast.walk(tree) if isinstance(node, ast.ClassDef))
        return sum((node.end_lineno or 0) - node.lineno >= LONG_CLASS for node in classes)

    def foreign_writes(self) -> int:
        doctor = self.package / "doctor"
        return sum(len(foreign_writes(tree)) for file, tree in self.trees.items() if doctor not in file.parents)

    def lines(self, folder: str) -> int:
        return sum(_lines(file) for file in (self.root / folder).rglob("*.py"))

    def long_files(self) -> int:
        return sum(_lines(file) > LONG_FILE for file in self.package.rglob("*.py"))

    def vendored_lines(self) -> int:
        """Return the lines of the page's files beside which another project's licence lies."""
        page = self.package / "serve" / "http" / "page"
        licences = [file.name.partition(".")[0] for file in page.rglob("*.LICENSE.txt")]
        return sum(_lines(file) for file in page.rglob("*.*") if file.suffix in (".js", ".css") and file.stem in licences)

    def kb(self, page: str) -> float:
        return round((self.root / page).stat().st_size / KB, 1)

    def format_lines(self) -> dict[str, int]:
        """Return the lines of each format beyond the first: of its reader, record, computing and header (`FORMATS`). A file that
        formats share counts for one: `formats/compressed_tensors.py`, of which int4 and NVFP4 are too, for fp8, and
        `engine/formats/grouped.py`, of which AWQ and GPTQ are too, for int4. Readers of file containers (`gguf/`: header, names,
        companion files, adapters), tests, shared kernels and `packed.cuh` count for none."""
        record = self.package / "formats" / "record.py"
        classes = {node.name: node for node in self.trees[record].body if isinstance(node, ast.ClassDef)}
        spans = {name: (node.end_lineno or 0) - node.lineno + 1 for name, node in classes.items()}
        return {
            name: sum(spans[one] if one in spans else _lines(self.package / one) for one in known)
            for name, known in FORMATS.items()
        }

    def traced(self, command: str) -> int:
        with tempfile.TemporaryDirectory() as folder:
            return len(traced_files.TRACED[command](Path(folder)))


@dataclass(frozen=True)
class Number:
    """A number of the house. key: in the record. step, goal: what it is to reach. grain: the record is the next multiple of it.
    is_traced: real processes are run for it."""

    key: str
    text: str
    step: float
    goal: float
    count: Callable[[House], float]
    grain: float = 1
    is_traced: bool = False

    def recorded(self, now: float) -> float:
        return math.ceil(now / self.grain) * self.grain


NUMBERS = (
    Number("upward_imports", "imports to a later room, types included", 0, 0, House.upward),
    Number("largest_circle", "files in the largest circle of imports, types included", 8, 1, House.largest_circle),
    Number("largest_room", "files in the largest room, the catalogue of bugs apart", 13, 13, House.largest_room),
    Number("any_in_engine", "`Any` in the engine", 400, 120, House.any_in_engine),
    Number("run_files", "files entered by `trimtab run`", 60, 40, lambda house: house.traced("run"), is_traced=True),
    Number("chat_files", "files entered by a warm chat request", 45, 30, lambda house: house.traced("chat"), is_traced=True),
    Number("gguf_lines", "lines of the longest format, GGUF", 300, 200, lambda house: house.format_lines()["gguf"], 10),
    Number("package_lines", "lines of Python in the package", 82_000, 79_000, lambda house: house.lines("trimtab"), 500),
    Number("test_lines", "lines of Python in the tests", 70_000, 55_000, lambda house: house.lines("tests"), 500),
    Number("long_files", f"files of the package over {LONG_FILE} lines", 0, 0, House.long_files),
    Number("vendored_lines", "lines of the page from other projects", 3_100, 3_100, House.vendored_lines),
    Number("contributing_kb", "KB of CONTRIBUTING.md", 8, 6, lambda house: house.kb("CONTRIBUTING.md")),
    Number("changelog_kb", "KB of CHANGELOG.md", 12, 8, lambda house: house.kb("CHANGELOG.md")),
    Number("long_classes", f"classes over {LONG_CLASS} lines", 6, 0, House.long_classes),
    Number("foreign_writes", "assignments to attributes of another object, the doctor apart", 200, 100, House.foreign_writes),
    *(Number(one.key, f"ways: {one.question}", one.step, one.goal, one.count) for one in ways.TABLE),
)  # fmt: skip
# Format beyond the first -> its reader, its record's class, what computes with it, its header: first step 300 lines, goal 200.
_KERNELS = "engine/kernels/cuda"
FORMATS = {
    "int4": ("formats/grouped.py", "_Grouped", "engine/formats/grouped.py", f"{_KERNELS}/int4.cuh"),
    "fp8": ("formats/compressed_tensors.py", "formats/float8.py", "_Float8", "engine/formats/float8.py", f"{_KERNELS}/fp8.cuh"),
    "gguf": ("formats/gguf.py", "_Ggml", "engine/formats/ggml.py", f"{_KERNELS}/ggml.cuh"),
    "mobile": ("formats/mobile.py", "_Mobile", "engine/formats/mobile.py", f"{_KERNELS}/mobile.cuh"),
    "nvfp4": ("formats/float4.py", "_Float4", "engine/formats/float4.py", f"{_KERNELS}/fp4.cuh"),
    "awq, gptq": ("formats/transposed.py", "engine/formats/transposed.py"),
}
# What is timed, its unit, and the file's path to it. The start is to become no slower, and then 1.5 times faster, than its record.
TIMES = (
    ("`trimtab run` on the demo: seconds to its first text", "start", "trimtab run, first text, seen"),
    ("`trimtab serve` on the demo: seconds until it is ready", "start", "trimtab serve, ready, seen"),
    ("default tests: CPU minutes, children included", "tests", "cpu_min"),
)


def circles(imported: Mapping[Path, Iterable[Path]]) -> list[set[Path]]:
    """Return the sets of files that import one another, each file in one: a file in no circle is alone in its set."""
    importers: dict[Path, set[Path]] = {file: set() for file in imported}
    for file, others in imported.items():
        for other in others:
            importers[other].add(file)
    left, found = set(imported), []
    while left:
        file = min(left)
        circle = _reached(file, imported, left) & _reached(file, importers, left)
        found.append(circle)
        left -= circle
    return found


def _reached(file: Path, edges: Mapping[Path, Iterable[Path]], among: set[Path]) -> set[Path]:
    found, ahead = {file}, [file]
    while ahead:
        new = [other for other in edges[ahead.pop()] if other in among and other not in found]
        found.update(new)
        ahead += new
    return found


def foreign_writes(tree: ast.AST) -> list[ast.Attribute]:
    """Return the attributes that are assigned to, of any object but a method's own `self` or `cls`."""
    stored = (node for node in ast.walk(tree) if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store))
    return [node for node in stored if not (isinstance(node.value, ast.Name) and node.value.id in ("self", "cls"))]


def anys(sources: Iterable[str]) -> list[int]:
    """Return how often each source says `Any`: its imports of it, and its name wherever it stands in code.

    Words of prose do not count. A name that is only `Any` again (`Model = Any`, `import Any as T`, in whichever source) counts as
    `Any` does, and so does the word in a type written as text: an annotation, the first argument of `cast`.
    """
    whole = [list(ast.walk(ast.parse(source))) for source in sources]
    others = {"Any"}.union(*map(_renamed, whole))
    return [_anys(nodes, others) for nodes in whole]


def _renamed(nodes: Sequence[ast.AST]) -> set[str]:
    """Return the names to which a source assigns `Any` itself."""
    found: set[str] = set()
    for node in nodes:
        if isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None and _is_any(node.value, {"Any"}):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            found |= {target.id for target in targets if isinstance(target, ast.Name)}
    return found


def _is_any(node: ast.AST, names: set[str]) -> bool:
    if isinstance(node, ast.Attribute):
        return node.attr == "Any" and isinstance(node.value, ast.Name) and node.value.id in ("typing", "typing_extensions")
    return isinstance(node, ast.Name) and node.id in names


def _anys(nodes: Sequence[ast.AST], others: set[str]) -> int:
    imported = [alias for node in nodes if isinstance(node, ast.ImportFrom) for alias in node.names if alias.name in others]
    names = {"Any"} | _renamed(nodes) | {alias.asname or alias.name for alias in imported}
    return (
        len(imported)
        + sum(_is_any(node, names) for node in nodes)
        + sum(len(re.findall(r"\bAny\b", text)) for node in nodes for text in _types_as_text(node))
    )


def _types_as_text(node: ast.AST) -> Iterator[str]:
    types: list[ast.AST | None] = []
    if isinstance(node, ast.arg | ast.AnnAssign):
        types = [node.annotation]
    elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        types = [node.returns]
    elif isinstance(node, ast.Call) and "cast" in (getattr(node.func, "id", None), getattr(node.func, "attr", None)):
        types = [*node.args[:1]]
    for part in (part for one in types if one is not None for part in ast.walk(one)):
        if isinstance(part, ast.Constant) and isinstance(part.value, str):
            yield part.value


def _lines(file: Path) -> int:
    return file.read_bytes().count(b"\n")


def counted(house: House, *, traced: bool) -> dict[str, float]:
    """Return key -> number as it is now."""
    return {number.key: number.count(house) for number in NUMBERS if traced or not number.is_traced}


def worse(now: Mapping[str, float], record: Mapping[str, float]) -> list[str]:
    """Return a sentence on each number that is higher than its record, or has none."""
    found = []
    for number in NUMBERS:
        if number.key not in now:
            continue
        if number.key not in record:
            found.append(f"{number.text}: {now[number.key]:,g}, and the record has no such number")
        elif now[number.key] > record[number.key]:
            found.append(f"{number.text}: {now[number.key]:,g}, and the record is {record[number.key]:,g}")
    return found


def read_record(file: Path = RECORD) -> dict[str, float]:
    """Return key -> recorded number; none where there is no record yet."""
    found: dict[str, float] = json.loads(file.read_text(encoding="utf-8"))["numbers"] if file.exists() else {}
    return found


def table(now: Mapping[str, float], record: Mapping[str, float]) -> str:
    """Return the numbers as they are, their records, and what they are to reach."""
    rows = [
        (number.text, *(f"{value:,g}" if value is not None else "-" for value in (
            now.get(number.key), record.get(number.key), number.step, number.goal)))
        for number in NUMBERS if number.key in now
    ]  # fmt: skip
    return _aligned([("number", "now", "record", "first step", "goal"), *rows])


def _aligned(rows: Sequence[Sequence[str]]) -> str:
    wide = [max(map(len, column)) for column in zip(*rows)]
    return "\n".join(
        "  ".join([row[0].ljust(wide[0]), *(word.rjust(width) for word, width in zip(row[1:], wide[1:]))]) for row in rows
    )


def save(now: Mapping[str, float], file: Path = RECORD) -> None:
    """Write the record: what was counted now, and what it had of the other numbers."""
    numbers = read_record(file) | {number.key: number.recorded(now[number.key]) for number in NUMBERS if number.key in now}
    kept = {number.key: numbers[number.key] for number in NUMBERS if number.key in numbers}
    file.write_text(json.dumps({"command": "python tools/house.py --save", "numbers": kept}, indent=1) + "\n", encoding="utf-8")


def timed(parts: Sequence[str], file: Path = TIMED) -> dict[str, Any]:
    """Measure the parts, write them into the file beside what it has of the others, and return all that it has."""
    whole: dict[str, Any] = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
    for part in parts:
        about: dict[str, Any] = {"python": platform.python_version(), "machine": platform.machine(), "cpu_count": os.cpu_count()}
        about |= {"load": list(os.getloadavg())} if hasattr(os, "getloadavg") else {}
        whole[part] = {"about": about, **PARTS[part]()}
    file.write_text(json.dumps(whole, indent=1) + "\n", encoding="utf-8")
    return whole


def _start() -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "start.json"
        # As many threads as a user's start has: the tests run with one.
        environment = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
        command = [sys.executable, "-m", "bench.start", "--save", str(file)]
        subprocess.run(command, check=True, cwd=ROOT, env=environment)
        rows = json.loads(file.read_text(encoding="utf-8"))["rows"]
    return {row["what"]: round(row["s"], 3) for row in rows}


def _tests() -> dict[str, Any]:
    began, before = time.monotonic(), os.times()
    command = [sys.executable, "-m", "pytest", "-q", "-n", "logical", "--maxprocesses", "8", "--dist", "loadfile", "tests"]
    ran = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)  # as `make test` does
    after = os.times()
    # Seconds of children that somebody waited for: all of them, on Linux and macOS. Windows counts none.
    cpu_s = after.children_user + after.children_system - before.children_user - before.children_system
    return {
        "cpu_min": round(cpu_s / 60, 1), "wall_min": round((time.monotonic() - began) / 60, 1), "exit_code": ran.returncode,
        "closing_line": (ran.stdout.strip().splitlines() or [""])[-1],
    }  # fmt: skip


PARTS: dict[str, Callable[[], dict[str, Any]]] = {"start": _start, "tests": _tests}


def main(arguments: Sequence[str] | None = None) -> int:
    """Return 1 if a number is worse than its record."""
    parser = argparse.ArgumentParser(prog="python tools/house.py", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--static", action="store_true", help="run no process: without the files that were entered")
    parser.add_argument("--save", action="store_true", help="write the record, better or worse")
    parser.add_argument("--timed", nargs="*", choices=PARTS, metavar="PART", help=f"measure: {', '.join(PARTS)}")
    options = parser.parse_args(arguments)
    if options.timed is not None:
        found = timed(options.timed or list(PARTS))
        print(_aligned([("time", "now"), *((text, f"{found.get(part, {}).get(key, '-')}") for text, part, key in TIMES)]))
        return 0
    house = House()
    now, record = counted(house, traced=not options.static), read_record()
    print(table(now, record))
    shared = _lines(house.package / _KERNELS / "packed.cuh")
    formats = "; ".join(f"{name} {lines}" for name, lines in house.format_lines().items())
    print("lines of a format (reader, record, computing, header; fp8 with the settings of int4 and nvfp4; without trimtab/gguf, "
          f"which reads GGUF files, and the {shared} of packed.cuh that all share): {formats}")  # fmt: skip
    if options.save:
        save(now)
        return 0
    found_worse = worse(now, record)
    if found_worse:
        print("\nworse than the record (make it better, or save it: python tools/house.py --save):", file=sys.stderr)
        print("\n".join(f"  {one}" for one in found_worse), file=sys.stderr)
    return 1 if found_worse else 0


if __name__ == "__main__":
    sys.exit(main())
