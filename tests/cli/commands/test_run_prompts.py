"""Where `trimtab run` takes its prompts from: the command line, standard input, files."""

import io
import json
import shutil
import subprocess
import sys
from contextlib import ExitStack, contextmanager

import pytest

import trimtab
from tests import waiting
from trimtab import demo
from trimtab.cli import main
from trimtab.cli.commands import plan_run, prompts_file, run_prompts
from trimtab.cli.flags.opening import opened

BASE = str(demo.BASE)
# Weights that are not packed load sooner, and nothing here depends on the format.
PLACED = ["--device", "cpu", "--context", "256", "--quant", "none"]


@pytest.fixture(scope="module", autouse=True)
def one_model_a_request():
    """Most commands of this file load the same few models: each is loaded once, by the first command that asks for it."""
    models = {}
    with ExitStack() as held, pytest.MonkeyPatch.context() as patch:

        @contextmanager
        def kept(plan, decode, **options):
            key = repr((plan.request, decode, options))
            if key not in models:
                models[key] = held.enter_context(opened(plan, decode, **options))
            yield models[key]

        for command in (plan_run, run_prompts):
            patch.setattr(command, "opened", kept)
        yield


def test_a_prompt_from_standard_input_or_a_file_is_the_one_from_the_command_line(tmp_path, capsys, monkeypatch):
    (tmp_path / "prompt.txt").write_text("\ufeffWho are you?\n", encoding="utf-8")
    (tmp_path / "system.txt").write_text("Speak.\n")
    options = ["--max-new-tokens", 8]

    def run(*arguments):
        return main.main(["run", BASE, *PLACED, *map(str, arguments)]), *capsys.readouterr()

    expected = run("Who are you?", "--system", "Speak.", *options)
    assert expected[0] == 0 and expected[1].strip()
    files = ["--system-file", tmp_path / "system.txt", *options]
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"Who are you?\n")))
    assert run("-", *files) == expected and run("--prompt-file", tmp_path / "prompt.txt", *files) == expected


@pytest.mark.parametrize(("arguments", "words"), [
    (["Hello", "--prompt-file", "x"], "--prompt-file"), (["--prompt-file", "no/such"], "cannot be read"),
    (["--prompt-file", "{bad}"], "not UTF-8"), (["a", "--system", "b", "--system-file", "x"], "--system-file"),
    (["--prompt-file", "{empty}"], "PROMPT: is empty"), ([], "PROMPT; - reads standard input, --prompt-file"),
])  # fmt: skip
def test_a_wrong_source_is_refused_before_anything_is_loaded(arguments, words, tmp_path, capsys):
    (tmp_path / "bad").write_bytes(b"ab\xff")
    (tmp_path / "empty").write_bytes(b"\n")
    given = [text.format(bad=tmp_path / "bad", empty=tmp_path / "empty") for text in arguments]
    assert main.main(["run", BASE, *PLACED, *given]) == 2
    assert words in capsys.readouterr().err


def test_an_answer_that_ends_at_once_says_so(tmp_path, capsys, monkeypatch):
    from trimtab.engine.batch import generate

    monkeypatch.setattr(generate, "end_token_ids", lambda model: tuple(range(512)))
    assert main.main(["run", BASE, *PLACED, "Who are you?", "--max-new-tokens", "8"]) == 0
    out, err = capsys.readouterr()
    assert out.strip() == "" and "the answer is empty: the model ended it immediately" in err


def test_an_answer_that_a_stop_text_ends_at_once_does_not_blame_the_model(capsys):
    assert main.main(["run", BASE, *PLACED, "Hello", "--max-new-tokens", "8"]) == 0
    first = capsys.readouterr().out[0]
    assert main.main(["run", BASE, *PLACED, "Hello", "--max-new-tokens", "8", "--stop", first]) == 0
    out, err = capsys.readouterr()
    assert out.strip() == "" and "the answer is empty: it ended immediately, by a stop text or by the model" in err


def test_an_answer_fits_the_context_where_no_length_is_given(capsys):
    long = "Hello, who are you? " * 8
    assert main.main(["run", BASE, "--device", "cpu", "--context", "128", long, "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert 0 < answer["max_new_tokens"] == 128 - answer["prompt_tokens"] < 128
    assert main.main(["run", BASE, "--device", "cpu", "--context", "128", long, "--max-new-tokens", "128"]) == 2
    assert "together more than the context of 128" in capsys.readouterr().err


def test_an_answer_that_fills_the_context_says_so():
    from trimtab.cli.flags.opening import end_text
    from trimtab.engine.batch.generate import Answer

    def note(prompt_tokens, finish="length", text="words"):
        answer = Answer(text, (1, 2, 3), finish, prompt_tokens, 0.0, 0.0, 0.0, max_new_tokens=3)
        return end_text(answer, 16, has_stop_texts=False)

    assert note(13) == "the answer was cut after 3 tokens: the context of 16 is full; --context sets it"
    assert note(5) == "the answer was cut after 3 tokens: --max-new-tokens sets the limit"
    assert note(13, finish="stop") is None and note(5, text=" ") == "the answer has no text: 3 tokens, ended by 'length'"


# A file of prompts ----------------------------------------------------------------------------------------------------

ADAPTERS = ["--adapter", f"style={demo.ADAPTERS['style']}", "--adapter", f"specialist={demo.ADAPTERS['specialist']}"]


def many(prompts, out, *arguments):
    given = ["run", BASE, *PLACED, *ADAPTERS, "--use", "style", "--prompts", prompts, "--out", out, "--max-new-tokens", "6"]
    return main.main([str(part) for part in (*given, *arguments)])


@pytest.fixture
def prompts(tmp_path):
    shutil.copy(demo.IMAGES[0], tmp_path / "one.png")
    lines = [
        {"id": "a", "prompt": "Who are you?"}, {"prompt": "What is shown?", "image": "one.png", "adapter": "specialist"},
        {"messages": [{"role": "user", "content": "Hello"}], "max_new_tokens": 2, "answers": {}}, {"prompt": 3, "x": 1},
        {"prompt": "Hi", "adapter": {"style": 0.5, "specialist": 0.5}},
    ]  # fmt: skip
    path = tmp_path / "prompts.jsonl"
    path.write_text("\n".join([json.dumps(line) for line in lines] + ["", "no json", ""]))
    return path


def read(out):
    header, *rows = [json.loads(line) for line in out.read_text().splitlines()]
    return header, {row["line"]: row for row in rows}


def test_a_file_of_prompts_is_answered_and_a_stopped_run_goes_on(prompts, tmp_path, capsys, monkeypatch):
    out = tmp_path / "out.jsonl"
    assert many(prompts, out, "--rows", 2) == 2  # two lines are wrong
    shown = capsys.readouterr().err
    header, rows = read(out)
    assert "4 answered, 2 failed" in shown and f"; the first: {rows[4]['error']['message']}" in shown
    assert header["adapters"].keys() == {"style", "specialist"} and header["options"]["adapter"] == "style"
    assert sorted(rows) == [1, 2, 3, 4, 5, 7] and rows[1]["id"] == "a"
    assert {number for number, row in rows.items() if "error" in row} == {4, 7} and rows[3]["answer_tokens"] <= 2
    plan = trimtab.plan(
        BASE, adapters={name: demo.ADAPTERS[name] for name in ("style", "specialist")}, context=256, device="cpu", quant="none"
    )
    with trimtab.load(plan) as model:
        assert rows[1]["text"] == model.answer("Who are you?", adapter="style", max_new_tokens=6).text
        expected = model.answer("What is shown?", image=prompts.parent / "one.png", adapter="specialist", max_new_tokens=6)
        assert rows[2]["text"] == expected.text
    with monkeypatch.context() as patch:
        patch.setattr(run_prompts, "opened", None)  # wrong lines alone load no model
        assert many(prompts, out, "--rows", 2, "--json") == 2
    told = json.loads(capsys.readouterr().out)
    assert told.pop("first_error") == {"line": 4, "message": rows[4]["error"]["message"]}
    assert told == {"prompts": 6, "answered_before": 4, "answered": 0, "errors": 2, "out": str(out)}
    assert read(out) == (header, rows) and out.read_bytes().count(b"\n") == 7
    whole = out.read_bytes()
    kept = whole.split(b"\n")
    out.write_bytes(b"\n".join(kept[:3]) + b'\n{"line": 4, "promp')  # as a kill leaves it
    many(prompts, out)
    assert out.read_bytes().count(b"\n") == 7  # what was answered is not answered again
    again = read(out)
    assert again[0] == header and {n: row.get("text") for n, row in again[1].items()} == {
        n: row.get("text") for n, row in rows.items()
    }


def test_a_wrong_line_can_be_corrected_and_an_answered_one_not(prompts, tmp_path, capsys):
    out = tmp_path / "out.jsonl"
    prompts.write_text('{"prompt": "Hi"}\n{"prompt" "Hello"}\n{"prompt": "Hi", "adapter": "none-such"}\n')
    assert many(prompts, out) == 2
    out.chmod(0o640)
    first = read(out)[1]
    assert {number for number, row in first.items() if "error" in row} == {2, 3}
    prompts.write_text('{"prompt": "Hi"}\n{"prompt": "Hello"}\n{"prompt": "Hi", "adapter": "specialist"}\n')
    assert many(prompts, out) == 0
    assert "2 answered, 1 were answered before" in capsys.readouterr().err
    rows = read(out)[1]
    assert rows[1] == first[1] and "text" in rows[2] and "text" in rows[3] and out.read_bytes().count(b"\n") == 4
    assert sys.platform == "win32" or out.stat().st_mode & 0o777 == 0o640
    assert sorted(path.name for path in tmp_path.iterdir()) == ["one.png", "out.jsonl", "prompts.jsonl"]


def test_null_and_base_are_the_base_and_lines_may_name_every_adapter(tmp_path, capsys):
    prompts, out = tmp_path / "p.jsonl", tmp_path / "out.jsonl"
    named = [{"prompt": "Who are you?", "adapter": name} for name in (None, "style")]
    prompts.write_text("".join(json.dumps(line) + "\n" for line in named))
    given = ["run", BASE, *PLACED, *ADAPTERS, "--max-new-tokens", "8", "--json"]
    files = ["--prompts", str(prompts), "--out", str(out)]
    assert main.main([*given, *files]) == 0  # each line names its adapter: no --use is needed
    texts = [row["text"] for _, row in sorted(read(out)[1].items())]
    capsys.readouterr()
    assert main.main([*given, "Who are you?", "--use", "base"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert (answer["adapter"], answer["text"]) == (None, texts[0]) and texts[0] != texts[1]
    prompts.write_text('{"prompt": "Who are you?"}\n')
    assert main.main([*given, *files]) == 2
    error = json.loads(capsys.readouterr().out)["error"]["fields"]
    assert (error["field"], error["allowed"]) == ("--use", ["style", "specialist", "base"])


def test_a_file_of_answers_that_was_replaced_is_in_use(tmp_path, monkeypatch):
    path = tmp_path / "out.jsonl"

    def replaced(handle):
        path.rename(tmp_path / "old")
        path.touch()

    monkeypatch.setattr(prompts_file, "lock", replaced)
    with pytest.raises(trimtab.RequestError, match="another process is writing it"):
        prompts_file.AnswersFile(str(path), {}).open()


@pytest.mark.parametrize("text", ["notes", '{"prompt": "a"}\n', '{"prompt": "a"}', "\n"])
def test_a_file_that_is_no_output_of_a_run_is_refused_and_kept(tmp_path, text):
    path = tmp_path / "out.jsonl"
    path.write_text(text)
    with pytest.raises(trimtab.RequestError, match="line 1 was not written by trimtab run"):
        prompts_file.AnswersFile(str(path), {}).open()
    assert path.read_text() == text


def test_a_killed_run_leaves_whole_lines_and_goes_on(tmp_path):
    path, out = tmp_path / "prompts.jsonl", tmp_path / "out.jsonl"
    path.write_text("".join(json.dumps({"prompt": f"Count {n}", "temperature": 50.0, "seed": n}) + "\n" for n in range(20)))
    command = [sys.executable, "-m", "trimtab", "run", BASE, *PLACED, "--prompts", str(path), "--out", str(out),
               "--max-new-tokens", "20"]  # fmt: skip
    process = subprocess.Popen(command, stderr=subprocess.PIPE)
    waiting.until(lambda: out.exists() and out.read_bytes().count(b"\n") >= 4, 240)
    process.kill()
    process.communicate()
    before = read(out)[1]
    assert 3 <= len(before) < 20
    assert main.main(command[3:]) == 0
    after = read(out)[1]
    assert sorted(after) == list(range(1, 21)) and all(after[number] == row for number, row in before.items())


def test_what_would_mix_two_runs_is_refused(prompts, tmp_path, capsys):
    out = tmp_path / "out.jsonl"
    prompts.write_text('{"prompt": "Hi"}\n')
    assert many(prompts, out) == 0
    whole = out.read_bytes()
    for arguments in (["--temperature", "0.5"], ["--use", "specialist"], ["--context", "200"], ["--use", "style:0.5"]):
        assert many(prompts, out, *arguments) == 2
        assert "answers of another run" in capsys.readouterr().err
    prompts.write_text('{"prompt": "Ho"}\n')
    assert many(prompts, out) == 2
    assert "line 1 of the prompts has changed" in capsys.readouterr().err
    (tmp_path / "notes.txt").write_text("my notes\n")
    assert many(prompts, tmp_path / "notes.txt") == 2
    assert out.read_bytes() == whole and (tmp_path / "notes.txt").read_text() == "my notes\n"


@pytest.mark.parametrize(("line", "words"), [
    ("[]", "not a JSON object"), ('{"prompt": "a", "messages": []}', "either"), ('{"text": "a"}', "unknown key"),
    ("{", "not JSON"),
    ('{"prompt": "a", "image": 3}', "a file or a list"), ("[" * 100_000, "not JSON"), ('{"id": 1}', "either"),
])  # fmt: skip
def test_a_wrong_line_holds_its_error(line, words, tmp_path):
    (tmp_path / "p.jsonl").write_text(line)
    (one,) = prompts_file.read_prompts(str(tmp_path / "p.jsonl"))
    assert words in str(one.request) and one.number == 1


def test_the_token_ids_of_a_bias_are_texts_in_json(tmp_path):
    (tmp_path / "p.jsonl").write_text('{"prompt": "a", "logit_bias": {"60": 50, "060": 1, "x": 2}}')
    (one,) = prompts_file.read_prompts(str(tmp_path / "p.jsonl"))
    assert one.request["logit_bias"] == {60: 50, "060": 1, "x": 2}  # the last two are refused with the line's options


def test_limits_of_a_file_of_prompts(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(prompts_file, "MOST_LINES", 3)
    monkeypatch.setattr(prompts_file, "LONGEST_LINE_BYTES", 40)
    for text in ('{"prompt": "a"}\n' * 4, '{"prompt": "' + "a" * 60 + '"}', "", "\n"):
        (tmp_path / "p.jsonl").write_text(text)
        assert many(tmp_path / "p.jsonl", tmp_path / "out.jsonl") == 2 and not (tmp_path / "out.jsonl").exists()
    for arguments in (["x"], ["--image", "x.png"]):
        assert many(tmp_path / "p.jsonl", tmp_path / "out.jsonl", *arguments) == 2
    assert main.main(["run", BASE, "x", "--out", "y"]) == 2
    assert main.main(["run", BASE, "--prompts", str(tmp_path / "p.jsonl")]) == 2
    assert "Traceback" not in capsys.readouterr().err


def test_a_weight_that_a_mix_overrides_is_refused(capsys):
    adapter = f"style={demo.ADAPTERS['style']}:0.7"
    assert main.main(["run", BASE, *PLACED, "--adapter", adapter, "--use", "style:0.3", "Hello"]) == 2
    assert "--use style:0.3: the weight of style in --adapter has no effect" in capsys.readouterr().err


# Weights --------------------------------------------------------------------------------------------------------------


def test_weights_of_the_command_line_are_those_of_the_call(capsys):
    style, specialist = demo.ADAPTERS["style"], demo.ADAPTERS["specialist"]
    options = ["--max-new-tokens", "8", "Who are you?", "--json"]
    assert (
        main.main(["run", BASE, *PLACED, "--adapter", f"style={style}:0.7", "--adapter", f"specialist={specialist}:0.3", *options])
        == 0
    )
    first = json.loads(capsys.readouterr().out)
    assert first["adapter"] == {"style": 0.7, "specialist": 0.3}
    assert main.main(["run", BASE, *PLACED, *ADAPTERS, "--use", "style:0.7+specialist:0.3", *options]) == 0
    assert json.loads(capsys.readouterr().out)["text"] == first["text"]
    assert main.main(["run", BASE, *PLACED, "--adapter", f"style={style}:0.5", *options]) == 0
    assert json.loads(capsys.readouterr().out)["adapter"] == {"style": 0.5}
    for wrong in (["--use", "style:x"], ["--use", "style+none"], ["--use", "style+style"]):
        assert main.main(["run", BASE, *PLACED, *ADAPTERS, *wrong, *options]) == 2
        capsys.readouterr()
