"""The bridge on a real GPU: the CPU's tests there, and what only a GPU shows (devices and bytes)."""

import gc

import pytest
import torch
from peft import PeftModel

from tests import pico, split, stock
from tests.bridge.test_bridge import *
from tests.bridge.test_bridge import adapter_of, bridged, device_map, folder_of, inputs_of
from trimtab.bridge import check


def in_use() -> int:
    """Return the bytes in use, without models of earlier tests: their hooks hold them in cycles until they are collected."""
    gc.collect()
    torch.cuda.synchronize()
    return torch.cuda.memory_allocated()


@pytest.mark.parametrize("name", ["cpu", "disk", "catch-all"])
@pytest.mark.parametrize("quant", ["none", "nf4-dq"])
def test_gpu_bytes_are_as_before_plus_the_adapters(work, name, quant):
    base = split.load(folder_of(work), device_map(name), quant, offload_folder=str(work / "off"))
    before = in_use()
    model = bridged(base, adapter_of(work))
    added = in_use() - before
    sizes = [value.nbytes for path, value in model.named_parameters() if "lora_" in path]
    # The allocator rounds each tensor up to 512 bytes.
    assert sum(sizes) <= added <= sum(-(-size // 512) * 512 for size in sizes)
    assert {value.device.type for path, value in model.named_parameters() if "lora_" in path} == {"cuda"}
    stock.logits(model, inputs_of(model))
    away = {path: value for path, value in model.named_parameters() if "tower" in path and "lora_" not in path}
    assert away and {value.device.type for value in away.values()} == {"meta"}
    assert not check(model).of("lora-wrong-device", "not-where-the-map-says")


def test_stock_peft_brings_the_towers_back_to_the_gpu(work):
    base = split.load(folder_of(work), split.towers_off())
    before = in_use()
    towers = sum(value.nbytes for path, value in base.named_parameters() if "tower" in path)
    model = PeftModel.from_pretrained(base, adapter_of(work))
    adapter = sum(value.nbytes for path, value in model.named_parameters() if "lora_" in path)
    assert in_use() - before > adapter + towers // 2
    assert "cpu" not in model.hf_device_map.values()


def test_a_layer_that_is_at_home_on_the_cpu(work):
    """Not offloaded: the map's value is a device, and LoRA computes where its layer does."""
    folder, adapter = folder_of(work, "llama"), adapter_of(work, "llama")
    placed = split.last_layer_off(folder, torch.device("cpu"))
    model = bridged(split.load(folder, placed), adapter)
    lora = {path: value.device.type for path, value in model.named_parameters() if "lora_" in path}
    assert {kind for path, kind in lora.items() if "layers.1." in path} == {"cpu"}
    assert {kind for path, kind in lora.items() if "layers.0." in path} == {"cuda"}
    expected = stock.with_adapter(stock.load_stock(folder, device=split.DEVICE), adapter)
    given = inputs_of(model, "llama")
    # One layer of two runs on the CPU's kernels, which sum bf16 products in another order.
    assert (stock.logits(model, given) - stock.logits(expected, given)).abs().max() < 0.1


def test_merge_of_a_base_with_modules_on_cpu_and_disk(work):
    folder, adapter = folder_of(work), adapter_of(work)
    placed = split.towers_off() | {"model.vision_tower": "disk"}
    merged = bridged(split.load(folder, placed, offload_folder=str(work / "off")), adapter).merge_and_unload()
    expected = stock.with_adapter(stock.load_stock(folder, device=split.DEVICE), adapter).merge_and_unload()
    given = split.to_device(pico.inputs("gemma4", merged.config))
    assert same(stock.logits(merged, given), stock.logits(expected, given))  # noqa: F405
