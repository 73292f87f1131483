"""Rows that share a pool of pages say what they say with a context each: every family, mode, prompts in chunks, several at once,
forks and cached beginnings; a request that finds no room waits or is refused by name, and pages come back.

On a CPU nothing is captured: a stand-in repeats steps the way a graph would. tests/gpu runs the same tests with graphs.
"""

import gc

import pytest

import trimtab
from tests import long_runs, pico
from tests.engine.batch.test_batch import DEVICE, PROMPTS, check_alone, through, to_the_end
from tests.engine.batch.test_company import (
    alone,
    asks,
    batch_of,
    check_beside_spoilt,
    check_company,
    forks,
    keeping_prefixes,
    packed_with_cached_beginnings,
    with_pool,
)  # fmt: skip
from tests.engine.decode.test_graphs import replayed  # noqa: F401
from tests.long_runs import slow_on_cpu
from tests.raised import raising
from trimtab.demo.demo import ADAPTERS
from trimtab.demo.demo import FOLDER as DEMO
from trimtab.engine.batch.batch import Batch
from trimtab.engine.kv.kv_cache import PagedLayer
from trimtab.errors import DeviceError, DoesNotFitError, RequestError
from trimtab.planning.values.byte_sizes import FIRST, PAGE_TOKENS, SCRAP
from trimtab.request import GenerateRequest

CONTEXT = 256


@pytest.fixture(scope="module")
def model():
    names = {name: DEMO / "adapters" / name for name in ADAPTERS}
    with trimtab.load(
        DEMO / "base", adapters=names, quant="none", dtype="float32", context=CONTEXT, device=DEVICE, batch=2,
        kv_tokens=CONTEXT + PAGE_TOKENS,
    ) as one:  # fmt: skip
        yield one


def is_all_free(batch):
    gc.collect()
    pool = batch.cache.pool
    return pool.free_tokens == pool.tokens and not pool.table.table.any()


@pytest.mark.parametrize("family", long_runs.FAMILIES)
def test_rows_in_pages_say_what_they_say_alone(family, tmp_path):
    with trimtab.load(
        pico.build(family, tmp_path), quant="none", dtype="float32", context=128, device=DEVICE, batch=4, kv_tokens=448
    ) as model:
        batch = check_alone(model, 70)
        assert is_all_free(batch)
        layers = [layer for layer in batch.cache.layers if isinstance(layer, PagedLayer)]
        if not layers:  # every layer has a window
            assert family == "mistral3"
            return
        assert all(layer.keys.shape[1] == (FIRST + 7) * PAGE_TOKENS for layer in layers)
        # The page that stands for no page was never written, the one for what nobody reads was.
        assert not any(layer.keys[:, :PAGE_TOKENS].any() or layer.values[:, :PAGE_TOKENS].any() for layer in layers)
        assert layers[0].keys[:, SCRAP * PAGE_TOKENS : FIRST * PAGE_TOKENS].isfinite().all()


@pytest.mark.parametrize(("decode", "sizes"), [
    ("eager", ()), ("fused", (16, 64)), ("graph", (16, 64)), slow_on_cpu("eager", (16, 64)), slow_on_cpu("fused", ()),
    slow_on_cpu("graph", ()),
])  # fmt: skip
def test_an_answer_in_pages_is_the_same_alone_and_in_company(model, replayed, decode, sizes):  # noqa: F811
    with_pool(model, 4 * CONTEXT)
    company = check_company(model, decode, sizes)
    company.prompt = None
    assert is_all_free(company.batch)


def test_prompts_that_go_together_and_cached_beginnings_are_in_pages(model, replayed, monkeypatch):  # noqa: F811
    with_pool(model, 5 * CONTEXT)
    with packed_with_cached_beginnings(model, monkeypatch):
        pass


def test_pages_of_a_row_that_cannot_be_moved_come_back(model, monkeypatch):
    with_pool(model, 3 * CONTEXT)
    batch = batch_of(model, "eager", (), 4)
    first, last = (through(batch, model.prepare(prompt), GenerateRequest()) for prompt in PROMPTS[:2])
    prompt = batch.begin(model.prepare(PROMPTS[2]), GenerateRequest()).compute()
    batch.place(prompt)
    batch.leave(last.row)

    with monkeypatch.context() as patched:
        patched.setattr(batch.cache, "move", raising(DeviceError("an illegal address", device="cpu")))
        with pytest.raises(DeviceError):
            batch.join(prompt)
    batch.leave(prompt.row)  # as a server drops what failed
    assert batch.active == [first.row] and batch.free_rows == 3
    batch.leave(first.row)
    assert is_all_free(batch)


@pytest.mark.parametrize("sizes", [(), (16, 64)], ids=["eager prompts", "chunks"])
def test_the_next_turn_of_a_chat_is_copied_into_pages(model, sizes):
    with_pool(model, 3 * CONTEXT)
    with keeping_prefixes(model):
        ask = (None, "Say something about the sea and the colour of it " * 6)
        batch = batch_of(model, "eager", sizes, 4)
        first = alone(batch, ask)
        again = alone(batch, ask)
        assert [token for token, _ in again] == [token for token, _ in first]
        assert model.prefix_cache.numbers()["hit_tokens"] >= PAGE_TOKENS
        assert max(abs(a[1] - b[1]) for a, b in zip(first, again, strict=True)) < 2e-3


def test_forks_have_pages_of_their_own(model):
    with_pool(model, 3 * CONTEXT)
    ask = (None, "Say something about the sea and the colour of it " * 3)
    expected = [token for token, _ in alone(batch_of(model, "eager", (), 1), ask)]
    batch = batch_of(model, "eager", (16, 64), 4)
    rows = forks(batch, ask, 3)
    assert len({page for row in rows for page in row.pages}) == 3 * len(rows[0].pages)
    assert to_the_end(batch, rows) == [tuple(expected)] * 3
    del rows
    assert is_all_free(batch)


# Room ----------------------------------------------------------------------------------------------------------------


def test_a_request_that_finds_no_room_is_refused_by_name_and_finds_it_later(model):
    with_pool(model, CONTEXT)
    batch, request = batch_of(model, "eager", (16, 64), 4), GenerateRequest(max_new_tokens=120)
    first = through(batch, model.prepare("Hello"), request).row
    waiting = batch.begin(model.prepare("Hello"), GenerateRequest(max_new_tokens=200))
    assert not batch.pages.has_room(waiting.row)
    with pytest.raises(DoesNotFitError, match="128 of the pool's 256 are free|64 of the pool's 256 are free"):
        waiting.step()
    assert batch.pages.numbers()["kv_tokens"] == 256 and batch.pages.numbers()["kv_reserved_tokens"] >= 128
    small = through(batch, model.prepare("Hello"), GenerateRequest(max_new_tokens=2)).row
    batch.leave(small)
    batch.leave(first)
    assert batch.pages.has_room(waiting.row)
    row = batch.join(waiting.compute()).row
    assert to_the_end(batch, [row]) == [model.answer("Hello", max_new_tokens=200).token_ids]
    del waiting, row
    assert is_all_free(batch)


def test_a_prompt_that_is_given_up_gives_its_pages_back(model):
    with_pool(model, CONTEXT)
    batch = batch_of(model, "eager", (16, 64), 4)
    prompt = batch.begin(model.prepare("again and " * 40), GenerateRequest(max_new_tokens=20))
    assert not prompt.step()
    assert batch.cache.pool.free_tokens < CONTEXT
    del prompt
    gc.collect()
    assert batch.cache.pool.free_tokens == CONTEXT
    expected = alone(batch_of(model, "eager", (), 1), asks(1)[0])
    assert [token for token, _ in alone(batch, asks(1)[0])] == [token for token, _ in expected]


def test_many_prompts_wait_for_room(model):
    with_pool(model, CONTEXT)
    prompts = [{"prompt": text, "max_new_tokens": 60} for text in ("Hello", "What is red?", "Who are you?", "Hello") * 2]
    found = list(model.batch(prompts, rows=6))
    with_pool(model, None)
    assert [one.token_ids for one in found] == [one.token_ids for one in model.batch(prompts, rows=6)]


def test_numbers_that_are_none_stay_with_their_row(model):
    """What another row's padding and a finished row wrote is not looked at, not even times zero."""
    with_pool(model, 3 * CONTEXT)

    def spoil(layer, number):
        if isinstance(layer, PagedLayer):
            for held in (layer.keys, layer.values):
                held[:, PAGE_TOKENS:] = float("nan")  # all but the page that nobody writes

    check_beside_spoilt(model, spoil)


# The plan ------------------------------------------------------------------------------------------------------------


def test_a_plan_counts_the_pool_and_says_what_it_holds(tmp_path):
    folder = pico.build("llama", tmp_path)
    given = {"quant": "none", "dtype": "float32", "context": 512, "device": DEVICE, "batch": 16}
    whole, paged = trimtab.plan(folder, **given), trimtab.plan(folder, **given, kv_tokens=2000)
    assert whole.pool_tokens is None and paged.pool_tokens == 2048
    assert "keys and values" not in str(whole) and "2048 tokens for 16 rows of up to 512" in str(paged)
    # Contexts of the pool and of the rows, and of prompts in progress where these are not captured.
    others = 2.5 if DEVICE == "cpu" else 0
    assert paged.gpu["kv_cache"] == pytest.approx(whole.gpu["kv_cache"] * (4 + others) / (16 + others), rel=0.05)
    assert trimtab.Plan.from_json(paged.to_json()).pool_tokens == 2048
    with trimtab.load(paged) as model:
        batch = Batch(model, rows=16)
        through(batch, model.prepare([5, 6, 7]), GenerateRequest(max_new_tokens=2))
        assert batch.cache.nbytes() <= paged.gpu["kv_cache"]
    with pytest.raises(RequestError, match="at least the context"):
        trimtab.plan(folder, **given, kv_tokens=511)


@pytest.mark.parametrize("kv", ["full", "int8"])
def test_batch_invariant_answers_are_the_same_in_pages(tmp_path, kv):
    folder = pico.build("gemma4", tmp_path)
    given = {"quant": "none", "dtype": "float32", "context": 128, "device": DEVICE, "batch": 3, "batch_invariant": True, "kv": kv}
    found = []
    for kv_tokens in (None, 256):
        with trimtab.load(trimtab.plan(folder, **given, kv_tokens=kv_tokens)) as model:
            answers = model.batch([{"prompt": prompt, "max_new_tokens": 20} for prompt in PROMPTS], rows=3)
            found.append([one.token_ids for one in answers])
            assert model.answer(PROMPTS[0], max_new_tokens=20).token_ids == found[-1][0]
    assert found[0] == found[1]
