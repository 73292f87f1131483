"""The table that kernels look adapters up in: addresses, ranks and scales where the adapters are, and what is refused."""

from __future__ import annotations

import pytest
import torch

import trimtab
from trimtab.demo.line import FOLDER as DEMO
from trimtab.errors import RequestError
from trimtab.runtime.slots import RANK_STEP, AdapterSlots
from trimtab.runtime.tiers import Leaf


@pytest.fixture(scope="module")
def model():
    found = {name: DEMO / "adapters" / name for name in ("style", "specialist", "rslora-dora")}
    plan = trimtab.plan(DEMO / "base", quant="none", dtype="float32", adapters=found, context=128, device="cpu")
    with trimtab.load(plan) as loaded:
        yield loaded


def slots_of(model, rows=4, **options):
    return AdapterSlots(model.hf_model, model.route, rows, torch.device("cpu"), module=None, **options)


def leaves_of(model):
    return [module for module in model.hf_model.modules() if isinstance(module, Leaf)]


def test_every_layer_of_a_slot_has_its_adapters_addresses(model):
    slots = slots_of(model)
    slots.set_rows(["specialist", None, "style"])
    assert slots.row_slots.tolist() == [0, -1, 1, -1]
    seen = 0
    for leaf in leaves_of(model):
        args = slots.args([leaf], 3)
        if not leaf.adapters.keys() & {"style", "specialist"}:
            assert args is None and not slots.covers(leaf)
            continue
        assert args.low.shape == (3, 1, slots.largest_rank)
        for name, slot in (("specialist", 0), ("style", 1)):
            found = leaf.adapters.get(name)
            row = [int(args.A_ptr[0, slot]), int(args.B_ptr[0, slot]), int(args.rank[0, slot])]
            expected = [0, 0, 0] if found is None else [found.A.data_ptr(), found.B.data_ptr(), found.A.shape[0]]
            assert row == expected
            assert found is None or float(args.scale[0, slot]) == pytest.approx(found.scale)
            seen += found is not None
    assert seen > 20 and slots.largest_rank % RANK_STEP == 0


def test_layers_that_read_one_input_are_rows_of_one_table(model):
    slots = slots_of(model)
    slots.set_rows(["style"])
    attention = next(
        m for path, m in model.hf_model.named_modules() if path.endswith("language_model.layers.0.self_attn")
    )
    projections = [attention.q_proj, attention.k_proj, attention.v_proj]
    args = slots.args(projections, 2)
    assert args.A_ptr.shape == (3, slots.slots) and args.low.shape == (2, 3, slots.largest_rank)
    assert [int(args.A_ptr[i, 0]) for i in range(3)] == [leaf.adapters["style"].A.data_ptr() for leaf in projections]
    with pytest.raises(ValueError, match="not next to each other"):
        slots.args([attention.q_proj, attention.v_proj], 1)


def test_the_slot_used_longest_ago_is_given_away_and_never_one_in_use(model):
    slots = slots_of(model, rows=1, slots=1)
    slots.set_rows(["style"])
    first = slots._table["A_ptr"].clone()
    slots.set_rows(["specialist"])
    assert slots.row_slots.tolist() == [0]
    assert not torch.equal(first, slots._table["A_ptr"])
    slots.set_rows(["style"])
    assert torch.equal(first, slots._table["A_ptr"])
    with pytest.raises(RequestError) as caught:
        slots_of(model, rows=2, slots=1)
    assert caught.value.field == "slots"


def test_an_adapter_that_is_loaded_again_gets_its_new_addresses(model):
    slots = slots_of(model)
    slots.set_rows(["style", "specialist"])
    held = model.read_adapter(DEMO / "adapters" / "style")
    model.unload_adapter("style")
    model.load_adapter("style", held)
    slots.set_rows(["style", "specialist"])
    leaf = next(leaf for leaf in leaves_of(model) if "style" in leaf.adapters)
    slot = int(slots.row_slots[0])
    assert int(slots.args([leaf], 1).A_ptr[0, slot]) == leaf.adapters["style"].A.data_ptr()
    assert len(slots._held) == 2


def test_what_is_more_than_plain_lora_is_refused_by_name(model):
    slots = slots_of(model)
    assert slots.why_not(None) is None and slots.why_not("style") is None
    assert "DoRA" in slots.why_not("rslora-dora")
    with pytest.raises(RequestError, match="DoRA"):
        slots.set_rows(["rslora-dora"])
