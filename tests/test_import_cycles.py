"""No modules import each other in a circle, imports inside functions included."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def modules(root: Path) -> dict[str, Path]:
    """Return dotted name -> file of a package's modules."""
    return {
        ".".join(file.relative_to(root.parent).with_suffix("").parts).removesuffix(".__init__"): file
        for file in sorted(root.rglob("*.py"))
    }


def imported(file: Path, known: dict[str, Path]) -> set[str]:
    """Return the modules that a file imports anywhere, except for type checkers only."""
    found: set[str] = set()

    def visit(node: ast.AST) -> None:
        if isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING":
            for child in node.orelse:
                visit(child)
            return
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            full = {alias.name: f"{node.module}.{alias.name}" for alias in node.names}
            found.update(name if name in known else node.module for name in full.values())
        for child in ast.iter_child_nodes(node):
            visit(child)

    visit(ast.parse(file.read_text(encoding="utf-8")))
    return found & known.keys()


def circles(root: Path) -> Iterator[set[str]]:
    """Yield each largest set of modules in which every module reaches every other."""
    known = modules(root)
    edges = {name: imported(file, known) - {name} for name, file in known.items()}
    reached: dict[str, set[str]] = {}
    for name in known:
        waiting, seen = [name], set[str]()
        while waiting:
            new = edges[waiting.pop()] - seen
            seen |= new
            waiting += new
        reached[name] = seen
    done: set[str] = set()
    for name in known:
        if name in reached[name] and name not in done:
            circle = {other for other in reached[name] if name in reached[other]}
            done |= circle
            yield circle


def test_no_modules_import_each_other_in_a_circle():
    assert list(circles(ROOT / "trimtab")) == []


def test_an_import_inside_a_function_is_part_of_a_circle_and_one_for_type_checkers_is_not(tmp_path):
    package = tmp_path / "p"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "a.py").write_text("from p.b import f\n")
    (package / "b.py").write_text("def f():\n    import p.a\n")
    (package / "c.py").write_text("from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import p.d\n")
    (package / "d.py").write_text("from p import c\n")
    assert list(circles(package)) == [{"p.a", "p.b"}]
