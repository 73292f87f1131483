"""Every field of a configuration is known, harmless or refused; rank and scale follow PEFT's rules."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.adapter_files import VISION, match, pair, problems_of, q_proj, refused, write_adapter
from tests.examples import examples
from trimtab.adapters import config as adapter_config
from trimtab.adapters.adapter import read_adapter
from trimtab.checkpoint.names import Matcher

# The configuration


@pytest.mark.parametrize("kind", ["LOHA", "ADALORA", "IA3", "PROMPT_TUNING", "VERA", "OFT", "lora", None])
def test_another_method_is_refused_by_name(kind: str | None, tmp_path: Path) -> None:
    (problem,) = refused(write_adapter(tmp_path, q_proj(), peft_type=kind))
    assert "peft_type" in problem
    assert kind is None or repr(kind) in problem


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
    assert problem.startswith(f"{field}=")
    assert adapter_config.REFUSED[field] in problem
    assert ("merge_and_unload" in problem) == (field == "trainable_token_indices")  # what makes the same answers
    read_adapter(write_adapter(tmp_path, q_proj(), **{field: None}))


def test_an_unknown_field_is_refused_when_it_is_on_and_noted_when_it_is_off(tmp_path: Path) -> None:
    (problem,) = refused(write_adapter(tmp_path, q_proj(), use_tomorrow={"a": 1}))
    assert problem.startswith("use_tomorrow=")
    assert "unknown" in problem
    assert any("use_tomorrow" in note for note in match(tmp_path, q_proj(), use_tomorrow=None).notes)


@pytest.mark.parametrize("init", ["pissa", "pissa_niter_16", "olora", "corda", "loftq", "lora_ga", "tomorrow"])
def test_an_initialisation_that_changed_the_base_is_refused(init: str, tmp_path: Path) -> None:
    (problem,) = refused(write_adapter(tmp_path, q_proj(), init_lora_weights=init))
    assert problem.startswith(f"init_lora_weights='{init}'")
    assert ("changed base weight" in problem) == (init != "tomorrow")


@pytest.mark.parametrize("init", [True, False, None, "gaussian", "eva", "orthogonal", "mica"])
def test_an_initialisation_that_leaves_the_base_alone_is_read(init: Any, tmp_path: Path) -> None:
    read_adapter(write_adapter(tmp_path, q_proj(), init_lora_weights=init, eva_config={"rho": 2.0}))


@pytest.mark.parametrize(
    ("config", "field"),
    [
        ({"r": 0}, "r="), ({"r": True}, "r="), ({"r": 2.5}, "r="), ({"lora_alpha": "8"}, "lora_alpha="),
        ({"rank_pattern": {"q_proj": -1}}, "rank_pattern['q_proj']"), ({"rank_pattern": [1]}, "rank_pattern="),
        ({"alpha_pattern": {"q_proj": None}}, "alpha_pattern['q_proj']"),
        ({"alpha_pattern": {"(": 4}}, "alpha_pattern['(']"),
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


@settings(max_examples=examples(200), deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(PATHS, st.dictionaries(PATHS.map(".".join), st.integers(1, 9), max_size=4))
def test_patterns_select_as_the_installed_peft_does(path: list[str], patterns: dict[str, int]) -> None:
    other = pytest.importorskip("peft.utils.other")
    name = ".".join(path)
    assert Matcher([name]).first_of(patterns).get(name, name) == other.get_pattern_key(patterns.keys(), name)


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
    assert "alpha_pattern" in problem
    assert f"'{VISION}.linear'" in problem
