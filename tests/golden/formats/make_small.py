"""Writes the golden weights of Gemma's mobile files and of 4-bit and 8-bit floats with scales of groups.

    python -m tests.golden.formats.make_small    (with transformers 5.23 and the libraries of locks/formats.txt)

small.safetensors has, for each case of `small.json`, `CASE/part` and what the format's own library makes of it: of mobile files
transformers' layers in three types, of NVFP4, MXFP4 and MXFP8 compressed-tensors. Of ModelOpt's layout it is the formula of its
nvfp4_tensor.py in float64, with the roundings of float32 and bfloat16: the package itself did not run. No line of trimtab runs.
"""

from __future__ import annotations

import json
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

FOLDER = Path(__file__).parent
DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
Made = tuple[dict[str, Tensor], dict[str, Tensor], dict[str, Any]]


def some(*shape: int, low: int = 0, high: int = 256, dtype: torch.dtype = torch.uint8) -> Tensor:
    return torch.randint(low, high, shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)


def mobile(rows: int, columns: int, bits: int, groups: int = 0) -> Made:
    """A linear layer, or with groups a table: its weight, and of a layer its answer to inputs with and without calibration."""
    from transformers.integrations.gemma_quant import QuantizedEmbedding, QuantizedLinear

    generator = torch.Generator().manual_seed(bits + rows)
    data = some(rows, columns, low=-128, high=128, dtype=torch.int8) if bits == 8 else some(rows, columns * bits // 8)
    scale = torch.rand(rows, groups or 1, generator=generator) * 0.05 + 1e-3
    config = {"quant_method": "gemma", "num_bits": bits, "quantize_embeddings": True}
    made: dict[str, Tensor] = {}
    if groups:
        stored = {"embedding_quantized": data, "embedding_scale": scale}
        for name, dtype in DTYPES.items():
            table = QuantizedEmbedding(rows, columns, dtype, 7.3, bits)
            table.embedding_quantized.data, table.embedding_scale.data = data, scale
            made[name], made[f"{name}/rows"] = table.weight, table(torch.tensor([3, 0, 3]))
        return stored, made, config
    activation = {"input_activation_scale": torch.tensor(0.021), "output_activation_scale": torch.tensor(0.4)}
    stored = {"weight": data, "weight_scale": scale} | activation
    x = torch.randn(3, columns, generator=generator)
    made["x"] = x
    for name, dtype in DTYPES.items():
        layer = QuantizedLinear(columns, rows, num_bits=bits)
        layer.weight.data, layer.weight_scale.data = data, scale
        made[name], made[f"{name}/plain"] = layer._dequantize_weights(dtype), layer(x.to(dtype)).detach()
        layer.input_activation_scale.data, layer.output_activation_scale.data = activation.values()
        made[f"{name}/rounded"] = layer(x.to(dtype)).detach()
    return stored, made, config


def compressed(rows: int, columns: int, form: str, **weights: Any) -> Made:
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme

    args = QuantizationArgs(**weights)
    scheme = QuantizationScheme(targets=["Linear"], weights=args, format=form)
    generator = torch.Generator().manual_seed(rows)
    weight = torch.randn(rows, columns, generator=generator) * 0.1
    groups = weight.view(rows, -1, args.group_size).abs().amax(-1)
    state = {"weight": weight, "weight_scale": groups / (6 if args.num_bits == 4 else 448)}
    if args.group_size == 16:
        state["weight_global_scale"] = (448 * 6 / weight.abs().max()).reshape(1)
        state["weight_scale"] = (groups / 6 * state["weight_global_scale"]).to(torch.float8_e4m3fn).float()
    compressor = BaseCompressor.get_value_from_registry(form)
    stored = compressor.compress(state, scheme)
    config = {
        "quant_method": "compressed-tensors", "format": form,
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": json.loads(args.model_dump_json()), "format": form}},
    }  # fmt: skip
    return stored, {"bfloat16": compressor.decompress(dict(stored), scheme)["weight"].to(torch.bfloat16)}, config


def modelopt(rows: int, columns: int) -> Made:
    generator = torch.Generator().manual_seed(rows)
    data = some(rows, columns // 2)
    scale = (torch.rand(rows, columns // 16, generator=generator) * 440).to(torch.float8_e4m3fn)
    whole = torch.tensor(1.7e-4)
    codes = torch.stack((data & 15, data >> 4), -1).view(rows, columns).long()
    values = torch.tensor([*VALUES, *(-value for value in VALUES)], dtype=torch.float64)[codes]
    factors = (scale.double() * whole.double()).float().double().repeat_interleave(16, 1)
    stored = {"weight": data, "weight_scale": scale, "weight_scale_2": whole, "input_scale": torch.tensor(0.01)}
    config = {"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": ["lm_head"]}
    return stored, {"bfloat16": (values * factors).float().to(torch.bfloat16)}, config


FLOAT4 = {"num_bits": 4, "type": "float", "symmetric": True}
MX = {"strategy": "group", "group_size": 32, "scale_dtype": "torch.uint8"}
CASES = {
    "mobile2": lambda: mobile(12, 64, 2), "mobile4": lambda: mobile(10, 48, 4), "mobile8": lambda: mobile(9, 20, 8),
    "mobile2-table": lambda: mobile(14, 32, 2, groups=1), "mobile4-table": lambda: mobile(11, 48, 4, groups=3),
    "nvfp4": lambda: compressed(24, 96, "nvfp4-pack-quantized", strategy="tensor_group", group_size=16, **FLOAT4),
    "mxfp4": lambda: compressed(20, 96, "mxfp4-pack-quantized", **MX, **FLOAT4),
    "mxfp8": lambda: compressed(16, 64, "mxfp8-quantized", **MX, **(FLOAT4 | {"num_bits": 8})),
    "modelopt": lambda: modelopt(18, 64),
}  # fmt: skip


def main() -> None:
    tensors: dict[str, Tensor] = {}
    configs: dict[str, Any] = {}
    for name, make in CASES.items():
        stored, made, configs[name] = make()
        tensors |= {f"{name}/{part}": tensor.contiguous() for part, tensor in stored.items()}
        tensors |= {f"{name}/expected/{part}": tensor.contiguous() for part, tensor in made.items()}
    save_file(tensors, FOLDER / "small.safetensors")
    made_by = {package: version(package) for package in ("compressed-tensors", "transformers", "torch")}
    (FOLDER / "small.json").write_text(json.dumps({"made_by": made_by, "configs": configs}, indent=1) + "\n")


if __name__ == "__main__":
    main()
