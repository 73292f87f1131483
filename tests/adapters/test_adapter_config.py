"""What an adapter's files say: each field known, harmless or refused; rank and scale by PEFT's rules; every spelling of a key."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn

from tests.adapter_files import (
    PEFT_HEAD,
    TEXT,
    VISION,
    Shapes,
    match,
    pair,
    problems_of,
    q_proj,
    refused,
    row,
    small_anatomy,
    write_adapter,
)
from tests.examples import examples
from trimtab.adapters import config as adapter_config
from trimtab.adapters.adapter import describe, read_adapter
from trimtab.adapters.config import FIELDS, parse_key
from trimtab.checkpoint.names import Matcher

# The configuration


@pytest.mark.parametrize("kind", ["LOHA", "ADALORA", "IA3", "PROMPT_TUNING", "VERA", "OFT", "lora", None])
def test_another_method_is_refused_by_name(kind: str | None, tmp_path: Path) -> None:
    (problem,) = refused(write_adapter(tmp_path, q_proj(), peft_type=kind))
    assert "peft_type" in problem and (kind is None or repr(kind) in problem)


REFUSED_VALUES: dict[str, Any] = {
    "megatron_config": {"tp": 2}, "trainable_token_indices": [1, 2], "alora_invocation_tokens": [5],
    "use_qalora": True, "layer_replication": [[0, 2]],
    "use_bdlora": {"nblocks": 2}, "arrow_config": {"top_k": 1}, "kasa_config": {"beta": 0.1},
}  # fmt: skip


def test_the_list_of_refused_fields_is_tested_in_full() -> None:
    assert set(REFUSED_VALUES) == set(adapter_config.REFUSED)


@pytest.mark.parametrize("field", REFUSED_VALUES)
def test_a_field_that_changes_the_output_is_refused_by_name(field: str, tmp_path: Path) -> None:
    (problem,) = refused(write_adapter(tmp_path, q_proj(), **{field: REFUSED_VALUES[field]}))
    assert problem.startswith(f"{field}=") and adapter_config.REFUSED[field] in problem
    assert ("merge_and_unload" in problem) == (field == "trainable_token_indices")  # what makes the same answers
    read_adapter(write_adapter(tmp_path, q_proj(), **{field: None}))


def test_an_unknown_field_is_refused_when_it_is_on_and_noted_when_it_is_off(tmp_path: Path) -> None:
    (problem,) = refused(write_adapter(tmp_path, q_proj(), use_tomorrow={"a": 1}))
    assert problem.startswith("use_tomorrow=") and "unknown" in problem
    assert any("use_tomorrow" in note for note in match(tmp_path, q_proj(), use_tomorrow=None).notes)


@pytest.mark.parametrize("init", ["pissa", "pissa_niter_16", "olora", "corda", "loftq", "lora_ga", "tomorrow"])
def test_an_initialisation_that_changed_the_base_is_refused(init: str, tmp_path: Path) -> None:
    (problem,) = refused(write_adapter(tmp_path, q_proj(), init_lora_weights=init))
    assert problem.startswith(f"init_lora_weights='{init}'") and ("changed base weight" in problem) == (init != "tomorrow")


@pytest.mark.parametrize("init", [True, False, None, "gaussian", "eva", "orthogonal", "mica"])
def test_an_initialisation_that_leaves_the_base_alone_is_read(init: Any, tmp_path: Path) -> None:
    read_adapter(write_adapter(tmp_path, q_proj(), init_lora_weights=init, eva_config={"rho": 2.0}))


def test_all_problems_of_a_configuration_come_at_once(tmp_path: Path) -> None:
    assert len(refused(write_adapter(tmp_path, q_proj(), r=0, use_qalora=True, use_tomorrow=1, bias="x"))) == 4


def test_every_field_of_the_installed_peft_is_classified() -> None:
    peft = pytest.importorskip("peft")
    assert {field.name for field in dataclasses.fields(peft.LoraConfig)} <= adapter_config.FIELDS


# Rank and scale


@pytest.mark.parametrize(
    ("config", "rank", "scale"),
    [
        ({}, 4, 2.0),
        ({"use_rslora": True}, 4, 4.0),
        ({"alpha_pattern": {"q_proj": 3}}, 4, 0.75),
        ({"alpha_pattern": {"proj": 3}}, 4, 2.0),  # a pattern names whole segments
        ({"alpha_pattern": {r"layers\.0\.self_attn\..*": 12}}, 4, 3.0),
        ({"alpha_pattern": {"^model.language_model.layers.0.self_attn.q_proj": 12}}, 4, 3.0),
        ({"alpha_pattern": {"^layers.0.self_attn.q_proj": 12}}, 4, 2.0),
        ({"alpha_pattern": {"self_attn.q_proj": 4, "q_proj": 100}}, 4, 1.0),  # the first, not the longest
        ({"alpha_pattern": {"q_proj": 100, "self_attn.q_proj": 4}}, 4, 25.0),
        ({"rank_pattern": {"q_proj": 2}}, 2, 4.0),
        ({"rank_pattern": {"q_proj": 2}, "alpha_pattern": {"q_proj": 1}, "use_rslora": True}, 2, 1 / math.sqrt(2)),
    ],
)
def test_rank_and_scale_follow_pefts_rules(config: dict[str, Any], rank: int, scale: float, tmp_path: Path) -> None:
    (target,) = match(tmp_path, q_proj(rank=rank), **config).targets
    assert (target.rank, target.scale) == (rank, scale)


PATHS = st.lists(st.sampled_from(["model", "layers", "0", "1", "q_proj", "k_proj", "mlp"]), min_size=1, max_size=5)


@settings(max_examples=examples(200), deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(PATHS, st.dictionaries(PATHS.map(".".join), st.integers(1, 9), max_size=4))
def test_patterns_select_as_the_installed_peft_does(path: list[str], patterns: dict[str, int]) -> None:
    other = pytest.importorskip("peft.utils.other")
    name = ".".join(path)
    assert Matcher([name]).first_of(patterns).get(name, name) == other.get_pattern_key(patterns.keys(), name)


def test_a_pattern_is_matched_in_the_adapters_own_spelling_first(tmp_path: Path) -> None:
    shapes = pair("model.layers.0.self_attn.q_proj", 16, 16)
    spec = match(tmp_path, shapes, alpha_pattern={f"model.layers.0.self_attn.{name}_proj": 4 for name in "qk"})
    assert [target.scale for target in spec.targets] == [1.0] and not spec.notes
    # The spelling of the model serves too, for configurations that were edited to fit.
    (target,) = match(tmp_path, shapes, alpha_pattern={"language_model.layers.0.self_attn.q_proj": 12}).targets
    assert target.scale == 3.0


def test_a_pattern_that_says_two_things_about_one_module_is_refused(tmp_path: Path) -> None:
    shapes = pair(VISION, 24, 12)
    patterns = {"q_proj": 4, "linear": 12}
    (problem,) = problems_of(tmp_path, shapes, alpha_pattern=patterns)
    assert "alpha_pattern" in problem and f"'{VISION}.linear'" in problem


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
    assert spec.targets[0].scale == 2.0 and field not in describe(spec.file, spec)["config"]


@pytest.mark.parametrize(("config", "field"), [
    ({"r": 0}, "r="), ({"r": True}, "r="), ({"r": 2.5}, "r="), ({"lora_alpha": "8"}, "lora_alpha="),
    ({"rank_pattern": {"q_proj": -1}}, "rank_pattern['q_proj']"), ({"rank_pattern": [1]}, "rank_pattern="),
    ({"alpha_pattern": {"q_proj": None}}, "alpha_pattern['q_proj']"),
    ({"alpha_pattern": {"(": 4}}, "alpha_pattern['(']"),
    ({"bias": "some"}, "bias="), ({"use_dora": 1}, "use_dora="), ({"use_rslora": "no"}, "use_rslora="),
    ({"modules_to_save": "lm_head"}, "modules_to_save="), ({"modules_to_save": [""]}, "modules_to_save="),
    ({"lora_bias": True, "use_dora": True}, "lora_bias and use_dora"),
    ({"lora_alpha": HUGE}, "lora_alpha="), ({"r": HUGE}, "r="), ({"alpha_pattern": {"q_proj": HUGE}}, "alpha_pattern["),
    ({"rank_pattern": {"q_proj": HUGE}}, "rank_pattern["), ({"rank_pattern": {f"a{{{10**20}}}": 4}}, "rank_pattern["),
    ({"alpha_pattern": {"(" * 3000 + ")" * 3000: 4}}, "alpha_pattern["), ({"target_modules": 5}, "target_modules="),
    ({"target_modules": True}, "target_modules="), ({"target_modules": 1.5}, "target_modules="),
    ({"target_modules": ["q_proj", 5]}, "target_modules="), ({"target_modules": {"q": 1}}, "target_modules="),
    ({"exclude_modules": 5}, "exclude_modules="), ({"use_dora": 0}, "use_dora="),
], ids=str)  # fmt: skip
def test_a_value_of_no_meaning_type_or_size_is_refused_by_its_field(config: dict[str, Any], field: str, tmp_path: Path) -> None:
    (problem,) = refused(write_adapter(tmp_path, q_proj(), **config))
    assert problem.startswith(field) and len(problem) < 400


def test_a_pattern_that_python_cannot_compile_names_no_module(tmp_path: Path):
    with_text = match(tmp_path / "a", q_proj(), target_modules="(" * 40 + "q_proj" + ")" * 40)
    assert with_text.targets[0].module_path == f"{TEXT}.layers.0.self_attn.q_proj"


# Spellings


@pytest.mark.parametrize(("prefix", "label"), [
    (f"base_model.model.{TEXT}.", "base_model.model."), (f"{TEXT}.", ""),
    ("base_model.model.language_model.model.", "base_model.model.language_model.model. -> model.language_model."),
    (f"base_model.model.{TEXT}.model.", "base_model.model.model.language_model.model. -> model.language_model."),
    ("base_model.model.model.", "base_model.model.model. -> model.language_model."),
    ("base_model.model.language_model.", "base_model.model. -> model."),
    ("base_model.model.", "base_model.model. -> model.language_model."),
    ("base_model.model.model.model.language_model.", "base_model.model.model.model. -> model."),
    ("language_model.model.", "language_model.model. -> model.language_model."), ("model.", "model. -> model.language_model."),
    ("language_model.", " -> model."), ("", " -> model.language_model."),
])  # fmt: skip
def test_every_known_spelling_leads_to_the_same_module(prefix: str, label: str, tmp_path: Path) -> None:
    shapes = pair("layers.0.self_attn.q_proj", 16, 16, head=prefix) | pair("layers.1.mlp.up_proj", 32, 16, head=prefix)
    spec = match(tmp_path, shapes)
    assert spec.prefix == label
    assert [t.module_path for t in spec.targets] == [f"{TEXT}.layers.0.self_attn.q_proj", f"{TEXT}.layers.1.mlp.up_proj"]


def test_towers_and_head_move_with_the_text_model_in_the_older_layout(tmp_path: Path) -> None:
    shapes = pair("language_model.model.layers.0.self_attn.q_proj", 16, 16)
    shapes |= pair("vision_tower.encoder.layers.0.mlp.up_proj", 24, 12) | pair("language_model.lm_head", 50, 16)
    spec = match(tmp_path, shapes)
    assert [t.part for t in spec.targets] == ["language", "vision", "head"]
    assert [t.module_path for t in spec.targets][1:] == ["model.vision_tower.encoder.layers.0.mlp.up_proj", "lm_head"]


@pytest.mark.parametrize("prefix", ["model.language_model.", "language_model.model."])
def test_a_multimodal_spelling_fits_a_text_only_model(prefix: str, tmp_path: Path) -> None:
    anatomy = dataclasses.replace(small_anatomy(), rows=(row("model.layers.0.self_attn.q_proj", (16, 16)),))
    (target,) = match(tmp_path, pair(f"{prefix}layers.0.self_attn.q_proj", 16, 16), anatomy).targets
    assert target.module_path == "model.layers.0.self_attn.q_proj"


def test_keys_in_two_spellings_are_refused_and_listed(tmp_path: Path) -> None:
    shapes = q_proj() | pair("model.layers.1.mlp.up_proj", 32, 16)
    problems = problems_of(tmp_path, shapes)
    assert len(problems) == 2
    for problem, half, shape in zip(problems, "AB", ("[4, 16]", "[32, 4]"), strict=True):
        assert problem.startswith(f"base_model.model.model.layers.1.mlp.up_proj.lora_{half}.weight {shape}")
        assert f"{TEXT}.layers.1.mlp.up_proj [32, 16]" in problem


def test_keys_that_fit_in_two_ways_are_refused(tmp_path: Path) -> None:
    twice = dataclasses.replace(small_anatomy(), rows=(row("model.layers.0.q", (16, 16)), row(f"{TEXT}.layers.0.q", (16, 16))))
    (problem,) = problems_of(tmp_path, pair("model.layers.0.q", 16, 16), twice)
    assert "'base_model.model.'" in problem and "-> model.language_model.'" in problem


def test_a_typo_is_refused_with_the_near_name_and_both_shapes(tmp_path: Path) -> None:
    problems = problems_of(tmp_path, q_proj() | pair(f"{TEXT}.layers.0.self_attn.qq_proj", 16, 16))
    assert len(problems) == 2 and "layers.0.self_attn.qq_proj" in problems[0]
    assert f"{TEXT}.layers.0.self_attn.q_proj [16, 16]" in problems[0]


def test_an_adapter_of_another_model_lists_every_key(tmp_path: Path) -> None:
    shapes = {}
    for layer in range(30):
        shapes |= pair(f"transformer.h.{layer}.attn", 16, 16)
    assert len(problems_of(tmp_path, shapes)) == 60


# Keys


@pytest.mark.parametrize("name", ["default", "medical"])
def test_keys_with_the_adapters_name_inside_are_read(name: str, tmp_path: Path) -> None:
    path = f"{PEFT_HEAD}{TEXT}.layers.0.self_attn.q_proj"
    shapes: Shapes = {f"{path}.lora_A.{name}.weight": (4, 16), f"{path}.lora_B.{name}.weight": (16, 4)}
    shapes |= {f"{path}.lora_magnitude_vector.{name}.weight": (16,)}
    (target,) = match(tmp_path, shapes, use_dora=True).targets
    assert set(target.tensors) == {"A", "B", "magnitude"}


def test_a_file_with_two_adapters_is_refused(tmp_path: Path) -> None:
    path = f"{PEFT_HEAD}{TEXT}.layers.0.self_attn.q_proj"
    shapes: Shapes = {f"{path}.lora_A.one.weight": (4, 16), f"{path}.lora_B.two.weight": (16, 4)}
    assert "several adapters (one, two)" in problems_of(tmp_path, shapes)[0]


@pytest.mark.parametrize("key", ["lora_magnitude_vector", "lora_magnitude_vector.weight"])
def test_the_magnitude_of_dora_is_read_in_both_spellings(key: str, tmp_path: Path) -> None:
    path = f"{PEFT_HEAD}{TEXT}.layers.0.self_attn.q_proj"
    (target,) = match(tmp_path, q_proj() | {f"{path}.{key}": (16,)}, use_dora=True).targets
    assert target.use_dora and target.tensors["magnitude"].shape == (16,)


@pytest.mark.parametrize(("key", "word"), [
    ("x.lora_A.bias", "lora_A"), ("x.lora_A", "lora_A"), ("x.lora_A.a.b.weight", "name parts"),
    ("x.lora_diag", "KaSA"), ("x.lora_tomorrow.weight", "unknown kind"),
    ("x.token_adapter.trainable_tokens_delta", "trainable tokens"),
    ("x.hada_w1_a", "LoHa"), ("weight", "no module"),
])  # fmt: skip
def test_a_key_that_is_not_lora_is_refused_by_name(key: str, word: str, tmp_path: Path) -> None:
    assert word in parse_key(key).problem
    (problem,) = problems_of(tmp_path, q_proj() | {key: (4, 16)})
    assert problem.startswith(f"{key}: ") and word in problem
