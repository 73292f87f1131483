"""The decode kernels on a GPU, against float64, over the shapes of real models: rows 1 to 8, poisoned outputs, graphs."""

import dataclasses
import math

import pytest
import torch

from trimtab.engine.cuda import launch_config, nvrtc, shipped_configs
from trimtab.engine.kernels import attention_and_norms, autotune, gemv4, selfcheck
from trimtab.process import user_cache

REASON = nvrtc.why_not("cuda:0")
pytestmark = pytest.mark.skipif(REASON is not None, reason=f"no kernels here: {REASON}")
DEVICE = torch.device("cuda:0")
# Products of E2B, E4B, 12B and 26B-A4B: members' outputs over one input.
PRODUCTS = [
    ((2048, 256, 256), 1536), ((4096, 512, 512), 1536), ((2048,), 1536), ((1536,), 2048), ((1536,), 4096),
    ((6144, 6144), 1536), ((1536,), 6144), ((12288, 12288), 1536), ((1536,), 12288), ((256,), 1536), ((1536,), 256),
    ((2048, 512, 512), 2560), ((4096, 1024, 1024), 2560), ((2560,), 2048), ((2560,), 4096), ((10240, 10240), 2560),
    ((2560,), 10240), ((256,), 2560), ((2560,), 256),
    ((4096, 2048, 2048), 3840), ((8192, 512), 3840), ((3840,), 8192), ((15360, 15360), 3840), ((3840,), 15360),
    ((4096, 2048, 2048), 2816), ((2816,), 8192), ((2112, 2112), 2816), ((2816,), 2112),
]  # fmt: skip


@pytest.fixture(scope="module")
def module():
    return gemv4.load(DEVICE)


@pytest.fixture(scope="module")
def weights():
    return {quant: autotune.RandomWeights(DEVICE, quant=quant) for quant in ("nf4-dq", "nf4", "fp4")}


@pytest.mark.parametrize("rows, columns", PRODUCTS)
def test_products_of_real_models_agree_with_float64(module, weights, rows, columns):
    group = [weights["nf4-dq"].make(one, columns) for one in rows]
    assert autotune.check(group, module, rows=(1, 2, 3, 8)) is None


@pytest.mark.parametrize("quant", ["nf4", "fp4"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_other_formats_agree_with_float64(module, weights, quant, dtype):
    group = [weights[quant].make(one, 704, dtype) for one in (48, 17)]
    assert gemv4.why_not(group[0], dtype, DEVICE, n=8) is None
    assert autotune.check(group, module, dtype=dtype, rows=(1, 5, 8)) is None


@pytest.mark.parametrize(
    "rows, columns, n", [((10240, 10240), 2560, 1), ((2560,), 10240, 1), ((2560,), 10240, 8), ((2560,), 2048, 3)]
)
def test_every_likely_cut_is_right(module, weights, rows, columns, n):
    group = [weights["nf4-dq"].make(one, columns) for one in rows]
    tried = launch_config.unlike(gemv4.ways(group, n, module), 12)
    assert len(tried) > 3
    for cut in tried:
        assert autotune.check(group, module, rows=(n,), cut=cut) is None, cut
    assert (module.scratch["parts"] == gemv4.EMPTY).all()


@pytest.mark.parametrize("n", [1, 4, 8])
@pytest.mark.parametrize("groups, k_warps", [(1, 10), (1, 4), (2, 5), (5, 2), (10, 1)])
def test_a_ring_that_goes_round_gives_the_same_product(module, weights, n, groups, k_warps):
    group = [weights["nf4-dq"].make(20000, 2560)]
    x = torch.randn(n, 2560, device=DEVICE).bfloat16()
    wanted = autotune._exact(x, group)
    for piece, stages in ((8, 1), (8, 2), (8, 3), (20, 1)):
        cut = launch_config.LaunchConfig(n, 10, k_warps, groups, piece, stages * groups, 1, 40, 125, 0, 0.0)
        cut = dataclasses.replace(cut, shared_bytes=cut.needed_bytes(n))
        if cut.shared_bytes > module.shared_bytes:
            continue
        for _ in range(3):
            out = torch.full((n, 20000), math.nan, dtype=torch.bfloat16, device=DEVICE)
            gemv4.matvec4(x, group, out, module=module, cut=cut)
            assert autotune.relative_error(out, wanted) < autotune.LARGEST_ERROR, cut


@pytest.mark.parametrize("n", [1, 2, 8])
@pytest.mark.parametrize("columns, width", [(2560, 10240), (1536, 6144), (2816, 2112)])
def test_gate_and_product_in_one_launch_equal_both_apart(module, weights, n, columns, width):
    group = [weights["nf4-dq"].make(width, columns) for _ in range(2)]
    slots = [[(torch.randn(8, columns, device=DEVICE) / 50, torch.randn(width, 8, device=DEVICE), 0.5)] for _ in group]
    x, other = torch.randn(n, columns, device=DEVICE).bfloat16(), torch.randn(n, width, device=DEVICE).bfloat16()
    for members, gate in ((group, gemv4.Gate("gelu_tanh")), (group[:1], gemv4.Gate("gelu_tanh", other))):
        lora = gemv4.lora_args(slots[: len(members)], torch.zeros(n, dtype=torch.int32, device=DEVICE), 8)
        for cut in launch_config.unlike(gemv4.ways(members, n, module, pair=gate.other is None), 6):
            out, wanted = (torch.full((n, width), math.nan, dtype=torch.bfloat16, device=DEVICE) for _ in range(2))
            gemv4.matvec4(x, members, out, lora=lora, gate=gate, module=module, cut=cut)
            gemv4.matvec4_torch(x, members, wanted, lora=lora, gate=gate)
            # Two rounded numbers and their product, each a step away at most here and there.
            assert autotune.relative_error(out, wanted) < 2 * autotune.LARGEST_ERROR, cut
    assert (module.scratch["parts"] == gemv4.EMPTY).all()


def test_one_captured_graph_serves_other_inputs_adapters_and_bytes(module, weights):
    """What a graph holds are addresses: tables, inputs, even the weights' bytes may change under it."""
    group = [weights["nf4-dq"].make(one, 2560) for one in (2048, 512, 512)]
    n, width = 3, 16
    ranks = [[8, 5], [16, 0], [8, 8]]
    slots = [
        [(torch.randn(r, 2560, device=DEVICE) / 50, torch.randn(p.shape[0], r, device=DEVICE), 0.5) if r else None for r in member]
        for p, member in zip(group, ranks)
    ]
    lora = gemv4.lora_args(slots, torch.tensor([0, -1, 1], dtype=torch.int32, device=DEVICE), width)
    x = torch.randn(n, 2560, device=DEVICE).bfloat16()
    out = torch.empty(n, 3072, dtype=torch.bfloat16, device=DEVICE)

    def run():
        gemv4.matvec4(x, group, out, lora=lora, module=module)

    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    for numbers in ([0, -1, 1], [1, 1, 0], [-1, -1, -1]):
        x.copy_(torch.randn(n, 2560, device=DEVICE))
        lora.row_slots.copy_(torch.tensor(numbers, dtype=torch.int32))
        group[0].parts["weight"].random_(0, 256)
        out.fill_(math.nan)
        lora.low.fill_(math.nan)
        graph.replay()
        reference = dataclasses.replace(lora, low=torch.empty_like(lora.low))
        gemv4.lora_shrink_torch(x, reference)
        wanted = torch.empty_like(out)
        gemv4.matvec4_torch(x, group, wanted, lora=reference)
        assert autotune.relative_error(out, wanted) < autotune.LARGEST_ERROR


def test_a_row_is_the_same_alone_and_among_others(module, weights):
    """Other rows and their adapters must not leak into a row. More rows divide W x and A x among other warps: the same sums in
    another order, then rounded."""
    group = [weights["nf4-dq"].make(512, 1536)]
    slots = [
        [
            (torch.randn(8, 1536, device=DEVICE), torch.randn(512, 8, device=DEVICE), 0.3),
            (torch.randn(4, 1536, device=DEVICE), torch.randn(512, 4, device=DEVICE), 1.0),
        ]
    ]
    x = torch.randn(8, 1536, device=DEVICE).bfloat16()
    numbers = torch.tensor([0, 1, -1, 0, 1, 1, -1, 0], dtype=torch.int32, device=DEVICE)

    def run(x, numbers):
        n = x.shape[0]
        found = gemv4.ways(group, n, module)
        cut = next(cut for cut in found if cut.splits == 1 and cut.k_warps == found[0].k_warps)
        lora = gemv4.lora_args(slots, numbers, 8)
        out = torch.full((n, 512), math.nan, dtype=torch.bfloat16, device=DEVICE)
        gemv4.matvec4(x, group, out, lora=lora, module=module, cut=cut)
        return out

    together, without = run(x, numbers), run(x, torch.full_like(numbers, -1))
    size = gemv4.decoded(group[0], torch.float32).abs()
    for i in range(8):
        A, B, scale = slots[0][max(int(numbers[i]), 0)]
        change = float(numbers[i] >= 0) * scale * B.abs() @ (A.abs() @ x[i].float().abs())
        # The change is rounded, then the sum: a step of bfloat16 (2^-7 at most) of either; and float32's of all terms, where they
        # nearly cancel.
        step = 2**-7 * ((together[i].float() - without[i].float()).abs() + together[i].float().abs())
        step += 2**-23 * (change + size @ x[i].float().abs())
        for rows in ([i], [i, (i + 3) % 8]):
            apart = (run(x[rows], numbers[rows])[0].float() - together[i].float()).abs()
            assert (apart <= 1.01 * step).all(), (apart / step).max()


@pytest.mark.skipif(torch.cuda.get_device_capability() < (9, 0), reason="dependent launch begins with 9.0")
def test_a_dependent_launch_waits_for_what_it_reads(module, weights):
    """The product starts before what makes x ends: same bits as in plain order."""
    group = [weights["nf4-dq"].make(10240, 2560)]
    slots = [[(torch.randn(64, 2560, device=DEVICE) / 50, torch.randn(10240, 64, device=DEVICE), 0.5)]]
    lora = gemv4.lora_args(slots, torch.zeros(8, dtype=torch.int32, device=DEVICE), 64)
    for _ in range(20):
        x = torch.randn(8, 2560, device=DEVICE).bfloat16()
        plain, early = (torch.empty(8, 10240, dtype=torch.bfloat16, device=DEVICE) for _ in range(2))
        gemv4.matvec4(x, group, plain, lora=lora, module=module)
        lora.low.fill_(math.nan)
        gemv4.matvec4(x, group, early, lora=lora, module=module, dependent=True)
        assert torch.equal(plain, early)


def overlaps_in_graphs(run, module, held, last, monkeypatch):
    """Replay launches in plain order and overlapping, what they write poisoned before: all give the same bits."""
    found = []
    for overlap in (False, True):
        monkeypatch.setattr(module, "overlap", overlap)
        run()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            run()
        for _ in range(20):
            for tensor in held:
                tensor.fill_(math.nan)
            graph.replay()
            found.append(last.clone())
    assert found[0].isfinite().all()
    assert all(torch.equal(one, found[0]) for one in found)


@pytest.mark.skipif(torch.cuda.get_device_capability() < (9, 0), reason="dependent launch begins with 9.0")
def test_a_chain_of_overlapping_launches_gives_the_bits_of_plain_order(module, weights, monkeypatch):
    """Each product reads what the one in front wrote, in one graph: a missing wait would read old bytes."""
    down, up = weights["nf4-dq"].make(2560, 10240), weights["nf4-dq"].make(10240, 2560)
    slots = [[(torch.randn(8, 2560, device=DEVICE) / 50, torch.randn(10240, 8, device=DEVICE), 0.5)]]
    lora = gemv4.lora_args(slots, torch.zeros(2, dtype=torch.int32, device=DEVICE), 8)
    start = torch.randn(2, 2560, device=DEVICE).bfloat16()
    narrow = [torch.empty(2, 2560, dtype=torch.bfloat16, device=DEVICE) for _ in range(13)]
    wide = torch.empty(2, 10240, dtype=torch.bfloat16, device=DEVICE)

    def run():
        narrow[0].copy_(start)
        for x, y in zip(narrow, narrow[1:]):
            gemv4.matvec4(x, [up], wide, lora=lora, module=module)
            wide.div_(wide.abs().amax())
            gemv4.matvec4(wide, [down], y, module=module)

    overlaps_in_graphs(run, module, (*narrow, wide, lora.low), narrow[-1], monkeypatch)


@pytest.mark.parametrize("round_change", [False, True])
def test_the_change_of_a_layer_that_is_not_4_bit(module, round_change):
    n, rows, columns = 4, 1000, 768
    slots = [[(torch.randn(7, columns, device=DEVICE) / 30, torch.randn(rows, 7, device=DEVICE), 2.0), None]]
    lora = gemv4.lora_args(slots, torch.tensor([0, 1, -1, 0], dtype=torch.int32, device=DEVICE), 8)
    x = torch.randn(n, columns, device=DEVICE).bfloat16()
    y = torch.randn(n, rows, device=DEVICE).bfloat16()
    before, wanted = y.clone(), y.clone()
    reference = dataclasses.replace(lora, low=torch.empty_like(lora.low))
    gemv4.lora_add(y, lora, module, x=x, round_change=round_change)
    gemv4.lora_shrink_torch(x, reference)
    torch.testing.assert_close(lora.low[0, 0, :7], reference.low[0, 0, :7], rtol=1e-4, atol=1e-5)
    gemv4.lora_add_torch(wanted, reference, round_change=round_change)
    # One step of bf16 where the two float32 sums lie on both sides of a rounding.
    assert (y == wanted).float().mean() > 0.99
    torch.testing.assert_close(y, wanted, rtol=2**-7, atol=1e-2)
    assert torch.equal(y[1:3], before[1:3])


def test_a_kernel_that_is_wrong_is_found(module, weights, monkeypatch):
    group = [weights["nf4-dq"].make(64, 256)]
    own = module.variant(gemv4.options(group[0], torch.bfloat16))
    monkeypatch.setattr(own, "launch", lambda *_, **__: None)
    assert "relative error inf" in autotune.check(group, module, rows=(1,))


def test_tuning_keeps_the_fastest_cut_and_the_next_process_reads_it(module, weights, tmp_path, monkeypatch):
    monkeypatch.setattr(user_cache, "user_cache_path", lambda name: tmp_path / name)
    groups = weights["nf4-dq"].groups((2560,), 2048, 64 * 2**20)
    taken = autotune.tune(groups, 1, module, limit=3)
    best = min(taken, key=lambda cut: taken[cut])
    assert gemv4.choose(groups[0], 1, module) == best
    autotune.keep_tuned(module)
    read = gemv4.load(DEVICE)
    cut, status = gemv4.config_of(groups[0], 1, read)
    assert (cut, status) == (dataclasses.replace(best, estimated_us=0.0), shipped_configs.MEASURED)


def test_a_configuration_that_was_not_measured_here_is_checked_before_it_is_used(module, weights):
    group = [weights["nf4-dq"].make(2560, 2048)]
    held = next(cut for cut in gemv4.ways(group, 1, module) if cut.held)
    assert autotune.why_not_cut(group, 1, module, held, dtype=torch.bfloat16, gate=None) is None
    limits = module.variant(gemv4.options(group[0], torch.bfloat16, held)).limits(held.kernel)
    assert 16 <= limits.registers <= 255 and limits.max_threads >= held.threads
    many = dataclasses.replace(held, k_warps=64)
    assert "threads" in shipped_configs.why_not(many, limits, module.shared_bytes)


@pytest.mark.parametrize("n", [1, 2, 4, 8])
def test_every_shipped_configuration_is_used_on_such_a_card(n, module, weights):
    """None is refused and left to a slower kernel, for registers that it was fastest without, say."""
    configs, status = shipped_configs.shipped(gemv4.target_of(module))
    if status != shipped_configs.SHIPPED:
        pytest.skip("none are shipped for this card")
    refused = {}
    for (_, rows, columns, of, pair), cut in configs.items():
        if of == n:
            group = [weights["nf4-dq"].make(one, columns) for one in rows]
            gate = "gelu_tanh" if pair else None
            refused[rows, columns] = autotune.why_not_cut(
                group, n, module, dataclasses.replace(cut, normed=False), dtype=torch.bfloat16, gate=gate, is_timed=True
            )
    assert len(refused) >= 10 and not any(refused.values()), refused


def test_a_thread_of_its_own_may_launch(module, weights):
    """torch gives a new thread no context until it calls CUDA; the server computes in such threads."""
    from concurrent.futures import ThreadPoolExecutor

    group = [weights["nf4-dq"].make(64, 256)]
    x = torch.randn(1, 256, device=DEVICE).bfloat16()
    here, there = (torch.zeros(1, 64, dtype=torch.bfloat16, device=DEVICE) for _ in range(2))
    gemv4.matvec4(x, group, here, module=module)
    torch.cuda.synchronize()
    with ThreadPoolExecutor(1) as pool:
        pool.submit(gemv4.matvec4, x, group, there, module=module).result()
    torch.cuda.synchronize()
    assert torch.equal(here, there)


# Norms, rotation, attention, gates -----------------------------------------------------------------------------------

# (heads, kv heads, head size) of sliding and full layers of E2B, E4B, 12B and 26B-A4B, and what they norm and gate.
ATTENTION = [(8, 1, 256), (8, 1, 512), (8, 2, 256), (8, 2, 512), (16, 8, 256), (16, 1, 512), (16, 2, 512)]
WIDTHS = [256, 1536, 2560, 2816, 3840, 6144, 10240, 12288, 15360]


@pytest.fixture(scope="module")
def small():
    return attention_and_norms.load(DEVICE)


@pytest.fixture(params=[False, True], ids=["plain", "overlap"])
def overlap(request, small, monkeypatch):
    if request.param and small.capability < (9, 0):
        pytest.skip("dependent launch begins with 9.0")
    monkeypatch.setattr(small, "overlap", request.param)
    return request.param


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_small_kernels_over_real_shapes_pass_the_check_at_load(small, overlap, dtype):
    assert selfcheck.check(small, widths=WIDTHS, attention=ATTENTION, dtype=dtype, rows=(1, 2, 3, 8)) is None
    assert not small.scratch["arrived"].any()


@pytest.mark.parametrize("heads, kv_heads, dim", ATTENTION)
def test_one_captured_step_of_attention_serves_every_length(small, overlap, heads, kv_heads, dim):
    """A full layer that goes on growing and a ring that goes round: written and looked at, one graph each."""
    n, eps = 2, 1e-6
    for places, steps in ((4096, (0, 1, 31, 32, 63, 700, 4095)), (64, (0, 40, 63, 64, 100, 5000))):
        keys, values = (torch.randn(n, kv_heads, places, dim, device=DEVICE).bfloat16() for _ in range(2))
        positions, at = (torch.zeros(n, dtype=torch.long, device=DEVICE) for _ in range(2))
        qkv = torch.randn(n, (heads + 2 * kv_heads) * dim, device=DEVICE).bfloat16()
        norms = attention_and_norms.HeadNorms(*(torch.randn(dim, device=DEVICE).bfloat16() / 4 for _ in range(2)), eps)
        cos, sin = (torch.randn(n, dim, device=DEVICE).bfloat16() for _ in range(2))
        q = torch.empty(n, heads, dim, dtype=torch.bfloat16, device=DEVICE)
        out = torch.empty(n, heads * dim, dtype=torch.bfloat16, device=DEVICE)
        floats = attention_and_norms.scratch_values(n, heads, kv_heads, dim, places, small.multiprocessors)
        scratch = torch.full((floats,), math.nan, device=DEVICE)

        def step():
            torch.remainder(positions, places, out=at)  # noqa: B023
            attention_and_norms.rope_write(
                qkv, heads, kv_heads, dim, norms, cos, sin, keys, values, at, q, module=small  # noqa: B023
            )  # fmt: skip
            attention_and_norms.attend(q, keys, values, positions, dim**-0.5, None, out, scratch, small)  # noqa: B023

        step()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            step()
        for position in steps:
            positions.copy_(torch.tensor([position, position // 2]))
            for i, last in enumerate((position, position // 2)):
                for cache in (keys, values):
                    cache[i, :, : last + 1] = torch.randn_like(cache[i, :, : last + 1])
                    cache[i, :, last + 1 :] = math.nan
            wanted_keys, wanted_values = keys.clone(), values.clone()
            wanted_q = torch.empty_like(q)
            attention_and_norms.rope_write(
                qkv, heads, kv_heads, dim, norms, cos, sin, wanted_keys, wanted_values, positions % places, wanted_q
            )
            q.fill_(math.nan), out.fill_(math.nan), scratch.fill_(math.nan)
            graph.replay()
            assert selfcheck.relative_error(q, wanted_q) <= selfcheck.LARGEST_DIFFERENCE[torch.bfloat16]
            for found, wanted in ((keys, wanted_keys), (values, wanted_values)):
                assert torch.equal(found.isnan(), wanted.isnan())
                assert selfcheck.relative_error(found.nan_to_num(), wanted.nan_to_num()) <= 1e-3
            exact = selfcheck.attend_exact(q, keys, values, positions, dim**-0.5, None)
            assert selfcheck.relative_error(out, exact) <= selfcheck.LARGEST_ERROR[torch.bfloat16], (places, position)


@pytest.mark.parametrize("places", [32768, 131072])
def test_attention_over_long_contexts_agrees_with_float64(small, places):
    heads, kv_heads, dim = 8, 2, 512
    keys, values = (torch.randn(1, kv_heads, places, dim, device=DEVICE).bfloat16() for _ in range(2))
    q = torch.randn(1, heads, dim, device=DEVICE).bfloat16()
    for position in (places - 1, places - 1000, 12345, 5):
        positions = torch.tensor([position], device=DEVICE)
        out = torch.full((1, heads * dim), math.nan, dtype=torch.bfloat16, device=DEVICE)
        attention_and_norms.attend(q, keys, values, positions, dim**-0.5, None, out, None, small)
        exact = selfcheck.attend_exact(q, keys, values, positions, dim**-0.5, None)
        assert selfcheck.relative_error(out, exact) <= selfcheck.LARGEST_ERROR[torch.bfloat16], position


@pytest.mark.skipif(torch.cuda.get_device_capability() < (9, 0), reason="dependent launch begins with 9.0")
def test_overlapping_small_kernels_give_the_bits_of_plain_order(small, monkeypatch):
    """Every kernel reads what the one in front wrote; one that does not wait reads what was there before: nan."""
    n, width, heads, kv_heads, dim, places = 2, 2048, 8, 2, 256, 600
    start = torch.randn(n, width, device=DEVICE).bfloat16()
    weight, turn = torch.randn(width, device=DEVICE).bfloat16() / 4, torch.randn(n, dim, device=DEVICE).bfloat16()
    keys, values = (torch.randn(n, kv_heads, places, dim, device=DEVICE).bfloat16() for _ in range(2))
    positions, norms = torch.tensor([599, 77], device=DEVICE), attention_and_norms.HeadNorms(weight[:dim], None, 1e-6)
    q = torch.empty(n, heads, dim, dtype=torch.bfloat16, device=DEVICE)
    scratch = torch.empty(attention_and_norms.scratch_values(n, heads, kv_heads, dim, places, small.multiprocessors), device=DEVICE)
    h, x, looked, gated = (torch.empty_like(start) for _ in range(4))

    def run():
        h.copy_(start)
        x.copy_(start)
        for _ in range(12):
            attention_and_norms.rope_write(
                x, heads, kv_heads, dim, norms, turn, turn, None, None, None, q, module=small, mode="shared"
            )
            attention_and_norms.attend(q, keys, values, positions, dim**-0.5, None, looked, scratch, small)
            attention_and_norms.gated(looked, x, gated, "gelu_tanh", small)
            attention_and_norms.add_norm(gated, h, weight, weight, 1e-6, None, h, x, small)

    overlaps_in_graphs(run, small, (h, x, looked, gated, q, scratch), x, monkeypatch)


def test_a_small_kernel_that_does_nothing_is_found(small, monkeypatch):
    launch = small.launch

    def skip(left_out):
        monkeypatch.setattr(small, "launch", lambda name, *a, **m: None if name.startswith(left_out) else launch(name, *a, **m))

    for name in ("add_norm", "gated", "rope_write"):
        skip(name)
        assert name in selfcheck.check(small, widths=(2560,), attention=((8, 2, 256),), rows=(1,))
