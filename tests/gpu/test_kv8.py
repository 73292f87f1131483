"""Keys and values in 8 bits on the GPU: the CPU's tests with the device changed, graphs beside eager steps in the types that
models have, and the bytes of a plan."""

import pytest
import torch

import trimtab
from tests.engine.batch.test_batch import through
from tests.engine.batch.test_company import asks
from tests.engine.kv.kv8_reference import rounded
from tests.engine.kv.test_kv8 import *
from tests.engine.kv.test_kv8 import CONTEXT, DEVICE
from trimtab.demo.demo import ADAPTERS
from trimtab.demo.demo import FOLDER as DEMO
from trimtab.engine.batch.batch import Batch
from trimtab.engine.kv.int8 import read_states, round_states
from trimtab.engine.kv.kv_cache import LayerCache
from trimtab.planning.values.byte_sizes import PAGE_TOKENS
from trimtab.request import GenerateRequest


@pytest.fixture
def replayed():
    """Nothing in the place of graphs: here they are captured."""


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_graph_rounds_with_the_same_bits(dtype):
    states = torch.randn(4, 2, 300, 256, device=DEVICE).to(dtype)
    found = torch.zeros_like(states)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(2):
            found.copy_(read_states(round_states(states), dtype))
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        found.copy_(read_states(round_states(states), dtype))
    states.copy_(torch.randn(4, 2, 300, 256, device=DEVICE).to(dtype) * 7)
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(found, rounded(states))


def answered(model, decode, rows):
    """Return the tokens of every row, all at once and a second time when everything is captured, and the batch."""
    batch = Batch(model, rows=rows, decode=decode)
    request, found = GenerateRequest(max_new_tokens=24), []
    for _ in range(2):
        going = [through(batch, model.prepare(text), request, adapter=name, client=None).row for name, text in asks(rows)]
        while any(row.finish is None for row in going):
            batch.step()
        found.append([list(row.answer_ids) for row in going])
        for row in going:
            batch.leave(row)
    return found, batch


@pytest.mark.parametrize("kv_tokens", [None, CONTEXT + 2 * PAGE_TOKENS], ids=["rows", "pages"])
@pytest.mark.parametrize(
    "decode, quant", [("eager", "nf4-dq"), ("eager", "none"), ("graph", "nf4-dq"), ("graph", "none"), ("fused", "nf4-dq")]
)
def test_the_demo_answers_in_8_bits_in_every_mode(decode, quant, kv_tokens):
    names = {name: DEMO / "adapters" / name for name in ADAPTERS}
    plan = trimtab.plan(
        DEMO / "base", adapters=names, quant=quant, context=CONTEXT, device=DEVICE, batch=4, images=0, audio_s=0.0,
        decode=decode, kv="int8", kv_tokens=kv_tokens,
    )  # fmt: skip
    assert plan.execution.step.mode == decode
    with trimtab.load(plan) as model:
        found, batch = answered(model, decode, 4)
        # An adapter with DoRA is looked up in no table, and unquantized weights have no 4-bit layer: that is no fallback of this.
        slower = {one.what: one.why for one in batch.steps.fallbacks}
        assert found[0] == found[1] and not slower.keys() & {"graph", "fused step", "captured prompts"}, slower
        layers = [one for one in batch.cache.layers if isinstance(one, LayerCache) and one.is_initialized]
        assert layers and all(one.keys.dtype == one.values.dtype == torch.int8 for one in layers)
        assert batch.steps.captures == 0 if decode == "eager" else batch.steps.captures > 0
        # Other kernels round sums in another order: tokens that no other comes near are the same, later ones follow them.
        eager, expected = answered(model, "eager", 4)
        compared = 0
        for (name, text), ours, wanted in zip(asks(4), found[0], eager[0], strict=True):
            certain = certain_tokens(expected, text, name)
            assert certain and ours[:certain] == wanted[:certain], name
            compared += certain
        assert compared >= 8


def certain_tokens(batch, text, name):
    """Return how many tokens of an answer come before the first that another one is nearly as likely as. The demo's largest scores
    are multiples of 1/8: a difference of 0.5 in log-probability is several roundings."""
    request = GenerateRequest(max_new_tokens=4)
    drawn = [through(batch, batch.model.prepare(text), request, adapter=name, client=None, top_logprobs=2)]
    row = drawn[0].row
    while row.finish is None:
        drawn += batch.step()
    batch.leave(row)
    return next((at for at, one in enumerate(drawn) if one.top[0][1] - one.top[1][1] < 0.5), len(drawn))


def test_a_plan_in_8_bits_holds_what_it_counts():
    given = {"quant": "nf4-dq", "context": 4096, "device": DEVICE, "batch": 4, "images": 0, "audio_s": 0.0}
    before = torch.cuda.memory_allocated()  # other tests keep models
    with trimtab.load(trimtab.plan(DEMO / "base", **given, kv="int8")) as model:
        torch.cuda.reset_peak_memory_stats()
        batch = Batch(model, rows=4)
        batch.prepare()
        row = through(batch, model.prepare("Hello"), GenerateRequest(max_new_tokens=8)).row
        while row.finish is None:
            batch.step()
        assert torch.cuda.max_memory_allocated() - before <= model.plan.gpu_peak_bytes
        batch.leave(row)
