"""Requests that answer together: every row says what it says alone, whatever the others do."""

from dataclasses import replace

import pytest
import torch

import trimtab
from tests import long_runs, talking
from tests.lent import DEVICE, lent
from tests.raised import raised, raising, refused
from trimtab.demo.demo import ADAPTERS
from trimtab.demo.demo import FOLDER as DEMO
from trimtab.engine.batch import request as hf_generate
from trimtab.engine.batch.batch import Batch
from trimtab.engine.kv import kv_cache
from trimtab.engine.prefill.prefill import PrefillRunner
from trimtab.errors import DeviceError, RequestError
from trimtab.request import GenerateRequest

# Lengths on both sides of the families' sliding window of 8 tokens.
PROMPTS = [list(range(5, 5 + count)) for count in (3, 20, 11)]
# Attention over masked places and over exactly as many adds in another order: a float32 step of a tiny model differs by
# a few rounding steps of values near 1 (largest seen over all families: 4e-6).
STEP_TOLERANCE = 1e-4


def through(batch, inputs, request, **options):
    """Put a prompt through the model and into a row."""
    return batch.join(batch.begin(inputs, request, **options).compute())


def to_the_end(batch, rows):
    """Step until every row has finished; rows leave as they do."""
    while batch.active:
        batch.step()
        for row in [row for row in batch.active if row.finish is not None]:
            batch.leave(row)
    return [tuple(row.answer_ids) for row in rows]


def check_alone(model, tokens):
    """Return the batch of rows that said what each says alone."""
    alone = [model.answer(prompt, max_new_tokens=tokens).token_ids for prompt in PROMPTS]
    batch = Batch(model, rows=4)
    request = GenerateRequest(max_new_tokens=tokens)
    rows = [through(batch, model.prepare(prompt), request).row for prompt in PROMPTS]
    # The first step's logits against the model's own, teacher-forced on the same tokens.
    expected = torch.stack([model.logits(row.token_ids)[-1] for row in rows])
    assert (batch.logits().cpu() - expected).abs().max() < STEP_TOLERANCE * expected.abs().max()
    batch.cache.positions[:3] -= 1  # the step was only looked at: do it again
    assert to_the_end(batch, rows) == alone
    return batch


@pytest.mark.parametrize("family", long_runs.FAMILIES)
def test_rows_of_every_family_say_what_they_say_alone(family):
    with lent(family) as model:
        check_alone(model, 24)


@pytest.fixture(scope="module")
def model():
    adapters = {name: DEMO / "adapters" / name for name in ADAPTERS}
    plan = trimtab.plan(DEMO / "base", quant="none", dtype="float32", adapters=adapters, context=384, audio_s=1.0, device=DEVICE)
    with trimtab.load(plan) as loaded:
        yield loaded


QUESTIONS = [
    (None, {"image": DEMO / "images" / "image_1.png"}, "What do you see?"),
    ("style", {}, "Hello"),
    ("specialist", {"image": DEMO / "images" / "image_2.png"}, "What do you see?"),
    ("rslora-dora", {"image": DEMO / "images" / "image_1.png"}, "What do you see?"),
    ("style", {"audio": DEMO / "sounds" / "audio_1.wav"}, "What do you hear?"),
]


def test_pictures_sounds_and_adapters_are_mixed_in_one_batch(model):
    request = GenerateRequest(max_new_tokens=32)
    alone = [model.answer(text, **media, adapter=name, max_new_tokens=32) for name, media, text in QUESTIONS]
    batch = Batch(model, rows=len(QUESTIONS))
    rows = [through(batch, model.prepare(text, **media), request, adapter=name).row for name, media, text in QUESTIONS]
    assert to_the_end(batch, rows) == [answer.token_ids for answer in alone]
    assert [row.finish for row in rows] == [answer.finish_reason for answer in alone]
    assert len({answer.token_ids for answer in alone}) == len(alone)


def test_a_row_that_leaves_and_one_that_joins_change_no_other(model):
    alone = {name: model.answer("What is red?", adapter=name, max_new_tokens=12).token_ids for name in (None, *ADAPTERS)}
    request = GenerateRequest(max_new_tokens=12)
    batch = Batch(model, rows=3)
    inputs = model.prepare("What is red?")
    first, second, third = (through(batch, inputs, request, adapter=name).row for name in (None, "style", "specialist"))
    batch.step()
    batch.leave(first)  # the last row moves into its place
    assert [(row.number, row) for row in batch.active] == [(0, third), (1, second)]
    batch.step()
    late = through(batch, inputs, request, adapter="rslora-dora").row
    # Between two pieces of a prompt the others go on.
    prompt = batch.begin(inputs, request)
    prompt.step()
    to_the_end(batch, [])
    assert tuple(second.answer_ids) == alone["style"] and tuple(third.answer_ids) == alone["specialist"]
    assert tuple(late.answer_ids) == alone["rslora-dora"] and tuple(first.answer_ids) == alone[None][:2]


def test_a_prompt_goes_through_in_pieces(model, monkeypatch):
    prompt_ids = model.prepare("Tell me about red and blue and green and yellow things").token_ids
    whole = model.answer(list(prompt_ids), max_new_tokens=8).token_ids
    monkeypatch.setattr(type(model), "prefill_tokens", 5)
    batch = Batch(model, rows=1)
    batch.prompts = PrefillRunner(batch, "eager")
    prompt = batch.begin(model.prepare(list(prompt_ids)), GenerateRequest(max_new_tokens=8))
    steps = 1
    while not prompt.step():
        assert prompt.done_tokens == 5 * steps
        steps += 1
    assert steps == -(-len(prompt_ids) // 5)
    assert to_the_end(batch, [batch.join(prompt).row]) == [whole]


@pytest.mark.parametrize("options", [
    {"temperature": 0.8, "seed": 3},
    {"temperature": 1.5, "seed": 4, "top_k": 20, "top_p": 0.9, "min_p": 0.01},
    {"temperature": 1.0, "seed": 5, "repetition_penalty": 1.3}, {"repetition_penalty": 1.5},
])  # fmt: skip
def test_a_seed_draws_what_it_draws_alone(model, options):
    alone = model.answer("Hello", max_new_tokens=16, **options).token_ids
    batch = Batch(model, rows=2)
    request = GenerateRequest(max_new_tokens=16, **options)
    noise = through(batch, model.prepare("Hi"), GenerateRequest(max_new_tokens=16, temperature=2.0)).row
    assert to_the_end(batch, [noise, through(batch, model.prepare("Hello"), request).row])[1] == alone


SAMPLERS = [
    {"temperature": 0.7}, {"temperature": 1.0, "top_k": 3}, {"temperature": 1.5, "top_p": 0.9, "min_p": 0.01},
    {"temperature": 0.8, "repetition_penalty": 1.3}, {"repetition_penalty": 1.3}, {},
]  # fmt: skip


@pytest.mark.parametrize("options", SAMPLERS)
def test_a_token_that_nobody_waits_for_is_the_one_of_multinomial(options):
    """The same generator draws the same token from transformers' scores, whatever was said before."""
    request = GenerateRequest(seed=11 if options.get("temperature") else None, **options)
    sampler, reference = hf_generate.Sampler(request, torch.device(DEVICE)), torch.Generator(DEVICE).manual_seed(11)
    processors = hf_generate.Sampler(request, torch.device(DEVICE))._processors
    said = [3, 5]
    for step in range(200):
        logits = torch.randn(500, generator=torch.Generator().manual_seed(step)).mul(3).to(DEVICE)
        scores = processors(torch.tensor([said], device=DEVICE), logits[None].clone())
        expected = scores.argmax()
        if options.get("temperature"):
            expected = torch.multinomial(torch.softmax(scores, -1), 1, generator=reference)
        found = sampler.queue(said, logits)
        assert found.shape == () and found.device.type == torch.device(DEVICE).type and int(found) == int(expected)
        said.append(int(found))


def test_rows_that_are_drawn_together_get_the_tokens_that_they_get_alone(monkeypatch):
    """Samplers of one form in pieces of `MOST_TOGETHER`, places with gaps among them, and others between them."""
    monkeypatch.setattr(hf_generate, "MOST_TOGETHER", 4)
    forms = [{"temperature": 1.0}] * 9 + [SAMPLERS[1], SAMPLERS[3], SAMPLERS[2], SAMPLERS[1], SAMPLERS[2], {"temperature": 1.0}]
    requests = [GenerateRequest(seed=number, **form) for number, form in enumerate(forms)]
    one, all_ = ([hf_generate.Sampler(request, torch.device(DEVICE)) for request in requests] for _ in range(2))
    logits = torch.randn(len(forms), 3000, generator=torch.Generator().manual_seed(0)).mul(3).to(DEVICE)
    logits[3], chosen = float("-inf"), torch.zeros(len(forms), dtype=torch.long, device=DEVICE)
    chosen[5] = -1  # its logits are no numbers
    pieces = []
    real = hf_generate._drawn
    monkeypatch.setattr(hf_generate, "_drawn", lambda samplers, scores: pieces.append(len(samplers)) or real(samplers, scores))
    for _ in range(3):
        alone = [int(sampler.queue([3, 5], logits[at])) for at, sampler in enumerate(one)]
        pieces.clear()
        found = chosen.clone()
        assert hf_generate.queue_draws([hf_generate.Draw(s, [3, 5], at) for at, s in enumerate(all_)], logits, found) == {}
        assert found.tolist() == [*alone[:5], -1, *alone[6:]] and alone[3] == -1
        assert sorted(pieces) == [1, 1, 1, 2, 2, 4, 4]


def test_rows_that_have_no_room_together_are_drawn_one_by_one(monkeypatch):
    samplers = [hf_generate.Sampler(GenerateRequest(temperature=1.0, seed=at), torch.device(DEVICE)) for at in range(3)]
    logits, found = torch.randn(3, 48, device=DEVICE), torch.zeros(3, dtype=torch.long, device=DEVICE)
    real = torch.empty_like
    refuse = lambda like: real(like) if len(like) == 1 else (_ for _ in ()).throw(torch.OutOfMemoryError("full"))  # noqa: E731
    monkeypatch.setattr(torch, "empty_like", refuse)
    assert hf_generate.queue_draws([hf_generate.Draw(s, [1], at) for at, s in enumerate(samplers)], logits, found) == {}
    again = [hf_generate.Sampler(GenerateRequest(temperature=1.0, seed=at), torch.device(DEVICE)) for at in range(3)]
    assert found.tolist() == [int(sampler.queue([1], logits[at])) for at, sampler in enumerate(again)]


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_no_token_is_drawn_from_what_is_no_distribution(value):
    sampler = hf_generate.Sampler(GenerateRequest(temperature=1.0, seed=1), torch.device(DEVICE))
    logits = torch.full((8,), value, device=DEVICE)
    assert int(sampler.queue([1], logits)) == -1
    with pytest.raises(DeviceError, match="every token has probability 0"):
        sampler.draw([1], logits)


def test_a_row_that_cannot_be_drawn_for_stops_no_other(model, monkeypatch):
    request = GenerateRequest(max_new_tokens=4, temperature=0.7, seed=3)
    alone = model.answer("Hello", max_new_tokens=4, temperature=0.7, seed=3).token_ids
    batch = Batch(model, rows=2)
    bad, good = (through(batch, model.prepare("Hello"), request).row for _ in range(2))
    monkeypatch.setattr(bad.sampler, "alike", None)
    monkeypatch.setattr(bad.sampler, "queue", lambda *_: (_ for _ in ()).throw(RuntimeError("broken")))
    drawn = batch.step()
    assert [found.row for found in drawn] == [good] and bad.finish == "error" and str(bad.error) == "broken"
    batch.leave(bad)
    assert to_the_end(batch, [good]) == [alone]


def test_logprobs_are_the_models_own_before_temperature(model):
    inputs = model.prepare("Hello")
    batch = Batch(model, rows=1)
    request = GenerateRequest(max_new_tokens=4, temperature=5.0, top_k=2, seed=1)
    drawn = [through(batch, inputs, request, top_logprobs=3)]
    drawn += [found for _ in range(2) for found in batch.step()]
    expected = torch.log_softmax(model.logits(drawn[0].row.token_ids), dim=-1)[inputs.prompt_tokens - 1 :]
    for place, found in enumerate(drawn):
        # Two float32 routes to the same logits, see STEP_TOLERANCE.
        assert found.logprob == pytest.approx(float(expected[place, found.token_id]), abs=1e-3)
        assert len(found.top) == 3 and found.top[0][1] == max(value for _, value in found.top)


def test_a_constraint_decides_which_tokens_can_be_drawn(model):
    def only_seven(token_ids, scores):
        return torch.where(torch.arange(len(scores), device=scores.device) == 7, scores, -torch.inf)

    batch = Batch(model, rows=1)
    row = through(batch, model.prepare("Hello"), GenerateRequest(max_new_tokens=3), constraint=only_seven).row
    assert to_the_end(batch, [row]) == [(7, 7, 7)]


class PanicError(BaseException):
    """As a panic of llguidance, which is no Exception."""


@pytest.mark.parametrize("error", [PanicError("wrong"), KeyboardInterrupt()])
def test_a_panic_of_a_constraint_ends_its_row_and_ctrl_c_ends_the_step(model, error):
    batch = Batch(model, rows=2)
    inputs, request = model.prepare("Hello"), GenerateRequest(max_new_tokens=4)
    row, other = (through(batch, inputs, request).row for _ in range(2))

    row.constraint = raising(error)
    if isinstance(error, KeyboardInterrupt):
        with pytest.raises(KeyboardInterrupt):
            batch.step()
    else:
        assert [drawn.row for drawn in batch.step()] == [other]
        assert row.error is error and row.finish == "error" and other.error is None


def test_a_poisoned_row_harms_no_other(model):
    """A row whose states are not numbers, and what it leaves behind, stay its own."""
    alone = model.answer("Hello", max_new_tokens=8).token_ids
    request = GenerateRequest(max_new_tokens=8)
    batch = Batch(model, rows=2)
    bad = through(batch, model.prepare("Hi"), request).row
    good = through(batch, model.prepare("Hello"), request).row
    for layer in batch.cache.with_memory().values():
        layer.keys[bad.number], layer.values[bad.number] = float("nan"), float("nan")
    batch.step()
    batch.leave(bad)
    next_row = through(batch, model.prepare("Hello"), request).row
    assert to_the_end(batch, [good, next_row]) == [alone, alone]


def test_what_does_not_fit_is_refused_before_any_work(model):
    batch = Batch(model, rows=1)
    inputs = model.prepare("Hello")
    assert refused(lambda: batch.begin(inputs, GenerateRequest(max_new_tokens=1000))).field == "prompt"
    error = refused(lambda: batch.begin(inputs, GenerateRequest(), adapter="nobody"))
    assert (error.field, error.allowed) == ("adapter", tuple(model.adapters))
    assert "not complete" in str(refused(lambda: batch.join(batch.begin(inputs, GenerateRequest()))))
    row = through(batch, inputs, GenerateRequest(max_new_tokens=2)).row
    error = refused(lambda: through(batch, inputs, GenerateRequest(max_new_tokens=2)))
    assert (error.field, error.value) == ("rows", 1)
    batch.leave(row)
    with pytest.raises(RequestError):
        batch.leave(row)
    with pytest.raises(RequestError):
        Batch(model, rows=0)


def test_a_family_with_another_kind_of_state_is_refused_by_name(model, monkeypatch):
    def strange_cache(hf_model, kv="full"):
        cache = kv_cache.DynamicCache(config=hf_model.config.get_text_config())
        cache.layers[1].__class__ = type("Strange", (type(cache.layers[1]),), {})
        return cache

    monkeypatch.setattr(kv_cache, "prompt_cache", strange_cache)
    monkeypatch.setattr(model, "anatomy", replace(model.anatomy, prompts_unsupported="layer 1 keeps a Strange"))
    batch = Batch(model, rows=1)
    error = raised(DeviceError, lambda: through(batch, model.prepare("Hello"), GenerateRequest(max_new_tokens=2)))
    assert "layer 1 keeps a Strange" in str(error)
    assert batch.free_rows == 1


def test_a_talking_model_with_random_weights_agrees_too(tmp_path):
    folder = talking.build_gemma4(tmp_path)
    # In float32: scores of random weights in 16 bits can be equal, and both ways sum in another order.
    options = {"quant": "nf4-dq", "dtype": "float32", "place": {"*": "stream"}}
    with trimtab.load(folder, context=512, audio_s=1.0, device=DEVICE, **options) as model:
        media = {"image": talking.png(), "audio": talking.wav()}
        alone = model.answer("What is it?", **media, max_new_tokens=4).token_ids
        batch = Batch(model, rows=2)
        row = through(batch, model.prepare("What is it?", **media), GenerateRequest(max_new_tokens=4)).row
        assert to_the_end(batch, [row]) == [alone]
