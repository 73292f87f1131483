"""Every family that the tests of features leave to the slow run goes through each feature once, on one loaded model.

The tests are those of the features themselves, with few of their prompts; the traceback says which feature fails.
"""

import pytest

from tests import long_runs
from tests.engine.batch import test_batch
from tests.engine.decode import test_graphs
from tests.engine.decode.test_graphs import replayed  # noqa: F401
from tests.engine.kv import test_kv8
from tests.engine.passes import test_attention
from tests.engine.passes.test_attention import uses  # noqa: F401
from tests.engine.prefill import test_encoder_cache, test_open_prompts, test_packed_prompts, test_prefill, test_prefix_cache
from tests.engine.towers import test_tower_graphs
from tests.planning.memory import test_cost
from trimtab.engine.prefill import packing

pytestmark = pytest.mark.skipif(test_prefill.ON_GPU, reason="a GPU runs every family in the tests of the features")
HOW = "chunks of 8 and 16"
LOOKING = [family for family in test_prefill.WITH_PICTURES if family in long_runs.REST]


@pytest.mark.parametrize("family", long_runs.REST)
def test_prompts_and_steps(family, request, monkeypatch):
    monkeypatch.setattr(test_prefill, "LENGTHS", (8, 25))
    monkeypatch.setattr(test_prefill, "SIZES", (((8, 16), 3),))
    monkeypatch.setattr(test_open_prompts, "LENGTHS", (9, 17))
    test_prefill.test_a_prompt_in_chunks_is_the_prompt(family)
    test_batch.test_rows_of_every_family_say_what_they_say_alone(family)
    test_prefix_cache.test_the_second_turn_of_a_chat_computes_what_is_new_and_says_the_same(family, HOW)
    test_open_prompts.test_a_step_computes_what_the_last_chunk_would_have_computed(family, HOW)
    with monkeypatch.context() as patch:
        patch.setattr(packing, "LEAST_TOKENS", 16)
        test_packed_prompts.test_prompts_of_any_length_say_together_what_each_says_alone(family, patch)
    with monkeypatch.context() as patch:
        counted = request.getfixturevalue("uses")
        test_attention.test_a_prompt_has_the_bits_of_repeated_keys(family, "float32", counted, patch)
    captures = request.getfixturevalue("replayed")
    test_graphs.test_every_family_is_prepared_and_its_rows_are_clean_afterwards(family, captures)


@pytest.mark.parametrize("family", long_runs.REST)
def test_the_least_prefix_cache_and_states_in_8_bits(family, monkeypatch):
    monkeypatch.setattr(test_kv8, "POOLS", (448,))
    monkeypatch.setattr(test_kv8, "PROMPTS", test_kv8.PROMPTS[1:3])
    test_cost.test_the_planned_pages_are_those_of_the_runtime_and_the_least_cache_is_one_that_hits(family, "full")
    test_kv8.test_every_family_says_what_transformers_says_of_rounded_states(family)


@pytest.mark.parametrize("family", LOOKING)
def test_images(family, monkeypatch):
    test_prefill.test_a_picture_beside_every_border_of_a_chunk_is_the_picture(family)
    test_encoder_cache.test_pictures_that_are_missing_go_through_in_one_pass(family)
    test_encoder_cache.test_a_picture_that_was_seen_is_not_seen_again(family, HOW)
    test_prefix_cache.test_a_chat_about_a_picture_goes_on_where_it_was_and_another_picture_is_another_chat(family, HOW)
    test_tower_graphs.test_a_picture_is_the_same_bit_for_bit(family)
    test_tower_graphs.test_prompts_with_pictures_are_those_of_eager_towers(family)
    with monkeypatch.context() as patch:
        test_tower_graphs.test_a_pass_that_is_cut_between_layers_is_the_pass(family, "eager", patch)
    with monkeypatch.context() as patch:
        test_tower_graphs.test_on_a_cpu_the_towers_are_cut_before_transformers_own_pass(family, patch)
    with monkeypatch.context() as patch:
        test_tower_graphs.test_on_a_cpu_a_prompt_is_cut_behind_its_towers_where_no_token_looks_ahead(family, patch)
