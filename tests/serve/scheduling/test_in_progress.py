"""Which prompts are in progress at once, whose piece is next, and how many tokens are held for all of them."""

from hypothesis import given
from hypothesis import strategies as st

from trimtab.serve.scheduling.in_progress import InProgress, Room


def begun(most_tokens, first, *beside):
    """Return prompts in progress: a first one of so many tokens, and those of the others that fit, called by their tokens."""
    found = InProgress(Room(most_tokens))
    for tokens in (first, *beside):
        if found.first is None or found.fits(tokens):
            found.add(tokens, tokens)
    return found


def pieces(found, count):
    order = []
    for _ in range(count):
        order.append(found.current)
        found.took(found.current)
    return order


def test_a_short_prompt_has_the_next_piece_and_the_first_one_every_third():
    found = begun(4_000, 8_000)
    assert pieces(found, 2) == [8_000, 8_000]
    found.add(500, 500)
    assert pieces(found, 6) == [500, 500, 8_000, 500, 500, 8_000]


def test_one_that_begins_has_its_piece_after_those_that_are_in_progress():
    found = begun(4_000, 8_000, 500, 400)
    found.add(60, 60)
    assert pieces(found, 6) == [500, 400, 8_000, 60, 500, 8_000]


def test_a_shorter_prompt_always_finds_room_and_all_together_have_no_more_than_there_is():
    found = begun(4_096, 8_192, 2_048, 1_024, 512, 256)
    assert list(found) == [8_192, 2_048, 1_024, 512, 256] and found.fits(128) and not found.fits(129) and not found.fits(0)
    assert begun(4_096, 800).fits(400) and not begun(4_096, 800).fits(401)


def test_prompts_of_rows_and_those_that_need_none_share_the_room():
    rows, rowless = (InProgress(room) for room in [Room(4_096)] * 2)
    rows.add("a", 8_000)
    rowless.add("b", 8_000)
    assert rows.fits(2_048) and rowless.fits(2_048)
    rows.add("c", 2_048)
    assert rowless.fits(1_024) and not rowless.fits(1_025)
    rows.remove("c")
    assert not rowless.fits(1_025)  # its keys and values are there until it is freed
    rows.free("c")
    assert rowless.fits(2_048)


def test_the_next_first_one_has_any_length_and_a_short_one_beside_others_leaves_its_place():
    found = begun(4_096, 8_192, 100)
    found.remove(8_192)
    found.free(8_192)
    found.add(90, 90)
    assert found.first is None
    found.add(8_191, 8_191)
    assert found.first == 8_191 and len(found) == 3


def test_one_whose_keys_and_values_are_kept_takes_no_second_place():
    rows, rowless = (InProgress(room) for room in [Room(100)] * 2)
    rowless.add("scored", 400)
    rowless.remove("scored")
    rowless.add("small", 50)
    assert rowless.place == "scored" and rowless.first is None and rowless.current == "small"
    rowless.remove("small")
    rowless.free("small")
    rows.add("scored", 400, is_counted=True)
    assert rows.first == "scored" and rows.place is None and rows.room.left_tokens == 100
    for one in (rows, rowless):
        one.free("scored")
    assert rowless.place is None


CONTEXT, BESIDE = 1_000, 500
moves = st.lists(
    st.tuples(st.booleans(), st.integers(1, CONTEXT), st.sampled_from(["goes on", "is through", "is kept"])), max_size=80
)


@given(moves)
def test_whatever_comes_both_together_hold_two_contexts_and_the_room_at_most(moves):
    """moves: which of the two the next prompt is for, its tokens, and what becomes of the one whose piece is next: those that are
    kept hold their tokens until the place is needed."""
    room = Room(BESIDE)
    both = InProgress(room), InProgress(room)
    held = {}
    for number, (is_second, tokens, fate) in enumerate(moves):
        one, entry = both[is_second], (number, tokens)
        if one.place is not None and one.place not in one and not one.fits(tokens):  # kept: its place is wanted
            held.pop(one.place)
            one.free(one.place)
        if one.first is None or one.fits(tokens):
            one.add(entry, tokens)
            held[entry] = tokens
        assert sum(held.values()) <= 2 * CONTEXT + BESIDE
        current = one.current
        one.took(current)
        if fate != "goes on":
            one.remove(current)
        if fate == "is through":
            del held[current]
            one.free(current)


small_ones = st.tuples(st.just(False), st.integers(1, 40), st.sampled_from(["goes on", "is through"]))


@given(st.lists(small_ones, min_size=8, max_size=12) | moves)
def test_whatever_comes_each_has_its_next_piece_within_a_round(moves):
    """Of `count` prompts in progress a short one waits for the other short ones' pieces, and for one of the first after every two.
    The first one waits for two."""
    found, waits = begun(BESIDE, CONTEXT, 200), {}
    for number, (_, tokens, fate) in enumerate(moves):
        if found.first is None or found.fits(tokens):
            found.add((number, tokens), tokens)
        for entry in found:  # what begins later does not count
            waits.setdefault(entry, [len(found), 0])
        current = found.current
        for entry, (count, waited) in waits.items():
            most = 2 if entry == found.first else count - 1 + -(-count // 2)
            assert entry == current or waited < most
            waits[entry][1] += 1
        found.took(current)
        waits[current] = [len(found), 0]
        if fate != "goes on":
            found.remove(current)
            found.free(current)
            del waits[current]
    while len(found):
        found.remove(found.current)
    assert found.current is None
