"""PEFT's second plan, reckoned from headers, is accelerate's own on the real model: sizes, budgets, maps and log lines."""

from __future__ import annotations

import logging
import random
import re
import types
import warnings
from functools import cache
from pathlib import Path
from typing import Any

import accelerate.utils.modeling as accelerate_modeling
import pytest
import torch

from bench.checkpoints import config_of, empty_model
from tests import stock
from trimtab.checkpoint.adapter import AdapterSpec, match_adapter, read_adapter
from trimtab.doctor.preflight_replan import Node, balanced_budgets, cleaned, infer_map, sizes_of, walk
from trimtab.doctor.preflight_shape import ModelShape, read_shape
from trimtab.doctor.preflight_tree import Wrapped, quantized_paths, stock_bytes, stock_kept, wrapped_tree

DEMO = Path(__file__).parents[1] / "trimtab" / "demo"
ADAPTERS = ("style", "specialist", "rslora-dora")
LOG_LINE = re.compile(r"- (\S+): (\d+(?:\.\d+)?) bytes required")


@cache
def demo_shape(quant: str) -> ModelShape:
    return read_shape(DEMO / "base", {}, quant=quant, dtype="bfloat16")


@cache
def demo_spec(name: str) -> AdapterSpec:
    return match_adapter(read_adapter(DEMO / "adapters" / name), demo_shape("none").anatomy)


@cache
def real_model(name: str, quant: str) -> Any:
    """The stock PeftModel of the demo; wrapper targets are resolved, or PEFT refuses the adapter."""
    from peft import LoraConfig, PeftModel

    config = LoraConfig.from_pretrained(DEMO / "adapters" / name)
    lora = [target for target in demo_spec(name).targets if target.kind != "saved"]
    config.target_modules = "|".join(re.escape(target.module_path) for target in lora)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        base = stock.load_stock(DEMO / "base", quant)
        return PeftModel.from_pretrained(base, DEMO / "adapters" / name, config=config)


@cache
def tree(name: str | None, quant: str) -> Wrapped:
    shape = demo_shape(quant)
    quantized = quantized_paths(shape, stock_kept(shape, takes_map=False))
    return wrapped_tree(shape, quantized, None if name is None else demo_spec(name))


class _Torch(types.ModuleType):
    """torch with four GPUs of which only the number is known: what accelerate asks when it plans."""

    def __init__(self) -> None:
        super().__init__("torch")
        self.cuda = types.SimpleNamespace(device_count=lambda: 4, is_available=lambda: False)

    def device(self, value: Any) -> Any:
        return types.SimpleNamespace(type="cuda") if isinstance(value, int) else torch.device(value)

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


def real_plan(model: Any, free: dict, monkeypatch, caplog) -> tuple[dict, dict, dict[str, float]]:
    """Return accelerate's own (budgets, map, bytes of its log line) as PEFT calls it."""
    get_max_memory = accelerate_modeling.get_max_memory
    no_split = list(model._no_split_modules)
    caplog.clear()
    with monkeypatch.context() as patched, caplog.at_level(logging.INFO, logger="accelerate.utils.modeling"):
        patched.setattr(accelerate_modeling, "torch", _Torch())
        patched.setattr(
            accelerate_modeling,
            "get_max_memory",
            lambda given=None: dict(free) if given is None else get_max_memory(given),
        )
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            budgets = accelerate_modeling.get_balanced_memory(model, None, no_split)
            found = accelerate_modeling.infer_auto_device_map(
                model, max_memory=dict(budgets), no_split_module_classes=no_split
            )
    required = {device: float(nbytes) for device, nbytes in LOG_LINE.findall("\n".join(caplog.messages))}
    return budgets, dict(found), required


def memories(total_bytes: float, count: int) -> list[dict]:
    """Free memory from next to nothing to more than enough, on one to three GPUs."""
    draw = random.Random(0)
    found = []
    for _ in range(count):
        gpus = draw.choice((1, 1, 1, 2, 3))
        free: dict = {
            index: int(total_bytes * draw.choice((0.01, 0.2, 0.5, 1, 1.5)) * draw.random()) for index in range(gpus)
        }
        found.append({**free, "cpu": int(total_bytes * draw.choice((0.2, 1, 5)))})
    return found


# Against accelerate and PEFT themselves -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "quant"), [*((name, "nf4-dq") for name in ADAPTERS), ("style", "none"), ("style", "int8")]
)
def test_tree_has_the_modules_and_sizes_of_the_real_peft_model(name, quant):
    model, wrapped = real_model(name, quant), tree(name, quant)
    assert [node.path for node in walk(wrapped.root)] == [path for path, _ in model.named_modules()]
    real = accelerate_modeling.compute_module_sizes(model)
    assert list(sizes_of(wrapped.root, wrapped.ties).items()) == list(real.items())
    assert list(wrapped.ties) == [tuple(sorted(group)) for group in accelerate_modeling.find_tied_parameters(model)]


@pytest.mark.parametrize("name", ADAPTERS)
def test_budgets_map_and_log_line_are_accelerates(name, monkeypatch, caplog):
    model, wrapped = real_model(name, "nf4-dq"), tree(name, "nf4-dq")
    no_split = demo_shape("nf4-dq").no_split
    assert set(no_split) == set(model._no_split_modules)
    splits = requirements = 0
    for free in memories(sizes_of(wrapped.root, wrapped.ties)[""], 16):
        budgets, device_map, required = real_plan(model, free, monkeypatch, caplog)
        mine = balanced_budgets(wrapped.root, free, no_split, wrapped.ties)
        found = infer_map(wrapped.root, mine, no_split, wrapped.ties)
        assert mine == budgets
        assert found.device_map == device_map
        assert {str(device): float(nbytes) for device, nbytes in found.required.items()} == required
        splits += len(set(device_map.values())) > 1
        requirements += bool(required)
    assert splits > 3 and requirements > 3, "the memories do not reach the cases"


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
    folder = tmp_path_factory.mktemp("e4b")
    config = config_of("e4b")
    config.architectures, config.dtype = ["Gemma4ForConditionalGeneration"], torch.bfloat16
    config.save_pretrained(folder)
    return folder


TABLE_BYTES = 262144 * 42 * 256 * 2
TABLE = "base_model.model.model.language_model.embed_tokens_per_layer"
POSITIONS_BYTES = 2 * 10240 * 768 * 2
PATCHES = "base_model.model.model.vision_tower.patch_embedder"


def test_log_line_of_e4b_is_the_table_and_the_first_thing_tried(e4b):
    device_map = {"model.vision_tower": "cpu", "model.audio_tower": "cpu", "": 0}
    shape = read_shape(e4b, device_map, quant="nf4-dq", dtype="bfloat16")
    wrapped = wrapped_tree(shape, quantized_paths(shape, stock_kept(shape, takes_map=True)), None)
    budgets = balanced_budgets(wrapped.root, {0: 2 * 2**30, "cpu": 32 * 2**30}, shape.no_split, wrapped.ties)
    found = infer_map(wrapped.root, budgets, shape.no_split, wrapped.ties)
    assert found.largest == (TABLE, TABLE_BYTES + 2)  # and the two bytes of its embed_scale
    # Releases that split the patch embedder try its position table first, others the embedder as one piece.
    is_whole = "Gemma4VisionPatchEmbedder" in shape.no_split
    first = (PATCHES, POSITIONS_BYTES + 768 * 768 * 2) if is_whole else (
        f"{PATCHES}.position_embedding_table", POSITIONS_BYTES,
    )  # fmt: skip
    tried = next(step for step in found.steps if step.action == "next device")
    assert (tried.path, tried.size_bytes) == first
    assert found.required == {0: (5669781506 if is_whole else 5668601858)}
    assert found.device_map == {"": "cpu"}


def test_accelerate_itself_says_that_number_for_e4b(e4b, monkeypatch, caplog):
    model = empty_model(config_of("e4b"))
    model.tie_weights()
    *_, required = real_plan(model, {0: 2 * 2**30, "cpu": 32 * 2**30}, monkeypatch, caplog)
    is_whole = "Gemma4VisionPatchEmbedder" in model._no_split_modules
    # Without PEFT around it the model has no "base_model" above it; sizes are the same.
    assert required == {"0": 5669781506.0 if is_whole else 5668601858.0}


# The rule on little trees ---------------------------------------------------------------------------------------------


def leaf(path: str, nbytes: int, class_name: str = "Linear") -> Node:
    return Node(path, class_name, ((f"{path}.weight", nbytes),))


def model_of(*children: Node) -> Node:
    return Node("", "Model", children=children)


def test_all_of_it_fits_and_is_named_by_its_children():
    found = infer_map(model_of(leaf("a", 10), leaf("b", 20)), {0: 100, "cpu": 100}, ())
    assert found.device_map == {"": 0}
    assert found.required == {}
    assert found.total_bytes == 30
    assert found.largest == ("b", 20)


def test_room_for_the_largest_layer_is_kept_on_the_first_gpu():
    found = infer_map(model_of(leaf("a", 10), leaf("b", 20), leaf("c", 20)), {0: 45, "cpu": 100}, ())
    # 45 - 20 kept leaves 25: a and no b.
    assert found.device_map == {"a": 0, "b": "cpu", "c": "cpu"}


def test_a_device_that_takes_nothing_says_what_it_would_need():
    found = infer_map(model_of(leaf("a", 10), leaf("b", 20)), {0: 25, "cpu": 100}, ())
    assert found.required == {0: 30}
    assert [(step.device, step.path, step.action) for step in found.steps] == [
        (0, "a", "next device"), ("cpu", "a", "put"), ("cpu", "b", "put"),
    ]  # fmt: skip


def test_a_class_that_is_not_split_goes_whole():
    block = Node("block", "Layer", children=(leaf("block.a", 10), leaf("block.b", 10)))
    split = infer_map(model_of(block, leaf("c", 1)), {0: 20, "cpu": 100}, ())
    whole = infer_map(model_of(block, leaf("c", 1)), {0: 20, "cpu": 100}, ("Layer",))
    assert split.device_map == {"block.a": 0, "block.b": "cpu", "c": "cpu"}
    assert whole.device_map == {"": "cpu"}


def test_what_no_memory_takes_goes_to_disk():
    found = infer_map(model_of(leaf("a", 10), leaf("b", 20), leaf("c", 20)), {0: 0, "cpu": 35}, ())
    assert found.device_map == {"a": "cpu", "b": "disk", "c": "disk"}


def test_tied_weights_count_once_and_stay_together():
    ties = (("a.weight", "head.weight"),)
    found = infer_map(model_of(leaf("a", 10), leaf("b", 5), leaf("head", 10)), {0: 25, "cpu": 100}, (), ties)
    assert found.total_bytes == 15
    assert found.device_map == {"": 0}
    layers = (leaf("a", 10), leaf("b", 12), leaf("c", 12), leaf("head", 10))
    apart = infer_map(model_of(*layers), {0: 24, "cpu": 100}, (), ties)
    assert apart.device_map == {"a": 0, "head": 0, "b": "cpu", "c": "cpu"}


def test_one_gpu_gets_nine_tenths_several_get_equal_shares():
    root = model_of(leaf("a", 100), leaf("b", 100))
    assert balanced_budgets(root, {0: 1000, "cpu": 5}, ()) == {0: 900.0, "cpu": 5}
    # 200 over two, and a quarter more than the mean layer.
    assert balanced_budgets(root, {0: 1000, 1: 1000, "cpu": 5}, ()) == {0: 225, 1: 1000, "cpu": 5}
    assert balanced_budgets(root, {"cpu": 5}, ()) == {"cpu": 5}


def test_a_map_names_what_lies_together_once():
    assert cleaned({"a.x": 0, "a.y": 0, "b": "cpu"}) == {"a": 0, "b": "cpu"}
    assert cleaned({"a.x": 0, "a.y": 1, "b": 0}) == {"a.x": 0, "a.y": 1, "b": 0}
    assert cleaned({"a": 0}) == {"a": 0}
