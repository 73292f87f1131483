"""Each flag of `trimtab serve` in the TOML file: the same models, settings and options as on the command line."""

from __future__ import annotations

import argparse
import json

import pytest

from tests import ROOT
from trimtab.cli.commands.serve import configured, served_models, settings_of
from trimtab.cli.main import parser
from trimtab.errors import CheckpointError

DEMO = ROOT / "trimtab" / "demo"
STYLE = str(DEMO / "adapters" / "style")
MODEL = str(DEMO / "base")
# Flag -> (what the command line says, what the file says). FOLDER is the file's own folder; a list is a flag that is repeated.
FLAGS = {
    "adapter": ([f"style={STYLE}:0.5"], f'[adapters]\nstyle = "{STYLE}:0.5"'),
    "gpu_memory": ("2GiB", '"2GiB"'), "host_memory": ("3GiB", '"3GiB"'), "max_memory": ('{"cpu": "2GiB"}', "'{\"cpu\": \"2GiB\"}'"),
    "quant": ("int8", '"int8"'), "head": ("int8", '"int8"'), "dtype": ("fp16", '"fp16"'), "context": ("256", "256"),
    "place": (["model.language_model.layers.0=stream"], '{"model.language_model.layers.0" = "stream"}'),
    "device_map": ("FOLDER/map.json", '"map.json"'), "keep_unquantized": (["lm_head", "a*"], '["lm_head", "a*"]'),
    "prefix_cache": ("1GiB", '"1GiB"'), "batch_invariant": (True, "true"), "kv": ("int8", '"int8"'), "kv_tokens": ("8192", "8192"),
    "device": ("cpu", '"cpu"'), "offload_dir": ("FOLDER/off", '"off"'), "name": ("small", '"small"'), "images": ("3", "3"),
    "answer_tokens": ("1024", "1024"), "experts": ("nf4", '"nf4"'),
    "audio_s": ("7.5", "7.5"), "rows": ("4", "4"), "resident_adapters": ("2", "2"), "pull": (True, "true"),
    "revision": ("v1", '"v1"'), "decode": ("eager", '"eager"'), "eager": (True, "true"), "keep": (["style"], '["style"]'),
    "stop_at_turn_end": (True, "true"),
    "together": ("2", "2"), "host": ("::1", '"::1"'), "port": ("81", "81"), "api_key": (["a", "b"], '["a", "b"]'),
    "api_key_file": ("FOLDER/keys", '"keys"'), "admin_key": (["c"], '["c"]'), "admin_key_file": ("FOLDER/keys", '"keys"'),
    "adapter_root": ("FOLDER/off", '"off"'), "allow_fetch": (["a.org"], '["a.org"]'),
    "cors_origin": (["https://a.org"], '["https://a.org"]'), "limit": (["n=3", "messages=9"], "[limits]\nn = 3\nmessages = 9"),
    "share_prefix_cache": (True, "true"), "queue": ("5", "5"), "timeout": ("9.5", "9.5"), "grace": ("2", "2"),
    "idle_unload": ("60", "60"), "retry": (True, "true"), "lenient": (True, "true"), "log_format": ("json", '"json"'),
    "log_level": ("error", '"error"'), "otel": (True, "true"), "no_page": (True, "true"), "ray": (True, "true"),
    "replicas": ("1..3", '"1..3"'), "ray_address": ("a:1", '"a:1"'), "gpus_per_replica": ("0.5", "0.5"),
    "cpus_per_replica": ("2", "2"), "color": ("always", '"always"'), "threads": ("1", '"1"'),
}  # fmt: skip
# What a model or the settings do not hold: the command itself reads it from the options.
OPTIONS = ("pull", "revision", "together", "log_format", "log_level", "ray", "replicas", "ray_address", "gpus_per_replica",
           "cpus_per_replica", "color", "threads")  # fmt: skip
# Not in a file: the file itself, a form of output, and a model, which has a key of its own.
NOT_IN_A_FILE = {"help", "config", "json", "print_config", "plan"}


@pytest.fixture
def folder(tmp_path, monkeypatch):
    for variable in ("TRIMTAB_API_KEY", "TRIMTAB_ADMIN_KEY"):
        monkeypatch.delenv(variable, raising=False)
    (tmp_path / "off").mkdir()
    (tmp_path / "keys").write_text("k1\nk2\n")
    (tmp_path / "map.json").write_text(json.dumps({"": "cpu"}))
    return tmp_path


def read(options: argparse.Namespace) -> tuple[object, ...]:
    """Return everything that a server is made from."""
    options = configured(options)
    return served_models(options), settings_of(options), {name: getattr(options, name) for name in OPTIONS}


def from_file(folder, text, *, model=MODEL):
    file = folder / "serve.toml"
    file.write_text(f'model = "{model}"\n{text}\n', encoding="utf-8")
    return read(parser().parse_args(["serve", "--config", str(file)]))


def from_flags(*arguments):
    return read(parser().parse_args(["serve", MODEL, *arguments]))


def test_every_flag_is_listed_here():
    (commands,) = parser()._subparsers._group_actions
    flags = {one.dest for one in commands.choices["serve"]._actions if one.option_strings}
    assert flags - NOT_IN_A_FILE == set(FLAGS)


@pytest.mark.parametrize("name", FLAGS)
def test_a_flag_in_the_file_has_the_effect_of_the_flag(name, folder):
    said, written = FLAGS[name]
    flag, values = f"--{name.replace('_', '-')}", [] if said is True else [said] if isinstance(said, str) else said
    arguments = [part for value in values for part in (flag, value.replace("FOLDER", str(folder)))] or [flag]
    # Flags that mean something beside another one alone.
    beside, beside_text = [], ""
    if name == "keep":
        beside, beside_text = ["--adapter", f"style={STYLE}"], f'\n[adapters]\nstyle = "{STYLE}"'
    text = written if written.startswith("[") and "\n" in written else f"{name} = {written}"
    expected = from_flags(*arguments, *beside)
    assert from_file(folder, text + beside_text) == expected
    assert expected != from_flags(*beside)


def test_a_plan_in_the_file_stands_for_a_model(folder):
    import trimtab

    plan = folder / "small.json"
    trimtab.plan(MODEL, quant="none", context=256, device="cpu").save(plan)
    (folder / "serve.toml").write_text('plan = "small.json"\n')
    options = parser().parse_args(["serve", "--config", str(folder / "serve.toml")])
    assert read(options) == read(parser().parse_args(["serve", str(plan)]))


@pytest.mark.parametrize("name", sorted(NOT_IN_A_FILE - {"plan"}))
def test_what_makes_no_sense_in_a_file_is_refused_by_name(name, folder):
    with pytest.raises(CheckpointError, match=f"unknown key '{name}'"):
        from_file(folder, f"{name} = true")


@pytest.mark.parametrize("name", FLAGS)
def test_a_mistyped_key_is_refused_with_the_right_one(name, folder):
    written = FLAGS[name][1]
    if written.startswith("[") and "\n" in written:
        return
    with pytest.raises(CheckpointError) as caught:
        from_file(folder, f"{name}s_ = {written}")
    assert f"unknown key '{name}s_'" in str(caught.value)
