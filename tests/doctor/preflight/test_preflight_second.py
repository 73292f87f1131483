"""PEFT's second plan, made on meta tensors, is the plan of the loaded model: sizes, budgets, maps and log lines."""

from __future__ import annotations

import contextlib
import io
import logging
import random
import re
import sys
import types
import warnings
from functools import cache
from pathlib import Path
from typing import Any

import accelerate.utils.modeling as accelerate_modeling
import pytest
import torch

from bench.checkpoints import config_of, empty_model
from tests import ROOT, stock
from tests.adapter_files import pair
from tests.adapter_files import write_adapter as write_by_hand
from tests.doctor.preflight.test_preflight import sized, write_e4b_adapter
from trimtab.doctor.preflight import peft_dispatch
from trimtab.doctor.preflight import second_plan as preflight_second
from trimtab.doctor.preflight.adapter import AdapterReading, read_adapter_for
from trimtab.doctor.preflight.device_map import MapReading, read_map
from trimtab.doctor.preflight.peft_dispatch import plan_of
from trimtab.doctor.preflight.second_plan import config_changes, run_peft, second_plan
from trimtab.doctor.preflight.shape import ModelShape, read_shape
from trimtab.doctor.preflight.unquantized import quantized_paths, stock_bytes, stock_kept

DEMO = ROOT / "trimtab" / "demo"
ADAPTERS = ("style", "specialist", "rslora-dora")
LOG_LINE = re.compile(r"- (\S+): (\d+(?:\.\d+)?) bytes required")
# A key on the CPU that names nothing: PEFT plans again, and every linear is quantized as in the model loaded in one piece.
SPLIT = {"model.no_such_module": "cpu", "": 0}


@cache
def demo_shape(quant: str) -> ModelShape:
    return read_shape(DEMO / "base", SPLIT, quant=quant, dtype="bfloat16")


@cache
def demo_adapter(name: str) -> AdapterReading:
    return read_adapter_for(DEMO / "adapters" / name, demo_shape("none"))


@cache
def real_model(name: str, quant: str) -> Any:
    """The stock PeftModel of the demo; wrapper targets are resolved, or PEFT refuses the adapter."""
    from peft import LoraConfig, PeftModel

    config = LoraConfig.from_pretrained(DEMO / "adapters" / name)
    spec = demo_adapter(name).spec
    assert spec is not None
    lora = [target for target in spec.targets if target.kind != "saved"]
    config.target_modules = "|".join(re.escape(target.module_path) for target in lora)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        base = stock.load_stock(DEMO / "base", quant)
        return PeftModel.from_pretrained(base, DEMO / "adapters" / name, config=config)


def question(name: str, quant: str, free: dict) -> dict[str, Any]:
    shape = demo_shape(quant)
    reading = read_map(shape, SPLIT)
    return {
        "model": str(DEMO / "base"), "dtype": "bfloat16", "adapter": str(DEMO / "adapters" / name),
        "config": config_changes(demo_adapter(name)), "device_map": reading.devices, "devices": reading.tensor_devices, "main": "0",
        "quantized": sorted(reading.quantized), "quant": shape.quant, "free": [list(item) for item in free.items()],
    }  # fmt: skip


def device(value: Any) -> Any:
    return types.SimpleNamespace(type="cuda") if isinstance(value, int) else torch.device(value)


def four_gpus() -> Any:
    """torch with four GPUs of which only the number is known: what accelerate asks when it plans."""
    cuda = types.SimpleNamespace(device_count=lambda: 4, is_available=lambda: False)
    return types.SimpleNamespace(**{**vars(torch), "cuda": cuda, "device": device})


def real_plan(model: Any, free: dict, monkeypatch, caplog) -> tuple[dict, dict, dict[str, float]]:
    """Return accelerate's own (budgets, map, bytes of its log line) as PEFT calls it."""
    get_max_memory = accelerate_modeling.get_max_memory
    no_split = list(model._no_split_modules)
    caplog.clear()
    with monkeypatch.context() as patched, caplog.at_level(logging.INFO, logger="accelerate.utils.modeling"):
        patched.setattr(accelerate_modeling, "torch", four_gpus())
        patched.setattr(
            accelerate_modeling, "get_max_memory", lambda given=None: dict(free) if given is None else get_max_memory(given)
        )
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            budgets = accelerate_modeling.get_balanced_memory(model, None, no_split)
            found = accelerate_modeling.infer_auto_device_map(model, max_memory=dict(budgets), no_split_module_classes=no_split)
    required = {device: float(nbytes) for device, nbytes in LOG_LINE.findall("\n".join(caplog.messages))}
    return budgets, dict(found), required


def memories(total_bytes: float, count: int) -> list[dict]:
    """Free memory from next to nothing to more than enough, on one to three GPUs."""
    draw = random.Random(0)
    found = []
    for _ in range(count):
        gpus = draw.choice((1, 1, 1, 2, 3))
        free: dict = {index: int(total_bytes * draw.choice((0.01, 0.2, 0.5, 1, 1.5)) * draw.random()) for index in range(gpus)}
        found.append({**free, "cpu": int(total_bytes * draw.choice((0.2, 1, 5)))})
    return found


# Against accelerate and PEFT themselves, on the loaded model -----------------------------------------------------------


@pytest.mark.parametrize(("name", "quant"), [*((name, "nf4-dq") for name in ADAPTERS), ("style", "none"), ("style", "int8")])
def test_model_without_data_has_the_modules_and_sizes_of_the_real_peft_model(name, quant, monkeypatch):
    planned: list[Any] = []
    real = peft_dispatch.accelerate_modeling.compute_module_sizes
    monkeypatch.setattr(
        accelerate_modeling, "compute_module_sizes", lambda *args, **options: planned.append(args[0]) or real(*args, **options)
    )
    found = plan_of(question(name, quant, {0: 10_000_000, "cpu": 10_000_000}))
    monkeypatch.undo()
    model, mine = real_model(name, quant), planned[-1]
    added = re.compile(r"\.(lora_\w+|modules_to_save|trainable_tokens_\w+)\.")
    assert dict(found["adapter"]) == {"0": sum(value.nbytes for path, value in model.named_parameters() if added.search(path))}
    assert [path for path, _ in mine.named_modules()] == [path for path, _ in model.named_modules()]
    assert list(real(mine).items()) == list(real(model).items())
    found = accelerate_modeling.find_tied_parameters
    assert sorted(map(sorted, found(mine))) == sorted(map(sorted, found(model)))
    assert {value.device.type for value in (*mine.parameters(), *mine.buffers())} == {"meta"}


@pytest.mark.parametrize("name", [ADAPTERS[0], *(pytest.param(name, marks=pytest.mark.slow) for name in ADAPTERS[1:])])
def test_budgets_map_and_log_line_are_accelerates(name, monkeypatch, caplog):
    model = real_model(name, "nf4-dq")
    splits = requirements = 0
    for free in memories(accelerate_modeling.compute_module_sizes(model)[""], 8):
        found = plan_of(question(name, "nf4-dq", free))
        left = {device: max(nbytes - dict(found["adapter"]).get(str(device), 0), 0) for device, nbytes in free.items()}
        budgets, device_map, required = real_plan(model, left, monkeypatch, caplog)
        assert dict(found["budgets"]) == budgets and dict(found["map"]) == device_map and dict(found["required"]) == required
        splits += len(set(device_map.values())) > 1
        requirements += bool(required)
    assert splits > 1 and requirements > 1, "the memories do not reach the cases"


@pytest.mark.slow  # test_preflight.py compares the shape of another process in every run
def test_the_plan_of_a_process_of_its_own_is_the_same():
    asked = question("specialist", "nf4-dq", {0: 900_000, "cpu": 10_000_000})
    assert run_peft(asked, sys.executable) == plan_of(asked)


def test_nothing_of_peft_and_accelerate_stays_replaced():
    from peft import peft_model

    before = {name: vars(module)[name] for module in (peft_model, accelerate_modeling) for name in (
        "get_balanced_memory", "infer_auto_device_map")}  # fmt: skip
    before |= {"torch": accelerate_modeling.torch, "get_max_memory": accelerate_modeling.get_max_memory}
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        assert plan_of(question("style", "nf4-dq", {0: 900_000, "cpu": 10_000_000}))["runs"]
    assert accelerate_modeling.torch is before["torch"] is torch and printed.getvalue() == ""
    assert accelerate_modeling.get_max_memory is before["get_max_memory"]
    assert peft_model.infer_auto_device_map is before["infer_auto_device_map"] is accelerate_modeling.infer_auto_device_map
    assert peft_model.get_balanced_memory is before["get_balanced_memory"] is accelerate_modeling.get_balanced_memory
    assert not logging.getLogger("accelerate.utils.modeling").handlers


# Where there is no second plan ----------------------------------------------------------------------------------------


def test_a_base_in_one_piece_is_left_alone_by_peft_itself():
    asked = question("style", "nf4-dq", {0: 900_000, "cpu": 10_000_000}) | {"device_map": {"": "0"}}
    assert plan_of(asked) == {"runs": False, "why": "PEFT loads the adapter without a separate plan"}


def test_an_adapter_that_peft_refuses_says_so(tmp_path):
    adapter = write_by_hand(tmp_path / "a", pair("model.layers.0.self_attn.query", 8, 8), target_modules=["query"])
    found = plan_of(question("style", "nf4-dq", {"cpu": 10_000_000}) | {"adapter": str(adapter), "config": {}})
    assert found["runs"] is False and found["why"].startswith("PEFT stops before its plan: ")
    assert "Target modules {'query'} not found in the base model" in found["why"]


def test_a_release_of_peft_without_the_call_has_no_second_plan(monkeypatch):
    from peft import peft_model

    asked = question("style", "nf4-dq", {"cpu": 10_000_000}) | {"device_map": {"": "0"}}
    monkeypatch.delattr(peft_model, "infer_auto_device_map")
    assert plan_of(asked) == {"runs": False, "why": "this PEFT release does not call accelerate for a map"}


def test_an_interpreter_without_peft_says_what_is_missing(tmp_path):
    blocked = tmp_path / "blocked"
    blocked.mkdir()
    (blocked / "sitecustomize.py").write_text("import sys\nsys.modules['peft'] = None\n")
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("PYTHONPATH", str(blocked))
        found = run_peft(question("style", "nf4-dq", {"cpu": 10_000_000}), sys.executable)
    assert found["runs"] is False and found["why"].startswith("PEFT could not be run there: ") and "peft" in found["why"]


def test_bytes_on_the_device_are_those_of_the_loaded_model():
    shape = demo_shape("nf4-dq")
    found = stock_bytes(shape, quantized_paths(shape, stock_kept(shape, takes_map=False)))
    model = stock.load_stock(DEMO / "base", "nf4-dq")
    real = {name: value.nbytes for name, value in (*model.named_parameters(), *model.named_buffers())}
    for path, module in model.named_modules():
        state = getattr(getattr(module, "weight", None), "quant_state", None)
        if state is not None:
            real[f"{path}.weight"] += state.absmax.nbytes + state.state2.absmax.nbytes + state.offset.nbytes
    assert found == real


# The number that reports quote ----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def e4b(tmp_path_factory) -> Path:
    return sized("e4b", tmp_path_factory.mktemp("sizes"))


TABLE_BYTES = 262144 * 42 * 256 * 2
TABLE = "base_model.model.model.language_model.embed_tokens_per_layer"
POSITIONS_BYTES = 2 * 10240 * 768 * 2
PATCHES = "base_model.model.model.vision_tower.patch_embedder"


def second(model: Path, adapter: AdapterReading, shape: ModelShape, reading: MapReading, gpu_bytes: int):
    """The second plan when exactly this much is free once base and adapter are there."""
    free = {0: gpu_bytes + reading.bytes_on["0"], "cpu": 32 * 2**30 + reading.bytes_on["cpu"]}
    return second_plan(shape, reading, adapter, free, model=model, dtype="bfloat16")


def test_log_line_of_e4b_is_the_table_and_the_first_thing_tried(e4b, tmp_path, monkeypatch):
    monkeypatch.setattr(preflight_second, "run_peft", lambda request, python: plan_of(request))
    device_map = {"model.vision_tower": "cpu", "model.audio_tower": "cpu", "": 0}
    shape = read_shape(e4b, device_map, quant="nf4-dq", dtype="bfloat16")
    adapter = write_e4b_adapter(tmp_path / "adapter")
    found = second(e4b, read_adapter_for(adapter, shape), shape, read_map(shape, device_map), 2 * 2**30)
    largest = next(line for line in found.lines if line.text.startswith("less the largest layer"))
    assert TABLE.removeprefix("base_model.model.") in largest.text
    assert largest.bytes == -(TABLE_BYTES + 2)  # and the two bytes of its embed_scale
    # Releases that split the patch embedder try its position table first, others the embedder as one piece.
    is_whole = "Gemma4VisionPatchEmbedder" in empty_model(config_of("e4b"))._no_split_modules
    path, size = (PATCHES, POSITIONS_BYTES + 768 * 768 * 2) if is_whole else (
        f"{PATCHES}.position_embedding_table", POSITIONS_BYTES,
    )  # fmt: skip
    assert found.required == {0: (5669781506 if is_whole else 5668601858)}
    own = path.removeprefix("base_model.model.")
    assert f"= {size} for {own}, the first module that was tried, + {TABLE_BYTES + 2} for the largest" in found.required_words[0]
    assert found.device_map == {"": "cpu"} and found.all_on_cpu


def test_accelerate_itself_says_that_number_for_e4b(e4b, monkeypatch, caplog):
    model = empty_model(config_of("e4b"))
    model.tie_weights()
    *_, required = real_plan(model, {0: 2 * 2**30, "cpu": 32 * 2**30}, monkeypatch, caplog)
    is_whole = "Gemma4VisionPatchEmbedder" in model._no_split_modules
    # Without PEFT around it the model has no "base_model" above it; sizes are the same.
    assert required == {"0": 5669781506.0 if is_whole else 5668601858.0}
