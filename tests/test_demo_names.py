"""The names of the demo, `demo` and `demo/style`, mean the bundled folders wherever a model or an adapter is given."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

import trimtab
from tests.raised import raised
from trimtab import demo
from trimtab.adapter_names import NAMED, parse_adapter, paths_of, without_demo_name
from trimtab.adapters.file import read_adapter
from trimtab.checkpoint.folder import find_folder
from trimtab.cli import main
from trimtab.cli.commands import doctor
from trimtab.cli.commands.serve import configured, served_models
from trimtab.demo.demo import NEXT
from trimtab.errors import AdapterError, CheckpointError
from trimtab.merging.changes.request import parts_of
from trimtab.serve.worker.registry import read_registry

STYLE = str(demo.ADAPTERS["style"])


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def own_demo(folder: Path) -> Path:
    """Make a model of the name in a folder."""
    (folder / "demo").mkdir()
    shutil.copy(demo.BASE / "config.json", folder / "demo")
    return folder / "demo"


def test_every_bundled_folder_has_a_name():
    assert set(NAMED.values()) == {demo.BASE, *(path for path in (demo.FOLDER / "adapters").iterdir() if path.is_dir())}
    assert all(without_demo_name(name) == str(path) for name, path in NAMED.items())
    assert [without_demo_name(text) for text in ("./demo", "Demo", "demo/", "demo/none", "org/demo")] == [
        "./demo", "Demo", "demo/", "demo/none", "org/demo"
    ]  # fmt: skip


def test_a_folder_of_the_name_wins_only_if_it_holds_a_model_or_an_adapter(here):
    (here / "demo" / "style").mkdir(parents=True)
    assert find_folder("demo") == demo.BASE and paths_of(["demo/style"]) == {"style": STYLE}
    shutil.copy(demo.BASE / "config.json", here / "demo")
    assert find_folder("demo") == find_folder(Path("demo")) == Path("demo")
    shutil.copy(demo.ADAPTERS["style"] / "adapter_config.json", here / "demo" / "style")
    assert paths_of(["demo/style"]) == {"style": "demo/style"} and parse_adapter("demo/style").path == "demo/style"


def test_an_adapter_of_the_demo_has_its_name_in_every_form():
    assert paths_of("demo/style") == paths_of({"style": "demo/style"}) == {"style": STYLE}
    one, other = parse_adapter("demo/style:0.5"), parse_adapter("s=demo/style")
    assert (one.name, one.path, one.weight, other.name, other.path) == ("style", STYLE, 0.5, "s", STYLE)
    assert [(part.name, part.path, part.weight) for part in parts_of({"s": ("demo/style", 0.5)})] == [("s", STYLE, 0.5)]
    assert trimtab.LoadRequest(model="demo", adapters={"s": "demo/style"}).adapters == {"s": STYLE}
    assert read_adapter("demo/style").folder == demo.ADAPTERS["style"]
    assert trimtab.inspect("demo/style") == trimtab.inspect(STYLE)


def test_a_name_that_the_demo_does_not_have_lists_those_that_it_has():
    error = raised(AdapterError, read_adapter, "demo/other", match="no such folder")
    assert error.hint == "The demo has demo/rslora-dora, demo/specialist, demo/style"
    with pytest.raises(AdapterError, match="is a model, not an adapter"):
        read_adapter("demo")
    with pytest.raises(CheckpointError, match="is an adapter, not a model"):
        trimtab.plan("demo/style")


def served(*words: str):
    return served_models(configured(main.parser().parse_args(["serve", *words])))


def test_a_server_of_the_demo_has_its_name_and_knows_its_folders(here):
    (here / "models.toml").write_text('[models.demo]\npath = "demo"\nadapters = { style = "demo/style" }\n')
    (here / "serve.toml").write_text('model = "demo"\n[adapters]\nstyle = "demo/style:1"\n')
    forms = (("demo", "--adapter", "demo/style"), ("models.toml",), ("--config", "serve.toml"))
    for _ in range(2):
        for (one,) in [served(*words) for words in forms]:
            assert (one.name, one.request.model, dict(one.adapters)) == ("demo", str(demo.BASE), {"style": STYLE})
        (here / "demo").mkdir(exist_ok=True)  # a folder without a model changes nothing


def test_a_registry_looks_for_the_folder_beside_itself(here, monkeypatch):
    own = own_demo(here)
    (here / "models.toml").write_text('[models.a]\npath = "demo"\nadapters = { s = "demo/style:0.5" }\n')
    monkeypatch.chdir(demo.FOLDER)
    (one,) = read_registry(here / "models.toml")
    assert one.request.model == str(own) and one.adapters == {"s": STYLE} and one.weights == {"s": 0.5}


def test_the_lists_show_the_demo(capsys):
    assert main.main(["adapters", "demo"]) == 0 and main.main(["models", "demo", "--quick"]) == 0
    out = capsys.readouterr().out
    assert all(f"adapters/{name} " in out for name in demo.ADAPTERS) and str(demo.BASE) in out


def test_a_doctor_examines_the_demos_folders():
    options = main.parser().parse_args(["doctor", "demo", "--adapter", "demo/style"])
    options.adapter_name, options.adapter = doctor._only_adapter(options.adapter)
    doctor._check(options)
    assert (options.model, options.adapter_name, options.adapter) == (str(demo.BASE), "style", STYLE)


@pytest.mark.parametrize("words", [["pull", "demo"], ["run", "demo", "hi", "--pull", "--revision", "main"]])
def test_the_demo_is_not_downloaded(words, capsys):
    assert main.main(words) == 2 and "is part of trimtab and needs no download" in capsys.readouterr().err


def test_the_demos_last_lines_are_commands(here):
    parsed = [main.parser().parse_args(command.split()[1:]) for command in NEXT]
    assert [one.name_of_command for one in parsed] == ["chat", "serve", "merge"]
    assert {one.model for one in parsed} == {"demo"} and {tuple(one.adapter) for one in parsed} == {("demo/style",)}
