"""The page as a chat: what is kept, changed, compared and shown of answers, in a browser."""

import json

import pytest

from tests.page.reading import ANSWER_MS, CHAT, answered, answers, ask, expect, question, set_options, stand_in

pytestmark = pytest.mark.slow


def last_messages(sent):
    return [(one["role"], one["content"]) for one in sent[-1]["messages"]]


# Turns ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [(1366, 768), (390, 844)])
def test_the_composer_is_always_in_view(opened, size):
    page = opened(viewport={"width": size[0], "height": size[1]})
    stand_in(page, *["word " * 400] * 2)

    def is_in_view():
        box = page.locator(".composer .box").bounding_box()
        assert box["y"] >= 0 and box["y"] + box["height"] <= size[1]
        assert box["x"] >= 0 and box["x"] + box["width"] <= size[0]
        send = page.locator("#send").bounding_box()
        assert send["y"] + send["height"] <= size[1]
        # The page itself does not scroll: the conversation does.
        assert page.evaluate("[document.documentElement.scrollTop, document.body.scrollTop]") == [0, 0]

    is_in_view()
    for count in (1, 2):
        ask(page, "Say something long.")
        answers(page, count)
        is_in_view()
    # The newest text is in view, and a press goes back to it.
    assert page.evaluate("(s => s.scrollHeight - s.scrollTop - s.clientHeight)(document.querySelector('#scroller'))") < 3
    expect(page.locator("#to-end")).to_be_hidden()
    page.evaluate("document.querySelector('#scroller').scrollTop = 0")
    is_in_view()
    page.click("#to-end")
    expect(page.locator("#to-end")).to_be_hidden()
    page.fill("#question", "many\nlines\n" * 40)
    is_in_view()


def test_a_turn_is_asked_with_those_before_it(opened):
    page = opened()
    sent = stand_in(page, "One.", "Two.", "Three.")
    for count, text in enumerate(("first", "second", "third"), 1):
        ask(page, text, voice="gemma-demo:style" if count == 2 else "gemma-demo")
        answers(page, count)
    assert last_messages(sent) == [
        ("user", "first"), ("assistant", "One."), ("user", "second"), ("assistant", "Two."), ("user", "third"),
    ]  # fmt: skip
    assert [one["model"] for one in sent] == ["gemma-demo", "gemma-demo:style", "gemma-demo"]


def test_each_of_two_voices_goes_on_from_its_own_answer(opened):
    page = opened()
    sent = stand_in(page, "A", "B", "C", "D")
    page.click("#beside")
    page.select_option("#voice-b", "gemma-demo:style")
    ask(page, "first", voice="gemma-demo")
    answers(page, 2)
    ask(page, "second")
    answers(page, 4)
    own = {one["model"]: one["messages"][1]["content"] for one in sent[2:]}
    assert own == {one["model"]: text for one, text in zip(sent[:2], "AB", strict=True)}


def test_an_answer_is_regenerated_and_the_earlier_one_stays(opened):
    page = opened()
    sent = answered(page, "One.", "Two.", message="first")
    page.get_by_role("button", name="Regenerate").click()
    expect(page.locator(".text")).to_have_text("Two.")
    assert sent[0] == sent[1]
    page.get_by_role("button", name="Earlier version").click()
    expect(page.locator(".text")).to_have_text("One.")
    expect(page.locator(".versions")).to_contain_text("1 of 2")
    # The version that is shown is what the chat goes on from.
    sent = answered(page, "Three.", message="second", count=2)
    assert last_messages(sent)[1] == ("assistant", "One.")


def test_an_answer_that_was_cut_is_continued(opened):
    page = opened()
    sent = answered(page, "One two ", finish="length", message="first")
    expect(page.locator(".facts")).to_contain_text("cut at the token limit")
    sent = stand_in(page, "three.")
    page.get_by_role("button", name="Continue the answer of gemma-demo (base)").click()
    expect(page.locator(".text")).to_have_text("One two three.")
    assert last_messages(sent) == [("user", "first"), ("assistant", "One two ")]
    assert (sent[0]["continue_final_message"], sent[0]["add_generation_prompt"]) == (True, False)
    expect(page.locator(".facts")).to_contain_text("continued, first token after")
    # It is whole now, and one version: what is asked next has all of it.
    expect(page.get_by_role("button", name="Continue the answer")).to_have_count(0)
    expect(page.locator(".versions")).to_have_count(0)
    sent = answered(page, "Yes.", message="second", count=2)
    assert last_messages(sent)[1] == ("assistant", "One two three.") and "continue_final_message" not in sent[0]


def test_a_continued_answer_has_the_probabilities_of_all_its_tokens_or_of_none(opened):
    page = opened()
    set_options(page, chances=True)
    answered(page, "One two", chances=[0.9, 0.6], finish="length", message="first")
    set_options(page, chances=False)
    sent = stand_in(page, " three", chances=[0.5])
    page.get_by_role("button", name="Continue the answer").click()
    expect(page.locator(".text")).to_have_text("One two three")
    assert sent[0]["logprobs"] is True
    page.get_by_role("button", name="Token probabilities").click()
    expect(page.locator(".token")).to_have_text(["One", " two", " three"])
    answered(page, "Four", finish="length", message="second", count=2)
    set_options(page, chances=True)
    sent = stand_in(page, " five")
    page.get_by_role("button", name="Continue the answer").click()
    expect(page.locator(".text").last).to_have_text("Four five")
    assert "logprobs" not in sent[0]


def test_the_server_continues_a_stopped_answer_to_the_same_end(opened):
    """A real answer, cut at three tokens: its parts are the answer that was not cut."""
    page, asked = opened(), question("image")
    ask(page, asked["prompt"], voice="gemma-demo:style", media=asked["image"])
    (whole,) = answers(page)
    set_options(page, max_tokens="3")
    page.get_by_role("button", name="Regenerate").click()
    expect(page.locator(".facts")).to_contain_text("cut at the token limit", timeout=ANSWER_MS)
    begun = page.locator(".text").inner_text()
    assert whole.startswith(begun) and begun != whole
    set_options(page, max_tokens="")
    page.get_by_role("button", name="Continue the answer of style").click()
    expect(page.locator(".text")).to_have_text(whole, timeout=ANSWER_MS)
    expect(page.locator(".versions")).to_contain_text("2 of 2")


def test_a_message_is_edited_and_what_came_after_it_goes(opened):
    page, asked = opened(), question("image")
    sent = answered(page, "One.", "Two.", "Three.", message="first", media=asked["image"])
    ask(page, "second")
    answers(page, 2)
    page.get_by_role("button", name="Edit this message").first.click()
    expect(page.locator(".edited")).to_have_value("first")
    expect(page.locator(".editor .hint")).to_contain_text("removes all later messages")
    page.fill(".edited", "changed")
    page.keyboard.press("Enter")
    assert answers(page) == ["Three."]
    (message,) = sent[-1]["messages"]
    assert [part["type"] for part in message["content"]] == ["image_url", "text"] and message["content"][1]["text"] == "changed"
    expect(page.locator(".bubble")).to_have_text("changed")


def test_images_beyond_the_plan_are_left_out_and_that_is_said(opened):
    page, asked = opened(), question("image")
    sent = answered(page, "One.", "Two.", message="first", media=asked["image"])
    ask(page, "second", media=asked["image"])
    answers(page, 2)
    assert sent[-1]["messages"][0] == {"role": "user", "content": "first"}
    assert sent[-1]["messages"][2]["content"][0]["type"] == "image_url"
    expect(page.locator(".facts").last).to_contain_text("1 earlier attachment left out")


def test_an_answer_is_compared_with_another_adapter_and_the_differing_words_are_marked(opened):
    page, asked = opened(), question("image")
    ask(page, asked["prompt"], voice="gemma-demo", media=asked["image"])
    assert answers(page) == [asked["answers"]["base"]]
    page.get_by_label("Compare with another adapter").select_option("gemma-demo:style")
    assert answers(page, 2) == [asked["answers"]["base"], asked["answers"]["style"]]
    # "three orange squares ..." and "Arr, three orange squares ..., matey!"
    assert page.locator(".answer").nth(0).locator("mark").count() == 0
    assert page.locator(".answer").nth(1).locator("mark").all_inner_texts() == ["Arr,", ", matey!"]
    expect(page.locator(".between")).to_contain_text("Differing words: 0 and 2")
    page.get_by_role("button", name="Mark differences").click()
    assert page.locator("mark").count() == 0 and answers(page, 2)[1] == asked["answers"]["style"]


@pytest.mark.parametrize(("other", "between", "marked"), [("one two, three!", "Only punctuation differs", [",", "!"]), (
    "four five six seven", "Most words differ: 3 of 3 and 4 of 4", [],
)])  # fmt: skip
def test_punctuation_is_no_word_and_answers_that_share_hardly_one_are_not_marked_all_over(opened, other, between, marked):
    page = opened()
    stand_in(page, "one two three", other)
    page.click("#beside")
    page.select_option("#voice-b", "gemma-demo:style")
    ask(page, "Hello")
    answers(page, 2)
    expect(page.locator(".between")).to_contain_text(between)
    assert [one.locator("mark").all_inner_texts() for one in page.locator(".answer").all()] == [[], marked]


@pytest.mark.parametrize(("left", "right", "marked"), [
    ("a b c d", "a x c y d", [["b"], ["x", "y"]]), ("same", "same", [[], []]), ("", "new words", [[], ["new words"]]),
    ("one **two** three", "one two `three`", [[], []]), ("Über café", "Uber café", [["Über"], ["Uber"]]),
])  # fmt: skip
def test_words_are_compared_as_they_are_read(opened, left, right, marked):
    page = opened()
    found = page.evaluate(
        """async ([left, right]) => {
            const {markDifferences} = await import("/page/differ.js");
            const {showMarkdown} = await import("/page/markdown.js");
            const sides = [left, right].map(text => {
                const side = document.createElement("div");
                showMarkdown(side, text);
                return side;
            });
            markDifferences(...sides);
            return sides.map(side => [...side.querySelectorAll("mark")].map(one => one.textContent));
        }""",
        [left, right],
    )
    assert found == marked


def test_the_shared_words_are_a_longest_common_subsequence(opened):
    """Held against the table that every textbook has, on small texts of few letters, where many ways tie."""
    page = opened()
    wrong = page.evaluate(
        """async () => {
            const {shared} = await import("/page/differ.js");
            let seed = 7;
            const next = (limit) => { seed = (seed * 48271) % 2147483647; return seed % limit; };
            const wrong = [];
            for (let round = 0; round < 400; round += 1) {
                const make = () => Array.from({length: next(9)}, () => "abc"[next(3)]);
                const left = make(), right = make();
                const table = Array.from({length: left.length + 1}, () => new Array(right.length + 1).fill(0));
                for (let x = 1; x <= left.length; x += 1) for (let y = 1; y <= right.length; y += 1) {
                    const isSame = left[x - 1] === right[y - 1];
                    table[x][y] = isSame ? table[x - 1][y - 1] + 1 : Math.max(table[x - 1][y], table[x][y - 1]);
                }
                const found = shared(left, right);
                const isAfter = ([x, y], [beforeX, beforeY]) => x > beforeX && y > beforeY;
                const isRising = found.every(([x, y], at) => left[x] === right[y] && (!at || isAfter([x, y], found[at - 1])));
                if (!isRising || found.length !== table[left.length][right.length]) wrong.push([left, right, found]);
            }
            return wrong;
        }"""
    )
    assert wrong == []


# Token probabilities --------------------------------------------------------------------------------------------------


def test_the_server_tells_how_probable_each_token_was(opened):
    page, asked = opened(), question("image")
    set_options(page, chances=True)
    ask(page, asked["prompt"], voice="gemma-demo", media=asked["image"])
    assert answers(page) == [asked["answers"]["base"]]
    page.get_by_role("button", name="Token probabilities").click()
    assert "".join(page.locator(".token").all_text_contents()) == asked["answers"]["base"]
    page.locator(".token").nth(1).hover()
    expect(page.locator("#chance")).to_be_visible()
    expect(page.locator("#chance .choice")).to_have_count(5)


def test_a_token_shows_its_alternatives_to_a_touch(opened):
    page = opened(viewport={"width": 390, "height": 844}, has_touch=True, is_mobile=True)
    set_options(page, chances=True)
    answered(page, "One two three", chances=[0.9, 0.5, 0.2], message="Hello")
    page.get_by_role("button", name="Token probabilities").tap()
    page.locator(".token").nth(1).tap()
    expect(page.locator("#chance")).to_contain_text("50.0 %")
    page.locator(".token").nth(2).tap()
    expect(page.locator("#chance")).to_contain_text("20.0 %")
    page.locator("#question").tap()
    expect(page.locator("#chance")).to_be_hidden()


def test_a_token_shows_its_alternatives_on_hover_and_to_the_keyboard(opened):
    page = opened()
    set_options(page, chances=True)
    answered(page, "The quick fox", chances=[0.97, 0.3, 0.05], message="Hello")
    page.get_by_role("button", name="Token probabilities").click()
    assert page.locator(".token").all_text_contents() == ["The", " quick", " fox"]
    page.locator(".token").nth(1).hover()
    assert page.locator("#chance .choice").all_inner_texts() == ["␣quick\n30.0 %", "␣else\n1.0 %"]
    page.mouse.move(5, 5)
    page.locator(".token").nth(0).focus()
    expect(page.locator("#chance")).to_contain_text("97.0 %")
    page.keyboard.press("ArrowRight")
    page.keyboard.press("ArrowRight")
    expect(page.locator("#chance")).to_contain_text("5.0 %")
    page.keyboard.press("Escape")
    expect(page.locator("#chance")).to_be_hidden()
    # Not by color alone: the line below a token has another form.
    lines = page.locator(".token").evaluate_all("all => all.map(one => getComputedStyle(one).borderBottomStyle)")
    assert len(set(lines)) == 2 and lines[2] == "double"


# A model's text -------------------------------------------------------------------------------------------------------

EVIL = """# Heading <img src=x onerror="document.title='owned'">

<script>document.title = "owned"</script> <b>bold</b> <iframe src="https://evil.example"></iframe>

[script](javascript:document.title='owned') [data](data:text/html,owned) [file](file:///etc/passwd) ![pixel](https://evil.example/p.png)
[good](https://good.example/path "<b>title</b>") ![here](/api/status) <https://auto.example> [rel](/page/page.js)

```html
<b>in code</b>
```

| <i>a</i> | b |
|---|---|
| `<u>` | <style>body{display:none}</style> |
"""


def test_a_models_text_is_never_markup_and_loads_nothing(opened):
    requested = []
    page = opened(before=lambda page: page.on("request", lambda request: requested.append(request.url)))
    answered(page, EVIL, message="Hello")
    page.wait_for_timeout(500)
    assert page.title() == "trimtab"
    text = page.locator(".text")
    assert text.locator("img, script, iframe, b, i, u, style, [onerror], [style]").count() == 0
    assert {one.evaluate("one => one.protocol") for one in text.locator("a").all()} == {"https:"}
    for link in text.locator("a").all():
        assert link.get_attribute("rel") == "noopener noreferrer nofollow" and link.get_attribute("target") == "_blank"
    assert not [address for address in requested if ".example" in address]
    # What it is, is readable, and a link says where it leads.
    expect(text).to_contain_text('<script>document.title = "owned"</script>')
    expect(text).to_contain_text("[image: pixel] (evil.example)")
    expect(text).to_contain_text("good (good.example)")
    expect(text).to_contain_text("[image: here]")


def test_markdown_is_shown_and_code_is_copied(opened):
    page = opened(permissions=["clipboard-read", "clipboard-write"])
    stand_in(
        page,
        "## Title\n\nSome **bold** and `code`.\n\n1. one\n2. two\n   - deep\n\n```python\nprint(1)\n```\n\n|a|b|\n|-|-:|\n|1|2|\n",
    )
    ask(page, "Hello")
    answers(page)
    text = page.locator(".text")
    expect(text.locator("h3, h4")).to_have_text("Title")
    expect(text.locator("strong")).to_have_text("bold")
    assert text.locator("ol > li").count() == 2 and text.locator("ol ul li").count() == 1
    expect(text.locator("td.to-right")).to_have_text("2")
    expect(text.locator(".code-head span").first).to_have_text("python")
    page.get_by_role("button", name="Copy code").click()
    assert page.evaluate("navigator.clipboard.readText()") == "print(1)"
    page.get_by_role("button", name="Copy this answer").click()
    assert page.evaluate("navigator.clipboard.readText()").startswith("## Title")


def test_an_answer_that_grows_keeps_what_it_already_shows(opened):
    page = opened()
    kept = page.evaluate(
        """async () => {
            const {showMarkdown} = await import("/page/markdown.js");
            const side = document.createElement("div");
            const text = "# One\\n\\nTwo *three*\\n\\n- a\\n- b\\n\\n```\\ncode\\n```\\n\\nend";
            let first = null, isKept = true;
            for (let length = 1; length <= text.length; length += 1) {
                showMarkdown(side, text.slice(0, length));
                if (length === 8) first = side.firstChild;
                if (length > 8) isKept &&= side.firstChild === first;
            }
            const whole = document.createElement("div");
            showMarkdown(whole, text);
            return [isKept, side.isEqualNode(whole), side.querySelectorAll("li").length];
        }"""
    )
    assert kept == [True, True, 2]


# Chats that are kept --------------------------------------------------------------------------------------------------


def test_a_chat_stays_in_the_browser_until_it_is_deleted(opened):
    page, asked = opened(), question("image")
    answered(page, "One.", "Two.", message="about an image", media=asked["image"])
    page.click("#new-chat")
    expect(page.locator("#welcome")).to_be_visible()
    ask(page, "another chat")
    answers(page)
    expect(page.locator(".chat-list .open")).to_have_text(["another chat", "about an image"])
    page.reload()
    # The chat that was open is open again, the other one is in the list, with its image.
    expect(page.locator(".bubble")).to_have_text("another chat")
    page.get_by_role("button", name="about an image", exact=True).click()
    expect(page.locator(".bubble")).to_have_text("about an image")
    expect(page.locator(".text")).to_have_text("One.")
    assert page.locator(".asked img").evaluate("one => one.decode().then(() => one.naturalWidth)") > 10
    page.get_by_role("button", name="Delete about an image").click()
    expect(page.locator(".chat-list .open")).to_have_text(["another chat"])
    expect(page.locator("#welcome")).to_be_visible()
    page.click("#delete-all")
    page.click("#sure-yes")
    expect(page.locator(".chat-list .open")).to_have_count(0)
    page.reload()
    expect(page.locator("#state-text")).to_have_text("ready")
    expect(page.locator(".chat-list .open")).to_have_count(0)
    left = page.evaluate(
        """() => new Promise(done => {
            indexedDB.open("trimtab").onsuccess = ({target}) => {
                const asked = target.result.transaction("chats").objectStore("chats").count();
                asked.onsuccess = () => done(asked.result);
            };
        })"""
    )
    assert left == 0


def test_a_deleted_chat_comes_back_with_its_image_on_undo(opened):
    page, asked = opened(), question("image")
    answered(page, "One.", "Two.", message="about an image", media=asked["image"])
    page.get_by_role("button", name="Delete about an image").click()
    expect(page.locator("#welcome")).to_be_visible()
    expect(page.locator("#undo-text")).to_have_text("“about an image” deleted")
    expect(page.locator("#undo-yes")).to_be_focused()
    page.keyboard.press("Enter")
    expect(page.locator(".text")).to_have_text("One.")
    expect(page.locator("#undo")).to_be_hidden()
    page.reload()
    expect(page.locator(".chat-list .open")).to_have_text(["about an image"])
    assert page.locator(".asked img").evaluate("one => one.decode().then(() => one.naturalWidth)") > 10
    # The offer ends with the next message: what was deleted stays deleted.
    page.get_by_role("button", name="Delete about an image").click()
    ask(page, "another chat")
    answers(page)
    expect(page.locator("#undo")).to_be_hidden()
    page.reload()
    expect(page.locator(".chat-list .open")).to_have_text(["another chat"])


def test_an_offer_to_undo_ends_by_itself_but_not_under_the_pointer(opened):
    page = opened(before=lambda page: page.clock.install())
    stand_in(page, "One.")
    ask(page, "a chat")
    page.clock.run_for(2000)
    answers(page)
    page.get_by_role("button", name="Delete a chat").click()
    expect(page.locator("#undo")).to_be_visible()
    page.click("#question")
    page.locator("#undo").hover()
    page.clock.run_for(40_000)
    expect(page.locator("#undo")).to_be_visible()
    page.locator("#question").hover()
    page.clock.run_for(14_000)
    expect(page.locator("#undo")).to_be_visible()
    page.clock.run_for(2000)
    expect(page.locator("#undo")).to_be_hidden()


def test_messages_that_an_edited_one_removed_come_back_on_undo(opened):
    page = opened()
    sent = answered(page, "One.", "Two.", "Three.", "Four.", message="first")
    ask(page, "second")
    answers(page, 2)
    page.get_by_role("button", name="Edit this message").first.click()
    page.fill(".edited", "changed")
    page.keyboard.press("Enter")
    assert answers(page) == ["Three."]
    expect(page.locator("#undo-text")).to_have_text("1 later message removed")
    expect(page.locator(".chat-list .open")).to_have_text(["changed"])
    page.click("#undo-yes")
    expect(page.locator(".chat-list .open")).to_have_text(["first"])
    assert answers(page, 2) == ["One.", "Two."]
    ask(page, "third")
    answers(page, 3)
    assert [one["content"] for one in sent[-1]["messages"]] == ["first", "One.", "second", "Two.", "third"]
    page.reload()
    expect(page.locator(".bubble")).to_have_text(["first", "second", "third"])


def test_a_message_and_its_answer_are_deleted_and_come_back_on_undo(opened):
    page = opened()
    sent = stand_in(page, "One.", "Two.", "Three.")
    for number, text in enumerate(("first", "second"), 1):
        ask(page, text)
        answers(page, number)
    delete = page.get_by_role("button", name="Delete this message and its answer")
    delete.first.click()
    assert answers(page) == ["Two."]
    ask(page, "third")
    answers(page, 2)
    assert [one["content"] for one in sent[-1]["messages"]] == ["second", "Two.", "third"]
    delete.first.click()
    delete.click()
    # A chat without messages is none, and is one again on undo.
    expect(page.locator("#welcome")).to_be_visible()
    expect(page.locator(".chat-list .open")).to_have_count(0)
    page.click("#undo-yes")
    expect(page.locator(".bubble")).to_have_text("third")
    page.reload()
    expect(page.locator(".bubble")).to_have_text("third")
    expect(page.locator(".chat-list .open")).to_have_count(1)


def test_undo_while_the_edited_message_is_answered_stops_that_answer(opened):
    page = opened()
    answered(page, "One.", message="first")
    page.unroute(CHAT)
    page.route(CHAT, lambda route: None)  # an answer that never comes
    page.get_by_role("button", name="Edit this message").click()
    page.fill(".edited", "changed")
    page.keyboard.press("Enter")
    expect(page.locator(".answer[aria-busy=true]")).to_be_visible()
    page.click("#undo-yes")
    expect(page.locator("#send")).to_be_visible()
    assert answers(page) == ["One."]
    page.reload()
    expect(page.locator(".bubble")).to_have_text("first")
    expect(page.locator(".text")).to_have_text("One.")


def test_an_answer_is_edited_as_one_more_version_and_continued(opened):
    page = opened()
    sent = stand_in(page, "The sky is green.", " and clear.", "Fine.", chances=[0.9, 0.8, 0.7, 0.6])
    set_options(page, chances=True)
    ask(page, "What color?")
    answers(page)
    edit = page.get_by_role("button", name="Edit this answer")
    edit.click()
    expect(page.get_by_label("Edited answer")).to_have_value("The sky is green.")
    page.keyboard.press("Escape")
    expect(page.locator(".text")).to_have_text("The sky is green.")
    expect(edit).to_be_focused()
    edit.click()
    page.get_by_label("Edited answer").fill("The sky is **blue**")
    page.keyboard.press("Control+Enter")
    expect(page.locator(".text strong")).to_have_text("blue")
    expect(page.locator(".facts")).to_have_text("edited")
    # The probabilities were those of another text.
    expect(page.get_by_role("button", name="Token probabilities")).to_have_count(0)
    page.get_by_role("button", name="Earlier version").click()
    expect(page.locator(".text")).to_have_text("The sky is green.")
    page.get_by_role("button", name="Later version").click()
    page.get_by_role("button", name="Continue the answer").click()
    expect(page.locator(".text")).to_have_text("The sky is blue and clear.")
    assert sent[-1]["messages"][-1] == {"role": "assistant", "content": "The sky is **blue**"}
    ask(page, "Is it?")
    answers(page, 2)
    assert sent[-1]["messages"][1] == {"role": "assistant", "content": "The sky is **blue** and clear."}
    page.reload()
    expect(page.locator(".text").first).to_have_text("The sky is blue and clear.")


def test_what_is_offered_on_a_phone_is_one_line_and_nothing_is_left_to_scroll_to(opened):
    page = opened(viewport={"width": 390, "height": 844})
    answered(page, "word " * 2000, "Short.", message="first")
    page.locator("#scroller").evaluate("one => { one.scrollTop = 0; }")
    expect(page.locator("#to-end")).to_be_visible()
    page.get_by_role("button", name="Edit this message").click()
    page.fill(".edited", "changed")
    page.keyboard.press("Enter")
    assert answers(page) == ["Short."]
    expect(page.locator("#to-end")).to_be_hidden()
    box = page.locator("#undo").bounding_box()
    assert box["height"] < 60 and box["x"] >= 0 and box["x"] + box["width"] <= 390


def test_an_image_is_enlarged_and_closed_again(opened):
    page, asked = opened(), question("image")
    answered(page, "One.", message="about an image", media=asked["image"])
    small = page.locator(".asked .image")
    small.click()
    large = page.locator("#image-large")
    expect(large).to_be_visible()
    assert large.evaluate("one => one.decode().then(() => one.naturalWidth)") > 10
    expect(page.locator("#image-name")).to_have_text("image_1.png")
    page.keyboard.press("Escape")
    expect(large).to_be_hidden()
    expect(small).to_be_focused()


def test_a_chat_that_was_cut_off_by_a_reload_says_so(opened):
    page = opened()
    page.route(CHAT, lambda route: None)  # an answer that never comes
    ask(page, "Hello")
    expect(page.locator(".answer[aria-busy=true]")).to_be_visible()
    expect(page.locator(".chat-list .open")).to_have_count(1)
    page.reload()
    expect(page.locator(".facts")).to_have_text("interrupted")
    # There is no beginning of an answer to continue.
    expect(page.get_by_role("button", name="Continue the answer")).to_have_count(0)
    page.unroute_all()
    stand_in(page, "Now.")
    page.get_by_role("button", name="Regenerate").click()
    expect(page.locator(".text")).to_have_text("Now.")


def test_a_chat_is_saved_as_a_file(opened):
    page = opened()
    answered(page, "An answer.", message="A question?")
    with page.expect_download() as saved:
        page.click("#save-chat")
    text = saved.value.path().read_text(encoding="utf-8")
    assert saved.value.suggested_filename == "A question.md"
    assert "A question?" in text and "An answer." in text


def test_a_long_title_leaves_its_button_in_the_list(opened):
    page = opened()
    answered(page, "An answer.", message="A question that is far longer than the list of chats is wide, and then some")
    drawer, title = page.locator("#chats").bounding_box(), page.locator(".chat-list .open").bounding_box()
    for name in ("Rename", "Delete"):
        button = page.locator(f".chat-list [aria-label^={name}]").bounding_box()
        assert button["x"] >= title["x"] + title["width"] and button["x"] + button["width"] <= drawer["x"] + drawer["width"]
    assert page.evaluate("document.getElementById('chats').scrollWidth <= document.getElementById('chats').clientWidth")


def test_options_stay_in_the_browser(opened):
    page = opened()
    set_options(page, temperature="0.7", system="Be brief.", chances=True)
    expect(page.locator("#options-summary")).to_have_text("temperature 0.7, probabilities, system message")
    page.reload()
    expect(page.locator("#options-summary")).to_have_text("temperature 0.7, probabilities, system message")
    page.click("#options-open")
    page.click("#options-reset")
    expect(page.locator("#options-summary")).to_have_text("")


def test_on_a_phone_the_bars_hold_what_they_say(opened):
    page = opened(viewport={"width": 390, "height": 844}, has_touch=True, is_mobile=True)
    page.tap("#beside")
    page.select_option("#voice-b", "gemma-demo:style")
    answered(page, "One.", "Two.", message="Hello", count=2)
    for place in ("#memory-text", ".state-words", "#model-one"):
        assert page.locator(place).evaluate("text => text.scrollWidth <= text.clientWidth"), place
    # The button that sends ends its row, also where a second list of adapters makes it a row of its own.
    box, send = page.locator(".composer .box").bounding_box(), page.locator("#send").bounding_box()
    assert box["x"] + box["width"] - 20 < send["x"] + send["width"] <= box["x"] + box["width"]


def test_on_a_phone_the_drawers_lie_over_the_conversation_and_close(opened):
    page = opened(viewport={"width": 390, "height": 844}, has_touch=True, is_mobile=True)
    expect(page.locator("#chats")).to_be_hidden()
    expect(page.locator("#panel")).to_be_hidden()
    for name in ("chats", "panel"):
        page.tap(f"#{name}-open")
        expect(page.locator(f"#{name}")).to_be_visible()
        assert page.evaluate("document.getElementById('ask').inert")
        page.keyboard.press("Escape")
        expect(page.locator(f"#{name}")).to_be_hidden()
        expect(page.locator(f"#{name}-open")).to_be_focused()
    page.tap("#chats-open")
    page.tap("#new-chat")
    expect(page.locator("#chats")).to_be_hidden()


def test_thinking_is_kept_apart_from_the_answer(opened):
    page = opened()
    lines = [
        {"choices": [{"index": 0, "delta": {"reasoning_content": "Hm."}}]},
        {"choices": [{"index": 0, "delta": {"content": "Yes."}}]},
    ]
    body = "".join(f"data: {json.dumps(line)}\n\n" for line in lines) + "data: [DONE]\n\n"
    page.route(CHAT, lambda route: route.fulfill(status=200, headers={"content-type": "text/event-stream"}, body=body))
    ask(page, "Hello")
    assert answers(page) == ["Yes."]
    expect(page.locator(".thinking p")).to_have_text("Hm.")


def test_dropping_anywhere_attaches(opened):
    page = opened()
    page.evaluate(
        """() => {
            const held = new DataTransfer();
            held.items.add(new File([new Uint8Array([1])], "here.png", {type: "image/png"}));
            const drop = new DragEvent("drop", {dataTransfer: held, bubbles: true, cancelable: true});
            document.getElementById("scroller").dispatchEvent(drop);
        }"""
    )
    expect(page.locator("#attached li")).to_contain_text("here.png")
