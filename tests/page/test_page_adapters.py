"""The page of a server with no adapter, with one, and with twenty: what it offers, and that it writes no "null"."""

import re

import pytest

from tests.page.reading import answered, answers, expect, faked, stand_in

pytestmark = pytest.mark.slow

# The texts that stand in an answer's row of buttons beside them.
LOOSE = "one => [...one.childNodes].filter(({nodeType}) => nodeType === Node.TEXT_NODE).map(({data}) => data)"


def with_adapters(opened, names):
    def change(status):
        (model,) = status["models"]
        model.update(adapters=names, named=names)
        model["numbers"].update(resident=names[:2], kept=names[:1])

    page = opened(before=faked(change))
    expect(page.locator("#adapters li")).to_have_count(max(1, len(names)))
    return page


def nothing_is_written_as_null(page):
    assert re.findall(r"\b(?:null|undefined|NaN)\b|\[object", page.locator("body").text_content()) == []


@pytest.mark.parametrize("count", [0, 1, 20])
def test_the_page_offers_the_adapters_that_there_are(opened, count):
    names = [f"adapter-{at}" for at in range(1, count + 1)]
    page = with_adapters(opened, names)
    expect(page.locator("#welcome-voices button")).to_have_text(["gemma-demo (base)", *names])
    assert page.locator("#voice-a option").all_text_contents() == ["gemma-demo (base)", *names]
    assert page.locator("#adapters .who").all_text_contents() == names
    expect(page.locator("#mix")).to_be_visible(visible=count > 0)
    assert page.locator("#mix-weights input").count() == count
    nothing_is_written_as_null(page)
    answered(page, "An answer.")
    tools = page.locator(".answer .tools")
    assert tools.evaluate(LOOSE) == []
    assert tools.locator("option").all_text_contents() == (["Compare with", *names] if names else [])
    stand_in(page, "Another answer.")
    page.get_by_role("button", name="Regenerate").click()
    expect(page.locator(".answer .text")).to_have_text("Another answer.")
    answers(page)
    assert tools.evaluate(LOOSE) == []
    page.click("#memory")
    nothing_is_written_as_null(page)
    page.click("#load-close")
    for width in (1366, 360):
        page.set_viewport_size({"width": width, "height": 740})
        assert page.evaluate("document.documentElement.scrollWidth <= window.innerWidth")


def test_a_chat_is_shown_before_the_server_has_named_its_adapters(opened):
    page = opened()
    answered(page, "An answer.")
    held = []
    page.route("**/api/status", lambda route: held.append(route))
    page.reload()
    expect(page.locator(".answer .text")).to_have_text("An answer.")
    assert page.locator(".answer .tools").evaluate(LOOSE) == []
    nothing_is_written_as_null(page)
    page.unroute("**/api/status")
    for route in held:
        route.continue_()
    expect(page.locator(".answer .tools option")).to_have_count(4)
