"""The command line: flags reach the request unchanged, errors keep their exit codes, answers go out as they come."""

import json
import math
import os
import shutil
import signal
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from types import SimpleNamespace

import pytest
import torch

import trimtab
from tests.raised import raised, refused
from trimtab import errors
from trimtab.cli import main
from trimtab.cli.commands import plan_run
from trimtab.cli.commands.plan_run import adapter_document
from trimtab.cli.flags import flags
from trimtab.demo import demo as line
from trimtab.engine.batch.generate import Generation, Piece
from trimtab.engine.model import LoadedModel
from trimtab.errors import AdapterError, CheckpointError, DeviceError, DoesNotFitError, ParityError, RequestError, UpstreamError
from trimtab.process import exit_codes
from trimtab.report.render import Lines
from trimtab.request import LoadRequest
from trimtab.verification.routes.compare import drawn_noise

STYLE = str(line.FOLDER / "adapters" / "style")
ERRORS = [
    (RequestError("why", field="f", value=1, allowed=("a",)), 2, {"reason": "why", "field": "f", "value": 1, "allowed": ["a"]}),
    (CheckpointError("why", path="p", tensor_name="t"), 3, {"path": "p", "tensor_name": "t"}),
    (
        DoesNotFitError("why", block="b", device="cuda:0", needed_bytes=2, budget_bytes=1), 4,
        {"reason": "why", "block": "b", "device": "cuda:0", "needed_bytes": 2, "budget_bytes": 1, "needs_both": False},
    ),
    (AdapterError(STYLE, ["one", "two"]), 5, {"path": STYLE, "problems": ["one", "two"]}),
    (
        DeviceError("why", device="cuda:0", block="b", planned_bytes=2, free_bytes=1), 6,
        {"device": "cuda:0", "block": "b", "planned_bytes": 2, "free_bytes": 1},
    ),
    (
        ParityError("why", position=3, max_abs=1.0, mean_abs=0.5, tolerance=0.1), 7,
        {"position": 3, "max_abs": 1.0, "mean_abs": 0.5, "tolerance": 0.1},
    ),
    (
        UpstreamError("why", package="peft", installed="0.1", fixed_in="0.2", url="u"), 8,
        {"package": "peft", "installed": "0.1", "fixed_in": "0.2", "url": "u"},
    ),
]  # fmt: skip


@pytest.fixture(scope="module")
def world():
    """Return the demo's folder: base/, adapters/, images/, sounds/."""
    return line.FOLDER


@pytest.fixture
def asks(world, capsys):
    """Run a command on the demo's base; return (exit code, stdout, stderr)."""

    def ask(name, *arguments, model=world / "base"):
        placement = ["--context", "128", "--device", "cpu"] if not str(model).endswith(".json") else []
        return (main.main([name, str(model), *placement, *map(str, arguments)]), *capsys.readouterr())

    return ask


def failing(error):
    def fail(*_):
        raise error

    return fail


# Starting -------------------------------------------------------------------------------------------------------------


def test_help_imports_neither_torch_nor_transformers():
    code = (
        "import sys; from trimtab.cli.main import main\n"
        "try: main(['--help'])\n"
        "except SystemExit as done: assert done.code == 0\n"
        "heavy = {'torch', 'transformers', 'numpy', 'rich', 'bitsandbytes'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
        # What is on the screen when torch begins to be imported.
        "import importlib.util, io, json\n"
        "class Torch(BaseException): pass\n"
        "class Terminal(io.StringIO): isatty = lambda self: True\n"
        "class Guard:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        return importlib.util.spec_from_loader(name, self) if name == 'torch' else None\n"
        "    def create_module(self, spec): raise Torch(sys.stderr.getvalue())\n"
        "    def exec_module(self, module): pass\n"
        "sys.meta_path.insert(0, Guard())\n"
        "sys.stderr = Terminal()\n"
        f"try: main(['run', {str(line.FOLDER / 'base')!r}, 'Hello', '--device', 'cpu'])\n"
        "except Torch as begun: print(json.dumps(begun.args[0].split('\\r')))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert all(f"\n    {name} " in done.stdout for name in ("plan", "inspect", "run", "demo"))
    shown = [text.strip() for text in json.loads(done.stdout.splitlines()[-1]) if text]
    assert shown[0] == "reading the model" and shown[-1] == "importing torch and transformers"


def test_the_version_is_the_packages(capsys):
    error = raised(SystemExit, main.main, ["--version"])
    assert (error.code, capsys.readouterr().out) == (0, f"trimtab {trimtab.__version__}\n")


# Usage and errors -----------------------------------------------------------------------------------------------------


def test_every_error_class_has_an_exit_code_of_its_own():
    kinds = {kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, errors.TrimtabError)}
    table = dict(exit_codes.EXIT_CODES)
    assert set(table) == kinds - {errors.TrimtabError} and len(set(table.values())) == len(table)
    assert {type(error): code for error, code, _ in ERRORS} == table


@pytest.mark.parametrize(("error", "code", "fields"), ERRORS)
def test_an_error_is_one_line_on_stderr_with_its_code_or_an_object_on_stdout(error, code, fields, monkeypatch, capsys):
    monkeypatch.setattr(plan_run, "run_inspect", failing(error))
    assert main.main(["inspect", "a"]) == code
    assert capsys.readouterr() == ("", f"trimtab: {error}\n")
    assert main.main(["inspect", "a", "--json"]) == code
    out, err = capsys.readouterr()
    found = {"class": type(error).__name__, "message": str(error), "fields": fields | {"hint": ""}}
    assert (json.loads(out), err) == ({"error": found}, "")


def test_a_bug_keeps_its_traceback(monkeypatch):
    monkeypatch.setattr(plan_run, "run_inspect", failing(ZeroDivisionError()))
    with pytest.raises(ZeroDivisionError):
        main.main(["inspect", "a"])


def test_a_reader_that_went_away_is_not_a_traceback(tmp_path, monkeypatch):
    with (tmp_path / "out").open("w") as out:
        monkeypatch.setattr(sys, "stdout", out)
        monkeypatch.setattr(plan_run, "run_inspect", failing(BrokenPipeError()))
        assert main.main(["inspect", "a"]) == main.READER_GONE


@pytest.mark.parametrize(("arguments", "code"), [
    (["plan", "{tmp}/missing"], 3), (["plan", "{base}", "--gpu-memory", "1MiB", "--device", "cpu"], 4),
    (["plan", "{base}", "--quant", "nf5"], 2), (["inspect", "{tmp}/missing"], 3), (["inspect", "{tmp}"], 3),
    (["plan", "{base}", "--adapter", "a={base}"], 3), (["plan", "{base}", "--adapter", "{tmp}/missing"], 3),
    (["run", "{base}", "hi", "--image", "{tmp}/missing.png"], 2),
])  # fmt: skip
def test_exit_codes_of_real_failures(arguments, code, world, tmp_path, capsys):
    assert main.main([text.format(tmp=tmp_path, base=world / "base") for text in arguments]) == code
    assert capsys.readouterr().err.startswith("trimtab: ")


# Flags ----------------------------------------------------------------------------------------------------------------


def request_of(*arguments, **counted):
    return flags.load_request(main.parser().parse_args(["plan", "m", *arguments]), **counted)


@pytest.mark.parametrize(("given", "field"), [([""], "PROMPT"), (["  "], "PROMPT"), (["Hello", "--top-k", "5"], "top_k")])
def test_an_empty_prompt_or_an_option_without_effect_is_refused_before_anything_is_read(given, field, capsys):
    assert main.main(["run", "/no/such/model", *given, "--json"]) == 2
    assert json.loads(capsys.readouterr().out)["error"]["fields"]["field"] == field


def test_a_checkpoint_without_a_tokenizer_is_refused_before_its_weights_are_read(asks, world, tmp_path, monkeypatch):
    folder = shutil.copytree(world / "base", tmp_path / "bare")
    (folder / "tokenizer.json").unlink()
    monkeypatch.setattr(trimtab, "load", failing(AssertionError("weights are read")))
    code, out, err = asks("run", "hi", model=folder)
    assert (code, out) == (3, "") and "tokenizer.json is missing" in err


def test_without_flags_the_request_has_its_own_defaults():
    assert request_of() == LoadRequest(model="m")


def test_every_flag_reaches_its_field(tmp_path):
    arguments = {
        "--adapter": ["a=one", "b=two=2"], "--gpu-memory": ["4GiB"], "--host-memory": ["500MB"], "--quant": ["int8"],
        "--dtype": ["float16"], "--context": ["77"], "--batch": ["3"], "--images": ["0"], "--audio-s": ["1.5"],
        "--place": ["*=resident", "a.b=stream"], "--keep-unquantized": ["x.*", "y"], "--device": ["cuda:1"],
        "--offload-dir": ["E:/spill"],
    }  # fmt: skip
    request = request_of(*[text for flag, values in arguments.items() for value in values for text in (flag, value)])
    assert request == LoadRequest(
        model="m", adapters={"a": "one", "b": "two=2"}, gpu_memory_bytes=4 * 2**30, host_memory_bytes=500_000_000,
        quant="int8", dtype="float16", context_tokens=77, batch=3, images=0, audio_s=1.5,
        place={"*": "resident", "a.b": "stream"}, keep_unquantized=("x.*", "y"), device="cuda:1", offload_dir="E:/spill",
    )  # fmt: skip
    assert list(request.place) == ["*", "a.b"]  # the last match wins: order is part of the question


def test_a_device_map_is_read_from_its_file(tmp_path):
    (tmp_path / "map.json").write_text('{"": 0, "model.vision_tower": "cpu"}')
    request = request_of("--device-map", str(tmp_path / "map.json"))
    assert request.device_map == {"": 0, "model.vision_tower": "cpu"}


def test_every_placement_field_of_a_request_has_a_flag():
    fields = set(LoadRequest.__dataclass_fields__) - {"model", "decode"}  # --decode may stand beside a saved plan
    assert set(flags.PLACEMENT.values()) == fields


@pytest.mark.parametrize(("arguments", "field"), [
    (["--adapter", "a=path:0.5"], "--adapter"), (["--adapter", "=path"], "--adapter"), (["--adapter", "a="], "--adapter"),
    (["--adapter", "a=x", "--adapter", "a=y"], "--adapter"), (["--adapter", "a b=x"], "--adapter"),
    (["--place", "vision"], "--place"), (["--place", "=stream"], "--place"),
    (["--place", "v=stream", "--place", "v=disk"], "--place"), (["--place", "v=strm"], "place['v']"),
    (["--gpu-memory", "4 apples"], "--gpu-memory"), (["--gpu-memory", "4"], "--gpu-memory"),
    (["--host-memory", "0"], "--host-memory"),
    (["--context", "0"], "context"), (["--device", "tpu"], "device"),
    (["--device-map", "missing.json"], "--device-map"),
])  # fmt: skip
def test_a_flag_that_cannot_be_followed_is_named(arguments, field):
    assert refused(request_of, *arguments).field == field


@pytest.mark.parametrize("text", ["{", '{"a": 0, "a": 1}', "[]", '"cpu"', '{"a": true}', '{"a": null}', '{"a": 1.5}'])
def test_a_file_that_holds_no_device_map_is_refused(text, tmp_path):
    (tmp_path / "map.json").write_text(text)
    error = refused(request_of, "--device-map", str(tmp_path / "map.json"))
    assert (error.field, error.value) == ("--device-map", str(tmp_path / "map.json"))


# plan -----------------------------------------------------------------------------------------------------------------


def test_plan_prints_the_table(asks):
    code, out, err = asks("plan", "--place", "*=resident")
    assert (code, err) == (0, "")
    verdict, request, _ = out.split("\n\n", 2)
    assert verdict.startswith("Fits: about ")
    assert request.startswith("Gemma4ForConditionalGeneration on cpu: nf4-dq, bfloat16, context 128")
    assert "requested: place *=resident" in out


def test_plan_json_is_the_saved_plan(asks, tmp_path):
    code, out, err = asks("plan", "--json", "--save", tmp_path / "plan.json", "--place", "table=gather")
    assert (code, err) == (0, "")
    plan = trimtab.Plan.from_json(json.loads(out))
    assert plan == trimtab.Plan.load(tmp_path / "plan.json")
    assert plan.tiers()["model.language_model.embed_tokens_per_layer"] == "gather" and plan.request.context_tokens == 128


def test_plan_draws_its_picture_and_says_where(asks, tmp_path):
    code, _, err = asks("plan", "--picture", tmp_path / "plan.svg")
    assert (code, err) == (0, f"written: {tmp_path / 'plan.svg'}\n")
    assert ElementTree.parse(tmp_path / "plan.svg").getroot().tag.endswith("svg")


def test_plan_refuses_a_picture_of_another_kind(asks, tmp_path):
    code, _, err = asks("plan", "--picture", tmp_path / "plan.gif")
    assert code == 2
    assert err.startswith(f"trimtab: --picture {tmp_path / 'plan.gif'}: ") and not (tmp_path / "plan.gif").exists()


def test_plan_follows_a_device_map(asks, tmp_path):
    (tmp_path / "map.json").write_text('{"": "cpu", "model.vision_tower": "disk"}')
    code, out, _ = asks("plan", "--json", "--device-map", tmp_path / "map.json")
    assert code == 0
    assert trimtab.Plan.from_json(json.loads(out)).tiers()["model.vision_tower.encoder.layers.0"] == "disk"


def test_plan_for_less_than_the_least_says_what_would_do(asks):
    code, out, _ = asks("plan", "--json", "--gpu-memory", "1MiB")
    fields = json.loads(out)["error"]["fields"]
    assert (code, fields["budget_bytes"]) == (4, 2**20)
    assert f"(--gpu-memory {-(-fields['needed_bytes'] // 2**20)}MiB)" in json.loads(out)["error"]["message"]
    code, out, _ = asks("plan", "--json", "--gpu-memory", f"{fields['needed_bytes']}B")
    assert code == 0
    assert json.loads(out)["gpu_budget_bytes"] == fields["needed_bytes"]


# inspect --------------------------------------------------------------------------------------------------------------


def test_inspect_counts_the_file_alone(world, capsys):
    assert main.main(["inspect", str(world / "adapters" / "specialist")]) == 0
    out = capsys.readouterr().out
    assert "holds     150 tensors, 2.2 MiB (150 in float32)" in out and "config    r 16, lora_alpha 32" in out
    assert [line.split() for line in out.splitlines()[-3:]] == [["audio", "12"], ["language", "96"], ["vision", "42"]]


def test_inspect_with_a_model_says_what_is_applied(world, capsys):
    assert main.main(["inspect", str(world / "adapters" / "specialist"), "--model", str(world / "base")]) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "applied to 75 modules: 27 linears inside a wrapper, 48 linears; 2.2 MiB on the device" in out
    assert "ranks 16 (75); scales 2 (75)" in out


def test_inspect_json_is_the_librarys_report(world, capsys):
    arguments = [str(world / "adapters" / "style"), "--model", str(world / "base")]
    assert main.main(["inspect", *arguments, "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == trimtab.inspect(arguments[0], model=arguments[2])


def test_inspect_lists_what_has_no_effect_and_where_keys_went():
    report = {
        "path": "p", "base_model": None, "peft_version": "0.19.1", "tensors": 9, "bytes": 2048, "dtypes": {"float32": 9},
        "parts": {"language": 9}, "config": {}, "target_modules": ["q_proj", "v_proj"],
        "targets": {"wrapped": 1, "linear": 0, "total": 1}, "ranks": {"8": 1}, "scales": {"2": 1}, "dora": 1,
        "lora_bias": 0, "bytes_attached": 1024, "notes": ["a note"],
        "dropped": [{"key": f"k{number}", "reason": "no such projection"} for number in range(7)],
        "remapped": [{"from": "a.q_proj", "to": "a.q_proj.linear"}],
    }  # fmt: skip
    text = Lines().show(adapter_document(report))
    assert "made for  not said, with peft 0.19.1" in text
    assert "no effect  7 tensors: no such projection\n           k0\n" in text
    assert "           and 2 more (--json has all)" in text
    assert "remapped   1 modules\n           a.q_proj -> a.q_proj.linear" in text
    assert "dora       on 1 modules" in text
    assert text.endswith("note       a note")
    assert "0 linears" not in text


# run ------------------------------------------------------------------------------------------------------------------


def adapters_of(world, *names):
    return [text for name in names for text in ("--adapter", f"{name}={world / 'adapters' / name}")]


def answer_of(out):
    return json.loads(out)["text"]


def test_run_streams_the_text_that_json_has_whole(asks, world):
    short = ["--max-new-tokens", 4, "What is the ruler of Lorienth?"]
    code, out, err = asks("run", *short)
    assert (code, err) == (0, "")
    code, whole, err = asks("run", "--json", *short)
    report = json.loads(whole)
    assert (code, err, out) == (0, "", report["text"] + "\n")
    assert (len(report["token_ids"]), report["finish_reason"], report["adapter"]) == (4, "length", None)
    assert set(report["memory"]) == {
        "gpu_bytes", "gpu_decode_bytes", "gpu_peak_bytes", "gpu_planned_bytes", "gpu_process_bytes",
        "gpu_process_is_estimate", "host_peak_bytes",
    }  # fmt: skip
    shares = {one["name"]: one for one in report["memory_shares"]}
    assert shares["weights"]["measured_bytes"] > 0 and shares["process"]["planned_bytes"] == report["memory"]["gpu_planned_bytes"]
    assert report["fallbacks"] == []
    assert report["planned"]["gpu_peak_bytes"] <= report["planned"]["gpu_budget_bytes"]


def test_run_prints_each_share_of_the_memory_when_asked(asks, world):
    code, _, err = asks("run", "--memory", "--max-new-tokens", 2, "Hello")
    lines = [line.split() for line in err.splitlines()]
    assert code == 0 and lines[0] == ["device", "memory", "planned", "measured"]
    assert [line[0] for line in lines[1:]] == [
        "weights", "unpacked", "adapters", "adapter", "kv", "staging", "activations", "process"
    ]  # fmt: skip


def test_run_answers_with_the_only_adapter_or_the_one_named(asks, world):
    text = {ask.adapter: ask for ask in line.read_asks(["style"]) if ask.kind == "text"}
    question = ["--json", "--max-new-tokens", 48, text[None].prompt]
    only = asks("run", *adapters_of(world, "style"), *question)[1]
    named = asks("run", *adapters_of(world, "specialist", "style"), "--use", "style", *question)[1]
    assert json.loads(only)["adapter"] == json.loads(named)["adapter"] == "style"
    assert answer_of(only) == answer_of(named) == text["style"].expected
    assert answer_of(asks("run", *question)[1]) == text[None].expected != text["style"].expected


@pytest.mark.parametrize(("names", "used", "key", "value"), [
    (["specialist", "style"], [], "allowed", ["specialist", "style", "base"]),
    (["specialist"], ["--use", "specialst"], "value", "specialst"),
], ids=["several", "one that was not given"])  # fmt: skip
def test_run_asks_which_adapter_is_meant(asks, world, names, used, key, value):
    code, out, _ = asks("run", "--json", *adapters_of(world, *names), *used, "Hello")
    fields = json.loads(out)["error"]["fields"]
    assert (code, fields["field"], fields[key]) == (2, "--use", value)


def test_run_counts_its_own_pictures_and_sounds(asks, world, monkeypatch):
    plans = []
    load = trimtab.load
    monkeypatch.setattr(trimtab, "load", lambda plan, **options: plans.append(plan) or load(plan, **options))
    media = ["--image", world / "images" / "image_1.png", "--audio", world / "sounds" / "audio_1.wav"]
    code, out, _ = asks("run", *media, "--json", "--max-new-tokens", 2, "What?")
    assert code == 0
    assert (plans[0].request.images, plans[0].request.audio_s) == (1, 1.0)
    # 64 soft tokens for the picture and 25 for the second of sound, beside the words.
    assert json.loads(out)["prompt_tokens"] > 64 + 25


def test_run_takes_a_saved_plan(asks, tmp_path, world):
    asks("plan", "--save", tmp_path / "plan.json", "--place", "*=stream", "--place", "table=gather")
    code, saved, _ = asks("run", "--json", "--max-new-tokens", 6, "Hello", model=tmp_path / "plan.json")
    assert code == 0
    assert answer_of(saved) == answer_of(asks("run", "--json", "--max-new-tokens", 6, "Hello")[1])


def test_a_placement_flag_on_a_saved_plan_has_no_effect_and_is_refused(asks, tmp_path):
    asks("plan", "--save", tmp_path / "plan.json")
    code, out, _ = asks("run", "--json", "--gpu-memory", "4GiB", "Hello", model=tmp_path / "plan.json")
    assert (code, json.loads(out)["error"]["fields"]["field"]) == (2, "--gpu-memory")


def test_sampling_flags_reach_the_request():
    given = {"max-new-tokens": 3, "temperature": 0.5, "top-k": 4, "top-p": 0.9, "min-p": 0.1, "repetition-penalty": 1.2, "seed": 7}
    typed = [word for name, value in given.items() for word in (f"--{name}", str(value))]
    options = main.parser().parse_args(["run", "m", "p", *typed, "--stop", "a", "--stop", "b"])
    assert flags.sampling_options(options) == {
        "max_new_tokens": 3, "temperature": 0.5, "top_k": 4, "top_p": 0.9, "min_p": 0.1, "repetition_penalty": 1.2,
        "seed": 7, "stop": ("a", "b"),
    }  # fmt: skip
    assert flags.sampling_options(main.parser().parse_args(["run", "m", "p"])) == {}


def test_stopped_while_answering_it_keeps_what_came_and_closes_the_model(asks, monkeypatch):
    closed = []

    def pieces(self):
        yield Piece("as far ", (1,))
        yield Piece("as this", (2,))
        raise KeyboardInterrupt

    monkeypatch.setattr(Generation, "__iter__", pieces)
    close = LoadedModel.close
    monkeypatch.setattr(LoadedModel, "close", lambda self: closed.append(self) or close(self))
    assert asks("run", "Hello") == (130, "as far as this\n", "trimtab: stopped\n")
    assert len(closed) == 1


@pytest.mark.slow  # in this process above; test_interrupts.py sees how processes end, test_chat_command.py an answer on a terminal
@pytest.mark.skipif(sys.platform == "win32", reason="sends a POSIX signal")
def test_ctrl_c_ends_a_running_process_with_its_answer_so_far(world):
    command = [
        sys.executable,
        "-m",
        "trimtab",
        "run",
        str(world / "base"),
        "--device",
        "cpu",
        "--max-new-tokens",
        "4000",
        "--temperature",  # any word is as likely as another: the answer goes on for seconds
        "100",
        "--seed",
        "7",
    ]
    environment = {**os.environ, "PYTHONUNBUFFERED": "1"}
    process = subprocess.Popen(
        [*command, "Hello"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment, start_new_session=True,
        # A shell starts what runs in its background with this signal ignored, and every child of it inherits that.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )  # fmt: skip
    first = process.stdout.read(1)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert (process.returncode, err.decode().splitlines()[-1:]) == (130, ["trimtab: stopped"])
    assert (first + out).endswith(b"\n")


# demo -----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("every", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_the_demo_walks_the_line_answers_rightly_and_proves_it(every, monkeypatch):
    said, asks = [], line.read_asks(line.ADAPTERS)
    pairs = [(ask.kind, ask.adapter) for ask in asks]
    assert sorted(map(str, pairs)) == sorted(
        str((kind, one)) for kind in ("text", "image", "audio") for one in (None, *line.ADAPTERS)
    )
    if not every:  # each kind and each adapter at least once
        asks = [asks[5 * place % 12] for place in range(4)]
        assert len({ask.kind for ask in asks}) == 3 and len({ask.adapter for ask in asks}) == 4
        monkeypatch.setattr(line, "read_asks", lambda adapters: asks)
    report = line.run(said.append)
    text = "\n".join(said)
    assert report["same"] is True and report["verdict"] == "same" and report["max_abs"] == 0.0
    assert {"gather", "stream"} <= set(report["tiers"]) and report["split_peak_bytes"] < report["resident_peak_bytes"]
    assert [(row["kind"], row["adapter"]) for row in report["answers"]] == [(ask.kind, ask.adapter) for ask in asks]
    # These questions are answered rightly in bf16 (CARD.md); in NF4 a letter may change, an answer in another voice not.
    right = [row for row in report["answers"] if row["text"] == row["expected"]]
    assert len(right) >= len(asks) - (2 if every else 0)
    assert ElementTree.parse(report["picture"]).getroot().tag.endswith("svg")
    assert "Gemma4ForConditionalGeneration on" in text
    assert said[-3] == "   same" and said[-2].partition(": ")[2] in {row["prompt"] for row in right}
    assert said[-1].splitlines()[1:] == [f"    {command}" for command in line.NEXT]


def test_a_wrong_answer_of_the_demo_is_shown_with_the_right_one():
    class Model:
        def answer(self, prompt, **options):
            return SimpleNamespace(text="two", tokens_per_s=1.0)

    said = []
    line._answer(Model(), line.Ask("text", "How many?", {}, None, "three"), said.append)
    assert said == ["   text   base         How many? -> two   (expected: three)"]


def demo_that_is_off(monkeypatch, apart):
    """Let the demo's last answer differ by a constant, beside noise of about 0.1 in each logit."""
    first = torch.randn(2, 9, generator=torch.Generator().manual_seed(0))
    routes = iter([[first] * 12, [first] * 11 + [first + torch.linspace(0, apart, 9)]])
    monkeypatch.setattr(line, "_answers", lambda *_: ([], next(routes), {}))
    monkeypatch.setattr(line, "_split_plan", lambda whole, *_: whole)
    near = [first + 0.1 * torch.randn(2, 9, generator=torch.Generator().manual_seed(seed)) for seed in range(1, 9)]
    draws = {f"draw {place}": logits for place, logits in enumerate(near)}
    monkeypatch.setattr(line, "_noise", lambda plan, asks: drawn_noise("11", "once", first, draws))


def test_a_demo_that_differs_ends_with_the_parity_code(monkeypatch, capsys):
    demo_that_is_off(monkeypatch, 25.0)
    assert main.main(["demo", "--json"]) == 7
    error = json.loads(capsys.readouterr().out)["error"]
    assert (error["class"], error["fields"]["position"]) == ("ParityError", 0)
    assert error["fields"]["max_abs"] == pytest.approx(25.0) and 0.2 < error["fields"]["tolerance"] < 25


def test_a_demo_whose_last_bits_differ_is_the_same_within_noise(monkeypatch, capsys):
    demo_that_is_off(monkeypatch, 0.25)
    assert main.main(["demo", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert (report["same"], report["verdict"], report["max_abs"]) == (False, "same within noise", 0.25)
    assert report["noise"]["false_alarm_rate"] == 1e-4 and report["noise"]["draws"] == 8


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_compare_is_zero_only_for_the_same_bits(dtype):
    one = torch.tensor([1.0, -2.0, 3.0], dtype=dtype)
    assert line.compare([one], [one.clone()]) == 0.0 and line.compare([one, one], [one, one + 1]) == 1.0
    other = one.clone()
    other[0] = float("nan")
    assert line.compare([one], [other]) == line.compare([other], [other]) == math.inf


@pytest.mark.parametrize("command", ["plan", "run", "verify", "bench", "serve", "merge", "doctor"])
def test_every_command_reads_an_adapter_the_same_way(command, capsys):
    rest = {"run": ["hi"], "merge": ["out"]}.get(command, [])
    for text, words in (("x (2)", "Add a name: NAME=x (2)"), ("=x", "NAME=PATH"), ("a=law:nan", "finite")):
        assert main.main([command, "no/model", *rest, "--adapter", text]) == 2
        err = capsys.readouterr().err
        assert words in err and "--adapter" in err
    if command not in ("merge", "run", "serve"):  # which read the weight: the model is missing there
        assert main.main([command, "no/model", *rest, "--adapter", "a=law:0.5"]) == 2
        assert "the weight 0.5 has no effect here" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["plan", "run", "verify", "bench", "merge"])
def test_every_command_reads_sizes_and_types_the_same_way(command, capsys):
    rest = {"run": ["hi"], "merge": ["out", "--check", "--adapter", "b=y"]}.get(command, [])
    assert main.main([command, "no/model", *rest, "--gpu-memory", "4"]) == 2
    err = capsys.readouterr().err
    assert err.startswith("trimtab: --gpu-memory 4: needs a unit") and "Did you mean 4GiB?" in err
    assert main.main([command, "no/model", *rest, "--dtype", "bf17"]) == 2
    assert capsys.readouterr().err.startswith("trimtab: --dtype bf17: unknown choice")
    assert main.main([command, "no/model", *rest, "--dtype", "bf16", "--adapter", "a=x"]) == 3


@pytest.mark.parametrize("command", ["run", "bench", "verify", "serve"])
def test_every_command_that_loads_takes_a_budget_or_a_plan(command, tmp_path, capsys):
    (tmp_path / "plan.json").write_text("{}", encoding="utf-8")
    rest = ["hi"] if command == "run" else []
    for flag, value in (("--gpu-memory", "4G"), ("--host-memory", "4G"), ("--device", "cpu"), ("--dtype", "fp16")):
        assert main.main([command, str(tmp_path / "plan.json"), *rest, flag, value]) == 2
        assert f"{flag}: has no effect on a saved plan" in capsys.readouterr().err


@pytest.mark.parametrize(("arguments", "field"), [
    (["plan", "{base}", "--picture", "x.pdf"], "picture"), (["bench", "{base}", "--picture", "x.pdf"], "--picture"),
    (["plan", "{base}", "--adapter", "no/such"], None), (["merge", "{base}", "no/such/out", "--adapter", "{style}"], "out"),
])  # fmt: skip
def test_what_can_be_known_beforehand_is_found_before_anything_is_read(arguments, field, world, monkeypatch, capsys):
    from trimtab.doctor.probes import runner
    from trimtab.engine.loader import transformers_model

    for owner, name in ((transformers_model, "probe"), (runner, "run_probes")):
        monkeypatch.setattr(owner, name, failing(AssertionError("the work has begun")))
    filled = [text.format(base=world / "base", style=world / "adapters" / "style") for text in arguments]
    assert main.main([*filled, "--json"]) == (2 if field else 3)
    assert json.loads(capsys.readouterr().out)["error"]["fields"].get("field") == field


def test_five_mismatches_are_shown_with_their_count_and_all_with_json(world, monkeypatch, capsys):
    error = AdapterError(str(world / "adapters" / "style"), [f"problem {number}" for number in range(96)])
    monkeypatch.setattr(plan_run, "run_inspect", failing(error))
    assert main.main(["inspect", "a"]) == 5
    err = capsys.readouterr().err
    assert err.count("  - problem") == 5 and "and 91 more (--json has all)" in err and "96 problems" in err
    assert main.main(["inspect", "a", "--json"]) == 5
    assert len(json.loads(capsys.readouterr().out)["error"]["fields"]["problems"]) == 96


def test_a_word_that_is_not_utf8_is_one_line(capsys):
    assert main.main(["run", "model", "caf\udce9"]) == 2
    assert capsys.readouterr().err == "trimtab: command line='caf\\\\udce9': is not UTF-8 text\n"


@pytest.mark.parametrize(
    ("arguments", "chosen"),
    [
        (["chat", "MODEL"], "auto"), (["run", "MODEL", "Hello"], "auto"),
        (["run", "MODEL", "--prompts", "PROMPTS", "--out", "OUT"], "auto"), (["models", "FOLDER"], "auto"),
        (["tune", "MODEL"], "auto"), (["plan", "MODEL"], "auto"), (["serve", "MODEL"], "auto"),
        (["verify", "MODEL", "--adapter", "ADAPTER"], None), (["bench", "MODEL"], None),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else None,
)  # fmt: skip
def test_the_plan_chooses_head_and_dtype_where_the_help_says_so(arguments, chosen, tmp_path, monkeypatch, capsys):
    paths = {
        "MODEL": line.FOLDER / "base", "ADAPTER": line.FOLDER / "adapters" / "style", "FOLDER": line.FOLDER,
        "OUT": tmp_path / "out.jsonl", "PROMPTS": tmp_path / "prompts.jsonl",
    }  # fmt: skip
    paths["PROMPTS"].write_text('{"prompt": "Hello"}\n')
    asked = []

    def request(**values):
        asked.append((values.get("head"), values.get("dtype")))
        raise RequestError("looked at", field="model")

    monkeypatch.setattr(flags, "LoadRequest", request)
    assert main.main([str(paths.get(argument, argument)) for argument in arguments]) == 2
    assert asked == [(chosen, chosen)]
    with pytest.raises(SystemExit):
        main.main([arguments[0], "--help"])
    shown = " ".join(capsys.readouterr().out.split())
    assert ("bfloat16; the plan decides on GPUs without it" in shown) == (chosen == "auto")
    if "--head FORM" in shown:
        assert ("(default: auto, 8 bits if" in shown) == (chosen == "auto") == ("(default: full)" not in shown)
