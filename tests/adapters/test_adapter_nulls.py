"""Nulls, and values of the wrong type or size, in adapter_config.json: what PEFT takes is taken, all else is refused by name."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.adapter_files import TEXT, match, q_proj, refused, write_adapter
from trimtab.adapters.adapter import describe
from trimtab.adapters.config import FIELDS

peft = pytest.importorskip("peft")
SWITCHES = ("use_dora", "use_rslora", "lora_bias", "fan_in_fan_out", "ensure_weight_tying")
HUGE = 10**400


class OneLinear(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q_proj = nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.q_proj(x)


def stock(folder: Path, config: dict[str, Any]) -> tuple[Any, ...] | None:
    """Return what PEFT makes of a configuration: rank, scale, and the adapter's tensors with their shapes; None if it fails."""
    folder.mkdir()
    (folder / "adapter_config.json").write_text(json.dumps(config))
    try:
        model = peft.get_peft_model(OneLinear(), peft.PeftConfig.from_pretrained(str(folder)))
    except Exception:
        return None
    layer = model.base_model.model.q_proj
    tensors = {name: tuple(value.shape) for name, value in model.state_dict().items() if "lora_" in name}
    return layer.r["default"], layer.scaling["default"], tensors


def whole(**changes: Any) -> dict[str, Any]:
    """Return a configuration with every field that PEFT writes."""
    config = peft.LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj"]).to_dict()
    return json.loads(json.dumps(config, default=list)) | changes


@pytest.mark.parametrize("field", sorted(field.name for field in dataclasses.fields(peft.LoraConfig)))
def test_null_is_read_as_peft_reads_it(field: str, tmp_path: Path):
    assert field in FIELDS
    plain, null = stock(tmp_path / "plain", whole()), stock(tmp_path / "null", whole(**{field: None}))
    folder = tmp_path / "ours"
    if null is None:  # PEFT fails: what it does with the field is not known, so nothing is asked of it here
        return
    assert null == plain
    (target,) = match(folder, q_proj(), **whole(**{field: None})).targets
    assert (target.rank, target.scale, target.use_dora, target.has_bias) == (*plain[:2], False, False)


@pytest.mark.parametrize("field", SWITCHES)
def test_a_switch_that_is_null_is_off(field: str, tmp_path: Path):
    spec = match(tmp_path / "a", q_proj(), **{field: None})
    assert spec.targets[0].scale == 2.0
    assert field not in describe(spec.file, spec)["config"]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"lora_alpha": HUGE}, "lora_alpha="), ({"r": HUGE}, "r="), ({"alpha_pattern": {"q_proj": HUGE}}, "alpha_pattern["),
        ({"rank_pattern": {"q_proj": HUGE}}, "rank_pattern["), ({"rank_pattern": {f"a{{{10**20}}}": 4}}, "rank_pattern["),
        ({"alpha_pattern": {"(" * 3000 + ")" * 3000: 4}}, "alpha_pattern["), ({"target_modules": 5}, "target_modules="),
        ({"target_modules": True}, "target_modules="), ({"target_modules": 1.5}, "target_modules="),
        ({"target_modules": ["q_proj", 5]}, "target_modules="), ({"target_modules": {"q": 1}}, "target_modules="),
        ({"exclude_modules": 5}, "exclude_modules="), ({"use_dora": 0}, "use_dora="),
    ],
    ids=str,
)  # fmt: skip
def test_a_value_of_the_wrong_type_or_size_is_refused_by_its_field(change: dict[str, Any], words: str, tmp_path: Path):
    (problem,) = refused(write_adapter(tmp_path, q_proj(), **change))
    assert problem.startswith(words)
    assert len(problem) < 400


@pytest.mark.parametrize(
    "text", ['{"lora_alpha": 1e400}', '{"lora_alpha": ' + "9" * 5000 + "}", '{"a": ' * 3000 + "1" + "}" * 3000]
)
def test_numbers_and_depth_that_json_may_not_have_are_refused(text: str, tmp_path: Path):
    (write_adapter(tmp_path, q_proj()) / "adapter_config.json").write_text(text)
    assert "not JSON" in refused(tmp_path)[0]


def test_a_pattern_that_python_cannot_compile_names_no_module(tmp_path: Path):
    with_text = match(tmp_path / "a", q_proj(), target_modules="(" * 40 + "q_proj" + ")" * 40)
    assert with_text.targets[0].module_path == f"{TEXT}.layers.0.self_attn.q_proj"
