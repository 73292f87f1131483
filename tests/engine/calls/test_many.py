"""What can be asked beside one answer: many prompts together, other threads, log-probabilities, hidden states, mixes."""

import asyncio
import gc
import inspect
import threading
import weakref
from dataclasses import replace

import numpy as np
import pytest
import torch
import transformers

import trimtab
from tests import pico, stock, waiting
from tests.long_runs import crossed
from tests.raised import refused
from trimtab import demo
from trimtab.api import PlanInputs, plan_request
from trimtab.engine.batch.batch import Batch
from trimtab.errors import CheckpointError, DeviceError, DoesNotFitError, RequestError
from trimtab.request import GenerateRequest

QUESTION = "Who are you?"
# One float32 step of a tiny model, computed in two orders (tests/engine/batch/test_batch.py says where it comes from).
TOLERANCE = 1e-4


@pytest.fixture(scope="module")
def model():
    adapters = {name: str(demo.ADAPTERS[name]) for name in ("style", "specialist")}
    with trimtab.load(
        demo.BASE, adapters=adapters, context=128, batch=3, images=2, audio_s=2.0, device="cpu", quant="none",
        dtype="float32", head="full",
    ) as loaded:  # fmt: skip
        yield loaded


REQUESTS = [
    {"prompt": QUESTION}, {"prompt": QUESTION, "adapter": "style"},
    {"prompt": "What is shown?", "image": str(demo.IMAGES[0]), "adapter": "specialist", "max_new_tokens": 5},
    {"prompt": "What is said?", "audio": str(demo.SOUNDS[0])}, {"prompt": QUESTION, "stop": ["trimtab"]},
    {"prompt": "Hello", "temperature": 1.0, "seed": 4}, {"prompt": [5, 6, 7]},
]  # fmt: skip


def alone(model, request):
    options = {"max_new_tokens": 10, **request}
    return model.answer(options.pop("prompt"), **options)


# Many prompts ---------------------------------------------------------------------------------------------------------


def test_answers_of_a_batch_are_those_given_alone_in_order_or_as_they_finish(model):
    expected = [alone(model, request) for request in REQUESTS]
    found = list(model.batch(REQUESTS, max_new_tokens=10))
    assert [answer.token_ids for answer in found] == [answer.token_ids for answer in expected]
    assert [answer.text for answer in found] == [answer.text for answer in expected]
    assert [answer.finish_reason for answer in found] == [answer.finish_reason for answer in expected]
    assert [answer.prompt_tokens for answer in found] == [answer.prompt_tokens for answer in expected]
    finished = dict(model.batch_as_finished(REQUESTS, rows=2, max_new_tokens=10))
    assert [finished[index].token_ids for index in range(len(REQUESTS))] == [answer.token_ids for answer in expected]
    assert model.adapter_store.selection.active() == (None,)


def test_short_answers_come_first_and_requests_are_read_as_rows_become_free(model):
    read = []

    def requests():
        for length in (12, 2, 2, 2):
            read.append(length)
            yield {"prompt": "Hello", "max_new_tokens": length, "temperature": 100.0, "seed": 1}

    answers = model.batch_as_finished(requests(), rows=2)
    assert next(answers)[0] == 1 and len(read) < 4 + 1
    assert [index for index, _ in answers] == [2, 3, 0]


def test_a_wrong_request_is_raised_or_takes_its_answers_place(model):
    wrong = [QUESTION, {"prompt": "x" * 4000}, {"prompt": "y", "adapter": "none"}, {"prompt": "z", "tempreature": 1}, {}, "Hi"]
    found = list(model.batch(wrong, errors="return", max_new_tokens=2))
    assert [getattr(one, "field", None) for one in found] == [
        None, "prompt", "adapter", "requests[3].tempreature", "requests[4]", None,
    ]  # fmt: skip
    assert "temperature" in found[3].allowed
    with pytest.raises(RequestError):
        list(model.batch(wrong, max_new_tokens=2))
    assert model.answer("Hi", max_new_tokens=2).token_ids == found[-1].token_ids  # nothing is left behind


@pytest.mark.parametrize(
    ("call", "field"),
    [(lambda m: m.batch("one"), "requests"), (lambda m: m.batch([], rows=0), "rows"), (lambda m: m.answers("x", 0), "n"),
     (lambda m: m.batch(["x"], errors="x"), "errors"), (lambda m: m.answers("x", 2), "n"), (lambda m: m.embed("x"), "texts"),
     (lambda m: m.embed([""]), "texts"), (lambda m: m.embed(["x"], pooling="max"), "pooling"), (lambda m: m.embed([]), "texts")],
)  # fmt: skip
def test_a_wrong_call_is_refused(model, call, field):
    assert refused(lambda: list(call(model))).field == field


def test_a_family_without_rows_is_answered_one_by_one(model, monkeypatch):
    expected = [alone(model, request).token_ids for request in REQUESTS[:2]]
    monkeypatch.setattr(model, "anatomy", replace(model.anatomy, capture_unsupported="layer 0 keeps a state"))
    assert [answer.token_ids for answer in model.batch(REQUESTS[:2], max_new_tokens=10)] == expected


_SMALL = {
    "vocab_size": 320, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "pad_token_id": 0,
}  # fmt: skip
_SEES = {"hidden_size": 64, "intermediate_size": 64, "image_size": 28, "patch_size": 14}
_PALI = {
    "vision_config": _SEES | {"model_type": "siglip_vision_model", "num_hidden_layers": 2, "num_attention_heads": 2},
    "image_token_index": 319, "projection_dim": 64,
}  # fmt: skip
UNPLACED = {
    "PaliGemma": ("moves the positions", _PALI | {"text_config": _SMALL | {"model_type": "gemma", "head_dim": 16}}),
    "PaliGemma 2": ("moves the positions", _PALI | {"text_config": _SMALL | {"model_type": "gemma2", "head_dim": 16}}),
    "Bart": (
        "BartDecoder takes no position_ids",
        {"d_model": 64, "decoder_layers": 2, "decoder_attention_heads": 4, "decoder_ffn_dim": 128, "is_decoder": True},
    ),
    "GPTNeo": (
        "its local layers",
        {"hidden_size": 64, "num_layers": 2, "num_heads": 4, "attention_types": [[["global", "local"], 1]], "window_size": 8},
    ),
    "Bloom": ("BloomModel takes no position_ids", {"hidden_size": 64, "n_layer": 2, "n_head": 4}),
    "Falcon": ("alibi", _SMALL | {"alibi": True}),
    "CpmAnt": (
        "CpmAntModel takes no position_ids",
        {"hidden_size": 64, "num_attention_heads": 4, "dim_head": 16, "dim_ff": 128, "num_hidden_layers": 2, "prompt_length": 4},
    ),
    "Mllama": (
        "attend to images",
        {
            "image_token_index": 319,
            "text_config": _SMALL | {
                "cross_attention_layers": [1], "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
            },
            "vision_config": _SEES | {
                "num_hidden_layers": 2, "num_global_layers": 1, "attention_heads": 2, "max_num_tiles": 1, "vision_output_dim": 128,
                "intermediate_layers_indices": [0], "supported_aspect_ratios": [[1, 1]],
            },
        },
    ),
    "Mpt": (None, {"d_model": 64, "n_layers": 2, "n_heads": 4, "max_seq_len": 64}),
}  # fmt: skip


@pytest.mark.parametrize("name", UNPLACED)
def test_rows_of_a_family_that_cannot_place_them_are_answered_one_by_one(name, tmp_path, monkeypatch):
    """And without the rule that names it, one step of two rows shows that they are wrong."""
    torch.manual_seed(0)
    why, options = UNPLACED[name]
    kind = name.removesuffix(" 2")
    sizes = {} if "text_config" in options else {"vocab_size": 320}
    config = getattr(transformers, f"{kind}Config")(**sizes | options)
    plain = getattr(transformers, f"{kind}For{'ConditionalGeneration' if 'vision_config' in options else 'CausalLM'}")(config)
    for value in plain.parameters():
        torch.nn.init.normal_(value, std=value.shape[-1] ** -0.5 if value.dim() > 1 else 0.1)
    plain.save_pretrained(tmp_path)
    prompts = [[5, 9, 77, 31, 200, 14, 8], [5, 9, 77]]
    limits = {"device": "cpu", "quant": "none", "dtype": "float32", "context": 64, "batch": 2}

    def logprobs(answers):
        return [[token.logprob for token in answer.logprobs] for answer in answers]

    with trimtab.load(trimtab.plan(tmp_path, **limits)) as one:
        wrong = one.anatomy.capture_unsupported
        assert wrong is None if why is None else why in wrong
        given = {"max_new_tokens": 4, "logprobs": 0}
        wanted = [one.answer(prompt, **given) for prompt in prompts]
        for own, theirs in zip(logprobs(one.batch(prompts, **given)), logprobs(wanted), strict=True):
            assert own == pytest.approx(theirs, abs=TOLERANCE)
        monkeypatch.setattr(one, "anatomy", replace(one.anatomy, capture_unsupported=None, fused_unsupported="unknown"))
        if why is None:
            return
        with pytest.raises(DeviceError, match="this family cannot be batched: .* two rows"):
            Batch(one, rows=2).check_rows()
        for own, theirs in zip(logprobs(one.batch(prompts, **given)), logprobs(wanted), strict=True):
            assert own == pytest.approx(theirs, abs=TOLERANCE)
        monkeypatch.setattr(one, "decode", "fused")  # else a text alone is no row here
        assert one.rows() is None and "steps of rows" in [how.what for how in one.fallbacks]


def test_a_token_without_a_row_in_a_table_of_the_layers_ends_its_own_answer(tmp_path, monkeypatch):
    """transformers raises IndexError for such a prompt, or once such a token is looked up."""
    kind, make = pico._CONFIGS["gemma4"]

    def config():
        made = make()
        made.text_config.vocab_size_per_layer_input = 310
        return made

    monkeypatch.setitem(pico._OTHERS, "short table", (kind, config))
    folder = pico.build("short table", tmp_path)
    sampled = {"prompt": [2, 5, 6], "logit_bias": {312: 100}}
    requests = [[2, 5, 6], [2, 312], sampled, sampled | {"max_new_tokens": 1}]
    with trimtab.load(trimtab.plan(folder, quant="none", dtype="float32", context=64, batch=2, device="cpu")) as one:
        answers = list(one.batch(requests, max_new_tokens=4, errors="return"))
        assert answers[0].token_ids == one.answer([2, 5, 6], max_new_tokens=4).token_ids
        assert answers[3].token_ids == (312,)
        for error, who in zip(answers[1:3], ("the prompt", "the answer"), strict=True):
            assert isinstance(error, RequestError) and error.field == "prompt" and f"{who} has token id 312" in str(error)
        with pytest.raises(RequestError, match="no row for"):
            one.answer([2, 5, 6], max_new_tokens=4, logit_bias={312: 100})


LOADED = {
    "OPTForCausalLM": {"num_attention_heads": 4, "ffn_dim": 128, "word_embed_proj_dim": 32, "do_layer_norm_before": False},
    "CTRLLMHeadModel": {"n_embd": 64, "dff": 128, "n_head": 4, "n_positions": 128, "n_layer": 2},
    "ModernBertDecoderForCausalLM": {},
    "OlmoHybridForCausalLM": {
        "layer_types": ["linear_attention", "full_attention"], "linear_num_key_heads": 2, "linear_num_value_heads": 4,
        "linear_key_head_dim": 16, "linear_value_head_dim": 16,
    },
    "YoutuForCausalLM": {
        "num_key_value_heads": 4, "q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8,
        "v_head_dim": 16,
    },
    "Llama4ForConditionalGeneration": {
        "text_config": _SMALL | {"intermediate_size_mlp": 128, "head_dim": 16, "num_local_experts": 2},
        "vision_config": _SEES | {
            "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 2, "vision_output_dim": 64,
            "projector_input_dim": 64, "projector_output_dim": 64,
        },
        "image_token_index": 319,
    },
}  # fmt: skip


@pytest.mark.parametrize("name", LOADED)
def test_odd_values_of_a_class_are_followed_or_named(name, tmp_path):
    """A head's padded bias, fresh values that are dropped, complex numbers, states of two widths."""
    torch.manual_seed(0)
    kind, options = name.partition("For")[0].removesuffix("LMHeadModel"), LOADED[name]
    sizes = {"vocab_size": 320} if kind == "CTRL" else {} if "text_config" in options else _SMALL
    plain = getattr(transformers, name)(getattr(transformers, f"{kind}Config")(**sizes | options)).eval()
    for value in plain.parameters():
        torch.nn.init.normal_(value, std=0.1)
    plain.save_pretrained(tmp_path)
    if kind == "Youtu":  # transformers sets the row of the padding to zero
        with pytest.raises(CheckpointError, match="trimtab cannot follow how transformers .* zero_ on"):
            trimtab.plan(tmp_path, device="cpu", quant="none", context=64)
        return
    ids = [5, 6, 9, 8]
    with trimtab.load(trimtab.plan(tmp_path, device="cpu", quant="none", dtype="float32", context=64)) as one, torch.no_grad():
        assert torch.allclose(one.logits(ids), plain(torch.tensor([ids])).logits[0], atol=TOLERANCE)
        if kind == "OPT":
            with pytest.raises(RequestError, match=r"different widths: \[32, 64\]"):
                one.hidden_states(ids)


OWN_CACHES = {
    "Mamba2": {"state_size": 8, "num_heads": 8, "head_dim": 16, "n_groups": 1, "hidden_size": 64, "num_hidden_layers": 2},
    "Bamba": {
        "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
        "attn_layer_indices": [1], "mamba_n_heads": 8, "mamba_d_head": 16, "mamba_d_state": 16, "mamba_n_groups": 1,
    },
    "Jamba": {
        "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
        "num_experts": 2, "num_experts_per_tok": 1, "use_mamba_kernels": False, "attn_layer_period": 2, "attn_layer_offset": 1,
        "mamba_d_state": 8,
    },
    "MiniMax": {
        "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
        "head_dim": 16, "num_local_experts": 2, "num_experts_per_tok": 1,
    },
    "OpenAIGPT": {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 128},
    "Llama4Text": {
        "hidden_size": 64, "intermediate_size": 64, "intermediate_size_mlp": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 16, "num_local_experts": 2, "attention_chunk_size": 8, "no_rope_layers": [1, 0],
    },
}  # fmt: skip
CUT = ("Bamba", "Llama4Text")  # their texts may be computed in chunks


@pytest.mark.parametrize("name", OWN_CACHES)
def test_a_family_with_a_cache_of_its_own_or_none_answers_as_transformers_does(name, tmp_path, monkeypatch):
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(vocab_size=320, **OWN_CACHES[name])
    kind = getattr(transformers, f"{name.removesuffix('Text')}ForCausalLM", None) or getattr(transformers, f"{name}LMHeadModel")
    plain = kind(config).eval()
    for path, value in plain.named_parameters():  # so that the next token depends on those before it
        if name != "OpenAIGPT":
            value.data.mul_(3 if value.dim() > 1 else 1)
        elif value.dim() > 1:
            torch.nn.init.normal_(value, std=0.02 if "tokens" in path else 0.5 if "embed" in path else 0.2)
    plain.save_pretrained(tmp_path)
    ids = list(range(5, 25))
    wanted = plain.generate(
        torch.tensor([ids]), max_new_tokens=16, min_new_tokens=16, do_sample=False, eos_token_id=None, pad_token_id=0
    )[0, len(ids) :].tolist()
    plan, longer = (trimtab.plan(tmp_path, device="cpu", quant="none", dtype="float32", context=n) for n in (64, 4096))
    assert longer.prefill_tokens == (1024 if name in CUT else 4096)  # of what is computed whole, memory is counted whole
    for served, invariant, field in ((False, True, "batch_invariant"), (True, False, "model")):
        asked, inputs = replace(plan.request, batch_invariant=invariant), PlanInputs(is_served=served)
        error = refused(plan_request, asked, inputs=inputs, match=f"{type(plain).__name__} cannot be batched: ")
        assert error.field == field
    with trimtab.load(plan) as one:
        whole, states = one.answer(ids, max_new_tokens=16, logprobs=0), one.embed([ids])
        assert len(set(wanted)) > 3 and list(whole.token_ids) == wanted
        assert [list(answer.token_ids) for answer in one.batch([ids, ids], max_new_tokens=16)] == [wanted, wanted]
        with pytest.raises(DeviceError, match="this family cannot be batched"):
            Batch(one, rows=1).begin(one.prepare(ids), GenerateRequest(max_new_tokens=2))
    cut = replace(plan, prefill_tokens=8)  # the prompt has more tokens than a chunk
    if name not in CUT:
        assert refused(trimtab.load, cut, match=f"{type(plain).__name__} are computed whole").field == "plan.prefill_tokens"
        return
    with trimtab.load(cut) as one:
        logprobs = [token.logprob for token in one.answer(ids, max_new_tokens=16, logprobs=0).logprobs]
        assert logprobs == pytest.approx([token.logprob for token in whole.logprobs], abs=TOLERANCE)
        own, asked = inspect.signature, list[object]()
        monkeypatch.setattr(inspect, "signature", lambda call, **options: asked.append(call) or own(call, **options))
        np.testing.assert_allclose(one.embed([ids]), states, atol=TOLERANCE)  # in chunks, whose arguments are known from the first
        assert asked.count((one.hf_model.model if name == "Llama4Text" else one.hf_model.base_model).forward) == 1


def test_several_answers_to_one_prompt_are_those_of_their_seeds(model):
    found = model.answers(QUESTION, 3, temperature=2.0, seed=7, max_new_tokens=8, adapter="style")
    expected = [model.answer(QUESTION, temperature=2.0, seed=seed, max_new_tokens=8, adapter="style") for seed in (7, 8, 9)]
    assert [answer.token_ids for answer in found] == [answer.token_ids for answer in expected]
    assert len({answer.token_ids for answer in found}) == 3
    assert len(model.answers(QUESTION, 1, max_new_tokens=2)) == 1


def test_a_model_that_is_dropped_goes_at_once(tmp_path):
    """One that has not answered: nothing that it holds holds it, and its memory does not wait for the garbage collector."""
    one = trimtab.load(pico.build("llama", tmp_path / "base"), device="cpu", context=64)
    known = weakref.ref(one)
    gc.collect()
    gc.disable()
    try:
        del one
        assert known() is None
    finally:
        gc.enable()


def test_a_batch_that_has_ended_holds_no_memory(model):
    list(model.batch([QUESTION, "Hello"], max_new_tokens=2))
    answers = model.batch_as_finished([QUESTION, "Hello"], max_new_tokens=4)
    next(answers)
    assert [one for one in gc.get_objects() if type(one) is Batch and one.model is model]
    answers.close()
    assert not [one for one in gc.get_objects() if type(one) is Batch and one.model is model and one.rows == 3]


def test_a_batch_that_is_closed_leaves_the_model_free(model):
    answers = model.batch_as_finished(REQUESTS, rows=2, max_new_tokens=10)
    next(answers)
    with pytest.raises(RequestError, match="still running"):
        model.answer(QUESTION)
    answers.close()
    assert model.answer(QUESTION, max_new_tokens=2).token_ids


# Log-probabilities and ends -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{}, {"temperature": 1.5, "top_k": 3, "seed": 2}, {"repetition_penalty": 1.5}])
def test_log_probabilities_are_the_teacher_forced_ones_before_penalties_and_cuts(model, options):
    prompt = model.prepare(QUESTION)
    found = [model.answer(QUESTION, logprobs=4, max_new_tokens=8, **options)]
    found += model.batch([QUESTION], logprobs=4, max_new_tokens=8, **options)
    for answer in found:
        forced = model.logits([*prompt.token_ids, *answer.token_ids])[prompt.prompt_tokens - 1 : -1].log_softmax(-1)
        assert [one.token_id for one in answer.logprobs] == list(answer.token_ids)
        for expected, one in zip(forced, answer.logprobs, strict=True):
            assert one.logprob == pytest.approx(float(expected[one.token_id]), abs=TOLERANCE)
            values, ids = expected.topk(4)
            assert [token for token, _ in one.top] == ids.tolist()
            assert [value for _, value in one.top] == pytest.approx(values.tolist(), abs=TOLERANCE)
    assert model.answer(QUESTION, max_new_tokens=2).logprobs == ()


def test_a_penalty_beside_log_probabilities_draws_as_without_them(model):
    options = {"repetition_penalty": 1.3, "temperature": 1.0, "seed": 3, "max_new_tokens": 12}
    assert model.answer(QUESTION, logprobs=0, **options).token_ids == model.answer(QUESTION, **options).token_ids


def test_a_stop_token_ends_an_answer_on_every_way(model):
    whole = model.answer(QUESTION, max_new_tokens=10)
    token = whole.token_ids[4]
    first = whole.token_ids.index(token)
    for answer in (
        model.answer(QUESTION, max_new_tokens=10, stop_token_ids=(token,)),
        *model.batch([{"prompt": QUESTION, "stop_token_ids": (token,)}], max_new_tokens=10),
    ):
        assert answer.token_ids == whole.token_ids[: first + 1] and answer.finish_reason == "stop"
        assert whole.text.startswith(answer.text) and len(answer.text) < len(whole.text)


def test_a_stop_text_in_the_first_token_ends_an_answer_on_every_way(model):
    asked = "What helps against a cough?"
    options = {"temperature": 3.0, "max_new_tokens": 10}
    firsts = ((seed, model.answer(asked, temperature=3.0, seed=seed, max_new_tokens=1).text) for seed in range(20))
    seed, first = next((seed, text) for seed, text in firsts if text[:2].isalpha() and len(text) > 1)
    options |= {"seed": seed, "stop": (first[1],)}
    one = model.answer(asked, **options)
    assert one.text == first[0] and len(one.token_ids) == 1
    requests = [{"prompt": asked, **options}, {"prompt": "Hello", "max_new_tokens": 3}]
    for answer in (*model.answers(asked, 1, **options), next(iter(model.batch(requests)))):
        assert (answer.text, answer.token_ids, answer.finish_reason) == (one.text, one.token_ids, "stop")


@pytest.mark.parametrize(
    ("options", "field"),
    [({"logprobs": 21}, "logprobs"), ({"logprobs": True}, "logprobs"), ({"stop_token_ids": (-1,)}, "stop_token_ids"),
     ({"stop_token_ids": ("a",)}, "stop_token_ids"), ({"stop": "x"}, "stop")],
)  # fmt: skip
def test_wrong_options_are_refused(options, field):
    assert refused(GenerateRequest, **options).field == field


@pytest.mark.parametrize(
    ("options", "field", "words"),
    [({"stop_token_ids": (10**6,)}, "stop_token_ids", "token ids are below"), ({"adapter": ["style"]}, "adapter", "must be a name"),
     ({"audio": (16_000, np.zeros(160, "float32"))}, "audio", r"is not \(samples, rate\)")],
)  # fmt: skip
def test_what_this_model_cannot_follow_is_refused(model, options, field, words):
    for ask in (model.answer, lambda prompt, **given: list(model.batch([{"prompt": prompt, **given}]))):
        assert refused(ask, QUESTION, **options, match=words).field.split(".")[-1] == field


# Threads and event loops ----------------------------------------------------------------------------------------------


def test_calls_of_other_threads_wait_and_are_answered_in_order(model):
    expected = model.answer(QUESTION, max_new_tokens=6, adapter="style").token_ids
    order, found = [], {}

    def ask(number):
        found[number] = model.answer(QUESTION, max_new_tokens=6, adapter="style").token_ids
        order.append(number)

    pieces = model.generate("Hello", max_new_tokens=100, temperature=100.0, seed=1)
    next(pieces)
    threads = []
    for number in range(4):
        threads.append(threading.Thread(target=ask, args=(number,)))
        threads[-1].start()
        waiting.until(lambda: len(model.turns._waiting) >= len(threads))
    with pytest.raises(RequestError, match="still running"):  # this thread would wait for itself
        model.answer("Hello")
    assert order == []
    pieces.close()
    for thread in threads:
        thread.join()
    assert order == [0, 1, 2, 3] and set(found.values()) == {expected}


def test_an_event_loop_is_not_held_up_and_cancelling_ends_the_answer(model):
    async def main():
        first, second = await asyncio.gather(
            model.answer_async(QUESTION, max_new_tokens=6), model.answer_async(QUESTION, max_new_tokens=6, adapter="style")
        )
        texts = [piece async for piece in model.generate_async(QUESTION, max_new_tokens=6)]
        long = asyncio.create_task(model.answer_async("Hello", max_new_tokens=110, temperature=100.0, seed=1))
        await waiting.until_async(lambda: model.turns._owner is not None or long.done())  # its thread has begun
        long.cancel()
        with pytest.raises(asyncio.CancelledError):
            await long
        with pytest.raises(RequestError):
            await model.answer_async("Hello", adapter="none")
        return first, second, "".join(texts)

    first, second, text = asyncio.run(main())
    assert first.text == text == model.answer(QUESTION, max_new_tokens=6).text
    assert second.text == model.answer(QUESTION, max_new_tokens=6, adapter="style").text


# Hidden states --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["gemma4", "llama", "qwen2_5_vl"])
def test_hidden_states_and_vectors_are_stock_transformers(family, tmp_path):
    folder = pico.build(family, tmp_path / "base")
    adapter = pico.adapter(folder, tmp_path / "one", targets="all")
    ids = list(range(5, 25))
    plain = stock.load_stock(folder, dtype=torch.float32)
    given = torch.tensor([ids])
    plan = trimtab.plan(folder, adapters={"one": adapter}, quant="none", dtype="float32", context=64, device="cpu")
    with trimtab.load(plan) as model, torch.no_grad():
        expected = torch.stack(plain(input_ids=given, output_hidden_states=True).hidden_states)[:, 0]
        torch.testing.assert_close(model.hidden_states(ids), expected, rtol=TOLERANCE, atol=TOLERANCE)
        last = torch.nn.functional.normalize(expected[-1, -1:], dim=-1)
        torch.testing.assert_close(model.embed([ids]), last, rtol=TOLERANCE, atol=TOLERANCE)
        mean = expected[-1].mean(0, keepdim=True)
        found = model.embed([ids], pooling="mean", normalize=False)
        torch.testing.assert_close(found, mean, rtol=TOLERANCE, atol=TOLERANCE)
        adapted = stock.with_adapter(plain, adapter)(input_ids=given, output_hidden_states=True).hidden_states[-1][0, -1:]
        found = model.embed([ids], adapter="one", normalize=False)
        torch.testing.assert_close(found, adapted, rtol=TOLERANCE, atol=TOLERANCE)
        assert not torch.allclose(found, expected[-1, -1:], rtol=TOLERANCE, atol=TOLERANCE)


def test_texts_are_embedded_as_they_are(model):
    ids = model.processor.tokenizer("a red circle")["input_ids"]
    assert torch.equal(model.embed(["a red circle"]), model.embed([ids]))
    assert model.embed(["a red circle", "b"]).shape == (2, model.hf_model.config.get_text_config().hidden_size)


# Mixes ----------------------------------------------------------------------------------------------------------------

MIXED = {
    "plain": ({"targets": "all"}, {"targets": "all", "rank_pattern": {"o_proj": 2}}),
    "embedding": ({"embeddings": True}, {"targets": "all"}),
    "bias": ({"targets": "all", "bias": True}, {"targets": "all"}),
}


@pytest.mark.parametrize(("family", "kind"), crossed(["gemma4", "qwen2_5_vl"], MIXED, first=["gemma4"], rest=1))
def test_a_mix_is_pefts_weighted_sum_of_outputs(family, kind, tmp_path):
    from peft.tuners.tuners_utils import BaseTunerLayer

    folder = pico.build(family, tmp_path / "base")
    paths = [pico.adapter(folder, tmp_path / f"a{n}", seed=n, **options) for n, options in enumerate(MIXED[kind])]
    weights = {"a0": 0.7, "a1": -0.3}
    ids = list(range(5, 25))
    peft_model = stock.with_adapter(stock.load_stock(folder, dtype=torch.float32), paths[0])
    peft_model.load_adapter(str(paths[1]), "a1")
    peft_model.base_model.set_adapter(["default", "a1"])
    for layer in peft_model.modules():
        if isinstance(layer, BaseTunerLayer) and hasattr(layer, "scaling"):
            for name, weight in (("default", 0.7), ("a1", -0.3)):
                if name in layer.scaling:
                    layer.scaling[name] *= weight
    expected = stock.logits(peft_model, {"input_ids": torch.tensor([ids])})[0]
    adapters = {f"a{n}": path for n, path in enumerate(paths)}
    with trimtab.load(folder, adapters=adapters, quant="none", dtype="float32", context=64, device="cpu", batch=3) as model:
        found = model.logits(ids, adapter=weights)
        torch.testing.assert_close(found, expected, rtol=TOLERANCE, atol=TOLERANCE)
        alone = [model.logits(ids, adapter=name) for name in ("a0", "a1", None)]
        assert all((found - one).abs().max() > 10 * TOLERANCE for one in alone)
        assert torch.equal(model.logits(ids, adapter={"a0": 1.0}), alone[0])
        whole = model.answer(ids, adapter=weights, max_new_tokens=6).token_ids
        rows = list(model.batch([{"prompt": ids, "adapter": one} for one in (weights, "a0", None)], max_new_tokens=6))
        assert rows[0].token_ids == whole
        assert rows[1].token_ids == model.answer(ids, adapter="a0", max_new_tokens=6).token_ids


def test_a_mix_of_rescaling_adapters_is_the_weighted_sum_of_what_they_add(tmp_path):
    folder = pico.build("gemma4", tmp_path / "base")
    dora = pico.adapter(folder, tmp_path / "dora", seed=1, targets="all", dora=True)
    plain = pico.adapter(folder, tmp_path / "plain", seed=2, targets="all")
    plan = trimtab.plan(folder, adapters={"dora": dora, "plain": plain}, quant="none", dtype="float32", context=64, device="cpu")
    with trimtab.load(plan) as model, torch.no_grad():
        name = model.adapter_name({"dora": 0.5, "plain": 2.0})
        leaf = next(place.leaf for place in model.adapter_store.holders["plain"].fitting.plain if "dora" in place.leaf.adapters)
        x = torch.randn(3, leaf.in_features, dtype=torch.float32)
        y = torch.nn.functional.linear(x, leaf.dense_weight().float())
        one, two = (leaf.adapters[adapter].apply(leaf, x, y.clone()) - y for adapter in ("dora", "plain"))
        found = leaf.adapters[name].apply(leaf, x, y.clone())
        torch.testing.assert_close(found, y + 0.5 * one + 2.0 * two, rtol=1e-5, atol=1e-5)


def test_a_mix_goes_with_its_adapters_and_when_room_is_needed(tmp_path, monkeypatch):
    folder = pico.build("llama", tmp_path / "base")
    paths = {f"a{n}": pico.adapter(folder, tmp_path / f"a{n}", seed=n, targets="all") for n in (0, 1)}
    ids = list(range(5, 15))
    with trimtab.load(folder, adapters=paths, quant="none", dtype="float32", context=64, device="cpu") as model:
        before = model.free_adapter_bytes()
        one = model.logits(ids, adapter={"a0": 0.5, "a1": 0.5})
        assert model.free_adapter_bytes() < before and model.adapters == ("a0", "a1")
        for number in range(12):
            model.logits(ids, adapter={"a0": 0.5, "a1": 1 + number / 8})
        assert len(model.mixes._made) == 8
        assert torch.equal(model.logits(ids, adapter={"a1": 0.5, "a0": 0.5}), one)
        model.unload_adapter("a1")
        assert model.mixes._made == {}
        model.load_adapter("a1", paths["a1"])
        assert model.free_adapter_bytes() == before
        monkeypatch.setattr(type(model), "free_adapter_bytes", lambda self: 10)
        with pytest.raises(DoesNotFitError):
            model.logits(ids, adapter={"a0": 0.5, "a1": 0.5})


def test_what_has_no_weighted_sum_is_refused(model, tmp_path):
    for weights in (
        {},
        {"style": 0.0, "specialist": 1.0},
        {"style": float("nan")},
        {"none": 1.0},
        {"style": True, "specialist": 1},
    ):
        with pytest.raises(RequestError):
            model.answer(QUESTION, adapter=weights)
    folder = pico.build("llama", tmp_path / "base")
    paths = {"one": pico.adapter(folder, tmp_path / "one", targets="all"),
             "norms": pico.adapter(folder, tmp_path / "norms", modules_to_save=["norm"])}  # fmt: skip
    plan = trimtab.plan(folder, adapters=paths, quant="none", dtype="float32", context=64, device="cpu")
    with trimtab.load(plan) as loaded, pytest.raises(RequestError, match="cannot be mixed"):
        loaded.answer([5, 6], adapter={"one": 1.0, "norms": 0.5})
