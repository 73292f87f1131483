"""Short steps compute what transformers' modules compute, from a counted number of operations, and leave nothing behind."""

from collections import Counter
from functools import partial

import pytest
import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from transformers.models.gemma3.modeling_gemma3 import Gemma3RMSNorm
from transformers.models.gemma4.modeling_gemma4 import Gemma4RMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm

import trimtab
from tests import pico
from tests.engine.decode.test_graphs import ASKED, answers, demo, forced_scores, joined, of_modules, replayed  # noqa: F401
from tests.engine.lora.toy_lora import Toy, make_adapter, ours, put_on
from tests.long_runs import crossed
from trimtab.engine.decode import decode_step
from trimtab.engine.kv.kv_cache import step_masks
from trimtab.engine.layers.leaves import ResidentLeaf
from trimtab.engine.lora import fewer_ops, mixes
from trimtab.engine.lora import layers as lora
from trimtab.engine.lora.fewer_ops import ShortAdapters, ShortOps
from trimtab.engine.lora.store import EAGER, AdapterStore, Holders

if fewer_ops.why_not(torch.device("cpu")) is not None:
    pytest.skip("this torch has no RMS norm of one operation", allow_module_level=True)

CPU = torch.device("cpu")
WIDTH = 96
TYPES = [torch.float32, torch.bfloat16, torch.float16]


# Counting


class Operations(TorchDispatchMode):
    """Counts what would be a kernel on a GPU: not views, not allocations; a norm that is one call is one."""

    def __init__(self):
        super().__init__()
        self.found, self.inside = Counter(), False

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = str(func)
        if not (self.inside or func.is_view or "empty" in name or "_unsafe_view" in name):
            self.found[name] += 1
        return func(*args, **(kwargs or {}))

    def one(self, name, call):
        """Count whatever a call does as one operation."""
        if self.inside:
            return call()
        self.found[name] += 1
        self.inside = True
        try:
            return call()
        finally:
            self.inside = False


class Norms(TorchFunctionMode):
    """Lets a counter take a norm of torch's for the one kernel that it is on a GPU."""

    def __init__(self, counter):
        super().__init__()
        self.counter = counter

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func is not nn.functional.rms_norm:
            return func(*args, **(kwargs or {}))
        return self.counter.one("rms_norm", lambda: func(*args, **(kwargs or {})))


def operations(call):
    """Return how often each operation is called. A layer's own product is one: how many that takes is bitsandbytes' affair."""
    counter, base = Operations(), ResidentLeaf.base
    with pytest.MonkeyPatch.context() as patch, torch.no_grad(), counter, Norms(counter):
        patch.setattr(ResidentLeaf, "base", lambda leaf, x: counter.one("product", lambda: base(leaf, x)))
        call()
    return counter.found


def short_of(model, told=None, store=None):
    return ShortOps(model, store or AdapterStore(), CPU, lambda what, why: told.append((what, why)) if told is not None else None)


# Norms


def normed(kind, dtype, **options):
    module = kind(WIDTH, **options)
    if getattr(module, "weight", None) is not None:
        nn.init.normal_(module.weight, generator=torch.Generator().manual_seed(1))
    return nn.ModuleList([module.to(dtype).requires_grad_(False)])


# most: operations, or kernels of a GPU.
every_norm = pytest.mark.parametrize(
    "kind, options, form, most",
    [
        (Gemma4RMSNorm, {}, "inside", 1), (Gemma4RMSNorm, {"with_scale": False}, "inside", 1), (Gemma3RMSNorm, {}, "plus one", 3),
        (LlamaRMSNorm, {}, "after", 2), (Qwen3RMSNorm, {}, "after", 2),
    ],
)  # fmt: skip


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@every_norm
def test_a_norm_takes_the_form_that_rounds_as_it_does(kind, options, form, most, dtype):
    model, told = normed(kind, dtype, **options), []
    x = (torch.randn(40, 1, WIDTH, generator=torch.Generator().manual_seed(2)) * 3).to(dtype)
    expected = model[0](x)
    own = sum(operations(lambda: model[0](x)).values())
    short = short_of(model, told)
    with short.step():
        found = model[0](x)
        count = sum(operations(lambda: model[0](x)).values())
    assert fewer_ops.why_other(found, expected, roundings=fewer_ops.ROUNDINGS[form]) is None and told == []
    # In float32 before and after the weight are the same.
    wanted = "inside" if dtype == torch.float32 and form == "after" else form
    assert list(short.proved.values()) == [wanted]
    assert count <= most < own


def test_a_norm_without_an_equal_form_is_named_once_and_runs_as_it_is():
    class CenteredRMSNorm(LlamaRMSNorm):
        def forward(self, hidden_states):
            return super().forward(hidden_states - hidden_states.mean(-1, keepdim=True))

    model, told = nn.ModuleList([CenteredRMSNorm(WIDTH), CenteredRMSNorm(WIDTH)]), []
    x = torch.randn(3, WIDTH) + 1.0
    expected = model[0](x)
    short = short_of(model, told)
    with short.step():
        assert torch.equal(model[0](x), expected) and torch.equal(model[1](x), expected)
    ((what, why),) = told
    assert what == "norm as one operation" and why.startswith(f"CenteredRMSNorm of width {WIDTH}: inside: ")


def test_a_norm_that_takes_more_than_one_tensor_or_another_type_runs_as_it_is():
    class GateRMSNorm(LlamaRMSNorm):
        def forward(self, hidden_states, gate=None):
            found = super().forward(hidden_states)
            return found if gate is None else found * gate

    model = nn.ModuleList([GateRMSNorm(WIDTH)])
    x = torch.randn(3, WIDTH)
    short = short_of(model)
    with short.step():
        assert torch.equal(model[0](x, gate=torch.full((1,), 2.0)), 2.0 * GateRMSNorm(WIDTH)(x))
        assert short.proved == {}
        assert torch.equal(model[0](x.bfloat16()), GateRMSNorm(WIDTH)(x.bfloat16()))
        assert short.proved == {}


@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_values_that_are_rounded_elsewhere_or_with_another_eps_are_told_apart(dtype):
    x = torch.randn(64, 1, WIDTH, generator=torch.Generator().manual_seed(3)).to(dtype)
    weight = torch.randn(WIDTH, generator=torch.Generator().manual_seed(4)).to(dtype)
    expected = Gemma4RMSNorm(WIDTH)
    expected.weight = nn.Parameter(weight, requires_grad=False)
    right = fewer_ops.FORMS["inside"](x, weight, None, 1e-6)
    assert fewer_ops.why_other(right, expected(x)) is None
    assert fewer_ops.why_other(fewer_ops.FORMS["inside"](x, weight, None, 1e-2), expected(x)) is not None
    rounded = fewer_ops.why_other(fewer_ops.FORMS["after"](x, weight, None, 1e-6), expected(x))
    assert (rounded is None) == (dtype == torch.float32)
    assert "not finite" in fewer_ops.why_other(right * float("nan"), expected(x))
    assert "not torch" in fewer_ops.why_other(right.double(), expected(x))


@pytest.mark.parametrize("dtype", TYPES[1:], ids=str)
def test_a_value_that_moved_by_one_step_moves_a_rounded_product_by_up_to_two(dtype):
    """Every pair of significands: where the two steps of `ROUNDINGS` come from."""
    one = torch.ones((), dtype=dtype).view(torch.int16)
    count = round(1 / torch.finfo(dtype).eps)
    values, above = ((one + torch.arange(first, first + count).short()).view(dtype) for first in (0, 1))
    products, moved = values[:, None] * values, above[:, None] * values
    steps = (fewer_ops._ordered(moved) - fewer_ops._ordered(products)).abs()
    assert int(steps.max()) == fewer_ops.ROUNDINGS["after"] == 2 and 0.1 < float((steps == 2).float().mean()) < 0.13


@pytest.mark.parametrize("dtype", TYPES[1:], ids=str)
def test_a_norm_that_rounds_before_its_weight_is_its_formula_in_float64(dtype):
    width = 5376
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(100, 1, width, generator=generator).to(dtype)
    module = LlamaRMSNorm(width).to(dtype).requires_grad_(False)
    nn.init.normal_(module.weight, generator=generator)
    wide = x.double()
    exact = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + module.variance_epsilon)
    for own in (module(x), fewer_ops.FORMS["after"](x, module.weight, None, module.variance_epsilon)):
        assert fewer_ops.why_other(own, module.weight * exact.to(dtype), roundings=2) is None
        # A weight inside is another function, however many steps are allowed.
        inside = (module.weight.double() * exact).to(dtype)
        assert "% of the values" in fewer_ops.why_other(own, inside, roundings=2)


def test_a_norm_that_rounds_before_its_weight_keeps_its_form_where_its_sum_has_another_order():
    class OtherSumRMSNorm(LlamaRMSNorm):
        def forward(self, x):
            wide = x.float()
            root = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)
            return self.weight * (wide * root * (1 + 2**-21)).to(x.dtype)  # four steps of float32 away

    told = []
    model = nn.ModuleList([OtherSumRMSNorm(5376).half().requires_grad_(False)])
    short = short_of(model, told)
    with short.step():
        model[0](torch.randn(3, 5376, generator=torch.Generator().manual_seed(1)).half())
    assert told == [] and list(short.proved.values()) == ["after"]


def test_whole_numbers_count_the_values_of_a_type_across_zero():
    x = torch.tensor([-1.0, -(2.0**-126), -0.0, 0.0, 1.0], dtype=torch.bfloat16)
    up = torch.tensor([-0.99609375, 0.0, 0.0, 0.0, 1.0078125], dtype=torch.bfloat16)
    steps = fewer_ops._ordered(up) - fewer_ops._ordered(x)
    assert steps.tolist() == [1, 128, 0, 0, 1]


def test_a_norm_of_an_adapter_is_computed_with_the_adapters_weight(tmp_path):
    class Normed(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm = Gemma3RMSNorm(WIDTH)

    model, store = Normed(), AdapterStore()
    own = model.norm
    held = lora.SavedModule(own, store, "text")
    model.norm = held
    held.__dict__["adapters"]["one"] = {"weight": torch.full((WIDTH,), 0.5)}
    store.attached("one", Holders(None, []))
    x = torch.randn(2, 1, WIDTH)
    short = short_of(model, store=store)
    for rows in ([None, None], ["one", "one"], ["one", None], [None, None]):
        store.set_rows(rows)
        expected = model.norm(x)
        with short.step():
            found = model.norm(x)
            assert "forward" in vars(own)
        assert fewer_ops.why_other(found, expected) is None
    assert not torch.equal(x, found)


# Nothing is left behind


@pytest.mark.parametrize("fails", [False, True])
def test_everything_is_as_it_was_after_a_step(fails):
    class Placed(LlamaRMSNorm):
        pass

    Placed.__name__ = "PlacedRMSNorm"
    model, store = nn.ModuleList([LlamaRMSNorm(WIDTH), Placed(WIDTH)]), AdapterStore()

    def elsewhere(x):
        return x

    model[1].forward = elsewhere  # as a tier that computes on the host does
    before = [dict(vars(module)) for module in model]
    short = short_of(model, store=store)
    for _ in range(2):
        try:
            with short.step():
                assert store.applier is short.adapters and "forward" in vars(model[0])
                model[0](torch.randn(1, WIDTH))
                short.adapters.wide(torch.randn(1, WIDTH).bfloat16())
                with short.step():
                    pass
                assert store.applier is short.adapters and "forward" in vars(model[0])
                if fails:
                    raise KeyboardInterrupt
        except KeyboardInterrupt:
            assert fails
        assert [dict(vars(module)) for module in model] == before and model[1].forward is elsewhere and store.applier is EAGER
        assert short.adapters._source is None and short.adapters._wide is None
    assert "forward" not in vars(LlamaRMSNorm)["forward"].__dict__ and LlamaRMSNorm.forward is not elsewhere


def test_a_torch_without_a_kernel_for_norms_is_named_and_adapters_are_short_all_the_same(monkeypatch):
    monkeypatch.setattr(fewer_ops, "why_not", lambda device: "no kernel")
    model, store, told = nn.ModuleList([LlamaRMSNorm(WIDTH)]), AdapterStore(), []
    short = short_of(model, told, store)
    with short.step():
        assert "forward" not in vars(model[0]) and store.applier is short.adapters
    assert told == [("norm as one operation", "all of them: no kernel")]


# Adapters


def four_adapters(tmp_path, kind, dtype):
    toy = Toy(kind, dtype)
    model, store = ours(toy, dtype)
    options = {"a": {"lora_alpha": 3}, "b": {"lora_alpha": 20}, "rank": {"r": 2}, "dora": {"use_dora": True}, "mix": {}}
    for seed, (name, more) in enumerate(options.items()):
        put_on(model, store, toy, make_adapter(tmp_path / name, toy, seed=seed, **more), name)
    own = model.up.adapters
    own["mix"] = mixes._rest("up", [(1.0, own["a"]), (0.5, own["dora"])])
    return model, store


def base_of(leaf):
    return leaf.__dict__["layer"]


ROWS = [
    ["a"] * 4, ["b", None, "b", "b"], ["a", "b", "a", "b"], ["a", "rank", None, "b"], ["a", "dora", None, "b"],
    ["rank", "a", "rank", "a"], ["mix", "a", "a", "b"], [None] * 4, [None, None, None, "rank"],
]  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", ["none", "nf4", "int8"])
def test_rows_have_their_adapters_up_to_one_rounding(kind, dtype, tmp_path):
    model, store = four_adapters(tmp_path, kind, dtype)
    short = ShortAdapters()
    x = torch.randn(4, 1, 64, generator=torch.Generator().manual_seed(5)).to(dtype)
    for rows in ROWS:
        store.set_rows(rows)
        with torch.no_grad():
            before = base_of(model.up)(x)
            expected = model.up(x)
            store.applier = short
            found = model.up(x)
            store.applier = EAGER
        # float32: a sum of 64 values in another order. bfloat16: what PEFT rounds once more, and the sum's own rounding.
        step = 2**-18 if dtype == torch.float32 else 2**-7
        assert torch.allclose(found, expected, rtol=step, atol=step * float(expected.abs().max())), rows
        for i, name in enumerate(rows):
            assert torch.equal(found[i], before[i]) == (name is None)


@pytest.mark.parametrize("kind", ["none", "nf4"])
def test_a_change_that_is_rounded_once_is_nearer_to_the_exact_one_than_pefts(kind, tmp_path):
    model, store = four_adapters(tmp_path, kind, torch.bfloat16)
    store.set("a")
    x = torch.randn(64, 1, 64, generator=torch.Generator().manual_seed(6)).bfloat16()
    adapter = model.up.adapters["a"]
    with torch.no_grad():
        exact = base_of(model.up)(x).double() + adapter.scale * (x.double() @ adapter.A.double().T @ adapter.B.double().T)
        errors = []
        for store.applier in (EAGER, ShortAdapters()):
            errors.append(float((model.up(x).double() - exact).pow(2).mean()))
    assert errors[1] <= errors[0] * (1.0001 if kind == "none" else 1.0)


def test_an_adapter_that_is_not_a_number_stays_in_its_rows(tmp_path):
    model, store = four_adapters(tmp_path, "none", torch.float32)
    model.up.adapters["a"].B.fill_(float("nan"))
    store.set_rows(["b", "a", None, "b"])
    store.applier = ShortAdapters()
    with torch.no_grad():
        found = model.up(torch.randn(4, 1, 64))
    assert found.isnan().any(dim=-1).flatten().tolist() == [False, True, False, False]


def test_one_adapter_is_four_operations_and_three_where_the_input_was_read_before(tmp_path):
    model, store = four_adapters(tmp_path, "nf4", torch.bfloat16)
    store.set("a")
    x = torch.randn(1, 1, 64).bfloat16()
    with torch.no_grad():
        y = base_of(model.up)(x)
        plain = operations(lambda: model.up.adapted(x, y.clone()))
        del plain["aten.clone.default"]
        store.applier = ShortAdapters()
        first, second = (operations(lambda: model.up.adapted(x, y)) for _ in range(2))
        x.add_(1.0)
        third = operations(lambda: model.up.adapted(x, y))
        other = operations(lambda: model.up.adapted(x.clone(), y))
    assert sum(plain.values()) == 6
    assert sum(first.values()) == sum(third.values()) == 4 and sum(second.values()) == 3
    assert sum(other.values()) == 5  # the clone itself is one


def test_an_input_without_a_version_is_not_kept():
    short = ShortAdapters()
    with torch.inference_mode():
        x = torch.ones(2).bfloat16()
        assert short.wide(x).tolist() == [1.0, 1.0]
        x.add_(1.0)
        assert short.wide(x).tolist() == [2.0, 2.0]


def test_rows_next_to_each_other_are_few_products(tmp_path, monkeypatch):
    model, store = four_adapters(tmp_path, "nf4", torch.bfloat16)

    def runs(rows):
        return list(fewer_ops._runs([None if name is None else model.up.adapters[name] for name in rows]))

    assert runs([None, "a", "a", None, "b"]) == [(1, 3), (4, 5)]
    assert runs(["a", "b", "a", "rank", "a"]) == [(0, 3), (3, 4), (4, 5)] and runs([None, None]) == []
    monkeypatch.setattr(fewer_ops, "STACK_BYTES", 0)
    assert runs(["a", "a", "b", "b"]) == [(0, 2), (2, 4)]
    # Many single rows of few adapters: gathering each adapter's rows is shorter.
    for pairs in (3, 8):
        store.set_rows(["a", "b"] * pairs)
        assert ShortAdapters().can(model.up, torch.zeros(2 * pairs, 1, 64)) == (pairs == 3)


def test_rows_of_another_number_are_refused_as_ever(tmp_path):
    model, store = four_adapters(tmp_path, "nf4", torch.bfloat16)
    store.set_rows(["a", "b"])
    store.applier = ShortAdapters()
    with pytest.raises(trimtab.RequestError, match="3 inputs"), torch.no_grad():
        model.up(torch.zeros(3, 1, 64).bfloat16())


# Whole steps


@pytest.fixture
def allowed(monkeypatch):
    """Short steps without a GPU."""
    monkeypatch.setattr(decode_step.DecodeStep, "_may_be_short", lambda self: True)


@pytest.fixture(scope="module")
def model():
    with demo("resident") as loaded:
        yield loaded


def test_masks_added_to_scores_give_the_same_attention_bit_for_bit(model, monkeypatch):
    batch = joined(model, "eager", [ASKED[4], ASKED[4]])
    batch.logits()
    given = model.hf_model, batch.cache, 2, torch.bfloat16
    masks, added = step_masks(*given), step_masks(*given, are_added=True)
    attend = nn.functional.scaled_dot_product_attention
    for kind, mask in masks.items():
        q, k, v = (torch.randn(2, 4, n, 32).bfloat16() for n in (1, mask.shape[-1], mask.shape[-1]))
        assert mask.dtype == torch.bool and 0 < int(mask.sum()) < mask.numel() and added[kind].dtype == torch.bfloat16
        assert torch.equal(attend(q, k, v, attn_mask=mask), attend(q, k, v, attn_mask=added[kind]))
    monkeypatch.setattr(model.hf_model.config.get_text_config(), "_attn_implementation", "eager")
    for kind, mask in step_masks(*given).items():  # numbers anyway
        assert torch.equal(mask, step_masks(*given, are_added=True)[kind]) and bool(mask.isfinite().all())


# Of the demo's eight layers, for one row in bfloat16; before: 99 and 135 (an adapter on six linears of each layer). In a
# layer: 8 products, 7 norms, 5 for each rotation, the cache, attention, two gates of 2, 3 sums, the layer's scalar; with the
# adapter A, B and the sum of six linears and 4 inputs in float32. What a step does once is in it too, and two copies with
# which transformers 5.6.2 repeats keys and values.
@pytest.mark.parametrize("asked, most", [(ASKED[4], 42), (ASKED[3], 64)], ids=["base", "adapter"])
def test_operations_of_a_layer_stay_below(model, allowed, asked, most):
    layers = model.hf_model.config.get_text_config().num_hidden_layers
    counts = {}
    for decode in ("eager", "auto"):
        batch = joined(model, decode, [asked])
        batch.logits()
        found = operations(partial(batch.steps.run, batch.state()))
        counts[decode] = sum(found.values()) / layers
    assert counts["auto"] <= most < counts["eager"] / 2, found
    assert found["aten.pow.Tensor_Scalar"] == found["aten.mean.dim"] == 0
    assert batch.steps.fallbacks == []


def test_answers_of_mixed_rows_are_the_modules(model, allowed):
    assert answers(joined(model, "auto", ASKED)) == of_modules(model, ASKED)


def test_captured_short_steps_answer_as_the_modules_and_leave_nothing_behind(replayed, allowed, model):  # noqa: F811
    expected = answers(joined(model, "eager", ASKED))  # some modules keep something of their first pass
    before = {module: set(vars(module)) for module in model.hf_model.modules()}
    batch = joined(model, "graph", ASKED)
    assert answers(batch) == expected and batch.steps.captures == len(replayed) > 0
    assert {module: set(vars(module)) for module in model.hf_model.modules()} == before
    assert model.adapter_store.applier is EAGER and batch.steps.fallbacks == []


def test_a_step_that_fails_in_the_middle_leaves_nothing_behind(model, allowed, monkeypatch):
    batch = joined(model, "auto", [ASKED[3]])
    norms = [module for module in model.hf_model.modules() if type(module).__name__ == "Gemma4RMSNorm"]
    seen = []

    def fail(self, *args):
        seen.append(sum("forward" in vars(module) for module in norms))
        raise torch.OutOfMemoryError("out of memory")

    expected = joined(model, "eager", [ASKED[3]]).logits()
    with monkeypatch.context() as patch:
        patch.setattr(ShortAdapters, "apply", fail)
        with pytest.raises(torch.OutOfMemoryError):
            batch.steps.run(batch.state())
    assert seen == [len(norms)] and not any("forward" in vars(module) for module in norms)
    assert model.adapter_store.applier is EAGER
    # The same step again: what the failed one wrote is written over.
    assert batch.logits().argmax(-1).tolist() == expected.argmax(-1).tolist()


def test_modules_as_they_are_where_they_were_asked_for_and_on_a_cpu(model, allowed, monkeypatch):
    batch = joined(model, "eager", [ASKED[4]])
    expected = batch.logits()
    assert batch.steps._short_ops is None
    monkeypatch.undo()
    batch = joined(model, "auto", [ASKED[4]])
    assert torch.equal(batch.logits(), expected) and batch.steps._short_ops is None


@pytest.mark.parametrize(
    ("family", "dtype"),
    crossed(["gemma4", "gemma4_moe", "gemma3", "gemma3n", "qwen3_vl", "llama", "qwen3_moe"], ["float32", "bfloat16"], rest=1),
)
def test_scores_of_every_family_are_the_modules(family, dtype, allowed, tmp_path):
    """Random weights, 12 steps of the same tokens, past the sliding window."""
    plan = trimtab.plan(pico.build(family, tmp_path, dtype=dtype), quant="none", dtype=dtype, context=64, device="cpu")
    with trimtab.load(plan) as loaded:
        found, batch = {}, None
        for decode in ("eager", "auto"):
            batch = joined(loaded, decode, [(None, list(range(5, 12)), {}), (None, [9, 8, 7], {})], tokens=40)
            found[decode] = forced_scores(batch, 12)
        assert batch.steps._short_ops.proved and all(batch.steps._short_ops.proved.values())
        assert batch.steps.fallbacks == []
        # float32: sums in another order. bfloat16: single values one step away, through two layers.
        allowed_share = 1e-5 if dtype == "float32" else 2**-5
        assert (found["auto"] - found["eager"]).abs().max() <= allowed_share * found["eager"].abs().max()
