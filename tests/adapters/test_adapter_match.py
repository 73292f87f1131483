"""Every tensor is matched to a module or refused with all problems and both shapes."""

from __future__ import annotations

import dataclasses
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.adapter_files import PEFT_HEAD, TEXT, VISION, Shapes, embedding, match, pair, problems_of, q_proj, row, small_anatomy
from trimtab.adapters.adapter import describe

# Modules
from trimtab.checkpoint.anatomy import TensorRow


def test_a_wrapper_resolves_to_its_inner_linear_and_the_inner_path_is_direct(tmp_path: Path) -> None:
    outer = match(tmp_path, pair(VISION, 24, 12))
    inner = match(tmp_path, pair(f"{VISION}.linear", 24, 12))
    for spec in (outer, inner):
        (target,) = spec.targets
        assert (target.module_path, target.wrapped, target.part, target.kind) == (f"{VISION}.linear", True, "vision", "linear")
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
    assert all("KV-shared" in reason for _, reason in spec.no_effect) and spec.counts()["no_effect"] == 2
    assert len(spec.targets) == 1


@pytest.mark.parametrize(("path", "word"), [
    (f"{TEXT}.conv", "LoRA on Conv1d"), (f"{TEXT}.norm", "LoRA on RMSNorm"),
    (f"{TEXT}.layers.0.experts", "target_parameters names none of weight"),
    (f"{TEXT}.layers.0.experts.3.up_proj", "names no part of the stacked experts"),
])  # fmt: skip
def test_lora_on_other_kinds_of_modules_is_refused_by_name(path: str, word: str, tmp_path: Path) -> None:
    problems = problems_of(tmp_path, q_proj() | pair(path, 16, 16))
    assert problems and all(word in problem for problem in problems)


def test_fields_without_an_effect_are_noted(tmp_path: Path) -> None:
    for field, value in (("fan_in_fan_out", True), ("bias", "lora_only")):
        assert any(field in note for note in match(tmp_path, q_proj(), **{field: value}).notes)


# Shapes, halves and promises


LAYER = f"{PEFT_HEAD}{TEXT}.layers.0.self_attn"
A, B = (f"{LAYER}.q_proj.lora_{half}.weight" for half in "AB")
NORM, HEAD = f"{PEFT_HEAD}{TEXT}.norm.weight", f"{PEFT_HEAD}lm_head.weight"
Q = q_proj()


@pytest.mark.parametrize(("shapes", "config", "words"), [
    (pair(f"{TEXT}.layers.1.self_attn.k_proj", 16, 16), {}, ["nothing to apply"]),
    *((Q | {name: shape}, {}, [name, str(list(shape)), expected, "[16, 16]"]) for name, shape, expected in (
        (A, (4, 15), "[4, 16]"), (A, (8, 16), "[4, 16]"), (A, (64,), "[4, 16]"), (B, (17, 4), "[16, 4]"),
    )),
    ({B: Q[B]}, {}, ["lora_A missing"]), ({A: Q[A]}, {}, ["lora_B missing"]),
    (pair(f"{TEXT}.embed_tokens", 16, 50), {}, ["LoRA for a linear layer on", "Embedding"]),
    (embedding("lm_head"), {}, ["LoRA for an embedding on lm_head, a Linear"]),
    (Q | {f"{LAYER}.o_proj.weight": (16, 16)}, {"modules_to_save": ["o_proj"]}, ["no bias", "o_proj"]),
    (Q, {"modules_to_save": ["norm"]}, [f"names {TEXT}.norm"]),
    (Q | {f"{LAYER}.q_proj.weight": (16, 16)}, {"modules_to_save": ["language_model.layers.0.self_attn.q_proj"]},
     ["modules_to_save replaces"]),
    (Q | {f"{PEFT_HEAD}{TEXT}.layers.0.experts.weight": (4, 16, 16)}, {"modules_to_save": ["experts"]},
     ["saved fused experts", "merge_and_unload"]),
    (Q | {HEAD: (51, 16)}, {}, ["[51, 16]", "[50, 16]", "resized"]), (Q | {NORM: (16,)}, {}, ["modules_to_save does not name"]),
    # PEFT writes a saved module without "base_layer"; this spelling it would drop.
    (Q | {f"{PEFT_HEAD}{TEXT}.norm.base_layer.weight": (16,)}, {"modules_to_save": ["norm"]}, [f"{TEXT}.norm.base_layer.weight: "]),
    *((Q | {f"{LAYER}.o_proj.{middle}bias": (16,)}, {"bias": "all"}, [f"{LAYER}.o_proj.{middle}bias", "bias='all'"])
      for middle in ("", "base_layer.")),
])  # fmt: skip
def test_what_does_not_fit_the_model_is_named_with_what_is_expected(
    shapes: Shapes, config: dict[str, Any], words: list[str], tmp_path: Path
) -> None:
    (problem,) = problems_of(tmp_path, shapes, **config)
    assert all(word in problem for word in words), problem


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


def test_targets_come_in_the_order_of_the_model(tmp_path: Path) -> None:
    shapes = pair("lm_head", 50, 16) | q_proj(1) | q_proj(0)
    paths = [target.module_path for target in match(tmp_path, shapes).targets]
    assert paths == [f"{TEXT}.layers.0.self_attn.q_proj", f"{TEXT}.layers.1.self_attn.q_proj", "lm_head"]


def test_all_problems_of_one_file_come_at_once(tmp_path: Path) -> None:
    shapes = pair(f"{TEXT}.layers.0.mlp.up_proj", 31, 16) | q_proj(rank=8) | pair(f"{TEXT}.conv", 16, 16)
    shapes |= pair(f"{TEXT}.nowhere", 16, 16) | {"x.lora_diag": (4,)}
    assert len(problems_of(tmp_path, shapes)) == 1 + 2 + 1 + 2 + 1


# Embeddings and saved modules


def test_lora_on_an_embedding_is_matched(tmp_path: Path) -> None:
    (target,) = match(tmp_path, embedding()).targets
    assert (target.kind, target.rank, set(target.tensors)) == ("embedding", 4, {"A", "B"})
    assert target.tensors["A"].shape == (4, 50)


def test_a_saved_norm_and_head_are_matched(tmp_path: Path) -> None:
    shapes: Shapes = q_proj() | {f"{PEFT_HEAD}{TEXT}.norm.weight": (16,), f"{PEFT_HEAD}lm_head.weight": (50, 16)}
    spec = match(tmp_path, shapes, modules_to_save=["norm", "lm_head"])
    saved = [t for t in spec.targets if t.kind == "saved"]
    assert [(t.module_path, t.rank, set(t.tensors)) for t in saved] == [(f"{TEXT}.norm", 0, {"weight"}), ("lm_head", 0, {"weight"})]
    assert spec.counts()["targets"] == {"wrapped": 0, "linear": 1, "saved": 2, "total": 3}
    assert spec.nbytes("float32") == 2 * 4 * 16 * 4 + (16 + 50 * 16) * 2  # LoRA in float32, saved weights in bfloat16


def test_saved_keys_of_a_raw_state_dict_are_read(tmp_path: Path) -> None:
    shapes: Shapes = q_proj() | {f"{PEFT_HEAD}{TEXT}.norm.modules_to_save.default.weight": (16,)}
    assert match(tmp_path, shapes, modules_to_save=["norm"]).targets[-1].module_path == f"{TEXT}.norm"


def test_a_saved_wrapper_needs_its_weight_but_not_its_buffers(tmp_path: Path) -> None:
    shapes: Shapes = q_proj() | {f"{PEFT_HEAD}{VISION}.linear.weight": (24, 12)}
    names = ["vision_tower.encoder.layers.0.self_attn.q_proj"]
    saved = match(tmp_path, shapes, modules_to_save=names).targets[-1]
    assert (saved.module_path, saved.kind, set(saved.tensors)) == (f"{VISION}.linear", "saved", {"weight"})
    (problem,) = problems_of(tmp_path, q_proj(), modules_to_save=names)
    assert f"{VISION}.linear" in problem


def test_modules_to_save_that_the_model_does_not_have_are_no_problem(tmp_path: Path) -> None:
    assert match(tmp_path, q_proj(), modules_to_save=["classifier", "score"]).targets


@pytest.mark.parametrize("middle", ["", "base_layer."])
def test_an_embedding_written_next_to_lora_also_changes_its_tied_head(middle: str, tmp_path: Path) -> None:
    shapes: Shapes = q_proj() | {f"{PEFT_HEAD}{TEXT}.embed_tokens.{middle}weight": (50, 16)}
    saved = [t for t in match(tmp_path, shapes).targets if t.kind == "saved"]
    assert [t.module_path for t in saved] == [f"{TEXT}.embed_tokens", "lm_head"] and saved[0].tensors == saved[1].tensors
    alone = match(tmp_path, q_proj() | {f"{PEFT_HEAD}{TEXT}.embed_tokens.weight": (50, 16)}, modules_to_save=["embed_tokens"])
    assert [t.module_path for t in alone.targets if t.kind == "saved"] == [f"{TEXT}.embed_tokens"]


TYING: list[dict[str, Any]] = [
    {"target_modules": ["q_proj", "embed_tokens"]}, {"target_modules": ["model.embed_tokens"]},
    {"target_modules": ".*(q_proj|embed_tokens)"}, {"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]},
]  # fmt: skip
NOT_TYING: list[dict[str, Any]] = [
    {"target_modules": r".*\.(q_proj|embed_tokens)"}, {"target_modules": ["q_proj", "wte"]}, {"target_modules": "all-linear"},
]  # fmt: skip


@pytest.mark.parametrize("config", [*TYING, *NOT_TYING], ids=str)
def test_tying_that_the_file_does_not_keep_is_refused_where_peft_ties(tmp_path: Path, config: dict[str, Any]) -> None:
    """What PEFT ties, by its own condition: names of embeddings without their path."""
    peft = pytest.importorskip("peft")
    import torch
    from peft.tuners.tuners_utils import BaseTuner

    tied: list[str] = []
    tuner = SimpleNamespace(
        _get_module_names_tied_with_embedding=lambda: ["lm_head"], _add_modules_to_save_to_tie=lambda *_: tied.append("saved"),
        _add_targets_to_tie=lambda *_: tied.append("target"),
    )  # fmt: skip
    asked = peft.LoraConfig(**config, ensure_weight_tying=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        BaseTuner._check_tied_modules(tuner, torch.nn.Identity(), asked)
    assert bool(tied) == (config in TYING)
    if config in NOT_TYING:
        assert len(match(tmp_path, embedding(), ensure_weight_tying=True, **config).targets) == 1
        return
    problems = problems_of(tmp_path, embedding(), ensure_weight_tying=True, **config)
    assert any("ensure_weight_tying" in problem and "lm_head" in problem for problem in problems)


def test_tied_modules_that_both_change_are_matched(tmp_path: Path) -> None:
    shapes = embedding() | pair("lm_head", 50, 16)
    assert len(match(tmp_path, shapes, ensure_weight_tying=True, target_modules=["embed_tokens"]).targets) == 2


def test_modules_without_a_weight_are_tied_to_nothing(tmp_path: Path) -> None:
    anatomy = small_anatomy()
    gates = tuple(
        row(f"model.{name}", (3,), kind="other", tensors=(TensorRow(f"model.{name}.scale", (3,), "bfloat16", False, ()),))
        for name in ("gate", "other")
    )
    anatomy = dataclasses.replace(anatomy, rows=(*anatomy.rows, *gates))
    shapes: Shapes = q_proj() | {f"{PEFT_HEAD}model.gate.scale": (3,)}
    spec = match(tmp_path, shapes, anatomy, modules_to_save=["gate"], ensure_weight_tying=True)
    assert [target.module_path for target in spec.targets if target.kind == "saved"] == ["model.gate"]
