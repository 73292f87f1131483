"""Attached adapters give PEFT's numbers, bit for bit, on plain, 4-bit and 8-bit layers, and obey the route per row."""

from __future__ import annotations

import copy
import gc
import math
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import bitsandbytes as bnb
import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from peft.tuners.lora.layer import LoraLayer
from safetensors import safe_open
from torch import Tensor, nn

from trimtab.checkpoint.adapter import AdapterSpec, match_adapter, read_adapter
from trimtab.checkpoint.anatomy import Anatomy, ModuleRow, TensorRow
from trimtab.checkpoint.headers import TensorEntry
from trimtab.errors import AdapterError, RequestError
from trimtab.runtime import lora
from trimtab.runtime.lora import Route, SavedModule, attach, detach

# PEFT and bitsandbytes warn about biases that cannot be merged, casts to float16 and their own calls into torch.
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning", "ignore::DeprecationWarning")
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
    """What runtime/tiers.py promises of a leaf, around a stock layer."""

    def __init__(self, path: str, layer: Any, route: Route, dtype: torch.dtype) -> None:
        super().__init__()
        self.module_path, self.route, self.adapters = path, route, {}
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

    def forward(self, x: Tensor) -> Tensor:
        y = self.__dict__["layer"](x)
        return lora.apply_linear(self, x, y) if self.adapters else y


class Table(nn.Module):
    """What runtime/tiers.py promises of a table, around a stock embedding."""

    def __init__(self, path: str, layer: nn.Embedding, route: Route) -> None:
        super().__init__()
        self.module_path, self.route, self.adapters = path, route, {}
        self.num_embeddings, self.embedding_dim, self.dtype = (
            layer.num_embeddings,
            layer.embedding_dim,
            layer.weight.dtype,
        )
        self.__dict__.update(layer=layer, embed_scale=getattr(layer, "embed_scale", None))

    def rows(self, ids: Tensor) -> Tensor:
        return nn.functional.embedding(ids, self.__dict__["layer"].weight)

    def forward(self, ids: Tensor) -> Tensor:
        rows = self.__dict__["layer"](ids)
        return lora.apply_embedding(self, ids, rows) if self.adapters else rows


def ours(toy: Toy, dtype: torch.dtype) -> tuple[Toy, Route]:
    """Return the same model with our layers in place of Linear and Embedding."""
    route, model = Route(), copy.copy(toy)
    model._modules = dict(toy._modules)
    for name, layer in toy._modules.items():
        if isinstance(layer, nn.Embedding):
            model._modules[name] = Table(name, layer, route)
        elif isinstance(layer, nn.Linear):
            model._modules[name] = Leaf(name, layer, route, dtype)
    return model, route


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


def put_on(model: Toy, route: Route, toy: Toy, folder: Path, name: str) -> None:
    attach(model, spec_of(folder, toy), name, read=read, device="cpu", route=route)


def peft_output(toy: Toy, folder: Path) -> Tensor:
    """Return stock PEFT's answer, made sure that it took the layer class that fits the quantization."""
    peft = PeftModel.from_pretrained(toy.again(), folder).eval()
    up = peft.base_model.model.up
    if isinstance(up, LoraLayer):
        assert type(up).__name__ == {"none": "Linear", "nf4": "Linear4bit", "int8": "Linear8bitLt"}[toy.asked[0]]
    with torch.no_grad():
        return peft(IDS)


IDS = torch.randint(0, VOCABULARY, (3, 5), generator=torch.Generator().manual_seed(3))
VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "rslora": {"use_rslora": True},
    "patterns": {"rank_pattern": {"down": 8}, "alpha_pattern": {"up": 16, "down": 3}},
    "rslora with patterns": {"use_rslora": True, "rank_pattern": {"down": 2}, "alpha_pattern": {"up": 16}},
    "dora": {"use_dora": True},
    "lora_bias": {"lora_bias": True},
    "embedding": {"target_modules": ["embed", "up"]},
    "dora embedding": {"target_modules": ["embed", "up"], "use_dora": True},
    "head": {"target_modules": ["head"]},
    "saved": {"modules_to_save": ["norm", "head"]},
    "saved table": {"target_modules": ["down"], "modules_to_save": ["embed"]},
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", ["none", "nf4", "int8"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_every_variant_equals_peft_bit_for_bit(variant: str, kind: str, dtype: torch.dtype, tmp_path: Path) -> None:
    toy = Toy(kind, dtype, scaled=True)
    folder = make_adapter(tmp_path, toy, **VARIANTS[variant])
    model, route = ours(toy, dtype)
    put_on(model, route, toy, folder, "one")
    base = toy(IDS)
    with torch.no_grad():
        expected = peft_output(toy, folder)
        assert torch.equal(model(IDS), base)
        route.set("one")
        found = model(IDS)
        assert torch.equal(found, expected)
        assert not torch.equal(found, base)
        route.none()
        assert torch.equal(model(IDS), base)


@pytest.mark.parametrize("stored", [torch.bfloat16, torch.float16], ids=str)
def test_an_adapter_stored_in_half_precision_is_computed_in_float32_as_peft_does(
    stored: torch.dtype, tmp_path: Path
) -> None:
    toy = Toy("nf4", torch.bfloat16)
    folder = make_adapter(tmp_path, toy, dtype=stored)
    spec = spec_of(folder, toy)
    assert {entry.dtype for target in spec.targets for entry in target.tensors.values()} == {str(stored)[6:]}
    model, route = ours(toy, torch.bfloat16)
    put_on(model, route, toy, folder, "one")
    assert model.up.adapters["one"].A.dtype == torch.float32
    route.set("one")
    with torch.no_grad():
        assert torch.equal(model(IDS), peft_output(toy, folder))


@pytest.mark.parametrize("option", ["velora_config", "monteclora_config"])
def test_training_only_variants_are_plain_lora_at_inference(option: str, tmp_path: Path) -> None:
    config = pytest.importorskip("peft.tuners.lora.config")
    made = getattr(config, "VeloraConfig" if option == "velora_config" else "MontecloraConfig", None)
    if made is None:
        pytest.skip("this PEFT does not know the variant")
    toy = Toy("none", torch.float32)
    folder = make_adapter(tmp_path, toy, **{option: made()})
    spec = spec_of(folder, toy)
    assert {why for _, why in spec.no_effect} == {"used in training only"}
    model, route = ours(toy, torch.float32)
    put_on(model, route, toy, folder, "one")
    route.set("one")
    with torch.no_grad():
        assert torch.equal(model(IDS), peft_output(toy, folder))


def test_plain_and_dora_agree_with_float64(tmp_path: Path) -> None:
    toy = Toy("none", torch.float32)
    model, route = ours(toy, torch.float32)
    put_on(model, route, toy, make_adapter(tmp_path / "plain", toy, use_rslora=True), "plain")
    put_on(model, route, toy, make_adapter(tmp_path / "dora", toy, use_dora=True), "dora")
    x = torch.randn(7, WIDTH, generator=torch.Generator().manual_seed(5))
    weight, bias = toy.up.weight.double(), toy.up.bias.double()

    def tensors(name: str) -> dict[str, Tensor]:
        target = next(t for t in spec_of(tmp_path / name, toy).targets if t.module_path == "up")
        return {role: read(entry).double() for role, entry in target.tensors.items()}

    found = tensors("plain")
    expected = {"plain": x.double() @ (weight + 6 / math.sqrt(4) * found["B"] @ found["A"]).T + bias}
    found = tensors("dora")
    moved = weight + 6 / 4 * found["B"] @ found["A"]
    moved = moved * (found["magnitude"] / moved.norm(dim=1))[:, None]
    expected["dora"] = x.double() @ moved.T + bias
    for name, answer in expected.items():
        route.set(name)
        with torch.no_grad():
            got = model.up(x).double()
        # float32 carries 24 bits and the longest sum here has 64 terms: 64 x 2**-24 of the largest value, about 4e-6.
        assert (got - answer).abs().max() <= 64 * 2**-24 * answer.abs().max()


def test_two_adapters_switch_without_leaving_a_trace(tmp_path: Path) -> None:
    toy = Toy("nf4", torch.bfloat16)
    model, route = ours(toy, torch.bfloat16)
    folders = {
        "a": make_adapter(tmp_path / "a", toy, seed=1),
        "b": make_adapter(tmp_path / "b", toy, seed=2, use_dora=True),
    }
    for name, folder in folders.items():
        put_on(model, route, toy, folder, name)
    with torch.no_grad():
        for name in ("a", "b", "a"):
            route.set(name)
            assert torch.equal(model(IDS), peft_output(toy, folders[name]))
        route.set(None)
        assert torch.equal(model(IDS), toy(IDS))


# Tied full weights


def with_tensor(folder: Path, name: str, value: Tensor) -> Path:
    from safetensors.torch import load_file, save_file

    file = folder / "adapter_model.safetensors"
    save_file({**load_file(file), name: value.contiguous()}, file, metadata={"format": "pt"})
    return folder


@pytest.mark.parametrize("changed", [False, True])
@pytest.mark.parametrize("tied", [False, True])
def test_an_embedding_that_peft_writes_next_to_lora_acts_as_in_peft(tied: bool, changed: bool, tmp_path: Path) -> None:
    toy = Toy("none", torch.float32, tied=tied)
    folder = make_adapter(tmp_path, toy, target_modules=["embed", "up"])
    table = toy.embed.weight.detach().clone() + (0.5 if changed else 0)
    with_tensor(folder, "base_model.model.embed.base_layer.weight", table)
    model, route = ours(toy, torch.float32)
    put_on(model, route, toy, folder, "one")
    route.set("one")
    with torch.no_grad():
        assert torch.equal(model(IDS), peft_output(toy, folder))
    kept = [
        model.embed.adapters["one"].weight,
        model.head.adapters["one"].weight if "one" in model.head.adapters else None,
    ]
    # PEFT loads the copy into the base weight itself, so a tied head changes with it; an unchanged copy costs nothing.
    assert [weight is not None for weight in kept] == [changed, changed and tied]
    if changed and tied:
        assert kept[0] is kept[1]


def test_modules_to_save_leaves_a_tied_partner_alone(tmp_path: Path) -> None:
    toy = Toy("none", torch.float32, tied=True)
    folder = make_adapter(tmp_path, toy, modules_to_save=["head"])
    model, route = ours(toy, torch.float32)
    put_on(model, route, toy, folder, "one")
    route.set("one")
    assert "one" not in model.embed.adapters
    assert lora.saved_weight(model.head) is model.head.adapters["one"].weight
    assert lora.saved_weight(model.up) is None
    with torch.no_grad():
        assert torch.equal(model(IDS), peft_output(toy, folder))


# Saved modules


def test_a_saved_module_keeps_path_parameters_and_attributes(tmp_path: Path) -> None:
    toy = Toy("none", torch.float32)
    folder = make_adapter(tmp_path, toy, modules_to_save=["norm"])
    model, route = ours(toy, torch.float32)
    original = model.norm
    names = [name for name, _ in model.named_parameters()]
    put_on(model, route, toy, folder, "one")
    assert isinstance(model.norm, SavedModule) and model.get_submodule("norm") is model.norm
    assert [name for name, _ in model.named_parameters()] == names
    assert model.norm.eps == original.eps and model.norm.weight is original.weight
    route.set("one")
    assert torch.equal(model.norm.weight, read(read_adapter(folder).tensors["base_model.model.norm.weight"]))
    with pytest.raises(AttributeError, match="no_such_attribute"):
        model.norm.no_such_attribute  # noqa: B018 - reading it is the test
    detach(model, "one")
    assert model.norm is original


# Rows


def three_adapters(tmp_path: Path, kind: str = "nf4") -> tuple[Toy, Toy, Route]:
    toy = Toy(kind, torch.bfloat16)
    model, route = ours(toy, torch.bfloat16)
    put_on(model, route, toy, make_adapter(tmp_path / "a", toy, seed=1, target_modules=["embed", "up"]), "a")
    put_on(model, route, toy, make_adapter(tmp_path / "b", toy, seed=2, use_dora=True), "b")
    put_on(model, route, toy, make_adapter(tmp_path / "c", toy, seed=3, modules_to_save=["norm", "head"]), "c")
    return toy, model, route


@pytest.mark.parametrize("rows", [["a", None, "b"], ["c", "a", None], ["b", "a", "b"]])
def test_each_row_equals_the_same_row_with_its_adapter_alone(rows: list[str | None], tmp_path: Path) -> None:
    toy, model, route = three_adapters(tmp_path)
    alone = []
    with torch.no_grad():
        for name in rows:
            route.set(name)
            alone.append(model(IDS))
        route.set_rows(rows)
        mixed = model(IDS)
    for index, name in enumerate(rows):
        if name is None:
            assert torch.equal(mixed[index], toy(IDS)[index])
        # A batch of another size may take another CPU kernel: bfloat16 has 8 bits, four layers round in turn.
        torch.testing.assert_close(mixed[index], alone[index][index], rtol=2**-6, atol=2**-6)
    assert not torch.equal(mixed, toy(IDS))


def test_rows_without_an_adapter_are_not_computed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _, model, route = three_adapters(tmp_path)
    seen: list[int] = []
    apply = lora.LinearAdapter.apply
    monkeypatch.setattr(
        lora.LinearAdapter, "apply", lambda self, leaf, x, y: seen.append(len(x)) or apply(self, leaf, x, y)
    )
    route.set_rows([None, "b", None])
    with torch.no_grad():
        model(IDS)
    assert seen == [1, 1]
    seen.clear()
    route.set_rows([None, None, None])
    with torch.no_grad():
        model(IDS)
    assert seen == []


def test_equal_rows_are_one_adapter_and_work_for_any_batch(tmp_path: Path) -> None:
    _, model, route = three_adapters(tmp_path)
    route.set_rows(["a", "a"])
    assert route.active() == ("a",) and route.rows is None
    with torch.no_grad():
        together = model(IDS)
        route.set("a")
        assert torch.equal(together, model(IDS))


def test_mixed_rows_with_another_number_of_inputs_are_refused(tmp_path: Path) -> None:
    _, model, route = three_adapters(tmp_path)
    route.set_rows(["a", "b"])
    with pytest.raises(RequestError) as caught:
        model(IDS)
    assert caught.value.field == "adapter" and caught.value.value == ["a", "b"]


def test_a_tower_needs_its_own_rows_even_if_the_counts_agree(tmp_path: Path) -> None:
    toy, model, route = three_adapters(tmp_path)
    model.up.adapters["a"].part = model.up.adapters["b"].part = "vision"
    x = torch.randn(2, WIDTH, dtype=torch.bfloat16)
    route.set_rows(["a", "b"])
    with pytest.raises(RequestError) as caught:
        model.up(x)
    assert "vision" in str(caught.value)
    route.set_rows(["a", "b"], towers={"vision": ["b", None]})
    with torch.no_grad():
        found = model.up(x)
        assert torch.equal(found[1], toy.up(x)[1])
        route.set("b")
        torch.testing.assert_close(found[0], model.up(x)[0], rtol=2**-7, atol=2**-7)


def test_a_layer_that_no_routed_adapter_changes_takes_any_shape(tmp_path: Path) -> None:
    toy, model, route = three_adapters(tmp_path)
    route.set_rows(["a", None])
    x = torch.randn(9, 2 * WIDTH, dtype=torch.bfloat16)
    with torch.no_grad():
        assert torch.equal(model.down(x), toy.down(x))


@pytest.mark.parametrize(
    ("call", "field"),
    [
        (lambda route: route.set("x"), "adapter"),
        (lambda route: route.set_rows(["a", "x"]), "adapter"),
        (lambda route: route.set_rows([]), "rows"),
        (lambda route: route.set_rows(["a", None], towers={"head": ["a"]}), "towers"),
        (lambda route: route.set_rows(["a", None], towers={"vision": ["x"]}), "adapter"),
    ],
)
def test_a_route_refuses_what_it_does_not_know(call: Callable[[Route], None], field: str, tmp_path: Path) -> None:
    _, _, route = three_adapters(tmp_path)
    route.set("b")
    with pytest.raises(RequestError) as caught:
        call(route)
    assert caught.value.field == field
    assert route.active() == ("b",)


# Attaching and detaching


def test_attaching_a_name_twice_is_refused(tmp_path: Path) -> None:
    toy = Toy("none", torch.float32)
    model, route = ours(toy, torch.float32)
    folder = make_adapter(tmp_path, toy)
    put_on(model, route, toy, folder, "one")
    with pytest.raises(RequestError) as caught:
        put_on(model, route, toy, folder, "one")
    assert caught.value.value == "one"


def test_detaching_an_unknown_name_lists_what_is_attached(tmp_path: Path) -> None:
    toy = Toy("none", torch.float32)
    model, route = ours(toy, torch.float32)
    put_on(model, route, toy, make_adapter(tmp_path, toy), "one")
    with pytest.raises(RequestError) as caught:
        detach(model, "two")
    assert caught.value.allowed == ("one",)


def test_a_failing_read_attaches_nothing(tmp_path: Path) -> None:
    toy = Toy("none", torch.float32)
    model, route = ours(toy, torch.float32)
    calls = []

    def failing(entry: TensorEntry) -> Tensor:
        calls.append(entry)
        if len(calls) == 5:
            raise OSError("disk gone")
        return read(entry)

    spec = spec_of(make_adapter(tmp_path, toy, modules_to_save=["norm"]), toy)
    norm = model.norm
    with pytest.raises(OSError, match="disk gone"):
        attach(model, spec, "one", read=failing, device="cpu", route=route)
    assert not model.up.adapters and not model.down.adapters and model.norm is norm and not route.names


def test_a_model_without_the_modules_is_refused_with_all_of_them(tmp_path: Path) -> None:
    toy = Toy("none", torch.float32)
    model, route = ours(toy, torch.float32)
    spec = spec_of(make_adapter(tmp_path, toy, target_modules=["up", "down", "embed"], modules_to_save=["norm"]), toy)
    del model._modules["down"]
    model._modules["up"] = nn.Linear(WIDTH, 2 * WIDTH)
    model._modules["norm"] = nn.Identity()
    with pytest.raises(AdapterError) as caught:
        attach(model, spec, "one", read=read, device="cpu", route=route)
    words = "\n".join(caught.value.problems)
    assert len(caught.value.problems) == 4  # norm lacks two parameters
    assert "no module down" in words and "up is a Linear" in words and "norm has no weight" in words
    assert not model.embed.adapters and not route.names


def test_detach_gives_the_memory_back_and_falls_back_to_the_base(tmp_path: Path) -> None:
    toy, model, route = three_adapters(tmp_path, "none")
    put_on(model, route, toy, make_adapter(tmp_path / "d", toy, modules_to_save=["norm", "head"]), "d")
    kept: list[Any] = [value for leaf in (model.up, model.head) for value in vars(leaf.adapters["d"]).values()]
    kept += model.norm.__dict__["adapters"]["d"].values()
    watched = [weakref.ref(value) for value in kept if isinstance(value, Tensor)]
    assert len(watched) == 5  # A and B of up, weight of head, weight and bias of norm
    del kept
    route.set("d")
    detach(model, "d")
    gc.collect()
    assert [ref() for ref in watched] == [None] * len(watched)
    assert route.active() == (None,) and route.names == {"a", "b", "c"}
    with torch.no_grad():
        assert torch.equal(model(IDS), toy(IDS))
    detach(model, "c")
    assert not isinstance(model.norm, SavedModule)


@pytest.mark.parametrize("variant", VARIANTS)
def test_the_promised_bytes_are_the_bytes_attached(variant: str, tmp_path: Path) -> None:
    toy = Toy("none", torch.float32)
    spec = spec_of(make_adapter(tmp_path, toy, **VARIANTS[variant]), toy)
    model, route = ours(toy, torch.float32)
    attach(model, spec, "one", read=read, device="cpu", route=route)
    found = 0
    for module in model.modules():
        adapter = module.__dict__.get("adapters", {}).get("one")
        values = () if adapter is None else (adapter if isinstance(adapter, dict) else vars(adapter)).values()
        found += sum(value.nbytes for value in values if isinstance(value, Tensor))
    assert found == spec.nbytes("float32")


def test_large_weights_are_taken_in_pieces_with_the_same_norms(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    toy = Toy("none", torch.float32)
    folder = make_adapter(tmp_path, toy, target_modules=["embed", "up"], use_dora=True)
    model, route = ours(toy, torch.float32)
    put_on(model, route, toy, folder, "whole")
    monkeypatch.setattr(lora, "_PIECE_VALUES", 5 * WIDTH)
    put_on(model, route, toy, folder, "pieces")
    for layer in (model.up, model.embed):
        whole, pieces = layer.adapters["whole"].magnitude, layer.adapters["pieces"].magnitude
        # Another order of summation over at most 64 squares in float32.
        torch.testing.assert_close(pieces, whole, rtol=64 * 2**-24, atol=0)
