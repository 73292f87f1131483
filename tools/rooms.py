"""Prints the map of the package: rooms in the order of their imports, each with its question and its files.

    python tools/rooms.py             the map
    python tools/rooms.py --imports   imports that lead to a later room, types included

A room imports earlier rooms only: `tests/tools/test_rooms.py`.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "trimtab"
# Folders, and files of the top level, from the first to the last.
ORDER = tuple(
    """
    printable errors _version former_names process report adapter_names gguf request checkpoint formats adapters
    planning/values planning/request planning/plan planning/memory planning machine
    engine/cuda engine/formats engine/tiers engine/memory engine/lora engine/layers engine/kv engine/kernels engine/batched_lora
    engine/passes engine/families engine/decode engine/towers engine/loader engine/templates engine/chat engine/prefill engine/batch
    engine/calls engine api
    merging/changes merging/files merging bridge stock
    verification/routes verification/merges verification/render verification verification/server benchmark
    doctor/facts doctor/catalogue doctor/probes doctor/servers doctor/traces doctor/cases doctor/issues doctor/preflight
    doctor/bisect doctor
    serve/contract serve/observe serve/media serve/grammar serve/scheduling serve/adapters serve/api serve/worker serve/http serve
    serve/ray
    __init__ cli/flags demo cli/chat cli/commands cli __main__
    """.split()  # noqa: SIM905
)
MOST_FILES = 13  # few enough to be read in one look


def room_of(file: Path) -> str:
    """Return the name in ORDER of the room that a file of the package stands in."""
    path = file.relative_to(PACKAGE)
    return path.parent.as_posix() if len(path.parts) > 1 else path.stem


def files() -> dict[str, list[Path]]:
    """Return room -> its files, in the order of the rooms."""
    found: dict[str, list[Path]] = {room: [] for room in ORDER}
    for file in sorted(PACKAGE.rglob("*.py")):
        found.setdefault(room_of(file), []).append(file)
    return found


def sentence(file: Path) -> str:
    """Return the sentence of a file's docstring, in one line and without an example behind it."""
    return (ast.get_docstring(ast.parse(file.read_text(encoding="utf-8"))) or "").partition("\n\n")[0].replace("\n", " ")


def imports(file: Path, modules: Mapping[str, Path], *, types: bool = True) -> Iterator[Path]:
    """Yield the files of the package that a file imports anywhere. types: those for type checkers alone too."""
    for node in _statements(ast.parse(file.read_text(encoding="utf-8")), types):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            names = [full if (full := f"{node.module}.{alias.name}") in modules else node.module for alias in node.names]
        yield from (modules[name] for name in names if name in modules)


def _statements(tree: ast.AST, types: bool) -> Iterator[ast.AST]:
    """Yield what may be an import: statements at any depth, without the expressions in them, which are most of a tree."""
    ahead = [tree]
    while ahead:
        node = ahead.pop()
        yield node
        is_for_types = isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"
        for field in ("body", "orelse", "finalbody", "handlers", "cases"):
            if field == "body" and is_for_types and not types:
                continue
            inner = getattr(node, field, ())
            ahead += inner if isinstance(inner, list) else ()


def graph(package: Path | None = None, *, types: bool = True) -> dict[Path, set[Path]]:
    """Return file -> the other files of a package (None: this one) that it imports. types: as in `imports`."""
    folder = PACKAGE if package is None else package
    modules = {
        ".".join(file.relative_to(folder.parent).with_suffix("").parts).removesuffix(".__init__"): file
        for file in folder.rglob("*.py")
    }
    return {file: set(imports(file, modules, types=types)) - {file} for file in modules.values()}


def upward(imported: Mapping[Path, Collection[Path]] | None = None) -> list[str]:
    """Return "file -> file" of each import that leads to a later room. imported: what `graph` found, if it was asked before."""
    rank = {room: place for place, room in enumerate(ORDER)}
    found = set()
    for file, others in (graph() if imported is None else imported).items():
        for other in others:
            if rank[room_of(other)] > rank[room_of(file)]:
                found.add(f"{file.relative_to(PACKAGE).as_posix()} -> {other.relative_to(PACKAGE).as_posix()}")
    return sorted(found)


def main() -> int:
    if "--imports" in sys.argv[1:]:
        print("\n".join(upward()))
        return 0
    for room, members in files().items():
        if len(members) == 1 and members[0].parent == PACKAGE:
            print(f"{members[0].name:<34}{sentence(members[0])}")
            continue
        print(f"{room}/")
        for file in members:
            print(f"    {'' if file.name == '__init__.py' else file.name:<30}{sentence(file)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
