"""Stacked experts packed while they are loaded: bitsandbytes' bytes, and answers of a model that has its values."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Iterator
from functools import cache
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from bitsandbytes.functional import dequantize_4bit, quantize_4bit
from torch import Tensor

import trimtab
from tests import pico
from tests.engine.loader.test_hf import edited
from tests.engine.lora.test_experts import NEAR, answered, build, loaded, of_peft, single_adapter, with_changes
from tests.engine.lora.test_routers import IDS, gap, logprobs, of_model
from tests.long_runs import halved
from tests.merged_models import load
from tests.merging.changes.test_merge_experts import BOTH, stack_adapter
from tests.raised import raised
from trimtab.checkpoint.anatomy import TensorRow
from trimtab.checkpoint.headers import TensorEntry
from trimtab.engine.formats.packed import Packed
from trimtab.engine.loader import pieces
from trimtab.errors import CheckpointError, RequestError
from trimtab.planning import Plan
from trimtab.request import LoadRequest
from trimtab.stock.unsplit import load_unsplit
from trimtab.verification.routes import stock_run

FORMATS = ("nf4", "nf4-dq", "int8")


def packed_by_bitsandbytes(matrix: Tensor, kind: str) -> tuple[Tensor, Any]:
    return quantize_4bit(matrix.contiguous(), blocksize=64, quant_type="nf4", compress_statistics=kind == "nf4-dq")


def by_ggml(matrix: Tensor) -> dict[str, Tensor]:
    """Return the parts of a matrix as quantize_row_q8_0_ref computes them: float32, halves away from 0."""
    blocks = matrix.detach().float().numpy().reshape(-1, 32)
    scale = np.abs(blocks).max(axis=1, keepdims=True) / np.float32(127)
    with np.errstate(divide="ignore"):
        steps = (blocks * np.where(scale == 0, np.float32(0), np.float32(1) / scale)).astype(np.float64)
    q = np.copysign(np.floor(np.abs(steps) + 0.5), steps).astype(np.int8)
    data, scale = torch.from_numpy(q), torch.from_numpy(scale.astype(np.float16))
    return {"weight": data.view(matrix.shape), "scale": scale.view(len(matrix), -1)}


def read_back(matrix: Tensor, kind: str) -> Tensor:
    if kind != "int8":
        return dequantize_4bit(*packed_by_bitsandbytes(matrix, kind))
    parts = by_ggml(matrix)
    return (parts["weight"].float().view(-1, 32) * parts["scale"].float().view(-1, 1)).view(matrix.shape)


def stacks_of(model: Any) -> Iterator[tuple[str, Tensor]]:
    return ((name, value) for name, value in model.named_parameters() if ".experts." in name and value.dim() == 3)


def with_values_of(base: Path, kind: str, folder: Path) -> Path:
    """Write the checkpoint with the experts' values as bitsandbytes reads them back."""
    model = load(base)
    with torch.no_grad():
        for _, stack in stacks_of(model):
            for matrix in stack:
                matrix.copy_(read_back(matrix, kind))
    model.save_pretrained(folder)
    return folder


@pytest.mark.parametrize("kind", FORMATS)
@pytest.mark.parametrize(("family", "stored"), [("qwen3_moe", "bfloat16"), ("gemma4_moe", "float32"), ("gpt_oss", "float32")])
def test_each_expert_has_the_bytes_of_its_formats_library(
    family: str, stored: str, kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # One file tensor for each matrix, in another type; for a stack; and a stack whose matrices are transposed.
    base = pico.build(family, tmp_path / "base", dtype=stored)
    parts, real = [], pieces.pack

    def pack(tensor: TensorRow, *, take: pieces.Take, **options: Any) -> Packed:
        def taken(entry: TensorEntry) -> Tensor:
            value = take(entry)
            parts.append(value.numel() / prod(tensor.shape[1:]))
            return value

        return real(tensor, take=taken, **options)

    monkeypatch.setattr(pieces, "pack", pack)
    with loaded(base, {}, experts=kind) as model:
        found = {
            f"{path}.{name}": packed
            for path, module in model.hf_model.named_modules() for name, packed in vars(module).get("stacks", {}).items()
        }  # fmt: skip
        shares = {share.name: share for share in model.memory_shares()}
        taken = model.plan.experts
    assert parts and max(parts) <= 1  # of an expert: no stack was whole in full precision
    expected = dict(stacks_of(load(base, dtype="float32")))
    assert set(found) == set(expected) and len(found) >= 2
    for name, packed in found.items():
        assert packed.shape == tuple(expected[name].shape)
        for number, matrix in enumerate(expected[name].detach()):
            if kind == "int8":
                theirs = by_ggml(matrix)
            else:
                data, state = packed_by_bitsandbytes(matrix, kind)
                theirs = {"weight": data, "absmax": state.absmax}
                theirs |= {"nested_absmax": state.state2.absmax, "offset": state.offset} if kind == "nf4-dq" else {}
            ours = packed.expert(number).parts
            assert set(ours) == set(theirs)
            assert all(torch.equal(ours[part].reshape(-1), theirs[part].reshape(-1)) for part in theirs), (name, number)
    assert taken is not None and taken.bytes == sum(packed.nbytes for packed in found.values())
    assert (kind == "nf4") == (taken.bits_per_value == 4.5) and (kind == "int8") == (taken.bits_per_value == 8.5)
    assert abs(shares["weights"].measured_bytes - shares["weights"].planned_bytes) <= 256 * 4 * len(found)


WORKS = ("mixtral", "gemma4_moe")


@pytest.fixture(scope="module", params=[*WORKS, pytest.param("gpt_oss", marks=pytest.mark.slow)])
def work(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, Path]:
    """A checkpoint and two adapters on experts."""
    folder = tmp_path_factory.mktemp(request.param)
    base = pico.build(request.param, folder / "base", dtype="float32")
    adapters = (stack_adapter(base, folder / name, list(names)) for name, names in (("a", BOTH), ("b", BOTH[1:])))
    return base, *adapters


@cache
def of_stock(work: tuple[Path, Path, Path], kind: str) -> tuple[Path, dict[str | None, Tensor]]:
    """Return an adapter of single experts, and stock's answers on the values of packed experts."""
    base, a, b = work
    values, single = with_values_of(base, kind, base.parent / f"values-{kind}"), base.parent / f"single-{kind}"
    expected = {"a": of_peft(values, a), "b": of_peft(values, b), None: of_model(load(values))}
    return single, expected | {"single": with_changes(values, single_adapter(values, single, 0)), "dense": of_model(load(base))}


@pytest.mark.parametrize(("work", "tier", "kind"), halved(
    WORKS, ("resident", "stream", "host", "disk"), ("nf4", "int8"), slow=("gpt_oss",),
), indirect=["work"])  # fmt: skip
def test_rows_with_adapters_answer_as_peft_on_the_packed_values_in_every_tier(
    work: tuple[Path, Path, Path], tier: str, kind: str
) -> None:
    base, a, b = work
    single, expected = of_stock(work, kind)
    given = {"a": a, "b": b, "single": single}
    with loaded(base, given, experts=kind, place={"model*layers.*": tier}) as model:
        assert tier in {row.tier for row in model.plan.placements}
        names = ("a", None, "single", "b")
        requests = [{"prompt": IDS, "adapter": name} for name in names]
        found = [logprobs(one) for one in model.batch(requests, rows=4, max_new_tokens=3, logprobs=8)]
        alone = answered(model, "a")
        for name in given:
            model.unload_adapter(name)
        after = answered(model, None)
    assert max(gap(one, expected[name]) for one, name in zip(found, names, strict=True)) < NEAR
    assert max(gap(alone, expected["a"]), gap(after, expected[None])) < NEAR
    assert gap(found[0], expected[None]) > 1e-2 and gap(after, expected["dense"]) > (1e-2 if kind == "nf4" else 10 * NEAR)


def test_a_plan_counts_packed_experts_says_so_and_keeps_the_choice(work: tuple[Path, Path, Path], tmp_path: Path) -> None:
    base = work[0]
    options: dict[str, Any] = {"quant": "nf4", "context": 64, "device": "cpu"}
    plain, packed = (trimtab.plan(base, **options, experts=kind) for kind in ("16bit", "nf4"))
    assert plain.experts is not None and packed.experts is not None and plain.experts.bits_per_value == 16
    assert plain.gpu["weights"] - packed.gpu["weights"] == plain.experts.bytes - packed.experts.bytes
    assert packed.experts.bytes * 32 == plain.experts.bytes * 9
    assert "experts='nf4' packs them, which changes answers" in str(plain) and "stacked experts: packed only on request" in str(
        plain
    )
    assert "nf4, 4.50 bits a weight" in str(packed) and "stacked experts" not in str(packed)
    packed.save(tmp_path / "plan.json")
    again = Plan.load(tmp_path / "plan.json")
    assert again == packed and again.request.experts == "nf4" and "nf4 experts" in str(again)
    on_card = trimtab.plan(base, **options | {"device": "auto"}, card="RTX 4060 8GB", experts="nf4")
    # Kernels read stacks whose gate and up lie one behind the other; gpt-oss' take turns.
    step, prompt = on_card.execution.step, on_card.execution.prompt
    assert (step.mode, prompt.mode) == (("eager", "eager") if "gpt_oss" in str(base) else ("fused", "graph"))
    assert step.mode == "fused" or "chosen on the host" in step.reason
    # torch's grouped product is captured in bfloat16 and of compute capability 9 and 10 alone.
    for card, dtype in itertools.product(("RTX 4060 8GB", "H100 80GB"), ("bfloat16", "float16", "float32")):
        on_card = trimtab.plan(base, **options | {"device": "auto"}, card=card, dtype=dtype, experts="16bit")
        step, prompt = on_card.execution.step, on_card.execution.prompt
        is_read = "gpt_oss" not in str(base) and dtype != "float32"
        is_captured = is_read or (card, dtype) == ("H100 80GB", "bfloat16")
        assert (step.mode, prompt.mode) == (("fused", "graph") if is_captured else ("eager", "eager"))
        assert step.mode == "fused" or "on the host" in step.reason


@pytest.mark.parametrize("kind", ["nf4-dq", "int8"])
def test_a_merged_model_is_packed_by_the_same_rule(kind: str, work: tuple[Path, Path, Path], tmp_path: Path) -> None:
    base, a, _ = work
    trimtab.merge(base, tmp_path / "merged", adapters={"a": a}, check=True)
    with loaded(tmp_path / "merged", {}, experts=kind) as model:
        found = answered(model, None)
        experts = [module for module in model.hf_model.modules() if "stacks" in vars(module)]
        none = experts[0](torch.zeros(0, 64), torch.zeros(0, 2, dtype=torch.long), torch.zeros(0, 2))
        assert none.shape == (0, 64)  # a pass in which no token is of these experts
        held = [weakref.ref(packed) for module in experts for packed in vars(module)["stacks"].values()]
        del experts
    assert held and not any(one() for one in held)  # freed with the model
    assert gap(found, of_model(load(with_values_of(tmp_path / "merged", kind, tmp_path / "values")))) < NEAR


@pytest.mark.parametrize(("work", "kind"), halved(WORKS, ("int8", "nf4"), slow=("gpt_oss",)), indirect=["work"])
def test_verify_compares_with_stock_on_the_same_values(
    work: tuple[Path, Path, Path], kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    request = LoadRequest(
        model=str(work[0]), adapters={"a": str(work[1])}, quant="none", dtype="float32", experts=kind, context_tokens=64,
        device="cpu",
    )  # fmt: skip
    asked: dict[str, Any] = {"prompts": [{"id": "x", "token_ids": list(IDS)}], "new_tokens": 2, "isolated": False}
    same = ("same", "same within noise")
    assert trimtab.verify(request, against="stock", **asked).verdict in same
    assert trimtab.verify(request, against="bf16", **asked).verdict not in same
    monkeypatch.setattr(stock_run, "round_experts", lambda model, kind: None)
    assert trimtab.verify(request, against="stock", **asked).verdict not in same
    assert raised(RequestError, trimtab.verify, request, lanes=True, **asked).field == "experts"


def test_a_checkpoint_with_packed_linears_takes_packed_experts(tmp_path: Path) -> None:
    base = pico.build("mixtral", tmp_path / "base", dtype="bfloat16")
    load_unsplit(str(base), "nf4", "bfloat16", "cpu").save_pretrained(tmp_path / "packed")
    with loaded(tmp_path / "packed", {}, quant="auto", dtype="bfloat16", experts="nf4") as model:
        found = model.answer(IDS, max_new_tokens=4)
        assert model.plan.request.quant == "nf4" and model.plan.experts.bits_per_value == 4.5
    with loaded(base, {}, quant="nf4", dtype="bfloat16", experts="nf4") as model:
        assert model.answer(IDS, max_new_tokens=4).token_ids == found.token_ids


@pytest.mark.parametrize("value", [float("nan"), 3e38])
def test_an_expert_that_q8_0_cannot_hold_is_named(value: float, tmp_path: Path) -> None:
    base = pico.build("qwen3_moe", tmp_path / "base")

    def damage(tensors: dict[str, Tensor]) -> None:
        next(value for name, value in tensors.items() if name.endswith("experts.3.down_proj.weight"))[5, 7] = value

    edited(base, damage)
    words = "an expert has values that are NaN, infinite or too large for Q8_0"
    assert str(raised(CheckpointError, loaded, base, {}, experts="int8", match=words).tensor_name).endswith("experts.down_proj")


def test_experts_that_cannot_be_packed_are_refused_before_loading(tmp_path: Path) -> None:
    def refused(base: Path, **options: Any) -> RequestError:
        error = raised(RequestError, trimtab.plan, base, **{"quant": "none", "device": "cpu", "experts": "nf4"} | options)
        assert error.field == "experts"
        return error

    odd = refused(build("gpt_oss", tmp_path / "odd"))
    assert odd.allowed == ("auto", "16bit") and str(odd).count("rows of 80 values, no multiple of the block of 64") == 2
    assert str(odd).count("rows of 48 values") == 2
    assert "the model has no stacked experts" in str(refused(pico.build("llama", tmp_path / "dense")))
    assert refused(tmp_path / "dense", experts="nf3").allowed == ("auto", "16bit", "nf4", "nf4-dq", "int8")
    assert "no multiple of the block of 32" in str(refused(tmp_path / "odd", experts="int8"))
