"""The machine with a GPU: memory and rates as a plan needs them."""

import pytest
import torch

import trimtab
from tests import pico
from trimtab.engine.memory import rates as devices


def test_the_machine_has_its_gpu():
    machine = devices.read_machine("auto")
    assert (machine.execution_device, machine.has_pinned) == ("cuda:0", True)
    assert 0 < machine.gpu_free_bytes <= machine.gpu_total_bytes


def test_cached_memory_of_torch_counts_as_free():
    before = devices.read_machine("cuda").gpu_free_bytes
    held = torch.empty(256 * 2**20, dtype=torch.uint8, device="cuda")
    assert devices.read_machine("cuda").gpu_free_bytes <= before - 250 * 2**20
    del held  # torch keeps it in its cache
    # Other users of the card may take some; 64 MiB is a quarter of what was held.
    assert devices.read_machine("cuda").gpu_free_bytes >= before - 64 * 2**20


def test_every_rate_of_a_gpu_is_measured_and_makes_sense():
    rates = devices.measure_rates("cuda:0", cache=False)
    # Device memory is faster than any link to it; page-locked memory is not slower than pageable (10 % for noise).
    assert rates.device_Bps > rates.pinned_h2d_Bps > 1e9
    assert rates.pinned_h2d_Bps > 0.9 * rates.pageable_h2d_Bps
    assert rates.device_flops > rates.host_flops
    assert 1e-7 < rates.launch_s < 1e-3
    assert 1e-6 < rates.transfer_s < 1e-2


def test_measuring_leaves_no_memory_behind():
    devices.measure_rates("cuda:0", cache=False)
    held = torch.cuda.memory_allocated()
    devices.measure_rates("cuda:0", cache=False)
    assert torch.cuda.memory_allocated() == held


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("family", ["gemma4", "qwen3_5", "qwen3_moe"])
def test_a_second_gpu_answers_as_the_first(family, tmp_path):
    """Captured steps and prompts, waiting for each other: long enough that a token read too early would be seen."""
    base = pico.build(family, tmp_path / "base")
    adapters = {name: pico.adapter(base, tmp_path / name, rank=rank, seed=rank) for name, rank in (("a", 4), ("b", 20))}
    requests = [{"prompt": list(range(5, 5 + n)), "adapter": name} for n, name in ((9, "a"), (80, "b"), (70, None), (3, "b"))]
    answers = []
    for device in ("cuda:0", "cuda:1"):
        plan = trimtab.plan(base, adapters=adapters, quant="nf4", context=192, device=device, batch=3)
        with trimtab.load(plan, decode="auto") as model:
            answers += [[one.token_ids for one in model.batch(requests, max_new_tokens=96)] for _ in range(3)]
    assert answers == answers[:1] * len(answers)
