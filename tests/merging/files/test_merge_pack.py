"""Packing a merge: stock loads it, the chosen scales lose less than the largest value's, and packed bases are unpacked exactly."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests import merged_models, pico, stock
from tests.long_runs import crossed
from tests.merged_models import load, tensors_of
from trimtab.checkpoint.folder import read_checkpoint
from trimtab.engine.formats import coded_files
from trimtab.engine.formats.bitsandbytes import quantize
from trimtab.engine.formats.weights import dequantize, prequantized
from trimtab.engine.tiers.reader import PositionedFile, bytes_of, read_small
from trimtab.errors import CheckpointError
from trimtab.formats.packed import split_packed
from trimtab.merging import merge
from trimtab.merging.changes.dequantize import packed_rows


def load_packed(folder: Path) -> Any:
    """Return the stock model of a folder whose config says how it is packed."""
    import transformers

    config = transformers.AutoConfig.from_pretrained(folder)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = getattr(transformers, config.architectures[0]).from_pretrained(folder, device_map={"": "cpu"}).eval()
    return stock.without_cpu_repacking(model)


def kinds(model: Any) -> dict[str, str]:
    return {path: type(m).__name__ for path, m in model.named_modules() if type(m).__name__.startswith("Linear")}


@pytest.mark.parametrize(
    ("family", "requantize"), crossed(["gemma4", "gemma3", "qwen3_moe"], ["nf4", "nf4-dq"], first=["gemma4"], rest=1)
)
def test_a_packed_merge_loads_in_stock_with_the_modules_that_stock_would_pack(family: str, requantize: str, tmp_path: Path) -> None:
    base = pico.build(family, tmp_path / "base", shards=2)
    adapter = pico.adapter(base, tmp_path / "adapter", targets="all")
    merge(base, tmp_path / "dense", adapters={"a": adapter})
    report = merge(base, tmp_path / "packed", adapters={"a": adapter}, requantize=requantize, check=True)
    assert report.check is not None and report.check.passed
    model, own = load_packed(tmp_path / "packed"), stock.load_stock(tmp_path / "dense", requantize)
    assert kinds(model) == kinds(own) and "Linear4bit" in kinds(model).values()
    exact = dict(load(tmp_path / "dense").named_modules())
    ours = theirs = 0.0
    for path, kind in kinds(model).items():
        weight, wanted = model.get_submodule(path).weight, exact[path].weight.float()
        if kind == "Linear":
            assert torch.equal(weight, exact[path].weight), path
            continue
        ours += float((unpacked(weight) - wanted).square().sum())
        theirs += float((unpacked(own.get_submodule(path).weight) - wanted).square().sum())
    assert ours < 0.97 * theirs
    # Text alone: transformers 5.6.2 cannot run a packed audio tower, whoever packed it.
    ids = torch.arange(3, 15).unsqueeze(0)
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    if family.startswith("gemma"):
        inputs["token_type_ids" if family == "gemma3" else "mm_token_type_ids"] = torch.zeros_like(ids)
    assert torch.isfinite(stock.logits(model, inputs)).all()


def unpacked(weight: Any) -> Tensor:
    import bitsandbytes as bnb

    found: Tensor = bnb.functional.dequantize_4bit(weight.data, weight.quant_state).float()
    return found


@pytest.mark.parametrize("requantize", ["nf4", "nf4-dq"])
def test_without_an_adapter_a_model_is_packed_and_trimtab_reads_it(requantize: str, tmp_path: Path) -> None:
    base = pico.build("llama", tmp_path / "base", shards=2)
    assert not merge(base, tmp_path / "out", requantize=requantize).changed
    found = read_checkpoint(tmp_path / "out")
    packed = split_packed(found)[1]
    assert len(packed) == 14
    assert {(entry.kind, entry.dtype) for entry in packed.values()} == {(requantize, "bfloat16")}
    config = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    assert config == written_by_stock(base, tmp_path / "stock", requantize)
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    assert set(index["weight_map"]) == set(found.tensors)
    assert index["metadata"]["total_size"] == sum(entry.nbytes for entry in found.tensors.values())


def written_by_stock(base: Path, folder: Path, quant: str) -> dict[str, Any]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        stock.load_stock(base, quant).save_pretrained(folder)
    found: dict[str, Any] = json.loads((folder / "config.json").read_text())["quantization_config"]
    return found


@pytest.mark.parametrize("quant", ["nf4", "nf4-dq", "fp4", "int8"])
def test_a_packed_base_is_unpacked_in_float32_bit_for_bit(quant: str, tmp_path: Path) -> None:
    base = pico.build("llama", tmp_path / "base")
    written_by_stock(base, tmp_path / "stock", quant)
    found = read_checkpoint(tmp_path / "stock")
    packed = split_packed(found)[1]
    assert len(packed) == 14
    for name, entry in packed.items():
        parts = read_small({part: value for part, value in entry.parts.items() if part != "quant_state"})
        whole = prequantized(entry, parts, torch.float32)
        wanted = dequantize(type(whole)(whole.kind, whole.shape, torch.float32, whole.parts, whole.codes, whole.blocks))
        files = {file: PositionedFile(file) for file in found.files}
        rows = packed_rows(entry, lambda part, files=files: files[part.file])
        pieces = [rows(start, min(start + 7, entry.shape[0])) for start in range(0, entry.shape[0], 7)]
        assert torch.equal(torch.cat(pieces), wanted.float()), name
        for file in files.values():
            file.close()


@pytest.mark.parametrize("quant", ["nf4-dq", "int8"])
def test_merging_into_a_packed_base_unpacks_it_once_and_adds_in_float32(quant: str, tmp_path: Path) -> None:
    base = pico.build("llama", tmp_path / "base", shards=2)
    adapter = pico.adapter(base, tmp_path / "adapter")
    written_by_stock(base, tmp_path / "stock", quant)
    report = merge(tmp_path / "stock", tmp_path / "out", adapters={"a": adapter}, check=True)
    assert report.check is not None and report.check.passed
    assert "quantization_config" not in json.loads((tmp_path / "out" / "config.json").read_text())
    merge(tmp_path / "stock", tmp_path / "dense", dtype="float32")
    merge(tmp_path / "dense", tmp_path / "expected", adapters={"a": adapter}, dtype="bfloat16")
    out, expected = tensors_of(tmp_path / "out"), tensors_of(tmp_path / "expected")
    assert set(out) == set(tensors_of(base)) and all(torch.equal(out[name], expected[name]) for name in out)


def test_a_packed_base_can_be_packed_again_in_another_form(tmp_path: Path) -> None:
    base = pico.build("llama", tmp_path / "base")
    written_by_stock(base, tmp_path / "stock", "int8")
    merge(tmp_path / "stock", tmp_path / "out", requantize="nf4")
    assert {entry.kind for entry in split_packed(read_checkpoint(tmp_path / "out"))[1].values()} == {"nf4"}
    load_packed(tmp_path / "out")


def test_a_linear_that_is_made_of_several_files_tensors_is_not_packed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from trimtab.merging.files import layout

    base = pico.build("llama", tmp_path / "base")
    monkeypatch.setattr(layout, "is_cast", lambda expression: False)
    with pytest.raises(CheckpointError, match="made of several file tensors"):
        merge(base, tmp_path / "out", requantize="nf4")
    assert merged_models.left_over(tmp_path) == ["base"]


# Scales ---------------------------------------------------------------------------------------------------------------


def parts_of(weight: Tensor, *, nested: bool, shares: tuple[float, ...] = coded_files.SHARES) -> dict[str, Tensor]:
    found: dict[str, bytearray] = {}
    kind = "nf4-dq" if nested else "nf4"
    for name, at, data in coded_files.packed_parts(
        kind, "w", lambda a, b: weight[a:b], tuple(weight.shape), "float32", shares=shares
    ):
        assert at == len(found.setdefault(name, bytearray()))
        found[name] += bytes_of(data)
    return {name: torch.frombuffer(data, dtype=torch.uint8) for name, data in found.items()}


def test_the_largest_value_as_the_scale_gives_stocks_own_bytes() -> None:
    weight = torch.randn(96, 192, generator=torch.Generator().manual_seed(0))
    ours = parts_of(weight, nested=False, shares=())
    theirs = quantize(weight, "nf4")
    assert torch.equal(ours["w.absmax"].view(torch.float32), theirs.parts["absmax"])
    # Levels lie on decision boundaries with probability zero; the rounding of the quotient decides where they do not.
    assert (ours["w"] != theirs.parts["weight"].view(-1)).float().mean() < 1e-3


def test_chosen_scales_never_lose_more_than_the_largest_value_in_any_block() -> None:
    generator = torch.Generator().manual_seed(1)
    blocks = torch.randn(500, 64, generator=generator) * torch.rand(500, 1, generator=generator)
    blocks[0], blocks[1, :63] = 0, 0
    chosen, largest = coded_files.choose_scales(blocks), blocks.abs().amax(1)
    table = coded_files.levels()[0]

    def error(scales: Tensor) -> Tensor:
        safe = torch.where(scales == 0, torch.ones_like(scales), scales).unsqueeze(1)
        units = table[coded_files.nearest(blocks / safe, table)]
        return (units * scales.unsqueeze(1) - blocks).square().sum(1)

    # The search rounds to 65536 steps: a value within 2^-15 of a boundary may be counted on its other side.
    assert (error(chosen) <= error(largest) * (1 + 2**-10)).all()
    assert float(error(chosen).sum()) < 0.95 * float(error(largest).sum()) and chosen[0] == 0


def test_double_quantized_scales_are_read_back_as_they_were_counted() -> None:
    weight = torch.randn(100, 320, generator=torch.Generator().manual_seed(2))
    found = parts_of(weight, nested=True)
    scales = found["w.absmax"]
    state = json.loads(bytes(found[f"w.{coded_files.STATE}nf4"].tolist()))
    maxima = found["w.nested_absmax"].view(torch.float32).repeat_interleave(256)[: scales.numel()]
    read = found["w.nested_quant_map"].view(torch.float32)[scales.int()] * maxima + state["nested_offset"]
    blocks = weight.view(-1, 64)
    codes = torch.stack((found["w"] >> 4, found["w"] & 15), 1).view(-1, 64)
    values = found["w.quant_map"].view(torch.float32)[codes.int()] * read.unsqueeze(1)
    # Half a step between neighbouring levels, the widest of which are 0.3 apart, or what lies beyond the scale.
    beyond = (blocks.abs() - read.unsqueeze(1)).clamp_min(0)
    assert ((values - blocks).abs() <= 0.153 * read.unsqueeze(1) + beyond).all()


def test_the_share_of_a_change_that_survives_is_what_an_independent_count_finds(tmp_path: Path) -> None:
    base = pico.build("llama", tmp_path / "base")
    adapter = pico.adapter(base, tmp_path / "adapter")
    report = merge(base, tmp_path / "out", adapters={"a": adapter}, requantize="nf4", check=True)
    merge(base, tmp_path / "plain", requantize="nf4")
    merge(base, tmp_path / "dense", adapters={"a": adapter}, dtype="float32")
    assert report.check is not None
    models = [load_packed(tmp_path / name) for name in ("out", "plain")]
    old, new = tensors_of(base), tensors_of(tmp_path / "dense")
    for tensor in report.check.changed:
        path = tensor.tensor_name.removesuffix(".weight")
        change = new[tensor.tensor_name].double() - old[tensor.tensor_name].double()
        with_it, without = (read_with_bitsandbytes(model.get_submodule(path).weight) for model in models)
        share = float(((with_it - without) * change).sum() / change.square().sum())
        # bitsandbytes gives the values in bfloat16 (2^-9 of each); the report counts them in float32.
        assert tensor.survival == pytest.approx(share, abs=0.01)


def read_with_bitsandbytes(weight: Any) -> Tensor:
    return unpacked(weight).double()
