"""The check of a merge finds what is wrong in written files, and says how large the error of each change is."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests import merged_models, pico
from tests.raised import raised
from trimtab.errors import AdapterError, ParityError
from trimtab.merging import MergeReport, merge
from trimtab.merging.check import ulp

CHANGED = "model.layers.0.self_attn.q_proj.weight"
OTHER = "model.layers.1.input_layernorm.weight"


def harm(monkeypatch: pytest.MonkeyPatch, tensor_name: str, change: Any) -> None:
    """Change a tensor of the written files just before they are checked."""
    module = sys.modules["trimtab.merging.merge"]
    own = module._check_loads

    def harming(folder: Path, work: Any) -> None:
        own(folder, work)
        for file in folder.glob("*.safetensors"):
            tensors = load_file(file)
            if tensor_name in tensors:
                with safe_open(file, "pt") as opened:
                    metadata = opened.metadata()
                tensors[tensor_name] = change(tensors[tensor_name])
                save_file(tensors, file, metadata=metadata)

    monkeypatch.setattr(module, "_check_loads", harming)


def one_step(tensor: Tensor) -> Tensor:
    """Return the tensor with its first value at the next number of its dtype."""
    bits = tensor.clone().view(torch.int16)
    bits.view(-1)[0] += 1
    return bits.view(tensor.dtype)


@pytest.mark.parametrize("name", [CHANGED, OTHER])
def test_one_step_in_one_value_of_one_tensor_is_found_and_nothing_is_left(
    name: str, base: Path, adapter: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    harm(monkeypatch, name, one_step)
    error = raised(ParityError, merge, base, tmp_path / "out", adapters={"a": adapter}, check=True)
    assert name in str(error) and str(error).startswith("1 tensors of the merged model are wrong")
    assert merged_models.left_over(tmp_path) == []


def test_a_change_that_was_left_out_is_found(base: Path, adapter: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    old = merged_models.tensors_of(base)[CHANGED]
    harm(monkeypatch, CHANGED, lambda _: old.clone())
    with pytest.raises(ParityError, match=CHANGED):
        merge(base, tmp_path / "out", adapters={"a": adapter}, check=True)


def test_one_wrong_byte_of_a_packed_weight_is_found(base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    harm(monkeypatch, CHANGED, lambda packed: packed ^ torch.tensor([[1]] + [[0]] * (len(packed) - 1), dtype=torch.uint8))
    with pytest.raises(ParityError, match=CHANGED):
        merge(base, tmp_path / "out", requantize="nf4", check=True)


@pytest.mark.parametrize(("form", "factor"), [(None, 2.0), ("nf4", 1.01), ("nf4-dq", 1.01)])
def test_a_wrong_scale_does_not_pass_although_writer_and_check_read_the_same_adapter_and_packing_again_gives_the_same_bytes(
    form: str | None, factor: float, base: Path, adapter: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The two compute apart: one in float32 by PEFT's steps, the other in float64 from the factors.
    from trimtab.merging.changes.delta import Change

    delta = Change.delta

    def scaled(self: Change, start: int, stop: int) -> Tensor | None:
        found = delta(self, start, stop)
        return None if found is None else found * factor

    monkeypatch.setattr(Change, "delta", scaled)
    error = raised(ParityError, merge, base, tmp_path / "out", adapters={"a": adapter}, check=True, requantize=form)
    assert str(error).startswith("14 tensors")
    assert form is not None or ("(2 of its change is present)" in str(error) and error.max_abs > 1)


def test_a_packed_value_is_right_under_the_scale_in_the_file_whichever_was_chosen(
    base: Path, adapter: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sums in another order may choose another scale that is as good; the values have to follow from it."""
    from trimtab.engine.formats import coded_files

    calls = 0
    own = coded_files.choose_scales

    def another(blocks: Tensor, shares: Any = None) -> Tensor:
        nonlocal calls
        calls += 1
        found = own(blocks, shares)
        # Every call gives a scale that differs in its last bits.
        return found * (1 + calls * 2.0**-22)

    monkeypatch.setattr(coded_files, "choose_scales", another)
    report = merge(base, tmp_path / "out", adapters={"a": adapter}, check=True, requantize="nf4")
    assert report.check is not None and report.check.passed and len(report.check.changed) == 14
    assert calls > 14


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_the_number_of_threads_is_no_fault(threads: int, base: Path, adapter: Path, tmp_path: Path) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        report = merge(base, tmp_path / "out", adapters={"a": adapter}, check=True, requantize="nf4-dq")
    finally:
        torch.set_num_threads(before)
    assert report.check is not None and report.check.passed


def test_what_rounding_hides_is_said(base: Path, adapter: Path, tmp_path: Path) -> None:
    """At a thousandth of its weight, of most tensors not one value would be another with a scale off by 1 %."""
    report = merge(base, tmp_path / "out", adapters={"a": (adapter, 1e-6)}, check=True)
    found = report.check
    assert found is not None and found.passed
    assert len(found.blind) > 0 and found.to_json()["blind"] == list(found.blind)
    assert f"cannot detect  a scale that is wrong by 1 % in {len(found.blind)} tensors" in str(report)
    assert all(tensor.slope is None or 0.99 < tensor.slope < 1.01 for tensor in found.changed)


def test_a_parameter_that_goes_back_through_several_tensors_is_computed_apart(
    base: Path, adapter: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such a parameter is written whole; the check computes it in float64 and not by the writer's code."""
    from trimtab.merging.changes.delta import Change
    from trimtab.merging.changes.plan import Edit

    monkeypatch.setattr(Edit, "by_rows", property(lambda self: False))
    report = merge(base, tmp_path / "out", adapters={"a": adapter}, check=True)
    assert report.check is not None and report.check.passed and len(report.check.changed) == 14
    delta = Change.delta
    monkeypatch.setattr(Change, "delta", lambda self, start, stop: 1.01 * delta(self, start, stop))
    with pytest.raises(ParityError, match=r"14 tensors .*\(1\.01 of its change is present\)"):
        merge(base, tmp_path / "again", adapters={"a": adapter}, check=True)


def test_the_report_counts_changes_and_equal_tensors(base: Path, adapter: Path, tmp_path: Path) -> None:
    report = merge(base, tmp_path / "out", adapters={"a": adapter}, check=True)
    found = report.check
    assert found is not None
    assert (found.applied, len(found.changed), found.equal, found.not_equal) == (14, 14, 7, ())
    # Half a step is the most that rounding once can do; the float32 sums before are 2^16 times finer than bfloat16.
    assert 0.4 < found.error_ulps <= 0.5 + 2**-10 and all(0.9 < (tensor.survival or 0) < 1.1 for tensor in found.changed)
    assert "14 of 14 changes applied" in str(report)
    assert "false-alarm rate 0: the bound of each value holds for every order of summation" in str(report)
    assert all(tensor.visible > 0 for tensor in found.changed) and found.blind == ()
    assert found.slopes == pytest.approx((1.0, 1.0), abs=1e-4)
    assert report.to_json()["check"]["passed"] is True and report.to_json()["check"]["false_alarm_rate"] == 0.0
    assert isinstance(report, MergeReport)


def test_a_step_of_a_dtype_is_the_distance_to_the_next_number() -> None:
    values = torch.tensor([1.0, 1.5, 2.0, 0.75, -3.0, 0.0, 1e-30])
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        rounded = values.to(dtype)
        bits = rounded.abs().view(torch.int32 if dtype is torch.float32 else torch.int16)
        following = (bits + 1).view(dtype).double() - rounded.abs().double()
        assert torch.equal(ulp(rounded, dtype), following)


def test_an_adapter_that_replaced_values_does_not_come_out_again(base: Path, tmp_path: Path) -> None:
    adapter = pico.adapter(base, tmp_path / "dora", dora=True)
    merge(base, tmp_path / "with", adapters={"a": adapter})
    error = raised(AdapterError, merge, tmp_path / "with", tmp_path / "without", adapters={"a": (adapter, -1)})
    assert error.problems[0].startswith("use_dora")
    # On a base that does not hold it a negative weight is a weight.
    merge(base, tmp_path / "less", adapters={"a": (adapter, -0.5)}, check=True)
