"""Code in an answer: its colors, in every language that the page knows, while it grows and however long it is."""

from __future__ import annotations

import pytest

from tests.page.reading import answered, expect

pytestmark = pytest.mark.slow

PYTHON = """import os

@cached
def area(width: int) -> float:
    \"\"\"Two
    lines.\"\"\"
    return 2.5 * width  # all of it
"""


def test_code_has_colors_by_class_and_is_copied_whole(opened):
    page = opened(permissions=["clipboard-read", "clipboard-write"])
    answered(page, f"```python\n{PYTHON}```\n", message="Hello")
    code = page.locator(".text pre code")
    expect(code.locator(".code-keyword").first).to_have_text("import")
    assert code.locator(".code-keyword").all_text_contents() == ["import", "def", "return"]
    assert code.locator(".code-name").all_text_contents() == ["area"]
    assert code.locator(".code-type").all_text_contents() == ["int", "float"]
    assert code.locator(".code-number").all_text_contents() == ["2.5"]
    assert code.locator(".code-comment").all_text_contents() == ["# all of it"]
    # A text over two lines is one in both: what a line leaves open, the next one knows.
    assert [text.strip() for text in code.locator(".code-string").all_text_contents()] == ['"""Two', 'lines."""']
    assert code.text_content() == PYTHON.rstrip("\n")
    assert page.locator(".text [style]").count() == 0
    page.get_by_role("button", name="Copy code").click()
    assert page.evaluate("navigator.clipboard.readText()") == PYTHON.rstrip("\n")


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_every_color_can_be_read_on_its_ground(opened, scheme):
    """WCAG's contrast of text, 4.5 to 1, of each style of code."""
    page = opened(color_scheme=scheme)
    ratios = page.evaluate(
        """async () => {
            const {codeOf} = await import("/page/markdown.js");
            const element = codeOf("x", "python");
            document.querySelector("#turns").append(element);
            const light = (color) => {
                const [r, g, b] = color.match(/[\\d.]+/g).slice(0, 3).map(one => one / 255)
                    .map(one => one <= 0.04045 ? one / 12.92 : ((one + 0.055) / 1.055) ** 2.4);
                return 0.2126 * r + 0.7152 * g + 0.0722 * b;
            };
            const ground = light(getComputedStyle(element).backgroundColor), found = {};
            const kinds = "keyword string number comment name type property meta inserted deleted";
            for (const kind of kinds.split(" ")) {
                const word = document.createElement("span");
                word.className = `code-${kind}`;
                element.querySelector("code").append(word);
                const text = light(getComputedStyle(word).color);
                found[kind] = (Math.max(text, ground) + 0.05) / (Math.min(text, ground) + 0.05);
            }
            return found;
        }"""
    )
    assert len(ratios) == 10
    assert {kind: ratio for kind, ratio in ratios.items() if ratio < 4.5} == {}


def test_code_that_grows_is_the_same_element_and_ends_as_if_it_had_come_at_once(opened):
    page = opened()
    found = page.evaluate(
        """async (python) => {
            await import("/page/modes/python.js");
            const {showMarkdown} = await import("/page/markdown.js");
            const text = "Before\\n\\n```python\\n" + python + "```\\n\\nafter";
            const side = document.createElement("div"), whole = document.createElement("div");
            const colored = async () => {
                const {codeOf} = await import("/page/markdown.js");
                const code = codeOf("import x", "python");
                while (!code.querySelector(".code-keyword")) await new Promise(done => setTimeout(done, 5));
            };
            await colored();
            let element = null, isSame = true;
            for (let length = 1; length <= text.length; length += 1) {
                showMarkdown(side, text.slice(0, length));
                const code = side.querySelector("pre");
                if (length > 24) {
                    element ??= code;
                    isSame &&= code === element;
                }
            }
            showMarkdown(whole, text);
            const words = (one) => [...one.querySelectorAll("code span")].filter(span => span.className)
                .map(span => [span.className, span.textContent]);
            return [isSame, JSON.stringify(words(side)) === JSON.stringify(words(whole)), words(side).length > 8,
                side.querySelector("code").textContent === whole.querySelector("code").textContent];
        }""",
        PYTHON,
    )
    assert found == [True, True, True, True]


def test_long_code_comes_in_slices_and_longer_code_has_no_colors(opened):
    page = opened()
    found = page.evaluate(
        """async () => {
            const {codeOf} = await import("/page/markdown.js");
            const line = "const value = 'text'; // words\\n", text = line.repeat(8000);
            const side = document.createElement("div");
            document.body.append(side);
            const until = async (isSo) => { while (!isSo()) await new Promise(done => setTimeout(done, 20)); };
            const first = codeOf("let a;", "js");
            side.append(first);
            await until(() => first.querySelector(".code-keyword"));
            const long = codeOf(text, "js");
            side.append(long);
            const atOnce = long.querySelectorAll(".code-keyword").length;
            await until(() => long.querySelectorAll(".code-keyword").length === 8000);
            const tooLong = codeOf(line.repeat(11000), "js");
            side.append(tooLong);
            await new Promise(done => setTimeout(done, 100));
            const oneLine = codeOf("let a = 1; ".repeat(100), "js");
            side.append(oneLine);
            const same = [[long, text], [tooLong, line.repeat(11000)], [oneLine, "let a = 1; ".repeat(100)]]
                .every(([element, whole]) => element.querySelector("code").textContent === whole.replace(/\\n$/, ""));
            side.remove();
            const colored = (element) => element.querySelectorAll("[class^=code-k]").length;
            return [atOnce < 8000, same, colored(tooLong), colored(oneLine)];
        }"""
    )
    assert found == [True, True, 0, 0]


HOSTILE = (
    "a", " ", "\t", '"', "'", "`", "(", "[[", "{", "<", "<a ", "</", "${", "#{", "/*", "<<", "\\", "_", "1_", "$", "@", "=",
    ":", "- ", "a<b<", "é",
)  # fmt: skip


def test_every_language_shows_the_whole_text_whatever_it_is(opened):
    page = opened()
    wrong = page.evaluate(
        """async (seeds) => {
            const source = await (await fetch("/page/code.js")).text();
            const names = [...source.matchAll(/^  \\["[a-z-]+", "\\w+", "([^" ]+)/gm)].map(one => one[1]);
            const {codeOf} = await import("/page/markdown.js");
            const wrong = names.length > 30 ? [] : ["no languages"];
            const side = document.createElement("div");
            document.body.append(side);
            for (const name of names) {
                const text = seeds.map(seed => seed.repeat(100).slice(0, 110)).join("\\n") + "\\n\\n" + seeds.join("");
                const code = codeOf(text, name);
                side.replaceChildren(code);
                for (let wait = 0; wait < 200 && !code.querySelector("code [class]"); wait += 1) {
                    await new Promise(done => setTimeout(done, 10));
                }
                if (code.querySelector("code").textContent !== text) wrong.push(name);
                if (!code.querySelector("code span[class]")) wrong.push(`${name}: no colors`);
            }
            return wrong;
        }""",
        list(HOSTILE),
    )
    assert wrong == []


def test_code_in_an_unknown_language_is_plain(opened):
    page = opened()
    answered(page, "```klingon\nimport x\n```\n\n```\nimport y\n```\n", message="Hello")
    assert page.locator(".text pre code").all_text_contents() == ["import x", "import y"]
    assert page.locator(".text pre code [class]").count() == 0
