"""Which prompts are in progress at once, and whose piece is next."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from trimtab.serve.scheduling.in_progress import InProgress


def begun(most_tokens, first, *beside):
    """Return prompts in progress: a first one of so many tokens, and those of the others that fit, called by their tokens."""
    found = InProgress(most_tokens)
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
    found = begun(12_000, 8_000)
    assert pieces(found, 2) == [8_000, 8_000]
    found.add(500, 500)
    assert pieces(found, 6) == [500, 500, 8_000, 500, 500, 8_000]
    found.add(60, 60)
    assert pieces(found, 6) == [60, 500, 8_000, 60, 500, 8_000]


def test_a_shorter_prompt_always_finds_room_and_all_together_have_no_more_than_there_is():
    found = begun(12_288, 8_192, 2_048, 1_024, 512, 256)
    assert list(found) == [8_192, 2_048, 1_024, 512, 256]
    assert found.fits(128) and not found.fits(129) and not found.fits(0)
    assert not found.fits(120, kept_tokens=20)
    assert begun(12_288, 800).fits(400) and not begun(12_288, 800).fits(401)


def test_the_next_first_one_has_any_length_and_a_short_one_beside_others_leaves_its_place():
    found = begun(12_288, 8_192, 100)
    found.remove(8_192)
    found.add(90, 90)
    assert found.first is None
    found.add(8_191, 8_191)
    assert found.first == 8_191 and len(found) == 3


@given(st.lists(st.tuples(st.integers(1, 1000), st.booleans()), max_size=60))
def test_whatever_comes_and_ends_the_first_one_goes_on_and_the_room_is_kept(moves):
    """moves: the tokens of the next prompt, and whether the one whose piece is next is complete with it."""
    found, since_first = InProgress(1500), 0
    for number, (tokens, is_through) in enumerate(moves):
        entry = (number, tokens)
        if found.first is None or found.fits(tokens):
            found.add(entry, tokens)
        current = found.current
        since_first = 0 if found.first in (None, current) else since_first + 1
        assert current in found and since_first <= 2
        found.took(current)
        if is_through:
            found.remove(current)
        assert sum(tokens for _, tokens in found if (_, tokens) != found.first) <= 1500
    while len(found):
        found.remove(found.current)
    assert found.current is None
