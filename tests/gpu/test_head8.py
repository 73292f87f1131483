"""An 8-bit head on a GPU: the kernel against float64 at the sizes of real models, in graphs, and in a model's own step."""

from __future__ import annotations

import gc
import math
from pathlib import Path

import pytest
import torch

import trimtab
from trimtab.engine.cuda import nvrtc
from trimtab.engine.formats import int8_head
from trimtab.engine.loader import head_kernel
from trimtab.planning.planner import ITEM

REASON = nvrtc.why_not("cuda:0")
needs_kernel = pytest.mark.skipif(REASON is not None, reason=f"no kernels here: {REASON}")
DEVICE = torch.device("cuda:0")
DEMO = Path(trimtab.__file__).parent / "demo"
# Vocabulary and width of E2B, E4B, 12B, 26B-A4B; then odd ones.
SIZES = [(262144, 1536), (262144, 2560), (262144, 3840), (262144, 2816), (32001, 4096), (17, 64), (300, 320)]


@pytest.fixture(scope="module")
def module():
    return int8_head.load(DEVICE)


def random_head(rows: int, width: int) -> int8_head.Head:
    generator = torch.Generator(device=DEVICE).manual_seed(rows)
    q = torch.randint(-127, 128, (rows, width), dtype=torch.int8, device=DEVICE, generator=generator)
    return int8_head.Head(q, torch.rand(rows, device=DEVICE, generator=generator) / 500, None)


@needs_kernel
@pytest.mark.parametrize("rows, width", SIZES)
def test_the_kernel_agrees_with_float64_at_real_sizes(module, rows, width):
    head = random_head(rows, width)
    assert head_kernel.why_not(head, torch.bfloat16, module) is None
    assert head_kernel.check(module, head, counts=range(1, 9)) is None


@needs_kernel
def test_a_captured_product_reads_what_is_there_when_it_is_replayed(module):
    head = random_head(4096, 2560)
    head.kernel.module = module
    x = torch.zeros(2, 2560, dtype=torch.bfloat16, device=DEVICE)
    for way in (head, lambda x: int8_head.plain(x, head.q, head.scale)):
        way(x)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = way(x)
        for seed in range(3):
            torch.manual_seed(seed)
            x.copy_(torch.randn(2, 2560))
            y.fill_(math.nan)
            graph.replay()
            torch.testing.assert_close(y, int8_head.plain(x, head.q, head.scale), rtol=2**-7, atol=1e-3)


@needs_kernel
def test_launches_that_overlap_give_the_same(module):
    head = random_head(8192, 1536)
    x = torch.randn(3, 1536, device=DEVICE).bfloat16()
    wanted = int8_head.launched(x, head.q, head.scale, None, module)
    module.overlap = True
    try:
        for _ in range(20):
            moved = x.clone()  # made by the kernel in front
            assert torch.equal(int8_head.launched(moved, head.q, head.scale, None, module), wanted)
    finally:
        module.overlap = False


def test_quantizing_gives_the_same_bytes_as_on_the_cpu():
    torch.manual_seed(2)
    weight = torch.randn(513, 640).bfloat16() * torch.rand(513, 1)
    for found, wanted in zip(int8_head.quantize_rows(weight.to(DEVICE)), int8_head.quantize_rows(weight), strict=True):
        assert torch.equal(found.cpu(), wanted)


@pytest.mark.parametrize("tier", ["resident", "stream", "disk", "host"])
def test_the_demo_model_answers_alike_in_every_tier(tier, tmp_path):
    options = {"context": 256, "images": 0, "audio_s": 0, "device": "cuda:0"}
    plan = trimtab.plan(DEMO / "base", head="int8", place={"head": tier}, offload_dir=tmp_path, **options)
    with trimtab.load(plan) as model, trimtab.load(trimtab.plan(DEMO / "base", **options)) as whole:
        for prompt in ("Who are you?", "What do you know?"):
            a, b = model.logits(prompt), whole.logits(prompt)
            kl = (b.log_softmax(-1).exp() * (b.log_softmax(-1) - a.log_softmax(-1))).sum(-1)
            assert 0 < kl.max() < 5e-3
            assert model.answer(prompt, max_new_tokens=12).text == whole.answer(prompt, max_new_tokens=12).text


def test_the_loaded_model_takes_what_the_plan_counts():
    options = {"context": 256, "images": 0, "audio_s": 0, "device": "cuda:0"}
    plan = trimtab.plan(DEMO / "base", head="int8", place={"table": "gather"}, **options)
    torch._C._cuda_clearCublasWorkspaces()  # not counted by a plan, and choosing the kernel multiplies in torch too
    gc.collect()  # the figure is what was added since the load began: what others left must not be freed in it
    with trimtab.load(plan) as model:
        torch._C._cuda_clearCublasWorkspaces()
        counted = plan.gpu["weights"] + plan.gpu["fixed"] + plan.gpu.get(ITEM, 0)
        assert 0.97 * counted <= model.memory()["gpu_bytes"] <= 1.03 * counted


@needs_kernel
@pytest.mark.parametrize("tier", ["resident", "stream"])
@pytest.mark.parametrize("decode", ["eager", "graph", "fused"])
def test_a_loaded_model_uses_the_kernel_in_every_way_to_decode(tier, decode, monkeypatch):
    options = {"context": 256, "images": 0, "audio_s": 0, "device": "cuda:0", "place": {"head": tier}}
    plan = trimtab.plan(DEMO / "base", head="int8", **options)
    with trimtab.load(plan, decode="eager") as model:
        wanted = model.answer("Who are you?", max_new_tokens=12).text
    captured, launch = [], int8_head.launched

    def launched(*args, **options):
        captured.append(torch.cuda.is_current_stream_capturing())
        return launch(*args, **options)

    with trimtab.load(plan, decode=decode) as model:
        # On so small a head torch may be as fast: then it is told by name, and here used all the same.
        if model.hf_model.get_output_embeddings().packed().kernel.module is None:
            assert int8_head.NAME in [one.what for one in model.fallbacks]
            monkeypatch.setattr(head_kernel, "measure", lambda *_: {int8_head.NAME: (1.0, 2.0)})
            assert head_kernel.choose(model.hf_model.lm_head) is None
        # Loading has captured steps and prompts already, with what the head used then; a replay launches nothing from here.
        model.forget_batch()
        monkeypatch.setattr(int8_head, "launched", launched)
        assert model.answer("Who are you?", max_new_tokens=12).text == wanted
        assert captured and any(captured) == (decode != "eager")
