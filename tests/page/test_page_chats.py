"""What a reader does with many chats, with versions of an answer, and with no adapter, one and twenty."""

import base64
import json
import re

import pytest

from tests.page import serving
from tests.page.reading import KEY, answered, answers, ask, expect, faked, question, set_options, stand_in

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
    assert [turn["text"] for turn in later] == ["Why?"] and later[0]["slots"][0]["versions"][0]["text"] == "Because."


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


def three_chats(page):
    """An image, code words in an answer, and a third one."""
    answered(
        page, "A red square.", "The word is xylophone.", "Nothing.", message="about an image", media=question("image")["image"]
    )
    for text in ("a hard word", "the last"):
        page.click("#new-chat")
        ask(page, text)
        answers(page)
    expect(page.locator(".chat-list .open")).to_have_count(3)


def test_chats_are_searched_by_title_and_by_what_was_said(opened):
    page = opened()
    three_chats(page)
    page.keyboard.press("Control+k")
    expect(page.locator("#search")).to_be_focused()
    for word, titles in (
        ("XYLO", ["a hard word"]),
        ("image", ["about an image"]),
        ("a", ["the last", "a hard word", "about an image"]),
    ):
        page.fill("#search", word)
        expect(page.locator(".chat-list .open")).to_have_text(titles)
    page.fill("#search", "zebra")
    expect(page.locator(".chat-list")).to_contain_text("No chat says this.")


def test_a_chat_is_renamed_and_keeps_its_name(opened):
    page = opened()
    three_chats(page)
    page.get_by_role("button", name="Rename a hard word").click()
    page.locator(".title-box").fill("instruments")
    page.keyboard.press("Enter")
    expect(page.locator(".chat-list .open")).to_have_text(["the last", "instruments", "about an image"])
    page.get_by_role("button", name="Rename the last").click()
    page.locator(".title-box").fill("never")
    page.keyboard.press("Escape")
    page.get_by_role("button", name="Rename the last").click()
    page.locator(".title-box").fill("the newest")
    page.keyboard.press("Enter")
    # A message that is sent again does not take the name away.
    stand_in(page, "Again.")
    page.get_by_role("button", name="Edit this message").click()
    page.locator(".edited").fill("something else")
    page.keyboard.press("Enter")
    expect(page.locator(".text")).to_have_text("Again.")
    page.reload()
    expect(page.locator(".chat-list .open")).to_have_text(["the newest", "instruments", "about an image"])


def test_all_chats_are_saved_to_a_file(opened, tmp_path):
    page = opened()
    expect(page.locator("#save-all")).to_be_hidden()
    three_chats(page)
    with page.expect_download() as saved:
        page.click("#save-all")
    saved.value.save_as(tmp_path / "chats.json")
    assert saved.value.suggested_filename.startswith("trimtab chats 20")
    expect(page.locator("#save-said")).to_have_text("3 chats saved to a file")
    held = json.loads((tmp_path / "chats.json").read_text(encoding="utf-8"))
    assert (held["form"], held["version"]) == ("trimtab chats", 1)
    assert [chat["title"] for chat in held["chats"]] == ["the last", "a hard word", "about an image"]
    (turn,) = held["chats"][2]["turns"]
    assert turn["text"] == "about an image" and turn["slots"][0]["versions"][0]["text"] == "A red square."
    (image,) = turn["media"]
    assert base64.b64decode(image["data"]) == (serving.DEMO / question("image")["image"]).read_bytes()


def test_each_chat_keeps_its_own_options(opened):
    page = opened()
    sent = stand_in(page, "One.", "Two.", "Three.")
    set_options(page, temperature="0.7", system="Be brief.", top_k="5")
    ask(page, "first")
    answers(page)
    page.click("#new-chat")
    set_options(page, temperature="0", system="Be long.", top_k="")
    ask(page, "second")
    answers(page)
    page.get_by_role("button", name="first", exact=True).click()
    expect(page.locator("#options-summary")).to_have_text("temperature 0.7, top k 5, system message")
    ask(page, "again")
    answers(page, 2)
    assert [one["messages"][0]["content"] for one in sent] == ["Be brief.", "Be long.", "Be brief."]
    assert [(one["temperature"], one.get("top_k")) for one in sent] == [(0.7, 5), (0, None), (0.7, 5)]


def test_a_text_file_goes_with_the_message_in_a_fence(opened, tmp_path):
    page = opened()
    sent = stand_in(page, "One.", "Two.")
    (tmp_path / "notes.md").write_text("# Notes\n```\ncode\n```\n", encoding="utf-8")
    page.set_input_files("#file", str(tmp_path / "notes.md"))
    expect(page.locator("#attached li")).to_contain_text("notes.md, 21 B")
    page.fill("#question", "What is this?")
    page.click("#send")
    answers(page)
    assert sent[0]["messages"] == [{"role": "user", "content": "notes.md:\n````\n# Notes\n```\ncode\n```\n````\n\nWhat is this?"}]
    page.locator(".file summary").click()
    expect(page.locator(".file pre")).to_contain_text("# Notes")
    # It stays with its turn.
    ask(page, "And now?")
    answers(page, 2)
    assert sent[1]["messages"][0] == sent[0]["messages"][0]
    (tmp_path / "bad.txt").write_bytes(b"\xff\x00\xfe")
    page.set_input_files("#file", str(tmp_path / "bad.txt"))
    expect(page.locator("#ask-error")).to_contain_text("bad.txt: cannot be sent as text")


def test_the_list_of_chats_opens_and_closes_with_a_key(opened):
    page = opened()
    page.keyboard.press("Control+b")
    expect(page.locator("#chats")).to_be_hidden()
    page.keyboard.press("Control+b")
    expect(page.locator("#chats")).to_be_visible()
    # What the server takes: every option goes through a real request.
    set_options(page, temperature="0.5", top_p="0.9", top_k="3", min_p="0.1", max_tokens="4", seed="1")
    ask(page, question("text")["prompt"])
    assert answers(page)[0]
    expect(page.locator(".error:visible")).to_have_count(0)


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


def test_a_tab_takes_over_what_another_one_kept_and_brings_no_deleted_chat_back(opened):
    first = opened()
    stand_in(first, "One.", "Two.")
    ask(first, "Who?")
    answers(first)
    second = first.context.new_page()
    second.add_init_script(f"sessionStorage.setItem('trimtab-key', {json.dumps(KEY)})")
    second.goto(first.url)
    stand_in(second, "Three.", "Four.")
    second.locator("#chat-list .open").click()
    expect(second.locator(".asked")).to_have_count(1)
    ask(first, "From the first")
    answers(first, 2)
    expect(first.locator("#stop")).to_be_hidden()  # its chat is kept then
    ask(second, "From the second")
    expect(second.locator("#ask-error")).to_contain_text("changed or deleted in another tab")
    expect(second.locator("#question")).to_have_value("From the second")
    assert texts(second) == ["Who?", "One.", "From the first", "Two."]
    second.click("#send")
    answers(second, 3)
    expect(second.locator("#stop")).to_be_hidden()
    first.click("#delete-all")
    first.locator("dialog[open] button").last.click()
    expect(first.locator("#chat-list .open")).to_have_count(0)
    ask(second, "Too late")
    expect(second.locator("#ask-error")).to_contain_text("changed or deleted in another tab")
    expect(second.locator(".asked")).to_have_count(0)
    expect(second.locator("#chat-list .open")).to_have_count(0)
