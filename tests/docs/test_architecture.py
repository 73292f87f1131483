"""The architecture page and CONTRIBUTING name files, functions and classes that exist."""

import ast
import re

import pytest

from tests import ROOT
from tools import request_path

PACKAGE = ROOT / "trimtab"
PAGES = {name: (ROOT / name).read_text(encoding="utf-8") for name in ("docs/architecture.md", "CONTRIBUTING.md")}


def names_in(file):
    """Return what a file defines at any depth, and what it assigns at the top."""
    tree = ast.parse(file.read_text(encoding="utf-8"))
    found = {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)}
    for node in tree.body:
        targets = node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
        found |= {target.id for target in targets if isinstance(target, ast.Name)}
    return found


@pytest.mark.parametrize("page", PAGES)
def test_files_and_functions_that_a_page_names_exist(page):
    wrong = []
    for path, name in re.findall(r"`([\w/.]+?(?:\.py|/))(?:: (\w+))?`", PAGES[page]):
        places = [folder / path for folder in (PACKAGE, ROOT) if (folder / path).exists()]
        if not places:
            wrong.append(path)
        elif name and name not in names_in(places[0]):
            wrong.append(f"{path}: {name}")
    assert wrong == []


def test_the_ten_classes_are_in_their_files():
    table = PAGES["docs/architecture.md"].partition("## Ten classes")[2].partition("## Where")[0]
    rows = re.findall(r"^\| (`.+?`) \|.*\| `(.+?)` \|$", table, re.M)
    assert len(rows) == 10
    for classes, file in rows:
        assert set(re.findall(r"\w+", classes)) <= names_in(PACKAGE / file)


def test_the_picture_names_files_of_the_package():
    picture = request_path.SLOT.search(PAGES["docs/architecture.md"]).group(0)
    files = request_path.files_of(picture)
    assert {"serve/http/app.py", "serve/scheduling/scheduler.py", "engine/layers/leaves.py", "engine/lora/store.py"} <= set(files)
    assert [file for file in files if not (PACKAGE / file).is_file()] == []


def test_a_picture_says_the_files_that_it_was_made_of():
    files = ["serve/http/auth.py", "errors.py", "serve/http/app.py", *(f"engine/chat/{'x' * 20}{i}.py" for i in range(9))]
    text = request_path.picture({"API process": files})
    assert max(map(len, text.splitlines())) <= request_path.WIDTH
    assert sorted(request_path.files_of(text)) == sorted(files)
    assert "  serve/http                auth > app\n" in text and text.startswith("API process: 12 files\n")
