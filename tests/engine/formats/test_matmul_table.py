"""A layer's product is the first way of the table that is for it, for this many rows, and for these values."""

import pytest
import torch
from torch.nn import functional

from trimtab.engine.formats.bitsandbytes import quantize
from trimtab.engine.formats.matmul_table import Matmul, MatmulTable
from trimtab.engine.layers.leaves import ResidentLeaf
from trimtab.engine.lora import layers as lora
from trimtab.engine.lora.store import AdapterStore, Selection

X = torch.arange(24.0).view(1, 3, 8)


def layer(store):
    return ResidentLeaf(
        "layer", quantize(torch.eye(4, 8), "nf4"), bias=None, device=torch.device("cpu"), dtype=torch.float32, store=store
    )


def value(number):
    return lambda leaf, x: torch.full((*x.shape[:-1], 4), float(number))


def refusing(leaf, x):
    return None


def test_the_first_way_that_takes_the_rows_and_the_values_computes():
    leaf, other = layer(AdapterStore()), layer(AdapterStore())
    few, many = Matmul("gemv4", {leaf}, value(1), most=2), Matmul("gemm4", {leaf}, value(2), least=3, most=3)
    table = MatmulTable(few, None, Matmul("kept", {leaf}, refusing), many, Matmul("dequantized", {leaf, other}, value(3)))
    for rows, expected in ((1, 1), (2, 1), (3, 2), (4, 3)):
        with leaf.adapter_store.multiplying(table):
            assert float(leaf(X[:, :1].expand(1, rows, 8))[0, 0, 0]) == expected
    assert table.first(leaf, 2) is few and table.first(other, 2).name == "dequantized" and table.first("none", 1) is None
    with other.adapter_store.multiplying(MatmulTable(few, many)):  # of another layer
        assert torch.equal(other(X), functional.linear(X, torch.eye(4, 8)))


def test_an_adapter_is_added_once_and_a_failed_pass_leaves_no_table():
    store = AdapterStore()
    leaf = layer(store)
    leaf.adapters["a"] = lora.LinearAdapter("language", 1.0, torch.ones(1, 8), torch.ones(4, 1))
    store.select(Selection("a"))
    change = X.sum(-1, keepdim=True).expand(1, 3, 4)
    with store.multiplying(MatmulTable(Matmul("kept", {leaf}, value(2)))):
        assert torch.equal(leaf(X), 2 + change)
    with store.multiplying(MatmulTable(Matmul("columns", {leaf}, value(2), has_adapter=True))):
        assert torch.equal(leaf(X), torch.full((1, 3, 4), 2.0))
    with pytest.raises(KeyboardInterrupt), store.multiplying(MatmulTable()):
        raise KeyboardInterrupt
    assert store.matmuls is None and torch.equal(leaf(X), functional.linear(X, torch.eye(4, 8)) + change)
