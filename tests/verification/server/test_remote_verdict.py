"""When a server's adapter is called alive, ignored or wrong, and when nothing can be told."""

import random

import pytest

from trimtab.verification.server.verdict import (
    ALIVE,
    CANNOT_TELL,
    FALSE_ALARM,
    IGNORED,
    OTHER_VALUES,
    WRONG,
    Asked,
    judge,
    nothing_to_tell,
    sign_test,
)

FAULTS = [("ignored", "the base answers", False), ("scale", "the scale", False), ("one module dropped", "q is", True)]
SIZES = {"ignored": 3.0, "scale": 1.0, "one module dropped": 0.1}


def asked(count, *, base_noise=0.0, sizes=SIZES, **distance):
    """Questions that are all alike. distance: hypothesis -> distance; `one` is the fault of one module."""
    distance = {{"one": "one module dropped"}.get(name, name): value for name, value in distance.items()}
    return [Asked(f"q{place}", "text", distance, sizes, base_noise) for place in range(count)]


def test_answers_that_are_nearest_to_right_are_alive():
    verdict = judge(asked(16, right=0.02, ignored=3.0, scale=1.0, one=0.1), FAULTS)
    assert (verdict.word, verdict.fault, verdict.unseen) == (ALIVE, "", ())
    assert set(verdict.excluded) == {"ignored", "scale", "one module dropped"}
    assert (verdict.smallest_seen.name, verdict.smallest_seen.size) == ("one module dropped", pytest.approx(0.1))
    # Three faults, each overlooked with 2^-16.
    assert verdict.confidence == pytest.approx(1 - 3 * 2**-16)


def test_a_fault_below_the_noise_leaves_it_open_and_the_smallest_that_would_have_been_seen_is_named():
    verdict = judge(asked(16, base_noise=0.3, right=0.3, ignored=3.0, scale=1.1, one=0.31), FAULTS)
    assert (verdict.word, verdict.confidence, verdict.unseen) == (CANNOT_TELL, None, ("one module dropped",))
    assert verdict.is_as_a_whole  # neither ignored nor another scale
    assert verdict.smallest_seen.name == "scale"
    assert verdict.reason.endswith("a small one may hide in the noise: one module dropped")


def test_an_alive_excludes_every_fault_that_was_tried_whatever_the_noise():
    for noise in (0.0, 0.01, 0.05, 0.1, 0.3, 0.8, 2.0):
        far = {name: max(size, noise) for name, size in SIZES.items()}
        one = far.pop("one module dropped")
        verdict = judge(asked(16, base_noise=noise, right=noise, one=one, **far), FAULTS)
        assert (verdict.word == ALIVE) == (set(verdict.excluded) == set(SIZES)) == (noise <= 0.05), noise


@pytest.mark.parametrize(("base_noise", "right", "is_alive"), [
    (0.0, 0.02, True), (0.0, 0.04, False), (0.03, 0.05, True), (0.03, 0.08, False), (None, 0.015, True), (None, 0.05, False),
])  # fmt: skip
def test_answers_farther_from_right_than_the_precision_explains_may_be_an_older_version(base_noise, right, is_alive):
    verdict = judge(asked(16, base_noise=base_noise, right=right, ignored=3.0, scale=1.0, one=0.5), FAULTS)
    assert verdict.word == (ALIVE if is_alive else CANNOT_TELL)
    assert verdict.unseen == (() if is_alive else (OTHER_VALUES,))
    assert verdict.is_as_a_whole


@pytest.mark.parametrize(("right", "other", "word"), [(0.06, 0.19, ALIVE), (0.1, 0.22, CANNOT_TELL), (0.18, 0.25, CANNOT_TELL)])
def test_other_values_are_excluded_where_they_would_move_the_answers_much_farther_than_they_are(right, other, word):
    """An older version is as far from right as the stand-in moves answers, 0.18, and farther from the stand-in."""
    faults, sizes = [*FAULTS, (OTHER_VALUES, "", True)], {**SIZES, "one module dropped": 0.5, OTHER_VALUES: 0.18}
    rows = asked(16, base_noise=None, sizes=sizes, right=right, ignored=3.0, scale=1.0, one=0.5, **{OTHER_VALUES: other})
    assert judge(rows, faults).word == word


def test_texts_alone_leave_slightly_other_values_open():
    verdict = judge(asked(16, right=0.0, ignored=3.0, scale=1.0, one=0.5), FAULTS, has_logprobs=False)
    assert (verdict.word, verdict.is_as_a_whole, verdict.unseen) == (CANNOT_TELL, True, (OTHER_VALUES,))


def test_a_fault_that_is_nearer_by_half_is_named_with_its_false_alarm_rate():
    verdict = judge(asked(16, right=1.0, ignored=2.0, scale=0.05, one=1.0), FAULTS)
    assert (verdict.word, verdict.fault) == (WRONG, "scale")
    # Three faults, and the test whether the answers are nobody's.
    assert verdict.false_alarm_rate == pytest.approx(4 * 2**-16)
    ignored = judge(asked(16, right=3.0, ignored=0.05, scale=2.0, one=3.0), FAULTS)
    assert (ignored.word, ignored.fault) == (IGNORED, "ignored")


def test_a_nearer_fault_is_no_alarm_unless_it_is_nearer_by_half():
    # Another precision can lie a little towards a fault.
    verdict = judge(asked(16, right=0.3, ignored=3.0, scale=0.9, one=0.25), FAULTS)
    assert (verdict.word, verdict.is_as_a_whole) == (CANNOT_TELL, True)


def test_few_questions_do_not_suffice_for_an_alarm():
    verdict = judge(asked(5, right=3.0, ignored=0.05, scale=2.0, one=3.0), FAULTS)
    assert (verdict.word, verdict.confidence) == (CANNOT_TELL, None)
    assert "ignored" in verdict.reason


def test_noise_that_hides_a_fault_of_the_whole_adapter_leaves_nothing_to_tell():
    verdict = judge(asked(16, base_noise=0.8, right=0.9, ignored=3.0, scale=1.2, one=0.9), FAULTS)
    assert verdict.word == CANNOT_TELL
    assert verdict.reason.endswith("the following remain possible: scale, one module dropped")
    assert not verdict.is_as_a_whole
    assert verdict.visible_from > 1.0


def test_a_fault_that_no_question_shows_is_not_excluded():
    sizes = {**SIZES, "scale": 0.0}
    verdict = judge(asked(16, sizes=sizes, right=0.02, ignored=3.0, scale=0.02, one=0.1), FAULTS)
    assert (verdict.word, verdict.unseen) == (CANNOT_TELL, ("scale",))


def test_answers_far_from_everything_are_wrong_only_where_the_base_is_known_to_be_right():
    far = {"right": 2.0, "ignored": 2.5, "scale": 2.2, "one": 2.0}
    verdict = judge(asked(16, base_noise=0.05, **far), FAULTS)
    assert (verdict.word, verdict.fault) == (WRONG, "")
    assert judge(asked(16, base_noise=None, **far), FAULTS).word == CANNOT_TELL
    assert judge(asked(16, base_noise=1.0, **far), FAULTS).word == CANNOT_TELL


def test_of_two_faults_that_fit_the_one_that_explains_all_questions_is_named():
    faults = [("ignored", "", False), ("vision part dropped", "", False), ("tower parts dropped", "", False)]
    images = [
        Asked(f"i{n}", "image", {"right": 1.0, "ignored": 3.0, "vision part dropped": 0.01, "tower parts dropped": 0.01},
              {"ignored": 3.0, "vision part dropped": 1.0, "tower parts dropped": 1.0}, 0.0)
        for n in range(12)
    ]  # fmt: skip
    sounds = [
        Asked(f"s{n}", "audio", {"right": 1.0, "ignored": 3.0, "vision part dropped": 1.0, "tower parts dropped": 0.01},
              {"ignored": 3.0, "vision part dropped": 0.0, "tower parts dropped": 1.0}, 0.0)
        for n in range(12)
    ]  # fmt: skip
    assert judge(images + sounds, faults).fault == "tower parts dropped"


def test_the_sign_test_is_the_tail_of_a_fair_coin():
    assert sign_test(16, 0) == 2**-16
    assert sign_test(3, 1) == pytest.approx(5 / 16)
    assert sign_test(0, 0) == 1.0


def test_nothing_compared_tells_nothing():
    verdict = nothing_to_tell("no question", FAULTS)
    assert (verdict.word, verdict.unseen, verdict.is_as_a_whole) == (CANNOT_TELL, tuple(SIZES), False)
    assert verdict.smallest_seen is None


def test_a_right_server_is_called_wrong_no_more_often_than_the_bound_says():
    """Answers that are nearer to every fault as often as not, the worst that a right server can do."""
    draw = random.Random(0)
    runs, alarms = 4000, 0
    for _ in range(runs):
        rows = [
            Asked(f"q{n}", "text", {"right": 1.0, **{name: draw.choice((0.0, 2.0)) for name in SIZES}}, SIZES, None)
            for n in range(10)
        ]
        alarms += judge(rows, FAULTS).word in (IGNORED, WRONG)
    # 10 questions: all of them must be nearer, one chance in 1024 for each of three faults; 4 tests * 2^-10 <= 0.005.
    assert 0 < alarms / runs <= FALSE_ALARM
