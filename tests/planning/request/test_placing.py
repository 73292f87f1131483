"""Placements that the user decides: patterns and device maps, followed to the letter or refused with the reason."""

import pytest

from tests.anatomies import e_series, small
from trimtab.errors import RequestError
from trimtab.planning.request.overrides import resolve_device_map, resolve_place
from trimtab.planning.values.blocks import blocks_of

E2B = e_series("E2B")
BLOCKS = blocks_of(E2B, "nf4-dq")
TEXT = "model.language_model"
TABLE = f"{TEXT}.embed_tokens_per_layer"


def place(**patterns):
    return resolve_place(patterns, BLOCKS, E2B)


def placed(patterns):
    return {path: asked.tier for path, asked in resolve_place(patterns, BLOCKS, E2B).items()}


def refused(call, *args):
    with pytest.raises(RequestError) as caught:
        call(*args)
    return caught.value


def test_nothing_asked_decides_nothing():
    assert placed({}) == {}


def test_a_part_name_places_its_blocks():
    found = placed({"vision": "stream"})
    assert found == {"model.vision_tower": "stream"} | {f"model.vision_tower.encoder.layers.{i}": "stream" for i in range(16)}


def test_a_path_places_the_blocks_under_it_at_a_boundary():
    assert placed({f"{TEXT}.layers.1": "stream"}) == {f"{TEXT}.layers.1": "stream"}


def test_a_module_places_its_block():
    assert placed({f"{TEXT}.layers.4.mlp.gate_proj": "disk"}) == {f"{TEXT}.layers.4": "disk"}


def test_the_wrapper_of_a_linear_places_its_block():
    path = "model.vision_tower.encoder.layers.2"
    assert placed({f"{path}.self_attn.q_proj": "host"}) == {path: "host"}


def test_the_last_match_wins():
    found = placed({"language": "stream", f"{TEXT}.layers.3": "resident"})
    assert found[f"{TEXT}.layers.3"] == "resident" and found[f"{TEXT}.layers.4"] == "stream"


def test_a_catch_all_leaves_blocks_alone_that_cannot_follow():
    found = placed({"*": "stream"})
    assert TABLE not in found and "lm_head" not in found and found[TEXT] == found["model.embed_audio"] == "stream"
    assert placed({"*": "gather"}) == {TABLE: "gather"}


def test_resident_is_always_allowed():
    assert set(placed({"*": "resident"})) == {block.block_path for block in BLOCKS}


def test_the_asking_pattern_is_kept_for_the_reason():
    assert place(table="gather")[TABLE].asked == "place table=gather"


def test_a_pattern_that_names_nothing_is_refused_with_near_names():
    error = refused(resolve_place, {"model.vision_towr": "stream"}, BLOCKS, E2B)
    assert error.field == "place['model.vision_towr']" and "model.vision_tower" in error.near


def test_a_pattern_like_no_name_is_refused_with_the_parts_of_the_model():
    error = refused(resolve_place, {"text": "disk"}, BLOCKS, E2B)
    assert error.allowed == E2B.parts and "language" in error.allowed and "trimtab plan" in error.hint


def test_a_tier_that_no_named_block_allows_is_refused_with_the_reason():
    error = refused(resolve_place, {"table": "stream"}, BLOCKS, E2B)
    assert "use gather" in str(error) and error.allowed == ("resident", "gather")


def test_gather_of_layers_is_refused():
    assert "index" in str(refused(resolve_place, {"language": "gather"}, BLOCKS, E2B))


def test_a_tied_head_is_refused_with_its_tie():
    assert "tied to model.language_model.embed_tokens" in str(refused(resolve_place, {"lm_head": "stream"}, BLOCKS, E2B))


def test_the_token_table_is_refused_although_its_block_can_move():
    error = refused(resolve_place, {f"{TEXT}.embed_tokens": "stream"}, BLOCKS, E2B)
    assert "Gemma4Model.forward" in str(error) and "tied lm_head" in str(error)


def test_a_norm_is_refused_although_its_block_can_move():
    error = refused(resolve_place, {f"{TEXT}.layers.0.input_layernorm": "stream"}, BLOCKS, E2B)
    assert "norms" in str(error)


def test_a_catch_all_that_nothing_can_follow_is_refused():
    model = small(head_tied=False)
    assert refused(resolve_place, {"*": "gather"}, blocks_of(model, "nf4"), model).value == "gather"


def test_a_pattern_without_effect_is_refused_with_what_undoes_it():
    error = refused(resolve_place, {"vision": "stream", "model.vision_tower": "disk"}, BLOCKS, E2B)
    assert error.field == "place['vision']" and "model.vision_tower" in str(error)


def device_map(devices, execution_device="cuda:0"):
    found = resolve_device_map(devices, BLOCKS, E2B, execution_device=execution_device)
    return {path: asked.tier for path, asked in found.items()}


def map_refused(devices, execution_device="cuda:0"):
    return refused(device_map, devices, execution_device)


def test_a_map_of_the_towers_streams_them_and_keeps_the_rest():
    found = device_map({"model.vision_tower": "cpu", "model.embed_vision": "cpu", "model.audio_tower": "cpu", "": 0})
    assert {path.split(".")[1] for path, tier in found.items() if tier == "stream"} == {
        "vision_tower", "embed_vision", "audio_tower",
    }  # fmt: skip
    assert found[TABLE] == found[f"{TEXT}.layers.0"] == "resident"


def test_a_table_on_the_cpu_is_gathered_and_on_disk_read_from_the_file():
    for device, home in (("cpu", "host"), ("disk", "file")):
        asked = resolve_device_map({TABLE: device, "": 0}, BLOCKS, E2B, execution_device="cuda:0")[TABLE]
        assert (asked.tier, asked.home) == ("gather", home)


def test_disk_is_the_disk_tier():
    assert device_map({f"{TEXT}.layers.7": "disk", "": "cuda"})[f"{TEXT}.layers.7"] == "disk"


def test_the_longest_prefix_wins_at_a_boundary():
    found = device_map({f"{TEXT}.layers.1": "cpu", "": 0, f"{TEXT}.embed_tokens": 0, f"{TEXT}.layers": 0})
    assert [path for path, tier in found.items() if tier == "stream"] == [f"{TEXT}.layers.1"]


@pytest.mark.parametrize("device", [0, "0", "cuda:0", "cuda"])
def test_every_spelling_of_the_execution_device_is_resident(device):
    assert set(device_map({"": device}).values()) == {"resident"}


def test_a_device_object_counts_by_its_text():
    class Device:
        def __str__(self):
            return "cpu"

    assert device_map({"model.audio_tower": Device(), "": 0})["model.audio_tower.layers.0"] == "stream"


def test_on_a_machine_without_gpu_the_cpu_is_where_things_are():
    assert set(device_map({"": "cpu"}, "cpu").values()) == {"resident"}
    assert map_refused({"": 0}, "cpu").allowed == ("cpu", "disk")


def test_unknown_keys_are_listed_all_with_near_names():
    error = map_refused({"model.multi_modal_projector": "cpu", "model.vision_towers": "cpu", "": 0})
    assert error.value == ["model.multi_modal_projector", "model.vision_towers"]
    assert "model.vision_tower" in error.near


@pytest.mark.parametrize(
    ("device", "why"),
    [("meta", "no data"), (1, "one device"), ("cuda:3", "one device"), ("mps", "not a device"), (True, "not a device")],
)
def test_devices_that_cannot_be_followed_are_refused(device, why):
    error = map_refused({"": device})
    assert error.field == "device_map['']" and why in str(error)


def test_a_map_that_forgets_modules_is_refused():
    assert "has no device for" in str(map_refused({"model.vision_tower": "cpu"}))


def test_a_tied_head_on_the_cpu_is_refused():
    assert "'lm_head' cannot go to cpu" in str(map_refused({"lm_head": "cpu", "": 0}))


def test_the_token_table_on_the_cpu_is_refused_with_both_reasons():
    error = map_refused({f"{TEXT}.embed_tokens": "cpu", "": 0})
    assert "Gemma4Model.forward" in str(error) and "lm_head" in str(error)


def test_a_block_cut_in_two_is_refused():
    error = map_refused({f"{TEXT}.layers.0.mlp": "cpu", "": 0})
    assert f"{TEXT}.layers.0 in two" in str(error)


def test_a_key_without_effect_is_refused():
    layers = {f"model.audio_tower.layers.{i}": 0 for i in range(12)}
    rest = {"model.audio_tower.subsample_conv_projection": 0, "model.audio_tower.output_proj": 0}
    assert "'model.audio_tower' has no effect" in str(map_refused({"model.audio_tower": "cpu", **layers, **rest, "": 0}))


def test_a_map_with_tensors_that_stay_is_followed():
    assert device_map({"model.vision_tower.patch_embedder.position_embedding_table": 0, "": 0})[TEXT] == "resident"


def test_a_catch_all_on_the_cpu_leaves_what_cannot_move():
    found = device_map({"": "cpu"})
    assert found[TEXT] == "stream" and found[TABLE] == "gather" and "lm_head" not in found
