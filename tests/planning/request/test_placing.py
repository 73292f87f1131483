"""Placements and budgets that the user decides: followed to the letter, or refused by name with the reason."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

import trimtab
from tests.anatomies import e_series, small
from tests.raised import refused
from trimtab.cli import main
from trimtab.cli.flags.flags import load_request
from trimtab.demo.demo import FOLDER as DEMO
from trimtab.errors import RequestError
from trimtab.planning.request.max_memory import MemoryBudgets, merged_budgets, read_max_memory
from trimtab.planning.request.overrides import resolve_device_map, resolve_place
from trimtab.planning.values.blocks import blocks_of

E2B = e_series("E2B")
BLOCKS = blocks_of(E2B, "nf4-dq")
TEXT = "model.language_model"
TABLE = f"{TEXT}.embed_tokens_per_layer"


def placed(patterns):
    return {path: asked.tier for path, asked in resolve_place(patterns, BLOCKS, E2B).items()}


def test_a_part_name_places_its_blocks():
    assert placed({}) == {}
    found = placed({"vision": "stream"})
    assert found == {"model.vision_tower": "stream"} | {f"model.vision_tower.encoder.layers.{i}": "stream" for i in range(16)}


@pytest.mark.parametrize("named, tier, block", [
    (f"{TEXT}.layers.1", "stream", f"{TEXT}.layers.1"), (f"{TEXT}.layers.4.mlp.gate_proj", "disk", f"{TEXT}.layers.4"),
    ("model.vision_tower.encoder.layers.2.self_attn.q_proj", "host", "model.vision_tower.encoder.layers.2"),
], ids=["a path at a boundary", "a module", "the wrapper of a linear"])  # fmt: skip
def test_what_is_named_places_its_block(named, tier, block):
    assert placed({named: tier}) == {block: tier}


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
    assert resolve_place({"table": "gather"}, BLOCKS, E2B)[TABLE].asked == "place table=gather"


@pytest.mark.parametrize(("patterns", "words"), [
    ({"model.vision_towr": "stream"}, ("place['model.vision_towr']='stream': matches no block", "did you mean model.vision_tower")),
    ({"text": "disk"}, (f"(choices: {', '.join(E2B.parts)})", "trimtab plan")),
    ({"table": "stream"}, ("use gather", "(choices: resident, gather)")), ({"language": "gather"}, ("index",)),
    ({"lm_head": "stream"}, ("tied to model.language_model.embed_tokens",)),
    # Its block can move, and that of the norm.
    ({f"{TEXT}.embed_tokens": "stream"}, ("Gemma4Model.forward", "tied lm_head")),
    ({f"{TEXT}.layers.0.input_layernorm": "stream"}, ("norms",)),
    ({"vision": "stream", "model.vision_tower": "disk"}, ("place['vision']='stream': has no effect", "(model.vision_tower)")),
], ids=["a typo", "no name", "a table", "layers", "a tied head", "the token table", "a norm", "without effect"])  # fmt: skip
def test_what_cannot_be_placed_is_refused_with_the_reason(patterns, words):
    error = str(refused(resolve_place, patterns, BLOCKS, E2B))
    assert all(word in error for word in words), error


def test_a_catch_all_that_nothing_can_follow_is_refused():
    model = small(head_tied=False)
    assert refused(resolve_place, {"*": "gather"}, blocks_of(model, "nf4"), model).value == "gather"


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
    assert error.value == ["model.multi_modal_projector", "model.vision_towers"] and "model.vision_tower" in error.near


@pytest.mark.parametrize(("device", "why"), [
    ("meta", "no data"), (1, "one device"), ("cuda:3", "one device"), ("mps", "not a device"), (True, "not a device"),
])  # fmt: skip
def test_devices_that_cannot_be_followed_are_refused(device, why):
    error = map_refused({"": device})
    assert error.field == "device_map['']" and why in str(error)


@pytest.mark.parametrize("devices, words", [
    ({"model.vision_tower": "cpu"}, ("has no device for",)), ({"lm_head": "cpu", "": 0}, ("'lm_head' cannot go to cpu",)),
    ({f"{TEXT}.embed_tokens": "cpu", "": 0}, ("Gemma4Model.forward", "lm_head")),
    ({f"{TEXT}.layers.0.mlp": "cpu", "": 0}, (f"{TEXT}.layers.0 in two",)),
], ids=["forgotten modules", "a tied head", "the token table", "a block cut in two"])  # fmt: skip
def test_a_map_that_cannot_be_followed_is_refused_with_the_reason(devices, words):
    error = str(map_refused(devices))
    assert all(word in error for word in words)


def test_a_key_without_effect_is_refused():
    layers = {f"model.audio_tower.layers.{i}": 0 for i in range(12)}
    rest = {"model.audio_tower.subsample_conv_projection": 0, "model.audio_tower.output_proj": 0}
    assert "'model.audio_tower' has no effect" in str(map_refused({"model.audio_tower": "cpu", **layers, **rest, "": 0}))


def test_a_map_with_tensors_that_stay_is_followed():
    assert device_map({"model.vision_tower.patch_embedder.position_embedding_table": 0, "": 0})[TEXT] == "resident"


def test_a_catch_all_on_the_cpu_leaves_what_cannot_move():
    found = device_map({"": "cpu"})
    assert found[TEXT] == "stream" and found[TABLE] == "gather" and "lm_head" not in found


GIB = 2**30
BASE = str(DEMO / "base")


@pytest.mark.parametrize(("given_map", "budgets"), [
    ({0: "4GiB", "cpu": "16GiB"}, ("cuda:0", 4 * GIB, 16 * GIB, None)), ({"0": 4 * GIB}, ("cuda:0", 4 * GIB, None, None)),
    ({"cuda:1": "4GB", "disk": "1GiB"}, ("cuda:1", 4 * 10**9, None, GIB)), ({"cuda": "1GiB"}, ("cuda:0", GIB, None, None)),
    ({"cpu": "2.5GiB"}, ("cpu", None, 5 * GIB // 2, None)),
])  # fmt: skip
def test_devices_become_budgets(given_map, budgets):
    assert read_max_memory(given_map) == MemoryBudgets(
        device=budgets[0], gpu_memory_bytes=budgets[1], host_memory_bytes=budgets[2], disk_memory_bytes=budgets[3]
    )


@pytest.mark.parametrize(("given_map", "field", "word"), [
    ({}, "max_memory", "at least one"), ([], "max_memory", "at least one"), ("4GiB", "max_memory", "at least one"),
    ({0: "4GiB", 1: "4GiB"}, "max_memory", "names 2 GPUs (cuda:0, cuda:1)"),
    ({0: "4GiB", "cuda:0": "4GiB"}, "max_memory['cuda:0']", "named twice"),
    ({"mps": "4GiB"}, "max_memory", "no device"), ({"gpu": "4GiB"}, "max_memory", "no device"),
    ({-1: "4GiB"}, "max_memory", "no device"), ({True: "4GiB"}, "max_memory", "no device"),
    ({None: "4GiB"}, "max_memory", "no device"), ({"disk": "4GiB"}, "max_memory", "no device that can compute"),
    ({0: "4 apples"}, "max_memory[0]", "not a size"), ({0: 0}, "max_memory[0]", "above zero"),
    ({0: "4Gb"}, "max_memory[0]", "bits"), ({0: 1.5}, "max_memory[0]", "an integer number"),
    ({0: None}, "max_memory[0]", "not a size"), ({0: True}, "max_memory[0]", "not a size"),
])  # fmt: skip
def test_what_cannot_be_followed_is_refused_by_name(given_map, field, word):
    error = refused(read_max_memory, given_map)
    assert error.field == field and word in str(error)


@pytest.mark.parametrize(("others", "field"), [
    ({"gpu_memory_bytes": GIB}, "max_memory"), ({"device": "cpu"}, "max_memory"), ({"device": "cuda:1"}, "max_memory"),
])  # fmt: skip
def test_a_budget_given_twice_is_refused(others, field):
    values = {"gpu_memory_bytes": None, "host_memory_bytes": None, "device": "auto"} | others
    assert refused(merged_budgets, {0: "4GiB"}, **values).field == field
    with pytest.raises(RequestError):
        merged_budgets({0: GIB, "cpu": GIB}, gpu_memory_bytes=None, host_memory_bytes=GIB, device="auto")
    with pytest.raises(RequestError):
        merged_budgets({"cpu": GIB}, gpu_memory_bytes=GIB, host_memory_bytes=None, device="auto")
    beside = merged_budgets({0: GIB}, gpu_memory_bytes=None, host_memory_bytes=3 * GIB, device="auto")
    assert (beside["gpu_memory_bytes"], beside["host_memory_bytes"]) == (GIB, 3 * GIB)
    assert merged_budgets({0: GIB}, gpu_memory_bytes=None, host_memory_bytes=None, device="cuda")["device"] == "cuda:0"


@pytest.mark.parametrize("none", [0, "0", "0GB", " 0.0 GiB"])
def test_a_gpu_that_is_given_nothing_is_left_out_by_the_user(none):
    """accelerate's way to skip a GPU: which one is meant stays the user's decision."""
    error = refused(read_max_memory, {0: none, 1: "8GiB"}, match="Omit a GPU that is not used")
    assert error.field == "max_memory[0]"
    assert read_max_memory({1: "8GiB"}).device == "cuda:1"


names = st.sampled_from(["cpu", "disk", "cuda", "cuda:0", "0", "mps", "xpu:0", ""])
sizes = st.sampled_from(["4GiB", "10GB", "3Gb", "0"])
keys = st.one_of(st.integers(-2, 12), names, st.text(max_size=9))
values = st.one_of(st.integers(), sizes, st.text(max_size=9), st.none(), st.floats())


@given(st.dictionaries(keys, values, max_size=4))
def test_any_mapping_gives_budgets_above_zero_or_a_named_error(given_map):
    try:
        budgets = read_max_memory(given_map)
    except RequestError as exc:
        assert exc.field.startswith("max_memory")
    else:
        given_bytes = (budgets.gpu_memory_bytes, budgets.host_memory_bytes, budgets.disk_memory_bytes)
        assert all(size is None or size > 0 for size in given_bytes)
        assert (budgets.gpu_memory_bytes is not None) == (budgets.device != "cpu")


def test_plan_takes_it_as_an_argument_as_a_flag_and_as_a_file(tmp_path, capsys):
    asked = {0: "4GiB", "cpu": "16GiB", "disk": "1GiB"}
    plan = trimtab.plan(BASE, card="T4", max_memory=asked)
    assert (plan.gpu_budget_bytes, plan.host_budget_bytes) == (4 * GIB, 16 * GIB) and plan.request.disk_memory_bytes == GIB
    file = tmp_path / "memory.json"
    file.write_text(json.dumps(asked))
    for given_flag in (json.dumps(asked), str(file)):
        assert main.main(["plan", BASE, "--card", "T4", "--max-memory", given_flag, "--json"]) == 0
        assert json.loads(capsys.readouterr().out)["gpu_budget_bytes"] == 4 * GIB


@pytest.mark.parametrize(("text", "word"), [
    ("{", "is not JSON"), ('{"0": "4GiB", "0": "5GiB"}', "is given twice"), ("nowhere.json", "cannot be read"),
    ('{"0": "4GiB", "1": "4GiB"}', "names 2 GPUs"),
])  # fmt: skip
def test_a_flag_that_cannot_be_read_names_itself(text, word):
    options = main.parser().parse_args(["plan", BASE, "--max-memory", text])
    assert refused(load_request, options, match=word).field in ("--max-memory", "max_memory")


def test_the_disk_budget_bounds_what_is_spilled():
    with pytest.raises(trimtab.DoesNotFitError) as caught:
        trimtab.plan(BASE, card="T4", place={"model.language_model.layers.*": "disk"}, max_memory={0: "4GiB", "disk": 4096})
    assert caught.value.device == "disk" and caught.value.budget_bytes == 4096


def test_a_card_that_is_no_name_is_refused_by_its_own_field():
    for options in ({}, {"max_memory": {0: "4GiB"}}):
        assert refused(trimtab.plan, BASE, card=8, **options).field == "card"


@pytest.mark.parametrize(("given_map", "device"), [({"cpu": "8GiB"}, "cpu"), ({1: "4GiB", "cpu": "8GiB"}, "cuda:1")])
def test_a_plan_for_a_card_refuses_budgets_of_another_device_by_the_name_of_the_argument(given_map, device):
    with pytest.raises(RequestError, match=f"names {device}, and a plan for GeForce RTX 4060 8GB computes on that card") as caught:
        trimtab.plan(BASE, card="RTX 4060 8GB", max_memory=given_map)
    assert caught.value.field == "max_memory" and caught.value.allowed == ("0", "cuda:0")
