"""Do the kernels of routers choose what transformers' routers choose, with their weights?"""

from types import SimpleNamespace

import pytest
import torch

from tests.cuda_on_cpu.modules import small
from trimtab.engine.families.decoder import ROUTES, Experts
from trimtab.engine.families.mixture import routed
from trimtab.engine.kernels import attention_and_norms, routers
from trimtab.engine.kernels.routers import Choice
from trimtab.engine.kernels.selfcheck import relative_error

BF16, HALF = torch.bfloat16, torch.float16


def kernels(source=None):
    return small(source=source)


@pytest.fixture(scope="module")
def module():
    return kernels()


def router(name, count, width, chosen, dtype):
    """A router of transformers' own class with random weights."""
    import importlib

    folder = {
        "Gemma4TextRouter": "gemma4", "Qwen2MoeTopKRouter": "qwen2_moe", "Qwen3MoeTopKRouter": "qwen3_moe",
        "Qwen3VLMoeTextTopKRouter": "qwen3_vl_moe", "Qwen3_5MoeTopKRouter": "qwen3_5_moe", "MixtralTopKRouter": "mixtral",
    }[name]  # fmt: skip
    config = SimpleNamespace(
        hidden_size=width, num_experts=count, num_local_experts=count, num_experts_per_tok=chosen, top_k_experts=chosen,
        norm_topk_prob=name != "Qwen2MoeTopKRouter", rms_norm_eps=1e-6,
    )  # fmt: skip
    made = getattr(importlib.import_module(f"transformers.models.{folder}.modeling_{folder}"), name)(config)
    for parameter in made.requires_grad_(False).parameters():
        parameter.copy_(torch.randn(parameter.shape) if parameter.dim() == 1 else torch.randn(parameter.shape) / width**0.5)
    return made.to(dtype)


@pytest.mark.parametrize("dtype", [BF16, HALF])
@pytest.mark.parametrize("name", sorted(ROUTES))
@pytest.mark.parametrize("count, width, chosen", [(128, 320, 8), (5, 64, 2), (512, 2048, 10)])
def test_a_described_router_is_transformers_own(module, name, dtype, count, width, chosen):
    torch.manual_seed(count)
    experts = Experts(SimpleNamespace(gate=router(name, count, width, chosen, dtype)), "gate", SimpleNamespace(num_experts=count))
    x = torch.randn(6, width).to(dtype)
    before, is_gemma = len(module.launches), name == "Gemma4TextRouter"
    wanted, made = experts.chosen(x), SimpleNamespace(small=module, experts=None)
    numbers, weights, _ = routed(experts, x, "silu", lambda leaves, given: leaves[0](given), made, None)
    assert len(module.launches) - before == 1 + is_gemma
    assert weights.dtype == wanted[1].dtype and numbers.dtype == wanted[0].dtype
    found, expected = (torch.zeros(6, count).scatter(1, index, own.float()) for index, own in ((numbers, weights), wanted))
    # Scores that are equal in this type are taken in any order by torch; a sum in another order makes others equal.
    differ = (found != 0) != (expected != 0)
    assert differ.sum() <= 6 if count > 5 else not differ.any()
    assert relative_error(found[~differ], expected[~differ]) < (8e-3 if dtype == BF16 else 1e-3)


def test_equal_chances_are_taken_by_their_numbers_and_a_row_without_a_number_chooses_none(module):
    logits = torch.zeros(3, 70, dtype=BF16)
    logits[1, 69], logits[1, 40] = 2.0, 2.0
    logits[2, 3] = torch.nan
    index, weights = routers.choose(logits, Choice(3, is_wide=True), None, module)
    assert index.tolist()[:2] == [[0, 1, 2], [40, 69, 0]] and (index[2] == -1).all()
    assert torch.allclose(weights[0], torch.full((3,), 1 / 3))


def test_the_check_at_load_passes_and_finds_faults(module):
    for count, width in ((128, 2816), (512, 64), (8, 320)):
        assert routers.check(module, count, width, Choice(8), BF16) is None
    for right, wrong, what in (
        ("weight = weight / total", "weight = weight", "weights of experts"), ("best / sum", "best", "weights of experts"),
        ("* own[i], half) * factor", "* own[i], half)", "router's input"),
        ("if (v[i] > best) best", "if (v[i] >= 0.f) best", "of experts"),
    ):  # fmt: skip
        assert right in attention_and_norms.source(), right
        broken = kernels(attention_and_norms.source().replace(right, wrong))
        found = routers.check(broken, 128, 320, Choice(8, is_normed="total" in right), BF16)
        assert found is not None and (what in found or "others are the most likely" in found), right


def test_routers_without_kernels_say_why():
    assert routers.why_not(128, 2048, Choice(8)) is None
    for count, width, chosen in ((513, 2048, 8), (128, 8200, 8), (128, 2047, 8), (4, 64, 5), (128, 64, 33)):
        assert f"{chosen} of {count} experts" in str(routers.why_not(count, width, Choice(chosen)))
