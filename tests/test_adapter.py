"""Every tensor of an adapter is matched to a module or named with the reason; everything else is refused by name."""

from __future__ import annotations

import dataclasses
import json
import math
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from trimtab.checkpoint import adapter_config
from trimtab.checkpoint.adapter import AdapterFile, AdapterSpec, describe, match_adapter, read_adapter
from trimtab.checkpoint.adapter_keys import parse_key
from trimtab.checkpoint.anatomy import Anatomy, ModuleRow, Part, TensorRow
from trimtab.errors import AdapterError, CheckpointError

PEFT_HEAD = "base_model.model."
CODES = {"float32": ("F32", 4), "bfloat16": ("BF16", 2), "int64": ("I64", 8)}
Shapes = dict[str, tuple[int, ...]]


def write_adapter(folder: Path, shapes: Shapes, *, dtype: str = "float32", **config: Any) -> Path:
    """Write a folder as PEFT does, tensors full of zeros."""
    folder.mkdir(parents=True, exist_ok=True)
    code, size = CODES[dtype]
    header, end = {}, 0
    for name, shape in shapes.items():
        start, end = end, end + math.prod(shape) * size
        header[name] = {"dtype": code, "shape": list(shape), "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    (folder / "adapter_model.safetensors").write_bytes(struct.pack("<Q", len(text)) + text + bytes(end))
    (folder / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": 4, "lora_alpha": 8, **config}))
    return folder


def row(
    path: str, shape: tuple[int, ...], *, kind: str = "linear", part: Part = "language", **options: Any
) -> ModuleRow:
    names = {"linear": "Linear", "embedding": "Embedding", "experts": "MixtralExperts", "other": "RMSNorm"}
    tied = options.pop("tied_to", None)
    name = options.pop("class_name", names[kind])
    tensors = options.pop("tensors", None) or (TensorRow(f"{path}.weight", shape, "bfloat16", False, (), tied),)
    return ModuleRow(path, name, part, kind, path, tensors, **options)  # type: ignore[arg-type]


TEXT = "model.language_model"
VISION = "model.vision_tower.encoder.layers.0.self_attn.q_proj"


def small_anatomy() -> Anatomy:
    """A multimodal model in small: two text layers of which the second shares keys and values, a wrapped vision linear."""
    rows = [row(f"{TEXT}.embed_tokens", (50, 16), kind="embedding")]
    for layer in (0, 1):
        for name in ("q_proj", "k_proj", "v_proj") if layer == 0 else ("q_proj",):
            rows.append(row(f"{TEXT}.layers.{layer}.self_attn.{name}", (16, 16)))
        rows.append(row(f"{TEXT}.layers.{layer}.mlp.up_proj", (32, 16)))
    biased = f"{TEXT}.layers.0.self_attn.o_proj"
    tensors = tuple(TensorRow(f"{biased}.{name}", shape, "bfloat16", False, ()) for name, shape in
                    (("weight", (16, 16)), ("bias", (16,))))  # fmt: skip
    rows += [
        row(biased, (16, 16), tensors=tensors),
        row(f"{TEXT}.layers.0.experts", (4, 16, 16), kind="experts"),
        row(f"{TEXT}.norm", (16,), kind="other"),
        row(f"{TEXT}.conv", (16, 16, 3), kind="other", class_name="Conv1d"),
        row(VISION, (), kind="other", part="vision", class_name="Gemma4ClippableLinear", wraps=f"{VISION}.linear",
            tensors=(TensorRow(f"{VISION}.input_min", (), "bfloat16", True, ()),)),
        row(f"{VISION}.linear", (24, 12), part="vision"),
        row("model.vision_tower.encoder.layers.0.mlp.up_proj", (24, 12), part="vision"),
        row("lm_head", (50, 16), part="head", tied_to=f"{TEXT}.embed_tokens.weight"),
    ]  # fmt: skip
    missing = tuple(f"{TEXT}.layers.1.self_attn.{name}" for name in ("k_proj", "v_proj"))
    return Anatomy("Small", "small", "bfloat16", tuple(rows), (), 16, 50, missing)


def pair(path: str, out_size: int, in_size: int, rank: int = 4, head: str = PEFT_HEAD) -> Shapes:
    return {f"{head}{path}.lora_A.weight": (rank, in_size), f"{head}{path}.lora_B.weight": (out_size, rank)}


def q_proj(layer: int = 0, **options: Any) -> Shapes:
    return pair(f"{TEXT}.layers.{layer}.self_attn.q_proj", 16, 16, **options)


def match(folder: Path, shapes: Shapes, anatomy: Anatomy | None = None, **config: Any) -> AdapterSpec:
    return match_adapter(read_adapter(write_adapter(folder, shapes, **config)), anatomy or small_anatomy())


def problems_of(folder: Path, shapes: Shapes, anatomy: Anatomy | None = None, **config: Any) -> tuple[str, ...]:
    with pytest.raises(AdapterError) as caught:
        match(folder, shapes, anatomy, **config)
    assert caught.value.path == str(folder)
    return caught.value.problems


# Reading the folder


def test_a_sound_folder_gives_configuration_and_header(tmp_path: Path) -> None:
    found = read_adapter(write_adapter(tmp_path, q_proj(), dtype="bfloat16", use_rslora=True))
    assert found.folder == tmp_path and found.file == tmp_path / "adapter_model.safetensors"
    assert found.config["use_rslora"] is True
    name = f"{PEFT_HEAD}{TEXT}.layers.0.self_attn.q_proj.lora_A.weight"
    assert found.tensors[name].shape == (4, 16) and found.tensors[name].dtype == "bfloat16"


def refused(path: Path) -> tuple[str, ...]:
    with pytest.raises(AdapterError) as caught:
        read_adapter(path)
    return caught.value.problems


def test_a_folder_that_does_not_exist_is_refused(tmp_path: Path) -> None:
    assert refused(tmp_path / "none") == ("no such folder",)


def test_a_path_to_the_file_itself_asks_for_the_folder(tmp_path: Path) -> None:
    write_adapter(tmp_path, q_proj())
    assert "folder" in refused(tmp_path / "adapter_model.safetensors")[0]


@pytest.mark.parametrize("name", ["adapter_config.json", "adapter_model.safetensors"])
def test_a_missing_file_is_named(name: str, tmp_path: Path) -> None:
    (write_adapter(tmp_path, q_proj()) / name).unlink()
    assert refused(tmp_path) == (f"{name} is missing",)


@pytest.mark.parametrize(
    ("name", "word"),
    [
        ("adapter_model.bin", "pickle"),
        ("adapters.safetensors", "mlx-lm"),
        ("pytorch_lora_weights.safetensors", "diffusers"),
    ],
)
def test_another_format_is_refused_by_name_with_the_next_step(name: str, word: str, tmp_path: Path) -> None:
    (write_adapter(tmp_path, q_proj()) / "adapter_model.safetensors").rename(tmp_path / name)
    first, second = refused(tmp_path)
    assert first == "adapter_model.safetensors is missing"
    assert second.startswith(name) and word in second


def test_adapters_in_folders_inside_are_pointed_to(tmp_path: Path) -> None:
    write_adapter(tmp_path / "medical", q_proj())
    assert any("'medical'" in problem for problem in refused(tmp_path))


@pytest.mark.parametrize("text", ["{", '{"r": NaN}', "[]", "", '"LORA"', '{"a": ' + "[" * 100_000])
def test_a_configuration_that_is_no_json_object_is_refused(text: str, tmp_path: Path) -> None:
    (write_adapter(tmp_path, q_proj()) / "adapter_config.json").write_text(text)
    assert len(refused(tmp_path)) == 1 and "adapter_config.json" in refused(tmp_path)[0]


def test_a_configuration_that_is_not_utf8_is_refused(tmp_path: Path) -> None:
    (write_adapter(tmp_path, q_proj()) / "adapter_config.json").write_bytes(b'{"peft_type": "\xff"}')
    assert "not valid JSON" in refused(tmp_path)[0]


def test_a_broken_header_is_a_checkpoint_error(tmp_path: Path) -> None:
    (write_adapter(tmp_path, q_proj()) / "adapter_model.safetensors").write_bytes(b"\x10")
    with pytest.raises(CheckpointError):
        read_adapter(tmp_path)


def test_a_file_without_tensors_is_refused(tmp_path: Path) -> None:
    assert refused(write_adapter(tmp_path, {})) == ("adapter_model.safetensors holds no tensor",)


# The configuration


@pytest.mark.parametrize("kind", ["LOHA", "ADALORA", "IA3", "PROMPT_TUNING", "VERA", "OFT", "lora", None])
def test_another_method_is_refused_by_name(kind: str | None, tmp_path: Path) -> None:
    (problem,) = refused(write_adapter(tmp_path, q_proj(), peft_type=kind))
    assert "peft_type" in problem and (kind is None or repr(kind) in problem)


REFUSED_VALUES: dict[str, Any] = {
    "megatron_config": {"tp": 2}, "trainable_token_indices": [1, 2], "alora_invocation_tokens": [5],
    "use_qalora": True, "layer_replication": [[0, 2]], "target_parameters": ["experts.gate_up_proj"],
    "use_bdlora": {"nblocks": 2}, "arrow_config": {"top_k": 1}, "kasa_config": {"beta": 0.1},
}  # fmt: skip


def test_the_list_of_refused_fields_is_tested_in_full() -> None:
    assert set(REFUSED_VALUES) == set(adapter_config.REFUSED)


@pytest.mark.parametrize("field", REFUSED_VALUES)
def test_a_field_that_changes_the_output_is_refused_by_name(field: str, tmp_path: Path) -> None:
    (problem,) = refused(write_adapter(tmp_path, q_proj(), **{field: REFUSED_VALUES[field]}))
    assert problem.startswith(f"{field}=") and adapter_config.REFUSED[field] in problem
    read_adapter(write_adapter(tmp_path, q_proj(), **{field: None}))


def test_an_unknown_field_is_refused_when_it_is_on_and_noted_when_it_is_off(tmp_path: Path) -> None:
    (problem,) = refused(write_adapter(tmp_path, q_proj(), use_tomorrow={"a": 1}))
    assert problem.startswith("use_tomorrow=") and "unknown" in problem
    assert any("use_tomorrow" in note for note in match(tmp_path, q_proj(), use_tomorrow=None).notes)


@pytest.mark.parametrize("init", ["pissa", "pissa_niter_16", "olora", "corda", "loftq", "lora_ga", "tomorrow"])
def test_an_initialisation_that_changed_the_base_is_refused(init: str, tmp_path: Path) -> None:
    (problem,) = refused(write_adapter(tmp_path, q_proj(), init_lora_weights=init))
    assert problem.startswith(f"init_lora_weights='{init}'")


@pytest.mark.parametrize("init", [True, False, None, "gaussian", "eva", "orthogonal", "mica"])
def test_an_initialisation_that_leaves_the_base_alone_is_read(init: Any, tmp_path: Path) -> None:
    read_adapter(write_adapter(tmp_path, q_proj(), init_lora_weights=init, eva_config={"rho": 2.0}))


@pytest.mark.parametrize(
    ("config", "field"),
    [
        ({"r": 0}, "r="), ({"r": True}, "r="), ({"r": 2.5}, "r="), ({"lora_alpha": "8"}, "lora_alpha="),
        ({"rank_pattern": {"q_proj": -1}}, "rank_pattern['q_proj']"), ({"rank_pattern": [1]}, "rank_pattern="),
        ({"alpha_pattern": {"q_proj": None}}, "alpha_pattern['q_proj']"), ({"alpha_pattern": {"(": 4}}, "alpha_pattern['(']"),
        ({"bias": "some"}, "bias="), ({"use_dora": 1}, "use_dora="), ({"use_rslora": "no"}, "use_rslora="),
        ({"modules_to_save": "lm_head"}, "modules_to_save="), ({"modules_to_save": [""]}, "modules_to_save="),
        ({"lora_bias": True, "use_dora": True}, "lora_bias and use_dora"),
    ],
)  # fmt: skip
def test_a_value_that_means_nothing_is_refused(config: dict[str, Any], field: str, tmp_path: Path) -> None:
    (problem,) = refused(write_adapter(tmp_path, q_proj(), **config))
    assert problem.startswith(field)


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


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(PATHS, st.dictionaries(PATHS.map(".".join), st.integers(1, 9), max_size=4))
def test_patterns_select_as_the_installed_peft_does(path: list[str], patterns: dict[str, int]) -> None:
    other = pytest.importorskip("peft.utils.other")
    name = ".".join(path)
    found = adapter_config.pattern_value(patterns, name)
    assert (found[0] if found else name) == other.get_pattern_key(patterns.keys(), name)


def test_a_pattern_is_matched_in_the_adapters_own_spelling_first(tmp_path: Path) -> None:
    shapes = pair("model.layers.0.self_attn.q_proj", 16, 16)
    (target,) = match(tmp_path, shapes, alpha_pattern={"model.layers.0.self_attn.q_proj": 4}).targets
    assert target.scale == 1.0
    # The spelling of the model serves too, for configurations that were edited to fit.
    (target,) = match(tmp_path, shapes, alpha_pattern={"language_model.layers.0.self_attn.q_proj": 12}).targets
    assert target.scale == 3.0


def test_a_pattern_that_says_two_things_about_one_module_is_refused(tmp_path: Path) -> None:
    shapes = pair(VISION, 24, 12)
    patterns = {"q_proj": 4, "linear": 12}
    (problem,) = problems_of(tmp_path, shapes, alpha_pattern=patterns)
    assert "alpha_pattern" in problem and f"'{VISION}.linear'" in problem


# Spellings


@pytest.mark.parametrize(
    ("prefix", "label"),
    [
        (f"base_model.model.{TEXT}.", "base_model.model."),
        (f"{TEXT}.", ""),
        ("base_model.model.language_model.model.", "base_model.model.language_model.model. -> model.language_model."),
        (f"base_model.model.{TEXT}.model.", "base_model.model.model.language_model.model. -> model.language_model."),
        ("base_model.model.model.", "base_model.model.model. -> model.language_model."),
        ("base_model.model.language_model.", "base_model.model. -> model."),
        ("base_model.model.", "base_model.model. -> model.language_model."),
        ("base_model.model.model.model.language_model.", "base_model.model.model.model. -> model."),
        ("language_model.model.", "language_model.model. -> model.language_model."),
        ("model.", "model. -> model.language_model."),
        ("language_model.", " -> model."),
        ("", " -> model.language_model."),
    ],
)
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
    twice = dataclasses.replace(
        small_anatomy(), rows=(row("model.layers.0.q", (16, 16)), row(f"{TEXT}.layers.0.q", (16, 16)))
    )
    (problem,) = problems_of(tmp_path, pair("model.layers.0.q", 16, 16), twice)
    assert "'base_model.model.'" in problem and "-> model.language_model.'" in problem


def test_a_typo_is_refused_with_the_near_name_and_both_shapes(tmp_path: Path) -> None:
    problems = problems_of(tmp_path, q_proj() | pair(f"{TEXT}.layers.0.self_attn.qq_proj", 16, 16))
    assert len(problems) == 2
    assert "layers.0.self_attn.qq_proj" in problems[0] and f"{TEXT}.layers.0.self_attn.q_proj [16, 16]" in problems[0]


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


@pytest.mark.parametrize(
    ("key", "word"),
    [
        ("x.lora_A.bias", "lora_A"), ("x.lora_A", "lora_A"), ("x.lora_A.a.b.weight", "name parts"),
        ("x.lora_diag", "KaSA"), ("x.lora_tomorrow.weight", "unknown kind"), ("x.token_adapter.trainable_tokens_delta", "token"),
        ("x.original_module.weight", "save_pretrained"), ("x.hada_w1_a", "LoHa"), ("weight", "no module"),
    ],
)  # fmt: skip
def test_a_key_that_is_not_lora_is_refused_by_name(key: str, word: str, tmp_path: Path) -> None:
    assert word in parse_key(key).problem
    (problem,) = problems_of(tmp_path, q_proj() | {key: (4, 16)})
    assert problem.startswith(f"{key}: ") and word in problem


# Modules


def test_a_wrapper_resolves_to_its_inner_linear_and_the_inner_path_is_direct(tmp_path: Path) -> None:
    outer = match(tmp_path, pair(VISION, 24, 12))
    inner = match(tmp_path, pair(f"{VISION}.linear", 24, 12))
    for spec in (outer, inner):
        (target,) = spec.targets
        assert (target.module_path, target.wrapped, target.part, target.kind) == (
            f"{VISION}.linear",
            True,
            "vision",
            "linear",
        )
        assert spec.counts()["targets"] == {"wrapped": 1, "linear": 0, "total": 1}
    assert describe(outer.file, outer)["remapped"] == [{"from": PEFT_HEAD + VISION, "to": f"{VISION}.linear"}]
    assert describe(inner.file, inner)["remapped"] == []


def test_both_paths_of_a_wrapper_at_once_are_refused(tmp_path: Path) -> None:
    problems = problems_of(tmp_path, pair(VISION, 24, 12) | pair(f"{VISION}.linear", 24, 12))
    assert len(problems) == 2 and all("same tensor" in problem for problem in problems)


def test_projections_of_kv_shared_layers_have_no_effect_and_are_named(tmp_path: Path) -> None:
    shapes = q_proj(1) | pair(f"{TEXT}.layers.1.self_attn.k_proj", 16, 16)
    spec = match(tmp_path, shapes)
    assert [key for key, _ in spec.no_effect] == [name for name in shapes if "k_proj" in name]
    assert all("KV-shared" in reason for _, reason in spec.no_effect)
    assert spec.counts()["no_effect"] == 2 and len(spec.targets) == 1


def test_an_adapter_without_any_effect_is_refused(tmp_path: Path) -> None:
    (problem,) = problems_of(tmp_path, pair(f"{TEXT}.layers.1.self_attn.k_proj", 16, 16))
    assert problem.startswith("nothing to apply")


@pytest.mark.parametrize(
    ("path", "word"),
    [
        (f"{TEXT}.conv", "Conv1d"), (f"{TEXT}.norm", "RMSNorm"), (f"{TEXT}.layers.0.experts", "fused experts"),
        (f"{TEXT}.layers.0.experts.3.up_proj", "fused experts"), (f"{TEXT}.layers.0.experts.base_layer", "fused experts"),
    ],
)  # fmt: skip
def test_lora_on_other_kinds_of_modules_is_refused_by_name(path: str, word: str, tmp_path: Path) -> None:
    problems = problems_of(tmp_path, q_proj() | pair(path, 16, 16))
    assert problems and all(f"LoRA on {word}" in problem for problem in problems)


def test_lora_on_a_conv1d_of_gpt2_is_refused_by_name(tmp_path: Path) -> None:
    anatomy = small_anatomy()
    rows = (*anatomy.rows, row("model.c_attn", (16, 48), kind="other", class_name="Conv1D"))
    shapes = q_proj() | pair("model.c_attn", 48, 16)
    (problem,) = problems_of(tmp_path, shapes, dataclasses.replace(anatomy, rows=rows), fan_in_fan_out=True)
    assert "LoRA on Conv1D" in problem


def test_fan_in_fan_out_on_linear_modules_is_noted(tmp_path: Path) -> None:
    spec = match(tmp_path, q_proj(), fan_in_fan_out=True)
    assert any("fan_in_fan_out" in note for note in spec.notes)


# Shapes, halves and promises


@pytest.mark.parametrize(
    ("half", "shape", "expected"),
    [("A", (4, 15), "[4, 16]"), ("A", (8, 16), "[4, 16]"), ("A", (64,), "[4, 16]"), ("B", (17, 4), "[16, 4]")],
)
def test_a_wrong_shape_is_refused_with_both_shapes(
    half: str, shape: tuple[int, ...], expected: str, tmp_path: Path
) -> None:
    shapes = q_proj()
    name = next(key for key in shapes if f"lora_{half}" in key)
    (problem,) = problems_of(tmp_path, shapes | {name: shape})
    assert problem.startswith(name) and str(list(shape)) in problem and expected in problem and "[16, 16]" in problem


@pytest.mark.parametrize("half", ["lora_A", "lora_B"])
def test_one_half_of_a_pair_is_refused(half: str, tmp_path: Path) -> None:
    shapes = {name: shape for name, shape in q_proj().items() if half not in name}
    (problem,) = problems_of(tmp_path, shapes)
    assert problem.endswith(f"{half} missing")


@pytest.mark.parametrize(
    ("option", "key", "shape"), [("use_dora", "lora_magnitude_vector", (16,)), ("lora_bias", "lora_B.bias", (16,))]
)
def test_tensors_and_configuration_must_agree(option: str, key: str, shape: tuple[int, ...], tmp_path: Path) -> None:
    name = f"{PEFT_HEAD}{TEXT}.layers.0.self_attn.q_proj.{key}"
    (problem,) = problems_of(tmp_path, q_proj(), **{option: True})
    assert f"{option} is true" in problem and "missing" in problem
    (problem,) = problems_of(tmp_path, q_proj() | {name: shape})
    assert problem.startswith(name) and f"{option} is false" in problem
    (problem,) = problems_of(tmp_path, q_proj() | {name: (15,)}, **{option: True})
    assert problem.startswith(name) and "[15]" in problem and "[16]" in problem
    (target,) = match(tmp_path, q_proj() | {name: shape}, **{option: True}).targets
    assert (target.use_dora, target.has_bias) == (option == "use_dora", option == "lora_bias")


def test_whole_numbers_as_lora_weights_are_refused(tmp_path: Path) -> None:
    problems = problems_of(tmp_path, q_proj(), dtype="int64")
    assert len(problems) == 2 and "int64" in problems[0]


def test_all_problems_of_one_file_come_at_once(tmp_path: Path) -> None:
    shapes = pair(f"{TEXT}.layers.0.mlp.up_proj", 31, 16) | q_proj(rank=8) | pair(f"{TEXT}.conv", 16, 16)
    shapes |= pair(f"{TEXT}.nowhere", 16, 16) | {"x.lora_diag": (4,)}
    assert len(problems_of(tmp_path, shapes)) == 1 + 2 + 1 + 2 + 1


# Embeddings and saved modules


def embedding(path: str = f"{TEXT}.embed_tokens") -> Shapes:
    return {f"{PEFT_HEAD}{path}.lora_embedding_A": (4, 50), f"{PEFT_HEAD}{path}.lora_embedding_B": (16, 4)}


def test_lora_on_an_embedding_is_matched(tmp_path: Path) -> None:
    (target,) = match(tmp_path, embedding()).targets
    assert (target.kind, target.rank, set(target.tensors)) == ("embedding", 4, {"A", "B"})
    assert target.tensors["A"].shape == (4, 50)


def test_linear_lora_on_an_embedding_and_the_reverse_are_refused(tmp_path: Path) -> None:
    (problem,) = problems_of(tmp_path, pair(f"{TEXT}.embed_tokens", 16, 50))
    assert "LoRA for a linear layer on" in problem and "Embedding" in problem
    (problem,) = problems_of(tmp_path, embedding("lm_head"))
    assert "LoRA for an embedding on lm_head, a Linear" in problem


def test_a_saved_norm_and_head_are_matched(tmp_path: Path) -> None:
    shapes: Shapes = q_proj() | {f"{PEFT_HEAD}{TEXT}.norm.weight": (16,), f"{PEFT_HEAD}lm_head.weight": (50, 16)}
    spec = match(tmp_path, shapes, modules_to_save=["norm", "lm_head"])
    saved = [t for t in spec.targets if t.kind == "saved"]
    assert [(t.module_path, t.rank, set(t.tensors)) for t in saved] == [
        (f"{TEXT}.norm", 0, {"weight"}), ("lm_head", 0, {"weight"})
    ]  # fmt: skip
    assert spec.counts()["targets"] == {"wrapped": 0, "linear": 1, "saved": 2, "total": 3}
    assert spec.nbytes("float32") == 2 * 4 * 16 * 4 + (16 + 50 * 16) * 2  # LoRA in float32, saved weights in bfloat16


def test_saved_keys_of_a_raw_state_dict_are_read(tmp_path: Path) -> None:
    shapes: Shapes = q_proj() | {f"{PEFT_HEAD}{TEXT}.norm.modules_to_save.default.weight": (16,)}
    assert match(tmp_path, shapes, modules_to_save=["norm"]).targets[-1].module_path == f"{TEXT}.norm"


def test_a_saved_module_with_a_lost_parameter_is_refused(tmp_path: Path) -> None:
    shapes: Shapes = q_proj() | {f"{PEFT_HEAD}{TEXT}.layers.0.self_attn.o_proj.weight": (16, 16)}
    (problem,) = problems_of(tmp_path, shapes, modules_to_save=["o_proj"])
    assert "no bias" in problem and "o_proj" in problem
    (problem,) = problems_of(tmp_path, q_proj(), modules_to_save=["norm"])
    assert f"names {TEXT}.norm" in problem


def test_modules_to_save_that_the_model_does_not_have_are_no_problem(tmp_path: Path) -> None:
    assert match(tmp_path, q_proj(), modules_to_save=["classifier", "score"]).targets


def test_lora_on_a_module_that_is_also_saved_is_refused(tmp_path: Path) -> None:
    shapes = q_proj() | {f"{PEFT_HEAD}{TEXT}.layers.0.self_attn.q_proj.weight": (16, 16)}
    (problem,) = problems_of(tmp_path, shapes, modules_to_save=["language_model.layers.0.self_attn.q_proj"])
    assert "modules_to_save replaces" in problem


def test_saved_fused_experts_are_refused_by_name(tmp_path: Path) -> None:
    shapes: Shapes = q_proj() | {f"{PEFT_HEAD}{TEXT}.layers.0.experts.weight": (4, 16, 16)}
    (problem,) = problems_of(tmp_path, shapes, modules_to_save=["experts"])
    assert "saved fused experts" in problem


@pytest.mark.parametrize("middle", ["", "base_layer."])
def test_an_embedding_written_next_to_lora_also_changes_its_tied_head(middle: str, tmp_path: Path) -> None:
    shapes: Shapes = q_proj() | {f"{PEFT_HEAD}{TEXT}.embed_tokens.{middle}weight": (50, 16)}
    saved = [t for t in match(tmp_path, shapes).targets if t.kind == "saved"]
    assert [t.module_path for t in saved] == [f"{TEXT}.embed_tokens", "lm_head"]
    assert saved[0].tensors == saved[1].tensors
    alone = match(
        tmp_path, q_proj() | {f"{PEFT_HEAD}{TEXT}.embed_tokens.weight": (50, 16)}, modules_to_save=["embed_tokens"]
    )
    assert [t.module_path for t in alone.targets if t.kind == "saved"] == [f"{TEXT}.embed_tokens"]


def test_a_resized_vocabulary_is_refused_with_both_shapes(tmp_path: Path) -> None:
    (problem,) = problems_of(tmp_path, q_proj() | {f"{PEFT_HEAD}lm_head.weight": (51, 16)})
    assert "[51, 16]" in problem and "[50, 16]" in problem and "resized" in problem


def test_a_full_weight_that_nothing_announces_is_refused(tmp_path: Path) -> None:
    (problem,) = problems_of(tmp_path, q_proj() | {f"{PEFT_HEAD}{TEXT}.norm.weight": (16,)})
    assert "modules_to_save does not name" in problem


@pytest.mark.parametrize("middle", ["", "base_layer."])
def test_biases_of_the_base_are_refused_by_name(middle: str, tmp_path: Path) -> None:
    name = f"{PEFT_HEAD}{TEXT}.layers.0.self_attn.o_proj.{middle}bias"
    (problem,) = problems_of(tmp_path, q_proj() | {name: (16,)}, bias="all")
    assert problem.startswith(name) and "bias='all'" in problem
    assert any("bias" in note for note in match(tmp_path, q_proj(), bias="lora_only").notes)


def test_tying_that_the_file_does_not_keep_is_refused(tmp_path: Path) -> None:
    (problem,) = problems_of(tmp_path, embedding(), ensure_weight_tying=True)
    assert "ensure_weight_tying" in problem and "lm_head" in problem
    assert len(match(tmp_path, embedding() | pair("lm_head", 50, 16), ensure_weight_tying=True).targets) == 2


# The report


def test_without_a_model_the_report_counts_by_names(tmp_path: Path) -> None:
    file = read_adapter(
        write_adapter(tmp_path, q_proj() | pair(VISION, 24, 12), target_modules=["q_proj"], use_rslora=True)
    )
    report = describe(file, None)
    assert report["tensors"] == 4 and report["parts"] == {"language": 2, "vision": 2}
    assert report["dtypes"] == {"float32": 4} and report["bytes"] == (4 * 16 * 2 + 4 * 12 + 24 * 4) * 4
    assert report["config"] == {"r": 4, "lora_alpha": 8, "use_rslora": True} and report["target_modules"] == ["q_proj"]
    assert "targets" not in report
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


def e2b_anatomy() -> Anatomy:
    """Gemma 4 E2B's modules that LoRA reaches: 35 text layers (20 share keys and values), 16 vision and 12 audio layers."""
    rows, missing = [row(f"{TEXT}.embed_tokens", (262144, 1536), kind="embedding")], []
    for layer in range(35):
        path, full = f"{TEXT}.layers.{layer}", layer % 5 == 4
        head, mlp = (512 if full else 256), (6144 if layer < 15 else 12288)
        for name, shape in (("q_proj", (8 * head, 1536)), ("k_proj", (head, 1536)), ("v_proj", (head, 1536)),
                            ("o_proj", (1536, 8 * head))):  # fmt: skip
            if layer >= 15 and name in ("k_proj", "v_proj"):
                missing.append(f"{path}.self_attn.{name}")
            else:
                rows.append(row(f"{path}.self_attn.{name}", shape))
        for name, shape in (("gate_proj", (mlp, 1536)), ("up_proj", (mlp, 1536)), ("down_proj", (1536, mlp))):
            rows.append(row(f"{path}.mlp.{name}", shape))
    for path, part, width in _towers():
        rows.append(row(path, (), kind="other", part=part, class_name="Gemma4ClippableLinear", wraps=f"{path}.linear",
                        tensors=(TensorRow(f"{path}.input_min", (), "bfloat16", True, ()),)))  # fmt: skip
        rows.append(row(f"{path}.linear", (width, width), part=part))
    return Anatomy(
        "Gemma4ForConditionalGeneration", "gemma4", "bfloat16", tuple(rows), (), 1536, 262144, tuple(missing)
    )


def _towers() -> list[tuple[str, Part, int]]:
    found: list[tuple[str, Part, int]] = []
    for layer in range(16):
        path = f"model.vision_tower.encoder.layers.{layer}"
        found += [(f"{path}.self_attn.{name}_proj", "vision", 768) for name in "qkvo"]
        found += [(f"{path}.mlp.{name}_proj", "vision", 768) for name in ("gate", "up", "down")]
    for layer in range(12):
        found += [(f"model.audio_tower.layers.{layer}.self_attn.{name}_proj", "audio", 1024) for name in "qkv"]
    return found


def big_adapter() -> Shapes:
    """The 786 tensors of a multimodal E2B adapter: towers by their inner path, k/v of KV-shared layers included."""
    shapes: Shapes = {}
    sizes = {r.module_path: r.weight.shape for r in e2b_anatomy().rows if r.weight is not None}
    for layer in range(35):
        head = 512 if layer % 5 == 4 else 256
        for name in ("q", "k", "v", "o"):
            path = f"{TEXT}.layers.{layer}.self_attn.{name}_proj"
            shapes |= pair(path, *sizes.get(path, (head, 1536)), rank=8)
        for name in ("gate", "up", "down"):
            path = f"{TEXT}.layers.{layer}.mlp.{name}_proj"
            shapes |= pair(path, *sizes[path], rank=8)
    for path, _, width in _towers():
        shapes |= pair(f"{path}.linear", width, width, rank=8)
    return shapes


def header_only(folder: Path, shapes: Shapes, **config: Any) -> AdapterFile:
    """Return what `read_adapter` gives, without writing 100 MB of zeros."""
    from trimtab.checkpoint.headers import TensorEntry

    entries = {
        name: TensorEntry(name, "bfloat16", shape, folder / "adapter_model.safetensors", 0, 2 * math.prod(shape))
        for name, shape in shapes.items()
    }
    return AdapterFile(folder, {"peft_type": "LORA", **config}, entries, folder / "adapter_model.safetensors")


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
    assert report["prefix"] == PEFT_HEAD and report["remapped"] == []
    assert report["ranks"] == {"8": 353} and report["scales"] == {"2": 353}
    assert not [note for note in report["notes"] if "target_modules" in note]
    json.dumps(report)


def test_reading_an_adapter_imports_no_torch(tmp_path: Path) -> None:
    write_adapter(tmp_path, q_proj())
    code = (
        "import sys; from trimtab.checkpoint.adapter import read_adapter, describe; "
        f"describe(read_adapter({str(tmp_path)!r}), None); "
        "sys.exit([name for name in ('torch', 'transformers', 'peft') if name in sys.modules] != [])"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
