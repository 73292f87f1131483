"""Are weights of each file format read as the format's own library reads them, and wrong files refused by name?"""

from __future__ import annotations

import json
import math
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from tests.golden.formats.make import FOLDER
from tests.quantized_files import words
from tests.raised import raised
from trimtab.checkpoint.folder import read_checkpoint
from trimtab.engine.formats import ggml, grouped, weights
from trimtab.engine.formats import packed as packing
from trimtab.engine.tiers.reader import PositionedFile, read_small
from trimtab.errors import CheckpointError, RequestError
from trimtab.formats import record
from trimtab.formats.packed import split_packed
from trimtab.formats.record import packed_parts, stored_format
from trimtab.merging.changes.dequantize import StoredRows, packed_rows
from trimtab.stock import second_reading

CONFIGS = json.loads((FOLDER / "cases.json").read_text())["configs"]
NAMES = {
    "ct-int4-g32": "int4-g32", "ct-int4-g128-zp-f16": "int4-g128-zp", "ct-int4-g32-f32": "int4-g32-f32",
    "ct-int4-row-odd": "int4-row", "ct-int8-g32-zp": "int8-g32-zp", "ct-int8-row": "int8-row", "ct-fp8-row": "fp8-row",
    "ct-fp8-tensor": "fp8-tensor", "ct-fp8-block": "fp8-128x128", "fp8-bf16": "fp8-128x128", "fp8-f32": "fp8-128x128",
    "awq-g32": "int4-g32-zp", "awq-g128": "int4-g128-zp", "gptq-g32": "int4-g32-zp", "gptq-ordered": "int4-g32-zp-idx",
    "gptq_v2-int8": "int8-row-zp", "awq-g64": "int4-g64-zp", "gptq-g64": "int4-g64-zp", "gptq-g128": "int4-g128-zp",
    "gptq-ordered-g64": "int4-g64-zp-idx", "gptq-ordered-g128": "int4-g128-zp-idx",
}  # fmt: skip
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def golden():
    return load_file(FOLDER / "golden.safetensors")


def stored(golden, case):
    return {name.partition("/")[2]: part for name, part in golden.items() if name.startswith(f"{case}/")}


def written(folder: Path, parts: dict[str, torch.Tensor], quantization: dict[str, Any] | None):
    folder.mkdir(exist_ok=True)
    config = {"model_type": "llama"} | ({} if quantization is None else {"quantization_config": quantization})
    (folder / "config.json").write_text(json.dumps(config))
    save_file({f"m.x.{name}": part.contiguous() for name, part in parts.items()}, folder / "model.safetensors")
    return read_checkpoint(folder)


def read(checkpoint, dtype=torch.bfloat16):
    entry = split_packed(checkpoint)[1]["m.x.weight"]
    return entry, weights.prequantized(entry, read_small(entry.read_parts), dtype)


@pytest.mark.parametrize("case", CONFIGS)
def test_a_weight_is_what_its_own_library_makes_of_it_and_so_is_the_second_reading(golden, case, tmp_path, monkeypatch):
    parts = stored(golden, case)
    expected = parts.pop("expected")
    entry, packed = read(written(tmp_path, parts, CONFIGS[case]), dtype=expected.dtype)
    assert entry.kind == NAMES[case] and entry.shape == tuple(expected.shape)
    whole = weights.dequantize(packed)
    assert whole.dtype == expected.dtype and torch.equal(whole, expected)
    monkeypatch.setattr(second_reading, "PIECE_VALUES", 300)
    again = second_reading.second_reading(entry, read_small(entry.read_parts), expected.dtype)
    assert again.dtype == expected.dtype and torch.equal(again, expected)
    for start, stop in ((0, 1), (3, 8), (0, expected.shape[0])):
        assert torch.equal(weights.dequantize_rows(packed, start, stop, CPU), expected[start:stop])
    nbytes = {name: part.numel() * part.element_size() for name, part in packed.parts.items()}
    assert nbytes == packed_parts(entry.shape, entry.kind, "bfloat16")
    # A product is torch's over that weight.
    x = torch.randn(3, expected.shape[1], dtype=torch.bfloat16)
    y = weights.shell(packed, None, torch.bfloat16)(x)
    assert torch.equal(y, torch.nn.functional.linear(x, expected.to(torch.bfloat16)))


@pytest.mark.parametrize("case", CONFIGS)
def test_a_merge_reads_the_weight_without_rounding(golden, case, tmp_path):
    parts = stored(golden, case)
    expected = parts.pop("expected")
    entry, _ = read(written(tmp_path, parts, CONFIGS[case]))
    with ExitStack() as stack:
        opened = PositionedFile(tmp_path / "model.safetensors")
        stack.callback(opened.close)
        rows = packed_rows(entry, lambda part: opened)(2, 7)
    # One rounding from there to what the library makes; in float32 nothing is lost but bits below its own type.
    assert rows.dtype == torch.float32 and torch.equal(rows.to(expected.dtype), expected[2:7])


@pytest.mark.parametrize("order", [("zp", "even"), ("even", "zp")])
def test_the_zero_points_of_a_weight_are_those_of_a_config_group_that_fits_it(golden, order, tmp_path):
    declared = CONFIGS["ct-int8-g32-zp"]["config_groups"]["group_0"]["weights"]
    groups = {"zp": {"weights": declared}, "even": {"weights": declared | {"symmetric": True}}}
    parts = stored(golden, "ct-int8-g32-zp")
    expected, zero = parts.pop("expected"), parts["weight_zero_point"]
    config = CONFIGS["ct-int8-g32-zp"] | {"config_groups": {name: groups[name] for name in order}}
    assert torch.equal(weights.dequantize(read(written(tmp_path / "a", parts, config))[1]), expected)
    entry, even = read(written(tmp_path / "b", {name: part for name, part in parts.items() if part is not zero}, config))
    assert entry.kind == "int8-g32" and not torch.equal(weights.dequantize(even), expected)


def test_a_zero_point_of_0_borrows_from_its_neighbour_in_gptq(golden, tmp_path):
    parts = stored(golden, "gptq-g32")
    parts.pop("expected")
    zero = torch.arange(3 * 32).view(3, 32) * 5 % 16  # each of the 16, many of them 0
    parts["qzeros"] = words(zero, 4) - 0x11111111
    entry, packed = read(written(tmp_path, parts, CONFIGS["gptq-g32"]))
    assert torch.equal(packed.parts["zero"].long(), zero.t())
    again = second_reading.second_reading(entry, read_small(entry.read_parts), torch.bfloat16)
    assert torch.equal(again, weights.dequantize(packed))


def test_awq_of_an_odd_number_of_inputs_is_refused_by_name(tmp_path):
    parts = {"qweight": words(torch.zeros(5, 8), 4), "qzeros": words(torch.zeros(1, 8), 4), "scales": torch.ones(1, 8).half()}
    config = {"quant_method": "awq", "bits": 4, "group_size": -1, "zero_point": True, "version": "gemm"}
    error = raised(CheckpointError, lambda: read(written(tmp_path, parts, config)), match="inputs come in pairs")
    assert error.tensor_name.endswith("weight")


@pytest.mark.parametrize("case", ["ct-int4-row-odd", "ct-fp8-block", "gptq-ordered", "ct-int8-row"])
def test_a_weight_dequantized_a_few_rows_at_a_time_is_the_same(golden, case, tmp_path, monkeypatch):
    monkeypatch.setattr(record, "DEQUANTIZED_VALUES", 100)
    parts = stored(golden, case)
    expected = parts.pop("expected")
    _, packed = read(written(tmp_path, parts, CONFIGS[case]), dtype=expected.dtype)
    assert torch.equal(weights.dequantize(packed), expected)
    place = torch.zeros(expected.shape[0], expected.shape[1] + 3, dtype=expected.dtype)
    weights.dequantize(packed, place[:, :-3])
    assert torch.equal(place[:, :-3], expected) and not place[:, -3:].any()


@pytest.mark.parametrize(("block", "shape"), [((1, 64), (4, 160)), ((32, 999_999), (64, 48)), ((128, 32), (40, 96))])
def test_blocks_of_any_sides_are_read_and_counted(block, shape, tmp_path):
    rows, columns = shape
    scale = torch.rand(-(-rows // block[0]), -(-columns // block[1])) + 0.5
    q = (torch.randn(shape) * 50).to(torch.float8_e4m3fn)
    config = {"quant_method": "fp8", "weight_block_size": list(block)}
    entry, packed = read(written(tmp_path, {"weight": q, "weight_scale_inv": scale}, config))
    rows_of, columns_of = (torch.arange(side) // size for side, size in zip(shape, block, strict=True))
    exact = q.double() * scale.double()[rows_of][:, columns_of]
    assert torch.equal(weights.dequantize(packed), exact.to(torch.float32).to(torch.bfloat16))
    assert packed_parts(shape, entry.kind, "bfloat16") == {"weight": rows * columns, "scale": 4 * scale.numel()}


@given(
    rows=st.integers(1, 20), groups=st.integers(1, 4), size=st.sampled_from([8, 24, 32]), bits=st.sampled_from([4, 8]),
    seed=st.integers(0, 10**6), has_order=st.booleans(),
)  # fmt: skip
def test_integers_are_the_formula_in_float64(tmp_path_factory, rows, groups, size, bits, seed, has_order):
    """Releases of compressed-tensors up to 0.18 write the group of each input (`actorder` "group")."""
    generator = torch.Generator().manual_seed(seed)
    columns = groups * size
    q = torch.randint(0, 1 << bits, (rows, columns), generator=generator)
    scale = (torch.rand(rows, groups, generator=generator) + 0.1).to(torch.bfloat16)
    parts = {"weight_packed": words(q, bits), "weight_scale": scale, "weight_shape": torch.tensor([rows, columns])}
    group_of = (torch.randperm(columns, generator=generator) if has_order else torch.arange(columns)) // size
    parts |= {"weight_g_idx": group_of.int()} if has_order else {}
    declared = {"num_bits": bits, "type": "int", "strategy": "group", "group_size": size, "symmetric": True}
    config = {"quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": {"g": {"weights": declared}}}
    entry, found = read(written(tmp_path_factory.mktemp("w"), parts, config))
    exact = (q.double() - (1 << (bits - 1))) * scale.double()[:, group_of]
    # A product of at most 8 and 8 significant bits is exact in float32: one rounding to bfloat16, and nothing else.
    assert torch.equal(whole := weights.dequantize(found), exact.float().to(torch.bfloat16))
    assert torch.equal(second_reading.second_reading(entry, read_small(entry.read_parts), torch.bfloat16), whole)


CT = CONFIGS["ct-int4-g32"]


def group(**changes):
    return CT | {"config_groups": {"group_0": CT["config_groups"]["group_0"] | changes}}


def with_weights(**changes):
    return group(weights=CT["config_groups"]["group_0"]["weights"] | changes)


@pytest.mark.parametrize(("config", "words"), [
    (None, "no quantization_config"), ({"quant_method": "vptq"}, "'vptq'"),
    ({"quant_method": "compressed-tensors"}, "config_groups"), (CT | {"config_groups": {}}, "config_groups"),
    (CT | {"config_groups": {str(n): {} for n in range(100)}}, "config_groups"),
    (CT | {"transform_config": {"R1": 1}}, "rotated"), (CT | {"sparsity_config": {"format": "sparse-24-bitmask"}}, "sparse"),
    (group(format="mxfp6-pack-quantized"), "MXFP6"), ({"quant_method": "modelopt", "quant_algo": "INT4_AWQ"}, "INT4_AWQ"),
    (group(input_activations={"type": "int", "num_bits": 8}), "activations"), (with_weights(num_bits=8), "in 8 bits"),
    (with_weights(group_size=16), "no config group declares"), (with_weights(group_size=True), "no config group declares"),
    (with_weights(group_size=0), "no config group declares"), (with_weights(type="float"), "declares no type int"),
    ({"quant_method": "awq", "bits": 4, "version": "gemv"}, "gemv"), ({"quant_method": "awq", "bits": 3}, "3 bits"),
    ({"quant_method": "gptq", "bits": 4, "checkpoint_format": "marlin"}, "marlin"),
    ({"quant_method": "gptq", "bits": True}, "bits a weight"),
    ({"quant_method": "gptq", "bits": 4, "dynamic": {"-:lm_head": {}}}, "dynamic"),
    ({"quant_method": "gptq", "bits": 4, "is_marlin_format": True}, "marlin"),
])  # fmt: skip
def test_a_config_that_is_not_read_is_refused_by_name(golden, config, words, tmp_path):
    parts = stored(golden, "ct-int4-g32")
    parts.pop("expected")
    with pytest.raises(CheckpointError, match=words):
        split_packed(written(tmp_path, parts, config))


def without(*names):
    return lambda parts: [parts.pop(name) for name in names]


def changed(name, change):
    return lambda parts: parts.update({name: change(parts[name])})


FLOAT8 = {"weight": torch.ones(4, 4).to(torch.float8_e4m3fn), "weight_scale": torch.ones(())}


def more(tensors):
    return lambda parts: parts.update({f"y.{name}": tensor for name, tensor in tensors.items()})


@pytest.mark.parametrize(("case", "change", "words"), [
    *(("ct-int4-g32", without(name), f"has no {name}") for name in ("weight_scale", "weight_shape")),
    ("ct-int4-g32", changed("weight_shape", lambda t: t * 2), "its shape"),
    *(("ct-int4-g32", changed("weight_shape", one), "shape is") for one in (lambda t: t - t, lambda t: -t, lambda t: t[:1])),
    ("ct-int4-g32", changed("weight_packed", lambda t: t[:, :-1]), "in 4 bits"),
    ("ct-int4-g32", changed("weight_packed", lambda t: t.to(torch.uint8)), "NVFP4"),
    *(("ct-int4-g32", changed("weight_scale", one), "scale is") for one in (lambda t: t[:-1], lambda t: t.to(torch.int8))),
    ("ct-int4-g32", changed("weight_scale", lambda t: t[:, :1]), "1 groups a row of 96, which no config group declares"),
    ("ct-int4-g128-zp-f16", changed("weight_zero_point", lambda t: t[:-1]), "weight_zero_point is"),
    *((case, without("weight_zero_point"), "no weight_zero_point.*json") for case in ("ct-int4-g128-zp-f16", "ct-int8-g32-zp")),
    ("ct-int4-g32", lambda parts: parts.update({"weight_zero_point": words(torch.ones(3, 24), 4).t()}), "symmetric true"),
    ("ct-int4-g32", lambda parts: parts.update({"weight_g_idx": torch.zeros(96)}), "weight_g_idx is float32"),
    ("ct-fp8-row", lambda parts: parts.update({"weight_zero_point": torch.ones(20, 1)}), "weight_zero_point: belongs to"),
    ("ct-fp8-row", changed("weight", lambda t: t.to(torch.float8_e5m2)), "float8_e5m2"),
    ("ct-fp8-row", without("weight_scale"), "needs one of"), ("awq-g32", without("qzeros"), "has no qzeros"),
    ("ct-fp8-row", changed("weight_scale", lambda t: t[:7]), "no scale of a weight"),
    ("fp8-bf16", changed("weight", lambda t: t.view(1, *t.shape)), "not a matrix"),
    ("awq-g32", changed("scales", lambda t: t[:1]), "groups"), ("gptq-g32", changed("g_idx", lambda t: t[:-1]), "g_idx is"),
    ("awq-g32", changed("qweight", lambda t: t[:, :-1]), "qweight is"),
    ("gptq-ordered", without("g_idx"), "no g_idx, but config.json says that inputs are in another order"),
    ("gptq-g32", changed("qzeros", lambda t: t.to(torch.int64)), "qzeros are"),
    ("awq-g32", lambda parts: parts.update({"act.scales": torch.ones(4)}), "not read"),
    ("fp8-bf16", lambda parts: parts.update({"y.weight": torch.ones(4, 4, dtype=torch.int8)}), "without its quantization"),
    ("ct-int4-g32", lambda parts: parts.update({"y.weight_scale": torch.ones(4)}), "not read"),
    ("ct-int4-g32", more(FLOAT8), "y.weight: is fp8-tensor, which config.json does not declare"),
    *((case, more({"weight.absmax": torch.ones(4)}), "absmax: belongs to") for case in ("ct-int4-g32", "awq-g32", "fp8-bf16")),
    *((case, more({"scales": torch.ones(4)}), "scales: belongs to") for case in ("ct-int4-g32", "awq-g32")),
    ("ct-int4-g32", lambda parts: parts.update({"y": torch.ones(4).to(torch.float8_e4m3fn)}), "float8 needs one|not a matrix"),
])  # fmt: skip
def test_wrong_file_tensors_are_refused_by_name(golden, case, change, words, tmp_path):
    parts = stored(golden, case)
    parts.pop("expected")
    change(parts)
    with pytest.raises(CheckpointError, match=words):
        split_packed(written(tmp_path, parts, CONFIGS[case]))


@pytest.mark.parametrize(("case", "change", "words"), [
    ("ct-int4-g32", changed("weight_scale", lambda t: t.fill_(math.nan)), "not finite"),
    ("fp8-f32", changed("weight_scale_inv", lambda t: t.fill_(math.inf)), "not finite"),
    ("gptq-g32", changed("g_idx", lambda t: t.flip(0)), "desc_act"),
    *(("gptq-ordered", changed("g_idx", one), "of 32 inputs") for one in (lambda t: t + 9, lambda t: t - 9, lambda t: t // 2)),
])  # fmt: skip
def test_wrong_values_are_refused_when_they_are_read(golden, case, change, words, tmp_path):
    parts = stored(golden, case)
    parts.pop("expected")
    change(parts)
    error = raised(CheckpointError, lambda: read(written(tmp_path, parts, CONFIGS[case])), match=words)
    assert Path(error.path).is_relative_to(tmp_path) and error.tensor_name


@pytest.mark.parametrize("name", ["int4-g0", "int5-g32", "int4-g32-zp-zp", "fp8-0x1", "fp8-", "int4", "nf4-g32", "int4-g1234567"])
def test_a_name_that_is_no_format_is_an_error(name):
    with pytest.raises(RequestError, match="is no format of weights"):
        stored_format(name)


def test_rows_of_a_stored_weight_may_be_overwritten():
    """A merge adds to them, and reads them twice where it packs them again. GGUF's f32 is read in place."""
    values = torch.randn(5, 64)
    packed = packing.Packed("f32", (5, 64), torch.float32, {"weight": values.contiguous().view(torch.uint8)}, {})
    rows = object.__new__(StoredRows)
    rows.shape, rows._packed = (5, 64), packed
    found = rows(1, 4)
    assert torch.equal(found, values[1:4])
    found.zero_()
    assert torch.equal(rows(1, 4), values[1:4])


@pytest.mark.parametrize("offset", (0, 1, 2))
@pytest.mark.parametrize("rows, blocks", ((1, 1), (1, 2), (3, 1)))
@pytest.mark.parametrize("kind", (*second_reading.GGML_NUMBERS, *second_reading.GGML_PLAIN))
def test_rows_of_one_block_and_bytes_at_an_odd_place_are_read(kind, rows, blocks, offset):
    generator = torch.Generator().manual_seed(7)
    if kind in second_reading.GGML_PLAIN:
        wanted = torch.randn(rows, 32 * blocks, generator=generator).to(second_reading.GGML_PLAIN[kind])
        whole = wanted.view(torch.uint8)
    else:
        dequant = pytest.importorskip("transformers.integrations.gguf.dequant", reason="transformers 5.23.0 has it")
        whole = torch.randint(0, 256, (rows * blocks, record.GGML_BLOCKS[kind][1]), dtype=torch.uint8, generator=generator)
        for start in ggml.SCALES[kind]:
            whole[:, start + 1] = 0x2C  # finite
        wanted = dequant.dequantize(whole.flatten(), second_reading.GGML_NUMBERS[kind], torch.float32).view(rows, -1)
    held = torch.cat((torch.zeros(offset, dtype=torch.uint8), whole.flatten()))[offset:].view(rows, -1)
    assert torch.equal(ggml.values(kind, ggml.arranged(kind, held)), wanted.float())


def test_zero_points_of_eight_outputs_are_read():
    zero = torch.tensor([[0x76543210, 0x0F1E2D3C]], dtype=torch.int32)  # [D_out / 8, groups]
    parts = {"weight": torch.zeros(8, 8, dtype=torch.int32), "weight_scale": torch.ones(8, 2), "weight_zero_point": zero}
    entry = record.PackedEntry("m.x.weight", "int4-g32-zp", (8, 64), {}, {}, {"layout": "packed"})
    found = grouped.read(entry, parts, torch.bfloat16).parts["zero"]
    wanted = [[int(zero[0, group]) >> 4 * row & 15 for group in range(2)] for row in range(8)]
    assert found.tolist() == wanted
