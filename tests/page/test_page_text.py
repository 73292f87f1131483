"""Code and TeX of an answer, in a browser: as they were written, copied whole; money and variables stay Markdown."""

import time

import pytest

from tests.page.reading import answered, answers, ask, expect, stand_in

pytestmark = pytest.mark.slow

MOST_S = 60  # of a hostile answer, on a busy machine
# Between the delimiters stands what Markdown would take: stars, underscores, backslashes, a link, lines like a list or a title.
WRITTEN = (
    r"$a*b*c + x_{i}_y_$", r"$\{x \mid x > 0\}$", r"\( e^{i\pi} = -1 \\ \)", r"\[ [a](https://a.example) \]",
    r"$$x = \frac{-b \pm \sqrt{b^2-4ac}}{2a}$$",
    "$$\n\\begin{aligned}\na &= b \\\\\n  + c &= d\n\n- e\n\\end{aligned}\n$$",
    "\\[\nx\n===\n# y\n\\]",
)  # fmt: skip
AROUND = r"""It costs **$5** and **$10**.

From *US$5* to *A$6*, or $5-$10

Set *$PATH*:$HOME and ${A}/${B}

Escaped \$x\$ and `$y$` and *$5* `a$`

A *tip* of $5 on $x_1$

1. In a list:
   $$
   \sum_{i=1}^{n} i
   - 1
   $$
2. and the $n$th

Half of one \( *a*
"""
LARGE = {
    "braces": "$" + "{" * 500_000 + "}" * 500_000 + "$", "dollars": "$a " * 100_000, "brackets": "\\(" * 100_000,
    "blocks": "$$\n" * 20_000, "open blocks": "\\[\n" * 20_000, "many": " ".join(f"$x_{{{at}}}$" for at in range(20_000)),
}  # fmt: skip


def shown(page):
    return page.locator(".answer .tex").all_text_contents()


def test_tex_is_shown_as_it_was_written(opened):
    page = opened()
    answered(page, "Here:\n\n" + "\n\n".join(WRITTEN) + "\n\nand $a_1*b*$ in a *line*")
    assert shown(page) == [*WRITTEN, "$a_1*b*$"] and page.locator(".answer .tex *").count() == 0
    text = page.locator(".answer .text")
    assert text.locator("li, h1, h2, h3, h4, a, math").count() == 0
    assert text.locator("em").all_inner_texts() == ["line"]
    # Its lines are lines on the page too.
    assert text.inner_text().count("\\begin{aligned}\na &= b \\\\\n  + c &= d\n\n- e\n\\end{aligned}\n$$") == 1


def test_what_is_around_tex_is_markdown(opened):
    page = opened()
    answered(page, AROUND)
    assert shown(page) == ["$x_1$", "$$\n\\sum_{i=1}^{n} i\n- 1\n$$", "$n$"]
    text = page.locator(".answer .text")
    assert text.locator("strong").all_inner_texts() == ["$5", "$10"]
    assert text.locator("em").all_inner_texts() == ["US$5", "A$6", "$PATH", "$5", "tip", "a"]
    assert text.locator("code").all_inner_texts() == ["$y$", "a$"]
    assert text.locator("ol > li").count() == 2 and text.locator("ul").count() == 0


def test_a_hostile_answer_leaves_the_page_alive(opened):
    page = opened()
    answered(page, "Before $y$", message="First")
    for name, written in LARGE.items():
        start = time.monotonic()
        page.evaluate(
            """text => import("/page/markdown.js").then(
                ({showMarkdown}) => showMarkdown(document.querySelector(".answer .text"), text))""",
            written + "\n\nThe end",
        )
        expect(page.locator(".answer .text .block").last).to_have_text("The end", timeout=MOST_S * 1000)
        assert time.monotonic() - start < MOST_S, name
    page.fill("#question", "still here")


def test_long_tex_stays_within_a_phone(opened):
    page = opened(viewport={"width": 320, "height": 640}, has_touch=True, is_mobile=True)
    wide = "+".join(f"a_{{{at}}}x^{{{at}}}" for at in range(20))
    answered(page, f"$${wide}$$\n\nand ${wide}$ in the text")
    assert len(shown(page)) == 2 and page.evaluate("document.documentElement.scrollWidth <= window.innerWidth")
    assert page.evaluate("(box => box.scrollWidth <= box.clientWidth)(document.querySelector('#scroller'))")


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
