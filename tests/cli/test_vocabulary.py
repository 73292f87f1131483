"""One vocabulary over all commands: each clause is tried on every command of the parser, and what is left out has a reason."""

from __future__ import annotations

import argparse
import json
import re
from pathlib import Path
from typing import Any

import pytest

import trimtab
import trimtab.demo as demo
from tests.raised import refused
from trimtab.cli import main
from trimtab.cli.commands import plan_run
from trimtab.doctor.preflight.preflight import preflight

BASE, STYLE = str(demo.BASE), str(demo.ADAPTERS["style"])
COMMANDS: dict[str, argparse.ArgumentParser] = next(
    action.choices for action in main.parser()._actions if action.dest == "name" and action.choices
)  # type: ignore[assignment]
FILES_ONLY = "reads headers and config: nothing is placed or computed"
NO_DTYPE = {"inspect": FILES_ONLY, "adapters": FILES_ONLY, "pull": "downloads files as they are", "completion": "prints a script"}
NO_BUDGET = NO_DTYPE
NO_PLAN = {
    **NO_DTYPE, "plan": "makes plans", "merge": "one tensor in memory at a time; budgets are of --check",
    "demo": "makes two plans of its own model and compares them", "models": "plans every model that it lists",
    "doctor": "judges the stock stack, which has no plan",
}  # fmt: skip
NO_ADAPTER = {
    "inspect": "its adapter is positional, tried below", "adapters": "lists what is below a folder",
    "models": "lists models", "pull": "downloads one repository", "demo": "has adapters of its own",
    "completion": "prints a script",
}  # fmt: skip
# `run`, `chat`, `serve` and `merge` scale adapters: their weight is tried in test_chat_command and test_merge_input.
SCALES = ("run", "chat", "serve", "merge")
NO_MODEL = {
    "inspect": "MODEL is --model", "adapters": "MODEL is --model", "models": "lists what is there", "demo": "has its own model",
    "completion": "prints a script", "pull": "looks for it elsewhere: exit code 3 is tried in test_pull",
}  # fmt: skip
# What a flag needs beside it.
BESIDE = {
    ("merge", "--gpu-memory"): ["--check"], ("merge", "--host-memory"): ["--check"], ("merge", "--max-memory"): ["--check"],
    ("doctor", "--memory-limit"): ["--matrix"],
}  # fmt: skip
POSITIONAL = {"MODEL": "no/model", "PROMPT": "hi", "OUT": "{tmp}/out", "ADAPTER": STYLE, "DIR": "{tmp}", "SHELL": "bash"}


def flags_of(command: str) -> set[str]:
    return {text for action in COMMANDS[command]._actions for text in action.option_strings}


def those_with(flag: str) -> list[str]:
    return [name for name in COMMANDS if flag in flags_of(name)]


@pytest.fixture
def ask(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Any:
    """Run a command with its positional arguments, and return (exit code, stdout, stderr). The demo itself does not run."""
    monkeypatch.setattr("trimtab.demo.demo.run", lambda say, placed: {"dtype": placed.dtype})

    def run(command: str, *given: str, **places: str) -> tuple[int, str, str]:
        words = [command]
        for action in COMMANDS[command]._actions:
            if not action.option_strings and action.metavar is not None:
                text = places.get(str(action.metavar), POSITIONAL[str(action.metavar)])
                words += [text.format(tmp=tmp_path)] if text else []
        if command == "merge" and "--adapter" not in given:
            given = ("--adapter", STYLE, *given)
        return (main.main([*words, *given]), *capsys.readouterr())

    return run


@pytest.mark.parametrize(("flag", "reasons"), [
    ("--dtype", NO_DTYPE), ("--gpu-memory", NO_BUDGET), ("--host-memory", NO_BUDGET), ("--max-memory", NO_BUDGET),
    ("--plan", NO_PLAN), ("--adapter", NO_ADAPTER), ("--json", {}), ("--color", {}),
])  # fmt: skip
def test_every_command_has_the_flag_or_a_reason(flag: str, reasons: dict[str, str]) -> None:
    assert set(those_with(flag)) == set(COMMANDS) - set(reasons) and all(reasons.values())


@pytest.mark.parametrize("command", those_with("--dtype"))
def test_a_dtype_has_both_spellings(command: str, ask: Any) -> None:
    for short, full in (("bf16", "bfloat16"), ("fp16", "float16"), ("fp32", "float32")):
        outcomes = [ask(command, "--dtype", text) for text in (short, full)]
        assert outcomes[0] == outcomes[1] and "unknown choice" not in outcomes[0][2]
    code, _, err = ask(command, "--dtype", "bf17")
    assert code == 2 and err.startswith("trimtab: --dtype bf17: unknown choice")
    choices = err.rpartition("(choices: ")[2].rstrip(")\n").split(", ")
    assert set(choices) - {"auto"} <= set(re.findall(r"\w+", COMMANDS[command].format_help()))


@pytest.mark.parametrize("command", those_with("--adapter"))
def test_an_adapter_is_a_path_or_a_name_and_a_path(command: str, ask: Any) -> None:
    for text, words in (("x (2)", "Add a name: NAME=x (2)"), ("=x", "NAME=PATH"), ("a=law:nan", "finite")):
        code, _, err = ask(command, "--adapter", text)
        assert code == 2 and words in err and "--adapter" in err
    named, bare = ask(command, "--adapter", f"style={STYLE}"), ask(command, "--adapter", STYLE)
    assert named == bare and named[0] == 3  # the model is missing
    if command not in SCALES:
        code, _, err = ask(command, "--adapter", "a=law:0.5")
        assert code == 2 and "the weight 0.5 has no effect here" in err
        named = err.partition("no effect here")[2].partition(" take weights")[0]
        assert set(re.findall(r"[a-z]+", named)) >= set(SCALES)


def test_the_adapter_that_is_inspected_may_have_a_name(ask: Any) -> None:
    assert ask("inspect", ADAPTER=f"style={STYLE}") == ask("inspect")
    assert ask("inspect", ADAPTER="no/such")[0] == ask("inspect", ADAPTER="a=no/such")[0] == 3


@pytest.mark.parametrize("command", [name for name in COMMANDS if name not in NO_MODEL])
def test_a_missing_model_has_one_exit_code(command: str, ask: Any) -> None:
    code, out, err = ask(command)
    assert (code, out) == (3, "") and "no/model" in err


@pytest.mark.parametrize("command", ["inspect", "adapters"])
def test_a_missing_model_to_match_with_has_the_same(command: str, ask: Any) -> None:
    code, out, err = ask(command, "--model", "no/model")
    assert (code, out) == (3, "") and "no/model" in err


@pytest.mark.parametrize("command", those_with("--adapter"))
def test_a_missing_adapter_has_the_exit_code_of_a_missing_model(command: str, ask: Any) -> None:
    code, out, err = ask(command, "--adapter", "a=no/such", MODEL=BASE)
    assert (code, out) == (3, "") and "no/such" in err


SIZES = [
    (name, flag)
    for name, parser in COMMANDS.items()
    for one in parser._actions
    if one.metavar == "SIZE"
    for flag in one.option_strings
]


@pytest.mark.parametrize(("command", "flag"), SIZES)
def test_every_size_asks_for_a_unit_by_its_flag(command: str, flag: str, ask: Any) -> None:
    code, _, err = ask(command, *BESIDE.get((command, flag), ()), flag, "4")
    assert code == 2 and err.startswith(f"trimtab: {flag} 4: needs a unit") and "Did you mean 4GiB?" in err
    taken = [
        ask(command, *BESIDE.get((command, flag), ()), flag, text, *_ending(command))
        for text in ("4G", "4g", "4GiB", "4.0GB", "1TiB")
    ]
    assert all("not a size" not in one[2] and "needs a unit" not in one[2] for one in taken)


def _ending(command: str) -> tuple[str, ...]:
    # What ends a command of this test before it begins its work.
    return ("--case", "no-such-case") if command == "doctor" else ()


@pytest.mark.parametrize("command", those_with("--max-memory"))
def test_both_budgets_in_transformers_form(command: str, ask: Any) -> None:
    code, _, err = ask(command, *BESIDE.get((command, "--max-memory"), ()), "--max-memory", '{"0": "4"}')
    assert code == 2 and "needs a unit" in err and "max" in err
    code, _, err = ask(command, *BESIDE.get((command, "--max-memory"), ()), "--max-memory", "{")
    assert code == 2 and err.startswith("trimtab: --max-memory {: is not JSON")


@pytest.mark.parametrize("command", those_with("--plan"))
def test_a_plan_stands_in_place_of_model_and_budgets(command: str, ask: Any, tmp_path: Path) -> None:
    code, _, err = ask(command, "--plan", "no/plan.json", MODEL="")
    assert code == 3 and "no/plan.json: there is no such plan" in err
    wrong = tmp_path / "a.plan"  # whatever its ending
    wrong.write_text("{}", encoding="utf-8")
    code, _, err = ask(command, "--plan", str(wrong), MODEL="")
    assert (code, "is not a saved plan" in err) == ((2, False) if command == "tune" and code == 2 else (3, True))
    code, _, err = ask(command, "--plan", str(wrong))
    assert code == 2 and err.startswith("trimtab: --plan ") and "cannot be combined with MODEL: both name the model" in err
    for flag, value in (("--gpu-memory", "4G"), ("--host-memory", "4G"), ("--device", "cpu"), ("--dtype", "fp16")):
        code, _, err = ask(command, "--plan", str(wrong), flag, value, MODEL="")
        assert code == 2 and f"{flag}: has no effect on a saved plan" in err


def test_a_prompt_is_still_needed_beside_a_plan(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "a.json").write_text("{}", encoding="utf-8")
    assert main.main(["run", "--plan", str(tmp_path / "a.json")]) == 2
    assert "the following arguments are required: PROMPT" in capsys.readouterr().err
    for prompt in (["hi"], ["--prompt-file", str(tmp_path / "a.json")]):  # before the plan's flag and behind it
        assert main.main(["run", *prompt, "--plan", str(tmp_path / "a.json")]) == 3
        assert main.main(["run", "--plan", str(tmp_path / "a.json"), *prompt]) == 3


def test_a_saved_plan_is_run_by_its_flag(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = str(tmp_path / "p")
    assert main.main(["plan", BASE, "--device", "cpu", "--context", "128", "--adapter", STYLE, "--save", path]) == 0
    assert main.main(["run", "--plan", path, "hi", "--max-new-tokens", "4", "--json"]) == 0
    printed = capsys.readouterr().out
    assert 1 <= len(json.loads(printed[printed.index("\n{") :])["token_ids"]) <= 4


def test_the_demo_and_the_list_of_models_follow_their_budget(capsys: pytest.CaptureFixture[str], ask: Any) -> None:
    assert json.loads(ask("demo", "--json", "--dtype", "fp32")[1]) == {"dtype": "float32"}
    code, out, _ = ask("models", "--json", "--device", "cpu", "--gpu-memory", "1MiB", DIR=str(demo.BASE.parent))
    (model,) = json.loads(out)["models"]
    assert code == 0 and model["fits"] is False and "1048576 B" in model["reason"]
    code, _, err = ask("models", "--quick", "--gpu-memory", "1MiB", DIR=str(demo.BASE.parent))
    assert code == 2 and err == "trimtab: --gpu-memory: has no effect with --quick\n"


@pytest.mark.parametrize(("call", "names"), [
    (lambda **size: trimtab.plan("no/model", **size), ("gpu_memory", "host_memory", "prefix_cache")),
    (lambda **size: trimtab.load("no/model", **size), ("gpu_memory", "host_memory", "prefix_cache")),
    (lambda **size: preflight(BASE, **size), ("gpu_memory", "host_memory")),
])  # fmt: skip
def test_the_same_errors_name_arguments_in_python(call: Any, names: tuple[str, ...]) -> None:
    for name in names:
        error = refused(call, **{name: "4"})
        assert (error.field, error.reason) == (name, "needs a unit") and "--" not in str(error)


def test_every_command_is_one_of_this_table() -> None:
    for reasons in (NO_DTYPE, NO_BUDGET, NO_PLAN, NO_ADAPTER, NO_MODEL):
        assert set(reasons) <= set(COMMANDS)
    assert plan_run.run_demo is COMMANDS["demo"].get_default("command")
