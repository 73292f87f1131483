"""Every known spelling of a key leads to its module; what is not LoRA is refused by name."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from tests.adapter_files import PEFT_HEAD, TEXT, Shapes, match, pair, problems_of, q_proj, row, small_anatomy
from trimtab.adapters.config import parse_key

# Spellings


@pytest.mark.parametrize(
    ("prefix", "label"),
    [
        (f"base_model.model.{TEXT}.", "base_model.model."), (f"{TEXT}.", ""),
        ("base_model.model.language_model.model.", "base_model.model.language_model.model. -> model.language_model."),
        (f"base_model.model.{TEXT}.model.", "base_model.model.model.language_model.model. -> model.language_model."),
        ("base_model.model.model.", "base_model.model.model. -> model.language_model."),
        ("base_model.model.language_model.", "base_model.model. -> model."),
        ("base_model.model.", "base_model.model. -> model.language_model."),
        ("base_model.model.model.model.language_model.", "base_model.model.model.model. -> model."),
        ("language_model.model.", "language_model.model. -> model.language_model."), ("model.", "model. -> model.language_model."),
        ("language_model.", " -> model."), ("", " -> model.language_model."),
    ],
)  # fmt: skip
def test_every_known_spelling_leads_to_the_same_module(prefix: str, label: str, tmp_path: Path) -> None:
    shapes = pair("layers.0.self_attn.q_proj", 16, 16, head=prefix) | pair("layers.1.mlp.up_proj", 32, 16, head=prefix)
    spec = match(tmp_path, shapes)
    assert spec.prefix == label
    assert [t.module_path for t in spec.targets] == [
        f"{TEXT}.layers.0.self_attn.q_proj", f"{TEXT}.layers.1.mlp.up_proj"
    ]  # fmt: skip


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
    assert "'base_model.model.'" in problem
    assert "-> model.language_model.'" in problem


def test_a_typo_is_refused_with_the_near_name_and_both_shapes(tmp_path: Path) -> None:
    problems = problems_of(tmp_path, q_proj() | pair(f"{TEXT}.layers.0.self_attn.qq_proj", 16, 16))
    assert len(problems) == 2
    assert "layers.0.self_attn.qq_proj" in problems[0]
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
    assert target.use_dora
    assert target.tensors["magnitude"].shape == (16,)


@pytest.mark.parametrize(
    ("key", "word"),
    [
        ("x.lora_A.bias", "lora_A"), ("x.lora_A", "lora_A"), ("x.lora_A.a.b.weight", "name parts"),
        ("x.lora_diag", "KaSA"), ("x.lora_tomorrow.weight", "unknown kind"),
        ("x.token_adapter.trainable_tokens_delta", "trainable tokens"),
        ("x.hada_w1_a", "LoHa"), ("weight", "no module"),
    ],
)  # fmt: skip
def test_a_key_that_is_not_lora_is_refused_by_name(key: str, word: str, tmp_path: Path) -> None:
    assert word in parse_key(key).problem
    (problem,) = problems_of(tmp_path, q_proj() | {key: (4, 16)})
    assert problem.startswith(f"{key}: ")
    assert word in problem
