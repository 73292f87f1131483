"""What a newcomer types wrong in the first hour: each mistake is named as it was typed, with what to do.

Nothing here imports torch: a mistake that needs none is known before it.
"""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

import trimtab
from tests.adapter_files import TEXT, pair, small_anatomy, write_adapter
from tests.raised import raised, refused
from trimtab import api
from trimtab.adapters.file import read_adapter
from trimtab.adapters.match import match_adapter
from trimtab.checkpoint.folder import read_checkpoint
from trimtab.checkpoint.names import near_names
from trimtab.checkpoint.unreadable import address_hint
from trimtab.cli import main
from trimtab.cli.commands.prompts_file import Doubts, read_prompts
from trimtab.cli.main import ELSEWHERE
from trimtab.errors import AdapterError, CheckpointError, RequestError
from trimtab.planning.plan.plan import Plan
from trimtab.request import LoadRequest, full_dtype, token_count
from trimtab.serve.contract.errors import MOST_NAMES, UnknownModelError
from trimtab.serve.contract.settings import Limits

DEMO = Path(trimtab.__file__).parent / "demo"
BASE, STYLE, SPECIALIST = DEMO / "base", DEMO / "adapters" / "style", DEMO / "adapters" / "specialist"


@pytest.fixture
def ask(capsys):
    """Run a command; return (exit code, stdout, stderr)."""

    def run(*arguments):
        return (main.main([str(one) for one in arguments]), *capsys.readouterr())

    return run


# Near matches ---------------------------------------------------------------------------------------------------------


def test_a_near_name_is_a_question_and_every_choice_stays_in_the_field():
    error = RequestError("is no name", field="f", value="a", allowed=("aa", "ab", "zz"), near=("aa", "ab"))
    assert str(error) == "f='a': is no name (did you mean aa or ab?)"
    assert error.allowed == ("aa", "ab", "zz") and error.near == ("aa", "ab")
    assert error.to_dict()["fields"]["near"] == ("aa", "ab")
    assert RequestError.from_dict(json.loads(json.dumps(error.to_dict()))).near == ("aa", "ab")


def test_without_a_near_name_every_choice_is_shown_and_the_error_has_no_field_for_it():
    error = RequestError("is no name", field="f", value="q", allowed=("aa", "ab"))
    assert str(error) == "f='q': is no name (choices: aa, ab)" and error.near == () and "near" not in error.to_dict()["fields"]


@pytest.mark.parametrize(
    ("typed", "near"), [("foo", []), ("timeout", []), ("image_pixel", ["image_pixels"]), ("IMAGE_PIXELS", ["image_pixels"])]
)
def test_a_limit_that_resembles_none_lists_all(typed, near):
    error = refused(Limits.of, {typed: "3"})
    assert list(error.near)[:1] == near and {"image_pixels", "body_s", "tools"} <= set(error.allowed)
    assert ("choices: " in str(error)) == (not near)


def test_a_wrong_adapter_means_the_near_one_and_not_that_there_is_no_other(ask):
    two = ("--adapter", f"style={STYLE}", "--adapter", f"specialist={SPECIALIST}")
    code, _, err = ask("run", BASE, "hi", *two, "--use", "styel")
    assert code == 2 and "--use styel: no adapter of this name is given (did you mean style?)" in err
    code, _, err = ask("run", BASE, "hi", *two, "--use", "zzz")
    assert code == 2 and "(choices: style, specialist, base)" in err


def test_a_served_name_is_asked_for_and_a_long_list_says_that_it_goes_on():
    error = UnknownModelError("styel", ["gemma", "style", "specialist"])
    assert "(did you mean style?)" in str(error) and error.allowed == ("style", "gemma", "specialist")
    many = [f"adapter-{number}" for number in range(100)]
    error = UnknownModelError("zzz", many)
    assert len(error.allowed) == MOST_NAMES and "20 of 100; GET /v1/models lists all" in str(error)


@pytest.mark.parametrize("name", ["STYLE", "Style", "styel"])
def test_case_is_no_difference(name):
    assert near_names(name, ["specialist", "style"]) == ["style"]


@pytest.fixture
def folders(tmp_path, monkeypatch):
    """Work in a folder with models/base, models/adapters/{style,sober}, media/cat.png and prompts.jsonl, all empty."""
    for name in ("models/base/config.json", "models/adapters/style/adapter_config.json",
                 "models/adapters/sober/adapter_config.json", "media/cat.png", "prompts.jsonl"):  # fmt: skip
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize(("typed", "said"), [
    ("run BASE hi --adapter styel", "Did you mean models/adapters/style or demo/style?"),
    ("run BASE hi --adapter models/adapters/sobr", "Did you mean models/adapters/sober?"),
    ("inspect zzz", "There are models/adapters/sober, models/adapters/style"),
    ("run demo hi --adapter zzz", "The demo has demo/rslora-dora, demo/specialist, demo/style"),
    ("plan demo --adapter demo", "The demo has demo/rslora-dora, demo/specialist, demo/style"),
    ("merge BASE out --adapter a=models/stile", "Did you mean models/adapters/style or demo/style?"),
    ("serve BASE --adapter demo/styel", "styel: no such folder. Did you mean demo/style?"),
    ("run BASE hi --adapter demo/style,demo/specialist", "Adapters are given one by one. "),
    ("run models/bsae hi", "downloaded automatically. Did you mean models/base? Fetch"),
    ("plan ./models/bsae", "./models/bsae: no such folder. Did you mean models/base?"),
    ("plan models", " is a folder with config.json and safetensors files. There is models/base"),
    ("chat dmeo", "Did you mean demo? Fetch"), ("plan a/b/c", "c: no such folder. There is no folder a\n"),
    ("plan ./medai/b/c/goood", "goood: no such folder. There is no folder ./medai. Did you mean media?\n"),
    ("plan " + "./" + 1500 * "a/" + "b", "b: no such folder. There is no folder ./a\n"),
    ("run BASE hi --image media/cta.png", "no such file. Did you mean media/cat.png?"),
    ("run BASE hi --image medai/cat.png", "no such file. There is no folder medai. Did you mean media?"),
    ("run BASE hi --image media", "--image media: cannot be read (Is a directory)"),
    ("run BASE --prompts promtps.jsonl --out o", "cannot be read (No such file or directory). Did you mean prompts.jsonl?"),
    ("verify BASE --prompts promtps.jsonl", "Did you mean prompts.jsonl?"),
    ("doctor --trace media/cta.txt", "--trace media/cta.txt: cannot be read (No such file or directory)\n"),
    ("run BASE --prompt-file promtps.jsonl", "Did you mean prompts.jsonl?"),
    ("run --plan promtps.jsonl hi", "Did you mean prompts.jsonl? `trimtab plan MODEL --save FILE` writes one"),
    ("serve --config promtps.jsonl", "Did you mean prompts.jsonl?"),
    ("doctor --trace promtps.jsonl", "Did you mean prompts.jsonl?"),
    ("plan BASE --device-map promtps.jsonl", "Did you mean prompts.jsonl?"),
    ("plan BASE --device-map {}", "--device-map: has no device for "),
    ("adapters modles", "Did you mean models?"),
    ("plan BASE --save medai/p.json", "there is no folder medai. Did you mean media?"),
])  # fmt: skip
def test_a_mistyped_path_is_asked_for_or_what_is_there_is_listed(ask, folders, typed, said):
    code, _, err = ask(*typed.replace("BASE", str(BASE)).split())
    assert code in (2, 3) and said in err


def test_an_adapter_is_looked_for_beside_its_model_too(folders, monkeypatch):
    shutil.copytree(BASE, folders / "models" / "base", dirs_exist_ok=True)
    (folders / "elsewhere").mkdir()
    monkeypatch.chdir("elsewhere")
    error = raised(AdapterError, trimtab.plan, folders / "models" / "base", adapters="sobr")
    assert error.hint == f"Did you mean {folders}/models/adapters/sober?"


# A model's own file as MODEL ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "model.safetensors.index.json"])
@pytest.mark.parametrize("command", [("run", "hi"), ("chat",), ("plan",)], ids=lambda words: words[0])
def test_a_file_of_a_model_is_no_plan_and_its_folder_is_named(ask, command, name):
    code, _, err = ask(command[0], BASE / name, *command[1:])
    assert code == 3 and "another release" not in err and f"{BASE / name}: is not a saved plan" in err
    assert f"A model is given as its folder: {BASE}" in err


def test_a_file_of_a_model_is_no_plan_in_python_either(tmp_path):
    shutil.copy(BASE / "tokenizer.json", tmp_path / "mine.json")
    error = raised(CheckpointError, Plan.load, tmp_path / "mine.json", match="is not a saved plan")
    assert "as its folder or hub id" in error.hint


# --card list ----------------------------------------------------------------------------------------------------------


def test_card_list_prints_the_cards_without_a_model(ask):
    code, out, _ = ask("plan", "--card", "list")
    assert code == 0 and "GeForce RTX 4060 8GB" in out
    code, out, _ = ask("plan", "--card", "list", "--json")
    assert code == 0 and "GeForce RTX 4060 8GB" in [card["title"] for card in json.loads(out)["cards"]]


def test_card_list_plans_nothing(ask):
    code, _, err = ask("plan", BASE, "--card", "list")
    assert code == 2 and "Omit MODEL" in err
    code, _, err = ask("plan", BASE, "--card", "M3 Max")
    assert code == 2 and "prints them with --card list" in err and "did you mean" not in err
    code, _, err = ask("plan", "--card", "T4")
    assert code == 2 and "required: MODEL" in err


# What the user typed ---------------------------------------------------------------------------------------------------


def test_a_bug_that_is_not_known_is_named_by_its_flag(ask):
    code, _, err = ask("doctor", "--probe", "Z9")
    assert code == 2 and "--probe Z9: is not in the catalogue of known bugs (choices: A1, " in err


@pytest.mark.parametrize(("given", "blamed"), [
    (("--max-memory", '{"0": "4GiB"}'), "--max-memory 0"), (("--max-memory", '{"cuda": "4GiB"}'), "--max-memory cuda"),
    (("--device", "cuda:0"), "--device cuda:0"),
    (("--device", "cuda:0", "--max-memory", '{"0": "4GiB"}'), "--device cuda:0"),
])  # fmt: skip
def test_a_device_that_is_not_here_is_blamed_on_the_flag_that_names_it(ask, monkeypatch, given, blamed):
    def refuse(device, bytes_before=None):
        raise RequestError("this machine has 0 CUDA devices", field="device", value=device, allowed=("auto", "cpu"))

    monkeypatch.setattr("trimtab.machine.machine_cache.find_machine", refuse)
    code, _, err = ask("plan", BASE, *given)
    choices = "cpu" if blamed.startswith("--max-memory") else "auto, cpu"
    assert code == 2 and err.startswith(f"trimtab: {blamed}: this machine has 0 CUDA devices (choices: {choices})")


@pytest.mark.parametrize(("given", "said"), [
    (("plan", BASE, "--keep-unquantized", "lm_haed"), "trimtab: --keep-unquantized lm_haed: names no linear module"),
    (("plan", BASE, "--max-memory", '{"gpu": "4GiB"}'), "trimtab: --max-memory gpu: no device has this name (choices: 0, "),
    (("run", BASE, "hi", "--temperature", "-1"), "trimtab: --temperature -1: must be"),
    (("plan", BASE, "--save", "/nothere/x.json"), "trimtab: --save /nothere/x.json: there is no folder /nothere\n"),
    (("serve", BASE, "--limit", "foo=3"), " request_pixels, audio_s, request_audio_s, "),
    (("serve", BASE, "--limit", "audio_seconds=3"), "(did you mean audio_s or audio_bytes?)"),
])  # fmt: skip
def test_what_was_typed_and_what_may_be_typed_are_shown_as_they_are(ask, given, said):
    code, _, err = ask(*given)
    assert code == 2 and said in err


def test_a_device_that_is_not_here_is_blamed_on_max_memory_in_python(ask, monkeypatch):
    def refuse(device, bytes_before=None):
        raise RequestError("this machine has 0 CUDA devices", field="device", value=device)

    monkeypatch.setattr("trimtab.machine.machine_cache.find_machine", refuse)
    for options, named in (({"max_memory": {0: "4GiB"}}, ("max_memory", 0)), ({"device": "cuda:0"}, ("device", "cuda:0"))):
        error = refused(trimtab.plan, BASE, **options)
        assert (error.field, error.value) == named
    code, out, err = ask("serve", BASE, "--max-memory", '{"0": "4GiB"}')  # before the banner and the log
    assert (code, out) == (2, "") and err.startswith("trimtab: --max-memory 0: this machine has 0") and err.count("\n") == 1


def test_an_address_as_model_says_what_to_do(ask):
    code, _, err = ask("plan", "https://huggingface.co/google/gemma-4-E4B-it/tree/main")
    assert code == 3 and "is an address" in err
    assert "`trimtab pull google/gemma-4-E4B-it` fetches it; then give google/gemma-4-E4B-it" in err
    code, _, err = ask("plan", "https://example.com/model.tar")
    assert code == 3 and "download it, and give the folder, or a hub id" in err


def test_an_address_as_adapter_or_medium_says_what_to_do(ask):
    code, _, err = ask("inspect", "style=https://example.com/adapter")
    assert code == 3 and "is an address, not a folder" in err and "download it" in err
    for command in ("run", "plan", "serve"):
        code, _, err = ask(command, BASE, *["hi"] * (command == "run"), "--adapter", "https://huggingface.co/x/y")
        assert code == 3 and "https://huggingface.co/x/y: " in err and "`trimtab pull x/y` prints its folder" in err
    for flag in ("--image", "--audio"):
        code, _, err = ask("run", BASE, "hi", flag, "https://example.com/x.png")
        assert code == 2 and f"{flag} https://example.com/x.png: no such file. Nothing is read from an address: download" in err


def test_a_server_without_its_scheme_is_no_unknown_comparison(ask):
    for address in ("localhost:8000", "10.0.0.1:8000/v1", "gpu-box.local:80"):
        code, _, err = ask("verify", BASE, "--against", address)
        assert code == 2 and f"--against {address}: begins with http:// or https://" in err


@pytest.mark.parametrize("text", ["C:/models/gemma", "google/gemma", "a:b", "x=https", "./https:", ""])
def test_a_path_is_no_address(text):
    assert address_hint(text) == ""


def test_a_model_as_adapter_is_called_a_model(ask):
    code, _, err = ask("plan", BASE, "--adapter", BASE)
    assert code == 3 and "this is a model, not an adapter" in err and "missing" not in err


def test_the_adapter_of_another_model_begins_with_the_model_that_it_was_made_for(tmp_path):
    shapes = pair(f"{TEXT}.layers.0.self_attn.q_proj", 999, 16)
    folder = write_adapter(tmp_path / "a", shapes, base_model_name_or_path="google/gemma-4-E2B-it")
    with pytest.raises(AdapterError) as caught:
        match_adapter(read_adapter(folder), small_anatomy())
    first, *others = str(caught.value).splitlines()
    assert first.startswith(f"{folder}: was made for google/gemma-4-E2B-it, and this model differs: ")
    assert first.endswith(f"{len(caught.value.problems)} problem{'s' * (len(caught.value.problems) != 1)}")
    assert any("999" in line for line in others)


# Flags and commands ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("given", "said"), [
    (("run", "base", "hi", "--max-tokens", "5"), ": --max-tokens 5; --max-tokens (did you mean --max-new-tokens?)"),
    (("run", "base", "--max-tokens", "3", "hi"), "unrecognized arguments: --max-tokens 3; --max-tokens (did"),
    (("run", "base", "hi", "--adapters", "a=b"), "--adapters (did you mean --adapter?)"),
    (("plan", "base", "more", "--foo"), "arguments: more --foo; "), (("completion", "tcsh"), "SHELL: invalid choice: 'tcsh'"),
    (("plan", "base", "--foo", "a", "--foo", "b"), "arguments: --foo a --foo b; "),
    (("serve", "base", "--gpu_memory=4GiB"), "--gpu_memory (did you mean --gpu-memory?)"),
    (("run", "base", "-p", "hi"), "PROMPT has no flag: trimtab run MODEL PROMPT"),
    (("run", "--model", "base", "hi"), "MODEL has no flag: trimtab run MODEL PROMPT"),
    (("chat", "base", "--ctx-size", "512"), "--ctx-size (did you mean --context?)"),
    (("bench", "base", "--max-tokens", "5"), "--max-tokens (did you mean --new-tokens?)"),
    (("verify", "base", "--html", "v.html"), "--html (did you mean --save?)"),
    (("run", "base", "--prompts", "a.jsonl", "--output", "b"), "--output (did you mean --out?)"),
    (("merge", "base", "-o", "merged"), "-o; OUT has no flag: trimtab merge MODEL OUT"),
    (("run", "base", "hi", "there", "-1.5"), 'unrecognized arguments: there -1.5; the words of a prompt stand between q'),
    (("plan", "base", "--cont", "5"), "unrecognized arguments: --cont 5; "), (("inspect",), "required: ADAPTER"),
    (("plan", "base", "more"), "; trimtab plan takes MODEL\n"), (("demo", "x"), "usage: trimtab demo [options]\n"),
    (("run", "base", "hi", "--adapter", "a", "demo/style"), "; each adapter has its own flag: --adapter demo/style\n"),
    (("run", "base", "hi", "a=demo/style"), "; each adapter has its own flag: --adapter a=demo/style\n"),
    (("plan", "base", "--adapter", "a=x", "b=y"), "; each adapter has its own flag: --adapter b=y\n"),
    (("plan", "base", "--place", "language=stream", "head=host"), "; --place is given once for each: --place head=host\n"),
    (("serve", "base", "--limit", "queue=4", "rows=3"), "; --limit is given once for each: --limit rows=3\n"),
    (("run", "base", "a=1", "b=2"), "; the words of a prompt stand between quotes: "),
    (("run", "base", "hi", "--server", "x"), "--server is --against here, a flag of trimtab verify, bench, not of "),
    (("inspect", "a", "--adapter", "b", "c=d"), "; trimtab inspect takes ADAPTER\n"),
    (("pull",), "required: MODEL; it is a hub id, such as google/gemma-4-E4B-it\n"),
    (("inspect", "--adapter", "a"), "; ADAPTER has no flag: trimtab inspect ADAPTER\n"),
    (("plan", "base", "--threads", "2"), "; --threads is a flag of trimtab run, demo, chat, merge, "),
    (("run", "base", "hi", "--kv-cache", "int8"), "(did you mean --kv?)"), (("inspect", "a", "--zzz"), "ect --help` lists the"),
    (("plan",), "required: MODEL; demo is the bundled model, and `trimtab models` lists those of the local cache\n"),
    (("rn", "base", "hi"), "there is no command 'rn' (did you mean run"),
    (("qqq",), "there is no command 'qqq' (choices: plan, inspect, run, demo, chat, "),
    (("run", "base"), "required: PROMPT; - reads standard input, --prompt-file and --prompts read files, and `trimtab chat M"),
    (("run", "base", "hi", "--seed", "x"), "argument --seed: 'x' is not a whole number\n"),
    (("plan", "base", "--audio-s", "long"), "argument --audio-s: 'long' is not a number\n"),
    (("run", "base", "hi", "--context", "4q"), "argument --context: '4q' is not a number of tokens, such as 4096 or 4k"),
])  # fmt: skip
def test_a_mistyped_flag_or_command_is_asked_for(ask, given, said):
    code, out, err = ask(*given)
    assert code == 2 and not out and said in err and err.startswith("usage: trimtab")


def test_a_mistyped_flag_is_one_json_object_too(ask):
    code, out, err = ask("run", "base", "hi", "--max-tokens", "5", "--json")
    error = json.loads(out)["error"]
    assert (code, err, error["class"], error["fields"]["field"]) == (2, "", "RequestError", "command line")
    assert "--max-tokens" in error["message"] and "did you mean --max-new-tokens" in error["message"]


def test_every_flag_of_another_program_leads_to_one_of_ours():
    commands = next(one for one in main.parser()._actions if one.dest == "name").choices
    ours = {word for command in commands.values() for action in command._actions
            for word in (*action.option_strings, action.metavar)}  # fmt: skip
    assert set(" ".join(ELSEWHERE.values()).split()) <= ours
    assert not set(ELSEWHERE) & {word for action in commands["run"]._actions for word in action.option_strings}


@pytest.mark.parametrize(
    ("given", "as_if"),
    [(["-V"], ["--version"]), (["version"], ["--version"]), (["help"], ["--help"]), (["help", "run"], ["run", "--help"])],
)  # fmt: skip
def test_help_and_version_are_commands_too(given, as_if, capsys):
    outputs = []
    for arguments in (given, as_if):
        with pytest.raises(SystemExit) as caught:
            main.main(arguments)
        outputs.append((caught.value.code, capsys.readouterr().out))
    assert outputs[0] == outputs[1] and outputs[0][0] == 0 and "trimtab" in outputs[0][1]


@pytest.mark.parametrize("width", [60, 80, 200])
@pytest.mark.parametrize("command", [[], ["doctor"], ["models"]])
def test_help_keeps_to_the_columns_of_its_terminal(command, width, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", str(width))
    with pytest.raises(SystemExit):
        main.main([*command, "--help"])
    out = capsys.readouterr().out
    examples = [f"  trimtab {command[0]} {words}".rstrip() for words in main.EXAMPLES[command[0]]] if command else []
    assert set(examples) <= set(out.splitlines())  # to be copied: never wrapped
    assert max(len(line) for line in out.splitlines() if line not in examples) <= width
    assert bool(command) or re.search(r"\n  10   a step is done, .*(\n {7}.*)?be\s+done\n", out)


def test_version_as_json_has_both_spellings(ask):
    assert ask("version", "--json")[:2] == ask("--version", "--json")[:2] and ask("version", "--json")[0] == 0


def test_trimtab_alone_prints_its_help_and_asked_nothing(ask):
    code, out, err = ask()
    assert code == 2 and not out and err.startswith("usage: trimtab") and "\n    chat " in err and "exit codes:" in err


@pytest.mark.parametrize(
    ("text", "tokens"), [("4k", 4096), ("4096", 4096), ("128K", 131072), ("0", 0), ("-1", -1), ("1_000", 1000)]
)
def test_k_is_1024_tokens(text, tokens):
    assert token_count(text) == tokens


@pytest.mark.parametrize("text", ["", "k", "4kk", "4 GiB", "4.5k", "4m", "kk"])
def test_what_is_no_number_of_tokens_is_refused(text):
    with pytest.raises(RequestError, match="such as 4096 or 4k"):
        token_count(text)


def test_a_call_takes_k_as_the_flag_does():
    error = refused(trimtab.plan, "nowhere", context="4q")
    assert (error.field, error.value) == ("context", "4q")
    assert [api._tokens(one, "context") for one in ("4k", "4096", 4096, None)] == [4096, 4096, 4096, None]


@pytest.mark.parametrize("words", [["--color"], ["--color", "plan", "base"], ["plan", "base", "--color"]])
def test_color_without_a_value_names_the_values(words, capsys):
    assert main.main(words) == 2
    assert "argument --color: expected one argument of auto, always, never" in capsys.readouterr().err


def test_every_number_of_tokens_takes_k():
    commands = next(one for one in main.parser()._actions if one.dest == "name").choices
    for name, command in commands.items():
        for action in command._actions:
            if re.match("(most )?tokens (of|whose)", action.help or ""):
                assert action.type is token_count, (name, action.option_strings)


def test_a_dtype_of_torch_is_its_name():
    """The class is imitated: torch's is in tests/test_request.py."""
    kind = type("dtype", (), {"__module__": "torch", "__str__": lambda self: "torch.float16"})
    for given in (kind(), "torch.float16", "fp16", "float16"):
        assert full_dtype(given) == "float16" and LoadRequest(model="m", dtype=given).dtype == "float16"
    with pytest.raises(RequestError, match="unknown choice"):
        LoadRequest(model="m", dtype="torch.float15")
    assert full_dtype(None) is None and full_dtype(16) == 16


# Before torch ----------------------------------------------------------------------------------------------------------

# Runs command lines one after another; one that imports torch ends there, as code "torch".
CHILD = """
import contextlib, importlib.abc, io, json, sys

class Torch(BaseException):
    pass

class Guard(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name == "torch":
            raise Torch

sys.meta_path.insert(0, Guard())
from trimtab.cli import main as cli
said = []
for words in json.load(sys.stdin):
    err = io.StringIO()
    try:
        with contextlib.redirect_stderr(err):
            code = cli.main(words)
    except Torch:
        code = "torch"
    assert "torch" not in sys.modules
    said.append([code, err.getvalue()])
print(json.dumps(said))
"""


@pytest.fixture(scope="module")
def mistakes(tmp_path_factory):
    """Return (words of a command line, exit code, what stderr has) of mistakes that need no torch to be found."""
    folder = tmp_path_factory.mktemp("mistakes")
    bare = folder / "bare"
    bare.mkdir()
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        shutil.copy(BASE / name, bare)
    files = {"text": "hello\nyou\n", "one": '{"prompt": "a"}\n', "none": "",
             "image": '{"prompt": "a", "image": "no.png"}\n', "keyed": '{"prompt": "a", "max_tokens": 3}\n',
             "named": '{"prompt": "a", "adapter": "styel"}\n'}  # fmt: skip
    prompts = {}
    for name, text in files.items():
        (folder / f"{name}.jsonl").write_text(text, encoding="utf-8")
        prompts[name] = ["--prompts", str(folder / f"{name}.jsonl"), "--out", str(folder / f"{name}-out.jsonl")]
    (folder / "notes.txt").write_text("my notes\n", encoding="utf-8")
    style, both = (["--adapter", f"style={STYLE}"], ["--adapter", f"style={STYLE}", "--adapter", f"specialist={SPECIALIST}"])
    base, several = str(BASE), "--use: several adapters are given; name the one that answers (choices: style, specialist"
    or_base = f"{several}, base). `base` answers without one"
    return [
        (["run", str(folder / "no"), "hi"], 3, "no such folder"),
        (["run", str(bare), "hi"], 3, "no weights"), (["chat", str(bare)], 3, "no weights"),
        (["run", str(bare), *prompts["one"]], 3, "no weights"), (["tune", str(bare)], 3, "no weights"),
        (["run", base, " "], 2, "PROMPT: is empty"),
        (["run", base, "hi", "--image", str(folder / "no.png")], 2, "no such file"),
        (["run", base, "hi", "--audio", str(folder / "no.wav")], 2, "no such file"),
        (["run", base, "hi", *both], 2, or_base), (["run", base, "hi", *style, "--use", "styel"], 2, "did you mean style?"),
        (["run", base, "hi", "--adapter", f"a={folder / 'no'}"], 3, "no such folder"),
        (["run", base, *prompts["one"], *both], 2, several),
        (["run", base, *prompts["one"], *style, "--use", "zz"], 2, "no adapter of this name"),
        (["run", base, *prompts["none"]], 2, "holds no prompt"),
        (["run", base, *prompts["text"]], 2, "no line can be answered; the first: line 1: is not JSON"),
        (["run", base, *prompts["image"]], 2, f"line 1: there is no image file {folder / 'no.png'}"),
        (["run", base, *prompts["keyed"]], 2, "line 1: max_tokens: unknown key (did you mean max_new_tokens?). Each line"),
        (["run", base, *prompts["named"], *style], 2, "line 1: no adapter of the name 'styel' is given (did you mean style?)"),
        (["run", base, *prompts["one"][:2], "--out", str(folder / "notes.txt")], 2, "was not written by trimtab run"),
        (["run", base, *prompts["one"][:2], "--out", str(folder)], 2, "--out"),
        (["chat", base, *both], 2, or_base), (["verify", base, *both], 2, several), (["bench", base, *both], 2, several),
        (["bench", base, "--against", "stok"], 2, "--against stok: unknown choice"),
        (["bench", base, "--runs", "0"], 2, "--runs 0: must be"),
        (["bench", base, "--prompts", str(folder / "none.jsonl")], 2, "none.jsonl"),
        (["verify", base, "--against", "stok"], 2, "did you mean stock?"),
        (["verify", base, "--against", "base"], 2, "needs an adapter"),
        (["verify", base, *style, "--against", "http://localhost:1/v1", "--deadline", "0"], 2, "--deadline 0: must be"),
        (["merge", base, str(folder / "merged"), "--adapter", f"a={folder / 'no'}"], 3, "no such folder"),
        (["inspect", str(STYLE), "--model", str(folder / "no")], 3, "no such folder"),
    ]  # fmt: skip


def test_a_mistake_that_needs_no_torch_is_told_before_it_is_imported(mistakes, tmp_path):
    environment = os.environ | {"XDG_CACHE_HOME": str(tmp_path)}  # where nothing is known of the demo's model
    done = subprocess.run(
        [sys.executable, "-c", CHILD], input=json.dumps([words for words, *_ in mistakes]), capture_output=True, text=True,
        env=environment, timeout=240, check=True,
    )  # fmt: skip
    for (words, code, text), (their_code, err) in zip(mistakes, json.loads(done.stdout), strict=True):
        assert their_code == code and text in err, (words, their_code, err)


def test_a_module_that_a_known_model_does_not_have_is_told_before_torch_is_imported(monkeypatch):
    """Another process read the model's modules, without the mistake."""

    def known(checkpoint, request, **_):
        return None if request.keep_unquantized else small_anatomy()

    monkeypatch.setattr("trimtab.machine.machine_cache.find_anatomy", known)
    monkeypatch.setattr(api.phases, "begin_imports", lambda: pytest.fail("imports torch"))
    wrong = LoadRequest(model=str(BASE), quant="none", keep_unquantized=("q_porj",))
    with pytest.raises(RequestError, match="names no linear module") as caught:
        api.anatomy_for(read_checkpoint(BASE), wrong, api.PlanInputs(), keeps_16bit=False)
    assert caught.value.value == ["q_porj"]


@pytest.mark.parametrize("words", [("inspect", STYLE, "--model", BASE), ("adapters", STYLE, "--model", BASE)])
def test_an_adapter_is_matched_with_a_known_model_before_torch_is_imported(ask, monkeypatch, words):
    asked = []

    def known(checkpoint, request, **_):
        asked.append((request.quant, request.dtype, request.head, request.experts))
        return small_anatomy()

    monkeypatch.setattr("trimtab.machine.machine_cache.find_anatomy", known)
    monkeypatch.setattr(api.phases, "begin_imports", lambda: pytest.fail("imports torch"))
    code, out, err = ask(*words)
    assert asked == [("none", "bfloat16", "full", "16bit")]  # what engine/loader/transformers_model.py::read_anatomy builds
    assert "problem" in out + err and code in (0, 5)  # the demo's adapter is of another model than this one


def test_a_benchmark_against_itself_is_refused_before_a_process_is_started(ask, monkeypatch):
    from trimtab.benchmark import bench

    machine = SimpleNamespace(execution_device="cpu")
    monkeypatch.setattr(bench, "find_machine", lambda device: (machine, None))
    monkeypatch.setattr(bench, "run_module", lambda *_, **__: pytest.fail("starts a process"))
    code, _, err = ask("bench", BASE, "--against", "eager")
    assert code == 2 and "--against eager: both sides would run the same steps" in err


def test_some_wrong_lines_are_told_first_and_counted(tmp_path):
    lines = ['{"prompt": "a", "adapter": "zz"}', '{"prompt": "b"}', "{", '{"prompt": "c", "adapter": "style"}']
    (tmp_path / "p.jsonl").write_text("\n".join(lines), encoding="utf-8")
    doubts = Doubts()
    for line in read_prompts(str(tmp_path / "p.jsonl")):
        doubts.add(line)
    for names, count, first in ((("style",), 2, "line 1: no adapter"), (("style", "zz"), 1, "line 3: is not"), ((), 3, "line 1")):
        wrong, error = doubts.with_adapters(names)
        assert wrong == count and str(error).startswith(first)
    assert Doubts().with_adapters(()) == (0, None)
