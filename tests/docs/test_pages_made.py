"""Pages name files, functions and classes that exist; their plans and their table of formats are what the tools print."""

import ast
import re
from importlib.metadata import version

import pytest

from tests import ROOT
from tools import draw_load_line, printed_plans, request_path
from tools.which_files import PAGE, filled
from trimtab.gguf.architectures import ARCHITECTURES

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
    files = ["serve/http/connection.py", "errors.py", "serve/http/app.py", *(f"engine/chat/{'x' * 20}{i}.py" for i in range(9))]
    text = request_path.picture({"API process": files})
    assert max(map(len, text.splitlines())) <= request_path.WIDTH and sorted(request_path.files_of(text)) == sorted(files)
    assert "  serve/http                connection > app\n" in text and text.startswith("API process: 12 files\n")


NEWEST = (printed_plans.ROOT / "locks" / "newest.txt").read_text(encoding="utf-8")
with_the_newest = pytest.mark.skipif(
    f"transformers=={version('transformers')}\n" not in NEWEST, reason="plans are printed with the newest release"
)


@with_the_newest
@pytest.mark.parametrize("page", printed_plans.PAGES, ids=lambda page: page.name)
def test_a_page_shows_the_plan_that_its_command_prints(page):
    text = page.read_text("utf-8")
    slots = printed_plans.SLOT.findall(text)
    assert slots and printed_plans.filled(text) == text, "run: python tools/printed_plans.py"


@with_the_newest
def test_the_picture_of_the_readme_is_the_one_that_its_command_draws(monkeypatch, tmp_path, capsys):
    shown = draw_load_line.IMAGE.read_text("utf-8")
    monkeypatch.setattr(draw_load_line, "IMAGE", tmp_path / "drawn.svg")
    assert draw_load_line.main() == 0
    assert (tmp_path / "drawn.svg").read_text("utf-8") == shown, "run: python tools/draw_load_line.py"


@pytest.mark.parametrize("page", printed_plans.PAGES, ids=lambda page: page.name)
def test_a_shown_plan_says_how_prompts_steps_and_towers_run(page):
    (shown,) = (slot.group(0) for slot in printed_plans.SLOT.finditer(page.read_text("utf-8")))
    of_model = "towers  " if "vision_tower" in shown else "experts  "
    for line in ("prompt  ", "decode step  ", of_model, "output head  ", "ESTIMATE for"):
        assert f"\n{line}" in shown


def test_a_command_that_prints_something_else_is_found(monkeypatch):
    monkeypatch.setattr(printed_plans, "printed", lambda command: f"the plan of {command}\n")
    text = "a\n<!-- printed:plan -->\n    trimtab plan x\n\n```text\nold\n```\n<!-- /printed -->\nb\n"
    assert printed_plans.filled(text) == text.replace("old", "the plan of plan x")


def test_the_page_has_the_table_of_formats_that_the_records_make():
    assert (text := PAGE.read_text(encoding="utf-8")) == filled(text), "run python tools/which_files.py"


def test_the_page_beside_other_servers_counts_the_architectures_of_gguf():
    count = ("five", "six", "seven", "eight")[len(ARCHITECTURES) - 5]
    assert f"GGUF of {count} architectures" in (PAGE.parent / "beside-other-servers.md").read_text(encoding="utf-8")
