"""cuDNN's attention is off while a model with a small budget is open, and as the user set it before and after.

torch's setting can be read and written without a GPU; which models count as small is replaced, because a CPU has no GPU budget.
"""

from __future__ import annotations

import gc
from types import SimpleNamespace

import pytest
import torch

import trimtab
from tests import pico
from tests.anatomies import e_series
from tests.planning.values.test_execution import H200, card
from trimtab.engine.passes import attention as cudnn
from trimtab.planning import make_plan
from trimtab.planning.values.execution import SMALL_BUDGET_BYTES
from trimtab.request import LoadRequest

SMALL, LARGE = 64, 128  # contexts of models that stand for small and large budgets
GPU = torch.device("cuda:0")


def is_on() -> bool:
    return torch.backends.cuda.cudnn_sdp_enabled()


@pytest.fixture(params=[True, False], ids=["was on", "was off"])
def before(request):
    """The setting of the user."""
    original = is_on()
    torch.backends.cuda.enable_cudnn_sdp(request.param)
    yield request.param
    torch.backends.cuda.enable_cudnn_sdp(original)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setattr(cudnn, "is_left_out", lambda plan: plan.request.context_tokens == SMALL)
    monkeypatch.setattr(cudnn, "prefers_cudnn", lambda device: True)
    cudnn.of_this_process.cache_clear()
    yield pico.build("llama", tmp_path)
    cudnn.of_this_process.cache_clear()


def opened(folder, context):
    return trimtab.load(trimtab.plan(folder, context=context, device="cpu", quant="none"))


def notes(model):
    return [one.what for one in model.fallbacks]


def test_the_setting_returns_when_the_last_small_model_is_closed(folder, before):
    with opened(folder, LARGE) as large:
        assert is_on() == before and notes(large) == []
        first = opened(folder, SMALL)
        second = opened(folder, SMALL)
        assert not is_on()
        # Only what would be there without the small models is missing.
        assert notes(large) == (["cuDNN's attention"] if before else [])
        first.close()
        first.close()
        assert not is_on()
        second.close()
        assert is_on() == before and notes(large) == []


def test_a_large_model_that_is_loaded_beside_a_small_one_says_so(folder, before):
    with opened(folder, SMALL) as small:
        large = opened(folder, LARGE)
        assert notes(small) == [] and notes(large) == (["cuDNN's attention"] if before else [])
        if before:
            assert "another open model of this process has a GPU budget below 16 GiB" in large.fallbacks[0].why
    assert is_on() == before
    # Its graphs, captured before, go on without it.
    assert notes(large) == (["cuDNN's attention"] if before else [])
    large.close()
    with opened(folder, LARGE) as later:
        assert is_on() == before and notes(later) == []


def test_a_model_that_cannot_be_loaded_or_is_dropped_leaves_the_setting(folder, before, monkeypatch):
    made = trimtab.plan(folder, context=SMALL, device="cpu", quant="none")
    with monkeypatch.context() as broken:
        broken.setattr("trimtab.engine.model.fill", lambda *args, **options: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            trimtab.load(made)
    assert is_on() == before
    dropped = opened(folder, SMALL)
    assert not is_on()
    del dropped
    gc.collect()
    assert is_on() == before


def test_a_user_who_switches_it_on_meanwhile_keeps_it(folder, before):
    first = opened(folder, SMALL)
    torch.backends.cuda.enable_cudnn_sdp(True)
    with opened(folder, SMALL):
        assert not is_on()  # a small model that is loaded then is without it again
    first.close()
    assert is_on()


def test_small_budgets_of_a_gpu_are_without_it():
    for gib, is_small in ((8, True), (40, False)):
        request = LoadRequest(model="m", quant="nf4-dq", head="full", decode="eager", images=0, audio_s=0.0)
        made = make_plan(request, e_series("E2B"), adapters={}, machine=card(gib), rates=H200)
        assert cudnn.is_left_out(made) == is_small == (made.gpu_budget_bytes < SMALL_BUDGET_BYTES)
    assert not cudnn.is_left_out(SimpleNamespace(execution_device="cpu", gpu_budget_bytes=0))


@pytest.mark.parametrize("capability, prefers", [((8, 9), False), ((9, 0), True), ((10, 0), True), ((12, 0), False)])
def test_only_cards_that_prefer_it_are_told(capability, prefers, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    assert cudnn.prefers_cudnn(GPU) == prefers and not cudnn.prefers_cudnn(torch.device("cpu"))
