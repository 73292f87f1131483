"""Tokens that a checkpoint's generation_config.json suppresses: stock's `generate` with that file has the same answers."""

import json

import pytest
import torch

import trimtab
from tests import pico
from tests.engine.batch.test_batch import through, to_the_end
from tests.engine.decode.test_graphs import replayed  # noqa: F401 - a fixture
from tests.stock import load_stock
from trimtab.checkpoint.folder import unapplied_rules
from trimtab.cli.flags.opening import say_fallbacks
from trimtab.cli.main import main
from trimtab.engine.batch.batch import Batch
from trimtab.engine.loader.transformers_model import read_generation_config
from trimtab.errors import CheckpointError
from trimtab.request import GenerateRequest

PROMPT, TOKENS = [2, 10, 40, 60, 80, 100, 120], 12
DRAWN = {"temperature": 1.3, "seed": 5}


def of_stock(folder, **options):
    """Return the answer of `generate`, whose values of sampling are these and none of its class."""
    model = load_stock(folder, dtype=torch.float32)
    ids = torch.tensor([PROMPT])
    torch.manual_seed(DRAWN["seed"])
    drawn = {"do_sample": True, "temperature": DRAWN["temperature"], "top_k": 0, "top_p": 1.0} if options else {"do_sample": False}
    return tuple(
        model.generate(input_ids=ids, attention_mask=ids * 0 + 1, max_new_tokens=TOKENS, **drawn)[0, len(PROMPT) :].tolist()
    )


def with_rules(folder, **rules):
    pico.build("llama", folder)
    (folder / "generation_config.json").write_text(json.dumps({"bos_token_id": 2, "eos_token_id": 1, "pad_token_id": 0, **rules}))
    return folder


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A folder whose rules change the answers' first, second and later tokens, and what stock answers."""
    folder = tmp_path_factory.mktemp("suppressed") / "llama"
    free = [*of_stock(with_rules(folder)), *of_stock(folder, **DRAWN)]
    rules = {"suppress_tokens": [free[0], free[TOKENS], -1, 10**6], "begin_suppress_tokens": [], "bad_words_ids": [[free[2]], [1]]}
    for options in ({}, DRAWN):
        rules["begin_suppress_tokens"].append(of_stock(with_rules(folder, **rules), **options)[0])
    wanted = {name: of_stock(with_rules(folder, **rules), **options) for name, options in (("greedy", {}), ("drawn", DRAWN))}
    assert not set(rules["suppress_tokens"]) & {*wanted["greedy"], *wanted["drawn"]}
    return folder, rules, wanted


def loaded(folder, **options):
    return trimtab.load(trimtab.plan(str(folder), quant="none", dtype="float32", device="cpu", context=64, **options))


def test_answers_and_rows_are_stocks(made):
    folder, rules, wanted = made
    biased = {"logit_bias": {rules["suppress_tokens"][0]: 100.0}}
    with loaded(folder, batch=3) as model:
        for name, options in (("greedy", {}), ("drawn", DRAWN)):
            options = {**options, "max_new_tokens": TOKENS}
            assert model.answer(PROMPT, **options).token_ids == wanted[name]
            assert model.answer(PROMPT, **options, **biased).token_ids == wanted[name]
            requests = [{"prompt": PROMPT, **one} for one in (options, {**options, **biased}, {**options, "logprobs": 2})]
            answers = list(model.batch(requests))
            assert [answer.token_ids for answer in answers] == [wanted[name]] * 3
        logits = model.logits(PROMPT)[-1].float()
        (top, *_), first = answers[2].logprobs[0].top, torch.log_softmax(logits, -1)
        assert top[0] == rules["suppress_tokens"][0] and top[1] == pytest.approx(float(first.max()), abs=1e-4)


@pytest.mark.parametrize("options", [{}, {"batch_invariant": True}])
@pytest.mark.parametrize("begins", [True, False])
@pytest.mark.parametrize("decode", ["graph", "fused"])
def test_captured_steps_and_constrained_rows_obey_too(made, tmp_path, decode, begins, options, replayed):  # noqa: F811
    folder, rules, wanted = made
    if not begins:  # greedy rows take the step's own tokens
        rules = {"suppress_tokens": [*rules["suppress_tokens"], *rules["begin_suppress_tokens"]]}
        folder = with_rules(tmp_path, **rules)
        wanted = {"greedy": of_stock(folder)}
    with loaded(folder, batch=2, **options) as model:
        batch = Batch(model, rows=2, decode=decode)
        request, constraints = GenerateRequest(max_new_tokens=TOKENS), (None, lambda token_ids, scores: scores)
        rows = [through(batch, model.prepare(PROMPT), request, constraint=one).row for one in constraints]
        assert to_the_end(batch, rows) == [wanted["greedy"]] * 2
        assert rows[0].sampler.is_greedy is not begins and (replayed or options)


def test_other_rules_are_said(tmp_path, capsys):
    assert unapplied_rules({"repetition_penalty": 1.0, "min_length": 0, "suppress_tokens": [5], "bad_words_ids": [[5]]}) == {}
    folder = with_rules(tmp_path, repetition_penalty=1.1, no_repeat_ngram_size=3, bad_words_ids=[[5], [6, 7]])
    why = "requests repetition_penalty 1.1, no_repeat_ngram_size 3, bad_words_ids: not applied; repetition_penalty can be given"
    with loaded(folder) as model:
        assert [(one.what, why in one.why) for one in model.fallbacks] == [("generation_config.json", True)]
        say_fallbacks(model)
        assert capsys.readouterr().err.startswith(f"generation_config.json: {why}")
    assert main(["plan", str(folder), "--device", "cpu", "--context", "64"]) == 0
    assert why in capsys.readouterr().err


@pytest.mark.parametrize("name, value", [("suppress_tokens", 5), ("begin_suppress_tokens", ["a"]), ("bad_words_ids", [5])])
def test_rules_that_are_no_tokens_are_refused(tmp_path, name, value):
    with pytest.raises(CheckpointError, match="must be token ids|cannot be read"):
        read_generation_config(with_rules(tmp_path, **{name: value}))
