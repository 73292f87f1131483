"""Formulas of an answer, in a real browser: what is one, what is money, and what a model cannot make of TeX."""

from __future__ import annotations

import time

import pytest

from tests.page.reading import answered, answers, ask, expect, stand_in

pytestmark = pytest.mark.slow

MOST_S = 60  # of a hostile answer, on a busy machine
TEXT = r"""For $ax^2+bx+c=0$ the roots are

$$x = \frac{-b \pm \sqrt{b^2-4ac}}{2a}$$

and \( e^{i\pi} = -1 \) in the same line.

\[
\begin{aligned}
a &= b \\
+ c &= d
\end{aligned}
\]

1. In a list:
   $$
   \sum_{i=1}^{n} i
   - 1
   $$
2. a matrix $\begin{pmatrix} 1 & 2 \\ 3 & 4 \end{pmatrix}$ and the $n$th
"""
MONEY = r"""It costs $5 and $10.

From US$5 to A$6, or $5-$10

Set $PATH:$HOME and ${A}/${B}

Escaped \$x\$ and `$y$` and $5 `a$`

A tip of $5 on $x$

The code `$` and then $y$

Alone $$ and $ signs

\begin{align} a \end{align}
"""
HOSTILE = (
    r"\href{javascript:alert(1)}{x}", r"\href{https://evil.example/}{x}", r"\url{https://evil.example/}",
    r"\includegraphics{https://evil.example/a.png}", r"\htmlClass{composer}{x}", r"\htmlId{send}{x}",
    r"\htmlStyle{position:fixed}{x}", r"\htmlData{held=edit}{x}", r"\class{composer}{x}",
    r"\id{send}{x}", r"\style{position:fixed}{x}", r"\data{held=edit}{x}",
    r"\text{<img src=https://evil.example/a.png onerror=alert(1)>}", r"\verb|<script>alert(1)</script>|",
    r"\textcolor{red;background:url(https://evil.example/)}{x}", r"\label{send} x \tag{1}", r"\ref{send}", r"\def\a{\a\a}\a",
    r"\newcommand{\a}{xx}\a", r"\rule{99999999em}{99999999em}\kern 99999999em x",
)  # fmt: skip


LARGE = {
    "a megabyte of braces": "$" + "{" * 500_000 + "}" * 500_000 + "$",
    "braces": "$" + "{" * 1900 + "}" * 1900 + "$",
    "roots": "$$\n" + "\\sqrt{" * 600 + "x" + "}" * 600 + "\n$$",
    "a table": "$\\begin{matrix}" + "&" * 1900 + "\\\\" * 900 + "\\end{matrix}$",
    "dollars": "$a " * 100_000,
    "brackets": "\\(" * 100_000,
    "blocks": "$$\n" * 20_000,
    "chemistry": ("$\\ce{" + "H2O + " * 600 + "}$ ") * 60,
    "many": " ".join(f"$x_{{{at}}}$" for at in range(20_000)),
}  # fmt: skip
MOST_FORMULAS, MOST_NODES = 1000, 300_000  # of one answer: 15 formulas of 4,000 letters, and what each of them becomes


def formulas(page):
    found = page.locator(".answer .formula")
    expect(page.locator(".answer .formula:not(.is-text):not(:has(math))")).to_have_count(0)
    return found


def test_formulas_in_every_form_are_shown(opened):
    page = opened()
    answered(page, TEXT)
    found = formulas(page)
    expect(found).to_have_count(7)
    assert page.locator(".formula.is-text").count() == 0
    assert page.locator(".formula.is-display").count() == 3
    assert [one["tex"] for one in found.evaluate_all("all => all.map((one) => ({...one.dataset}))")][:3] == [
        "ax^2+bx+c=0", r"x = \frac{-b \pm \sqrt{b^2-4ac}}{2a}", r"e^{i\pi} = -1",
    ]  # fmt: skip
    assert found.nth(1).locator("mfrac msqrt").count() == 1
    assert found.nth(3).locator("mtr").count() == 2
    # A line of a formula that begins with a sign is no list, and the list around it goes on.
    assert page.locator(".answer ol > li").count() == 2
    assert page.locator(".answer ul").count() == 0
    assert found.nth(5).locator("mtd").count() == 4


def test_money_and_variables_stay_text(opened):
    page = opened()
    answered(page, MONEY)
    expect(page.locator(".formula math")).to_have_count(2)
    found = page.locator(".answer .text .block")
    shown = found.evaluate_all(
        "all => all.map((one) => [...one.querySelectorAll('.formula')].map(({dataset}) => dataset.tex))"
    )
    assert shown == [[], [], [], [], ["x"], ["y"], [], []]
    assert found.nth(0).inner_text() == "It costs $5 and $10."


def test_what_is_no_formula_is_shown_as_it_was_written(opened):
    page = opened()
    answered(page, r"Half of one $\frac{1$ and $\nosuchthing$ stay, $x$ does not")
    expect(page.locator(".formula math")).to_have_count(1)
    assert page.locator(".formula.is-text").all_inner_texts() == [r"$\frac{1$", r"$\nosuchthing$"]


def test_tex_becomes_no_markup_and_loads_nothing(opened):
    page = opened()
    asked = []
    page.on("request", lambda request: asked.append(request.url))
    answered(page, "\n\n".join(f"${tex}$" for tex in HOSTILE) + "\n\nAnd $x$ at the end")
    expect(page.locator(".formula math").last).to_be_visible()
    own = page.url.split("/")[2]
    assert any(url.endswith("/page/temml.js") for url in asked)
    assert [url for url in asked if url.split("/")[2] != own] == []
    assert page.evaluate(
        """() => [...document.querySelectorAll(".answer .formula *")].filter((one) =>
            one.namespaceURI !== "http://www.w3.org/1998/Math/MathML" || one.id
            || one.matches("[href], [src], [data-held], .composer") || [...one.attributes].some(({ name }) => name.startsWith("on"))
            || getComputedStyle(one).position === "fixed"
        ).map((one) => one.outerHTML)"""
    ) == []  # fmt: skip
    assert page.locator(".formula.is-text").count() >= 14
    # A rule that is said to be wider than all screens is not.
    assert page.evaluate("document.documentElement.scrollWidth <= window.innerWidth")


def test_a_hostile_answer_leaves_the_page_alive(opened):
    page = opened()
    answered(page, "Before $y$", message="First")
    expect(page.locator(".formula math")).to_have_count(1)
    for name, text in LARGE.items():
        start = time.monotonic()
        page.evaluate(
            """text => import("/page/markdown.js").then(
                ({showMarkdown}) => showMarkdown(document.querySelector(".answer .text"), text))""",
            text + "\n\nThe end",
        )
        expect(page.locator(".answer .text .block").last).to_have_text("The end", timeout=MOST_S * 1000)
        assert time.monotonic() - start < MOST_S, name
        count, nodes = page.evaluate(
            "['math', 'math *'].map((one) => document.querySelectorAll('.answer ' + one).length)"
        )
        assert count <= MOST_FORMULAS, name
        assert nodes <= MOST_NODES, name
    page.fill("#question", "still here")


def test_a_growing_answer_makes_each_formula_once(opened):
    page = opened()
    answered(page, "Before $y$")
    expect(page.locator(".formula math")).to_have_count(1)
    assert page.evaluate(
        """async () => {
            const { default: temml } = await import("/page/temml.js"), { showMarkdown } = await import("/page/markdown.js");
            const real = temml.__renderToMathMLTree, made = [], element = document.querySelector(".answer .text");
            temml.__renderToMathMLTree = (tex, options) => (made.push(tex), real(tex, options));
            for (const words of ["", " and", " and so", " and so $b$", " and so $b$ on"])
                showMarkdown(element, `With $a$ here${words}`);
            temml.__renderToMathMLTree = real;
            return made;
        }"""
    ) == ["a", "b"]  # fmt: skip


def test_formulas_are_compared_as_a_whole(opened):
    page = opened()
    stand_in(page, "So $a+b$ it is", "So $a+c$ it is")
    page.click("#beside")
    page.select_option("#voice-b", "gemma-demo:style")
    ask(page, "A message")
    answers(page, 2)
    expect(page.locator(".formula math")).to_have_count(2)
    assert page.locator("mark.differs").evaluate_all(
        "all => all.map((one) => one.querySelector('.formula')?.dataset.tex)"
    ) == ["a+b", "a+c"]
    assert page.locator("math mark").count() == 0


def test_a_wide_formula_stays_within_a_phone(opened):
    page = opened(viewport={"width": 320, "height": 640}, has_touch=True, is_mobile=True)
    wide = " + ".join(f"a_{{{at}}} x^{{{at}}}" for at in range(20))
    answered(page, f"$${wide}$$\n\nand ${wide}$ in the text")
    expect(page.locator(".formula math")).to_have_count(2)
    assert page.evaluate("document.documentElement.scrollWidth <= window.innerWidth")
    assert page.evaluate("(box => box.scrollWidth <= box.clientWidth)(document.querySelector('#scroller'))")
