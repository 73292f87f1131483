"""Versions of an answer with the messages that followed each, and how much of the context they take."""

import json

import pytest

from tests.page.reading import answers, ask, expect, stand_in

pytestmark = pytest.mark.slow


def texts(page):
    return page.locator(".asked .bubble, .answer .text").all_inner_texts()


def branched(opened, question, *later):
    """Open a chat with two versions of its answer, the second followed by a question, and show the first one again.

    Returns the page and the list of what is sent. later: the answers that come next.
    """
    page = opened()
    sent = stand_in(page, "Red.", "Blue.", "Because.", *later)
    ask(page, "What color?")
    answers(page)
    page.get_by_role("button", name="Regenerate").click()
    expect(page.locator(".text")).to_have_text("Blue.")
    ask(page, question)
    answers(page, 2)
    page.get_by_role("button", name="Earlier version").click()
    return page, sent


def test_each_version_of_an_answer_keeps_the_messages_that_followed_it(opened):
    page, sent = branched(opened, "Why blue?", "Hm.", "Yes.")
    expect(page.locator(".text")).to_have_text(["Red."])
    expect(page.locator("#undo-text")).to_have_text("1 later message stays with version 2")
    ask(page, "Why red?")
    answers(page, 2)
    assert [message["content"] for message in sent[-1]["messages"]] == ["What color?", "Red.", "Why red?"]
    page.get_by_role("button", name="Later version").click()
    assert texts(page) == ["What color?", "Blue.", "Why blue?", "Because."]
    # Undo goes back to the other version, and its messages.
    page.click("#undo-yes")
    assert texts(page) == ["What color?", "Red.", "Why red?", "Hm."]
    page.reload()
    expect(page.locator(".text").first).to_have_text("Red.")
    assert texts(page) == ["What color?", "Red.", "Why red?", "Hm."]
    page.get_by_role("button", name="Later version").focus()
    page.keyboard.press("Enter")
    assert texts(page) == ["What color?", "Blue.", "Why blue?", "Because."]
    expect(page.get_by_role("button", name="Earlier version")).to_be_focused()
    ask(page, "Sure?")
    answers(page, 3)
    assert [message["content"] for message in sent[-1]["messages"]][1:4] == ["Blue.", "Why blue?", "Because."]
    # What is in a branch that is not shown is found too.
    page.keyboard.press("Control+k")
    page.fill("#search", "Why red")
    expect(page.locator(".chat-list .open")).to_have_text("What color?")


def test_an_edited_answer_and_the_one_before_both_keep_what_followed(opened):
    page = opened()
    stand_in(page, "Red.", "Because.", "More.")
    ask(page, "What color?")
    answers(page)
    ask(page, "Why?")
    answers(page, 2)
    page.get_by_role("button", name="Edit this answer").first.click()
    page.get_by_label("Edited answer").fill("Green.")
    page.keyboard.press("Control+Enter")
    assert texts(page) == ["What color?", "Green.", "Why?", "Because."]
    ask(page, "And?")
    answers(page, 3)
    page.get_by_role("button", name="Earlier version").click()
    assert texts(page) == ["What color?", "Red.", "Why?", "Because."]
    page.get_by_role("button", name="Later version").click()
    assert texts(page) == ["What color?", "Green.", "Why?", "Because.", "And?", "More."]


def test_branches_stay_while_an_answer_comes_and_beside_a_second_adapter(opened):
    page, _ = branched(opened, "Why?", "Mauve.")
    page.get_by_label("Compare with another adapter").select_option(index=1)
    assert answers(page, 2) == ["Red.", "Mauve."]
    page.get_by_role("button", name="Later version").click()
    assert texts(page) == ["What color?", "Blue.", "Mauve.", "Why?", "Because."]


def test_one_chat_is_exported_with_its_branches(opened, tmp_path):
    page = opened()
    stand_in(page, "Red.", "Blue.", "Because.")
    ask(page, "What color: <b>?")
    answers(page)
    page.get_by_role("button", name="Regenerate").click()
    expect(page.locator(".text")).to_have_text("Blue.")
    ask(page, "Why?")
    answers(page, 2)
    page.get_by_role("button", name="Earlier version").click()
    with page.expect_download() as saved:
        page.get_by_role("button", name="Export What color: <b>?").click()
    assert saved.value.suggested_filename == "What color b.json"
    path = tmp_path / "chat.json"
    saved.value.save_as(path)
    held = json.loads(path.read_text())
    assert len(held["chats"]) == 1 and list(held["chats"][0]["turns"][0]["later"]) == ["1"]
    shown, later = held["chats"][0]["turns"], held["chats"][0]["turns"][0]["later"]["1"]
    assert [version["text"] for version in shown[0]["slots"][0]["versions"]] == ["Red.", "Blue."]
    assert [turn["text"] for turn in later] == ["Why?"]
    assert later[0]["slots"][0]["versions"][0]["text"] == "Because."


def test_the_gauge_shows_what_the_last_prompt_and_answer_take_of_the_context(opened):
    page = opened()
    expect(page.locator("#context")).to_be_hidden()
    stand_in(page, "one two three", "word " * 480, "four")
    ask(page, "first")
    answers(page)
    gauge, text = page.get_by_role("meter", name="Context in use"), page.locator("#context-text")
    expect(text).to_have_text("6 of 512")
    expect(gauge).to_have_attribute("aria-valuetext", "6 of 512 tokens")
    assert gauge.evaluate("one => [one.value, one.max]") == [6, 512]
    expect(page.locator("#context")).not_to_have_class("context is-full")
    ask(page, "second")
    answers(page, 2)
    expect(page.locator("#context")).to_have_class("context is-full")
    # An edited answer has no count of its own.
    page.get_by_role("button", name="Edit this answer").nth(1).click()
    page.get_by_label("Edited answer").fill("short")
    page.keyboard.press("Control+Enter")
    expect(text).to_have_text("more than 6 of 512")
    page.click("#new-chat")
    expect(page.locator("#context")).to_be_hidden()
    page.get_by_role("button", name="first", exact=True).click()
    expect(text).to_have_text("more than 6 of 512")


def test_edits_from_the_last_answer_to_the_first_do_not_double_what_a_chat_holds(opened):
    page = opened()
    counts = page.evaluate(
        """async () => {
          const { addVersion, allTurns, hasBranches } = await import("/page/branches.js");
          const turns = Array.from({ length: 14 }, (_, at) => ({ text: `${at}`, slots: [{ at: 0, versions: [{ text: "a" }] }] }));
          for (let at = turns.length - 2; at >= 0; at -= 1) {
            addVersion(turns[at], turns[at].slots[0], { text: "b" }, turns.slice(at + 1));
          }
          return [allTurns(turns).length, turns.filter(hasBranches).length];
        }"""
    )
    assert counts == [14 + sum(range(1, 14)), 13]


def test_an_edit_is_not_saved_while_an_answer_comes_and_later_counts_of_the_context_are_forgotten(opened):
    page = opened()
    stand_in(page, "Red.", "Blue.")
    ask(page, "What color?")
    answers(page)
    ask(page, "And the sky?")
    answers(page, 2)
    expect(page.locator("#context-text")).not_to_contain_text("more than")
    page.get_by_role("button", name="Edit this answer").first.click()
    held = []
    page.route("**/v1/chat/completions", lambda route: held.append(route))
    ask(page, "And the sea?")
    expect(page.locator("#stop")).to_be_visible()
    page.get_by_label("Edited answer").fill("Green.")
    page.get_by_role("button", name="Save", exact=True).click()
    expect(page.locator("#ask-error")).to_contain_text("when the answer is complete")
    expect(page.get_by_label("Edited answer")).to_have_value("Green.")
    page.locator("#stop").click()
    expect(page.locator("#send")).to_be_visible()
    page.get_by_role("button", name="Save", exact=True).click()
    expect(page.locator(".answer .text").first).to_have_text("Green.")
    expect(page.locator("#context-text")).to_contain_text("more than")
