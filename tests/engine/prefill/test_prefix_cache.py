"""A prompt whose prefix is cached says what it says alone: every family, adapters, pictures, chunk borders; and nothing that is
another client's, another adapter's or another picture's is ever reused."""

import shutil
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

import trimtab
from tests import pico
from tests.engine.decode.test_graphs import replayed  # noqa: F401 - a fixture
from tests.engine.prefill.test_prefill import differ, eager, ids, in_chunks, joined, load, picture, scores, through
from tests.lent import DEVICE, lent
from tests.long_runs import crossed
from tests.raised import raising
from trimtab.demo.demo import FOLDER as DEMO
from trimtab.engine.batch.batch import Batch
from trimtab.engine.chat.control_tokens import turns_of
from trimtab.engine.chat.marks import marks_of
from trimtab.engine.kv import kv_cache
from trimtab.engine.kv.prefix_store import Mark, PrefixKey
from trimtab.engine.prefill.prefill import PrefillRunner
from trimtab.engine.prefill.prefix_cache import PrefixCache, Prefixes
from trimtab.errors import DeviceError, DoesNotFitError, RequestError
from trimtab.request import GenerateRequest
from trimtab.serve.contract.job import Job
from trimtab.serve.scheduling.scheduler import Scheduler
from trimtab.serve.worker.engine import LoadedEngine

# As in test_prefill.py: another order of the same sums. A token that is missing or another one's moves a score by 1e-2.
TOLERANCE = 1e-4 if DEVICE != "cpu" else 2e-5
SIZE = 8  # tokens of a block: as many as the families' window
REQUEST = GenerateRequest(max_new_tokens=6)


def keeping(model, capacity=2**22, block_tokens=SIZE):
    """Give a model an empty prefix cache."""
    if model.prefix_cache is not None:
        model.prefix_cache.close()
    model.prefix_cache = PrefixCache(model, capacity, block_tokens=block_tokens)
    return model.prefix_cache


def answer(batch, inputs, **options):
    """Return a row that was answered to its end."""
    row = batch.join(through(batch, inputs, REQUEST, **options)).row
    while row.finish is None:
        batch.step()
    batch.leave(row)
    return row


BATCHES = {
    "transformers": lambda model: eager(model),
    "chunks of 8 and 16": lambda model: in_chunks(model, (8, 16)),
    "chunks, three rows": lambda model: in_chunks(model, (16,), rows=3),
}


@pytest.mark.parametrize(("family", "how"), crossed(pico.FAMILIES, BATCHES))
def test_the_second_turn_of_a_chat_computes_what_is_new_and_says_the_same(family, how):
    with lent(family) as model:
        plain = BATCHES[how](model)
        has_rings = any(one.is_sliding for one in kv_cache.prompt_cache(model.hf_model).layers)
        cache = keeping(model)
        batch = BATCHES[how](model)
        first = answer(batch, model.prepare(ids(27)))
        assert first.cached_tokens == 0
        turn = [*first.token_ids[:-1], 250, 251, 252, 253, 254]
        # Four tokens were decided and went through; of full attention whole blocks are kept.
        expected = 32
        model.prefix_cache = None
        alone, none = scores(plain, model.prepare(turn))
        model.prefix_cache = cache
        found, reused = scores(batch, model.prepare(turn))
        assert none == 0 and reused == expected
        assert differ(found, alone) < TOLERANCE
        # The answer was written otherwise: the prompt alone is shared.
        other = [*first.token_ids[:27], 260, *turn[28:]]
        model.prefix_cache = None
        alone, _ = scores(plain, model.prepare(other))
        model.prefix_cache = cache
        found, reused = scores(batch, model.prepare(other))
        assert reused == (27 if has_rings else 24)
        assert differ(found, alone) < TOLERANCE
        assert cache.numbers()["hits"] == 2 and cache.numbers()["hit_tokens"] == 32 + reused


def clone(model, batch, inputs, **options):
    """Return the scores of a prompt without the cache."""
    kept, model.prefix_cache = model.prefix_cache, None
    try:
        return scores(batch, inputs, **options)[0]
    finally:
        model.prefix_cache = kept


# Another route -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("family", "how"), crossed(["llama", "gemma3", "gemma4", "gemma3n", "mixtral"], BATCHES, first=["gemma4"], rest=1)
)
def test_a_resumed_prompt_says_what_stock_transformers_says(family, how):
    """Full attention, sliding windows, shared keys and values, experts: against transformers' own model, no code of ours."""
    with lent(family) as model:
        keeping(model)
        batch = BATCHES[how](model)
        first = answer(batch, model.prepare(ids(27)))
        turn = [*first.token_ids[:-1], 250, 251, 252, 253, 254]
        found, reused = scores(batch, model.prepare(turn))
        assert reused >= 24
    stock = pico._load(pico.built(family)).float().eval()
    with torch.no_grad():
        expected = stock(input_ids=torch.tensor([[*turn, 7]])).logits[0, -2:].float()
    # The checkpoint is bfloat16, both compute in float32.
    assert differ(found, expected) < TOLERANCE


# Chunks and pieces ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["llama", "gemma4"])
def test_the_same_borders_give_the_same_bits(family):
    """A prompt that resumes where its own chunks begin goes through the same chunks: not one bit differs."""
    with lent(family) as model:
        keeping(model, block_tokens=16)
        batch = in_chunks(model, (16,))
        long = ids(90)
        for count in (48, 90):  # 48 is the end of a chunk, and of a block
            expected = clone(model, in_chunks(model, (16,)), model.prepare(long[:count]))
            found, reused = scores(batch, model.prepare(long[:count]))
            assert torch.equal(found, expected) and reused == (48 if count == 90 else 0)


def test_pieces_of_transformers_own_pass_are_resumed_at_their_borders_with_the_same_bits(monkeypatch):
    with lent("llama") as model:
        monkeypatch.setattr(type(model), "prefill_tokens", 16)
        keeping(model, block_tokens=16)
        expected = clone(model, eager(model), model.prepare(ids(90)))
        batch = eager(model)
        scores(batch, model.prepare(ids(48)))
        found, reused = scores(batch, model.prepare(ids(90)))
        assert reused == 48 and torch.equal(found, expected)


@pytest.mark.parametrize(("family", "how"), crossed(["gemma3", "gemma3n", "gemma4"], BATCHES, rest=1))
def test_a_system_prompt_is_kept_where_a_second_prompt_parts_from_the_first(family, how, monkeypatch):
    """Families with sliding layers: the second prompt leaves a snapshot at the end of what it shares, the third resumes there."""
    monkeypatch.setattr("trimtab.engine.prefill.prefix_cache.LEAST_SAVED_TOKENS", 16)
    with lent(family) as model:
        cache = keeping(model)
        batch = BATCHES[how](model)
        system = ids(35)
        questions = [[*system, *range(200 + 20 * n, 212 + 20 * n)] for n in range(4)]
        turns = (1, 2, 29, 35, 36, 47)
        reused = []
        for question in questions:
            inputs = replace(model.prepare(question), turns=turns)
            expected = clone(model, BATCHES[how](model), inputs)
            found, count = scores(batch, inputs)
            assert differ(found, expected) < TOLERANCE
            reused.append(count)
        # Blocks of 8 tokens are shared up to 32; the last turn that ends before is the one of 29.
        assert reused == [0, 0, 29, 29]
        # Without turns the end of the last shared block will do.
        other = replace(model.prepare([7, *questions[0]]), turns=())
        for number in range(3):
            inputs = replace(other, token_ids=(*other.token_ids[:36], *range(100 + number, 110)))
            inputs = replace(model.prepare(list(inputs.token_ids)), turns=())
            assert differ(scores(batch, inputs)[0], clone(model, BATCHES[how](model), inputs)) < TOLERANCE
        assert cache.store.find(key_of(cache, inputs), limit=40).tokens == 32


@pytest.mark.parametrize(("family", "how"), crossed(["gemma3", "gemma3n", "gemma4"], BATCHES, rest=1))
def test_the_same_prompt_again_computes_nothing_and_has_the_same_bits(family, how):
    with lent(family) as model:
        keeping(model)
        batch = BATCHES[how](model)
        inputs = model.prepare(ids(29))
        (first, none), (second, all_of_it) = scores(batch, inputs), scores(batch, inputs)
        assert none == 0 and all_of_it == 29 and torch.equal(first[0], second[0])
        assert differ(second, first) < TOLERANCE
        assert scores(batch, inputs, client="other")[1] == 0
        if family != "gemma3n":
            inputs = seen(model, family, 9, after=9)
            (first, none), (second, all_of_it) = scores(batch, inputs), scores(batch, inputs)
            assert none == 0 and all_of_it == inputs.prompt_tokens and differ(second, first) < TOLERANCE


def key_of(cache, inputs, client="", content=""):
    return PrefixKey(cache.scope(client, content), inputs.token_ids, inputs.marks)


@pytest.mark.parametrize("way", ["a step", "another prompt", "the end"])
def test_a_first_token_goes_out_before_its_prompt_is_copied(way):
    with lent("gemma3") as model:
        alone = in_chunks(model, (8, 16), rows=2)
        turn = [*ids(27), 250, 251, 252]
        expected, _ = scores(alone, model.prepare(turn))
        cache = keeping(model)
        batch = in_chunks(model, (8, 16), rows=2)
        row = batch.join(through(batch, model.prepare(ids(27)), REQUEST)).row
        assert cache.numbers()["lookups"] == 1 and cache.numbers()["added"] == 0
        if way == "a step":
            batch.step()
        elif way == "the end":
            batch.leave(row)
        found, reused = scores(batch, model.prepare(turn))
        assert reused == 27 and differ(found, expected) < TOLERANCE


def test_a_short_prompt_is_not_cut_for_a_snapshot():
    with lent("gemma3") as model:
        keeping(model)
        batch = in_chunks(model, (8, 16))
        for number in range(3):
            assert scores(batch, model.prepare([*ids(35), 200 + number, 230]))[1] == 0


# Whose it is ---------------------------------------------------------------------------------------------------------


def test_clients_never_meet_and_who_wants_every_position_gets_it():
    with lent("llama") as model:
        cache = keeping(model)
        batch = eager(model)
        inputs = model.prepare(ids(40))
        assert [scores(batch, inputs, client=who)[1] for who in ("a", "b", "a", "b", None, "")] == [0, 0, 32, 32, 0, 0]
        numbers = cache.numbers()
        assert (numbers["lookups"], numbers["hits"], numbers["hit_tokens"]) == (5, 2, 64)
        assert numbers["bytes"] == 3 * 5 * cache.layout.page_bytes  # 40 tokens, three times


def adapters(folder, family="llama"):
    base = pico.build(family, folder / "base")
    for name, seed in (("one", 1), ("two", 2)):
        pico.adapter(base, folder / name, seed=seed)
    shutil.copytree(folder / "one", folder / "copy")
    return base


@pytest.mark.parametrize("how", BATCHES)
def test_adapters_are_known_by_their_content(how, tmp_path):
    base = adapters(tmp_path)
    with trimtab.load(
        base, adapters={"one": tmp_path / "one", "two": tmp_path / "two"}, quant="none", dtype="float32", context=96,
        device=DEVICE, prefix_cache="4MB",
    ) as model:  # fmt: skip
        keeping(model)
        assert len({model.adapter_content(name) for name in (None, "one", "two")}) == 3
        model.unload_adapter("one")
        model.unload_adapter("two")
        model.load_adapter("one", tmp_path / "one")
        batch, plain = BATCHES[how](model), BATCHES[how](model)
        inputs = model.prepare(ids(40))
        expected = {"base": clone(model, plain, inputs), "one": clone(model, plain, inputs, adapter="one")}
        assert differ(expected["one"], expected["base"]) > 1e-3
        assert scores(batch, inputs)[1] == 0
        assert scores(batch, inputs, adapter="one")[1] == 0
        found, reused = scores(batch, inputs, adapter="one")
        assert reused == 32 and differ(found, expected["one"]) < TOLERANCE
        # The same content under another name, and after it was taken off, is the same adapter.
        model.unload_adapter("one")
        model.load_adapter("copied", tmp_path / "copy")
        found, reused = scores(batch, inputs, adapter="copied")
        assert reused == 32 and differ(found, expected["one"]) < TOLERANCE
        # Other content under the same name is another one.
        model.load_adapter("one", tmp_path / "two")
        other = clone(model, plain, inputs, adapter="one")
        found, reused = scores(batch, inputs, adapter="one")
        assert reused == 0 and differ(found, other) < TOLERANCE and differ(found, expected["one"]) > 1e-3


def test_an_adapter_that_changes_while_a_prompt_is_on_its_way_is_not_kept(tmp_path, monkeypatch):
    base = adapters(tmp_path)
    with trimtab.load(base, adapters={"one": tmp_path / "one"}, quant="none", dtype="float32", context=96, device=DEVICE) as model:
        monkeypatch.setattr(type(model), "prefill_tokens", 16)
        cache = keeping(model)
        batch = eager(model)
        prompt = batch.begin(model.prepare(ids(40)), REQUEST, adapter="one")
        prompt.step()
        model.unload_adapter("one")
        model.load_adapter("one", tmp_path / "two")
        prompt.compute()
        batch.leave(batch.join(prompt).row)
        assert cache.numbers()["added"] == 0


@pytest.mark.parametrize("how", BATCHES)
def test_an_adapter_that_is_gone_is_refused_by_name(how, tmp_path):
    with trimtab.load(
        adapters(tmp_path), adapters={"one": tmp_path / "one"}, quant="none", dtype="float32", context=96, device=DEVICE
    ) as model:
        keeping(model)
        batch = BATCHES[how](model)
        prompt = batch.begin(model.prepare(ids(40)), REQUEST, adapter="one")
        model.unload_adapter("one")
        with pytest.raises(RequestError, match="one"):
            prompt.step()


def test_a_row_that_others_stepped_on_with_leaves_no_snapshot():
    """Its sliding layers go on being written after its end, over positions that the next turn looks at."""
    with lent("gemma3") as model:
        keeping(model)
        batch, plain = eager(model, rows=2), eager(model)
        first = batch.join(through(batch, model.prepare(ids(27)), REQUEST)).row
        second = batch.begin(model.prepare(ids(9)), GenerateRequest(max_new_tokens=20)).compute()
        second = batch.join(second).row
        while second.finish is None:
            batch.step()
        assert first.finish is not None and first.written > len(first.token_ids)
        batch.leave(first)
        turn = model.prepare([*first.token_ids, 250, 251, 252])
        expected = clone(model, plain, turn)
        batch.leave(second)
        found, reused = scores(batch, turn)
        assert reused == 27 and differ(found, expected) < TOLERANCE


def test_states_that_are_no_numbers_are_not_cached():
    with lent("llama") as model:
        cache = keeping(model)
        batch = eager(model)
        prompt = through(batch, model.prepare(ids(40)), REQUEST)
        prompt.logits.fill_(float("nan"))
        with pytest.raises(DeviceError):
            batch.join(prompt)
        assert batch.active == [] and cache.numbers()["added"] == 0


# Pictures ------------------------------------------------------------------------------------------------------------


def test_placeholders_are_marked_by_what_they_stand_for():
    ids = [1, 9, 9, 2, 9, 3, 8, 8]
    assert marks_of(ids, [({9}, [b"cat", b"dog"]), ({8}, [b"voice"])]) == (
        Mark(1, 3, b"cat"), Mark(4, 5, b"dog"), Mark(6, 8, b"voice"),
    )  # fmt: skip
    # Rows of one picture with a separator between them: each stands for the whole.
    rows = marks_of(ids, [({9}, [b"cat"]), ({8}, [b"voice"])])
    assert rows[0].digest == rows[1].digest != b"cat" and [mark.start for mark in rows] == [1, 4, 6]
    # Placeholders without a picture, or a picture without placeholders: nothing is known.
    assert marks_of(ids, [({9}, []), ({8}, [b"voice"])]) == marks_of([1, 2], [({9}, [b"cat"])]) == ()
    assert turns_of([5, 1, 2, 5], {5}) == (1, 4)


def seen(model, family, before, *, name=b"cat", seed=0, after=0):
    """Return a prompt with a picture whose content is known, and text behind it."""
    inputs = picture(model, family, before)
    tensors = dict(inputs.tensors)
    if after:
        for key in ("input_ids", "attention_mask", "token_type_ids", "mm_token_type_ids"):
            if key in tensors:
                values = ids(after) if key == "input_ids" else [int(key == "attention_mask")] * after
                more = torch.tensor([values], device=DEVICE, dtype=tensors[key].dtype)
                tensors[key] = torch.cat([tensors[key], more], dim=1)
    if seed:
        pixels = tensors["pixel_values"]
        tensors["pixel_values"] = torch.rand(pixels.shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float32).to(
            pixels
        )
    token_ids = tuple(tensors["input_ids"][0].tolist())
    sounds = [b"a voice"] if pico.AUDIO in token_ids else []
    marks = marks_of(token_ids, [({pico.IMAGE}, [name]), ({pico.AUDIO}, sounds)])
    return replace(inputs, tensors=tensors, token_ids=token_ids, prompt_tokens=len(token_ids), marks=marks)


PICTURES = ("gemma4", "gemma4_dense", "gemma3", "qwen2_5_vl", "qwen3_vl", "mistral3")


@pytest.mark.parametrize(("family", "how"), crossed(PICTURES, BATCHES, rest=1))
def test_a_chat_about_a_picture_goes_on_where_it_was_and_another_picture_is_another_chat(family, how):
    with lent(family) as model:
        keeping(model)
        batch, plain = BATCHES[how](model), BATCHES[how](model)
        first = answer(batch, seen(model, family, 9, after=9))
        turn = seen(model, family, 9, after=30)
        expected = clone(model, plain, turn)
        found, reused = scores(batch, turn)
        assert reused >= 24 and differ(found, expected) < TOLERANCE
        assert first.cached_tokens == 0
        # Another picture with the same tokens shares the text before it, where that is kept.
        other = seen(model, family, 9, after=30, name=b"dog", seed=5)
        expected = clone(model, plain, other)
        found, reused = scores(batch, other)
        assert reused <= 9 and differ(found, expected) < TOLERANCE
        # Whose picture is not known is not kept at all.
        unknown = picture(model, family, 9)
        assert [scores(batch, unknown)[1] for _ in range(2)] == [0, 0]


@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_vl"])
def test_every_chunk_behind_a_cached_picture_has_the_pictures_offset(family):
    """Positions behind a picture are fewer than tokens: the second chunk of the new text goes on where the first one ended."""
    with lent(family) as model:
        keeping(model)
        batch = eager(model)
        answer(batch, seen(model, family, 9, after=9))
        turn = seen(model, family, 9, after=40)
        expected = clone(model, eager(model), turn)
        prompt = batch.begin(turn, REQUEST)
        chunks = [prompt.step(8)]
        while not chunks[-1]:
            chunks.append(prompt.step(8))
        assert len(chunks) > 2 and prompt.row.cached_tokens >= 24 and prompt.offset
        assert differ(joined(batch, prompt)[0], expected) < TOLERANCE


# Memory --------------------------------------------------------------------------------------------------------------


def test_the_memory_is_never_exceeded_and_the_oldest_chat_goes_first(tmp_path):
    with load("gemma4", tmp_path) as model:
        cache = keeping(model, capacity=2**18)
        batch = in_chunks(model, (16,))
        for number in range(12):
            scores(batch, model.prepare([number + 3, *ids(40)]))
            assert cache.numbers()["bytes"] <= 2**18
        assert cache.numbers()["evicted"] > 0
        assert scores(batch, model.prepare([3, *ids(50)]))[1] == 0
        assert scores(batch, model.prepare([14, *ids(50)]))[1] >= 40
        small = keeping(model, capacity=4096)
        for _ in range(2):
            assert scores(batch, model.prepare(ids(40)))[1] == 0
        assert small.numbers()["bytes"] == 0


def test_a_failed_copy_switches_the_cache_off_and_the_answer_goes_on(tmp_path, monkeypatch):
    with load("llama", tmp_path) as model:
        cache = keeping(model)
        batch = eager(model)
        scores(batch, model.prepare(ids(20)))
        with monkeypatch.context() as patch:
            patch.setattr(PrefixCache, "_to_pages", raising(MemoryError("no room")))
            expected = clone(model, eager(model), model.prepare(ids(40)))
            assert differ(scores(batch, model.prepare(ids(40)))[0], expected) < TOLERANCE
        assert cache.numbers()["bytes"] == 0
        assert ("prefix cache", "switched off: MemoryError: no room") in [(f.what, f.why) for f in model.fallbacks]
        assert [scores(batch, model.prepare(ids(40)))[1] for _ in range(2)] == [0, 0]


def test_what_is_kept_is_planned(tmp_path):
    base = pico.build("llama", tmp_path)
    options = {"quant": "none", "dtype": "float32", "context": 96, "device": DEVICE}
    without = trimtab.plan(base, **options)
    plan = trimtab.plan(base, **options, prefix_cache="64MiB")
    assert plan.host["prefix_cache"] == 2**26
    # The process itself has grown by a few pages in between.
    assert abs(plan.host_peak_bytes - without.host_peak_bytes - 2**26) < 2**22
    assert "prefix cache" in str(plan) and "prefix_cache" not in without.host
    with trimtab.load(plan) as model:
        assert model.prefix_cache.capacity_bytes == 2**26
        with pytest.raises(RequestError, match="already"):
            model.keep_prefixes(2**20)
        cache = model.prefix_cache
    assert cache.store is None
    with trimtab.load(without) as model:
        assert model.prefix_cache is None
        with pytest.raises(DoesNotFitError, match="prefix cache"):
            model.keep_prefixes(2**50)
        with pytest.raises(RequestError, match="at least"):
            model.keep_prefixes(1)
        model.keep_prefixes(2**20)
        assert model.prefix_cache.capacity_bytes == 2**20


RECURRENT = {"transformers": ("eager", "eager", None), "chunks": ("fused", "static", (8, 16))}


def recurrent(model, how, rows=1):
    decode, mode, sizes = RECURRENT[how]
    batch = Batch(model, rows=rows, decode=decode)
    batch.prompts = PrefillRunner(batch, mode, sizes)
    return batch


@pytest.mark.skipif(DEVICE != "cpu", reason="a plan for a CPU")
@pytest.mark.parametrize("how", RECURRENT)
def test_states_of_recurrent_layers_resume_at_the_end_of_a_prompt_and_of_an_answer(how):
    with lent("qwen3_5") as model:
        cache = keeping(model)
        batch, plain = recurrent(model, how), recurrent(model, how)
        first = answer(batch, model.prepare(ids(27)))
        # What follows the answer, another answer to the prompt, and a prompt that shares less than was ever a whole state.
        said = first.token_ids
        turns = {32: [*said[:-1], 250, 251, 252], 27: [*said[:27], 260, 261], 0: [*said[:26], 260, 261]}
        for expected, turn in turns.items():
            model.prefix_cache = None
            alone, _ = scores(plain, model.prepare(turn))
            model.prefix_cache = cache
            found, reused = scores(batch, model.prepare(turn))
            # A state after 32 steps, or after a pass of 32 tokens, whose sums transformers takes in blocks.
            assert reused == expected and differ(found, alone) < 5 * TOLERANCE
        for item in cache.store._items.values():  # a state of other tokens is seen
            if item.tail is not None:
                cache._memory.tensor[item.pages[0] * cache.layout.page_bytes :][: cache.layout.snapshot_bytes].zero_()
        found, reused = scores(batch, model.prepare([*turns[32], 253]))
        model.prefix_cache = None
        assert reused and differ(found, scores(plain, model.prepare([*turns[32], 253]))[0]) > 1e-3


@pytest.mark.skipif(DEVICE != "cpu", reason="a plan for a CPU")
def test_the_layout_is_not_learned_before_every_layer_has_memory():
    """Recurrent layers have it before the first prompt is computed, which an image's towers may ask of the cache."""
    with lent("qwen3_5") as model:
        cache, batch = keeping(model), recurrent(model, "chunks")
        batch.prompts.chunk_forward()
        assert batch.steps.fused_step() is not None and not cache.learn(batch.cache) and cache.layout is None
        answer(batch, model.prepare(ids(9)))
        assert cache.layout.blocks and cache.layout.rings


def test_an_answer_that_ends_while_a_step_is_queued_is_kept_with_that_step(replayed, tmp_path):  # noqa: F811
    with load("qwen3_5", tmp_path) as model:
        cache = keeping(model)
        batch = recurrent(model, "chunks", rows=2)
        row = batch.join(through(batch, model.prepare(ids(27)), REQUEST)).row
        for _ in range(3):
            batch.step()
        assert row in batch._ahead.numbers and row.written == 30
        batch.leave(row)
        turn = [*row.token_ids, 250, 251]
        found, reused = scores(batch, model.prepare(turn))
        model.prefix_cache = None
        assert reused == 31 == len(row.token_ids) and cache.numbers()["hits"] == 1
        assert differ(found, scores(recurrent(model, "chunks", rows=2), model.prepare(turn))[0]) < 5 * TOLERANCE


def test_recurrent_layers_are_named():
    from transformers import Qwen3NextConfig

    config = Qwen3NextConfig(num_hidden_layers=4, hidden_size=64, num_attention_heads=2, num_key_value_heads=2)
    why = kv_cache.why_not(SimpleNamespace(config=config))
    assert why is not None and why.startswith("layer 0 keeps a LinearAttention")


def test_a_family_with_another_state_is_named(tmp_path, monkeypatch):
    with load("llama", tmp_path) as model:
        monkeypatch.setattr(model, "anatomy", replace(model.anatomy, capture_unsupported="layer 0 keeps a LinearAttentionLayer"))
        model.keep_prefixes(2**20)
        assert ("prefix cache", "layer 0 keeps a LinearAttentionLayer") in [(f.what, f.why) for f in model.fallbacks]
        assert Prefixes(Batch(model, rows=1)).cache is None


def test_rows_of_another_context_keep_nothing():
    with lent("gemma3") as model:
        keeping(model)
        assert Prefixes(Batch(model, rows=1, context_tokens=64)).cache is None


# The server ----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def served():
    paths = {name: DEMO / "adapters" / name for name in ("style", "specialist")}
    with trimtab.load(
        DEMO / "base", quant="none", dtype="float32", adapters={"style": paths["style"]}, context=384, audio_s=1.0,
        device=DEVICE, batch=2, prefix_cache="64MB",
    ) as model:  # fmt: skip
        yield model, paths


CHAT = [
    {"role": "system", "content": "You are a painter who loves red and blue and green and yellow things very much."},
    {"role": "user", "content": "Tell me about red and blue and green and yellow things, one after the other."},
]


@pytest.fixture
def cuts_soon(monkeypatch):
    monkeypatch.setattr("trimtab.engine.prefill.prefix_cache.LEAST_SAVED_TOKENS", 16)
    monkeypatch.setattr("trimtab.engine.prefill.prefix_cache.LEAST_CUT_TOKENS", 16)


def told(engine, *jobs):
    """Answer jobs one after the other; returns (text, usage) of each."""
    found = []
    for job in jobs:
        events = []
        scheduler = Scheduler(engine, events.append)
        scheduler.submit(job)
        while scheduler.turn():
            pass
        assert events[-1].kind == "done", events[-1].error
        found.append(("".join(event.text for event in events), events[-1].usage))
    return found


def test_clients_of_a_server_have_cached_prefixes_of_their_own_and_adapters_too(served, cuts_soon):
    model, paths = served
    keeping(model, capacity=2**26)
    engine = LoadedEngine(model, rows=2, resident_limit=1)
    engine.shelf.add("specialist", paths["specialist"])

    def ask(name, messages=CHAT, **options):
        return Job(name, messages, GenerateRequest(max_new_tokens=24), **options)

    # The model has sliding layers: the same prompt is kept whole, and another resumes behind the system message.
    first, second = told(engine, *(ask(name, client="a") for name in "12"))
    ((other, usage),) = told(engine, ask("other", client="b"))
    assert first[0] == second[0] == other
    assert first[1]["cached_tokens"] == usage["cached_tokens"] == 0
    assert second[1]["cached_tokens"] == second[1]["prompt_tokens"]
    others = [[CHAT[0], {"role": "user", "content": text}] for text in ("What is red?", "And what is green?")]
    asked = (ask(f"{who} {chat[1]['content']}", chat, client=who) for chat in others for who in "ac")
    usages = [usage for _, usage in told(engine, *asked)]
    # The system message ends at 29 tokens, and a question begins behind two more: `<|turn>` and its role with a line's end.
    assert [usage["cached_tokens"] for usage in usages] == [31, 0, 31, 31]
    # The next turn resumes behind the answer, or, where the template writes it otherwise than it was said, before it.
    turn = [*CHAT, {"role": "assistant", "content": first[0]}, {"role": "user", "content": "And what is blue?"}]
    ((text, usage),) = told(engine, ask("4", turn, client="a"))
    assert usage["cached_tokens"] >= first[1]["prompt_tokens"]
    kept, model.prefix_cache = model.prefix_cache, None
    ((alone, none),) = told(engine, ask("5", turn, client="a"))
    model.prefix_cache = kept
    assert text == alone and none["cached_tokens"] == 0
    # One place for adapters: each comes back with another serial and the same content.
    names = ("style", "specialist") * 2
    answers = told(engine, *(ask(name, adapter=name, client="a") for name in names))
    assert [bool(usage["cached_tokens"]) for _, usage in answers] == [False, False, True, True]
    assert {text for text, _ in answers[::2]}.isdisjoint(text for text, _ in answers[1::2])
    assert len({text for text, _ in answers}) == 2 and engine.shelf.swaps >= 3
    for name in engine.shelf.resident:
        model.unload_adapter(name)


def test_pictures_of_a_server_are_known_by_their_pixels(served, cuts_soon):
    model, _ = served
    keeping(model, capacity=2**26)
    engine = LoadedEngine(model, rows=2)
    engine.batch.prompts = PrefillRunner(engine.batch, "static", (16, 64))

    def ask(name, number):
        picture = (DEMO / "images" / f"image_{number}.png").read_bytes()
        parts = [{"type": "image", "image": picture}, {"type": "text", "text": "What do you see?"}]
        return Job(name, [CHAT[0], {"role": "user", "content": parts}], GenerateRequest(max_new_tokens=24))

    answers = told(engine, ask("1", 1), ask("2", 2), ask("3", 3), ask("4", 1), ask("5", 2))
    cached = [usage["cached_tokens"] for _, usage in answers]
    assert answers[0][0] == answers[3][0] != answers[1][0] == answers[4][0]
    # The pictures are different ones: the prompts share the system prompt.
    assert cached[:3] == [0, 31, 31]
    assert cached[3:] == [usage["prompt_tokens"] for _, usage in answers[3:]]


def test_a_conversation_computes_what_is_new_in_it():
    plan = trimtab.plan(DEMO / "base", quant="none", dtype="float32", context=384, audio_s=1.0, device=DEVICE, prefix_cache="64MB")
    questions = ["Tell me about red and blue and green and yellow things.", "And what is blue?", "And green?"]
    with trimtab.load(plan) as model:
        chat = model.chat(system=CHAT[0]["content"], max_new_tokens=12)
        answers = [chat.send(question) for question in questions]
        assert [bool(answer.cached_tokens) for answer in answers] == [False, True, True]
        assert answers[2].cached_tokens >= answers[1].prompt_tokens > answers[1].cached_tokens >= answers[0].prompt_tokens
    with trimtab.load(trimtab.plan(DEMO / "base", quant="none", dtype="float32", context=384, audio_s=1.0, device=DEVICE)) as model:
        chat = model.chat(system=CHAT[0]["content"], max_new_tokens=12)
        assert [chat.send(question).text for question in questions] == [answer.text for answer in answers]
        assert chat.last.cached_tokens == 0
