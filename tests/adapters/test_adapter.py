"""The report accounts for every tensor of an adapter, with and without a model."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.adapter_files import PEFT_HEAD, TEXT, VISION, big_adapter, e2b_anatomy, header_only, match, pair, q_proj, write_adapter
from trimtab.adapters.adapter import describe, match_adapter, read_adapter
from trimtab.adapters.config import Rules


def test_without_a_model_the_report_counts_by_names(tmp_path: Path) -> None:
    file = read_adapter(write_adapter(tmp_path, q_proj() | pair(VISION, 24, 12), target_modules=["q_proj"], use_rslora=True))
    report = describe(file, None)
    assert report["tensors"] == 4
    assert report["parts"] == {"language": 2, "vision": 2}
    assert report["dtypes"] == {"float32": 4}
    assert report["bytes"] == (4 * 16 * 2 + 4 * 12 + 24 * 4) * 4
    assert report["config"] == {"r": 4, "lora_alpha": 8, "use_rslora": True}
    assert report["target_modules"] == ["q_proj"]
    assert "targets" not in report
    json.dumps(report)


def test_the_report_tells_keys_and_target_modules_apart(tmp_path: Path) -> None:
    shapes = q_proj() | pair(f"{TEXT}.layers.0.mlp.up_proj", 32, 16) | pair(f"{VISION}.linear", 24, 12)
    spec = match(tmp_path, shapes, target_modules=["q_proj", "down_proj"])
    report = describe(spec.file, spec)
    assert [note for note in report["notes"] if "down_proj" in note and "no key" in note]
    (dropped,) = [note for note in report["notes"] if "does not name 1 of the 3" in note]
    assert f"{TEXT}.layers.0.mlp.up_proj" in dropped
    assert report["ranks"] == {"4": 3}
    assert report["scales"] == {"2": 3}
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
    assert report["tensors"] == 786
    assert report["parts"] == {"audio": 72, "language": 490, "vision": 224}
    assert report["targets"] == {"wrapped": 148, "linear": 205, "total": 353}
    assert report["no_effect"] == 80 == len(report["dropped"])
    assert [note for note in report["notes"] if note.startswith("80 tensors") and "KV-shared" in note]
    assert report["prefix"] == PEFT_HEAD
    assert report["remapped"] == []
    assert report["ranks"] == {"8": 353}
    assert report["scales"] == {"2": 353}
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
    assert counts["no_effect"] == shared * 4
    assert counts["tensors"] == sum(counts["parts"].values())


def test_reading_an_adapter_imports_no_torch(tmp_path: Path) -> None:
    write_adapter(tmp_path, q_proj())
    code = (
        "import sys; from trimtab.adapters.adapter import read_adapter, describe; "
        f"describe(read_adapter({str(tmp_path)!r}), None); "
        "sys.exit([name for name in ('torch', 'transformers', 'peft') if name in sys.modules] != [])"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
