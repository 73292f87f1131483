"""The small kernels of a decode step: torch paths equal transformers' modules, kernels equal both, and a wrong one is found."""

import importlib
import math

import pytest
import torch
from transformers.models.gemma4 import modeling_gemma4 as gemma4
from transformers.models.gemma4.configuration_gemma4 import Gemma4TextConfig

from tests.cuda_on_cpu import run
from tests.cuda_on_cpu.modules import launches
from tests.cuda_on_cpu.modules import small as cpu_module
from tests.long_runs import slow_on_cpu
from trimtab.engine.kernels import attention_and_norms, selfcheck
from trimtab.errors import DeviceError
from trimtab.planning.values import execution

TYPES = (torch.bfloat16, torch.float16)
EPS = 1e-6


def random(*shape, dtype=torch.bfloat16, seed=0, spread=1.0):
    generator = torch.Generator().manual_seed(seed * 7919 + sum(shape))
    return (torch.randn(*shape, generator=generator) * spread).to(dtype)


def poisoned(*shape, dtype=torch.bfloat16):
    return torch.full(shape, math.nan, dtype=dtype)


def norm_of(weight, width, dtype):
    module = gemma4.Gemma4RMSNorm(width, eps=EPS, with_scale=weight is not None).to(dtype)
    if weight is not None:
        module.weight.data.copy_(weight)
    return module.requires_grad_(False)


# The torch paths, against transformers' own modules: bit for bit -----------------------------------------------------


@pytest.mark.parametrize("dtype", [*TYPES, torch.float32])
def test_add_norm_is_what_a_decoder_layer_does_between_two_products(dtype):
    n, width = 3, 96
    y, residual, scalar = random(n, width, dtype=dtype, seed=1), random(n, width, dtype=dtype), random(1, dtype=dtype)
    post, following = random(width, dtype=dtype, seed=2), random(width, dtype=dtype, seed=3)
    wanted_h = residual + norm_of(post, width, dtype)(y)
    wanted_h = wanted_h * scalar
    wanted_x = norm_of(following, width, dtype)(wanted_h)
    h, x = poisoned(n, width, dtype=dtype), poisoned(n, width, dtype=dtype)
    attention_and_norms.add_norm(y, residual, post, following, EPS, scalar, h, x)
    assert torch.equal(h, wanted_h) and torch.equal(x, wanted_x)
    attention_and_norms.add_norm(None, residual, None, following, EPS, None, None, x)
    assert torch.equal(x, norm_of(following, width, dtype)(residual))
    attention_and_norms.add_norm(y, residual, post, None, EPS, None, h, None)
    assert torch.equal(h, residual + norm_of(post, width, dtype)(y))
    attention_and_norms.add_norm(y, residual, post, following, EPS, scalar, residual, x)  # in place
    assert torch.equal(residual, wanted_h) and torch.equal(x, wanted_x)


@pytest.mark.parametrize("dtype", [*TYPES, torch.float32])
@pytest.mark.parametrize("mode", attention_and_norms.MODES)
def test_rope_write_is_what_attention_does_before_it_looks(dtype, mode):
    n, heads, kv_heads, dim, places = 3, 4, 2, 32, 7
    parts = attention_and_norms.MODES[mode]
    qkv = random(n, (heads + parts * kv_heads) * dim, dtype=dtype)
    q_weight, k_weight = random(dim, dtype=dtype, seed=1), random(dim, dtype=dtype, seed=2)
    angles = torch.randn(n, dim // 2, generator=torch.Generator().manual_seed(3)).repeat(1, 2)
    cos, sin = angles.cos().to(dtype), angles.sin().to(dtype)

    def turned(x, weight):  # [n, 1, H, D], as Gemma4TextAttention.forward has it
        return gemma4.apply_rotary_pos_emb(norm_of(weight, dim, dtype)(x), cos[:, None], sin[:, None], unsqueeze_dim=2)

    shaped = qkv.view(n, 1, -1, dim)
    keys, values = (random(n, kv_heads, places, dim, dtype=dtype, seed=s) for s in (4, 5))
    before = keys.clone(), values.clone()
    at, q_out = torch.tensor([6, 0, 3]), poisoned(n, heads, dim, dtype=dtype)
    norms = attention_and_norms.HeadNorms(q_weight, k_weight, EPS)
    attention_and_norms.rope_write(qkv, heads, kv_heads, dim, norms, cos, sin, keys, values, at, q_out, mode=mode)
    assert torch.equal(q_out, turned(shaped[:, :, :heads], q_weight)[:, 0])
    if mode != "shared":
        own = shaped[:, :, heads : heads + kv_heads]
        before[0][torch.arange(n), :, at] = turned(own, k_weight)[:, 0]
        other = own if mode == "k_is_v" else shaped[:, :, heads + kv_heads :]
        before[1][torch.arange(n), :, at] = norm_of(None, dim, dtype)(other)[:, 0]
    assert torch.equal(keys, before[0]) and torch.equal(values, before[1])


@pytest.mark.parametrize("dtype", [*TYPES, torch.float32])
@pytest.mark.parametrize("mode", attention_and_norms.MODES)
@pytest.mark.parametrize("kernel", [False, True])
def test_turn_is_what_attention_does_before_it_looks_for_every_token(dtype, mode, kernel):
    """Products of one matrix, or apart; keys and values by head."""
    n, heads, kv_heads, dim = 5, 4, 2, 32
    parts = attention_and_norms.MODES[mode]
    joined = random(n, (heads + parts * kv_heads) * dim, dtype=dtype)
    weights = random(dim, dtype=dtype, seed=1), random(dim, dtype=dtype, seed=2)
    angles = torch.randn(n, dim // 2, generator=torch.Generator().manual_seed(3)).repeat(1, 2)
    cos, sin = angles.cos().to(dtype), angles.sin().to(dtype)

    def turned(x, weight):
        return gemma4.apply_rotary_pos_emb(norm_of(weight, dim, dtype)(x[None]), cos[None], sin[None], unsqueeze_dim=2)[0]

    shaped = joined.view(n, -1, dim)
    own = shaped[:, heads : heads + kv_heads]
    other = own if mode == "k_is_v" else shaped[:, heads + kv_heads :]
    widths = [heads * dim, *[kv_heads * dim] * parts]
    module = cpu_module() if kernel else None
    for given in (joined.split(widths, dim=1), [one.clone() for one in joined.split(widths, dim=1)]):
        q_out = poisoned(n, heads, dim, dtype=dtype)
        k_out, v_out = (poisoned(kv_heads, n, dim, dtype=dtype) if parts else None for _ in range(2))
        queries, keys, values = [*given, None, None][:3]
        norms = attention_and_norms.HeadNorms(weights[0], weights[1] if parts else None, EPS)
        attention_and_norms.turn(queries, keys, values, dim, norms, cos, sin, q_out, k_out, v_out, module=module)
        same = close if kernel else torch.equal
        assert same(q_out, turned(shaped[:, :heads], weights[0]))
        if parts:
            assert same(k_out, turned(own, weights[1]).transpose(0, 1))
            assert same(v_out, norm_of(None, dim, dtype)(other).transpose(0, 1))
    if kernel and dtype != torch.float32:
        assert len(module.launches) == 2


@pytest.mark.parametrize("dtype", [*TYPES, torch.float32])
@pytest.mark.parametrize("kind, name", [("gelu_tanh", "gelu_pytorch_tanh"), ("gelu", "gelu"), ("silu", "silu")])
def test_gated_is_what_the_mlp_does_before_its_last_product(dtype, kind, name):
    config = Gemma4TextConfig(
        hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1, head_dim=16,
        global_head_dim=16, hidden_activation=name, vocab_size=32, vocab_size_per_layer_input=32,
    )  # fmt: skip
    mlp = gemma4.Gemma4TextMLP(config, 0).to(dtype)
    x = random(3, mlp.gate_proj.in_features, dtype=dtype)
    with torch.no_grad():
        gate, up = mlp.gate_proj(x), mlp.up_proj(x)
        both, out = torch.cat((gate, up), 1), poisoned(*gate.shape, dtype=dtype)
        attention_and_norms.gated(both[:, : gate.shape[1]], both[:, gate.shape[1] :], out, kind)
        assert torch.equal(mlp.down_proj(out), mlp(x))


@pytest.mark.parametrize("softcap", [None, 5.0])
def test_attend_in_torch_is_what_transformers_attention_gives(softcap):
    n, heads, kv_heads, dim, places = 3, 4, 2, 32, 40
    q, keys, values = (random(n, heads, dim), random(n, kv_heads, places, dim, seed=1), random(n, kv_heads, places, dim, seed=2))
    positions = torch.tensor([0, 17, 39])
    module = torch.nn.Module()
    module.num_key_value_groups, module.head_dim, module.is_causal, module.training = (heads // kv_heads, dim, True, False)
    mask = torch.where(torch.arange(places) <= positions[:, None], 0.0, -math.inf).bfloat16()[:, None, None]
    wanted, _ = gemma4.eager_attention_forward(module, q[:, :, None], keys, values, mask, scaling=0.2, softcap=softcap)
    out = poisoned(n, heads * dim)
    attention_and_norms.attend(q, keys, values, positions, 0.2, softcap, out, None)
    exact = selfcheck.attend_exact(q, keys, values, positions, 0.2, softcap)
    # bf16 scores, weights and outputs, each 2^-9 off: transformers' eager path is that far from float64 itself.
    assert selfcheck.relative_error(wanted.reshape(n, -1), exact) < 1e-2 and selfcheck.relative_error(out, exact) < 1e-2


def test_a_full_ring_counts_as_a_whole():
    q, keys, values = random(1, 2, 16), random(1, 1, 8, 16, seed=1), random(1, 1, 8, 16, seed=2)
    out, wanted = poisoned(1, 32), poisoned(1, 32)
    attention_and_norms.attend(q, keys, values, torch.tensor([7]), 1.0, None, wanted, None)
    attention_and_norms.attend(q, keys, values, torch.tensor([12345]), 1.0, None, out, None)
    assert torch.equal(out, wanted)


# The kernels, on the CPU ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "order, dtype", [(1, torch.float16), *(pytest.param(n, torch.bfloat16, marks=pytest.mark.slow) for n in (0, 5))]
)
def test_the_check_at_load_passes_on_the_cpu_in_any_order_of_threads(order, dtype):
    module = cpu_module(order)
    assert selfcheck.check(module, widths=(40, 264), attention=((4, 2, 32),), dtype=dtype, rows=(2,)) is None
    assert {"add_norm", "gated_8", "rope_write_1", "attend"} <= set(launches(module))


@pytest.mark.parametrize("shape, norm", [
    (attention_and_norms.AttentionShape(4, 2, 32, "after", False, 16), ("after", False)),
    (
        attention_and_norms.AttentionShape(4, 2, 32, None, False, 16, turn="pairs", growth=attention_and_norms.Growth(0.1, 16)),
        ("after", True),
    ),
    (attention_and_norms.AttentionShape(6, 2, 32, None, False, None, turn="wide", has_sinks=True), ("inside", True)),
    *(
        pytest.param(attention_and_norms.AttentionShape(*shape), norm, marks=pytest.mark.slow)
        for shape, norm in (
            ((4, 2, 32, None, False), ("after", False)), ((4, 1, 256, "plus_one", False), ("plus_one", True)),
            ((2, 2, 32, "after", False, 0), ("after", False)), ((4, 2, 256, "plus_one", False, 64), ("plus_one", False)),
        )
    ),
])  # fmt: skip
def test_the_check_at_load_passes_for_every_form_of_norms_and_heads(shape, norm):
    """Norms that round in front of their weight, none at all, heads of which a part turns, and other scores."""
    assert selfcheck.check(cpu_module(1), widths=(64,), attention=(shape,), norm=norm, dtype=torch.float16, rows=(2,)) is None


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize(
    "form, name", [("after", "llama.modeling_llama.LlamaRMSNorm"), ("plus_one", "gemma3.modeling_gemma3.Gemma3RMSNorm")]
)
def test_norms_of_other_forms_are_the_modules_own(form, name, dtype):
    path, _, cls = name.rpartition(".")
    module = getattr(importlib.import_module(f"transformers.models.{path}"), cls)(96, eps=EPS).to(dtype).requires_grad_(False)
    module.weight.copy_(random(96, dtype=dtype, seed=2))
    y, residual = random(3, 96, dtype=dtype, seed=1), random(3, 96, dtype=dtype)
    h, x = poisoned(3, 96, dtype=dtype), poisoned(3, 96, dtype=dtype)
    attention_and_norms.add_norm(y, residual, None, module.weight, EPS, None, h, x, form=form)
    assert torch.equal(h, residual + y) and torch.equal(x, module(residual + y))
    attention_and_norms.add_norm(y, residual, module.weight, None, EPS, None, h, None, form=form)
    assert torch.equal(h, residual + module(y))


@pytest.mark.parametrize("n, width", [(1, 2560), (2, 1536), (3, 3840), (8, 8), (1, 8192), (2, 264)])
@pytest.mark.parametrize("dtype", TYPES)
def test_the_kernel_of_norms_equals_torch_but_for_the_order_of_its_sums(n, width, dtype):
    module = cpu_module(1)
    y, residual, scalar = random(n, width, dtype=dtype, seed=1), random(n, width, dtype=dtype), random(1, dtype=dtype)
    post, following = random(width, dtype=dtype, seed=2), random(width, dtype=dtype, seed=3)
    for first, second, factor, both in ((y, post, scalar, True), (None, None, None, True), (y, None, None, False)):
        # Rows apart in memory, and what lies between them stays as it is.
        room = [poisoned(n, width + 16, dtype=dtype) for _ in range(2)]
        h, x = (one[:, 8 : 8 + width] for one in room)
        wanted = poisoned(n, width, dtype=dtype), poisoned(n, width, dtype=dtype)
        attention_and_norms.add_norm(first, residual, second, following, EPS, factor, h if both else None, x, module)
        attention_and_norms.add_norm(first, residual, second, following, EPS, factor, wanted[0] if both else None, wanted[1])
        for found, one in ((h, wanted[0]), (x, wanted[1]))[0 if both else 1 :]:
            assert close(found, one)
        assert all(one[:, :8].isnan().all() and one[:, 8 + width :].isnan().all() for one in room)
    assert module.launches == ["add_norm"] * 3


def close(found, wanted):
    """Whether no value is more than two steps of its type away, and nearly all are equal."""
    steps = torch.finfo(wanted.dtype).eps
    near = (found.float() - wanted.float()).abs() <= 2 * steps * wanted.float().abs() + 1e-7
    return bool(near.all()) and int((found != wanted).sum()) <= max(1, 0.03 * found.numel())


def test_norms_may_be_written_over_what_was_read():
    module = cpu_module()
    y, residual, weight = random(2, 64, seed=1), random(2, 64), random(64, seed=2)
    wanted_h, wanted_x = poisoned(2, 64), poisoned(2, 64)
    attention_and_norms.add_norm(y, residual, weight, weight, EPS, None, wanted_h, wanted_x)
    attention_and_norms.add_norm(y, residual, weight, weight, EPS, None, residual, y, module)
    assert close(residual, wanted_h) and close(y, wanted_x) and module.launches == ["add_norm"]


@pytest.mark.parametrize("mode", attention_and_norms.MODES)
@pytest.mark.parametrize("heads, kv_heads, dim", [(4, 2, 256), (8, 1, 512), (3, 3, 48), (2, 1, 16), (4, 1, 128)])
def test_the_kernel_of_rotation_equals_torch_and_touches_only_its_places(heads, kv_heads, dim, mode):
    module = cpu_module(1)
    n, places = 3, 5
    parts = attention_and_norms.MODES[mode]
    qkv = random(n, (heads + parts * kv_heads) * dim + 8)[:, :-8]  # rows apart in memory
    q_weight, k_weight, cos, sin = (random(*shape, seed=s) for s, shape in enumerate([(dim,), (dim,), (n, dim), (n, dim)]))
    found, wanted = ([random(n + 1, kv_heads, places, dim, seed=s) for s in (4, 5)] for _ in range(2))
    outs, norms = [poisoned(n, heads, dim) for _ in range(2)], attention_and_norms.HeadNorms(q_weight, k_weight, EPS)
    for (keys, values), q_out, one in ((found, outs[0], module), (wanted, outs[1], None)):
        attention_and_norms.rope_write(
            qkv, heads, kv_heads, dim, norms, cos, sin, keys, values, torch.tensor([4, 0, 2]), q_out,
            module=one, mode=mode,
        )  # fmt: skip
    assert close(outs[0], outs[1]) and close(found[0], wanted[0]) and close(found[1], wanted[1])
    assert len(module.launches) == 1


def test_a_place_that_the_cache_has_not_is_not_written():
    module = cpu_module()
    keys, values = random(2, 1, 3, 16), random(2, 1, 3, 16, seed=1)
    before = keys.clone(), values.clone()
    norms = attention_and_norms.HeadNorms(random(16), random(16), EPS)
    args = [random(2, 48), 1, 1, 16, norms, random(2, 16), random(2, 16), keys, values]
    attention_and_norms.rope_write(*args, torch.tensor([3, -1]), poisoned(2, 1, 16), module=module)
    assert torch.equal(keys, before[0]) and torch.equal(values, before[1]) and module.launches == ["rope_write_1"]


@pytest.mark.parametrize("kind", attention_and_norms.ACTIVATIONS)
def test_the_kernel_of_gates_equals_torch_at_any_width_and_stride(kind):
    module = cpu_module(1)
    for n, width, stride in ((1, 10240, 20480), (3, 264, 600), (2, 7, 20), (2, 24, 51)):
        room, up = random(n, stride, spread=3), random(n, 3, width, seed=1)[:, 1]
        out, wanted = poisoned(n, width), poisoned(n, width)
        attention_and_norms.gated(room[:, :width], up, out, kind, module)
        attention_and_norms.gated(room[:, :width], up, wanted, kind)
        # Below -3, 1 + erf(x) is a difference of nearly equal numbers: float32 itself is 1e-6 off, `up` is up to 4, and
        # which way it is off differs between two implementations. Nowhere else is anything like that allowed.
        cancels = room[:, :width] < -3
        assert close(out[~cancels], wanted[~cancels])
        torch.testing.assert_close(out[cancels], wanted[cancels], rtol=2**-7, atol=1e-5)
    assert module.launches == ["gated_8", "gated_8", "gated_1", "gated_1"]


def test_the_kernel_of_shared_experts_is_torch_s_sum_at_any_width_and_stride():
    module = cpu_module(1)
    for n, width, stride in ((1, 2048, 2048), (3, 264, 600), (2, 7, 20)):
        y, made, gate = random(n, stride)[:, :width], random(n, width, seed=1), random(n, 4, seed=2, spread=3)[:, :1]
        for given in (gate, None):
            wanted = y + (made if given is None else torch.sigmoid(gate) * made)
            assert torch.equal(attention_and_norms.add_gated(y.clone(), made, given, module), wanted)
    assert module.launches == [*["add_gated_8"] * 4, *["add_gated_1"] * 2]


SHAPES = [  # heads, kv heads, head size
    (8, 2, 256), (8, 2, 512), (8, 1, 512), (16, 1, 512), (16, 1, 256), (16, 8, 256), (10, 1, 128), (4, 2, 64), (2, 2, 16),
    (6, 2, 80),
]  # fmt: skip


FIRST_SHAPES = {(8, 1, 512): "here", (16, 1, 256): "apart", (10, 1, 128): "here", (4, 2, 64): "apart", (6, 2, 80): "here"}


@pytest.mark.parametrize("heads, kv_heads, dim, combine", [
    pytest.param(*shape, combine, marks=() if FIRST_SHAPES.get(shape) == combine else pytest.mark.slow)
    for shape in SHAPES for combine in ("here", "apart")
])  # fmt: skip
def test_attention_is_exact_to_one_rounding_at_every_length(heads, kv_heads, dim, combine, monkeypatch):
    monkeypatch.setattr(attention_and_norms, "_COMBINE_BYTES", 0 if combine == "apart" else 2**30)
    dtype = torch.float16 if heads == 10 or dim == 64 else torch.bfloat16
    module = cpu_module(1)
    n, places = 2, 150
    keys, values = (random(n, kv_heads, places, dim, dtype=dtype, seed=s) for s in (1, 2))
    q, worst = random(n, heads, dim, dtype=dtype), 0.0
    scratch = torch.full((attention_and_norms.scratch_values(n, heads, kv_heads, dim, places, module.multiprocessors),), math.nan)
    # One place, a tile less one, a tile, one more, several splits with an odd end, all, and a ring that is full.
    for length in (1, 31, 32, 33, 100, 150, 400):
        positions = torch.tensor([length - 1, max(0, length - 50)])
        k, v = keys.clone(), values.clone()
        for i in range(n):
            k[i, :, int(positions[i]) + 1 :] = v[i, :, int(positions[i]) + 1 :] = math.nan
        for scaling, softcap in ((dim**-0.5, None), (1.0, 4.0)):
            out = poisoned(n, heads * dim, dtype=dtype)
            attention_and_norms.attend(q, k, v, positions, scaling, softcap, out, scratch, module)
            exact = selfcheck.attend_exact(q, k, v, positions, scaling, softcap)
            worst = max(worst, selfcheck.relative_error(out, exact))
            # Nothing but the rounding of the output is left, whose norm is about 2^-9 / sqrt(3) of it at most.
            assert worst < (2.2e-3 if dtype == torch.bfloat16 else 3e-4), (length, softcap)
    assert not module.scratch["arrived"].any() and ("attend_combine" in launches(module)) == (combine == "apart")


@pytest.mark.parametrize("heads, places, spread, multiprocessors", [(4, 1000, 1, 1), (2, 70, 30, 16)])
def test_long_rows_in_few_blocks_and_large_scores_are_exact_too(heads, places, spread, multiprocessors):
    module, q = cpu_module(multiprocessors=multiprocessors), random(1, heads, 64, spread=spread)
    keys, values = random(1, 1, places, 64, seed=1, spread=spread), random(1, 1, places, 64, seed=2)
    for position in (places - 1, places - 2, places // 5, 31):
        out, positions = poisoned(1, heads * 64), torch.tensor([position])
        attention_and_norms.attend(q, keys, values, positions, 1.0, None, out, None, module)
        assert selfcheck.relative_error(out, selfcheck.attend_exact(q, keys, values, positions, 1.0, None)) < 2.2e-3


def test_the_same_input_gives_the_same_bits_whoever_arrives_last():
    outs = []
    for order in (0, 1, 9):
        module, out = cpu_module(order), poisoned(1, 256)
        q, keys, values = random(1, 4, 64), random(1, 1, 300, 64, seed=1), random(1, 1, 300, 64, seed=2)
        attention_and_norms.attend(q, keys, values, torch.tensor([299]), 1.0, None, out, None, module)
        outs.append(out)
    assert torch.equal(outs[0], outs[1]) and torch.equal(outs[0], outs[2])


def test_shapes_without_a_kernel_are_named_and_computed_in_torch():
    module = cpu_module()
    assert "float32" in attention_and_norms.why_not(4, 2, 64, torch.float32) and "head of 24" in attention_and_norms.why_not(
        4, 2, 24, torch.bfloat16
    )
    assert "head of 1024" in attention_and_norms.why_not(4, 2, 1024, torch.bfloat16)
    assert "32 heads over 1" in attention_and_norms.why_not(32, 1, 64, torch.bfloat16)
    assert "5 heads over 2" in attention_and_norms.why_not(5, 2, 64, torch.bfloat16)
    assert "width of 12" in attention_and_norms.why_not(4, 2, 64, torch.bfloat16, width=12)
    assert attention_and_norms.why_not(16, 1, 512, torch.float16) is None
    residual, x, wanted = random(2, 12), poisoned(2, 12), poisoned(2, 12)
    attention_and_norms.add_norm(None, residual, None, None, EPS, None, None, x, module)
    attention_and_norms.add_norm(None, residual, None, None, EPS, None, None, wanted)
    wide, out = random(1, 8, dtype=torch.float32), poisoned(1, 8, dtype=torch.float32)
    attention_and_norms.gated(wide, wide, out, "silu", module)
    q, keys = random(1, 2, 24), random(1, 1, 5, 24, seed=1)
    looked = poisoned(1, 48)
    attention_and_norms.attend(q, keys, keys, torch.tensor([4]), 1.0, None, looked, None, module)
    assert torch.equal(x, wanted) and not out.isnan().any() and not looked.isnan().any() and launches(module) == []


def test_measuring_runs_every_kernel_and_its_torch_path():
    module, runs = cpu_module(), []

    def time_us(run):
        run()
        runs.append(len(launches(module)))
        return float(len(runs))

    found = selfcheck.measure(module, time_us, width=64, mlp=48, attention=((4, 2, 32),), n=2, places=40)
    assert list(found) == [
        "add_norm", "gated", "rope_write 4/2 x 32", "attend 4/2 x 32, 40 places", "both at once 4/2 x 32, 40 places",
    ]  # fmt: skip
    assert list(found.values()) == [(1, 2), (3, 4), (5, 6), (7, 8), (9, 10)]
    assert runs == [1, 1, 2, 2, 3, 3, 4, 4, 5, 5]  # launches of kernels, then none of the torch path
    several = ((4, 2, 32), (4, 2, 32, "after"), (4, 2, 32, None))  # of one size: none hides another's time
    assert len(selfcheck.measure(module, time_us, width=64, mlp=48, attention=several, n=2, places=40)) == 2 + 3 * 3


# A wrong kernel is found ---------------------------------------------------------------------------------------------

WRONG_SMALL = [
    ("0.044715f", "0.0447150f * 1.2f", "gated"),
    ("weighted(v[i] * r, post_weight[i], form, half)", "v[i] * post_weight[i]", "add_norm"),
    ("share * a[i]", "a[i]", "add_gated"),
    ("y0 = -y * s0[i], y1", "y0 = y * s0[i], y1", "rope_write"),
]
WRONG_ATTEND = [
    ("#define TILE 32", "#define TILE 32\n#define __expf(x) (1.f + (x))", "attend"),
    ("if (at + lane >= end) s = -__uint_as_float(0x7f800000);", "", "attend"),
    ("total[j] = total[j] * down[j] +", "total[j] = total[j] +", "attend"),
    ("y0 = -y * s0[i]", "y0 = y * s0[i]", "turn_and_attend (own)"),
    ("is_key && mode == 2", "false", "turn_and_attend (k_is_v)"),
    ("mode == 1 ? 2 : 1", "1", "turn_and_attend (own)"),
]


# A compiled source each: every third one by default.
@pytest.mark.parametrize(
    "right, wrong, named",
    [case if place % 3 == 0 else slow_on_cpu(*case) for place, case in enumerate(WRONG_SMALL + WRONG_ATTEND)],
    ids=range(len(WRONG_SMALL + WRONG_ATTEND)),
)
def test_the_check_at_load_names_a_kernel_that_is_wrong(right, wrong, named):
    is_small = "attend" not in named
    source = attention_and_norms.source("fused.cu" if is_small else "attend.cu")
    assert source.count(right) == 1
    changed = source.replace(right, wrong)
    module = cpu_module(source=changed) if is_small else cpu_module(attend=changed, multiprocessors=3)
    said = selfcheck.check(module, widths=(64,), attention=((4, 2, 32),), rows=(1,))
    assert said is not None and named in said


@pytest.mark.parametrize("barrier", [0, 1])
def test_a_missing_barrier_of_attention_is_found(barrier):
    source = attention_and_norms.source("attend.cu")
    start = source.index("for (int at = first")
    for _ in range(barrier + 1):
        start = source.index("__syncthreads();", start + 1)
    changed = source[:start] + source[start + len("__syncthreads();") :]
    said = [selfcheck.check(cpu_module(order, attend=changed), widths=(), attention=((4, 2, 256),), rows=(1,)) for order in (0, 1)]
    assert any(said)


def test_kernels_are_refused_where_there_is_no_gpu():
    with pytest.raises(DeviceError, match="not a CUDA device"):
        attention_and_norms.load("cpu")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_turns_are_the_rotary_modules_own(dtype):
    """Angles of two kinds of layers at once, in torch and in the kernel, against transformers' own formula."""
    positions = torch.tensor([0, 1, 63, 5000, 131071])
    kinds, wanted = [], []
    for dim, base in ((256, 1e4), (512, 1e6)):
        inv_freq = 1.0 / base ** (torch.arange(0, dim, 2).float() / dim)
        kinds.append((inv_freq, 0.75, *(torch.full((5, dim), math.nan, dtype=dtype) for _ in range(2))))
        angles = torch.cat((positions[:, None].float() * inv_freq,) * 2, dim=-1)
        wanted += [(angles.cos() * 0.75).to(dtype), (angles.sin() * 0.75).to(dtype)]
    for module in (None, *([] if run.why_not() else [cpu_module()])):
        for one in kinds:
            one[2].fill_(math.nan), one[3].fill_(math.nan)
        attention_and_norms.turns(positions, kinds, module)
        for found, own in zip([part for one in kinds for part in one[2:]], wanted, strict=True):
            # The C library's cosine is not torch's to the last bit: now and then the next bf16 number.
            assert (found == own).float().mean() > 0.99
            torch.testing.assert_close(found, own, rtol=2**-7, atol=1e-3)
    attention_and_norms.turns(positions, kinds[:1], None)
    assert torch.equal(kinds[0][2], wanted[0])


@pytest.mark.parametrize("kinds", [((8, 2, 256), (8, 2, 512)), ((32, 8, 128),), ((64, 8, 128),)])
@pytest.mark.parametrize("rows", [8, 64])
def test_scratch_of_attention_is_within_what_a_plan_counts(kinds, rows):
    """Of every size of step on a card with 132 multiprocessors, in a context of 8192."""
    sizes = [*(size for size in execution.BUCKETS if size < rows), rows]
    values = sum(attention_and_norms.scratch_values(size, *kind, 8192, 132) for size in sizes for kind in kinds)
    more = sum(size for size in sizes if size > execution.KERNEL_ROWS) * execution.ROW_SCRATCH_BYTES
    assert 0 < 4 * values <= execution.SCRATCH_BYTES["fused"] + more
