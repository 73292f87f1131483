"""What a reader does with many chats: search, names, files of all of them, options of each, text files, keys."""

import base64
import json

import pytest

from tests.page import serving
from tests.page.reading import answered, answers, ask, expect, question, set_options, stand_in

pytestmark = pytest.mark.slow


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
