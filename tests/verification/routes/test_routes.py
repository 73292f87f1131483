"""Routes: the same tokens for both, files handed over, noise that is really another order, errors that keep their kind."""

import json
import os
import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests import ROOT, pico, stock
from tests.raised import raised, refused
from trimtab.errors import DeviceError, DoesNotFitError, UpstreamError
from trimtab.process import phases
from trimtab.request import LoadRequest
from trimtab.verification.routes import compare, rounding, runner, teacher_forcing
from trimtab.verification.routes.prompts import Prompt, demo_prompts

DEVICE = os.environ.get("TRIMTAB_TEST_DEVICE", "cpu")
DEMO = ROOT / "trimtab" / "demo"
PROMPTS = (Prompt("one", token_ids=tuple(range(40, 52))), Prompt("two", token_ids=tuple(range(90, 97))))


def rows_of(folder, out, prompts=PROMPTS):
    return runner.prepare(folder, "bfloat16", prompts, out, isolated=False)


def items_of(rows, adapter=None):
    return [runner.Item(**row, adapter=adapter) for row in rows]


def own(folder, adapter=None, **options):
    options = {"quant": "none", "context_tokens": 512, "images": 1, "device": DEVICE} | options
    request = LoadRequest(model=str(folder), adapters={"a": str(adapter)} if adapter else {}, **options)
    return runner.Route(label="ours", request=request)


def theirs(folder, adapter=None, quant="none"):
    return runner.Route(
        label="stock", engine="stock", folder=str(folder), quant=quant, device=DEVICE,
        adapters={"a": str(adapter)} if adapter else {},
    )  # fmt: skip


def run(route, items, out, **options):
    return runner.run_route(route, items, out, **({"new_tokens": 5, "isolated": False} | options))


# What both are asked --------------------------------------------------------------------------------------------------


def test_a_continuation_is_appended_to_every_row_of_tokens():
    inputs = {
        "input_ids": torch.tensor([[5, 6, 7]]), "attention_mask": torch.ones(1, 3, dtype=torch.long),
        "mm_token_type_ids": torch.tensor([[0, 1, 1]]), "pixel_values": torch.ones(1, 3),
    }  # fmt: skip
    found = teacher_forcing.extended(inputs, [8, 9])
    assert found["input_ids"].tolist() == [[5, 6, 7, 8, 9]] and found["attention_mask"].tolist() == [[1] * 5]
    assert found["mm_token_type_ids"].tolist() == [[0, 1, 1, 0, 0]] and found["pixel_values"] is inputs["pixel_values"]
    assert teacher_forcing.extended(inputs, [])["input_ids"] is inputs["input_ids"]


def test_rows_of_several_lengths_are_filled_up_on_the_right():
    rows = [{"input_ids": torch.tensor([ids]), "attention_mask": torch.ones(1, len(ids))} for ids in ([1, 2, 3], [4])]
    found = teacher_forcing.padded_batch(rows)
    assert found["input_ids"].tolist() == [[1, 2, 3], [4, 0, 0]] and found["attention_mask"].tolist() == [[1, 1, 1], [1, 0, 0]]


def test_a_route_prepares_prompts_as_a_process_of_their_own_does(tmp_path, monkeypatch):
    folder, started = pico.build("llama", tmp_path / "base"), []
    run_module = runner.run_module
    monkeypatch.setattr(
        runner, "run_module", lambda module, *more, **options: started.append(module) or run_module(module, *more, **options)
    )
    rows = rows_of(folder, tmp_path)
    few = {"noise": "without batches", "noise_items": 1}
    apart = run(own(folder), items_of(rows), tmp_path / "apart", **few)
    started.clear()
    asking = runner.to_prepare(folder, "bfloat16", PROMPTS, tmp_path)
    unknown = [runner.Item(**{**row, "prompt_tokens": 0}, adapter=None) for row in rows]
    both = run(own(folder), unknown, tmp_path / "both", prepare=asking, **few)
    assert started == [runner.OWN] and both.rows == rows and both.noise == apart.noise
    assert [one.token_ids for one in both.said] == [one.token_ids for one in apart.said]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("wide", [torch.float32, torch.float64])
def test_steps_are_the_distances_of_a_dtypes_numbers(dtype, wide):
    values = torch.cat([torch.zeros(1), torch.randn(500) * torch.exp(6 * torch.randn(500))]).to(wide)
    eps = torch.full_like(values, torch.finfo(dtype).eps)
    assert torch.equal(teacher_forcing.steps_of(values, dtype), torch.ldexp(eps, torch.frexp(values).exponent - 1))


def test_prepared_inputs_are_the_models_own(tmp_path):
    prompts = demo_prompts(1)
    rows = rows_of(DEMO / "base", tmp_path, prompts)
    assert [row["has_media"] for row in rows] == [False, True, True]
    image, audio = load_file(rows[1]["file"]), load_file(rows[2]["file"])
    assert image["pixel_values"].dtype == torch.bfloat16 and audio["input_features"].dtype == torch.bfloat16
    assert rows[1]["prompt_tokens"] == image["input_ids"].shape[1]


def test_a_prompt_that_the_processor_refuses_is_named(tmp_path):
    folder = pico.build("llama", tmp_path / "llama")
    prompts = (Prompt("good", token_ids=(3, 4)), Prompt("high", token_ids=(3, 400)), Prompt("more", token_ids=(999,)))
    error = refused(rows_of, folder, tmp_path, prompts)
    assert "2 refused" in str(error) and "high: " in str(error) and "more: " in str(error)


# The same tokens through both stacks ----------------------------------------------------------------------------------


@pytest.mark.parametrize("family, quant", [("llama", "nf4"), ("gemma4", "none"), ("qwen3", "nf4-dq")])
def test_ours_and_stock_give_the_same_bits(tmp_path, family, quant):
    folder = pico.build(family, tmp_path / "base")
    adapter = pico.adapter(folder, tmp_path / "adapter")
    items = items_of(rows_of(folder, tmp_path), "a")
    first = run(own(folder, adapter, quant=quant), items, tmp_path / "ours", hidden=True)
    second = run(theirs(folder, adapter, quant), runner.with_continuations(items, first), tmp_path / "theirs", hidden=True)
    for a, b in zip(first.said, second.said, strict=True):
        assert a.repeats and b.repeats and a.continuation == b.continuation == a.token_ids == b.token_ids
        (ours, our_layers), (others, other_layers) = teacher_forcing.read_run(a.file), teacher_forcing.read_run(b.file)
        assert compare.difference(ours, others).is_same
        assert ours.shape[0] == items[0].prompt_tokens + 5 or a is not first.said[0]
        assert torch.equal(our_layers, other_layers) and len(our_layers) > 2
    assert second.to_json()["label"] == "stock" and second.to_json()["versions"]["peft"]


def test_one_changed_row_of_one_weight_is_seen(tmp_path):
    folder = pico.build("llama", tmp_path / "base")
    other = pico.build("llama", tmp_path / "other")
    file = next(other.glob("*.safetensors"))
    tensors = load_file(str(file))
    tensors["model.layers.1.mlp.down_proj.weight"][0] += 0.5
    save_file(tensors, str(file), metadata={"format": "pt"})
    items = items_of(rows_of(folder, tmp_path))
    first = run(own(folder), items, tmp_path / "a", noise=True)
    second = run(own(other), runner.with_continuations(items, first), tmp_path / "b")
    found = compare.difference(*(teacher_forcing.read_run(ran.said[0].file)[0] for ran in (first, second)))
    assert first.noise.verdict(found) == "differs"


def test_an_item_may_follow_another_ones_answer(tmp_path):
    folder = pico.build("llama", tmp_path / "base")
    adapter = pico.adapter(folder, tmp_path / "adapter")
    row = rows_of(folder, tmp_path)[0]
    items = [runner.Item(**row, adapter="a"), runner.Item(**row, adapter=None, follows=0)]
    for route, out in ((own(folder, adapter), "a"), (theirs(folder, adapter), "b")):
        with_adapter, base = run(route, items, tmp_path / out).said
        assert base.continuation == with_adapter.token_ids
        a, b = (teacher_forcing.read_run(said.file)[0] for said in (with_adapter, base))
        assert a.shape == b.shape and not torch.equal(a, b)


def test_a_batch_of_rows_with_their_own_adapters_is_each_alone(tmp_path):
    folder = pico.build("llama", tmp_path / "base", dtype="float32")
    paths = {name: str(pico.adapter(folder, tmp_path / name, seed=at)) for at, name in enumerate("ab")}
    items = [runner.Item(**row, adapter=name) for row in rows_of(folder, tmp_path) for name in ("a", None, "b")]
    request = LoadRequest(model=str(folder), adapters=paths, quant="none", dtype="float32", batch=4, device=DEVICE)
    first = run(runner.Route(label="alone", request=request), items, tmp_path / "alone")
    mixed = runner.Route(label="mixed", request=request, batched=4)
    second = run(mixed, runner.with_continuations(items, first), tmp_path / "mixed")
    assert [said.token_ids for said in second.said] == [None] * 6
    for a, b in zip(first.said, second.said, strict=True):
        found = compare.difference(teacher_forcing.read_run(a.file)[0], teacher_forcing.read_run(b.file)[0])
        # float32: the rounding of a few hundred additions (6e-8 each) of values around 1; an adapter moves them by 0.1.
        assert found.max_abs < 1e-4


# Noise ----------------------------------------------------------------------------------------------------------------


def test_other_orders_are_the_same_mathematics(tmp_path):
    """In float32 every order agrees to its rounding; a wrong mask, position or cache would be off by 0.1."""
    folder = pico.build("gemma4", tmp_path / "base", dtype="float32")
    rows = rows_of(folder, tmp_path)
    ran = run(own(folder, dtype="float32"), items_of(rows), tmp_path / "a", noise=True)
    assert set(ran.noise.orders) >= {
        "once", "the same again", "in a batch of 2", "in a batch of 3", "in two chunks, split within the prompt",
        "in two chunks, split before the answer", "in two chunks, split within the answer",
    }  # fmt: skip
    assert ran.noise.skipped == () and 0 < ran.noise.max_abs < 1e-4
    again = [pair for pair in ran.noise.pairs if (pair.first, pair.second) == ("once", "the same again")]
    assert len(again) == 2 and all(pair.max_abs == 0 for pair in again)


def test_batches_are_left_out_where_they_are_tested(tmp_path):
    folder = pico.build("llama", tmp_path / "base")
    items = items_of(rows_of(folder, tmp_path))
    ran = run(own(folder), items, tmp_path / "a", noise="without batches", noise_items=1)
    assert not any("batch" in name for name in ran.noise.orders) and {pair.prompt_id for pair in ran.noise.pairs} == {"one"}


def test_an_order_that_fails_is_named_not_hidden():
    def fail():
        raise RuntimeError("no room\nmore")

    pairs, skipped = teacher_forcing.measure_noise(
        "p", torch.zeros(2, 3), iter([("twice", lambda: torch.ones(2, 3)), ("big", fail)])
    )
    assert [(pair.first, pair.second, pair.max_abs) for pair in pairs] == [("once", "twice", 1.0)]
    assert skipped == ("p, big: RuntimeError: no room",)


def test_stock_routes_measure_their_noise_too(tmp_path):
    folder = pico.build("llama", tmp_path / "base")
    ran = run(theirs(folder), items_of(rows_of(folder, tmp_path)), tmp_path / "a", noise=True)
    assert len(ran.noise.orders) >= 7 and ran.noise.skipped == ()


def test_rounding_at_random_goes_to_a_neighbour_and_is_right_on_average():
    values = torch.full((200, 200), 1.0, dtype=torch.float64) + torch.finfo(torch.bfloat16).eps * 0.25
    generator = torch.Generator().manual_seed(0)
    found = rounding.rounded(values, torch.bfloat16, generator)
    low, high = 1.0, 1.0 + torch.finfo(torch.bfloat16).eps
    assert set(found.double().unique().tolist()) == {low, high}
    # 40,000 draws of probability 1/4: the mean's own deviation is 0.0022 of the step.
    assert float(((found.double() - low) / (high - low)).mean()) == pytest.approx(0.25, abs=0.01)
    assert torch.equal(rounding.rounded(values, torch.bfloat16, None), values.bfloat16())


def test_the_rounding_run_is_pefts_merge(tmp_path):
    folder = pico.build("llama", tmp_path / "base")
    adapter = pico.adapter(folder, tmp_path / "adapter", dora=True)
    row = rows_of(folder, tmp_path)[0]
    merged = stock.with_adapter(stock.load_stock(folder), adapter).merge_and_unload()
    import trimtab

    plan = trimtab.plan(folder, adapters={"a": adapter}, quant="none", context=64, device="cpu")
    with trimtab.load(plan) as model:
        inputs = teacher_forcing.read_inputs(row["file"], "cpu")
        with rounding.merged_in_memory(model, "a", None):
            module = model.hf_model.get_submodule("model.layers.0.mlp.up_proj")
            ours = module.adapters["rounded once"].weight
        theirs_ = merged.get_submodule("model.layers.0.mlp.up_proj").weight
        # Both round once to bf16, from float64 here and float32 there: a few values on the edge fall to the other side.
        assert float((ours != theirs_).float().mean()) < 0.01 and not torch.equal(ours, module.dense_weight())
        model.adapter_store.set(None)
        before = teacher_forcing.forward(model.hf_model, inputs)[0]
        with rounding.merged_in_memory(model, "a", 1):
            assert not torch.equal(teacher_forcing.forward(model.hf_model, inputs)[0], before)
        assert torch.equal(teacher_forcing.forward(model.hf_model, inputs)[0], before)
        assert model.adapter_store.names == {"a"} and model.adapter_store.selection.name is None


# Processes ------------------------------------------------------------------------------------------------------------


def test_a_route_in_its_own_process_says_the_same_and_its_peak(tmp_path):
    folder = pico.build("llama", tmp_path / "base")
    items = items_of(rows_of(folder, tmp_path))
    told = {"here": [], "there": []}
    with phases.watched(lambda *phase: told["here"].append(phase)):
        here = run(own(folder), items, tmp_path / "here")
    with phases.watched(lambda *phase: told["there"].append(phase)):
        there = run(own(folder), items, tmp_path / "there", isolated=True)
    for phase in (("ours: planning", ""), ("ours: prompt", "1 of 2"), ("ours: prompt", "2 of 2")):
        assert phase in told["here"] and phase in told["there"], phase
    assert told["there"][:2] == [("ours: starting a process", ""), ("ours: importing torch and transformers", "")]
    assert [said.token_ids for said in there.said] == [said.token_ids for said in here.said]
    assert torch.equal(*(teacher_forcing.read_run(ran.said[1].file)[0] for ran in (here, there)))
    assert there.memory["host_peak_bytes"] > 100 * 2**20 and there.seconds > 0
    assert here.memory["host_peak_bytes"] == 0


def test_an_error_of_ours_keeps_its_kind_and_fields(tmp_path):
    """In the process of a route it is told as a line; outside that line becomes the error again."""
    from trimtab.verification.routes import child

    folder = pico.build("llama", tmp_path / "base")
    route = own(folder, gpu_memory_bytes=1000).to_json()
    lines = []
    child.main({"module": runner.OWN, "request": {"route": route, "items": []}}, lines.append)
    error = raised(DoesNotFitError, lambda: runner.raise_told(json.loads(json.dumps(lines)), "it"))
    assert error.budget_bytes == 1000 and error.needed_bytes > 1000 and "budget" in str(error)


def test_an_error_that_leaves_its_process_is_raised_here(tmp_path, monkeypatch):
    (tmp_path / "refusing.py").write_text(
        "from trimtab.errors import RequestError\n\n\ndef main(request, emit):\n    raise RequestError('', field='x', **request)\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    error = refused(runner.run_module, "refusing", {"value": 0}, "it", isolated=True)
    assert (error.field, error.value) == ("x", 0)


def test_what_stock_raises_is_an_upstream_error_with_its_package(tmp_path):
    folder = pico.build("llama", tmp_path / "base")
    (folder / "config.json").write_text('{"model_type": "llama", "architectures": ["NoSuchModel"]}')
    with pytest.raises(UpstreamError, match="stock: AttributeError: .*NoSuchModel") as caught:
        run(theirs(folder), items_of(rows_of(pico.build("llama", tmp_path / "b"), tmp_path)), tmp_path / "a")
    assert caught.value.package == "transformers" and caught.value.installed


def test_a_process_that_dies_is_a_device_error(tmp_path):
    with pytest.raises(DeviceError, match="the process of route 'it' ended with ModuleNotFoundError"):
        runner.run_module("trimtab.verification.no_such", {}, "it", isolated=True)


# Packages that an interpreter with the stock stack alone lacks.
OURS = ("platformdirs", "pydantic", "prometheus_client", "llguidance", "soundfile", "starlette", "httpx2")
IMPORTED = f"""
import sys
import trimtab.benchmark.run_stock, trimtab.verification.merges.stock_merge, trimtab.verification.routes.stock_run
print(*(name for name in {OURS} if name in sys.modules))
"""


def test_the_stock_sides_import_only_what_the_stock_stack_has():
    done = subprocess.run([sys.executable, "-c", IMPORTED], cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stdout.strip()) == (0, ""), done.stdout + done.stderr
