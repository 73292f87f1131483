"""The Python calls as a type checker and `help` show them: options are typed, an unknown one names the one that was meant."""

import doctest
import inspect
import sys
from dataclasses import fields
from pathlib import Path

import pytest

import trimtab
from tests.raised import refused
from trimtab.api import plan
from trimtab.engine.calls.batch_calls import QUESTION
from trimtab.engine.calls.conversation import Conversation
from trimtab.engine.model import LoadedModel
from trimtab.errors import RequestError
from trimtab.request import AnswerOptions, GenerateRequest, PlanOptions, QuestionOptions

ROOT = Path(__file__).resolve().parent.parent
USE = """
import trimtab
from trimtab import Answer, AnswerOptions, Conversation

def ask(model: trimtab.LoadedModel, options: AnswerOptions) -> Answer:
    chat: Conversation = model.chat(system="short", temperature=1.0)
    model.answer("hello", **options)
    model.batch(["hello"], adapter="style", max_new_tokens=3)
    trimtab.load("model", gpu_memory="4GiB")
    return chat.send("hello", stop=["x"])
"""
CALLS = (
    'model.answer("hello", max_tokens=3)', 'model.generate("hello", max_tokens=3)', 'model.answers("hello", 2, max_tokens=3)',
    'model.batch(["hello"], max_tokens=3)', 'model.batch_as_finished(["hello"], max_tokens=3)', "model.chat(max_tokens=3)",
    'model.chat().send("hello", max_tokens=3)', 'model.chat().again(max_tokens=3)', 'model.generate_async("hello", max_tokens=3)',
    'model.answer("hello", max_new_tokens="3")', 'trimtab.load("model", gpu_mem="4GiB")', 'model.hidden_states("hello", img=1)',
)  # fmt: skip


@pytest.fixture(scope="module")
def chat_model():
    from trimtab.demo.demo import FOLDER

    made = trimtab.plan(FOLDER / "base", device="cpu", context=64)
    with trimtab.load(made) as model:
        yield model


def test_typed_options_are_those_that_the_calls_take():
    assert set(AnswerOptions.__annotations__) == {one.name for one in fields(GenerateRequest)}
    assert set(PlanOptions.__annotations__) == set(inspect.signature(plan).parameters) - {"model", "decode"}
    assert set(QuestionOptions.__annotations__) - set(AnswerOptions.__annotations__) == set(QUESTION) - {"prompt"}


def test_no_public_call_takes_options_of_any_name_and_type():
    calls = [member for kind in (LoadedModel, Conversation) for _, member in inspect.getmembers(kind, inspect.isfunction)]
    untyped = [
        one.__qualname__ for one in [*calls, trimtab.load]
        for parameter in inspect.signature(one).parameters.values()
        if parameter.kind is parameter.VAR_KEYWORD and "Unpack[" not in str(parameter.annotation)
    ]  # fmt: skip
    assert untyped == []


@pytest.mark.slow
def test_mypy_refuses_unknown_options_and_takes_the_others(tmp_path):
    api = pytest.importorskip("mypy.api")
    wrong = USE + "".join(
        f"\ndef wrong_{place}(model: trimtab.LoadedModel) -> None:\n    {call}\n" for place, call in enumerate(CALLS)
    )
    file = tmp_path / "use.py"
    file.write_text(wrong, encoding="utf-8")
    shown, _, _ = api.run(["--config-file", str(ROOT / "pyproject.toml"), str(file)])
    lines = [int(line.split(":")[1]) for line in shown.splitlines() if line.startswith(str(file)) and " error: " in line]
    assert sorted(set(lines)) == [number for number, line in enumerate(wrong.splitlines(), 1) if line.strip() in CALLS], shown


@pytest.mark.parametrize("call", [
    lambda model: model.answer("hello", max_tokens=3), lambda model: model.generate("hello", max_tokens=3),
    lambda model: model.answers("hello", 1, max_tokens=3), lambda model: list(model.batch(["hello"], max_tokens=3)),
    lambda model: model.chat(max_tokens=3), lambda model: model.chat().send("hello", max_tokens=3),
    lambda model: list(model.chat().stream("hello", max_tokens=3)), lambda model: list(model.chat().beside("hi", max_tokens=3)),
])  # fmt: skip
def test_unknown_option_names_the_one_that_was_meant(chat_model, call):
    error = refused(call, chat_model, match=r"max_tokens: unknown option .*[Dd]id you mean max_new_tokens")
    assert error.field == "max_tokens" and "max_new_tokens" in error.allowed


@pytest.mark.parametrize(("call", "option", "meant"), [
    (trimtab.load, "gpu_mem", "gpu_memory"), (trimtab.plan, "gpu_mem", "gpu_memory"), (trimtab.inspect, "models", "model"),
    (trimtab.merge, "adapter", "adapters"), (trimtab.verify, "new_token", "new_tokens"),
    (trimtab.LoadedModel.embed, "pool", "pooling"), (trimtab.LoadedModel.hidden_states, "images", "image"),
])  # fmt: skip
def test_unknown_option_of_a_call_names_the_one_that_was_meant(call, option, meant):
    with pytest.raises(RequestError, match=rf"{option}: unknown option \(did you mean {meant}"):
        call("model", **{option: 1})


def test_an_option_of_load_that_resembles_none_lists_those_of_plan():
    error = refused(trimtab.load, "model", zzz=1, match="zzz: unknown option")
    assert set(error.allowed) == set(PlanOptions.__annotations__)


def test_results_and_conversations_are_public(chat_model):
    chat = chat_model.chat(max_new_tokens=2)
    assert type(chat.send("hello")) is trimtab.Answer and type(chat) is trimtab.Conversation
    assert {type(turn) for turn in chat.turns} <= {trimtab.Turn}
    logged = chat_model.answer("hello", max_new_tokens=1, logprobs=1).logprobs
    assert [type(one) for one in logged] == [trimtab.TokenLogprob]
    assert inspect.signature(trimtab.merge).return_annotation == "MergeReport" == trimtab.MergeReport.__name__
    assert inspect.signature(trimtab.verify).return_annotation == "ParityReport" == trimtab.ParityReport.__name__


def test_example_of_help_runs():
    tests = doctest.DocTestFinder(recurse=False).find(trimtab, "trimtab")
    assert sum(len(one.examples) for one in tests) >= 4
    runner = doctest.DocTestRunner(verbose=False)
    for one in tests:
        runner.run(one, out=sys.stderr.write)
    assert runner.summarize(verbose=False).failed == 0
