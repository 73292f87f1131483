"""Chunks behind a step take what is left of three steps; the least one goes through whatever it takes. Durations are told."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trimtab.serve.scheduling.in_progress import _FORGET, DEARER, DEAREST, LEAST_TOKENS, RATIO, SIZES, TOWERS, TRIES, Budget

# Of captured chunks.
CAPTURED = (16, 64, 128, 256, 512, 1024)


def told(chunks=(), steps=(), sizes=CAPTURED):
    made = Budget(sizes)
    for size, seconds in chunks:
        made.took_chunk(size, seconds)
    for rows, seconds in steps:
        made.took_step(rows, seconds)
    return made


def test_nothing_is_bounded_without_rows_or_before_a_step_is_known():
    made = told(chunks=[(512, 0.02)])
    assert made.left_s(0) is None and made.left_s(8) is None and made.size(None, is_first=True) == 1024


def test_a_step_of_as_many_rows_bounds_the_chunks_behind_it():
    made = told(steps=[(1, 0.003), (1, 0.003), (32, 0.010), (32, 0.010), (32, 9.0)])
    # Of the nearest number that is known; one that took long, as a capture does, counts little.
    for rows in (17, 30, 32, 64):
        assert abs(made.left_s(rows) - (RATIO - 1) * 0.010) < 1e-9
    assert abs(made.left_s(2) - (RATIO - 1) * 0.003) < 1e-9


def test_the_largest_chunk_that_fits_is_taken():
    made = told(chunks=[(1024, 0.036), (512, 0.022), (256, 0.015)])
    assert made.size(0.040, is_first=True) == 1024 and made.size(0.025, is_first=True) == 512
    assert made.size(0.016, is_first=False) == 256 and made.size(0.0, is_first=False) is None


def test_the_first_chunk_of_a_turn_is_the_least_or_one_that_takes_hardly_longer():
    assert told(chunks=[(1024, 0.036), (512, 0.022), (256, 0.015)]).size(0.001, is_first=True) == 256
    # Kernels launched one by one: every chunk takes as long.
    assert told(chunks=[(1024, 0.110), (512, 0.108), (256, 0.106)]).size(0.001, is_first=True) == 1024


def test_what_has_not_run_is_estimated_from_what_has():
    made = told(chunks=[(512, 0.020)])
    assert made.chunk_s(256) == 0.015 and made.chunk_s(1024) == 0.040 and told().chunk_s(16) is None
    assert Budget(()).sizes == SIZES


@given(
    st.lists(st.tuples(st.integers(1, 1024), st.floats(1e-4, 1)), max_size=20),
    st.one_of(st.none(), st.floats(0, 1)), st.booleans(),
    st.one_of(st.just(()), st.sets(st.sampled_from(CAPTURED), min_size=1).map(tuple)),
)  # fmt: skip
def test_a_first_chunk_is_always_there_and_no_later_one_takes_longer_than_is_left(chunks, left_s, is_first, sizes):
    made = told(chunks=chunks, sizes=sizes)
    size = made.size(left_s, is_first=is_first)
    if is_first or left_s is None or not chunks:
        assert size in (sizes or SIZES)  # one that the engine has
    elif size is not None:
        assert made.most_s(size) <= left_s
        # Of a size that is known nearly all would have fitted, or on a GPU half.
        known = [seconds for tokens, seconds in chunks if tokens == size]
        if len(known) >= TRIES:
            fitting = sum(seconds <= left_s for seconds in known)
            assert fitting > (len(known) - 1) // 2 if sizes else fitting > int(0.8 * (len(known) - 1))


def test_a_pass_of_towers_is_known_by_itself():
    made = told(chunks=[(TOWERS, 0.006), (TOWERS, 0.5), (TOWERS, 0.006)], steps=[(32, 0.010)])
    assert made.chunk_s(TOWERS) == 0.006 and made.chunk_s(512) is None  # no chunk is estimated from it
    assert made.fits_towers(None) and made.fits_towers(0.006) and not made.fits_towers(0.005)
    assert told(chunks=[(512, 0.02)]).fits_towers(0.0)  # nothing is known of it
    assert told(chunks=[(512, 0.02)]).chunk_s(TOWERS) is None


# The least size ------------------------------------------------------------------------------------------------------


def served(budget, chunk_s, *, step_s, prompts, rows=8):
    """Put prompts of so many tokens through, one chunk behind each step; returns the sizes. chunk_s: tokens -> seconds."""
    taken = []
    budget.took_step(rows, step_s)
    for left in prompts:
        while left:
            size = budget.size(budget.left_s(rows), is_first=True)
            taken.append(size)
            done = min(size, left)
            # A captured chunk is computed with its padding.
            computed = done if budget.sizes == SIZES else min(one for one in budget.sizes if one >= done)
            budget.took_chunk(computed, chunk_s(computed))
            left -= done
    return taken


def test_nothing_is_smaller_than_the_least_size_as_long_as_nothing_else_is_known():
    assert told().least == told(sizes=()).least == LEAST_TOKENS
    assert told(sizes=(16, 64)).least == 64 and told(sizes=(512,)).least == 512
    assert told(chunks=[(64, 0.064)]).least == LEAST_TOKENS  # one size says nothing of another's cost
    assert told(chunks=[(256, 0.026), (1024, 0.1)]).least == LEAST_TOKENS  # captured: nothing smaller has been needed


def test_a_cpus_rows_wait_for_a_small_chunk_only():
    # 1 ms a token and 8 ms whatever its size: a step of 8 rows takes 21 ms, a chunk of 256 tokens 264.
    taken = served(Budget(), lambda tokens: 0.008 + 0.001 * tokens, step_s=0.021, prompts=[700] * 4)
    assert taken[0] == 1024 and set(taken[-20:]) == {32}  # 40 of the 42 ms that are left
    # One of 16 tokens would fit more easily. A token would cost 1.5 times what it costs in one of 32.
    taken = served(Budget(), lambda tokens: 0.008 + 0.001 * tokens, step_s=0.001, prompts=[700] * 6)
    assert set(taken[-20:]) == {16}
    # Most of the time is that of reading weights: few tokens take as long.
    taken = served(Budget(), lambda tokens: 0.128 + 0.001 * tokens, step_s=0.001, prompts=[700] * 30)
    assert set(taken[-20:]) == {256}


def test_a_server_of_short_prompts_alone_learns_too():
    taken = served(Budget(), lambda tokens: 0.008 + 0.001 * tokens, step_s=0.021, prompts=[80] * 12)
    assert set(taken[-6:]) == {32}
    # A token costs twice as much in one of 80 as in one of 256, which has not run.
    made = Budget()
    served(made, lambda tokens: 0.300 + 0.001 * tokens, step_s=0.021, prompts=[80] * 30)
    assert made.size(0.042, is_first=True) == LEAST_TOKENS


def test_sizes_that_prompts_needed_are_judged_where_chunks_are_captured():
    slow = told(chunks=[(size, 0.002 + 0.001 * size) for size in (16, 256, 512)])
    assert slow.least == 16 and slow.size(0.020, is_first=True) == 16 and slow.size(0.200, is_first=True) == 128
    # An H200 with unpacked weights, from bench/results/chunk_layers.json.
    fast = told(chunks=[(64, 0.0058), (256, 0.0069), (512, 0.0092)])
    assert fast.least == LEAST_TOKENS and fast.size(0.001, is_first=True) == LEAST_TOKENS


def test_a_size_whose_first_chunk_took_long_is_tried_again():
    made = told(chunks=[(256, 0.264), (512, 0.520)], sizes=())
    assert made.least == 192 and made.size(0.010, is_first=True) == 192
    made.took_chunk(192, 2.0)  # what it computes was set up first
    for _ in range(TRIES - 1):
        assert made.size(0.010, is_first=True) == 192
        made.took_chunk(192, 0.200)
    assert made.least == 128


@given(
    st.floats(0, 1), st.floats(1e-6, 1e-2), st.floats(1e-5, 1.0), st.lists(st.integers(1, 1500), min_size=1, max_size=6),
    st.one_of(st.just(()), st.sets(st.sampled_from(CAPTURED), min_size=1).map(tuple)),
)  # fmt: skip
def test_prompts_come_to_an_end_in_sizes_that_the_engine_has(fixed_s, token_s, step_s, prompts, sizes):
    taken = served(Budget(sizes), lambda tokens: fixed_s + token_s * tokens, step_s=step_s, prompts=prompts)
    assert set(taken) <= set(sizes or SIZES) and len(taken) <= sum(-(-count // min(sizes or SIZES)) for count in prompts)


@given(st.floats(0, 1), st.floats(1e-6, 1e-2), st.floats(1e-5, 1.0))
def test_what_is_learned_keeps_the_promise_or_costs_no_more_than_it_may(fixed_s, token_s, step_s):
    """By another route: the sizes whose cost a token is known in closed form."""

    def chunk_s(tokens):
        return fixed_s + token_s * tokens

    made = Budget()
    taken = served(made, chunk_s, step_s=step_s, prompts=[1024, 1536, *[768] * 20])
    last, left_s = taken[-1], (RATIO - 1) * step_s
    cheapest = min(chunk_s(size) / size for size in SIZES)
    if last < LEAST_TOKENS:
        assert chunk_s(last) / last <= DEAREST * cheapest * (1 + 1e-9) or len(made._token_s[last]) <= TRIES
    if chunk_s(last) > left_s:  # nothing smaller fits at the price
        smaller = [size for size in SIZES if size < min(last, LEAST_TOKENS)]
        paying = [size for size in smaller if chunk_s(size) / size <= DEARER * chunk_s(1024) / 1024 * (1 - 1e-9)]
        assert not paying or chunk_s(last) <= 1.2 * chunk_s(paying[0]) * (1 + 1e-9)
        # A step towards a smaller size is judged by an estimate: half of the next larger one's time, and half in proportion.
        fitting = [size for size in smaller if chunk_s(size) <= left_s]
        assert not fitting or chunk_s(fitting[-1]) / fitting[-1] > DEAREST / 1.5 * cheapest


def test_a_chunk_that_costs_more_is_taken_where_only_it_keeps_the_promise():
    """Of a CPU: a step of 8 rows takes 51 ms, and a chunk of 64 tokens, the least that pays, 135 of the 102 ms that are left."""
    budget = Budget()

    def chunk_s(tokens):
        return 0.040 + 0.0015 * tokens

    taken = served(budget, chunk_s, step_s=0.051, prompts=[700] * 8)
    assert budget.least == 48 and set(taken[-20:]) == {32} and chunk_s(32) <= 0.102 < chunk_s(48)
    dearest = Budget()  # a token of one that fits would cost three times as much
    taken = served(dearest, lambda tokens: 0.100 + 0.001 * tokens, step_s=0.060, prompts=[700] * 8)
    assert min(taken[-20:]) >= dearest.least >= 96
    # Captured sizes stay: a prompt on a GPU would take longer for everybody.
    captured = told(chunks=[(64, 0.0058), (256, 0.0069), (512, 0.0092)])
    assert captured.size(0.006, is_first=True) == LEAST_TOKENS


def test_a_prompt_without_a_chunk_says_nothing_of_chunks():
    """One that the prefix cache holds whole: its size is 0."""
    budget, other = Budget(), Budget()
    for one in (budget, other):
        one.took_chunk(1024, 0.4)
    budget.took_chunk(0, 0.002)
    assert [budget.chunk_s(size) for size in (64, 256, 1024)] == [other.chunk_s(size) for size in (64, 256, 1024)]
    alone = Budget()
    alone.took_chunk(0, 0.002)
    assert alone.chunk_s(256) is None


def test_on_a_cpu_nearly_all_chunks_of_a_size_fit():
    """Their durations differ: one whose median just fits exceeds the time behind every second step."""
    chunks = [(48, 0.120)] * 10 + [(64, 0.150)] * 7 + [(64, 0.190)] * 3
    steps = [(8, 0.080)] * 7 + [(8, 0.095)] * 3
    cpu, gpu = told(chunks, steps, sizes=()), told(chunks, steps, sizes=(48, 64))
    assert abs(cpu.left_s(8) - (RATIO * 0.080 - 0.095)) < 1e-9 and abs(gpu.left_s(8) - (RATIO - 1) * 0.080) < 1e-9
    assert cpu.chunk_s(64) == 0.150 and cpu.most_s(64) == 0.190 and gpu.most_s(64) == 0.150
    assert cpu.size(0.160, is_first=True) == 48 and gpu.size(0.160, is_first=True) == 64
    stopped = told(steps=[(8, 0.080)] * 5 + [(8, 9.0)] * 5, sizes=())  # by another program
    assert stopped.left_s(8) > 0.080


def test_a_first_chunk_that_took_long_does_not_rule_its_size_out():
    made = told([(32, 0.100)] * 5 + [(64, 0.180)] * 5, sizes=())
    for _ in range(TRIES):
        assert made.size(0.170, is_first=True) == 48
        made.took_chunk(48, 0.300)
    assert made.size(0.170, is_first=True) == 32


def test_a_size_that_was_slow_once_is_tried_again():
    made = told([(32, 0.100)] * 5 + [(64, 0.180)] * 5 + [(48, 0.300)] * TRIES, sizes=())
    for _ in range(_FORGET - 1):
        made.took_chunk(32, 0.100)
        assert made.size(0.170, is_first=True) == 32
    made.took_chunk(32, 0.100)
    assert made.size(0.170, is_first=True) == 48
    made.took_chunk(48, 0.300)  # once more: it is still slow
    assert made.size(0.170, is_first=True) == 32


def test_where_nothing_fits_the_chunk_that_exceeds_it_least_goes_through():
    """Of a CPU: a step of one row takes 73 ms, and a token of 16 would cost too much."""
    chunks = {256: 0.735, 64: 0.228, 48: 0.190, 32: 0.147, 24: 0.148, 16: 0.140}
    made = told([(size, seconds) for size, seconds in chunks.items() for _ in range(TRIES)], sizes=())
    assert made.least == 48 and made.size(0.146, is_first=True) == 32
    assert made.size(0.100, is_first=True) == 48  # nothing comes near it


def test_short_prompts_find_a_small_size_although_its_first_chunk_took_long():
    """Sizes above the prompts' have none that run: they are asked for a few times, not for ever."""
    made, first = Budget(), [0.280]

    def chunk_s(tokens):
        return first.pop() if tokens == 64 and first else 0.040 + 0.002 * tokens

    taken = served(made, chunk_s, step_s=0.070, prompts=[65] * 40, rows=4)
    assert max(taken[-20:]) <= 48 and chunk_s(48) <= 0.140  # 65 take 0.170


@pytest.mark.parametrize(
    ("fixed_s", "token_s", "expected"),
    [
        (0.0, 0.0008, 256),  # 0.2 s, and hardly more for a token than in larger ones: the bundled model on two cores
        (0.0, 0.0001, 1024),
        (0.05, 0.0005, 384),  # a token of 256 costs a third more than one of 1,024
        (3.0, 0.001, 1024),  # weights that come from a disk for each chunk
        (2.0, 0.03, 256),  # however small a chunk is, it takes longer, and a token costs hardly more
    ],
)
def test_a_chunk_that_no_row_waits_for_is_small_where_a_token_costs_hardly_more(fixed_s, token_s, expected):
    budget, sizes = Budget(), []
    for _ in range(12):
        sizes.append(budget.size(None, is_first=True))
        budget.took_chunk(sizes[-1], fixed_s + token_s * sizes[-1])
    assert sizes[0] == LEAST_TOKENS and set(sizes[-4:]) == {expected}, sizes
    assert Budget((128, 512)).size(None, is_first=True) == 512  # captured: never small
