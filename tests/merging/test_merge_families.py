"""Merged checkpoints equal PEFT's merge_and_unload on an unsplit model, for every variant of LoRA and every family."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests import long_runs, merged_models, pico
from tests.long_runs import crossed
from tests.merged_models import load, peft_merged, state_of, ulps
from tests.raised import raised
from trimtab.errors import AdapterError
from trimtab.merging import merge

VARIANTS = {
    "lora": {}, "rslora": {"rslora": True}, "dora": {"dora": True},
    "patterns": {"rank_pattern": {"q_proj": 2}, "alpha_pattern": {"v_proj": 3}}, "saved": {"modules_to_save": ["norm"]},
    "embeddings": {"embeddings": True}, "embeddings-dora": {"embeddings": True, "dora": True},
}  # fmt: skip
# PEFT computes the same float32 products and sums in the same order; only the norms of DoRA differ: a table's is added
# up by pieces and in float64 here, over all rows at once in float32 there (a relative error of a few 2^-24, on every
# value of the column).
FLOAT32_ULPS = {"embeddings-dora": 16}
TIED = {"gemma4", "gemma4_dense", "gemma4_moe", "gemma3", "gemma3n", "qwen3_vl", "mistral3", "qwen3"}


def compare(family: str, base: Path, adapter: Path, out: Path, *, limit: int) -> set[str]:
    """Compare with PEFT's merge; returns the names that are left out: what PEFT changes through a tie."""
    expected, found = peft_merged(base, adapter), state_of(out)
    assert set(found) == set(expected)
    left_out = {"lm_head.weight"} if family in TIED else set()
    differing = {name: ulps(found[name], expected[name]) for name in set(found) - left_out}
    assert {name: steps for name, steps in differing.items() if steps > limit} == {}
    return left_out


@pytest.mark.parametrize(
    ("variant", "dtype"), crossed(["lora", "rslora", "dora", "patterns", "saved"], ["float32", "bfloat16"], first=["dora"], rest=1)
)
def test_every_variant_equals_pefts_merge_bit_for_bit(variant: str, dtype: str, tmp_path: Path) -> None:
    # In bfloat16 too: PEFT holds the adapter in float32, and adding float32 to bfloat16 rounds once, as here.
    base = pico.build("gemma4", tmp_path / "base", dtype=dtype, shards=2)
    adapter = pico.adapter(base, tmp_path / "adapter", targets="all", **VARIANTS[variant])
    report = merge(base, tmp_path / "out", adapters={"a": adapter}, check=True)
    assert report.check is not None and report.check.passed and len(report.changed) == report.check.applied >= 72
    assert not report.added
    compare("gemma4", base, adapter, tmp_path / "out", limit=0)


@pytest.mark.parametrize("variant", ["embeddings", "embeddings-dora"])
@pytest.mark.parametrize("family", ["gemma4", "llama"])
def test_tables_equal_pefts_merge(family: str, variant: str, tmp_path: Path) -> None:
    base = pico.build(family, tmp_path / "base", dtype="float32", shards=2)
    adapter = pico.adapter(base, tmp_path / "adapter", **VARIANTS[variant])
    report = merge(base, tmp_path / "out", adapters={"a": adapter}, check=True)
    assert report.check is not None and report.check.passed
    compare(family, base, adapter, tmp_path / "out", limit=FLOAT32_ULPS.get(variant, 0))


OTHERS = [name for name in (*pico.FAMILIES, *pico._OTHERS) if name != "gemma4"]


@pytest.mark.parametrize("family", [name if name in long_runs.FIRST else long_runs.slow_on_cpu(name) for name in OTHERS])
def test_every_family_equals_pefts_merge_bit_for_bit(family: str, tmp_path: Path) -> None:
    base = pico.build(family, tmp_path / "base", dtype="float32", shards=2)
    adapter = pico.adapter(base, tmp_path / "adapter", targets="all")
    assert merge(base, tmp_path / "out", adapters={"a": adapter}).changed
    compare(family, base, adapter, tmp_path / "out", limit=0)


def test_a_bias_of_lora_is_added_to_the_bias_of_the_layer(tmp_path: Path) -> None:
    base = pico.build("qwen2_5_vl", tmp_path / "base", dtype="float32")
    adapter = biased_adapter(base, tmp_path / "adapter", ["q_proj", "k_proj", "v_proj"])
    report = merge(base, tmp_path / "out", adapters={"a": adapter}, check=True)
    assert report.check is not None and report.check.passed and sum(name.endswith("bias") for name in report.changed) == 6
    compare("qwen2_5_vl", base, adapter, tmp_path / "out", limit=0)


def biased_adapter(base: Path, folder: Path, targets: list[str]) -> Path:
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(r=4, lora_alpha=8, lora_bias=True, target_modules=rf".*language_model.*({'|'.join(targets)})")
    model = get_peft_model(load(base), config)
    pico._randomize(model, torch.Generator().manual_seed(0))
    with torch.no_grad():
        for path, parameter in model.named_parameters():
            if "lora_B" in path and path.endswith("bias"):
                parameter.normal_()
    model.save_pretrained(folder)
    return folder


def test_a_bias_without_a_bias_to_add_it_to_is_refused(tmp_path: Path) -> None:
    base = pico.build("llama", tmp_path / "base")
    adapter = pico.adapter(base, tmp_path / "adapter", bias=True)
    error = raised(AdapterError, merge, base, tmp_path / "out", adapters={"a": adapter})
    assert len(error.problems) == 14 and "lora_bias needs a bias" in error.problems[0]
    assert merged_models.left_over(tmp_path) == ["adapter", "base"]
