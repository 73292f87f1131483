"""A small model with every kind of module that an adapter can change, stock and with our layers, and PEFT's answer."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import bitsandbytes as bnb
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from peft.tuners.lora.layer import LoraLayer
from safetensors import safe_open
from torch import Tensor, nn

from trimtab.adapters.adapter import AdapterSpec, match_adapter, read_adapter
from trimtab.checkpoint.anatomy import Anatomy, ModuleRow, TensorRow
from trimtab.checkpoint.headers import TensorEntry
from trimtab.engine.lora.layers import attach_fitted, fit
from trimtab.engine.lora.store import AdapterStore

WIDTH, VOCABULARY = 64, 32


class ScaledEmbedding(nn.Embedding):
    """As Gemma's: rows times a buffer."""

    def __init__(self, count: int, width: int) -> None:
        super().__init__(count, width)
        self.register_buffer("embed_scale", torch.tensor(7.9), persistent=False)

    def forward(self, ids: Tensor) -> Tensor:
        return super().forward(ids) * self.embed_scale.to(self.weight.dtype)


class Toy(nn.Module):
    """Every kind of module that an adapter can change, wide enough for bitsandbytes' 64-value blocks."""

    def __init__(self, kind: str, dtype: torch.dtype, scaled: bool = False, tied: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.asked = (kind, dtype, scaled, tied)
        self.embed = (ScaledEmbedding if scaled else nn.Embedding)(VOCABULARY, WIDTH)
        self.up = nn.Linear(WIDTH, 2 * WIDTH, bias=True)
        self.down = nn.Linear(2 * WIDTH, WIDTH, bias=False)
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        if tied:
            self.head.weight = self.embed.weight
        self.to(dtype)
        if kind != "none":
            self.up, self.down = quantized(self.up, kind, dtype), quantized(self.down, kind, dtype)
            setattr(self, "is_loaded_in_8bit" if kind == "int8" else "is_loaded_in_4bit", True)
        self.eval().requires_grad_(False)

    def again(self) -> Toy:
        """Return an equal model with its own tensors (a deep copy of 8-bit weights loses their scales)."""
        return Toy(*self.asked)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        return self.head(self.norm(x + self.down(nn.functional.silu(self.up(x)))))


def quantized(linear: nn.Linear, kind: str, dtype: torch.dtype) -> nn.Module:
    """Return bitsandbytes' layer with the linear's weight, on the CPU."""
    shape = (linear.in_features, linear.out_features, linear.bias is not None)
    layer: Any
    if kind == "int8":
        layer = bnb.nn.Linear8bitLt(*shape, has_fp16_weights=False, threshold=6.0)
        layer.weight = bnb.nn.Int8Params(linear.weight.data.clone(), requires_grad=False, has_fp16_weights=False)
    else:
        layer = bnb.nn.Linear4bit(*shape, compute_dtype=dtype, compress_statistics=True, quant_type=kind)
        layer.weight = bnb.nn.Params4bit(linear.weight.data.clone(), requires_grad=False, quant_type=kind, module=layer)
    layer.bias = None if linear.bias is None else nn.Parameter(linear.bias.data.clone(), requires_grad=False)
    layer = layer.to("cpu")
    # The CPU kernel for AVX512-BF16 repacks the weight at the first call; then nothing can be compared any more.
    layer.support_avx512bf16_for_cpu = False
    return layer.eval()


class Leaf(nn.Module):
    """What engine/tiers/streaming.py promises of a leaf, around a stock layer."""

    def __init__(self, path: str, layer: Any, store: AdapterStore, dtype: torch.dtype) -> None:
        super().__init__()
        self.module_path, self.adapter_store, self.adapters = path, store, {}
        self.in_features, self.out_features = layer.in_features, layer.out_features
        kinds = {"Linear8bitLt": "int8", "Linear4bit": "nf4"}
        self.quant_kind = kinds.get(type(layer).__name__, "none")
        self.__dict__.update(layer=layer, bias=layer.bias)
        ghost = torch.empty(layer.out_features, layer.in_features, dtype=dtype, device="meta")
        self.__dict__["weight"] = layer.weight if self.quant_kind == "none" else ghost

    def dense_weight(self) -> Tensor:
        layer = self.__dict__["layer"]
        if self.quant_kind == "int8":
            scb = layer.state.SCB if layer.state.SCB is not None else layer.weight.SCB
            codes = layer.state.CB if layer.state.CB is not None else layer.weight.data
            return bnb.functional.int8_vectorwise_dequant(codes, scb)
        if self.quant_kind == "nf4":
            return bnb.functional.dequantize_4bit(layer.weight.data, layer.weight.quant_state)
        return layer.weight.data

    def dense_rows(self, start: int, stop: int) -> Tensor:
        return self.dense_weight()[start:stop].clone()

    def forward(self, x: Tensor) -> Tensor:
        return self.adapted(x, self.__dict__["layer"](x))

    def adapted(self, x: Tensor, y: Tensor) -> Tensor:
        return self.adapter_store.applier.apply(self, x, y)


class Table(nn.Module):
    """What engine/tiers/streaming.py promises of a table, around a stock embedding."""

    def __init__(self, path: str, layer: nn.Embedding, store: AdapterStore) -> None:
        super().__init__()
        self.module_path, self.adapter_store, self.adapters = path, store, {}
        self.num_embeddings, self.embedding_dim, self.dtype = (layer.num_embeddings, layer.embedding_dim, layer.weight.dtype)
        self.__dict__.update(layer=layer, embed_scale=getattr(layer, "embed_scale", None))

    @property
    def weight(self) -> Tensor:
        # Gemma 4 reads the padding row of its token table from outside.
        return self.__dict__["layer"].weight

    def rows(self, ids: Tensor) -> Tensor:
        return nn.functional.embedding(ids, self.__dict__["layer"].weight)

    def forward(self, ids: Tensor) -> Tensor:
        return self.adapter_store.applier.apply(self, ids, self.__dict__["layer"](ids))


def with_our_layers(model: Any, dtype: torch.dtype = torch.bfloat16) -> AdapterStore:
    """Put our layers in place of every Linear and Embedding of a model that computes in dtype."""
    store = AdapterStore()
    for path, layer in list(model.named_modules()):
        parent, _, last = path.rpartition(".")
        holder = model.get_submodule(parent)._modules
        if isinstance(layer, nn.Embedding):
            holder[last] = Table(path, layer, store)
        elif isinstance(layer, nn.Linear):
            holder[last] = Leaf(path, layer, store, dtype)
    return store


def ours(toy: Toy, dtype: torch.dtype) -> tuple[Toy, AdapterStore]:
    """Return the same toy model over the same tensors, with our layers in it."""
    model = copy.copy(toy)
    model._modules = dict(toy._modules)
    return model, with_our_layers(model, dtype)


def anatomy_of(toy: Toy) -> Anatomy:
    rows = []
    for name, layer in toy._modules.items():
        kind = "embedding" if isinstance(layer, nn.Embedding) else "linear" if isinstance(layer, nn.Linear) else "other"
        tensors = []
        for key, value in layer.named_parameters(recurse=False):
            shape = tuple(value.shape)
            if kind == "linear" and key == "weight":
                shape = (layer.out_features, layer.in_features)
            owner = "embed.weight" if name == "head" and value is toy.embed.weight else None
            tensors.append(TensorRow(f"{name}.{key}", shape, "float32", False, (), owner))
        part = "head" if name == "head" else "language"
        rows.append(ModuleRow(name, type(layer).__name__, part, kind, name, tuple(tensors)))
    return Anatomy("Toy", "toy", "float32", tuple(rows), (), WIDTH, VOCABULARY)


def read(entry: TensorEntry) -> Tensor:
    with safe_open(entry.file, "pt") as file:
        return file.get_tensor(entry.tensor_name)


def make_adapter(folder: Path, toy: Toy, *, seed: int = 1, dtype: torch.dtype | None = None, **options: Any) -> Path:
    """Write an adapter with random values through PEFT itself."""
    options = {"r": 4, "lora_alpha": 6, "target_modules": ["up", "down"], **options}
    peft = get_peft_model(toy.again(), LoraConfig(**options))
    torch.manual_seed(seed)
    for name, parameter in peft.named_parameters():
        if "lora_magnitude_vector" in name:
            parameter.data.mul_(1 + 0.3 * torch.rand_like(parameter))
        elif "lora_" in name or "modules_to_save" in name:
            parameter.data.copy_(0.2 * torch.randn(parameter.shape))
            if dtype is not None and "lora_" in name:
                parameter.data = parameter.data.to(dtype)
    peft.save_pretrained(folder, save_embedding_layers=False)
    return folder


def spec_of(folder: Path, toy: Toy) -> AdapterSpec:
    return match_adapter(read_adapter(folder), anatomy_of(toy))


def put_on(model: Toy, store: AdapterStore, toy: Toy, folder: Path, name: str) -> None:
    attach_fitted(fit(model, spec_of(folder, toy)), name, read=read, device="cpu", store=store)


def peft_output(toy: Toy, folder: Path) -> Tensor:
    """Return stock PEFT's answer, made sure that it took the layer class that fits the quantization."""
    peft = PeftModel.from_pretrained(toy.again(), folder).eval()
    up = peft.base_model.model.up
    if isinstance(up, LoraLayer):
        assert type(up).__name__ == {"none": "Linear", "nf4": "Linear4bit", "int8": "Linear8bitLt"}[toy.asked[0]]
    with torch.no_grad():
        return peft(IDS)


IDS = torch.randint(0, VOCABULARY, (3, 5), generator=torch.Generator().manual_seed(3))
