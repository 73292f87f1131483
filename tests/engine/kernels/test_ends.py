"""The two ends of a decode step: torch paths equal transformers' modules, kernels equal both, and a wrong one is found."""

import math
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from transformers.models.gemma4 import modeling_gemma4 as gemma4
from transformers.models.gemma4.configuration_gemma4 import Gemma4TextConfig

from tests.cuda_on_cpu import run
from tests.cuda_on_cpu.modules import step_ends as cpu_module
from tests.engine.kernels.test_fused import close, poisoned, random
from tests.long_runs import slow_on_cpu
from trimtab.engine.batch.request import check_logits
from trimtab.engine.kernels import device_kernels, embed_and_logits
from trimtab.engine.layers import leaves
from trimtab.engine.lora.store import AdapterStore
from trimtab.errors import DeviceError

TYPES = (torch.bfloat16, torch.float16)
ORDERS = (0, 1, 7)  # of threads and blocks
SIZES = embed_and_logits.Sizes(1100, 40, 30.0, 5, 24)


def text_model(dtype, *, layers=3, per_layer=16, vocabulary=50):
    """Return transformers' own text model with random weights."""
    config = Gemma4TextConfig(
        hidden_size=32, intermediate_size=24, num_hidden_layers=layers, num_attention_heads=2, num_key_value_heads=1,
        head_dim=16, global_head_dim=16, vocab_size=vocabulary, vocab_size_per_layer_input=vocabulary,
        hidden_size_per_layer_input=per_layer, pad_token_id=0, num_kv_shared_layers=0,
        layer_types=["sliding_attention"] * (layers - 1) + ["full_attention"],
    )  # fmt: skip
    torch.manual_seed(3)
    model = gemma4.Gemma4TextModel(config).to(dtype).requires_grad_(False).eval()
    for table in (model.embed_tokens, model.embed_tokens_per_layer):
        table.weight.copy_(random(*table.weight.shape, dtype=dtype))
    model.per_layer_projection_norm.weight.copy_(random(per_layer, dtype=dtype, seed=5))
    return model


def scale_of(table):
    return float(table.embed_scale.to(table.weight.dtype))


def modules_scores(logits, softcap):
    """What Gemma4ForCausalLM.forward does with its head's output, and what a batch takes from it."""
    if softcap is not None:
        logits = logits / softcap
        logits = torch.tanh(logits)
        logits = logits * softcap
    scores = logits.float()
    best, token = scores.max(dim=-1)
    return scores, torch.where(best.isnan() | best.isinf(), -1, token)


# The torch paths, against transformers' own modules: bit for bit -----------------------------------------------------


@pytest.mark.parametrize("kernel", [False, True])
@pytest.mark.parametrize("dtype", [*TYPES, torch.float32])
def test_rows_are_what_the_scaled_embeddings_give(dtype, kernel):
    model = text_model(dtype)
    tables, ids = (model.embed_tokens, model.embed_tokens_per_layer), torch.tensor([0, 49, 7, 7])
    module = cpu_module(1) if kernel else None
    outs, x = [poisoned(4, table.weight.shape[1], dtype=dtype) for table in tables], poisoned(4, 32, dtype=dtype)
    lookups = [embed_and_logits.Lookup(t.weight, scale_of(t), out) for t, out in zip(tables, outs, strict=True)]
    norm = model.layers[0].input_layernorm
    norm.weight.copy_(random(32, dtype=dtype, seed=9))
    embed_and_logits.rows(ids, lookups, module, norm=(norm.weight, norm.eps, x))
    assert close(x, norm(outs[0])) if kernel else torch.equal(x, norm(outs[0]))
    assert torch.equal(outs[0], tables[0](ids[:, None])[:, 0])
    assert torch.equal(outs[1], model.get_per_layer_inputs(ids[:, None], None).view(4, -1))
    if kernel:  # not for float32
        assert module.launches == (["rows"] if dtype in TYPES else [])


@pytest.mark.parametrize("dtype", [*TYPES, torch.float32])
def test_each_layers_own_input_is_what_the_module_projects(dtype):
    model, ids = text_model(dtype), torch.tensor([[3], [0], [49]])
    hidden = model.embed_tokens(ids)
    own = model.get_per_layer_inputs(ids, hidden)
    wanted = model.project_per_layer_inputs(hidden, own)[:, 0]
    product, norm = model.per_layer_model_projection(hidden)[:, 0], model.per_layer_projection_norm
    for module in (None, *([cpu_module(order) for order in ORDERS] if run.why_not() is None else [])):
        out = poisoned(*wanted.shape, dtype=dtype)
        embed_and_logits.per_layer(
            product, own[:, 0], norm.weight, norm.eps, model.per_layer_model_projection_scale, model.per_layer_input_scale,
            out, module,
        )  # fmt: skip
        assert torch.equal(out, wanted) if module is None else close(out, wanted)
        assert module is None or module.launches == (["per_layer"] if dtype in TYPES else [])


@pytest.mark.parametrize("dtype", [*TYPES, torch.float32])
@pytest.mark.parametrize("softcap", [None, 30.0, 7.3])
def test_scores_in_torch_are_what_the_head_and_the_batch_made_of_them(dtype, softcap):
    logits, following = random(3, 1001, dtype=dtype, spread=20.0), torch.full((5, 1), 9)
    logits[1, 17] = math.nan
    found = embed_and_logits.argmax_logits(logits, softcap, following[:3, 0])
    wanted = modules_scores(logits, softcap)
    assert torch.equal(found[0].nan_to_num(99), wanted[0].nan_to_num(99)) and found[0].dtype == torch.float32
    assert torch.equal(found[1], wanted[1]) and int(found[1][1]) == -1
    assert following[:, 0].tolist() == [int(wanted[1][0]), 0, int(wanted[1][2]), 9, 9]


# The kernels, on the CPU ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "order, dtype", [(7, torch.bfloat16), *(pytest.param(*one, marks=pytest.mark.slow) for one in ((0, TYPES[0]), (1, TYPES[1])))]
)
def test_the_check_at_load_passes_on_the_cpu_in_any_order_of_threads(order, dtype):
    module = cpu_module(order)
    for sizes in (SIZES, embed_and_logits.Sizes(4099, 64), embed_and_logits.Sizes(2056, 1032, 30.0, 3, 256)):
        assert embed_and_logits.why_not(sizes, dtype) is None
        assert embed_and_logits.check(module, sizes, dtype=dtype, rows=(1, 3, 8)) is None
    assert set(module.launches) == set(embed_and_logits.NAMES)


@pytest.mark.parametrize("kernel", [False, True])
@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("softcap", [None, 30.0])
@pytest.mark.parametrize("width", [8, 1001, 2056])
def test_a_token_is_refused_exactly_where_eager_refuses_its_logits(dtype, kernel, softcap, width):
    logits = random(6, width, dtype=dtype, spread=20.0)
    largest = torch.finfo(dtype).max
    logits[0, width // 2], logits[1, 0], logits[2, width - 1], logits[3] = math.nan, math.inf, -math.inf, -math.inf
    logits[4, width // 3], logits[5] = largest, -largest
    scores, tokens = embed_and_logits.argmax_logits(logits, softcap, None, cpu_module(1) if kernel else None)
    capped = modules_scores(logits, softcap)[0]
    for row in range(6):
        try:
            check_logits(capped[row : row + 1], adapter=None)
        except DeviceError:
            assert int(tokens[row]) == -1
        else:
            assert int(tokens[row]) == int(scores[row].argmax())
    assert tokens[[0, 1, 3]].tolist() == [-1, -1, -1] if softcap is None else int(tokens[0]) == -1
    assert int(tokens[2]) >= 0 and int(tokens[4]) >= 0 and int(tokens[5]) >= 0


@pytest.mark.parametrize("n, width, stride", [(1, 1, 1), (3, 255, 300), (8, 2049, 2049), (3, 4096, 4104), (1, 2568, 2568)])
@pytest.mark.parametrize("softcap", [None, 30.0])
@pytest.mark.parametrize("dtype", TYPES)
def test_scores_of_the_kernel_are_torchs_whatever_the_width_and_the_rows(n, width, stride, softcap, dtype):
    for order in ORDERS:
        module = cpu_module(order)
        logits = random(n, stride, dtype=dtype, spread=20.0)[:, :width]
        room, following = poisoned(n + 1, width, dtype=torch.float32), torch.full((n, 3), -5)
        out = room[:n], torch.full((n,), -7)
        for _ in range(2):  # the second finds the counters as the first left them
            scores, tokens = embed_and_logits.argmax_logits(logits, softcap, following[:, 1], module, out=out)
        wanted = modules_scores(logits, softcap)
        # A tanh that is one float32 step away may round to the other side.
        assert torch.equal(scores, wanted[0]) if softcap is None else close(scores.to(dtype), wanted[0].to(dtype))
        assert torch.equal(tokens, embed_and_logits.with_argmax(scores)[1])
        assert torch.equal(following[:, 1], tokens) and (following[:, ::2] == -5).all() and room[n].isnan().all()
        aligned = width % 8 == 0 and stride % 8 == 0
        assert module.launches == [f"likeliest_{8 if aligned else 1}"] * 2
        assert not module.scratch["best"].any() and not module.scratch["arrived"].any()


@pytest.mark.parametrize("width", [2048 * 2 + 8, 777])
def test_ties_zeros_infinities_and_what_is_not_a_number(width):
    low = -random(8, width).abs() - 1
    rows = low.clone()
    rows[0, [5, 300, width - 1]] = 3.0  # the first of equals
    rows[1, width - 1] = 0.5
    rows[2] = -math.inf
    rows[3, 400], rows[3, 500] = -0.0, 0.0  # equal
    rows[4, 600], rows[4, 20] = math.inf, math.inf
    rows[5, 700], rows[5, 3] = math.nan, math.inf
    rows[6, 0] = -math.nan
    for order in ORDERS:
        for softcap in (None, 30.0):
            following = torch.full((8,), -5)
            scores, tokens = embed_and_logits.argmax_logits(rows, softcap, following, cpu_module(order))
            expected = modules_scores(rows, softcap)
            # A softcap makes infinite logits finite.
            wanted = [5, width - 1, -1, 400, -1, -1, -1] if softcap is None else [5, width - 1, 0, 400, 20, -1, -1]
            assert tokens.tolist() == expected[1].tolist() and tokens.tolist()[:7] == wanted
            assert following.tolist() == [max(token, 0) for token in tokens.tolist()]
            assert torch.equal(scores.isnan(), expected[0].isnan()) and torch.equal(scores.isinf(), expected[0].isinf())


def test_every_softcap_of_every_number_is_rounded_as_torch_rounds():
    """All finite bfloat16 and a step of float16: tanh aside, no value may differ, and tanh moves next to none."""
    for dtype in TYPES:
        bits = torch.arange(0, 2**16, dtype=torch.int32).to(torch.int16).view(dtype)
        logits = bits[bits.isfinite()][None, ::3]
        for softcap in (30.0, 50.0, 7.3):
            scores, _ = embed_and_logits.argmax_logits(logits, softcap, None, cpu_module())
            wanted = modules_scores(logits, softcap)[0]
            assert int((scores != wanted).sum()) <= 8 and close(scores.to(dtype), wanted.to(dtype))


@pytest.mark.parametrize("n", [1, 3, 8])
@pytest.mark.parametrize("dtype", TYPES)
def test_rows_of_one_or_two_tables_and_places_of_a_ring(n, dtype):
    for order in ORDERS:
        module = cpu_module(order)
        wide, high = random(33, 1032, dtype=dtype), random(33, 3 * 2048, dtype=dtype, seed=1)
        ids, positions = torch.arange(n) * 4, torch.arange(n) * 700 + 511
        for lookups in (2, 1):
            room = [poisoned(n + 1, table.shape[1], dtype=dtype) for table in (wide, high)]
            given = [
                embed_and_logits.Lookup(wide, 5.5, room[0][:n]),
                embed_and_logits.Lookup(high, 16.0, room[1][:n], in_order=True),
            ][:lookups]
            places, weight = torch.full((n + 1,), -3), None if lookups == 1 else random(1032, dtype=dtype, seed=4)
            normed, wanted = poisoned(n + 1, 1032, dtype=dtype), poisoned(n, 1032, dtype=dtype)
            norm = weight, 1e-6, normed[:n]
            embed_and_logits.rows(ids, given, module, norm=norm, ring=(positions, 512, places[:n]))
            embed_and_logits.attention_and_norms.add_norm(None, wide[ids] * 5.5, None, weight, 1e-6, None, None, wanted)
            assert close(normed[:n], wanted) and normed[n].isnan().all()
            assert torch.equal(room[0][:n], wide[ids] * 5.5) and room[0][n].isnan().all()
            assert torch.equal(room[1][:n], high[:n] * 16.0) if lookups == 2 else room[1].isnan().all()
            assert places.tolist() == [*(positions % 512).tolist(), -3]
        assert module.launches == ["rows"] * 2


def test_an_id_without_a_row_gives_no_numbers_and_no_token():
    module, out = cpu_module(), random(3, 16)
    embed_and_logits.rows(torch.tensor([-1, 4, 5]), [embed_and_logits.Lookup(random(5, 16), 2.0, out)], module)
    assert out.isnan().any(1).tolist() == [True, False, True] and out[0].isnan().all()
    assert embed_and_logits.argmax_logits(out, None, None, module)[1].tolist()[::2] == [-1, -1]
    with pytest.raises(IndexError):
        embed_and_logits.rows(torch.tensor([5]), [embed_and_logits.Lookup(random(5, 16), 2.0, out[:1])])


def test_each_layers_own_input_from_rows_apart_in_memory():
    for order, (n, layers, width) in zip(ORDERS, [(1, 42, 256), (3, 7, 24), (8, 1, 8)], strict=True):
        module = cpu_module(order)
        product = random(n, layers * width + 8)[:, :-8]
        own = random(n, layers * width + 16, seed=1)[:, 16:].view(n, layers, width)
        for weight in (random(width, seed=2), None):
            room, wanted = poisoned(n + 1, layers, width), poisoned(n, layers, width)
            embed_and_logits.per_layer(product, own, weight, 1e-6, 0.02, 2**-0.5, room[:n], module)
            embed_and_logits.per_layer(product, own, weight, 1e-6, 0.02, 2**-0.5, wanted)
            assert close(room[:n], wanted) and room[n].isnan().all()
            exact = product.double().view(n, layers, width) * 0.02
            exact = exact * (exact.pow(2).mean(-1, keepdim=True) + 1e-6).rsqrt()
            exact = (exact * (1 if weight is None else weight.double()) + own.double()) * 2**-0.5
            assert embed_and_logits.selfcheck.relative_error(room[:n], exact) < 6e-3
        assert module.launches == ["per_layer"] * 2


def test_what_a_kernel_cannot_read_is_done_in_torch():
    module = cpu_module()
    out = poisoned(2, 15)
    embed_and_logits.rows(torch.tensor([1, 0]), [embed_and_logits.Lookup(random(5, 15), 2.0, out)], module)
    assert torch.equal(out, random(5, 15)[[1, 0]] * 2)
    mixed = poisoned(2, 2, 264)
    embed_and_logits.per_layer(random(2, 528), random(2, 2, 264), None, 1e-6, 0.1, 1.0, mixed, module)
    assert not mixed.isnan().any()
    assert embed_and_logits.argmax_logits(random(2, 9).double().float(), 30.0, None, module)[0].dtype == torch.float32
    assert embed_and_logits.argmax_logits(random(65, 9), None, None, module)[1].shape == (65,) and module.launches == []
    assert "multiples of 8" in embed_and_logits.why_not(embed_and_logits.Sizes(100, 36), torch.bfloat16)
    assert "float32" in embed_and_logits.why_not(SIZES, torch.float32)


def test_a_table_says_what_lies_on_the_device():
    facts = {
        "embed_scale": torch.tensor(4.0), "device": torch.device("cpu"), "dtype": torch.bfloat16, "store": AdapterStore(),
        "padding_idx": 0,
    }  # fmt: skip
    weight = torch.nn.Parameter(random(6, 8), requires_grad=False)
    table = leaves.ResidentTable("t", weight, **facts)
    assert table.held()[0] is weight and table.held()[1] is False
    gathered = leaves.GatheredTable("t", (6, 8), random(6, 8), 1, **facts)
    assert gathered.held() is None
    gathered.stage(torch.tensor([4, 2]), 3)
    assert gathered.held() is None  # not before a step reads what was staged
    gathered.reads_staged = True
    rows, in_order = gathered.held()
    assert in_order and torch.equal(rows[:2], random(6, 8)[[4, 2]])


def test_a_table_that_the_device_sees_is_read_where_it_is(monkeypatch):
    monkeypatch.setattr(leaves, "seen_by", lambda source, device: source)
    facts = {"embed_scale": None, "device": torch.device("cpu"), "dtype": torch.bfloat16, "store": AdapterStore()}
    source = random(6, 8)
    table = leaves.GatheredTable("t", (6, 8), source, 1, padding_idx=0, **facts)
    assert table.held() == (source, False) and table.held()[0] is source
    assert torch.equal(table(torch.tensor([[4, 2]])), source[[4, 2]][None])


# At load -------------------------------------------------------------------------------------------------------------

WRONG = [
    ("rounded(v[i] * scale, half) : _", "rounded(v[i] * scale * 1.01f, half) : _", "rows"),
    ("v[i] = v[i] * r * w[i];", "v[i] = v[i] * r;", "rows"), ("% ring;", "% (ring + 1);", "rows"),
    ("    v[i] = rounded(v[i] * scale, half);\n    sum", "    v[i] = rounded(-v[i] * scale, half);\n    sum", "per_layer"),
    ("+ o[i], half) * factor", ", half) * factor + o[i]", "per_layer"), ("a > b ? a : b", "a < b ? a : b", "argmax"),
    ("(u64)order << 32 | (u32)~at", "(u64)order << 32 | (u32)at", "argmax"),
    ("atomicExch(best + row, (u64)0)", "best[row]", "argmax"), ("arrived[row] = 0;", "", "argmax"),
    ("rounded(v[i] * inverse, half)", "rounded(v[i], half)", "argmax"), ("token < 0 ? 0 : token", "token", "argmax"),
    ("(bits & 0x7fffffffu) > 0x7f800000u ? 0xffffffffu : ", "", "argmax"),
    ("order < 0xff800000u", "order < 0xffffffffu", "argmax"), ("order > 0x007fffffu", "true", "argmax"),
]  # fmt: skip


# A compiled source each: every third one by default.
@pytest.mark.parametrize(
    "right, wrong, named",
    [case if place % 3 == 0 else slow_on_cpu(*case) for place, case in enumerate(WRONG)],
    ids=range(len(WRONG)),
)
def test_the_check_at_load_names_a_kernel_that_is_wrong(right, wrong, named):
    assert embed_and_logits.source().count(right) == 1
    # A softcap makes infinite scores finite.
    module = cpu_module(source=embed_and_logits.source().replace(right, wrong))
    found = (embed_and_logits.check(module, sizes, rows=(3,)) for sizes in (SIZES, replace(SIZES, softcap=None)))
    said = next((one for one in found if one is not None), None)
    assert said is not None and said.startswith(named)


def test_measuring_runs_every_kernel_and_its_torch_path():
    module, runs = cpu_module(), []

    def time_us(call):
        call()
        runs.append(len(module.launches))
        return float(len(runs))

    found = embed_and_logits.measure(module, time_us, SIZES, n=2)
    assert found == {"rows": (1, 2), "per_layer": (3, 4), "argmax of 1100": (5, 6)} and runs == [1, 1, 2, 2, 3, 3]


def test_ends_that_are_wrong_or_slow_are_left_out_by_name(monkeypatch):
    packed = SimpleNamespace(kind="nf4", shape=(64, 64), blocks=(64,), parts={})
    leaf = SimpleNamespace(
        device=torch.device("cpu"), dtype=torch.bfloat16, packed=lambda: packed, quant_kind="nf4", in_features=64
    )
    times = iter([1.0, 9.0] * 3 + [9.0, 1.0] * 3)
    monkeypatch.setattr(device_kernels.autotune, "graph_us", lambda call, device, calls: next(times))
    own = device_kernels.KernelFamily.choose
    ends = device_kernels.ENDS
    monkeypatch.setattr(
        device_kernels.KernelFamily, "choose", lambda self, *given: own(self, *given) if self.name == ends else self.name
    )
    source = embed_and_logits.source()
    for changed, why in (
        (source, None),
        (source, "slower here"),
        (source.replace("rounded(v[i] * scale,", "rounded(-v[i] * scale,"), "rows of"),
    ):
        monkeypatch.setattr(device_kernels.embed_and_logits, "load", lambda device, changed=changed: cpu_module(source=changed))
        chosen = device_kernels._choose([[[leaf]]], [], SIZES)
        assert chosen.small == device_kernels.SMALL and (chosen.ends is None) == (why is not None)
        assert (why is None and not chosen.left_out) or why in chosen.left_out[device_kernels.ENDS]
    assert device_kernels._choose([[[leaf]]], [], None).ends is None


def test_launches_of_the_ends_overlap_with_the_others():
    module = SimpleNamespace(overlap=False)
    with device_kernels.DeviceKernels(ends=module).overlapping(True):
        assert module.overlap
    assert not module.overlap


def test_kernels_are_refused_where_there_is_no_gpu():
    with pytest.raises(DeviceError, match="not a CUDA device"):
        embed_and_logits.load("cpu")
