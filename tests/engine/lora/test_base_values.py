"""What attaching an adapter needs of the weights below it: in pieces, each within the plan's memory, nothing larger in between."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile

from tests.anatomies import e_series
from trimtab.engine.formats import int8_head, weights
from trimtab.engine.formats.bitsandbytes import quantize
from trimtab.engine.formats.packed import Packed, keep
from trimtab.engine.layers import leaves
from trimtab.engine.lora import base_values
from trimtab.engine.lora.store import AdapterStore
from trimtab.formats.record import HEAD8
from trimtab.planning.memory import activations

CPU = torch.device("cpu")
KINDS = ("none", HEAD8, "int8", "fp4", "nf4", "nf4-dq")
ROWS, WIDTH, RANK = 1024, 512, 8
PIECE = 128 * WIDTH


def packed_of(kind, rows, columns, dtype=torch.bfloat16):
    weight = torch.randn(rows, columns, generator=torch.Generator().manual_seed(0)).to(dtype)
    if kind == "none":
        return keep(weight)
    if kind == HEAD8:
        q, scale = int8_head.quantize_rows(weight)
        return Packed(HEAD8, (rows, columns), dtype, {"weight": q, "scale": scale}, {})
    return quantize(weight, kind)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("columns", [64, 40, 6, 33])
def test_dequantized_rows_are_the_rows_of_the_dequantized_weight(kind, columns):
    packed = packed_of(kind, 96, columns)
    whole = weights.dequantize(packed).clone()
    for start, stop in ((0, 96), (0, 1), (31, 33), (37, 90), (95, 96)):
        rows = weights.dequantize_rows(packed, start, stop, CPU)
        assert rows.dtype == whole.dtype and torch.equal(rows, whole[start:stop])
        rows.zero_()  # it is nobody else's
    assert torch.equal(weights.dequantize(packed), whole)


def model_with(kind, dtype=torch.bfloat16):
    """Return a module with the layer or the table `it`, and a DoRA pair for it."""
    common = {"device": CPU, "dtype": dtype, "store": AdapterStore()}
    if kind == "table":
        weight = nn.Parameter(torch.randn(ROWS, WIDTH).to(dtype), requires_grad=False)
        it = leaves.ResidentTable("it", weight, embed_scale=None, padding_idx=None, **common)
        shapes = {"A": (RANK, ROWS), "B": (WIDTH, RANK)}
    else:
        packed = packed_of(kind, ROWS, WIDTH, dtype)
        it = leaves.HostLeaf("it", packed, bias=None, **common)
        shapes = {"A": (RANK, WIDTH), "B": (ROWS, RANK)}
    model = nn.Module()
    model.it = it
    tensors = {role: torch.randn(shape) for role, shape in shapes.items()}
    lora = SimpleNamespace(tensors={name: name for name in (*tensors, "magnitude")}, scale=0.5, fan_in_fan_out=False)
    return model, {"it": {"lora": lora}}, tensors


def taken_bytes(profiled):
    """Return the most bytes that were allocated since the beginning, and how many there are at the end."""
    now = most = 0
    for event in profiled.profiler.kineto_results.events():
        if event.name() == "[memory]":
            now += event.nbytes()
            most = max(most, now)
    return most, now


@pytest.mark.parametrize("kind", [*KINDS, "table"])
def test_a_piece_takes_what_the_plan_counts_and_leaves_nothing_but_results(kind, monkeypatch):
    monkeypatch.setattr(base_values, "NORM_VALUES", PIECE)
    monkeypatch.setattr(int8_head, "HEAD_CHUNK_VALUES", PIECE // 4)
    monkeypatch.setattr(activations, "ADAPTER_PIECE_VALUES", PIECE)
    counted = activations.adapter_piece_bytes.__wrapped__(e_series("E2B"))
    model, targets, tensors = model_with(kind)
    pieces = base_values.base_values(model, targets, read=tensors.__getitem__, device=CPU, dtype=torch.float32)
    most, held, count = 0, 0, 0
    with torch.no_grad():
        while True:
            with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
                ended = next(pieces, pieces)
            piece, left = taken_bytes(profiled)
            if ended is pieces:
                break
            most, held, count = max(most, held + piece), held + left, count + 1
            results = 4 * ROWS if kind != "table" else 4 * WIDTH * count
            assert held <= results + 2 * 4 * RANK * WIDTH, (count, held)  # and the small factor, read and transposed
    assert count == ROWS * WIDTH // PIECE and most <= counted
    assert most > counted // 2, "not measured"


def test_a_plan_with_adapters_has_room_for_preparing_one_beside_the_keys_and_values_of_prompts():
    anatomy = e_series("E2B")
    request = SimpleNamespace(images=0, audio_s=0.0, context_tokens=4096, batch=4, kv_tokens=None, kv="full")
    use = activations.use_of(request, anatomy, answer_tokens=256)
    for chunk_tokens in (0, 16, 1024):
        options = {"quant": "nf4-dq", "has_rows": True, "chunk_tokens": chunk_tokens}
        needs = activations.needs_of(anatomy, use, has_adapters=True, **options)
        kept = max(kv_bytes for name, (kv_bytes, _) in needs.phases.items() if name != "adapter")
        counted = needs.kv_cache_bytes + needs.activation_bytes
        assert counted >= kept + activations.adapter_piece_bytes(anatomy) > kept + 16 * 2**20
    small = replace(anatomy, rows=tuple(row for row in anatomy.rows if row.weight and row.weight.numel <= 2**20))
    assert 0 < activations.adapter_piece_bytes(small) < 16 * 2**20
