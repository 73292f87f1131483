"""Captured and fused steps say what transformers' own modules say, whatever the tier, the rows and their adapters.

On a CPU nothing is captured and the fused step runs on plain torch: that proves its wiring. tests/gpu runs the same tests
with the kernels, as graphs.
"""

from types import SimpleNamespace

import pytest
import torch

import trimtab
from tests import long_runs, pico
from tests.engine.batch.test_batch import to_the_end
from tests.lent import DEVICE, lent
from tests.raised import raising, refused
from tests.replays import Again, standing_in
from trimtab.demo.demo import ADAPTERS
from trimtab.demo.demo import FOLDER as DEMO
from trimtab.engine.batch.batch import Batch
from trimtab.engine.decode import decode_step, step_capture, step_choice
from trimtab.engine.kv import sequence
from trimtab.engine.layers import leaves
from trimtab.engine.memory import graph_cache, reserve
from trimtab.engine.memory.graph_cache import GraphCache, check_replay
from trimtab.engine.prefill.prefill import PrefillRunner
from trimtab.errors import DeviceError, RequestError
from trimtab.request import GenerateRequest

ON_GPU = DEVICE != "cpu"
MODES = ["graph", "fused"] if ON_GPU else ["fused"]
# The demo model in bfloat16: kernels that add in another order move a score by a few rounding steps of 2^-8 of the largest.
STEP_TOLERANCE = 2**-5
GEMMA = ["gemma4"]
LEAN = {"table": "gather", "vision": "stream", "audio": "stream", "connector": "stream"}
PLACES = {
    "resident": {"*": "resident"},
    "lean": LEAN,
    "streamed": LEAN | {f"model.language_model.layers.{number}": "stream" for number in range(2, 6)},
    "front": LEAN | {f"model.language_model.{name}": "stream" for name in ("per_layer_model_projection", "layers.3", "layers.5")},
}


def demo(place="resident", **options):
    adapters = {name: DEMO / "adapters" / name for name in ADAPTERS}
    plan = trimtab.plan(
        DEMO / "base", quant="nf4-dq", adapters=adapters, context=384, audio_s=1.0, device=DEVICE, place=PLACES[place],
        **options,
    )  # fmt: skip
    return trimtab.load(plan)


@pytest.fixture(scope="module")
def model():
    with demo() as loaded:
        loaded.decode = "auto"  # on a GPU a test that asks for this model by name loads it within its own patches
        yield loaded


def through(batch, inputs, request, **options):
    return batch.join(batch.begin(inputs, request, **options).compute()).row


def joined(model, decode, asked, *, tokens=48, rows=None):
    """Return a batch whose rows have read their prompts. asked: (adapter, prompt, media) a row."""
    batch = Batch(model, rows=rows or len(asked), decode=decode)
    batch.prompts = PrefillRunner(batch, "eager")  # steps are in question
    request = GenerateRequest(max_new_tokens=tokens)
    for name, prompt, media in asked:
        through(batch, model.prepare(prompt, **media), request, adapter=name)
    return batch


def forced_scores(batch, steps):
    """Return the scores of steps of the same tokens, whatever is drawn."""
    batch.ends, scores = frozenset(), []
    for number in range(steps):
        for row in batch.active:
            row.token_ids[-1] = 20 + number
        batch.write_last_tokens()
        scores.append(batch.logits().clone())
        for row in batch.active:
            row.token_ids.append(0)
    return torch.stack(scores)


def answers(batch):
    rows = list(batch.active)
    found = to_the_end(batch, rows)
    assert all(row.error is None for row in rows)
    return found


_OF_MODULES = {}


def of_modules(model, asked):
    """Return what the demo's modules answer, the same in every tier: computed once a process."""
    loaded = model.plan.request
    key = repr((asked, loaded.dtype, loaded.quant, sorted(loaded.adapters.items())))
    if key not in _OF_MODULES:
        _OF_MODULES[key] = answers(joined(model, "eager", asked))
    return _OF_MODULES[key]


@pytest.fixture
def replayed(monkeypatch):
    """Steps that go the way of captured ones without a GPU; gives the list of all captures."""
    monkeypatch.setattr(step_choice.StepChoice, "_may_capture", lambda self: self.mode != "eager")
    return standing_in(monkeypatch, "a decode step")


NOT_PERMITTED = RuntimeError("operation not permitted when stream is capturing")
LOOK = {"image": DEMO / "images" / "image_1.png"}
HEAR = {"audio": DEMO / "sounds" / "audio_1.wav"}
ASKED = [
    ("style", "What do you see?", LOOK), (None, "What do you hear?", HEAR), ("specialist", "What do you see?", LOOK),
    ("style", "Hello", {}), (None, "What is red?", {}), ("specialist", "What do you hear?", HEAR), ("style", "What is red?", {}),
    (None, "What do you see?", LOOK),
]  # fmt: skip


def test_an_unknown_way_to_decode_is_refused(model):
    error = refused(Batch, model, rows=1, decode="fast")
    assert error.field == "decode" and "graph" in error.allowed


@pytest.mark.skipif(ON_GPU, reason="a GPU has graphs")
def test_graphs_asked_for_on_a_cpu_are_refused_and_not_taken_by_themselves(model):
    with pytest.raises(DeviceError, match="require a GPU"):
        Batch(model, rows=1, decode="graph")
    steps = Batch(model, rows=1).steps
    assert not steps.is_captured and steps.fallbacks == []


def test_fused_steps_asked_for_a_family_without_them_are_refused(tmp_path):
    plan = trimtab.plan(pico.build("gemma3n", tmp_path), quant="none", dtype="float32", context=32, device=DEVICE)
    with trimtab.load(plan) as other, pytest.raises(DeviceError, match="for which there are no fields"):
        Batch(other, rows=1, decode="fused")


@pytest.mark.parametrize("decode", MODES)
@pytest.mark.parametrize("count", [1, 2, 8])
def test_scores_of_one_step_are_those_of_the_modules(model, decode, count):
    found = {}
    for way in ("eager", decode):
        batch = joined(model, way, ASKED[:count])
        found[way] = batch.logits().clone()
        assert batch.cache.positions[:count].tolist() == [row.prompt_tokens + 1 for row in batch.active]
    assert decode != "fused" or batch.steps._fused is not None
    largest = found["eager"].abs().max()
    assert (found[decode] - found["eager"]).abs().max() <= STEP_TOLERANCE * largest
    assert found[decode].argmax(-1).tolist() == found["eager"].argmax(-1).tolist()


@pytest.mark.parametrize("decode", MODES)
@pytest.mark.parametrize("place", [long_runs.slow_on_cpu(place) for place in ("resident", "lean", "streamed")])
def test_answers_of_mixed_rows_are_the_modules_in_every_tier(decode, place):
    with demo(place) as loaded:
        expected = of_modules(loaded, ASKED)
        batch = joined(loaded, decode, ASKED)
        assert answers(batch) == expected
        assert [fall for fall in batch.steps.fallbacks if fall.what in ("graph", "fused step")] == []


@pytest.mark.skipif(ON_GPU, reason="a GPU has graphs")
@pytest.mark.parametrize("decode", ["fused", long_runs.slow_on_cpu("graph")])
def test_what_a_graph_would_repeat_gives_the_modules_answers(decode, replayed):
    with demo("streamed") as loaded:
        expected = of_modules(loaded, ASKED)
        assert replayed == []
        batch = joined(loaded, decode, ASKED)
        assert answers(batch) == expected and batch.steps.fallbacks == []
        # Other adapters in the rows, fewer rows, another bucket: a capture each, and steps that repeat it.
        assert batch.steps.captures == len(replayed) == 6 and sum(one.replays for one in replayed) > len(replayed)


@pytest.mark.skipif(ON_GPU, reason="a GPU has graphs")
def test_a_capture_that_fails_is_told_and_the_modules_go_on(model, replayed, monkeypatch):
    expected = of_modules(model, ASKED[:2])

    monkeypatch.setattr(GraphCache, "_recorded", raising(NOT_PERMITTED))
    batch = joined(model, "auto", ASKED[:2])
    assert answers(batch) == expected
    (fall,) = batch.steps.fallbacks
    assert fall.what == "graph" and "not permitted" in fall.why and not batch.steps.is_captured
    with pytest.raises(DeviceError, match="not permitted"):
        answers(joined(model, "graph", ASKED[:2]))


@pytest.mark.skipif(ON_GPU, reason="a GPU has graphs")
def test_a_step_whose_replay_gives_other_scores_is_computed_from_the_tokens_before_it(model, replayed, monkeypatch):
    expected, replay = of_modules(model, ASKED[:2]), Again.replay

    def wrong(self):
        replay(self)  # which writes the next tokens
        self.outputs[0].mul_(-1)

    monkeypatch.setattr(Again, "replay", wrong)
    batch = joined(model, "auto", ASKED[:2])
    assert answers(batch) == expected and "a replay's results differ" in batch.steps.fallbacks[-1].why


def test_a_step_keeps_the_row_numbers_that_its_graph_reads(model, replayed):
    """The store forgets them with the next prompt, and a replay would read whatever lies there then."""
    batch = joined(model, "graph", [("rslora-dora", "Hello", {}), (None, "Hello", {}), ("style", "Hello", {})])
    batch.step()
    (captured,) = batch.steps._graphs.values()
    model.adapter_store.none()
    assert not model.adapter_store.selection.indices
    (groups,) = captured.kept[1].indices.values()
    assert sorted((name, index.tolist()) for name, index in groups) == [("rslora-dora", [0]), ("style", [2])]


def test_a_replay_that_gives_other_scores_is_found():
    expected = torch.tensor([[1.0, -8.0, 3.0], [0.0, 2.0, 1.0], [9.0, 9.0, 9.0]])
    check_replay(expected + 2**-7, expected)
    found = expected.clone()
    found[1, 2] += 0.5
    with pytest.raises(RuntimeError, match="differ by up to 0.5 "):
        check_replay(found, expected[:2])
    check_replay(found, expected[:1])  # rows beyond the active ones are nobody's
    found[1] = float("nan")
    with pytest.raises(RuntimeError):
        check_replay(found, expected[:2])
    broken = expected.clone()
    broken[0] = float("nan")  # an adapter of NaN is told by its row, not by the capture
    check_replay(broken, broken)


@pytest.mark.skipif(ON_GPU, reason="a GPU has graphs")
def test_more_rows_than_any_bucket_have_one_of_their_own(model, replayed):
    asked = [ASKED[3], ASKED[4]] * 5
    assert answers(joined(model, "graph", asked)) == of_modules(model, asked)
    assert 10 not in decode_step.BUCKETS


@pytest.mark.parametrize("decode", MODES)
def test_an_adapter_beyond_plain_lora_answers_too(model, decode):
    asked = [("rslora-dora", "What do you see?", LOOK), ("style", "What do you see?", LOOK)]
    assert answers(joined(model, decode, asked)) == of_modules(model, asked)


@pytest.mark.parametrize("decode", MODES)
def test_rows_that_come_and_go_and_an_adapter_swapped_in_the_middle_change_no_other(model, decode):
    expected = {ask: of_modules(model, [ask_of(ask)])[0] for ask in range(4)}
    batch = joined(model, decode, [ask_of(0), ask_of(1)], rows=4)
    first, second = batch.active
    batch.step()
    third = through(batch, prepared(model, 2), GenerateRequest(max_new_tokens=48), adapter=ASKED[2][0])
    batch.step()
    batch.leave(second)
    held = model.read_adapter(DEMO / "adapters" / "rslora-dora")
    model.unload_adapter("rslora-dora")
    model.load_adapter("rslora-dora", held)
    fourth = through(batch, prepared(model, 3), GenerateRequest(max_new_tokens=48), adapter=ASKED[3][0])
    answers(batch)
    assert tuple(first.answer_ids) == expected[0] and tuple(third.answer_ids) == expected[2]
    assert tuple(fourth.answer_ids) == expected[3] and expected[1][:3] == tuple(second.answer_ids)


def ask_of(number):
    return ASKED[number]


def prepared(model, number):
    _, prompt, media = ASKED[number]
    return model.prepare(prompt, **media)


@pytest.mark.parametrize(("family", "decode"), long_runs.crossed(GEMMA, MODES, rest=1))
def test_teacher_forced_scores_agree_past_the_sliding_window(family, decode):
    """Random float32 weights; 40 steps of the same tokens, the window is 8."""
    with lent(family) as loaded:
        prompt = list(range(5, 12))
        seen = {}
        for way in ("eager", decode):
            seen[way] = forced_scores(joined(loaded, way, [(None, prompt, {}), (None, prompt[:3], {})], tokens=60), 40)
        largest = seen["eager"].abs().max()
        # float32: sums in another order, over 40 positions (largest seen on a CPU: 2e-6 of the largest score).
        assert (seen[decode] - seen["eager"]).abs().max() <= 1e-4 * largest


@pytest.mark.parametrize("decode", MODES)
def test_a_drawn_picture_token_is_embedded_as_transformers_does(model, decode):
    token = next(iter(sequence.placeholder_ids(model.hf_model)))
    found = {}
    for way in ("eager", decode):
        batch = joined(model, way, ASKED[:1])
        batch.active[0].token_ids[-1] = token
        batch.write_last_tokens()
        found[way] = batch.logits().clone()
    assert torch.equal(found["eager"], found[decode])


def seen_in(place):
    """A model whose tables the device reads in host memory, as a GPU does; a CPU needs no page locks for that."""

    @pytest.fixture
    def model_there(monkeypatch):
        if not ON_GPU:
            monkeypatch.setattr(leaves, "seen_by", lambda source, device: source)
        with demo(place) as loaded:
            yield loaded

    return model_there


in_place, streamed_in_place = seen_in("lean"), seen_in("streamed")


def told_of_steps(batch, monkeypatch, look_ahead):
    """Return the list that says of each step whether it was queued ahead. look_ahead: whether any may be."""
    if not look_ahead:
        monkeypatch.setattr(batch.steps, "may_look_ahead", lambda: False)
    run, ahead = batch.steps.run, []
    monkeypatch.setattr(batch.steps, "run", lambda state: ahead.append(state.ahead) or run(state))
    return ahead


@pytest.mark.parametrize("decode", MODES)
def test_tables_in_host_memory_are_read_by_the_step_itself(in_place, decode):
    found = [one for one in in_place.hf_model.modules() if isinstance(one, leaves.GatheredTable)]
    assert found and all(one.seen.device.type == in_place.device.type for one in found)
    assert all(torch.equal(one.seen.cpu(), one.source) for one in found)
    for one in found:
        one.stage = one._gather = None  # nothing is fetched by the host
    expected = of_modules(in_place, ASKED[:4])
    batch = joined(in_place, decode, ASKED[:4])
    assert batch.steps._tables == [] and answers(batch) == expected


@pytest.mark.parametrize(
    ("fixture", "decode"), long_runs.crossed(["model", "in_place", "streamed_in_place"], ["graph", "fused"], first=[], rest=1)
)
def test_steps_queued_ahead_change_no_word_whoever_joins_leaves_or_switches(request, fixture, decode, replayed, monkeypatch):
    model = request.getfixturevalue(fixture)

    def story(look_ahead):
        batch, said = joined(model, decode, [ASKED[i] for i in (0, 1, 3, 4)], rows=5), []
        ahead = told_of_steps(batch, monkeypatch, look_ahead)
        first, second, third, fourth = batch.active

        def steps(count):
            for _ in range(count):
                said.append([(drawn.row.prompt_tokens, drawn.token_id) for drawn in batch.step()])

        steps(3)
        batch.leave(second)  # the last one takes its place
        batch.leave(fourth)  # and goes at once: nobody is where it was, but the tokens were told
        steps(2)
        batch.leave(first)
        steps(2)
        third.adapter = "specialist"
        steps(2)
        through(batch, model.prepare(ASKED[2][1], **ASKED[2][2]), GenerateRequest(max_new_tokens=3), adapter="style")
        steps(1)
        request = GenerateRequest(max_new_tokens=8, temperature=1.0, seed=3)
        through(batch, model.prepare(ASKED[6][1]), request, adapter=None)
        steps(4)
        said.append(batch.logits().argmax(-1).tolist())
        return said, ahead

    expected, never = story(False)
    found, ahead = story(True)
    assert found == expected
    assert not any(never) and sum(ahead) >= 6


DRAWS = [
    {"temperature": 1.0, "seed": 1, "top_p": 0.9}, {"temperature": 0.7, "seed": 2, "repetition_penalty": 1.3},
    {"repetition_penalty": 1.5}, {},
]  # fmt: skip


@pytest.mark.parametrize("decode", ["graph", "fused"])
def test_rows_that_draw_are_queued_ahead_too_and_say_the_same(model, decode, replayed, monkeypatch):
    def story(look_ahead):
        batch, rows, told = Batch(model, rows=4, decode=decode), [], []
        ahead, tell = told_of_steps(batch, monkeypatch, look_ahead), batch.write_last_tokens
        monkeypatch.setattr(batch, "write_last_tokens", lambda: told.append(True) or tell())
        for options in DRAWS:
            request = GenerateRequest(max_new_tokens=24, **options)
            rows.append(through(batch, model.prepare("Hello"), request, adapter="style"))
        told.clear()
        for _ in range(20):
            batch.step()
        return [row.answer_ids for row in rows], ahead, told

    expected, never, _ = story(False)
    found, ahead, told = story(True)
    assert found == expected and len({tuple(ids) for ids in found}) > 2  # they do not all say the same
    assert not any(never) and all(ahead[1:]) and told == []  # from the second step on, and no token goes by the host


@pytest.mark.parametrize("decode", ["graph", "fused"])
def test_rows_that_take_another_place_are_queued_ahead_and_say_the_same(model, decode, replayed, monkeypatch):
    """The tokens of a step that was queued before a row left are written to the places that the others have now."""

    def story(look_ahead):
        batch, rows = Batch(model, rows=4, decode=decode), []
        ahead = told_of_steps(batch, monkeypatch, look_ahead)
        for number, options in enumerate(DRAWS):
            request = GenerateRequest(max_new_tokens=24, **options)
            asked = model.prepare(f"Hello {number}" * (number + 1))
            rows.append(through(batch, asked, request, adapter=("style", None, "specialist", "style")[number]))
        for leaving in (None, 0, 1, 3):
            if leaving is not None:
                batch.leave(rows[leaving])
            for _ in range(4):
                batch.step()
        return [row.answer_ids for row in rows], ahead

    expected, never = story(False)
    found, ahead = story(True)
    assert found == expected and len({tuple(ids) for ids in found}) == len(DRAWS)
    assert not any(never) and not ahead[0] and all(ahead[1:])


def test_a_step_ahead_that_fails_loses_no_token(model, replayed, monkeypatch):
    expected = answers(joined(model, "graph", [ASKED[3]], tokens=8))
    batch = joined(model, "graph", [ASKED[3]], tokens=8)
    run, failed = batch.steps.run, []

    def fails(state):
        if state.ahead and len(failed) < 3:
            failed.append(True)
            batch.tokens.zero_()
            raise RuntimeError("out of memory")
        return run(state)

    monkeypatch.setattr(batch.steps, "run", fails)
    assert answers(batch) == expected and len(failed) == 3


@pytest.mark.skipif(not ON_GPU, reason="nothing is captured on a CPU")
@pytest.mark.parametrize("decode", ["auto", "graph"])
def test_switching_adapters_captures_nothing_anew(model, decode):
    batch = joined(model, decode, [ASKED[0], ASKED[1]], rows=2)
    batch.step()
    captured = batch.steps.captures
    for names in (["specialist", "style"], ["style", "style"], ["specialist", None]):
        for row, name in zip(batch.active, names, strict=True):
            row.adapter = name
        batch.step()
    assert batch.steps.captures == captured


BASE_ROWS = [(None, prompt, media) for _, prompt, media in ASKED[:3]]


def fill(batch, asked):
    for name, prompt, media in asked:
        through(batch, batch.model.prepare(prompt, **media), GenerateRequest(max_new_tokens=48), adapter=name)
    return batch


@pytest.mark.skipif(ON_GPU, reason="a GPU has graphs")
@pytest.mark.parametrize("decode", ["graph", "fused"])
@pytest.mark.parametrize("rows", [3, 4])
def test_steps_captured_beforehand_are_those_of_the_first_requests(model, replayed, decode, rows):
    expected = of_modules(model, BASE_ROWS)
    batch = Batch(model, rows=rows, decode=decode)
    batch.prepare()
    # The rows themselves, 2 and 1; nothing is left of the stand-ins.
    assert batch.steps.captures == len(replayed) == 3 and batch.steps.capture_s > 0
    assert batch.active == [] and batch.free_rows == rows and not batch.cache.positions.any()
    assert answers(fill(batch, BASE_ROWS)) == expected and batch.steps.captures == 3 and batch.steps.fallbacks == []


def test_nothing_is_captured_beforehand_while_requests_have_rows(model):
    batch = joined(model, "auto", ASKED[:1])
    with pytest.raises(RequestError, match="requests are running"):
        batch.prepare()
    assert len(batch.active) == 1


@pytest.mark.skipif(ON_GPU, reason="a GPU has graphs")
def test_preparing_does_nothing_where_steps_are_not_captured(model):
    batch = Batch(model, rows=2)
    batch.prepare()
    assert batch.steps.captures == 0 and batch.cache.layers == []


@pytest.mark.skipif(ON_GPU, reason="a GPU has graphs")
def test_preparing_ends_at_the_most_graphs_and_where_capturing_fails(model, replayed, monkeypatch):
    monkeypatch.setattr(graph_cache, "MOST_GRAPHS", 2)
    batch = Batch(model, rows=8)
    batch.prepare()
    assert batch.steps.captures == 2 and len(batch.steps._graphs) == 2

    monkeypatch.setattr(GraphCache, "_recorded", raising(NOT_PERMITTED))
    batch = Batch(model, rows=2)
    batch.prepare()
    (fall,) = batch.steps.fallbacks
    assert "not permitted" in fall.why and not batch.steps.is_captured and batch.active == []
    assert answers(fill(batch, BASE_ROWS[:2])) == of_modules(model, BASE_ROWS[:2])


@pytest.mark.skipif(ON_GPU, reason="a GPU has graphs")
def test_what_a_first_request_does_not_need_is_captured_in_moments_without_requests(model, replayed):
    asked = [(None, prompt, {}) for prompt in ("Hello", "What is red?", "And now?", "Why?")]
    expected = of_modules(model, asked)
    batch = Batch(model, rows=6)
    batch.captures_ahead.prepare(first=True)
    assert batch.steps.captures == 2  # six rows and one
    counts = []
    prompt = batch.begin(model.prepare("Hello"), GenerateRequest(max_new_tokens=4)).compute()
    batch.place(prompt)  # not active yet, and its row is written
    with pytest.raises(RequestError, match="requests are running"):
        batch.captures_ahead.prepare()
    batch.leave(prompt.row)
    batch.captures_ahead.prepare(first=True)
    while batch.captures_ahead.left:
        batch.captures_ahead.prepare_more()
        counts.append(batch.steps.captures)
        assert batch.active == [] and batch.free_rows == 6 and not batch.cache.positions.any()
        if len(counts) == 1:  # requests between two captures get what they would have got
            assert answers(fill(batch, asked)) == expected
            for row in list(batch.active):
                batch.leave(row)
    assert batch.steps.captures == len(replayed) == 4  # 4 and 2, one of them at its first use
    batch.captures_ahead.prepare_more()
    assert batch.steps.captures == 4 and answers(fill(batch, asked)) == expected


@pytest.mark.skipif(ON_GPU, reason="a GPU has graphs")
def test_steps_asked_for_by_name_and_budgets_without_room_for_later_graphs_are_captured_at_once(model, replayed, monkeypatch):
    for batch in (Batch(model, rows=4, decode="graph"), Batch(model, rows=4)):
        if batch.steps.mode == "auto":
            monkeypatch.setattr(reserve, "is_wanted", lambda plan, device: True)
            monkeypatch.setattr(reserve, "take", lambda plan, device: 0)
        batch.captures_ahead.prepare(first=True)
        assert batch.steps.captures == 3 and not batch.captures_ahead.left


@pytest.mark.skipif(ON_GPU, reason="a GPU has graphs")
def test_a_capture_that_finds_no_memory_in_such_a_moment_ends_them_and_rows_are_clean(model, replayed, monkeypatch):
    batch = Batch(model, rows=4)
    batch.captures_ahead.prepare(first=True)

    monkeypatch.setattr(GraphCache, "_recorded", raising(torch.OutOfMemoryError("out of memory")))
    with pytest.raises(DeviceError, match="out of memory"):
        batch.captures_ahead.prepare_more()
    assert not batch.captures_ahead.left and batch.active == [] and not batch.cache.positions.any()


@pytest.mark.skipif(ON_GPU, reason="a GPU has graphs")
@pytest.mark.parametrize("family", long_runs.FAMILIES)
def test_every_family_is_prepared_and_its_rows_are_clean_afterwards(family, replayed):
    asked = [(None, list(range(5, 5 + count)), {}) for count in (3, 20)]
    with lent(family) as loaded:
        expected = answers(joined(loaded, "eager", asked, tokens=12))
        batch = Batch(loaded, rows=2, decode="graph")
        batch.prepare()
        captured = batch.steps.captures
        assert captured == 2
        found = [through(batch, loaded.prepare(ids), GenerateRequest(max_new_tokens=12)) for _, ids, _ in asked]
        assert len(found) == 2 and answers(batch) == expected and batch.steps.captures == captured


def test_graphs_that_look_up_fewer_layers_than_are_covered_now_are_dropped(model):
    steps = Batch(model, rows=1).steps
    keys = [("fused", 1), ("fused", 1, decode_step._TABLE, (16, 48)), ("fused", 2, decode_step._TABLE, (16, 56))]
    steps._graphs.update(dict.fromkeys(keys))
    steps._forget_smaller((16, 56))
    assert list(steps._graphs) == [keys[0], keys[2]]


@pytest.mark.skipif(not ON_GPU, reason="nothing is captured on a CPU")
def test_after_preparing_no_request_waits_for_a_capture(model):
    expected = of_modules(model, ASKED[:4])
    batch = Batch(model, rows=4)
    batch.prepare()
    assert batch.steps.kernels.has_lora
    captured = batch.steps.captures
    if any(fall.what == "captures ahead of requests" for fall in batch.steps.fallbacks):
        pytest.skip("another process took memory of this device meanwhile")
    assert captured == 6 and batch.steps.capture_s > 0  # 4, 2 and 1 rows, without adapters and by table
    assert answers(fill(batch, ASKED[:4])) == expected and batch.steps.captures == captured


@pytest.mark.skipif(not ON_GPU, reason="on a CPU nothing is captured")
def test_one_answer_is_decoded_from_captured_steps_within_what_was_counted(model):
    with demo() as loaded:
        loaded.decode = "auto"
        answer = loaded.answer("What do you see?", **LOOK, adapter="style", max_new_tokens=32)
        assert loaded.kept.batch is not None and loaded.kept.batch.steps.captures > 0 and loaded.fallbacks == ()
        memory = loaded.memory()
        assert memory["gpu_peak_bytes"] <= loaded.plan.gpu_peak_bytes + memory["gpu_decode_bytes"]
    assert answer.token_ids == model.answer("What do you see?", **LOOK, adapter="style", max_new_tokens=32).token_ids


@pytest.mark.skipif(not ON_GPU, reason="nothing is captured on a CPU")
@pytest.mark.parametrize("family", long_runs.FAMILIES)
def test_every_family_is_captured_or_says_why(family, tmp_path):
    plan = trimtab.plan(pico.build(family, tmp_path), quant="none", dtype="float32", context=128, device=DEVICE)
    asked = [(None, list(range(5, 5 + count)), {}) for count in (3, 20, 11)]
    with trimtab.load(plan) as loaded:
        expected = answers(joined(loaded, "eager", asked, tokens=24))
        batch = joined(loaded, "auto", asked, tokens=24)
        assert answers(batch) == expected
        reasons = [fall.why for fall in batch.steps.fallbacks if fall.what == "graph"]
        assert batch.steps.captures > 0 or reasons


def test_whether_launches_overlap_beside_copied_layers_is_measured_for_that_batch():
    """Kernels are shared by models of one shape: what paid for a resident one is not taken for one with copied layers."""
    same, other = torch.tensor([[1.0, 2.0]]), torch.tensor([[1.0, 3.0]])
    kernels, tries, told = decode_step.DeviceKernels(matvec=object(), overlap_pays=True), [], []

    def pays(tier, part, *, overlapping=(1.0, same), order=()):
        capture = object.__new__(step_capture.StepCapture)
        capture.device, capture._pays_beside_copies = torch.device("cuda"), None
        capture.graphs = {"a step": SimpleNamespace(order=order)}
        capture.choice = SimpleNamespace(kernels=kernels, fall_back=lambda what, why, requested: told.append((what, why)))
        plan = SimpleNamespace(placements=[SimpleNamespace(part=part, tier=tier)])
        capture.has_streamed_layers = step_capture.streams_layers(plan)

        def tried(body, *, overlap):
            tries.append(overlap)
            return overlapping if overlap else (2.0, same)

        capture.tried = tried
        return [capture.overlap_pays(None, 1) for _ in range(2)]

    assert pays("resident", "language") == pays("stream", "vision") == [True, True] and not tries
    for part, order in (("language", ()), ("head", ()), ("vision", ["a layer"])):
        assert pays("stream", part, order=order) == [True, True] and tries == [False, True]
        tries.clear()
    assert not told
    assert pays("stream", "language", overlapping=(2.5, same)) == [False, False]
    assert pays("stream", "language", overlapping=(1.0, other)) == [False, False]
    assert [what for what, _ in told] == ["overlapping launches"] * 2 and "differ" in told[1][1]
    assert kernels.overlap_pays is True


@pytest.mark.skipif(not ON_GPU, reason="nothing is captured on a CPU")
@pytest.mark.parametrize("slots", [1, 2])
def test_overlapping_launches_beside_copied_layers_give_the_same_bits(slots):
    """Buffers are overwritten with another pattern before each copy: a kernel that reads too early, or a copy that comes too
    early, changes scores."""
    found = []
    with demo("streamed") as loaded:
        loaded.streamer.slots = loaded.streamer.slots[:slots]
        loaded.streamer.poison = True
        for overlaps in (False, True):
            batch = joined(loaded, "fused", ASKED[:4])
            batch.steps._capturing._pays_beside_copies = overlaps
            scores = []
            while batch.active:
                batch.step()
                scores.append([row.answer_ids[-1] for row in batch.active])
                for row in [row for row in batch.active if row.finish is not None]:
                    batch.leave(row)
            assert batch.steps.captures > 0 and not [one for one in batch.steps.fallbacks if "overlap" in one.what]
            found.append(scores)
    assert len(found[0]) > 8 and found[0] == found[1]
