"""The folder of an adapter: read strictly or refused, every tensor accounted for, its tokenizer compared with the model's."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import trimtab
import trimtab.demo as demo
from tests.adapter_files import (
    PEFT_HEAD,
    TEXT,
    VISION,
    big_adapter,
    e2b_anatomy,
    header_only,
    match,
    pair,
    q_proj,
    refused,
    write_adapter,
)
from tests.raised import raised
from trimtab.adapters.adapter import describe, match_adapter, read_adapter
from trimtab.adapters.config import Rules
from trimtab.adapters.file import check_vocabulary
from trimtab.errors import AdapterError, CheckpointError, DeviceError, TrimtabError


def test_without_a_model_the_report_counts_by_names(tmp_path: Path) -> None:
    file = read_adapter(write_adapter(tmp_path, q_proj() | pair(VISION, 24, 12), target_modules=["q_proj"], use_rslora=True))
    report = describe(file, None)
    assert report["tensors"] == 4 and report["parts"] == {"language": 2, "vision": 2}
    assert report["dtypes"] == {"float32": 4} and report["bytes"] == (4 * 16 * 2 + 4 * 12 + 24 * 4) * 4
    assert report["config"] == {"r": 4, "lora_alpha": 8, "use_rslora": True}
    assert report["target_modules"] == ["q_proj"] and "targets" not in report
    json.dumps(report)


def test_the_report_tells_keys_and_target_modules_apart(tmp_path: Path) -> None:
    shapes = q_proj() | pair(f"{TEXT}.layers.0.mlp.up_proj", 32, 16) | pair(f"{VISION}.linear", 24, 12)
    spec = match(tmp_path, shapes, target_modules=["q_proj", "down_proj"])
    report = describe(spec.file, spec)
    assert [note for note in report["notes"] if "down_proj" in note and "no key" in note]
    (dropped,) = [note for note in report["notes"] if "does not name 1 of the 3" in note]
    assert f"{TEXT}.layers.0.mlp.up_proj" in dropped
    assert report["ranks"] == {"4": 3} and report["scales"] == {"2": 3}
    json.dumps(report)


@pytest.mark.parametrize(
    "config",
    [
        {"exclude_modules": ["q_proj"]}, {"exclude_modules": r".*layers\.0.*"}, {"layers_to_transform": 1},
        {"layers_to_transform": [0, 3]}, {"layers_to_transform": [0], "layers_pattern": "layers"}, {"layers_to_transform": []},
        {"layers_to_transform": [1], "layers_pattern": ["blocks", "h"]},
        {"target_modules": r".*q_proj"},
    ],
    ids=str,
)  # fmt: skip
def test_fields_that_leave_modules_out_are_read_as_peft_reads_them(config: dict[str, object], tmp_path: Path) -> None:
    from peft import LoraConfig
    from peft.tuners.tuners_utils import check_target_module_exists

    chosen = {"target_modules": ["q_proj", "up_proj"], **config}
    peft_config = LoraConfig(**chosen)
    for head in ("model.layers", "model.language_model.layers", "model.blocks", "layers", "h"):
        for place in (0, 1, 3):
            for tail in ("self_attn.q_proj", "mlp.experts.0.up_proj", "o_proj", "q_proj"):
                path = f"{head}.{place}.{tail}"
                targeted = Rules(tmp_path, chosen, [path]).targeted
                assert bool(targeted) == bool(check_target_module_exists(peft_config, path)), path
    spec = match(tmp_path, q_proj(), target_modules=["q_proj"], exclude_modules=["q_proj"])
    assert any("PEFT would drop" in note for note in describe(spec.file, spec)["notes"])


def test_the_multimodal_e2b_adapter_is_accounted_for_tensor_by_tensor(tmp_path: Path) -> None:
    targets = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    file = header_only(tmp_path, big_adapter(), r=8, lora_alpha=16, target_modules=targets)
    assert describe(file, None)["tensors"] == 786
    report = describe(file, match_adapter(file, e2b_anatomy()))
    assert report["tensors"] == 786 and report["parts"] == {"audio": 72, "language": 490, "vision": 224}
    assert report["targets"] == {"wrapped": 148, "linear": 205, "total": 353}
    assert report["no_effect"] == 80 == len(report["dropped"])
    assert [note for note in report["notes"] if note.startswith("80 tensors") and "KV-shared" in note]
    assert report["prefix"] == PEFT_HEAD and report["remapped"] == []
    assert report["ranks"] == {"8": 353} and report["scales"] == {"2": 353}
    assert not [note for note in report["notes"] if "target_modules" in note]
    json.dumps(report)


@pytest.mark.parametrize("size", ["e2b", "e4b"])
def test_the_report_agrees_with_the_model_that_transformers_builds(size: str, tmp_path: Path) -> None:
    from tests import pico
    from trimtab.checkpoint.folder import read_checkpoint
    from trimtab.engine.loader.transformers_model import read_anatomy

    file = read_adapter(pico.big_adapter_header(tmp_path / "adapter", size))
    checkpoint = read_checkpoint(pico.e_series(size, tmp_path / "model"))
    counts = match_adapter(file, read_anatomy(checkpoint, quant="nf4-dq", dtype="bfloat16")).counts()
    # Layers x 7 projections, less k and v of the KV-shared layers, which count twice: an A and a B each.
    layers, shared = {"e2b": (35, 20), "e4b": (42, 18)}[size]
    linear = layers * 7 - 2 * shared
    assert counts["targets"] == {"wrapped": 148, "linear": linear, "total": 148 + linear}
    assert counts["parts"] == {"audio": 72, "language": layers * 14, "vision": 224}
    assert counts["no_effect"] == shared * 4 and counts["tensors"] == sum(counts["parts"].values())


def test_reading_an_adapter_imports_no_torch(tmp_path: Path) -> None:
    write_adapter(tmp_path, q_proj())
    code = (
        "import sys; from trimtab.adapters.adapter import read_adapter, describe; "
        f"describe(read_adapter({str(tmp_path)!r}), None); "
        "sys.exit([name for name in ('torch', 'transformers', 'peft') if name in sys.modules] != [])"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_a_sound_folder_gives_configuration_and_header(tmp_path: Path) -> None:
    found = read_adapter(write_adapter(tmp_path, q_proj(), dtype="bfloat16", use_rslora=True))
    assert found.folder == tmp_path and found.file == tmp_path / "adapter_model.safetensors"
    assert found.config["use_rslora"] is True
    name = f"{PEFT_HEAD}{TEXT}.layers.0.self_attn.q_proj.lora_A.weight"
    assert found.tensors[name].shape == (4, 16) and found.tensors[name].dtype == "bfloat16"


def test_a_folder_that_does_not_exist_is_refused(tmp_path: Path) -> None:
    assert refused(tmp_path / "none") == ("no such folder",)


def test_a_path_to_the_file_itself_asks_for_the_folder(tmp_path: Path) -> None:
    write_adapter(tmp_path, q_proj())
    assert "folder" in refused(tmp_path / "adapter_model.safetensors")[0]


@pytest.mark.parametrize("name", ["adapter_config.json", "adapter_model.safetensors"])
def test_a_missing_file_is_named(name: str, tmp_path: Path) -> None:
    (write_adapter(tmp_path, q_proj()) / name).unlink()
    assert refused(tmp_path) == (f"{name} is missing",)


@pytest.mark.parametrize(("name", "word"), [
    ("adapter_model.bin", "pickle"), ("adapters.safetensors", "mlx-lm"), ("pytorch_lora_weights.safetensors", "diffusers"),
])  # fmt: skip
def test_another_format_is_refused_by_name_with_the_next_step(name: str, word: str, tmp_path: Path) -> None:
    (write_adapter(tmp_path, q_proj()) / "adapter_model.safetensors").rename(tmp_path / name)
    first, second = refused(tmp_path)
    assert first == "adapter_model.safetensors is missing"
    assert second.startswith(name) and word in second


def test_adapters_in_folders_inside_are_pointed_to(tmp_path: Path) -> None:
    write_adapter(tmp_path / "medical", q_proj())
    assert any("'medical'" in problem for problem in refused(tmp_path))


@pytest.mark.parametrize("text", [
    b"{", b'{"r": NaN}', b"[]", b"", b'"LORA"', b'{"a": ' + b"[" * 100_000, b'{"peft_type": "\xff"}', b'{"lora_alpha": 1e400}',
    b'{"lora_alpha": ' + b"9" * 5000 + b"}", b'{"a": ' * 3000 + b"1" + b"}" * 3000,
], ids=lambda text: text[:20])  # fmt: skip
def test_a_configuration_that_is_no_json_object_is_refused(text: bytes, tmp_path: Path) -> None:
    (write_adapter(tmp_path, q_proj()) / "adapter_config.json").write_bytes(text)
    (problem,) = refused(tmp_path)
    assert problem.startswith(
        "adapter_config.json is not JSON" if text[:1] == b"{" or not text else "adapter_config.json must hold"
    )


def test_a_broken_header_is_a_checkpoint_error(tmp_path: Path) -> None:
    (write_adapter(tmp_path, q_proj()) / "adapter_model.safetensors").write_bytes(b"\x10")
    with pytest.raises(CheckpointError):
        read_adapter(tmp_path)


def test_a_file_without_tensors_is_refused(tmp_path: Path) -> None:
    assert refused(write_adapter(tmp_path, {})) == ("adapter_model.safetensors has no tensors",)


def test_a_hint_stands_on_a_line_of_its_own(tmp_path: Path) -> None:
    error = AdapterError(tmp_path, ["no file"], hint="Train it again")
    assert str(error).splitlines() == [f"{tmp_path}: 1 problem", "  - no file", "Train it again"]
    assert error.hint == "Train it again"


def test_an_error_of_another_process_is_raised_as_it_was() -> None:
    there = AdapterError("a", ["x", "y"], hint="z")
    here = TrimtabError.from_dict(json.loads(json.dumps(there.to_dict())))
    assert type(here) is AdapterError and str(here) == str(there) and vars(here) == vars(there)
    assert isinstance(TrimtabError.from_dict({"class": "WorkerDiedError", "message": "gone", "fields": {}}), DeviceError)


def write(folder, vocabulary):
    folder.mkdir(exist_ok=True)
    (folder / "tokenizer.json").write_text(json.dumps({"model": {"vocab": vocabulary}}), encoding="utf-8")
    return folder


WORDS = {f"word{number}": number for number in range(100)}
SAME = {
    "equal": WORDS, "more tokens": WORDS | {"<new>": 100}, "fewer": {word: at for word, at in WORDS.items() if at < 50},
    "reserved ones renamed": {(f"<own{at}>" if at >= 92 else word): at for word, at in WORDS.items()},
    "another order": dict(reversed(WORDS.items())), "unigram": [[word, -1.0] for word in WORDS],
}  # fmt: skip


@pytest.mark.parametrize("theirs", SAME)
def test_a_trainers_copy_is_the_models_tokenizer(theirs, tmp_path):
    check_vocabulary(write(tmp_path / "adapter", SAME[theirs]), write(tmp_path / "model", WORDS))


def test_a_tokenizer_of_equal_size_and_other_texts_is_named(tmp_path):
    other = {word: (at + 1) % 100 for word, at in WORDS.items()}
    error = raised(AdapterError, lambda: check_vocabulary(write(tmp_path / "adapter", other), write(tmp_path / "model", WORDS)))
    assert error.path == str(tmp_path / "adapter")
    assert error.problems == (
        "tokenizer.json: 100 of 100 token ids have other texts than in the model's tokenizer (id 0: 'word99' here, 'word0' there)",
    )


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"model": {"vocab": 3}}', '{"model": {"vocab": {"a": "b"}}}'])
def test_a_file_that_says_nothing_is_no_error(text, tmp_path):
    model, adapter = write(tmp_path / "model", WORDS), write(tmp_path / "adapter", WORDS)
    (adapter / "tokenizer.json").write_text(text)
    check_vocabulary(adapter, model)
    (adapter / "tokenizer.json").unlink()
    check_vocabulary(adapter, model)


def test_plan_merge_and_verify_refuse_it(tmp_path):
    adapter = shutil.copytree(demo.ADAPTERS["style"], tmp_path / "style")
    known = json.loads((demo.BASE / "tokenizer.json").read_text("utf-8"))
    size = len(known["model"]["vocab"])
    known["model"]["vocab"] = {text: (number + 7) % size for text, number in known["model"]["vocab"].items()}
    (adapter / "tokenizer.json").write_text(json.dumps(known), encoding="utf-8")
    for call in (
        lambda: trimtab.plan(demo.BASE, adapters={"a": adapter}, device="cpu"),
        lambda: trimtab.merge(demo.BASE, tmp_path / "out", adapters={"a": adapter}),
        lambda: trimtab.verify(demo.BASE, adapters={"a": adapter}, against="base", isolated=False),
        lambda: trimtab.inspect(adapter, model=demo.BASE),
    ):
        with pytest.raises(AdapterError, match="token ids have other texts"):
            call()
    shutil.copy(demo.BASE / "tokenizer.json", adapter / "tokenizer.json")
    trimtab.plan(demo.BASE, adapters={"a": adapter}, device="cpu")
