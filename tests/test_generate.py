"""Answers: token for token what stock generates, and text in whole characters that stops where it should."""

from __future__ import annotations

import functools
import os
import re
import threading

import pytest
import torch
import transformers

import trimtab
from tests import stock, talking
from trimtab.errors import RequestError
from trimtab.request import GenerateRequest
from trimtab.runtime.generate import Detokenizer, Generation

DEVICE = os.environ.get("TRIMTAB_TEST_DEVICE", "cpu")
OLD = tuple(int(part) for part in transformers.__version__.split(".")[:2]) < (5, 11)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return talking.build_gemma4(tmp_path_factory.mktemp("gemma4"))


@pytest.fixture(scope="module")
def model(folder):
    plan = trimtab.plan(folder, quant="none", device=DEVICE, context=512, audio_s=1.0, place={"*": "stream"})
    with trimtab.load(plan) as loaded:
        yield loaded


@pytest.fixture(scope="module")
def stock_model(folder):
    return stock.load_stock(folder, device=DEVICE)


def stock_tokens(stock_model, inputs, count, **options):
    with torch.no_grad():
        out = stock_model.generate(**inputs.tensors, max_new_tokens=count, do_sample=False, **options)
    return out[0, inputs.prompt_tokens :].tolist()


def test_a_real_picture_and_a_real_sound_give_stocks_tokens(model, stock_model):
    """The main job: PNG and stereo 44.1 kHz WAV through the real processor, weights streamed, against stock."""
    question = {"image": talking.png(), "audio": talking.wav()}
    inputs = model.prepare("What is it?", **question)
    answer = model.answer("What is it?", **question, max_new_tokens=16)
    assert list(answer.token_ids) == stock_tokens(stock_model, inputs, 16)
    assert answer.prompt_tokens == inputs.prompt_tokens and answer.ttft_s > 0
    assert "".join(model.generate("What is it?", **question, max_new_tokens=16)) == answer.text


def test_the_files_sampling_defaults_do_not_leak_into_greedy(model, stock_model):
    inputs = model.prepare("Hello")
    own = model.hf_model.generation_config
    model.hf_model.generation_config = transformers.GenerationConfig(
        do_sample=True, temperature=5.0, top_k=3, repetition_penalty=9.0, eos_token_id=[1]
    )
    try:
        found = [model.answer("Hello", max_new_tokens=8).token_ids for _ in range(3)]
    finally:
        model.hf_model.generation_config = own
    assert len(set(found)) == 1 and list(found[0]) == stock_tokens(stock_model, inputs, 8)


def test_a_seed_repeats_and_leaves_the_process_alone(model):
    torch.manual_seed(1)
    before = torch.random.get_rng_state()
    options = {"max_new_tokens": 24, "temperature": 1.5, "top_p": 0.95, "top_k": 50, "min_p": 0.001}
    first, second, other = (model.answer("Hello", seed=seed, **options).token_ids for seed in (3, 3, 4))
    assert first == second != other
    assert torch.equal(torch.random.get_rng_state(), before)


def test_top_k_1_is_greedy(model):
    greedy = model.answer("Hello", max_new_tokens=8).token_ids
    assert model.answer("Hello", max_new_tokens=8, temperature=1.0, top_k=1, seed=0).token_ids == greedy


def test_a_repetition_penalty_changes_a_repeating_answer(model, stock_model):
    inputs = model.prepare("Hello")
    found = model.answer("Hello", max_new_tokens=16, repetition_penalty=3.0).token_ids
    assert list(found) == stock_tokens(stock_model, inputs, 16, repetition_penalty=3.0)


def test_an_end_token_of_the_list_ends_the_answer_and_is_not_printed(model, stock_model):
    greedy = model.answer("Hello", max_new_tokens=8)
    own = model.hf_model.generation_config
    model.hf_model.generation_config = transformers.GenerationConfig(eos_token_id=[1, greedy.token_ids[3]])
    try:
        answer = model.answer("Hello", max_new_tokens=8)
    finally:
        model.hf_model.generation_config = own
    first = greedy.token_ids.index(greedy.token_ids[3])
    assert answer.token_ids == greedy.token_ids[: first + 1] and answer.finish_reason == "stop"
    assert answer.text == model.processor.tokenizer.decode(greedy.token_ids[:first], skip_special_tokens=True)


def test_max_new_tokens_is_exact(model):
    answer = model.answer("Hello", max_new_tokens=5)
    assert len(answer.token_ids) == 5 and answer.finish_reason == "length"


def test_a_stop_text_is_cut_out_wherever_pieces_end(model):
    whole = model.answer("Hello", max_new_tokens=24).text
    stop = re.findall(r"[a-z]{3}", whole)[2]
    answer = model.answer("Hello", max_new_tokens=24, stop=(stop,))
    assert answer.text == whole[: whole.index(stop)] and answer.finish_reason == "stop"
    assert len(answer.token_ids) < 24


def test_a_prompt_that_is_too_long_is_refused_before_any_work(model, monkeypatch):
    monkeypatch.setattr(type(model.hf_model), "forward", lambda *a, **k: pytest.fail("work was done"))
    with pytest.raises(RequestError, match="planned context of 512") as caught:
        model.generate("Hello", max_new_tokens=510)
    assert caught.value.field == "prompt"


def test_closing_early_ends_the_worker(model):
    pieces = model.generate("Hello", max_new_tokens=400)
    next(pieces)
    pieces.close()
    assert not [thread for thread in threading.enumerate() if thread.name == "trimtab-generate"]
    assert len(model.answer("Hello", max_new_tokens=3).token_ids) == 3  # and the model is free again


def test_cancelled_is_said(model):
    generation = Generation(model, model.prepare("Hello"), GenerateRequest(max_new_tokens=400))
    for _ in generation:
        break
    generation.close()
    assert generation.finish_reason == "cancelled"


def test_an_error_of_the_model_reaches_the_caller(model, monkeypatch):
    @functools.wraps(type(model.hf_model).forward)  # transformers checks arguments against the signature
    def fail(*args, **kwargs):
        raise ZeroDivisionError("planted")

    monkeypatch.setattr(type(model.hf_model), "forward", fail)
    with pytest.raises(ZeroDivisionError, match="planted"):
        list(model.generate("Hello", max_new_tokens=3))


def test_logits_equal_stocks_teacher_forced(model, stock_model):
    inputs = model.prepare("Hello there", image=talking.png())
    expected = stock.logits(stock_model, dict(inputs.tensors))[0].float().cpu()
    assert torch.equal(model.logits("Hello there", image=talking.png()), expected)


def test_a_long_prompt_in_pieces_gives_the_same_answer(folder):
    """In float32, where pieces differ from the whole by the order of sums alone (3e-6 of 0.8 seen): the greedy tokens of
    a random model are further apart than that."""
    tokens = torch.randint(300, 1500, (300,), generator=torch.Generator().manual_seed(0)).tolist()
    plan = trimtab.plan(folder, quant="none", dtype="float32", device=DEVICE, context=512, audio_s=1.0, images=0)
    with trimtab.load(plan) as loaded:
        whole = loaded.answer(tokens, max_new_tokens=8)
        object.__setattr__(loaded.plan, "prefill_tokens", 64)
        calls = []
        inner = type(loaded.hf_model).forward

        @functools.wraps(inner)
        def counted(self, *args, **kwargs):
            calls.append(kwargs["input_ids"].shape[1])
            return inner(self, *args, **kwargs)

        type(loaded.hf_model).forward = counted
        try:
            pieces = loaded.answer(tokens, max_new_tokens=8)
        finally:
            type(loaded.hf_model).forward = inner
    assert pieces.token_ids == whole.token_ids
    assert max(calls) == 64 and sum(size for size in calls if size > 1) >= 300


# Text out of tokens ---------------------------------------------------------------------------------------------------


class Bytes:
    """A tokenizer of single bytes: the worst case for characters that span tokens."""

    def decode(self, ids, **options):
        return bytes(ids).decode("utf-8", errors="replace")


TEXT = "naïve 🙂👩‍👩‍👧 日本語 e\u0301 end"


def test_pieces_never_split_a_character():
    detokenizer = Detokenizer(Bytes())
    pieces = [detokenizer.push(byte) for byte in TEXT.encode()]
    pieces.append(detokenizer.finish())
    assert "".join(pieces) == TEXT
    assert all("\ufffd" not in piece for piece in pieces)


def test_an_unfinished_character_is_shown_at_the_end():
    detokenizer = Detokenizer(Bytes())
    pieces = [detokenizer.push(byte) for byte in "🙂".encode()[:2]]
    assert pieces == ["", ""] and detokenizer.finish() == "\ufffd"


@pytest.mark.parametrize("stop", ["STOP", "S", "🙂", "OPS"])
def test_a_stop_text_never_shows_a_part_of_itself(stop):
    text = "abc STOPS here 🙂"
    detokenizer = Detokenizer(Bytes(), (stop,))
    shown = ""
    for byte in text.encode():
        shown += detokenizer.push(byte)
        if detokenizer.stopped:
            break
    assert shown + detokenizer.finish() == text[: text.index(stop)]


def test_what_only_looked_like_a_stop_is_given_out():
    detokenizer = Detokenizer(Bytes(), ("STOP",))
    shown = "".join(detokenizer.push(byte) for byte in b"a STO")
    assert shown == "a " and detokenizer.finish() == "STO"


def test_the_demo_tokenizer_round_trips_through_pieces():
    tokenizer = talking._tokenizer()
    ids = tokenizer(TEXT, add_special_tokens=False).input_ids
    detokenizer = Detokenizer(tokenizer)
    assert "".join(detokenizer.push(token) for token in ids) + detokenizer.finish() == tokenizer.decode(ids)
