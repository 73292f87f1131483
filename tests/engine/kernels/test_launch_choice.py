"""Which launch configuration a product gets before anything is tuned, and that none is timed in front of a first answer."""

import dataclasses
from contextlib import nullcontext
from functools import partial
from types import SimpleNamespace

import pytest
import torch

from tests.cuda_on_cpu import run
from tests.cuda_on_cpu.modules import products
from tests.engine.kernels.test_matvec import group_of
from trimtab.engine.cuda import shipped_configs
from trimtab.engine.cuda.nvrtc import KernelLimits
from trimtab.engine.kernels import attention_and_norms, autotune, device_kernels, gemv4, layouts, selfcheck
from trimtab.engine.kernels.device_kernels import DeviceKernels, Product
from trimtab.errors import DeviceError

FITS = KernelLimits(registers=64, max_threads=1024, static_shared_bytes=0, local_bytes=0)
TARGET = shipped_configs.Target("a card", (9, 0), 4, 232448, "source")


@pytest.fixture
def module(monkeypatch):
    """The products on the CPU; the card and its files are the test's."""
    made = products(multiprocessors=4)
    monkeypatch.setattr(run.CpuModule, "limits", lambda self, name: FITS, raising=False)
    monkeypatch.setattr(gemv4, "target_of", lambda module: TARGET)
    monkeypatch.setattr(shipped_configs, "shipped", lambda target: ({}, shipped_configs.ESTIMATED))
    monkeypatch.setattr(autotune, "graph_us", lambda *_, **__: pytest.fail("something was timed"))
    return made


@pytest.fixture
def product():
    return Product([group_of((64,), 512)], 2, None)


COMPILE_CUTS = autotune.compile_cuts


def ways(product, module, *, held):
    return next(cut for cut in gemv4.ways(product.groups[0], product.n, module) if bool(cut.held) is held)


def configured(module, product, monkeypatch, **facts):
    """Return the kernels after one product was prepared."""
    made = DeviceKernels(matvec=module, **facts)
    compiled = []
    monkeypatch.setattr(DeviceKernels, "products", lambda self, *_: [product])
    monkeypatch.setattr(autotune, "compile_cuts", lambda wanted, *_: compiled.extend(cut for _, _, cut in wanted))
    made.prepare([], torch.bfloat16, [product.n])
    return made, compiled


def test_products_of_batch_invariant_steps_are_compiled_with_the_chosen_cuts(module, product, monkeypatch):
    made, _ = configured(module, product, monkeypatch)
    compiled = []
    monkeypatch.setattr(type(module), "compile_variants", lambda _, wanted: compiled.extend(wanted), raising=False)
    monkeypatch.setattr(autotune, "compile_cuts", COMPILE_CUTS)
    made.compile_fixed([], torch.bfloat16, product.n)
    cut = gemv4.choose(product.groups[0], product.n, module)
    wanted = gemv4.options(product.groups[0][0], torch.bfloat16, cut, members=len(product.groups[0]), fixed=True)
    assert wanted in compiled and all("-DFIXED_RANKS=1" in options for options in compiled)
    assert "-DFIXED_RANKS=1" not in gemv4.options(product.groups[0][0], torch.bfloat16, cut)


def test_without_any_measurement_the_best_estimate_is_compiled_checked_and_marked(module, product, monkeypatch):
    best = gemv4.ways(product.groups[0], 2, module)[0]
    made, compiled = configured(module, product, monkeypatch)
    assert compiled == [best] and gemv4.choose(product.groups[0], 2, module) == best
    assert made.configs == {product.key: shipped_configs.ESTIMATED} and made.rejected == {}
    assert gemv4.cut_key(product.groups[0], 2) not in module.products.measured


def test_a_shipped_configuration_wins_over_the_estimate_and_a_tuned_one_over_both(module, product, monkeypatch):
    shipped, tuned = [cut for cut in gemv4.ways(product.groups[0], 2, module) if cut.held][1:3]
    monkeypatch.setattr(shipped_configs, "shipped", lambda target: ({product.key: shipped}, shipped_configs.SHIPPED))
    made, _ = configured(module, product, monkeypatch)
    assert (module.products.chosen[product.key], made.configs[product.key]) == (shipped, shipped_configs.SHIPPED)
    module.products.prepared.clear()
    module.products.known = {product.key: (tuned, shipped_configs.MEASURED)}
    made, _ = configured(module, product, monkeypatch)
    assert (module.products.chosen[product.key], made.configs[product.key]) == (tuned, shipped_configs.MEASURED)


def wrong_output(real, bad, x, weights, out, *, cut=None, **more):
    real(x, weights, out, cut=cut, **more)
    if cut == bad:
        out[0, 3] += 5


@pytest.mark.parametrize("way", ["registers", "does not compile", "wrong"])
def test_one_that_does_not_fit_or_is_wrong_here_is_not_used_and_that_is_said(way, module, product, monkeypatch):
    held, plain = (ways(product, module, held=held) for held in (True, False))
    monkeypatch.setattr(shipped_configs, "shipped", lambda target: ({product.key: held}, shipped_configs.SHIPPED))
    if way == "registers":
        limits = dataclasses.replace(FITS, registers=10**4)
        monkeypatch.setattr(run.CpuModule, "limits", lambda self, name: limits, raising=False)
    elif way == "does not compile":

        def refuse(self, name):
            raise DeviceError("too many registers", device="cpu")

        monkeypatch.setattr(run.CpuModule, "limits", refuse, raising=False)
    else:
        monkeypatch.setattr(gemv4, "matvec4", partial(wrong_output, gemv4.matvec4, held))
    made, _ = configured(module, product, monkeypatch)
    word = {"registers": "registers", "does not compile": "too many registers", "wrong": "result differs"}[way]
    assert word in made.rejected[product.key]
    if way == "wrong":  # another one of the kind is right
        chosen = gemv4.choose(product.groups[0], 2, module)
        assert chosen.held and chosen != held and made.configs == {product.key: shipped_configs.ESTIMATED}
        assert made.plain_products == {}
    else:
        assert made.configs == {} and gemv4.choose(product.groups[0], 2, module) == plain
        assert word in made.plain_products["4-bit matmul 64 x 512, 2 rows"]


def test_where_registers_do_not_suffice_the_same_blocks_hold_fewer_weights(module, product, monkeypatch):
    """The shipped configuration is of an older kernel or another card: its spilled registers are no measurement here."""
    found = gemv4.ways(product.groups[0], 2, module)
    most = max((cut for cut in found if cut.held > 1), key=lambda cut: cut.held)
    fewer = [cut for cut in device_kernels.instead_of(most, found) if (cut.units, cut.k_warps) == (most.units, most.k_warps)]
    assert fewer and all(0 < cut.held < most.held for cut in fewer)
    monkeypatch.setattr(shipped_configs, "shipped", lambda target: ({product.key: most}, shipped_configs.SHIPPED_ELSEWHERE))
    asked = []

    def limits(self, name):
        asked.append(name)
        return dataclasses.replace(FITS, local_bytes=24 if len(asked) == 1 else 0)

    monkeypatch.setattr(run.CpuModule, "limits", limits, raising=False)
    made, compiled = configured(module, product, monkeypatch)
    assert gemv4.choose(product.groups[0], 2, module) == fewer[0] and len(asked) == 2
    assert compiled == [most, *device_kernels.instead_of(most, found)]  # several at once, before the first is tried
    assert made.configs == {product.key: shipped_configs.ESTIMATED} and made.plain_products == {}


def test_what_was_fastest_on_such_a_card_is_used_with_the_registers_that_it_spills(module, product, monkeypatch):
    held = ways(product, module, held=True)
    monkeypatch.setattr(shipped_configs, "shipped", lambda target: ({product.key: held}, shipped_configs.SHIPPED))
    spills = dataclasses.replace(FITS, local_bytes=24)
    monkeypatch.setattr(run.CpuModule, "limits", lambda self, name: spills, raising=False)
    made, _ = configured(module, product, monkeypatch)
    assert gemv4.choose(product.groups[0], 2, module) == held and made.rejected == {}


def test_a_product_is_prepared_once(module, product, monkeypatch):
    configured(module, product, monkeypatch)
    monkeypatch.setattr(DeviceKernels, "_takes", lambda *_: pytest.fail("prepared again"))
    DeviceKernels(matvec=module).prepare([], torch.bfloat16, [2])


def test_choosing_kernels_tunes_nothing(monkeypatch):
    """What a first answer waits for: checks, and one timing a shape against the layers' own; never a search over cuts."""
    monkeypatch.setattr(DeviceKernels, "tune", lambda *_, **__: pytest.fail("tuned in front of an answer"))
    prepared = []
    monkeypatch.setattr(DeviceKernels, "prepare", lambda self, groups, dtype, counts, progress=None: prepared.extend(counts))
    monkeypatch.setattr(device_kernels, "_choose", lambda *_: DeviceKernels(matvec=object()))
    monkeypatch.setattr(device_kernels, "of_this_process", device_kernels.ChosenKernels)
    leaf = type("Leaf", (), {"in_features": 64, "out_features": 64, "quant_kind": "nf4", "device": "cpu", "dtype": 1})()
    DeviceKernels.choose([[[leaf]]], [], rows=4)
    assert prepared == [1, 2, 4]


def test_kernels_are_compiled_ahead_once_for_a_card_and_never_again_for_the_same_steps(product, monkeypatch):
    checks, asked = device_kernels.CardEntries(), []
    leaf = SimpleNamespace(
        packed=lambda: product.groups[0][0], device=torch.device("cuda"), dtype=torch.bfloat16, quant_kind="nf4-dq"
    )
    leaf.in_features, leaf.out_features = product.groups[0][0].shape[1], product.groups[0][0].shape[0]
    monkeypatch.setattr(device_kernels.CardEntries, "of", lambda device: checks)

    def compiled(*_, counts, others, **__):
        asked.append((counts, [one.name for one in others]))
        return len(asked) > 1  # the first time not: no compiler

    monkeypatch.setattr(autotune, "compile_ahead", compiled)
    monkeypatch.setattr(device_kernels.KernelFamily, "choose", lambda self, *_: None)
    after, delta, stack = gemv4.NormForm("after", False), device_kernels.DeltaShape(2, 4, 32, 32, 4), torch.empty(2, 4, 4)
    mixtures = {("a",): (2, lambda: SimpleNamespace(gate_up=stack, down=stack))}
    for norm, rows, more in (
        (gemv4.PLAIN, 1, ()), (gemv4.PLAIN, 1, ()), (after, 1, ()), (gemv4.PLAIN, 2, ()), (gemv4.PLAIN, 1, ([delta], mixtures)),
        (gemv4.PLAIN, 1, ()), (gemv4.PLAIN, 1, ([delta], mixtures)),
    ):  # fmt: skip
        device_kernels._choose([[[leaf]]], [], None, rows, norm, *more)
    assert asked == [([1], []), ([1], []), ([1], []), ([1, 2], []), ([1], ["delta.cu", *["experts.cu"] * 3])]


def test_what_checks_and_steps_ask_for_is_compiled_at_once_before_they_do(module, product, monkeypatch):
    group, dtype, asked = product.groups[0], torch.bfloat16, []
    real = run.CpuModule.variant
    monkeypatch.setattr(gemv4.nvrtc, "why_not", lambda device: None)
    monkeypatch.setattr(run.CpuModule, "variant", lambda self, options: asked.append(options) or real(self, options))
    monkeypatch.setattr(module, "common", ("-DSHARED_BASE=1024",), raising=False)
    wanted = autotune.jobs(
        [(group, False)], [attention_and_norms.AttentionShape(8, 2, 256)], module, dtype, checked=(1, 2), counts=[2]
    )
    autotune.check(group, module, dtype=dtype, rows=(1, 2))
    configured(module, product, monkeypatch)
    made = {job.options for job in wanted if job.name == "matvec4.cu"}
    assert asked and {(*options, *module.common) for options in asked} == made
    held = [any(option.startswith("-DHELD") for option in job.options) for job in wanted]
    assert held == sorted(held)  # those that take longest begin first
    names = [job.name for job in wanted]
    assert names.count("attend.cu") == 2 and {"fused.cu", "ends.cu", "prompt.cu"} <= set(names)
    several = autotune.jobs([(group, False)], [], module, dtype, checked=(1,), counts=[1], has_many=True)
    assert "rows.cu" in [job.name for job in several]


@pytest.mark.parametrize(("quant", "shape", "calls"), [
    ("nf4-dq", (12288, 4096), 10), ("q4_k", (64, 256), 10), ("q4_k", (1024, 4096), 2), ("q6_k", (12288, 4096), 1),
])  # fmt: skip
def test_own_products_that_take_thousands_of_launches_are_timed_with_few_calls(quant, shape, calls):
    assert device_kernels._own_calls([SimpleNamespace(out_features=shape[0], in_features=shape[1], quant_kind=quant)]) == calls


def test_the_own_products_of_a_shape_are_timed_once_for_all_its_cuts(module, product, monkeypatch):
    packed, timed = product.groups[0][0], []
    leaf = SimpleNamespace(packed=lambda: packed, out_features=packed.shape[0], in_features=packed.shape[1], quant_kind="nf4-dq")
    monkeypatch.setattr(gemv4.nvrtc, "why_not", lambda device: None)
    monkeypatch.setattr(module, "capability", (8, 0), raising=False)
    monkeypatch.setattr(autotune, "graph_us", lambda run, *_, **__: timed.append(run.func) or len(timed))
    made = DeviceKernels(matvec=module)
    assert made.measure([leaf], torch.bfloat16) == (1, 2)
    module.products.chosen[gemv4.cut_key([packed], 1)] = ways(Product([[packed]], 1, None), module, held=True)
    assert made.measure([leaf], torch.bfloat16) == (3, 2) and timed.count(device_kernels._own_layers) == 1


def test_layers_of_one_size_in_two_formats_are_timed_and_judged_each(module, monkeypatch):
    """A checkpoint may have attention in 8 and gate and up in 4 bits: a time under the size alone hides the other's."""
    packed, checks = group_of((64,), 256)[0], device_kernels.CardEntries()
    times = {"int4-g128": (1.0, 9.0), "int8-g128": (7.0, 2.0)}
    groups = [
        [SimpleNamespace(packed=lambda kind=kind: dataclasses.replace(packed, kind=kind), out_features=64, in_features=256,
                         quant_kind=kind, device=torch.device("cpu"), base=kind)] for kind in times
    ]  # fmt: skip
    several = [SimpleNamespace(**vars(one[0])) for one in (groups[0], groups[1], groups[0], groups[0])]
    forms = (several[:3], [*several[:2], several[1]], several[2:])
    assert len({device_kernels.shape_of(one) for one in forms}) == 3
    for name in ("gemv4", "gemm4"):
        monkeypatch.setattr(getattr(device_kernels, name), "why_not", lambda *_: None)
    monkeypatch.setattr(gemv4, "choose", lambda *_, **__: "a cut")
    monkeypatch.setattr(layouts, "scale_type", lambda one: ())
    monkeypatch.setattr(module, "capability", (8, 0), raising=False)
    monkeypatch.setattr(
        autotune, "graph_us",
        lambda run, *_, **__: times[run.args[0][0].base][1]
        if run.func is device_kernels._own_layers
        else times[run.args[1][0].kind][0],
    )  # fmt: skip
    measured = device_kernels._products_us(module, groups, torch.bfloat16)
    assert sorted(measured.values()) == sorted(times.values())
    made = DeviceKernels(matvec=module, measured_us=measured)
    assert [made.pays(group) for group in groups] == [True, False]
    monkeypatch.setattr(device_kernels.gemm4, "load", lambda device: module)
    for name in ("wrong", "why_no_room"):
        monkeypatch.setattr(device_kernels.gemm4, name, lambda *_: None)
    monkeypatch.setattr(device_kernels.layouts, "variant", lambda *_: None)
    monkeypatch.setattr(device_kernels, "_rows_us", lambda module, leaf, dtype: times[leaf.quant_kind])
    for _ in range(2):  # measured, then as it was kept
        rows = DeviceKernels(checks=checks).with_rows([group[0] for group in groups], torch.bfloat16)
        assert rows.rows is module and sorted(rows.measured_us.values()) == sorted(times.values())
    times["int4-g128"] = (5.0, 9.0)
    slow = DeviceKernels().with_rows([group[0] for group in groups], torch.bfloat16)
    assert slow.left_out == {device_kernels.ROWS: "slower here: 12.0 µs against the layers' own 11.0 for 32 rows"}


def test_what_was_tuned_is_known_to_the_next_process(module, product, tmp_path, monkeypatch):
    from trimtab.process import user_cache

    monkeypatch.setattr(user_cache, "user_cache_path", lambda name: tmp_path / name)
    monkeypatch.setattr(autotune, "graph_us", lambda *_, **__: 1.0)
    monkeypatch.setattr(autotune, "releases", dict)
    autotune.tune(product.groups, 2, module, limit=2)
    autotune.keep_tuned(module)
    assert shipped_configs.kept(TARGET) == {product.key: dataclasses.replace(module.products.chosen[product.key], estimated_us=0.0)}


def test_a_graph_of_several_calls_is_timed_by_the_call(monkeypatch):
    runs = []

    class Event(SimpleNamespace):
        def record(self, stream):
            runs.append("event")

        def synchronize(self):
            return None

        def elapsed_time(self, end):
            return 0.02 * runs.count("call")

    graph = SimpleNamespace(replay=lambda: None)
    monkeypatch.setattr(selfcheck, "GraphCache", lambda: SimpleNamespace(record=lambda side, run: (graph, run())))
    monkeypatch.setattr(selfcheck, "side_stream", nullcontext)
    stand_ins = {"device": nullcontext, "synchronize": lambda: None, "Event": lambda **_: Event(), "current_stream": lambda _: None}
    for name, stand_in in stand_ins.items():
        monkeypatch.setattr(torch.cuda, name, stand_in)
    device = torch.device("cuda", 0)
    # One call before the capture, and four in the graph: five took 0.1 ms.
    assert selfcheck.graph_us(lambda: runs.append("call"), device, calls=4) == pytest.approx(100 / 4)
    assert runs.count("call") == 5 and runs.count("event") == 6


def test_a_card_without_kernels_has_no_way_to_multiply_with_a_head():
    assert DeviceKernels().head_matmuls(torch.nn.Module()) == [None, None]
