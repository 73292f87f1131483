"""Patterns of names end at dots, a mistyped one is answered with what was meant, foreign ones choose as Python's `re`."""

from __future__ import annotations

import random
import re
import warnings
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.adapter_files import TEXT, match, problems_of, q_proj
from tests.examples import examples
from trimtab.checkpoint import names
from trimtab.checkpoint.names import MAX_PATTERNS, Matcher, PatternError, is_quick, is_under, matches, near_names, parse, shown

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


@pytest.mark.parametrize(("path", "prefix", "expected"), [
    ("a.b", "a", True), ("a", "a", True), ("a.b.c", "a.b", True), ("ab", "a", False), ("a", "a.b", False),
    ("layers.11", "layers.1", False), ("a.b", "", True), ("", "", True), ("", "a", False), ("b.a", "a", False),
])  # fmt: skip
def test_prefix_ends_at_a_dot(path: str, prefix: str, expected: bool) -> None:
    assert is_under(path, prefix) is expected


@given(SEGMENTS, SEGMENTS)
def test_prefix_is_a_prefix_of_segments(path: list[str], prefix: list[str]) -> None:
    assert is_under(".".join(path), ".".join(prefix)) is (path[: len(prefix)] == prefix)


# Patterns -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("pattern", "path", "expected"), [
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
])  # fmt: skip
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


@pytest.mark.parametrize(("name", "meant"), [
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
])  # fmt: skip
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
    assert len(found) == len(set(found)) <= max(count, 0) and set(found) <= set(choices)


@given(st.text(min_size=1, max_size=20), st.lists(st.text(max_size=20), max_size=6))
def test_the_name_itself_comes_first(name: str, choices: list[str]) -> None:
    assert near_names(name, [*choices, name])[0] == name


# As in adapters that others published, and as LLaMA-Factory, Unsloth, ms-swift, axolotl and PEFT's documentation write them.
PUBLIC = (
    r"^(?!.*patch_embed).*(?:q_proj|v_proj).*",
    r"^(?!.*(?:vision_tower|multi_modal_projector)).*(?:gate_proj|o_proj|v_proj|q_proj|k_proj|up_proj|down_proj).*",
    r"(?:.*?(?:language|text).*?(?:self_attn|mlp).*?(?:q_proj|k_proj).*?)"
    r"|(?:\bmodel\.layers\.[\d]{1,}\.(?:self_attn|mlp)\.(?:(?:q_proj|k_proj))\b)",
    r"(?:.*?(?:vision|image|visual|patch|language|text).*?(?:self_attn|attention|mlp|dense).*?(?:fc1|fc2|linear|q_proj).*?)",
    r"^(language_model(?=\.).*\.(down_proj|up_proj|gate_proj|q_proj|k_proj|v_proj|o_proj))$",
    r"^(model.language_model(?=\.).*\.(o_proj|gate_proj))$",
    r"model.language_model.layers.[\d]+.(mlp|cross_attn|self_attn).(up|down|gate|q|k|v|o)_proj",
    r".*(text_model|language_model|modality_projection).*(down_proj|gate_proj|up_proj|k_proj|q_proj|v_proj|o_proj).*$",
    r".*\.(q_proj|v_proj)$", r".*decoder.*(SelfAttention|EncDecAttention).*(q|v)$",
    r"layers.*((self_attn\.(qkv_proj|o_proj))|(mlp\.(gate_up|down)_proj))",
    r"model\.language_model\.layers\.(?:[0-9]|1[0-9])\.self_attn\.(?:q|v)_proj", r"(?i).*Q_PROJ",
    r"(?s:.)*(?<!vision)_tower\..*fc\d\b", r"(?x) .* \. ( q_proj | fc1 ) # these",
)  # fmt: skip
KEYS = (
    "q_proj", "layers.1.self_attn.q_proj", "^model.language_model.layers.0.self_attn.k_proj", r".*layers\.(1|2)\.mlp\.up_proj",
    "self_attn", "language_model", "0.mlp.down_proj", "vision_tower.*fc1", "a|q_proj", "q_proj|", "fc1)|(fc2",
)  # fmt: skip
NAMES = (
    *(f"model.language_model.layers.{layer}.{name}" for layer in (0, 1, 2, 10, 21) for name in (
        "self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj", "mlp.gate_proj", "mlp.up_proj",
        "mlp.down_proj", "mlp", "input_layernorm", "mlp.experts.3.up_proj")),
    *(f"model.vision_tower.encoder.layers.{layer}.{name}" for layer in (0, 1) for name in (
        "self_attn.q_proj", "mlp.fc1", "mlp.fc2", "self_attn.q_proj.linear")),
    "model.vision_tower.patch_embed.q_proj", "model.layers.7.self_attn.q_proj", "language_model.layers.0.mlp.up_proj", "lm_head",
    "model.multi_modal_projector.linear_1", "decoder.block.0.SelfAttention.q", "0", "q_proj", "layers-1.q_proj", "läyers.1.q_proj",
)  # fmt: skip


@pytest.mark.parametrize("pattern", PUBLIC + KEYS)
def test_public_patterns_match_as_in_python(pattern: str) -> None:
    try:
        expected = {name for name in NAMES if re.fullmatch(pattern, name)}
    except re.error:
        with pytest.raises(PatternError):
            Matcher(NAMES).matching(pattern)
    else:
        assert Matcher(NAMES).matching(pattern) == expected


@pytest.mark.parametrize("keys", [KEYS, KEYS[::-1], ("mlp", r".*\.mlp", r".*", "q_proj"), ("k.proj", "k_proj", "", "layers")])
def test_the_first_key_that_names_a_module_is_pefts(keys: tuple[str, ...]) -> None:
    stock = pytest.importorskip("peft.utils.other").get_pattern_key
    first = Matcher(NAMES).first_of(keys)
    assert {name: first.get(name, name) for name in NAMES} == {name: stock(keys, name) for name in NAMES}
    hit = {key for key in keys for name in NAMES if re.match(rf"(.*\.)?({key})$", name)}
    assert Matcher(NAMES).idle(keys) == [key for key in keys if key not in hit]


ATOMS = (
    "a", "b", ".", r"\.", r"\w", r"\d", "[ab]", "[^a]", r"[\w.]", "^", "$", r"\b", r"\B", r"\A", r"\Z", "(?=a)", "(?!b)", "(?<=a)",
    "(?<!b.)", "la", "_", "0", "(?i:A)", "\n", "(?!)", "(?<=^)", "(?:)", r"\W", "(?a:é)", "é", r"(?s:.)", "(?m:^)", "(?m:$)",
)  # fmt: skip
REPEATS = ("*", "+", "?", "*?", "+?", "??", "{2}", "{1,3}", "{0,2}?", "{2,}")
SHORT_NAMES = (
    "m.la.0", "a.b", "aab", "ab.ba.a", "la.0.a", "abab", "b", "a\n", "a.b\n", "aa\nb", "0.0", "A.b", "é_a", "aaaaaa", "a..b",
)  # fmt: skip


def _random_pattern(source: random.Random, depth: int) -> str:
    kind = source.random()
    if depth == 0 or kind < 0.35:
        return source.choice(ATOMS)
    inner = _random_pattern(source, depth - 1)
    if kind < 0.6:
        return inner + _random_pattern(source, depth - 1)
    if kind < 0.72:
        return f"(?:{inner}|{_random_pattern(source, depth - 1)})"
    if kind < 0.9:
        return f"(?:{inner}){source.choice(REPEATS)}"
    return source.choice(("(?=", "(?!", "(")) + inner + ")"


def test_random_patterns_match_as_in_python() -> None:
    source, compared = random.Random(37), 0
    while compared < 1500:
        pattern = _random_pattern(source, 3)
        try:
            compiled, keyed = re.compile(pattern), re.compile(rf"(.*\.)?({pattern})$")
        except re.error:
            continue
        compared += 1
        matcher = Matcher(SHORT_NAMES)
        assert matcher.matching(pattern) == {name for name in SHORT_NAMES if compiled.fullmatch(name)}, pattern
        assert set(matcher.first_of([pattern])) == {name for name in SHORT_NAMES if keyed.match(name)}, pattern


# Each of these keeps `re` busy for minutes or longer, or ends it with an exception that is not its own.
@pytest.mark.parametrize("pattern", [
    r"([\w.]+)+!", "(.*)*(.*)*(.*)*!", ".*" * 50 + "!", r"(?:(?:(?:\w\w?)*\.?)*_?)*!", "(?=(?=(?=.*)*)*)*!",
    r"(?!([\w.]+)+!)([\w.]+)+!", "((a{0,60000}){0,60000}){0,60000}!", "(((.?){1,9999}){1,9999}){1,9999}!",
])  # fmt: skip
def test_hostile_patterns_end_with_the_right_answer(pattern: str) -> None:
    assert Matcher(NAMES).matching(pattern) == set() and Matcher(NAMES).first_of([pattern]) == {}
    assert not is_quick(pattern)


@pytest.mark.parametrize(("pattern", "words"), [
    ("a{100000000000000000000}", "not a regular expression"), ("(" * 900 + "a" + ")" * 900, "nests groups more than 50 deep"),
    ("(" * 5000, "nests groups more than 50 deep"), ("a" * 100_001 + "+", "100,002 characters"), ("(a", "not a regular"),
    (r"(\w)\1", "a back-reference"), ("(a)?(?(1)b|c)", "a condition on a group"), ("(?<=a+)b", "fixed-width"),
    ("a{" + "9" * 5000 + "}", "not a regular expression"), ("(?:.|..|...)*" * 7000, "too much work"),
])  # fmt: skip
def test_what_is_not_matched_is_an_error_that_names_the_pattern(pattern: str, words: str) -> None:
    with pytest.raises(PatternError, match=words) as error:
        Matcher(f"{place}.{name}" for place in range(200) for name in NAMES).matching(pattern)
    assert error.value.pattern == pattern and len(shown(pattern)) < 100


def test_the_limit_is_of_work_and_not_of_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(names, "WORK", 1_000_000)
    assert Matcher(NAMES).matching(r".*\.q_proj")
    with pytest.raises(PatternError, match="too much work"):
        for matcher in [Matcher(NAMES)]:
            for number in range(100):
                matcher.matching(rf".*\.q_proj{number}")


def test_a_warning_of_pythons_parser_is_not_ours() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert parse("[[a]")


def test_a_rank_for_each_of_many_modules_is_found_by_name() -> None:
    names = [f"model.layers.{layer}.mlp.experts.{expert}.up_proj" for layer in range(8) for expert in range(64)]
    assert Matcher(names).first_of(names) == {name: name for name in names}


def test_quick_patterns_are_those_that_adapters_have() -> None:
    assert [pattern for pattern in PUBLIC[:12] if not is_quick(pattern)] == [] and not is_quick(".*" * 5)
    # Short repeats inside another, and many alternatives, take as long.
    assert [one for one in (r"((a{0,8}){0,8}){0,8}!", "(a|a)" * 13, "(a?){30}", "(ab*)+") if is_quick(one)] == []


@pytest.mark.parametrize(
    "patterns", [("layers", "model"), (r"\d+$", "mlp", "^x"), ("^lm_head$", r"layers\.\d\.", ".*q_proj"), ("b*", "a")]
)
def test_the_leftmost_pattern_is_found_as_python_finds_alternatives(patterns: tuple[str, ...]) -> None:
    joined = re.compile("|".join(f"(?P<g{place}>{one})" for place, one in enumerate(patterns)))
    expected = {name: patterns[int(found.lastgroup[1:])] for name in NAMES if (found := joined.search(name)) is not None}
    assert Matcher(NAMES).leftmost(patterns) == expected


def test_an_adapter_with_a_hostile_pattern_is_matched(tmp_path: Path) -> None:
    hostile = r"([\w.]+)+!"
    config = {"rank_pattern": {hostile: 8}, "alpha_pattern": {hostile: 8}, "target_modules": hostile, "exclude_modules": hostile}
    spec = match(tmp_path, q_proj(), **config)
    assert [(target.rank, target.scale) for target in spec.targets] == [(4, 2.0)] and set(spec.idle) == set(config)


@pytest.mark.parametrize(("config", "field"), [
    ({"rank_pattern": {f"model.layers.{place}": 4 for place in range(MAX_PATTERNS + 1)}}, "rank_pattern has 50,001 entries"),
    ({"alpha_pattern": {f"a{place}+": 4 for place in range(2001)}}, "alpha_pattern has 2,001 regular expressions"),
    ({"rank_pattern": {"a{100000000000000000000}": 4}}, "rank_pattern['a{100000000000000000000}']: is not a regular"),
    ({"target_modules": "(" * 900 + "a" + ")" * 900}, "target_modules['((((("),
    ({"exclude_modules": "(?P<a"}, "exclude_modules['(?P<a']"), ({"layers_pattern": ["("]}, "layers_pattern['(']"),
    ({"modules_to_save": ["a{100000000000000000000}"]}, "modules_to_save['a{100000000000000000000}']"),
    ({"target_modules": ["q_proj"] * (MAX_PATTERNS + 1)}, "target_modules has 50,001 entries"),
    ({"rank_pattern": {"a" * 60_000 + "+": 4, "b" * 60_000 + "+": 4}}, "the regular expressions of the configuration"),
    ({"rank_pattern": {"(?:.|..|...)*" * 7000: 4}}, "rank_pattern['(?:.|..|"),
    *(({"target_modules": value}, f"target_modules={value}: must be a list") for value in (5, True, 1.5)),
])  # fmt: skip
def test_a_configuration_beyond_the_limits_is_refused_in_short(config: dict, field: str, tmp_path: Path) -> None:
    (problem,) = problems_of(tmp_path, q_proj(), **config)
    assert problem.startswith(field) and len(problem) < 300


# Entries that name nothing ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("config", "notes"), [
    ({"rank_pattern": {"q_porj": 4}}, ["rank_pattern: no module of the model for 'q_porj' (similar: q_proj, v_proj, o_proj)"]),
    ({"alpha_pattern": {r".*\.q_projj": 4}},
     [r"alpha_pattern: no module of the model for '.*\\.q_projj' (similar: q_proj, v_proj, o_proj)"]),
    ({"rank_pattern": {"layers.7.self_attn.q_proj": 4}},
     ["rank_pattern: no module of the model for 'layers.7.self_attn.q_proj'"]),
    ({"target_modules": ["q_proj", "out_projection"]}, ["target_modules: no module of the model for 'out_projection'"]),
    ({"target_modules": r".*\.query"}, [r"target_modules: no module of the model for '.*\\.query'"]),
    ({"exclude_modules": ["visoin_tower"]}, ["exclude_modules: no module of the model for 'visoin_tower'"]),
    ({"layers_to_transform": [0, 9]}, ["layers_to_transform: no layer of the model for '9'"]),
    ({"layers_to_transform": 0, "layers_pattern": ["layers", "blocks"]},
     ["layers_pattern: no module of the model for 'blocks'"]),
    ({"modules_to_save": ["nrom"]}, ["modules_to_save: no module of the model for 'nrom'"]),
])  # fmt: skip
def test_entries_that_name_no_module_are_told(config: dict, notes: list[str], tmp_path: Path) -> None:
    found = match(tmp_path, q_proj(), **config).notes
    assert [note.partition(" (similar")[0] for note in found] == [note.partition(" (similar")[0] for note in notes]
    assert all("(similar: q_proj" in note for note, wanted in zip(found, notes, strict=True) if "(similar" in wanted)


@pytest.mark.parametrize("config", [
    # Modules without keys, wrappers, the inner linear, a projection that a KV-shared layer lacks, experts by their old names.
    {"rank_pattern": {"up_proj": 2, "vision_tower.*q_proj": 2, "q_proj.linear": 2, "layers.1.self_attn.k_proj": 2}},
    {"rank_pattern": {"experts.weight": 2, "experts.3.up_proj": 2}, "alpha_pattern": {r"experts\.\d+\.down_proj": 2}},
    {"target_modules": "all-linear"}, {"target_modules": [f"{TEXT}.layers.0.self_attn.q_proj", "q_proj", "self_attn.q_proj"]},
    {"layers_to_transform": [0, 1]}, {"layers_to_transform": 1, "layers_pattern": "layers"},
    {"modules_to_save": ["classifier", "score"], "task_type": "SEQ_CLS"},
])  # fmt: skip
def test_entries_that_name_a_module_raise_no_alarm(config: dict, tmp_path: Path) -> None:
    spec = match(tmp_path, q_proj(), **config)
    assert (spec.notes, spec.idle) == ((), {})
