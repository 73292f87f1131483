"""Several products in one launch: what a chain makes against the same products one after the other in plain torch.

The kernel runs under g++, where a block that waits for another one begins anew when that one has run. Tolerance: what is
rounded to the model's type on the way may fall one step (2^-8 of a bf16 value) to the other side, and the next products mix it.
"""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

from tests.cuda_on_cpu.run import CpuModule, LaunchError, why_not
from trimtab.errors import DeviceError
from trimtab.runtime import chain, matvec
from trimtab.runtime.quant import Packed, quantize

pytestmark = pytest.mark.skipif(why_not() is not None, reason=str(why_not()))
HIDDEN, WIDE, LOOKED, OWN = 512, 1024, 256, 256
FAR = {torch.bfloat16: 1e-2, torch.float16: 1.5e-3}


def module_of(order: int = 0, multiprocessors: int = 3) -> CpuModule:
    module = CpuModule(chain.source(), (), order=order, multiprocessors=multiprocessors)
    module.variant_names = (chain.NAME,)
    return module


def group_of(rows: tuple[int, ...], columns: int, quant: str, dtype: torch.dtype, codes: dict[str, Tensor]) -> list[Packed]:
    """Layers over one input; every weight of a chain has the same code tables, as a loaded model has them."""
    found = []
    for seed, one in enumerate(rows):
        generator = torch.Generator().manual_seed(seed + one + columns)
        packed = quantize((torch.randn(one, columns, generator=generator) * 0.1).to(dtype), quant)
        codes.update({name: code for name, code in packed.codes.items() if name not in codes})
        found.append(packed.with_parts(packed.parts, codes))
    return found


def adapters_of(rows: tuple[int, ...], columns: int, ranks: tuple[int, ...], slots: Tensor, width: int) -> matvec.LoraArgs:
    generator = torch.Generator().manual_seed(columns)
    adapters = [
        [
            (torch.randn(r, columns, generator=generator) / columns**0.5, torch.randn(one, r, generator=generator), 0.3 + number)
            if r and not (m == 1 and number == 0)  # a layer that this adapter leaves as it is
            else None
            for number, r in enumerate(ranks)
        ]
        for m, one in enumerate(rows)
    ]
    return matvec.lora_args(adapters, slots, width)


class Case:
    """A layer between two attentions, of tiny shapes: its products for the kernel, and the same one after the other in torch."""

    def __init__(self, n: int, *, quant="nf4-dq", dtype=torch.float16, ranks=(), slots=None, width=16, own=True, last=True):
        torch.manual_seed(n)
        codes: dict[str, Tensor] = {}
        self.n, self.dtype = n, dtype
        self.x, self.h = torch.randn(n, LOOKED).to(dtype), torch.randn(n, HIDDEN).to(dtype)
        self.numbers = None if slots is None else torch.tensor(slots, dtype=torch.int32)
        extra = torch.randn(n, 3, OWN).to(dtype)[:, 1]
        scalar = torch.tensor([0.75]).to(dtype)
        weight = [(1 + 0.2 * torch.randn(HIDDEN)).to(dtype) for _ in range(6)]
        up = matvec.Gate("gelu_tanh")
        self.out_h = torch.full((n, HIDDEN), float("nan"), dtype=dtype)
        # rows, columns, gate, norm
        listed = [((HIDDEN,), LOOKED, None, None), ((WIDE, WIDE), HIDDEN, up, (weight[0], weight[1], None))]
        listed += [((HIDDEN,), WIDE, None, None)]
        if own:
            listed += [((OWN,), HIDDEN, matvec.Gate("gelu_tanh", extra), (weight[2], None, None)), ((HIDDEN,), OWN, None, None)]
        if last:
            listed += [((256, 64, 64), HIDDEN, None, (weight[4], weight[5], scalar))]
        self.products = []
        norms = [number for number, one in enumerate(listed) if one[3] is not None]
        for number, (rows, columns, gate, norm) in enumerate(listed):
            lora = adapters_of(rows, columns, ranks, self.numbers, width) if ranks else None
            made = None if norm is None else chain.Norm(norm[0], norm[1], 1e-6, norm[2], self.out_h if number == norms[-1] else None)
            self.products.append(chain.Product(group_of(rows, columns, quant, dtype, codes), lora, gate, made))

    def in_torch(self) -> tuple[Tensor, Tensor]:
        x, h = self.x, self.h
        for one in self.products:
            norm = None
            if one.norm is not None:
                before, h = h, torch.empty_like(h)
                norm = matvec.Norm(before, one.norm.post, one.norm.next, one.norm.eps, one.norm.scalar, h)
            out = torch.empty(self.n, one.width, dtype=self.dtype)
            matvec.matvec4_torch(x, one.weights, out, lora=one.lora, gate=one.gate, norm=norm)
            x = out
        return x, h

    def launched(self, chains: chain.Chains, number: int = 0) -> tuple[Tensor, Tensor]:
        out = torch.full((self.n, self.products[-1].width), float("nan"), dtype=self.dtype)
        self.out_h.fill_(float("nan"))
        chains.begin()
        chains.launch(self.products, self.x, self.h, out, number)
        return out, self.out_h


def error(found: Tensor, wanted: Tensor) -> float:
    return float((found.double() - wanted.double()).norm() / wanted.double().norm())


@pytest.mark.parametrize("order", [0, 1, 7])
@pytest.mark.parametrize("n", [1, 2, 4])
def test_a_chain_is_its_products(n, order):
    case = Case(n)
    out, h = case.launched(chain.Chains(module_of(order), 1))
    wanted, wanted_h = case.in_torch()
    assert error(h, wanted_h) < FAR[case.dtype]
    assert error(out, wanted) < FAR[case.dtype]


@pytest.mark.parametrize("quant, dtype", [("nf4", torch.bfloat16), ("fp4", torch.float16), ("nf4-dq", torch.bfloat16)])
def test_other_formats(quant, dtype):
    case = Case(1, quant=quant, dtype=dtype)
    out, h = case.launched(chain.Chains(module_of(), 1))
    wanted, wanted_h = case.in_torch()
    assert error(h, wanted_h) < FAR[case.dtype] and error(out, wanted) < FAR[case.dtype]


@pytest.mark.parametrize("ranks", [(8, 3), (64, 5), (16, 40)])
@pytest.mark.parametrize("n, slots", [(1, [0]), (2, [1, -1]), (4, [1, 0, -1, 1])])
def test_each_row_has_its_adapter(n, slots, ranks):
    case = Case(n, ranks=ranks, slots=slots, width=64)
    plain = Case(n)
    out, h = case.launched(chain.Chains(module_of(7), 1))
    wanted, wanted_h = case.in_torch()
    assert error(h, wanted_h) < FAR[case.dtype] and error(out, wanted) < FAR[case.dtype]
    unlike = plain.in_torch()[0]
    assert all((error(out[i], unlike[i]) > 0.02) == (slot >= 0) for i, slot in enumerate(slots))


@pytest.mark.parametrize("splits", [1, 2])
@pytest.mark.parametrize("multiprocessors", [3, 5, 16])
def test_however_it_is_divided(multiprocessors, splits):
    case = Case(1, ranks=(8,), slots=[0])
    module = module_of(0, multiprocessors)
    module.kept["splits"] = splits
    out, h = case.launched(chain.Chains(module, 1))
    wanted, wanted_h = case.in_torch()
    assert error(h, wanted_h) < FAR[case.dtype] and error(out, wanted) < FAR[case.dtype]


def test_launches_one_after_the_other_pass_their_own_values():
    chains = chain.Chains(module_of(), 2)
    cases = [Case(1), Case(1, ranks=(8,), slots=[0])]
    cases[1].x.neg_()
    for number, case in itertools.product(range(2), cases):
        out, _ = case.launched(chains, number)
        assert error(out, case.in_torch()[0]) < FAR[case.dtype]


def test_a_chain_without_layers_own_inputs_or_a_next_layer():
    for own, last in itertools.product((True, False), repeat=2):
        case = Case(2, own=own, last=last)
        out, h = case.launched(chain.Chains(module_of(), 1))
        wanted, wanted_h = case.in_torch()
        assert error(h, wanted_h) < FAR[case.dtype] and error(out, wanted) < FAR[case.dtype]


def test_without_new_tags_nothing_waits_and_old_values_are_found():
    """That a launch waits for this step's values, not for any: with the tags of the step before it takes what lies there."""
    chains = chain.Chains(module_of(), 1)
    case = Case(1)
    right, _ = case.launched(chains)
    case.x.neg_()
    out = torch.empty_like(right)
    chains.launch(case.products, case.x, case.h, out, 0)
    assert error(out, case.in_torch()[0]) > 0.02


def test_shapes_that_are_refused():
    rows, hidden = (512,), 512
    good = [(rows, 512, False, False), ((512, 512), 512, True, True), (rows, 512, False, False)]
    assert chain.why_not_shapes(good, hidden) is None
    assert "no multiple of 256" in str(chain.why_not_shapes([(rows, 320, False, False), *good[1:]], hidden))
    assert "outputs in front" in str(chain.why_not_shapes([((256,), 512, False, False), good[2]], hidden))
    assert "products" in str(chain.why_not_shapes(good[:1], hidden))
    assert "norm over" in str(chain.why_not_shapes([((256,), 512, False, False), ((256,), 256, False, True)], hidden))
    assert "no multiple of 512" in str(chain.why_not_shapes(good, 192))
    case = Case(1)
    with pytest.raises(DeviceError, match="cannot be one launch"):
        chain.Chains(module_of(), 1).launch(case.products[:1], case.x, case.h, case.h.clone(), 0)


def test_e4b_fits_an_h200():
    shapes = [
        ((2560,), 2048, False, False), ((10240, 10240), 2560, True, True), ((2560,), 10240, False, False),
        ((256,), 2560, False, True), ((2560,), 256, False, False), ((2048, 512, 512), 2560, False, True),
    ]  # fmt: skip
    for rows in (1, 2):
        made = chain.plan(shapes, 2560, rows, 16, multiprocessors=132, shared_bytes=232448)
        assert made is not None and made.grid == 128 and made.shared_bytes <= 232448
        # Every block has a part of gate and up, and every warp as much as any other.
        assert made.shares[1].units * made.grid == 1280 and made.shares[1].rounds == 10
    assert chain.plan(shapes, 2560, 1, 16, multiprocessors=132, shared_bytes=100_000) is None


def test_a_block_that_nobody_answers_ends_with_an_error():
    chains = chain.Chains(module_of(), 1)
    case = Case(1)
    made = chains.plan(case.products, HIDDEN, 1)
    alone = chain.Plan(**{**made.__dict__, "grid": made.grid - 1})
    chains._plans = dict.fromkeys(chains._plans, alone)
    chains.begin()
    with pytest.raises(LaunchError, match="no other makes"):
        chains.launch(case.products, case.x, case.h, torch.empty(1, 384, dtype=case.dtype), 0)
