"""Are Gemma's mobile weights, and 4-bit and 8-bit floats in groups, what their own libraries make of them?"""

import json
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file

from tests.engine.formats.test_formats import FLOAT8, changed, more, read, without, written
from tests.golden.formats.make_small import FOLDER
from trimtab.engine.formats import weights
from trimtab.engine.tiers.reader import read_small
from trimtab.errors import CheckpointError
from trimtab.formats import record
from trimtab.formats.packed import split_packed
from trimtab.formats.record import packed_parts
from trimtab.stock.second_reading import second_reading

CONFIGS = json.loads((FOLDER / "small.json").read_text())["configs"]
NAMES = {
    "mobile2": "mobile2-row-a8", "mobile4": "mobile4-row-a8", "mobile8": "mobile8-row-a8", "mobile2-table": "mobile2-row",
    "mobile4-table": "mobile4-g16", "nvfp4": "nvfp4-g16", "mxfp4": "mxfp4-g32", "mxfp8": "fp8-1x32", "modelopt": "nvfp4-g16",
}  # fmt: skip
CPU = torch.device("cpu")
DTYPES = ("bfloat16", "float16", "float32")


@pytest.fixture(scope="module")
def golden():
    return load_file(FOLDER / "small.safetensors")


def case_of(golden, case):
    """Return (file tensors, what the library makes of them)."""
    mine = {name.removeprefix(f"{case}/"): tensor for name, tensor in golden.items() if name.startswith(f"{case}/")}
    made = {name.removeprefix("expected/"): tensor for name, tensor in mine.items() if name.startswith("expected/")}
    return {name: tensor for name, tensor in mine.items() if not name.startswith("expected/")}, made


@pytest.mark.parametrize("case", CONFIGS)
def test_a_weight_is_what_its_own_library_makes_of_it(golden, case, tmp_path):
    stored, made = case_of(golden, case)
    checkpoint = written(tmp_path, stored, CONFIGS[case])
    for name in DTYPES if "mobile" in case else ("bfloat16",):
        dtype, expected = getattr(torch, name), made[name]
        entry, packed = read(checkpoint, dtype)
        assert entry.kind == NAMES[case] and entry.shape == tuple(expected.shape)
        whole = weights.dequantize(packed)
        assert whole.dtype == dtype and torch.equal(whole, expected)
        assert torch.equal(weights.dequantize_rows(packed, 2, 7, CPU), expected[2:7])
        if "mobile" not in case:  # transformers computes with those as they are
            assert torch.equal(second_reading(entry, read_small(entry.read_parts), dtype), expected)
    nbytes = {name: part.numel() * part.element_size() for name, part in packed.parts.items()}
    assert nbytes == packed_parts(entry.shape, entry.kind, "bfloat16")


@pytest.mark.parametrize("case", [case for case in CONFIGS if case.startswith("mobile")])
@pytest.mark.parametrize("name", DTYPES)
def test_a_mobile_layer_answers_as_transformers_does(golden, case, name, tmp_path, monkeypatch):
    stored, made = case_of(golden, case)
    dtype = getattr(torch, name)
    _, packed = read(written(tmp_path, stored, CONFIGS[case]), dtype)
    if "table" in case:
        rows = weights.dequantize_at(packed, torch.tensor([3, 0, 3])) * 7.3
        assert torch.equal(rows, made[f"{name}/rows"])
        return
    x = made["x"].to(dtype)
    assert not torch.equal(made[f"{name}/plain"], made[f"{name}/rounded"])
    assert torch.equal(weights.shell(packed, None, dtype)(x), made[f"{name}/rounded"])
    with monkeypatch.context() as patch:  # a large weight is computed a few rows at a time, in float32 with sums in another order
        patch.setattr(record, "MOBILE_PIECE_VALUES", 100)
        by_pieces = weights.shell(packed, None, dtype)(x)
    assert torch.equal(by_pieces, made[f"{name}/rounded"]) or name == "float32"
    kept = weights.unpacked_shell(packed, weights.dequantize(packed), None)
    assert torch.equal(kept(x), made[f"{name}/rounded"])
    stored |= {"input_activation_scale": torch.zeros(()), "output_activation_scale": torch.zeros(())}
    _, packed = read(written(tmp_path / "plain", stored, CONFIGS[case]), dtype)
    plain, off = weights.shell(packed, None, dtype)(x), 0.0
    if name == "float32":  # processors add in other orders: two sums, each off by this part of its terms' sizes a term
        off = 2 * x.shape[1] * 2**-24 * torch.nn.functional.linear(x.abs(), made[name].abs())
    assert bool(((plain - made[f"{name}/plain"]).abs() <= off).all())


@given(
    rows=st.integers(1, 9), groups=st.integers(1, 4), nv=st.booleans(), seed=st.integers(0, 10**6),
    whole=st.floats(2**-10, 2**13, width=32),
)  # fmt: skip
def test_4_bit_floats_are_the_formula_in_float64(tmp_path_factory, rows, groups, nv, seed, whole):
    generator = torch.Generator().manual_seed(seed)
    size = 16 if nv else 32
    data = torch.randint(0, 256, (rows, groups * size // 2), generator=generator).to(torch.uint8)
    values = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6], dtype=torch.float64)
    codes = torch.stack((data & 15, data >> 4), -1).view(rows, -1).long()
    exact = torch.where(codes > 7, -values[codes & 7], values[codes & 7])
    exponents = torch.randint(107, 147, (rows, groups), generator=generator).to(torch.uint8)
    stored, factor = {"weight_packed": data, "weight_scale": exponents}, (exponents.double() - 127).exp2()
    if nv:
        scale = (torch.rand(rows, groups, generator=generator) * 400).to(torch.float8_e4m3fn)
        stored |= {"weight_scale": scale, "weight_global_scale": torch.tensor([whole])}
        factor = (scale.double() / torch.tensor(whole).double()).float().double()
    weights_of = {"num_bits": 4, "type": "float", "group_size": size}
    form = f"{'nv' if nv else 'mx'}fp4-pack-quantized"
    config = {"quant_method": "compressed-tensors", "format": form, "config_groups": {"g": {"weights": weights_of}}}
    _, packed = read(written(tmp_path_factory.mktemp("w"), stored, config))
    expected = (exact * factor.repeat_interleave(size, 1)).float().to(torch.bfloat16)
    assert torch.equal(weights.dequantize(packed), expected)


@pytest.mark.parametrize(("pattern", "words"), [
    ("(", "no regular expression|not a regular expression"), ("(a)\\1", "back-reference"), ("a" * 200_000, "characters"),
])  # fmt: skip
def test_patterns_of_bits_are_read_in_bounded_time(golden, pattern, words, tmp_path):
    stored, _ = case_of(golden, "mobile4")
    with pytest.raises(CheckpointError, match=words):
        split_packed(written(tmp_path, stored, CONFIGS["mobile4"] | {"module_quant_configs": {pattern: {"num_bits": 2}}}))


@pytest.mark.parametrize(("patterns", "bits"), [
    ({"x": 4}, 4), ({"^x": 2, "m": 4}, 4), ({"x$": 2, r"^m\.": 4}, 4), ({r"m\.x": 4, "m": 2}, 4), ({}, 4), ({"y": 2}, 4),
    ({"m": None}, 4),
])  # fmt: skip
def test_bits_are_those_of_the_pattern_that_is_found_first(golden, patterns, bits, tmp_path):
    stored, _ = case_of(golden, "mobile4")
    listed = {pattern: {} if bits is None else {"num_bits": bits} for pattern, bits in patterns.items()}
    config = CONFIGS["mobile4"] | {"num_bits": 4, "module_quant_configs": listed}
    assert split_packed(written(tmp_path, stored, config))[1]["m.x.weight"].kind == f"mobile{bits}-row-a8"


@pytest.mark.parametrize(("case", "change", "words"), [
    ("mobile4", without("weight_scale"), "without its quantization|not read"),
    ("mobile4", without("weight"), "has no weight"),
    ("mobile4", changed("weight", lambda t: t.to(torch.int8)), "weight is int8"),
    ("mobile8", changed("weight", lambda t: t.view(1, *t.shape)), "weight is int8"),
    ("mobile4", changed("weight_scale", lambda t: t.bfloat16()), "weight_scale is"),
    ("mobile4", changed("weight_scale", lambda t: t.expand(-1, 3)), "weight_scale is"),
    ("mobile4", changed("weight_scale", lambda t: t[1:]), "weight_scale is"),
    ("mobile4", changed("input_activation_scale", lambda t: t.expand(2)), "input_activation_scale is"),
    ("mobile4-table", without("embedding_scale"), "has no embedding_scale"),
    ("mobile4-table", changed("embedding_scale", lambda t: t[:, :0]), "embedding_scale is"),
    ("mobile4-table", changed("embedding_scale", lambda t: t.repeat(1, 3)[:, :5]), "embedding_scale is"),
    ("nvfp4", without("weight_scale"), "has no weight_scale"),
    ("nvfp4", without("weight_global_scale"), "has no weight_global_scale"),
    ("nvfp4", changed("weight_scale", lambda t: t[:, :-1]), "weight_scale is"),
    ("nvfp4", changed("weight_global_scale", lambda t: t.double()), "weight_global_scale is"),
    ("mxfp4", changed("weight_scale", lambda t: t[:, :-1]), "weight_scale is"),
    ("mxfp4", changed("weight_packed", lambda t: t[0]), "not a matrix"),
    ("mxfp8", changed("weight_scale", lambda t: t[:, :-1]), "its scale is uint8"),
    ("modelopt", without("weight_scale_2"), "has no weight_scale_2"),
    *((case, more(FLOAT8), "y.weight: is fp8-tensor, which config.json does not declare") for case in ("nvfp4", "modelopt")),
    ("modelopt", lambda parts: parts.update({"pre_quant_scale": torch.ones(64)}), "pre_quant_scale"),
])  # fmt: skip
def test_wrong_file_tensors_are_refused_by_name(golden, case, change, words, tmp_path):
    stored, _ = case_of(golden, case)
    change(stored)
    with pytest.raises(CheckpointError, match=words):
        split_packed(written(tmp_path, stored, CONFIGS[case]))


@pytest.mark.parametrize(("case", "name"), [
    ("mobile4", "weight_scale"), ("mobile4", "output_activation_scale"), ("mobile2-table", "embedding_scale"),
    ("nvfp4", "weight_global_scale"), ("nvfp4", "weight_scale"), ("modelopt", "weight_scale_2"), ("mxfp4", "weight_scale"),
    ("mxfp8", "weight_scale"),
])  # fmt: skip
def test_scales_that_are_not_finite_are_refused(golden, case, name, tmp_path):
    stored, _ = case_of(golden, case)
    kind = stored[name].dtype
    stored[name] = torch.full_like(stored[name].float(), 255 if kind == torch.uint8 else math.nan).to(kind)
    with pytest.raises(CheckpointError, match="not finite"):
        read(written(tmp_path, stored, CONFIGS[case]))
