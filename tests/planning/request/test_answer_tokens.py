"""The answer length of a request: it weighs steps against prompts, so that short and long answers may be placed differently."""

import argparse

import pytest

import trimtab
from tests.cli.test_vocabulary import BASE
from tests.planning.values.test_execution import off_device, plan
from tests.raised import raised, refused
from trimtab.cli import main
from trimtab.cli.commands import bench, plan_run
from trimtab.cli.commands.serve import served_models
from trimtab.errors import CheckpointError
from trimtab.planning.memory.activations import answer_tokens_of
from trimtab.report.render import WIDTH, Lines
from trimtab.request import DEFAULT_NEW_TOKENS, LoadRequest
from trimtab.serve.worker.registry import read_registry


@pytest.mark.parametrize("gib", [3.2, *(pytest.param(gib, marks=pytest.mark.slow) for gib in (2.8, 3.5, 4.25))])
def test_longer_answers_keep_more_of_the_decoder_and_shorter_ones_larger_captured_chunks(gib):
    short, usual, long = (plan(gib, answer_tokens=tokens) for tokens in (8, DEFAULT_NEW_TOKENS, 2000))
    assert off_device(short) > off_device(usual) > off_device(long) > 0 and short.token_s > usual.token_s > long.token_s
    assert max(short.execution.prompt.chunks) == 1024 > max(usual.execution.prompt.chunks)
    # Graphs take memory that a long answer spends on layers.
    modes = [made.execution.prompt.mode for made in (short, usual, long)]
    assert modes == ["graph", "graph", "eager"] and "prompt_graphs" not in long.gpu


def test_each_plan_is_the_fastest_for_its_own_answer_length():
    short, long = plan(3.5, answer_tokens=8), plan(3.5, answer_tokens=2000)
    for made, other in ((short, long), (long, short)):
        prompts_s = [one.request_s / (4096 - one.answer_tokens) * (4096 - made.answer_tokens) for one in (made, other)]
        assert prompts_s[0] + made.answer_tokens * made.token_s < prompts_s[1] + made.answer_tokens * other.token_s
    assert long.expected_s == long.request_s + 2000 * long.token_s


def test_where_the_whole_model_fits_the_answer_length_changes_no_placement():
    short, long = plan(8, answer_tokens=8), plan(8, answer_tokens=4000)
    assert short.tiers() == long.tiers() and short.gpu == long.gpu
    assert short.execution.prompt.chunks == long.execution.prompt.chunks and short.request_s > long.request_s


def test_the_length_takes_no_memory():
    """A prompt may still fill the context."""
    assert plan(8, answer_tokens=4095).gpu == plan(8, answer_tokens=1).gpu


@pytest.mark.parametrize(("context", "given", "planned"), [
    (4096, {}, 256), (300, {}, 150), (1, {}, 1), (300, {"answer_tokens": 8}, 8), (300, {"answer_tokens": 200}, 200),
    (300, {"answer_tokens": 299}, 299), (300, {"answer_tokens": 300}, 299), (300, {"answer_tokens": 9999}, 299),
    (1, {"answer_tokens": 9}, 1), (4096, {"answer_tokens": 4000}, 4000),
])  # fmt: skip
def test_at_least_one_token_of_the_context_is_the_prompts_and_by_default_half(context, given, planned):
    assert answer_tokens_of(LoadRequest(model="m", context_tokens=context, **given)) == planned
    assert plan(24, context_tokens=context, images=0, audio_s=0.0, **given).answer_tokens == planned


@pytest.mark.parametrize("value", [0, -1, 2.5, True, None])
def test_a_length_that_is_no_positive_integer_is_refused_by_name(value):
    error = refused(trimtab.plan, BASE, device="cpu", answer_tokens=value, match="must be an integer of at least 1")
    assert (error.field, error.value) == ("answer_tokens", value)


def test_a_length_may_be_a_text_of_a_number():
    assert trimtab.plan(BASE, device="cpu", answer_tokens="256").answer_tokens == 256
    error = refused(trimtab.plan, BASE, device="cpu", answer_tokens="many", match="is not a number of tokens")
    assert (error.field, error.value) == ("answer_tokens", "many")


def test_it_is_in_the_table():
    made = trimtab.plan(BASE, device="cpu", context=512, answer_tokens=77)
    assert "context 512, answer 77, batch 1" in str(made)
    assert "context 512, answer 77, batch 1" in " ".join(Lines(WIDTH).show(made.document()).split())


class Asked(Exception):
    """Stands in for the rest of a command."""


@pytest.fixture
def asked(monkeypatch):
    """Return what calls a command and returns the request that it plans."""

    def planned(request, **_):
        raise Asked(request)

    monkeypatch.setattr("trimtab.api.plan_request", planned)

    def call(*words) -> LoadRequest:
        options = main.parser().parse_args([str(word) for word in words])
        return raised(Asked, {"plan": plan_run.run_plan, "run": plan_run.run_run}[options.name_of_command], options).args[0]

    return call


def test_the_flag_of_plan_reaches_the_request(asked):
    assert asked("plan", BASE, "--answer-tokens", 1000).answer_tokens == 1000
    assert asked("plan", BASE).answer_tokens == DEFAULT_NEW_TOKENS


def test_run_plans_for_its_longest_answer(asked, tmp_path):
    assert asked("run", BASE, "Hi", "--max-new-tokens", 1000).answer_tokens == 1000
    assert asked("run", BASE, "Hi").answer_tokens == DEFAULT_NEW_TOKENS
    (tmp_path / "p.jsonl").write_text('{"prompt": "Hi"}\n')
    prompts = ("run", BASE, "--prompts", tmp_path / "p.jsonl", "--out", tmp_path / "out.jsonl")
    assert asked(*prompts, "--max-new-tokens", 12).answer_tokens == 12 and asked(*prompts).answer_tokens == DEFAULT_NEW_TOKENS


def test_run_with_sound_plans_for_its_longest_answer_too(asked, monkeypatch):
    monkeypatch.setattr(plan_run, "check_media", lambda images, audios: 2.5)
    request = asked("run", BASE, "Hi", "--max-new-tokens", 1000)
    assert (request.audio_s, request.answer_tokens) == (2.5, 1000)


def benched(*words) -> argparse.Namespace:
    return bench._request(main.parser().parse_args(["bench", *(str(word) for word in words)]))


def test_bench_plans_for_the_answers_that_it_was_asked_to_measure(tmp_path):
    given, usual = benched(BASE, "--new-tokens", 300), benched(BASE)
    assert (given.new_tokens, given.load.answer_tokens) == (300, 300)
    assert (usual.new_tokens, usual.load.answer_tokens) == (64, DEFAULT_NEW_TOKENS)
    assert refused(benched, BASE, "--new-tokens", 0).field == "--new-tokens"
    trimtab.plan(BASE, device="cpu", answer_tokens=5).save(tmp_path / "plan.json")
    assert benched(tmp_path / "plan.json", "--new-tokens", 9).load.request.answer_tokens == 5


def test_a_server_has_it_as_a_flag_and_as_a_key_of_a_model(tmp_path):
    (served,) = served_models(main.parser().parse_args(["serve", str(BASE), "--answer-tokens", "700"]))
    assert served.request.answer_tokens == 700
    file = tmp_path / "models.toml"
    file.write_text(f"[models.a]\npath = '{BASE}'\nanswer_tokens = 900\n[models.b]\npath = '{BASE}'\n", encoding="utf-8")
    assert [one.request.answer_tokens for one in read_registry(file)] == [900, DEFAULT_NEW_TOKENS]
    file.write_text(f"[models.a]\npath = '{BASE}'\nanswer_tokens = 'long'\n", encoding="utf-8")
    with pytest.raises(CheckpointError, match=r"models\.a\.answer_tokens: must be an integer"):
        read_registry(file)
