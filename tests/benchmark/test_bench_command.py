"""`trimtab bench`: one pair of processes on the demo model, and what its flags are refused for."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from tests.benchmark.test_bench_report import failing, world  # noqa: F401 - the fixture
from tests.machine.test_environment import read_only_environment
from tests.raised import refused
from trimtab.benchmark import bandwidth
from trimtab.benchmark import bench as benching
from trimtab.benchmark import prepare as prepare_inside
from trimtab.benchmark import stopwatch as clock
from trimtab.benchmark.bench import BenchRequest
from trimtab.cli import main as cli
from trimtab.cli.commands import bench as command
from trimtab.demo.demo import FOLDER as DEMO
from trimtab.errors import DeviceError, RequestError
from trimtab.verification.routes.runner import run_module

END = 16  # of the demo, beside 1
BASE, STYLE = str(DEMO / "base"), f"style={DEMO / 'adapters' / 'style'}"


def run(capsys, *arguments):
    return cli.main(["bench", *arguments]), capsys.readouterr()


@pytest.fixture
def no_files(monkeypatch):
    """Models, adapters and media that are not there: what is wrong with them is tried in test_late_checks."""
    for name in ("find_folder", "read_adapter", "check_media"):
        monkeypatch.setattr(command, name, lambda *arguments, **named: None)


def asked(*arguments):
    return command._request(cli.parser().parse_args(["bench", *arguments]))


@pytest.mark.slow
def test_the_demo_beside_stock(capsys, tmp_path, monkeypatch):
    monkeypatch.setattr(benching, "read_environment", read_only_environment)  # has a process of its own, and tests

    def in_this_process_but_ours(module, *given, isolated, **named):
        return run_module(module, *given, isolated=module == benching.OWN, **named)

    monkeypatch.setattr(benching, "run_module", in_this_process_but_ours)
    saved, drawn = tmp_path / "bench.json", tmp_path / "bench.svg"
    # The adapter's answer to this ends before that many tokens.
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"id": "short", "text": "Do you know the capital of Tessaly?"}\n', encoding="utf-8")
    code, said = run(
        capsys, BASE, "--adapter", STYLE, "--device", "cpu", "--runs", "1", "--new-tokens", "24", "--prompts", str(prompts),
        "--save", str(saved), "--picture", str(drawn), "--json",
    )  # fmt: skip
    assert code == 0
    found = json.loads(said.out)
    assert found == json.loads(saved.read_text("utf-8")) and drawn.read_text("utf-8").startswith("<svg")
    assert found["model"]["name"] == "base" and found["model"]["quant"] == "nf4-dq" and found["adapter"] == "style"
    (prompt,) = found["prompts"]
    assert (prompt["id"], prompt["has_media"]) == ("short", False) and 8 < prompt["prompt_tokens"] < 64
    assert [row["engine"] for row in found["rows"]] == ["trimtab", "stock"]
    for row in found["rows"]:
        (answer,) = row["answers"]
        assert len(answer["token_ids"]) == 24 and len(answer["gaps_ms"]) == 23 and min(answer["gaps_ms"]) > 0
        assert END in answer["token_ids"][:-1] and answer["cpu_ms"] > 0
        assert row["load_s"] > 0 and answer["first_ms"] > 0 and row["host_peak_bytes"] > 10**8
        assert row["figures"]["decode_tok_s"] == pytest.approx(23000 / sum(answer["gaps_ms"]))
    for engine in found["engines"].values():
        assert engine["failure"] is None and 0 < engine["limit_share"] < 1 and engine["limit"]["bound_by"] == "device"
        named = {read["what"] for read in engine["reads"]}
        assert named == {"decoder", "head", "rows", "adapter", "keys and values"}
    (same,) = found["same_tokens"]
    assert same["tokens"] == 24 and (same["equal"] or 0 <= same["first_difference"] < 24)
    assert found["ratios"]["decode_tok_s"]["runs"] == 1
    assert found["environment"]["packages"] and str(DEMO) not in saved.read_text("utf-8")


def test_ours_that_did_not_run_is_the_exit_code_and_the_table_still_comes(capsys, world, no_files):  # noqa: F811
    world.says = failing(DeviceError("out of memory", device="cuda:0"), "trimtab")
    code, said = run(capsys, "m", "--runs", "1")
    assert code == 6 and "failed    trimtab, in run 1: DeviceError" in said.out and "100 tok/s" in said.out
    code, said = run(capsys, "m", "--runs", "1", "--json")
    assert code == 6 and json.loads(said.out)["engines"]["trimtab"]["failure"]["class"] == "DeviceError"


def test_flags_become_the_request(tmp_path, no_files):
    prompts = tmp_path / "p.jsonl"
    prompts.write_text('{"id": "a", "text": "why"}\n', encoding="utf-8")
    found = asked(
        "m", "--adapter", "a=x", "--adapter", "b=y", "--use", "b", "--against", "eager", "--decode", "graph", "--runs", "5",
        "--new-tokens", "9", "--prompts", str(prompts), "--gpu-memory", "4GiB", "--quant", "nf4", "--place", "vision=host",
    )  # fmt: skip
    assert (found.adapter, found.against, found.decode, found.runs, found.new_tokens) == ("b", "eager", "graph", 5, 9)
    assert [prompt.id for prompt in found.prompts] == ["a"] and found.load.gpu_memory_bytes == 4 * 2**30
    assert found.load.quant == "nf4" and found.load.place == {"vision": "host"}
    media = asked("m", "--image", "a.png", "--image", "b.png", "--audio", "c.wav")
    assert (media.images, media.audios, media.adapter) == (("a.png", "b.png"), ("c.wav",), None)


def test_the_defaults_of_the_line_are_those_of_the_request(no_files):
    assert asked("m") == BenchRequest(load=asked("m").load)


@pytest.mark.parametrize(("arguments", "field"), [
    (["m", "--adapter", "a=x", "--adapter", "b=y"], "--use"), (["m", "--use", "a"], "--use"),
    (["m", "--save", "a.md"], "--save"), (["m", "--picture", "a.gif"], "--picture"), (["m", "--runs", "0"], "--runs"),
    (["m", "--image", "a.png", "--prompt-tokens", "4"], "--prompt-tokens"),
])  # fmt: skip
def test_what_cannot_be_meant_is_refused_by_its_flag(capsys, world, arguments, field):  # noqa: F811
    code, said = run(capsys, *arguments, "--json")
    assert code == 2 and json.loads(said.out)["error"]["fields"]["field"] == field and world.asked == []


def test_a_budget_beside_a_saved_plan_is_refused(tmp_path, no_files):
    from tests.planning.test_planner import plan

    plan().save(tmp_path / "plan.json")
    assert refused(asked, str(tmp_path / "plan.json"), "--gpu-memory", "4GiB").field == "--gpu-memory"
    assert asked(str(tmp_path / "plan.json")).load == plan()


# What both engines are given ------------------------------------------------------------------------------------------


def prepared(tmp_path, **more):
    from trimtab.request import LoadRequest

    request = {
        "plan": None, "request": LoadRequest(model=BASE, device="cpu").to_json(), "adapter": None, "prompts": [],
        "images": [], "audios": [], "prompt_tokens": None, "new_tokens": 4, "out": str(tmp_path),
    }  # fmt: skip
    lines, _ = run_module(benching.PREPARE, request | more, "planning", isolated=False)
    return lines[0]


def test_pictures_and_sounds_are_planned_for_and_become_one_prompt(tmp_path):
    picture, sound = (str(next((DEMO / name).iterdir())) for name in ("images", "sounds"))
    found = prepared(tmp_path, images=[picture, picture], audios=[sound])
    assert found["plan"]["request"]["images"] == 2 and found["plan"]["request"]["audio_s"] > 0
    (item,) = found["items"]
    assert item["has_media"] and found["context_tokens"] == item["prompt_tokens"] + 2


def test_prompts_of_a_file_are_taken_as_they_are_and_all_that_are_too_long_are_named(tmp_path):
    rows = [{"id": "a", "token_ids": [5, 6, 7]}, {"id": "b", "text": "why"}]
    found = prepared(tmp_path, prompts=rows)
    assert [item["id"] for item in found["items"]] == ["a", "b"] and found["items"][0]["prompt_tokens"] == 3
    with pytest.raises(RequestError, match=r"2 refused\n  - a: .*\n  - b: "):
        prepared(tmp_path, prompts=rows, new_tokens=4096)


def test_the_made_prompt_has_exactly_the_length_that_was_asked_with_or_without_a_tokenizer(tmp_path):
    from trimtab.engine.loader import processor as hf_processor

    asked = SimpleNamespace(
        processor_folder=Path(BASE), processor=hf_processor.load_processor(Path(BASE)),
        text_config=SimpleNamespace(vocab_size=1000),
    )  # fmt: skip
    for count in (1, 700):
        assert len(prepare_inside._tokens(asked, count)) == count
    asked.processor_folder = tmp_path
    drawn = prepare_inside._tokens(asked, 700)
    assert len(drawn) == 700 and drawn == prepare_inside._tokens(asked, 700) and set(drawn) <= set(range(8, 750))


def test_tokens_are_timed_from_the_question_on(monkeypatch):
    times, cpu = iter([10.0, 10.5, 10.75, 11.75]), iter([1.0, 1.5, 1.75])
    monkeypatch.setattr(clock, "time", SimpleNamespace(perf_counter=lambda: next(times), process_time=lambda: next(cpu)))
    found = clock.Clock()
    found.tick([1])
    found.tick([2, 3])
    assert found.told("a") == {"id": "a", "token_ids": [1, 2, 3], "first_ms": 500.0, "gaps_ms": [250.0, 1000.0], "cpu_ms": 750.0}


def test_bandwidth_is_the_bytes_copied_over_the_best_time(monkeypatch):
    monkeypatch.setattr(bandwidth, "HOST_SAMPLE_BYTES", 2**16)
    monkeypatch.setattr(bandwidth, "_best_s", lambda run, device: 0.5)
    assert bandwidth.measure("cpu") == {"device_Bps": 2**18, "host_Bps": 2**18, "link_Bps": None}


def test_the_best_of_some_repeats_leaves_the_first_out(monkeypatch):
    times = iter([0.0, 0.001, *[moment for place in range(7) for moment in (place, place + 0.5 - place / 20)]])
    monkeypatch.setattr(bandwidth.time, "perf_counter", lambda: next(times))
    assert bandwidth._best_s(lambda: None, torch.device("cpu")) == pytest.approx(0.2)


@pytest.mark.parametrize("has_path", [True, False])
def test_stock_computes_as_bitsandbytes_itself_would_and_that_is_said(monkeypatch, has_path):
    from bitsandbytes import functional

    from trimtab.benchmark import run_stock as stock_inside

    monkeypatch.setattr(functional, "has_avx512bf16", lambda: has_path)
    model = torch.nn.Sequential(torch.nn.Linear(1, 1), torch.nn.Linear(1, 1))
    model[0].support_avx512bf16_for_cpu = not has_path
    notes = stock_inside.with_own_cpu_path(model)
    assert model[0].support_avx512bf16_for_cpu is has_path and not hasattr(model[1], "support_avx512bf16_for_cpu")
    assert bool(notes) is has_path and all("2078" in note for note in notes)
