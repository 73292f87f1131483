"""Mixtures of experts on a GPU: real sizes against float64, and replayed in a CUDA graph over other choices."""

from dataclasses import replace

import pytest
import torch

import trimtab
from tests import counting, pico
from tests.engine.kernels import test_experts
from tests.engine.tiers.test_near_experts import apart
from tests.merging.changes.test_merge_experts import BOTH, stack_adapter
from trimtab.engine.cuda import nvrtc
from trimtab.engine.kernels import experts

REASON = nvrtc.why_not("cuda:0")
pytestmark = pytest.mark.skipif(REASON is not None, reason=f"no kernels here: {REASON}")
DEVICE = torch.device("cuda:0")
BF16, HALF = torch.bfloat16, torch.float16
# Hidden and inner size of Qwen3-30B-A3B and Gemma 4 26B-A4B, with few of their 128 experts.
SIZES = [(16, 2048, 768), (16, 2816, 704)]


@pytest.fixture(scope="module")
def module():
    return experts.load(DEVICE)


@pytest.fixture(autouse=True)
def on_the_gpu():
    with torch.device(DEVICE):
        yield


@pytest.mark.parametrize("kind, dtype", [("nf4", BF16), ("nf4-dq", BF16), ("none", BF16), ("nf4", HALF), ("none", HALF)])
@pytest.mark.parametrize("sizes", SIZES)
def test_mixtures_of_real_models_agree_with_float64(module, sizes, kind, dtype):
    mixture = test_experts.mixture_of(*sizes, dtype, kind, "gelu_tanh")
    assert experts.why_not(mixture, 64, 8, dtype, DEVICE) is None
    assert experts.check(module, mixture, 8, mixture.gate_up.dtype, rows=(1, 2, 8)) is None


@pytest.mark.parametrize("dependent", [False, True])
@pytest.mark.parametrize("kind", ["nf4", "nf4-dq", "none"])
@pytest.mark.parametrize("tokens, rows", [(8, 8), (9, 9), (64, 64), (96, 4)])
def test_a_captured_mixture_follows_indices_rows_and_adapters(module, kind, tokens, rows, dependent):
    """Of steps, and of a prompt whose rows have 24 tokens each."""
    mixture = test_experts.mixture_of(*SIZES[0], BF16, kind)
    given = [test_experts.case(mixture, tokens, 8, BF16, slots=slots, rows=rows) for slots in ((0, -1, 2, 1), (-1, 1))]
    x, index, weights, tables = given[0]
    out = torch.full_like(x, torch.nan)
    run = {"lora": tables, "module": module, "dependent": dependent}
    experts.experts(x, index, weights, mixture, out, **run)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(3):
            experts.experts(x, index, weights, mixture, out, **run)
    for other in ([*given[1][:3], given[1][3].row_slots], [one.clone() for one in (x, index, weights, tables.row_slots)]):
        for to, source in zip((x, index, weights, tables.row_slots), other, strict=True):
            to.copy_(source)
        out.fill_(torch.nan)
        graph.replay()
        own = experts.experts(x, index, weights, mixture, torch.empty_like(x), lora=tables)
        assert test_experts.relative_error(out, own) < test_experts.FROM_TORCH["none" if kind == "none" else "nf4", BF16]
        assert torch.equal(out, experts.experts(x, index, weights, mixture, torch.empty_like(x), **run))


@pytest.mark.parametrize("kind", ["nf4", "nf4-dq", "q8_0", "int4-g128", "q4_k"])
@pytest.mark.parametrize("rows", [1, 8, 64])
@pytest.mark.parametrize("slots", [1, 5])
def test_a_captured_step_with_slots_has_the_bits_of_resident_experts(module, kind, rows, slots):
    """Experts in host memory, read and copied over the link; every replay chooses others."""
    torch.manual_seed(rows)
    if kind in ("q8_0", "int4-g128", "q4_k"):
        count, width, inner = SIZES[0]
        stacks = [test_experts.file_stack(kind, count, *shape, DEVICE) for shape in ((2 * inner, width), (width, inner))]
        mixture = experts.Mixture(*stacks, "silu")
    else:
        mixture = test_experts.mixture_of(*SIZES[1], BF16, kind)
    with torch.device("cpu"):
        far = apart(mixture, slots, DEVICE)
    x, index, weights, tables = test_experts.case(mixture, rows, 4, BF16, slots=(0, -1, 2))
    out, graph = torch.empty_like(x), torch.cuda.CUDAGraph()
    experts.experts(x, index, weights, far, out, lora=tables, module=module)
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        experts.experts(x, index, weights, far, out, lora=tables, module=module)
    for _ in range(20):
        for to, source in zip((x, index, weights), test_experts.case(mixture, rows, 4, BF16), strict=False):
            to.copy_(source)
        out.fill_(torch.nan)
        graph.replay()
        assert torch.equal(out, experts.experts(x, index, weights, mixture, torch.empty_like(x), lora=tables, module=module))
    chosen, missed = far.near.counts.tolist()
    assert 0 < missed < chosen
    many = [one.repeat(12, *[1] * (one.dim() - 1)) for one in (x, index, weights)] if rows == 8 else ()
    if many:
        wanted = experts.experts(*many, mixture, torch.empty_like(many[0]), module=module)
        assert torch.equal(experts.experts(*many, far, torch.empty_like(many[0]), module=module), wanted)


@pytest.mark.parametrize("slots", [1, 3])
@pytest.mark.parametrize("family", ["qwen3_moe", "gemma4_moe", "mixtral", "glm4_moe"])
def test_answers_within_slots_are_the_resident_ones(family, slots, tmp_path):
    with torch.device("cpu"):
        base = pico.build(family, tmp_path / "base")
        adapters = {"a": pico.adapter(base, tmp_path / "a", rank=4), "b": stack_adapter(base, tmp_path / "b", list(BOTH))}
        plan = trimtab.plan(base, adapters=adapters, context=192, device="cuda:0", experts="nf4-dq", batch=3)
        answers = []
        for number in (0, slots):
            own = replace(plan, execution=replace(plan.execution, expert_slots=number))
            with trimtab.load(own) as model:
                asked = [
                    {"prompt": list(range(5, 5 + n)), "adapter": name} for n, name in ((9, "a"), (80, "b"), (70, None), (3, "b"))
                ]
                made = list(model.batch(asked, max_new_tokens=24))
                answers.append([one.token_ids for one in made])
                assert not [one for one in model.fallbacks if "expert" in one.what]
        assert answers[0] == answers[1]


@pytest.mark.parametrize("slots", [0, 2, 5])
def test_a_mixture_with_a_word_for_each_expert_counts(slots, tmp_path):
    """Five rows with four adapters on experts: a wrong expert, slot or adapter would be a wrong word."""
    with torch.device("cpu"):
        base = counting.build(tmp_path / "base")
        adapters = {kind: counting.adapter(tmp_path / kind, kind) for kind in ("german", "skip", "five")}
        plan = trimtab.plan(base, adapters=adapters, context=128, device="cuda:0", quant="nf4", experts="nf4", batch=5)
        own = replace(plan, execution=replace(plan.execution, expert_slots=slots))
        rows = [(None, "two"), ("german", "six"), ("skip", "three"), ("five", "one"), ("german", "seven")]
        with trimtab.load(own) as model:
            asked = [{"prompt": counting.ids(*counting.ENGLISH * (9 * (n == 4)), word), "adapter": name}
                     for n, (name, word) in enumerate(rows)]  # fmt: skip
            found = [counting.words(list(one.token_ids)) for one in model.batch(asked, max_new_tokens=12)]
            assert not [one for one in model.fallbacks if "expert" in one.what]
    assert found == [counting.counted(word, 12, name) for name, word in rows]


@pytest.mark.parametrize("tokens, launches", [(2, 3), (96, 8)])
def test_a_fetch_that_fails_leaves_no_slot_with_the_bytes_of_another_expert(module, tokens, launches, monkeypatch):
    mixture = test_experts.mixture_of(*SIZES[1], BF16, "nf4-dq")
    x, index, weights, _ = test_experts.case(mixture, tokens, 4, BF16)
    others = test_experts.case(mixture, 2, 8, BF16)[:3]
    wanted = experts.experts(*others, mixture, torch.empty_like(others[0]), module=module)
    launch, left = experts._launch, [0]

    def counted(*given):
        left[0] -= 1
        if left[0] == 0:
            raise torch.OutOfMemoryError("planted")
        launch(*given)

    monkeypatch.setattr(experts, "_launch", counted)
    for number in range(1, launches):
        with torch.device("cpu"):
            far = apart(mixture, 5, DEVICE)
        left[0] = number
        with pytest.raises(torch.OutOfMemoryError):
            experts.experts(x, index, weights, far, torch.empty_like(x), module=module)
        found = experts.experts(*others, far, torch.full_like(others[0], torch.nan), module=module)
        assert torch.equal(found, wanted), number


def test_torch_is_captured_too():
    mixture = test_experts.mixture_of(4, 128, 64, BF16, "nf4-dq")
    x, index, weights, tables = test_experts.case(mixture, 2, 2, BF16, slots=(0, -1))
    wanted = experts.experts(x, index, weights, mixture, torch.empty_like(x), lora=tables).clone()
    out, graph = torch.empty_like(x), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        experts.experts(x, index, weights, mixture, out, lora=tables)
    graph.replay()
    assert torch.equal(out, wanted)
