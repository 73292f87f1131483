"""The kernels at the two ends of a decode step on a GPU, over the sizes of real models: checked, in graphs, overlapping."""

import math

import pytest
import torch

from trimtab.engine.cuda import nvrtc
from trimtab.engine.kernels import embed_and_logits

REASON = nvrtc.why_not("cuda:0")
pytestmark = pytest.mark.skipif(REASON is not None, reason=f"no kernels here: {REASON}")
DEVICE = torch.device("cuda:0")
# E2B, E4B, 12B; a vocabulary that is no multiple of anything.
SIZES = [
    embed_and_logits.Sizes(262144, 1536, 30.0, 35, 256), embed_and_logits.Sizes(262144, 2560, 30.0, 42, 256),
    embed_and_logits.Sizes(262144, 3840, 30.0),
    embed_and_logits.Sizes(50257, 768), embed_and_logits.Sizes(333, 8192, 7.3, 3, 8),
]  # fmt: skip


@pytest.fixture(scope="module")
def module():
    return embed_and_logits.load(DEVICE)


@pytest.fixture(params=[False, True], ids=["plain", "overlap"])
def overlap(request, module, monkeypatch):
    if request.param and module.capability < (9, 0):
        pytest.skip("dependent launch begins with 9.0")
    monkeypatch.setattr(module, "overlap", request.param)
    return request.param


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("sizes", SIZES)
def test_the_ends_over_real_sizes_pass_the_check_at_load(module, overlap, sizes, dtype):
    assert embed_and_logits.check(module, sizes, dtype=dtype, rows=(1, 2, 3, 8)) is None


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("softcap", [None, 30.0, 7.3])
def test_every_number_gets_torchs_own_score(module, softcap, dtype):
    """Also a quotient by a number whose inverse is not exact, and every tanh."""
    logits = torch.arange(-(2**15), 2**15, dtype=torch.int32, device=DEVICE).to(torch.int16).view(dtype)
    logits = logits[logits.isfinite()][None, :63488]
    found, wanted = (embed_and_logits.argmax_logits(logits, softcap, None, one) for one in (module, None))
    # Another compiler's tanh may be a float32 step away, and that rounds to the other side once in thousands.
    assert int((found[0] != wanted[0]).sum()) <= 64 and (softcap is not None or torch.equal(found[0], wanted[0]))
    assert (found[0] - wanted[0]).abs().max() <= torch.finfo(dtype).eps * wanted[0].abs().max()


def test_captured_steps_go_on_from_token_to_token(module, overlap):
    """Each replay reads the tokens that the one before wrote; an answer of plain torch is followed to its end."""
    n, width, vocabulary = 3, 512, 4096
    generator = torch.Generator(device=DEVICE).manual_seed(4)
    table = torch.randn(vocabulary, width, device=DEVICE, generator=generator).bfloat16()
    head = (torch.randn(vocabulary, width, device=DEVICE, generator=generator) * 0.05).bfloat16()
    tokens = torch.zeros(n, 1, dtype=torch.int64, device=DEVICE)
    h, x = (torch.empty(n, width, dtype=torch.bfloat16, device=DEVICE) for _ in range(2))
    mixed = torch.empty(n, 2, 256, dtype=torch.bfloat16, device=DEVICE)

    def step(one):
        for tensor in (h, x, mixed):
            tensor.fill_(math.nan)
        embed_and_logits.rows(tokens[:, 0], [embed_and_logits.Lookup(table, 22.6, h)], one)
        embed_and_logits.per_layer(h, h.view(n, 2, 256), None, 1e-6, 0.04, 0.7, mixed, one)
        return embed_and_logits.argmax_logits(mixed.view(n, width) @ head.T, 30.0, tokens[:, 0], one)

    def start():
        tokens.copy_(torch.tensor([[5], [77], [4095]]))

    start()
    step(module)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outputs = step(module)
    start()
    answers = []
    for _ in range(50):
        before = tokens.clone()
        graph.replay()
        scores, greedy = outputs[0].clone(), tokens[:, 0].clone()
        assert torch.equal(embed_and_logits.with_argmax(scores)[1], greedy) and torch.equal(outputs[1], greedy)
        tokens.copy_(before)
        wanted = step(None)[0]
        assert (scores - wanted).abs().max() <= 2**-6 * wanted.abs().max()
        tokens[:, 0] = greedy
        answers.append(tuple(greedy.tolist()))
    assert len(set(answers)) > 5


@pytest.mark.parametrize("name", ["rows", "per_layer", "likeliest"])
def test_an_end_that_does_nothing_is_found(module, monkeypatch, name):
    launch = module.launch
    monkeypatch.setattr(module, "launch", lambda one, *a, **m: None if one.startswith(name) else launch(one, *a, **m))
    assert name.replace("likeliest", "argmax") in embed_and_logits.check(module, SIZES[1], rows=(1,))
