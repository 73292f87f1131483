"""Writes the golden weights of the formats: file tensors as a format's own library stores them, and what it makes of them.

    make test-formats    (installs the libraries of locks/formats.txt and compares; the others need them in PYTHONPATH)
    python -m tests.golden.formats.make
    python -m tests.golden.formats.make ggml

golden.safetensors has, for each case of `cases.json`, `CASE/part` and `CASE/expected`. compressed-tensors packs and unpacks its
own files and AWQ's; transformers' Fp8Dequantize unpacks official FP8 files; auto-round's layers unpack GPTQ's. No line of trimtab
runs. ggml.safetensors has the same of ggml's types: gguf unpacks blocks of random bits, and transformers' dequant.py has to agree.
small.gguf is a file of gguf's own writer.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import sys
import types
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

FOLDER = Path(__file__).parent


def compressed(rows: int, columns: int, *, scale_dtype: str = "bfloat16", **weights: Any) -> tuple[dict[str, Tensor], Tensor, dict]:
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
    from compressed_tensors.quantization.utils import calculate_qparams

    args = QuantizationArgs(**weights)
    is_float = args.type == "float"
    form = "float-quantized" if is_float else "pack-quantized"
    scheme = QuantizationScheme(targets=["Linear"], weights=args, format=form)
    weight = torch.randn(rows, columns, generator=torch.Generator().manual_seed(rows + columns)) * 0.1
    if args.strategy == "group":
        blocks = weight.view(rows, -1, args.group_size)
        low, high = blocks.amin(-1), blocks.amax(-1)
    elif args.strategy == "block":
        high_side, wide = args.block_structure
        shape = (-(-rows // high_side), -(-columns // wide))
        spread = torch.rand(shape, generator=torch.Generator().manual_seed(3)).add(0.5)
        low, high = torch.full(shape, -0.4), torch.full(shape, 0.4) * spread
    elif args.strategy == "channel":
        low, high = weight.amin(1, keepdim=True), weight.amax(1, keepdim=True)
    else:
        low, high = weight.amin().reshape(1), weight.amax().reshape(1)
    scale, zero = calculate_qparams(low, high, args)
    scale = scale.to(getattr(torch, scale_dtype))
    zero = None if args.symmetric else zero.to(torch.int8)
    state = {"weight": weight, "weight_scale": scale} | ({} if zero is None else {"weight_zero_point": zero})
    compressor = BaseCompressor.get_value_from_registry(form)
    stored = compressor.compress(state, scheme)
    expected = compressor.decompress(stored, scheme)["weight"]
    config = {
        "quant_method": "compressed-tensors", "format": form, "ignore": ["lm_head"],
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": json.loads(args.model_dump_json()), "format": form}},
    }  # fmt: skip
    return stored, expected, config


def official_fp8(rows: int, columns: int, scale_dtype: str) -> tuple[dict[str, Tensor], Tensor, dict]:
    from transformers.integrations.finegrained_fp8 import Fp8Dequantize

    generator = torch.Generator().manual_seed(5)
    weight = (torch.randn(rows, columns, generator=generator) * 60).to(torch.float8_e4m3fn)
    scale = (torch.rand(rows // 128, columns // 128, generator=generator) * 0.01 + 1e-4).to(getattr(torch, scale_dtype))
    expected = Fp8Dequantize(None)._dequantize_one(weight, scale, output_dtype=torch.bfloat16)
    config = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
    return {"weight": weight, "weight_scale_inv": scale}, expected, config


def words(rows: int, columns: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-(2**31), 2**31, (rows, columns), generator=generator, dtype=torch.int64).to(torch.int32)


def awq(rows: int, columns: int, group: int) -> tuple[dict[str, Tensor], Tensor, dict]:
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.entrypoints.convert.converters.autoawq import AutoAWQConverter

    stored = {
        "qweight": words(columns, rows // 8, 1), "qzeros": words(columns // group, rows // 8, 2),
        "scales": torch.rand(columns // group, rows, generator=torch.Generator().manual_seed(3)).mul(0.01).half(),
    }  # fmt: skip
    converter = AutoAWQConverter(group_size=group)
    made = converter.process({f"m.{name}": tensor for name, tensor in stored.items()})
    scheme = converter._build_quant_config().config_groups["config_group_0"]
    state = {name.removeprefix("m."): tensor for name, tensor in made.items()}
    expected = BaseCompressor.get_value_from_registry("pack-quantized").decompress(state, scheme)["weight"]
    return (stored, expected, {"quant_method": "awq", "bits": 4, "group_size": group, "zero_point": True, "version": "gemm"})


def gptq(rows: int, columns: int, group: int, bits: int, *, ordered: bool = False, form: str = "gptq"):
    root = Path(str(importlib.util.find_spec("auto_round_extension").submodule_search_locations[0])).parent / "auto_round"
    # The package's own start imports far more than its layers need: only the folders are made known.
    for name, folder in (("auto_round", root), ("auto_round.utils", root / "utils")):
        sys.modules.setdefault(name, types.ModuleType(name)).__path__ = [str(folder)]
    sys.modules["auto_round.utils"].get_packing_device = lambda device=None: "cpu"
    module = importlib.import_module(f"auto_round_extension.torch.qlinear_torch{'_zp' if form == 'gptq' else ''}")
    layer = module.QuantLinear(bits, group, columns, rows, bias=False, g_idx=ordered)
    stored = {
        "qweight": words(columns * bits // 32, rows, 7), "qzeros": words(columns // group, rows * bits // 32, 8),
        "scales": torch.rand(columns // group, rows, generator=torch.Generator().manual_seed(9)).mul(0.01).half(),
    }  # fmt: skip
    # The largest value of all bits stands for the zero point 0 of a borrowing writer: auto-round reads another number there.
    top, each = (1 << bits) - 1, 32 // bits
    parts = [stored["qzeros"] >> (bits * place) & top for place in range(each)]
    kept = sum(part.clamp(max=top - 1).long() << (bits * place) for place, part in enumerate(parts))
    stored["qzeros"] = torch.where(kept >= 2**31, kept - 2**32, kept).to(torch.int32)
    index = torch.arange(columns, dtype=torch.int32) // group
    stored["g_idx"] = index[torch.randperm(columns, generator=torch.Generator().manual_seed(4))] if ordered else index
    layer.qweight, layer.qzeros, layer.scales = stored["qweight"], stored["qzeros"], stored["scales"]
    if ordered:
        layer.g_idx = stored["g_idx"]
    expected = layer(torch.eye(columns, dtype=torch.float16)).t().contiguous()
    config = {"quant_method": "gptq", "bits": bits, "group_size": group, "desc_act": ordered, "sym": False}
    return stored, expected, config | {"checkpoint_format": form}


CASES = {
    "ct-int4-g32": lambda: compressed(24, 96, num_bits=4, strategy="group", group_size=32),
    "ct-int4-g128-zp-f16": lambda: compressed(
        16, 256, num_bits=4, strategy="group", group_size=128, symmetric=False, scale_dtype="float16"
    ),
    "ct-int4-g32-f32": lambda: compressed(16, 64, num_bits=4, strategy="group", group_size=32, scale_dtype="float32"),
    "ct-int4-row-odd": lambda: compressed(9, 37, num_bits=4, strategy="channel"),
    "ct-int8-g32-zp": lambda: compressed(13, 64, num_bits=8, strategy="group", group_size=32, symmetric=False),
    "ct-int8-row": lambda: compressed(12, 50, num_bits=8, strategy="channel"),
    "ct-fp8-row": lambda: compressed(20, 48, num_bits=8, type="float", strategy="channel"),
    "ct-fp8-tensor": lambda: compressed(20, 48, num_bits=8, type="float", strategy="tensor", scale_dtype="float32"),
    "ct-fp8-block": lambda: compressed(130, 192, num_bits=8, type="float", strategy="block", block_structure=[128, 128]),
    "fp8-bf16": lambda: official_fp8(256, 128, "bfloat16"),
    "fp8-f32": lambda: official_fp8(128, 256, "float32"),
    "awq-g32": lambda: awq(32, 64, 32),
    "awq-g128": lambda: awq(16, 256, 128),
    "gptq-g32": lambda: gptq(32, 96, 32, 4),
    "gptq-ordered": lambda: gptq(32, 128, 32, 4, ordered=True),
    "gptq_v2-int8": lambda: gptq(32, 64, 64, 8, form="gptq_v2"),
    "awq-g64": lambda: awq(16, 128, 64),
    "gptq-g64": lambda: gptq(16, 128, 64, 4),
    "gptq-g128": lambda: gptq(16, 256, 128, 4),
    "gptq-ordered-g64": lambda: gptq(16, 128, 64, 4, ordered=True),
    "gptq-ordered-g128": lambda: gptq(16, 256, 128, 4, ordered=True),
}  # fmt: skip


# type -> the places of the float16 numbers in a block of it, and bytes whose random bits would be no finite scale.
HALVES = {"Q4_0": (0,), "Q4_1": (0, 2), "Q8_0": (0,), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,)}


def ggml() -> None:
    import gguf
    import numpy as np
    from transformers.integrations.gguf import dequant

    tensors: dict[str, Tensor] = {}
    random = np.random.default_rng(0)
    for name, places in HALVES.items():
        kind = gguf.GGMLQuantizationType[name]
        values, nbytes = gguf.GGML_QUANT_SIZES[kind]
        rows, columns = 6, 2 * values
        blocks = random.integers(0, 256, (rows * 2, nbytes), dtype=np.uint8)
        for place in places:
            scale = (random.random((rows * 2, 1)) * 0.02 - 0.005).astype(np.float16)
            blocks[:, place : place + 2] = scale.view(np.uint8).reshape(-1, 2)
        stored = blocks.reshape(rows, -1)
        expected = torch.from_numpy(gguf.quants.dequantize(stored, kind).reshape(rows, columns).astype(np.float32))
        other = dequant.dequantize(torch.from_numpy(stored), int(kind)).view(rows, columns)
        assert torch.equal(expected, other), name
        tensors |= {f"{name}/weight": torch.from_numpy(stored), f"{name}/expected": expected}
    save_file(tensors, FOLDER / "ggml.safetensors", {"gguf": version("gguf"), "transformers": version("transformers")})
    writer = gguf.GGUFWriter(FOLDER / "small.gguf", "llama")
    writer.add_name("small")
    writer.add_context_length(64)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_array("a.list", [1, 2, 3])
    writer.add_token_list(["a", "b\u00e9"])
    weight = np.arange(64 * 2, dtype=np.float32).reshape(2, 64)
    writer.add_tensor(
        "a.weight", gguf.quants.quantize(weight, gguf.GGMLQuantizationType.Q8_0), raw_dtype=gguf.GGMLQuantizationType.Q8_0
    )
    writer.add_tensor("b.weight", np.arange(5, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def main() -> None:
    if sys.argv[1:] == ["ggml"]:
        ggml()
        return
    tensors: dict[str, Tensor] = {}
    configs: dict[str, Any] = {}
    for name, make in CASES.items():
        stored, expected, configs[name] = make()
        tensors |= {f"{name}/{part}": tensor.contiguous() for part, tensor in stored.items()}
        tensors[f"{name}/expected"] = expected.contiguous()
    save_file(tensors, FOLDER / "golden.safetensors")
    made = {package: version(package) for package in ("compressed-tensors", "auto-round", "transformers", "torch")}
    (FOLDER / "cases.json").write_text(json.dumps({"made_by": made, "configs": configs}, indent=1) + "\n")


if __name__ == "__main__":
    main()
