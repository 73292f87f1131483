"""The page for everybody: keys, themes, the keyboard alone, those who hear it, every size of a screen."""

import pytest

from tests.page import serving
from tests.page.reading import ADMIN_KEY, KEY, answers, ask, expect, question, stand_in

pytestmark = pytest.mark.slow


# Key and theme --------------------------------------------------------------------------------------------------------


def test_the_key_is_asked_for_once_and_kept_in_the_tab(opened):
    page = opened(key=None, wait=False)
    expect(page.locator("#key-dialog")).to_be_visible()
    expect(page.locator("#key")).to_be_focused()
    page.keyboard.press("Escape")
    page.fill("#key", "wrong")
    page.keyboard.press("Enter")
    expect(page.locator("#key-error")).to_contain_text("not accepted")
    page.fill("#key", KEY)
    page.keyboard.press("Enter")
    expect(page.locator("#key-dialog")).to_be_hidden()
    expect(page.locator("#state-text")).to_have_text("ready")
    page.reload()
    expect(page.locator("#state-text")).to_have_text("ready")
    kept = page.evaluate("[...Object.values(localStorage), document.cookie]")
    assert not [text for text in kept if KEY in text] and KEY not in page.url


def test_what_needs_the_admins_key_asks_for_it_once(opened):
    page = opened()
    page.fill("#adapter-name", "other")
    page.fill("#adapter-path", "nowhere")
    page.click("#load-adapter-send")
    expect(page.locator("#key-error")).to_contain_text("admin key")
    page.fill("#key", ADMIN_KEY)
    page.keyboard.press("Enter")
    expect(page.locator("#adapters-error")).to_contain_text("is not a folder below the server's adapter folder")


def test_the_key_can_be_changed_or_left_as_it_is(opened):
    page = opened()
    page.click("#key-change")
    page.click("#key-cancel")
    expect(page.locator("#key-dialog")).to_be_hidden()
    page.click("#key-change")
    page.keyboard.press("Escape")
    expect(page.locator("#key-dialog")).to_be_hidden()
    expect(page.locator("#state-text")).to_have_text("ready")


def test_a_key_that_is_no_longer_good_is_asked_for_again(opened):
    page = opened(key="old", wait=False)
    expect(page.locator("#key-error")).to_contain_text("not accepted")


def test_the_theme_follows_the_system_until_one_is_chosen(opened):
    page = opened(color_scheme="dark")
    paper = "getComputedStyle(document.body).backgroundColor"
    dark = page.evaluate(paper)
    page.emulate_media(color_scheme="light")
    assert page.evaluate(paper) != dark
    page.click("#theme")
    page.click("#theme")
    expect(page.locator("#theme-text")).to_have_text("Theme: dark")
    assert page.evaluate(paper) == dark
    page.reload()
    assert page.evaluate(paper) == dark
    expect(page.locator("#theme-text")).to_have_text("Theme: dark")


# For everybody --------------------------------------------------------------------------------------------------------


def test_everything_can_be_done_with_keys_alone(opened):
    page, asked = opened(), question("text")
    page.keyboard.press("Tab")
    expect(page.locator(".skip")).to_be_focused()
    page.keyboard.press("Enter")
    expect(page.locator("#question")).to_be_focused()
    page.keyboard.type(asked["prompt"])
    page.keyboard.press("Shift+Enter")
    page.keyboard.press("Backspace")
    for expected in ("attach", "record", "voice-a"):
        page.keyboard.press("Tab")
        assert page.evaluate("document.activeElement.id") == expected
    page.keyboard.type("style")
    expect(page.locator("#voice-a")).to_have_value("gemma-demo:style")
    page.keyboard.press("Tab")
    page.keyboard.press("Space")
    expect(page.locator("#voice-b")).to_be_visible()
    page.keyboard.press("Space")
    for _ in range(2):
        page.keyboard.press("Tab")
    expect(page.locator("#send")).to_be_focused()
    assert page.evaluate("getComputedStyle(document.activeElement).outlineStyle") == "solid"
    page.keyboard.press("Enter")
    assert answers(page) == [asked["answers"]["style"]]
    expect(page.locator("#question")).to_be_focused()
    # What has been said is edited from here, and dialogs give the focus back.
    page.keyboard.press("ArrowUp")
    expect(page.locator(".edited")).to_be_focused()
    page.keyboard.press("Escape")
    expect(page.get_by_role("button", name="Edit this message")).to_be_focused()
    page.locator("#options-open").focus()
    page.keyboard.press("Enter")
    expect(page.locator("#options-dialog")).to_be_visible()
    page.keyboard.press("Escape")
    expect(page.locator("#options-open")).to_be_focused()
    page.keyboard.press("Control+Shift+O")
    expect(page.locator("#welcome")).to_be_visible()


def test_what_may_not_be_there_is_not_shown_before_it_is_known(opened):
    page = opened(wait=False, java_script_enabled=False)
    shown = page.locator(":is(#search-field, #load-adapter, #adapters-closed, #key-change, #model-many, #mix):not([hidden])")
    expect(shown).to_have_count(0)


def test_the_focus_order_is_the_order_of_the_page_and_nothing_is_trapped(opened):
    page = opened()
    expected = page.evaluate(
        """[...document.querySelectorAll("a[href], button, input, select, textarea, summary, [tabindex='0']")]
        .filter(one => !one.disabled && one.checkVisibility()).length"""
    )
    places = []
    for _ in range(expected):
        page.keyboard.press("Tab")
        places.append(page.evaluate("[...document.querySelectorAll('*')].indexOf(document.activeElement)"))
    assert places == sorted(places) and len(set(places)) == expected


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_every_control_has_a_name_for_those_who_hear_the_page(opened, scheme):
    page = opened(color_scheme=scheme)
    page.set_input_files("#file", str(serving.DEMO / question("image")["image"]))
    page.click("#beside")
    tree = page.context.new_cdp_session(page).send("Accessibility.getFullAXTree")["nodes"]
    roles = {
        "button", "link", "textbox", "combobox", "checkbox", "spinbutton", "progressbar", "table", "log", "image",
        "listbox", "DisclosureTriangle", "dialog",
    }  # fmt: skip
    found = [node for node in tree if not node["ignored"] and node.get("role", {}).get("value") in roles]
    nameless = [node["role"]["value"] for node in found if not node.get("name", {}).get("value", "").strip()]
    assert nameless == []
    assert len(found) > 25


CONTRASTS = """() => {
    const light = ([r, g, b]) => {
        const parts = [r, g, b].map(value => (value /= 255) <= 0.03928 ? value / 12.92 : ((value + 0.055) / 1.055) ** 2.4);
        return 0.2126 * parts[0] + 0.7152 * parts[1] + 0.0722 * parts[2];
    };
    const canvas = document.createElement("canvas").getContext("2d", {willReadFrequently: true});
    const rgba = color => {
        canvas.clearRect(0, 0, 1, 1);
        canvas.fillStyle = color;
        canvas.fillRect(0, 0, 1, 1);
        return [...canvas.getImageData(0, 0, 1, 1).data];
    };
    const ground = one => {
        for (let at = one; at; at = at.parentElement) {
            const found = rgba(getComputedStyle(at).backgroundColor);
            if (found[3] === 255) return found;
        }
        return [255, 255, 255, 255];
    };
    const found = [];
    const walk = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
    while (walk.nextNode()) {
        const one = walk.currentNode.parentElement;
        if (!walk.currentNode.textContent.trim() || !one.checkVisibility() || one.closest("title")) continue;
        const style = getComputedStyle(one), isDrawn = one instanceof SVGElement;
        const ink = light(rgba(isDrawn ? style.fill : style.color));
        const plate = isDrawn ? rgba(getComputedStyle(one.previousElementSibling).fill) : ground(one);
        const paper = light(plate);
        const words = walk.currentNode.textContent.trim();
        found.push([(Math.max(ink, paper) + 0.05) / (Math.min(ink, paper) + 0.05), one.tagName, words]);
    }
    return found;
}"""


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_every_text_stands_out_from_its_ground(opened, scheme):
    page = opened(color_scheme=scheme)
    page.evaluate("document.querySelectorAll('#loading, #trouble, .error').forEach(one => { one.hidden = false; })")
    page.evaluate("document.querySelectorAll('#trouble, .error').forEach(one => { one.textContent = 'wrong'; })")
    page.evaluate("document.querySelectorAll('dialog').forEach(one => one.show())")
    page.wait_for_timeout(1500)
    found = page.evaluate(CONTRASTS)
    # 4.5 is what WCAG 2.2 asks of text of this size (1.4.3, AA).
    assert [one for one in found if one[0] < 4.5] == [] and len(found) > 60


WIDE = f"A long word: {'abcdefghij' * 30}\n\n```py\n{'x = 1; ' * 60}\n```\n\n|a|b|\n|-|-|\n|{'c' * 90}|d|"


@pytest.mark.parametrize("width", [320, 390, 768, 1024, 1366, 1600])
def test_nothing_is_cut_off_at_any_width(opened, width):
    page = opened(viewport={"width": width, "height": 740})
    stand_in(
        page, "A long word: " + "abcdefghij" * 30 + "\n\n```py\n" + "x = 1; " * 60 + "\n```\n\n|a|b|\n|-|-|\n|" + "c" * 90 + "|d|"
    )
    ask(page, "w" * 200)
    answers(page)
    page.click("#beside")
    page.set_input_files("#file", str(serving.DEMO / question("audio")["audio"]))
    expect(page.locator("#attached li")).to_have_count(1)
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    outside = page.evaluate(
        """width => [...document.querySelectorAll("button, input, select, textarea, summary, h2, h3, p, svg, audio")]
        .filter(one => one.checkVisibility() && !one.closest(".patterns, .scroll, .skip") && !one.classList.contains("unseen"))
        .filter(one => { const box = one.getBoundingClientRect(); return box.left < 0 || box.right > width + 0.5; })
        .map(one => one.id || one.tagName)""",
        width,
    )
    assert outside == []


def test_a_question_can_be_asked_on_a_small_screen(opened):
    page = opened(viewport={"width": 360, "height": 640}, has_touch=True, is_mobile=True)
    asked = question("text")
    page.fill("#question", asked["prompt"])
    page.tap("#send")
    assert answers(page) == [asked["answers"]["base"]]


def test_nothing_moves_for_those_who_asked_for_that(opened):
    page = opened(reduced_motion="reduce")
    page.locator("#state-mark").evaluate("mark => { mark.dataset.state = 'loading'; }")
    assert page.locator("#state-mark").evaluate("mark => getComputedStyle(mark).animationName") == "none"


def test_the_page_asks_nobody_but_its_server(opened, url):
    asked = []
    page = opened(before=lambda page: page.on("request", lambda request: asked.append(request.url)))
    ask(page, question("text")["prompt"])
    answers(page)
    assert asked and {one for one in asked if not one.startswith((url, "blob:"))} == set()
