"""The piece of memory for what comes and goes: as much as the plan has left for torch, and no more than the device has."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tests.planning.values.test_execution import GIB, MIB, plan
from trimtab.engine.memory import reserve
from trimtab.engine.memory.reserve import LEFT_BYTES, take, torch_bytes
from trimtab.planning import Plan

CUDA = torch.device("cuda:0")


@pytest.fixture
def device(monkeypatch):
    """A device without one: what torch holds, what is free, and what was asked of it."""
    state = {"reserved": 0, "free": 8 * GIB, "taken": [], "fails": False}
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda _: state["reserved"])
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (state["free"], 8 * GIB))

    def empty(count, *, dtype, device):
        if state["fails"]:
            raise torch.OutOfMemoryError("no")
        state["taken"].append(count)

    monkeypatch.setattr(reserve.torch, "empty", empty)
    return state


def small() -> Plan:
    made = plan(4.5, batch=2)
    assert made.execution.prompt.mode == "eager"
    return made


def test_torch_gets_what_the_plan_counts_beside_the_driver():
    made = small()
    driver = sum(made.gpu[name] for name in ("kernels", "graphs", "cuda_context"))
    assert torch_bytes(made) == made.gpu_needed_bytes - driver
    assert torch_bytes(made) >= made.gpu_peak_bytes + made.gpu["allocator_reserve"] + made.gpu["fragments"]


def test_the_rest_of_the_plan_is_one_piece(device):
    made = small()
    device["reserved"] = torch_bytes(made) - 300 * MIB
    assert take(made, CUDA) == 300 * MIB - LEFT_BYTES and device["taken"] == [300 * MIB - LEFT_BYTES]


@pytest.mark.parametrize(
    ("state", "taken"), [({"free": 100 * MIB}, 100 * MIB - LEFT_BYTES), ({"free": 40 * MIB}, 0), ({"fails": True}, 0)]
)
def test_no_more_is_taken_than_there_is(device, state, taken):
    made = small()
    device["reserved"] = torch_bytes(made) - 300 * MIB
    device.update(state)
    assert take(made, CUDA) == taken


def test_nothing_is_taken_on_a_cpu_in_a_large_budget_or_beside_captured_prompts(device):
    made = small()
    captured = replace(made, execution=replace(made.execution, prompt=replace(made.execution.prompt, mode="graph")))
    assert take(made, torch.device("cpu")) == take(replace(made, gpu_budget_bytes=16 * GIB), CUDA) == take(captured, CUDA) == 0
    assert not device["taken"]
