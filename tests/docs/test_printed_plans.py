"""Plans in the docs are what the command beside them prints."""

from importlib.metadata import version

import pytest

from tools import draw_load_line, printed_plans

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
    text = page.read_text("utf-8")
    (shown,) = (slot.group(0) for slot in printed_plans.SLOT.finditer(text))
    of_model = "towers  " if "vision_tower" in shown else "experts  "
    for line in ("prompt  ", "decode step  ", of_model, "output head  ", "ESTIMATE for"):
        assert f"\n{line}" in shown


def test_a_command_that_prints_something_else_is_found(monkeypatch):
    monkeypatch.setattr(printed_plans, "printed", lambda command: f"the plan of {command}\n")
    text = "a\n<!-- printed:plan -->\n    trimtab plan x\n\n```text\nold\n```\n<!-- /printed -->\nb\n"
    assert printed_plans.filled(text) == text.replace("old", "the plan of plan x")
