"""Chunks behind a step take what is left of three steps; the least one goes through whatever it takes. Durations are told."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from trimtab.serve.budget import RATIO, SIZES, TOWERS, Budget


def told(chunks=(), steps=()):
    made = Budget(SIZES)
    for size, seconds in chunks:
        made.took_chunk(size, seconds)
    for rows, seconds in steps:
        made.took_step(rows, seconds)
    return made


def test_nothing_is_bounded_without_rows_or_before_a_step_is_known():
    made = told(chunks=[(512, 0.02)])
    assert made.left_s(0) is None and made.left_s(8) is None
    assert made.size(None, is_first=True) == 1024


def test_a_step_of_as_many_rows_bounds_the_chunks_behind_it():
    made = told(steps=[(1, 0.003), (1, 0.003), (32, 0.010), (32, 0.010), (32, 9.0)])
    assert made.step_s(30) == made.step_s(32) == 0.010  # one that took long, as a capture does, counts little
    assert made.step_s(2) == 0.003 and made.step_s(64) == 0.010  # the nearest that is known
    assert abs(made.left_s(17) - (RATIO - 1) * 0.010) < 1e-9


def test_the_largest_chunk_that_fits_is_taken():
    made = told(chunks=[(1024, 0.036), (512, 0.022), (256, 0.015)])
    assert made.size(0.040, is_first=True) == 1024
    assert made.size(0.025, is_first=True) == 512
    assert made.size(0.016, is_first=False) == 256
    assert made.size(0.0, is_first=False) is None


def test_the_first_chunk_of_a_turn_is_the_least_or_one_that_takes_hardly_longer():
    assert told(chunks=[(1024, 0.036), (512, 0.022), (256, 0.015)]).size(0.001, is_first=True) == 256
    # Kernels launched one by one: every chunk takes as long.
    assert told(chunks=[(1024, 0.110), (512, 0.108), (256, 0.106)]).size(0.001, is_first=True) == 1024


def test_what_has_not_run_is_estimated_from_what_has():
    made = told(chunks=[(512, 0.020)])
    assert made.chunk_s(256) == 0.015 and made.chunk_s(1024) == 0.040 and told().chunk_s(16) is None
    assert Budget(()).sizes == SIZES


@given(
    st.lists(st.tuples(st.sampled_from(SIZES), st.floats(1e-4, 1)), max_size=20),
    st.one_of(st.none(), st.floats(0, 1)), st.booleans(),
)  # fmt: skip
def test_a_first_chunk_is_always_there_and_no_later_one_takes_longer_than_is_left(chunks, left_s, is_first):
    made = told(chunks=chunks)
    size = made.size(left_s, is_first=is_first)
    if is_first or left_s is None or not chunks:
        assert size in SIZES
    elif size is not None:
        assert made.chunk_s(size) <= left_s


def test_a_pass_of_towers_is_known_by_itself():
    made = told(chunks=[(TOWERS, 0.006), (TOWERS, 0.5), (TOWERS, 0.006)], steps=[(32, 0.010)])
    assert made.chunk_s(TOWERS) == 0.006 and made.chunk_s(512) is None  # no chunk is estimated from it
    assert made.fits_towers(None) and made.fits_towers(0.006) and not made.fits_towers(0.005)
    assert told(chunks=[(512, 0.02)]).fits_towers(0.0)  # nothing is known of it
    assert told(chunks=[(512, 0.02)]).chunk_s(TOWERS) is None
