"""Whether patterns end at dots and a mistyped name is answered with what was meant."""

from __future__ import annotations

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.examples import examples
from trimtab.checkpoint.names import is_under, matches, near_names

# Small alphabets, so that prefixes, dots and repeated pieces meet often.
PATHS = st.text("ab1.", max_size=8)
PATTERNS = st.text("ab1.*", max_size=8)
SEGMENTS = st.lists(st.sampled_from(("a", "b", "ab", "1", "11", "layers")), min_size=1, max_size=4)

GEMMA4 = [
    "lm_head", "model", "model.language_model", "model.language_model.embed_tokens",
    "model.language_model.embed_tokens_per_layer", "model.language_model.norm",
    "model.language_model.per_layer_model_projection",
    *(
        f"model.language_model.layers.{layer}.{path}"
        for layer in range(12)
        for path in (
            "self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj", "mlp.gate_proj",
            "mlp.up_proj",
            "mlp.down_proj", "per_layer_input_gate", "input_layernorm",
        )
    ),
    *(
        f"model.vision_tower.encoder.layers.{layer}.self_attn.{path}"
        for layer in range(4) for path in ("q_proj.linear", "k_proj.linear", "v_proj.linear", "o_proj.linear")
    ),
    "model.vision_tower.patch_embedder.input_proj", "model.audio_tower.layers.0.feed_forward1.ffw_layer_1.linear",
    "model.audio_tower.subsample_conv_projection.input_proj_linear", "model.embed_vision",
    "model.embed_vision.embedding_projection", "model.embed_audio", "model.embed_audio.embedding_projection",
]  # fmt: skip


# Prefixes -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("path", "prefix", "expected"),
    [
        ("a.b", "a", True), ("a", "a", True), ("a.b.c", "a.b", True), ("ab", "a", False), ("a", "a.b", False),
        ("layers.11", "layers.1", False), ("a.b", "", True), ("", "", True), ("", "a", False), ("b.a", "a", False),
    ],
)  # fmt: skip
def test_prefix_ends_at_a_dot(path: str, prefix: str, expected: bool) -> None:
    assert is_under(path, prefix) is expected


@given(SEGMENTS, SEGMENTS)
def test_prefix_is_a_prefix_of_segments(path: list[str], prefix: list[str]) -> None:
    assert is_under(".".join(path), ".".join(prefix)) is (path[: len(prefix)] == prefix)


# Patterns -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("pattern", "path", "expected"),
    [
        ("a.b", "a.b", True), ("a.b", "a.b.c.d", True), ("a.b", "a.bc", False), ("a.b", "a", False),
        ("layers.1", "layers.1", True), ("layers.1", "layers.1.mlp", True), ("layers.1", "layers.11", False),
        ("layers.1", "model.layers.1", False), ("*.layers.1", "model.layers.1.mlp", True),
        ("*.layers.1", "model.layers.11", False),
        ("*layers.1", "layers.1", True), ("layers.1*", "layers.11.mlp", True),
        ("layers.*.mlp", "layers.3.mlp.up_proj", True),
        ("layers.*.mlp", "layers.3.mlp2", False), ("*", "", True), ("*", "any.thing", True), ("**", "a", True),
        ("a*a", "a", False), ("a*a", "aa", True), ("*.q_proj", "x.self_attn.q_proj.linear", True), ("", "a", False),
        ("", "", True),
        ("a.b*", "a.b", True), ("a.*", "a", False), ("a?", "ab", False), ("a[b]", "ab", False),
        ("a[b]", "a[b].c", True), ("a.b", "aXb", False),
    ],
)  # fmt: skip
def test_pattern_names_a_path_and_what_is_below(pattern: str, path: str, expected: bool) -> None:
    assert matches(pattern, path) is expected


@given(PATTERNS, PATHS)
@settings(max_examples=examples(1000))
def test_pattern_means_what_the_regular_expression_means(pattern: str, path: str) -> None:
    body = re.sub(r"(\\\*)+", ".*", re.escape(pattern))
    assert matches(pattern, path) is (re.fullmatch(rf"{body}(\..*)?", path) is not None)


@given(SEGMENTS, SEGMENTS)
def test_pattern_without_a_star_is_a_prefix(path: list[str], pattern: list[str]) -> None:
    assert matches(".".join(pattern), ".".join(path)) is is_under(".".join(path), ".".join(pattern))


@given(PATTERNS, PATHS, PATHS)
def test_what_is_below_a_match_matches(pattern: str, path: str, below: str) -> None:
    if matches(pattern, path):
        assert matches(pattern, f"{path}.{below}")


def test_many_stars_take_no_time() -> None:
    assert matches("*a" * 60 + "b", "a" * 2000) is False  # a backtracking matcher would not come back


# Near names -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("model.multi_modal_projector", "model.embed_vision"),
        ("multi_modal_projector", "model.embed_vision"),
        ("model.visual", "model.vision_tower.patch_embedder.input_proj"),
        ("model.language_model.layers.3.self_attn.qproj", "model.language_model.layers.3.self_attn.q_proj"),
        ("model.layers.3.self_attn.q_proj", "model.language_model.layers.3.self_attn.q_proj"),
        ("layers.7.mlp.up_proj", "model.language_model.layers.7.mlp.up_proj"),
        ("model.vision_model.encoder.layers.2.self_attn.k_proj.linear",
        "model.vision_tower.encoder.layers.2.self_attn.k_proj.linear"),
        ("model.vision_tower.encoder.layers.0.self_attn.q_proj",
        "model.vision_tower.encoder.layers.0.self_attn.q_proj.linear"),
        ("embed_tokens_per_layers", "model.language_model.embed_tokens_per_layer"),
        ("lmhead", "lm_head"),
        ("base_model.model.model.language_model.layers.1.mlp.up_proj", "model.language_model.layers.1.mlp.up_proj"),
        ("model.language_model.layers.99.mlp.down_proj", "model.language_model.layers.9.mlp.down_proj"),
    ],
)  # fmt: skip
def test_what_was_meant_is_among_three(name: str, meant: str) -> None:
    assert meant in near_names(name, GEMMA4)


def test_a_projection_of_the_same_tower_comes_before_its_namesake_in_the_language_model() -> None:
    name = "model.vision_tower.vision_model.encoder.layers.0.self_attn.q_proj"
    assert near_names(name, GEMMA4)[0] == "model.vision_tower.encoder.layers.0.self_attn.q_proj.linear"


def test_a_connector_of_another_family_leads_to_both_connectors_first() -> None:
    assert near_names("model.multi_modal_projector", GEMMA4, 2) == ["model.embed_audio", "model.embed_vision"]


def test_a_part_keeps_its_own_name_where_the_choice_has_it() -> None:
    choices = ["model.embed_audio.embedding_projection", "model.embed_vision.embedding_projection"]
    assert near_names("model.embed_vision.embedding_projektion", choices)[0] == "model.embed_vision.embedding_projection"


@pytest.mark.parametrize(("name", "meant"), [("temprature", "temperature"), ("max_tokens", "max_new_tokens"), ("top", "top_p")])
def test_options_are_near_too(name: str, meant: str) -> None:
    assert meant in near_names(name, ["max_new_tokens", "temperature", "top_p", "seed", "stop"])


@pytest.mark.parametrize("name", ["zzzz", "", "*", "0", "..."])
def test_what_resembles_nothing_has_no_near_name(name: str) -> None:
    assert near_names(name, ["model.language_model.norm", "lm_head"]) == []


@pytest.mark.parametrize("count", [0, -1])
def test_none_asked_none_given(count: int) -> None:
    assert near_names("model.language_model.layers.3.mlp.up_proj", GEMMA4, count) == []


@pytest.mark.parametrize(("name", "other"), [("b", "a.b"), ("merger", "connector"), ("top", "a.top")])
def test_the_name_itself_comes_before_its_equals(name: str, other: str) -> None:
    assert near_names(name, [other, name]) == [name, other]


def test_one_choice_is_given_once() -> None:
    assert near_names("lmhead", iter(["lm_head", "lm_head"])) == ["lm_head"]


def test_very_long_names_take_no_time_and_keep_their_end() -> None:
    long = "x." * 500_000 + "self_attn.q_proj"
    assert near_names(long, [*GEMMA4, "y" * 1_000_000])[0].endswith("self_attn.q_proj")


@given(st.text(max_size=20), st.lists(st.text(max_size=20), max_size=6), st.integers(-1, 8))
def test_any_text_gives_a_few_of_the_choices(name: str, choices: list[str], count: int) -> None:
    found = near_names(name, choices, count)
    assert len(found) == len(set(found)) <= max(count, 0)
    assert set(found) <= set(choices)


@given(st.text(min_size=1, max_size=20), st.lists(st.text(max_size=20), max_size=6))
def test_the_name_itself_comes_first(name: str, choices: list[str]) -> None:
    assert near_names(name, [*choices, name])[0] == name
