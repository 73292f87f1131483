"""A GPU that has no memory left is a named error with the plan's figures, never a reason to run the slower way."""

import os
from dataclasses import replace

import pytest
import torch

import trimtab
from tests import pico
from tests.engine.decode.test_graphs import ASKED, BASE_ROWS, answers, demo, fill, joined, of_modules, replayed
from tests.engine.formats.test_head8 import on_the_head
from tests.raised import raised, raising
from tests.replays import standing_in
from trimtab.demo.demo import ADAPTERS
from trimtab.demo.demo import FOLDER as DEMO
from trimtab.engine.batch.batch import Batch
from trimtab.engine.cuda.check_cache import CardEntries
from trimtab.engine.formats import int8_head
from trimtab.engine.kernels.selfcheck import KernelFamily
from trimtab.engine.loader import head_kernel
from trimtab.engine.lora.store import AttachedAdapter, Holders
from trimtab.engine.memory import graph_cache
from trimtab.engine.memory.graph_cache import GraphCache
from trimtab.engine.memory.out_of_memory import is_out_of_memory, naming_out_of_memory, reason_of
from trimtab.errors import AdapterError, DeviceError, DoesNotFitError
from trimtab.planning.memory.adapters import copies_bytes, first_adapter_bytes
from trimtab.serve.adapters.adapter_cache import AdapterCache

__all__ = ["replayed"]
CPU_ONLY = pytest.mark.skipif(os.environ.get("TRIMTAB_TEST_DEVICE", "cpu") != "cpu", reason="stands for a GPU")
# As they come from torch's allocator, the CUDA runtime, cuBLAS and the driver.
LOST = [
    torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 146.00 MiB"),
    RuntimeError("CUDA error: out of memory\nCUDA kernel errors might be asynchronously reported"),
    RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
    DeviceError("loading matvec4.cu failed: out of memory (CUDA error 2)", device="cuda:0"),
]


@pytest.fixture(scope="module")
def model():
    with demo() as loaded:
        yield loaded


@pytest.mark.parametrize("exc", LOST, ids=lambda exc: type(exc).__name__)
def test_a_device_without_memory_is_told_from_other_failures(exc):
    assert is_out_of_memory(exc)
    for other in (RuntimeError("operation not permitted"), MemoryError("can't allocate memory"), ValueError("2")):
        assert not is_out_of_memory(other)


def test_the_error_says_what_was_counted_and_what_to_pass(model):
    with pytest.raises(DeviceError) as caught, naming_out_of_memory("answering", model.plan, model.device):
        raise LOST[0]
    error = caught.value
    assert (error.planned_bytes, error.free_bytes) == (model.plan.gpu_needed_bytes, 0)
    assert "out of memory while answering" in str(error) and "Tried to allocate" in str(error)
    assert "gpu_memory='" in error.hint
    # Named once: what was named within is not named again around it.
    with pytest.raises(DeviceError) as again, naming_out_of_memory("loading", model.plan, model.device):
        raise error
    assert again.value is error


def test_other_errors_stay_themselves(model):
    with pytest.raises(ValueError, match="^no$"), naming_out_of_memory("answering", model.plan, model.device):
        raise ValueError("no")


@CPU_ONLY
@pytest.mark.parametrize("exc", LOST, ids=lambda exc: type(exc).__name__)
@pytest.mark.parametrize("decode", ["auto", "graph"])
def test_a_capture_without_memory_is_an_error_and_no_fallback(model, replayed, monkeypatch, decode, exc):
    monkeypatch.setattr(GraphCache, "_recorded", raising(exc))
    batch = joined(model, decode, ASKED[:2])
    error = raised(DeviceError, batch.step, match="out of memory while capturing a decode step")
    assert error.planned_bytes == model.plan.gpu_needed_bytes
    assert batch.steps.fallbacks == [] and batch.steps.is_captured
    # What was not captured for want of memory is captured once there is some.
    monkeypatch.undo()
    standing_in(monkeypatch, "a decode step")
    assert len(batch.step()) == 2


@CPU_ONLY
@pytest.mark.parametrize("exc", LOST, ids=lambda exc: type(exc).__name__)
def test_a_prompt_whose_capture_finds_no_memory_is_an_error(model, monkeypatch, exc):
    from tests.engine.prefill.test_prefill import answered, captured

    batch = captured(model, (16,))
    monkeypatch.setattr(GraphCache, "_recorded", raising(exc))
    answered(batch, model.prepare(list(range(5, 17))))
    with pytest.raises(DeviceError, match="out of memory while capturing a prompt"):
        answered(batch, model.prepare(list(range(5, 17))))
    assert batch.prompts.captures and not [one for one in batch.steps.fallbacks if "capturing" in one.why]


@pytest.mark.parametrize("exc", LOST, ids=lambda exc: type(exc).__name__)
def test_kernels_are_not_left_out_for_want_of_memory(exc, monkeypatch):
    left_out = {}
    with pytest.raises(type(exc)):
        KernelFamily("products", (), raising(exc), lambda module: None).choose(CardEntries(), left_out, {})
    assert left_out == {}
    lost = raising(DeviceError("no", device="cuda:0"))
    assert KernelFamily("products", (), lost, lambda module: None).choose(CardEntries(), left_out, {}) is None
    assert left_out == {"products": "cuda:0: no"}
    monkeypatch.setattr(int8_head, "load", raising(exc))
    head = type("Leaf", (), {"bias": None, "dtype": torch.bfloat16, "packed": lambda self: type("P", (), {"parts": _parts()})()})()
    with pytest.raises(type(exc)):
        head_kernel.choose(head)


def _parts():
    return {"weight": torch.zeros(2, 2, dtype=torch.int8), "scale": torch.ones(2)}


@CPU_ONLY
def test_steps_beyond_the_plan_that_do_not_fit_name_the_batch(model, monkeypatch):
    monkeypatch.setattr(model, "plan", replace(model.plan, gpu_budget_bytes=model.plan.gpu_needed_bytes))
    error = raised(DoesNotFitError, graph_cache.check_room, model, 8, "fused")
    assert error.needed_bytes > error.budget_bytes == 0 and "batch=8" in error.hint


@CPU_ONLY
def test_so_many_graphs_are_kept_as_were_counted(model, replayed, monkeypatch):
    full = replace(model.plan, gpu_budget_bytes=model.plan.gpu_needed_bytes)
    monkeypatch.setattr(model, "plan", full)
    monkeypatch.setattr(graph_cache, "extra_bytes", lambda *args: 0)
    counted = graph_cache.most_graphs(model, 2)
    monkeypatch.setattr(model, "plan", replace(full, gpu_budget_bytes=full.gpu_needed_bytes + 2**34))
    assert counted < graph_cache.most_graphs(model, 2) == graph_cache.MOST_GRAPHS


# Adapters that come later ---------------------------------------------------------------------------------------------


def test_scratch_of_adapters_is_taken_off_what_a_plan_without_any_leaves(tmp_path):
    base = pico.build("gemma4", tmp_path / "base")
    options = {"context": 64, "device": "cpu", "images": 0, "audio_s": 0.0, "quant": "nf4-dq"}
    with trimtab.load(trimtab.plan(base, **options)) as plain:
        scratch = first_adapter_bytes(plain.plan, plain.anatomy)
        assert scratch > 0
        left = plain.plan.gpu_budget_bytes - plain.plan.gpu_needed_bytes
        assert plain.free_adapter_bytes() == left - scratch
    adapter = pico.adapter(base, tmp_path / "adapter")
    with trimtab.load(trimtab.plan(base, adapters={"a": adapter}, **options)) as planned:
        assert first_adapter_bytes(planned.plan, planned.anatomy) == 0


def test_an_adapter_whose_scratch_does_not_fit_is_refused_by_name(tmp_path, monkeypatch):
    base = pico.build("gemma4", tmp_path / "base")
    adapter = pico.adapter(base, tmp_path / "adapter")
    plan = trimtab.plan(base, context=64, device="cpu", images=0, audio_s=0.0)
    with trimtab.load(plan) as model:
        size = model.adapter_bytes(model.read_adapter(adapter))
        # Room for the adapter, none for what it takes beside itself.
        monkeypatch.setattr(model, "plan", replace(plan, gpu_budget_bytes=plan.gpu_needed_bytes + size + 1))
        error = raised(DoesNotFitError, model.load_adapter, "a", adapter)
        assert error.block == "adapter a" and "adapters=" in error.hint
        with pytest.raises(DoesNotFitError, match="adapter a"):
            AdapterCache(model).add("a", adapter)


def test_copies_for_captured_prompts_are_counted_for_each_size():
    assert (copies_bytes([]), copies_bytes([5, 5, 5]), copies_bytes([5, 7, 9, 9])) == (0, 5, 16)


def test_an_adapter_larger_than_the_planned_ones_counts_its_copy_too(model, monkeypatch):
    prompt = replace(model.plan.execution.prompt, bytes={"adapter_copy": 100})
    monkeypatch.setattr(model, "plan", replace(model.plan, execution=replace(model.plan.execution, prompt=prompt)))
    monkeypatch.setattr(model.adapter_store, "holders", {"a": Holders(None, [], about=AttachedAdapter(None, 100))})
    held = model.read_adapter(DEMO / "adapters" / next(iter(ADAPTERS)))
    own = held.device_bytes
    assert model.adapter_bytes(held) == 2 * own  # the copies of both, less what was counted for the first


# The head --------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return pico.build("gemma4", tmp_path_factory.mktemp("base") / "base")


def chosen(base, **options):
    """Return a plan on the CPU as one is on a card where the planner took the 8-bit head by itself."""
    plan = trimtab.plan(base, head="int8", context=64, device="cpu", images=0, audio_s=0.0, **options)
    return replace(plan, execution=replace(plan.execution, is_head_asked=False))


def test_an_adapter_on_the_head_that_comes_later_is_refused_where_the_plan_chose_8_bits(base, tmp_path):
    adapter = on_the_head(base, tmp_path / "head")
    with trimtab.load(chosen(base)) as model:
        error = raised(AdapterError, model.load_adapter, "late", adapter)
        assert "changes lm_head" in error.problems[0] and "head='full'" in str(error)
        with pytest.raises(AdapterError, match="head='full'"):
            AdapterCache(model).add("late", adapter)
        model.load_adapter("other", pico.adapter(base, tmp_path / "other", targets="text"))
    with trimtab.load(trimtab.plan(base, head="int8", context=64, device="cpu", images=0, audio_s=0.0)) as model:
        model.load_adapter("late", adapter)  # 8 bits asked for by name


def test_a_plan_looks_at_adapters_that_are_loaded_later(base, tmp_path, monkeypatch):
    from trimtab import api
    from trimtab.request import LoadRequest

    seen = []
    real = api.make_plan
    monkeypatch.setattr(api, "make_plan", lambda *a, **k: (seen.append(k), real(*a, **k))[1])
    plain, late = pico.adapter(base, tmp_path / "plain"), on_the_head(base, tmp_path / "late")
    request = LoadRequest(
        model=str(base), adapters={"plain": str(plain)}, head="auto", context_tokens=64, images=0, audio_s=0.0,
        card="8GiB",
    )  # fmt: skip
    api.plan_request(request)
    plan = api.plan_request(request, later={"late": str(late)})
    assert [k["head_refused"] for k in seen] == ["", "adapter late changes lm_head"]
    assert dict(plan.adapter_bytes).keys() == {"plain"} and plan.execution.head == "full"


def test_the_demo_batch_is_whole_after_all_of_this(model):
    assert answers(fill(Batch(model, rows=2), BASE_ROWS[:2])) == of_modules(model, BASE_ROWS[:2])


def test_why_a_check_failed_is_a_reason_unless_memory_ran_out():
    assert reason_of(DeviceError("too many registers", device="cpu"), "cpu") == "cpu: too many registers"
    assert reason_of(ValueError("no such form"), "cpu") == "ValueError: no such form"
    with pytest.raises(torch.OutOfMemoryError, match="CUDA out of memory"):
        reason_of(torch.OutOfMemoryError("CUDA out of memory"), "cpu")
