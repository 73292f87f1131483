"""Chats of other programs: the exports of ChatGPT and Open WebUI become chats of this page."""

from __future__ import annotations

import json

import pytest

from tests.page.reading import answers, expect, stand_in

pytestmark = pytest.mark.slow

ID = "6f1c2d3e-4a5b-4c6d-8e7f-{:012x}"


def node(name, parent, role=None, *parts, kind="text", **more):
    message = role and {
        "author": {"role": role},
        "content": {"content_type": kind, "parts": list(parts)},
        "metadata": {"model_slug": "gpt-4o"},
        **more,
    }
    return {name: {"id": name, "parent": parent, "children": [], "message": message or None}}


def chatgpt(at=1, title="From ChatGPT", nodes=None, last="d"):
    """A chat with a hidden system message, an answer in two messages around a tool, and a branch that is not shown."""
    mapping = nodes or {
        **node("root", None), **node("s", "root", "system", ""), **node("a", "s", "user", "What is <b>two</b> and two?"),
        **node("other", "a", "assistant", "Five."), **node("b", "a", "assistant", "I count."),
        **node("t", "b", "assistant", "print(2 + 2)", kind="code", recipient="python"), **node("u", "t", "tool", "4"),
        **node("c", "u", "assistant", "It is $4$."),
        **node("d", "c", "user", {"content_type": "image_asset_pointer"}, "And this?", kind="multimodal_text"),
    }  # fmt: skip
    return {"conversation_id": ID.format(at), "title": title, "create_time": 1.7e9, "update_time": 1.7e9, "mapping": mapping,
            "current_node": last}  # fmt: skip


def open_webui():
    messages = {
        "1": {"id": "1", "parentId": None, "role": "user", "content": "Hello"},
        "2": {"id": "2", "parentId": "1", "role": "assistant", "content": "Not shown", "model": "llama"},
        "3": {
            "id": "3",
            "parentId": "1",
            "role": "assistant",
            "content": "Hello <img src=x onerror=1>",
            "model": "qwen:8b",
        },
    }
    chat = {"title": "x", "params": {"system": "Be kind."}, "history": {"currentId": "3", "messages": messages}}
    return {"id": ID.format(9), "title": "From Open WebUI", "updated_at": 1_700_000_000, "chat": chat}


def read(page, tmp_path, held):
    path = tmp_path / "conversations.json"
    path.write_text(json.dumps(held), encoding="utf-8")
    page.set_input_files("#read-file", str(path))


def test_a_chat_of_chatgpt_is_read_as_it_was_shown_there(opened, tmp_path):
    page = opened()
    empty = chatgpt(2, "Nothing said", node("root", None), "root")
    read(page, tmp_path, [chatgpt(), empty])
    expect(page.locator("#backup-said")).to_have_text(
        "1 chat added; without a message: “Nothing said”; not in the file: 1 image or file"
    )
    page.get_by_role("button", name="From ChatGPT", exact=True).click()
    expect(page.locator(".bubble")).to_have_text(["What is <b>two</b> and two?", "And this?"])
    expect(page.locator(".voice-name").first).to_have_text("gpt-4o")
    first = page.locator(".answer .text").first
    expect(first).to_contain_text("I count.")
    expect(first).to_contain_text("It is $4$.")
    assert "Five" not in page.locator("#turns").inner_text() and "print" not in page.locator("#turns").inner_text()
    # The same file again adds nothing.
    read(page, tmp_path, [chatgpt()])
    expect(page.locator("#backup-said")).to_contain_text("0 chats added")


@pytest.mark.parametrize("more", [{}, {"mapping": None}], ids=["as exported", "with a mapping of nothing"])
def test_a_chat_of_open_webui_goes_on_here(opened, tmp_path, more):
    page = opened()
    read(page, tmp_path, [open_webui() | more])
    expect(page.locator("#backup-said")).to_have_text("1 chat added")
    page.get_by_role("button", name="From Open WebUI", exact=True).click()
    expect(page.locator(".answer .text")).to_have_text("Hello <img src=x onerror=1>")
    expect(page.locator(".voice-name")).to_have_text("qwen:8b")
    sent = stand_in(page, "Again.", "On.")
    page.get_by_role("button", name="Regenerate with the selected adapter").click()
    expect(page.locator(".answer .text")).to_have_text("Again.")
    page.fill("#question", "More")
    page.click("#send")
    answers(page, 2)
    assert {one["model"] for one in sent} == {"gemma-demo"}
    assert [message["role"] for message in sent[1]["messages"]] == ["system", "user", "assistant", "user"]
    assert sent[1]["messages"][0]["content"] == "Be kind."


CIRCLE = {**node("a", "b", "user", "x"), **node("b", "a", "assistant", "y")}
LONG = {str(at): {"parent": str(at - 1)} for at in range(-2, 20_000)}


@pytest.mark.parametrize(
    ("held", "said"),
    [
        ([chatgpt(nodes=CIRCLE, title="Round", last="b")], "“Round” cannot be read"),
        ([chatgpt(nodes={"a": 1}, title="Number", last="a")], "“Number” cannot be read"),
        ([chatgpt(nodes=LONG, title="Long", last="19999")], "“Long” has more than 20000 messages"),
        ([{"mapping": {}}] * 20_001, "20000 are read at most"),
        ([chatgpt(), {"chat": {}}], "does not hold chats of this page, ChatGPT (conversations.json) or Open WebUI"),
    ],
    ids=["circle", "number", "long", "many", "mixed"],
)  # fmt: skip
def test_a_file_that_is_not_whole_is_refused_by_name(opened, tmp_path, held, said):
    page = opened()
    read(page, tmp_path, held)
    expect(page.locator("#backup-error")).to_contain_text(said)
    expect(page.locator(".chat-list .open")).to_have_count(0)
