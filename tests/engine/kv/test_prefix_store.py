"""What is cached of prompts: never another's, never more than its memory; its copies move each bit in few calls."""

from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import DynamicCache, Gemma3TextConfig

from tests.examples import examples
from trimtab.engine.kv import kv_cache
from trimtab.engine.kv.prefix_layout import RowViews
from trimtab.engine.kv.prefix_store import Mark, Match, PrefixKey, PrefixStore, scope_of
from trimtab.engine.prefill.prefix_cache import PrefixCache, Prefixes
from trimtab.errors import RequestError
from trimtab.planning.values.byte_sizes import PAGE_TOKENS

SIZE = 4
A, B = scope_of("client a", ""), scope_of("client b", "")


def key(ids, scope=A, marks=()):
    return PrefixKey(scope, tuple(ids), marks)


def test_what_two_prompts_share_is_found_up_to_a_whole_block():
    store = PrefixStore(pages=10, block_tokens=SIZE)
    added = store.add(key(range(11)))
    assert [number for number, _ in added.blocks] == [0, 1] and store.used_pages == 2
    assert store.find(key([*range(9), 99, 98, 97]), limit=11) == Match(8, (0, 1), shared_tokens=8)
    # The last token has to go through: its scores are wanted.
    assert store.find(key(range(8)), limit=7).tokens == 4 and store.find(key([1, *range(1, 11)]), limit=10) == Match()
    assert [number for number, _ in store.add(key(range(15))).blocks] == [2] and store.used_pages == 3


def test_scopes_are_never_shared():
    store = PrefixStore(pages=10, block_tokens=SIZE)
    store.add(key(range(8), A))
    assert store.find(key(range(8), B), limit=8) == Match()
    assert scope_of("ab", "c") != scope_of("a", "bc") != scope_of("abc") and scope_of("x", "") != scope_of("x")


def test_a_longer_key_takes_over_the_digests_of_what_both_begin_with():
    marks = (Mark(2, 6, b"cat"),)
    first = key(range(11), marks=marks)
    digests = [first.block(number, SIZE) for number in range(2)]
    for ids in (range(20), range(7), [*range(10), 99, 98], [9, *range(1, 20)]):
        fresh, longer = key(ids, marks=marks), first.with_tokens(list(ids))
        for number in range(len(tuple(ids)) // SIZE):
            assert longer.block(number, SIZE) == fresh.block(number, SIZE) and longer.block(0, 2) == fresh.block(0, 2)
    assert [first.block(number, SIZE) for number in range(2)] == digests
    assert first.with_tokens([9, *range(1, 11)]).block(1, SIZE) != digests[1]


def test_a_picture_is_known_by_its_content_in_every_block_that_it_touches():
    store = PrefixStore(pages=10, block_tokens=SIZE)
    ids = [1, 9, 9, 9, 9, 9, 2, 3, 4, 5, 6, 7]
    cat, dog = (Mark(1, 6, name) for name in (b"cat", b"dog"))
    store.add(key(ids, marks=(cat,)))
    assert store.find(key(ids, marks=(cat,)), limit=12).tokens == 12
    assert store.find(key(ids, marks=(dog,)), limit=12).tokens == 0 and store.find(key(ids), limit=12).tokens == 0
    # The second picture of a prompt does not change what comes before it.
    two = (cat, Mark(9, 11, b"dog"))
    assert store.find(key(ids, marks=two), limit=12).tokens == 8


def test_a_family_with_snapshots_resumes_only_there():
    store = PrefixStore(pages=20, block_tokens=SIZE, snapshot_pages=2)
    ids = tuple(range(20))
    first = store.add(key(ids[:10]), snapshot=True, offset=-3)
    assert len(first.blocks) == 2 and len(first.snapshot) == 2
    store.add(key(ids[:17]))
    match = store.find(key(ids), limit=19)
    assert match == Match(10, (0, 1), first.snapshot, shared_tokens=16, offset=-3)
    # Ten tokens were seen: another eleventh token is fine, another tenth is not.
    assert store.find(key([*ids[:10], 77]), limit=10).tokens == 10 and store.find(key([*ids[:9], 77, 78]), limit=10).tokens == 0
    assert store.add(key(ids[:10]), snapshot=True).snapshot == ()
    # One block at least; less is computed faster than it is looked for.
    assert store.add(key([50, 51]), snapshot=True).snapshot == ()


def test_a_prefix_ends_only_where_it_may():
    full = PrefixStore(pages=20, block_tokens=SIZE)
    full.add(key(range(16)))
    assert full.find(key(range(16)), limit=15, may_end_at=lambda place: place != 12).tokens == 8
    ring = PrefixStore(pages=20, block_tokens=SIZE, snapshot_pages=1)
    for count in (6, 9):
        ring.add(key(range(count)), snapshot=True)
    assert ring.find(key(range(16)), limit=15, may_end_at=lambda place: place != 9).tokens == 6


def test_the_oldest_goes_first_and_nothing_that_is_needed():
    store = PrefixStore(pages=4, block_tokens=SIZE)
    store.add(key([1] * 8))
    store.add(key([2] * 8))
    store.find(key([1] * 8), limit=8)
    store.add(key([3] * 4))  # the end of what was used longest ago
    assert [store.find(key([token] * 8), limit=8).tokens for token in (1, 2, 3)] == [8, 4, 4]
    # A prompt that is longer than all of the memory keeps its prefix.
    assert len(store.add(key([4] * 40)).blocks) == 4
    assert store.find(key([4] * 40), limit=40).tokens == 16 and store.used_pages == 4 and store.counts["evicted"] == 5


def test_keeping_a_long_prompt_takes_time_by_its_length_and_not_by_its_square(monkeypatch):
    """It happens on the thread that makes tokens: what is kept is one set that grows, not one for each block."""
    store, take, given = PrefixStore(pages=200, block_tokens=SIZE), PrefixStore._take, []

    def noted(self, count, kept=frozenset(), **options):
        given.append((kept, len(kept)))
        return take(self, count, kept, **options)

    monkeypatch.setattr(PrefixStore, "_take", noted)
    for first, last in ((0, 64), (64, 200)):
        given.clear()
        assert len(store.add(key(range(last * SIZE))).blocks) == last - first
        assert [length for _, length in given] == list(range(first, last)) and all(kept is given[0][0] for kept, _ in given)


def test_blobs_share_the_memory():
    store = PrefixStore(pages=4, block_tokens=SIZE)
    store.add(key([1] * 8))
    pages = store.add_blob(b"picture", 3, "what it is")
    assert len(pages) == 3 and store.find_blob(b"picture") == (pages, "what it is") and store.find_blob(b"other") is None
    assert store.find(key([1] * 8), limit=8).tokens == 4
    assert store.add_blob(b"picture", 3) is None and store.add_blob(b"large", 5) is None
    assert store.find_blob(b"picture")[0] == pages
    store.clear()
    assert store.find_blob(b"picture") is None and store.used_pages == 0


@pytest.mark.parametrize("sizes", [{"pages": 0, "block_tokens": 4}, {"pages": 4, "block_tokens": 0}])
def test_sizes_below_one_are_refused(sizes):
    with pytest.raises(RequestError, match="at least 1"):
        PrefixStore(**sizes)


IDS = st.lists(st.integers(0, 1), max_size=14)  # two tokens: prompts often begin alike
MARKS = st.sampled_from([(), (Mark(2, 5, b"cat"),), (Mark(2, 5, b"dog"),)])
STEPS = st.lists(st.tuples(st.sampled_from(["add", "snapshot", "find", "blob"]), st.sampled_from([A, B]), IDS, MARKS), max_size=60)


def content(scope, ids, marks):
    """Return what must be equal for a state to be the same."""
    return scope, tuple(ids), tuple(mark for mark in marks if mark.start < len(ids))


@settings(max_examples=examples(300), deadline=None)
@given(STEPS, st.integers(1, 9), st.sampled_from([0, 1, 2]))
def test_pages_hold_what_they_are_found_for(steps, pages, snapshot_pages):
    """Against a memory that is really written: whatever is found was computed from exactly these tokens."""
    store = PrefixStore(pages=pages, block_tokens=SIZE, snapshot_pages=snapshot_pages)
    memory = {}
    for what, scope, ids, marks in steps:
        one = PrefixKey(scope, tuple(ids), marks)
        if what == "blob":
            digest = scope_of("blob", bytes(ids))
            kept = store.find_blob(digest)
            taken = None if kept is None else kept[0]
            if kept is None:
                taken = store.add_blob(digest, 1 + len(ids) % 3)
                memory |= dict.fromkeys(taken or (), digest)
            assert all(memory[page] == digest for page in taken or ())
        elif what == "find":
            match = store.find(one, limit=len(ids))
            assert match.tokens <= match.shared_tokens + SIZE - 1 and match.tokens <= len(ids)
            for number, page in enumerate(match.blocks):
                end = (number + 1) * SIZE
                assert memory[page] == ("block", *content(scope, ids[:end], marks))
            for page in match.snapshot:
                assert memory[page] == ("snapshot", *content(scope, ids[: match.tokens], marks))
            assert bool(match.snapshot) == bool(match.tokens and snapshot_pages)
        else:
            added = store.add(one, snapshot=what == "snapshot")
            for number, page in added.blocks:
                memory[page] = ("block", *content(scope, ids[: (number + 1) * SIZE], marks))
            for page in added.snapshot:
                memory[page] = ("snapshot", *content(scope, ids, marks))
            everything = [page for _, page in added.blocks] + list(added.snapshot)
            assert len(set(everything)) == len(everything)
        assert store.used_pages <= pages
        held = [page for item in store._items.values() for page in item.pages]
        assert len(set(held)) == len(held) == store.used_pages and max(held, default=0) < pages
        # What others need was used after them.
        order = {item.key: place for place, item in enumerate(store._items.values())}
        assert all(order[i.parent.key] > order[i.key] for i in store._items.values() if i.parent is not None)


LAYOUT_SIZE, WINDOW, CONTEXT, HEADS, WIDTH = 8, 24, 200, 2, 16
TOKENS = 5 * LAYOUT_SIZE + 3


class Model(SimpleNamespace):
    def forward(self, past_key_values):
        """Only its parameters are read."""


def made(sliding=3, full=2, *, staging=None, pages=None, kv="full"):
    """Return a batch's prefixes over rows of random states. staging: bytes of the copy buffer. pages: of rows 0 and 1 in a pool."""
    kinds = ["sliding_attention"] * sliding + ["full_attention"] * full
    config = Gemma3TextConfig(num_hidden_layers=len(kinds), layer_types=kinds, sliding_window=WINDOW)
    hf_model = Model(config=SimpleNamespace(get_text_config=lambda: config), modules=list)
    slots = kv_cache.BatchedKVCache(2, CONTEXT, torch.device("cpu"), kv_tokens=pages and CONTEXT + 2 * PAGE_TOKENS, kv=kv)
    slots.lay_out(kv_cache.prompt_cache(hf_model, kv))
    generator = torch.Generator().manual_seed(0)
    for layer in slots.layers:
        width = WIDTH if layer.is_ring else 2 * WIDTH
        one = torch.zeros(1, HEADS, 1, width + 4 * (kv == "int8"), dtype=torch.int8 if kv == "int8" else torch.bfloat16)
        layer.lazy_initialization(one, one)
        for states in (layer.keys, layer.values):  # any bits, not numbers among them
            states.view(torch.uint8).random_(generator=generator)
    for row, numbers in enumerate(pages or ()):
        slots.bind(row, numbers)
    anatomy, plan = SimpleNamespace(capture_unsupported=None), SimpleNamespace(is_whole=True)
    model = SimpleNamespace(hf_model=hf_model, device=slots.device, context_tokens=CONTEXT, anatomy=anatomy, plan=plan)
    cache = model.prefix_cache = PrefixCache(model, 2**20, block_tokens=LAYOUT_SIZE)
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


@pytest.mark.parametrize("tokens", [TOKENS, 10 * LAYOUT_SIZE])
@pytest.mark.parametrize("way", WAYS)
def test_every_byte_is_kept_where_its_field_is_and_comes_back(way, tokens):
    prefixes = made(**WAYS[way])
    cache, slots, key = prefixes.cache, prefixes.batch.cache, PrefixKey(b"s", range(tokens))
    cache.save(key, prefixes._views_of(0), snapshot=True)
    match = cache.store.find(key, limit=tokens)
    assert match.tokens == tokens
    layout, tail = cache.layout, tokens % LAYOUT_SIZE
    pages = cache._memory.tensor[: cache.store.pages * layout.page_bytes].view(-1, layout.page_bytes)
    snapshot = pages[list(match.snapshot)].view(1, -1)
    for field in layout.blocks:
        expected = tokens_of(prefixes, field, 0)[:, : tokens - tail].unflatten(1, (-1, LAYOUT_SIZE)).transpose(0, 1)
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
        assert torch.equal(*map(bits, [tokens_of(prefixes, field, row)[:, :tokens] for row in (0, 1)]))
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
    prefixes.model.prefix_cache = PrefixCache(prefixes.model, 2**20, block_tokens=2 * LAYOUT_SIZE)
    assert prefixes.cache.learn(prefixes.batch.cache) and prefixes._views_of(0).blocks[0].shape[2] == 2 * LAYOUT_SIZE


def test_views_of_a_row_in_pages_follow_its_pages():
    prefixes = made(pages=((2, 3), (4, 5)))
    assert prefixes._views_of(0).pages == (2, 3)
    prefixes.batch.cache.bind(0, (6, 7))
    assert prefixes._views_of(0).pages == (6, 7)


def test_a_prompt_of_less_than_a_block_has_no_blocks():
    layout = made(sliding=0).cache.layout
    states = {(field.layer, field.name): torch.zeros(HEADS, 3, 2 * WIDTH) for field in layout.blocks}
    assert RowViews.of(layout, states).blocks[0].shape == (0, HEADS, LAYOUT_SIZE, 2 * WIDTH)


def test_a_row_is_cleared_and_taken_in_all_layers_after_some_had_states():
    config = Gemma3TextConfig(num_hidden_layers=2, layer_types=["sliding_attention", "full_attention"])
    slots = kv_cache.BatchedKVCache(1, CONTEXT, torch.device("cpu"))
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
