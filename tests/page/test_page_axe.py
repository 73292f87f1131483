"""Every state of the page, looked through by axe-core, which knows the rules of WCAG and the usual mistakes.

axe-core comes from npm, for the tests alone: `make test-page` puts it where AXE says.
"""

import os
from functools import partial
from pathlib import Path

import pytest

from tests.page import serving
from tests.page.reading import ADMIN_KEY, answered, answers, ask, expect, faked, question, set_options, stand_in

pytestmark = pytest.mark.slow

AXE = Path(os.environ.get("TRIMTAB_AXE") or serving.ROOT / ".npm-page/node_modules/axe-core/axe.min.js")
if not AXE.is_file():
    pytest.skip(f"no axe-core at {AXE}: npm install --prefix .npm-page axe-core", allow_module_level=True)

TEXT = """# Title

Some **bold** [link](https://good.example) and `code`, ![image](https://good.example/a.png).

### Deeper

1. one
   - two

| a | b |
|---|--:|
| 1 | 2 |

```python
print("a long line", "a long line", "a long line", "a long line", "a long line", "a long line", "a long line")
```

> quoted

A formula $x^2$, and $\\frac{1$ that is none:

$$\\int_0^1 x\\,dx$$
"""


def empty(page):
    expect(page.locator("#welcome")).to_be_visible()


def conversation(page):
    stand_in(page, TEXT, "An answer with other words.", "A third one.")
    page.click("#beside")
    page.select_option("#voice-b", "gemma-demo:style")
    ask(page, "A message", media=question("image")["image"])
    answers(page, 2)
    page.set_input_files("#file", str(serving.DEMO / question("audio")["audio"]))
    expect(page.locator("#attached li")).to_have_count(1)
    page.get_by_role("button", name="Regenerate").first.click()
    expect(page.locator(".versions")).to_be_visible()


def chances(page):
    set_options(page, chances=True)
    answered(page, "The quick brown fox", chances=[0.99, 0.6, 0.3, 0.05], finish="length")
    page.get_by_role("button", name="Token probabilities").click()
    page.locator(".token").nth(1).focus()
    expect(page.locator("#chance")).to_be_visible()


def editing(page, button="Edit this message", shown=".edited"):
    answered(page, TEXT)
    page.get_by_role("button", name=button).click()
    expect(page.locator(shown)).to_be_visible()


def enlarged(page):
    answered(page, TEXT, media=question("image")["image"])
    page.locator(".asked .image").click()
    expect(page.locator("#image-large")).to_be_visible()


def memory(page):
    page.click("#memory")
    expect(page.locator("#bars svg").first).to_be_visible()
    page.locator("#numbers summary").click()


def options(page):
    page.click("#options-open")


def unloading(page):
    page.evaluate("import('/page/sure.js').then(({sure}) => { sure('Unload style?', 'Requests that name it fail.', 'Unload'); })")
    expect(page.locator("#sure")).to_be_visible()


def refused(page):
    page.fill("#adapter-name", "other")
    page.fill("#adapter-path", "nowhere")
    page.click("#load-adapter-send")
    expect(page.locator("#adapters-error")).to_be_visible()


def renaming(page):
    stand_in(page, "An answer.")
    page.set_input_files("#file", str(serving.DEMO / "prompts.jsonl"))
    expect(page.locator("#attached li")).to_have_count(1)
    ask(page, "A text file")
    answers(page)
    page.locator(".file summary").click()
    page.get_by_role("button", name="Rename A text file").click()
    expect(page.locator(".title-box")).to_be_focused()


EDITING = {"editing_an_answer": ("Edit this answer", ".edited"), "undoing": ("Delete A message", "#undo")}
STATES = {
    state.__name__: state
    for state in (empty, renaming, conversation, chances, editing, enlarged, memory, options, unloading, refused)
} | {name: partial(editing, button=button, shown=shown) for name, (button, shown) in EDITING.items()}


def findings(page):
    page.evaluate(AXE.read_text(encoding="utf-8"))
    found = page.evaluate("axe.run(document, {resultTypes: ['violations', 'incomplete']})")
    assert len(found["passes"]) > 10
    return [(one["id"], node["target"], node["failureSummary"]) for one in found["violations"] for node in one["nodes"]]


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("state", STATES.values(), ids=STATES)
def test_axe_finds_nothing(opened, state, scheme):
    page = opened(key=ADMIN_KEY, color_scheme=scheme, reduced_motion="reduce")
    state(page)
    assert findings(page) == []


@pytest.mark.parametrize("drawer", [None, "chats", "panel"])
def test_axe_finds_nothing_on_a_phone(opened, drawer):
    page = opened(viewport={"width": 390, "height": 844}, has_touch=True, is_mobile=True, reduced_motion="reduce")
    conversation(page)
    if drawer:
        page.tap(f"#{drawer}-open")
    assert findings(page) == []


def test_axe_finds_nothing_while_a_model_loads_or_has_failed(opened):
    now = {"state": "loading", "loading": [1, 4], "plan": None, "numbers": {}}
    page = opened(before=faked(lambda status: status["models"][0].update(now)), wait=False, reduced_motion="reduce")
    expect(page.locator("#loading")).to_be_visible()
    assert findings(page) == []
    now.update(state="failed", error="cuda:0: out of memory")
    expect(page.locator("#trouble")).to_be_visible()
    assert findings(page) == []


def test_axe_finds_nothing_where_a_key_is_asked_for(opened):
    page = opened(key=None, wait=False, reduced_motion="reduce")
    expect(page.locator("#key-dialog")).to_be_visible()
    assert findings(page) == []


def test_axe_finds_what_is_wrong(opened):
    """What the tests above would say if the page had a button without a name."""
    page = opened(reduced_motion="reduce")
    page.evaluate("['aria-label', 'title'].forEach(name => document.querySelector('#send').removeAttribute(name))")
    assert [rule for rule, _, _ in findings(page)] == ["button-name"]
