"""Counts of a config.json that no model has, and files that the system keeps, refused with the field or the path."""

from __future__ import annotations

import errno
import json
import math
import ntpath
import os
import re
import tempfile
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import transformers

import trimtab
from tests import pico, talking
from tests.adapter_files import write_adapter
from tests.checkpoint.test_headers import framed
from tests.raised import raised, refused
from trimtab.checkpoint import config_limits, headers, unreadable
from trimtab.checkpoint.config_limits import check_config, check_declared, check_layers, largest, most_tensors
from trimtab.checkpoint.folder import read_checkpoint
from trimtab.checkpoint.unreadable import first_missing, path_hint
from trimtab.cli.main import main
from trimtab.engine.chat.media import read_image
from trimtab.engine.loader import transformers_model
from trimtab.engine.tiers.streaming import Spill
from trimtab.errors import AdapterError, CheckpointError, DeviceError, DoesNotFitError
from trimtab.process.json_file import KINDS

pytestmark = pytest.mark.usefixtures("no_kept_anatomies")

PATH = Path("config.json")


def changed(family: str, folder: Path, field: str, value: Any, *, bare: bool = False) -> Path:
    """Return a small checkpoint whose config has another value in one field. bare: without weights."""
    pico.build(family, folder)
    file = folder / "config.json"
    config = holder = json.loads(file.read_text())
    *parts, name = field.split(".")
    for part in parts:
        holder = holder[part]
    holder[name] = value
    file.write_text(json.dumps(config))
    if bare:
        (folder / "model.safetensors").unlink()
    return folder


def refusal(folder: Path) -> CheckpointError:
    error = raised(CheckpointError, trimtab.plan, folder, device="cpu")
    assert error.path == str(folder / "config.json")
    return error


@pytest.fixture
def unbuilt(monkeypatch: pytest.MonkeyPatch):
    """Fail where transformers is asked to make a config of the file."""
    monkeypatch.setattr(
        transformers_model.transformers.AutoConfig, "from_pretrained", lambda *args, **options: pytest.fail("built")
    )


@pytest.mark.parametrize("value", [10**9, 10**30, 1e30])
@pytest.mark.parametrize(("family", "field"), [
    ("llama", "num_hidden_layers"), ("llama", "num_labels"), ("llama", "vocab_size"), ("llama", "max_position_embeddings"),
    ("llama", "hidden_size"), ("llama", "head_dim"), ("llama", "num_attention_heads"), ("llama", "intermediate_size"),
    ("gemma4", "text_config.num_hidden_layers"), ("gemma4", "vision_config.num_hidden_layers"),
    ("gemma4", "audio_config.num_hidden_layers"), ("gemma4", "vision_config.patch_size"),
    ("gemma4", "audio_config.conv_kernel_size"), ("gemma3", "vision_config.image_size"),
    ("qwen3_vl", "vision_config.depth"), ("mixtral", "num_local_experts"), ("qwen3_moe", "num_experts"),
    ("qwen3_moe", "head_dim"), ("llama", "attention_head_size"), ("llama", "conv_groups"),
])  # fmt: skip
def test_a_count_that_no_model_has_is_refused_by_its_field(family: str, field: str, value: Any, tmp_path: Path, unbuilt: None):
    error = refusal(changed(family, tmp_path / "m", field, value, bare=True))
    assert error.field == field and f"{field} is " in str(error) and "at most" in str(error)


def test_a_list_is_judged_by_its_name():
    with pytest.raises(CheckpointError, match="mlp_only_layers is 1000000000"):
        check_config({"mlp_only_layers": [3, 10**9]}, PATH)


@pytest.mark.parametrize(("field", "value"), [
    ("architectures", 5), ("architectures", [5]), ("architectures", "a"), ("model_type", []), ("model_type", {}),
    ("model_type", 5),
])  # fmt: skip
def test_an_architecture_that_is_no_text_is_refused_by_its_field(field: str, value: Any, tmp_path: Path, unbuilt: None):
    assert refusal(changed("llama", tmp_path / "m", field, value)).field == field


@pytest.mark.parametrize("value", [[], {}, 0, False, 5, True, 1.5, ["llama"], [3]])
@pytest.mark.parametrize("part", ["vision_config", "encoder", "talker_config.text_config", "parts"])
def test_a_part_whose_architecture_is_no_text_is_refused_by_its_field(part: str, value: Any):
    *outer, name = part.split(".")
    own: Any = {"model_type": value, "hidden_size": 8}
    config: dict[str, Any] = {name: [own] if name == "parts" else own}
    for one in outer:
        config = {one: config}
    error = raised(CheckpointError, check_config, {"model_type": "llama"} | config, PATH)
    assert error.field == f"{part}.model_type" and str(error).count(".model_type is ") == 1 and "must be a text" in str(error)


def test_a_part_without_an_architecture_is_taken():
    labels = {"id2label": {"0": "a"}, "label2id": {"model_type": 0}}
    check_config({"model_type": "llama", "text_config": {"model_type": None}, "vision_config": {}, **labels}, PATH)


@pytest.mark.parametrize("value", ["4", None, [], {}, True, 2.5])
def test_a_count_of_another_type_is_a_checkpoint_error(value: Any, tmp_path: Path):
    with pytest.raises(CheckpointError):
        trimtab.plan(changed("llama", tmp_path / "m", "num_hidden_layers", value), device="cpu")


def test_more_layers_than_tensors_are_refused(tmp_path: Path, unbuilt: None):
    error = refusal(changed("llama", tmp_path / "m", "num_hidden_layers", 400))
    assert error.field == "num_hidden_layers" and "the weight files have 21 tensors" in str(error)


EXPERTS = (("mixtral", "num_experts_per_tok"), ("gemma4_moe", "text_config.top_k_experts"))


@pytest.mark.parametrize(("family", "field", "value"), [
    ("llama", "num_hidden_layers", -1), ("llama", "hidden_size", 0), ("llama", "vocab_size", -7), ("llama", "head_dim", -1),
    *((*experts, count) for experts in EXPERTS for count in (9, 0, -1, None)),  # more than there are, and tokens without any
    ("gemma3", "vision_config.image_size", 60_000),  # more patches than an image has
])  # fmt: skip
def test_a_size_that_cannot_be_is_refused_by_its_field(family: str, field: str, value: Any, tmp_path: Path, unbuilt: None):
    assert refusal(changed(family, tmp_path / "m", field, value, bare=True)).field == field


def test_dense_models_of_a_family_with_experts_choose_none():
    for experts in ({"num_experts": None}, {"num_experts": 0}, {}):
        check_declared({"top_k_experts": None, "num_experts_per_tok": 0, **experts}, ("top_k_experts", "num_experts_per_tok"), PATH)


@pytest.mark.filterwarnings("ignore:Initializing zero-element tensors")
@pytest.mark.parametrize(("family", "field"), [("mixtral", "num_local_experts"), ("gemma4_moe", "text_config.num_experts")])
def test_a_mixture_of_no_experts_is_refused(tmp_path: Path, family: str, field: str):
    folder = changed(family, tmp_path / "m", field, 0, bare=True)
    assert re.search(r"layers\.0\.(mlp\.)?experts\.gate_up_proj is \[0, .*: a mixture of no experts", str(refusal(folder)))


def test_experts_as_modules_are_bounded_while_they_are_built(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(transformers_model, "MOST_MODULES", 100)
    assert "more than 100 modules" in str(refusal(changed("llama", tmp_path / "m", "num_hidden_layers", 40, bare=True)))


def test_buffers_are_bounded_before_their_memory_is_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    folder = changed("qwen3_moe", tmp_path / "m", "head_dim", 2**20, bare=True)  # 2 MiB of rotary frequencies, twice
    monkeypatch.setattr(transformers_model, "MOST_BUFFER_BYTES", 3 * 2**20)
    assert "more than 3145728 bytes of buffers" in str(refusal(folder))
    monkeypatch.setattr(transformers_model, "MOST_BUFFER_BYTES", 5 * 2**20)
    with pytest.raises(DoesNotFitError):  # which knows the model
        trimtab.plan(folder, device="cpu", host_memory="1GiB")


def test_tensors_that_the_layers_cannot_have_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    folder = pico.build("llama", tmp_path / "m")
    header = {f"model.layers.0.x{place}": {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]} for place in range(12_000)}
    (folder / "model.safetensors").write_bytes(framed(json.dumps(header).encode()))
    monkeypatch.setattr(headers, "parse", lambda *args, **options: pytest.fail("parsed"))
    with pytest.raises(CheckpointError, match="12000 tensors, a model of this config has fewer than 10600"):
        read_checkpoint(folder)


@pytest.mark.parametrize(
    ("config", "tensors"),
    [  # counted from the releases' own index files, or computed for three weights an expert in six parts each
        ({"num_hidden_layers": 61, "n_routed_experts": 256}, 91_991), ({"num_hidden_layers": 60, "num_experts": 256}, 280_000),
        ({"text_config": {"num_hidden_layers": 35}, "vision_config": {"num_hidden_layers": 16}}, 2_011),
        ({"depths": [2, 2, 18, 2]}, 330), ({"num_hidden_layers": 12, "num_hidden_groups": 1}, 25),
    ],
)  # fmt: skip
def test_checkpoints_of_real_sizes_are_within_the_limits(config: dict[str, Any], tensors: int):
    check_config(config, PATH)
    check_layers(config, tensors, PATH)
    assert tensors < most_tensors(config)


@pytest.mark.parametrize("every", [10, pytest.param(1, marks=pytest.mark.slow)])
def test_no_default_of_transformers_is_near_a_limit(every):
    near: list[str] = []
    for name in list(transformers.CONFIG_MAPPING.keys())[::every]:
        try:
            config = transformers.CONFIG_MAPPING[name]().to_dict()
        except Exception:  # a class without defaults
            continue
        plain = json.loads(json.dumps(config, default=str))
        near += [f"{name}.{field}" for field, *_ in config_limits._wrong_numbers(plain)]
        near += [f"{name}.{field}" for field, value in config_limits._numbers(plain) if largest(field) < value * 1.9 < math.inf]
    assert near == []


def test_a_config_of_many_labels_is_read():
    labels = {str(number): "a label of forty characters, more or less" for number in range(21_841)}
    config = {"id2label": labels, "label2id": {f"{label} {number}": int(number) for number, label in labels.items()}}
    assert len(json.dumps(config)) < KINDS["config.json"].nbytes
    check_config(config, PATH)


def test_a_config_of_hundreds_of_parts_is_refused_before_anything_copies_them():
    part = {"hidden_size": 8, "rope_parameters": {"rope_theta": 1.0}}
    check_config({"model_type": "llama", "parts": [part] * 127}, PATH)
    with pytest.raises(CheckpointError, match=r"config\.json is 258: a model has at most 256 objects"):
        check_config({"model_type": "llama", "parts": [part] * 129}, PATH)
    check_config({"model_type": "llama", "quantization_config": {"modules": [{}] * 1000}}, PATH)


PAIR = {f"base_model.model.model.layers.0.self_attn.q_proj.lora_{side}.weight": shape for side, shape in
        (("A", (4, 8)), ("B", (8, 4)))}  # fmt: skip
OTHER_USER = 65_534


@pytest.fixture
def llama(tmp_path):
    return talking.build_llama(tmp_path / "llama")


def refuse(monkeypatch, folder: Path, code: int) -> None:
    """Let the system refuse everything in a folder, as it does to a user without the right to it; root has every right."""

    def refusing(function):
        def called(path, *args, **kwargs):
            if not isinstance(path, int) and str(folder) in os.fsdecode(path):
                raise OSError(code, os.strerror(code), os.fspath(path))
            return function(path, *args, **kwargs)

        return called

    for name in ("listdir", "scandir", "open"):
        monkeypatch.setattr(os, name, refusing(getattr(os, name)))
    real_stat = os.stat

    def stat(path, *args, **kwargs):
        if not isinstance(path, int) and os.path.dirname(os.fsdecode(path)) == str(folder):
            raise OSError(code, os.strerror(code), os.fspath(path))
        return real_stat(path, *args, **kwargs)

    monkeypatch.setattr(os, "stat", stat)


@pytest.mark.parametrize("code", [errno.EACCES, errno.EIO, errno.ESTALE], ids=["permission", "disk", "stale"])
def test_a_model_that_cannot_be_read(llama, monkeypatch, capsys, code):
    refuse(monkeypatch, llama, code)
    assert main(["plan", str(llama), "--device", "cpu", "--context", "32"]) == 3
    said = capsys.readouterr().err
    assert said.startswith(f"trimtab: {llama}") and f"cannot be read ({os.strerror(code)})" in said and "Traceback" not in said
    with pytest.raises(CheckpointError):
        trimtab.plan(llama, device="cpu", context=32)


@pytest.mark.parametrize("code", [errno.EACCES, errno.EIO, errno.ESTALE], ids=["permission", "disk", "stale"])
def test_an_adapter_that_cannot_be_read(tmp_path, monkeypatch, capsys, code):
    adapter = write_adapter(tmp_path / "adapter", PAIR, target_modules=["q_proj"])
    refuse(monkeypatch, adapter, code)
    assert main(["inspect", str(adapter)]) == 3
    said = capsys.readouterr().err
    assert str(adapter) in said and f"cannot be read ({os.strerror(code)})" in said
    with pytest.raises(AdapterError):
        trimtab.inspect(adapter)


@pytest.mark.skipif(not hasattr(os, "seteuid") or os.geteuid() != 0, reason="only root becomes another user")
def test_folders_of_another_user(llama, tmp_path, capsys):
    adapter = write_adapter(tmp_path / "adapter", PAIR, target_modules=["q_proj"])
    commands = {llama: ["plan", str(llama), "--device", "cpu", "--context", "32"], adapter: ["inspect", str(adapter)]}
    for command in commands.values():  # what is imported late is readable for root alone
        assert main(command) == 0
    tmp_path.chmod(0o755)
    for folder, command in commands.items():
        folder.chmod(0)
        os.seteuid(OTHER_USER)
        try:
            code = main(command)
        finally:
            os.seteuid(0)
            folder.chmod(0o755)
        said = capsys.readouterr().err
        assert (code in (2, 3) and str(folder) in said and "cannot be read" in said) or "Permission denied" in said


def test_the_disk_tier_in_a_folder_that_cannot_be_written(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(DeviceError, match="cannot be made .*offload_dir"):
        Spill(tmp_path / "file" / "below")


def test_a_missing_tokenizer_json_is_named(llama, capsys):
    (llama / "tokenizer.json").unlink()
    assert main(["run", str(llama), "hello", "--device", "cpu", "--context", "64"]) == 3
    assert f"{llama}: tokenizer.json is missing" in capsys.readouterr().err


def test_no_temporary_folder(llama, monkeypatch, capsys):
    def none(*args, **kwargs):
        raise FileNotFoundError(errno.ENOENT, "No usable temporary directory found in ['/tmp']")

    monkeypatch.setattr(tempfile, "mkdtemp", none)
    monkeypatch.setattr(tempfile, "TemporaryDirectory", none)
    for flags in ([], ["--json"]):
        assert main(["verify", str(llama), "--device", "cpu", *flags]) == 2
        said = capsys.readouterr()
        assert "No usable temporary directory found" in (json.loads(said.out)["error"]["message"] if flags else said.err)


@pytest.mark.skipif(not Path("/proc/self").is_dir(), reason="a folder in which nobody, root included, makes files")
def test_a_home_in_which_nothing_can_be_written(llama, monkeypatch, capsys, tmp_path):
    monkeypatch.setenv("HOME", "/proc/trimtab")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    run = ["run", str(llama), "hello", "--device", "cpu", "--context", "64", "--max-new-tokens", "2", "--place", "*=disk"]
    assert main(run) in (4, 6)  # no room for the tier, or no file for it
    assert "offload" in capsys.readouterr().err
    assert main([*run, "--offload-dir", str(tmp_path / "off")]) == 0


@pytest.mark.parametrize(
    ("folder", "missing"), [("Z:\\models\\gemma", "Z:\\"), (r"\\server\share\models", "\\\\server\\share\\"), (r"a\b\c", "a")]
)
def test_the_first_missing_folder_is_found_where_a_drive_or_share_is_missing(folder, missing):
    assert first_missing(folder, ntpath) == missing


def test_a_hint_never_raises(tmp_path):
    (tmp_path / "cut.png").symlink_to(300 * "n")
    (tmp_path / "cat.png").touch()
    error = refused(read_image, tmp_path / "cta.png", match="no such file")
    assert error.hint == f"Did you mean {tmp_path}/cat.png?"


def test_a_hint_looks_at_few_entries_of_all_levels_together(tmp_path, monkeypatch):
    real, looked_at = os.scandir, []

    def entries(folder):
        with real(folder) as found:
            yield from (looked_at.append(one) or one for one in found)

    for name in "abcd":
        for below in "efgh":
            (tmp_path / name / below).mkdir(parents=True)
    monkeypatch.setattr(unreadable, "MOST_LOOKED_AT", 10)
    monkeypatch.setattr(os, "scandir", lambda folder: closing(entries(folder)))
    assert not path_hint(tmp_path / "zzz", holds="config.json", deeper=2, lists=True) and len(looked_at) == 10
