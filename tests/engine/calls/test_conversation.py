"""Conversations: what is kept, what a later prompt holds, and what happens when the context is full."""

import shutil
import threading

import pytest

import trimtab
from tests import talking
from tests.raised import refused
from trimtab import demo
from trimtab.engine.batch.generate import Generation, Piece
from trimtab.engine.chat.media import read_image
from trimtab.errors import RequestError

STYLE = str(demo.ADAPTERS["style"])
QUESTION = "Who are you?"


@pytest.fixture(scope="module")
def model():
    plan = trimtab.plan(demo.BASE, adapters={"style": STYLE}, context=256, images=2, audio_s=2.0, device="cpu", head="full")
    with trimtab.load(plan) as loaded:
        yield loaded


def test_an_answer_in_a_conversation_is_the_answer_to_all_its_messages(model):
    chat = model.chat(max_new_tokens=12)
    first = chat.send(QUESTION)
    second = chat.send("And now?")
    messages = [
        {"role": "user", "content": QUESTION}, {"role": "assistant", "content": first.text},
        {"role": "user", "content": "And now?"},
    ]  # fmt: skip
    expected = model.answer(messages, max_new_tokens=12)
    assert second.token_ids == expected.token_ids
    assert second.prompt_tokens == expected.prompt_tokens > first.prompt_tokens
    assert [turn.role for turn in chat.turns] == ["user", "assistant"] * 2


def test_each_turn_is_answered_by_its_own_adapter(model):
    chat = model.chat(max_new_tokens=12)
    base, styled = chat.send(QUESTION).text, "".join(chat.again(adapter="style"))
    assert base != styled == model.answer(QUESTION, adapter="style", max_new_tokens=12).text
    assert [turn.adapter for turn in chat.turns] == [None, "style"]
    assert len(chat.turns) == 2


def test_a_compared_answer_is_not_kept(model):
    chat = model.chat(max_new_tokens=12)
    chat.send(QUESTION)
    before = list(chat.turns)
    assert "".join(chat.beside(adapter="style")) == model.answer(QUESTION, adapter="style", max_new_tokens=12).text
    assert "".join(chat.beside("Another?")) and chat.turns == before


def test_a_closed_answer_is_kept_as_far_as_it_came(model):
    chat = model.chat(max_new_tokens=100, temperature=50.0, seed=1)
    pieces = chat.stream(QUESTION)
    shown = next(pieces)
    pieces.close()
    assert chat.turns[-1].text.startswith(shown)
    assert len(chat.last.token_ids) < 100 and chat.last.finish_reason == "cancelled"
    assert chat.send("Go on", max_new_tokens=2).token_ids


def test_system_message_and_images_are_part_of_every_later_prompt(model):
    chat = model.chat(system="Answer.", max_new_tokens=4)
    chat.send("What is this?", image=str(demo.IMAGES[0]), audio=str(demo.SOUNDS[0]))
    answer = chat.turns[-1].text
    second = chat.send("Sure?")
    image = read_image(demo.IMAGES[0])
    messages = [
        {"role": "system", "content": "Answer."},
        {"role": "user", "content": [{"type": "image", "image": image}, {"type": "text", "text": "What is this?"},
                                     {"type": "audio", "audio": str(demo.SOUNDS[0])}]},
        {"role": "assistant", "content": answer}, {"role": "user", "content": "Sure?"},
    ]  # fmt: skip
    assert second.token_ids == model.answer(messages, max_new_tokens=4).token_ids


def test_a_full_context_is_an_error_or_drops_the_oldest_turns(model):
    long = "word " * 60
    strict, lax = model.chat(max_new_tokens=8), model.chat(max_new_tokens=8, when_full="drop")
    with pytest.raises(RequestError) as caught:
        for _ in range(10):
            strict.send(long)
    assert caught.value.field == "prompt"
    kept = len(strict.turns)
    assert kept >= 2 and kept % 2 == 0  # a refused message is not kept
    for _ in range(6):
        lax.send(long)
    assert len(lax.turns) == 12 and lax.left_out > 0 and lax.left_out % 2 == 0
    rest = [turn.message() for turn in lax.turns[lax.left_out : -1]]
    assert model.answer(rest, max_new_tokens=8).text == lax.turns[-1].text


def test_more_images_than_planned_drop_the_oldest(model):
    chat = model.chat(max_new_tokens=2, when_full="drop")
    for number in range(3):
        chat.send("What?", image=demo.IMAGES[number])
    assert chat.left_out == 2
    assert refused(chat.send, "What?", image=list(demo.IMAGES[:3])).field == "image" and len(chat.turns) == 6


def test_without_a_limit_an_answer_may_take_what_is_left_of_the_context(model):
    answer = model.chat(temperature=100.0, seed=3, system=" ".join([QUESTION] * 35)).send(QUESTION)
    assert answer.finish_reason == "stop" or answer.prompt_tokens + len(answer.token_ids) == model.context_tokens


@pytest.mark.parametrize(("options", "field"), [({"when_full": "x"}, "when_full"), ({"max_new_tokens": 0}, "max_new_tokens")])
def test_a_wrong_conversation_is_refused(model, options, field):
    assert refused(model.chat, **options).field == field


def test_a_wrong_message_changes_nothing(model):
    chat = model.chat()
    for call in (lambda: chat.send("  "), lambda: chat.send(3), lambda: chat.again(), lambda: chat.send("x", image="no.png"),
                 lambda: chat.send("x", adapter="other")):  # fmt: skip
        with pytest.raises(RequestError):
            call()
    assert chat.turns == [] and chat.last is None


def test_an_adapter_whose_files_changed_is_read_again(tmp_path):
    folder = tmp_path / "own"
    shutil.copytree(demo.ADAPTERS["style"], folder)
    with trimtab.load(demo.BASE, adapters={"own": folder}, context=128, device="cpu", head="full") as model:
        before = model.answer(QUESTION, adapter="own", max_new_tokens=12).text
        assert model.reload_adapter("own") is False
        for file in demo.ADAPTERS["specialist"].iterdir():
            shutil.copy(file, folder / file.name)
        assert model.reload_adapter("own") is True
        after = model.answer(QUESTION, adapter="own", max_new_tokens=12).text
        (folder / "adapter_model.safetensors").write_bytes(b"damaged")
        with pytest.raises(trimtab.TrimtabError):
            model.reload_adapter("own")
        assert model.answer(QUESTION, adapter="own", max_new_tokens=12).text == after
    with trimtab.load(demo.BASE, adapters={"own": demo.ADAPTERS["specialist"]}, context=128, device="cpu", head="full") as model:
        assert model.answer(QUESTION, adapter="own", max_new_tokens=12).text == after != before


@pytest.fixture
def changed(tmp_path):
    """A model with an adapter whose files have changed since it was loaded."""
    folder = tmp_path / "own"
    shutil.copytree(demo.ADAPTERS["style"], folder)
    with trimtab.load(demo.BASE, adapters={"own": folder}, context=128, device="cpu", head="full") as model:
        for file in demo.ADAPTERS["specialist"].iterdir():
            shutil.copy(file, folder / file.name)
        yield model


@pytest.mark.parametrize("adapter", ["own", {"own": 0.5}])
def test_a_question_that_comes_while_its_adapter_is_exchanged_waits(changed, adapter, monkeypatch):
    attach, refused = changed._attach, []

    def ask():
        try:
            changed.question(QUESTION, {"adapter": adapter})
        except RequestError as error:
            refused.append(error)

    asking = threading.Thread(target=ask)

    def attach_while_asked(name, held):
        assert "own" not in changed.adapters
        asking.start()
        asking.join(0.3)  # a question that does not wait has been refused by now
        attach(name, held)

    monkeypatch.setattr(changed, "_attach", attach_while_asked)
    assert changed.reload_adapter("own") is True
    asking.join(60)
    assert not asking.is_alive() and refused == []


def test_an_adapter_unloaded_while_its_new_files_are_read_stays_unloaded(changed, monkeypatch):
    read = changed.read_adapter

    def read_and_unload(path, **options):
        changed.unload_adapter("own")
        return read(path, **options)

    monkeypatch.setattr(changed, "read_adapter", read_and_unload)
    assert refused(changed.reload_adapter, "own").field == "adapter" and changed.adapters == ()


THINKS = "{{ bos_token }}{% for m in messages %}{{ m.role }} {{ m.content.split('<channel|>')[-1] }}{% endfor %}"


@pytest.mark.parametrize(
    "before, said, kept",
    [
        ("", "<|channel>thought\n plum<channel|> otter<eos>", "otter"), ("", " otter<eos>", " otter"), ("", "<|channel> plum", ""),
        ("<|channel>", " plum<channel|> otter one", "otter"), ("<channel|>", " plum<channel|> otter", " plum otter"),
    ],
)  # fmt: skip
def test_a_turn_keeps_no_thought_whose_marks_no_text_shows(tmp_path, monkeypatch, before, said, kept):
    folder = talking.build_llama(tmp_path / "llama", chat_template=THINKS + (before and "<bos>" + before))
    with trimtab.load(trimtab.plan(folder, quant="none", device="cpu", context=128)) as loaded:
        tokens = loaded.processor(said, add_special_tokens=False)["input_ids"]
        shown = loaded.processor.decode(tokens, skip_special_tokens=True)
        monkeypatch.setattr(Generation, "__iter__", lambda self: (piece for piece in [Piece(shown, tuple(tokens))]))
        chat = loaded.chat(max_new_tokens=20, stop=(" one",))
        chat.send("Hello")
        assert [turn.text for turn in chat.turns] == (["Hello", kept] if kept else [])
