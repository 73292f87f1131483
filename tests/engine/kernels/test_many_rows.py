"""Products and adapters of 9 to 64 rows equal float64 and bitsandbytes' own unpacked weight; a wrong kernel is found."""

import pytest
import torch

from tests.cuda_on_cpu.modules import launches
from tests.cuda_on_cpu.modules import rows as cpu_module
from trimtab.engine.formats.bitsandbytes import quantize
from trimtab.engine.formats.weights import dequantize
from trimtab.engine.kernels import gemm4, gemv4, selfcheck
from trimtab.engine.kernels.selfcheck import relative_error

TYPES = (torch.bfloat16, torch.float16)


def random(*shape, dtype=torch.float32, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed + sum(shape))).to(dtype)


def packed(quant, rows, columns, dtype=torch.bfloat16):
    return quantize(random(rows, columns, dtype=dtype) * 0.03, quant)


@pytest.mark.parametrize("order", [0, 1, 7])  # of threads and blocks
@pytest.mark.parametrize("quant", ["nf4-dq", "nf4", "fp4"])
def test_a_product_of_many_rows_is_that_of_the_unpacked_weights(quant, order):
    module = cpu_module(order)
    for n, rows, columns, dtype in (
        (9, (64,), 256, torch.bfloat16), (33, (96, 32, 40), 512, torch.bfloat16), (17, (130, 64), 1280, torch.float16),
    ):  # fmt: skip
        weights = [packed(quant, count, columns, dtype) for count in rows]
        assert not any(gemm4.why_not(one, dtype) for one in weights)
        bias = [random(count, dtype=dtype) * 0.1 if m % 2 == 0 else None for m, count in enumerate(rows)]
        x = random(n, columns, dtype=dtype, seed=1)
        made = torch.full((n, sum(rows)), torch.nan, dtype=dtype)
        gemm4.linear(x, weights, made, bias=bias, module=module)
        whole = torch.cat([dequantize(one) for one in weights]).double()
        added = torch.cat([torch.zeros(count) if one is None else one for one, count in zip(bias, rows)]).double()
        # The weights are bitsandbytes' own bits: what is left is one rounding of the sum.
        assert relative_error(made, x.double() @ whole.T + added) < torch.finfo(dtype).eps / 2


@pytest.mark.parametrize("dtype", TYPES)
def test_every_row_has_its_own_adapter(dtype):
    module = cpu_module()
    for rows, columns, multiprocessors in (((64, 64), 256, 1), ((40, 24, 72), 768, 64)):
        module.multiprocessors = multiprocessors  # few: no split of the columns; many: parts are summed where adapters are added
        weights = [packed("nf4-dq", count, columns, dtype) for count in rows]
        assert gemm4.wrong(weights, module, dtype, counts=(11,)) is None
    assert {"rows_product_16", "rows_low", "rows_up"} <= set(launches(module))


def test_adapters_over_any_layer_are_added_as_the_matrix_vector_kernels_add_them():
    module, n, wide, high = cpu_module(), 21, 100, 70
    slots = [(random(rank, wide) / 10, random(high, rank), 0.25) for rank in (3, 8, 20)]
    numbers = torch.tensor([i % 4 - 1 for i in range(n)], dtype=torch.int32)
    for round_change in (False, True):
        x, y = random(n, wide, dtype=torch.bfloat16), random(n, high, dtype=torch.bfloat16)
        args = gemv4.lora_args([slots], numbers, 32)
        made, wanted = y.clone(), y.clone()
        gemm4.add(made, args, module, x=x, round_change=round_change)
        gemv4.lora_add(wanted, args, None, x=x, round_change=round_change)
        assert float((made != wanted).float().mean()) < 0.01 and torch.equal(made[numbers < 0], y[numbers < 0])


def test_a_kernel_that_takes_the_wrong_scale_is_found():
    text = gemm4.source().replace(" + chunk * 4 + block) >> 8", ") >> 8")
    assert text != gemm4.source()
    weights = [packed("nf4-dq", 64, 768)]  # 12 blocks a row: some rows begin under one outer scale and end under the next
    weights[0].parts["nested_absmax"][1:] *= 3
    assert gemm4.wrong(weights, cpu_module(source=text), torch.bfloat16, counts=(9,)) is not None
    assert gemm4.wrong(weights, cpu_module(), torch.bfloat16, counts=(9,)) is None


def test_weights_of_other_forms_are_refused_with_the_reason():
    assert "whole chunks of 256" in gemm4.why_not(packed("nf4", 64, 320), torch.bfloat16)
    assert "the weight is" in gemm4.why_not(packed("nf4", 64, 256), torch.float16)
    # Two blocks on a multiprocessor of 228 KiB; one of 32 rows where there are 99, of 16 where there are 64.
    assert 2 * (gemm4.shared_bytes(64, 16) + 1024) <= 228 * 1024
    assert gemm4.shared_bytes(32, 16) <= 99 * 1024 and gemm4.shared_bytes(16, 16) <= 64 * 1024


@pytest.mark.parametrize("multiprocessors", [1, 20, 132])
def test_blocks_have_as_many_items_as_each_other_and_every_item_is_one_blocks(multiprocessors):
    for rows, columns, pieces in (
        ([2560], 10240, 1), ([2048, 512, 512], 2560, 2), ([256], 2560, 1), ([2560], 256, 1), ([10240, 10240], 2560, 2),
        ([130], 512, 1),
    ):  # fmt: skip
        each, items, shared = gemm4.each_of(rows, columns, multiprocessors, pieces)
        chunks = columns // 256
        assert items == sum(-(-count // 128) for count in rows) * chunks
        assert -(-items // each) * pieces <= 2 * multiprocessors + pieces and each >= 1
        blocks = [{item // each for item in range(unit * chunks, (unit + 1) * chunks)} for unit in range(items // chunks)]
        assert max(map(len, blocks)) == shared


def test_a_way_that_seems_slower_is_timed_again(monkeypatch):
    times = iter([5.0, 4.0, 3.0, 4.5])
    monkeypatch.setattr(selfcheck, "graph_us", lambda run, device, *, calls: next(times))
    assert selfcheck.pair_us(None, None, None) == (3.0, 4.0)
    count = []
    monkeypatch.setattr(selfcheck, "graph_us", lambda run, device, *, calls: count.append(run) or (6.0 if run == "ours" else 4.0))
    assert selfcheck.pair_us("ours", "theirs", None) == (6.0, 4.0) and count == ["ours", "theirs"] * 4


@pytest.mark.parametrize(("shared_bytes", "tile"), [(64 * 1024, 16), (99 * 1024, 32), (227 * 1024, 64)])
def test_more_rows_than_shared_memory_has_room_for_are_multiplied_in_pieces(shared_bytes, tile):
    module = cpu_module()
    module.shared_bytes = shared_bytes
    assert gemm4.wrong([packed("nf4-dq", 130, 512)], module, torch.bfloat16, counts=(9, 70)) is None
    assert {one for one in launches(module) if "product" in one} == {"rows_product_16", f"rows_product_{tile}"}


def test_in_torch_a_step_of_many_rows_adds_what_peft_adds():
    weights = [packed("nf4", 24, 128), packed("nf4", 8, 128)]
    x = random(12, 128, dtype=torch.bfloat16)
    adapters = [[(random(4, 128) / 11, random(one.shape[0], 4), 0.5)] for one in weights]
    args = gemv4.lora_args(adapters, torch.tensor([0, -1] * 6, dtype=torch.int32), 8)
    made = torch.empty(12, 32, dtype=torch.bfloat16)
    gemm4.linear(x, weights, made, lora=args)
    start = 0
    for one, ((A, B, scale),) in zip(weights, adapters):
        y = torch.nn.functional.linear(x, dequantize(one))
        change = (x.float() @ A.T @ B.T * scale).to(y.dtype)
        change[1::2] = 0
        assert float((made[:, start : start + one.shape[0]] != y + change).float().mean()) < 0.02
        start += one.shape[0]
