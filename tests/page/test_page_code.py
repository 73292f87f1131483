"""Code in an answer: a block of its own in one width, as it was written, copied whole, also while it grows."""

import pytest

from tests.page.reading import answered, answers, ask, expect, stand_in

pytestmark = pytest.mark.slow

PYTHON = """import os

@cached
def area(width: int) -> float:
    \"\"\"Two
    lines <b>bold</b> of $x*y*$.\"\"\"
    return 2.5 * width  # all of it
"""


def test_code_is_plain_text_of_one_width_and_is_copied_whole(opened):
    page = opened(permissions=["clipboard-read", "clipboard-write"])
    asked = []
    page.on("request", lambda request: asked.append(request.url))
    answered(page, f"```python\n{PYTHON}```\n\n```\nimport y\n```\n\n    indented\n", message="Hello")
    code = page.locator(".text pre code")
    assert code.all_text_contents() == [PYTHON.rstrip("\n"), "import y", "indented"]
    assert page.locator(".code-head > span").all_inner_texts() == ["python", "text", "text"]
    assert code.locator("*").count() == 0
    assert "mono" in code.first.evaluate("one => getComputedStyle(one).fontFamily").lower()
    assert code.first.evaluate("one => getComputedStyle(one).whiteSpaceCollapse") == "preserve"
    # Nothing is fetched to show it.
    assert [url for url in asked if not url.endswith(("/api/status", "/v1/chat/completions"))] == []
    page.get_by_role("button", name="Copy code").first.click()
    assert page.evaluate("navigator.clipboard.readText()") == PYTHON.rstrip("\n")


def test_code_with_marked_words_is_copied_whole(opened):
    page = opened(permissions=["clipboard-read", "clipboard-write"])
    stand_in(page, "```\nfirst = a + 1\n```", "```\nsecond = a + 2\n```")
    page.click("#beside")
    page.select_option("#voice-b", "gemma-demo:style")
    ask(page, "A message")
    answers(page, 2)
    expect(page.locator("mark.differs")).to_have_text(["first", "1", "second", "2"])
    for place, expected in enumerate(("first = a + 1", "second = a + 2")):
        page.get_by_role("button", name="Copy code").nth(place).click()
        assert page.evaluate("navigator.clipboard.readText()") == expected
    page.get_by_role("button", name="Mark differences").click()
    expect(page.locator("mark.differs")).to_have_count(0)
    page.get_by_role("button", name="Copy code").first.click()
    assert page.evaluate("navigator.clipboard.readText()") == "first = a + 1"


def test_code_that_grows_keeps_what_is_selected(opened):
    page = opened()
    found = page.evaluate(
        """async (python) => {
            const {showMarkdown} = await import("/page/markdown.js");
            const text = "Before\\n\\n```python\\n" + python + "```\\n\\nafter";
            const side = document.createElement("div"), whole = document.createElement("div");
            document.querySelector("#turns").append(side);
            let element = null, isSame = true;
            for (let length = 1; length <= text.length; length += 1) {
                showMarkdown(side, text.slice(0, length));
                const code = side.querySelector("pre code");
                if (length === 40) {
                    element = code;
                    getSelection().setBaseAndExtent(code.firstChild, 0, code.firstChild, 6);
                }
                if (length >= 40) isSame &&= code === element && getSelection().toString() === "import";
            }
            showMarkdown(whole, text);
            return [isSame, side.isEqualNode(whole), side.querySelector("code").textContent + "\\n" === python];
        }""",
        PYTHON,
    )
    assert found == [True, True, True]


def test_code_that_changes_is_shown_anew(opened):
    page = opened()
    found = page.evaluate(
        """async () => {
            const {codeOf} = await import("/page/markdown.js");
            const element = codeOf("", "json"), code = element.querySelector("code"), found = [code.textContent];
            for (const text of ["{", '{"a": 1}', '{\\n  "a": 1\\n}', "", "b\\n\\n"]) {
                element.growCode(text);
                found.push(code.textContent);
            }
            return found;
        }"""
    )
    assert found == ["", "{", '{"a": 1}', '{\n  "a": 1\n}', "", "b\n"]
