"""The commands that list: models with what fits, adapters with the models that they fit, completion, versions, colour."""

import io
import json
import os
import shutil
import sys
from contextlib import nullcontext

import pytest

import trimtab
from tests import pico, quantized_files
from trimtab import demo
from trimtab.cli import main
from trimtab.cli.chat import chat
from trimtab.planning.values.execution import how_computed
from trimtab.process import exit_codes

STYLE = str(demo.ADAPTERS["style"])


@pytest.fixture(scope="module")
def model():
    with trimtab.load(trimtab.plan(demo.BASE, adapters={"style": STYLE}, context=256, device="cpu")) as loaded:
        yield loaded


@pytest.fixture
def models(tmp_path):
    pico.build("llama", tmp_path / "llama")
    pico.build("gemma3", tmp_path / "deep" / "gemma")
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "config.json").write_text("{")
    pico.adapter(tmp_path / "llama", tmp_path / "adapters" / "one", targets="all")
    shutil.copytree(demo.ADAPTERS["style"], tmp_path / "adapters" / "group" / "two")
    (tmp_path / "adapters" / "bad").mkdir()
    (tmp_path / "adapters" / "bad" / "adapter_config.json").write_text("{}")
    return tmp_path


def test_models_are_listed_with_what_fits(models, capsys):
    assert main.main(["models", str(models), "--json"]) == 0
    found = {os.path.basename(one["model"]): one for one in json.loads(capsys.readouterr().out)["models"]}
    assert set(found) == {"llama", "gemma", "broken"}
    assert found["llama"]["class"] == "LlamaForCausalLM" and found["llama"]["fits"]
    plan = trimtab.plan(models / "llama", head="auto")
    assert found["llama"]["gpu_bytes"] == plan.gpu_peak_bytes and sum(found["llama"]["tiers"].values()) == len(plan.tiers())
    assert not found["broken"]["fits"] and "config.json" in found["broken"]["reason"]
    assert main.main(["models", str(models), "--quick"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("model ") and "not planned" in out and "LlamaForCausalLM" in out


def test_models_and_inspect_say_how_each_format_is_computed(tmp_path, capsys):
    small, _ = quantized_files.write(pico.built("llama"), tmp_path, "nvfp4-ct")
    adapter = pico.adapter(pico.built("llama"), tmp_path / "adapter")
    assert main.main(["models", str(small.parent), "--quick"]) == 0
    listed = capsys.readouterr().out
    assert main.main(["inspect", str(adapter), "--model", str(small)]) == 0
    inspected = capsys.readouterr().out
    how = how_computed("nvfp4-g16", are_tables=False, step_mode="fused", is_kept=False)
    assert how.startswith("steps by trimtab's kernels") and "nvfp4-g16 (4.51 bits)" in " ".join(listed.split())
    assert how in " ".join(listed.split()) and f"nvfp4-g16 (4.51 bits a value); on a GPU {how}" in " ".join(inspected.split())


def test_models_of_the_cache_have_their_ids(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    assert main.main(["models"]) == 0
    assert "no models in" in capsys.readouterr().err
    pico.build("llama", tmp_path / "models--someone--small" / "snapshots" / ("a" * 40))
    assert main.main(["models", "--quick"]) == 0
    assert "someone/small  LlamaForCausalLM" in capsys.readouterr().out
    assert main.main(["models", str(tmp_path / "none")]) == 2


def test_adapters_are_listed_with_the_models_that_they_fit(models, capsys):
    wanted = [str(models / "llama"), str(demo.BASE)]
    assert main.main(["adapters", str(models), "--model", wanted[0], "--model", wanted[1], "--json"]) == 0
    found = {one["adapter"]: one for one in json.loads(capsys.readouterr().out)["adapters"]}
    assert set(found) == {"adapters/one", "adapters/group/two", "adapters/bad"}
    assert [found["adapters/one"]["models"][model]["fits"] for model in wanted] == [True, False]
    assert [found["adapters/group/two"]["models"][model]["fits"] for model in wanted] == [False, True]
    assert found["adapters/one"]["rank"] == 4 and found["adapters/one"]["models"][wanted[1]]["problems"] > 0
    assert "error" in found["adapters/bad"]
    assert main.main(["adapters", str(demo.FOLDER / "adapters")]) == 0
    assert "rslora-dora" in capsys.readouterr().out
    assert main.main(["adapters", str(models / "llama" / "none")]) == 2


def test_versions_as_json(capsys):
    assert main.main(["--version", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["trimtab"] == trimtab.__version__ and {"python", "torch", "transformers", "peft", "bitsandbytes"} <= set(found)


def test_exit_codes_are_in_the_help_once(capsys):
    for command in ("run", "chat", "pull", "serve", "verify", "completion"):
        with pytest.raises(SystemExit):
            main.main([command, "--help"])
        text = capsys.readouterr().out
        assert "`trimtab --help` lists the exit codes" in text and "exit codes:" not in text
    with pytest.raises(SystemExit):
        main.main(["--help"])
    text = capsys.readouterr().out
    assert "exit codes:" in text
    for code in (*(code for _, code in exit_codes.EXIT_CODES), main.STOPPED, main.READER_GONE):
        assert f"\n  {code}  " in text


@pytest.mark.parametrize(("arguments", "environ", "has_color"), [
    (["--color", "always"], {"NO_COLOR": "1"}, True), ([], {"FORCE_COLOR": "1", "NO_COLOR": "1"}, False),
    ([], {}, False), (["--color", "always"], {}, True), ([], {"FORCE_COLOR": "1"}, True),
    (["--color", "never"], {"FORCE_COLOR": "1"}, False),
])  # fmt: skip
def test_color_is_asked_for_or_refused(arguments, environ, has_color, model, monkeypatch, capsys):
    for name in ("FORCE_COLOR", "NO_COLOR"):
        monkeypatch.setenv(name, environ.get(name, ""))
    monkeypatch.setattr(chat, "opened", lambda *given, **named: nullcontext(model))
    monkeypatch.setattr(sys, "stdin", io.StringIO("/compare base style Hello\n"))
    options = ["--device", "cpu", "--context", "256", "--max-new-tokens", "4", "--adapter", f"style={STYLE}"]
    assert main.main(["chat", str(demo.BASE), *options, *arguments]) == 0
    assert ("\x1b[" in "".join(capsys.readouterr())) == has_color


def test_a_wrong_color_is_refused(capsys):
    assert main.main(["models", "--color", "pink"]) == 2
    assert "--color" in capsys.readouterr().err


@pytest.mark.parametrize("color", [["--color", "always"], ["--color=always"]])
def test_color_may_stand_before_the_command(color, tmp_path, capsys, monkeypatch):
    for name in ("FORCE_COLOR", "NO_COLOR"):
        monkeypatch.setenv(name, "")  # what the flag sets goes with the test
    assert main.main([*color, "models", str(tmp_path)]) == 0
    assert os.environ.get("FORCE_COLOR")
    assert main.main(["--color", "pink", "models"]) == 2 and main.main(["--color"]) == 2
    assert "Traceback" not in capsys.readouterr().err
