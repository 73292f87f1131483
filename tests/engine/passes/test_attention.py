"""Attention reads grouped keys where they are, with the same bits, without cuDNN's own; a prompt goes on only as it may."""

from __future__ import annotations

import gc
import threading
from contextlib import ExitStack, suppress
from types import SimpleNamespace

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers.integrations.sdpa_attention import sdpa_attention_forward

import trimtab
from tests import pico
from tests.anatomies import e_series
from tests.engine.prefill.test_prefill import load, picture
from tests.lent import DEVICE, lent
from tests.long_runs import crossed
from tests.planning.values.test_execution import H200, card
from trimtab.engine.batch.batch import Batch
from trimtab.engine.kv.kv_cache import PagedLayer
from trimtab.engine.kv.prefix_store import Match
from trimtab.engine.passes import attention as cudnn
from trimtab.engine.passes import attention as hf_attention
from trimtab.engine.passes.attention import attention, grouped
from trimtab.engine.passes.chunk_forward import Chunk
from trimtab.engine.prefill.prefill import PrefillRunner
from trimtab.engine.prefill.rows import PromptJob, Stage
from trimtab.planning import make_plan
from trimtab.planning.values.execution import SMALL_BUDGET_BYTES
from trimtab.request import LoadRequest

# (heads of keys, group, tokens, places, width): last blocks of one query, keys on both sides of a multiple of 8 and of 32.
SHAPES = [(2, 4, 64, 256, 64), (1, 8, 33, 97, 512), (4, 4, 16, 304, 128), (2, 2, 65, 65, 256), (1, 3, 5, 9, 8)]


def states(kv_heads, group, tokens, places, width, dtype):
    """Return query, keys and values as layers give them, and a mask: keys from the middle of a row, values as projected."""
    torch.manual_seed(width)
    query = torch.randn(1, tokens, kv_heads * group, width, device=DEVICE).to(dtype).transpose(1, 2)
    keys = torch.randn(1, kv_heads, places + 8, width, device=DEVICE).to(dtype)[:, :, :places]
    values = torch.randn(1, places, kv_heads, width, device=DEVICE).to(dtype).transpose(1, 2)
    hidden = torch.rand(1, 1, tokens, places, device=DEVICE) < 0.3
    hidden[..., 0] = False
    return query, keys, values, torch.zeros_like(hidden, dtype=dtype).masked_fill_(hidden, float("-inf"))


def layer(group):
    return SimpleNamespace(num_key_value_groups=group, is_causal=True)


def repeated(query, keys, values, mask, **options):
    """Return what transformers computes with keys copied to every query head: its own copies of one head have a stride of 0."""
    group = query.shape[1] // keys.shape[1]
    copies = [state.repeat_interleave(group, dim=1) for state in (keys, values)]
    return sdpa_attention_forward(SimpleNamespace(is_causal=True), query, *copies, mask, **options)[0]


@pytest.fixture
def uses(monkeypatch):
    """Return how often keys were read in place, by the device's type."""
    counted = []

    def counting(*args, **kwargs):
        found = grouped(*args, **kwargs)
        counted.extend([] if found is None else [found.device.type])
        return found

    monkeypatch.setattr(hf_attention, "grouped", counting)
    return counted


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", SHAPES)
def test_the_bits_are_those_of_repeated_keys(shape, dtype, uses):
    group, tokens, places = shape[1:4]
    query, keys, values, mask = states(*shape, dtype)
    for given, scaling in ((mask, None), (mask, 0.3), (mask == 0, None), (None, None)):
        before = len(uses)
        found, _ = attention(layer(group), query, keys, values, given, scaling=scaling)
        if len(uses) > before:
            expected = repeated(query, keys, values, given, scaling=scaling)
        else:
            expected, _ = sdpa_attention_forward(layer(group), query, keys, values, given, scaling=scaling)
        assert torch.equal(found, expected)
        assert found.is_contiguous() and found.shape == (1, tokens, query.shape[1], query.shape[3])
    is_wide_and_square = shape[4] > hf_attention.WIDEST_GROUPED and tokens == places
    assert len(uses) == (0 if hf_attention.may_pack(query) else 3 + is_wide_and_square)


# Sums of up to 304 products of values of order 1 in float32, in another order than float64's; in 16 bits one rounding of the
# weights and one of the sum, each at most 2^-9 of values up to 4.
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 3e-2), (torch.float64, 1e-12)])
@pytest.mark.parametrize("shape", SHAPES)
def test_each_head_is_softmax_of_its_own_scores(shape, dtype, tolerance, uses):
    if dtype == torch.float64 and DEVICE != "cpu":
        pytest.skip("no fused kernel computes in float64 there")
    kv_heads, group = shape[:2]
    query, keys, values, mask = states(*shape, dtype)
    found, _ = attention(layer(group), query, keys, values, mask, scaling=0.125)
    for head in range(kv_heads * group):
        key, value = keys[0, head // group].double(), values[0, head // group].double()
        weights = torch.softmax(query[0, head].double() @ key.T * 0.125 + mask[0, 0].double(), dim=-1)
        assert float((found[0, :, head].double() - weights @ value).abs().max()) < tolerance
    assert uses or hf_attention.may_pack(query)


@pytest.mark.parametrize("kv_heads", [1, 2])
def test_torch_is_given_the_keys_themselves_and_no_head_stride_of_zero(kv_heads, monkeypatch):
    """A head stride of 0 makes torch's memory-efficient kernel compute other heads (pytorch/pytorch#191937)."""
    given = []
    real = hf_attention.scaled_dot_product_attention
    monkeypatch.setattr(
        hf_attention, "scaled_dot_product_attention", lambda *args, **options: given.append(args) or real(*args, **options)
    )
    query, keys, values, mask = states(kv_heads, 4, 33, 64, 64, torch.float32)
    assert grouped(query, keys, values, mask, scaling=None, is_causal=False) is not None
    for passed, held in zip(given[0][1:], (keys, values), strict=True):
        assert passed.shape == (4, *held.shape[1:]) and passed.data_ptr() == held.data_ptr()
        assert passed.stride(0) == 0 and passed.stride(1) > 0
    assert given[0][0].data_ptr() == query.data_ptr()


def test_what_torch_would_not_compute_alike_is_left_to_transformers():
    query, keys, values, mask = states(2, 4, 16, 16, 64, torch.float32)
    options = {"scaling": None, "is_causal": False}
    assert grouped(query, keys, values, mask, **options) is not None
    with sdpa_kernel(SDPBackend.MATH):  # stores scores
        assert grouped(query, keys, values, mask, **options) is None
    two = [one.expand(2, -1, -1, -1) for one in (query, keys, values)]
    assert grouped(*two, mask, **options) is None
    assert grouped(query[:, :, :1], keys, values, mask[:, :, :1], **options) is None
    assert grouped(query, keys, values, mask.expand(-1, 8, -1, -1), **options) is None
    assert grouped(query, keys, values, mask[..., :-1], **options) is None
    assert grouped(query[:, :2], keys, values, mask, **options) is None
    assert grouped(query, keys, values, None, scaling=None, is_causal=True) is None  # torch groups by itself
    wide = states(2, 4, 16, 24, 512, torch.float32)[:3]
    assert grouped(*wide, None, scaling=None, is_causal=True) is None
    assert grouped(*wide, None, **options) is not None


@pytest.mark.skipif(DEVICE != "cpu", reason="a CPU's question")
def test_a_cpu_that_may_pack_keys_is_left_to_transformers(monkeypatch):
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX512")
    options = {"scaling": None, "is_causal": False}
    for dtype, is_left in ((torch.bfloat16, True), (torch.float16, True), (torch.float32, False)):
        found = grouped(*states(2, 4, 16, 64, 64, dtype), **options)
        assert (found is None) == is_left, dtype


def test_arguments_that_change_the_computation_reach_transformers(uses):
    query, keys, values, mask = states(2, 4, 16, 16, 64, torch.float32)
    with suppress(ValueError):  # later releases refuse it
        attention(layer(4), query, keys, values, mask, softcap=30.0)
    attention(layer(4), query, keys, values, mask, dropout=0.5)
    assert not uses
    attention(layer(4), query, keys, values, mask, softcap=None, sliding_window=8)
    assert uses


# Models --------------------------------------------------------------------------------------------------------------


def in_chunks(model, inputs, rows=1):
    """Return the scores of a prompt's last token, computed in chunks of 8 and 16 tokens, and the batch."""
    batch = Batch(model, rows=rows, decode="eager")
    batch.prompts = PrefillRunner(batch, "static", (8, 16))
    prompt = batch.begin(inputs, trimtab.GenerateRequest(max_new_tokens=2))
    assert batch.prompts.takes(prompt)
    prompt.compute()
    return prompt.logits.flatten(), batch


def scores(model):
    """Return the last token's scores of a prompt in chunks, and of transformers' own pass with padding in front of it."""
    token_ids = [100 + (number * 7) % 190 for number in range(25)]
    ids = torch.tensor([[3, *token_ids]], device=DEVICE)
    seen = torch.ones_like(ids)
    seen[0, 0] = 0
    with torch.no_grad():
        padded = model.hf_model(input_ids=ids, attention_mask=seen, use_cache=False).logits[0, -1]
    return torch.stack([in_chunks(model, model.prepare(token_ids))[0], padded.float()])


@pytest.mark.parametrize(("family", "dtype"), crossed(pico.FAMILIES, ["float32", "bfloat16"]))
def test_a_prompt_has_the_bits_of_repeated_keys(family, dtype, uses, monkeypatch):
    with lent(family, dtype=dtype) as model:
        uses.clear()
        found = scores(model)
        layers = sum(1 for module in model.hf_model.get_decoder().modules() if hasattr(module, "num_key_value_groups"))
        assert len(uses) >= layers or hf_attention.may_pack(torch.empty(1, 4, 1, 1, dtype=model.dtype, device=DEVICE))
        monkeypatch.setattr(hf_attention, "grouped", lambda *args, **options: None)
        assert torch.equal(found, scores(model))


@pytest.mark.parametrize("options", [{"kv": "int8"}, {"batch": 2, "kv_tokens": 128}], ids=["8 bits", "pages"])
def test_keys_in_8_bits_and_in_pages_have_the_bits_of_repeated_keys(options, uses, monkeypatch):
    with lent("gemma4", **options) as model:
        inputs, rows = model.prepare([100 + number for number in range(40)]), options.get("batch", 1)
        uses.clear()
        found, batch = in_chunks(model, inputs, rows)
        assert uses and (rows == 1 or any(isinstance(one, PagedLayer) for one in batch.cache.layers))
        monkeypatch.setattr(hf_attention, "grouped", lambda *args, **options: None)
        assert torch.equal(found, in_chunks(model, inputs, rows)[0])


@pytest.mark.parametrize("family", ["gemma3", "gemma4_dense", "qwen3_vl"])
def test_a_picture_has_the_bits_of_repeated_keys(family, uses, monkeypatch):
    """The tokens of one picture see each other in both directions, but in Qwen3-VL."""
    with lent(family) as model:
        inputs = picture(model, family, 5)
        uses.clear()
        found, _ = in_chunks(model, inputs)
        assert uses
        monkeypatch.setattr(hf_attention, "grouped", lambda *args, **options: None)
        assert torch.equal(found, in_chunks(model, inputs)[0])


def test_the_model_keeps_its_config_and_a_change_of_it_is_heard(tmp_path, uses):
    with load("llama", tmp_path) as model:
        config = model.hf_model.config
        module = model.hf_model.get_decoder().layers[0].self_attn
        assert config._attn_implementation == "sdpa" and module.config._attn_implementation == hf_attention.NAME
        assert isinstance(module.config, type(config)) and module.config.to_dict() == config.to_dict()
        config._attn_implementation = "eager"
        assert module.config._attn_implementation == "eager"
        uses.clear()
        model.hf_model(input_ids=torch.tensor([[3, 4, 5, 6]], device=DEVICE))
        assert not uses


def test_a_device_on_which_the_bits_differ_keeps_transformers_form_and_names_it(tmp_path, monkeypatch):
    def other(*args, **options):
        found = grouped(*args, **options)
        return None if found is None else found * 1.01

    monkeypatch.setattr(hf_attention, "grouped", other)
    with load("llama", tmp_path) as model:
        (fallback,) = [one for one in model.fallbacks if one.what == hf_attention.WHAT]
        assert fallback.why.startswith("2 query heads of width 32 on ")
        module = model.hf_model.get_decoder().layers[0].self_attn
        assert module.config is model.hf_model.config


SMALL, LARGE = 64, 128  # contexts of models that stand for small and large budgets
GPU = torch.device("cuda:0")


def is_on() -> bool:
    return torch.backends.cuda.cudnn_sdp_enabled()


@pytest.fixture(params=[True, False], ids=["was on", "was off"])
def before(request):
    """The setting of the user."""
    original = is_on()
    torch.backends.cuda.enable_cudnn_sdp(request.param)
    yield request.param
    torch.backends.cuda.enable_cudnn_sdp(original)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setattr(cudnn, "is_left_out", lambda plan: plan.request.context_tokens == SMALL)
    monkeypatch.setattr(cudnn, "prefers_cudnn", lambda device: True)
    cudnn.of_this_process.cache_clear()
    yield pico.build("llama", tmp_path)
    cudnn.of_this_process.cache_clear()


def opened(folder, context):
    return trimtab.load(trimtab.plan(folder, context=context, device="cpu", quant="none"))


def notes(model):
    return [one.what for one in model.fallbacks]


def test_the_setting_returns_when_the_last_small_model_is_closed(folder, before):
    with opened(folder, LARGE) as large:
        assert is_on() == before and notes(large) == []
        first = opened(folder, SMALL)
        second = opened(folder, SMALL)
        assert not is_on()
        # Only what would be there without the small models is missing.
        assert notes(large) == (["cuDNN's attention"] if before else [])
        first.close()
        first.close()
        assert not is_on()
        second.close()
        assert is_on() == before and notes(large) == []


def test_a_large_model_that_is_loaded_beside_a_small_one_says_so(folder, before):
    with opened(folder, SMALL) as small:
        large = opened(folder, LARGE)
        assert notes(small) == [] and notes(large) == (["cuDNN's attention"] if before else [])
        if before:
            assert "another open model of this process has a GPU budget below 16 GiB" in large.fallbacks[0].why
    assert is_on() == before
    # Its graphs, captured before, go on without it.
    assert notes(large) == (["cuDNN's attention"] if before else [])
    large.close()
    with opened(folder, LARGE) as later:
        assert is_on() == before and notes(later) == []


def test_a_model_that_cannot_be_loaded_or_is_dropped_leaves_the_setting(folder, before, monkeypatch):
    made = trimtab.plan(folder, context=SMALL, device="cpu", quant="none")
    with monkeypatch.context() as broken:
        broken.setattr("trimtab.engine.model.fill", lambda *args, **options: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            trimtab.load(made)
    assert is_on() == before
    dropped = opened(folder, SMALL)
    assert not is_on()
    del dropped
    gc.collect()
    assert is_on() == before


def test_a_user_who_switches_it_on_meanwhile_keeps_it(folder, before):
    first = opened(folder, SMALL)
    torch.backends.cuda.enable_cudnn_sdp(True)
    with opened(folder, SMALL):
        assert not is_on()  # a small model that is loaded then is without it again
    first.close()
    assert is_on()


def test_small_budgets_of_a_gpu_are_without_it():
    for gib, is_small in ((8, True), (40, False)):
        request = LoadRequest(model="m", quant="nf4-dq", head="full", decode="eager", images=0, audio_s=0.0)
        made = make_plan(request, e_series("E2B"), adapters={}, machine=card(gib), rates=H200)
        assert cudnn.is_left_out(made) == is_small == (made.gpu_budget_bytes < SMALL_BUDGET_BYTES)
    assert not cudnn.is_left_out(SimpleNamespace(execution_device="cpu", gpu_budget_bytes=0))


@pytest.mark.parametrize("capability, prefers", [((8, 9), False), ((9, 0), True), ((10, 0), True), ((12, 0), False)])
def test_only_cards_that_prefer_it_are_told(capability, prefers, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    assert cudnn.prefers_cudnn(GPU) == prefers and not cudnn.prefers_cudnn(torch.device("cpu"))


CHUNKS = [Chunk(0, 16, 16, is_last=False), Chunk(16, 5, 16, is_last=True)]


def job(chunks, media=None):
    one = PromptJob()
    with pytest.raises(ValueError, match="complete cannot follow begun"):
        one.enter(Stage.COMPLETE)
    one.begin(list(chunks), media, 0, None, Match())
    return one


def test_a_prompt_is_complete_with_its_last_chunk_or_the_one_before_a_step():
    one = job(CHUNKS)
    assert [one.end_chunk(ends_in_step=False) for _ in CHUNKS] == [False, True] and one.stage is Stage.COMPLETE
    with pytest.raises(ValueError, match="chunks cannot follow complete"):
        one.enter(Stage.CHUNKS)
    one = job(CHUNKS[:1])
    assert one.end_chunk(ends_in_step=True) and one.stage is Stage.COMPLETE


def test_towers_come_before_chunks_and_once():
    one = job(CHUNKS, media=object())
    with pytest.raises(ValueError, match="complete cannot follow towers"):
        one.enter(Stage.COMPLETE)
    one.enter(Stage.CHUNKS)
    with pytest.raises(ValueError, match="towers cannot follow chunks"):
        one.enter(Stage.TOWERS)
    one.cut([Chunk(0, 21, 64, is_last=True)])
    assert one.end_chunk(ends_in_step=False) and one.media is None


def test_the_forms_are_compared_while_weights_are_read(monkeypatch):
    kinds, ran, goes_on = [layer(group) for group in (4, 2, 4)], [], threading.Event()
    for one in kinds:
        one.head_dim = 64

    def why(group, *rest):
        ran.append((group, threading.current_thread() is threading.main_thread()))
        return "other bits" if group == 2 else None

    monkeypatch.setattr(hf_attention, "_modules", lambda _: iter(kinds))
    monkeypatch.setattr(hf_attention, "why_other", why)
    with ExitStack() as undo:
        assert hf_attention.begin_trials(None, torch.device("cpu"), torch.bfloat16, undo).result() == "other bits"
        assert ran == [(4, False), (2, False)]
        monkeypatch.setattr(hf_attention, "why_other", lambda *_: goes_on.wait() and 1 / 0)
        threading.Timer(0.05, goes_on.set).start()
        failed = hf_attention.begin_trials(None, torch.device("cpu"), torch.bfloat16, undo)
    assert failed.done()  # a load that fails waits
    with pytest.raises(ZeroDivisionError):
        hf_attention.use_in(None, failed)
