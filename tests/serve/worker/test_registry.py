"""A registry file: every model it names, and every problem of it at once."""

import json
import os
import re
from unittest.mock import Mock

import pytest
import torch
from safetensors.torch import save_file

import trimtab
from tests import ROOT
from tests.raised import raised, refused
from trimtab.cli.main import main
from trimtab.demo.demo import FOLDER as DEMO
from trimtab.errors import AdapterError, CheckpointError, RequestError
from trimtab.request import LoadRequest
from trimtab.serve.worker import registry
from trimtab.serve.worker.registry import ServedModel, check_present, read_registry


def write_checkpoint(folder):
    """Write a config and a file of one tensor."""
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text('{"architectures": ["A"], "model_type": "a"}')
    save_file({"a": torch.zeros(64)}, folder / "model.safetensors")


@pytest.fixture
def write(tmp_path):
    (tmp_path / "adapters" / "medical").mkdir(parents=True)
    (tmp_path / "model").mkdir()

    def written(text):
        path = tmp_path / "models.toml"
        path.write_text(text, encoding="utf-8")
        return path

    return written


def problems(path):
    error = raised(CheckpointError, read_registry, path)
    return [line.removeprefix("  - ") for line in str(error).splitlines() if line.startswith("  - ")]


def test_everything_a_table_may_say_is_read(write, tmp_path):
    (served,) = read_registry(
        write("""
        [models."google/gemma"]
        path = "model"
        quant = "nf4-dq"
        dtype = "bfloat16"
        context = 2048
        gpu_memory = "4GiB"
        host_memory = 1000000000
        images = 3
        audio_s = 12
        place = { "model.vision_tower*" = "stream" }
        keep_unquantized = ["lm_head"]
        device = "cpu"
        offload_dir = "scratch"
        rows = 4
        resident_adapters = 2
        keep = ["medical"]
        idle_unload_s = 600
        supports_audio = false
        decode = "eager"

        [models."google/gemma".adapters]
        medical = "adapters/medical"
        """)
    )
    assert served == ServedModel(
        name="google/gemma", adapters={"medical": str(tmp_path / "adapters" / "medical")}, kept=("medical",), rows=4,
        resident_limit=2, idle_unload_s=600, supports=("image",), decode="eager",
        request=LoadRequest(
            model=str(tmp_path / "model"), quant="nf4-dq", context_tokens=2048, gpu_memory_bytes=4 * 2**30,
            host_memory_bytes=10**9, images=3, audio_s=12, place={"model.vision_tower*": "stream"},
            keep_unquantized=("lm_head",), device="cpu", offload_dir=str(tmp_path / "scratch"), head="auto",
        ),
    )  # fmt: skip


def test_a_hub_id_stays_one_and_defaults_hold(write):
    (served,) = read_registry(write('[models.a]\npath = "google/gemma-4-E4B-it"\n'))
    assert served.request == LoadRequest(model="google/gemma-4-E4B-it", head="auto", dtype="auto")
    assert (served.rows, served.supports, served.idle_unload_s) == (None, ("image", "audio"), None)


def test_a_saved_plan_brings_its_request_and_adapters(write, tmp_path):
    plan = trimtab.plan(DEMO / "base", quant="none", context=64, device="cpu", adapters={"style": DEMO / "adapters/style"})
    plan.save(tmp_path / "plan.json")
    (served,) = read_registry(write('[models.a]\nplan = "plan.json"\nkeep = ["style"]\n'))
    assert (served.request.context_tokens, dict(served.request.adapters)) == (64, {})
    assert dict(served.adapters) == {"style": str(DEMO / "adapters" / "style")}


def test_several_models_are_read_in_their_order(write):
    found = read_registry(write('[models.b]\npath = "model"\n[models.a]\npath = "model"\n'))
    assert [served.name for served in found] == ["b", "a"]


def test_all_problems_are_told_at_once(write):
    found = problems(write("""
        port = 80
        [models.a]
        path = "model"
        quants = "nf4"
        rows = "8"
        keep = [1]
        supports_image = 1
        [models.a.adapters]
        medical = "adapters/nothing"
        style = "demo/styel:0.7"
        legal = 5
        [models.b]
        [models.c]
        path = "model"
        plan = "plan.json"
        quant = "nf4"
        [models.d]
        path = "model"
        quant = "q4"
        [models.e]
        path = "model"
        keep = ["nobody"]
        [models]
        f = 5
        """.replace("[models]\n        f = 5", "")))  # fmt: skip
    assert found == [
        "unknown table or key 'port' (known: models)",
        "models.a.quants: unknown key (did you mean quant?)",
        "models.a.rows: must be an integer",
        "models.a.keep: must be a list of texts",
        "models.a.supports_image: must be true or false",
        "models.a.adapters.medical: no such folder (adapters/nothing). An adapter is a folder with adapter_config.json; "
        "`trimtab adapters DIR` lists those below a folder",
        "models.a.adapters.style: no such folder (demo/styel:0.7). Did you mean demo/style?",
        "models.a.adapters.legal: must be a folder's path",
        "models.b.path: give either path or plan",
        "models.c.path: give either path or plan",
        "models.c.quant: has no effect with a plan",
        "models.d: quant='q4': unknown choice (choices: auto, none, int8, fp4, nf4, nf4-dq)",
        "models.e: keep='nobody': is not an adapter of this model",
    ]


@pytest.mark.parametrize("text, problem", [
    ("", "has no [models.NAME] table"), ("models = 5", "has no [models.NAME] table"),
    ("[models]\na = 5", "models.a is not a table"),
    ('[models.a]\npath = "model"\nrows = 0', "rows=0"), ('[models.a]\npath = "model"\nrows = true', "an integer"),
    ('[models.a]\npath = "model"\nidle_unload_s = 0', "above zero"),
    ('[models.a]\npath = "model"\ngpu_memory = "4 apples"', "gpu_memory='4 apples'"),
    ('[models.a]\npath = "model"\nresident_adapters = 0', "at least 1"),
    ('[models."a b"]\npath = "model"', "letters, digits"), ('[models."a:b"]\npath = "model"', "letters, digits"),
    ('[models.a]\nplan = "nothing.json"', "models.a"),
    ('[models.a]\npath = "model"\n[models.a.adapters]\n"x y" = "adapters/medical"', "letters, digits"),
    ('[models.a]\npath = "model"\n[models.b]\npath = "model"\n[models.b.adapters]\na = "adapters/medical"',
     "is also the name of a model"),
])  # fmt: skip
def test_a_problem_is_named(write, text, problem):
    assert len(found := problems(write(text))) == 1 and problem in found[0]


def test_what_is_no_toml_is_refused(write, tmp_path):
    with pytest.raises(CheckpointError, match="not TOML"):
        read_registry(write("[models"))
    assert refused(read_registry, tmp_path / "nothing.toml").field == "registry"
    (tmp_path / "bytes.toml").write_bytes(b"\xff\xfe")
    with pytest.raises(CheckpointError, match="not TOML"):
        read_registry(tmp_path / "bytes.toml")


def test_the_example_in_the_docs_is_read(tmp_path):
    text = (ROOT / "docs" / "operate.md").read_text("utf-8").partition("## Several models")[2].partition("\n## ")[0]
    (block,) = re.findall(r"```toml\n(.*?)```", text, re.DOTALL)
    for name in ("models/gemma-4-E4B-it", "models/gemma-4-E2B-it", "adapters/medical", "adapters/legal"):
        assert name in block
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "models.toml").write_text(block, encoding="utf-8")
    gemma, small = read_registry(tmp_path / "models.toml")
    assert (gemma.name, gemma.kept, set(gemma.adapters), gemma.idle_unload_s) == ("gemma", ("medical",), {"medical", "legal"}, 600)
    assert (small.name, small.supports, small.request.gpu_memory_bytes) == ("small", (), 5 * 2**30)
    # Every further key that the page of the docs names is one.
    (further,) = re.findall(r"Further keys: (.*?)\. Everything", text, re.DOTALL)
    assert set(re.findall(r"`(\w+)`", further)) <= set(registry._KINDS)


# What is not here -----------------------------------------------------------------------------------------------------


def test_serving_what_is_not_here_ends_at_once_with_every_name(write, tmp_path, capsys):
    file = write('[models.a]\npath = "model"\n[models.b]\npath = "gone/model"\n[models.c]\npath = "org/not-cached"\n')
    write_checkpoint(tmp_path / "model")
    assert main(["serve", str(file), "--port", "0"]) == 3
    said = capsys.readouterr().err
    assert "model b: " in said and "gone/model" in said and "org/not-cached" in said and "model a: " not in said


def test_serving_what_is_no_whole_model_ends_at_once_with_every_reason(write, tmp_path, capsys):
    cut, planned = tmp_path / "cut", tmp_path / "planned"
    for folder in (cut, planned):
        write_checkpoint(folder)
    (planned / "model.safetensors").unlink()
    os.truncate(cut / "model.safetensors", 100)
    tables = {"empty": "model", "adapter": DEMO / "adapters" / "style", "planned": planned, "cut": cut}
    file = write("".join(f"[models.{name}]\npath = {json.dumps(str(path))}\n" for name, path in tables.items()))
    assert main(["serve", str(file), "--port", "0"]) == 3
    said = capsys.readouterr().err
    for name, words in (
        ("empty", "has no config.json"), ("adapter", "is an adapter, not a model"), ("planned", "no weights"),
        ("cut", "file of 100 B"),
    ):  # fmt: skip
        assert any(f"model {name}: " in line and words in line for line in said.splitlines()), (name, said)


@pytest.mark.parametrize("name", ["no/such/model", "./x", "no such model"])
def test_a_model_folder_that_is_not_there_is_called_that(name, tmp_path, capsys):
    given = str(tmp_path / name)
    assert main(["serve", given, "--port", "0"]) == 3
    said = capsys.readouterr().err
    assert given in said and "no such folder" in said and "letters" not in said


def test_an_adapter_folder_that_is_not_there_is_named(tmp_path, capsys):
    assert main(["serve", str(DEMO / "base"), "--adapter", f"style={tmp_path / 'gone'}", "--port", "0"]) == 3
    assert "adapter style of base: " in capsys.readouterr().err


@pytest.mark.parametrize("names", ["a", "ab"])
def test_a_missing_device_is_one_error_of_any_number_of_models(names, write, capsys, monkeypatch):
    missing = RequestError("there is no such GPU", field="device")
    monkeypatch.setattr("trimtab.machine.machine_cache.find_machine", Mock(side_effect=missing))
    file = write("".join(f"[models.{name}]\npath = {json.dumps(str(DEMO / 'base'))}\n" for name in names))
    assert main(["serve", str(file), "--port", "0"]) == 2 and "no such GPU" in capsys.readouterr().err


def test_a_file_for_another_machine_asks_for_no_folder_here(write, capsys):
    file = write('[models.a]\npath = "org/not-cached"\n')
    pytest.importorskip("ray")
    assert main(["serve", str(file), "--ray", "--print-config", "-"]) == 0


def test_an_adapter_that_none_can_use_is_named_without_its_path(write, tmp_path):
    # A client's message has no paths: the name alone says which adapter it is about.
    write_checkpoint(tmp_path / "model")
    (tmp_path / "broken").mkdir()
    models = read_registry(write('[models.a]\npath = "model"\n[models.a.adapters]\nlegal = "broken"\n'))
    error = raised(AdapterError, check_present, models)
    assert error.path == str(tmp_path / "broken") and error.problems[0] == "adapter legal of a: adapter_config.json is missing"
