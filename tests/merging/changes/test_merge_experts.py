"""Changes of stacked experts reach the right file tensors, and parameters that a loader cuts or turns go back the way they came."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests import pico
from tests.long_runs import crossed
from tests.merged_models import load, peft_merged, state_of, tensors_of
from tests.raised import raised
from trimtab.engine.loader.tracing import Expression, Trace
from trimtab.errors import AdapterError
from trimtab.merging import merge
from trimtab.merging.changes.experts import slices
from trimtab.merging.changes.inverse import CannotLayBackError, is_cast, lay_back, without_casts
from trimtab.merging.files import write

BOTH = ["experts.gate_up_proj", "experts.down_proj"]


def stack_adapter(base: Path, folder: Path, names: list[str], **options: object) -> Path:
    from peft import LoraConfig, get_peft_model

    model = load(base)
    targets = next(
        path for path, _ in model.named_modules() if re.search(r"^model\.(language_model\.)?layers\.\d+\..*q_proj$", path)
    )
    config = LoraConfig(r=3, lora_alpha=7, target_modules=[targets], target_parameters=names, **options)
    model = get_peft_model(model, config)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for path, parameter in model.named_parameters():
            if "lora_" in path:
                parameter.copy_(0.1 * torch.randn(parameter.shape, generator=generator))
    model.save_pretrained(folder)
    return folder


ADAPTED = {"both": BOTH, "gate_up": BOTH[:1], "down": BOTH[1:]}


@pytest.mark.parametrize(("family", "adapted"), crossed(["mixtral", "qwen3_moe", "gemma4_moe"], ADAPTED, first=["mixtral"], rest=1))
def test_stacked_experts_equal_pefts_merge(family: str, adapted: str, tmp_path: Path) -> None:
    # Mixtral and Qwen store every expert's matrices apart, Gemma 4 the whole stack.
    base = pico.build(family, tmp_path / "base", dtype="float32", shards=2)
    adapter = stack_adapter(base, tmp_path / "adapter", ADAPTED[adapted], rank_pattern={"down_proj": 2}, use_rslora=True)
    report = merge(base, tmp_path / "out", adapters={"a": adapter}, check=True)
    assert report.check is not None and report.check.passed
    expected, found = peft_merged(base, adapter), state_of(tmp_path / "out")
    old = state_of(base)
    changed = {name for name in old if not torch.equal(old[name], found[name])}
    assert any("experts" in name for name in changed)
    # Another kernel multiplies a stack than a matrix: each sums three or fewer products in an order of its own, and
    # the sum with the base rounds once more.
    assert max(ulps_of_terms(found[name], expected[name], old[name]) for name in found) <= 1
    assert {name for name in old if not torch.equal(old[name], expected[name])} == changed


def ulps_of_terms(a: Tensor, b: Tensor, base: Tensor) -> float:
    size = torch.maximum(torch.maximum(a.abs(), base.abs()), torch.tensor(2.0**-6))
    return float(((a - b).abs() / (size * 2.0**-23)).max())


def test_pairs_of_another_stack_are_refused_all_at_once(tmp_path: Path) -> None:
    base = pico.build("mixtral", tmp_path / "base")
    adapter = stack_adapter(base, tmp_path / "adapter", BOTH)
    found = load_file(adapter / "adapter_model.safetensors")
    stem = "base_model.model.model.layers.0.mlp.experts"
    found[f"{stem}.lora_A.weight"] = torch.zeros(9, 128)
    del found[f"{stem}.base_layer.lora_B.weight"]
    save_file(found, adapter / "adapter_model.safetensors")
    error = raised(AdapterError, merge, base, tmp_path / "out", adapters={"a": adapter})
    words = "\n".join(error.problems)
    assert len(error.problems) == 2
    assert "lora_A or lora_B of gate_up_proj is missing" in words and "has pairs of [9, 128]" in words


# Ways back ------------------------------------------------------------------------------------------------------------

Make = Callable[[dict[str, Tensor]], Tensor]
SHAPES = {"a": (4, 6), "b": (4, 6), "c": (2, 6), "d": (12, 6)}
WAYS: dict[str, Make] = {
    "as it is": lambda t: t["a"],
    "cast": lambda t: t["a"].to(torch.float64).contiguous(),
    "turned": lambda t: t["a"].transpose(0, 1),
    "t": lambda t: t["a"].t(),
    "permuted": lambda t: t["a"].reshape(2, 2, 6).permute(2, 0, 1),
    "flat": lambda t: t["a"].flatten(),
    "joined": lambda t: torch.cat([t["a"], t["b"], t["c"]], dim=0),
    "joined sideways": lambda t: torch.cat([t["a"], t["b"]], dim=1),
    "stacked": lambda t: torch.stack([t["a"], t["b"]], dim=0),
    "stacked, joined and turned": lambda t: torch.cat(
        [torch.stack([t["a"]]), torch.stack([t["b"]])], dim=1
    ).transpose(1, 2),
    "cut": lambda t: t["d"].chunk(3, dim=0)[1],
    "split": lambda t: torch.split(t["d"], 4, dim=0)[2],
    "row by row": lambda t: t["d"][2:8],
    "cut and turned": lambda t: t["d"].chunk(3)[0].transpose(0, 1),
}  # fmt: skip


def traced(make: Make) -> tuple[Any, dict[str, Tensor]]:
    trace = Trace(lambda a, b: False)
    made: Any = make({name: trace.tensor(name, shape, torch.float32) for name, shape in SHAPES.items()})
    generator = torch.Generator().manual_seed(0)
    return made.expression, {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}


@pytest.mark.parametrize("way", WAYS)
def test_what_goes_back_makes_the_changed_parameter_again(way: str) -> None:
    expression, files = traced(WAYS[way])
    wanted = without_casts(expression, files.__getitem__) + 1
    new = {name: tensor.clone() for name, tensor in files.items()}
    for leaf in expression.leaves:
        lay_back(expression, leaf, wanted, new[leaf], SHAPES)
    assert torch.equal(without_casts(expression, new.__getitem__), wanted)
    changed = sum(int((new[name] != files[name]).sum()) for name in files)
    assert changed == wanted.numel()  # nothing beside it
    assert is_cast(expression) == (way in ("as it is", "cast"))


@pytest.mark.parametrize("make", [
    lambda t: t["a"] * 2, lambda t: t["a"].flip(0), lambda t: torch.cat([t["a"], t["a"]]), lambda t: t["d"][[1, 2]],
], ids=["product", "flip", "twice", "picked rows"])  # fmt: skip
def test_what_has_no_known_way_back_is_refused(make: Make) -> None:
    expression, files = traced(make)
    parameter = without_casts(expression, files.__getitem__)
    with pytest.raises(CannotLayBackError):
        lay_back(expression, expression.leaves[0], parameter, files[expression.leaves[0]], SHAPES)


def remade(monkeypatch: pytest.MonkeyPatch, func: Any, *args: Any) -> None:
    """Make the loader appear to make every q_proj through one more operation."""
    from trimtab.merging.changes import plan

    make = plan.make_recipe

    def through(adapters: Any, checkpoint: Any, found: Any, rows: Any) -> Any:
        for name in list(found.sources):
            if name.endswith("q_proj.weight"):
                found.sources[name] = Expression(func=func, args=(found.sources[name], *args))
        return make(adapters, checkpoint, found, rows)

    monkeypatch.setattr(plan, "make_recipe", through)


def test_a_parameter_without_a_way_back_is_refused_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    base = pico.build("llama", tmp_path / "base")
    adapter = pico.adapter(base, tmp_path / "adapter")
    remade(monkeypatch, torch.mul, 2)
    error = raised(AdapterError, merge, base, tmp_path / "out", adapters={"a": adapter})
    assert len(error.problems) == 2 and "model.layers.0.self_attn.q_proj.weight is made of" in error.problems[0]
    assert "mul" in error.problems[0]
    assert not (tmp_path / "out").exists()


def test_a_parameter_that_goes_back_through_an_operation_merges_to_the_same_values(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    base = pico.build("llama", tmp_path / "base", dtype="float32")
    adapter = pico.adapter(base, tmp_path / "adapter", dora=True)
    merge(base, tmp_path / "expected", adapters={"a": adapter})
    remade(monkeypatch, torch.Tensor.reshape, (128, 64))
    report = merge(base, tmp_path / "out", adapters={"a": adapter}, check=True)
    assert report.check is not None and report.check.passed
    out, expected = tensors_of(tmp_path / "out"), tensors_of(tmp_path / "expected")
    # Products of other numbers of rows at a time.
    assert max(ulps_of_terms(out[name], expected[name], expected[name]) for name in out) <= 2


def test_slices_name_expert_rows_and_columns() -> None:
    expression, _ = traced(lambda t: torch.cat([torch.stack([t["a"], t["b"]]), torch.stack([t["c"]] * 2)], dim=1))
    found = slices(expression, SHAPES)
    assert found is not None and (found["a"].expert, found["b"].expert) == (0, 1)
    assert found["a"].rows == (0, 4) and found["c"].rows == (4, 6)
    other, _ = traced(lambda t: torch.stack([t["a"], t["b"]], dim=1))
    assert slices(other, SHAPES) is None
    cast, _ = traced(
        lambda t: torch.cat([torch.stack([t["a"].to(torch.float64), t["b"]]).to(torch.float64)], dim=1).to(torch.float32)
    )
    parts = slices(cast, SHAPES)
    assert parts is not None and (parts["a"].expert, parts["b"].expert) == (0, 1)


def test_experts_apart_are_merged_one_by_one_in_another_dtype_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    base = pico.build("mixtral", tmp_path / "base")
    adapter = stack_adapter(base, tmp_path / "adapter", BOTH)
    merge(base, tmp_path / "expected", adapters={"a": adapter})
    monkeypatch.setattr(write, "_laid_back", None)  # which makes whole stacks
    report = merge(base, tmp_path / "out", adapters={"a": adapter}, dtype="float32", check=True)
    assert report.check is not None and report.check.passed
    out, rounded = tensors_of(tmp_path / "out"), tensors_of(tmp_path / "expected")
    assert all(torch.equal(out[name].bfloat16(), value) for name, value in rounded.items())
