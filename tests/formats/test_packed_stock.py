"""Whether the packed weights of a file that stock transformers and bitsandbytes wrote are those of the stock model."""

from __future__ import annotations

import json
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from trimtab.checkpoint.folder import Checkpoint, read_checkpoint
from trimtab.checkpoint.headers import TensorEntry
from trimtab.formats.packed import split_packed
from trimtab.formats.record import PackedEntry

KINDS: dict[str, dict[str, Any]] = {
    "nf4": {"bnb_4bit_quant_type": "nf4"},
    "nf4-dq": {"bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True},
    "fp4": {"bnb_4bit_quant_type": "fp4"},
    "fp4-dq": {"bnb_4bit_quant_type": "fp4", "bnb_4bit_use_double_quant": True},
    "nf4-bf16-storage": {"bnb_4bit_quant_type": "nf4", "bnb_4bit_quant_storage": "bfloat16"},
    "nf4-dq-fp16-storage": {
        "bnb_4bit_quant_type": "nf4", "bnb_4bit_quant_storage": "float16", "bnb_4bit_use_double_quant": True,
    },
    "fp4-fp32-storage": {"bnb_4bit_quant_type": "fp4", "bnb_4bit_quant_storage": "float32"},
}  # fmt: skip


def read_part(entry: TensorEntry) -> torch.Tensor:
    content = bytearray(entry.file.read_bytes()[entry.start : entry.start + entry.nbytes])
    return torch.frombuffer(content, dtype=getattr(torch, entry.dtype)).reshape(entry.shape)


@pytest.fixture(scope="module")
def plain_llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from transformers import LlamaConfig, LlamaForCausalLM

    # 192 x 128 values are 384 blocks of 64: two second-level blocks, the last one not full.
    config = LlamaConfig(
        vocab_size=64, hidden_size=128, intermediate_size=192, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, tie_word_embeddings=False,
    )  # fmt: skip
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("plain")
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
    return folder


def quantized(source: Path, folder: Path, **options: Any) -> Any:
    """Write the checkpoint with stock transformers and bitsandbytes, and return the stock model."""
    from transformers import BitsAndBytesConfig, LlamaForCausalLM

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = LlamaForCausalLM.from_pretrained(
            source, dtype=torch.bfloat16, quantization_config=BitsAndBytesConfig(**options), device_map={"": "cpu"}
        )
        model.save_pretrained(folder)
    return model


def linears(model: Any) -> dict[str, Any]:
    return {f"{path}.weight": module for path, module in model.named_modules() if path.endswith("_proj")}


def check_split(found: Checkpoint, plain: Mapping[str, TensorEntry], packed: Mapping[str, PackedEntry], source: Path) -> None:
    """Check that plain and packed names together are those of the unquantized checkpoint, with its shapes."""
    original = read_checkpoint(source).tensors
    assert set(plain) | set(packed) == set(original)
    assert not set(plain) & set(packed)
    for name, entry in (plain | dict(packed)).items():
        assert entry.shape == original[name].shape, name
    assert all(plain[name] is found.tensors[name] for name in plain)


@pytest.mark.parametrize("kind", KINDS)
def test_a_4_bit_checkpoint_of_stock_is_split_and_stands_for_stocks_weights(tmp_path: Path, plain_llama: Path, kind: str) -> None:
    from bitsandbytes.functional import QuantState, dequantize_4bit

    model = quantized(plain_llama, tmp_path, load_in_4bit=True, **KINDS[kind])
    found = read_checkpoint(tmp_path)
    plain, packed = split_packed(found)
    check_split(found, plain, packed, plain_llama)
    assert set(packed) == set(linears(model))
    storage = KINDS[kind].get("bnb_4bit_quant_storage", "uint8")
    for name, module in linears(model).items():
        entry = packed[name]
        state = module.weight.quant_state
        assert (entry.tensor_name, entry.kind) == (name, kind[:3] + "-dq" * ("-dq" in kind))
        assert (entry.dtype, entry.state["blocksize"], entry.parts["weight"].dtype) == ("bfloat16", 64, storage)
        sides = ("absmax", "quant_map", "quant_state") + (("nested_absmax", "nested_quant_map") if "-dq" in kind else ())
        assert set(entry.parts) == {"weight", *sides}
        stored = {key: value for key, value in state.as_dict().items() if not isinstance(value, torch.Tensor)}
        assert entry.state == stored | {"shape": list(stored["shape"])}
        # Through the parts of the file alone, and bitsandbytes' own reader of a quant_state.
        values = {part: read_part(entry.parts[part]) for part in sides if part != "quant_state"}
        values[f"quant_state.bitsandbytes__{kind[:3]}"] = read_part(entry.parts["quant_state"])
        rebuilt = QuantState.from_dict(values, torch.device("cpu"))
        ours = dequantize_4bit(read_part(entry.parts["weight"]), rebuilt)
        assert torch.equal(ours, dequantize_4bit(module.weight.data, state))
        assert tuple(ours.shape) == entry.shape


def test_an_int8_checkpoint_of_stock_is_split_with_stocks_scales(tmp_path: Path, plain_llama: Path) -> None:
    model = quantized(plain_llama, tmp_path, load_in_8bit=True)
    found = read_checkpoint(tmp_path)
    plain, packed = split_packed(found)
    check_split(found, plain, packed, plain_llama)
    assert set(packed) == set(linears(model))
    for name, module in linears(model).items():
        entry = packed[name]
        assert (entry.kind, entry.dtype, entry.state) == ("int8", "float16", {})
        assert set(entry.parts) == {"weight", "SCB"}
        assert torch.equal(read_part(entry.parts["weight"]), module.weight.data)
        assert torch.equal(read_part(entry.parts["SCB"]), module.weight.SCB)


@pytest.mark.parametrize(
    ("shape", "storage", "blocksize"),
    [((6, 26), torch.uint8, 64), ((6, 26), torch.bfloat16, 64), ((3, 8), torch.float32, 128), ((1, 2), torch.uint8, 64)],
    ids=str,
)
@pytest.mark.parametrize("double", [False, True])
def test_weights_that_fill_no_whole_block_are_counted_as_bitsandbytes_counts(
    tmp_path: Path, shape: tuple[int, int], storage: torch.dtype, blocksize: int, double: bool
) -> None:
    from bitsandbytes.functional import quantize_4bit
    from safetensors.torch import save_file

    weight, state = quantize_4bit(
        torch.randn(shape, generator=torch.Generator().manual_seed(0)), blocksize=blocksize, compress_statistics=double,
        quant_type="nf4", quant_storage=storage,
    )  # fmt: skip
    sides = {f"l.weight.{name}": tensor for name, tensor in state.as_dict(packed=True).items()}
    save_file({"l.weight": weight, **sides}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}), encoding="utf-8")
    plain, packed = split_packed(read_checkpoint(tmp_path))
    assert plain == {}
    entry = packed["l.weight"]
    assert (entry.kind, entry.shape, entry.dtype) == ("nf4-dq" if double else "nf4", shape, "float32")
    assert entry.state["blocksize"] == blocksize
