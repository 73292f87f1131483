"""Answers: token for token what stock generates, and text in whole characters that stops where it should."""

import contextlib
import copy
import functools
import gc
import itertools
import re
import threading
import weakref

import pytest
import tokenizers
import torch
import transformers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import decoders, models

import trimtab
from tests import pico, stock, talking
from tests.engine.batch.test_batch import through, to_the_end
from tests.lent import DEVICE
from tests.raised import raising, refused
from trimtab.engine.batch.batch import Batch
from trimtab.engine.batch.generate import AnswerText, Detokenizer, Generation, TokenTexts, hidden_ids
from trimtab.engine.batch.request import AnswerPenalties, Sampler
from trimtab.errors import RequestError
from trimtab.request import LEAST_TEMPERATURE, PENALTIES, GenerateRequest
from trimtab.verification.routes import teacher_forcing
from trimtab.verification.routes.compare import NoiseFloor, noise_between

OLD = tuple(int(part) for part in transformers.__version__.split(".")[:2]) < (5, 11)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return talking.build_gemma4(tmp_path_factory.mktemp("gemma4"))


@pytest.fixture(scope="module")
def model(folder):
    plan = trimtab.plan(folder, quant="none", device=DEVICE, context=512, audio_s=1.0, place={"*": "stream"})
    # What is compared token for token with stock is computed as stock does; captured steps sum in another order.
    with trimtab.load(plan, decode="eager") as loaded:
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


def test_an_answer_without_a_tokenizer_leaves_nothing_of_its_inputs(tmp_path):
    kept = []
    with trimtab.load(trimtab.plan(pico.build("llama", tmp_path), quant="none", device=DEVICE, context=32)) as loaded:
        for _ in range(3):
            inputs = loaded.prepare([5, 6, 7])
            kept.append(weakref.ref(inputs))
            loaded.answer_inputs(inputs, GenerateRequest(max_new_tokens=1))
            del inputs
        gc.collect()
        assert [one() for one in kept] == [None] * 3


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


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("penalty", [None, PENALTIES[0], PENALTIES[1]])
@pytest.mark.parametrize("options", [
    {"temperature": LEAST_TEMPERATURE}, {"temperature": 100.0}, {"temperature": 1.0, "top_p": 5e-324},
    {"temperature": 1.0, "top_p": 1.0}, {"temperature": 1.0, "min_p": 5e-324}, {"temperature": 1.0, "min_p": 1.0},
    {"temperature": 1.0, "top_k": 2**31 - 1}, {"temperature": 1.0, "top_k": 1}, {"temperature": 0.0},
    {"temperature": LEAST_TEMPERATURE, "top_p": 5e-324, "min_p": 1.0, "top_k": 1},
])  # fmt: skip
def test_at_the_ends_of_every_range_a_token_is_sampled(options, penalty, dtype):
    # Larger logits than any model's, of both signs, and equal ones.
    logits = torch.tensor([3e4, -3e4, 1e-30, 0.0, 3e4, -1.0] * 4).to(dtype).float()
    seed = {} if options["temperature"] == 0 else {"seed": 0}
    sampler = Sampler(GenerateRequest(**options, **seed, repetition_penalty=penalty), torch.device("cpu"))
    for _ in range(3):
        token = sampler.draw(list(range(24)), logits)
        assert 0 <= token < 24 and logits[token] > -3e4


def test_a_temperature_is_refused_with_the_end_of_the_range_that_it_passes():
    # A server has a lower most temperature: the least one alone holds for everybody.
    for value, words in ((1e-38, "must be 0 (greedy) or at least 1e-06"), (101, "must be at most 100")):
        assert str(refused(GenerateRequest, temperature=value)) == f"temperature={value!r}: {words}"


def test_a_repetition_penalty_changes_a_repeating_answer(model, stock_model):
    inputs = model.prepare("Hello")
    found = model.answer("Hello", max_new_tokens=16, repetition_penalty=3.0).token_ids
    assert list(found) == stock_tokens(stock_model, inputs, 16, repetition_penalty=3.0)


# Penalties and biases ---------------------------------------------------------------------------------------------------


def by_hand(logits, answer, request):
    """OpenAI's formula, one token at a time, in Python's own numbers."""
    scores = [float(value) for value in logits]
    for token, bias in request.logit_bias:
        scores[token] += bias
    for token in set(answer):
        scores[token] -= answer.count(token) * request.frequency_penalty + request.presence_penalty
    return scores


@pytest.mark.parametrize(
    "options", [{"presence_penalty": 1.5}, {"frequency_penalty": 0.75}, {"logit_bias": {3: 2.5, 0: -100.0}},
                {"presence_penalty": -0.5, "frequency_penalty": 2.0, "logit_bias": {5: -1.25}}],
)  # fmt: skip
def test_penalties_and_biases_are_openais_formula(options):
    request = GenerateRequest(**options)
    sampler, penalties = Sampler(request, torch.device("cpu")), AnswerPenalties(request)
    generator, prompt, answer = torch.Generator().manual_seed(1), [1, 1, 2], []
    for _ in range(12):
        logits = torch.randn(8, generator=generator)
        expected = by_hand(logits, answer, request)
        given = penalties(torch.tensor([prompt + answer]), logits[None].clone())[0]
        assert torch.allclose(given.double(), torch.tensor(expected, dtype=torch.float64), atol=1e-5)
        token = sampler.draw(prompt + answer, logits)
        assert token == max(range(8), key=expected.__getitem__)
        answer.append(token)
    assert len(set(answer)) > 1


@pytest.mark.parametrize("options", [{"frequency_penalty": -2.0, "presence_penalty": -2.0}, {"logit_bias": {20: 100.0}}])
def test_rows_and_stocks_generation_take_the_same_penalties(model, options):
    request, batch = GenerateRequest(max_new_tokens=12, **options), Batch(model, rows=1)
    row = through(batch, model.prepare("Hello"), request).row
    found = model.answer("Hello", max_new_tokens=12, **options).token_ids
    assert to_the_end(batch, [row]) == [found] != [model.answer("Hello", max_new_tokens=12).token_ids]


def test_a_bias_of_a_token_that_the_model_has_not_is_refused(model):
    error = refused(model.answer, "Hello", max_new_tokens=2, logit_bias={10**6: 1.0}, match="token ids are below")
    assert error.field == "logit_bias"


# Rows, whose steps a GPU captures: they read a fixed number of places, so that sums are cut up another way than stock's.


def by_rows(model, inputs, count, penalty):
    """Return the answer's tokens as one row of a batch gives them: from captured steps on a GPU."""
    batch = Batch(model, rows=1, decode="auto" if DEVICE != "cpu" else "eager")
    assert batch.steps.is_captured == (DEVICE != "cpu"), batch.steps.fallbacks
    row = through(batch, inputs, GenerateRequest(max_new_tokens=count, repetition_penalty=penalty)).row
    return list(to_the_end(batch, [row])[0])


def check_parts_only_at_a_tie(found, stock_model, inputs, penalty, exact_model=None):
    """Check that tokens are stock's greedy ones, up to a place where stock cannot tell the two tokens apart, if there is one.

    The noise there is stock's own: the largest difference, up to that place, between any two of its scores computed token
    by token with a cache, in one pass, in one pass of several rows, and by the same weights in float32 (`exact_model`: on a
    GPU the others may all agree to the bit, and still be rounded). Each of the two tokens may be off by that much.
    """
    options = {} if penalty is None else {"repetition_penalty": penalty}
    with torch.no_grad():
        said = stock_model.generate(
            **inputs.tensors, max_new_tokens=len(found), do_sample=False, output_logits=True, return_dict_in_generate=True,
            **options,
        )  # fmt: skip
    expected = said.sequences[0, inputs.prompt_tokens :].tolist()
    place = next((at for at, pair in enumerate(zip(found, expected, strict=False)) if pair[0] != pair[1]), None)
    if place is None:
        assert found == expected
        return None
    given = teacher_forcing.extended(inputs.tensors, expected[:place])
    logits = {"token by token": torch.cat(said.logits[: place + 1]).float()}
    for rows in (1, 2, 3):
        many = {name: torch.cat([tensor] * rows) for name, tensor in given.items()}
        logits[f"{rows} rows at once"] = teacher_forcing.forward(stock_model, many)[0][0, inputs.prompt_tokens - 1 :].float()
    if exact_model is not None:
        logits["in float32"] = teacher_forcing.forward(exact_model, given)[0][0, inputs.prompt_tokens - 1 :]
    orders = {name: penalized(runs, given["input_ids"], inputs.prompt_tokens, penalty) for name, runs in logits.items()}
    floor = NoiseFloor(noise_between("parted", orders))
    apart = float(orders["token by token"][place, expected[place]] - orders["token by token"][place, found[place]])
    assert apart <= 2 * floor.max_abs, f"token {place}: {apart} apart, stock from itself {floor.max_abs}"
    return place


def penalized(logits, ids, prompt_tokens, penalty):
    """Return the scores [n, V] of the answer's places as generate draws from them."""
    if penalty is None:
        return logits
    process = transformers.RepetitionPenaltyLogitsProcessor(penalty)
    return torch.cat([process(ids[:, : prompt_tokens + at], row[None]) for at, row in enumerate(logits)])


QUESTIONS = {
    "text": ("Hello", {}, None), "penalty": ("Hello", {}, 3.0),
    "media": ("What is it?", {"image": talking.png(), "audio": talking.wav()}, None),
}  # fmt: skip


@pytest.fixture(scope="module", params=["bfloat16", "float32"])
def both(request, folder):
    """In float32 stock is within 1e-5 of itself: there every token has to be its own."""
    plan = trimtab.plan(folder, quant="none", dtype=request.param, device=DEVICE, context=512, audio_s=1.0, place={"*": "stream"})
    exact = stock.load_stock(folder, device=DEVICE, dtype=torch.float32)
    rounded = stock.load_stock(folder, device=DEVICE) if request.param == "bfloat16" else exact
    with trimtab.load(plan, decode="auto") as loaded:
        yield request.param, loaded, rounded, exact


@pytest.mark.parametrize("name", QUESTIONS)
def test_rows_part_from_stock_only_where_two_tokens_are_a_tie(both, name):
    dtype, model, stock_model, exact = both
    text, media, penalty = QUESTIONS[name]
    inputs = model.prepare(text, **media)
    place = check_parts_only_at_a_tie(by_rows(model, inputs, 16, penalty), stock_model, inputs, penalty, exact)
    assert place is None or dtype == "bfloat16"


@pytest.mark.parametrize("place", [0, 9])
def test_a_wrong_token_is_no_tie(both, place):
    """The check above has to be able to fail: another token than the likeliest is planted at one place."""
    _, model, stock_model, exact = both
    inputs = model.prepare("Hello")
    found = stock_tokens(stock_model, inputs, 16)
    given = teacher_forcing.extended(inputs.tensors, found[:place])
    found[place] = int(stock.logits(stock_model, given)[0, -1].topk(100).indices[-1])
    with pytest.raises(AssertionError, match=f"token {place}"):
        check_parts_only_at_a_tie(found, stock_model, inputs, None, exact)


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


def test_text_that_waits_for_the_rest_of_a_stop_text_is_given_out_at_the_end(model, monkeypatch):
    whole = model.answer("Hello", max_new_tokens=8).text
    assert model.answer("Hello", max_new_tokens=8, stop=(whole[-1] + "never",)).text == whole
    with model.answering(None):
        batch = model.kept.take(model, 1)
    monkeypatch.setattr(type(model), "rows", lambda self: batch)
    assert model.answer("Hello", max_new_tokens=8, stop=(whole[-1] + "never",)).text == whole


def test_a_prompt_that_is_too_long_is_refused_before_any_work(model, monkeypatch):
    monkeypatch.setattr(type(model.hf_model), "forward", lambda *a, **k: pytest.fail("work was done"))
    error = refused(model.generate, "Hello", max_new_tokens=510, match="more than the context of 512")
    assert error.field == "prompt"


def test_an_answer_without_a_given_length_has_what_the_prompt_leaves(model):
    for prompt, most in (([5] * 510, 2), ([5] * 300, 212), ("Hello", 256)):
        assert Generation(model, model.prepare(prompt), GenerateRequest()).request.max_new_tokens == most
    answer = model.answer([5] * 510)
    assert (len(answer.token_ids), answer.finish_reason, answer.max_new_tokens) == (2, "length", 2)
    (other,) = model.batch([[5] * 510])
    assert (other.token_ids, other.max_new_tokens) == (answer.token_ids, 2)
    with pytest.raises(RequestError, match="the prompt has 512 tokens"):
        model.generate([5] * 512)


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
    kind = type(model.hf_model)  # transformers checks arguments against the signature
    monkeypatch.setattr(kind, "forward", functools.wraps(kind.forward)(raising(ZeroDivisionError("planted"))))
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
    with trimtab.load(folder, quant="none", dtype="float32", device=DEVICE, context=512, audio_s=1.0, images=0) as loaded:
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
    assert "".join(pieces) == TEXT and all("\ufffd" not in piece for piece in pieces)


class Parts:
    """A tokenizer of given bytes. A decoder with a fallback shows a run of byte tokens that is no text as one U+FFFD a byte."""

    def __init__(self, parts, *, falls_back=False):
        self.parts, self.falls_back = parts, falls_back

    def decode(self, ids, **options):
        if not self.falls_back:
            return b"".join(self.parts[token] for token in ids).decode("utf-8", errors="replace")
        found = ""
        for is_byte, run in itertools.groupby((self.parts[token] for token in ids), lambda part: len(part) == 1 and part > b"\x7f"):
            data = b"".join(run)
            with contextlib.suppress(UnicodeDecodeError):
                found, data = found + data.decode(), b""
            found += "\ufffd" * len(data) if is_byte else ""
        return found


EMOJI = st.text(st.sampled_from("aé日😀👩\u200d\ufffd"), max_size=24) | st.text(max_size=8)


@st.composite
def cut(draw, data):
    """Return bytes cut at random places, or everywhere inside characters."""
    inside = {place for place, byte in enumerate(data) if byte & 0xC0 == 0x80}
    places = sorted(draw(st.sets(st.integers(1, max(1, len(data) - 1))) | st.just(inside)))
    return [data[one:end] for one, end in itertools.pairwise([0, *places, len(data)]) if one < end]


@pytest.mark.parametrize("falls_back", [False, True])
@given(given_data=st.data(), text=EMOJI, stop=EMOJI)
def test_tokens_that_end_inside_characters_lose_none(falls_back, given_data, text, stop):
    parts = given_data.draw(cut(text.encode()))
    if falls_back:  # where U+FFFD is a token of its own
        text = text.replace("\ufffd", "")
        parts = [part for one in text for part in ([bytes([value]) for value in one.encode()] if one > "\x7f" else [one.encode()])]
    tokenizer, ids = Parts(parts, falls_back=falls_back), range(len(parts))
    begun = given_data.draw(st.integers(0, len(parts)))
    shown = [b"".join(parts[:count]).decode("utf-8", "ignore") for count in range(len(parts) + 1)]
    for before, whole in (([], text), (ids[:begun], text.removeprefix(shown[begun]))):
        if "\ufffd" in text and before:
            continue  # a prompt's own U+FFFD looks like a part of a character
        answer = AnswerText(detokenizer := Detokenizer(tokenizer, before=before), ())
        pieces = []
        for token in ids[len(before) :]:
            assert answer.place_of(parts[token]) == len(shown[token]) - len(shown[begun]) * bool(before)
            pieces.append(answer.take(token))
        assert "".join([*pieces, answer.end()]) == whole and detokenizer.length == len(whole)
        assert "\ufffd" in text or "\ufffd" not in "".join(pieces)
    if stop:
        stopping = Detokenizer(tokenizer, (stop,))
        found = "".join(stopping.push(token) if not stopping.stopped else "" for token in ids) + stopping.finish()
        assert found == text.split(stop)[0]


@given(
    given_data=st.data(), data=st.binary(max_size=40) | st.lists(st.sampled_from([*"é😀".encode(), 255]), max_size=40).map(bytes)
)
def test_bytes_that_are_no_text_are_shown_once_none_can_complete_them(given_data, data):
    parts = given_data.draw(cut(data))
    detokenizer = Detokenizer(Parts(parts))
    pieces = [detokenizer.push(token) for token in range(len(parts))]
    assert all(
        len("".join(pieces[: end + 6])) >= len(b"".join(parts[:end]).decode("utf-8", "replace")) for end in range(len(parts) - 6)
    )
    assert "".join(pieces) + detokenizer.finish() == data.decode("utf-8", "replace")
    assert detokenizer._from >= len(parts) - 16  # a long answer is not decoded again at every step


@pytest.mark.parametrize("last", [b"\xf0\x9f", "\ufffd".encode()])
def test_a_prompts_last_character_that_no_token_completes_is_none_of_the_answer(last):
    detokenizer = Detokenizer(Parts([b"a", last, b"b"]), before=[0, 1])
    assert detokenizer.push(2) == "b" and detokenizer.length == 1


@functools.cache
def pieces_of(kind):
    """Return a tokenizer whose decoder is Llama 2's ("bytes beside words") or GPT-2's ("letters for bytes"), and its tokens."""
    if kind == "letters for bytes":
        words = ["a", "\u0120the", "\u00f0\u0141\u013a", "\u0122", "\u00c3\u00a9"]
        decoder = decoders.ByteLevel()
    else:
        words = ["a", "\u2581the", "<0xF0>", "<0x9F>", "\u00e9"]
        decoder = decoders.Sequence(
            [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
        )
    backend = tokenizers.Tokenizer(models.WordLevel({word: place for place, word in enumerate(words)}, unk_token="a"))
    backend.decoder = decoder
    return transformers.PreTrainedTokenizerFast(tokenizer_object=backend)


@pytest.mark.parametrize(
    ("kind", "part", "other"), [("letters for bytes", b"\xf0\x9f\x98", b"\x80"), ("bytes beside words", b"\xf0", b"\x9f")]
)
def test_a_single_token_has_its_space_and_its_bytes(kind, part, other):
    texts = TokenTexts(pieces_of(kind))
    assert [texts.bytes_of(token) for token in range(5)] == [b"a", b" the", part, other, "é".encode()]
    assert [texts.text_of(token) for token in range(5)] == ["a", " the", "\ufffd", "\ufffd", "é"]


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
    assert "".join(detokenizer.push(byte) for byte in b"a STO") == "a " and detokenizer.finish() == "STO"


class Pieces:
    """A tokenizer whose decoder drops the space before a first token, as Llama 2's and Mistral's do."""

    def decode(self, ids, **options):
        return "".join(WORDS[token] for token in ids).removeprefix(" ")


WORDS = [" It", " is", " red", "dish"]


def test_a_continued_text_gets_the_space_before_the_first_new_token():
    detokenizer = Detokenizer(Pieces(), before=[0, 1])
    assert [detokenizer.push(token) for token in (2, 3)] == [" red", "dish"] and detokenizer.finish() == ""
    assert Detokenizer(Pieces()).push(2) == "red"


def test_the_demo_tokenizer_round_trips_through_pieces():
    tokenizer = talking._tokenizer()
    ids = tokenizer(TEXT, add_special_tokens=False).input_ids
    detokenizer = Detokenizer(tokenizer)
    assert "".join(detokenizer.push(token) for token in ids) + detokenizer.finish() == tokenizer.decode(ids)


class Counting(Pieces):
    """A tokenizer with a token without text, which counts what it decodes."""

    def __init__(self):
        self.most = 0

    def decode(self, ids, **options):
        self.most = max(self.most, len(ids))
        return "".join("" if token == 9 else WORDS[token] for token in ids).removeprefix(" ")


def test_tokens_without_a_text_are_not_decoded_again_at_every_step():
    tokenizer = Counting()
    detokenizer = Detokenizer(tokenizer)
    shown = [detokenizer.push(token) for token in [0, 1, *[9] * 1000, 2, 9, 3]]
    assert "".join(shown) + detokenizer.finish() == "It is reddish"
    assert tokenizer.most < 100


@pytest.mark.parametrize("hides_all", [True, False])
def test_a_fast_tokenizer_is_asked_directly_and_says_what_decode_says(hides_all, monkeypatch):
    tokenizer = talking._tokenizer()
    ids = [*tokenizer(TEXT, add_special_tokens=False).input_ids, tokenizer.eos_token_id]
    hidden = None if hides_all else hidden_ids(tokenizer, [tokenizer.eos_token])
    expected = tokenizer.decode(ids, skip_special_tokens=hides_all)
    assert (tokenizer.eos_token in expected) is not hides_all
    detokenizer = Detokenizer(tokenizer, hidden=hidden)
    monkeypatch.setattr(type(tokenizer), "decode", None)
    assert "".join(detokenizer.push(token) for token in ids) + detokenizer.finish() == expected


def test_a_tokenizer_with_a_decoder_of_its_own_is_asked_through_it():
    class Own(type(talking._tokenizer())):
        def decode(self, token_ids, **options):
            return "own" * len(token_ids)

    tokenizer = copy.deepcopy(talking._tokenizer())  # that of other tests stays what it is
    tokenizer.__class__ = Own
    assert Detokenizer(tokenizer).push(7) == "own"
