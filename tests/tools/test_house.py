"""The numbers of the house: none is worse than its record, and each counts what it says."""

import ast
import json
import subprocess
import sys
from pathlib import Path

import pytest

from bench import start
from tools import house, rooms, traced_files


def test_no_number_is_worse_than_its_record():
    now = house.counted(house.House(), traced=False)
    assert house.worse(now, house.read_record()) == [], "make it better, or save it: python tools/house.py --save"


@pytest.mark.slow
def test_an_answer_enters_no_more_files_than_recorded():
    now = house.counted(house.House(), traced=True)
    assert house.worse(now, house.read_record()) == [], "see python tools/traced_files.py run|chat"


def test_the_record_has_every_number_and_no_other():
    assert list(house.read_record()) == [number.key for number in house.NUMBERS]


def test_the_lines_of_every_format_beyond_the_first_are_counted():
    package, known = house.House().package, {one for found in house.FORMATS.values() for one in found}
    general = {"record", "packed", "kernels", "weights", "__init__", "hf_types", "coded_files", "int8_head"}
    rooms_of = (package / "formats", package / "engine" / "formats")
    files = {file for room in rooms_of for file in room.glob("*.py") if file.stem not in general | {"bitsandbytes"}}
    files |= {
        file for file in (package / "engine" / "kernels" / "cuda").glob("*.cuh") if file.stem not in ("values", "packed", "nf4")
    }
    assert {file.relative_to(package).as_posix() for file in files} == {one for one in known if "/" in one}
    lines = house.House().format_lines()
    assert lines["awq, gptq"] == sum(len((room / "transposed.py").read_text().splitlines()) for room in rooms_of)
    assert lines["nvfp4"] > sum(len((package / one).read_text().splitlines()) for one in house.FORMATS["nvfp4"] if "/" in one) + 10


@pytest.fixture
def written(tmp_path, monkeypatch):
    """Return a function that makes files of a package beside this one, and returns the house that they stand in."""

    def write(files):
        for name, text in files.items():
            file = tmp_path / "trimtab" / f"{name}.py"
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text, encoding="utf-8")
        monkeypatch.setattr(rooms, "ROOT", tmp_path)
        monkeypatch.setattr(rooms, "PACKAGE", tmp_path / "trimtab")
        return house.House()

    return write


def test_an_import_for_types_closes_a_circle(written):
    found = written({
        "checkpoint/a": "from trimtab.checkpoint import b\n",
        "checkpoint/b": "from trimtab.checkpoint.c import X\n",
        "checkpoint/c": "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from trimtab.checkpoint.a import Y\n",
        "engine/d": "from trimtab.checkpoint import a, c\n",
    })  # fmt: skip
    assert (found.largest_circle(), found.upward(), found.largest_room()) == (3, 0, 3)


def test_circles_that_lead_to_one_another_one_way_stay_apart():
    a, b, c, d, e = map(Path, "abcde")
    imported = {a: {b}, b: {a, c}, c: {d}, d: {e, c}, e: {e}}
    assert sorted(map(sorted, house.circles(imported))) == [[a, b], [c, d], [e]]


@pytest.mark.parametrize(
    "source, count",
    [
        ("from typing import Any\n", 1),
        ("from typing import Any\ndef f(a: Any, *b: dict[str, Any]) -> list[Any]:\n    c: Any = a\n    return c\n", 5),
        ("import typing\ndef f(a: typing.Any) -> None: ...\n", 1),
        ("from typing import Any as T\na: T\nb: T\n", 3),
        ("from typing import Any, cast\na = cast(Any, 1)\nb = cast('dict[str, Any]', 1)\ndef f(a: 'Any') -> 'list[Any]': ...\n", 5),
        ("from typing import Any\nModel = Any\ndef f(a: Model, b: Model) -> None: ...\n", 5),
        ('"""Any file. Any other."""\nmock.Any = "Any"  # Any\n', 0),
    ],
)  # fmt: skip
def test_any_is_counted_where_code_says_it(source, count):
    assert house.anys([source]) == [count]  # the name that is assigned is itself one of those that say `Any`


def test_any_by_another_name_counts_in_the_files_that_import_it():
    first = "from typing import Any\nModel: TypeAlias = Any\n"
    second = "from trimtab.engine.first import Model\ndef f(a: Model) -> None: ...\n"
    assert house.anys([first, second, "def f(model: Model) -> None: ...\n"]) == [3, 2, 0]


def test_a_write_to_anything_but_self_is_a_foreign_one():
    source = "class A:\n    def f(self, b):\n        self.x = b.x = 1\n        self.y.z += 1\n        b.u, self.v = 1, b.w\n"
    assert sorted(ast.unparse(node) for node in house.foreign_writes(ast.parse(source))) == ["b.u", "b.x", "self.y.z"]


def test_long_classes_and_foreign_writes_of_a_small_house(written):
    long = "class A:\n" + "    x = 1\n" * 300
    found = written(
        {"engine/a": long, "engine/b": long.removesuffix("    x = 1\n"), "engine/c": "a.b = 1\n", "doctor/d": "a.b = 1\n"}
    )
    assert (found.long_classes(), found.foreign_writes()) == (1, 1)


def test_lines_rooms_and_pages_of_a_small_house(written):
    found = written({"engine/a": "x = 1\n" * 600, "engine/b": "x = 1\n" * 601, "engine/c": "from typing import Any\n"})
    page = found.package / "serve" / "http" / "page"
    page.mkdir(parents=True)
    for name, lines in (("ours.js", 5), ("theirs.js", 7), ("theirs.LICENSE.txt", 20)):
        (page / name).write_text("x\n" * lines)
    (found.root / "CHANGELOG.md").write_text("x" * 1234)
    assert (found.lines("trimtab"), found.long_files(), found.any_in_engine()) == (1202, 1, 1)
    assert (found.vendored_lines(), found.kb("CHANGELOG.md")) == (7, 1.2)


def counting(monkeypatch, tmp_path, **numbers):
    """Let these be the numbers of the house, and the record a file of this test."""
    whole = {number.key: 10 for number in house.NUMBERS} | numbers
    monkeypatch.setattr(house.House, "format_lines", lambda self: {"int4": 435})  # the real ones take seconds a call
    monkeypatch.setattr(house, "RECORD", tmp_path / "house.json")
    monkeypatch.setattr(house.read_record, "__defaults__", (tmp_path / "house.json",))
    monkeypatch.setattr(house.save, "__defaults__", (tmp_path / "house.json",))
    monkeypatch.setattr(
        house, "counted", lambda _, traced: {
            number.key: whole[number.key] for number in house.NUMBERS if traced or not number.is_traced
        },
    )  # fmt: skip


def test_a_number_that_got_worse_fails_until_it_is_saved(monkeypatch, tmp_path, capsys):
    counting(monkeypatch, tmp_path, any_in_engine=30)
    assert house.main(["--save"]) == 0 and house.main([]) == 0
    counting(monkeypatch, tmp_path, any_in_engine=29)
    assert house.main([]) == 0
    counting(monkeypatch, tmp_path, any_in_engine=31, run_files=11)
    capsys.readouterr()
    assert house.main([]) == 1
    shown = capsys.readouterr()
    assert shown.err.splitlines()[-2:] == [
        "  `Any` in the engine: 31, and the record is 30",
        "  files entered by `trimtab run`: 11, and the record is 10",
    ]
    assert shown.out.splitlines()[-1].endswith(": int4 435")
    row = next(line for line in shown.out.splitlines() if "`Any`" in line)
    assert row.split()[-4:] == ["31", "30", "400", "120"]
    assert house.main(["--static", "--save"]) == 0 and house.main(["--static"]) == 0
    assert house.read_record()["run_files"] == 10 and house.main([]) == 1  # what was not counted keeps its record


def test_a_number_without_a_record_fails():
    assert house.worse({"any_in_engine": 3}, {}) == ["`Any` in the engine: 3, and the record has no such number"]


def test_lines_are_recorded_in_steps_and_files_one_by_one():
    numbers = {number.key: number for number in house.NUMBERS}
    assert [numbers["package_lines"].recorded(value) for value in (88_001, 88_500, 88_501)] == [88_500, 88_500, 89_000]
    assert numbers["contributing_kb"].recorded(4.7) == 5 and numbers["upward_imports"].recorded(32) == 32


PACKAGE = {
    "__init__": "",
    "imported": "class A:\n    x = [i for i in range(3)]\n",
    "called": "def f():\n    from trimtab import threaded\n    threaded.start()\n",
    "threaded": "import threading\ndef start():\n    thread = threading.Thread(target=lambda: inside())\n    thread.start()\n"
    "    thread.join()\ndef inside():\n    from trimtab import child\n    child.run()\n",
    "child": "import subprocess, sys\ndef run():\n    code = 'from trimtab import inner; inner.f()'\n"
    "    subprocess.run([sys.executable, '-c', code], check=True)\n",
    "inner": "def f(): ...\n",
}  # fmt: skip


def test_files_are_traced_in_threads_and_children(written, tmp_path):
    package = written(PACKAGE).package
    (tmp_path / "traced").mkdir()
    code = "from trimtab import imported, called; called.f()"
    found = traced_files.entered_by(["-c", code], tmp_path / "traced", package=package)
    assert found == ["called.py", "child.py", "inner.py", "threaded.py"]


def test_only_what_every_round_enters_counts(written, tmp_path):
    package = written(dict.fromkeys(("before", "between", "always", "once"), "def f(): ...\n")).package
    (package / "__init__.py").touch()
    (tmp_path / "traced").mkdir()
    records = traced_files.Records(tmp_path / "traced", package=package)
    steps = ("before.f()", "always.f(); once.f()", "between.f()", "always.f()", "before.f()")
    code = "from trimtab import before, between, always, once\n" + "".join(
        f"{step}\nprint({number}, flush=True)\ninput()\n" for number, step in enumerate(steps)
    )
    asks = [records.count, records.write, records.count, records.write]
    with subprocess.Popen(  # in the package's folder: `-c` looks there first
        [sys.executable, "-c", code],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=records.environment,
        cwd=tmp_path,
    ) as process:
        for number in range(len(steps)):
            assert process.stdout.readline().strip() == str(number)
            if number < len(asks):
                asks[number](number // 2 + 1)
            process.stdin.write("\n")
            process.stdin.flush()
    assert process.returncode == 0 and records.files() == ["always.py"]


def test_times_of_a_part_leave_those_of_the_other(monkeypatch, tmp_path):
    file = tmp_path / "timed.json"
    for part, value in (("start", 1.0), ("tests", 2.0), ("start", 3.0)):
        monkeypatch.setitem(house.PARTS, part, lambda value=value: {"s": value})
        house.timed([part], file)
    found = json.loads(file.read_text())
    assert (found["start"]["s"], found["tests"]["s"]) == (3.0, 2.0) and found["tests"]["about"]["cpu_count"]


def test_the_first_byte_is_timed_and_a_command_without_one_is_an_error():
    assert start.first_byte_s([sys.executable, "-c", "print('a')"], {}) > 0
    for code in ("pass", "print('a', flush=True); raise SystemExit(3)"):
        with pytest.raises(subprocess.CalledProcessError):
            start.first_byte_s([sys.executable, "-c", code], {})
