"""`max_memory` in transformers' form: one GPU, host and disk become budgets; everything else is refused by name."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

import trimtab
from trimtab.cli import main as cli
from trimtab.cli.flags.flags import load_request
from trimtab.demo.demo import FOLDER as DEMO
from trimtab.errors import RequestError
from trimtab.planning.request.max_memory import MemoryBudgets, merged_budgets, read_max_memory

GIB = 2**30
BASE = str(DEMO / "base")


@pytest.mark.parametrize(
    ("given_map", "budgets"),
    [
        ({0: "4GiB", "cpu": "16GiB"}, ("cuda:0", 4 * GIB, 16 * GIB, None)), ({"0": 4 * GIB}, ("cuda:0", 4 * GIB, None, None)),
        ({"cuda:1": "4GB", "disk": "1GiB"}, ("cuda:1", 4 * 10**9, None, GIB)), ({"cuda": "1GiB"}, ("cuda:0", GIB, None, None)),
        ({"cpu": "2.5GiB"}, ("cpu", None, 5 * GIB // 2, None)),
    ],
)  # fmt: skip
def test_devices_become_budgets(given_map, budgets):
    assert read_max_memory(given_map) == MemoryBudgets(
        device=budgets[0], gpu_memory_bytes=budgets[1], host_memory_bytes=budgets[2], disk_memory_bytes=budgets[3]
    )


@pytest.mark.parametrize(
    ("given_map", "field", "word"),
    [
        ({}, "max_memory", "at least one"), ([], "max_memory", "at least one"), ("4GiB", "max_memory", "at least one"),
        ({0: "4GiB", 1: "4GiB"}, "max_memory", "names 2 GPUs (cuda:0, cuda:1)"),
        ({0: "4GiB", "cuda:0": "4GiB"}, "max_memory['cuda:0']", "named twice"),
        ({"mps": "4GiB"}, "max_memory", "no device"), ({"gpu": "4GiB"}, "max_memory", "no device"),
        ({-1: "4GiB"}, "max_memory", "no device"), ({True: "4GiB"}, "max_memory", "no device"),
        ({None: "4GiB"}, "max_memory", "no device"), ({"disk": "4GiB"}, "max_memory", "no device that can compute"),
        ({0: "4 apples"}, "max_memory[0]", "not a size"), ({0: 0}, "max_memory[0]", "above zero"),
        ({0: "4Gb"}, "max_memory[0]", "bits"), ({0: 1.5}, "max_memory[0]", "an integer number"),
        ({0: None}, "max_memory[0]", "not a size"), ({0: True}, "max_memory[0]", "not a size"),
    ],
)  # fmt: skip
def test_what_cannot_be_followed_is_refused_by_name(given_map, field, word):
    with pytest.raises(RequestError) as caught:
        read_max_memory(given_map)
    assert caught.value.field == field and word in str(caught.value)


@pytest.mark.parametrize(
    ("others", "field"),
    [({"gpu_memory_bytes": GIB}, "max_memory"), ({"device": "cpu"}, "max_memory"), ({"device": "cuda:1"}, "max_memory")],
)
def test_a_budget_given_twice_is_refused(others, field):
    values = {"gpu_memory_bytes": None, "host_memory_bytes": None, "device": "auto"} | others
    with pytest.raises(RequestError) as caught:
        merged_budgets({0: "4GiB"}, **values)
    assert caught.value.field == field
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
    with pytest.raises(RequestError, match="Omit a GPU that is not used") as caught:
        read_max_memory({0: none, 1: "8GiB"})
    assert caught.value.field == "max_memory[0]"
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
    assert (plan.gpu_budget_bytes, plan.host_budget_bytes) == (4 * GIB, 16 * GIB)
    assert plan.request.disk_memory_bytes == GIB
    file = tmp_path / "memory.json"
    file.write_text(json.dumps(asked))
    for given_flag in (json.dumps(asked), str(file)):
        assert cli.main(["plan", BASE, "--card", "T4", "--max-memory", given_flag, "--json"]) == 0
        assert json.loads(capsys.readouterr().out)["gpu_budget_bytes"] == 4 * GIB


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ("{", "is not JSON"), ('{"0": "4GiB", "0": "5GiB"}', "one key twice"), ("nowhere.json", "cannot be read"),
        ('{"0": "4GiB", "1": "4GiB"}', "names 2 GPUs"),
    ],
)  # fmt: skip
def test_a_flag_that_cannot_be_read_names_itself(text, word):
    options = cli.parser().parse_args(["plan", BASE, "--max-memory", text])
    with pytest.raises(RequestError, match=word) as caught:
        load_request(options)
    assert caught.value.field in ("--max-memory", "max_memory")


def test_the_disk_budget_bounds_what_is_spilled():
    with pytest.raises(trimtab.DoesNotFitError) as caught:
        trimtab.plan(BASE, card="T4", place={"model.language_model.layers.*": "disk"}, max_memory={0: "4GiB", "disk": 4096})
    assert caught.value.device == "disk" and caught.value.budget_bytes == 4096


def test_a_card_that_is_no_name_is_refused_by_its_own_field():
    for options in ({}, {"max_memory": {0: "4GiB"}}):
        with pytest.raises(RequestError) as caught:
            trimtab.plan(BASE, card=8, **options)
        assert caught.value.field == "card"


@pytest.mark.parametrize(("given_map", "device"), [({"cpu": "8GiB"}, "cpu"), ({1: "4GiB", "cpu": "8GiB"}, "cuda:1")])
def test_a_plan_for_a_card_refuses_budgets_of_another_device_by_the_name_of_the_argument(given_map, device):
    with pytest.raises(RequestError, match=f"names {device}, and a plan for GeForce RTX 4060 8GB computes on that card") as caught:
        trimtab.plan(BASE, card="RTX 4060 8GB", max_memory=given_map)
    assert caught.value.field == "max_memory" and caught.value.allowed == ("0", "cuda:0")
