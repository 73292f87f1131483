"""What a copy from or to the prefix cache moves, bit by bit, and how many calls it takes: no more for more layers."""

from types import SimpleNamespace

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import DynamicCache, Gemma3TextConfig

from trimtab.engine.kv import kv_cache as hf_slots
from trimtab.engine.kv.prefix_layout import RowViews
from trimtab.engine.kv.prefix_store import PrefixKey
from trimtab.engine.prefill.prefix_cache import PrefixCache, Prefixes
from trimtab.planning.values.byte_sizes import PAGE_TOKENS

SIZE, WINDOW, CONTEXT, HEADS, WIDTH = 8, 24, 200, 2, 16
TOKENS = 5 * SIZE + 3


class Model(SimpleNamespace):
    def forward(self, past_key_values):
        """Only its parameters are read."""


def made(sliding=3, full=2, *, staging=None, pages=None, kv="full"):
    """Return a batch's prefixes over rows of random states. staging: bytes of the copy buffer. pages: of rows 0 and 1 in a pool."""
    kinds = ["sliding_attention"] * sliding + ["full_attention"] * full
    config = Gemma3TextConfig(num_hidden_layers=len(kinds), layer_types=kinds, sliding_window=WINDOW)
    hf_model = Model(config=SimpleNamespace(get_text_config=lambda: config), modules=list)
    slots = hf_slots.BatchedKVCache(2, CONTEXT, torch.device("cpu"), kv_tokens=pages and CONTEXT + 2 * PAGE_TOKENS, kv=kv)
    slots.lay_out(hf_slots.prompt_cache(hf_model, kv))
    generator = torch.Generator().manual_seed(0)
    for layer in slots.layers:
        width = WIDTH if layer.is_ring else 2 * WIDTH
        one = torch.zeros(1, HEADS, 1, width + 4 * (kv == "int8"), dtype=torch.int8 if kv == "int8" else torch.bfloat16)
        layer.lazy_initialization(one, one)
        for states in (layer.keys, layer.values):  # any bits, not numbers among them
            states.view(torch.uint8).random_(generator=generator)
    for row, numbers in enumerate(pages or ()):
        slots.bind(row, numbers)
    anatomy = SimpleNamespace(capture_unsupported=None)
    model = SimpleNamespace(hf_model=hf_model, device=slots.device, context_tokens=CONTEXT, anatomy=anatomy)
    cache = model.prefix_cache = PrefixCache(model, 2**20, block_tokens=SIZE)
    cache._staging = None if staging is None else torch.empty(staging, dtype=torch.uint8)
    assert cache.learn(slots)
    return Prefixes(SimpleNamespace(model=model, cache=slots, context_tokens=CONTEXT))


def tokens_of(prefixes, field, row):
    """Return a full layer's states of a row in the order of its tokens."""
    layer, pool = prefixes.batch.cache.layers[field.layer], prefixes.batch.cache.pool
    states = getattr(layer, field.name)
    if pool is None:
        return states[row]
    return torch.cat([states[:, page * PAGE_TOKENS : (page + 1) * PAGE_TOKENS] for page in pool.pages_at(row)], dim=1)


def bits(tensor):
    return tensor.contiguous().view(torch.uint8)


WAYS = {
    "rows": {}, "rows through a buffer": {"staging": 2**16}, "a buffer of two pages": {"staging": 2 * 4096},
    "8 bits": {"staging": 2**16, "kv": "int8"}, "consecutive pages": {"pages": ((2, 3), (4, 5))},
    "scattered pages": {"pages": ((5, 2), (3, 6)), "staging": 2**16},
}  # fmt: skip


@pytest.mark.parametrize("tokens", [TOKENS, 10 * SIZE])
@pytest.mark.parametrize("way", WAYS)
def test_every_byte_is_kept_where_its_field_is_and_comes_back(way, tokens):
    prefixes = made(**WAYS[way])
    cache, slots, key = prefixes.cache, prefixes.batch.cache, PrefixKey(b"s", range(tokens))
    cache.save(key, prefixes._views_of(0), snapshot=True)
    match = cache.store.find(key, limit=tokens)
    assert match.tokens == tokens
    layout, tail = cache.layout, tokens % SIZE
    pages = cache._memory.tensor[: cache.store.pages * layout.page_bytes].view(-1, layout.page_bytes)
    snapshot = pages[list(match.snapshot)].view(1, -1)
    for field in layout.blocks:
        expected = tokens_of(prefixes, field, 0)[:, : tokens - tail].unflatten(1, (-1, SIZE)).transpose(0, 1)
        assert torch.equal(bits(field.view(pages[list(match.blocks)])), bits(expected))
    for field in layout.rings:
        expected = getattr(slots.layers[field.layer], field.name)[0]
        assert torch.equal(bits(field.view(snapshot)[0]), bits(expected))
    for field in layout.tails if tail else ():
        expected = tokens_of(prefixes, field, 0)[:, tokens - tail : tokens]
        assert torch.equal(bits(field.view(snapshot)[0, :, :tail]), bits(expected))
    behind = {field: tokens_of(prefixes, field, 1)[:, tokens:].clone() for field in layout.blocks}
    prefixes.into_row(match, 1)
    for field in layout.blocks:
        both = [tokens_of(prefixes, field, row)[:, :tokens] for row in (0, 1)]
        assert torch.equal(*map(bits, both))
        assert torch.equal(bits(tokens_of(prefixes, field, 1)[:, tokens:]), bits(behind[field]))
    for field in layout.rings:
        states = getattr(slots.layers[field.layer], field.name)
        assert torch.equal(bits(states[0]), bits(states[1]))


class Calls(TorchDispatchMode):
    """The names of the operations that torch was asked for."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        self.names.append(operation.overloadpacket.__name__)
        return operation(*args, **(kwargs or {}))


def calls(**options):
    """Return the operations of a turn's two copies, for a row and a buffer whose views are there."""
    prefixes = made(staging=2**18, **options)
    for turn in range(2):
        key = PrefixKey(b"s", [turn] * TOKENS)
        with Calls() as saved:
            prefixes.cache.save(key, prefixes._views_of(0), snapshot=True)
        match = prefixes.cache.store.find(key, limit=TOKENS)
        with Calls() as loaded:
            prefixes.into_row(match, 1)
    return saved.names, loaded.names


def test_a_turn_takes_no_more_calls_for_more_sliding_layers():
    assert calls(sliding=2) == calls(sliding=20)


def test_a_turn_copies_as_often_for_more_full_layers_and_slices_each_once_a_copy():
    few, many = calls(full=2), calls(full=10)
    for a, b in zip(few, many, strict=True):
        assert [name for name in a if name != "slice"] == [name for name in b if name != "slice"]
        assert set(b) == {"slice", "copy_", "_foreach_copy_"} and b.count("_foreach_copy_") == 3
        # Keys and values of eight layers: blocks and the tail of the row, the tail of the buffer.
        assert b.count("slice") - a.count("slice") == 2 * 8 * 3


def test_pages_that_follow_each_other_are_copied_like_a_row():
    assert calls(pages=((2, 3), (4, 5))) == calls()


def test_rings_have_no_gaps_on_either_side():
    """torch copies a list in one kernel if all of its tensors are dense and each pair has the same strides."""
    prefixes = made(staging=2**18)
    buffer, views = prefixes.cache._buffer, prefixes._views_of(1)
    parts = buffer.parts(has_tail=True)
    assert len(parts) == 1 and len(views.rings) == 6
    for row, held in zip(views.rings, buffer.part(parts[0])[1], strict=True):
        assert row.stride() == held.stride() == (1,) and row.shape == held.shape and row.dtype == held.dtype


def test_a_buffer_that_is_small_takes_a_snapshot_in_parts():
    layout = made().cache.layout
    one = layout.rings[0].nbytes
    assert [len(part.rings) for part in layout.parts(2**30, has_tail=False)] == [6]
    parts = layout.parts(2 * one, has_tail=True)
    assert [number for part in parts for number in part.rings] == list(range(6))
    assert [number for part in parts for number in part.tails] == list(range(4))
    assert all(part.stop - part.start <= 2 * one for part in parts) and len(parts) == 5
    assert not made(sliding=0).cache.layout.parts(2**30, has_tail=False)


def test_views_of_a_row_are_of_the_cache_that_the_model_has():
    prefixes = made()
    views = prefixes._views_of(0)
    assert prefixes._views_of(0) is views
    prefixes.model.prefix_cache = PrefixCache(prefixes.model, 2**20, block_tokens=2 * SIZE)
    assert prefixes.cache.learn(prefixes.batch.cache)
    assert prefixes._views_of(0).blocks[0].shape[2] == 2 * SIZE


def test_views_of_a_row_in_pages_follow_its_pages():
    prefixes = made(pages=((2, 3), (4, 5)))
    assert prefixes._views_of(0).pages == (2, 3)
    prefixes.batch.cache.bind(0, (6, 7))
    assert prefixes._views_of(0).pages == (6, 7)


def test_a_prompt_of_less_than_a_block_has_no_blocks():
    layout = made(sliding=0).cache.layout
    states = {(field.layer, field.name): torch.zeros(HEADS, 3, 2 * WIDTH) for field in layout.blocks}
    assert RowViews.of(layout, states).blocks[0].shape == (0, HEADS, SIZE, 2 * WIDTH)


def test_a_row_is_cleared_and_taken_in_all_layers_after_some_had_states():
    config = Gemma3TextConfig(num_hidden_layers=2, layer_types=["sliding_attention", "full_attention"])
    slots = hf_slots.BatchedKVCache(1, CONTEXT, torch.device("cpu"))
    slots.has_prompt_row = True
    slots.lay_out(DynamicCache(config=config))
    one = torch.ones(1, HEADS, 1, WIDTH)
    for layer in slots.layers:
        slots.clear(0)  # a first pass that fails leaves some layers without states
        layer.lazy_initialization(one, one)
    assert not slots._row_tensors
    for layer in slots.layers:
        layer.keys.fill_(1), layer.values.fill_(2)
    slots.clear(slots.prompt_row)
    slots.layers.append(object())  # stands for a layer that shares another one's states, and never has any
    tensors = slots._tensors_of(0)
    assert len(tensors) == 4 and slots._tensors_of(0) is tensors
    slots.layers.pop()
    assert all(not states[1].any() and states[0].all() for one in slots.layers for states in (one.keys, one.values))
    slots.take(0, 5)
    assert not any(states.any() for one in slots.layers for states in (one.keys, one.values))
