"""The limit of decoding: the bytes of a step are counted once, where they are, and set the pace of the slowest way."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.adapter_files import match, pair
from tests.anatomies import e_series, small
from tests.planning.test_planner import CPU, E2B, TABLE, plan
from trimtab.benchmark.roofline import Bandwidth, Read, limit_of, step_reads
from trimtab.checkpoint.anatomy import KVLayer
from trimtab.formats.record import packed_bytes

RATES = Bandwidth(device_Bps=1e12, host_Bps=1e10, link_Bps=2e10, disk_Bps=1e9)
RESIDENT = {"*": "resident"}
SMALL = small()
SMALL_PLAN = plan(SMALL, place=RESIDENT, quant="none")
sizes = st.integers(0, 10**12)


def total(reads, way=None, what=None):
    return sum(read.nbytes for read in reads if way in (None, read.way) and what in (None, read.what))


def step(made, anatomy, context=1000.0, **more):
    return step_reads(made, anatomy, context_tokens=context, **more)


def reads_of(device=0, host=0, link=0, disk=0):
    named = {"device": device, "host": host, "link": link, "disk": disk}
    return tuple(Read(what="decoder", way=way, nbytes=nbytes) for way, nbytes in named.items())


# What is read


def test_a_resident_model_reads_its_packed_decoder_and_its_whole_head_but_one_row_of_each_table():
    found = step(plan(place=RESIDENT), E2B)
    assert {read.way for read in found} == {"device"} and total(found, what="head") == 262144 * 1536 * 2
    assert total(found, what="rows") == 1536 * 2 + 35 * 256 * 2 + 2  # both tables and the scale beside the first
    linears = [row for row in E2B.rows if row.part == "language" and row.kind == "linear"]
    packed = sum(packed_bytes(row.weight.shape, "nf4-dq", "bfloat16") for row in linears)
    norms = sum(t.nbytes for row in E2B.rows if row.part == "language" and row.kind == "other" for t in row.tensors)
    assert total(found, what="decoder") == packed + norms


def test_the_towers_are_not_read():
    with_towers, without = e_series("E2B"), e_series("E2B", towers=False)
    assert step(plan(with_towers, place=RESIDENT), with_towers) == step(plan(without, place=RESIDENT), without)


def test_streamed_layers_are_read_over_the_link_and_again_on_the_device():
    layer = "model.language_model.layers.3"
    whole = step(plan(place=RESIDENT), E2B)
    found = step(plan(place={"*": "resident", "table": "gather", layer: "stream"}), E2B)
    moved = sum(
        packed_bytes(row.weight.shape, "nf4-dq", "bfloat16")
        for row in E2B.rows if row.block == layer and row.kind == "linear"
    )  # fmt: skip
    assert total(found, "link", "decoder") == moved and total(found, "link", "rows") == 35 * 256 * 2
    assert total(found, "device", "decoder") == total(whole, "device", "decoder")


def test_a_block_on_the_host_is_read_there_and_not_on_the_device():
    layer = "model.language_model.layers.3"
    whole, found = step(plan(place=RESIDENT), E2B), step(plan(place={"*": "resident", layer: "host"}), E2B)
    assert total(found, "host") > 10**6 and total(found, "link") == 0
    assert total(found, "device") + total(found, "host") == total(whole, "device")


def test_a_table_in_its_file_is_read_from_the_disk_and_over_the_link():
    made = plan(gpu=6)
    rows = tuple(replace(row, home="file") if row.block_path == TABLE else row for row in made.placements)
    found = step(replace(made, placements=rows), E2B)
    assert total(found, "disk") == total(found, "link") == 35 * 256 * 2


def test_on_a_cpu_what_is_streamed_is_read_from_the_same_memory_once():
    whole = plan(machine=CPU, place=RESIDENT)
    streamed = plan(machine=CPU, place={"*": "resident", "language": "stream", "table": "gather"})
    assert streamed.tier_of("model.language_model.layers.0") == "stream" and step(streamed, E2B) == step(whole, E2B)


def test_stock_reads_the_model_as_if_all_of_it_were_resident():
    lean = plan(gpu=2.0)
    assert {row.tier for row in lean.placements} > {"resident"}
    assert step_reads(lean, E2B, context_tokens=1000, is_stock=True) == step(plan(place=RESIDENT), E2B)


def test_an_adapter_is_read_in_float32_and_only_where_a_step_runs(tmp_path):
    language, tower = "model.language_model.layers.0.self_attn.q_proj", "model.vision_tower.encoder.layers.0.mlp"
    spec = match(tmp_path / "a", pair(language, 2048, 1536), E2B)
    assert total(step(plan(place=RESIDENT), E2B, adapter=spec), what="adapter") == 4 * 4 * (2048 + 1536)
    moved = replace(spec, targets=tuple(replace(t, part="vision", module_path=tower) for t in spec.targets))
    assert total(step(plan(place=RESIDENT), E2B, adapter=moved), what="adapter") == 0


def test_only_the_experts_that_a_token_is_sent_to_are_read():
    anatomy = small(experts=8)
    made = plan(anatomy, place=RESIDENT, quant="none")
    all_of_them, two = (step(made, anatomy, experts_per_token=count) for count in (None, 2))
    experts = 2 * (8 * 128 * 64 + 8 * 64 * 64) * 2
    assert total(all_of_them) - total(two) == experts * 3 // 4


def test_keys_and_values_grow_with_the_context_up_to_the_window_and_shared_ones_are_read_again():
    full, sliding = KVLayer(0, 2, 64, None, None), KVLayer(1, 2, 64, 512, None)
    layers = (full, sliding, replace(full, layer=2, shares=0), KVLayer(3, 0, 0, None, None, state_values=100))
    anatomy = replace(small(), kv_layers=layers)
    made = plan(anatomy, place=RESIDENT, quant="none")
    found = [total(step(made, anatomy, context=tokens), what="keys and values") for tokens in (100, 2000)]
    token = 2 * 2 * 64 * 2
    assert found == [3 * 100 * token + 200, 2 * 2000 * token + 512 * token + 200]


# How long that takes


def test_what_the_device_and_the_host_read_takes_turns_and_the_rest_runs_beside_it():
    found = limit_of(reads_of(device=10**12, host=10**10, link=10**10, disk=10**8), RATES)
    assert found.seconds == {"device": 1.0, "host": 1.0, "link": 0.5, "disk": 0.1}
    assert found.tok_s == 0.5 and found.bound_by == "device"
    assert limit_of(reads_of(device=10**9, link=10**10), RATES).bound_by == "link"
    assert limit_of(reads_of(device=10**9, host=10**10), RATES).bound_by == "host"
    assert limit_of(reads_of(device=10**9, disk=10**10), RATES).tok_s == pytest.approx(0.1)


@given(sizes, sizes, sizes, sizes)
def test_more_bytes_are_never_faster_and_no_way_is_faster_than_alone(device, host, link, disk):
    reads = reads_of(device + 1, host, link, disk)
    found = limit_of(reads, RATES)
    for read in reads:
        if read.nbytes:
            assert found.tok_s <= limit_of((read,), RATES).tok_s * (1 + 1e-12)
        more = (*(other for other in reads if other is not read), replace(read, nbytes=read.nbytes * 2 + 1))
        assert limit_of(more, RATES).tok_s <= found.tok_s * (1 + 1e-12)


@given(st.floats(1.0, 1e4), sizes, sizes)
def test_twice_the_bandwidth_is_twice_the_limit(factor, device, link):
    reads = reads_of(device + 1, 0, link, 0)
    faster = Bandwidth(**{name: value * factor for name, value in RATES.__dict__.items()})
    assert limit_of(reads, faster).tok_s == pytest.approx(limit_of(reads, RATES).tok_s * factor)


@given(st.floats(0, 1e5), st.floats(0, 1e5))
def test_a_longer_context_never_reads_less(one, other):
    short, long = sorted((one, other))
    assert total(step(SMALL_PLAN, SMALL, short)) <= total(step(SMALL_PLAN, SMALL, long))


def test_a_link_that_is_not_there_and_a_step_that_reads_nothing_have_no_limit():
    with pytest.raises(ValueError, match="there is no link"):
        limit_of(reads_of(link=1), replace(RATES, link_Bps=None))
    with pytest.raises(ValueError, match="reads nothing"):
        limit_of(reads_of(), RATES)
    with pytest.raises(ValueError, match="device_Bps must be above zero"):
        replace(RATES, device_Bps=0.0)


def test_a_measured_rate_is_a_share_of_the_limit():
    assert limit_of(reads_of(device=10**12), RATES).share(0.25) == 0.25
