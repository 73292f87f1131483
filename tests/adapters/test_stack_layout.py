"""Adapters on stacked experts mean what the release of PEFT that wrote them computes, also where shapes do not show its layout.

tests/data/peft/stack_layouts.json holds what each release computed (PEFT 0.17.0 to 0.21.2, run one by one).
"""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from tests import ROOT, pico
from tests.merged_models import state_of
from tests.merging.changes.test_merge_experts import stack_adapter
from trimtab.adapters.stack_layout import layout_of_release
from trimtab.errors import AdapterError
from trimtab.merging import merge
from trimtab.merging.changes.experts import StackPair, read_with_stacks

RECORD = json.loads((ROOT / "tests" / "data/peft/stack_layouts.json").read_text(encoding="utf-8"))["releases"]
UNSURE = ("0.19.0", "transposed")  # its transformers may have marked the stack or not


class Experts(nn.Module):
    def __init__(self, shape: tuple[int, ...], *, is_transposed: bool) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros(shape))
        self.is_transposed = is_transposed


def change_of(folder: Path, pairs: dict[str, dict[str, Any]], version: str | None) -> dict[str, torch.Tensor]:
    """Return the change of each stack, by module name. pairs: module name -> its part of the record."""
    model = nn.Module()
    tensors, folder = {}, folder / "adapter"
    folder.mkdir()
    for name, pair in pairs.items():
        shape = torch.tensor(pair["change"]).shape
        model.add_module(name, Experts(tuple(shape), is_transposed="transposed" in name))
        for role in "AB":
            tensors[f"base_model.model.{name}.lora_{role}.weight"] = torch.tensor(pair[role]).float()
    save_file(tensors, folder / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": 2, "lora_alpha": 6, "target_modules": [], "target_parameters": ["w"]}
    config |= {} if version is None else {"peft_version": version}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    probe: Any = SimpleNamespace(model=model, sources={})
    _, stacks = read_with_stacks(str(folder), probe, {})

    def made(pair: StackPair) -> torch.Tensor:
        left, right = pair.factors(lambda entry: tensors[entry.tensor_name])
        return left @ right * pair.scale

    return {path.removesuffix(".w"): made(pair) for path, pair in stacks.by_parameter.items()}


@pytest.mark.parametrize("kind", RECORD["0.21.2"])
@pytest.mark.parametrize("release", RECORD)
def test_a_pair_changes_its_stack_as_its_release_does(release: str, kind: str, tmp_path: Path) -> None:
    name, pair = kind.replace(" ", "_"), RECORD[release][kind]
    if (release, kind) == UNSURE:
        with pytest.raises(AdapterError, match=r"peft_version is '0\.19\.0'"):
            change_of(tmp_path, {name: pair}, release)
        return
    assert torch.equal(change_of(tmp_path, {name: pair}, release)[name], torch.tensor(pair["change"]).float())


@pytest.mark.parametrize("release", ["0.17.1", "0.18.1", "0.19.0", "0.21.2"])
@pytest.mark.parametrize("kind", ["plain", "transposed"])
def test_other_pairs_of_the_file_show_the_layout_of_a_square_one(release: str, kind: str, tmp_path: Path) -> None:
    pairs = {kind: RECORD[release][kind], f"{kind}_oblong": RECORD[release][f"{kind} oblong"]}
    found = change_of(tmp_path, pairs, None)
    assert {name: change.tolist() for name, change in found.items()} == {name: pair["change"] for name, pair in pairs.items()}


@pytest.mark.parametrize("version", [None, "0.18.2.dev0@1a2b3c", "0.19.0.dev0", "0.19.1.dev0@UNKNOWN", "main", "", "9" * 5000])
def test_a_square_pair_of_an_unknown_layout_is_refused(version: str | None, tmp_path: Path) -> None:
    with pytest.raises(AdapterError) as caught:
        change_of(tmp_path, {"plain": RECORD["0.18.1"]["plain"]}, version)
    (problem,) = caught.value.problems
    assert "plain.w: the shapes are square and peft_version is" in problem
    assert "PEFT 0.17 and 0.18" in problem


@pytest.mark.parametrize("names", ["w", {"w": 1}, [1], [""]])
def test_names_of_parameters_are_a_list(names: object, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    dumps = json.dumps
    monkeypatch.setattr(json, "dumps", lambda config: dumps({**config, "target_parameters": names}))
    with pytest.raises(AdapterError, match="must be a list of names"):
        change_of(tmp_path, {"plain": RECORD["0.18.1"]["plain"]}, "0.18.1")


@pytest.mark.parametrize(
    ("version", "same_as"),
    [("0.22.0", "0.21.2"), ("0.19.2.dev0@ff", "0.21.2"), ("0.18.0rc1", "0.18.0"), ("0.18.1.post1", "0.18.1")],
)
def test_releases_that_are_not_recorded_go_with_their_neighbours(version: str, same_as: str) -> None:
    for kind in ("plain", "transposed"):
        layouts = [layout_of_release(one, is_transposed=kind == "transposed") for one in (version, same_as)]
        assert layouts[0] == layouts[1] is not None


def test_a_square_stack_of_a_real_model_is_merged_as_peft_018_does(tmp_path: Path) -> None:
    base = pico.build("qwen3_moe", tmp_path / "base", dtype="float32")
    adapter = stack_adapter(base, tmp_path / "adapter", ["experts.down_proj"])
    tensors = load_file(adapter / "adapter_model.safetensors")
    config = json.loads((adapter / "adapter_config.json").read_text())
    old, changed = state_of(base), 0
    for version in ("0.18.1", config["peft_version"]):
        (adapter / "adapter_config.json").write_text(json.dumps(config | {"peft_version": version}))
        report = merge(base, tmp_path / version, adapters={"a": adapter}, check=True)
        assert report.check is not None
        assert report.check.passed
        assert any("layout of PEFT 0.18" in note for note in report.notes) == (version == "0.18.1")
        new = state_of(tmp_path / version)
        for name, weight in old.items():
            if not name.endswith("experts.down_proj"):
                continue
            stem = f"base_model.model.{name.removesuffix('.down_proj')}.lora_"
            A, B = tensors[f"{stem}A.weight"].double(), tensors[f"{stem}B.weight"].double()
            A, B = A.reshape(4, -1, A.shape[1]), B.reshape(B.shape[0], -1, 4)
            # PEFT 0.18.1, ParamWrapper.get_delta_weight; and 0.19.1's
            how = "o r e, e r i -> e i o" if version == "0.18.1" else "o r e, e r i -> e o i"
            change = torch.einsum(how, B, A) * 7 / 3
            assert torch.allclose(new[name].double(), weight.double() + change, atol=1e-6)
            assert not torch.allclose(change, change.mT, atol=1e-3)
            changed += 1
    assert changed == 2  # the stack of the one layer with experts, by two releases
