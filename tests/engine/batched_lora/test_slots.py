"""The table that kernels look adapters up in: addresses, ranks and scales where the adapters are, and what is refused."""

import dataclasses

import pytest
import torch

import trimtab
from tests.adapter_files import pair, write_adapter
from tests.anatomies import small
from tests.raised import refused
from trimtab.demo.demo import FOLDER as DEMO
from trimtab.engine.batched_lora.table import RANK_STEP, AdapterSlots, ExpertSlots
from trimtab.engine.layers.leaves import Leaf
from trimtab.engine.lora import layers as lora
from trimtab.errors import RequestError
from trimtab.planning.values.execution import expert_table_bytes


@pytest.fixture(scope="module")
def model():
    found = {name: DEMO / "adapters" / name for name in ("style", "specialist", "rslora-dora")}
    plan = trimtab.plan(DEMO / "base", quant="none", dtype="float32", adapters=found, context=128, device="cpu")
    with trimtab.load(plan) as loaded:
        yield loaded


def slots_of(model, rows=4, **options):
    return AdapterSlots(model.hf_model.modules(), model.adapter_store, rows, torch.device("cpu"), module=None, **options)


def leaves_of(model):
    return [module for module in model.hf_model.modules() if isinstance(module, Leaf)]


@pytest.mark.parametrize("rows", [1, 64])
def test_a_plan_counts_the_tables_of_experts(rows):
    """Of steps, and where prompts of several rows go through together, of their passes: 24 MB for 48 layers of 512 experts."""
    anatomy = small([(64, 64)] * 2, experts=512)
    anatomy = dataclasses.replace(
        anatomy, rows=tuple(dataclasses.replace(row, takes_lora=row.kind == "experts") for row in anatomy.rows)
    )
    modules = [torch.nn.Module() for _ in range(2)]
    for one in modules:
        one.num_experts = 512
    made = [ExpertSlots(modules, torch.device("cpu"), slots) for slots in ((max(32, rows),) if rows == 1 else (max(32, rows), 32))]
    tensors = [table for one in made for table in one._tables]
    assert all(table.is_contiguous() for table in tensors)  # kernels read them by address
    assert expert_table_bytes(anatomy, rows) == sum(one.nbytes for one in tensors) > 10**5


def test_every_layer_of_a_slot_has_its_adapters_addresses(model):
    slots = slots_of(model)
    slots.set_rows(["specialist", None, "style"])
    assert slots.row_slots.tolist() == [0, -1, 1, -1]
    seen = 0
    for leaf in leaves_of(model):
        args = slots.args([leaf], 3)
        # Towers run before there are rows, whatever adapters change in them.
        if not leaf.adapters.keys() & {"style", "specialist"} or "tower" in leaf.module_path:
            assert args is None and leaf not in slots._covered
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
    attention = next(m for path, m in model.hf_model.named_modules() if path.endswith("language_model.layers.0.self_attn"))
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
    assert slots.row_slots.tolist() == [0] and not torch.equal(first, slots._table["A_ptr"])
    slots.set_rows(["style"])
    assert torch.equal(first, slots._table["A_ptr"])
    assert refused(slots_of, model, rows=2, slots=1).field == "slots"


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
    assert slots.why_not(None) is None and slots.why_not("style") is None and "DoRA" in slots.why_not("rslora-dora")
    with pytest.raises(RequestError, match="DoRA"):
        slots.set_rows(["rslora-dora"])


@pytest.fixture
def loaded(model, tmp_path):
    """Load adapters of zeros: (name, rank, module paths); unloaded afterwards."""
    names = []

    def load(name, rank, paths):
        shapes = {}
        for path in paths:
            leaf = model.hf_model.get_submodule(path)
            shapes |= pair(path, leaf.out_features, leaf.in_features, rank=rank)
        folder = write_adapter(tmp_path / name, shapes, r=rank, lora_alpha=rank, target_modules=list(paths))
        model.load_adapter(name, folder)
        names.append(name)

    yield load
    for name in names:
        model.unload_adapter(name)


TEXT = "model.language_model.layers"


def test_rows_that_switch_among_attached_adapters_never_change_the_shape(model, loaded):
    loaded("one", 4, [f"{TEXT}.1.self_attn.q_proj"])
    loaded("gate", 40, [f"{TEXT}.2.per_layer_input_gate"])
    slots = slots_of(model)
    slots.set_rows(["one"])
    shape = slots.shape_key
    # "one" is small and touches one layer, the others are larger, touch other kinds of layers, and towers.
    assert shape[0] == 48 and model.adapter_store.holders["one"].fitting.largest_rank == 4
    for names in (["style", "one"], ["specialist"], [None, "gate"], ["gate", "specialist", None, "style"], [None]):
        slots.set_rows(names)
        assert slots.shape_key == shape
    covered = {lora.kind_of(leaf.module_path) for leaf in leaves_of(model) if leaf in slots._covered}
    names = [f"self_attn.{name}_proj" for name in "qkvo"] + [f"mlp.{name}_proj" for name in ("gate", "up", "down")]
    assert covered == {f"{TEXT}.*.{name}" for name in [*names, "per_layer_input_gate"]}


def test_only_an_adapter_larger_than_any_before_changes_the_shape_when_it_is_loaded(model, loaded):
    slots = slots_of(model)
    slots.set_rows(["style"])
    shape = slots.shape_key
    loaded("same", RANK_STEP, [f"{TEXT}.3.mlp.up_proj"])
    assert slots.shape_key == shape
    loaded("wider", RANK_STEP, [f"{TEXT}.3.per_layer_projection"])
    layers = sum(leaf.module_path.endswith("per_layer_projection") for leaf in leaves_of(model))
    assert slots.shape_key == (shape[0], shape[1] + layers, *shape[2:])
    loaded("higher", RANK_STEP + 1, [f"{TEXT}.3.mlp.up_proj"])
    assert slots.shape_key == (shape[0] + RANK_STEP, shape[1] + layers, *shape[2:])
    shape = slots.shape_key
    model.unload_adapter("style")
    model.load_adapter("style", DEMO / "adapters" / "style")
    assert slots.shape_key == shape
    slots.set_rows(["same", "wider", "higher", "style"])
    assert slots.shape_key == shape


def test_a_row_without_an_adapter_in_a_layer_that_others_cover_finds_rank_0(model, loaded):
    loaded("one", 4, [f"{TEXT}.1.self_attn.q_proj"])
    slots = slots_of(model)
    slots.set_rows(["one"])
    args = slots.args([model.hf_model.get_submodule(f"{TEXT}.2.self_attn.q_proj")], 1)
    assert (int(args.rank[0, 0]), int(args.A_ptr[0, 0]), int(args.B_ptr[0, 0])) == (0, 0, 0)


def test_half_precision_is_cast_and_comes_from_one_piece(model, tmp_path):
    leaf = model.hf_model.get_submodule(f"{TEXT}.1.self_attn.q_proj")
    shapes = pair(leaf.module_path, leaf.out_features, leaf.in_features)
    model.load_adapter("half", write_adapter(tmp_path, shapes, dtype="bfloat16", target_modules=["q_proj"]))
    try:
        slots = slots_of(model)
        slots.set_rows(["half"])
        found = leaf.adapters["half"]
        assert found.A.dtype == torch.float32
        assert found.A.untyped_storage().data_ptr() == found.B.untyped_storage().data_ptr()
        args = slots.args([leaf], 1)
        assert [int(args.A_ptr[0, 0]), int(args.B_ptr[0, 0])] == [found.A.data_ptr(), found.B.data_ptr()]
    finally:
        model.unload_adapter("half")


def test_what_is_held_is_fitted_once_and_only_to_its_own_model(model, tmp_path):
    held = model.read_adapter(DEMO / "adapters" / "style")
    fitting = model.fitting(held)
    model.load_adapter("again", held)
    assert model.adapter_store.holders["again"].fitting is fitting is model.fitting(held)
    model.unload_adapter("again")
    assert all("again" not in leaf.adapters for leaf in leaves_of(model)) and "again" not in model.adapter_store.holders
    plan = trimtab.plan(DEMO / "base", quant="none", dtype="float32", context=128, device="cpu")
    with trimtab.load(plan) as other:
        other.load_adapter("style", held)
        assert other.fitting(held) is not fitting
        assert all("style" in leaf.adapters for leaf in leaves_of(other) if leaf.module_path.endswith("mlp.up_proj"))
    assert other.adapter_store.holders == {}


def test_an_adapter_comes_and_goes_without_a_walk_through_the_model(model, monkeypatch):
    held = model.read_adapter(DEMO / "adapters" / "specialist")
    slots = slots_of(model)
    slots.set_rows(["specialist", "style"])

    def fail(self, *args, **options):
        raise AssertionError("a walk through all modules takes milliseconds, in which no row is answered")

    with monkeypatch.context() as patch:
        patch.setattr(torch.nn.Module, "named_modules", fail)
        model.unload_adapter("specialist")
        model.load_adapter("specialist", held)
        slots.set_rows(["specialist", "style"])
    leaf = next(leaf for leaf in leaves_of(model) if "specialist" in leaf.adapters)
    args = slots._table["A_ptr"][slots._place[leaf], int(slots.row_slots[0])]
    assert int(args) == leaf.adapters["specialist"].A.data_ptr()


def test_layers_whose_adapters_are_set_have_their_addresses_and_the_others_are_not_looked_up(model):
    """As the last layers of a prompt do: other adapters than those of the store, and one row."""
    leaves = [leaf for leaf in leaves_of(model) if leaf.module_path.startswith(f"{TEXT}.1.")]
    q, gate, up = (next(leaf for leaf in leaves if leaf.module_path.endswith(name)) for name in ("q_proj", "gate_proj", "up_proj"))
    A, B = torch.randn(4, up.in_features), torch.randn(up.out_features, 4)
    table = AdapterSlots(leaves, model.adapter_store, 1, torch.device("cpu"), module=None, slots=1)
    table.set_layers({up: lora.LinearAdapter("language", 0.5, A, B)})
    assert table.args([q], 1) is None
    args = table.args([gate, up], 1, is_empty=True)
    assert args.A_ptr.tolist() == [[0], [A.data_ptr()]] and args.B_ptr.tolist() == [[0], [B.data_ptr()]]
    assert args.rank.tolist() == [[0], [4]] and args.scale.tolist() == [[0.0], [0.5]] and args.row_slots.tolist() == [0]
    assert args.low.shape == (1, 2, RANK_STEP) and args.is_empty
    args.low.zero_()
    table.empty(1)
    assert (args.low.view(torch.int32) == -1).all()


def test_a_layer_that_is_not_in_a_table_keeps_its_adapter(model):
    inside, outside = (model.hf_model.get_submodule(f"{TEXT}.{number}.self_attn.q_proj") for number in (1, 2))
    table = AdapterSlots([inside], model.adapter_store, 1, torch.device("cpu"), module=None, slots=1)
    x = torch.randn(1, 3, outside.in_features)
    try:
        model.adapter_store.set("style")
        with torch.no_grad(), model.adapter_store.applying(table):
            found, base = outside(x), inside(x)
        with torch.no_grad():
            assert torch.equal(found, outside(x)) and not torch.equal(found, outside.base(x))
            assert torch.equal(base, inside.base(x))  # a table without an adapter for a layer of its own
    finally:
        model.adapter_store.none()


def test_layers_share_a_x_only_where_all_of_a_group_follow_one_another(model):
    attention = model.hf_model.get_submodule(f"{TEXT}.1.self_attn")
    q, k, v = attention.q_proj, attention.k_proj, attention.v_proj
    for leaves, group in (((q, k, v), (q, k, v)), ((q, k), None), ((q, v, k), None)):
        table = AdapterSlots(leaves, model.adapter_store, 1, torch.device("cpu"), module=None)
        assert table._groups.get(q) == group, group
