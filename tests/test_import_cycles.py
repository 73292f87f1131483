"""No modules import each other in a circle, imports inside functions included."""

from __future__ import annotations

from pathlib import Path

from tools import rooms
from tools.house import circles


def circles_of(package: Path) -> list[set[str]]:
    """Return the stems of the files of each circle of a package."""
    found = circles(rooms.graph(package, types=False))
    return [{file.stem for file in circle} for circle in found if len(circle) > 1]


def test_no_modules_import_each_other_in_a_circle():
    assert circles_of(rooms.PACKAGE) == []


def test_an_import_inside_a_function_is_part_of_a_circle_and_one_for_type_checkers_is_not(tmp_path):
    package = tmp_path / "p"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "a.py").write_text("from p.b import f\n")
    (package / "b.py").write_text("def f():\n    import p.a\n")
    (package / "c.py").write_text("from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import p.d\n")
    (package / "d.py").write_text("from p import c\n")
    assert circles_of(package) == [{"a", "b"}]
