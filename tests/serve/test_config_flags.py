"""One TOML file for all flags of `trimtab serve`: each means the same there, and every mistake is named."""

from __future__ import annotations

import argparse
import json
import logging
import os
import re

import pytest
import torch

from tests import ROOT
from tests.raised import raised
from trimtab.cli.commands.serve import configured, served_models, settings_of
from trimtab.cli.main import main, parser
from trimtab.errors import CheckpointError, RequestError

DEMO = ROOT / "trimtab" / "demo"


def options_of(tmp_path, text, *flags):
    file = tmp_path / "serve.toml"
    file.write_text(text, encoding="utf-8")
    return configured(parser().parse_args(["serve", "--config", str(file), *flags]))


def test_a_file_says_what_the_flags_say(tmp_path):
    (tmp_path / "keys").write_text("one\ntwo\n")
    (tmp_path / "alice.key").write_text("alices-key\n")
    (tmp_path / "adapters").mkdir()
    text = f"""
        model = "{DEMO / "base"}"
        name = "demo"
        port = 0
        context = 512
        gpu_memory = "4GiB"
        place = {{"model.vision_tower*" = "stream"}}
        rows = 4
        keep = ["style"]
        api_key_file = "keys"
        admin_key = ["root"]
        adapter_root = "adapters"
        timeout = 600
        grace = 5.5
        lenient = true
        no_page = true
        log_format = "json"

        [adapters]
        style = "{DEMO / "adapters" / "style"}"

        [limits]
        image_pixels = 4000000
        head_s = 5.5

        [keys.alice]
        key_file = "alice.key"
        requests_per_minute = 60

        [keys.bob]
        key = "bobs-key"
        concurrent = 2
        tokens_per_day = 1000
    """
    options = options_of(tmp_path, text)
    (model,), settings = served_models(options), settings_of(options)
    assert (model.name, model.rows, model.kept) == ("demo", 4, ("style",))
    assert model.request.context_tokens == 512 and model.request.gpu_memory_bytes == 4 * 2**30
    assert model.request.place == {"model.vision_tower*": "stream"}
    assert model.adapters == {"style": str(DEMO / "adapters" / "style")}
    assert settings.api_keys == ("one", "two", "alices-key", "bobs-key") and settings.admin_keys == ("root",)
    assert settings.adapter_root == tmp_path / "adapters"
    assert (settings.port, settings.timeout_s, settings.grace_s, settings.lenient, settings.page) == (0, 600, 5.5, True, False)
    assert (settings.limits.image_pixels, settings.limits.head_s) == (4_000_000, 5.5)
    assert settings.key_limits["alices-key"].requests_per_minute == 60
    assert (settings.key_limits["bobs-key"].name, settings.key_limits["bobs-key"].concurrent) == ("bob", 2)
    assert options.log_format == "json"


def test_a_flag_beside_the_file_wins(tmp_path):
    text = f'model = "{DEMO / "base"}"\nport = 1\ntimeout = 5\n[limits]\nn = 2\nmessages = 7'
    settings = settings_of(options_of(tmp_path, text, "--port", "2", "--limit", "n=3"))
    assert (settings.port, settings.timeout_s, settings.limits.n, settings.limits.messages) == (2, 5, 3, 7)


def test_a_flag_with_the_default_value_wins_too(tmp_path):
    flags = {"host": "127.0.0.1", "port": 8000, "queue": 64, "grace": 30.0, "log_format": "text", "log_level": "info"}
    text = f'model = "{DEMO / "base"}"\n' + 'host = "0.0.0.0"\nport = 1\nqueue = 2\ngrace = 3\nlog_format = "json"\n'
    text += 'log_level = "error"\napi_key = ["k"]'
    given = [part for name, value in flags.items() for part in (f"--{name.replace('_', '-')}", str(value))]
    options = options_of(tmp_path, text, *given)
    assert {name: getattr(options, name) for name in flags} == flags
    assert options_of(tmp_path, text).port == 1 and options_of(tmp_path, f'model = "{DEMO / "base"}"').port == 8000


def served_parser():
    (commands,) = parser()._subparsers._group_actions
    return commands.choices["serve"]


def test_every_flag_has_a_key(tmp_path):
    """What has none makes no sense in a file, or has a table of its own."""
    serve = served_parser()
    keys = {one.dest for one in serve._actions if one.option_strings} - {"help", "config", "json", "limit", "adapter"}
    for key in sorted(keys - {"print_config"}):
        with pytest.raises(CheckpointError) as caught:  # nothing else in it: it has no model
            options_of(tmp_path, f"{key} = 1979-05-27")
        assert "unknown key" not in str(caught.value)


def test_paths_are_relative_to_the_file(tmp_path):
    (tmp_path / "budgets.json").write_text('{"cpu": "1GiB"}')
    options = options_of(tmp_path, f'model = "{DEMO / "base"}"\nmax_memory = "budgets.json"')
    assert served_models(options)[0].request.host_memory_bytes == 2**30
    options = options_of(
        tmp_path, f'model = \'{DEMO / "base"}\'\nmax_memory = \'{{"cpu": "2GiB"}}\'\ndevice_map = \'{{"": "cpu"}}\''
    )
    assert served_models(options)[0].request.host_memory_bytes == 2**31
    assert served_models(options)[0].request.device_map == {"": "cpu"}


def test_a_saved_plan_stands_for_a_model(tmp_path):
    import trimtab

    trimtab.plan(DEMO / "base", quant="none", context=256, device="cpu").save(tmp_path / "p.json")
    (model,) = served_models(options_of(tmp_path, 'plan = "p.json"'))
    assert (model.name, model.request.context_tokens) == ("p", 256)
    with pytest.raises(CheckpointError, match="cannot be combined with a model"):
        options_of(tmp_path, f'plan = "p.json"\nmodel = "{DEMO / "base"}"')


def test_a_file_may_hold_several_models(tmp_path):
    text = f"""
        port = 1
        together = 2
        [models.a]
        path = "{DEMO / "base"}"
        [models.b]
        path = "{DEMO / "base"}"
        rows = 2
        [models.b.adapters]
        style = "{DEMO / "adapters" / "style"}"
    """
    models = served_models(options_of(tmp_path, text))
    assert [(one.name, one.rows, list(one.adapters)) for one in models] == [("a", None, []), ("b", 2, ["style"])]


@pytest.mark.parametrize(("text", "words"), [
    ("prot = 1", "unknown key 'prot' (did you mean port"), ("[limit]\nn = 1", "unknown key 'limit' (did you mean limits"),
    ("port = '1'", "port: must be an integer"), ("timeout = true", "timeout: must be a number"),
    ("lenient = 1", "lenient: must be true or false"), ("keep = 'style'", 'keep: must be a list of texts, such as ["..."]'),
    ("place = 'host'", "place: must be a list of texts or a table"),
    ("name = []", "name: must be a text"), ("limits = 3", "limits: must be a table"),
    ("[limits]\nn = '3'", "limits.n: must be"), ("color = 'red'", "color: must be auto, always, never"),
    ("[keys.a]\nconcurrent = 1", "give either key or key_file"), ("[keys.a]\nkey = 'k'\nkeys = 1", "keys.a: "),
    ("[keys.a]\nkey_file = 'none'", "cannot be read"), ("[keys.a]\nkey = ''", "holds no key"),
    ("[keys.a]\nkey = 'k'\n[keys.b]\nkey = 'k'", "has the key of a"),
    ("[keys.a]\nkey = 'k'\nconcurrent = 0", "keys.a: "), ("model = 'x'\n[models.a]\npath = 'x'", "give either"),
    ("config = 'other.toml'", "unknown key 'config'"),
])  # fmt: skip
def test_what_is_wrong_is_said_by_name(tmp_path, text, words):
    error = raised(CheckpointError, options_of, tmp_path, text)
    assert words in str(error) and error.path == str(tmp_path / "serve.toml")


def test_everything_that_is_wrong_is_said_at_once(tmp_path):
    error = raised(CheckpointError, options_of, tmp_path, "prot = 1\nport = 'x'\n[limits]\nimage_pixel = 1", match="4 problems")
    assert "has no model" in str(error)
    assert "limits.image_pixel: unknown limit (did you mean image_pixels" in str(error)


def test_a_key_is_never_repeated(tmp_path):
    text = "[keys.a]\nkey = 'a-secret'\n[keys.b]\nkey = 'a-secret'\nconcurent = 1"
    error = raised(CheckpointError, options_of, tmp_path, text)
    assert "concurrent" in str(error) and "a-secret" not in str(error)


@pytest.mark.parametrize(("text", "kind"), [("port =", CheckpointError), (None, RequestError)])
def test_a_file_that_cannot_be_read_is_named(tmp_path, text, kind):
    file = tmp_path / "serve.toml"
    if text is not None:
        file.write_text(text)
    assert "serve.toml" in str(raised(kind, lambda: configured(parser().parse_args(["serve", "--config", str(file)]))))


def test_the_file_in_the_docs_is_read(tmp_path):
    """Everything but what it names on a disk that is not here."""
    text = (ROOT / "docs" / "operate.md").read_text("utf-8")
    (block,) = [one for one in re.findall(r"```toml\n(.+?)```", text, re.S) if "[keys." in one]
    for name in re.findall(r'key_file = "([^"]+)"', block):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(f"key-of-{name}")
    for name in re.findall(r'^(?:path|medical|legal|adapter_root) += "([^"]+)"', block, re.M):
        (tmp_path / name).mkdir(parents=True, exist_ok=True)
    options = options_of(tmp_path, block)
    settings = settings_of(options)
    assert len(settings.key_limits) == 2 and settings.limits.image_pixels == 4_000_000
    (block,) = re.findall(r"```toml\n(.+?)```", (ROOT / "docs" / "docker.md").read_text("utf-8"), re.S)
    assert [one.partition("=")[0] for one in options_of(tmp_path, block).adapter] == ["medical"]


def test_a_log_of_json_has_no_other_lines_and_the_threads_of_the_file_are_used(tmp_path, monkeypatch, capfd):
    from trimtab.cli.main import main
    from trimtab.serve import run

    seen = {}

    def serve(models, settings, *, together, say, reread, pool, listener):
        seen.update(together=together, threads=os.environ["OMP_NUM_THREADS"])
        say("demo: 0 adapters, 4 rows")
        file.write_text(text.replace("threads = 3", "threads = 2"))
        seen["waiting"] = list(reread()[2])

    monkeypatch.setattr(run, "serve", serve)
    monkeypatch.setattr("trimtab.serve.slots.Slots.begin", lambda slots: None)
    for name in ("OMP_NUM_THREADS", "TRIMTAB_LOG_FORMAT", "TRIMTAB_LOG_LEVEL"):
        monkeypatch.setenv(name, os.environ.get(name, "1"))
    loggers = [logging.getLogger(name) for name in ("trimtab", "uvicorn")]
    before = [(one.handlers[:], one.propagate, one.level) for one in loggers]
    count, file = torch.get_num_threads(), tmp_path / "serve.toml"
    text = f'model = "{DEMO / "base"}"\nlog_format = "json"\nthreads = 3\nport = 0'
    file.write_text(text)
    try:
        assert main(["serve", "--config", str(file)]) == 0
    finally:
        torch.set_num_threads(count)
        for one, (handlers, propagate, level) in zip(loggers, before, strict=True):
            one.handlers[:], one.propagate = handlers, propagate
            one.setLevel(level)
    lines = [json.loads(line) for line in capfd.readouterr().err.splitlines()]
    assert [line["message"] for line in lines] == ["demo: 0 adapters, 4 rows"] and lines[0]["level"] == "info"
    assert seen == {"together": 1, "threads": "3", "waiting": ["threads"]}


def said(capsys, tmp_path, text, *flags):
    """Return what the command prints of an error, its exit code, and the file."""
    file = tmp_path / "serve.toml"
    file.write_text(text, encoding="utf-8")
    code = main(["serve", "--config", str(file), *flags])
    return capsys.readouterr().err.removeprefix("trimtab: ").strip(), code, str(file)


@pytest.mark.parametrize(("lines", "expected"), [
    ('gpu_memory = "4"', "FILE: gpu_memory = 4: needs a unit"), ("context = 0", "FILE: context = 0: must be an integer"),
    ("timeout = -1", "FILE: timeout = -1: must be above zero"), ("queue = 0", "FILE: queue = 0: must be at least 1"),
    ("[limits]\nimage_pixels = -1", "FILE: limits.image_pixels = -1: must be above zero"),
    ('[adapters]\n"a b" = "x"', "FILE: adapters = a b: an adapter name"),
    ('decode = "graph"\neager = true', "FILE: decode = graph: cannot be combined with eager: both"),
    ('host = "1.2.3.4"', "Give api_key (or TRIMTAB_API_KEY)"), ("gpus_per_replica = 0.5", "has no effect without ray"),
])  # fmt: skip
def test_an_error_names_the_key_of_the_file(tmp_path, capsys, monkeypatch, lines, expected):
    monkeypatch.delenv("TRIMTAB_API_KEY", raising=False)
    text, code, file = said(capsys, tmp_path, f'model = "{DEMO / "base"}"\n{lines}')
    assert expected.replace("FILE", file) in text and code == 2
    assert "--" not in text


def test_an_error_of_a_flag_beside_the_file_names_the_flag(tmp_path, capsys):
    text, _, _ = said(capsys, tmp_path, f'model = "{DEMO / "base"}"\ngpu_memory = "4GiB"', "--gpu-memory", "5")
    assert text.startswith("--gpu-memory 5: needs a unit")


def test_an_error_in_a_models_table_names_its_key(tmp_path, capsys):
    table = f'[models.m]\npath = "{DEMO / "base"}"\n'
    for line, expected in [
        ('gpu_memory = "4"', "models.m: gpu_memory='4': needs a unit"),
        ("context = 0", "models.m: context=0: "),
    ]:
        text, code, _ = said(capsys, tmp_path, table + line)
        assert expected in text and "--" not in text and code == 3


@pytest.mark.parametrize(("flag", "value"), [
    ("--timeout", "-1.0"), ("--queue", "0"), ("--grace", "-1.0"), ("--idle-unload", "-1.0"), ("--limit", "n=-1"),
])  # fmt: skip
def test_an_error_of_a_setting_names_the_flag(capsys, flag, value):
    assert main(["serve", str(DEMO / "base"), flag, value]) == 2
    assert capsys.readouterr().err.startswith(f"trimtab: {flag} {value}: must be ")


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
    assert from_file(folder, text + beside_text) == expected and expected != from_flags(*beside)


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
    assert f"unknown key '{name}s_'" in str(raised(CheckpointError, from_file, folder, f"{name}s_ = {written}"))
