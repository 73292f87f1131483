"""Checkpoints in the formats of publishers, packed by plain torch: no line of trimtab or of a format's library.

`write(folder, form)` quantizes the linear layers of a checkpoint in place and returns the folder of the same model with the
dequantized weights, unquantized: what stock transformers and PEFT compute with it is the truth.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests import pico

Packed = tuple[dict[str, Tensor], Tensor]
LINEAR = ("_proj.weight", "linear.weight", "fc1.weight", "fc2.weight", "qkv.weight", "proj.weight")


def words(values: Tensor, bits: int) -> Tensor:
    """Return values [n, m] packed into int32 [n, m bits / 32], the first in the lowest bits."""
    each = 32 // bits
    wide = torch.nn.functional.pad(values.long(), (0, -values.shape[1] % each)).view(values.shape[0], -1, each)
    summed = (wide << (torch.arange(each) * bits)).sum(-1)
    return torch.where(summed >= 2**31, summed - 2**32, summed).to(torch.int32)


def rounded(weight: Tensor, bits: int, group: int, scale_dtype: torch.dtype, *, symmetric: bool):
    """Return (q [D_out, D_in], zero [D_out, groups], scale [D_out, groups], the dequantized weight)."""
    blocks = weight.float().view(weight.shape[0], -1, group)
    top = (1 << bits) - 1
    if symmetric:
        scale = (blocks.abs().amax(-1) / (top // 2)).clamp(min=1e-6).to(scale_dtype)
        zero = torch.full_like(scale, (top + 1) // 2, dtype=torch.int64)
    else:
        low, high = blocks.amin(-1).clamp(max=0), blocks.amax(-1).clamp(min=0)
        scale = ((high - low) / top).clamp(min=1e-6).to(scale_dtype)
        zero = (-low / scale.float()).round().clamp(0, top).long()
    q = (blocks / scale.float()[..., None] + zero[..., None]).round().clamp(0, top).long()
    exact = (q - zero[..., None]).double() * scale.double()[..., None]
    return q.view(weight.shape), zero, scale, exact.to(scale_dtype).view(weight.shape)


def ct(weight: Tensor, *, bits: int = 4, group: int = 32, symmetric: bool = True) -> Packed:
    q, zero, scale, dense = rounded(weight, bits, group or weight.shape[1], torch.bfloat16, symmetric=symmetric)
    parts = {"weight_packed": words(q, bits), "weight_scale": scale, "weight_shape": torch.tensor(weight.shape)}
    if not symmetric:
        parts["weight_zero_point"] = words(zero.t(), bits).t().contiguous()
    return parts, dense


def awq(weight: Tensor, *, group: int = 32) -> Packed:
    q, zero, scale, dense = rounded(weight, 4, group, torch.float16, symmetric=False)

    def in_order(values: Tensor) -> Tensor:
        return words(values.view(values.shape[0], -1, 8)[..., [0, 2, 4, 6, 1, 3, 5, 7]].flatten(1), 4)

    q, zero, scale = (one.t().contiguous() for one in (q, zero, scale))
    return {"qweight": in_order(q), "qzeros": in_order(zero), "scales": scale}, dense


def gptq(weight: Tensor, *, group: int = 32, ordered: bool = False) -> Packed:
    columns = weight.shape[1]
    order = torch.randperm(columns, generator=torch.Generator().manual_seed(columns)) if ordered else torch.arange(columns)
    q, zero, scale, dense = rounded(weight[:, order], 4, group, torch.float16, symmetric=False)
    back = order.argsort()
    parts = {
        "qweight": words(q[:, back], 4).t().contiguous(), "scales": scale.t().contiguous(),
        "g_idx": (back // group).to(torch.int32), "qzeros": words(zero.t(), 4) - 0x11111111,
    }  # fmt: skip
    return parts, dense[:, back].contiguous()


def fp8(weight: Tensor, *, block: tuple[int, int], name: str = "weight_scale_inv", dtype: torch.dtype = torch.bfloat16) -> Packed:
    rows, columns = weight.shape
    high, wide = block[0] or rows, block[1] or columns
    spread = torch.zeros(-(-rows // high) * high, -(-columns // wide) * wide)
    spread[:rows, :columns] = weight.float()
    blocks = spread.view(-(-rows // high), high, -(-columns // wide), wide)
    scale = (blocks.abs().amax((1, 3)) / 448).clamp(min=1e-6).to(dtype)
    whole = scale.repeat_interleave(high, 0)[:rows].repeat_interleave(wide, 1)[:, :columns]
    q = (weight.float() / whole.float()).to(torch.float8_e4m3fn)
    dense = (q.double() * whole.double()).to(dtype)
    return {"weight": q, name: scale.reshape(1) if block == (0, 0) else scale}, dense


def mxfp8(weight: Tensor) -> Packed:
    blocks = weight.float().view(weight.shape[0], -1, 32)
    exponent = (blocks.abs().amax(-1).clamp(min=1e-6) / 448).log2().ceil()
    q = (blocks / exponent.exp2()[..., None]).to(torch.float8_e4m3fn)
    dense = (q.double() * exponent.double().exp2()[..., None]).to(torch.bfloat16).view(weight.shape)
    return {"weight": q.view(weight.shape), "weight_scale": (exponent + 127).to(torch.uint8)}, dense


def float4(weight: Tensor, *, group: int, layout: str) -> Packed:
    """NVFP4 (group 16, layout ct or modelopt) and MXFP4 (group 32)."""
    rows = weight.shape[0]
    blocks = weight.float().view(rows, -1, group)
    largest = blocks.abs().amax(-1).clamp(min=1e-6) / 6
    if group == 32:
        exponent = largest.log2().ceil()
        side, factor = {"weight_scale": (exponent + 127).to(torch.uint8)}, exponent.exp2().double()
    else:
        whole = largest.max().reshape(1) / 448
        scale = (largest / whole).to(torch.float8_e4m3fn)
        if layout == "ct":
            side = {"weight_scale": scale, "weight_global_scale": 1 / whole}
            factor = (scale.double() / (1 / whole).double()).float().double()
        else:
            side = {"weight_scale": scale, "weight_scale_2": whole[0], "input_scale": torch.tensor(0.1)}
            factor = (scale.double() * whole.double()).float().double()
    values = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6], dtype=torch.float64)
    part = blocks.double() / factor[..., None]
    code = (part.abs()[..., None] - values).abs().argmin(-1)
    dense = (torch.copysign(values[code], part) * factor[..., None]).float().to(torch.bfloat16).view(weight.shape)
    nibbles = (code | (part < 0).long() << 3).view(rows, -1, 2)
    data = (nibbles[..., 0] | nibbles[..., 1] << 4).to(torch.uint8)
    return {"weight" if layout == "modelopt" else "weight_packed": data} | side, dense


def ct_config(bits: int, kind: str, **weights: Any) -> dict[str, Any]:
    scheme = {"targets": ["Linear"], "weights": {"num_bits": bits, "type": kind, **weights}}
    size = weights.get("group_size", 0)
    forms = {("int", size): "pack", (8, 0): "float", (8, 32): "mxfp8", (4, 16): "nvfp4-pack", (4, 32): "mxfp4-pack"}
    form = f"{forms['int' if kind == 'int' else bits, size]}-quantized"
    return {"quant_method": "compressed-tensors", "format": form, "config_groups": {"group_0": scheme}, "ignore": ["lm_head"]}


TIERS = ("resident", "stream", "disk", "host")
FAMILIES = ("llama", "qwen3_vl", "gemma4", "qwen3_moe", "gemma3n")
OFFICIAL_FP8 = {"quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "dynamic"}
# name -> (quantization_config, what packs a weight [D_out, D_in], the format's name in plans)
FORMS: dict[str, tuple[dict[str, Any], Callable[[Tensor], Packed], str]] = {
    "ct-int4": (ct_config(4, "int", strategy="group", group_size=32), ct, "int4-g32"),
    "ct-int4-zp": (
        ct_config(4, "int", strategy="group", group_size=32, symmetric=False),
        lambda weight: ct(weight, symmetric=False), "int4-g32-zp",
    ),
    "ct-int8": (ct_config(8, "int", strategy="group", group_size=32), lambda weight: ct(weight, bits=8), "int8-g32"),
    "ct-fp8": (
        ct_config(8, "float", strategy="channel"), lambda weight: fp8(weight, block=(1, 0), name="weight_scale"), "fp8-row",
    ),
    "ct-int4-g128": (
        ct_config(4, "int", strategy="group", group_size=128), lambda weight: ct(weight, group=128), "int4-g128",
    ),
    "ct-int4-row": (ct_config(4, "int", strategy="channel"), lambda weight: ct(weight, group=0), "int4-row"),
    "ct-int8-row": (ct_config(8, "int", strategy="channel"), lambda weight: ct(weight, bits=8, group=0), "int8-row"),
    "fp8-block": (OFFICIAL_FP8, lambda weight: fp8(weight, block=(128, 128)), "fp8-128x128"),
    "fp8-f32": (OFFICIAL_FP8, lambda weight: fp8(weight, block=(128, 128), dtype=torch.float32), "fp8-128x128"),
    "mxfp8": (ct_config(8, "float", strategy="group", group_size=32), mxfp8, "fp8-1x32"),
    "fp8-tensor": ({"quant_method": "fp8", "activation_scheme": "static"}, lambda weight: fp8(weight, block=(0, 0)), "fp8-tensor"),
    "nvfp4-ct": (
        ct_config(4, "float", strategy="tensor_group", group_size=16),
        lambda weight: float4(weight, group=16, layout="ct"), "nvfp4-g16",
    ),
    "nvfp4-modelopt": (
        {"quant_method": "modelopt", "quant_algo": "NVFP4"},
        lambda weight: float4(weight, group=16, layout="modelopt"), "nvfp4-g16",
    ),
    "mxfp4": (
        ct_config(4, "float", strategy="group", group_size=32), lambda weight: float4(weight, group=32, layout="ct"), "mxfp4-g32"
    ),
    "awq": ({"quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemm"}, awq, "int4-g32-zp"),
    "gptq": (
        {"quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": False}, partial(gptq, group=128), "int4-g128-zp",
    ),
    **{
        f"gptq-ordered{mark}": (
            {"quant_method": "gptq", "bits": 4, "group_size": group, "desc_act": True},
            partial(gptq, group=group, ordered=True), f"int4-g{group}-zp-idx",
        )
        for group, mark in ((32, ""), (64, "-g64"), (128, "-g128"))
    },
}  # fmt: skip
# Those whose blocks and groups are larger than the weights of the smallest models.
WIDE = ("ct-int4-g128", "fp8-block", "fp8-f32", "gptq", "gptq-ordered-g64", "gptq-ordered-g128")


@cache
def base_of(family: str, form: str) -> Path:
    """Return the checkpoint of a family that is written in a form; of a wide one, with a text model of 256 values."""
    if form not in WIDE:
        return pico.built(family)
    folder = Path(pico._cache_folder().name) / f"{family}-wide"
    if not folder.exists():
        with patch.dict(pico._TEXT, hidden_size=256, intermediate_size=512), patch.object(pico, "WIDTH", 256):
            pico.make_model(family).save_pretrained(folder)
    return folder


def write(source: Path, folder: Path, form: str) -> tuple[Path, Path]:
    """Write `source` quantized, and with the same values unquantized; returns both folders."""
    settings, pack, _ = FORMS[form]
    step = 256 if form in WIDE else 64
    small, dense = folder / "small", folder / "dense"
    for target in (small, dense):
        shutil.copytree(source, target, dirs_exist_ok=True)
    packed_tensors: dict[str, Tensor] = {}
    dense_tensors: dict[str, Tensor] = {}
    for file in source.glob("*.safetensors"):
        for name, tensor in load_file(file).items():
            packed_tensors[name] = dense_tensors[name] = tensor
            if not name.endswith(LINEAR) or tensor.dim() != 2 or tensor.shape[1] % step or tensor.shape[0] % 8:
                continue
            parts, values = pack(tensor)
            del packed_tensors[name]
            packed_tensors |= {name.removesuffix("weight") + part: value for part, value in parts.items()}
            dense_tensors[name] = values.to(tensor.dtype)
        save_file(packed_tensors, small / file.name, {"format": "pt"})
        save_file(dense_tensors, dense / file.name, {"format": "pt"})
    config = json.loads((small / "config.json").read_text())
    (small / "config.json").write_text(json.dumps(config | {"quantization_config": settings}))
    return small, dense
