"""What is cached of prompts: never another's, never more than its memory, the oldest gone first."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.examples import examples
from trimtab.engine.kv.prefix_store import Mark, Match, PrefixKey, PrefixStore, scope_of
from trimtab.errors import RequestError

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
    assert store.find(key(range(8)), limit=7).tokens == 4
    assert store.find(key([1, *range(1, 11)]), limit=10) == Match()
    again = store.add(key(range(15)))
    assert [number for number, _ in again.blocks] == [2] and store.used_pages == 3


def test_scopes_are_never_shared():
    store = PrefixStore(pages=10, block_tokens=SIZE)
    store.add(key(range(8), A))
    assert store.find(key(range(8), B), limit=8) == Match()
    assert scope_of("ab", "c") != scope_of("a", "bc") != scope_of("abc")
    assert scope_of("x", "") != scope_of("x")


def test_a_longer_key_takes_over_the_digests_of_what_both_begin_with():
    marks = (Mark(2, 6, b"cat"),)
    first = key(range(11), marks=marks)
    digests = [first.block(number, SIZE) for number in range(2)]
    for ids in (range(20), range(7), [*range(10), 99, 98], [9, *range(1, 20)]):
        fresh, longer = key(ids, marks=marks), first.with_tokens(list(ids))
        for number in range(len(tuple(ids)) // SIZE):
            assert longer.block(number, SIZE) == fresh.block(number, SIZE)
            assert longer.block(0, 2) == fresh.block(0, 2)
    assert [first.block(number, SIZE) for number in range(2)] == digests
    assert first.with_tokens([9, *range(1, 11)]).block(1, SIZE) != digests[1]


def test_a_picture_is_known_by_its_content_in_every_block_that_it_touches():
    store = PrefixStore(pages=10, block_tokens=SIZE)
    ids = [1, 9, 9, 9, 9, 9, 2, 3, 4, 5, 6, 7]
    cat, dog = (Mark(1, 6, name) for name in (b"cat", b"dog"))
    store.add(key(ids, marks=(cat,)))
    assert store.find(key(ids, marks=(cat,)), limit=12).tokens == 12
    assert store.find(key(ids, marks=(dog,)), limit=12).tokens == 0
    assert store.find(key(ids), limit=12).tokens == 0
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
    assert store.find(key([*ids[:10], 77]), limit=10).tokens == 10
    assert store.find(key([*ids[:9], 77, 78]), limit=10).tokens == 0
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
    assert store.find(key([4] * 40), limit=40).tokens == 16 and store.used_pages == 4
    assert store.counts["evicted"] == 5


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
        assert [length for _, length in given] == list(range(first, last))
        assert all(kept is given[0][0] for kept, _ in given)


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
